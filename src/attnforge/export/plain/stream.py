"""The heads of a plain transformer as tables over one residual stream: folded from a network, or read off tensors.

The state of the source before a layer is an affine function of the residual stream: Z = X A, with the flag column for
constants. A layer's heads read X (A W_Q) and so on, so that affine maps and linear skips fold into the weights of
whoever reads them, and write fresh columns; the state after it is X (A S + what was written). `folded` computes these
tables from the stored layers of a network; what builds a transformer packs them.

`read` takes the tables from the tensors of a transformer, whatever was done to these, and is strict about all that
exclusion (lemma B6) rests on: registers and flags, which columns a head may read and write, what hides keys, and that
everything else is an exact 0. What it lets pass are numbers, which a certificate compares with what they should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...certificates.rounding import gamma, unit
from ...dtypes import SHIPPED, Array, dtype_name, stored
from ...errors import CertificateError, PrecisionError
from ...heads.token.bound import DEAD
from ...network import Heads, Scope
from .source import Source, width_of
from .spec import FLAG, Columns, PlainHead, PlainSpec, exclusion, lay_columns, needs_positions, scale_of

#: Sizes of what heads write are estimates with this much room, and Omega has it for logits; certificates prove both.
SLACK = 1.1

#: What Omega has beyond logits: enough in every dtype, so that a transformer may be converted, and 4 for rounding.
FAR = max(DEAD.values()) + 4.0

Place = tuple[int, int, int]  # layer, group and head in the source
#: What `PlainSpec` says of a source.
SHARED = ("tokens", "inputs", "box", "boxes", "output_shape", "first_row", "fixed", "ids")
AGAIN = "train the network itself, certify it and export it again"


@dataclass(frozen=True, eq=False)
class HeadTables:
    """One head over the residual stream, content only: tables are (column, coordinate), over the columns there are
    before its layer; `output` is (coordinate, fresh column of the layer).

    `hiding` coordinates of query and key beyond these are the exclusion, with `omega`; `logit` bounds |content|, and
    `scale` is what queries are stored times of.
    """

    place: Place
    scope: Scope
    slots: int
    query: Array
    key: Array
    value: Array
    output: Array
    hiding: int
    omega: float = 0.0
    logit: float = 0.0
    scale: float = 1.0

    @property
    def used(self) -> int:
        """The coordinates of query and key."""
        return self.query.shape[1] + self.hiding

    @property
    def width(self) -> int:
        """The head dimension that it needs."""
        return max(self.used, self.value.shape[1])


@dataclass(eq=False)
class Stream:
    """All heads, source layer by source layer, how large columns are, and what the read-out reads."""

    source: Source
    causal: bool
    dtype: torch.dtype
    room: float  # computed weights add up to at most this, and so do the roundings of what they average
    layers: list[list[HeadTables]] = field(default_factory=list)
    sizes: list[Array] = field(default_factory=list)  # (token, column): of the columns before every layer, and at last
    convex: list[Array] = field(default_factory=list)  # (token, fresh column): what its values alone say of its size
    readout: Array = field(default_factory=lambda: np.zeros((0, 0)))
    constants: Array | None = None

    def __post_init__(self) -> None:
        source, n = self.source, self.source.tokens
        groups = [group for layer in source.layers for group in layer.heads()]
        slots = max((group.slots for group in groups), default=0)
        ordered = any(needs_positions(g.scope, n, g.causal and not self.causal) for g in groups)
        given = None if source.constants is None else stored(source.constants)
        inputs = source.lead_names if source.lead is not None else source.inputs
        self.columns: Columns = lay_columns(slots + 1, n, inputs, given, source.constant_names, ordered)
        #: For each layer: column of the state after it -> column of the residual stream that its heads write.
        self.fresh: list[dict[int, int]] = []
        self.width = self.columns.first
        for layer in source.layers:
            outputs = (np.abs(stored(group.W_O)).sum((0, 1)) for group in layer.heads())
            written = np.flatnonzero(sum(outputs, np.zeros(width_of(layer))))
            self.fresh.append({int(c): self.width + i for i, c in enumerate(written)})
            self.width += len(written)

    def exclusion(self, group: Heads) -> tuple[Array, Array]:
        """What hides keys from the heads of a group: query and key coordinates, for Omega = 1."""
        return exclusion(self.columns, group.scope, group.slots, group.causal and not self.causal)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused afterwards
    def begin(self, embed: Array, positions: Array) -> None:
        """The sizes of the columns before all heads, from the embedding (column, input) and the tokens' positions."""
        first = self.columns.first
        given = np.maximum(np.abs(self.source.low), np.abs(self.source.high))
        size = given @ np.abs(embed[:first]).T + np.abs(positions[:, :first])
        if self.source.lead is not None:
            size[:, list(self.columns.inputs)] *= self.room
        self.sizes.append(size)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused afterwards
    def add(self, heads: Iterable[HeadTables], known: Array | None) -> None:
        """The heads of the next layer; `known` is how large what they write may be said to be, (token, column)."""
        number, size = len(self.layers), self.sizes[-1]
        fresh = self.fresh[number]
        placed = [replace(head, logit=self._logit(head, size)) for head in heads]
        convex = np.zeros((len(size), len(fresh)))
        for head in placed:  # every head's result lies among its values
            tokens = size @ np.abs(head.value)
            own = tokens.max(0, keepdims=True) if head.scope == "tokens" else tokens
            memory = np.abs(head.value[list(self.columns.ids)]).max(0, keepdims=True)
            convex += np.maximum(own, memory) @ np.abs(head.output) * self.room
        grown = np.concatenate([size, convex], 1)
        if known is not None:
            extra = known[:, list(fresh)].max(initial=0.0) * (SLACK - 1)  # a unit that is never alive still errs
            for c, place in fresh.items():
                grown[:, place] = np.fmin(grown[:, place], known[:, c] + extra)
        self.layers.append(placed)
        self.convex.append(convex)
        self.sizes.append(grown)

    def _logit(self, head: HeadTables, size: Array) -> float:
        """A bound of |content| for all tokens as queries, and tokens and registers as keys."""
        registers = [self.columns.ids[r] for r in range(1, head.slots + 1)]
        q = size @ np.abs(head.query)
        k = np.concatenate([size @ np.abs(head.key), np.abs(head.key[registers])])
        return float((q @ k.T).max(initial=0.0))


