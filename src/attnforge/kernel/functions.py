"""Univariate functions: what a name in a program means, as series and ranges of balls.

A function is a formula in y, or formulas between knots. Formulas are made of a few primitives whose series arb has;
every other name is written with those. Where a primitive ends (a root below 0, asin beyond 1) it goes on as a constant:
the functions here are defined wherever that is possible, and equal the program's wherever those are defined (lemma K6).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flint import arb, arb_series, fmpq

from ..errors import CertificateError
from .balls import ZERO, NotProved, Series, coefficients, series

LONGEST, DEEPEST = 20_000, 150  # characters and levels of a formula that are read: what the formula language allows
_TOKEN = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[^\W\d]\w*|\*\*|[-+*/(),])")
Node = tuple[Any, ...]

#: Names that are formulas; primitives are in `_PRIMITIVES`.
FORMULAS = {
    "identity": "y", "square": "y**2", "cube": "y**3", "reciprocal": "1/y", "rsqrt": "1/sqrt(y)",
    "exp2": "exp(y*log(2))", "expm1": "exp(y) - 1", "log2": "log(y)/log(2)", "log10": "log(y)/log(10)",
    "log1p": "log(1 + y)", "sinh": "(exp(y) - exp(-y))/2", "cosh": "(exp(y) + exp(-y))/2",
    "tanh": "2*sigmoid(2*y) - 1", "asinh": "log(y + sqrt(1 + y**2))", "acosh": "log(y + sqrt(y**2 - 1))",
    "atanh": "log((1 + y)/(1 - y))/2", "softplus": "log(1 + exp(y))", "logsigmoid": "-log(1 + exp(-y))",
    "gelu": "y*erfc(-y/sqrt(2))/2", "gelu_tanh": "y*sigmoid(sqrt(8/pi)*(y + 0.044715*y**3))",
    "quick_gelu": "y*sigmoid(1.702*y)", "silu": "y*sigmoid(y)", "mish": "y*(1 - 2/(1 + (1 + exp(y))**2))",
}  # fmt: skip
_SELU = "1.0507009873554804934193349852946", "1.6732632423543772848170429916717"
#: Names with knots: the knots, and the formulas between them.
PIECES: dict[str, tuple[tuple[float, ...], tuple[str, ...]]] = {
    "relu": ((0.0,), ("0", "y")), "abs": ((0.0,), ("-y", "y")), "relu6": ((0.0, 6.0), ("0", "y", "6")),
    "hardtanh": ((-1.0, 1.0), ("-1", "y", "1")), "hardsigmoid": ((-3.0, 3.0), ("0", "(y + 3)/6", "1")),
    "hardswish": ((-3.0, 3.0), ("0", "y*(y + 3)/6", "y")), "squared_relu": ((0.0,), ("0", "y**2")),
    "softsign": ((0.0,), ("y/(1 - y)", "y/(1 + y)")), "leaky_relu": ((0.0,), (f"{Fraction(0.01)}*y", "y")),
    "elu": ((0.0,), ("exp(y) - 1", "y")),
    "selu": ((0.0,), (f"{Fraction(float(_SELU[0]))}*{Fraction(float(_SELU[1]))}*(exp(y) - 1)",
                      f"{Fraction(float(_SELU[0]))}*y")),
}  # fmt: skip
REALS = (-math.inf, math.inf)
DOMAINS = dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "xlogx"), (0.0, math.inf))
DOMAINS |= dict.fromkeys(("asin", "acos", "atanh"), (-1.0, 1.0))
_ALIASES = {
    "arccos": "acos", "arcsin": "asin", "arctan": "atan", "gelu_erf": "gelu", "gelu_new": "gelu_tanh",
    "inverse": "reciprocal", "ln": "log", "relu2": "squared_relu", "swish": "silu",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Function:
    """Formulas between knots, one object for each name; `power` is below 1 for a root, which has a modulus of
    continuity of its own, and `domain` an interval outside of which there is no value; of a piece of a function, which
    goes on in some way beyond its ends, proofs speak for arguments in `own`."""

    name: str
    knots: tuple[float, ...]
    pieces: tuple[Node, ...]
    power: Fraction = Fraction(1)
    domain: tuple[float, float] = REALS
    own: tuple[float, float] = REALS

    def piece(self, low: float, high: float) -> Node | None:
        """The formula that holds on [low, high]; None where a knot lies inside."""
        for k, node in enumerate(self.pieces):
            if (k == 0 or low >= self.knots[k - 1]) and (k == len(self.knots) or high <= self.knots[k]):
                return node
        return None

    def range(self, low: float, high: float) -> arb:
        """An enclosure of the function on [low, high]: one ball for each formula that holds on a part of it."""
        found: arb | None = None
        for k, node in enumerate(self.pieces):
            start = low if k == 0 else max(low, self.knots[k - 1])
            stop = high if k == len(self.knots) else min(high, self.knots[k])
            if start <= stop:
                part = evaluate(node, arb(start).union(arb(stop)), 1)[0]
                found = part if found is None else found.union(part)
        return arb.nan() if found is None else found


@functools.lru_cache(maxsize=512)
def function(text: str) -> Function:
    """The function that a name in a program stands for; `CertificateError` where the kernel has none."""
    if text.startswith("expr:"):
        return Function(text, (), (parse(text.removeprefix("expr:")),))
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    word = _ALIASES.get(match[1], match[1]) if match else text
    if match is None or match[2] is None:
        if word in PIECES:
            return Function(word, PIECES[word][0], tuple(map(parse, PIECES[word][1])))
        if word in FORMULAS or word in _PRIMITIVES:
            power = {"sqrt": Fraction(1, 2)}.get(word, Fraction(1))
            return Function(word, (), (parse(FORMULAS.get(word, f"{word}(y)")),), power, DOMAINS.get(word, REALS))
        asked = re.fullmatch(r"piece (\d{1,9}) of ([a-z_\d]+(?:\([^()]*\))?)", text)
        if asked and int(asked[1]) < len((whole := function(asked[2])).pieces):
            i, ends = int(asked[1]), (-math.inf, *whole.knots, math.inf)
            return Function(text, (), (whole.pieces[i],), own=(ends[i], ends[i + 1]))
        raise NotProved(f"the kernel knows no function {text!r}")
    try:
        return _with_arguments(word, [Fraction(match[2])] if "/" in match[2] else json.loads(f"[{match[2]}]"))
    except (ValueError, TypeError, RecursionError, ZeroDivisionError) as error:
        raise CertificateError(f"the kernel cannot read the function {text!r}: {error}") from error


def _with_arguments(word: str, given: list[Any]) -> Function:
    if word == "piecewise_linear":
        points = [(_exact(x), _exact(y)) for x, y in zip(*given, strict=True)]
        lines = []
        for (a, f), (b, g) in itertools.pairwise(points):
            if not a < b:
                raise ValueError("its points are not in order")
            slope = (g - f) / (b - a)
            lines.append(("+", ("*", ("number", slope), ("y",)), ("number", f - slope * a)))
        if not lines:
            raise ValueError("it needs two points")
        return Function(word, tuple(float(x) for x, _ in points[1:-1]), tuple(lines))
    (argument,) = given
    value = _exact(argument)
    if word == "power":
        if abs(value) > 1000:
            raise ValueError("the exponent is beyond 1000")
        root = value if 0 < value < 1 else Fraction(1)
        domain = REALS if value.denominator == 1 else DOMAINS["sqrt"]
        return Function(f"power({argument})", (), (("**", ("y",), ("number", value)),), root, domain)
    if word == "shifted_log" and value > 0:
        node = ("log", ("+", ("y",), ("number", value)))
        return Function(f"shifted_log({argument})", (), (node,), domain=DOMAINS["log"])
    if word in ("leaky_relu", "elu"):
        left = ("y",) if word == "leaky_relu" else parse("exp(y) - 1")
        return Function(word, (0.0,), (("*", ("number", value), left), ("y",)))
    raise NotProved(f"the kernel knows no function {word!r} with an argument")


def _exact(x: Any) -> Fraction:
    if type(x) not in (int, float, Fraction) or not math.isfinite(x):
        raise ValueError(f"{x!r} is not a number")
    return Fraction(x)


# -- formulas ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def parse(text: str) -> Node:
    """The formula of y that a text spells: + - * / ** with the usual precedence, numbers, pi, e and calls."""
    if len(text) > LONGEST:
        raise CertificateError(f"a formula has {len(text)} characters; at most {LONGEST} are read")
    tokens, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise CertificateError(f"the kernel cannot read the formula {text!r} at {text[at : at + 10]!r}")
        tokens.append(match[1])
        at = match.end()
    reader = _Reader(text, tokens)
    node = reader.sum(0)
    if reader.at < len(tokens):
        raise reader.wrong()
    return node


class _Reader:
    def __init__(self, text: str, tokens: list[str]):
        self.text, self.tokens, self.at = text, tokens, 0

    def wrong(self) -> CertificateError:
        return CertificateError(f"the kernel cannot read the formula {self.text!r} at its token {self.at}")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        if self.at > len(self.tokens):
            raise self.wrong()
        return self.tokens[self.at - 1]

    def sum(self, depth: int) -> Node:
        node = self.product(depth)
        while self.peek() in ("+", "-"):
            node = (self.take(), node, self.product(depth))
        return node

    def product(self, depth: int) -> Node:
        node = self.signed(depth)
        while self.peek() in ("*", "/"):
            node = (self.take(), node, self.signed(depth))
        return node

    def signed(self, depth: int) -> Node:
        if depth > DEEPEST:
            raise self.wrong()
        if self.peek() in ("+", "-"):
            sign, inner = self.take(), self.signed(depth + 1)
            return inner if sign == "+" else ("-", ("number", Fraction(0)), inner)
        node = self.operand(depth)
        if self.peek() == "**":
            self.take()
            node = ("**", node, self.signed(depth + 1))
        return node

    def operand(self, depth: int) -> Node:
        token = self.take()
        if token == "(":
            node = self.sum(depth + 1)
            if self.take() != ")":
                raise self.wrong()
            return node
        if token[0].isdigit() or token[0] == ".":
            if len(token) > 400 or len(token.lower().partition("e")[2]) > 6:
                raise self.wrong()
            return ("number", Fraction(token))
        if token in ("y", "pi", "e"):
            return (token,)
        if self.peek() != "(":
            raise self.wrong()
        self.take()
        inner = self.sum(depth + 1)
        if self.take() != ")":
            raise self.wrong()
        word = _ALIASES.get(token, token)
        if word in FORMULAS or word in PIECES:
            return ("call", word, inner)
        if word not in _PRIMITIVES:
            raise NotProved(f"the kernel knows no function {token!r}")
        return (word, inner)


def evaluate(node: Node, ball: arb, count: int) -> Series:
    """The first Taylor coefficients of a formula around every point of a ball at once (lemma K5)."""
    word = node[0]
    if word == "y":
        return [ball, arb(1), *[ZERO] * count][:count]
    if word in ("number", "pi", "e"):
        value = _ball(node[1]) if word == "number" else arb.pi() if word == "pi" else arb.const_e()
        return [value, *[ZERO] * (count - 1)]
    if word == "call":
        return _composed(function(node[1]), evaluate(node[2], ball, count))
    if word == "**":
        return _power(evaluate(node[1], ball, count), _constant(node[2]))
    if word == "/":
        return _quotient(node, ball, count)
    parts = [evaluate(inner, ball, count) for inner in node[1:]]
    if word in ("+", "-"):
        return [a + b if word == "+" else a - b for a, b in zip(*parts, strict=True)]
    if word == "*":
        if count == 1:
            return [parts[0][0] * parts[1][0]]
        return coefficients(series(parts[0]) * series(parts[1]), count)
    return _PRIMITIVES[word](parts[0])


def _ball(value: Fraction) -> arb:
    return arb(fmpq(value.numerator, value.denominator))


def _constant(node: Node) -> Fraction:
    """A constant exponent."""
    if node[0] == "number":
        return Fraction(node[1])
    if node[0] in ("+", "-", "*", "/"):
        a, b = _constant(node[1]), _constant(node[2])
        if node[0] == "/" and b == 0:
            raise CertificateError("an exponent divides by 0")
        return a + b if node[0] == "+" else a - b if node[0] == "-" else a * b if node[0] == "*" else a / b
    raise NotProved("the kernel reads powers with constant rational exponents only")


def _unknown(first: arb, count: int) -> Series:
    return [first, *[arb.nan()] * (count - 1)]


def _quotient(node: Node, ball: arb, count: int) -> Series:
    """a / b; where both vanish at 0 also after both were divided by y, and the narrower of the two (lemma K7)."""
    found = _divided(*(evaluate(inner, ball, count) for inner in node[1:]))
    if zeros := _common_zeros(node):
        wide = ball.union(ZERO)
        other = _divided(*(evaluate(inner, wide, count + zeros)[zeros:] for inner in node[1:]))
        found = [a if a.rad() < b.rad() else b for a, b in zip(found, other, strict=True)]
    return found


def _divided(above: Series, below: Series) -> Series:
    if below[0].contains(0) or not below[0].is_finite():
        return [arb.nan()] * len(above)
    return coefficients(series(above) * series(below).inv(), len(above))


@functools.lru_cache(maxsize=512)
def _common_zeros(node: Node) -> int:
    """To which order, at most 4, numerator and denominator of a quotient both vanish at 0: exact zeros."""
    orders = ([not c.is_zero() for c in evaluate(inner, ZERO, 5)] for inner in node[1:])
    return min(row.index(True) if True in row else 0 for row in orders)


def _composed(outer: Function, inner: Series) -> Series:
    """A named function of a series: one formula where the ball is clear of the knots, the hull of all otherwise."""
    constant, count = inner[0], len(inner)
    for k, node in enumerate(outer.pieces):
        if (k == 0 or constant >= outer.knots[k - 1]) and (k == len(outer.knots) or constant <= outer.knots[k]):
            own = evaluate(node, constant, count)
            total, power = [ZERO] * count, series([arb(1), *[ZERO] * (count - 1)])
            shifted = series([ZERO, *inner[1:]])
            for coefficient in own:
                total = [t + coefficient * p for t, p in zip(total, coefficients(power, count), strict=True)]
                power = power * shifted
            return total
    values = [evaluate(node, constant, 1)[0] for node in outer.pieces]
    return _unknown(functools.reduce(arb.union, values), count)


def _power(x: Series, p: Fraction) -> Series:
    count, base = len(x), series(x)
    if p.denominator == 1:
        whole = abs(p.numerator)
        if whole > 1000:
            raise NotProved(f"the kernel reads powers up to 1000, not {whole}")
        out: arb_series = base**whole
        if p < 0 and out[0].contains(0):
            return [arb.nan()] * count
        found = coefficients(out.inv() if p < 0 else out, count)
        return [found[0].nonnegative_part()] if count == 1 and whole % 2 == 0 and p > 0 else found
    if x[0] > 0:
        if p.denominator == 2:
            return _power(coefficients(base.sqrt(), count), Fraction(p.numerator))
        return coefficients((base.log() * _ball(p)).exp(), count)
    if p < 0 or x[0] <= 0:
        return [ZERO if p > 0 else arb.nan()] * count
    ends = [(x[0].upper().log() * _ball(q)).exp() if x[0].upper() > 0 else arb.nan() for q in (p, p - 1)]
    found = _unknown(ZERO.union(ends[0]), count)
    return [found[0], _ball(p) * ZERO.union(ends[1]) * x[1], *found[2:]] if p > 1 and count > 1 else found


def _log(x: Series) -> Series:
    return coefficients(series(x).log(), len(x)) if x[0] > 0 else [arb.nan()] * len(x)


def _xlogx(x: Series) -> Series:
    """x log(x), going on as 0 below 0: it falls from there to its least value, and then rises (lemma K6)."""
    if x[0] > 0:
        return coefficients(series(x) * series(x).log(), len(x))
    top = x[0].upper() if x[0].upper() > 0 else arb(2.0**-1074)
    return _unknown(ZERO.union(top * top.log()).union(ZERO if top < 0.36 else arb(-0.37)), len(x))


def _sigmoid(x: Series) -> Series:
    out = coefficients((1 + (-series(x)).exp()).inv(), len(x))
    if x[0].is_finite() and not x[0].is_exact():  # the constant term is monotone: its ends are tight
        low, high = (1 / (1 + (-end).exp()) for end in (x[0].lower(), x[0].upper()))
        out[0] = low.union(high)
    return out


def _arc(name: str, x: Series) -> Series:
    """asin and acos, going on as constants beyond -1 and 1."""
    if x[0] > -1 and x[0] < 1:
        return coefficients(getattr(series(x), name)(), len(x))
    sides = x[0].lower(), x[0].upper()
    closed = [getattr(arb(max(-1.0, min(1.0, float(end)))), name)() for end in sides]
    if x[0] >= 1 or x[0] <= -1:
        return [closed[0], *[ZERO] * (len(x) - 1)]
    ends = [getattr(end, name)() if end > -1 and end < 1 else at for end, at in zip(sides, closed, strict=True)]
    return _unknown(ends[0].union(ends[1]), len(x))


def _plain(name: str) -> Any:
    return lambda x: [getattr(x[0], name)()] if len(x) == 1 else coefficients(getattr(series(x), name)(), len(x))


_PRIMITIVES: dict[str, Any] = {
    **{name: _plain(name) for name in ("exp", "sin", "cos", "tan", "atan", "erf", "erfc")},
    "sqrt": lambda x: _power(x, Fraction(1, 2)), "log": _log, "sigmoid": _sigmoid, "xlogx": _xlogx,
    "asin": lambda x: _arc("asin", x), "acos": lambda x: _arc("acos", x),
}  # fmt: skip
