"""Heads over tokens and over channels: attention, softmax, mixing, maxima, norms (K13 to K17 of docs/kernel.md).

A family has two functions: where its results live, for `values`, and a rule. A rule reads the stored tables of a
layer once, refuses all but those its lemma speaks of, and gives a function from the errors of the columns before the
layer, and the ranges of all values, to the errors of the columns that the heads write.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from flint import arb

from ..errors import CertificateError
from .balls import ONE, ZERO, down, hull, largest, size, supremum, up
from .derivation import Place
from .functions import Function, parse
from .layers import Errors, Group, Layer
from .program import Op, Program
from .rounding import EXPONENTIAL, Machine, Softmax, power_of_two
from .scalar import Cell, Head, Table, Weights, taylor_head
from .values import OTHERS, Blind, Entry, Value, ball, combined, made, plain, product

Rule = Callable[[Errors, list[Value], Errors], None]
Edges = tuple[tuple[float, ...], ...]  # of the tables of a derivation
Maker = Callable[[Program, Layer, Place, Machine, Edges], Rule]


class _Reading:
    """The one group of heads of an operation, and the columns that it reads and writes."""

    def __init__(self, program: Program, layer: Layer, place: Place, scope: str, heads: int):
        self.program, self.layer, self.op = program, layer, program.ops[place.op]
        self.name = f"the heads of operation {place.op} ({self.op.word})"
        self.rows = {column: i for i, column in enumerate(layer.before)}
        self.inputs = [self.columns(v) for v in self.op.inputs]
        after = {column: i for i, column in enumerate(layer.after)}
        wanted = [(place.op, c) for c in range(self.op.width)]
        if place.channel is not None or any(column not in after for column in wanted):
            raise CertificateError(f"{self.name} do not write all of its channels")
        self.out = [after[column] for column in wanted]
        if place.group >= len(layer.groups) or place.first != 0:
            raise CertificateError(f"{self.name} are not where the derivation says")
        self.group: Group = layer.groups[place.group]
        for number, other in enumerate(layer.groups):
            if number != place.group:
                self.zero(other.tables["W_O"], "W_O of another group", self.out)
        if self.group.scope != scope or not self.group.heads == place.heads == heads:
            raise CertificateError(f"{self.name} must be {heads} of the scope '{scope}'")
        self.zero([layer.skip], "the skip", self.out)
        self.zero([[layer.bias]], "the bias", self.out)

    def columns(self, value: int) -> list[int]:
        """Where a value stands in the state before the layer."""
        found = [self.rows.get((value, c)) for c in range(self.program.ops[value].width)]
        if None in found:
            raise CertificateError(f"{self.name} do not see value {value}")
        return [i for i in found if i is not None]

    def positions(self) -> list[int]:
        """The columns of one-hot positions."""
        n = self.program.tokens
        eye = [[float(i == j) for j in range(n)] for i in range(n)]
        for i, op in enumerate(self.program.ops):
            if op.word == "constant" and op.extra["value"] == eye and (i, 0) in self.rows:
                return self.columns(i)
        raise CertificateError(f"{self.name} need positions, which the state does not hold")

    def zero(self, heads: Any, name: str, columns: list[int]) -> None:
        """Refuse a table that writes into some columns."""
        if any(row[c] != 0 for head in heads for row in head for c in columns):
            raise CertificateError(f"{name} adds to what {self.name} write")

    def exactly(self, name: str, head: int, entries: dict[tuple[int, int], float]) -> None:
        """Refuse a table of a head unless it has these entries and zeros elsewhere."""
        found = self.group.table(name, head)
        for i, row in enumerate([] if found is None else found if isinstance(found[0], list) else [found]):
            for j, x in enumerate(row):
                if x != entries.get((i, j), 0.0):
                    raise CertificateError(f"{name} of {self.name} is not one that the kernel's lemma speaks of")
        if found is None and any(entries.values()):
            raise CertificateError(f"{self.name} have no {name}")

    def absent(self, *names: str) -> None:
        """Refuse tables that are not zero throughout."""
        for head in range(self.group.heads):
            for name in names:
                self.exactly(name, head, {})


def _sizes(found: list[Value], layer: Layer, columns: list[int], t: int) -> list[Entry]:
    return [found[layer.before[c][0]][t][layer.before[c][1]] for c in columns]


def keep(machine: Machine, x: arb) -> None:
    """Go on only where no number comes near the end of the dtype's range (lemma K12)."""
    if not x < machine.huge:
        raise Blind("numbers may overflow")


