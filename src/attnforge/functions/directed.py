"""Directed rounding: from balls to float64 and through float64 arithmetic, always outward.

How python-flint converts: `float(x)` of an `arb` is its midpoint rounded to nearest (ties to even), overflowing to
infinity and underflowing to 0; it says nothing about the radius. `lower()`, `upper()` and `abs_upper()` are exact balls
rounded in the direction of their name at the working precision. So a float made from one of them is at most half an ulp
off, and one `nextafter` outward makes it a bound.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from flint import arb, ctx

from ..dtypes import Array

#: The unit roundoff of float64: one rounded operation is off by at most U, relatively.
U = 2.0**-53
#: Working precision of the tables in bits: float64 and 43 bits to lose on the way.
BITS = 96
_LOCK = threading.RLock()


@contextmanager
def precision(bits: int = BITS, terms: int = 2) -> Iterator[None]:
    """Set python-flint's precision and series length, and restore them.

    They are global to the process, so the lock keeps two threads of ours from changing them under each other.
    """
    with _LOCK:
        saved = ctx.prec, ctx.cap
        ctx.prec, ctx.cap = bits, terms
        try:
            yield
        finally:
            ctx.prec, ctx.cap = saved


def low_end(x: arb) -> float:
    """The largest float64 that is certainly at most every number of the ball; -inf when nothing is known."""
    end = x.lower()
    if end.is_nan():
        return -math.inf
    near = float(end)
    # near = +inf stands for a finite number beyond float64: the comparison fails and nextafter gives the largest float
    return near if _known(near) <= end else math.nextafter(near, -math.inf)


def high_end(x: arb) -> float:
    """The smallest float64 that is certainly at least every number of the ball; inf when nothing is known."""
    end = x.upper()
    if end.is_nan():
        return math.inf
    near = float(end)
    return near if _known(near) >= end else math.nextafter(near, math.inf)


def _known(x: float) -> arb:
    """An exact ball; infinities by name, since `arb(inf)` means the whole line."""
    return arb(x) if math.isfinite(x) else (arb.pos_inf() if x > 0 else arb.neg_inf())


def split(balls: list[arb]) -> tuple[Array, Array]:
    """Float64 midpoints, and upper bounds on the distance of every number of the ball from them.

    Where nothing is known, or the midpoint is beyond float64, the midpoint is 0 and the distance infinite.
    """
    middle = np.array([float(ball) for ball in balls])
    radius = np.array([float(ball.rad()) for ball in balls])
    known = np.isfinite(middle) & np.isfinite(radius)
    middle[~known], radius[~known] = 0.0, np.inf
    # Half an ulp for the midpoint, which rounds to nearest; `up` twice covers the rounding of radius and sum.
    return middle, up(up(radius + 0.5 * np.spacing(np.abs(middle))))


def up(x: Array) -> Array:
    """The next float64 above: makes a result rounded to nearest an upper bound."""
    return np.nextafter(x, np.inf)


def down(x: Array) -> Array:
    """The next float64 below."""
    return np.nextafter(x, -np.inf)


def dot_up(a: Array, b: Array) -> Array:
    """An upper bound of a @ b for non-negative entries; 0 where every product has a factor 0, and only there."""
    found = a @ b
    some = (a > 0).astype(np.float64) @ (b > 0).astype(np.float64)  # how many products: each may underflow
    return np.where(some > 0, up(up(found * (1 + (2 * a.shape[-1] + 4) * U)) + 2.0**-1074 * some), 0.0)


def polynomial_upper(coefficient: Array, radius: Array) -> Array:
    """Upper bound on sum_j coefficient[:, j] * radius^j for non-negative entries; infinite entries stay infinite."""
    total = coefficient[:, -1]
    with np.errstate(invalid="ignore", over="ignore"):
        for j in range(coefficient.shape[1] - 2, -1, -1):
            total = up(up(total * radius) + coefficient[:, j])
    return np.where(np.isnan(total), np.inf, total)
