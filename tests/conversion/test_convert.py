"""`convert` on small models of plain PyTorch: arguments, data, ranges, what is refused and what is said about it."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attnforge as af
from attnforge.conversion.find import recognise
from attnforge.conversion.ranges import read
from attnforge.conversion.site import ConvertedActivation
from attnforge.conversion.storage import recertified
from attnforge.functions.registry import get


def mlp(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), activation or nn.GELU(), nn.Linear(8, 2)).eval()


X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


class Functional(nn.Module):
    """Calls its activation as a function: there is no module to exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.gelu(self.first(x)))
        return out


class Kept(nn.Module):
    """Keeps its activation as an attribute."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(3, 8), nn.Linear(8, 2), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.act(self.first(x)))
        return out


ACTIVATIONS = [
    nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.Mish(), nn.ELU(),
    nn.LeakyReLU(0.1), nn.Hardtanh(), nn.ReLU6(), nn.Softsign(), nn.Hardtanh(-0.5, 2.0), nn.Hardsigmoid(),
    nn.Hardswish(), nn.SELU(),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda m: str(m))
def test_the_certified_bound_of_a_site_holds_on_its_range(activation: nn.Module) -> None:
    model = mlp(activation)
    result, report = af.convert(model, X)
    (site,) = report.sites
    assert site.relative <= 1e-4
    assert site.low_seen is not None
    assert site.high_seen is not None
    assert site.low <= 2 * site.low_seen < 2 * site.high_seen <= site.high
    y = torch.linspace(site.low, site.high, 20001)
    wanted = activation(y.double())
    module = result[1]
    assert isinstance(module, ConvertedActivation)
    with torch.no_grad():
        assert float((module(y).double() - wanted).abs().max()) <= site.bound
        assert float((result(X) - model(X)).abs().max()) <= 1e-3


@given(scale=st.floats(0.05, 30), shift=st.floats(-5, 5), eps=st.sampled_from([1e-2, 1e-4, 1e-5]))
@settings(max_examples=8, deadline=None)
def test_bounds_hold_for_any_range(scale: float, shift: float, eps: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.add_(shift)
    size = float(F.gelu(model[0](X)).detach().abs().max())
    refused, found = "", None
    try:
        found = af.convert(model, X, eps=eps)
    except af.PrecisionError as error:
        refused = str(error)
    if found is None:  # outputs so small that eps of them is below what float32 can do on the range
        assert eps * size < 1e-6 and "of its output's scale" in refused
        return
    result, report = found
    (site,) = report.sites
    assert site.relative <= eps
    y = torch.linspace(site.low, site.high, 5001)
    with torch.no_grad():
        assert float((result[1](y).double() - F.gelu(y.double())).abs().max()) <= site.bound


def test_weights_are_shared_and_the_original_stays() -> None:
    model = mlp()
    result, report = af.convert(model, X)
    assert result[0].weight is model[0].weight
    assert isinstance(model[1], nn.GELU)
    assert report.parameters_before == sum(p.numel() for p in model.parameters())
    assert report.parameters_after == sum(p.numel() for p in result.parameters()) > report.parameters_before


@pytest.mark.parametrize("act", [F.gelu, torch.tanh, F.silu, lambda x: x * torch.sigmoid(1.702 * x)])
def test_functions_kept_as_attributes(act: Any) -> None:
    model = Kept(act).eval()
    result, report = af.convert(model, X)
    assert report.sites[0].path == "act"
    assert isinstance(result.act, ConvertedActivation)
    assert model.act is act
    assert float((result(X) - model(X)).detach().abs().max()) < 1e-5


def test_one_module_at_several_places_is_one_site() -> None:
    shared = nn.GELU()
    model = nn.Sequential(nn.Linear(3, 8), shared, nn.Linear(8, 8), shared, nn.Linear(8, 2)).eval()
    result, report = af.convert(model, X)
    (site,) = report.sites
    assert (site.path, site.aliases, site.calls) == ("1", ("3",), 2)
    assert result[1] is result[3]


def test_functional_calls_are_listed_and_may_stay() -> None:
    model = nn.Sequential(Functional(), nn.ReLU(), nn.Linear(2, 2)).eval()
    with pytest.raises(af.UnsupportedOperation, match=r"0: gelu, called as a function at test_convert.py:\d+"):
        af.convert(model, X)
    _, report = af.convert(model, X, leave=["0"])
    assert [(left.path, left.operation) for left in report.left] == [("0", "gelu")]
    with pytest.raises(af.UnsupportedOperation, match="0: gelu"):
        af.convert(model, X, level="pure")


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_what_is_left_in_the_graph_of_a_pure_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), Twice()), nn.Linear(3, 2)).eval()
    with pytest.raises(af.UnsupportedOperation, match=r"2\.1: mul: an elementwise product"):
        af.convert(model, X, level="pure")
    _, report = af.convert(model, X, level="pure", leave=["2.1"])
    assert [(left.path, left.operation) for left in report.left] == [("2.1", "mul")]
    assert not report.census
    assert any("not pure" in note for note in report.notes)


class Twice(nn.Module):
    """Not pointwise: multiplies with the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean(-1, keepdim=True)


