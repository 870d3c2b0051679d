"""From a run that was made to its certificate: how far its weights can be from the optimum (F4).

Lemmas F4a (no momentum), F4b (heavy ball) and F4c (Nesterov's scheme, with or without a soft threshold) of
docs/theory.md bound ||w_T - w*|| by growth rho^T ||w_0 - w*|| + amplification e: what is left of the start, and what
every step adds.

A run is its weights w_0, ..., w_T, numbers that exist. Between two of them lies one application of the network, and the
exact gradient step from the first is known up to a bound of its own rounding (`Problem.gradient_error`); the difference
is what that step erred by, whatever the network did and however the prompt was rounded. The largest of them is e. What
else the lemmas need, curvatures that hold wherever the run has been and an optimum that lies there, is checked on a
ball around w_T; what cannot be shown is the `reason` of a calibrated certificate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from ..certificates.certificate import upper_text
from ..certificates.rounding import gamma, unit
from ..dtypes import Array, dtype_name
from ..errors import ArgumentError
from .extrapolation import prediction_error
from .losses import EDGE, LOSSES, U
from .problem import Mask, StatedProblem, enclosure

GROWN = 1 + 1e-9  # covers the rounding of norms and quotients below
BALLS = 8  # guesses of a radius that holds the optimum: each doubles what the last one asked for
INWARD = 1 - 1e-5  # of a radius that is shown in six digits: these may round it up by half a unit, 5e-6 of it
BEYOND = "a number of the audit lies beyond the range of float64"
KERNEL_ENTRIES = 1 << 20  # numbers of a slab of the kernel's differences alive at once: 8 MB


@dataclass(frozen=True)
class ConvergenceCertificate:
    """||w_T - w*|| <= start + steps, in the prompt's units, and what was measured.

    w* is the optimum of the data as they were given, so the rounding of the prompt is one of the errors of a step.
    `kind` is "certified" where rho, e, the curvatures and ||w_0 - w*|| are bounds, and the kernel has proved the
    distance again or can be run on a file; "analysed" where it cannot, as `remark` says; otherwise "calibrated": they
    were measured, nothing is proved, and `reason` says why. `residual` is the measured norm of the (sub)gradient at the
    end; `posterior` = residual/mu bounds the distance once more, without the history of the run, and `measured` is what
    the distance is at least: the residual less the rounding of gradients, over L; 0 where that says nothing. `depth`
    counts the applications since the last choice of a step size.
    `domain` says which queries the bound is for, where it speaks of predictions.

    `kernel` is the distance that the kernel proves from a file's data and weights (docs/kernel.md), None where it was
    not run.
    """

    kind: Literal["certified", "analysed", "calibrated"]
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
    domain: str = ""
    proof: Literal["analysis", "kernel"] = field(
        default="analysis", compare=False
    )  # as certificates of networks have it
    kernel: float | None = field(default=None, compare=False)
    remark: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rho < 1:
            raise ArgumentError(f"a contraction has a factor in [0, 1), got {self.rho!r}")
        if self.proof == "kernel" and self.kernel is None:
            raise ArgumentError("a proof by the kernel states what the kernel proves")
        if (self.kind == "calibrated") != bool(self.reason):
            raise ArgumentError("a calibrated certificate gives a reason, a certified one needs none")
        if self.kind != "calibrated":
            alone = self.kernel is None and bool(self.remark)
            object.__setattr__(self, "kind", "analysed" if alone else "certified")

    @property
    def start(self) -> float:
        """What is left of the distance at the start: growth rho^T ||w_0 - w*||."""
        # pow may be off by a unit in the last place, and its exact value grows by (1 + u)^T with a rounded rho
        left = self.growth * self.rho**self.depth * self.distance
        return _above(left * (1 + (self.depth + 8) * 2.0**-52))

    @property
    def steps(self) -> float:
        """What the errors of all steps add up to: amplification e."""
        return _above(self.amplification * self.step_error * (1 + 1e-14))

    @property
    def bound(self) -> float:
        """The sum of both terms, and of what comes aside."""
        return _above(_above(self.start + self.steps) + self.aside)

    def to_json(self) -> dict[str, Any]:
        """What is stated, and what was proved of it, in plain numbers; infinity is null."""

        def finite(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        each = {one.name: getattr(self, one.name) for one in fields(self)} | {"bound": self.bound}
        return {name: [finite(end) for end in value] if isinstance(value, tuple) else finite(value)
                for name, value in each.items()}  # fmt: skip

    def _again(self) -> list[str]:
        """What the kernel says, or why nothing."""
        if self.kernel is None:
            return [f"by the analysis alone: {self.remark}"] if self.remark else []
        return [
            f"the kernel proves {upper_text(self.kernel, 4)} from the stored data and weights; how the bound came "
            "about is as the file has it"
        ]

    def __str__(self) -> str:
        word = f"calibrated, not certified ({self.reason})" if self.kind == "calibrated" else self.kind
        factor = "" if self.growth == 1 else f"{self.growth:.4g} * "
        low, high = self.curvature
        return "\n".join(
            (
                f"{word}: ||w_T - w*|| <= {upper_text(self.bound, 4)} in the prompt's units, {self.loss}, {self.dtype}",
                f"  start  {factor}rho^T ||w_0 - w*|| = {upper_text(self.start, 4)}"
                f"   (rho = {self.rho:.6g}, T = {self.depth}, ||w_0 - w*|| <= {upper_text(self.distance, 4)})",
                f"  steps  {self.amplification:.4g} * e = {upper_text(self.steps, 4)}"
                f"   (e = {upper_text(self.step_error, 4)} in each step)",
                *([f"  aside  {upper_text(self.aside, 4)}   ({LOSSES[self.loss].aside})"] if self.aside else ()),
                *([f"  domain {self.domain}"] if self.domain else ()),
                f"  measured at the end: residual {self.residual:.3e}, curvatures in [{low:.3g}, {high:.3g}], so the "
                f"distance is at most {upper_text(self.posterior, 4)}",
                *self._again(),
            )
        )


def _above(x: float) -> float:
    """The next number above, for what one rounding may have lowered; zero is zero."""
    return math.nextafter(x, math.inf) if x > 0 else x


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


@dataclass(frozen=True)
class Made:
    """How a run was made."""

    kind: str
    beta: float
    step: float
    dtype: str
    loss: str


def _norm(vectors: Array) -> float:
    """The largest norm of vectors (..., K, d), all of a vector's entries together; infinite where it is unknown."""
    largest = float(np.sqrt((vectors * vectors).sum(axis=(-2, -1))).max(initial=0.0)) * GROWN
    return math.inf if math.isnan(largest) else largest


