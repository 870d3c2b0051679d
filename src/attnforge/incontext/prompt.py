"""From data to a prompt: the affine scaling, the tokens, the step size, all named in `Scaling`.

A network knows nothing of units. Before data become tokens they are centred and divided, columns by their root mean
square and labels by their size, and afterwards the weights are carried back by the same affine map. That, the smallest
curvature, which picks one of a discrete family of networks, and early stopping are all that happens outside attention.

The largest curvature is found in context. With labels 0 one step of the frozen block without momentum takes p to
p - G p, G = sum_i v_i x_i^T. d states that start at the unit vectors give the columns of G, and applied again, of G^2,
..., G^m. As ||G^m||_F >= lambda_max(G^m) = lambda_max^m, the m-th root of that norm bounds the largest curvature from
above, by at most d^(1/2m) too much. Between the steps p - p' is read off, linearly, and divided by a power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..certificates.rounding import gamma
from ..dtypes import Array
from .blocks import Channels, Kind, Lean, frozen
from .losses import LINEAR, U
from .problem import Rounding, StatedProblem

MARGIN = 1.15  # the largest curvature is kept this far below the edge of what the momentum is made for
LARGEST_DOUBLINGS = 26  # there F4b amplifies the rounding of a step by 2^24: half of float64's digits are left
POWER = 8  # m: with it the bound is at most d^(1/16) too large, 1.33 for 100 columns
SLACK = 1.001  # far above what heads and rounding do to a norm, far below what the power costs
CACHED = 1 << 17  # attention weights alive at once: what stays in a cache

AFFINE = "centring and scaling of columns and labels"
STOPPING = "early stopping"
SMALLEST_CURVATURE = "the smallest curvature, which picks the momentum out of a discrete family (condition= fixes it)"
LIVE_CURVATURE = "the smallest curvature of the columns in use, which picks the momentum, between stages"
STEP_CHOICE = "the curvatures (Hessians) and the objective between stages, which choose the step size and the momentum"
HELD = "the offset that is not fitted, which is written into the state again after every application"
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


def column_scale(X: Array, penalty: float, uniform: bool = False) -> Array:
    """Root mean squares of the columns (of all of them together: `uniform`), with the penalty per sample counted in."""
    squares = np.einsum("ij,ij->j", X, X) / len(X)
    if uniform:
        squares = np.full_like(squares, squares.mean())
    total = np.sqrt(squares + penalty)
    return np.where(total > 0, total, 1.0)


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


def with_ones(
    X: Array, weight: Array, penalty: float, intercept: bool, minimal: bool = True
) -> tuple[Array, Array, Array]:
    """Centred and scaled columns with a column of ones behind; the means; the scales.

    `minimal`: where there are no more rows than columns, w stays in the span of the rows, where curvature is.
    """
    x_mean = np.average(X, axis=0, weights=weight) if intercept else np.zeros(X.shape[1])
    rows = X - x_mean
    if intercept:  # which takes over what is constant, exactly; the least variation is data
        rows[:, (X[0] == X).all(axis=0)] = 0.0
    uniform = minimal and len(X) <= X.shape[1]
    x_scale = column_scale(rows * np.sqrt(len(X) * weight)[:, None], penalty, uniform)
    return np.concatenate((rows / x_scale, np.ones((len(X), 1))), axis=1), x_mean, x_scale


def doublings_for(low: float, high: float) -> int:
    """The class of condition numbers that [low, high] belongs to: the smallest k with 2**k >= high/low."""
    return min(LARGEST_DOUBLINGS, max(1, math.ceil(math.log2(max(1.0, high / low)))))


def step_size(kind: Kind, doublings: int, high: float) -> float:
    """The step size that goes with `Momentum.optimal` for curvatures up to `high`."""
    if kind == "heavy ball":
        return (2 / (1 + 2.0 ** (-doublings / 2))) ** 2 / high
    return 1 / high


def outside(problem: StatedProblem) -> tuple[str, ...]:
    """What solving a problem looks at outside attention."""
    if not problem.loss.quadratic:
        return (AFFINE, STEP_CHOICE, STOPPING, *((HELD,) if problem.held else ()))
    return OUTSIDE if problem.threshold is None else (AFFINE, LIVE_CURVATURE, STOPPING)


def tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """An array of the prompt in the network's dtype."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def tokens_of(problem: StatedProblem, at: Channels, step: float, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Data tokens and penalty tokens for a step size; several targets are a batch of sequences, one for each.

    A penalty's gradient is penalty_j w_j: x = sqrt(penalty_j)/4 e_j and v = 4 step sqrt(penalty_j) e_j. Squared losses
    have penalties as data, with label 0.
    """
    values = step * problem.weight[:, None] * problem.x
    values[:, list(problem.fixed)] = 0.0
    x, v, y = (tensor(each, dtype) for each in (problem.x, values, problem.y))
    if y.shape[1] != at.classes:
        x, y = x.expand(y.shape[1], *x.shape), y.T.unsqueeze(-1)
    data = at.data(x, v, y)
    if at.robust:
        data[..., at.part("q")] = tensor(problem.weight[:, None], dtype)
    if not problem.penalty.any():
        return data, None
    kept = np.diag(np.sqrt(problem.penalty))
    x = tensor(kept / 4, dtype)
    kind = "data" if problem.loss.quadratic else "pen"
    penalties = at.data(x, tensor(4 * step * kept, dtype), x.new_zeros(len(kept), at.classes), kind)
    if not problem.loss.quadratic:
        return data, penalties
    return torch.cat((data, penalties.expand(*data.shape[:-2], *penalties.shape)), dim=-2), None


def state_of(problem: StatedProblem, at: Channels, w: Array, step: float, dtype: torch.dtype) -> Tensor:
    """The state at rest at w, with its thresholds."""
    threshold = None if problem.threshold is None else tensor(step * problem.threshold, dtype)
    rest = tensor(w, dtype)
    return at.state(rest if len(w) == at.classes else rest.unsqueeze(1), threshold)


@torch.no_grad()
def curvature_bound(rows: Array, values: Array, dtype: torch.dtype) -> float:
    """An upper bound of the largest eigenvalue of sum_i v_i x_i^T (v_i a positive multiple of x_i), by attention.

    >>> curvature_bound(np.diag([1.0, 2.0]), np.diag([1.0, 2.0]), torch.float64) <= 4 * 1.06
    True
    """
    n, d = rows.shape
    size, reach = float(np.linalg.norm(rows, axis=1).max(initial=0.0)), float(np.linalg.norm(values))
    if not size > 0 or not reach > 0:
        return 0.0
    block = frozen(LINEAR, "plain", 0, d, dtype=dtype)
    lean, at = Lean(block), block.channels
    x, v = tensor(rows / size, dtype), tensor(values / reach, dtype)
    data = at.data(x, v, x.new_zeros(n, 1))
    exponent = math.log2(size) + math.log2(reach)
    logs = []
    for part in torch.eye(d, dtype=dtype).split(max(1, CACHED // (10 * n))):
        p, scaled = part.unsqueeze(1), 0.0  # one sequence for each unit vector
        for _ in range(POWER):
            p = p - lean(at.state(p), data)[..., at.part("p")]
            top = float(p.abs().max())
            if not top > 0:
                break
            shift = math.floor(math.log2(top)) + 1
            p, scaled = p * 2.0**-shift, scaled + shift
        norm = float(p.norm())
        logs.append(2 * (math.log2(norm) + scaled) if norm > 0 else -math.inf)
    most = max(logs)
    if most == -math.inf:
        return 0.0
    squares = math.fsum(2.0 ** (each - most) for each in logs)
    return SLACK * 2.0 ** ((most + math.log2(squares)) / (2 * POWER) + exponent)
