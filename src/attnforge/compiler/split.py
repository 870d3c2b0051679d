"""The bound of a network over its box: the largest over cells, which are split where that helps."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from ..dtypes import Array
from ..programs.enclose import Range, cells, ranges
from ..programs.program import Program
from .propagation import Propagation

FIRST = 64  # cells of the first pass
EFFORT = 2000  # cells that are looked at before giving up
BATCH = 24  # worst cells that are split in one round
TRIES = 3  # coordinates that are tried for a split


@dataclass(frozen=True)
class NetworkBound:
    """The largest error over all cells, the largest excess over a relative tolerance, and the parts of the worst
    cell."""

    bound: float
    excess: float
    parts: Array
    low: Array
    high: Array
    evaluated: int


@dataclass(frozen=True)
class Cells:
    """Cells of the box and what is known on each: error parts, what is allowed, and how much each coordinate
    matters."""

    low: Array
    high: Array
    parts: Array
    allowance: Array
    largest: Array
    influence: Array

    @property
    def excess(self) -> Array:
        """The error beyond what a relative tolerance allows."""
        return self.parts.sum(-1) - self.allowance

    def pick(self, index: np.ndarray) -> Cells:
        """Some of the cells."""
        return Cells(*(getattr(self, field.name)[index] for field in fields(self)))

    def join(self, other: Cells) -> Cells:
        """These cells and others."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Cells(*(np.concatenate(pair) for pair in pairs))


def network_bound(
    propagation: Propagation, goal: float, rtol: float = 0.0, effort: int = EFFORT, first: int = FIRST
) -> NetworkBound:
    """Upper bounds of the error; cells are split until it is at most goal + rtol |target|, or `effort` are looked
    at."""
    known = _evaluate(propagation, *outward_cells(propagation.layout.program, first, propagation.setting.dtype), rtol)
    evaluated = len(known.low)
    while True:
        excess = known.excess
        worst = float(excess.max())
        if worst <= goal or evaluated >= effort:
            break
        chosen = np.argsort(excess)[::-1][:BATCH]
        chosen = chosen[excess[chosen] >= (max(goal, 0.5 * worst) if np.isfinite(worst) else worst)]
        children, count = _split(propagation, known.pick(chosen), rtol)
        evaluated += count
        keep = np.ones(len(excess), dtype=bool)
        keep[chosen] = False
        known = known.pick(keep).join(children)
        if np.isfinite(worst) and float(known.excess.max()) > 0.999 * worst and len(chosen) < BATCH:
            break
    at = int(np.argmax(known.excess))
    up = 1 + known.parts.shape[-1] * 2.0**-52
    bound, excess_up = float(known.largest.max()) * up, float(known.parts[at].sum()) * up - float(known.allowance[at])
    return NetworkBound(
        float(np.nextafter(bound, np.inf)), float(np.nextafter(excess_up, np.inf)), known.parts[at], known.low[at],
        known.high[at], evaluated,
    )  # fmt: skip


def outward_cells(program: Program, count: int, dtype: torch.dtype) -> tuple[Array, Array]:
    """Cells that cover the box widened to numbers of `dtype`."""
    low, high = cells(program, count)
    box, wide = program.box, program.box.outward(dtype)
    shape = low.shape[1:]
    for cell, exact, outer in ((low, box.lower, wide.lower), (high, box.upper, wide.upper)):
        edge = cell == exact.numpy().reshape(shape)
        cell[edge] = np.broadcast_to(outer.numpy().reshape(shape), cell.shape)[edge]
    return low, high


def _evaluate(propagation: Propagation, low: Array, high: Array, rtol: float) -> Cells:
    """What is known on each of the cells."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(propagation.layout.program, low, high)
    outcome = propagation.run(found, rtol)
    parts = np.where(np.isfinite(outcome.parts), outcome.parts, np.inf)
    return Cells(low, high, parts, outcome.allowance, outcome.largest, _influence(found))


def _influence(found: list[Range]) -> Array:
    """For each cell and input coordinate its relative influence, summed over all values: what a split would calm."""
    cells_, symbols = len(found[0].low), found[0].low[0].size
    total = np.zeros((cells_, symbols))
    for r in found:
        if r.slope is None:
            return np.reshape(found[0].high - found[0].low, (cells_, symbols))
        if not np.isfinite(r.slope).all():
            continue
        size = np.maximum(r.size.max(axis=(1, 2)), 1e-300)
        total += np.minimum(np.abs(r.slope).max(axis=(1, 2)) / size[:, None], 1.0)
    return total


def _split(propagation: Propagation, known: Cells, rtol: float) -> tuple[Cells, int]:
    """Each cell halved along one of the few coordinates that matter most, and how many cells were looked at for
    that."""
    low, high = known.low, known.high
    count, shape = len(low), low.shape[1:]
    flat_low, flat_high = low.reshape(count, -1), high.reshape(count, -1)
    matter = np.where(flat_high > flat_low, known.influence, -1.0)
    order = np.argsort(matter, -1)[:, ::-1][:, : min(TRIES, flat_low.shape[1])]
    lows, highs, rows = [], [], np.arange(count)
    for t in range(order.shape[1]):
        at = order[:, t]
        middle = 0.5 * (flat_low[rows, at] + flat_high[rows, at])
        left_high, right_low = flat_high.copy(), flat_low.copy()
        left_high[rows, at], right_low[rows, at] = middle, middle
        lows += [flat_low, right_low]
        highs += [left_high, flat_high]
    all_low = np.stack(lows, 1).reshape(-1, *shape)  # (cell, try and side) flattened
    all_high = np.stack(highs, 1).reshape(-1, *shape)
    found = _evaluate(propagation, all_low, all_high, rtol)
    excess = found.excess.reshape(count, order.shape[1], 2)
    best = np.argmin(excess.sum(-1), -1)  # not the larger child alone: a split may pay only together with the next
    index = ((rows * order.shape[1] + best)[:, None] * 2 + np.arange(2)).ravel()
    return found.pick(index), len(all_low)
