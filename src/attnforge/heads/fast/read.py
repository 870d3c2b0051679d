"""`attnforge::anchor_read`: an anchor head on an even lattice with one exponential per element (lemma A8).

    h = anchor_read(y, value, rate, kappa)                  # softmax over p keys (rate k, -kappa k^2), values `value`
    h = anchor_read(y, value, rate, kappa, centre, gate)    # around `centre`, plus y sigmoid(gate y)

y has any shape, float64, float32, bfloat16 or float16 (halves are computed in float32); `value` is a table of p >= 2
numbers, float32 or float64; rate, kappa > 0, centre and gate are Python numbers. k runs from -(p-1)/2 to (p-1)/2, so
the anchors are centre + 2 kappa k / rate. gate = 0 means no gate; with a gate the table may be empty. Gradients flow to
y and to `value`. The result equals `softmax_read` with the same arguments up to `bound.read_error`; far outside its
anchors the head goes on as the last value (plus y or 0 from the gate), as the softmax does. The three forms are those
of `table`.

On a GPU one kernel of `heads.gpu` does it all, on a processor with a C compiler one of `native`; elsewhere the operator
works in passes over pieces that stay in the processor's cache. A compiler wants one expression per element: `read` is
the same computation as plain PyTorch. There the denominator's coefficients are numbers in the program, and the
numerator's follow from the values in one small sum, so that compiled modules train; everything else is pointwise, one
exponential and Horner's rule. Sizes |x| are written there as a choice of sides, with the derivative of the right side
at 0: sums of such terms that are smooth have the right gradient there, where that of `abs` would be 0. `softmax_read`
is the attention written out, for exports.
`evaluate` picks among the three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import native
from ...census import allow_custom
from ...dtypes import transformed
from ...errors import ArgumentError
from ...native import activation as processor
from ...network import exporting, known
from ..gpu import ready
from .expression import basis, decayed, lattice, lowers, totals
from .table import MOST_LATTICE, TableForm, form_of, reach_for, working

CACHED = 1 << 17  # elements a thread works on at once: a handful of temporaries stay in its cache
SOFTMAX = 1 << 20  # weights alive at once where the gradient of the values needs all of them
READ = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes of y; halves are widened inside
NAME = "attnforge::anchor_read"


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
class PreparedTable:
    """A table prepared for reading: what does not depend on y."""

    rate: float
    kappa: float
    centre: float
    gate: float
    anchors: int
    form: TableForm
    #: lattice: P and R; window: a table for each j = -J, ..., J; pair: a table of values and one of their differences
    columns: tuple[tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None], ...]
    total: tuple[Tensor, ...]  # lattice: Q, then 1; window: exp(-kappa j^2)

    @classmethod
    def of(
        cls, columns: Tensor, rate: float, kappa: float, centre: float, gate: float, dtype: torch.dtype
    ) -> PreparedTable:
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


@known
def _matrix(anchors: int, kappa: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What takes a table to the coefficients of P and R."""
    return basis(anchors, kappa, dtype, device)[1]


