"""Arithmetic on values of any kind: constants, atoms, and what attention is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ir.univariate import Univariate
from . import algebra, attention
from .atoms import Tape
from .attention import Scores, Weighted, Weights
from .values import SYMBOLS, Atoms, Value, atoms, moved, wrap

Number = Tensor | float


def as_value(argument: Any) -> Value:
    """A number as a constant; values as they are."""
    if isinstance(argument, (bool, int, float)):
        return torch.tensor(float(argument), dtype=torch.float64)
    return argument


def rescale(tape: Tape, x: Value, scale: Number, bias: Number = 0.0) -> Value:
    """scale * x + bias with constants."""
    if isinstance(x, Tensor):
        return x * scale + bias
    a, b = (torch.as_tensor(c, dtype=torch.float64) for c in (scale, bias))
    if isinstance(x, Scores) and bool((a != 0).all()):
        size = torch.broadcast_shapes(x.codes.shape, a.shape, b.shape)
        grown = torch.where(torch.isinf(x.bias), x.bias, x.bias * a) + b
        return replace(x, codes=x.codes.expand(size), scale=(x.scale * a).expand(size), bias=grown.expand(size))
    return wrap(tape, algebra.affine(tape, atoms(tape, x), a, b))


def add(tape: Tape, x: Value, y: Value, alpha: float = 1.0) -> Value:
    """x + alpha y."""
    if isinstance(y, Tensor):
        return rescale(tape, x, 1.0, alpha * y.double())
    if isinstance(x, Tensor):
        return rescale(tape, y, alpha, x.double())
    return wrap(tape, algebra.combine(tape, atoms(tape, x), atoms(tape, y), alpha))


def subtract(tape: Tape, x: Value, y: Value) -> Value:
    return add(tape, x, y, -1.0)


def multiply(tape: Tape, x: Value, y: Value) -> Value:
    """x y, entry by entry."""
    if isinstance(y, Tensor):
        return rescale(tape, x, y)
    if isinstance(x, Tensor):
        return rescale(tape, y, x)
    for weights, other in ((x, y), (y, x)):
        if isinstance(weights, Weights) and isinstance(other, Atoms):
            codes, ids = torch.broadcast_tensors(weights.codes, other.ids)
            return Weighted(replace(weights, codes=codes), ids)
    return wrap(tape, algebra.multiply(tape, atoms(tape, x), atoms(tape, y)))


def divide(tape: Tape, x: Value, y: Value) -> Value:
    """x / y: by the reciprocal."""
    if isinstance(y, Tensor):
        return rescale(tape, x, 1.0 / y.double())
    return multiply(tape, x, apply(tape, y, "reciprocal"))


def apply(tape: Tape, x: Value, function: str | Univariate) -> Value:
    """A function of each entry."""
    return wrap(tape, algebra.apply(tape, atoms(tape, x), function))


def maximum(tape: Tape, x: Value, y: Value) -> Value:
    """max(x, y) = y + relu(x - y)."""
    if isinstance(x, Tensor):
        x, y = y, x
    return add(tape, apply(tape, subtract(tape, x, y), "relu"), y)


def minimum(tape: Tape, x: Value, y: Value) -> Value:
    """min(x, y) = y - relu(y - x)."""
    if isinstance(x, Tensor):
        x, y = y, x
    return subtract(tape, y, apply(tape, subtract(tape, y, x), "relu"))


def log_add_exp(tape: Tape, x: Value, y: Value) -> Value:
    """log(exp x + exp y) = y + softplus(x - y): no exponential ever overflows."""
    if isinstance(x, Tensor):
        x, y = y, x
    return add(tape, apply(tape, subtract(tape, x, y), "softplus"), y)


def matmul(tape: Tape, x: Value, y: Value) -> Value:
    """Matrix products of x (G, M, K) and y (G, K, N), one of them at least data."""
    if isinstance(y, Tensor):
        return _times_constant(tape, x, y)
    if isinstance(x, Tensor):
        return transposed(tape, _times_constant(tape, transposed(tape, y), x.mT))
    if isinstance(y, Weights) and not isinstance(x, Weights):
        return transposed(tape, matmul(tape, transposed(tape, y), transposed(tape, x)))
    if isinstance(x, Weights) and isinstance(y, Atoms):
        out = attention.attend(tape, x, y.ids)
        if out is not None:
            return wrap(tape, out)
    left, right = atoms(tape, x), atoms(tape, y)
    if attention.are_scores(tape, left, right):
        return attention.scores(tape, left, right)
    return _products(tape, left, right)


def _products(tape: Tape, left: Tensor, right: Tensor) -> Value:
    products = algebra.multiply(tape, left[:, :, None, :], right.mT[:, None, :, :])
    return wrap(tape, algebra.contract(tape, products, np.ones((left.shape[-1], 1))).squeeze(-1))


def _times_constant(tape: Tape, x: Value, y: Tensor) -> Value:
    """x (G, M, K) times a constant (G, K, N): the batches that share a matrix are done together."""
    ids = atoms(tape, x)
    out = torch.zeros((*ids.shape[:2], y.shape[2]), dtype=torch.int64)
    groups: dict[bytes, list[int]] = {}
    for g, matrix in enumerate(y.double().contiguous().numpy()):
        groups.setdefault(matrix.tobytes(), []).append(g)
    for members in groups.values():
        out[members] = algebra.contract(tape, ids[members], y[members[0]].double().numpy())
    return wrap(tape, out)


def transposed(tape: Tape, x: Value) -> Value:
    """x with its last two axes exchanged."""
    return rearranged(tape, x, lambda ids: ids.mT)


def rearranged(tape: Tape, x: Value, move: Any) -> Value:
    """A movement of data, given as a function of one tensor."""
    if not isinstance(x, SYMBOLS):
        return move(x)
    return moved(tape, [x], lambda change: move(change(x)))
