"""Formulas to programs: strings, sympy expressions and Python callables of named scalars."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Container, Sequence
from fractions import Fraction
from typing import Any

import torch

from ...box import Box
from ...errors import ArgumentError, UnsupportedOperation
from ...expressions.constants import constant_e, constant_pi
from ...expressions.expression import Condition, Expr, Graph, rebuilt
from ...expressions.grammar import read
from ...expressions.special import ALIASES
from ...programs.program import Program
from .defined import over_common, refuse_undefined
from .normal import Cuts, Writing, written

_COMPARED = {">": "gt", ">=": "ge", "<": "lt", "<=": "le"}
_NAMES = {
    "Abs": "abs", "Heaviside": "heaviside", "LambertW": "", "Max": "max", "Min": "min", "Mod": "mod", "ceiling": "ceil",
    "loggamma": "",
}  # fmt: skip


def is_sympy(target: object) -> bool:
    """Whether an object is a sympy expression, without importing sympy."""
    return any(str(base.__module__).split(".")[0] == "sympy" for base in type(target).__mro__)


def from_sympy(target: Any, graph: Graph, names: Container[str]) -> tuple[list[Expr], set[str]]:
    """The expression of a sympy object, and the variables it mentions."""
    import sympy

    if not isinstance(target, sympy.Expr | sympy.MatrixBase):
        raise ArgumentError(f"expected a sympy expression or matrix, got {type(target).__name__}")
    if isinstance(target, sympy.MatrixBase) and min(target.shape) != 1:
        raise ArgumentError(f"a sympy matrix must be a row or a column, got {target.shape[0]} x {target.shape[1]}")
    if target.has(sympy.Derivative, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit):
        target = target.doit()  # written down only, and carried out here where sympy can
    mentioned = {str(symbol) for symbol in target.free_symbols}
    missing = sorted(name for name in mentioned if name not in names)
    if missing:
        raise ArgumentError(f"the box has no interval for {', '.join(missing)}; add each to the box")
    bad: list[str] = []
    parts = list(target) if isinstance(target, sympy.MatrixBase) else [target]
    roots = [_converted(part, graph, bad) for part in parts]
    if bad:
        raise UnsupportedOperation(f"these parts of the sympy expression have no form here: {'; '.join(bad)}")
    return roots, mentioned


def _converted(target: Any, graph: Graph, bad: list[str]) -> Expr:
    """A sympy expression as a node; what has no form is added to `bad`, and 1 stands for it."""
    import sympy

    done: dict[Any, Expr] = {}
    todo = [target]
    while todo:
        node = todo[-1]
        if node in done:
            todo.pop()
        elif isinstance(node, sympy.Piecewise):
            done[node] = _pieces(node, graph, bad)
        elif waiting := [a for a in node.args if a not in done]:
            todo += waiting
        else:
            made = _node(node, graph, [done[a] for a in node.args])
            if made is None:
                bad.append(str(node))
            done[node] = graph.number(1) if made is None else made
    return done[target]


def _pieces(node: Any, graph: Graph, bad: list[str]) -> Expr:
    """A continuous sympy.Piecewise. Each piece must be defined where it is used, not on all of the box."""
    tests = [_condition(test, graph, bad) for _, test in node.args]
    partial, inverted = len(graph.partial), dict(graph.inverted)
    pieces = [(_converted(value, graph, bad), test) for (value, _), test in zip(node.args, tests, strict=True)]
    if pieces[-1][1] is not None:
        raise UnsupportedOperation(f"{node} says nothing where none of its conditions holds; end it with (value, True)")
    found = pieces[-1][0]
    for value, test in reversed(pieces[:-1]):
        found = value if test is None else test.choose(value, found)
    del graph.partial[partial:]
    graph.inverted = inverted
    return rebuilt(graph, [found])[0]


def _condition(test: Any, graph: Graph, bad: list[str]) -> Condition | None:
    """A sympy condition; None for one that always holds."""
    import sympy

    if test == True:  # noqa: E712  (sympy's own True)
        return None
    if isinstance(test, sympy.And | sympy.Or | sympy.Not):
        parts = [found for part in test.args if (found := _condition(part, graph, bad)) is not None]
        if isinstance(test, sympy.Not):
            return ~parts[0]
        return functools.reduce(operator.and_ if isinstance(test, sympy.And) else operator.or_, parts)
    if isinstance(test, sympy.core.relational._Inequality):
        return getattr(operator, _COMPARED[test.rel_op])(*(_converted(side, graph, bad) for side in test.args))
    bad.append(str(test))
    return None


def _exact(node: Any) -> Fraction | float:
    """The number that a float of sympy holds, which may have many more digits than float64."""
    sign, mantissa, exponent, bits = node._mpf_
    if not mantissa:
        return float(node)
    # of the exponent alone, since 2^(10^9) takes long to write out
    if exponent + bits > 1025:
        raise ArgumentError("a constant overflows float64 (beyond 1.8e308)")
    if exponent + bits < -1075:
        raise ArgumentError("a constant underflows float64 (below 4.9e-324 but not 0)")
    return (-1) ** sign * int(mantissa) * Fraction(2) ** int(exponent)


def _node(node: Any, graph: Graph, arguments: list[Expr]) -> Expr | None:
    import sympy

    if node.is_Symbol:
        return graph.variable(node.name)
    if node is sympy.pi or node is sympy.E:
        return graph.number(constant_pi() if node is sympy.pi else constant_e())
    if node.is_Rational:
        return graph.number(Fraction(int(node.p), int(node.q)))
    if node.is_Float:
        return graph.number(_exact(node))
    arguments = [graph.used(a) for a in arguments]
    if node.is_Add:
        return graph.sum([(a, 1) for a in arguments])
    if node.is_Mul:
        return graph.product([(a, 1) for a in arguments])
    if node.is_Pow:
        return graph.power(*arguments)
    if node.is_Function:
        name = type(node).__name__
        if name == "sinc":  # sympy's; numpy's has pi in it
            return graph.call("sin", arguments[0]) / arguments[0]
        word = _NAMES.get(name, ALIASES.get(name, name))
        return graph.apply(word, arguments) if graph.knows(word) else None
    return None


FormulaLike = str | Sequence[Any] | Callable[..., Any] | Any


def capture_formula(target: FormulaLike, box: Box, writing: Writing = "product") -> Program:
    """The program of a formula on a box with named intervals.

    `target` is a string, a sympy expression, a callable of the box's variables, or a list of these (then the output has
    a last dimension). Nothing in a string is ever run as code. Constants are folded exactly, and rounded once.

    >>> print(capture_formula("exp(-x**2)/y + 2*x", Box(x=(-1, 1), y=(0.5, 2))))
    program of 1 token: exp(-x**2)/y + 2*x
      %0 = input : 2
      %1 = linear %0 [2x1]           # x
      %2 = apply expr: exp(-y**2) %1 # exp(-x**2)
      %3 = linear %0 [2x1]           # y
      %4 = apply reciprocal %3       # 1/y
      %5 = product %2 %4             # exp(-x**2)/y
      %6 = linear %0 %5 [2x1 1x1]    # 2*x + exp(-x**2)/y
      output %6
    """
    if box.names is None:
        raise ArgumentError("a formula needs a box with names, for example Box(x=(-1, 1), y=(0.5, 2))")
    # Networks of float32 take points a little outside of the box; rewrites that need a sign must hold there, too.
    wide = box.outward(torch.float32)
    graph = Graph(dict(zip(box.names, wide.intervals(), strict=True)), fine=writing == "fine")
    roots, source, several = expressions(target, graph, box)
    cuts = Cuts(graph)
    roots = over_common(cuts, roots)
    refuse_undefined(cuts, roots, box)
    return written(cuts, roots, box, source, several, writing)


def expressions(target: FormulaLike, graph: Graph, box: Box) -> tuple[list[Expr], str, bool]:
    """The expressions that a target stands for, a text that describes it, and whether there are several outputs."""
    names = box.names or ()
    parts = list(target) if isinstance(target, (list, tuple)) else [target]
    if not parts:
        raise ArgumentError("the list of formulas is empty")
    roots: list[Expr] = []
    used: set[str] = set()
    several = isinstance(target, (list, tuple))
    for part in parts:
        if isinstance(part, str):
            node, mentioned = read(part, graph, names)
            found = [node]
        elif is_sympy(part):
            found, mentioned = graph.counted(functools.partial(from_sympy, part, graph, names))
            several = several or hasattr(part, "shape")
        elif callable(part):
            found, mentioned, many = graph.counted(functools.partial(_traced, part, graph, names))
            several = several or many
        else:
            raise ArgumentError(
                f"a formula is a string, a sympy expression, a callable or a list of them, got {type(part).__name__}"
            )
        roots += found
        used |= mentioned
    unused = [name for name in names if name not in used]
    if len(unused) == len(names):
        raise ArgumentError(f"the formula uses none of {', '.join(names)}: a constant needs no network")
    if unused:
        raise ArgumentError(
            f"the formula does not use {', '.join(unused)}; remove {'it' if len(unused) == 1 else 'them'} from the box "
            f"or correct the formula"
        )
    return roots, _source(parts, roots), several


def _traced(function: Callable[..., Any], graph: Graph, names: Sequence[str]) -> tuple[list[Expr], set[str], bool]:
    """What a callable computes, found by calling it with expressions; a tuple or list means several outputs."""
    variables = {name: graph.variable(name) for name in names}
    known = True
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    except (TypeError, ValueError):  # builtins and C functions do not say
        parameters, known = [], False
    given = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    plain = [p.name for p in parameters if p.kind in given and p.default is p.empty]
    by_name = set(plain) == set(names) and not any(p.kind == p.POSITIONAL_ONLY for p in parameters)
    starred = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    if known and not by_name and len(plain) != len(names) and not starred:
        raise ArgumentError(
            f"the function takes {', '.join(plain) or 'no arguments'}, but the box has {', '.join(names)}; "
            f"name the box's intervals after the arguments"
        )
    try:
        result = _shadowed(function)(**variables) if by_name else _shadowed(function)(*variables.values())
    except (TypeError, AttributeError) as error:
        raise ArgumentError(
            f"the function cannot be called with one number for each of {', '.join(names)}: {error}; if it takes a "
            "tensor, its box has a shape, such as Box.cube(-1, 1, shape=3)"
        ) from error
    several = isinstance(result, (list, tuple))
    outputs = list(result) if several else [result]
    roots = [part if isinstance(part, Expr) else graph.number(part) for part in outputs]
    # a variable is used when some node was made from it, also one that cancelled later
    used = {name for name, node in variables.items() if node in roots or graph.uses(node)}
    return roots, used, several


def _shadowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with those of `math` that it names taking expressions as well as numbers."""
    if not isinstance(function, types.FunctionType):
        return _of_math(function)
    cells = function.__closure__
    known = {name: _of_math(value) for name, value in function.__globals__.items()}
    closure = None if cells is None else tuple(map(_shadowed_cell, cells))
    made = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _shadowed_cell(cell: types.CellType) -> types.CellType:
    try:
        found = _of_math(cell.cell_contents)
    except ValueError:  # nothing is in it yet
        return cell
    return cell if found is cell.cell_contents else types.CellType(found)


def _of_math(value: Any) -> Any:
    if value is math:
        return types.SimpleNamespace(**{name: _of_math(found) for name, found in vars(math).items()})
    if not isinstance(value, types.BuiltinFunctionType) or value.__module__ != "math":
        return value

    def called(*arguments: Any) -> Any:
        first = next((a for a in arguments if isinstance(a, Expr)), None)
        return value(*arguments) if first is None else first.named(value.__name__, *arguments)

    return called


def _source(parts: Sequence[Any], roots: Sequence[Expr]) -> str:
    texts = []
    for part, root in zip(parts, roots, strict=False):
        named = part if isinstance(part, str) else str(part) if is_sympy(part) else root.short(2000)
        texts.append(named)
    return texts[0] if len(texts) == 1 and len(roots) == 1 else f"[{', '.join(texts)}]"
