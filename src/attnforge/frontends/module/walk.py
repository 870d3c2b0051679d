"""Execution of a captured graph on values: constants are computed, operations on data written, others listed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.node import Node, map_arg

from ...census.graph import operator_name
from ...dtypes import dtype_name
from .atoms import BatchRefusal, Refusal, Tape
from .constants import computed, evaluated, named, promoted
from .handlers import TABLE
from .handlers.movement import coarser
from .handlers.table import REFUSED, Operation, reason
from .pieces import GAP, JUMP
from .values import SYMBOLS, Unknown, Value, is_data, leaves, rescale, shape, substitute

CODE = 40  # letters of a line of code that stand for an operation

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule


@dataclass(frozen=True)
class Obstacle:
    """One operation that cannot be captured."""

    operation: str
    why: str
    source: str = ""
    module: str = ""
    batch: bool = False
    """Whether the operation fails only because it mixes points of the batch."""

    def __str__(self) -> str:
        place = f"\n      {self.source}" if self.source else ""
        return f"{self.operation}{f' in {self.module}' if self.module else ''}: {self.why}{place}"


@dataclass(frozen=True)
class Places:
    """Where nodes were written: `file:line  code`, and the dotted path of the submodule."""

    source: Callable[[Node], str]
    module: Callable[[Node], str]


class Execution:
    """One pass over a graph, writing to a tape; `problems` fills up instead of raising at the first."""

    def __init__(self, tape: Tape, places: Places):
        self.tape, self.places = tape, places
        self.problems: list[Obstacle] = []
        self._outer: list[Node] = []

    def run(
        self, graph: Graph, bound: Mapping[str, Any], wanted: Iterable[Node | None], owner: GraphModule
    ) -> list[Any]:
        """The values of the wanted nodes, given those of the placeholders by name."""
        values: dict[Node, Any] = {}
        targets = list(wanted)
        needed = ancestors([node for node in targets if node is not None])
        for node in graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                values[node] = bound[node.name]
            elif node.op == "get_attr":
                values[node] = promoted(operator.attrgetter(str(node.target))(owner))
            else:
                values[node] = self._call(node, values)
        return [None if node is None else values[node] for node in targets]

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        args: list[Any] = list(map_arg(node.args, lambda n: values[n]))
        kwargs: dict[str, Any] = dict(map_arg(node.kwargs, lambda n: values[n]))
        if node.target is operator.getitem and isinstance(args[0], (list, tuple, Unknown)):
            item = args[0] if isinstance(args[0], Unknown) else args[0][args[1]]
            return self._read(node.args[0] if isinstance(node.args[0], Node) else node, item)
        found = list(leaves([args, kwargs]))
        if not any(map(is_data, found)):
            return (
                self._record(node, "it draws random numbers")
                if _is_random(node)
                else self._constant(node, args, kwargs)
            )
        unknown = [leaf for leaf in found if isinstance(leaf, Unknown)]
        if unknown:
            if unknown[0].why:
                return self._read(node, unknown[0])
            hopeless = operator_name(node) not in TABLE and _decomposition(node.target) is None
            return self._record(node, reason(operator_name(node))) if hopeless else Unknown()
        if not self._outer:
            self.tape.label = self._label(node)
        try:
            self._keep_digits(node)
            result = self._read(node, self._written(node, args, kwargs))
            if node.meta.get(GAP) and not isinstance(result, Unknown):
                off = self.tape.doubt(np.array(0.0), np.array(node.meta[GAP]))
                result = rescale(self.tape, result, 1.0, float(off))
            if _cuts(node) and any(map(is_data, leaves(result))):
                raise Refusal("it turns data into integers or truth values")
        except Refusal as refusal:
            why = node.meta.get(JUMP) or str(refusal)
            return self._record(node, why, isinstance(refusal, BatchRefusal))
        return result

    def _keep_digits(self, node: Node) -> None:
        """Raise for an operation that gives data fewer digits than the target's own dtype has, cast or not."""
        coarse = coarser(self.tape, _dtypes([node]))
        if coarse:
            own = dtype_name(self.tape.own)
            raise Refusal(f"it rounds data to {dtype_name(coarse)}, and the target is made for {own}")

    def _read(self, node: Node, value: Any) -> Any:
        """A value that a node reads; an unknown one is a problem once it leaves the operator that made it."""
        if isinstance(value, Unknown) and value.why and not self._outer:
            return self._record(node, value.why)
        return value

    def _constant(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not isinstance(node.target, OpOverload):
            return evaluated(node.target, args, kwargs)
        try:
            return computed(self.tape, operator_name(node), node.target, args, kwargs)
        except Refusal as refusal:
            return self._record(node, str(refusal))

    def _written(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name, target = operator_name(node), node.target
        handler = TABLE.get(name)
        if handler is not None and isinstance(target, OpOverload):
            return handler.write(self.tape, Operation(name, target, named(target, args, kwargs)))
        inside = _inside(target, args, kwargs) if isinstance(target, OpOverload) else None
        if inside is None:
            raise Refusal(reason(name))
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, (Tensor, *SYMBOLS))]
        names = [n.name for n in inside.graph.nodes if n.op == "placeholder"]
        output: Any = inside.graph.output_node().args[0]
        several = isinstance(output, (list, tuple))
        self._outer.append(node)
        try:
            results = self.run(
                inside.graph, dict(zip(names, tensors, strict=True)), output if several else [output], inside
            )
        finally:
            self._outer.pop()
        return results if several else results[0]

    def _record(self, node: Node, why: str, batch: bool = False) -> Unknown:
        outer = self._outer[0] if self._outer else node
        if outer is not node and operator_name(outer) != operator_name(node):
            why = f"it needs {operator_name(node)}, and {why}"
        source, module = self.places.source(outer), self.places.module(outer)
        problem = Obstacle(operator_name(outer), why, source, module, batch)
        if problem not in self.problems:
            self.problems.append(problem)
        return Unknown()

    def _label(self, node: Node) -> str:
        """What people call the operation: the layer, or the line of code."""
        module = self.places.module(node)
        if module:
            return f"{module}.{operator_name(node)}"
        code = self.places.source(node).partition("  ")[2].removeprefix("return ")
        name, code = operator_name(node), code.rstrip("( ")  # a call may go on in the next line
        if not code or code.endswith(name):
            return name
        return f"{name}: {code if len(code) <= CODE else f'{code[: CODE - 1].rstrip()}…'}"


