"""Rows and labels around their weighted means, and how far rounding takes them from the exact ones.

The problem that a prompt states, outside attention: objective, gradients, curvatures, and bounds of their rounding.

Estimators use it between stages to choose a step size, and certificates use it to audit a run. Nothing here computes
weights. The *exact* problem is that of the user's data in the prompt's units, before centring, division and weights
were rounded; `Rounding` says how far the arrays are from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..certificates.rounding import gamma
from ..dtypes import Array
from .blocks import Loss
from .heads import EDGE
from .prompt import spectrum


@dataclass(frozen=True, eq=False)
class Centred:
    """Rows and labels around their weighted means, times sqrt(weight); the means; absolute errors of both."""

    rows: Array
    labels: Array
    x_mean: Array
    y_mean: Array
    x_error: Array
    y_error: float

    def rounding(self, x_scale: Array, y_scale: float) -> Rounding:
        """The errors in the prompt's units."""
        weight = (len(self.rows) + 8) * U  # sample weights were normalised
        return Rounding(12 * U, 1.01 * self.x_error / x_scale, 1.01 * self.y_error / y_scale, weight)


def centred(X: Array, Y: Array, weight: Array, intercept: bool) -> Centred:
    """The means are taken out where an intercept is fitted."""
    root = np.sqrt(weight)[:, None]
    most, slack = float(root.max()), float(gamma(len(X) + 4, U))
    x_error, y_error = np.zeros(X.shape[1]), 0.0
    if intercept:
        x_mean, y_mean = (np.average(each, axis=0, weights=weight) for each in (X, Y))
        # what rounding does to the means shifts all rows alike
        x_error = slack * most * np.average(np.abs(X), axis=0, weights=weight)
        y_error = slack * most * float(np.average(np.abs(Y), axis=0, weights=weight).max())
    else:
        x_mean, y_mean = np.zeros(X.shape[1]), np.zeros(Y.shape[1])
    rows, labels = (X - x_mean) * root, (Y - y_mean) * root
    # What is left of a constant column is rounding, and would otherwise be scaled up to a column of noise.
    noise = 8 * np.finfo(float).eps * np.sqrt(len(X)) * np.abs(X).max(axis=0, initial=0.0)
    dead = np.linalg.norm(rows, axis=0) <= noise * np.sqrt(weight.max())
    x_error = np.where(dead, x_error + np.abs(rows).max(axis=0, initial=0.0), x_error)
    rows[:, dead] = 0.0
    return Centred(rows, labels, x_mean, y_mean, x_error, y_error)


U = 2.0**-53
ENTRIES = 1 << 21  # predictions alive at once
SECOND_ORDER = 1.001  # products of two roundings

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class Rounding:
    """|x - exact| <= relative |x| + columns_j, the same for y, and a relative error of the sample weights."""

    relative: float
    columns: Array
    labels: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, eq=False)
