"""Functions of single rows, evaluated a few rows at a time: memory does not grow with what a row's evaluation needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Rowwise = Callable[..., Tensor]


def by_rows(function: Rowwise, x: Tensor, tables: tuple[Tensor | None, ...], step: int) -> Tensor:
    """function(x, *tables) for x of shape (..., channels), at most `step` rows at a time, with the shape of x.

    Gradients evaluate the rows again instead of keeping everything alive. Up to `step` rows there is one piece and
    nothing of this applies; beyond, there are no second derivatives.

    >>> x = torch.randn(10, 3)
    >>> torch.equal(by_rows(lambda x, t: x * t, x, (torch.ones(3),), step=4), x)
    True
    """
    if x.numel() <= step * x.shape[-1]:
        return function(x, *tables)
    out: Tensor = _Pieces.apply(function, step, x.reshape(-1, x.shape[-1]), *tables)
    return out.reshape(x.shape)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Rowwise, step: int, x: Tensor, *tables: Tensor | None) -> Tensor:
        ctx.function, ctx.step = function, step
        ctx.save_for_backward(x, *tables)
        out = torch.empty_like(x)
        for part, piece in zip(x.split(step), out.split(step), strict=True):
            piece.copy_(function(part, *tables))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, *tables = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        slopes = [torch.zeros_like(t) if w else None for t, w in zip((x, *tables), wanted, strict=True)]
        fresh = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(tables, wanted[1:], strict=True)]
        for i in range(0, x.shape[0], ctx.step):
            part = x[i : i + ctx.step].detach().requires_grad_(wanted[0])
            leaves = [leaf for leaf in (part, *fresh) if leaf is not None and leaf.requires_grad]
            with torch.enable_grad():
                found = iter(torch.autograd.grad(ctx.function(part, *fresh), leaves, slope[i : i + ctx.step]))
            for k, total in enumerate(slopes):
                if total is not None:
                    target = total[i : i + ctx.step] if k == 0 else total
                    target += next(found)
        return None, None, *slopes
