"""Functions of formulas that are no univariate functions of the registry, written with those that are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from ..errors import ArgumentError, DomainError, UnsupportedOperation
from ..functions.registry import names
from .constants import constant_pi

if TYPE_CHECKING:
    from .expression import Expr, Graph

#: Registered functions that are powers: the normal form writes them as such.
POWERS = {
    "identity": 1,
    "square": 2,
    "cube": 3,
    "reciprocal": -1,
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
}
#: Other spellings that formulas may use.
ALIASES = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clamp": "clip",
    "deg2rad": "radians",
    "fabs": "abs",
    "ln": "log",
    "maximum": "max",
    "minimum": "min",
    "rad2deg": "degrees",
    "swish": "silu",
}
#: Functions that jump: they are known where they are constant, which they are between two numbers of the same value.
STEPS: dict[str, Callable[[float], float]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "heaviside": lambda u: (u > 0) + 0.5 * (u == 0),  # the value at 0 is never used: the ends would differ
    "round": round,
    "sign": lambda u: (u > 0) - (u < 0),
    "step": lambda u: int(u >= 0),
    "trunc": math.trunc,
}
#: Functions that are one over another.
INVERSES = {"coth": "tanh", "csc": "sin", "csch": "sinh", "sec": "cos", "sech": "cosh"}


def _count(word: str, arguments: Sequence[Expr], wanted: int, example: str) -> None:
    if len(arguments) != wanted:
        plural = "" if wanted == 1 else "s"
        raise ArgumentError(f"{word} takes {wanted} argument{plural}, as in {example}, got {len(arguments)}")


def _pow(graph: Graph, arguments: list[Expr]) -> Expr:
    _count("pow", arguments, 2, "pow(x, 2)")
    return graph.power(*arguments)


def _larger(graph: Graph, a: Expr, b: Expr) -> Expr:
    """max(a, b) = b + relu(a - b); the constant plays b, or else the later one in the order of all nodes."""
    if not a.variables or (b.variables and b.order < a.order):
        a, b = b, a
    difference = a - b
    if difference.range[0] >= 0 or difference.range[1] <= 0:
        return a if difference.range[0] >= 0 else b
    return b + graph.call("relu", difference)


def _balanced(graph: Graph, nodes: list[Expr]) -> Expr:
    while len(nodes) > 1:
        pairs = [_larger(graph, a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[len(pairs) * 2 :]
    return nodes[0]


def _several(word: str, arguments: list[Expr]) -> list[Expr]:
    if not arguments:
        raise ArgumentError(f"{word} takes at least one argument, as in {word}(x, y)")
    return arguments


def _max(graph: Graph, arguments: list[Expr]) -> Expr:
    return _balanced(graph, _several("max", arguments))


def _min(graph: Graph, arguments: list[Expr]) -> Expr:
    return -_balanced(graph, [-a for a in _several("min", arguments)])


def _clip(graph: Graph, arguments: list[Expr]) -> Expr:
    """clip(u, lo, hi) = m + h hardtanh((u - m)/h) for constant bounds with middle m and half width h."""
    _count("clip", arguments, 3, "clip(x, -1, 1)")
    u, lo, hi = arguments
    width = hi - lo
    if width.range[1] < 0:
        raise ArgumentError(f"clip needs lo <= hi, got {lo.short()} and {hi.short()}")
    inside = u.range[0] >= lo.range[1], u.range[1] <= hi.range[0]
    if width.variables or lo.variables or not u.variables or width.range[1] <= 0 or any(inside):
        return _min(graph, [_max(graph, [u, lo]), hi])
    half = width / 2
    return (lo + hi) / 2 + half * graph.call("hardtanh", (u - (lo + hi) / 2) / half)


def _hypot(graph: Graph, arguments: list[Expr]) -> Expr:
    squares = [(x * x, 1) for x in _several("hypot", arguments)]
    return graph.power(graph.sum(squares), graph.number(Fraction(1, 2)))


def _cbrt(graph: Graph, arguments: list[Expr]) -> Expr:
    """The real cube root, also of negative numbers: relu(u)**(1/3) - relu(-u)**(1/3)."""
    _count("cbrt", arguments, 1, "cbrt(x)")
    third, (u,) = graph.number(Fraction(1, 3)), arguments
    return graph.power(graph.call("relu", u), third) - graph.power(graph.call("relu", -u), third)


def _log(graph: Graph, arguments: list[Expr]) -> Expr:
    """log(x), or log(x, base)."""
    if len(arguments) not in (1, 2):
        raise ArgumentError(f"log takes a number and perhaps a base, as in log(x, 2), got {len(arguments)} arguments")
    found = [graph.call("log", u) for u in arguments]
    return found[0] if len(found) == 1 else found[0] / found[1]


def _logaddexp(graph: Graph, arguments: list[Expr]) -> Expr:
    """log(exp(a) + exp(b)) = b + softplus(a - b), which does not overflow."""
    _count("logaddexp", arguments, 2, "logaddexp(x, y)")
    a, b = arguments
    return b + graph.call("softplus", a - b)


def _angle(word: str, graph: Graph, arguments: list[Expr]) -> Expr:
    """Degrees in radians, or radians in degrees."""
    _count(word, arguments, 1, f"{word}(x)")
    factor = constant_pi() / 180
    return graph.sum([(arguments[0], factor if word == "radians" else 1 / factor)])


def _step(word: str, graph: Graph, arguments: list[Expr]) -> Expr:
    """A function that jumps, where it does not."""
    if word == "heaviside" and len(arguments) == 2:  # numpy and sympy give the value at 0 along, which is not met
        arguments = arguments[:1]
    _count(word, arguments, 1, f"{word}(x)")
    (u,) = arguments
    if all(map(math.isfinite, u.range)) and STEPS[word](u.range[0]) == STEPS[word](u.range[1]):
        return graph.number(STEPS[word](u.range[0]))
    odd = ", or write sqrt(relu(x)) - sqrt(relu(-x)) for sign(x)*sqrt(abs(x)), and so on" if word == "sign" else ""
    raise UnsupportedOperation(
        f"{word}({u.short()}) jumps on the box, and attention-only networks are continuous: there {_between(u)}; "
        f"choose a box on which {word} is constant{odd}"
    )


def _mod(graph: Graph, arguments: list[Expr]) -> Expr:
    """a - b floor(a/b), where the quotient's whole part is constant."""
    _count("mod", arguments, 2, "mod(x, 2)")
    a, b = arguments
    return a - b * _step("floor", graph, [a / b])


