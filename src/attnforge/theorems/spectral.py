"""What a warm head will err by, before it is built: the spectral theorem of even lattices (lemma A9 of docs/theory.md).

A function g(y) = integral of e^{iwy} dmu(w), anchors k Delta, the square potential and the values V_k = v(k Delta), v
being g with every frequency |w| <= pi/Delta multiplied by exp((w Delta)^2 / 4 kappa). `Strip` and `Density` are the two
classes with a bound of the error of such a head; `lattice_values` makes the values. All of it is real arithmetic: what
is shipped and computed has the certificate of A4 and A5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arguments import positive, whole
from ..certificates.rounding import exp_up, up
from ..dtypes import Array
from ..errors import ArgumentError
from ..heads.fast.table import dropped

MOST_ANCHORS = 1 << 20  # of a plan: a table beyond has no use and no memory
LEAST_TEMPERATURE = 3.0  # kappa at most this: rho = exp(-pi^2/kappa) is then below 0.04, as the lemma asks for
NODES = 200  # of the integral for values, for what is not a wave: far more than a Gaussian and a decay need
SLACK = 32  # units in the last place by which a bound is moved up: it is some twenty operations and exponentials


def _rho(kappa: float) -> float:
    """rho, rounded up: every bound grows with it."""
    return exp_up(-(math.pi**2) / kappa)


def aliases(kappa: float) -> float:
    """C of lemma A9: (1 + rho^2 + rho^6 + ...) / (1 - 2 rho), what aliases of all orders and the denominator cost.

    >>> 1 < aliases(0.5) < 1 + 1e-8
    True
    """
    rho = _rho(kappa)
    return float(up((1 + rho**2 / (1 - rho**4)) / (1 - 2 * rho), SLACK))


def _checked(spacing: float, kappa: float) -> tuple[float, float]:
    spacing, kappa = positive("spacing", spacing), positive("kappa", kappa)
    if kappa > LEAST_TEMPERATURE:
        raise ArgumentError(f"kappa must be at most {LEAST_TEMPERATURE:g} for a warm head (lemma A9), got {kappa:g}")
    return spacing, kappa


@dataclass(frozen=True)
class Spectral:
    """A table before it is built: spacing, inverse temperature, guards beyond either end, and what it will err by."""

    anchors: int
    spacing: float
    kappa: float
    guards: int
    bound: float


@dataclass(frozen=True)
class Strip:
    """Functions with integral e^{decay |w|} d|mu|(w) <= mass: analytic in the strip |Im y| < decay, bounded there.

    >>> wave = Strip(mass=math.exp(2.0), decay=2.0)  # cos y: the mass is 1 at |w| = 1, times e^{decay}
    >>> found = wave.plan(length=10.0, eps=1e-6)
    >>> found.anchors, found.bound <= 1e-6
    (37, True)
    """

    mass: float
    decay: float

    def __post_init__(self) -> None:
        positive("mass", self.mass)
        positive("decay", self.decay)

    def interpolation(self, spacing: float, kappa: float) -> float:
        """A9(a): C mass max(e^{-pi decay/spacing}, e^{-pi^2/kappa}), with infinitely many anchors."""
        spacing, kappa = _checked(spacing, kappa)
        least = min(math.pi * self.decay / spacing, math.pi**2 / kappa)
        return float(up(aliases(kappa) * self.mass * exp_up(-least), SLACK))

    def values(self, spacing: float, kappa: float) -> float:
        """A9(a): the largest |V_k| at most; it is `mass` from kappa = pi spacing / (4 decay) on."""
        spacing, kappa = _checked(spacing, kappa)
        filtered, kept = math.pi**2 / (4 * kappa), math.pi * self.decay / spacing
        most = max(0.0, filtered - kept + 8 * 2.0**-53 * (filtered + kept))  # terms that cancel are rounded themselves
        return float(up(self.mass * exp_up(most), SLACK)) if most < 700 else math.inf

    def bound(self, spacing: float, kappa: float, guards: int) -> float:
        """A9(d): the same with `guards` anchors beyond either end of an interval, whose ends are anchors."""
        lost = 2 * self.values(spacing, kappa) * dropped(kappa, whole("guards", guards, 1))
        return float(up(self.interpolation(spacing, kappa) + lost, SLACK))

    def plan(self, length: float, eps: float) -> Spectral:
        """The smallest table for an interval of this length, by A9(d) with kappa = pi spacing / decay."""
        length, eps = positive("length", length), positive("eps", eps)
        best: Spectral | None = None
        for share in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99):  # of eps for interpolation, the rest for the ends
            widest = math.pi * self.decay / math.log(max(2.0, 1.2 * self.mass / (share * eps)))
            pieces = math.ceil(length / widest)
            for spacing in (widest, length / pieces):  # the last anchor but for guards beyond the end, or on it
                kappa = min(math.pi * spacing / self.decay, LEAST_TEMPERATURE)
                guards, count = 1, pieces + 3
                while self.bound(spacing, kappa, guards) > eps and count < MOST_ANCHORS:
                    guards, count = guards + 1, count + 2
                    if dropped(kappa, guards) < 1e-290:
                        break
                found = Spectral(count, spacing, kappa, guards, self.bound(spacing, kappa, guards))
                if found.bound <= eps and (best is None or found.anchors < best.anchors):
                    best = found
        if best is None:
            raise ArgumentError(f"no table of up to {MOST_ANCHORS} anchors was found for eps = {eps:g}")
        return best

    def floor(self, length: float, anchors: int) -> float:
        """A9(e): whatever the keys, if all functions of the class share them, one of them errs by this or more."""
        length, even = positive("length", length), 2 * ((whole("anchors", anchors, 1) + 1) // 2)
        return self.mass * math.exp(-math.pi * self.decay * even / length) / math.sqrt(even + 1) * (1 - 1e-12)


@dataclass(frozen=True)
class Density:
    """Functions whose spectrum has a density of at most amplitude * e^{-decay |w|}, such as 1/(1 + y^2) with (1/2, 1).

    >>> round(Density(0.5, 1.0).interpolation(0.2, 0.35 * math.pi * 0.2) * 1e7, 3)
    2.318
    """

    amplitude: float
    decay: float

    def __post_init__(self) -> None:
        positive("amplitude", self.amplitude)
        positive("decay", self.decay)

    def interpolation(self, spacing: float, kappa: float) -> float:
        """A9(b), for kappa < pi spacing / decay."""
        spacing, kappa = _checked(spacing, kappa)
        over = math.pi * spacing / kappa * (1 - 8 * 2.0**-53) - self.decay  # rounded down, as what cancels must be
        if not over > 0:
            raise ArgumentError(f"kappa must be below pi spacing / decay = {math.pi * spacing / self.decay:g} (A9(b))")
        least = 2 * self.amplitude * exp_up(-math.pi * self.decay / spacing)
        return float(up(least * (1 / self.decay + aliases(kappa) / over), SLACK))

    def values(self, spacing: float, kappa: float) -> float:
        """A9(b): the largest |V_k| at most, for kappa > pi spacing / (4 decay)."""
        left = self.decay - math.pi * spacing / (4 * kappa) * (1 + 8 * 2.0**-53)
        return float(up(2 * self.amplitude / left, SLACK)) if left > 0 else math.inf

    def bound(self, spacing: float, kappa: float, guards: int, resonance: bool = False) -> float:
        """A9(d): (b), or (c), with `guards` anchors beyond either end of an interval, whose ends are anchors."""
        if resonance and kappa != resonant(spacing, self.decay):
            raise ArgumentError(f"resonance needs kappa = {resonant(spacing, self.decay)!r} (A9(c)), got {kappa!r}")
        lost = 2 * self.values(spacing, kappa) * dropped(kappa, whole("guards", guards, 1))
        return float(up((self.resonance(spacing) if resonance else self.interpolation(spacing, kappa)) + lost, SLACK))

    def resonance(self, spacing: float) -> float:
        """A9(c): kappa = pi spacing / (2 decay), the density exactly as stated, and an anchor under the pole.

        >>> Density(0.5, 1.0).resonance(0.25) < 3.7e-11 < 1e-5 * Density(0.5, 1.0).interpolation(0.25, math.pi / 8)
        True
        """
        spacing, _ = _checked(spacing, kappa := resonant(spacing, self.decay))
        rho, r = _rho(kappa), exp_up(-math.pi * self.decay / spacing)
        inner = (2 + r * rho / (3 * (1 - rho)) + 2 * r) / (1 - 2 * rho)
        return float(up(2 * self.amplitude * rho / self.decay * (1 + inner), SLACK))


def resonant(spacing: float, decay: float) -> float:
    """The inverse temperature at which aliases stand in for the missing tail: kappa = pi spacing / (2 decay)."""
    return math.pi * spacing / (2 * decay)


@functools.lru_cache(maxsize=8)
def _gauss(nodes: int) -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(nodes)


def lattice_values(transform: Callable[[Array], Array], spacing: float, kappa: float, places: Array) -> Array:
    """V_k of lemma A9 at lattice points x: transform(w) e^{(w spacing)^2/4 kappa + iwx} integrated, |w| <= pi/spacing.

    `transform` is the density of an even real spectrum, for w >= 0; the integral is Gauss-Legendre's.
    """
    spacing, kappa = _checked(spacing, kappa)
    phase = math.pi / spacing * float(np.abs(places).max(initial=0.0))  # n nodes resolve 2 n radians
    at, weight = _gauss(NODES * (1 + math.ceil(phase / (2 * NODES))))
    w = 0.5 * math.pi / spacing * (at + 1)
    amount = 2 * (0.5 * math.pi / spacing) * weight * transform(w) * np.exp((w * spacing) ** 2 / (4 * kappa))
    return np.asarray(np.cos(np.multiply.outer(places, w)) @ amount)