def test_a_square_is_an_activation_like_any_other() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Squares(), nn.Linear(3, 2)).eval()
    _, report = af.convert(model, X, level="pure")
    assert report.by_operation == {"square": 1}
    assert report.census["attention"] > 0
    assert "exported graph:" in str(report)


def test_softshrink_of_any_width_is_recognised() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softshrink(0.3), nn.Linear(4, 2)).eval()
    converted, report = af.convert(model, X)
    assert report.by_operation == {"piecewise_linear([-0.6, -0.3, 0.3, 0.6], [-0.3, 0.0, 0.0, 0.3])": 1}
    assert float((converted(X) - model(X)).detach().abs().max()) <= 1e-3


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "path"), [(nn.PReLU(8), "1"), (nn.Hardshrink(), "1"), (nn.GLU(), "1"), (nn.Threshold(0.1, 20.0), "1")]
)
def test_unknown_modules_are_named_and_may_stay(module: nn.Module, path: str) -> None:
    width = 4 if isinstance(module, nn.GLU) else 8
    model = nn.Sequential(nn.Linear(3, 8), module, nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with pytest.raises(af.UnsupportedOperation, match=rf"{path}: {type(module).__name__}"):
        af.convert(model, X)
    _, report = af.convert(model, X, leave=path)
    assert report.by_operation == {"relu": 1}
    assert report.left[0].path == path


def test_all_unknown_modules_are_listed_at_once() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.PReLU(8), nn.Linear(8, 8), nn.Hardshrink(), nn.Linear(8, 2))
    with pytest.raises(af.UnsupportedOperation) as caught:
        af.convert(model, X)
    assert "1: PReLU" in str(caught.value)
    assert "3: Hardshrink" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (dict(level="all"), "level must be 'ffn'"),
        (dict(eps=0.0), "eps must be"),
        (dict(eps=float("nan")), "eps must be"),
        (dict(margin=0.5), "margin must be"),
        (dict(variance_margin=-1), "variance_margin must be"),
        (dict(anchors=1), "anchors must be"),
        (dict(leave=["nothing.here"]), "no such path"),
        (dict(leave=3), "leave must be"),
        (dict(leave=[3]), "leave must hold"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(af.ArgumentError, match=told):
        af.convert(mlp(), X, **arguments)


@pytest.mark.parametrize(
    ("calibration", "told"),
    [
        (3, "iterable of batches"),
        ("text", "iterable of batches"),
        ([], "no batch"),
        (["text"], "batch 0 must be a dict"),
        ([X, 7], "batch 1 must be a dict"),
        (torch.zeros(0, 3), "is empty"),
        (X * float("nan"), "holds NaN"),
        (torch.zeros(4, 5), "does not take calibration batch 0"),
        ({"wrong": X}, "does not take calibration batch 0"),
    ],
)
def test_bad_calibration(calibration: Any, told: str) -> None:
    with pytest.raises(af.ArgumentError, match=told):
        af.convert(mlp(), calibration)


def test_infinities_inside_the_model_are_told_with_the_path() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias.fill_(float("inf"))
    with pytest.raises(af.ArgumentError, match="NaN or infinity to '1'"):
        af.convert(model, X)


def test_models_that_cannot_be_taken_apart() -> None:
    model = mlp()
    with pytest.raises(af.ArgumentError, match=r"must be a torch.nn.Module"):
        af.convert("model", X)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
        with pytest.raises(af.UnsupportedOperation, match="the model itself is scripted"):
            af.convert(scripted, X)
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    with pytest.raises(af.UnsupportedOperation, match="0 is quantised"):
        af.convert(quantised, X)
    with pytest.raises(af.UnsupportedOperation, match="meta device"):
        af.convert(copy.deepcopy(model).to("meta"), X)
    mixed = copy.deepcopy(model)
    mixed[2].double()
    with pytest.raises(af.ArgumentError, match="several dtypes"):
        af.convert(mixed, X)


def test_a_model_without_sites() -> None:
    with pytest.raises(af.ArgumentError, match="no site to convert"):
        af.convert(nn.Sequential(nn.Linear(3, 2)), X)
    with pytest.raises(af.ArgumentError, match=r"1 \(layer_norm\).*level='pure'"):
        af.convert(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), X)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = mlp(), mlp()

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        out: Tensor = self.body(x) + self.spare(x) if both else self.body(x)
        return out


