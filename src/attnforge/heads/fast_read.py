"""One exponential per element: anchor heads on an even lattice without a softmax over p logits (lemma A8).

The head that is evaluated has p keys k = -(p-1)/2, ..., (p-1)/2 (whole or half numbers), logits
rate k (y - centre) - kappa k^2 and one value a key: evenly spaced anchors, 2 kappa / rate apart. Optionally a gate
y sigmoid(gate y), a self head of its own (lemma B4), is added. With theta = rate (y - centre) and q = exp(-|theta|):

- *lattice form* (few anchors): sum_k c_k V_k e^(k theta) is a polynomial in q + 1/q plus sinh(theta) times another.
  With s = q/(1 + q^2) and t = tanh(theta) the head is (P(s) + t R(s)) / Q(s), three polynomials of degree (p-1)/2: no
  gathers, no truncation, and R = 0 where the values are symmetric.
- *window form* (many anchors, or cold ones): 2J+1 anchors around the nearest, always inside the table, so that nothing
  is masked: a polynomial of degree 2J in q = exp(-2 kappa |r|), r the distance to the window's middle in anchors.
- *pair form* (cold anchors): only the two that y lies between matter, one sigmoid.

`fast.anchor_read` is the operator made of this; how far it can be from the softmax is `fast_bound.read_error`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

LARGEST = {torch.float32: 75.0, torch.float64: 600.0}  # log of the largest coefficient of the lattice form
WIDEST = {torch.float32: 140.0, torch.float64: 1200.0}  # kappa K^2 up to which the lattice form is used
COLD = {torch.float32: 17.0, torch.float64: 37.0}  # kappa from which exp(-kappa) is below a roundoff
MOST_LATTICE = 129  # and anchors: beyond, a window is shorter


Made = TypeVar("Made", bound=Callable[..., object])


def known(make: Made) -> Made:
    """Mark `make` to be run while tracing, its result a constant of the compiled program: what
    `torch.compiler.assume_constant_result` does, which would load the compiler already here."""
    make.__dict__["_dynamo_marked_constant"] = True
    return make


@known
def exporting() -> bool:
    """Whether a graph is exported. Tracers before PyTorch 2.13 take `torch.compiler.is_exporting()` to be true in
    every compiled program; here it is asked, not traced."""
    return bool(torch.compiler.is_exporting())


def packed(*numbers: float) -> str:
    """Numbers as text: compilers may make a number of a module a variable of the program, never a text."""
    return " ".join(float(number).hex() for number in numbers)


@known
def unpacked(text: str) -> tuple[float, ...]:
    """The numbers, as constants of a compiled program.

    >>> unpacked(packed(0.1, -2.0))
    (0.1, -2.0)
    """
    return tuple(float.fromhex(number) for number in text.split())


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a head of this dtype is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dropped(kappa: float, reach: int, off: float = 0.0) -> float:
    """Upper bound of the weight outside a window, m_J of lemma A8; `off`: how far beyond 1/2 |r| may be.

    >>> dropped(0.25, 8) < 3.2e-8
    True
    """
    total, i = 0.0, reach + 1
    while True:
        term = math.exp(-kappa * (i * i - i * (1.0 + 2.0 * off)))
        total += 2.0 * term
        if term < 1e-30 * total or term < 1e-320:
            return total * (1 + 1e-12) + 1e-300  # what is left is far below the slack: terms more than halve
        i += 1


@known
def reach_for(kappa: float, dtype: torch.dtype) -> int:
    """The smallest J whose window leaves out less than a roundoff."""
    return _reach_for(kappa, 2.0**-24 if working(dtype) == torch.float32 else 2.0**-53)


@functools.lru_cache(maxsize=512)
def _reach_for(kappa: float, wanted: float) -> int:
    reach = 1
    while dropped(kappa, reach) > wanted:
        reach += 1
    return reach


Form = Literal["lattice", "window", "pair"]


@known
def form_of(anchors: int, kappa: float, dtype: torch.dtype) -> Form:
    """How a table is read: all of it, through a window, or by pairs.

    >>> [form_of(p, kappa, torch.float32) for p, kappa in ((33, 0.5), (1000, 0.5), (33, 20.0))]
    ['lattice', 'window', 'pair']
    """
    work = working(dtype)
    if anchors == 0:
        return "lattice"
    if kappa >= COLD[work]:
        return "pair"
    wide = kappa * ((anchors - 1) / 2) ** 2 > WIDEST[work] or anchors > MOST_LATTICE
    return "window" if wide and anchors > 2 * reach_for(kappa, dtype) + 1 else "lattice"


@functools.lru_cache(maxsize=64)
def lattice(anchors: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients in s, lowest first, of s^K 2 cosh(k theta) and of s^K 2 sinh(k theta) / t; rows: k >= 0.

    Both follow X_(k+1) = X_k / s - X_(k-1), in whole numbers. With an even number of anchors k is half a number, and
    both are divided by 2 cosh(theta/2), so that t = tanh(theta/2).

    >>> lattice(5)[0].astype(int).tolist()
    [[0, 0, 1], [0, 1, 0], [1, 0, -2]]
    """
    rows = (anchors + 1) // 2
    degree = rows - 1
    if anchors % 2:  # 2 cosh: 2, X, ...; 2 sinh: 0, 2 sinh theta, ...  (t / s = 2 sinh theta)
        even, odd = [[2.0], [0.0, 1.0]], [[0.0], [0.0, 1.0]]
    else:  # divided by 2 cosh(theta/2): 1, X - 1, ... and 1, X + 1, ...
        even, odd = [[1.0], [-1.0, 1.0]], [[1.0], [1.0, 1.0]]
    for family in (even, odd):
        for k in range(2, rows):
            up, down = [0.0, *family[k - 1]], [*family[k - 2], 0.0, 0.0]
            family.append([a - b for a, b in zip(up, down, strict=True)])
    if anchors % 2:
        even[0] = [1.0]  # k = 0 is there once
    tables = np.zeros((2, rows, rows))
    for table, family in zip(tables, (even, odd), strict=True):
        for k in range(rows):
            table[k, degree - np.arange(len(family[k]))] = family[k]
    return tables[0], tables[1]


