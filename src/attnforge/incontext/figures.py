"""The picture of a fitted estimator: where attention goes, how the error falls with depth, and the path of w."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ArgumentError, MissingExtra
from .certificate import factors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .base import InContextEstimator

SHOWN = 64  # steps and tokens of the attention map
INK, BOUND, MAP = "#0072B2", "#D55E00", "viridis"


def estimator_figure(est: InContextEstimator) -> Figure:
    """Attention (or the state) per step, error against depth with its bound, and for two columns the path of w."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtra("matplotlib", "report") from error
    if not hasattr(est, "trajectory_"):
        raise ArgumentError(f"this {type(est).__name__} has no path to show: it is one attention layer")
    path = np.asarray(est.trajectory_, dtype=np.float64)
    flat = path.reshape(len(path), -1)
    panels = 3 if flat.shape[1] == 2 else 2
    figure: Figure = figure_module.Figure(figsize=(4.6 * panels, 3.6), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, panels)))
    quadratic = path.ndim == 2 and hasattr(est, "prompt_") and est.prompt_.shape[-1] == 2 * path.shape[1] + 1
    (_attention if quadratic else _weights)(axes[0], est, flat)
    _depth(axes[1], est, flat)
    if panels == 3:
        _path(axes[2], est, flat, quadratic)
    figure.suptitle(f"{type(est).__name__}: {est.n_iter_} applications of one frozen block")
    return figure


def _kept(count: int) -> Any:
    return np.unique(np.geomspace(1, count, min(SHOWN, count)).astype(int) - 1)


def _image(axes: Axes, picture: Any, kept: Any, label: str) -> None:
    image = axes.imshow(picture, aspect="auto", cmap=MAP, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=label)
    marks = np.linspace(0, len(kept) - 1, min(5, len(kept))).astype(int)
    axes.set_xticks(marks, [str(int(kept[m])) for m in marks])
    axes.set_xlabel("depth (applications of the block)")


def _attention(axes: Axes, est: InContextEstimator, flat: Any) -> None:
    """How the state's sharpest aggregation head spreads over the data tokens, relative to an even spread."""
    kept, block = _kept(len(flat)), est.network_
    w = torch.from_numpy(flat[kept] * (est.scaling_.x_scale / est.scaling_.y_scale)).to(block.dtype).unsqueeze(1)
    with torch.no_grad():
        r = block.residuals(w, est.prompt_.expand(len(kept), *est.prompt_.shape))
        head = block.gather.weights(r)[:, 0, len(block.gather.scales) // 2 - 1, :-1].double()
    _image(axes, (head / head.mean(-1, keepdim=True))[:, :SHOWN].T.numpy(), kept, "weight over its mean")
    axes.set_ylabel("data token")
    axes.set_title("attention of the state")


def _weights(axes: Axes, est: InContextEstimator, flat: Any) -> None:
    """Every weight after every step: what the state token carries."""
    kept = _kept(len(flat))
    _image(axes, flat[kept][:, :SHOWN].T, kept, "w")
    axes.set_ylabel("coordinate of w")
    axes.set_title("the state token")


def _depth(axes: Axes, est: InContextEstimator, flat: Any) -> None:
    """The distance from the last weights, and the bound of F4 scaled to the data's units."""
    certificate = est.certificate_
    distance = np.linalg.norm(flat - flat[-1], axis=1)
    depth = np.arange(len(flat))
    floor = max(float(distance.max()), 1e-300) * 1e-16
    axes.semilogy(depth[:-1], np.maximum(distance[:-1], floor), color=INK, label="distance from the end")
    unit = float(np.max(est.scaling_.y_scale / est.scaling_.x_scale))
    if certificate.depth == len(flat) - 1:
        kind = getattr(getattr(est.network_, "momentum", None), "kind", "plain")
        grown = np.array([factors(kind, certificate.rho, int(t))[0] for t in depth])
        bound = unit * (grown * certificate.rho**depth * certificate.distance + certificate.steps)
        axes.semilogy(depth, bound, color=BOUND, linestyle="--", label=f"bound ({certificate.kind})")
    axes.set_xlabel("depth (applications of the block)")
    axes.set_ylabel("||w_t - w_T||")
    axes.set_title("error against depth")
    axes.legend(frameon=False)


def _path(axes: Axes, est: InContextEstimator, flat: Any, contours: bool) -> None:
    """The path of w; over the contours of the squared error of the prompt where that is the loss."""
    end = flat[-1]
    reach = 1.2 * np.abs(flat - end).max(axis=0).clip(min=1e-12)
    if contours:
        grid = np.stack(np.meshgrid(*(np.linspace(-r, r, 60) for r in reach)), axis=-1) + end
        tokens = est.prompt_.double().numpy()
        z = (grid * (est.scaling_.x_scale / est.scaling_.y_scale)) @ tokens[:, :2].T
        loss = ((z - tokens[:, 4]) ** 2).mean(axis=-1)
        axes.contour(grid[..., 0], grid[..., 1], loss, levels=12, colors="#999999", linewidths=0.7)
    axes.plot(flat[:, 0], flat[:, 1], "o-", color=INK, markersize=3, linewidth=1)
    axes.plot(*end, "*", color=BOUND, markersize=12)
    axes.set_xlabel("w_1")
    axes.set_ylabel("w_2")
    axes.set_title("the path of w")