def _at_least(gradient: Array, off: float, high: float) -> float:
    """What the distance is at least, for curvatures up to `high` and gradients that are known up to `off`."""
    found = (_norm(gradient) / GROWN**2 - off) / (high * GROWN)
    return max(found, 0.0) if math.isfinite(found) else 0.0


def audit(problem: StatedProblem, path: Array, made: Made, reason: str = "") -> ConvergenceCertificate:
    """The certificate of a run; where targets were fitted side by side, the worst of theirs.

    Coordinates that are not fitted are constraints. The run is audited with them where they must be, so that whatever
    their drift did to a step is an error of that step; and how far they are off at the end comes aside.
    """
    drift = problem.drift(path[-1] if np.isfinite(path).all() else path[0])
    with np.errstate(over="ignore", invalid="ignore"):  # numbers beyond float64 are objected to: `BEYOND`
        found = _audit(problem, np.where(np.isfinite(path), problem.pinned(path), path), made, reason)
    return replace(found, aside=found.aside + drift, posterior=found.posterior + drift) if drift > 0 else found


def _audit(problem: StatedProblem, path: Array, made: Made, reason: str) -> ConvergenceCertificate:
    if made.kind != "heavy ball":
        return composite(problem, path, made, reason)
    lower, upper, error = problem.hessians(np.zeros((1, path.shape[2])), 0.0, problem.free)
    curvature = (enclosure(lower, error)[0], enclosure(upper, error)[1])
    found = []
    for k in range(path.shape[1]):
        own, each = replace(problem, y=problem.y[:, [k]]), path[:, [k]]
        found.append(quadratic(each, own.gradients(each), own.gradient_error(each), curvature, made, reason))
    return worst(found)


