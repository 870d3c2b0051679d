"""A construction as one figure: attention, logits, output beside the target, error below the bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..certificates.certificate import upper_text
from ..dtypes import Array
from ..errors import ArgumentError
from ..extras import require
from ..report.style import LIGHT, Builder, Theme, new_figure, save, style
from .heads import RampHeads
from .max_affine import MaxAffine
from .ramp import Ramp, scalars
from .result import Construction
from .universal import Universal
from .variants import GateRamp, SmoothRamp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 1200
COLUMNS = 120  # queries of the heat map
SLOTS = 64  # the most keys that a heat map shows


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


def drawn(m: Construction, path: str | Path | None = None) -> Any:
    """The figure itself, or where it was written."""
    builder = theorem_figure(picture(m))
    if path is not None:
        return save(builder, path)
    with style(LIGHT) as theme:
        return builder(theme)


@torch.no_grad()
def picture(m: Construction) -> TheoremPicture:
    """What there is to see of a construction."""
    if isinstance(m, (Ramp, RampHeads, SmoothRamp)):
        return _scalar_picture(m)
    if isinstance(m, (Universal, MaxAffine)):
        return _box_picture(m)
    raise ArgumentError(f"there is no picture of a {type(m).__name__}")


def _tokens(m: Any) -> int:
    if isinstance(m, RampHeads):
        return m.keys
    return m.tokens_shown() if isinstance(m, Ramp) else 4


def _inputs(m: Any, count: int) -> tuple[torch.Tensor, Array]:
    """Tokens whose y = w.x + t runs evenly from below a to above b, and these y as they are."""
    n = _tokens(m)
    a, b = float(m.anchors[0]), float(m.anchors[-1])
    rows = -(-count // n)
    wanted = torch.linspace(a - 0.12 * (b - a), b + 0.12 * (b - a), rows * n, dtype=torch.float64).reshape(rows, n)
    w, t = m.w.detach().double().expand(n, -1), m.t.detach().double().expand(n)
    X = ((wanted - t) / (w * w).sum(-1).clamp_min(1e-300)).unsqueeze(-1) * w
    X = X.clamp(-m.radius, m.radius).to(m.dtype)
    return X, scalars(X.double(), w, t).flatten().numpy()


def _scalar_picture(m: Any) -> TheoremPicture:
    X, y = _inputs(m, POINTS)
    order = np.argsort(y, kind="stable")
    output, target = (v.double().flatten(0, 1).numpy()[order] for v in (m.core(X), m.target(X)))
    few, at = _inputs(m, COLUMNS)
    weights = m.attention(few).double()
    if isinstance(m, RampHeads):  # (batch, head, token, key) -> all keys of all heads in a row
        weights = weights.transpose(-3, -2).flatten(-2)
    table = weights.flatten(0, 1).numpy()[np.argsort(at, kind="stable")]
    a, b = float(m.anchors[0]), float(m.anchors[-1])
    if isinstance(m, GateRamp):
        labels = ("own token", "a", "b")
        curves = tuple((label, np.sort(at), w) for label, w in zip(labels, table.T, strict=False))
        shape = ("Softmax weights of the slots", "y = w.x + t", False)
    else:
        step, kappa = (b - a) / (len(m.anchors) - 1), float(m.kappa)
        places = [a + share * (b - a) for share in (0.15, 0.5, 0.85)]
        curves = tuple((f"y = {v:.3g}", m.anchors, -kappa * ((v - m.anchors) / step) ** 2) for v in places)
        shape = (f"Logits below the largest, κ = {kappa:.3g}", "anchor L", True)
    kept = sorted(set(m.channel)) if isinstance(m, Ramp) else [0]
    error = np.abs(output - target).max(-1)
    return TheoremPicture(
        _title(m), "y = w.x + t", y[order], target[:, kept], output[:, kept], error, m.bound, m.paper_bound, table,
        "key, head after head" if isinstance(m, RampHeads) else "key", curves, *shape, str(m.dtype)[6:],
    )  # fmt: skip


def _box_picture(m: Universal | MaxAffine) -> TheoremPicture:
    """Along the diagonal of the box."""
    s = torch.linspace(0, 1, POINTS // 2, dtype=torch.float64)
    shape = (-1, *[1] * len(m.box.shape))
    X = m.box.lower + s.reshape(shape) * (m.box.upper - m.box.lower)
    X = X.to(m.dtype)
    X = X.unsqueeze(-2) if isinstance(m, MaxAffine) and len(m.box.shape) == 1 else X
    output, target = (v.double().flatten(1).numpy() for v in (m.core(X), m.target(X)))
    chosen_weights = m.attention(X)
    weights: Array = (chosen_weights[:, 0] if chosen_weights.dim() == 3 else chosen_weights).double().numpy()
    used: Array = np.argsort(-np.max(weights, 0), kind="stable")[:SLOTS]
    used = used[np.max(weights, 0)[used] > 1e-2]
    used = used[np.argsort((weights[:, used] * s.numpy()[:, None]).sum(0) / (weights[:, used].sum(0) + 1e-300))]
    if isinstance(m, Universal):
        hats = m.hats(X).double().numpy()[:, : m.grid.counts[0]]
        chosen = range(0, hats.shape[1], max(1, hats.shape[1] // 6))
        curves = tuple((f"hat {k + 1}", s.numpy(), hats[:, k]) for k in chosen)
        second = ("Hats of the first coordinate (layer 1)", "position on the diagonal", False)
    else:
        _, _, keys, _ = (x.double().numpy() for x in m.tables())
        flat = X.double().reshape(len(s), -1).numpy() - np.array([float(v) for v in m.middle])
        D, each = len(m.middle), max(1, m.tokens)  # a gathered sequence has a key for every cell and token
        logits = flat @ keys[used * each, :D].T + keys[used * each, D]
        some = range(0, len(used), max(1, len(used) // 6))
        curves = tuple((f"cell {used[k] + 1}", s.numpy(), logits[:, k]) for k in some)
        second = ("Affine logits of some cells", "position on the diagonal", False)
    error = np.abs(output - target).max(-1)
    step = max(1, len(s) // COLUMNS)
    return TheoremPicture(
        _title(m), "position on the diagonal of the box", s.numpy(), target[:, :3], output[:, :3], error, m.bound,
        m.paper_bound, weights[::step][:, used], "key, those in use", curves, *second, str(m.dtype)[6:],
    )  # fmt: skip


def _title(m: Construction) -> str:
    return f"{m.theorem}, {m.form} form"


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
