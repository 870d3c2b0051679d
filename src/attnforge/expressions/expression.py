"""Scalar expressions: a graph of numbers, variables, linear forms, monomials and univariate calls.

A `Graph` makes the nodes in normal form and shares equal ones, so that `is` decides equality; they are never changed.

    Number      an exact rational
    Variable    an input
    Sum         constant + sum of coefficient * term        (terms are no sums, no numbers)
    Monomial    product of base ** exponent                 (bases are no monomials unless the exponent is fractional)
    Call        a univariate function of the registry

A number times something is a `Sum` of one term. Roots and reciprocals are powers. Sums are flattened with their
coefficients collected, products with their exponents merged, constants folded (mathematics H1, item 1). The graph knows
the box of its variables; rewrites that need a sign (powers distributed over non-negative factors, the logarithm of a
product, abs, max) are made where the ranges prove it, and only there.

Nodes have operators, so that a Python function written for numbers, numpy or torch can be traced by calling it:
`lambda x, y: np.sin(x * y) + x**2` works as it is. What needs a number at once (an if, int, float) raises
`UnsupportedOperation` and says what to write instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..box import Interval
from ..errors import ArgumentError, UnsupportedOperation
from ..functions.queries import lipschitz
from ..functions.registry import get, power
from ..functions.univariate import NON_NEGATIVE, POSITIVE, Domain, Univariate
from .constants import (
    LARGEST_EXPONENT,
    Inexact,
    constant_call,
    constant_pi,
    constant_power,
    constant_text,
    rational,
    rounded,
    unknown,
    vague,
    within_range,
)
from .interval import WHOLE, added, called, point, powered, product, scaled
from .special import ALIASES, POWERS, SPECIAL, words

#: numpy and torch names that differ from those of formulas.
_SPELLINGS = {
    **ALIASES,
    "amax": "max",
    "amin": "min",
    "expit": "sigmoid",
    "float_power": "pow",
    "fmax": "max",
    "fmin": "min",
    "power": "pow",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "sub": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "mul": lambda a, b: a * b,
    "true_divide": lambda a, b: a / b,
    "divide": lambda a, b: a / b,
    "div": lambda a, b: a / b,
    "negative": lambda a: -a,
    "neg": lambda a: -a,
    "positive": lambda a: a,
}


class Operators:
    """Arithmetic, numpy ufuncs and torch functions for expressions."""

    __slots__ = ()
    graph: Graph
    __array_priority__ = 1000

    def _expr(self, other: object) -> Expr:
        if str(getattr(other, "dtype", "")) == "object" and getattr(other, "shape", None) == ():
            other = other.item()  # type: ignore[attr-defined]  # numpy's array of one expression
        if isinstance(other, Operators):
            if other.graph is not self.graph:
                raise ArgumentError("two expressions of different formulas cannot be combined")
            return self.graph.used(other)  # type: ignore[arg-type]
        return self.graph.number(other)

    def __add__(self, other: object) -> Expr:
        return self.graph.sum([(self._expr(self), 1), (self._expr(other), 1)])

    def __radd__(self, other: object) -> Expr:
        return self.graph.sum([(self._expr(other), 1), (self._expr(self), 1)])

    def __sub__(self, other: object) -> Expr:
        return self.graph.sum([(self._expr(self), 1), (self._expr(other), -1)])

    def __rsub__(self, other: object) -> Expr:
        return self.graph.sum([(self._expr(other), 1), (self._expr(self), -1)])

    def __mul__(self, other: object) -> Expr:
        return self.graph.product([(self._expr(self), 1), (self._expr(other), 1)])

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Expr:
        return self.graph.product([(self._expr(self), 1), (self._expr(other), -1)])

    def __rtruediv__(self, other: object) -> Expr:
        return self.graph.product([(self._expr(other), 1), (self._expr(self), -1)])

    def __pow__(self, other: object) -> Expr:
        return self.graph.power(self._expr(self), self._expr(other))

    def __rpow__(self, other: object) -> Expr:
        return self.graph.power(self._expr(other), self._expr(self))

    def __neg__(self) -> Expr:
        return self.graph.sum([(self._expr(self), -1)])

    def __pos__(self) -> Expr:
        return self._expr(self)

    def __abs__(self) -> Expr:
        return self.graph.apply("abs", [self._expr(self)])

    def clip(self, min: object = None, max: object = None, **_: object) -> Expr:
        """numpy's and torch's clip and clamp, with constant bounds; either may be left out."""
        out = self._expr(self)
        if min is not None and max is not None:
            return self.graph.apply("clip", [out, self._expr(min), self._expr(max)])
        if min is not None:
            out = self.graph.apply("max", [out, self._expr(min)])
        return out if max is None else self.graph.apply("min", [out, self._expr(max)])

    clamp = clip

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        # x.sin(), as torch tensors have it
        if name.startswith("_") or name in self.__slots__ or not self.graph.knows(_SPELLINGS.get(name, name)):
            raise AttributeError(f"an expression has no attribute {name!r}")
        return lambda *arguments: self.named(name, self, *arguments)

    def named(self, name: str, *arguments: object) -> Expr:
        """A function by the name that numpy, torch or math has for it."""
        if name in _OPERATORS:
            return _OPERATORS[name](*(self._expr(a) for a in arguments))
        if name == "sinc" and len(arguments) == 1:  # numpy's and torch's; in formulas the name is ambiguous
            turned = self.graph.product([(self._expr(arguments[0]), 1)], constant_pi())
            return self.graph.call("sin", turned) / turned
        word = _SPELLINGS.get(name, name)
        if not self.graph.knows(word):
            raise UnsupportedOperation(
                f"{name} has no form here for formulas; known are + - * / ** and {', '.join(self.graph.words())}"
            )
        return self.graph.apply(word, [self._expr(a) for a in arguments])

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **options: object) -> Expr:
        if method != "__call__" or options:
            raise UnsupportedOperation(f"numpy.{ufunc.__name__}.{method} with options does not work on expressions")
        return self.named(ufunc.__name__, *inputs)

    def __array_function__(self, func: Any, types: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """numpy's functions that are no ufuncs: those known here, others as numpy does them for its object arrays."""
        if func.__name__ == "clip":
            return self.clip(*args[1:], **kwargs)
        if func.__name__ == "sinc":
            return self.named("sinc", *args)
        try:
            found = func._implementation(*args, **kwargs)
            return self._expr(found) if getattr(found, "shape", None) == () else found
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedOperation(f"numpy.{func.__name__} does not work on expressions: {error}") from error

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Expr:
        first = next((a for a in args if isinstance(a, Operators)), None)
        if first is None or kwargs:
            name = getattr(func, "__name__", str(func))
            raise UnsupportedOperation(f"torch.{name} with these arguments does not work on expressions")
        if func.__name__ in ("clip", "clamp"):
            return first.clip(*args[1:])
        return first.named(func.__name__, *args)

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise UnsupportedOperation(f"{what} needs a number, but the formula is traced with a variable; {instead}")

    def __float__(self) -> float:
        self._refuse("math.* or float()", "use numpy's functions, for example np.sin(x), or a formula string")

    def __int__(self) -> int:
        self._refuse("int()", "rounding is not continuous and has no attention-only form")

    def __round__(self, digits: int | None = None) -> Expr:
        if digits is not None:
            self._refuse("round() to digits", "rounding is not continuous and has no attention-only form")
        return self.named("round", self)

    def __bool__(self) -> bool:
        self._refuse("an if, and, or, not", "write branches with np.where, np.maximum, np.minimum, np.clip or abs")

    def __gt__(self, other: object) -> Condition:
        return self.graph.positive(self - other)

    def __lt__(self, other: object) -> Condition:
        return self.graph.positive(other - self)  # type: ignore[operator]

    def __ge__(self, other: object) -> Condition:
        return ~(self < other)

    def __le__(self, other: object) -> Condition:
        return ~(self > other)

    def __mod__(self, other: object) -> Expr:
        return self.graph.apply("mod", [self._expr(self), self._expr(other)])

    def __floordiv__(self, other: object) -> Expr:
        return self.graph.apply("floor", [self / other])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Operators):
            self._refuse("a comparison with ==", "use np.maximum, np.minimum, np.clip or abs")
        return self is other

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, eq=False)
class Condition:
    """What a comparison of expressions gives: `choose(a, b)` is a where it holds and b where it does not.

    `np.where`, `torch.where` and `sympy.Piecewise` choose by it; the pieces must meet where it changes.
    """

    choose: Callable[[Expr, Expr], Expr]

    def __and__(self, other: Condition) -> Condition:
        return Condition(lambda a, b: self.choose(other.choose(a, b), b))

    def __or__(self, other: Condition) -> Condition:
        return Condition(lambda a, b: self.choose(a, other.choose(a, b)))

    def __invert__(self) -> Condition:
        return Condition(lambda a, b: self.choose(b, a))

    def __bool__(self) -> bool:
        raise UnsupportedOperation(
            "a comparison (also inside min, max and if) needs a number, but the formula is traced with a variable; "
            "use np.where (with pieces that meet), np.maximum, np.minimum, np.clip or abs"
        )

    def _where(self, name: str, arguments: tuple[Any, ...]) -> Expr:
        first = next((a for a in arguments[1:] if isinstance(a, Operators)), None)
        if name != "where" or len(arguments) != 3 or first is None:
            raise UnsupportedOperation(f"{name} of a comparison has no form here; write np.where(condition, a, b)")
        return self.choose(first._expr(arguments[1]), first._expr(arguments[2]))

    def __array_function__(self, func: Any, types: object, args: tuple[Any, ...], kwargs: object) -> Expr:
        return self._where(func.__name__, args)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: object = None) -> Expr:
        if not isinstance(args[0], Condition):
            raise UnsupportedOperation(f"torch.{func.__name__} with these arguments does not work on expressions")
        return args[0]._where(func.__name__, args)


