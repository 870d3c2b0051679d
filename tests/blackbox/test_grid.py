"""Grids: the certificate holds at every point that can be found, says what it assumes, and notices what was changed."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge import ArgumentError, Box, CertificateError, PrecisionError, certify
from attnforge.blackbox import approximate
from attnforge.blackbox.grid import BoxGrid, GridApproximation
from attnforge.census import purity
from attnforge.files import check, load

Points = np.ndarray


def cones(dim: int, slope: float, seed: int, low: Points, high: Points) -> Callable[[Points], Points]:
    """The lower envelope of a few cones: Lipschitz with that constant exactly, with kinks all over."""
    rng = np.random.default_rng(seed)
    tips, height = low + rng.random((7, dim)) * (high - low), rng.normal(size=7)
    return lambda x: (slope * np.linalg.norm(np.asarray(x)[:, None] - tips, axis=-1) + height).min(-1)


def worst(net: GridApproximation, f: Callable[[Points], Points], seed: int = 0) -> float:
    """The largest error found: everywhere, half way between grid points, and around the worst of these."""
    rng = np.random.default_rng(seed)
    box = net.box.outward(net.dtype)
    low, high = box.lower.reshape(-1).numpy(), box.upper.reshape(-1).numpy()
    between = net.grid.points(0, min(net.grid.count, 400)) + 0.5 * net.grid.step
    x = np.concatenate(
        [low + rng.random((400, net.box.dim)) * (high - low), between, box.corners(64).reshape(-1, box.dim)]
    )
    found = 0.0
    with torch.no_grad():
        for scale in (1.0, 0.3, 0.1, 0.01):
            x = np.clip(x, low, high)
            inside = torch.from_numpy(x).to(net.dtype)
            inside = torch.minimum(
                torch.maximum(inside, box.lower.reshape(-1).to(net.dtype)), box.upper.reshape(-1).to(net.dtype)
            )
            out = net.core(inside.reshape(-1, *net.box.shape)).double().numpy()
            error = np.abs(out - f(inside.double().numpy()))
            found = max(found, float(error.max()))
            best = inside.double().numpy()[np.argsort(error)[-20:]]
            x = (best[:, None] + scale * net.grid.step * rng.normal(size=(20, 20, net.box.dim))).reshape(
                -1, net.box.dim
            )
    return found


@settings(max_examples=25, deadline=None)
@given(
    dim=st.integers(1, 3),
    slope=st.floats(0.1, 20),
    seed=st.integers(0, 99),
    kappa=st.floats(0.56, 30),
    points=st.integers(2, 9),
    shift=st.sampled_from([0.0, 0.3, -7.1, 100.0]),
    double=st.booleans(),
)
def test_no_point_is_worse_than_the_bound(
    dim: int, slope: float, seed: int, kappa: float, points: int, shift: float, double: bool
) -> None:
    rng = np.random.default_rng(seed)
    low = shift + rng.normal(size=dim)
    high = low + rng.uniform(0.2, 3, size=dim)
    box = Box.between(low, high)
    f = cones(dim, slope, seed, low, high)
    dtype = torch.float64 if double else torch.float32
    net = approximate(f, box, route="grid", anchors=points, kappa=kappa, lipschitz=slope * 1.0000001, dtype=dtype)
    assert isinstance(net, GridApproximation) and net.certificate.kind == "certified"
    assert net.bound is not None and worst(net, f, seed) <= net.bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [100, 1500, 6000])
def test_rounding_is_in_the_bound_where_it_dominates(count: int, dtype: torch.dtype) -> None:
    f = lambda x: np.abs(np.asarray(x)[:, 0])  # noqa: E731
    net = approximate(f, Box.cube(-25, 25, shape=1), route="grid", anchors=count, lipschitz=1.0, kappa=2.0, dtype=dtype)
    assert isinstance(net, GridApproximation) and net.bound is not None
    assert worst(net, f) <= net.bound
    if dtype == torch.float32 and count == 6000:  # half a cell is no bound any more
        assert net.bound > 4 * 0.5 * 50 / 5999


def test_a_constant_costs_rounding_only() -> None:
    net = approximate(
        lambda x: 0 * x[:, 0] + math.pi, Box.cube(-1, 1, shape=2), route="grid", anchors=20, lipschitz=0.0
    )
    assert net.bound is not None and net.measured is not None
    assert 0 < net.measured <= net.bound < 3e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eps_is_kept_and_lemma_e3_is_not_wasted(dtype: torch.dtype) -> None:
    f = lambda x: np.linalg.norm(np.asarray(x), axis=-1)  # noqa: E731
    net = approximate(f, Box.cube(-1, 1, shape=2), eps=0.05, lipschitz=1.0, dtype=dtype)
    assert net.route == "grid" and isinstance(net, GridApproximation)
    assert 0.045 < (net.bound or 0) <= 0.05 and worst(net, f) <= (net.bound or 0)
    assert net.size.anchors <= 31**2, "spacing 0.05 / sqrt(2 (1/4 + small)) needs about 29 points a side"


def test_the_error_falls_like_the_spacing() -> None:
    sizes = [5, 7, 10, 14, 20, 28, 40]
    f = cones(2, 3.0, 1, -np.ones(2), np.ones(2))
    nets = [
        approximate(f, Box.cube(-1, 1, shape=2), route="grid", anchors=n, lipschitz=3.001, dtype=torch.float64)
        for n in sizes
    ]
    steps = np.log([2 / (n - 1) for n in sizes])
    errors = [worst(net, f) for net in nets if isinstance(net, GridApproximation)]
    assert abs(np.polyfit(steps, np.log(errors), 1)[0] - 1) < 0.1
    assert abs(np.polyfit(steps, np.log([net.bound or 0 for net in nets]), 1)[0] - 1) < 0.01


def test_a_map_between_sequences_with_sharp_transitions() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:  # every output token depends on all input tokens
        mixed = torch.softmax(3 * x @ x.transpose(1, 2), -1) @ x
        return mixed + torch.clamp(8 * (x - 0.9), 0, 1).sum((1, 2), keepdim=True)

    net = approximate(f, Box.cube(0, 1, shape=(2, 2)), route="grid", anchors=8, lipschitz=24.0)
    x = net.box.sample(3000, seed=9, dtype=net.dtype)
    error = (net(x).detach().double() - f(x.double())).abs()
    assert net(x).shape == (3000, 2, 2) and float(error.max()) <= (net.bound or 0)
    assert float(error.pow(2).mean().sqrt()) < 0.2 * float(error.max()), "transitions are near the boundary only"


def test_a_side_of_length_zero() -> None:
    f = lambda x: np.asarray(x)[:, 0] * np.asarray(x)[:, 1]  # noqa: E731
    net = approximate(
        f, Box.between(np.array([-1.0, 2.0]), np.array([1.0, 2.0])), route="grid", anchors=9, lipschitz=2.0
    )
    assert isinstance(net, GridApproximation) and worst(net, f) <= (net.bound or 0) and net.size.anchors == 9


def test_a_file_is_checked_from_stored_values(tmp_path: Path) -> None:
    net = approximate(lambda x: torch.sin(x).sum(-1), Box.cube(-1, 1, shape=2), eps=0.2, lipschitz=2.0)
    path = tmp_path / "grid.safetensors"
    net.save(path)
    again = load(path)
    x = net.box.sample(50, dtype=net.dtype)
    assert torch.equal(again(x), net(x)) and check(path).bound == net.bound
    assert isinstance(again, GridApproximation) and (again.route, again.reason) == ("grid", net.reason)
    assert "declared" in check(path).assumptions[0]


def test_changed_values_change_the_bound_and_changed_queries_are_refused() -> None:
    net = approximate(lambda x: torch.sin(x).sum(-1), Box.cube(-1, 1, shape=2), eps=0.2, lipschitz=2.0)
    before = net.bound or 0.0
    with torch.no_grad():
        net.group.M_V[0, 0] += 0.5  # type: ignore[attr-defined]
    with pytest.raises(CertificateError, match="stale"):
        _ = net.certificate
    assert before + 0.5 <= (certify(net).bound or 0) < before + 0.501
    with torch.no_grad():
        net.group.M_K[0, 0, 0] += 1.0  # type: ignore[attr-defined]
    assert (certify(net).bound or 0) > before + 0.55
    with torch.no_grad():
        net.group.W_Q[0, 0, 0] = 1.5  # type: ignore[attr-defined]
    with pytest.raises(CertificateError, match="W_Q"):
        certify(net)


def test_converted_to_another_dtype() -> None:
    net = approximate(lambda x: x[:, 0].abs(), Box.cube(-1, 1, shape=1), eps=0.1, lipschitz=1.0, dtype=torch.float64)
    before = net.bound or 0.0
    assert certify(net.to(torch.float32)).dtype == "float32" and (net.bound or 0) > before


CASTS = [(torch.float32,), (torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float16,) * 2]


@pytest.mark.parametrize("casts", [*CASTS, (torch.bfloat16, torch.float32, torch.float64)], ids=str)
@pytest.mark.parametrize("start", [torch.float32, torch.float64])
def test_the_bound_holds_whatever_was_done_to_the_dtype(start: torch.dtype, casts: tuple[torch.dtype, ...]) -> None:
    level = 1234.56789012345  # a constant: all there is to certify is rounding
    box = Box.cube(-1, 1, shape=2)
    net = approximate(lambda x: 0 * x[:, 0] + level, box, route="grid", anchors=3, lipschitz=0.0, dtype=start)
    before = net.points.clone(), net.wanted.clone()
    for dtype in casts:
        net.to(dtype)
    assert torch.equal(net.points, before[0]) and torch.equal(net.wanted, before[1]), "no part of the network"
    if casts[-1] == torch.float16:
        with pytest.raises(CertificateError, match="float32 and float64"):
            certify(net)
        return
    bound = certify(net).bound
    x = box.sample(500, dtype=net.dtype)
    assert bound is not None and float((net(x).detach().double() - level).abs().max()) <= bound
    assert start == torch.float32 or bound > 1e-6, "float32, which is on the way, cannot hold the constant"


def test_memories_of_another_black_box_are_refused(tmp_path: Path) -> None:
    box = Box.cube(-1, 1, shape=1)
    one, other = (approximate(lambda x, a=a: a * x[:, 0], box, eps=0.2, lipschitz=2.0) for a in (1.0, 2.0))
    copied = copy.deepcopy(one)
    assert certify(copied).bound == one.bound
    sizes = [tuple(t.shape) for t in one.state_dict().values()]
    if sizes == [tuple(t.shape) for t in other.state_dict().values()]:
        one.load_state_dict(other.state_dict())
    else:
        one.load_state_dict({name: 2 * t if name == "reference" else t for name, t in one.state_dict().items()})
    with pytest.raises(CertificateError, match=r"remembers of .* was changed"):
        certify(one)
    path = tmp_path / "grid.safetensors"
    copied.save(path)
    assert check(path).bound == copied.bound
    with torch.no_grad():
        copied.wanted += 1e-9
    with pytest.raises(CertificateError, match=r"remembers of .* was changed"):
        certify(copied)


def test_descriptions_of_older_files_are_read() -> None:
    about = approximate(lambda x: x[:, 0], Box.cube(-1, 1, shape=1), eps=0.2, lipschitz=1.0).about
    old = {key: value for key, value in about.to_json().items() if key != "evidence"}
    assert dataclasses.replace(about, evidence="") == type(about).from_json(old) and about.evidence


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x[:, 0] > 0.1234).double(),
        lambda x: torch.where(x.sum(-1) > 0.5, 0.01, 0.0).double(),
        lambda x: torch.sign(x[:, 1] - 0.77) * 0.2,
        lambda x: 3.2 * x[:, 0],
    ],
)
def test_a_constant_that_samples_contradict_is_refused(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(ArgumentError, match="contradicted by samples"):
        approximate(f, Box.cube(-1, 1, shape=2), eps=0.5, lipschitz=3.0)


def test_a_false_constant_in_a_file_is_noticed_by_the_held_out_sample() -> None:
    net = approximate(lambda x: torch.sin(9 * x[:, 0]), Box.cube(-1, 1, shape=1), eps=0.2, lipschitz=9.0)
    assert isinstance(net, GridApproximation)
    net.lipschitz = 1.0
    with pytest.raises(CertificateError, match="held-out sample contradicts"):
        certify(net)


def test_a_constant_that_is_just_right_is_accepted() -> None:
    net = approximate(lambda x: 3.0 * x[:, 0] + 1e6, Box.cube(-1, 1, shape=2), eps=0.5, lipschitz=3.0)
    assert net.certificate.kind == "certified"


def test_without_a_constant_there_is_no_certificate() -> None:
    net = approximate(lambda x: (x[:, 0] > 0.1).double(), Box.cube(-1, 1, shape=1), route="grid", anchors=50)
    assert net.certificate.kind == "calibrated" and net.bound is None and (net.measured or 0) > 0.1
    net = approximate(lambda x: x[:, 0].abs(), Box.cube(-1, 1, shape=1), route="grid", eps=0.02)
    assert net.certificate.kind == "calibrated" and 0 < (net.measured or 0) <= 0.02


def test_a_grid_over_the_budget_is_refused_with_its_size_and_other_routes() -> None:
    f = lambda x: x.sum((1, 2))  # noqa: E731
    with pytest.raises(PrecisionError, match=r"this grid has .* points .* needs .*routes that fit: additive, ridge"):
        approximate(f, Box.cube(0, 1, shape=(20, 5)), eps=0.1, lipschitz=10.0, route="grid")
    with pytest.raises(PrecisionError, match=r"memory=10 KB; routes that fit: spectral \(up to \d+ anchors"):
        approximate(lambda x: x.sum(-1), Box.cube(0, 1, shape=2), eps=0.01, lipschitz=1.5, route="grid", memory=10_000)


def test_precision_that_float32_does_not_have() -> None:
    f, box = lambda x: x.sum(-1), Box.cube(0, 1, shape=1)
    with pytest.raises(PrecisionError, match="float64") as caught:
        approximate(f, box, eps=1e-5, lipschitz=1.0, route="grid")
    reachable = caught.value.reachable
    assert reachable is not None and reachable < 1e-3
    assert (approximate(f, box, eps=reachable, lipschitz=1.0, route="grid").bound or 1) <= reachable


def test_only_attention_and_affine_maps() -> None:
    net = approximate(lambda x: x.sum((1, 2)), Box.cube(0, 1, shape=(1, 2)), eps=0.5, lipschitz=1.5)
    assert purity(net).attention == 2  # the softmax and its product with the values


def test_the_number_of_heavy_weights_is_an_upper_bound() -> None:
    grid = BoxGrid((0.0, 0.0), (1.0, 1.0), (12, 9), 0.7)
    beta = grid.kappa / grid.step**2
    x = np.random.default_rng(0).random((300, 2))
    away = x[:, None] - grid.points(0, grid.count)
    weight = np.exp(-np.sum(beta * away**2, -1))
    weight /= weight.sum(-1, keepdims=True)
    for share in (1e-2, 1e-5, 1e-9):
        assert (weight > share).sum(-1).max() <= grid.heavy(math.log(share)) <= grid.count


@pytest.mark.parametrize("bad", [{"cells": (0,)}, {"kappa": 0.3}, {"cells": (3, 3)}, {"low": (2.0,)}])
def test_grids_are_valid_by_construction(bad: dict[str, object]) -> None:
    good: dict[str, object] = {"low": (0.0,), "high": (1.0,), "cells": (3,), "kappa": 2.0}
    with pytest.raises(ArgumentError):
        BoxGrid(**{**good, **bad})  # type: ignore[arg-type]
