"""The loop around a block: apply it, watch it, stop it. The only arithmetic here is the comparison that stops.

Losses that are not quadratic: a few runs of a frozen block, each with the step size its curvature deserves.

A stage looks at the Hessian where it stands, takes the network of that condition number and the step size of that
curvature (which is part of the prompt), and runs to a moderate tolerance; near the optimum the Hessian no longer
changes, and the last stage runs to the end. A stage that made the objective worse is undone and repeated with a quarter
of the step. The Hessian and the objective are looked at outside attention, to choose the step size and for nothing
else; `Scaling.outside` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..dtypes import Array
from .blocks import Block, Lean, frozen
from .certificate import ConvergenceCertificate, Made, composite
from .heads import Channels
from .problem import Problem
from .prompt import AFFINE, MARGIN, STOPPING, Scaling, doublings_for, penalty_tokens, step_size, tensor

CHECK = 8  # steps between two looks at the state
FLOOR = {torch.float64: 1e-10, torch.float32: 1e-3}  # steps this small that shrink no further are rounding

SMALL = 1 << 18  # entries of a prompt below which one thread is faster
SMALLEST = 1e-3  # weights below this, in the prompt's units, are judged by their absolute error


@dataclass(frozen=True)
class Run:
    """What applying a block `steps` times gave."""

    state: Tensor
    steps: int
    change: float  # the last step, relative to the weights
    converged: bool
    diverged: bool = False
    trajectory: tuple[Tensor, ...] = field(default=(), repr=False)

    def path(self) -> Array:
        """The weights after every step, (steps + 1, ..., K, d), in the prompt's units."""
        return torch.stack(self.trajectory).double().numpy()


class Step(Protocol):
    """What `run` applies: a map of states that knows where in a state the weights are."""

    @property
    def dtype(self) -> torch.dtype: ...

    def weights_of(self, state: Tensor, /) -> Tensor: ...

    def __call__(self, state: Tensor, data: Tensor, penalties: Tensor | None, /) -> Tensor: ...


@contextmanager
def few_threads(entries: int) -> Iterator[None]:
    """One thread for small prompts: handing tiny operations to a pool costs more than they do."""
    before = torch.get_num_threads()
    if entries >= SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    block: Block | Step,
    state: Tensor,
    data: Tensor,
    penalties: Tensor | None = None,
    *,
    rho: float,
    tol: float,
    max_iter: int,
    record: bool = True,
) -> Run:
    """Apply `block` until the estimated distance to the fixed point, |step|/(1 - rho), is below tol of the weights.

    Also stops where the steps have stopped shrinking (rounding), and where the state leaves every bound. A `Block` is
    evaluated without the pairs of tokens that its masks hide (`lean`).
    """
    with torch.no_grad(), few_threads(data.numel()):
        if isinstance(block, Block):
            return _run(Lean(block), state, data.clone(), penalties, rho, tol, max_iter, record)
        return _run(block, state, data, penalties, rho, tol, max_iter, record)


def _run(
    block: Step,
    state: Tensor,
    data: Tensor,
    penalties: Tensor | None,
    rho: float,
    tol: float,
    max_iter: int,
    record: bool,
) -> Run:
    window = max(64, math.ceil(6 / max(1 - rho, 1e-9)))
    path = [block.weights_of(state)] if record else []
    best, best_at, change = math.inf, 0, math.inf
    for t in range(1, max_iter + 1):
        following = block(state, data, penalties)
        if record:
            path.append(block.weights_of(following))
        if t % CHECK == 0 or t == max_iter or t == 1:
            new, old = block.weights_of(following), block.weights_of(state)
            size = float(new.abs().max())
            moved = float((new - old).abs().max())
            if not math.isfinite(size):
                return Run(state, t - 1, math.inf, False, True, tuple(path[:-1]))
            change = moved / max(size, SMALLEST)
            if (change <= tol * (1 - rho) and t > 1) or moved == 0:
                return Run(following, t, change, True, False, tuple(path))
            if change < 0.7 * best:
                best, best_at = change, t
            elif t - best_at > window and change < FLOOR[block.dtype]:
                return Run(following, t, change, True, False, tuple(path))
        state = following
    return Run(state, max_iter, change, change <= FLOOR[block.dtype] * (1 - rho), False, tuple(path))


def contraction(kind: str, doublings: int) -> float:
    """The factor rho by which a quadratic's error shrinks in one step, for condition numbers up to 2**doublings."""
    root = 2.0 ** (doublings / 2)
    return {"plain": 1 - 1 / root**2, "heavy ball": (root - 1) / (root + 1), "nesterov": 1 - 1 / root}[kind]