def worst(found: list[ConvergenceCertificate]) -> ConvergenceCertificate:
    """The certificate that speaks for all: one that proves nothing if there is one, and the largest bound of those;
    its posterior is the largest of all, what it says of the distance at least is so of one."""
    most = max(found, key=lambda certificate: (certificate.kind == "calibrated", certificate.bound))
    return replace(most, posterior=max(each.posterior for each in found))


def quadratic(
    path: Array, gradients: Array, error: Array, curvature: tuple[float, float], made: Made, reason: str = ""
) -> ConvergenceCertificate:
    """Heavy ball on a quadratic (F4b). path and gradients (T + 1, K, d); `error` bounds an entry of the gradients."""
    low, high = curvature
    root, alpha = math.sqrt(made.beta), made.step
    apart = (1 - made.beta) / (1 + root)  # 1 - root, without its cancellation
    before = np.concatenate((path[:1], path[:-2]))
    exact = (1 + made.beta) * path[:-1] - made.beta * before - alpha * gradients[:-1]
    rounding = alpha * error + 8 * U * np.abs(path).max(axis=0)
    step_error = _norm(path[1:] - exact) + _norm(rounding[None])
    residual = _norm(gradients[-1:]) + _norm(error[None])
    if not reason and not np.isfinite(path).all():
        reason = "the run left every bound"
    if not reason and not math.isfinite(step_error + residual):
        reason = BEYOND
    if not reason and not low > 0:
        reason = "the data do not determine the weights"
    if not reason and not (alpha * low >= apart**2 * GROWN and alpha * high * GROWN <= (1 + root) ** 2):
        reason = f"the condition number may exceed what the momentum is made for: curvatures in [{low:.3g}, {high:.3g}]"
    mu = low if low > 0 else apart**2 / alpha
    depth, rho = len(path) - 1, math.nextafter(root * (1 + 4 * U), 1.0)
    growth, amplification = factors("heavy ball", rho, depth)
    posterior = residual / mu * GROWN
    return ConvergenceCertificate(
        kind="calibrated" if reason else "certified", rho=rho, depth=depth,
        distance=_norm(path[:1] - path[-1:]) + posterior, step_error=step_error,
        growth=growth, amplification=amplification * GROWN, residual=residual,
        measured=_at_least(gradients[-1:], _norm(error[None]), max(high, mu)), posterior=posterior,
        curvature=curvature, dtype=made.dtype, loss=made.loss, reason=reason,
    )  # fmt: skip


