"""Where a composite function may turn: small balls outside of which its derivative has a certain sign.

Between them the function is monotone, so that ranges come from its values at the ends and over the balls. Cells of
undecided sign are halved, or bisected where the second derivative has a certain sign; whatever is still undecided when
the budget is spent is handed out as it is, which is sound.
"""

from __future__ import annotations

import itertools
from collections import deque
from functools import lru_cache

from flint import arb, arb_series

from .evaluate import UNKNOWN
from .rounding import lower, upper
from .univariate import Searched, Series

_HALVINGS, _MOST_CELLS = 40, 400


def turns_of(branches: tuple[Series, ...], knots: tuple[float, ...]) -> Searched:
    """The turns of the function that equals branches[k] between knots k - 1 and k."""

    @lru_cache(maxsize=4096)
    def between(lo: float, hi: float) -> tuple[arb, ...]:
        inner = [k for k in knots if lo < k < hi]
        found = [arb(k) for k in inner]
        ends = [lo, *inner, hi]
        for a, b in itertools.pairwise(ends):
            found += _undecided(branches[sum(k <= a for k in knots)], a, b)
        return tuple(found)

    return Searched(lambda lo, hi: between(lower(lo), upper(hi)))


def _undecided(series: Series, lo: float, hi: float) -> list[arb]:
    """Balls that cover the part of [lo, hi] on which the derivative's sign is not certain."""
    smallest = (hi - lo) * 2.0**-_HALVINGS
    cells = deque([(lo, hi)])
    kept: list[tuple[float, float]] = []
    for count in itertools.count():
        if not cells:
            return _joined(kept)
        a, b = cells.popleft()  # the widest first: what is left when the budget is spent is small
        _, slope, bend = _taylor(series, arb(a).union(arb(b)))
        if slope > 0 or slope < 0 or slope.is_zero():
            continue
        if bend > 0 or bend < 0:  # the slope is monotone, so that there is at most one turn
            kept += _bracket(series, a, b, rising=bool(bend > 0), smallest=smallest)
            continue
        middle = 0.5 * a + 0.5 * b
        if b - a <= smallest or count > _MOST_CELLS or not a < middle < b:
            kept.append((a, b))
        else:
            cells += [(a, middle), (middle, b)]
    raise AssertionError("the loop ends with its cells")


def _bracket(series: Series, a: float, b: float, rising: bool, smallest: float) -> list[tuple[float, float]]:
    """A small cell around the only zero of a monotone slope on [a, b]; none when the slope has one sign."""

    def side(y: float) -> int:
        slope = _taylor(series, arb(y))[1] * (1 if rising else -1)
        return 1 if slope > 0 else -1 if slope < 0 else 0

    left, right = side(a), side(b)
    if left > 0 or right < 0:
        return []
    while b - a > smallest:
        middle = 0.5 * a + 0.5 * b
        here = side(middle)
        if not a < middle < b or here == 0:
            break
        a, b = (middle, b) if here < 0 else (a, middle)
    return [(a, b)]


def _taylor(series: Series, x: arb) -> list[arb]:
    """Enclosures of value, slope and half the second derivative over a ball."""
    try:
        out = series(arb_series([x, 1], prec=3))
    except UNKNOWN:
        return [arb.nan()] * 3
    return [out[0], out[1], out[2]]


def _joined(cells: list[tuple[float, float]]) -> list[arb]:
    """The cells from left to right, neighbours as one ball while that stays short."""
    out: list[tuple[float, float]] = []
    for a, b in sorted(cells):
        if out and (out[-1][1] == a and b - out[-1][0] <= 4 * (b - a)):
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return [arb(a).union(arb(b)) for a, b in out]
