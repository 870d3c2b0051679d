"""Warm heads whose values are solved for, on a grid or for each coordinate. What they reach is calibrated, not proved.

Route `spectral`: one warm head over a tensor-product grid (lemma A3 in each coordinate).

The weights of a head with logits -sum_i beta_i (x_i - v_i)^2 over a tensor-product grid are products of the weights of
one-dimensional heads. So the values that fit f best on a tensor-product sample come from one small least-squares
problem for each axis. For analytic f the error falls geometrically with the number of anchors per axis.

Route `additive`: a sum of functions of one coordinate each, every one a warm anchor head, all in one layer.

The part of coordinate i is the mean of f along lines in direction i through a few random points, less its mean: exactly
the summand if f is additive, and the best one in the mean square as the number of lines grows (a main effect) if it is
not. Cost and size grow linearly with the dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..arguments import is_whole
from ..dtypes import Array, rounded, stored
from ..errors import ArgumentError
from ..network import AttentionLayer, Heads
from .result import About, Held, TableApproximation, inside, table_head
from .target import Target, digest

#: Temperatures that are tried, in steps of about 1.4: warmer heads are smoother and their values larger.
KAPPAS = (0.04, 0.06, 0.09, 0.13, 0.18, 0.26, 0.36, 0.5)
ADDITIVE_KAPPAS = (0.12, 0.2, 0.3, 0.45)  # a coarser choice: all coordinates share one
GUARDS = (1, 2, 3, 4, 5, 6, 8, 10)  # anchors beyond each end that are tried (lemma A3 asks for some)
#: Singular values that are left out, of the largest: values grow as the cut falls, and with them what rounding costs.
CUTS = {torch.float32: (1e-8, 1e-6, 1e-4), torch.float64: (1e-15, 1e-13, 1e-11, 1e-8)}
PER_AXIS = (6, 8, 12, 16, 24, 32, 48, 64, 96)  # anchors that `approximate` tries, in steps of about 1.4
MOST_SAMPLES = 1 << 20  # evaluations of one fit: minutes for a black box that takes a tenth of a millisecond
TUNING = 768  # points on which temperature, guards and cut are chosen; they are neither fitted nor held out
LINES = 12  # in each direction, along which an additive fit takes its mean
LEAST_ANCHORS = 4  # of an axis: a guard at each end and two between


@dataclass(frozen=True)
class Warm:
    """The knobs that all axes share: anchors per axis, how many of them beyond each end, how warm."""

    count: int
    guards: int
    kappa: float


@dataclass(frozen=True)
class Axis:
    """The rounded keys of one axis: logits slope (x - centre) + offset."""

    slope: Array
    offset: Array
    centre: float

    @classmethod
    def rounded(cls, low: float, high: float, warm: Warm, dtype: torch.dtype, quantum: float) -> Axis:
        """Anchors, guards beyond [low, high]; offsets are multiples of `quantum`, so that their sums are exact."""
        centre = float(torch.tensor(0.5 * (low + high), dtype=dtype))
        if high <= low:
            return cls(np.zeros(1), np.zeros(1), centre)
        step = (high - low) / (warm.count - 1 - 2 * warm.guards)
        index = np.arange(warm.count, dtype=np.float64) - 0.5 * (warm.count - 1)
        slope = rounded(2 * warm.kappa / step * index, dtype)
        return cls(slope, np.round(-warm.kappa * index * index / quantum) * quantum, centre)

    def weights(self, x: Array) -> Array:
        """The softmax weights in float64, shape (point, anchor)."""
        logit = np.multiply.outer(x - self.centre, self.slope) + self.offset
        weight = np.exp(logit - logit.max(-1, keepdims=True))
        return weight / weight.sum(-1, keepdims=True)


def quantum_for(dim: int, warm: Warm, dtype: torch.dtype) -> float:
    """A power of two such that the sum of `dim` offsets, multiples of it, is a number of the dtype."""
    largest = max(dim * warm.kappa * (0.5 * warm.count) ** 2, 1e-3)
    return 2.0 ** (math.ceil(math.log2(largest)) + math.log2(torch.finfo(dtype).eps) + 1)


def inverses(weight: Array, cuts: tuple[float, ...]) -> Iterator[Array]:
    """Pseudo-inverses, one for each cut of the singular values."""
    left, size, right = np.linalg.svd(weight, full_matrices=False)
    for cut in cuts:
        kept = size > cut * size[0]
        yield (right[kept].T / size[kept]) @ left[:, kept].T


def shapes(count: int, kappas: tuple[float, ...] = KAPPAS) -> Iterator[Warm]:
    """The knobs that are tried for so many anchors per axis."""
    for guards in GUARDS:
        if count - 2 * guards >= 4 or (guards == 1 and count - 2 * guards >= 2):
            yield from (Warm(count, guards, kappa) for kappa in kappas)


def chebyshev(low: float, high: float, count: int) -> Array:
    """Points dense towards the ends, the ends among them."""
    return low + (high - low) * 0.5 * (1 - np.cos(np.pi * np.arange(count) / max(count - 1, 1)))


def sample_count(anchors: int) -> int:
    """Sample points per axis for a fit with so many anchors per axis."""
    return anchors + anchors // 2 + 5


def tensor_points(axes: list[Array], low: int, high: int) -> Array:
    """Points number `low` to `high` of a tensor-product set, the last axis running fastest."""
    index = np.unravel_index(np.arange(low, high), [len(a) for a in axes])
    return np.stack([axis[at] for axis, at in zip(axes, index, strict=True)], -1)


def affine_fit(points: Array, values: Array, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The affine function nearest to the values: what the linear skip carries, rounded to the dtype."""
    matrix = np.concatenate([points, np.ones((len(points), 1))], -1)
    found = torch.from_numpy(np.linalg.lstsq(matrix, values, rcond=1e-12)[0]).to(dtype)
    return found[:-1], found[-1]


