"""What is read with one exponential per element (lemmas K36, K38): files of the family "fast", and anchors made fast.

A table of evenly spaced anchors is read as a quotient of polynomials in s = q/(1 + q^2), q = exp(-|theta|), and a gate
as |y| q/(1 + q). The file holds the heads; what is computed are these polynomials, with coefficients made in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import ONE, ORDER, ZERO, NotProved, down, largest, reach, size, up
from ..file import Saved, Tensor, outward
from ..functions import function
from ..program import number, whole
from ..rounding import EXPONENTIAL, MACHINES, Machine, affine_rounding
from ..scalar import Cell, Head, HeadSum, Weights, cell_error, taylor_head
from .heads import on_cells

MOST = 2048  # anchors: work is bounded for every file
LATTICE = 129  # anchors that are read as one quotient, unless a window is as long
QUOTIENT = {"float32": 4, "float64": 1}  # u of a division: compilers for GPUs divide to 2 units in the last place
#: The log of the largest mass; from which kappa pairs are read, and from which kappa K^2 windows: what evaluation does.
LARGEST, COLD = {"float32": 75.0, "float64": 600.0}, {"float32": 17.0, "float64": 37.0}
WIDEST = {"float32": 140.0, "float64": 1200.0}  # as COLD
#: The dtype in which heads of half precision are computed; their unit roundoff, and what a small result loses.
WIDER, HALVES = {"bfloat16": "float32"}, {"bfloat16": (arb(2.0**-8), arb(2.0**-126))}
#: Steps of theta into which cells of a network are divided, and how many of them at most.
THIN, MOST_PIECES = 0.1, 1 << 12
MOST_TERMS, CLEAR = 4096, 1e-9  # of sums of what is left out; and how far from a roundoff that must be, relatively
REACH = 140.0  # kappa i^2 of anchors that are looked at: others weigh less than exp(-REACH) or so, which is counted
COARSE = arb(2.0**-53)  # of float64, in which coefficients are made
#: Heads in exact arithmetic, all but: slots of less than 2^-200 are left out, and everything else is enclosed.
EXACT = Machine(arb(2.0**-100), ZERO, arb(2.0**1015))


@dataclass(frozen=True)
class Read:
    """What a file says is read: a function, the numbers of a table, and the heads that they are.

    `apart` is how far the keys of each anchor are from the table's, slope and level, up to what all have in common;
    `dtype` is the file's, `work` what computes, `form` how. A skip (weight, bias) is added; `relative` says whether the
    bound is one of the error over the function's size.
    """

    name: str
    ends: tuple[float, float]
    rate: float
    kappa: float
    centre: float
    gate: float
    heads: tuple[Head, ...]
    dtype: str
    work: str
    apart: tuple[tuple[arb, arb], ...]
    skip: tuple[float, float] = (0.0, 0.0)
    relative: bool = False
    form: str = "quotient"
    side: int = 0  # of a window: anchors on each side of its middle

    @property
    def values(self) -> tuple[float, ...]:
        """Those of the anchors, none for a gate alone."""
        return () if self.heads[-1].own else self.heads[-1].memory


def prove_fast(saved: Saved, chosen: Any) -> tuple[float, str, tuple[str, ...], int]:
    """The bound of a fast activation, the dtype, what it is, and its cells."""
    fast = Fast(saved)
    found, cells = on_cells(chosen, fast.read.ends, fast.error)
    return found, fast.read.dtype, (f"{fast.read.name}, {len(fast.read.values)} anchors",), cells


class Fast:
    """A file's heads, and their errors on cells."""

    def __init__(self, saved: Saved):
        try:
            made = _anchors if saved.header["family"] == "anchor" else _read
            self.read = read = made(saved.header["config"], saved)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise CertificateError(f"the file describes nothing that is read fast: {error!r}") from error
        self.machine = MACHINES[read.work]
        self.site = HeadSum(read.heads, (0.0, *read.skip), function(read.name), 0.0, read.work)
        self.sums = _coefficients(read) if read.values and read.form == "quotient" else None

    def error(self, low: float, high: float) -> float:
        """How far what is computed on a cell is from the function, at most; infinity where nothing is known."""
        if any(low < x < high for x in (0.0, self.read.centre)):
            return math.inf  # signs of y and of theta are those of a cell
        cell = Cell.of(low, high, self.site.function)
        found = cell_error(self.site, EXACT, cell).rest + _reading(self.read, self.machine, self.sums, cell)
        if self.read.relative:
            least, most = cell.shape[:2]
            found = found / arb(max(least, -most)) if max(least, -most) > 0 else arb.pos_inf()
        return up(found)


