"""On which single scalar does an expression depend? (fusion, mathematics H1, item 2)

The cut of a node is the deepest expression s such that the node is a function of s alone: a variable, a linear form
up to scale and offset, a monomial up to a power. sin(2x + 2y) + cos(x + y) depends on x + y only, and
1/sqrt(1 - v**2/c**2) on v/c only. A node that mixes several scalars is its own cut.
"""

from __future__ import annotations

import math
from fractions import Fraction

from .expression import Call, Expr, Number, Product, Sum, Terms, Variable
from .graph import Graph

Factors = list[tuple[Expr, Fraction]]


class Cuts:
    """Cuts of the nodes of one graph, remembered."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._known: dict[Expr, Expr | None] = {}

    def cut(self, node: Expr) -> Expr | None:
        """The scalar that the node is a function of; None for a number."""
        todo = [node]
        while todo:
            top = todo[-1]
            if top in self._known:
                todo.pop()
                continue
            missing = [child for child in top.children if child not in self._known]
            if missing:
                todo.extend(missing)
            else:
                self._known[top] = self._from_children(top)
        return self._known[node]

    def _from_children(self, node: Expr) -> Expr | None:
        match node:
            case Number():
                return None
            case Variable():
                return node
            case Call():
                return self._known[node.argument]
        below = {self._known[child] for child in node.children} - {None}
        if len(below) == 1:
            return below.pop()
        if isinstance(node, Product):
            absorbing = [s for s in below if isinstance(s, Product) and _rest_depends_on(self, node, s)]
            if absorbing:
                return absorbing[0]
        scalar = primitive(self.graph, node)[0]
        self._known[scalar] = scalar
        return scalar

    def groups(self, node: Product) -> dict[Expr, Factors]:
        """The factors of a product by their scalar; powers of a monomial that is one of the scalars belong to it."""
        groups: dict[Expr, Factors] = {}
        for base, p in node.factors:
            scalar = self.cut(base)
            assert scalar is not None, "a base of a product is no number"
            groups.setdefault(scalar, []).append((base, p))
        for monomial in [s for s in groups if isinstance(s, Product)]:
            held = extracted(node, monomial)
            if held and held[0][0] is monomial and all(len(groups.get(b, ())) == 1 for b in monomial.children):
                groups[monomial].append(held[0])
                for base in monomial.children:
                    del groups[base]
        return groups


def extracted(node: Product, monomial: Expr) -> Terms:
    """The factors of the product with the power of the monomial that they hold taken out as one, if they hold one."""
    if not isinstance(monomial, Product) or monomial is node:
        return node.factors
    held = dict(node.factors)
    ratios = {held.get(base, Fraction(0)) / p for base, p in monomial.factors}
    ratio = ratios.pop() if len(ratios) == 1 else Fraction(0)
    if not ratio or ratio.denominator != 1:
        return node.factors
    return ((monomial, ratio), *((base, p) for base, p in node.factors if base not in monomial.children))


def _rest_depends_on(cuts: Cuts, node: Product, scalar: Product) -> bool:
    parts = extracted(node, scalar)
    return parts is not node.factors and all(b is scalar or cuts.cut(b) is scalar for b, _ in parts)


def primitive(graph: Graph, node: Expr) -> tuple[Expr, Fraction, Fraction]:
    """(s, a, b): a sum is a * s + b, a product s ** a (b is 0); nodes that differ in a and b only have the same s."""
    if isinstance(node, Sum):
        lead = node.terms[0][1]
        return graph.sum([(term, c / lead) for term, c in node.terms]), lead, node.constant
    if isinstance(node, Product):
        content = _content([p for _, p in node.factors])
        if content.denominator != 1 and any(base.range[0] < 0 for base in node.children):
            content = Fraction(1)
        if all(p < 0 for _, p in node.factors):
            content = -content
        inner = graph.product([(base, p / content) for base, p in node.factors])
        if isinstance(inner, Product):
            return inner, content, Fraction(0)
    return node, Fraction(1), Fraction(0)


def _content(exponents: list[Fraction]) -> Fraction:
    """The largest rational of which all exponents are whole multiples."""
    bottom = math.lcm(*(p.denominator for p in exponents))
    return Fraction(math.gcd(*(int(p * bottom) for p in exponents)), bottom)
