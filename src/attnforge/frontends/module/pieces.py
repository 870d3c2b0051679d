"""`torch.where` with pieces that meet, written without a comparison.

Where x > c chooses between pieces that are computed from x entry by entry, and the pieces are equal at x = c,

    where(x > c, a(x), b(x)) = a(max(x, c)) + b(min(x, c)) - a(c).

Everything else is left as it is: the walk refuses comparisons that are not settled, with their line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import map_arg

from ...box import Box
from ...census.graph import operator_name
from .atoms import Refusal, Tape
from .constants import computed, promoted
from .handlers.table import STEP, TABLE

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

#: Comparisons with a number on the right, and whether the first piece is the one above it.
_ABOVE = {"gt": True, "ge": True, "lt": False, "le": False}
#: Tensors of one number in the shape of another tensor; None: the number is their last argument.
_FILLED = {"zeros_like": 0.0, "new_zeros": 0.0, "ones_like": 1.0, "new_ones": 1.0, "full_like": None, "new_full": None}
_NOT_POINTWISE = {"huber_loss", "smooth_l1_loss"}  # among the operators of `pointwise`: they may add up


JUMP = "attnforge_jump"
"""Where the meta data of a comparison say that what is chosen by it jumps, and how far."""


GAP = "attnforge_gap"
"""Where the meta data of a node say how far it may be from the `where` that it was."""


def join_pieces(module: GraphModule, constants: Mapping[str, Tensor]) -> None:
    """Rewrite every `where` of a captured graph that can be; `constants` are the placeholders that are no inputs."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and operator_name(node) == "where" and len(node.args) == 3:
            for target, found in (
                (torch.ops.aten.softshrink.default, _softshrink(node)),
                (torch.ops.aten.hardshrink.default, _hardshrink(node)),
            ):
                if found is not None:
                    node.target, node.args = target, found
                    break
            else:
                _join(_Pieces(module, constants), node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _join(pieces: _Pieces, node: Any) -> None:
    test = node.args[0]
    if getattr(test, "op", "") != "call_function" or operator_name(test) not in _ABOVE or len(test.args) != 2:
        return
    x, limit = test.args
    place = None if pieces.is_data(limit) or not pieces.is_data(x) else pieces.number(limit, {})
    if place is None or place[1] > 0:
        return
    limit_at = place[0]
    above, below = node.args[1:] if _ABOVE[operator_name(test)] else (node.args[2], node.args[1])
    cones = [pieces.cone(piece, x) for piece in (above, below)]
    if any(cone is None for cone in cones):
        return
    here, there = (pieces.number(piece, {x: torch.tensor(limit_at, dtype=torch.float64)}) for piece in (above, below))
    if here is None or there is None:
        return
    (above_there, off), (below_there, slip) = here, there
    gap = 0.0 if off == slip == 0 and above_there == below_there else _total(abs(above_there - below_there), off, slip)
    if abs(above_there - below_there) > off + slip:
        low, high = (f"{end:.4g}" for end in (below_there, above_there))
        if low != high:
            test.meta[JUMP] = f"torch.where jumps at {limit_at:g}, from {low} to {high}: {STEP}"
        return
    graph, clamp = node.graph, torch.ops.aten.clamp.default
    made = []
    with graph.inserting_before(node):
        for piece, cone, ends in ((above, cones[0], (limit_at, None)), (below, cones[1], (None, limit_at))):
            moved: dict[Any, Any] = {x: graph.call_function(clamp, (x, *ends))}
            moved[x].meta = dict(x.meta)
            for one in cone or ():
                moved[one] = graph.node_copy(one, partial(_in_place_of, moved))
            made.append(moved.get(piece, piece))
        node_of = [one for one in made if hasattr(one, "op")]
        if len(node_of) == 2:
            total = graph.call_function(torch.ops.aten.add.Tensor, tuple(made))
            total.meta = dict(node.meta)
        else:  # a piece that is a number is a(c) itself, and nothing is left of it
            (total,), above_there = node_of, 0.0
    node.target, node.args = torch.ops.aten.sub.Scalar, (total, above_there)
    node.meta[GAP] = gap


def _total(*parts: float) -> float:
    """An upper bound of a sum of numbers that are not negative."""
    return math.nextafter(math.fsum(parts), math.inf)


def _softshrink(node: Any) -> tuple[Any, float] | None:
    """x and c where the node is torch's own definition of softshrink, where(|x| > c, x - c sign(x), 0 x), c >= 0."""
    test, outside, inside = node.args
    far, shift, nothing = (_arguments(one, name) for one, name in ((test, "gt"), (outside, "sub"), (inside, "mul")))
    size, step = _arguments(far[:1], "abs"), _arguments(shift[1:], "mul")
    if len(far) != 2 or len(size) != 1 or len(step) != 2 or len(shift) != 2 or len(nothing) != 2:
        return None
    x, limit = size[0], far[1]
    same = shift[0] is x and nothing[0] is x and _arguments(step[:1], "sign") == (x,)
    numbers = isinstance(limit, (int, float)) and limit >= 0 and step[1] == limit and nothing[1] == 0
    return (x, float(limit)) if same and numbers else None


def _hardshrink(node: Any) -> tuple[Any, float] | None:
    """x and c where the node is torch's own definition of hardshrink, where(|x| <= c, 0, x)."""
    test, inside, outside = node.args
    near = _arguments(test, "le")
    size = _arguments(near[:1], "abs")
    same = len(near) == 2 and len(size) == 1 and outside is size[0]
    numbers = same and isinstance(near[1], (int, float)) and isinstance(inside, (int, float)) and inside == 0
    return (outside, float(near[1])) if numbers else None


def _arguments(node: Any, name: str) -> tuple[Any, ...]:
    """The arguments of a node, or of the only one in a tuple, that calls the operator `name`; none of any other."""
    if isinstance(node, tuple):
        return _arguments(node[0], name) if len(node) == 1 else ()
    called = getattr(node, "op", "") == "call_function" and operator_name(node) == name
    return tuple(node.args) if called and not node.kwargs else ()


def _in_place_of(moved: Mapping[Any, Any], node: Any) -> Any:
    return moved.get(node, node)


class _Pieces:
    """What is known of a graph: which nodes depend on the inputs, and the numbers of the others."""

    def __init__(self, module: GraphModule, constants: Mapping[str, Tensor]):
        self.module, self.constants = module, constants
        self.tape = Tape(Box.cube(0, 1, shape=1), 1, 1)  # knows how far constants are off
        self._data: dict[Node, bool] = {}
        for node in module.graph.nodes:
            own = node.op == "placeholder" and node.name not in constants
            own = own or any(self._data[n] for n in node.all_input_nodes)
            self._data[node] = own and not (node.op == "call_function" and operator_name(node) in _FILLED)

    def is_data(self, value: Any) -> bool:
        """Whether a value depends on the inputs; what was inserted meanwhile counts as such."""
        return hasattr(value, "op") and self._data.get(value, True)

    def cone(self, piece: Any, x: Node) -> list[Node] | None:
        """The nodes between x and a piece, in order; None where they are not all computed from x entry by entry."""
        found: set[Node] = set()
        todo = [piece] if self.is_data(piece) else []
        while todo:
            node = todo.pop()
            if node is x or node in found:
                continue
            handler = TABLE.get(operator_name(node)) if node.op == "call_function" else None
            name = "" if handler is None else handler.write.__module__.rpartition(".")[2]
            if name != "pointwise" or operator_name(node) in _NOT_POINTWISE or not _same_shape(node, x):
                return None
            found.add(node)
            todo += [n for n in node.all_input_nodes if self.is_data(n)]
        return [node for node in x.graph.nodes if node in found]

    def number(self, value: Any, known: dict[Any, Any]) -> tuple[float, float] | None:
        """The one number that a value is, given those of some nodes, and how far off; None if it is not one number."""
        try:
            out = self._value(value, known)
        except (KeyError, RuntimeError, TypeError, ValueError, Refusal):  # an operator that takes no single number
            return None
        if isinstance(out, Tensor):
            out = out.double().unique()
            out = float(out[0]) if out.numel() == 1 else None
        if self.tape.unproved or not isinstance(out, (int, float)) or not math.isfinite(out):
            return None
        return float(out), float(self.tape.off(np.array(float(out))))

    def _value(self, value: Any, known: dict[Any, Any]) -> Any:
        if not hasattr(value, "op"):
            return value
        if value not in known:
            if value.op == "placeholder":
                known[value] = promoted(self.constants[value.name])
            elif value.op == "get_attr":
                known[value] = getattr(self.module, str(value.target)).double()
            elif operator_name(value) in _FILLED:
                fill = _FILLED[operator_name(value)]
                known[value] = value.args[-1] if fill is None else fill
            else:
                args, kwargs = map_arg((value.args, value.kwargs), lambda n: self._value(n, known))
                known[value] = computed(self.tape, operator_name(value), value.target, args, kwargs)
        return known[value]


def _same_shape(node: Node, x: Node) -> bool:
    sizes = [getattr(n.meta.get("val"), "shape", None) for n in (node, x)]
    return sizes[0] is not None and sizes[0] == sizes[1]
