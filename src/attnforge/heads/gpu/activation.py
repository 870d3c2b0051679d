"""The lattice form of `heads.fast.table`, with or without a gate, in one pass over the elements; and its gradients.

The numbers of a table travel as one short tensor, [rate, centre, gate, Q, P, R] with the lowest powers first: `prepare`
makes P and R of the stored values in float64, in one small launch, so that a table that was trained is read as it is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .exponential import exp
from .launch import Fixed, launch, relaunching

__all__ = ["BLOCK", "Shape", "backward", "forward", "prepare", "reading", "relaunching"]

BLOCK = 2048  # elements a program: 16 a thread, enough loads in flight to fill the memory's bandwidth
WARPS = 4  # of a program
NEIGHBOURS: tl.constexpr = tl.constexpr(8)  # elements that a thread loads at once, and so counts without asking others
SUMMED = 4096  # elements a program where gradients of the values are summed: fewer partial sums


@triton.jit
def _prepare(
    value, matrix, constant, numbers, ROWS, HEAD, ANCHORS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_HEAD: tl.constexpr
):
    column = tl.arange(0, COLUMNS)
    there = column < 2 * ROWS
    total = tl.zeros((COLUMNS,), tl.float64)
    for k in range(ANCHORS):
        v = tl.load(value + k).to(tl.float64)
        total += v * tl.load(matrix + k * 2 * ROWS + column, mask=there, other=0.0)
    tl.store(numbers + HEAD + column, total.to(tl.float32), mask=there)
    first = tl.arange(0, BLOCK_HEAD)
    tl.store(numbers + first, tl.load(constant + first, mask=first < HEAD, other=0.0), mask=first < HEAD)


@triton.jit
def _horner(numbers, s, DEGREE: tl.constexpr):
    total = tl.zeros_like(s) + tl.load(numbers + DEGREE)
    for j in tl.static_range(DEGREE):
        total = total * s + tl.load(numbers + DEGREE - 1 - j)
    return total


@triton.jit
def _slope(numbers, s, DEGREE: tl.constexpr):
    """The derivative of the polynomial."""
    total = tl.zeros_like(s)
    for j in tl.static_range(DEGREE):
        total = total * s + (DEGREE - j) * tl.load(numbers + DEGREE - j)
    return total


@triton.jit
def _place(at, rate):
    """q = exp(-rate |at|), 1/(1 + q^2), and s = q/(1 + q^2), its quotient corrected once."""
    q = exp(tl.abs(at) * -rate)
    low = q * q + 1.0
    inverse = 1.0 / low
    s = q * inverse
    return q, inverse, s + (q - s * low) * inverse


@triton.jit
def _tilt(at, q, inverse, WHOLE: tl.constexpr):
    tilt = (1.0 - q * q) * inverse if WHOLE else (1.0 - q) / (1.0 + q)
    return tl.where(at < 0, -tilt, tilt)


@triton.jit
def _forward(
    y, out, n, numbers, outside, low, high, DEGREE: tl.constexpr, ODD: tl.constexpr, WHOLE: tl.constexpr,
    GATED: tl.constexpr, SHARED: tl.constexpr, CENTRED: tl.constexpr, WATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    x = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    if DEGREE >= 0:
        at = x - tl.load(numbers + 1) if CENTRED else x
        q, inverse, s = _place(at, tl.load(numbers))
        above = _horner(numbers + DEGREE + 4, s, DEGREE)
        if ODD:
            above += _horner(numbers + 2 * DEGREE + 5, s, DEGREE) * _tilt(at, q, inverse, WHOLE)
        below = _horner(numbers + 3, s, DEGREE)
    if GATED:
        if not SHARED:
            q = exp(tl.abs(x) * -tl.load(numbers + 2))
        one, fall = 1.0 + q, tl.abs(x) * q
        result = -fall / one
        if DEGREE >= 0:  # head and gate over one denominator: quotients are what costs here
            result = (above * one - fall * below) / (below * one)
        result = tl.where(x < 0, 0.0, x) + result
    else:
        result = above / below
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    if WATCH:  # NaN is outside too; each thread counts a few neighbours, and speaks up if there are any
        beyond = (((x >= low) & (x <= high)) == 0) & inside
        few = tl.sum(tl.reshape(beyond.to(tl.int32), (BLOCK // NEIGHBOURS, NEIGHBOURS)), 1)
        tl.atomic_add(outside + tl.zeros_like(few), few.to(tl.int64), mask=few > 0)


@triton.jit
def _backward(
    grad, y, to_y, partial, n, numbers, DEGREE: tl.constexpr, ODD: tl.constexpr, WHOLE: tl.constexpr,
    GATED: tl.constexpr, CENTRED: tl.constexpr, OF_VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dh/dtheta of h = (P(s) + t R(s)) / Q(s): s' = -s tanh(theta), and t' = 4 s^2, or (1 - t^2)/2 of half numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    x = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    change = tl.zeros_like(x)
    if DEGREE >= 0:
        rate = tl.load(numbers)
        at = x - tl.load(numbers + 1) if CENTRED else x
        q, inverse, s = _place(at, rate)
        tilt = _tilt(at, q, inverse, WHOLE)
        turn = -s * _tilt(at, q, inverse, True)
        share = 1.0 / _horner(numbers + 3, s, DEGREE)
        above = _horner(numbers + DEGREE + 4, s, DEGREE)
        rise = _slope(numbers + DEGREE + 4, s, DEGREE) * turn
        if ODD:
            side = _horner(numbers + 2 * DEGREE + 5, s, DEGREE)
            above += side * tilt
            bend = 4.0 * s * s if WHOLE else 0.5 * (1.0 - tilt * tilt)
            rise += _slope(numbers + 2 * DEGREE + 5, s, DEGREE) * turn * tilt + side * bend
        fall = _slope(numbers + 3, s, DEGREE) * turn
        change = rate * (rise - above * share * fall) * share
        if OF_VALUE:
            power = g * share
            into = partial + tl.program_id(0).to(tl.int64) * (2 * DEGREE + 2)
            for j in tl.static_range(DEGREE + 1):
                tl.store(into + j, tl.sum(power))
                tl.store(into + DEGREE + 1 + j, tl.sum(power * tilt))
                power = power * s
    if GATED:
        gate = tl.load(numbers + 2)
        share = 1.0 / (1.0 + exp(-gate * x))
        change += share * (1.0 + gate * x * (1.0 - share))
    tl.store(to_y + place, (g * change).to(to_y.dtype.element_ty), mask=inside)


def prepare(value: Tensor, matrix: Tensor | None, constant: Tensor) -> Tensor:
    """[rate, centre, gate, Q, P, R]: `constant` holds the first four, `matrix` takes the values to P and R."""
    if matrix is None:
        return constant
    (anchors, columns), head = matrix.shape, constant.numel()
    numbers = torch.empty(head + columns, dtype=torch.float32, device=value.device)
    launch(_preparing(anchors, columns, head), 1, value, matrix, constant, numbers)
    return numbers


@functools.lru_cache(maxsize=64)
def _preparing(anchors: int, columns: int, head: int) -> Fixed:
    constants = anchors, triton.next_power_of_2(columns), triton.next_power_of_2(head)
    return Fixed(_prepare, (columns // 2, head), constants, 1)


@dataclass(frozen=True)
class Shape:
    """What kernels are compiled for: a table's size, and how it is read."""

    anchors: int
    centred: bool
    gated: bool
    shared: bool  # the gate's exponential is the table's
    even: bool = False  # the values are symmetric: R = 0

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, anchors: int, rate: float, centre: float, gate: float, even: bool = False) -> Shape:
        return cls(anchors, centre != 0.0, gate != 0.0, anchors > 0 and gate == rate and centre == 0.0, even)

    @property
    def degree(self) -> int:
        return (self.anchors + 1) // 2 - 1

    @property
    def odd(self) -> bool:
        return self.anchors > 1 and not self.even


