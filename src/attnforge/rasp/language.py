"""The language of token programs: sequence operations and selectors, each a frozen value that means one thing.

    s-ops        Tokens, Indices, Constant(value), Map(function, operands), Aggregate(selector, values, default),
                 SelectorWidth(selector)
    selectors    Select(keys, queries, predicate), And(a, b), Or(a, b), Not(a)

What a program means is stated here, once, in plain Python without tensors: `program(["a", "b"])` runs it. For a
sequence of n tokens an s-op is n values (see `values`) and a selector is n rows, one a query, of n truth values, one a
key.

- `indices` counts from 0. A map is applied position by position; its functions must be pure.
- A predicate is asked `predicate(key, query)`; what it returns must be True or False (or 1 or 0).
- An aggregate gives the default where nothing is selected, the value where all selected values are equal, the exact
  mean where they are numbers, and a `DomainError` otherwise.
- A selector width is the number of selected keys.

Two programs are equal when they are built alike: names do not count, marks (`numerical`, `categorical`) do. Operators
of the language and tables compare by what they are, other Python functions by identity. So `==` between s-ops is a
question about programs, which hashing needs; the elementwise comparison is `a.equals(b)` (`a.differs(b)`), while `<`,
`<=`, `>`, `>=` and arithmetic are elementwise.
"""

from __future__ import annotations

import itertools
import keyword
import operator
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..arguments import shortened
from ..errors import ArgumentError, AttnforgeError, DomainError, UnsupportedOperation
from .values import LARGEST, Value, canonical, is_numeric, mean, shown

#: How tightly the text of an expression binds, as in Python.
_COMPARISON, _OR, _AND, _SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(8)
ROWS = 64  # of a table that stands in the one line of an op; a longer one is written as the number of its rows
BRIEF = 2000  # letters of a function there: a table of so many rows has a few hundred
NESTED = 12  # levels of an expression that are written into one line of text before a name is given to a part


@dataclass(frozen=True)
class Operator:
    """A function that the language knows by name; equal to another when the names are."""

    name: str
    arity: int
    function: Callable[..., object] = field(repr=False, compare=False)
    symbol: str = field(default="", repr=False, compare=False)
    binds: int = field(default=_ATOM, repr=False, compare=False)

    def __call__(self, *values: Value) -> object:
        return self.function(*values)

    def __reduce__(self) -> tuple[object, ...]:
        return _operator, (self.name,)


@dataclass(frozen=True, init=False)
class Table:
    """A function given by its values: rows of arguments and result, the order of which does not count.

    >>> Table({"a": 1, "b": 2})("b")
    2
    """

    rows: frozenset[tuple[tuple[Value, ...], Value]]

    def __init__(self, rows: Mapping[Any, object], arity: int = 1):
        given = {canonical(key if arity > 1 else (key,)): canonical(value) for key, value in rows.items()}
        wrong = next((key for key in given if not isinstance(key, tuple) or len(key) != arity), ())
        if not given or wrong:
            raise ArgumentError(f"a table needs rows of {arity} argument(s), got {shown(wrong or rows)}")
        object.__setattr__(self, "rows", frozenset(given.items()))
        self.__dict__["_found"] = given  # an index beside the field: neither compared nor printed

    @property
    def arity(self) -> int:
        """How many arguments a row has."""
        return len(next(iter(self.rows))[0])

    def __call__(self, *values: Value) -> Value:
        if values not in self.__dict__["_found"]:
            raise KeyError(f"the table has no row for {', '.join(map(shown, values))}")
        found: Value = self.__dict__["_found"][values]
        return found


def _both_numbers(a: Value, b: Value) -> None:
    if not (is_numeric(a) and is_numeric(b)):
        raise TypeError("both must be numbers")


def _product(a: Any, b: Any) -> object:
    _both_numbers(a, b)
    return a * b


def _quotient(a: Any, b: Any) -> object:
    _both_numbers(a, b)
    return Fraction(a) / b


def _remainder(a: Any, b: Any) -> object:
    _both_numbers(a, b)
    return a % b


