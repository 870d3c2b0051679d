"""Writing the derivation of a compiled network: the choices that the kernel's proof needs (docs/kernel.md).

Columns, heads and scopes are read off the layout. Edges of cells come from the sites. The box is split where the
kernel's own bound is worst, until it is near the bound of the fast analysis or enough parts have been looked at.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from ..dtypes import Array, stored
from ..functions.piecewise import clipped
from ..heads.anchor.site import AnchorSite
from ..heads.gate.site import GateSite
from ..heads.product.site import ProductSite
from ..heads.rule import first_cells
from ..heads.site import Site
from ..heads.stored import StoredHeads
from ..kernel.balls import working
from ..kernel.file import Saved
from ..kernel.prove import Prover
from ..programs.ops import Apply
from .compiled import CompiledNetwork
from .layout import Step

ANCHOR_CELLS = 128  # of a table of anchors at first: every fourth of those that the fast analysis begins with
SMOOTH_CELLS = 64  # of a product: the Taylor remainder is then below float64's roundoff
#: Edges around a crossing of two logits, in units of their difference: fine where weights move, then doubling.
NEAR = np.concatenate([np.arange(0.0, 6.0, 0.125), np.arange(6.0, 40.0, 0.5), 40.0 * 2.0 ** np.arange(0.0, 64.0)])
EFFORT = 1500  # leaves that are looked at before giving up
TRIES = 3  # coordinates that are tried for a split
NEARLY = 1.02  # times the fast bound is near enough


def structure(net: CompiledNetwork) -> dict[str, Any]:
    """All choices but the tree, which is a single leaf."""
    layout = net.layout
    states, scopes, sites, tables = [], [], [], []
    known: dict[tuple[float, ...], int] = {}
    for number, step in enumerate(layout.steps):
        states += [step.columns, step.after]
        layer = net.network.layers[2 * number + 1]
        scopes += [[], [[group.scope, group.causal] for group in layer.heads()]]  # type: ignore[operator, union-attr]
        for site in step.sites:
            for c, place in enumerate(step.places(site)):
                edges = _edges(net, step, site, StoredHeads.read(layer, place))  # type: ignore[arg-type]
                if edges is not None and edges not in known:
                    known[edges] = len(tables)
                    tables.append(list(edges))
                swapped = isinstance(site, ProductSite) and site.swapped
                pivot = site.centre[0] if isinstance(site, ProductSite) else 0.0
                sites.append(
                    {
                        "layer": 2 * number + 1, "op": site.op, "channel": c if site.channelwise else None,
                        "group": place.group, "first": place.first, "heads": place.heads,
                        "table": None if edges is None else known[edges], "swapped": swapped, "pivot": pivot,
                    }
                )  # fmt: skip
    states.append(layout.output)
    scopes.append([])
    listed = [[[value, channel] for value, channel in columns] for columns in states]
    return {"states": listed, "scopes": scopes, "sites": sites, "tables": tables, "tree": []}


def _edges(net: CompiledNetwork, step: Step, site: Site, heads: StoredHeads) -> tuple[float, ...] | None:
    """The edges of cells for a site that reads one scalar; None for others."""
    if isinstance(site, ProductSite):
        low, high = site.intervals[1]
        return tuple(np.unique(np.linspace(low, high, SMOOTH_CELLS + 1)).tolist())
    if not isinstance(site, (AnchorSite, GateSite)):
        return None
    op = net.program.ops[site.op]
    assert isinstance(op, Apply)
    low, high = site.interval
    target = clipped(op.function)
    if isinstance(site, AnchorSite):
        inner = np.array(site.edges)[:: max(1, (len(site.edges) - 1) // ANCHOR_CELLS)]
    else:
        inner = np.concatenate([np.linspace(low, high, SMOOTH_CELLS + 1), *_crossings(heads)])
    return tuple(first_cells(target, low, high, inner[(inner > low) & (inner < high)]).tolist())


def _crossings(heads: StoredHeads) -> list[Array]:
    """Edges around the places where two logits of a gate cross."""
    spec = heads.self_spec()
    keys = np.concatenate([spec.b_K[:, None], spec.M_K], 1)
    slope = np.einsum("hk,hsk->hs", spec.W_Q[:, 0], keys)
    offset = np.einsum("hk,hsk->hs", spec.b_Q, keys)
    i, j = np.triu_indices(keys.shape[1], 1)
    steep, level = (slope[:, i] - slope[:, j]).ravel(), (offset[:, i] - offset[:, j]).ravel()
    live = np.abs(steep) > 0
    return [
        place + sign * NEAR / abs(rate)
        for rate, place in zip(steep[live], -level[live] / steep[live], strict=True)
        for sign in (-1.0, 1.0)
    ]


def derive(net: CompiledNetwork, saved: Saved, goal: float, effort: int = EFFORT) -> dict[str, Any]:
    """The derivation of a network, its box split until the kernel proves about `goal`."""
    chosen = structure(net)
    with working():
        prover = Prover.of(saved, chosen)
        chosen["tree"] = split(prover, goal * NEARLY, effort)
    return chosen


def split(prover: Prover, goal: float, effort: int = EFFORT) -> list[Any]:
    """A tree of parts, split where the bound is worst and along the coordinate that lowers it most."""
    low, high = prover.box()
    root: list[Any] = []
    count = 0
    waiting = [(-prover.leaf(low, high), count, low, high, root)]
    looked = 1
    while looked < effort:
        bound, _, low, high, node = waiting[0]
        if -bound <= goal:
            break
        heapq.heappop(waiting)
        best: tuple[float, float, int, float, Any] | None = None
        for i in _order(low, high, prover)[:TRIES]:
            at = 0.5 * low[i] + 0.5 * high[i]
            if not low[i] < at < high[i]:
                continue
            parts = (low, (*high[:i], at, *high[i + 1 :])), ((*low[:i], at, *low[i + 1 :]), high)
            found = [prover.leaf(*part) for part in parts]
            looked += 2
            score = sum(min(x, 1e300) for x in found)
            if best is None or score < best[0]:
                best = score, max(found), i, at, (parts, found)
        if best is None:
            heapq.heappush(waiting, (bound, count, low, high, node))
            break
        _, _, i, at, (parts, found) = best
        node += [i, at, [], []]
        for part, value, child in zip(parts, found, node[2:], strict=True):
            count += 1
            heapq.heappush(waiting, (-value, count, *part, child))
    return root


def _order(low: tuple[float, ...], high: tuple[float, ...], prover: Prover) -> list[int]:
    """The coordinates of a part, widest first relative to the box."""
    first, last = prover.box()
    share = [(b - a) / (d - c) if d > c else -math.inf for a, b, c, d in zip(low, high, first, last, strict=True)]
    return sorted((i for i in range(len(low)) if high[i] > low[i]), key=lambda i: -share[i])
