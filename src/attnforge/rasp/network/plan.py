"""Which heads a program needs, in which layer, over which codes (constructions P1 to P6 of docs/rasp_theory.md).

Two passes. *Demands*, from the output backwards: which features of every op someone reads. What is linear in features
that are there already (a sum of counts, a map of one-hot tokens) costs nothing; everything else is a head. *Heads*,
forwards: queries, keys and values of each head as affine forms of features, and the layer in which all of them are
there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from ...arguments import shortened
from ...certificates.rounding import UNIT
from ...dtypes import Array
from ...errors import DomainError
from ..language import (
    Aggregate,
    Constant,
    Indices,
    Map,
    Operator,
    Select,
    Selector,
    SelectorWidth,
    SOp,
    Tokens,
    tokens,
    value_text,
)  # fmt: skip
from ..values import Value, is_numeric
from .facts import Facts, Ids, distinct_rows
from .layout import Feature, HeadRole
from .normal import conjuncts, order_free

#: What selected keys are ahead of others. Half of it, the lead of a sink, still makes exponentials vanish (104.5, 746).
GAMMA = {torch.float32: 256.0, torch.float64: 2048.0}
SINK = 2.0**40  # the weight of a sink beside counted tokens: with it, what is read is the count to 10 digits
SLOTS = 1024  # combinations up to which maps of maps become one table
MOST_SLOTS = 1 << 14  # and for one map at all
FEW = 8  # values up to which numbers are one-hot: no larger than lines with their constant and their margin
WORDS = 72  # characters of an op in the name of its head
SLACK = 0.08  # of GAMMA that the error of a count may eat in a query: a sink leaves 128 of 256, and 104.5 are needed

REAL = Feature("real")


@dataclass
class FeatureForm:
    """An affine form of features at one position."""

    terms: dict[Feature, float] = field(default_factory=dict)
    constant: float = 0.0

    def plus(self, other: FeatureForm, by: float = 1.0) -> FeatureForm:
        """The sum with a multiple of another form."""
        return FeatureForm.total([(self, 1.0), (other, by)])

    @classmethod
    def total(cls, parts: Iterable[tuple[FeatureForm, float]]) -> FeatureForm:
        """The sum of multiples of forms."""
        terms: dict[Feature, float] = {}
        constant = 0.0
        for form, by in parts:
            constant += by * form.constant
            for feature, c in form.terms.items():
                terms[feature] = terms.get(feature, 0.0) + by * c
        return cls({f: c for f, c in terms.items() if c}, constant)


@dataclass
class PlannedHead:
    """One head: query, key and value coordinates, constant slots, and the feature that each value coordinate is."""

    seat: HeadRole
    query: list[FeatureForm]
    key: list[FeatureForm]
    value: list[FeatureForm]
    slot_keys: Array
    slot_values: Array
    writes: list[tuple[Feature, float]]
    layer: int
    label: str


@dataclass
class HeadPlan:
    """Heads by layer, and the read-out: for each value of each output (or the number itself) a form."""

    heads: list[PlannedHead]
    readout: list[FeatureForm]
    layer: int


def make_plan(facts: Facts, dtype: torch.dtype) -> HeadPlan:
    """The plan of a program."""
    return _Planner(facts, dtype).plan()


Answer = TypeVar("Answer")


def _once(ask: Callable[[_Planner, SOp], Answer]) -> Callable[[_Planner, SOp], Answer]:
    """A question about an op whose answer is kept: it is asked for every value of the op."""

    def answer(planner: _Planner, node: SOp) -> Answer:
        key = (ask.__name__, node)
        if key not in planner.kept:
            planner.kept[key] = ask(planner, node)
        return planner.kept[key]  # type: ignore[no-any-return]

    return answer


class _Planner:
    def __init__(self, facts: Facts, dtype: torch.dtype):
        self.kept: dict[tuple[str, SOp], Any] = {}
        self.facts, self.u, self.gamma = facts, UNIT[dtype], GAMMA[dtype]
        self.heads: list[PlannedHead] = []
        self.ready: dict[Feature, int] = {REAL: 0}
        self.demands: dict[SOp, set[str]] = {}

    def plan(self) -> HeadPlan:
        facts = self.facts
        if facts.domain.causal:
            self._refuse_later()
        sops = [node for node in facts.order if isinstance(node, SOp)]
        for node in sops:
            self.variables(node)  # asked in this order, no question goes deep
        for output in facts.outputs:
            self._demand(output, "number" if facts.numeric(output) or self._numbers(output) else "is")
        for node in reversed(sops):
            self._spread(node)
        for node in sops:
            self._build(node)
        readout = [form for output in facts.outputs for form in self._logits_of(output)]
        return HeadPlan(self.heads, readout, self._layer(readout))

    def _logits_of(self, output: SOp) -> list[FeatureForm]:
        """For each value of an output a form, or the number itself."""
        if self.facts.numeric(output):
            return [self.number(output)]
        if self._numbers(output):
            return self._lines(self.number(output), self.facts.numbers(output))
        return [self.indicator(output, v) for v in range(len(self.facts.values(output)))]

    def _refuse_later(self) -> None:
        for node in self.facts.order:
            if isinstance(node, (Aggregate, SelectorWidth)) and not self.facts.until(node.selector):
                raise DomainError(
                    f"the op {node.label} may look at later tokens, which causal=True forbids: restrict its selector, "
                    "for example with & rasp.select(indices, indices, rasp.leq), or leave causal out"
                )

    # ---- what is read how

    @_once
    def _trivial(self, node: SOp) -> bool:
        return self.facts.listed(node) and len(self.facts.values(node)) == 1

    def _scalar(self, node: SOp) -> bool:
        """Whether an op is a sum of several others that are numbers: it is read as one number."""
        if not isinstance(node, Map) or not self.facts.is_number(node):
            return False
        terms = self.facts.linear(node)[0]
        return len(terms) > 1 and all(self._numbers(atom) for atom in terms)

    @_once
    def _numbers(self, node: SOp) -> bool:
        """Whether an op is carried as a number, and not one-hot."""
        if not self.facts.is_number(node) or isinstance(node, Tokens):
            return False
        if not self.facts.listed(node) or isinstance(node, (SelectorWidth, Indices)):
            return True
        if self._scalar(node) or (isinstance(node, Aggregate) and self.facts.averages(node)):
            return True
        reads = self.variables(node)
        if isinstance(node, Map) and len(reads) == 1 and reads[0] != node and not self._numbers(reads[0]):
            return False  # a map of something one-hot is one-hot for nothing
        return len(self.facts.values(node)) > FEW

    @_once
    def variables(self, node: SOp) -> list[SOp]:
        """What a map is a function of when maps of maps are taken apart."""
        if self._trivial(node):
            return []
        if not isinstance(node, Map) or self._scalar(node):
            return [node]
        terms = self._terms(node)
        parts = node.operands if node in terms else (*terms,)
        return [*dict.fromkeys(v for part in parts for v in self.variables(part))]

    def _terms(self, node: SOp) -> dict[SOp, Fraction]:
        """The ops that an op is a sum of multiples of; itself alone, where it is no sum."""
        return self.facts.linear(node)[0] if self.facts.is_number(node) else {node: Fraction(1)}

    def _reads(self, node: SOp) -> list[SOp]:
        """What the head of a map reads: as deep as a table allows."""
        if not isinstance(node, Map) or self._scalar(node):
            return [node]
        deep = self.variables(node)
        size = math.prod(len(self.facts.values(v)) for v in deep)
        if node not in self._terms(node):
            return deep if size <= MOST_SLOTS else [node]
        direct = [*dict.fromkeys(o for o in node.operands if not self._trivial(o))]
        if size <= SLOTS or size <= 2 * math.prod(len(self.facts.values(v)) for v in direct):
            return deep
        count = len(distinct_rows(self.facts.joint(deep))[0]) if size <= 64 * SLOTS else size
        return deep if count <= SLOTS else direct

    @_once
    def _source(self, node: SOp) -> SOp | None:
        """The one-hot op that a map is a function of, if there is one: then its features are linear."""
        reads = self.variables(node) if isinstance(node, Map) else []
        return reads[0] if len(reads) == 1 and reads[0] != node and not self._numbers(reads[0]) else None

    def _clean(self, node: SOp) -> bool:
        """Whether an op's number comes without an error that counts."""
        if isinstance(node, (Constant, Tokens, Indices)) or self._trivial(node) or self._source(node) is not None:
            return True
        if isinstance(node, Aggregate):
            return self.facts.single(node.selector)
        if isinstance(node, SelectorWidth):
            return False
        terms = self.facts.linear(node)[0]
        return node in terms or all(self._clean(atom) for atom in terms)

    def _demand(self, node: SOp, *kinds: str) -> None:
        if not self._trivial(node):
            self.demands.setdefault(node, set()).update(kinds)

    def _own(self, node: SOp, kind: str) -> bool:
        """Whether a feature has to be written by a head that maps the op itself."""
        if isinstance(node, (Tokens, Indices)) or self._source(node) is not None:
            return False
        if kind == "number":
            return False
        if kind == "clean":
            return not self._clean(node)
        if kind == "square" and self.facts.is_number(node):
            terms = self.facts.linear(node)[0]
            if node not in terms and len(terms) == 1:
                return self._own(next(iter(terms)), "square")
        if isinstance(node, Aggregate):
            return self.facts.averages(node)
        return True

    def _spread(self, node: SOp) -> None:
        """What the demands on an op demand of others."""
        kinds = self.demands.get(node, set())
        if not kinds or isinstance(node, (Tokens, Indices, Constant)):
            return
        source = self._source(node)
        if source is not None:
            self._demand(source, "is")
            return
        own = {kind for kind in kinds if self._own(node, kind)}
        if isinstance(node, Map):
            terms = self._terms(node)
            reads = self._reads(node) if own or node in terms else []
            for read in reads:
                if read != node:
                    self._demand(read, "number" if self._numbers(read) else "is")
            if node in terms:
                return
            if node in reads or "number" in kinds:
                for atom in terms:
                    self._demand(atom, "number")
            for kind in kinds - own - {"number"}:
                for atom in terms:
                    self._demand(atom, *(("square", "clean") if kind == "square" else (kind,)))
            return
        if own:  # what the map of the op reads
            kinds.add("number" if self._numbers(node) else "is")
        if isinstance(node, Aggregate):
            for kind in kinds - own:
                self._demand(node.operand, "clean" if kind == "number" and self.facts.single(node.selector) else kind)
            self._demand_selector(node.selector, not self.facts.nonempty(node.selector))
        elif isinstance(node, SelectorWidth):
            self._demand_selector(node.selector, True)

    def _demand_selector(self, selector: Selector, levelled: bool) -> None:
        for part in conjuncts(self._order_free(selector)[0]):
            if self._lined(part, levelled):
                assert isinstance(part, Select)
                self._demand(part.keys, "clean", "square")
                self._demand(part.queries, self._query_kind(part, levelled), *(("square",) if levelled else ()))
            else:
                for side in self.facts.sides(part):
                    for variable in self._side(side):
                        self._demand(variable, "is")

    def _side(self, nodes: Iterable[SOp]) -> list[SOp]:
        """One-hot ops that one side of a table reads: what its ops are functions of, or, if several, the ops."""
        nodes = [node for node in nodes if not self._trivial(node)]
        deep = [*dict.fromkeys(v for node in nodes for v in self.variables(node))]
        return nodes if len(deep) > 1 or (len(nodes) == 1 and deep and self._numbers(deep[0])) else deep

    def _order_free(self, selector: Selector) -> tuple[Selector, bool]:
        rest, masked = order_free(selector)
        return rest, masked or self.facts.domain.causal

    def _lined(self, part: Selector, levelled: bool) -> bool:
        """Whether a select compares whole numbers: then it needs three coordinates only."""
        if not isinstance(part, Select) or not isinstance(part.predicate, Operator) or part.predicate.name != "eq":
            return False
        sides = (part.keys, part.queries)
        if not all(self.facts.is_number(s) and all(isinstance(v, int) for v in self.facts.values(s)) for s in sides):
            return False
        few = all(len(self.facts.values(s)) <= FEW for s in sides)
        cheap = all(isinstance(s, (Tokens, Indices)) or self._source(s) is not None for s in sides)
        if cheap and 4 * max(abs(end) for s in sides for end in self.facts.span(s)) ** 2 > 1 / self.u:
            return False  # P4 would be rounded, and one-hot codes are there
        return not few or not (cheap or not any(self._numbers(s) for s in sides))

    def _query_kind(self, part: Select, levelled: bool) -> str:
        """How a comparison reads its query: repaired first where errors would eat the margin, which is half as large
        beside a sink, or would weigh in a count."""
        if self._clean(part.queries):
            return "number"
        if levelled:
            return "clean"
        terms = self.facts.linear(part.queries)[0]
        most = float(self.facts.domain.max_length)
        error = sum(abs(float(c)) for c in terms.values()) * most * (most + 8) * self.u
        reach = max(abs(float(end)) for end in self.facts.span(part.keys))
        return "number" if 2 * error * reach <= SLACK else "clean"

    # ---- forms

    def _take(self, feature: Feature) -> FeatureForm:
        self.ready.setdefault(feature, 0)
        return FeatureForm({feature: 1.0})

    def number(self, node: SOp, kind: str = "number") -> FeatureForm:
        """The value of an op as a form."""
        facts = self.facts
        if self._trivial(node):
            return FeatureForm({}, float(facts.values(node)[0]))  # type: ignore[arg-type]
        if kind == "clean":
            feature = Feature("clean", facts.at[node])
            if feature in self.ready:
                return FeatureForm({feature: 1.0})
        source = tokens if isinstance(node, Tokens) else self._source(node)
        if source is not None:
            return self._by_values(node, source, [float(v) for v in facts.values(node)])  # type: ignore[arg-type]
        if isinstance(node, Indices):
            return self._take(Feature("number", facts.at[node]))
        feature = Feature("number", facts.at[node])
        if feature in self.ready:
            return FeatureForm({feature: 1.0})
        terms, constant = facts.linear(node)
        if node not in terms:
            form = FeatureForm({}, float(constant))
            for atom, c in terms.items():
                form = form.plus(self.number(atom, kind), float(c))
            return form
        assert Feature("is", facts.at[node], 0) in self.ready, node.label
        return self._by_values(node, node, [float(v) for v in facts.values(node)])  # type: ignore[arg-type]

    def square(self, node: SOp) -> FeatureForm:
        """The square of an op's value as a form."""
        facts = self.facts
        if self._trivial(node):
            return FeatureForm({}, float(facts.values(node)[0]) ** 2)  # type: ignore[arg-type]
        feature = Feature("square", facts.at[node])
        if feature in self.ready:
            return FeatureForm({feature: 1.0})
        source = tokens if isinstance(node, Tokens) else self._source(node)
        if source is not None:
            return self._by_values(node, source, [float(v) ** 2 for v in facts.values(node)])  # type: ignore[arg-type]
        if isinstance(node, Indices):
            return self._take(feature)
        terms, constant = facts.linear(node)
        if node not in terms and len(terms) == 1:
            ((atom, c),) = terms.items()
            form = FeatureForm({}, float(constant) ** 2).plus(self.square(atom), float(c) ** 2)
            return form.plus(self.number(atom, "clean"), 2 * float(c * constant))
        return self._by_values(node, node, [float(v) ** 2 for v in facts.values(node)])  # type: ignore[arg-type]

    def _by_values(self, node: SOp, source: SOp, numbers: Sequence[float]) -> FeatureForm:
        """A function of an op, given by the number for each of its values, over the one-hot op it is a map of."""
        op = self.facts.at[source]
        return FeatureForm.total(
            (self._take(Feature("is", op, i)), number)
            for number, ids in zip(numbers, self._places(node, source), strict=True)
            for i in ids if number
        )  # fmt: skip

    def _places(self, node: SOp, source: SOp) -> list[list[int]]:
        """For each value of an op the numbers of the values of the one-hot op it is a map of (or is itself)."""
        key = ("places", node)
        if key not in self.kept:
            found: list[list[int]] = [[] for _ in self.facts.values(node)]
            joint = self.facts.joint([node, source]) if node is not source else [np.arange(len(found))] * 2
            for value, i in zip(*(column.tolist() for column in distinct_rows(joint)), strict=True):
                found[value].append(i)
            self.kept[key] = found
        return self.kept[key]  # type: ignore[no-any-return]

    def indicator(self, node: SOp, value: int) -> FeatureForm:
        """Whether an op has a value, as a form."""
        if self._trivial(node):
            return FeatureForm({}, 1.0)
        source = self._source(node)
        if source is None:
            return self._take(Feature("is", self.facts.at[node], value))
        op = self.facts.at[source]
        return FeatureForm.total((self._take(Feature("is", op, i)), 1.0) for i in self._places(node, source)[value])

    def _layer(self, forms: Iterable[FeatureForm]) -> int:
        return max((self.ready[f] for form in forms for f in form.terms), default=0)

    # ---- heads

    def _build(self, node: SOp) -> None:
        kinds = self.demands.get(node, set())
        if not kinds or isinstance(node, (Tokens, Indices, Constant)) or self._source(node) is not None:
            return
        own = {kind for kind in kinds if self._own(node, kind)}
        if isinstance(node, Map):
            if node in self._terms(node):
                own = {"number" if kind == "clean" else kind for kind in kinds}
            if own:
                self._map_head(node, own)
            return
        if isinstance(node, Aggregate):
            self._aggregate_head(node, kinds - own)
        elif isinstance(node, SelectorWidth):
            self._count_head(node)
        if own:
            self._map_head(node, own)

    def _written(self, node: SOp, kinds: set[str]) -> list[Feature]:
        op, found = self.facts.at[node], []
        for kind in sorted(kinds):
            many = range(len(self.facts.values(node))) if kind == "is" else (-1,)
            found += [Feature(kind, op, v) for v in many]
        return found

    def _finish(self, head: PlannedHead) -> None:
        forms = [*head.query, *head.key, *head.value]
        head.layer = self._layer(forms)
        self.heads.append(head)
        for feature, _ in head.writes:
            self.ready[feature] = head.layer + 1

    def _map_head(self, node: SOp, kinds: set[str]) -> None:
        """P1, P2: a slot for each combination of what is read."""
        facts, reads = self.facts, self._reads(node)
        columns = facts.joint([*reads, node]) if reads != [node] else [np.arange(len(facts.values(node)))] * 2
        rows, classes = _classes(distinct_rows(columns), [self._numbers(read) for read in reads])
        query: list[FeatureForm] = []
        keys = []
        if len(rows) > MOST_SLOTS:
            raise node.fail(f"needs a table of {len(rows)} combinations of values, and the limit is {MOST_SLOTS}")
        rest = np.zeros(len(rows))  # what the constant coordinate holds
        for i, read in enumerate(reads):
            group = classes[i]
            if self._numbers(read):
                self._refuse_ties(read, group)
                middle, slopes, steps = _lines(facts.numbers(read), group, self.gamma)
                query.append(self.number(read).plus(FeatureForm({}, -middle)))
                keys.append(slopes[rows[:, i]])
                rest += steps[rows[:, i]]
            else:
                for c in range(int(group.max()) + 1):
                    query.append(self._sum_of([read], np.flatnonzero(group == c)))
                    keys.append(np.where(rows[:, i] == c, self.gamma, 0.0))
        if rest.any():
            query.append(FeatureForm({}, 1.0))
            keys.append(rest)
        writes = self._written(node, kinds)
        values = np.array([[self._ideal(node, f, int(v)) for f in writes] for v in rows[:, -1]])
        label = _label("map", node)
        seat = HeadRole("map", facts.at[node])
        self._finish(PlannedHead(seat, query, [], [], np.stack(keys, 1), values, [(f, 1.0) for f in writes], 0, label))

    def _refuse_ties(self, node: SOp, group: Ids) -> None:
        """Raise where a map tells two numbers apart that no column does."""
        numbers = self.facts.numbers(node)[: len(group)]
        same = np.flatnonzero((np.diff(numbers) == 0) & (np.diff(group) != 0))
        if len(same):
            a, b = (value_text(self.facts.values(node)[i]) for i in (same[0], same[0] + 1))
            raise node.fail(f"has the values {a} and {b}, which a map tells apart and no float64 does")

    def _ideal(self, node: SOp, feature: Feature, value: int) -> float:
        if feature.kind == "is":
            return float(feature.value == value)
        number = float(self.facts.values(node)[value])  # type: ignore[arg-type]
        return number**2 if feature.kind == "square" else number

    def _logits(self, selector: Selector, levelled: bool) -> tuple[list[FeatureForm], list[FeatureForm], bool]:
        """P3, P4: coordinates whose products are 0 for selected keys (or the same for all) and -gamma or less for
        others; the first query coordinate is the constant 1."""
        rest, causal = self._order_free(selector)
        query, key = [FeatureForm({}, 1.0)], [FeatureForm()]
        reach = 0.0
        for part in conjuncts(rest):
            if self._lined(part, levelled):
                assert isinstance(part, Select)
                x = self.number(part.queries, self._query_kind(part, levelled))
                y, beta = self.number(part.keys, "clean"), self.gamma
                query.append(x)
                key.append(FeatureForm().plus(y, 2 * beta))
                key[0] = key[0].plus(self.square(part.keys), -beta)
                if levelled:
                    query.append(self.square(part.queries))
                    key.append(FeatureForm({}, -beta))
                ends = [max(abs(float(e)) for e in self.facts.span(side)) for side in (part.queries, part.keys)]
                reach += beta * (2 * ends[0] * ends[1] + ends[1] ** 2 + ends[0] ** 2)
            else:
                reach += self._table(part, query, key)
        if not causal:
            far = 2.0 ** math.ceil(math.log2(2 * (reach + self.gamma)))  # the reach of padding, and a margin more
            query.append(FeatureForm({}, far))
            key.append(FeatureForm({REAL: 1.0}, -1.0))
        return query, key, causal

    def _table(self, part: Selector, query: list[FeatureForm], key: list[FeatureForm]) -> float:
        """Coordinates of a table of predicates: one for each kind of key, or of query, whichever are fewer."""
        facts = self.facts
        asked, given = facts.sides(part)
        sides = [self._side(asked), self._side(given)]
        if max(map(len, sides)) > 1:
            names = ", ".join(node.label for side in sides for node in side)
            raise part.fail(f"compares several ops at once ({names}), which no table is made for")
        ids = [facts.joint([*nodes, *side]) for nodes, side in ((asked, sides[0]), (given, sides[1]))]
        hits = facts.selected(part, dict(zip(asked, ids[0], strict=False)), dict(zip(given, ids[1], strict=False)))
        own = [[*range(len(column[0]))] if not side else column[-1] for side, column in zip(sides, ids, strict=True)]
        sizes = [len(facts.values(side[0])) if side else 1 for side in sides]
        table = np.ones(tuple(sizes), dtype=bool)
        table[
            np.ix_(*(np.asarray(o) if s else np.zeros(len(o), dtype=int) for o, s in zip(own, sides, strict=True)))
        ] = hits
        columns, kinds = np.unique(table, axis=1, return_inverse=True)
        rows, sorts = np.unique(table, axis=0, return_inverse=True)
        reach = 0.0
        by_key = columns.shape[1] <= len(rows)
        groups, patterns = (kinds.reshape(-1), columns.T) if by_key else (sorts.reshape(-1), rows)
        grouped, other = (sides[1], sides[0]) if by_key else (sides[0], sides[1])
        for g, pattern in enumerate(patterns):
            if pattern.all():
                continue
            member = self._sum_of(grouped, np.flatnonzero(groups == g))
            penalty = self._sum_of(other, np.flatnonzero(~pattern), -self.gamma)
            query.append(penalty if by_key else member)
            key.append(member if by_key else penalty)
            reach += self.gamma * (1 + len(key[-1].terms))
        return reach

    def _sum_of(self, side: list[SOp], values: Ids, by: float = 1.0) -> FeatureForm:
        if not side:
            return FeatureForm({}, by if len(values) else 0.0)
        return FeatureForm.total((self.indicator(side[0], int(v)), by) for v in values)

    def _aggregate_head(self, node: Aggregate, kinds: set[str]) -> None:
        """P3: what is selected, or the default in a sink half a margin below."""
        facts, sink = self.facts, not self.facts.nonempty(node.selector)
        query, key, causal = self._logits(node.selector, sink)
        if not sink and len(query) > 1 and not key[0].terms and not key[0].constant:
            query, key = query[1:], key[1:]
        writes = self._written(node, kinds)
        value = []
        for feature in writes:
            if feature.kind == "is":
                wanted = facts.values(node)[feature.value]
                here = facts.index(node.operand).get(wanted)
                value.append(FeatureForm() if here is None else self.indicator(node.operand, here))
            elif feature.kind == "square":
                value.append(self.square(node.operand))
            else:
                value.append(self.number(node.operand, "clean"))
        slot_keys, slot_values = np.zeros((0, len(query))), np.zeros((0, len(value)))
        if sink:
            slot_keys = np.zeros((1, len(query)))
            slot_keys[0, 0] = -self.gamma / 2
            slot_values = np.array([[_default(node.default, facts, node, f) for f in writes]])
        label = _label("aggregate", node)
        seat = HeadRole("aggregate", facts.at[node], causal)
        self._finish(PlannedHead(seat, query, key, value, slot_keys, slot_values, [(f, 1.0) for f in writes], 0, label))

    def _count_head(self, node: SelectorWidth) -> None:
        """P5: the weight of what is selected beside a sink of weight 2^40, times that weight."""
        query, key, causal = self._logits(node.selector, True)
        slot_keys = np.zeros((1, len(query)))
        slot_keys[0, 0] = math.log(SINK)
        label = _label("count", node)
        seat, feature = HeadRole("count", self.facts.at[node], causal), Feature("number", self.facts.at[node])
        self._finish(
            PlannedHead(
                seat, query, key, [FeatureForm({}, 1.0)], slot_keys, np.zeros((1, 1)), [(feature, SINK)], 0, label
            )
        )

    def _lines(self, form: FeatureForm, numbers: Array) -> list[FeatureForm]:
        """Logits of numbers: 2 (v - c) x - v^2 + c^2, the largest at the nearest number."""
        middle = float(np.round((numbers[0] + numbers[-1]) / 2))
        return [FeatureForm({}, -(v * v) + middle * middle).plus(form, 2 * (v - middle)) for v in numbers]


