"""The calibrated routes: spectral, additive and ridge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attnforge import ArgumentError, Box, CertificateError, certify
from attnforge.blackbox import approximate
from attnforge.blackbox.ridge import RidgeApproximation, SampleRows, draw_rows, fit
from attnforge.blackbox.target import Target
from attnforge.census import purity
from attnforge.compiler.pipeline import compile_program
from attnforge.files import check, load
from attnforge.programs.program import Builder

SQUARE = Box.cube(-1, 1, shape=2)
PUBLISHED = Box.cube(0, 1, shape=(20, 5))  # tokens by channels


def analytic(x: Tensor) -> Tensor:
    return torch.sin(3 * x[:, 0]) * torch.exp(x[:, 1])


@pytest.mark.parametrize("f", [analytic, lambda x: 1 / (2 + x.sum(-1) / 2), lambda x: torch.cos(2 * x.prod(-1))])
def test_doubling_the_anchors_of_an_analytic_function_gains_three_digits(f: object) -> None:
    errors = [
        approximate(f, SQUARE, route="spectral", anchors=n, dtype=torch.float64).measured or 1.0  # type: ignore[arg-type]
        for n in (6, 12)
    ]
    assert errors[1] <= 1e-3 * errors[0] and errors[1] < 2e-6


def test_a_spectral_fit_is_calibrated_on_points_it_has_not_seen() -> None:
    net = approximate(analytic, SQUARE, route="spectral", eps=1e-5)
    assert net.certificate.kind == "calibrated" and net.bound is None and (net.measured or 1) <= 1e-5
    x = SQUARE.sample(4000, seed=123, dtype=torch.float32)
    assert float((net(x).detach().double() - analytic(x.double())).abs().max()) <= 3e-5
    assert purity(net).attention == 2
    three = approximate(lambda x, y, z: np.exp(-x * y) * np.cos(z), Box(x=(0, 1), y=(0, 1), z=(0, 1)), eps=1e-5)
    assert three.route == "spectral" and three(three.box.sample(7, dtype=torch.float32)).shape == (7,)


def test_an_additive_function_of_many_variables() -> None:
    weight = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)
    f = lambda x: (weight * torch.sin(2 * x) + x**2).sum((1, 2))  # noqa: E731
    net = approximate(f, Box.cube(-1, 2, shape=(4, 3)), eps=1e-4)
    assert net.route == "additive" and net.size.heads == 12 and "too many variables" in net.reason
    x = net.box.sample(2000, seed=5, dtype=torch.float32)
    assert float((net(x).detach().double() - f(x.double())).abs().max()) <= 1.5e-4


def test_what_is_not_additive_is_not_called_so() -> None:
    net = approximate(lambda x: x.prod(-1), SQUARE, route="additive", anchors=12)
    assert 0.5 < (net.measured or 0) < 1.5


def relu_network(seed: int, tokenwise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    inputs, outputs = (5, 5) if tokenwise else (100, 1)
    sizes = ((inputs, 10), (10,), (10, outputs))
    first, bias, second = (torch.randn(*size, generator=g, dtype=torch.float64) for size in sizes)
    return first, bias, second


@pytest.mark.parametrize("tokenwise", [False, True])
def test_the_published_network_from_its_weights(tokenwise: bool) -> None:
    first, bias, second = relu_network(3, tokenwise)
    build = Builder(PUBLISHED, 20 if tokenwise else 1)
    hidden = build.apply(build.linear([(build.input, first.numpy())], bias.numpy()), "relu")
    out = build.linear([(hidden, second.numpy())], np.zeros(second.shape[1]))
    net = compile_program(build.program(out, "a random ReLU network"), 1e-5, torch.float64)
    x = PUBLISHED.sample(500, seed=1)
    rows = x if tokenwise else x.reshape(500, -1)
    wanted = (torch.relu(rows @ first + bias) @ second).reshape(net(x).shape)
    assert float((net(x).detach() - wanted).abs().max()) <= (net.bound or 1) <= 1e-5


def test_the_published_network_from_samples_alone() -> None:
    first, bias, second = relu_network(1)
    f = lambda x: torch.relu(x.reshape(len(x), -1) @ first + bias) @ second[:, 0]  # noqa: E731
    net = approximate(f, PUBLISHED, route="ridge", width=32, samples=50_000)
    assert isinstance(net, RidgeApproximation)
    x = PUBLISHED.sample(4000, seed=321, dtype=torch.float32)
    wanted = f(x.double())
    error = net(x).detach().double() - wanted
    assert float(error.norm() / wanted.norm()) <= 1e-2 and net.relative_error <= 1e-2
    # two words: calibrated against the black box, certified against what was fitted to it
    assert net.certificate.kind == "calibrated" and net.bound is None
    assert net.expansion.kind == "certified" and (net.expansion.bound or 1) < 0.05
    assert "ReLU expansion of 32 ridges" in net.expansion.target


def test_rows_that_are_treated_alike_are_recognised() -> None:
    first, bias, second = relu_network(4, tokenwise=True)
    f = lambda x: torch.relu(x @ first + bias) @ second  # noqa: E731
    rows = draw_rows(Target(f, PUBLISHED), 300, 0)
    assert rows.tokens == 20 and rows.x.shape == (6000, 5) and rows.y.shape == (6000, 5)
    assert draw_rows(Target(lambda x: x.flip(1), PUBLISHED), 10, 0).tokens == 1
    assert draw_rows(Target(lambda x: x + x.mean(1, keepdim=True), PUBLISHED), 10, 0).tokens == 1
    assert draw_rows(Target(lambda x: x.sum((1, 2)), PUBLISHED), 10, 0).tokens == 1


def test_a_fit_follows_kinks_and_is_built_as_fitted(tmp_path: Path) -> None:
    box = Box.cube(-1, 1, shape=3)
    f = lambda x: torch.relu(x[:, 0] - 0.3 * x[:, 1] + 0.1) - 2 * torch.relu(x[:, 2])  # noqa: E731
    net = approximate(f, box, route="ridge", width=8, samples=15_000)
    assert isinstance(net, RidgeApproximation) and net.relative_error < 0.02
    path = tmp_path / "ridge.safetensors"
    net.save(path)
    again = load(path)
    assert isinstance(again, RidgeApproximation) and torch.equal(again(*net.example_input()), net(*net.example_input()))
    assert check(path).measured == net.measured and again.expansion.bound == net.expansion.bound
    assert purity(net).attention >= 2


def test_a_sum_of_ridges_is_recovered() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4000, 2))
    y = np.maximum(x[:, :1], 0) + 0.5 * x[:, 1:] - 1
    found = fit(SampleRows(x, y, 1), 4, steps=800)
    fresh = rng.uniform(-1, 1, (500, 2))
    assert np.abs(found(fresh) - (np.maximum(fresh[:, :1], 0) + 0.5 * fresh[:, 1:] - 1)).max() < 0.05
    with pytest.raises(ArgumentError, match="width"):
        fit(SampleRows(x, y, 1), 0)


@pytest.mark.parametrize("route", ["spectral", "additive"])
def test_files_and_changed_weights(route: str, tmp_path: Path) -> None:
    net = approximate(lambda x: torch.sin(x).sum(-1), SQUARE, route=route, anchors=8)  # type: ignore[arg-type]
    path = tmp_path / "net.safetensors"
    net.save(path)
    assert torch.equal(load(path)(*net.example_input()), net(*net.example_input()))
    assert check(path).measured == net.measured and load(path).route == route  # type: ignore[attr-defined]
    before = net.measured or 0.0
    with torch.no_grad():
        net.group.M_V += 0.25  # type: ignore[attr-defined]
    with pytest.raises(CertificateError, match="stale"):
        _ = net.measured
    assert (certify(net).measured or 0) > before + 0.2, "measured anew on the held-out sample"
