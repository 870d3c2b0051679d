"""Bounds on slopes and moduli of univariate functions over many intervals at once."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .functions import enclose, taylor
from .ops import Array
from .univariate import Univariate

TILE = 128  # cells of a grid that are bounded together


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
    return steepest


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
    b = np.floor(last / pitch).astype(int) - tiles[0] * TILE + 1
    level = np.floor(np.log2(b - a)).astype(int)
    rows = [row]
    for k in range(int(level.max())):  # rows[k][i] is the maximum over cells i to i + 2^k - 1
        rows.append(np.maximum(rows[k], np.append(rows[k][2**k :], np.full(2**k, np.inf))))
    table = np.stack(rows)
    return np.maximum(table[level, a], table[level, b - 2**level])


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