def _atan2(graph: Graph, arguments: list[Expr]) -> Expr:
    """The angle of (x, y), by the one of atan(y/x) and atan(x/y) that the box keeps smooth."""
    _count("atan2", arguments, 2, "atan2(y, x)")
    y, x = arguments
    right_angle = graph.number(constant_pi() / 2)
    if x.range[0] > 0:
        return graph.call("atan", y / x)
    if y.range[0] > 0:
        return right_angle - graph.call("atan", x / y)
    if y.range[1] < 0:
        return -right_angle - graph.call("atan", x / y)
    raise DomainError(
        f"atan2({y.short()}, {x.short()}) jumps at the negative x axis and has no limit at the origin; the box must "
        f"keep {x.short()} > 0, or {y.short()} > 0, or {y.short()} < 0, but there {_between(x)} and {_between(y)}"
    )


def _between(node: Expr) -> str:
    return f"{node.short()} reaches from {node.range[0]:.6g} to {node.range[1]:.6g}"


def _inverse(word: str, of: str, graph: Graph, arguments: list[Expr]) -> Expr:
    """1/of(x), which has a name of its own."""
    _count(word, arguments, 1, f"{word}(x)")
    return 1 / graph.call(of, arguments[0])


def _cot(graph: Graph, arguments: list[Expr]) -> Expr:
    _count("cot", arguments, 1, "cot(x)")
    return graph.call("cos", arguments[0]) / graph.call("sin", arguments[0])


SPECIAL: dict[str, Callable[[Graph, list[Expr]], Expr]] = {
    "atan2": _atan2,
    "cbrt": _cbrt,
    "clip": _clip,
    "cot": _cot,
    "degrees": functools.partial(_angle, "degrees"),
    **{word: functools.partial(_inverse, word, of) for word, of in INVERSES.items()},
    "hypot": _hypot,
    "log": _log,
    "logaddexp": _logaddexp,
    "max": _max,
    "min": _min,
    "mod": _mod,
    "pow": _pow,
    "radians": functools.partial(_angle, "radians"),
    **{word: functools.partial(_step, word) for word in STEPS},
}


@functools.cache
def words() -> tuple[str, ...]:
    """Every function name that formulas may use, less the aliases."""
    return tuple(sorted({*names(), *SPECIAL}))
