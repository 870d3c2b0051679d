"""Linear functions out of softmax: Richardson weights over hot heads (lemmas C2 and F2).

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

from ..errors import ArgumentError

PAIRS = {torch.float64: (4, 1 / 49), torch.float32: (3, 1 / 8)}  # number of scales, smallest scale
LEVELS = {torch.float64: (5, 1 / 12), torch.float32: (4, 1 / 3)}
EVENS = {torch.float64: (5, 1 / 4), torch.float32: (4, 1.0)}
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
    return squares(*EVENS[shipped(dtype)], dtype)


@functools.cache
def pairs(dtype: torch.dtype) -> Extrapolation:
    """The scales of the prediction heads; their weights are those of 2 tanh(s z / 2)."""
    return richardson(*PAIRS[shipped(dtype)], dtype)


@functools.cache
def levels(dtype: torch.dtype) -> Extrapolation:
    """The scales of the aggregation heads."""
    return richardson(*LEVELS[shipped(dtype)], dtype)


def shipped(dtype: torch.dtype) -> torch.dtype:
    """The dtype, if in-context networks exist in it."""
    if dtype not in PAIRS:
        raise ArgumentError(f"in-context networks are built in float32 or float64, not {dtype}")
    return dtype