def meant(x: float) -> arb:
    """What a scale, an entry of a mask or of a mixing matrix stands for: those that are no powers of two were rounded,
    by 2^-50 of themselves at most."""
    return arb(x) if power_of_two(x) else arb(x, math.ldexp(abs(x), -50))


def _slack(machine: Machine) -> arb:
    return -(1 - EXPONENTIAL * machine.u).log()


# -- attention --------------------------------------------------------------------------------------------------------


def attention(program: Program, layer: Layer, place: Place, machine: Machine, tables: Edges) -> Rule:
    """Attention stays attention: selections, a scale, and a mask read from positions (lemma K13)."""
    own = _Reading(program, layer, place, "tokens", 1)
    (q, k, v), op, n = own.inputs, own.op, program.tokens
    query, key = own.group.table("W_Q", 0), own.group.table("W_K", 0)
    width, more = len(q), len(query[0]) - len(q)
    if key is None or "M_K" in own.group.tables or more not in (0, n):
        raise CertificateError(f"{own.name} must have keys of the tokens, and no memory")
    place_of = own.positions() if more else []
    scale, wanted = query[q[0]][0], op.extra["mask"]
    mask = [[key[place_of[j]][width + i] if more else 0.0 for j in range(n)] for i in range(n)]
    places = {(c, width + t): 1.0 for t, c in enumerate(place_of)}
    own.exactly("W_Q", 0, {(c, a): scale for a, c in enumerate(q)} | places)
    keys = {(c, a): 1.0 for a, c in enumerate(k)}
    own.exactly("W_K", 0, keys | {(c, width + i): mask[i][j] for j, c in enumerate(place_of) for i in range(n)})
    own.exactly("W_V", 0, {(c, a): 1.0 for a, c in enumerate(v)})
    own.exactly("W_O", 0, {(a, c): 1.0 for a, c in enumerate(own.out)})
    own.absent("b_Q", "b_K", "b_V")
    causal = own.group.causal
    if causal and any(wanted[i][j] != -math.inf for i in range(n) for j in range(i + 1, n)):
        raise CertificateError(f"{own.name} are causal, their operation is not")
    factor, drift = size(arb(scale)), size(arb(scale) - meant(op.extra["scale"]))
    terms, slack = width + bool(more), _slack(machine)

    def rule(errors: Errors, found: list[Value], out: Errors) -> None:
        if any(not row[c].is_zero() for row in errors for c in place_of):
            raise Blind("positions are not exact")
        sizes = [[[e.size for e in _sizes(found, layer, columns, t)] for t in range(n)] for columns in (q, k)]
        moved = [[[errors[t][c] for c in columns] for t in range(n)] for columns in (q, k)]
        values = [_sizes(found, layer, v, t) for t in range(n)]
        for i in range(n):
            seen = [j for j in range(n) if not (causal and j > i)]
            off, reach = {}, {}
            for j in seen:
                content = change = ZERO
                for x, e, y, f in zip(sizes[0][i], moved[0][i], sizes[1][j], moved[1][j], strict=True):
                    content += factor * (x + e) * (y + f)
                    change += factor * (x * f + y * e + e * f) + drift * x * y
                rounding = machine.gamma(terms + 1) * (content + size(arb(mask[i][j]))) + (2 * terms + 2) * machine.tiny
                reach[j] = content + rounding
                off[j] = change + rounding
            shown = [j for j in seen if wanted[i][j] != -math.inf]
            hidden = [j for j in seen if wanted[i][j] == -math.inf]
            most = largest([reach[j] + size(arb(mask[i][j])) for j in seen])
            near = largest([reach[j] + size(arb(mask[i][j])) for j in shown])
            leak = ZERO
            if hidden:
                best = max(shown, key=lambda j: down(arb(mask[i][j]) - reach[j]))
                gaps = [arb(mask[i][h]) + reach[h] - arb(mask[i][best]) + reach[best] for h in hidden]
                leak = sum(((g + 4 * machine.u * most + 2 * slack).exp() for g in gaps), ZERO)
                leak = leak if leak < 1 else ONE
                near = near if all(g < 0 for g in gaps) else most  # the largest logit is then a visible one
            d = largest([off[j] + size(arb(mask[i][j]) - meant(wanted[i][j])) for j in shown])
            keep(machine, most)
            share = ((d + 2 * machine.u * near + slack) / 2).tanh()
            for c, column in enumerate(own.out):
                error = largest([errors[j][v[c]] for j in seen])
                low, high = (f(values[j][c].low if f is min else values[j][c].high for j in shown) for f in (min, max))
                size_v = largest([values[j][c].size + errors[j][v[c]] for j in seen])
                keep(machine, size_v)
                rounding = machine.gamma(2 * n + 3) * size_v + 2 * n * (1 + size_v) * machine.tiny
                total = error + share * (arb(high) - arb(low)) + rounding + 2 * leak * size_v
                out[i][column] = size(total)

    return rule


