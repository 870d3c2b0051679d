"""`Univariate`: one function of one scalar, in every form that the rest of the project needs.

With it `Domain`, where the function is defined and the sentence that says where it is not, and `Taylor`, what is known
about it on each cell of a partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flint import arb, arb_series
from torch import Tensor

from ..dtypes import Array
from ..errors import ArgumentError
from .directed import down, up


@dataclass(frozen=True)
class Domain:
    """An interval with open or closed ends, less the poles inside of it.

    `poles` are points where the function is unbounded; with a `period`, every pole repeats at whole multiples of it.

    >>> Domain(0.0, math.inf, lo_closed=False).offence("log", -1.0, 2.0)
    'log is undefined for y <= 0, and the interval [-1, 2] contains y = 0; choose an interval with lo > 0'
    >>> Domain().offence("sin", -1.0, 2.0) is None
    True
    """

    lo: float = -math.inf
    hi: float = math.inf
    lo_closed: bool = True
    hi_closed: bool = True
    poles: tuple[float, ...] = ()
    period: float | None = None

    def __post_init__(self) -> None:
        if not self.lo < self.hi:
            raise ArgumentError(f"a domain needs lo < hi, got [{self.lo!r}, {self.hi!r}]")
        if self.period is not None and not self.period > 0:
            raise ArgumentError(f"the period of a domain's poles must be positive, got {self.period!r}")

    def pole_in(self, lo: float, hi: float) -> float | None:
        """A pole in [lo, hi], or None.

        A periodic pole is irrational and known to a few ulps only, so an interval that ends that close to one counts
        as touching it.
        """
        for pole in self.poles:
            if self.period is None:
                if lo <= pole <= hi:
                    return pole
                continue
            slack = 8 * max(math.ulp(lo), math.ulp(hi))
            near = pole + self.period * math.ceil((lo - slack - pole) / self.period)
            for candidate in (near - self.period, near, near + self.period):
                if lo - slack <= candidate <= hi + slack:
                    return candidate
        return None

    def reaches(self, lo: float, hi: float) -> tuple[bool, bool]:
        """Whether [lo, hi] leaves the domain below and above (an open end must not be touched)."""
        below = lo < self.lo or (lo == self.lo and not self.lo_closed)
        above = hi > self.hi or (hi == self.hi and not self.hi_closed)
        return below, above

    def offence(self, name: str, lo: float, hi: float) -> str | None:
        """What is wrong with [lo, hi], naming an offending point; None when the function is defined on all of it."""
        interval = f"the interval [{lo:.10g}, {hi:.10g}]"
        below, above = self.reaches(lo, hi)
        if below:
            sign, point = ("<", lo) if self.lo_closed else ("<=", min(max(self.lo, lo), hi))
            return (
                f"{name} is undefined for y {sign} {self.lo:.10g}, and {interval} contains y = {point:.10g}; "
                f"choose an interval with lo {'>=' if self.lo_closed else '>'} {self.lo:.10g}"
            )
        if above:
            sign, point = (">", hi) if self.hi_closed else (">=", min(max(self.hi, lo), hi))
            return (
                f"{name} is undefined for y {sign} {self.hi:.10g}, and {interval} contains y = {point:.10g}; "
                f"choose an interval with hi {'<=' if self.hi_closed else '<'} {self.hi:.10g}"
            )
        pole = self.pole_in(lo, hi)
        if pole is not None:
            return (
                f"{name} has a pole at y = {pole:.10g}, and {interval} contains it; "
                f"choose an interval on one side of the pole"
            )
        return None


REALS = Domain()
POSITIVE = Domain(0.0, math.inf, lo_closed=False)
NON_NEGATIVE = Domain(0.0, math.inf)
UNIT = Domain(-1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Taylor:
    """Rigorous Taylor tables, one row for each cell [lo_i, hi_i].

    For every y of cell i, with t = y - centre[i] (|t| <= radius[i], exactly),

        g(y) = sum_j (coefficient[i, j] + e_j) t^j + e t^(order+1)

    for some |e_j| <= error[i, j] and |e| <= remainder[i], and low[i] <= g(y) <= high[i]. Every bound is rounded up and
    may be infinite: `remainder` where the derivative of order + 1 is unbounded or the ball too wide to tell, `error`
    (with coefficient 0) where nothing is known. No entry is NaN.

    >>> from attnforge.functions.registry import taylor
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


Value = Callable[[Tensor], Tensor]
Series = Callable[[arb_series], arb_series]
BallMap = Callable[[arb], arb]
#: Balls around the points where the function turns; a function of the interval's ends where there are infinitely many.
Turns = tuple[arb, ...] | Callable[[arb, arb], tuple[arb, ...]]

POTENTIALS = ("square", "log", "atan")


