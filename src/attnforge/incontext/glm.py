"""Poisson and Huber regression in context.

Poisson: exp(w.x) is the attention weight of the state against a heavy sink (`reads.ExpRead`), so the prediction is
exact. Huber: the residual goes through a ramp gate (B2); the scale, which moves the kinks, is refitted from the
residuals between runs, by rescaling the labels: outside attention, as `Scaling.outside` says.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError
from ._sklearn import RegressorMixin
from .base import InContextEstimator
from .prompt import Array, Scaling, column_scale
from .staged import Problem, Solution, solve

SCALE_CHOICE = "the scale of the residuals, refitted between runs"


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
        _check_alpha(self.alpha)
        X, y, weight = self._checked(X, y, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        if (y < 0).any():
            raise ValueError("Some value(s) of y are out of the valid range of the loss 'HalfPoissonLoss'.")
        if not y @ weight > 0:
            raise ArgumentError("all labels y are 0: the Poisson mean has no logarithm; give a positive label")
        problem, scaling = _poisson(X, y, weight / weight.sum(), float(self.alpha), bool(self.fit_intercept))
        done = solve(problem, scaling, tol=self.tol, max_iter=self.max_iter, dtype=self._torch_dtype(),
                     condition=self.condition)  # fmt: skip
        self.network_, self.certificate_, self.n_iter_ = done.network, done.certificate, done.steps
        self.scaling_, self.prompt_ = done.scaling, done.tokens
        d = X.shape[1]
        self.coef_ = (done.w[:, :d] / scaling.x_scale)[0]
        # Labels were divided by y_scale: the logarithm of it comes back here.
        offset = float(done.w[0, d]) + math.log(scaling.y_scale) - float(self.coef_ @ scaling.x_mean)
        self.intercept_ = offset if self.fit_intercept else 0.0
        self.trajectory_ = (done.trajectory[:, :, :d] / scaling.x_scale)[:, 0]
        self._warn(done.converged)
        return self

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D^2, the share of the Poisson deviance that is explained."""
        from sklearn.metrics import d2_tweedie_score

        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))

    @torch.no_grad()
    def predict(self, X: Any) -> Array:
        """exp(w.x + b), read by the network's own prediction head."""
        rows = self._new_rows(X)
        rows = np.concatenate((self.scaling_.scaled(rows), np.ones((len(rows), 1))), axis=1)
        offset = self.intercept_ + float(self.coef_ @ self.scaling_.x_mean) - math.log(self.scaling_.y_scale)
        w = np.append(self.coef_ * self.scaling_.x_scale, offset)[None]
        dtype = self.network_.dtype
        mean = self.network_.read(torch.from_numpy(w).to(dtype), torch.from_numpy(rows).to(dtype)).double().numpy()
        return np.asarray(mean[:, 0] * self.scaling_.y_scale)


