"""Route `additive`: a sum of functions of one coordinate each, every one a warm anchor head, all in one layer.

The part of coordinate i is the mean of f along lines in direction i through a few random points, less its mean: exactly
the summand if f is additive, and the best one in the mean square as the number of lines grows (a main effect) if it is
not. Cost and size grow linearly with the dimension. Results are calibrated.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..errors import ArgumentError
from ..network import AttentionLayer, Heads
from .result import Held, TableApproximation, inside
from .spectral import CUTS, Axis, Warm, affine_fit, chebyshev, finished, inverses, quantum_for, sample_count, shapes
from .target import Array, Target, digest

LINES = 12
KAPPAS = (0.12, 0.2, 0.3, 0.45)


def build_additive(target: Target, anchors: int, held: Held, dtype: torch.dtype, seed: int = 0) -> TableApproximation:
    """One head with `anchors` anchors for every coordinate; guards and temperature chosen on a sample of their own."""
    if isinstance(anchors, bool) or not isinstance(anchors, int) or anchors < 4:
        raise ArgumentError(f"anchors must be a whole number of at least 4 for an additive fit, got {anchors!r}")
    box = target.box.outward(dtype)
    low, high = (side.reshape(-1).numpy() for side in (box.lower, box.upper))
    half = torch.from_numpy(np.where(high > low, 0.5 * (high - low), 1.0)).to(dtype)
    scale = 1 / half  # every coordinate is read as a number in [-1, 1], so that all heads share one table of keys
    shift = (-torch.from_numpy(0.5 * (low + high)) * scale.double()).to(dtype)
    unit = chebyshev(-1.0, 1.0, sample_count(anchors))
    effects = _effects(target, low, high, unit, seed)
    tuning = Held.draw(target, dtype, max(768, 8 * box.dim), seed=seed + 7)
    even, wanted = tuning.points, tuning.values
    tuned = even * scale.double().numpy() + shift.double().numpy()
    best: tuple[float, AttentionLayer] | None = None
    for warm in shapes(anchors, KAPPAS):
        axis = _axis(warm, dtype)
        weight, there = axis.weights(unit), axis.weights(tuned.ravel()).reshape(*tuned.shape, -1)
        for inverse in inverses(weight, CUTS[dtype]):
            solved = inverse @ effects
            solved += inverse @ (effects - weight @ solved)  # one step of refinement
            value = torch.from_numpy(solved).to(dtype)
            sums = np.einsum("ndp,dpo->no", there, value.double().numpy())
            slope, constant = affine_fit(even, wanted - sums, dtype)
            layer = _layer(axis, value, scale, shift, slope, constant, target.name, dtype)
            with torch.no_grad():
                error = float((layer(torch.from_numpy(even).to(dtype)).double() - torch.from_numpy(wanted)).abs().max())
            if math.isfinite(error) and (best is None or error < best[0]):
                best = (error, layer)
    assert best is not None
    return finished(target, best[1], held, "additive")


def _axis(warm: Warm, dtype: torch.dtype) -> Axis:
    return Axis.rounded(-1.0, 1.0, warm, dtype, quantum_for(1, warm, dtype))


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
