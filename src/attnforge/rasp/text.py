"""Programs as text: assignments and expressions in the syntax of Python, read and never executed.

    # the tokens by how often they occur
    hist  = selector_width(select(tokens, tokens, eq))
    place = selector_width(select(hist, hist, gt) | select(hist, hist, eq) & select(indices, indices, lt))
    aggregate(select(place, indices, eq), tokens)

The last line is the program. A line may name a sequence op, a selector, a constant or a function. Operators on ops work
position by position, also `==` and `!=`. Functions are `lambda`s over their arguments, made of literals, arithmetic,
comparisons, `and`, `or`, `not`, `x if c else y`, tuples, indexing, and a few names; or dictionaries of their values.

Nothing is evaluated as code. Python's own parser makes the tree, and this module walks it: names are looked up in fixed
tables, the length and depth of a text are limited, and every value in between is bounded as in `values`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

from ..errors import ArgumentError, FormulaError, closest
from ..expressions.grammar import DEEPEST
from . import language
from .language import OPERATORS, Node, Operator, Selector, SOp, Table, value_text
from .tracr import from_tracr, is_tracr
from .values import Value, canonical, is_numeric

LONGEST = 200_000  # characters of a program: tables of values are data, and Python's parser reads this in a second
_LINE = re.compile(r"\r\n|\r|\n")  # where Python's parser begins a line
_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.BitAnd: "logical_and", ast.BitOr: "logical_or", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt",
    ast.LtE: "leq", ast.Gt: "gt", ast.GtE: "geq", ast.USub: "neg", ast.Invert: "logical_not", ast.Not: "logical_not",
}  # fmt: skip
#: What a text may call to make ops, and what these calls take.
_CALLS: dict[str, Callable[..., Node]] = {
    name: getattr(language, name)
    for name in ("select", "aggregate", "selector_width", "apply", "where", "numerical", "categorical")
} | {name: lambda *given, op=OPERATORS[name]: language.apply(op, *given) for name in ("abs", "min", "max")}
_OPS: dict[str, Node] = {"tokens": language.tokens, "indices": language.indices, "length": language.length}
#: What a lambda may call: the names of `CALLED`.
_PURE: dict[str, Callable[..., object]] = {
    "abs": abs, "chr": chr, "int": int, "len": len, "max": max, "min": min, "ord": ord,
    "sorted": lambda x: tuple(sorted(x)),
    "str": lambda x: value_text(x) if is_numeric(x) else str(x), "sum": lambda x: sum(x, 0), "tuple": tuple,
}  # fmt: skip
Thing: TypeAlias = "Node | Operator | Table | Lambda | dict[Any, Any] | Value"


@dataclass(frozen=True)
class Lambda:
    """A function that was written as text; equal to another when the texts are.

    >>> Lambda.read("lambda x, y: x + y if x < 3 else (y, 'many')")(1, 2)
    3
    """

    text: str
    names: tuple[str, ...] = field(repr=False, compare=False)
    body: ast.expr = field(repr=False, compare=False)

    @classmethod
    def read(cls, text: str) -> Lambda:
        """The function of one lambda expression."""
        found = _Reader(text).expression(_tree(text, "eval").body)  # type: ignore[attr-defined]
        if not isinstance(found, Lambda):
            raise FormulaError("a function is expected: lambda x: ...", text, 0)
        return found

    @property
    def arity(self) -> int:
        """How many arguments the function takes."""
        return len(self.names)

    @cached_property
    def cost(self) -> int:
        """How many parts one call looks at, at most."""
        return sum(1 for _ in ast.walk(self.body))

    def __call__(self, *values: Value) -> Value:
        if len(values) != self.arity:
            raise TypeError(f"it takes {self.arity} value(s), and {len(values)} came")
        return _value(self.body, dict(zip(self.names, values, strict=True)))

    def __getstate__(self) -> str:
        return self.text

    def __setstate__(self, text: str) -> None:
        self.__dict__.update(Lambda.read(text).__dict__)


def parse(text: str) -> SOp:
    """The program that a text spells.

    >>> program = parse("last = select(indices, length - 1, eq)\\naggregate(last, tokens)")
    >>> program("abc")
    ['c', 'c', 'c']
    >>> parse(program.to_text()) == program
    True
    >>> parse("aggregate(tokens, tokens)")
    Traceback (most recent call last):
    attnforge.errors.FormulaError: line 1: the selector of an aggregate must be a selector, made by rasp.select(keys, \
queries, predicate), got the sequence op 'tokens'
      aggregate(tokens, tokens)
      ^
    """
    tree = _tree(text, "exec")
    return _Reader(text).program(tree.body)  # type: ignore[attr-defined]


def as_program(given: object) -> SOp:
    """A program from an s-op, from text, or from an object of Tracr's.

    >>> as_program("length - indices")("abc")
    [3, 2, 1]
    """
    if isinstance(given, SOp):
        return given
    if isinstance(given, str):
        return parse(given)
    if is_tracr(given):
        return from_tracr(given)
    kind = "a selector; aggregate it or count it" if isinstance(given, Selector) else type(given).__name__
    raise ArgumentError(f"a program is a sequence op, a text, or one of Tracr's objects, got {kind}")


def _tree(text: str, mode: str) -> ast.AST:
    if not isinstance(text, str):
        raise ArgumentError(f"the text of a program is a string, got {type(text).__name__}")
    if len(text) > LONGEST:
        raise FormulaError(f"the text has {len(text)} characters; at most {LONGEST} are read", text, LONGEST)
    try:
        return ast.parse(text, mode=mode)
    except SyntaxError as error:
        line = (error.lineno or 1) - 1
        raise _at(text, line, (error.offset or 1) - 1, f"this is not an expression of Python: {error.msg}") from error
    except (RecursionError, MemoryError):
        raise FormulaError(f"the text is nested more than {DEEPEST} deep", text, 0) from None
    except ValueError as error:
        raise FormulaError(f"the text cannot be read: {error}", text, 0) from error


def _at(text: str, line: int, column: int, problem: str) -> FormulaError:
    """An error with a caret below its line."""
    lines = _LINE.split(text)
    shown = lines[min(line, len(lines) - 1)]
    return FormulaError(f"line {line + 1}: {problem}", shown, min(max(column, 0), len(shown)))


class _Reader:
    """Walks the tree of a text and makes ops."""

    def __init__(self, text: str):
        self.text = text
        self.names: dict[str, Thing] = {}
        self.depth = self.written = 0

    def fail(self, node: ast.AST, problem: str) -> NoReturn:
        line, column = getattr(node, "lineno", 1) - 1, getattr(node, "col_offset", 0)
        before = _LINE.split(self.text)[line].encode()[:column]
        raise _at(self.text, line, len(before.decode(errors="ignore")), problem)

    def program(self, statements: list[ast.stmt]) -> SOp:
        if not statements:
            raise FormulaError(
                "the text is empty; write a program such as aggregate(select(...), tokens)", self.text, 0
            )
        for statement in statements[:-1]:
            if isinstance(statement, ast.Expr):
                self.fail(statement, "only the last line stands without a name: write name = ... here")
            self.assigned(statement)
        last = statements[-1]
        found = self.expression(last.value) if isinstance(last, ast.Expr) else self.assigned(last)
        if isinstance(found, Selector):
            self.fail(last, "the program ends with a selector; aggregate it or take its selector_width")
        if isinstance(found, (Operator, Table, Lambda, dict)):
            self.fail(last, "the last line must be a sequence op, such as aggregate(select(...), tokens)")
        return found if isinstance(found, SOp) else language.Constant(found)  # type: ignore[arg-type]

    def assigned(self, statement: ast.stmt) -> Thing:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            self.fail(statement, "a program has lines of the form name = expression, and nothing else")
        target = statement.targets[0]
        if not isinstance(target, ast.Name):
            self.fail(target, "a line names one thing: name = expression")
        if target.id in language.RESERVED:
            self.fail(target, f"{target.id} is a word of the language; choose another name")
        if target.id in self.names:
            self.fail(target, f"{target.id} has a meaning already, and names do not change; choose another name")
        value = self.expression(statement.value)
        if isinstance(value, Node) and value not in _OPS.values():
            value = self.guarded(target, value.named, target.id)
        self.names[target.id] = value
        return value

    def guarded(self, node: ast.AST, build: Callable[..., Any], *arguments: object, **named: object) -> Any:
        """Build something; what is wrong is shown at the place of the text."""
        try:
            return build(*arguments, **named)
        except FormulaError:
            raise
        except (ArgumentError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            self.fail(node, str(error) if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}")

    def expression(self, node: ast.expr) -> Thing:
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(node, f"this is nested more than {DEEPEST} deep")
        found = self._expression(node)
        self.depth -= 1
        return found

    def _expression(self, node: ast.expr) -> Thing:
        if isinstance(node, ast.Constant):
            return self.guarded(node, canonical, node.value)
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.Tuple):
            return self.guarded(node, canonical, tuple(self.plain(part) for part in node.elts))
        if isinstance(node, ast.Dict):
            if None in node.keys:
                self.fail(node, "a dictionary here is a list of values: {'a': 1, 'b': 2}")
            keys = [self.plain(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(self.plain, node.values), strict=True))
        if isinstance(node, ast.Lambda):
            return self.function(node)
        if isinstance(node, ast.BinOp):
            return self.operation(node, type(node.op), node.left, node.right)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            return self.operation(node, type(node.op), node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self.operation(node, type(node.ops[0]), node.left, node.comparators[0])
        if isinstance(node, ast.Call):
            return self.call(node)
        self.fail(node, _HINTS.get(type(node), f"{type(node).__name__} is not part of the language"))

    def plain(self, node: ast.expr) -> Value:
        found = self.expression(node)
        if isinstance(found, (Node, Operator, Table, Lambda, dict)):
            self.fail(node, "a constant is expected here")
        return found

    def name(self, node: ast.Name) -> Thing:
        for known in (self.names, _OPS, OPERATORS):
            if node.id in known:
                return known[node.id]  # type: ignore[index]
        if node.id in _CALLS:
            self.fail(node, f"{node.id} is called with arguments: {node.id}(...)")
        self.fail(
            node, f"the name {node.id} means nothing{closest(node.id, [*self.names, *_OPS, *OPERATORS, *_CALLS])}"
        )

    def operation(self, node: ast.expr, kind: type[ast.AST], *operands: ast.expr) -> Thing:
        if kind is ast.UAdd:
            return self.expression(operands[0])
        if kind not in _BINARY:
            self.fail(node, f"the operator {kind.__name__} is not part of the language")
        name, things = _BINARY[kind], [self.expression(operand) for operand in operands]
        for operand, thing in zip(operands, things, strict=True):
            if isinstance(thing, (Operator, Table, Lambda, dict)):
                self.fail(operand, "a function stands where a sequence op or a constant is expected")
        if any(isinstance(thing, Selector) for thing in things):
            combine = {"logical_and": language.And, "logical_or": language.Or, "logical_not": language.Not}
            if name not in combine:
                self.fail(node, "selectors are combined with &, | and ~ only")
            return self.guarded(node, combine[name], *things)
        if any(isinstance(thing, SOp) for thing in things):
            return self.guarded(node, language.apply, OPERATORS[name], *things)
        return self.guarded(node, lambda: canonical(OPERATORS[name](*things)))  # type: ignore[arg-type]

    def call(self, node: ast.Call) -> Thing:
        if not isinstance(node.func, ast.Name) or node.func.id not in _CALLS:
            known = [*_CALLS, *self.names]
            hint = closest(node.func.id, known) if isinstance(node.func, ast.Name) else ""
            self.fail(node, f"only {', '.join(_CALLS)} are called here{hint}; a function is given to apply(f, op)")
        if any(isinstance(part, ast.Starred) for part in node.args) or None in [word.arg for word in node.keywords]:
            self.fail(node, "arguments are written one by one")
        given = [self.expression(part) for part in node.args]
        named = {str(word.arg): self.expression(word.value) for word in node.keywords}
        return self.guarded(node, _CALLS[node.func.id], *given, **named)

    def function(self, node: ast.Lambda) -> Lambda:
        given = node.args
        if given.vararg or given.kwarg or given.kwonlyargs or given.defaults or not given.args + given.posonlyargs:
            self.fail(node, "a function has one or more plain arguments: lambda x, y: ...")
        names = tuple(part.arg for part in given.posonlyargs + given.args)
        if len(set(names)) < len(names):
            self.fail(node, "an argument of the function stands in it twice")
        body = _Closed(self, names).visit(node.body)
        self.allowed(body, names, 0)
        text = f"lambda {', '.join(names)}: {ast.unparse(body)}"
        return Lambda(text, names, body)

    def allowed(self, node: ast.AST, names: tuple[str, ...], depth: int) -> None:
        """Refuse what a function may not hold, before it is ever called."""
        if depth > DEEPEST:
            self.fail(node, f"this is nested more than {DEEPEST} deep")
        if isinstance(node, ast.Name) and node.id not in names:
            self.fail(node, f"{node.id} is neither an argument nor a constant{closest(node.id, [*names, *self.names])}")
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _PURE or node.keywords:
                self.fail(node, f"a function may call {', '.join(_PURE)} and nothing else")
        elif isinstance(node, ast.Dict) and None in node.keys:
            self.fail(node, "a dictionary here is a list of values: {'a': 1, 'b': 2}")
        elif not isinstance(node, _PARTS):
            self.fail(node, f"{type(node).__name__} is not part of a function here")
        elif isinstance(node, ast.Constant):
            self.guarded(node, canonical, node.value)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.Call) and child is node.func):
                self.allowed(child, names, depth + 1)


class _Closed(ast.NodeTransformer):
    """Writes constants of the text into a function, so that it stands for itself."""

    def __init__(self, reader: _Reader, names: tuple[str, ...]):
        self.reader, self.names, self.depth = reader, names, 0

    def visit(self, node: ast.AST) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            self.reader.fail(node, f"this is nested more than {DEEPEST} deep")
        found = super().visit(node)
        self.depth -= 1
        return found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = self.reader.names
        if node.id in self.names or node.id not in known:
            return node
        value = known[node.id]
        if isinstance(value, (Operator, Table, Lambda, Node)):
            self.reader.fail(node, f"{node.id} is no constant; a function takes the values of ops as its arguments")
        written = _dict_text(value) if isinstance(value, dict) else value_text(value)
        self.reader.written += len(written)
        if self.reader.written > LONGEST:
            self.reader.fail(node, f"constants written into functions have more than {LONGEST} characters in all; give "
                                   "a dictionary to apply, as it is")  # fmt: skip
        return ast.copy_location(ast.parse(written, mode="eval").body, node)


_PARTS = (
    ast.Constant, ast.Name, ast.Tuple, ast.Dict, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.Subscript, ast.expr_context, ast.And, ast.Or, ast.UAdd, ast.In, ast.NotIn, ast.Is, ast.IsNot, *_BINARY,
)  # fmt: skip
_HINTS: dict[type[ast.AST], str] = {
    ast.BoolOp: "write & for and, | for or",
    ast.UnaryOp: "write ~ for not",
    ast.IfExp: "write where(condition, a, b) for a choice",
    ast.Compare: "comparisons are not chained: write (a < b) & (b < c)",
    ast.Subscript: "sequence ops are not indexed; aggregate(select(indices, 3, eq), op) gives the value at position 3",
    ast.Attribute: "attributes are not part of the language",
    ast.List: "write a tuple, with parentheses",
    ast.Set: "write a tuple, with parentheses",
}


def _dict_text(rows: Mapping[Any, Any]) -> str:
    return f"{{{', '.join(f'{value_text(key)}: {value_text(value)}' for key, value in rows.items())}}}"


def _value(node: ast.AST, given: Mapping[str, Value]) -> Any:
    """The value of a function's body; everything in between is brought to its one form, which is bounded."""
    if isinstance(node, ast.Constant):
        return canonical(node.value)
    if isinstance(node, ast.Name):
        return given[node.id]
    if isinstance(node, ast.Tuple):
        return canonical(tuple(_value(part, given) for part in node.elts))
    if isinstance(node, ast.Dict):
        return {
            _value(key, given): _value(value, given) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    if isinstance(node, ast.BoolOp):
        stop = isinstance(node.op, ast.Or)
        found: Any = None
        for part in node.values:
            found = _value(part, given)
            if bool(found) == stop:
                break
        return found
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, given) else node.orelse, given)
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand, given)
        return operand if isinstance(node.op, ast.UAdd) else canonical(OPERATORS[_BINARY[type(node.op)]](operand))
    if isinstance(node, ast.BinOp):
        return canonical(OPERATORS[_BINARY[type(node.op)]](_value(node.left, given), _value(node.right, given)))
    if isinstance(node, ast.Subscript):
        return canonical(_value(node.value, given)[_value(node.slice, given)])
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return canonical(_PURE[node.func.id](*(_value(part, given) for part in node.args)))
    assert isinstance(node, ast.Compare)
    left = _value(node.left, given)
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = _value(part, given)
        if not _holds(type(op), left, right):
            return 0
        left = right
    return 1


def _holds(op: type[ast.cmpop], left: Any, right: Any) -> bool:
    if op in (ast.In, ast.NotIn):
        return (left in right) == (op is ast.In)
    if op in (ast.Is, ast.IsNot):
        return (left == right) == (op is ast.Is)
    return bool(OPERATORS[_BINARY[op]](left, right))