class Problem:
    """sum_i weight_i loss(w.x_i, y_i) + sum_j penalty_j w_j^2 / 2 + sum_j threshold_j |w_j|, in the prompt's units."""

    loss: Loss
    x: Array  # (n, d)
    y: Array  # (n, K)
    weight: Array  # (n,)
    penalty: Array  # (d,)
    start: Array  # (K, d)
    rounding: Rounding
    threshold: Array | None = None
    fixed: tuple[int, ...] = ()  # coordinates that are not fitted
    free: Mask = field(init=False)

    def __post_init__(self) -> None:
        free = np.ones(self.x.shape[1], dtype=bool)
        free[list(self.fixed)] = False
        object.__setattr__(self, "free", free)

    def residuals(self, z: Array) -> Array:
        """The derivative of the loss by the prediction z (n, ..., K)."""
        y = self.y.reshape(len(self.y), *(1,) * (z.ndim - 2), -1)
        with np.errstate(over="ignore"):
            if self.loss == "softmax":
                e = np.exp(z - z.max(axis=-1, keepdims=True))
                return np.asarray(e / e.sum(axis=-1, keepdims=True) - y)
            if self.loss == "logistic":
                return np.asarray(1 / (1 + np.exp(-z)) - y)
            if self.loss == "poisson":
                return np.asarray(np.exp(z) - y)
        return np.clip(z - y, -EDGE, EDGE) if self.loss == "huber" else z - y

    def objective(self, w: Array) -> float:
        """The value at w (K, d)."""
        z, y = self.x @ w.T, self.y
        with np.errstate(over="ignore"):
            if self.loss == "softmax":
                top = z.max(axis=1)
                each = top + np.log(np.exp(z - top[:, None]).sum(axis=1)) - (y * z).sum(axis=1)
            elif self.loss == "logistic":
                each = (np.logaddexp(0.0, z) - y * z).sum(axis=1)
            elif self.loss == "poisson":
                each = (np.exp(z) - y * z).sum(axis=1)
            else:
                r = np.abs(z - y)
                each = np.where((r <= EDGE) | (self.loss == "linear"), 0.5 * r * r, EDGE * (r - 0.5 * EDGE)).sum(axis=1)
        corner = 0.0 if self.threshold is None else float((self.threshold * np.abs(w)).sum())
        return float(self.weight @ each) + 0.5 * float((self.penalty * w * w).sum()) + corner

    def gradients(self, points: Array) -> Array:
        """The gradient of the smooth part at points (m, K, d)."""
        out = np.empty_like(points)
        size = max(1, ENTRIES // max(1, self.y.size))
        for i in range(0, len(points), size):
            part = points[i : i + size]
            r = self.residuals(np.tensordot(self.x, part, axes=(1, 2))) * self.weight[:, None, None]
            out[i : i + size] = np.tensordot(r, self.x, axes=(0, 0)) + self.penalty * part
        out[..., ~self.free] = 0.0
        return out

    def residual_error(self, points: Array) -> tuple[Array, Array]:
        """What a residual can be off the exact problem's, anywhere on these points, and how large it can be: (n, K)."""
        most = np.abs(points).max(axis=0)  # (K, d)
        size = np.abs(self.x)
        z_error = self._z_error(most)
        labels = self.rounding.labels + 8 * U * np.abs(self.y)
        reach = size @ most.T + np.abs(self.y)
        if self.loss == "softmax":
            worst = z_error.max(axis=1, keepdims=True)
            return 2.1 * worst + (8 + z_error.shape[1]) * U + 0 * z_error, np.ones_like(z_error)
        if self.loss == "logistic":
            return 0.26 * z_error + 8 * U, np.ones_like(z_error)
        if self.loss == "poisson":
            top = np.tensordot(self.x, points, axes=(1, 2)).max(axis=1) + z_error
            bound = np.exp(top) * 1.001 + np.abs(self.y)
            return bound * (1.1 * z_error + 8 * U) + labels, bound
        bound = np.full_like(z_error, EDGE) if self.loss == "huber" else reach
        return z_error + labels + 2 * U * reach, bound

    def _z_error(self, most: Array) -> Array:
        """What a prediction can be off the exact problem's for |w| <= most (K, d), and its labels' kink: (n, K)."""
        rounded = (float(gamma(self.x.shape[1] + 3, U)) + 2 * U) * np.abs(self.x) + self._shift()
        return np.asarray(rounded @ most.T + 8 * U * np.abs(self.y) + self.rounding.labels)

    def _shift(self) -> Array:
        """What an entry of x can be off."""
        return self.rounding.relative * np.abs(self.x) + self.rounding.columns

    def gradient_error(self, points: Array) -> Array:
        """What an entry of `gradients` can be off the exact problem's, anywhere on these points: (K, d)."""
        r_error, bound = self.residual_error(points)
        sums, weighted = float(gamma(len(self.x) + 3, U)) + self.rounding.weight, self.weight[:, None]
        error = (weighted * (sums * bound + r_error)).T @ np.abs(self.x) + (weighted * bound).T @ self._shift()
        error = SECOND_ORDER * error + 12 * U * self.penalty * np.abs(points).max(axis=0)
        error[:, ~self.free] = 0.0
        return np.asarray(error)

    def hessians(self, w: Array, reach: float, live: Mask) -> tuple[Array, Array, float]:
        """Matrices that bound the Hessian from below and above for all |w' - w| <= reach, and what both can be off.

        Over the coordinates `live` of each class; for softmax, (K live, K live).
        """
        x, z = self.x[:, live], self.x @ w.T
        length = np.linalg.norm(x, axis=1) * reach * (1 + 1e-9) + self._z_error(np.abs(w)).max(axis=1)
        ridge = np.diag(self.penalty[live])
        if self.loss == "softmax":
            low, high = (self._softmax_hessian(x, z, np.exp(sign * 4 * length)) for sign in (-1, 1))
            ridge = np.asarray(np.kron(np.eye(w.shape[0]), ridge), dtype=np.float64)
        else:
            low, high = ((x * (self.weight * c)[:, None]).T @ x for c in self._curvatures(z[:, 0], length))
        off, size = self.rounding, (x * x).sum(axis=1)
        trace = float(np.trace(high))
        error = (float(gamma(len(x) + 8, U)) + 2.1 * off.relative + off.weight + 1e-13) * trace
        peak = trace / max(float(self.weight @ size), 1e-300)  # the mean curvature of a sample
        error += 2.1 * float(self.weight @ np.sqrt(size)) * float(np.linalg.norm(off.columns[live])) * max(peak, 1.0)
        return low + ridge, high + ridge, error + 8 * U * float(np.trace(ridge))

    def _curvatures(self, z: Array, length: Array) -> tuple[Array, Array]:
        """The second derivative of each sample's loss, its least and its largest for predictions within `length`."""
        if self.loss == "logistic":
            low, high = (1 / (2 + 2 * np.cosh(np.minimum(t, 700))) for t in
                         (np.abs(z) + length, np.maximum(np.abs(z) - length, 0)))  # fmt: skip
            return low, high
        if self.loss == "poisson":
            return np.exp(z - length), np.exp(z + length)
        if self.loss == "huber":
            r = np.abs(z - self.y[:, 0])
            return (r + length < EDGE).astype(float), (r - length <= EDGE).astype(float)
        return np.ones_like(z), np.ones_like(z)

    def _softmax_hessian(self, x: Array, z: Array, factor: Array) -> Array:
        e = np.exp(z - z.max(axis=1, keepdims=True))
        p, weight = e / e.sum(axis=1, keepdims=True), self.weight * factor
        k = range(z.shape[1])
        blocks = [[(x * (weight * p[:, a] * ((a == b) - p[:, b]))[:, None]).T @ x for b in k] for a in k]
        return np.asarray(np.block(blocks))

    def shared(self, live: Mask, classes: int) -> Array:
        """The projection onto what all classes share, which softmax does not see; 0 for other losses."""
        count = int(live.sum())
        if self.loss != "softmax":
            return np.zeros((count, count))
        return np.asarray(np.kron(np.full((classes, classes), 1 / classes), np.eye(count)))

    def curvatures(self, w: Array) -> tuple[float, float]:
        """The smallest positive and the largest curvature at w, for the choice of a step size.

        Lasso: the smallest is that of the columns in use. Huber: the largest is that of all samples, on the slope or
        not; directions without a curvature are never entered from 0.
        """
        live = self.free if self.threshold is None or not self.threshold.any() else (w != 0).any(axis=0)
        high = spectrum(self.hessians(w, 0.0, self.free)[1])[1]
        if self.loss == "huber":
            all_rows = (self.x[:, self.free] * self.weight[:, None]).T @ self.x[:, self.free]
            high = spectrum(all_rows + np.diag(self.penalty[self.free]))[1]
        if not live.any():
            return 0.05 * high, high
        low = self.hessians(w, 0.0, live)[0] + high * self.shared(live, w.shape[0])
        values = np.linalg.eigvalsh(low)
        kept = values[values > max(1e-12 if self.loss == "huber" else 1e-13, 16 * len(low) * U) * high]
        return (float(kept[0]) if len(kept) else 0.05 * high), high
