"""Handlers for contractions: matrix products, convolutions, pooling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import atoms as algebra
from ..atoms import Refusal, Tape
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
    if ids.dim() != rank + 2:
        raise Refusal("its input has no batch dimension")
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
    if ids.dim() == rank + 1:
        raise Refusal("its input has no batch dimension")
    stride, padding, dilation = (_spread(call[key], rank) for key in ("stride", "padding", "dilation"))
    groups, kernel = int(call["groups"]), list(weight.shape[2:])
    if call["transposed"]:
        ids = _dilated(ids, stride, _spread(call["output_padding"], rank))
        weight = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
        weight = weight.flip(list(range(2, 2 + rank)))
        padding = [(k - 1) * d - p for k, d, p in zip(kernel, dilation, padding, strict=True)]
        stride = [1] * rank
    if min(padding) < 0:
        raise Refusal("it cuts off more than its kernel reaches")
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


@handles("avg_pool1d", "avg_pool2d", "avg_pool3d", note="affine")
def _avg_pool(tape: Tape, call: Operation) -> Value:
    rank = int(call.name[-2])
    kernel, padding = _spread(call["kernel_size"], rank), _spread(call["padding"], rank)
    stride = _spread(call["stride"] or kernel, rank)
    if call.get("ceil_mode") or (any(padding) and not call.get("count_include_pad", True)):
        raise Refusal("only whole windows are supported (no ceil_mode, count_include_pad)")
    patches = _windows(atoms(tape, call["self"]), kernel, stride, padding, [1] * rank)
    dims = list(range(patches.dim() - rank, patches.dim()))[::-1]
    size = call.get("divisor_override")
    out = total(tape, wrap(tape, patches), dims, scale=tape.reciprocal(float(size or math.prod(kernel))))
    return rearranged(tape, out, lambda i: i.movedim(-1, 1))


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


@handles(*_MAX_POOLS, note="without padding, and without the places: relus")
def _max_pool(tape: Tape, call: Operation) -> Any:
    rank = int(call.name[8])
    kernel, padding, dilation = (_spread(call[key], rank) for key in ("kernel_size", "padding", "dilation"))
    stride = _spread(call["stride"] or kernel, rank)
    if call.get("ceil_mode") or any(padding):
        raise Refusal("only whole windows are supported (no ceil_mode, no padding)")
    patches = _windows(atoms(tape, call["self"]), kernel, stride, padding, dilation)
    dims = list(range(patches.dim() - rank, patches.dim()))[::-1]
    out = rearranged(tape, largest(tape, wrap(tape, patches), dims, False), lambda i: i.movedim(-1, 1))
    return [out, _PLACES] if call.name.endswith("indices") else out


@handles(*(f"adaptive_max_pool{rank}d" for rank in (1, 2, 3)), note="without the places: relus")
def _adaptive_max_pool(tape: Tape, call: Operation) -> Any:
    x, rank = call["self"], int(call.name[-2])
    for axis, wanted in zip(range(-rank, 0), _spread(call["output_size"], rank), strict=True):
        dim = axis + len(shape(x))
        windows = []
        for j in range(wanted):
            start, end = _window(j, shape(x)[dim], wanted)
            window = rearranged(tape, x, lambda i, a=dim, b=start, c=end: i.narrow(a, b, c - b))
            windows.append(atoms(tape, largest(tape, window, [dim], True)))
        x = wrap(tape, torch.cat(windows, dim))
    return [x, _PLACES]
