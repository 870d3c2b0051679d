"""What every figure is held to, as an image: legible, nothing written over another, colours told apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from attnforge.charts.chart import Figure
from attnforge.charts.drawing import colour, draw, looks, matplotlib_figure
from attnforge.charts.themes import DARK, LIGHT, Theme, style

LEGIBLE = 8.5  # points, on a figure as wide as a page
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB; and sight without a deficiency.
VISION = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
APART = 10.0  # in CIELAB units; 2.3 is just noticeable side by side


def linear(rgb: Any) -> Any:
    rgb = np.asarray(rgb, dtype=float)
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(shade: str, matrix: Any) -> Any:
    """A colour in CIELAB, as eyes with that matrix see it."""
    seen = np.clip(matrix @ linear(to_rgb(shade)), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    xyz = xyz / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def luminance(shade: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(to_rgb(shade)))


def undrawn(axes: Any) -> Iterator[Any]:
    """The labels of ticks beyond the limits, which keep their text but are not drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        lo, hi = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not lo <= tick.get_loc() <= hi:
                yield from (tick.label1, tick.label2)


def texts(made: Any) -> list[Any]:
    """Every text of a matplotlib figure that is drawn."""
    FigureCanvasAgg(made).draw()
    hidden = {id(label) for axes in made.axes for label in undrawn(axes)}
    return [t for t in made.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]


def words(figure: Figure) -> str:
    """All that is written on a figure."""
    return " | ".join(t.get_text() for t in texts(matplotlib_figure(figure)))


def problems(figure: Figure, theme: Theme = LIGHT) -> list[str]:
    """What is wrong with a figure, in words; empty for a good one."""
    with style(theme):
        made = draw(figure, theme)
        shown = texts(made)
        boxes = [(t.get_text(), t.get_window_extent()) for t in shown]
        frame = made.bbox
    found = [f"small: {t.get_text()!r} at {t.get_fontsize()} points" for t in shown if t.get_fontsize() < LEGIBLE]
    found += [f"faint: {t.get_text()!r}" for t in shown if contrast(t.get_color(), theme.surface) < 4.5]
    found += [f"cut off: {t!r}" for t, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > frame.x1 or b.y1 > frame.y1]
    found += [f"overlap: {s!r} and {t!r}" for (s, a), (t, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]
    for panel in figure.panels:
        appearance = looks(figure)
        kinds = [(s.name, appearance[s.name]) for s in panel.series if s.name]
        for (a, one), (b, other) in itertools.combinations(kinds, 2):
            if (one.colour, one.dash) == (other.colour, other.dash):
                found.append(f"alike: {a!r} and {b!r}")
            elif one.colour != other.colour:
                found += confused(colour(one, theme), colour(other, theme), f"{a!r} and {b!r}")
    if len(boxes) < 3 * len(figure.panels):
        found.append("a panel without title or labels")
    return found


def confused(one: str, other: str, names: str) -> list[str]:
    """The kinds of sight to which two colours look alike."""
    apart = {kind: float(np.linalg.norm(lab(one, m) - lab(other, m))) for kind, m in VISION.items()}
    return [f"{names} look alike with {kind}: {d:.1f}" for kind, d in apart.items() if d < APART]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def check(figure: Figure) -> None:
    """Asserts that a figure is good on light and on dark ground."""
    for theme in (LIGHT, DARK):
        assert problems(figure, theme) == [], f"{figure.name}, {theme.name}"