def _attention_values(op: Op, reads: list[Value], symbols: int | None) -> Value:
    """Means of the values, by enclosures p_j of the weights (lemma K10): with the middles m_j of these and any c,
    sum_j p_j v_j = sum_j m_j v_j + sum_j (p_j - m_j)(v_j - c) + c (1 - sum_j m_j)."""
    query, key, value = reads
    scale, n, out = meant(op.extra["scale"]), len(key), []
    centred = [[_less_mean(key, j, a) for a in range(len(key[0]))] for j in range(n)]
    for i, row in enumerate(op.extra["mask"]):
        shown = [j for j, x in enumerate(row) if x != -math.inf]
        logits = [
            scale * sum((ball(product(x, y)) for x, y in zip(query[i], centred[j], strict=True)), ZERO) + meant(row[j])
            for j in shown
        ]
        weights = [1 / sum(((other - own).exp() for k, other in enumerate(logits) if k != j), ONE)
                   for j, own in enumerate(logits)]  # fmt: skip
        weights = [hull(max(down(w), 0.0), min(up(w), 1.0)) if w.is_finite() else hull(0.0, 1.0) for w in weights]
        middles, entries = [w.mid() for w in weights], []
        for c in range(op.width):
            seen = [value[j][c] for j in shown]
            ends = min(e.low for e in seen), max(e.high for e in seen)
            centre = arb(0.5 * ends[0] + 0.5 * ends[1])
            moved = sum(((w - m) * (ball(e) - centre) for w, m, e in zip(weights, middles, seen, strict=True)), ZERO)
            rest = moved + centre * (1 - sum(middles, ZERO))
            entries.append(combined(list(zip(middles, seen, strict=True)), symbols, rest, *ends))
        out.append(entries)
    return out


def _less_mean(key: Value, token: int, channel: int) -> Entry:
    """A key less the mean of all keys, which does not change weights."""
    pairs = [(arb(int(j == token)) - ONE / len(key), row[channel]) for j, row in enumerate(key)]
    return combined(pairs, None if key[0][0].slope is None else len(key[0][0].slope))


# -- softmax over channels --------------------------------------------------------------------------------------------


def softmax(program: Program, layer: Layer, place: Place, machine: Machine, tables: Edges) -> Rule:
    """Softmax over channels: the channels are the query, keys and values the identity (lemma K14)."""
    own = _Reading(program, layer, place, "memory", 1)
    (columns,), n = own.inputs, own.op.width
    eye = {(a, a): 1.0 for a in range(n)}
    own.exactly("W_Q", 0, {(c, a): 1.0 for a, c in enumerate(columns)})
    own.exactly("M_K", 0, eye)
    own.exactly("M_V", 0, eye)
    own.exactly("W_O", 0, {(a, c): 1.0 for a, c in enumerate(own.out)})
    own.absent("b_Q")

    def rule(errors: Errors, found: list[Value], out: Errors) -> None:
        for t, row in enumerate(errors):
            entries = _sizes(found, layer, columns, t)
            moved = [row[c] for c in columns]
            widest = arb(max(e.high for e in entries)) - arb(min(e.low for e in entries)) + 2 * largest(moved)
            keep(machine, widest)
            d = largest(moved) + machine.u * widest + _slack(machine) + machine.tiny
            for a, column in enumerate(own.out):
                most = arb(found[place.op][t][a].high)
                step = most * (2 * d).expm1()
                share = (d / 2).tanh()
                step = step if step < share else share
                rounding = machine.gamma(n + 4) * (most + step) + 4 * n * machine.tiny
                out[t][column] = size(step + rounding)

    return rule


def _softmax_values(op: Op, reads: list[Value], symbols: int | None) -> Value:
    out = []
    for row in reads[0]:
        ends = []
        for own in range(op.width):
            others = [e for c, e in enumerate(row) if c != own]
            low = sum(((arb(e.high) - arb(row[own].low)).exp() for e in others), ONE)
            high = sum(((arb(e.low) - arb(row[own].high)).exp() for e in others), ONE)
            ends.append(plain(max(down(1 / low), 0.0), min(up(1 / high), 1.0), symbols))
        out.append(ends)
    return out


