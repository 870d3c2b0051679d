"""How far a network of numbers in another basis can be from its program (lemma H7 of docs/theory.md).

As in `simulation`, the stream of a variant is X' = X B + E: X are *virtual* columns, B is the stored basis, any numbers
at all, and E is kept as 2-norms of parts of a row. Here columns hold numbers, not codes, and heads have no margins to
take errors from. So every head is compared with a *reference*: the head of the plain form that the network folds to, in
exact arithmetic, at the virtual columns as they are, over the keys that it may see. `Turned` bounds the distance of the
two means from stored tensors alone. The reference obeys the analysis of the plain form (`FoldedLayers`), whose numbers
may be rounded or not; what the distance does to the output is for the same analysis to say, which takes it as one more
error of each result (`TurnedLayers`).

Rows are of two kinds: tokens, whose columns have the sizes that the analysis proves, and registers, whose rows nothing
should change. Numbers are float64, and every one that is rounded is moved up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...certificates.certificate import Certificate
from ...certificates.rounding import TINY, UNIT, exp_ulps, gamma, up
from ...compiler.compiled import CompiledNetwork
from ...compiler.course import Errors
from ...dtypes import Array, dtype_name, stored
from ...errors import CertificateError, PrecisionError
from ...export.plain.certificate import FoldedLayers, compiled_certificate
from ...export.plain.spec import FLAG, PlainHead, PlainSpec
from ...export.plain.stream import HeadTables, Stream, first_rows
from ...heads.rule import Moved
from ...heads.site import Site
from ...heads.token.bound import DEAD
from ...programs.enclose import Range
from ...rasp.network.facts import Ids, Mask
from ...rasp.network.proof import LARGEST
from .simulation import CLOSE, VANISHED, Basis, VirtualTable, stored_tables, wanted_tables

TOKEN, REGISTER = range(2)  # the kinds of rows
FEW = 4  # memory slots of a head whose keys are compared two by two: gates have one or two


class Turned:
    """A variant, read off its tensors, beside the heads of a plain form: how far what each of them gives can be off.

    `folded` has the tables, `known` are the sizes of what its heads write. `stream` has them again, with sizes that
    leave room for what is found here: whoever proves them proves them for the variant.
    """

    def __init__(
        self, folded: Stream, known: Sequence[Array | None], spec: PlainSpec, tensors: Mapping[str, Array], basis: Array
    ):
        self.stream = stream = replace(folded, layers=[], sizes=[], convex=[])
        given = stream.source.constants
        stream.constants = None if given is None else stored(given)
        embed, positions = first_rows(stream)
        stream.begin(embed, positions[stream.columns.registers :])
        self.spec, self.tensors, self.basis = spec, tensors, Basis.of(basis)
        self.u, self.tiny, self.most = (table[stream.dtype] for table in (UNIT, TINY, LARGEST))
        self.width, self.rows = basis.shape[1], spec.registers + spec.tokens
        self.rate = float(gamma(self.width + 8, self.u))
        self.lost = self.width**2 * self.tiny  # what underflows in the products of a whole row
        self.ids = list(stream.columns.ids)
        self.size = np.zeros((2, len(basis)))  # of the virtual columns; ids of registers are counted apart
        self.size[TOKEN, : stream.columns.first] = stream.sizes[0].max(0)
        self.error = self._first()
        self.off: list[Array] = []  # for each layer of the source, of its fresh columns
        blocks = iter(range(len(spec.heads)))
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large for any bound is refused
            for number, heads in enumerate(folded.layers):
                stream.add(heads, known[number])
                self.off.append(self._layer(number, next(blocks, None)) if heads else np.zeros(0))
            self.readout = self._readout()
        if next(blocks, None) is not None:
            raise CertificateError("the variant has more blocks than its network has layers with heads")

    def _first(self) -> Array:
        """How far the rows are off that enter the first block, (kind, part)."""
        embed, rows = first_rows(self.stream)
        count, source = self.stream.columns.registers, self.stream.source
        largest = np.maximum(np.abs(source.low), np.abs(source.high)).max(0)
        found = self.basis.distance(self.tensors["positions"], rows)
        given = self.basis.distance(self.tensors["embed.weight"].T, embed.T) @ largest
        sizes = self.basis.norms(self.tensors["positions"][count:]).max(1)
        sizes = sizes + 2 * self.basis.norms(self.tensors["embed.weight"].T) @ largest
        rounding = float(gamma(len(largest) + 8, self.u)) * sizes + self.lost
        return np.stack([found[:, count:].max(1) + given + rounding, found[:, :count].max(1, initial=0.0)]) * CLOSE

    # ---- what is known of rows

    def _mass(self, kind: int, weights: Array) -> Array:
        """A bound of |sum of columns times weights|, weights (column, coordinate)."""
        own = np.abs(weights[self.ids]).max(0) if kind == REGISTER else 0.0
        return np.asarray((self.size[kind] @ np.abs(weights) + own) * CLOSE)

    def _norm(self, kind: int) -> Array:
        """A bound of the norm of each part of a row as computed."""
        square = np.zeros(len(self.basis.spread))
        np.add.at(square, self.basis.column, self.size[kind] ** 2)
        if kind == REGISTER:
            square[np.unique(self.basis.column[self.ids])] += 1.0
        return np.asarray((np.sqrt(square + VANISHED) * self.basis.spread + self.error[kind]) * CLOSE)

    def _noise(self, kind: int, table: VirtualTable) -> Array:
        """What the error of a row and the rounding of a product come to in coordinates."""
        return np.asarray((self.error[kind] + self.rate * self._norm(kind)) @ table.norm + self.lost)

    def _loose(self, kind: int, table: VirtualTable) -> Array:
        """How far computed coordinates can be from what they should be."""
        return (self._mass(kind, table.most) + self._noise(kind, table)) * CLOSE

    def _slots(self, slots: int, table: VirtualTable) -> Array:
        """The same for the registers that a head sees, (slot, coordinate)."""
        further = self.size[REGISTER] @ table.most
        return np.asarray((table.most[self.ids[1 : slots + 1]] + further + self._noise(REGISTER, table)) * CLOSE)

    # ---- the heads of a layer

    def _layer(self, number: int, block: int | None) -> Array:
        """How far the fresh columns of a layer are off; takes in what its block writes."""
        if block is None:
            raise CertificateError("the variant has fewer blocks than its network has layers with heads")
        fresh = self.stream.fresh[number]
        heads = {head.place: head for head in self.stream.layers[number]}
        left = {place: {c for c, column in zip(fresh.values(), head.output.T, strict=True) if column.any()}
                for place, head in heads.items()}  # fmt: skip
        seen, columns = set(), np.array(list(fresh.values()), dtype=np.int64)
        off, written, further = np.zeros(len(fresh)), np.zeros_like(self.error), np.zeros_like(self.size)
        for seat, about in enumerate(self.spec.heads[block]):
            if about.place not in heads:
                found, grown = self._free(block, seat)
                written, further = written + found, further + grown
                continue
            seen.add(about.place)
            if not set(about.writes) <= left[about.place]:
                raise CertificateError(f"head {seat} of block {block} writes what is not its own, or was written")
            left[about.place] -= set(about.writes)
            head, mine = heads[about.place], np.isin(columns, about.writes)
            slip, found = self._head(head, about, block, seat, columns, mine)
            written = written + found
            off = off + np.where(mine, slip[: len(head.output)] @ np.abs(head.output), 0.0)
        missing = [place for place in heads if left[place] or place not in seen]
        if missing:
            raise CertificateError(f"block {block} of the variant lacks a head of its network: {missing[0]}")
        off = off * CLOSE
        self.stream.sizes[number + 1][:, columns] += off
        self.stream.convex[number] += off
        self.size[TOKEN, columns] = self.stream.sizes[number + 1][:, columns].max(0)
        self.size = (self.size + further) * CLOSE
        self.error = (self.error + written) * CLOSE
        self.error = (self.error + self.u * np.stack([self._norm(kind) for kind in range(2)]) + self.lost) * CLOSE
        self._within(f"block {block}", self._norm(TOKEN), self._norm(REGISTER))
        return off

    def _within(self, where: str, *parts: Array | float) -> None:
        largest = float(np.max([np.max(part) for part in parts]))  # numpy's maximum keeps what is no number
        if not largest < self.most:
            raise CertificateError(f"numbers of {where} may be as large as {largest:.3g}, and overflow")

    def _room(self) -> float:
        return float((1 + gamma(self.rows + 16, self.u)) ** 2)

    def _written(self, z: Array, back: Array, wanted: Array, everywhere: bool) -> Array:
        """What is written beside virtual columns (kind, part), where z is at most this large, (kind, coordinate); on
        registers all of it, unless it is known `everywhere`."""
        whole, off = self.basis.norms(back), self.basis.distance(back, wanted)
        slips = np.stack([off + self.rate * whole, (off if everywhere else whole) + self.rate * whole])
        return np.asarray(np.einsum("kj,kpj->kp", z, slips) * CLOSE)

    def _free(self, block: int, seat: int) -> tuple[Array, Array]:
        """A head that stands for none: what it writes beside the columns that are its own, and into these."""
        query, key, value, back = stored_tables(self.spec, self.tensors, block, seat)
        norm = float(np.max([self._norm(kind).sum() for kind in range(2)]))
        q, k, v = (norm * float(np.linalg.norm(table)) for table in (query, key, value))
        self._within(f"head {seat} of block {block}", q, k, v, q * k)
        table = VirtualTable.of(self.basis, value, self.basis.rows @ value)
        z = np.max([self._mass(kind, table.wanted) + self._loose(kind, table) for kind in range(2)], 0) * self._room()
        writes = list(self.spec.heads[block][seat].writes)
        if any(c < self.stream.width for c in writes):
            raise CertificateError(f"head {seat} of block {block} says that it writes what others read")
        wanted, further = np.zeros((len(back), len(self.basis.rows))), np.zeros_like(self.size)
        if writes:
            wanted[:, writes] = back @ np.linalg.pinv(self.basis.rows[writes])
            further[:, writes] = z @ np.abs(wanted[:, writes]) * CLOSE
        return self._written(np.stack([z, z]), back, wanted, True), further

    def _head(
        self, head: HeadTables, about: PlainHead, block: int, seat: int, columns: Ids, mine: Mask
    ) -> tuple[Array, Array]:
        """How far each coordinate of a head's mean can be from that of its reference, and what it writes to E."""
        *found, back = stored_tables(self.spec, self.tensors, block, seat)
        k, v, d = head.query.shape[1], head.value.shape[1], found[0].shape[1]
        if max(k + head.hiding, v) > d:
            raise CertificateError(f"'{about.purpose}' has {d} coordinates, which is too few for what it computes")
        wanted = wanted_tables(self.stream, head, about.omega, d, len(self.basis.rows))
        query, key, value = (VirtualTable.of(self.basis, *pair) for pair in zip(found, wanted, strict=True))
        slots = self.ids[1 : head.slots + 1]
        alone = head.scope == "memory"
        if alone and not slots:
            raise CertificateError(f"'{about.purpose}' has no key to see")
        keys = [(np.abs(key.wanted[slots]), self._slots(head.slots, key))]
        values = [(value.wanted[slots], self._slots(head.slots, value))]
        if not alone:
            own = self._mass(TOKEN, value.wanted)[None]
            keys.append((self._mass(TOKEN, key.wanted)[None], self._loose(TOKEN, key)[None]))
            values.append((np.concatenate([own, -own]), self._loose(TOKEN, value)[None]))
        moved = self._logits(head, about, query, key, np.concatenate([k for k, _ in keys]),
                             np.concatenate([e for _, e in keys]))  # fmt: skip
        among = np.concatenate([some for some, _ in values])
        error = np.concatenate([e for _, e in values]).max(0)
        largest = (np.abs(among).max(0) + error) * self._room()
        apart = min(moved / 2, 1.0) * (among.max(0) - among.min(0))
        slip = np.fmin(apart, self._paired(head, moved, d)) + error
        slip = slip + float(gamma(2 * self.rows + 24, self.u)) * largest + 2 * self.rows * self.tiny * (1 + largest)
        outside = self._loose(REGISTER, value)  # registers see others, whose values should be 0, or tokens likewise
        outside = outside if head.scope == "tokens" else np.maximum(outside, self._loose(TOKEN, value))
        output = np.zeros((d, len(self.basis.rows)))
        output[:v, columns[mine]] = head.output[:, mine]
        z = np.stack([largest, outside * self._room()])
        every = [self._mass(kind, value.wanted) + self._loose(kind, value) for kind in range(2)]
        self._within(f"'{about.purpose}'", z, *every)
        return slip * CLOSE, self._written(z, back, output, False)

    def _logits(
        self, head: HeadTables, about: PlainHead, query: VirtualTable, key: VirtualTable, keys: Array, errors: Array
    ) -> float:
        """How far the logits of keys that a token sees can be off, rounding of the exponential included; raises unless
        all keys that must not be seen weigh an exact 0. `keys` (key, coordinate) are the sizes of those it sees."""
        k, d, dead = head.query.shape[1], keys.shape[1], DEAD[self.stream.dtype]
        kinds = range(2)
        asks, asked = ([self._mass(kind, query.wanted) for kind in kinds], [self._loose(kind, query) for kind in kinds])
        told, shown = ([self._mass(kind, key.wanted) for kind in kinds], [self._loose(kind, key) for kind in kinds])
        rate = float(gamma(d + 8, self.u))

        def noise(kind: int, size: Array, error: Array) -> Array:
            exact = error @ asks[kind] + (size + error) @ asked[kind]
            return np.asarray((exact + rate * ((size + error) @ (asks[kind] + asked[kind])) + d * self.tiny) * CLOSE)

        content = slice(0, k)
        seen = float((keys[:, content] @ asks[TOKEN][content]).max())
        banned = 0.0
        if head.scope == "memory" or head.hiding > 1:
            banned = float(told[TOKEN][content] @ asks[TOKEN][content])
        beside = float(np.max([(told[kind] + shown[kind])[content] @ asked[REGISTER][content] for kind in kinds]))
        for kind, reach in ((TOKEN, seen + banned), (REGISTER, 2 * beside)):
            slack = float(np.max([noise(kind, told[other], shown[other]) for other in kinds]))
            lead = about.omega - (reach + 2 * slack) * CLOSE
            if not lead > dead:
                raise PrecisionError(
                    f"'{about.purpose}': keys that it must not see are behind by {lead:.4g}, of which {dead:.4g} are "
                    f"needed; a rotated stream in {dtype_name(self.stream.dtype)} has too few digits for it"
                )
        off = noise(TOKEN, keys, errors)
        largest = keys[:, content] @ asks[TOKEN][content] + off
        every = [(asks[i] + asked[i]) @ (told[j] + shown[j]) for i in kinds for j in kinds]
        self._within(f"'{about.purpose}'", *every, *asks, *asked, *told, *shown)
        return float(((off + 2 * self.u * largest.max()).max() + (exp_ulps() + 1) * self.u) * CLOSE)

    def _paired(self, head: HeadTables, moved: float, d: int) -> Array:
        """The same for heads that see few keys: where two logits are far apart, errors of both do nothing, and where
        they are close, values that differ by a multiple of what the logits differ by are close too."""
        pairs, keys = self._pairs(head)
        if not pairs:
            return np.full(d, np.inf)
        most = np.zeros(head.value.shape[1])
        size = self.size[TOKEN, : len(head.value)]
        for gap, sizes, between, count in pairs:
            scale = np.abs(gap).max(initial=0.0) or 1.0  # logits of gates are huge: their squares might overflow
            share = (gap / scale) @ between / max(float((gap / scale) @ (gap / scale)), 0.5) / scale
            slip = (head.query.shape[1] + 8) * 2.0**-51 * (np.abs(between) + np.outer(sizes, np.abs(share)))
            rest = size @ (np.abs(between - np.outer(gap, share)) + slip)
            most = np.maximum(most, 3 * moved * np.abs(share) + min(moved / 2, 1.0) * count * rest)
        return np.concatenate([(keys - 1) * most * CLOSE, np.zeros(d - len(most))])

    def _pairs(self, head: HeadTables) -> tuple[list[tuple[Array, Array, Array, int]], int]:
        """For each kind of pair of keys that a head sees: the difference of its logits (column,), sizes of the terms of
        that, and the difference of its values (column, coordinate), all affine in the columns of so many rows; and how
        many keys there are. No pairs where this is not so, or where there are too many."""
        rest = [FLAG, *self.ids]
        key, value = head.key.copy(), head.value.copy()
        key[self.ids], value[self.ids] = 0.0, 0.0
        if head.scope == "tokens" and not head.slots and not np.delete(head.query, FLAG, 0).any():
            key[FLAG], value[FLAG] = 0.0, 0.0  # of all keys alike
            gap, sizes = key @ head.query[FLAG], np.abs(key) @ np.abs(head.query[FLAG])
            return [(gap, sizes, value, 2)], self.stream.columns.tokens
        if head.scope != "self" or not 0 < head.slots <= FEW or np.delete(head.key, rest, 0).any():
            return [], 0
        slots, flag = self.ids[1 : head.slots + 1], np.eye(len(value))[FLAG]
        keys = [head.key[FLAG], *head.key[slots]]
        values = [value, *(np.outer(flag, head.value[r]) for r in slots)]
        found = []
        for a in range(len(keys)):
            for b in range(a):
                sizes = np.abs(head.query) @ (np.abs(keys[a]) + np.abs(keys[b]))
                found.append((head.query @ (keys[a] - keys[b]), sizes, values[a] - values[b], 1))
        return found, len(keys)

    def _readout(self) -> Array:
        """How far the outputs are off, on tokens."""
        weight, bias = self.tensors["readout.weight"].T, self.tensors["readout.bias"]
        wanted = np.zeros((len(self.basis.rows), weight.shape[1]))
        wanted[: self.stream.width] = self.stream.readout
        wanted[FLAG] = 0.0
        slack = self._loose(TOKEN, VirtualTable.of(self.basis, weight, wanted))
        return up(slack + np.abs(bias - self.stream.readout[FLAG]) + self.rate * np.abs(bias), 16)


