"""Writing the derivation of a compiled network: the choices that the kernel's proof needs (docs/kernel.md).

Columns, heads and scopes are read off the layout. Edges of cells come from the sites. The box is split where the
kernel's own bound is worst, until it is near the bound of the fast analysis or enough parts have been looked at.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from typing import Any

from ..certificates.certificate import Certificate
from ..certificates.proof import settled
from ..heads.families import rule_of
from ..heads.rule import Setting
from ..heads.stored import StoredHeads
from ..kernel.balls import working
from ..kernel.file import Saved
from ..kernel.functions import Function
from ..kernel.prove import Prover
from ..kernel.scalar import Table, error_on
from ..kernel.values import MOST_SYMBOLS, Blind, values
from .compiled import CompiledNetwork

EFFORT = 2000  # parts of the box that are looked at before giving up
WORK = 300_000  # and numbers on all of them, with a slope for each coordinate of the box: a few seconds
FEWEST = 8  # parts that are looked at in any case
TRIES = 2  # coordinates that are tried for a split
ALIKE = 1.02  # splits whose bounds add up to so much more than the least are as good
CLOSE, PROBE = 1.03, 16  # splitting ends so near to what points have; those are looked at every so many parts, doubling
MOST_CELLS = 4096  # of a table that is made finer
SLOW, PATIENCE = 0.99, 500  # splitting ends when so many more parts do not lower the bound by 1 %


def proved(net: CompiledNetwork, certificate: Certificate) -> Certificate:
    """A network's certificate after the kernel has been run on what `save` writes of it."""

    def wrong(chosen: dict[str, Any]) -> str:
        same = chosen["scopes"] == structure(net, tables=False)["scopes"]
        return "" if same else "the derivation of the file has other scopes than its heads"

    return settled(net, certificate, lambda saved, bound: derive(net, saved, bound), wrong)


def structure(net: CompiledNetwork, tables: bool = True) -> dict[str, Any]:
    """All choices but the tree, which is a single leaf; and but the edges of `tables`, if these are not wanted."""
    layout, setting = net.layout, Setting(net.program, net.dtype)
    states: list[tuple[tuple[int, int], ...]] = []
    scopes: list[list[list[Any]]] = []
    sites: list[dict[str, Any]] = []
    edges_of: list[list[float]] = []
    known: dict[tuple[float, ...], int] = {}
    for number, step in enumerate(layout.steps):
        states += [step.columns, step.after]
        layer = net.network.layers[2 * number + 1]
        scopes += [[], [[group.scope, group.causal] for group in layer.heads()]]  # type: ignore[operator, union-attr]
        for site in step.sites:
            rule, (swapped, pivot) = rule_of(site.family), site.order
            for c, place in enumerate(step.places(site)):
                heads = StoredHeads.read(layer, place)  # type: ignore[arg-type]
                edges = rule.edges(site, setting, heads) if tables else None
                if edges is not None and edges not in known:
                    known[edges] = len(edges_of)
                    edges_of.append(list(edges))
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
    return {"states": listed, "scopes": scopes, "sites": sites, "tables": edges_of, "tree": []}


