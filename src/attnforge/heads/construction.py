"""What the compiler asks of a head family when it plans and builds: a site for an operation, and its weights.

A `HeadBuilder` looks at an `Order` (an operation, the ranges of its arguments, the error it may make) and proposes a
site with the parts its weights are made of, or passes. Later it writes the weights into the `Frame` of a layer.
Self heads are built from `SelfSpec`s: a layer of its own (`self_layer`), or many packed into one group (`SelfBuilder`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dtypes import Array
from ..errors import ArgumentError
from ..functions.univariate import Univariate
from ..network import AttentionLayer, Heads
from ..programs.enclose import Range
from ..programs.ops import Op
from .families import builder_of
from .site import MARGIN, Site, Span
from .stored import Place, SelfSpec

#: Beyond a branch point errors cost their root, so that there is little room: 2^-10 and 2^-24 of the usual margin.
ROOM = {torch.float32: 2.0**-10, torch.float64: 2.0**-24}


@dataclass(frozen=True)
class Tactics:
    """Choices that suit some programs and not others; a compiler tries more than one.

    `centred`: operands of products are centred, which halves their absolute error; otherwise a product's error vanishes
    with its operand. `relative`: tables of functions that keep away from 0 are fitted for relative error. `margin`: how
    far beyond its range an argument may go, as a share of the range: room for errors of earlier layers.
    """

    centred: bool = True
    relative: bool = False
    margin: float = MARGIN


@dataclass(frozen=True)
class Order:
    """What one operation asks for: its number, its arguments' ranges, and the error it may make.

    `rooted` says that the result goes, by way of sums, under a function of great slope: an error that vanishes with
    the argument is worth more there than a small one.
    """

    number: int
    op: Op
    reads: tuple[Range, ...]
    eps: float
    dtype: torch.dtype
    tactics: Tactics
    name: str = ""
    rooted: bool = False

    def hull(self, operand: int = 0, fn: Univariate | None = None) -> Span:
        """The interval of one argument over the whole box, widened by the margin so that errors of earlier layers stay
        inside: hardly towards a singularity, and by a small part of that beyond one."""
        r = self.reads[operand]
        low, high = float(np.min(r.low)), float(np.max(r.high))
        if fn is not None:  # an enclosure may reach a little beyond the domain
            low, high = max(low, fn.domain.lo), min(high, fn.domain.hi)
        # an interval that is a point, or nearly, is widened relative to its size, and by something in any case
        wide = self.tactics.margin * max(high - low, 2.0**-9 * max(abs(low), abs(high)), 1e-30)
        below = above = wide
        if fn is not None:
            for end in (fn.domain.lo, fn.domain.hi, *fn.domain.poles):
                if not math.isfinite(end):
                    continue
                closed = (end == fn.domain.lo and fn.domain.lo_closed) or (end == fn.domain.hi and fn.domain.hi_closed)
                beyond = ROOM[self.dtype] * wide if closed else 0.0  # the function goes on as a constant
                if end <= low:
                    below = min(below, max(0.1 * (low - end), beyond))
                if end >= high:
                    above = min(above, max(0.1 * (end - high), beyond))
        return low - below, high + above


@dataclass(frozen=True)
class Planned:
    """A site and, where the site does not say it all, the parts that its weights are made of."""

    site: Site
    parts: Any = None


@dataclass
class Frame:
    """What the heads of a layer are built into: the linear skip and its bias, which they extend."""

    columns: int
    outputs: int
    dtype: torch.dtype
    skip: Array
    bias: Array

    def number(self, x: object) -> Tensor:
        """An array as a tensor of the dtype that ships."""
        return torch.from_numpy(np.ascontiguousarray(np.asarray(x, dtype=np.float64))).to(self.dtype)


@dataclass(frozen=True)
class Member:
    """One site (or one channel of it) in a group of heads that is being built, and where it goes."""

    planned: Planned
    op: Op
    place: Place


class HeadBuilder(ABC):
    """Planning and weights of one family."""

    @abstractmethod
    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        """A site for an operation, or None where the family has nothing for it; `made` is what the plan holds so far,
        whose parts may be shared."""

    @abstractmethod
    def group(self, frame: Frame, members: Sequence[Member], purpose: str) -> Heads:
        """The group of heads that its members share, weights and all; extends the frame's skip."""


def fat(interval: Span) -> Span:
    """An interval that is not a point."""
    low, high = interval
    return (low, high) if high > low else (low - 1e-9 * max(abs(low), 1e-9), high + 1e-9 * max(abs(high), 1e-9))


