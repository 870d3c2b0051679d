"""The heads and the block: what each computes, that it is attention only, and that it knows nothing of the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.errors import ArgumentError
from attnforge.incontext.blocks import Block, Gather, Momentum, Ramp, Shrink, frozen
from attnforge.incontext.certificate import aggregation_error, prediction_error
from attnforge.incontext.dense import Channels, dense_of
from attnforge.incontext.extrapolation import levels, pairs
from attnforge.incontext.reads import ExpRead, LinearRead, SigmoidRead, SoftmaxRead
from attnforge.purity import purity

LOSSES = ("linear", "logistic", "softmax", "poisson", "huber")
DTYPES = (torch.float64, torch.float32)


def draw(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extrapolation_cancels_the_powers_it_should(dtype: torch.dtype) -> None:
    for table in (pairs(dtype), levels(dtype)):
        powers = [sum(c * s**k for s, c in zip(table.scales, table.weights, strict=True)) for k in (1, 3, 5)]
        assert abs(powers[0] - 1) < 1e-12
        assert max(map(abs, powers[1:])) < 1e-12
        z = np.linspace(-1, 1, 101)
        value = sum(c * np.sinh(s * z) for s, c in zip(table.scales, table.weights, strict=True))
        assert np.abs(value - z).max() <= table.truncation(1.0) + 1e-15 * table.amplification


@torch.no_grad()
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), d=st.integers(1, 8), single=st.booleans())
def test_reads_and_aggregation_stay_within_their_bounds(seed: int, n: int, d: int, single: bool) -> None:
    dtype = torch.float32 if single else torch.float64
    w, x = draw(seed, 1, d, dtype=dtype), draw(seed + 1, n, d, dtype=dtype)
    w = (w / (x @ w.mT).abs().max().clamp_min(1e-3)).to(dtype)
    exact = x.double() @ w.double().mT
    absolute = float((x.double().abs() @ w.double().abs().mT).max())
    error = float((LinearRead(dtype)(w, x).double() - exact).abs().max())
    assert error <= prediction_error(float(exact.abs().max()), d, absolute, dtype)

    r = (draw(seed + 2, n, 1).clamp(-3, 3) / 3).to(dtype)
    got, want = Gather(dtype)(r, x).double(), r.double().mT @ x.double()
    bound = aggregation_error(float(r.abs().max()), n, dtype) * math.sqrt(n) * float(x.double().norm())
    assert float((got - want).norm()) <= bound


def test_exact_reads() -> None:
    w, x = draw(0, 3, 4), draw(1, 6, 4)
    z = x @ w.mT
    assert torch.allclose(SigmoidRead(torch.float64)(w, x), torch.sigmoid(z), rtol=1e-14)
    assert torch.allclose(SoftmaxRead(torch.float64)(w, x), z.softmax(-1), rtol=1e-14)
    assert torch.allclose(ExpRead(torch.float64)(w, x), z.exp(), rtol=1e-13)


def test_gates() -> None:
    r = torch.tensor([-3.0, -0.25, 0.0, 0.2, 0.25, 7.0]).double()
    assert torch.allclose(Ramp(torch.float64, 0.25)(r), r.clamp(-0.25, 0.25), atol=1e-15)
    t = torch.full_like(r, 0.25)
    assert torch.allclose(Shrink(torch.float64)(r, t), torch.nn.functional.softshrink(r, 0.25), atol=1e-15)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["plain", "nesterov"])
def test_blocks_are_attention_only(loss: str, kind: str) -> None:
    census = purity(Block(loss, Momentum(kind, 0.0 if kind == "plain" else 0.5)))  # type: ignore[arg-type]
    assert census.attention >= 4
    if loss == "linear":
        assert purity(Block("linear", Momentum("nesterov", 0.5), shrink=True)).attention > census.attention


@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson"])
@pytest.mark.parametrize("momentum", [Momentum("plain"), Momentum("heavy ball", 0.4), Momentum("nesterov", 0.6)])
@pytest.mark.parametrize("classes", [1, 2])
def test_a_block_is_two_ordinary_attention_layers(loss: str, momentum: Momentum, classes: int) -> None:
    block = Block(loss, momentum)  # type: ignore[arg-type]
    dense, channels = dense_of(block, 3, classes), Channels(3, classes)
    state, tokens = draw(3, classes, 6, scale=0.2), draw(4, 7, 6 + classes, scale=0.3)
    Z = dense(channels.sequence(state, tokens))
    assert (channels.state(Z) - block(state, tokens)).abs().max() < 1e-12
    assert torch.equal(Z[classes:, :6], tokens[:, :6]), "data tokens stay as they are"
    assert purity(dense, channels.sequence(state, tokens)).attention >= 4


def test_weights_know_nothing_of_the_data() -> None:
    assert frozen("linear", "heavy ball", 7) is frozen("linear", "heavy ball", 7)
    one, other = Block("linear", Momentum("plain")), Block("linear", Momentum("plain"))
    for n, d in ((3, 2), (50, 9)):
        one(draw(0, 1, 2 * d, scale=0.1), draw(1, n, 2 * d + 1, scale=0.1))
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_spoiled_weight_is_noticed() -> None:
    block = Block("linear", Momentum("plain"))
    state, tokens = draw(0, 1, 6, scale=0.2), draw(1, 9, 7, scale=0.3)
    before = block(state, tokens)
    with torch.no_grad():
        block.gather.values[0, 0] *= 1.001
    assert (block(state, tokens) - before).abs().max() > 1e-6


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'linear'"):
        Block("linaer", Momentum("plain"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="soft threshold"):
        Block("linear", Momentum("heavy ball", 0.5), shrink=True)
    with pytest.raises(ArgumentError, match="beta"):
        Momentum("nesterov", 1.0)
    with pytest.raises(ArgumentError, match="float32 or float64"):
        LinearRead(torch.bfloat16)
