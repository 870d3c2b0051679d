"""scikit-learn, imported when an estimator is first asked for.

What all in-context estimators share: checks, the call of the network, read-outs, warnings.
"""

from __future__ import annotations

import math
import numbers
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..dtypes import Array
from ..errors import ArgumentError, MissingExtra
from .blocks import Block, Lean, frozen
from .certificate import ConvergenceCertificate
from .prompt import Scaling, tensor

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", "sklearn") from error

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "ConvergenceWarning",
    "MultiOutputMixin",
    "RegressorMixin",
    "_check_sample_weight",
    "check_classification_targets",
    "check_is_fitted",
    "validate_data",
]


if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = {"float64": torch.float64, "float32": torch.float32}


class InContextEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators: an estimator lays data out as a prompt and lets a frozen network work on it.

    After `fit`: `network_` (the block that was applied `n_iter_` times), `scaling_` (all that was done outside of it),
    `trajectory_` (the weights after every application), `prompt_` (the sequence of tokens at the end: state first, then
    data; of the first target where there are several), `certificate_`."""

    network_: Any
    scaling_: Scaling
    certificate_: ConvergenceCertificate
    trajectory_: Array
    _path: Array  # the weights after every application in the prompt's units, (T + 1, K, d)
    prompt_: torch.Tensor
    n_iter_: int
    coef_: Array
    intercept_: Any
    dtype: str
    tol: float
    max_iter: int
    condition: float | None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype must be 'float64' or 'float32', got {self.dtype!r}")
        return DTYPES[self.dtype]

    def _check_common(self) -> None:
        """Parameters every iterative estimator has."""
        if not isinstance(self.tol, numbers.Real) or not 0 <= float(self.tol) < math.inf:
            raise ArgumentError(f"tol must be a number >= 0, got {self.tol!r}")
        if not isinstance(self.max_iter, numbers.Integral) or isinstance(self.max_iter, bool) or self.max_iter < 1:
            raise ArgumentError(f"max_iter must be a whole number >= 1, got {self.max_iter!r}")
        if self.condition is not None and not (isinstance(self.condition, numbers.Real) and self.condition >= 1):
            raise ArgumentError(f"condition must be None or a number >= 1, got {self.condition!r}")

    def _checked(self, X: Any, y: Any, sample_weight: Any = None, **options: Any) -> tuple[Array, Any, Array]:
        """X (dense), y and weights, validated as scikit-learn does."""
        X, y = validate_data(self, X, y, accept_sparse=("csr", "csc", "coo"), dtype=np.float64, **options)
        X = _dense(X)
        weight = np.ones(len(X)) if sample_weight is None else _check_sample_weight(sample_weight, X, dtype=np.float64)
        if not weight.sum() > 0:
            raise ArgumentError("sample_weight must contain a positive weight")
        return X, y, weight

    def _new_rows(self, X: Any) -> Array:
        check_is_fitted(self)
        return _dense(validate_data(self, X, accept_sparse=("csr", "csc", "coo"), dtype=np.float64, reset=False))

    def _linear(self, X: Any) -> Array:
        """The linear predictor of new rows, (n, K): queries are tokens that prediction heads read.

        Each query is divided by a power of two that brings |w.x| below 1, and what is read is multiplied by it: first
        the power that Cauchy and Schwarz know, then the one that the first reading shows to suffice.
        """
        rows = self._new_rows(X)
        rows = self.scaling_.scaled(rows)
        w = self._prompt_weights()
        network = self.network_
        if network.loss != "linear":  # a nonlinear network's heads read its mean; those of the linear one read w.x
            network = frozen("linear", "plain", 0, rows.shape[1], dtype=network.dtype)
        columns = []
        for each in w:
            most = np.linalg.norm(rows, axis=1) * max(float(np.linalg.norm(each)), 1e-300)
            size = most
            for _ in range(2):
                shrink = np.exp2(np.ceil(np.log2(np.maximum(size, 2.0**-60))))
                z = self._read(network, each[None], rows / shrink[:, None])[:, 0] * shrink
                size = np.minimum(most, 1.01 * np.abs(z) + most * 2.0**-16)
            columns.append(z)
        return np.asarray(np.stack(columns, axis=1) * self.scaling_.y_scale + self._offset())

    @torch.no_grad()
    def _read(self, network: Block, w: Array, rows: Array) -> Array:
        """What query tokens read off the state w (K, d): the first layer of the network."""
        at, lean = network.channels, Lean(network)
        x = tensor(rows, network.dtype)
        queries = at.data(x, torch.zeros_like(x), x.new_zeros(len(x), at.classes))
        return np.asarray(lean.predict(at.state(tensor(w, network.dtype)), queries).double().numpy())

    def _prompt_weights(self) -> Array:
        """coef_ in the prompt's units, (K, d)."""
        return np.asarray(np.atleast_2d(self.coef_) * (self.scaling_.x_scale / self.scaling_.y_scale))

    def _offset(self) -> Array:
        """What to add to a prediction of centred rows."""
        return np.atleast_1d(self.intercept_) + np.atleast_2d(self.coef_) @ self.scaling_.x_mean

    def _warn(self, converged: bool, detail: str = "") -> None:
        if not converged:
            warnings.warn(
                f"{type(self).__name__} stopped after {self.n_iter_} steps before reaching tol = {self.tol:g}{detail}; "
                "raise max_iter, raise tol, or scale the data",
                ConvergenceWarning,
                stacklevel=3,
            )

    def plot(self) -> Figure:
        """The prompt's attention per step, the error against depth with its bound, the path of w for two columns."""
        from .figures import estimator_figure

        check_is_fitted(self)
        return estimator_figure(self)


def _dense(X: Any) -> Array:
    return np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64)
