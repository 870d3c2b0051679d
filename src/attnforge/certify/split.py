"""The bound of a network over its box: the largest over cells, which are split where that helps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..ir.enclose import Range, cells, ranges
from ..ir.ops import Array
from ..ir.program import Program
from .rules import Propagation

FIRST = 64  # cells of the first pass
BATCH = 24  # worst cells that are split in one round
TRIES = 3  # coordinates that are tried for a split


@dataclass(frozen=True)
class NetworkBound:
    """The bound and its parts at the worst cell: one for each site, the last for the affine maps."""

    bound: float
    parts: Array
    low: Array
    high: Array
    evaluated: int


def network_bound(propagation: Propagation, goal: float, effort: int = 2000, first: int = FIRST) -> NetworkBound:
    """An upper bound of the error; cells are split until it is at most `goal` or `effort` cells have been seen."""
    program = propagation.layout.program
    low, high = outward_cells(program, first, propagation.dtype)
    parts, slope = _evaluate(propagation, low, high)
    evaluated = len(low)
    while True:
        total = parts.sum(-1)
        worst = float(total.max())
        if worst <= goal or evaluated >= effort:
            break
        chosen = np.argsort(total)[::-1][:BATCH]
        chosen = chosen[total[chosen] >= (max(goal, 0.5 * worst) if np.isfinite(worst) else worst)]
        children = _split(propagation, low[chosen], high[chosen], slope[chosen], total[chosen])
        if children is None:
            break
        new_low, new_high, new_parts, new_slope, count = children
        evaluated += count
        keep = np.ones(len(low), dtype=bool)
        keep[chosen] = False
        low, high = np.concatenate([low[keep], new_low]), np.concatenate([high[keep], new_high])
        parts, slope = np.concatenate([parts[keep], new_parts]), np.concatenate([slope[keep], new_slope])
        if np.isfinite(worst) and float(parts.sum(-1).max()) > 0.999 * worst and len(chosen) < BATCH:
            break
    at = int(np.argmax(parts.sum(-1)))
    bound = float(np.nextafter(parts[at].sum() * (1 + parts.shape[-1] * 2.0**-52), np.inf))
    return NetworkBound(bound, parts[at], low[at], high[at], evaluated)


def outward_cells(program: Program, count: int, dtype: torch.dtype) -> tuple[Array, Array]:
    """Cells that cover the box widened to numbers of `dtype`."""
    low, high = cells(program, count)
    box, wide = program.box, program.box.outward(dtype)
    shape = low.shape[1:]
    for cell, exact, outer in ((low, box.lower, wide.lower), (high, box.upper, wide.upper)):
        edge = cell == exact.numpy().reshape(shape)
        cell[edge] = np.broadcast_to(outer.numpy().reshape(shape), cell.shape)[edge]
    return low, high


def _evaluate(propagation: Propagation, low: Array, high: Array) -> tuple[Array, Array]:
    """The parts of the error on each cell, and how much each input coordinate matters there."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(propagation.layout.program, low, high)
    parts, _ = propagation.run(found)
    return np.where(np.isfinite(parts), parts, np.inf), _influence(found)


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


def _split(
    propagation: Propagation, low: Array, high: Array, slope: Array, before: Array
) -> tuple[Array, Array, Array, Array, int] | None:
    """Each cell halved along the coordinate that lowers its bound most, out of the few that matter most."""
    count, shape = len(low), low.shape[1:]
    flat_low, flat_high = low.reshape(count, -1), high.reshape(count, -1)
    order = np.argsort(np.where(flat_high > flat_low, slope, -1.0), -1)[:, ::-1][:, : min(TRIES, flat_low.shape[1])]
    lows, highs = [], []
    for t in range(order.shape[1]):
        at = order[:, t]
        rows = np.arange(count)
        middle = 0.5 * (flat_low[rows, at] + flat_high[rows, at])
        left_high, right_low = flat_high.copy(), flat_low.copy()
        left_high[rows, at], right_low[rows, at] = middle, middle
        lows += [flat_low, right_low]
        highs += [left_high, flat_high]
    all_low = np.stack(lows, 1).reshape(-1, *shape)  # (cell, try and side) flattened
    all_high = np.stack(highs, 1).reshape(-1, *shape)
    parts, influence = _evaluate(propagation, all_low, all_high)
    total = parts.sum(-1).reshape(count, order.shape[1], 2)
    best = np.argmin(total.sum(-1), -1)  # not the larger child alone: a split may pay only together with the next
    index = ((np.arange(count) * order.shape[1] + best)[:, None] * 2 + np.arange(2)).ravel()
    return all_low[index], all_high[index], parts[index], influence[index], len(all_low)