def spare(rows: int, stream: int, dtype: torch.dtype) -> float:
    """What rounding may make of a mean of values, relatively: a softmax over `rows` keys and the sum it weighs, and two
    projections over `stream` channels; 16 more operations each are spare, and 64 blocks that add to one column."""
    u = unit(dtype)
    return float((1 + gamma(rows + 16, u)) ** 2 * (1 + gamma(stream + 80, u)) ** 2)


def refuse_leaks(stream: Stream) -> None:
    """Raise `PrecisionError` unless every excluded key of every head weighs an exact 0."""
    u = unit(stream.dtype)
    for head in (head for heads in stream.layers for head in heads):
        slip = float(gamma(head.width + 4, u)) * (head.logit + head.hiding * head.omega)
        # logits reach from -logit to logit; a hundredth of that and 4 slips are for what computing them rounds
        if not head.omega - 2.02 * head.logit - 4 * slip > DEAD[stream.dtype]:
            purpose = stream.source.layers[head.place[0]].heads()[head.place[1]].purpose or head.scope
            raise PrecisionError(
                f"'{purpose}' has logits up to {head.logit:.3g}: {stream.dtype} cannot tell them from what is "
                "excluded; compile with dtype=torch.float64"
            )


def refuse_overflow(stream: Stream, reach: Iterable[float]) -> float:
    """The largest activation; `PrecisionError` where that or logits (`reach`) come near what the dtype holds."""
    largest = float(stream.sizes[-1].max(initial=1.0))
    most = max([largest, *reach])
    if not most < torch.finfo(stream.dtype).max / 16:  # 16: logits are sums of a few such numbers
        raise PrecisionError(
            f"{stream.dtype} cannot hold this network in plain form: its logits and activations reach {most:.3g}; "
            "compile it with dtype=torch.float64"
        )
    return largest


