"""Programs written for Tracr, read by the names of their classes and fields; Tracr itself is not imported.

A Tracr object is anything with a class called `RASPExpr` among its bases. What is kept is its meaning where Tracr's own
evaluator gives it one: a map of None is None there without asking the function, so that is written into the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ..errors import ArgumentError, UnsupportedOperation
from .language import (
    OPERATORS,
    Aggregate,
    And,
    Constant,
    Map,
    Node,
    Not,
    Or,
    Select,
    Selector,
    SelectorWidth,
    SOp,
    Table,
    apply,
    indices,
    length,
    tokens,
)

#: What Tracr calls its comparisons, and the operator that means the same.
_COMPARISONS = {
    "==": "eq",
    "!=": "ne",
    "<": "lt",
    "<=": "leq",
    ">": "gt",
    ">=": "geq",
    "True": "true",
    "False": "false",
}
#: Names that Tracr gives to what has none.
_UNNAMED = {"map", "sequence_map", "linear_sequence_map", "full", "constant_sop", "selector_width", "aggregate",
            "select", "selector_and", "selector_or", "selector_not", "constant_selector"}  # fmt: skip


@dataclass(frozen=True)
class UnlessNone:
    """A function that is None where one of its arguments is."""

    function: Callable[..., object]

    def __call__(self, *values: object) -> object:
        return None if None in values else self.function(*values)

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "function")


@dataclass(frozen=True)
class LinearCombination:
    """A linear combination of two values."""

    first: float
    second: float

    def __call__(self, a: Any, b: Any) -> Any:
        return Fraction(self.first) * a + Fraction(self.second) * b


def _maybe_none(node: Node) -> bool:
    """Whether an op may be None where the tokens are not: a default, or what is None because an operand is."""
    if isinstance(node, Aggregate):
        return node.default is None or _maybe_none(node.operand)
    if isinstance(node, Map) and isinstance(node.function, UnlessNone):
        return any(map(_maybe_none, node.operands))
    return isinstance(node, Constant) and node.value is None


def is_tracr(given: object) -> bool:
    """Whether an object is one of Tracr's expressions, by the names of its classes."""
    return not isinstance(given, Node) and any(kind.__name__ == "RASPExpr" for kind in type(given).__mro__)


def from_tracr(given: object) -> SOp:
    """The program that a Tracr object spells; names and the mark "numerical" are kept.

    program = from_tracr(tracr.compiler.lib.make_sort_unique(rasp.tokens, rasp.tokens))
    """
    if not is_tracr(given):
        raise ArgumentError(f"a program of Tracr is expected, got {type(given).__name__}")
    found: dict[int, Node] = {}  # by id: Tracr's == builds a program
    stack = [given]
    while stack:
        expr = stack[-1]
        missing = [child for child in _children(expr) if id(child) not in found]
        if missing:
            if len(stack) > 10_000:  # deeper than any program: an object that holds itself
                raise ArgumentError(f"the program of Tracr never ends: {type(expr).__name__} holds itself")
            stack += missing
            continue
        found[id(expr)] = _read(expr, [found[id(child)] for child in _children(expr)])
        stack.pop()
    program = found[id(given)]
    if not isinstance(program, SOp):
        raise ArgumentError("a program is a sequence op, got a selector of Tracr; aggregate it")
    return program


def _children(expr: Any) -> list[Any]:
    return [getattr(expr, name) for name in _FIELDS.get(_kind(expr), ())]


_FIELDS: dict[str, tuple[str, ...]] = {
    "Map": ("inner",),
    "SequenceMap": ("fst", "snd"),
    "LinearSequenceMap": ("fst", "snd"),
    "Select": ("keys", "queries"),
    "SelectorAnd": ("fst", "snd"),
    "SelectorOr": ("fst", "snd"),
    "SelectorNot": ("inner",),
    "SelectorWidth": ("selector",),
    "Aggregate": ("selector", "sop"),
}
_LEAVES = {"Tokens", "TokensType", "Indices", "IndicesType", "Length", "LengthType", "Full", "ConstantSOp",
           "ConstantSelector"}  # fmt: skip


def _kind(expr: object) -> str:
    names = [kind.__name__ for kind in type(expr).__mro__]
    found = next((name for name in names if name in _FIELDS or name in _LEAVES), None)
    if found is None:
        raise UnsupportedOperation(
            f"a program of Tracr holds {names[0]}, which is none of {', '.join(sorted(_FIELDS))}"
        )
    return found


def _read(expr: Any, parts: list[Any]) -> Node:
    node = _built(_kind(expr), expr, parts)
    notes = getattr(expr, "annotations", {})
    name = notes.get("name", getattr(expr, "name", ""))
    node = node.named(name) if isinstance(name, str) and name not in _UNNAMED and not node.name else node
    if isinstance(node, SOp):  # Tracr's selectors refuse the question
        encoding = notes.get("encoding")
        return replace(node, mark="numerical") if getattr(encoding, "value", encoding) == "numerical" else node
    return node


def _built(kind: str, expr: Any, parts: list[Any]) -> Node:
    if kind in ("Tokens", "TokensType", "Indices", "IndicesType", "Length", "LengthType"):
        return {"T": tokens, "I": indices, "L": length}[kind[0]]
    if kind in ("Map", "SequenceMap"):
        return Map(UnlessNone(expr.f), tuple(parts))
    if kind == "LinearSequenceMap":
        if any(map(_maybe_none, parts)):
            return Map(UnlessNone(LinearCombination(expr.fst_fac, expr.snd_fac)), tuple(parts))
        return parts[0] * expr.fst_fac + parts[1] * expr.snd_fac
    if kind == "Full":
        return Constant(expr.fill)
    if kind == "ConstantSOp":
        return apply(Table(dict(enumerate(expr.value))), indices)
    if kind == "ConstantSelector":
        entries = {(k, q): bool(hit) for q, row in enumerate(expr.value) for k, hit in enumerate(row)}
        return Select(indices, indices, Table(entries, arity=2))
    if kind == "Select":
        comparison = _COMPARISONS.get(getattr(expr.predicate, "value", None) or "")
        return Select(parts[0], parts[1], OPERATORS[comparison] if comparison else expr.predicate)
    if kind == "Aggregate":
        return Aggregate(parts[0], parts[1], expr.default)
    made: dict[str, Callable[..., Selector | SOp]] = {
        "SelectorAnd": And, "SelectorOr": Or, "SelectorNot": Not, "SelectorWidth": SelectorWidth
    }  # fmt: skip
    return made[kind](*parts)
