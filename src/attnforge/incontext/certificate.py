"""How far the weights of a run can be from the optimum: what is left of the start, and what every step adds (F4).

Lemmas F4a (no momentum), F4b (heavy ball) and F4c (Nesterov's scheme, with or without a soft threshold) of
docs/theory.md bound ||w_T - w*|| by growth rho^T ||w_0 - w*|| + amplification e. `audit` finds rho, e and ||w_0 - w*||
for a run that was made; this module holds the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..certify.certificate import upper_text
from ..certify.rounding import UNIT
from ..errors import ArgumentError
from .extrapolation import LOG_SINK, levels, pairs

ASIDE = {"huber": "what the error of the fitted scale adds", "softmax": "what all classes share and should not"}


@dataclass(frozen=True)
class ConvergenceCertificate:
    """||w_T - w*|| <= start + steps, in the prompt's units, and what was measured.

    w* is the optimum of the data as they were given, so the rounding of the prompt is one of the errors of a step.
    `kind` is "certified" where rho, e, the curvatures and ||w_0 - w*|| are bounds; otherwise "calibrated": they were
    measured, nothing is proved, and `reason` says why. `residual` is the measured norm of the (sub)gradient at the end;
    `posterior` = residual/mu bounds the distance once more, without the history of the run, and `measured` =
    residual/L is what the distance is at least. `depth` counts the applications since the last choice of a step size.
    """

    kind: Literal["certified", "calibrated"]
    rho: float
    depth: int
    distance: float
    step_error: float
    growth: float
    amplification: float
    residual: float
    measured: float
    posterior: float
    curvature: tuple[float, float]
    dtype: str
    loss: str
    reason: str = ""
    aside: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rho < 1:
            raise ArgumentError(f"a contraction has a factor in [0, 1), got {self.rho!r}")
        if (self.kind == "certified") == bool(self.reason):
            raise ArgumentError("a calibrated certificate gives a reason, a certified one needs none")

    @property
    def start(self) -> float:
        """What is left of the distance at the start: growth rho^T ||w_0 - w*||."""
        # pow may be off by a unit in the last place, and its exact value grows by (1 + u)^T with a rounded rho
        left = self.growth * self.rho**self.depth * self.distance
        return math.nextafter(left * (1 + (self.depth + 8) * 2.0**-52), math.inf) if left > 0 else left

    @property
    def steps(self) -> float:
        """What the errors of all steps add up to: amplification e."""
        return math.nextafter(self.amplification * self.step_error * (1 + 1e-14), math.inf)

    @property
    def bound(self) -> float:
        """The sum of both terms, and of what comes aside."""
        return math.nextafter(math.nextafter(self.start + self.steps, math.inf) + self.aside, math.inf)

    def __str__(self) -> str:
        word = "certified" if self.kind == "certified" else f"calibrated, not certified ({self.reason})"
        factor = "" if self.growth == 1 else f"{self.growth:.4g} * "
        low, high = self.curvature
        return "\n".join(
            (
                f"{word}: ||w_T - w*|| <= {upper_text(self.bound, 4)} in the prompt's units, {self.loss}, {self.dtype}",
                f"  start  {factor}rho^T ||w_0 - w*|| = {upper_text(self.start, 4)}"
                f"   (rho = {self.rho:.6g}, T = {self.depth}, ||w_0 - w*|| <= {upper_text(self.distance, 4)})",
                f"  steps  {self.amplification:.4g} * e = {upper_text(self.steps, 4)}"
                f"   (e = {upper_text(self.step_error, 4)} in each step)",
                *([f"  aside  {upper_text(self.aside, 4)}   ({ASIDE[self.loss]})"] if self.aside else ()),
                f"  measured at the end: residual {self.residual:.3e}, curvatures in [{low:.3g}, {high:.3g}], so the "
                f"distance is at most {upper_text(self.posterior, 4)}",
            )
        )


def factors(kind: str, rho: float, depth: int) -> tuple[float, float]:
    """Growth of the start and amplification of the steps' errors, beside rho^T and e (F4a to F4c).

    >>> factors("plain", 0.5, 10), factors("heavy ball", 0.5, 10)
    ((1.0, 2.0), (16.0, 4.0))
    """
    if kind == "heavy ball":
        return 1 + (1 + rho) * depth, 1 / (1 - rho) ** 2
    if kind == "nesterov":  # rho = sqrt(1 - sqrt(q)), q = mu/L
        root = 1 - rho * rho
        return math.sqrt(1 + root**-2), 2 / (root * (1 - rho))
    return 1.0, 1 / (1 - rho)


def depth_for(accuracy: float, rho: float, kind: str = "heavy ball") -> int:
    """The smallest depth T at which growth rho^T is at most `accuracy`, the relative distance left of the start.

    >>> depth_for(1e-3, 0.5, "plain")
    10
    """
    if not 0 < accuracy < 1 or not 0 < rho < 1:
        raise ArgumentError(f"accuracy and rho must be in (0, 1), got {accuracy!r} and {rho!r}")
    low, high = 0, 1
    while factors(kind, rho, high)[0] * rho**high > accuracy:
        low, high = high, 2 * high
    while high - low > 1:  # the left-hand side falls once it is below 1
        middle = (low + high) // 2
        low, high = (low, middle) if factors(kind, rho, middle)[0] * rho**middle <= accuracy else (middle, high)
    return high


def prediction_error(reach: float, width: int, absolute: float, dtype: torch.dtype) -> float:
    """|LinearRead - w.x| for |w.x| <= reach; `absolute` bounds sum_j |x_j w_j|, `width` terms rounded in any order."""
    table, u = pairs(dtype), UNIT[dtype]
    # 2 tanh(s z/2) = sum_k b_k (s z)^(2k+1), |b_k| <= 9.87 pi^-(2k+2); the interpolation at s^2 = 0 leaves
    # prod s_j^2 times complete homogeneous sums of s^2, binomial(k, L) of them in degree k - L.
    count = len(table.scales)
    ratio = min(0.9, (max(table.scales) * reach / math.pi) ** 2)
    truncation = 9.87 * math.prod(s * s for s in table.scales) * reach ** (2 * count + 1)
    truncation *= math.pi ** -(2 * count + 2) * (1 - ratio) ** -(count + 1)
    slopes = math.fsum(s * abs(c) for s, c in zip(table.scales, table.weights, strict=True))
    logits = (width + 3) * u * absolute * slopes
    heads = (10 + count) * u * 2 * table.amplification
    return 1.01 * (truncation + logits + heads)


def aggregation_error(reach: float, count: int, dtype: torch.dtype) -> float:
    """|sum_i w_i v_i - sum_i r_i v_i| <= this times sqrt(count) ||V||_F, for |r_i| <= reach and `count` data tokens."""
    table, u = levels(dtype), UNIT[dtype]
    mass = math.exp(LOG_SINK[dtype])
    grown = math.exp(max(table.scales) * reach)
    bias = count * grown / mass * table.amplification * grown  # the denominator is M + sum exp, not M
    relative = (LOG_SINK[dtype] + 2 * reach + 12 + count + 2 * len(table.scales)) * u
    return 1.01 * (table.truncation(reach) + bias + relative * table.amplification * grown)