def composite(problem: StatedProblem, path: Array, made: Made, reason: str = "") -> ConvergenceCertificate:
    """Nesterov's scheme on a convex problem, with a soft threshold where it has one (F4c). path (T + 1, K, d)."""
    if not np.isfinite(path).all():
        path, reason = path[:1], reason or "the run left every bound"
    threshold = np.zeros(path.shape[-1]) if problem.threshold is None else problem.threshold
    live = problem.free if problem.threshold is None else problem.free & (path != 0).any(axis=(0, 1))
    common = (path[-1] - problem.loss.grounded(path)[-1])[:, problem.penalty > 0]
    aside = float(np.linalg.norm(common)) * GROWN  # what all classes share is 0 at the optimum
    path = problem.loss.grounded(path)
    end, before = path[-1], np.concatenate((path[:1], path[:-1]))
    points = (path + made.beta * (path - before))[:-1] if len(path) > 1 else path
    following = path[1:] if len(path) > 1 else path
    own = np.concatenate((points, path[:1], path[-1:]))
    gradients = problem.loss.grounded(problem.gradients(own))
    error = problem.gradient_error(own) + 6 * U * threshold
    slack = _norm(error[None][..., live])
    apart = (points - following) / made.step - gradients[:-2] if len(path) > 1 else np.zeros_like(points)
    off = _least(apart, following, threshold)[..., live]
    rounding = 6 * U * np.abs(path).max(axis=0) / made.step
    e = _norm(off) + slack + _norm(rounding[None][..., live])
    least = np.where(live, _least(-gradients[-1:], path[-1:], threshold), 0.0)
    residual = _norm(least) + slack
    first = _norm(_least(-gradients[-2:-1], path[:1], threshold)[..., live]) + slack

    spread = max(_norm(path[..., live] - end[:, live]), _norm(points[..., live] - end[:, live])) * GROWN
    low, high, ball = _on_a_ball(problem, end, live, spread, residual)
    root_q = (1 - made.beta) / (1 + made.beta)
    mu, top = root_q * root_q / made.step, 1 / made.step
    reason = reason or _objection(low, high, mu, top, residual, ball)
    if not reason and not math.isfinite(e + residual + first + spread):
        reason = BEYOND
    mu_known = low if low > 0 else mu
    posterior = residual / mu_known * GROWN
    distance = _norm(path[:1][..., live] - end[:, live]) + posterior
    # where the optimum has the signs of the end, and subgradients differ as gradients do
    smooth = np.abs(end) > (-1.0 if problem.threshold is None else posterior)
    if not reason and problem.threshold is not None:
        idle = problem.free & ~live  # |H_jS v| <= sqrt(H_jj v.H_SS v): of what is not in use, the diagonal is enough
        _, upper, off_by = problem.hessians(end, posterior, idle) if idle.any() else (0, np.zeros((0, 0)), 0.0)
        pull = np.sqrt((np.diag(upper) + off_by) * high) * posterior * GROWN
        if (((np.abs(gradients[-1]) + error)[..., idle] + pull) * GROWN >= threshold[idle]).any():
            reason = "an unused column is too near to being used"
    gap = first * distance
    if problem.threshold is None:
        gap = min(gap, 0.5 * top * distance * distance)
    growth = math.sqrt(1 + 2 * gap / (mu * distance * distance)) if 0 < distance < math.inf else 1.0
    rho = min(1 - U, math.nextafter(math.sqrt(max(0.0, 1 - root_q * (1 - 8 * U))) * (1 + 4 * U), 1.0))
    amplification = factors("nesterov", rho, 1)[1]
    return ConvergenceCertificate(
        kind="calibrated" if reason else "certified", rho=rho, depth=len(path) - 1, distance=distance,
        step_error=made.step * e, growth=growth * GROWN, amplification=amplification * GROWN,
        residual=residual, measured=_at_least(smooth * least, slack, max(high, mu_known)), posterior=posterior + aside,
        curvature=(low, high), dtype=made.dtype, loss=made.loss, reason=reason, aside=aside,
    )  # fmt: skip


def _least(subgradient: Array, w: Array, threshold: Array) -> Array:
    """The smallest vector in subgradient minus the subdifferential of sum_j threshold_j |w_j|."""
    return np.asarray(
        subgradient - np.where(w != 0, threshold * np.sign(w), np.clip(subgradient, -threshold, threshold))
    )


def _on_a_ball(
    problem: StatedProblem, w: Array, live: Mask, spread: float, residual: float
) -> tuple[float, float, float]:
    """Bounds of the curvature on a ball around w that holds the run and, if possible, the optimum; and its radius."""
    low = high = ball = 0.0
    for _ in range(BALLS):
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


def with_scale(
    problem: StatedProblem, w: Array, epsilon: float, fixed: ConvergenceCertificate
) -> ConvergenceCertificate:
    """The certificate of a run at a fixed scale, with what the scale itself can be off (lemma F4d).

    In the prompt's units the scale is tau = EDGE/epsilon. On the samples that stay on the slope within a ball the joint
    Hessian is sum_i weight_i u_i u_i^T / tau, u_i = (x_i, -r_i/tau).
    """
    tau, x, r = EDGE / epsilon, problem.x[:, problem.free], (problem.x @ w.T - problem.y)[:, 0]
    off = problem.residual_error(w[None])[0][:, 0] + 8 * U * np.abs(r)
    error = problem.gradient_error(w[None])
    g = (np.abs(problem.gradients(w[None])[0]) + error)[0, problem.free] / tau
    clipped = np.clip(r, -EDGE, EDGE) / tau
    own = 0.5 * abs(1 - float(problem.weight @ clipped**2))
    own += epsilon * float(problem.weight @ off) / tau + (len(x) + 16) * U * epsilon**2
    residual = math.hypot(float(np.linalg.norm(g)), own) * GROWN
    rows = np.concatenate((x, -r[:, None] / tau), axis=1)
    mu, ball = 0.0, 4 * residual
    for _ in range(BALLS):
        if not ball < tau / 2:
            break
        # of r_i/tau, anywhere on the ball
        moved = ball * np.linalg.norm(rows, axis=1) * GROWN / (tau - ball) + off / tau
        sure = np.abs(r) / tau + moved < epsilon * (1 - 8 * U)
        kept = rows[sure] * np.sqrt(problem.weight[sure])[:, None]
        low = enclosure(kept.T @ kept, (len(x) + 24) * U * float((kept * kept).sum()))[0]
        shift = float(np.sqrt(problem.weight[sure] @ moved[sure] ** 2)) * GROWN
        mu = max(0.0, math.sqrt(max(low, 0.0)) / GROWN - shift) ** 2 / (tau + ball) / GROWN
        if not mu > 0 or residual / mu <= ball:
            break
        ball = 2 * residual / mu
    joint = residual / mu * GROWN if mu > 0 else math.inf
    if fixed.kind == "certified" and not (mu > 0 and joint <= ball < tau / 2):
        reason = "the joint curvature of weights and scale could not be bounded from below near the end"
        return replace(fixed, kind="calibrated", reason=reason, measured=0.0)
    if fixed.kind != "certified":
        return replace(fixed, measured=0.0)  # it was measured to the optimum at this scale, which may be farther
    return replace(fixed, aside=joint + fixed.posterior, posterior=joint, measured=0.0)


