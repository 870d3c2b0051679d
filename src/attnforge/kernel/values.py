"""Where every value of a program lives on a part of the box (lemma K6).

Each entry is enclosed twice: by a ball, and by an affine form slope . t + rest, where t in [-1, 1]^d is the position
inside the part. Balls forget that x - x is 0; forms do not. The ball is cut to what the form says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flint import arb, arb_mat

from .balls import ZERO, down, hull, size, up
from .functions import evaluate
from .program import Op, Program
from .scalar import Table

MOST_SYMBOLS = 64  # coordinates of the box up to which forms are kept: they cost an entry for each


@dataclass(frozen=True)
class Entry:
    """One number of a value: its ball, and its form where one is kept."""

    ball: arb
    rest: arb
    slope: tuple[arb, ...] | None

    @property
    def size(self) -> arb:
        """The largest absolute value."""
        return size(self.ball)


Value = list[list[Entry]]  # token, channel


class Blind(Exception):
    """Nothing is known of a value on a part of the box."""


def plain(ball: arb, symbols: int | None) -> Entry:
    """An entry without a tilt."""
    return Entry(ball, ball, None if symbols is None else (ZERO,) * symbols)


def made(ball: arb, rest: arb, slope: tuple[arb, ...]) -> Entry:
    """An entry whose ball is cut to what its form says."""
    swing = sum((size(s) for s in slope), ZERO)
    formed = rest + arb(0, up(swing))
    if not formed.is_finite():
        return Entry(ball, ball, (ZERO,) * len(slope))
    low, high = max(down(ball), down(formed)), min(up(ball), up(formed))
    return Entry(hull(low, high) if ball.is_finite() and low <= high else formed, rest, slope)


def values(program: Program, low: Sequence[float], high: Sequence[float], tables: dict[int, Table]) -> list[Value]:
    """The entries of every value on the part [low, high] of the box; `tables` are those of operations, by number."""
    found: list[Value] = []
    symbols = len(low) if len(low) <= MOST_SYMBOLS else None
    for i, op in enumerate(program.ops):
        reads = [found[j] for j in op.inputs]
        if op.word == "input":
            value = _input(op, program.tokens, low, high, symbols)
        elif op.word == "constant":
            value = [[plain(arb(x), symbols) for x in row] for row in op.extra["value"]]
        elif op.word == "linear":
            value = _linear(op, reads, symbols)
        elif op.word == "apply":
            value = [[_apply(op, entry, tables.get(i)) for entry in row] for row in reads[0]]
        elif op.word == "product":
            value = [[_product(x, y) for x, y in zip(*rows, strict=True)] for rows in zip(*reads, strict=True)]
        else:
            value = OTHERS[op.word](op, reads, symbols)
        if not all(entry.ball.is_finite() for row in value for entry in row):
            raise Blind(f"operation {i} ({op.word})")
        found.append(value)
    return found


def _input(op: Op, tokens: int, low: Sequence[float], high: Sequence[float], symbols: int | None) -> Value:
    out: Value = []
    for t in range(tokens):
        row = []
        for c in range(op.width):
            i = t * op.width + c
            middle = arb(0.5 * low[i] + 0.5 * high[i])
            half = arb(max(up(arb(high[i]) - middle), up(middle - arb(low[i]))))
            slope = None if symbols is None else tuple(half if j == i else ZERO for j in range(symbols))
            row.append(Entry(hull(low[i], high[i]), middle, slope))
        out.append(row)
    return out


def _linear(op: Op, reads: list[Value], symbols: int | None) -> Value:
    rows = [x for matrix in op.extra["weights"] for row in matrix for x in row]
    weights = arb_mat(len(rows) // op.width, op.width, rows)
    out: Value = []
    for together in zip(*reads, strict=True):
        entries = [entry for row in together for entry in row]
        lines = [[e.ball for e in entries], [e.rest for e in entries]]
        if symbols is not None:
            slopes = [e.slope for e in entries]
            lines += [[ZERO if s is None else s[j] for s in slopes] for j in range(symbols)]
        product = arb_mat(len(lines), len(entries), [x for line in lines for x in line]) * weights
        row = []
        for c in range(op.width):
            bias = arb(op.extra["bias"][c])
            ball, rest = product[0, c] + bias, product[1, c] + bias
            if symbols is None:
                row.append(Entry(ball, ball, None))
            else:
                row.append(made(ball, rest, tuple(product[j + 2, c] for j in range(symbols))))
        out.append(row)
    return out


def _apply(op: Op, read: Entry, table: Table | None) -> Entry:
    """A function by the cells of its table, and by its tangent in the middle of the range."""
    low, high = down(read.ball), up(read.ball)
    symbols = None if read.slope is None else len(read.slope)
    cells = None if table is None else table.between(arb(low), arb(high))
    whole = op.function.range(low, high)
    if cells is not None and table is not None:
        first, last = min(table.low[cells[0] : cells[1]]), max(table.high[cells[0] : cells[1]])
        if whole.is_finite():
            first, last = max(first, down(whole)), min(last, up(whole))
        whole = hull(first, last) if first <= last else whole
    node = op.function.piece(low, high)
    if read.slope is None or node is None:
        return plain(whole, symbols)
    middle = 0.5 * low + 0.5 * high
    away = arb(max(up(arb(high) - middle), up(arb(middle) - low)))
    bent = size(evaluate(node, arb(middle) + arb(0, up(away)), 3)[2])
    value, tilt = evaluate(node, arb(middle), 2)
    rest = value + tilt * (read.rest - middle) + arb(0, 1) * bent * away * away
    if not rest.is_finite() or not whole.is_finite() or not rest.rad() < whole.rad():
        return plain(whole, symbols)
    return made(whole, rest, tuple(tilt * s for s in read.slope))


def _product(x: Entry, y: Entry) -> Entry:
    """Corners, and around the middles a, b of the forms: x y = a y + b x - a b + (x - a)(y - b)."""
    ends = [a * b for a in (x.ball.lower(), x.ball.upper()) for b in (y.ball.lower(), y.ball.upper())]
    ball = ends[0].union(ends[1]).union(ends[2]).union(ends[3])
    if x.slope is None or y.slope is None:
        return Entry(ball, ball, None)
    a, b = x.rest.mid(), y.rest.mid()
    slope = tuple(a * t + b * s for s, t in zip(x.slope, y.slope, strict=True))
    far_x = sum((size(s) for s in x.slope), size(x.rest - a))
    far_y = sum((size(s) for s in y.slope), size(y.rest - b))
    rest = a * y.rest + b * x.rest - a * b + arb(0, 1) * far_x * far_y
    return made(ball, rest, slope)


OTHERS: dict[str, Callable[[Op, list[Value], int | None], Value]] = {}  # operations over tokens enter here
