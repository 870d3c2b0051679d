"""From the layers of a network in tier `memory` to heads over one residual stream.

The state of the source before a layer is an affine function of the residual stream: Z = X A, with the flag column for
constants. A layer's heads read X (A W_Q) and so on, so that affine maps and linear skips fold into the weights of
whoever reads them, and write fresh columns; the state after it is X (A S + what was written).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from ..heads.token_bounds import DEAD
from ..ir.ops import Array
from ..network import AttentionLayer, Heads, Scope
from .plain_columns import FLAG, Columns, exclusion, lay_columns, needs_positions
from .plain_source import Source

SLACK = 1.1  # sizes are estimates with this much room; the certificate proves them
WEIGHTS = 1.001  # computed weights add up to at most this, and so do the roundings of what they average


@dataclass(frozen=True, eq=False)
class HeadTables:
    """One head over the residual stream, in float64, before padding and scaling: tables are (column, coordinate).

    The last `hiding` coordinates of query and key are the exclusion. `logit` bounds |content|. `place` is the
    source's layer, group and head.
    """

    purpose: str
    scope: Scope
    place: tuple[int, int, int]
    slots: int
    query: Array
    key: Array
    value: Array
    output: Array
    hiding: int
    omega: float
    logit: float

    @property
    def width(self) -> int:
        """The head dimension that it needs."""
        return max(self.key.shape[1], self.value.shape[1])


@dataclass(eq=False)
class PlainLayout:
    """All heads, source layer by source layer, the columns' names, and what the read-out reads."""

    source: Source
    columns: Columns
    causal: bool
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    layers: list[list[HeadTables]] = field(default_factory=list)
    states: list[Array] = field(default_factory=list)  # A before every layer of the source, and at the end
    sizes: list[Array] = field(default_factory=list)  # (token, column): of the columns known so far
    fresh: list[dict[int, int]] = field(default_factory=list)  # for each layer: state column -> residual column
    convex: list[Array] = field(default_factory=list)  # (token, fresh column): what its values alone say of its size

    @property
    def width(self) -> int:
        """How many columns of the residual stream are used."""
        return len(self.names)


def lay_plain(source: Source, causal: bool, dtype: torch.dtype) -> PlainLayout:
    """Place the heads of all layers."""
    groups = [group for layer in source.layers for group in layer.heads()]
    n, slots = source.tokens, max((group.slots for group in groups), default=0)
    ordered = any(needs_positions(group.scope, n, group.causal and not causal) for group in groups)
    inputs = source.lead_names if source.lead is not None else source.inputs
    constants = None if source.constants is None else _double(source.constants)
    columns = lay_columns(slots + 1, n, inputs, constants, source.constant_names, ordered)
    layout = PlainLayout(source, columns, causal, dtype, list(columns.names))
    state = np.zeros((columns.first, len(source.columns)))
    state[[*columns.inputs, *columns.constants], range(len(source.columns))] = 1.0
    layout.states.append(state)
    layout.sizes.append(_first_sizes(source, columns, constants))
    for number, layer in enumerate(source.layers):
        _place(layout, number, layer)
    return layout


def _double(x: torch.Tensor) -> Array:
    found: Array = x.detach().cpu().double().numpy()
    return found


def _first_sizes(source: Source, columns: Columns, constants: Array | None) -> Array:
    size = np.zeros((source.tokens, columns.first))
    size[:, FLAG] = 1.0
    for token, place in enumerate(columns.positions):
        size[token, place] = 1.0
    given = np.maximum(np.abs(source.low), np.abs(source.high))
    if source.lead is not None:
        assert source.lead.S is not None
        bias = 0.0 if source.lead.s is None else np.abs(_double(source.lead.s))
        given = (given @ np.abs(_double(source.lead.S)) + bias) * WEIGHTS
    size[:, list(columns.inputs)] = given
    if constants is not None:
        size[:, list(columns.constants)] = np.abs(constants)
    return size


