"""Ball arithmetic: precision, upper ends of balls, and power series as short lists of balls.

A number is a `flint.arb`: a midpoint and a radius that together enclose a real number. Whatever cannot be enclosed is
NaN, and a comparison with NaN is false, so that nothing follows from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flint import arb, arb_mat, arb_series, ctx, fmpq

from ..errors import CertificateError

BITS = 128  # of a midpoint: float64's 53, twice for products, and room for logits of 2^20; more would only tighten
ORDER = 8  # of Taylor polynomials on a cell: with 64 cells of a product their remainder is below float64's roundoff
PARTS = 8  # of a cell, for the largest value of a polynomial: the error of a head goes up and down within a cell
ZERO, ONE = arb(0), arb(1)
Series = list[arb]


class NotProved(CertificateError):
    """The kernel has no rule for what a file holds, or proves nothing with its choices: no fault of the file."""


@contextmanager
def working() -> Iterator[None]:
    """The precision of every proof."""
    before = ctx.prec, ctx.cap
    ctx.prec, ctx.cap = BITS, ORDER + 8
    try:
        yield
    finally:
        ctx.prec, ctx.cap = before


def up(x: arb) -> float:
    """A float that is at least every number of a ball; infinity where nothing is known."""
    nearest = float(x.upper())
    if math.isnan(nearest):
        return math.inf
    return nearest if arb(nearest) >= x else math.nextafter(nearest, math.inf)


def down(x: arb) -> float:
    """A float that is at most every number of a ball."""
    return -up(-x)


def size(x: arb) -> arb:
    """An upper bound of |x|, as an exact number; NaN stays NaN."""
    return x.abs_upper()


def largest(values: Sequence[arb]) -> arb:
    """An upper bound of all of some balls, at least 0; NaN where one is not known."""
    found = ZERO
    for value in values:
        found = found.max(value)
    return found.upper()


def hull(low: float, high: float) -> arb:
    """The ball of an interval."""
    return arb(low).union(arb(high))


def series(coefficients: Sequence[arb]) -> arb_series:
    """Coefficients as a power series, as long as there are."""
    return arb_series(list(coefficients), prec=len(coefficients))


def coefficients(x: arb_series, count: int) -> Series:
    """The first coefficients of a series; those beyond its own precision are not known."""
    known: Series = x.coeffs()[:count]
    known += [ZERO] * (min(x.prec, count) - len(known))
    return known + [arb.nan()] * (count - len(known))


def reach(thin: Sequence[arb], last: arb, radius: arb) -> arb:
    """An upper bound of |f| on |t| <= radius: f = sum thin_j t^j + (something in `last`) t^len(thin) (Lagrange)."""
    total, power = ZERO, ONE
    for coefficient in thin:
        total += size(coefficient) * power
        power *= radius
    return total + size(last) * power


def supremum(thin: Sequence[arb], last: arb, radius: arb) -> arb:
    """The same bound, but tighter: the polynomial is expanded anew on each of a few parts (lemma K5)."""
    scaled, power = [], ONE
    for coefficient in thin:
        scaled.append(coefficient * power)
        power *= radius
    moved = (_parts(len(thin)) * arb_mat(len(thin), 1, scaled)).entries()
    found = ZERO
    for i in range(0, len(moved), len(thin)):
        found = found.max(sum([x.abs_upper() for x in moved[i : i + len(thin)]], ZERO))
    return found + size(last) * power


@functools.lru_cache(maxsize=8)
def _parts(count: int) -> arb_mat:
    """From coefficients of s on [-1, 1] to those of v, s = at + v / PARTS, |v| <= 1, on each of the parts: exact."""
    rows = [
        [fmpq(2 * i + 1 - PARTS, PARTS) ** (j - k) * math.comb(j, k) / PARTS**k if j >= k else 0 for j in range(count)]
        for i in range(PARTS) for k in range(count)
    ]  # fmt: skip
    return arb_mat(PARTS * count, count, [arb(x) for row in rows for x in row])
