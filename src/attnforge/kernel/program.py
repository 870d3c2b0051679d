"""What a network should compute: the program of a file, read strictly, and its values as exact affine forms of atoms.

Atoms are what the state of a network carries: the input, constants, and the results of heads. Every other value is an
affine function of atoms, with rational weights: sums and products of the program's own numbers, nothing rounded. Where
a number of the program stands for another (0.7, pi), `off` says how far the two may be apart; forms carry that along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from flint import fmpq

from ..errors import CertificateError
from .functions import Function, function

MOST = 1 << 20  # numbers in the arrays of a program, and entries of its values: work is bounded for every file
Column = tuple[int, int]  # (value, channel)
Matrix = list[list[float]]
_FIELDS = {  # which fields of an operation are indices of values, and which others it has
    "input": ((), ()), "constant": ((), ("value",)), "linear": ((), ("inputs", "weights", "bias")),
    "apply": (("input",), ("function",)), "product": (("left", "right"), ()),
    "mix": (("input",), ("matrix",)), "softmax": (("input",), ()), "max_tokens": (("input",), ()),
    "attention": (("query", "key", "value"), ("scale", "causal", "mask")),
    "normalise": (("input",), ("eps", "centred")),
}  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One operation: a word, the values it reads, its width, and what else it has."""

    word: str
    inputs: tuple[int, ...]
    width: int
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_atom(self) -> bool:
        """Whether the result is carried by the state as it is."""
        return self.word != "linear"

    @property
    def function(self) -> Function:
        """What an `apply` applies."""
        found = self.extra["function"]
        assert isinstance(found, Function)
        return found


@dataclass(frozen=True)
class Form:
    """The sum of weight * column over atoms' columns, plus a bias; and how far the numbers that are meant may be."""

    weights: dict[Column, fmpq]
    bias: fmpq
    off: dict[Column, fmpq] = field(default_factory=dict)
    off_bias: fmpq = field(default_factory=fmpq)


