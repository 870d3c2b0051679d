"""Which ops of a program may have no value on some sequences of a domain, so that a certificate can leave these out.

A map is asked for every combination of values before anything is built, and a predicate for every pair: where one has
no value, nothing is compiled. What remains is an aggregate that selects several values which differ and are not all
numbers, and ops that the normal form leaves out (`x == x` is 1, whatever `x` is) and nobody therefore asks. An op is
listed here unless it is seen to have a value everywhere; the interpreter raises an error where it has none.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..language import OPERATORS, Aggregate, Map, Node, Operator, Select, Selector, SelectorWidth, SOp, walk
from .facts import Facts
from .normal import LEQ, Packed, conjuncts, numbers_only, rewritten

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
