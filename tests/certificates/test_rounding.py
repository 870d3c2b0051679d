"""The rounding model: what is assumed of the machine is measured on it, and what follows dominates measured errors."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.certificates.rounding import (
    EXP_ULPS,
    LEAST_ULPS,
    TINY,
    UNIT,
    assumptions,
    floor2,
    gamma,
    largest_mean,
    refuse_reduced_precision,
    signed_sums,
    softmax_rounding,
    unit,
    up,
)
from attnforge.errors import PrecisionError

LONG = np.longdouble
BOTH = (torch.float32, torch.float64)
# The exponential shows up as it is where the other slot takes the whole sum: below log(u/2).
DEEP = {torch.float32: (-87.0, -18.0), torch.float64: (-708.0, -40.0)}


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("slots", [2, 3, 8, 17, 33, 64, 300])
@pytest.mark.parametrize("along", [-1, -2])  # the runtime uses both, and torch has a kernel for each
def test_the_exponential_inside_softmax_is_as_accurate_as_assumed(dtype: torch.dtype, slots: int, along: int) -> None:
    lo, hi = DEEP[dtype]
    generator = torch.Generator().manual_seed(slots)
    x = (lo + (hi - lo) * torch.rand(60_000 // slots * 8, generator=generator, dtype=torch.float64)).to(dtype)
    logits = torch.full((len(x), slots), -1e30, dtype=dtype)
    logits[:, 0], logits[:, -1] = 0.0, x
    weights = torch.softmax(logits.transpose(-1, along).contiguous(), along).transpose(-1, along)
    assert bool((weights[:, 0] == 1).all()), "the first slot takes all, so the last one shows the exponential itself"
    exact = np.exp(x.double().numpy().astype(LONG))
    off = np.abs(weights[:, -1].double().numpy().astype(LONG) / exact - 1)
    assert float(off.max()) <= LEAST_ULPS * unit(dtype), "what files of version 0.1 assume of processors"


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_normalising_costs_what_is_assumed(dtype: torch.dtype) -> None:
    lo = {torch.float32: -18.0, torch.float64: -40.0}[dtype]
    x = torch.linspace(lo, 0, 200_001, dtype=torch.float64).to(dtype)
    weights = torch.softmax(torch.stack([x, torch.zeros_like(x)], -1), -1).double().numpy().astype(LONG)
    e = np.exp(x.double().numpy().astype(LONG))
    exact = np.stack([e / (1 + e), 1 / (1 + e)], -1)
    # exponential, one addition (in the sum), reciprocal, product
    assert float(np.abs(weights / exact - 1).max()) <= (LEAST_ULPS + 3) * unit(dtype) * (1 + 1e-6)


def exact_head(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and output in extended precision."""
    wide = logits.astype(LONG)
    weight = np.exp(wide - wide.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return weight, (weight * values).sum(-1)


@given(
    st.integers(2, 80),
    st.floats(0.1, 60.0),
    st.floats(-6.0, 6.0),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_the_rounding_lemma_dominates_what_torch_does(
    slots: int, reach: float, size: float, drowned: bool, seed: int
) -> None:
    """A5: logits that are exact numbers of the dtype, values of one sign or of both, sums that cancel or do not."""
    rng = np.random.default_rng(seed)
    for dtype in BOTH:
        u = unit(dtype)
        logits = torch.from_numpy(reach * rng.standard_normal((40, slots))).to(dtype)
        values = torch.from_numpy(10**size * (rng.standard_normal(slots) + (1e3 if drowned else 0))).to(dtype)
        found = (torch.softmax(logits, -1) @ values).double().numpy().astype(LONG)
        wide, value = logits.double().numpy(), values.double().numpy()
        weight, output = exact_head(wide, value.astype(LONG))
        gap = wide.max(-1, keepdims=True) - wide
        spread = np.abs(value - output[:, None]).astype(np.float64)
        bound = softmax_rounding(
            up(weight.astype(np.float64)), up(u * gap), np.broadcast_to(np.abs(value), wide.shape), up(spread), u,
            TINY[dtype],
        )  # fmt: skip
        assert bool((np.abs(found - output) <= bound).all())


@given(st.integers(2, 30), st.floats(0.1, 300.0), st.floats(-9.0, 2.7), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_rounding_lemma_dominates_any_error_of_the_logits(
    slots: int, reach: float, size: float, extreme: bool, seed: int
) -> None:
    """Errors from 1e-9 to 500 in the logits, all to one side or anywhere: the output moves by less than the bound."""
    rng, u = np.random.default_rng(seed), unit(torch.float64)
    wide, value = reach * rng.standard_normal((60, slots)), rng.standard_normal(slots)
    allowed = 10**size * rng.random((60, slots))
    weight, output = exact_head(wide, value.astype(LONG))
    for side in (-1.0, 1.0):
        push = np.sign(value - output[:, None]) * side if extreme else rng.uniform(-1, 1, wide.shape)
        _, moved = exact_head(wide.astype(LONG) + push * allowed, value.astype(LONG))
        spread, sizes = np.abs(value - output[:, None]).astype(np.float64), np.broadcast_to(np.abs(value), wide.shape)
        tight = up(weight.astype(np.float64)), up(allowed), sizes, up(spread)
        bound = softmax_rounding(*tight, u, TINY[torch.float64])
        assert bool((np.abs(moved - output) <= bound).all())
        assert bool((bound <= up(spread.max(-1) * (1 + 1e-12) + 1e-12)).all()), "never more than the farthest value"


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_largest_mean_is_the_largest(slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, size = rng.random((20, slots)) * rng.choice([0.1, 1.0, 5.0]), rng.random((20, slots))
    found = largest_mean(weight, size)
    for _ in range(30):  # anything that is allowed
        share = rng.random((20, slots)) * np.minimum(weight, 1.0)
        share /= np.maximum(1.0, share.sum(-1, keepdims=True))
        assert bool(((share * size).sum(-1) <= found).all())
    for row, top in enumerate(found):  # and it is reached: greedily, the largest first
        left, total = 1.0, 0.0
        for k in np.argsort(-size[row]):
            taken = min(left, weight[row, k], 1.0)
            left, total = left - taken, total + taken * size[row, k]
        assert total == pytest.approx(top, rel=1e-12)


def test_the_rounding_lemma_would_notice_a_coarser_exponential() -> None:
    """Weights that are off by a hundred units break the bound: it is not so loose that anything passes."""
    u, rng = unit(torch.float64), np.random.default_rng(0)
    wide, value = rng.standard_normal((500, 8)), rng.standard_normal(8)
    weight, output = exact_head(wide, value.astype(LONG))
    off = weight * (1 + 100 * u * np.sign(value - output[:, None]))
    off /= off.sum(-1, keepdims=True)
    gap = wide.max(-1, keepdims=True) - wide
    spread, size = np.abs(value - output[:, None]).astype(np.float64), np.broadcast_to(np.abs(value), wide.shape)
    bound = softmax_rounding(up(weight.astype(np.float64)), up(u * gap), size, up(spread), u, TINY[torch.float64])
    assert bool((np.abs((off * value).sum(-1) - output) > bound).any())


@given(st.floats(0, 1e300), st.integers(1, 64))
def test_up_is_an_upper_bound_after_so_many_roundings(x: float, steps: int) -> None:
    exact = Fraction(x) * (1 + Fraction(1, 2**53)) ** steps
    assert Fraction(float(up(x, steps))) >= exact
    assert float(up(x)) > x or x == 0


@given(st.integers(0, 10**7), st.sampled_from(BOTH))
def test_gamma_is_never_below_its_definition(terms: int, dtype: torch.dtype) -> None:
    k = Fraction(terms) * Fraction(unit(dtype))
    found = float(gamma(terms, unit(dtype)))
    assert found == float("inf") or Fraction(found) >= k / (1 - k)
    assert float(gamma(2.0**52, 2.0**-53)) == float("inf"), "when nothing is left of the precision"


def test_units() -> None:
    for dtype in BOTH:
        one = torch.ones((), dtype=dtype)
        assert one + unit(dtype) == 1 and one + unit(dtype) * 1.0000001 > 1
        assert torch.finfo(dtype).tiny == TINY[dtype] and UNIT[dtype] == torch.finfo(dtype).eps / 2
    assert any(f"{EXP_ULPS:g} u" in text for text in assumptions())


def test_reduced_precision_is_refused() -> None:
    x = torch.ones(2)
    refuse_reduced_precision(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(PrecisionError, match="autocast"):
        refuse_reduced_precision(x)
    before = torch.get_float32_matmul_precision()
    try:
        for level in ("high", "medium"):
            torch.set_float32_matmul_precision(level)
            with pytest.raises(PrecisionError, match="highest"):
                refuse_reduced_precision(x)
            assert refuse_reduced_precision(x.double()) is None, "float64 products are never reduced"
    finally:
        torch.set_float32_matmul_precision(before)


def _tree(terms: list[np.float32], order: np.random.Generator) -> float:
    """A float32 sum over a random binary tree."""
    parts = list(terms)
    while len(parts) > 1:
        i, j = sorted(order.choice(len(parts), 2, replace=False))
        parts[i] = np.float32(parts[i] + parts.pop(j))
    return float(parts[0])


@pytest.mark.parametrize("count", [1, 2, 3, 9, 33])
def test_sums_of_terms_with_known_signs_err_by_less_than_the_bound(count: int) -> None:
    rng, u = np.random.default_rng(count), unit(torch.float32)
    for _ in range(20):
        scale = 10.0 ** rng.uniform(-6, 1, count)
        weight, bias = (rng.normal(size=count) * scale).astype(np.float32), np.float32(rng.normal())
        low = rng.uniform(-1, 1, count)
        x = rng.uniform(low, low + rng.uniform(0, 1, count)).astype(np.float32)
        ends = np.minimum(low, x), np.maximum(low + 1, x)
        bound = signed_sums(weight.astype(float)[:, None], np.array([float(bias)]), *ends, u)
        exact = sum(map(lambda a, b: Fraction(float(a)) * Fraction(float(b)), weight, x), Fraction(float(bias)))
        for terms in ([*(weight * x), bias], sorted([*(weight * x), bias], key=lambda t: (t < 0, -abs(t)))):
            assert abs(Fraction(_tree(terms, rng)) - exact) <= Fraction(bound[0])
            chain = np.add.accumulate(np.array(terms, np.float32))[-1]
            assert abs(Fraction(float(chain)) - exact) <= Fraction(bound[0])


def test_the_bound_of_two_terms_is_reached_and_that_of_many_is_much_below_the_general_one() -> None:
    u, ones = unit(torch.float32), np.ones((2, 1))
    low = high = np.array([1.0, 2.0**-24])  # 1 + u is half way between two numbers: an addition errs by u
    assert u <= signed_sums(ones, np.zeros(1), low, high, u)[0] < 1.001 * u
    weight = np.where(np.arange(100) % 2, -1.5, 1.5)[:, None]
    found = signed_sums(weight, np.zeros(1), np.ones(100), np.ones(100), u)[0]
    assert found < 0.45 * gamma(100, u) * 150


def test_rounding_to_nearest_errs_by_half_a_unit_of_the_power_of_two_below() -> None:
    rng, u = np.random.default_rng(0), unit(torch.float32)
    x = np.abs(rng.normal(size=2000)) * 10.0 ** rng.uniform(-30, 30, 2000)
    assert (np.abs(x.astype(np.float32).astype(float) - x) <= u * floor2(x)).all()
    assert (np.abs(x.astype(np.float32).astype(float) - x) > 0.98 * u * floor2(x)).any()
    for many in (1, 2**20):  # cells: entry by entry, and with too many entries for that
        low = np.full((many, 3), 0.9)
        found = signed_sums(np.full((3, 1), 0.7), np.zeros(1), low, low, u)
        assert np.ptp(found) == 0 and (3.5 if many == 1 else 5.0) * u < found[0, 0] < (3.51 if many == 1 else 5.4) * u


def test_squares_of_extreme_numbers_are_not_lost() -> None:
    u = unit(torch.float64)
    for scale in (1e-200, 1e-170, 1e-150, 1e150, 1e170):
        weight, x = np.full((8, 1), scale), np.full(8, min(1.0, 1e200 / scale))
        assert signed_sums(weight, np.zeros(1), x, x, u)[0] >= 8 * scale * x[0] * u  # eight products alone
        assert signed_sums(np.ones((8, 1)), np.zeros(1), scale * x, scale * x, u)[0] >= 20 * scale * x[0] * u