def read(
    y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0, even: bool = False,
    matrix: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`anchor_read` for compilers to fuse and differentiate; `even` promises value[i] = value[-1 - i].

    The numbers must be constants of the program that is compiled (`unpacked` makes them so). `matrix` is that of
    `basis` where a module keeps it: compilers of PyTorch 2.11 make a constant of a tensor once in a program only.

    >>> y, value = torch.linspace(-9, 9, 101), torch.linspace(-1, 1, 17)
    >>> compiled = torch.compile(read, backend="eager", fullgraph=True)
    >>> torch.equal(compiled(y, value, 1.0, 0.25), read(y, value, 1.0, 0.25))
    True
    """
    work, anchors = working(y.dtype), value.shape[0]
    x = y.to(work)
    if anchors and form_of(anchors, kappa, y.dtype) != "lattice":
        reading = PreparedTable.of(value.unsqueeze(0), rate, kappa, centre, 0.0, y.dtype)
        head = reading.means(x.reshape(-1), Room())[0].reshape(y.shape)
        return (_gated(head, x, gate) if gate else head).to(y.dtype)
    if not anchors:
        return _gated(None, x, gate).to(y.dtype)
    rows = (anchors + 1) // 2
    matrix = _matrix(anchors, kappa, y.dtype, y.device) if matrix is None else matrix
    # a sum of products rather than a matrix product: compilers fuse it with what makes the values
    parts = (value.double().unsqueeze(-1) * (matrix[:, :rows] if even else matrix)).sum(0).to(work)
    wanted = torch.is_grad_enabled() and (y.requires_grad or value.requires_grad)
    if torch.compiler.is_compiling() and not wanted and lowers():
        out: Tensor = torch.ops.attnforge.lattice_read(y, parts, anchors, rate, kappa, centre, gate, even)
        return out
    numbers = parts.unbind()
    out = lattice(x, totals(anchors, kappa, y.dtype), numbers[:rows], numbers[rows:], anchors, rate, centre, gate)
    return out.to(y.dtype)


def _gated(head: Tensor | None, x: Tensor, gate: float) -> Tensor:
    """head + x sigmoid(gate x)."""
    size, q = decayed(x, gate)
    fall = size * (q / (q + 1.0))
    return torch.where(x < 0, 0.0, x) + (-fall if head is None else head - fall)


@functools.lru_cache(maxsize=256)
def constants(anchors: int, rate: float, kappa: float, centre: float, gate: float, device: torch.device) -> Tensor:
    """[rate, centre, gate, Q] in float32 on a device: what of a table a kernel reads besides its values; made once."""
    total = totals(anchors, kappa, torch.float32) if anchors else ()
    return torch.tensor([rate, centre, gate, *total], dtype=torch.float64).to(device, torch.float32)


def _prepared(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float) -> Tensor | None:
    """The numbers of a table for the kernels of `heads.gpu`; None where there is no kernel for it, or for y."""
    if not ready(y) or value.device != y.device or form_of(value.shape[0], kappa, y.dtype) != "lattice":
        return None
    from ..gpu import activation

    anchors = value.shape[0]
    matrix = basis(anchors, kappa, y.dtype, y.device)[1] if anchors else None
    return activation.prepare(value.detach(), matrix, constants(anchors, rate, kappa, centre, gate, y.device))


def _on_processor(
    y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float, even: bool = False,
    outside: Tensor | None = None, low: float = 0.0, high: float = 0.0,
) -> processor.ReadyTable | None:  # fmt: skip
    """A table ready for the kernel of a processor; None where there is none for it, or for y."""
    anchors = value.shape[0]
    if value.device.type != "cpu" or form_of(anchors, kappa, y.dtype) != "lattice" or anchors > MOST_LATTICE:
        return None
    if (outside is not None and outside.device.type != "cpu") or not native.ready(y):
        return None
    given, matrix = value.detach(), basis(anchors, kappa, y.dtype, y.device)[1] if anchors else None
    numbers = processor.prepared(given, matrix, constants(anchors, rate, kappa, centre, gate, y.device))
    even = even or torch.equal(given, given.flip(0))
    return processor.reading(numbers, anchors, rate, centre, gate, even, outside, low, high)


@dataclass(frozen=True)
class Kept:
    """A table ready for a kernel: the stored values it is of, and `reading`, which counts."""

    stored: Tensor
    version: int
    watching: tuple[Tensor, float, float]
    again: Callable[[Tensor], Tensor | None]
    anew: Callable[[Tensor], Tensor]
    copy: Tensor | None = None  # of the values, on a processor, where looking at them takes less than a launch

    @classmethod
    def of(
        cls, y: Tensor, value: Tensor, stored: Tensor, outside: Tensor, rate: float, kappa: float, centre: float,
        gate: float, even: bool, low: float, high: float,
    ) -> Kept | None:  # fmt: skip
        """None where there is no kernel for y, or on a GPU where the values train."""
        numbers = _prepared(y, value, rate, kappa, centre, gate)
        if numbers is None:
            table = _on_processor(y, value, rate, kappa, centre, gate, even, outside, low, high)
            if table is None:
                return None
            held = stored.detach().clone()
            return cls(stored, stored._version, (outside, low, high), table.again(), table, held)
        if stored.requires_grad:
            return None
        from ..gpu import activation

        shape = activation.Shape.of(value.shape[0], rate, centre, gate, even)
        reading = activation.reading(numbers, shape, outside, low, high)
        again = activation.relaunching(reading, activation.BLOCK)
        anew = functools.partial(activation.forward, table=reading)
        return cls(stored, stored._version, (outside, low, high), again, anew)

    def __call__(self, y: Tensor, outside: Tensor, low: float, high: float) -> Tensor | None:
        """The head at y; None where this is for other limits or another count, the values were written to, y is
        elsewhere, or gradients are wanted."""
        stored, watching = self.stored, self.watching
        if stored.requires_grad and (self.copy is None or torch.is_grad_enabled()):
            return None
        if self.copy is None and (stored._version != self.version or transformed(y)):
            return None
        if self.copy is not None and not torch.equal(stored, self.copy):
            return None
        if watching[0] is not outside or watching[1] != low or watching[2] != high:
            return None
        if (out := self.again(y)) is not None or self.copy is not None:
            return out
        if y.device != stored.device or not ready(y) or (y.requires_grad and torch.is_grad_enabled()):
            return None
        return self.anew(y)


def anchor_read(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0) -> Tensor:
    """The softmax mean of `value` over keys (rate k, -kappa k^2) at y - centre; plus y sigmoid(gate y) with a gate.

    >>> y, value = torch.linspace(-9, 9, 1001), torch.linspace(-1, 1, 17)
    >>> fast = anchor_read(y, value, 1.0, 0.25)
    >>> bool((fast - softmax_read(y, value, 1.0, 0.25)).abs().max() < 1e-6)
    True
    """
    _check(y, value, rate, kappa, gate)
    if transformed(y, value):
        return read(y, value, rate, kappa, centre, gate)
    out: Tensor = torch.ops.attnforge.anchor_read(y, value, rate, kappa, centre, gate)
    return out


def _anchor_read(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float) -> Tensor:
    work = working(y.dtype)
    if (numbers := _prepared(y, value, rate, kappa, centre, gate)) is not None:
        from ..gpu import activation

        return activation.forward(
            y, activation.reading(numbers, activation.Shape.of(value.shape[0], rate, centre, gate))
        )
    if (table := _on_processor(y, value, rate, kappa, centre, gate)) is not None:
        return table(y)
    reading = PreparedTable.of(value.unsqueeze(0), rate, kappa, centre, gate, y.dtype)
    flat = y.reshape(-1)
    if y.device.type != "cpu":
        return _finish(reading, flat.to(work), Room()).to(y.dtype).reshape(y.shape)
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    step = CACHED * torch.get_num_threads()
    room = Room(flat.new_empty(0, dtype=work), min(step, flat.numel()))
    for part, into in zip(flat.split(step), out.view(-1).split(step), strict=True):
        if part.dtype == work:
            _finish(reading, part, room, into)
        else:
            into.copy_(_finish(reading, part.to(work), room))
    return out


def _anchor_read_backward(
    grad: Tensor, y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float, of_value: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `anchor_read` with respect to y and, where `of_value`, the table (else zeros)."""
    numbers = _prepared(y, value, rate, kappa, centre, gate)
    return _pulled_back(grad, y, value, rate, kappa, centre, gate, of_value, numbers)


def _pulled_back(
    grad: Tensor, y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float, of_value: bool,
    numbers: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    work = working(y.dtype)
    anchors = value.shape[0]
    if numbers is not None:
        from ..gpu import activation

        shape = activation.Shape.of(anchors, rate, centre, gate)
        to_y, sums = activation.backward(grad, y, numbers, shape, of_value)
        table = torch.zeros_like(value) if sums is None else basis(anchors, kappa, y.dtype, y.device)[1] @ sums
        return to_y, table.to(value.dtype)
    k = torch.arange(anchors, dtype=torch.float64, device=value.device) - (anchors - 1) / 2
    exact = value.double()
    reading = PreparedTable.of(torch.stack([exact, k * exact, k]), rate, kappa, centre, gate, y.dtype)
    flat, slope = y.reshape(-1), grad.reshape(-1)
    to_y = torch.empty_like(y, memory_format=torch.contiguous_format)
    to_value = torch.zeros_like(value, dtype=torch.float64 if of_value else value.dtype)
    cpu = y.device.type == "cpu"
    step = CACHED * torch.get_num_threads() if cpu else max(1, flat.numel())
    room = Room(flat.new_empty(0, dtype=work), min(step, flat.numel())) if cpu else Room()
    for part, out, into in zip(flat.split(step), slope.split(step), to_y.view(-1).split(step), strict=True):
        at = part.to(work)
        mean, moment, place = reading.means(at, room) if anchors else [torch.zeros_like(at)] * 3
        change = rate * (moment - place * mean)  # the covariance of key and value
        if gate:
            share = torch.sigmoid(gate * at)
            change = change + share * (1 + gate * at * (1 - share))
        into.copy_(out.to(work) * change)
        if of_value and reading.form == "lattice" and anchors:
            to_value += reading.pulled_back(at, out.to(work), room)
    if of_value and reading.form != "lattice":
        step = max(1, SOFTMAX // anchors)
        for part, out in zip(flat.split(step), slope.split(step), strict=True):
            to_value += (_weights(part.to(work), anchors, rate, kappa, centre) @ out.to(work)).double()
    return to_y, to_value.to(value.dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, value, *ctx.numbers = inputs
    ctx.save_for_backward(y, value)


def _again(
    grad: Tensor, y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients as plain PyTorch makes them: where they are to be differentiated themselves."""
    wanted = [t for t in (y, value) if t.requires_grad]
    out = read(y, value, rate, kappa, centre, gate)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    of_y, of_value = (next(found) if t.requires_grad else None for t in (y, value))
    return of_y, of_value


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, value = ctx.saved_tensors
    if torch.is_grad_enabled():
        return *_again(grad, y, value, *ctx.numbers), None, None, None, None
    to_y, to_value = torch.ops.attnforge.anchor_read_backward(grad, y, value, *ctx.numbers, ctx.needs_input_grad[1])
    return to_y, to_value if ctx.needs_input_grad[1] else None, None, None, None, None


def _like(y: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _like_both(grad: Tensor, y: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(y), torch.empty_like(value)


def _anchor_read_watched(
    y: Tensor, value: Tensor, outside: Tensor, rate: float, kappa: float, centre: float, gate: float, even: bool,
    low: float, high: float,
) -> Tensor:  # fmt: skip
    """`anchor_read` that adds the number of values outside [low, high], NaN among them, to `outside`."""
    numbers = _prepared(y, value, rate, kappa, centre, gate)
    return _watched(y, value, outside, rate, kappa, centre, gate, even, low, high, numbers)


def _watched(
    y: Tensor, value: Tensor, outside: Tensor, rate: float, kappa: float, centre: float, gate: float, even: bool,
    low: float, high: float, numbers: Tensor | None,
) -> Tensor:  # fmt: skip
    if numbers is not None:
        from ..gpu import activation

        shape = activation.Shape.of(value.shape[0], rate, centre, gate, even)
        return activation.forward(y, activation.reading(numbers, shape, outside, low, high))
    if (table := _on_processor(y, value, rate, kappa, centre, gate, even, outside, low, high)) is not None:
        return table(y)
    outside += ((y < low) | (y > high) | y.isnan()).sum()
    return _anchor_read(y, value, rate, kappa, centre, gate)


class _Watched(torch.autograd.Function):
    """`anchor_read_watched` with the gradients of `anchor_read`: operators that count have none of their own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor, outside: Tensor, *rest: Any) -> Tensor:
        rate, kappa, centre, gate, even, low, high = rest
        ctx.arguments, ctx.numbers = (rate, kappa, centre, gate), _prepared(y, value, rate, kappa, centre, gate)
        ctx.save_for_backward(y, value)
        return _watched(y, value, outside, rate, kappa, centre, gate, even, low, high, ctx.numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, value = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_again(grads[0], y, value, *ctx.arguments), *[None] * 8
        (rate, kappa, centre, gate), of_value = ctx.arguments, ctx.needs_input_grad[1]
        to_y, to_value = _pulled_back(grads[0], y, value, rate, kappa, centre, gate, of_value, ctx.numbers)
        return to_y, to_value if of_value else None, *[None] * 8


def watched_read(
    y: Tensor, value: Tensor, outside: Tensor, rate: float, kappa: float, centre: float, gate: float, even: bool,
    low: float, high: float,
) -> Tensor:  # fmt: skip
    """`anchor_read`, counting in `outside` the values that leave [low, high]; `even` promises value[i] = value[-1 - i].

    >>> outside = torch.zeros((), dtype=torch.int64)
    >>> out = watched_read(torch.tensor([0.0, 9.0]), torch.ones(3), outside, 1.0, 0.25, 0.0, 0.0, True, -8.0, 8.0)
    >>> int(outside)
    1
    """
    _check(y, value, rate, kappa, gate)
    if transformed(y, value):  # nobody can count there
        return read(y, value, rate, kappa, centre, gate, even)
    call: Callable[..., Tensor] = torch.ops.attnforge.anchor_read_watched
    if torch.is_grad_enabled() and (y.requires_grad or value.requires_grad):
        call = _Watched.apply
    out: Tensor = call(y, value, outside, rate, kappa, centre, gate, even, low, high)
    return out


# `torch.library.custom_op` would say the same in fewer words, and load the compiler, for seconds, at the first call
_LIBRARY = torch.library.Library("attnforge", "FRAGMENT")
_NUMBERS = "float rate, float kappa, float centre"
_LIBRARY.define(f"anchor_read(Tensor y, Tensor value, {_NUMBERS}, float gate) -> Tensor")
_LIBRARY.define(
    f"anchor_read_backward(Tensor grad, Tensor y, Tensor value, {_NUMBERS}, float gate, bool of_value) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    f"anchor_read_watched(Tensor y, Tensor value, Tensor(a!) outside, {_NUMBERS}, float gate, bool even, float low, "
    "float high) -> Tensor"
)
_LIBRARY.impl("anchor_read_watched", _anchor_read_watched, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAME}_watched", lambda y, *_: _like(y), lib=_LIBRARY)
_LIBRARY.impl("anchor_read", _anchor_read, "CompositeExplicitAutograd")
_LIBRARY.impl("anchor_read_backward", _anchor_read_backward, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _like, lib=_LIBRARY)
torch.library.register_fake(f"{NAME}_backward", _like_both, lib=_LIBRARY)
torch.library.register_autograd(NAME, _backward, setup_context=_remember, lib=_LIBRARY)
allow_custom(NAME, "softmax attention over evenly spaced anchors and, with a gate, one self head (lemmas A8 and B4)")


def softmax_read(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0) -> Tensor:
    """The attention that `anchor_read` evaluates, written out: a softmax over p keys, and one over {self, sink}."""
    work = working(y.dtype)
    flat = y.reshape(-1).to(work)
    anchors = value.shape[0]
    out = value.to(work) @ _weights(flat, anchors, rate, kappa, centre) if anchors else torch.zeros_like(flat)
    if gate:
        pair = torch.softmax(torch.stack([gate * flat, torch.zeros_like(flat)], -1), -1)
        out = out + (pair.unsqueeze(-2) @ torch.stack([flat, torch.zeros_like(flat)], -1).unsqueeze(-1)).flatten()
    return out.to(y.dtype).reshape(y.shape)


def evaluate(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0) -> Tensor:
    """The head at y: written out while exporting, plain PyTorch while compiling, the operator otherwise."""
    if exporting():
        return softmax_read(y, value, rate, kappa, centre, gate)
    if torch.compiler.is_compiling():
        return read(y, value, rate, kappa, centre, gate)
    return anchor_read(y, value, rate, kappa, centre, gate)


def _finish(reading: PreparedTable, y: Tensor, room: Room, out: Tensor | None = None) -> Tensor:
    head = reading.means(y, room)[0] if reading.anchors else None
    if reading.gate or head is None:
        return reading.gated(head, y, room, out)
    return head if out is None else out.copy_(head)


def _weights(y: Tensor, anchors: int, rate: float, kappa: float, centre: float) -> Tensor:
    """The softmax weights, shape (anchor, element)."""
    k = torch.arange(anchors, dtype=y.dtype, device=y.device) - (anchors - 1) / 2
    return torch.softmax(torch.outer(rate * k, y - centre) - (kappa * k * k).unsqueeze(-1), 0)


def _check(y: Tensor, value: Tensor, rate: float, kappa: float, gate: float) -> None:
    if y.dtype not in READ:
        raise ArgumentError(f"y must be float64, float32, bfloat16 or float16, got {y.dtype}")
    if value.dim() != 1 or value.shape[0] < (0 if gate else 2) or value.dtype not in (torch.float64, torch.float32):
        raise ArgumentError(
            f"value must be a table of at least 2 float32 or float64 numbers, got {value.dtype}, {tuple(value.shape)}"
        )
    if not 0 <= gate < float("inf"):
        raise ArgumentError(f"gate must be 0 (none) or a positive number, got {gate!r}")
    if not (0 < rate < float("inf") and 0 < kappa < float("inf")):
        raise ArgumentError(f"rate and kappa must be positive numbers, got rate = {rate!r} and kappa = {kappa!r}")
