"""How far a network in another basis can be from the one it was made from (lemma H6 of docs/theory.md).

The stream of a variant is written X' = X B + E: X are *virtual* columns, those of the plain form and some more that
only distractors write, B is the stored basis (column, direction), any numbers at all, and E is what is left, kept as
2-norms of parts of a row: directions that no column of the basis joins are parts of their own. A head of the variant
reads X' W' where the head it stands for reads X W, so that its coordinates differ by X (B W' - W) + E W' and by
rounding, all of it computed from what is stored. What heads write is X by definition, up to z (W_O' - W_O B) and
rounding, which go to E. So E does not depend on what the program computes; what errors of coordinates do to the
program's heads is said by its own proof (`rasp.network.proof`), which takes them from margins.

Rows are of three kinds: tokens, whose columns are known from the program, padding, whose columns are only bounded, and
registers, whose rows nothing should change. Numbers are float64, and every one that is rounded is moved up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from ...certificates.rounding import TINY, UNIT, gamma, up
from ...dtypes import Array, stored
from ...errors import CertificateError
from ...export.plain.spec import FLAG, PlainHead, PlainSpec, scale_of
from ...export.plain.stream import HeadTables, Stream, first_rows
from ...heads.token.bound import DEAD
from ...rasp.language import SOp
from ...rasp.network.compiled import CompiledProgram
from ...rasp.network.facts import Ids
from ...rasp.network.layout import ideal
from ...rasp.network.proof import LARGEST, Column, HeadError, Loose

TOKEN, PADDING, REGISTER = range(3)  # the kinds of rows
U64 = 2.0**-53  # the roundoff of what is computed here
VANISHED = 1e-300  # more than what squares of a row's numbers lose that are too small for float64
INTERFERES = 2.0**-12  # an entry of a table above which it is no rounding of any dtype, and followed value by value
CLOSE = 1.0 + 2.0**-30  # more than all roundings of one bound: sums of some thousand terms that are not negative


@dataclass(frozen=True, eq=False)
class Basis:
    """A stored basis (column, direction), and the parts of it that have nothing to do with each other."""

    rows: Array
    part: Ids  # of each direction
    column: Ids  # the part of each column
    spread: Array  # by how much each part can stretch a row

    @classmethod
    def of(cls, rows: Array) -> Basis:
        """The finest parts: directions that a column joins are in one."""
        part: Ids = np.arange(rows.shape[1], dtype=np.int64)
        column: Ids = np.zeros(len(rows), dtype=np.int64)
        joined = [np.flatnonzero(row) for row in rows]
        for at in joined:
            if len(at) > 1:
                part[np.isin(part, part[at])] = part[at].min()
        part = np.unique(part, return_inverse=True)[1].reshape(-1).astype(np.int64)
        for c, at in enumerate(joined):
            column[c] = part[at[0]] if len(at) else 0
        gram = np.abs(rows @ rows.T) + np.abs(rows) @ np.abs(rows.T) * (rows.shape[1] + 4) * U64
        most = gram.sum(1) * CLOSE
        spread = [math.sqrt(most[column == p].max(initial=0.0)) * CLOSE for p in range(int(part.max()) + 1)]
        return cls(rows, part, column, np.array(spread))

    def norms(self, table: Array) -> Array:
        """The norm of each part (part, row) of rows of directions."""
        order = np.argsort(self.part, kind="stable")
        starts = np.searchsorted(self.part[order], np.arange(len(self.spread)))
        sizes = np.abs(table.T[order])
        most = np.maximum.reduceat(sizes, starts, axis=0)
        share = sizes / np.where(most == 0, 1.0, most)[self.part[order]]  # squares of small numbers would vanish
        return np.asarray(most * np.sqrt(np.add.reduceat(share * share, starts, axis=0)) * CLOSE)

    def distance(self, found: Array, wanted: Array) -> Array:
        """The norm of each part (part, row) of found - wanted basis, from above; wanted is (row, column)."""
        rows = self.rows[: wanted.shape[1]]
        slip = (len(rows) + 4) * U64 * (np.abs(wanted) @ np.abs(rows) + np.abs(found))
        slip = np.where((wanted @ rows == 0) & (np.abs(wanted) @ np.abs(rows) == 0), 0.0, slip)
        return self.norms(np.abs(found - wanted @ rows) + slip)


@dataclass(frozen=True, eq=False)
class VirtualTable:
    """A stored table of a head: what it should be in the virtual columns, how far it is from that, and its norms."""

    wanted: Array  # (virtual column, coordinate)
    off: Array  # what it is less what it should be, and how far that may be rounded
    slip: Array
    norm: Array  # (part, coordinate), of the stored columns

    @classmethod
    def of(cls, basis: Basis, found: Array, wanted: Array) -> VirtualTable:
        """`found` is (direction, coordinate) as it is stored."""
        slip = (len(found) + 4) * U64 * (np.abs(basis.rows) @ np.abs(found))
        off = basis.rows @ found - wanted
        return cls(wanted, off, (slip + 2 * U64 * np.abs(off)) * CLOSE, basis.norms(found.T))

    @property
    def most(self) -> Array:
        """A bound of |off|."""
        return np.asarray(np.abs(self.off) + self.slip) * CLOSE


class Virtual:
    """What is known of the virtual columns on each kind of row: sizes, and which of them are one-hot codes."""

    def __init__(self, stream: Stream, net: CompiledProgram, width: int):
        columns, facts = stream.columns, net.facts
        self.size = np.zeros((3, width))
        self.error = np.zeros(width)  # of columns on tokens, where they are parts of codes
        self.size[[TOKEN, PADDING], FLAG] = 1.0
        self.size[REGISTER, list(columns.ids)] = 1.0
        self.size[TOKEN, list(columns.inputs)] = 1.0
        self.size[:2, list(columns.positions)] = 1.0
        if stream.source.constants is not None:
            self.size[:2, list(columns.constants)] = np.abs(stored(stream.source.constants)).max(0)
        self.ids, self.real = list(columns.ids), columns.inputs[-1]
        self.values = {op: len(facts.values(node)) for op, node in enumerate(facts.order)
                       if isinstance(node, SOp) and facts.listed(node)}  # fmt: skip
        self.codes: dict[int, list[int]] = {-1: list(columns.inputs[:-1])}  # columns by op; -1 are the tokens
        self.values[-1] = len(self.codes[-1])
        for feature, place in zip(net.layout.positions, columns.constants, strict=True):
            if feature.kind == "is":
                self.codes.setdefault(feature.op, []).append(place)
                found = stored(net.positions)[:, place - columns.constants.start]
                self.error[place] = np.abs(found - ideal(facts, feature, np.arange(len(found)))).max()

    def grow(self, fresh: Mapping[int, int], state: Sequence[Column], sizes: Sequence[float]) -> None:
        """Columns that the heads of a layer have written."""
        for c, place in fresh.items():
            column = state[c]
            self.size[TOKEN, place] = sizes[c] + column.error
            self.size[PADDING, place] = column.pad
            if column.feature.kind == "is":
                self.error[place] = column.error
                self.codes.setdefault(column.feature.op, []).append(place)

    def mass(self, kind: int, weights: Array) -> Array:
        """A bound of |sum of columns times weights|, weights (column, coordinate).

        Of a code one column is 1, so that its sum is one of the weights: half their range around the middle, which goes
        to the constants. Both flags are exactly 1 on tokens.
        """
        size, apart = self.size[kind].copy(), np.zeros((2, weights.shape[1]))  # constants, and what is around them
        if kind == REGISTER:
            size[self.ids] = 0.0
            apart[1] += np.abs(weights[self.ids]).max(0, initial=0.0)
        if kind == TOKEN:
            size[[FLAG, self.real]] = 0.0
            apart[0] = weights[FLAG] + weights[self.real]
            slip = np.abs(weights[FLAG]) + np.abs(weights[self.real])
            for op, group in self.codes.items():
                size[group] = self.error[group]
                some = weights[group]
                if len(group) != self.values.get(op):  # of a code that is not whole it may be none
                    some = np.concatenate([some, np.zeros((1, weights.shape[1]))])
                low, high = some.min(0), some.max(0)
                apart += np.stack([(low + high) / 2, (high - low) / 2])
                slip = slip + np.abs(low) + np.abs(high)
            apart[1] += 8 * len(self.codes) * U64 * slip
        return np.asarray((np.abs(apart[0]) + apart[1] + size @ np.abs(weights)) * CLOSE)

    def norm(self, kind: int, basis: Basis) -> Array:
        """A bound of the norm of each part of a row."""
        size = self.size[kind].copy()
        square = np.zeros(len(basis.spread))
        for group in [] if kind == PADDING else [self.ids] if kind == REGISTER else self.codes.values():
            rest = self.error[group].sum() if kind == TOKEN else 0.0
            size[group] = 0.0
            square[np.unique(basis.column[group])] += (1.0 + rest) ** 2
        np.add.at(square, basis.column, size * size)
        return np.asarray(np.sqrt(square + VANISHED) * basis.spread * CLOSE)


class Simulated:
    """A variant, read off its tensors, as something that simulates the network of a program."""

    def __init__(
        self, stream: Stream, net: CompiledProgram, spec: PlainSpec, tensors: Mapping[str, Array], basis: Array
    ):
        self.stream, self.spec, self.basis = stream, spec, Basis.of(basis)
        self.tensors = tensors
        self.dtype = stream.dtype
        self.u, self.tiny, self.dead = UNIT[self.dtype], TINY[self.dtype], DEAD[self.dtype]
        self.width = basis.shape[1]
        self.rate = float(gamma(self.width + 8, self.u))
        self.virtual = Virtual(stream, net, len(basis))
        self.blocks = _seats(stream, spec)
        self.error = self._first()
        #: Of the present layer: sizes of z, what of it is error, and, where z is a mean of slots, the sizes of these.
        self.written: list[tuple[Array, Array, Array | None]] = []
        self.known: list[tuple[int, Array, Array]] = []  # place in `written`, and the columns that tell its size better
        self.begun = -1
        self.layers = net.network.layers
        #: The virtual column of each column of the program's state; -1 where it is a multiple of one.
        self.places = [*stream.columns.inputs, *stream.columns.constants]

    def _first(self) -> Array:
        """How far the rows are off that enter the first block."""
        embed, rows = first_rows(self.stream)
        count = self.stream.columns.registers
        found = self.basis.distance(self.tensors["positions"], rows)
        given = self.basis.distance(self.tensors["embed.weight"].T, embed.T)
        positions, tokens = found[:, count:].max(1), given[:, :-1].max(1) + given[:, -1]
        sizes = self.basis.norms(self.tensors["positions"][count:]).max(1)
        sizes = sizes + 2 * self.basis.norms(self.tensors["embed.weight"].T).max(1)
        rounding = float(gamma(8, self.u)) * sizes + self.width * self.tiny
        return np.stack([positions + tokens + rounding, positions, found[:, :count].max(1, initial=0.0)]) * CLOSE

    # ---- what one head reads

    def _loose(self, table: VirtualTable, kind: int) -> Array:
        """How far computed coordinates can be from what they should be, on rows of a kind."""
        found = self.virtual.mass(kind, table.off) + self.virtual.mass(kind, table.slip) + self._ball(kind) @ table.norm
        return np.asarray((found + self.width * self.tiny) * CLOSE)

    def _norm(self, kind: int) -> Array:
        return np.asarray((self.virtual.norm(kind, self.basis) + self.error[kind]) * CLOSE)

    def _ball(self, kind: int) -> Array:
        """For each part of a row, what its error and the rounding of a product come to, for weights of norm 1."""
        return np.asarray(self.error[kind] + self.rate * self._norm(kind))

    def head(self, layer: int, group: int, state: Sequence[Column]) -> Loose:
        """The worst over the heads that share what one head of the network does; takes in what they write, too."""
        if self.begun != layer:
            self._begin(layer)
        seats, at = self.blocks[layer][1][group], {place: c for c, place in enumerate(self.places)}
        more = self._interference(layer, *seats[0], set(at))
        found = [self._look(layer, block, seat, more) for block, seat in seats]
        worst = {name: np.maximum.reduce([getattr(one, name) for one in found]) for name in Loose.__annotations__}
        for name, table in zip(("more_query", "more_key"), more, strict=True):
            worst[name] = np.zeros((len(state), len(found[0].query)))
            for place in np.flatnonzero(table.any(1)):
                worst[name][at[int(place)]] = table[place, : len(found[0].query)]
        return Loose(**worst)

    def _interference(self, layer: int, block: int, seat: int, now: set[int]) -> list[Array]:
        """What superposed codes that are there `now` do to the queries and the keys of a head that reads them, (virtual
        column, coordinate): it is known value by value, and so nothing that has to be allowed for."""
        head, tables = self._tables(layer, block, seat)
        found, k = [np.zeros_like(table.wanted) for table in tables[:2]], head.query.shape[1]
        for table, more in zip(tables, found, strict=False):
            for group in self.virtual.codes.values():
                reads = np.abs(table.wanted[group, :k]).any() and np.abs(table.off[group, :k]).max() > INTERFERES
                if reads and now.issuperset((*group, self.virtual.real)):
                    both = [*group, self.virtual.real]  # what all values have in common is taken off with the flag
                    more[both, :k] = table.off[both, :k]
        return found

    def _tables(self, layer: int, block: int, seat: int) -> tuple[HeadTables, list[VirtualTable]]:
        """What a head stands for, and its stored query, key and value."""
        about, (query, key, value, _) = (
            self.spec.heads[block][seat],
            stored_tables(self.spec, self.tensors, block, seat),
        )
        head = self.stream.layers[layer][self._index(layer, about)]
        if max(head.query.shape[1] + head.hiding, head.value.shape[1]) > query.shape[1]:
            raise CertificateError(
                f"'{about.purpose}' has {query.shape[1]} coordinates, which is too few for what it computes"
            )
        wanted = wanted_tables(self.stream, head, about.omega, query.shape[1], len(self.basis.rows))
        return head, [VirtualTable.of(self.basis, *pair) for pair in zip((query, key, value), wanted, strict=True)]

    def _begin(self, layer: int) -> None:
        """The heads of a layer that compute nothing which is needed, and the addition to the stream."""
        self.begun, self.written, self.known = layer, [], []
        for block, seat in self.blocks[layer][2]:
            query, key, value, back = stored_tables(self.spec, self.tensors, block, seat)
            table = VirtualTable.of(self.basis, value, self.basis.rows @ value)
            norm = max(float(self._norm(kind).sum()) for kind in range(3))
            q, k, v = (norm * float(np.linalg.norm(third)) for third in (query, key, value))
            if not max(q, k, v, q * k) < LARGEST[self.dtype]:
                raise CertificateError(f"numbers of head {seat} of block {block} may overflow")
            sizes = [self.virtual.mass(k, table.wanted) + self._loose(table, k) for k in range(3)]
            most = np.maximum.reduce(sizes) * self._room()
            writes = list(self.spec.heads[block][seat].writes)
            if any(c < self.stream.width for c in writes):
                raise CertificateError(f"head {seat} of block {block} says that it writes what others read")
            wanted = np.zeros((len(back), len(self.basis.rows)))
            if writes:
                wanted[:, writes] = back @ np.linalg.pinv(self.basis.rows[writes])
            self._write(np.stack([most] * 3), back, wanted, True)
            self.virtual.size[:, writes] += most @ np.abs(wanted[:, writes]) * CLOSE

    def _room(self) -> float:
        rows = self.spec.registers + self.spec.tokens
        return (1 + float(gamma(rows + 16, self.u))) ** 2

    def _write(self, sizes: Array, back: Array, wanted: Array, everywhere: bool, slots: Array | None = None) -> None:
        """Sizes of z are (kind, coordinate), those of slots (slot, coordinate). What registers are given is an error
        unless it is known `everywhere`."""
        whole, off = self.basis.norms(back), self.basis.distance(back, wanted)
        slips = np.stack([off + self.rate * whole] * 2 + [(off if everywhere else whole) + self.rate * whole])
        self.written.append((sizes, slips.transpose(0, 2, 1) * CLOSE, slots))

    def _look(self, layer: int, block: int, seat: int, known: Sequence[Array]) -> Loose:
        """How loose a head is, but for what is known of its queries and keys; takes in what it writes."""
        about, back = self.spec.heads[block][seat], stored_tables(self.spec, self.tensors, block, seat)[3]
        head, tables = self._tables(layer, block, seat)
        d, k, v = len(back), head.query.shape[1], head.value.shape[1]
        q, ks, vs = ([self._loose(table, kind) for kind in range(3)] for table in tables)
        rest = [
            self._loose(replace(table, off=table.off - more), TOKEN) for table, more in zip(tables, known, strict=False)
        ]
        outside = vs[REGISTER] if head.scope == "tokens" else np.maximum.reduce(vs)
        logits = self._hidden(head, about, tables, q, ks)
        sizes = [self.virtual.mass(kind, tables[2].wanted) + vs[kind] for kind in range(3)]
        most = np.stack([np.maximum(sizes[TOKEN], sizes[REGISTER]), np.maximum.reduce(sizes), outside])
        output = np.zeros((d, len(self.basis.rows)))
        fresh = list(self.stream.fresh[layer].values())
        mine = [i for i, place in enumerate(fresh) if place in about.writes]
        output[:v, [fresh[i] for i in mine]] = head.output[:, mine]
        self.known.append((len(self.written), head.output[:, mine], np.array([fresh[i] for i in mine], dtype=int)))
        rows = np.zeros((head.slots, d)) + outside
        rows[:, :v] += np.abs(head.value[self.virtual.ids[1 : head.slots + 1]])
        told = rows * self._room() if head.scope == "memory" else None
        self._write(most * self._room(), back, output, False, told)
        slots = self._slots(head, tables[1])[:, :k]
        return Loose(rest[0][:k], rest[1][:k], ks[PADDING][:k], slots, vs[TOKEN][:v], vs[PADDING][:v], outside[:v],
                     *logits, d + 8)  # fmt: skip

    def _index(self, layer: int, about: PlainHead) -> int:
        return next(i for i, head in enumerate(self.stream.layers[layer]) if head.place == about.place)

    def _slots(self, head: HeadTables, table: VirtualTable) -> Array:
        """How far the keys of the registers that a head sees can be off, (slot, coordinate)."""
        rest = self._ball(REGISTER) @ table.norm + self.width * self.tiny
        more = self.virtual.size[REGISTER, self.stream.width :] @ table.most[self.stream.width :]
        return np.asarray((table.most[self.virtual.ids[1 : head.slots + 1]] + rest + more) * CLOSE)

    def _hidden(
        self,
        head: HeadTables,
        about: PlainHead,
        tables: Sequence[VirtualTable],
        q: Sequence[Array],
        ks: Sequence[Array],
    ) -> tuple[float, float]:
        """What exclusion can add to the logit of a key that is seen, and of padding; raises unless all keys that must
        not be seen weigh an exact 0."""
        k, d = head.query.shape[1], len(q[0])
        most_q, most_k = ([self.virtual.mass(kind, table.wanted) for kind in range(3)] for table in tables[:2])
        rest, rate = slice(k, d), float(gamma(d + 8, self.u))

        def moved(row: int, kind: int) -> float:
            one = most_q[row][rest] @ ks[kind][rest]
            return float(one + q[row][rest] @ (most_k[kind] + ks[kind])[rest]) * CLOSE

        for row, low in zip((TOKEN, REGISTER), reaches(self.virtual, head, tables, q, ks), strict=True):
            products = [float((most_q[row] + q[row]) @ (most_k[kind] + ks[kind])) for kind in range(3)]
            noise = max(moved(row, kind) for kind in range(3)) + rate * sum(products)
            lead = about.omega - (low + 2 * noise) * CLOSE
            if not lead > self.dead:
                raise HeadError(
                    f"'{about.purpose}': keys that it must not see are behind by {lead:.4g}, of which {self.dead:.4g} "
                    "are needed; the basis mixes too much into too few digits",
                    about.purpose, lead, self.dead,
                )  # fmt: skip
        return max(moved(TOKEN, TOKEN), moved(TOKEN, REGISTER)), moved(TOKEN, PADDING)

    # ---- what a layer writes

    def after(self, layer: int, state: Sequence[Column], sizes: Sequence[float]) -> None:
        """The rows after a layer."""
        if self.begun != layer:
            self._begin(layer)
        self.virtual.grow(self.stream.fresh[layer], state, sizes)
        self.places = [self._placed(layer, c) for c in range(len(state))]
        for at, output, places in self.known:
            found = self.written[at][0]
            for j, row in enumerate(output):
                only = np.flatnonzero(row)
                if len(only) == 1 and (output[:, only[0]] != 0).sum() == 1:
                    known = self.virtual.size[TOKEN, places[only[0]]] / abs(row[only[0]]) * CLOSE
                    found[TOKEN, j] = min(found[TOKEN, j], known)
        if not self.blocks[layer][0]:
            return
        for most, slips, slots in self.written:
            added = np.einsum("kj,kjp->kp", most, slips)
            if slots is not None:  # tokens and padding see slots alone: of a code one coordinate is 1
                means = np.einsum("sj,kjp->ksp", slots, slips[:REGISTER]).max(1)
                added[:REGISTER] = np.minimum(added[:REGISTER], means * CLOSE)
            self.error = self.error + added
        added = np.stack([self.u * self._norm(kind) for kind in range(3)])
        self.error = (self.error + np.where(self.error > 0, added + self.width * self.tiny, 0.0)) * CLOSE
        if not max(float(self._norm(kind).max()) for kind in range(3)) < LARGEST[self.dtype]:
            raise CertificateError("numbers of a variant may overflow")

    def _placed(self, layer: int, c: int) -> int:
        """The virtual column of a column after a layer: written there, or carried as it is."""
        if c in self.stream.fresh[layer]:
            return self.stream.fresh[layer][c]
        carried = stored(cast(torch.Tensor, self.layers[layer].S))[:, c]
        j = int(np.flatnonzero(carried)[0])
        return self.places[j] if carried[j] == 1 else -1

    def readout(self, state: Sequence[Column]) -> Array:
        """How far the outputs are off, on tokens."""
        weight, bias = self.tensors["readout.weight"].T, self.tensors["readout.bias"]
        wanted = np.zeros((len(self.basis.rows), weight.shape[1]))
        wanted[: self.stream.width] = self.stream.readout
        wanted[FLAG] = 0.0
        slack = self._loose(VirtualTable.of(self.basis, weight, wanted), TOKEN)
        return np.asarray(up(slack + np.abs(bias - self.stream.readout[FLAG]) + self.rate * np.abs(bias), 16))


def stored_tables(
    spec: PlainSpec, tensors: Mapping[str, Array], block: int, seat: int
) -> tuple[Array, Array, Array, Array]:
    """Query, key and value (direction, coordinate) and output (coordinate, direction) of a head, without its scale."""
    projection = tensors[f"blocks.{block}.attention.in_proj_weight"]
    width = projection.shape[1]
    d = width // len(spec.heads[block])
    into = projection.reshape(3, -1, d, width)[:, seat]
    back = tensors[f"blocks.{block}.attention.out_proj.weight"].T.reshape(-1, d, width)[seat]
    return into[0].T / scale_of(d), into[1].T, into[2].T, back


def wanted_tables(stream: Stream, head: HeadTables, omega: float, d: int, width: int) -> tuple[Array, Array, Array]:
    """What query, key and value are of the virtual columns: content, then what hides keys, then nothing."""
    group, k = stream.source.layers[head.place[0]].heads()[head.place[1]], head.query.shape[1]
    hides = stream.exclusion(group)
    query, key, value = (np.zeros((width, d)) for _ in range(3))
    query[: len(head.query), :k], key[: len(head.key), :k] = head.query, head.key
    value[: len(head.value), : head.value.shape[1]] = head.value
    query[: len(hides[0]), k : k + head.hiding] = omega * hides[0]
    key[: len(hides[1]), k : k + head.hiding] = hides[1]
    return query, key, value


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused afterwards
def reaches(
    virtual: Virtual, head: HeadTables, tables: Sequence[VirtualTable], q: Sequence[Array], ks: Sequence[Array]
) -> tuple[float, float]:
    """By how much content alone can put a key that must not be seen ahead of those that are, for tokens and registers.

    A token always sees itself, or the slots; a register has no content but errors.
    """
    content = slice(0, head.query.shape[1])
    queries = [(virtual.mass(kind, tables[0].wanted) + q[kind])[content] for kind in range(3)]
    keys = [(virtual.mass(kind, tables[1].wanted) + ks[kind])[content] for kind in range(3)]
    slots = np.abs(head.key[virtual.ids[1 : head.slots + 1]]).max(0, initial=0.0) + ks[REGISTER][content]
    seen = float(queries[TOKEN] @ (slots if head.scope == "memory" else keys[TOKEN]))
    banned = float(queries[TOKEN] @ ks[REGISTER][content])
    if head.scope == "memory" or head.hiding > 1:
        banned = max(banned, *(float(queries[TOKEN] @ keys[kind]) for kind in (TOKEN, PADDING)))
    return (seen + banned) * CLOSE, 2 * max(float(queries[REGISTER] @ key) for key in keys) * CLOSE


Seats = list[tuple[int, int]]


def _seats(stream: Stream, spec: PlainSpec) -> list[tuple[list[int], dict[int, Seats], Seats]]:
    """For every layer of the source its block, for every head there (by group) its seats, and the seats of all others.

    Every column that a head writes must be written by one seat of it, no more and no less.
    """
    found: list[tuple[list[int], dict[int, Seats], Seats]] = []
    block = 0
    for number, heads in enumerate(stream.layers):
        if not heads:
            found.append(([], {}, []))
            continue
        if block == len(spec.heads):
            raise CertificateError("the variant has fewer blocks than its network has layers with heads")
        seats: dict[int, Seats] = {head.place[1]: [] for head in heads}
        others: Seats = []
        left = {head.place: [stream.fresh[number][c] for c, column in zip(
            stream.fresh[number], head.output.T, strict=True) if column.any()] for head in heads}  # fmt: skip
        for seat, about in enumerate(spec.heads[block]):
            if about.place not in left:
                others.append((block, seat))
                continue
            for column in about.writes:
                if column not in left[about.place]:
                    raise CertificateError(f"head {seat} of block {block} writes what is not its own, or was written")
                left[about.place].remove(column)
            seats[about.place[1]].append((block, seat))
        missing = [place for place, columns in left.items() if columns] or [p for p in left if not seats[p[1]]]
        if missing:
            raise CertificateError(f"block {block} of the variant lacks a head of its network: {missing[0]}")
        found.append(([block], seats, others))
        block += 1
    if block != len(spec.heads):
        raise CertificateError("the variant has more blocks than its network has layers with heads")
    return found


def numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Stored tensors as float64 arrays; `CertificateError` where a number is not finite."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CertificateError(f"no bound holds for weights that are not finite: {name}")
    return {name: stored(tensor) for name, tensor in tensors.items()}
