"""Writing the derivation of a theorem's network: the choices that the kernel's proof needs (docs/kernel.md)."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from ..certificates.certificate import Certificate
from ..certificates.certified import CertifiedModule
from ..certificates.proof import settled
from ..dtypes import Array
from ..kernel.file import Saved
from .bounds import AnchorRow
from .partition import MaxAffine
from .universal import Universal

LEAVES = 1 << 13  # of a tree of the box for scattered centres, at most: a tenth of a second
ENOUGH = 0.98  # of the square of what the analysis takes for the largest distance: finer parts gain nothing
#: Ends of cells around the middle of two anchors, where a cold head changes over: in spacings.
TURN = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
GROWTH = 1.5  # of cells beyond the ramp
BEYOND = 2.0**-20  # of the box: how far numbers of the dtype, and rounded queries, may lie outside of it


def proved(net: CertifiedModule, certificate: Certificate) -> Certificate:
    """A construction's certificate after the kernel has been run on what `save` writes of it."""
    return settled(net, certificate, lambda saved, bound: derive(net, saved, bound))


def derive(net: CertifiedModule, saved: Saved, goal: float) -> dict[str, Any]:
    """The derivation of hats or cells."""
    if isinstance(net, Universal):
        return {"edges": _edges(net)}
    assert isinstance(net, MaxAffine)
    return {"sharpness": float(net.asked.beta), "tree": _tree(net)}


def _edges(net: Universal) -> list[float]:
    """Cells of what ramps read, fine where the ramp is and doubling beyond."""
    count = net.count
    row = AnchorRow(net.asked.places[0], net.asked.places[-1], count)
    step, half = float(row.step), 0.5
    middles = np.array([float(x) for x in row.places[:-1]]) + 0.5 * step
    inner = np.add.outer(middles, step * np.array([*(-x for x in TURN), *TURN])).ravel()
    # from -1/2 to a side's number of steps less 1/2; numbers of the dtype outside of the box, and rounding, are within
    largest = max(abs(x) for side in net.box.intervals() for x in side) / float(min(net.grid.steps))
    far = max(net.grid.counts) + 2.0 + BEYOND * largest
    outer = step * GROWTH ** np.arange(0.0, math.log(far / step) / math.log(GROWTH) + 2)
    edges = np.concatenate([inner, -half - outer, half + outer])
    return [float(x) for x in np.unique(np.concatenate([edges[np.abs(edges) < far], [-far, far]]))]


def _tree(net: MaxAffine) -> Any:
    """A tree of the box whose leaves name a centre that is near."""
    wide = net.box.outward(net.dtype)
    low, high = (end.flatten().numpy() for end in (wide.lower, wide.upper))
    centres = net.asked.centres
    if isinstance(net.cells, int):
        return _even([np.unique(axis) for axis in centres.T])
    return _scattered(centres, low, high, ENOUGH * net.asked.reach**2)


def _even(axes: list[Array]) -> Any:
    """The tree of a grid of cells, which are cut half-way between neighbouring centres."""
    counts = [len(axis) for axis in axes]

    def part(first: list[int], last: list[int]) -> Any:
        i = max(range(len(axes)), key=lambda k: last[k] - first[k])
        if last[i] - first[i] == 1:
            return int(np.ravel_multi_index(first, counts))
        middle = (first[i] + last[i]) // 2
        cut = 0.5 * float(axes[i][middle - 1]) + 0.5 * float(axes[i][middle])
        return [i, cut, part(first, _with(last, i, middle)), part(_with(first, i, middle), last)]

    return part([0] * len(axes), counts)


def _with(index: list[int], i: int, value: int) -> list[int]:
    return [*index[:i], value, *index[i + 1 :]]


def _scattered(centres: Array, low: Array, high: Array, goal: float) -> Any:
    """Of the parts of the box the one that reaches furthest from a centre is halved, until none reaches beyond the
    goal, which is the square of a distance."""

    def part(a: Array, b: Array) -> tuple[float, int]:
        distance = np.sum(np.maximum(np.abs(centres - a), np.abs(centres - b)) ** 2, 1)
        k = int(np.argmin(distance))
        return -float(distance[k]), k

    root: list[Any] = [None]
    waiting = [(*part(low, high), 0, root, 0, low, high)]
    leaves = 1
    while -waiting[0][0] > goal and leaves < LEAVES:
        _, _, _, holder, at, a, b = heapq.heappop(waiting)
        i = int(np.argmax(b - a))
        middle = 0.5 * float(a[i]) + 0.5 * float(b[i])
        node: list[Any] = [i, middle, None, None]
        holder[at] = node
        for side in (2, 3):
            first, last = a.copy(), b.copy()
            (last if side == 2 else first)[i] = middle
            leaves += 1
            heapq.heappush(waiting, (*part(first, last), leaves, node, side, first, last))
    for _, k, _, holder, at, _, _ in waiting:
        holder[at] = k
    return root[0]