STAGES = (1e-1, 1e-2, 1e-4, 1e-7)  # tolerances of the stages before the last
CLASS_MARGIN = 1.1  # the smallest curvature is kept this far above what the momentum is made for
STEP_CHOICE = "the curvatures (Hessians) and the objective between stages, which choose the step size and the momentum"


@dataclass(frozen=True, eq=False)
class Solution:
    """Where the stages ended."""

    w: Array
    network: Block
    scaling: Scaling
    trajectory: Array
    steps: int
    converged: bool
    tokens: torch.Tensor  # data tokens
    prompt: torch.Tensor  # the sequence at the end: state, data, penalties
    problem: Problem
    last: Array  # the weights of the last stage
    undone: bool = False

    def certificate(self) -> ConvergenceCertificate:
        """The last stage, audited."""
        dtype = str(self.network.dtype).removeprefix("torch.")
        made = Made("nesterov", self.network.momentum.beta, self.scaling.step, dtype, self.network.loss)
        return composite(self.problem, self.last, made, "the last stage was undone" if self.undone else "")


def solve(
    problem: Problem,
    scaling: Scaling,
    *,
    tol: float,
    max_iter: int,
    dtype: torch.dtype,
    condition: float | None = None,
    warm: bool = False,
    top: float | None = None,
) -> Solution:
    """Run the stages, `warm` only the last one; `max_iter` counts steps over all of them. `top` bounds curvatures."""
    w, value = problem.start, problem.objective(problem.start)
    paths, used, factor, stage = [w[None]], 0, 1.0, 0
    tolerances = [tol] if warm else [max(t, tol) for t in STAGES] + [tol]
    while True:
        low, high = problem.curvatures(w)
        high = MARGIN * high if top is None else top
        bounds = (low / CLASS_MARGIN, high / factor) if condition is None else (1.0, condition)
        doublings = doublings_for(*bounds)
        step = factor * step_size("nesterov", doublings, high)
        network = frozen(problem.loss, "nesterov", doublings, problem.x.shape[1], len(w), dtype,
                         problem.threshold is not None)  # fmt: skip
        rho = contraction("nesterov", doublings)
        at = network.channels
        data, penalties = prompt_of(problem, at, step, dtype)
        last = stage == len(tolerances) - 1
        limit = max_iter - used if last else min(max_iter - used, math.ceil(12 / (1 - rho)))
        done = run(network, state_of(problem, at, w, step, dtype), data, penalties, rho=rho, tol=tolerances[stage],
                   max_iter=limit)  # fmt: skip
        path = done.path()
        used += done.steps
        reached = problem.objective(path[-1]) if not done.diverged else math.inf
        worse = done.diverged or not reached <= value + 1e-9 * max(1.0, abs(value))
        if worse and factor > 1e-6 and used < max_iter:
            factor /= 4
            continue
        if not worse:
            w, value = path[-1], reached
            paths.append(path[1:])
        if last or used >= max_iter or worse:
            break
        stage, factor = stage + 1, min(1.0, 2 * factor)
    outside = (AFFINE, STEP_CHOICE, STOPPING)
    scaling = replace(scaling, spectrum=(low, high), doublings=doublings, step=step, outside=outside)
    prompt = at.sequence(state_of(problem, at, w, step, dtype), data, penalties)
    converged = done.converged and not worse
    return Solution(w, network, scaling, np.concatenate(paths), used, converged, data, prompt, problem, path, worse)


def prompt_of(
    problem: Problem, at: Channels, step: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Data tokens and penalty tokens for a step size; squared losses have penalties as data, with label 0."""
    values = step * problem.weight[:, None] * problem.x
    values[:, list(problem.fixed)] = 0.0
    data = at.data(tensor(problem.x, dtype), tensor(values, dtype), tensor(problem.y, dtype))
    if at.robust:
        data[..., at.part("q")] = tensor(problem.weight[:, None], dtype)
    if not problem.penalty.any():
        return data, None
    penalties = penalty_tokens(at, problem.penalty, step, dtype)
    if problem.loss != "linear":
        return data, penalties
    penalties[..., at.part("data")], penalties[..., at.part("pen")] = 1.0, 0.0
    return torch.cat((data, penalties)), None


def state_of(problem: Problem, at: Channels, w: Array, step: float, dtype: torch.dtype) -> torch.Tensor:
    """The state at rest at w, with its thresholds."""
    threshold = None if problem.threshold is None else tensor(step * problem.threshold, dtype)
    return at.state(tensor(w, dtype), threshold)