def test_calibration_that_never_reaches_a_site() -> None:
    model = Branch()
    with pytest.raises(af.ArgumentError, match=r"never reaches 1 site: spare\.1"):
        af.convert(model, [{"x": X}])
    _, report = af.convert(model, [{"x": X, "both": True}])
    assert len(report.sites) == 2
    _, report = af.convert(model, [{"x": X}], leave="spare")
    assert [site.path for site in report.sites] == ["body.1"]


def test_precision_that_cannot_be_reached_is_told_per_site() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    with pytest.raises(af.PrecisionError) as caught:
        af.convert(model, X, level="pure", eps=1e-12)
    assert "1: gelu reaches" in str(caught.value)
    assert "2: layer_norm reaches" in str(caught.value)


# -- data ------------------------------------------------------------------------------------------------------------


def test_one_batch_is_split_for_holding_out() -> None:
    data = read(X)
    assert data is not None
    assert (data.seen[0].rows, data.held[0].rows) == (32, 8)
    assert torch.equal(torch.cat([data.seen[0].args[0], data.held[0].args[0]]), X)
    several = read([X] * 11)
    assert several is not None
    assert (len(several.seen), len(several.held)) == (9, 2)
    _, report = af.convert(mlp(), X[:1])
    assert any("nothing held out" in note for note in report.notes)


@pytest.mark.parametrize("batch", [X, (X,), [X], {"input": X}], ids=["tensor", "tuple", "list", "dict"])
def test_batches_of_every_form(batch: Any) -> None:
    _, report = af.convert(mlp(), [batch, batch])
    assert (report.batches, report.held_out) == (1, 1)
    assert report.change is not None


def test_training_mode_and_dropout_are_kept_and_told() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    result, report = af.convert(model, X)
    assert result.training
    assert result[1].training
    assert isinstance(result[2], nn.Dropout)
    assert any("dropout" in note for note in report.notes)
    assert not torch.equal(result(X), result(X))
    assert torch.equal(result.eval()(X), result(X))
    assert model.training


def test_without_data_ranges_follow_from_the_weights() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2).eval()
    result, report = af.convert(model)
    x = 100 * torch.randn(3, 4, 12)
    site = report.sites[0]
    assert site.low_seen is None
    seen: list[Tensor] = []
    result.get_submodule(site.path).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        assert float((result(x) - model(x)).abs().max()) < 1e-5
    assert site.low <= float(seen[0].min())
    assert float(seen[0].max()) <= site.high
    assert report.change is None
    with pytest.raises(af.ArgumentError, match=r"without calibration .* 1 \(gelu\)"):
        af.convert(mlp())
    with pytest.raises(af.ArgumentError, match=r"norm1 \(layer_norm\)"):
        af.convert(model, level="pure")


def test_forced_anchors_and_cold_heads() -> None:
    _, warm = af.convert(mlp(), X, anchors=24, fast=False)
    assert warm.sites[0].anchors == 24
    _, cold = af.convert(mlp(), X, anchors=24, cold=True)
    assert cold.sites[0].kappa is not None
    assert cold.sites[0].kappa >= 1
    assert cold.worst > 100 * warm.worst


def test_a_converted_model_can_be_converted_further() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    first, _ = af.convert(model, X)
    second, report = af.convert(first, X, level="pure")
    assert report.by_operation == {"layer_norm": 1}
    assert any("1 sites were attention before" in note for note in report.notes)
    assert float((second(X) - model(X)).detach().abs().max()) < 1e-5
    with pytest.raises(af.ArgumentError, match="no site"):
        af.convert(second, X)


