"""Kinks in one head of memory slots (A10): bounds, what is shipped, and the lower bound against heads that exist."""

from __future__ import annotations

import math
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
import torch

import attnforge as af
from attnforge.errors import ArgumentError, PrecisionError
from attnforge.heads.token.bound import lambert_upper
from attnforge.theorems.kinks import (
    PiecewiseLinear,
    affine_maximum,
    error_floor,
    identity_error,
    pieces_of,
    splice,
    warmest,
)

FUNCTIONS = (("abs", -1.0, 1.0), ("relu", -0.3, 5.0), ("hardtanh", -2.0, 2.0), ("relu6", -3.0, 9.0))


def points(head: af.AnchorHead) -> torch.Tensor:
    """The interval, most of it around the kinks."""
    near = torch.logspace(-14, 0, 1500, dtype=torch.float64)
    parts = [torch.linspace(head.lo, head.hi, 3001, dtype=torch.float64)]
    parts += [k + side * near for k in head.function.knots for side in (-1, 1)]
    return torch.cat(parts).clamp(head.lo, head.hi).to(head.dtype)


def worst(head: af.AnchorHead) -> float:
    y = points(head)
    return float((head(y).detach().double() - head.function.value(y.double())).abs().max())


@pytest.mark.parametrize(("guards", "reached"), [(15, 1e-19), (31, 1e-40), (63, 2e-84)])
def test_relu_of_33_65_and_129_slots_in_high_precision(guards: int, reached: float) -> None:
    """A10(b) for relu on [-1, 1] in 2 guards + 3 slots: the error is e^(-1.3 p) and less, where the paper has 1/p."""
    kappa, off = warmest(guards)
    sharpness = 0.07 / off  # kink and lines then err alike
    stated = PiecewiseLinear(-1.0, 1.0, (0.0,), ((0.0, 0.0), (1.0, 0.0))).bound(sharpness, guards, kappa)
    with mp.workdps(240):  # logits of 1e83 whose differences matter to 1e-84
        k, beta = mp.mpf(kappa) / 4, mp.mpf(sharpness)
        anchors = [mp.mpf(2 * i - 1) for i in range(-guards, guards + 2)]
        weights = [mp.exp(-k * x * x) for x in anchors]
        total = mp.log(sum(weights))
        mean = sum(2 * k * x * w for x, w in zip(anchors, weights, strict=True)) / sum(weights)
        most = mp.mpf(0)
        for y in [mp.mpf(t) for t in (-1, "-0.3", "0.3", 1)] + [t / (2 * beta) for t in (-2.0, -1.278, 0.5, 1.278)]:
            slots = [(total + mean * y, mp.mpf(0))] + [(2 * k * x * y - k * x * x + 2 * beta * y, x) for x in anchors]
            largest = max(logit for logit, _ in slots)
            shares = [mp.exp(logit - largest) for logit, _ in slots]
            head = sum(w * x for w, (_, x) in zip(shares, slots, strict=True)) / sum(shares)
            most = max(most, abs(head - max(y, 0)))
        assert most <= stated < 3 * most and most < reached and mp.log(most) < -1.3 * (2 * guards + 3)


@pytest.mark.parametrize("guards", [1, 2, 4, 7, 10])
def test_lines_are_as_right_as_stated_in_high_precision(guards: int) -> None:
    kappa, stated = warmest(guards)
    with mp.workdps(40):
        most = mp.mpf(0)
        for y in (mp.mpf(0), mp.mpf("0.1"), mp.mpf("0.25"), mp.mpf("0.4"), mp.mpf("0.5")):
            weights = [mp.exp(-mp.mpf(kappa) * (y - k) ** 2) for k in range(-guards, guards + 2)]
            head = sum(w * k for w, k in zip(weights, range(-guards, guards + 2), strict=True)) / sum(weights)
            most = max(most, abs(head - y))
        assert 0.02 * stated < float(most) <= stated
    assert identity_error(guards, kappa) == stated and math.isinf(identity_error(guards, 5.0))


