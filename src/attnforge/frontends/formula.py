"""Formulas to programs: strings, sympy expressions and Python callables of named scalars."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..box import Box
from ..errors import ArgumentError
from ..ir.defined import refuse_undefined
from ..ir.expression import Expr
from ..ir.grammar import read
from ..ir.graph import Graph
from ..ir.normal import Style, lower
from ..ir.program import Program
from .symbolic import from_sympy, is_sympy

Formula = str | Sequence[Any] | Callable[..., Any] | Any


def lower_formula(target: Formula, box: Box, style: Style = "product") -> Program:
    """The program of a formula on a box with named intervals.

    `target` is a string, a sympy expression, a callable of the box's variables, or a list of these (then the output has
    a last dimension). Nothing in a string is ever run as code. Constants are folded exactly and
    rounded to float64 once.

    >>> print(lower_formula("exp(-x**2)/y + 2*x", Box(x=(-1, 1), y=(0.5, 2))))
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
    graph = Graph(dict(zip(box.names, wide.intervals(), strict=True)))
    roots, source, several = expressions(target, graph, box)
    refuse_undefined(graph, roots, box)
    return lower(graph, roots, box, source, several, style)


def expressions(target: Formula, graph: Graph, box: Box) -> tuple[list[Expr], str, bool]:
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
            found, mentioned = from_sympy(part, graph, names)
        elif callable(part):
            found, mentioned, many = _traced(part, graph, names)
            several = several or many
        else:
            raise ArgumentError(
                f"a formula is a string, a sympy expression, a callable or a list of them, got {type(part).__name__}"
            )
        roots += found
        used |= mentioned
    unused = [name for name in names if name not in used]
    if unused:
        raise ArgumentError(
            f"the formula does not use {', '.join(unused)}; remove {'it' if len(unused) == 1 else 'them'} from the box "
            f"or correct the formula"
        )
    return roots, _source(parts, roots), several


def _traced(function: Callable[..., Any], graph: Graph, names: Sequence[str]) -> tuple[list[Expr], set[str], bool]:
    """What a callable computes, found by calling it with expressions; a tuple or list means several outputs."""
    variables = {name: graph.variable(name) for name in names}
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    except (TypeError, ValueError):  # builtins and C functions do not say
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]
    if parameters and set(plain) == set(names):
        result = function(**variables)
    else:
        if parameters and len(plain) != len(names) and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            raise ArgumentError(
                f"the function takes {', '.join(plain) or 'no arguments'}, but the box has {', '.join(names)}; "
                f"name the box's intervals after the arguments"
            )
        result = function(*variables.values())
    several = isinstance(result, (list, tuple))
    outputs = list(result) if several else [result]
    roots = [part if isinstance(part, Expr) else graph.number(part) for part in outputs]
    # a variable is used when some node was made from it, also one that cancelled later
    used = {name for name, node in variables.items() if node in roots or graph.uses(node)}
    return roots, used, several


def _source(parts: Sequence[Any], roots: Sequence[Expr]) -> str:
    texts = []
    for part, root in zip(parts, roots, strict=False):
        named = part if isinstance(part, str) else str(part) if is_sympy(part) else root.short(2000)
        texts.append(named)
    return texts[0] if len(texts) == 1 and len(roots) == 1 else f"[{', '.join(texts)}]"
