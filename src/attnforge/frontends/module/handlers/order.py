"""Handlers for order statistics: a network that puts two entries at a time in order, by mean and |x - y| / 2.

With relu in place of the absolute value, a pair would triple the error that comes in; so it doubles it. Values are
continuous wherever entries meet; the places they came from jump there, and are refused where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....expressions.constants import rounded
from .. import atoms as algebra
from ..atoms import Refusal, Tape
from ..values import Unknown, Value, add, apply, atoms, maximum, minimum, rearranged, rescale, shape, subtract, wrap
from .reduce import largest, running
from .table import Operation, handles

#: Entries that are put in order: 191 comparisons in 15 layers, each of which doubles the error that comes in.
MOST = 32


def _comparisons(count: int) -> Iterator[list[tuple[int, int]]]:
    """Batcher's odd-even merge sort, stage by stage: pairs of places that change where the first is larger.

    >>> sum(map(len, _comparisons(4))), len(list(_comparisons(8)))
    (5, 6)
    """
    p = 1
    while p < count:
        k = p
        while k >= 1:
            starts = (j + i for j in range(k % p, count - k, 2 * k) for i in range(min(k, count - j - k)))
            stage = [(low, low + k) for low in starts if low // (2 * p) == (low + k) // (2 * p)]
            if stage:
                yield stage
            k //= 2
        p *= 2


def ordered(tape: Tape, x: Value, dim: int) -> Tensor:
    """The atoms of x, growing along an axis, which becomes the last one."""
    ids = atoms(tape, x).movedim(dim, -1).clone() if shape(x) else atoms(tape, x)[None]
    count = ids.shape[-1]
    if count > MOST:
        raise Refusal(f"it puts {count} entries in order; networks of comparisons are built for {MOST} at most")
    for stage in _comparisons(count):
        first, second = (list(side) for side in zip(*stage, strict=True))
        left, right = wrap(tape, ids[..., first]), wrap(tape, ids[..., second])
        middle = rescale(tape, add(tape, left, right), 0.5)
        half = rescale(tape, apply(tape, subtract(tape, left, right), "abs"), 0.5)
        ids[..., first] = atoms(tape, subtract(tape, middle, half))
        ids[..., second] = atoms(tape, add(tape, middle, half))
    return ids


def _with_places(call: Operation, values: Value) -> list[Any]:
    return [values, Unknown(f"the places that {call.name} gives beside the values jump where two entries are equal")]


def _dim(call: Operation) -> int:
    return int(call.get("dim", -1))


@handles("sort", "msort", note="the values: a network of comparisons, each an absolute value; up to 32 entries")
def _sort(tape: Tape, call: Operation) -> Any:
    dim = 0 if call.name == "msort" else _dim(call)
    ids = ordered(tape, call["self"], dim)
    ids = ids.flip(-1) if call.get("descending") else ids
    values = wrap(tape, ids.movedim(-1, dim) if shape(call["self"]) else ids[0])
    return values if call.name == "msort" else _with_places(call, values)


@handles("topk", note="the values, as sort")
def _topk(tape: Tape, call: Operation) -> Any:
    x, dim, count, up = call["self"], _dim(call), int(call["k"]), bool(call["largest"])
    if count == 1 and shape(x):
        return _with_places(call, largest(tape, x, [dim % len(shape(x))], True, 1.0 if up else -1.0))
    if not call["sorted"] and count < (shape(x)[dim] if shape(x) else 1):
        raise Refusal("without sorted=True its order is left to the machine")
    ids = ordered(tape, x, dim)
    ids = (ids.flip(-1) if up else ids)[..., :count]
    return _with_places(call, wrap(tape, ids.movedim(-1, dim) if shape(x) else ids[0]))


@handles("kthvalue", "median", "nanmedian", note="the values, as sort")
def _kth(tape: Tape, call: Operation) -> Any:
    x = call["self"]
    whole = "dim" not in call.arguments
    if whole:
        x = rearranged(tape, x, lambda i: i.reshape(-1))
    dim = 0 if whole else _dim(call)
    count = shape(x)[dim] if shape(x) else 1
    place = int(call["k"]) - 1 if call.name == "kthvalue" else (count - 1) // 2  # the lower one of two in the middle
    found = ordered(tape, x, dim)[..., place]
    if whole:
        return wrap(tape, found)
    return _with_places(call, wrap(tape, found.unsqueeze(dim) if call["keepdim"] and shape(x) else found))


@handles("cummax", "cummin", note="the values: one relu after the other")
def _extremes(tape: Tape, call: Operation) -> Any:
    join = maximum if call.name == "cummax" else minimum
    return _with_places(call, running(tape, call["self"], _dim(call), join))


@handles("quantile", "nanquantile", note="as sort, then between two neighbours")
def _quantile(tape: Tape, call: Operation) -> Value:
    x, wanted = call["self"], torch.as_tensor(call.constant("q"), dtype=torch.float64)
    if tape.off(wanted.numpy()).any():
        raise Refusal("which quantile it gives is a constant that was rounded")
    whole = call.get("dim") is None
    x = rearranged(tape, x, lambda i: i.reshape(-1)) if whole else x
    dim = 0 if whole else int(call["dim"])
    ids = ordered(tape, x, dim)
    weight = np.stack([_shares(tape, q, ids.shape[-1], call["interpolation"]) for q in wanted.reshape(-1).tolist()], 1)
    found = algebra.contract(tape, ids, weight)
    if call["keepdim"]:
        size = [1] * len(shape(call["self"])) if whole else None
        found = found.reshape(*size, -1) if size is not None else found.unsqueeze(dim if dim >= 0 else dim - 1)
    return wrap(tape, found.movedim(-1, 0) if wanted.dim() else found[..., 0])


def _shares(tape: Tape, q: float, count: int, way: str) -> np.ndarray:
    """The weights of sorted entries in a quantile."""
    place = Fraction(q) * (count - 1)
    low = math.floor(place)
    share = place - low
    near = min(share, 1 - share, abs(share - Fraction(1, 2)) if way == "nearest" else 1)
    if way in ("lower", "higher", "nearest") and 0 < near < Fraction(1, 2**20) * count:
        raise Refusal(f"whether the entry below or above is the quantile {q:g} is decided by rounding")
    if way == "nearest" and share == Fraction(1, 2):
        share = Fraction(low % 2)  # halves go to the even one
    steps = {"lower": Fraction(0), "higher": Fraction(math.ceil(share)), "nearest": Fraction(round(share))}
    share = steps.get(way, Fraction(1, 2) if way == "midpoint" and share else share)
    weight = np.zeros(count)
    for k, part in ((low, 1 - share), (low + 1, share)):
        if part:
            near_by, off = rounded(part)
            weight[k] = tape.doubt(np.array([near_by]), np.array([off]))[0]
    return weight
