"""Gate heads: sound for every float, tight, sharp where the lemma says so, honest about weights that have changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.census import purity
from attnforge.certificates.certified import CertifiedModule, certify, check, load
from attnforge.certificates.rounding import unit
from attnforge.errors import ArgumentError, CertificateError, DomainError, DomainWarning, PrecisionError
from attnforge.heads.construction import pack, self_layer
from attnforge.heads.gate.bound import KINK
from attnforge.heads.gate.construction import gate_bound, gate_spec, sharpness_for
from attnforge.heads.gate.head import GateHead
from attnforge.heads.gate.target import GATES

DIGITS = 200  # bits of the reference: 60 decimal digits
XS, YS = [-2.0, -1.0, 0.3, 1.0, 2.0], [0.0, 1.0, -1.0, 2.0, 2.5]


def line_through(y: arb) -> arb:
    at = next((i for i in range(1, 4) if y < XS[i]), 4)
    x0, x1, y0, y1 = (arb(v) for v in (XS[at - 1], XS[at], YS[at - 1], YS[at]))
    return y0 + (y - x0) * (y1 - y0) / (x1 - x0)


@dataclass(frozen=True)
class Case:
    """A gate, its interval, its kinks, and the truth at 60 digits."""

    name: str
    lo: float
    hi: float
    truth: Callable[..., arb]
    kinks: tuple[float, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    tight: float = 8.0

    def fit(self, **options: Any) -> GateHead:
        return GateHead.fit(self.name, self.lo, self.hi, **self.parameters, **options)

    def __str__(self) -> str:
        return self.name


ONE = arb(1)
CASES = [
    Case("relu", -8, 8, lambda y: y.max(0), (0.0,)),
    Case("ramp", -3, 2.5, lambda y: y.max(-1.3).min(0.7), (-1.3, 0.7), {"a": -1.3, "b": 0.7}),
    Case("abs", -1, 3, lambda y: abs(y), (0.0,)),
    Case("leaky_relu", -5, 5, lambda y: y.max(0) + arb(0.2) * y.min(0), (0.0,), {"slope": 0.2}),
    Case("hard_tanh", -3, 3, lambda y: y.max(-1).min(1), (-1.0, 1.0)),
    Case("piecewise_linear", -2, 2, line_through, (-1.0, 0.3, 1.0), {"xs": XS, "ys": YS}),
    Case("silu", -8, 8, lambda y: y / (1 + (-y).exp())),
    Case("sigmoid", -20, 20, lambda y: ONE / (1 + (-y).exp())),
    Case("tanh", -9, 9, lambda y: y.tanh()),
    Case("max", -2, 3, lambda x, y: x.max(y)),
    Case("min", -10, 10, lambda x, y: x.min(y)),
]
SINGLE = [case for case in CASES if case.name not in ("max", "min")]
DTYPES = [torch.float32, torch.float64]


def neighbours(y: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """The points and the floats on both sides of them, inside the interval."""
    up, down = (torch.nextafter(y, torch.full_like(y, end)) for end in (math.inf, -math.inf))
    inside = torch.cat([y, up, down])
    return inside[(inside.double() >= lo) & (inside.double() <= hi)]


def adversarial(head: GateHead, kinks: tuple[float, ...], count: int) -> tuple[torch.Tensor, ...]:
    """Points of the whole interval, of the kinks on the scale of 1/beta, the extremes, and all their neighbours."""
    lo, hi = head.lo, head.hi
    steep = head.sharpness or 1.0
    steps = torch.cat([torch.linspace(-60, 60, count), torch.linspace(-3, 3, count)]).double() / steep
    spread = torch.linspace(lo, hi, 2 * count, dtype=torch.float64)
    if len(head.box.names or ()) == 2:
        generator = torch.Generator().manual_seed(3)
        x = lo + (hi - lo) * torch.rand(6 * count, generator=generator, dtype=torch.float64)
        y = lo + (hi - lo) * torch.rand(6 * count, generator=generator, dtype=torch.float64)
        y[: 4 * count] = (x[: 4 * count] + steps.repeat(2)).clamp(lo, hi)
        x[-4:], y[-4:] = torch.tensor([lo, lo, hi, hi]), torch.tensor([lo, hi, lo, hi])
        return x.to(head.dtype), y.to(head.dtype)
    points = torch.cat([spread, *(kink + steps for kink in kinks), torch.tensor([lo, hi, 0.0, *kinks])])
    return (neighbours(points.clamp(lo, hi).to(head.dtype), lo, hi),)


def measured(head: GateHead, case: Case, count: int = 1500) -> float:
    """The largest error found, at 60 digits; rounded down."""
    points = adversarial(head, case.kinks, count)
    with torch.no_grad():
        out = head(*points)
    columns = [p.double().tolist() for p in points]
    saved, ctx.prec = ctx.prec, DIGITS
    try:
        found = zip(out.double().tolist(), *columns, strict=True)
        return max(float(abs(arb(got) - case.truth(*map(arb, at))).lower()) for got, *at in found)
    finally:
        ctx.prec = saved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bound_is_sound_and_tight(case: Case, dtype: torch.dtype) -> None:
    head = case.fit(dtype=dtype)
    worst = measured(head, case)
    assert head.bound is not None and worst <= head.bound <= case.tight * worst


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_worth_reaching(dtype: torch.dtype) -> None:
    u = unit(dtype)
    assert GateHead.relu(-8, 8, dtype=dtype).bound <= 0.1 * u * 8, "the kink costs less than a rounding"
    assert GateHead.ramp(-1, 1, dtype=dtype).bound <= 6 * u
    assert GateHead.abs(-8, 8, dtype=dtype).bound <= 0.2 * u * 8
    assert GateHead.sigmoid(-30, 30, dtype=dtype).bound <= 4.7 * u, "two exponentials of 3 u"
    assert GateHead.tanh(-30, 30, dtype=dtype).bound <= 7.3 * u
    assert GateHead.max(-1, 1, dtype=dtype).bound <= 3.1 * u


def test_every_gate_has_a_case() -> None:
    assert {case.name for case in CASES} == set(GATES)


@settings(max_examples=60, deadline=None)
@given(y=st.floats(-30, 30), a=st.floats(-10, 10), width=st.floats(1e-6, 10), beta=st.floats(0.01, 1e4))
def test_lemma_b2_holds_for_every_real_y(y: float, a: float, width: float, beta: float) -> None:
    saved, ctx.prec = ctx.prec, DIGITS
    try:
        low, high, point, rate = arb(a), arb(a) + arb(width), arb(y), arb(beta)
        slots = [(low, (rate * (low - point)).exp()), (point, arb(1)), (high, (rate * (point - high)).exp())]
        head = sum((v * w for v, w in slots), arb(0)) / sum((w for _, w in slots), arb(0))
        constant = (arb(-1).exp()).lambertw()
        assert not abs(head - point.max(low).min(high)) > constant / rate
        assert abs(constant - KINK) < 1e-15
    finally:
        ctx.prec = saved


def test_lemma_b1_is_sharp() -> None:
    head = GateHead.relu(-4, 4, sharpness=8.0, dtype=torch.float64)
    at = torch.tensor([(1 + KINK) / 8], dtype=torch.float64)
    assert (at - head(at)).item() >= 0.9999999 * KINK / 8
    assert head.bound <= 1.01 * KINK / 8


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_interval_any_sharpness(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from([case for case in SINGLE if case.name != "piecewise_linear"]))
    scale = 10.0 ** data.draw(st.integers(-3, 3))
    lo = data.draw(st.floats(-3, 2)) * scale
    hi = lo + data.draw(st.floats(0.01, 3)) * scale
    dtype = data.draw(st.sampled_from(DTYPES))
    exact = gate_spec(case.name, 1.0, **case.parameters).sharpness is None
    options = {} if exact else {"sharpness": data.draw(st.one_of(st.none(), st.floats(1e-2, 1e8)))}
    head = GateHead.fit(case.name, lo, hi, dtype=dtype, **options, **case.parameters)
    changed = Case(case.name, lo, hi, case.truth, case.kinks, case.parameters)
    assert measured(head, changed, 150) <= head.bound


def test_a_weight_that_rounds_to_one_still_owes_what_the_others_weigh() -> None:
    """Far out, silu(y) and y differ by less than a rounding, and the head gives y: the bound knows both."""
    case = Case("silu", 50, 150, CASES[6].truth)
    head = case.fit()
    worst = measured(head, case, 100)
    assert 0 < worst <= head.bound < 1e-19


@pytest.mark.parametrize("case", [case for case in CASES if case.kinks or case.name in ("max", "min")], ids=str)
def test_eps_chooses_the_smallest_power_of_two(case: Case) -> None:
    bounds = []
    for eps in (1e-1, 1e-3, 2e-5):
        head = case.fit(eps=eps)
        assert head.bound <= eps and head.sharpness is not None
        assert gate_bound(case.name, case.lo, case.hi, head.sharpness / 2, **case.parameters) > eps
        bounds.append(head.bound)
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1]


def test_what_cannot_be_reached_says_what_can() -> None:
    with pytest.raises(PrecisionError, match="float64") as caught:
        GateHead.ramp(-1, 1, eps=1e-9)
    assert caught.value.reachable is not None
    assert GateHead.ramp(-1, 1, eps=1.001 * caught.value.reachable).bound <= 1.001 * caught.value.reachable
    with pytest.raises(PrecisionError) as caught:
        GateHead.silu(-8, 8, eps=1e-9)
    assert caught.value.reachable == GateHead.silu(-8, 8).bound
    assert GateHead.relu(-1, 1, eps=1e-12).bound <= 1e-12, "a relu is exact but for its kink"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_equals_loop(case: Case) -> None:
    head = case.fit()
    points = [p[:24].reshape(2, 3, 4) for p in adversarial(head, case.kinks, 200)]
    together = head(*points)
    assert together.shape == (2, 3, 4)
    for index in np.ndindex(2, 3, 4):
        alone = head(*(p[index] for p in points))
        assert alone.shape == () and abs(alone - together[index]).item() <= 2 * head.bound
    assert head(*(p[:0] for p in points)).shape == (0, 3, 4)


def test_a_million_points_in_chunks_equal_a_thousand() -> None:
    head = GateHead.ramp(-1, 1)
    y = torch.linspace(-3, 3, 1_200_000)
    with torch.no_grad():
        assert torch.equal(head(y)[:1000], head(y[:1000]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_bits_are_loaded_bits(case: Case, tmp_path: Path) -> None:
    head = case.fit(dtype=torch.float64)
    head.save(tmp_path / "gate.safetensors")
    again = load(tmp_path / "gate.safetensors")
    points = adversarial(head, case.kinks, 100)
    assert isinstance(again, GateHead) and again.certificate == head.certificate
    assert torch.equal(again(*points), head(*points))
    assert (again.name, again.sharpness, again.box) == (head.name, head.sharpness, head.box)
    assert check(tmp_path / "gate.safetensors").bound == head.bound
    assert json.loads(json.dumps(head.config())) == head.config()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    soft = {} if case.fit().sharpness is None else {"sharpness": 3.0}
    head = case.fit(dtype=torch.float64, **soft)
    points = [p.clone().requires_grad_() for p in head.box.sample(5, seed=1).unbind(-1)]
    assert torch.autograd.gradcheck(lambda *inputs: head.core(*inputs), points)
    names = [name for name, _ in head.named_parameters()]
    weights = [p.detach().clone().requires_grad_() for p in head.parameters()]

    def of_weights(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(head, dict(zip(names, given, strict=True)), tuple(p.detach() for p in points))

    assert torch.autograd.gradcheck(of_weights, weights)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_makes_the_certificate_stale_and_certify_renews_it(case: Case) -> None:
    head = case.fit()
    before = head.bound
    points = adversarial(head, case.kinks, 50)
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
    (head(*points) ** 2).mean().backward()
    optimiser.step()
    with pytest.raises(CertificateError, match="stale"):
        _ = head.bound
    after = certify(head).bound
    assert measured(head, case, 400) <= after and before < after < 0.2 * max(abs(case.lo), abs(case.hi), 2.5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_changing_the_dtype_makes_the_certificate_stale(case: Case) -> None:
    head = case.fit().to(torch.float64)
    with pytest.raises(CertificateError, match="stale"):
        _ = head.certificate
    assert certify(head).dtype == "float64"
    assert measured(head, case, 400) <= head.bound


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sabotage_is_noticed_and_bounded(data: st.DataObject) -> None:
    """Any weight moved by any amount: the new certificate is sound, and the old one is never silently kept."""
    case = data.draw(st.sampled_from(CASES))
    head = case.fit(dtype=data.draw(st.sampled_from(DTYPES)))
    _, weight = data.draw(st.sampled_from(sorted(head.named_parameters(), key=lambda pair: pair[0])))
    size = 10.0 ** data.draw(st.integers(-7, 0))
    with torch.no_grad():
        weight.view(-1)[data.draw(st.integers(0, weight.numel() - 1))] += size * data.draw(st.sampled_from([-1, 1]))
    assert measured(head, case, 300) <= head.recertify().bound


@pytest.mark.parametrize(
    ("tensor", "change"), [("W_V", 0.01), ("M_V", 0.01), ("b_K", -1e9), ("M_K", 1e9), ("W_O", 0.01), ("W_Q", -2.0)]
)
def test_each_sabotage_breaks_the_old_bound(tensor: str, change: float) -> None:
    case = CASES[0]
    head = case.fit()
    old = head.bound
    with torch.no_grad():
        getattr(head.layer.groups[0], tensor).view(-1)[0] += change
    worst = measured(head, case, 300)
    assert worst > old, "the law can fail"
    assert worst <= certify(head).bound, "and the new certificate says so"


def test_weights_that_are_not_finite_have_no_certificate() -> None:
    head = GateHead.relu(-1, 1)
    with torch.no_grad():
        head.layer.groups[0].M_K.fill_(math.nan)
    with pytest.raises(CertificateError, match="not finite: M_K"):
        certify(head)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: GateHead.relu(1, 1), "lo < hi"),
    (lambda: GateHead.relu(2, -1), "lo = 2"),
    (lambda: GateHead.relu(-math.inf, 1), "lo must be a finite number"),
    (lambda: GateHead.relu(0, math.nan), "hi must be a finite number"),
    (lambda: GateHead.relu("0", 1), "lo must be"),  # type: ignore[arg-type]
    (lambda: GateHead.relu(-1e300, 1e300), "scale the input"),
    (lambda: GateHead.relu(-1, 1, eps=0), "eps must be greater than 0"),
    (lambda: GateHead.relu(-1, 1, eps=-1e-3), "eps must be"),
    (lambda: GateHead.relu(-1, 1, eps=math.nan), "eps must be"),
    (lambda: GateHead.relu(-1, 1, sharpness=0), "sharpness must be"),
    (lambda: GateHead.relu(-1, 1, sharpness=-3), "sharpness must be"),
    (lambda: GateHead.relu(-1, 1, sharpness=1e35), "safe"),
    (lambda: GateHead.relu(-1, 1, dtype=torch.bfloat16), "dtype must be"),
    (lambda: GateHead.sigmoid(-1, 1, sharpness=2), "takes no sharpness"),
    (lambda: GateHead.fit("rleu", -1, 1), "did you mean 'relu'"),
    (lambda: GateHead.fit("relu", -1, 1, slope=2), "does not know slope"),
    (lambda: GateHead.fit("ramp", -1, 1, a=0), "needs b"),
    (lambda: GateHead.ramp(1, 1), "a < b"),
    (lambda: GateHead.ramp(2, 1), "a < b"),
    (lambda: GateHead.leaky_relu(-1, 1, slope=math.inf), "slope must be"),
    (lambda: GateHead.piecewise_linear([0, 0, 1], [1, 2, 3]), "increasing xs"),
    (lambda: GateHead.piecewise_linear([0, 1], [1, 2, 3]), "as many ys"),
    (lambda: GateHead.piecewise_linear([], []), "at least two points"),
    (lambda: sharpness_for("relu", -1.0, -1, 1), "eps must be"),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build()


def test_bad_inputs() -> None:
    head = GateHead.relu(-1, 1)
    for bad, message in [
        (torch.zeros(3, dtype=torch.int64), "floating tensor"),
        (torch.zeros(3, dtype=torch.float64), "float64 and the weights are"),
        ("0.5", "must be a tensor, an array, a list or a number"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            head(bad)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(DomainError, match="NaN or infinity"):
            head(torch.tensor([0.0, bad]))
    with pytest.raises(ArgumentError, match="one shape"):
        GateHead.max(-1, 1)(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ArgumentError, match="expected 2 input"):
        GateHead.max(-1, 1)(torch.zeros(3))


def test_outside_the_interval_a_ramp_still_clamps() -> None:
    head = GateHead.ramp(-1, 1)
    with pytest.warns(DomainWarning, match="outside"):
        assert head(torch.tensor([-1e6, 1e6])).tolist() == [-1.0, 1.0]
    head.strict = True
    with pytest.raises(DomainError, match="outside"):
        head(torch.tensor([7.0]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pure(case: Case) -> None:
    assert purity(case.fit()).attention >= 1


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("ramp", "piecewise_linear", "max")], ids=str)
def test_exported_and_compiled(case: Case) -> None:
    head = case.fit()
    points = adversarial(head, case.kinks, 20)
    batch = torch.export.Dim("batch", min=2)
    example = tuple(p[:7] for p in points)
    exported = torch.export.export(head, example, dynamic_shapes=(tuple({0: batch} for _ in example),))
    # another kernel may add up in another order: both are within the bound of the target
    assert (exported.module()(*points) - head(*points)).abs().max().item() <= 2 * head.bound
    compiled = torch.compile(head, backend="aot_eager")
    assert (compiled(*points) - head(*points)).abs().max().item() <= 2 * head.bound


def test_specs_pack_into_one_group() -> None:
    """Gates of one kind over several channels share a group of heads and still say what they said alone."""
    first, second = gate_spec("abs", 64.0).heads, gate_spec("leaky_relu", 32.0, slope=0.5).heads
    wide = pack([(first, [2], [0]), (second, [0], [1]), (first, [1], [1])], channels=3, outputs=2)
    assert wide.kind == first.kind and wide.W_Q.shape == (6, 3, 1)
    Z = torch.linspace(-2, 2, 33, dtype=torch.float64).reshape(11, 3)
    out = self_layer(wide, torch.float64)(Z)
    alone = [
        self_layer(spec, torch.float64)(Z[:, i : i + 1])[:, 0] for spec, i in ((first, 2), (second, 0), (first, 1))
    ]
    torch.testing.assert_close(out, torch.stack([alone[0], alone[1] + alone[2]], -1), rtol=0, atol=1e-14)
    with pytest.raises(ArgumentError, match="one kind"):
        pack([(first, [0], [0]), (gate_spec("ramp", 1.0, a=0, b=1).heads, [0], [0])], 1, 1)


def test_the_certificate_is_a_ledger() -> None:
    head = GateHead.ramp(-1.3, 0.7)
    text = str(head.certificate)
    assert "clip(y, -1.3, 0.7)" in text and "leak" in text and "B2" in text
    assert sum(Fraction(t.value) for t in head.certificate.terms) <= Fraction(head.bound)
    assert CertifiedModule.families["gate"] is GateHead
