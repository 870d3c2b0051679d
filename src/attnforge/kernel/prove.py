"""The proof: errors from layer to layer on every part of the box, and the largest of them (lemmas K11 and K12).

For every column of the state a bound of |computed - exact| is carried on; what a column should be is an exact affine
form of earlier columns, or the result of an operation by heads. Every stored number of every layer is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flint import arb, arb_mat, fmpq

from ..errors import CertificateError
from . import derivation as choices
from . import program as programs
from .alone.fast import even, tables_named
from .alone.heads import FAMILIES, Scopes, alone
from .alone.rules import ALONE, rule_of
from .balls import ONE, ZERO, NotProved, down, hull, largest, size, up, working
from .derivation import Derivation, Place
from .file import Saved, outward
from .functions import Function, function
from .layers import Errors, Layer, constants_of, layer_of
from .plain.fold import Folded
from .plain.theorem import unfolded
from .plain.variant import straightened
from .program import Column, Form, Program, exact
from .programs.prove import prove_program
from .roots import Squares, Sum, halved, sum_of
from .rounding import MACHINES, Machine, affine_rounding, power_of_two
from .sampled.prove import SAMPLED, prove_sampled
from .scalar import Head, HeadSum, Table
from .tokens import RULES, Rule, keep, norm
from .values import Blind, Entry, Value, values

OWN: dict[str, Callable[..., tuple[Any, ...]]] = {"program": prove_program, **dict.fromkeys(SAMPLED, prove_sampled)}


@dataclass(frozen=True)
class Proof:
    """What was proved: |network - program| <= bound on the box, in the dtype, rounding included; for a head whose file
    says that its bound is relative, <= bound |program|. With a hypothesis it is for every function of which that is so.
    """

    bound: float
    dtype: str
    families: tuple[str, ...]
    leaves: int = 1
    hypothesis: str = ""


def prove(saved: Saved, chosen: Any = None) -> Proof:
    """The bound of a saved network against its program; `CertificateError` where none can be proved.

    `chosen` is a derivation as JSON; without one, the file's own is taken.
    """
    try:
        with working():
            given = saved.header.get("derivation") if chosen is None else chosen
            saved = unfolded(straightened(saved))
            rule = rule_of(saved) or OWN.get(str(saved.header.get("family")))
            return Proof(*rule(saved, given)) if rule else Prover.of(saved, given).prove()
    except RecursionError as error:
        raise CertificateError("the file is nested too deep for anything that it describes") from error


@dataclass(frozen=True)
class Affine:
    """The columns of a layer that are affine: stored sizes, and how far they are from what they should be."""

    columns: tuple[int, ...]
    weight: arb_mat
    off: arb_mat
    bias: list[arb]
    off_bias: list[arb]
    stored: list[tuple[list[float], float]]


class Prover:
    """Everything about a network that does not depend on the part of the box: read once, then `leaf` by leaf."""

    def __init__(
        self, program: Program, chosen: Derivation, layers: list[Layer], constants: Errors, dtype: str,
        folded: Folded | None = None, apart: float = 0.0, relative: bool = False, even: dict[int, Any] | None = None,
    ):  # fmt: skip
        self.program, self.chosen, self.layers, self.dtype = program, chosen, layers, dtype
        self.folded = folded  # a plain transformer: columns are virtual then, and what is rounded is known to it
        self.apart = apart  # how far the program may be from the function that a head is for
        self.even = even or {}  # what operations' anchors may be read with one exponential, by the numbers of a table
        self.relative = relative  # whether the bound is one of the error over the function's size
        self.machine: Machine = MACHINES[dtype]
        self.constants = constants
        self.forms = program.forms()
        self.tables: dict[tuple[Function | None, int], Table] = {}
        self.known: dict[tuple[HeadSum, int], tuple[list[float], list[float]]] = {}
        self.by_op: dict[int, Table] = {}
        self.roots = any(op.word == "apply" and op.function.power < 1 for op in program.ops)
        self.squared: set[tuple[int, Column]] = set()  # which layer makes them; what is known of them on a leaf:
        self.squares: Squares = {}
        for layer in layers:
            _all_claimed(layer)
        self.affine = [self._affine(layer) for layer in layers]
        self.sites = [[self._site(layer, place) for place in layer.places] for layer in layers]

    @classmethod
    def of(cls, saved: Saved, chosen: Any = None) -> Prover:
        """Read a file for a proof, strictly."""
        saved = unfolded(straightened(saved))
        header, tensors = saved.header, dict(saved.tensors)
        given = header.get("derivation") if chosen is None else chosen
        if given is None:
            raise CertificateError("the file holds no derivation, and none was given")
        scopes: Scopes | None = None
        folded: Folded | None = None
        apart, relative = 0.0, False
        named: dict[int, Any] = {}
        if header.get("family") in (*FAMILIES, *ALONE):
            head = ALONE.get(header["family"], alone)(saved)
            apart, relative = head.apart, head.relative
            program, tensors, scopes, dtype = head.program, head.tensors, head.scopes, head.dtype
        elif header.get("family") == "network":
            config = header.get("config")
            if not isinstance(config, dict) or not isinstance(config.get("dtype"), str):
                raise CertificateError("the file does not describe a network")
            program, dtype = programs.read(config), config["dtype"]
            named = tables_named(config)
        elif header.get("family") == "plain":
            folded = Folded.read(saved, given)
            program, tensors, dtype, given = folded.program, folded.tensors, folded.dtype, folded.chosen
        else:
            raise NotProved(f"the kernel does not cover files of the family {header.get('family')!r} yet")
        if dtype not in MACHINES or any(tensor.dtype != dtype for tensor in tensors.values()):
            raise NotProved(f"the kernel speaks of networks stored and run in float32 or float64, not {dtype!r}")
        derivation = choices.read(given, program)
        if scopes is not None and derivation.scopes != scopes:
            raise CertificateError("the derivation has other scopes than the head")
        for name, tensor in tensors.items():
            if not all(map(math.isfinite, tensor.numbers)):
                raise CertificateError(f"no bound holds for weights that are not finite: {name}")
        left = dict(tensors)
        constants = constants_of(program, left.pop("constants", None))
        first = tuple(
            (i, c) for i, op in enumerate(program.ops) if op.word in ("input", "constant") for c in range(op.width)
        )
        layers = []
        for number, after in enumerate(derivation.states):
            places = tuple(place for place in derivation.places if place.layer == number)
            seen = derivation.scopes[number] if number < len(derivation.scopes) else ()
            layers.append(layer_of(left, number, first, after, seen, places))
            first = after
        if left:
            raise CertificateError(f"the derivation says nothing of the tensors {', '.join(sorted(left)[:4])}")
        if len(derivation.scopes) != len(layers) or any(p.layer >= len(layers) for p in derivation.places):
            raise CertificateError("the derivation speaks of layers that the network does not have")
        output = tuple((program.output, c) for c in range(program.ops[program.output].width))
        if first != output:
            raise CertificateError("the last state of the network is not the output of the program")
        return cls(program, derivation, layers, constants, dtype, folded, apart, relative, named)

    # -- the whole box --------------------------------------------------------------------------------------------

    def box(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The box, widened to numbers of the dtype: an input is one."""
        low = tuple(outward(x, self.dtype, above=False) for x in self.program.low)
        return low, tuple(outward(x, self.dtype, above=True) for x in self.program.high)

    def prove(self) -> Proof:
        """The largest bound over the leaves of the tree, which cover the box by construction."""
        worst, leaves = 0.0, 0
        for low, high in self.leaves():
            found = self.leaf(low, high)
            leaves += 1
            if not math.isfinite(found):
                raise NotProved(f"nothing can be proved on a part of the box, near {_shown(low, high)}")
            worst = max(worst, found)
        families = tuple(sorted({self.program.ops[place.op].word for place in self.chosen.places}))
        return Proof(worst, self.dtype, families, leaves)

    def leaves(self) -> Iterator[tuple[tuple[float, ...], tuple[float, ...]]]:
        """The parts of the box that the tree makes."""
        waiting = [(self.chosen.tree, *self.box())]
        while waiting:
            node, low, high = waiting.pop()
            if not node:
                yield low, high
                continue
            i, at, below, above = node
            if not low[i] <= at <= high[i]:
                raise CertificateError(f"the tree splits coordinate {i} at {at}, outside of [{low[i]}, {high[i]}]")
            waiting.append((below, low, (*high[:i], float(at), *high[i + 1 :])))
            waiting.append((above, (*low[:i], float(at), *low[i + 1 :]), high))

    def leaf(self, low: tuple[float, ...], high: tuple[float, ...]) -> float:
        """The error of the output on a part of the box; infinity where nothing is known."""
        try:
            found = values(self.program, low, high, self.by_op)
            errors = self._start()
            for number in range(len(self.layers)):
                errors = self._through(number, errors, found)
        except Blind:
            return math.inf
        if self.relative:
            return self._relative(errors, found[self.program.output])
        return up(largest([e for row in errors[: self.program.rows] for e in row]) + arb(self.apart))

    def _relative(self, errors: Errors, found: Value) -> float:
        """The largest error over the least size of what it is an error of."""
        worst = 0.0
        for row, entries in zip(errors[: self.program.rows], found, strict=False):
            for error, entry in zip(row, entries, strict=True):
                least = max(entry.low, -entry.high)
                worst = max(worst, up((error + arb(self.apart)) / arb(least)) if least > 0 else math.inf)
        return worst

    def _start(self) -> Errors:
        width = self.program.ops[0].width
        return [[*[ZERO] * width, *row] for row in self.constants]

    def _through(self, number: int, errors: Errors, found: list[Value]) -> Errors:
        layer, affine = self.layers[number], self.affine[number]
        out: Errors = [[ZERO] * len(layer.after) for _ in errors]
        if affine.columns:
            for t, row in enumerate(errors):
                n, ranges = len(row), [found[v][t][c] for v, c in layer.before]
                seen = [hull(r.low, r.high) + e * arb(0, 1) for r, e in zip(ranges, row, strict=True)]
                passed = arb_mat(1, n, row) * affine.weight
                off = arb_mat(1, n, [r.size for r in ranges]) * affine.off
                reach = arb_mat(1, n, [size(x) for x in seen]) * affine.weight
                for i, (column, (weights, bias)) in enumerate(zip(affine.columns, affine.stored, strict=True)):
                    terms = [arb(w) * x for w, x in zip((*weights, bias), (*seen, ONE), strict=True) if w != 0]
                    pair, whole = len(terms) == 2 and all(map(power_of_two, weights)), reach[0, i] + affine.bias[i]
                    signs = [sum(((s * x).max(ZERO) for x in terms), ZERO) for s in (1, -1)]
                    part = size(terms[0] + terms[1]) if pair else largest(signs)
                    rounding = affine_rounding(self.machine, weights, bias, part if pair else whole, part)
                    if self.folded:  # virtual columns are read off by their readers, and at last
                        rounding = self.folded.readout[i] if number == len(self.layers) - 1 else ZERO
                    keep(self.machine, whole)
                    out[t][column] = size(passed[0, i] + off[0, i] + affine.off_bias[i] + rounding)
        for rule in self.sites[number]:
            rule(errors, found, out)
        if self.folded:
            self.folded.check(number, layer, errors, found, out)
        return out

    # -- affine columns -------------------------------------------------------------------------------------------

    def _affine(self, layer: Layer) -> Affine:
        made = {i for place in layer.places for i, (v, c) in enumerate(layer.after)
                if v == place.op and place.channel in (None, c)}  # fmt: skip
        rows = {column: i for i, column in enumerate(layer.before)}
        columns = tuple(i for i in range(len(layer.after)) if i not in made)
        n = len(layer.before)
        weight, off, bias, off_bias, stored = [], [], [], [], []
        for i in columns:
            for group in layer.groups:
                if any(any(row[i] != 0 for row in head) for head in group.tables["W_O"]):
                    raise CertificateError(f"heads write column {i} of a layer, which no operation of theirs makes")
            form = self._form(layer, i)
            mine = [row[i] for row in layer.skip]
            wanted, meant = [fmpq(0)] * n, [fmpq(0)] * n
            for column, factor in form.weights.items():
                if column not in rows:
                    raise CertificateError(f"a state lacks column {column}, which column {i} after it is made of")
                wanted[rows[column]], meant[rows[column]] = factor, form.off.get(column, fmpq(0))
            weight.append([arb(abs(x)) for x in mine])
            off.append([size(arb(abs(exact(x) - w) + r)) for x, w, r in zip(mine, wanted, meant, strict=True)])
            bias.append(arb(abs(layer.bias[i])))
            off_bias.append(size(arb(abs(exact(layer.bias[i]) - form.bias) + form.off_bias)))
            stored.append((mine, layer.bias[i]))
        return Affine(columns, _transposed(weight, n), _transposed(off, n), bias, off_bias, stored)

    def _form(self, layer: Layer, i: int) -> Form:
        """What a column should be: itself, where the state before has it, its form in atoms otherwise."""
        v, c = column = layer.after[i]
        return Form({column: fmpq(1)}, fmpq(0)) if column in layer.before else self.forms[v][c]

    def _sum(self, number: int, column: int) -> Sum | None:
        """A column of the state before a layer as a sum of squares, where it is one."""
        if self.folded or number == 0 or column not in self.affine[number - 1].columns:
            return None
        layer, affine = self.layers[number - 1], self.affine[number - 1]
        known = [square for square in layer.before if self._is_square(square, number - 1)]
        stored = affine.stored[affine.columns.index(column)]
        return sum_of(self.machine, self._form(layer, column), layer.before, stored, known)

    def _is_square(self, column: Column, number: int) -> bool:
        """Whether a column of the state before a layer was squared by heads, and only carried on since."""
        for k in reversed(range(number)):
            layer, affine, i = self.layers[k], self.affine[k], self.layers[k].after.index(column)
            if i not in affine.columns:
                return (k, column) in self.squared
            if affine.stored[affine.columns.index(i)] != ([float(x == column) for x in layer.before], 0.0):
                return False
        return False

    # -- heads ----------------------------------------------------------------------------------------------------

    def _site(self, layer: Layer, place: Place) -> Rule:
        op = self.program.ops[place.op]
        if op.word in ("apply", "product"):
            return self._scalar(layer, place)
        if op.word not in RULES:
            raise NotProved(f"the kernel does not cover heads for {op.word!r} yet")
        if self.folded and op.word == "normalise":
            return norm(self.program, layer, place, self.machine, self.chosen.tables, *self.folded.spread(place))
        if op.word == "normalise" and op.extra["centred"]:
            return norm(self.program, layer, place, self.machine, self.chosen.tables, ratios=self._ratios(place))
        rule, folded = RULES[op.word](self.program, layer, place, self.machine, self.chosen.tables), self.folded
        if folded is None:
            return rule
        return lambda errors, found, out: rule(folded.moved(errors, place, layer), found, out)

    def _ratios(self, place: Place) -> list[arb | None]:
        """How far channels that a site reads are off, relatively, None of an exact 0: differences of two entries of the
        input, rounded once (lemma K17)."""
        (value,), affine, layer, found = self.program.ops[place.op].inputs, self.affine[0], self.layers[0], []
        for c in range(self.program.ops[value].width):
            i = layer.after.index((value, c)) if place.layer == 1 and (value, c) in layer.after else -1
            j = affine.columns.index(i) if i in affine.columns else -1
            weights, bias = affine.stored[j] if j >= 0 else ([], 1.0)
            used = [(w, column) for w, column in zip(weights, layer.before, strict=False) if w != 0]
            plain = all(power_of_two(w) and abs(w) >= 1 and column[0] == 0 for w, column in used) and len(used) < 3
            if not plain or bias or affine.off_bias[j] > 0 or any(affine.off[k, j] > 0 for k in range(len(weights))):
                raise NotProved(f"operation {place.op} centres rows that are not differences of the input")
            found.append((None, ZERO, self.machine.u)[len(used)])
        if None not in found:
            raise NotProved(f"operation {place.op} centres rows without a channel that is 0")
        return found

    def _scalar(self, layer: Layer, place: Place) -> Rule:
        """Heads that read one scalar: the stored numbers as a `HeadSum`, and its errors on the cells of its table."""
        op = self.program.ops[place.op]
        if place.channel is None or place.table is None or op.word not in ("apply", "product"):
            raise CertificateError(f"operation {place.op} ({op.word}) is not one of a scalar")
        operands = [(v, place.channel) for v in op.inputs]
        rows = {column: i for i, column in enumerate(layer.before)}
        if any(column not in rows for column in operands):
            raise CertificateError(f"the heads of operation {place.op} do not see what it reads")
        at = [rows[column] for column in operands]
        x, y = (None, at[0]) if len(at) == 1 or at[0] == at[1] else (at[1], at[0]) if place.swapped else (at[0], at[1])
        fn: Function | None = op.function if op.word == "apply" else function("square") if x is None else None
        if (place.op, place.channel) not in layer.after:
            raise CertificateError(f"no column after layer {place.layer} is the result of operation {place.op}")
        i = layer.after.index((place.op, place.channel))
        site = _stored_site(layer, place, i, x, y, fn, self.dtype)
        if place.op in self.even:
            site = replace(site, reading=even(site.heads, self.even[place.op], self.dtype))
        if self.folded:
            site = self.folded.loosened(site, place, layer.places)
        edges = self.chosen.tables[place.table]
        if (fn, place.table) not in self.tables:
            self.tables[fn, place.table] = Table(fn, edges)
        table = self.tables[fn, place.table]
        if (site, place.table) not in self.known:
            self.known[site, place.table] = table.errors(site)
        slopes, rests = self.known[site, place.table]
        if self.folded:
            self.folded.known(place.layer, i, site, table, x, y)
        if op.word == "apply":
            self.by_op.setdefault(place.op, table)
        summed = self._sum(place.layer, y) if fn is not None and fn.power < 1 else None
        halves = None
        if self.roots and fn is not None and fn.name == "square" and not self.folded:
            halves = table.errors(halved(site))
            self.squared.add((place.layer, (place.op, place.channel)))
        key = place.op, place.channel

        steepest = largest([size(arb(head.value[0])) * (1 + size(arb(head.out))) for head in site.heads])
        steepest += size(arb(site.skip[0]))

        def rule(errors: Errors, found: list[Value], out: Errors) -> None:
            for t, row in enumerate(errors):
                entry_y, e_y = found[layer.before[y][0]][t][layer.before[y][1]], row[y]
                cells = table.between(down(arb(entry_y.low) - e_y), up(arb(entry_y.high) + e_y))
                if cells is None:
                    raise Blind(f"operation {place.op} leaves its table")
                first, last = cells
                own = arb(max(rests[first:last]))
                if x is None:
                    assert fn is not None
                    passed = _moved(fn, table, first, last, entry_y, e_y)
                    if summed is not None:
                        passed = passed.min(summed.moved(t, (entry_y.low, entry_y.high), fn.power, self.squares))
                    if halves is not None:
                        steep, rest = (arb(max(part[first:last])) for part in halves)
                        self.squares[t, *key] = e_y, steep, rest + steep * size(arb(place.pivot))
                else:
                    entry_x, e_x = found[layer.before[x][0]][t][layer.before[x][1]], row[x]
                    away = entry_x.away(place.pivot) + e_x
                    own += arb(max(slopes[first:last])) * away
                    keep(self.machine, (away + size(arb(place.pivot))) * steepest)
                    passed = entry_x.size * e_y + (entry_y.size + e_y) * e_x
                out[t][i] = size(passed + own)

        return rule


