"""The picture of a fitted estimator: where attention goes, how the error falls with depth, and the path of w."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, MissingExtra
from .certificate import factors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .base import InContextEstimator

SHOWN = 64  # steps and tokens of the attention map
INK, BOUND, MAP = "#0072B2", "#D55E00", "viridis"


def estimator_figure(est: InContextEstimator) -> Figure:
    """Attention per step, error against depth with its bound, and for two columns the path over the loss."""
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
    _weights(axes[0], flat)
    _depth(axes[1], est, flat)
    if panels == 3:
        _path(axes[2], flat)
    figure.suptitle(f"{type(est).__name__}: {est.n_iter_} applications of one frozen block")
    return figure


def _weights(axes: Axes, flat: Any) -> None:
    """Every weight after every step: what the state token carries."""
    kept = np.unique(np.geomspace(1, len(flat), min(SHOWN, len(flat))).astype(int) - 1)
    image = axes.imshow(flat[kept][:, :SHOWN].T, aspect="auto", cmap=MAP, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="w")
    marks = np.linspace(0, len(kept) - 1, min(5, len(kept))).astype(int)
    axes.set_xticks(marks, [str(int(kept[m])) for m in marks])
    axes.set_xlabel("depth (applications of the block)")
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


def _path(axes: Axes, flat: Any) -> None:
    """The path of w over the contours of the quadratic that its steps see."""
    end, moves = flat[-1], flat - flat[-1]
    reach = 1.2 * np.abs(moves).max(axis=0).clip(min=1e-12)
    axes.set_xlim(end[0] - reach[0], end[0] + reach[0])
    axes.set_ylim(end[1] - reach[1], end[1] + reach[1])
    axes.plot(flat[:, 0], flat[:, 1], "o-", color=INK, markersize=3, linewidth=1)
    axes.plot(*end, "*", color=BOUND, markersize=12)
    axes.set_xlabel("w_1")
    axes.set_ylabel("w_2")
    axes.set_title("the path of w")
