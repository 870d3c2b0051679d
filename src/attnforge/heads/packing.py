"""Building self heads from `SelfSpec`s: a layer of its own, or many specs packed into one group of heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from ..dtypes import Array
from ..errors import ArgumentError
from ..network import AttentionLayer, Heads
from .construction import Frame, HeadBuilder, Member, Planned
from .families import builder_of
from .self_head import SelfSpec

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
