"""Huber regression in context: the residual goes through a ramp gate (B2), and attention reads the scale.

scikit-learn's objective sum_i (sigma + H(r_i/sigma) sigma) + alpha ||w||^2 is convex in (w, sigma) together. For a
fixed sigma the block solves for w; its scale heads (even extrapolation, F2) read sum_i weight_i clip(r_i)^2, which is
sigma^2 at the optimum. The labels' unit is chosen so that the kink lies at `EDGE`, for every epsilon and every sigma:
that number is searched for by secant steps between runs, outside attention, as `Scaling.outside` says.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..dtypes import Array
from ..errors import ArgumentError
from .blocks import Lean
from .certificate import GROWN, ConvergenceCertificate
from .estimator import InContextEstimator, RegressorMixin
from .glm import check_alpha, with_ones
from .heads import EDGE
from .problem import Problem, Rounding, U
from .prompt import Scaling, tensor
from .solver import Solution, solve
from .spectrum import enclosure

NOISE = {torch.float64: 1e-13, torch.float32: 3e-5}  # how well the scale heads know the scale, relatively
SCALE_CHOICE = "secant steps on the scale, between runs (attention reads the mean square that decides them)"


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
        check_alpha(self.alpha)
        if not isinstance(self.epsilon, numbers.Real) or not float(self.epsilon) >= 1:
            raise ArgumentError(f"epsilon must be a number >= 1, got {self.epsilon!r}")
        X, y, weight = self._checked(X, y, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        fit = _Scale(self, X, y, weight)
        done = fit.search()
        scaling = done.scaling
        self.network_, self.scaling_ = done.network, scaling
        self.certificate_ = with_scale(done.problem, done.w, float(self.epsilon), done.certificate())
        self.n_iter_, self.scale_, self.prompt_ = fit.steps, fit.sigma, done.prompt
        d = X.shape[1]
        self.coef_ = scaling.original(done.w[:, :d])[0]
        offset = float(done.w[0, d]) * scaling.y_scale + float(scaling.y_mean[0]) - float(self.coef_ @ scaling.x_mean)
        self.intercept_ = offset if self.fit_intercept else 0.0
        self._path = done.trajectory
        self.trajectory_ = scaling.original(done.trajectory[:, :, :d])[:, 0]
        residual = np.abs(y - X @ self.coef_ - self.intercept_)
        self.outliers_ = residual > self.scale_ * self.epsilon
        self._warn(done.converged and fit.settled)
        return self

    def predict(self, X: Any) -> Array:
        """Predictions for new rows, read by the network's own prediction heads."""
        return self._linear(X)[:, 0]


class _Scale:
    """The search for sigma: sigma^2 is the mean of min(|residual|, epsilon sigma)^2 at the optimum for sigma."""

    def __init__(self, est: HuberRegressor, X: Array, y: Array, weight: Array):
        self.est, self.total, self.weight = est, float(weight.sum()), weight / weight.sum()
        self.x, self.x_mean, self.x_scale = with_ones(X, self.weight, 0.0, bool(est.fit_intercept))
        self.y_mean = float(self.weight @ y) if est.fit_intercept else 0.0
        self.y = y - self.y_mean
        self.size = float(np.abs(self.y).max()) or 1.0
        self.w, self.steps, self.sigma, self.settled = np.zeros((1, X.shape[1] + 1)), 0, 0.0, False
        self.paths: list[Array] = []

    def search(self) -> Solution:
        """Secant steps on log sigma; each evaluation is a run of the network from where the last one ended."""
        noise = NOISE[self.est._torch_dtype()]
        tol = max(float(self.est.tol), noise)
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
            if abs(step) <= tol or abs(excess) <= 0.1 * noise or math.exp(here) <= floor:
                self.settled = True
                break
            before, here = (here, excess), here + step
            done, excess = self.at(here, max(tol / 4, min(1e-4, 1e-3 * abs(step))))
            if self.steps >= self.est.max_iter:
                break
        self.sigma = math.exp(here)
        scaling = replace(done.scaling, outside=(*done.scaling.outside, SCALE_CHOICE))
        trajectory = np.concatenate(self.paths) / scaling.y_scale  # of all runs, in the last one's units
        return replace(done, scaling=scaling, trajectory=trajectory)

    def _ridge(self) -> Array:
        """The penalty of the joint problem in (w, sigma)."""
        return np.append(self.est.alpha / self.total / self.x_scale**2, 0.0)

    def at(self, log_sigma: float, tol: float) -> tuple[Solution, float]:
        """The optimum for a scale, and how much larger, in logarithms, the residuals say the scale should be."""
        est, sigma = self.est, math.exp(log_sigma)
        y_scale = est.epsilon * sigma / EDGE
        fixed = () if est.fit_intercept else (len(self.x_scale),)
        rounding = Rounding(8 * U, np.zeros(len(self.x_scale) + 1), 4 * U * self.size / y_scale, (len(self.x) + 4) * U)
        problem = Problem("huber", self.x, self.y[:, None] / y_scale, self.weight, sigma * self._ridge(),
                          self.w / y_scale, rounding, fixed=fixed)  # fmt: skip
        scaling = Scaling(self.x_mean, self.x_scale, np.array([self.y_mean]), y_scale)
        done = solve(problem, scaling, tol=tol, max_iter=max(1, est.max_iter - self.steps), dtype=est._torch_dtype(),
                     condition=est.condition, warm=self.steps > 0)  # fmt: skip
        self.steps += done.steps
        self.w = done.w * y_scale
        self.paths.append((done.trajectory if not self.paths else done.trajectory[1:]) * y_scale)
        squares = _mean_square(done)
        return done, 0.5 * math.log(max(squares, 1e-300) * y_scale**2) - log_sigma


