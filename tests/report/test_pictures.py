"""Pictures of real heads: what is drawn is what was computed, and nothing is lost, cut off or covered."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from attnforge.charts.themes import LIGHT, Builder, style, svg
from attnforge.errors import ArgumentError
from attnforge.heads.anchor.head import AnchorHead
from attnforge.heads.gate.head import GateHead
from attnforge.report.pictures import figure_of, head_picture, slots_picture
from attnforge.report.sweeps import Curve, Panel, Shapes, sweep_figure

GATES = {
    "relu": GateHead.relu(-1, 1),
    "ramp": GateHead.fit("ramp", -3, 5, a=-1, b=1),
    "abs": GateHead.abs(-1, 1, dtype=torch.float64),
    "silu": GateHead.silu(-4, 4),
    "leaky_relu": GateHead.leaky_relu(-2, 1, 0.2),
}


def sweep() -> Builder:
    curves = tuple(
        Curve(role, role, ((0.1, 1e-12), (1.0, 1e-3), (20.0, 0.3))) for role in ("float64", "float32", "cold")
    )
    y = np.linspace(-1, 1, 50)
    shapes = Shapes("sin, 12 anchors", y, np.sin(y), np.round(np.sin(y), 1), np.sin(y), y[::5])
    ticks = (0.1, 1, 20)
    panels = [
        Panel("sin, 32 anchors", "temperature", curves, True, ticks, ((1.0, 1e-8, "a note"),)),
        Panel("gelu, best temperature", "anchors", curves, ticks=(0, 10, 20)),
    ]
    return sweep_figure(panels, shapes)


def texts(builder: Builder) -> tuple[Any, list[tuple[str, Any]]]:
    """The figure's frame and the box of every text, ticks beyond the limits left out."""
    with style(LIGHT):
        figure = builder(LIGHT)
        FigureCanvasAgg(figure).draw()
        hidden = set()
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            low, high = sorted(axis.get_view_interval())
            ticks = (*axis.get_major_ticks(), *axis.get_minor_ticks())
            hidden |= {id(t) for tick in ticks if not low <= tick.get_loc() <= high for t in (tick.label1, tick.label2)}
        shown = (t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden)
        return figure.bbox, [(t.get_text(), t.get_window_extent()) for t in shown]


@pytest.mark.parametrize("name", [*GATES, "tanh", "sweep"])
def test_texts_stay_inside_and_apart(name: str) -> None:
    builder = sweep() if name == "sweep" else figure_of(GATES.get(name) or AnchorHead.fit("tanh", -4, 4))
    frame, boxes = texts(builder)
    assert len(boxes) >= 6
    assert [t for t, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > frame.x1 or b.y1 > frame.y1] == []
    assert [(s, t) for (s, a), (t, b) in itertools.combinations(boxes, 2) if a.overlaps(b)] == []


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


def test_light_and_dark_are_drawn_twice_alike() -> None:
    pair = svg(figure_of(GATES["relu"]))
    assert pair == svg(figure_of(GATES["relu"])) and pair.light != pair.dark


def test_bad_pictures_are_refused() -> None:
    with pytest.raises(ArgumentError, match="role is one of"):
        Curve("x", "float16", ((1, 1), (2, 1)))
    with pytest.raises(ArgumentError, match="two points"):
        Curve("x", "cold", ((1, 1),))
    with pytest.raises(ArgumentError, match="positive errors"):
        Curve("x", "cold", ((1, 1), (2, 0)))
    with pytest.raises(ArgumentError, match="at least one panel"):
        sweep_figure([])
    with pytest.raises(ArgumentError, match="one length"):
        Shapes("t", *(np.zeros(n) for n in (3, 3, 2, 3, 1)))
