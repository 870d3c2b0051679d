"""Norms evaluated with the mix over heads first: c S(c.c), for compilers and, as an operator, for GPUs.

`normed_rows` is plain PyTorch; `attnforge::norm_watched` is the same as an operator, on a GPU one kernel, which counts
the rows outside a certificate's ranges. Sums are taken in two stages, so that a term goes
through about 2 sqrt(d) roundings whatever order the processor adds in.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...dtypes import transformed
from ..gpu import ready

Table = tuple[Tensor, Tensor, Tensor]  # scale, shift and mix of the heads
Normed = tuple[Tensor, Tensor, Tensor | None]  # rows, c.c of each, and its mean in a layer norm


def stages(channels: int) -> tuple[int, int]:
    """channels = outer * inner, as square as divisors allow, inner the larger.

    >>> stages(384), stages(7)
    ((16, 24), (1, 7))
    """
    outer = max(k for k in range(1, math.isqrt(channels) + 1) if channels % k == 0)
    return outer, channels // outer


def normed_rows(x: Tensor, table: Table, weight: Tensor | None, bias: Tensor | None, layer: bool, unit: bool) -> Normed:
    """The normed rows in float32 or float64, and of every row c.c and its mean."""
    channels, (scale, shift, mix) = x.shape[-1], table
    parts = stages(channels)
    mean, c = None, x
    if layer:
        mean = x.unflatten(-1, parts).sum(-1).sum(-1, keepdim=True) / channels
        c = x - mean
        c = c - c.unflatten(-1, parts).sum(-1).sum(-1, keepdim=True) / channels
    square = (c * c).unflatten(-1, parts).sum(-1).sum(-1, keepdim=True)
    out = c * (torch.sigmoid(torch.addcmul(shift, square, scale, value=-1.0)) @ mix.unsqueeze(-1))
    if weight is not None:
        weight = weight.to(x.dtype) + 1.0 if unit else weight.to(x.dtype)
        out = out * weight if bias is None else torch.addcmul(bias.to(x.dtype), out, weight)
    elif bias is not None:
        out = out + bias.to(x.dtype)
    return out, square, mean


def is_constant(variance: Tensor, place: Tensor) -> Tensor:
    """Rows that are constant up to rounding: there is nothing to norm, and whatever the factor, the bias comes out."""
    return variance <= torch.finfo(variance.dtype).eps ** 2 * (place * place + variance)


def _watched(
    x: Tensor, scale: Tensor, shift: Tensor, mix: Tensor, weight: Tensor | None, bias: Tensor | None, outside: Tensor,
    layer: bool, unit: bool, low: float, high: float, far: float,
) -> Tensor:  # fmt: skip
    if ready(x):
        from ..gpu import norm

        table, limits = (scale, shift, mix), (low, high, far)
        return norm.forward(x, norm.norming(table, weight, bias, layer, unit, x.shape[-1], outside, limits))
    out, square, mean = normed_rows(x.to(scale.dtype), (scale, shift, mix), weight, bias, layer, unit)
    variance = square / x.shape[-1]
    place = torch.zeros_like(variance) if mean is None else mean.abs()
    left = (variance < low) | (variance > high) | variance.isnan() | (layer & (place > far * variance.sqrt()))
    outside += (left & ~is_constant(variance, place)).sum()
    return out.to(x.dtype)


class _Watched(torch.autograd.Function):
    """The operator with gradients of rows, weight and bias; the heads of a norm do not train."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
        scale, shift, mix, outside, ctx.layer, ctx.unit, *limits = rest
        ctx.save_for_backward(x, weight, bias, scale, shift, mix)
        return _watched(x, scale, shift, mix, weight, bias, outside, ctx.layer, ctx.unit, *limits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, *table = ctx.saved_tensors
        needed, twice = ctx.needs_input_grad[:3], torch.is_grad_enabled()
        if ready(x) and not twice:
            from ..gpu import norm

            of_x, *others = norm.backward(grads[0], x, tuple(table), weight, ctx.layer, ctx.unit, any(needed[1:]))
            pairs = zip((weight, bias), others, strict=True)
            shaped = (None if t is None or found is None else found.to(t.dtype) for t, found in pairs)
            return of_x.to(x.dtype), *shaped, *[None] * 9
        given: list[Any] = [
            t if t is None or twice else t.detach().requires_grad_(need)
            for t, need in zip((x, weight, bias), needed, strict=True)
        ]
        with torch.enable_grad():
            out = normed_rows(given[0].to(table[0].dtype), tuple(table), given[1], given[2], ctx.layer, ctx.unit)[0]
        wanted = [t for t, need in zip(given, needed, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, grads[0].to(out.dtype), create_graph=twice))
        return *(next(found) if need else None for need in needed), *[None] * 9


def watched_norm(
    x: Tensor, table: Table, weight: Tensor | None, bias: Tensor | None, outside: Tensor, layer: bool, unit: bool,
    limits: tuple[float, float, float],
) -> Tensor:  # fmt: skip
    """Normed rows in the dtype of x; `outside` counts the rows whose variance leaves the first two of `limits`, or
    whose mean is further away from 0 than the third, in standard deviations.

    >>> from attnforge.heads import NormHead
    >>> norm, outside = NormHead.fit(8, (0.4, 130.0)), torch.zeros((), dtype=torch.int64)
    >>> x = torch.eye(8)[:3] * torch.tensor([[3.0], [9.0], [999.0]])  # the last row varies too much
    >>> out = watched_norm(x, (norm.scale, norm.shift, norm.mix), None, None, outside, True, False, (0.4, 130.0, 100.0))
    >>> out[:2].allclose(torch.nn.functional.layer_norm(x, (8,))[:2], atol=1e-5), int(outside)
    (True, 1)
    """
    if transformed(x, *(t for t in (weight, bias) if t is not None)):  # nobody can count there
        return normed_rows(x.to(table[0].dtype), table, weight, bias, layer, unit)[0].to(x.dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        out: Tensor = _Watched.apply(x, weight, bias, *table, outside, layer, unit, *limits)
    else:
        out = torch.ops.attnforge.norm_watched(x, *table, weight, bias, outside, layer, unit, *limits)
    return out


_LIBRARY = torch.library.Library("attnforge", "FRAGMENT")
_LIBRARY.define(
    "norm_watched(Tensor x, Tensor scale, Tensor shift, Tensor mix, Tensor? weight, Tensor? bias, Tensor(a!) outside, "
    "bool layer, bool unit, float low, float high, float far) -> Tensor"
)
_LIBRARY.impl("norm_watched", _watched, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attnforge::norm_watched", lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format), lib=_LIBRARY
)