def _dtypes(nodes: Iterable[Node]) -> list[torch.dtype]:
    """What torch says of the dtypes of what nodes give."""
    return [leaf.dtype for node in nodes for leaf in leaves([node.meta.get("val")]) if isinstance(leaf, Tensor)]


def _cuts(node: Node) -> bool:
    """Whether an operation is asked to put numbers with fractions into a dtype that has none."""
    asked = isinstance(node.kwargs.get("dtype"), torch.dtype) or operator_name(node) == "copy"
    whole = not any(dtype.is_floating_point for dtype in _dtypes([node]))
    return asked and whole and any(dtype.is_floating_point for dtype in _dtypes(node.all_input_nodes))


def _is_random(node: Node) -> bool:
    """Whether an operator on constants draws; dropout and attention, which may, have handlers that know."""
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(node.target, OpOverload) and seeded in node.target.tags and operator_name(node) not in TABLE


def ancestors(nodes: list[Node]) -> set[Node]:
    """Nodes and all that they read, at any distance."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


@functools.lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's own definitions of operators in terms of simpler ones, for those that have no handler."""
    from torch._decomp import decomposition_table

    known = {
        op: how
        for op, how in decomposition_table.items()
        if isinstance(op, OpOverload) and _short(op).removesuffix("_") not in TABLE.keys() | REFUSED.keys()
    }
    # Of the operator that takes grids of any number of dimensions there is no definition.
    known[torch.ops.aten.grid_sampler.default] = known[torch.ops.aten.grid_sampler_2d.default]
    return known


def _short(target: OpOverload) -> str:
    return target._schema.name.removeprefix("aten::")


def _decomposition(target: Any) -> Any:
    if not isinstance(target, OpOverload) or _short(target) in REFUSED:
        return None
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return _decompositions().get(target) or (target if target.has_kernel_for_dispatch_key(composite) else None)


def _inside(target: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> GraphModule | None:
    """What an operator does, as a graph of simpler ones; None where torch knows no definition of it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    if _decomposition(target) is None:
        return None

    def call(*tensors: Tensor) -> Any:
        rest = iter(tensors)

        def swap(leaf: Any) -> Any:
            return next(rest) if isinstance(leaf, (Tensor, *SYMBOLS)) else leaf

        return target(*substitute(args, swap), **{key: substitute(value, swap) for key, value in kwargs.items()})

    examples = [_example(leaf) for leaf in leaves([args, kwargs]) if isinstance(leaf, (Tensor, *SYMBOLS))]
    try:
        raw = make_fx(call, _decompositions(), tracing_mode="real")(*examples)
        traced = make_fx(torch.func.functionalize(raw), tracing_mode="real")(*examples)
    except Exception:  # whatever a definition cannot cope with: the operator is not supported then
        return None
    return None if any(n.target is target or _is_primitive(n) for n in traced.graph.nodes) else traced


def _is_primitive(node: Node) -> bool:
    """Whether a node is one of torch's own primitives on tensors; counting up reads none."""
    return str(node.target).startswith("prims.") and bool(node.all_input_nodes)


def _example(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.zeros(tuple(shape(value)), dtype=torch.float64)
