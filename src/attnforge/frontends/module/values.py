"""What a node of the target's graph stands for while the target is captured, how such values are moved about, and
arithmetic on values of any kind: constants, atoms, and what attention is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...functions.directed import U
from ...functions.univariate import Univariate
from . import atoms as algebra
from . import attention
from .atoms import Refusal, Tape
from .attention import Scores, Weighted, Weights


@dataclass(frozen=True)
class Atoms:
    """A tensor that depends on data: one atom for each entry."""

    ids: Tensor


@dataclass(frozen=True)
class Unknown:
    """What an operation that cannot be captured would have returned."""

    why: str = ""


#: A plain tensor is a constant, always float64 where it is not of integers or truth values.
Symbol: TypeAlias = Atoms | Scores | Weights | Weighted
Value: TypeAlias = Tensor | Symbol | Unknown
SYMBOLS = (Atoms, Scores, Weights, Weighted)


def shape(value: Value) -> torch.Size:
    match value:
        case Tensor():
            return value.shape
        case Atoms():
            return value.ids.shape
        case Scores() | Weights():
            return value.codes.shape
        case Weighted():
            return value.ids.shape
    raise AssertionError(f"{value} has no shape")


def atoms(tape: Tape, value: object) -> Tensor:
    """The atoms of any value; what was only remembered is computed now."""
    match value:
        case Atoms():
            return value.ids
        case Scores():
            return attention.numbers(tape, value)
        case Weights():
            return attention.entries(tape, value)
        case Weighted():
            return attention.product(tape, value)
        case Tensor():
            if value.is_complex():
                raise Refusal("it uses complex numbers")
            return tape.lift(value)
        case bool() | int() | float():
            return tape.lift(torch.tensor(float(value), dtype=torch.float64))
        case complex():
            raise Refusal("it uses complex numbers")
    raise AssertionError(f"{value!r} is not a value")


def wrap(tape: Tape, ids: Tensor) -> Value:
    """Atoms as a value; a constant where none of them depends on data."""
    settled = tape.settled(ids)
    return Atoms(ids) if settled is None else settled


def is_data(argument: object) -> bool:
    """Whether an argument is a value that depends on data."""
    return isinstance(argument, (*SYMBOLS, Unknown))


def leaves(argument: object) -> Iterator[Any]:
    """The values and numbers inside an argument."""
    if isinstance(argument, (list, tuple)):
        for item in argument:
            yield from leaves(item)
    elif isinstance(argument, dict):
        yield from leaves(list(argument.values()))
    else:
        yield argument


def substitute(argument: Any, change: Callable[[Any], Any]) -> Any:
    """The argument with every leaf changed."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(substitute(item, change) for item in argument)
    return change(argument)


Move: TypeAlias = Callable[[Callable[[Any], Any]], Any]


def moved(tape: Tape, contents: list[Any], move: Move) -> Any:
    """What a movement of data does to values.

    `contents` are the values (and numbers) that are moved; move(change) performs the movement on change(value)
    instead, a tensor of integers or floats, and returns one tensor or several.
    """
    kinds = {type(c) for c in contents if isinstance(c, SYMBOLS)}
    fixed = [c for c in contents if not isinstance(c, SYMBOLS)]
    if kinds == {Scores}:
        return _move_scores(tape, contents, move)
    if kinds == {Weights} and all(_is_zero(c) for c in fixed):
        return _move_weights(tape, contents, move)
    if kinds == {Weighted} and len(contents) == 1:
        only = contents[0]
        codes, ids = move(lambda _: only.weights.codes), move(lambda _: only.ids)
        return _zipped(lambda c, i: Weighted(replace(only.weights, codes=c), i), codes, ids)
    return _zipped(lambda ids: wrap(tape, ids), move(lambda value: _plain(atoms(tape, value), value)))


def _plain(ids: Tensor, value: object) -> Tensor | int:
    """Numbers must stay numbers: an operator that takes a scalar takes no tensor in its place."""
    return int(ids) if isinstance(value, (bool, int, float)) else ids


def _is_zero(value: object) -> bool:
    return bool((value == 0).all()) if isinstance(value, Tensor) else value == 0


def _move_scores(tape: Tape, contents: list[Any], move: Move) -> Any:
    pairs, start = _merged(tape, {id(c): c.pairs for c in contents if isinstance(c, Scores)})

    def part(name: str) -> Callable[[Any], Any]:
        def change(value: Any) -> Any:
            if isinstance(value, Scores):
                return value.codes + start[id(value)] if name == "codes" else getattr(value, name)
            if isinstance(value, Tensor):
                number = value.double() if name == "bias" else torch.zeros_like(value, dtype=torch.float64)
                return number if name != "codes" else number.long()
            return value if name == "bias" else 0

        return change

    columns = [move(part(name)) for name in ("codes", "scale", "bias")]
    return _zipped(lambda c, s, b: Scores(pairs, c, s, b), *columns)


