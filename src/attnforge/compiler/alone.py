"""The derivation of a head on its own: it is a network of one operation to the kernel (docs/kernel.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..certificates.certificate import Certificate
from ..certificates.certified import CertifiedModule
from ..certificates.proof import settled
from ..dtypes import Array
from ..heads.anchor.head import AnchorHead
from ..heads.gate.head import GateHead
from ..heads.gate.target import Lines
from ..heads.product.head import ProductHead
from ..heads.self_head import SelfSpec
from ..heads.token.head import TokenHead
from ..kernel.balls import NotProved
from ..kernel.file import Saved
from .derivation import ANCHOR_CELLS, SMOOTH_CELLS, crossings, finished

EFFORT = 200  # parts of the box that are looked at: a head has one or two numbers to split
MOST_ANCHORS = 128  # of a head that is proved: two cells each, seconds
WORK = 1 << 15  # cells times slots beyond which tables are not made finer: seconds
TOKENS = 4  # and for heads over tokens, whose bound hardly depends on the part


def proved(head: CertifiedModule, certificate: Certificate) -> Certificate:
    """A head's certificate after the kernel has been run on what `save` writes of it."""
    return settled(head, certificate, lambda saved, bound: derive(head, saved, bound))


def derive(head: CertifiedModule, saved: Saved, goal: float) -> dict[str, Any]:
    """The derivation of a head."""
    if isinstance(head, TokenHead):
        last = 2 if head.positions.shape[0] else 1
        states, seen = [[[last, c] for c in range(head.channels)]], [[["tokens", head.attention.causal]]]
        chosen = _chosen(states, seen, last, None, head.attention.heads, [])
        return finished(saved, chosen, goal, TOKENS, {}, goal)
    if isinstance(head, ProductHead):
        low, high = head.box.outward(head.dtype)["x" if head.swapped else "y"]
        sides = head.box.outward(head.dtype)["y" if head.swapped else "x"]
        edges, states = np.linspace(low, high, SMOOTH_CELLS + 1), [[[1, 0], [2, 0]], [[3, 0]]]
        count = head.layer.heads()[0].heads
        chosen = _chosen(states, [[], [["self", False]]], 3, 0, count, edges, head.spec.centre[0])
        return finished(saved, chosen, goal, EFFORT, {3: max(map(abs, sides))}, goal)
    if isinstance(head, AnchorHead):
        if head.size > MOST_ANCHORS:
            raise NotProved(f"the head has {head.size} anchors, and the kernel takes its time beyond {MOST_ANCHORS}")
        inner, wanted = head.cells(), max(ANCHOR_CELLS, int(head.size * max(2.0, head.kappa)))
        edges, scope = np.append(inner[:: max(1, (len(inner) - 1) // wanted)], [inner[-1], 0.0]), "memory"
        count = 1
    else:
        assert isinstance(head, GateHead)
        shape, spec, count = head.spec.target.shape, SelfSpec.read(head.layer), head.layer.heads()[0].heads
        edges = np.concatenate([np.linspace(head.lo, head.hi, SMOOTH_CELLS + 1), *crossings(spec)])
        edges, scope = np.append(edges, shape.knots if isinstance(shape, Lines) else ()), "self"
    low, high = head.box.outward(head.dtype)["y"]
    ends = np.unique(np.concatenate([[low], edges[(edges > low) & (edges < high)], [high]]))
    most = WORK // sum(group.slots + 1 for group in head.layer.heads() for _ in range(group.heads))
    return finished(saved, _chosen([[[1, 0]]], [[[scope, False]]], 1, 0, count, ends), goal, EFFORT, {}, goal, most)


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