class TurnedLayers(FoldedLayers):
    """The plain form of a compiled network in another basis: what it is off by is one more error of each result."""

    def __init__(self, net: CompiledNetwork, turned: Turned, stretch: float = 0.0):
        super().__init__(net, turned.stream, stretch)
        self.turned = turned
        self.off: dict[int, Array] = {}  # of every operation's channels
        for number, step in enumerate(self.layout.steps):
            for c, slip in zip(self.stream.fresh[2 * number + 1], turned.off[2 * number + 1], strict=True):
                op, channel = step.after[c]
                self.off.setdefault(op, np.zeros(net.program.ops[op].width))[channel] += slip

    def moved(self, site: Site, inputs: list[Array], ranges: list[Range]) -> Moved:
        found = super().moved(site, inputs, ranges)
        return replace(found, extra=up(found.extra + self.off.get(site.op, 0.0)))

    def reads(self, number: int, errors: Errors, found: list[Range]) -> Errors:
        reads = super().reads(number, errors, found)
        if number == len(self.layout.steps):
            for i, column in enumerate(self.layout.output):
                reads[column][..., -1] = up(reads[column][..., -1] + self.turned.readout[i])
        return reads


def turned_certificate(net: CompiledNetwork, turned: Turned) -> Certificate:
    """The certificate of a variant that stands for a compiled network."""
    return compiled_certificate(net, lambda stretch: TurnedLayers(net, turned, stretch))
