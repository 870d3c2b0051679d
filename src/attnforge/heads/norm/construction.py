"""Norm heads for operations of a program, and sums of sigmoids that are 1/sqrt(v + eps), their univariate part (section
G1 of docs/theory.md).

    S(v) = sum_j a_j sigmoid(b_j - s_j v)  ~  1 / sqrt(v + eps)     for v in [lo, hi]

1/sqrt(t) = 2/sqrt(pi) int_0^inf exp(-t tau^2) dtau. The midpoint rule after the substitution tau = A sinh(y) gives
scales s_j = A^2 sinh^2((j - 1/2) D) and converges exponentially in the number of heads; a sigmoid far down its tail is
an exponential. The two free numbers are scanned, the scales polished (Gauss-Newton with the amounts projected out),
rounded to the shipping dtype, and only then the amounts a_j solved by least squares in the relative error. All amounts
come out positive: nothing cancels, and rounding stays at a few units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...certificates.rounding import unit
from ...dtypes import Array, dtype_name, rounded
from ...errors import ArgumentError, DomainError, PrecisionError
from ...network import Heads
from ...programs.enclose import Range, centred
from ...programs.ops import Normalise
from ..construction import Frame, HeadBuilder, Member, Order, Planned, embedded
from .bound import layer_error
from .site import MAX_HEADS, NormSite


@dataclass(frozen=True)
class NormSpec:
    """The univariate part of a norm head, for v in [lo, hi]:

    sum_j weights_j sigmoid(shifts_j - scales_j v) = (v + eps)^(-1/2) (1 + e),    |e| <= relative_error

    >>> from attnforge.heads.norm.head import NormHead
    >>> spec = NormHead.layer_norm(8, variance=(0.5, 50.0)).spec
    >>> v = torch.tensor([1.0, 9.0], dtype=torch.float64)
    >>> bool(((spec(v) * (v + spec.eps).sqrt() - 1).abs() <= spec.relative_error).all())
    True
    """

    scales: tuple[float, ...]
    shifts: tuple[float, ...]
    weights: tuple[float, ...]
    eps: float
    lo: float
    hi: float
    relative_error: float

    def __post_init__(self) -> None:
        sizes = len(self.scales), len(self.shifts), len(self.weights)
        if not 0 < sizes[0] == sizes[1] == sizes[2]:
            raise ArgumentError(f"scales, shifts and weights must be as many, got {sizes}")

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.scales)

    def __call__(self, v: Tensor) -> Tensor:
        """The fitted function, for looking at it."""
        scales, shifts, weights = (v.new_tensor(x) for x in (self.scales, self.shifts, self.weights))
        return torch.sigmoid(shifts - v.unsqueeze(-1) * scales) @ weights


def fit(lo: float, hi: float, eps: float, heads: int, divisor: int, dtype: torch.dtype) -> tuple[Array, Array, Array]:
    """Scales, already divided by `divisor`, shifts and amounts: numbers of `dtype`, best for v in [lo, hi]."""
    low, high = lo + eps, hi + eps
    level = -1.0 if dtype == torch.float32 else -4.0  # a small |level| rounds less, a large one fits a little better
    scale = rounded(np.exp(_log_scales(max(high / low, 4.0), level, heads)) / (low * divisor), dtype)
    s = scale * divisor
    shift = rounded(level - s * eps, dtype)  # the sigmoids then see t = v + eps
    t = low * _sample(high / low, heads)
    return scale, shift, rounded(_solve(s, shift, t - eps, t)[0], dtype)


def _sample(ratio: float, heads: int) -> Array:
    """Points of [1, ratio], Chebyshev distributed in the logarithm."""
    count = 8 * heads + 12
    return np.exp((1 + np.cos((np.arange(count) + 0.5) * np.pi / count)) / 2 * math.log(ratio))


def _solve(s: Array, b: Array | float, v: Array, t: Array) -> tuple[Array, Array, Array, Array]:
    """Amounts by least squares in the relative error; its residual, slopes in log s, and a basis of the heads' span."""
    x = np.multiply.outer(v, s)
    sigmoid = 1 / (1 + np.exp(np.minimum(x - b, 700.0)))
    heads = np.sqrt(t)[:, None] * sigmoid
    size = np.linalg.norm(heads, axis=0)
    left, singular, right = np.linalg.svd(heads / size, full_matrices=False)
    kept = singular > 1e-15 * singular[0]
    left, singular, right = left[:, kept], singular[kept], right[kept]
    amount = right.T @ (left.sum(0) / singular) / size
    return amount, heads @ amount - 1, -heads * x * (1 - sigmoid) * amount, left


@lru_cache(maxsize=256)
def _log_scales(ratio: float, level: float, heads: int) -> Array:
    """Logarithms of the scales for t in [1, ratio]: the best of a few sinh^2 grids, polished."""
    t = _sample(ratio, heads)
    ends = [(p / heads, q * heads) for p in (1.0, 1.5, 2.0, 3.0) for q in (0.15, 0.25, 0.35, 0.45, 0.55, 0.7)]
    grids = [_sinh_grid(ratio, heads, first, last) for first, last in ends]
    best = min(grids, key=lambda y: float(np.abs(_solve(np.exp(y), level, t, t)[1]).max()))
    return _polish(best, level, t)


