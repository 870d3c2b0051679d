"""From expressions to a program of few operations (mathematics H1, items 1, 2 and 9).

*Cuts*: on which single scalar does an expression depend? The cut of a node is the deepest expression s such that the
node is a function of s alone: a variable, a linear form up to scale and offset, a monomial up to a power.
sin(2x + 2y) + cos(x + y) depends on x + y only, and 1/sqrt(1 - v**2/c**2) on v/c only. A node that mixes several
scalars is its own cut.

- Fusion: what depends on one scalar becomes one application of a composite function.
- Monomials are grouped by scalar, factors of one exponent share one power, and the rest is multiplied in balance.
- Sums take out perfect squares, differences of squares and common factors, so that they need few products.
- Affine parts are merged, exactly, into the operations that read them; none is emitted singly.

Writings: "product" as above; "log" writes monomials of three and more positive factors as exp(sum of logarithms),
exp(u)*exp(v) as exp(u + v);
"plain" fuses nothing beyond the functions of the registry and takes roots of factors one by one; "chord" writes
u**2 + v**2 - 2*u*v*cos(t) as (u - v)**2 + (2*sqrt(u*v)*sin(t/2))**2, and u**2 + v**2 + 2*u*v*w with |w| <= 1 as
(u + v*w)**2 + (v*sqrt(1 - w**2))**2, which round little where they are small;
"softplus" writes log(exp(u) + exp(v)) as v + softplus(u - v) and exp(u)/(exp(u) + exp(v)) as sigmoid(u - v), whose
parts are no larger than u and v; "ratio" divides a sum by one of its terms where a function of one ratio is left,
x**4/(k**4 + x**4) = (x/k)**4/(1 + (x/k)**4), moves powers of a ratio to the function of it where both are smaller then,
n*log(1 + r/n) = r*log(1 + r/n)/(r/n), and writes u + u*v as u*(1 + v); "root" takes roots of the factors of a sum,
1 - u**2/v**2 = (v - u)*(v + u)/v**2, of which the first rounds little where it is small, and writes roots of sums of
positive terms as a length to some power, (u**3 + v**3)**(1/3) = sqrt((u**1.5)**2 + (v**1.5)**2)**(2/3); "fine" is
"product" with powers from 0 that are nearer to what they stand for (`Graph.power`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Literal, get_args

import numpy as np

from ...box import Box
from ...errors import ArgumentError, DomainError
from ...expressions.composite import VARIABLE, affine, composed
from ...expressions.constants import LARGEST_EXPONENT, Inexact, rounded
from ...expressions.expression import Call, Expr, Graph, Monomial, Number, Sum, Terms, Variable, reachable, rebuilt
from ...expressions.interval import WHOLE
from ...functions.registry import enclose, get, power
from ...functions.univariate import Univariate
from ...programs.affine import Affine, Column, fold_affine
from ...programs.ops import Apply, Constant, Input, Linear
from ...programs.program import Builder, Program

Factors = list[tuple[Expr, Fraction]]


class Cuts:
    """Cuts of the nodes of one graph, and the functions that nodes are of them, remembered."""

    def __init__(self, graph: Graph, whole: bool = False):
        """With `whole` exponents alone, the root of a product is no function of the product: it is taken apart."""
        self.graph, self.whole = graph, whole
        self._known: dict[Expr, Expr | None] = {}
        self._functions: dict[tuple[Expr, Expr], tuple[Expr, Fraction, Fraction]] = {}
        self._roots: dict[Expr, Expr] = {}

    def root(self, node: Expr) -> Expr | None:
        """The root of u, where u may be 0 and is divided by: sin(r)/r for r = sqrt(u) is smooth as a function of r."""
        if node not in self._roots and any(base is node for base, _ in self.graph.inverted):
            root = self.graph.product([(node, Fraction(1, 2))])
            if isinstance(root, Monomial) and root.factors == ((node, Fraction(1, 2)),):
                self._roots[node] = root
        return self._roots.get(node)

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
        if isinstance(node, Monomial):
            halves = [root for base, p in node.factors if p.denominator == 2 and (root := self.root(base)) is not None]
            if halves == [node]:
                return node
            below |= set(halves)
        below -= {square for square, root in self._roots.items() if root in below}  # functions of it are of its root
        if len(below) == 1:
            return below.pop()
        if isinstance(node, Monomial):
            absorbing = [s for s in below if isinstance(s, Monomial) and _rest_depends_on(self, node, s)]
            if absorbing:
                return absorbing[0]
        scalar = primitive(self.graph, node, self.whole)[0]
        self._known[scalar] = scalar
        return scalar

    def function(self, node: Expr, scalar: Expr) -> tuple[Expr, Fraction, Fraction]:
        """(f, a, b) with node = f(a * scalar + b), f an expression in the variable y of a graph of its own."""
        if (node, scalar) not in self._functions:
            self._functions[node, scalar] = _univariate(self.graph, node, scalar, self.whole)
        return self._functions[node, scalar]

    def groups(self, node: Monomial) -> dict[Expr, Factors]:
        """The factors of a product by their scalar; powers of a monomial that is one of the scalars belong to it."""
        groups: dict[Expr, Factors] = {}
        for base, p in node.factors:
            scalar = self.cut(base)
            assert scalar is not None, "a base of a product is no number"
            groups.setdefault(scalar, []).append((base, p))
        for monomial in [s for s in groups if isinstance(s, Monomial)]:
            held = extracted(node, monomial)
            if held and held[0][0] is monomial and all(len(groups.get(b, ())) == 1 for b in monomial.children):
                groups[monomial].append(held[0])
                for base in monomial.children:
                    del groups[base]
        return groups


def extracted(node: Monomial, monomial: Expr) -> Terms:
    """The factors of the product with the power of the monomial that they hold taken out as one, if they hold one."""
    if not isinstance(monomial, Monomial) or monomial is node:
        return node.factors
    held = dict(node.factors)
    ratios = {held.get(base, Fraction(0)) / p for base, p in monomial.factors}
    ratio = ratios.pop() if len(ratios) == 1 else Fraction(0)
    if not ratio or ratio.denominator != 1:
        return node.factors
    return ((monomial, ratio), *((base, p) for base, p in node.factors if base not in monomial.children))


def _rest_depends_on(cuts: Cuts, node: Monomial, scalar: Monomial) -> bool:
    parts = extracted(node, scalar)
    return parts is not node.factors and all(b is scalar or cuts.cut(b) is scalar for b, _ in parts)


def primitive(graph: Graph, node: Expr, whole: bool = False) -> tuple[Expr, Fraction, Fraction]:
    """(s, a, b): a sum is a * s + b, a product s ** a (b is 0); nodes that differ in a and b only have the same s. With
    `whole`, a is a whole number for products."""
    if isinstance(node, Sum):
        lead = node.terms[0][1]
        return graph.sum([(term, c / lead) for term, c in node.terms]), lead, node.constant
    if isinstance(node, Monomial):
        content = _content([p for _, p in node.factors])
        if content.denominator != 1 and (whole or any(base.range[0] < 0 for base in node.children)):
            content = Fraction(1)
        if max(abs(p) for _, p in node.factors) > LARGEST_EXPONENT * content:  # x * y**1.2345 as its 2,000th root
            content = Fraction(1)
        if all(p < 0 for _, p in node.factors):
            content = -content
        inner = graph.product([(base, p / content) for base, p in node.factors])
        if isinstance(inner, Monomial):
            return inner, content, Fraction(0)
    return node, Fraction(1), Fraction(0)


def _content(exponents: list[Fraction]) -> Fraction:
    """The largest rational of which all exponents are whole multiples."""
    bottom = math.lcm(*(p.denominator for p in exponents))
    return Fraction(math.gcd(*(int(p * bottom) for p in exponents)), bottom)


_MOST_TERMS = 300  # a longer sum is taken as it is: the search for factors is quadratic in its length


def arranged(graph: Graph, cuts: Cuts, terms: Sequence[tuple[Expr, Fraction]], known: Container[Expr]) -> Factors:
    """Terms with the same sum that cost fewer products; what is `known` costs nothing already and stays."""
    if len(terms) > _MOST_TERMS:
        return list(terms)
    loose = [(term, c) for term, c in terms if term not in known]
    kept = [(term, c) for term, c in terms if term in known]
    return kept + common_factors(graph, cuts, squares(graph, cuts, loose))


def squares(graph: Graph, cuts: Cuts, terms: Factors) -> Factors:
    """a u^2 + b u v + c v^2 with b^2 = 4ac as one square; a u^2 - c v^2 as one product of linear forms."""
    rest = dict(terms)
    single = {base: term for term, _ in terms if (base := _squared(graph, cuts, term)) is not None}
    out: Factors = []
    for term, d in terms:
        if not isinstance(term, Monomial) or [p for _, p in term.factors] != [1, 1]:
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
    if isinstance(term, Monomial) and [p for _, p in term.factors] == [2]:
        base = term.children[0]
        return base if is_bare(graph, cuts, base) else None
    return None


def is_bare(graph: Graph, cuts: Cuts, base: Expr) -> bool:
    """Whether the expression is its own scalar, up to scale and offset: no application could be saved on it."""
    return base is cuts.cut(base) or primitive(graph, base, cuts.whole)[0] is cuts.cut(base)


def _root(x: Fraction) -> Fraction | None:
    """The rational square root of a positive rational, if there is one."""
    if isinstance(x, Inexact) or x <= 0:
        return None
    root = Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
    return root if root * root == x else None


def common_factors(graph: Graph, cuts: Cuts, terms: Factors) -> Factors:
    """x*y + x*z as x*(y + z), the most frequent factor first; factors of one scalar count as one."""
    rest = list(terms)
    groups: dict[Expr, list[Expr]] = {}
    while True:
        for term, _ in rest:
            if term not in groups:
                groups[term] = by_scalar(graph, cuts, term) if isinstance(term, Monomial) else []
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
        if not isinstance(product, Monomial) or product in dict(rest):
            return [*rest, *inside]
        rest.append((product, Fraction(1)))


def by_scalar(graph: Graph, cuts: Cuts, node: Monomial) -> list[Expr]:
    """The factors of a product, those of one scalar multiplied together."""
    return [graph.product(group) for group in cuts.groups(node).values()]


#: Of columns of the input, which is value 0, and of other values, which have one column each.
Combination = Affine[Column, Fraction]
_ONE, _HALF = Fraction(1), Fraction(1, 2)


def combined(parts: Iterable[tuple[Column | Combination, Fraction]], constant: Fraction = Fraction(0)) -> Combination:
    """constant + sum of factor * part, exactly."""
    folded = fold_affine(parts, constant, operator.mul)
    return Affine({column: c for column, c in folded.weight.items() if c}, folded.bias)


class Emitter:
    """A program builder for values of width 1, with the depth of each value."""

    def __init__(self, box: Box):
        self.build = Builder(box)
        self.depth: dict[int, int] = {0: 0}

    def value(self, form: Combination, label: str) -> int:
        """The index of a value that equals the combination."""
        if not form.weight:
            value, off = rounded(form.bias)
            return self._settle(self.build.constant([value], label, [off]))
        ((i, c), weight), *more = form.weight.items()
        if not more and weight == 1 and not form.bias:
            return self._settle(i or self.build.column(c))
        return self._settle(self._linear([form], label))

    def _linear(self, forms: list[Combination], label: str) -> int:
        """The combinations side by side, every coefficient and constant rounded once; what that loses is recorded."""
        reads = sorted({i for form in forms for i, _ in form.weight})
        bias, bias_off = (np.array(part) for part in zip(*(rounded(form.bias) for form in forms), strict=True))
        if not reads:
            return self.build.constant(bias, label, bias_off)
        weights, off = ([np.zeros((self.build.width(i), len(forms))) for i in reads] for _ in range(2))
        for k, form in enumerate(forms):
            for (i, c), weight in form.weight.items():
                at = reads.index(i)
                near, far = rounded(weight)
                if not near:  # a weight that is not 0: what is read must be there, to be counted
                    near, far = 2.0**-1074, far + 2.0**-1074
                weights[at][c, k], off[at][c, k] = near, far
        return self.build.linear(list(zip(reads, weights, strict=True)), bias, label, (*off, bias_off))

    def apply(self, form: Combination, function: Univariate, label: str, argument: str) -> Combination:
        return self._result(self.build.apply(self.value(form, argument), function, label))

    def product(self, left: int, right: int, label: str) -> Combination:
        return self._result(self.build.product(min(left, right), max(left, right), label))

    def _result(self, i: int) -> Combination:
        return Affine({(self._settle(i), 0): _ONE}, Fraction(0))

    def _settle(self, i: int) -> int:
        if i not in self.depth:
            op = self.build.ops[i]
            below = max((self.depth[j] for j in op.inputs), default=0)
            self.depth[i] = below + (0 if isinstance(op, (Input, Constant, Linear)) else 1)
        return i

    def program(self, forms: list[Combination], labels: list[str], source: str, several: bool) -> Program:
        if not several:
            return self.build.program(self.value(forms[0], labels[0]), source, ())
        return self.build.program(self._linear(forms, "outputs"), source, (len(forms),))


def applies(program: Program) -> list[str]:
    """The names of the functions that a program applies, for tests and reports."""
    return [op.function.name for op in program.ops if isinstance(op, Apply)]


Writing = Literal["product", "log", "plain", "chord", "softplus", "ratio", "root", "fine"]
WRITINGS: tuple[Writing, ...] = get_args(Writing)
#: Composites that have a name in the registry, and heads of their own.
_KNOWN = {"y*sigmoid(y)": "silu", "y*tanh(softplus(y))": "mish"}


def written(
    cuts: Cuts, roots: Sequence[Expr], box: Box, source: str, several: bool = False, writing: Writing = "product"
) -> Program:
    """The program that computes the expressions; `several` outputs make a last dimension."""
    if writing not in WRITINGS:
        raise ArgumentError(f"writing is one of {', '.join(WRITINGS)}, not {writing!r}")
    if writing == "log":
        roots = with_logarithms(cuts.graph, roots)
    if writing == "softplus":
        roots = with_softplus(cuts.graph, roots)
    if writing == "ratio":
        roots = with_ratios(cuts, roots)
    if writing == "root":
        cuts = Cuts(cuts.graph, whole=True)
        roots = with_roots(cuts.graph, roots)
    writer = _Writer(cuts, box, writing)
    forms = [writer.form(root) for root in roots]
    return writer.emit.program(forms, [root.short() for root in roots], source, several)


def with_logarithms(graph: Graph, roots: Sequence[Expr]) -> list[Expr]:
    """Every product of three and more positive factors as exp(sum of exponent * log(base)), and several exponentials
    as one."""

    def rewrite(node: Expr) -> Expr:
        if not isinstance(node, Monomial):
            return node
        waves = [base for base, p in node.factors if isinstance(base, Call) and base.function.name == "exp" and p == 1]
        if len(waves) > 1:
            total = graph.call("exp", graph.sum([(base.argument, 1) for base in waves if isinstance(base, Call)]))
            return graph.product([(total, 1), *((base, p) for base, p in node.factors if base not in waves)])
        positive = [(base, p) for base, p in node.factors if base.range[0] > 0]
        if len(positive) < 3:
            return node
        logs = graph.sum([(graph.call("log", base), p) for base, p in positive])
        return graph.product([(graph.call("exp", logs), 1), *((b, p) for b, p in node.factors if not b.range[0] > 0)])

    return rebuilt(graph, roots, rewrite=rewrite)


def with_softplus(graph: Graph, roots: Sequence[Expr]) -> list[Expr]:
    """Every logarithm of a sum of exponentials with positive factors as a chain of softplus, and the share of one of
    these as a sigmoid."""

    def rewrite(node: Expr) -> Expr:
        if isinstance(node, Call) and node.function.name == "log":
            parts = _exponents(graph, node.argument)
            return node if parts is None else _chain(graph, [*parts.values()])
        factors = node.factors if isinstance(node, Monomial) else ()
        for base, p in factors:
            parts = _exponents(graph, base) if p == -1 else None
            if parts is None or not isinstance(base, Sum):
                continue
            one = next((term for term, q in factors if q == 1 and term in parts), graph.number(base.constant))
            if one not in parts:
                continue
            mine = parts.pop(one)
            share = graph.call("sigmoid", graph.sum([(mine, _ONE), (_chain(graph, [*parts.values()]), -_ONE)]))
            rest = [(b, q) for b, q in factors if b is not one and b is not base]
            factor = dict(base.terms).get(one, base.constant)
            return graph.sum([(graph.product([(share, _ONE), *rest]), 1 / factor)])
        return node

    return rebuilt(graph, roots, rewrite=rewrite)


def with_ratios(cuts: Cuts, roots: Sequence[Expr]) -> list[Expr]:
    """Every sum below a line or under a root divided by one of its terms, where that leaves a function of one ratio;
    and every u + u*v as u*(1 + v)."""
    graph = cuts.graph

    def rewrite(node: Expr) -> Expr:
        if isinstance(node, Sum):
            return _nested(cuts, node)
        if not isinstance(node, Monomial):
            return node
        parts: Factors = []
        for base, p in node.factors:
            lead = _leading(cuts, base) if isinstance(base, Sum) and (p < 0 or p.denominator != 1) else None
            parts += [(base, p)] if lead is None else [(part, p) for part in lead]
        return graph.product(parts)

    return rebuilt(graph, roots, rewrite=rewrite)


_NEAR = 1e-3  # of its largest value: a sum that may be smaller is one whose root multiplies errors


def with_roots(graph: Graph, roots: Sequence[Expr]) -> list[Expr]:
    """Roots of sums as products of roots of their factors, where these are not negative on the box."""

    def rewrite(node: Expr) -> Expr:
        if not isinstance(node, Monomial):
            return node
        parts: Factors = []
        for base, p in node.factors:
            found = _factored(graph, base) if isinstance(base, Sum) and p.denominator != 1 else None
            good = found is not None and all(factor.range[0] >= 0 for factor, _ in found)
            parts += [(factor, q * p) for factor, q in found] if good and found is not None else [(base, p)]
        return graph.product(parts)

    return rebuilt(graph, roots, rewrite=rewrite)


def _factored(graph: Graph, node: Sum) -> Factors | None:
    """Factors of a sum: a common denominator, what all terms have in common, and the two of a difference of squares
    or of a quadratic polynomial; 1 - cos(v) and cosh(u) - cos(v) as squares of half the arguments. None without any."""
    parts = [(term.factors if isinstance(term, Monomial) else ((term, _ONE),), c) for term, c in node.terms]
    parts += [((), node.constant)] if node.constant else []
    bases = dict.fromkeys(base for factors, _ in parts for base, _ in factors if base.range[0] >= 0)
    common = [(base, min(dict(factors).get(base, Fraction(0)) for factors, _ in parts)) for base in bases]
    common = [(base, q) for base, q in common if q]
    rest = graph.product([(node, 1)])
    if common:
        inverse = [(base, -q) for base, q in common]
        terms = [(graph.product([*factors, *inverse]), c) for factors, c in parts]
        rest = graph.sum(terms)
    found = _squares_apart(graph, rest) or _halves(graph, rest) if isinstance(rest, Sum) else None
    return [*common, *(found or [(rest, _ONE)])] if common or found else None


def _squares_apart(graph: Graph, node: Sum) -> Factors | None:
    """a u^2 - c v^2 as (u - k v)(u + k v) a for k^2 = c/a, and a polynomial of degree 2 by its rational zeros."""
    terms = [*node.terms, *([(graph.number(1), node.constant)] if node.constant else [])]
    if len(terms) == 2:
        (one, a), (two, c) = terms if terms[0][1] > 0 else terms[::-1]
        halves = [_half_whole(graph, term) for term in (one, two)]
        k = _root(-c / a) if a > 0 > c else None
        if k is None or halves[0] is None or halves[1] is None:
            return None
        ends = [(graph.sum([(halves[0], 1), (halves[1], sign * k)]), _ONE) for sign in (-1, 1)]
        return [(graph.number(a), _ONE), *ends] if a != 1 else ends
    if len(node.variables) == 1 and len(node.terms) == 2:
        (y,) = node.variables
        held = {term: c for term, c in node.terms}
        if not {graph.product([(y, 2)]), y} <= held.keys():
            return None
        a, b = held[graph.product([(y, 2)])], held[y]
        root = _root(b * b - 4 * a * node.constant)
        if root is None:
            return None
        ends = []
        for zero in sorted((-b + sign * root) / (2 * a) for sign in (-1, 1)):
            sign = 1 if y.range[0] >= zero else -1  # the one that the factor has on the box
            a *= sign
            ends.append((graph.sum([(y, sign)], -sign * zero), _ONE))
        return [(graph.number(a), _ONE), *ends] if a > 0 else None
    return None


def _halves(graph: Graph, node: Sum) -> Factors | None:
    """b + sum of c cosh(u) - d cos(v) as 2 sum of c sinh(u/2)^2 + d sin(v/2)^2, where the constants add up to 0."""
    left, parts, rest = node.constant, [], []
    for term, c in node.terms:
        factors = term.factors if isinstance(term, Monomial) else ((term, _ONE),)
        waves = {"cosh": ("sinh", c > 0), "cos": ("sin", c < 0)}
        one = next((b for b, q in factors if isinstance(b, Call) and q == 1 and b.function.name in waves), None)
        if isinstance(one, Call) and len(factors) == 1 and waves[one.function.name][1]:
            half = graph.call(waves[one.function.name][0], graph.sum([(one.argument, Fraction(1, 2))]))
            parts.append((graph.product([(half, 2)]), 2 * abs(c)))
            left += c
        else:
            rest.append((term, c))
    return [(graph.sum(parts), _ONE)] if parts and left == 0 and not rest else None


def _half(graph: Graph, term: Expr) -> Expr:
    """u with u^2 = term, of any sign where the term is a square."""
    whole = _half_whole(graph, term)
    return graph.product([(term, Fraction(1, 2))]) if whole is None else whole


def _half_whole(graph: Graph, term: Expr) -> Expr | None:
    """u with u^2 = term, where all its exponents are even."""
    factors = term.factors if isinstance(term, Monomial) else ()
    if isinstance(term, Number):
        return term if term.value == 1 else None
    return graph.product([(b, q / 2) for b, q in factors]) if factors and all(q % 2 == 0 for _, q in factors) else None


def _leading(cuts: Cuts, node: Sum) -> tuple[Expr, Expr] | None:
    """(u, v) with node = u * v, where u is a positive term and v, which is near 1, depends on one ratio alone."""
    graph = cuts.graph
    found: list[tuple[float, tuple[Expr, Expr]]] = []
    for lead, _ in node.terms if cuts.cut(node) is node else ():
        if lead.range[0] > 0:
            parts = [(graph.product([(term, 1), (lead, -1)]), c) for term, c in node.terms]
            rest = graph.sum([*parts, (graph.product([(lead, -1)]), node.constant)])
            if cuts.cut(rest) is not rest and math.isfinite(rest.range[1]):
                found.append((rest.range[1] - rest.range[0], (lead, rest)))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _nested(cuts: Cuts, node: Sum) -> Expr:
    """u + u*v + ... as u*(1 + v) + ..., for the first u that is a term of its own and a factor of others."""
    graph = cuts.graph
    for lead, c in node.terms:
        mixed = [(t, d) for t, d in node.terms if isinstance(t, Monomial) and cuts.cut(t) is not cuts.cut(lead)]
        taken = [(term, d) for term, d in mixed if dict(term.factors).get(lead, 0) >= 1]
        if taken:
            inner = graph.sum([(graph.product([(term, 1), (lead, -1)]), d) for term, d in taken], c)
            rest = [pair for pair in node.terms if pair[0] is not lead and pair not in taken]
            return graph.sum([(graph.product([(lead, 1), (inner, 1)]), 1), *rest], node.constant)
    return node


def _exponents(graph: Graph, node: Expr) -> dict[Expr, Expr] | None:
    """The terms of a sum of exponentials with positive factors, each with its logarithm; None for another node."""
    if not isinstance(node, Sum) or node.constant < 0 or any(c <= 0 for _, c in node.terms):
        return None
    found: dict[Expr, Expr] = {}
    for term, c in node.terms:
        if not isinstance(term, Call) or term.function.name != "exp":
            return None
        log = [] if c == 1 else [(graph.call("log", graph.number(c)), _ONE)]
        found[term] = graph.sum([(term.argument, _ONE), *log])
    if node.constant:
        one = graph.number(node.constant)
        found[one] = graph.call("log", one)
    return found if len(found) > 1 else None


def _chain(graph: Graph, parts: Sequence[Expr]) -> Expr:
    """log(exp(u) + exp(v) + ...) for several numbers u, v, ..."""
    found = parts[0]
    for part in parts[1:]:
        found = graph.sum([(part, _ONE), (graph.call("softplus", graph.sum([(found, _ONE), (part, -_ONE)])), _ONE)])
    return found


class _Writer:
    def __init__(self, cuts: Cuts, box: Box, writing: Writing):
        self.graph, self.cuts, self.fuse = cuts.graph, cuts, writing != "plain"
        self.chords, self.ratios, self.lengths = writing == "chord", writing == "ratio", writing == "root"
        self.emit = Emitter(box)
        self.columns = {name: j for j, name in enumerate(box.names or ())}
        self.forms: dict[Expr, Combination] = {}

    def form(self, node: Expr) -> Combination:
        """The node as an affine combination of values; emits the operations it needs."""
        if node not in self.forms:
            self.forms[node] = self._form(node)
        return self.forms[node]

    def _form(self, node: Expr) -> Combination:
        match node:
            case Number():
                return Affine({}, node.value)
            case Variable():
                return Affine({(0, self.columns[node.name]): _ONE}, Fraction(0))
            case Sum():
                return self._sum(node)
        length = self._length(node) if self.lengths else None
        if length is not None:
            return length
        scalar = self.cuts.cut(node)
        if scalar is not None and scalar is not node and not self._better_apart(node, scalar):
            fused = self._fused(node, scalar)
            if fused is not None:
                return fused
        if isinstance(node, Call):
            return self.emit.apply(self.form(node.argument), node.function, node.short(), node.argument.short())
        assert isinstance(node, Monomial)
        return self._product(node)

    # -- one scalar

    def _better_apart(self, node: Expr, scalar: Expr) -> bool:
        """A bare power of a quotient: x**2/y**2 as two powers and a product is as cheap as (x/y)**2 and less deep.
        Roots of factors err less than the root of a product that is rounded near 0."""
        if not isinstance(node, Monomial) or primitive(self.graph, node, self.cuts.whole)[0] is not scalar:
            return False
        if not self.fuse and _rooted(node):
            return True
        return isinstance(scalar, Monomial) and len({p for _, p in node.factors}) > 1

    def _fused(self, node: Expr, scalar: Expr) -> Combination | None:
        """The node as one function of the scalar, or None where it cannot be one."""
        inner, a, b = self.cuts.function(node, scalar)
        factor, constant = Fraction(1), Fraction(0)
        if isinstance(inner, Sum):
            # A constant, and a factor common to all terms, belong to the affine part of what follows.
            sizes = {c for _, c in inner.terms}
            factor = sizes.pop() if len(sizes) == 1 else abs(sizes.pop()) if len(set(map(abs, sizes))) == 1 else factor
            constant = inner.constant
            inner = inner.graph.sum([(term, c / factor) for term, c in inner.terms])
        function = _registered(inner)
        if function is None:
            if not self.fuse or isinstance(inner, Variable):
                return None
            try:
                function = composed(inner)
            except ArgumentError:  # kinks that cannot be placed exactly, or no name that could be read back
                return None
        argument = combined([(self.form(scalar), a)], b)
        text = self.graph.sum([(scalar, a)], b).short()
        return combined([(self.emit.apply(argument, function, node.short(), text), factor)], constant)

    # -- sums

    def _sum(self, node: Sum) -> Combination:
        parts: list[tuple[Combination, Fraction]] = []
        loose = list(node.terms)
        for term, _ in node.terms if self.chords else ():
            chord = self._chord(dict(loose), term) or self._completed(dict(loose), term)
            if chord is not None:
                parts += chord[0]
                loose = [pair for pair in loose if pair[0] not in chord[1]]
        for scalar, group in self._scalar_groups(node) if self.fuse else ():
            fused = self._fused(self.graph.sum(group), scalar)
            if fused is not None:
                parts.append((fused, _ONE))
                loose = [pair for pair in loose if pair not in group]
        for term, coefficient in arranged(self.graph, self.cuts, loose, self.forms):
            parts.append((self.form(term), coefficient))
        return combined(parts, node.constant)

    def _chord(
        self, terms: dict[Expr, Fraction], term: Expr
    ) -> tuple[list[tuple[Combination, Fraction]], set[Expr]] | None:
        """a u^2 + c v^2 + d u v cos(t) with d^2 = 4 a c and u, v >= 0, as a (u - k v)^2 + 4 a k (sqrt(u v) w)^2, where
        w is sin(t/2) for d < 0 and cos(t/2) for d > 0; and the terms that this takes. None for another term."""
        d = terms.get(term)
        if d is None or not isinstance(term, Monomial) or [p for _, p in term.factors] != [1, 1, 1]:
            return None
        waves = [b for b in term.children if isinstance(b, Call) and b.function.name == "cos"]
        if len(waves) != 1:
            return None
        u, v = (base for base in term.children if base is not waves[0])
        ends = [self.graph.product([(base, 2)]) for base in (u, v)]
        if not (u.range[0] >= 0 and v.range[0] >= 0 and all(end in terms for end in ends)):
            return None
        a, c = (terms[end] for end in ends)
        k = _root(c / a)
        if k is None or d * d != 4 * a * c:
            return None
        half = self.graph.call("sin" if d * a < 0 else "cos", self.graph.sum([(waves[0].argument, Fraction(1, 2))]))
        across = self.graph.product([(u, Fraction(1, 2)), (v, Fraction(1, 2)), (half, 1)])
        square = self.emit.apply(self.form(across), power(2.0), f"({across.short()})**2", across.short())
        along = self.form(self.graph.product([(self.graph.sum([(u, 1), (v, -k)]), 2)]))
        return [(along, a), (square, 4 * a * k)], {term, *ends}

    def _completed(
        self, terms: dict[Expr, Fraction], term: Expr
    ) -> tuple[list[tuple[Combination, Fraction]], set[Expr]] | None:
        """a u^2 + c v^2 + d u v w with d^2 w^2 <= 4 a c as a (u + d/(2a) v w)^2 + (v g(w))^2 for g = sqrt(c - d^2 w^2 /
        (4a)), or, where a and c are negative, less both; and the terms that this takes. None for another term."""
        if term not in terms or not isinstance(term, Monomial) or any(p != 1 for _, p in term.factors):
            return None
        held = {base: (base, 1) for base in term.children} | {-base: (base, -1) for base in term.children}
        squared = [t for t in terms if isinstance(t, Monomial) and all(p == 2 for _, p in t.factors)]
        inside = [t for t in squared if all(base in held for base in t.children)]
        for first, second in combinations(inside, 2):
            met = [held[base] for base in (*first.children, *second.children)]
            left = [base for base in term.children if base not in {base for base, _ in met}]
            if not left or len(met) + len(left) > len(term.children):
                continue
            if terms[first] * terms[second] < 0:
                continue
            turn = 1 if terms[first] > 0 else -1
            d = turn * terms[term] * math.prod(sign for _, sign in met)
            w, a, c = self.graph.product([(b, 1) for b in left]), turn * terms[first], turn * terms[second]
            rest = self.graph.sum([(self.graph.product([(w, 2)]), -d * d / (4 * a))], c)
            if not rest.range[0] > 0:
                continue
            u, v = (self.graph.product([(b, 1) for b in t.children]) for t in (first, second))
            along = self.graph.sum([(u, 1), (self.graph.product([(v, 1), (w, 1)]), d / (2 * a))])
            across = self.graph.product([(v, 1), (self.graph.product([(rest, Fraction(1, 2))]), 1)])
            parts = [
                (self.emit.apply(self.form(part), power(2.0), f"({part.short()})**2", part.short()), factor)
                for part, factor in ((along, turn * a), (across, turn * _ONE))
            ]
            return parts, {term, first, second}
        return None

    def _scalar_groups(self, node: Sum) -> list[tuple[Expr, Factors]]:
        """Terms of one scalar, where bringing them together saves an application."""
        groups: dict[Expr, Factors] = {}
        for term, coefficient in node.terms:
            scalar = self.cuts.cut(term)
            assert scalar is not None, "a term of a sum is no number"
            groups.setdefault(scalar, []).append((term, coefficient))
        new = {s: [t for t, _ in group if t is not s and t not in self.forms] for s, group in groups.items()}
        return [(scalar, group) for scalar, group in groups.items() if len(new[scalar]) > 1]

    def _length(self, node: Expr) -> Combination | None:
        """(a u + c v + b)**q with positive terms as the length of (sqrt(a u), sqrt(c v), sqrt(b)) to the power 2 q,
        where the sum may be 0: the length errs much less there than the root of what the sum errs. None for another."""
        if not isinstance(node, Monomial) or len(node.factors) != 1:
            return None
        ((base, q),) = node.factors
        if not isinstance(base, Sum) or not 0 < q < 1 or base.range[0] > _NEAR * base.range[1] or base.constant < 0:
            return None
        if len(base.terms) < 2 or any(c < 0 or term.range[0] < 0 for term, c in base.terms):
            return None
        parts = []
        for term, c in base.terms:
            half = _half(self.graph, term)
            form = self._product(half) if isinstance(half, Monomial) else self.form(half)  # no composite with abs in it
            square = self.emit.apply(form, power(2.0), term.short(), half.short())
            parts.append((square, c))
        return self.emit.apply(combined(parts, base.constant), power(q), node.short(), base.short())

    # -- products

    def _product(self, node: Monomial) -> Combination:
        if len(node.factors) == 1:
            ((base, p),) = node.factors
            return self.emit.apply(self.form(base), power(p), node.short(), base.short())
        coefficient = Fraction(1)
        heap: list[tuple[int, int, int]] = []
        parts = self._parts(node)
        for k, part in enumerate(parts):
            form = self.form(part)
            lead = next(iter(form.weight.values())) if len(form.weight) == 1 and not form.bias else _ONE
            coefficient *= lead
            value = self.emit.value(combined([(form, 1 / lead)]), part.short())
            heapq.heappush(heap, (self.emit.depth[value], value, k))
        while True:  # the two least deep values first, so that the product is as shallow as it can be
            (_, left, i), (_, right, j) = heapq.heappop(heap), heapq.heappop(heap)
            parts.append(self.graph.product([(parts[i], 1), (parts[j], 1)]))
            form = self.emit.product(left, right, parts[-1].short())
            if not heap:
                return combined([(form, coefficient)])
            ((value, _),) = form.weight
            heapq.heappush(heap, (self.emit.depth[value], value, len(parts) - 1))

    def _parts(self, node: Monomial) -> list[Expr]:
        """At least two factors: those of one scalar together, bare ones with one exponent under one power."""
        groups = self.cuts.groups(node)
        if self.fuse:
            self._share_exponentials(groups)
        if self.ratios:
            groups = self._shifted(groups)
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
            apart = (self.lengths or not self.fuse) and p.denominator != 1
            together = whole_line and (len(bare) > 1 or bool(parts)) and not apart
            parts += [self.graph.product(factors)] if together else [self.graph.product([f]) for f in factors]
        return parts

    def _shifted(self, groups: dict[Expr, Factors]) -> dict[Expr, Factors]:
        """f(s) u as (f(s) s**k) (u s**-k), where a base of the ratio s leaves u and the factors are smaller together:
        tables and products err in proportion to the sizes of their values."""
        for scalar, group in groups.items():
            if not isinstance(scalar, Monomial) or all(base is scalar for base, _ in group):
                continue
            others = [factors for other, factors in groups.items() if other is not scalar]
            rest = self.graph.product(itertools.chain.from_iterable(others))
            held = dict(rest.factors) if isinstance(rest, Monomial) else {rest: _ONE}
            found = [(self._size(scalar, group) * _reach(rest), groups)]
            for k in sorted({held[base] / p for base, p in scalar.factors if base in held}):
                left = self.graph.product([(rest, 1), (scalar, -k)])
                own = self.cuts.cut(left)
                if own is None:
                    continue
                moved = self.cuts.groups(left) if isinstance(left, Monomial) else {own: [(left, _ONE)]}
                if k.denominator == 1 and scalar not in moved:
                    parts = [*group, (scalar, k)]
                    found.append((self._size(scalar, parts) * _reach(left), {**moved, scalar: parts}))
            best = min(found, key=lambda pair: pair[0])[1]
            if best is not groups:
                return best
        return groups

    def _size(self, scalar: Expr, group: Factors) -> float:
        """The largest size of a product of functions of a scalar; infinite where that cannot be told."""
        node = self.graph.product(group)
        inner, a, b = self.cuts.function(node, scalar)
        try:
            low, high = self.graph.sum([(scalar, a)], b).range
            found = enclose(_registered(inner) or composed(inner), low, high)
        except (ArgumentError, DomainError):
            return math.inf
        return max(map(abs, found))

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


def _reach(node: Expr) -> float:
    """The largest size of an expression, as far as intervals tell."""
    return max(map(abs, node.range))


def _rooted(node: Monomial) -> bool:
    return any(p.denominator != 1 and p > 0 for _, p in node.factors)


def _univariate(graph: Graph, node: Expr, scalar: Expr, whole: bool) -> tuple[Expr, Fraction, Fraction]:
    own = Graph({VARIABLE: WHOLE})
    y = own.variable(VARIABLE)
    replace: dict[Expr, Expr] = {scalar: y}
    square = scalar.children[0] if isinstance(scalar, Monomial) and [p for _, p in scalar.factors] == [_HALF] else None
    of_square = None if square is None else primitive(graph, square, whole)
    if square is not None:
        replace[square] = own.product([(y, 2)])
    for part in reachable([node]):
        if isinstance(part, (Sum, Monomial)) and part is not scalar and part is not square:
            base, a, b = primitive(graph, part, whole)
            if base is scalar and isinstance(part, Monomial):
                replace[part] = own.product([(y, a)])
            elif base is scalar:
                replace[part] = own.sum([(y, a)], b)
            elif square is not None and of_square is not None and base is of_square[0] and isinstance(part, Sum):
                share = a / of_square[1]
                replace[part] = own.sum([(replace[square], share)], b - share * of_square[2])
    inner = rebuilt(own, [node], replace, split=lambda part: extracted(part, scalar))[0]
    parents = [part for part in reachable([inner]) if y in part.children]
    if len(parents) == 1 and parents[0] is not inner:
        line = affine(parents[0], y)
        if line is not None:
            return rebuilt(own, [inner], {parents[0]: y})[0], *line
    return inner, Fraction(1), Fraction(0)


def _registered(node: Expr) -> Univariate | None:
    """The registered function that an expression in y is, if it is one."""
    if isinstance(node, Call) and isinstance(node.argument, Variable):
        return node.function
    if node.text in _KNOWN:
        return get(_KNOWN[node.text])
    if isinstance(node, Monomial) and len(node.factors) == 1 and isinstance(node.factors[0][0], Variable):
        return power(node.factors[0][1])
    return None
