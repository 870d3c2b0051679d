"""Heads that read one scalar y: anchors, gates, squares and products are one lemma (K8 of docs/kernel.md).

The logits of such heads are affine in y, their values affine in y and in a second argument x. What they write is
A(y) x + B(y), and so is what they should write: a function g(y), or x y. On a cell of y both coefficients of the
difference are enclosed by a Taylor polynomial at the centre and a Lagrange coefficient over the cell; rounding is K4.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flint import arb, arb_mat

from .balls import ONE, ORDER, ZERO, Series, coefficients, down, largest, reach, series, size, supremum, up
from .functions import Function, evaluate
from .rounding import EXPONENTIAL, MACHINES, Machine, Softmax, power_of_two

MOST_SLOTS = 12  # of a head that one of them may decide
FEW_SLOTS = 4  # of a head whose slots are all looked at; of others, those that weigh something
NARROW = 0.5  # logits that move by less on a cell are left to Taylor polynomials
KNOWN = 1 << 13  # cells that are remembered: a proof asks for those again that its derivation looked at
MANY, STEP, WIDEST = 48, 4, 64  # heads of more slots are looked at on wider intervals first


@dataclass(frozen=True)
class Head:
    """The stored numbers of one head, over y (queries and values) and x (values).

    `query` is (weight of y, bias) for each coordinate, `keys` a row for each slot. If `own`, the first slot is the
    token itself, with the value x * value[0] + y * value[1] + value[2]; `memory` are the others' values, `out` is W_O.
    `loose` and `lost`, where given, are how far queries and the own value can be off: more than rounding (lemma K32).
    """

    query: tuple[tuple[float, float], ...]
    keys: tuple[tuple[float, ...], ...]
    own: bool
    value: tuple[float, float, float]
    memory: tuple[float, ...]
    out: float
    loose: tuple[float, ...] | None = None
    lost: float | None = None


@dataclass(frozen=True)
class HeadSum:
    """The heads of one scalar result, and its skip: x * skip[0] + y * skip[1] + skip[2]. Without a function: x y.

    `pivot` is subtracted from x in the bound, which is best where the heads subtract it too: a choice. `reading`, where
    given, is how far another way to compute its one head is from that in exact arithmetic (lemma K47).
    """

    heads: tuple[Head, ...]
    skip: tuple[float, float, float]
    function: Function | None
    pivot: float
    dtype: str
    reading: Callable[[Machine, Cell], arb] | None = None


@dataclass(frozen=True)
class Bound:
    """slope |x - pivot| + rest."""

    slope: arb
    rest: arb

    def __add__(self, other: Bound) -> Bound:
        return Bound(self.slope + other.slope, self.rest + other.rest)

    def times(self, factor: arb) -> Bound:
        """The bound times a non-negative factor."""
        return Bound(self.slope * factor, self.rest * factor)


NOTHING = Bound(ZERO, ZERO)


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell [low, high], |y - centre| <= radius, and the function on it, around its centre and around all points."""

    low: float
    high: float
    function: Function | None
    centre: arb
    radius: arb
    thin: Series
    wide: Series

    @staticmethod
    @functools.lru_cache(maxsize=KNOWN)
    def of(low: float, high: float, function: Function | None) -> Cell:
        """The cell [low, high]; a function that has no series on it is a constant ball there."""
        middle = ((arb(low) + arb(high)) / 2).mid()  # not a float, where the cell is one unit wide
        radius = arb(max(up(arb(high) - middle), up(middle - arb(low))))
        if function is None:
            return Cell(low, high, None, middle, radius, [], [])
        count, whole = ORDER + 2, function.range(low, high)
        node = function.piece(low, high)
        thin = wide = [whole, *[ZERO] * (count - 1)]
        if node is not None:
            near, far = evaluate(node, middle, count), evaluate(node, middle + arb(0, up(radius)), count)
            if size(far[-1]) * radius ** (ORDER + 1) <= 2 * arb(up(whole.rad()) if whole.is_finite() else math.inf):
                thin, wide = near, far
        return Cell(low, high, function, middle, radius, thin, wide)

    @functools.cached_property
    def shape(self) -> tuple[float, float, float, bool]:
        """The range of the function, an upper bound of its slope, and whether it is known to be monotone."""
        assert self.function is not None
        whole = self.function.range(self.low, self.high)
        near = self.thin[0] + arb(0, 1) * reach([ZERO, *self.thin[1:-1]], self.wide[-1], self.radius)
        least = max(down(whole), down(near)) if whole.is_finite() else down(near)
        most = min(up(whole), up(near)) if whole.is_finite() else up(near)
        return (least, most, *_steepest(self.function, self))