def _power(a: Any, b: Any) -> object:
    _both_numbers(a, b)
    if abs(b) * max(Fraction(a).numerator.bit_length(), Fraction(a).denominator.bit_length()) > LARGEST:
        raise OverflowError(f"the power has more than {LARGEST} bits")
    return Fraction(a) ** b


_TABLE: tuple[Operator, ...] = (
    Operator("eq", 2, operator.eq, "==", _COMPARISON),
    Operator("ne", 2, operator.ne, "!=", _COMPARISON),
    Operator("lt", 2, operator.lt, "<", _COMPARISON),
    Operator("leq", 2, operator.le, "<=", _COMPARISON),
    Operator("gt", 2, operator.gt, ">", _COMPARISON),
    Operator("geq", 2, operator.ge, ">=", _COMPARISON),
    Operator("true", 2, lambda key, query: True),
    Operator("false", 2, lambda key, query: False),
    Operator("add", 2, operator.add, "+", _SUM),
    Operator("sub", 2, operator.sub, "-", _SUM),
    Operator("mul", 2, _product, "*", _PRODUCT),
    Operator("div", 2, _quotient, "/", _PRODUCT),
    Operator("floordiv", 2, operator.floordiv, "//", _PRODUCT),
    Operator("mod", 2, _remainder, "%", _PRODUCT),
    Operator("pow", 2, _power, "**", _POWER),
    Operator("logical_and", 2, lambda a, b: bool(a) and bool(b), "&", _AND),
    Operator("logical_or", 2, lambda a, b: bool(a) or bool(b), "|", _OR),
    Operator("logical_not", 1, operator.not_, "~", _SIGN),
    Operator("neg", 1, operator.neg, "-", _SIGN),
    Operator("abs", 1, abs),
    Operator("min", 2, min),
    Operator("max", 2, max),
    Operator("where", 3, lambda condition, yes, no: yes if condition else no),
)
#: Every operator of the language by its name.
OPERATORS: dict[str, Operator] = {op.name: op for op in _TABLE}


def _operator(name: str) -> Operator:
    return OPERATORS[name]


#: The predicates that have names.
eq, ne, lt, leq, gt, geq, true, false = _TABLE[:8]
#: Python's own functions for the same things, and how comparisons are written.
_SPELLINGS: dict[object, Operator] = {
    **{getattr(operator, op.name): op for op in _TABLE if hasattr(operator, op.name) and op.name != "truth"},
    operator.le: leq, operator.ge: geq, operator.not_: OPERATORS["logical_not"], operator.truediv: OPERATORS["div"],
    abs: OPERATORS["abs"], min: OPERATORS["min"], max: OPERATORS["max"],
    **{op.symbol: op for op in _TABLE if op.binds == _COMPARISON},
}  # fmt: skip

NodeT = TypeVar("NodeT", bound="Node")


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """What s-ops and selectors share: a name for messages and traces, structural equality, a text."""

    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or len(self.name) > 100 or not (self.name.isprintable()):
            raise ArgumentError(f"a name is a line of at most 100 characters, got {shown(self.name)}")
        object.__setattr__(self, "_hash", hash((type(self).__name__, *self.parts, *self.children)))

    @property
    def children(self) -> tuple[Node, ...]:
        """The ops that this one reads."""
        return ()

    @property
    def parts(self) -> tuple[object, ...]:
        """Everything but the children that makes two ops different."""
        return ()

    def named(self: NodeT, name: str) -> NodeT:
        """The same op under a name, which messages and traces use.

        >>> (tokens.equals("a")).named("is_a").name
        'is_a'
        """
        return replace(self, name=name)

    @property
    def label(self) -> str:
        """How messages call the op: by its name, or by its text."""
        return f"'{self.name}'" if self.name else f"'{_line(self, 3)[0]}'"

    def to_text(self) -> str:
        """The program as text, one assignment a line, which `attnforge.rasp.parse` reads again."""
        return to_text(self)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        pairs, seen = [(self, other)], set()
        while pairs:  # not recursive, and each pair once: programs share parts and may be deep
            a, b = pairs.pop()
            if a is b or (id(a), id(b)) in seen:
                continue
            if type(a) is not type(b) or hash(a) != hash(b) or a.parts != b.parts or len(a.children) != len(b.children):
                return False
            seen.add((id(a), id(b)))
            pairs += zip(a.children, b.children, strict=True)
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Node.__post_init__(self)  # hashes of strings differ between processes

    def __repr__(self) -> str:
        return _line(self, 5)[0]

    def __bool__(self) -> NoReturn:
        raise ArgumentError(
            f"the op {self.label} has a value at every position and no truth value of its own: write & for and, | for "
            "or, ~ for not, rasp.where(condition, a, b) for a choice, and no chained comparison"
        )

    def fail(self, problem: str) -> DomainError:
        """An error that names the op."""
        return DomainError(f"the op {self.label} {problem}")


