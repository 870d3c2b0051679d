"""Norm heads, c S(c.c) with S(t) = sum_m a_m sigmoid(b_m - s_m t), one pass over a row; and their gradients.

A row is centred twice, as `conversion.norm` does it, and its sums are trees: `rows.roundings` says how deep, and a
kernel is used where that is no more than the certificate counts. Quotients are rounded to nearest here: there are few.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .exponential import exp
from .launch import Fixed, launch
from .rows import Blocks, blocks

Table = tuple[Tensor, Tensor, Tensor]  # scale, shift and mix of the heads
PROGRAMS = 1024  # that share the rows where gradients of weights are summed: about eight for each multiprocessor


TINY = torch.finfo(torch.float32).eps ** 2  # of a square: rows that vary by less than a roundoff are constant


@triton.jit
def _sigmoid(z):
    return tl.div_rn(1.0, 1.0 + exp(-z))


@triton.jit
def _centred(x, inside, D, LAYER: tl.constexpr):
    mean = 0.0
    c = x
    if LAYER:
        mean = tl.div_rn(tl.sum(x), D)
        c = tl.where(inside, x - mean, 0.0)
        c = tl.where(inside, c - tl.div_rn(tl.sum(c), D), 0.0)
    return c, mean


@triton.jit
def _forward(
    x, out, weight, bias, scale, shift, mix, outside, HEADS, channels, low, high, far, tiny, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, UNIT: tl.constexpr, WATCH: tl.constexpr, BLOCK: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < channels
    D = channels * 1.0  # a float32, also where a compiler takes the number for a constant
    c, mean = _centred(tl.load(x + row * channels + i, mask=inside, other=0.0).to(tl.float32), inside, D, LAYER)
    square = tl.sum(c * c)
    h = tl.arange(0, TABLE)
    known = h < HEADS
    steep = tl.load(scale + h, mask=known, other=0.0)
    at = tl.load(shift + h, mask=known, other=0.0)
    size = tl.sum(tl.load(mix + h, mask=known, other=0.0) * _sigmoid(at - steep * square))
    result = c * size
    if WEIGHT:
        w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        result = result * (w + 1.0 if UNIT else w)
    if BIAS:
        result = result + tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * channels + i, result.to(out.dtype.element_ty), mask=inside)
    if WATCH:
        variance = square / D
        place = tl.abs(mean)
        live = (variance > tiny * (place * place + variance)) | (variance != variance)
        left = (variance < low) | (variance > high) | (variance != variance) | (place > far * tl.sqrt(variance))
        tl.atomic_add(outside, tl.full((), 1, tl.int64), mask=live & left)


@triton.jit
def _backward(
    grad, x, to_x, to_weight, to_bias, rows, weight, scale, shift, mix, HEADS, channels, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, UNIT: tl.constexpr, OF_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i < channels
    D = channels * 1.0  # a float32, also where a compiler takes the number for a constant
    h = tl.arange(0, TABLE)
    known = h < HEADS
    steep = tl.load(scale + h, mask=known, other=0.0)
    at = tl.load(shift + h, mask=known, other=0.0)
    amount = tl.load(mix + h, mask=known, other=0.0)
    w = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        w = w + 1.0 if UNIT else w
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    row = tl.program_id(0)
    while row < rows:
        start = row.to(tl.int64) * channels
        g = tl.load(grad + start + i, mask=inside, other=0.0).to(tl.float32)
        c, _ = _centred(tl.load(x + start + i, mask=inside, other=0.0).to(tl.float32), inside, D, LAYER)
        part = _sigmoid(at - steep * tl.sum(c * c))
        size = tl.sum(amount * part)
        fall = tl.sum(-amount * steep * part * (1.0 - part))
        if OF_WEIGHT:
            sum_weight += g * c * size
            sum_bias += g
        g = g * w
        change = g * size + 2.0 * fall * tl.sum(g * c) * c
        if LAYER:
            change = tl.where(inside, change - tl.sum(change) / D, 0.0)
        tl.store(to_x + start + i, change.to(to_x.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    if OF_WEIGHT:
        start = tl.program_id(0).to(tl.int64) * channels
        tl.store(to_weight + start + i, sum_weight, mask=inside)
        tl.store(to_bias + start + i, sum_bias, mask=inside)


def norming(
    table: Table, weight: Tensor | None, bias: Tensor | None, layer: bool, unit: bool, channels: int,
    outside: Tensor | None = None, limits: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Fixed:  # fmt: skip
    """A norm of rows of so many channels, ready to be used.

    With `outside`, a count on the device, rows outside the `limits` are added to it: two for the variance, and one for
    the mean in standard deviations (layer norm). Rows that are constant up to rounding are not counted.
    """
    low, high, far = limits
    heads, watched = table[0].shape[0], outside is not None
    there = [table[0] if t is None else t for t in (weight, bias)]
    count = outside if watched else table[0]
    arguments = (*there, *table, count, heads, channels, low, high, far if layer else math.inf, TINY)
    *sizes, count_of_warps = blocks(channels, heads)
    shape = layer, weight is not None, bias is not None, unit, watched, *sizes
    return Fixed(_forward, arguments, shape, count_of_warps)


def forward(x: Tensor, norm: Fixed) -> Tensor:
    """The normed rows."""
    given = x if x.is_contiguous() else x.contiguous()
    out = torch.empty_like(given)
    launch(norm, given.numel() // given.shape[-1], given, out)
    return out


def compiled_rows(
    x: Tensor, table: Table, weight: Tensor | None, bias: Tensor | None, layer: bool, unit: bool, sizes: Blocks
) -> Tensor:
    """`forward` for compilers, which launch the kernel themselves."""
    given, (scale, shift, mix), channels = x.contiguous(), table, x.shape[-1]
    out = torch.empty_like(given)
    there = [scale if t is None else t for t in (weight, bias)]
    _forward[(given.numel() // channels,)](
        given, out, *there, scale, shift, mix, scale, scale.shape[0], channels, 0.0, 0.0, 0.0, 0.0, layer,
        weight is not None, bias is not None, unit, False, sizes[0], sizes[1], num_warps=sizes[2],
    )  # fmt: skip
    return out


def backward(
    grad: Tensor, x: Tensor, table: Table, weight: Tensor | None, layer: bool, unit: bool, of_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the rows and, where wanted, of weight and bias."""
    given, slope = x.contiguous(), grad.contiguous()
    channels, heads = given.shape[-1], table[0].shape[0]
    rows = given.numel() // channels
    programs = min(rows, PROGRAMS)
    to_x = torch.empty_like(given)
    sums = table[0].new_empty(2, programs, channels) if of_weight else table[0].expand(2, -1)
    arguments = table[0] if weight is None else weight, *table, heads, channels
    *sizes, count_of_warps = blocks(channels, heads)
    shape = layer, weight is not None, unit, of_weight, *sizes
    launch(Fixed(_backward, arguments, shape, count_of_warps), programs, slope, given, to_x, *sums, rows)
    if not of_weight:
        return to_x, None, None
    of_both = sums.sum(1)
    of_both = of_both if weight is None else of_both.to(weight.dtype)
    return to_x, of_both[0], of_both[1]
