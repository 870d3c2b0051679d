"""The loop around a block: apply it, watch it, stop it; and the road from a problem to its solution.

Every regression takes the same road: prompt, block, run, audit. A stage takes the network of a condition number and the
step size of a curvature (which is part of the prompt), and runs. A quadratic without corners needs one stage, the heavy
ball. Otherwise a stage looks at the Hessian where it stands and runs Nesterov's scheme to a moderate tolerance; near
the optimum the Hessian no longer changes, and the last stage runs to the end. A stage that made the objective worse is
undone and repeated with a quarter of the step. The Hessian and the objective are looked at outside attention, to choose
the step size and for nothing else; `Scaling.outside` says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..dtypes import Array, dtype_name
from ..errors import ArgumentError
from .blocks import Block, Kind, Lean, frozen
from .certificate import ConvergenceCertificate, Made, audit
from .extrapolation import built
from .losses import LINEAR
from .problem import StatedProblem, extremes, gram
from .prompt import (
    CACHED,
    LARGEST_DOUBLINGS,
    MARGIN,
    Scaling,
    curvature_bound,
    doublings_for,
    outside,
    state_of,
    step_size,
    tokens_of,
)

CHECK = 8  # steps between two looks at the state: looks are cheap beside eight steps, and at most seven are wasted
# Steps this small that shrink no further are rounding: far above the units 2^-53 and 2^-24, as momentum amplifies them.
FLOOR = {torch.float64: 1e-10, torch.float32: 1e-3}
SMALL = 1 << 18  # entries of a prompt below which one thread is faster
SMALLEST = 1e-3  # weights below this, in the prompt's units, are judged by their absolute error
STAGES = (1e-1, 1e-2, 1e-4, 1e-7)  # tolerances before the last stage: coarse first, as the Hessian is looked at anew
CLASS_MARGIN = 1.1  # the smallest curvature is kept this far above what the momentum is made for
HOPELESS = 2.0**LARGEST_DOUBLINGS  # condition numbers beyond what any network is made for
REST = 14  # the heavy ball comes to rest, 1e-12 of the start, in about 14 sqrt(condition) steps
SMALLEST_FACTOR = 1e-6  # of a step size: below it a stage that made things worse is not tried again
PATIENCE = 16  # steps of a batch between two looks at all of its states

Method = Literal["least squares", "ridge", "lasso"]


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
    block: Block,
    state: Tensor,
    data: Tensor,
    penalties: Tensor | None = None,
    *,
    rho: float,
    tol: float,
    max_iter: int,
    record: bool = True,
    held: tuple[int, ...] = (),
) -> Run:
    """Apply `block`, without the pairs of tokens that its masks hide (`Lean`), until `repeat` stops.

    Coordinates `held` are written into the state again after every application: no gradient corrects their rounding.
    """
    lean, own = Lean(block), data.clone()
    channels = [block.channels.at(part)[j] for part in ("p", "a") for j in held]

    def step(now: Tensor) -> Tensor:
        following = lean(now, own, penalties)
        if channels:
            following[..., channels] = state[..., channels]
        return following

    with few_threads(data.numel()):
        return repeat(step, block.weights_of, state, rho, tol, max_iter, record)


@torch.no_grad()
def repeat(
    step: Callable[[Tensor], Tensor],
    weights_of: Callable[[Tensor], Tensor],
    state: Tensor,
    rho: float,
    tol: float,
    max_iter: int,
    record: bool = True,
) -> Run:
    """Apply `step` until the estimated distance to the fixed point, |step|/(1 - rho), is below tol of the weights.

    Also stops where the steps have stopped shrinking (rounding), and where the state leaves every bound.
    """
    window, floor = max(64, math.ceil(6 / max(1 - rho, 1e-9))), FLOOR[state.dtype]
    path = [weights_of(state)] if record else []
    best, best_at, change = math.inf, 0, math.inf
    for t in range(1, max_iter + 1):
        following = step(state)
        if record:
            path.append(weights_of(following))
        if t % CHECK == 0 or t == max_iter or t == 1:
            new, old = weights_of(following), weights_of(state)
            size = float(new.abs().max())
            moved = float((new - old).abs().max())
            if not math.isfinite(size):
                return Run(state, t - 1, math.inf, False, True, tuple(path[:-1]))
            change = moved / max(size, SMALLEST)
            if (change <= tol * (1 - rho) and t > 1) or moved == 0:
                return Run(following, t, change, True, False, tuple(path))
            if change < 0.7 * best:
                best, best_at = change, t
            elif t - best_at > window and change < floor:
                return Run(following, t, change, True, False, tuple(path))
        state = following
    return Run(state, max_iter, change, change <= floor * (1 - rho), False, tuple(path))


def contraction(kind: str, doublings: int) -> float:
    """The factor rho by which a quadratic's error shrinks in one step, for condition numbers up to 2**doublings."""
    root = 2.0 ** (doublings / 2)
    return {"plain": 1 - 1 / root**2, "heavy ball": (root - 1) / (root + 1), "nesterov": 1 - 1 / root}[kind]


