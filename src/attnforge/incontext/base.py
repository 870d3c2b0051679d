"""What all in-context estimators share: checks, the call of the network, read-outs, warnings."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ArgumentError
from ._sklearn import (
    BaseEstimator,
    ConvergenceWarning,
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from .certificate import ConvergenceCertificate
from .prompt import Array, Scaling, tokens_of
from .reads import LinearRead

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = {"float64": torch.float64, "float32": torch.float32}


class InContextEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators: an estimator lays data out as a prompt and lets a frozen network work on it.

    After `fit`: `network_` (the block that was applied `n_iter_` times), `scaling_` (all that was done outside of it),
    `trajectory_` (the weights after every application), `prompt_` (the data tokens), `certificate_`.
    """

    network_: Any
    scaling_: Scaling
    certificate_: ConvergenceCertificate
    trajectory_: Array
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

    @torch.no_grad()
    def _linear(self, X: Any) -> Array:
        """The linear predictor of new rows, (n, K): queries are tokens that the same prediction heads read.

        Each query is divided by a power of two that brings |w.x| below 1, and what is read is multiplied by it.
        """
        rows = self._new_rows(X)
        rows = self.scaling_.scaled(rows)
        w = self._prompt_weights()
        dtype = self.network_.dtype
        size = np.linalg.norm(rows, axis=1) * max(float(np.linalg.norm(w, axis=1).max()), 1e-300)
        shrink = np.exp2(np.ceil(np.log2(np.maximum(size, 2.0**-60))))[:, None]
        read = self.network_.read if isinstance(self.network_.read, LinearRead) else self.network_.linear
        z = read(torch.from_numpy(w).to(dtype), torch.from_numpy(rows / shrink).to(dtype)).double().numpy()
        return np.asarray(z * shrink * self.scaling_.y_scale + self._offset())

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
        """The prompt's attention per step, the error against depth with its bound, the path of w for two columns.

        Where the state also carries an intercept, the state itself is shown instead of its attention.
        """
        from .figures import estimator_figure

        check_is_fitted(self)
        return estimator_figure(self)


def _dense(X: Any) -> Array:
    return np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64)


def data_tokens(x: Array, y: Array, weight: Array, step: float, dtype: torch.dtype) -> torch.Tensor:
    """Data tokens (x_i, step weight_i x_i, y_i); the weights already hold 1/n."""
    return tokens_of(x, step * weight[:, None] * x, y, dtype)
