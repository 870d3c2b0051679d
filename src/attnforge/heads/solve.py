"""Values for the anchors of a warm head: weighted least squares after the keys have been rounded (A3 of docs/theory.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..certify.interpolation import AnchorWeights
from ..certify.rounding import EXP_ULPS, unit
from ..ir.functions import Univariate
from .potential import Potential

Array = np.ndarray
CUTS = {torch.float32: (1e-10, 1e-8, 1e-6, 1e-4), torch.float64: (1e-15, 1e-13, 1e-11, 1e-8)}


@dataclass(frozen=True)
class Shape:
    """The knobs of an anchor head: which potential, how many anchors, how many beyond each end, how cold."""

    potential: Potential
    count: int
    guards: int
    kappa: float


@dataclass(frozen=True)
class Sample:
    """Where a fit looks at the function: points, values, and 1 or 1/|value| as weights."""

    point: Array
    value: Array
    weight: Array
    line: tuple[float, float]

    @classmethod
    def draw(cls, fn: Univariate, lo: float, hi: float, potential: Potential, count: int, relative: bool) -> Sample:
        """`count` points, dense towards the ends like Chebyshev points in the potential's flat coordinate."""
        ends = np.sort(potential.flat(np.array([lo, hi])))
        cosines = -np.cos(np.pi * (np.arange(count) + 0.5) / count)
        inner = potential.unflat(ends.mean() + 0.5 * (ends[1] - ends[0]) * cosines)
        point = np.unique(np.clip(np.concatenate([[lo], inner, [k for k in fn.knots if lo < k < hi], [hi]]), lo, hi))
        value = fn.value(torch.from_numpy(point)).numpy()
        finite = np.isfinite(value)
        point, value = point[finite], value[finite]
        weight = 1.0 / np.maximum(np.abs(value), 1e-300) if relative else np.ones_like(value)
        return cls(point, value, weight, (0.0, 0.0) if relative else balanced_line(point, value))


def balanced_line(point: Array, value: Array) -> tuple[float, float]:
    """A line through the middle of the graph: subtracting it makes what the anchors must hold small."""
    slope = (value[-1] - value[0]) / (point[-1] - point[0])
    rest = value - slope * point
    return float(slope), float(0.5 * (rest.max() + rest.min()))


def keys(shape: Shape, lo: float, hi: float, dtype: torch.dtype) -> AnchorWeights:
    """The rounded keys of a shape, with values still zero."""
    flat = shape.potential.flat_anchors(lo, hi, shape.count, shape.guards)
    centre = 0.5 * (lo + hi) if shape.potential.name == "square" else shape.potential.shift
    centre = float(_round(np.array(centre), dtype))
    slope, offset = shape.potential.keys(flat, shape.kappa, centre)
    return AnchorWeights(_round(slope, dtype), _round(offset, dtype), np.zeros(shape.count), centre)


def solve(blank: AnchorWeights, sample: Sample, skip: bool, dtype: torch.dtype) -> list[AnchorWeights]:
    """The least-squares values for given keys, once for each cut of the singular values."""
    line = tuple(float(_round(np.array(x), dtype)) for x in sample.line) if skip else (0.0, 0.0)
    matrix = blank.weights(sample.point) * sample.weight[:, None]
    wanted = (sample.value - line[0] * sample.point - line[1]) * sample.weight
    left, size, right = np.linalg.svd(matrix, full_matrices=False)
    share = left.T @ wanted
    found = []
    for cut in CUTS[dtype]:
        kept = size > cut * size[0]
        value = right[kept].T @ (share[kept] / size[kept])
        value += right[kept].T @ ((left.T @ (wanted - matrix @ value))[kept] / size[kept])  # one step of refinement
        found.append(replace(blank, value=_round(value, dtype), skip=line))
    return found


def cold_values(blank: AnchorWeights, anchors: Array, fn: Univariate, lo: float, hi: float, dtype: torch.dtype) -> AnchorWeights:
    """The paper's choice: each anchor's value is the function there."""
    value = fn.value(torch.from_numpy(np.clip(anchors, lo, hi))).numpy()
    return replace(blank, value=_round(value, dtype))


def estimate(head: AnchorWeights, sample: Sample, dtype: torch.dtype) -> float:
    """What a certificate will say, roughly: the error on the sample plus lemma A5 at its points. Not a bound."""
    u = unit(dtype)
    q = sample.point - head.centre
    logits = np.multiply.outer(q, head.slope)
    reach = np.abs(logits)
    logits += head.offset
    gap = logits.max(-1, keepdims=True) - logits
    weight = np.exp(-gap)
    weight /= weight.sum(-1, keepdims=True)
    out = weight @ head.value
    interpolation = np.abs(out + head.skip[0] * sample.point + head.skip[1] - sample.value)
    d = u * (reach + np.abs(logits) + gap + EXP_ULPS)
    rounding = np.sum(weight * d * np.abs(head.value - out[:, None]), -1)
    terms = 2 * np.sum(weight > u / weight.shape[-1], -1) + 4
    rounding += u * terms * (weight @ np.abs(head.value))
    if head.skip != (0.0, 0.0):
        rounding += 3 * u * (np.abs(out) + np.abs(head.skip[0] * sample.point) + abs(head.skip[1]))
    worst = np.max((interpolation + rounding) * sample.weight)
    return float(worst) if np.isfinite(worst) else float("inf")


def _round(x: Array, dtype: torch.dtype) -> Array:
    """x rounded to dtype, as float64."""
    return torch.from_numpy(np.asarray(x, dtype=np.float64)).to(dtype).double().numpy()
