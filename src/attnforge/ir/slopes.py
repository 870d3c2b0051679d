"""Bounds on slopes and moduli of univariate functions over many intervals at once."""

from __future__ import annotations

import itertools

import numpy as np

from .functions import enclose, taylor
from .ops import Array
from .univariate import Univariate


def inside_domain(fn: Univariate, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """The distinct intervals, cut to the function's domain, and for each entry which of them it is."""
    low, high = np.maximum(low, fn.domain.lo), np.minimum(high, fn.domain.hi)
    low, high = np.minimum(low, high), np.maximum(low, high)
    pairs, where = np.unique(np.stack([low.ravel(), high.ravel()], -1), axis=0, return_inverse=True)
    return pairs[:, 0].copy(), pairs[:, 1].copy(), where.reshape(low.shape)


def lipschitz(fn: Univariate, low: Array, high: Array) -> Array:
    """An upper bound on |fn'| over each interval (of the function continued by constants beyond its domain)."""
    first, last, where = inside_domain(fn, low, high)
    steepest = np.zeros(len(first))
    for left, right in itertools.pairwise([-np.inf, *fn.knots, np.inf]):
        a, b = np.maximum(first, left), np.minimum(last, right)
        inside = a <= b
        if inside.any():
            steepest[inside] = np.maximum(steepest[inside], taylor(fn, a[inside], b[inside], 0).remainder)
    return steepest[where]


def spread(fn: Univariate, low: Array, high: Array) -> Array:
    """An upper bound on |fn(a) - fn(b)| for a, b in each interval, from the function's range alone."""
    first, last, where = inside_domain(fn, low, high)
    out_low, out_high = enclose(fn, first, last)
    return np.nextafter(out_high - out_low, np.inf)[where]


def modulus(fn: Univariate, e: Array) -> Array:
    """A bound on |fn(a) - fn(b)| for |a - b| <= e that needs no slope, where one is known; else infinite.

    Roots and concave powers change most at 0, by e^p; asin and acos at the ends of [-1, 1], by acos(1 - e).
    """
    if fn.name in ("asin", "acos"):
        return np.arccos(np.clip(1.0 - e * (1 + 2.0**-50), -1.0, 1.0)) * (1 + 2.0**-45) + 2.0**-1000
    exponent = 0.5 if fn.name == "sqrt" else None
    if exponent is None and fn.name.startswith("power(") and 0 < float(fn.name[6:-1]) < 1:
        exponent = float(fn.name[6:-1])
    return np.full(e.shape, np.inf) if exponent is None else e**exponent * (1 + 2.0**-45)