@dataclass(frozen=True, eq=False)
class Univariate:
    """One function of one scalar: value, rigorous series and range, domain, kinks.

    - `value`: torch, elementwise, differentiable, any floating dtype.
    - `series`: composition with a python-flint power series. The constant term may be a ball; the coefficients then
      enclose the Taylor coefficients at every point of the ball. None for a user's callable.
    - `ball`: encloses the function over the part of a ball that lies in the domain; NaN where nothing is known.
    - `knots`: where the function is not analytic. Between knots k-1 and k it equals `pieces[k]`, which is analytic on
      a neighbourhood of that closed interval (or at least inside of it).
    - `turns`: between consecutive turns the function is monotone, so that its range comes from its values at the ends
      and the turns. None when that is not known: ranges then come from subdivision.
    - `image`: bounds that hold wherever the function is defined, such as (-1, 1) for sin; enclosures are cut to them.
    - `second_derivative`: for a user's callable, the declared bound on |f''|.
    - `seam`: a place and a series: cells that reach beyond the place belong to that series, also at centres before it.
      Of a function that jumps there, it holds both branches.
    - `source`: the user's callable. Functions are equal when their names and sources are: without a source, the name
      determines the function.
    """

    name: str
    value: Value
    series: Series | None
    ball: BallMap
    domain: Domain = REALS
    knots: tuple[float, ...] = ()
    potentials: tuple[str, ...] = ("square",)
    second_derivative: float | None = None
    pieces: tuple[Series, ...] = ()
    turns: Turns | None = None
    source: object = None
    image: tuple[float, float] = (-math.inf, math.inf)
    seam: tuple[float, Series] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ArgumentError("a univariate function needs a name")
        if any(not math.isfinite(k) for k in self.knots) or list(self.knots) != sorted(set(self.knots)):
            raise ArgumentError(f"knots of {self.name} must be finite and increasing, got {self.knots!r}")
        if self.pieces and len(self.pieces) != len(self.knots) + 1:
            raise ArgumentError(
                f"{self.name} has {len(self.knots)} knots and so needs {len(self.knots) + 1} pieces, "
                f"got {len(self.pieces)}"
            )
        unknown = set(self.potentials) - set(POTENTIALS)
        if unknown or not self.potentials:
            raise ArgumentError(f"potentials of {self.name} must be taken from {POTENTIALS}, got {self.potentials!r}")
        bound = self.second_derivative
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise ArgumentError(f"second_derivative must be a finite number >= 0 (it bounds |f''|), got {bound!r}")

    @property
    def certifiable(self) -> bool:
        """Whether bounds for this function can be proved: it has a series, or a declared second derivative."""
        return self.series is not None or self.second_derivative is not None

    @property
    def branches(self) -> tuple[Series, ...]:
        """The analytic series between the knots, from left to right."""
        if self.pieces:
            return self.pieces
        return () if self.series is None else (self.series,) * (len(self.knots) + 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Univariate):
            return NotImplemented
        same = (self.name, self.second_derivative) == (other.name, other.second_derivative)
        return same and self.source is other.source

    def __hash__(self) -> int:
        return hash((self.name, id(self.source)))

    def __deepcopy__(self, memo: dict[int, object]) -> Univariate:
        return self  # immutable, and balls cannot be copied: a copy of a network shares its functions

    def __call__(self, y: Tensor) -> Tensor:
        return self.value(y)

    def __repr__(self) -> str:
        return f"Univariate({self.name})"


@dataclass(frozen=True, eq=False)
class Searched:
    """Turns that have to be searched for: dear, so that many cells ask once, for the interval around them all."""

    between: Callable[[arb, arb], tuple[arb, ...]]

    def __call__(self, lo: arb, hi: arb) -> tuple[arb, ...]:
        return self.between(lo, hi)


def overlapping(turns: Turns, lo: arb, hi: arb) -> list[arb]:
    """The turns that may lie in [lo, hi]; a comparison of balls is true only when it holds for certain."""
    balls = turns(lo, hi) if callable(turns) else turns
    return [turn for turn in balls if not (turn < lo or turn > hi)]


def ball_by_turns(point: BallMap, turns: Turns, domain: Domain) -> BallMap:
    """A tight `ball` from `point` (sound on any ball inside the domain) and the turns of the function."""

    def ball(x: arb) -> arb:
        if x.is_exact() or not x.is_finite():
            return point(x)
        lo, hi = x.lower(), x.upper()
        below, above = lo < domain.lo, hi > domain.hi
        # The ball of a cell is a little larger than the cell (its radius has 30 bits), so that it may stick out of
        # the domain. At a closed end the part outside does not count; at an open end nothing is known.
        if (below and not domain.lo_closed) or (above and not domain.hi_closed):
            return arb.nan()
        lo = arb(domain.lo) if below else lo
        hi = arb(domain.hi) if above else hi
        if domain.poles and domain.pole_in(_below(lo), _above(hi)) is not None:
            return arb.nan()
        out = point(lo).union(point(hi))
        for turn in overlapping(turns, lo, hi):
            out = out.union(point(turn))
        return out

    return ball


def _below(x: arb) -> float:
    return math.nextafter(float(x), -math.inf)


def _above(x: arb) -> float:
    return math.nextafter(float(x), math.inf)
