"""Generalised linear models in context: logistic, Poisson and Huber regression, each by the loss of its block.

*Logistic.* The prediction head is exact: attention to {state, sink} is a sigmoid (F1), and attention to the state
tokens of all classes is their softmax. *Poisson.* exp(w.x) is the attention weight of the state against a heavy sink.

*Huber.* The residual goes through a ramp gate (B2), and attention reads the scale. scikit-learn's objective
sum_i (sigma + H(r_i/sigma) sigma) + alpha ||w||^2 is convex in (w, sigma) together. For a fixed sigma the block solves
for w; its scale heads (even extrapolation, F2) read sum_i weight_i clip(r_i)^2, which is sigma^2 at the optimum. The
labels' unit is chosen so that the kink lies at `EDGE`, for every epsilon and every sigma: that number is searched for
by secant steps between runs, outside attention, as `Scaling.outside` says.

The last column of x is 1 and carries the intercept; where none is fitted it stays where it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..arguments import is_number
from ..dtypes import Array
from ..errors import ArgumentError
from .blocks import Lean
from .certificate import with_scale
from .estimator import (
    ClassifierMixin,
    Given,
    InContextEstimator,
    RegressorMixin,
    at_least,
    check_classification_targets,
)
from .losses import EDGE, HUBER, LOGISTIC, POISSON, SOFTMAX, Loss, U
from .problem import Rounding, StatedProblem
from .prompt import Scaling, tensor, with_ones
from .solver import Solution

FUTILE = 500  # steps towards an optimum that is not there: enough to see the weights grow
# How well the scale heads know the scale, relatively: the rounding of their table, amplified by its weights.
NOISE = {torch.float64: 1e-13, torch.float32: 3e-5}
SECANTS = 60  # steps on the scale: a bound against going round in circles, far above what a search takes
SCALE_CHOICE = "secant steps on the scale, between runs (attention reads the mean square that decides them)"


def _stated(
    loss: Loss, x: Array, y: Array, weight: Array, ridge: Array, start: Array, intercept: bool, labels: float = 0.0
) -> StatedProblem:
    """The problem of rows with a column of ones behind; `ridge` is the penalty of the others, `labels` their error."""
    n, width = x.shape
    rounding = Rounding(8 * U, np.zeros(width), labels, (n + 4) * U)
    fixed = () if intercept else (width - 1,)
    return StatedProblem(loss, x, y, weight, np.append(ridge, 0.0), start, rounding, fixed=fixed)


@dataclass(eq=False, repr=False, kw_only=True)
class LogisticRegression(ClassifierMixin, InContextEstimator):  # type: ignore[misc]
    """Logistic regression with the penalty ||w||^2 / (2 C); two classes by a sigmoid, more by a softmax.

    >>> X, y = np.array([[-2.0], [-1.0], [0.5], [1.0], [2.0]]), np.array([0, 0, 1, 0, 1])
    >>> model = LogisticRegression().fit(X, y)
    >>> model.predict([[-3.0], [3.0]]), model.predict_proba([[0.0]]).shape
    (array([0, 1]), (1, 2))

    `C=np.inf` fits without a penalty; where the classes are separable the weights then grow until `max_iter`, with a
    warning. `class_weight` is a dict, "balanced" or None.
    """

    C: float = field(default=1.0, kw_only=False)
    fit_intercept: bool = True
    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LogisticRegression:
        """Lay the data out as a prompt and apply the network to it until it has converged."""
        self._check_common()
        if np.inf != self.C and not (is_number(self.C) and self.C > 0):
            raise ArgumentError(f"C must be a positive number, got {self.C!r}")
        X, y, weight = self._checked(X, y, sample_weight)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"This solver needs samples of at least 2 classes in the data, but the data contains only one class: "
                f"{self.classes_[0]!r}"
            )
        weight = weight * self._class_weights(y)[index]
        total = weight.sum()
        # Where a class has no weight the likelihood has no maximum: its intercept would grow until max_iter.
        empty = bool((np.bincount(index, weights=weight, minlength=len(self.classes_)) == 0).any())
        limit = min(self.max_iter, FUTILE) if empty and self.fit_intercept else self.max_iter
        done = self._solved(*self._problem(X, index, weight / total, 1 / (self.C * total)), max_iter=limit)
        self._keep(done, done.certificate(), done.steps, Given.of(X, np.asarray(index, dtype=np.float64), weight))
        d = X.shape[1]
        self.coef_ = self._units(done.w[:, :d])
        offset = done.w[:, d] if self.fit_intercept else np.zeros(len(done.w))
        self.intercept_ = offset - self.coef_ @ done.scaling.x_mean
        unpenalised = " (are the classes separable, without a penalty?)" if np.isinf(self.C) else ""
        doubt = " (a class has no sample weight, so its intercept has no optimum)" if empty else unpenalised
        self._warn(done.converged, doubt)
        return self

    def _problem(self, X: Array, index: Any, weight: Array, penalty: float) -> tuple[StatedProblem, Scaling]:
        """Two classes have one state token and a sigmoid, more of them one each and a softmax."""
        # Curvatures are weight_i p (1 - p) <= weight_i / 4: scaled, the diagonal of the first Hessian is about 1/4.
        x, x_mean, x_scale = with_ones(X, weight, 4 * penalty, self.fit_intercept, minimal=False)
        classes = len(self.classes_)
        loss, y = (LOGISTIC, index[:, None].astype(np.float64)) if classes == 2 else (SOFTMAX, np.eye(classes)[index])
        start = np.zeros((y.shape[1], x.shape[1]))
        problem = _stated(loss, x, y, weight, penalty / x_scale**2, start, self.fit_intercept)
        return problem, Scaling(x_mean, x_scale, np.zeros(1), 1.0)

    def _class_weights(self, y: Array) -> Array:
        from sklearn.utils.class_weight import compute_class_weight

        return np.asarray(compute_class_weight(self.class_weight, classes=self.classes_, y=y), dtype=np.float64)

    def decision_function(self, X: Any) -> Array:
        """w.x + b for each row, and for each class where there are more than two."""
        z = self._linear(X)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities, read by the network's own exact prediction heads."""
        p = self._mean(self._new_rows(X), self._prompt_weights(), self._offset())
        return np.concatenate((1 - p, p), axis=1) if p.shape[1] == 1 else np.asarray(p)

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the class probabilities."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

    def predict(self, X: Any) -> Array:
        """The likeliest class of each row."""
        scores = self.decision_function(X)
        index = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[index])


