"""Verdicts by stated rules. Each function applies one rule to numbers and writes the same rule into the finding.

The numbers come with intervals: slopes of an error against a size on logarithmic axes, and means over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import flint
import numpy as np

from ..errors import ArgumentError
from .experiment import AGREES, BETTER, FAILS, Finding

CONFIDENCE = 0.95  # of the intervals: the usual one, which the page names


@dataclass(frozen=True)
class Slope:
    """A fitted exponent with its confidence interval, from n points: y ~ exp(intercept) * x**value."""

    value: float
    low: float
    high: float
    n: int
    intercept: float = 0.0

    def at(self, x: Sequence[float]) -> tuple[float, ...]:
        """The fitted line, to be drawn among the points."""
        return tuple(math.exp(self.intercept) * v**self.value for v in x)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Mean:
    """A mean with its confidence interval, the standard deviation of one value, and how many there were."""

    value: float
    low: float
    high: float
    spread: float
    n: int


def slope(x: Sequence[float], y: Sequence[float | None]) -> Slope:
    """Least squares of log y on log x; the interval is Student's, for the points as they are given.

    Several y at one x (seeds) are several points. Two points leave nothing to judge the scatter by: the interval is
    then the whole line. Points where y is None are left out; zero and negative ones have no logarithm and are refused.

    >>> fit = slope([1, 2, 4, 8], [1.0, 0.5, 0.25, 0.125])
    >>> round(fit.value, 9), fit.n, fit.low <= -1 <= fit.high
    (-1.0, 4, True)
    """
    if len(x) != len(y):
        raise ArgumentError(f"a slope needs as many y as x, got {len(y)} and {len(x)}")
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    if any(a <= 0 or b <= 0 for a, b in pairs):
        raise ArgumentError("a slope on logarithmic axes needs positive x and y")
    if len({a for a, _ in pairs}) < 2:
        raise ArgumentError(f"a slope needs points at two x or more, got {len({a for a, _ in pairs})}")
    u, v = np.log(np.array(pairs, dtype=float)).T
    centre, n = u.mean(), len(u)
    weight = float(((u - centre) ** 2).sum())
    value = float(((u - centre) * v).sum()) / weight
    intercept = float(v.mean()) - value * float(centre)
    if n == 2:
        return Slope(value, -math.inf, math.inf, n, intercept)
    residual = v - intercept - value * u
    deviation = math.sqrt(float((residual**2).sum()) / (n - 2) / weight)
    # Points on an exact line leave a residual of rounding only; the interval still covers the rounding of the fit.
    reach = student(CONFIDENCE, n - 2) * deviation + 8 * n * np.finfo(float).eps * (1 + abs(value))
    return Slope(value, value - float(reach), value + float(reach), n, intercept)


def mean(values: Sequence[float | None]) -> Mean:
    """The mean with Student's interval; None is left out, and one value alone has no interval but the whole line.

    >>> found = mean([1.0, 2.0, 3.0])
    >>> found.value, round(found.high - found.value, 3), found.spread
    (2.0, 2.484, 1.0)
    """
    kept = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not kept:
        raise ArgumentError("a mean needs at least one finite value")
    centre = math.fsum(kept) / len(kept)
    if len(kept) == 1:
        return Mean(centre, -math.inf, math.inf, math.inf, 1)
    spread = math.sqrt(math.fsum((v - centre) ** 2 for v in kept) / (len(kept) - 1))
    reach = student(CONFIDENCE, len(kept) - 1) * spread / math.sqrt(len(kept))
    return Mean(centre, centre - reach, centre + reach, spread, len(kept))


@lru_cache(maxsize=256)
def student(confidence: float, freedom: int) -> float:
    """The t with P(|T| <= t) = confidence for Student's distribution.

    >>> round(student(0.95, 1), 4), round(student(0.95, 9), 4)
    (12.7062, 2.2622)
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ArgumentError(f"expected 0 < confidence < 1 and freedom >= 1, got {confidence!r} and {freedom!r}")

    def outside(t: float) -> float:
        x = freedom / (freedom + t * t)
        return float(flint.arb(x).beta_lower(freedom / 2, 0.5, regularized=True).mid())

    low, high = 0.0, 1.0
    while outside(high) > 1 - confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if outside(middle) > 1 - confidence else (low, middle)
    return high


WIDE = 1.0  # an interval of an exponent that is wider says little


