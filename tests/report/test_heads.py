"""Figures of heads: what is drawn is what was computed, the same data gives the same file, and nothing is covered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnforge.certificates.certificate import upper_text
from attnforge.charts.chart import Figure, Note, Panel
from attnforge.charts.drawing import svg
from attnforge.charts.themes import DARK, LIGHT
from attnforge.errors import ArgumentError
from attnforge.heads.anchor.head import AnchorHead
from attnforge.heads.gate.head import GateHead
from attnforge.report.heads import (
    SWEPT,
    Comparison,
    HeadPicture,
    Shapes,
    comparison_figure,
    figure_of,
    head_figure,
    head_picture,
    slots_picture,
    sweep_figure,
    swept,
)  # fmt: skip
from charts.images import check, words


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


GATES = {
    "relu": GateHead.relu(-1, 1),
    "ramp": GateHead.fit("ramp", -3, 5, a=-1, b=1),
    "abs": GateHead.abs(-1, 1, dtype=torch.float64),
    "silu": GateHead.silu(-4, 4),
    "leaky_relu": GateHead.leaky_relu(-2, 1, 0.2),
}


def sweep() -> Figure:
    points = ((0.1, 1e-12), (1.0, 1e-3), (20.0, 0.3))
    curves = [swept(kind, kind, points) for kind in SWEPT]
    y = np.linspace(-1, 1, 50)
    shapes = Shapes("sin, 12 anchors", y, np.sin(y), np.round(np.sin(y), 1), np.sin(y), y[::5])
    panels = [
        Panel("sin, 32 anchors", "temperature", "error", curves, log_x=True,
              ticks=[(t, f"{t:g}") for t in (0.1, 1, 20)], marks=[Note(1.0, 1e-8, "a note")]),
        Panel("gelu, best temperature", "anchors", "error", curves, ticks=[(t, f"{t:g}") for t in (0, 10, 20)]),
    ]  # fmt: skip
    return sweep_figure(panels, shapes)


ROWS = [
    Comparison("gelu", (-8, 8), 1.6e-10, 8.7e-6, 0.12),
    Comparison("sin", (-6.3, 6.3), 3e-14, 4e-6, 0.2),
    Comparison("piecewise_linear(-1:0, 0:2, 1:0, 2:7, 3:1, 4:2)", (0.001, 1000), 1e-9, 2e-5, 3.0),
]
LARGE = picture().values * 1e5
FIGURES: dict[str, Figure] = {
    "warm": head_figure(picture()),
    "calibrated": head_figure(picture(bound=None)),
    "decades": head_figure(picture("rsqrt", (0.3, 200.0), relative=True)),
    "long name": head_figure(picture("piecewise_linear(-1:0, 0:2, 1:0, 2:7, 3:1, 4:2)")),
    "large guards": head_figure(picture(values=LARGE)),
    "many anchors": head_figure(picture(anchors=96, potential="atan", dtype="float32")),
    "exact": head_figure(picture(error=np.zeros(300), bound=0.0)),
    "comparison": comparison_figure(ROWS),
    "one row": comparison_figure(ROWS[:1]),
    "sweep": sweep(),
    "tanh": figure_of(AnchorHead.fit("tanh", -4, 4)),
    **{name: figure_of(head) for name, head in GATES.items()},
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_legible_and_told_apart(name: str) -> None:
    check(FIGURES[name])
    assert words(FIGURES[name]).count(" | ") >= 5


def test_drawing_is_reproducible_and_light_and_dark_differ() -> None:
    pair, again = svg(FIGURES["comparison"]), svg(FIGURES["comparison"])
    assert pair == again
    light, dark = LIGHT.colour("target").lower(), DARK.colour("target").lower()
    assert light in pair.light.lower() and dark not in pair.light.lower()
    assert dark in pair.dark.lower() and LIGHT.ink not in pair.dark
    relu = svg(figure_of(GATES["relu"]))
    assert relu == svg(figure_of(GATES["relu"])) and relu.light != relu.dark


def test_the_bound_is_written_rounded_up_and_calibrated_says_so() -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("fn", "lo", "hi", "relative"), [("gelu", -8, 8, False), ("reciprocal", 0.3, 200, True)])
def test_a_picture_shows_the_head_as_it_ships(
    fn: str, lo: float, hi: float, relative: bool, dtype: torch.dtype
) -> None:
    head = AnchorHead.fit(fn, lo, hi, anchors=16, relative=relative, dtype=dtype)
    drawn = head_picture(head)
    y = torch.from_numpy(drawn.y).to(dtype)
    assert (drawn.y[0], drawn.y[-1]) == pytest.approx((lo, hi), rel=1e-6) and lo <= drawn.y[0] < drawn.y[-1] <= hi
    assert np.array_equal(drawn.y, y.double().numpy()), "at numbers of the head's dtype"
    assert head.bound is not None and head.measured is not None
    worst = float(np.abs(drawn.error).max())
    assert 0.8 * head.measured <= worst <= head.bound, "the peaks are in the picture"
    assert np.allclose(drawn.weights.sum(1), 1)
    assert drawn.relative == relative


@pytest.mark.parametrize("name", sorted(GATES))
def test_a_gate_is_drawn_where_it_happens(name: str) -> None:
    head = GATES[name]
    drawn = slots_picture(head)
    assert head.bound is not None
    assert 0 < np.abs(drawn.error).max() <= head.bound
    assert (np.ptp(drawn.weights, axis=0).max()) > 0.9, "the weights change over within the window"
    if head.sharpness is not None:
        assert drawn.place in (0.0, -1.0)
        assert np.abs(drawn.offset).max() < 1e-4


def test_bad_sweeps_are_refused() -> None:
    with pytest.raises(ArgumentError, match="kind is one of"):
        swept("x", "float16", ((1, 1), (2, 1)))
    with pytest.raises(ArgumentError, match="two points"):
        swept("x", "cold", ((1, 1),))
    with pytest.raises(ArgumentError, match="positive errors"):
        swept("x", "cold", ((1, 1), (2, 0)))
    with pytest.raises(ArgumentError, match="at least one panel"):
        sweep_figure([])
    with pytest.raises(ArgumentError, match="one length"):
        Shapes("t", *(np.zeros(n) for n in (3, 3, 2, 3, 1)))


def test_a_sweep_has_one_axis_of_errors() -> None:
    figure = sweep()
    assert [panel.y for panel in figure.panels] == ["output", "largest error (smaller is better)", ""]
    assert figure.panels[1].y_range == figure.panels[2].y_range == (1e-12 / 4, 0.3 * 4)
    roles = {series.name: series.role for series in figure.panels[1].series}
    assert roles == SWEPT, "the colours of the comparison"
