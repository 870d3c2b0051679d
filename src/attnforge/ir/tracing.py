"""Operators on expressions, so that a Python function written for numbers, numpy or torch can be traced by calling it.

`lambda x, y: np.sin(x * y) + x**2` works as it is. What needs a number at once (math.sin, comparisons, if, int)
raises `UnsupportedOperation` and says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ArgumentError, UnsupportedOperation

if TYPE_CHECKING:
    from .expression import Expr
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
