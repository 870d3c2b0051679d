"""How far the weights of a run can be from the optimum: what is left of the start, and what every step adds (F4).

Lemmas F4a (no momentum), F4b (heavy ball) and F4c (Nesterov's scheme, with or without a soft threshold) of
docs/theory.md bound ||w_T - w*|| by growth rho^T ||w_0 - w*|| + amplification e. `audit` finds rho, e and ||w_0 - w*||
for a run that was made; this module holds the result.

From a run that was made to its certificate: every step is compared with the exact step on the user's data.

A run is its weights w_0, ..., w_T, numbers that exist. Between two of them lies one application of the network, and the
exact gradient step from the first is known up to a bound of its own rounding (`Problem.gradient_error`); the difference
is what that step erred by, whatever the network did and however the prompt was rounded. The largest of them is e of
lemma F4. What else the lemma needs, curvatures that hold wherever the run has been and an optimum that lies there, is
checked on a ball around w_T; what cannot be shown is the `reason` of a calibrated certificate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ..certificates.certificate import upper_text
from ..certificates.rounding import UNIT
from ..dtypes import Array
from ..errors import ArgumentError
from .heads import LOG_SINK, levels, pairs
from .problem import Mask, Problem
from .spectrum import enclosure

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


U = 2.0**-53
GROWN = 1 + 1e-9  # covers the rounding of norms and quotients below


@dataclass(frozen=True)
class Made:
    """How a run was made."""

    kind: str
    beta: float
    step: float
    dtype: str
    loss: str


def _norm(vectors: Array) -> float:
    """The largest norm of vectors (..., K, d), all of a vector's entries together."""
    return float(np.sqrt((vectors * vectors).sum(axis=(-2, -1))).max(initial=0.0)) * GROWN


def quadratic(
    path: Array, gradients: Array, error: Array, curvature: tuple[float, float], made: Made, reason: str = ""
) -> ConvergenceCertificate:
    """Heavy ball on a quadratic (F4b). path and gradients (T + 1, K, d); `error` bounds an entry of the gradients."""
    low, high = curvature
    root, alpha = math.sqrt(made.beta), made.step
    before = np.concatenate((path[:1], path[:-2]))
    exact = (1 + made.beta) * path[:-1] - made.beta * before - alpha * gradients[:-1]
    rounding = alpha * error + 8 * U * np.abs(path).max(axis=0)
    step_error = _norm(path[1:] - exact) + _norm(rounding[None])
    residual = _norm(gradients[-1:]) + _norm(error[None])
    if not reason and not low > 0:
        reason = "the data do not determine the weights"
    if not reason and not (alpha * low >= (1 - root) ** 2 * GROWN and alpha * high * GROWN <= (1 + root) ** 2):
        reason = f"the condition number may exceed what the momentum is made for: curvatures in [{low:.3g}, {high:.3g}]"
    mu = low if low > 0 else (1 - root) ** 2 / alpha
    depth, rho = len(path) - 1, math.nextafter(root * (1 + 4 * U), 1.0)
    growth, amplification = factors("heavy ball", rho, depth)
    posterior = residual / mu * GROWN
    return ConvergenceCertificate(
        kind="calibrated" if reason else "certified", rho=rho, depth=depth,
        distance=_norm(path[:1] - path[-1:]) + posterior, step_error=step_error,
        growth=growth, amplification=amplification * GROWN, residual=residual, measured=residual / max(high, mu),
        posterior=posterior, curvature=curvature, dtype=made.dtype, loss=made.loss, reason=reason,
    )  # fmt: skip


