"""A network as a circuit: heads one by one, the columns they read and write, and what comes out when one is patched.

Every tier becomes the same thing, layers of `network.Heads` over a state: a block of a plain transformer, or of a
TransformerLens model, is a group of heads over tokens with an identity skip. Which head can reach which is decided by
zeros of stored tensors alone. In tier `memory` affine maps stand between heads; there a channel is what the heads of a
layer write into one column, and a head reads it where nonzero entries lead from that column to its tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..arguments import shortened
from ..certificates.certificate import Certificate
from ..certificates.certified import CertifiedModule
from ..compiler.compiled import CompiledNetwork
from ..errors import ArgumentError, CertificateError, UnsupportedOperation
from ..export.lens import Lens
from ..export.plain.build import source_of
from ..export.plain.source import Source, column_name, width_of
from ..export.plain.transformer import PlainBlock, PlainTransformer, network_of
from ..export.verification import InputDomain, TokenDomain, domain
from ..network import Heads
from ..rasp.network.compiled import CompiledProgram, token_rows
from ..rasp.network.data import value_json
from ..theorems.result import Construction
from .manifest import ROLES, Channel, Inputs, Output
from .variants.variant import Variant

Mask = np.ndarray[Any, np.dtype[np.bool_]]
#: The role of each head family in the vocabulary of manifests.
FAMILY_ROLES = {
    "square": "product", "product": "product", "gate": "function", "anchor": "function", "norm": "norm",
    "softmax": "softmax", "attention": "attend", "mix": "mix", "max": "maximum",
}  # fmt: skip
CLEAR = 1e-6  # of a logit: patched states may give equal ones, and then rounding would decide which is the largest
WORDS = 120  # characters of an operation in a note


@dataclass(frozen=True, eq=False)
class CircuitLayer:
    """Groups of heads and a linear skip; a skip of None is the identity."""

    groups: tuple[Heads, ...]
    skip: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, Z: Tensor) -> Tensor:
        out = Z if self.skip is None else Z @ self.skip
        out = out if self.bias is None else out + self.bias
        for group in self._busy:
            out = out + group(Z)
        return out

    @cached_property
    def _busy(self) -> list[Heads]:
        """The groups without heads that write nothing."""
        return [part for group in self.groups if (part := _without_zeros(group)) is not None]


@dataclass(frozen=True)
class Spot:
    """One head: its names, where it is among the layers of a circuit, and what it is for."""

    id: str
    layer: int
    index: int
    hook: str
    at: int
    group: int
    head: int
    role: str
    op: str
    note: str
    scope: str


@dataclass(frozen=True, eq=False)
class Circuit:
    """Heads and channels of a network, and how it is run with a head or an edge patched.

    `reads` is (head, query key value, channel), `writes` (head, channel); `entering` are the channels of the input,
    `leaving` (output, channel) those that outputs read. `mixed` says that these are columns of a basis, and that no
    zeros of stored tensors show them.
    """

    tier: str
    target: str
    layers: tuple[CircuitLayer, ...]
    spots: tuple[Spot, ...]
    channels: tuple[Channel, ...]
    reads: Mask
    writes: Mask
    entering: Mask
    leaving: Mask
    inputs: Inputs
    outputs: tuple[Output, ...]
    where: InputDomain
    certificate: Certificate
    tensors: Mapping[str, Tensor]
    begin: Callable[..., Tensor] = field(repr=False)
    finish: Callable[[Tensor], Tensor] = field(repr=False)
    mixed: bool = False
    _alone: dict[Spot, Heads] = field(default_factory=dict, repr=False)

    # ---- what zeros say

    @cached_property
    def joined(self) -> Mask:
        """(source, target): whether a node's channels are read by another; the input is row 0, outputs come last."""
        sources = np.concatenate([self.entering[None], self.writes])
        heads = (sources.astype(np.int64) @ self.reads.any(1).T.astype(np.int64)) > 0
        layer = np.array([spot.layer for spot in self.spots])
        heads[1:] &= layer[:, None] < layer[None, :]
        return np.concatenate([heads, (sources.astype(np.int64) @ self.leaving.T.astype(np.int64)) > 0], 1)

    @cached_property
    def reach(self) -> Mask:
        """(head, output): whether nonzero weights lead from a head to an output."""
        count = len(self.spots)
        found = self.joined[1:, count:].copy()
        for i in sorted(range(count), key=lambda i: -self.spots[i].layer):
            after = np.flatnonzero(self.joined[1 + i, :count])
            found[i] |= found[after].any(0)
        return found

    @cached_property
    def rounding(self) -> float:
        """What two evaluations of one function may differ by: twice the rounding that the certificate states; for a
        calibrated one, what was measured. Decoded values do not differ at all."""
        stated = self.certificate
        if stated.kind == "exact":
            return 0.0
        if stated.bound is None:
            return float(stated.measured or 0.0)
        scale = 1.0
        if stated.relative:
            with torch.no_grad():
                scale = float(self.output(self.states(self.where.sample(64))[-1]).abs().max())
        return 2 * stated.by_source()["rounding"] * scale

    # ---- what it computes

    def states(self, points: Tensor) -> list[Tensor]:
        """The state before every layer, and after the last."""
        found = [self.begin(*self.where.split(points))]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return found

    def onward(self, Z: Tensor, start: int) -> Tensor:
        """The last state, from that before layer `start`."""
        for layer in self.layers[start:]:
            Z = layer(Z)
        return Z

    def output(self, Z: Tensor) -> Tensor:
        """(point, row, column) of what the network gives, from its last state."""
        return self.finish(Z)

    def alone(self, spot: Spot) -> Heads:
        """A head by itself."""
        if spot not in self._alone:
            self._alone[spot] = self._single(spot)
        return self._alone[spot]

    def _single(self, spot: Spot) -> Heads:
        group = self.layers[spot.layer].groups[spot.group]
        given: dict[str, Any] = {
            name: table[spot.head : spot.head + 1] if len(table) > 1 else table
            for name, table in group.named_parameters()
        }
        single = Heads(group.scope, causal=group.causal, **given)
        return _without_zeros(single) or single

    def carried(self, delta: Tensor, start: int, stop: int) -> Tensor:
        """A change of the state before layer `start`, as skips bring it before layer `stop`."""
        for layer in self.layers[start:stop]:
            delta = delta if layer.skip is None else delta @ layer.skip
        return delta

    def patched(self, source: Spot | None, target: Spot | None, states: Sequence[Tensor], delta: Tensor) -> Tensor:
        """The last state, where `target` (None: the output) reads what `source` gives changed by `delta`."""
        start = 0 if source is None else source.layer + 1
        if target is None:
            return states[-1] + self.carried(delta, start, len(self.layers))
        head, before = self.alone(target), states[target.layer]
        moved = head(before + self.carried(delta, start, target.layer)) - head(before)
        return self.onward(states[target.layer + 1] + moved, target.layer + 1)

    def replaced(self, spot: Spot, states: Sequence[Tensor], delta: Tensor) -> Tensor:
        """The last state, where everyone reads what a head gives changed by `delta`."""
        return self.onward(states[spot.layer + 1] + delta, spot.layer + 1)

    def following(self, spots: Sequence[Spot], base: Tensor, source: Tensor) -> Tensor:
        """The last state at some points, where some heads give what they give at others."""
        there = self.states(source)
        Z = self.begin(*self.where.split(base))
        for number, layer in enumerate(self.layers):
            after = layer(Z)
            for head in (self.alone(spot) for spot in spots if spot.layer == number):
                after = after + (head(there[number]) - head(Z))
            Z = after
        return Z

    def effect(self, points: Tensor, clean: Tensor, patched: Tensor) -> Tensor:
        """How far each output moves at each point, (point, output): the largest distance, or how many values change."""
        before, after = self.output(clean), self.output(patched)
        real = torch.ones(before.shape[:2], dtype=torch.bool)
        if isinstance(self.where, TokenDomain):
            real = points.long() != self.where.known
        if self.outputs[0].kind == "value":
            lost = ~torch.isfinite(after).all(-1)  # what is no number has no largest logit
            best = after.amax(-1)
            ahead = best - after.gather(-1, before.argmax(-1, keepdim=True)).squeeze(-1)
            return (((ahead > CLEAR * (1 + best.abs())) | lost) & real).sum(-1, keepdim=True).double()
        gap = (after.double() - before.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.where(real.unsqueeze(-1), gap, 0.0).amax(1)


def circuit_of(net: object) -> Circuit:
    """The circuit of a compiled network or program, of a plain transformer, or of a lens."""
    if isinstance(net, Lens):
        return _plain(net.plain, "lens", net)
    if isinstance(net, PlainTransformer):
        return _plain(net, "plain", None)
    if not isinstance(net, CertifiedModule):
        raise ArgumentError(f"expected a network built by attnforge, or an export of one, got {type(net).__name__}")
    where = domain(net)
    try:
        source = source_of(net, where.shapes[0][0] if isinstance(net, Construction) else None)
    except UnsupportedOperation as error:
        raise UnsupportedOperation(f"there is no manifest of this network: {error}") from error
    return _memory(net, source, where)


# -- tier memory ---------------------------------------------------------------------------------------------------


def _memory(net: CertifiedModule, source: Source, where: InputDomain) -> Circuit:
    layers, spots = [], []
    names = [Channel(name, "input") for name in (source.lead_names if source.lead is not None else source.inputs)]
    entering = len(names)
    names += [Channel(name, "constant") for name in source.constant_names]
    held = np.eye(len(names), dtype=bool)  # (column of the state, channel)
    reads, writes = [], []
    for number, layer in enumerate(source.layers):
        groups = layer.heads()
        width = width_of(layer)
        skip = torch.zeros(held.shape[0], width, dtype=net.dtype) if layer.S is None else layer.S.detach()
        layers.append(CircuitLayer(tuple(groups), skip, None if layer.s is None else layer.s.detach()))
        outs = [_nonzero(group.W_O, -2) for group in groups]  # (head or 1, column)
        written = np.flatnonzero(np.any([out.any(0) for out in outs], 0)) if groups else np.zeros(0, dtype=np.int64)
        fresh = {int(c): len(names) + i for i, c in enumerate(written)}
        index = 0
        for g, (group, out) in enumerate(zip(groups, outs, strict=True)):
            for h in range(group.heads):
                read = [_rows(group, f"W_{part}", h) for part in "QKV"]
                reads.append([np.zeros(held.shape[1], bool) if p is None else _some(held[p]) for p in read])
                writes.append([fresh[int(c)] for c in np.flatnonzero(out[h if len(out) > 1 else 0])])
                hook = f"network.layers.{number}.groups.{g}"
                spots.append(Spot(f"L{number}.H{index}", number, index, hook, h, g, h,
                                  *_meaning(net, (number, g, h), group.purpose), group.scope))  # fmt: skip
                index += 1
        names += [Channel(source.names[number][c], "written") for c in fresh]
        after = np.zeros((width, len(names)), dtype=bool)
        after[:, : held.shape[1]] = (_nonzero(skip).T.astype(np.int64) @ held.astype(np.int64)) > 0
        for c, place in fresh.items():
            after[c, place] = True
        held = after
    table = np.zeros((len(spots), 3, len(names)), dtype=bool)
    puts = np.zeros((len(spots), len(names)), dtype=bool)
    for i, (parts, columns) in enumerate(zip(reads, writes, strict=True)):
        for p, part in enumerate(parts):
            table[i, p, : len(part)] = part
        puts[i, columns] = True
    outputs, leaving = _outputs(net, source.names[-1], held)
    first = np.arange(len(names)) < entering
    return Circuit(
        "memory", net.certificate.target, tuple(layers), tuple(spots), tuple(names), table, puts, first, leaving,
        _inputs(net, where, source.inputs), outputs, where, net.certificate, net.state_dict(),
        lambda *inputs: _begun(source, net.dtype, inputs), lambda Z: Z[..., :1, :] if source.first_row else Z,
    )  # fmt: skip


def _begun(source: Source, dtype: torch.dtype, inputs: Sequence[Tensor]) -> Tensor:
    """The state before the first layer."""
    x = inputs[0]
    if source.ids:
        x = token_rows(x, len(source.inputs) - 1, dtype)
    elif source.fixed:
        flat = [given.reshape(len(given), -1) for given in inputs]
        x = torch.cat(flat, -1).reshape(len(flat[0]), source.tokens, len(source.inputs))
    if source.lead is not None:
        x = source.lead(x)
    if source.constants is None:
        return x
    return torch.cat([x, source.constants.expand(*x.shape[:-2], *source.constants.shape)], -1)


def _nonzero(table: Tensor, over: int | None = None) -> Mask:
    """Where a table has numbers other than 0, along one of its axes if `over` is given."""
    found = table.detach() != 0
    return cast(Mask, (found if over is None else found.any(over)).numpy())


def _some(mask: Mask) -> Mask:
    """Whether there is a True in each column."""
    return np.asarray(mask.any(0), dtype=bool)


def _rows(group: Heads, name: str, head: int) -> Mask | None:
    """The columns of the state that a table of a head reads; None where it has no such table."""
    table = getattr(group, name)
    return None if table is None else _nonzero(table[head if len(table) > 1 else 0], -1)


# -- tiers plain and lens ------------------------------------------------------------------------------------------


def _plain(plain: PlainTransformer, tier: str, lens: Lens | None) -> Circuit:
    spec = plain.spec
    weights = lens.weights if lens is not None else {}
    groups, spots = [], []
    try:
        origin: CertifiedModule | None = network_of(plain)
    except CertificateError:
        origin = None  # a theorem's file, or bare layers: heads go by their purposes
    for b, row in enumerate(spec.heads):
        if lens is None:
            group = cast(PlainBlock, plain.blocks[b]).as_heads(plain.causal)
        else:
            group = _hooked(weights, b, plain.causal)
        groups.append(CircuitLayer((group,), None, weights.get(f"blocks.{b}.attn.b_O")))
        for h in range(group.heads):
            known = row[h] if h < len(row) else None
            if known is None or not known.purpose:
                meaning = ("padding", "", "nothing: padding with zeros")
            else:
                meaning = _meaning(origin, known.place, known.purpose)
            hook = f"blocks.{b}.attention" if lens is None else f"blocks.{b}.attn.hook_z"
            scope = "tokens" if known is None or not known.purpose else known.scope
            spots.append(Spot(f"L{b}.H{h}", b, h, hook, h, 0, h, *meaning, scope))
    reads = [[_rows(layer.groups[0], f"W_{p}", h) for p in "QKV"] for layer in groups
             for h in range(layer.groups[0].heads)]  # fmt: skip
    puts = [_nonzero(layer.groups[0].W_O[h], 0) for layer in groups for h in range(layer.groups[0].heads)]
    writes = np.array(puts, dtype=bool).reshape(len(spots), spec.stream)
    embedded = _nonzero(plain.embed.weight, 1)
    readout = weights["unembed.W_U"].T if lens is not None else plain.readout.weight.detach()
    bias = weights["unembed.b_U"] if lens is not None else plain.readout.bias.detach()
    read, held = np.array(reads, dtype=bool).reshape(len(spots), 3, spec.stream), _nonzero(readout)
    columns: tuple[Channel, ...] = ()
    if isinstance(plain, Variant):  # columns of the basis, for what a variant's heads are proved to read
        shown = plain.structure([layer.groups[0].heads for layer in groups])
        read, writes, embedded, held = shown.reads, shown.writes, shown.entering, shown.leaving
        columns = tuple(Channel(*channel) for channel in shown.channels)
    outputs, leaving = _outputs(origin or plain, (), held)
    return Circuit(
        tier, plain.certificate.target, tuple(groups), tuple(spots),
        columns or _columns(plain, embedded, _some(writes)), read, writes, embedded, leaving,
        _inputs(origin or plain, domain(plain), spec.inputs), outputs, domain(plain), plain.certificate,
        weights if lens is not None else plain.state_dict(),
        (lambda ids: weights["embed.W_E"][lens.ids(ids)] + weights["pos_embed.W_pos"]) if lens is not None and spec.ids
        else plain.residual,
        lambda Z: torch.nn.functional.linear(Z[..., plain.registers :, :][..., : 1 if spec.first_row else None, :],
                                             readout, bias),
        isinstance(plain, Variant) and plain.mixed,
    )  # fmt: skip


def _without_zeros(group: Heads) -> Heads | None:
    """The same without heads, and without coordinates, that zeros make nothing of: padding is most of a plain form."""
    tables = dict(group.named_parameters())
    if group.scope != "tokens" or group.M_K is not None or group.W_K is None or group.W_V is None:
        return group

    def used(*names: str) -> Tensor:
        """(head, coordinate) where a table, or its bias, is not 0."""
        found = [tables[name] != 0 for name in names if name in tables]
        return torch.stack([part if part.dim() == 2 else part.any(1) for part in found]).any(0)

    asked, told = used("W_Q", "b_Q") & used("W_K", "b_K"), (tables["W_O"] != 0).any(-1) & used("W_V", "b_V")
    heads = told.any(1)
    if not bool(heads.any()):
        return None
    kept = {"Q": asked[heads].any(0), "K": asked[heads].any(0), "V": told[heads].any(0)}
    kept["Q"][0] = kept["K"][0] = True  # logits that are all 0 need a coordinate, too
    given = {name: table[heads][..., kept[name[-1]]] for name, table in tables.items() if name != "W_O"}
    return Heads("tokens", causal=group.causal, W_O=tables["W_O"][heads][:, kept["V"]], **given)


def _hooked(weights: Mapping[str, Tensor], block: int, causal: bool) -> Heads:
    """A block of a TransformerLens model as a group of heads."""
    given = {name: weights[f"blocks.{block}.attn.{name}"] for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")}
    root = math.sqrt(given["W_Q"].shape[-1])
    given |= {"W_Q": given["W_Q"] / root, "b_Q": given["b_Q"] / root}
    return Heads("tokens", causal=causal, **given)  # type: ignore[arg-type]


def _columns(plain: PlainTransformer, embedded: Mask, written: Mask) -> tuple[Channel, ...]:
    """Names and kinds of the columns of the stream, the kinds from what is stored."""
    positions = _nonzero(plain.positions)
    registers, tokens = _some(positions[: plain.registers]), _some(positions[plain.registers :])
    found = []
    for c, name in enumerate(plain.channels):
        kinds = (("written", written[c]), ("input", embedded[c]), ("constant", tokens[c]), ("register", registers[c]))
        true = [kind for kind, here in kinds if here]
        mixed = "written" in true and len(true) > 1
        found.append(Channel(name, "mixed" if mixed else true[0] if true else "unused"))
    return tuple(found)


# -- names ---------------------------------------------------------------------------------------------------------


def _meaning(net: CertifiedModule | None, place: tuple[int, int, int], purpose: str) -> tuple[str, str, str]:
    """Role, operation and note of the head at a place (layer, group, head) of a network in tier memory."""
    layer, group, head = place
    if layer < 0:  # a head that a variant has added: its purpose begins with its role
        role = purpose.split(":")[0]
        return role if role in ROLES else "construction", "", shortened(purpose, WORDS)
    if isinstance(net, CompiledNetwork):
        step = net.layout.steps[layer // 2]
        for site, seat in step.groups[group].members:
            if seat.first <= head < seat.first + seat.heads:
                single = len(seat.writes) == 1 and net.program.ops[site.op].width > 1
                op = column_name(net.layout, *step.after[seat.writes[0]]) if single else operation(net, site.op)
                part = f", head {head - seat.first + 1} of {seat.heads}" if seat.heads > 1 else ""
                note = shortened(f"{op} ({site.family}{part})", WORDS)
                return FAMILY_ROLES.get(site.family, "construction"), op, note
    if isinstance(net, CompiledProgram):
        seat_of = net.layout.layers[layer].heads[group]
        node = net.facts.sop(seat_of.op)
        op = node.name or node.label.strip("'")
        meaning = f"{seat_of.kind}: {op} = {node!r}" if node.name else f"{seat_of.kind}: {op}"
        return seat_of.kind, op, shortened(meaning, WORDS)
    return "construction", "", shortened(purpose or "a head of the construction", WORDS)


def operation(net: CompiledNetwork, op: int) -> str:
    """What an operation of a compiled network is called."""
    return net.program.labels[op] or f"%{op} {net.program.ops[op].word}"


def _inputs(net: CertifiedModule, where: InputDomain, names: Sequence[str]) -> Inputs:
    if isinstance(where, TokenDomain):
        known = net.vocabulary if isinstance(net, CompiledProgram) else tuple(names[:-1])
        return Inputs("tokens", ("tokens",), where.shapes, vocabulary=tuple(value_json(token) for token in known))
    low, high = (tuple(end.double().tolist()) for end in (where.lower, where.upper))
    return Inputs("numbers", tuple(names), where.shapes, low, high)


def _outputs(net: CertifiedModule, names: Sequence[str], held: Mask) -> tuple[tuple[Output, ...], Mask]:
    """The outputs and the channels that each reads, from `held` (column, channel)."""
    if isinstance(net, CompiledProgram):
        name = net.program.name or "output"
        if net.outputs is None:
            return (Output(name),), held
        return (Output(name, "value", tuple(value_json(v) for v in net.outputs)),), _some(held)[None]
    if isinstance(net, PlainTransformer) and net.certificate.kind == "exact":
        # a program that is not at hand: what is proved is which logit is the largest, and not how large they are
        return (Output("output", "value", tuple(range(len(held)))),), _some(held)[None]
    given = list(names)
    if isinstance(net, CompiledNetwork):
        given = [column_name(net.layout, *column) for column in net.layout.output]
        given = list(net.outputs) if len(net.outputs) == len(held) else given
    given = given if len(given) == len(held) else [f"output[{i}]" for i in range(len(held))]
    return tuple(Output(name if given.index(name) == i else f"{name} ({i})") for i, name in enumerate(given)), held