def reading(numbers: Tensor, shape: Shape, outside: Tensor | None = None, low: float = 0.0, high: float = 0.0) -> Fixed:
    """A table ready to be read. With `outside`, a count on the device, values outside [low, high] are added to it."""
    watched = outside is not None
    constants = shape.degree, shape.odd, shape.anchors % 2 == 1, shape.gated, shape.shared, shape.centred
    return Fixed(_forward, (numbers, outside if watched else numbers, low, high), (*constants, watched, BLOCK), WARPS)


def forward(y: Tensor, table: Fixed) -> Tensor:
    """The head at y."""
    given = y if y.is_contiguous() else y.contiguous()
    out, n = torch.empty_like(given), given.numel()
    launch(table, -(-n // BLOCK), given, out, n)
    return out


def backward(grad: Tensor, y: Tensor, numbers: Tensor, shape: Shape, of_value: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of y and, where wanted, the sums over elements of grad s^j / Q and of the same times the tilt."""
    given, slope = y.contiguous(), grad.contiguous()
    to_y, n, of_value = torch.empty_like(given), given.numel(), of_value and shape.anchors > 0
    block = SUMMED if of_value else BLOCK
    programs = -(-n // block)
    partial = numbers.new_empty(programs, 2 * shape.degree + 2) if of_value else numbers
    constants = shape.degree, shape.anchors > 1, shape.anchors % 2 == 1, shape.gated, shape.centred, of_value, block
    launch(Fixed(_backward, (numbers,), constants, WARPS), programs, slope, given, to_y, partial, n)
    return to_y, partial.sum(0, dtype=torch.float64) if of_value else None