def composite(problem: Problem, path: Array, made: Made, reason: str = "") -> ConvergenceCertificate:
    """Nesterov's scheme on a convex problem, with a soft threshold where it has one (F4c). path (T + 1, K, d)."""
    if not np.isfinite(path).all():
        path, reason = path[:1], reason or "the run left every bound"
    threshold = np.zeros(path.shape[-1]) if problem.threshold is None else problem.threshold
    live = problem.free if problem.threshold is None else problem.free & (path != 0).any(axis=(0, 1))
    common = (path[-1] - _grounded(problem, path)[-1])[:, problem.penalty > 0]
    aside = float(np.linalg.norm(common)) * GROWN  # what all classes share is 0 at the optimum
    path = _grounded(problem, path)
    end, before = path[-1], np.concatenate((path[:1], path[:-1]))
    points = (path + made.beta * (path - before))[:-1] if len(path) > 1 else path
    following = path[1:] if len(path) > 1 else path
    own = np.concatenate((points, path[:1], path[-1:]))
    gradients = _grounded(problem, problem.gradients(own))
    error = problem.gradient_error(own) + 6 * U * threshold
    slack = _norm(error[None][..., live])
    apart = (points - following) / made.step - gradients[:-2] if len(path) > 1 else np.zeros_like(points)
    off = _least(apart, following, threshold)[..., live]
    rounding = 6 * U * np.abs(path).max(axis=0) / made.step
    e = _norm(off) + slack + _norm(rounding[None][..., live])
    residual = _norm(_least(-gradients[-1:], path[-1:], threshold)[..., live]) + slack
    first = _norm(_least(-gradients[-2:-1], path[:1], threshold)[..., live]) + slack

    spread = max(_norm(path[..., live] - end[:, live]), _norm(points[..., live] - end[:, live])) * GROWN
    low, high, ball = _on_a_ball(problem, end, live, spread, residual)
    root_q = (1 - made.beta) / (1 + made.beta)
    mu, top = root_q * root_q / made.step, 1 / made.step
    reason = reason or _objection(low, high, mu, top, residual, ball)
    mu_known = low if low > 0 else mu
    posterior = residual / mu_known * GROWN
    distance = _norm(path[:1][..., live] - end[:, live]) + posterior
    if not reason and problem.threshold is not None:
        corner = np.abs(gradients[-1]) + error + max(high, top) * posterior
        if (corner >= threshold)[:, problem.free & ~live].any():
            reason = "an unused column is too near to being used"
    gap = first * distance
    if problem.threshold is None:
        gap = min(gap, 0.5 * top * distance * distance)
    growth = math.sqrt(1 + 2 * gap / (mu * distance * distance)) if distance > 0 else 1.0
    rho = min(1 - U, math.nextafter(math.sqrt(max(0.0, 1 - root_q * (1 - 8 * U))) * (1 + 4 * U), 1.0))
    amplification = factors("nesterov", rho, 1)[1]
    return ConvergenceCertificate(
        kind="calibrated" if reason else "certified", rho=rho, depth=len(path) - 1, distance=distance,
        step_error=made.step * e, growth=growth * GROWN, amplification=amplification * GROWN,
        residual=residual, measured=residual / max(high, mu_known), posterior=posterior + aside, curvature=(low, high),
        dtype=made.dtype, loss=made.loss, reason=reason, aside=aside,
    )  # fmt: skip


def _least(subgradient: Array, w: Array, threshold: Array) -> Array:
    """The smallest vector in subgradient minus the subdifferential of sum_j threshold_j |w_j|."""
    return np.asarray(
        subgradient - np.where(w != 0, threshold * np.sign(w), np.clip(subgradient, -threshold, threshold))
    )


def _grounded(problem: Problem, points: Array) -> Array:
    """Softmax does not see what all classes share, and at the optimum it is 0 where it is penalised: leave it out."""
    return np.asarray(points - points.mean(axis=-2, keepdims=True)) if problem.loss == "softmax" else points


def _on_a_ball(problem: Problem, w: Array, live: Mask, spread: float, residual: float) -> tuple[float, float, float]:
    """Bounds of the curvature on a ball around w that holds the run and, if possible, the optimum; and its radius."""
    low = high = ball = 0.0
    for _ in range(6):
        ball = max(2 * spread, 2 * residual / low if low > 0 else 0.0)
        lower, upper, error = problem.hessians(w, ball, live)
        if not live.any():
            return 1.0, 1.0, math.inf  # nothing is in use: zero is checked by the thresholds alone
        lower = lower + problem.shared(live, w.shape[0]) * float(np.trace(upper))
        low, high = enclosure(lower, error)[0], enclosure(upper, error)[1]
        if not low > 0 or residual / low * GROWN <= ball:
            break
    return low, high, ball


def _objection(low: float, high: float, mu: float, top: float, residual: float, ball: float) -> str:
    if not low > 0:
        return "no curvature from below on the ball that the run stayed in"
    if residual / low * GROWN > ball:
        return "the optimum may lie outside the ball that the run stayed in"
    if high * GROWN > top:
        return f"the curvature may reach {high:.3g}, beyond one over the step size, {top:.3g}"
    if mu * GROWN > low:
        return f"the curvature may be as small as {low:.3g}, below what the momentum is made for, {mu:.3g}"
    return ""
