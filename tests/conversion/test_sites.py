"""The modules that stand at converted sites: ranges, counters, precision, norms and their certificates."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attnforge as af
from attnforge.conversion.build import whole_line, widened, widened_ratio
from attnforge.conversion.find import norm_of, recognise
from attnforge.conversion.norm import ConvertedNorm, NativeNorm
from attnforge.conversion.site import ConvertedActivation, ConvertedProduct, outside
from attnforge.heads import AnchorHead, ProductHead
from attnforge.heads.fast.activation import FastActivation

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def site(strict: bool = False) -> ConvertedActivation:
    return ConvertedActivation(AnchorHead.fit("gelu", -4, 4, anchors=16), "gelu", -4.0, 4.0, "body.act", strict)


def test_values_outside_are_counted_and_warned_about_once() -> None:
    module = site()
    with pytest.warns(af.DomainWarning, match=r"'body.act': the input reaches -9, outside \[-4, 4\]"):
        module(torch.tensor([-9.0, 0.0, 5.0]))
    assert int(module.outside) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.tensor([7.0]))
        module(torch.tensor([1.0]))
    assert int(module.outside) == 3
    with pytest.raises(af.DomainError, match=r"body.act.*larger margin"):
        site(strict=True)(torch.tensor([5.0]))
    assert "outside" not in module.state_dict()


def test_heads_that_are_right_everywhere_count_and_do_not_warn() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    result, report = af.convert(model, X)
    assert report.sites[0].everywhere
    far = 1e3 * X
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        found, wanted = result(far), model(far)
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    assert int(result[1].outside) > 0
    assert outside(result) == {"1": int(result[1].outside)}
    strict, _ = af.convert(model, X, strict=True)
    with pytest.raises(af.DomainError, match="'1': the input reaches"):
        strict(far)


def test_checks_are_not_part_of_the_exported_graph() -> None:
    module = site(strict=True)
    program = torch.export.export(module, (torch.zeros(2, 3),))
    names = {str(node.target) for node in program.graph.nodes}
    assert not any("aminmax" in name for name in names)
    assert torch.allclose(program.module()(torch.ones(2, 3)), module(torch.ones(2, 3)))


def test_tables_never_go_to_half_precision() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    result, _ = af.convert(model, X, level="pure")
    wanted = result(X).detach()
    half = result.to(torch.bfloat16)
    assert half[0].weight.dtype == torch.bfloat16
    assert {p.dtype for p in half[1].head.parameters()} == {torch.float32}
    assert {p.dtype for p in half[2].head.parameters()} == {torch.float32}
    assert half[2].weight.dtype == torch.bfloat16
    assert float((half(X.bfloat16()).detach().float() - wanted).abs().max()) < 0.05


def test_autocast_does_not_reach_the_logits() -> None:
    module = site()
    y = torch.linspace(-3, 3, 101)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(y)
    assert torch.equal(found, module(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_converted_norms_keep_their_certificate(kind: str, dtype: torch.dtype) -> None:
    work = torch.float64 if dtype == torch.float64 else torch.float32
    head = NativeNorm.fit(48, (1e-3, 1e3), 1e-6, kind=kind, dtype=work)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(0)
    weight, bias = (nn.Parameter(torch.randn(48, generator=g).to(dtype)) for _ in range(2))
    module = ConvertedNorm(head, (48,), weight, bias, "norm")
    bound, scale = module.site_bound(dtype)
    size = torch.logspace(-1.4, 1.4, 400, dtype=torch.float64)[:, None]
    x = (size * torch.randn(400, 48, generator=g, dtype=torch.float64) + (0.3 if kind == "layer" else 0.0)).to(dtype)
    wide = x.double()
    c = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide
    exact = c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.detach().double() + bias.detach().double()
    with torch.no_grad():
        found = module(x)
    assert found.dtype == dtype
    assert float((found.double() - exact).abs().max()) <= bound
    assert bound <= (1e-4 if dtype != torch.bfloat16 else 0.01) * scale
    assert int(module.outside) == 0


def test_the_two_ways_of_evaluating_a_norm_agree() -> None:
    head = NativeNorm.fit(24, (1e-2, 1e2))
    x = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.randn(24), torch.randn(24)
    with torch.no_grad():
        native, _, _ = head.evaluate(x, weight, bias)
        assert float((native - head.explicit(x, weight, bias)).abs().max()) < 1e-5
    module = ConvertedNorm(head, (24,), nn.Parameter(weight), nn.Parameter(bias), "norm")
    assert af.purity(module, x).by_operation["softmax"] == 1
    many = torch.randn(9000, 24)
    with torch.no_grad():  # in pieces, and at once where gradients are wanted
        pieces = module(many)
    assert float((pieces - module(many).detach()).abs().max()) < 1e-5


def test_gradients_of_a_norm_are_those_of_the_norm() -> None:
    head = NativeNorm.fit(12, (1e-2, 1e2), dtype=torch.float64)
    plain = nn.LayerNorm(12).double()
    module = ConvertedNorm(head, (12,), plain.weight, plain.bias, "norm")
    x = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(plain(x).pow(3).sum(), (x, plain.weight, plain.bias))
    found = torch.autograd.grad(module(x).pow(3).sum(), (x, plain.weight, plain.bias))
    for a, b in zip(wanted, found, strict=True):
        assert float((a - b).abs().max()) < 1e-8 * (1 + float(a.abs().max()))


def test_rows_outside_the_variance_are_counted() -> None:
    module = ConvertedNorm(NativeNorm.fit(24, (0.1, 10.0)), (24,), None, None, "norm")
    x = torch.randn(4, 24)
    with pytest.warns(af.DomainWarning, match="variance reaches"):
        module(torch.cat([x, 100 * x]))
    assert int(module.outside) == 4
    with pytest.warns(af.DomainWarning, match="mean of a row"):
        ConvertedNorm(NativeNorm.fit(24, (0.1, 10.0), offset=5.0), (24,), None, None, "norm")(x + 50)


def test_constant_rows_have_no_variance_and_are_no_reason_to_warn() -> None:
    module = ConvertedNorm(NativeNorm.fit(24, (0.1, 10.0)), (24,), None, nn.Parameter(torch.ones(24)), "norm")
    x = torch.cat([torch.randn(3, 24), torch.zeros(1, 24), torch.full((1, 24), 0.1)])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        out = module(x)
    assert int(module.outside) == 0
    assert float((out[3:] - 1).abs().max()) < 1e-5


def test_a_broken_norm_is_noticed() -> None:
    """Sabotage: a wrong amount breaks the bound that the certificate of other weights stated."""
    head = NativeNorm.fit(24, (0.1, 10.0))
    bound = head.bound
    assert bound is not None
    x = torch.randn(50, 24)
    exact = torch.nn.functional.layer_norm(x.double(), (24,))
    assert float((head(x) - exact).abs().max()) <= bound * float(exact.abs().max())
    with torch.no_grad():
        head.mix[3] *= 1.01
    assert float((head(x) - exact).abs().max()) > bound * float(exact.abs().max())
    with pytest.raises(af.CertificateError, match="stale"):
        _ = head.bound


@given(st.floats(-50, 50), st.floats(1e-3, 50), st.floats(1, 4))
@settings(max_examples=50, deadline=None)
def test_ranges_are_widened_outward(low: float, width: float, margin: float) -> None:
    high = low + width
    left, right = widened(low, high, margin)
    assert left <= low
    assert high <= right
    assert right - left >= margin * width * (1 - 1e-12)
    assert whole_line(left, right)[1] >= max(abs(left), abs(right)) * (1 - 1e-8)
    small, large = widened_ratio(width, 2 * width, 30.0)
    assert small <= width / 30
    assert large >= 60 * width
    assert math.log2(small).is_integer()


class OwnNorm(nn.Module):
    """An rms norm as many models write it; `wrong` makes it something else."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.wrong = nn.Parameter(torch.rand(6) + 0.5), 1e-6, wrong

    def forward(self, x: Tensor) -> Tensor:
        out = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
        return out.clamp(-1, 1) if self.wrong else out