# -- from the layers of a network ----------------------------------------------------------------------------------


def first_rows(stream: Stream) -> tuple[Array, Array]:
    """The embedding (column, input) and the positions (row, column) that a source asks for, over the used columns."""
    source, columns = stream.source, stream.columns
    embed = np.zeros((stream.width, len(source.inputs)))
    positions = np.zeros((columns.registers + columns.tokens, stream.width))
    inputs, token = list(columns.inputs), positions[columns.registers :]
    positions[range(columns.registers), list(columns.ids)] = 1.0
    token[:, FLAG] = 1.0
    if source.lead is None:
        embed[inputs, range(len(inputs))] = 1.0
    else:
        assert source.lead.S is not None
        embed[inputs] = stored(source.lead.S).T
        if source.lead.s is not None:
            token[:, inputs] = stored(source.lead.s)
    if source.constants is not None:
        token[:, list(columns.constants)] = stored(source.constants)
    if columns.positions:
        token[range(columns.tokens), list(columns.positions)] = 1.0
    return embed, positions


def folded(stream: Stream, sizes: Sequence[Array | None]) -> list[Array]:
    """Fill a stream with the heads of its source, Omega chosen for them; A before every layer, and at the end.

    `sizes`, where known, are those of what heads write, for each layer (token, column).
    """
    source, columns = stream.source, stream.columns
    embed, positions = first_rows(stream)
    stream.begin(embed, positions[columns.registers :])
    state = np.zeros((columns.first, len(source.columns)))
    state[[*columns.inputs, *columns.constants], range(len(source.columns))] = 1.0
    states = [state]
    for number, layer in enumerate(source.layers):
        heads = [h for g, group in enumerate(layer.heads()) for h in _folded(stream, group, (number, g), state)]
        stream.add(heads, sizes[number] if sizes else None)
        for i, head in enumerate(stream.layers[-1]):
            omega = 2.0 ** math.ceil(math.log2(2 * SLACK * head.logit + FAR))
            stream.layers[-1][i] = replace(head, omega=omega)
        skip = np.zeros((state.shape[1], width_of(layer))) if layer.S is None else stored(layer.S)
        after = np.zeros((len(state) + len(stream.fresh[number]), skip.shape[1]))
        after[: len(state)] = state @ skip
        if layer.s is not None:
            after[FLAG] += stored(layer.s)
        for c, place in stream.fresh[number].items():
            after[place, c] = 1.0
        states.append(after)
        state = after
    stream.readout = state
    return states


def _folded(stream: Stream, group: Heads, place: tuple[int, int], state: Array) -> Iterable[HeadTables]:
    fresh, registers = stream.fresh[place[0]], [stream.columns.ids[r] for r in range(1, group.slots + 1)]
    hiding = stream.exclusion(group)[0].shape[1]
    tables = {name: stored(t) for name, t in group.named_parameters()}
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
        output = own["W_O"][:, list(fresh)]
        yield HeadTables((*place, h), group.scope, group.slots, query, key, value, output, hiding)


# -- from the tensors of a transformer -----------------------------------------------------------------------------