# -- the maximum over tokens ------------------------------------------------------------------------------------------


def maximum(program: Program, layer: Layer, place: Place, machine: Machine, tables: Edges) -> Rule:
    """A head for each channel, logits beta x_j, values x_j (lemma K15)."""
    own = _Reading(program, layer, place, "tokens", program.ops[place.op].width)
    (columns,), n = own.inputs, program.tokens
    betas = []
    for h, c in enumerate(columns):
        key = own.group.table("W_K", h)
        if key is None or len(key[0]) != 1 or own.group.causal or "M_K" in own.group.tables:
            raise CertificateError(f"{own.name} must have one key coordinate, and see all tokens")
        beta = key[c][0]
        own.exactly("W_Q", h, {})
        own.exactly("b_Q", h, {(0, 0): 1.0})
        own.exactly("W_K", h, {(c, 0): beta})
        own.exactly("W_V", h, {(c, 0): 1.0})
        own.exactly("W_O", h, {(0, own.out[h]): 1.0})
        if not beta > 0:
            raise CertificateError(f"{own.name} have a sharpness of {beta}")
        betas.append(beta)
    own.absent("b_K", "b_V")
    soft = lambert(n)

    def rule(errors: Errors, found: list[Value], out: Errors) -> None:
        for c, (column, beta) in enumerate(zip(columns, betas, strict=True)):
            entries = [_sizes(found, layer, [column], t)[0] for t in range(n)]
            error = largest([errors[t][column] for t in range(n)])
            most = largest([e.size for e in entries]) + error
            keep(machine, (1 + arb(beta)) * most)
            d = machine.u * (3 + 4 * machine.u) * arb(beta) * most + _slack(machine) + 4 * machine.tiny
            off = (soft + 2 * d) / arb(beta) if n > 1 else ZERO
            near = soft / arb(beta) * (1 + 2 * d.exp() * d.expm1()) if n > 1 else ZERO
            off = near if near < off else off
            total = error + off + machine.gamma(2 * n + 3) * most + 2 * n * (1 + most) * machine.tiny
            for t in range(n):
                out[t][own.out[c]] = size(total)

    return rule


def lambert(n: int) -> arb:
    """An F with (n - 1) e^(-F - 1) <= F: no less than W0((n - 1)/e)."""
    low, high = 0.0, math.log(n)  # as large as that F is in any case
    for middle in (0.5 * (low + high) for _ in range(60)):
        low, high = (low, middle) if (n - 1) * math.exp(-middle - 1) <= middle else (middle, high)
    found = arb(high * (1 + 1e-12))
    while not (n - 1) * (-found - 1).exp() <= found:
        found = found * 2
    return found


def _maximum_values(op: Op, reads: list[Value], symbols: int | None) -> Value:
    rows = reads[0]
    ends = [(max(r[c].low for r in rows), max(r[c].high for r in rows)) for c in range(op.width)]
    return [[plain(*pair, symbols) for pair in ends] for _ in rows]


# -- fixed mixing of tokens -------------------------------------------------------------------------------------------


