"""Every experiment on its smallest cells: measured twice alike, drawn, judged; and a wrong construction found out."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnforge.lab.experiment import AGREES, FAILS, NAMES, VERDICTS, Cell, Experiment, Figure, Record, find, names

# The smallest cells that show what each experiment is about, some of them smaller than any of its grids.
SMALL: dict[str, list[dict[str, Any]]] = {
    "rate-anchors": [
        {"task": "line", "network": network, "dtype": dtype, "p": p}
        for network in ("cold", "warm", "gate") for dtype in ("float64", "float32") for p in (16, 64, 256)
    ] + [{"task": "published", "network": n, "dtype": "float32", "p": 60} for n in ("cold", "warm", "gate")],
    "rate-heads": [
        {"task": task, "network": "cold", "dtype": "float64", "H": H}
        for task in ("fixed p", "growing p") for H in (1, 2, 4)
    ] + [{"task": "published", "network": n, "dtype": "float32", "H": 2} for n in ("cold", "warm", "gate")],
    "range": [
        {"task": "line", "network": network, "dtype": "float64", "range": width}
        for network in ("cold", "warm", "gate") for width in (0.5, 5, 50)
    ] + [{"task": "published", "network": "cold", "dtype": "float32", "range": 10}],
    "heatmap": [{"network": n, "range": r} for n in ("cold", "warm") for r in (0.5, 3.0)],
    "temperature": [
        {"p": 33, "dtype": dtype, "kappa": kappa}
        for dtype in ("float64", "float32", "bfloat16") for kappa in (0.01, 0.5, 1.0, 3.0, 1000.0)
    ],
    "spectral": [{"table": t, "spacing": s} for t in ("generic", "resonant", "fitted") for s in (1.0, 0.5, 0.4)]
    + [{"table": "searched", "count": 17}],
    "kinks": [{"network": "spliced", "guards": g} for g in (1, 2, 4)]
    + [{"network": n, "anchors": p} for n in ("cold", "warm") for p in (9, 17, 33)],
    "robustness": [{"task": "steep", "formula": "x*sin(y)"}]
    + [{"task": "bits", "formula": "x*sin(y)", "bits": bits} for bits in (8, 12)],
    "depth": [{"condition": c} for c in (4.0, 16.0, 64.0)],
    "classes": [{"task": "ridges", "dim": dim} for dim in (2, 4, 8)]
    + [{"task": "nested", "depth": 2, "eps": eps} for eps in (1e-3, 1e-5, 1e-7)],
    "every-length": [{"function": "softmax of a token", "n": n} for n in (1, 10, 1000)],
    "pipeline": [{"fit": "ridge", "penalty": p} for p in (8.0, 4.0)],
    "jumps": [{"p": p, "sharpness": s} for p in (1, 4) for s in (1e2, 1e3, 1e4)],
    "mechanism": [{"formula": "x*y/(1+4*x**2)", "network": "compiled"},
                  {"formula": "x*y/(1+4*x**2)", "network": "trained", "steps": 30}],
    "boundary": [
        {"target": "ramp", "place": place, "network": n, "p": p}
        for place in ("ends", "seams") for n in ("cold", "warm") for p in (34, 66)
    ] + [{"target": t, "place": "middle", "network": n, "p": 34} for t in ("kink", "step") for n in ("cold", "exact")],
    "length": [{"network": n, "d": 10, "n": size} for n in ("cold", "gate") for size in (50, 1000, 10_000)]
    + [{"rate": "p", "network": "cold", "n": 1000, "p": p} for p in (16, 32, 64)],
    "sequence": [
        {"against": "p", "network": "cold", "n": 10, "p": p, "H": 1} for p in (16, 32, 64)
    ] + [{"against": "H", "network": "warm", "n": 20, "p": 20, "H": 1}],
    "in-context": [
        {"method": m, "depth": 20, "dtype": dtype, "condition": 8.0, "noise": 0.1}
        for m in ("linear", "heavy ball", "logistic") for dtype in ("float64", "float32")
    ],
    "universality": [
        {"tokens": 2, "route": route, "size": size}
        for route in ("two layers", "softmax", "cells", "grid", "spectral") for size in (6, 10, 16)
        if not (route == "spectral" and size == 16)
    ] + [{"tokens": 2, "route": "compiled", "size": 1e-4}],
    "training-from-construction": [
        {"epochs": 1, "temperature": t, "start": s}
        for t, s in (("cold", "constructed"), ("warm", "constructed"), ("warm", "perturbed 10 %"), ("none", "random"),
                     ("none", "published"))
    ],
}  # fmt: skip
PUBLISHED_SEED = ("heatmap", "rate-anchors", "rate-heads", "range", "training-from-construction")


def record(experiment: Experiment, settings: dict[str, Any]) -> Record:
    seed = 1234 if experiment.name in PUBLISHED_SEED and settings.get("task") != "line" else 0
    torch.manual_seed(0)
    return Record(experiment.name, settings, seed, experiment.measure(settings, seed), time_s=1.0, memory_mb=1.0)


def test_all_are_there() -> None:
    assert names() == NAMES and set(NAMES) == set(SMALL) and len(NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_grids(name: str) -> None:
    experiment = find(name)
    quick, full = experiment.grid(True), experiment.grid(False)
    assert len(quick) <= len(full)
    for cell in (*quick, *full):
        assert Cell(**json.loads(json.dumps({"settings": dict(cell.settings), "seed": cell.seed}))) == cell
    known = {frozenset(cell.settings) for cell in (*quick, *full)}
    assert {frozenset(s) for s in SMALL[name]} <= known, "the small cells have the settings of the grid"


@pytest.mark.parametrize("name", NAMES)
def test_measured_drawn_and_judged(name: str) -> None:
    experiment = find(name)
    records = [record(experiment, settings) for settings in SMALL[name]]
    again = [Record.from_json(json.loads(json.dumps(r.to_json()))) for r in records]
    assert again == records, "records are JSON"
    drawn(experiment, again)
    judged(experiment, again)
    torch.manual_seed(99)  # what others left behind does not matter
    for settings, first in ((SMALL[name][0], records[0]), (SMALL[name][-1], records[-1])):
        assert record(experiment, settings).values == first.values, "the same seed gives the same numbers"


def drawn(experiment: Experiment, records: list[Record]) -> None:
    figures = experiment.figures(records)
    assert figures and all(isinstance(figure, Figure) and figure.caption for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)
    for panel in (panel for figure in figures for panel in figure.panels):
        assert panel.x and panel.y and (panel.heat or any(any(y is not None for y in s.y) for s in panel.series))
    assert list(experiment.figures([])) == []
    for some in (records[:1], records[-1:]):
        experiment.figures(some)  # an interrupted run is drawn, too


def judged(experiment: Experiment, records: list[Record]) -> None:
    findings = experiment.judge(records)
    assert findings and {f.verdict for f in findings} <= set(VERDICTS)
    assert all(f.rule for f in findings) and len({f.quantity for f in findings}) == len(findings)
    certified = [f for f in findings if "certified bound" in f.quantity or "its bound" in f.quantity]
    assert all(f.verdict != FAILS for f in certified), "what is certified holds"
    assert list(experiment.judge([])) == []
    for some in (records[:1], records[-1:]):
        experiment.judge(some)


def lying(make: Callable[..., Any], by: float = 0.5) -> Callable[..., Any]:
    """A construction whose values are moved, under the certificate of the right one."""

    def made(*arguments: Any, **options: Any) -> Any:
        m = make(*arguments, **options)
        certificate = m.certificate
        with torch.no_grad():
            tables = [p for name, p in m.named_parameters() if name.split(".")[-1] in ("value", "M_V", "hat_values")]
            assert tables, "there is something to spoil"
            for table in tables:
                table.add_(by * table.abs().max())
        m.attach(certificate)
        return m

    return made


def unlearned(make: Callable[..., Any]) -> Callable[..., Any]:
    """In-context descent whose steps are a little too long."""

    def made(*arguments: Any, **options: Any) -> Any:
        m = make(*arguments, **options)
        before = m.sequence
        m.sequence = lambda w, X, y, step: before(w, X, y, 1.01 * step)
        return m

    return made


def wrong_sign(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, t, *arguments, **options: make(-w, t, *arguments, **options)


def scaled(make: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers that are larger than they should be by a third."""
    return lambda *arguments, **options: 4 / 3 * make(*arguments, **options)