@pytest.mark.parametrize(("name", "lo", "hi"), FUNCTIONS)
def test_certified_and_close_to_what_the_lemma_states(name: str, lo: float, hi: float) -> None:
    for eps in (1e-2, 1e-5, 1e-7):
        head = splice(name, lo, hi, eps=eps)
        assert worst(head) <= head.bound <= eps
    kappa, _ = warmest(5)
    sharp = splice(name, lo, hi, sharpness=3e3, guards=5)
    stated = pieces_of(sharp.function, lo, hi).bound(3e3, 5, kappa)
    assert worst(sharp) <= sharp.bound <= 1.01 * stated


def test_slots_grow_with_the_logarithm_of_the_error() -> None:
    sizes = [splice("relu", -1, 1, eps=10.0**-k).size for k in range(2, 8)]
    assert sizes[0] >= 9 and sizes[-1] <= 19 and max(np.diff(sizes)) <= 2
    cold = af.AnchorHead.fit("relu", -1, 1, anchors=sizes[-1], temperature="cold", dtype=torch.float64)
    assert cold.bound > 1e5 * splice("relu", -1, 1, eps=1e-7).bound


def test_rounding_is_part_of_the_claim() -> None:
    assert worst(single := splice("abs", -1, 1, eps=1e-3, dtype=torch.float32)) <= single.bound <= 1e-3
    with pytest.raises(PrecisionError, match="square root of a roundoff") as raised:
        splice("hardtanh", -2, 2, eps=1e-6, dtype=torch.float32)
    reachable = raised.value.reachable
    assert reachable is not None and 1e-6 < reachable < 0.1


def test_a_changed_table_is_found_out(tmp_path: Path) -> None:
    head = splice("abs", -1, 1, eps=1e-4)
    head.save(tmp_path / "abs.safetensors")
    again = af.load(tmp_path / "abs.safetensors")
    assert again.bound == head.bound
    with torch.no_grad():
        head.group.M_V[0, 3, 0] += 0.5
    assert head.recertify().bound > 100 * again.bound


@pytest.mark.parametrize("sharpness", [10.0, 1e3, 1e6])
def test_no_head_beats_the_lower_bound(sharpness: float) -> None:
    for guards in (2, 6):
        head = splice("abs", -1, 1, sharpness=sharpness, guards=guards)
        weights = head.weights_in_float64()
        floor = error_floor(2.0, float(np.ptp(weights.slope)), float(np.abs(weights.value).max()), 1.0, 1.0)
        assert 0 < floor <= worst(head)
    most = math.sqrt(2) * 3 + 1
    floor = error_floor(2.0, 1e6, 3.0, 1.0, 1.0)
    assert floor * math.log(most / floor) ** 2 == pytest.approx(0.2605 * 2 / 1e6, rel=1e-3)


@pytest.mark.parametrize("span", [1e100, 1e262, 1e290, 1e300, 1e308])
def test_the_lower_bound_is_never_above_the_lemma(span: float) -> None:
    floor = error_floor(1.0, span, 1.0, 1.0, 1.0)
    with mp.workdps(30):
        most = mp.sqrt(2) + 1
        stated = (mp.pi / 4) ** 2 / (1 + mp.e) * mp.pi / 2 / mp.mpf(span)
        assert floor == 0 or 0.99 * stated < floor * mp.log(most / floor) ** 2 <= stated
    assert floor > 0 or span > 1e290


def test_computed_lines_are_no_better_than_the_lemma() -> None:
    rng = np.random.default_rng(0)
    with mp.workdps(40):
        for _ in range(60):
            kappa, guards = float(10.0 ** rng.uniform(-1.3, 0.47)), int(rng.integers(1, 40))
            if not math.isfinite(found := identity_error(guards, kappa)):
                continue
            k, rho = mp.mpf(kappa), mp.exp(-(mp.pi**2) / mp.mpf(kappa))
            terms = [mp.exp(-k * i * (i - 1)) for i in range(guards + 1, guards + 120)]
            tail = 2 / (1 - 2 * sum(terms)) * sum((guards + 2 + i) * term for i, term in enumerate(terms))
            assert found >= 2 * mp.pi / k * rho * (1 + mp.mpf("1.1") * rho) + tail


