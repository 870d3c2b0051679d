"""The state that enters the first layer: one-hot tokens, the flag of tokens, and what is known of positions."""

from __future__ import annotations

import numpy as np

from ...dtypes import Array
from ..language import Indices, tokens
from .facts import Facts, Ids
from .layout import Feature


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
