"""The picture of a fitted estimator: where attention goes, how the error falls with depth, and the path of w."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..charts.chart import Contour, Figure, Heat, Level, Panel, Series
from ..charts.drawing import matplotlib_figure
from ..dtypes import Array
from .blocks import Block, Lean
from .problem import Rounding, StatedProblem
from .prompt import tensor

if TYPE_CHECKING:
    from .estimator import InContextEstimator

SHOWN = 64  # steps and tokens of an attention map: each a few pixels wide
GRID = 48  # places of each axis where the loss is evaluated for its contours: smooth at the size of a panel


def estimator_figure(est: InContextEstimator) -> Any:
    """Attention per step, error against depth with its bound, and for two columns the path of w over the loss."""
    kernel = not isinstance(est.network_, Block)
    deep = hasattr(est, "_path")
    flat = not kernel and est._path.shape[1] == 1 and np.ndim(est.coef_) < 3 and np.shape(est.coef_)[-1] == 2
    panels = [(_kernel_attention if kernel else _attention)(est), _depth(est) if deep else _means(est)]
    panels += [_walk(est)] if flat else []
    name = type(est).__name__
    times = f"{est.n_iter_} applications of one frozen block" if deep else "one layer"
    caption = f"{name}: where attention goes, and what comes of it."
    return matplotlib_figure(Figure("estimator", caption, panels, title=f"{name}: {times}"))


def _kept(count: int) -> Any:
    return np.unique(np.geomspace(1, count, min(SHOWN, count)).astype(int) - 1)


@torch.no_grad()
def _attention(est: InContextEstimator) -> Panel:
    """How the first state token's sharpest aggregation head spreads over the data, relative to an even spread."""
    lean, at = Lean(est.network_), est.network_.channels
    tokens = est.prompt_[at.classes :]
    tokens = tokens[tokens[:, at.part("data").start] == 1][:SHOWN].clone()
    kept, rows = _kept(len(est._path)), []
    sharpest = len(lean.gather.values) // 2 - 1
    for t in kept:
        state = at.state(tensor(est._path[t], lean.dtype))
        if not est.network_.loss.quadratic:
            tokens[..., lean.r] = lean.residuals(state, tokens)
        weights = lean.gather.weights(state, tokens)[0, sharpest, :-1].double()
        rows.append(weights / weights.mean())
    ticks = [(int(m), str(int(kept[m]))) for m in np.linspace(0, len(kept) - 1, min(5, len(kept))).astype(int)]
    heat = Heat(torch.stack(rows).T.numpy(), "weight over its mean")
    return Panel("attention of the state", "depth (applications of the block)", "data token", heat=heat, ticks=ticks)


@torch.no_grad()
def _kernel_attention(est: InContextEstimator) -> Panel:
    """The kernel head's weights between the first tokens: the same in every step."""
    first, second = est.network_.body.layers
    group = second.groups[0]
    weights = group.weights(first(est.prompt_[:SHOWN]))[:, 0, : min(SHOWN, len(est.prompt_))].double()
    heat = Heat((weights / weights.max()).numpy(), "weight over the largest")
    return Panel("attention between tokens", "data token (key)", "token (query)", heat=heat)


def _means(est: InContextEstimator) -> Panel:
    """Nadaraya-Watson: what the one head reads at the data, against the labels."""
    labels = est.values_[:, 0] * est.scaling_.y_scale
    read = est.predict(est.rows_ * est.scaling_.x_scale + est.scaling_.x_mean).reshape(len(labels), -1)[:, 0]
    ends = [float(min(read.min(), labels.min())), float(max(read.max(), labels.max()))]
    series = [
        Series("kernel mean", labels, read, style="points", role="target"),
        Series("the label itself", ends, ends, style="bound", role="soft"),
    ]
    return Panel("what the head reads at the data", "label", "kernel mean", series, legend="inside")


def _depth(est: InContextEstimator) -> Panel:
    """The distance from the last weights, and the bound of F4 from where the last stage began."""
    certificate, path = est.certificate_, est._path
    distance = np.sqrt(((path - path[-1]) ** 2).reshape(len(path), -1).sum(axis=1))
    depth, floor = np.arange(len(path)), max(float(distance.max()), 1e-300) * 1e-16
    series = [Series("distance from the end", depth[:-1], np.maximum(distance[:-1], floor), role="target")]
    since = np.arange(certificate.depth + 1)
    begin = len(path) - 1 - certificate.depth
    if begin >= 0 and certificate.depth:
        heavy = est.network_.momentum.kind == "heavy ball"
        grown = 1 + (1 + certificate.rho) * since if heavy else np.full(len(since), certificate.growth)  # F4b, F4c
        bound = grown * certificate.rho**since * certificate.distance + certificate.steps + certificate.aside
        series.append(Series(f"bound ({certificate.kind})", begin + since, bound, style="bound", role="bound"))
    shown = [v for s in series for v in s.y if v]
    return Panel(
        "error against depth", "depth (applications of the block)", "||w_t - w_T||, prompt's units", series,
        log_y=True, legend="inside", y_range=(min(shown, default=floor) / 2, 2 * max(shown, default=1.0)),
        marks=[Level(begin, "last stage", "soft", "x", named=True)] if begin > 0 else [],
    )  # fmt: skip


def _stated(est: InContextEstimator) -> StatedProblem:
    """The problem that the prompt states, read off its tokens."""
    at, Z = est.network_.channels, est.prompt_.double().numpy()
    state, tokens = Z[: at.classes], Z[at.classes :]
    data, penalties = (tokens[tokens[:, at.part(kind).start] == 1] for kind in ("data", "pen"))
    x, v = data[:, at.part("x")], data[:, at.part("v")]
    weight = np.einsum("ij,ij->i", v, x) / np.maximum(np.einsum("ij,ij->i", x, x), 1e-300) / est.scaling_.step
    penalty = 16 * (penalties[:, at.part("x")] ** 2).sum(axis=0) if len(penalties) else np.zeros(at.d)
    threshold = state[0, at.part("t")] / est.scaling_.step if at.shrink else None
    return StatedProblem(est.network_.loss, x, data[:, at.part("y")], weight, penalty, np.zeros((1, at.d)),
                   Rounding(0.0, np.zeros(at.d)), threshold)  # fmt: skip


def _walk(est: InContextEstimator) -> Panel:
    """The path of w over the contours of the objective; an intercept stays where it ended."""
    path: Array = est._path[:, 0]
    end, problem = path[-1], _stated(est)
    reach = 1.2 * np.abs(path[:, :2] - end[:2]).max(axis=0).clip(min=1e-12)
    first, second = (np.linspace(-r, r, GRID) + e for r, e in zip(reach, end[:2], strict=True))
    points = np.tile(end, (GRID, GRID, 1))
    points[..., 0], points[..., 1] = np.meshgrid(first, second)
    loss = np.array([[problem.objective(point[None]) for point in row] for row in points])
    series = [
        Series("", path[:, 0], path[:, 1], role="target"),
        Series("", end[:1], end[1:2], style="points", role="bound"),
    ]
    return Panel(
        "the path of w", "w_1 (prompt's units)", "w_2", series, marks=[Contour(first, second, loss - loss.min())],
        x_range=(first[0], first[-1]), y_range=(second[0], second[-1]),
    )  # fmt: skip