def _op(place: str, given: object) -> SOp:
    if isinstance(given, SOp):
        return given
    if isinstance(given, Selector):
        raise ArgumentError(
            f"{place} must be a sequence op, got the selector {given.label}; aggregate it or take its selector_width"
        )
    if callable(given) and not isinstance(given, type):
        raise ArgumentError(f"{place} must be a sequence op, got a function; write rasp.apply(function, op)")
    try:
        return Constant(given)  # type: ignore[arg-type]
    except ArgumentError as error:
        raise ArgumentError(f"{place} must be a sequence op or a constant: {error}") from error


def _selector(place: str, given: object) -> Selector:
    if not isinstance(given, Selector):
        what = f"the sequence op {given.label}" if isinstance(given, SOp) else shown(given)
        raise ArgumentError(f"{place} must be a selector, made by rasp.select(keys, queries, predicate), got {what}")
    return given


def _function(place: str, given: object, arity: int) -> Callable[..., object]:
    try:
        found = _SPELLINGS.get(given, given)
    except TypeError:
        found = Table(given, arity) if isinstance(given, Mapping) else given
    if not callable(found) or isinstance(found, Node):
        raise ArgumentError(f"{place} must be a function of values, got {shown(given)}")
    known = getattr(found, "arity", arity)
    if known != arity:
        raise ArgumentError(f"{place} takes {known} value(s), and {arity} come")
    try:
        hash(found)
    except TypeError as error:
        raise ArgumentError(f"{place} must be hashable, since programs are compared: {error}") from error
    return found


def _called(op: Node, function: Callable[..., object], values: tuple[Value, ...]) -> object:
    """What a function of the program gives; what it raises is told with the op and the values."""
    try:
        return function(*values)
    except Exception as error:
        given = ", ".join(map(shown, values))
        reason = str(error) if isinstance(error, AttnforgeError) else f"{type(error).__name__}: {error}"
        raise op.fail(f"cannot be computed: {_brief(function)} of {given} raises {reason}") from error


def _dunder(name: str, turned: bool = False) -> Callable[[SOp, object], Map]:
    """The method of Python's operator: the same operator, position by position."""
    return lambda op, other: _elementwise(name, *((other, op) if turned else (op, other)))


