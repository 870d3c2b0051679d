"""The certificate of a plain transformer: the bound of its source, recomputed for what the stored tensors compute.

*Exclusion.* A head's content logits are at most L in size, so that the best allowed one is at least -L, and an excluded
one at most L - Omega. Omega is at least 2 L plus 104 (float32) or 746 (float64) and a little: the exponential of what
is excluded underflows to an exact 0. Allowed logits gain exact zeros, and registers, whose rows no head changes, give
exact keys and values. So a head computes what it does in tier `memory`, up to the order of its sums, which no
certificate counts on. `stream.read` sees to it that the tensors are so.

*Theorems*: the embedding computes y = w.x + t as the first layer does, and every later query is a sum of the same
terms, so that the construction's own certificate, which allows any order, holds for weights that are its own.

*Compiled networks* (`FoldedLayers`). The plain form has no state of its own between steps. Call *virtual* the value
that an atom (a result of heads) would have if its column, as computed, were joined by its linear part in real
arithmetic; and virtual reads the program's affine forms of virtual atoms. Errors of virtual values travel as in
`compiler.propagation`. What is new is that every coordinate of every query, key and value is a folded inner product of
its own, so that the copies of one read differ by rounding: coordinate = exact function of the virtual read + rho, with
rho from `Stored`. What rho does to a head is its family's to say (`Rule.loosened`, `Rule.copied`). Everything else
about a head is as in tier `memory`: the keys and values of registers are single products of a one-hot id, exact;
excluded keys weigh an exact 0 and allowed logits gain exact zeros.

What the coordinates should be is stated by the network that the plain form was made from: its linear parts and what its
heads make of their reads. Any other network would do as well, at the price of a larger rho: the bound is for the stored
numbers, against the program. Keys, values and outputs of heads and all constants are those that the tensors hold.

*Sizes.* Rounding of folded sums depends on how large the columns of the stream are. A column that heads have written is
a result less its linear part: at most as large as the heads' values (every result is a mean of them), and in the
result's interval less the linear part's. A family may know better (`Rule.written`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...certificates.certificate import Certificate
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import gamma, up
from ...compiler.compiled import STRETCHES, CompiledNetwork
from ...compiler.course import Course, Errors
from ...compiler.layout import Layout, Step
from ...compiler.propagation import EFFORT, Propagation, Reading, network_bound, outward_cells, roundings
from ...dtypes import Array, dtype_name, rounded, stored
from ...errors import AttnforgeError, CertificateError, PrecisionError
from ...heads.families import rule_of
from ...heads.rule import Copies, Local, Moved, Setting
from ...heads.site import Site
from ...heads.stored import power_of_two, refuse_endless, skip_of
from ...heads.token.bound import UNDERFLOW
from ...network import AttentionLayer, AttentionOnly, Heads
from ...programs.affine import Column, affine_map, folding_error
from ...programs.enclose import Range, ranges
from ...rasp.network.compiled import CompiledProgram
from .source import Source, compiled_source, program_source
from .spec import FLAG, PlainSpec
from .stream import AGAIN, HeadTables, Stream, dtype_of, folded, read

EXPLICIT = "torch.nn.MultiheadAttention with need_weights=True: an explicit softmax"


@dataclass(frozen=True, eq=False)
class Fold:
    """An affine function of the stream, (column, coordinate), constants in the flag's row.

    `matrix` is what float64 makes of it, within `error` of the exact one; `size` adds up absolute values.
    """

    matrix: Array
    size: Array
    error: Array

    @classmethod
    def columns(cls, places: list[int], width: int) -> Fold:
        """Columns of the stream themselves."""
        matrix = np.zeros((width, len(places)))
        matrix[places, range(len(places))] = 1.0
        return cls(matrix, matrix, np.zeros_like(matrix))

    def then(
        self, weight: Array, bias: Array | None, slack: Array | None = None, slack_bias: Array | None = None
    ) -> Fold:
        """This, times a weight that is itself only known up to `slack`, plus a bias."""
        matrix, size = self.matrix @ weight, self.size @ np.abs(weight)
        used = (self.matrix != 0) * 1.0 @ ((weight != 0) * 1.0)
        left, right = (self.matrix != 0) & power_of_two(self.matrix), (weight != 0) & power_of_two(weight)
        clean = (left * 1.0) @ ((weight != 0) * 1.0) + ((self.matrix != 0) * 1.0) @ (right * 1.0)
        exact = (used == 0) | ((used == 1) & (clean > 0))
        own = np.where(exact, 0.0, (weight.shape[0] + 4) * 2.0**-52 * size)
        error = self.error @ np.abs(weight) + own
        if slack is not None:
            error = error + self.size @ slack
        if bias is not None:
            added = (bias != 0) & (matrix[FLAG] != 0)
            matrix[FLAG] += bias
            size[FLAG] += np.abs(bias)
            error[FLAG] += added * 2.0**-52 * size[FLAG]
        if slack_bias is not None:
            error[FLAG] += slack_bias
        return Fold(matrix, size, error * (1 + weight.shape[0] * 2.0**-50))

    def with_fresh(self, fresh: dict[int, int]) -> Fold:
        """The same over a stream with more columns, fresh ones added to the coordinates they belong to."""
        more = np.zeros((len(fresh), self.matrix.shape[1]))
        matrix, size, error = (np.concatenate([x, more]) for x in (self.matrix, self.size, self.error))
        for coordinate, place in fresh.items():
            matrix[place, coordinate] = size[place, coordinate] = 1.0
        return Fold(matrix, size, error)


@dataclass(frozen=True, eq=False)
class Stored:
    """Folded weights as a dtype stores them, beside the exact ones: how far computed coordinates can be off."""

    off: Array  # (column, coordinate)
    weight: Array
    rate: Array  # (coordinate,)
    lost: Array

    @classmethod
    def of(cls, stored: Array, exact: Fold, u: float, tiny: float, hot: tuple[int, ...] = ()) -> Stored:
        """Rounding of sums in any order. The flag is 1 and of the columns `hot` one is 1, the others 0: such products
        are exact, and of all hot columns one is a term."""
        off = np.abs(stored - exact.matrix) * (1 + 2.0**-50) + exact.error
        fixed = np.stack([stored[FLAG] != 0, stored[list(hot)].any(0)]).sum(0)
        rest = stored.copy()
        rest[[FLAG, *hot]] = 0.0
        terms = roundings(rest, fixed.astype(float)) + np.maximum(fixed - 1, 0)
        rate = np.where(terms > 0, gamma(terms, u), 0.0)
        return cls(off, np.abs(stored), rate, np.where(terms > 0, (terms + 2) * tiny, 0.0))

    @classmethod
    def joined(cls, parts: list[Stored]) -> Stored:
        """Side by side."""
        off, weight = (np.concatenate([getattr(p, name) for p in parts], 1) for name in ("off", "weight"))
        return cls(off, weight, np.concatenate([p.rate for p in parts]), np.concatenate([p.lost for p in parts]))

    def error(self, size: Array) -> Array:
        """|computed - exact| (..., coordinate) for columns of at most `size` (..., column); an exact 0 stays."""
        found = size @ self.off + self.rate * (size @ self.weight) + self.lost
        return found * (1 + (len(self.off) + 8) * 2.0**-51)


class FoldedLayers(Reading):
    """The plain form of a compiled network, read as folded weights over one residual stream."""

    apart = True

    def __init__(self, net: CompiledNetwork, stream: Stream, stretch: float = 0.0):
        self.stream, self.layout = stream, net.layout
        self.setting = Setting(net.program, stream.dtype, stretch)
        self.constants = None if stream.constants is None else torch.from_numpy(stream.constants)
        self.network = _unfolded(stream)
        refuse_endless(self.network)
        self.raw = np.zeros((0, 0, 0))  # (cell, token, column): sizes of the stream's columns as computed
        self.bad = np.zeros(0, dtype=bool)  # cells where a size is beyond what the weights were made for
        self.rho = np.zeros((0, 0, 0))
        self.state: Errors = {}  # errors of the virtual state before the present step
        self.coming: dict[Column, Array] = {}  # errors of the virtual reads of the present step
        self._fold()

    def _fold(self) -> None:
        """What the coordinates of all heads and of the read-out should be, and how far stored ones are from that."""
        stream, layout, (u, tiny) = self.stream, self.layout, (self.setting.u, self.setting.tiny)
        state = Fold.columns([*stream.columns.inputs, *stream.columns.constants], stream.columns.first)
        self.stacks: list[Stored] = []  # of every step, all coordinates side by side; last the read-out
        self.where: list[dict[tuple[int, str], slice]] = []
        self.writers: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # heads of a site, and channels they write
        self.step_of: dict[int, int] = {}
        before: Sequence[Column] = layout.first
        for number, step in enumerate(layout.steps):
            maps = affine_map(self.forms, before, step.columns), folding_error(self.forms, before, step.columns)
            reads = state.then(*maps[0], *maps[1])
            self._stack(number, step, reads)
            skip, bias = (x.copy() for x in skip_of(self.layer(2 * number + 1), len(step.columns)))
            count = len(step.carried)  # these have no state of their own here: they are exactly what they are
            skip[:, :count], bias[:count] = np.eye(len(step.columns), count), 0.0
            state = reads.then(skip, bias).with_fresh(stream.fresh[2 * number + 1])
            before = step.after
        exact, slack = (of(self.forms, before, layout.output) for of in (affine_map, folding_error))
        self.stacks.append(Stored.of(stream.readout, state.then(*exact, *slack), u, tiny))

    def _stack(self, number: int, step: Step, reads: Fold) -> None:
        parts: list[Stored] = []
        where: dict[tuple[int, str], slice] = {}
        index, ids, start = 2 * number + 1, list(self.stream.columns.ids), 0
        after = [step.after[c] for c in self.stream.fresh[index]]
        owner = {(place.group, place.first + i): site.op for group in step.groups for site, place in group.members
                 for i in range(place.heads)}  # fmt: skip
        for h, head in enumerate(self.stream.layers[index]):
            _, g, i = head.place
            tables = {name: stored(t) for name, t in self.layer(index).heads()[g].named_parameters()}
            for kind, table in (("query", head.query), ("key", head.key), ("value", head.value)):
                name, k = kind[0].upper(), table.shape[1]
                weight = tables[f"W_{name}"][i] if f"W_{name}" in tables else np.zeros((reads.matrix.shape[1], k))
                exact = reads.then(weight, tables[f"b_{name}"][i] if f"b_{name}" in tables else None)
                tokens = table.copy()
                tokens[ids] = 0.0  # registers have keys and values of their own
                parts.append(Stored.of(tokens, exact, self.setting.u, self.setting.tiny, self.stream.columns.hot))
                where[h, kind] = slice(start, start + k)
                start += k
            channels = tuple(after[int(c)][1] for c in np.flatnonzero(head.output.any(0)))
            self.writers.setdefault(owner[g, i], []).append((h, channels))
            self.step_of[owner[g, i]] = number
        self.stacks.append(Stored.joined(parts))
        self.where.append(where)

    # -- sizes and rounding on cells ------------------------------------------------------------------------------

    def reads(self, number: int, errors: Errors, found: list[Range]) -> Errors:
        """Errors of virtual reads; only the read-out is rounded here. Keeps sizes and rho for the sites that follow."""
        steps, self.state = self.layout.steps, errors
        self._grow(number, errors, found)
        self.rho = self.stacks[number].error(self.raw)
        before = self.layout.last if number == len(steps) else steps[number].before
        after = self.layout.output if number == len(steps) else steps[number].columns
        coming = np.stack([errors[column] for column in before], 2)
        weight = np.abs(affine_map(self.forms, before, after)[0]) + folding_error(self.forms, before, after)[0]
        out = np.einsum("ctbs,bw->ctws", coming, weight)
        if number == len(steps):
            out[..., -1] += self.rho
        out *= 1 + (len(before) + out.shape[-1] + 8) * 2.0**-52
        out[self.bad] = np.inf
        reads = self.undropped(before, after, {column: out[:, :, i] for i, column in enumerate(after)}, found)
        self.coming = {column: up(errors.sum(-1), out.shape[-1]) for column, errors in reads.items()}
        return reads

    def carry(self, number: int, seen: Errors, found: list[Range]) -> Errors:
        return {column: self.state[column] for column in self.layout.steps[number].carried}

    def _grow(self, number: int, errors: Errors, found: list[Range]) -> None:
        """The sizes of the columns that the step before has written: at most its values, and its result less the
        linear part; cells on which they are beyond the sizes that Omega was chosen for are bad."""
        if number == 0:
            self.raw = np.repeat(self.stream.sizes[0][None], len(found[0].low), 0)
            self.raw[..., list(self.stream.columns.inputs)] = found[0].size
            self.bad = np.zeros(len(self.raw), dtype=bool)
        else:
            index = 2 * number - 1
            wanted = list(self.stream.fresh[index])
            grown = written_sizes(self.layout, number - 1, self.layer(index), wanted, self.coming, errors, found)
            self.raw = np.concatenate([self.raw, np.fmin(grown, self.stream.convex[index])], -1)
        allowed = self.stream.sizes[2 * number] * (1 + 2.0**-40)
        self.bad |= ~np.all(self.raw <= allowed, axis=(1, 2))

    # -- heads whose coordinates err separately -------------------------------------------------------------------

    def _known(self, site: Site) -> dict[str, float]:
        """What rho of a site's queries and values can be at most, by the sizes that the weights were made for."""
        number = self.step_of[site.op]
        most = self.stacks[number].error(self.stream.sizes[2 * number + 1])
        known = {}
        for kind in ("query", "value"):
            rows = [self.where[number][h, kind] for h, _ in self.writers[site.op]]
            known[kind] = max(float(most[:, row].max(initial=0.0)) for row in rows) * (1 + 2.0**-30)
        return known

    def local(self, site: Site) -> Local:
        return rule_of(site.family).loosened(site, self.setting, self.heads[site.op], self._known(site))

    def moved(self, site: Site, inputs: list[Array], ranges: list[Range]) -> Moved:
        number, known = self.step_of[site.op], self._known(site)
        width = self.layout.program.ops[site.op].width
        moved = Moved([e.copy() for e in inputs], np.zeros((*inputs[0].shape[:2], width)), self.bad.copy())
        heads = []
        for h, channels in self.writers[site.op]:
            rho = {kind: self.rho[..., self.where[number][h, kind]] for kind in ("query", "key", "value")}
            for kind, most in known.items():
                moved.broken[:] |= rho[kind].max((1, 2), initial=0.0) > most
            heads.append((rho, channels))
        rule, copies = rule_of(site.family), Copies(tuple(heads), known)
        rule.copied(site, self.setting, self.bounds[site.op], self.heads[site.op], copies, ranges, moved)
        return moved