def read(
    spec: PlainSpec, tensors: Mapping[str, Tensor], source: Source, sizes: Sequence[Array | None] = ()
) -> Stream:
    """The stream that tensors hold, for a source that says which heads there are; `CertificateError` where what the
    exclusion rests on was changed, or is not what the source asks for.

    `sizes` say how large what heads write may be taken to be: a choice that the analysis has to prove.
    """
    numbers = _numbers(spec, tensors)
    dtype = dtype_of(tensors)
    said, wanted = ({name: getattr(about, name) for name in SHARED} for about in (spec, source))
    _same("the description", {**said, "outputs": spec.outputs}, {**wanted, "outputs": width_of(source.layers[-1])})
    seen = [group for layer in source.layers for group in layer.heads() if group.scope == "tokens" and not group.causal]
    if spec.causal and seen and source.tokens > 1:
        raise CertificateError(f"a causal mask hides later tokens from '{seen[0].purpose}', which must see them")
    stream = Stream(source, spec.causal, dtype, spare(spec.registers + spec.tokens, spec.stream, dtype))
    if stream.columns.registers != spec.registers or stream.width > spec.stream:
        raise CertificateError("the plain transformer has not the registers and channels that its network asks for")
    _read_rows(stream, numbers)
    heads = _read_heads(stream, spec, numbers)
    for number in range(len(source.layers)):
        stream.add([heads[place] for place in sorted(p for p in heads if p[0] == number)],
                   sizes[number] if sizes else None)  # fmt: skip
    table = numbers["readout.weight"].T
    _zero("the read-out", table[FLAG], table[stream.width :])
    stream.readout = table[: stream.width].copy()
    stream.readout[FLAG] = numbers["readout.bias"]
    refuse_leaks(stream)
    refuse_overflow(stream, (2 * head.omega * head.scale for heads in stream.layers for head in heads))
    return stream


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The one dtype of all tensors, which must be one that networks ship in."""
    dtypes = {t.dtype for t in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= set(SHIPPED):
        found = ", ".join(sorted(map(dtype_name, dtypes)))
        raise CertificateError(f"a plain transformer is certified in float32 or float64, not in {found}")
    return dtypes.pop()


def _numbers(spec: PlainSpec, tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """All tensors as arrays: of the shapes that a description asks for, and finite."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (spec.stream, len(spec.inputs)),
        "positions": (spec.registers + spec.tokens, spec.stream),
        "readout.weight": (spec.outputs, spec.stream),
        "readout.bias": (spec.outputs,),
    }
    for b in range(len(spec.heads)):
        shapes[f"blocks.{b}.attention.in_proj_weight"] = (3 * spec.stream, spec.stream)
        shapes[f"blocks.{b}.attention.out_proj.weight"] = (spec.stream, spec.stream)
    _same("the tensors", {name: tuple(t.shape) for name, t in tensors.items()}, shapes)
    endless = [name for name, t in tensors.items() if not bool(torch.isfinite(t).all())]
    if endless:
        raise CertificateError(f"no bound holds for weights that are not finite: {', '.join(endless)}")
    return {name: stored(t) for name, t in tensors.items()}