def _sinh_grid(ratio: float, heads: int, first: float, last: float) -> Array:
    """log sinh^2((j - 1/2) D), placed so that the smallest scale is first/ratio and the largest is `last`."""
    j = np.arange(heads) + 0.5
    lo, hi = 1e-6, 40.0
    for _ in range(50):
        mid = (lo + hi) / 2
        short = _log_sinh2((heads - 0.5) * mid) - _log_sinh2(0.5 * mid) < math.log(last * ratio / first)
        lo, hi = (mid, hi) if short else (lo, mid)
    grid = np.array([_log_sinh2(x * hi) for x in j])
    return grid - grid[0] + math.log(first / ratio)


def _log_sinh2(x: float) -> float:
    return 2 * (x + math.log1p(-math.exp(-2 * x)) - math.log(2))


def _polish(y: Array, level: float, t: Array, steps: int = 40) -> Array:
    """Gauss-Newton (Levenberg) on the log scales, the amounts projected out."""
    _, residual, slope, basis = _solve(np.exp(y), level, t, t)
    damping = 1e-3
    for _ in range(steps):
        jacobian = slope - basis @ (basis.T @ slope)
        size = np.linalg.norm(jacobian, axis=0) + 1e-300
        left, singular, right = np.linalg.svd(jacobian / size, full_matrices=False)
        push = left.T @ residual
        for _ in range(6):
            filtered = singular / (singular**2 + (damping * singular[0]) ** 2) * push
            moved = y - np.clip(right.T @ filtered / size, -0.3, 0.3)
            if np.all(np.diff(moved) > 0.05):
                trial = _solve(np.exp(moved), level, t, t)
                if trial[1] @ trial[1] < residual @ residual:
                    break
            damping *= 4
        else:
            return y
        settled = trial[1] @ trial[1] > 0.99 * (residual @ residual)
        y, (_, residual, slope, basis), damping = moved, trial, max(damping / 5, 1e-13)
        if settled:
            return y
    return y


ROOM = 2.0**-7  # how much further than the exact roots of variances a norm is fitted, for errors of earlier layers
COUNTS = (4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, MAX_HEADS)  # numbers of heads tried for a norm

Parts = tuple[Array, Array, Array]  # scales, shifts, amounts


class NormBuilder(HeadBuilder):
    """Norms of rows that are centred already, or by the heads themselves (lemma G3)."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        """The fewest heads whose fit keeps the budget, or the best fit if none does."""
        op, dtype, margin = order.op, order.dtype, order.tactics.margin
        if not isinstance(op, Normalise):
            return None
        name = f"the norm '{order.name}'" if order.name else f"the norm %{order.number}"
        low, high = variances(centred(op, order.reads[0]))
        eps = op.centring[1]
        low = max(0.0, math.sqrt(low) * (1 - ROOM) - margin * ROOM * math.sqrt(high)) ** 2
        high = max(high * (1 + max(ROOM, margin)) ** 2, 1e-30)  # rows that are 0 throughout still have an interval
        if low + eps == 0:
            raise DomainError(
                f"{name} may divide by 0: its variance cannot be shown to stay away from 0 and its eps is 0; "
                "give it an eps, or choose a box on which the variance is positive"
            )
        wanted = 0.5 * order.eps / math.sqrt(op.width)
        best: tuple[float, Parts] | None = None
        for count in COUNTS:
            table = fit(low, high, eps, count, op.width, dtype)
            error, evaluation = layer_error(*table, op.width, eps, low, high, unit(dtype))
            if best is None or error + evaluation < best[0]:
                best = error + evaluation, table
            if error <= max(wanted, 0.1 * evaluation):
                break
        assert best is not None
        if not best[0] < 0.5:
            raise PrecisionError(
                f"{name} has no accurate head for variances from {low:g} to {high:g} with eps {op.eps:g} in "
                f"{dtype_name(dtype)}; give it a larger eps, or choose a smaller box"
            )
        return Planned(NormSite(order.number, (low, high), len(best[1][0])), best[1])

    def group(self, frame: Frame, members: Sequence[Member], purpose: str) -> Heads:
        (member,) = members
        assert isinstance(member.op, Normalise)
        own = norm_heads(member.op.centring[0], member.planned.parts, frame.dtype)
        return embedded(own, member.place, frame, purpose)


def norm_heads(matrix: Array, parts: Parts, dtype: torch.dtype) -> Heads:
    """G1: head j has a self slot of logit b_j - s_j c.c/d and value c, and a sink of logit and value 0; c is what it
    reads times a matrix."""
    scale, shift, amount = (torch.tensor(part, dtype=dtype) for part in parts)
    width = len(matrix)
    eye = torch.eye(width, dtype=dtype)
    rows = torch.tensor(matrix, dtype=dtype)
    wide = torch.cat([rows, torch.zeros(width, 1, dtype=dtype)], 1)
    one = torch.zeros(1, width + 1, dtype=dtype)
    one[0, -1] = 1.0
    return Heads(
        "self",
        W_Q=-scale[:, None, None] * wide,
        b_Q=shift[:, None] * one,
        W_K=wide.unsqueeze(0),
        b_K=one,
        W_V=rows.unsqueeze(0),
        M_K=torch.zeros(1, 1, width + 1, dtype=dtype),
        M_V=torch.zeros(1, 1, width, dtype=dtype),
        W_O=amount[:, None, None] * eye,
    )


def variances(r: Range) -> tuple[float, float]:
    """The smallest and the largest mean square of a row."""
    return float(np.min(np.mean(r.least**2, -1))), float(np.max(np.mean(r.size**2, -1)))


BUILDERS: dict[str, HeadBuilder] = {"norm": NormBuilder()}
