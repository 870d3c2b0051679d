"""Losses that are not quadratic: a few runs of a frozen block, each with the step size its curvature deserves.

A stage looks at the Hessian where it stands, takes the network of that condition number and the step size of that
curvature (which is part of the prompt), and runs to a moderate tolerance; near the optimum the Hessian no longer
changes, and the last stage runs to the end. A stage that made the objective worse is undone and repeated with a quarter
of the step. The Hessian and the objective are looked at outside attention, to choose the step size and for nothing
else; `Scaling.outside` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from .blocks import Block, Loss, frozen
from .certificate import ConvergenceCertificate, factors
from .prompt import (
    MARGIN,
    OUTSIDE,
    Array,
    Scaling,
    doublings_for,
    penalty_tokens,
    spectrum,
    start,
    step_size,
    tokens_of,
)
from .solver import contraction, run, weights

STAGES = (1e-1, 1e-2, 1e-4, 1e-7)  # tolerances of the stages before the last
STEP_CHOICE = "the curvature and the objective between stages, which choose the step size"


@dataclass(frozen=True, eq=False)
class Problem:
    """sum_i weight_i loss(w.x_i, y_i) + sum_j penalty_j w_j^2 / 2 + sum_j threshold_j |w_j|, in the prompt's units."""

    loss: Loss
    x: Array  # (n, d)
    y: Array  # (n, K)
    weight: Array  # (n,)
    penalty: Array  # (d,)
    objective: Callable[[Array], float]  # of w (K, d)
    hessian: Callable[[Array], Array]  # of w: (d, d), or (K d, K d)
    start: Array  # (K, d)
    threshold: Array | None = None
    edge: float = 1.0
    fixed: tuple[int, ...] = ()  # coordinates that are not fitted


@dataclass(frozen=True, eq=False)
class Solution:
    """Where the stages ended."""

    w: Array
    network: Block
    scaling: Scaling
    certificate: ConvergenceCertificate
    trajectory: Array
    steps: int
    converged: bool
    tokens: torch.Tensor


def solve(
    problem: Problem,
    scaling: Scaling,
    *,
    tol: float,
    max_iter: int,
    dtype: torch.dtype,
    condition: float | None = None,
    warm: bool = False,
) -> Solution:
    """Run the stages, `warm` only the last one; `max_iter` counts steps over all of them."""
    w, value = problem.start, problem.objective(problem.start)
    paths, used, factor, stage = [w[None]], 0, 1.0, 0
    tolerances = [tol] if warm else [max(t, tol) for t in STAGES] + [tol]
    while True:
        low, high = spectrum(problem.hessian(w))
        doublings = doublings_for(*((1.0, condition) if condition is not None else (low, MARGIN * high / factor)))
        step = factor * step_size("nesterov", doublings, MARGIN * high)
        network = frozen(problem.loss, "nesterov", doublings, dtype, problem.threshold is not None, problem.edge)
        rho = contraction(network, doublings)
        begin = state_of(problem, w, step, dtype)
        tokens, penalties = prompt_of(problem, step, dtype)
        last = stage == len(tolerances) - 1
        limit = max_iter - used if last else min(max_iter - used, math.ceil(12 / (1 - rho)))
        done = run(network, begin, tokens, penalties, rho=rho, tol=tolerances[stage], max_iter=limit)
        found = weights(network, done.state)
        used += done.steps
        reached = problem.objective(found)
        worse = done.diverged or not reached <= value + 1e-9 * max(1.0, abs(value))
        if worse and factor > 1e-6 and used < max_iter:
            factor /= 4
            continue
        if not worse:
            w, value = found, reached
            paths.append(done.path()[1:])
        if last or used >= max_iter or worse:
            break
        stage, factor = stage + 1, min(1.0, 2 * factor)
    scaling = replace(
        scaling, spectrum=(low, high), doublings=doublings, step=step, outside=(*OUTSIDE, STEP_CHOICE)
    )
    trajectory = np.concatenate(paths)
    certificate = calibrated(problem, network, w, Last(weights(network, begin), done.steps, doublings, step, low, high))
    return Solution(w, network, scaling, certificate, trajectory, used, done.converged and not worse, tokens)


def prompt_of(problem: Problem, step: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Data tokens and penalty tokens for a step size."""
    values = step * problem.weight[:, None] * problem.x
    values[:, list(problem.fixed)] = 0.0
    tokens = tokens_of(problem.x, values, problem.y, dtype)
    if not problem.penalty.any():
        return tokens, None
    return tokens, penalty_tokens(problem.penalty, step, problem.y.shape[1], dtype)


def state_of(problem: Problem, w: Array, step: float, dtype: torch.dtype) -> torch.Tensor:
    """The state at rest at w, with the thresholds of a soft threshold behind it."""
    state = start(w, dtype)
    if problem.threshold is None:
        return state
    level = torch.from_numpy(step * problem.threshold).to(dtype).expand(len(w), -1)
    return torch.cat((state, level), dim=-1)


@dataclass(frozen=True, eq=False)
class Last:
    """The last stage: where it began, how long it was, its class, step size and curvatures."""

    begin: Array
    steps: int
    doublings: int
    step: float
    low: float
    high: float


@torch.no_grad()
def calibrated(problem: Problem, network: Block, w: Array, last: Last) -> ConvergenceCertificate:
    """Both terms for the last stage, with measured constants: one step more shows its error and what is left."""
    dtype = network.dtype
    tokens, penalties = prompt_of(problem, last.step, dtype)
    here = torch.from_numpy(w).to(dtype)
    inexact = network.gradient(here, tokens, penalties).double().numpy()
    exact = _exact_gradient(problem, w, last.step)
    state = state_of(problem, w, last.step, dtype)
    moved = (network.weights_of(network(state, tokens, penalties)) - here).double().numpy()
    left = float(np.linalg.norm(moved)) / last.step
    rho = math.sqrt(1 - 2.0 ** (-last.doublings / 2))
    growth, amplification = factors("nesterov", rho, last.steps)
    return ConvergenceCertificate(
        kind="calibrated",
        rho=rho,
        depth=last.steps,
        distance=float(np.linalg.norm(w - last.begin)) + left / last.low,
        step_error=float(np.linalg.norm(inexact - exact)),
        growth=growth,
        amplification=amplification,
        measured=left / last.high,
        posterior=left / last.low,
        dtype=str(dtype).removeprefix("torch."),
        loss=problem.loss,
    )


def _exact_gradient(problem: Problem, w: Array, step: float) -> Array:
    """The gradient times the step size, without attention, in float64."""
    z = problem.x @ w.T
    if problem.loss == "softmax":
        e = np.exp(z - z.max(axis=1, keepdims=True))
        r = e / e.sum(axis=1, keepdims=True) - problem.y
    else:
        means: dict[str, Callable[[Array], Array]] = {"poisson": np.exp, "logistic": lambda t: 1 / (1 + np.exp(-t))}
        r = means.get(problem.loss, lambda t: t)(z) - problem.y
        if problem.loss == "huber":
            r = np.clip(r, -problem.edge, problem.edge)
    gradient = (r * problem.weight[:, None]).T @ problem.x + problem.penalty * w
    gradient[:, list(problem.fixed)] = 0.0
    return np.asarray(step * gradient)
