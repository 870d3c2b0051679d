"""Poisson regression in context: exp(w.x) is the attention weight of the state against a heavy sink, exactly."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ..dtypes import Array
from ..errors import ArgumentError
from .estimator import InContextEstimator, RegressorMixin
from .problem import Problem, Rounding, U
from .prompt import Scaling, column_scale
from .solver import solve


class PoissonRegressor(RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """Poisson regression with a log link: mean half deviance + alpha ||w||^2 / 2, by in-context gradient descent.

    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([1.0, 3.0, 7.0, 20.0])
    >>> PoissonRegressor(alpha=0.0).fit(X, y).coef_.round(4)
    array([0.9859])
    """

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        fit_intercept: bool = True,
        tol: float = 1e-11,
        max_iter: int = 20_000,
        condition: float | None = None,
        dtype: str = "float64",
    ):
        self.alpha, self.fit_intercept, self.tol = alpha, fit_intercept, tol
        self.max_iter, self.condition, self.dtype = max_iter, condition, dtype

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PoissonRegressor:
        """Lay the data out as a prompt and apply the network to it until it has converged."""
        self._check_common()
        check_alpha(self.alpha)
        X, y, weight = self._checked(X, y, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        if (y < 0).any():
            raise ValueError("Some value(s) of y are out of the valid range of the loss 'HalfPoissonLoss'.")
        if not y @ weight > 0:
            raise ArgumentError("all labels y are 0: the Poisson mean has no logarithm; give a positive label")
        problem, scaling = _poisson(X, y, weight / weight.sum(), float(self.alpha), bool(self.fit_intercept))
        done = solve(problem, scaling, tol=self.tol, max_iter=self.max_iter, dtype=self._torch_dtype(),
                     condition=self.condition)  # fmt: skip
        self.network_, self.certificate_, self.n_iter_ = done.network, done.certificate(), done.steps
        self.scaling_, self.prompt_ = done.scaling, done.prompt
        d = X.shape[1]
        self.coef_ = (done.w[:, :d] / scaling.x_scale)[0]
        # Labels were divided by y_scale: the logarithm of it comes back here.
        offset = float(done.w[0, d]) + math.log(scaling.y_scale) - float(self.coef_ @ scaling.x_mean)
        self.intercept_ = offset if self.fit_intercept else 0.0
        self._path = done.trajectory
        self.trajectory_ = (done.trajectory[:, :, :d] / scaling.x_scale)[:, 0]
        self._warn(done.converged)
        return self

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D^2, the share of the Poisson deviance that is explained."""
        from sklearn.metrics import d2_tweedie_score

        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))

    def predict(self, X: Any) -> Array:
        """exp(w.x + b), read by the network's own prediction head."""
        rows = self._new_rows(X)
        rows = np.concatenate((self.scaling_.scaled(rows), np.ones((len(rows), 1))), axis=1)
        offset = self.intercept_ + float(self.coef_ @ self.scaling_.x_mean) - math.log(self.scaling_.y_scale)
        w = np.append(self.coef_ * self.scaling_.x_scale, offset)[None]
        mean = self._read(self.network_, w, rows)
        return np.asarray(mean[:, 0] * self.scaling_.y_scale)


def check_alpha(alpha: object) -> None:
    if not isinstance(alpha, numbers.Real) or not 0 <= float(alpha) < np.inf:
        raise ArgumentError(f"alpha must be a number >= 0, got {alpha!r}")


def with_ones(X: Array, weight: Array, penalty: float, intercept: bool) -> tuple[Array, Array, Array]:
    """Centred and scaled columns with a column of ones behind; the means; the scales."""
    x_mean = np.average(X, axis=0, weights=weight) if intercept else np.zeros(X.shape[1])
    rows = X - x_mean
    rows[:, np.abs(rows).max(axis=0) <= 64 * np.finfo(float).eps * np.abs(X).max(axis=0)] = 0.0
    uniform = len(X) <= X.shape[1]  # then w stays in the span of the rows, where curvature is
    x_scale = column_scale(rows * np.sqrt(len(X) * weight)[:, None], penalty, uniform)
    return np.concatenate((rows / x_scale, np.ones((len(X), 1))), axis=1), x_mean, x_scale


def _poisson(X: Array, y: Array, weight: Array, alpha: float, intercept: bool) -> tuple[Problem, Scaling]:
    y_scale, mean, d = float(y.max()), float(y @ weight), X.shape[1]
    x, x_mean, x_scale = with_ones(X, weight, alpha / mean, intercept)
    ridge = np.append(alpha / (x_scale**2 * y_scale), 0.0)
    labels = (y / y_scale)[:, None]
    begin = np.zeros((1, d + 1))
    begin[0, d] = math.log(mean / y_scale) if intercept else -math.log(y_scale)

    rounding = Rounding(8 * U, np.zeros(d + 1), weight=(len(x) + 4) * U)
    fixed = () if intercept else (d,)
    problem = Problem("poisson", x, labels, weight, ridge, begin, rounding, fixed=fixed)
    return problem, Scaling(x_mean, x_scale, np.zeros(1), y_scale)