#: Texts longer than this are not kept: a graph with much sharing has texts of exponential length.
LONGEST_TEXT = 2000
Terms = tuple[tuple["Expr", Fraction], ...]


class Expr(Operators):
    """A node. `text` is its formula (None when too long), `order` sorts nodes the same way in every graph."""

    __slots__ = ("depth", "graph", "index", "order", "range", "text", "variables")
    graph: Graph
    index: int
    range: Interval
    text: str | None
    order: tuple[int, str]
    depth: int
    #: The variables that the node depends on.
    variables: frozenset[Variable]

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()

    def fields(self) -> tuple[object, ...]:
        """What determines the node among those of its class."""
        raise NotImplementedError

    def _texts(self) -> list[str | None]:
        return [child.text for child in self.children]

    def spelled(self) -> str:
        """The text, given that those of the children are known."""
        raise NotImplementedError

    def finish(self, graph: Graph, index: int, rank: int) -> None:
        """Fill in what follows from the fields."""
        self.graph, self.index = graph, index
        self.depth = 1 + max((child.depth for child in self.children), default=0)
        self.variables = frozenset().union(*(child.variables for child in self.children))
        text = None if None in self._texts() else self.spelled()
        self.text = text if text is not None and len(text) <= LONGEST_TEXT and "?" not in text else None
        self.order = (rank, self.text if self.text is not None else self._digest())

    def _digest(self) -> str:
        parts = [type(self).__name__]
        for item in self.fields():
            flat: Iterable[object] = [x for pair in item for x in pair] if isinstance(item, tuple) else [item]
            parts += [x.order[1] if isinstance(x, Expr) else _exactly(x) for x in flat]
        return "\x7f" + hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def short(self, limit: int = 60) -> str:
        """The text for people, cut in the middle when it is long."""
        if self.text is None:
            return f"an expression in {', '.join(sorted(v.name for v in self.variables))}"
        half = limit // 2 - 2
        return self.text if len(self.text) <= limit else f"{self.text[:half]} ... {self.text[-half:]}"

    def __repr__(self) -> str:
        return f"Expr({self.short()})"