def test_norms_are_recognised_by_their_values() -> None:
    found = norm_of(OwnNorm())
    assert found is not None
    assert (found.kind, found.shape, found.eps, found.unit) == ("rms", (6,), 1e-6, False)
    assert norm_of(OwnNorm(wrong=True)) is None
    assert norm_of(nn.GroupNorm(2, 6)) is None
    inner = norm_of(nn.LayerNorm((2, 3)))
    assert inner is not None
    assert inner.shape == (2, 3)


def test_norms_over_several_dimensions() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm((4, 3)), nn.Linear(3, 2)).eval()
    x = torch.randn(10, 4, 3)
    result, report = af.convert(model, x, level="pure")
    assert report.by_operation == {"layer_norm": 1}
    assert float((result(x) - model(x)).abs().max()) < 1e-5


def test_products_keep_their_certificate() -> None:
    head = ProductHead.fit((-3, 5), (-2, 2))
    module = ConvertedProduct(head, "mlp.product")
    g = torch.Generator().manual_seed(0)
    x, y = 8 * torch.rand(5000, generator=g) - 3, 4 * torch.rand(5000, generator=g) - 2
    assert head.bound is not None
    assert float((module(x, y).double() - x.double() * y.double()).abs().max()) <= head.bound
    with pytest.warns(af.DomainWarning, match=r"mlp.product.*the first factor"):
        module(x + 10, y)


