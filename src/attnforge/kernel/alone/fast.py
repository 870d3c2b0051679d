"""Activations read with one exponential per element (lemma K36): files of the family "fast".

A table of evenly spaced anchors is read as a quotient of polynomials in s = q/(1 + q^2), q = exp(-|theta|), and a gate
as |y| q/(1 + q). The file holds the heads; what is computed are these polynomials, with coefficients made in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import ONE, ORDER, ZERO, NotProved, reach, size, up
from ..file import Saved, outward
from ..functions import function
from ..program import number, whole
from ..rounding import EXPONENTIAL, MACHINES, Machine
from ..scalar import Cell, Head, HeadSum, Weights, cell_error, taylor_head

MOST, MOST_EDGES = 64, 1 << 14  # anchors, and cells: work is bounded for every file
QUOTIENT = {"float32": 4, "float64": 1}  # u of a division: compilers for GPUs divide to 2 units in the last place
#: The log of the largest mass; from which kappa pairs are read, and from which kappa K^2 windows: what evaluation does.
LARGEST, COLD = {"float32": 75.0, "float64": 600.0}, {"float32": 17.0, "float64": 37.0}
WIDEST = {"float32": 140.0, "float64": 1200.0}  # as COLD
COARSE = arb(2.0**-53)  # of float64, in which coefficients are made
#: Heads in exact arithmetic, all but: slots of less than 2^-200 are left out, and everything else is enclosed.
EXACT = Machine(arb(2.0**-100), ZERO, arb(2.0**1015))


@dataclass(frozen=True)
class Read:
    """What a file says is read: a function, the numbers of a table, and the heads that they are."""

    name: str
    ends: tuple[float, float]
    rate: float
    kappa: float
    centre: float
    gate: float
    heads: tuple[Head, ...]
    dtype: str

    @property
    def values(self) -> tuple[float, ...]:
        """Those of the anchors, none for a gate alone."""
        return () if self.heads[-1].own else self.heads[-1].memory


def prove_fast(saved: Saved, chosen: Any) -> tuple[float, str, tuple[str, ...], int]:
    """The bound of a fast activation, the dtype, what it is, and its cells."""
    fast = Fast(saved)
    try:
        edges = [number(x) for x in chosen["edges"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CertificateError(f"the derivation does not fit a fast activation: {error!r}") from error
    pairs, read = list(itertools.pairwise(edges)), fast.read
    if not 2 <= len(edges) <= MOST_EDGES or any(not a < b for a, b in pairs):
        raise CertificateError("the edges of its cells are not in order, or too many")
    if edges[0] > read.ends[0] or edges[-1] < read.ends[1]:
        raise CertificateError("the cells of the derivation do not cover the interval")
    found = max(fast.error(*pair) for pair in pairs)
    if not math.isfinite(found):
        raise NotProved("nothing can be proved on a part of the interval")
    return found, read.dtype, (f"{read.name}, {len(read.values)} anchors",), len(pairs)


class Fast:
    """A file's heads, and their errors on cells."""

    def __init__(self, saved: Saved):
        try:
            self.read = read = _read(saved.header["config"], saved)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise CertificateError(f"the file describes no fast activation: {error!r}") from error
        self.machine = MACHINES[read.dtype]
        self.site = HeadSum(read.heads, (0.0, 0.0, 0.0), function(read.name), 0.0, read.dtype)
        self.sums = _coefficients(read) if read.values else None

    def error(self, low: float, high: float) -> float:
        """How far what is computed on a cell is from the function, at most; infinity where nothing is known."""
        if any(low < x < high for x in (0.0, self.read.centre)):
            return math.inf  # signs of y and of theta are those of a cell
        cell = Cell.of(low, high, self.site.function)
        return up(cell_error(self.site, EXACT, cell).rest + _reading(self.read, self.machine, self.sums, cell))


