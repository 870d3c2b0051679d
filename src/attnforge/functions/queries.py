"""Questions about very many intervals at once: ranges, linearisations and slopes of univariate functions.

Ball arithmetic answers for one interval at a time. A layer of a network asks for thousands, on one common interval:
they are answered from first-order Taylor tables on fixed cells, at the price of a little width.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..dtypes import Array
from .directed import U, down, up
from .registry import enclose, taylor
from .univariate import Univariate


class Largest:
    """The largest of the numbers that belong to consecutive cells, over many ranges of cells at once."""

    def __init__(self, start: Array, number: Array):
        self.start, self.levels = start, [number]
        while 2 ** len(self.levels) <= len(start):  # largest of 2^k neighbours
            half, last = 2 ** (len(self.levels) - 1), self.levels[-1]
            self.levels.append(np.maximum(last[:-half], last[half:]))

    def over(self, low: Array, high: Array) -> Array:
        """The largest number of the cells that meet [low, high]; cells begin at `start`, the last one has no end."""
        first = np.clip(np.searchsorted(self.start, low, side="left") - 1, 0, len(self.start) - 1)
        final = np.clip(np.searchsorted(self.start, high, side="right") - 1, first, len(self.start) - 1)
        return self.among(first, final)

    def among(self, first: npt.NDArray[np.intp], final: npt.NDArray[np.intp]) -> Array:
        """The largest number of the cells `first` to `final`, both included."""
        depth = np.floor(np.log2(final - first + 1)).astype(int)
        worst = np.empty(np.shape(first))
        for k, level in enumerate(self.levels):
            at = depth == k
            worst[at] = np.maximum(level[first[at]], level[final[at] - 2**k + 1])
        return worst


CELLS = 2048  # of a table: ranges widen by the step of a smooth function over a cell, 1/2048 of the interval


class Lookup:
    """Enclosures of one function on cells of one interval."""

    def __init__(self, fn: Univariate, lo: float, hi: float, count: int = CELLS):
        knots = [k for k in fn.knots if lo < k < hi]
        edges = np.unique(np.concatenate([np.linspace(lo, hi, count + 1), knots]))
        table = taylor(fn, edges[:-1], edges[1:], 1)
        self.edges, self.table = edges, table
        with np.errstate(invalid="ignore", over="ignore"):
            turn = table.error[:, 1] + 2 * table.remainder * table.radius
            self.slope_low = table.coefficient[:, 1] - turn * (1 + 4 * U) - 4 * U * np.abs(table.coefficient[:, 1])
            self.slope_high = table.coefficient[:, 1] + turn * (1 + 4 * U) + 4 * U * np.abs(table.coefficient[:, 1])
        self._high, self._low = Largest(edges[:-1], table.high), Largest(edges[:-1], -table.low)
        self._steep, self._flat = Largest(edges[:-1], self.slope_high), Largest(edges[:-1], -self.slope_low)

    def range(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Enclosures of the function over [low, high]."""
        return -self._low.over(low, high), self._high.over(low, high)

    def slopes(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Enclosures of its derivative over [low, high]."""
        return -self._flat.over(low, high), self._steep.over(low, high)

    def at(self, y: Array) -> tuple[Array, Array]:
        """Its value at points: middle and radius."""
        cell = np.clip(np.searchsorted(self.edges, y, side="right") - 1, 0, len(self.edges) - 2)
        table = self.table
        t = y - table.centre[cell]
        size = np.abs(t) * (1 + 2 * U)
        zero, one = table.coefficient[cell, 0], table.coefficient[cell, 1]
        with np.errstate(invalid="ignore", over="ignore"):
            radius = table.error[cell, 0] + table.error[cell, 1] * size + table.remainder[cell] * size * size
            return zero + one * t, radius * (1 + 8 * U) + 4 * U * (np.abs(zero) + np.abs(one) * size)

    def line(self, low: Array, high: Array) -> tuple[Array, Array, Array, Array]:
        """A linearisation on [low, high]: point c, value g(c), slope a, and r with |g(y) - g(c) - a (y - c)| <= r."""
        flat, steep = self.slopes(low, high)
        with np.errstate(invalid="ignore", over="ignore"):
            slope = 0.5 * (flat + steep)
            centre = 0.5 * low + 0.5 * high
            reach = np.maximum(high - centre, centre - low) * (1 + 2 * U)
            value, radius = self.at(centre)
            bend = np.maximum(steep - slope, slope - flat) * (1 + 4 * U)
            return centre, value, slope, (radius + bend * reach) * (1 + 4 * U)


@lru_cache(maxsize=64)
def _lookup(fn: Univariate, lo: float, hi: float, count: int) -> Lookup:
    return Lookup(fn, lo, hi, count)


def lookup(fn: Univariate, low: float, high: float, count: int = CELLS) -> Lookup:
    """The table of a function on a round interval around [low, high], so that nearby intervals share one."""
    step = 2.0 ** math.floor(math.log2(max(high - low, 1e-6 * max(abs(low), abs(high)), 1e-30))) / 8
    lo = max(math.floor(low / step) * step, fn.domain.lo) if fn.domain.lo_closed else low
    hi = min(math.ceil(high / step) * step, fn.domain.hi) if fn.domain.hi_closed else high
    poles = [p for p in fn.domain.poles if lo <= p <= hi]
    lo, hi = (low, high) if poles or fn.domain.period is not None else (lo, hi)
    return _lookup(fn, lo, hi, count)


WIDER = 1 + 2.0**-42  # on e ** p: a rounded p moves it by |log e| 2^-53, at most 2^-43, and the power itself rounds
TILE = 128  # cells of a grid that are bounded together, and as many as the span of the intervals asked about has


def inside_domain(fn: Univariate, low: Array, high: Array) -> tuple[Array, Array, npt.NDArray[np.intp]]:
    """The distinct intervals, cut to the function's domain, and for each entry which of them it is."""
    low, high = np.maximum(low, fn.domain.lo), np.minimum(high, fn.domain.hi)
    low, high = np.minimum(low, high), np.maximum(low, high)
    pairs, where = np.unique(np.stack([low.ravel(), high.ravel()], -1), axis=0, return_inverse=True)
    return pairs[:, 0].copy(), pairs[:, 1].copy(), where.reshape(low.shape)


def lipschitz(fn: Univariate, low: Array, high: Array) -> Array:
    """An upper bound on |fn'| over each interval (of the function continued by constants beyond its domain).

    Once over the whole interval, which suits narrow ones, and once over a grid of small cells, which suits wide ones.
    """
    first, last, where = inside_domain(fn, low, high)
    return np.minimum(_steepest(fn, first, last), _steepest_on_grid(fn, first, last))[where]


def _steepest(fn: Univariate, first: Array, last: Array) -> Array:
    """A bound on |fn'| over each interval of the domain from one enclosure, cut at knots."""
    steepest = np.zeros(len(first))
    for left, right in itertools.pairwise([-np.inf, *fn.knots, np.inf]):
        a, b = np.maximum(first, left), np.minimum(last, right)
        inside = a <= b
        if inside.any():
            steepest[inside] = np.maximum(steepest[inside], taylor(fn, a[inside], b[inside], 0).remainder)
    exponent = exponent_of(fn)
    if exponent is not None and exponent > 1 and exponent.denominator > 1:  # no series at 0, yet steepest far from it
        with np.errstate(over="ignore"):
            steepest = np.minimum(steepest, float(exponent) * last ** float(exponent - 1) * WIDER)
    return steepest


def exponent_of(fn: Univariate) -> Fraction | None:
    """p, for the function y ** p."""
    if fn.name == "sqrt":
        return Fraction(1, 2)
    return Fraction(fn.name[6:-1]) if fn.name.startswith("power(") and fn.source is None else None


def _steepest_on_grid(fn: Univariate, first: Array, last: Array) -> Array:
    """The largest bound over the cells of a grid that an interval touches; the grid's pitch is a power of two."""
    start, stop = float(np.min(first)), float(np.max(last))
    if not 0 < stop - start < np.inf:
        return np.full(len(first), np.inf)
    pitch = 2.0 ** np.ceil(np.log2((stop - start) / TILE))
    if max(abs(start), abs(stop)) > 2.0**40 * pitch:  # the grid's points must be exact
        return np.full(len(first), np.inf)
    tiles = range(int(np.floor(start / pitch / TILE)), int(np.floor(stop / pitch / TILE)) + 1)
    row = np.concatenate([_tile(fn, pitch, t) for t in tiles])
    a = np.floor(first / pitch).astype(int) - tiles[0] * TILE
    b = np.floor(last / pitch).astype(int) - tiles[0] * TILE
    return Largest(np.arange(float(len(row))), row).among(a, b)


@lru_cache(maxsize=256)
def _tile(fn: Univariate, pitch: float, number: int) -> Array:
    """Bounds on |fn'| over the cells of one tile of a grid."""
    left = pitch * (number * TILE + np.arange(TILE))
    first, last = np.maximum(left, fn.domain.lo), np.minimum(left + pitch, fn.domain.hi)
    inside = first <= last
    found = np.zeros(TILE)
    found[inside] = _steepest(fn, first[inside], last[inside])
    return found


def spread(fn: Univariate, low: Array, high: Array) -> Array:
    """An upper bound on |fn(a) - fn(b)| for a, b in each interval, from the function's range alone."""
    first, last, where = inside_domain(fn, low, high)
    out_low, out_high = enclose(fn, first, last)
    return up(out_high - out_low)[where]


def power_moves(p: Fraction, low: Array, high: Array, e: Array) -> Array:
    """A bound on |a^p - b^p| for a in [low, high], b >= 0 and |a - b| <= e, where p > 0 and low >= 0."""
    if p == 1:
        return e
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        at = np.maximum(down(low - e), 0.0) if p < 1 else up(high + e)
        steep = float(p) * at ** float(p - 1) * e * WIDER
        return np.fmin(steep, e ** float(p) * WIDER) if p < 1 else steep


def modulus(fn: Univariate, e: Array) -> Array:
    """A bound on |fn(a) - fn(b)| for |a - b| <= e that needs no slope, where one is known; else infinite.

    Roots and concave powers change most at 0, by e^p; asin and acos at the ends of [-1, 1], by acos(1 - e), which is
    2 asin(sqrt(e / 2)): so written it keeps its relative accuracy however small e is, where 1 - e rounds to 1.
    """
    if fn.name in ("asin", "acos"):
        # the root before the half, so that a subnormal e is not halved to 0; 2^-50 covers the two roundings
        half = np.sqrt(e) * math.sqrt(0.5) * (1 + 2.0**-50)
        return 2 * np.arcsin(np.minimum(half, 1.0)) * (1 + 2.0**-45)
    exponent = exponent_of(fn)
    if exponent is None or not 0 < exponent < 1:
        return np.full(e.shape, np.inf)
    return e ** float(exponent) * WIDER