@dataclass(eq=False, repr=False, kw_only=True)
class PoissonRegressor(RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """Poisson regression with a log link: mean half deviance + alpha ||w||^2 / 2, by in-context gradient descent.

    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([1.0, 3.0, 7.0, 20.0])
    >>> PoissonRegressor(alpha=0.0).fit(X, y).coef_.round(4)
    array([0.9859])
    """

    alpha: float = 1.0
    fit_intercept: bool = True
    tol: float = 1e-11

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PoissonRegressor:
        """Lay the data out as a prompt and apply the network to it until it has converged."""
        self._check_common()
        at_least("alpha", self.alpha, 0)
        X, y, weight = self._checked(X, y, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        if (y < 0).any():
            raise ValueError("Some value(s) of y are out of the valid range of the loss 'HalfPoissonLoss'.")
        if not y @ weight > 0:
            raise ArgumentError("all labels y are 0: the Poisson mean has no logarithm; give a positive label")
        done = self._solved(*self._problem(X, y, weight / weight.sum()))
        self._keep(done, done.certificate(), done.steps, Given.of(X, y, weight))
        d, scaling = X.shape[1], done.scaling
        self.coef_ = self._units(done.w[:, :d])[0]
        # Labels were divided by y_scale: the logarithm of it comes back here.
        offset = float(done.w[0, d]) + math.log(scaling.y_scale) - float(self.coef_ @ scaling.x_mean)
        self.intercept_ = offset if self.fit_intercept else 0.0
        self._warn(done.converged)
        return self

    def _problem(self, X: Array, y: Array, weight: Array) -> tuple[StatedProblem, Scaling]:
        y_scale, mean, d = float(y.max()), float(y @ weight), X.shape[1]
        x, x_mean, x_scale = with_ones(X, weight, self.alpha / mean, self.fit_intercept)
        start = np.zeros((1, d + 1))
        start[0, d] = math.log(mean / y_scale) if self.fit_intercept else -math.log(y_scale)
        ridge = self.alpha / (x_scale**2 * y_scale)
        problem = _stated(POISSON, x, (y / y_scale)[:, None], weight, ridge, start, self.fit_intercept)
        return problem, Scaling(x_mean, x_scale, np.zeros(1), y_scale)

    def _units(self, w: Array) -> Array:
        """The unit of labels is a shift of the intercept, not a factor of the weights."""
        return np.asarray(w / self.scaling_.x_scale)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D^2, the share of the Poisson deviance that is explained."""
        from sklearn.metrics import d2_tweedie_score

        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))

    def predict(self, X: Any) -> Array:
        """exp(w.x + b), read by the network's own prediction head."""
        rows, scaling = self._new_rows(X), self.scaling_
        offset = self.intercept_ + float(self.coef_ @ scaling.x_mean) - math.log(scaling.y_scale)
        mean = self._mean(rows, (self.coef_ * scaling.x_scale)[None], np.array([offset]))
        return np.asarray(mean[:, 0] * scaling.y_scale)


@dataclass(eq=False, repr=False, kw_only=True)
class HuberRegressor(RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """Linear regression that is robust to outliers, with its scale: scikit-learn's objective, in context.

    >>> X = np.arange(8.0)[:, None]
    >>> y = 2 * X[:, 0] + np.array([0.1, -0.1, 0.1, -0.1, 0.1, -0.1, 0.1, 50.0])
    >>> model = HuberRegressor().fit(X, y)
    >>> bool(abs(model.coef_[0] - 2) < 0.05), bool(model.outliers_[7])
    (True, True)
    """

    epsilon: float = 1.35
    alpha: float = 1e-4
    fit_intercept: bool = True
    tol: float = 1e-10
    max_iter: int = 50_000

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HuberRegressor:
        """Alternate between the network's run at a fixed scale and the scale of its residuals, by secant steps."""
        self._check_common()
        at_least("alpha", self.alpha, 0)
        at_least("epsilon", self.epsilon, 1)
        X, y, weight = self._checked(X, y, sample_weight, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        fit = _Scale(self, X, y, weight)
        done = fit.search()
        scaling = done.scaling
        found = with_scale(done.problem, done.w, float(self.epsilon), done.certificate())
        self._keep(done, found, fit.steps, Given.of(X, y, weight))
        self.scale_, d = fit.sigma, X.shape[1]
        self.coef_ = self._units(done.w[:, :d])[0]
        offset = float(done.w[0, d]) * scaling.y_scale + float(scaling.y_mean[0]) - float(self.coef_ @ scaling.x_mean)
        self.intercept_ = offset if self.fit_intercept else 0.0
        self.outliers_ = self.far(X, y)
        self._warn(done.converged and fit.settled)
        return self

    def far(self, X: Array, y: Array) -> Array:
        """Which rows lie beyond the kink."""
        return np.asarray(np.abs(y - X @ self.coef_ - self.intercept_) > self.scale_ * self.epsilon)

    def predict(self, X: Any) -> Array:
        """Predictions for new rows, read by the network's own prediction heads."""
        return self._linear(X)[:, 0]


class _Scale:
    """The search for sigma: sigma^2 is the mean of min(|residual|, epsilon sigma)^2 at the optimum for sigma."""

    def __init__(self, est: HuberRegressor, X: Array, y: Array, weight: Array):
        self.est, self.total, self.weight = est, float(weight.sum()), weight / weight.sum()
        self.x, self.x_mean, self.x_scale = with_ones(X, self.weight, 0.0, est.fit_intercept)
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
        for _ in range(SECANTS):
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

    def at(self, log_sigma: float, tol: float) -> tuple[Solution, float]:
        """The optimum for a scale, and how much larger, in logarithms, the residuals say the scale should be."""
        est, sigma = self.est, math.exp(log_sigma)
        y_scale = est.epsilon * sigma / EDGE
        ridge = sigma * (est.alpha / self.total / self.x_scale**2)  # of the joint problem in (w, sigma)
        problem = _stated(HUBER, self.x, self.y[:, None] / y_scale, self.weight, ridge, self.w / y_scale,
                          est.fit_intercept, 4 * U * self.size / y_scale)  # fmt: skip
        scaling = Scaling(self.x_mean, self.x_scale, np.array([self.y_mean]), y_scale)
        done = est._solved(problem, scaling, tol=tol, max_iter=max(1, est.max_iter - self.steps), warm=self.steps > 0)
        self.steps += done.steps
        self.w = done.w * y_scale
        self.paths.append((done.trajectory if not self.paths else done.trajectory[1:]) * y_scale)
        squares = _mean_square(done)
        return done, 0.5 * math.log(max(squares, 1e-300)) + math.log(y_scale) - log_sigma


@torch.no_grad()
def _mean_square(done: Solution) -> float:
    """sum_i weight_i clip(r_i)^2 at the end of a run, read by the network's scale heads."""
    state = done.network.channels.state(tensor(done.w, done.network.dtype))
    return float(Lean(done.network).mean_square(state, done.tokens.clone()))
