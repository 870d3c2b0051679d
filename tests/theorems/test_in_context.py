"""The papers' in-context constructions: errors within their bounds, and attention only."""

from __future__ import annotations

import pytest
import torch

from attnforge.errors import ArgumentError
from attnforge.incontext.dense import Channels
from attnforge.purity import purity
from attnforge.theorems.in_context import emulate_head, gradient_descent, gradient_step


@pytest.fixture
def sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    w, X, y = (torch.rand(s, generator=g).double() - 0.5 for s in ((3,), (9, 3), (9,)))
    return w, X, y


@pytest.mark.parametrize("anchors", [16, 64, 256])
@pytest.mark.parametrize("kappa", [1.0, 4.0])
def test_paper_form(sample: tuple[torch.Tensor, ...], anchors: int, kappa: float) -> None:
    w, X, y = sample
    step = gradient_step("tanh", 3, 9, "paper", anchors=anchors, kappa=kappa)
    with torch.no_grad():
        error = (step(w, X, y) - torch.tanh(X @ w - y)[:, None] * X).abs().max()
    assert error <= step.bound(1.0) * X.abs().max()
    assert purity(step, (w, X, y)).attention >= 2


def test_efficient_forms(sample: tuple[torch.Tensor, ...]) -> None:
    w, X, y = sample
    step = gradient_step("tanh", 3)
    exact = torch.tanh(X @ w - y) @ X
    with torch.no_grad():
        assert (step(w, X, y) - exact).abs().max() < 1e-10
    assert purity(step, (w, X, y)).attention >= 4
    channels = Channels(3)
    Z = channels.sequence(torch.cat((w, w))[None], torch.cat((X, X / 9, y[:, None]), -1))
    with torch.no_grad():
        moved = channels.state(gradient_step("logistic", 3)(Z))[0, :3]
    assert (moved - (w - (torch.sigmoid(X @ w) - y) @ X / 9)).abs().max() < 1e-12


@pytest.mark.parametrize("accelerated", [True, False])
def test_gradient_descent(sample: tuple[torch.Tensor, ...], accelerated: bool) -> None:
    _, X, y = sample
    top = torch.linalg.eigvalsh(X.mT @ X)
    condition = float(top[-1] / top[0])
    beta = (2 / (1 + condition**-0.5)) ** 2 if accelerated else 1.0
    descent = gradient_descent("linear", 400, accelerated, condition=1.1 * condition)
    tokens = torch.cat((X, X * (0.9 * beta / top[-1]), y[:, None]), -1)
    with torch.no_grad():
        w = descent(torch.zeros(1, 6).double(), tokens)[0, :3]
    assert (w - torch.linalg.lstsq(X, y[:, None]).solution[:, 0]).abs().max() < 1e-10


def test_a_head_from_the_prompt(sample: tuple[torch.Tensor, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    head = emulate_head(16.0)
    for width, out in ((2, 3), (4, 1)):
        X, Q, K, V = (torch.randn(s, generator=g).double() for s in ((7, 5), (width, 5), (width, 5), (out, 5)))
        exact = (X @ Q.mT @ (X @ K.mT).mT).softmax(-1) @ X @ V.mT
        with torch.no_grad():
            assert (head(X, Q, K, V) - exact).abs().max() < 1e-11
    assert purity(head, (X, Q, K, V)).attention >= 8


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="form"):
        gradient_step("tanh", 3, form="papier")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="kappa"):
        gradient_step("tanh", 3, kappa=0.5)
    with pytest.raises(ArgumentError, match="did you mean 'logistic'"):
        gradient_descent("logistik", 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="reach"):
        emulate_head(0.0)