class Table:
    """A function on cells: its range and its slope on each; and the errors of sites on the same cells."""

    def __init__(self, function: Function | None, edges: Sequence[float]):
        self.function, self.edges = function, list(edges)
        self.cells = [Cell.of(a, b, function) for a, b in itertools.pairwise(edges)]
        shapes = [] if function is None else [cell.shape for cell in self.cells]
        self.low, self.high, self.slope = ([shape[i] for shape in shapes] for i in range(3))
        self.monotone = [shape[3] for shape in shapes]

    def between(self, first: float, last: float) -> tuple[int, int] | None:
        """The cells that meet [first, last], as a range; None where they do not cover it."""
        if not (self.edges[0] <= first and last <= self.edges[-1]):
            return None
        start = min(bisect.bisect_right(self.edges, first) - 1, len(self.cells) - 1)
        return start, max(bisect.bisect_left(self.edges, last), start + 1)

    def range(self, low: float, high: float, start: int, stop: int) -> tuple[float, float]:
        """The range of the function on [low, high], which meets the cells from start to stop."""
        inner = range(start, stop)
        ends = {start: (low, min(high, self.edges[start + 1]))}
        ends[stop - 1] = (max(low, self.edges[stop - 1]), high)  # of a cell that is cut, only the part counts
        found_low, found_high = [], []
        for k in inner:
            least, most = self.low[k], self.high[k]
            if k in ends:
                part = self._part(k, *ends[k])
                least, most = max(least, down(part)), min(most, up(part))
            found_low.append(least)
            found_high.append(most)
        return min(found_low), max(found_high)

    def _part(self, cell: int, low: float, high: float) -> arb:
        """The function on a part of a cell: by its ends where it is monotone, by its slope otherwise."""
        assert self.function is not None
        node = self.function.piece(low, high)
        if node is None or not math.isfinite(self.slope[cell]):
            return arb(0, math.inf)
        if self.monotone[cell]:
            return evaluate(node, arb(low), 1)[0].union(evaluate(node, arb(high), 1)[0])
        middle = 0.5 * low + 0.5 * high
        half = max(up(arb(high) - middle), up(arb(middle) - low))
        return evaluate(node, arb(middle), 1)[0] + arb(0, 1) * arb(self.slope[cell]) * arb(half)

    def errors(self, site: HeadSum) -> tuple[list[float], list[float]]:
        """Slope and rest of the error of a site on each cell, rounded up."""
        found = [error_on(site, a, b) for a, b in itertools.pairwise(self.edges)]
        return [slope for slope, _ in found], [rest for _, rest in found]


@functools.lru_cache(maxsize=KNOWN)
def error_on(site: HeadSum, low: float, high: float) -> tuple[float, float]:
    """Slope and rest of the error of a site on a cell, rounded up; between neighbouring numbers there are only both."""
    if low < high == math.nextafter(low, math.inf) and all(head.loose is None for head in site.heads):
        ends = error_on(site, low, low), error_on(site, high, high)
        return max(end[0] for end in ends), max(end[1] for end in ends)
    found = cell_error(site, MACHINES[site.dtype], Cell.of(low, high, site.function))
    return up(found.slope), up(found.rest)


