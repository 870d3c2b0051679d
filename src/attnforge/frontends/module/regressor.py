"""Fitted scikit-learn regressors that are attention-only functions exactly: perceptrons and linear models, scaled or
not, as modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...arguments import require_features
from ...errors import ArgumentError

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "exp": lambda: _Exp(),  # of the output, for Poisson's loss
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}
_LINEAR = ("LinearRegression", "Ridge", "Lasso", "ElasticNet")


def regressor(target: Any, names: Sequence[str] | None = None) -> nn.Module | None:
    """The module, in float64, that computes what a scikit-learn regressor predicts; None for anything else.

    Regressors that have no exact form are refused, with the advice to approximate them; so are `names` of inputs that
    are not the features that it was fitted with, in their order.
    """
    if str(type(target).__module__).split(".")[0] != "sklearn" or not hasattr(target, "predict"):
        return None
    found = nn.Sequential(*_layers(target)).double().eval()
    require_features(target, names)
    return found


def _layers(target: Any) -> list[nn.Module]:
    kind = type(target).__name__
    if kind == "Pipeline":
        return [layer for _, step in target.steps if step != "passthrough" for layer in _layers(step)]
    if kind not in ("MLPRegressor", "StandardScaler", *_LINEAR):
        from sklearn.base import is_classifier  # whose target it is

        if is_classifier(target):
            raise ArgumentError(
                f"{kind} gives classes, which jump from one to the next, and attention-only networks are continuous: "
                "approximate its predict_proba with attnforge.approximate, or compile a regressor"
            )
        raise ArgumentError(
            f"{kind} has no exact attention-only form (MLPRegressor, {', '.join(_LINEAR)} and StandardScaler have "
            "one): approximate it with attnforge.approximate(model, box, eps)"
        )
    if not hasattr(target, {"MLPRegressor": "coefs_", "StandardScaler": "n_features_in_"}.get(kind, "coef_")):
        raise ArgumentError(f"this {kind} is not fitted yet: call its fit(X, y) first")
    if kind == "StandardScaler":
        return [_Scaled(*(torch.tensor(v) if v is not None else None for v in (target.mean_, target.scale_)))]
    if kind in _LINEAR:
        weight = np.atleast_2d(target.coef_).T
        found: list[nn.Module] = [_affine(weight, target.intercept_)]
        return found if np.ndim(target.coef_) > 1 else [*found, _Only()]
    found = []
    for weight, bias in zip(target.coefs_, target.intercepts_, strict=True):
        found += [_affine(weight, bias), _ACTIVATIONS[target.activation]()]
    found[-1] = _ACTIVATIONS[target.out_activation_]()
    return found if target.n_outputs_ > 1 else [*found, _Only()]


class _Exp(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.exp()


class _Only(nn.Module):
    """The one output, without its dimension: scikit-learn predicts a number a row."""

    def forward(self, y: Tensor) -> Tensor:
        return y.squeeze(-1)


class _Scaled(nn.Module):
    """(x - mean) / scale, either of which may be left out."""

    mean: Tensor | None
    scale: Tensor | None

    def __init__(self, mean: Tensor | None, scale: Tensor | None):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.mean is None else x - self.mean
        return x if self.scale is None else x / self.scale


def _affine(weight: Any, bias: Any) -> nn.Linear:
    """x W + b."""
    matrix = np.asarray(weight, dtype=np.float64)
    layer = nn.Linear(matrix.shape[0], matrix.shape[1], dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(matrix.T))
        layer.bias.copy_(torch.from_numpy(np.broadcast_to(np.asarray(bias, dtype=np.float64), matrix.shape[1:]).copy()))
    return layer