def derive(
    net: CompiledNetwork, saved: Saved, goal: float, effort: int | None = None,
    whole: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:  # fmt: skip
    """The derivation of a network, its box split until the kernel proves about `goal`, or `effort` is spent.

    `whole` makes the derivation of a file out of it, where that says more.
    """
    chosen = structure(net)
    if effort is None:
        numbers = sum(op.width for op in net.program.ops) * net.program.tokens
        effort = max(FEWEST, min(EFFORT, WORK // (numbers * (1 + min(net.program.box.dim, MOST_SYMBOLS)))))
    reach = {site.op: site.reach for site in net.layout.sites}
    return finished(saved, chosen, goal, effort, reach, whole=whole)


def finished(
    saved: Saved, chosen: dict[str, Any], goal: float, effort: int, reach: dict[int, float],
    enough: float = 0.0, most: int = MOST_CELLS, whole: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:  # fmt: skip
    """Choices with finer edges where these help, and a tree.

    `reach` is how large what products are scaled by is; cells whose errors are `enough` are not made finer, and there
    are at most so many.
    """
    with working():
        prover = Prover.of(saved, whole(chosen))
        refined = _refined(prover, reach, enough, most)
        if refined:
            for number, edges in refined.items():
                chosen["tables"][number] = edges
            prover = Prover.of(saved, whole(chosen))
        chosen["tree"] = split(prover, goal, effort)
    return chosen


def _refined(prover: Prover, reach: dict[int, float], enough: float, most: int) -> dict[int, list[float]]:
    """Finer edges for the tables on which halving the worst cells lowers the largest error."""
    away: dict[int, float] = {}
    for place in prover.chosen.places:
        if place.table is not None:
            away[place.table] = max(away.get(place.table, 0.0), reach.get(place.op, 0.0) + abs(place.pivot))
    found: dict[int, list[float]] = {}
    for (site, number), (slopes, rests) in prover.known.items():
        edges = found.get(number, list(prover.chosen.tables[number]))
        if number in found:
            slopes, rests = Table(site.function, edges).errors(site)
        per = functools.partial(_least_size, site.function) if prover.relative else _one
        cells = {
            (a, b): (s * away[number] + r) / per(a, b)
            for a, b, s, r in zip(edges, edges[1:], slopes, rests, strict=False)
        }
        before, stuck, kept = max(cells.values()), 0, None
        while stuck < 2 and len(cells) < most and before > enough:
            least = 0.9 * before if math.isfinite(before) else before
            for a, b in [cell for cell, error in cells.items() if not error < least]:
                middle = 0.5 * a + 0.5 * b
                if a < middle < b:
                    del cells[a, b]
                    for part in ((a, middle), (middle, b)):
                        slope, rest = error_on(site, *part)
                        cells[part] = (slope * away[number] + rest) / per(*part)
            worst = max(cells.values())
            stuck = stuck + 1 if math.isfinite(worst) and not worst < 0.98 * before else 0
            if worst < before:
                kept = sorted({end for cell in cells for end in cell})
            if not math.isfinite(worst) and min(b - a for a, b in cells) < 1e-12 * (edges[-1] - edges[0]):
                break
            before = worst
        if kept is not None:
            found[number] = kept
    return found


def _one(low: float, high: float) -> float:
    return 1.0


def _least_size(function: Function | None, low: float, high: float) -> float:
    """The least size of a function on a cell, roughly: what a relative error is relative to."""
    table = Table(function, (low, high))
    return max(table.low[0], -table.high[0], 1e-300)  # where it has a zero, no cell is fine enough


def split(prover: Prover, goal: float, effort: int) -> list[Any]:
    """A tree of parts, split where the bound is worst and along the coordinate that lowers it most."""
    low, high = first, last = prover.box()
    whole = prover.leaf(low, high)
    root: list[Any] = []
    own = {id(root): whole}  # the bound of every part, before it was split
    waiting = [(-whole, 0, low, high, root)]
    looked, before, probed = 1, (0, whole), 0
    while looked < effort and -waiting[0][0] > goal:
        worst, _, low, high, node = heapq.heappop(waiting)
        if looked >= probed:  # what points have is left by every split
            found = [prover.leaf(point, point) for point in _points(low, high)]
            goal = max([goal, *(CLOSE * x for x in found if goal < x < math.inf)])
            looked, probed = looked + len(found), 2 * looked + PROBE
            heapq.heappush(waiting, (worst, looked, low, high, node))
            continue
        if -worst <= SLOW * before[1] or not math.isfinite(before[1]):
            before = looked, -worst
        tried: list[tuple[float, float, int, float, Any]] = []
        blind = not math.isfinite(worst)
        for i in _order(low, high, prover, blind)[: 1 if blind else TRIES]:
            at = 0.5 * low[i] + 0.5 * high[i]
            if low[i] < at < high[i]:
                parts = (low, (*high[:i], at, *high[i + 1 :])), ((*low[:i], at, *low[i + 1 :]), high)
                found = [prover.leaf(*part) for part in parts]
                looked += 2
                score = sum(min(x, 1e300) for x in found)
                tried.append((score, (high[i] - low[i]) / (last[i] - first[i]), i, at, (parts, found)))
        if not tried or looked - before[0] > PATIENCE:
            heapq.heappush(waiting, (worst, looked, low, high, node))
            break
        least = min(score for score, *_ in tried)  # of what is nearly as good the widest: it has been split least
        _, _, i, at, (parts, found) = max((one for one in tried if one[0] <= ALIKE * least), key=lambda one: one[1])
        node += [i, at, [], []]
        for side, (part, value) in enumerate(zip(parts, found, strict=True)):
            own[id(node[2 + side])] = value
            heapq.heappush(waiting, (-value, looked + side, *part, node[2 + side]))
    _prune(root, own, -waiting[0][0])
    return root


def _points(low: tuple[float, ...], high: tuple[float, ...]) -> list[tuple[float, ...]]:
    """The middle of a part, its ends, and the corners next to them in turn."""
    turns = [tuple(pair[(i + k) % 2] for i, pair in enumerate(zip(low, high, strict=True))) for k in (0, 1)]
    return [tuple(0.5 * a + 0.5 * b for a, b in zip(low, high, strict=True)), low, high, *turns]


def _prune(root: list[Any], own: dict[int, float], bound: float) -> None:
    """Undo splits of parts whose own bound is no more than the whole tree's."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if own[id(node)] <= bound:
            node.clear()
        waiting += node[2:]


def _order(low: tuple[float, ...], high: tuple[float, ...], prover: Prover, blind: bool) -> list[int]:
    """The coordinates of a part that can be split: those first on which the values depend most, or where nothing is
    known, the widest ones."""
    first, last = prover.box()
    matter = [(b - a) / (d - c) if d > c else 0.0 for a, b, c, d in zip(low, high, first, last, strict=True)]
    try:
        known = blind or len(low) <= TRIES  # all of them are tried
        found = [] if known else values(prover.program, low, high, prover.by_op)
    except Blind:
        found = []
    slopes = [(e, e.slope) for value in found for row in value for e in row if e.slope is not None]
    if slopes:
        matter = [0.0] * len(low)
        for entry, slope in slopes:
            most = max(float(entry.size), 1e-300)
            matter = [m + min(abs(float(s)) / most, 1.0) for m, s in zip(matter, slope, strict=True)]
    return sorted((i for i in range(len(low)) if high[i] > low[i]), key=lambda i: -matter[i])
