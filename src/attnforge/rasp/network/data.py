"""Programs as data: ops in a numbered list, functions as names of operators or as finite tables, never as code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ...arguments import whole
from ...errors import ArgumentError
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
    SelectorWidth,
    SOp,
    Table,
    Tokens,
    walk,
)  # fmt: skip
from ..values import Value, canonical

_TYPES: dict[str, type[Node]] = {
    t.__name__: t for t in (Tokens, Indices, Constant, Map, Aggregate, SelectorWidth, Select, And, Or, Not)
}
MOST_OPS = 1 << 14  # of a file: what the deepest programs of the library have at their longest is a tenth
OUTPUTS = 64  # of one network: each is proved by itself
DEEPEST = 32  # tuples within tuples that are read: twice what a value of a program may have
NUMBER = re.compile(r"-?[0-9]{1,1300}/[1-9][0-9]{0,1300}")  # of 4096 bits, which is what a value may have


class Asked:
    """A Python function that remembers what it was asked: what it says on a finite domain becomes a table."""

    def __init__(self, function: Callable[..., object]):
        self.function, self.answers = function, dict[tuple[Value, ...], object]()
        self.__name__ = getattr(function, "__name__", "")
        self.text = getattr(function, "text", self.__name__ or type(function).__name__)  # for messages
        self.cost = getattr(function, "cost", 1)

    def __call__(self, *values: Value) -> object:
        if values not in self.answers:
            self.answers[values] = self.function(*values)
        return self.answers[values]

    def table(self, arity: int) -> Table | None:
        """What was asked and answered; None where nothing was."""
        rows = {key if arity > 1 else key[0]: canonical(value) for key, value in self.answers.items()}
        return Table(rows, arity) if rows else None


def functions_replaced(program: SOp, by: Callable[[Callable[..., object], int], object | None]) -> SOp:
    """The program with every function that is no operator and no table replaced; None stands for what nobody asks."""
    done: dict[Node, Node] = {}
    for node in walk(program):
        new: dict[str, Any] = {name: done[child] for name, child in vars(node).items() if isinstance(child, Node)}
        if isinstance(node, Map):
            new["operands"] = tuple(done[child] for child in node.operands)
        function = getattr(node, "function", getattr(node, "predicate", None))
        if function is not None and not isinstance(function, (Operator, Table)):
            found = by(function, len(node.children))
            short = getattr(function, "__name__", "")
            if not node.name and not isinstance(found, Asked):  # the text of a table is long
                new["name"] = short if short.isidentifier() else f"function_{len(done)}"
            if isinstance(node, Select):
                new["predicate"] = OPERATORS["false"] if found is None else found
            elif found is None:
                done[node] = Constant(None, name=new.get("name", node.name))
                continue
            else:
                new["function"] = found
        done[node] = replace(node, **new) if new else node
    result = done[program]
    assert isinstance(result, SOp)
    return result


def tabulated(program: SOp, asking: Callable[[SOp], object]) -> SOp:
    """The program with Python functions as tables of all that `asking`, who is given the program, wants to know.

    `asking` must ask for all that matters: what it does not ask a function for has no row, and a function that is asked
    for nothing (it stands in a part that the normal form leaves out) is replaced by a constant. Ops that are equal then
    go by one name, as in a file.
    """
    asked: dict[Any, Asked] = {}
    watched = functions_replaced(program, lambda f, arity: asked.setdefault((f, arity), Asked(f)))
    if not asked:
        return watched
    asking(watched)
    tables = functions_replaced(watched, lambda f, arity: f.table(arity))  # type: ignore[attr-defined]
    return functions_replaced(tables, lambda f, arity: f)


def value_json(value: Value) -> Any:
    """A value as JSON; numbers beyond 64 bits, which JSON's readers need not keep, as text."""
    if isinstance(value, (int, Fraction)) and max(abs(value.numerator), value.denominator) >= 2**63:
        return {"number": f"{value.numerator}/{value.denominator}"}
    if isinstance(value, Fraction):
        return {"fraction": [value.numerator, value.denominator]}
    return {"tuple": [value_json(part) for part in value]} if isinstance(value, tuple) else value