def _place(layout: PlainLayout, number: int, layer: AttentionLayer) -> None:
    """Add the heads of one layer, their columns, and the state after it."""
    state, size, names = layout.states[-1], layout.sizes[-1], layout.source.names[number]
    outputs = np.stack([np.abs(_double(g.W_O)).sum((0, 1)) for g in layer.heads()]) if layer.heads() else None
    written = [] if outputs is None else [int(c) for c in np.flatnonzero(outputs.any(0))]
    fresh = {c: layout.width + i for i, c in enumerate(written)}
    skip = np.zeros((state.shape[1], len(names))) if layer.S is None else _double(layer.S)
    after = np.zeros((layout.width + len(fresh), len(names)))
    after[: len(state)] = state @ skip
    if layer.s is not None:
        after[FLAG] += _double(layer.s)
    bare = [not column.any() for column in after.T]
    for c, place in fresh.items():
        after[place, c] = 1.0
        layout.names.append(names[c] if bare[c] else f"{names[c]}, less its linear part")
    heads = [
        head
        for g, group in enumerate(layer.heads())
        for head in _heads(layout, group, (number, g), state, size, fresh, names)
    ]
    layout.convex.append(_written(heads, size, layout.columns, len(fresh)))
    grown = np.concatenate([size, layout.convex[-1]], 1)
    known = layout.source.sizes[number] if layout.source.sizes else None
    if known is not None:
        room = known[:, written].max(initial=0.0) * (SLACK - 1)  # a unit that is never alive still errs
        for c, place in fresh.items():
            grown[:, place] = np.fmin(grown[:, place], known[:, c] + room)
    layout.layers.append(heads)
    layout.fresh.append(fresh)
    layout.states.append(after)
    layout.sizes.append(grown)


def _heads(
    layout: PlainLayout,
    group: Heads,
    place: tuple[int, int],
    state: Array,
    size: Array,
    fresh: dict[int, int],
    names: tuple[str, ...],
) -> list[HeadTables]:
    columns, kinds = layout.columns, layout.source.kinds[place[0]]
    hidden = group.causal and not layout.causal
    hide_query, hide_key = exclusion(columns, group.scope, group.slots, hidden)
    tables = {name: _double(t) for name, t in group.named_parameters()}
    registers = [columns.ids[r] for r in range(1, group.slots + 1)]
    found = []
    for h in range(group.heads):
        own = {name: t[h if len(t) > 1 else 0] for name, t in tables.items()}
        k, v = own["W_Q"].shape[1], own["W_O"].shape[0]
        query, key, value = (np.zeros((len(state), w)) for w in (k, k, v))
        for table, weight, bias in ((query, "W_Q", "b_Q"), (key, "W_K", "b_K"), (value, "W_V", "b_V")):
            if weight in own:
                table += state @ own[weight]
            if bias in own:
                table[FLAG] += own[bias]
        if registers:
            key[registers], value[registers] = own["M_K"], own["M_V"]
        output = np.zeros((v, layout.width))
        targets = np.flatnonzero(own["W_O"].any(0))
        output[:, [fresh[int(c)] for c in targets]] = own["W_O"][:, targets]
        logit = _logit(query, key, size, registers)
        omega = 2.0 ** math.ceil(math.log2(2 * SLACK * logit + DEAD[layout.dtype] + 4.0))
        about = _purpose(group, [names[int(c)] for c in targets], {kinds[int(c)] for c in targets} - {""})
        hide = [np.concatenate([x, np.zeros((len(state) - len(x), x.shape[1]))]) for x in (hide_query, hide_key)]
        found.append(
            HeadTables(
                about, group.scope, (*place, h), group.slots,
                np.concatenate([query, omega * hide[0]], 1), np.concatenate([key, hide[1]], 1),
                value, output, hide_query.shape[1], omega, logit,
            )
        )  # fmt: skip
    return found


def _purpose(group: Heads, targets: list[str], kinds: set[str]) -> str:
    kind = ", ".join(sorted(kinds)) or group.purpose or group.scope
    shown = ", ".join(targets[:4]) + (", ..." if len(targets) > 4 else "")
    return f"{kind}: {shown}"


def _logit(query: Array, key: Array, size: Array, registers: list[int]) -> float:
    """A bound of |content| for all tokens as queries, and tokens and registers as keys."""
    q = size @ np.abs(query[: size.shape[1]])
    k = np.concatenate([size @ np.abs(key[: size.shape[1]]), np.abs(key[registers])])
    return float((q @ k.T).max(initial=0.0))


def _written(heads: list[HeadTables], size: Array, columns: Columns, count: int) -> Array:
    """Bounds of the fresh columns: every head's result lies among its values."""
    first = size.shape[1]
    total = np.zeros((len(size), count))
    for head in heads:
        tokens = size @ np.abs(head.value)
        own = tokens.max(0, keepdims=True) if head.scope == "tokens" else tokens
        memory = np.abs(head.value[list(columns.ids)]).max(0, keepdims=True)
        total += np.maximum(own, memory) @ np.abs(head.output[:, first:]) * WEIGHTS
    return total
