"""Heads on their own: files of the families anchor, gate, product, token as networks of one operation (lemma K27)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from flint import fmpq

from ...errors import CertificateError
from ..balls import NotProved
from ..file import Saved, Tensor
from ..functions import function
from ..program import Op, Program, exact, number, whole

MOST = 256  # tokens of a head: each pair of them is looked at
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


def _scalar(text: str, low: Any, high: Any, tensors: dict[str, Tensor], scopes: Scopes) -> Alone:
    """A function of one number: one layer from the input to the result."""
    ops = (Op("input", (), 1), Op("apply", (0,), 1, {"function": function(text)}))
    program = Program((number(low),), (number(high),), 1, ops, 1, 1)
    return Alone(program, _renamed(tensors, "layer.", 0), scopes, _dtype(tensors))


def _anchor(config: Any, tensors: dict[str, Tensor]) -> Alone:
    tensors.pop("anchors", None)  # where the anchors are is not read by anyone
    if "fast" in config or type(config["relative"]) is not bool:
        raise NotProved("the kernel has no rule for heads read by one exponential")
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
    """Two numbers, in the order in which the layer sees them; a layer that leaves them as they are comes first."""
    if config["width"] not in (None, 1):
        raise NotProved("the kernel has no rule for products of vectors on their own")
    sides = [config[key] for key in (("y", "x") if config["swapped"] is True else ("x", "y"))]
    picks = [
        {"weights": [[[float(i == c)] for i in range(2)]], "bias": [0.0], "off": [[[0.0]] * 2, [0.0]]} for c in (0, 1)
    ]
    ops = (Op("input", (), 2), *(Op("linear", (0,), 1, pick) for pick in picks), Op("product", (1, 2), 1))
    low, high = (tuple(number(side[n]) for side in sides) for n in (0, 1))
    dtype = _dtype(tensors)
    renamed = {"network.layers.0.S": Tensor(dtype, (2, 2), (1.0, 0.0, 0.0, 1.0)), **_renamed(tensors, "layer.", 1)}
    return Alone(Program(low, high, 1, ops, 3, 1), renamed, ((), SELF), dtype)


def _token(config: Any, tensors: dict[str, Tensor]) -> Alone:
    """Tokens, beside them their positions where the head reads them; a fixed mixture of tokens, or the largest."""
    mode, n, width = config["mode"], whole(config["tokens"], 1, MOST), whole(config["channels"], 1)
    dtype, reads = _dtype(tensors), tensors["attention.W_Q"].shape[1]
    ops = [Op("input", (), width)]
    renamed = _renamed(tensors, "attention.", 0, "groups.0.")
    if reads > width:
        eye = [[float(i == j) for j in range(n)] for i in range(n)]
        ops.append(Op("constant", (), n, {"value": eye, "off": [[[0.0] * n for _ in range(n)]]}))
        renamed["constants"] = Tensor(dtype, (n, n), tuple(x for row in eye for x in row))
    if mode == "min":  # min(x) = -max(-x): signs round nothing (K27)
        renamed = {key: _negated(key, tensor, width) for key, tensor in renamed.items()}
    if mode in ("max", "min"):
        ops.append(Op("max_tokens", (0,), width))
    else:
        ops.append(Op("mix", (0,), width, {"matrix": _mixture(mode, n, config["matrix"])}))
    low, high = ((number(config[key]),) * (n * width) for key in ("lo", "hi"))
    if mode == "min":
        low, high = tuple(-x for x in high), tuple(-x for x in low)
    return Alone(
        Program(low, high, n, tuple(ops), len(ops) - 1, n), renamed, ((("tokens", mode == "prefix_mean"),),), dtype
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


def _renamed(tensors: dict[str, Tensor], old: str, layer: int, new: str = "") -> dict[str, Tensor]:
    found = {f"network.layers.{layer}.{new}{name.removeprefix(old)}": tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors) or not all(name.startswith(old) for name in tensors):
        raise ValueError(f"it has the tensors {', '.join(sorted(tensors))}")
    return found


def _dtype(tensors: dict[str, Tensor]) -> str:
    return next(iter(tensors.values())).dtype