def _unfolded(stream: Stream) -> AttentionOnly:
    """The network whose heads the plain form has: what they make of their reads as its source states it, and every
    number that does not depend on a read (constants, keys and values of registers, outputs) as the stream holds it."""
    layers = []
    for number, layer in enumerate(stream.source.layers):
        heads, fresh, groups = stream.layers[number], stream.fresh[number], []
        for g, group in enumerate(layer.heads()):
            own = [head for head in heads if head.place[1] == g]
            stated = ((name, stored(t)) for name, t in group.named_parameters())
            tables: dict[str, Any] = {name: np.repeat(t, len(own) // len(t), 0) for name, t in stated}
            tables["W_O"] = np.zeros_like(tables["W_O"])
            tables["W_O"][..., list(fresh)] = [head.output for head in own]
            if group.slots:
                registers = list(stream.columns.ids[1 : group.slots + 1])
                tables["M_K"], tables["M_V"] = ([getattr(h, name)[registers] for h in own] for name in ("key", "value"))
            for name in ("query",) if group.scope == "memory" else ("query", "key", "value"):
                _fixed(stream, own, name, tables)
            given = {name: torch.from_numpy(np.array(table)) for name, table in tables.items()}
            groups.append(Heads(group.scope, causal=group.causal, purpose=group.purpose, **given))
        skip = {name: t.detach().double() for name, t in (("S", layer.S), ("s", layer.s)) if t is not None}
        layers.append(AttentionLayer(groups, **skip))
    return AttentionOnly(layers)


def _fixed(stream: Stream, heads: Sequence[HeadTables], name: str, tables: dict[str, Any]) -> None:
    """Coordinates that read nothing are constants, taken as the stream holds them; it must read nothing there too."""
    letter = name[0].upper()
    width = getattr(heads[0], name).shape[1]
    weight = tables.get(f"W_{letter}", np.zeros((len(heads), 1, width)))
    bias = tables.get(f"b_{letter}", np.zeros((len(heads), width))).copy()
    for h, head in enumerate(heads):
        fixed = ~weight[h].any(0)
        table = np.delete(getattr(head, name)[:, fixed], list(stream.columns.ids), 0)
        if np.delete(table, FLAG, 0).any():
            raise CertificateError(f"a {name} of constants was changed, it reads the stream: {AGAIN}")
        bias[h, fixed] = table[FLAG]
    if bias.any() or f"b_{letter}" in tables:
        tables[f"b_{letter}"] = bias


def recertified(
    spec: PlainSpec, tensors: Mapping[str, Tensor], net: CertifiedModule, layers: Callable[[], Source] | None = None
) -> Certificate:
    """The certificate of tensors that are said to be the plain form of a network, itself in their dtype.

    `layers` reads the layers of a theorem; those of a compiled network are known.
    """
    dtype_of(tensors)
    try:
        source = layers() if layers else None
        if isinstance(net, CompiledNetwork):
            source = compiled_source(net)
        elif isinstance(net, CompiledProgram):
            source = program_source(net)
        if source is None:
            raise CertificateError("nothing is known of the layers of the network that the plain form was made from")
        sizes = reaches(net) if isinstance(net, CompiledNetwork) else ()
        return certificate_of(net, read(spec, tensors, source, sizes))
    except CertificateError:
        raise
    except AttnforgeError as error:
        raise CertificateError(f"no bound can be proved for these weights: {error}") from error


def certificate_of(net: nn.Module, stream: Stream) -> Certificate:
    """The certificate of a stream, as read off tensors, that stands for a network."""
    if isinstance(net, CompiledNetwork):
        return compiled_certificate(net, lambda stretch: FoldedLayers(net, stream, stretch))
    assert isinstance(net, CertifiedModule)
    _require_own(stream)
    return _excluding(net.recertify())


def _excluding(found: Certificate) -> Certificate:
    """A certificate that rests on exclusion as well."""
    lemmas = tuple(dict.fromkeys((*found.lemmas, "B6")))
    extra = (name for name in (UNDERFLOW, EXPLICIT) if name not in found.assumptions)
    return replace(found, lemmas=lemmas, assumptions=(*found.assumptions, *extra))


def compiled_certificate(net: CompiledNetwork, layers: Callable[[float], FoldedLayers]) -> Certificate:
    """The certificate of a compiled network in plain form; `layers` reads it, with heads bounded so far beyond their
    intervals."""
    try:
        proved = net.bound or 0.0
    except CertificateError:  # it has none, or not for its present weights
        proved = 0.0
    goal = max(net.eps, 1.05 * proved)  # folding costs a little more than what was proved for tier `memory`
    for stretch in STRETCHES:
        analysis = Propagation(layers(stretch))
        found = network_bound(analysis, goal, net.rtol, EFFORT, net.grid)
        if math.isfinite(found.bound):
            return _excluding(net.certificate_of(analysis, found))
    raise PrecisionError(
        f"no bound can be proved for the plain form in {dtype_name(net.dtype)}: its folded weights "
        "round more than the heads allow; compile with a smaller eps, or with dtype=torch.float64"
    )


def _require_own(stream: Stream) -> None:
    """Raise unless a stream is what the stored layers of its source fold to, bit by bit."""
    wanted = Stream(stream.source, stream.causal, stream.dtype, stream.room)
    folded(wanted, ())
    pairs = [(stream.readout, wanted.readout)]
    for mine, asked in zip(stream.layers, wanted.layers, strict=True):
        for head, other in zip(mine, asked, strict=True):
            pairs += [(getattr(head, name), getattr(other, name)) for name in ("query", "key", "value", "output")]
    given = stream.source.constants
    pairs += [] if given is None or stream.constants is None else [(stream.constants, stored(given))]
    if not all(np.array_equal(found, rounded(asked, stream.dtype)) for found, asked in pairs):
        raise CertificateError(f"weights of the plain transformer are not those of the construction: {AGAIN}")


# -- sizes of columns ----------------------------------------------------------------------------------------------


def written_sizes(
    layout: Layout,
    number: int,
    layer: AttentionLayer,
    wanted: Sequence[int],
    coming: Mapping[Column, Array],
    errors: Errors,
    found: list[Range],
) -> Array:
    """What heads of step `number` have written to columns `wanted` of its state, (cell, token, column).

    `coming` are the errors of what the heads read, by column, `errors` those of their results.
    """
    plan = layout.steps[number]
    skip, bias = skip_of(layer, len(plan.columns))
    sites = {site.op: site for site in plan.sites}
    place = {column: i for i, column in enumerate(plan.columns)}
    reads = {column: _widened(found, coming, column) for column in plan.columns}
    grown = []
    for c in wanted:
        value, channel = plan.after[c]
        error = errors[value, channel].sum(-1)
        low, high = found[value].low[..., channel] - error, found[value].high[..., channel] + error
        slip = np.abs(low) + np.abs(high)
        for column, weight in ((column, float(skip[at, c])) for column, at in place.items() if skip[at, c]):
            ends = [weight * end for end in reads[column]]
            low, high = low - np.maximum(*ends), high - np.minimum(*ends)
            slip = slip + np.abs(ends[0]) + np.abs(ends[1])
        low, high = low - bias[c], high - bias[c]
        size = np.maximum(np.abs(low), np.abs(high)) + 2.0**-46 * (slip + abs(bias[c]))
        site = sites[value]
        own = next(p.reads for p in plan.places(site) if c in p.writes)
        around, weights = [reads[plan.columns[i]] for i in own], [float(skip[i, c]) for i in own]
        better = rule_of(site.family).written(around, weights, float(bias[c]), len(set(own)) == 1)
        if better is not None:
            size = np.fmin(size, up(better + error, 16))
        grown.append(up(size, 8))
    return np.stack(grown, -1)


def _widened(found: list[Range], coming: Mapping[Column, Array], column: Column) -> tuple[Array, Array]:
    value, channel = column
    error = coming[column]
    return found[value].low[..., channel] - error, found[value].high[..., channel] + error


def reaches(net: CompiledNetwork) -> list[Array | None]:
    """For every layer of a compiled network the sizes of what its heads write, less linear parts, (token, column).

    Estimates, infinite where nothing is known: the certificate of the plain form proves its own sizes.
    """
    program = net.program
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, *outward_cells(program, net.grid, net.dtype))
        analysis = Propagation(net.reading())
        course = Course([], [], {})
        analysis.errors(found, course)
        sizes: list[Array | None] = []
        for i, step in enumerate(net.layout.steps):
            wanted = list(range(len(step.carried), len(step.after)))
            layer = analysis.reading.layer(2 * i + 1)
            coming = {column: error.sum(-1) for column, error in course.reads[i].items()}
            some = written_sizes(net.layout, i, layer, wanted, coming, course.states[i + 1], found).max(0)
            every = np.full((some.shape[0], len(step.after)), np.inf)
            every[:, wanted] = np.where(np.isnan(some), np.inf, some)
            sizes += [None, every]
    return [*sizes, None]