def _same(what: str, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    changed = [name for name in {**found, **wanted} if name not in found or found.get(name) != wanted.get(name)]
    if changed:
        raise CertificateError(f"{what} of the plain transformer was changed ({', '.join(changed)}): {AGAIN}")


def _zero(what: str, *parts: Array) -> None:
    """Raise unless numbers are exact zeros."""
    if any(part.any() for part in parts):
        raise CertificateError(f"{what} has numbers where exclusion needs exact zeros: it was changed; {AGAIN}")


def _read_rows(stream: Stream, numbers: dict[str, Array]) -> None:
    """Embedding and positions: structure, but for constants, which are numbers where they are not positions."""
    columns, width = stream.columns, stream.width
    embed, positions = numbers["embed.weight"], numbers["positions"]
    wanted_embed, wanted = first_rows(stream)
    if columns.constants:
        stream.constants = positions[columns.registers :, list(columns.constants)]
        free = [c for c in columns.constants if c not in columns.hot]
        wanted[columns.registers :, free] = positions[columns.registers :, free]
    for name, found, asked in (("embed.weight", embed, wanted_embed), ("positions", positions.T, wanted.T)):
        if not np.array_equal(found[:width], asked) or found[width:].any():
            raise CertificateError(f"{name} was changed: registers, flags and inputs are what exclusion needs; {AGAIN}")
    stream.begin(wanted_embed, wanted[columns.registers :])


def _read_heads(stream: Stream, spec: PlainSpec, numbers: dict[str, Array]) -> dict[Place, HeadTables]:
    """The heads of all blocks by their places in the source, each of which must be there once and in order."""
    layers = stream.source.layers
    missing = {(i, g, h) for i, layer in enumerate(layers) for g, group in enumerate(layer.heads())
               for h in range(group.heads)}  # fmt: skip
    found: dict[Place, HeadTables] = {}
    last = 0
    for b, row in enumerate(spec.heads):
        into, out = (numbers[f"blocks.{b}.attention.{name}"] for name in ("in_proj_weight", "out_proj.weight"))
        d = spec.stream // len(row)
        thirds = into.reshape(3, len(row), d, spec.stream).transpose(0, 1, 3, 2)  # (third, head, column, coordinate)
        backs = out.reshape(spec.stream, len(row), d).transpose(1, 2, 0)  # (head, coordinate, column)
        for h, head in enumerate(row):
            if head == PlainHead():
                _zero(f"padding of block {b}", thirds[:, h], backs[h])
                continue
            if head.place not in missing or head.place[0] < last:
                raise CertificateError(f"head {h} of block {b} is not one that the network asks for there: {AGAIN}")
            missing.remove(head.place)
            last = head.place[0]
            found[head.place] = _read_head(stream, head, thirds[:, h], backs[h], d)
    if missing:
        raise CertificateError(f"the plain transformer lacks {len(missing)} of its network's heads")
    return found


def _read_head(stream: Stream, head: PlainHead, thirds: Array, back: Array, d: int) -> HeadTables:
    """One head, out of three tables (column, coordinate) and the rows that it writes with."""
    number, g, h = head.place
    group, columns, fresh = stream.source.layers[number].heads()[g], stream.columns, stream.fresh[number]
    before = columns.first + sum(map(len, stream.fresh[:number]))
    W_O = stored(group.W_O)[h if len(group.W_O) > 1 else 0]
    k, v, hides = group.W_Q.shape[-1], len(W_O), stream.exclusion(group)
    hiding, scale, what = hides[0].shape[1], scale_of(d), f"'{head.purpose}'"
    if max(k + hiding, v) > d:
        raise CertificateError(f"{what} has {d} coordinates, which is too few for what it computes")
    query, key, value = thirds[0] / scale, thirds[1], thirds[2]
    _zero(what, query[before:], key[before:], value[before:])
    _zero(what, query[:, k + hiding :], key[:, k + hiding :], value[:, v:], back[v:])
    omega = float(np.abs(query[:, k : k + hiding]).max())
    for table, hide in ((query, omega * hides[0]), (key, hides[1])):
        if not np.array_equal(table[: columns.first, k : k + hiding], hide):
            raise CertificateError(f"what hides keys from {what} was changed: {AGAIN}")
        _zero(what, table[columns.first :, k : k + hiding])
    query, key, value = query[:before, :k], key[:before, :k], value[:before, :v]
    banned = [columns.ids[0], *columns.ids[group.slots + 1 :]]
    _zero(f"the registers of {what}", query[list(columns.ids)], key[banned], value[banned])
    if group.scope == "memory":  # registers look at tokens there: what they read must be nothing
        _zero(what, np.delete(key, list(columns.ids), 0), np.delete(value, list(columns.ids), 0))
    output = back[:v, list(fresh.values())]
    _zero(f"what {what} writes", np.delete(back, list(fresh.values()), 1))
    if not np.array_equal(output != 0, W_O[:, list(fresh)] != 0):
        raise CertificateError(f"{what} writes other columns than the network's head: {AGAIN}")
    writes = tuple(place for place, column in zip(fresh.values(), output.T, strict=True) if column.any())
    about = PlainHead(head.purpose, group.scope, group.slots, omega, head.logit, hiding, k + hiding, writes, head.place)
    _same("the description", about.__dict__, head.__dict__)
    return HeadTables(head.place, group.scope, group.slots, query, key, value, output, hiding, omega, scale=scale)
