"""Rigorous Taylor tables and ranges of univariate functions by ball arithmetic (python-flint).

One evaluation of the function's series at the exact centre of a cell gives the coefficients; one at a ball that holds
the whole cell gives, as its coefficient of degree order + 1, the Lagrange remainder (mathematics A4).
"""

from __future__ import annotations

import functools

import numpy as np
from flint import arb, arb_series

from ..dtypes import Array
from .callables import interpolant_table
from .directed import BITS, lower, polynomial_upper, precision, split, up, upper
from .univariate import Searched, Series, Taylor, Univariate, centre_and_radius, intersect, overlapping, spread


@functools.lru_cache(maxsize=128)
def taylor_table(fn: Univariate, lo_bytes: bytes, hi_bytes: bytes, order: int) -> Taylor:
    """The table of a function on the cells whose ends are these float64 bytes; the arguments are the cache's key."""
    lo, hi = np.frombuffer(lo_bytes), np.frombuffer(hi_bytes)
    if not fn.branches:
        return interpolant_table(fn, lo, hi, order)
    centre, radius = centre_and_radius(lo, hi)
    # A cell that touches a knot belongs to the piece on its own side. The piece's ball sticks out over the knot by the
    # rounding of its radius; that is harmless: the piece is analytic there, and the table speaks of [lo, hi] only.
    branch = [fn.branches[i] for i in np.searchsorted(fn.knots, lo, side="right")]
    cells = list(zip(branch, centre.tolist(), radius.tolist(), strict=True))
    with precision(BITS, order + 4):
        coefficients = [ball for series, c, _ in cells for ball in _coefficients(series, arb(c), order + 1)]
        wide = [_coefficients(series, arb(c, r), order + 2) for series, c, r in cells]
        coefficient, error = (x.reshape(len(cells), order + 1) for x in split(coefficients))
        last, last_error = split([row[-1] for row in wide])
        natural = spread(*split([row[0] for row in wide]))
        with np.errstate(over="ignore"):
            remainder = up(np.abs(last) + last_error)
            reach = np.column_stack([error[:, 0], up(np.abs(coefficient[:, 1:]) + error[:, 1:]), remainder])
        low, high = intersect(*natural, *spread(coefficient[:, 0], polynomial_upper(reach, radius)))
        # At a branch point (sqrt at 0) both enclosures are infinite while the function is not.
        poor = ~(np.isfinite(low) & np.isfinite(high))
        low[poor], high[poor] = intersect(low[poor], high[poor], *_by_balls(fn, lo[poor], hi[poor]))
    return Taylor(centre, radius, coefficient, error, remainder, *_clip(fn, low, high))


def _coefficients(series: Series, constant: arb, count: int) -> list[arb]:
    """The first `count` coefficients of the composition with constant + t; NaN where the series does not say."""
    try:
        out = series(arb_series([constant, 1], prec=count))
    except (ValueError, ZeroDivisionError):  # python-flint divides by a series whose constant term may be 0
        return [arb.nan()] * count
    known = out.coeffs()
    # Coefficients beyond the length are exact zeros, those beyond the series' own precision unknown.
    known += [arb(0)] * (min(out.prec, count) - len(known))
    return (known + [arb.nan()] * (count - len(known)))[:count]


def ranges(fn: Univariate, lo: Array, hi: Array) -> tuple[Array, Array]:
    """Outward rounded enclosures of the function over cells that may straddle knots.

    By monotonicity where the turns are known (then as tight as float64 allows), else by one Taylor form and one ball
    for each cell.
    """
    if not fn.branches:
        table = interpolant_table(fn, lo, hi, 1)
        return table.low, table.high
    with precision():
        low, high = _clip(fn, *_by_balls(fn, lo, hi))
    if fn.turns is None and not any(((lo < k) & (k < hi)).any() for k in fn.knots):
        table = taylor_table(fn, lo.tobytes(), hi.tobytes(), 3)
        low, high = intersect(low, high, table.low, table.high)
    return low, high


def refined_range(fn: Univariate, lo: float, hi: float, cells: int = 16) -> tuple[float, float]:
    """Range over one interval by branch and bound: split the cells that can still widen the range seen at points.

    Stops when no cell can widen it by more than 1e-9 of itself, or when splitting no longer helps: a cell whose
    enclosure is dominated by rounding or by a pole never settles.
    """
    ends = np.unique(np.concatenate([np.linspace(lo, hi, cells + 1), [k for k in fn.knots if lo < k < hi]]))
    left, right = ends[:-1], ends[1:]
    settled_low, settled_high, before = np.inf, -np.inf, np.inf
    while True:
        low, high = ranges(fn, left, right)
        # Every cell holds its left end, so the result cannot be tighter than the enclosure of the value there.
        point_low, point_high = ranges(fn, left, left)
        seen_low, seen_high = min(settled_low, point_high.min()), max(settled_high, point_low.max())
        excess = np.maximum(seen_low - low, high - seen_high)
        unsettled = excess > 1e-9 * (seen_high - seen_low)
        worst = float(excess.max())
        if not unsettled.any() or not worst < 0.9 * before or unsettled.sum() > 512:
            return float(min(settled_low, low.min())), float(max(settled_high, high.max()))
        before = worst if np.isfinite(worst) else before
        settled_low = min(settled_low, low[~unsettled].min(initial=np.inf))
        settled_high = max(settled_high, high[~unsettled].max(initial=-np.inf))
        middle = np.clip(0.5 * left + 0.5 * right, left, right)[unsettled]
        left, right = np.concatenate([left[unsettled], middle]), np.concatenate([middle, right[unsettled]])


def _clip(fn: Univariate, low: Array, high: Array) -> tuple[Array, Array]:
    """No enclosure is wider than the function's image: sin stays in [-1, 1] after rounding outward."""
    return np.maximum(low, fn.image[0]), np.minimum(high, fn.image[1])


def _by_balls(fn: Univariate, lo: Array, hi: Array) -> tuple[Array, Array]:
    """Enclosures by `fn.ball`: at the ends and turns where the turns are known, over the whole cell otherwise."""
    if fn.turns is None:
        balls = [fn.ball(arb(c, r)) for c, r in zip(*(x.tolist() for x in centre_and_radius(lo, hi)), strict=True)]
        return np.array([lower(b) for b in balls]), np.array([upper(b) for b in balls])
    points, index = np.unique(np.concatenate([lo, hi]), return_inverse=True)
    values = [fn.ball(arb(p)) for p in points.tolist()]
    value_low = np.array([lower(v) for v in values])[index].reshape(2, -1)
    value_high = np.array([upper(v) for v in values])[index].reshape(2, -1)
    low, high = value_low.min(0), value_high.max(0)
    if isinstance(fn.turns, Searched) and len(lo) > 4:
        for turn in fn.turns(arb(float(lo.min())), arb(float(hi.max()))):
            met = (lo <= upper(turn)) & (hi >= lower(turn))
            value = fn.ball(turn)
            low[met], high[met] = np.minimum(low[met], lower(value)), np.maximum(high[met], upper(value))
    elif fn.turns:
        for i, (a, b) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
            for turn in overlapping(fn.turns, arb(a), arb(b)) if a < b else ():
                value = fn.ball(turn)
                low[i], high[i] = min(low[i], lower(value)), max(high[i], upper(value))
    if fn.domain.poles:
        crossed = np.array([fn.domain.pole_in(a, b) is not None for a, b in zip(lo, hi, strict=True)], dtype=bool)
        low[crossed], high[crossed] = -np.inf, np.inf
    return low, high
