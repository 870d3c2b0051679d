"""Heads on their own: files of the families anchor, gate, product, token as networks of one operation (lemma K27)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flint import fmpq

from ...errors import CertificateError
from ..balls import NotProved
from ..file import Saved, Tensor
from ..functions import function
from ..program import Op, Program, exact, number, whole

MOST = 256  # tokens of a head: each pair of them is looked at
MOST_EDGES = 1 << 15  # of cells
FAMILIES = ("anchor", "gate", "product", "token")
SELF, MEMORY = (("self", False),), (("memory", False),)
Scopes = tuple[tuple[tuple[str, bool], ...], ...]


@dataclass(frozen=True)
class Alone:
    """A head as a network: its program, the tensors under the names of layers, and what its heads see; how far its
    program may be from the function that it is for; and whether its bound is one relative to the function's size."""

    program: Program
    tensors: dict[str, Tensor]
    scopes: Scopes
    dtype: str
    apart: float = 0.0
    relative: bool = False


def alone(saved: Saved) -> Alone:
    """The network of one operation that a head's file describes; `CertificateError` where it describes none."""
    family, config = saved.header["family"], saved.header.get("config")
    try:
        rule = {"anchor": _anchor, "gate": _gate, "product": _product, "token": _token}[family]
        return rule(config, dict(saved.tensors))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no head of the family {family!r}: {error!r}") from error


def on_cells(
    chosen: Any, ends: tuple[float, float], error: Callable[[float, float], float]
) -> tuple[float, int]:
    """The largest error on the cells of a derivation, which must cover an interval, and how many these are."""
    try:
        edges = [number(x) for x in chosen["edges"]]
    except (KeyError, TypeError, ValueError) as wrong:
        raise CertificateError(f"the derivation does not fit a head on its own: {wrong!r}") from wrong
    cells = list(itertools.pairwise(edges))
    if not 2 <= len(edges) <= MOST_EDGES or any(not a < b for a, b in cells):
        raise CertificateError("the edges of its cells are not in order, or too many")
    if edges[0] > ends[0] or edges[-1] < ends[1]:
        raise CertificateError("the cells of the derivation do not cover what the head reads")
    found = max(error(*cell) for cell in cells)
    if not math.isfinite(found):
        raise NotProved("nothing can be proved on a part of the interval")
    return found, len(cells)


def _scalar(text: str, low: Any, high: Any, tensors: dict[str, Tensor], scopes: Scopes) -> Alone:
    """A function of one number: one layer from the input to the result."""
    ops = (Op("input", (), 1), Op("apply", (0,), 1, {"function": function(text)}))
    program = Program((number(low),), (number(high),), 1, ops, 1, 1)
    return Alone(program, renamed(tensors, "layer.", 0), scopes, _dtype(tensors))


def _anchor(config: Any, tensors: dict[str, Tensor]) -> Alone:
    tensors.pop("anchors", None)  # where the anchors are is not read by anyone
    if "fast" in config or type(config["relative"]) is not bool:
        raise ValueError("it is read with one exponential")
    low, high = config["interval"]
    head = _scalar(str(config["function"]), low, high, tensors, (MEMORY,))
    return replace(head, relative=config["relative"])


def _gate(config: Any, tensors: dict[str, Tensor]) -> Alone:
    return _scalar(gate_function(config), config["lo"], config["hi"], tensors, (SELF,))


def gate_function(config: Any) -> str:
    """The function that a gate of one number is for."""
    name, given = config["name"], config["parameters"]
    if name in ("max", "min"):
        raise NotProved("the kernel has no rule for gates that read two numbers")
    if name in ("ramp", "hard_tanh"):
        a, b = (-1.0, 1.0) if name == "hard_tanh" else (number(given["a"]), number(given["b"]))
        return f"piecewise_linear({[2 * a - b, a, b, 2 * b - a]}, {[a, a, b, b]})"
    if name == "leaky_relu":
        return f"leaky_relu({number(given.get('slope', 0.01))!r})"
    if name == "piecewise_linear":
        return f"piecewise_linear({json.dumps(given['xs'])}, {json.dumps(given['ys'])})"
    return str(name)