def _steepest(function: Function, cell: Cell) -> tuple[float, bool]:
    """An upper bound of |g'| on a cell, of all formulas that meet it where a knot lies inside; and whether g' has one
    sign on it."""
    low, high = cell.low, cell.high
    node = function.piece(low, high)
    if node is not None:
        own = evaluate(node, cell.centre + arb(0, up(cell.radius)), 3)
        there = evaluate(node, cell.centre, 2)[1]
        moves = 2 * size(own[2]) * cell.radius
        steepest = min(up(size(own[1])), up(size(there) + moves))
        return steepest, bool(own[1] >= 0 or own[1] <= 0 or there >= moves or there <= -moves)
    found = 0.0
    for k, part in enumerate(function.pieces):
        start = low if k == 0 else max(low, function.knots[k - 1])
        stop = high if k == len(function.knots) else min(high, function.knots[k])
        if start <= stop:
            found = max(found, up(size(evaluate(part, arb(start).union(arb(stop)), 2)[1])))
    return found, False


def cell_error(site: HeadSum, machine: Machine, cell: Cell) -> Bound:
    """How far what the heads compute is from what they should, on a cell (lemma K8)."""
    y, r, one = cell.centre, cell.radius, ONE
    target: tuple[Series, Series] = (cell.thin, cell.wide)
    count = ORDER + 2
    a = [[ZERO] * count, [ZERO] * count]  # A and B, around the centre and over the cell
    b = [[ZERO] * count, [ZERO] * count]
    outputs: list[tuple[Bound, Bound]] = []  # error and size of each head
    p = arb(site.pivot)
    for head in site.heads:
        if not _finite(head, machine, y, r, p):
            return Bound(arb.pos_inf(), arb.pos_inf())
        parts, error, most = _one_head(head, machine, y, r, p)
        if site.reading is not None:
            other = site.reading(machine, cell)
            error, most = Bound(error.slope, error.rest.max(other)), Bound(most.slope, most.rest + other)
        for i in (0, 1):
            a[i] = [s + arb(head.out) * t for s, t in zip(a[i], parts[0][i], strict=True)]
            b[i] = [s + arb(head.out) * t for s, t in zip(b[i], parts[1][i], strict=True)]
        outputs.append((error, most))
    heads = Bound(reach(a[0][:-1], a[1][-1], r), reach(b[0][:-1], b[1][-1], r))  # size of the exact sum
    wide = y + arb(0, up(r))
    x_skip, y_skip, bias = map(arb, site.skip)
    for i, at in ((0, y), (1, wide)):
        a[i][0] += x_skip
        b[i][0] += x_skip * p + y_skip * at + bias
        b[i][1] += y_skip
        if site.function is None:  # x y = (x - p) y + p y
            a[i][0] -= at
            a[i][1] -= one
            b[i][0] -= p * at
            b[i][1] -= p
        else:
            b[i] = [s - t for s, t in zip(b[i], target[i], strict=True)]
    alone = site.function is not None and all(head.value[0] == 0 for head in site.heads)
    off = Bound(ZERO if alone else supremum(a[0][:-1], a[1][-1], r), supremum(b[0][:-1], b[1][-1], r))
    return off + _outer(site, machine, y, r, heads, outputs)


Parts = tuple[tuple[list[Series], list[Series]], Bound, Bound]  # A and B, thin and wide; rounding error; size


def _one_head(head: Head, machine: Machine, y: arb, r: arb, p: arb) -> Parts:
    """A head by the line of one slot, or by Taylor polynomials, whichever leaves less."""
    head, lost = _near(head, machine, y, r)
    decided = _decided(head, machine, y, r, p)
    if decided is not None and decided[0]:
        found = decided[1]
    else:
        found = taylor_head(head, machine, Weights.of(head, y, r), y, r, p)
        if decided is not None:
            left = found[1].rest + size(found[0][1][1][-1]) * r ** (ORDER + 1)
            found = found if left < decided[1][1].rest else decided[1]
    more = Bound(ZERO, lost)
    return found if lost.is_zero() else (found[0], found[1] + more, found[2] + more)


