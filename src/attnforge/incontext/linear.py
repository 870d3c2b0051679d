"""Least squares and ridge regression in context: the heavy ball on a quadratic, one frozen block.

The penalty of ridge is part of the prompt: d more tokens sqrt(alpha) e_j with label 0. So one network serves linear and
ridge regression, for every alpha.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ..dtypes import Array
from ..errors import ArgumentError
from .blocks import Block, frozen
from .certificate import ConvergenceCertificate, Made, quadratic
from .estimator import InContextEstimator, MultiOutputMixin, RegressorMixin
from .problem import Problem, centred
from .prompt import (
    LARGEST_DOUBLINGS,
    MARGIN,
    Scaling,
    column_scale,
    doublings_for,
    is_singular,
    spectrum,
    step_size,
    tensor,
)
from .solver import Run, contraction, run
from .spectrum import curvature_bound, enclosure

HOPELESS = 2.0**LARGEST_DOUBLINGS


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
        self._path = last.path[:, :1]
        path = last.scaling.original(last.path)
        self.trajectory_ = path[:, 0] if path.shape[1] == 1 else path
        low, high = last.scaling.spectrum
        beyond = f", more than the 2^{LARGEST_DOUBLINGS} of the largest network" if high > low * HOPELESS else ""
        detail = f" (the condition number of the scaled data is about {high / low:.1g}{beyond})"
        self._warn(all(each.run.converged for each in fits) and not (beyond and self.condition is None), detail)
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

    def __init__(self, network: Block, scaling: Scaling, done: Run, path: Array, certificate: ConvergenceCertificate,
                 tokens: Tensor, coef: Array, intercept: Array):  # fmt: skip
        self.tokens, self.path = tokens, path
        self.network, self.scaling, self.run, self.certificate = network, scaling, done, certificate
        self.coef, self.intercept = coef, intercept


def _least_squares(est: LinearRegression, X: Array, Y: Array, weight: Array, alpha: float) -> _Fit:
    data = centred(X, Y, weight, bool(est.fit_intercept))
    rows, labels = data.rows, data.labels
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
    dtype, count = est._torch_dtype(), len(scaled)
    # At the edge of the spectrum the heavy ball overshoots by a factor of its depth: stay away from it.
    high = MARGIN * curvature_bound(scaled, scaled / count, dtype) or 1.0
    low = min(spectrum(_gram(scaled))[0], high)
    doublings = doublings_for(*((1.0, est.condition) if est.condition is not None else (low * (1 - 1e-9), high)))
    if est.condition is None and high > low * HOPELESS:
        # Not all directions can be resolved: take the class that max_iter steps bring to rest, 14 sqrt(condition).
        doublings = max(1, min(doublings, math.floor(2 * math.log2(max(est.max_iter / 14, 2)))))
    step = step_size("heavy ball", doublings, high)
    scaling = Scaling(data.x_mean, x_scale, data.y_mean, y_scale, (low, high), doublings, step)
    network = frozen("linear", "heavy ball", doublings, d, dtype=dtype)
    targets = (labels / y_scale).T[..., None]  # a batch of sequences, one for each target
    at, (x, v) = network.channels, (tensor(each, dtype) for each in (scaled, scaled * (step / count)))
    tokens = at.data(x.expand(len(targets), count, d), v, tensor(targets, dtype))
    rho = contraction("heavy ball", doublings)
    done = run(network, at.state(tensor(np.zeros((len(targets), 1, d)), dtype)), tokens, rho=rho, tol=est.tol,
               max_iter=est.max_iter)  # fmt: skip
    path = done.path()[:, :, 0]
    problem = Problem("linear", scaled, labels / y_scale, np.full(count, 1 / count), np.zeros(d), np.zeros((1, d)),
                      data.rounding(x_scale, y_scale))  # fmt: skip
    coef = scaling.original(path[-1])
    certificate = _certify(problem, path, Made("heavy ball", network.momentum.beta, step, est.dtype, "linear"))
    return _Fit(
        network,
        scaling,
        done,
        path,
        certificate,
        at.sequence(done.state[0], tokens[0]),
        coef,
        data.y_mean - coef @ data.x_mean,
    )


def _gram(rows: Array) -> Array:
    """rows^T rows / n, or the smaller matrix with the same positive eigenvalues."""
    return (rows.T @ rows if rows.shape[0] >= rows.shape[1] else rows @ rows.T) / len(rows)


def _certify(problem: Problem, path: Array, made: Made) -> ConvergenceCertificate:
    """The certificate of the target with the largest bound; path (T + 1, target, d)."""
    lower, upper, error = problem.hessians(np.zeros((1, path.shape[2])), 0.0, problem.free)
    curvature = (enclosure(lower, error)[0], enclosure(upper, error)[1])
    found = []
    for k in range(path.shape[1]):
        own, each = replace(problem, y=problem.y[:, [k]]), path[:, [k]]
        found.append(quadratic(each, own.gradients(each), own.gradient_error(each), curvature, made))
    return max(found, key=lambda certificate: certificate.bound)
