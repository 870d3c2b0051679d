"""The spectral theorem (A9) against errors measured in high precision, and against what the library fits."""

from __future__ import annotations

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
import torch

import attnforge as af
from attnforge import AnchorHead
from attnforge.errors import ArgumentError
from attnforge.expressions.composite import composite
from attnforge.heads.anchor.fit import nearest_pole
from attnforge.theorems.spectral import Density, Strip, aliases, lattice_values, resonant


def lorentz_value(x: mp.mpf, spacing: mp.mpf, kappa: mp.mpf) -> mp.mpf:
    """V of 1/(1 + y^2) at x, to 40 digits."""
    rate = spacing**2 / (4 * kappa)
    return mp.quad(lambda w: mp.exp(rate * w * w - w) * mp.cos(w * x), mp.linspace(0, mp.pi / spacing, 4))


@pytest.mark.parametrize("spacing", [0.4, 0.2, 0.1])
def test_resonance_doubles_the_digits_in_high_precision(spacing: float) -> None:
    with mp.workdps(40):
        D, kappa = mp.mpf(spacing), mp.pi * mp.mpf(spacing) / 2
        reach = int(math.sqrt(90 / float(kappa))) + 2  # weights beyond are below 1e-39
        values = {k: lorentz_value(k * D, D, kappa) for k in range(reach + 2)}
        worst = mp.mpf(0)
        for y in (mp.mpf(0), D / 3, D / 2):
            weights = {k: mp.exp(-kappa * (y / D - k) ** 2) for k in range(-reach, reach + 2)}
            head = sum(w * values[abs(k)] for k, w in weights.items()) / sum(weights.values())
            worst = max(worst, abs(head - 1 / (1 + y * y)))
        limit = Density(0.5, 1.0).resonance(spacing)
        assert 0.3 * limit < float(worst) <= limit
        assert limit < 8 * math.exp(-2 * math.pi / spacing) < Density(0.5, 1.0).interpolation(spacing, float(kappa))


@pytest.mark.parametrize(("tone", "decay"), [(0.5, 1.0), (1.3, 4.0), (3.0, 0.7)])
def test_sinusoids_stay_below_the_bound_at_every_temperature(tone: float, decay: float) -> None:
    wave, y = Strip(math.exp(decay * tone), decay), np.linspace(0, 3, 301)
    for spacing in (0.3, 0.5, 0.9):
        for kappa in (0.4, 0.9, 2.0):
            k = np.arange(-60, 70)
            value = math.exp((tone * spacing) ** 2 / (4 * kappa)) * np.cos(tone * k * spacing)
            logits = -kappa * (y[:, None] / spacing - k) ** 2
            weight = np.exp(logits - logits.max(1, keepdims=True))
            error = np.abs((weight @ value) / weight.sum(1) - np.cos(tone * y)).max()
            assert error <= wave.interpolation(spacing, kappa) + 1e-13 * np.abs(value).max()
            assert np.abs(value).max() <= wave.values(spacing, kappa)


def test_computed_bounds_are_no_smaller_than_the_lemma() -> None:
    """Exponents of hundreds carry roundings of hundreds of units in the last place: 60 digits say what is stated."""
    rng, ranges = np.random.default_rng(0), ((-3, 1), (-2, 2), (-2.4, 0.47), (-3, 9))
    with mp.workdps(60):
        for _ in range(400):
            spacing, decay, kappa, mass = (float(10.0 ** rng.uniform(*r)) for r in ranges)
            D, d, k, M = (mp.mpf(x) for x in (spacing, decay, kappa, mass))
            rho = mp.exp(-(mp.pi**2) / k)
            C = (1 + rho**2 + rho**6 + rho**12) / (1 - 2 * rho)
            strip, density = Strip(mass, decay), Density(mass, decay)
            if (least := min(mp.pi * d / D, mp.pi**2 / k)) < 600:
                assert strip.interpolation(spacing, kappa) >= C * M * mp.exp(-least)
            if (most := mp.pi**2 / (4 * k) - mp.pi * d / D) < 600:
                assert strip.values(spacing, kappa) >= M * mp.exp(max(mp.mpf(0), most))
            if mp.pi * D / k > d * (1 + mp.mpf(10) ** -6) and mp.pi * d / D < 600:
                stated = 2 * M * mp.exp(-mp.pi * d / D) * (1 / d + C / (mp.pi * D / k - d))
                assert density.interpolation(spacing, kappa) >= stated
            if (cold := resonant(spacing, decay)) <= 3 and (aW := 2 * mp.pi * d / D) < 600:
                r = mp.exp(-aW / 2)
                stated = 2 * M / d * r**2 * (1 + (2 + 2 * r + r**3 / (3 * (1 - r**2))) / (1 - 2 * r**2))
                assert density.resonance(spacing) >= stated * (1 - mp.mpf(10) ** -16) and cold > 0


def test_the_bound_is_attained_up_to_the_constant() -> None:
    """A tone next to the lattice's highest frequency errs by nearly all that the class allows."""
    spacing, kappa, decay = 0.5, 0.8, 1.0
    tone = 0.999 * math.pi / spacing
    y, k = np.linspace(0, 1, 401), np.arange(-60, 70)
    value = math.exp((tone * spacing) ** 2 / (4 * kappa)) * np.cos(tone * k * spacing)
    weight = np.exp(-kappa * (y[:, None] / spacing - k) ** 2)
    error = np.abs((weight @ value) / weight.sum(1) - np.cos(tone * y)).max()
    assert 0.9 < error / (math.exp(-decay * math.pi / spacing) * math.exp(decay * tone)) <= aliases(kappa)