def _near(head: Head, machine: Machine, y: arb, r: arb) -> tuple[Head, arb]:
    """A head of constant values without the slots that weigh less than u^2 on a cell, also as computed; and how much
    that changes what is computed at most (lemma K8)."""
    most, known = up(size(y) + r), head
    if len(head.keys) > MANY and 0 < most < math.inf:
        exponent = max(math.frexp(2 * up(r))[1], math.frexp(most)[1] - 40)  # so that places are small whole numbers
        known = _around(head, machine, math.floor(math.ldexp(float(y), -exponent)), exponent)
    fewer, value = _heavy(known, machine, y, r), _largest(head)[1]
    return fewer, (len(head.keys) - len(fewer.keys)) * (16 * machine.u**2 * value + 4 * (1 + value) * machine.tiny)


@functools.lru_cache(maxsize=KNOWN)
def _around(head: Head, machine: Machine, place: int, exponent: int) -> Head:
    """What `_heavy` leaves of a head of many slots where place - 1 <= y / 2^exponent <= place + 2."""
    if head.own or len(head.keys) <= MANY or exponent > WIDEST:
        return head
    wider, unit = _around(head, machine, place >> STEP, exponent + STEP), arb(2) ** exponent
    return _heavy(wider, machine, (place + arb(0.5)) * unit, arb(1.5) * unit)


def _heavy(head: Head, machine: Machine, y: arb, r: arb) -> Head:
    """A head of constant values without slots whose logits are computed to be far below another one's on a cell."""
    if head.own or len(head.keys) <= FEW_SLOTS:
        return head
    a, b = lines_of(head)
    first = max(range(len(a)), key=lambda k: float((a[k] * y + b[k]).mid()))
    queries = zip(*_query(head, machine, y, r), strict=True)
    slack = [e + machine.gamma(len(head.query) + 1) * (s + e) for s, e in queries]
    off = [sum((size(arb(k)) * s for k, s in zip(key, slack, strict=True)), ZERO) for key in head.keys]
    limit = 2 * machine.u.log() - 1 - off[first]
    kept = []
    for k, (slope, level, more) in enumerate(zip(a, b, off, strict=True)):
        slope, level = slope - a[first], level - b[first]
        if not slope * y + level + slope.abs_upper() * r + more < limit:
            kept.append(k)
    return replace(head, keys=tuple(head.keys[k] for k in kept), memory=tuple(head.memory[k] for k in kept))


@functools.lru_cache(maxsize=4096)
def _largest(head: Head) -> tuple[list[arb], arb]:
    """The largest size of each coordinate of a head's keys, and of its constant values."""
    keys = [largest([size(arb(k)) for k in column]) for column in zip(*head.keys, strict=True)]
    return keys, largest([size(arb(v)) for v in head.memory])


@functools.lru_cache(maxsize=4096)
def lines_of(head: Head) -> tuple[list[arb], list[arb]]:
    """The logits of a head as a_k y + b_k."""
    a = [sum((arb(w) * arb(k) for (w, _), k in zip(head.query, key, strict=True)), ZERO) for key in head.keys]
    b = [sum((arb(c) * arb(k) for (_, c), k in zip(head.query, key, strict=True)), ZERO) for key in head.keys]
    return a, b


