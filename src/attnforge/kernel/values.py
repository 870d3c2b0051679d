"""Where every value of a program lives on a part of the box (lemma K10).

Each entry is enclosed twice: by a ball, and by an affine form slope . t + rest, where t in [-1, 1]^d is the position
inside the part. Balls forget that x - x is 0; forms do not. The ball is cut to what the form says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flint import arb, arb_mat

from .balls import ZERO, NotProved, down, hull, size, up
from .functions import evaluate
from .program import Op, Program
from .scalar import Table

MOST_SYMBOLS = 64  # coordinates of the box up to which forms are kept: they cost an entry for each


@dataclass(frozen=True)
class Entry:
    """One number of a value: low <= z <= high, and z = slope . t + (something in `rest`) where a form is kept."""

    low: float
    high: float
    rest: arb
    slope: tuple[arb, ...] | None

    @property
    def size(self) -> arb:
        """The largest absolute value."""
        return arb(max(abs(self.low), abs(self.high)))

    def away(self, place: float) -> arb:
        """The largest distance from a place."""
        return size(arb(self.low) - arb(place)).max(size(arb(self.high) - arb(place)))


Value = list[list[Entry]]  # token, channel


class Blind(Exception):
    """Nothing is known of a value on a part of the box."""


def plain(low: float, high: float, symbols: int | None) -> Entry:
    """An entry without a tilt."""
    ball = hull(low, high)
    return Entry(low, high, ball, None if symbols is None else (ZERO,) * symbols)


def ball(entry: Entry) -> arb:
    """All that an entry can be."""
    return hull(entry.low, entry.high)


def made(low: float, high: float, rest: arb, slope: tuple[arb, ...]) -> Entry:
    """An entry whose interval is cut to what its form says."""
    if not rest.is_finite() or not all(s.is_finite() for s in slope):
        return plain(low, high, len(slope))
    swing = sum((size(s) for s in slope), ZERO)
    low, high = max(low, down(rest.lower() - swing)), min(high, up(rest.upper() + swing))
    return Entry(low, high, rest, slope)


def combined(
    pairs: Sequence[tuple[arb, Entry]], symbols: int | None, more: arb = ZERO,
    least: float = -math.inf, most: float = math.inf,
) -> Entry:  # fmt: skip
    """The sum of weights times entries, and `more`, known to lie in [least, most]; weights of one sign each."""
    low = sum((w * arb(e.low if w > 0 else e.high) for w, e in pairs), more)
    high = sum((w * arb(e.high if w > 0 else e.low) for w, e in pairs), more)
    ends = max(least, down(low)), min(most, up(high))
    if symbols is None:
        return plain(*ends, None)
    rest = sum((w * e.rest for w, e in pairs), more)
    slope = tuple(sum((w * e.slope[t] for w, e in pairs), ZERO) for t in range(symbols))  # type: ignore[index]
    return made(*ends, rest, slope)


def values(program: Program, low: Sequence[float], high: Sequence[float], tables: dict[int, Table]) -> list[Value]:
    """The entries of every value on the part [low, high] of the box; `tables` are those of operations, by number."""
    found: list[Value] = []
    symbols = len(low) if len(low) <= MOST_SYMBOLS else None
    for i, op in enumerate(program.ops):
        reads = [found[j] for j in op.inputs]
        if op.word == "input":
            value = _input(op, program.tokens, low, high, symbols)
        elif op.word == "constant":
            pairs = zip(op.extra["value"], op.extra["off"][0], strict=True)
            value = [[_around(x, r, symbols) for x, r in zip(*rows, strict=True)] for rows in pairs]
        elif op.word == "linear":
            value = _linear(op, reads, symbols)
        elif op.word == "apply":
            read = found[op.inputs[0]] = [[_cut(entry, *op.function.domain) for entry in row] for row in reads[0]]
            if any(e.low < op.function.own[0] or e.high > op.function.own[1] for row in read for e in row):
                raise NotProved(f"'{op.function.name}' is read beyond its ends")
            value = [[_apply(op, entry, tables.get(i)) for entry in row] for row in read]
        elif op.word == "product":
            value = [[product(x, y) for x, y in zip(*rows, strict=True)] for rows in zip(*reads, strict=True)]
        else:
            if op.word not in OTHERS:
                raise NotProved(f"the kernel does not cover {op.word!r} yet")
            value = OTHERS[op.word](op, reads, symbols)
        if not all(math.isfinite(e.low) and math.isfinite(e.high) and e.low <= e.high for row in value for e in row):
            raise Blind(f"operation {i} ({op.word})")
        found.append(value)
    return found


def _around(x: float, off: float, symbols: int | None) -> Entry:
    """A constant, and the numbers that it may stand for."""
    return plain(x, x, symbols) if off == 0 else plain(down(arb(x) - arb(off)), up(arb(x) + arb(off)), symbols)


def _input(op: Op, tokens: int, low: Sequence[float], high: Sequence[float], symbols: int | None) -> Value:
    out: Value = []
    for t in range(tokens):
        row = []
        for c in range(op.width):
            i = t * op.width + c
            middle = arb(0.5 * low[i] + 0.5 * high[i])
            half = arb(max(up(arb(high[i]) - middle), up(middle - arb(low[i]))))
            slope = None if symbols is None else tuple(half if j == i else ZERO for j in range(symbols))
            row.append(Entry(low[i], high[i], middle, slope))
        out.append(row)
    return out


def _linear(op: Op, reads: list[Value], symbols: int | None) -> Value:
    numbers = [x for matrix in op.extra["weights"] for row in matrix for x in row]
    n = len(numbers) // op.width
    weights = arb_mat(n, op.width, numbers)
    positive = arb_mat(n, op.width, [max(x, 0.0) for x in numbers])
    negative = arb_mat(n, op.width, [min(x, 0.0) for x in numbers])
    distance = arb_mat(n, op.width, [x for matrix in op.extra["off"][:-1] for row in matrix for x in row])
    out: Value = []
    for together in zip(*reads, strict=True):
        entries = [entry for row in together for entry in row]
        low, high = (arb_mat(1, n, ends) for ends in ([e.low for e in entries], [e.high for e in entries]))
        least, most = low * positive + high * negative, high * positive + low * negative
        meant = arb_mat(1, n, [e.size for e in entries]) * distance  # what the numbers that are meant may add
        if symbols is not None:
            lines = [[e.rest for e in entries], *([e.slope[j] for e in entries] for j in range(symbols))]  # type: ignore[index]
            product = arb_mat(len(lines), n, [x for line in lines for x in line]) * weights
        row = []
        for c in range(op.width):
            bias = arb(op.extra["bias"][c]) + arb(0, 1) * size(meant[0, c] + arb(op.extra["off"][-1][c]))
            ends = down(least[0, c] + bias), up(most[0, c] + bias)
            if symbols is None:
                row.append(plain(*ends, None))
            else:
                row.append(made(*ends, product[0, c] + bias, tuple(product[j + 1, c] for j in range(symbols))))
        out.append(row)
    return out


def _cut(entry: Entry, first: float, last: float) -> Entry:
    """An entry without what lies outside of the domain of a function that reads it: there the program has no value."""
    low, high = max(entry.low, first), min(entry.high, last)
    return replace(entry, low=low, high=high) if low <= high else entry


def _apply(op: Op, read: Entry, table: Table | None) -> Entry:
    """A function by the cells of its table, and by its tangent in the middle of the range."""
    low, high = read.low, read.high
    symbols = None if read.slope is None else len(read.slope)
    whole = op.function.range(low, high)
    first, last = down(whole), up(whole)
    cells = None if table is None else table.between(low, high)
    if cells is not None and table is not None:
        least, most = table.range(low, high, *cells)
        first, last = max(first, least), min(last, most)
    if op.function.name == "piecewise_linear":  # between its values at the ends and at the knots
        spots = (low, high, *(k for k in op.function.knots if low < k < high))
        ends = [evaluate(op.function.piece(x, x) or ("y",), arb(x), 1)[0] for x in spots]
        first, last = max(first, min(map(down, ends))), min(last, max(map(up, ends)))
    node = op.function.piece(low, high)
    if read.slope is None or node is None or not first <= last:
        return plain(first, last, symbols)
    middle = 0.5 * low + 0.5 * high
    away = arb(max(up(arb(high) - middle), up(arb(middle) - low)))
    bent = size(evaluate(node, arb(middle) + arb(0, up(away)), 3)[2])
    value, tilt = evaluate(node, arb(middle), 2)
    rest = value + tilt * (read.rest - middle) + arb(0, 1) * bent * away * away
    if not rest.is_finite() or not 2 * rest.rad() < last - first:
        return plain(first, last, symbols)
    return made(first, last, rest, tuple(tilt * s for s in read.slope))


def product(x: Entry, y: Entry) -> Entry:
    """Corners, and around the middles a, b of the forms: x y = a y + b x - a b + (x - a)(y - b)."""
    ends = [arb(a) * arb(b) for a in (x.low, x.high) for b in (y.low, y.high)]
    low, high = min(map(down, ends)), max(map(up, ends))
    if x.slope is None or y.slope is None:
        return plain(low, high, None)
    a, b = x.rest.mid(), y.rest.mid()
    slope = tuple(a * t + b * s for s, t in zip(x.slope, y.slope, strict=True))
    far_x = sum((size(s) for s in x.slope), size(x.rest - a))
    far_y = sum((size(s) for s in y.slope), size(y.rest - b))
    return made(low, high, a * y.rest + b * x.rest - a * b + arb(0, 1) * far_x * far_y, slope)


OTHERS: dict[str, Callable[[Op, list[Value], int | None], Value]] = {}  # operations over tokens enter here
