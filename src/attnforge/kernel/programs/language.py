"""Token programs out of a file: ops in a numbered list, functions as names of operators or as finite tables.

Values are None, whole numbers, other numbers as `Fraction`, texts, and tuples of values. A function that cannot be
asked for some values, or gives none of these, makes the program undefined on every sequence in which they meet: no
claim is made of such sequences.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from ..program import whole

Value: TypeAlias = "int | Fraction | str | tuple[Value, ...] | None"

LARGEST = 4096  # bits of a number, letters of a text, parts of a tuple: the language's own limits
DEEPEST = 16  # tuples within tuples, likewise
NUMBER = re.compile(r"-?[0-9]{1,1300}/[1-9][0-9]{0,1300}")  # as text, where it has more than 64 bits
MOST_OPS = 1 << 14  # of a file: ten times what the longest programs of the library have
LONGEST = 1 << 16  # tokens of a sequence, and of a vocabulary


class Undefined(Exception):
    """A function has no value for what it is asked."""


def _numbers(*values: Any) -> None:
    if not all(map(is_number, values)):
        raise Undefined


def _product(a: Any, b: Any) -> Any:
    _numbers(a, b)
    return a * b


def _quotient(a: Any, b: Any) -> Any:
    _numbers(a, b)
    return Fraction(a) / b


def _remainder(a: Any, b: Any) -> Any:
    _numbers(a, b)
    return a % b


def _power(a: Any, b: Any) -> Any:
    _numbers(a, b)
    if abs(b) * max(Fraction(a).numerator.bit_length(), Fraction(a).denominator.bit_length()) > LARGEST:
        raise Undefined
    return Fraction(a) ** b


#: Every operator by its name: how many values it takes (0: any number), and what it does.
OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "eq": (2, operator.eq), "ne": (2, operator.ne), "lt": (2, operator.lt), "leq": (2, operator.le),
    "gt": (2, operator.gt), "geq": (2, operator.ge), "true": (2, lambda a, b: 1), "false": (2, lambda a, b: 0),
    "add": (2, operator.add), "sub": (2, operator.sub), "mul": (2, _product), "div": (2, _quotient),
    "floordiv": (2, operator.floordiv), "mod": (2, _remainder), "pow": (2, _power),
    "logical_and": (2, lambda a, b: bool(a) and bool(b)), "logical_or": (2, lambda a, b: bool(a) or bool(b)),
    "logical_not": (1, operator.not_), "neg": (1, operator.neg), "abs": (1, abs), "min": (2, min), "max": (2, max),
    "where": (3, lambda condition, yes, no: yes if condition else no), "pack": (0, lambda *values: values),
}  # fmt: skip


def is_number(value: Any) -> bool:
    """Whether a value is a number."""
    return isinstance(value, (int, Fraction))


def canonical(value: Any, depth: int = 0) -> Value:
    """The one form of a value: True is 1, 2.0 is 2, 0.5 is a fraction; `Undefined` for what is no value."""
    if isinstance(value, float):
        if value != value or value in (float("inf"), -float("inf")):
            raise Undefined
        value = Fraction(value)
    if isinstance(value, int) or (isinstance(value, Fraction) and value.denominator == 1):
        value = int(value)
    if isinstance(value, (int, Fraction)):
        fits = max(value.numerator.bit_length(), value.denominator.bit_length()) <= LARGEST
    elif isinstance(value, tuple):
        fits = len(value) <= LARGEST and depth < DEEPEST
        value = tuple(canonical(part, depth + 1) for part in value) if fits else value
    else:
        fits = value is None or (isinstance(value, str) and len(value) <= LARGEST)
    if not fits:
        raise Undefined
    return value


def in_order(values: set[Value]) -> tuple[Value, ...]:
    """Values in the order in which a file's columns stand: numbers, then texts, tuples, and None."""
    kind = {str: 1, tuple: 2, type(None): 3}
    return tuple(sorted(values, key=lambda v: (k := kind.get(type(v), 0), v if k < 2 else repr(v))))


@dataclass(frozen=True, eq=False)
class Function:
    """A function of values: an operator by its name, or a table of rows."""

    key: object  # what makes two functions the same
    name: str
    table: dict[tuple[Value, ...], Value] | None

    def __call__(self, *values: Value) -> Value:
        try:
            if self.table is not None:
                return self.table[values]
            return canonical(OPERATORS[self.name][1](*values))
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise Undefined from error


@dataclass(frozen=True, eq=False)
class Op:
    """One op: its type, the ops that it reads, its function, its constant or default."""

    kind: str
    children: tuple[int, ...]
    function: Function | None = None
    value: Value = None
    mark: str = ""

    @property
    def selects(self) -> bool:
        """Whether it is a selector."""
        return self.kind in SELECTORS


