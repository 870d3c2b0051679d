"""Norm heads: sound, exact to a few roundings, trainable, exportable, honest about what they do not know."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
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
from attnforge.heads.norm.bound import fit_error
from attnforge.heads.norm.construction import NormSpec
from attnforge.heads.norm.head import NormHead

ROWS = ("gaussian", "outlier", "two values", "one sign", "sparse", "shifted")
WIDE = (0.4, 130.0)
ROOT = Path(__file__).parents[2]


def rows(shape: str, variance: float, channels: int, count: int = 64, seed: int = 0, rms: bool = False) -> Tensor:
    """Rows of a given variance (or mean square), in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, channels, generator=generator, dtype=torch.float64)
    offset = torch.zeros(count, 1, dtype=torch.float64)
    if shape == "outlier":
        x[:, seed % channels] = 1e3
    elif shape == "two values":
        x = x.sign()
        x[:, 0], x[:, 1] = 1, -1
    elif shape == "one sign":
        offset += 3
    elif shape == "sparse":
        x[:, channels // 10 + 2 :] = 0
    elif shape == "shifted":
        offset = 60 * torch.randn(count, 1, generator=generator, dtype=torch.float64).clamp(-1.6, 1.6)
    if rms:
        return x / x.square().mean(-1, keepdim=True).sqrt() * math.sqrt(variance)
    x = x - x.mean(-1, keepdim=True)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    return (x + offset) * math.sqrt(variance)


def truth(head: NormHead, x: Tensor) -> Tensor:
    """The normalised rows before weight and bias, in float64: for float32 heads."""
    c = x.double()
    c = c if head.kind == "rms" else c - c.mean(-1, keepdim=True)
    return c / (c.square().mean(-1, keepdim=True) + head.eps_norm).sqrt()


def worst(head: NormHead, x: Tensor) -> float:
    """The largest error of a batch, relative to each row's largest value."""
    y = truth(head, x)
    with torch.no_grad():
        return float(((head.core(x).double() - y).abs().amax(-1) / y.abs().amax(-1)).max())


def exact_error(head: NormHead, x: Tensor) -> float:
    """`worst` with the comparison itself in 200 bits: the errors of float64 heads are as small as a rounding."""
    with torch.no_grad():
        out = head.core(x)
    ctx.prec = 200
    found = 0.0
    for row, got in zip(x.tolist(), out.tolist(), strict=True):
        c = [arb(value) for value in row]
        mean = arb(0) if head.kind == "rms" else sum(c, arb(0)) / len(c)
        c = [value - mean for value in c]
        root = (sum((value * value for value in c), arb(0)) / len(c) + arb(head.eps_norm)).sqrt()
        largest = max(abs(float(value)) for value in c)
        error = max((arb(g) * root - value).abs_upper() for g, value in zip(got, c, strict=True))
        found = max(found, float((error / arb(largest)).mid()))
    ctx.prec = 53
    return found


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("variance", [WIDE, (1e-3, 1e3)])
def test_float32_is_within_its_certificate(shape: str, variance: tuple[float, float]) -> None:
    head = NormHead.layer_norm(384, variance)
    lo, hi = variance
    for i, v in enumerate((lo * 1.000001, math.sqrt(lo * hi), 1.0, hi * 0.999999)):
        assert worst(head, rows(shape, v, 384, seed=i).float()) <= head.bound


def test_the_figures_of_the_foundations() -> None:
    """384 channels, variances 0.4 to 130, outliers beyond 200: 3e-6 of the row's maximum, 1e-11 in float64."""
    single, double = NormHead.layer_norm(384, WIDE), NormHead.layer_norm(384, WIDE, dtype=torch.float64)
    assert single.bound <= 2.5e-6 and single.heads <= 16
    assert double.bound <= 5e-14 and double.heads <= 32
    x = rows("outlier", 120.0, 384)
    assert float(x.abs().max()) > 200
    assert worst(single, x.float()) <= 5e-7
    assert exact_error(double, x[:4]) <= 5e-15


@pytest.mark.parametrize(
    ("variance", "heads", "error"),
    [(WIDE, 12, 2.1e-7), (WIDE, 16, 4e-9), (WIDE, 24, 1e-11), (WIDE, 32, 5e-14), ((1e-3, 1e3), 32, 5.4e-8)],
)
def test_relative_error_of_the_fit(variance: tuple[float, float], heads: int, error: float) -> None:
    spec = NormHead.layer_norm(64, variance, heads=heads, dtype=torch.float64).spec
    assert spec.heads == heads and spec.relative_error <= error
    assert min(spec.weights) > 0, "positive amounts: nothing cancels"


@pytest.mark.parametrize("heads", [3, 8, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit_error_against_ball_arithmetic(heads: int, dtype: torch.dtype) -> None:
    """The certified sup is above the true error at every point tried, and close to the largest."""
    spec = NormHead.layer_norm(48, WIDE, heads=heads, dtype=dtype).spec
    ctx.prec = 200
    points = np.exp(np.linspace(math.log(WIDE[0]), math.log(WIDE[1]), 1200))[1:-1]
    found = arb(0)
    for v in map(arb, points.tolist()):
        terms = (arb(a) / (1 + (arb(s) * v - arb(b)).exp())
                 for s, b, a in zip(spec.scales, spec.shifts, spec.weights, strict=True))  # fmt: skip
        error = abs(sum(terms, arb(0)) * (v + arb(spec.eps)).sqrt() - 1)
        found = max(found, error, key=lambda x: float(x.mid()))
        assert error < spec.relative_error
    ctx.prec = 53
    assert spec.relative_error <= 1.25 * float(found.mid()) + 3e-14


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(2, 70),
    middle=st.floats(-4, 4),
    ratio=st.floats(0.05, 5),
    heads=st.integers(1, 20),
    kind=st.sampled_from(["layer", "rms"]),
    eps=st.sampled_from([0.0, 1e-12, 1e-5, 0.1]),
    shape=st.sampled_from(ROWS),
    seed=st.integers(0, 1000),
)
def test_soundness(
    channels: int, middle: float, ratio: float, heads: int, kind: str, eps: float, shape: str, seed: int
) -> None:
    lo, hi = 10 ** (middle - ratio / 2), 10 ** (middle + ratio / 2)
    head = NormHead.fit(channels, (lo, hi), eps_norm=eps, heads=heads, kind=kind)
    for v in (lo * 1.00001, lo ** ((seed % 7) / 7) * hi ** (1 - (seed % 7) / 7), hi * 0.99999):
        x = rows(shape, v, channels, 16, seed, kind == "rms").float()
        assert worst(head, x) <= head.bound


@settings(max_examples=10, deadline=None)
@given(
    channels=st.integers(2, 40),
    heads=st.integers(1, 32),
    kind=st.sampled_from(["layer", "rms"]),
    seed=st.integers(0, 99),
)
def test_soundness_in_float64(channels: int, heads: int, kind: str, seed: int) -> None:
    head = NormHead.fit(channels, (0.1, 20.0), heads=heads, kind=kind, dtype=torch.float64)
    for v in (0.1000001, 1.7, 19.99999):
        assert exact_error(head, rows(ROWS[seed % 6], v, channels, 6, seed, kind == "rms")) <= head.bound


def test_adversarial_search() -> None:
    """Climb towards bad rows: random rows, then single coordinates moved by a few units, keeping what is worse."""
    head = NormHead.layer_norm(48, (0.5, 50.0))
    generator = torch.Generator().manual_seed(1)
    pool = torch.cat([rows(shape, v, 48, 40, i) for i, shape in enumerate(ROWS) for v in (0.51, 3.0, 49.0)]).float()

    def errors(x: Tensor) -> Tensor:
        y = truth(head, x)
        with torch.no_grad():
            return (head.core(x).double() - y).abs().amax(-1) / y.abs().amax(-1)

    found = errors(pool)
    start = float(found.max())
    for _ in range(150):
        push = torch.randn(pool.shape, generator=generator) * (torch.rand(pool.shape, generator=generator) < 0.1)
        trial = pool * (1 + push * 2.0**-18)
        v = trial.double().var(-1, correction=0)
        new = torch.where((v >= 0.5) & (v <= 50.0), errors(trial), torch.zeros(()))
        better = new > found
        pool, found = torch.where(better[:, None], trial, pool), torch.maximum(new, found)
    assert start < float(found.max()) <= head.bound
    assert head.bound <= 8 * float(found.max()), "no more than 8 times what can be found"


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_agrees_with_torch(kind: str) -> None:
    weight, bias = torch.linspace(-2, 2, 24), torch.linspace(1, -1, 24)
    x = rows("gaussian", 2.0, 24, 8, rms=True).float()
    head = NormHead.fit(24, (0.1, 10.0), kind=kind, weight=weight, bias=bias, eps_norm=1e-3)
    functional = torch.nn.functional
    if kind == "layer":
        plain = functional.layer_norm(x.double(), (24,), eps=1e-3)
    else:
        plain = functional.rms_norm(x.double(), (24,), eps=1e-3)
    size = weight.abs().double() * plain.abs().amax(-1, keepdim=True) + bias.abs()
    error = (head(x).double() - (plain * weight + bias)).abs()
    assert bool((error <= head.bound * size).all())
    assert head.bound > NormHead.fit(24, (0.1, 10.0), kind=kind, eps_norm=1e-3).bound


@pytest.mark.parametrize(("eps", "dtype"), [(1e-2, torch.float32), (1e-5, torch.float32), (1e-10, torch.float64)])
def test_eps_chooses_the_fewest_heads(eps: float, dtype: torch.dtype) -> None:
    head = NormHead.layer_norm(32, WIDE, eps=eps, dtype=dtype)
    assert head.bound <= eps
    assert NormHead.layer_norm(32, WIDE, heads=head.heads - 1, dtype=dtype).bound > eps


def test_bound_shrinks_with_eps() -> None:
    heads = [NormHead.layer_norm(32, WIDE, eps=eps, dtype=torch.float64) for eps in (1e-2, 1e-4, 1e-8, 1e-12)]
    bounds, sizes = [h.bound for h in heads], [h.heads for h in heads]
    assert bounds == sorted(bounds, reverse=True) and sizes == sorted(sizes)
    assert bounds[-1] < bounds[0] and sizes[-1] > sizes[0]


def test_an_eps_beyond_the_dtype_says_what_can_be_reached() -> None:
    with pytest.raises(PrecisionError, match="float64") as caught:
        NormHead.layer_norm(384, WIDE, eps=1e-8)
    assert caught.value.reachable == pytest.approx(2.3e-6, rel=0.2)


def test_the_offset_of_a_row_costs_nothing() -> None:
    near, far = NormHead.layer_norm(384, WIDE, offset=0.0), NormHead.layer_norm(384, WIDE, offset=1e3)
    assert far.bound <= 1.02 * near.bound
    x = (rows("gaussian", 2.0, 384) + 1e3).float()
    v = x.double().var(-1, correction=0)
    assert float(v.min()) > WIDE[0] and worst(far, x) <= far.bound


@pytest.mark.parametrize("shape", [(7, 24), (24,), (2, 3, 4, 24), (0, 24)])
def test_batch_equals_loop(shape: tuple[int, ...]) -> None:
    head = NormHead.layer_norm(24, (0.1, 10.0), weight=torch.linspace(-1, 1, 24))
    count = math.prod(shape[:-1])
    x = rows("gaussian", 1.0, 24, max(1, count)).float()[: count if len(shape) > 1 else 1].reshape(shape)
    out = head(x)
    assert out.shape == x.shape
    for row, got in zip(x.reshape(-1, 24), out.reshape(-1, 24), strict=True):
        assert torch.allclose(head(row), got, rtol=0, atol=head.bound * float(got.detach().abs().max() + 1))


def test_chunks_agree_with_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    head = NormHead.layer_norm(24, (0.1, 10.0), weight=torch.linspace(-1, 2, 24), bias=torch.ones(24))
    x = rows("gaussian", 1.0, 24, 50).float().requires_grad_()
    leaves = (x, *head.parameters())
    whole = head(x)
    slopes = torch.autograd.grad(whole[:, :5].square().sum(), leaves)
    monkeypatch.setattr("attnforge.heads.norm.head.CHUNK", 24 * 7)
    parts = head(x)
    assert torch.equal(parts, whole)
    for slope, again in zip(slopes, torch.autograd.grad(parts[:, :5].square().sum(), leaves), strict=True):
        assert float(slope.abs().max()) > 0
        assert torch.allclose(again, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("grad", "times"), [(False, 1.5), (True, 1.5)])
def test_memory(grad: bool, times: float) -> None:
    """What the heads read, 16 times the rows, is never alive at once: the peak grows by the output and little more."""
    code = f"""
import resource, torch
from attnforge.heads.norm.head import NormHead
head = NormHead.layer_norm(384, (0.1, 10.0))
x = torch.randn(40_000, 384)
head(x[:2000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.set_grad_enabled({grad}):
    y = head(x)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
raise SystemExit(0 if grown < {times} * y.nbytes else f"grown by {{grown / y.nbytes}} outputs")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_save_and_load_give_identical_bits(tmp_path: Path) -> None:
    for i, head in enumerate(
        (NormHead.layer_norm(24, (0.1, 10.0), bias=torch.ones(24)), NormHead.rms_norm(5, (1e-3, 1.0)))
    ):
        path = tmp_path / f"{i}.safetensors"
        head.save(path)
        again = load(path)
        x = head.example_input()[0]
        assert torch.equal(again(x), head(x)) and again.certificate == head.certificate
        assert check(path).bound == head.bound


def test_gradients() -> None:
    head = NormHead.layer_norm(6, (0.05, 20.0), heads=6, dtype=torch.float64, weight=torch.linspace(0.5, 1, 6))
    x = rows("gaussian", 1.0, 6, 3).requires_grad_()
    assert torch.autograd.gradcheck(head.core, (x,))
    parameters = tuple(p.detach().clone().requires_grad_() for p in head.parameters())
    names = [name for name, _ in head.named_parameters()]

    def run(*tensors: Tensor) -> Tensor:
        return torch.func.functional_call(head, dict(zip(names, tensors, strict=True)), (x.detach(),))

    assert torch.autograd.gradcheck(run, parameters)


def test_export_compile_and_purity() -> None:
    for head in (NormHead.layer_norm(48, WIDE, weight=torch.ones(48)), NormHead.rms_norm(7, WIDE, heads=5)):
        x = head.example_input()[0]
        exported = torch.export.export(head, (x,)).module()
        assert torch.equal(exported(x), head(x))
        assert torch.allclose(torch.compile(head, backend="aot_eager")(x), head(x), rtol=0, atol=1e-6)
        assert af.purity(head).attention > 0


def test_certificate_goes_stale_and_comes_back() -> None:
    head = NormHead.layer_norm(24, (0.1, 10.0))
    before = head.bound
    optimiser = torch.optim.SGD(head.parameters(), lr=1e-4)
    (head(head.example_input()[0]) ** 2).sum().backward()
    optimiser.step()
    with pytest.raises(CertificateError, match="stale"):
        _ = head.bound
    assert certify(head).bound > before, "trained away from the norm, and the certificate says so"
    x = rows("gaussian", 1.0, 24).float()
    assert worst(head, x) <= head.bound
    head.to(torch.float64)
    with pytest.raises(CertificateError, match="stale"):
        _ = head.certificate
    assert certify(head).dtype == "float64"


@pytest.mark.parametrize("name", ["scale", "shift", "mix"])
def test_sabotage_is_noticed(name: str) -> None:
    """A weight changed by one part in a thousand breaks the old bound, and the new one covers it."""
    head = NormHead.layer_norm(48, WIDE)
    old = head.bound
    with torch.no_grad():
        getattr(head, name)[head.heads // 2] *= 1.01
    x = torch.cat([rows("gaussian", v, 48, 8) for v in (0.41, 1.0, 5.0, 25.0, 120.0)]).float()
    assert worst(head, x) > old
    assert worst(head, x) <= certify(head).bound


def test_weights_that_are_not_numbers_cannot_be_certified() -> None:
    head = NormHead.layer_norm(8, (0.1, 10.0))
    with torch.no_grad():
        head.mix[0] = math.nan
    with pytest.raises(CertificateError, match="'mix'"):
        certify(head)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_an_affine_map_that_is_not_finite_cannot_be_certified(name: str) -> None:
    head = NormHead.layer_norm(4, (0.1, 10.0), weight=torch.ones(4), bias=torch.zeros(4))
    for number in (math.nan, math.inf):
        with torch.no_grad():
            getattr(head, name)[2] = number
        with pytest.raises(CertificateError, match=f"'{name}'"):
            certify(head)


def test_rows_outside_warn_once_and_raise_when_strict() -> None:
    head = NormHead.layer_norm(24, (0.5, 10.0))
    inside = rows("gaussian", 1.0, 24).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(inside)
        head(rows("gaussian", 0.5, 24).float())
        head(rows("gaussian", 10.0, 24).float())
    with pytest.warns(DomainWarning, match="variance of a row' reaches 100"):
        head(inside * 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(inside * 10)
    head.strict = True
    for bad in (inside * 0.1, torch.ones(2, 24), inside + 1e4):
        with pytest.raises(DomainError, match=r"variance|standard deviations"):
            head(bad)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_raise(value: float) -> None:
    x = rows("gaussian", 1.0, 24, 3).float()
    x[1, 2] = value
    with pytest.raises(DomainError, match="NaN or infinity"):
        NormHead.layer_norm(24, (0.5, 10.0))(x)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"channels": 1}, "channels"),
        ({"channels": 2.5}, "channels"),
        ({"variance": (0.0, 1.0)}, "variance"),
        ({"variance": (2.0, 1.0)}, "variance"),
        ({"variance": (1.0, 1.0)}, "variance"),
        ({"variance": (0.1, math.inf)}, "variance"),
        ({"variance": (1e-36, 1.0)}, "range of torch.float32"),
        ({"variance": 3}, "variance"),
        ({"eps_norm": -1e-5}, "eps_norm"),
        ({"eps_norm": math.nan}, "eps_norm"),
        ({"offset": -1}, "offset"),
        ({"heads": 0}, "heads"),
        ({"heads": 65}, "heads"),
        ({"heads": 4, "eps": 1e-3}, "not both"),
        ({"eps": 0.0}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"kind": "batch"}, "kind"),
        ({"dtype": torch.float16}, "dtype"),
        ({"weight": torch.ones(3)}, "weight"),
        ({"bias": torch.full((8,), math.nan)}, "bias"),
        ({"bias": [0.0] * 8}, "bias"),
    ],
)
def test_bad_arguments(options: dict[str, object], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        NormHead.fit(**{"channels": 8, "variance": (0.1, 10.0), **options})


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, 7),
        torch.zeros(2, 8, dtype=torch.float64),
        torch.zeros(2, 8, dtype=torch.int64),
        ["0.0"] * 8,
        torch.ones(()),
    ],
)
def test_bad_inputs(x: object) -> None:
    with pytest.raises(ArgumentError):
        NormHead.layer_norm(8, (0.1, 10.0))(x)


def test_a_specification_is_valid_by_construction() -> None:
    with pytest.raises(ArgumentError, match="as many"):
        NormSpec((1.0,), (0.0, 1.0), (1.0,), 1e-5, 0.1, 1.0, 0.1)
    error, evaluation = fit_error(np.array([1.0]), np.array([0.0]), np.array([1.0]), 0.0, 0.5, 2.0, 2.0**-24, 4)
    assert error > 0.2 and 0 < evaluation < 1e-5