def mix(program: Program, layer: Layer, place: Place, machine: Machine, tables: Edges) -> Rule:
    """Heads whose logits come from positions alone have constant weights (lemma K16)."""
    own = _Reading(program, layer, place, "tokens", place.heads)
    (columns,), n, matrix = own.inputs, program.tokens, own.op.extra["matrix"]
    group, width = own.group, own.op.width
    reads = own.positions() if "W_K" in group.tables else []
    gains, weights, roundings = [], [], []
    for h in range(group.heads):
        out = group.table("W_O", h)
        if len(out) != width or ((memory := group.table("M_V", h)) and any(x != 0 for row in memory for x in row)):
            raise CertificateError(f"{own.name} must have {width} values, and nothing in memory")
        own.exactly("W_V", h, {(c, a): 1.0 for a, c in enumerate(columns)})
        own.exactly("W_O", h, {(a, c): out[0][own.out[0]] for a, c in enumerate(own.out)})
        gains.append(out[0][own.out[0]])
        rows, sums = zip(*(_constant_row(own, h, i, n, reads, machine) for i in range(n)), strict=True)
        weights.append(rows)
        roundings.append(sums)
    own.absent("b_V")
    off = [[size(sum((arb(g) * w[i][j] for g, w in zip(gains, weights, strict=True)), -meant(matrix[i][j])))
            for j in range(n)] for i in range(n)]  # fmt: skip

    def rule(errors: Errors, found: list[Value], out: Errors) -> None:
        if any(not row[c].is_zero() for row in errors for c in reads):
            raise Blind("positions are not exact")
        for c, column in enumerate(columns):
            sizes = [_sizes(found, layer, [column], t)[0].size for t in range(n)]
            moved = [errors[t][column] for t in range(n)]
            longest = largest([s + e for s, e in zip(sizes, moved, strict=True)])
            keep(machine, longest * largest([1 + size(arb(g)) for g in gains]))
            for i in range(n):
                total, parts = ZERO, ZERO
                for j in range(n):
                    total += off[i][j] * (sizes[j] + moved[j]) + size(meant(matrix[i][j])) * moved[j]
                for g, sums in zip(gains, roundings, strict=True):
                    slots = len(sums[i].exact)
                    own_error, most = sums[i].error([2 * longest] * slots, [longest] * slots)
                    total += size(arb(g)) * own_error + (ZERO if power_of_two(g) else machine.u * size(arb(g)) * most)
                    parts += size(arb(g)) * most
                if len(gains) > 1:
                    total += machine.gamma(len(gains) - 1) * (parts + total)
                out[i][own.out[c]] = size(total + 4 * machine.tiny)

    return rule


def _constant_row(
    own: _Reading, h: int, i: int, n: int, reads: list[int], machine: Machine
) -> tuple[list[arb], Softmax]:
    """The exact weights of token i over the tokens (and memory), and how they round."""
    group = own.group
    columns = len(own.layer.before)
    query, bias = group.table("W_Q", h), group.table("b_Q", h)
    key, shift = group.table("W_K", h), group.table("b_K", h)
    for name, table in (("W_Q", query), ("W_K", key)):
        if table is not None and any(x != 0 for c in range(columns) if c not in reads for x in table[c]):
            raise CertificateError(f"{name} of {own.name} reads more than positions")
    q = _shifted(own, query[reads[i]] if reads else None, bias, len(query[0]))
    rows = [_shifted(own, key[reads[j]] if reads else None, shift, len(q)) for j in range(n)]
    if group.causal:
        rows = rows[: i + 1]
    rows = [*rows, *(group.table("M_K", h) or [])]
    logits, errors = [], []
    for row in rows:
        terms = [(a, b) for a, b in zip(q, row, strict=True) if a != 0 and b != 0]
        logits.append(sum((arb(a) * arb(b) for a, b in terms), ZERO))
        exact = len(terms) == 0 or (len(terms) == 1 and (power_of_two(terms[0][0]) or power_of_two(terms[0][1])))
        total = sum((size(arb(a) * arb(b)) for a, b in terms), ZERO)
        errors.append(ZERO if exact else machine.gamma(len(terms)) * total + machine.tiny)
    highest, worst = max(logits, key=float), largest(errors)
    even = worst.is_zero() and all((x - highest).is_zero() for x in logits)  # then all exponentials are exp(0) = 1
    below = [size(highest - x) + e + worst for e, x in zip(errors, logits, strict=True)]
    errors = [e + machine.u * b + machine.tiny for e, b in zip(errors, below, strict=True)]
    powers = [(x - highest).exp() for x in logits]
    total = sum(powers, ZERO)
    weights = [p / total for p in powers]
    seen = i + 1 if group.causal else n
    return [*weights[:seen], *[ZERO] * (n - seen)], Softmax.of(machine, weights, errors, even)


def _shifted(own: _Reading, row: list[float] | None, bias: list[float] | None, width: int) -> list[float]:
    """The sum of a row that a position selects and a bias: one of two numbers is 0, or their sum: exact."""
    pairs = list(zip(row or [0.0] * width, bias or [0.0] * width, strict=True))
    if any(a != 0 and b != 0 and a + b != 0 for a, b in pairs):
        raise CertificateError(f"{own.name} have biases that their lemma does not speak of")
    return [a + b for a, b in pairs]


def _mix_values(op: Op, reads: list[Value], symbols: int | None) -> Value:
    matrix, rows, out = op.extra["matrix"], reads[0], []
    for weights in matrix:
        line = []
        for c in range(op.width):
            pairs = [(meant(w), row[c]) for w, row in zip(weights, rows, strict=True) if w != 0]
            line.append(combined(pairs, symbols))
        out.append(line)
    return out


