"""What can be said of a program (in normal form) on every sequence of its domain, without running it on any.

`Facts` finds the set of values of every op by going forwards through the program, the combinations of values that can
stand at one position, which selectors select at most one key, or at least one, or no later one, and which ops are
linear. Everything here errs on one side only: sets may hold values that never occur, and never miss one that does.
Sequences on which the program itself raises an error are not spoken of; `undefined` says which ops may have no value,
so that a certificate can leave these sequences out. A map is asked for every combination of values before anything is
built, and a predicate for every pair: where one has no value, nothing is compiled. What remains is an aggregate that
selects several values which differ and are not all numbers, and ops that the normal form leaves out (`x == x` is 1,
whatever `x` is) and nobody therefore asks. An op is listed unless it is seen to have a value everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import Array
from ...errors import DomainError
from ..domain import Sequences
from ..language import (
    OPERATORS,
    Aggregate,
    And,
    Constant,
    Indices,
    Map,
    Node,
    Not,
    Operator,
    Select,
    Selector,
    SelectorWidth,
    SOp,
    Tokens,
    length,
    walk,
)  # fmt: skip
from ..values import HUGE, Value, is_numeric, shown, sorted_values
from .normal import ALL, LEQ, Packed, conjuncts, numbers_only, order, order_free, rewritten

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Linear = tuple[dict[SOp, Fraction], Fraction]

VALUES = 1 << 16  # of one op: a table over one more variable of a few values still fits into memory
COMBINATIONS = 1 << 22  # of values at one position that are looked at: 32 MB for each op among them
CALLS = 1 << 18  # of a Python function: about a second
SHORT = 128  # parts of a function's text up to which it may be called so often: half a minute
MARKED = 1 << 26  # numbers that are told apart by marking each: 64 MB, and much faster than sorting
WORK = 1 << 28  # combinations that are looked at for one program in all: a minute, about
PAIRS = 1 << 24  # of keys and queries of one selector: 16 MB of truth values
_BINARY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "eq": np.equal,
    "ne": np.not_equal, "lt": np.less, "leq": np.less_equal, "gt": np.greater, "geq": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or,
}  # fmt: skip


class Facts:
    """What is known of a program in normal form on a domain.

    `outputs` are all programs that one network computes, where there are several: ops are numbered through all of them.
    """

    def __init__(self, program: SOp, domain: Sequences, outputs: Sequence[SOp] = ()):
        self.program, self.domain, self.outputs = program, domain, tuple(outputs) or (program,)
        self.order = [*dict.fromkeys(node for output in self.outputs for node in walk(output))]
        self.at = {node: i for i, node in enumerate(self.order)}
        self._values: dict[SOp, tuple[Value, ...] | None] = {}  # None: numbers, too many to list
        self._index: dict[SOp, dict[Value, int]] = {}
        self._numbers: dict[SOp, Array] = {}
        self._spans: dict[SOp, tuple[Fraction, Fraction]] = {}
        self._means: dict[SOp, tuple[int, int, tuple[Value, ...]]] = {}  # means of whole numbers, listed when asked for
        self._maps: dict[SOp, tuple[Ids, Ids, Ids]] = {}  # sizes, keys of combinations, results
        self._tables: dict[Select, Mask] = {}
        self._roots: dict[SOp, frozenset[SOp]] = {}
        self._kept: dict[tuple[str, Node], Any] = {}
        self._work = 0
        self._late: frozenset[SOp] = frozenset()  # ops whose values are listed when somebody asks, or never
        for node in self.order:
            if isinstance(node, SOp):
                self._learn(node)
                self.roots(node)  # asked in this order, no question goes deep
                if self.is_number(node):
                    self.linear(node)
        self._late = frozenset(node for node, values in self._values.items() if values is None)

    def sop(self, number: int) -> SOp:
        """The sequence op of a number."""
        node = self.order[number]
        assert isinstance(node, SOp)
        return node

    # ---- sets of values

    def listed(self, node: SOp) -> bool:
        """Whether the values of an op are known one by one."""
        if self._values[node] is None and isinstance(node, Map):
            return all(self.listed(operand) for operand in node.operands)
        return self._values[node] is not None or node in self._means

    def values(self, node: SOp) -> tuple[Value, ...]:
        """The values of an op, in order; an error where they are too many to list."""
        found = self._values[node]
        if found is None and node in self._means:
            found = self._values[node] = self._all_means(node)
        elif found is None and isinstance(node, Map) and all(self.listed(operand) for operand in node.operands):
            for operand in node.operands:
                self.values(operand)
            found = self._values[node] = self._learn_map(node)
        if found is None:
            raise DomainError(
                f"the op {node.label} has means for values, too many to list (more than {VALUES}): it can be put out, "
                "added and scaled, and nothing else; choose a smaller max_length"
            )
        return found

    def index(self, node: SOp) -> dict[Value, int]:
        """The number of each value in the list of values."""
        if node not in self._index:
            self._index[node] = {value: i for i, value in enumerate(self.values(node))}
        return self._index[node]

    def is_number(self, node: SOp) -> bool:
        """Whether all values are numbers."""
        found = self._values[node]
        return found is None or bool(self._remembered("number", node, lambda: all(map(is_numeric, found))))

    def numbers(self, node: SOp) -> Array:
        """The values as float64; exact where they are whole."""
        if node not in self._numbers:
            large = next((v for v in self.values(node) if abs(v) >= HUGE), None)  # type: ignore[arg-type, operator]
            if large is not None:
                raise node.fail(f"has the number {shown(large, 24)}, which no column of a network can hold")
            self._numbers[node] = np.array([float(v) for v in self.values(node)], dtype=np.float64)  # type: ignore[arg-type]
        return self._numbers[node]

    def rounded(self, node: SOp) -> float:
        """How far the values of an op whose values are numbers can be from their float64; 0 where all are float64."""

        def ask() -> float:
            found = () if node in self._late else self.values(node)  # the same, whether somebody has asked or not
            if found and all(_is_float64(value) for value in found):
                return 0.0
            low, high = self.span(node)
            return float(np.nextafter(float(max(abs(low), abs(high))), np.inf)) * 2.0**-53 + 2.0**-1074

        return float(self._remembered("rounded", node, ask))

    def span(self, node: SOp) -> tuple[Fraction, Fraction]:
        """The smallest and the largest value of an op whose values are numbers."""
        if node not in self._spans:
            values = self.values(node)
            self._spans[node] = Fraction(min(values)), Fraction(max(values))  # type: ignore[type-var, arg-type]
        return self._spans[node]

    def _learn(self, node: SOp) -> None:
        if isinstance(node, (Tokens, Constant)):
            values = sorted_values({node.value} if isinstance(node, Constant) else set(self.domain.vocabulary))
        elif isinstance(node, Indices):
            values = tuple(range(self.domain.max_length))
        elif isinstance(node, SelectorWidth):
            values = self._widths(node.selector)
        elif isinstance(node, Aggregate):
            found = self._aggregated(node)
            if found is None:
                return
            values = found
        else:
            assert isinstance(node, Map)
            if any(self._values[operand] is None for operand in node.operands) and self._is_linear(node):
                return self._learn_linear(node)
            for operand in node.operands:
                self.values(operand)  # means are listed where something else than a sum is made of them
            values = self._learn_map(node)
        if len(values) > VALUES:
            raise node.fail(f"has {len(values)} values on this domain, and the limit is {VALUES}")
        self._values[node] = values

    def _widths(self, selector: Selector) -> tuple[Value, ...]:
        if self.disjoint(selector, selector):
            return (0,)
        least = 1 if self.nonempty(selector) else 0
        most = 1 if self.single(selector) else self.domain.max_length - (self.until(selector) == "lt")
        return tuple(range(least, max(most, least) + 1))

    def _aggregated(self, node: Aggregate) -> tuple[Value, ...] | None:
        """Values of an aggregate, or None after noting the span of means that are too many."""
        inside = self.values(node.operand) if self.listed(node.operand) else None
        empty: tuple[Value, ...] = () if self.nonempty(node.selector) else (node.default,)
        if inside is not None and not self.averages(node):
            return sorted_values({*inside, *empty})
        if empty and not is_numeric(node.default):
            raise node.fail(
                "averages numbers and may select nothing, where its default is "
                f"{node.default!r}: give it a number for default"
            )
        other = next((value for value in inside or () if not is_numeric(value)), 0)
        if other != 0:
            raise node.fail(
                f"may average numbers, and what it reads may also be {shown(other)}: a network carries means as "
                "numbers alone; select one key, or map the values to numbers first"
            )
        low, high = self.span(node.operand)
        whole = inside is not None and all(isinstance(v, int) for v in inside)
        if whole and self.domain.max_length**2 * int(high - low) <= CALLS:
            self._means[node] = (int(low), int(high), empty)
        for value in empty:
            low, high = min(low, Fraction(value)), max(high, Fraction(value))  # type: ignore[arg-type]
        self._values[node], self._spans[node] = None, (low, high)
        return None

    def _all_means(self, node: SOp) -> tuple[Value, ...]:
        """Every mean of whole numbers in a range, of as many as a sequence is long."""
        low, high, empty = self._means[node]
        known: set[tuple[int, int]] = set()
        for m in range(1, self.domain.max_length + 1):
            sums = np.arange(low * m, high * m + 1)
            common = np.gcd(sums, m)
            known.update(zip((sums // common).tolist(), (m // common).tolist(), strict=True))
        return sorted_values({*(s if m == 1 else Fraction(s, m) for s, m in known), *empty})

    def _is_linear(self, node: Map) -> bool:
        self._values[node] = None
        return node not in self._linear(node)[0]

    def _learn_linear(self, node: Map) -> None:
        found = self.linear(node)
        low = high = found[1]
        for atom, c in found[0].items():
            ends = [c * end for end in self.span(atom)]
            low, high = low + min(ends), high + max(ends)
        self._spans[node] = low, high

    def _learn_map(self, node: Map) -> tuple[Value, ...]:
        """The image of a map over the combinations that can occur, and its table."""
        columns = self.joint(node.operands)
        sizes = np.array([len(self.values(operand)) for operand in node.operands], dtype=np.int64)
        if math.prod(sizes.tolist()) >= 2**62:  # one number a combination must fit into 64 bits
            raise node.fail("reads ops of too many values to number their combinations: split it, or make them fewer")
        keys = distinct(combined(columns, sizes), math.prod(sizes.tolist()))
        ids = np.unravel_index(keys, tuple(sizes))
        results = self._vectorised(node, ids)
        if results is None:
            most = _calls(node.function)
            if len(keys) > most:
                raise node.fail(f"would be asked for {len(keys)} combinations of values, and the limit is {most}")
            lists = [self.values(operand) for operand in node.operands]
            given = [
                node.at(*(values[i] for values, i in zip(lists, row, strict=True))) for row in zip(*ids, strict=True)
            ]
            values = sorted_values(set(given))
            number = {value: i for i, value in enumerate(values)}
            places = np.array([number[value] for value in given], dtype=np.int64)
        else:
            low = int(results.min())
            whole = distinct(results - low, int(results.max()) - low + 1) + low
            places = np.searchsorted(whole, results)
            values = tuple(int(v) for v in whole)
        self._maps[node] = (sizes, keys, places.reshape(-1))
        return values

    def _vectorised(self, node: Map, ids: Sequence[Ids]) -> Ids | None:
        """The results of a named operator on whole numbers, all at once."""
        name = node.function.name if isinstance(node.function, Operator) else ""
        wholes = []
        for operand, at in zip(node.operands, ids, strict=True):
            values = self.values(operand)
            if not all(isinstance(v, int) and abs(v) < 2**31 for v in values):
                return None
            wholes.append(np.array(values, dtype=np.int64)[at])
        if name in _BINARY:
            return np.asarray(_BINARY[name](*wholes), dtype=np.int64)
        if name in ("floordiv", "mod") and (wholes[1] != 0).all():
            return np.asarray((np.floor_divide if name == "floordiv" else np.mod)(*wholes), dtype=np.int64)
        if name in ("neg", "abs"):
            return np.asarray(-wholes[0] if name == "neg" else np.abs(wholes[0]), dtype=np.int64)
        return None

    # ---- combinations at one position

    def roots(self, node: SOp) -> frozenset[SOp]:
        """What an op is a function of, position by position: ops that are no maps."""
        if node not in self._roots:
            if isinstance(node, Map):
                self._roots[node] = frozenset().union(*(self.roots(operand) for operand in node.operands))
            else:
                self._roots[node] = frozenset() if isinstance(node, Constant) else frozenset((node,))
        return self._roots[node]

    def joint(self, nodes: Sequence[SOp]) -> list[Ids]:
        """Numbers of values of some ops, one row for each combination that may stand at one position."""
        for related in (self._related, self._shared):
            front = self._front(nodes, related)
            found, rows = self._product(front)
            if rows:
                break
        else:
            names = ", ".join(one.label for one in front)
            raise front[0].fail(
                f"stands beside others ({names}) in more than {COMBINATIONS} combinations of values; choose a smaller "
                "max_length or vocabulary, or split the map"
            )
        fits = np.ones(rows, dtype=bool)
        columns = [self._ids(node, found, fits) for node in nodes]
        return columns if fits.all() else [column[fits] for column in columns]

    def _front(self, nodes: Sequence[SOp], related: Callable[[SOp, SOp], bool]) -> list[SOp]:
        """Ops that determine others: maps are taken apart where they are related to what stands beside them."""
        pending = {node for node in nodes if not isinstance(node, Constant)}
        front: list[SOp] = []
        while pending:
            node = max(pending, key=self.at.__getitem__)
            pending.remove(node)
            if isinstance(node, Map) and any(related(node, other) for other in (*front, *pending)):
                pending |= {operand for operand in node.operands if not isinstance(operand, Constant)} - set(front)
            else:
                front.append(node)
        return sorted(front, key=self.at.__getitem__)

    def _shared(self, a: SOp, b: SOp) -> bool:
        return bool(self.roots(a) & self.roots(b))

    def _related(self, a: SOp, b: SOp) -> bool:
        """Whether two ops have a root in common, or roots that do not take every pair of values."""
        return self._shared(a, b) or any(self._bound(x, y) for x in self.roots(a) for y in self.roots(b))

    def _bound(self, a: SOp, b: SOp) -> bool:
        """Whether `_together` may say something of two ops."""
        pair = [one.selector for one in (a, b) if isinstance(one, SelectorWidth)]
        if len(pair) == 2:
            return set(conjuncts(pair[0])) != set(conjuncts(pair[1])) and (
                length in (a, b) or self.disjoint(*pair) or self._inside(*pair) or self._inside(*reversed(pair))
            )
        other = next((one for one in (a, b) if isinstance(one, Indices)), None)
        return len(pair) == 1 and other is not None and (length in (a, b) or bool(self.until(pair[0])))

    def _inside(self, a: Selector, b: Selector) -> bool:
        return set(conjuncts(a)) > set(conjuncts(b))

    def _product(self, front: list[SOp]) -> tuple[dict[SOp, Ids], int]:
        """All combinations of values that may stand at one position, or 0 where there are too many."""
        found: dict[SOp, Ids] = {}
        rows = 1
        for node in front:
            size = len(self.values(node))
            if rows * size > COMBINATIONS:
                return found, 0
            self._work += rows * size
            if self._work > WORK:
                raise node.fail(f"comes after {WORK} combinations of values, which is the limit: choose a smaller one")
            found = {one: np.repeat(ids, size) for one, ids in found.items()}
            found[node] = np.tile(np.arange(size), rows)
            keep = np.ones(rows * size, dtype=bool)
            for other in found:
                if other is not node and self._bound(other, node):
                    keep &= self._together(other, found[other], node, found[node])
                    keep &= self._together(node, found[node], other, found[other])
            if not keep.all():
                found = {one: ids[keep] for one, ids in found.items()}
            rows = int(keep.sum())
        return found, rows

    def _together(self, a: SOp, ids: Ids, b: SOp, jds: Ids) -> Mask:
        """Which values of two ops may stand at one position."""
        every = np.ones(len(ids), dtype=bool)
        if not isinstance(b, SelectorWidth):
            return every
        if isinstance(a, Indices):
            i, w, until = ids, self.numbers(b)[jds], self.until(b.selector)
            if until:
                every &= w <= i + (until == "leq")
            if b == length:
                every &= i < w
        elif isinstance(a, SelectorWidth):
            if self._inside(a.selector, b.selector):
                every &= self.numbers(a)[ids] <= self.numbers(b)[jds]
            elif self.disjoint(a.selector, b.selector):
                every &= self.numbers(a)[ids] + self.numbers(b)[jds] <= self.domain.max_length
        return every

    def _ids(self, node: SOp, found: dict[SOp, Ids], fits: Mask) -> Ids:
        """The numbers of an op's values beside those that are found; what cannot occur does not fit."""
        pending, needed = [node], set[SOp]()
        while pending:
            one = pending.pop()
            if one not in found and one not in needed:
                needed.add(one)
                pending += one.operands if isinstance(one, Map) else ()
        for one in sorted(needed, key=self.at.__getitem__):
            if isinstance(one, Constant):
                found[one] = np.zeros(len(fits), dtype=np.int64)
                continue
            assert isinstance(one, Map)
            if one not in self._maps:
                self.values(one)  # a sum of means, whose values nobody has asked for yet
            sizes, keys, results = self._maps[one]
            wanted = combined([found[operand] for operand in one.operands], sizes)
            place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            fits &= keys[place] == wanted  # what the map was not asked for cannot occur
            found[one] = results[place]
        return found[node]

    # ---- linear ops

    def linear(self, node: SOp) -> Linear:
        """Coefficients of ops and a constant that add up to an op whose values are numbers."""
        key = ("linear", node)
        if key not in self._kept:
            self._kept[key] = self._linear(node)
        return self._kept[key]  # type: ignore[no-any-return]

    def _linear(self, node: SOp) -> Linear:
        if isinstance(node, Constant):
            return {}, Fraction(node.value)  # type: ignore[arg-type]
        found = self._values[node]
        if found is not None and len(found) == 1:
            return {}, Fraction(found[0])  # type: ignore[arg-type]
        itself: Linear = ({node: Fraction(1)}, Fraction(0))
        if not isinstance(node, Map) or not all(self.is_number(operand) for operand in node.operands):
            return itself
        name = node.function.name if isinstance(node.function, Operator) else ""
        if name in ("add", "sub", "neg"):
            terms = [self.linear(operand) for operand in node.operands]
            signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[name]
            return _added([(Fraction(s), term) for s, term in zip(signs, terms, strict=True)])
        if name in ("mul", "div"):
            (a, b) = node.operands
            if isinstance(b, Constant) and (name == "mul" or b.value != 0):
                by = Fraction(b.value)  # type: ignore[arg-type]
                return _added([(by if name == "mul" else 1 / by, self.linear(a))])
            if isinstance(a, Constant) and name == "mul":
                return _added([(Fraction(a.value), self.linear(b))])  # type: ignore[arg-type]
        if len(node.operands) == 1 and node in self._maps and self.is_number(node):
            line = _line(
                [Fraction(v) for v in self.values(node.operands[0])],  # type: ignore[arg-type]
                [Fraction(self.values(node)[i]) for i in self._maps[node][2]],
            )  # type: ignore[arg-type]
            if line is not None and len(self._maps[node][1]) == len(self.values(node.operands[0])):
                scaled, constant = _added([(line[0], self.linear(node.operands[0]))])
                return scaled, constant + line[1]
        return itself

    # ---- selectors

    def table(self, select: Select) -> Mask:
        """Which keys (columns, by number of value) each query (row) selects."""
        if select not in self._tables:
            queries, keys = self.values(select.queries), self.values(select.keys)
            if len(queries) * len(keys) > PAIRS:
                raise select.fail(f"has {len(queries) * len(keys)} pairs of values, and the limit is {PAIRS}")
            self._tables[select] = self._truth(select, queries, keys)
        return self._tables[select]

    def _truth(self, select: Select, queries: tuple[Value, ...], keys: tuple[Value, ...]) -> Mask:
        name = select.predicate.name if isinstance(select.predicate, Operator) else ""
        if name in ("true", "false"):
            return np.full((len(queries), len(keys)), name == "true")
        if name in ("eq", "ne"):
            at = {key: i for i, key in enumerate(keys)}
            places = np.array([at.get(query, -1) for query in queries])
            same = places[:, None] == np.arange(len(keys))
            return same if name == "eq" else ~same
        if name in _BINARY and all(isinstance(v, int) and abs(v) < 2**53 for v in (*queries, *keys)):
            return np.asarray(_BINARY[name](np.array(keys), np.array(queries)[:, None]), dtype=bool)
        most = _calls(select.predicate)
        if len(queries) * len(keys) > most:
            raise select.fail(f"would be asked for {len(queries) * len(keys)} pairs, and the limit is {most}")
        return np.array([[select.at(key, query) for key in keys] for query in queries], dtype=bool)

    def leaves(self, selector: Selector) -> list[Select]:
        """The selects that a selector is made of."""
        stack, found = [selector], []
        while stack:
            node = stack.pop()
            if isinstance(node, Select):
                found += [node] if node != ALL else []
            else:
                stack += [child for child in node.children if isinstance(child, Selector)]
        return found

    def sides(self, selector: Selector) -> tuple[list[SOp], list[SOp]]:
        """The ops that a selector reads at the query's position, and at the key's."""
        leaves = self.leaves(selector)
        return [*dict.fromkeys(s.queries for s in leaves)], [*dict.fromkeys(s.keys for s in leaves)]

    def selected(self, selector: Selector, queries: dict[SOp, Ids], keys: dict[SOp, Ids], paired: bool = False) -> Mask:
        """Which keys (columns) each query (row) selects, given by numbers of values; row by row where `paired`.

        A side that has no op stands for one row.
        """
        if selector == ALL:
            rows = [max((len(ids) for ids in side.values()), default=1) for side in (queries, keys)]
            return np.ones(max(rows) if paired else tuple(rows), dtype=bool)
        if isinstance(selector, Select):
            table, q, k = self.table(selector), queries[selector.queries], keys[selector.keys]
            return table[q, k] if paired else table[np.ix_(q, k)]
        if isinstance(selector, Not):
            return ~self.selected(selector.a, queries, keys, paired)
        a, b = (self.selected(side, queries, keys, paired) for side in (selector.a, selector.b))  # type: ignore[attr-defined]
        return a & b if isinstance(selector, And) else a | b

    def _remembered(self, what: str, node: Node, found: Callable[[], object]) -> Any:
        key = (what, node)
        if key not in self._kept:
            self._kept[key] = found()
        return self._kept[key]

    def reflexive(self, selector: Selector) -> bool:
        """Whether every query selects its own position."""

        def ask() -> bool:
            parts = conjuncts(selector)
            if len(parts) != 1:
                return all(self.reflexive(part) for part in parts)
            queries, keys = self.sides(selector)
            nodes = [*dict.fromkeys((*queries, *keys))]
            here = dict(zip(nodes, self.joint(nodes), strict=True))
            return bool(self.selected(selector, here, here, paired=True).all())

        return bool(self._remembered("reflexive", selector, ask))

    def nonempty(self, selector: Selector) -> bool:
        """Whether every query selects something, as far as this can be seen."""

        def ask() -> bool:
            if self.reflexive(selector):
                return True
            if not isinstance(selector, Select):
                return False
            same = isinstance(selector.predicate, Operator) and selector.predicate.name == "eq"
            if same and self.permutes(selector.keys) and self.permutes(selector.queries):
                return True
            if not isinstance(selector.keys, Indices):
                return False
            q, i = self.joint([selector.queries, selector.keys])
            table = self.table(selector)
            first = np.where(table.any(1), table.argmax(1), self.domain.max_length)
            return bool((first[q] <= i).all())

        return bool(self._remembered("nonempty", selector, ask))

    def single(self, selector: Selector) -> bool:
        """Whether every query selects one key at most, as far as this can be seen."""

        def ask() -> bool:
            parts = [part for part in conjuncts(selector) if isinstance(part, Select)]
            return any(
                (self.distinct(part.keys) and bool((self.table(part).sum(1) <= 1).all())) or self._numbered(part)
                for part in parts
            )

        return bool(self._remembered("single", selector, ask))

    def _numbered(self, part: Select) -> bool:
        """Whether each query picks keys that satisfy a condition, by how many have satisfied it so far: 1, 2, 3, ..."""
        for width in self.roots(part.keys):
            if not isinstance(width, SelectorWidth):
                continue
            rest, masked = order_free(width.selector)
            queries, keys = self.sides(rest)
            if not masked or any(not self.listed(q) or len(self.values(q)) > 1 for q in queries):
                continue
            nodes = [*dict.fromkeys((part.keys, width, *keys))]
            here = dict(zip(nodes, self.joint(nodes), strict=True))
            zeros = {q: np.zeros_like(here[width]) for q in queries}
            met = self.selected(rest, zeros, here, paired=True)
            if self._picks(part, here[part.keys], width, here[width], met):
                return True
        return False

    def _picks(self, part: Select, keys: Ids, width: SOp, counts: Ids, met: Mask | None = None) -> bool:
        """Whether the keys that each query of a select picks have one count in common (and meet a condition)."""
        pairs = np.zeros((len(self.values(part.keys)), len(self.values(width))), dtype=bool)
        pairs[keys, counts] = True
        wrong = np.zeros(len(pairs), dtype=bool)
        if met is not None:
            wrong[keys[~met]] = True
        return all(pairs[row].any(0).sum() <= 1 and not wrong[row].any() for row in self.table(part))

    def until(self, selector: Selector) -> str:
        """ "lt" where only earlier keys can be selected, "leq" where no later ones can, else nothing."""

        def ask() -> str:
            best = ""
            for part in conjuncts(selector):
                if not isinstance(part, Select) or not isinstance(part.keys, Indices):
                    continue
                table = self.table(part)
                last = np.where(table.any(1), table.shape[1] - 1 - table[:, ::-1].argmax(1), -1)
                q, i = self.joint([part.queries, part.keys])
                ahead = int((last[q] - i).max(initial=-1))
                best = "lt" if ahead < 0 else "leq" if ahead == 0 and best != "lt" else best
            return best

        return str(self._remembered("until", selector, ask))

    def disjoint(self, a: Selector, b: Selector) -> bool:
        """Whether two selectors never select the same key, by selects of the same ops; or one selector, any key."""
        pairs = [(one, other) for one in conjuncts(a) for other in conjuncts(b)]
        return any(
            isinstance(one, Select) and isinstance(other, Select) and one.children == other.children
            and not (self.table(one) & self.table(other)).any()
            for one, other in pairs
        )  # fmt: skip

    def averages(self, node: Aggregate) -> bool:
        """Whether several numbers that differ may be selected: then the aggregate is their mean."""

        def ask() -> bool:
            if self.single(node.selector):
                return False
            if not self.listed(node.operand):
                return True
            if sum(map(is_numeric, self.values(node.operand))) < 2 or self._ranked(node):
                return False
            return self._kinds(node, np.array([is_numeric(v) for v in self.values(node.operand)])) > 1

        return bool(self._remembered("averages", node, ask))

    def agrees(self, node: Aggregate) -> bool:
        """Whether what an aggregate selects always has a mean: numbers alone, or one value; as far as can be seen."""

        def ask() -> bool:
            if self.is_number(node.operand) or self.single(node.selector) or self._ranked(node):
                return True
            return self._kinds(node, np.ones(len(self.values(node.operand)), dtype=bool)) < 2

        return bool(self._remembered("agrees", node, ask))

    def _kinds(self, node: Aggregate, among: Mask) -> float:
        """How many different values, of some that what it reads may have, an aggregate may select for one query."""
        queries, keys = self.sides(node.selector)
        q = dict(zip(queries, distinct_rows(self.joint(queries)), strict=True))
        nodes = [*dict.fromkeys((*keys, node.operand))]
        k = dict(zip(nodes, distinct_rows(self.joint(nodes)), strict=True))
        if max((len(ids) for ids in q.values()), default=1) * len(k[node.operand]) > PAIRS:
            return math.inf
        chosen = self.selected(node.selector, q, k)
        columns = np.argsort(k[node.operand], kind="stable")
        columns = columns[among[k[node.operand][columns]]]
        if not len(columns):
            return 0
        firsts = np.flatnonzero(np.diff(k[node.operand][columns], prepend=-1))
        return int(np.logical_or.reduceat(chosen[:, columns], firsts, axis=1).sum(1).max())

    def _ranked(self, node: Aggregate) -> bool:
        """Whether keys are picked by the number of smaller values of an op: then the op is the same at all of them, and
        so is what is a function of it."""
        for part in conjuncts(node.selector):
            for width in self.roots(part.keys) if isinstance(part, Select) else ():
                counted = conjuncts(width.selector) if isinstance(width, SelectorWidth) else ()
                if len(counted) != 1 or not self._tournament(counted[0]):
                    continue
                op = counted[0].children[0]
                if node.operand != op and not self.roots(node.operand) <= {op}:
                    continue
                assert isinstance(part, Select)
                keys, counts = self.joint([part.keys, width])
                if self._picks(part, keys, width, counts):
                    return True
        return False

    # ---- ops that tell positions apart

    def permutes(self, node: SOp) -> bool:
        """Whether the values at the n positions of a sequence are 0, ..., n - 1 in some order."""
        if isinstance(node, Indices) or not self.is_number(node):
            return isinstance(node, Indices)
        terms, constant = self.linear(node)
        if len(terms) == 2 and terms.get(length) == 1 and constant == -1:
            (other,) = (atom for atom in terms if atom != length)
            return terms[other] == -1 and self.permutes(other)
        return (len(terms) == 1 and constant == 0 and 1 in terms.values() and node not in terms
                and self.permutes(next(iter(terms)))) or self._ranks(terms, constant)  # fmt: skip

    def _ranks(self, terms: dict[SOp, Fraction], constant: Fraction) -> bool:
        """Whether counts add up to the rank in a total order: by values, where two are equal by position."""
        widths = {conjuncts(w.selector): c for w, c in terms.items() if isinstance(w, SelectorWidth)}
        if len(widths) < len(terms) or not widths:
            return False
        first = next((parts[0] for parts in widths if len(parts) == 1 and self._tournament(parts[0])), None)
        if not isinstance(first, Select) or widths.pop((first,)) != 1:
            return False
        if self.distinct(first.keys):
            return not widths and constant == 0
        ties = {part for parts in widths for part in parts if part != LEQ}
        if len(ties) != 1:
            return False
        (tie,) = ties
        same = isinstance(tie, Select) and tie.children == first.children
        if not (same and np.array_equal(self.table(tie), np.eye(len(self.values(first.keys)), dtype=bool))):  # type: ignore[arg-type]
            return False
        earlier, every = widths.get((tie, LEQ), widths.get((LEQ, tie), 0)), widths.get((tie,), 0)
        by_earlier = earlier == 1 and every == 0 and constant == -1
        return by_earlier or (earlier == -1 and every == 1 and constant == 0)

    def _tournament(self, select: Selector) -> bool:
        """Whether a select compares an op with itself by a strict total order of its values."""
        if not isinstance(select, Select) or select.keys != select.queries or order(select) == "leq":
            return False
        table = self.table(select)
        return not (table & table.T).any() and sorted(table.sum(1)) == list(range(len(table)))

    def distinct(self, node: SOp) -> bool:
        """Whether the values at two positions of a sequence always differ, as far as this can be seen."""

        def ask() -> bool:
            if isinstance(node, Constant):
                return False
            if self.is_number(node):
                terms = self.linear(node)[0]
                if self.permutes(node):
                    return True
                moving = [atom for atom in terms if atom != length]
                if len(moving) == 1 and moving[0] != node:
                    return self.distinct(moving[0])
            if isinstance(node, Map) and node in self._maps:
                sizes, keys, results = self._maps[node]
                for operand, ids in zip(node.operands, np.unravel_index(keys, tuple(sizes)), strict=True):
                    told = len(distinct_rows([results, ids])[0]) == len(np.unique(results))
                    if told and self.distinct(operand):  # the result tells the operand's value
                        return True
            return False

        return bool(self._remembered("distinct", node, ask))

    @property
    def numeric_output(self) -> bool:
        """Whether the program's output is a number that is not one of finitely many whole ones: a mean."""
        return self.numeric(self.program)

    def numeric(self, output: SOp) -> bool:
        """The same of any output."""
        if (output.mark == "numerical" and self.is_number(output)) or output in self._late:
            return True
        return self.is_number(output) and not all(isinstance(v, int) for v in self.values(output))


