"""Outward rounded intervals of real numbers, with infinite ends where nothing is known."""

from __future__ import annotations

import math
from fractions import Fraction

from ..box import Interval
from ..functions.registry import enclose, power
from ..functions.univariate import Univariate
from .constants import rounded

WHOLE: Interval = (-math.inf, math.inf)


def point(value: Fraction) -> Interval:
    """The smallest float64 interval around a constant."""
    near, off = rounded(value)
    if not off:
        return near, near
    if off > math.ulp(near):
        return _down(near - off), _up(near + off)
    above, below = value > Fraction(near), value < Fraction(near)  # neither, where it cannot be told
    return near if above else _down(near), near if below else _up(near)


def scaled(x: Interval, factor: Fraction) -> Interval:
    return product(x, point(factor))


def added(x: Interval, y: Interval) -> Interval:
    low, high = x[0] + y[0], x[1] + y[1]
    exact_low = low - x[0] == y[0] and low - y[0] == x[0]
    exact_high = high - x[1] == y[1] and high - y[1] == x[1]
    return (low if exact_low else _down(low)), (high if exact_high else _up(high))


def product(x: Interval, y: Interval) -> Interval:
    ends = [_times(a, b) for a in x for b in y]
    low, high = min(a for a, _ in ends), max(b for _, b in ends)
    return low, high


def called(function: Univariate, x: Interval) -> Interval:
    """The function's range over the part of the interval that lies in its domain."""
    low, high = max(x[0], function.domain.lo), min(x[1], function.domain.hi)
    if not (math.isfinite(low) and math.isfinite(high)) or low > high or function.domain.pole_in(low, high) is not None:
        return function.image
    if (low == function.domain.lo and not function.domain.lo_closed) or (
        high == function.domain.hi and not function.domain.hi_closed
    ):
        return function.image
    found = enclose(function, low, high)
    return found if found[0] <= found[1] else function.image


def powered(x: Interval, exponent: Fraction) -> Interval:
    """x ** exponent; over the non-negative part where the exponent is not whole."""
    function = power(exponent)
    if exponent < 0 and x[0] > 0 and math.isinf(x[1]):
        return 0.0, called(function, (x[0], x[0]))[1]
    if exponent.denominator == 1 and exponent > 0 and not (math.isfinite(x[0]) and math.isfinite(x[1])):
        if exponent % 2 == 0:
            return 0.0, math.inf
        return (called(function, (x[0], x[0]))[0] if math.isfinite(x[0]) else -math.inf), math.inf
    return called(function, x)


def _times(a: float, b: float) -> Interval:
    """One product of two ends, rounded both ways; an exact 0 times infinity is 0."""
    if a == 0 or b == 0:
        return 0.0, 0.0
    out = a * b
    if math.isinf(out):
        if math.isinf(a) or math.isinf(b):
            return out, out
        return (_down(out), out) if out > 0 else (out, _up(out))
    if abs(out) > 1e-290 and Fraction(a) * Fraction(b) == Fraction(out):
        return out, out
    return _down(out), _up(out)


def _up(x: float) -> float:
    return math.nextafter(x, math.inf)


def _down(x: float) -> float:
    return math.nextafter(x, -math.inf)