def _product(config: Any, tensors: dict[str, Tensor]) -> Alone:
    """Two numbers in the order in which the layer sees them, or the entries of a vector and one number; a layer that
    leaves them as they are, but for a copy of that number for each entry, comes first."""
    if config["width"] is not None:
        tensors = picked(tensors, entries(config, tensors))
    count = 1 if config["width"] is None else tensors["layer.groups.0.M_V"].shape[-1]
    if type(config["swapped"]) is not bool or (config["swapped"] and config["width"] is not None):
        raise ValueError("the operands of a product of vectors are in their order")
    x, y = (config[key] for key in (("y", "x") if config["swapped"] else ("x", "y")))
    low, high = (tuple(number(side[k]) for side in (*[x] * count, y)) for k in (0, 1))
    n, dtype = count + 1, _dtype(tensors)
    sides = [[[float(i == c) for c in range(count)] for i in range(n)], [[0.0] * count] * count + [[1.0] * count]]
    still = {"bias": [0.0] * count, "off": [[[0.0] * count] * n, [0.0] * count]}
    picks = [Op("linear", (0,), count, {"weights": [side], **still}) for side in sides]
    ops = (Op("input", (), n), *picks, Op("product", (1, 2), count))
    copies = tuple(w for rows in zip(*sides, strict=True) for row in rows for w in row)
    first = {"network.layers.0.S": Tensor(dtype, (n, 2 * count), copies)}
    return Alone(Program(low, high, 1, ops, 3, 1), {**first, **_entries(tensors, count)}, ((), SELF), dtype)


#: How the tables of a product of vectors are laid out: which of their last two dimensions go by entries, and then the
#: number beside them (rows), and by entries (columns).
SIDES = {"W_Q": (True, False), "W_V": (True, True), "b_V": (False, True), "M_V": (False, True), "W_O": (True, True),
         "S": (True, True), "s": (False, True)}  # fmt: skip


def entries(config: Any, tensors: dict[str, Tensor]) -> list[int]:
    """The entries of a vector that stand for all: one of those with equal numbers each (lemma K27)."""
    count = whole(config["width"], 1)
    found: list[list[float]] = [[] for _ in range(count)]
    for name, tensor in sorted(tensors.items()):
        rows, columns = SIDES.get(name.rpartition(".")[2], (False, False))
        width = tensor.shape[-1]
        for k in range(0, len(tensor.numbers), width):
            row, i = tensor.numbers[k : k + width], k // width % tensor.shape[-2] if rows else count
            if columns and width != count:
                raise ValueError(f"{name} does not have a channel for each entry")
            if rows and i < count and any(row if not columns else (*row[:i], *row[i + 1 :])):
                raise NotProved("the kernel has no rule for products of vectors whose entries read each other")
            for c in range(count) if columns and i >= count else ():
                found[c].append(row[c])
            if rows and columns and i < count:
                found[i].append(row[i])
    first: dict[tuple[float, ...], int] = {}
    for c, numbers in enumerate(found):
        first.setdefault(tuple(numbers), c)
    if len(first) > MOST:
        raise NotProved(f"the kernel takes its time beyond vectors of {MOST} entries with numbers of their own")
    return list(first.values())


def picked(tensors: dict[str, Tensor], kept: list[int]) -> dict[str, Tensor]:
    """The tables of a product of vectors for some of its entries."""

    def part(table: Any, rows: bool, columns: bool, deep: int) -> Any:
        if deep > 1:
            return [part(one, rows, columns, deep - 1) for one in table]
        if deep == 1:
            table = [table[c] for c in (*kept, *range(count, len(table)))] if rows else table
            return [part(row, rows, columns, 0) for row in table]
        return [table[c] for c in kept] if columns else table

    count, found = tensors["layer.groups.0.M_V"].shape[-1], {}
    if len(kept) == count:
        return tensors
    for name, tensor in tensors.items():
        made = part(tensor.rows(), *SIDES.get(name.rpartition(".")[2], (False, False)), len(tensor.shape) - 1)
        found[name] = Tensor(tensor.dtype, shape_of(made), tuple(flat(made)))
    return found


