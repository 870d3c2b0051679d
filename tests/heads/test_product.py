"""Product heads: sound to the last bit, tight, relative in both factors, and honest about weights that have changed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
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
from attnforge.heads.product.bound import Sides, rounding
from attnforge.heads.product.construction import ProductSpec, gain_for, gauss_lobatto, product_constant, remainder
from attnforge.heads.product.head import ProductHead
from attnforge.heads.stored import SelfSpec

DTYPES = [torch.float32, torch.float64]
BOXES = [
    ((-1, 1), (-1, 1)),
    ((-10, 10), (-10, 10)),
    ((1, 2), (1, 2)),
    ((-1, 1), (3, 4)),
    ((0, 1), (0, 7)),
    ((-0.3, 0.9), (5, 5.7)),
    ((100, 101), (-1e-3, 2e-3)),
]


def adversarial(head: ProductHead, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid and random points, the edges of the box, points near 0 and near the centres, as floats of the dtype."""
    generator = torch.Generator().manual_seed(5)
    sides = []
    for name in ("x", "y"):
        lo, hi = head.box[name]
        inner = lo + (hi - lo) * torch.rand(count, generator=generator, dtype=torch.float64)
        special = torch.tensor([lo, hi, 0.5 * (lo + hi), *(0.0 for _ in range(lo < 0 < hi))], dtype=torch.float64)
        pick = torch.randint(len(special), (count // 3,), generator=generator)
        inner[: count // 3] = special[pick] + torch.randn(count // 3, generator=generator) * (hi - lo) * 1e-7
        sides.append(inner[torch.randperm(count, generator=generator)].clamp(lo, hi))
    corners = list(itertools.product(head.box["x"], head.box["y"]))
    x, y = (torch.cat([side, torch.tensor([c[i] for c in corners]).double()]) for i, side in enumerate(sides))
    wide = head.box.outward(head.dtype)
    return tuple(v.to(head.dtype).clamp(*wide[n]) for v, n in ((x, "x"), (y, "y")))  # type: ignore[return-value]


def measured(head: ProductHead, count: int = 6000) -> float:
    """The largest error found, by exact arithmetic (the product of two floats has at most 106 bits)."""
    x, y = adversarial(head, count)
    with torch.no_grad():
        out = head(x, y) if head.width is None else head(x.unsqueeze(-1).repeat(1, head.width), y).flatten()
    if head.width is not None:
        x, y = (v.unsqueeze(-1).repeat(1, head.width).flatten() for v in (x, y))
    saved, ctx.prec = ctx.prec, 256
    try:
        triples = zip(out.double().tolist(), x.double().tolist(), y.double().tolist(), strict=True)
        return max(float(abs(arb(o) - arb(a) * arb(b)).lower()) for o, a, b in triples)
    finally:
        ctx.prec = saved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("x", "y"), BOXES)
def test_the_bound_is_sound_and_tight(x: tuple[float, float], y: tuple[float, float], dtype: torch.dtype) -> None:
    head = ProductHead.fit(x, y, dtype=dtype)
    worst = measured(head, 20000)
    assert worst <= head.bound <= 8.5 * worst  # exponentials may err by 3 u, and err by 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tanh_method_is_sound(dtype: torch.dtype) -> None:
    head = ProductHead.fit((-1, 1), (-1, 1), dtype=dtype, method="tanh")
    assert measured(head) <= head.bound <= 5e4 * unit(dtype)


def test_numbers_worth_reaching() -> None:
    assert ProductHead.symmetric(1, 1).bound <= 1.7e-6, "exponentials of 3 u"
    assert ProductHead.symmetric(1, 1, dtype=torch.float64).bound <= 3.9e-15
    assert ProductHead.symmetric(10, 10).bound <= 1.8e-4, "relative to |x| Y, in every binade"


@pytest.mark.parametrize("n", [2, 3, 7, 10, 16])
def test_the_rule_is_gauss_lobatto(n: int) -> None:
    """Exact for polynomials of degree 2n - 3, with the weights that the logarithms stand for."""
    nodes, logs = (np.array(column) for column in gauss_lobatto(n))
    weights = np.exp(logs) * 2 / (n * (n - 1))
    for degree in range(2 * n - 2):
        exact = 0.0 if degree % 2 else 2 / (degree + 1)
        assert abs((weights * nodes**degree).sum() - exact) < 2e-15
    assert (nodes == -nodes[::-1]).all()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 11), z=st.floats(1e-3, 4))