# Where each experiment gets its construction from, how it is spoiled, which cells show it, and which finding falls.
SABOTAGE: dict[str, tuple[str, str, Callable[..., Any], slice, str]] = {
    "rate-anchors": ("shared", "ramp", lying, slice(0, 3), "certified bound"),
    "rate-heads": ("shared", "ramp_heads", lying, slice(3, 6), "certified bound"),
    "range": ("shared", "ramp", lying, slice(0, 3), "certified bound"),
    "heatmap": ("shared", "ramp", lying, slice(0, 2), "certified bound"),
    "boundary": ("boundary", "ramp", lying, slice(0, 2), "certified bound"),
    "length": ("length", "ramp", lying, slice(0, 2), "certified bound"),
    "sequence": ("sequence", "relu", lying, slice(0, 2), "bound from their certificates"),
    "in-context": ("in_context", "gradient_descent", unlearned, slice(0, 1), "exact iterates"),
    "universality": ("universality", "two_layer", lying, slice(0, 2), "against its bound"),
    "spectral": ("spectral", "lattice_values", scaled, slice(0, 2), "against its bound"),
    "kinks": ("kinks", "splice", lying, slice(0, 2), "certified bound"),
    "training-from-construction": ("training_from_construction", "ramp", wrong_sign, slice(0, 1), "keeps"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_construction_does_not_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, spoil, cells, quantity = SABOTAGE[name]
    place, experiment = importlib.import_module(f"attnforge.lab.experiments.{module}"), find(name)

    def verdicts() -> list[str]:
        records = [record(experiment, settings) for settings in SMALL[name][cells]]
        return [f.verdict for f in experiment.judge(records) if quantity in f.quantity]

    right = verdicts()
    assert right and FAILS not in right
    monkeypatch.setattr(place, attribute, spoil(getattr(place, attribute)))
    assert FAILS in verdicts()


def test_a_wrong_temperature_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    module, experiment = importlib.import_module("attnforge.lab.experiments.temperature"), find("temperature")

    def verdicts() -> list[str]:
        records = [record(experiment, settings) for settings in SMALL["temperature"][1:4]]
        return [f.verdict for f in experiment.judge(records) if "A3" in f.quantity]

    assert verdicts() == [AGREES]
    monkeypatch.setattr(module, "BALANCED", 2.5)  # keys are then scaled to another kappa than the one recorded
    assert verdicts() == [FAILS]


def test_temperatures_fail_in_three_ways() -> None:
    from attnforge.lab.experiments.temperature import mode

    same: dict[str, Any] = {"p": 33, "dtype": "float64"}
    found = [record(find("temperature"), {**same, "kappa": kappa}) for kappa in (0.01, 1.0, 1000.0)]
    assert [mode(r) for r in found] == ["diffuse", "interpolates", "staircase"]
    rounded = record(find("temperature"), {"p": 33, "dtype": "bfloat16", "kappa": 1.0})
    assert rounded["interior"] > 10 * found[1]["interior"], "rounding"


def test_an_untrained_sequence_network_is_no_better_than_a_constant() -> None:
    settings = {"against": "p", "network": "trained", "n": 10, "p": 10, "H": 8, "epochs": 0}
    assert record(find("sequence"), settings)["relative"] > 0.5


def test_the_trained_heat_map_is_judged_like_the_built_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("attnforge.lab.experiments.heatmap")
    monkeypatch.setattr(module, "trained_map", functools.partial(module.trained_map, epochs=2))
    heat = record(find("heatmap"), {"network": "trained", "range": 0.5})
    assert 0 < heat["one_hot"] <= 1 and len(heat["map"][0]) == 30 == len(heat["map"][0][0])
    findings = find("heatmap").judge([record(find("heatmap"), SMALL["heatmap"][0]), heat])
    assert {f.verdict for f in findings if "built" in f.quantity} == {AGREES}
    assert FAILS in {f.verdict for f in findings if "trained" in f.quantity}