# -- norms ------------------------------------------------------------------------------------------------------------


def centring(op: Op) -> list[list[float]]:
    """The matrix that a norm's rows are read through: it takes away the mean, times the width unless that is a power of
    two, so that its entries are exact."""
    n, inner = op.width, op.extra["centred"]
    whole = float(n) if inner and n & (n - 1) else 1.0
    return [[whole * (i == k) - (whole / n if inner else 0.0) for i in range(n)] for k in range(n)]


def _rows(op: Op, matrix: list[list[float]], row: list[Entry], symbols: int | None) -> list[Entry]:
    """What a row becomes by a matrix."""
    if not op.extra["centred"]:
        return row
    columns = zip(*matrix, strict=True)
    return [combined([(arb(w), e) for w, e in zip(column, row, strict=True)], symbols) for column in columns]


def norm(
    program: Program, layer: Layer, place: Place, machine: Machine, tables: Edges, apart: arb = ZERO, lost: arb = ZERO,
    ratios: list[arb | None] | None = None,
) -> Rule:  # fmt: skip
    """Rows over their root mean square: heads with the logits b_j - s_j c.c and the value c (lemma K17).

    `apart` and `lost` are how far queries and keys together, and values, may be from one row (lemma K32); `ratios` are
    relative errors of what heads read that centre it themselves, None of a 0.
    """
    op, matrix = program.ops[place.op], centring(program.ops[place.op])
    own = _Reading(program, layer, place, "self", place.heads)
    (columns,), width, inner = own.inputs, op.width, op.extra["centred"]
    if place.table is None:
        raise CertificateError(f"{own.name} need a table")
    whole = Fraction(matrix[0][0] - matrix[1][0] if inner else 1) if width > 1 else Fraction(1)
    eps = Fraction(op.extra["eps"]) * whole**2
    target = Function("norm", (), (parse(f"1/sqrt(y/{width} + {eps})"),))
    entries = {(c, a): matrix[k][a] for k, c in enumerate(columns) for a in range(width)}
    heads, drift = [], ZERO
    for h in range(place.heads):
        query, shift, out = own.group.table("W_Q", h), own.group.table("b_Q", h), own.group.table("W_O", h)
        sinks = len(own.group.table("M_K", h) or [])
        if shift is None or len(query[0]) != width + 1 or len(out) != width or sinks != 1:
            raise CertificateError(f"{own.name} must have {width + 1} key coordinates and one sink")
        scale, amount, last = query[columns[0]][0] / (matrix[0][0] or 1.0), out[0][own.out[0]], shift[-1]
        found = {at: query[at[0]][at[1]] for at, x in entries.items() if x != 0}
        own.exactly("W_Q", h, found)
        for at, x in found.items():
            drift = drift.max(size(arb(x) / (arb(scale) * arb(entries[at])) - 1)) if scale else arb.pos_inf()
        own.exactly("b_Q", h, {(0, width): last})
        own.exactly("W_K", h, entries)
        own.exactly("b_K", h, {(0, width): 1.0})
        own.exactly("W_V", h, entries)
        own.exactly("W_O", h, {(a, c): amount for a, c in enumerate(own.out)})
        heads.append(Head(((1.0, 0.0), (0.0, 1.0)), ((scale, last), (0.0, 0.0)), False, (0.0,) * 3, (1.0, 0.0), amount))
    own.absent("b_V", "M_K", "M_V")
    if not inner and not drift.is_zero():
        raise CertificateError(f"W_Q of {own.name} is not one that the kernel's lemma speaks of")
    edges = tables[place.table]
    lookup = Table(None, edges)
    rests = [_norm_cell(heads, machine, low, high, target, width) for low, high in itertools.pairwise(edges)]
    amounts = largest([1 + size(arb(x)) for head in heads for x in (head.out, *head.keys[0])])
    loose, sunk = 3 * apart + lost, 4 * machine.tiny * sum((1 + size(arb(head.out)) for head in heads), ONE)
    mean, scales = arb(eps.numerator) / eps.denominator, [arb(head.keys[0][0]) for head in heads]
    monotone = all(s < 0 and head.out >= 0 for s, head in zip(scales, heads, strict=True))
    pull = largest([size(s) for s in scales]), ZERO if monotone else sum((size(arb(head.out)) for head in heads), ZERO)
    shares = None if ratios is None else _proportions(matrix, ratios, machine, drift, arb(whole.numerator))
    sunken = 2 * (width + 1) * machine.tiny * largest([1 / size(s) for s in scales if ratios] + [ONE]) * 4 * width

    def rule(errors: Errors, found: list[Value], out: Errors) -> None:
        for t, row in enumerate(errors):
            read = _sizes(found, layer, columns, t)
            entries = _rows(op, matrix, read, None if read[0].slope is None else len(read[0].slope))
            moved = [row[c] for c in columns]
            if shares is not None:
                moved = [ZERO if m.is_finite() else m for m in moved]
            if inner:
                moved = [sum((size(arb(w)) * m for w, m in zip(column, moved, strict=True)), ZERO)
                         for column in zip(*matrix, strict=True)]  # fmt: skip
            least = sum((_least(e, m + loose) ** 2 for e, m in zip(entries, moved, strict=True)), ZERO)
            most = sum(((e.size + m + loose) ** 2 for e, m in zip(entries, moved, strict=True)), ZERO)
            root = (least / width + mean).sqrt()
            keep(machine, (1 + most + 4 * width * largest([e.size for e in read]) ** 2) * amounts)
            if shares is not None:
                off = sunken / root, 8 * width * sunken**2, sunk
                rows = least, most, root, mean
                _in_proportion(own, out[t], entries, shares, off, rows, pull, (lookup, edges, rests))
                continue
            cells = lookup.between(max(down(least), 0.0), up(most))
            if cells is None or not (loose.is_zero() or least > 0):
                raise Blind(f"operation {place.op} leaves its table")
            length = sum((m * m for m in moved), ZERO).sqrt() + 2.6 * apart
            for entry, m, column in zip(entries, moved, own.out, strict=True):
                far = entry.size + m + loose
                share = far / (root * arb(width).sqrt())
                share = share if share < 0.5 else arb(0.5)
                parts = [min(up(far), up(arb(edges[k + 1]).sqrt() + 2 * loose)) * arb(rests[k]) for k in range(*cells)]
                out[t][column] = size((m + lost + share * length) / root + largest(parts) + sunk)

    return rule


