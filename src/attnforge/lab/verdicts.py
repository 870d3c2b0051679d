"""Verdicts by stated rules. Each function applies one rule to numbers and writes the same rule into the finding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import ArgumentError
from .experiment import AGREES, BETTER, FAILS, Finding
from .fits import Mean, Slope

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


def growth(quantity: str, predicted: float, fit: Slope, tolerance: float = 0.1, note: str = "") -> Finding:
    """Does a cost grow with at most the predicted exponent? A slower growth is better than predicted."""
    found = rate(quantity, predicted, fit, tolerance, note)
    rule = found.rule.replace("the error falls faster", "the cost grows more slowly")
    return Finding(quantity, predicted, found.measured, found.interval, found.verdict, rule, "at most", note)


def bound(quantity: str, pairs: Sequence[tuple[float, float]], better: float = 10.0, note: str = "") -> Finding:
    """Does every measured value stay below its bound? `pairs` are (measured, bound), one for each cell.

    No tolerance: one value above its bound and the bound does not hold. Shown are the pair with the largest ratio.

    >>> bound("sup error", [(0.04, 0.05), (0.02, 0.025)]).verdict
    'agrees'
    >>> bound("sup error", [(0.051, 0.05)]).verdict
    'does not hold'
    """
    if not pairs or not all(math.isfinite(m) and b > 0 for m, b in pairs):
        raise ArgumentError(f"'{quantity}' needs pairs of a finite measurement and a positive bound, got {pairs!r:.80}")
    measured, limit = max(pairs, key=lambda pair: pair[0] / pair[1])
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


def close(quantity: str, predicted: float, measured: float, relative: float, note: str = "") -> Finding:
    """Is a measured number the predicted one, up to a stated relative distance? There is no better, only agreement."""
    verdict = AGREES if abs(measured - predicted) <= relative * abs(predicted) else FAILS
    rule = f"within {100 * relative:g} % of the predicted value: agrees; else: does not hold"
    return Finding(quantity, predicted, measured, None, verdict, rule, note=note)


def threshold(quantity: str, limit: float, measured: float, at_least: bool = False, note: str = "") -> Finding:
    """Is a measured number on the right side of a stated limit?"""
    holds = measured >= limit if at_least else measured <= limit
    word = "at least" if at_least else "at most"
    rule = f"{word} {limit:g}: agrees; else: does not hold"
    return Finding(quantity, limit, measured, None, AGREES if holds else FAILS, rule, word, note)