def _label(kind: str, node: SOp) -> str:
    name = node.name or node.label.strip("'")
    return f"{kind}: {shortened(name, WORDS)}"


def _default(value: Value, facts: Facts, node: SOp, feature: Feature) -> float:
    if feature.kind == "is":
        return float(facts.values(node)[feature.value] == value)
    assert is_numeric(value)
    return float(value) ** 2 if feature.kind == "square" else float(value)  # type: ignore[arg-type]


def _classes(columns: Sequence[Ids], ordered: list[bool]) -> tuple[Ids, list[Ids]]:
    """Values that no row tells apart put together (neighbours only where a variable is `ordered`): the rows over
    classes, the last column as it was, and the class of every value (values that do not occur join the one before)."""
    columns, classes = list(columns), []
    for i, neighbours in enumerate(ordered):
        own, *others = distinct_rows([columns[i], *columns[:i], *columns[i + 1 :]])
        names = np.ascontiguousarray(np.stack(others, 1))  # sorted within each value: what stands beside it
        group = np.zeros(int(own.max()) + 1, dtype=np.int64)
        signature: dict[bytes, int] = {}
        last, count = b"", 0
        ends = np.searchsorted(own, np.arange(len(group) + 1))
        for v, (start, end) in enumerate(pairwise(ends.tolist())):
            name = names[start:end].tobytes() if start < end else last
            if neighbours:
                count += name != last
                group[v] = max(count - 1, 0)
            else:
                group[v] = signature.setdefault(name, len(signature))
            last = name
        columns[i] = group[columns[i]]
        columns = distinct_rows(columns)
        classes.append(group)
    return np.stack(columns, 1), classes


def _lines(numbers: Array, group: Ids, margin: float) -> tuple[float, Array, Array]:
    """A middle c, and slopes a and constants b of lines a (x - c) + b, one a class, such that on the numbers of a class
    its line is ahead of all others by the margin: neighbours cross half-way with slopes 2 margin / gap apart."""
    count = int(group.max()) + 1
    low = np.array([numbers[: len(group)][group == c].min() for c in range(count)])
    high = np.array([numbers[: len(group)][group == c].max() for c in range(count)])
    middle = float(np.round((low[0] + high[-1]) / 2))
    gap, cross = low[1:] - high[:-1], (low[1:] + high[:-1]) / 2 - middle
    steps = 2 * margin / gap
    slopes = np.concatenate([[0.0], np.cumsum(steps)])
    start = int(np.searchsorted(cross, 0.0))
    slopes -= slopes[start]
    constants = np.concatenate([[0.0], -np.cumsum(steps * cross)])
    return middle, slopes, constants - constants[start]
