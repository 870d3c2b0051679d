"""The same expressions in another graph, with constants or nodes replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from .expression import Call, Expr, Number, Product, Sum, Terms, Variable
from .graph import Graph


def rebuilt(
    graph: Graph,
    roots: Iterable[Expr],
    constant: Callable[[Fraction], Fraction] = lambda c: c,
    replace: Mapping[Expr, Expr] | None = None,
    rewrite: Callable[[Expr], Expr] = lambda node: node,
    split: Callable[[Product], Terms] = lambda node: node.factors,
) -> list[Expr]:
    """The roots, made anew in `graph` from the bottom up; nodes of `replace` become what it says.

    `rewrite` has the last word on every node made; `split` may group the factors of a product differently.
    """
    new: dict[Expr, Expr] = dict(replace or {})
    wanted = list(roots)
    for node in _below(wanted, new, split):
        match node:
            case Number():
                new[node] = graph.number(constant(node.value))
            case Variable():
                new[node] = graph.variable(node.name)
            case Sum():
                terms = [(new[term], constant(c)) for term, c in node.terms]
                new[node] = graph.sum(terms, constant(node.constant))
            case Product():
                new[node] = graph.product([(new[base], constant(p)) for base, p in split(node)])
            case Call():
                new[node] = graph.call(node.function, new[node.argument])
        new[node] = rewrite(new[node])
    return [new[root] for root in wanted]


def _below(roots: list[Expr], known: Mapping[Expr, Expr], split: Callable[[Product], Terms]) -> list[Expr]:
    """What has to be made, children first: nothing below a known node."""
    seen: dict[int, Expr] = {}
    todo = [root for root in roots if root not in known]
    while todo:
        node = todo.pop()
        if node.index not in seen:
            seen[node.index] = node
            children = [base for base, _ in split(node)] if isinstance(node, Product) else node.children
            todo.extend(child for child in children if child not in known)
    return [seen[i] for i in sorted(seen)]
