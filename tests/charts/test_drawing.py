"""Figures: legible and told apart by anyone, the same data in the picture and in the interactive chart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

from attnforge.charts.chart import (
    Contour,
    Fan,
    Figure,
    Heat,
    Level,
    Note,
    Panel,
    Series,
    Spans,
    Zone,
    error_panel,
    error_range,
)  # fmt: skip
from attnforge.charts.drawing import (
    draw,
    drawn,
    interactive,
    looks,
    matplotlib_figure,
    places,
    save,
    svg,
    visible,
    write,
)
from attnforge.charts.themes import DARK, LIGHT, Theme, style
from attnforge.errors import ArgumentError, MissingExtra
from attnforge.extras import require
from attnforge.lab.engine import measure_cell
from charts.images import APART, VISION, check, confused, lab, problems, texts
from lab.toy import TOY

WAVE = np.linspace(-1.5, 1.5, 200)
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
    "errors": Figure("errors", "c", [
        error_panel("error", "y", "absolute error", WAVE, np.abs(np.sin(20 * WAVE)) * 1e-6, levels)
        for levels in ([Level(2e-6, "certified 2e-06"), Level(5e-5, "the paper's 5e-05", "soft")], [])
    ]),
    "output": Figure("output", "c", [
        Panel("output", "y", "value", [Series("target", WAVE, np.sin(WAVE), style="broad", role="target"),
                                       Series("network", WAVE, np.sin(WAVE), role="output")], legend="inside"),
        Panel("values", "anchor", "value", [Series("", range(1, 13), np.arange(12) - 5.0, style="stems", role="anchor"),
                                            Series("", [1, 12], [-5, 6], style="hollow", role="anchor")]),
        Panel("weights", "y", "weight", marks=[Fan(WAVE, [np.cos(WAVE) ** 2, np.sin(WAVE) ** 2], ["left", "right"])],
              y_range=(0, 1.05), legend="top"),
    ], title="One figure of three panels"),
    "rows": Figure("rows", "c", [
        Panel("", "range", "", rows=["first", "second"], beside=["8 anchors", "16 anchors"], linear_x=1.0,
              x_range=(-30, 30), ticks=[(-10, "-10"), (0, "0"), (10, "10")],
              marks=[Spans("covered", [0, 1], [-20, -10], [20, 10], "pale", beyond=[0]),
                     Spans("seen", [0, 1], [-2, -1], [2, 1])]),
        Panel("", "error", "", [Series("float64", [1e-9, 1e-6], [0, 1], style="points", role="target")], log_x=True,
              rows=["first", "second"], x_range=(1e-10, 1e-2),
              marks=[Level(1e-3, "asked for 0.001", axis="x", named=True), Spans("", [0, 1], [1e-9] * 2, [1e-6] * 2,
                                                                                  "rule")]),
    ], columns=(1,), heights=(1.5, 1.5)),
    "paths": Figure("paths", "c", [
        Panel("the path", "w_1", "w_2", [Series("", [0, 0.5, 1], [0, 0.2, 1], role="target")], x_range=(-2, 2),
              y_range=(-2, 2), marks=[Contour(WAVE, WAVE, np.add.outer(WAVE**2, WAVE**2)), Note(-1, 1.5, "a note")]),
        Panel("counts", "error", "", [Series("", [1e-6, 1e-5, 1e-4], [3, 9, 0], style="steps", role="output")],
              log_x=True, x_range=(1e-6, 1e-3), y_range=(0, 12), marks=[Level(5e-4, "bound 5e-04", axis="x")]),
        Panel("attention", "y", "key", heat=Heat(np.eye(9), "weight", 0, 1, x=(-1.0, 1.0), y=(0.5, 9.5), sparse=True)),
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
    shades = (*theme.cycle, theme.grey)
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


def test_marks_lie_where_they_should() -> None:
    axes = matplotlib_figure(FIGURES["rows"]).axes[0]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert bars == [(-20, 20), (-2, 2), (-10, 10), (-1, 1)], "row by row, what is seen on what is covered"
    assert len(axes.lines) == 2 and axes.get_ylim()[0] > axes.get_ylim()[1], "arrows; row 0 on top"
    path, counts, attention, _ = matplotlib_figure(FIGURES["paths"]).axes
    assert len(path.collections) >= 1 and list(counts.lines[0].get_xdata()) == [5e-4, 5e-4]
    assert counts.get_ylim() == (0, 12) and attention.images[0].get_extent() == [-1.0, 1.0, 0.5, 9.5]


def test_an_error_stays_below_the_names_of_its_bounds() -> None:
    panel = error_panel("e", "x", "y", [0.0, 1.0], [1e-9, 1e-6], [Level(2e-6, "bound")])
    assert panel.y_range == error_range(1e-6, 2e-6) == (1e-9, 12 * 2e-6)
    assert error_range(1e-30, 1.0) == (1e-4, 12.0), "an error of nothing leaves the bound in sight"
    exact = error_panel("e", "x", "y", [0.0, 1.0], [0.0, 0.0], [Level(0.0, "bound 0")])
    assert exact.y_range is not None and exact.marks == (Level(exact.y_range[0], "bound 0"),), "on the axis"
    with pytest.raises(ArgumentError, match="only be drawn as a picture"):
        interactive(Figure("f", "c", [panel]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Series("a", [1], [1], role="hero"), "role of a series is one of target, anchor"),
        (lambda: Series("", [1], [1]), "needs a role"),
        (lambda: Level(1, "t", axis="z"), "axis of a level"),
        (lambda: Fan([1, 2], [[1, 2], [1]]), "a value for each of its 2 places"),
        (lambda: Fan([1, 2], [[1, 2]], ["a", "b"]), "as many names or none"),
        (lambda: Spans("s", [0], [1, 2], [3]), "low and a high end"),
        (lambda: Spans("s", [0], [1], [3], "thick"), "style of spans"),
        (lambda: Contour([1, 2], [1], [[1, 2], [3, 4]]), "a height for each pair"),
        (lambda: Panel("t", "x", "y", marks=[Level(1, "t")]), "either series or a heat map"),
        (lambda: panel(legend="left"), "legend of 'float64'"),
    ],
)
def test_bad_marks_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_nothing_global_changes() -> None:
    before = dict(matplotlib.rcParams)
    svg(FIGURES["narrow"])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_save_goes_by_the_extension(tmp_path: Path, kind: str, magic: bytes) -> None:
    path = save(FIGURES["narrow"], tmp_path / "new" / f"figure.{kind}")
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "figure.pgn"])
def test_save_refuses_other_kinds(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=r"one of \.png, \.svg, \.pdf"):
        save(FIGURES["narrow"], tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_text_that_is_cut_off_or_covered_would_be_seen() -> None:
    with style(LIGHT):
        made = draw(FIGURES["narrow"], LIGHT)
        made.text(0.98, 0.5, "far too long for what is left of the figure")
        made.text(0.98, 0.5, "and twice")
        boxes = [t.get_window_extent() for t in texts(made)]
    assert any(b.x1 > made.bbox.x1 for b in boxes)
    assert any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"attnforge\[report\]"):
        require("matplotlob", "report")
