"""The picture of a fitted estimator: where attention goes, how the error falls with depth, and the path of w."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..dtypes import Array
from ..errors import MissingExtra
from .blocks import Block, Lean
from .problem import Problem, Rounding
from .prompt import tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .estimator import InContextEstimator

SHOWN = 64  # steps and tokens of an attention map
GRID = 48  # points a side of the contours
INK, BOUND, QUIET, MAP = "#0072B2", "#D55E00", "#999999", "viridis"


def estimator_figure(est: InContextEstimator) -> Figure:
    """Attention per step, error against depth with its bound, and for two columns the path of w over the loss."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtra("matplotlib", "report") from error
    kernel = not isinstance(est.network_, Block)
    flat = not kernel and est._path.shape[1] == 1 and np.ndim(est.coef_) < 3 and np.shape(est.coef_)[-1] == 2
    figure: Figure = figure_module.Figure(figsize=(4.6 * (3 if flat else 2), 3.6), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, 3 if flat else 2)))
    (_kernel_attention if kernel else _attention)(axes[0], est)
    if hasattr(est, "_path"):
        _depth(axes[1], est)
        times = f"{est.n_iter_} applications of one frozen block"
    else:
        _means(axes[1], est)
        times = "one layer"
    if flat:
        _walk(axes[2], est)
    figure.suptitle(f"{type(est).__name__}: {times}")
    return figure


def _kept(count: int) -> Any:
    return np.unique(np.geomspace(1, count, min(SHOWN, count)).astype(int) - 1)


def _image(axes: Axes, picture: Any, label: str) -> None:
    image = axes.imshow(picture, aspect="auto", cmap=MAP, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=label)


@torch.no_grad()
def _attention(axes: Axes, est: InContextEstimator) -> None:
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
    _image(axes, torch.stack(rows).T.numpy(), "weight over its mean")
    marks = np.linspace(0, len(kept) - 1, min(5, len(kept))).astype(int)
    axes.set_xticks(marks, [str(int(kept[m])) for m in marks])
    axes.set_xlabel("depth (applications of the block)")
    axes.set_ylabel("data token")
    axes.set_title("attention of the state")


@torch.no_grad()
def _kernel_attention(axes: Axes, est: InContextEstimator) -> None:
    """The kernel head's weights between the first tokens: the same in every step."""
    first, second = est.network_.body.layers
    group = second.groups[0]
    weights = group.weights(first(est.prompt_[:SHOWN]))[:, 0, : min(SHOWN, len(est.prompt_))].double()
    _image(axes, (weights / weights.max()).numpy(), "weight over the largest")
    axes.set_xlabel("data token (key)")
    axes.set_ylabel("token (query)")
    axes.set_title("attention between tokens")


def _means(axes: Axes, est: InContextEstimator) -> None:
    """Nadaraya-Watson: what the one head reads at the data, against the labels."""
    labels = est.values_[:, 0] * est.scaling_.y_scale
    read = est.predict(est.rows_ * est.scaling_.x_scale + est.scaling_.x_mean).reshape(len(labels), -1)[:, 0]
    axes.plot(labels, read, "o", color=INK, markersize=3)
    axes.axline((labels.mean(), labels.mean()), slope=1.0, color=QUIET, linewidth=0.8)
    axes.set_xlabel("label")
    axes.set_ylabel("kernel mean")
    axes.set_title("what the head reads at the data")


def _depth(axes: Axes, est: InContextEstimator) -> None:
    """The distance from the last weights, and the bound of F4 from where the last stage began."""
    certificate, path = est.certificate_, est._path
    distance = np.sqrt(((path - path[-1]) ** 2).reshape(len(path), -1).sum(axis=1))
    depth, floor = np.arange(len(path)), max(float(distance.max()), 1e-300) * 1e-16
    axes.semilogy(depth[:-1], np.maximum(distance[:-1], floor), color=INK, label="distance from the end")
    since = np.arange(certificate.depth + 1)
    begin = len(path) - 1 - certificate.depth
    if begin >= 0 and certificate.depth:
        heavy = est.network_.momentum.kind == "heavy ball"
        grown = 1 + (1 + certificate.rho) * since if heavy else np.full(len(since), certificate.growth)  # F4b, F4c
        bound = grown * certificate.rho**since * certificate.distance + certificate.steps + certificate.aside
        axes.semilogy(begin + since, bound, color=BOUND, linestyle="--", label=f"bound ({certificate.kind})")
    if begin > 0:
        axes.axvline(begin, color=QUIET, linewidth=0.8, linestyle=":", label="last stage")
    axes.set_xlabel("depth (applications of the block)")
    axes.set_ylabel("||w_t - w_T||, prompt's units")
    axes.set_title("error against depth")
    axes.legend(frameon=False)


def _stated(est: InContextEstimator) -> Problem:
    """The problem that the prompt states, read off its tokens."""
    at, Z = est.network_.channels, est.prompt_.double().numpy()
    state, tokens = Z[: at.classes], Z[at.classes :]
    data, penalties = (tokens[tokens[:, at.part(kind).start] == 1] for kind in ("data", "pen"))
    x, v = data[:, at.part("x")], data[:, at.part("v")]
    weight = np.einsum("ij,ij->i", v, x) / np.maximum(np.einsum("ij,ij->i", x, x), 1e-300) / est.scaling_.step
    penalty = 16 * (penalties[:, at.part("x")] ** 2).sum(axis=0) if len(penalties) else np.zeros(at.d)
    threshold = state[0, at.part("t")] / est.scaling_.step if at.shrink else None
    return Problem(est.network_.loss, x, data[:, at.part("y")], weight, penalty, np.zeros((1, at.d)),
                   Rounding(0.0, np.zeros(at.d)), threshold)  # fmt: skip


def _walk(axes: Axes, est: InContextEstimator) -> None:
    """The path of w over the contours of the objective; an intercept stays where it ended."""
    path: Array = est._path[:, 0]
    end, problem = path[-1], _stated(est)
    reach = 1.2 * np.abs(path[:, :2] - end[:2]).max(axis=0).clip(min=1e-12)
    first, second = (np.linspace(-r, r, GRID) + e for r, e in zip(reach, end[:2], strict=True))
    points = np.tile(end, (GRID, GRID, 1))
    points[..., 0], points[..., 1] = np.meshgrid(first, second)
    loss = np.array([[problem.objective(point[None]) for point in row] for row in points])
    axes.contour(first, second, loss - loss.min(), levels=12, colors=QUIET, linewidths=0.7)
    axes.plot(path[:, 0], path[:, 1], "o-", color=INK, markersize=3, linewidth=1)
    axes.plot(*end[:2], "*", color=BOUND, markersize=12)
    axes.locator_params(nbins=5)
    axes.set_xlabel("w_1 (prompt's units)")
    axes.set_ylabel("w_2")
    axes.set_title("the path of w")
