"""Handlers for softmax, attention and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flint import arb
from torch import Tensor

from ....functions.directed import U, high_end, precision, split
from .. import attention
from ..atoms import Ints, Refusal, Tape, unique_rows
from ..attention import Scores
from ..values import (
    Unknown,
    Value,
    add,
    apply,
    atoms,
    moved,
    multiply,
    rearranged,
    rescale,
    shape,
    subtract,
    transposed,
    wrap,
)
from .linear import product
from .reduce import log_sum_exp, mean, variance
from .table import Operation, handles, words

#: Bits for rows of numbers: 53 that are kept, and as many to lose in sums of large and small ones.
ROWS = 128


def by_rows(tape: Tape, ids: Tensor, write: Callable[[Ints], Ints], value: Callable[[list[arb]], list[arb]]) -> Tensor:
    """An operation on rows (..., K) of single tokens.

    `write` maps the slots of a row to those of its result, `value` does the same to rows that are all numbers: these
    are balls, since some of the numbers may have been rounded.
    """
    parts = tape.unpack(ids.reshape(-1, ids.shape[-1]))
    token, point = tape.one_token(parts.token), tape.one_point(parts.point)
    if token is None:
        raise Refusal("it runs over numbers of different tokens and channels at once")
    patterns, inverse = unique_rows(parts.slot)

    def row(slots: Ints) -> Ints:
        if tape.is_number(slots).all():
            numbers = tape.numbers(slots)
            with precision(ROWS):
                plain = [arb(x) for x in numbers.tolist()]
                return tape.constants(_rounded(tape, value(plain), value(_balls(tape, numbers))).numpy())
        return write(slots)

    slots = np.stack([row(pattern) for pattern in patterns])[inverse]
    return tape.pack(slots, token[:, None], point[:, None]).reshape(ids.shape)


def softmax(tape: Tape, x: Value, dim: int) -> Value:
    """Softmax over channels, or over tokens (then the weights of an attention)."""
    moved_last = rearranged(tape, x, lambda i: i.movedim(dim, -1))
    if not isinstance(moved_last, Scores):
        ids = atoms(tape, moved_last)
        parts = tape.unpack(ids.reshape(-1, ids.shape[-1]))
        if tape.one_token(parts.token) is not None:
            rows = by_rows(tape, ids, _softmax_row(tape), _shares)
            return rearranged(tape, wrap(tape, rows), lambda i: i.movedim(-1, dim))
        tape.one_point(parts.point)
        found = attention.token_scores(tape, parts)
    else:
        found = moved(tape, [moved_last], lambda change: change(moved_last).reshape(-1, shape(moved_last)[-1]))
    size = shape(moved_last)
    weights = attention.softmax(tape, found)
    return replace(weights, codes=weights.codes.reshape(size).movedim(-1, dim))


def _shares(row: list[arb]) -> list[arb]:
    """The softmax of numbers, some of which may be minus infinity."""
    seen = [x for x in row if not _hides(x)]
    if not seen:
        raise Refusal("its mask hides every entry of a row")
    most = max(seen, key=float)
    parts = [arb(0) if _hides(x) else (x - most).exp() for x in row]
    total = sum(parts, arb(0))
    return [part / total for part in parts]


def _hides(x: arb) -> bool:
    return float(x) == -math.inf


def _softmax_row(tape: Tape) -> Callable[[Ints], Ints]:
    def write(slots: Ints) -> Ints:
        hidden = np.isneginf(tape.numbers(slots))
        if hidden.all():
            raise Refusal("its mask hides every entry of a row")
        out = np.zeros_like(slots)  # slot 0 is the number zero
        if (~hidden).sum() == 1:
            out[~hidden] = tape.constants(np.ones(1))
            return out
        out[~hidden] = tape.register(tape.build.softmax(tape.columns(slots[~hidden]), tape.label))
        return out

    return write


@handles("softmax", "_softmax", "_safe_softmax", note="over channels, or over tokens as attention; masks by -inf")
def _softmax(tape: Tape, call: Operation) -> Value:
    return softmax(tape, call["self"], int(call["dim"]))


@handles("log_softmax", "_log_softmax", note="x - logsumexp(x)")
def _log_softmax(tape: Tape, call: Operation) -> Value:
    x, dim = call["self"], int(call["dim"])
    return subtract(tape, x, log_sum_exp(tape, x, [dim % max(1, len(shape(x)))], keepdim=True))


_FUSED = words(
    """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math
    _scaled_dot_product_fused_attention_overrideable"""
)


def _root(tape: Tape, width: int) -> float:
    """1/sqrt(width); a rounded number, unless width is a power of 4."""
    near = 1.0 / math.sqrt(width)
    exact = math.frexp(near)[0] == 0.5 and near * near * width == 1
    return near if exact else float(tape.doubt(np.array(near), np.array(4 * U * near)))


@handles("scaled_dot_product_attention", *_FUSED, note="kept as attention over tokens; constant masks")
def _attention(tape: Tape, call: Operation) -> Any:
    query, key, value = (call[name] for name in ("query", "key", "value"))
    mask = call.get("attn_mask", call.get("attn_bias"))
    if call.get("dropout_p"):
        raise Refusal("it draws random numbers: dropout_p is not 0")
    if call.get("enable_gqa"):
        times = shape(query)[-3] // shape(key)[-3]
        key, value = (rearranged(tape, v, lambda i: i.repeat_interleave(times, -3)) for v in (key, value))
    factor = call.get("scale")
    scale = _root(tape, shape(query)[-1]) if factor is None else float(factor)
    logits = rescale(tape, product(tape, query, transposed(tape, key)), scale)
    if call.get("is_causal"):
        size = (shape(query)[-2], shape(key)[-2])
        logits = rescale(tape, logits, 1.0, torch.full(size, -math.inf, dtype=torch.float64).triu(1))
    if mask is not None:
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
        logits = add(tape, logits, mask)
    out = product(tape, softmax(tape, logits, -1), value)
    statistics = Unknown("only the output of attention is supported, not the statistics beside it")
    return out if call.name == "scaled_dot_product_attention" else [out, *[statistics] * 8]


def normalise(tape: Tape, x: Value, eps: float, centred: bool = True) -> Value:
    """Layer norm, or RMS norm, over the last axis."""

    def write(slots: Ints) -> Ints:
        return tape.register(tape.build.normalise(tape.columns(slots), eps, centred, tape.label))

    def value(row: list[arb]) -> list[arb]:
        middle = sum(row, arb(0)) / len(row) if centred else arb(0)
        centre = [x - middle for x in row]
        spread = sum((x * x for x in centre), arb(0)) / len(row) + arb(eps)
        return [x / spread.sqrt() for x in centre]

    return wrap(tape, by_rows(tape, atoms(tape, x), write, value))


def _scaled(tape: Tape, x: Value, weight: Value | None, bias: Value | None) -> Value:
    x = x if weight is None else multiply(tape, x, weight)
    return x if bias is None else add(tape, x, bias)


@handles("layer_norm", "native_layer_norm", note="over the last axes, natively")
def _layer_norm(tape: Tape, call: Operation) -> Any:
    x, rank, eps = call["input"], len(call["normalized_shape"]), float(call.get("eps", 1e-5))
    size = shape(x)
    flat = rearranged(tape, x, lambda i: i.flatten(-rank))
    unit = rearranged(tape, normalise(tape, flat, eps), lambda i: i.reshape(size))
    out = _scaled(tape, unit, call.get("weight"), call.get("bias"))
    if call.name == "layer_norm":
        return out
    dims = list(range(len(size) - rank, len(size)))[::-1]
    spread = rescale(tape, variance(tape, x, dims, True, 0.0), 1.0, eps)
    return [out, mean(tape, x, dims, True), apply(tape, spread, "rsqrt")]


@handles("rms_norm", "_fused_rms_norm", note="over the last axes, natively")
def _rms_norm(tape: Tape, call: Operation) -> Any:
    x, rank, eps = call["input"], len(call["normalized_shape"]), call.get("eps")
    size = shape(x)
    if eps is None and tape.own != torch.float64:
        raise Refusal("its eps is that of the dtype it happens to run in: give one, or use torch.nn.RMSNorm")
    small = torch.finfo(torch.float64).eps if eps is None else float(eps)
    flat = rearranged(tape, x, lambda i: i.flatten(-rank))
    unit = rearranged(tape, normalise(tape, flat, small, centred=False), lambda i: i.reshape(size))
    out = _scaled(tape, unit, call.get("weight"), None)
    return out if call.name == "rms_norm" else [out, Unknown("the statistics of rms_norm are not supported")]


@handles("group_norm", "native_group_norm", "instance_norm", note="natively, group by group")
def _group_norm(tape: Tape, call: Operation) -> Any:
    x, eps = call["input"], float(call["eps"])
    size = shape(x)
    groups = size[1] if call.name == "instance_norm" else int(call.get("num_groups", call.get("group")))
    if call.name == "instance_norm" and not call["use_input_stats"]:
        raise Refusal("with running statistics it is not supported; use batch norm in evaluation mode")
    flat = rearranged(tape, x, lambda i: i.reshape(size[0], groups, -1))
    unit = rearranged(tape, normalise(tape, flat, eps), lambda i: i.reshape(size))
    weight, bias = (_channels(call.constant(key), len(size)) for key in ("weight", "bias"))
    out = _scaled(tape, unit, weight, bias)
    statistics = Unknown("the statistics of native_group_norm are not supported")
    return [out, statistics, statistics] if call.name == "native_group_norm" else out


def _channels(numbers: Tensor | None, rank: int) -> Tensor | None:
    """One number for each channel, ready to be broadcast to (batch, channels, space...)."""
    return None if numbers is None else numbers.double().reshape(-1, *[1] * (rank - 2))


def _balls(tape: Tape, numbers: np.ndarray) -> list[arb]:
    """Numbers, and all that may be meant by them."""
    return [arb(x, far) if far else arb(x) for x, far in zip(numbers.tolist(), tape.off(numbers).tolist(), strict=True)]


def _folded(eps: float, centre: arb, spread: arb, weight: arb, bias: arb) -> tuple[arb, arb]:
    """Scale and shift of one channel of a batch norm."""
    scale = weight / (spread + arb(eps)).sqrt()
    if not scale.is_finite():
        raise Refusal("its variance plus eps is not positive")
    return scale, bias - centre * scale


def _rounded(tape: Tape, exact: list[arb], meant: list[arb]) -> Tensor:
    """Balls as float64, charged with how far they are from what is meant."""
    near, _ = split(exact)
    off = np.array([high_end(abs(ball - arb(x))) for x, ball in zip(near.tolist(), meant, strict=True)])
    if not np.isfinite(off).all():
        raise Refusal("a constant in it is computed from rounded numbers, and cannot be known")
    return torch.from_numpy(tape.doubt(near, off))


@handles("batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", note="affine, in evaluation mode")
def _batch_norm(tape: Tape, call: Operation) -> Any:
    x = call["input"]
    centre, spread = (call.constant(key) for key in ("running_mean", "running_var"))
    if call.get("training") or centre is None or spread is None:
        raise Refusal("without running statistics, or in training mode, it mixes points of the batch")
    rank = len(shape(x))
    numbers = [call.constant(key) for key in ("weight", "bias")]
    weight, bias = (torch.full_like(centre, at) if x is None else x for x, at in zip(numbers, (1.0, 0.0), strict=True))
    with precision(256):
        plain = [x.double().numpy() for x in (centre, spread, weight, bias)]
        exact, meant = (
            [_folded(float(call["eps"]), *numbers) for numbers in zip(*columns, strict=True)]
            for columns in ([[arb(x) for x in c.tolist()] for c in plain], [_balls(tape, c) for c in plain])
        )
        scale, shift = (_rounded(tape, *([pair[i] for pair in way] for way in (exact, meant))) for i in range(2))
    out = rescale(tape, x, _channels(scale, rank), _channels(shift, rank))  # type: ignore[arg-type]
    return out if call.name == "batch_norm" else [out, torch.zeros(0), torch.zeros(0)]