def kernel_descent(
    rows: Array, radius: float, path: Array, labels: Array, alpha: float, made: Made
) -> ConvergenceCertificate:
    """The heavy ball on the dual weights of kernel ridge regression, path (T + 1, n, K): gradients K a + alpha a - y.

    All in chunks, without attention. Rows are off the exact ones by 4 u |x|, and so is what is under the exponential.
    """
    n, d = rows.shape
    flat, most, size = path.transpose(1, 0, 2).reshape(n, -1), np.abs(path).max(axis=0), np.linalg.norm(rows, axis=1)
    out, error, sums = np.empty_like(flat), np.empty_like(most), np.empty(n)
    for i in range(0, n, max(1, KERNEL_ENTRIES // (n * d))):
        part = slice(i, i + max(1, KERNEL_ENTRIES // (n * d)))
        squares = ((rows[part, None] - rows) ** 2).sum(axis=-1)
        kernel = np.exp(-0.5 * radius**2 * squares)
        off = radius**2 * (5 * U * np.sqrt(squares) * (size[part, None] + size) + float(gamma(d + 8, U)) * squares)
        wrong = 1.01 * kernel * np.expm1(off + 6 * U)
        out[part] = kernel @ flat
        error[part] = wrong @ most + float(gamma(n + 2, U)) * (kernel @ most)
        sums[part] = (kernel + wrong).sum(axis=1)
    gradients = out.reshape(n, len(path), -1).transpose(1, 0, 2) + alpha * path - labels
    error = 1.001 * error + 8 * U * (alpha * most + np.abs(labels) + most * sums[:, None])
    curvature = alpha * (1 - 8 * U), float(sums.max()) * (1 + (n + 4) * U) + alpha
    ones = [[k] for k in range(path.shape[2])]
    return worst([quadratic(path[..., k], gradients[..., k], error[..., k], curvature, made) for k in ones])


def kernel_mean(rows: Array, values: Array, radius: float, reach: float, dtype: torch.dtype) -> ConvergenceCertificate:
    """Nadaraya-Watson has no steps: the error of its one head, for queries within the radius of the data (A5, R5).

    Logits are off by the norm's read, by the rounding of the inner product and by that of the prompt. However far they
    are off, a mean of the values lies between them. `reach` is the radius in the units of the data.
    """
    (n, d), u = rows.shape, unit(dtype)
    off = radius**2 * (prediction_error(1.0, d, 1.0, dtype) + 4 * float(gamma(d + 8, u))) + 4 * u
    spread = float((values.max(axis=0) - values.min(axis=0)).max(initial=0.0))
    share = 0.5 * math.expm1(2 * off) if off < 1 else 1.0
    error = (min(share, 1.0) * spread + float(gamma(2 * n + 16, u)) * float(np.abs(values).max(initial=0.0))) * GROWN
    return ConvergenceCertificate(
        kind="certified", rho=0.0, depth=1, distance=spread, step_error=error, growth=1.0, amplification=1.0,
        residual=0.0, measured=0.0, posterior=error, curvature=(1.0, 1.0), dtype=dtype_name(dtype),
        loss="kernel mean", domain=f"queries within {INWARD * reach:.6g} of the mean of the rows",
    )  # fmt: skip
