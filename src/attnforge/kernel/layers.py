"""The layers of a network as they are stored: tables of heads, linear skips, constants, with shapes that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flint import arb

from ..errors import CertificateError
from .balls import size
from .derivation import Place
from .file import Tensor
from .program import Column, Program, exact

TABLES = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")
# how many dimensions a table has, heads first
RANKS = {"W_Q": 3, "b_Q": 2, "W_K": 3, "b_K": 2, "W_V": 3, "b_V": 2, "M_K": 3, "M_V": 3, "W_O": 3}
Errors = list[list[arb]]  # token, column


@dataclass(frozen=True)
class Group:
    """A group of heads as stored: tables by name, as nested lists."""

    scope: str
    causal: bool
    heads: int
    tables: dict[str, Any]

    def table(self, name: str, head: int) -> Any:
        """One head's part of a table, which heads may share; None where the group has no such table."""
        found = self.tables.get(name)
        return None if found is None else found[head if len(found) > 1 else 0]


@dataclass(frozen=True)
class Layer:
    """A layer as stored: columns before and after it, groups of heads, and the linear skip by columns."""

    before: tuple[Column, ...]
    after: tuple[Column, ...]
    groups: tuple[Group, ...]
    skip: list[list[float]]  # row for each column before
    bias: list[float]
    places: tuple[Place, ...]


def constants_of(program: Program, tensor: Tensor | None) -> Errors:
    """How far the stored constants beside the input are from those that the program means."""
    wanted: list[list[tuple[float, float]]] = [[] for _ in range(program.tokens)]
    for op in program.ops:
        if op.word == "constant":
            for row, more, off in zip(wanted, op.extra["value"], op.extra["off"][0], strict=True):
                row.extend(zip(more, off, strict=True))
    if tensor is None:
        if wanted[0]:
            raise CertificateError("the file has no constants, but its program does")
        return [[] for _ in wanted]
    if tensor.shape != (program.tokens, len(wanted[0])):
        raise CertificateError(f"the constants have the shape {tensor.shape}, which is not that of the program's")
    return [
        [size(arb(abs(exact(a) - exact(b)) + exact(off))) for a, (b, off) in zip(*rows, strict=True)]
        for rows in zip(tensor.rows(), wanted, strict=True)
    ]


def layer_of(
    left: dict[str, Tensor], number: int, before: tuple[Column, ...], after: tuple[Column, ...],
    scopes: tuple[tuple[str, bool], ...], places: tuple[Place, ...],
) -> Layer:  # fmt: skip
    """A layer's tensors, taken out of those that are left, with shapes that fit: nothing is broadcast."""
    prefix, columns, outputs = f"network.layers.{number}.", len(before), len(after)
    if len(set(before)) != columns or len(set(after)) != outputs:
        raise CertificateError("a state of the derivation names a column twice")
    groups = []
    for g, (scope, causal) in enumerate(scopes):
        own = f"{prefix}groups.{g}."
        found = {name: left.pop(own + name) for name in TABLES if own + name in left}
        groups.append(_group(found, scope, causal, columns, outputs))
    skip, bias = left.pop(prefix + "S", None), left.pop(prefix + "s", None)
    if (skip is not None and skip.shape != (columns, outputs)) or (bias is not None and bias.shape != (outputs,)):
        raise CertificateError(f"the skip of layer {number} does not have the shape ({columns}, {outputs})")
    return Layer(
        before, after, tuple(groups), skip.rows() if skip else [[0.0] * outputs for _ in before],
        list(bias.numbers) if bias else [0.0] * outputs, places,
    )  # fmt: skip


def _group(found: dict[str, Tensor], scope: str, causal: bool, columns: int, outputs: int) -> Group:
    if "W_Q" not in found or "W_O" not in found or any(len(t.shape) != RANKS[name] for name, t in found.items()):
        raise CertificateError("a group of heads lacks queries or outputs, or a table has another number of dimensions")
    heads, _, width = found["W_Q"].shape
    slots = found["M_K"].shape[1] if "M_K" in found else 0
    reads = found["W_O"].shape[1]
    wanted = {
        "W_Q": (columns, width), "b_Q": (width,), "W_K": (columns, width), "b_K": (width,), "W_V": (columns, reads),
        "b_V": (reads,), "M_K": (slots, width), "M_V": (slots, reads), "W_O": (reads, outputs),
    }  # fmt: skip
    for name, tensor in found.items():
        if tensor.shape[0] not in (1, heads) or tensor.shape[1:] != wanted[name] or not heads:
            raise CertificateError(f"{name} has the shape {tensor.shape}, which does not fit its group of heads")
    if ("M_K" in found) != ("M_V" in found) or (scope == "memory") != (
        not any(name in found for name in ("W_K", "b_K", "W_V", "b_V"))
    ):
        raise CertificateError(f"the tables {sorted(found)} are not those of heads of the scope {scope!r}")
    return Group(scope, causal, heads, {name: tensor.rows() for name, tensor in found.items()})
