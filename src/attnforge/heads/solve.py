"""Values for the anchors of a warm head: weighted least squares after the keys have been rounded (A3 of
docs/theory.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..certify.interpolation import AnchorWeights
from ..certify.rounding import EXP_ULPS, unit
from ..ir.functions import Univariate
from .potential import Potential

Array = np.ndarray
LARGEST = 1e7  # of the function's size: the most that a value may be
SHARES = 10.0 ** -np.arange(0.2, 8.0, 0.4)
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
    def draw(
        cls,
        fn: Univariate,
        lo: float,
        hi: float,
        potential: Potential,
        count: int,
        relative: bool,
        outer: tuple[float, float] | None = None,
    ) -> Sample:
        """`count` points, dense towards the ends like Chebyshev points in the potential's flat coordinate.

        Beyond [lo, hi], as far as `outer`, the function goes on as a constant.
        """
        ends = np.sort(potential.flat(np.array([lo, hi])))
        cosines = -np.cos(np.pi * (np.arange(count) + 0.5) / count)
        inner = np.sort(potential.unflat(ends.mean() + 0.5 * (ends[1] - ends[0]) * cosines))
        beyond = [  # what lies between a singular end and the first anchor
            end + (first - end) * share for end, first in ((lo, inner[0]), (hi, inner[-1])) for share in SHARES
        ]
        knots = [k for k in fn.knots if lo < k < hi]
        point = np.unique(np.clip(np.concatenate([[lo], inner, beyond, knots, [hi]]), lo, hi))
        if outer is not None:
            steps = np.concatenate([10.0 ** -np.arange(0.3, 12.0, 0.3), [1.0]])
            more = [end + (far - end) * steps for end, far in zip((lo, hi), outer, strict=True) if far != end]
            point = np.unique(np.concatenate([point, *more]))
        value = fn.value(torch.from_numpy(np.clip(point, lo, hi))).numpy()
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


class Bench:
    """Given keys on a sample: solves for values and says what a certificate would, sharing all that depends on keys
    alone."""

    def __init__(self, blank: AnchorWeights, sample: Sample, dtype: torch.dtype):
        self.blank, self.sample, self.dtype = blank, sample, dtype
        logits = np.multiply.outer(sample.point - blank.centre, blank.slope)
        reach = np.abs(logits)
        logits += blank.offset
        gap = logits.max(-1, keepdims=True) - logits
        self.weight = np.exp(-gap)
        self.weight /= self.weight.sum(-1, keepdims=True)
        u = unit(dtype)
        self.logit_error = self.weight * (u * (reach + np.abs(logits) + gap + EXP_ULPS))
        self.terms = 2 * np.sum(self.weight > u / self.weight.shape[-1], -1) + 4

    def solve(self, skip: bool) -> Iterator[tuple[float, AnchorWeights]]:
        """Least-squares values, once for each cut of the singular values, each with its estimate."""
        sample, dtype = self.sample, self.dtype
        line = (float(_round(np.array(sample.line[0]), dtype)), float(_round(np.array(sample.line[1]), dtype)))
        line = line if skip else (0.0, 0.0)
        matrix = self.weight * sample.weight[:, None]
        wanted = (sample.value - line[0] * sample.point - line[1]) * sample.weight
        left, size, right = np.linalg.svd(matrix, full_matrices=False)
        share = left.T @ wanted
        for cut in CUTS[dtype]:
            kept = size > cut * size[0]
            value = right[kept].T @ (share[kept] / size[kept])
            value += right[kept].T @ ((left.T @ (wanted - matrix @ value))[kept] / size[kept])  # one step of refinement
            if np.max(np.abs(value)) > LARGEST * np.max(np.abs(sample.value)):
                continue  # values so large live by cancellation: the next cut keeps them smaller
            found = replace(self.blank, value=_round(value, dtype), skip=line)
            yield self.estimate(found), found

    def estimate(self, head: AnchorWeights) -> float:
        """What a certificate will say, roughly: the error on the sample plus lemma A5 at its points. Not a bound."""
        sample, u = self.sample, unit(self.dtype)
        out = self.weight @ head.value
        error = np.abs(out + head.skip[0] * sample.point + head.skip[1] - sample.value)
        error += np.sum(self.logit_error * np.abs(head.value - out[:, None]), -1)
        error += u * self.terms * (self.weight @ np.abs(head.value))
        if head.skip != (0.0, 0.0):
            error += 3 * u * (np.abs(out) + np.abs(head.skip[0] * sample.point) + abs(head.skip[1]))
        worst = np.max(error * sample.weight)
        return float(worst) if np.isfinite(worst) else float("inf")


def cold_values(
    blank: AnchorWeights, anchors: Array, fn: Univariate, lo: float, hi: float, dtype: torch.dtype
) -> AnchorWeights:
    """The paper's choice: each anchor's value is the function there."""
    value = fn.value(torch.from_numpy(np.clip(anchors, lo, hi))).numpy()
    return replace(blank, value=_round(value, dtype))


def _round(x: Array, dtype: torch.dtype) -> Array:
    """x rounded to dtype, as float64."""
    return torch.from_numpy(np.asarray(x, dtype=np.float64)).to(dtype).double().numpy()
