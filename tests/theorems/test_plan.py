"""Plans before building, figures as images, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import attnforge as af
from attnforge import theorems
from attnforge.cli import app
from attnforge.errors import ArgumentError, PrecisionError


@pytest.mark.parametrize("eps", [0.3, 0.02, 5e-3])
def test_plans_are_kept_and_smallest(eps: float) -> None:
    for form in ("paper", "tokens"):
        planned = theorems.plan(eps, "ramp", a=-3, b=5, d=4, form=form)
        m = theorems.ramp(torch.ones(4, dtype=torch.float64), 0.0, -3, 5, planned.anchors, form=form)
        assert m.bound == planned.eps <= eps and m.size.parameters == planned.parameters
        assert m.size.logit == planned.logit and float(m.beta) == planned.beta
        smaller = theorems.ramp(torch.ones(4, dtype=torch.float64), 0.0, -3, 5, planned.anchors - 1, form=form)
        assert smaller.bound > eps
    many = theorems.plan(eps, "ramp_heads", a=-3, b=5, tokens=12)
    assert theorems.ramp_heads([1.0], 0.0, -3, 5, many.heads, 12).bound == many.eps <= eps
    if many.heads > 1:
        assert theorems.ramp_heads([1.0], 0.0, -3, 5, many.heads - 1, 12).bound > eps


def test_variants_need_less() -> None:
    cold, warm, gate = (theorems.plan(1e-3, "ramp", variant=variant) for variant in ("cold", "warm", "gate"))
    assert gate.parameters < 40 < warm.parameters < cold.parameters / 4
    cold, warm = (theorems.plan(3e-3, "ramp_heads", tokens=20, variant=variant) for variant in ("cold", "warm"))
    assert warm.eps <= 3e-3 and 1 < warm.heads < cold.heads / 2
    smaller = theorems.ramp_heads([1.0], 0.0, -1, 1, warm.heads - 1, 20, variant="warm")
    assert smaller.bound is not None and smaller.bound > 3e-3, "one head less is not enough"


def test_a_budget_is_respected_and_used() -> None:
    for theorem, extra in (("ramp", {}), ("ramp_heads", {"tokens": 10}), ("two_layer", {"dim": 2}), ("max_affine", {})):
        small, large = (theorems.plan(theorem=theorem, budget=budget, **extra) for budget in (2000, 20000))
        assert small.parameters <= 2000 and 2000 < large.parameters <= 20000
        assert large.eps < small.eps
    assert "anchors" in str(small) and json.loads(json.dumps(small.to_json()))["eps"] == small.eps


def test_float32_says_what_can_be_reached() -> None:
    with pytest.raises(PrecisionError, match="does not reach eps = 1e-05 in float32") as caught:
        theorems.plan(1e-5, "ramp", a=-25, b=25, dtype=torch.float32)
    assert caught.value.reachable is not None and 1e-5 < caught.value.reachable < 1


@pytest.mark.parametrize("theorem", ["two_layer", "attention_then_softmax", "max_affine"])
def test_grid_plans_are_what_is_built(theorem: str) -> None:
    planned = theorems.plan(0.1, theorem, dim=2, side=1.0, lipschitz=1.0, outputs=2)
    pieces = round(1 / float(planned.note.split()[1].rstrip(";")))
    f = lambda X: X.flip(-2)  # noqa: E731
    box = af.Box.cube(0, 1, shape=(2, 1))
    if theorem == "max_affine":
        m: Any = theorems.max_affine(f, box, cells=pieces**2, lipschitz=1.0)
    else:
        m = getattr(theorems, theorem)(f, box, 1 / pieces * (1 + 1e-9), lipschitz=1.0)
    assert m.bound <= planned.eps * 1.0001 <= 0.1001
    assert m.size.parameters == planned.parameters and m.size.heads == planned.heads and m.size.layers == planned.layers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"theorem": "ramps", "eps": 0.1}, "did you mean 'ramp'"),
        ({}, "give eps"),
        ({"eps": 0.1, "budget": 5}, "one of the two"),
        ({"eps": -1.0}, "eps must be positive"),
        ({"eps": 0.1, "a": 1.0, "b": 1.0}, "a must be smaller than b"),
        ({"budget": 3}, "too small"),
        ({"budget": 3, "theorem": "two_layer"}, "too small"),
        ({"eps": 0.1, "variant": "hot"}, "variant must be"),
        ({"eps": 0.1, "theorem": "ramp_heads", "tokens": 2}, "tokens must be"),
        ({"eps": 0.1, "dtype": torch.float16}, "dtype must be"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_plans_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        theorems.plan(**arguments)


W = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
PICTURES = {
    "ramp": lambda: theorems.ramp(W, 0.3, -1, 1, anchors=17),
    "per token": lambda: theorems.ramp(W.expand(3, 3), [0.1, 0.2, 0.3], -1, 1, anchors=200),
    "heads": lambda: theorems.ramp_heads(W, 0.3, -1, 1, heads=3, tokens=8),
    "warm": lambda: theorems.ramp(W, 0.3, -1, 1, anchors=17, variant="warm"),
    "warm heads": lambda: theorems.ramp_heads(W, 0.3, -1, 1, heads=3, tokens=9, variant="warm"),
    "gathered cells": lambda: theorems.max_affine(
        torch.sin, af.Box.cube(-1, 1, shape=(2, 1)), cells=100, lipschitz=1.0, form="tokens"
    ),
    "gate": lambda: theorems.ramp(W.float(), 0.3, -1, 1, variant="gate"),
    "two layers": lambda: theorems.two_layer(torch.sin, af.Box.cube(-1, 1, shape=(2, 1)), 0.2, lipschitz=1.0),
    "cells": lambda: theorems.max_affine(torch.sin, af.Box.cube(-1, 1, shape=2), cells=100),
}


@pytest.mark.parametrize("name", PICTURES)
def test_figures_show_something(name: str, tmp_path: Path) -> None:
    m = PICTURES[name]()
    path = m.plot(tmp_path / "figure.png")
    image = np.asarray(Image.open(path).convert("RGB"), dtype=int)
    assert image.shape[0] > 900 and image.shape[1] > 1400
    height, width = image.shape[0] // 2, image.shape[1] // 2
    for panel in (image[:height, :width], image[:height, width:], image[height:, :width], image[height:, width:]):
        coloured = np.ptp(panel, axis=-1) > 40
        assert 0.001 < coloured.mean() < 0.6, "each quarter holds curves or cells, and is not a block"
    data = m.picture()
    assert data.bound is None or data.error.max() <= data.bound
    if name in ("ramp", "heads", "two layers"):
        assert np.median(data.weights.max(1)) > 0.99, "one-hot columns when cold"


def test_a_figure_without_a_path_is_returned() -> None:
    figure = theorems.ramp([1.0], 0.0, 0, 1, anchors=9).plot()
    assert len(figure.axes) >= 4


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, ["theorem", *args], prog_name="attnforge")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    "args",
    [
        ("ramp", "--w", "1,-2", "--a", "-1", "--b", "1", "--anchors", "33"),
        ("ramp", "--a", "-1", "--b", "1", "--variant", "warm", "--dtype", "float32"),
        ("ramp-heads", "--a", "-1", "--b", "1", "--heads", "3", "--tokens", "6"),
        ("relu", "--radius", "2", "--form", "tokens", "--causal"),
        ("leaky_relu", "--radius", "2", "--slope", "0.1"),
        ("hard_tanh",),
        ("clipped_relu", "--cap", "6"),
        ("two_layer", "--formula", "x*y", "--formula", "x-y", "--box", "x=0:1", "--box", "y=0:1", "--spacing", "0.2",
         "--lipschitz", "2"),
        ("attention_then_softmax", "--formula", "sin(x)", "--box", "x=0:1", "--spacing", "0.1", "--lipschitz", "1"),
        ("max_affine", "--formula", "x*y", "--box", "x=0:1", "--box", "y=0:1", "--cells", "50", "--lipschitz", "2"),
    ],
    ids=lambda args: args[0],
)  # fmt: skip
def test_every_theorem_has_a_command(args: tuple[str, ...]) -> None:
    shown = json.loads(call(*args, "--json").stdout)
    assert 0 < shown["measured"] <= shown["bound"] and shown["certificate"]["kind"] == "certified"
    text = call(*args)
    said = "certified: |network - target| <="  # the kernel has a rule for all of them
    assert text.exit_code == 0 and said in text.stdout and "largest |logit|" in text.stdout


def test_plan_and_plot_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "anchors (keys)   1002" in call("plan", "--eps", "1e-3").stdout
    assert json.loads(call("plan", "--budget", "500", "--theorem", "ramp_heads", "--json").stdout)["parameters"] <= 500
    assert "wrote ramp.png" in call("ramp", "--a", "0", "--b", "1", "--plot").stdout
    assert "wrote other.svg" in call("ramp", "--a", "0", "--b", "1", "--plot", "other.svg").stdout
    assert {p.name for p in tmp_path.iterdir()} == {"ramp.png", "other.svg"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("rampp",), "did you mean 'ramp'"),
        (("ramp",), "needs --a, --b"),
        (("ramp", "--a", "1", "--b", "0"), "a must be smaller than b"),
        (("ramp", "--a", "0", "--b", "1", "--heads", "2"), "does not take --heads"),
        (("ramp_heads", "--a", "0", "--b", "1", "--heads", "0", "--tokens", "5"), "heads must be"),
        (("two_layer", "--spacing", "0.1"), "needs --formula"),
        (("two_layer", "--formula", "x*y", "--box", "x=0:1", "--box", "y=0:1", "--spacing", "0.2"), "2 formulas"),
        (("plan", "--eps", "0.1", "--plot", "x.png"), "does not take"),
        (("plan",), "give eps"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_mistakes_are_answered_in_words(args: tuple[str, ...], words: str) -> None:
    result = call(*args)
    assert result.exit_code == 2 and words in result.output