def _calls(function: object) -> int:
    """How often a function may be called: less often where its text is long."""
    return CALLS * SHORT // max(SHORT, getattr(function, "cost", 1))


def combined(columns: Sequence[Ids], sizes: Sequence[int] | Ids) -> Ids:
    """One number for each row of numbers below `sizes`."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column
    return key


def distinct(keys: Ids, size: int) -> Ids:
    """The different ones of many numbers below `size`, in order."""
    if size > MARKED:
        return np.unique(keys)
    seen = np.zeros(size, dtype=bool)
    seen[keys] = True
    return np.flatnonzero(seen)


def distinct_rows(columns: Sequence[Ids]) -> list[Ids]:
    """The different rows of some columns of numbers from 0, in order, as columns."""
    if not len(columns) or not len(columns[0]):
        return list(columns)
    sizes = [int(column.max()) + 1 for column in columns]
    if math.prod(sizes) >= 2**62:  # one number a row must fit into 64 bits
        return list(np.unique(np.stack(columns, 1), axis=0).T)
    keys = distinct(combined(columns, sizes), math.prod(sizes))
    return list(np.unravel_index(keys, sizes))


def _is_float64(value: Any) -> bool:
    """Whether a number is one of float64, far from the ends of its range."""
    whole, power = value.numerator, value.denominator
    return power & (power - 1) == 0 and whole.bit_length() <= 53 and power.bit_length() <= 900


def _added(parts: list[tuple[Fraction, Linear]]) -> Linear:
    terms: dict[SOp, Fraction] = {}
    constant = Fraction(0)
    for by, (more, add) in parts:
        constant += by * add
        for atom, c in more.items():
            terms[atom] = terms.get(atom, Fraction(0)) + by * c
    return {atom: c for atom, c in terms.items() if c}, constant


def _line(x: list[Fraction], y: list[Fraction]) -> tuple[Fraction, Fraction] | None:
    """Slope and constant of the line through points, if there is one that is not flat."""
    if len(x) != len(y) or len(x) < 2:
        return None
    slope = (y[1] - y[0]) / (x[1] - x[0])
    constant = y[0] - slope * x[0]
    return (slope, constant) if slope and all(slope * a + constant == b for a, b in zip(x, y, strict=True)) else None


#: Operators that have a value for any values, and those that have one for any numbers.
_ALWAYS = {"eq", "ne", "true", "false", "logical_and", "logical_or", "logical_not", "where"}
_OF_NUMBERS = {"lt", "leq", "gt", "geq", "add", "sub", "mul", "neg", "abs", "min", "max"}
SHOWN = 3  # ops that are named: their labels may be long


def domain_of(programs: Iterable[SOp], facts: Facts) -> str:
    """The sequences that a certificate speaks of, in words: those of the domain on which the programs have values."""
    labels = [*dict.fromkeys(node.label for program in programs for node in undefined(program, facts))]
    if not labels:
        return repr(facts.domain)
    more = f" and {len(labels) - SHOWN} more have values" if len(labels) > SHOWN else " has a value"
    return f"{facts.domain!r} where {', '.join(labels[:SHOWN])}{more}"


def undefined(program: SOp, facts: Facts) -> tuple[Node, ...]:
    """The ops of a program that may have no value on some sequences, given the facts of its normal form."""
    asked: set[Node] = set(facts.order)
    for node in facts.order:
        if isinstance(node, Select) and isinstance(node.predicate, Packed):
            asked.update(walk(node.predicate.selector))
    known: dict[SOp, bool] = {}
    images = rewritten(program, facts.domain, facts.order)
    return tuple(node for node, image in images.items() if not _sure(node, image, asked, facts, known))


def _sure(node: Node, image: Node, asked: set[Node], facts: Facts, known: dict[SOp, bool]) -> bool:
    """Whether an op has a value wherever what it reads has one; `image` is its normal form."""
    if isinstance(node, Aggregate):
        return numbers_only(node.operand, facts.domain, known) or (
            isinstance(image, Aggregate) and image in facts.at and (facts.agrees(image) or _followed(image, facts))
        )
    if not isinstance(node, Map | Select) or image in asked:
        return True  # and who was asked answered for all values that can meet
    function = node.function if isinstance(node, Map) else node.predicate
    if not isinstance(function, Operator):
        return isinstance(image, Select) and isinstance(image.predicate, Operator)  # it was asked about all positions
    read = node.operands if isinstance(node, Map) else node.children
    return function.name in _ALWAYS or (
        function.name in _OF_NUMBERS and all(numbers_only(child, facts.domain, known) for child in read)
    )


def _followed(node: Aggregate, facts: Facts) -> bool:
    """Whether keys are picked by a value and by how many positions had that value so far, both read where a selector
    moves them from: no two positions have the same pair, and no two read from the same position."""
    parts = [
        part for part in conjuncts(node.selector) if isinstance(part, Select) and part.predicate == OPERATORS["eq"]
    ]
    moved = [part.keys for part in parts]
    for part, count in zip(parts, moved, strict=True):
        if not isinstance(count, Aggregate) or count.default in facts.values(part.queries):
            continue  # where nothing is read there may be several
        width = count.operand
        for value in moved:
            if not isinstance(value, Aggregate) or value.selector != count.selector:
                continue
            own = Select(value.operand, value.operand, OPERATORS["eq"])
            counts = isinstance(width, SelectorWidth) and set(conjuncts(width.selector)) == {own, LEQ}
            if counts and facts.single(count.selector) and _apart(count.selector, facts):
                return True
    return False


def _apart(selector: Selector, facts: Facts) -> bool:
    """Whether no key is selected by two queries, as far as this can be seen."""
    return any(
        isinstance(part, Select) and facts.distinct(part.queries) and bool((facts.table(part).sum(0) <= 1).all())
        for part in conjuncts(selector)
    )
