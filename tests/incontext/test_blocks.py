"""The block: what its heads compute, that it is ordinary attention layers, and that it knows nothing of the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.census import purity
from attnforge.errors import ArgumentError
from attnforge.heads.anchor.head import AnchorHead
from attnforge.incontext.blocks import Block, Lean, LinearRead, Momentum, frozen
from attnforge.incontext.extrapolation import aggregation_error, evens, levels, pairs, prediction_error
from attnforge.incontext.losses import EDGE
from attnforge.incontext.problem import enclosure
from attnforge.incontext.prompt import curvature_bound
from attnforge.network import AttentionLayer, AttentionOnly, Heads

LOSSES = ("linear", "logistic", "softmax", "poisson", "huber", "anchors")
DTYPES = (torch.float64, torch.float32)
MOMENTA = (Momentum("plain"), Momentum("heavy ball", 0.4), Momentum("nesterov", 0.6))


def draw(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def build(loss: str, momentum: Momentum, shrink: bool = False, dtype: torch.dtype = torch.float64) -> Block:
    head = AnchorHead.fit("tanh", -2, 2, anchors=24, dtype=dtype) if loss == "anchors" else None
    classes = 3 if loss == "softmax" else 1
    block = Block(loss, 3, momentum, classes=classes, shrink=shrink, derivative=head, dtype=dtype)  # type: ignore[arg-type]
    return block.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extrapolation_cancels_the_powers_it_should(dtype: torch.dtype) -> None:
    for table in (pairs(dtype), levels(dtype)):
        powers = [sum(c * s**k for s, c in zip(table.scales, table.weights, strict=True)) for k in (1, 3, 5)]
        assert abs(powers[0] - 1) < 1e-12
        assert max(map(abs, powers[1:])) < 1e-12
        z = np.linspace(-1, 1, 101)
        value = sum(c * np.sinh(s * z) for s, c in zip(table.scales, table.weights, strict=True))
        assert np.abs(value - z).max() <= table.truncation(1.0) + 1e-15 * table.amplification
    even = evens(dtype)
    z = np.linspace(-EDGE, EDGE, 101)
    value = sum(c * (np.cosh(s * z) - 1) for s, c in zip(even.scales, even.weights, strict=True))
    power = 2 * len(even.scales) + 2  # the same interpolation at s^2 = 0, of 2 (cosh(s z) - 1)/s^2
    left = 2.02 * math.prod(s * s for s in even.scales) * EDGE**power * math.cosh(max(even.scales) * EDGE)
    assert np.abs(value - z * z).max() <= left / math.factorial(power) + 1e-15 * even.amplification


def aggregated(r: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """sum_i r_i x_i by the aggregation heads of a linear block: labels -r, state 0."""
    block = frozen("linear", "plain", 0, x.shape[-1], dtype=x.dtype)
    at = block.channels
    return block.weights_of(Lean(block)(at.state(x.new_zeros(1, at.d)), at.data(x, -x, -r)))


@torch.no_grad()
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), d=st.integers(1, 8), single=st.booleans())
def test_reads_and_aggregation_stay_within_their_bounds(seed: int, n: int, d: int, single: bool) -> None:
    dtype = torch.float32 if single else torch.float64
    w, x = draw(seed, 1, d, dtype=dtype), draw(seed + 1, n, d, dtype=dtype)
    w = (w / (x @ w.mT).abs().max().clamp_min(1e-3)).to(dtype)
    exact = x.double() @ w.double().mT
    absolute = float((x.double().abs() @ w.double().abs().mT).max())
    bound = prediction_error(float(exact.abs().max()), d, absolute, dtype)
    block = frozen("linear", "plain", 0, d, dtype=dtype)
    at = block.channels
    tokens = at.data(x, torch.zeros_like(x), x.new_zeros(n, 1))
    for read in (LinearRead(dtype)(w, x), Lean(block).predict(at.state(w), tokens)):
        assert float((read.double() - exact).abs().max()) <= bound
    r = (draw(seed + 2, n, 1).clamp(-3, 3) / 3).to(dtype)
    got, want = aggregated(r, x).double(), r.double().mT @ x.double()
    bound = aggregation_error(float(r.abs().max()), n, dtype) * math.sqrt(n) * float(x.double().norm())
    assert float((got - want).norm()) <= bound


def test_roundings_of_long_sums_are_not_only_of_the_first_order() -> None:
    """k roundings in a row cost k u/(1 - k u), of a million terms in float32 a sixteenth more than k u."""
    u, count = 2.0**-24, 10**6
    grown = count * u / (1 - count * u)
    table = pairs(torch.float32)
    slopes = math.fsum(s * abs(c) for s, c in zip(table.scales, table.weights, strict=True))
    assert prediction_error(1.0, count, 1.0, torch.float32) >= 1.01 * grown * slopes
    assert aggregation_error(0.0, count, torch.float32) >= 1.01 * 2 * grown * levels(torch.float32).amplification


def test_predictions_are_exact_where_they_should_be() -> None:
    w, x = draw(0, 3, 4), draw(1, 6, 4)
    z = x @ w.mT
    for loss, want in (("logistic", torch.sigmoid(z)), ("softmax", z.softmax(-1))):
        block = Block(loss, 4, Momentum("plain"), classes=3).requires_grad_(False)  # type: ignore[arg-type]
        at = block.channels
        got = Lean(block).predict(at.state(w), at.data(x, torch.zeros_like(x), x.new_zeros(6, 3)))
        assert torch.allclose(got, want, rtol=1e-14)
    block = Block("poisson", 4, Momentum("plain")).requires_grad_(False)
    at = block.channels
    got = Lean(block).predict(at.state(w[:1]), at.data(x, torch.zeros_like(x), x.new_zeros(6, 1)))
    assert torch.allclose(got, z[:, :1].exp(), rtol=1e-13)


def test_huber_clips_any_residual_and_reads_the_mean_square() -> None:
    block = build("huber", Momentum("plain"))
    at, x = block.channels, draw(1, 9, 3)
    y = torch.tensor([-1e8, -40.0, -3.0, -0.4, -0.1, 0.0, 0.3, 2.0, 1e6]).double()[:, None]
    w = draw(2, 1, 3, scale=0.1)
    data = at.data(x, x, y)
    data[..., at.part("q")] = 1 / 9
    want = (x @ w.mT - y).clamp(-EDGE, EDGE)
    lean = Lean(block)
    assert torch.allclose(lean.residuals(at.state(w), data), want, atol=1e-13)
    assert abs(float(lean.mean_square(at.state(w), data.clone())) - float((want**2).mean())) < 1e-12
    Z = block(at.sequence(at.state(w), data))
    assert abs(float(Z[0, at.part("m")]) - float((want**2).mean())) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("shrink", "momentum"),  # a soft threshold has no heavy ball
    [(shrink, m) for shrink in (False, True) for m in MOMENTA if not (shrink and m.kind == "heavy ball")],
    ids=lambda value: getattr(value, "kind", "shrink" if value else "smooth"),
)
def test_a_block_is_ordinary_attention_layers(loss: str, shrink: bool, momentum: Momentum) -> None:
    """Dense and lean evaluation are one function, and the dense one is what purity inspects."""
    block = build(loss, momentum, shrink)
    assert type(block.body) is AttentionOnly
    assert all(type(layer) is AttentionLayer for layer in block.body.layers)
    assert all(type(group) is Heads for group in block.body.groups())
    Z, K = block.example_input(), block.channels.classes
    if shrink:
        Z[:, block.channels.part("t")] *= 0.3
    dense, at = block(Z), block.channels
    lean = (
        Lean(block)(Z[:K], Z[K:].clone()) if loss == "linear" else Lean(block)(Z[:K], Z[K : K + 5].clone(), Z[K + 5 :])
    )
    for part in ("p", "a", "id", "one"):
        assert (dense[:K, at.part(part)] - lean[:, at.part(part)]).abs().max() < 1e-12
    for part in ("x", "y", "v", "p", "a", "data"):
        assert torch.equal(dense[K:, at.part(part)], Z[K:, at.part(part)]), "data tokens stay as they are"
    if loss == "anchors" and shrink and momentum.kind == "nesterov":  # estimators show all the others to purity
        assert purity(block).attention >= 8


def test_the_soft_threshold_is_exactly_zero_inside() -> None:
    block = build("linear", Momentum("nesterov", 0.5), shrink=True)
    at = block.channels
    u, t = (torch.tensor([each], dtype=torch.float64) for each in ((0.3, -0.2, 0.05), (0.1, 0.25, 0.1)))
    data = at.data(u.new_zeros(2, 3), u.new_zeros(2, 3), u.new_zeros(2, 1))
    after = block.weights_of(block(at.sequence(at.state(u, t), data)))
    assert after[0, 1] == 0 and after[0, 2] == 0
    assert abs(float(after[0, 0]) - 0.2) < 1e-15


def test_weights_know_nothing_of_the_data() -> None:
    assert frozen("linear", "heavy ball", 7, 4) is frozen("linear", "heavy ball", 7, 4)
    one, other = build("huber", MOMENTA[2]), build("huber", MOMENTA[2])
    for n in (3, 50):
        at = one.channels
        one(at.sequence(at.state(draw(0, 1, 3)), at.data(draw(1, n, 3), draw(2, n, 3), draw(3, n, 1))))
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_spoiled_weight_is_noticed_in_both_evaluations() -> None:
    block = build("linear", Momentum("plain"))
    Z = block.example_input()
    dense, lean = block(Z)[0], Lean(block)(Z[:1], Z[1:].clone())[0]
    with torch.no_grad():
        next(group for group in block.body.groups() if group.purpose == "aggregation").W_O[0] *= 1.001
    part = block.channels.part("p")
    assert (block(Z)[0] - dense)[part].abs().max() > 1e-6
    assert (Lean(block)(Z[:1], Z[1:].clone())[0] - lean)[part].abs().max() > 1e-6


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), d=st.integers(1, 9), size=st.floats(1e-6, 1e6))
def test_attention_bounds_the_spectrum(seed: int, n: int, d: int, size: float) -> None:
    x = size * draw(seed, n, d).numpy() * np.geomspace(1, 1e-3, d)
    top = float(np.linalg.eigvalsh(x.T @ x / n)[-1])
    for dtype in DTYPES:
        found = curvature_bound(x, x / n, dtype)
        assert top <= found <= 1.01 * top * d ** (1 / 16)
    assert curvature_bound(np.zeros((2, 2)), np.zeros((2, 2)), torch.float64) == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), d=st.integers(1, 12), spread=st.floats(0, 14))
def test_enclosures_hold_all_eigenvalues(seed: int, d: int, spread: float) -> None:
    q = np.linalg.qr(draw(seed, d, d).numpy())[0]
    values = np.geomspace(1, 10**-spread, d)
    low, high = enclosure((q * values) @ q.T, 8 * d * 2.0**-53)  # what forming the matrix can be off
    assert low <= values.min() and values.max() <= high
    assert low >= values.min() - 1e-12 and high <= 1 + 1e-12


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'linear'"):
        Block("linaer", 2, Momentum("plain"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="soft threshold"):
        Block("linear", 2, Momentum("heavy ball", 0.5), shrink=True)
    with pytest.raises(ArgumentError, match="derivative"):
        Block("anchors", 2, Momentum("plain"))
    with pytest.raises(ArgumentError, match="batch"):
        Block("linear", 2, Momentum("plain"), classes=2)
    with pytest.raises(ArgumentError, match="beta"):
        Momentum("nesterov", 1.0)
    with pytest.raises(ArgumentError, match="float32 or float64"):
        LinearRead(torch.bfloat16)
