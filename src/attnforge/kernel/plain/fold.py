"""Compiled networks in plain form: virtual values, and how far every coordinate is from them (lemma K32).

The network that the file describes has columns between its layers; a plain transformer has none: its heads read sums
over the whole stream. Call virtual what that network's affine maps make, in real arithmetic, of the input, the
constants and what heads have written. A coordinate of a head is then what the network's head makes of virtual columns,
up to the difference of the stored weights and the exact fold of the network's, times the columns' sizes, and rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flint import arb, fmpq, fmpq_mat

from ...errors import CertificateError
from ..balls import ONE, ZERO, NotProved, down, hull, largest, size, up
from ..derivation import Place as SitePlace
from ..file import Saved, Tensor, outward
from ..layers import TABLES, Errors, Layer
from ..program import Program, exact, number, read
from ..scalar import HeadSum, Table
from ..values import Blind, Entry, Value
from .stream import FLAG, KEY, QUERY, VALUE, Group, Head, Place, Stream, source_of

LETTERS = "QKV"
COVERED = ("apply", "product", "attention", "softmax", "max_tokens", "mix")


@dataclass(frozen=True)
class Loose:
    """How far the coordinates of a head can be from what the network's head makes of virtual columns."""

    query: tuple[arb, ...]
    key: tuple[arb, ...]
    value: tuple[arb, ...]


