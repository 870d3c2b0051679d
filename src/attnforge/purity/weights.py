"""Products of tensors: what they sum over, and whether one factor is a softmax's weights used as weights.

Weights times V sums over the slots of one softmax row. Which row an entry of a reshaped, sliced or expanded weight
tensor comes from is found by doing the same data movement to a tensor of row numbers.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from attnforge.purity import tables
from attnforge.purity.graph import leaves, named, operator_name, shape


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