def test_lemma_c1_bounds_the_remainder(n: int, z: float) -> None:
    """In exact arithmetic the head reaches w_1 z x up to 1/(1 + rho), 0 <= rho <= the lemma's bound."""
    saved, ctx.prec = ctx.prec, 200
    try:
        with_end = [(arb(t), (arb(v)).exp()) for t, v in zip(*gauss_lobatto(n), strict=True)]
        mixture = sum((v * (t * arb(z)).exp() for t, v in with_end), arb(0)) / sum((v for _, v in with_end), arb(0))
        rho = mixture * arb(z) / arb(z).sinh() - 1
        slack = arb("1e-15")  # the rule's numbers are rounded to float64 here
        assert rho > -slack and rho < arb(remainder(n, z)) + slack
    finally:
        ctx.prec = saved


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_box(data: st.DataObject) -> None:
    sides = []
    for _ in range(2):
        scale = 10.0 ** data.draw(st.integers(-4, 4))
        lo = data.draw(st.floats(-3, 3)) * scale
        sides.append((lo, lo + data.draw(st.floats(0.01, 4)) * scale))
    dtype, nodes = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([None, 4, 8]))
    head = ProductHead.fit(*sides, dtype=dtype, nodes=nodes)
    assert measured(head, 400) <= head.bound


def test_eps_takes_no_more_nodes_than_it_needs() -> None:
    chosen = []
    for eps in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 2e-6):
        head = ProductHead.symmetric(1, 1, eps=eps)
        assert head.bound <= eps and measured(head, 500) <= head.bound
        chosen.append(head.nodes)
    assert chosen == sorted(chosen) and chosen[0] == 2 and chosen[-1] <= 7 and len(set(chosen)) >= 3
    assert ProductHead.symmetric(1, 1, eps=1e-14, dtype=torch.float64).nodes <= 10


def test_what_cannot_be_reached_says_what_can() -> None:
    with pytest.raises(PrecisionError, match="float64") as caught:
        ProductHead.symmetric(1, 1, eps=1e-9)
    reachable = caught.value.reachable
    assert reachable is not None and ProductHead.symmetric(1, 1, eps=reachable).bound <= reachable
    with pytest.raises(PrecisionError, match="reaches"):
        ProductHead.symmetric(1, 1, eps=1e-4, nodes=3)