@functools.lru_cache(maxsize=256)
def masses(anchors: int, kappa: float, dtype: torch.dtype) -> np.ndarray:
    """exp(-kappa k^2) for k >= 0, times a constant that keeps the smallest away from underflow in `dtype`."""
    k = np.arange((anchors + 1) // 2) + (0.0 if anchors % 2 else 0.5)
    shift = min(kappa * float(k[-1]) ** 2, LARGEST[working(dtype)])
    return np.exp(shift - kappa * k * k)


_BASES: dict[tuple[int, float, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}


def basis(anchors: int, kappa: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Q, and the matrix that takes a table of values to [P, R], in float64 on a device; made once."""
    key = (anchors, kappa, working(dtype), device)
    if key not in _BASES:
        even, odd = lattice(anchors)
        mass = masses(anchors, kappa, dtype)[:, None]
        halves = np.concatenate([mass * even, mass * odd], 1) / 2  # halving is exact
        right = np.concatenate([np.zeros((anchors // 2, halves.shape[1])), halves])
        left = right[::-1] * np.repeat([1.0, -1.0], len(mass))  # k and -k: the same in P, opposite in R
        total = torch.as_tensor((mass * even).sum(0), dtype=torch.float64, device=device)
        _BASES[key] = total, torch.as_tensor(np.ascontiguousarray(right + left), dtype=torch.float64, device=device)
    return _BASES[key]


def polynomials(columns: Tensor, kappa: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Q (degree+1), P and R (column, degree+1) of the lattice form in float64, lowest power of s first."""
    total, matrix = basis(columns.shape[-1], kappa, dtype, columns.device)
    even, odd = (columns.double() @ matrix).tensor_split(2, -1)
    return total, even, odd


@dataclass
class Room:
    """Temporaries by name, used again and again on a processor; without any, operations make their own."""

    like: Tensor | None = None
    size: int = 0
    held: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, count: int) -> Tensor | None:
        if self.like is None:
            return None
        if name not in self.held:
            self.held[name] = self.like.new_empty(self.size)
        return self.held[name][:count]


def _horner(coefficient: tuple[Tensor, ...], s: Tensor, out: Tensor | None) -> Tensor:
    """sum_j coefficient_j s^j; one pass a degree."""
    if len(coefficient) == 1:
        return torch.mul(torch.ones_like(s), coefficient[0], out=out)
    total = torch.mul(s, coefficient[-1], out=out)
    total = torch.add(total, coefficient[-2], out=out)
    for c in coefficient[-3::-1]:
        total = torch.addcmul(c, total, s, out=out)
    return total


@dataclass(frozen=True)
class Reading:
    """A table prepared for reading: what does not depend on y."""

    rate: float
    kappa: float
    centre: float
    gate: float
    anchors: int
    form: Form
    #: lattice: P and R; window: a table for each j = -J, ..., J; pair: a table of values and one of their differences
    columns: tuple[tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None], ...]
    total: tuple[Tensor, ...]  # lattice: Q, then 1; window: exp(-kappa j^2)

    @classmethod
    def of(cls, columns: Tensor, rate: float, kappa: float, centre: float, gate: float, dtype: torch.dtype) -> Reading:
        """`columns` holds a table of values in each row; `dtype` is that of y."""
        anchors, work = columns.shape[-1], working(dtype)
        form = form_of(anchors, kappa, dtype)
        given = (rate, kappa, centre, gate, anchors, form)
        if anchors == 0:
            return cls(*given, (), ())
        if form == "lattice":
            total, even, odd = polynomials(columns, kappa, dtype)
            one = torch.ones((), dtype=work, device=columns.device)
            symmetric = columns.device.type == "cpu" and torch.equal(columns, columns.flip(-1))
            parts = tuple(
                (e.unbind(), None if symmetric else o.unbind())
                for e, o in zip(even.to(work), odd.to(work), strict=True)
            )
            return cls(*given, parts, (*total.to(work).unbind(), one))
        if form == "pair":
            step = columns.double().diff(dim=-1).to(work)
            first = columns[..., :-1].to(work)
            return cls(*given, tuple(((v.contiguous(), d), None) for v, d in zip(first, step, strict=True)), ())
        reach = reach_for(kappa, dtype)
        c = torch.exp(-kappa * torch.arange(-reach, reach + 1, dtype=torch.float64, device=columns.device) ** 2)
        seen = columns.double().unfold(-1, 2 * reach + 1, 1)  # (column, middle, j)
        both = torch.cat([seen * c, seen.flip(-1) * c], -2).to(work)  # first for r >= 0, then mirrored for r < 0
        tables = tuple((tuple(t.contiguous() for t in one.unbind(-1)), None) for one in both)
        return cls(*given, tables, tuple(c.to(work).unbind()))

    def means(self, y: Tensor, room: Room) -> list[Tensor]:
        """The softmax means of the columns at y, a flat tensor in the working dtype."""
        n = y.numel()
        at = torch.sub(y, self.centre, out=room("at", n)) if self.centre else y
        return {"lattice": self._whole, "window": self._window, "pair": self._pair}[self.form](at, room, n)

    def _variables(self, at: Tensor, room: Room, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, 1 + q^2 and s of the lattice form."""
        one = self.total[-1]
        q = torch.mul(torch.abs(at, out=room("q", n)), -self.rate, out=room("q", n))
        q = torch.exp(q, out=room("q", n))
        low = torch.addcmul(one, q, q, out=room("low", n))
        return q, low, torch.div(q, low, out=room("s", n))

    def _tilt(self, at: Tensor, q: Tensor, low: Tensor, room: Room, n: int) -> Tensor:
        """tanh(theta), or tanh(theta/2) between an even number of anchors."""
        one = self.total[-1]
        if self.anchors % 2:
            tilt = torch.addcmul(one, q, q, value=-1, out=room("tilt", n))
        else:
            low = torch.add(one, q, out=room("low", n))
            tilt = torch.sub(one, q, out=room("tilt", n))
        return torch.copysign(torch.div(tilt, low, out=room("tilt", n)), at, out=room("tilt", n))

    def _whole(self, at: Tensor, room: Room, n: int) -> list[Tensor]:
        q, low, s = self._variables(at, room, n)
        below = _horner(self.total[:-1], s, room("below", n))
        tilt: Tensor | None = None
        found = []
        for i, (even, odd) in enumerate(self.columns):
            above = _horner(even, s, room(f"above{i}", n))
            if odd is not None:
                tilt = self._tilt(at, q, low, room, n) if tilt is None else tilt
                side = _horner(odd, s, room("side", n))
                above = torch.addcmul(above, side, tilt, out=room(f"above{i}", n))
            found.append(torch.div(above, below, out=room(f"above{i}", n)))
        return found

    def pulled_back(self, y: Tensor, slope: Tensor, room: Room) -> Tensor:
        """The sum over y of slope times each anchor's weight (lattice form): the gradient of the values, in float64."""
        n = y.numel()
        at = torch.sub(y, self.centre, out=room("at", n)) if self.centre else y
        q, low, s = self._variables(at, room, n)
        share = torch.div(slope, _horner(self.total[:-1], s, room("below", n)), out=room("below", n))
        tilted = torch.mul(share, self._tilt(at, q, low, room, n), out=room("tilt", n))
        sums = []
        for one in (share, tilted):
            for _ in self.total[:-1]:  # sums of share s^j, then of tilted s^j
                sums.append(one.sum(dtype=torch.float64))
                one = torch.mul(one, s, out=room("power", n))
        _, matrix = basis(self.anchors, self.kappa, y.dtype, y.device)
        return matrix @ torch.stack(sums)

    def _window(self, at: Tensor, room: Room, n: int) -> list[Tensor]:
        reach, half = (len(self.total) - 1) // 2, 0.0 if self.anchors % 2 else 0.5
        most = (self.anchors - 1) / 2 - reach  # of |k0|: the window stays inside
        place = torch.mul(at, self.rate / (2 * self.kappa), out=room("place", n))
        middle = torch.floor(place, out=room("middle", n)) if half else torch.round(place, out=room("middle", n))
        middle = torch.add(middle, half, out=room("middle", n)) if half else middle
        middle = torch.clamp(middle, -most, most, out=room("middle", n))
        r = torch.sub(place, middle, out=room("place", n))
        index = torch.add(middle, most, out=room("middle", n)).to(torch.int32)
        index = index + (r < 0).to(torch.int32) * int(2 * most + 1)
        # without `out` this may be differentiated, and at r = 0 the right side's tables are used
        size = torch.where(r < 0, -r, r) if room.like is None else torch.abs(r, out=room("q", n))
        q = torch.mul(size, -2 * self.kappa, out=room("q", n))
        q = torch.exp(q, out=room("q", n))
        below = torch.add(torch.mul(q, self.total[0], out=room("below", n)), self.total[1], out=room("below", n))
        for c in self.total[2:]:
            below = torch.addcmul(c, below, q, out=room("below", n))
        found = []
        for i, (tables, _) in enumerate(self.columns):
            above = torch.index_select(tables[0], 0, index, out=room(f"above{i}", n))
            for table in tables[1:]:
                term = torch.index_select(table, 0, index, out=room("term", n))
                above = torch.addcmul(term, above, q, out=room(f"above{i}", n))
            found.append(torch.div(above, below, out=room(f"above{i}", n)))
        return found

    def _pair(self, at: Tensor, room: Room, n: int) -> list[Tensor]:
        half = 0.0 if self.anchors % 2 else 0.5  # keys are whole or half numbers
        least, most = -(self.anchors - 1) / 2, (self.anchors - 3) / 2
        place = torch.mul(at, self.rate / (2 * self.kappa), out=room("place", n))
        below = torch.floor(torch.sub(place, half, out=room("middle", n)), out=room("middle", n))
        below = torch.clamp(torch.add(below, half, out=room("middle", n)), least, most, out=room("middle", n))
        r = torch.sub(torch.sub(place, below, out=room("place", n)), 0.5, out=room("place", n))
        index = torch.sub(below, least, out=room("middle", n)).to(torch.int32)
        share = torch.sigmoid(torch.mul(r, 2 * self.kappa, out=room("q", n)), out=room("q", n))
        found = []
        for i, ((first, step), _) in enumerate(self.columns):
            low = torch.index_select(first, 0, index, out=room("low", n))
            rise = torch.index_select(step, 0, index, out=room("term", n))
            found.append(torch.addcmul(low, rise, share, out=room(f"above{i}", n)))
        return found

    def gated(self, head: Tensor | None, y: Tensor, room: Room, out: Tensor | None = None) -> Tensor:
        """head + y sigmoid(gate y), as relu(y) + (head - |y| q/(1+q)), q = exp(-gate |y|): exact where it saturates."""
        n = y.numel()
        size = torch.abs(y, out=room("at", n))
        if (
            self.anchors
            and self.gate == self.rate
            and not self.centre
            and self.form == "lattice"
            and room.like is not None
        ):
            q = room.held["q"][:n]  # the exponential that the table was read with
        else:
            q = torch.exp(torch.mul(size, -self.gate, out=room("q", n)), out=room("q", n))
        share = torch.div(q, torch.add(q, 1.0, out=room("low", n)), out=room("low", n))
        if head is None:
            inner = torch.mul(torch.neg(size, out=room("at", n)), share, out=room("above0", n))
        else:
            inner = torch.addcmul(head, size, share, value=-1, out=room("above0", n))
        return torch.add(inner, torch.clamp_min(y, 0.0, out=room("s", n)), out=out)
