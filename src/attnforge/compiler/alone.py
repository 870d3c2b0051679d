"""The derivation of a head on its own: it is a network of one operation to the kernel (docs/kernel.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..certificates.certificate import Certificate
from ..certificates.certified import CertifiedModule
from ..certificates.proof import settled
from ..dtypes import Array
from ..heads.anchor.head import AnchorHead
from ..heads.anchor.rule import ANCHOR_CELLS
from ..heads.chain.head import ChainHead
from ..heads.fast.activation import FastActivation
from ..heads.gate.head import GateHead
from ..heads.gate.target import Lines
from ..heads.norm.head import NormHead
from ..heads.product.head import ProductHead
from ..heads.rule import NEAR, SMOOTH_CELLS, crossings
from ..heads.stored import SelfSpec
from ..heads.token.head import TokenHead
from ..kernel.alone.fast import Fast
from ..kernel.alone.heads import entries
from ..kernel.alone.pair import Pair
from ..kernel.alone.ramp import Channels
from ..kernel.balls import NotProved, working
from ..kernel.file import Saved
from ..kernel.plain.theorem import unfolded
from ..kernel.plain.variant import straightened
from ..kernel.prove import prove
from ..network import AttentionLayer
from ..theorems.ramps import Ramp
from .derivation import MOST_CELLS, finished

EFFORT = 200  # parts of the box that are looked at: a head has one or two numbers to split
WORK = 1 << 15  # cells times slots beyond which tables are not made finer: seconds
NORM_CELLS = (12, 32, 96)  # of a norm, for each factor e of the mean square: sigmoids move by less than 1 on each
WIDER = 2.0**-7  # beyond the interval of variances: what the kernel admits at its ends
ROOM = {torch.float32: 2.0**-14, torch.float64: 2.0**-40}  # and what rounding a variance may add: a few hundred u
LIVE, READ_STEP = 40.0, 1.0  # of theta: beyond its last anchor by so much a table is flat; cells are halved at need
#: Halving cells ends when it three times leaves so much of the largest error, unless that is so near the goal.
HELPED, NEARLY = 0.98, 1.1
FINER, MOST_READ = 9, 4096  # times that cells of a table are halved, and cells: a millisecond each
TOKENS = 4  # and for heads over tokens, whose bound hardly depends on the part


def proved(head: CertifiedModule, certificate: Certificate) -> Certificate:
    """A head's certificate after the kernel has been run on what `save` writes of it."""
    return settled(head, certificate, lambda saved, bound: derive(head, saved, bound))


def derive(head: CertifiedModule, saved: Saved, goal: float) -> dict[str, Any]:
    """The derivation of a head."""
    if isinstance(head, NormHead):
        return _norm(head, saved, goal)
    if isinstance(head, FastActivation) or (isinstance(head, AnchorHead) and head.fast):
        return _fast(saved, goal)
    if isinstance(head, GateHead) and head.spec.target.pair:
        return _pair(head, saved, goal)
    if isinstance(head, Ramp):
        return _ramp(head, saved, goal)
    if isinstance(head, ChainHead):
        return _chain(head, saved, goal)
    if isinstance(head, TokenHead):
        last = 2 if head.positions.shape[0] else 1
        states, seen = [[[last, c] for c in range(head.channels)]], [[["tokens", head.attention.causal]]]
        chosen = _chosen(states, seen, last, None, head.attention.heads, [])
        return finished(saved, chosen, goal, TOKENS, {}, goal)
    if isinstance(head, ProductHead):
        low, high = head.box.outward(head.dtype)["x" if head.swapped else "y"]
        sides = head.box.outward(head.dtype)["y" if head.swapped else "x"]
        edges = np.linspace(low, high, SMOOTH_CELLS + 1)
        width = 1 if head.width is None else len(entries(saved.header["config"], saved.tensors))
        states = [[[op, c] for op in (1, 2) for c in range(width)], [[3, c] for c in range(width)]]
        count = head.layer.heads()[0].heads
        chosen = _chosen(states, [[], [["self", False]]], 3, 0, count, edges, head.spec.centre[0])
        (one,) = chosen["sites"]
        chosen["sites"] = [{**one, "channel": c, "first": c * count} for c in range(width)]
        return finished(saved, chosen, goal, EFFORT, {3: max(map(abs, sides))}, goal)
    assert isinstance(head, (AnchorHead, GateHead))
    scope, count = ("memory", 1) if isinstance(head, AnchorHead) else ("self", head.layer.heads()[0].heads)
    low, high = head.box.outward(head.dtype)["y"]
    edges = _edges(head)
    ends = np.unique(np.concatenate([[low], edges[(edges > low) & (edges < high)], [high]]))
    chosen = _chosen([[[1, 0]]], [[[scope, False]]], 1, 0, count, ends)
    return finished(saved, chosen, goal, EFFORT, {}, goal, max(MOST_CELLS, 2 * len(ends)))