@torch.no_grad()
def _mean_square(done: Solution) -> float:
    """sum_i weight_i clip(r_i)^2 at the end of a run, read by the network's scale heads."""
    state = done.network.channels.state(tensor(done.w, done.network.dtype))
    return float(Lean(done.network).mean_square(state, done.tokens.clone()))


def with_scale(problem: Problem, w: Array, epsilon: float, fixed: ConvergenceCertificate) -> ConvergenceCertificate:
    """The certificate of a run at a fixed scale, with what the scale itself can be off (lemma F4d).

    In the prompt's units the scale is tau = EDGE/epsilon. On the samples that stay on the slope within a ball the joint
    Hessian is sum_i weight_i u_i u_i^T / tau, u_i = (x_i, -r_i/tau).
    """
    tau, x, r = EDGE / epsilon, problem.x[:, problem.free], (problem.x @ w.T - problem.y)[:, 0]
    off = problem.residual_error(w[None])[0][:, 0] + 8 * U * np.abs(r)
    error = problem.gradient_error(w[None])
    g = (np.abs(problem.gradients(w[None])[0]) + error)[0, problem.free] / tau
    clipped = np.clip(r, -EDGE, EDGE) / tau
    own = 0.5 * abs(1 - float(problem.weight @ clipped**2))
    own += epsilon * float(problem.weight @ off) / tau + (len(x) + 16) * U * epsilon**2
    residual = math.hypot(float(np.linalg.norm(g)), own) * GROWN
    rows = np.concatenate((x, -r[:, None] / tau), axis=1)
    mu, ball = 0.0, 4 * residual
    for _ in range(8):
        if not ball < tau / 2:
            break
        # of r_i/tau, anywhere on the ball
        moved = ball * np.linalg.norm(rows, axis=1) * GROWN / (tau - ball) + off / tau
        sure = np.abs(r) / tau + moved < epsilon * (1 - 8 * U)
        kept = rows[sure] * np.sqrt(problem.weight[sure])[:, None]
        low = enclosure(kept.T @ kept, (len(x) + 24) * U * float((kept * kept).sum()))[0]
        shift = float(np.sqrt(problem.weight[sure] @ moved[sure] ** 2)) * GROWN
        mu = max(0.0, math.sqrt(max(low, 0.0)) / GROWN - shift) ** 2 / (tau + ball) / GROWN
        if not mu > 0 or residual / mu <= ball:
            break
        ball = 2 * residual / mu
    joint = residual / mu * GROWN if mu > 0 else math.inf
    if fixed.kind == "certified" and not (mu > 0 and joint <= ball < tau / 2):
        reason = "the joint curvature of weights and scale could not be bounded from below near the end"
        return replace(fixed, kind="calibrated", reason=reason)
    return replace(fixed, aside=joint + fixed.posterior, posterior=joint) if fixed.kind == "certified" else fixed
