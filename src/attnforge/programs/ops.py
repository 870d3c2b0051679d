"""The operations of a `Program`, each a frozen value.

Every operation makes one array of shape (tokens, width) out of the arrays that `inputs` names by their index. Arrays
inside operations are read-only float64 copies; two operations are equal when all their fields are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..arguments import flag, is_whole, number
from ..dtypes import Array
from ..errors import ArgumentError
from ..functions.registry import get

#: How far, relatively, a number of a `Mix` or an `Attention` may be from the one that is meant: 8 roundings of float64.
#: Powers of two and 0 are meant as they stand.
MEANT = 2.0**-50


def meant_within(numbers: Array) -> Array:
    """How far what is meant by numbers of a `Mix` or an `Attention` may be from them; hidden entries of a mask are.

    >>> (meant_within(np.array([0.5, -2.0, 0.0, -np.inf, 3.0])) / MEANT).tolist()
    [0.0, 0.0, 0.0, 0.0, 3.0]
    """
    simple = (np.abs(np.frexp(numbers)[0]) == 0.5) | (numbers == 0) | ~np.isfinite(numbers)
    return np.where(simple, 0.0, MEANT * np.where(simple, 0.0, np.abs(numbers)))


class Op:
    """What all operations share; `word` is how the operation is called in text and in files."""

    word: ClassVar[str] = ""
    #: The fields that hold indices of values, in order.
    operands: ClassVar[tuple[str, ...]] = ()

    width: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """The indices of the values that the operation reads."""
        return tuple(getattr(self, name) for name in self.operands)

    def problem(self, tokens: int, widths: tuple[int, ...]) -> str | None:
        """What is wrong with the operation in a program of `tokens` tokens, given the widths of its inputs."""
        wrong = [w for w in widths if w != self.width]
        return f"its width is {self.width}, but it reads a value of width {wrong[0]}" if wrong else None

    def renamed(self, new: Mapping[int, int]) -> Op:
        """The same operation with its inputs renumbered."""
        other = copy.copy(self)
        other._set(**{name: new[getattr(self, name)] for name in self.operands})
        return other

    def identity(self) -> tuple[object, ...]:
        """Everything that determines the operation, hashable."""
        return (self.word, *(_hashable(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return self.identity() == other.identity() if isinstance(other, Op) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity())

    def __post_init__(self) -> None:
        if not is_whole(self.width, 1):
            raise ArgumentError(f"the width of {self.word} must be a whole number >= 1, got {self.width!r}")

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, eq=False)
class Input(Op):
    """The point of the box, laid out as (tokens, width)."""

    word = "input"
    width: int


@dataclass(frozen=True, eq=False)
class Constant(Op):
    """A fixed array of shape (tokens, width); `off` bounds how far the numbers that are meant may be from it."""

    word = "constant"
    value: Any
    off: Any = None
    width: int = field(init=False)

    def __post_init__(self) -> None:
        array = frozen(self.value, "the value of a constant", 2)
        self._set(value=array, width=array.shape[1])
        if self.off is not None:
            self._set(off=distances((self.off,), (array,), "constant"))

    @property
    def slack(self) -> Array:
        """`off` as an array, also where it is nothing."""
        return np.zeros_like(self.value) if self.off is None else self.off[0]

    def problem(self, tokens: int, widths: tuple[int, ...]) -> str | None:
        rows = self.value.shape[0]
        return None if rows == tokens else f"it has {rows} rows in a program of {tokens} tokens"


@dataclass(frozen=True, eq=False)
class Linear(Op):
    """sum_i value_i @ weights_i + bias, the same for each token.

    `off` bounds, entry by entry, how far the numbers that are meant (0.1, pi) may be from the weights and the bias:
    an array for each weight, and one for the bias. None where they are meant as they stand.
    """

    word = "linear"
    inputs_: tuple[int, ...]
    weights: Any
    bias: Any
    off: Any = None
    width: int = field(init=False)

    def __post_init__(self) -> None:
        offset = frozen(self.bias, "the bias of linear", 1)
        matrices = tuple(frozen(w, "a weight of linear", 2) for w in self.weights)
        if not self.inputs_ or len(self.inputs_) != len(matrices):
            raise ArgumentError(
                f"linear has {len(self.inputs_)} inputs and {len(matrices)} weights; it needs one for each"
            )
        wrong = [w.shape for w in matrices if w.shape[1] != len(offset)]
        if wrong:
            raise ArgumentError(f"linear has a bias of length {len(offset)} and a weight of shape {wrong[0]}")
        self._set(inputs_=tuple(self.inputs_), weights=matrices, bias=offset, width=len(offset))
        if self.off is not None:
            self._set(off=distances(self.off, (*matrices, offset), "linear"))

    @property
    def slack(self) -> tuple[Array, ...]:
        """`off` as arrays, also where it is nothing."""
        return tuple(np.zeros_like(x) for x in (*self.weights, self.bias)) if self.off is None else self.off

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.inputs_

    def renamed(self, new: Mapping[int, int]) -> Linear:
        return Linear(tuple(new[i] for i in self.inputs_), self.weights, self.bias, self.off)

    def problem(self, tokens: int, widths: tuple[int, ...]) -> str | None:
        rows = tuple(w.shape[0] for w in self.weights)
        return None if rows == widths else f"its weights read widths {rows}, but its inputs have widths {widths}"


@dataclass(frozen=True, eq=False)
class Mix(Op):
    """A fixed mixing of tokens, the same for each channel: matrix @ value; entries are meant to `MEANT`."""

    word = "mix"
    operands = ("input",)
    input: int
    matrix: Any
    width: int

    def __post_init__(self) -> None:
        self._set(matrix=frozen(self.matrix, "the matrix of mix", 2))
        super().__post_init__()

    def problem(self, tokens: int, widths: tuple[int, ...]) -> str | None:
        if self.matrix.shape != (tokens, tokens):
            return f"its matrix has shape {self.matrix.shape} in a program of {tokens} tokens"
        return super().problem(tokens, widths)


@dataclass(frozen=True, eq=False)
class Apply(Op):
    """A univariate function, entry by entry."""

    word = "apply"
    operands = ("input",)
    input: int
    function: Any
    width: int

    def __post_init__(self) -> None:
        self._set(function=get(self.function))
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class Product(Op):
    """The product of two values, entry by entry."""

    word = "product"
    operands = ("left", "right")
    left: int
    right: int
    width: int


@dataclass(frozen=True, eq=False)
class Softmax(Op):
    """Softmax over the channels of each token."""

    word = "softmax"
    operands = ("input",)
    input: int
    width: int


@dataclass(frozen=True, eq=False)
class Attention(Op):
    """One attention head over tokens: softmax(scale query key^T + mask) value.

    `mask` is added to the logits; it has shape (tokens, tokens) and may hold -inf, but every row must be able to see
    some token. Scale and mask are meant to `MEANT`.
    """

    word = "attention"
    operands = ("query", "key", "value")
    query: int
    key: int
    value: int
    width: int
    scale: float = 1.0
    causal: bool = False
    mask: Any = None

    def __post_init__(self) -> None:
        flag("causal", self.causal)
        if self.mask is not None:
            self._set(mask=frozen(self.mask, "the mask of attention", 2, hidden=True))
        self._set(scale=number("the scale of attention", self.scale))
        super().__post_init__()

    def logit_mask(self, tokens: int) -> Array:
        """What is added to the logits, the causal rule included."""
        total = np.zeros((tokens, tokens)) if self.mask is None else self.mask.copy()
        if self.causal:
            total[np.triu_indices(tokens, 1)] = -np.inf
        return total

    def problem(self, tokens: int, widths: tuple[int, ...]) -> str | None:
        if self.mask is not None and self.mask.shape != (tokens, tokens):
            return f"its mask has shape {self.mask.shape} in a program of {tokens} tokens"
        if widths[0] != widths[1]:
            return f"its queries have width {widths[0]} and its keys {widths[1]}"
        blind = np.flatnonzero(np.isneginf(self.logit_mask(tokens)).all(1))
        if len(blind):
            return f"its mask hides every token from token {blind[0]}"
        return super().problem(tokens, widths[2:])


@dataclass(frozen=True, eq=False)
class Normalise(Op):
    """Layer norm over the channels of each token, without an affine part; RMS norm when not `centred`."""

    word = "normalise"
    operands = ("input",)
    input: int
    width: int
    eps: float = 1e-5
    centred: bool = True

    def __post_init__(self) -> None:
        flag("centred", self.centred)
        self._set(eps=number("the eps of normalise", self.eps))
        if self.eps < 0:
            raise ArgumentError(f"the eps of normalise must not be negative, got {self.eps!r}")
        super().__post_init__()

    @property
    def centring(self) -> tuple[Array, float]:
        """The centring matrix, exact in binary, and the eps that goes with it: both scaled by the width unless that is
        a power of two; where rows are not centred, the identity and eps.

        Scaling eps may round it, by 2^-53 of itself; the error rule of norms counts that.
        """
        if not self.centred:
            return np.eye(self.width), self.eps
        scale = 1.0 if self.width & (self.width - 1) == 0 else float(self.width)
        return scale * np.eye(self.width) - scale / self.width, scale * scale * self.eps


@dataclass(frozen=True, eq=False)
class MaxTokens(Op):
    """The largest entry over the tokens, for each channel, given to every token."""

    word = "max_tokens"
    operands = ("input",)
    input: int
    width: int


#: Every operation there is: each interpreter has an entry for each of them.
OPS: tuple[type[Op], ...] = (
    Input, Constant, Linear, Mix, Apply, Product, Softmax, Attention, Normalise, MaxTokens,
)  # fmt: skip


def frozen(value: npt.ArrayLike, what: str, ndim: int, hidden: bool = False) -> Array:
    """A read-only float64 copy, finite (but for -inf where `hidden`)."""
    try:
        array = np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what} must be an array of numbers, got {type(value).__name__}") from error
    if array.ndim != ndim or array.size == 0:
        raise ArgumentError(f"{what} must have {ndim} dimensions and not be empty, got shape {array.shape}")
    if not (np.isfinite(array) | (np.isneginf(array) if hidden else False)).all():
        raise ArgumentError(f"{what} must be finite{' or -inf' if hidden else ''}")
    array.setflags(write=False)
    return array


def distances(given: Any, of: tuple[Array, ...], what: str) -> tuple[Array, ...] | None:
    """Arrays of distances, one for each array of numbers; None when there are none."""
    found = tuple(frozen(x, f"a distance of {what}", y.ndim) for x, y in zip(given, of, strict=True))
    if any(x.shape != y.shape or (x < 0).any() for x, y in zip(found, of, strict=True)):
        raise ArgumentError(f"the distances of {what} must be non-negative and of the shapes of its numbers")
    return found if any(x.any() for x in found) else None


def _hashable(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes())
    return tuple(_hashable(v) for v in value) if isinstance(value, tuple) else value
