"""Which column of the state carries what, and what each head is for: plain data that a file holds.

A column stands for one `Feature` of an op at its own position: whether the op has a certain value, the value itself as
a number, its square; or whether there is a token at all (padding has none). The proof takes these words as a claim and
finds out from the stored weights how far each column can be from what it stands for. `first_columns` are those of the
state that enters the first layer, `ideal` is what a column should hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arguments import whole
from ...dtypes import Array
from ...errors import ArgumentError
from ..language import Indices, tokens
from .facts import Facts, Ids

KINDS = ("is", "number", "clean", "square", "real")
HEADS = ("map", "aggregate", "count")
MOST = 1 << 16  # layers, heads, columns of a file: as many as an op may have values


@dataclass(frozen=True, order=True)
class Feature:
    """What a column stands for: `op` is the number of an op in the normal form, `value` that of one of its values.

    "is" is 1 where the op has the value and 0 elsewhere; "number" and "square" are its value and the square of it;
    "clean" is "number" again, written by a head that has taken errors away; "real" is 1 on tokens and 0 on padding.
    """

    kind: str
    op: int = -1
    value: int = -1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"a feature is one of {', '.join(KINDS)}, not {self.kind!r}")


@dataclass(frozen=True)
class HeadRole:
    """One head: a "map" of what stands at its own position, an "aggregate", or a "count"; `op` is what it computes."""

    kind: str
    op: int
    causal: bool = False

    def __post_init__(self) -> None:
        if self.kind not in HEADS:
            raise ArgumentError(f"a head is one of {', '.join(HEADS)}, not {self.kind!r}")


@dataclass(frozen=True)
class LayerRoles:
    """The heads of a layer, and the columns after it."""

    heads: tuple[HeadRole, ...]
    after: tuple[Feature, ...]


@dataclass(frozen=True)
class ProgramLayout:
    """The position columns beside the one-hot tokens and the flag of tokens, and the layers."""

    positions: tuple[Feature, ...]
    layers: tuple[LayerRoles, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON that `from_json` turns back into an equal layout."""
        return {
            "positions": [_listed(f) for f in self.positions],
            "layers": [
                {"heads": [[h.kind, h.op, h.causal] for h in layer.heads], "after": [_listed(f) for f in layer.after]}
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProgramLayout:
        """The layout that `to_json` wrote; `ArgumentError` on anything else."""
        layers = []
        for layer in data["layers"]:
            heads = tuple(
                HeadRole(str(kind), whole("op", op, 0, MOST), bool(causal)) for kind, op, causal in layer["heads"]
            )
            layers.append(LayerRoles(heads, tuple(map(_feature, layer["after"]))))
        return cls(tuple(map(_feature, data["positions"])), tuple(layers))


def _listed(feature: Feature) -> list[Any]:
    return [feature.kind, feature.op, feature.value]


def _feature(data: Any) -> Feature:
    kind, op, value = data
    return Feature(str(kind), whole("op + 1", op + 1, 0, MOST) - 1, whole("value + 1", value + 1, 0, MOST) - 1)


def first_columns(facts: Facts) -> tuple[Feature, ...]:
    """The columns of a sequence itself: one for each token of the vocabulary, in order, and the flag."""
    op = facts.at.get(tokens, -1)
    return (*(Feature("is", op, v) for v in range(len(facts.domain.vocabulary))), Feature("real"))


def ideal(facts: Facts, feature: Feature, ids: Ids) -> Array:
    """What a column should hold where its op has these values (by number), up to `inexact`."""
    if feature.kind == "real":
        return np.ones(len(ids))
    if feature.kind == "is":
        return (ids == feature.value).astype(np.float64)
    numbers = facts.numbers(facts.sop(feature.op))[ids]
    return numbers * numbers if feature.kind == "square" else numbers


def inexact(facts: Facts, feature: Feature) -> float:
    """How far `ideal` can be from what a column stands for: numbers are exact there, and float64 here."""
    if feature.kind in ("is", "real"):
        return 0.0
    node = facts.sop(feature.op)
    off, most = facts.rounded(node), max(abs(float(end)) for end in facts.span(node))
    if feature.kind != "square":
        return off
    whole = off == 0 and most < 2.0**26 and all(isinstance(v, int) for v in facts.values(node))
    return 0.0 if whole else (2 * off + 2.0**-52 * most) * (most + off) * (1 + 2.0**-40) + 2.0**-1074


def position_table(facts: Facts, positions: tuple[Feature, ...]) -> Array:
    """The position columns, (position, column): features of the indices."""
    at = np.arange(facts.domain.max_length)
    columns = []
    for feature in positions:
        assert isinstance(facts.order[feature.op], Indices)
        columns.append(ideal(facts, feature, at))
    return np.stack(columns, 1) if columns else np.zeros((len(at), 0))