def _edges(head: AnchorHead | GateHead) -> Array:
    """Edges of cells for the heads of one scalar."""
    if isinstance(head, AnchorHead):
        if head.beyond:
            raise NotProved(head.beyond)
        inner, wanted = head.cells(), max(ANCHOR_CELLS, int(head.size * max(2.0, head.kappa)))
        return np.append(inner[:: max(1, (len(inner) - 1) // wanted)], [inner[-1], 0.0])
    shape, spec = head.spec.target.shape, SelfSpec.read(head.layer)
    edges = np.concatenate([np.linspace(head.lo, head.hi, SMOOTH_CELLS + 1), *crossings(spec)])
    return np.append(edges, shape.knots if isinstance(shape, Lines) else ())


def _norm(head: NormHead, saved: Saved, goal: float) -> dict[str, Any]:
    """Cells of c.c, each as wide relative to itself, and finer until that is enough."""
    room = ROOM[head.dtype]
    ends = head.variance[0] * (1 - WIDER) * (1 - room), head.variance[1] * (1 + WIDER) * (1 + room)
    low, high = (math.log(end + head.eps_norm) for end in ends)
    chosen: dict[str, Any] = {}
    for fine in NORM_CELLS:
        inner = np.exp(np.linspace(low, high, max(16, math.ceil(fine * (high - low))) + 1)) - head.eps_norm
        inner[0], inner[-1] = ends
        chosen = {"edges": np.unique(head.channels * inner).tolist()}
        if prove(saved, chosen).bound <= goal:
            break
    return chosen


def _fast(saved: Saved, goal: float) -> dict[str, Any]:
    """Cells of theta where the table is live, doubling beyond it and around the gate's turn; finer where that helps."""
    with working():
        fast = Fast(saved)
        (low, high), read = fast.read.ends, fast.read
        edges = [np.array([low, high, 0.0, read.centre])]
        if read.gate:
            edges += [sign * NEAR / read.gate for sign in (-1.0, 1.0)]
        if read.values:
            last = read.kappa * (len(read.values) - 1) + LIVE
            far = last + 1.25 ** np.arange(0.0, 400.0)  # beyond all of float32
            step = max(READ_STEP, read.kappa / 4)
            live = np.arange(-last, last + step, step)
            edges += [read.centre + theta / read.rate for theta in (live, far, -far)]
        return _halved(np.unique(np.clip(np.concatenate(edges), low, high)).tolist(), fast.error, goal)


def _pair(head: GateHead, saved: Saved, goal: float) -> dict[str, Any]:
    """Cells of x - y, fine where the gate turns."""
    with working():
        pair = Pair(saved)
        low, high = -pair.span, pair.span
        even, turns = np.linspace(low, high, SMOOTH_CELLS + 1), crossings(SelfSpec.read(head.layer))
        edges = np.clip(np.concatenate([[low, high, 0.0], even, *turns]), low, high)
        return _halved(np.unique(edges).tolist(), pair.error, goal)


def _halved(edges: list[float], error: Callable[[float, float], float], goal: float) -> dict[str, Any]:
    """Cells between edges, halved where the error is above a goal, as long as that helps."""
    found: dict[tuple[float, float], float] = {}
    cells, before, stuck = list(itertools.pairwise(edges)), math.inf, 0
    for _ in range(FINER):
        found |= {cell: error(*cell) for cell in cells}
        worst, largest = [cell for cell, off in found.items() if not off <= goal], max(found.values())
        stuck = stuck + 1 if HELPED * before < largest < math.inf else 0
        before = largest
        if not worst or len(found) > MOST_READ or (stuck > 2 and largest > NEARLY * goal):
            break
        cells = []
        for a, b in worst:
            middle = 0.5 * a + 0.5 * b
            if a < middle < b:
                del found[a, b]
                cells += [(a, middle), (middle, b)]
    found |= dict.fromkeys(cells, 0.0)
    return {"edges": sorted({end for cell in found for end in cell})}


def _ramp(head: Ramp, saved: Saved, goal: float) -> dict[str, Any]:
    """Cells that are fine where heads change over, and doubling beyond the ends of the ramp."""
    gate, step, wanted = head.temperature == "gate", float(head.step), head.wanted
    shift = float(head.centre) if head.alone else 0.0  # what the heads' own queries take away
    a, b = float(head.shape.a) - shift, float(head.shape.b) - shift
    most = float(np.abs(wanted.w).sum(-1).max()) * head.radius + float(np.abs(wanted.t).max())
    far = most * (1 + ROOM[head.dtype]) + abs(shift) + step
    beyond = step / 8 * 1.25 ** np.arange(0.0, math.log(8 * far / step + 8) / math.log(1.25) + 8)
    fine = np.linspace(a - step, b + step, 8 * head.keys * head.heads + 17)
    layer = head.layers()[1] if gate else None
    turns = crossings(SelfSpec.read(layer)) if isinstance(layer, AttentionLayer) else ()
    edges = np.concatenate([fine, a - beyond, b + beyond, [a, b, -shift], *turns])
    if not wanted.constant:
        with working():
            ramp = Channels(unfolded(straightened(saved)))  # of a plain form the ramp that it is
            middles, rate = np.array([float(x) for x in ramp.turns]), 2 * head.kappa / step
            wide, near = float(ramp.wide), float(ramp.moved) * 1.01  # and what queries are off by
            apart = np.concatenate([NEAR / rate, [wide, wide - near, wide + near]])
            inner = np.concatenate([np.add.outer(middles, sign * apart).ravel() for sign in (-1.0, 1.0)])
            found = np.clip(np.concatenate([edges, inner, [-ramp.span, ramp.span]]), -ramp.span, ramp.span)
            return _halved(np.unique(found).tolist(), ramp.error, goal)
    ends = np.unique(np.concatenate([[-far], edges[(edges > -far) & (edges < far)], [far]]))
    scope, n, count = "self" if gate else "memory", head.scalars, 1 if gate else head.heads
    states = [[[op, c] for c in range(n)] for op in (1, 2)]
    chosen = _chosen(states, [[], [[scope, False]]], 2, 0, count, ends)
    (one,) = chosen["sites"]
    chosen["sites"] = [{**one, "channel": c, "first": c * count} for c in range(n)]
    cells = max(len(ends), WORK // (count * (head.keys + 1)))
    return finished(saved, chosen, goal, TOKENS, {}, goal, cells)


def _chain(head: ChainHead, saved: Saved, goal: float) -> dict[str, Any]:
    """The heads of a chain in their order: gates, then a product, or a table for each clipped argument, and a sum."""
    parts = {key: part for key, part in sorted(head.heads.items()) if isinstance(part, CertifiedModule)}
    gates = [key for key, part in parts.items() if isinstance(part, GateHead)]
    low, high = head.box.outward(head.dtype)["y"]
    sites: list[dict[str, Any]] = []
    tables: list[list[float]] = []

    def site(
        layer: int, op: int, group: int, heads: int, edges: Array, ends: tuple[float, float], pivot: float = 0.0
    ) -> None:
        inside = edges[(edges > ends[0]) & (edges < ends[1])]
        tables.append(np.unique(np.concatenate([[ends[0]], inside, [ends[1]]])).tolist())
        sites.append({"layer": layer, "op": op, "channel": 0, "group": group, "first": 0, "heads": heads,
                      "table": len(tables) - 1, "swapped": False, "pivot": pivot})  # fmt: skip

    for i, key in enumerate(gates):
        gate = parts[key]
        assert isinstance(gate, GateHead)
        site(0, i + 1, i, gate.layer.heads()[0].heads, _edges(gate), (low, high))
    scopes, reach = [[["self", False]] * len(gates)], {}
    product = parts.get("product")
    if isinstance(product, ProductHead):
        first, last = product.box.outward(product.dtype)["x" if product.swapped else "y"]
        edges = np.linspace(first, last, SMOOTH_CELLS + 1)
        site(1, 2, 0, product.layer.heads()[0].heads, edges, (first, last), product.spec.centre[0])
        reach = {2: max(map(abs, product.box.outward(product.dtype)["y" if product.swapped else "x"]))}
        states = [[[1, 0], [0, 0]] if product.swapped else [[0, 0], [1, 0]], [[2, 0]]]
        scopes.append([["self", False]])
    else:
        results, clips = [], 0
        for i, key in enumerate(gates):
            table = parts.get(key.replace("clip", "table"))
            if not isinstance(table, AnchorHead):
                results.append(i + 1)
                continue
            results.append(len(gates) + 1 + clips)
            ends = table.box.outward(table.dtype)["y"]
            site(1, results[-1], clips, 1, _edges(table), ends)
            clips += 1
        states = [[[i + 1, 0] for i in range(len(gates))], [[v, 0] for v in results], [[len(gates) + clips + 1, 0]]]
        scopes += [[["memory", False]] * clips, []]
    chosen = {"states": states, "scopes": scopes, "sites": sites, "tables": tables, "tree": []}
    return finished(saved, chosen, goal, EFFORT, reach, goal / 4)


def _chosen(
    states: Any, scopes: Any, op: int, channel: int | None, heads: int, edges: Array | list[float], pivot: float = 0.0
) -> dict[str, Any]:
    """The choices of one operation, in the last layer."""
    site = {
        "layer": len(states) - 1, "op": op, "channel": channel, "group": 0, "first": 0, "heads": heads,
        "table": 0 if len(edges) else None, "swapped": False, "pivot": pivot,
    }  # fmt: skip
    tables = [[float(x) for x in edges]] if len(edges) else []
    return {"states": states, "scopes": scopes, "sites": [site], "tables": tables, "tree": []}
