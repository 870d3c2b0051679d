"""sympy expressions, walked node by node."""

from __future__ import annotations

from collections.abc import Container
from fractions import Fraction
from typing import Any

from ..errors import ArgumentError, UnsupportedOperation
from ..ir.constants import constant_e, constant_pi
from ..ir.expression import Expr
from ..ir.graph import Graph
from ..ir.special import ALIASES

_NAMES = {"Abs": "abs", "Max": "max", "Min": "min", "LambertW": "", "loggamma": ""}


def is_sympy(target: object) -> bool:
    """Whether an object is a sympy expression, without importing sympy."""
    return type(target).__module__.split(".")[0] == "sympy"


def from_sympy(target: Any, graph: Graph, names: Container[str]) -> tuple[list[Expr], set[str]]:
    """The expression of a sympy object, and the variables it mentions."""
    import sympy

    if not isinstance(target, sympy.Expr):
        raise ArgumentError(f"expected a sympy expression, got {type(target).__name__}")
    mentioned = {str(symbol) for symbol in target.free_symbols}
    missing = sorted(name for name in mentioned if name not in names)
    if missing:
        raise ArgumentError(f"the box has no interval for {', '.join(missing)}; add each to the box")
    done: dict[Any, Expr] = {}
    bad: list[str] = []
    for node in sympy.postorder_traversal(target):
        if node not in done:
            made = _node(node, graph, [done[a] for a in node.args if a in done])
            if made is None:
                bad.append(str(node))
                made = graph.number(1)
            done[node] = made
    if bad:
        raise UnsupportedOperation(f"these parts of the sympy expression have no form here: {'; '.join(bad)}")
    return [done[target]], mentioned


def _node(node: Any, graph: Graph, arguments: list[Expr]) -> Expr | None:
    import sympy

    if node.is_Symbol:
        return graph.variable(node.name)
    if node is sympy.pi or node is sympy.E:
        return graph.number(constant_pi() if node is sympy.pi else constant_e())
    if node.is_Rational:
        return graph.number(Fraction(int(node.p), int(node.q)))
    if node.is_Float:
        return graph.number(float(node))
    if node.is_Add:
        return graph.sum([(a, 1) for a in arguments])
    if node.is_Mul:
        return graph.product([(a, 1) for a in arguments])
    if node.is_Pow:
        return graph.power(*arguments)
    if node.is_Function:
        name = type(node).__name__
        word = _NAMES.get(name, ALIASES.get(name, name))
        return graph.apply(word, arguments) if graph.knows(word) else None
    return None