def test_centring_pays_where_the_operands_do_not_straddle_zero() -> None:
    centred, plain = ProductHead.fit((1, 2), (1, 2)), ProductHead.symmetric(2, 2)
    assert centred.bound < plain.bound / 3
    assert centred.spec.centre == (1.5, 1.5) and plain.spec.centre == (0.0, 0.0)
    assert ProductHead.fit((-1, 1), (3, 4)).swapped


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_constant_covers_every_scale(dtype: torch.dtype) -> None:
    for X, Y in ((1.0, 1.0), (3.7, 0.11), (1e-4, 55.0)):
        spec = ProductSpec.build(7, gain_for(Y))
        head = ProductHead.symmetric(X, Y, nodes=7, dtype=dtype)
        assert head.bound <= product_constant(7, spec.gain * Y, dtype) * X * Y * (1 + 1e-6)
    with pytest.raises(ArgumentError, match="s must be"):
        product_constant(7, 3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_vector_times_a_scalar(dtype: torch.dtype) -> None:
    head = ProductHead.fit((-2, 2), (0.5, 3), width=5, dtype=dtype)
    assert measured(head, 1000) <= head.bound
    x, y = torch.randn(4, 6, 5, dtype=dtype).clamp(-2, 2), torch.rand(4, 6, dtype=dtype) + 0.5
    assert torch.equal(head(x, y), head(x, y.unsqueeze(-1))) and head(x, y).shape == (4, 6, 5)
    for bad_x, bad_y in ((x[..., :4], y), (x, y[:3]), (x, x)):
        with pytest.raises(ArgumentError, match="expected x of shape"):
            head(bad_x, bad_y)


def test_batch_equals_loop() -> None:
    head = ProductHead.symmetric(1, 2)
    x, y = (v[:24].reshape(2, 3, 4) for v in adversarial(head, 200))
    together = head(x, y)
    for index in np.ndindex(2, 3, 4):
        alone = head(x[index], y[index])
        assert alone.shape == () and abs(alone - together[index]).item() <= 2 * head.bound
    assert head(x[:0], y[:0]).shape == (0, 3, 4)


@pytest.mark.parametrize("options", [{}, {"width": 3}, {"method": "tanh"}, {"nodes": 4}], ids=str)
def test_saved_bits_are_loaded_bits(options: dict[str, Any], tmp_path: Path) -> None:
    head = ProductHead.fit((-1, 1), (3, 4), dtype=torch.float64, **options)
    head.save(tmp_path / "product.safetensors")
    again = load(tmp_path / "product.safetensors")
    assert isinstance(again, ProductHead) and again.certificate == head.certificate
    assert torch.equal(again(*head.example_input()), head(*head.example_input()))
    assert check(tmp_path / "product.safetensors").bound == head.bound
    assert json.loads(json.dumps(head.config())) == head.config() == again.config()


@pytest.mark.parametrize("options", [{}, {"width": 3}, {"method": "tanh"}], ids=str)
def test_gradients(options: dict[str, Any]) -> None:
    head = ProductHead.fit((-1, 1), (1, 2), dtype=torch.float64, **options)
    inputs = tuple(v.clone().requires_grad_() for v in head.example_input())
    assert torch.autograd.gradcheck(lambda *given: head.core(*given), inputs)
    names = [name for name, _ in head.named_parameters()]
    weights = [p.detach().clone().requires_grad_() for p in head.parameters()]
    fixed = tuple(v.detach() for v in inputs)

    def of_weights(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(head, dict(zip(names, given, strict=True)), fixed)

    assert torch.autograd.gradcheck(of_weights, weights)


@pytest.mark.parametrize("options", [{}, {"width": 3}, {"method": "tanh"}], ids=str)
def test_training_makes_the_certificate_stale_and_certify_renews_it(options: dict[str, Any]) -> None:
    head = ProductHead.fit((-1, 1), (0.5, 2), **options)
    before = head.bound
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-4)
    (head(*head.example_input()) ** 2).sum().backward()
    optimiser.step()
    with pytest.raises(CertificateError, match="stale"):
        _ = head.bound
    after = certify(head).bound
    worst = measured(head, 500)
    assert worst <= after <= 50 * worst and before < after
    wide = ProductHead.fit((-1, 1), (0.5, 2), **options).to(torch.float64)
    with pytest.raises(CertificateError, match="stale"):
        _ = wide.certificate
    assert measured(wide, 300) <= certify(wide).bound


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sabotage_is_noticed_and_bounded(data: st.DataObject) -> None:
    """Any weight moved by any amount: the new certificate is sound."""
    x, y = data.draw(st.sampled_from(BOXES))
    width = data.draw(st.sampled_from([None, 2]))
    head = ProductHead.fit(x, y, dtype=data.draw(st.sampled_from(DTYPES)), width=width)
    _, weight = data.draw(st.sampled_from(sorted(head.named_parameters(), key=lambda pair: pair[0])))
    size = 10.0 ** data.draw(st.integers(-9, 0)) * data.draw(st.sampled_from([-1, 1]))
    with torch.no_grad():
        weight.view(-1)[data.draw(st.integers(0, weight.numel() - 1))] += size
    assert measured(head, 200) <= head.recertify().bound


@pytest.mark.parametrize("tensor", ["W_Q", "b_Q", "b_K", "W_V", "M_K", "M_V", "W_O"])
def test_each_sabotage_breaks_the_old_bound(tensor: str) -> None:
    head = ProductHead.symmetric(1, 1)
    old = head.bound
    with torch.no_grad():
        getattr(head.layer.groups[0], tensor).view(-1)[0] += 1e-3
    worst = measured(head, 500)
    assert worst > old, "the law can fail"
    assert worst <= certify(head).bound, "and the new certificate says so"


def test_weights_that_are_not_finite_have_no_certificate() -> None:
    head = ProductHead.symmetric(1, 1)
    with torch.no_grad():
        head.layer.groups[0].W_O.fill_(math.inf)
    with pytest.raises(CertificateError, match="not finite: W_O"):
        certify(head)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: ProductHead.fit((1, 1), (0, 1)), "x needs lo < hi"),
    (lambda: ProductHead.fit((0, 1), (1, 0)), "y needs lo < hi"),
    (lambda: ProductHead.fit((0, math.inf), (0, 1)), "x must be a finite number"),
    (lambda: ProductHead.fit((0, math.nan), (0, 1)), "x must be a finite number"),
    (lambda: ProductHead.fit(3, (0, 1)), "x must be a pair"),  # type: ignore[arg-type]
    (lambda: ProductHead.fit((0, 1e35), (0, 1)), "between 1e-30 and 1e30"),
    (lambda: ProductHead.symmetric(0, 1), "X must be greater than 0"),
    (lambda: ProductHead.symmetric(1, 1, eps=0), "eps must be greater than 0"),
    (lambda: ProductHead.symmetric(1, 1, eps=math.nan), "eps must be"),
    (lambda: ProductHead.symmetric(1, 1, nodes=1), "nodes must be"),
    (lambda: ProductHead.symmetric(1, 1, nodes=7.0), "nodes must be"),
    (lambda: ProductHead.symmetric(1, 1, width=0), "width must be"),
    (lambda: ProductHead.symmetric(1, 1, method="magic"), "method must be"),
    (lambda: ProductHead.symmetric(1, 1, dtype=torch.float16), "dtype must be"),
    (lambda: ProductHead.symmetric(1, 1)(torch.zeros(2), torch.zeros(3)), "one shape"),
    (lambda: ProductHead.symmetric(1, 1)(torch.zeros(2)), "expected 2 input"),
    (lambda: ProductHead.symmetric(1, 1)(torch.zeros(2), torch.zeros(2, dtype=torch.int32)), "floating tensor"),
    (lambda: gauss_lobatto(1), "nodes must be"),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build()


