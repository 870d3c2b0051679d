"""Linear models in context: least squares, ridge, lasso and elastic net, on one frozen block each.

The penalty of ridge is part of the prompt, d more tokens sqrt(alpha) e_j with label 0, so one network serves linear and
ridge regression, for every alpha. Lasso and elastic net take proximal gradient steps, the soft threshold by two gates a
coordinate (B1); thresholds, like penalties, are in the prompt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from ..arguments import is_number
from ..dtypes import Array
from ..errors import ArgumentError
from .certificate import ConvergenceCertificate
from .estimator import Given, InContextEstimator, MultiOutputMixin, RegressorMixin, at_least
from .losses import LINEAR
from .problem import StatedProblem, gram, is_singular
from .prompt import LARGEST_DOUBLINGS, Centred, Scaling, centred, column_scale
from .solver import HOPELESS, Solution


class LinearModel(MultiOutputMixin, RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """What linear models share: targets have nothing to do with each other.

    `certificates_` and `scalings_` are those of every target; `certificate_` and `scaling_` those of the one whose
    weights may be furthest off, in the units of the data.
    """

    fit_intercept: bool
    certificates_: tuple[ConvergenceCertificate, ...]
    scalings_: tuple[Scaling, ...]

    @abstractmethod
    def _problems(self, X: Array, Y: Array, weight: Array) -> list[tuple[StatedProblem, Scaling]]:
        """The problems whose targets, one after the other, are the columns of Y."""

    def _doubt(self, fits: list[Solution]) -> tuple[bool, str]:
        """Whether the fits converged, and what to say if they did not."""
        return all(each.converged for each in fits), ""

    def settled(self) -> None:
        super().settled()
        self.certificates_ = tuple(replace(each, remark=self._beyond()) for each in self.certificates_)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Lay the data out as a prompt and apply the network to it until it has converged."""
        self._check_common()
        X, y, weight = self._checked(X, y, sample_weight, multi_output=True, y_numeric=True)
        Y = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
        fits = [self._solved(*stated) for stated in self._problems(X, Y, weight)]
        found = [each.certificate() for each in fits]
        done, certificate = max(zip(fits, found, strict=True), key=_reach)
        if len(fits) > 1:  # every problem has units of its own
            certificate = spoken_for(found, next(i for i, each in enumerate(fits) if each is done))
        self._keep(done, certificate, max(each.steps for each in fits))
        each_target = [pair for pair in zip(fits, found, strict=True) for _ in pair[0].w]
        self.certificates_ = tuple(stated for _, stated in each_target)
        self.scalings_ = tuple(fit.scaling for fit, _ in each_target)
        self._path, self._given = done.trajectory[:, :1], Given.of(X, Y, weight)
        self._weights = np.concatenate([each.w for each in fits])[:, None]
        coef = np.concatenate([each.scaling.original(each.w) for each in fits])
        intercept = np.concatenate([each.scaling.y_mean for each in fits]) - coef @ done.scaling.x_mean
        self.coef_ = coef[0] if np.ndim(y) == 1 else coef
        self.intercept_ = (float(intercept[0]) if np.ndim(y) == 1 else intercept) if self.fit_intercept else 0.0
        self.settled()
        self._warn(*self._doubt(fits))
        return self

    def predict(self, X: Any) -> Array:
        """Predictions for new rows, read by the network's own prediction heads."""
        z = self._linear(X)
        return z[:, 0] if np.ndim(self.coef_) == 1 else z


def spoken_for(each: Sequence[ConvergenceCertificate], at: int) -> ConvergenceCertificate:
    """The certificate of one of several fits that have units of their own, said to be of that one."""
    domain = f"target {at} of {len(each)}, in its own units; certificates_ has one for each target"
    return replace(each[at], domain=domain)


def _reach(pair: tuple[Solution, ConvergenceCertificate]) -> tuple[bool, float]:
    """How far off weights may be in the units of the data; what is only calibrated comes last."""
    fit, found = pair
    return found.kind == "calibrated", found.bound * fit.scaling.y_scale / float(fit.scaling.x_scale.min())


@dataclass(eq=False, repr=False, kw_only=True)
class LinearRegression(LinearModel):
    """Ordinary least squares by in-context gradient descent; the minimum-norm solution where there are many.

    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.5]]), np.array([2.0, 1.0, 3.0, 3.0])
    >>> model = LinearRegression().fit(X, y)
    >>> np.allclose(model.coef_, [1, 2], atol=1e-10), round(float(model.predict([[1.0, 2.0]])[0]), 8)
    (True, 5.0)

    `condition` bounds the condition number of the scaled Gram matrix and thereby fixes the network; by default the
    spectrum is computed and the smallest sufficient power of two taken. `tol` is relative to the weights.
    """

    fit_intercept: bool = True
    max_iter: int = 50_000

    def _alphas(self, targets: int) -> Array:
        return np.zeros(targets)

    def _problems(self, X: Array, Y: Array, weight: Array) -> list[tuple[StatedProblem, Scaling]]:
        """Targets with one penalty are one problem, whose sequences make a batch."""
        alphas, columns = self._alphas(Y.shape[1]), np.arange(Y.shape[1])
        groups = [columns] if len(set(alphas)) == 1 else list(columns[:, None])
        parts = [centred(X, Y[:, group], weight, bool(self.fit_intercept)) for group in groups]
        return [_least_squares(part, float(alphas[group[0]])) for part, group in zip(parts, groups, strict=True)]

    def _doubt(self, fits: list[Solution]) -> tuple[bool, str]:
        low, high = self.scaling_.spectrum
        beyond = f", more than the 2^{LARGEST_DOUBLINGS} of the largest network" if high > low * HOPELESS else ""
        detail = f" (the condition number of the scaled data is about {high / low:.1g}{beyond})"
        return all(each.converged for each in fits) and not (beyond and self.condition is None), detail