def read_value(data: Any, depth: int = 0) -> Value:
    """The value that `value_json` wrote; `ArgumentError` on anything else."""
    if isinstance(data, dict):
        if depth > DEEPEST or len(data) != 1:
            raise ArgumentError("a value of a program is nested too deeply, or is none")
        ((kind, inner),) = data.items()
        if kind == "tuple":
            return tuple(read_value(part, depth + 1) for part in inner)
        if kind == "number" and isinstance(inner, str) and NUMBER.fullmatch(inner):
            return canonical(Fraction(inner))
        if kind == "fraction" and isinstance(inner, list) and len(inner) == 2:
            return canonical(Fraction(whole("numerator", abs(inner[0])) * (-1 if inner[0] < 0 else 1),
                                      whole("denominator", inner[1], 1)))  # fmt: skip
        raise ArgumentError(f"there are no values of the kind {kind!r}")
    if data is not None and type(data) not in (int, str):
        raise ArgumentError(f"a value of a program is None, a whole number or a text, got {type(data).__name__}")
    return canonical(data)


def program_json(program: SOp) -> list[Any]:
    """The ops of a program in order, each [type, name, children, rest]; the last is the program."""
    order = walk(program)
    at = {node: i for i, node in enumerate(order)}
    return [op_json(node, [at[child] for child in node.children]) for node in order]


def op_json(node: Node, children: list[int]) -> list[Any]:
    """One op, whose children go by numbers."""
    rest: dict[str, Any] = {}
    if isinstance(node, SOp) and node.mark:
        rest["mark"] = node.mark
    if isinstance(node, (Constant, Aggregate)):
        rest["value"] = value_json(node.value if isinstance(node, Constant) else node.default)
    if isinstance(node, (Map, Select)):
        rest |= _function_json(node.function if isinstance(node, Map) else node.predicate)
    return [type(node).__name__, node.name, children, rest]


def _function_json(function: object) -> dict[str, Any]:
    if isinstance(function, Operator):
        return {"operator": function.name}
    if not isinstance(function, Table):
        raise ArgumentError("a Python function cannot be stored; its table can")
    rows = [[*map(value_json, key), value_json(value)] for key, value in function.rows]
    return {"table": sorted(rows, key=repr)}


def read_program(data: Any) -> SOp:
    """The program that `program_json` wrote; `ArgumentError` on anything else."""
    if not isinstance(data, list) or not 0 < len(data) <= MOST_OPS:
        raise ArgumentError(f"a program is a list of 1 to {MOST_OPS} ops")
    done: list[Node] = []
    for kind, name, children, rest in data:
        if kind not in _TYPES:
            raise ArgumentError(f"there is no op {kind!r}")
        parts: list[Any] = [done[whole("child", i, 0, len(done) - 1)] for i in children]
        named: dict[str, Any] = {"name": str(name)}
        if issubclass(_TYPES[kind], SOp):
            named["mark"] = str(rest.get("mark", ""))
        if kind == "Constant":
            parts = [read_value(rest["value"])]
        elif kind == "Aggregate":
            parts.append(read_value(rest["value"]))
        elif kind == "Map":
            parts = [_read_function(rest, len(parts)), tuple(parts)]
        elif kind == "Select":
            parts.append(_read_function(rest, 2))
        done.append(_TYPES[kind](*parts, **named))
    program = done[-1]
    if not isinstance(program, SOp):
        raise ArgumentError("a program is a sequence op, and the file ends with a selector")
    return program


def _read_function(rest: Mapping[str, Any], arity: int) -> Operator | Table:
    if "operator" in rest:
        if rest["operator"] not in OPERATORS:
            raise ArgumentError(f"there is no operator {rest['operator']!r}")
        return OPERATORS[rest["operator"]]
    rows = {}
    for row in rest["table"]:
        if len(row) != arity + 1:
            raise ArgumentError(f"a row of a table has {arity} arguments and a result, got {len(row)} entries")
        *given, result = map(read_value, row)
        rows[tuple(given) if arity > 1 else given[0]] = result
    return Table(rows, arity)


def domain_json(domain: Sequences) -> dict[str, Any]:
    """A domain as JSON."""
    return {
        "vocabulary": [value_json(token) for token in domain.vocabulary], "max_length": domain.max_length,
        "causal": domain.causal, "bos": value_json(domain.bos),
    }  # fmt: skip


def read_domain(data: Mapping[str, Any]) -> Sequences:
    """The domain that `domain_json` wrote."""
    vocabulary = [read_value(token) for token in data["vocabulary"]]
    return Sequences(vocabulary, data["max_length"], data["causal"], read_value(data["bos"]))
