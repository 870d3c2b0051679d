"""The figures of a head, and of several heads side by side. They draw what they are given and compute nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..certificates.certificate import upper_text
from ..charts.themes import DARK, LIGHT, Builder, Pair, Theme, new_figure, save, style, svg
from ..dtypes import Array
from ..errors import ArgumentError
from ..extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DARK",
    "LIGHT",
    "Comparison",
    "HeadPicture",
    "Pair",
    "Theme",
    "comparison_figure",
    "head_figure",
    "save",
    "style",
    "svg",
    "upper_text",
]



@dataclass(frozen=True, eq=False)
class HeadPicture:
    """All that a head's figure shows. `weights` has a row for each sample of `y` and a column for each anchor.

    `bound` is None for a head that is only calibrated. `error` may carry signs; with `relative=True` it is an error
    relative to the target's size, and so is the bound.
    """

    name: str
    interval: tuple[float, float]
    y: Array
    target: Array
    output: Array
    error: Array
    bound: float | None
    anchors: Array
    values: Array
    weights: Array
    kappa: float
    potential: str
    dtype: str
    relative: bool = False

    def __post_init__(self) -> None:
        for field in ("y", "target", "output", "error", "anchors", "values", "weights"):
            object.__setattr__(self, field, np.asarray(getattr(self, field), dtype=np.float64))
        if self.y.ndim != 1 or len(self.y) < 2 or not (np.diff(self.y) > 0).all():
            raise ArgumentError("y is a rising row of at least two sample points")
        shapes = {"target": self.y.shape, "output": self.y.shape, "error": self.y.shape, "values": self.anchors.shape}
        shapes["weights"] = (*self.y.shape, *self.anchors.shape)
        for field, shape in shapes.items():
            if getattr(self, field).shape != shape:
                raise ArgumentError(f"{field} has shape {getattr(self, field).shape}, expected {shape}")
        if not self.interval[0] < self.interval[1]:
            raise ArgumentError(f"the interval is (lo, hi) with lo < hi, got {self.interval}")

    @property
    def logarithmic(self) -> bool:
        """Whether the interval spans decades, so that a linear axis would hide most of the anchors."""
        lo, hi = self.interval
        return lo > 0 and hi / lo >= 50


@dataclass(frozen=True)
class Comparison:
    """One function's bounds: float64, float32, and the error of cold selection with the same anchors."""

    name: str
    interval: tuple[float, float]
    float64: float
    float32: float
    cold: float

    def __post_init__(self) -> None:
        for field in ("float64", "float32", "cold"):
            if not 0 < getattr(self, field) < np.inf:
                raise ArgumentError(f"{self.name}: {field} is a positive number, got {getattr(self, field)}")


def head_figure(data: HeadPicture) -> Builder:
    """The function with its anchors, the softmax weights, the values, and the error below its bound."""

    def build(theme: Theme) -> Figure:
        figure = new_figure(10, 6.6)
        grid = figure.add_gridspec(2, 5, hspace=0.09, wspace=0.06)
        _draw_function(figure.add_subplot(grid[0, :3]), data, theme)
        _draw_values(figure.add_subplot(grid[0, 3:]), data, theme)
        _draw_error(figure.add_subplot(grid[1, :3]), data, theme)
        _draw_weights(figure.add_subplot(grid[1, 3:]), data, theme)
        return figure

    return build


def _inside(data: HeadPicture) -> Any:
    return (data.anchors >= data.interval[0]) & (data.anchors <= data.interval[1])


def _y_axis(axes: Axes, data: HeadPicture) -> None:
    """The shared horizontal axis: the interval, in decades where it spans several."""
    if data.logarithmic:
        axes.set_xscale("log")
    axes.set_xlim(*data.interval)
    axes.set_xlabel("input y")


def _draw_function(axes: Axes, data: HeadPicture, theme: Theme) -> None:
    inside = data.anchors[_inside(data)]
    axes.plot(data.y, data.target, color=theme.target, label="target")
    on_curve = np.interp(inside, data.y, data.target)
    dots: dict[str, Any] = {
        "ms": 5.5,
        "color": theme.anchor,
        "mec": theme.surface,
        "mew": 0.9,
        "clip_on": False,
        "zorder": 4,
    }
    axes.plot(inside, on_curve, "o", label="anchors", **dots)
    axes.set_title(f"{_short(data.name)} on {_interval(data.interval)}")
    axes.set_ylabel("target")
    _y_axis(axes, data)
    if data.logarithmic and data.target.min() > 0 and data.target.max() > 50 * data.target.min():
        axes.set_yscale("log")
    axes.legend(loc="best")


