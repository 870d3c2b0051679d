"""Is a formula defined and bounded on its box? Refusals name a point (mathematics H1, item 8).

First the formula as it was written: no root or logarithm of a negative number, even where it cancels later. Then the
normal form: no pole, unless the function of one scalar around it is bounded all the same, as sin(x)/x is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flint import arb

from ..box import Box
from ..errors import ArgumentError
from .composite import PREFIX, composite
from .cuts import Cuts
from .domain import Domain
from .expression import Call, Expr, Product, Sum, reachable
from .functions import power
from .graph import Graph, Partial
from .normal import univariate
from .rounding import precision
from .sums import by_scalar
from .univariate import Univariate
from .witness import Search

_MOST_CELLS = 2000


def refuse_undefined(graph: Graph, roots: Sequence[Expr], box: Box) -> None:
    """Raise `DomainError`, with a witness, where the expressions are undefined or unbounded on the box."""
    search = Search(box)
    seen: set[tuple[Expr, Domain]] = set()
    for partial in graph.partial:
        closed = replace(partial.domain, lo_closed=True, hi_closed=True, poles=())
        if (partial.argument, closed) not in seen and any(closed.reaches(*partial.argument.range)):
            seen.add((partial.argument, closed))
            search.refuse(replace(partial, domain=closed), stated=partial.domain)
    _Visit(graph, search).visit(roots)
    for root in roots:
        if not all(map(math.isfinite, root.range)):
            search.refuse_overflow(root)


def _partials(node: Expr) -> list[Partial]:
    """The arguments of a node that must lie in a domain."""
    if isinstance(node, Call):
        return [Partial(node.short(), node.argument, node.function.domain)]
    if isinstance(node, Product):
        single = [node.graph.product([factor]).short() for factor in node.factors]
        return [Partial(t, b, power(float(p)).domain) for t, (b, p) in zip(single, node.factors, strict=True)]
    return []


def _touches(partial: Partial) -> bool:
    """Whether the argument's range meets a pole or an open end; closed ends have been looked at already."""
    domain, (low, high) = partial.domain, partial.argument.range
    ends = (low <= domain.lo and not domain.lo_closed) or (high >= domain.hi and not domain.hi_closed)
    return ends or any(low <= pole <= high for pole in domain.poles) or domain.offence("", low, high) is not None


class _Visit:
    def __init__(self, graph: Graph, search: Search):
        self.graph, self.search, self.cuts = graph, search, Cuts(graph)

    def visit(self, roots: Sequence[Expr]) -> None:
        """Walk down; below a function of one scalar that is shown to be bounded only the scalar matters."""
        todo, done = list(roots), set()
        while todo:
            node = todo.pop()
            if node in done:
                continue
            done.add(node)
            if not any(_touches(partial) for part in reachable([node]) for partial in _partials(part)):
                continue
            scalar = self.cuts.cut(node)
            if scalar is not None and scalar is not node and self._bounded(node, scalar):
                todo.append(scalar)
                continue
            parts = by_scalar(self.graph, self.cuts, node) if isinstance(node, Product) else []
            if len(parts) > 1:
                todo.extend(parts)
                continue
            for partial in _partials(node):
                if _touches(partial):
                    self.search.refuse(partial)
            todo.extend(node.children)

    def _bounded(self, node: Expr, scalar: Expr) -> bool:
        inner, a, b = univariate(self.graph, node, scalar)
        argument = self.graph.sum([(scalar, a)], b)
        if inner.text is None or isinstance(inner, Sum):
            return False
        try:
            function = composite(f"{PREFIX} {inner.text}")
        except ArgumentError:
            return False
        return is_bounded(function, *argument.range)


def is_bounded(function: Univariate, lo: float, hi: float) -> bool:
    """Whether ball arithmetic shows the function to be finite on [lo, hi], splitting where it does not at once."""
    if function.domain.offence("", lo, hi) is not None:
        return False
    cells, count = [(lo, hi)], 0
    with precision():
        while cells:
            a, b = cells.pop()
            count += 1
            middle = 0.5 * a + 0.5 * b
            if function.ball(arb(a).union(arb(b))).is_finite():
                continue
            if count > _MOST_CELLS or not a < middle < b:
                return False
            cells += [(a, middle), (middle, b)]
    return True
