"""Linear functions and squares out of softmax: Richardson weights over hot heads, and how far they are off (C2, F2).

Two families of heads are odd analytic functions of their logit z, times a constant:

    {state: s z, sink: 0}, values {1, -1}:                   tanh(s z / 2)               (C2)
    {token: +-s z, sink: log M}, values {1, 0}, M huge:      sinh(s z) / M               (F2, the difference of both)

and the sum of the two heads of F2 is cosh(s z)/M, from which the same weights over s_j make z^2.

With L scales s_j the weights c_j = (1/s_j) prod_{k != j} s_k^2 / (s_k^2 - s_j^2) cancel the powers 3, 5, ..., 2L-1 of z
in sum_j c_j sinh(s_j z) (and in the same sum of tanh), so that what is left is z + O(prod s_j^2 z^(2L+1)). Small scales
make the truncation small and the rounding large, by sum_j |c_j|; the tables below sit where both meet for |z| <= 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from ..certificates.rounding import UNIT, exp_ulps, gamma
from ..dtypes import SHIPPED
from ..errors import ArgumentError

# Number of scales and smallest scale, where truncation and rounding meet. tanh has poles at distance pi / s and wants
# smaller scales than sinh and cosh, which have none.
PAIRS = {torch.float64: (4, 1 / 49), torch.float32: (3, 1 / 8)}  # of tanh, for |z| <= 1
LEVELS = {torch.float64: (5, 1 / 12), torch.float32: (4, 1 / 3)}  # of sinh, for |z| <= 1
EVENS = {torch.float64: (5, 1 / 4), torch.float32: (4, 1.0)}  # of cosh, for |z| <= 1/2
# log M: the top of a binade, where the rounding of logits is still half of what it is beyond; M is 2e27 and 8e6.
LOG_SINK = {torch.float64: 63.0, torch.float32: 15.875}
# A mean square is no fixed point that a factor 1 + n/M leaves alone: less bias, for coarser logits.
EVEN_SINK = {torch.float64: 63.0, torch.float32: 21.0}


@dataclass(frozen=True)
class Extrapolation:
    """Scales s_j and weights c_j with sum_j c_j sinh(s_j z) = z up to order 2L + 1."""

    scales: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.scales or len(set(self.scales)) != len(self.scales) or min(self.scales) <= 0:
            raise ArgumentError(f"the scales of an extrapolation are different positive numbers, got {self.scales}")

    @property
    def amplification(self) -> float:
        """sum |c_j|: what an error of one head costs."""
        return math.fsum(map(abs, self.weights))

    def truncation(self, reach: float, growth: float = 1.0) -> float:
        """A bound of |sum_j c_j f(s_j z) - z| for |z| <= reach, f an odd series with coefficients <= growth/(2k+1)!.

        The remainder of interpolating f(s z)/s at s^2 = 0 is prod s_j^2 z^(2L+1) times a divided difference of a series
        whose coefficients are at most those of sinh, taken at points below the largest scale (lemma F2).
        """
        power = 2 * len(self.scales) + 1
        tail = math.cosh(max(self.scales) * reach)
        return 1.01 * growth * math.prod(s * s for s in self.scales) * reach**power * tail / math.factorial(power)


def richardson(count: int, smallest: float, dtype: torch.dtype) -> Extrapolation:
    """Scales smallest, 2 smallest, ..., rounded to `dtype`, and the exact weights for the rounded scales.

    >>> two = richardson(2, 0.125, torch.float64)
    >>> sum(c * math.sinh(s) for s, c in zip(two.scales, two.weights)) - 1 < 1e-5
    True
    """
    scales = [Fraction(float(torch.tensor(smallest * (j + 1), dtype=dtype))) for j in range(count)]
    weights = []
    for j, own in enumerate(scales):
        weight = 1 / own
        for k, other in enumerate(scales):
            if k != j:
                weight *= other**2 / (other**2 - own**2)
        weights.append(float(weight))
    return Extrapolation(tuple(map(float, scales)), tuple(weights))


def squares(count: int, smallest: float, dtype: torch.dtype) -> Extrapolation:
    """Scales smallest, 2 smallest, ... and weights with sum_j c_j (cosh(s_j z) - 1) = z^2 up to order 2L + 2.

    >>> two = squares(3, 0.25, torch.float64)
    >>> abs(sum(c * (math.cosh(s) - 1) for s, c in zip(two.scales, two.weights)) - 1) < 1e-5
    True
    """
    odd = richardson(count, smallest, dtype)
    return Extrapolation(odd.scales, tuple(2 * c / s for s, c in zip(odd.scales, odd.weights, strict=True)))


@functools.cache
def evens(dtype: torch.dtype) -> Extrapolation:
    """The scales of the heads that read a mean square of numbers up to 1/2."""
    return squares(*EVENS[built(dtype)], dtype)


@functools.cache
def pairs(dtype: torch.dtype) -> Extrapolation:
    """The scales of the prediction heads; their weights are those of 2 tanh(s z / 2)."""
    return richardson(*PAIRS[built(dtype)], dtype)


@functools.cache
def levels(dtype: torch.dtype) -> Extrapolation:
    """The scales of the aggregation heads."""
    return richardson(*LEVELS[built(dtype)], dtype)


def built(dtype: torch.dtype) -> torch.dtype:
    """The dtype, if in-context networks are built in it."""
    if dtype not in SHIPPED:
        raise ArgumentError(f"in-context networks are built in float32 or float64, not {dtype}")
    return dtype


def prediction_error(reach: float, width: int, absolute: float, dtype: torch.dtype) -> float:
    """|LinearRead - w.x| for |w.x| <= reach; `absolute` bounds sum_j |x_j w_j|, `width` terms rounded in any order."""
    table, u = pairs(dtype), UNIT[dtype]
    # 2 tanh(s z/2) = sum_k b_k (s z)^(2k+1), |b_k| <= 9.87 pi^-(2k+2); the interpolation at s^2 = 0 leaves
    # prod s_j^2 times complete homogeneous sums of s^2, binomial(k, L) of them in degree k - L.
    count = len(table.scales)
    ratio = (max(table.scales) * reach / math.pi) ** 2
    if not ratio < 1:
        return math.inf  # beyond the poles of tanh the series says nothing
    truncation = 9.87 * math.prod(s * s for s in table.scales) * reach ** (2 * count + 1)
    truncation *= math.pi ** -(2 * count + 2) * (1 - ratio) ** -(count + 1)
    slopes = math.fsum(s * abs(c) for s, c in zip(table.scales, table.weights, strict=True))
    logits = float(gamma(width + 3, u)) * absolute * slopes
    # a head of two slots: 1.5 u for exponentials within 3 u (A5), 7 u for its sums and quotient (R5); the projection
    heads = (10 + count) * u * 2 * table.amplification
    return 1.01 * (truncation + logits + heads)


def aggregation_error(reach: float, count: int, dtype: torch.dtype) -> float:
    """|sum_i w_i v_i - sum_i r_i v_i| <= this times sqrt(count) ||V||_F, for |r_i| <= reach and `count` data tokens.

    Truncation, the finite M, and the rounding of logits, sums in any order and the last projection (F2).
    """
    table, u = levels(dtype), UNIT[dtype]
    sharp, mass = max(table.scales), math.exp(LOG_SINK[dtype])
    grown = math.exp(sharp * reach)
    bias = count * grown / mass  # the denominator is M + sum exp, not M
    logit = float(gamma(8, u)) * sharp * reach + 2 * u * (LOG_SINK[dtype] + sharp * reach) + (exp_ulps() + 0.1) * u
    relative = math.expm1(logit) + float(gamma(2 * count + 10, u)) + float(gamma(2 * len(table.scales) + 8, u))
    return 1.01 * (table.truncation(reach) + (bias + relative) * table.amplification * grown)
