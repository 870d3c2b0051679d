"""The loop around a block: apply it, watch it, stop it. The only arithmetic here is the comparison that stops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .blocks import Block
from .lean import Lean
from .prompt import Array

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
