"""`Program`: what is computed, as a list of operations in single static assignment over (tokens, width) arrays.

A program goes to and comes from plain JSON values and named arrays:

    header, arrays = program.to_json();  Program.from_json(header, arrays) == program

The header holds no arrays and no code: functions are written by name and read through the registry's parser. Reading
trusts nothing: anything that is not a valid program raises `ArgumentError`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..box import Box
from ..dtypes import Array
from ..errors import ArgumentError
from ..expressions.composite import named
from ..functions.univariate import Univariate
from .ops import OPS, Apply, Attention, Constant, Input, Linear, MaxTokens, Mix, Normalise, Op, Product, Softmax

Rows = Literal["all", "first"]


@dataclass(frozen=True)
class Program:
    """Operations in topological order; operation i defines value i, of shape (tokens, ops[i].width).

    `box` bounds the inputs: a point of it, flattened, is operation 0, the only `Input`, laid out as (tokens, width).
    The output reads all rows of value `output`, or only the first, reshaped to `output_shape`. `labels` names each
    operation for people: a subexpression or the name of a layer.

    >>> build = Builder(Box(x=(-1, 1), y=(0, 2)))
    >>> x, y = build.column(0), build.column(1)
    >>> print(build.program(build.apply(build.product(x, y, "x*y"), "sin", "sin(x*y)"), "sin(x*y)"))
    program of 1 token: sin(x*y)
      %0 = input : 2
      %1 = linear %0 [2x1]         # x
      %2 = linear %0 [2x1]         # y
      %3 = product %1 %2           # x*y
      %4 = apply sin %3            # sin(x*y)
      output %4
    """

    box: Box
    tokens: int
    ops: tuple[Op, ...]
    output: int
    output_shape: tuple[int, ...]
    output_rows: Rows
    source: str
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.tokens < 1 or not self.ops or not isinstance(self.ops[0], Input):
            raise ArgumentError("a program needs at least one token, and its first operation must be its input")
        if sum(isinstance(op, Input) for op in self.ops) != 1:
            raise ArgumentError("a program has one input; several tensors are flattened and concatenated")
        if self.ops[0].width * self.tokens != self.box.dim:
            raise ArgumentError(
                f"the input has {self.tokens} tokens of width {self.ops[0].width}, "
                f"but the box has {self.box.dim} entries"
            )
        if len(self.labels) != len(self.ops):
            raise ArgumentError(f"the program has {len(self.ops)} operations and {len(self.labels)} labels")
        for i, op in enumerate(self.ops):
            late = [j for j in op.inputs if not 0 <= j < i]
            if late:
                raise ArgumentError(f"operation {i} ({op.word}) reads value {late[0]}, which is not defined before it")
            problem = op.problem(self.tokens, tuple(self.ops[j].width for j in op.inputs))
            if problem:
                raise ArgumentError(f"operation {i} ({op.word}, {self.labels[i]!r}) does not fit: {problem}")
        if not 0 <= self.output < len(self.ops):
            raise ArgumentError(f"the output is value {self.output}, but there are {len(self.ops)} values")
        if self.output_rows not in ("all", "first"):
            raise ArgumentError(f"output_rows is 'all' or 'first', not {self.output_rows!r}")
        have = self.ops[self.output].width * (self.tokens if self.output_rows == "all" else 1)
        if math.prod(self.output_shape) != have:
            raise ArgumentError(f"the output has {have} entries, which do not fit its shape {self.output_shape}")

    def count(self, *kinds: type[Op]) -> int:
        """How many operations are of these kinds."""
        return sum(isinstance(op, kinds) for op in self.ops)

    def depth(self) -> int:
        """The longest chain of operations that are not affine."""
        return depths(self.ops, (Input, Constant, Linear, Mix))[self.output]

    def __str__(self) -> str:
        rows = [f"  %{i} = {_text(op)}" for i, op in enumerate(self.ops)]
        column = max(30, *(len(row) for row in rows if len(row) < 60))
        lines = [f"{row:<{column}} # {label}" if label else row for row, label in zip(rows, self.labels, strict=True)]
        rest = "" if self.output_rows == "all" else " (first row)"
        shape = f" : {'x'.join(map(str, self.output_shape))}" if self.output_shape else ""
        plural = "" if self.tokens == 1 else "s"
        head = f"program of {self.tokens} token{plural}: {self.source}"
        return "\n".join([head, *lines, f"  output %{self.output}{rest}{shape}"])

    def written(self) -> str:
        """The program with every number in it; of large arrays the shape and the SHA-256."""
        lines = [f"program of {self.tokens} token{'' if self.tokens == 1 else 's'}"]
        for i, op in enumerate(self.ops):
            given = {field.name: getattr(op, field.name) for field in fields(op)}  # type: ignore[arg-type]
            shown = [f"{name.rstrip('_')} {_number_text(value)}" for name, value in given.items() if value is not None]
            lines.append(f"  %{i} = {op.word}: {', '.join(shown)}")
        return "\n".join([*lines, f"  output %{self.output}, {self.output_rows} rows, shape {self.output_shape}"])

    def to_json(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """A header of plain JSON values and the arrays it refers to by name; `from_json` reads both back, exactly."""
        return program_to_json(self)

    @classmethod
    def from_json(cls, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> Program:
        """The program that `to_json` described; `ArgumentError` on anything else."""
        return program_from_json(header, arrays)


def depths(ops: Sequence[Op], free: tuple[type[Op], ...] = (Input, Constant, Linear)) -> list[int]:
    """For each operation the longest chain of operations up to it that are not `free`."""
    deep: list[int] = []
    for op in ops:
        deep.append(max((deep[i] for i in op.inputs), default=0) + (not isinstance(op, free)))
    return deep


def _text(op: Op) -> str:
    """One operation as text, without its index and label."""
    reads = " ".join(f"%{i}" for i in op.inputs)
    match op:
        case Input():
            return f"input : {op.width}"
        case Constant():
            value = f"{op.value[0, 0]:.10g}" if op.value.size == 1 else f"[{op.value.shape[0]}x{op.value.shape[1]}]"
            return f"constant {value}"
        case Linear():
            if op.width == 1 and all(w.size == 1 for w in op.weights):
                terms = [f"{w[0, 0]:.10g} %{i}" for i, w in zip(op.inputs, op.weights, strict=True)]
                return "linear " + " + ".join([*terms, *([f"{op.bias[0]:.10g}"] if op.bias[0] else [])])
            return f"linear {reads} [{' '.join(f'{w.shape[0]}x{w.shape[1]}' for w in op.weights)}]"
        case Mix():
            return f"mix {reads} [{op.matrix.shape[0]}x{op.matrix.shape[1]}]"
        case Apply():
            return f"apply {op.function.name} {reads}"
        case Attention():
            extra = f" scale {op.scale:.6g}{' causal' if op.causal else ''}{' masked' if op.mask is not None else ''}"
            return f"attention {reads}{extra}"
        case Normalise():
            return f"normalise {reads} eps {op.eps:.6g}{'' if op.centred else ' uncentred'}"
        case _:
            return f"{op.word} {reads}"


_MOST_SHOWN = 64  # entries of an array that are printed: enough for formulas, short enough to read


def _number_text(value: object) -> str:
    """A field of an operation in full."""
    if isinstance(value, np.ndarray):
        if value.size <= _MOST_SHOWN:
            return str(value.tolist())
        return f"{'x'.join(map(str, value.shape))} array of SHA-256 {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_number_text, value))})"
    return value.name if isinstance(value, Univariate) else str(value)


class Builder:
    """Collects operations, infers widths, and shares equal ones.

    >>> build = Builder(Box(x=(-1, 1)))
    >>> x = build.column(0)
    >>> build.apply(x, "sin") == build.apply(x, "sin")
    True
    """

    def __init__(self, box: Box, tokens: int = 1):
        if tokens < 1 or box.dim % tokens:
            raise ArgumentError(f"a box of {box.dim} entries cannot be laid out as {tokens} tokens")
        self.box, self.tokens = box, tokens
        self.ops: list[Op] = []
        self.labels: list[str] = []
        self._index: dict[Op, int] = {}
        self.input = self.add(Input(box.dim // tokens))

    def add(self, op: Op, label: str = "") -> int:
        """The index of an operation, the old one if an equal operation is there already."""
        found = self._index.get(op)
        if found is None:
            found = self._index[op] = len(self.ops)
            self.ops.append(op)
            self.labels.append(label)
        return found

    def width(self, i: int) -> int:
        return self.ops[i].width

    def constant(self, value: npt.ArrayLike, label: str = "", off: npt.ArrayLike | None = None) -> int:
        """A constant, and how far what is meant may be from it; a number or a row is repeated for every token."""
        arrays = [None if x is None else np.asarray(x, dtype=np.float64) for x in (value, off)]
        rows = [np.tile(x.reshape(1, -1), (self.tokens, 1)) if x is not None and x.ndim < 2 else x for x in arrays]
        return self.add(Constant(*rows), label)

    def column(self, j: int, label: str | None = None) -> int:
        """Column j of the input as a value of width 1; the input itself when it has only that column."""
        name = label if label is not None else (self.box.names[j] if self.box.names else f"x{j}")
        if self.width(self.input) == 1:
            self.labels[self.input] = self.labels[self.input] or name
            return self.input
        pick = np.zeros((self.width(self.input), 1))
        pick[j] = 1.0
        return self.add(Linear((self.input,), (pick,), np.zeros(1)), name)

    def linear(
        self,
        terms: Sequence[tuple[int, npt.ArrayLike]],
        bias: npt.ArrayLike,
        label: str = "",
        off: tuple[npt.ArrayLike, ...] | None = None,
    ) -> int:
        """sum of value_i @ weight_i + bias for the pairs (i, weight); `off` as `Linear` has it."""
        return self.add(Linear(tuple(i for i, _ in terms), tuple(w for _, w in terms), bias, off), label)

    def combination(self, terms: list[tuple[int, float]], bias: float = 0.0, label: str = "") -> int:
        """A linear combination of values of equal width with numbers as coefficients, plus a number."""
        width = self.width(terms[0][0])
        return self.linear([(i, c * np.eye(width)) for i, c in terms], np.full(width, bias), label)

    def mix(self, i: int, matrix: npt.ArrayLike, label: str = "") -> int:
        return self.add(Mix(i, matrix, self.width(i)), label)

    def apply(self, i: int, function: str | Univariate, label: str = "") -> int:
        return self.add(Apply(i, function, self.width(i)), label)

    def product(self, i: int, j: int, label: str = "") -> int:
        return self.add(Product(i, j, self.width(i)), label)

    def softmax(self, i: int, label: str = "") -> int:
        return self.add(Softmax(i, self.width(i)), label)

    def attention(
        self,
        query: int,
        key: int,
        value: int,
        scale: float = 1.0,
        causal: bool = False,
        mask: npt.ArrayLike | None = None,
        label: str = "",
    ) -> int:
        return self.add(Attention(query, key, value, self.width(value), scale, causal, mask), label)

    def normalise(self, i: int, eps: float = 1e-5, centred: bool = True, label: str = "") -> int:
        return self.add(Normalise(i, self.width(i), eps, centred), label)

    def max_tokens(self, i: int, label: str = "") -> int:
        return self.add(MaxTokens(i, self.width(i)), label)

    def program(
        self, output: int, source: str, output_shape: tuple[int, ...] | None = None, output_rows: Rows = "all"
    ) -> Program:
        """The program made of the operations that the output needs; a single number by default."""
        shape = output_shape
        if shape is None:
            rows = self.tokens if output_rows == "all" else 1
            shape = () if rows * self.width(output) == 1 else (rows, self.width(output))
        ops, labels, renamed = live(self.ops, self.labels, output)
        return Program(self.box, self.tokens, ops, renamed, shape, output_rows, source, labels)


def live(ops: list[Op], labels: list[str], output: int) -> tuple[tuple[Op, ...], tuple[str, ...], int]:
    """The operations that the output needs (and the input), renumbered."""
    needed = {0, output}
    for i in range(output, -1, -1):
        if i in needed:
            needed.update(ops[i].inputs)
    order = sorted(needed)
    new = {old: i for i, old in enumerate(order)}
    return tuple(ops[i].renamed(new) for i in order), tuple(labels[i] for i in order), new[output]


def rewritten(program: Program, ways: Mapping[int, Callable[[Builder, int, str], int]]) -> Program:
    """The same program with some functions written in other operations: a way gets the builder, the value that the
    function reads, and what it is called. The program itself where there are none."""
    if not ways:
        return program
    build = Builder(program.box, program.tokens)
    new: dict[int, int] = {0: build.input}
    for i, (op, label) in enumerate(zip(program.ops, program.labels, strict=True)):
        if i in ways and isinstance(op, Apply):
            new[i] = ways[i](build, new[op.input], label or op.function.name)
        elif i:
            new[i] = build.add(op.renamed(new), label)
    return build.program(new[program.output], program.source, program.output_shape, program.output_rows)


FORMAT = 1  # of program headers in files; another number is refused
_WORDS = {kind.word: kind for kind in OPS}
_Fields = Mapping[str, Any]


def program_to_json(program: Program) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header and the arrays of a program."""
    arrays: dict[str, Array] = {}
    header = {
        "format": FORMAT,
        "box": program.box.to_json(),
        "tokens": program.tokens,
        "ops": [_write(i, op, arrays) for i, op in enumerate(program.ops)],
        "output": program.output,
        "output_shape": list(program.output_shape),
        "output_rows": program.output_rows,
        "source": program.source,
        "sites": list(program.labels),
    }
    return header, arrays


