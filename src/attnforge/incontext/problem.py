"""The problem that a prompt states, outside attention: objective, gradients, curvatures, and bounds of their rounding.

The solver uses it between stages to choose a step size, and certificates use it to audit a run. Nothing here computes
weights. The *exact* problem is that of the user's data in the prompt's units, before centring, division and weights
were rounded; `Rounding` says how far the arrays are from it.

`enclosure` bounds all eigenvalues of a computed symmetric matrix: if a Cholesky factorisation of A - c I runs to its
end in floating point, then lambda_min(A) >= c - gamma_{d+1}/(1 - gamma_{d+1}) tr(A - c I) (Higham, theorem 10.3: the
factor is exact for a matrix that near).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..certificates.rounding import gamma
from ..dtypes import Array
from .losses import Doubt, Loss, U

ENTRIES = 1 << 21  # predictions alive at once: 16 MB of float64, whatever the number of samples and steps
SECOND_ORDER = 1.001  # products of two roundings, which first-order sums leave out
NOTHING = 1e-13  # eigenvalues below this part of the largest are counted as 0: a few hundred roundings
UNUSED = 0.05  # of the largest curvature: what the smallest is taken to be while no column is in use

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class Rounding:
    """|x - exact| <= relative |x| + columns_j, the same for y, and a relative error of the sample weights."""

    relative: float
    columns: Array
    labels: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, eq=False)
class StatedProblem:
    """sum_i weight_i loss(w.x_i, y_i) + sum_j penalty_j w_j^2 / 2 + sum_j threshold_j |w_j|, in the prompt's units."""

    loss: Loss
    x: Array  # (n, d)
    y: Array  # (n, K)
    weight: Array  # (n,)
    penalty: Array  # (d,)
    start: Array  # (K, d)
    rounding: Rounding
    threshold: Array | None = None
    fixed: tuple[int, ...] = ()  # coordinates that are not fitted: constraints, whose value is that of the start
    free: Mask = field(init=False)

    def __post_init__(self) -> None:
        free = np.ones(self.x.shape[1], dtype=bool)
        free[list(self.fixed)] = False
        object.__setattr__(self, "free", free)

    @property
    def held(self) -> tuple[int, ...]:
        """The coordinates that are not fitted and not 0: steps that only round would let them drift."""
        return tuple(j for j in self.fixed if self.start[:, j].any())

    def pinned(self, points: Array) -> Array:
        """Points (..., K, d) with the coordinates that are not fitted where they must be."""
        return np.where(self.free, points, self.start)

    def drift(self, w: Array) -> float:
        """How far the coordinates of w (K, d) that are not fitted can be from where they must be."""
        must = self.start[:, ~self.free]
        return float(np.linalg.norm(np.abs(w[:, ~self.free] - must) + 4 * U * np.abs(must))) * (1 + 1e-9)

    def objective(self, w: Array) -> float:
        """The value at w (K, d)."""
        each = self.loss.value(self.x @ w.T, self.y)
        corner = 0.0 if self.threshold is None else float((self.threshold * np.abs(w)).sum())
        return float(self.weight @ each) + 0.5 * float((self.penalty * w * w).sum()) + corner

    def gradients(self, points: Array) -> Array:
        """The gradient of the smooth part at points (m, K, d)."""
        out = np.empty_like(points)
        size = max(1, ENTRIES // max(1, self.y.size))
        for i in range(0, len(points), size):
            part = points[i : i + size]
            r = self.loss.slope(np.tensordot(self.x, part, axes=(1, 2)), self.y[:, None]) * self.weight[:, None, None]
            out[i : i + size] = np.tensordot(r, self.x, axes=(0, 0)) + self.penalty * part
        out[..., ~self.free] = 0.0
        return out

    def residual_error(self, points: Array) -> tuple[Array, Array]:
        """What a residual can be off the exact problem's, anywhere on these points, and how large it can be: (n, K)."""
        most = np.abs(points).max(axis=0)  # (K, d)
        size = np.abs(self.y)
        off = Doubt(
            z=self._z_error(most), y=self.rounding.labels + 8 * U * size, reach=np.abs(self.x) @ most.T + size,
            largest=lambda: np.asarray(np.tensordot(self.x, points, axes=(1, 2)).max(axis=1)),
        )  # fmt: skip
        return self.loss.slope_error(self.y, off)

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
        with np.errstate(over="ignore", invalid="ignore"):  # curvatures beyond float64 bound nothing: `enclosure`
            low, high = self.loss.hessians(x, z, self.y, self.weight, length)
        states = w.shape[0] if self.loss.joint else 1
        ridge = np.asarray(np.kron(np.eye(states), np.diag(self.penalty[live])), dtype=np.float64)
        off, size = self.rounding, (x * x).sum(axis=1)
        trace = float(np.trace(high))
        error = (float(gamma(len(x) + 8, U)) + 2.1 * off.relative + off.weight + 1e-13) * trace
        peak = trace / max(float(self.weight @ size), 1e-300)  # the mean curvature of a sample
        shift = float(np.linalg.norm(off.columns[live]))
        error += (2.1 * float(self.weight @ np.sqrt(size)) + 1.1 * shift * len(x)) * shift * max(peak, 1.0)
        return low + ridge, high + ridge, error + 8 * U * float(np.trace(ridge))

    def shared(self, live: Mask, classes: int) -> Array:
        """The projection onto what all classes share, where the loss does not see it; otherwise 0."""
        count = int(live.sum())
        if not self.loss.joint:
            return np.zeros((count, count))
        return np.asarray(np.kron(np.full((classes, classes), 1 / classes), np.eye(count)))

    def rows(self) -> Array:
        """Rows whose Gram matrix is the Hessian of the squared loss: sqrt(weight) x, and the penalty's below them."""
        return np.concatenate((np.sqrt(self.weight)[:, None] * self.x, np.diag(np.sqrt(self.penalty))))

    def curvatures(self, w: Array) -> tuple[float, float]:
        """The smallest positive and the largest curvature at w, for the choice of a step size.

        Lasso: the smallest is that of the columns in use. Huber: the largest is that of all samples, on the slope or
        not; directions without a curvature are never entered from 0.
        """
        live = self.free if self.threshold is None or not self.threshold.any() else (w != 0).any(axis=0)
        high = extremes(self.hessians(w, 0.0, self.free)[1])[1]
        if self.loss.clipped:
            all_rows = (self.x[:, self.free] * self.weight[:, None]).T @ self.x[:, self.free]
            high = extremes(all_rows + np.diag(self.penalty[self.free]))[1]
        if not live.any():
            return UNUSED * high, high
        low = self.hessians(w, 0.0, live)[0] + high * self.shared(live, w.shape[0])
        values = np.linalg.eigvalsh(low)
        kept = values[values > max(self.loss.flat, 16 * len(low) * U) * high]
        return (float(kept[0]) if len(kept) else UNUSED * high), high


def extremes(gram: Array) -> tuple[float, float]:
    """The smallest positive and the largest eigenvalue, moved outward by the rounding of the eigenvalue solver."""
    values = np.linalg.eigvalsh(gram)
    high = float(values[-1]) if len(values) else 0.0
    if not high > 0:
        return 1.0, 1.0
    slack = 4 * len(gram) * np.finfo(float).eps * high
    positive = values[values > max(NOTHING * high, 4 * slack)]
    return float(positive[0]) - slack, high + slack


def gram(rows: Array) -> Array:
    """rows^T rows, or the smaller matrix with the same positive eigenvalues."""
    rows = rows[rows.any(axis=1)]
    return rows.T @ rows if rows.shape[0] >= rows.shape[1] else rows @ rows.T


def is_singular(gram: Array) -> bool:
    """Whether a Gram matrix has directions that data do not determine."""
    values = np.linalg.eigvalsh(gram)
    return bool(values[0] <= max(NOTHING, 8 * len(gram) * np.finfo(float).eps) * values[-1])


def enclosure(matrix: Array, error: float = 0.0) -> tuple[float, float]:
    """Bounds of all eigenvalues of the symmetric matrix that `matrix` is within `error` of, in the spectral norm.

    Of a matrix that is not finite nothing is known.

    >>> low, high = enclosure(np.diag([1.0, 3.0]))
    >>> 0.999999 < low <= 1 <= 3 <= high < 3.000001
    True
    """
    d = len(matrix)
    if not (np.isfinite(matrix).all() and math.isfinite(error)):
        return -math.inf, math.inf
    matrix = (matrix + matrix.T) / 2
    values = np.linalg.eigvalsh(matrix)
    size = float(np.abs(values).max()) + float(np.abs(matrix).max())
    low = _below(matrix, float(values[0]), size, d)
    high = -_below(-matrix, -float(values[-1]), size, d)
    slack = error + 4 * U * size  # of the symmetrisation
    return math.nextafter(low - slack, -math.inf), math.nextafter(high + slack, math.inf)


def _below(matrix: Array, guess: float, size: float, d: int) -> float:
    """A lower bound of the smallest eigenvalue, near a guess."""
    step = 16 * d * U * size
    for _ in range(40):
        shifted = matrix - (guess - step) * np.eye(d)
        try:
            np.linalg.cholesky(shifted)
        except np.linalg.LinAlgError:
            step *= 4
            continue
        g = float(gamma(d + 1, U))
        slack = g / (1 - g) * float(np.abs(np.diag(shifted)).sum()) + 2 * U * size
        return guess - step - slack
    return -2 * d * size
