"""Operators on expressions, so that a Python function written for numbers, numpy or torch can be traced by calling it.

`lambda x, y: np.sin(x * y) + x**2` works as it is. What needs a number at once (math.sin, comparisons, if, int)
raises `UnsupportedOperation` and says what to write instead.

Scalar expressions: a graph of numbers, variables, linear forms, monomials and univariate calls.

Nodes are made by a `Graph` (graph.py), which shares equal ones, so that `is` decides equality; they are never changed.

    Number      an exact rational
    Variable    an input
    Sum         constant + sum of coefficient * term        (terms are no sums, no numbers)
    Product     product of base ** exponent                 (bases are no products unless the exponent is fractional)
    Call        a univariate function of the registry

A number times something is a `Sum` of one term. Roots and reciprocals are powers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ArgumentError, UnsupportedOperation
from ..functions.univariate import Univariate
from .constants import constant_text
from .interval import Interval

if TYPE_CHECKING:
    pass
    from .graph import Graph

#: numpy and torch names that differ from those of formulas.
_SPELLINGS = {
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clamp": "clip",
    "expit": "sigmoid",
    "fabs": "abs",
    "float_power": "pow",
    "fmax": "max",
    "fmin": "min",
    "maximum": "max",
    "minimum": "min",
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
        if isinstance(other, Operators):
            if other.graph is not self.graph:
                raise ArgumentError("two expressions of different formulas cannot be combined")
            return other  # type: ignore[return-value]
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
        return lambda *arguments: self._function(name, self, *arguments)

    def _function(self, name: str, *arguments: object) -> Expr:
        if name in _OPERATORS:
            return _OPERATORS[name](*(self._expr(a) for a in arguments))
        word = _SPELLINGS.get(name, name)
        if not self.graph.knows(word):
            raise UnsupportedOperation(
                f"{name} has no form here for formulas; known are + - * / ** and {', '.join(self.graph.words())}"
            )
        return self.graph.apply(word, [self._expr(a) for a in arguments])

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **options: object) -> Expr:
        if method != "__call__" or options:
            raise UnsupportedOperation(f"numpy.{ufunc.__name__}.{method} with options does not work on expressions")
        return self._function(ufunc.__name__, *inputs)

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
        return first._function(func.__name__, *args)

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise UnsupportedOperation(f"{what} needs a number, but the formula is traced with a variable; {instead}")

    def __float__(self) -> float:
        self._refuse("math.* or float()", "use numpy's functions, for example np.sin(x), or a formula string")

    def __int__(self) -> int:
        self._refuse("int()", "rounding is not continuous and has no attention-only form")

    def __bool__(self) -> bool:
        self._refuse("an if, and, or, not", "write branches with np.maximum, np.minimum, np.clip or abs")

    def _compare(self, other: object) -> bool:
        self._refuse("a comparison (also inside min, max and if)", "use np.maximum, np.minimum, np.clip or abs")

    __lt__ = __le__ = __gt__ = __ge__ = _compare

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Operators):
            self._refuse("a comparison with ==", "use np.maximum, np.minimum, np.clip or abs")
        return self is other

    def __hash__(self) -> int:
        return id(self)


if TYPE_CHECKING:
    from .graph import Graph

#: Texts longer than this are not kept: a graph with much sharing has texts of exponential length.
_LONGEST_TEXT = 2000
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
        self.text = text if text is not None and len(text) <= _LONGEST_TEXT else None
        self.order = (rank, self.text if self.text is not None else self._digest())

    def _digest(self) -> str:
        parts = [type(self).__name__]
        for item in self.fields():
            flat: Iterable[object] = [x for pair in item for x in pair] if isinstance(item, tuple) else [item]
            parts += [x.order[1] if isinstance(x, Expr) else str(getattr(x, "name", x)) for x in flat]
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


class Product(Expr):
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


def _term(term: Expr, coefficient: Fraction) -> tuple[str, str]:
    """Sign and text of coefficient * term."""
    text, size = term.text or "", abs(coefficient)
    sign = "-" if coefficient < 0 else "+"
    if size == 1:
        return sign, text
    spelling = constant_text(size)
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
    if isinstance(base, (Sum, Product)):
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
