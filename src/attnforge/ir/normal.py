"""From expressions to a program of few operations (mathematics H1, items 1, 2 and 9).

- Affine parts are merged into the operations that read them.
- Fusion: what depends on one scalar becomes one application of a composite function.
- Monomials are grouped by scalar, factors of one exponent share one power, and the rest is multiplied in balance.
- Sums take out perfect squares, differences of squares and common factors.

Styles: "product" as above; "log" writes monomials of three and more positive factors as exp(sum of logarithms); "plain"
fuses nothing beyond the functions of the registry.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

from ..box import Box
from ..errors import ArgumentError
from .composite import PREFIX, VARIABLE, composite
from .constants import settled
from .cuts import Cuts, Factors, extracted, primitive
from .expression import Call, Expr, Number, Product, Sum, Variable, reachable
from .forms import Emitter, Form
from .functions import get, power
from .graph import Graph
from .interval import WHOLE
from .program import Program
from .rebuild import rebuilt
from .removable import affine
from .sums import arranged, is_bare
from .univariate import Univariate

Style = Literal["product", "log", "plain"]
STYLES: tuple[Style, ...] = get_args(Style)
#: Composites that have a name in the registry, and heads of their own.
_KNOWN = {"y*sigmoid(y)": "silu", "y*tanh(softplus(y))": "mish"}


def lower(
    graph: Graph, roots: Sequence[Expr], box: Box, source: str, several: bool = False, style: Style = "product"
) -> Program:
    """The program that computes the expressions; `several` outputs make a last dimension."""
    if style not in STYLES:
        raise ArgumentError(f"style is one of {', '.join(STYLES)}, not {style!r}")
    if style == "log":
        roots = with_logarithms(graph, roots)
    lowering = _Lowering(graph, box, fuse=style != "plain")
    forms = [lowering.form(root) for root in roots]
    return lowering.emit.program(forms, [root.short() for root in roots], source, several)


def with_logarithms(graph: Graph, roots: Sequence[Expr]) -> list[Expr]:
    """Every product of three and more positive factors as exp(sum of exponent * log(base))."""

    def rewrite(node: Expr) -> Expr:
        if not isinstance(node, Product):
            return node
        positive = [(base, p) for base, p in node.factors if base.range[0] > 0]
        if len(positive) < 3:
            return node
        logs = graph.sum([(graph.call("log", base), p) for base, p in positive])
        return graph.product([(graph.call("exp", logs), 1), *((b, p) for b, p in node.factors if not b.range[0] > 0)])

    return rebuilt(graph, roots, rewrite=rewrite)


class _Lowering:
    def __init__(self, graph: Graph, box: Box, fuse: bool):
        self.graph, self.fuse = graph, fuse
        self.emit, self.cuts = Emitter(box), Cuts(graph)
        self.columns = {name: j for j, name in enumerate(box.names or ())}
        self.forms: dict[Expr, Form] = {}

    def form(self, node: Expr) -> Form:
        """The node as an affine form over values; emits the operations it needs."""
        if node not in self.forms:
            self.forms[node] = self._form(node)
        return self.forms[node]

    def _form(self, node: Expr) -> Form:
        match node:
            case Number():
                return Form(constant=node.value)
            case Variable():
                return Form(columns={self.columns[node.name]: Fraction(1)})
            case Sum():
                return self._sum(node)
        scalar = self.cuts.cut(node)
        if scalar is not None and scalar is not node and not self._better_apart(node, scalar):
            fused = self._fused(node, scalar)
            if fused is not None:
                return fused
        if isinstance(node, Call):
            return self.emit.apply(self.form(node.argument), node.function, node.short(), node.argument.short())
        assert isinstance(node, Product)
        return self._product(node)

    # -- one scalar

    def _better_apart(self, node: Expr, scalar: Expr) -> bool:
        """A bare power of a quotient: x**2/y**2 as two powers and a product is as cheap as (x/y)**2 and less deep."""
        if not isinstance(node, Product) or primitive(self.graph, node)[0] is not scalar:
            return False
        return isinstance(scalar, Product) and len({p for _, p in node.factors}) > 1

    def _fused(self, node: Expr, scalar: Expr) -> Form | None:
        """The node as one function of the scalar, or None where it cannot be one."""
        inner, a, b = univariate(self.graph, node, scalar)
        factor, constant = Fraction(1), Fraction(0)
        if isinstance(inner, Sum):
            # A constant, and a factor common to all terms, belong to the affine part of what follows.
            sizes = {c for _, c in inner.terms}
            factor = sizes.pop() if len(sizes) == 1 else abs(sizes.pop()) if len(set(map(abs, sizes))) == 1 else factor
            constant = inner.constant
            inner = inner.graph.sum([(term, c / factor) for term, c in inner.terms])
        function = _registered(inner)
        if function is None:
            if not self.fuse or inner.text is None or isinstance(inner, Variable):
                return None
            try:
                function = composite(f"{PREFIX} {inner.text}")
            except ArgumentError:  # kinks that cannot be placed exactly
                return None
        argument = self.form(scalar).scaled(a, b)
        text = self.graph.sum([(scalar, a)], b).short()
        return self.emit.apply(argument, function, node.short(), text).scaled(factor, constant)

    # -- sums

    def _sum(self, node: Sum) -> Form:
        out = Form(constant=node.constant)
        loose = list(node.terms)
        for scalar, group in self._scalar_groups(node) if self.fuse else ():
            fused = self._fused(self.graph.sum(group), scalar)
            if fused is not None:
                out = out.plus(fused)
                loose = [pair for pair in loose if pair not in group]
        for term, coefficient in arranged(self.graph, self.cuts, loose, self.forms):
            out = out.plus(self.form(term), coefficient)
        return out

    def _scalar_groups(self, node: Sum) -> list[tuple[Expr, Factors]]:
        """Terms of one scalar, where bringing them together saves an application."""
        groups: dict[Expr, Factors] = {}
        for term, coefficient in node.terms:
            scalar = self.cuts.cut(term)
            assert scalar is not None, "a term of a sum is no number"
            groups.setdefault(scalar, []).append((term, coefficient))
        new = {s: [t for t, _ in group if t is not s and t not in self.forms] for s, group in groups.items()}
        return [(scalar, group) for scalar, group in groups.items() if len(new[scalar]) > 1]

    # -- products

    def _product(self, node: Product) -> Form:
        if len(node.factors) == 1:
            ((base, p),) = node.factors
            return self.emit.apply(self.form(base), power(float(p)), node.short(), base.short())
        coefficient = Fraction(1)
        heap: list[tuple[int, int, int]] = []
        parts = self._parts(node)
        for k, part in enumerate(parts):
            form = self.form(part)
            lead = form.lead()
            coefficient *= lead
            value = self.emit.value(form.scaled(1 / lead), part.short())
            heapq.heappush(heap, (self.emit.depth[value], value, k))
        while True:  # the two least deep values first, so that the product is as shallow as it can be
            (_, left, i), (_, right, j) = heapq.heappop(heap), heapq.heappop(heap)
            parts.append(self.graph.product([(parts[i], 1), (parts[j], 1)]))
            form = self.emit.product(left, right, parts[-1].short())
            if not heap:
                return form.scaled(coefficient)
            value = next(iter(form.values))
            heapq.heappush(heap, (self.emit.depth[value], value, len(parts) - 1))

    def _parts(self, node: Product) -> list[Expr]:
        """At least two factors: those of one scalar together, bare ones with one exponent under one power."""
        groups = self.cuts.groups(node)
        if self.fuse:
            self._share_exponentials(groups)
        if len(groups) == 1:  # a function of one scalar that is no composite
            return [self.graph.product([factor]) for factor in node.factors]
        parts: list[Expr] = []
        bare: dict[Fraction, Factors] = {}
        for group in groups.values():
            if len(group) == 1 and group[0][1] != 1 and is_bare(self.graph, self.cuts, group[0][0]):
                bare.setdefault(group[0][1], []).append(group[0])
            else:
                parts.append(self.graph.product(group))
        for p, factors in bare.items():
            whole_line = p.denominator == 1 or all(base.range[0] >= 0 for base, _ in factors)
            together = whole_line and (len(bare) > 1 or bool(parts))
            parts += [self.graph.product(factors)] if together else [self.graph.product([f]) for f in factors]
        return parts

    def _share_exponentials(self, groups: dict[Expr, Factors]) -> None:
        """x exp(-x**2 - y) as (x exp(-x**2)) exp(-y): what bends in a scalar that has a group of its own goes there."""
        for scalar, factors in list(groups.items()):
            ((base, p),) = factors if len(factors) == 1 else ((scalar, Fraction(1)),)
            if not isinstance(base, Call) or base.function.name != "exp" or not isinstance(base.argument, Sum):
                continue
            rest: Factors = []
            moved: dict[Expr, Factors] = {}
            for term, c in base.argument.terms:
                home = self.cuts.cut(term)
                if home in groups and home is not scalar and term is not home:
                    moved.setdefault(home, []).append((term, c))
                else:
                    rest.append((term, c))
            for home, terms in moved.items():
                groups[home].append((self.graph.call("exp", self.graph.sum(terms)), p))
            if moved:
                del groups[scalar]
                left = self.graph.call("exp", self.graph.sum(rest, base.argument.constant))
                kept = self.cuts.cut(left)
                if kept is not None:
                    groups.setdefault(kept, []).append((left, p))


def univariate(graph: Graph, node: Expr, scalar: Expr) -> tuple[Expr, Fraction, Fraction]:
    """(f, a, b) with node = f(a * scalar + b), f an expression in the variable y of a graph of its own."""
    own = Graph({VARIABLE: WHOLE})
    y = own.variable(VARIABLE)
    replace: dict[Expr, Expr] = {scalar: y}
    for part in reachable([node]):
        if isinstance(part, (Sum, Product)) and part is not scalar:
            base, a, b = primitive(graph, part)
            if base is scalar and isinstance(part, Product):
                replace[part] = own.product([(y, a)])
            elif base is scalar:
                replace[part] = own.sum([(y, settled(a))], settled(b))
    inner = rebuilt(own, [node], settled, replace, split=lambda part: extracted(part, scalar))[0]
    parents = [part for part in reachable([inner]) if y in part.children]
    if len(parents) == 1 and parents[0] is not inner:
        line = affine(parents[0], y)
        if line is not None:
            return rebuilt(own, [inner], settled, {parents[0]: y})[0], *line
    return inner, Fraction(1), Fraction(0)


def _registered(node: Expr) -> Univariate | None:
    """The registered function that an expression in y is, if it is one."""
    if isinstance(node, Call) and isinstance(node.argument, Variable):
        return node.function
    if node.text in _KNOWN:
        return get(_KNOWN[node.text])
    if isinstance(node, Product) and len(node.factors) == 1 and isinstance(node.factors[0][0], Variable):
        return power(float(node.factors[0][1]))
    return None