@dataclass(frozen=True, eq=False, repr=False)
class SOp(Node):
    """A sequence operation: one value at every position."""

    #: "numerical" or "categorical" where the program asks for one of them; "" leaves the choice to the compiler.
    mark: str = field(default="", kw_only=True)

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.mark,)

    def __call__(self, sequence: Iterable[object]) -> list[Value]:
        """Run the program in plain Python: the meaning that a network must equal.

        >>> (tokens + "!")(["a", "b"])
        ['a!', 'b!']
        """
        return list(evaluate(self, sequence)[self])  # type: ignore[arg-type]

    def equals(self, other: object) -> Map:
        """1 where the values are equal, 0 elsewhere (`==` compares programs).

        >>> tokens.equals("a")(["a", "b"])
        [1, 0]
        """
        return _elementwise("eq", self, other)

    def differs(self, other: object) -> Map:
        """1 where the values differ, 0 elsewhere."""
        return _elementwise("ne", self, other)

    __lt__, __le__, __gt__, __ge__ = _dunder("lt"), _dunder("leq"), _dunder("gt"), _dunder("geq")
    __add__, __radd__ = _dunder("add"), _dunder("add", turned=True)
    __sub__, __rsub__ = _dunder("sub"), _dunder("sub", turned=True)
    __mul__, __rmul__ = _dunder("mul"), _dunder("mul", turned=True)
    __truediv__, __rtruediv__ = _dunder("div"), _dunder("div", turned=True)
    __floordiv__, __rfloordiv__ = _dunder("floordiv"), _dunder("floordiv", turned=True)
    __mod__, __rmod__ = _dunder("mod"), _dunder("mod", turned=True)
    __pow__, __rpow__ = _dunder("pow"), _dunder("pow", turned=True)
    __and__, __rand__ = _dunder("logical_and"), _dunder("logical_and", turned=True)
    __or__, __ror__ = _dunder("logical_or"), _dunder("logical_or", turned=True)

    def __invert__(self) -> Map:
        return _elementwise("logical_not", self)

    def __neg__(self) -> Map:
        return _elementwise("neg", self)

    def __abs__(self) -> Map:
        return _elementwise("abs", self)

    __array_ufunc__ = None  # numpy's numbers leave operators to this class

    def __iter__(self) -> NoReturn:
        raise ArgumentError(f"the op {self.label} is not a list; call it with a sequence to see its values")

    def __getitem__(self, _: object) -> NoReturn:
        raise ArgumentError(
            f"the op {self.label} is not a list: aggregate(select(indices, 3), op) gives its value at position 3, and "
            "op(sequence)[3] that on one sequence"
        )

    __len__ = __iter__

    def values(self, sequence: tuple[Value, ...], operands: list[Any]) -> tuple[Value, ...]:
        """The op's value at every position, given the meanings of its children on the sequence."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Tokens(SOp):
    """The tokens of the sequence."""

    def values(self, sequence: tuple[Value, ...], operands: list[Any]) -> tuple[Value, ...]:
        return sequence


@dataclass(frozen=True, eq=False, repr=False)
class Indices(SOp):
    """The positions 0, 1, ..., n - 1."""

    def values(self, sequence: tuple[Value, ...], operands: list[Any]) -> tuple[Value, ...]:
        return tuple(range(len(sequence)))


@dataclass(frozen=True, eq=False, repr=False)
class Constant(SOp):
    """One value at every position."""

    value: Value

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", canonical(self.value))
        super().__post_init__()

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.value, self.mark)

    def values(self, sequence: tuple[Value, ...], operands: list[Any]) -> tuple[Value, ...]:
        return (self.value,) * len(sequence)


@dataclass(frozen=True, eq=False, repr=False)
class Map(SOp):
    """A function of the values of one or more s-ops, position by position."""

    function: Callable[..., object]
    operands: tuple[SOp, ...]

    def __post_init__(self) -> None:
        if isinstance(self.operands, Node) or not tuple(self.operands):
            raise ArgumentError("a map needs a tuple of one or more sequence ops; rasp.apply(function, a, b) makes one")
        operands = tuple(_op(f"operand {i} of the map", given) for i, given in enumerate(self.operands))
        object.__setattr__(self, "operands", operands)
        object.__setattr__(self, "function", _function("the function of the map", self.function, len(operands)))
        super().__post_init__()

    @property
    def children(self) -> tuple[SOp, ...]:
        return self.operands

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.function, self.mark)

    def at(self, *values: Value) -> Value:
        """The map's value for values of its operands; errors name the op and the values."""
        found = _called(self, self.function, values)
        try:
            return canonical(found)
        except ArgumentError as error:
            given = ", ".join(map(shown, values))
            raise self.fail(f"has no value for {given}: {error}") from error

    def values(self, sequence: tuple[Value, ...], operands: list[Any]) -> tuple[Value, ...]:
        known: dict[tuple[Value, ...], Value] = {}
        rows = list(zip(*operands, strict=True))
        for row in rows:
            if row not in known:
                known[row] = self.at(*row)
        return tuple(known[row] for row in rows)


