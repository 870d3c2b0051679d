"""Lasso and elastic net in context: proximal gradient steps, the soft threshold by two gates a coordinate (B1)."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ._sklearn import MultiOutputMixin, RegressorMixin
from .base import InContextEstimator
from .linear import centred
from .prompt import Array, Scaling, column_scale
from .staged import Problem, solve


class ElasticNet(MultiOutputMixin, RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """||y - X w||^2 / (2 n) + alpha l1_ratio ||w||_1 + alpha (1 - l1_ratio) ||w||^2 / 2, by in-context proximal steps.

    >>> X, y = np.eye(4) * 2, np.array([4.0, 0.1, 0.0, -3.0])
    >>> ElasticNet(alpha=0.5, l1_ratio=1.0, fit_intercept=False).fit(X, y).coef_.round(8)
    array([ 1.5,  0. ,  0. , -1. ])

    Thresholds, like penalties, are in the prompt: the network knows neither alpha nor l1_ratio.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        tol: float = 1e-11,
        max_iter: int = 50_000,
        condition: float | None = None,
        dtype: str = "float64",
    ):
        self.alpha, self.l1_ratio, self.fit_intercept = alpha, l1_ratio, fit_intercept
        self.tol, self.max_iter, self.condition, self.dtype = tol, max_iter, condition, dtype

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> ElasticNet:
        """Lay the data out as a prompt and apply the network to it until it has converged."""
        self._check_common()
        if not isinstance(self.alpha, numbers.Real) or not 0 <= self.alpha < np.inf:
            raise ArgumentError(f"alpha must be a number >= 0, got {self.alpha!r}")
        if not isinstance(self.l1_ratio, numbers.Real) or not 0 <= self.l1_ratio <= 1:
            raise ArgumentError(f"l1_ratio must be in [0, 1], got {self.l1_ratio!r}")
        X, y, weight = self._checked(X, y, sample_weight, multi_output=True, y_numeric=True)
        Y = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
        rows, labels, x_mean, y_mean = centred(X, Y, weight / weight.mean(), bool(self.fit_intercept))
        problem, scaling = _problem(rows, labels, self.alpha * self.l1_ratio, self.alpha * (1 - self.l1_ratio))
        scaling = Scaling(x_mean, scaling.x_scale, y_mean, scaling.y_scale)
        done = solve(problem, scaling, tol=self.tol, max_iter=self.max_iter, dtype=self._torch_dtype(),
                     condition=self.condition)  # fmt: skip
        self.network_, self.scaling_, self.certificate_ = done.network, done.scaling, done.certificate
        self.n_iter_, self.prompt_ = done.steps, done.tokens
        coef = scaling.original(done.w)
        intercept = y_mean - coef @ x_mean
        path = scaling.original(done.trajectory)
        self.trajectory_ = path[:, 0] if path.shape[1] == 1 else path
        self.coef_ = coef[0] if np.ndim(y) == 1 else coef
        self.intercept_ = (float(intercept[0]) if np.ndim(y) == 1 else intercept) if self.fit_intercept else 0.0
        self._warn(done.converged)
        return self

    def predict(self, X: Any) -> Array:
        """Predictions for new rows, read by the network's own prediction heads."""
        z = self._linear(X)
        return z[:, 0] if np.ndim(self.coef_) == 1 else z


class Lasso(ElasticNet):
    """||y - X w||^2 / (2 n) + alpha ||w||_1, by in-context proximal gradient steps.

    >>> X, y = np.eye(4) * 2, np.array([4.0, 0.1, 0.0, -3.0])
    >>> Lasso(alpha=0.5, fit_intercept=False).fit(X, y).coef_.round(8)
    array([ 1.5,  0. ,  0. , -1. ])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-11,
        max_iter: int = 50_000,
        condition: float | None = None,
        dtype: str = "float64",
    ):
        self.alpha, self.fit_intercept = alpha, fit_intercept
        self.tol, self.max_iter, self.condition, self.dtype = tol, max_iter, condition, dtype

    l1_ratio = 1.0


def _problem(rows: Array, labels: Array, l1: float, l2: float) -> tuple[Problem, Scaling]:
    n, d = rows.shape
    x_scale = column_scale(rows, l2)
    x = rows / x_scale
    y_scale = 2 * float(np.abs(labels).max(initial=0.0)) or 1.0
    y, weight = labels / y_scale, np.full(n, 1 / n)
    # In the prompt's units the objective is divided by y_scale^2, and |w_j| is y_scale/x_scale_j |w'_j|.
    threshold, ridge = l1 / (x_scale * y_scale), l2 / x_scale**2
    gram = x.T @ x / n + np.diag(ridge)

    def objective(w: Array) -> float:
        smooth = 0.5 * float(((x @ w.T - y) ** 2).sum()) / n + 0.5 * float((ridge * w * w).sum())
        return smooth + float((threshold * np.abs(w)).sum())

    def hessian(w: Array) -> Array:
        """The Gram matrix of the columns in use, between the zeros of the others; its largest eigenvalue is all's."""
        live = (w != 0).any(axis=0) if l1 > 0 else np.ones(d, dtype=bool)
        top = float(np.linalg.eigvalsh(gram)[-1])
        if not live.any():
            return np.diag([0.05 * top, top])
        values = np.linalg.eigvalsh(gram[np.ix_(live, live)])
        return np.diag(np.append(values, top))

    begin = np.zeros((labels.shape[1], d))
    # Penalty tokens hold sqrt(ridge)/4 w <= 1/4 by the objective at 0.
    problem = Problem("linear", x, y, weight, ridge, objective, hessian, begin, threshold=threshold)
    return problem, Scaling(np.zeros(d), x_scale, np.zeros(1), y_scale)
