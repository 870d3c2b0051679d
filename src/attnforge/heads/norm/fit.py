"""Sums of sigmoids that are 1/sqrt(v + eps): the univariate part of norm heads (section G1 of docs/theory.md).

    S(v) = sum_j a_j sigmoid(b_j - s_j v)  ~  1 / sqrt(v + eps)     for v in [lo, hi]

1/sqrt(t) = 2/sqrt(pi) int_0^inf exp(-t tau^2) dtau. The midpoint rule after the substitution tau = A sinh(y) gives
scales s_j = A^2 sinh^2((j - 1/2) D) and converges exponentially in the number of heads; a sigmoid far down its tail is
an exponential. The two free numbers are scanned, the scales polished (Gauss-Newton with the amounts projected out),
rounded to the shipping dtype, and only then the amounts a_j solved by least squares in the relative error. All amounts
come out positive: nothing cancels, and rounding stays at a few units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...certificates.rounding import EXP_ULPS, gamma, up
from ...dtypes import Array
from ...errors import ArgumentError

ORDER = 10  # of the Taylor polynomials in `fit_error`
CELLS = 64  # per factor e of v + eps


@dataclass(frozen=True)
class NormSpec:
    """The univariate part of a norm head, for v in [lo, hi]:

    sum_j weights_j sigmoid(shifts_j - scales_j v) = (v + eps)^(-1/2) (1 + e),    |e| <= relative_error

    >>> from attnforge.heads.norm import NormHead
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
    scale = _rounded(np.exp(_log_scales(max(high / low, 4.0), level, heads)) / (low * divisor), dtype)
    s = scale * divisor
    shift = _rounded(level - s * eps, dtype)  # the sigmoids then see t = v + eps
    t = low * _sample(high / low, heads)
    return scale, shift, _rounded(_solve(s, shift, t - eps, t)[0], dtype)


def fit_error(
    s: Array, b: Array, a: Array, eps: float, lo: float, hi: float, u: float, reads: float, dot: int = 0
) -> tuple[float, float]:
    """For v in [lo, hi] upper bounds of |S(v) sqrt(v + eps) - 1| and of what evaluating the heads adds to it.

    *Fit.* Cells with centre c and half width w. With D_k the difference of the Taylor coefficients of S and
    (v + eps)^(-1/2) at c, |S - f| <= sum_k |D_k| w^k + tails. The coefficients of a sigmoid are polynomials in it.
    Tails: on |Im z| <= 2 a sigmoid is at most 1.1 min(1, e^(Re z)), so Cauchy's estimate with radius 2 bounds its k-th
    coefficient by 1.1 min(1, e^(z+2)) / 2^k; those of (t+x)^(-1/2) are at most t^(-1/2-k), a geometric tail. This
    float64 evaluation itself errs: every sigmoid by 4 u64 (|b| + |s v|) + 8 u64 relatively, and a polynomial of degree
    k+1 that many times more, against the sum of its absolute terms.

    *Evaluation* with roundoff u (lemma A5). Logits err by d = u|s v| + u|z|; the larger of the logit and 0 is
    subtracted exactly; two exponentials, a sum and a quotient follow: a sigmoid errs by
    (1 - sigmoid) expm1(d + 2 EXP_ULPS u) + gamma(3) relatively. `reads` more roundings for values, products and the sum
    over heads. Where the logit is one inner product of `dot` roundings instead (shift included, in any order), it errs
    by d = gamma(dot) (|s v| + |b|).
    """
    u64 = 2.0**-53
    count = max(16, math.ceil(CELLS * math.log((hi + eps) / (lo + eps))))
    edge = np.exp(np.linspace(math.log(lo + eps), math.log(hi + eps), count + 1)) - eps
    edge[0], edge[-1] = lo, hi
    left, right = edge[:-1, None], edge[1:, None]
    centre = (left + right) / 2
    half = up(np.maximum(centre - left, right - centre))
    t = centre + eps
    top = np.sqrt(right[:, 0] + eps)
    with np.errstate(over="ignore", under="ignore"):
        sigmoid = 1 / (1 + np.exp(s * centre - b))
        slip = 4 * u64 * (np.abs(b) + np.abs(s * right)) + 8 * u64
        powers = np.cumprod(np.broadcast_to(sigmoid, (ORDER + 1, *sigmoid.shape)), axis=0)
        bound, reach = np.zeros(count), np.ones(count)
        for k, row in enumerate(_sigmoid_coefficients(ORDER)):
            size = np.abs(a) * np.abs(s) ** k * np.tensordot(np.abs(row), powers[: k + 1], 1)
            ours = (a * (-s) ** k * np.tensordot(row, powers[: k + 1], 1)).sum(-1)
            target = math.comb(2 * k, k) * (-0.25) ** k * t[:, 0] ** (-0.5 - k)
            noise = (size * (slip * (k + 1) + (4 * (k + 3) + 4 * len(a)) * u64)).sum(-1)
            bound += (np.abs(ours - target) + noise + (4 * k + 16) * u64 * np.abs(target)) * reach
            reach = up(reach * half[:, 0])
        ends = np.stack([b - s * left, b - s * right])
        worst = np.minimum(1.0, np.exp(ends.max(0) + slip + 2))
        tail = (1.1 * np.abs(a) * worst * (np.abs(s) * half / 2) ** (ORDER + 1)).sum(-1)
        ratio = (half / (t - half))[:, 0]
        tail += t[:, 0] ** -0.5 * ratio ** (ORDER + 1) / (1 - ratio)
        fitted = up((bound + tail) * top, 64 + 4 * len(a))
        # A sigmoid and one minus it are largest at an end of the cell.
        high = up(1 / (1 + np.exp(-(ends.max(0) + slip))), 16)
        rest = up(1 / (1 + np.exp(ends.min(0) - slip)), 16)
        d = u * np.abs(s) * right * (1 + u) + u * (np.abs(ends).max(0) + slip)
        d = np.maximum(d, gamma(dot, u) * (np.abs(s) * right + np.abs(b)))
        d = up(d + 2 * EXP_ULPS * u, 16)
        relative = up(rest * np.expm1(d) * (1 + gamma(3, u)) + gamma(3, u), 16)
        read = gamma(reads, u)
        evaluated = up((np.abs(a) * high * (relative + read * (1 + relative))).sum(-1) * top, 4 * len(a) + 32)
    return float(fitted.max()), float(evaluated.max())


def layer_error(
    scale: Array, b: Array, a: Array, width: int, eps: float, lo: float, hi: float, u: float
) -> tuple[float, float]:
    """`fit_error` of heads in a layer of `network.AttentionLayer` that norm rows of `width` channels.

    Logit: the query scale * c, its inner product with the key, the shift as one more term: width + 2 roundings.
    Result: weight times value, and the output projection, an inner product with one term for each head.
    """
    return fit_error(scale * width, b, a, eps, lo, hi, u, reads=len(scale) + 1, dot=width + 2)


@lru_cache(maxsize=4)
def _sigmoid_coefficients(order: int) -> tuple[Array, ...]:
    """Row k: the coefficients, from sigma^1 on, of the polynomial sigma^(k)/k! in sigma; sigma' = sigma - sigma^2."""
    poly, rows = np.array([0.0, 1.0]), []
    for k in range(order + 1):
        rows.append(poly[1:] / math.factorial(k))
        poly = np.convolve(poly[1:] * np.arange(1, len(poly)), [0.0, 1.0, -1.0])
    return tuple(rows)


def _rounded(x: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).double().numpy()


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