def _proportions(
    matrix: list[list[float]], ratios: list[arb | None], machine: Machine, drift: arb, whole: arb
) -> list[list[arb]]:
    """How far coordinate i of a centred row may be off, as sums of |c_k|: what is read is (c_k - c_z) / `whole`, z the
    channel that is 0 (lemma K17)."""
    n, zero, out, sums = len(matrix), ratios.index(None), [], (1 + machine.gamma(len(matrix) - 1)) * (1 + drift)
    for i in range(n):
        each = [ZERO if r is None else (1 + r) * sums - 1 for r in ratios]
        row = [size(arb(matrix[k][i])) * e / whole for k, e in enumerate(each)]
        out.append([sum(row, ZERO) if k == zero else x for k, x in enumerate(row)])
    return out


def _in_proportion(
    own: _Reading, out: list[arb], entries: list[Entry], shares: list[list[arb]], off: tuple[arb, arb, arb],
    row: tuple[arb, arb, arb, arb], pull: tuple[arb, arb], table: tuple[Table, tuple[float, ...], list[float]],
) -> None:  # fmt: skip
    """Errors of a norm whose rows are off in proportion to themselves, by `shares`, and what underflows (lemma K17);
    `pull` is the largest scale, and the sum of amounts where some are negative."""
    (least, most, root, mean), (lookup, edges, rests), n, (sunken, below, sunk) = row, table, len(entries), off
    length, lost = sum((x * x for line in shares for x in line), ZERO).sqrt(), 2 * arb(n).sqrt() * sunken * root
    k = 2 * (length + sunken) + (length + sunken) ** 2
    beyond = most * k + 2 * lost * (most.sqrt() + lost)  # rows of y move it by k y, and what underflows
    cells = lookup.between(max(down(least - beyond), 0.0), up(most + beyond))
    # logits near y = 0 round k d eta more than `_norm_cell` counts; k is at least d u, gamma(d + 2) at most 3 k
    below, wide = pull[0] * (below + 6 * k * k * n * mean), (most + n * mean) * (1 + k)
    if cells is None or not (8 * (n + 2) * k < 1 and below < 0.5):
        raise Blind("a norm leaves its table")
    k = k.min(beyond / (n * root**2))
    grown, top = k / (2 * (1 - k) ** 1.5), arb(n).sqrt()
    if pull[1] > 0:
        grown = (pull[0] * beyond.min(k * wide)).expm1() * pull[1] * (wide / n).sqrt()
    normed = [min(up(e.size / root), up(top)) for e in entries]
    for i, line in enumerate(shares):
        near = sum((x * arb(m) for x, m in zip(line, normed, strict=True)), ZERO) + sunken
        reach = [((arb(edges[c + 1]) / n + mean) / (1 - k)).sqrt() * (arb(normed[i]) + near) for c in range(*cells)]
        parts = [x * arb(rests[c]) for x, c in zip(reach, range(*cells), strict=True)]
        moved = near + (arb(normed[i]) + near) * (grown + below)
        out[own.out[i]] = size(moved + largest(parts) * (1 + k + grown) + sunk)