@dataclass(frozen=True, eq=False, repr=False)
class Aggregate(SOp):
    """What a selector selects: the default for nothing, the common value, or the exact mean of numbers."""

    selector: Selector
    operand: SOp
    default: Value = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", _selector("the selector of an aggregate", self.selector))
        object.__setattr__(self, "operand", _op("what an aggregate averages", self.operand))
        try:
            object.__setattr__(self, "default", canonical(self.default))
        except ArgumentError as error:
            raise ArgumentError(f"the default of an aggregate must be a constant: {error}") from error
        super().__post_init__()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.selector, self.operand)

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.default, self.mark)

    def of(self, selected: list[Value]) -> Value:
        """The value for a list of selected values; several that differ must be numbers."""
        if not selected:
            return self.default
        if all(value == selected[0] for value in selected):
            return selected[0]
        if not all(map(is_numeric, selected)):
            several = ", ".join(map(shown, list(dict.fromkeys(selected))[:4]))
            raise self.fail(
                f"selects {len(selected)} values that differ and are not all numbers ({several}), which have no mean: "
                "select one of them, or aggregate a number"
            )
        return mean(selected)

    def values(self, sequence: tuple[Value, ...], operands: list[Any]) -> tuple[Value, ...]:
        rows, values = operands
        return tuple(self.of([value for value, hit in zip(values, row, strict=True) if hit]) for row in rows)


@dataclass(frozen=True, eq=False, repr=False)
class SelectorWidth(SOp):
    """How many keys a selector selects."""

    selector: Selector

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", _selector("what a selector_width counts", self.selector))
        super().__post_init__()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.selector,)

    def values(self, sequence: tuple[Value, ...], operands: list[Any]) -> tuple[Value, ...]:
        return tuple(sum(row) for row in operands[0])


