"""`Graph`: makes the nodes of expressions in normal form and shares equal ones (mathematics H1, item 1).

Sums are flattened with their coefficients collected, products with their exponents merged, constants folded. The graph
knows the box of its variables; rewrites that need a sign (powers distributed over non-negative factors, the logarithm
of a product, abs, max) are made where the ranges prove it, and only there.

The same expressions in another graph, with constants or nodes replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from ..errors import ArgumentError
from ..functions.registry import get
from ..functions.univariate import NON_NEGATIVE, POSITIVE, Domain, Univariate
from .constants import LARGEST_EXPONENT, constant_call, constant_power, constant_text, rational, within_range
from .expression import Call, Expr, Number, Product, Sum, Terms, Variable
from .interval import WHOLE, Interval, added, called, point, powered, product, scaled
from .special import POWERS, SPECIAL, words

LARGEST_DEPTH = 150
LARGEST_COUNT = 20_000
_RANK: dict[type[Expr], int] = {Variable: 0, Product: 1, Call: 2, Sum: 3, Number: 4}
_EVEN = ("cos", "cosh", "abs")
_ODD = ("sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf", "hardtanh", "softsign")
_LARGEST_SHIFT = 20  # exp(u + c) = exp(c) exp(u): beyond, exp(u) might leave float32 where exp(u + c) does not
N = TypeVar("N", bound=Expr)


@dataclass(frozen=True)
class Partial:
    """A place where a formula, as written, is undefined unless `argument` lies in `domain`."""

    text: str
    argument: Expr
    domain: Domain


class Graph:
    """A factory of shared expression nodes over named variables with their intervals.

    >>> graph = Graph({"x": (0.0, 2.0), "y": (-1.0, 1.0)})
    >>> x, y = graph.variable("x"), graph.variable("y")
    >>> x * y is y * x, x - x, (4 * x**2 * y) / (2 * x), (x * x) ** 0.5
    (True, Expr(0), Expr(2*x*y), Expr(x))
    """

    def __init__(self, intervals: Mapping[str, Interval]):
        self.intervals = {name: (float(lo), float(hi)) for name, (lo, hi) in intervals.items()}
        self.partial: list[Partial] = []
        self._nodes: dict[tuple[object, ...], Expr] = {}

    # -- making nodes

    def _node(self, node: N) -> N:
        key = (type(node).__name__, *node.fields())
        found: Any = self._nodes.get(key)
        if found is not None:
            return found
        if len(self._nodes) >= LARGEST_COUNT:
            raise ArgumentError(f"the formula has more than {LARGEST_COUNT} different subexpressions")
        node.finish(self, len(self._nodes), _RANK[type(node)])
        if node.depth > LARGEST_DEPTH:
            raise ArgumentError(f"the formula is nested more than {LARGEST_DEPTH} deep")
        node.range = self._range(node)
        self._nodes[key] = node
        return node

    def _range(self, node: Expr) -> Interval:
        match node:
            case Number():
                return point(node.value)
            case Variable():
                return self.intervals.get(node.name, WHOLE)
            case Sum():
                total = point(node.constant)
                for term, coefficient in node.terms:
                    total = added(total, scaled(term.range, coefficient))
                return total
            case Product():
                out = (1.0, 1.0)
                for base, exponent in node.factors:
                    out = product(out, powered(base.range, exponent))
                return out
            case Call():
                return called(node.function, node.argument.range)
        raise AssertionError(f"no range for {type(node).__name__}")

    def number(self, value: object) -> Number:
        return self._node(Number(rational(value)))

    def variable(self, name: str) -> Variable:
        return self._node(Variable(name))

    def sum(self, terms: Iterable[tuple[Expr, int | Fraction]], constant: Fraction = Fraction(0)) -> Expr:
        """constant + sum of coefficient * node, flattened and collected."""
        collected: dict[Expr, Fraction] = {}
        for node, coefficient in terms:
            match node:
                case Number():
                    constant += coefficient * node.value
                case Sum():
                    constant += coefficient * node.constant
                    for term, inner in node.terms:
                        collected[term] = collected.get(term, Fraction(0)) + coefficient * inner
                case _:
                    collected[node] = collected.get(node, Fraction(0)) + coefficient
        kept = [(node, within_range(Fraction(c))) for node, c in collected.items() if c]
        if not kept:
            return self.number(within_range(constant))
        if len(kept) == 1 and kept[0][1] == 1 and not constant:
            return kept[0][0]
        return self._node(Sum(_ordered(kept), within_range(constant)))

    def product(self, factors: Iterable[tuple[Expr, int | Fraction]], coefficient: Fraction = Fraction(1)) -> Expr:
        """coefficient * product of node ** exponent, merged."""
        collected: dict[Expr, Fraction] = {}
        for node, exponent in factors:
            coefficient *= self._split(node, Fraction(exponent), collected)
        coefficient *= self._merge_exponentials(collected)
        if not coefficient:
            return self.number(0)
        kept = [(node, _exponent(p)) for node, p in collected.items() if p]
        if not kept:
            return self.number(within_range(coefficient))
        single = kept[0][0] if len(kept) == 1 and kept[0][1] == 1 else self._node(Product(_ordered(kept)))
        return single if coefficient == 1 else self.sum([(single, coefficient)])

    def _split(self, node: Expr, p: Fraction, into: dict[Expr, Fraction]) -> Fraction:
        """Merge node ** p into `into`; returns the constant that comes off."""
        whole, even = p.denominator == 1, p.denominator == 1 and p % 2 == 0
        match node:
            case Number():
                return constant_power(node.value, p)
            case Sum() if node.scale is not None and p != 0 and (whole or node.scale > 0):
                return constant_power(node.scale, p) * self._split(node.terms[0][0], p, into)
            case Sum() if whole and p < 0 and _is_logistic(node):  # 1/(1 + exp(v)) = sigmoid(-v)
                inner = node.children[0]
                assert isinstance(inner, Call)
                return constant_power(node.constant, p) * self._split(self.call("sigmoid", -inner.argument), -p, into)
            case Sum() if even and node.terms[0][1] < 0:
                node = self.sum([(node, -1)])
            case Product():
                return self._split_product(node, p, into)
            case Call() if node.function.name == "exp":
                node, p = self.call("exp", self.sum([(node.argument, p)])), Fraction(1)
                if isinstance(node, Number):
                    return node.value
            case Call() if node.function.name == "abs" and even:
                return self._split(node.argument, p, into)
        into[node] = into.get(node, Fraction(0)) + p
        return Fraction(1)

    def _split_product(self, node: Product, p: Fraction, into: dict[Expr, Fraction]) -> Fraction:
        out, rest = Fraction(1), []
        for base, exponent in node.factors:
            if p.denominator == 1 or base.range[0] >= 0:
                out *= self._split(base, exponent * p, into)
            elif exponent.denominator == 1 and exponent % 2 == 0:  # (b**2)**p = |b|**(2p)
                inside = base if exponent * p % 2 == 0 else self.apply("abs", [base])
                out *= self._split(inside, exponent * p, into)
            else:
                rest.append((base, exponent))
        if rest:
            alone = len(rest) == 1 and rest[0][1] == 1
            left = rest[0][0] if alone else self._node(Product(_ordered(rest)))
            into[left] = into.get(left, Fraction(0)) + p
        return out

    def _merge_exponentials(self, collected: dict[Expr, Fraction]) -> Fraction:
        """exp(u) exp(v) = exp(u + v) where u and v are linear in the variables, or both functions of one variable."""
        calls = [n for n, p in collected.items() if isinstance(n, Call) and n.function.name == "exp" and p]
        plain = [n for n in calls if isinstance(n, Call) and (is_affine(n.argument) or len(n.variables) == 1)]
        for kind in (lambda n: is_affine(n.argument), lambda n: n.variables):  # type: ignore[attr-defined]
            groups: dict[object, list[Expr]] = {}
            for n in plain:
                if n in collected:
                    groups.setdefault(kind(n), []).append(n)
            for key, group in groups.items():
                if len(group) > 1 and key is not False:
                    total = self.sum([(n.argument, collected.pop(n)) for n in group if isinstance(n, Call)])
                    merged = self.call("exp", total)
                    if isinstance(merged, Number):
                        return merged.value
                    collected[merged] = collected.get(merged, Fraction(0)) + 1
                    return self._merge_exponentials(collected)
        return Fraction(1)

    def power(self, base: Expr, exponent: Expr) -> Expr:
        """base ** exponent; a variable exponent needs a positive base."""
        if isinstance(exponent, Number):
            p = exponent.value
            if isinstance(base, Number):
                return self.number(constant_power(base.value, p))
            if _exponent(p).denominator != 1 and not base.range[0] > 0:
                self._need(self._node(Product(((base, p),))).short(), base, NON_NEGATIVE if p > 0 else POSITIVE)
            return self.product([(base, p)])
        if isinstance(base, Number) and base.value > 0:
            return self.call("exp", self.product([(exponent, 1)], constant_call(get("log"), base.value)))
        return self.call("exp", self.product([(exponent, 1), (self.call("log", base), 1)]))

    def call(self, function: str | Univariate, argument: Expr) -> Expr:
        """A registered function of an argument."""
        fn = get(function)
        if isinstance(argument, Number):
            return self.number(constant_call(fn, argument.value))
        if fn.name in POWERS:
            return self.power(argument, self.number(POWERS[fn.name]))
        if fn.name.startswith("power("):
            return self.power(argument, self.number(float(fn.name[6:-1])))
        if fn.domain.reaches(*argument.range) != (False, False):
            self._need(f"{fn.name}({argument.short()})", argument, fn.domain)
        rewritten = self._rewritten(fn.name, argument)
        return self._node(Call(fn, argument)) if rewritten is None else rewritten

    def _rewritten(self, name: str, u: Expr) -> Expr | None:
        """A simpler form of a call, where there is one."""
        low, high = u.range
        match name:
            case "abs" | "relu" if low >= 0:
                return u
            case "relu" if high <= 0:
                return self.number(0)
            case "abs" if high <= 0:
                return -u
            case "exp" if isinstance(u, Call) and u.function.name == "log":
                return u.argument
            case "exp" if isinstance(u, Sum) and 0 < abs(u.constant) <= _LARGEST_SHIFT:
                rest = self.call("exp", self.sum(u.terms))
                return self.product([(rest, 1)], constant_call(get("exp"), u.constant))
            case "log" if isinstance(u, Call) and u.function.name == "exp":
                return u.argument
            case "log" if isinstance(u, Sum) and u.constant == 1 and _is_logistic(u):
                return self.call("softplus", u.children[0].children[0])
            case "log" if isinstance(u, Sum) and u.scale is not None and u.scale > 0:
                return self.call("log", u.terms[0][0]) + self.number(constant_call(get("log"), u.scale))
            case "log" if isinstance(u, Product) and all(base.range[0] > 0 for base in u.children):
                return self.sum([(self.call("log", base), p) for base, p in u.factors])
        if isinstance(u, Sum) and u.terms[0][1] < 0 and (name in _EVEN or name in _ODD):
            turned = self.call(name, -u)
            return turned if name in _EVEN else -turned
        if name == "abs" and isinstance(u, Sum) and u.scale is not None:
            return self.sum([(self.call("abs", u.terms[0][0]), u.scale)])
        return None

    def _need(self, text: str, argument: Expr, domain: Domain) -> None:
        self.partial.append(Partial(text, argument, domain))

    def uses(self, node: Expr) -> bool:
        """Whether some node was made from this one, also one that cancelled later."""
        return any(node in other.variables for other in self._nodes.values() if other is not node)

    # -- functions by name

    def knows(self, word: str) -> bool:
        return word in words()

    def words(self) -> tuple[str, ...]:
        return words()

    def apply(self, word: str, arguments: list[Expr]) -> Expr:
        """A function by the name that formulas use: of the registry, or one of `special.SPECIAL`."""
        special = SPECIAL.get(word)
        if special is not None:
            return special(self, arguments)
        if len(arguments) == 1:
            return self.call(word, arguments[0])
        extra = [a.value for a in arguments[1:] if isinstance(a, Number)]
        if word in ("leaky_relu", "elu") and len(extra) == len(arguments) - 1 == 1:
            return self.call(get(f"{word}({float(extra[0])!r})"), arguments[0])
        raise ArgumentError(f"{word} takes one argument, got {len(arguments)}")


def _is_logistic(node: Sum) -> bool:
    """Whether the sum is c + c exp(v)."""
    if len(node.terms) != 1 or node.terms[0][1] != node.constant:
        return False
    term = node.children[0]
    return isinstance(term, Call) and term.function.name == "exp"


def is_affine(node: Expr) -> bool:
    """Whether the node is a variable, or a linear form of variables."""
    return isinstance(node, Variable) or (isinstance(node, Sum) and all(isinstance(t, Variable) for t in node.children))


def _ordered(pairs: list[tuple[Expr, Fraction]]) -> Terms:
    return tuple(sorted(pairs, key=lambda pair: pair[0].order))


def _exponent(p: Fraction) -> Fraction:
    if abs(p) > LARGEST_EXPONENT:
        raise ArgumentError(f"exponents must lie in [-{LARGEST_EXPONENT}, {LARGEST_EXPONENT}], got {constant_text(p)}")
    return p


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