def rate(quantity: str, predicted: float, fit: Slope, tolerance: float = 0.1, note: str = "") -> Finding:
    """Is an error's exponent the predicted one? A steeper fall is better than predicted.

    >>> rate("sup error against p", -1, Slope(-1.02, -1.05, -0.99, 9)).verdict
    'agrees'
    >>> rate("sup error against p", -1, Slope(-2.0, -2.1, -1.9, 9)).verdict
    'better than predicted'
    """
    low, high, reach = fit.low, fit.high, tolerance
    if high - low > WIDE:
        low = high = fit.value
        reach = 3 * tolerance
    verdict = BETTER if high < predicted - reach else AGREES if low <= predicted + reach else FAILS
    rule = (
        f"the 95 % interval of the fitted slope meets {predicted:g} ± {tolerance:g}: agrees; it lies wholly below: "
        "better than predicted (the error falls faster); wholly above: does not hold. An interval wider than "
        f"{WIDE:g} would meet too much: then the slope itself is held to {predicted:g} ± {3 * tolerance:g}"
    )
    return Finding(quantity, predicted, fit.value, (fit.low, fit.high), verdict, rule, note=note)


def growth(quantity: str, predicted: float, fit: Slope, tolerance: float = 0.1) -> Finding:
    """Does a cost grow with at most the predicted exponent? A slower growth is better than predicted."""
    found = rate(quantity, predicted, fit, tolerance)
    rule = found.rule.replace("the error falls faster", "the cost grows more slowly")
    return Finding(quantity, predicted, found.measured, found.interval, found.verdict, rule, "at most")


def bound(quantity: str, pairs: Sequence[tuple[float, float]], better: float = 10.0, note: str = "") -> Finding:
    """Does every measured value stay below its bound? `pairs` are (measured, bound), one for each cell.

    No tolerance: one value above its bound and the bound does not hold. Shown are the pair with the largest ratio.

    >>> bound("sup error", [(0.04, 0.05), (0.02, 0.025)]).verdict
    'agrees'
    >>> bound("sup error", [(0.051, 0.05)]).verdict
    'does not hold'
    >>> bound("sup error", [(0.0, 0.0), (0.04, 0.05)]).measured, bound("sup error", [(1e-9, 0.0), (0.04, 0.05)]).verdict
    (0.04, 'does not hold')
    """
    if not pairs or not all(math.isfinite(m) and b >= 0 for m, b in pairs):
        raise ArgumentError(f"'{quantity}' needs pairs of a finite measurement and a bound from 0, got {pairs!r:.80}")
    # of a head that is exact the bound is 0
    measured, limit = max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else math.inf * (pair[0] > 0 or -1))
    verdict = FAILS if any(m > b for m, b in pairs) else BETTER if measured * better < limit else AGREES
    rule = (
        f"every measured value is at most its bound, without tolerance (here {len(pairs)}): agrees; all of them more "
        f"than {better:g} times below: better than predicted; any above: does not hold. Shown is the closest pair"
    )
    return Finding(quantity, limit, measured, None, verdict, rule, "at most", note)


def equal(
    quantity: str, predicted: float, found: Mean, spread: float | None = None, times: float = 2.0, note: str = ""
) -> Finding:
    """Is a mean over seeds the predicted or published one, within the spread of single runs? Smaller is better.

    `spread` is the standard deviation of one run where it is known from elsewhere; by default, that of `found`.
    """
    one = found.spread if spread is None else spread
    reach = times * one
    near, below = abs(found.value - predicted) <= reach, found.value < predicted
    verdict = AGREES if near else BETTER if below else FAILS
    rule = (
        f"the mean of {found.n} runs lies within {times:g} standard deviations of one run ({reach:.3g}) of the "
        "predicted value: agrees; below that: better than predicted; above: does not hold"
    )
    return Finding(quantity, predicted, found.value, (found.low, found.high), verdict, rule, note=note)


def close(quantity: str, predicted: float, measured: float, relative: float) -> Finding:
    """Is a measured number the predicted one, up to a stated relative distance? There is no better, only agreement."""
    verdict = AGREES if abs(measured - predicted) <= relative * abs(predicted) else FAILS
    rule = f"within {100 * relative:g} % of the predicted value: agrees; else: does not hold"
    return Finding(quantity, predicted, measured, None, verdict, rule)


def threshold(quantity: str, limit: float, measured: float, at_least: bool = False, note: str = "") -> Finding:
    """Is a measured number on the right side of a stated limit?"""
    holds = measured >= limit if at_least else measured <= limit
    word = "at least" if at_least else "at most"
    rule = f"{word} {limit:g}: agrees; else: does not hold"
    return Finding(quantity, limit, measured, None, AGREES if holds else FAILS, rule, word, note)
