"""Why warm heads: what a cold and a warm head compute, and bounds against one knob, on a log axis side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..charts.themes import Builder, Theme, new_figure
from ..dtypes import Array
from ..errors import ArgumentError
from ..extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLES = ("float64", "float32", "cold")
MARKERS = {"float64": "o", "float32": "s", "cold": "D"}


@dataclass(frozen=True)
class Curve:
    """Errors against a knob. `role` decides the colour, the same as in the comparison of heads."""

    label: str
    role: str
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ArgumentError(f"a curve's role is one of {', '.join(ROLES)}, got {self.role!r}")
        if len(self.points) < 2 or not all(y > 0 for _, y in self.points):
            raise ArgumentError(f"the curve '{self.label}' needs at least two points, with positive errors")


@dataclass(frozen=True)
class Panel:
    """One set of axes: curves over a knob, and notes at places (x, y, text)."""

    title: str
    knob: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    ticks: tuple[float, ...] = ()
    notes: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Shapes:
    """A target at points y, and what a cold and a warm head with the same few anchors make of it."""

    title: str
    y: Array
    target: Array
    cold: Array
    warm: Array
    anchors: Array

    def __post_init__(self) -> None:
        lengths = {len(row) for row in (self.y, self.target, self.cold, self.warm)}
        if len(lengths) != 1:
            raise ArgumentError(f"y, target, cold and warm have one length, got {sorted(lengths)}")


def sweep_figure(panels: Sequence[Panel], shapes: Shapes | None = None) -> Builder:
    """The panels side by side on one error axis, after the shapes if there are any, with one legend."""
    if not panels:
        raise ArgumentError("a sweep needs at least one panel")

    def build(theme: Theme) -> Figure:
        figure = new_figure(10, 3.9)
        errors = [error for panel in panels for curve in panel.curves for _, error in curve.points]
        count = len(panels) + (shapes is not None)
        row = figure.subplots(1, count, squeeze=False, width_ratios=[0.9] * (shapes is not None) + [1] * len(panels))[0]
        if shapes is not None:
            _draw_shapes(row[0], shapes, theme)
            row = row[1:]
        for axes, panel in zip(row, panels, strict=True):
            _draw(axes, panel, theme)
            axes.set_ylim(min(errors) / 4, max(errors) * 4)
            axes.tick_params(labelleft=axes is row[0])
        row[0].set_ylabel("largest error (smaller is better)")
        handles = {label: h for axes in row for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(
            handles.values(), handles.keys(), loc="outside upper left", ncols=3, handletextpad=0.5, columnspacing=1.8
        )
        return figure

    return build


def _draw_shapes(axes: Axes, shapes: Shapes, theme: Theme) -> None:
    axes.plot(shapes.y, shapes.target, color=theme.grid, lw=6, solid_capstyle="butt")
    axes.plot(shapes.y, shapes.cold, color=theme.bound, lw=1.5)
    axes.plot(shapes.y, shapes.warm, color=theme.target, lw=1.5)
    on_curve = np.interp(shapes.anchors, shapes.y, shapes.target)
    axes.plot(shapes.anchors, on_curve, "o", ms=4.5, color=theme.anchor, mec=theme.surface, mew=0.7, clip_on=False)
    low, high = float(shapes.target.min()), float(shapes.target.max())
    axes.set_ylim(low - 0.12 * (high - low), high + 0.12 * (high - low))
    axes.set_xlim(shapes.y[0], shapes.y[-1])
    axes.set_title(shapes.title)
    axes.set_xlabel("input y")


def _draw(axes: Axes, panel: Panel, theme: Theme) -> None:
    colours = {"float64": theme.target, "float32": theme.output, "cold": theme.bound}
    for curve in panel.curves:
        x, y = zip(*curve.points, strict=True)
        marker: dict[str, Any] = {"marker": MARKERS[curve.role], "ms": 5, "mec": theme.surface, "mew": 0.7}
        axes.plot(x, y, color=colours[curve.role], lw=1.6, label=curve.label, clip_on=False, zorder=3, **marker)
    for at, height, text in panel.notes:
        axes.text(at, height, text, color=theme.soft, fontsize=9.5, ha="center", va="center")
    axes.set_yscale("log")
    if panel.logarithmic:
        axes.set_xscale("log")
    if panel.ticks:
        axes.set_xticks(panel.ticks, [f"{t:g}" for t in panel.ticks])
        axes.xaxis.set_minor_locator(require("matplotlib.ticker", "report").NullLocator())
    axes.set_title(panel.title)
    axes.set_xlabel(panel.knob)
