"""Least squares and ridge regression in context: the heavy ball on a quadratic, one frozen block.

The penalty of ridge is part of the prompt: d more tokens sqrt(alpha) e_j with label 0. So one network serves linear and
ridge regression, for every alpha.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ArgumentError
from ._sklearn import MultiOutputMixin, RegressorMixin
from .base import InContextEstimator
from .blocks import Block, frozen
from .certificate import ConvergenceCertificate, aggregation_error, factors, prediction_error
from .prompt import MARGIN, Array, Scaling, column_scale, is_singular, start, tokens_of, tuned
from .solver import Run, contraction, run, weights

CHUNK = 64  # steps whose predictions are looked at together


class LinearRegression(MultiOutputMixin, RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """Ordinary least squares by in-context gradient descent; the minimum-norm solution where there are many.

    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.5]]), np.array([2.0, 1.0, 3.0, 3.0])
    >>> model = LinearRegression().fit(X, y)
    >>> np.allclose(model.coef_, [1, 2], atol=1e-10), round(float(model.predict([[1.0, 2.0]])[0]), 8)
    (True, 5.0)

    `condition` bounds the condition number of the scaled Gram matrix and thereby fixes the network; by default the
    spectrum is computed and the smallest sufficient power of two taken. `tol` is relative to the weights.
    """

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 50_000,
        condition: float | None = None,
        dtype: str = "float64",
    ):
        self.fit_intercept, self.tol, self.max_iter = fit_intercept, tol, max_iter
        self.condition, self.dtype = condition, dtype

    def _alphas(self, targets: int) -> Array:
        return np.zeros(targets)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LinearRegression:
        """Lay the data out as a prompt and apply the network to it until it has converged."""
        self._check_common()
        X, y, weight = self._checked(X, y, sample_weight, multi_output=True, y_numeric=True)
        Y = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
        alphas = self._alphas(Y.shape[1])
        groups = [np.arange(Y.shape[1])] if len(set(alphas)) == 1 else [np.array([k]) for k in range(Y.shape[1])]
        fits = [_least_squares(self, X, Y[:, group], weight, float(alphas[group[0]])) for group in groups]
        last = max(fits, key=lambda each: each.run.steps)
        coef = np.concatenate([each.coef for each in fits])
        intercept = np.concatenate([each.intercept for each in fits])
        self.coef_ = coef[0] if np.ndim(y) == 1 else coef
        self.intercept_ = (float(intercept[0]) if np.ndim(y) == 1 else intercept) if self.fit_intercept else 0.0
        self.network_, self.scaling_, self.n_iter_ = last.network, last.scaling, last.run.steps
        self.certificate_, self.prompt_ = last.certificate, last.tokens
        path = last.scaling.original(last.run.path())
        self.trajectory_ = path[:, 0] if path.shape[1] == 1 else path
        self._warn(all(each.run.converged for each in fits), f" (condition number {2.0**last.scaling.doublings:.1g})")
        return self

    def predict(self, X: Any) -> Array:
        """Predictions for new rows, read by the network's own prediction heads."""
        z = self._linear(X)
        return z[:, 0] if np.ndim(self.coef_) == 1 else z


class Ridge(LinearRegression):
    """Least squares with the penalty alpha ||w||^2, by in-context gradient descent.

    >>> X, y = np.array([[0.0], [1.0], [2.0]]), np.array([0.0, 1.0, 2.0])
    >>> Ridge(alpha=2.0).fit(X, y).coef_.round(10)
    array([0.5])
    """

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 50_000,
        condition: float | None = None,
        dtype: str = "float64",
    ):
        super().__init__(fit_intercept=fit_intercept, tol=tol, max_iter=max_iter, condition=condition, dtype=dtype)
        self.alpha = alpha

    def _alphas(self, targets: int) -> Array:
        alpha = self.alpha
        if isinstance(alpha, numbers.Real) and not isinstance(alpha, bool):
            alpha = np.full(targets, float(alpha))
        alpha = np.asarray(alpha, dtype=np.float64)
        if alpha.shape != (targets,):
            raise ArgumentError(f"alpha must be one number or one for each of {targets} targets, got {self.alpha!r}")
        if not (np.isfinite(alpha) & (alpha >= 0)).all():
            raise ArgumentError(f"alpha must be finite and not negative, got {self.alpha!r}")
        return alpha


class _Fit:
    """One solved least-squares problem."""

    def __init__(self, network: Block, scaling: Scaling, done: Run, certificate: ConvergenceCertificate,
                 tokens: Tensor, coef: Array, intercept: Array):  # fmt: skip
        self.tokens = tokens
        self.network, self.scaling, self.run, self.certificate = network, scaling, done, certificate
        self.coef, self.intercept = coef, intercept