@dataclass(frozen=True)
class Weights:
    """The softmax of one head on a cell: weights at the centre, slopes of the logits less a common one, and more."""

    at: list[arb]
    slopes: list[arb]
    lifted: list[arb]  # w e^(s t) over the cell, as balls
    most: list[arb]  # upper bounds of the weights over the cell
    gap: list[arb]  # the largest logit less this one, at most, over the cell
    first: int  # whose logit is the largest at the centre, about
    behind: list[arb]  # the logit of that one less this one, at least, over the cell
    size: list[arb]  # |logit| at most

    @classmethod
    def of(cls, head: Head, y: arb, r: arb) -> Weights:
        a, b = lines_of(head)
        logits = [s * y + t for s, t in zip(a, b, strict=True)]
        first = max(range(len(logits)), key=lambda k: float(logits[k].mid()))
        top = logits[first].mid()
        powers = [(x - top).exp() for x in logits]
        total = sum(powers, ZERO)
        at = [x / total for x in powers]
        common = sum((w * s for w, s in zip(at, a, strict=True)), ZERO).mid()
        slopes = [s - common for s in a]
        swing = [size(s) * r for s in slopes]
        lifted = [w * (s * arb(0, up(r))).exp() for w, s in zip(at, slopes, strict=True)]
        drift = size(sum((w * s for w, s in zip(at, slopes, strict=True)), ZERO))
        least = (-drift * r).exp()  # of the sum of w e^(s t), by Jensen's inequality
        most = [w * s.exp() / least for w, s in zip(at, swing, strict=True)]
        most = [w if w < 1 else ONE for w in most]
        below = [top - x for x in logits]
        bump = largest([s - g for s, g in zip(swing, below, strict=True)])
        gap = [size(g) + bump + s for g, s in zip(below, swing, strict=True)]
        behind = [(logits[first] - x) - size(s - a[first]) * r for x, s in zip(logits, a, strict=True)]
        sizes = [size(x) + size(s) * r for x, s in zip(logits, a, strict=True)]
        return cls(at, slopes, lifted, most, gap, first, behind, sizes)


def taylor_head(
    head: Head, machine: Machine, w: Weights, y: arb, r: arb, p: arb
) -> Parts:
    """A head by Taylor polynomials: series of its A and B (thin and wide), its rounding error and its size."""
    count, slots = ORDER + 2, len(w.at)
    vx, vy, vb = map(arb, head.value)
    wide = arb(0, up(r))
    values = [arb(v) for v in head.memory]
    if head.own:
        values.insert(0, vx * p + vy * y + vb)
    about = sum((x * v for x, v in zip(w.at, values, strict=True)), ZERO).mid()  # quotients near 0 lose less
    powers = [[ONE] for _ in range(slots)]
    for row, s in zip(powers, w.slopes, strict=True):
        for j in range(1, count):
            row.append(row[-1] * s / j)
    rows = [w.at, [x * (v - about) for x, v in zip(w.at, values, strict=True)], w.lifted]
    spread = [v - about + (vy * wide if head.own and k == 0 else 0) for k, v in enumerate(values)]
    rows.append([x * v for x, v in zip(w.lifted, spread, strict=True)])
    left, right = ([x for row in table for x in row] for table in (rows, powers))
    product = arb_mat(4, slots, left) * arb_mat(slots, count, right)
    entries = product.entries()
    below, above, below_wide, above_wide = (entries[i : i + count] for i in range(0, 4 * count, count))
    if head.own and head.value[1] != 0:
        for j in range(1, count):
            above[j] += w.at[0] * vy * powers[0][j - 1]
            above_wide[j] += w.lifted[0] * vy * powers[0][j - 1]
    inverse, inverse_wide = _inverse(below), _inverse(below_wide)
    b = [_times(above, inverse), _times(above_wide, inverse_wide)]
    b[0][0], b[1][0] = b[0][0] + about, b[1][0] + about
    a = [[ZERO] * count, [ZERO] * count]
    if head.own and head.value[0] != 0:
        first = [x * vx for x in powers[0]]
        a = [_times([w.at[0] * x for x in first], inverse), _times([w.lifted[0] * x for x in first], inverse_wide)]
    softmax = Softmax.of(machine, w.most, _logit_errors(head, machine, w, y, r))
    variation = reach([ZERO, *b[0][1:-1]], b[1][-1], r)
    distance = [size(v - b[0][0]) + variation for v in values]
    sizes, lost, x_lost = [size(v) for v in values], ZERO, ZERO
    if head.own:
        distance[0] += size(vy) * r
        sizes[0] += size(vy) * r
        x_lost, lost = _value_errors(head, machine, y, r, p, sizes[0])
        sizes[0] += lost
    if not (head.own and head.value[0] != 0):
        rest, rest_size = softmax.error(distance, sizes, lost)
        return (a, b), Bound(ZERO, rest), Bound(ZERO, rest_size)
    weighty = softmax.weighty(sizes) | {0}
    rest, rest_size = softmax.error(distance, sizes, lost, weighty)
    others = sum(w.most[1:], ZERO)
    steep = [size(vx) * (others if others < 1 else ONE), *[size(vx) * w.most[0]] * (slots - 1)]
    slope, slope_size = softmax.error(steep, [size(vx) + x_lost, *[ZERO] * (slots - 1)], x_lost, weighty)
    return (a, b), Bound(slope, rest), Bound(slope_size, rest_size)


