"""From the layers of a network in tier `memory` to heads over one residual stream.

The state of the source before a layer is an affine function of the residual stream: Z = X A, with the flag column for
constants. A layer's heads read X (A W_Q) and so on, so that affine maps and linear skips fold into the weights of
whoever reads them, and write fresh columns; the state after it is X (A S + what was written).

How wide the stream and how many blocks: heads of one source layer are dealt to one block, or to several.

`torch.nn.MultiheadAttention` has head dimension = stream / heads, so a block of head dimension d holds stream / d
heads. A head's dimension is a power of 4, which makes the scale 1/sqrt(d) a power of two. Heads of a layer that do not
fit into one block go to the next: they read columns of earlier layers only. The stream is the one that makes a pass
cheapest: projections cost the square of the stream for every row, scores and means the stream for every pair of rows,
and the softmax something for every head, padding included, and pair of rows. Few heads get wide ones, many share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...dtypes import Array
from ...errors import ArgumentError
from ...heads.token.bound import DEAD
from ...network import AttentionLayer, Heads, Scope
from .source import Source
from .spec import FLAG, Columns, exclusion, lay_columns, needs_positions

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


LIMIT = 2048  # registers and tokens together, and channels
WIDE = 64  # the stream may grow to a multiple of this, so that few heads can be wide
SOFTMAX = 20  # operations that an entry of a softmax is worth


@dataclass(frozen=True, eq=False)
class Packed:
    """One block: its head dimension, its heads, and the source layer they come from."""

    width: int
    heads: tuple[HeadTables, ...]
    layer: int


def power_of_four(width: int) -> int:
    """The smallest power of 4 that holds so many coordinates.

    >>> [power_of_four(n) for n in (1, 4, 5, 17)]
    [1, 4, 16, 64]
    """
    found = 1
    while found < width:
        found *= 4
    return found


def pack(layout: PlainLayout, limit: int = LIMIT) -> tuple[int, list[Packed]]:
    """The width of the stream, and the blocks; `ArgumentError` when that is too large."""
    needs = [[power_of_four(head.width) for head in heads] for heads in layout.layers]
    unit = max((w for layer in needs for w in layer), default=1)
    least = -(-max(layout.width, 1) // unit) * unit
    rows = layout.columns.registers + layout.columns.tokens
    if rows > limit or least > limit:
        raise ArgumentError(
            f"too large for a plain transformer: it would take {layout.columns.registers} registers, "
            f"{layout.columns.tokens} token(s) and {least} channels; the limit is {limit} rows and {limit} channels. "
            "Ask for a larger eps (fewer anchors and heads), or export a part of the function"
        )
    wide = -(-least // WIDE) * WIDE
    most = min(max([least, wide, *(sum(layer) for layer in needs)]), limit)
    best = min(range(least, most + 1, unit), key=lambda width: (_cost(needs, width, rows), width))
    blocks = []
    for number, (heads, wanted) in enumerate(zip(layout.layers, needs, strict=True)):
        for width, chosen in _dealt(wanted, best):
            blocks.append(Packed(width, tuple(heads[i] for i in chosen), number))
    return best, blocks


def _cost(needs: Sequence[Sequence[int]], stream: int, rows: int) -> int:
    """Operations of a pass over `rows` rows, about."""
    widths = [width for layer in needs for width, _ in _dealt(layer, stream)]
    return sum(4 * stream**2 * rows + (2 * stream + SOFTMAX * (stream // width)) * rows**2 for width in widths)


def _dealt(needs: Sequence[int], stream: int) -> list[tuple[int, list[int]]]:
    """Head dimension and heads of each block: wide heads first, narrow ones where room is left."""
    order = sorted(range(len(needs)), key=lambda i: -needs[i])
    blocks: list[tuple[int, list[int]]] = []
    for i in order:
        if not blocks or len(blocks[-1][1]) >= stream // blocks[-1][0]:
            blocks.append((needs[i], []))
        blocks[-1][1].append(i)
    return [(_widened(width, len(chosen), stream), sorted(chosen)) for width, chosen in blocks]


def _widened(width: int, heads: int, stream: int) -> int:
    """The largest head dimension that leaves room for all heads: fewer of them are padding."""
    while stream % (4 * width) == 0 and stream // (4 * width) >= heads:
        width *= 4
    return width
