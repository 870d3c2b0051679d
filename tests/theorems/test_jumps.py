"""True jumps (B8): L^p bounds, their inverse and the lower bound, against heads; certificates keep refusing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge.errors import ArgumentError, AttnforgeError
from attnforge.heads.slopes import SlotLines
from attnforge.theorems.jumps import jump_constant, jump_error, jump_floor, sharpness_for, staircase


def norm(off: np.ndarray, t: np.ndarray, p: float) -> float:
    """The L^p norm on a grid, by the trapezoidal rule."""
    y = np.abs(off) ** p
    return float(np.sum(0.5 * (y[1:] + y[:-1]) * np.diff(t))) ** (1 / p)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 7.0])
def test_one_jump_is_met_exactly_and_nearly_optimal(p: float) -> None:
    for beta in (1.0, 1e3, 1e9):
        t = np.concatenate([[0.0], np.geomspace(1e-9, 60.0, 40_000)]) / beta
        half = norm(1 / (1 + np.exp(beta * t)), t, p)
        assert 2 ** (1 / p) * half == pytest.approx(jump_error(beta, p), rel=1e-6)
        assert jump_floor(beta, 1.0, p) < jump_error(beta, p) < 1.4 * jump_floor(beta, 1.0, p)
    assert jump_constant(1.0) == pytest.approx(math.log(2), rel=1e-11)


def test_no_head_beats_the_floor() -> None:
    """Heads with random slopes, offsets and values, and the best values for their keys in L^2."""
    rng, y = np.random.default_rng(0), np.linspace(-1, 1, 4001)
    step = (y > 0).astype(float)
    for _ in range(60):
        slots = int(rng.integers(2, 12))
        a, b = rng.uniform(-1, 1, slots) * 10 ** rng.uniform(0.5, 2), rng.normal(size=slots)
        logits = np.multiply.outer(y, a) + b
        w = np.exp(logits - logits.max(-1, keepdims=True))
        w /= w.sum(-1, keepdims=True)
        for value in (rng.uniform(0, 1, slots), np.linalg.lstsq(w, step, rcond=1e-6)[0]):
            head, reach = w @ value, np.ptp(a) * np.ptp(value)
            assert np.abs(np.diff(head)).max() <= 0.25 * reach * np.diff(y).max() * (1 + 1e-9)
            if reach < 8:
                continue  # the interval is too short for the statement
            for p in (1.0, 2.0, 4.0):
                assert norm(head - step, y, p) >= jump_floor(np.ptp(a), np.ptp(value), p) * (1 - 1e-3)  # of the grid
    assert SlotLines(a, b, value, 0 * a).enclose(np.array([-1.0]), np.array([1.0]))[0].size == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_staircase_reaches_what_its_sharpness_was_chosen_for(dtype: torch.dtype) -> None:
    places, jumps, eps = [-0.3, 0.2, 0.6], [2.0, -1.0, 0.5], 1e-2
    for p in (1.0, 2.0):
        stairs = staircase(places, jumps, sharpness_for(eps, p, jumps), dtype)
        y = np.unique(np.concatenate([np.linspace(-1, 1, 4001)] + [x + s * np.geomspace(1e-9, 0.2, 2000)
                                                                   for x in places for s in (-1, 1)]))  # fmt: skip
        found = stairs(torch.from_numpy(y)[:, None].to(dtype)).detach().double().numpy()[:, 0]
        wanted = sum(j * (y > x) for x, j in zip(places, jumps, strict=True))
        assert norm(found - wanted, y, p) <= eps * 1.01  # of the trapezoidal rule
        assert np.abs(found - wanted).max() > 0.45 * 2.0, "the largest error stays half a jump"


def test_certificates_keep_refusing() -> None:
    box = af.Box.cube(-1, 1, shape=1)
    with pytest.raises(AttnforgeError, match=r"jump|contradicted"):
        af.approximate(lambda x: (x[:, 0] > 0.123).double(), box, eps=0.1, lipschitz=100.0)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ArgumentError, match="p must be"):
        jump_error(1.0, 0.5)
    with pytest.raises(ArgumentError, match="a place for each"):
        staircase([0.0], [1.0, 2.0], 10.0)
    with pytest.raises(ArgumentError, match="sharpness"):
        jump_error(0.0, 1.0)
    assert sharpness_for(1.0, 1.0, (0.0,)) < 1e-200