def _times(a: Series, b: Series) -> Series:
    return coefficients(series(a) * series(b), len(a))


def _inverse(a: Series) -> Series:
    return [arb.nan()] * len(a) if a[0].contains(0) else coefficients(series(a).inv(), len(a))


def _query(head: Head, machine: Machine, y: arb, r: arb) -> tuple[list[arb], list[arb]]:
    """|q_j| at most on a cell, and the error of the computed q_j = w y + c (lemma K3)."""
    most = size(y) + r
    sizes, errors = [], []
    for w, c in head.query:
        length = size(arb(w) * y + arb(c)) + size(arb(w)) * r
        error = ZERO
        if w != 0 and (w, c) != (1.0, 0.0):
            product = ZERO if power_of_two(w) else machine.u * size(arb(w)) * most
            error = product + 2 * machine.tiny
            if c != 0:
                error += machine.u * (length + error)
        sizes.append(length)
        errors.append(error)
    return sizes, errors if head.loose is None else list(map(arb, head.loose))


def _logit_errors(head: Head, machine: Machine, w: Weights, y: arb, r: arb) -> list[arb]:
    """How far the logits, less the largest, are from the exact ones, up to a number common to all (lemma K3)."""
    sizes, errors = _query(head, machine, y, r)
    means = [
        sum((x * arb(key[j]) for x, key in zip(w.at, head.keys, strict=True)), ZERO).mid() for j in range(len(sizes))
    ]
    found = []
    for key, length in zip(head.keys, w.size, strict=True):
        own = _inner(head, machine, key, length, sizes, errors)
        found.append(own + sum((size(arb(k) - m) * e for k, m, e in zip(key, means, errors, strict=True)), ZERO))
    own = found[w.first]
    worst = largest([e for e, x in zip(found, w.behind, strict=True) if not x > e + own])  # others are not the largest
    return [e + machine.u * (g + e + worst) + machine.tiny for e, g in zip(found, w.gap, strict=True)]


def _inner(
    head: Head, machine: Machine, key: tuple[float, ...], length: arb, sizes: list[arb], errors: list[arb]
) -> arb:
    """The rounding of one logit's inner product, whose exact value is at most `length`."""
    products = passed = total = ZERO
    for k, (w, c), s, e in zip(key, head.query, sizes, errors, strict=True):
        still = w == 0 and power_of_two(c)  # a coordinate that is a constant power of two
        term = (s + e) * size(arb(k))
        total += term
        passed += e * size(arb(k))
        if not (power_of_two(k) or still):
            products += machine.u * term
    used = sum(k != 0 for k in key)
    if used < 2:
        return products + machine.tiny
    if used == 2:
        return products + machine.u * (length + passed + products) + 3 * machine.tiny
    return products + machine.gamma(used - 1) * (total + products) + (used + 1) * machine.tiny