SELECTORS = ("Select", "And", "Or", "Not")
#: What an op reads: "s" for sequences, "p" for selectors ("*" for any number of sequences).
READS = {
    "Tokens": "", "Indices": "", "Constant": "", "Map": "*", "Aggregate": "ps", "SelectorWidth": "p", "Select": "ss",
    "And": "pp", "Or": "pp", "Not": "p",
}  # fmt: skip


@dataclass(frozen=True)
class Domain:
    """Every sequence of 1 to `length` tokens of a vocabulary, which is in the order of the columns."""

    vocabulary: tuple[Value, ...]
    length: int


def read_domain(data: Any) -> Domain:
    """The domain that a file holds; `ValueError` on anything else."""
    tokens = [read_value(token) for token in data["vocabulary"]]
    if not 0 < len(tokens) <= LONGEST or len(set(tokens)) < len(tokens):
        raise ValueError("a vocabulary has at least one token, and each once")
    return Domain(in_order(set(tokens)), whole(data["max_length"], 1, LONGEST))


def read_value(data: Any, depth: int = 0) -> Value:
    """A value out of a file."""
    if isinstance(data, dict):
        ((kind, inner),) = data.items()
        if kind == "tuple" and isinstance(inner, list) and depth < DEEPEST:
            return _value(tuple(read_value(part, depth + 1) for part in inner))
        if kind == "fraction" and isinstance(inner, list) and [type(part) for part in inner] == [int, int]:
            return _value(Fraction(inner[0], inner[1]))
        if kind == "number" and isinstance(inner, str) and NUMBER.fullmatch(inner):
            return _value(Fraction(inner))
        raise ValueError(f"there are no values of the kind {kind!r}, or they are nested too deeply")
    if data is not None and type(data) not in (int, str):
        raise ValueError(f"{data!r} is no value of a program")
    return _value(data)


def _value(value: Any) -> Value:
    try:
        return canonical(value)
    except Undefined:
        raise ValueError("a value of a program is too large") from None


def read_ops(data: Any) -> tuple[Op, ...]:
    """The ops that a file holds, each after those that it reads."""
    if not isinstance(data, list) or not 0 < len(data) <= MOST_OPS:
        raise ValueError(f"a program is a list of 1 to {MOST_OPS} ops")
    ops: list[Op] = []
    for kind, _, given, rest in data:
        children = tuple(whole(child, 0, len(ops) - 1) for child in given)
        wanted = READS[kind].replace("*", "s" * max(1, len(children)))
        if "".join("p" if ops[child].selects else "s" for child in children) != wanted:
            raise ValueError(f"the op {len(ops)} does not read what {kind} reads")
        function = _function(rest, len(children)) if kind in ("Map", "Select") else None
        value = read_value(rest["value"]) if kind in ("Constant", "Aggregate") else None
        ops.append(Op(kind, children, function, value, str(rest.get("mark", ""))))
    return tuple(ops)


def _function(rest: Any, arity: int) -> Function:
    if "operator" in rest:
        name = rest["operator"]
        if OPERATORS[name][0] not in (0, arity):
            raise ValueError(f"{name} does not take {arity} values")
        return Function(name, name, None)
    rows: dict[tuple[Value, ...], Value] = {}
    for row in rest["table"]:
        *arguments, result = map(read_value, row)
        if len(arguments) != arity:
            raise ValueError(f"a row of a table has {len(arguments)} arguments, not {arity}")
        if rows.setdefault(tuple(arguments), result) != result:
            raise ValueError("a table has two results for the same arguments")
    return Function(frozenset(rows.items()), "", rows)


def hit(function: Function, key: Value, query: Value) -> bool:
    """Whether a query selects a key."""
    found = function(key, query)
    if not isinstance(found, int) or found not in (0, 1):
        raise Undefined
    return bool(found)


def numbers(values: Sequence[Value]) -> bool:
    """Whether all of some values are numbers."""
    return all(map(is_number, values))


def reached(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops that the last one depends on, in order: nothing else is ever asked for anything."""
    if ops[-1].selects:
        raise ValueError("a program ends with a sequence op")
    wanted = {len(ops) - 1}
    for i in range(len(ops) - 1, -1, -1):
        wanted |= set(ops[i].children) if i in wanted else set()
    at = {old: new for new, old in enumerate(sorted(wanted))}
    return tuple(
        Op(op.kind, tuple(at[child] for child in op.children), op.function, op.value, op.mark)
        for op in (ops[old] for old in at)
    )