@pytest.mark.parametrize(
    ("count", "dim", "dtype"), [(1, 2, "float64"), (2, 1, "float32"), (5, 2, "float64"), (9, 4, "float64")]
)
def test_maxima_of_affine_functions_keep_their_bound_where_functions_tie(count: int, dim: int, dtype: str) -> None:
    rng, kind = np.random.default_rng(count), getattr(torch, dtype)
    a, c = rng.normal(size=(count, dim)), rng.normal(size=count) / 3
    low, high = -1 - rng.uniform(size=dim), rng.uniform(size=dim)
    for eps in (1e-1, 1e-2) if dtype == "float32" else (1e-1, 1e-5):
        top = affine_maximum(a, c, low, high, eps=eps, dtype=kind)
        x = rng.uniform(low, high, size=(4000, dim))
        for _ in range(3):  # towards where the two largest tie, and a few widths of the kink beside it
            first, second = np.argsort(x @ a.T + c, 1)[:, :-3:-1].T if count > 1 else (np.zeros(4000, int),) * 2
            across, gap = a[first] - a[second], ((x @ a.T + c)[range(4000), first] - (x @ a.T + c)[range(4000), second])
            square = (across**2).sum(1) + 1e-300
            x = (x - ((gap - eps * rng.uniform(0, 4, 4000)) / square)[:, None] * across).clip(low, high)
        X = torch.from_numpy(x.clip(low + 1e-6, high - 1e-6)).to(kind)
        exact = (X.double().numpy() @ a.T + c).max(1)
        error = np.abs(top.layer(X).detach().double().numpy()[:, 0] - exact).max()
        assert error <= top.bound <= eps and top.exact <= top.bound
        assert error > 0.02 * eps or count == 1, "the kinks were looked at"
        assert top.slots == dim * count * (top.slots // (dim * count)) and top.exact > lambert_upper(count) * eps / 10
    table = next(p for name, p in top.layer.named_parameters() if name.endswith("M_V"))
    with torch.no_grad():
        table += 1.0
    assert np.abs(top.layer(X).detach().double().numpy()[:, 0] - exact).max() > top.bound


@pytest.mark.parametrize(
    ("size", "width", "dtype"),
    [(1e-42, 1.0, "float32"), (1e-310, 1.0, "float64"), (1e20, 1e38, "float32"), (1.0, 1e-35, "float32")],
)
def test_maxima_at_the_ends_of_a_dtype_are_right_or_refused(size: float, width: float, dtype: str) -> None:
    rng, ends = np.random.default_rng(0), width * np.ones(2)
    a, c = rng.normal(size=(3, 2)) * size / width, rng.normal(size=3) * size
    try:
        top = affine_maximum(a, c, -ends, ends, eps=0.1 * size, dtype=getattr(torch, dtype))
    except PrecisionError:
        return
    x = torch.from_numpy(0.9 * width * rng.uniform(-1, 1, size=(3000, 2))).to(getattr(torch, dtype))
    error = np.abs(top.layer(x).detach().double().numpy()[:, 0] - (x.double().numpy() @ a.T + c).max(1)).max()
    assert error <= top.bound


def test_maxima_that_cannot_be_are_refused() -> None:
    one = np.ones(1)
    with pytest.raises(ArgumentError, match="expected shapes"):
        affine_maximum(np.ones((2, 2)), one, -one, one, eps=1e-3)
    with pytest.raises(ArgumentError, match="finite"):
        affine_maximum(np.full((1, 1), np.nan), one, -one, one, eps=1e-3)
    with pytest.raises(PrecisionError, match="cannot be reached for this maximum") as raised:
        affine_maximum(np.array([[1.0], [-1.0]]), np.zeros(2), -one, one, eps=1e-12)
    assert raised.value.reachable is not None and 1e-10 < raised.value.reachable < 0.1


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="not piecewise linear"):
        splice("gelu", -1, 1, eps=1e-3)
    with pytest.raises(ArgumentError, match="kink inside"):
        splice("relu", 1, 2, eps=1e-3)
    with pytest.raises(ArgumentError, match="not both"):
        splice("relu", -1, 1, eps=1e-3, guards=3)
    with pytest.raises(ArgumentError, match="give eps, or sharpness"):
        splice("relu", -1, 1)
    assert math.isinf(PiecewiseLinear(-1.0, 1.0, (0.0,), ((0.0, 0.0), (1.0, 0.0))).bound(0.1, 3, 1.0))
