"""Sizes for classes (E6): compositions against what the compiler builds, ridges against draws, the curse in bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge.errors import ArgumentError
from attnforge.theorems.classes import CompositionNode, Ridges, bits_floor, composition, ridge_layer
from attnforge.theorems.spectral import Strip

WAVE = Strip(math.exp(2.0), 2.0)  # sin and cos


def test_compiled_compositions_are_no_larger() -> None:
    for eps in (1e-3, 1e-6):
        net = af.compile("sin(x + sin(y)/2)*cos(y)", af.Box(x=(-1, 1), y=(-1, 1)), eps=eps, dtype=torch.float64)
        nodes = [
            CompositionNode(0.5, 2.0, WAVE),
            CompositionNode(1.0, 3.0, WAVE, level=2),
            CompositionNode(1.0, 2.0, WAVE),
            CompositionNode(1.0, 1.0, level=3),
        ]
        stated = composition(nodes, eps)
        assert net.size.heads <= stated.heads == 5 and net.size.anchors <= stated.anchors
        assert net.size.layers <= stated.layers == 3


def test_compositions_grow_with_the_logarithm_and_linearly() -> None:
    nodes = [CompositionNode(1.0, 4.0, WAVE), CompositionNode(3.0, 2.0)]
    sizes = [composition(nodes, 10.0**-k).parameters for k in (3, 6, 9, 12)]
    assert (np.diff(sizes) > 0).all() and np.diff(sizes).max() < 1.6 * np.diff(sizes).min()
    once, ten = composition(nodes, 1e-6), composition(10 * nodes, 1e-6)
    assert ten.heads == 10 * once.heads and ten.parameters < 12 * once.parameters
    steep = composition([CompositionNode(1e6, 4.0, WAVE), CompositionNode(3e6, 2.0)], 1e-6)
    assert steep.parameters < 2.5 * once.parameters, "sensitivity enters by its logarithm"


@pytest.mark.parametrize("dim", [1, 3, 8])
def test_draws_of_ridges_reach_what_is_stated(dim: int) -> None:
    rng = np.random.default_rng(dim)
    W, phase = rng.normal(size=(1500, dim)), rng.uniform(0, 6.28, 1500)
    sign = rng.choice([-1.0, 1.0], 1500)
    kind = Ridges(dim, 1.0, float(np.abs(W).sum(1).mean()))
    count = kind.count(0.6)
    x = rng.uniform(-1, 1, size=(1000, dim))
    every, hits = np.cos(x @ W.T + phase), 0
    for _ in range(5):  # most draws are good, though the lemma only says that one is
        draw = np.bincount(rng.integers(0, 1500, count), minlength=1500) / count - 1 / 1500
        hits += np.abs(every @ (draw * sign)).max() <= 0.6
    assert hits >= 3
    assert kind.count(kind.error(count)) <= count and kind.error(count) == pytest.approx(0.6, rel=1e-2)


def test_one_layer_computes_the_sum() -> None:
    rng = np.random.default_rng(0)
    W, phase, amount = rng.normal(size=(50, 3)), rng.uniform(0, 6, 50), rng.normal(size=50)
    reach = float(np.abs(W).sum(1).max() + 6)
    head = af.AnchorHead.fit("cos", -reach, reach, anchors=48, dtype=torch.float64)
    layer = ridge_layer(W, phase, amount, head.weights_in_float64(), torch.float64)
    x = rng.uniform(-1, 1, size=(500, 3))
    error = np.abs(layer(torch.from_numpy(x)).detach().numpy()[:, 0] - np.cos(x @ W.T + phase) @ amount).max()
    assert error <= (head.bound + 1e-13) * np.abs(amount).sum()


def test_bumps_are_lipschitz_and_far_apart() -> None:
    """The functions of the proof of (c), in the plane: as many as stated, and no two within 2 eps of each other."""
    lipschitz, side, eps = 2.0, 3.0, 0.6
    k = round(math.sqrt(bits_floor(lipschitz, side, 2, eps)))
    h = lipschitz * side / (2 * k)
    assert h > eps, "so many bumps higher than eps fit"
    centres = (np.arange(k) + 0.5) * side / k
    places = np.stack(np.meshgrid(centres, centres), -1).reshape(-1, 2)
    rng = np.random.default_rng(0)
    bumps = lambda x, s: (s * np.maximum(0, h - lipschitz * np.abs(x[:, None] - places).max(-1))).sum(1)  # noqa: E731
    one, two = rng.choice([-1.0, 1.0], (2, k * k))
    two[0] = -one[0]
    assert abs(bumps(places, one) - bumps(places, two)).max() > 2 * eps
    x, near = rng.uniform(0, side, size=(2, 4000, 2))
    near = x + 0.01 * (near - x)
    assert (np.abs(bumps(x, one) - bumps(near, one)) <= lipschitz * np.abs(x - near).max(-1) * (1 + 1e-9)).all()


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ArgumentError, match="sensitivity must"):
        composition([CompositionNode(0.0, 1.0)], 1e-3)
    with pytest.raises(ArgumentError, match="dim must"):
        Ridges(0, 1.0, 1.0)
    with pytest.raises(ArgumentError, match="eps must"):
        bits_floor(1.0, 1.0, 2, -1.0)
    assert bits_floor(1.0, 1.0, 3, 10.0) == 0.0
    assert 1e308 < bits_floor(1.0, 2.0, 1000, 1e-6) < math.inf, "a number, and a lower bound still"
    assert bits_floor(1.0, 2.0, 17, 0.1) <= 9**17 < 1.0001 * bits_floor(1.0, 2.0, 17, 0.1)
    with pytest.raises(ArgumentError, match="no product of numbers up to"):
        composition([CompositionNode(1.0, 1e200)], 1e-3)