def _least(entry: Entry, error: arb) -> arb:
    """The smallest absolute value that an entry can have as computed."""
    near = arb(max(entry.low, -entry.high, 0.0)) - error
    return near.lower() if near > 0 else ZERO


def _norm_cell(heads: list[Head], machine: Machine, low: float, high: float, target: Function, width: int) -> float:
    """How far the computed sum of a_j sigmoid(b_j - s_j y) is from 1/sqrt(y/d + eps) on a cell of y = c.c."""
    cell = Cell.of(low, high, target)
    sums = [[-x for x in cell.thin], [-x for x in cell.wide]]
    error = total = ZERO
    for head in heads:
        weights = Weights.of(head, cell.centre, cell.radius)
        (_, parts), _, _ = taylor_head(head, machine, weights, cell.centre, cell.radius, ZERO)
        amount = arb(head.out)
        for i in (0, 1):
            sums[i] = [s + amount * x for s, x in zip(sums[i], parts[i], strict=True)]
        reach = size(arb(head.keys[0][0])) * arb(high) + size(arb(head.keys[0][1]))
        softmax = Softmax.of(machine, weights.most, [machine.gamma(width + 4) * reach, machine.gamma(2) * reach])
        own, most = softmax.error([weights.most[1], weights.most[0]], [ONE, ZERO])
        error += size(amount) * own + (ZERO if power_of_two(head.out) else machine.u * size(amount) * most)
        total += size(amount) * most
    error += machine.gamma(len(heads) - 1) * (total + error)
    return up(supremum(sums[0][:-1], sums[1][-1], cell.radius) + error)


def _norm_values(op: Op, reads: list[Value], symbols: int | None) -> Value:
    """c_i / sqrt(mean c^2 + eps) grows with c_i, and shrinks with the other squares while c_i > 0; and it is a form
    times a ball, the scale."""
    matrix = centring(op)
    whole = arb(matrix[0][0] - matrix[1][0]) if op.extra["centred"] and op.width > 1 else ONE
    eps, out = arb(op.extra["eps"]) * whole**2, []

    def highest(top: float, smaller: arb, larger: arb) -> float:
        rest = smaller if top > 0 else larger
        root = ((arb(top) ** 2 + rest) / op.width + eps).sqrt()
        return min(up(arb(top) / root), up(arb(op.width).sqrt())) if root > 0 else up(arb(op.width).sqrt())

    for row in ([*_rows(op, matrix, row, symbols)] for row in reads[0]):
        squares = [(_least(e, ZERO) ** 2, e.size**2) for e in row]
        line = []
        for c, e in enumerate(row):
            smaller, larger = (sum((s[i] for k, s in enumerate(squares) if k != c), ZERO) for i in (0, 1))
            ends = -highest(-e.low, smaller, larger), highest(e.high, smaller, larger)
            if symbols is None:
                line.append(plain(*ends, None))
                continue
            small, large = (sum((s[i] for s in squares), ZERO) / op.width + eps for i in (0, 1))
            scale = hull(down(1 / large.sqrt()), up(1 / small.sqrt())) if small > 0 else arb(0, math.inf)
            rest = scale.mid() * e.rest + (scale - scale.mid()) * ball(e)
            known = rest.is_finite() and 2 * rest.rad() < ends[1] - ends[0]
            tilt = tuple(scale.mid() * x for x in e.slope)  # type: ignore[union-attr]
            line.append(made(*ends, rest, tilt) if known else plain(*ends, symbols))
        out.append(line)
    return out


OTHERS |= {
    "attention": _attention_values, "softmax": _softmax_values, "max_tokens": _maximum_values, "mix": _mix_values,
    "normalise": _norm_values,
}  # fmt: skip
RULES: dict[str, Maker] = {
    "attention": attention, "softmax": softmax, "max_tokens": maximum, "mix": mix, "normalise": norm,
}  # fmt: skip
