"""Sums arranged to need few products (mathematics H1, item 9): squares, differences of squares, common factors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from fractions import Fraction

from .cuts import Cuts, primitive
from .expression import Expr, Product
from .graph import Graph

_MOST_TERMS = 300  # a longer sum is taken as it is: the search for factors is quadratic in its length
Weighted = list[tuple[Expr, Fraction]]


def arranged(graph: Graph, cuts: Cuts, terms: Sequence[tuple[Expr, Fraction]], known: Container[Expr]) -> Weighted:
    """Terms with the same sum that cost fewer products; what is `known` costs nothing already and stays."""
    if len(terms) > _MOST_TERMS:
        return list(terms)
    loose = [(term, c) for term, c in terms if term not in known]
    kept = [(term, c) for term, c in terms if term in known]
    return kept + common_factors(graph, cuts, squares(graph, cuts, loose))


def squares(graph: Graph, cuts: Cuts, terms: Weighted) -> Weighted:
    """a u^2 + b u v + c v^2 with b^2 = 4ac as one square; a u^2 - c v^2 as one product of linear forms."""
    rest = dict(terms)
    single = {base: term for term, _ in terms if (base := _squared(graph, cuts, term)) is not None}
    out: Weighted = []
    for term, d in terms:
        if not isinstance(term, Product) or [p for _, p in term.factors] != [1, 1]:
            continue
        u, v = term.children
        if not (single.get(u) in rest and single.get(v) in rest and term in rest):
            continue
        a, c = rest[single[u]], rest[single[v]]
        k = _root(c / a)
        if k is not None and d * d == 4 * a * c:
            out.append((graph.product([(graph.sum([(u, 1), (v, k if d * a > 0 else -k)]), 2)]), a))
            for used in (single[u], single[v], term):
                del rest[used]
    for u, one in single.items():
        for v, other in single.items():
            if one not in rest or other not in rest or not rest[one] > 0 > rest[other]:
                continue
            k = _root(-rest[other] / rest[one])
            if k is not None:
                ends = [(graph.sum([(u, 1), (v, k)]), 1), (graph.sum([(u, 1), (v, -k)]), 1)]
                out.append((graph.product(ends), rest[one]))
                del rest[one], rest[other]
    return [*rest.items(), *out]


def _squared(graph: Graph, cuts: Cuts, term: Expr) -> Expr | None:
    """u, when the term is u ** 2 for a scalar u that costs nothing."""
    if isinstance(term, Product) and [p for _, p in term.factors] == [2]:
        base = term.children[0]
        return base if is_bare(graph, cuts, base) else None
    return None


def is_bare(graph: Graph, cuts: Cuts, base: Expr) -> bool:
    """Whether the expression is its own scalar, up to scale and offset: no application could be saved on it."""
    return base is cuts.cut(base) or primitive(graph, base)[0] is cuts.cut(base)


def _root(x: Fraction) -> Fraction | None:
    """The rational square root of a positive rational, if there is one."""
    if x <= 0:
        return None
    root = Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
    return root if root * root == x else None


def common_factors(graph: Graph, cuts: Cuts, terms: Weighted) -> Weighted:
    """x*y + x*z as x*(y + z), the most frequent factor first; factors of one scalar count as one."""
    rest = list(terms)
    groups: dict[Expr, list[Expr]] = {}
    while True:
        for term, _ in rest:
            if term not in groups:
                groups[term] = by_scalar(graph, cuts, term) if isinstance(term, Product) else []
        count = Counter(part for term, _ in rest if len(groups[term]) > 1 for part in groups[term])
        shared = [(n, part) for part, n in count.items() if n > 1]
        if not shared:
            return rest
        best = max(shared, key=lambda pair: (pair[0], pair[1].order))[1]
        inside = [(term, c) for term, c in rest if len(groups[term]) > 1 and best in groups[term]]
        shared_by_all = [part for part in groups[inside[0][0]] if all(part in groups[term] for term, _ in inside)]
        common = graph.product([(part, 1) for part in shared_by_all])
        quotient = graph.sum([(graph.product([(term, 1), (common, -1)]), c) for term, c in inside])
        taken = {term for term, _ in inside}
        product = graph.product([(common, 1), (quotient, 1)])
        rest = [(term, c) for term, c in rest if term not in taken]
        if not isinstance(product, Product) or product in dict(rest):
            return [*rest, *inside]
        rest.append((product, Fraction(1)))


def by_scalar(graph: Graph, cuts: Cuts, node: Product) -> list[Expr]:
    """The factors of a product, those of one scalar multiplied together."""
    return [graph.product(group) for group in cuts.groups(node).values()]
