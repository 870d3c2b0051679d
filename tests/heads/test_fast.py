"""Lemma A8: one exponential per element gives what the softmax gives, with gradients, in every dtype, within bounds."""

from __future__ import annotations

import ast
import copy
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

import attnforge as af
from attnforge.certificates.certified import CertifiedModule
from attnforge.errors import ArgumentError, CertificateError, PrecisionError
from attnforge.functions.registry import Univariate, reference
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.fast.bound import read_error
from attnforge.heads.fast.read import anchor_read, evaluate, read, softmax_read
from attnforge.heads.fast.table import dropped, form_of, reach_for

TABLES = [(2, 0.5), (3, 0.3), (16, 0.25), (29, 0.7), (33, 0.5), (200, 1.0), (301, 0.25), (9, 40.0), (400, 60.0)]
ACTIVATIONS = ["gelu", "gelu_tanh", "softplus", "mish", "silu", "quick_gelu", "relu", "tanh", "sigmoid"]


def table(p: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def points(p: int, kappa: float, dtype: torch.dtype, count: int = 1001) -> torch.Tensor:
    reach = kappa * (p - 1) * 1.3 + 5
    return torch.linspace(-reach, reach, count, dtype=torch.float64).to(dtype)


def in_60_digits(y: float, value: list[float], rate: float, kappa: float, centre: float, gate: float) -> arb:
    """The softmax head and the gate at y, in ball arithmetic."""
    k = [arb(2 * i - (len(value) - 1)) / 2 for i in range(len(value))]
    weight = [(arb(rate) * x * (arb(y) - arb(centre)) - arb(kappa) * x * x).exp() for x in k]
    out = sum((w * arb(v) for w, v in zip(weight, value, strict=True)), arb(0)) / sum(weight, arb(0))
    return out + (arb(y) / (1 + (-arb(gate) * arb(y)).exp()) if gate else 0)


def adversarial(p: int, rate: float, kappa: float, centre: float, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Anchors, borders between them and their neighbours in `dtype`, both ends, 0, and far outside."""
    rng = np.random.default_rng(seed)
    step, last = 2 * kappa / rate, (p - 1) / 2
    k = rng.integers(0, p, 12) - last
    places = centre + step * np.concatenate([k, k + 0.5, k + 0.25, [last, -last, last + 0.5, 3 * last + 9, -50.0]])
    y = torch.from_numpy(np.concatenate([places, [0.0, centre], rng.normal(size=10)])).to(dtype)
    if dtype == torch.bfloat16:
        return y
    return torch.cat([y, torch.nextafter(y, y + 1), torch.nextafter(y, y - 1)])


@pytest.mark.parametrize(("p", "kappa"), TABLES)
@pytest.mark.parametrize("gate", [0.0, 1.5])
def test_the_operator_is_the_softmax_head(p: int, kappa: float, gate: float) -> None:
    y, value = points(p, kappa, torch.float64), table(p, torch.float64)
    wanted = softmax_read(y, value, 1.0, kappa, 0.25, gate)
    for form in (anchor_read, read, evaluate):
        assert (form(y, value, 1.0, kappa, 0.25, gate) - wanted).abs().max() < 1e-12 * p


def test_every_form_is_reached() -> None:
    for dtype in (torch.float32, torch.float64):
        assert {form_of(p, kappa, dtype) for p, kappa in TABLES} == {"lattice", "window", "pair"}


@settings(deadline=None, max_examples=30)
@given(
    size=st.sampled_from([(2, 0.5), (7, 0.4), (16, 0.2), (31, 0.46875), (40, 0.3), (150, 0.5), (90, 3.0), (40, 45.0)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    rate=st.sampled_from([0.3, 1.0, 1.875, 7.0]),
    centre=st.sampled_from([0.0, 0.7, -3.0]),
    gate=st.sampled_from([0.0, 1.0, 1.702, 1e4]),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_bound_holds_at_60_digits(
    size: tuple[int, float], dtype: torch.dtype, rate: float, centre: float, gate: float, symmetric: bool, seed: int
) -> None:
    p, kappa = size
    value = table(p, torch.float32 if dtype != torch.float64 else dtype, seed)
    value = value + value.flip(0) if symmetric else value
    y = adversarial(p, rate, kappa, centre, dtype, seed)
    bound = read_error(
        value.double().numpy(), rate, kappa, float(y.min()), float(y.max()), dtype, centre, gate
    ).bound  # fmt: skip
    found = anchor_read(y, value, rate, kappa, centre, gate).double().tolist()
    ctx.dps = 60
    for at, out in zip(y.double().tolist(), found, strict=True):
        exact = in_60_digits(at, value.double().tolist(), rate, kappa, centre, gate)
        assert abs(arb(out) - exact) <= arb(bound), (at, out, bound)


def test_the_bound_is_not_vacuous() -> None:
    value = torch.sin(torch.linspace(-3, 3, 31)).numpy().astype(float)
    for dtype, most in ((torch.float32, 84), (torch.float64, 256)):  # roundoffs; in float64 coefficients round as well
        assert read_error(value, 2.0, 0.46875, -40, 40, dtype).bound < most * torch.finfo(dtype).eps / 2


def test_a_wrong_coefficient_breaks_the_bound() -> None:
    value, y = table(31, torch.float32), torch.linspace(-9, 9, 501)
    bound = read_error(value.double().numpy(), 2.0, 0.5, -9, 9, torch.float32).bound
    wanted = softmax_read(y.double(), value.double(), 2.0, 0.5)
    assert (anchor_read(y, value, 2.0, 0.5).double() - wanted).abs().max() <= bound
    broken = value.clone()
    broken[15] += 1e-3
    assert (anchor_read(y, broken, 2.0, 0.5).double() - wanted).abs().max() > bound


def test_what_a_window_leaves_out() -> None:
    for kappa in (0.1, 0.25, 1.0, 5.0):
        for dtype, u in ((torch.float32, 2.0**-24), (torch.float64, 2.0**-53)):
            reach = reach_for(kappa, dtype)
            i = np.arange(reach + 1, reach + 200)
            assert 2 * np.exp(-kappa * i * (i - 1)).sum() <= dropped(kappa, reach) <= u
            assert reach == 1 or dropped(kappa, reach - 1) > u


def test_float32_at_large_tables_is_better_than_a_softmax() -> None:
    p, kappa = 16384, 2.0
    rate = 2 * kappa * (p - 1) / 50.0
    y, value = torch.linspace(-25, 25, 257), torch.linspace(-25, 25, p)
    exact = anchor_read(y.double(), value.double(), rate, kappa)
    fast, slow = (form(y, value, rate, kappa).double() for form in (anchor_read, softmax_read))
    assert (fast - exact).abs().max() < 1e-5
    assert (slow - exact).abs().max() > 100 * (fast - exact).abs().max()


@pytest.mark.parametrize(("p", "kappa", "gate"), [(17, 0.3, 1.75), (16, 0.3, 0.0), (200, 1.0, 1.0), (0, 1.0, 1.5)])
def test_gradients_and_registration(p: int, kappa: float, gate: float) -> None:
    y = (4 * table(24, torch.float64, 1)).reshape(4, 6).requires_grad_()
    value = table(p, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda y, v: anchor_read(y, v, 1.0, kappa, 0.25, gate), (y, value))
    found = torch.library.opcheck(torch.ops.attnforge.anchor_read.default, (y, value, 1.0, kappa, 0.25, gate))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    y, value = points(33, 0.5, dtype).reshape(7, 11, 13), table(33, torch.float32)
    out = anchor_read(y, value, 1.0, 0.5, 0.0, 1.5)
    assert out.dtype == dtype and out.shape == y.shape
    assert torch.equal(out, anchor_read(y.float(), value, 1.0, 0.5, 0.0, 1.5).to(dtype))


def test_shapes_strides_and_pieces_do_not_matter() -> None:
    value = table(17, torch.float32)
    y = torch.randn(3, 200_001)
    whole = anchor_read(y, value, 1.0, 0.5)
    assert torch.equal(anchor_read(y.t(), value, 1.0, 0.5), whole.t())
    assert torch.equal(anchor_read(y[:, :5], value, 1.0, 0.5), whole[:, :5])
    assert anchor_read(y[:0], value, 1.0, 0.5).shape == (0, 200_001)


def test_bad_arguments_are_named() -> None:
    value = table(5, torch.float32)
    with pytest.raises(ArgumentError, match="float64, float32, bfloat16 or float16"):
        anchor_read(torch.arange(3), value, 1.0, 0.5)
    with pytest.raises(ArgumentError, match="at least 2"):
        anchor_read(torch.zeros(3), value[:1], 1.0, 0.5)
    with pytest.raises(ArgumentError, match="kappa"):
        anchor_read(torch.zeros(3), value, 1.0, -0.5)
    with pytest.raises(ArgumentError, match="known are"):
        FastActivation.fit("gelo", -1, 1)
    with pytest.raises(ArgumentError, match="at least 5"):
        FastActivation.fit("gelu", -1, 1, anchors=3)
    with pytest.raises(PrecisionError, match="smallest bound found"):
        FastActivation.fit("gelu", -34, 50, eps=1e-8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_pure_and_within_their_certificates(name: str) -> None:
    head = FastActivation.fit(name, -34, 50)
    assert head.certificate.kind == "certified" and head.size <= 64
    y = torch.cat([torch.linspace(-34, 50, 20_001), torch.randn(20_000)])
    assert (head(y).double() - head.function.value(y.double())).abs().max() <= head.bound <= 5e-6
    assert (head.plain()(y).double() - head.function.value(y.double())).abs().max() < 1e-5
    assert af.purity(head).by_operation["softmax"] == len(head.layer.groups)
    assert af.purity(head.plain()).by_operation["softmax"] == len(head.layer.groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_within_its_certificate_at_60_digits(dtype: torch.dtype) -> None:
    head = FastActivation.fit("gelu", -34, 50, dtype=dtype)
    y = torch.cat([torch.linspace(-34, 50, 301), 3 * torch.randn(200), 2 * head.anchors.clamp(-17, 25)]).to(dtype)
    ctx.dps = 60
    for at, out in zip(y.double().tolist(), head(y).double().tolist(), strict=True):
        exact = arb(at) * (1 + (arb(at) / arb(2).sqrt()).erf()) / 2
        assert abs(arb(out) - exact) <= arb(head.bound), at


@pytest.mark.parametrize(
    ("name", "lo", "hi"), [("gelu", -300, 500), ("gelu", 5, 9), ("softplus", -200, -0.5), ("relu", -1e-3, 2e-3)]
)
def test_any_interval_will_do(name: str, lo: float, hi: float) -> None:
    head = FastActivation.fit(name, lo, hi)
    y = torch.linspace(lo, hi, 10_001, dtype=torch.float64).float().clamp(lo, hi)
    assert (head(y).double() - head.function.value(y.double())).abs().max() <= head.bound <= 5e-6


def test_activations_are_saved_trained_and_watched(tmp_path: Path) -> None:
    head = FastActivation.fit("gelu", -17, 25, eps=2e-6)
    assert head.bound <= 2e-6 and FastActivation.fit("gelu", -17, 25, eps=1e-4).size < head.size
    head.save(tmp_path / "gelu.safetensors")
    back = af.load(tmp_path / "gelu.safetensors")
    y = torch.linspace(-17, 25, 101)
    assert torch.equal(back(y), head(y)) and af.check(tmp_path / "gelu.safetensors").bound == head.bound
    trainable = [name for name, p in head.named_parameters() if p.requires_grad]
    assert trainable == ["layer.groups.1.M_V"]
    head(y).sum().backward()
    with torch.no_grad():
        head.layer.heads()[1].M_V.add_(1e-3)
    with pytest.raises(CertificateError, match="stale"):
        _ = head.bound
    assert af.certify(head).bound > 9e-4
    with torch.no_grad():
        head.layer.heads()[1].M_K.mul_(1.01)
    with pytest.raises(CertificateError, match="fixed"):
        af.certify(head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_it_is_within_its_bound_for_all_dtypes(
    dtype: torch.dtype, table_dtype: torch.dtype, frozen: bool
) -> None:
    torch.compiler.reset()
    head = FastActivation.fit("gelu", -17, 25, dtype=table_dtype, anchors=25).requires_grad_(not frozen)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), Core(head), torch.nn.Linear(8, 3))
    for linear in (net[0], net[2]):
        linear.to(dtype)
    seen = Seen()
    compiled = torch.compile(net, backend=seen, fullgraph=True)
    x = torch.randn(5, 3).to(dtype)
    assert compiled(x).dtype == dtype
    y = torch.linspace(-17, 25, 128, dtype=torch.float64).to(dtype).reshape(16, 8).clamp(-17, 25)
    out = torch.compile(Core(head), backend="aot_eager", fullgraph=True)(y).double()
    t, value = head.table, head.values.double()
    bound = read_error(value.numpy(), t.rate, t.kappa, -17, 25, dtype, t.centre, t.gate).bound
    ctx.dps = 60
    for at, found in zip(y.double().flatten().tolist(), out.flatten().tolist(), strict=True):
        exact = in_60_digits(at, value.tolist(), t.rate, t.kappa, t.centre, t.gate)
        assert abs(arb(found) - exact) <= arb(bound), at
    # pointwise: besides the two linear maps no matrix product, no softmax, no gather, and one exponential
    assert seen.calls["exp"] == 1 and not {"matmul", "softmax", "index_select", "gather"} & set(seen.calls)
    assert seen.calls["linear"] == 2 and seen.calls["mul"] + seen.calls["__mul__"] < (40 if frozen else 60)


class Core(torch.nn.Module):
    """A head without the check of its input's range."""

    def __init__(self, head: FastActivation):
        super().__init__()
        self.head = head

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.head.core(y)


class Seen:
    """A compiler that counts the calls of a graph by name and runs it as it is."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.calls.update(getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes if "call" in n.op)
        return graph.forward


@pytest.mark.parametrize(("p", "kappa"), [(2, 0.5), (16, 0.25), (31, 0.46875), (200, 1.0), (9, 40.0), (0, 1.0)])
@pytest.mark.parametrize("centre", [0.0, 0.25])
def test_gradients_of_the_compiled_form(p: int, kappa: float, centre: float) -> None:
    torch.compiler.reset()
    y = torch.cat([5 * table(40, torch.float64, 1), torch.tensor([0.0, centre, -30.0, 30.0])]).requires_grad_()
    value = table(p, torch.float64).requires_grad_()
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    found, wanted = (
        torch.autograd.grad(form(y, value, 1.5, kappa, centre, 1.5).square().sum(), (y, value), allow_unused=p == 0)
        for form in (compiled, anchor_read)
    )
    for a, b in zip(found, wanted, strict=True):
        assert (p == 0 and a is None) or (a - b).abs().max() <= 1e-11 * (1 + b.abs().max() if b.numel() else 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    "build",
    [
        lambda: FastActivation.fit("gelu", -17, 25, anchors=25),
        lambda: FastActivation.fit("gelu", -17, 25, dtype=torch.bfloat16, anchors=25),
        lambda: af.AnchorHead.fit("sin", -6.3, 6.3, anchors=24),  # a softmax: what other heads are made of
    ],
    ids=["float32", "bfloat16", "softmax"],
)
def test_inductor_stays_within_the_certificate(build: Callable[[], Any]) -> None:
    torch.compiler.reset()
    head = build()
    ((low, high),) = head.box.intervals()
    y = torch.cat([torch.linspace(low, high, 4001), torch.randn(4000)]).to(head.dtype)
    with torch.no_grad():
        out = torch.compile(head, fullgraph=True)(y)
        eager = head(y)
    assert out.dtype == head.dtype and out.shape == y.shape
    assert (out.double() - head.function.value(y.double())).abs().max() <= head.bound
    assert (out.double() - eager.double()).abs().max() <= 2 * head.bound


def test_torch_func_passes_what_is_compiled() -> None:
    torch.compiler.reset()
    head = FastActivation.fit("gelu", -8, 8, anchors=25).requires_grad_(False)
    y = torch.linspace(-4, 4, 33)
    slope = torch.func.vmap(torch.func.grad(torch.nn.functional.gelu))(y)
    for call in (
        torch.func.vmap(torch.func.grad(head.core)),
        lambda y: torch.func.jvp(head.core, (y,), (torch.ones_like(y),))[1],
    ):
        found = torch.compile(call, backend="aot_eager")(y)  # type: ignore[arg-type]
        assert (found - slope).abs().max() < 1e-4


def test_heads_with_other_numbers_share_a_compiled_program() -> None:
    torch.compiler.reset()
    heads = [FastActivation.fit("gelu", -17, 25, anchors=most) for most in (21, 25, 33)]
    heads += [af.AnchorHead.fit("sin", -3, 3, anchors=most, fast=True) for most in (20, 24)]
    for head in heads:
        y = torch.linspace(-3, 3, 101)
        out = torch.compile(head, backend="aot_eager", fullgraph=True)(y)
        assert (out.double() - head.function.value(y.double())).abs().max() <= head.bound


def test_compiled_symmetry_is_that_of_the_certified_weights() -> None:
    head = FastActivation.fit("gelu", -17, 25, anchors=25)
    head.requires_grad_(False)
    y = torch.linspace(-17, 25, 501)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    assert (compiled(y) - head(y)).abs().max() <= 2 * head.bound
    head.layer.heads()[1].M_V[0, 3] += 1e-2  # no longer symmetric
    af.certify(head)
    assert (compiled(y) - head(y)).abs().max() < 1e-5
    other = FastActivation.fit("gelu", -17, 25, anchors=25)
    other.load_state_dict(head.state_dict())
    other.requires_grad_(False)
    torch.compiler.reset()
    assert (torch.compile(other, backend="aot_eager", fullgraph=True)(y) - head(y)).abs().max() < 1e-5


@pytest.mark.parametrize(("p", "centre", "gate"), [(31, 0.0, 1.5), (31, 0.25, 1.0), (16, 0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_compiler_sees_is_within_the_bound(p: int, centre: float, gate: float, dtype: torch.dtype) -> None:
    y, value = points(p, 0.5, dtype), table(p, torch.float32)
    out = read(y, value, 1.5, 0.5, centre, gate)
    wanted = softmax_read(y.double(), value.double(), 1.5, 0.5, centre, gate)
    lo, hi = float(y.min()), float(y.max())
    bound = read_error(value.double().numpy(), 1.5, 0.5, lo, hi, dtype, centre, gate).bound
    assert out.dtype == dtype and (out.double() - wanted).abs().max() <= bound


@pytest.mark.parametrize(
    ("name", "lo", "hi", "options"),
    [
        ("sin", -6.3, 6.3, {"anchors": 32}),
        ("exp", -4, 2, {"eps": 1e-4}),
        ("square", -2, 2, {"anchors": 25, "dtype": torch.float64}),
        ("tanh", -5, 5, {}),
        ("gelu", -8, 8, {"anchors": 300, "temperature": "cold", "kappa": 2.0}),
        ("gelu", -8, 8, {"anchors": 64, "temperature": "cold"}),
        ("exp", -1, 1, {"anchors": 16, "relative": True}),
    ],
)
def test_anchor_heads_can_be_fast(name: str, lo: float, hi: float, options: dict[str, object], tmp_path: Path) -> None:
    head = af.AnchorHead.fit(name, lo, hi, fast=True, **options)  # type: ignore[arg-type]
    assert head.fast and "A8" in head.certificate.lemmas
    y = torch.linspace(lo, hi, 5001, dtype=torch.float64).to(head.dtype).clamp(lo, hi)
    wanted = head.function.value(y.double())
    size = wanted.abs() if head.relative else 1.0
    assert ((head(y).double() - wanted).abs() / size).max() <= head.bound
    assert af.purity(head).by_operation["softmax"] == 1
    head.save(tmp_path / "head.safetensors")
    back = af.load(tmp_path / "head.safetensors")
    assert torch.equal(back(y), head(y)) and af.check(tmp_path / "head.safetensors").bound == head.bound
    fast = head(y)
    head.fast = False
    assert "A8" not in head.certificate.lemmas and not torch.equal(head(y), fast)
    assert ((head(y).double() - wanted).abs() / size).max() <= head.bound


def test_only_even_lattices_are_fast() -> None:
    with pytest.raises(ArgumentError, match="evenly spaced"):
        af.AnchorHead.fit("gelu", -8, 8, anchors=32, potential="atan", fast=True)


FAST_HEADS: list[Callable[[torch.dtype], CertifiedModule]] = [
    lambda dtype: FastActivation.fit("gelu", -9, 9, anchors=25, dtype=dtype),
    lambda dtype: FastActivation.fit("quick_gelu", -9, 9, dtype=dtype),
    lambda dtype: FastActivation.fit("tanh", -9, 9, dtype=dtype),
    lambda dtype: FastActivation.fit("relu", -9, 9, dtype=dtype),
    lambda dtype: af.AnchorHead.fit("gelu", -8, 8, anchors=24, fast=True, dtype=dtype),
    lambda dtype: af.AnchorHead.fit("exp", -4, 2, eps=1e-4, fast=True, dtype=dtype),
]
CASTS: list[tuple[torch.dtype, Callable[[CertifiedModule], CertifiedModule]]] = [
    (torch.float32, lambda head: head.double()),
    (torch.float64, lambda head: head.float()),
    (torch.float32, lambda head: head.bfloat16().float()),
    (torch.float32, copy.deepcopy),
]


def certified(head: CertifiedModule) -> tuple[float | None, str]:
    """The bound of a head as it is stored now, or why there is none."""
    try:
        return af.certify(head).bound, ""
    except CertificateError as error:
        return None, str(error)


@pytest.mark.parametrize(("dtype", "cast"), CASTS, ids=["widened", "narrowed", "there and back", "copied"])
@pytest.mark.parametrize("build", FAST_HEADS, ids=["gelu", "quick_gelu", "tanh", "relu", "anchor gelu", "anchor exp"])
def test_certificates_after_a_cast_speak_of_what_is_stored(
    build: Callable[[torch.dtype], CertifiedModule],
    dtype: torch.dtype,
    cast: Callable[[CertifiedModule], CertifiedModule],
) -> None:
    head = cast(build(dtype))
    bound, refused = certified(head)
    if bound is None:
        assert "changed" in refused
        return
    (low, high), function = head.box.intervals()[0], head.function
    assert isinstance(function, Univariate)
    y = torch.linspace(low, high, 201, dtype=head.dtype).clamp(low, high)
    with torch.no_grad():
        out = head.core(y)
    assert all(abs(reference(function, float(a)) - float(b)) <= bound for a, b in zip(y, out, strict=True))


@pytest.mark.parametrize("name", ["gelu", "tanh", "silu", "relu"])
def test_every_changed_weight_counts(name: str) -> None:
    """Sabotage: whatever is changed, the bound grows with it or there is none."""
    head = FastActivation.fit(name, -9, 9)
    y = torch.linspace(-9, 9, 101)
    wanted = [reference(head.function, float(v)) for v in y]
    for key in head.state_dict():
        broken = copy.deepcopy(head)
        with torch.no_grad():
            broken.state_dict()[key].view(-1)[-1].mul_(1.01).add_(0.01)
        bound, refused = certified(broken)
        if bound is None:
            assert f"{key} changed" in refused
            continue
        assert bound > 0.009
        with torch.no_grad():
            out = broken.core(y)
        assert all(abs(a - float(b)) <= bound for a, b in zip(wanted, out, strict=True))


@pytest.mark.parametrize(("name", "number"), [("tanh", "rate"), ("silu", "gate"), ("tanh", "gate")])
def test_a_description_is_not_believed(name: str, number: str) -> None:
    """Sabotage: numbers of the evaluation that make another function of the same stored values."""
    head = FastActivation.fit(name, -9, 9)
    config = head.config()
    config["table"][number] = 1.5
    other, y = FastActivation.rebuild(config, {}), torch.linspace(-9, 9, 1001)
    if number == "gate" and name == "silu":  # a gate of another slope: its error is stated
        assert (af.certify(other).bound or 0.0) >= float((other(y) - torch.nn.functional.silu(y)).abs().max())
        return
    with pytest.raises(CertificateError, match="two keys"):
        af.certify(other)


def test_bounds_of_fast_heads_load_nothing_that_builds() -> None:
    """`bound` reaches no construction, no module and no evaluation, however many imports one follows."""
    source = Path(af.__file__).parent
    seen: set[Path] = set()
    todo = [source / "heads" / name for name in ("fast/bound.py", "chain/bound.py", "choose.py")]
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                for part in (node.module or "").split("."):
                    folder = folder / part if part else folder
                todo += [folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)]
    names = {path.relative_to(source).as_posix() for path in seen}
    assert {"heads/fast/table.py", "heads/anchor/bound.py", "certificates/rounding.py"} <= names, "the walk walks"
    built = ("construction", "fit", "head", "activation", "read", "build", "packing")
    assert [name for name in sorted(names) if name.startswith("heads/") and Path(name).stem in built] == []


@pytest.mark.parametrize("anchors", [None, 12])
def test_the_transforms_of_torch_func_see_plain_pytorch(anchors: int | None) -> None:
    """vmap, grad, jvp and jacrev of a fast head are those of its function, and the values those of the head."""
    head = FastActivation.fit("gelu", -8, 8, anchors=anchors)
    assert head.bound is not None
    x = torch.linspace(-3, 3, 7)
    wanted = torch.func.vmap(torch.func.grad(torch.nn.functional.gelu))(x)
    slopes = (
        torch.func.vmap(torch.func.grad(head))(x), torch.func.jvp(head, (x,), (torch.ones(7),))[1],
        torch.func.jacrev(head)(x).diagonal(),
    )  # fmt: skip
    assert all(torch.allclose(found, wanted, atol=100 * head.bound) for found in slopes)
    assert float((torch.func.vmap(head)(x) - head(x)).detach().abs().max()) <= 2 * head.bound