def _entries(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The layer of a product with a head for every entry where that had one with so many channels of values; what read
    the number beside the entries reads the entry's copy of it (lemma K27)."""
    found, heads = {}, whole(tensors["layer.groups.0.W_Q"].shape[0], 1, MOST)
    ends = {"W_V": count, "b_V": count, "M_V": count, "S": count}
    for name, tensor in renamed(tensors, "layer.", 1).items():
        kind, given = name.rpartition(".")[2], tensor.rows()
        if tensor.shape[-1] != ends.get(kind, tensor.shape[-1]) or (kind == "W_O" and tensor.shape[1] != count):
            raise ValueError(f"{name} does not have a channel for each entry")
        if kind == "s":
            found[name] = tensor
            continue
        if kind == "S":
            columns = [_copied([[row[c]] for row in given], c, count) for c in range(count)]
            made = [[entry for one in rows for entry in one] for rows in zip(*columns, strict=True)]
        elif len(given) in (1, heads):
            one = [given[h % len(given)] for h in range(heads)]
            made = [_channel(kind, table, c, count) for c in range(count) for table in one]
        else:
            raise ValueError(f"{name} does not fit its heads")
        found[name] = Tensor(tensor.dtype, shape_of(made), tuple(flat(made)))
    return found


def _channel(kind: str, table: Any, c: int, count: int) -> Any:
    """One head's part of a table, for channel c of its values alone."""
    if kind in ("W_V", "M_V"):
        table = [[row[c]] for row in table]
    if kind in ("W_Q", "W_V"):
        table = _copied(table, c, count)
    return [table[c]] if kind in ("b_V", "W_O") else table


def _copied(rows: list[Any], c: int, count: int) -> list[Any]:
    """Rows for every entry and the last number, as rows for every entry and every copy of that: copy c is read."""
    *own, last = rows
    if len(own) != count:
        raise ValueError("a table does not have a row for each entry")
    return [*own, *([x * (i == c) for x in last] for i in range(count))]


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of nested lists."""
    return (len(x), *shape_of(x[0])) if isinstance(x, list) else ()


def flat(x: Any) -> list[float]:
    """The numbers of nested lists, row by row."""
    return [number for part in x for number in flat(part)] if isinstance(x, list) else [x]


def _token(config: Any, tensors: dict[str, Tensor]) -> Alone:
    """Tokens, beside them their positions where the head reads them; a fixed mixture of tokens, or the largest."""
    mode, n, width = config["mode"], whole(config["tokens"], 1, MOST), whole(config["channels"], 1)
    dtype, reads = _dtype(tensors), tensors["attention.W_Q"].shape[1]
    ops = [Op("input", (), width)]
    own = renamed(tensors, "attention.", 0, "groups.0.")
    if reads > width:
        eye = [[float(i == j) for j in range(n)] for i in range(n)]
        ops.append(Op("constant", (), n, {"value": eye, "off": [[[0.0] * n for _ in range(n)]]}))
        own["constants"] = Tensor(dtype, (n, n), tuple(x for row in eye for x in row))
    if mode == "min":  # min(x) = -max(-x): signs round nothing (K27)
        own = {key: _negated(key, tensor, width) for key, tensor in own.items()}
    if mode in ("max", "min"):
        ops.append(Op("max_tokens", (0,), width))
    else:
        ops.append(Op("mix", (0,), width, {"matrix": _mixture(mode, n, config["matrix"])}))
    low, high = ((number(config[key]),) * (n * width) for key in ("lo", "hi"))
    if mode == "min":
        low, high = tuple(-x for x in high), tuple(-x for x in low)
    return Alone(
        Program(low, high, n, tuple(ops), len(ops) - 1, n), own, ((("tokens", mode == "prefix_mean"),),), dtype
    )


def _negated(name: str, tensor: Tensor, width: int) -> Tensor:
    """A tensor of a head, for one that gets -x for x in its first columns, and gives minus what that one gave."""
    kind, (*_, rows, last) = name.rpartition(".")[2], tensor.shape
    mine = [i // last % rows < width for i in range(len(tensor.numbers))]
    beside = any(x != 0 for x, own in zip(tensor.numbers, mine, strict=True) if not own)
    if kind not in ("W_Q", "b_Q", "W_K", "b_K", "W_V", "W_O") or (kind == "W_V" and beside):
        raise NotProved(f"the kernel has no rule for minima whose {kind} reads more than the tokens")
    if kind not in ("W_Q", "W_K"):
        return tensor
    return replace(tensor, numbers=tuple(-x if own else x for x, own in zip(tensor.numbers, mine, strict=True)))


def _mixture(mode: str, n: int, given: Any) -> list[list[Any]]:
    """How much of each token (column) goes to each token (row), exactly."""
    if mode == "mean":
        return [[fmpq(1, n)] * n for _ in range(n)]
    if mode == "prefix_mean":
        return [[fmpq(int(j <= i), i + 1) for j in range(n)] for i in range(n)]
    if mode not in ("gather", "mix") or len(given) != n or any(len(row) != n for row in given):
        raise ValueError(f"there is no mode {mode!r} with such a matrix")
    return [[exact(number(x)) for x in row] for row in given]


def renamed(tensors: dict[str, Tensor], old: str, layer: int, new: str = "") -> dict[str, Tensor]:
    """Tensors of a head under the names of a layer of a network."""
    found = {f"network.layers.{layer}.{new}{name.removeprefix(old)}": tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors) or not all(name.startswith(old) for name in tensors):
        raise ValueError(f"it has the tensors {', '.join(sorted(tensors))}")
    return found


def _dtype(tensors: dict[str, Tensor]) -> str:
    return next(iter(tensors.values())).dtype
