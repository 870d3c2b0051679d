"""Logistic regression in context. The prediction head is exact: attention to {state, sink} is a sigmoid (F1), and
attention to the state tokens of all classes is their softmax."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ..dtypes import Array
from ..errors import ArgumentError
from .blocks import Loss
from .estimator import ClassifierMixin, InContextEstimator, check_classification_targets
from .problem import Problem, Rounding, U
from .prompt import Scaling, column_scale
from .solver import solve

HOPELESS = 500  # steps towards an optimum that is not there


class LogisticRegression(ClassifierMixin, InContextEstimator):  # type: ignore[misc]
    """Logistic regression with the penalty ||w||^2 / (2 C); two classes by a sigmoid, more by a softmax.

    >>> X, y = np.array([[-2.0], [-1.0], [0.5], [1.0], [2.0]]), np.array([0, 0, 1, 0, 1])
    >>> model = LogisticRegression().fit(X, y)
    >>> model.predict([[-3.0], [3.0]]), model.predict_proba([[0.0]]).shape
    (array([0, 1]), (1, 2))

    `C=np.inf` fits without a penalty; where the classes are separable the weights then grow until `max_iter`, with a
    warning. `class_weight` is a dict, "balanced" or None.
    """

    classes_: Any

    def __init__(
        self,
        C: float = 1.0,
        *,
        fit_intercept: bool = True,
        class_weight: Any = None,
        tol: float = 1e-12,
        max_iter: int = 20_000,
        condition: float | None = None,
        dtype: str = "float64",
    ):
        self.C, self.fit_intercept, self.class_weight = C, fit_intercept, class_weight
        self.tol, self.max_iter, self.condition, self.dtype = tol, max_iter, condition, dtype

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LogisticRegression:
        """Lay the data out as a prompt and apply the network to it until it has converged."""
        self._check_common()
        if not isinstance(self.C, numbers.Real) or not self.C > 0:
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
        limit = min(self.max_iter, HOPELESS) if empty and self.fit_intercept else self.max_iter
        problem, scaling = _problem(self, X, index, len(self.classes_), weight / total, 1 / (self.C * total))
        done = solve(problem, scaling, tol=self.tol, max_iter=limit, dtype=self._torch_dtype(),
                     condition=self.condition)  # fmt: skip
        self.network_, self.scaling_, self.certificate_ = done.network, done.scaling, done.certificate()
        self.n_iter_, self.prompt_ = done.steps, done.prompt
        d = X.shape[1]
        self.coef_ = scaling.original(done.w[:, :d])
        offset = done.w[:, d] if self.fit_intercept else np.zeros(len(done.w))
        self.intercept_ = offset - self.coef_ @ scaling.x_mean
        self._path = done.trajectory
        path = scaling.original(done.trajectory[:, :, :d])
        self.trajectory_ = path[:, 0] if path.shape[1] == 1 else path
        self._warn(done.converged, _doubt(empty, bool(np.isinf(self.C))))
        return self

    def _class_weights(self, y: Array) -> Array:
        from sklearn.utils.class_weight import compute_class_weight

        return np.asarray(compute_class_weight(self.class_weight, classes=self.classes_, y=y), dtype=np.float64)

    def decision_function(self, X: Any) -> Array:
        """w.x + b for each row, and for each class where there are more than two."""
        z = self._linear(X)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities, read by the network's own exact prediction heads."""
        rows = self._new_rows(X)
        rows = np.concatenate((self.scaling_.scaled(rows), np.ones((len(rows), 1))), axis=1)
        w = np.concatenate((self._prompt_weights(), self._offset()[:, None]), axis=1)
        p = self._read(self.network_, w, rows)
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


def _doubt(empty: bool, unpenalised: bool) -> str:
    """Why there may be no optimum to converge to."""
    if empty:
        return " (a class has no sample weight, so its intercept has no optimum)"
    return " (are the classes separable, without a penalty?)" if unpenalised else ""


def _problem(
    est: LogisticRegression, X: Array, index: Array, classes: int, weight: Array, penalty: float
) -> tuple[Problem, Scaling]:
    x_mean = np.average(X, axis=0, weights=weight) if est.fit_intercept else np.zeros(X.shape[1])
    centred = X - x_mean
    centred[:, np.abs(centred).max(axis=0) <= 64 * np.finfo(float).eps * np.abs(X).max(axis=0)] = 0.0
    n, d = X.shape
    # Curvatures are weight_i p (1 - p) <= weight_i / 4; the scale makes the diagonal of the first Hessian 1/4 or so.
    x_scale = column_scale(centred * np.sqrt(n * weight)[:, None], 4 * penalty)
    x = np.concatenate((centred / x_scale, np.ones((n, 1))), axis=1)
    ridge = np.append(penalty / x_scale**2, 0.0)
    binary = classes == 2
    y = index[:, None].astype(np.float64) if binary else np.eye(classes)[index]
    scaling = Scaling(x_mean, x_scale, np.zeros(1), 1.0)

    rounding = Rounding(8 * U, np.zeros(d + 1), weight=(n + 4) * U)
    fixed = () if est.fit_intercept else (d,)
    begin = np.zeros((1 if binary else classes, d + 1))
    loss: Loss = "logistic" if binary else "softmax"
    return Problem(loss, x, y, weight, ridge, begin, rounding, fixed=fixed), scaling