def _finite(head: Head, machine: Machine, y: arb, r: arb, p: arb) -> bool:
    """Whether no query, logit or value of a head comes near the end of the dtype's range, x - p aside."""
    most = size(y) + r
    queries = [size(arb(w)) * most + size(arb(c)) for w, c in head.query]
    keys, value = _largest(head)
    logit = sum((q * k for q, k in zip(queries, keys, strict=True)), ZERO)
    own = size(arb(head.value[0]) * p) + size(arb(head.value[1])) * most + size(arb(head.value[2]))
    out = ONE + size(arb(head.out))
    return all(x < machine.huge for x in (*queries, logit, own * out, value * out))


def _value_errors(head: Head, machine: Machine, y: arb, r: arb, p: arb, length: arb) -> tuple[arb, arb]:
    """The rounding of the token's own value x vx + y vy + vb: what is proportional to |x - p|, and the rest."""
    if head.lost is not None:
        return ZERO, arb(head.lost)
    vx, vy, vb = head.value
    u, slope, rest = machine.u, ZERO, ZERO
    if not power_of_two(vx):
        slope, rest = u * size(arb(vx)), u * size(arb(vx)) * size(p)
    if not power_of_two(vy):
        rest += u * size(arb(vy)) * (size(y) + r)
    used = (vx != 0) + (vy != 0)
    additions = max(used - 1, 0) + (vb != 0 and used > 0)
    if additions == 1:
        slope, rest = slope + u * (size(arb(vx)) + slope), rest + u * (length + rest)
    elif additions > 1:
        every = size(arb(vx) * p) + size(arb(vy)) * (size(y) + r) + size(arb(vb)) + rest
        slope, rest = slope + machine.gamma(2) * (size(arb(vx)) + slope), rest + machine.gamma(2) * every
    if used and (additions or any(0 < abs(v) < 1 for v in (vx, vy))):
        rest += 3 * machine.tiny
    return slope, rest


def _decided(
    head: Head, machine: Machine, y: arb, r: arb, p: arb
) -> tuple[bool, Parts] | None:
    """A head on a cell that is wide for Taylor polynomials: the line of one slot, and what the others may add; and
    whether that is settled.

    Where those weigh too little to be seen by the sum, the computed weight of the one is exactly 1 (lemma K9).
    """
    if head.value[0] != 0 or len(head.keys) > MOST_SLOTS:
        return None
    a, b = lines_of(head)
    middle = [s * y + t for s, t in zip(a, b, strict=True)]
    winner = max(range(len(a)), key=lambda k: float(middle[k]))
    swing = largest([size(s - a[winner]) for s in a]) * r
    near = (machine.u / 2).log()  # a slot that is nearer weighs too much to be lost
    if swing < NARROW and any(k != winner and x - middle[winner] > near for k, x in enumerate(middle)):
        return None
    sizes, errors = _query(head, machine, y, r)
    own = []
    for key, s, t in zip(head.keys, a, b, strict=True):
        passed = sum((size(arb(k)) * e for k, e in zip(key, errors, strict=True)), ZERO)
        own.append(passed + _inner(head, machine, key, size(s * y + t) + size(s) * r, sizes, errors))
    lines = [(ZERO, arb(v)) for v in head.memory]
    if head.own:
        lines.insert(0, (arb(head.value[1]), arb(head.value[2])))
    lengths = [size(s * y + c) + size(s) * r for s, c in lines]
    lost = _value_errors(head, machine, y, r, p, lengths[0])[1] if head.own else ZERO
    if head.own:
        lengths[0] += lost
    aways = []
    for k in range(len(a)):
        slope, level = a[k] - a[winner], b[k] - b[winner]
        aways.append((slope * (y - r) + level).max(slope * (y + r) + level).upper() + own[k] + own[winner])
    losers = [k for k in range(len(a)) if k != winner]
    clear = all(aways[k] < 0 for k in losers)
    extra = -2 * (1 - EXPONENTIAL * machine.u).log() + (ZERO if clear else 2 * machine.u * largest(aways))
    total, leak, leaked = ZERO, ZERO, ZERO
    for k in losers:
        weight = (aways[k] * (1 - 2 * machine.u) + extra).exp() + machine.tiny if aways[k] < 0 else ONE
        weight = weight if weight < 1 else ONE
        total += weight
        rise, gap = lines[k][0] - lines[winner][0], lines[k][1] - lines[winner][1]
        leak += weight * (size(rise * y + gap) + size(rise) * r)
        leaked += weight * lengths[k]
    settled = clear and bool(total <= machine.u / 2)
    if not settled and swing < NARROW:
        return None
    count, (slope, level) = ORDER + 2, lines[winner]
    thin = [slope * y + level, slope, *[ZERO] * (count - 2)]
    wide = [slope * (y + arb(0, up(r))) + level, slope, *[ZERO] * (count - 2)]
    rounding = 3 * leaked if settled else machine.gamma(2 * len(a) + 3) * largest(lengths)
    error = leak + rounding + (lost if head.own and (winner == 0 or not settled) else ZERO)
    error += 4 * len(a) * (1 + largest(lengths)) * machine.tiny
    nothing = [[ZERO] * count, [ZERO] * count]
    return settled, ((nothing, [thin, wide]), Bound(ZERO, error), Bound(ZERO, lengths[winner] + error))


