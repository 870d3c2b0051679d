"""Ranges of affine maps of normed rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnforge as af
from attnforge.programs.enclose import ranges
from attnforge.programs.interpret import every_value
from attnforge.programs.program import Builder, Program

N, D = 2, 16


def program(rng: np.random.Generator, eps: float, centred: bool) -> Program:
    """Two affine maps after a norm, and one of both of them, the norm itself and the input."""
    make = Builder(af.Box.cube(-3, 3, shape=(N, D)), tokens=N)
    norm = make.normalise(0, eps, centred)
    first = make.linear([(norm, rng.normal(size=(D, D)))], rng.normal(size=D))
    second = make.linear([(first, rng.normal(size=(D, 3)))], rng.normal(size=3))
    third = make.linear([(norm, rng.normal(size=(D, 3))), (second, np.eye(3)), (0, np.eye(D)[:, :3])], np.zeros(3))
    return make.program(third, "affine maps of a norm")


@given(seed=st.integers(0, 10**6), eps=st.sampled_from([0.0, 1e-5, 1.0]), centred=st.booleans())
def test_values_stay_inside(seed: int, eps: float, centred: bool) -> None:
    rng = np.random.default_rng(seed)
    made = program(rng, eps, centred)
    found = ranges(made, np.full((1, N, D), -1.0), np.full((1, N, D), 1.0))
    weight = made.ops[2].weights[0]  # type: ignore[attr-defined]
    x = rng.uniform(-1, 1, (64, N, D)) * 10.0 ** rng.uniform(-3, 0, (64, 1, 1))
    x[:16] = np.sign(weight[:, rng.integers(0, D, 16)].T)[:, None]
    ends = weight[:, rng.integers(0, D, 16)].T
    x[16:32] = (ends / np.abs(ends).max(-1, keepdims=True))[:, None]  # along a column: as far as a ball reaches
    for value, r in zip(every_value(made, torch.from_numpy(x)), found, strict=True):
        slack = 1e-12 * (1 + np.abs(value.numpy()))  # of this evaluation, not of the range
        assert np.all(r.low - slack <= value.numpy())
        assert np.all(value.numpy() <= r.high + slack)


def test_a_ball_is_smaller_than_its_box() -> None:
    rng = np.random.default_rng(0)
    made = program(rng, 1e-5, False)
    found = ranges(made, np.full((1, N, D), -1.0), np.full((1, N, D), 1.0))
    first, weight = found[2], made.ops[2].weights[0]  # type: ignore[attr-defined]
    half = 0.5 * (first.high - first.low)[0, 0]
    length = np.sqrt(D * (weight**2).sum(0))
    assert np.all(half <= length * (1 + 1e-12))
    assert np.all(half >= 0.999 * length), "the largest value lies along the column itself"
    assert np.all(half < 0.5 * np.sqrt(D) * np.abs(weight).sum(0))
