"""The meaning of a program: its values at given points, in any floating dtype, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from ..expressions.evaluate import inside
from .ops import Apply, Attention, Constant, Input, Linear, MaxTokens, Mix, Normalise, Op, Product, Softmax
from .program import Program


def values(program: Program, x: Tensor) -> Tensor:
    """The program's output at points of shape (batch..., *box.shape), as (batch..., *output_shape).

    >>> from attnforge.box import Box
    >>> from attnforge.programs.program import Builder
    >>> build = Builder(Box(x=(-1, 1), y=(0, 2)))
    >>> program = build.program(build.product(build.column(0), build.column(1)), "x*y")
    >>> values(program, torch.tensor([[0.5, 2.0], [1.0, -1.0]]))
    tensor([ 1., -1.])
    """
    batch = x.shape[: x.dim() - len(program.box.shape)]
    out = every_value(program, x)[program.output]
    if program.output_rows == "first":
        out = out[..., 0, :]
    return out.reshape(*batch, *program.output_shape)


def every_value(program: Program, x: Tensor) -> list[Tensor]:
    """All intermediate values, each of shape (batch..., tokens, width)."""
    kept = x.dim() - len(program.box.shape)
    if kept < 0 or x.shape[kept:] != program.box.shape:
        wanted = ", ".join(["...", *map(str, program.box.shape)])
        raise ArgumentError(f"expected points of shape ({wanted}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ArgumentError(f"expected floating point numbers, got {x.dtype}")
    start = x.reshape(*x.shape[:kept], program.tokens, program.ops[0].width)
    found: list[Tensor] = []
    for op in program.ops:
        found.append(VALUES[type(op)](op, start, *(found[i] for i in op.inputs)))
    return found


def _constant(op: Constant, x: Tensor) -> Tensor:
    return _like(op.value, x).expand(*x.shape[:-2], -1, -1)


def _linear(op: Linear, x: Tensor, *parts: Tensor) -> Tensor:
    total = _like(op.bias, x)
    for part, weight in zip(parts, op.weights, strict=True):
        total = total + part @ _like(weight, x)
    return total


def _attention(op: Attention, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logits = op.scale * query @ key.transpose(-1, -2) + _like(op.logit_mask(x.shape[-2]), x)
    return torch.softmax(logits, -1) @ value


def _normalise(op: Normalise, x: Tensor, value: Tensor) -> Tensor:
    centre = value - value.mean(-1, keepdim=True) if op.centred else value
    return centre * torch.rsqrt(centre.square().mean(-1, keepdim=True) + op.eps)


#: One entry for each operation: (op, input, *operands) -> value.
VALUES: dict[type[Op], Callable[..., Tensor]] = {
    Input: lambda op, x: x,
    Constant: _constant,
    Linear: _linear,
    Mix: lambda op, x, value: _like(op.matrix, x) @ value,
    Apply: lambda op, x, value: op.function(inside(op.function, value)),
    Product: lambda op, x, left, right: left * right,
    Softmax: lambda op, x, value: torch.softmax(value, -1),
    Attention: _attention,
    Normalise: _normalise,
    MaxTokens: lambda op, x, value: value.amax(-2, keepdim=True).expand_as(value),
}


def _like(array: np.ndarray[Any, np.dtype[np.float64]], x: Tensor) -> Tensor:
    return torch.from_numpy(np.array(array)).to(x)
