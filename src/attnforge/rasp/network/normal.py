"""Programs in a form that heads can follow: the same meaning, fewer kinds of selectors to count.

    width(~a)         = length - width(a)
    width(a | b)      = width(a) + width(b) - width(a & b)
    width(a & k < q)  = width(a & k <= q) - [a selects the query's own position]      k, q: indices
    width(a & k > q)  = width(a) - width(a & k <= q)
    mean(a, x) + mean(a, y) = mean(a, x + y),    c mean(a, x) = mean(a, c x)           x, y: numbers; c: a constant

so that order of positions is left to the causal mask, and sums of counts to the linear maps. Comparisons of positions
that are written as Python functions are recognised by their tables; maps of constants are constants. Each rule is an
equality of programs on every sequence: who proves something about the normal form proves it about the program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

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
    Or,
    Select,
    Selector,
    SelectorWidth,
    SOp,
    Table,
    Tokens,
    indices,
    length,
    tokens,
    walk,
)  # fmt: skip
from ..values import Value, canonical, is_numeric

#: Operators that compare a value with itself: what they give.
_SAME = {"eq": 1, "leq": 1, "geq": 1, "ne": 0, "lt": 0, "gt": 0}
#: Operators that give numbers whatever they are asked for.
_NUMBERS = {*_SAME, "mul", "div", "mod", "pow", "logical_and", "logical_or", "logical_not"}
_OPPOSITE = {
    "eq": "ne",
    "ne": "eq",
    "lt": "geq",
    "geq": "lt",
    "gt": "leq",
    "leq": "gt",
    "true": "false",
    "false": "true",
}
#: Positions on which a function of two positions is compared with the named comparisons: they differ on the first two.
_PROBE = 256
#: Disjunctions and negations that a count is split by: each may double the number of counts. More become one table.
SPLITS = 4
ALL = Select(tokens, tokens, OPERATORS["true"])


def normal(program: SOp, domain: Sequences) -> SOp:
    """The normal form of a program on a domain."""
    found = rewritten(program, domain)[program]
    assert isinstance(found, SOp)
    return found


def rewritten(program: SOp, domain: Sequences, known: Iterable[Node] = ()) -> dict[Node, Node]:
    """The normal form of every op of a program, what an op reads before the op itself.

    What is equal to an op that is `known` becomes that op itself, so that comparing two of them takes one look.
    """
    done: dict[Node, Node] = {}
    numbers: dict[SOp, bool] = {}
    same = {node: node for node in known}
    for node in walk(program):
        found = _rewritten(_with(node, done), domain, numbers)
        done[node] = same.get(found, found)
    return done


def _with(node: Node, done: dict[Node, Node]) -> Node:
    """The node over rewritten children."""
    if isinstance(node, (Tokens, Indices)):
        return tokens if isinstance(node, Tokens) else indices
    new = {name: done[child] for name, child in vars(node).items() if isinstance(child, Node)}
    if isinstance(node, Map):
        new["operands"] = tuple(done[child] for child in node.operands)  # type: ignore[assignment]
    return replace(node, **new) if new else node  # type: ignore[arg-type]


def _rewritten(node: Node, domain: Sequences, numbers: dict[SOp, bool]) -> Node:
    if isinstance(node, Map):
        if all(isinstance(operand, Constant) for operand in node.operands):
            return Constant(node.at(*(operand.value for operand in node.operands)), name=node.name)  # type: ignore[attr-defined]
        known = node.function.name if isinstance(node.function, Operator) else ""
        if known in _SAME and node.operands[0] == node.operands[1]:
            return Constant(_SAME[known])
        if known in ("add", "sub", "mul", "div"):
            return _one_mean(node, known, domain, numbers)
    elif isinstance(node, Select):
        return _named(node, domain)
    elif isinstance(node, Not):
        inner = node.a
        if isinstance(inner, Not):
            return inner.a
        if isinstance(inner, Select) and isinstance(inner.predicate, Operator) and inner.predicate.name in _OPPOSITE:
            return _named(Select(inner.keys, inner.queries, OPERATORS[_OPPOSITE[inner.predicate.name]]), domain)
    elif isinstance(node, And):
        return conjunction(conjuncts(node))
    elif isinstance(node, Or) and ALL in (node.a, node.b):
        return ALL
    elif isinstance(node, Aggregate):
        parts = tuple(map(_packed, conjuncts(node.selector)))
        return replace(node, selector=conjunction(parts))
    elif isinstance(node, SelectorWidth) and node != length:
        counted = count(node.selector)
        return replace(counted, name=node.name or counted.name)
    return node


def _one_mean(node: Map, known: str, domain: Sequences, numbers: dict[SOp, bool]) -> SOp:
    """A combination of means of numbers by one selector as one mean; else the map as it is."""
    a, b = node.operands
    first = a if isinstance(a, Aggregate) else b
    if not isinstance(first, Aggregate):
        return node
    scaled = known in ("mul", "div")
    parts, defaults = [], []
    for side in node.operands:
        mean = side if isinstance(side, Aggregate) and side.selector == first.selector else None
        if mean is not None and numbers_only(mean.operand, domain, numbers):
            parts.append(mean.operand)
            defaults.append(mean.default)
        elif scaled and isinstance(side, Constant) and not (known == "div" and (side is a or side.value == 0)):
            parts.append(side)
            defaults.append(side.value)
    aggregates = sum(not isinstance(part, Constant) for part in parts)
    if len(parts) < 2 or not all(map(is_numeric, defaults)) or (scaled and aggregates != 1):
        return node
    default = canonical(OPERATORS[known](*defaults))
    return Aggregate(first.selector, Map(OPERATORS[known], tuple(parts)), default, name=node.name, mark=node.mark)


def numbers_only(node: SOp, domain: Sequences, known: dict[SOp, bool]) -> bool:
    """Whether every value of an op is a number, as far as this is seen from the op and the vocabulary; asked once."""
    if node not in known:
        known[node] = _all_numbers(node, domain, known)
    return known[node]


def _all_numbers(node: SOp, domain: Sequences, known: dict[SOp, bool]) -> bool:
    if isinstance(node, Constant):
        return is_numeric(node.value)
    if isinstance(node, Tokens):
        return all(map(is_numeric, domain.vocabulary))
    if isinstance(node, (Indices, SelectorWidth)):
        return True
    if not isinstance(node, Map):
        return False
    if all(isinstance(operand, Tokens) for operand in node.operands):
        return all(is_numeric(node.at(*[token] * len(node.operands))) for token in domain.vocabulary)
    if isinstance(node.function, Table):
        return all(is_numeric(value) for _, value in node.function.rows)
    name = node.function.name if isinstance(node.function, Operator) else ""
    if name == "where":
        return all(numbers_only(side, domain, known) for side in node.operands[1:])
    return name in _NUMBERS or (name == "add" and any(numbers_only(side, domain, known) for side in node.operands))


def pack(*values: Value) -> Value:
    """Values of several ops as one."""
    return values


@dataclass(frozen=True)
class Packed:
    """A selector over several ops at once as a predicate of tuples of their values."""

    selector: Selector
    keys: tuple[SOp, ...]
    queries: tuple[SOp, ...]

    def __call__(self, key: Any, query: Any) -> bool:
        keys = dict(zip(self.keys, key if len(self.keys) > 1 else (key,), strict=True))
        queries = dict(zip(self.queries, query if len(self.queries) > 1 else (query,), strict=True))
        return self._at(self.selector, keys, queries)

    def _at(self, selector: Any, keys: dict[SOp, Value], queries: dict[SOp, Value]) -> bool:
        if isinstance(selector, Select):
            return selector.at(keys[selector.keys], queries[selector.queries])
        if isinstance(selector, Not):
            return not self._at(selector.a, keys, queries)
        a, b = (self._at(side, keys, queries) for side in (selector.a, selector.b))
        return a and b if isinstance(selector, And) else a or b


def _packed(part: Selector) -> Selector:
    """A disjunction or negation that compares several ops, as one select of tuples of them."""
    if isinstance(part, Select):
        return part
    leaves, stack = list[Select](), [part]
    while stack:
        one = stack.pop()
        if isinstance(one, Select):
            leaves.append(one)
        else:
            stack += [child for child in one.children if isinstance(child, Selector)]
    keys, queries = tuple(dict.fromkeys(s.keys for s in leaves)), tuple(dict.fromkeys(s.queries for s in leaves))
    sides = [side[0] if len(side) == 1 else Map(pack, side) for side in (keys, queries)]
    return Select(sides[0], sides[1], Packed(part, keys, queries))


def _named(node: Select, domain: Sequences) -> Select:
    """The select with a named predicate, where its function compares positions like one of them."""
    if isinstance(node.predicate, Operator):
        return ALL if node.predicate.name == "true" else node
    if not (isinstance(node.keys, Indices) and isinstance(node.queries, Indices)) or domain.max_length > _PROBE:
        return node
    at = np.arange(domain.max_length)
    found = np.array([[node.at(int(k), int(q)) for k in at] for q in at])
    for name, table in (("true", found | True), ("leq", at <= at[:, None]), ("lt", at < at[:, None]),
                        ("gt", at > at[:, None]), ("geq", at >= at[:, None]), ("eq", at == at[:, None])):  # fmt: skip
        if np.array_equal(found, table):
            return ALL if name == "true" else Select(indices, indices, OPERATORS[name])
    return node


def conjuncts(selector: Selector) -> tuple[Selector, ...]:
    """The selectors that a selector is the conjunction of, without repetition and without those that say nothing."""
    found: dict[Selector, None] = {}
    stack = [selector]
    while stack:
        one = stack.pop()
        if isinstance(one, And):
            stack += [one.b, one.a]
        elif one != ALL:
            found.setdefault(one)
    return tuple(found)


def conjunction(parts: tuple[Selector, ...]) -> Selector:
    """What all of some selectors select; everything, where there are none."""
    return reduce(And, parts) if parts else ALL


def order(selector: Selector) -> str:
    """How a selector compares positions: the name of its operator, or nothing."""
    positions = isinstance(selector, Select) and isinstance(selector.keys, Indices)
    if positions and isinstance(selector.queries, Indices) and isinstance(selector.predicate, Operator):  # type: ignore[attr-defined]
        name: str = selector.predicate.name  # type: ignore[attr-defined]
        return name if name in ("lt", "leq", "gt", "geq") else ""
    return ""


LEQ = Select(indices, indices, OPERATORS["leq"])


def count(selector: Selector) -> SOp:
    """How many keys a selector selects, by the rules above."""
    if isinstance(selector, Not):
        return _sum(length, "sub", count(selector.a))
    parts = conjuncts(selector)
    if not parts:
        return length
    if sum(isinstance(node, (Or, Not)) for part in parts for node in walk(part)) > SPLITS:
        parts = tuple(map(_packed, parts))
    split = next((part for part in parts if isinstance(part, (Or, Not))), None)
    rest = tuple(part for part in parts if part is not split)
    if isinstance(split, Or):
        both = [count(conjunction(conjuncts(conjunction((*rest, side))))) for side in (split.a, split.b)]
        overlap = count(conjunction(conjuncts(conjunction((*rest, split.a, split.b)))))
        return _sum(_sum(both[0], "add", both[1]), "sub", overlap)
    if isinstance(split, Not):
        return _sum(count(conjunction(rest)), "sub", count(conjunction(conjuncts(conjunction((*rest, split.a))))))
    names = {order(part) for part in parts} - {"", "leq"}
    if not names:
        return SelectorWidth(conjunction(parts))
    name = min(names)
    rest = tuple(part for part in parts if order(part) != name)
    until = tuple(dict.fromkeys((*rest, LEQ)))
    if name == "lt":
        return _sum(count(conjunction(until)), "sub", own(conjunction(rest)))
    if name == "gt":
        return _sum(count(conjunction(rest)), "sub", count(conjunction(until)))
    return _sum(_sum(count(conjunction(rest)), "sub", count(conjunction(until))), "add", own(conjunction(rest)))


def own(selector: Selector) -> SOp:
    """1 where a selector selects the query's own position, 0 elsewhere."""
    if isinstance(selector, Select):
        known = selector.predicate.name if isinstance(selector.predicate, Operator) else ""
        if known in _SAME and selector.keys == selector.queries:
            return Constant(_SAME[known])
        if known in ("true", "false"):
            return Constant(int(known == "true"))
        return Map(selector.predicate, (selector.keys, selector.queries))
    if isinstance(selector, Not):
        return Map(OPERATORS["logical_not"], (own(selector.a),))
    name = "logical_and" if isinstance(selector, And) else "logical_or"
    sides = own(selector.a), own(selector.b)  # type: ignore[attr-defined]
    for here, other in (sides, sides[::-1]):
        if isinstance(here, Constant):
            return other if bool(here.value) == (name == "logical_and") else here
    return Map(OPERATORS[name], sides)


def _sum(a: SOp, name: str, b: SOp) -> SOp:
    if isinstance(b, Constant) and b.value == 0:
        return a
    if isinstance(a, Constant) and isinstance(b, Constant):
        return Constant(OPERATORS[name](a.value, b.value))  # type: ignore[arg-type]
    return Map(OPERATORS[name], (a, b))


def order_free(selector: Selector) -> tuple[Selector, bool]:
    """A selector without its conjuncts "the key is not later than the query", and whether it had one."""
    parts = conjuncts(selector)
    rest = tuple(part for part in parts if part != LEQ)
    return conjunction(rest), len(rest) < len(parts)
