"""From a plan to weights: forms become columns of W_Q, W_K and W_V, and what later layers read is carried on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...dtypes import Array, dtype_name
from ...errors import PrecisionError
from ...network import AttentionLayer, AttentionOnly, Heads
from ..language import tokens
from .facts import Facts
from .layout import Feature, LayerRoles, ProgramLayout, first_columns
from .plan import FeatureForm, HeadPlan, PlannedHead

#: Numbers of one table: 64 MB of float32, and half a minute of proof; a vocabulary of 4,000 that is put out as it is.
NUMBERS = 1 << 24


def assemble(plan: HeadPlan, facts: Facts, dtype: torch.dtype) -> tuple[ProgramLayout, AttentionOnly]:
    """The layout of a plan, and its network."""
    count = max([plan.layer, *(head.layer + 1 for head in plan.heads)])
    written = {f: head.layer + 1 for head in plan.heads for f, _ in head.writes}
    last: dict[Feature, int] = {}
    for head in plan.heads:
        for form in (*head.query, *head.key, *head.value):
            last.update({f: max(last.get(f, 0), head.layer) for f in form.terms})
    for form in plan.readout:
        last.update(dict.fromkeys(form.terms, count))
    first = first_columns(facts)
    known = {*first, *written}
    positions = tuple(sorted(f for f in last if f not in known))
    before = (*first, *positions)
    state, layers, modules = before, [], []
    for d in range(count):
        after = tuple(f for f in (*before, *sorted(written)) if written.get(f, 0) <= d + 1 <= last.get(f, 0))
        heads = [head for head in plan.heads if head.layer == d]
        _refuse_large(facts, state, max([len(after), *(len(head.query) for head in heads)]))
        modules.append(_layer(state, heads, after, dtype))
        layers.append(LayerRoles(tuple(head.seat for head in heads), after))
        state = after
    _refuse_large(facts, state, len(plan.readout))
    S, s = _affine(plan.readout, state)
    names = ", ".join(output.label for output in facts.outputs)
    modules.append(AttentionLayer([], S=_finite(S, dtype, f"the read-out of {names}"), s=_finite(s, dtype, names)))
    return ProgramLayout(positions, tuple(layers)), AttentionOnly(modules)


def _refuse_large(facts: Facts, state: Sequence[Feature], columns: int) -> None:
    """Raise where a table over the columns of a state is too large, and name the op that has most of them."""
    if len(state) * columns > NUMBERS:
        most, count = Counter(feature.op for feature in state).most_common(1)[0]
        node = facts.sop(most) if most >= 0 else tokens
        raise node.fail(
            f"stands in {count} columns, and a table over them would have {len(state)} by {columns} numbers, where the "
            f"limit is {NUMBERS}; choose a smaller vocabulary or max_length"
        )


def _layer(
    state: Sequence[Feature], heads: Sequence[PlannedHead], after: Sequence[Feature], dtype: torch.dtype
) -> AttentionLayer:
    S = np.array([[float(here == there) for there in after] for here in state])
    return AttentionLayer(
        [_heads(state, head, after, dtype) for head in heads], S=_tensor(S, dtype) if S.any() or not heads else None
    )


def _heads(state: Sequence[Feature], head: PlannedHead, after: Sequence[Feature], dtype: torch.dtype) -> Heads:
    tables: dict[str, Array] = {}
    for name, forms in (("Q", head.query), ("K", head.key), ("V", head.value)):
        if forms:
            W, b = _affine(forms, state)
            tables |= {f"W_{name}": W} if W.any() or name == "Q" else {}
            tables |= {f"b_{name}": b} if b.any() or f"W_{name}" not in tables else {}
    if len(head.slot_keys):
        tables |= {"M_K": head.slot_keys, "M_V": head.slot_values}
    out = np.zeros((len(head.writes), len(after)))
    for i, (feature, by) in enumerate(head.writes):
        if feature in after:
            out[i, after.index(feature)] = by
    tables["W_O"] = out
    scope = "memory" if head.seat.kind == "map" else "tokens"
    given = {name: _finite(table, dtype, f"'{head.label}'")[None] for name, table in tables.items()}
    return Heads(scope, causal=head.seat.causal, purpose=head.label, **given)  # type: ignore[arg-type]


def _affine(forms: Sequence[FeatureForm], state: Sequence[Feature]) -> tuple[Array, Array]:
    """The matrix and the constants of forms over columns."""
    W, at = np.zeros((len(state), len(forms))), {feature: i for i, feature in enumerate(state)}
    for j, form in enumerate(forms):
        for feature, c in form.terms.items():
            W[at[feature], j] = c
    return W, np.array([form.constant for form in forms])


def _finite(x: Array, dtype: torch.dtype, what: str) -> Tensor:
    found = _tensor(x, dtype)
    if not bool(torch.isfinite(found).all()):
        raise PrecisionError(f"{what} has numbers that are too large for {dtype_name(dtype)}")
    return found


def _tensor(x: Array, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