Rows = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True, eq=False, repr=False)
class Selector(Node):
    """Which keys each query selects."""

    def __call__(self, sequence: Iterable[object]) -> list[list[bool]]:
        """The rows of the selector, one a query."""
        return [list(row) for row in evaluate(self, sequence)[self]]  # type: ignore[arg-type]

    def __and__(self, other: object) -> And:
        return And(self, other)  # type: ignore[arg-type]

    def __or__(self, other: object) -> Or:
        return Or(self, other)  # type: ignore[arg-type]

    def __rand__(self, other: object) -> And:
        return And(other, self)  # type: ignore[arg-type]

    def __ror__(self, other: object) -> Or:
        return Or(other, self)  # type: ignore[arg-type]

    def __invert__(self) -> Not:
        return Not(self)

    def _no_number(self, *_: object) -> NoReturn:
        raise ArgumentError(
            f"the selector {self.label} is no sequence of values: &, | and ~ combine selectors; aggregate it, or take "
            "its selector_width, to go on with values"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _no_number
    __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __getitem__ = _no_number

    def rows(self, operands: list[Any]) -> Rows:
        """The rows of the selector, given the meanings of its children on a sequence."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Select(Selector):
    """The keys for which `predicate(key, query)` holds."""

    keys: SOp
    queries: SOp
    predicate: Callable[..., object]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _op("the keys of a select", self.keys))
        object.__setattr__(self, "queries", _op("the queries of a select", self.queries))
        object.__setattr__(self, "predicate", _function("the predicate of a select", self.predicate, 2))
        super().__post_init__()

    @property
    def children(self) -> tuple[SOp, ...]:
        return (self.keys, self.queries)

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.predicate,)

    def at(self, key: Value, query: Value) -> bool:
        """Whether the query selects the key; errors name the op and the values."""
        found = _called(self, self.predicate, (key, query))
        if isinstance(found, (int, np.bool_)) and found in (0, 1):
            return bool(found)
        raise self.fail(
            f"needs True or False from its predicate, which gave {shown(found)} for the key {shown(key)} and the "
            f"query {shown(query)}"
        )

    def rows(self, operands: list[Any]) -> Rows:
        keys, queries = operands
        row = {query: {key: self.at(key, query) for key in dict.fromkeys(keys)} for query in dict.fromkeys(queries)}
        return tuple(tuple(row[query][key] for key in keys) for query in queries)


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Selector):
    a: Selector
    b: Selector

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            object.__setattr__(self, name, _selector(f"either side of {type(self).__name__}", getattr(self, name)))
        super().__post_init__()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.a, self.b)


@dataclass(frozen=True, eq=False, repr=False)
class And(_Pair):
    """What both selectors select."""

    def rows(self, operands: list[Any]) -> Rows:
        return tuple(tuple(x and y for x, y in zip(*pair, strict=True)) for pair in zip(*operands, strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class Or(_Pair):
    """What either selector selects."""

    def rows(self, operands: list[Any]) -> Rows:
        return tuple(tuple(x or y for x, y in zip(*pair, strict=True)) for pair in zip(*operands, strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class Not(Selector):
    """What a selector does not select."""

    a: Selector

    def __post_init__(self) -> None:
        object.__setattr__(self, "a", _selector("what ~ turns round", self.a))
        super().__post_init__()

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.a,)

    def rows(self, operands: list[Any]) -> Rows:
        return tuple(tuple(not x for x in row) for row in operands[0])


def _elementwise(name: str, *operands: object) -> Map:
    return Map(OPERATORS[name], operands)  # type: ignore[arg-type]


tokens = Tokens(name="tokens")
indices = Indices(name="indices")


def select(keys: object, queries: object, predicate: object = eq) -> Select:
    """The selector of the keys for which `predicate(key, query)` holds.

    A predicate is one of `eq, ne, lt, leq, gt, geq, true`, a comparison as text ("<"), or any pure function of two
    values.

    >>> select(indices, indices, lt)(["a", "b", "c"])[2]
    [True, True, False]
    """
    return Select(keys, queries, predicate)  # type: ignore[arg-type]


def aggregate(selector: object, values: object, default: object = None) -> Aggregate:
    """What the selector selects of the values; the default where it selects nothing.

    >>> aggregate(select(indices, indices - 1, eq), tokens, default="-")(["a", "b", "c"])
    ['-', 'a', 'b']
    """
    return Aggregate(selector, values, default)  # type: ignore[arg-type]


def selector_width(selector: object) -> SelectorWidth:
    """How many keys the selector selects at each position.

    >>> selector_width(select(tokens, tokens, eq))("abac")
    [2, 1, 2, 1]
    """
    return SelectorWidth(selector)  # type: ignore[arg-type]


def apply(function: object, *operands: object) -> Map:
    """A function (or a dictionary of its values) applied at every position.

    >>> apply(lambda a, i: a * i, tokens, indices)("abc")
    ['', 'b', 'cc']
    """
    return Map(function, operands)  # type: ignore[arg-type]


def where(condition: object, yes: object, no: object) -> Map:
    """`yes` where the condition holds, `no` elsewhere; both are computed everywhere.

    >>> where(tokens < "c", tokens, "-")("abcd")
    ['a', 'b', '-', '-']
    """
    return _elementwise("where", condition, yes, no)


def numerical(op: SOp) -> SOp:
    """The same op, to be carried as a number."""
    return replace(_op("what is marked", op), mark="numerical")


def categorical(op: SOp) -> SOp:
    """The same op, to be carried as one of finitely many values."""
    return replace(_op("what is marked", op), mark="categorical")


length = selector_width(select(tokens, tokens, true)).named("length")


def walk(program: Node) -> list[Node]:
    """Every op of a program once (equal ones count as one), what an op reads before the op itself."""
    order: dict[Node, None] = {}
    stack: list[tuple[Node, Iterator[Node]]] = [(program, iter(program.children))]
    while stack:
        node, children = stack[-1]
        child = next((c for c in children if c not in order), None)
        if child is not None:
            stack.append((child, iter(child.children)))
        else:
            order.setdefault(node)
            stack.pop()
    return list(order)


def evaluate(
    program: Node, sequence: Iterable[object], fixed: Mapping[Node, tuple[Value, ...]] | None = None
) -> dict[Node, tuple[Value, ...] | Rows]:
    """What every op of a program means on a sequence: values for s-ops, rows for selectors.

    Ops that are `fixed` have those values, whatever they would be computed from.
    """
    if not isinstance(sequence, Iterable):
        raise ArgumentError(f"a program runs on a sequence of tokens, got {type(sequence).__name__}")
    given = tuple(canonical(token) for token in sequence)
    if not given:
        raise DomainError("the sequence is empty; a program runs on one token or more")
    found: dict[Node, tuple[Value, ...] | Rows] = dict(fixed or {})
    for node in walk(program):
        if node in found:
            continue
        operands = [found[child] for child in node.children]
        found[node] = node.values(given, operands) if isinstance(node, SOp) else node.rows(operands)  # type: ignore[attr-defined]
    return found


#: What a function in a text may call (see `text`).
CALLED = ("abs", "chr", "int", "len", "max", "min", "ord", "sorted", "str", "sum", "tuple")
#: Words that no line of a text may take for a name.
RESERVED = {*OPERATORS, "tokens", "indices", "length", "select", "aggregate", "selector_width", "apply", "numerical",
             "categorical", *CALLED, *keyword.kwlist, *keyword.softkwlist}  # fmt: skip


def _function_text(function: object) -> str:
    if isinstance(function, Operator):
        return function.name
    if isinstance(function, Table):
        rows = sorted(function.rows, key=repr)
        shown_rows = (f"{value_text(key[0] if len(key) == 1 else key)}: {value_text(value)}" for key, value in rows)
        return f"{{{', '.join(shown_rows)}}}"
    text = getattr(function, "text", None)
    return text if isinstance(text, str) else getattr(function, "__name__", type(function).__name__)


def _brief(function: object) -> str:
    """A function as a line says it: a large table by its number of rows, a long text by its beginning."""
    if isinstance(function, Table) and len(function.rows) > ROWS:
        return f"{{{len(function.rows)} rows}}"
    return shortened(_function_text(function), BRIEF)


def value_text(value: Value) -> str:
    """A value as program text; fractions are written as quotients.

    >>> value_text((Fraction(1, 3), "a", None))
    "(1/3, 'a', None)"
    """
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, tuple):
        return f"({', '.join(map(value_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _spell(node: Node, parts: list[tuple[str, int]], functions: Mapping[object, str] | None = None) -> tuple[str, int]:
    """The text of an op over the texts of its children, and how tightly it binds; some functions go by names."""
    written = functions or {}

    def at(i: int, level: int) -> str:
        text, binds = parts[i]
        return text if binds >= level else f"({text})"

    texts = [text for text, _ in parts]
    if isinstance(node, (Tokens, Indices)):
        found = type(node).__name__.lower(), _ATOM
    elif isinstance(node, Constant):
        text = value_text(node.value)
        fraction = isinstance(node.value, Fraction)
        found = text, _PRODUCT if fraction else _SIGN if text[0] == "-" else _ATOM
    elif isinstance(node, Map):
        op = node.function
        if isinstance(op, Operator) and all(isinstance(operand, Constant) for operand in node.operands):
            found = f"apply({', '.join([op.name, *texts])})", _ATOM  # a reader would compute 1 + 2 at once
        elif isinstance(op, Operator) and op.binds < _ATOM:
            level = op.binds
            if op.arity == 1:
                found = f"{op.symbol}{at(0, level)}", level
            else:
                right = level + (op.name != "pow")
                found = f"{at(0, level + (level in (_COMPARISON, _POWER)))} {op.symbol} {at(1, right)}", level
        elif isinstance(op, Operator):
            found = f"{op.name}({', '.join(texts)})", _ATOM
        else:
            found = f"apply({', '.join([written.get(op) or _function_text(op), *texts])})", _ATOM
    elif isinstance(node, Aggregate):
        default = [] if node.default is None else [f"default={value_text(node.default)}"]
        found = f"aggregate({', '.join([*texts, *default])})", _ATOM
    elif isinstance(node, SelectorWidth):
        found = f"selector_width({texts[0]})", _ATOM
    elif isinstance(node, Select):
        predicate = written.get(node.predicate) or _function_text(node.predicate)
        found = f"select({texts[0]}, {texts[1]}, {predicate})", _ATOM
    elif isinstance(node, (And, Or)):
        symbol, level = ("&", _AND) if isinstance(node, And) else ("|", _OR)
        found = f"{at(0, level)} {symbol} {at(1, level + 1)}", level
    else:
        found = f"~{at(0, _SIGN)}", _SIGN
    mark = getattr(node, "mark", "")
    return (f"{mark}({found[0]})", _ATOM) if mark else found


def _line(node: Node, depth: int) -> tuple[str, int]:
    """The op in one line: named parts by their names, what is deep left out."""
    parts = [
        (child.name, _ATOM) if child.name else _line(child, depth - 1) if depth else ("...", _ATOM)
        for child in node.children
    ]
    function = getattr(node, "function", getattr(node, "predicate", None))
    short = {} if function is None or isinstance(function, Operator) else {function: _brief(function)}
    return ("length", _ATOM) if node == length else _spell(node, parts, short)


def to_text(program: Node) -> str:
    """The program as text, one assignment a line; the last line is the program.

    Named ops and ops that are used more than once get a line. Python functions have no text: give a dictionary of
    values instead, or write the program as text in the first place.

    >>> same = select(tokens, tokens, eq).named("same")
    >>> print(selector_width(same).to_text())
    same = select(tokens, tokens, eq)
    selector_width(same)
    """
    order = walk(program)
    used = [
        node.function if isinstance(node, Map) else node.predicate for node in order if isinstance(node, (Map, Select))
    ]
    uses: dict[object, int] = {}
    for part in itertools.chain(used, *(node.children for node in order)):
        uses[part] = uses.get(part, 0) + 1
    lines, taken = [], set(RESERVED)
    written: dict[object, str] = {}
    for node in order:
        function = node.function if isinstance(node, Map) else node.predicate if isinstance(node, Select) else eq
        if not isinstance(function, (Operator, Table)) and not isinstance(getattr(function, "text", None), str):
            raise UnsupportedOperation(
                f"the op {node.label} uses the Python function {_function_text(function)}, which has no text; give a "
                "dictionary of its values to rasp.apply, or write the function in the text of a program"
            )
        if not isinstance(function, Operator) and uses[function] > 1 and function not in written:
            written[function] = _fresh("function", taken)
            lines.append(f"{written[function]} = {_function_text(function)}")
    spelled: dict[Node, tuple[str, int, int]] = {}  # the text, how tightly it binds, how many levels it has
    for node in order:
        if node == length:
            spelled[node] = ("length", _ATOM, 0)
            continue
        text, binds = _spell(node, [spelled[child][:2] for child in node.children], written)
        level = 1 + max((spelled[child][2] for child in node.children), default=-1)
        leaf = isinstance(node, (Tokens, Indices, Constant)) and not node.mark
        if node is not program and not leaf and (node.name or uses[node] > 1 or level >= NESTED):
            name = _fresh(node.name, taken)
            lines.append(f"{name} = {text}")
            text, binds, level = name, _ATOM, 0
        spelled[node] = (text, binds, level)
    last = spelled[program][0]
    lines.append(last if program.name in ("", last) else f"{_fresh(program.name, taken)} = {last}")
    return "\n".join(lines)


def _fresh(name: str, taken: set[str]) -> str:
    """A name for a line of text that is not taken yet."""
    plain = unicodedata.normalize("NFKC", name)  # as Python's parser reads names: two that look alike may be one
    base = "".join(c if c.isidentifier() or c.isdigit() else "_" for c in plain) or "part"
    base = base if base.isidentifier() else f"_{base}"
    found = next(new for new in (base, *(f"{base}_{n}" for n in range(2, len(taken) + 3))) if new not in taken)
    taken.add(found)
    return found
