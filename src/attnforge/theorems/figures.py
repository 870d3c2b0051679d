"""A construction as one figure: attention, logits, output beside the target, error below the bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..certificates.certificate import upper_text
from ..dtypes import Array
from ..errors import ArgumentError
from ..extras import require
from ..report.style import LIGHT, Builder, Theme, new_figure, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SLOTS = 64  # twice as many keys have a row of their own in a heat map


@dataclass(frozen=True, eq=False)
class TheoremPicture:
    """All that the figure shows. `curves` are the second panel: (label, x, y); `dots` marks their points."""

    title: str
    axis: str
    x: Array
    target: Array
    output: Array
    error: Array
    bound: float | None
    paper_bound: float | None
    weights: Array
    key: str
    curves: tuple[tuple[str, Array, Array], ...]
    curve_title: str
    curve_axis: str
    dots: bool
    dtype: str

    def __post_init__(self) -> None:
        rows = len(self.x)
        if self.target.shape != self.output.shape or len(self.target) != rows or self.error.shape != (rows,):
            raise ArgumentError("target, output and error need a row for each x")


def drawn(data: TheoremPicture, path: str | Path | None = None) -> Any:
    """The figure itself, or where it was written."""
    builder = theorem_figure(data)
    if path is not None:
        return save(builder, path)
    with style(LIGHT) as theme:
        return builder(theme)


def theorem_figure(data: TheoremPicture) -> Builder:
    """Four panels on one page."""

    def build(theme: Theme) -> Figure:
        figure = new_figure(10, 7.2)
        figure.suptitle(data.title, x=0.01, ha="left", fontsize=12, color=theme.ink)
        grid = figure.add_gridspec(2, 2, hspace=0.09, wspace=0.06)
        _heat(figure, figure.add_subplot(grid[0, 0]), data, theme)
        _curves(figure.add_subplot(grid[0, 1]), data, theme)
        _output(figure.add_subplot(grid[1, 0]), data, theme)
        _error(figure.add_subplot(grid[1, 1]), data, theme)
        return figure

    return build


def _heat(figure: Figure, axes: Axes, data: TheoremPicture, theme: Theme) -> None:
    ends = (float(data.x[0]), float(data.x[-1]), 0.5, data.weights.shape[1] + 0.5)
    group = -(-data.weights.shape[1] // (2 * SLOTS))  # many keys: neighbours are shown together, their weights added
    starts = np.arange(0, data.weights.shape[1], group)
    weights = np.add.reduceat(data.weights, starts, axis=1)
    shades = require("matplotlib.colors", "report").LinearSegmentedColormap.from_list
    image = axes.imshow(
        weights.T, origin="lower", aspect="auto", extent=ends, vmin=0, vmax=1, interpolation="nearest",
        cmap=shades("weights", [theme.surface, theme.cycle[5], theme.target, theme.ink]),
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set_title("Attention: one column for each query")
    axes.set_xlabel(data.axis)
    axes.set_ylabel(data.key if group == 1 else f"{data.key}, {group} together")
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.outline.set_visible(False)
    bar.set_label("softmax weight", color=theme.soft)


def _curves(axes: Axes, data: TheoremPicture, theme: Theme) -> None:
    for (label, x, y), colour in zip(data.curves, theme.cycle * 4, strict=False):
        axes.plot(x, y, "o-" if data.dots and len(x) <= 80 else "-", ms=3.2, lw=1.2, color=colour, label=label)
    axes.set_title(data.curve_title)
    axes.set_xlabel(data.curve_axis)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))
    axes.legend(loc="upper center", ncols=3, fontsize=8.5)


def _output(axes: Axes, data: TheoremPicture, theme: Theme) -> None:
    for c in range(data.target.shape[1]):
        first = c == 0
        axes.plot(data.x, data.target[:, c], color=theme.target, lw=3.4, alpha=0.35, label="target" if first else None)
        axes.plot(data.x, data.output[:, c], color=theme.output, lw=1.1, label="network" if first else None)
    axes.set_title("Output")
    axes.set_xlabel(data.axis)
    axes.legend(loc="best")


def _error(axes: Axes, data: TheoremPicture, theme: Theme) -> None:
    worst = float(data.error.max())
    top = max(worst, data.bound or 0.0, data.paper_bound or 0.0) or 1e-300
    floor = 1e-3 * worst if worst > 1e-14 * top else 1e-4 * top
    axes.set_yscale("log")
    axes.fill_between(data.x, floor, np.maximum(data.error, floor), color=theme.output, alpha=0.18, lw=0)
    axes.plot(data.x, np.maximum(data.error, floor), color=theme.output, lw=0.9)
    shown = [("certified bound", data.bound, theme.bound), ("the paper's bound", data.paper_bound, theme.soft)]
    lines = [(label, height, colour) for label, height, colour in shown if height is not None]
    highest = max((height for _, height, _ in lines), default=0.0)
    for label, height, colour in lines:
        above = height == highest
        axes.axhline(height, color=colour, lw=1.5, ls=(0, (5, 2.5)))
        axes.annotate(
            f"{label} {upper_text(height)}", (1, height), xycoords=("axes fraction", "data"),
            xytext=(-2, 4 if above else -4), textcoords="offset points", ha="right", va="bottom" if above else "top",
            color=colour, fontsize=9.5, fontweight="bold",
            bbox={"facecolor": theme.surface, "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        )  # fmt: skip
    axes.set_ylim(floor, top * 12)
    axes.set_title(f"Error in {data.dtype}, largest seen {worst:.3g}")
    axes.set_xlabel(data.axis)
    axes.set_ylabel("absolute error")