def test_bad_inputs() -> None:
    head = ProductHead.symmetric(1, 1)
    with pytest.raises(DomainError, match="NaN or infinity"):
        head(torch.tensor([math.nan]), torch.tensor([0.0]))
    with pytest.warns(DomainWarning, match="outside"):
        head(torch.tensor([2.0]), torch.tensor([0.0]))
    head.strict = True
    with pytest.raises(DomainError, match="outside"):
        head(torch.tensor([2.0]), torch.tensor([0.0]))


@pytest.mark.parametrize("options", [{}, {"width": 3}], ids=str)
def test_pure_exported_and_compiled(options: dict[str, Any]) -> None:
    head = ProductHead.fit((-1, 1), (1, 3), **options)
    assert purity(head).attention >= 1
    example = tuple(torch.cat([v] * 4) for v in head.example_input())
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(head, example, dynamic_shapes=(tuple({0: batch} for _ in example),))
    more = tuple(torch.cat([v] * 3) for v in example)
    # another kernel may add up in another order: both are within the bound of the target
    assert (exported.module()(*more) - head(*more)).abs().max().item() <= 2 * head.bound
    if not options:
        compiled = torch.compile(head, backend="aot_eager")
        assert (compiled(*more) - head(*more)).abs().max().item() <= 2 * head.bound


def test_specs_pack_into_one_group() -> None:
    """x0 x2 and x1 x2, and their difference, by one group of four heads."""
    one = ProductSpec.build(8, 2.0).heads
    wide = pack([(one, [0, 2], [0]), (one, [1, 2], [1])], channels=3, outputs=2)
    assert wide.W_Q.shape == (4, 3, 2)
    Z = torch.linspace(-1, 1, 33, dtype=torch.float64).reshape(11, 3)
    out = self_layer(wide, torch.float64)(Z)
    torch.testing.assert_close(out, Z[:, :2] * Z[:, 2:], rtol=0, atol=1e-9)


def test_the_certificate_is_a_ledger() -> None:
    head = ProductHead.fit((1, 2), (1, 2))
    text = str(head.certificate)
    assert "x*y" in text and "7 nodes" in text and "C1" in text and "rounding" in text
    assert CertifiedModule.families["product"] is ProductHead


def test_products_beyond_the_dtype_have_no_bound() -> None:
    sides = (0.0, 1e20), (0.0, 1e20)
    with pytest.raises(CertificateError, match="float32 cannot hold"):
        ProductHead.fit(*sides)
    head = ProductHead.fit(*sides, dtype=torch.float64)
    assert bool(torch.isfinite(head(*(torch.tensor([end], dtype=torch.float64) for _, end in sides))).all())


def test_an_output_of_which_nothing_is_known_has_no_bound() -> None:
    """The skip of the second output overflows both ways: inf - inf is NaN, which no maximum may drop."""
    head = ProductHead.fit((-10, 10), (0.5, 10), width=2, dtype=torch.float64)
    spec, sides = SelfSpec.read(head.layer), Sides((-10.0, 10.0), (0.5, 10.0))
    skip = spec.S.copy()
    skip[1, 1] = skip[-1, 1] = 1.7e308
    assert math.isfinite(rounding(spec, sides, torch.float64, 0.0))
    assert rounding(dataclasses.replace(spec, S=skip), sides, torch.float64, 0.0) == math.inf
