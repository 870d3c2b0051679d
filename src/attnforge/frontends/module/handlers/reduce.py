"""Handlers for reductions: over channels they are affine maps, products and maxima, over tokens they mix tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ....functions import registry as functions
from .. import atoms as algebra
from .. import attention
from ..atoms import Refusal, Tape
from ..attention import Weighted
from ..values import (
    Unknown,
    Value,
    apply,
    atoms,
    log_add_exp,
    maximum,
    minimum,
    multiply,
    rearranged,
    rescale,
    shape,
    subtract,
    wrap,
)
from .table import Operation, handles

Join = Callable[[Tape, Value, Value], Value]


def axes(dim: Any, rank: int) -> list[int]:
    """The axes that `dim` names, each counted from the front, the last one first; all of them for None or nothing."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))[::-1]
    wanted = [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % rank if rank else 0 for d in wanted}, reverse=True)


def remaining(x: Value, dims: list[int], keepdim: bool) -> tuple[int, ...]:
    """The shape that is left after a reduction over `dims`."""
    return tuple(1 if d in dims else s for d, s in enumerate(shape(x)) if keepdim or d not in dims)


def total(tape: Tape, x: Value, dims: list[int], keepdim: bool = False, scale: float = 1.0) -> Value:
    """scale times the sum over axes."""
    if not shape(x):
        return rescale(tape, x, scale)
    kept = remaining(x, dims, keepdim)
    if isinstance(x, Weighted) and len(dims) == 1:
        ids = attention.total(tape, x, dims[0])
        return rearranged(tape, rescale(tape, wrap(tape, ids), scale), lambda i: i.reshape(kept))
    ids = atoms(tape, x)
    # Axis by axis where there are tokens: first the channels of each token, then the tokens.
    steps = [dims] if tape.tokens == 1 else [[d] for d in dims]
    for step, group in enumerate(steps):
        ids = ids.movedim(group, list(range(-len(group), 0))).flatten(-len(group))
        weight = np.full((ids.shape[-1], 1), scale if step == 0 else 1.0)
        ids = algebra.contract(tape, ids, weight).squeeze(-1)
    return wrap(tape, ids.reshape(kept))


def mean(tape: Tape, x: Value, dims: list[int], keepdim: bool = False) -> Value:
    count = math.prod(shape(x)[d] for d in dims)
    return total(tape, x, dims, keepdim, tape.reciprocal(count) if shape(x) and count else 1.0)


def variance(tape: Tape, x: Value, dims: list[int], keepdim: bool, correction: float) -> Value:
    """Centre (affine), squares, sum."""
    centred = subtract(tape, x, mean(tape, x, dims, keepdim=True))
    count = math.prod(shape(x)[d] for d in dims) - correction
    if count <= 0:
        raise Refusal("it divides by zero degrees of freedom")
    return total(tape, apply(tape, centred, "square"), dims, keepdim, tape.reciprocal(count))


def tournament(tape: Tape, x: Value, dims: list[int], keepdim: bool, join: Join) -> Value:
    """An associative operation over axes, as a balanced tree."""
    if not shape(x):
        return x
    kept = remaining(x, dims, keepdim)
    count = len(dims)
    x = rearranged(tape, x, lambda i: i.movedim(dims, list(range(-count, 0))).flatten(-count))
    while (size := shape(x)[-1]) > 1:
        half = size // 2
        left, right, rest = (
            rearranged(tape, x, lambda i, a=a, b=b: i[..., a:b])
            for a, b in ((0, half), (half, 2 * half), (2 * half, size))
        )
        joined = join(tape, left, right)
        if size % 2:
            pair = [atoms(tape, joined), atoms(tape, rest)]
            joined = wrap(tape, torch.cat(pair, -1))
        x = joined
    return rearranged(tape, x, lambda i: i.reshape(kept))


def running(tape: Tape, x: Value, dim: int, join: Join) -> Value:
    """An operation over the first entries along an axis, for every number of them."""
    if not shape(x):
        return x
    parts = [rearranged(tape, x, lambda i, k=k: i.select(dim, k)) for k in range(shape(x)[dim])]
    for k in range(1, len(parts)):
        parts[k] = join(tape, parts[k - 1], parts[k])
    return wrap(tape, torch.stack([atoms(tape, part) for part in parts], dim))


def largest(tape: Tape, x: Value, dims: list[int], keepdim: bool, sign: float = 1.0) -> Value:
    """The maximum (sign 1) or minimum (sign -1) over axes."""
    for d in dims:
        ids = atoms(tape, x)
        parts = tape.unpack(ids.movedim(d, -1).reshape(-1, ids.shape[d]))
        everywhere = (np.sort(parts.token, 1) == np.arange(1, tape.tokens + 1)).all() if (
            parts.token.shape[1] == tape.tokens > 1) else False  # fmt: skip
        if everywhere and (parts.slot == parts.slot[:, :1]).all():
            x = _largest_token(tape, x, d, sign)
        else:
            x = tournament(tape, x, [d], True, maximum if sign > 0 else minimum)
    kept = remaining(x, dims, keepdim)
    return rearranged(tape, x, lambda i: i.reshape(kept))


def _largest_token(tape: Tape, x: Value, dim: int, sign: float) -> Value:
    ids = atoms(tape, rescale(tape, x, sign)).movedim(dim, -1)
    parts = tape.unpack(ids)
    slots, inverse = np.unique(parts.slot[..., 0], return_inverse=True)
    found = tape.register(tape.build.max_tokens(tape.columns(slots), tape.label))
    out = tape.pack(found[inverse.reshape(parts.slot.shape[:-1])], 0, tape.one_point(parts.point))
    return rescale(tape, wrap(tape, out.unsqueeze(dim)), sign)