def build_spectral(target: Target, anchors: int, held: Held, dtype: torch.dtype) -> TableApproximation:
    """The best warm head with `anchors` anchors per axis, guards among them, chosen on a sample of its own."""
    box = target.box.outward(dtype)
    sides = box.intervals()
    if not is_whole(anchors, LEAST_ANCHORS):
        raise ArgumentError(f"anchors must be a whole number of at least 4 (per axis) for this route, got {anchors!r}")
    places = [chebyshev(lo, hi, sample_count(anchors)) if hi > lo else np.array([lo]) for lo, hi in sides]
    count = math.prod(len(p) for p in places)
    if count > MOST_SAMPLES:
        raise ArgumentError(
            f"a spectral fit with {anchors} anchors on each of {box.dim} axes needs {count:.3g} evaluations; "
            f"at most {MOST_SAMPLES} are made: use fewer anchors, or the routes ridge or additive"
        )
    make = lambda low, high: inside(tensor_points(places, low, high), target.box)  # noqa: E731
    values = target.table(count, make, f"f on {count} sample points", f"spectral-{anchors}-{digest(np.array(sides))}")
    points = tensor_points(places, 0, count)
    slope, constant = affine_fit(points, values, dtype)
    rest = values - points @ stored(slope) - stored(constant)
    tuned = Held.draw(target, dtype, TUNING, seed=3)
    tuning = tuned.points
    wanted_rest = tuned.values - tuning @ stored(slope) - stored(constant)
    grid = rest.reshape(*(len(p) for p in places), -1)
    best: tuple[float, Heads] | None = None
    for warm in shapes(anchors):
        quantum = quantum_for(box.dim, warm, dtype)
        axes = [Axis.rounded(lo, hi, warm, dtype, quantum) for lo, hi in sides]
        sampled = [axis.weights(place) for axis, place in zip(axes, places, strict=True)]
        solvers = [list(inverses(weight, CUTS[dtype])) for weight in sampled]
        there = [axis.weights(tuning[:, i]) for i, axis in enumerate(axes)]
        for cut in range(len(CUTS[dtype])):
            solver = [each[cut] for each in solvers]
            value = along_axes(solver, grid)
            value += along_axes(solver, grid - along_axes(sampled, value))  # one step of refinement
            rough = float(np.abs(contracted(value, there) - wanted_rest).max())
            if best is not None and rough > 1.5 * best[0]:
                continue  # what exact arithmetic gives is no better than what others give in the dtype
            group = _heads(axes, value.reshape(-1, value.shape[-1]), target.name, dtype)
            error = _error(group, tuning, wanted_rest, dtype)
            if best is None or error < best[0]:
                best = (error, group)
    assert best is not None
    layer = AttentionLayer([best[1]], S=slope, s=constant)
    return TableApproximation(About.of(target, held, "spectral"), layer, *held.tensors).sealed()


def along_axes(matrices: list[Array], value: Array) -> Array:
    """One matrix applied along each axis of a table; the last axis, of the outputs, stays."""
    for i, matrix in enumerate(matrices):
        value = np.moveaxis(np.tensordot(matrix, value, (1, i)), 0, i)
    return value


def contracted(value: Array, weights: list[Array]) -> Array:
    """sum over anchors of value times the product of the axes' weights, for every point: shape (point, outputs)."""
    out = np.tensordot(weights[0], value, (1, 0))
    for weight in weights[1:]:
        out = np.einsum("nk,nk...->n...", weight, out)
    return out


@torch.no_grad()
def _error(group: Heads, points: Array, wanted: Array, dtype: torch.dtype) -> float:
    found = group(torch.from_numpy(points).to(dtype)).double().numpy()
    error = float(np.abs(found - wanted).max())
    return error if math.isfinite(error) else math.inf


