"""A construction as one figure: attention, logits, output beside the target, error below the bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..certificates.certificate import upper_text
from ..charts.chart import Figure, Heat, Level, Panel, Series, error_panel
from ..charts.drawing import matplotlib_figure, save
from ..dtypes import Array
from ..errors import ArgumentError

SLOTS = 64  # twice as many keys have a row of their own in a heat map


@dataclass(frozen=True, eq=False)
class TheoremPicture:
    """All that the figure shows. `curves` are the second panel: (label, x, y) each."""

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
    curve_label: str
    dtype: str

    def __post_init__(self) -> None:
        rows = len(self.x)
        if self.target.shape != self.output.shape or len(self.target) != rows or self.error.shape != (rows,):
            raise ArgumentError("target, output and error need a row for each x")


def drawn(data: TheoremPicture, path: str | Path | None = None) -> Any:
    """The figure itself, or where it was written."""
    figure = theorem_figure(data)
    return matplotlib_figure(figure) if path is None else save(figure, path)


def theorem_figure(data: TheoremPicture) -> Figure:
    """Four panels on one page: where attention goes, what makes it go there, the output, and the error."""
    keys = data.weights.shape[1]
    together = -(-keys // (2 * SLOTS))  # many keys: neighbours are shown together, their weights added
    weights = np.add.reduceat(data.weights, np.arange(0, keys, together), axis=1)
    ends = (float(data.x[0]), float(data.x[-1]))
    heat = Heat(weights.T, "softmax weight", 0, 1, x=ends, y=(0.5, keys + 0.5), sparse=True)
    key = data.key if together == 1 else f"{data.key}, {together} together"
    output = []
    for c, (wanted, found) in enumerate(zip(data.target.T, data.output.T, strict=True)):
        output += [
            Series("" if c else "target", data.x, wanted, style="broad", role="target"),
            Series("" if c else "network", data.x, found, role="output"),
        ]
    bounds = (("certified bound", data.bound, "bound"), ("the paper's bound", data.paper_bound, "soft"))
    levels = [Level(at, f"{words} {upper_text(at)}", role) for words, at, role in bounds if at is not None]
    worst = f"Error in {data.dtype}, largest seen {float(data.error.max()):.3g}"
    return Figure(
        "theorem",
        f"{data.title}: attention, logits or hats, output and error.",
        (
            Panel("Attention: one column for each query", data.axis, key, heat=heat),
            Panel(
                data.curve_title, data.curve_axis, data.curve_label, [Series(*curve) for curve in data.curves],
                legend="top",
            ),
            Panel("Output", data.axis, "output", output, legend="inside"),
            error_panel(worst, data.axis, "absolute error", data.x, data.error, levels),
        ),
        columns=(1, 1),
        heights=(3.4, 3.4),
        title=data.title,
    )  # fmt: skip
