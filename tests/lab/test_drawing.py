"""Figures of the lab: legible and told apart by anyone, the same data in the picture and in the interactive chart."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from attnforge.charts.chart import Figure, Heat, Panel, Series, Zone
from attnforge.charts.drawing import GREY, drawn, write
from attnforge.charts.interactive import interactive
from attnforge.charts.looks import looks, places, visible
from attnforge.charts.themes import DARK, LIGHT, Theme
from attnforge.lab.engine import measure_cell
from lab.images import APART, VISION, check, confused, lab, problems
from lab.toy import TOY

KAPPA = np.logspace(-3, 3, 25)
ROUND = np.exp(-1 / KAPPA) + 1e-9
SERIES = [
    Series("measured", KAPPA, ROUND),
    Series("A3", KAPPA, np.exp(-1 / KAPPA), style="bound", group="measured"),
    Series("A2", KAPPA, 0 * KAPPA + 0.5, style="bound"),
    Series("A5", KAPPA, 0 * KAPPA + 1e-8, style="bound"),
]
ZONES = (
    Zone(None, 0.05, "too hot: diffuse"),
    Zone(0.05, 5, "warm: interpolates"),
    Zone(5, None, "too cold: staircase"),
)
MAP = Heat(np.eye(40).tolist(), "weight", 0, 1)


def panel(**changes: Any) -> Panel:
    made = Panel("float64", "inverse temperature kappa", "largest error, in spacings", SERIES, log_x=True, log_y=True)
    return replace(made, **changes)


def records() -> list[Any]:
    return [measure_cell(TOY.measure, "toy", 1, c.settings, c.seed, 1, False)[2] for c in TOY.grid(False)]


MANY = [Series(f"a rather long name, number {i}", [60, 70, 80], [1.0 / (i + 1), 0.5, 0.2]) for i in range(7)]
FIGURES = {
    "one": Figure("one", "c", [panel()]),
    "three with zones": Figure("three", "c", [panel(title=f"float{b}", zones=ZONES) for b in (64, 32, 16)]),
    "seven series": Figure("many", "c", [Panel("p", "anchors p", "mean squared error", MANY, log_x=True, log_y=True)]),
    "maps": Figure("maps", "c", [Panel(f"|b - a| = {w}", "anchor", "token", heat=MAP) for w in (0.5, 1.5, 3, 4)]),
    "words": Figure("words", "c", [
        Panel("start", "start of training", "error", [Series("after", [0, 1, 2], [1e-3, 0.2, 0.5], style="points")],
              ticks=((0, "from the construction"), (1, "perturbed by a tenth"), (2, "at random")))
    ] * 2),
    "decades": Figure("decades", "c", [panel(series=[Series("n", [50, 1000, 10000, 100000], [1e-3, 1e-2, 0.1, 1.2])])]),
    "close places": Figure("close", "c", [
        panel(series=[Series("n", [60, 70, 80, 90, 100, 110, 120], [0.13, 0.08, 0.03, 0.02, 0.006, 0.004, 0.0039])])
    ] * 3),
    "narrow": Figure("narrow", "c", [panel(series=[Series("n", [1, 2, 4], [0.40, 0.41, 0.43])], log_x=False)]),
    "gaps": Figure("gaps", "c", [
        panel(series=[Series("n", [1, 2, 4], [0.4, None, 0.1], [0.3, None, 0.1], [0.5, None, 0.2])])
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible_and_told_apart(name: str) -> None:
    check(FIGURES[name])


def test_the_toy_is_drawn_from_its_records(tmp_path: Path) -> None:
    figure = TOY.figures(records())[0]
    check(figure)
    png, svg = write(figure, tmp_path)
    with Image.open(png) as image:
        assert image.width == 1600 and image.height > 500
        assert len(image.convert("RGB").resize((200, 80)).getcolors(20000)) > 50, "there is something to see"
    assert svg.read_text("utf-8") == drawn(figure).pair.light and "<svg" in svg.read_text("utf-8")
    assert drawn(figure) is drawn(figure)
    drawn.cache_clear()
    assert drawn(figure).png == png.read_bytes(), "the same data gives the same file"


def test_bad_figures_would_be_seen() -> None:
    crowded = panel(title="a word " * 40, zones=[Zone(0.9, 1, "one zone"), Zone(1, 1.1, "another zone")])
    found = " ".join(problems(Figure("bad", "c", [crowded, panel()])))
    assert "overlap" in found
    nine = [Series(str(i), [1.0], [1.0]) for i in range(9)]
    found = " ".join(problems(Figure("bad", "c", [Panel("t", "x", "y", nine)])))
    assert "'0' and '7' look alike with protanopia" in found
    assert confused("#00ff00", "#ffcc00", "x") or confused("#ff0000", "#00aa00", "x"), "red and green are no pair"
    assert confused("#0072B2", "#0075B4", "x")


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda t: t.name)
def test_the_palette_is_told_apart_by_everyone(theme: Theme) -> None:
    shades = (*theme.cycle, GREY[theme.name])
    for kind, matrix in VISION.items():
        for a, b in itertools.combinations(shades, 2):
            assert np.linalg.norm(lab(a, matrix) - lab(b, matrix)) >= APART, f"{a} and {b}, {kind}"


def test_the_interactive_chart_has_the_same_data_and_looks() -> None:
    figure = Figure("f", "c", [panel(zones=ZONES), Panel("map", "anchor", "token", heat=MAP), panel(title="again")])
    chart = json.loads(interactive(figure).to_json())
    lines = [t for t in chart["data"] if t["type"] == "scatter"]
    assert [t["name"] for t in lines] == [s.name for s in SERIES] * 2
    assert [t["showlegend"] for t in lines] == [True] * 4 + [False] * 4
    look = looks(figure)
    assert [t["meta"]["cycle"] for t in lines[:4]] == [0, 0, -1, -1]
    assert all(t["line"]["dash"] == "solid" for t in lines if not look[t["name"]].dash)
    dashes = {t["line"]["dash"] for t in lines[1:4]}
    assert "solid" not in dashes and len(dashes) == 3
    heat = next(t for t in chart["data"] if t["type"] == "heatmap")
    assert len(heat["z"]) == 40 and heat["zmin"] == 0 and heat["colorbar"]["title"]["text"] == "weight"
    assert chart["layout"]["xaxis"]["type"] == "log" and chart["layout"]["yaxis"]["type"] == "log"
    words = {a["text"] for a in chart["layout"]["annotations"]}
    assert {"too hot: diffuse", "float64", "map", "again"} <= words


def test_bounds_do_not_squeeze_what_was_measured() -> None:
    wild = Series("b", [1, 2], [1e-300, 1e9], style="bound")
    assert visible(panel(series=[Series("m", [1, 2], [1e-3, 1e-2]), wild])) == (1e-3, 1e-2)
    near = Series("b", [1, 2], [2e-5, 1e9], style="bound")
    assert visible(panel(series=[Series("m", [1, 2], [1e-3, 1e-2]), near])) == (2e-5, 1e-2)
    assert visible(panel(series=[Series("m", [1, 2], [0.0, None])])) is None
    assert places(panel(series=[Series("m", [1, 10, 1e5], [1, 1, 1])]), 4) == [], "powers of ten instead"
    assert places(panel(series=[Series("m", [60, 61, 120], [1, 1, 1])]), 2) == [60, 120], "labels keep apart"