def _write(i: int, op: Op, arrays: dict[str, Array]) -> dict[str, Any]:
    out: dict[str, Any] = {"op": op.word, "width": op.width}
    for field in fields(op):  # type: ignore[arg-type]
        value = getattr(op, field.name)
        if isinstance(value, np.ndarray):
            arrays[f"op{i}.{field.name}"] = value
            value = {"array": f"op{i}.{field.name}"}
        elif field.name == "off" and value is None:
            continue
        elif field.name in ("weights", "off"):
            names = [f"op{i}.{field.name}.{j}" for j in range(len(value))]
            arrays.update(zip(names, value, strict=True))
            value = [{"array": name} for name in names]
        elif isinstance(value, Univariate):
            value = _function_text(value, i)
        elif isinstance(value, tuple):
            value = list(value)
        out[field.name.rstrip("_")] = value
    return out


def _function_text(function: Univariate, i: int) -> str:
    if function.source is not None:
        raise ArgumentError(
            f"operation {i} applies {function.name}, a Python callable: it has no text form, so the program cannot be "
            f"written to a file; use a function of the registry or a formula"
        )
    return function.name


_READERS: dict[type[Op], Callable[[_Fields], Op]] = {
    Input: lambda f: Input(f["width"]),
    Constant: lambda f: Constant(f["value"], f["off"][0] if "off" in f else None),
    Linear: lambda f: Linear(tuple(f["inputs"]), tuple(f["weights"]), f["bias"], f.get("off")),
    Mix: lambda f: Mix(f["input"], f["matrix"], f["width"]),
    Apply: lambda f: Apply(f["input"], named(f["function"]), f["width"]),
    Product: lambda f: Product(f["left"], f["right"], f["width"]),
    Softmax: lambda f: Softmax(f["input"], f["width"]),
    Attention: lambda f: Attention(f["query"], f["key"], f["value"], f["width"], f["scale"], f["causal"], f["mask"]),
    Normalise: lambda f: Normalise(f["input"], f["width"], f["eps"], f["centred"]),
    MaxTokens: lambda f: MaxTokens(f["input"], f["width"]),
}


def _fetch(value: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(value, Mapping):
        return np.asarray(arrays[value["array"]], dtype=np.float64)
    return [_fetch(v, arrays) for v in value] if isinstance(value, list) else value


def program_from_json(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> Program:
    """The program of a header and its arrays."""
    try:
        if header["format"] != FORMAT:
            raise ArgumentError(f"this program has format {header['format']!r}; this version reads format {FORMAT}")
        ops = []
        for entry in header["ops"]:
            kind = _WORDS[entry["op"]]
            ops.append(_READERS[kind]({name: _fetch(value, arrays) for name, value in entry.items()}))
        return Program(
            Box.from_json(header["box"]),
            header["tokens"],
            tuple(ops),
            header["output"],
            tuple(header["output_shape"]),
            header["output_rows"],
            header["source"],
            tuple(header["sites"]),
        )
    except ArgumentError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ArgumentError(f"this is not the description of a program: {type(error).__name__}: {error}") from error
