"""The proof that a file's tensors compute its token program (lemmas K22 to K25).

For every column of the state a bound of |computed - meant| on all tokens of all sequences is carried on, and one of its
size on padding. What a column means is a word of the derivation; a wrong word is a large error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flint import arb, fmpq

from ...errors import CertificateError
from ..balls import ONE, ZERO, NotProved, largest, size, up
from ..file import Saved
from ..layers import Group, Layer, layer_of
from ..program import exact, whole
from ..rounding import EXPONENTIAL, MACHINES, Machine, affine_rounding, power_of_two
from .facts import Facts
from .language import Domain, Value, is_number, reached, read_domain, read_ops, read_value
from .logits import Logits, Output, Rows, exact_sums, rows_of, through
from .terms import Term, Terms

KINDS = ("is", "number", "clean", "square", "real")
DEAD = {"float32": 104.5, "float64": 746.0}  # the exponential of less than minus this is an exact 0: an assumption
SINK = 0.5  # of the sum of exponentials, that counted keys may have at most


@dataclass(frozen=True)
class Column:
    """A column of the state: what it means, how far it is from that at most, and how large it is on padding."""

    kind: str
    op: int
    value: Value
    error: arb = ZERO
    pad: arb = ZERO


Words = tuple[Column, ...]


@dataclass(frozen=True)
class Head:
    """A head: "map", "aggregate" or "count", the op that it computes, its tables, and whether later keys are hidden."""

    kind: str
    op: int
    causal: bool
    tables: dict[str, Any]
    columns: list[int]  # that it writes


def prove_program(saved: Saved, chosen: Any = None) -> tuple[float, str, tuple[str, ...]]:
    """The bound of a saved program (0 where its values are read off exactly), the dtype, and the kinds of its heads."""
    config, given = saved.header.get("config"), saved.header.get("derivation") if chosen is None else chosen
    if given is None:
        raise CertificateError("the file holds no derivation, and none was given")
    try:
        prover = Prover(config, given, saved)
        return prover.prove()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CertificateError(f"the file holds no program, or a derivation that does not fit: {error!r}") from error


class Prover:
    """A file's program, what is known of it, and its layers."""

    def __init__(self, config: Any, given: Any, saved: Saved):
        self.dtype = config["dtype"]
        if self.dtype not in MACHINES or any(t.dtype != self.dtype for t in saved.tensors.values()):
            raise NotProved(f"the kernel speaks of networks stored and run in float32 or float64, not {self.dtype!r}")
        for name, tensor in saved.tensors.items():
            if not all(map(math.isfinite, tensor.numbers)):
                raise CertificateError(f"no proof holds for weights that are not finite: {name}")
        self.machine: Machine = MACHINES[self.dtype]
        self.domain: Domain = read_domain(config["domain"])
        self.facts, self.output = self._program(config["program"], given["ops"], given["output"])
        self.outputs = None if given["outputs"] is None else [read_value(v) for v in given["outputs"]]
        if self.outputs is not None and len(set(self.outputs)) < len(self.outputs):
            raise ValueError("an output stands twice in the derivation")
        self.left = dict(saved.tensors)
        self.layout, self.layers = config["layout"]["layers"], given["layers"]
        if len(self.layers) != len(self.layout):
            raise ValueError("the derivation has another number of layers than the file")
        tokens = next(i for i, op in enumerate(self.facts.ops) if op.kind == "Tokens")
        first = (*(Column("is", tokens, v) for v in self.domain.vocabulary), Column("real", -1, None))
        self.state: list[Column] = [*first, *self._positions(given["positions"])]
        self.used: list[str] = []

    def _program(self, program: Any, ops: Any, output: Any) -> tuple[Facts, int]:
        """The rewritten program, after its output has been found to mean what the file's program means (K18)."""
        terms = Terms(self.domain)
        stated = reached(read_ops(program))
        found = terms.read(stated)
        asked = {*terms.asked, *(t for t, op in zip(found, stated, strict=True) if op.kind == "Aggregate")}
        rewritten = read_ops(ops)
        again = terms.read(rewritten)
        output = whole(output, 0, len(rewritten) - 1)
        if rewritten[output].selects or again[output] != found[-1]:
            raise NotProved("the rewritten program of the derivation is not seen to mean what the program does")
        return Facts(rewritten, terms, again, self.domain, asked), output

    def _word(self, data: Any) -> Column:
        kind, op, value = data
        if kind not in KINDS:
            raise ValueError(f"a column is one of {', '.join(KINDS)}, not {kind!r}")
        if kind == "real":
            return Column(kind, -1, None)
        op = whole(op, 0, len(self.facts.ops) - 1)
        if self.facts.ops[op].selects:
            raise ValueError("a column stands for a selector")
        return Column(kind, op, read_value(value))

    def _positions(self, words: Any) -> list[Column]:
        """Columns of positions: what is stored for each, compared with what it should be."""
        tensor = self.left.pop("positions")
        if tensor.shape != (self.domain.length, len(words)):
            raise CertificateError(f"the positions have the shape {tensor.shape}")
        found = []
        for c, data in enumerate(words):
            word = self._word(data)
            if word.op < 0 or self.facts.ops[word.op].kind != "Indices":
                raise ValueError("a position column stands for more than a position")
            stored = [exact(tensor.numbers[i * len(words) + c]) for i in range(self.domain.length)]
            off = [abs(x - self.meant(word, i)) for i, x in enumerate(stored)]
            found.append(Column(word.kind, word.op, word.value, largest([arb(x) for x in off]),
                                largest([size(arb(x)) for x in stored])))  # fmt: skip
        return found

    def meant(self, word: Column, at: int) -> fmpq:
        """What a column should be where its op has the value of a number."""
        if word.kind == "real":
            return fmpq(1)
        value = self.facts.values(word.op)[at]
        if word.kind == "is":
            return fmpq(int(value == word.value))
        if not is_number(value):
            raise ValueError("a column of numbers stands for values that are none")
        number = fmpq(Fraction(value).numerator, Fraction(value).denominator)  # type: ignore[arg-type]
        return number * number if word.kind == "square" else number

    def reach(self, word: Column) -> arb:
        """How large a column is meant to be at most."""
        if word.kind in ("is", "real"):
            return ONE
        span = self.facts.span(word.op)
        most = fmpq(span.numerator, span.denominator)
        return size(arb(most * most if word.kind == "square" else most))

    # ---- layers

    def prove(self) -> tuple[float, str, tuple[str, ...]]:
        """Every layer, then the read-out; no tensor is left over."""
        for number, (stated, words) in enumerate(zip(self.layout, self.layers, strict=True)):
            after = tuple(self._word(data) for data in words["after"])
            scopes = tuple(
                ("memory" if kind == "map" else "tokens", _flag(causal)) for kind, _, causal in stated["heads"]
            )
            layer = self._layer(number, len(after), scopes)
            if len(words["heads"]) != len(scopes):
                raise ValueError("the derivation has another number of heads than the file")
            heads = [
                self._head(kind, whole(op, 0, len(self.facts.ops) - 1), group)
                for (kind, _, _), op, group in zip(stated["heads"], words["heads"], layer.groups, strict=True)
            ]
            self.state = self._through(layer, heads, after)
        last = len(self.layout)
        shape = self.left[f"network.layers.{last}.S"].shape
        layer = self._layer(last, shape[1], ())
        if self.left:
            raise CertificateError(f"no layer has the tensors {', '.join(sorted(self.left)[:4])}")
        bound = self._number(layer) if self.outputs is None else self._decoded(layer)
        return bound, self.dtype, tuple(sorted(set(self.used)))

    def _layer(self, number: int, columns: int, scopes: tuple[tuple[str, bool], ...]) -> Layer:
        before, after = (tuple((0, i) for i in range(n)) for n in (len(self.state), columns))
        return layer_of(self.left, number, before, after, scopes, ())

    def _head(self, kind: str, op: int, group: Group) -> Head:
        if group.heads != 1 or kind not in ("map", "aggregate", "count"):
            raise NotProved("the heads of a program are maps, aggregates and counts, one in a group")
        tables = {name: group.table(name, 0) for name in group.tables}
        width, reads, inputs = len(tables["W_Q"][0]), len(tables["W_O"]), len(self.state)
        for name, length in (("Q", width), ("K", width), ("V", reads)):
            tables.setdefault(f"W_{name}", [[0.0] * length for _ in range(inputs)])
            tables.setdefault(f"b_{name}", [0.0] * length)
        tables.setdefault("M_K", [])
        tables.setdefault("M_V", [])
        columns = [c for c in range(len(tables["W_O"][0])) if any(row[c] for row in tables["W_O"])]
        return Head(kind, op, group.causal, tables, columns)

    def _through(self, layer: Layer, heads: list[Head], after: Words) -> list[Column]:
        """The columns after a layer: each is carried on, or written by one head, and never both."""
        if any(layer.bias):
            raise NotProved("a layer adds a constant to its columns")
        found: list[Column | None] = [None] * len(after)
        for c, word in enumerate(after):
            carried = [j for j in range(len(self.state)) if layer.skip[j][c]]
            if len(carried) + sum(c in head.columns for head in heads) != 1:
                raise CertificateError("a column is not written exactly once")
            if carried:
                old, by = self.state[carried[0]], layer.skip[carried[0]][c]
                if (old.kind, old.op, old.value) != (word.kind, word.op, word.value):
                    raise CertificateError("a column is carried on under another meaning")
                reach, factor = self.reach(old) + old.error, size(arb(by))
                rounding = affine_rounding(self.machine, [by], 0.0, factor * reach)
                error = size(arb(exact(by) - 1)) * self.reach(old) + factor * old.error + rounding
                found[c] = self._kept(word, error, factor * old.pad + rounding)
        for head in heads:
            self.used.append(head.kind)
            words = [after[c] for c in head.columns]
            rule = {"map": self._map, "aggregate": self._aggregate, "count": self._count}[head.kind]
            errors, pads = rule(head, words)
            for c, word, error, pad in zip(head.columns, words, errors, pads, strict=True):
                found[c] = self._kept(word, error, pad)
        return [column for column in found if column is not None]

    def _kept(self, word: Column, error: arb, pad: arb) -> Column:
        if not (error < self.machine.huge and pad < self.machine.huge and self.reach(word) < self.machine.huge):
            raise NotProved("numbers of a layer may overflow")
        return Column(word.kind, word.op, word.value, error.upper(), pad.upper())

    def _rows(self, W: list[list[float]], b: list[float], nodes: Sequence[int]) -> Rows:
        """What W and b make of the columns, for every combination of the ops that W reads, and of others (K22)."""
        used = [j for j, row in enumerate(W) if any(row)]
        wanted = [*dict.fromkeys([*nodes, *(self.state[j].op for j in used if self.state[j].op >= 0)])]
        numbers: list[list[fmpq]] = []
        ids: list[dict[int, int]] = []
        weights = [[exact(x) for x in W[j]] for j in used]
        bias = [exact(x) for x in b]
        known: dict[tuple[Any, ...], None] = {}
        place = {i: n for n, i in enumerate(wanted)}
        words = [self.state[j] for j in used]
        values = [{} for _ in words]  # type: list[dict[int, fmpq]]
        products: list[set[fmpq]] = [set(() if not x else (x,)) for x in bias]
        reach = [fmpq(0) for _ in b]
        sums: dict[tuple[fmpq, ...], list[fmpq]] = {}
        for row in self.facts.joint(wanted):
            codes = []
            for word, seen in zip(words, values, strict=True):
                at = row[place[word.op]] if word.op >= 0 else 0
                if at not in seen:
                    seen[at] = self.meant(word, at)
                codes.append(seen[at])
            code = tuple(codes)
            key = (*row[: len(nodes)], code)
            if key in known:
                continue
            known[key] = None
            if code not in sums:
                total, sizes = list(bias), [abs(x) for x in bias]
                for x, by in zip(code, weights, strict=True):
                    if x:
                        for c, w in enumerate(by):
                            if w:
                                products[c].add(x * w)
                                total[c] += x * w
                                sizes[c] += abs(x * w)
                sums[code] = total
                reach = [max(x, y) for x, y in zip(reach, sizes, strict=True)]
            numbers.append(sums[code])
            ids.append(dict(zip(nodes, row, strict=False)))
        errors = [
            self._sum_error([self.state[j].error for j in used], [W[j][c] for j in used], b[c], products[c], reach[c])
            for c in range(len(b))
        ]
        return rows_of(numbers, errors, ids)

    def _sum_error(self, errors: list[arb], weights: list[float], bias: float, terms: set[fmpq], reach: fmpq) -> arb:
        """How far a computed sum of columns times weights is from the exact one of what the columns mean."""
        moved = sum((size(arb(w)) * e for w, e in zip(weights, errors, strict=True) if w), ZERO)
        most = size(arb(reach)) + moved
        if not most < self.machine.huge:
            raise NotProved("numbers of a layer may overflow")
        if moved == 0 and all(int(x.q) & (int(x.q) - 1) == 0 for x in terms):
            scale = max((int(x.q).bit_length() - 1 for x in terms), default=0)
            units = [int(x * (1 << scale)) for x in terms]
            if exact_sums(self.dtype, units, int((reach * (1 << scale)).ceil()), scale):
                return ZERO
        return moved + affine_rounding(self.machine, weights, bias, most)

    # ---- softmax

    def _lost(self, lead: arb, others: int, least: str) -> tuple[arb, bool]:
        """The weight of all keys that a lead is over, and whether it is an exact 0 (K23)."""
        if lead >= DEAD[self.dtype] or not others:
            return ZERO, True
        u = self.machine.u
        weight = others * (-lead * (1 - 2 * u)).exp() / (1 - EXPONENTIAL * u) ** 2
        if not (lead > 0 and weight.upper() <= u / 2):
            raise NotProved(f"{least}: the right one is ahead by {up(lead) if lead.is_finite() else 0.0:.4g} only")
        return weight.upper(), False

    def _slots(self, head: Head) -> tuple[Rows, Rows]:
        """The keys and values of a head's memory slots: stored numbers."""
        t = head.tables
        zero = [[ZERO] * len(t[name]) for name in ("b_K", "b_V")]
        keys, values = ([[exact(x) for x in row] for row in t[name]] for name in ("M_K", "M_V"))
        nothing: list[dict[int, int]] = [{} for _ in keys]
        return rows_of(keys, zero[0], nothing), rows_of(values, zero[1], nothing)

    def _map(self, head: Head, words: list[Column]) -> tuple[list[arb], list[arb]]:
        """K23: for each combination one slot is ahead, and what it holds is compared with what the columns mean."""
        t, nodes = head.tables, [*dict.fromkeys(word.op for word in words)]
        if -1 in nodes:
            raise CertificateError("a head writes the flag of tokens")
        q = self._rows(t["W_Q"], t["b_Q"], nodes)
        keys, values = self._slots(head)
        self._finite(head, keys.most())
        logits = Logits(self.machine, self.dtype, q, keys)
        tops, least = [], arb.pos_inf()
        for i, row in enumerate(logits.at):
            top = max(range(len(row)), key=row.__getitem__)
            tops.append(top)
            least = least.min(logits.lead(i, top, [j for j in range(len(row)) if j != top]))
        weight, dead = self._lost(least, len(keys.at) - 1, "a slot of a map")
        peaks = values.most()
        most = largest(peaks)
        read = ZERO if dead else 5 * weight * most + 2 * len(keys.at) * (1 + most) * self.machine.tiny
        out = through(self.machine, values, t["W_O"], head.columns, [read] * values.width, exact)
        return self._compared(out, tops, words, q.ids), self._pads(head, peaks, len(keys.at))

    def _compared(self, out: Output, tops: list[int], words: list[Column], ids: list[dict[int, int]]) -> list[arb]:
        """The largest differences between what is written, row by row, and what columns mean."""
        errors = []
        for n, word in enumerate(words):
            seen = {(top, row[word.op]) for top, row in zip(tops, ids, strict=True)}
            worst = max((abs(out.at[top][n] - self.meant(word, at)) for top, at in seen), default=fmpq(0))
            errors.append((size(arb(worst)) + out.error[n]).upper())
        return errors

    def _selection(self, head: Head, kind: str) -> tuple[int, list[int], Rows, Rows]:
        """A head's selector, what is left of it to be selected by logits, and its queries and keys."""
        op = self.facts.ops[head.op]
        if op.kind != kind:
            raise CertificateError(f"a head does not compute what it is said to: {op.kind} is no {kind}")
        selector, t = op.children[0], head.tables
        parts = self.facts.conjuncts(selector)
        if head.causal:
            rest = [part for part in parts if self.facts.term[part] != self.facts.terms.leq]
            if len(rest) == len(parts) and not self.facts.until(selector):
                raise CertificateError("later keys are hidden from a head that may have to select them")
            parts = rest
        sides = [self.facts.sides(part) for part in parts]
        queries, keys = ([*dict.fromkeys(i for side in sides for i in side[n])] for n in (0, 1))
        return selector, parts, self._rows(t["W_Q"], t["b_Q"], queries), self._rows(t["W_K"], t["b_K"], keys)

    def _finite(self, head: Head, keys: list[arb]) -> None:
        """Nothing overflows on padding, whose rows are computed too: a NaN there would reach the tokens."""
        t, sizes = head.tables, []
        for name in ("Q", "K"):
            sizes.append([size(arb(x)) for x in t[f"b_{name}"]])
            for row, column in zip(t[f"W_{name}"], self.state, strict=True):
                sizes[-1] = [total + size(arb(x)) * column.pad for total, x in zip(sizes[-1], row, strict=True)]
        most = [2 * largest([x, y]) for x, y in zip(sizes[1], keys, strict=True)]  # rounding is less than a half
        logit = sum((2 * x * y for x, y in zip(sizes[0], most, strict=True)), ZERO)
        if not logit + largest([*sizes[0], *most]) < self.machine.huge:
            raise NotProved("numbers of padding may overflow")

    def _padding(self, head: Head, q: Rows) -> list[arb]:
        """For each query an upper bound of the logits of padding, where a head sees it (K24)."""
        if head.causal:
            return [arb.neg_inf() for _ in q.at]
        t, machine = head.tables, self.machine
        error = q.error
        reach, bias = [], [exact(x) for x in t["b_K"]]
        for c in range(q.width):
            moved = sum((size(arb(row[c])) * col.pad for row, col in zip(t["W_K"], self.state, strict=True)), ZERO)
            total = moved + size(arb(bias[c]))
            rounding = machine.gamma(len(self.state) + 1) * total + (len(self.state) + 2) * machine.tiny
            reach.append((moved + rounding).upper())
        found = []
        for i in range(len(q.at)):
            at = [q.number(i, c) for c in range(q.width)]
            sizes = [size(arb(x)) + e for x, e in zip(at, error, strict=True)]
            middle = arb(sum((x * b for x, b in zip(at, bias, strict=True)), fmpq(0)))
            moved = sum((e * size(arb(b)) + s * r for e, b, s, r in zip(error, bias, sizes, reach, strict=True)), ZERO)
            total = sum((s * (size(arb(b)) + r) for s, b, r in zip(sizes, bias, reach, strict=True)), ZERO)
            if not total < machine.huge:
                raise NotProved("logits of padding may overflow")
            found.append((middle + moved + machine.gamma(q.width) * total + (q.width + 1) * machine.tiny).upper())
        return found

    def _values(self, head: Head, nodes: list[int]) -> tuple[Rows, list[arb]]:
        """The values of tokens, and how large coordinates of all that is averaged are, padding's and slots' too."""
        t, machine = head.tables, self.machine
        v = self._rows(t["W_V"], t["b_V"], nodes)
        peaks = []
        for c, (own, bias) in enumerate(zip(v.most(), t["b_V"], strict=True)):
            reach = sum((size(arb(row[c])) * col.pad for row, col in zip(t["W_V"], self.state, strict=True)), ZERO)
            reach += size(arb(bias))
            pad = reach * (1 + machine.gamma(len(self.state) + 1)) + (len(self.state) + 2) * machine.tiny
            peaks.append(largest([own, pad, *(size(arb(row[c])) for row in t["M_V"])]))
        if not largest(peaks) < machine.huge:
            raise NotProved("values may overflow")
        return v, peaks

    def _aggregate(self, head: Head, words: list[Column]) -> tuple[list[arb], list[arb]]:
        """K24: selected keys are ahead of all others, or the slots are, where nothing is selected."""
        selector, parts, q, k = self._selection(head, "Aggregate")
        facts, op = self.facts, self.facts.ops[head.op]
        if any(word.op != head.op for word in words):
            raise CertificateError("a head writes what it does not compute")
        slots, stored = self._slots(head)
        self._finite(head, [largest(pair) for pair in zip(k.most(), slots.most(), strict=True)])
        tokens, count = len(k.at), len(slots.at)
        logits = Logits(self.machine, self.dtype, q, _both(k, slots))
        pads, full = self._padding(head, q), facts.nonempty(selector)
        if not full and not count:
            raise NotProved("a head has no slot for a selection of nothing")
        mean, single = facts.averages(head.op), facts.single(selector)
        memory = list(range(tokens, tokens + count))
        least, spread = arb.pos_inf(), ZERO
        for i in range(len(q.at)):
            hits, misses = self._hits(parts, q.ids[i], k)
            if hits:
                others = misses + memory
                least = least.min(
                    logits.lead(i, hits[0], others) if len(hits) == 1 else logits.above(i, hits, others)
                )
                least = least.min(self._over(logits, i, hits, pads[i]))
                if mean:
                    spread = largest([spread, logits.spread(i, hits)])
            if not full:
                least = least.min(
                    logits.lead(i, memory[0], misses) if count == 1 else logits.above(i, memory, misses)
                )
                least = least.min(self._over(logits, i, memory, pads[i]))
        longest = self.domain.length + count
        weight, dead = self._lost(least, longest, "a selected key")
        operand = op.children[1]
        v, peaks = self._values(head, [operand])
        # where weights are exact zeros, what padding holds is not read
        most = largest([*v.most(), *stored.most()]) if dead else largest(peaks)
        tiny = ZERO if dead else 2 * longest * (1 + most) * self.machine.tiny
        gamma, u = self.machine.gamma, self.machine.u
        if single:
            own = 5 * weight * most + tiny
        elif mean:
            even = spread == 0 and dead
            d = ZERO if spread == 0 else spread * (1 + u) / 2 + self.machine.tiny - (1 - EXPONENTIAL * u).log()
            roundings = gamma(self.domain.length + 3 if even else 2 * longest + 3)
            own = (d / 2).tanh() * 2 * largest(v.most()) + roundings * most + 2 * weight * most
            own += ZERO if even else 2 * longest * (1 + most) * self.machine.tiny
        else:
            own = gamma(2 * longest + 3) * most + 2 * weight * most + 2 * longest * (1 + most) * self.machine.tiny
        if not largest([own]) < self.machine.huge:
            raise NotProved("what a head reads is not known")
        out = through(self.machine, v, head.tables["W_O"], head.columns, [e + own for e in v.error], exact)
        errors = []
        for n, word in enumerate(words):
            if mean and word.kind not in ("number", "clean"):
                raise CertificateError("a column that is no number stands for a mean")
            at = Column(word.kind, operand, word.value)  # the same word of the values that are selected
            worst = [abs(out.at[i][n] - self.meant(at, row[operand])) for i, row in enumerate(v.ids)]
            errors.append((size(arb(max(worst, default=fmpq(0)))) + out.error[n]).upper())
        if not full:
            slip = ZERO if count == 1 and dead else own  # of several slots each has a part
            slip += ZERO if count == 1 else gamma(2 * longest + 3) * most + 2 * longest * (1 + most) * self.machine.tiny
            sunk = through(self.machine, stored, head.tables["W_O"], head.columns, [slip] * stored.width, exact)
            for n, word in enumerate(words):
                off = [abs(row[n] - self._default(word)) for row in sunk.at]
                errors[n] = largest([errors[n], size(arb(max(off))) + sunk.error[n]])
        return errors, self._pads(head, peaks, longest)

    def _hits(self, parts: list[int], query: dict[int, int], keys: Rows) -> tuple[list[int], list[int]]:
        """The keys that a query selects, and those that it does not; the others never stand in one sequence with it."""
        found: list[bool | None] = [True] * len(keys.ids)
        for part in parts:
            op = self.facts.ops[part]
            if op.kind == "Select":
                row = self.facts.truth(part)[query[op.children[1]]]
                here = [row[key[op.children[0]]] for key in keys.ids]
            else:
                here = [self.facts.selected(part, query, key) for key in keys.ids]
            found = [None if a is None or b is None else a and b for a, b in zip(found, here, strict=True)]
        return [j for j, one in enumerate(found) if one], [j for j, one in enumerate(found) if one is False]

    def _over(self, logits: Logits, row: int, chosen: Sequence[int], pad: arb) -> arb:
        """How far chosen keys are ahead of padding."""
        if not pad > arb.neg_inf():
            return arb.pos_inf()
        low = min(logits.at[row][j] - logits.moved_query[j] for j in chosen) - logits.moved_key[row]
        return (logits.real(low) - logits.rounding(row, chosen) - pad).lower()

    def _default(self, word: Column) -> fmpq:
        """What a column should be where nothing is selected."""
        value = self.facts.ops[word.op].value
        if word.kind == "is":
            return fmpq(int(value == word.value))
        if not is_number(value):
            raise CertificateError("a column of numbers stands for a default that is none")
        number = fmpq(Fraction(value).numerator, Fraction(value).denominator)  # type: ignore[arg-type]
        return number * number if word.kind == "square" else number

    def _pads(self, head: Head, peaks: list[arb], slots: int) -> list[arb]:
        """How large what a head writes is at most, whatever its weights, of values up to `peaks`."""
        W, machine = head.tables["W_O"], self.machine
        slack, most = machine.gamma(2 * slots + 2 * len(W) + 8), largest(peaks)
        found = []
        for c in head.columns:
            by = [size(arb(row[c])) for row in W]
            reach, total = sum((x * y for x, y in zip(by, peaks, strict=True)), ZERO), sum(by, ZERO)
            found.append((reach * (1 + slack) + (4 * slots + 8) * (1 + most) * (1 + total) * machine.tiny).upper())
        return found

    def _count(self, head: Head, words: list[Column]) -> tuple[list[arb], list[arb]]:
        """K25: selected keys have a little weight each beside a sink that has the rest."""
        _, parts, q, k = self._selection(head, "SelectorWidth")
        t, machine, u = head.tables, self.machine, self.machine.u
        if any((word.kind, word.op) != ("number", head.op) for word in words):
            raise CertificateError("a head writes what it does not compute")
        if len(t["M_K"]) != 1 or any(map(any, t["W_V"])):
            raise NotProved("a count has one sink, and one value for all tokens")
        slots, _ = self._slots(head)
        self._finite(head, [largest(pair) for pair in zip(k.most(), slots.most(), strict=True)])
        logits = Logits(machine, self.dtype, q, _both(k, slots))
        pads, sink = self._padding(head, q), len(k.at)
        least, low, high = arb.pos_inf(), arb.pos_inf(), arb.neg_inf()
        for i in range(len(q.at)):
            hits, misses = self._hits(parts, q.ids[i], k)
            least = least.min(logits.lead(i, sink, misses)).min(self._over(logits, i, [sink], pads[i]))
            for j in hits:
                below = logits.real(logits.at[i][j] - logits.at[i][sink])
                off = logits.off(i, j, sink)
                low, high = low.min((below - off).lower()), high.max((below + off).upper())
        longest = self.domain.length + 1
        weight, dead = self._lost(least, longest, "the sink of a count")
        most = int(max(self.facts.values(head.op)))  # type: ignore[type-var, arg-type]
        _, peaks = self._values(head, [])
        peak = largest(peaks)
        if not high > arb.neg_inf():  # nothing is ever selected
            low = high = arb(-1)
        if not high < 0:
            raise NotProved("the sink of a count is not ahead of what is counted")
        slack = u * size(low) + machine.tiny - (1 - EXPONENTIAL * u).log()
        least_one, most_one = (low - slack).exp().lower(), (high + slack).exp().upper()
        share = (most * most_one + weight).upper()
        if not share < SINK:
            raise NotProved("the sink of a count is too light")
        even = share <= u / 2 and dead  # the computed sum of the exponentials is 1
        relative = machine.gamma(most + 4) if even else share + machine.gamma(4 * longest + 8)
        errors = []
        for c in head.columns:
            weights = [row[c] for row in t["W_O"]]
            gains = [exact(v) * exact(w) for v, w in zip(t["b_V"], weights, strict=True)]
            gain, sizes = arb(sum(gains, fmpq(0))), size(arb(sum(map(abs, gains), fmpq(0))))
            rest = sum((size(arb(exact(v) * exact(w))) for v, w in zip(t["M_V"][0], weights, strict=True)), ZERO)
            one = largest([size(least_one * gain - 1), size(most_one * gain - 1)])
            reach = most * most_one * sizes * (1 + relative) + rest
            lost = sum((size(arb(w)) for w in weights), ZERO) * (2 * weight + 4 * longest * machine.tiny) * (1 + peak)
            off = most * one + most * most_one * sizes * relative + rest * (1 + relative) + lost
            errors.append((off + affine_rounding(machine, weights, 0.0, reach + lost)).upper())
        return errors, self._pads(head, peaks, longest)

    # ---- the output

    def _decoded(self, layer: Layer) -> float:
        """The largest logit is that of the program's value: nothing else can be read off."""
        assert self.outputs is not None
        if len(layer.bias) != len(self.outputs):
            raise ValueError("the derivation names another number of outputs than there are")
        used = [j for j, row in enumerate(layer.skip) if any(row)]
        codes = self._rows(
            [[float(i == j) for i in used] for j in range(len(self.state))], [0.0] * len(used), [self.output]
        )
        numbers = [[*(codes.number(i, c) for c in range(len(used))), fmpq(1)] for i in range(len(codes.at))]
        error = [*(self.state[j].error for j in used), ZERO]
        q = rows_of(numbers, error, codes.ids)
        keys = [[*(exact(layer.skip[j][c]) for j in used), exact(bias)] for c, bias in enumerate(layer.bias)]
        logits = Logits(self.machine, self.dtype, q, rows_of(keys, [ZERO] * (len(used) + 1), [{} for _ in keys]))
        place = {value: n for n, value in enumerate(self.outputs)}
        for i, row in enumerate(codes.ids):
            right = place.get(self.facts.values(self.output)[row[self.output]], -1)
            if right < 0:
                raise NotProved("the program may have a value that the network does not put out")
            if not logits.lead(i, right, [j for j in range(len(keys)) if j != right]) > 0:
                raise NotProved("the read-out: the right value is not ahead of all others")
        return 0.0

    def _number(self, layer: Layer) -> float:
        """How far an output that is a number can be off."""
        if len(layer.bias) != 1:
            raise ValueError("an output that is a number is one column")
        weights, bias = [row[0] for row in layer.skip], layer.bias[0]
        used = [j for j, w in enumerate(weights) if w]
        if used and all(self.state[j].kind in ("number", "clean") for j in used):
            return self._linear(used, weights, bias)
        rows = self._rows(layer.skip, layer.bias, [self.output])
        word = Column("number", self.output, None)
        worst = [abs(rows.number(i, 0) - self.meant(word, row[self.output])) for i, row in enumerate(rows.ids)]
        return up(size(arb(max(worst, default=fmpq(0)))) + rows.error[0])

    def _linear(self, used: list[int], weights: list[float], bias: float) -> float:
        """The same for a linear combination of numbers, which is compared with the program's, term by term."""
        left: dict[Any, Fraction] = {}
        wanted: Term = self.facts.term[self.output]
        if isinstance(wanted, int):
            raise NotProved("the output is no number")
        for monomial, c in wanted:
            left[monomial] = c
        off, reach = ZERO, size(arb(bias))
        for j in used:
            column = self.state[j]
            for monomial, c in self.facts.term[column.op]:
                left[monomial] = left.get(monomial, Fraction(0)) - c * Fraction(weights[j])
            off += size(arb(weights[j])) * column.error
            reach += size(arb(weights[j])) * (self.reach(column) + column.error)
        constant = left.pop((), Fraction(0)) - Fraction(bias)
        off += size(arb(fmpq(constant.numerator, constant.denominator)))
        for monomial, c in left.items():
            if c:
                op = self.facts.by_term.get(frozenset({(monomial, Fraction(1))}))
                if op is None:
                    raise NotProved("the read-out does not read what the output is a sum of")
                span = abs(c) * self.facts.span(op)
                off += size(arb(fmpq(span.numerator, span.denominator)))
        plain = len(used) == 1 and not bias and power_of_two(weights[used[0]]) and abs(weights[used[0]]) >= 1
        return up(off + (ZERO if plain else affine_rounding(self.machine, weights, bias, reach)))


def _both(a: Rows, b: Rows) -> Rows:
    """The rows of both, in the same units."""
    scale = max(a.scale, b.scale)
    at = [[x << (scale - rows.scale) for x in row] for rows in (a, b) for row in rows.at]
    error = [largest([x, y]) for x, y in zip(a.error, b.error, strict=True)]
    return Rows(at, scale, error, [*a.ids, *b.ids], a.sure and b.sure)


def _flag(x: Any) -> bool:
    if type(x) is not bool:
        raise ValueError(f"{x!r} is neither true nor false")
    return x