class Folded:
    """A plain transformer of a compiled network: that network with the transformer's own numbers, and what is loose."""

    def __init__(self, program: Program, stream: Stream, chosen: dict[str, Any], sizes: dict[int, float]):
        self.program, self.stream, self.chosen, self.dtype = program, stream, chosen["network"], stream.dtype
        self.claimed = sizes
        self.sizes = self._sizes()
        self.tensors = {name: t for name, t in stream.source.rest.items() if name != "constants"}
        if stream.constants:
            numbers = tuple(given.get(c, 0.0) for given in stream.given for c in stream.constants)
            self.tensors["constants"] = Tensor(self.dtype, (stream.tokens, len(stream.constants)), numbers)
        self.loose: dict[Place, Loose] = {}
        self.seen: dict[tuple[int, int], Any] = {}
        self.written: dict[tuple[int, int], tuple[HeadSum, Table, int | None, int, list[float]]] = {}
        state = fmpq_mat(stream.width, len(stream.inputs) + len(stream.constants))
        for i, c in enumerate([*stream.inputs, *stream.constants]):
            state[c, i] = fmpq(1)
        for layer, groups in enumerate(stream.source.groups):
            for g, group in enumerate(groups):
                self._group(layer, g, group, state)
            state = self._after(layer, state)
        if stream.fresh[-1] or state.ncols() != stream.outputs:
            raise CertificateError("the network that the file describes does not end with an affine map")
        self.readout = []
        for i, (row, bias) in enumerate(zip(stream.readout, stream.bias, strict=True)):
            if row[FLAG] != 0 or any(row[c] for c in stream.ids):
                raise CertificateError("the read-out reads registers, or the flag")
            self.readout.append(self._off([bias, *row[1:]], [state[c, i] for c in range(stream.width)]))

    @classmethod
    def read(cls, saved: Saved, chosen: Any) -> Folded:
        """Read a file for a proof; `CertificateError` on anything that is not a plain transformer of a network."""
        config: Any = saved.header.get("config")
        try:
            origin = config["origin"]
            if origin is None or "tensors" not in origin or origin.get("family", "network") != "network":
                raise NotProved("the file does not say which network its transformer was made from")
            program = read(origin["config"])
            if config["boxes"] != origin["config"]["boxes"] or config["box"] != origin["config"]["program"]["box"]:
                raise ValueError("its boxes are not those of its program")
            about = origin["config"]["program"]
            if config["output_shape"] != about["output_shape"] or config["first_row"] is not (
                about["output_rows"] != "all"
            ):
                raise ValueError(f"it does not put out {program.rows} rows")
            constants = sum(op.width for op in program.ops if op.word == "constant")
            stream = Stream(config, dict(saved.tensors), source_of(origin["tensors"], str(config["dtype"])), constants)
            same = stream.tokens == program.tokens and len(stream.inputs) == program.ops[0].width
            if not same or config.get("ids", False):
                raise ValueError("it has another number of tokens or inputs than its program, or reads token ids")
            sizes = chosen["sizes"]
            wanted = [c for fresh in stream.fresh for c in fresh.values()]
            return cls(program, stream, chosen, dict(zip(wanted, map(number, sizes), strict=True)))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise CertificateError(f"the file describes no plain transformer of a network: {error!r}") from error

    def _sizes(self) -> list[arb]:
        """The sizes of columns: of the box, of constants, and those of the derivation, which `check` proves."""
        stream, program = self.stream, self.program
        found = [arb(self.claimed.get(c, 0.0)) for c in range(stream.width)]
        width = program.ops[0].width
        for i, c in enumerate(stream.inputs):
            ends = [outward(x, self.dtype, above) for t in range(program.tokens) for above, box in
                    ((False, program.low), (True, program.high)) for x in [box[t * width + i]]]  # fmt: skip
            found[c] = largest([size(arb(x)) for x in ends])
        for c in stream.fixed:
            found[c] = largest([size(arb(given.get(c, 0.0))) for given in stream.given])
        return found

    # -- folds ----------------------------------------------------------------------------------------------------

    def _off(self, weights: Sequence[float], wanted: Sequence[fmpq]) -> arb:
        """How far a coordinate as computed is from an exact function of the stream."""
        skipped = self.stream.ids
        off = [(c, abs(exact(w) - x)) for c, (w, x) in enumerate(zip(weights, wanted, strict=True)) if c not in skipped]
        apart = sum((arb(x) * self.sizes[c] for c, x in off if x != 0), ZERO)
        return size(apart + self.stream.rounding(list(weights), self.sizes))

    def _group(self, layer: int, g: int, group: Group, state: fmpq_mat) -> None:
        """A group's heads with the numbers that the transformer holds, and what is loose about their reads."""
        stream, prefix = self.stream, f"network.layers.{layer}.groups.{g}."
        (scope, causal), heads = self.chosen["scopes"][layer][g], group["W_Q"].shape[0]
        content, reads = group["W_Q"].shape[2], group["W_O"].shape[1]
        tables: dict[str, list[Any]] = {name: [] for name in TABLES}
        for h in range(heads):
            head = stream.heads[layer, g, h]
            if head.slots != stream.heads[layer, g, 0].slots or max(content, reads) > head.width:
                raise CertificateError("heads of a group see different numbers of registers")
            stream.hidden(head, content, reads, _sees(scope, causal), self.sizes)
            loose = []
            for third, width in ((QUERY, content), (KEY, content), (VALUE, reads)):
                weight, bias, off = self._third(head, third, width, group, h, state)
                tables[f"W_{LETTERS[third]}"].append(weight)
                tables[f"b_{LETTERS[third]}"].append(bias)
                loose.append(off)
            self.loose[layer, g, h] = Loose(*loose)
            for name, third, width in (("M_K", KEY, content), ("M_V", VALUE, reads)):
                rows = [stream.row(head, third, j) for j in range(width)]
                tables[name].append([[row[stream.ids[r]] for row in rows] for r in range(1, head.slots + 1)])
            out = [[0.0] * group["W_O"].shape[2] for _ in range(reads)]
            for c, place in stream.fresh[layer].items():
                for j in range(reads):
                    out[j][c] = stream.out[head.block][place][head.first + j]
            tables["W_O"].append(out)
        keep = {"W_Q", "b_Q", "W_O"} | ({"W_K", "b_K", "W_V", "b_V"} if scope != "memory" else set())
        keep |= {"M_K", "M_V"} if stream.heads[layer, g, 0].slots else set()
        for name in keep:
            if name in ("W_K", "W_V") and name not in group and not any(x for x in _flat(tables[name])):
                continue  # keys and values that read nothing are none
            self.tensors[prefix + name] = Tensor(self.dtype, _shape(tables[name]), tuple(_flat(tables[name])))

    def _third(
        self, head: Head, third: int, width: int, group: Group, h: int, state: fmpq_mat
    ) -> tuple[list[list[float]], list[float], tuple[arb, ...]]:
        """Weights and biases of a head's queries, keys or values, and how loose each coordinate is: coordinates that
        read nothing are constants, as the transformer holds them."""
        letter, stream, columns = LETTERS[third], self.stream, state.ncols()
        given = group.get(f"W_{letter}")
        weight = given.rows()[h if given.shape[0] > 1 else 0] if given else [[0.0] * width for _ in range(columns)]
        shift = group.get(f"b_{letter}")
        bias = list(shift.rows()[h if shift.shape[0] > 1 else 0]) if shift else [0.0] * width
        if len(weight) != columns or any(len(row) != width for row in weight) or len(bias) != width:
            raise CertificateError("a table of the network that the file describes does not fit")
        wanted = state * fmpq_mat(columns, width, [exact(x) for row in weight for x in row])
        loose = []
        for j in range(width):
            own = stream.coordinate(head, third, j)
            if not any(row[j] for row in weight):
                if any(w for c, w in enumerate(own) if c != FLAG and c not in stream.ids):
                    raise CertificateError("a coordinate that should be constant reads the stream")
                bias[j] = own[FLAG]
                loose.append(ZERO)
                continue
            column = [wanted[c, j] for c in range(stream.width)]
            column[FLAG] += exact(bias[j])
            loose.append(self._off(own, column))
        return weight, bias, tuple(loose)

    def _after(self, layer: int, state: fmpq_mat) -> fmpq_mat:
        """The state after a layer as a function of the stream."""
        skip, bias = (self.stream.source.rest.get(f"network.layers.{layer}.{name}") for name in "Ss")
        groups = self.stream.source.groups[layer]
        width = skip.shape[1] if skip else groups[0]["W_O"].shape[2]
        if skip and skip.shape[0] != state.ncols():
            raise CertificateError("a layer of the network that the file describes does not fit")
        numbers = [exact(x) for x in skip.numbers] if skip else [fmpq(0)] * (state.ncols() * width)
        found = state * fmpq_mat(state.ncols(), width, numbers)
        for c, x in enumerate(bias.numbers if bias else ()):
            found[FLAG, c] += exact(x)
        for c, place in self.stream.fresh[layer].items():
            found[place, c] += fmpq(1)
        return found

    # -- what the prover asks for ---------------------------------------------------------------------------------

    def loosened(self, site: HeadSum, place: SitePlace, places: Sequence[SitePlace]) -> HeadSum:
        """Heads that read one scalar, with errors for each coordinate: the largest of all channels of an operation."""
        key = place.layer, place.op
        if key not in self.seen:
            every = [[self.loose[p.layer, p.group, p.first + i] for p in places if p.op == place.op and i < p.heads]
                     for i in range(place.heads)]  # fmt: skip
            if any(not e.is_zero() for heads in every for loose in heads for e in loose.key):
                raise CertificateError("keys that should be constant are not")
            self.seen[key] = [[_worst([getattr(loose, kind) for loose in heads]) for kind in ("query", "value")]
                              for heads in every]  # fmt: skip
        heads = [replace(head, loose=q, lost=v[0]) for head, (q, v) in zip(site.heads, self.seen[key], strict=True)]
        return replace(site, heads=tuple(heads))

    def spread(self, place: SitePlace) -> tuple[arb, arb]:
        """How far queries and keys of a norm's heads may be from one row together, and their values."""
        every = [self.loose[place.layer, place.group, h] for h in range(place.first, place.first + place.heads)]
        tables = self.stream.source.groups[place.layer][place.group]["W_Q"].rows()
        total = ZERO
        for kind in ("query", "key"):
            rows = [[e / _least(tables[h], j) if kind == "query" else e for j, e in enumerate(getattr(loose, kind))]
                    for h, loose in zip(range(place.first, place.first + place.heads), every, strict=True)]  # fmt: skip
            total += sum((largest(column) ** 2 for column in zip(*rows, strict=True)), ZERO).sqrt()
        return total.upper(), largest([e for loose in every for e in loose.value])

    def moved(self, errors: Errors, place: SitePlace, layer: Layer) -> Errors:
        """Errors of columns that a head over tokens or channels reads, with what is loose about its coordinates:
        twice for keys, which need not go with the values of the same token (lemma K32)."""
        if self.program.ops[place.op].word not in COVERED:
            raise NotProved(f"the kernel has no rule for {self.program.ops[place.op].word!r} in plain form")
        key = place.layer, place.op
        if key not in self.seen:
            more = [ZERO] * len(layer.before)
            for h in range(place.first, place.first + place.heads):
                loose = self.loose[place.layer, place.group, h]
                for letter, off, times in (("Q", loose.query, 1), ("K", loose.key, 2), ("V", loose.value, 1)):
                    table = layer.groups[place.group].table(f"W_{letter}", h)
                    for c in range(len(more)) if table else ():
                        parts = [times * e / size(arb(w)) for e, w in zip(off, table[c], strict=True) if w != 0]
                        more[c] = size(more[c] + largest(parts))
            self.seen[key] = more
        return [[e + x for e, x in zip(row, self.seen[key], strict=True)] for row in errors]

    def known(self, number: int, column: int, site: HeadSum, table: Table, x: int | None, y: int) -> None:
        """Remember the heads of a scalar result: a function less a line is small on every cell."""
        slope, bias = arb(site.skip[1]), arb(site.skip[2])
        cells = zip(itertools.pairwise(table.edges), table.low, table.high, strict=True) if site.function else ()
        parts = []
        for ends, low, high in cells:
            line = hull(*ends) * slope + bias
            parts.append(up(size(arb(low) - line).max(size(arb(high) - line))))
        self.written[number, column] = site, table, x, y, parts

    def check(self, number: int, layer: Layer, errors: Errors, found: list[Value], out: Errors) -> None:
        """Go on only where what heads have written is no larger than the derivation says (lemma K32)."""
        for c, place in self.stream.fresh[number].items():
            for t in range(len(errors)):
                most = self._written(number, layer, c, errors, found, t) + out[t][c]
                if not most <= self.sizes[place]:
                    most = self._convex(number, layer, c, place, errors, found, t)
                if not most <= self.sizes[place]:
                    raise Blind(f"column {place} of the stream may be {up(most):.3g}")

    def _written(self, number: int, layer: Layer, c: int, errors: Errors, found: list[Value], t: int) -> arb:
        """How large a result is less its linear part, as its heads see their arguments."""

        def read(column: int) -> tuple[Entry, arb]:
            value, channel = layer.before[column]
            return found[value][t][channel], errors[t][column]

        if (number, c) not in self.written:
            value, channel = layer.after[c]
            return found[value][t][channel].size if not any(row[c] for row in layer.skip) else arb.pos_inf()
        site, table, x, y, parts = self.written[number, c]
        entry, error = read(y)
        if x is not None:  # x y - s x - t y - b = (x - t)(y - s) - s t - b
            other, off = read(x)
            s, t_, b = site.skip
            rest = size(arb(s) * arb(t_) + arb(b))
            return (other.away(t_) + off) * (entry.away(s) + error) + rest
        cells = table.between(down(arb(entry.low) - error), up(arb(entry.high) + error))
        return arb.pos_inf() if cells is None else arb(max(parts[slice(*cells)]))

    def _convex(
        self, number: int, layer: Layer, c: int, place: int, errors: Errors, found: list[Value], t: int
    ) -> arb:
        """The other bound of a column's size: the values that its heads see."""
        stream, total = self.stream, ZERO
        for (i, g, h), loose in self.loose.items():
            if i != number:
                continue
            head, group = stream.heads[i, g, h], layer.groups[g]
            for j, off in enumerate(loose.value):
                weight = stream.out[head.block][place][head.first + j]
                if weight == 0:
                    continue
                table, shift, memory = (group.table(name, h) for name in ("W_V", "b_V", "M_V"))
                values = [size(arb(row[j])) for row in memory or []]
                for s in range(stream.tokens) if group.scope == "tokens" else [t] if group.scope == "self" else []:
                    own = size(arb(shift[j])) + off if shift else off
                    for r, (v, k) in enumerate(layer.before) if table else ():
                        if table[r][j] != 0:
                            own += size(arb(table[r][j])) * (found[v][s][k].size + errors[s][r])
                    values.append(own)
                total += size(arb(weight)) * (largest(values) + stream.machine.tiny)
        rows = stream.registers + stream.tokens
        slack = 1 + stream.machine.gamma(2 * rows + stream.width + 8)
        return (total * slack + (rows + stream.width) * stream.machine.tiny).upper()


def _sees(scope: str, causal: bool) -> Any:
    if scope == "self":
        return lambda t, s: t == s
    return lambda t, s: scope == "tokens" and (s <= t or not causal)


def _least(table: list[list[float]], column: int) -> arb:
    """The smallest number of a column that is not 0; 1 where there is none."""
    return min((size(arb(row[column])) for row in table if row[column] != 0), key=float, default=ONE)


def _worst(rows: Sequence[Sequence[arb]]) -> tuple[float, ...]:
    return tuple(up(largest(column)) for column in zip(*rows, strict=True))


def _flat(x: Any) -> list[float]:
    return [number for entry in x for number in _flat(entry)] if isinstance(x, list) else [x]


def _shape(x: Any) -> tuple[int, ...]:
    return (len(x), *_shape(x[0])) if isinstance(x, list) else ()