class HuberRegressor(RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """Linear regression that is robust to outliers, with its scale: scikit-learn's objective, in context.

    >>> X = np.arange(8.0)[:, None]
    >>> y = 2 * X[:, 0] + np.array([0.1, -0.1, 0.1, -0.1, 0.1, -0.1, 0.1, 50.0])
    >>> model = HuberRegressor().fit(X, y)
    >>> bool(abs(model.coef_[0] - 2) < 0.05), bool(model.outliers_[7])
    (True, True)
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.35,
        alpha: float = 1e-4,
        fit_intercept: bool = True,
        tol: float = 1e-10,
        max_iter: int = 50_000,
        condition: float | None = None,
        dtype: str = "float64",
    ):
        self.epsilon, self.alpha, self.fit_intercept = epsilon, alpha, fit_intercept
        self.tol, self.max_iter, self.condition, self.dtype = tol, max_iter, condition, dtype

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HuberRegressor:
        """Alternate between the network's run at a fixed scale and the scale of its residuals, by secant steps."""
        self._check_common()
        _check_alpha(self.alpha)
        if not isinstance(self.epsilon, numbers.Real) or not float(self.epsilon) >= 1:
            raise ArgumentError(f"epsilon must be a number >= 1, got {self.epsilon!r}")
        X, y, weight = self._checked(X, y, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        fit = _HuberScale(self, X, y, weight)
        done = fit.search()
        scaling = done.scaling
        self.network_, self.scaling_, self.certificate_ = done.network, scaling, done.certificate
        self.n_iter_, self.scale_, self.prompt_ = fit.steps, fit.sigma, done.tokens
        d = X.shape[1]
        self.coef_ = scaling.original(done.w[:, :d])[0]
        offset = float(done.w[0, d]) * scaling.y_scale + float(scaling.y_mean[0]) - float(self.coef_ @ scaling.x_mean)
        self.intercept_ = offset if self.fit_intercept else 0.0
        self.trajectory_ = scaling.original(done.trajectory[:, :, :d])[:, 0]
        residual = np.abs(y - X @ self.coef_ - self.intercept_)
        self.outliers_ = residual > self.scale_ * self.epsilon
        self._warn(done.converged and fit.settled)
        return self

    def predict(self, X: Any) -> Array:
        """Predictions for new rows, read by the network's own prediction heads."""
        return self._linear(X)[:, 0]


def _check_alpha(alpha: object) -> None:
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

    def objective(w: Array) -> float:
        z = x @ w.T
        with np.errstate(over="ignore"):
            return float(weight @ (np.exp(z) - labels * z)[:, 0] + 0.5 * (ridge * w * w).sum())

    def hessian(w: Array) -> Array:
        full = (x * (weight * np.exp(x @ w[0]))[:, None]).T @ x + np.diag(ridge)
        return np.asarray(full if intercept else full[:d, :d])

    fixed = () if intercept else (d,)
    problem = Problem("poisson", x, labels, weight, ridge, objective, hessian, begin, fixed=fixed)
    return problem, Scaling(x_mean, x_scale, np.zeros(1), y_scale)


class _HuberScale:
    """The search for sigma: sigma^2 is the mean of min(|residual|, epsilon sigma)^2 at the optimum for sigma."""

    def __init__(self, est: HuberRegressor, X: Array, y: Array, weight: Array):
        self.est, self.total, self.weight = est, float(weight.sum()), weight / weight.sum()
        self.x, self.x_mean, self.x_scale = with_ones(X, self.weight, 0.0, bool(est.fit_intercept))
        self.y_mean = float(self.weight @ y) if est.fit_intercept else 0.0
        self.y = y - self.y_mean
        self.size = float(np.abs(self.y).max()) or 1.0
        self.w, self.steps, self.sigma, self.settled = np.zeros((1, X.shape[1] + 1)), 0, 0.0, False

    def search(self) -> Solution:
        """Secant steps on log sigma; each evaluation is a run of the network from where the last one ended."""
        tol = max(float(self.est.tol), 1e-13)
        floor = 1e-9 * self.size
        here = math.log(max(float(np.median(np.abs(self.y))), 1e-3 * self.size))
        done, excess = self.at(here, 1e-3)
        before: tuple[float, float] | None = None
        for _ in range(60):
            step = excess
            if before is not None and excess != before[1]:
                secant = -excess * (here - before[0]) / (excess - before[1])
                step = secant if secant * excess > 0 else excess  # the residuals know the direction
            step = max(-4.0, min(4.0, step))
            if abs(step) <= tol or math.exp(here) <= floor:
                self.settled = True
                break
            before, here = (here, excess), here + step
            done, excess = self.at(here, max(tol / 4, min(1e-4, 1e-3 * abs(step))))
            if self.steps >= self.est.max_iter:
                break
        self.sigma = math.exp(here)
        return replace(done, scaling=replace(done.scaling, outside=(*done.scaling.outside, SCALE_CHOICE)))

    def at(self, log_sigma: float, tol: float) -> tuple[Solution, float]:
        """The optimum for a scale, and how much larger, in logarithms, the residuals say the scale should be."""
        est, sigma = self.est, math.exp(log_sigma)
        knee = est.epsilon * sigma
        reach = 2 * max(float(np.abs(self.x @ self.w[0]).max()), min(self.size, 8 * knee))
        edge = 2.0 ** -max(0, math.ceil(math.log2(reach / knee)))
        y_scale = knee / edge  # |w.x| stays below 1 in the prompt, and the ramp's edge is a power of two
        ridge = np.append(est.alpha * sigma / self.total / self.x_scale**2, 0.0)
        problem = self._problem(self.y / y_scale, ridge, edge, self.w / y_scale)
        scaling = Scaling(self.x_mean, self.x_scale, np.array([self.y_mean]), y_scale)
        done = solve(problem, scaling, tol=tol, max_iter=max(1, est.max_iter - self.steps), dtype=est._torch_dtype(),
                     condition=est.condition, warm=self.steps > 0)  # fmt: skip
        self.steps += done.steps
        self.w = done.w * y_scale
        clipped = np.minimum(np.abs(problem.x @ done.w[0] - problem.y[:, 0]), edge)
        squares = float(self.weight @ (clipped * clipped))
        return done, 0.5 * math.log(max(squares, 1e-300) * y_scale**2) - log_sigma

    def _problem(self, y: Array, ridge: Array, edge: float, begin: Array) -> Problem:
        x, weight, labels, d = self.x, self.weight, y[:, None], len(self.x_scale)

        def objective(w: Array) -> float:
            r = np.abs(x @ w.T - labels)
            loss = np.where(r <= edge, 0.5 * r * r, edge * (r - 0.5 * edge))
            return float(weight @ loss[:, 0] + 0.5 * (ridge * w * w).sum())

        def hessian(w: Array) -> Array:
            """Curvatures: of the tokens on the ramp's slope, and the largest one of all tokens."""
            keep = slice(None) if self.est.fit_intercept else slice(d)
            inside = np.abs(x @ w[0] - y) <= edge
            parts = [(x * (weight * mask)[:, None]).T @ x for mask in (inside, np.ones(len(x)))]
            some, most = (np.linalg.eigvalsh(part[keep, keep]) for part in parts)
            live = some[some > 1e-12 * most[-1]]  # other directions are never entered from 0
            return np.diag(np.append(live, most[-1]) + ridge[:d].min())

        fixed = () if self.est.fit_intercept else (d,)
        return Problem("huber", x, labels, weight, ridge, objective, hessian, begin, edge=edge, fixed=fixed)