@pytest.mark.parametrize(
    ("candidate", "name"),
    [
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.ELU(0.5), "elu(0.5)"),
        (nn.LeakyReLU(0.2), "leaky_relu(0.2)"),
        (lambda x: x.clamp(-10, 10) * torch.sigmoid(x), None),  # silu, but clipped far out
        (lambda x: torch.nn.functional.gelu(x) + 1e-6, None),  # nearly gelu
        (lambda x: x.relu().cumsum(-1), None),
        (lambda x: x[:3], None),
        (nn.Dropout(0.9), "identity"),
    ],
)
def test_activations_are_recognised_by_their_values(candidate: object, name: str | None) -> None:
    found = recognise(candidate)
    assert (found and found.name) == name


@pytest.mark.parametrize("strict", [False, True])
def test_compiled_sites_guard_or_say_that_they_do_not(strict: bool) -> None:
    """A strict site looks at every call, outside of the compiled graph; others warn, once, that nobody does."""
    head = FastActivation.fit("gelu", -8, 8).requires_grad_(False)
    site = ConvertedActivation(head, "gelu", -8.0, 8.0, "mlp.act", strict)
    y = torch.linspace(-3, 3, 24)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        compiled = torch.compile(site, backend="eager")
        assert torch.allclose(compiled(y), site(y), atol=1e-6)
        told = [one for one in heard if issubclass(one.category, af.DomainWarning)]
    assert bool(told) == (not strict) and all("does not watch its ranges" in str(one.message) for one in told)
    if strict:
        with pytest.raises(af.DomainError, match="reaches -60"):
            compiled(20 * y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_compiled_whole(dtype: torch.dtype) -> None:
    product = ConvertedProduct(ProductHead.fit((-3, 3), (-2, 2)), "body.product")
    x, y = (torch.linspace(-high, high, 1001).to(dtype) for high in (3, 2))
    torch.compiler.reset()
    with pytest.warns(af.DomainWarning, match="does not watch its ranges"):
        found = torch.compile(product, backend="aot_eager", fullgraph=True)(x, y.flip(0))
    wanted = x.double() * y.flip(0).double()
    assert found.dtype == dtype and (found.double() - wanted).abs().max() <= product.site_bound(dtype)