@dataclass(eq=False, repr=False, kw_only=True)
class Ridge(LinearRegression):
    """Least squares with the penalty alpha ||w||^2, by in-context gradient descent.

    >>> X, y = np.array([[0.0], [1.0], [2.0]]), np.array([0.0, 1.0, 2.0])
    >>> Ridge(alpha=2.0).fit(X, y).coef_.round(10)
    array([0.5])
    """

    alpha: Any = field(default=1.0, kw_only=False)

    def _alphas(self, targets: int) -> Array:
        one = is_number(self.alpha) or isinstance(self.alpha, float)  # infinities are refused below
        alpha = np.asarray([self.alpha] * targets if one else self.alpha, dtype=np.float64)
        if alpha.shape != (targets,):
            raise ArgumentError(f"alpha must be one number or one for each of {targets} targets, got {self.alpha!r}")
        if not (np.isfinite(alpha) & (alpha >= 0)).all():
            raise ArgumentError(f"alpha must be finite and not negative, got {self.alpha!r}")
        return alpha


@dataclass(eq=False, repr=False, kw_only=True)
class ElasticNet(LinearModel):
    """||y - X w||^2 / (2 n) + alpha l1_ratio ||w||_1 + alpha (1 - l1_ratio) ||w||^2 / 2, by in-context proximal steps.

    >>> X, y = np.eye(4) * 2, np.array([4.0, 0.1, 0.0, -3.0])
    >>> ElasticNet(alpha=0.5, l1_ratio=1.0, fit_intercept=False).fit(X, y).coef_.round(8)
    array([ 1.5,  0. ,  0. , -1. ])

    Thresholds, like penalties, are in the prompt: the network knows neither alpha nor l1_ratio.
    """

    alpha: float = field(default=1.0, kw_only=False)
    l1_ratio: float = 0.5
    fit_intercept: bool = True
    tol: float = 1e-11
    max_iter: int = 50_000

    def _check_common(self) -> None:
        super()._check_common()
        at_least("alpha", self.alpha, 0)
        if not is_number(self.l1_ratio) or not 0 <= self.l1_ratio <= 1:
            raise ArgumentError(f"l1_ratio must be in [0, 1], got {self.l1_ratio!r}")

    def _problems(self, X: Array, Y: Array, weight: Array) -> list[tuple[StatedProblem, Scaling]]:
        data = centred(X, Y, weight / weight.mean(), bool(self.fit_intercept))
        l1, l2 = self.alpha * self.l1_ratio, self.alpha * (1 - self.l1_ratio)
        return [_net(data, k, l1, l2) for k in range(Y.shape[1])]


@dataclass(eq=False, repr=False, kw_only=True)
class Lasso(ElasticNet):
    """||y - X w||^2 / (2 n) + alpha ||w||_1, by in-context proximal gradient steps.

    >>> X, y = np.eye(4) * 2, np.array([4.0, 0.1, 0.0, -3.0])
    >>> Lasso(alpha=0.5, fit_intercept=False).fit(X, y).coef_.round(8)
    array([ 1.5,  0. ,  0. , -1. ])
    """

    l1_ratio: float = field(default=1.0, init=False)


def _least_squares(data: Centred, alpha: float) -> tuple[StatedProblem, Scaling]:
    """||y - X w||^2 + alpha ||w||^2 over the number of rows, all targets side by side."""
    rows, labels = data.rows, data.labels
    n, d = rows.shape
    x_scale = column_scale(rows, alpha / n)
    live = rows.any(axis=0) | (alpha > 0)
    if alpha == 0 and live.any() and (n <= live.sum() or is_singular(gram(rows[:, live] / x_scale[live]))):
        x_scale = column_scale(rows, 0.0, uniform=True)  # one factor for all columns keeps the minimum norm
    x = rows / x_scale
    if alpha > 0:
        x = np.concatenate((x, np.diag(np.sqrt(alpha) / x_scale)))
        labels = np.concatenate((labels, np.zeros((d, labels.shape[1]))))
    y_scale = _label_scale(labels)
    count, targets = labels.shape
    problem = StatedProblem(LINEAR, x, labels / y_scale, np.full(count, 1 / count), np.zeros(d), np.zeros((targets, d)),
                      data.rounding(x_scale, y_scale))  # fmt: skip
    return problem, Scaling(data.x_mean, x_scale, data.y_mean, y_scale)


def _net(data: Centred, k: int, l1: float, l2: float) -> tuple[StatedProblem, Scaling]:
    """||y - X w||^2 / (2 n) + l1 ||w||_1 + l2 ||w||^2 / 2 for target k."""
    x_scale = column_scale(data.rows, l2)
    y = data.labels[:, [k]]
    y_scale = _label_scale(y)
    n, d = data.rows.shape
    # In the prompt's units the objective is divided by y_scale^2, and |w_j| is y_scale/x_scale_j |w'_j|.
    threshold, ridge = l1 / (x_scale * y_scale), l2 / x_scale**2
    # Penalty tokens hold sqrt(ridge)/4 w <= 1/4 by the objective at 0.
    problem = StatedProblem(LINEAR, data.rows / x_scale, y / y_scale, np.full(n, 1 / n), ridge, np.zeros((1, d)),
                      data.rounding(x_scale, y_scale), threshold)  # fmt: skip
    return problem, Scaling(data.x_mean, x_scale, data.y_mean[[k]], y_scale)


def _label_scale(labels: Array) -> float:
    """Twice the largest label: residuals up to twice the labels' size stay where the heads are accurate."""
    return 2 * float(np.abs(labels).max(initial=0.0)) or 1.0
