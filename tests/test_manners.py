"""Networks behave as Python people expect: whatever holds numbers goes in, whatever spells a function compiles, and
what does not is told in words."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sympy
import torch
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import attnforge as af
from attnforge.certificates import certified
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.errors import closest
from attnforge.frontends.formula.program import capture_formula
from attnforge.frontends.module.regressor import regressor
from attnforge.programs.interpret import values
from attnforge.progress import shown, stages

LINE = {"x": (-1.0, 1.0)}
PLANE = {"x": (0.0, 1.0), "y": (0.5, 2.0)}
X = sympy.Symbol("x")


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("sin(x) + y**2", PLANE, eps=1e-3, dtype="float64")


# -- inputs ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_input_is_the_same_point(net: CompiledNetwork) -> None:
    points = torch.tensor([[0.5, 1.0], [0.25, 1.5]], dtype=torch.float64)
    wanted = net(points)
    with torch.no_grad():  # sums may have another order where no gradients are wanted
        found = net(points)
    assert net.bound is not None and float((found - wanted).detach().abs().max()) < 1e-12 < net.bound
    columns = {"x": [0.5, 0.25], "y": [1.0, 1.5]}
    frame = pd.DataFrame({"label": ["a", "b"], "y": columns["y"], "x": columns["x"]})
    assert torch.equal(net(frame[["y", "x"]].iloc[0]), wanted[0]), "a row of a frame goes by its names, too"
    assert torch.equal(net(pd.Series([0.5, 1.0])), wanted[0])
    for given in (points.tolist(), points.numpy(), points.float().numpy(), frame, columns):
        assert torch.equal(net(given), wanted)
        assert np.array_equal(net.predict(given), found.numpy())
    assert torch.equal(net(**columns), wanted)
    assert torch.equal(net(x=0.5, y=columns["y"]), net([[0.5, 1.0], [0.5, 1.5]])), "numbers are the same for all"
    assert isinstance(net.predict(points.float()), np.ndarray)
    head = af.AnchorHead.fit("sin", -3, 3, eps=1e-2)
    assert torch.equal(head(y=[0.5]), head(torch.tensor([0.5])))
    assert head.predict(np.array([0.5])).dtype == np.float32
    assert torch.equal(head(pd.Series([0.5], index=["first"])), head(torch.tensor([0.5])))
    unnamed = af.compile(lambda x: x.sum(-1), af.Box.cube(-1, 1, shape=3), eps=1e-2)
    assert torch.equal(unnamed(pd.DataFrame([[0.1, 0.2, 0.3]])), unnamed([[0.1, 0.2, 0.3]]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda net: net(torch.zeros(1, 2)), r"float32 and the weights are torch.float64.*predict.*=torch.float32"),
        (lambda net: net(torch.zeros(1, 2, dtype=torch.float16)), r"net.predict\(x\)\)$"),
        (lambda net: net(["a"]), "must be a tensor, an array, a list or a number"),
        (lambda net: net(x=0.5), "the input 'y' is missing; the network takes x, y"),
        (lambda net: net(x=0.5, yy=1.0), "'yy' is not an input; did you mean 'y'"),
        (lambda net: net(x=np.zeros(3), y=np.zeros(4)), r"shapes that broadcast, got x \(3,\), y \(4,\)"),
        (lambda net: net([0.5, 1.0], x=0.5, y=1.0), "by name or by place, not both"),
        (lambda net: net(pd.DataFrame({"x": [0.5], "z": [1.0]})), "there is no column 'y'; the network takes"),
        (lambda net: net(pd.Series({"x": 0.5, "z": 1.0})), "there is no column 'y'; the network takes"),
        (lambda net: net(pd.DataFrame([[0.5, 0.1, 1.0]], columns=["x", "x", "y"])), "'x' is there more than once"),
        (lambda net: net(np.ma.array([[0.5, 1.0]], mask=[[True, False]])), "some of its entries are masked"),
        (lambda net: net(torch.ones(1, 2, dtype=torch.float64).to_sparse()), r"sparse .*use x.to_dense\(\)"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_told_in_words(net: CompiledNetwork, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(af.ArgumentError, match=words):
        call(net)


def test_functional_transforms(net: CompiledNetwork) -> None:
    points = net.box.sample(5)
    assert torch.equal(torch.func.vmap(net)(points), net(points))
    slopes = torch.func.vmap(torch.func.grad(net))(points)
    wanted = torch.stack([points[:, 0].cos(), 2 * points[:, 1]], -1)
    assert float((slopes - wanted).abs().max().detach()) < 0.1
    assert torch.equal(torch.func.jacrev(net)(points[0]), slopes[0])


# -- boxes, dtypes, outputs -----------------------------------------------------------------------------------------


def test_dtypes_and_boxes_by_name(tmp_path: Path) -> None:
    assert af.compile("x", LINE, eps=1e-3, dtype="float64").dtype == torch.float64
    assert af.GateHead.fit("relu", -1, 1, dtype="float64").dtype == torch.float64
    assert af.plan("x**2", LINE, eps=1e-2, dtype="float64").best.name
    assert af.TokenHead.mean(2, 1, dtype="float64").dtype == torch.float64
    assert af.compile("x", LINE, eps=1e-3, dtype=np.float64).dtype == torch.float64
    assert af.AnchorHead.fit("sin", -1, 1, eps=1e-2, dtype=np.dtype("float64")).dtype == torch.float64
    with pytest.raises(af.ArgumentError, match=r"float32 or torch.float64, or its name, got 'float16'"):
        af.compile("x", LINE, eps=1e-3, dtype="float16")
    with pytest.raises(af.ArgumentError, match="box must be a Box, a dict"):
        af.compile("x", [(-1, 1)], eps=1e-3)


def test_a_dict_of_formulas_names_its_outputs(tmp_path: Path) -> None:
    net = af.compile({"total": "x + y", "twice": "2*x"}, PLANE, eps=1e-2)
    assert net.outputs == ("total", "twice") and net.predict(x=0.5, y=1.0).tolist() == [1.5, 1.0]
    net.save(tmp_path / "net.safetensors")
    assert af.load(tmp_path / "net.safetensors").outputs == net.outputs
    assert af.plan({"total": "x + y", "twice": "2*x"}, PLANE, eps=1e-2).best.name
    (tmp_path / "points.csv").write_text("x,note,y\n0.5,a,1\n")
    assert command("run", tmp_path / "net.safetensors", "-i", tmp_path / "points.csv") == (0, "total,twice\n1.5,1.0\n")


# -- targets --------------------------------------------------------------------------------------------------------


def hard(t: float) -> float:
    return t * t if t > 0 else 0.0


TARGETS: dict[str, tuple[Any, Callable[[float], Any]]] = {
    "cbrt": ("cbrt(x)", lambda x: math.copysign(abs(x) ** (1 / 3), x)),
    "a function of math": (math.sin, math.sin),
    "a function of numpy": (np.sin, math.sin),
    "positions only": (lambda t, /: t * t, lambda x: x * x),
    "log": ("log(x + 2, 2)", lambda x: math.log2(x + 2)),
    "log of log": ("log(x + 3, x + 2.5)", lambda x: math.log(x + 3, x + 2.5)),
    "hypot": ("hypot(x, 1, 2)", lambda x: math.hypot(x, 1, 2)),
    "sign": ("sign(x + 2) * x", lambda x: x),
    "floor": ("floor(x/4 + 0.5) + ceil(x/4 + 0.5) * x", lambda x: x),
    "round": (lambda x: round(x / 9 + 5) * x, lambda x: 5 * x),
    "mod": ("mod(x/8 + 3/4, 1/2)", lambda x: x / 8 + 1 / 4),
    "math": (lambda x: math.sin(x) * math.pi + exp(x), lambda x: math.sin(x) * math.pi + math.exp(x)),
    "numpy": (lambda x: np.sin(x) + np.cbrt(x + 2), lambda x: math.sin(x) + (x + 2) ** (1 / 3)),
    "numpy where": (lambda x: np.where(x > 0, x, 0.1 * x), lambda x: x if x > 0 else 0.1 * x),
    "torch where": (lambda x: torch.where(x <= 0, torch.exp(x) - 1, x), lambda x: x if x > 0 else math.expm1(x)),
    "between": (lambda x: np.where((x > -0.5) & (x < 0.5), x**2, 0.25), lambda x: min(x * x, 0.25)),
    "piecewise": (sympy.Piecewise((X**2, X > 0), (0, True)), hard),
    "three pieces": (sympy.Piecewise((0, X < 0), (X, sympy.Rational(1, 2) > X), (sympy.Rational(1, 2), True)),
                     lambda x: min(max(x, 0.0), 0.5)),
    "a root where it is used": (sympy.Piecewise((sympy.sqrt(X), X > 0), (-X, True)), lambda x: x**0.5 if x > 0 else -x),
    "vector": (sympy.Matrix([X**2, sympy.sin(X)]), lambda x: [x * x, math.sin(x)]),
    "row": (sympy.Matrix([[X, 2 * X]]), lambda x: [x, 2 * x]),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_what_people_write_is_read(name: str) -> None:
    target, wanted = TARGETS[name]
    program = capture_formula(target, af.Box(LINE))
    x = torch.tensor([[-1.0], [-0.6], [-0.5], [-0.1], [0.0], [0.2], [0.5], [0.75], [1.0]], dtype=torch.float64)
    found = values(program, x).reshape(len(x), -1)
    expected = torch.tensor([wanted(float(t)) for t in x], dtype=torch.float64).reshape(len(x), -1)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_pieces_that_meet_are_certified() -> None:
    net = af.compile(sympy.Piecewise((X**2, X > 0), (0, True)), LINE, eps=1e-3)
    x = torch.linspace(-1, 1, 1001)[:, None]
    assert float((net(x) - x[:, 0].relu() ** 2).abs().max().detach()) <= (net.bound or 0) <= 1e-3


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("sign(x)*sqrt(abs(x))", r"write sqrt\(relu\(x\)\) - sqrt\(relu\(-x\)\) for sign"),
        ("floor(x)", r"floor\(x\) jumps on the box.*x reaches from -1 to 1"),
        ("sign(x)", "jumps"),
        (lambda x: np.where(x > 0, 1, 0 * x), "the pieces do not meet at x = 0, where one is 1 and the other 0"),
        (sympy.Piecewise((1, X > 0), (0, True)), "do not meet"),
        (sympy.Piecewise((X, X > 0)), "nothing where none of its conditions holds"),
        (lambda x: x if x > 0 else -x, "np.where"),
        (lambda x: math.gamma(x + 3), "gamma has no form"),
        ("x²", r"write x\*\*2"),
        ("π*x", "write pi"),
        ("x if x > 0 else 0", "conditions.*np.where.*Piecewise"),
        ("x > 0", "conditions"),
        ("1j*x", "real numbers"),
        ("foo(x)", "unknown function 'foo'; known are"),
        ("sin(π*x) + Y", "^π is a number: write pi$|^π is a number: write pi\\n"),
        ("tg(x)", r"no function 'tg' here: write tan\(x\)"),
        ("sort(x, 0)", "no function 'sort' here: the smaller of two is min"),
        ("x//2", r"whole quotient of x and 2 is floor\(x/2\)"),
        ("lambda x: x", "write that alone, or compile the Python function itself"),
        (np.hypot, "takes x1, x2, but the box has x"),
        (sympy.Matrix([[X, X], [X, X]]), "a row or a column, got 2 x 2"),
        (lambda x: x[0], "one number for each of x: 'Variable' object is not subscriptable; if it takes a tensor"),
        (lambda: 1, "takes no arguments, but the box has x"),
        (lambda x: round(x, 2), r"round\(\) to digits needs a number"),
        ("3", "uses none of x: a constant needs no network"),
        ("GELU(x)", "did you mean 'gelu'"),
        ("x – 1", "typographic minus or dash; write -"),
    ],
)
def test_what_cannot_be_read_is_told_in_words(target: Any, words: str) -> None:
    with pytest.raises(af.AttnforgeError, match=words):
        capture_formula(target, af.Box(LINE))


def test_messages_say_what_to_do() -> None:
    with pytest.raises(af.ArgumentError, match="give eps, rtol or both"):
        af.compile("x", LINE)
    with pytest.raises(af.PrecisionError, match=r"rtol = 0.001 alone.*eps=") as told:
        af.compile("sin(x)/3", LINE, rtol=1e-3)
    assert "eps = 0" not in str(told.value)
    with pytest.raises(af.DomainError, match=r"which is exp\(y \* log\(x\)\) here and begins at 0 only where y stays"):
        af.compile("x**y", {"x": (0, 1), "y": (0, 2)}, eps=1e-2)
    box = af.Box.cube(-1, 1, shape=3)
    with pytest.raises(af.UnsupportedOperation, match="the places that sort gives beside the values jump"):
        af.compile(lambda x: torch.sort(x).indices.to(x.dtype), box, eps=1e-2)
    net, points = af.compile(lambda x: torch.sort(x).values, box, eps=1e-2), box.sample(200, dtype=torch.float32)
    assert float((net(points) - torch.sort(points).values).abs().max().detach()) <= (net.bound or 0.0) <= 1e-2
    assert str(af.compile("x**2", LINE, eps=1e-1).size).startswith("1 layer, 1 head, ")


def test_only_near_words_are_suggested() -> None:
    assert closest("gleu", ["gelu", "sin"]) == "; did you mean 'gelu'?"
    assert closest("sinn", ["sign", "sin"]) == "; did you mean 'sin'?"
    assert closest("sinus", ["sin", "cos"]) == "; did you mean 'sin'?"
    assert closest("Gelu", ["elu", "gelu"]) == "; did you mean 'gelu'?"
    for word, known in (("foo", "floor"), ("x", "y"), ("bar", "max"), ("gamma", "mish")):
        assert closest(word, [known]) == ""


# -- scikit-learn, modules ------------------------------------------------------------------------------------------


def test_regressors_are_modules_exactly() -> None:
    rng = np.random.default_rng(0)
    points, y = rng.uniform(-1, 1, (50, 2)), rng.uniform(-1, 1, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        perceptrons = [
            MLPRegressor(hidden_layer_sizes=(3, 2), activation=kind, max_iter=5)
            for kind in ("relu", "tanh", "logistic", "identity")
        ]
        fitted = [make_pipeline(StandardScaler(), perceptron).fit(points + 1, y) for perceptron in perceptrons]
        fitted += [MLPRegressor(hidden_layer_sizes=(3,), max_iter=5).fit(points, np.c_[y, -y])]
    fitted += [LinearRegression().fit(points, y), LinearRegression().fit(points, np.c_[y, -y])]
    for model in fitted:
        found = regressor(model)
        assert found is not None
        with torch.no_grad():
            assert np.allclose(found(torch.from_numpy(points)).numpy(), model.predict(points), rtol=1e-13, atol=1e-13)
    net = af.compile(fitted[0], {"a": (-1, 1), "b": (-1, 1)}, eps=1e-3)
    error = np.abs(net.predict(points.astype(np.float32)) - fitted[0].predict(points.astype(np.float32).astype(float)))
    assert error.max() <= net.bound <= 1e-3
    forest = RandomForestRegressor(2, max_depth=2).fit(points, y)
    with pytest.raises(af.ArgumentError, match=r"RandomForestRegressor has no exact.*attnforge.approximate"):
        af.compile(forest, af.Box.cube(-1, 1, shape=2), eps=1e-3)
    with pytest.raises(af.ArgumentError, match=r"MLPClassifier gives classes, which jump.*predict_proba"):
        af.compile(MLPClassifier((2,)), {"a": (-1, 1), "b": (-1, 1)}, eps=1e-3)
    with pytest.raises(af.ArgumentError, match="not fitted yet"):
        af.compile(MLPRegressor(), af.Box.cube(-1, 1, shape=2), eps=1e-3)


def test_features_are_what_the_box_says_they_are() -> None:
    frame = pd.DataFrame({"b": [0.0, 1.0, 0.0], "a": [0.0, 0.0, 1.0]})
    model = LinearRegression().fit(frame, 2 * frame["b"])
    net = af.compile(model, {"b": (0, 1), "a": (0, 1)}, eps=1e-3)
    assert np.abs(net.predict(frame[["a", "b"]]) - model.predict(frame)).max() <= net.bound + 1e-12
    assert af.compile(model, {"u": (0, 1), "v": (0, 1)}, eps=1e-3).predict(u=1.0, v=0.0) == pytest.approx(2.0)
    for build in (af.compile, af.approximate):
        with pytest.raises(af.ArgumentError, match=r"with the features b, a, and the box has a, b: .*same order"):
            build(model, {"a": (0, 1), "b": (0, 1)}, eps=1e-3)


def test_other_regressors_are_approximated() -> None:
    points = np.linspace(-1, 1, 50)[:, None]
    forest = RandomForestRegressor(2, max_depth=2, random_state=0).fit(points, points[:, 0] ** 2)
    net = af.approximate(forest, {"x": (-1, 1)}, route="grid", anchors=33)
    assert net.certificate.kind == "calibrated" and "RandomForestRegressor" in net.certificate.target


def test_training_mode_is_named() -> None:
    box = af.Box.cube(-1, 1, shape=2)
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    with pytest.warns(UserWarning, match="in training mode, where Dropout differs"):
        af.compile(model, box, eps=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        af.compile(model.eval(), box, eps=1e-2)


def test_what_conversion_does_not_see_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.GELU(), nn.Linear(3, 1)).train()
    notes = af.convert(model, torch.rand(8, 2), eps=1e-2)[1].notes
    assert any("training mode" in note and "BatchNorm1d" in note for note in notes)
    assert not any("training mode" in note for note in af.convert(model.eval(), torch.rand(8, 2), eps=1e-2)[1].notes)
    with pytest.raises(af.ArgumentError, match=r"that a forward calls itself are not seen: .*nn.GELU\(\) for F.gelu"):
        af.convert(Bent().eval(), torch.rand(8, 3))


def test_prelu_converts_and_the_rest_is_explained(tmp_path: Path) -> None:
    from attnforge.conversion import storage

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.PReLU(init=0.3), nn.Linear(3, 1)).eval()
    converted, report = af.convert(model, torch.rand(8, 2), eps=1e-3)
    assert list(report.by_operation) == [f"leaky_relu({float(torch.tensor(0.3))!r})"]
    storage.save(converted, report, tmp_path / "model")
    other = nn.Sequential(nn.Linear(2, 3), nn.PReLU(), nn.Linear(3, 1)).eval()
    again = storage.load(tmp_path / "model", other)
    assert torch.equal(again(torch.ones(1, 2)), converted(torch.ones(1, 2)))
    with pytest.raises(af.UnsupportedOperation, match="a slope for each of 3 channels"):
        af.convert(nn.Sequential(nn.Linear(2, 3), nn.PReLU(3)).eval(), torch.rand(8, 2))
    for module, words in ((nn.GroupNorm(1, 2), "GroupNorm.*no head"), (nn.LSTM(2, 2), "LSTM.*gates its state")):
        with pytest.raises(af.ArgumentError, match=words):
            af.convert(module.eval(), torch.rand(8, 2))


class Bent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.where(y > 0, y * y, torch.zeros_like(y)).sum(-1)


@pytest.mark.parametrize(
    "target",
    [
        Bent(),
        lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
        lambda x: torch.where(x > 0.5, 0.5, torch.where(x <= -0.5, -0.5, x)),
    ],
)
def test_where_with_pieces_that_meet_is_captured(target: Callable[[Tensor], Tensor]) -> None:
    box = af.Box.cube(-1, 1, shape=3)
    net, x = af.compile(target, box, eps=1e-2), box.sample(300, dtype=torch.float32)
    assert float((net(x) - target(x)).abs().max().detach()) <= (net.bound or 0.0) <= 1e-2


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (lambda x: torch.where(x > 0, 1.0, x), "torch.where jumps at 0, from 0 to 1"),
        (lambda x: torch.where(x > 0, x, x.flip(-1)), "torch.where has a form where"),
        (lambda x: torch.where(x > 0, x, x * x.sum(-1, keepdim=True)), "torch.where has a form where"),
        (lambda x: torch.where(x > 0, x, 5e-324 + 0 * x), "torch.where jumps at 0, from 4.941e-324 to 0"),
        (  # the number above 0 is another one in every dtype
            lambda x: torch.where(x > 0, x, torch.nextafter(torch.tensor(0.0), torch.tensor(1.0)) + 0 * x),
            "torch.where has a form where",
        ),
    ],
)
def test_where_with_pieces_that_do_not_is_refused(target: Callable[[Tensor], Tensor], told: str) -> None:
    with pytest.raises(af.UnsupportedOperation, match=told):
        af.compile(target, af.Box.cube(-1, 1, shape=3), eps=1e-2)


def test_a_norm_without_an_epsilon_has_that_of_its_dtype() -> None:
    module = nn.RMSNorm(3)
    net = af.compile(module, af.Box.cube(-1, 1, shape=3), eps=0.1)
    x = net.box.sample(200, dtype=torch.float32)
    assert float((net(x) - module(x)).abs().max().detach()) <= net.bound <= 0.1 and module.eps is None


# -- what networks say of themselves --------------------------------------------------------------------------------


def test_networks_show_themselves(net: CompiledNetwork, tmp_path: Path) -> None:
    assert repr(net) == f"CompiledNetwork(sin(x) + y**2 on {net.box!r}, float64, bound {text(net.bound)})"
    found = net.measure(500)
    assert 0 < found.worst <= net.bound and found.count >= 500
    assert "layer 1" in net.explain() and "sin(x)" in net.explain() and text(net.bound) in net.explain()
    assert net.plot(tmp_path / "net.svg").read_text().startswith("<?xml")
    assert "sin" in net.report(tmp_path / "net.html").read_text()
    head = af.AnchorHead.fit("sin", -3, 3, eps=1e-2)
    assert "sin on Box(y=(-3, 3)), float32, bound" in repr(head)
    assert 0 < head.measure(100).worst <= head.bound and "certified" in head.explain()
    head.double()
    assert "no certificate" in repr(head)


@pytest.mark.parametrize(
    "head",
    [
        lambda: af.ProductHead.fit((-1, 1), (-1, 2), eps=1e-2),
        lambda: af.ProductHead.fit((-1, 1), (-1, 1), eps=1e-2, width=3),
        lambda: af.NormHead.fit(4, (0.5, 2.0), eps=1e-2),
        lambda: af.NormHead.fit(3, (0.01, 100.0), eps=1e-2, kind="rms", dtype="float64"),
        lambda: af.TokenHead.mean(3, 2),
        lambda: af.GateHead.max(-1, 1),
        lambda: af.AnchorHead.fit("sin", -3, 3, eps=1e-2, fast=True),
    ],
)
def test_every_head_can_be_measured(head: Callable[[], Any]) -> None:
    built = head()
    found = built.measure(500)
    assert found.count >= 500 and 0 <= found.worst <= built.bound and math.isfinite(found.worst)
    with torch.no_grad():
        for weight in built.parameters():
            weight.mul_(1.1)
    try:
        bound = af.certify(built).bound
    except af.CertificateError:  # nothing is measured against what no longer holds
        return
    assert found.worst < built.measure(500).worst <= bound, "what was changed is seen"


def text(bound: float | None) -> str:
    from attnforge.certificates.certificate import upper_text

    return upper_text(bound)


# -- the command line -----------------------------------------------------------------------------------------------


def command(*arguments: object) -> tuple[int, str]:
    from typer.testing import CliRunner

    from attnforge.cli import app

    done = CliRunner().invoke(app, [str(a) for a in arguments])
    return done.exit_code, done.output


def test_run_reads_the_columns_it_needs(tmp_path: Path, net: CompiledNetwork) -> None:
    file, points = tmp_path / "net.safetensors", tmp_path / "points.csv"
    net.save(file)
    points.write_text("name,y,x\nfirst,1.0,0.5\n")
    code, out = command("run", file, "-i", points)
    assert code == 0 and float(out.split()[1]) == pytest.approx(math.sin(0.5) + 1, abs=1e-3)
    points.write_text("x,y,x\n0.5,1.0,0.25\n")
    assert command("run", file, "-i", points) == (
        2, f"error: '{points}' has the column 'x' more than once: which one is meant?\n")  # fmt: skip
    code, out = command("run", tmp_path, "-i", points)
    assert code == 2 and "is a folder" in out
    for cells, words in (("1_0,1.0", "'1_0', which is not a number"), ("0.5", "has 1 cell, the header 2"),
                         ("0.5," + 200_000 * "1", "cannot be read as csv: field larger")):
        points.write_text(f"x,y\n{cells}\n")
        code, out = command("run", file, "-i", points)
        assert code == 2 and words in out, out
    with pytest.raises(af.CertificateError, match="is a folder, not a file"):
        certified.load(tmp_path)


def test_text_is_utf_8_wherever_it_comes_from(tmp_path: Path, net: CompiledNetwork) -> None:
    from typer.testing import CliRunner

    from attnforge.cli import app

    runner, file, lines = CliRunner(), tmp_path / "net.safetensors", tmp_path / "lines.txt"
    net.save(file)
    done = runner.invoke(app, ["run", str(file), "-i", "-"], input="\ufeffx,y\r\n0.5,1\r\n".encode())
    assert done.exit_code == 0 and done.output.startswith("output\n")
    domain = af.rasp.Sequences("äö", 3)
    af.compile(af.rasp.library.get("reverse").program(domain), domain).save(tmp_path / "program.safetensors")
    program = ["run", str(tmp_path / "program.safetensors"), "-i"]
    done = runner.invoke(app, [*program, "-"], input="\ufeffäö\n".encode())
    assert (done.exit_code, done.output) == (0, "öä\n")
    lines.write_bytes(b"\xff\n")
    for name, given in ((str(lines), b""), ("-", b"\xff\n")):
        done = runner.invoke(app, [*program, name], input=given)
        assert done.exit_code == 2 and f"'{name}' is not text in UTF-8" in done.output


def test_functions_lists_every_word_of_formulas() -> None:
    from attnforge.expressions.special import ALIASES, words

    code, out = command("functions")
    listed = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert code == 0 and set(words()) <= listed
    assert all(f"{other} = {name}" in out for other, name in ALIASES.items())


def test_tables_follow_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("head", "sin", "--lo", "-3", "--hi", "3", "--eps", "1e-2")
    _, wide = command(*arguments)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    code, narrow = command(*arguments)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in narrow.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("site"))
    assert code == 0 and max(map(len, lines[start:])) <= 60 < max(map(len, wide.splitlines()))
    assert "".join(lines[start].split()) == "sitesourceatmostnote"
    told = "".join("".join(lines).split())  # nothing is left out where lines are short
    for longer in (("plan", "sin(x)*y", "--box", "x=0:1", "--box", "y=0:1", "--eps", "1e-2"), ("functions",)):
        code, out = command(*longer)
        assert code == 0 and max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines())) <= 60, out
    assert "assuming" in told and all("".join(line.split()) in told for line in wide.splitlines()[-3:])


def test_a_closed_pipe_is_no_failure() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "attnforge", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)


def test_work_inside_other_work_shares_its_line() -> None:
    seen: list[str] = []
    with stages(seen.append) as outer, stages(None, "fitting") as inner:
        assert inner is outer
        inner("anchors")
    assert seen == ["anchors"] and shown("fitting")(lambda x: 2 * x)(3) == 6


def test_python_arguments_are_options_on_the_command_line() -> None:
    from attnforge.cli.common import as_options

    assert as_options("it needs a batch: give calibration=batches") == "it needs a batch: give --texts FILE"
    assert as_options("there already; force=True overwrites it") == "there already; --force overwrites it"
