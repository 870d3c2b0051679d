"""Norm heads, c S(c.c) with S(t) = sum_m a_m sigmoid(b_m - s_m t), one pass over a row; and their gradients.

A row is centred twice, as `conversion.norm` does it, and its sums are trees: `roundings` says how deep, and a kernel is
used where that is no more than the certificate counts. Quotients are rounded to nearest here: there are few.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .exponential import exp
from .launch import launch

WIDEST = 16384  # channels that one program holds in registers
SHORT = 2048  # channels up to which one warp takes a row: 64 numbers a thread
PROGRAMS = 1024  # that share the rows where gradients of weights are summed: about eight for each multiprocessor


TINY = torch.finfo(torch.float32).eps ** 2  # of a square: rows that vary by less than a roundoff are constant


@functools.lru_cache(maxsize=256)
def _power(number: int) -> int:
    return int(triton.next_power_of_2(number))


def warps(channels: int) -> int:
    """Warps that share a row."""
    return 1 if channels <= SHORT else 4 if channels <= 2 * SHORT else 8


def roundings(channels: int) -> int:
    """Additions that a term of a row's sum goes through at most: inside a thread, a warp, and between warps."""
    lanes = 32 * warps(channels)
    block = triton.next_power_of_2(channels)
    return max(block // lanes - 1, 0) + min(block, lanes).bit_length() - 1


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
    D = channels.to(tl.float32)
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
    grad, x, to_x, to_weight, to_bias, weight, scale, shift, mix, rows, HEADS, channels, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, UNIT: tl.constexpr, OF_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i < channels
    D = channels.to(tl.float32)
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


def forward(
    x: Tensor, table: tuple[Tensor, Tensor, Tensor], weight: Tensor | None, bias: Tensor | None, layer: bool,
    unit: bool = False, outside: Tensor | None = None, low: float = 0.0, high: float = 0.0, far: float = 0.0,
) -> Tensor:  # fmt: skip
    """The normed rows. With `outside`, a count on the device, rows outside the certificate's ranges are added to it.

    `low` and `high` limit the variance, `far` the mean in standard deviations (layer norm); rows that are constant up
    to rounding have nothing to norm and are not counted.
    """
    given = x if x.is_contiguous() else x.contiguous()
    out = torch.empty_like(given)
    channels, heads, watched = given.shape[-1], table[0].shape[0], outside is not None
    arguments = (
        given, out, out if weight is None else weight, out if bias is None else bias, *table,
        outside if watched else table[0], heads, channels, low, high, far if layer else math.inf, TINY,
    )  # fmt: skip
    shape = layer, weight is not None, bias is not None, unit, watched, _power(channels), _power(heads)
    launch(_forward, given.numel() // channels, arguments, shape, warps(channels))
    return out


def backward(
    grad: Tensor, x: Tensor, table: tuple[Tensor, Tensor, Tensor], weight: Tensor | None, layer: bool, unit: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of the rows and, where wanted, of weight and bias, in float32."""
    given, slope = x.contiguous(), grad.contiguous()
    channels, heads = given.shape[-1], table[0].shape[0]
    rows = given.numel() // channels
    programs = min(rows, PROGRAMS)
    to_x = torch.empty_like(given)
    sums = [table[0].new_empty(programs, channels) if of_weight else table[0] for _ in range(2)]
    arguments = slope, given, to_x, *sums, to_x if weight is None else weight, *table, rows, heads, channels
    shape = layer, weight is not None, unit, of_weight, _power(channels), _power(heads)
    launch(_backward, programs, arguments, shape, warps(channels))
    return (to_x, sums[0].sum(0), sums[1].sum(0)) if of_weight else (to_x, None, None)
