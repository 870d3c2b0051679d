"""The bound of anchor heads against 60 digits: for heads as fitted, and for whatever else the weights may hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

import attnforge as af
from attnforge.functions import registry as F
from attnforge.heads.anchor.bound import AnchorWeights, anchor_bound
from attnforge.heads.anchor.fit import HeadShape
from attnforge.heads.anchor.potential import Potential
from laws import BITS, FUNCTIONS

SPANS = {"gelu": (-6.0, 5.0), "sin": (-3.0, 4.0), "exp": (-4.0, 1.0), "log": (0.05, 20.0), "relu": (-2.0, 3.0)}
ROUND = {torch.float32: np.float32, torch.float64: np.float64}


def exact(head: AnchorWeights, y: float) -> arb:
    """The head at one point in 60 digits, straight from the definition of softmax."""
    q = arb(y) - arb(head.centre)
    logits = [arb(a) * q + arb(b) for a, b in zip(head.slope.tolist(), head.offset.tolist(), strict=True)]
    shift = max(logits, key=float)
    weights = [(v - shift).exp() for v in logits]
    total = sum(weights, arb(0))
    read = sum((w * arb(v) for w, v in zip(weights, head.value.tolist(), strict=True)), arb(0)) / total
    return read + arb(head.skip[0]) * arb(y) + arb(head.skip[1])


def edges(name: str, lo: float, hi: float, cells: int = 64) -> np.ndarray:
    return np.unique(np.concatenate([np.linspace(lo, hi, cells + 1), [k for k in F.get(name).knots if lo < k < hi]]))


def places(lo: float, hi: float, kind: type, seed: int = 0, count: int = 40) -> np.ndarray:
    rng = np.random.default_rng(seed)
    y = np.concatenate([[lo, hi], rng.uniform(lo, hi, count), lo + (hi - lo) * np.exp2(-rng.uniform(0, 40, 6))])
    y = y.astype(kind).astype(np.float64)
    return y[(y >= lo) & (y <= hi)]


def assert_sound(head: AnchorWeights, name: str, lo: float, hi: float, dtype: torch.dtype, seed: int = 0) -> float:
    """|head - fn| in exact arithmetic and as torch evaluates it, both against the bound; returns the bound."""
    fn = F.get(name)
    found = anchor_bound(head, fn, edges(name, lo, hi), dtype)
    assert math.isfinite(found.bound), "otherwise there is nothing to test"
    kind = ROUND[dtype]
    y = places(lo, hi, kind, seed)
    shape = HeadShape(Potential("square"), len(head.slope), 0, 1.0)
    module = af.AnchorHead(fn, lo, hi, head, shape, np.zeros(len(head.slope)), dtype)
    with torch.no_grad():
        evaluated = module.core(torch.from_numpy(y).to(dtype)).double().tolist()
    with ctx.workprec(BITS):
        for at, shown in zip(y.tolist(), evaluated, strict=True):
            truth = FUNCTIONS[name](arb(at))
            assert abs(exact(head, at) - truth) <= arb(found.bound), f"exact head of {name} at {at!r}: {found}"
            assert abs(arb(shown) - truth) <= arb(found.bound), f"evaluated head of {name} at {at!r}: {found}"
    return found.bound


def rounded(head: AnchorWeights, dtype: torch.dtype) -> AnchorWeights:
    """The numbers that the dtype stores."""
    kind = ROUND[dtype]
    wide = lambda x: np.asarray(x).astype(kind).astype(np.float64)  # noqa: E731
    skip = (float(kind(head.skip[0])), float(kind(head.skip[1])))
    return AnchorWeights(wide(head.slope), wide(head.offset), wide(head.value), float(kind(head.centre)), skip)


@pytest.mark.parametrize("dtype", ROUND, ids=str)
@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("anchors", [2, 9, 32])
def test_fitted_heads(name: str, anchors: int, dtype: torch.dtype) -> None:
    lo, hi = SPANS[name]
    head = af.AnchorHead.fit(name, lo, hi, anchors=anchors, dtype=dtype)
    assert assert_sound(head.weights_in_float64(), name, lo, hi, dtype) <= 2 * head.bound


@given(
    st.sampled_from(sorted(SPANS)),
    st.sampled_from(sorted(ROUND, key=str)),
    st.integers(2, 24),
    st.floats(-12.0, 0.5),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_perturbation_of_a_fitted_head(name: str, dtype: torch.dtype, anchors: int, size: float, seed: int) -> None:
    """Fine-tuning may move every number: the bound follows."""
    lo, hi = SPANS[name]
    rng, amount = np.random.default_rng(seed), 10.0**size
    fitted = af.AnchorHead.fit(name, lo, hi, anchors=anchors, dtype=dtype, potential="square", kappa=0.3)
    head = fitted.weights_in_float64()
    moved = replace(
        head,
        slope=head.slope + amount * rng.standard_normal(anchors),
        offset=head.offset + amount * rng.standard_normal(anchors),
        value=head.value * (1 + amount * rng.standard_normal(anchors)),
        skip=(head.skip[0] + amount * rng.standard_normal(), head.skip[1] + amount * rng.standard_normal()),
    )
    assert assert_sound(rounded(moved, dtype), name, lo, hi, dtype, seed % 1000) > 0


@given(
    st.sampled_from(sorted(SPANS)),
    st.sampled_from(sorted(ROUND, key=str)),
    st.integers(1, 40),
    st.floats(-2.0, 2.5),
    st.floats(-3.0, 4.0),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, derandomize=True, deadline=None)
def test_weights_that_nobody_fitted(
    name: str, dtype: torch.dtype, anchors: int, steep: float, large: float, skip: bool, seed: int
) -> None:
    """Random slopes, offsets, values, centre and skip: the bound is large, and holds."""
    rng, (lo, hi) = np.random.default_rng(seed), SPANS[name]
    head = AnchorWeights(
        10**steep * rng.standard_normal(anchors),
        10**steep * rng.standard_normal(anchors),
        10**large * rng.standard_normal(anchors),
        float(rng.choice([0.0, 0.5 * (lo + hi), 7.0])),
        (float(rng.standard_normal()), float(rng.standard_normal())) if skip else (0.0, 0.0),
    )
    assert assert_sound(rounded(head, dtype), name, lo, hi, dtype, seed % 1000) > 0


@given(st.integers(100, 400), st.floats(0.3, 40.0), st.floats(-10, -0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=12, derandomize=True, deadline=None)
def test_many_anchors_where_only_a_window_is_looked_at(count: int, kappa: float, size: float, seed: int) -> None:
    lo, hi = SPANS["gelu"]
    rng, amount = np.random.default_rng(seed), 10.0**size
    for dtype in ROUND:
        cold = dict(temperature="cold", kappa=max(1.0, kappa))
        head = af.AnchorHead.fit("gelu", lo, hi, anchors=count, dtype=dtype, **cold).weights_in_float64()
        moved = replace(
            head,
            offset=head.offset + amount * rng.standard_normal(count),
            value=head.value + amount * rng.standard_normal(count),
        )
        assert assert_sound(rounded(moved, dtype), "gelu", lo, hi, dtype, seed % 1000) > 0


def test_a_huge_value_outside_the_window_is_not_forgotten() -> None:
    """What is dropped counts with the largest value of the table, however far away that is."""
    count = 300
    at = np.linspace(-6.0, 5.0, count)
    head = AnchorWeights(2 * at * 400, -at * at * 400, np.where(np.arange(count) == 0, 1e24, at), 0.0)
    with ctx.workprec(BITS):
        error = abs(exact(head, 4.0) - FUNCTIONS["gelu"](arb(4.0)))
        assert error <= arb(anchor_bound(head, F.get("gelu"), edges("gelu", -6.0, 5.0), torch.float64).bound)


@pytest.mark.parametrize(("count", "kappa"), [(4096, 2.0), (512, 200.0)])
def test_float32_that_cannot_tell_neighbours_apart(count: int, kappa: float) -> None:
    """Errors of the logits reach 1 and more, so that float32 mixes up anchors; the bound says by how much."""
    lo, hi = -25.0, 25.0
    head = af.AnchorHead.fit("identity", lo, hi, anchors=count, temperature="cold", kappa=kappa)
    spacing, split = (hi - lo) / (count - 1), head.certificate.by_source()
    y = torch.linspace(lo, hi, 20_011)
    with torch.no_grad():
        error = float((head.core(y).double() - y.double()).abs().max())
    assert error <= head.bound < 3 * spacing and split["rounding"] > 2 * split["interpolation"]
    fine = af.AnchorHead.fit("identity", lo, hi, anchors=count, temperature="cold", kappa=kappa, dtype=torch.float64)
    assert fine.bound < 0.55 * spacing, "in float64 the theorem's half spacing holds"


def test_the_bound_is_tight_where_interpolation_dominates() -> None:
    head = af.AnchorHead.fit("gelu", -8, 8, anchors=24, dtype=torch.float64)
    assert head.measured is not None and head.measured <= head.bound <= 1.02 * head.measured


def test_relative_bounds_divide_by_the_function() -> None:
    fn, weights = F.get("exp"), af.AnchorHead.fit("exp", -4, 1, anchors=12, dtype=torch.float64).weights_in_float64()
    absolute = anchor_bound(weights, fn, edges("exp", -4.0, 1.0), torch.float64)
    relative = anchor_bound(weights, fn, edges("exp", -4.0, 1.0), torch.float64, relative=True)
    assert absolute.bound / math.exp(1) <= relative.bound <= absolute.bound / math.exp(-4) * 1.1
    with ctx.workprec(BITS):
        for y in places(-4.0, 1.0, np.float64):
            truth = arb(float(y)).exp()
            assert abs(exact(weights, float(y)) - truth) / truth <= arb(relative.bound)
    zero = anchor_bound(weights, F.get("sin"), edges("sin", -4.0, 1.0), torch.float64, relative=True)
    assert zero.bound == math.inf, "nothing is relatively near to 0"


def test_float32_bounds_hold_the_float32_rounding() -> None:
    weights = af.AnchorHead.fit("sin", -3, 4, anchors=24, dtype=torch.float32).weights_in_float64()
    cells = edges("sin", -3.0, 4.0)
    fine, coarse = (anchor_bound(weights, F.get("sin"), cells, dtype) for dtype in (torch.float64, torch.float32))
    assert coarse.rounding > 1e5 * fine.rounding and coarse.bound > fine.bound
    assert fine.bound >= fine.interpolation + fine.rounding


@pytest.mark.parametrize("power", [50, -50])
def test_bounds_scale_with_lengths_whose_powers_leave_float64(power: int) -> None:
    """sqrt(4^k y) = 2^k sqrt(y): the same head in another unit of length has 2^k times the bound, nothing less."""
    head = af.AnchorHead.fit("sqrt", 1.0, 10.0, anchors=12, dtype=torch.float64)
    group = head.group
    slope, offset = group.M_K.detach()[0].numpy().T
    centre = -float(group.b_Q.detach()[0, 0])
    a, b = float(head.layer.S.detach()[0, 0]), float(head.layer.s.detach()[0])
    plain = AnchorWeights(slope, offset, head.values.numpy(), centre, (a, b))
    skip = a * 2.0**-power, b * 2.0**power
    far = AnchorWeights(slope * 4.0**-power, offset, plain.value * 2.0**power, centre * 4.0**power, skip)
    assert head.bound is not None
    ends = np.linspace(1.0, 10.0, 65)
    near = anchor_bound(plain, F.get("sqrt"), ends, torch.float64)
    there = anchor_bound(far, F.get("sqrt"), ends * 4.0**power, torch.float64)
    assert near.bound < 2 * head.bound
    assert math.isfinite(there.bound) and there.bound == pytest.approx(near.bound * 2.0**power, rel=1e-6)
    y = np.linspace(1.0, 10.0, 33)
    with ctx.workprec(BITS):
        found = max(abs(exact(far, float(at)) - arb(float(at)).sqrt()) for at in y * 4.0**power)
    assert float(found) <= there.bound


def test_a_target_without_values_costs_no_hundred_thousand_cells() -> None:
    fn = F.get("expr: sqrt(1 - 1/y)")
    weights = AnchorWeights(np.array([-1.0, 1.0]), np.zeros(2), np.array([0.0, 1.0]))
    found = anchor_bound(weights, fn, np.linspace(1 - 1e-6, 3.0, 65), torch.float32)
    assert math.isinf(found.bound) and found.cells < 5000