class Callback(nn.Module):
    """Keeps a function that is not to be called."""

    def __init__(self, calls: list[Tensor]) -> None:
        super().__init__()
        self.body = mlp()
        self.report = lambda x: calls.append(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def test_a_strangers_callback_is_not_called() -> None:
    calls: list[Tensor] = []
    _, report = af.convert(Callback(calls), X)
    assert [site.path for site in report.sites] == ["body.1"]
    assert calls == []


@pytest.mark.parametrize("threshold", [20.0, 12.0])
def test_the_jump_of_softplus_is_in_the_bound(threshold: float) -> None:
    """PyTorch's softplus is the identity beyond its threshold; log(1 + exp(-12)) is 6e-6."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Softplus(threshold=threshold), nn.Linear(8, 2))
    result, report = af.convert(model, 20 * X)
    (site,) = report.sites
    assert site.operation == "softplus" and site.high > threshold
    assert site.config["jump"] == pytest.approx(math.log1p(math.exp(-threshold)))
    y = torch.cat([torch.linspace(site.low, site.high, 20001), torch.linspace(threshold - 1e-3, threshold + 1, 2001)])
    with torch.no_grad():
        assert float((result[1](y).double() - model[1](y.double())).abs().max()) <= site.bound
    assert site.bound > site.config["jump"]
    assert recertified(result, report).sites[0].bound == pytest.approx(site.bound, rel=1e-3)
    smooth = nn.Sequential(nn.Linear(3, 8), nn.Softplus(threshold=math.inf), nn.Linear(8, 2))
    assert "jump" not in af.convert(smooth, 20 * X)[1].sites[0].config


def test_a_softplus_with_a_threshold_that_nobody_states_is_not_recognised() -> None:
    assert recognise(lambda x: torch.where(x > 17, x, torch.logaddexp(x, torch.zeros_like(x)))) is None
    for same in (nn.Softplus(), torch.nn.functional.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x))):
        assert recognise(same) is get("softplus")
    assert recognise(functools.partial(torch.nn.functional.softplus, threshold=17)) is get("softplus")


class Wide(nn.Linear):
    """A linear map that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 500 * super().forward(input)


class Block(nn.Module):
    """Norm, linear map, activation, with something in between that the weights do not tell."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.norm, self.act = how, nn.LayerNorm(4), nn.GELU()
        self.linear = (Wide if how == "subclass" else nn.Linear)(4, 8)
        if how == "hook":
            self.norm.register_forward_hook(lambda module, args, output: 80 * output)
        if how == "instance":
            self.linear.forward = lambda x: 80 * F.linear(x, self.linear.weight)  # type: ignore[method-assign]

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"x": torch.tensor([[0.5, -1.0, 2.0, 0.25]])}

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        if self.how == "after the norm":
            rows.mul_(80.0)
        if self.how == "data":
            rows.data.mul_(80.0)
        if self.how == "view":
            rows.view(-1).mul_(80.0)
        wide = self.linear(rows)
        if self.how == "after the map":
            wide.add_(100.0)
        return self.act(wide)


def test_constants_of_few_digits_are_in_the_bound() -> None:
    """An activation that is recognised only roughly is not the function that its head was built for."""

    class Rough(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    rough, smooth = (nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), act) for act in (Rough(), nn.GELU("tanh")))
    data = torch.randn(64, 4, dtype=torch.float64)
    site = af.convert(rough, data)[1].sites[0]
    assert site.operation == "gelu_tanh" and site.bound > site.config["jump"] > 1e-10
    assert "jump" not in af.convert(smooth, data)[1].sites[0].config


@pytest.mark.parametrize("how", ["after the norm", "after the map", "data", "view", "subclass", "hook", "instance"])
def test_ranges_from_weights_are_refused_where_something_else_happens(how: str) -> None:
    model = Block(how)
    with pytest.raises(af.ArgumentError, match=r"act \(gelu\).*give calibration=batches"):
        af.convert(model, None)
    _, report = af.convert(model, torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    assert len(report.sites) == 1


def test_ranges_from_weights_hold_where_nothing_else_happens() -> None:
    model = Block("plain")
    with torch.no_grad():
        model.linear.weight.mul_(3)
    _, report = af.convert(model, None)
    (site,) = report.sites
    rows = torch.randn(10000, 4, generator=torch.Generator().manual_seed(0)) * 1000
    with torch.no_grad():
        wide = model.linear(model.norm(rows))
    assert site.low <= float(wide.min()) < float(wide.max()) <= site.high