def _read(config: Any, saved: Saved) -> Read:
    """The numbers of the table, and that the stored tensors but the values are these, exactly."""
    table, tensors, dtype = config["table"], dict(saved.tensors), config["dtype"]
    if dtype not in MACHINES or any(tensor.dtype != dtype for tensor in tensors.values()):
        raise NotProved(f"the kernel speaks of heads stored and run in float32 or float64, not {dtype!r}")
    rate, kappa, centre, gate = (number(table[key]) for key in ("rate", "kappa", "centre", "gate"))
    count = whole(table["anchors"], 0, MOST)
    last = Fraction(count - 1, 2)
    if gate < 0 or (count and not (count > 1 and rate > 0 and kappa > 0)) or not (count or gate):
        raise ValueError("its numbers are not those of a table")
    if count and (kappa >= COLD[dtype] or kappa * float(last) ** 2 > WIDEST[dtype]):
        raise NotProved("the kernel has a rule for tables that are read as one quotient of polynomials")
    places = [Fraction(i) - last for i in range(count)]
    keys = tuple((_kept(Fraction(rate) * k, dtype), _kept(-Fraction(kappa) * k * k, dtype)) for k in places)
    for x in (rate, centre, gate):
        _kept(Fraction(x), dtype)
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
        values = tensors.pop(f"{prefix}M_V")
        if values.shape != (1, count, 1) or not all(map(math.isfinite, values.numbers)):
            raise ValueError("its values are not one finite number for each anchor")
        wanted |= {
            f"{prefix}W_Q": ((1, 1, 2), (1.0, 0.0)), f"{prefix}b_Q": ((1, 2), (-centre, 1.0)),
            f"{prefix}M_K": ((1, count, 2), tuple(x for key in keys for x in key)),
            f"{prefix}W_O": ((1, 1, 1), (1.0,)),
        }  # fmt: skip
        query = (1.0, -centre), (0.0, 1.0)
        heads.append(Head(query, keys, False, (0.0,) * 3, values.numbers, 1.0))
    if {name: (tensor.shape, tensor.numbers) for name, tensor in tensors.items()} != wanted:
        raise CertificateError("the stored queries, keys and outputs are not the numbers that are read")
    low, high = (number(x) for x in config["interval"])
    ends = outward(low, dtype, above=False), outward(high, dtype, above=True)
    return Read(str(config["function"]), ends, rate, kappa, centre, gate, tuple(heads), dtype)


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
    shift = arb(min(read.kappa * (0.5 * (count - 1)) ** 2, LARGEST[read.dtype]))
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
    """What is computed on a cell, less the heads in exact arithmetic (lemma K36)."""
    u, tiny, divided, gate = machine.u, machine.tiny, QUOTIENT[read.dtype], arb(read.gate)
    most = size(cell.centre) + cell.radius
    error, length = (ZERO, ZERO) if sums is None else _quotient(read, machine, sums, cell.centre, cell.radius)
    if not most * (1 + gate + arb(read.rate)) < machine.huge:
        return arb.pos_inf()
    if not read.gate:
        return error
    bump = most / (1 + (gate * arb(min(abs(cell.low), abs(cell.high)))).exp())
    relative = (gate * most * u).exp() * (1 + arb(1.01) * (EXPONENTIAL + arb(4.4) + divided) * u) - 1
    error += arb(2.1) * u * (length + error)
    inner = error + bump * relative + (1 + most) * tiny
    inner += u * (length + bump + inner) + tiny
    if cell.high <= 0:
        return inner
    total = length + bump + inner  # the last sum errs by no more than the smaller of its terms
    return inner + total.min(u * (most + total) * (1 + u))


def _quotient(read: Read, machine: Machine, sums: Sums, y: arb, r: arb) -> tuple[arb, arb]:
    """The error of the computed quotient as the mean of the table, and the size of that."""
    (q, p, odd), (q_all, p_all, odd_all), masses = sums
    u, tiny, divided, rate = machine.u, machine.tiny, QUOTIENT[read.dtype], arb(read.rate)
    head, count = read.heads[-1], len(read.values)
    theta, own = rate * (y - arb(read.centre)), (count + 8) * COARSE
    motion = machine.gamma(1 if read.centre == 0 else 2) * (size(theta) + rate * r)
    motion += (2 + rate) * 2 * tiny - (1 - EXPONENTIAL * u).log()
    wide = r + motion / rate
    weights = Weights.of(head, y, wide)
    (_, (thin, about)), _, _ = taylor_head(head, EXACT, weights, y, wide, ZERO)
    slope = reach([(j + 1) * c for j, c in enumerate(thin[1:-1])], (ORDER + 1) * about[-1], wide)
    moved, drift = reach([ZERO, *thin[1:-1]], about[-1], wide), ZERO
    for w, v, (k, _) in zip(weights.most, read.values, head.keys, strict=True):
        drift += w * _off(read, arb(k) / rate).expm1() * (size(arb(v) - thin[0]) + moved)
    drift *= _off(read, arb(count - 1) / 2).exp()
    moved += drift
    length = size(thin[0]) + moved
    near, far = (size(theta) - rate * wide).max(ZERO).lower(), size(theta) + rate * wide
    turn = arb(1) if count % 2 else arb(0.5)
    tilt, steep, s = (turn * theta).tanh(), turn * rate * wide, size(1 / (2 * near.cosh())) + tiny
    before = power = ONE
    numerator, denominator, moving = 24 * tiny, 16 * tiny, ZERO
    for j, (a, b, c) in enumerate(zip(p, odd, q, strict=True)):
        left = size(a + tilt * b - thin[0] * c) + steep * size(b) + moved * size(c)
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
    return motion / rate * slope + drift + quotient + divided * u * (length + quotient) + tiny, length


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
