"""The walk over the graph: what every value depends on, and whether each operation is allowed on it.

Products of two data tensors are looked at most closely: what they sum over, and whether one factor is a softmax's
weights used as weights. Weights times V sums over the slots of one softmax row. Which row an entry of a reshaped,
sliced or expanded weight tensor comes from is found by doing the same data movement to a tensor of row numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from . import findings as tables
from .findings import Census, Offence
from .graph import TracedGraph, is_integral, is_number, leaves, named, operator_name, shape, tensor


@dataclass(frozen=True)
class Factor:
    """One factor of a contraction, with those of its axes that are summed over."""

    node: Node
    summed: tuple[int, ...]


@dataclass(frozen=True)
class Contraction:
    """A sum of products, as a matrix product or an einsum computes it."""

    factors: tuple[Factor, ...]
    length: int
    """How many products are summed into one number; 1 for an outer product."""
    summing: bool
    """Whether the factors share an axis that is summed over; an elementwise product written as einsum has none."""


def contraction(name: str, arguments: dict[str, Any]) -> Contraction | None:
    """What the operator sums over; None for an einsum that takes a diagonal, which no attention needs."""
    if name == "einsum":
        return _einsum(str(arguments["equation"]), list(arguments["tensors"]))
    left, right = (arguments[key] for key in tables.CONTRACTIONS[name])
    axis = -2 if len(shape(right)) > 1 else -1
    return Contraction((Factor(left, (-1,)), Factor(right, (axis,))), shape(left)[-1], summing=True)


def _einsum(equation: str, tensors: list[Node]) -> Contraction | None:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = [_axes(term, len(shape(node))) for term, node in zip(inputs.split(","), tensors, strict=True)]
    letters = [axis for term in terms for axis in term]
    if any(len(set(term)) < len(term) for term in terms):
        return None
    kept = set(output.replace("...", "")) if arrow else {axis for axis in letters if letters.count(axis) == 1}
    if not arrow or "..." in output:
        kept |= {axis for axis in letters if axis.startswith("~")}
    factors = tuple(
        Factor(node, tuple(i for i, axis in enumerate(term) if axis not in kept))
        for term, node in zip(terms, tensors, strict=True)
    )
    shared = set(terms[0]).intersection(*terms) - kept
    length = math.prod(size for axis, size in zip(terms[0], shape(tensors[0]), strict=True) if axis in shared)
    return Contraction(factors, length, summing=bool(shared))


def _axes(term: str, rank: int) -> list[str]:
    """One name for each axis of an einsum term; the axes behind an ellipsis are counted from its right end."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"~{hidden - i}" for i in range(hidden)), *after]


def is_softmax_weights(node: Node) -> bool:
    """Whether the node is the output of a softmax, moved about but not changed."""
    return isinstance(_rows(node), Tensor)


def keeps_rows(factor: Factor) -> bool:
    """Whether the factor is softmax weights, and the sum runs within single rows of that softmax."""
    rows = _rows(factor.node)
    if not isinstance(rows, Tensor):
        return False
    if not factor.summed or rows.numel() == 0:
        return True
    largest = rows.amax(factor.summed)
    smallest = torch.where(rows > 0, rows, torch.iinfo(rows.dtype).max).amin(factor.summed)  # 0 is padding: no row
    return bool(((largest == smallest) | (largest == 0)).all())


def _rows(node: Node) -> Any:
    """For each entry of the node's value the number of its softmax row, from 1 on, and 0 for padding with zeros.

    A tensor, a tuple of them where the node has several results, or None where something but movement was done.
    """
    name, arguments = operator_name(node), named(node)
    if name in tables.SOFTMAX:
        full = shape(node)
        if not full:
            return torch.ones((), dtype=torch.int64)
        once = list(full)
        once[arguments["dim"]] = 1
        return (torch.arange(math.prod(once)) + 1).reshape(once).expand(full)
    inputs = list(leaves([*node.args, *node.kwargs.values()]))
    moves = node.target is operator.getitem or name in tables.IDENTITY | tables.MOVEMENT
    if len(inputs) != 1 or not moves or arguments.get("value") or name in ("fill", "as_strided"):
        return None  # other tensors are mixed in, or numbers other than the zeros of padding
    rows = _rows(inputs[0])
    if rows is None or name in tables.IDENTITY | tables.CASTS:
        return rows
    if name in ("view", "_unsafe_view"):
        return rows.reshape(shape(node))  # the row numbers may lie in memory in another order than the weights
    assert callable(node.target)
    return node.target(*map_arg(node.args, lambda _: rows), **node.kwargs)


class Dependence(IntEnum):
    """What a value depends on: the highest level among the values it is computed from."""

    CONSTANT = 0  # buffers and literals
    PARAMETER = 1  # trained weights
    INDEX = 2  # integer and boolean inputs: token ids, masks, positions
    DATA = 3  # floating-point inputs, and rows looked up by an index
    SCORE = 4  # made of products of two data tensors that have not met their softmax yet


Arguments = dict[str, Any]
ELEMENTWISE_PRODUCT = "an elementwise product of two data-dependent tensors"
OTHER_PRODUCT = "a product of data-dependent tensors other than Q K^T and weights times V"