def _draw_values(axes: Axes, data: HeadPicture, theme: Theme) -> None:
    inside = _inside(data)
    index = np.arange(1, len(data.anchors) + 1)
    scale = float(np.abs(data.target).max())
    if np.abs(data.values).max() > 30 * scale > 0:
        # Guards can be thousands of times larger than the rest; a linear axis would flatten the rest to zero.
        axes.set_yscale("symlog", linthresh=10 ** np.ceil(np.log10(scale)))
    axes.axhline(0, color=theme.soft, lw=0.8)
    axes.vlines(index, 0, data.values, color=theme.anchor, lw=1.2, alpha=0.6)
    axes.plot(index[inside], data.values[inside], "o", ms=4.5, color=theme.anchor)
    axes.plot(index[~inside], data.values[~inside], "o", ms=4.5, mfc=theme.surface, mec=theme.anchor)
    axes.set_title(f"{len(index)} values, κ = {data.kappa:.3g}")
    axes.set_xlabel("anchor number" if inside.all() else "anchor number (hollow: guard outside)")
    axes.set_ylabel("value")
    axes.xaxis.set_major_locator(require("matplotlib.ticker", "report").MaxNLocator(integer=True))


def _draw_error(axes: Axes, data: HeadPicture, theme: Theme) -> None:
    error = np.abs(data.error)
    worst = float(error.max())
    # A head may be exact; a log axis still needs somewhere to start.
    top = max(worst, data.bound or 0.0) or float(np.finfo(np.float64).eps)
    floor = top * 1e-4
    axes.set_yscale("log")
    axes.fill_between(data.y, floor, np.maximum(error, floor), color=theme.output, alpha=0.18, lw=0)
    axes.plot(data.y, np.maximum(error, floor), color=theme.output, lw=0.9)
    if data.bound is None:
        label, height, colour = "largest measured: calibrated, not certified", worst, theme.soft
    else:
        label, height, colour = f"certified bound {upper_text(data.bound)}", data.bound, theme.bound
    height = max(height, floor)
    axes.axhline(height, color=colour, lw=1.6, ls=(0, (5, 2.5)))
    axes.annotate(
        label, (1, height), xycoords=("axes fraction", "data"), xytext=(-2, 5), textcoords="offset points",
        ha="right", va="bottom", color=colour, fontsize=10, fontweight="bold",
    )  # fmt: skip
    axes.set_ylim(floor, top * 12)
    axes.set_title(f"Error in {data.dtype}, largest seen {worst:.3g}")
    axes.set_ylabel("relative error" if data.relative else "absolute error")
    _y_axis(axes, data)


def _draw_weights(axes: Axes, data: HeadPicture, theme: Theme) -> None:
    count = len(data.anchors)
    colours = _ramp(theme, count)
    many, highest = count > 40, float(data.weights.max())
    for weight, colour in zip(data.weights.T, colours, strict=True):
        # Where a weight is too small to be seen its curve would only make the file larger.
        seen = np.flatnonzero(weight > 1e-3 * highest)
        if not len(seen):
            continue
        y, weight = (row[max(seen[0] - 1, 0) : seen[-1] + 2] for row in (data.y, weight))
        if not many:
            axes.fill_between(y, 0, weight, color=colour, alpha=0.14, lw=0)
        axes.plot(y, weight, color=colour, lw=0.7 if many else 1.1)
    axes.set_title(f"Weights, potential {data.potential}")
    axes.set_ylabel("softmax weight of each anchor")
    axes.set_ylim(0, min(1.02, 1.08 * highest))
    _y_axis(axes, data)


def _ramp(theme: Theme, count: int) -> list[Any]:
    """Colours from one end of the theme's ramp to the other."""
    colormap = require("matplotlib.colors", "report").LinearSegmentedColormap.from_list("ramp", theme.ramp)
    return [colormap(t) for t in np.linspace(0, 1, count)]


def _interval(interval: tuple[float, float]) -> str:
    return "[{:g}, {:g}]".format(*interval).replace("-", "−")


def _short(name: str, width: int = 34) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def comparison_figure(rows: Sequence[Comparison]) -> Builder:
    """A dot plot of bounds on a log axis, one line per function: float64, float32 and cold selection."""
    if not rows:
        raise ArgumentError("a comparison needs at least one function")

    def build(theme: Theme) -> Figure:
        figure = new_figure(10, 1.5 + 0.46 * len(rows))
        axes = figure.add_subplot()
        places = np.arange(len(rows))[::-1]
        series = (
            ("certified, float64", [r.float64 for r in rows], "o", theme.target),
            ("certified, float32", [r.float32 for r in rows], "s", theme.output),
            ("cold selection, same anchors", [r.cold for r in rows], "D", theme.bound),
        )
        lows, highs = ([f(r.float64, r.float32, r.cold) for r in rows] for f in (min, max))
        axes.hlines(places, lows, highs, color=theme.grid, lw=3)
        for label, numbers, marker, colour in series:
            axes.plot(numbers, places, marker, ms=8, color=colour, mec=theme.surface, mew=1, label=label, zorder=3)
        axes.set_xscale("log")
        axes.set_xlim(min(lows) / 6, max(highs) * 6)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_yticks(places, [f"{_short(r.name)}  {_interval(r.interval)}" for r in rows])
        axes.tick_params(axis="y", length=0, labelsize=10.5, labelcolor=theme.ink)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("error at most (smaller is better)")
        figure.legend(loc="outside upper left", ncols=3, handletextpad=0.3, columnspacing=1.8)
        return figure

    return build
