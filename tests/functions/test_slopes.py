"""Bounds on slopes, over narrow and wide intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

import attnforge as af
from attnforge.functions.directed import precision
from attnforge.functions.queries import lipschitz, modulus
from attnforge.functions.registry import get

SMOOTH = ("gelu", "tanh", "silu", "sin", "exp", "sigmoid", "softplus", "relu", "abs")


@pytest.mark.parametrize("name", SMOOTH)
@given(middle=st.floats(-6, 6), decade=st.floats(-4, 1.2))
def test_a_secant_is_never_steeper(name: str, middle: float, decade: float) -> None:
    fn, half = get(name), 10.0**decade
    low, high = np.array([middle - half, middle - half / 3]), np.array([middle + half, middle + half])
    bound = lipschitz(fn, low, high)
    for a, b, most in zip(low, high, bound, strict=True):
        x = torch.linspace(float(a), float(b), 500, dtype=torch.float64)
        y = fn.value(x)
        noise = 1e-15 * (1 + y.abs().max())  # of the values, which are rounded
        assert bool(((y.diff().abs() - noise) <= most * x.diff()).all())


def test_wide_intervals_are_not_punished() -> None:
    """One enclosure of gelu's slope over [-8, 8] is beyond 1e14; the slope is at most 1.13."""
    for half in (0.5, 2.0, 8.0, 50.0):
        (found,) = lipschitz(get("gelu"), np.array([-half]), np.array([half]))
        assert found < (1.25 if half < 10 else 3.0)
    assert 0.5 <= lipschitz(get("sqrt"), np.array([1.0]), np.array([100.0]))[0] < 0.75
    assert np.isinf(lipschitz(get("sqrt"), np.array([0.0]), np.array([1.0]))[0])


@pytest.mark.parametrize("name", ["asin", "acos", "sqrt", "power(0.3)"])
@given(decade=st.floats(-323.5, 0.3))
def test_a_modulus_covers_the_steepest_end_at_every_scale(name: str, decade: float) -> None:
    """1 - e is 1 for e below 2^-54, and the change of asin at 1 is then still sqrt(2 e)."""
    e = min(10.0**decade, 2.0 if name in ("asin", "acos") else 1.0)
    with precision(2400):  # 1 - e is exact
        change = (1 - arb(e)).acos() if name in ("asin", "acos") else get(name).ball(arb(e))
        (found,) = modulus(get(name), np.array([e]))
        assert arb(float(found)) >= change
        assert arb(float(found)) <= change * (1 + arb(2) ** -40)


def test_a_steep_function_of_a_tiny_argument_is_covered() -> None:
    """The argument errs by less than float64 can take from 1; the error is then multiplied by 1e14."""
    net = af.compile("1e14*asin(1e-14*sin(x)*y)", af.Box(x=(-1, 1), y=(-1, 1)), 1e-3, dtype=torch.float64)
    x = net.box.sample(300, seed=0)
    y = net(x)
    with precision(300):
        truth = [arb(10) ** 14 * (arb(a).sin() * arb(b) / arb(10) ** 14).asin() for a, b in x.tolist()]
        worst = max(abs(arb(v) - t) for v, t in zip(y.tolist(), truth, strict=True))
        assert worst <= net.bound