class Number(Expr):
    __slots__ = ("value",)

    def __init__(self, value: Fraction):
        self.value = value

    def fields(self) -> tuple[object, ...]:
        return (self.value,)

    def spelled(self) -> str:
        return constant_text(self.value)


class Variable(Expr):
    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def fields(self) -> tuple[object, ...]:
        return (self.name,)

    def finish(self, graph: Graph, index: int, rank: int) -> None:
        super().finish(graph, index, rank)
        self.variables = frozenset((self,))

    def spelled(self) -> str:
        return self.name


class Sum(Expr):
    __slots__ = ("constant", "terms")

    def __init__(self, terms: Terms, constant: Fraction):
        self.terms, self.constant = terms, constant

    @property
    def children(self) -> tuple[Expr, ...]:
        return tuple(term for term, _ in self.terms)

    def fields(self) -> tuple[object, ...]:
        return (self.terms, self.constant)

    @property
    def scale(self) -> Fraction | None:
        """The coefficient when the sum is a number times one term."""
        return self.terms[0][1] if len(self.terms) == 1 and not self.constant else None

    def spelled(self) -> str:
        parts = [_term(term, coefficient) for term, coefficient in self.terms]
        if self.constant:
            spelling = constant_text(abs(self.constant))
            here = ("-" if self.constant < 0 else "+", spelling)
            # a positive constant goes first when the sum would begin with a minus: 1 - x**2
            parts = [here, *parts] if parts[0][0] == "-" and self.constant > 0 else [*parts, here]
        sign, first = parts[0]
        if sign == "-":  # a minus before a parenthesis would be read as part of the first factor
            first = f"-1*{first}" if first.startswith("(") else f"-{first}"
        return first + "".join(f" {sign} {text}" for sign, text in parts[1:])


class Monomial(Expr):
    __slots__ = ("factors",)

    def __init__(self, factors: Terms):
        self.factors = factors

    @property
    def children(self) -> tuple[Expr, ...]:
        return tuple(base for base, _ in self.factors)

    def fields(self) -> tuple[object, ...]:
        return (self.factors,)

    def spelled(self) -> str:
        above = [_power(base, exponent) for base, exponent in self.factors if exponent > 0]
        below = [_power(base, -exponent) for base, exponent in self.factors if exponent < 0]
        top, bottom = "*".join(above) or "1", "*".join(below)
        return f"{top}/({bottom})" if len(below) > 1 else f"{top}/{bottom}" if below else top


