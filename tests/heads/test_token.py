"""Token heads: gather bit by bit, averages and fixed matrices up to rounding, max and min up to softness."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnforge as af
from attnforge.certificates.certified import certify, check, load
from attnforge.errors import ArgumentError, CertificateError, DomainError, DomainWarning, PrecisionError
from attnforge.heads.token.bound import lambert_upper
from attnforge.heads.token.head import TokenHead

N, C = 5, 3
GENERATOR = torch.Generator().manual_seed(3)
MATRIX = torch.randn(N, N, generator=GENERATOR, dtype=torch.float64)
DTYPES = (torch.float32, torch.float64)

BUILD: dict[str, Callable[..., TokenHead]] = {
    "gather": lambda **o: TokenHead.gather(N, 2, C, **o),
    "mean": lambda **o: TokenHead.mean(N, C, **o),
    "prefix_mean": lambda **o: TokenHead.prefix_mean(N, C, **o),
    "mix": lambda **o: TokenHead.mix(MATRIX, C, **o),
    "max": lambda **o: TokenHead.max(N, C, **o),
    "min": lambda **o: TokenHead.min(N, C, **o),
}
SOFT: dict[str, Callable[..., TokenHead]] = {
    **BUILD,
    "max": lambda **o: TokenHead.max(N, C, sharpness=3.0, **o),
    "min": lambda **o: TokenHead.min(N, C, sharpness=3.0, **o),
}


def points(head: TokenHead, count: int = 20, seed: int = 0) -> Tensor:
    """Random points and corners of the box, ties and constant columns."""
    lo, hi = head.box.outward(head.dtype).intervals()[0]
    generator = torch.Generator().manual_seed(seed)
    shape = (count, head.tokens, head.channels)
    free = lo + (hi - lo) * torch.rand(shape, generator=generator, dtype=torch.float64)
    corners = torch.where(torch.rand(shape, generator=generator) < 0.5, lo, hi).double()
    equal = free[:, :1].expand(shape)
    near = (equal - 1e-3 * (hi - lo) * torch.rand(shape, generator=generator, dtype=torch.float64)).clamp(lo, hi)
    x = torch.cat([free, corners, equal, near]).to(head.dtype)
    return x.clamp(lo, hi)


def truth(head: TokenHead, x: np.ndarray) -> list[list[Fraction]]:
    """The target for one point (tokens, channels), exactly."""
    rows = [[Fraction(float(v)) for v in row] for row in x]
    n, c = len(rows), len(rows[0])
    if head.mode in ("max", "min"):
        best = max if head.mode == "max" else min
        return [[best(rows[j][k] for j in range(n)) for k in range(c)]] * n
    if head.mode == "mix" or head.mode == "gather":
        assert head.target is not None
        weights = [[Fraction(float(v)) for v in row] for row in head.target.tolist()]
    elif head.mode == "mean":
        weights = [[Fraction(1, n)] * n] * n
    else:
        weights = [[Fraction(1, i + 1)] * (i + 1) + [Fraction(0)] * (n - i - 1) for i in range(n)]
    return [
        [sum((w * r[k] for w, r in zip(line, rows, strict=True)), Fraction(0)) for k in range(c)] for line in weights
    ]


def worst(head: TokenHead, x: Tensor) -> Fraction:
    """The largest error over a batch, exactly."""
    with torch.no_grad():
        out = head.core(x).double().numpy()
    found = Fraction(0)
    for point, got in zip(x.double().numpy(), out, strict=True):
        for wanted, have in zip(truth(head, point), got, strict=True):
            found = max(found, *(abs(Fraction(float(h)) - w) for w, h in zip(wanted, have, strict=True)))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", BUILD)
def test_soundness(mode: str, dtype: torch.dtype) -> None:
    """Exact fractions against the bound, no tolerance."""
    for head in (BUILD[mode](dtype=dtype), SOFT[mode](dtype=dtype, lo=-3.0, hi=0.1)):
        assert worst(head, points(head)) <= Fraction(head.bound)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 9),
    c=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    lo=st.floats(-50, 49),
    width=st.floats(0.01, 50),
    mode=st.sampled_from(list(BUILD)),
    density=st.floats(0, 1),
    spread=st.floats(0, 30),
    seed=st.integers(0, 10_000),
)
def test_soundness_everywhere(
    n: int, c: int, dtype: torch.dtype, lo: float, width: float, mode: str, density: float, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    options = {"lo": lo, "hi": lo + width, "dtype": dtype}
    if mode == "gather":
        head = TokenHead.gather(n, seed % n, c, **options)
    elif mode == "mix":
        size = torch.exp(spread * (torch.rand(n, n, generator=generator, dtype=torch.float64) - 0.5))
        signs = torch.randn(n, n, generator=generator, dtype=torch.float64).sign()
        head = TokenHead.mix(size * signs * (torch.rand(n, n, generator=generator) < density), c, **options)
    else:
        head = getattr(TokenHead, mode)(n, c, **options)
    assert worst(head, points(head, 6, seed)) <= Fraction(head.bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", range(N))
def test_gather_is_exact_bit_by_bit(source: int, dtype: torch.dtype) -> None:
    head = TokenHead.gather(N, source, C, lo=-1e30, hi=1e30, dtype=dtype)
    generator = torch.Generator().manual_seed(source)
    size = torch.exp(60 * torch.randn(500, N, C, generator=generator, dtype=torch.float64)).clamp(1e-30, 1e30)
    x = (size * torch.randn(size.shape, generator=generator, dtype=torch.float64).sign()).to(dtype).clamp(-1e30, 1e30)
    wanted = x[:, source : source + 1].expand_as(x)
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(head(x).detach().view(bits), wanted.contiguous().view(bits))
    assert head.bound == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_permutations_and_zero_are_exact(dtype: torch.dtype) -> None:
    flip = TokenHead.mix(torch.eye(N).flip(0), C, dtype=dtype)
    x = points(flip)
    assert flip.bound == 0 and torch.equal(flip(x), x.flip(1))
    nothing = TokenHead.mix(torch.zeros(N, N), C, dtype=dtype)
    assert nothing.bound == 0 and not nothing(x).any()


def test_the_figures() -> None:
    u = 2.0**-24
    assert TokenHead.mean(100, 4).bound <= 103 * u
    assert TokenHead.mean(100, 4, lo=-8.0, hi=2.0).bound <= 8 * 103 * u
    assert TokenHead.prefix_mean(100, 4, dtype=torch.float64).bound <= 130 * 2.0**-53
    assert TokenHead.max(2, 1).bound <= 3e-6 and TokenHead.max(100, 1, dtype=torch.float64).bound <= 1e-13
    stochastic = torch.softmax(MATRIX, -1)
    assert TokenHead.mix(stochastic, 2).bound <= 2e-6
    assert TokenHead.mix(stochastic, 2, dtype=torch.float64).bound <= 2e-14


@pytest.mark.parametrize(("n", "low", "high"), [(2, 0.278464, 0.278466), (100, 2.62, 2.64), (10_000, 6.3, 6.4)])
def test_lambert(n: int, low: float, high: float) -> None:
    w = lambert_upper(n)
    assert low < w < high and w <= math.log(n)
    ctx.prec = 120
    assert arb(w) * arb(w).exp() >= arb(n - 1) / arb(1).exp()
    ctx.prec = 53


@pytest.mark.parametrize("n", [2, 5, 40])
def test_d4_is_sharp(n: int) -> None:
    """The gap at which D4 holds with equality is found by a head of low sharpness."""
    head = TokenHead.max(n, 1, sharpness=4.0, dtype=torch.float64)
    gap = (1 + lambert_upper(n)) / 4.0
    x = torch.full((n, 1), 0.9 - gap, dtype=torch.float64)
    x[0] = 0.9
    error = float((0.9 - head.core(x).detach()).max())
    assert 0.999 * head.bound <= error <= head.bound


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_is_reached_and_shrinks_the_bound(mode: str, dtype: torch.dtype) -> None:
    heads = [getattr(TokenHead, mode)(N, C, -2.0, 2.0, eps=eps, dtype=dtype) for eps in (0.1, 1e-2, 1e-4)]
    for head, eps in zip(heads, (0.1, 1e-2, 1e-4), strict=True):
        assert head.bound <= eps <= 1.02 * head.bound, "sharp enough, and no sharper"
    assert heads[0].sharpness < heads[1].sharpness < heads[2].sharpness


def test_an_eps_beyond_the_dtype_says_what_can_be_reached() -> None:
    with pytest.raises(PrecisionError, match="float64") as caught:
        TokenHead.max(N, C, eps=1e-9)
    assert caught.value.reachable == TokenHead.max(N, C).bound
    steep = TokenHead.max(N, C, sharpness=1e12)
    x = points(steep, 5)
    assert float((steep(x).detach() - x.amax(-2, keepdim=True)).abs().max()) <= steep.bound < 1e-5


@pytest.mark.parametrize("mode", BUILD)
def test_batch_equals_loop(mode: str) -> None:
    head = BUILD[mode]()
    x = points(head, 3).reshape(2, 3, 2, N, C)
    out = head(x)
    assert out.shape == x.shape
    for one, got in zip(x.reshape(-1, N, C), out.reshape(-1, N, C), strict=True):
        assert float((head(one) - got).detach().abs().max()) <= 2 * head.bound
    assert head(x[:0]).shape == (0, 3, 2, N, C)


@pytest.mark.parametrize("mode", BUILD)
def test_save_and_load_give_identical_bits(mode: str, tmp_path: Path) -> None:
    head, path = BUILD[mode](lo=-2.0), tmp_path / "head.safetensors"
    head.save(path)
    again = load(path)
    x = points(head)
    assert torch.equal(again(x), head(x)) and again.certificate == head.certificate
    assert check(path).bound == head.bound


@pytest.mark.parametrize("mode", BUILD)
def test_gradients(mode: str) -> None:
    head = SOFT[mode](dtype=torch.float64)
    x = points(head, 1)[:1].requires_grad_()
    assert torch.autograd.gradcheck(head.core, (x,))


@pytest.mark.parametrize("mode", BUILD)
def test_export_compile_and_purity(mode: str) -> None:
    head = BUILD[mode]()
    (x,) = head.example_input()
    assert torch.equal(torch.export.export(head, (x,)).module()(x), head(x))
    assert torch.equal(torch.compile(head, backend="aot_eager")(x), head(x))
    assert af.purity(head).attention > 0


@pytest.mark.parametrize("mode", ["gather", "mean", "prefix_mean", "mix"])
def test_a_trained_head_is_certified_anew(mode: str) -> None:
    """After an optimiser step every weight is different; the bound is computed from what is there, and holds."""
    head = BUILD[mode]()
    before = head.bound
    optimiser = torch.optim.SGD(head.parameters(), lr=1e-3)
    (head(points(head)) - 0.3).square().sum().backward()
    optimiser.step()
    with pytest.raises(CertificateError, match="stale"):
        _ = head.bound
    assert certify(head).bound > before
    assert before < worst(head, points(head, 30)) <= Fraction(head.bound)


@pytest.mark.parametrize("mode", ["gather", "mean", "prefix_mean", "mix"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_weights_are_certified_soundly(mode: str, data: st.DataObject) -> None:
    """Random changes of random tensors, small and large."""
    head = BUILD[mode](dtype=data.draw(st.sampled_from(DTYPES)))
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** data.draw(st.integers(-7, 0))
    names = [name for name, _ in head.attention.named_parameters()]
    with torch.no_grad():
        for name in data.draw(st.sets(st.sampled_from(names), min_size=1)):
            tensor = getattr(head.attention, name)
            tensor += size * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    certify(head)
    assert worst(head, points(head, 6, seed)) <= Fraction(head.bound)


@pytest.mark.parametrize("name", ["W_Q", "b_Q", "W_K", "W_V", "W_O"])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_changed_max_head_is_refused_by_name(mode: str, name: str) -> None:
    head = BUILD[mode]()
    with torch.no_grad():
        tensor = getattr(head.attention, name)
        tensor.view(-1)[min(1, tensor.numel() - 1)] += 1e-3
    with pytest.raises(CertificateError, match=f"'{name}' has changed"):
        certify(head)


def test_a_softer_max_head_is_certified_by_its_sharpness() -> None:
    head = TokenHead.max(N, C, sharpness=100.0)
    before = head.bound
    with torch.no_grad():
        head.attention.W_K[1, 1, 0] = 10.0
    assert certify(head).bound > 9 * before
    assert worst(head, points(head)) <= Fraction(head.bound)


@pytest.mark.parametrize("mode", ["gather", "mix", "mean"])
def test_a_leak_is_noticed(mode: str) -> None:
    """Sabotage: a key lifted, a value scaled; the old bound breaks, the new one covers it."""
    head = BUILD[mode]()
    old = Fraction(head.bound)
    with torch.no_grad():
        if mode == "gather":
            head.attention.W_K[0, C + 1, 0] = 125.0  # token 1 now has logit -3
        else:
            head.attention.W_V[0, 0, 0] = 1.001
    x = points(head)
    assert worst(head, x) > old
    certify(head)
    assert worst(head, x) <= Fraction(head.bound)


def test_another_dtype_needs_another_certificate() -> None:
    head = TokenHead.gather(N, 1, C)
    head.to(torch.float64)
    with pytest.raises(CertificateError, match="stale"):
        _ = head.certificate
    certify(head)
    assert 0 < head.bound < 1e-14, "128 is not deep enough in float64: the leak is tiny and counted"
    assert worst(head, points(head)) <= Fraction(head.bound)
    with pytest.raises(CertificateError, match="bfloat16"):
        certify(head.to(torch.bfloat16))


def test_input_outside_the_box() -> None:
    head = TokenHead.mean(N, C)
    with pytest.warns(DomainWarning):
        head(torch.full((N, C), 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(torch.full((N, C), 2.0))
    head.strict = True
    with pytest.raises(DomainError):
        head(torch.full((N, C), 2.0))
    with pytest.raises(DomainError, match="NaN"):
        head(torch.full((N, C), math.nan))


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: TokenHead.gather(0, 0, 2), "tokens"),
        (lambda: TokenHead.gather(3, 3, 2), "source"),
        (lambda: TokenHead.gather(3, -1, 2), "source"),
        (lambda: TokenHead.gather(3, 1, 0), "channels"),
        (lambda: TokenHead.mean(2.0, 2), "tokens"),
        (lambda: TokenHead.mean(2, True), "channels"),
        (lambda: TokenHead.mean(2, 2, lo=1.0, hi=-1.0), "empty"),
        (lambda: TokenHead.mean(2, 2, hi=math.inf), "finite"),
        (lambda: TokenHead.prefix_mean(2, 2, dtype=torch.float16), "dtype"),
        (lambda: TokenHead.mix(torch.ones(2, 3), 2), "square"),
        (lambda: TokenHead.mix([[1.0]], 2), "tensor"),
        (lambda: TokenHead.mix(torch.full((2, 2), math.nan), 2), "finite"),
        (lambda: TokenHead.mix(torch.full((2, 2), 1e35), 2), "rescale"),
        (lambda: TokenHead.max(3, 2, eps=0.0), "eps"),
        (lambda: TokenHead.max(3, 2, sharpness=-1.0), "sharpness"),
        (lambda: TokenHead.min(3, 2, sharpness=1.0, eps=0.1), "not both"),
    ],
)
def test_bad_arguments(build: Callable[[], TokenHead], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        build()


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(N + 1, C),
        torch.zeros(N, C + 1),
        torch.zeros(C),
        torch.zeros(N, C, dtype=torch.float64),
        torch.zeros(N, C, dtype=torch.int64),
        [["0.0"] * C] * N,
    ],
)
@pytest.mark.parametrize("mode", ["gather", "max"])
def test_bad_inputs(mode: str, x: object) -> None:
    with pytest.raises(ArgumentError):
        BUILD[mode]()(x)


@pytest.mark.parametrize("mode", ["max", "mean", "gather"])
def test_what_a_head_sees_is_part_of_it(mode: str) -> None:
    """Under a causal mask the first token sees itself alone; neither mask nor positions are among the weights."""
    heads = {"max": lambda: TokenHead.max(3, 1, -1, 1, eps=1e-2), "mean": lambda: TokenHead.mean(3, 1),
             "gather": lambda: TokenHead.gather(3, 1, 1)}  # fmt: skip
    masked = heads[mode]()
    masked.attention.causal = True
    with pytest.raises(CertificateError, match="causal=True"):
        certify(masked)
    if mode == "gather":
        moved = heads[mode]()
        moved.positions.mul_(0.5)
        with pytest.raises(CertificateError, match="positions"):
            certify(moved)