def centred(X: Array, Y: Array, weight: Array, intercept: bool) -> tuple[Array, Array, Array, Array]:
    """Rows and labels around their weighted means, times sqrt(weight); and the means."""
    if intercept:
        x_mean, y_mean = (np.average(each, axis=0, weights=weight) for each in (X, Y))
    else:
        x_mean, y_mean = np.zeros(X.shape[1]), np.zeros(Y.shape[1])
    root = np.sqrt(weight)[:, None]
    rows, labels = (X - x_mean) * root, (Y - y_mean) * root
    # What is left of a constant column is rounding, and would otherwise be scaled up to a column of noise.
    noise = 8 * np.finfo(float).eps * np.sqrt(len(X)) * np.abs(X).max(axis=0, initial=0.0)
    rows[:, np.linalg.norm(rows, axis=0) <= noise * np.sqrt(weight.max())] = 0.0
    return rows, labels, x_mean, y_mean


def _least_squares(est: LinearRegression, X: Array, Y: Array, weight: Array, alpha: float) -> _Fit:
    rows, labels, x_mean, y_mean = centred(X, Y, weight, est.fit_intercept)
    n, d = rows.shape
    x_scale = column_scale(rows, alpha / n)
    live = rows.any(axis=0) | (alpha > 0)
    if alpha == 0 and live.any() and (n <= live.sum() or is_singular(_gram(rows[:, live] / x_scale[live]))):
        x_scale = column_scale(rows, 0.0, uniform=True)  # one factor for all columns keeps the minimum norm
    scaled = rows / x_scale
    if alpha > 0:
        scaled = np.concatenate((scaled, np.diag(np.sqrt(alpha) / x_scale)))
        labels = np.concatenate((labels, np.zeros((d, labels.shape[1]))))
    y_scale = 2 * float(np.abs(labels).max(initial=0.0)) or 1.0
    scaling = Scaling(x_mean, x_scale, y_mean, y_scale)
    scaling = tuned(scaling, _gram(scaled), "heavy ball", est.condition)
    dtype = est._torch_dtype()
    network = frozen("linear", "heavy ball", scaling.doublings, dtype)
    rho = contraction(network, scaling.doublings)
    values = scaled * (scaling.step / len(scaled))
    tokens = tokens_of(scaled, values, labels / y_scale, dtype)
    state = start(np.zeros((labels.shape[1], d)), dtype)
    done = run(network, state, tokens, rho=rho, tol=est.tol, max_iter=est.max_iter)
    w = weights(network, done.state)
    coef = scaling.original(w)
    certificate = _certify(network, scaling, done, scaled, labels / y_scale, values, rho)
    return _Fit(network, scaling, done, certificate, tokens, coef, y_mean - coef @ x_mean)


def _gram(rows: Array) -> Array:
    """rows^T rows / n, or the smaller matrix with the same positive eigenvalues."""
    return (rows.T @ rows if rows.shape[0] >= rows.shape[1] else rows @ rows.T) / len(rows)


def _certify(
    network: Block, scaling: Scaling, done: Run, rows: Array, labels: Array, values: Array, rho: float
) -> ConvergenceCertificate:
    """Both terms of the bound for the run that was made, with the ranges that were seen on it.

    Where the Gram matrix is singular, or worse conditioned than the network was made for, nothing is certified.
    """
    low, high = scaling.spectrum
    sure = MARGIN * high <= low * 2.0**scaling.doublings and not is_singular(rows.T @ rows)
    path = done.path()
    reach = residual = absolute = 0.0
    for part in np.array_split(path, math.ceil(len(path) / CHUNK)):
        z = np.tensordot(rows, part, axes=(1, 2))  # (n, step, K)
        reach, residual = max(reach, np.abs(z).max()), max(residual, np.abs(z - labels[:, None]).max())
        absolute = max(absolute, np.tensordot(np.abs(rows), np.abs(part), axes=(1, 2)).max())
    n, dtype = len(rows), network.dtype
    each = prediction_error(reach, rows.shape[1], absolute, dtype) + aggregation_error(residual, n, dtype)
    unit = np.finfo(str(dtype).removeprefix("torch.")).eps / 2
    rounding = 8 * unit * float(np.abs(path).max(initial=0.0)) * np.sqrt(rows.shape[1])
    error = each * np.sqrt(n) * float(np.linalg.norm(values)) + rounding
    gradient = rows.T @ (rows @ path[-1].T - labels) / n
    first, left = rows.T @ labels / n, float(np.linalg.norm(gradient, axis=0).max(initial=0.0))
    growth, amplification = factors(network.momentum.kind, rho, done.steps)
    return ConvergenceCertificate(
        kind="certified" if sure else "calibrated",
        rho=rho,
        depth=done.steps,
        distance=float(np.linalg.norm(first, axis=0).max(initial=0.0)) / low,
        step_error=error,
        growth=growth,
        amplification=amplification,
        measured=left / high,
        posterior=left / low,
        dtype=str(dtype).removeprefix("torch."),
        loss=network.loss,
    )