class Call(Expr):
    __slots__ = ("argument", "function")

    def __init__(self, function: Univariate, argument: Expr):
        self.function, self.argument = function, argument

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.argument,)

    def fields(self) -> tuple[object, ...]:
        return (self.function, self.argument)

    def spelled(self) -> str:
        name, _, arguments = self.function.name.partition("(")
        extra = f", {arguments[:-1]}" if arguments else ""
        return f"{name}({self.argument.text}{extra})"


def _exactly(field: object) -> str:
    """What a field of a node is, all digits of a number included."""
    if isinstance(field, Fraction):
        return f"{field.numerator:x}/{field.denominator:x} {field.atoms if isinstance(field, Inexact) else ''}"
    return str(getattr(field, "name", field))


def _term(term: Expr, coefficient: Fraction) -> tuple[str, str]:
    """Sign and text of coefficient * term."""
    text, size = term.text or "", abs(coefficient)
    sign = "-" if coefficient < 0 else "+"
    if size == 1:
        return sign, text
    spelling = constant_text(size)
    if isinstance(size, Inexact):
        return sign, f"{spelling}*{text}"
    numerator, _, denominator = spelling.partition("/")
    if text.startswith("1/"):
        text = numerator + text[1:]
    elif numerator != "1":
        text = f"{numerator}*{text}"
    return sign, f"{text}/{denominator}" if denominator else text


def _power(base: Expr, exponent: Fraction) -> str:
    text = base.text or ""
    if exponent == Fraction(1, 2):
        return f"sqrt({text})"
    if isinstance(base, (Sum, Monomial)):
        text = f"({text})"
    if exponent == 1:
        return text
    spelling = constant_text(exponent)
    return f"{text}**({spelling})" if "/" in spelling else f"{text}**{spelling}"


def reachable(roots: Iterable[Expr]) -> list[Expr]:
    """Every node that the roots depend on, the roots included, children before parents."""
    seen: dict[int, Expr] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node.index not in seen:
            seen[node.index] = node
            todo.extend(node.children)
    return [seen[i] for i in sorted(seen)]