@dataclass(frozen=True)
class StageChoice:
    """What a stage runs with: the scheme, the class of condition numbers 2**doublings, the step size."""

    kind: Kind
    curvatures: tuple[float, float]
    doublings: int
    step: float

    @property
    def rho(self) -> float:
        """The contraction of a quadratic of that class."""
        return contraction(self.kind, self.doublings)


@dataclass(frozen=True, eq=False)
class Solution:
    """Where the stages ended."""

    w: Array
    network: Block
    scaling: Scaling
    trajectory: Array
    steps: int
    converged: bool
    tokens: Tensor  # data tokens
    prompt: Tensor  # the sequence at the end: state, data, penalties; of the first target where there are several
    problem: StatedProblem
    last: Array  # the weights of the last stage
    undone: bool = False

    def certificate(self) -> ConvergenceCertificate:
        """The last stage, audited."""
        network, momentum = self.network, self.network.momentum
        made = Made(momentum.kind, momentum.beta, self.scaling.step, dtype_name(network.dtype), network.loss.name)
        return audit(self.problem, self.last, made, "the last stage was undone" if self.undone else "")


def solve(
    problem: StatedProblem,
    scaling: Scaling,
    *,
    tol: float,
    max_iter: int,
    dtype: torch.dtype,
    condition: float | None = None,
    warm: bool = False,
) -> Solution:
    """Run the stages, `warm` only the last one; `max_iter` counts steps over all of them."""
    quadratic, d = problem.loss.quadratic, problem.x.shape[1]
    single = quadratic and problem.threshold is None
    rows = problem.rows() if quadratic else problem.x
    top = curvature_bound(rows, rows, dtype) if quadratic else 0.0
    w, value = problem.start, math.inf if single else problem.objective(problem.start)
    paths, used, factor, number = [w[None]], 0, 1.0, 0
    tolerances = [tol] if warm or single else [max(t, tol) for t in STAGES] + [tol]
    while True:
        if single:
            choice = _whole(rows, MARGIN * top or 1.0, condition, max_iter)
        else:
            choice = _local(problem, w, top, condition, factor)
        states = len(w) if problem.loss.joint else 1
        network = frozen(problem.loss, choice.kind, choice.doublings, d, states, dtype, problem.threshold is not None)
        at = network.channels
        data, penalties = tokens_of(problem, at, choice.step, dtype)
        last = number == len(tolerances) - 1
        limit = max_iter - used if last else min(max_iter - used, math.ceil(12 / (1 - choice.rho)))
        start = state_of(problem, at, w, choice.step, dtype)
        done = run(network, start, data, penalties, rho=choice.rho, tol=tolerances[number], max_iter=limit,
                   held=problem.held)  # fmt: skip
        path = done.path().reshape(done.steps + 1, *w.shape)
        used += done.steps
        worse, reached = False, 0.0
        if not single:
            reached = problem.objective(path[-1]) if not done.diverged else math.inf
            worse = done.diverged or not reached <= value + 1e-9 * max(1.0, abs(value))
        if worse and factor > SMALLEST_FACTOR and used < max_iter:
            factor /= 4
            continue
        if not worse:
            w, value = path[-1], reached
            paths.append(path[1:])
        if last or used >= max_iter or worse:
            break
        number, factor = number + 1, min(1.0, 2 * factor)
    scaling = replace(scaling, spectrum=choice.curvatures, doublings=choice.doublings, step=choice.step,
                      outside=outside(problem))  # fmt: skip
    end = state_of(problem, at, w, choice.step, dtype)
    prompt = at.sequence(*(each[0] for each in (end, data))) if data.dim() > 2 else at.sequence(end, data, penalties)
    converged = done.converged and not worse
    return Solution(w, network, scaling, np.concatenate(paths), used, converged, data, prompt, problem, path, worse)


def _whole(rows: Array, high: float, condition: float | None, max_iter: int) -> StageChoice:
    """For a quadratic, whose Hessian is the Gram matrix of rows: the heavy ball.

    At the edge of the spectrum it overshoots by a factor of its depth: `high` has to stay away from that.
    """
    low = min(extremes(gram(rows))[0], high)
    doublings = doublings_for(*((1.0, condition) if condition is not None else (low * (1 - 1e-9), high)))
    if condition is None and high > low * HOPELESS:
        # Not all directions can be resolved: take the class that max_iter steps bring to rest.
        doublings = max(1, min(doublings, math.floor(2 * math.log2(max(max_iter / REST, 2)))))
    return StageChoice("heavy ball", (low, high), doublings, step_size("heavy ball", doublings, high))


