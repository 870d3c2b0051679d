"""How far the weights of a run can be from the optimum: what is left of the start, and what every step adds (F4).

For one eigenvalue lam in [mu, L] of a quadratic the heavy ball with the constants of `Momentum.optimal` obeys
e_{t+1} = 2 rho cos(theta) e_t - rho^2 e_{t-1} - d_t, rho = sqrt(beta), so that with e_{-1} = e_0

    e_T = rho^T (U_T - rho U_{T-1}) e_0 - sum_k rho^k U_k d_{T-1-k},    U_k = sin((k+1) theta)/sin(theta), |U_k| <= k+1,

and therefore ||w_T - w*|| <= (1 + (1 + rho) T) rho^T ||w_0 - w*|| + e/(1 - rho)^2 where every step errs by at most e.
Without momentum rho = 1 - mu/L and the factors are 1 and 1/(1 - rho): lemma F4 itself. Nesterov's constant scheme takes
f(w_T) - f* <= (1 - 1/sqrt(k))^T (L + mu)/2 ||w_0 - w*||^2, k = L/mu, for every mu-convex f with curvature up to L; as
f(w) - f* >= mu/2 ||w - w*||^2, rho = sqrt(1 - 1/sqrt(k)) and the growth is sqrt(k + 1).

A step errs because heads are only nearly linear and because of rounding. With |w.x| <= z and |r| <= R on the run, the
prediction of a token errs by at most `prediction_error` and each weight of the aggregation by `aggregation_error`;
||sum_i d_i v_i|| <= ||V||_F ||d|| turns both into e.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..certify.certificate import upper_text
from ..errors import ArgumentError
from .extrapolation import LOG_SINK, levels, pairs

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class ConvergenceCertificate:
    """||w_T - w*|| <= start + steps, in the prompt's units, and what was measured.

    `kind` is "certified" for quadratic losses, where rho, e and ||w_0 - w*|| are bounds, and "calibrated" where they
    were measured on the run: then nothing is proved. `measured` and `posterior` come from the gradient at the end: the
    distance is at least ||gradient||/L and, as far as the curvature is known, at most ||gradient||/mu.
    """

    kind: Literal["certified", "calibrated"]
    rho: float
    depth: int
    distance: float
    step_error: float
    growth: float
    amplification: float
    measured: float
    posterior: float
    dtype: str
    loss: str

    def __post_init__(self) -> None:
        if not 0 <= self.rho < 1:
            raise ArgumentError(f"a contraction has a factor in [0, 1), got {self.rho!r}")

    @property
    def start(self) -> float:
        """What is left of the distance at the start: growth rho^T ||w_0 - w*||."""
        return math.nextafter(self.growth * self.rho**self.depth * self.distance * (1 + 1e-14), math.inf)

    @property
    def steps(self) -> float:
        """What the errors of all steps add up to: amplification e."""
        return math.nextafter(self.amplification * self.step_error * (1 + 1e-14), math.inf)

    @property
    def bound(self) -> float:
        """The sum of both terms."""
        return math.nextafter(self.start + self.steps, math.inf)

    def __str__(self) -> str:
        word = "certified" if self.kind == "certified" else "calibrated, not certified"
        factor = "" if self.growth == 1 else f"{self.growth:.4g} * "
        return "\n".join(
            (
                f"{word}: ||w_T - w*|| <= {upper_text(self.bound, 4)} in the prompt's units, {self.loss}, {self.dtype}",
                f"  start  {factor}rho^T ||w_0 - w*|| = {upper_text(self.start, 4)}"
                f"   (rho = {self.rho:.6g}, T = {self.depth}, ||w_0 - w*|| <= {upper_text(self.distance, 4)})",
                f"  steps  {self.amplification:.4g} * e = {upper_text(self.steps, 4)}"
                f"   (e = {upper_text(self.step_error, 4)} in each step)",
                f"  measured at the end: at least {self.measured:.3e}, at most {upper_text(self.posterior, 4)}",
            )
        )


def factors(kind: str, rho: float, depth: int) -> tuple[float, float]:
    """Growth of the start and amplification of the steps' errors, beside rho^T and e.

    >>> factors("plain", 0.5, 10), factors("heavy ball", 0.5, 10)
    ((1.0, 2.0), (16.0, 4.0))
    """
    if kind == "heavy ball":
        return 1 + (1 + rho) * depth, 1 / (1 - rho) ** 2
    if kind == "nesterov":  # rho = sqrt(1 - 1/sqrt(condition))
        root = math.sqrt(1 + (1 - rho * rho) ** -2)
        return root, root / (1 - rho)
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
