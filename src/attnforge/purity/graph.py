"""Small questions about a node of the graph: its operator, its arguments by name, its shape and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node


def operator_name(node: Node) -> str:
    """`relu` for aten's relu, `namespace::name` for an operator of another library."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    return str(getattr(target, "__name__", target))


def named(node: Node) -> dict[str, Any]:
    """The arguments that were given, by the names of the operator's schema."""
    if not isinstance(node.target, OpOverload):
        return {str(position): value for position, value in enumerate(node.args)} | dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def leaves(argument: object) -> Iterator[Node]:
    """The nodes in an argument, however deeply nested."""
    if isinstance(argument, Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from leaves(item)
    elif isinstance(argument, dict):
        yield from leaves(list(argument.values()))


def tensor(node: Node) -> Tensor | None:
    """The fake tensor that stands for the node's value, None for a tuple or a number."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def shape(node: Node) -> tuple[int, ...]:
    value = tensor(node)
    assert value is not None, f"{node} is not a tensor"
    return tuple(int(size) for size in value.shape)


def is_number(node: Node) -> bool:
    """A size or another scalar, as opposed to a tensor."""
    kinds = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
    return isinstance(node.meta.get("val"), kinds)


def is_integral(node: Node) -> bool:
    """A tensor of integers or truth values."""
    value = tensor(node)
    return value is not None and not (value.dtype.is_floating_point or value.dtype.is_complex)
