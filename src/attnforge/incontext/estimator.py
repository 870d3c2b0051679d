"""What all in-context estimators share: checks, the call of the solver, read-outs, warnings, and a picture: where
attention goes, how the error falls with depth, and the path of w.

scikit-learn is imported here, and this module when an estimator is first asked for.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..arguments import is_number, is_whole
from ..charts.chart import Contour, Figure, Heat, Level, Panel, Series
from ..charts.drawing import matplotlib_figure
from ..dtypes import DTYPES, SHIPPED, Array
from ..errors import ArgumentError, MissingExtra
from ..kernel.incontext.prove import beyond_reach
from .blocks import Block, Lean, frozen
from .certificate import ConvergenceCertificate
from .losses import LINEAR
from .problem import Rounding, StatedProblem
from .prompt import Scaling, tensor
from .solver import Solution, solve

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", "sklearn") from error

__all__ = [
    "ClassifierMixin",
    "InContextEstimator",
    "MultiOutputMixin",
    "RegressorMixin",
    "at_least",
    "check_classification_targets",
]

if TYPE_CHECKING:
    import matplotlib.figure

# Sizes of data whose squares, summed and divided by each other, stay far inside float64, where rounding is relative.
SQUARABLE = (2.0**-400, 2.0**400)
SPARSE = ("csr", "csc", "coo")
SHOWN = 64  # steps and tokens of an attention map: each a few pixels wide
FILES = "attnforge.incontext.saved"  # above this module, loaded when it is wanted
LARGEST = 512  # columns of a fit that has a file: the network that reading builds again takes 64 MB then
GRID = 48  # places of each axis where the loss is evaluated for its contours: smooth at the size of a panel


@dataclass(eq=False, repr=False, kw_only=True)
class Parameters:
    """What every estimator can be told: when to stop, the condition number that fixes the network, its dtype."""

    tol: float = 1e-12
    max_iter: int = 20_000
    condition: float | None = None
    dtype: str = "float64"


@dataclass(frozen=True, eq=False)
class Given:
    """What was fitted: rows, labels (numbers of classes, for classifiers), sample weights; copies, for files."""

    rows: Array
    labels: Array
    weight: Array

    @classmethod
    def of(cls, rows: Array, labels: Array, weight: Array) -> Given:
        """Labels as a table of columns."""
        return cls(*(np.array(each, dtype=np.float64) for each in (rows, labels.reshape(len(rows), -1), weight)))


class InContextEstimator(Parameters, BaseEstimator):  # type: ignore[misc]
    """Base of the estimators: an estimator lays data out as a prompt and lets a frozen network work on it.

    After `fit`: `network_` (the block that was applied `n_iter_` times), `scaling_` (all that was done outside of it),
    `trajectory_` (the weights after every application), `prompt_` (the sequence of tokens at the end: state first, then
    data; of the first target where there are several), `certificate_`.
    """

    network_: Any
    scaling_: Scaling
    certificate_: ConvergenceCertificate
    trajectory_: Array
    _given: Given
    _weights: Array  # in the prompt's units, of every fit and state: (F, K, d)
    _path: Array  # the weights after every application in the prompt's units, (T + 1, K, d)
    prompt_: torch.Tensor
    n_iter_: int
    coef_: Array
    intercept_: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _torch_dtype(self) -> torch.dtype:
        if DTYPES.get(self.dtype) not in SHIPPED:
            raise ArgumentError(f"dtype must be 'float64' or 'float32', got {self.dtype!r}")
        return DTYPES[self.dtype]

    def _check_common(self) -> None:
        """Parameters every iterative estimator has."""
        at_least("tol", self.tol, 0)
        if not is_whole(self.max_iter, 1):
            raise ArgumentError(f"max_iter must be a whole number >= 1, got {self.max_iter!r}")
        if self.condition is not None and not (is_number(self.condition) and self.condition >= 1):
            raise ArgumentError(f"condition must be None or a number >= 1, got {self.condition!r}")

    def _checked(self, X: Any, y: Any, sample_weight: Any = None, **options: Any) -> tuple[Array, Any, Array]:
        """X (dense), y and weights, validated as scikit-learn does."""
        X, y = validate_data(self, X, y, accept_sparse=SPARSE, dtype=np.float64, **options)
        X = _dense(X)
        _squarable("a column of X", np.abs(X).max(axis=0, initial=0.0))
        if options.get("y_numeric"):
            _squarable("y", np.abs(np.asarray(y, dtype=np.float64)).reshape(len(X), -1).max(axis=0))
        weight = np.ones(len(X)) if sample_weight is None else _check_sample_weight(sample_weight, X, dtype=np.float64)
        if not weight.sum() > 0:
            raise ArgumentError("sample_weight must contain a positive weight")
        return X, y, weight

    def _solved(
        self, problem: StatedProblem, scaling: Scaling, *, tol: float | None = None, **options: Any
    ) -> Solution:
        """The problem, solved with the estimator's own parameters."""
        given: dict[str, Any] = {"tol": self.tol if tol is None else tol, "max_iter": self.max_iter, **options}
        return solve(problem, scaling, dtype=self._torch_dtype(), condition=self.condition, **given)

    def _keep(
        self, done: Solution, certificate: ConvergenceCertificate, steps: int, given: Given | None = None
    ) -> None:
        """What every fit leaves behind; columns beyond those of the data carry the intercept."""
        if given is not None:
            self._given, self._weights = given, done.w[None]
        self.network_, self.scaling_, self.prompt_ = done.network, done.scaling, done.prompt
        self.certificate_, self.n_iter_, self._path = certificate, steps, done.trajectory
        path = self._units(done.trajectory[:, :, : len(done.scaling.x_scale)])
        self.trajectory_ = path[:, 0] if path.shape[1] == 1 else path
        if given is not None:
            self.settled()

    def _units(self, w: Array) -> Array:
        """Weights of the prompt (..., K, d) in the units of the data."""
        return self.scaling_.original(w)

    def settled(self) -> None:
        """Say in the certificate where no kernel can prove it again."""
        self.certificate_ = replace(self.certificate_, remark=self._beyond())

    def _beyond(self) -> str:
        """Why there is no proof of a fit like this one."""
        fits, states, unknowns = self._weights.shape
        return too_wide(self._given) or beyond_reach(len(self._given.rows), states * unknowns, fits)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write data, weights and certificate to one safetensors file; `attnforge.load` reads it back, and
        `attnforge.check` proves from it how far the weights are from the optimum."""
        check_is_fitted(self)
        if not hasattr(self, "_given"):
            raise ArgumentError("this estimator was fitted by a version that kept no data for files; fit again")
        importlib.import_module(FILES).save(self, path, force)

    def _new_rows(self, X: Any) -> Array:
        """New rows in the prompt's units."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=SPARSE, dtype=np.float64, reset=False)
        return self.scaling_.scaled(_dense(X))

    def _linear(self, X: Any) -> Array:
        """The linear predictor of new rows, (n, K): queries are tokens that prediction heads read.

        Each query is divided by a power of two that brings |w.x| below 1, and what is read is multiplied by it: first
        the power that Cauchy and Schwarz know, then the one that the first reading shows to suffice.
        """
        rows, network = self._new_rows(X), self.network_
        if not network.loss.quadratic:  # a nonlinear network's heads read its mean; those of the linear one read w.x
            network = frozen(LINEAR, "plain", 0, rows.shape[1], dtype=network.dtype)
        columns = []
        for each in self._prompt_weights():
            most = np.linalg.norm(rows, axis=1) * max(float(np.linalg.norm(each)), 1e-300)
            size = most
            for _ in range(2):
                shrink = np.exp2(np.ceil(np.log2(np.maximum(size, 2.0**-60))))
                z = self._read(network, each[None], rows / shrink[:, None])[:, 0] * shrink
                size = np.minimum(most, 1.01 * np.abs(z) + most * 2.0**-16)
            columns.append(z)
        return np.asarray(np.stack(columns, axis=1) * self.scaling_.y_scale + self._offset())

    def _mean(self, rows: Array, w: Array, offset: Array) -> Array:
        """What the network itself predicts, (n, K), with the intercept on a column of ones."""
        rows = np.concatenate((rows, np.ones((len(rows), 1))), axis=1)
        return self._read(self.network_, np.concatenate((w, offset[:, None]), axis=1), rows)

    @torch.no_grad()
    def _read(self, network: Block, w: Array, rows: Array) -> Array:
        """What query tokens read off the state w (K, d): the first layer of the network."""
        at, lean = network.channels, Lean(network)
        x = tensor(rows, network.dtype)
        queries = at.data(x, torch.zeros_like(x), x.new_zeros(len(x), at.classes))
        return np.asarray(lean.predict(at.state(tensor(w, network.dtype)), queries).double().numpy())

    def _prompt_weights(self) -> Array:
        """coef_ in the prompt's units, (K, d)."""
        return np.asarray(np.atleast_2d(self.coef_) * (self.scaling_.x_scale / self.scaling_.y_scale))

    def _offset(self) -> Array:
        """What to add to a prediction of centred rows."""
        return np.atleast_1d(self.intercept_) + np.atleast_2d(self.coef_) @ self.scaling_.x_mean

    def _warn(self, converged: bool, detail: str = "") -> None:
        if not converged:
            warnings.warn(
                f"{type(self).__name__} stopped after {self.n_iter_} steps before reaching tol = {self.tol:g}{detail}; "
                "raise max_iter, raise tol, or scale the data",
                ConvergenceWarning,
                stacklevel=3,
            )

    def plot(self) -> matplotlib.figure.Figure:
        """The prompt's attention per step, the error against depth with its bound, the path of w for two columns."""
        check_is_fitted(self)
        if not hasattr(self, "prompt_"):
            raise ArgumentError("a file does not hold the steps of the run, which the picture shows; fit again")
        return estimator_figure(self)


def too_wide(given: Given) -> str:
    """Why a fit has no file; empty where it has one."""
    width = given.rows.shape[1]
    return "" if width <= LARGEST else f"files are for estimators of up to {LARGEST} columns, got {width}"


def _dense(X: Any) -> Array:
    return np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64)


def _squarable(name: str, largest: Array) -> None:
    """Raise where squares of data leave the range of float64, and with it what is known about their rounding."""
    low, high = SQUARABLE
    for size in largest[(largest != 0) & ~((largest > low) & (largest < high))]:
        bounds = f"outside [{low:.3g}, {high:.3g}]"
        raise ArgumentError(f"the largest entry of {name} is {size:.3g}, {bounds}; scale the data")


def at_least(name: str, value: Any, least: float) -> None:
    """Raise unless a parameter is a finite number >= least."""
    if not is_number(value) or value < least:
        raise ArgumentError(f"{name} must be a number >= {least:g}, got {value!r}")


# -- the picture ---------------------------------------------------------------------------------------------------


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
