"""x times y by the two heads of lemma C1, evaluated together: x (e^z - e^-z) / (g D(z)), z = g y, in one pass.

Both heads have the denominator D(z) = sum_i w_i e^(tau_i z), and the nodes come in pairs +-tau, so half the
exponentials are reciprocals of the others. `heads.product.bound.fused_rounding` bounds what this does by rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .exponential import exp
from .launch import Fixed, launch

BLOCK, WARPS = 1024, 4  # elements and warps a program: two inputs, eight elements of each a thread


@triton.jit
def _both(z):
    """e^z and e^-z, a reciprocal corrected once."""
    up = exp(z)
    down = 1.0 / up
    return up, down + down * (1.0 - up * down)


@triton.jit
def _ratio(z, numbers, PAIRS: tl.constexpr, MIDDLE: tl.constexpr):
    """e^z, e^-z and D(z); numbers = [w_1, the weight of the node 0, then tau and w of each inner pair]."""
    up, down = _both(z)
    total = (up + down) * tl.load(numbers)
    for i in tl.static_range(PAIRS):
        one, other = _both(z * tl.load(numbers + 2 + 2 * i))
        total += (one + other) * tl.load(numbers + 3 + 2 * i)
    if MIDDLE:
        total += tl.load(numbers + 1)
    return up, down, total


@triton.jit
def _forward(
    x, y, out, n, numbers, outside, gain, a, b, x_low, x_high, y_low, y_high, PAIRS: tl.constexpr,
    MIDDLE: tl.constexpr, CENTRED: tl.constexpr, WATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    up, down, total = _ratio((second - b) * gain, numbers, PAIRS, MIDDLE)
    result = (first - a) * ((up - down) / total) * (1.0 / gain)
    if CENTRED:
        result += first * b + (second * a - a * b)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    if WATCH:
        beyond = tl.maximum(tl.maximum(first - x_high, x_low - first), tl.maximum(second - y_high, y_low - second))
        beyond = tl.where((first == first) & (second == second), beyond, 1.0)
        if tl.max(beyond) > 0.0:
            tl.atomic_add(outside, tl.sum(((beyond > 0.0) & inside).to(tl.int64)))


@triton.jit
def _backward(
    grad, x, y, to_x, to_y, n, numbers, gain, a, b, PAIRS: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """d/dz of (e^z - e^-z) / D is (e^z + e^-z) / D - (e^z - e^-z) D' / D^2, D' = sum w tau (e^(tau z) - e^(-tau z))."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    z = (tl.load(y + place, mask=inside, other=0.0).to(tl.float32) - b) * gain
    up, down, total = _ratio(z, numbers, PAIRS, MIDDLE)
    turn = (up - down) * tl.load(numbers)
    for i in tl.static_range(PAIRS):
        tau = tl.load(numbers + 2 + 2 * i)
        one, other = _both(z * tau)
        turn += (one - other) * tl.load(numbers + 3 + 2 * i) * tau
    ratio = (up - down) / total
    tl.store(to_x + place, (g * (ratio * (1.0 / gain) + b)).to(to_x.dtype.element_ty), mask=inside)
    slope = (up + down) / total - ratio * (turn / total)
    tl.store(to_y + place, (g * ((first - a) * slope + a)).to(to_y.dtype.element_ty), mask=inside)


def multiplying(
    numbers: Tensor, gain: float, nodes: int, centre: tuple[float, float], outside: Tensor | None = None,
    first: tuple[float, float] = (0.0, 0.0), second: tuple[float, float] = (0.0, 0.0),
) -> Fixed:  # fmt: skip
    """A product ready to be used; with `outside` pairs that leave the ranges of their factors add to that count."""
    watched = outside is not None
    constants = nodes // 2 - 1, nodes % 2 == 1, centre != (0.0, 0.0), watched, BLOCK
    count = outside if watched else numbers
    return Fixed(_forward, (numbers, count, gain, *centre, *first, *second), constants, WARPS)


def forward(x: Tensor, y: Tensor, product: Fixed) -> Tensor:
    """The product, elementwise."""
    left, right = (t if t.is_contiguous() else t.contiguous() for t in (x, y))
    out, n = torch.empty_like(left), left.numel()
    launch(product, -(-n // BLOCK), left, right, out, n)
    return out


def backward(
    grad: Tensor, x: Tensor, y: Tensor, numbers: Tensor, gain: float, nodes: int, centre: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """The gradients of both factors."""
    left, right, slope = x.contiguous(), y.contiguous(), grad.contiguous()
    to_x, to_y, n = torch.empty_like(left), torch.empty_like(right), left.numel()
    fixed = Fixed(_backward, (numbers, gain, *centre), (nodes // 2 - 1, nodes % 2 == 1, BLOCK), WARPS)
    launch(fixed, -(-n // BLOCK), slope, left, right, to_x, to_y, n)
    return to_x, to_y
