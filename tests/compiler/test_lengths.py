"""One network for every length (E7): certified for each n, the same numbers for all of them."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from attnforge.certificates.certified import certify
from attnforge.compiler.lengths import EveryLength, general_keys, quantised
from attnforge.errors import ArgumentError, CertificateError
from attnforge.heads import AnchorHead
from attnforge.theorems import splice


@pytest.fixture(scope="module")
def net() -> EveryLength:
    return EveryLength(["identity", "square", "cos"], "sin(x - m0)*m1 + m2/(2 + x)", -1, 1, eps=1e-5)


def wanted(X: torch.Tensor) -> torch.Tensor:
    mean = lambda v: v.mean(1, keepdim=True)  # noqa: E731
    return torch.sin(X - mean(X)) * mean(X**2) + mean(torch.cos(X)) / (2 + X)


@pytest.mark.parametrize("n", [1, 2, 17, 1000, 100_000])
def test_every_length_is_certified(net: EveryLength, n: int) -> None:
    rng = np.random.default_rng(n)
    ends = np.where(rng.uniform(size=n) < 0.5, -1.0, 1.0)
    for x in (rng.uniform(-1, 1, n), ends, np.full(n, 0.3), rng.normal(size=n).clip(-1, 1)):
        X = torch.from_numpy(x).unsqueeze(0)
        assert (net(X) - wanted(X)).abs().max() <= net.bound(n) < 4e-5


def test_nothing_but_rounding_depends_on_the_length(net: EveryLength) -> None:
    assert 0 <= net.bound(10**6) - net.bound(1) < 1e-8
    X = torch.linspace(-1, 1, 50, dtype=torch.float64).unsqueeze(0)
    assert torch.allclose(net(X.repeat(1, 20))[:, :50], net(X), rtol=0, atol=1e-12), "itself twenty times"
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(net(X[:, order]), net(X)[:, order], rtol=0, atol=1e-12)


def test_float32_serves_ten_thousand_tokens_and_refuses_more() -> None:
    """A variance is no smaller than 0, which h has to say: its moments are bounded one by one."""
    h = "(x - m0)/sqrt(relu(m1 - m0**2) + 1)"
    net = EveryLength(["identity", "square"], h, -1, 1, eps=1e-3, dtype=torch.float32)
    for n in (1, 300, 10_000):
        x = np.random.default_rng(n).choice([-1.0, 1.0, 0.25], n)
        X = torch.from_numpy(x).float().unsqueeze(0)
        exact = (x - x.mean()) / np.sqrt((x**2).mean() - x.mean() ** 2 + 1)
        assert np.abs(net(X)[0].double().numpy() - exact).max() <= net.bound(n) < 2e-2
    with pytest.raises(CertificateError, match="rounds too much in float32"):
        net.bound(100_000)
    with pytest.raises(ArgumentError, match="float32 numbers"):
        net(torch.full((1, 2), 0.1, dtype=torch.float64))  # no number of float32


def test_moments_with_kinks_take_a_spliced_head() -> None:
    kinked, rng = splice("abs", -3, 2, eps=1e-6), np.random.default_rng(0)
    net = EveryLength([kinked], "m0*x", -3, 2, eps=1e-6)
    for n in (1, 1000):
        X = torch.from_numpy(rng.uniform(-3, 2, (1, n)))
        assert (net(X) - X.abs().mean(1, keepdim=True) * X).abs().max() <= net.bound(n) < 1e-5
    with pytest.raises(ArgumentError, match=r"float64 head on \[-1, 1\]"):
        EveryLength([kinked], "m0*x", -1, 1)


def test_what_is_read_without_an_error_has_a_bound() -> None:
    """relu(x - m0) is 0 on this interval, and what is left is m1 itself: the network for h errs by nothing."""
    net, x = EveryLength(["cos", "exp"], "relu(x - m0) + m1", -1.0, -0.98, eps=1e-6), np.linspace(-1, -0.98, 9)
    assert net.read.bound == 0.0
    got = net(torch.from_numpy(x).unsqueeze(0))[0].numpy()
    assert np.abs(got - np.exp(x).mean()).max() <= net.bound(9) < 1e-6


def test_the_mean_is_an_attention_layer(net: EveryLength) -> None:
    X = torch.rand(3, 9, 1, dtype=torch.float64)
    state = net.first(X)
    assert torch.allclose(net.second(state), net._averaged(state), rtol=0, atol=1e-15)


def test_a_spoiled_moment_leaves_the_bound_and_has_none(net: EveryLength) -> None:
    X, limit = torch.rand(1, 40, dtype=torch.float64), net.bound(40)
    spoiled = copy.deepcopy(net)
    with torch.no_grad():
        spoiled.first.heads()[2].M_V += 0.01
    assert (spoiled(X) - wanted(X)).abs().max() > limit
    read = copy.deepcopy(net)
    with torch.no_grad():
        next(iter(read.read.parameters())).mul_(1.01)
    for changed in (spoiled, read, copy.deepcopy(net).float()):
        with pytest.raises(CertificateError, match="stale"):
            changed.bound(40)
    assert copy.deepcopy(net).bound(40) == limit


@pytest.mark.parametrize("n", [1, 5, 400])
def test_the_grid_keeps_the_measure(n: int) -> None:
    side, kappa = np.linspace(0, 1, 9), 3.0
    rng = np.random.default_rng(n)
    for x in (rng.uniform(size=n), rng.integers(0, 2, n).astype(float), np.full(n, 1 / 16)):
        logits = -kappa * ((x[:, None] - side) * 8) ** 2
        weight = np.exp(logits - logits.max(1, keepdims=True))
        m = (weight / weight.sum(1, keepdims=True)).mean(0)
        at = np.unique(np.concatenate([x, side]))
        gap = [(x <= t).mean() - m[side <= t].sum() for t in at[:-1]]
        assert np.abs(gap) @ np.diff(at) <= quantised(1 / 8, 1, kappa)


def test_the_general_construction_in_small() -> None:
    """All three layers with three grid points: f(mu, x) = mean of |x - z| over mu, constant 1 in both."""
    rng, side, kappa = np.random.default_rng(0), np.linspace(0, 1, 3), 4.0
    first = quantised(0.5, 1, kappa)
    ticks = np.linspace(0, 1, 6)
    grid = np.stack(np.meshgrid(*[ticks] * 4, indexing="ij"), -1).reshape(-1, 4)
    values = (grid[:, :3] * np.abs(grid[:, 3:] - side)).sum(-1)  # f of the measure sum m_v delta_v, linear in m

    def soft(logits: np.ndarray) -> np.ndarray:
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        return np.asarray(weight / weight.sum(-1, keepdims=True))

    for n in (1, 3, 50):
        z = rng.uniform(size=n)
        m = soft(-kappa * ((z[:, None] - side) / 0.5) ** 2).mean(0)
        at = np.concatenate([np.broadcast_to(m, (n, 3)), z[:, None]], 1)
        got = soft(-kappa * ((at[:, None] - grid) ** 2).sum(-1) / 0.2**2) @ values
        exact = np.abs(z[:, None] - z).mean(1)
        slope = math.sqrt(3 + 9)  # of the extension to the cube: sqrt(3) in m, and up to sum m <= 3 in x
        assert np.abs(got - exact).max() <= first + slope * quantised(0.2, 4, kappa)


def test_sizes_and_refusals(net: EveryLength) -> None:
    points, keys = general_keys(1.0, 0.2)
    assert points == 7 and keys > 8 and general_keys(1.0, 0.05)[1] > 4 * keys
    with pytest.raises(CertificateError, match="rounds too much"):
        net.bound(10**12)
    with pytest.raises(ArgumentError, match=r"float64 numbers in \[-1, 1\]"):
        net(torch.full((1, 3), 2.0, dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"numbers in \[-1, 1\]"):
        net(torch.full((1, 3), math.nan, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="n >= 1"):
        net(torch.empty(2, 0, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="at least one moment"):
        EveryLength([], "x", -1, 1)
    with pytest.raises(ArgumentError, match="kappa must be"):
        quantised(0.1, 1, 0.3)


def test_a_head_that_is_read_fast_is_certified_as_it_is_read_here() -> None:
    """In float32 a softmax over 2000 anchors rounds more than the quotient that is read in its place."""
    slow = AnchorHead.fit("sin", -3, 3, anchors=2000, dtype=torch.float32)
    fast = copy.deepcopy(slow)
    fast.fast = True
    assert fast.bound is not None and slow.bound is not None and fast.bound < slow.bound
    bounds = [EveryLength([head], "m0 + x", -3, 3, eps=1e-2, dtype=torch.float32).bound(7) for head in (fast, slow)]
    assert bounds[0] == bounds[1] and fast.fast


def test_a_head_that_changes_later_is_not_the_one_in_here() -> None:
    """A coarse head went into the network; that its owner makes a fine one of it is no news for the network."""
    fine = AnchorHead.fit("sin", -3, 3, anchors=32, dtype=torch.float64)
    coarse = copy.deepcopy(fine)
    with torch.no_grad():
        coarse.group.M_V.mul_(1.1)
    certify(coarse)
    built = EveryLength([coarse], "m0 + x", -3, 3, eps=0.5)
    before = built.bound(1)
    coarse.load_state_dict(fine.state_dict())
    certify(coarse)
    x = torch.linspace(-3, 3, 1001, dtype=torch.float64)[:, None]
    error = float((built(x) - torch.sin(x) - x).abs().max())
    assert coarse.bound is not None and error > 4 * coarse.bound
    assert error <= built.bound(1) == before