def _local(problem: StatedProblem, w: Array, top: float, condition: float | None, factor: float) -> StageChoice:
    """For the curvatures at w, which `top` bounds where the loss is quadratic: Nesterov's scheme."""
    low, high = problem.curvatures(w)
    high = (top or 1.0) if problem.loss.quadratic else MARGIN * high
    bounds = (low / CLASS_MARGIN, high / factor) if condition is None else (1.0, condition)
    doublings = doublings_for(*bounds)
    return StageChoice("nesterov", (low, high), doublings, factor * step_size("nesterov", doublings, high))


@torch.no_grad()
def in_context(
    X: Tensor,
    y: Tensor,
    query: Tensor,
    *,
    method: Method = "least squares",
    alpha: float = 0.0,
    steps: int = 600,
    doublings: int = 14,
    tol: float = 1e-7,
) -> Tensor:
    """Predictions at `query` (B, m, d) of B regressions, each fitted in context from its own prompt (B, n, d), (B, n).

    One network for all of them: heavy ball for least squares (the minimum-norm solution where n < d) and ridge
    (||y - X w||^2 + alpha ||w||^2), proximal Nesterov steps for lasso (||y - X w||^2/(2n) + alpha ||w||_1). Each prompt
    is scaled by two numbers of its own, one for x and one for y; `doublings` is the class of condition numbers, and
    directions worse than 2**-doublings of the best are not resolved. Outside attention: those two numbers (the largest
    eigenvalue of each prompt and its largest label), and early stopping.

    >>> X = torch.eye(2).double().expand(3, 2, 2)
    >>> y = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]]).double()
    >>> in_context(X, y, X[:, :1], doublings=1)[:, 0].round(decimals=8)
    tensor([1., 0., 3.], dtype=torch.float64)
    """
    if X.dim() != 3 or y.shape != X.shape[:2] or query.dim() != 3 or query.shape[0] != X.shape[0]:
        shapes = f"{tuple(X.shape)}, {tuple(y.shape)} and {tuple(query.shape)}"
        raise ArgumentError(f"expected prompts (B, n, d), labels (B, n) and queries (B, m, d), got {shapes}")
    if method not in ("least squares", "ridge", "lasso"):
        raise ArgumentError(f"method must be 'least squares', 'ridge' or 'lasso', got {method!r}")
    built(X.dtype)
    size = max(1, CACHED // (10 * (X.shape[1] + X.shape[2]))) if X.device.type == "cpu" else max(1, X.shape[0])
    some = [
        _some(*parts, method, alpha, steps, doublings, tol)
        for parts in zip(X.split(size), y.split(size), query.split(size), strict=True)
    ]
    return torch.cat(some)


def _some(
    X: Tensor, y: Tensor, query: Tensor, method: Method, alpha: float, steps: int, doublings: int, tol: float
) -> Tensor:
    """As many prompts as a cache holds the attention of."""
    dtype, (batch, n, d) = X.dtype, X.shape
    y_scale = (2 * y.abs().amax(1)).clamp_min(1e-30)[:, None, None]
    rows, labels = X, y.unsqueeze(-1) / y_scale
    if method == "ridge":
        extra = (alpha**0.5 * torch.eye(d, dtype=dtype, device=X.device)).expand(batch, d, d)
        rows, labels = torch.cat((rows, extra), 1), torch.cat((labels, labels.new_zeros(batch, d, 1)), 1)
    top = torch.linalg.eigvalsh(rows @ rows.mT if rows.shape[1] < d else rows.mT @ rows)[:, -1].clamp_min(1e-30)
    x_scale = (top * MARGIN).sqrt()[:, None, None]  # curvatures are at most 1/MARGIN of the network's
    kind: Kind = "nesterov" if method == "lasso" else "heavy ball"
    block = frozen(LINEAR, kind, doublings, d, dtype=dtype, shrink=method == "lasso")
    block = block if X.device.type == "cpu" else copy.deepcopy(block).to(X.device)  # everyone's own stays where it is
    # Rows keep their size for the prediction; the two divisions by x_scale are both in the values.
    at = block.channels
    data = at.data(rows, rows * (step_size(kind, doublings, 1.0) / x_scale**2), labels)
    level = (alpha * n / x_scale**2 / y_scale).expand(batch, 1, d) if method == "lasso" else None
    state, lean = at.state(rows.new_zeros(batch, 1, d), level), Lean(block)
    for t in range(steps):
        following = lean(state, data)
        if t % PATIENCE == PATIENCE - 1:
            moved = (block.weights_of(following) - block.weights_of(state)).abs().amax()
            if moved <= tol * block.weights_of(following).abs().amax():
                state = following
                break
        state = following
    w = block.weights_of(state)
    size = (query.norm(dim=-1, keepdim=True) * w.norm(dim=-1, keepdim=True)).clamp_min(1e-30)
    shrink = torch.exp2(torch.ceil(torch.log2(size)))
    asked = at.data(query / shrink, torch.zeros_like(query), query.new_zeros(*query.shape[:-1], 1))
    return (lean.predict(at.state(w), asked) * shrink * y_scale).squeeze(-1)