LARGEST_DEPTH = 150  # of the nodes: evaluators and the parser recurse, and Python allows about 1000 frames
LARGEST_COUNT = 20_000  # of the nodes: far beyond any formula that a network could be made of, and made in seconds
#: Kinds of nodes in the order in which sums and products list them.
_RANK: dict[type[Expr], int] = {Variable: 0, Monomial: 1, Call: 2, Sum: 3, Number: 4}
_EVEN = ("cos", "cosh", "abs")
_ODD = ("sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf", "hardtanh", "softsign")
_LOGARITHMS = {"log": 0, "log2": 2, "log10": 10}  # and their bases; 0 stands for e
_MOST_FOLDS = 64  # of an arc cosine of a cosine, each a head: so many are cheaper than a table that sees as many kinks
_FARTHEST_FOLD = 1e6  # up to here float64 tells on which side of a multiple of pi a number lies
_LARGEST_SHIFT = 20  # exp(u + c) = exp(c) exp(u): beyond, exp(u) might leave float32 where exp(u + c) does not
#: A power of variable exponent errs by this share of the largest near 0, so that few anchors are enough; or, where much
#: is asked for, by as little as float64 has.
_NEAR, _NEARER = 2.0**-32, 2.0**-56
_DEEPEST_SHIFT = 2.0**-72  # of the largest base: logarithms of more octaves are too coarse in float32
_LEAST_SHIFT = 1e-30  # float32 holds the slopes of such a logarithm, 1e30, and room for what they are multiplied by
_ROOM = 1.0 + 2.0**-30  # above what a few operations of float64 round away
N = TypeVar("N", bound=Expr)
T = TypeVar("T")


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

    def __init__(self, intervals: Mapping[str, Interval], fine: bool = False):
        """With `fine`, powers from 0 are as near to what they stand for as float64 can tell."""
        self.fine = fine
        self.intervals = {name: (float(lo), float(hi)) for name, (lo, hi) in intervals.items()}
        self.partial: list[Partial] = []
        #: While a formula is read: every call in it is one node's one use, and what is needed of it is noted each time.
        self.spelled = False
        #: While a target is traced, or taken from sympy: of how many more uses of a node it is noted already what its
        #: logarithms need.
        self.credit: dict[Expr, int] | None = None
        #: Powers that some node was made with and that are not defined at a zero of their base, merged or not.
        self.inverted: dict[tuple[Expr, Fraction], None] = {}
        self._nodes: dict[tuple[object, ...], Expr] = {}
        #: Powers from 0 that are no powers of the registry, as they were made.
        self._from_zero: dict[tuple[Expr, Expr], Expr] = {}

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
            case Monomial():
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
        kept = [(node, within_range(rational(c))) for node, c in collected.items() if c]
        if not kept:
            return self.number(within_range(constant))
        if len(kept) == 1 and kept[0][1] == 1 and not constant:
            return kept[0][0]
        return self._node(Sum(_ordered(kept), within_range(constant)))

    def product(self, factors: Iterable[tuple[Expr, int | Fraction]], coefficient: Fraction = Fraction(1)) -> Expr:
        """coefficient * product of node ** exponent, merged."""
        factors = list(factors)
        if any(isinstance(node, Sum) and vague(node.constant) is not None for node, _ in factors):
            apart = self._product_apart(factors, coefficient)
            if apart is not None:
                return apart
        collected: dict[Expr, Fraction] = {}
        for node, exponent in factors:
            coefficient *= self._split(node, Fraction(exponent), collected)
        while True:  # bases that met may be written otherwise to their common power: (1 - y)(1 - y) = (y - 1)**2
            again: dict[Expr, Fraction] = {}
            for node, p in collected.items():
                if p == 1:
                    again[node] = again.get(node, Fraction(0)) + p
                elif p:
                    coefficient *= self._split(node, p, again)
            if again == collected or not coefficient:
                break
            collected = again
        collected = again
        coefficient *= self._merge_exponentials(collected) * self._merge_logarithms(collected)
        if not coefficient:
            return self.number(0)
        kept = [(node, _exponent(p)) for node, p in collected.items() if p]
        if not kept:
            return self.number(within_range(coefficient))
        single = kept[0][0] if len(kept) == 1 and kept[0][1] == 1 else self._node(Monomial(_ordered(kept)))
        return single if coefficient == 1 else self.sum([(single, coefficient)])

    def _product_apart(self, factors: list[tuple[Expr, int | Fraction]], coefficient: Fraction) -> Expr | None:
        """A product of sums that are unknown in part as the product without these parts, and how far that is off: at
        most prod (|a| + e) - prod |a| for factors a that are off by e (lemma H9). None where that is endless."""
        known: list[tuple[Expr, int | Fraction]] = []
        off, size = 0.0, 1.0
        for node, p in factors:
            parts = vague(node.constant) if isinstance(node, Sum) else None
            reach = max(map(abs, powered(node.range, Fraction(p))))
            if parts is None or not isinstance(node, Sum):
                own = 0.0
            else:
                value, lost = parts
                node = self.sum(node.terms, value)
                function = power(p)
                low, high = node.range[0] - 2 * lost, node.range[1] + 2 * lost
                if not math.isfinite(high - low) or touches(function.domain, (low, high)):
                    return None
                own = lost * float(lipschitz(function, np.array([low]), np.array([high]))[0])
            known.append((node, p))
            off, size = (off * (reach + own) + size * own) * _ROOM, size * reach * _ROOM
        off *= float(abs(coefficient)) * _ROOM
        return self.sum([(self.product(known, coefficient), 1)], unknown(off)) if math.isfinite(off) else None

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
            case Monomial():
                return self._split_product(node, p, into)
            case Call() if node.function.name == "exp":
                node, p = self.call("exp", self.sum([(node.argument, p)])), Fraction(1)
                if isinstance(node, Number):
                    return node.value
            case Call() if node.function.name == "abs" and even:
                return self._split(node.argument, p, into)
        self._merge(node, p, into)
        return Fraction(1)

    def _merge(self, node: Expr, p: Fraction, into: dict[Expr, Fraction]) -> None:
        """Multiply by node ** p; a pole is remembered, since x/x or 0/x have no value there either."""
        if p < 0 and node.range[0] <= 0 <= node.range[1]:
            self.inverted[node, p] = None
        into[node] = into.get(node, Fraction(0)) + p

    def _split_product(self, node: Monomial, p: Fraction, into: dict[Expr, Fraction]) -> Fraction:
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
            left = rest[0][0] if alone else self._node(Monomial(_ordered(rest)))
            self._merge(left, p, into)
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
                if (len(group) > 1 or collected[group[0]] != 1) and key is not False:
                    total = self.sum([(n.argument, collected.pop(n)) for n in group if isinstance(n, Call)])
                    merged = self.call("exp", total)
                    if isinstance(merged, Number):
                        return merged.value
                    collected[merged] = collected.get(merged, Fraction(0)) + 1
                    return self._merge_exponentials(collected)
        return Fraction(1)

    def _merge_logarithms(self, collected: dict[Expr, Fraction]) -> Fraction:
        """x**p log(x), p > 0, as xlogx(x**p)/p where x may be 0: continuous there, and 0, as is meant by it.

        What log(x) needs is dropped once, for this use of it. A function in Python may use one node many times, as in
        l - l + x*l, which has no value at 0: there what it needs is noted again for each (`used`).
        """
        out = Fraction(1)
        if not self.spelled and self.credit is None:
            return out
        for node in [n for n, p in collected.items() if p == 1 and isinstance(n, Call)]:
            if not isinstance(node, Call) or node.function.name not in _LOGARITHMS or node.argument.range[0] != 0:
                continue
            inside = node.argument.factors if isinstance(node.argument, Monomial) else ((node.argument, Fraction(1)),)
            shares = [collected.get(base, Fraction(0)) / q for base, q in inside if base.range[0] <= 0]
            k = min(shares, default=Fraction(0))
            if any(base.range[0] < 0 for base, _ in inside):
                k = Fraction(math.floor(k))  # (x**2)**k is x**(2 k) for negative x where k is whole, else |x|**(2 k)
            if not k > 0 or any(q < 0 for base, q in inside if base.range[0] <= 0):
                continue
            del collected[node]
            for base, q in inside:
                collected[base] = collected.get(base, Fraction(0)) - k * q
            stated = node.argument, node.function.domain
            own = max((i for i, p in enumerate(self.partial) if (p.argument, p.domain) == stated), default=None)
            if own is not None:
                del self.partial[own]
            inner = self.call("xlogx", self.product([(node.argument, k)]))
            to = _LOGARITHMS[node.function.name]
            out = out / k / (constant_call(get("log"), Fraction(to)) if to else 1)
            collected[inner] = collected.get(inner, Fraction(0)) + 1
        return out

    def power(self, base: Expr, exponent: Expr) -> Expr:
        """base ** exponent; a variable exponent needs a positive base."""
        if isinstance(exponent, Number) and isinstance(base, Number):
            return self.number(constant_power(base.value, exponent.value))
        if isinstance(exponent, Number) and not isinstance(exponent.value, Inexact):
            p = exponent.value
            if _exponent(p).denominator != 1 and not base.range[0] > 0:
                self._need(self._node(Monomial(((base, p),))).short(), base, NON_NEGATIVE if p > 0 else POSITIVE)
            return self.product([(base, p)])
        if isinstance(base, Number) and base.value > 0:
            return self.call("exp", self.product([(exponent, 1)], constant_call(get("log"), base.value)))
        text = f"{_power(base, Fraction(1))}**{_power(exponent, Fraction(1))}"
        from_zero = self._power_from_zero(base, exponent)
        if from_zero is not None:
            if base.range[0] <= 0:
                self._need(text, base, NON_NEGATIVE)
            return from_zero
        before = len(self.partial)
        logarithm = self.call("log", base)
        text += f", which is exp({_power(exponent, Fraction(1))} * {logarithm.short()}) here"
        if base.range[0] == 0 and not exponent.range[0] > 0:
            text += f" and begins at 0 only where {exponent.short()} stays above 0"
        text += ","
        self.partial[before:] = [replace(partial, text=text) for partial in self.partial[before:]]
        return self.call("exp", self.product([(exponent, 1), (logarithm, 1)]))

    def _power_from_zero(self, base: Expr, exponent: Expr) -> Expr | None:
        """base ** exponent where the base comes near 0 and the exponent, no rational number, stays above 0 (lemma H9).

        x ** c is x ** p for the decimal p next to c; x ** y is exp(y log(x + d)). How far they are off is a constant of
        which only that is known.
        """
        (least, most), (low, high) = base.range, exponent.range
        if not (0 < low <= high < LARGEST_EXPONENT and math.isfinite(most) and most > 0):
            return None
        if (base, exponent) in self._from_zero:
            return self._from_zero[base, exponent]
        if isinstance(exponent, Number):
            if least > 0:
                return None
            near = Fraction(repr(float(exponent.value)))
            off = rounded(exponent.value - near)
            largest = max(1 / low, _raised(most, high) * abs(math.log(most)))  # x ** q |log(x)| <= 1/(e q) for x <= 1
            found = self.sum([(self.product([(base, near)]), 1)], unknown((abs(off[0]) + off[1]) * largest * _ROOM))
        else:
            share = (_NEARER if self.fine else _NEAR) * min(_raised(most, low), _raised(most, high))
            at_most = [_raised(share, 1 / low)] if low < 1 else []
            at_most += [share / (high * max(1.0, _raised(2 * most, high - 1)))] if high > 1 else [share]
            shift = max(min(at_most), most * _DEEPEST_SHIFT)
            if not (_LEAST_SHIFT < shift < most and 0 <= least < shift):
                return None
            shift = math.ldexp(1.0, math.frexp(shift)[1] - 1)
            ends = [_raised(shift, y) for y in (low, min(high, 1.0)) if y <= 1]
            ends += [high * shift * max(1.0, _raised(most + shift, high - 1))] if high > 1 else []
            if not math.isfinite(max(ends)):
                return None
            logarithm = self.call(f"shifted_log({shift!r})", base)
            power = self.call("exp", self.product([(exponent, 1), (logarithm, 1)]))
            found = self.sum([(power, 1)], unknown(max(ends) * _ROOM))
        self._from_zero[base, exponent] = found
        return found

    def counted(self, trace: Callable[[], T]) -> T:
        """What a function gives that makes nodes and uses each as often as it likes."""
        self.credit = {}
        try:
            return trace()
        finally:
            self.credit = None

    def used(self, node: Expr) -> Expr:
        """The node, for one more use of it by whoever traces a target: what its logarithms need was noted for the first
        use of it, and is noted again for every other. Sums and products hand on what they are made of; another function
        uses its argument once."""
        if self.credit is None:
            return node
        left = self.credit.get(node, 0 if _open_logarithm(node) else 1)
        self.credit[node] = max(left - 1, 0)
        todo = [] if left else [node]
        while todo:
            part = todo.pop()
            if isinstance(part, (Sum, Monomial)):
                todo += part.children
            elif isinstance(part, Call) and _open_logarithm(part):
                self._need(part.short(), part.argument, part.function.domain)
        return node

    def positive(self, u: Expr) -> Condition:
        """Whether u > 0."""
        return Condition(lambda a, b: self._chosen(u, a, b))

    def _chosen(self, u: Expr, a: Expr, b: Expr) -> Expr:
        """a where u > 0, else b; the two must meet where u = 0.

        a = b + c u gives b + c relu(u). Where u > 0 is x > r, it is a(max(x, r)) + b(min(x, r)) - a(r),
        for a(r) = b(r).
        """
        low, high = u.range
        if low > 0 or high <= 0:
            return a if low > 0 else b
        first = u.terms[0][0] if isinstance(u, Sum) else u
        for term, c in (*_terms(a - b), (first, Fraction(0))):
            multiple = c / dict(_terms(u))[first] if term is first else None
            if multiple is not None and self.sum([(a, 1), (b, -1), (u, -multiple)]) is self.number(0):
                return b + multiple * self.call("relu", u)
        if not is_affine(u) or len(u.variables) != 1:
            raise UnsupportedOperation(
                f"the pieces for {u.short()} > 0 and <= 0 have no form here: the condition must compare one variable "
                f"with a number, or the pieces differ by a multiple of {u.short()}; write max, min, abs or clip"
            )
        slope, shift = (u.terms[0][1], u.constant) if isinstance(u, Sum) else (Fraction(1), Fraction(0))
        (x,), r = u.variables, self.number(-shift / slope)
        above, below = (a, b) if slope > 0 else (b, a)
        here, there = (rebuilt(self, [piece], replace={x: r})[0] for piece in (above, below))
        if here is not there:
            raise UnsupportedOperation(
                f"the pieces do not meet at {x.short()} = {r.short()}, where one is {here.short()} and the other "
                f"{there.short()}: attention-only networks are continuous"
            )
        upper = rebuilt(self, [above], replace={x: self.apply("max", [x, r])})[0]
        return upper + rebuilt(self, [below], replace={x: self.apply("min", [x, r])})[0] - here

    def call(self, function: str | Univariate, argument: Expr) -> Expr:
        """A registered function of an argument."""
        fn = get(function)
        if fn.name in POWERS:
            return self.power(argument, self.number(POWERS[fn.name]))
        if isinstance(argument, Number):
            return self.number(constant_call(fn, argument.value))
        parts = vague(argument.constant) if isinstance(argument, Sum) else None
        if parts is not None and isinstance(argument, Sum):
            value, lost = parts
            low, high = argument.range[0] - 2 * lost, argument.range[1] + 2 * lost
            if math.isfinite(high - low) and not touches(fn.domain, (low, high)):
                off = lost * float(lipschitz(fn, np.array([low]), np.array([high]))[0]) * _ROOM
                if math.isfinite(off):
                    return self.sum([(self.call(fn, self.sum(argument.terms, value)), 1)], unknown(off))
        if fn.name.startswith("power("):
            text = fn.name[6:-1]
            return self.power(argument, self.number(Fraction(text) if "/" in text else float(text)))
        if touches(fn.domain, argument.range):
            self._need(f"{fn.name}({argument.short()})", argument, fn.domain)
        rewritten = self._rewritten(fn.name, argument)
        if rewritten is not None:
            return rewritten
        node = self._node(Call(fn, argument))
        if self.credit is not None and _open_logarithm(node):
            self.credit[node] = self.credit.get(node, 0) + 1
        return node

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
            case "log" | "log2" | "log10" if isinstance(u, Monomial) and all(base.range[0] > 0 for base in u.children):
                return self.sum([(self.call(name, base), p) for base, p in u.factors])
            case "acos" | "asin" if isinstance(u, Call) and u.function.name in ("cos", "sin"):
                return self._folded(name, u)
        if isinstance(u, Sum) and u.terms[0][1] < 0 and (name in _EVEN or name in _ODD):
            turned = self.call(name, -u)
            return turned if name in _EVEN else -turned
        if name == "abs" and isinstance(u, Sum) and u.scale is not None:
            return self.sum([(self.call("abs", u.terms[0][0]), u.scale)])
        return None

    def _folded(self, name: str, wave: Call) -> Expr | None:
        """acos or asin of a cosine or sine: straight between whole multiples of pi. None where there are many of these.

        acos(cos(v)) is v - k pi on [k pi, (k + 1) pi] for even k and (k + 1) pi - v for odd ones.
        """
        half = constant_pi() / 2
        shift = Fraction(0) if wave.function.name == "cos" else -half  # sin(v) = cos(v - pi/2)
        v = self.sum([(wave.argument, 1)], shift)
        low, high = v.range
        if not math.pi * _MOST_FOLDS >= high - low or max(abs(low), abs(high)) > _FARTHEST_FOLD:
            return None
        first = math.floor(low / math.pi)
        first -= point(first * constant_pi())[1] > low  # rounding may have taken the next one
        sign = 1 if first % 2 == 0 else -1
        terms, constant = [(v, Fraction(sign))], -(first + (sign < 0)) * sign * constant_pi()
        for k in range(first + 1, math.ceil(high / math.pi) + 1):
            sign = -sign
            terms.append((self.call("relu", self.sum([(v, 1)], -k * constant_pi())), Fraction(2 * sign)))
        found = self.sum(terms, constant)
        return found if name == "acos" else self.sum([(found, -1)], half)

    def _need(self, text: str, argument: Expr, domain: Domain) -> None:
        self.partial.append(Partial(text, argument, domain))

    def uses(self, node: Expr) -> bool:
        """Whether some node was made from this one, also one that cancelled later."""
        made = any(node in other.variables for other in self._nodes.values() if other is not node)
        return made or any(node in base.variables for base, _ in self.inverted)

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


