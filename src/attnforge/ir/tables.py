"""`Taylor`: what is known about a function on each cell of a partition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .rounding import Array, down, up


@dataclass(frozen=True, eq=False)
class Taylor:
    """Rigorous Taylor tables, one row for each cell [lo_i, hi_i].

    For every y of cell i, with t = y - centre[i] (|t| <= radius[i], exactly),

        g(y) = sum_j (coefficient[i, j] + e_j) t^j + e t^(order+1)

    for some |e_j| <= error[i, j] and |e| <= remainder[i], and low[i] <= g(y) <= high[i]. Every bound is rounded up and
    may be infinite: `remainder` where the derivative of order + 1 is unbounded or the ball too wide to tell, `error`
    (with coefficient 0) where nothing is known. No entry is NaN.

    >>> from attnforge.ir.functions import taylor
    >>> table = taylor("exp", np.array([-1.0, 0.0]), np.array([0.0, 1.0]), order=3)
    >>> table.coefficient.shape, bool(table.remainder[1] >= np.exp(1) / 24)
    ((2, 4), True)
    """

    centre: Array
    radius: Array
    coefficient: Array
    error: Array
    remainder: Array
    low: Array
    high: Array

    def __post_init__(self) -> None:
        cells, terms = self.coefficient.shape
        assert self.error.shape == (cells, terms)
        for rows in (self.centre, self.radius, self.remainder, self.low, self.high):
            assert rows.shape == (cells,)
        for array in vars(self).values():
            assert not np.isnan(array).any()
            array.setflags(write=False)  # tables are cached, so callers share them

    @property
    def order(self) -> int:
        """The degree of the polynomials."""
        return int(self.coefficient.shape[1]) - 1


def centre_and_radius(lo: Array, hi: Array) -> tuple[Array, Array]:
    """Float64 centres inside the cells, and radii with |y - centre| <= radius for every y of the cell, exactly."""
    centre = np.clip(0.5 * lo + 0.5 * hi, lo, hi)
    radius = np.maximum(up(hi - centre), up(centre - lo))
    return centre, np.where(lo == hi, 0.0, radius)


def intersect(low: Array, high: Array, other_low: Array, other_high: Array) -> tuple[Array, Array]:
    """The tighter of two enclosures, NaN counting as no knowledge."""
    low, other_low = (np.where(np.isnan(x), -np.inf, x) for x in (low, other_low))
    high, other_high = (np.where(np.isnan(x), np.inf, x) for x in (high, other_high))
    return np.maximum(low, other_low), np.minimum(high, other_high)


def spread(middle: Array, width: Array) -> tuple[Array, Array]:
    """Outward rounded [middle - width, middle + width]."""
    return down(middle - width), up(middle + width)
