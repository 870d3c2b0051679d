"""Curvatures: an upper bound that attention computes itself, and enclosures that certificates rest on.

*In context.* With labels 0 one step of the frozen block without momentum takes p to p - G p, G = sum_i v_i x_i^T. d
states that start at the unit vectors give the columns of G, and applied again, of G^2, ..., G^m. As
||G^m||_F >= lambda_max(G^m) = lambda_max^m, the m-th root of that norm bounds the largest curvature from above, by at
most d^(1/2m) too much. Between the steps p - p' is read off, linearly, and divided by a power of two.

*For certificates.* `enclosure` bounds all eigenvalues of a computed symmetric matrix: if a Cholesky factorisation of
A - c I runs to its end in floating point, then lambda_min(A) >= c - gamma_{d+1}/(1 - gamma_{d+1}) tr(A - c I) (Higham,
theorem 10.3: the factor is exact for a matrix that near).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..certificates.rounding import gamma
from ..dtypes import Array
from .blocks import Lean, frozen

POWER = 8
SLACK = 1.001  # far above what heads and rounding do to a norm, far below what the power costs
ENTRIES = 1 << 17  # attention weights alive at once: what stays in a cache
U = 2.0**-53


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
    block = frozen("linear", "plain", 0, d, dtype=dtype)
    lean, at = Lean(block), block.channels
    x, v = torch.from_numpy(rows / size).to(dtype), torch.from_numpy(values / reach).to(dtype)
    data = at.data(x, v, x.new_zeros(n, 1))
    exponent = math.log2(size) + math.log2(reach)
    logs = []
    for part in torch.eye(d, dtype=dtype).split(max(1, ENTRIES // (10 * n))):
        p, scaled = part.unsqueeze(1), 0.0  # one sequence for each unit vector
        for _ in range(POWER):
            p = p - at_weights(lean(at.state(p), data), at.part("p"))
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


def at_weights(state: torch.Tensor, part: slice) -> torch.Tensor:
    """A part of every state token."""
    return state[..., part]


def enclosure(matrix: Array, error: float = 0.0) -> tuple[float, float]:
    """Bounds of all eigenvalues of the symmetric matrix that `matrix` is within `error` of, in the spectral norm.

    >>> low, high = enclosure(np.diag([1.0, 3.0]))
    >>> 0.999999 < low <= 1 <= 3 <= high < 3.000001
    True
    """
    d = len(matrix)
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
