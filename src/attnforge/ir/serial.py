"""Programs to and from plain JSON values and named arrays.

    header, arrays = program.to_json();  Program.from_json(header, arrays) == program

The header holds no arrays and no code: functions are written by name and read through the registry's parser. Reading
trusts nothing: anything that is not a valid program raises `ArgumentError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ..box import Box
from ..errors import ArgumentError
from .functions import parse
from .ops import (
    OPS,
    Apply,
    Array,
    Attention,
    Constant,
    Input,
    Linear,
    MaxTokens,
    Mix,
    Normalise,
    Op,
    Product,
    Softmax,
)
from .program import Program
from .univariate import Univariate

FORMAT = 1
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
        "sites": list(program.sites),
    }
    return header, arrays


def _write(i: int, op: Op, arrays: dict[str, Array]) -> dict[str, Any]:
    out: dict[str, Any] = {"op": op.word}
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, np.ndarray):
            arrays[f"op{i}.{field.name}"] = value
            value = {"array": f"op{i}.{field.name}"}
        elif field.name == "weights":
            names = [f"op{i}.weights.{j}" for j in range(len(value))]
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
    Constant: lambda f: Constant(f["value"]),
    Linear: lambda f: Linear(tuple(f["inputs"]), tuple(f["weights"]), f["bias"]),
    Mix: lambda f: Mix(f["input"], f["matrix"], f["width"]),
    Apply: lambda f: Apply(f["input"], parse(f["function"]), f["width"]),
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