@dataclass(frozen=True)
class Program:
    """Operations in order; operation i defines value i, of shape (tokens, width)."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    tokens: int
    ops: tuple[Op, ...]
    output: int
    rows: int  # how many of the output's tokens are read

    def forms(self) -> list[list[Form]]:
        """A form for each channel of each value."""
        found: list[list[Form]] = []
        for i, op in enumerate(self.ops):
            if op.is_atom:
                found.append([Form({(i, c): fmpq(1)}, fmpq(0)) for c in range(op.width)])
                continue
            found.append([self._folded(op, c, found) for c in range(op.width)])
        return found

    def _folded(self, op: Op, c: int, found: list[list[Form]]) -> Form:
        """(f +- s)(w +- r) = f w +- (|f| r + s |w| + s r), summed over what the operation reads (lemma K10)."""
        weights: dict[Column, fmpq] = {}
        off: dict[Column, fmpq] = {}
        bias, off_bias = exact(op.extra["bias"][c]), exact(op.extra["off"][-1][c])
        for j, matrix, slack in zip(op.inputs, op.extra["weights"], op.extra["off"], strict=False):
            for k, inner in enumerate(found[j]):
                factor, spare = exact(matrix[k][c]), exact(slack[k][c])
                if factor == 0 and spare == 0:
                    continue
                bias += inner.bias * factor
                off_bias += abs(factor) * inner.off_bias + spare * (abs(inner.bias) + inner.off_bias)
                for column, weight in inner.weights.items():
                    r = inner.off.get(column, fmpq(0))
                    weights[column] = weights.get(column, fmpq(0)) + weight * factor
                    off[column] = off.get(column, fmpq(0)) + abs(factor) * r + spare * (abs(weight) + r)
        kept = {column: w for column, w in weights.items() if w != 0 or off[column] != 0}
        return Form(kept, bias, {column: r for column, r in off.items() if r != 0}, off_bias)


def exact(x: float) -> fmpq:
    """A float as the rational number it is."""
    return fmpq(*x.as_integer_ratio())


def read(config: dict[str, Any]) -> Program:
    """The program of a file's configuration; `CertificateError` on anything that is not one."""
    try:
        return _read(config["program"], config["arrays"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CertificateError(f"the file holds no program that can be read: {error!r}") from error


def _read(header: dict[str, Any], arrays: dict[str, Any]) -> Program:
    if not isinstance(arrays, dict):
        raise ValueError("its arrays are not named")
    if header["format"] != 1:
        raise ValueError(f"its format is {header['format']!r}, not 1")
    tokens = whole(header["tokens"], 1)
    ops: list[Op] = []
    for i, entry in enumerate(header["ops"]):
        ops.append(_op(i, entry, arrays, tokens, ops))
    if not ops or [op.word for op in ops].count("input") != 1 or ops[0].word != "input":
        raise ValueError("its first operation, and no other, must be the input")
    low, high = ends(header["box"])
    if len(low) != tokens * ops[0].width:
        raise ValueError(f"its box has {len(low)} entries, its input {tokens * ops[0].width}")
    output = whole(header["output"], 0)
    if output >= len(ops) or header["output_rows"] not in ("all", "first"):
        raise ValueError("its output is not one of its values")
    rows = tokens if header["output_rows"] == "all" else 1
    if math.prod(header["output_shape"]) != rows * ops[output].width:
        raise ValueError("its output does not have its shape")
    if sum(op.width for op in ops) * tokens > MOST:
        raise ValueError("it has too many values")
    return Program(low, high, tokens, tuple(ops), output, rows)


def _op(i: int, entry: dict[str, Any], arrays: dict[str, Any], tokens: int, before: list[Op]) -> Op:
    word, width = entry["op"], whole(entry["width"], 1)
    operands, others = _FIELDS[word]
    if set(entry) - {"op", "width"} - ({"off"} if word in ("linear", "constant") else set()) != {*operands, *others}:
        raise ValueError(f"operation {i} ({word}) has the fields {sorted(entry)}")
    inputs = tuple(whole(entry[name], 0) for name in operands)
    extra: dict[str, Any] = {}
    widths = [width]
    if word == "linear":
        inputs = tuple(whole(j, 0) for j in entry["inputs"])
        rows = [before[j].width for j in inputs if j < i]
        if len(rows) != len(inputs) or not inputs or len(entry["weights"]) != len(inputs):
            raise ValueError(f"operation {i} does not have a weight for each of its inputs")
        extra["weights"] = [
            _array(arrays, given, (n, width)) for n, given in zip(rows, entry["weights"], strict=True)
        ]
        extra["bias"] = _array(arrays, entry["bias"], (width,))
        extra["off"] = _distances(arrays, entry, [*((n, width) for n in rows), (width,)])
        widths = rows
    elif word == "constant":
        extra["value"] = _array(arrays, entry["value"], (tokens, width))
        extra["off"] = _distances(arrays, entry, [(tokens, width)])
    elif word == "apply":
        extra["function"] = function(str(entry["function"]))
    elif word == "mix":
        extra["matrix"] = _array(arrays, entry["matrix"], (tokens, tokens))
    elif word == "attention":
        mask = entry["mask"]
        table = [[0.0] * tokens for _ in range(tokens)] if mask is None else _array(arrays, mask, (tokens,) * 2, True)
        causal, scale = entry["causal"], number(entry["scale"])
        if type(causal) is not bool:
            raise ValueError("causal is true or false")
        extra["scale"] = scale
        extra["mask"] = [
            [-math.inf if causal and s > t else x for s, x in enumerate(row)] for t, row in enumerate(table)
        ]
        if any(all(x == -math.inf for x in row) for row in extra["mask"]):
            raise ValueError(f"operation {i} hides every token from one of them")
    elif word == "normalise":
        extra["eps"], extra["centred"] = number(entry["eps"]), entry["centred"]
        if extra["eps"] < 0 or type(extra["centred"]) is not bool:
            raise ValueError(f"operation {i} is no norm")
    if any(j >= i for j in inputs):
        raise ValueError(f"operation {i} reads a value that is not defined before it")
    read = [before[j].width for j in inputs]
    if word == "attention":
        if read[0] != read[1] or read[2] != width:
            raise ValueError(f"the widths of operation {i} do not fit")
    elif (read != [width] * len(inputs) and word != "linear") or (word == "linear" and read != widths):
        raise ValueError(f"the widths of operation {i} do not fit")
    return Op(word, inputs, width, extra)


def whole(x: Any, least: int, most: int = MOST) -> int:
    """A whole number out of a file."""
    if type(x) is not int or not least <= x <= most:
        raise ValueError(f"{x!r} is not a whole number from {least} to {most}")
    return x


def number(x: Any) -> float:
    """A finite number out of a file."""
    if type(x) not in (int, float) or not math.isfinite(x):
        raise ValueError(f"{x!r} is not a finite number")
    return float(x)


def _array(arrays: dict[str, Any], given: Any, shape: tuple[int, ...], hidden: bool = False) -> Any:
    return _listed(arrays[given["array"]], shape, hidden)


def _distances(arrays: dict[str, Any], entry: dict[str, Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """How far the numbers that are meant may be from those of an operation, array by array; nowhere, where unsaid."""
    if "off" not in entry:
        return [_zeros(shape) for shape in shapes]
    found = [_array(arrays, given, shape) for given, shape in zip(entry["off"], shapes, strict=True)]
    if any(x < 0 for array in found for x in _flat(array)):
        raise ValueError("a distance is negative")
    return found


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0.0


def _listed(value: Any, shape: tuple[int, ...], hidden: bool) -> Any:
    if not shape:
        return -math.inf if hidden and value == "-inf" else number(value)
    if not isinstance(value, list) or len(value) != shape[0]:
        raise ValueError(f"an array does not have the shape {shape}")
    return [_listed(entry, shape[1:], hidden) for entry in value]


def ends(data: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    low, high = (tuple(number(x) for x in _flat(data[key])) for key in ("lower", "upper"))
    if len(low) != len(high) or any(a > b for a, b in zip(low, high, strict=True)):
        raise ValueError("its box is not one")
    return low, high


def _flat(value: Any) -> list[Any]:
    return [x for entry in value for x in _flat(entry)] if isinstance(value, list) else [value]