def _open_logarithm(node: Expr) -> bool:
    """Whether the node is a logarithm of what may be 0."""
    return (
        isinstance(node, Call)
        and node.function.name in _LOGARITHMS
        and touches(node.function.domain, node.argument.range)
    )


def _raised(base: float, exponent: float) -> float:
    """base ** exponent; infinite beyond float64."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf


def _terms(node: Expr) -> Terms:
    """The terms of a sum with their coefficients, its constant aside; anything else is a term of its own."""
    return node.terms if isinstance(node, Sum) else () if isinstance(node, Number) else ((node, Fraction(1)),)


def touches(domain: Domain, interval: Interval) -> bool:
    """Whether an interval leaves a domain, or meets a pole or an open end of it."""
    if domain.poles and not all(map(math.isfinite, interval)):
        return True
    return domain.offence("", *interval) is not None


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
    replace: Mapping[Expr, Expr] | None = None,
    rewrite: Callable[[Expr], Expr] = lambda node: node,
    split: Callable[[Monomial], Terms] = lambda node: node.factors,
) -> list[Expr]:
    """The roots, made anew in `graph` from the bottom up; nodes of `replace` become what it says.

    `rewrite` has the last word on every node made; `split` may group the factors of a product differently.
    """
    new: dict[Expr, Expr] = dict(replace or {})
    wanted = list(roots)
    for node in _below(wanted, new, split):
        match node:
            case Number():
                new[node] = graph.number(node.value)
            case Variable():
                new[node] = graph.variable(node.name)
            case Sum():
                new[node] = graph.sum([(new[term], c) for term, c in node.terms], node.constant)
            case Monomial():
                new[node] = graph.product([(new[base], p) for base, p in split(node)])
            case Call():
                new[node] = graph.call(node.function, new[node.argument])
        new[node] = rewrite(new[node])
    return [new[root] for root in wanted]


def _below(roots: list[Expr], known: Mapping[Expr, Expr], split: Callable[[Monomial], Terms]) -> list[Expr]:
    """What has to be made, children first: nothing below a known node."""
    seen: dict[int, Expr] = {}
    todo = [root for root in roots if root not in known]
    while todo:
        node = todo.pop()
        if node.index not in seen:
            seen[node.index] = node
            children = [base for base, _ in split(node)] if isinstance(node, Monomial) else node.children
            todo.extend(child for child in children if child not in known)
    return [seen[i] for i in sorted(seen)]