def log_sum_exp(tape: Tape, x: Value, dims: list[int], keepdim: bool) -> Value:
    return tournament(tape, x, dims, keepdim, log_add_exp)


def _over(call: Operation) -> tuple[Value, list[int], bool]:
    """What is reduced, over which axes, and whether they are kept."""
    return call["self"], axes(call.get("dim"), len(shape(call["self"]))), bool(call.get("keepdim"))


@handles("sum", "mean", note="affine over channels, mixes tokens over tokens")
def _sum(tape: Tape, call: Operation) -> Value:
    return (total if call.name == "sum" else mean)(tape, *_over(call))


@handles("trace", note="affine")
def _trace(tape: Tape, call: Operation) -> Value:
    return total(tape, rearranged(tape, call["self"], lambda i: i.diagonal()), [0])


def _correction(call: Operation) -> float:
    if "correction" in call.arguments:
        return 1.0 if call["correction"] is None else float(call["correction"])
    return float(bool(call.get("unbiased", True)))


@handles("var", "std", "var_mean", "std_mean", note="centre, squares and their mean; std takes the root")
def _variance(tape: Tape, call: Operation) -> Any:
    x, dims, keepdim = _over(call)
    out = variance(tape, x, dims, keepdim, _correction(call))
    if call.name.startswith("std"):
        out = apply(tape, out, "sqrt")
    return [out, mean(tape, x, dims, keepdim)] if call.name.endswith("_mean") else out


@handles("amax", "amin", note="over all tokens natively, else a tournament of relus")
def _extreme(tape: Tape, call: Operation) -> Value:
    return largest(tape, *_over(call), 1.0 if call.name == "amax" else -1.0)


@handles("max", "min", note="of two tensors, or over one axis (without the indices) or all")
def _max(tape: Tape, call: Operation) -> Any:
    sign = 1.0 if call.name == "max" else -1.0
    if "other" in call.arguments:
        return (maximum if sign > 0 else minimum)(tape, call["self"], call["other"])
    out = largest(tape, *_over(call), sign)
    if "dim" not in call.arguments:
        return out
    return [out, Unknown(f"the indices that {call.name} returns choose by comparing data")]


@handles("prod", note="a balanced tree of products")
def _prod(tape: Tape, call: Operation) -> Value:
    return tournament(tape, *_over(call), multiply)


@handles("cumsum", note="affine over channels, mixes tokens over tokens")
def _cumsum(tape: Tape, call: Operation) -> Value:
    dim = call["dim"]
    ids = atoms(tape, call["self"]).movedim(dim, -1)
    return wrap(tape, algebra.contract(tape, ids, np.triu(np.ones((ids.shape[-1],) * 2))).movedim(-1, dim))


@handles("cumprod", note="one product after the other")
def _cumprod(tape: Tape, call: Operation) -> Value:
    return running(tape, call["self"], int(call["dim"]), multiply)


@handles("logcumsumexp", note="one softplus after the other")
def _logcumsumexp(tape: Tape, call: Operation) -> Value:
    return running(tape, call["self"], int(call["dim"]), log_add_exp)


@handles("logsumexp", note="a tournament of softplus, which never overflows")
def _logsumexp(tape: Tape, call: Operation) -> Value:
    return log_sum_exp(tape, *_over(call))


@handles("linalg_vector_norm", "norm", note="any order: sums of powers, or maxima")
def _norm(tape: Tape, call: Operation) -> Value:
    x, dims, keepdim = _over(call)
    order = call.get("ord", call.get("p"))
    order = 2.0 if order is None else float(order)
    if order == 2:
        return apply(tape, total(tape, apply(tape, x, "square"), dims, keepdim), "sqrt")
    size = apply(tape, x, "abs")
    if math.isinf(order):
        return largest(tape, size, dims, keepdim, math.copysign(1.0, order))
    if order == 1:
        return total(tape, size, dims, keepdim)
    if order == 0:
        raise Refusal("it counts the entries that are not zero, which is not continuous")
    powers = total(tape, apply(tape, size, functions.power(order)), dims, keepdim)
    return apply(tape, powers, functions.power(1 / Fraction(order)))


@handles("dist", note="the norm of a difference")
def _dist(tape: Tape, call: Operation) -> Value:
    difference = subtract(tape, call["self"], call["other"])
    return _norm(tape, Operation("norm", None, {"self": difference, "p": call.get("p")}))


@handles("_pdist_forward", note="norms of differences of pairs of rows")
def _pdist(tape: Tape, call: Operation) -> Value:
    first, second = torch.triu_indices(shape(call["self"])[0], shape(call["self"])[0], 1)
    left, right = (rearranged(tape, call["self"], lambda i, rows=rows: i[rows]) for rows in (first, second))
    difference = subtract(tape, left, right)
    return _norm(tape, Operation("norm", None, {"self": difference, "p": call.get("p", 2.0), "dim": [-1]}))


@handles("cdist", "_cdist_forward", "_euclidean_dist", note="norms of differences of rows")
def _cdist(tape: Tape, call: Operation) -> Value:
    left = rearranged(tape, call["x1"], lambda i: i.unsqueeze(-2))
    difference = subtract(tape, left, rearranged(tape, call["x2"], lambda i: i.unsqueeze(-3)))
    return _norm(tape, Operation("norm", None, {"self": difference, "p": call.get("p", 2.0), "dim": [-1]}))