def embedded(own: Heads, place: Place, frame: Frame, purpose: str) -> Heads:
    """Heads over a site's own coordinates, placed among the columns of a layer. A column times 1 plus zeros: exact."""
    tables: dict[str, Tensor | None] = {
        name: getattr(own, name) for name in ("b_Q", "b_K", "b_V", "M_K", "M_V")
    }
    for name in ("W_Q", "W_K", "W_V"):
        table = getattr(own, name)
        tables[name] = table
        if table is not None:
            wide = table.new_zeros(table.shape[0], frame.columns, table.shape[2])
            used = torch.tensor(place.reads[: table.shape[1]])
            tables[name] = wide.index_add(1, used, table.detach())  # a value may be read twice, as query and as key
    output = own.W_O.new_zeros(*own.W_O.shape[:2], frame.outputs)
    output[..., list(place.writes)] = own.W_O.detach()
    given: Mapping[str, Any] = {**tables, "W_O": output}
    return Heads(own.scope, causal=own.causal, purpose=purpose, **given)


#: The tables of a packed group, in the order of `Heads`.
TABLES = ("W_Q", "b_Q", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")


def self_layer(spec: SelfSpec, dtype: torch.dtype, purpose: str = "") -> AttentionLayer:
    """The attention layer with these numbers; biases and skips that are zero throughout are left out."""
    given = {f.name: torch.as_tensor(getattr(spec, f.name)).to(dtype) for f in fields(spec)}
    always = ("W_Q", "b_K", "W_V", "M_K", "M_V", "W_O")
    kept = {name: t for name, t in given.items() if name in always or bool((t != 0).any())}
    skip, bias = kept.pop("S", None), kept.pop("s", None)
    heads = Heads("self", W_Q=kept.pop("W_Q"), W_O=kept.pop("W_O"), purpose=purpose, causal=False, **kept)
    return AttentionLayer([heads], S=skip, s=bias)


def pack(placed: Sequence[tuple[SelfSpec, Sequence[int], Sequence[int]]], channels: int, outputs: int) -> SelfSpec:
    """Several specs of one kind as one: each with the input channels it reads and the output channels it writes."""
    kinds = {spec.kind for spec, _, _ in placed}
    if len(kinds) != 1:
        raise ArgumentError(f"only specs of one kind share a group of heads; got kinds {sorted(kinds)}")

    def wide(array: Array, axis: int, index: Sequence[int], size: int) -> Array:
        shape = list(array.shape)
        shape[axis] = size
        out = np.zeros(shape)
        np.add.at(np.moveaxis(out, axis, 0), list(index), np.moveaxis(array, axis, 0))  # adds into the view
        return out

    parts: dict[str, list[Array]] = {f.name: [] for f in fields(SelfSpec)}
    for spec, inputs, targets in placed:
        for name in ("b_Q", "b_K", "b_V", "M_K", "M_V"):
            parts[name].append(getattr(spec, name))
        for name in ("W_Q", "W_V"):
            parts[name].append(wide(getattr(spec, name), 1, inputs, channels))
        parts["W_O"].append(wide(spec.W_O, 2, targets, outputs))
        parts["S"].append(wide(wide(spec.S, 0, inputs, channels), 1, targets, outputs))
        parts["s"].append(wide(spec.s, 0, targets, outputs))
    joined = {n: np.sum(arrays, 0) if n in ("S", "s") else np.concatenate(arrays) for n, arrays in parts.items()}
    return SelfSpec(**joined)


class SelfBuilder(HeadBuilder):
    """A family whose heads are a `SelfSpec`: members of one kind share a group, whichever family they belong to."""

    @abstractmethod
    def spec(self, planned: Planned) -> SelfSpec:
        """The heads of one channel, over its operands."""

    def group(self, frame: Frame, members: Sequence[Member], purpose: str) -> Heads:
        placed = []
        for member in members:
            builder = builder_of(member.planned.site.family)
            assert isinstance(builder, SelfBuilder)
            placed.append((builder.spec(member.planned), member.place.reads, member.place.writes))
        packed = pack(placed, frame.columns, frame.outputs)
        frame.skip += packed.S
        frame.bias += packed.s
        numbers: dict[str, Any] = {name: frame.number(getattr(packed, name)) for name in TABLES}
        return Heads("self", purpose=purpose, **numbers)
