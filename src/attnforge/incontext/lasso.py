"""Lasso and elastic net in context: proximal gradient steps, the soft threshold by two gates a coordinate (B1)."""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import Any

import numpy as np

from ..dtypes import Array
from ..errors import ArgumentError
from .estimator import InContextEstimator, MultiOutputMixin, RegressorMixin
from .problem import Centred, Problem, centred
from .prompt import AFFINE, STOPPING, Scaling, column_scale
from .solver import Solution, solve
from .spectrum import curvature_bound

LIVE_CURVATURE = "the smallest curvature of the columns in use, which picks the momentum, between stages"


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
        rows = centred(X, Y, weight / weight.mean(), bool(self.fit_intercept))
        fits = [self._solved(rows, k) for k in range(Y.shape[1])]  # targets have nothing to do with each other
        found = [each.certificate() for each in fits]
        self.certificate_ = max(found, key=lambda certificate: certificate.bound)
        done = fits[found.index(self.certificate_)]
        self.network_, self.scaling_ = done.network, done.scaling
        self.n_iter_, self.prompt_ = max(each.steps for each in fits), done.prompt
        coef = np.concatenate([each.scaling.original(each.w) for each in fits])
        intercept = rows.y_mean - coef @ rows.x_mean
        self.trajectory_, self._path = done.scaling.original(done.trajectory)[:, 0], done.trajectory
        self.coef_ = coef[0] if np.ndim(y) == 1 else coef
        self.intercept_ = (float(intercept[0]) if np.ndim(y) == 1 else intercept) if self.fit_intercept else 0.0
        self._warn(all(each.converged for each in fits))
        return self

    def _solved(self, rows: Centred, k: int) -> Solution:
        problem, scaling = _problem(rows, k, self.alpha * self.l1_ratio, self.alpha * (1 - self.l1_ratio))
        dtype = self._torch_dtype()
        root = np.sqrt(problem.weight)[:, None] * problem.x
        full = np.concatenate((root, np.diag(np.sqrt(problem.penalty))))
        done = solve(problem, scaling, tol=self.tol, max_iter=self.max_iter, dtype=dtype, condition=self.condition,
                     top=curvature_bound(full, full, dtype) or 1.0)  # fmt: skip
        return replace(done, scaling=replace(done.scaling, outside=(AFFINE, LIVE_CURVATURE, STOPPING)))

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


def _problem(rows: Centred, k: int, l1: float, l2: float) -> tuple[Problem, Scaling]:
    x_scale = column_scale(rows.rows, l2)
    x, y = rows.rows / x_scale, rows.labels[:, [k]]
    y_scale = 2 * float(np.abs(y).max(initial=0.0)) or 1.0
    n, d = x.shape
    # In the prompt's units the objective is divided by y_scale^2, and |w_j| is y_scale/x_scale_j |w'_j|.
    threshold, ridge = l1 / (x_scale * y_scale), l2 / x_scale**2
    rounding = rows.rounding(x_scale, y_scale)
    # Penalty tokens hold sqrt(ridge)/4 w <= 1/4 by the objective at 0.
    problem = Problem("linear", x, y / y_scale, np.full(n, 1 / n), ridge, np.zeros((1, d)), rounding, threshold)
    return problem, Scaling(rows.x_mean, x_scale, rows.y_mean[[k]], y_scale)
