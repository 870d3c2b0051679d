"""Scalar expressions: a graph of numbers, variables, linear forms, monomials and univariate calls.

Nodes are made by a `Graph` (graph.py), which shares equal ones, so that `is` decides equality; they are never changed.

    Number      an exact rational
    Variable    an input
    Sum         constant + sum of coefficient * term        (terms are no sums, no numbers)
    Product     product of base ** exponent                 (bases are no products unless the exponent is fractional)
    Call        a univariate function of the registry

A number times something is a `Sum` of one term. Roots and reciprocals are powers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from .constants import constant_text
from .interval import Interval
from .tracing import Operators
from .univariate import Univariate

if TYPE_CHECKING:
    from .graph import Graph

#: Texts longer than this are not kept: a graph with much sharing has texts of exponential length.
_LONGEST_TEXT = 2000
Terms = tuple[tuple["Expr", Fraction], ...]


class Expr(Operators):
    """A node. `text` is its formula (None when too long), `order` sorts nodes the same way in every graph."""

    __slots__ = ("depth", "graph", "index", "order", "range", "text", "variables")
    graph: Graph
    index: int
    range: Interval
    text: str | None
    order: tuple[int, str]
    depth: int
    #: The variables that the node depends on.
    variables: frozenset[Variable]

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()

    def fields(self) -> tuple[object, ...]:
        """What determines the node among those of its class."""
        raise NotImplementedError

    def _texts(self) -> list[str | None]:
        return [child.text for child in self.children]

    def spelled(self) -> str:
        """The text, given that those of the children are known."""
        raise NotImplementedError

    def finish(self, graph: Graph, index: int, rank: int) -> None:
        """Fill in what follows from the fields."""
        self.graph, self.index = graph, index
        self.depth = 1 + max((child.depth for child in self.children), default=0)
        self.variables = frozenset().union(*(child.variables for child in self.children))
        text = None if None in self._texts() else self.spelled()
        self.text = text if text is not None and len(text) <= _LONGEST_TEXT else None
        self.order = (rank, self.text if self.text is not None else self._digest())

    def _digest(self) -> str:
        parts = [type(self).__name__]
        for item in self.fields():
            flat: Iterable[object] = [x for pair in item for x in pair] if isinstance(item, tuple) else [item]
            parts += [x.order[1] if isinstance(x, Expr) else str(getattr(x, "name", x)) for x in flat]
        return "\x7f" + hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def short(self, limit: int = 60) -> str:
        """The text for people, cut in the middle when it is long."""
        if self.text is None:
            return f"an expression in {', '.join(sorted(v.name for v in self.variables))}"
        half = limit // 2 - 2
        return self.text if len(self.text) <= limit else f"{self.text[:half]} ... {self.text[-half:]}"

    def __repr__(self) -> str:
        return f"Expr({self.short()})"


class Number(Expr):
    __slots__ = ("value",)

    def __init__(self, value: Fraction):
        self.value = value

    def fields(self) -> tuple[object, ...]:
        return (self.value,)

    def spelled(self) -> str:
        return constant_text(self.value)


class Variable(Expr):
    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def fields(self) -> tuple[object, ...]:
        return (self.name,)

    def finish(self, graph: Graph, index: int, rank: int) -> None:
        super().finish(graph, index, rank)
        self.variables = frozenset((self,))

    def spelled(self) -> str:
        return self.name


class Sum(Expr):
    __slots__ = ("constant", "terms")

    def __init__(self, terms: Terms, constant: Fraction):
        self.terms, self.constant = terms, constant

    @property
    def children(self) -> tuple[Expr, ...]:
        return tuple(term for term, _ in self.terms)

    def fields(self) -> tuple[object, ...]:
        return (self.terms, self.constant)

    @property
    def scale(self) -> Fraction | None:
        """The coefficient when the sum is a number times one term."""
        return self.terms[0][1] if len(self.terms) == 1 and not self.constant else None

    def spelled(self) -> str:
        parts = [_term(term, coefficient) for term, coefficient in self.terms]
        if self.constant:
            spelling = constant_text(abs(self.constant))
            here = ("-" if self.constant < 0 else "+", spelling)
            # a positive constant goes first when the sum would begin with a minus: 1 - x**2
            parts = [here, *parts] if parts[0][0] == "-" and self.constant > 0 else [*parts, here]
        sign, first = parts[0]
        if sign == "-":  # a minus before a parenthesis would be read as part of the first factor
            first = f"-1*{first}" if first.startswith("(") else f"-{first}"
        return first + "".join(f" {sign} {text}" for sign, text in parts[1:])


class Product(Expr):
    __slots__ = ("factors",)

    def __init__(self, factors: Terms):
        self.factors = factors

    @property
    def children(self) -> tuple[Expr, ...]:
        return tuple(base for base, _ in self.factors)

    def fields(self) -> tuple[object, ...]:
        return (self.factors,)

    def spelled(self) -> str:
        above = [_power(base, exponent) for base, exponent in self.factors if exponent > 0]
        below = [_power(base, -exponent) for base, exponent in self.factors if exponent < 0]
        top, bottom = "*".join(above) or "1", "*".join(below)
        return f"{top}/({bottom})" if len(below) > 1 else f"{top}/{bottom}" if below else top


class Call(Expr):
    __slots__ = ("argument", "function")

    def __init__(self, function: Univariate, argument: Expr):
        self.function, self.argument = function, argument

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.argument,)

    def fields(self) -> tuple[object, ...]:
        return (self.function, self.argument)

    def spelled(self) -> str:
        name, _, arguments = self.function.name.partition("(")
        extra = f", {arguments[:-1]}" if arguments else ""
        return f"{name}({self.argument.text}{extra})"


def _term(term: Expr, coefficient: Fraction) -> tuple[str, str]:
    """Sign and text of coefficient * term."""
    text, size = term.text or "", abs(coefficient)
    sign = "-" if coefficient < 0 else "+"
    if size == 1:
        return sign, text
    spelling = constant_text(size)
    numerator, _, denominator = spelling.partition("/")
    if text.startswith("1/"):
        text = numerator + text[1:]
    elif numerator != "1":
        text = f"{numerator}*{text}"
    return sign, f"{text}/{denominator}" if denominator else text


def _power(base: Expr, exponent: Fraction) -> str:
    text = base.text or ""
    if exponent == Fraction(1, 2):
        return f"sqrt({text})"
    if isinstance(base, (Sum, Product)):
        text = f"({text})"
    if exponent == 1:
        return text
    spelling = constant_text(exponent)
    return f"{text}**({spelling})" if "/" in spelling else f"{text}**{spelling}"


def reachable(roots: Iterable[Expr]) -> list[Expr]:
    """Every node that the roots depend on, the roots included, children before parents."""
    seen: dict[int, Expr] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node.index not in seen:
            seen[node.index] = node
            todo.extend(node.children)
    return [seen[i] for i in sorted(seen)]