def _move_weights(tape: Tape, contents: list[Any], move: Move) -> Any:
    heads, start = _merged(tape, {id(c): c.heads for c in contents if isinstance(c, Weights)})

    def change(value: Any) -> Any:
        if isinstance(value, Weights):
            return torch.where(value.codes > 0, value.codes + start[id(value)], 0)
        return torch.zeros_like(value, dtype=torch.int64) if isinstance(value, Tensor) else 0

    return _zipped(lambda codes: Weights(heads, codes), move(change))


def _merged(tape: Tape, tables: dict[int, tuple[Any, ...]]) -> tuple[tuple[Any, ...], dict[int, int]]:
    """Tables put one behind the other, and by how much the codes of each of them grow."""
    starts: dict[int, int] = {}
    whole: tuple[Any, ...] = ()
    for key, table in tables.items():
        starts[key] = len(whole) * (tape.tokens + 1) ** 2 * (tape.batch + 1)
        whole = whole + table
    return whole, starts


def _zipped(make: Callable[..., Any], *results: Any) -> Any:
    """make(...) of each result of a movement that has several, or of the only one."""
    if isinstance(results[0], (list, tuple)):
        return [make(*parts) for parts in zip(*results, strict=True)]
    return make(*results)


Amount = Tensor | float


def as_value(argument: Any) -> Value:
    """A number as a constant; values as they are."""
    if isinstance(argument, (bool, int, float)):
        return torch.tensor(float(argument), dtype=torch.float64)
    return argument


def rescale(tape: Tape, x: Value, scale: Amount, bias: Amount = 0.0) -> Value:
    """scale * x + bias with constants."""
    if isinstance(x, Tensor):
        parts = torch.broadcast_tensors(*(torch.as_tensor(c, dtype=torch.float64) for c in (x, scale, bias)))
        result = parts[0] * parts[1] + parts[2]
        off = tape.product_off(*(part.numpy() for part in parts))
        return torch.where(result.isfinite(), torch.from_numpy(tape.doubt(result.numpy(), off)), result)
    a, b = (torch.as_tensor(c, dtype=torch.float64) for c in (scale, bias))
    if isinstance(x, Scores) and bool((a != 0).all()):
        size = torch.broadcast_shapes(x.codes.shape, a.shape, b.shape)
        old, factor, mask, more = (part.expand(size).numpy() for part in (x.scale, a, x.bias, b))
        masked = ~(np.isfinite(mask) & np.isfinite(more))
        hidden = (torch.where(x.bias.isinf(), x.bias, x.bias * a) + b).expand(size).numpy()
        mask, more = (np.where(masked, 0.0, part) for part in (mask, more))
        known = tape.doubt(mask * factor + more, tape.product_off(mask, factor, more))
        product = tape.doubt(old * factor, tape.product_off(old, factor, np.zeros(size)))
        grown = torch.from_numpy(np.where(masked, hidden, known))
        return replace(x, codes=x.codes.expand(size), scale=torch.from_numpy(product), bias=grown)
    return wrap(tape, algebra.affine(tape, atoms(tape, x), a, b))


def _scaled(tape: Tape, constant: Tensor, scale: float) -> Tensor:
    """scale * constant, what that rounds being charged."""
    product = rescale(tape, constant.double(), scale)
    assert isinstance(product, Tensor), "a constant times a number is one"
    return product


def add(tape: Tape, x: Value, y: Value, alpha: float = 1.0) -> Value:
    """x + alpha y."""
    if isinstance(y, Tensor):
        return rescale(tape, x, 1.0, _scaled(tape, y, alpha))
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
        below, inverse = y.double().numpy(), (1.0 / y.double()).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            simple = np.abs(np.frexp(below)[0]) == 0.5
            off = np.abs(inverse) * (tape.off(below) / (np.abs(below) - tape.off(below)) + np.where(simple, 0.0, 2 * U))
        if (tape.off(below) >= np.abs(below))[below != 0].any():
            raise Refusal("it divides by a constant that was rounded, and that may be 0")
        known = np.isfinite(inverse) & np.isfinite(off) & (off >= 0)
        return rescale(tape, x, torch.from_numpy(tape.doubt(inverse, np.where(known, off, 0.0))))
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