def _moved(fn: Function, table: Table, first: int, last: int, entry: Entry, error: arb) -> arb:
    """How far g can move when its argument moves by `error` (lemma K11)."""
    if error.is_zero():
        return ZERO
    steep = max(table.slope[first:last])
    found = up(arb(steep) * error) if math.isfinite(steep) else math.inf
    if fn.power < 1 and error < 1e300:  # |a^p - b^p| <= |a - b|^p
        found = min(found, up(error ** arb(fmpq(fn.power.numerator, fn.power.denominator))))
    if not math.isfinite(found):
        found = up(arb(max(table.high[first:last])) - arb(min(table.low[first:last])))
    return arb(found)


def _stored_site(
    layer: Layer, place: Place, column: int, x: int | None, y: int, fn: Function | None, dtype: str
) -> HeadSum:
    """The numbers of a site's heads, and that there are no others: everything else that they could read is 0."""
    if place.group >= len(layer.groups):
        raise CertificateError(f"operation {place.op} has its heads in group {place.group}, which is not there")
    group = layer.groups[place.group]
    mine = range(place.first, place.first + place.heads)
    for number, other in enumerate(layer.groups):
        for h in range(other.heads):
            writes = any(row[column] != 0 for row in other.table("W_O", h))
            if writes and not (number == place.group and h in mine):
                raise CertificateError(f"heads of another operation write the result of operation {place.op}")
    if mine.stop > group.heads or len(group.tables["W_O"]) != group.heads:
        raise CertificateError(f"operation {place.op} has {place.heads} heads from {place.first} on; there are fewer")
    if (
        group.scope == "tokens"
        or "W_K" in group.tables
        or "M_K" not in group.tables
        or (group.scope == "self" and "b_K" not in group.tables)
    ):
        raise CertificateError(f"the heads of operation {place.op} must have constant keys, and memory")
    reads = {y, *([] if x is None else [x])}
    heads = []
    for h in mine:
        query, out = group.table("W_Q", h), group.table("W_O", h)
        if any(w != 0 for i, row in enumerate(query) if i != y for w in row):
            raise CertificateError(f"the queries of operation {place.op} read other columns than its scalar")
        if len(out) != 1:
            raise CertificateError(f"the heads of operation {place.op} have {len(out)} value channels; 1 is covered")
        bias = group.table("b_Q", h) or [0.0] * len(query[0])
        keys = [tuple(key) for key in group.table("M_K", h)]
        value, own = (0.0, 0.0, 0.0), group.scope == "self"
        if own:
            keys.insert(0, tuple(group.table("b_K", h)))
            weight = group.table("W_V", h) or [[0.0]] * len(query)
            shift = group.table("b_V", h) or [0.0]
            if any(row[0] != 0 for i, row in enumerate(weight) if i not in reads):
                raise CertificateError(f"the values of operation {place.op} read other columns than its own")
            value = (0.0 if x is None else weight[x][0], weight[y][0], shift[0])
        memory = tuple(row[0] for row in group.table("M_V", h))
        heads.append(Head(tuple(zip(query[y], bias, strict=True)), tuple(keys), own, value, memory, out[0][column]))
    if any(row[column] != 0 for i, row in enumerate(layer.skip) if i not in reads):
        raise CertificateError(f"the skip of operation {place.op} reads other columns than its own")
    skip = (0.0 if x is None else layer.skip[x][column], layer.skip[y][column], layer.bias[column])
    return HeadSum(tuple(heads), skip, fn, place.pivot if x is not None else 0.0, dtype)


def _all_claimed(layer: Layer) -> None:
    """Refuse heads that belong to no operation: what they compute might be endless, and 0 times that is not 0."""
    claimed = {(p.group, h) for p in layer.places for h in range(p.first, p.first + p.heads)}
    if claimed != {(g, h) for g, group in enumerate(layer.groups) for h in range(group.heads)}:
        raise CertificateError("some heads of a layer carry out no operation, or some operation's heads are not there")


def _transposed(columns: list[list[arb]], n: int) -> arb_mat:
    return arb_mat(n, len(columns), [column[i] for i in range(n) for column in columns])


def _shown(low: tuple[float, ...], high: tuple[float, ...]) -> str:
    return ", ".join(f"[{a:.4g}, {b:.4g}]" for a, b in zip(low[:4], high[:4], strict=True))
