"""What can be said of a program on every sequence of its domain, without running it on any (lemmas K19 and K20).

Sets of values, and of combinations of values at one position, may hold what never occurs and never miss what does.
That a function has no value for some values is used only where the program of the file itself asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from ..balls import NotProved
from .language import Domain, Op, Undefined, Value, hit, in_order, is_number
from .terms import ALL, Term, Terms, base, combined

VALUES = 1 << 16  # of one op
COMBINATIONS = 1 << 20  # of values at one position: seconds
WORK = 1 << 24  # of these for one program: a minute
MEANS = 1 << 18  # means that are listed

Ids = tuple[int, ...]


class Facts:
    """What is known of the ops of a rewritten program, whose functions may be undefined only where `given` says."""

    def __init__(self, ops: Sequence[Op], terms: Terms, found: Sequence[Term], domain: Domain, given: set[Any]):
        self.ops, self.terms, self.term, self.domain, self.given = ops, terms, found, domain, given
        self.by_term = {t: i for i, t in reversed(list(enumerate(found))) if not ops[i].selects}
        self.lists: dict[int, tuple[Value, ...]] = {}
        self.places: dict[int, dict[Value, int]] = {}
        self.maps: dict[int, dict[Ids, int]] = {}
        self.truths: dict[int, list[list[bool | None]]] = {}
        self.kept: dict[Any, Any] = {}
        self.work = 0

    def remembered(self, what: str, at: Any, ask: Any) -> Any:
        """What `ask` says, asked once."""
        if (what, at) not in self.kept:
            self.kept[what, at] = ask()
        return self.kept[what, at]

    # ---- values

    def values(self, i: int) -> tuple[Value, ...]:
        """The values of an op, in order."""
        if i not in self.lists:
            found = self._values(i)
            if len(found) > VALUES:
                raise NotProved(f"an op of the program has more than {VALUES} values")
            self.lists[i] = found
            self.places[i] = {value: n for n, value in enumerate(found)}
        return self.lists[i]

    def place(self, i: int, value: Value) -> int:
        """The number of a value of an op; -1 where it never has it."""
        self.values(i)
        return self.places[i].get(value, -1)

    def _values(self, i: int) -> tuple[Value, ...]:
        op = self.ops[i]
        if op.kind == "Tokens":
            return self.domain.vocabulary
        if op.kind == "Indices":
            return tuple(range(self.domain.length))
        if op.kind == "Constant":
            return (op.value,)
        if op.kind == "SelectorWidth":
            selector = op.children[0]
            if self.disjoint(selector, selector):
                return (0,)
            least = int(self.nonempty(selector))
            most = 1 if self.single(selector) else self.domain.length - (self.until(selector) == "earlier")
            return tuple(range(least, max(most, least) + 1))
        if op.kind == "Aggregate":
            return self._aggregated(i)
        return self._map(i)

    def _map(self, i: int) -> tuple[Value, ...]:
        op = self.ops[i]
        assert op.function is not None
        allowed = (base(op.function), *(self.term[child] for child in op.children)) in self.given
        lists = [self.values(child) for child in op.children]
        results: dict[Ids, Value] = {}
        for ids in self.joint(op.children):
            try:
                results[ids] = op.function(*(values[n] for values, n in zip(lists, ids, strict=True)))
            except Undefined:
                if not allowed:
                    raise NotProved("the rewritten program asks a function for what the program does not") from None
        values = in_order(set(results.values()))
        place = {value: n for n, value in enumerate(values)}
        self.maps[i] = {ids: place[value] for ids, value in results.items()}
        return values

    def _aggregated(self, i: int) -> tuple[Value, ...]:
        selector, operand = self.ops[i].children
        inside = self.values(operand)
        empty = () if self.nonempty(selector) else (self.ops[i].value,)
        if not self.averages(i):
            return in_order({*inside, *empty})
        if not all(type(v) is int for v in inside):
            raise NotProved("the means of an aggregate are not of whole numbers: too many to list")
        low, high = int(min(inside)), int(max(inside))  # type: ignore[type-var, arg-type]
        if self.domain.length**2 * (high - low) > MEANS:
            raise NotProved(f"an aggregate has more than {MEANS} means")
        means = {Fraction(s, m) for m in range(1, self.domain.length + 1) for s in range(low * m, high * m + 1)}
        return in_order({*(int(x) if x.denominator == 1 else x for x in means), *empty})

    def span(self, i: int) -> Fraction:
        """The largest size of a value of an op whose values are numbers; means lie between what is averaged."""
        op = self.ops[i]
        if op.kind == "Aggregate" and self.averages(i):
            outer = [abs(Fraction(op.value))] if is_number(op.value) else []  # type: ignore[arg-type]
            return max([self.span(op.children[1]), *outer])
        return max(abs(Fraction(v)) for v in self.values(i))  # type: ignore[arg-type]

    # ---- combinations at one position

    def roots(self, i: int) -> frozenset[int]:
        """The ops other than maps and constants that an op is a function of, position by position."""

        def ask() -> frozenset[int]:
            if self.ops[i].kind == "Map":
                return frozenset().union(*(self.roots(child) for child in self.ops[i].children))
            return frozenset() if self.ops[i].kind == "Constant" else frozenset({i})

        found: frozenset[int] = self.remembered("roots", i, ask)
        return found

    def joint(self, nodes: Sequence[int]) -> list[Ids]:
        """The numbers of values of some ops, one row for each combination that may stand at one position."""

        def ask() -> list[Ids]:
            for tied in (True, False):
                front = self._front(nodes, tied)
                rows = self._product(front)
                if rows is not None:
                    return self._worked_out(nodes, front, rows)
            raise NotProved(f"ops stand beside each other in more than {COMBINATIONS} combinations of values")

        found: list[Ids] = self.remembered("joint", tuple(nodes), ask)
        return found

    def _front(self, nodes: Sequence[int], tied: bool) -> list[int]:
        """Ops that determine others: maps are taken apart where they have something to do with what is beside them."""
        pending = {i for i in nodes if self.ops[i].kind != "Constant"}
        front: list[int] = []
        while pending:
            i = max(pending)
            pending.remove(i)
            beside = [j for j in (*front, *pending) if self._related(i, j, tied)]
            if self.ops[i].kind == "Map" and beside:
                pending |= {c for c in self.ops[i].children if self.ops[c].kind != "Constant"} - set(front)
            else:
                front.append(i)
        return sorted(front)

    def _related(self, i: int, j: int, tied: bool) -> bool:
        if self.roots(i) & self.roots(j):
            return True
        return tied and any(self._tie(a, b) is not None for a in self.roots(i) for b in self.roots(j))

    def _tie(self, a: int, b: int) -> Any:
        """What the values of two ops at one position satisfy: a function that says whether they may; None for nothing.

        A count of keys up to the position is at most one more than the index, which is below the length; a count of
        what satisfies more is smaller; counts of what never happens together add up to no more than the length.
        """

        def ask() -> Any:
            kinds = [self.ops[i].kind for i in (a, b)]
            if kinds == ["SelectorWidth", "SelectorWidth"]:
                one, other = (self.ops[i].children[0] for i in (a, b))
                if self.parts(one) > self.parts(other):
                    return lambda x, y: x <= y
                if self.parts(one) < self.parts(other):
                    return lambda x, y: x >= y
                if a != b and self.disjoint(one, other):
                    return lambda x, y: x + y <= self.domain.length
            elif kinds == ["Indices", "SelectorWidth"]:
                selector = self.ops[b].children[0]
                more = {"": self.domain.length, "earlier": 0, "not later": 1}[self.until(selector)]
                length = not self.parts(selector)
                if length or self.until(selector):
                    return lambda x, y: y <= x + more and (not length or x < y)
            return None

        if self.ops[b].kind == "Indices" and self.ops[a].kind == "SelectorWidth":
            turned = self._tie(b, a)
            return None if turned is None else lambda x, y: turned(y, x)
        return self.remembered("tie", (a, b), ask)

    def _product(self, front: list[int]) -> list[Ids] | None:
        rows: list[Ids] = [()]
        for n, i in enumerate(front):
            values = self.values(i)
            self.work += len(rows) * len(values)
            if len(rows) * len(values) > COMBINATIONS:
                return None
            if self.work > WORK:
                raise NotProved(f"the program has more than {WORK} combinations of values in all")
            ties = [(m, self.values(j), t) for m, j in enumerate(front[:n]) if (t := self._tie(j, i)) is not None]
            if not ties:
                rows = [(*row, v) for row in rows for v in range(len(values))]
            else:
                rows = [
                    (*row, v) for row in rows for v, value in enumerate(values)
                    if all(tie(others[row[m]], value) for m, others, tie in ties)
                ]  # fmt: skip
        return rows

    def _worked_out(self, nodes: Sequence[int], front: list[int], rows: list[Ids]) -> list[Ids]:
        """The values of ops from those of the front; what a map was never asked for cannot occur."""
        order = [i for i in sorted(self._between(nodes, front)) if i not in front]
        where = {i: n for n, i in enumerate((*front, *order))}
        steps = []
        for i in order:
            self.values(i)
            steps.append((self.maps.get(i), [where[child] for child in self.ops[i].children]))
        picked = [where[i] for i in nodes]
        found: dict[Ids, None] = {}
        for row in rows:
            full = list(row)
            for table, children in steps:
                at = 0 if table is None else table.get(tuple(full[c] for c in children), -1)
                if at < 0:
                    break
                full.append(at)
            else:
                found[tuple(full[c] for c in picked)] = None
        return list(found)

    def _between(self, nodes: Sequence[int], front: Iterable[int]) -> set[int]:
        stop, pending, found = set(front), list(nodes), set[int]()
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                pending += () if i in stop else self.ops[i].children
        return found

    # ---- selectors

    def conjuncts(self, i: int) -> list[int]:
        """The selectors of which a selector is the conjunction."""
        if self.ops[i].kind == "And":
            return [part for child in self.ops[i].children for part in self.conjuncts(child)]
        return [] if self.term[i] == ALL else [i]

    def parts(self, i: int) -> frozenset[Any]:
        """The meanings of these."""
        found: frozenset[Any] = self.remembered(
            "parts", i, lambda: frozenset(self.term[part] for part in self.conjuncts(i))
        )
        return found

    def selects(self, i: int) -> list[int]:
        """The conjuncts that are selects."""
        return [part for part in self.conjuncts(i) if self.ops[part].kind == "Select"]

    def sides(self, i: int) -> tuple[list[int], list[int]]:
        """The ops that a selector reads at the query's position, and at the key's."""
        op = self.ops[i]
        if self.term[i] == ALL:
            return [], []
        if op.kind == "Select":
            return [op.children[1]], [op.children[0]]
        both = [self.sides(child) for child in op.children]
        return [*dict.fromkeys(q for s in both for q in s[0])], [*dict.fromkeys(k for s in both for k in s[1])]

    def truth(self, i: int) -> list[list[bool | None]]:
        """For each value of the queries of a select, and each of its keys, whether it is selected; None for never."""
        if i not in self.truths:
            op = self.ops[i]
            assert op.function is not None
            keys, queries = (self.values(child) for child in op.children)
            self.work += len(keys) * len(queries)
            if self.work > WORK:
                raise NotProved(f"the program has more than {WORK} combinations of values in all")
            allowed = (base(op.function), *(self.term[child] for child in op.children)) in self.given
            rows: list[list[bool | None]] = []
            for query in queries:
                rows.append([])
                for key in keys:
                    try:
                        rows[-1].append(hit(op.function, key, query))
                    except Undefined:
                        if not allowed:
                            raise NotProved("a selector asks for what the program's do not") from None
                        rows[-1].append(None)
            self.truths[i] = rows
        return self.truths[i]

    def selected(self, i: int, query: dict[int, int], key: dict[int, int]) -> bool | None:
        """Whether a query selects a key, given the numbers of the values of the ops that are read there."""
        op = self.ops[i]
        if self.term[i] == ALL:
            return True
        if op.kind == "Select":
            return self.truth(i)[query[op.children[1]]][key[op.children[0]]]
        found = [self.selected(child, query, key) for child in op.children]
        if any(one is None for one in found):
            return None
        return not found[0] if op.kind == "Not" else all(found) if op.kind == "And" else any(found)

    def until(self, i: int) -> str:
        """ "earlier" where only earlier keys can be selected, "not later" where no later ones, else nothing."""

        def ask() -> str:
            best = ""
            for part in self.selects(i):
                keys, queries = self.ops[part].children
                if self.ops[keys].kind != "Indices":
                    continue
                last = [max((k for k, one in enumerate(row) if one), default=-1) for row in self.truth(part)]
                ahead = max((last[q] - at for q, at in self.joint([queries, keys])), default=-1)
                best = "earlier" if ahead < 0 else "not later" if ahead == 0 and best != "earlier" else best
            return best

        return str(self.remembered("until", i, ask))

    def disjoint(self, a: int, b: int) -> bool:
        """Whether two selectors never select the same key, by selects of the same ops."""

        def ask() -> bool:
            for one in self.selects(a):
                for other in self.selects(b):
                    if self.ops[one].children == self.ops[other].children:
                        pairs = zip(self.truth(one), self.truth(other), strict=True)
                        if not any(x and y for rows in pairs for x, y in zip(*rows, strict=True)):
                            return True
            return False

        return bool(self.remembered("disjoint", (a, b), ask))

    def nonempty(self, i: int) -> bool:
        """Whether every query selects something: itself; or all numbers 0 to n - 1 stand in some order on both sides;
        or it selects an index that is not after its own."""

        def ask() -> bool:
            queries, keys = self.sides(i)
            nodes = [*dict.fromkeys((*queries, *keys))]
            rows = [dict(zip(nodes, row, strict=True)) for row in self.joint(nodes)]
            if all(self.selected(i, row, row) is not False for row in rows):
                return True
            op = self.ops[i]
            if op.kind != "Select":
                return False
            assert op.function is not None
            key, query = op.children
            if op.function.name == "eq" and all(self.permutes(self.term[side]) for side in (key, query)):
                return True
            if self.ops[key].kind != "Indices":
                return False
            first = [next((k for k, one in enumerate(row) if one), math.inf) for row in self.truth(i)]
            return all(first[q] <= at for q, at in self.joint([query, key]))

        return bool(self.remembered("nonempty", i, ask))

    def single(self, i: int) -> bool:
        """Whether every query selects one key at most: keys that all differ, picked by one value; or keys that meet a
        condition, picked by how many have met it so far."""

        def ask() -> bool:
            for part in self.selects(i):
                keys = self.ops[part].children[0]
                if self.distinct(keys) and all(sum(map(bool, row)) <= 1 for row in self.truth(part)):
                    return True
                if any(self._numbered(part, width) for width in self.roots(keys)):
                    return True
            return False

        return bool(self.remembered("single", i, ask))

    def _numbered(self, part: int, width: int) -> bool:
        if self.ops[width].kind != "SelectorWidth":
            return False
        counted = self.conjuncts(self.ops[width].children[0])
        rest = [one for one in counted if self.term[one] != self.terms.leq]
        queries = [q for one in rest for q in self.sides(one)[0]]
        if len(rest) == len(counted) or any(len(self.values(q)) > 1 for q in queries):
            return False
        keys = self.ops[part].children[0]
        nodes = [*dict.fromkeys((keys, width, *(k for one in rest for k in self.sides(one)[1])))]
        query = dict.fromkeys(queries, 0)
        seen: list[tuple[int, int, bool]] = []
        for row in self.joint(nodes):
            here = dict(zip(nodes, row, strict=True))
            met = all(self.selected(one, query, here) is not False for one in rest)
            seen.append((here[keys], here[width], met))
        return self._picks(part, seen)

    def _picks(self, part: int, seen: list[tuple[int, int, bool]]) -> bool:
        """Whether the keys that each query picks have one count in common, and meet the condition."""
        counts: dict[int, set[int]] = {}
        wrong = {key for key, _, met in seen if not met}
        for key, count, _ in seen:
            counts.setdefault(key, set()).add(count)
        for row in self.truth(part):
            picked = [key for key, one in enumerate(row) if one]
            if any(key in wrong for key in picked) or len(set().union(*(counts.get(k, set()) for k in picked))) > 1:
                return False
        return True

    def averages(self, i: int) -> bool:
        """Whether several numbers that differ may be selected: then an aggregate is their mean.

        Several values that differ and are not all numbers leave the program undefined, if it is the file's that
        aggregates them.
        """

        def ask() -> bool:
            selector, operand = self.ops[i].children
            if self.single(selector):
                return False
            values = self.values(operand)
            if not all(map(is_number, values)) and self.term[i] not in self.given:
                raise NotProved("the rewritten program aggregates what is no number, and the program does not")
            if sum(map(is_number, values)) < 2 or self._ranked(i):
                return False
            queries, keys = self.sides(selector)
            nodes = [*dict.fromkeys((*keys, operand))]
            rows = [dict(zip(nodes, row, strict=True)) for row in self.joint(nodes)]
            asked = [dict(zip(queries, row, strict=True)) for row in self.joint(queries)]
            self.work += len(rows) * len(asked)
            if self.work > WORK:
                raise NotProved(f"the program has more than {WORK} combinations of values in all")
            numeric = [row for row in rows if is_number(values[row[operand]])]
            for query in asked:
                if len({row[operand] for row in numeric if self.selected(selector, query, row)}) > 1:
                    return True
            return False

        return bool(self.remembered("averages", i, ask))

    def _ranked(self, i: int) -> bool:
        """Whether keys are picked by how many have a smaller value of an op: then that value is the same at all."""
        selector, operand = self.ops[i].children
        for part in self.selects(selector):
            keys = self.ops[part].children[0]
            for width in self.roots(keys):
                if self.ops[width].kind != "SelectorWidth":
                    continue
                counted = self.conjuncts(self.ops[width].children[0])
                if len(counted) != 1 or self.ops[counted[0]].kind != "Select":
                    continue
                op = self.ops[counted[0]].children[0]
                if self.ops[counted[0]].children[1] != op or not _ordered(self.truth(counted[0])):
                    continue
                if operand != op and not self.roots(operand) <= {op}:
                    continue
                if self._picks(part, [(k, w, True) for k, w in self.joint([keys, width])]):
                    return True
        return False

    # ---- ops that tell positions apart

    def permutes(self, term: Term) -> bool:
        """Whether the values at the n positions of a sequence are 0, ..., n - 1 in some order."""
        if isinstance(term, int):
            return False
        term = self._plain(term)
        turned = combined((1, self.terms.length), (-1, self.terms.constant(1)), (-1, term))
        return term == self.terms.indices or turned == self.terms.indices or self._ranks(term) or self._ranks(turned)

    def _plain(self, term: Term) -> Term:
        """A number without counts that are always the same."""
        parts: list[tuple[Any, Term]] = []
        for monomial, c in term:
            one = frozenset({(monomial, Fraction(1))})
            op = self.by_term.get(one, -1)
            if op >= 0 and self.ops[op].kind == "SelectorWidth" and len(self.values(op)) == 1:
                one = self.terms.constant(self.values(op)[0])
            parts.append((c, one))
        return combined(*parts)

    def _ranks(self, term: Term) -> bool:
        """Whether counts add up to the rank in a strict order of values, where equal ones go by position."""
        terms = self.terms
        for monomial, c in term:
            leaf = self._counted(monomial)
            if c != 1 or leaf is None:
                continue
            _, _, x, y = terms.keys[leaf]
            select = next((i for i, t in enumerate(self.term) if t == frozenset({(frozenset({leaf}), 1)})), -1)
            if x != y or select < 0 or self.ops[select].kind != "Select":
                continue
            if len(set(self.ops[select].children)) > 1 or not _ordered(self.truth(select)):
                continue
            rest = combined((1, term), (-1, frozenset({(monomial, Fraction(1))})))
            if rest == frozenset() and self.distinct(self.ops[select].children[0]):
                return True
            equal = terms.atoms.get(("select", "eq", x, x))
            if equal is None:
                continue
            tie = frozenset({(frozenset({equal}), 1)})
            every = terms.width(tie)
            (leq, _), *_ = terms.leq
            before = terms.width(frozenset({(leq | {equal}, 1)}))
            if rest in (combined((1, before), (-1, terms.constant(1))), combined((1, every), (-1, before))):
                return True
        return False

    def _counted(self, monomial: tuple[int, ...]) -> int | None:
        """The only select that an atom counts."""
        if len(monomial) != 1 or self.terms.keys[monomial[0]][0] != "width":
            return None
        leaves = self.terms.keys[monomial[0]][1]
        return next(iter(leaves)) if len(leaves) == 1 else None

    def distinct(self, i: int) -> bool:
        """Whether the values at two positions of a sequence always differ."""

        def ask() -> bool:
            term, terms = self.term[i], self.terms
            if not isinstance(term, int):
                (length, _), *_ = terms.length
                moving = frozenset((m, c) for m, c in term if m not in ((), length))
                for by in (1, -1):
                    for more in (0, -1):
                        if self.permutes(combined((by, moving), (more, terms.constant(1)))):
                            return True
                if len(moving) == 1:
                    ((monomial, _),) = moving
                    one = frozenset({(monomial, Fraction(1))})
                    other = self.by_term.get(one, i)
                    if self.permutes(one) or (other < i and self.distinct(other)):
                        return True
            if self.ops[i].kind == "Map":
                self.values(i)
                for n, child in enumerate(self.ops[i].children):
                    told: dict[int, set[int]] = {}
                    for ids, result in self.maps[i].items():
                        told.setdefault(result, set()).add(ids[n])
                    if all(len(ids) == 1 for ids in told.values()) and self.distinct(child):
                        return True  # the result tells the operand's value
            return False

        return bool(self.remembered("distinct", i, ask))


def _ordered(table: list[list[bool | None]]) -> bool:
    """Whether a table of values against themselves is a strict total order."""
    size = range(len(table))
    if any(one is None for row in table for one in row):
        return False
    if any(table[a][b] and table[b][a] for a in size for b in size):
        return False
    return sorted(sum(map(bool, row)) for row in table) == list(size)
