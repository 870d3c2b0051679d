"""Handlers for contractions: matrix products, convolutions, pooling."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import atoms as algebra
from ..atoms import Tape
from ..values import Unknown, Value, add, atoms, matmul, multiply, rearranged, rescale, shape, subtract, wrap
from .reduce import largest, total
from .table import Operation, handles


def product(tape: Tape, x: Value, y: Value) -> Value:
    """x @ y with all the broadcasting that torch.matmul does."""
    one_row, one_column = len(shape(x)) == 1, len(shape(y)) == 1
    if isinstance(y, Tensor) and y.dim() <= 2 and not isinstance(x, Tensor):
        out = algebra.contract(tape, atoms(tape, x), (y[:, None] if one_column else y).double().numpy())
        return wrap(tape, out.squeeze(-1) if one_column else out)
    x = rearranged(tape, x, lambda i: i[None, :]) if one_row else x
    y = rearranged(tape, y, lambda i: i[:, None]) if one_column else y
    batch = torch.broadcast_shapes(shape(x)[:-2], shape(y)[:-2])
    flat = [
        rearranged(tape, side, lambda i: i.expand(*batch, *i.shape[-2:]).reshape(-1, *i.shape[-2:])) for side in (x, y)
    ]
    size = (*batch, *([] if one_row else [shape(x)[-2]]), *([] if one_column else [shape(y)[-1]]))
    return rearranged(tape, matmul(tape, *flat), lambda i: i.reshape(size))


_FACTORS = {
    "matmul": ("self", "other"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "vdot": ("self", "other"),
}
_SUMS = {
    "addmm": ("mat1", "mat2"),
    "addmv": ("mat", "vec"),
    "baddbmm": ("batch1", "batch2"),
}


@handles(*_FACTORS, note="affine with a constant factor; products of data, or scores of an attention")
def _matmul(tape: Tape, call: Operation) -> Value:
    x, y = (call[key] for key in _FACTORS[call.name])
    return product(tape, x, y)


@handles(*_SUMS, note="as matmul, with a sum")
def _add_matmul(tape: Tape, call: Operation) -> Value:
    x, y = (call[key] for key in _SUMS[call.name])
    beta, alpha = float(call.get("beta", 1)), float(call.get("alpha", 1))
    out = rescale(tape, product(tape, x, y), alpha)
    return out if beta == 0 else add(tape, out, call["self"], beta)


@handles("linear", note="affine")
def _linear(tape: Tape, call: Operation) -> Value:
    x, weight, bias = call["input"], call["weight"], call.get("bias")
    if isinstance(weight, Tensor) and isinstance(bias, (Tensor, type(None))) and weight.dim() == 2:
        shift = None if bias is None else bias.double().numpy()
        return wrap(tape, algebra.contract(tape, atoms(tape, x), weight.double().numpy().T, shift))
    out = product(tape, x, rearranged(tape, weight, lambda i: i.mT if i.dim() > 1 else i))
    return out if bias is None else add(tape, out, bias)


@handles("outer", "ger", note="products of data, or affine")
def _outer(tape: Tape, call: Operation) -> Value:
    column = rearranged(tape, call["self"], lambda i: i[:, None])
    return product(tape, column, rearranged(tape, call["vec2"], lambda i: i[None, :]))


@handles("bilinear", note="constant weights")
def _bilinear(tape: Tape, call: Operation) -> Value:
    weight = call.constant("weight").double()  # (out, left, right)
    left = product(tape, call["input1"], weight.permute(1, 0, 2).flatten(1))
    left = rearranged(tape, left, lambda i: i.unflatten(-1, (weight.shape[0], weight.shape[2])))
    right = rearranged(tape, call["input2"], lambda i: i.unsqueeze(-2))
    both = multiply(tape, left, right)
    out = total(tape, both, [len(shape(both)) - 1])
    return out if call.get("bias") is None else add(tape, out, call["bias"])


@handles("linalg_cross", note="products")
def _cross(tape: Tape, call: Operation) -> Value:
    dim = int(call["dim"])

    def part(key: str, shift: int) -> Value:
        return rearranged(tape, call[key], lambda i: i.roll(shift, dim))

    forward = multiply(tape, part("self", -1), part("other", -2))
    return subtract(tape, forward, multiply(tape, part("self", -2), part("other", -1)))


def _windows(ids: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """ids (N, C, space...) as (N, out..., C, kernel...); padding with zeros."""
    rank = len(kernel)
    ids = torch.nn.functional.pad(ids, [p for pad in reversed(padding) for p in (pad, pad)])
    for axis in range(rank):
        ids = ids.unfold(2 + axis, (kernel[axis] - 1) * dilation[axis] + 1, stride[axis])[..., :: dilation[axis]]
    return ids.permute(0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank))


def _spread(numbers: Any, rank: int) -> list[int]:
    values = [numbers] if isinstance(numbers, int) else list(numbers)
    return values * rank if len(values) == 1 else values


@handles("convolution", note="constant weights; also transposed, dilated and grouped")
def _convolution(tape: Tape, call: Operation) -> Value:
    ids, weight, bias = atoms(tape, call["input"]), call.constant("weight").double(), call.constant("bias")
    rank = weight.dim() - 2
    if ids.dim() == rank + 1:  # one point alone
        alone = Operation(call.name, call.target, {**call.arguments, "input": wrap(tape, ids[None])})
        return rearranged(tape, _convolution(tape, alone), lambda i: i[0])
    stride, padding, dilation = (_spread(call[key], rank) for key in ("stride", "padding", "dilation"))
    groups, kernel = int(call["groups"]), list(weight.shape[2:])
    if call["transposed"]:
        ids = _dilated(ids, stride, _spread(call["output_padding"], rank))
        weight = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
        weight = weight.flip(list(range(2, 2 + rank)))
        padding = [(k - 1) * d - p for k, d, p in zip(kernel, dilation, padding, strict=True)]
        stride = [1] * rank
    outputs = []
    for part, rows in zip(ids.chunk(groups, 1), weight.chunk(groups, 0), strict=True):
        patches = _windows(part, kernel, stride, padding, dilation).flatten(1 + rank)
        outputs.append(algebra.contract(tape, patches, rows.flatten(1).numpy().T))
    out = torch.cat(outputs, -1).movedim(-1, 1)
    shift = 0.0 if bias is None else bias.double().reshape(-1, *[1] * rank)
    return wrap(tape, algebra.affine(tape, out, 1.0, shift))


def _dilated(ids: Tensor, stride: list[int], extra: list[int]) -> Tensor:
    """Zeros between the entries, as a transposed convolution sees its input; `extra` zeros behind."""
    size = [(s - 1) * step + 1 + more for s, step, more in zip(ids.shape[2:], stride, extra, strict=True)]
    out = torch.zeros((*ids.shape[:2], *size), dtype=ids.dtype)
    index = tuple(slice(0, (s - 1) * step + 1, step) for s, step in zip(ids.shape[2:], stride, strict=True))
    out[(slice(None), slice(None), *index)] = ids
    return out


class _Pooling:
    """The windows of a pooling operation, along each of its axes."""

    def __init__(self, call: Operation, ids: Tensor):
        self.rank = int(call.name.partition("pool")[2][0])
        self.alone = ids.dim() == self.rank + 1  # no batch: the first axis is that of the channels
        self.ids = ids[None] if self.alone else ids
        self.kernel, self.padding, self.dilation = (
            _spread(call.get(key, 1), self.rank) for key in ("kernel_size", "padding", "dilation")
        )
        self.stride = _spread(call["stride"] or self.kernel, self.rank)
        asked = {key: value for key, value in call.arguments.items() if key != "self"}
        found = call.target(torch.zeros(self.ids.shape, dtype=torch.float64), **asked)
        self.after = (found if isinstance(found, Tensor) else found[0]).shape[2:]

    def start(self, axis: int, k: int) -> int:
        return k * self.stride[axis] - self.padding[axis]

    def places(self, axis: int, k: int) -> list[int]:
        """What the window `k` along an axis holds of the input."""
        first, step = self.start(axis, k), self.dilation[axis]
        reached = (first + j * step for j in range(self.kernel[axis]))
        return [place for place in reached if 0 <= place < self.ids.shape[2 + axis]]

    def result(self, tape: Tape, ids: Tensor) -> Value:
        return wrap(tape, ids[0] if self.alone else ids)


@handles("avg_pool1d", "avg_pool2d", "avg_pool3d", note="affine")
def _avg_pool(tape: Tape, call: Operation) -> Value:
    pool = _Pooling(call, atoms(tape, call["self"]))
    within, given = bool(call.get("count_include_pad", True)), call.get("divisor_override")
    axes = []
    for axis, wanted in enumerate(pool.after):
        length, pad = pool.ids.shape[2 + axis], pool.padding[axis]
        # Where the padding counts, a window may reach to its end, not beyond.
        ends = [min(pool.start(axis, k) + pool.kernel[axis], length + pad) for k in range(wanted)]
        sizes = [end - pool.start(axis, k) if within else len(pool.places(axis, k)) for k, end in enumerate(ends)]
        axes.append([(pool.places(axis, k), size) for k, size in enumerate(sizes)])
    before = pool.ids.shape[2:]
    weight = np.zeros((before.numel(), pool.after.numel()))
    for column, windows in enumerate(itertools.product(*axes)):
        share = tape.reciprocal(float(given or math.prod(size for _, size in windows)))
        rows = np.ravel_multi_index(np.meshgrid(*(places for places, _ in windows), indexing="ij"), before)
        weight[rows.reshape(-1), column] = share
    out = algebra.contract(tape, pool.ids.flatten(2), weight)
    return pool.result(tape, out.reshape(*pool.ids.shape[:2], *pool.after))


def _window(j: int, length: int, wanted: int) -> tuple[int, int]:
    """From where to where the window `j` of an adaptive pooling reaches."""
    return j * length // wanted, -(-(j + 1) * length // wanted)


@handles(*(f"{mark}adaptive_avg_pool{rank}d" for mark in ("", "_") for rank in (1, 2, 3)), note="affine")
def _adaptive_avg_pool(tape: Tape, call: Operation) -> Value:
    x, size = call["self"], call["output_size"]
    rank = int(call.name[-2])
    for axis, wanted in zip(range(-rank, 0), _spread(size, rank), strict=True):
        length = shape(x)[axis]
        weight = torch.zeros(length, wanted, dtype=torch.float64)
        for j in range(wanted):
            start, end = _window(j, length, wanted)
            weight[start:end, j] = tape.reciprocal(end - start)
        x = rearranged(tape, x, lambda i, a=axis: i.movedim(a, -1))
        x = rearranged(tape, product(tape, x, weight), lambda i, a=axis: i.movedim(-1, a))
    return x


_PLACES = Unknown("the places that max-pooling gives beside the numbers choose by comparing data")
_MAX_POOLS = tuple(f"max_pool{rank}d{end}" for rank in (1, 2, 3) for end in ("", "_with_indices"))


def _largest_within(tape: Tape, ids: Tensor, dim: int, windows: list[list[int]]) -> Tensor:
    """The maxima of windows along an axis."""
    found = [atoms(tape, largest(tape, wrap(tape, ids[(slice(None),) * dim + (w,)]), [dim], True)) for w in windows]
    return torch.cat(found, dim)


@handles(*_MAX_POOLS, note="without the places: relus")
def _max_pool(tape: Tape, call: Operation) -> Any:
    pool = _Pooling(call, atoms(tape, call["self"]))
    ids = pool.ids
    for axis, wanted in enumerate(pool.after):
        ids = _largest_within(tape, ids, 2 + axis, [pool.places(axis, k) for k in range(wanted)])
    out = pool.result(tape, ids)
    return [out, _PLACES] if call.name.endswith("indices") else out


@handles(*(f"adaptive_max_pool{rank}d" for rank in (1, 2, 3)), note="without the places: relus")
def _adaptive_max_pool(tape: Tape, call: Operation) -> Any:
    ids, rank = atoms(tape, call["self"]), int(call.name[-2])
    for dim, wanted in zip(range(ids.dim() - rank, ids.dim()), _spread(call["output_size"], rank), strict=True):
        length = ids.shape[dim]
        ids = _largest_within(tape, ids, dim, [[*range(*_window(j, length, wanted))] for j in range(wanted)])
    return [wrap(tape, ids), _PLACES]