@dataclass(frozen=True)
class Even:
    """An anchor head of a network that may be read by a table its file names, or by the softmax (lemma K47)."""

    head: Head
    rate: float
    kappa: float
    centre: float
    dtype: str

    @functools.cached_property
    def table(self) -> tuple[Read, Sums] | None:
        """What is read; None where tables of this kind are left to the softmax."""
        count, (weight, shift) = len(self.head.keys), self.head.query[0]
        if not 2 <= count <= LATTICE or form_of(count, self.kappa, self.dtype)[0] != "quotient":
            return None
        if weight != 1.0 or self.head.query[1] != (0.0, 1.0) or self.head.value != (0.0,) * 3:
            return None  # other queries are left to the softmax, too
        moved = arb(self.centre) + arb(shift)  # logits a (y + shift) + b are a (y - centre) + a (shift + centre) + b
        apart = _apart([(a, arb(b) + arb(a) * moved) for a, b in self.head.keys], self.rate, self.kappa)
        numbers, dtype = (self.rate, self.kappa, self.centre, 0.0), self.dtype
        read = Read("", (0.0, 0.0), *numbers, (self.head,), dtype, dtype, apart)
        return read, _coefficients(read)

    def __call__(self, machine: Machine, cell: Cell) -> arb:
        """How far the quotient is from the head in exact arithmetic on a cell."""
        if self.table is None:
            return ZERO
        ends = sorted({cell.low, *([self.centre] if cell.low < self.centre < cell.high else []), cell.high})
        pieces = max(1, math.ceil(self.rate * (cell.high - cell.low) / THIN))
        if pieces > MOST_PIECES:
            return arb.pos_inf()
        parts = [part for a, b in itertools.pairwise(ends) for part in itertools.pairwise(_divided(a, b, pieces))]
        found = ZERO
        for low, high in parts or [(cell.low, cell.high)]:
            middle = ((arb(low) + arb(high)) / 2).mid()
            radius = arb(max(up(arb(high) - middle), up(middle - arb(low))))
            found = found.max(_quotient(*self._of(machine), middle, radius)[0])
        return found

    def _of(self, machine: Machine) -> tuple[Read, Machine, Sums]:
        assert self.table is not None
        read, sums = self.table
        return read, machine, sums


