"""`Univariate`: one function of one scalar, in every form that the rest of the project needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flint import arb, arb_series
from torch import Tensor

from ..errors import ArgumentError
from .domain import REALS, Domain

Value = Callable[[Tensor], Tensor]
Series = Callable[[arb_series], arb_series]
Ball = Callable[[arb], arb]
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
    - `source`: the user's callable. Functions are equal when their names and sources are: without a source, the name
      determines the function.
    """

    name: str
    value: Value
    series: Series | None
    ball: Ball
    domain: Domain = REALS
    knots: tuple[float, ...] = ()
    potentials: tuple[str, ...] = ("square",)
    second_derivative: float | None = None
    pieces: tuple[Series, ...] = ()
    turns: Turns | None = None
    source: object = None
    image: tuple[float, float] = (-math.inf, math.inf)

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


def ball_by_turns(point: Ball, turns: Turns, domain: Domain) -> Ball:
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
        if domain.poles and domain.pole_in(_below(lo), _above(hi)) is not None:
            return arb.nan()
        lo = arb(domain.lo) if below else lo
        hi = arb(domain.hi) if above else hi
        out = point(lo).union(point(hi))
        for turn in overlapping(turns, lo, hi):
            out = out.union(point(turn))
        return out

    return ball


def _below(x: arb) -> float:
    return math.nextafter(float(x), -math.inf)


def _above(x: arb) -> float:
    return math.nextafter(float(x), math.inf)