def test_plans_keep_their_word_and_grow_with_the_logarithm() -> None:
    wave = Strip(math.exp(2.0), 2.0)
    counts = [wave.plan(10.0, eps).anchors for eps in (1e-3, 1e-6, 1e-9, 1e-12)]
    assert all(wave.plan(10.0, eps).bound <= eps for eps in (1e-3, 1e-6, 1e-9, 1e-12))
    steps = np.diff(counts)
    assert (steps > 0).all() and steps.max() <= 1.3 * steps.min() + 2
    for count, eps in zip(counts, (1e-3, 1e-6, 1e-9, 1e-12), strict=True):
        assert wave.floor(10.0, count) <= eps  # the lower bound lies below


@pytest.mark.parametrize("length", [0.1, 3.0, 50.0])
def test_plans_are_of_the_stated_size_on_short_and_long_intervals(length: float) -> None:
    """E6(a): (length/(pi d) + 2/pi) ln(2.4 M/eps) + O(1), whatever length, d and M are; and it keeps its word."""
    for decay, mass, eps in itertools.product((0.1, 1.0, 10.0), (1.0, 1e6), (1e-2, 1e-12)):
        table = Strip(mass, decay).plan(length, eps)
        allowed = (length / (math.pi * decay) + 2 / math.pi) * math.log(2.4 * mass / eps)
        assert table.bound <= eps and table.anchors <= allowed + 4
        assert (table.anchors - 1 - 2 * table.guards) * table.spacing >= length * (1 - 1e-15)
    tone, wave = 0.7, Strip(math.exp(0.7 * 10), 10.0)  # a strip far wider than the interval
    table = wave.plan(length, 1e-6)
    places = table.spacing * np.arange(-table.guards, table.anchors - table.guards)
    y = np.linspace(0, length, 201)
    logits = -table.kappa * ((y[:, None] - places) / table.spacing) ** 2
    weight = np.exp(logits - logits.max(1, keepdims=True))
    value = math.exp((tone * table.spacing) ** 2 / (4 * table.kappa)) * np.cos(tone * places)
    assert np.abs(weight @ value / weight.sum(1) - np.cos(tone * y)).max() <= table.bound


def test_no_fit_of_the_class_beats_the_lower_bound() -> None:
    """Best approximation of the class's trigonometric polynomials by the library's own keys: the floor holds."""
    length, decay, count = 4.0, 0.5, 12
    head = af.AnchorHead.fit("cos", 0, length, anchors=count, potential="square", dtype=torch.float64)
    y = np.linspace(0, length, 801)
    basis = head.weights_in_float64().weights(y)
    j = np.arange(count // 2 + 1)
    waves = np.concatenate(
        [np.cos(2 * np.pi * np.outer(y, j) / length), np.sin(2 * np.pi * np.outer(y, j[1:]) / length)], 1
    )
    mass = np.exp(decay * 2 * np.pi * np.concatenate([j, j[1:]]) / length)
    left = waves / mass - basis @ np.linalg.lstsq(basis, waves / mass, rcond=None)[0]
    assert np.sqrt((left**2).mean(0)).max() >= Strip(1.0, decay).floor(length, count)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="kappa must be at most 3"):
        Strip(1.0, 1.0).interpolation(0.1, 4.0)
    with pytest.raises(ArgumentError, match="below pi spacing"):
        Density(1.0, 1.0).interpolation(0.1, 1.0)
    with pytest.raises(ArgumentError, match="mass must be greater than 0"):
        Strip(-1.0, 1.0)
    assert math.isinf(Density(1.0, 1.0).values(1.0, 0.5)) and math.isinf(Strip(1.0, 1e-3).values(1e-3, 1e-4))
    assert resonant(0.2, 2.0) == pytest.approx(0.05 * math.pi)
    x = np.array([0.0, 0.3])
    flat = lattice_values(lambda w: 0 * w, 0.5, 1.0, x)
    assert (flat == 0).all()
    with pytest.raises(ArgumentError, match="resonance needs kappa"):
        Density(0.5, 1.0).bound(0.2, 0.35 * math.pi * 0.2, 8, resonance=True)


def test_values_far_from_the_middle_are_integrated_as_well() -> None:
    """A spectrum that the undone filter makes flat: values 2 sin(pi x/spacing)/x."""
    x = 0.5 * np.array([1.0, 1.5, 90.5, 700.0, 1500.5])
    got = lattice_values(lambda w: np.exp(-((0.5 * w) ** 2) / 4.0), 0.5, 1.0, x)
    assert np.abs(got - 2 * np.sin(2 * math.pi * x) / x).max() < 1e-11


@pytest.mark.parametrize(("formula", "pole"), [("1/(1+y**2)", 1.0), ("tanh(3*y)*y", math.pi / 6)])
def test_a_search_finds_resonance_where_anchors_are_even(formula: str, pole: float) -> None:
    function = composite(formula)
    found = nearest_pole(function, -3.0, 3.0)
    assert found is not None and found[0] == pytest.approx(0.0, abs=1e-9) and found[1] == pytest.approx(pole)
    head = AnchorHead.fit(function, -3, 3, anchors=33, potential="square", dtype=torch.float64)
    others = [AnchorHead.fit(function, -3, 3, anchors=33, potential="square", dtype=torch.float64, kappa=kappa).bound
              for kappa in (0.12, 0.36)]  # fmt: skip
    assert head.bound is not None and all(b is not None and b > 20 * head.bound for b in others)


@pytest.mark.parametrize("formula", ["exp(-y**2)", "sin(y)", "abs(y)", "y**3"])
def test_where_there_is_no_pole_none_is_seen(formula: str) -> None:
    assert nearest_pole(composite(formula), -3.0, 3.0) is None
