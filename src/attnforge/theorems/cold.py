"""How far a cold head, as stored and as computed, can be from the ideal one (A2, A5 and R5, R6 of docs/theory.md).

The ideal head has evenly spaced anchors L_k, logits -beta (y - L_k)^2 and real arithmetic; A2 and A6 bound its error.
What is shipped has rounded keys and values and is computed in a dtype: its logits differ from the ideal ones by what
was lost in storing them (known exactly: everything stored is compared with rational numbers) and by R6. R5 turns that
into a distance of outputs, cell by cell over the range of y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from ..certificates.rounding import TINY, gamma, largest_mean, softmax_rounding, unit, up
from ..dtypes import Array

GONE = 100.0  # slots whose logit is this far below, after all errors, together weigh less than slots * exp(-100)
PER_STEP = 4  # cells between neighbouring anchors
WIDE = 1 << 22  # entries of an array at once


@dataclass(frozen=True, eq=False)
class ColdTable:
    """Stored keys and values of one head, with their distance from the ideal ones.

    Logits are slope q + offset. The ideal anchors are first + k step, k = 0, ..., in the coordinate q of the query, and
    kappa = beta step^2.
    """

    slope: Array
    offset: Array
    slope_error: Array
    offset_error: Array
    first: float
    step: float
    kappa: float

    @property
    def count(self) -> int:
        return len(self.slope)


def anchors(a: Fraction, b: Fraction, count: int) -> list[Fraction]:
    """Evenly spaced anchors from a to b, exactly."""
    step = (b - a) / (count - 1)
    return [a + k * step for k in range(count)]


def nearest(numbers: Sequence[Fraction], dtype: torch.dtype) -> Array:
    """The numbers of `dtype` next to these, as float64."""
    wide = np.array([float(x) for x in numbers])
    return wide if dtype == torch.float64 else torch.from_numpy(wide).to(dtype).double().numpy()


def distance(stored: Array, ideal: Sequence[Fraction]) -> Array:
    """|stored - ideal|, rounded up."""
    found = np.array([float(abs(Fraction(float(s)) - x)) for s, x in zip(stored, ideal, strict=True)])
    return np.where(found > 0, up(found, 1), 0.0)


def cold_table(
    slope: Array, offset: Array, places: Sequence[Fraction], beta: Fraction, reference: Fraction
) -> ColdTable:
    """The stored table next to the ideal one: slopes 2 beta (L - r), offsets -beta (L^2 - r^2) for a reference r."""
    slopes = [2 * beta * (place - reference) for place in places]
    offsets = [-beta * (place**2 - reference**2) for place in places]
    step = places[1] - places[0]
    return ColdTable(
        slope, offset, distance(slope, slopes), distance(offset, offsets),
        float(places[0]), float(step), float(beta * step**2),
    )  # fmt: skip


def dot_error(width: int, size: float, dtype: torch.dtype) -> float:
    """The error of w.x + t computed in any order, |w|.|x| + |t| <= size."""
    u = unit(dtype)
    return float(up(float(gamma(width + 1, u)) * size + (width + 2) * TINY[dtype], 4))


def cells(table: ColdTable, low: float, high: float) -> tuple[Array, Array]:
    """Cells that cover [low, high]: several between neighbouring anchors, growing outside of the table."""
    first, last = table.first, table.first + (table.count - 1) * table.step
    inside = first + table.step * np.arange((table.count - 1) * PER_STEP + 1) / PER_STEP
    reach = table.step * 2.0 ** np.arange(0, 64)
    edges = np.concatenate([first - reach[::-1], inside, last + reach])
    edges = edges[(edges > low) & (edges < high)]
    edges = np.concatenate([[low], edges, [high]])
    return edges[:-1], edges[1:]


def head_rounding(
    table: ColdTable,
    value: Array,
    value_error: Array,
    low: Array,
    high: Array,
    dtype: torch.dtype,
    inexact: bool = False,
) -> Array:
    """For each cell [low, high] of the query an upper bound of |computed head - ideal head|.

    The query is a number of the dtype, or, if `inexact`, rounded once more on the way into the head (R6).
    """
    half = math.ceil(math.sqrt(GONE / table.kappa)) + 3
    while True:
        half = min(half, table.count)
        step = max(1, WIDE // (2 * half + 1))
        parts = [
            _window(table, value, value_error, low[i : i + step], high[i : i + step], half, dtype, inexact)
            for i in range(0, len(low), step)
        ]
        found = np.concatenate(parts)
        if np.isfinite(found).all() or half >= table.count:
            return found
        half *= 2


def _window(
    t: ColdTable,
    value: Array,
    value_error: Array,
    low: Array,
    high: Array,
    half: int,
    dtype: torch.dtype,
    inexact: bool,
) -> Array:
    u, p = unit(dtype), t.count
    middle, radius = 0.5 * (low + high), 0.5 * (high - low) * (1 + 2.0**-50)
    nearest_ = np.clip(np.rint((middle - t.first) / t.step), 0, p - 1).astype(int)
    far = np.maximum(np.abs(low), np.abs(high))  # |q| on the cell
    slack = 2.0**-48 * ((far + abs(t.first)) / t.step + p)  # of positions in steps, computed here in float64
    right = (high - t.first) / t.step - nearest_ + slack
    left = (low - t.first) / t.step - nearest_ - slack
    j = np.arange(-half, half + 1)[None, :]
    index = nearest_[:, None] + j
    there = (index >= 0) & (index < p)
    index = np.clip(index, 0, p - 1)

    def gaps(steps: Array) -> Array:  # least ideal logit of the nearest anchor minus that of the anchor `steps` away
        toward = np.where(steps > 0, right[:, None], left[:, None])
        found = t.kappa * (steps**2 - 2.0 * steps * toward)
        return found - np.abs(found) * 2.0**-46

    gap = np.where(there, gaps(j.astype(float)), np.inf)
    reach = np.maximum(np.abs(left), np.abs(right))[:, None]
    slope, offset = np.abs(t.slope[index]), t.offset[index]
    product = slope * far[:, None]
    logit = np.abs(t.slope[index] * middle[:, None] + offset) + slope * radius[:, None]
    logit += 2.0**-50 * (product + np.abs(offset))
    stored = t.slope_error[index] * far[:, None] + t.offset_error[index]
    rise = np.maximum(-np.min(np.where(there, gap, 0.0), -1, keepdims=True), 0.0)
    centre = stored[:, half : half + 1]
    away = t.kappa * (j**2 + 2.0 * np.abs(j) * reach) + rise + stored + centre
    away = away + np.max(np.where(there, stored, 0.0), -1, keepdims=True)
    if inexact:
        turned = np.abs(t.slope[index] - t.slope[nearest_][:, None]) * far[:, None]
        product = product + turned * (1 + 2.0**-40)
    error = (stored + u * (product + logit + away) * (1 + 8 * u)) * (1 + 2.0**-40)
    error = np.where(there, error, 0.0)
    may_win = there & (gap <= 2 * (error + error[:, half : half + 1]))
    error = error + 1.01 * u * np.max(np.where(may_win, error, 0.0), -1, keepdims=True)
    most = np.max(np.where(may_win, error, 0.0), -1, keepdims=True)
    alive = there & (gap - 2 * error - 2 * most <= GONE)
    # what lies beyond the window: gaps grow faster than errors, so the first anchor outside decides
    beyond = np.concatenate([gaps(np.array([[-half - 1.0]])), gaps(np.array([[half + 1.0]]))], -1)
    outside = np.stack([nearest_ - half - 1 >= 0, nearest_ + half + 1 < p], -1)
    steep = np.max(np.abs(t.slope)) * far + np.max(np.abs(t.offset))
    every = (np.max(t.slope_error) * far + np.max(t.offset_error) + 8 * u * steep)[:, None]
    every = every + 4 * u * t.kappa * ((half + 1.0) ** 2 + 2 * (half + 1.0) * reach)
    unsafe = np.any(outside & (beyond - 2 * every - 2 * most <= GONE), -1)

    weight = np.where(alive, np.minimum(1.0, np.exp(-np.maximum(gap, 0.0)) * (1 + 2.0**-46)), 0.0)
    error = np.where(alive, error, 0.0)
    near = np.abs(value[index] - value[nearest_][:, None])
    moved = largest_mean(weight, near)
    found = softmax_rounding(weight, error, np.abs(value[index]), up(near + moved[:, None]), u, TINY[dtype])
    lost = 4 * p * (math.exp(-GONE) + TINY[dtype]) * (1 + float(np.max(np.abs(value))))
    found = up(found + np.max(np.where(there, value_error[index], 0.0), -1) + lost, 4)
    if p * u > 0.125:  # R5 counts on sums of not too many terms
        return np.full(len(low), np.inf)
    return np.where(unsafe, np.inf, found)
