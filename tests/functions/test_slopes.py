"""Bounds on slopes, over narrow and wide intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnforge.functions.queries import lipschitz
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