class Walk:
    """Judges the nodes of a trace in order; `census` and `offences` hold the verdicts."""

    def __init__(self, trace: TracedGraph):
        self.trace = trace
        self.offences: list[Offence] = []
        self._level: dict[Node, Dependence] = {}
        self._entries: list[tuple[str, str]] = []
        self._products: dict[Node, frozenset[Node]] = {}  # of a score: the products it is made of
        self._offending: set[Node] = set()
        for node in trace.program.graph.nodes:
            self._visit(node)
        self.census = Census.of(self._entries)

    def _visit(self, node: Node) -> None:
        if node.op == "output":
            self._finish(node)
        elif node.op == "call_function":
            self._level[node] = self._judge(node)
            if self._level[node] == Dependence.SCORE and node not in self._products:
                self._products[node] = frozenset().union(*(self._products.get(n, ()) for n in node.all_input_nodes))
            self._refuse_rounding(node)
        elif node.op == "placeholder":
            kinds = {s.arg.name: s.kind for s in self.trace.program.graph_signature.input_specs}
            self._level[node] = _input_level(node, kinds[node.name])
        else:
            self._level[node] = Dependence.CONSTANT

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def _allow(self, node: Node, category: str, level: Dependence) -> Dependence:
        self._entries.append((category, operator_name(node)))
        return level

    def _offend(self, node: Node, why: str) -> Dependence:
        if node not in self._offending:
            self._offending.add(node)
            source, module = self.trace.source(node), self.trace.module(node)
            self.offences.append(Offence(operator_name(node), why, source, module))
        return Dependence.DATA

    def _blame(self, nodes: Iterable[Node], user: str) -> None:
        """Refuse the products that `nodes` are made of: they end in `user`, not in a softmax."""
        for node in nodes:
            for product in sorted(self._products.get(node, ())):
                self._offend(product, f"a product of two data-dependent tensors that ends in {user}, not in a softmax")

    def _largest(self, nodes: Iterable[Node]) -> Dependence:
        return max((self._level[node] for node in nodes), default=Dependence.CONSTANT)

    # -- one operation ------------------------------------------------------------------------------------------------

    def _judge(self, node: Node) -> Dependence:
        name, arguments = operator_name(node), named(node)
        borrowed = tables.SHAPE_ONLY.get(name)
        inputs = [n for key, value in arguments.items() if key != borrowed for n in leaves(value)]
        level = self._largest(inputs)
        if node.target is operator.getitem:
            return self._getitem(node, level)
        if name in tables.ASSERTIONS:
            return Dependence.CONSTANT
        if name in tables.CREATION:
            return self._allow(node, "constant", Dependence.CONSTANT)
        if not isinstance(node.target, OpOverload):
            return level if all(map(is_number, inputs)) else self._offend(node, tables.UNKNOWN)
        attends = name in tables.SOFTMAX or name in tables.FUSED_ATTENTION or name in tables.custom()
        if _is_random(node.target, name, arguments) and not attends:
            why = tables.reason(name)
            return self._offend(node, "draws random numbers" if why == tables.UNKNOWN else why)
        if level <= Dependence.PARAMETER:
            return self._allow(node, "constant", level)
        if attends:
            return self._attention(node, name, arguments)
        if name in tables.CONTRACTIONS or name == "einsum":
            return self._contraction(node, name, arguments, level)
        if name in tables.LOOKUP and self._largest(leaves(arguments["weight"])) < Dependence.INDEX:
            return self._lookup(node, arguments)
        if level == Dependence.INDEX:
            return self._index(node, name, arguments)
        return self._data(node, name, arguments, level)

    def _getitem(self, node: Node, level: Dependence) -> Dependence:
        """One of several results; those of a fused attention beyond the first are statistics, not attention."""
        parent = node.all_input_nodes[0]
        if operator_name(parent) in tables.FUSED_ATTENTION and node.args[1] != 0:
            return self._offend(parent, "only its output may be used, not the log-sum-exp or the weights beside it")
        return level

    def _attention(self, node: Node, name: str, arguments: Arguments) -> Dependence:
        if arguments.get("dropout_p"):
            return self._offend(node, "draws random numbers: dropout_p is not 0")
        if name not in tables.SOFTMAX:
            for key in sorted(arguments.keys() - {"attn_mask", "attn_bias"}):
                self._blame(leaves(arguments[key]), name)
        return self._allow(node, "attention", Dependence.DATA)

    def _contraction(self, node: Node, name: str, arguments: Arguments, level: Dependence) -> Dependence:
        product = contraction(name, arguments)
        keys = ("tensors",) if name == "einsum" else tables.CONTRACTIONS[name]
        factors = [n for key in keys for n in leaves(arguments[key])]
        addend = [n for key in arguments.keys() - set(keys) for n in leaves(arguments[key])]
        varying = [
            n for n in factors if self._level[n] >= min(level, Dependence.DATA)
        ]  # integers count if there is no data
        if level == Dependence.INDEX and product and product.length == 1 and not self._is_trained(factors):
            return self._allow(node, "positions", Dependence.INDEX)  # an outer product of positions and frequencies
        self._blame(factors, name)
        result = max(Dependence.DATA, self._largest(addend))
        if len(varying) <= 1:
            return self._allow(node, "attention" if any(map(is_softmax_weights, varying)) else "affine", result)
        if product is None or len(factors) != 2:
            return self._offend(node, OTHER_PRODUCT)
        if any(map(keeps_rows, product.factors)):
            return self._allow(node, "attention", result)
        if not product.summing:
            return self._offend(node, ELEMENTWISE_PRODUCT)
        self._products[node] = frozenset({node}).union(*(self._products.get(n, ()) for n in addend))
        return self._allow(node, "attention", Dependence.SCORE)

    def _lookup(self, node: Node, arguments: Arguments) -> Dependence:
        if self._largest(leaves(arguments["indices"])) >= Dependence.DATA:
            return self._offend(node, "its argument indices depends on data")
        return self._allow(node, "lookup", Dependence.DATA)

    def _is_trained(self, nodes: Iterable[Node]) -> bool:
        return any(self._level[node] == Dependence.PARAMETER for node in nodes)

    def _index(self, node: Node, name: str, arguments: Arguments) -> Dependence:
        """Integer inputs name things. Where trained weights act on them they become data."""
        if self._is_trained(leaves(arguments)):
            if name in tables.INDEXING:
                return self._allow(node, "lookup", Dependence.DATA)
            return self._data(node, name, arguments, Dependence.DATA)
        if name in tables.POSITIONS:
            return self._allow(node, "positions", Dependence.INDEX)
        if name in tables.MASKS:
            return self._allow(node, "mask", Dependence.INDEX)
        return self._offend(node, f"{tables.reason(name)} (integer inputs may build masks, positions and look-ups)")

    def _data(self, node: Node, name: str, arguments: Arguments, level: Dependence) -> Dependence:
        if level == Dependence.SCORE and name not in tables.SCORE_PATH:
            self._blame(leaves(arguments), name)
            level = Dependence.DATA
        why = self._objection(node, name, arguments)
        if why:
            return self._offend(node, why)
        moved = "identity" if name in tables.IDENTITY else "movement"
        return self._allow(node, "affine" if name in tables.AFFINE else moved, level)

    def _objection(self, node: Node, name: str, arguments: Arguments) -> str:
        """Why `name` must not be applied to these arguments, of which one at least depends on data; or nothing."""
        if name not in tables.AFFINE | tables.MOVEMENT | tables.IDENTITY | tables.LOOKUP:
            return tables.reason(name)

        def varies(key: str) -> bool:
            return self._largest(leaves(arguments.get(key))) >= Dependence.DATA

        steering = [key for key in arguments if key in tables.STEERING and varies(key)]
        if steering:
            return f"its argument {steering[0]} depends on data"
        if sum(map(varies, tables.FACTORS.get(name, ()))) > 1:
            return ELEMENTWISE_PRODUCT if name in tables.ELEMENTWISE else OTHER_PRODUCT
        fixed = [key for key in tables.FIXED.get(name, ()) if varies(key)]
        if fixed:
            return "a division by data" if name in tables.ELEMENTWISE else f"its argument {fixed[0]} depends on data"
        if arguments.get("training"):
            return "a normalisation divides by a statistic of the data"
        if arguments.get("rounding_mode") or arguments.get("reduce"):
            return tables.UNKNOWN + f" with {'rounding' if arguments.get('rounding_mode') else 'a reduction'}"
        if name == "view" and "dtype" in arguments:
            return "reads the bits of data as another type"
        return ""

    # -- checks on results --------------------------------------------------------------------------------------------

    def _refuse_rounding(self, node: Node) -> None:
        """Data must stay floating-point: a conversion to integers or truth values is a step function."""
        if self._level[node] < Dependence.DATA or not is_integral(node):
            return
        sources = [n for n in node.all_input_nodes if self._level[n] >= Dependence.DATA]
        if not any(n in self._offending or is_integral(n) or tensor(n) is None for n in sources):
            self._offend(node, "turns data into integers or truth values")

    def _finish(self, output: Node) -> None:
        self._blame(output.all_input_nodes, "the output")
        nodes = {node.name: node for node in output.all_input_nodes}
        for spec in self.trace.program.graph_signature.output_specs:
            if spec.kind.name.endswith("MUTATION"):
                self._offend(nodes[spec.arg.name], f"its result is stored in '{spec.target}': a network has no state")


def _is_random(target: OpOverload, name: str, arguments: Arguments) -> bool:
    idle = name in tables.IDENTITY and not arguments.get("train")  # dropout in evaluation mode
    return torch.Tag.nondeterministic_seeded in target.tags and not idle


def _input_level(node: Node, kind: InputKind) -> Dependence:
    if kind == InputKind.PARAMETER:
        return Dependence.PARAMETER
    if kind != InputKind.USER_INPUT:
        return Dependence.CONSTANT
    return Dependence.INDEX if is_integral(node) or tensor(node) is None else Dependence.DATA
