"""`Domain`: where a univariate function is defined, and the sentence that says where it is not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ArgumentError


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
