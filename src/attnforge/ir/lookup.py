"""`Lookup`: one rigorous table of a function, then ranges and linearisations over very many intervals at once.

Ball arithmetic answers for one interval at a time. A layer of a network asks for thousands, on one common interval:
they are answered from first-order Taylor tables on fixed cells, at the price of a little width.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from .functions import taylor
from .largest import Largest
from .ops import Array
from .univariate import Univariate

CELLS = 2048
U = 2.0**-53


class Lookup:
    """Enclosures of one function on cells of one interval."""

    def __init__(self, fn: Univariate, lo: float, hi: float):
        knots = [k for k in fn.knots if lo < k < hi]
        edges = np.unique(np.concatenate([np.linspace(lo, hi, CELLS + 1), knots]))
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
def _lookup(fn: Univariate, lo: float, hi: float) -> Lookup:
    return Lookup(fn, lo, hi)


def lookup(fn: Univariate, low: float, high: float) -> Lookup:
    """The table of a function on a round interval around [low, high], so that nearby intervals share one."""
    step = 2.0 ** math.floor(math.log2(max(high - low, 1e-6 * max(abs(low), abs(high)), 1e-30))) / 8
    lo = max(math.floor(low / step) * step, fn.domain.lo) if fn.domain.lo_closed else low
    hi = min(math.ceil(high / step) * step, fn.domain.hi) if fn.domain.hi_closed else high
    poles = [p for p in fn.domain.poles if lo <= p <= hi]
    return _lookup(fn, low, high) if poles or fn.domain.period is not None else _lookup(fn, lo, hi)