def _heads(axes: list[Axis], value: Array, name: str, dtype: torch.dtype) -> Heads:
    """One head over the tensor product of the axes' anchors."""
    index = np.unravel_index(np.arange(len(value)), [len(a.slope) for a in axes])
    slopes = np.stack([axis.slope[at] for axis, at in zip(axes, index, strict=True)], -1)
    offset = np.sum([axis.offset[at] for axis, at in zip(axes, index, strict=True)], 0)
    keys = np.concatenate([slopes, offset[:, None]], -1)
    centre = np.array([axis.centre for axis in axes])
    return table_head(centre, keys, value, f"{name}, {len(value)} anchors", dtype)


def build_additive(target: Target, anchors: int, held: Held, dtype: torch.dtype, seed: int = 0) -> TableApproximation:
    """One head with `anchors` anchors for every coordinate; guards and temperature chosen on a sample of their own."""
    if not is_whole(anchors, LEAST_ANCHORS):
        raise ArgumentError(f"anchors must be a whole number of at least 4 for an additive fit, got {anchors!r}")
    box = target.box.outward(dtype)
    low, high = (side.reshape(-1).numpy() for side in (box.lower, box.upper))
    half = torch.from_numpy(np.where(high > low, 0.5 * (high - low), 1.0)).to(dtype)
    scale = 1 / half  # every coordinate is read as a number in [-1, 1], so that all heads share one table of keys
    shift = (-torch.from_numpy(0.5 * (low + high)) * scale.double()).to(dtype)
    unit = chebyshev(-1.0, 1.0, sample_count(anchors))
    effects = _effects(target, low, high, unit, seed)
    tuning = Held.draw(target, dtype, max(TUNING, 8 * box.dim), seed=seed + 7)
    even, wanted = tuning.points, tuning.values
    tuned = even * stored(scale) + stored(shift)
    best: tuple[float, AttentionLayer] | None = None
    for warm in shapes(anchors, ADDITIVE_KAPPAS):
        axis = Axis.rounded(-1.0, 1.0, warm, dtype, quantum_for(1, warm, dtype))
        weight, there = axis.weights(unit), axis.weights(tuned.ravel()).reshape(*tuned.shape, -1)
        for inverse in inverses(weight, CUTS[dtype]):
            solved = inverse @ effects
            solved += inverse @ (effects - weight @ solved)  # one step of refinement
            value = torch.from_numpy(solved).to(dtype)
            sums = np.einsum("ndp,dpo->no", there, stored(value))
            slope, constant = affine_fit(even, wanted - sums, dtype)
            layer = _layer(axis, value, scale, shift, slope, constant, target.name, dtype)
            with torch.no_grad():
                error = float((layer(torch.from_numpy(even).to(dtype)).double() - torch.from_numpy(wanted)).abs().max())
            if math.isfinite(error) and (best is None or error < best[0]):
                best = (error, layer)
    assert best is not None
    return TableApproximation(About.of(target, held, "additive"), best[1], *held.tensors).sealed()


def _effects(target: Target, low: Array, high: Array, unit: Array, seed: int) -> Array:
    """The mean of f along lines in every direction, less its chord: shape (dim, sample, outputs)."""
    dim, count = len(low), len(unit)
    rng = np.random.default_rng(seed)
    base = low + rng.random((LINES, dim)) * (high - low)
    base[0] = 0.5 * (low + high)

    def points(first: int, last: int) -> Array:
        direction, line, at = np.unravel_index(np.arange(first, last), (dim, LINES, count))
        rows = base[line]
        rows[np.arange(len(rows)), direction] = (0.5 * (low + high) + 0.5 * (high - low) * unit[at][:, None])[
            np.arange(len(rows)), direction
        ]
        return inside(rows, target.box)

    key = f"additive-{count}-{digest(np.stack([low, high, *base]))}"
    values = target.table(dim * LINES * count, points, "f along lines", key)
    mean = values.reshape(dim, LINES, count, -1).mean(1)
    chord = mean[:, :1] + (mean[:, -1:] - mean[:, :1]) * (0.5 * (unit + 1))[None, :, None]
    return mean - chord


def _layer(axis: Axis, value: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, slope: torch.Tensor,
           constant: torch.Tensor, name: str, dtype: torch.dtype) -> AttentionLayer:  # fmt: skip
    dim = len(scale)
    query = torch.zeros(dim, dim, 2, dtype=dtype)
    query[torch.arange(dim), torch.arange(dim), 0] = scale
    keys = np.stack([axis.slope, axis.offset], -1)
    group = Heads(
        "memory",
        W_Q=query,
        b_Q=torch.stack([shift, torch.ones(dim, dtype=dtype)], -1),
        M_K=torch.from_numpy(keys).to(dtype)[None],
        M_V=value,
        W_O=torch.eye(value.shape[-1], dtype=dtype)[None],
        purpose=f"{name}, one head per coordinate",
    )
    return AttentionLayer([group], S=slope, s=constant)