def _outer(
    site: HeadSum, machine: Machine, y: arb, r: arb, heads: Bound, outputs: list[tuple[Bound, Bound]]
) -> Bound:
    """From what the heads compute to the column: output weights, the sum over heads, the skip and its bias (K8)."""
    u, p = machine.u, arb(site.pivot)
    error, total, tiny = NOTHING, NOTHING, ZERO
    terms: list[Bound] = []
    for head, (own, most) in zip(site.heads, outputs, strict=True):
        if head.out == 0:
            continue
        weight = size(arb(head.out))
        terms.append(most.times(weight))
        error += own.times(weight)
        total += terms[-1]
        if not power_of_two(head.out):
            error += most.times(weight * u)
        if head.out not in (1.0, -1.0):
            tiny += machine.tiny
    used = len(terms)
    limit = u * largest([t.rest for t in terms]) / (8 * used) if used > 2 else ZERO  # others are lost in the sum
    light = [t.rest for t in terms if t.slope.is_zero() and t.rest <= limit] if used > 2 else []
    error += Bound(ZERO, 3 * sum(light, ZERO))
    if used - len(light) == 2:
        joined = (heads + error).times(u)
        if used == 2 and joined.slope.is_zero():  # and a sum errs by no more than the smaller of its two terms
            joined = Bound(ZERO, joined.rest.min(terms[0].rest).min(terms[1].rest).upper())
        error += joined
    elif used - len(light) > 2:
        error += (total + error).times(machine.gamma(used - len(light) - 1))
    x_skip, y_skip, bias = site.skip
    reach_y, length_x, length_y = size(y) + r, size(arb(x_skip)), size(arb(y_skip))
    exact_x = Bound(length_x, length_x * size(p))
    exact_y = Bound(ZERO, length_y * reach_y)
    skip = NOTHING
    if not power_of_two(x_skip):
        skip += exact_x.times(u)
    if not power_of_two(y_skip):
        skip += exact_y.times(u)
    if x_skip != 0 and y_skip != 0:
        skip += (exact_x + exact_y + skip).times(u)
    error += skip
    if used and (x_skip != 0 or y_skip != 0):
        error += (heads + exact_x + exact_y + error).times(u)
    if bias != 0 and (used or x_skip != 0 or y_skip != 0):
        error += (heads + exact_x + exact_y + error + Bound(ZERO, size(arb(bias)))).times(u)
    if error.rest.is_zero() and error.slope.is_zero():
        return error
    return error + Bound(ZERO, tiny + 4 * machine.tiny)