def tables_named(config: dict[str, Any]) -> dict[int, list[float]]:
    """The tables that the file of a network names for operations, which may be read with one exponential (K47)."""
    try:
        return {op: list(map(number, site["even"])) for op, _, site in config["sites"] if site.get("even")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CertificateError(f"the file names tables that are none: {error!r}") from error


def even(heads: Sequence[Head], numbers: Sequence[float], dtype: str) -> Even:
    """The reading that a file names for an anchor head: rate, kappa, centre and a reach, which is not needed here."""
    if len(heads) != 1 or len(numbers) != 4:
        raise CertificateError("a file that reads other than one head with one exponential is none of a network")
    (head,), (rate, kappa, centre, reach) = heads, numbers
    if head.own or len(head.query) != 2 or not max(abs(centre), reach) < 2.0**100:
        raise CertificateError("what the file reads with one exponential is no head over anchors")
    if not (rate > 0 and kappa > 0 and all(2.0**-100 < x < 2.0**100 for x in (rate, kappa, rate / kappa))):
        raise NotProved("the numbers of the table are too large or too small to be rounded relatively")
    if dtype == "float32":  # as evaluation has it
        (centre,) = struct.unpack("f", struct.pack("f", centre))
    return Even(head, rate, kappa, centre, dtype)


def _divided(low: float, high: float, pieces: int) -> list[float]:
    inner = {low + (high - low) * (i / pieces) for i in range(1, pieces)}
    return sorted({low, high, *(x for x in inner if low < x < high)})


def is_fast(saved: Saved) -> bool:
    """Whether a file is one of heads that are read with one exponential."""
    config = saved.header.get("config")
    fast = saved.header.get("family") == "anchor" and isinstance(config, dict) and "fast" in config
    return fast or saved.header.get("family") == "fast"


def _read(config: Any, saved: Saved) -> Read:
    """The numbers of the table, and that the stored tensors but the values are these; in half precision, rounded."""
    table, tensors, dtype = config["table"], dict(saved.tensors), config["dtype"]
    work = WIDER.get(dtype, dtype)
    if work not in MACHINES or any(tensor.dtype != dtype for tensor in tensors.values()):
        raise NotProved(f"the kernel speaks of heads stored in one dtype, bfloat16, float32 or float64, not {dtype!r}")
    rate, kappa, centre, gate = (number(table[key]) for key in ("rate", "kappa", "centre", "gate"))
    count = whole(table["anchors"], 0, MOST)
    last = Fraction(count - 1, 2)
    if gate < 0 or (count and not (count > 1 and rate > 0 and kappa > 0)) or not (count or gate):
        raise ValueError("its numbers are not those of a table")
    if count and form_of(count, kappa, work)[0] != "quotient":
        raise NotProved("the kernel has a rule for activations that are read as one quotient of polynomials")
    places = [Fraction(i) - last for i in range(count)]
    exact = "float64" if dtype in HALVES else dtype  # keys in half precision are never read, but for exports
    keys = tuple((_kept(Fraction(rate) * k, exact), _kept(-Fraction(kappa) * k * k, exact)) for k in places)
    for x in (rate, centre, gate):
        _kept(Fraction(x), work)
    heads: list[Head] = []
    wanted: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {}
    if gate:
        one = (1, 1, 1)
        own = {"W_Q": (one, (1.0,)), "b_K": ((1, 1), (gate,)), "W_V": (one, (1.0,)), "M_K": (one, (0.0,)),
               "M_V": (one, (0.0,)), "W_O": (one, (1.0,))}  # fmt: skip
        wanted |= {f"layer.groups.0.{key}": value for key, value in own.items()}
        heads.append(Head(((1.0, 0.0),), ((gate,), (0.0,)), True, (0.0, 1.0, 0.0), (0.0,), 1.0))
    if count:
        prefix = f"layer.groups.{len(heads)}."
        values = _values(tensors.pop(f"{prefix}M_V"), (1, count, 1))
        wanted |= {
            f"{prefix}W_Q": ((1, 1, 2), (1.0, 0.0)), f"{prefix}b_Q": ((1, 2), (-centre, 1.0)),
            f"{prefix}M_K": ((1, count, 2), tuple(x for key in keys for x in key)),
            f"{prefix}W_O": ((1, 1, 1), (1.0,)),
        }  # fmt: skip
        query = (1.0, -centre), (0.0, 1.0)
        heads.append(Head(query, keys, False, (0.0,) * 3, values, 1.0))
    same = tensors.keys() == wanted.keys() and all(_same(tensors[name], *one) for name, one in wanted.items())
    if not same:
        raise CertificateError("the stored queries, keys and outputs are not the numbers that are read")
    name, apart = str(config["function"]), ((ZERO, ZERO),) * count
    return Read(name, _ends(config, dtype), rate, kappa, centre, gate, tuple(heads), dtype, work, apart)


def _anchors(config: Any, saved: Saved) -> Read:
    """An anchor head that is read by the table of its description, from which its keys are `apart` (lemma K38)."""
    tensors, dtype = dict(saved.tensors), config["dtype"]
    tensors.pop("anchors", None)  # where the anchors are is not read by anyone
    if dtype not in MACHINES or any(tensor.dtype != dtype for tensor in tensors.values()):
        raise NotProved(f"the kernel speaks of heads stored and run in float32 or float64, not {dtype!r}")
    rate, kappa, centre, _ = map(number, config["fast"][:4])
    mirrored = config["fast"][4]
    if len(config["fast"]) != 5 or not (rate > 0 and kappa > 0) or {type(mirrored), type(config["relative"])} != {bool}:
        raise ValueError("its table is none")
    if not all(2.0**-100 < x < 2.0**100 for x in (rate, kappa, rate / kappa)):
        raise NotProved("the numbers of the table are too large or too small to be rounded relatively")
    _kept(Fraction(centre), dtype)
    keys, values = tensors.pop("layer.groups.0.M_K"), tensors.pop("layer.groups.0.M_V")
    count = whole(keys.shape[1], 2)
    form, side = form_of(count, kappa, dtype)
    numbers, skip = _values(values, (1, count, 1)), (0.0, 0.0)
    if config["skip"]:
        (weight,), (bias,) = _values(tensors.pop("layer.S"), (1, 1)), _values(tensors.pop("layer.s"), (1,))
        skip = weight, bias
    wanted = {"W_Q": ((1, 1, 2), (1.0, 0.0)), "b_Q": ((1, 2), (-centre, 1.0)), "W_O": ((1, 1, 1), (1.0,))}
    held = {f"layer.groups.0.{name}": one for name, one in wanted.items()}
    if tensors.keys() != held.keys() or not all(_same(tensors[name], *one) for name, one in held.items()):
        raise CertificateError("the stored query and output are not those that are read")
    if keys.shape != (1, count, 2) or not all(map(math.isfinite, (*keys.numbers, *skip))):
        raise ValueError("its keys are not two finite numbers for each anchor")
    rows = [tuple(row) for row in keys.rows()[0]]
    if mirrored:
        rows, numbers = rows[::-1], numbers[::-1]
    apart = _apart(rows, rate, kappa)
    head = Head(((1.0, -centre), (0.0, 1.0)), tuple(rows), False, (0.0,) * 3, numbers, 1.0)
    name, ends = str(config["function"]), _ends(config, dtype)
    relative = config["relative"]
    return Read(name, ends, rate, kappa, centre, 0.0, (head,), dtype, dtype, apart, skip, relative, form, side)


def _apart(keys: Sequence[Sequence[float | arb]], rate: float, kappa: float) -> tuple[tuple[arb, arb], ...]:
    """How far keys are from those of a table, slope and level, up to what all have in common."""
    count = len(keys)
    places = [arb(2 * i - count + 1) / 2 for i in range(count)]
    common = arb(keys[0][0] + keys[-1][0]) / 2  # a choice, like the next
    level = arb(keys[count // 2][1]) + arb(kappa) * places[count // 2] ** 2
    return tuple((size(arb(a) - common - arb(rate) * k), size(arb(b) + arb(kappa) * k * k - level))
                 for (a, b), k in zip(keys, places, strict=True))  # fmt: skip


def form_of(count: int, kappa: float, work: str) -> tuple[str, int]:
    """How a table is read, and the number of anchors on each side of a window."""
    if count > MOST:
        raise NotProved(f"the kernel takes its time beyond {MOST} anchors")
    if kappa >= COLD[work]:
        return "pair", 0
    wide = kappa * ((count - 1) / 2) ** 2 > WIDEST[work] or count > LATTICE
    side = window(kappa, work) if wide else count
    return ("window", side) if count > 2 * side + 1 else ("quotient", 0)


def _values(tensor: Tensor, shape: tuple[int, ...]) -> tuple[float, ...]:
    if tensor.shape != shape or not all(map(math.isfinite, tensor.numbers)):
        raise ValueError("its values are not one finite number for each anchor")
    return tensor.numbers


def _same(tensor: Tensor, shape: tuple[int, ...], wanted: tuple[float, ...]) -> bool:
    """Whether stored numbers are these, rounded to their dtype."""
    return tensor.shape == shape and all(
        x in (outward(w, tensor.dtype, above=False), outward(w, tensor.dtype, above=True))
        for x, w in zip(tensor.numbers, wanted, strict=True)
    )


def _ends(config: Any, dtype: str) -> tuple[float, float]:
    low, high = (number(x) for x in config["interval"])
    return outward(low, dtype, above=False), outward(high, dtype, above=True)


def _kept(x: Fraction, dtype: str) -> float:
    """A number that its dtype holds exactly; `NotProved` otherwise."""
    found = float(x)
    if Fraction(found) != x or outward(found, dtype, above=True) != found:
        raise NotProved("the kernel has a rule for tables whose keys are not rounded")
    return found


Polynomial = list[arb]  # lowest power of s first
#: Q, P and R with the masses as computed, enclosed; the same sums without signs; and the masses.
Sums = tuple[tuple[Polynomial, ...], tuple[Polynomial, ...], list[arb]]


@functools.lru_cache(maxsize=16)
def _families(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Coefficients in s of s^K 2 cosh(k theta), and of s^K 2 sinh(k theta) / t, for each k >= 0; between an even number
    of anchors both divided by 2 cosh(theta/2) s^(1/2)."""
    rows, odd = (count + 1) // 2, count % 2
    families = ([[2], [0, 1]], [[0], [0, 1]]) if odd else ([[1], [-1, 1]], [[1], [1, 1]])  # lowest power of 1/s first
    for family in families:
        for _ in range(2, rows):
            family.append([a - b for a, b in zip([0, *family[-1]], [*family[-2], 0, 0], strict=True)])
    if odd:
        families[0][0] = [1]  # k = 0 is there once
    first, second = ([[*[0] * (rows - len(row)), *row[::-1]] for row in family[:rows]] for family in families)
    return first, second


def _place(read: Read, i: int) -> arb:
    """The i-th of the keys k >= 0."""
    return arb(i) if len(read.values) % 2 else arb(i) + arb(0.5)


def _off(read: Read, k: arb) -> arb:
    """How far the logarithm of a computed mass may be off: float64's exponential within 4 u, and its argument."""
    last = arb(len(read.values) - 1) / 2
    return (arb(read.kappa) * (k * k + last * last) + 4) * 4 * COARSE


def _coefficients(read: Read) -> Sums:
    v, count = read.values, len(read.values)
    rows = (count + 1) // 2
    shift = arb(min(read.kappa * (0.5 * (count - 1)) ** 2, LARGEST[read.work]))
    places = [_place(read, i) for i in range(rows)]
    masses = [(shift - arb(read.kappa) * k * k).exp() * (1 + arb(0, 1) * _off(read, k).expm1()) for k in places]
    pairs = [(arb(v[count // 2 + i]), arb(v[rows - 1 - i])) for i in range(rows)]
    even, odd = _families(count)
    halves = [m * (a + b) / 2 for m, (a, b) in zip(masses, pairs, strict=True)]
    apart = [m * (a - b) / 2 for m, (a, b) in zip(masses, pairs, strict=True)]
    both = [m * (size(a) + size(b)) / 2 for m, (a, b) in zip(masses, pairs, strict=True)]

    def summed(column: list[arb], table: list[list[int]]) -> Polynomial:
        return [sum((w * row[j] for w, row in zip(column, table, strict=True)), ZERO) for j in range(rows)]

    steep, level = ([[abs(x) for x in row] for row in table] for table in (odd, even))
    signed = summed(masses, even), summed(halves, even), summed(apart, odd)
    unsigned = summed(masses, level), summed(both, level), summed(both, steep)
    return signed, tuple([size(x) for x in row] for row in unsigned), masses


def _reading(read: Read, machine: Machine, sums: Sums | None, cell: Cell) -> arb:
    """What is computed on a cell, less the heads in exact arithmetic (lemmas K36 and K38)."""
    most = size(cell.centre) + cell.radius
    if read.form == "quotient":
        error, length = (ZERO, ZERO) if sums is None else _quotient(read, machine, sums, cell.centre, cell.radius)
    else:
        form = _window if read.form == "window" else _pair
        error, length = form(read, machine, cell.centre, cell.radius)
    slope, bias = (size(arb(x)) for x in read.skip)
    if not most * (1 + arb(read.gate) + arb(read.rate) + slope) + bias < machine.huge:
        return arb.pos_inf()
    beside = length
    if read.gate:
        error, bump = _gated(read, machine, cell, error, length)
        beside = length + bump
    if read.skip != (0.0, 0.0):
        length += slope * most + bias
        error += affine_rounding(machine, read.skip[:1], read.skip[1], slope * most + bias)
        error += machine.u * (length + error) + machine.tiny
    if read.dtype in HALVES:  # y, where the gate is open, or 0 is a number of the dtype
        (u, tiny), far = HALVES[read.dtype], beside + (most if read.gate and cell.high > 0 else ZERO)
        error += (u * (far + error) + tiny).min(beside + error)
    return error


def _gated(read: Read, machine: Machine, cell: Cell, error: arb, length: arb) -> tuple[arb, arb]:
    """The error of the table with a gate beside it, and how far the gate is from max(y, 0)."""
    u, tiny, divided, gate = machine.u, machine.tiny, QUOTIENT[read.work], arb(read.gate)
    most = size(cell.centre) + cell.radius
    bump = most / (1 + (gate * arb(min(abs(cell.low), abs(cell.high)))).exp())
    relative = (gate * most * u).exp() * (1 + arb(1.01) * (EXPONENTIAL + arb(4.4) + divided) * u) - 1
    error += arb(2.1) * u * (length + error)
    inner = error + bump * relative + (1 + most) * tiny
    inner += u * (length + bump + inner) + tiny
    if cell.high > 0:
        total = length + bump + inner  # the last sum errs by no more than the smaller of its terms
        inner += total.min(u * (most + total) * (1 + u))
    return inner, bump


@dataclass(frozen=True)
class Near:
    """A table in exact arithmetic around a cell: weights, the mean in the middle, how far it moves and how large it is;
    and what keys and masses as they are read, and a motion of theta, do to it at most. Anchors that are far from the
    cell are left out of the weights, which begin with the anchor `first`."""

    weights: list[arb]
    first: int
    middle: arb
    moved: arb
    length: arb
    error: arb
    wide: arb  # of y around the middle of the cell, the motion included

    @classmethod
    def of(cls, read: Read, y: arb, r: arb, motion: arb) -> Near:
        """Around |y' - y| <= r, where theta may move by `motion`."""
        rate, count, whole = arb(read.rate), len(read.values), read.heads[-1]
        wide = r + motion / rate
        far, spread = size(y - arb(read.centre)) + wide, _spread([arb(v) for v in read.values])
        steep, level = (largest([one[i] for one in read.apart]) for i in (0, 1))
        most = _off(read, arb(count) / 2) + steep * far + level  # of what keys and masses are off by
        side = max(2 * read.side, math.isqrt(math.ceil(REACH / read.kappa)) + 1) + 2
        ends = _places(read, y, wide)
        kept = slice(max(math.floor(ends[0]) - side, 0), math.ceil(ends[1]) + side + 1)
        head = replace(whole, keys=whole.keys[kept], memory=whole.memory[kept])
        lost = spread * _left_out(read.kappa, side + 1, ZERO) * (4 * most).exp() if len(head.keys) < count else ZERO
        weights = Weights.of(head, y, wide)
        (_, (thin, about)), _, _ = taylor_head(head, EXACT, weights, y, wide, ZERO)
        slope = reach([(j + 1) * c for j, c in enumerate(thin[1:-1])], (ORDER + 1) * about[-1], wide)
        moved, drift = reach([ZERO, *thin[1:-1]], about[-1], wide) + lost, lost
        places = [arb(2 * i - count + 1) / 2 for i in range(count)][kept]
        off = [_off(read, k) + a * far + b for k, (a, b) in zip(places, read.apart[kept], strict=True)]
        for w, v, d in zip(weights.most, head.memory, off, strict=True):
            drift += w * d.expm1() * (size(arb(v) - thin[0]) + moved)
        drift *= most.exp()
        moved, error = moved + drift, motion / rate * slope + 2 * lost + drift
        return cls(weights.most, kept.start, thin[0], moved, size(thin[0]) + moved, error, wide)


def _quotient(read: Read, machine: Machine, sums: Sums, y: arb, r: arb) -> tuple[arb, arb]:
    """The error of the computed quotient as the mean of the table, and the size of that."""
    (q, p, odd), (q_all, p_all, odd_all), masses = sums
    u, tiny, divided, rate = machine.u, machine.tiny, QUOTIENT[read.work], arb(read.rate)
    count = len(read.values)
    theta, own = rate * (y - arb(read.centre)), (count + 8) * COARSE
    rounded = outward(read.rate, read.work, above=True) != read.rate  # when it is made a number of what computes
    motion = machine.gamma(1 + (read.centre != 0) + rounded) * (size(theta) + rate * r)
    motion += (2 + rate) * 2 * tiny - (1 - EXPONENTIAL * u).log()
    at = Near.of(read, y, r, motion)
    moved, length, wide = at.moved, at.length, at.wide
    near, far = (size(theta) - rate * wide).max(ZERO).lower(), size(theta) + rate * wide
    turn = arb(1) if count % 2 else arb(0.5)
    tilt, steep, s = (turn * theta).tanh(), turn * rate * wide, size(1 / (2 * near.cosh())) + tiny
    before = power = ONE
    numerator, denominator, moving = 24 * tiny, 16 * tiny, ZERO
    for j, (a, b, c) in enumerate(zip(p, odd, q, strict=True)):
        left = size(a + tilt * b - at.middle * c) + steep * size(b) + moved * size(c)
        bend, level = (arb(3.7) * u * j).expm1(), size(a) + size(b)
        above = machine.gamma(2 * j + 5) * level + (arb(4.2) + divided) * u * size(b)
        above += arb(1.01) * own * (p_all[j] + odd_all[j])
        numerator += power * (left * bend + above)
        denominator += power * (machine.gamma(2 * j + 3) * size(c) + arb(1.01) * own * q_all[j])
        moving += power * size(c) * bend
        if j:  # s and its correction may underflow: off by a few `tiny`
            numerator += 8 * tiny * j * before * (level + length * size(c))
            moving += 8 * tiny * j * before * size(c)
        before, power = power, power * s
    floor = _least(read, masses, near, far) - moving - denominator
    room = 2 + (1 / arb(read.gate) if read.gate else ZERO)  # |y| q <= 1 / (e gate)
    if not (floor > 0 and room * (sum(q_all, ZERO) + sum(p_all, ZERO) + sum(odd_all, ZERO)) < machine.huge):
        return arb.pos_inf(), length
    quotient = (numerator + length * denominator) / floor
    return at.error + quotient + divided * u * (length + quotient) + tiny, length


def _least(read: Read, masses: list[arb], near: arb, far: arb) -> arb:
    """A lower bound of Q where near <= |theta| <= far."""
    last, degree, odd = arb(len(read.values) - 1) / 2, len(masses) - 1, len(read.values) % 2
    total, mean = ZERO, ZERO
    for i, mass in enumerate(masses):
        k = _place(read, i)
        right, left = ((k - last) * near).exp(), ((-k - last) * near).exp()
        total += mass * (right if k.is_zero() else right + left)
        mean += mass * k * (right - left)
    below = (1 + (-2 * near).exp()) ** degree * (1 if odd else 1 + (-near).exp())
    fall = mean / total - degree * far.tanh() - (ZERO if odd else (far / 2).tanh() / 2)
    return total / below * ((far - near) * fall.min(ZERO)).exp()


# -- tables of many anchors, or of cold ones (lemma K38) ---------------------------------------------------------------


def _left_out(kappa: float, first: int, off: arb) -> arb:
    """What anchors that are i >= first from the nearest weigh, at most, where that is 1/2 + off away at most."""
    k, total = arb(kappa), ZERO
    for i in range(first, first + MOST_TERMS):
        total += (-k * (i * i - i * (1 + 2 * off))).exp()
        ratio = (2 * k * (off - i)).exp()  # of the next term to this one, and less for all others
        left = total * ratio / (1 - ratio)
        if ratio < 1 and left < total * 2.0**-60:
            return 2 * (total + left).upper()
    return arb.pos_inf()


@functools.lru_cache(maxsize=256)
def window(kappa: float, work: str) -> int:
    """The smallest window that leaves out less than a roundoff, as evaluation finds it."""
    u = MACHINES[work].u
    for side in range(1, MOST):
        weight = _left_out(kappa, side + 1, ZERO)
        if weight < u * (1 - arb(CLEAR)):
            return side
        if not weight > u * (1 + arb(CLEAR)):
            raise NotProved("what a window leaves out is a roundoff, as near as can be told")
    return MOST


def _places(read: Read, y: arb, wide: arb) -> tuple[float, float]:
    """Between which anchors, counted from the first, a cell lies; beyond the table at its ends."""
    last, step = len(read.values) - 1, arb(read.rate) / (2 * arb(read.kappa))
    at, far = step * (y - arb(read.centre)) + arb(last) / 2, step * wide
    return min(max(down(at - far), 0.0), float(last)), min(max(up(at + far), 0.0), float(last))


def _motion(read: Read, machine: Machine, y: arb, r: arb, steps: int, inside: arb) -> arb:
    """How far theta may move by rounding the position and, `steps` times, the distance from an anchor: `inside`, in
    theta, within the table, and beyond its last window as much more as theta is."""
    rate, kappa = arb(read.rate), arb(read.kappa)
    theta = size(rate * (y - arb(read.centre))) + rate * r
    beyond = (theta - kappa * (len(read.values) - 1 - 2 * read.side)).max(ZERO)
    found = machine.gamma(2 + (read.centre != 0)) * theta + machine.gamma(steps) * (inside + beyond)
    return (1 + arb(2.0**-20)) * found + 8 * (1 + kappa) * machine.tiny - (1 - EXPONENTIAL * machine.u).log()


def _window(read: Read, machine: Machine, y: arb, r: arb) -> tuple[arb, arb]:
    """The error of a table read through a window, and its size."""
    tiny, side, kappa, values = machine.tiny, read.side, arb(read.kappa), [arb(v) for v in read.values]
    motion = _motion(read, machine, y, r, 3, arb(1.01) * kappa)
    at, off = Near.of(read, y, r, motion), motion / (2 * kappa)
    lost = _left_out(read.kappa, side + 1, off)
    length = at.length + lost * _spread(values)
    first, last = _places(read, y, at.wide)
    inside, error, worst = side <= first and last <= len(values) - 1 - side, ZERO, ZERO
    for k, (w, v) in enumerate(zip(at.weights, values[at.first :], strict=False), at.first):
        away = math.floor(max(abs(k - first), abs(k - last)) + 0.51)  # from the nearest anchor
        if away <= 2 * side + 1:  # others are in no window
            beside = min(side, away) if inside else side  # of the window's middle, which is the nearest anchor inside
            own = COARSE * 4 * (kappa * beside**2 + 5)  # of its mass, made in float64, and the product with the value
            step = (1 + machine.gamma(2 * (side + away) + 3)) * (1 + own) - 1
            worst, error = worst.max(step), error + w * step * (size(v) + length)
    most = 8 * side * largest([length, *map(size, values)])
    if not (off < 0.005 and lost < 0.5 and worst < 0.5 and most < machine.huge):
        return arb.pos_inf(), length
    error = error / ((1 - lost) * (1 - worst)) + (8 * side + 16) * tiny * (1 + length) * (kappa * side * side).exp()
    error += QUOTIENT[read.work] * machine.u * (length + error) + tiny
    return at.error + lost * _spread(values) + error, length


def _pair(read: Read, machine: Machine, y: arb, r: arb) -> tuple[arb, arb]:
    """The error of a table of which two anchors are read, and its size."""
    u, kappa, values = machine.u, arb(read.kappa), [arb(v) for v in read.values]
    motion = _motion(read, machine, y, r, 4, arb(2.02) * kappa)
    at, off = Near.of(read, y, r, motion), motion / (2 * kappa)
    lost = _left_out(read.kappa, 1, off - arb(0.5)) * _spread(values)
    length, (first, last) = at.length + lost, _places(read, y, at.wide)
    rises = [size(b - a) for a, b in itertools.pairwise(values)]
    rise = largest(rises[max(math.floor(first - 0.01), 0) : math.floor(last + 0.01) + 1] or rises[-1:])
    if not (off < 0.005 and 8 * largest([length, rise, *map(size, values)]) < machine.huge):
        return arb.pos_inf(), length
    error = (EXPONENTIAL + arb(5.3) + QUOTIENT[read.work]) * u * rise
    return at.error + lost + error + arb(1.01) * u * (length + error) + 4 * (1 + rise) * machine.tiny, length


def _spread(values: list[arb]) -> arb:
    """How far two values are apart at most."""
    return 2 * largest([size(v - values[0]) for v in values])
