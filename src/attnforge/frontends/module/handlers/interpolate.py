"""Handlers for enlarging and shrinking by interpolation: affine maps, whose weights are found as fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ....expressions.constants import rounded
from .. import atoms as algebra
from ..atoms import Refusal, Tape
from ..values import Value, atoms, wrap
from .table import Operation, handles

Row = dict[int, Fraction]
"""Weights of entries along an axis, by place."""

#: Entries of the map of one channel; its weights are fractions, a microsecond each.
MOST = 2**20


def _cubic(t: Fraction, a: Fraction) -> Fraction:
    """Keys' kernel of slope a at 1."""
    t = abs(t)
    if t <= 1:
        return ((a + 2) * t - (a + 3)) * t * t + 1
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a if t < 2 else Fraction(0)


def _hat(t: Fraction) -> Fraction:
    return max(Fraction(0), 1 - abs(t))


def _scale(before: int, after: int, factor: float | None, corners: bool) -> Fraction:
    """How far one step of the result goes in the input."""
    if corners:
        return Fraction(before - 1, after - 1) if after > 1 else Fraction(0)
    return 1 / Fraction(factor) if factor else Fraction(before, after)


def _rows(before: int, after: int, scale: Fraction, corners: bool, cubic: bool) -> list[Row]:
    """What each entry of the result reads along one axis."""
    found = []
    for k in range(after):
        at = scale * k if corners else scale * (2 * k + 1) / 2 - Fraction(1, 2)
        at = at if cubic or corners else max(at, Fraction(0))
        row: Row = {}
        first = math.floor(at)
        for j in range(first - 1, first + 3) if cubic else (first, first + 1):
            place = min(max(j, 0), before - 1)
            weight = _cubic(at - j, Fraction(-3, 4)) if cubic else _hat(at - j)
            row[place] = row.get(place, Fraction(0)) + weight
        found.append(row)
    return found


def _smooth_rows(before: int, after: int, scale: Fraction, cubic: bool) -> list[Row]:
    """The same with antialias=True: the kernel as wide as a step where the result is smaller."""
    found, wide = [], max(scale, Fraction(1))
    reach = (2 if cubic else 1) * wide
    for k in range(after):
        centre = scale * (2 * k + 1) / 2
        low, high = max(int(centre - reach + Fraction(1, 2)), 0), min(int(centre + reach + Fraction(1, 2)), before)
        offsets = {j: (j - centre + Fraction(1, 2)) / wide for j in range(low, high)}
        row = {j: _cubic(t, Fraction(-1, 2)) if cubic else _hat(t) for j, t in offsets.items()}
        total = sum(row.values())
        found.append({j: weight / total for j, weight in row.items()})
    return found


_SMOOTH = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
_PLAIN = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")


@handles(*_PLAIN, *_SMOOTH, note="affine: linear and cubic interpolation, also with align_corners and antialias")
def _interpolated(tape: Tape, call: Operation) -> Value:
    key = "input" if "input" in call.arguments else "self"
    ids = atoms(tape, call[key])
    steer: dict[str, Any] = {name: value for name, value in call.arguments.items() if name != key}
    rank = ids.dim() - 2
    size = ids.shape[2:]
    after = call.target(torch.zeros(ids.shape, dtype=torch.float64), **steer).shape[2:]
    if size.numel() * after.numel() > MOST:
        raise Refusal(f"it needs a {size.numel()} x {after.numel()} matrix of fractions, which is too large")
    factors = list(call.get("scale_factors") or [call.get(f"scales_{axis}") for axis in "dhw"[3 - rank :]])
    factors = [call.get("scales")] if rank == 1 and "scale_factors" not in call.arguments else factors
    corners, cubic = bool(call["align_corners"]), "cubic" in call.name
    axes = []
    for before, wanted, factor in zip(size, after, factors, strict=True):
        scale = _scale(before, wanted, factor, corners)
        smooth = call.name.endswith("_aa")
        axes.append(_smooth_rows(before, wanted, scale, cubic) if smooth
                    else _rows(before, wanted, scale, corners, cubic))  # fmt: skip
    weight, off = np.zeros((size.numel(), after.numel())), np.zeros((size.numel(), after.numel()))
    for column, parts in enumerate(itertools.product(*axes)):
        for places in itertools.product(*(part.items() for part in parts)):
            row = int(np.ravel_multi_index([place for place, _ in places], size))
            weight[row, column], off[row, column] = rounded(Fraction(math.prod(share for _, share in places)))
    _confirm(call, key, steer, size, weight)
    out = algebra.contract(tape, ids.flatten(2), tape.doubt(weight, off))
    return wrap(tape, out.reshape(*ids.shape[:2], *after))


def _confirm(call: Operation, key: str, steer: dict[str, Any], size: torch.Size, weight: np.ndarray) -> None:
    """Raise where torch interpolates in another way than is written here."""
    points = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 1, size.numel())))
    found = call.target(**{key: points.reshape(3, 1, *size)}, **steer).flatten(2)
    if not torch.allclose(found, points @ torch.from_numpy(weight), rtol=1e-9, atol=1e-9):
        raise Refusal("this version of torch weighs entries in a way that is not known here")
