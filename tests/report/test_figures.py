"""Figures: the same data gives the same file, nothing global changes, no text is cut off or written over another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from attnforge.charts.themes import DARK, LIGHT, Builder, Theme, style
from attnforge.errors import ArgumentError, MissingExtra
from attnforge.extras import require
from attnforge.report import Comparison, HeadPicture, comparison_figure, head_figure, save, svg, upper_text


def picture(
    name: str = "sin", interval: tuple[float, float] = (-6.3, 6.3), anchors: int = 20, **changes: Any
) -> HeadPicture:
    """A Gaussian head on uniform anchors with guards, its values from least squares: enough of a head to draw."""
    lo, hi = interval
    spacing = (hi - lo) / (anchors - 7)
    at = lo + spacing * (np.arange(anchors) - 3)
    y = np.linspace(lo, hi, 300)
    logits = -0.3 * ((y[:, None] - at) / spacing) ** 2
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target = np.sin(y)
    values = np.linalg.lstsq(weights, target, rcond=1e-12)[0]
    output = weights @ values
    error = output - target
    bound = 1.1 * float(np.abs(error).max())
    made = HeadPicture(
        name, interval, y, target, output, error, bound, at, values, weights, 0.3, "square", dtype="float64"
    )  # fmt: skip
    return replace(made, **changes)


ROWS = [
    Comparison("gelu", (-8, 8), 1.6e-10, 8.7e-6, 0.12),
    Comparison("sin", (-6.3, 6.3), 3e-14, 4e-6, 0.2),
    Comparison("piecewise_linear(-1:0, 0:2, 1:0, 2:7, 3:1, 4:2)", (0.001, 1000), 1e-9, 2e-5, 3.0),
]
LARGE = picture().values * 1e5
BUILDERS: dict[str, Builder] = {
    "warm": head_figure(picture()),
    "calibrated": head_figure(picture(bound=None)),
    "decades": head_figure(picture("rsqrt", (0.3, 200.0), relative=True)),
    "long name": head_figure(picture("piecewise_linear(-1:0, 0:2, 1:0, 2:7, 3:1, 4:2)")),
    "large guards": head_figure(picture(values=LARGE)),
    "many anchors": head_figure(picture(anchors=96, potential="atan", dtype="float32")),
    "exact": head_figure(picture(error=np.zeros(300), bound=0.0)),
    "comparison": comparison_figure(ROWS),
    "one row": comparison_figure(ROWS[:1]),
}


def texts(builder: Builder, theme: Theme) -> tuple[Any, list[tuple[str, Any]]]:
    """The figure's frame and every text that is drawn, with its own box, in pixels."""
    with style(theme):
        figure = builder(theme)
        FigureCanvasAgg(figure).draw()
        hidden = {id(label) for axes in figure.axes for label in undrawn(axes)}
        shown = (t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden)
        return figure.bbox, [(text.get_text(), text.get_window_extent()) for text in shown]


def undrawn(axes: Any) -> Iterator[Any]:
    """The labels of ticks beyond the limits, which keep their text but are not drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        lo, hi = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not lo <= tick.get_loc() <= hi:
                yield from (tick.label1, tick.label2)


@pytest.mark.parametrize("name", BUILDERS)
def test_texts_stay_inside_and_apart(name: str) -> None:
    frame, boxes = texts(BUILDERS[name], LIGHT)
    assert len(boxes) >= 6
    cut = [t for t, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > frame.x1 or b.y1 > frame.y1]
    assert cut == []
    over = [(s, t) for (s, a), (t, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]
    assert over == []


def test_a_text_that_is_cut_off_or_covered_would_be_seen() -> None:
    def spoiled(theme: Theme) -> Any:
        figure = BUILDERS["one row"](theme)
        figure.text(0.98, 0.5, "far too long for what is left of the figure")
        figure.text(0.98, 0.5, "and twice")
        return figure

    frame, boxes = texts(spoiled, LIGHT)
    assert any(b.x1 > frame.x1 for _, b in boxes)
    assert any(a.overlaps(b) for (_, a), (_, b) in itertools.combinations(boxes, 2))


def test_light_and_dark_differ_and_drawing_is_reproducible() -> None:
    pair, again = svg(BUILDERS["comparison"]), svg(BUILDERS["comparison"])
    assert pair == again
    assert LIGHT.target.lower() in pair.light.lower() and DARK.target.lower() not in pair.light.lower()
    assert DARK.target.lower() in pair.dark.lower() and LIGHT.ink not in pair.dark


def test_nothing_global_changes() -> None:
    before = dict(matplotlib.rcParams)
    svg(BUILDERS["one row"])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_save_goes_by_the_extension(tmp_path: Path, kind: str, magic: bytes) -> None:
    path = save(BUILDERS["one row"], tmp_path / "new" / f"figure.{kind}")
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "figure.pgn"])
def test_save_refuses_other_kinds(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=r"one of \.png, \.svg, \.pdf"):
        save(BUILDERS["one row"], tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_bound_is_written_rounded_up_and_calibrated_says_so() -> None:
    def words(builder: Builder) -> str:
        return " | ".join(t for t, _ in texts(builder, LIGHT)[1])

    assert "certified bound 0.00124" in words(head_figure(picture(bound=0.001231)))
    calibrated = words(head_figure(picture(bound=None)))
    assert "calibrated, not certified" in calibrated and "certified bound" not in calibrated


@given(st.floats(min_value=5e-324, max_value=1e308), st.integers(1, 8))
def test_upper_text_is_an_upper_bound(value: float, digits: int) -> None:
    shown = float(upper_text(value, digits))
    assert shown >= value
    assert shown <= value * (1 + 10.0 ** (1 - digits)) or math.isinf(value * 2) or value < 1e-300


def test_bad_pictures_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"weights has shape \(300, 19\), expected \(300, 20\)"):
        picture(weights=picture().weights[:, 1:])
    with pytest.raises(ArgumentError, match="rising"):
        picture(y=picture().y[::-1])
    with pytest.raises(ArgumentError, match="lo < hi"):
        replace(picture(), interval=(1.0, 1.0))
    with pytest.raises(ArgumentError, match="cold is a positive number"):
        Comparison("gelu", (-8, 8), 1e-10, 1e-6, 0.0)
    with pytest.raises(ArgumentError, match="at least one function"):
        comparison_figure([])


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"attnforge\[report\]"):
        require("matplotlob", "report")
