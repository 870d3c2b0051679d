"""The papers' in-context constructions: errors within their bounds, and attention only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.census import purity
from attnforge.errors import ArgumentError
from attnforge.theorems.in_context import emulate_head, gradient_descent, gradient_step


@pytest.fixture
def sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    w, X, y = (torch.rand(s, generator=g).double() - 0.5 for s in ((3,), (9, 3), (9,)))
    return w, X, y


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), anchors=st.sampled_from([2, 3, 16, 64, 256, 2048]), kappa=st.floats(1.0, 40.0),
    d=st.integers(1, 12), single=st.booleans(), name=st.sampled_from(["tanh", "sin", "sigmoid"]),
)  # fmt: skip
def test_the_paper_form_stays_within_its_bound(
    seed: int, anchors: int, kappa: float, d: int, single: bool, name: str
) -> None:
    dtype = torch.float32 if single else torch.float64
    g = torch.Generator().manual_seed(seed)
    w, X, y = ((4 * torch.rand(s, generator=g, dtype=torch.float64) - 2).to(dtype) for s in ((d,), (9, d), (9,)))
    t = X.double() @ w.double() - y.double()
    lo, hi = float(t.min()) - 1e-9, float(t.max()) + 1e-9
    step = gradient_step(name, d, 9, "paper", interval=(lo, hi), anchors=anchors, kappa=kappa, dtype=dtype)
    absolute = float((X.double().abs() @ w.double().abs() + y.double().abs()).max())
    exact = {"tanh": torch.tanh, "sin": torch.sin, "sigmoid": torch.sigmoid}[name](t)
    with torch.no_grad():
        error = (step(w, X, y).double() - exact[:, None] * X.double()).abs().amax(-1) / X.double().abs().amax(-1)
    assert float(error.max()) <= step.bound(1.0, absolute, d)


def test_the_paper_form_is_attention_and_its_bound_is_not_idle(sample: tuple[torch.Tensor, ...]) -> None:
    w, X, y = sample
    step = gradient_step("tanh", 3, 9, "paper", anchors=512, kappa=8.0)
    assert step.bound(1.0, 2.0, 3) < 0.01 and purity(step, (w, X, y)).attention >= 2
    coarse = gradient_step("tanh", 3, 9, "paper", anchors=4096, dtype=torch.float32)
    assert coarse.bound(1.0, 2.0, 3) > gradient_step("tanh", 3, 9, "paper", anchors=4096).bound(1.0, 2.0, 3) + 0.1
    fine = gradient_step("tanh", 3, 9, "paper", anchors=8, interval=(-1.0, 1.0))
    with torch.no_grad():
        fine.values += 1.0
        broken = (fine(w, X, y) - torch.tanh(X @ w - y)[:, None] * X).abs().max()
    assert broken > fine.bound(1.0, 2.0, 3) * float(X.abs().max()), "a spoiled value breaks the law"


def test_efficient_forms(sample: tuple[torch.Tensor, ...]) -> None:
    w, X, y = sample
    for name, value in (("tanh", torch.tanh(X @ w - y)), ("logistic", torch.sigmoid(X @ w) - y)):
        step = gradient_step(name, 3)
        at = step.channels
        Z = at.sequence(at.state(w[None]), at.data(X, X / 9, y[:, None]))
        with torch.no_grad():
            moved = step.weights_of(step(Z))[0]
        assert (moved - (w - value @ X / 9)).abs().max() < (1e-10 if name == "tanh" else 1e-12)
    assert purity(step, Z).attention >= 4


@pytest.mark.parametrize("accelerated", [True, False])
def test_gradient_descent(sample: tuple[torch.Tensor, ...], accelerated: bool) -> None:
    _, X, y = sample
    top = torch.linalg.eigvalsh(X.mT @ X / 9)
    condition = float(top[-1] / top[0])
    beta = (2 / (1 + condition**-0.5)) ** 2 if accelerated else 1.0
    descent = gradient_descent("linear", 400, accelerated, condition=1.1 * condition)
    Z = descent.sequence(torch.zeros(3).double(), X, y, float(0.9 * beta / top[-1]))
    with torch.no_grad():
        w = descent.weights_of(descent(Z))
    assert (w - torch.linalg.lstsq(X, y[:, None]).solution[:, 0]).abs().max() < 1e-10
    with pytest.raises(ArgumentError, match="columns"):
        descent.sequence(torch.zeros(2).double(), X[:, :2], y, 0.1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 12), d=st.integers(1, 9), width=st.integers(1, 6),
    size=st.floats(0.05, 3.0), slack=st.floats(1.0, 4.0), single=st.booleans(),
)  # fmt: skip
def test_a_head_from_the_prompt_stays_within_its_bound(
    seed: int, n: int, d: int, width: int, size: float, slack: float, single: bool
) -> None:
    dtype, g = torch.float32 if single else torch.float64, torch.Generator().manual_seed(seed)
    shapes = ((n, d), (width, d), (width, d), (2, d))
    X, Q, K, V = ((size * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype) for s in shapes)
    reach = max(float((X.double() @ W.double().mT).abs().max()) for W in (Q, K, V)) * slack * 1.001
    head = emulate_head(reach, dtype)
    x, q, k, v = (t.double() for t in (X, Q, K, V))
    exact = (x @ q.mT @ (x @ k.mT).mT).softmax(-1) @ x @ v.mT
    with torch.no_grad():
        assert float((head(X, Q, K, V).double() - exact).abs().max()) <= head.bound(X, Q, K, V)


def test_a_head_from_the_prompt() -> None:
    g = torch.Generator().manual_seed(1)
    head = emulate_head(16.0)
    for width, out in ((2, 3), (4, 1)):
        X, Q, K, V = (torch.randn(s, generator=g).double() for s in ((7, 5), (width, 5), (width, 5), (out, 5)))
        exact = (X @ Q.mT @ (X @ K.mT).mT).softmax(-1) @ X @ V.mT
        with torch.no_grad():
            error = (head(X, Q, K, V) - exact).abs().max()
        assert error < 1e-11 and error <= head.bound(X, Q, K, V) < 1e-7
    assert purity(head, (X, Q, K, V)).attention >= 8
    with pytest.raises(ArgumentError, match="reach"):
        emulate_head(0.1).bound(X, Q, K, V)
    with torch.no_grad():
        head.read.values[0] *= 1.01
        assert (head(X, Q, K, V) - exact).abs().max() > head.bound(X, Q, K, V), "a spoiled weight breaks the law"


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="form"):
        gradient_step("tanh", 3, form="papier")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="kappa"):
        gradient_step("tanh", 3, kappa=0.5)
    with pytest.raises(ArgumentError, match="did you mean 'logistic'"):
        gradient_descent("logistik", 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="reach"):
        emulate_head(0.0)
