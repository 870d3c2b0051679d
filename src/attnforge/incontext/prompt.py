"""From data to a prompt: the affine scaling, the step size and the penalty tokens, all named in `Scaling`.

A network knows nothing of units. Before data become tokens they are centred and divided, columns by their root mean
square and labels by their size, and afterwards the weights are carried back by the same affine map. That, the smallest
curvature, which picks one of a discrete family of networks, and early stopping are all that happens outside attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..dtypes import Array
from .blocks import Kind
from .heads import Channels

MARGIN = 1.15  # the largest curvature is kept this far below the edge of what the momentum is made for
LARGEST_DOUBLINGS = 26
NOTHING = 1e-13  # eigenvalues below this part of the largest are counted as 0
AFFINE = "centring and scaling of columns and labels"
STOPPING = "early stopping"
SMALLEST_CURVATURE = "the smallest curvature, which picks the momentum out of a discrete family (condition= fixes it)"
OUTSIDE = (AFFINE, SMALLEST_CURVATURE, STOPPING)


@dataclass(frozen=True, eq=False)
class Scaling:
    """What was done to the data before they became a prompt: x' = (x - x_mean)/x_scale, y' = (y - y_mean)/y_scale.

    `step` is the step size, a factor of the value vectors; the curvatures of the scaled problem lie in `spectrum`, and
    `doublings` is the class of condition numbers, 2**doublings, that picked the network. `outside` names everything
    that was not computed by attention.
    """

    x_mean: Array
    x_scale: Array
    y_mean: Array
    y_scale: float
    spectrum: tuple[float, float] = (1.0, 1.0)
    doublings: int = 0
    step: float = 1.0
    outside: tuple[str, ...] = OUTSIDE

    def scaled(self, X: Array) -> Array:
        """New rows in the prompt's units."""
        return np.asarray((X - self.x_mean) / self.x_scale)

    def original(self, w: Array) -> Array:
        """Weights (..., K, d) of the prompt in the units of the data."""
        return np.asarray(w * (self.y_scale / self.x_scale))

    def __repr__(self) -> str:
        low, high = self.spectrum
        return (
            f"Scaling(columns by {self.x_scale.min():.3g} to {self.x_scale.max():.3g}, labels by {self.y_scale:.3g}, "
            f"curvatures in [{low:.3g}, {high:.3g}], step {self.step:.3g}; "
            f"outside attention: {'; '.join(self.outside)})"
        )


def spectrum(gram: Array) -> tuple[float, float]:
    """The smallest positive and the largest eigenvalue, moved outward by the rounding of the eigenvalue solver."""
    values = np.linalg.eigvalsh(gram)
    high = float(values[-1])
    if not high > 0:
        return 1.0, 1.0
    slack = 4 * len(gram) * np.finfo(float).eps * high
    positive = values[values > max(NOTHING * high, 4 * slack)]
    return float(positive[0]) - slack, high + slack


def is_singular(gram: Array) -> bool:
    """Whether a Gram matrix has directions that data do not determine."""
    values = np.linalg.eigvalsh(gram)
    return bool(values[0] <= max(NOTHING, 8 * len(gram) * np.finfo(float).eps) * values[-1])


def column_scale(X: Array, penalty: float, uniform: bool = False) -> Array:
    """Root mean squares of the columns (of all of them together: `uniform`), with the penalty per sample counted in."""
    squares = np.einsum("ij,ij->j", X, X) / len(X)
    if uniform:
        squares = np.full_like(squares, squares.mean())
    total = np.sqrt(squares + penalty)
    return np.where(total > 0, total, 1.0)


def doublings_for(low: float, high: float) -> int:
    """The class of condition numbers that [low, high] belongs to: the smallest k with 2**k >= high/low."""
    return min(LARGEST_DOUBLINGS, max(1, math.ceil(math.log2(max(1.0, high / low)))))


def step_size(kind: Kind, doublings: int, high: float) -> float:
    """The step size that goes with `Momentum.optimal` for curvatures up to `high`."""
    if kind == "heavy ball":
        return (2 / (1 + 2.0 ** (-doublings / 2))) ** 2 / high
    return 1 / high


def tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """An array of the prompt in the network's dtype."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def penalty_tokens(at: Channels, penalty: Array, step: float, dtype: torch.dtype) -> Tensor:
    """Tokens whose gradient is penalty_j w_j: x = sqrt(penalty_j)/4 e_j and v = 4 step sqrt(penalty_j) e_j."""
    kept = np.diag(np.sqrt(penalty))
    x = tensor(kept / 4, dtype)
    return at.data(x, tensor(4 * step * kept, dtype), x.new_zeros(len(penalty), at.classes), "pen")
