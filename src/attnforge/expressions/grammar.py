"""The formula language: a tokenizer and a precedence parser that build expression nodes, and nothing else.

Nothing in a formula is ever evaluated as code: names are looked up in the box, in two constants and in a fixed table of
functions. Length, depth and the size of constants are limited before anything is computed.

    sum      a + b - c          product   a * b / c        sign    -a, +a
    power    a ** b             call      name(a, ...)     group   (a)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from fractions import Fraction

from ..errors import ArgumentError, DomainError, FormulaError, UnsupportedOperation, closest
from .constants import constant_e, constant_pi, within_range
from .expression import Expr, Graph
from .special import ALIASES, words

LONGEST = 20_000  # characters of a formula: ten times what any text of an expression has, and read in a second
DEEPEST = 150  # levels of a formula: each takes a few frames of the parser, and Python allows about 1000
_TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[^\W\d]\w*)|(?P<operator>\*\*|[-+*/^(),])|(?P<space>\s+)"
)
_CONSTANTS = {"pi": constant_pi, "e": constant_e}
_NO_BRANCHES = (
    "a formula has no conditions; write max, min, abs or clip, or compile a Python function with np.where, "
    "torch.where, or a sympy.Piecewise"
)
_AS_A_BOX = "it is not among the functions of formulas; attnforge.approximate takes any function that can be called"
#: What other languages have, and how it is written here.
_ELSEWHERE = {
    "tg": "write tan(x)",
    "arctg": "write atan(x)",
    "lg": "write log10(x)",
    "ld": "write log2(x)",
    "log_2": "write log2(x)",
    "log_10": "write log10(x)",
    "cosec": "write csc(x)",
    "sgn": "write sign(x)",
    **dict.fromkeys(("gamma", "lgamma", "digamma", "beta", "zeta", "erfinv", "j0", "J0", "j1", "J1", "jn"), _AS_A_BOX),
    "if": _NO_BRANCHES,
    "ctg": "write cot(x)",
    "sum": "write x + y",
    "prod": "write x*y",
    "mean": "write (x + y)/2",
    "sort": "the smaller of two is min(x, y), the larger max(x, y)",
    "norm": "the length of (x, y) is hypot(x, y)",
    "factorial": "write out the factorial as a number",
    "lambda": "write what the function gives, alone",
    "sinc": "write sin(x)/x, or sin(pi*x)/(pi*x) for numpy's",
    "expit": "write sigmoid(x)",
    "logistic": "write sigmoid(x)",
    "sen": "write sin(x)",
    "deg": "write 180*x/pi",
    "degrees": "write 180*x/pi",
    "rad": "write pi*x/180",
    "radians": "write pi*x/180",
    "where": _NO_BRANCHES,
    "Piecewise": _NO_BRANCHES,
}
#: Modules whose functions people write with their name before: they are known without it.
_MODULES = ("math", "np", "numpy", "torch", "sp", "sympy", "scipy", "F", "tf", "jnp", "cmath")
_NO_NUMBERS = {"nan": "nan is no number", "inf": "inf is no number", "oo": "oo is no number",
               "True": "a formula has numbers, not truth values: write 1",
               "False": "a formula has numbers, not truth values: write 0",
               "None": "None is no number"}  # fmt: skip
_SUM, _PRODUCT, _SIGN, _POWER = 1, 2, 3, 4  # how tightly operators bind


class UnknownNames(FormulaError, ArgumentError):
    """Names in a formula that are neither in the box nor constants."""


class Jump(FormulaError, UnsupportedOperation):
    """A function in a formula that jumps on the box."""


@dataclass(frozen=True)
class Token:
    kind: str  # "number", "name", "operator", "strange" or "end"
    text: str
    position: int


def read(formula: str, graph: Graph, variables: Container[str]) -> tuple[Expr, set[str]]:
    """The node that a formula spells, and the variables it mentions (also those that cancel).

    >>> graph = Graph({"x": (-1.0, 1.0)})
    >>> read("2*x**2 - sin(x) + 1e-3", graph, {"x"})
    (Expr(2*x**2 - sin(x) + 0.001), {'x'})
    >>> read("2x", graph, {"x"})
    Traceback (most recent call last):
    attnforge.errors.FormulaError: a multiplication sign is missing: write 2*x
      2x
       ^
    """
    parser = _Parser(formula, graph, variables)
    graph.spelled = True
    try:
        node = parser.whole()
    finally:
        graph.spelled = False
    return node, parser.mentioned


def tokens(formula: str) -> list[Token]:
    """The tokens of a formula, ending with one of kind "end"."""
    if not isinstance(formula, str):
        raise ArgumentError(f"a formula is a string, got {type(formula).__name__}")
    if len(formula) > LONGEST:
        raise FormulaError(f"the formula has {len(formula)} characters; at most {LONGEST} are read", formula, LONGEST)
    found: list[Token] = []
    position = 0
    while position < len(formula):
        match = _TOKEN.match(formula, position)
        if match is None or (match.lastgroup == "name" and not formula[position].isidentifier()):
            # refused when the parser comes to it: what stands before it may be the real mistake
            found.append(Token("strange", formula[position], position))
            position += 1
            continue
        kind, text = match.lastgroup or "", match[0]
        while kind == "name" and not text.isidentifier():  # x² is x, and then something strange
            text = text[:-1]
        if kind != "space":
            found.append(Token(kind, text, position))
        position += len(text)
    return [*found, Token("end", "", len(formula))]


def _strange(character: str) -> str:
    hints = {
        "=": "write the formula alone, without 'y ='",
        ".": "attributes are not part of the language; a number needs a digit",
        "%": "the remainder is mod(x, 2), on a box where its whole quotient is constant",
        "²": "write x**2",
        "³": "write x**3",
        "<": _NO_BRANCHES,
        ">": _NO_BRANCHES,
        "÷": "write / for a quotient",
        "½": "write 0.5",
        "&": _NO_BRANCHES,
        "?": _NO_BRANCHES,
        "[": "write each variable as its own name, x1 instead of x[1]",
        "×": "write * for a product",
        "·": "write * for a product",
        **dict.fromkeys("−–—", "this is a typographic minus or dash; write -"),
        "√": "write sqrt(x)",
        "|": "write abs(x)",
        "!": "write out the factorial as a number",
        "∞": "a box and its numbers are finite",
        "#": "a formula has no comments",
        ";": "give several outputs as a list of formulas",
        **dict.fromkeys("'\"“”‘’′", "a formula has no quotation marks, and no sign for a derivative: write it out"),
    }
    if character.isdigit() and not character.isdecimal():  # x₁; squares and cubes have hints of their own
        hints.setdefault(character, "write digits after a name, x1")
    hint = hints.get(character, "a formula has names, numbers, + - * / ** , and parentheses")
    return f"the character {character!r} has no meaning here: {hint}"


def _hint(name: str, known: list[str]) -> str:
    """The closest known name; one that differs only in case first."""
    same = [other for other in known if other.lower() == name.lower()]
    return closest(same[0], same) if same else closest(name, known)


class _Parser:
    def __init__(self, formula: str, graph: Graph, variables: Container[str]):
        self.formula, self.graph, self.variables = formula, graph, variables
        self.tokens = tokens(formula)
        self.next = 0
        self.depth = 0
        self.mentioned: set[str] = set()
        self.unknown: dict[str, int] = {}

    def fail(self, problem: str, token: Token) -> FormulaError:
        return FormulaError(problem, self.formula, token.position)

    def peek(self) -> Token:
        return self.tokens[self.next]

    def take(self) -> Token:
        self.next += 1
        return self.tokens[self.next - 1]

    def whole(self) -> Expr:
        if self.peek().kind == "end":
            raise self.fail("the formula is empty; write something like sin(x) + y", self.peek())
        node = self.expression(_SUM)
        token = self.peek()
        if token.kind != "end":
            raise self.fail(self._trailing(token), token)
        if self.unknown:
            raise self._unknown_names()
        return node

    def _trailing(self, token: Token) -> str:
        before = self.tokens[self.next - 1]
        if token.text == "." and before.text in _MODULES:
            return f"functions go by their names alone: leave '{before.text}.' out"
        after = self.tokens[min(self.next + 1, len(self.tokens) - 1)]
        if token.text == after.text == "=":
            return f"a formula has no comparisons: {_NO_BRANCHES}"
        if token.kind == "strange":
            return _strange(token.text)
        if token.text == "," and before.kind == after.kind == "number":
            return f"decimals have a point: write {before.text}.{after.text}"
        if before.kind == token.kind == "number":
            return f"an operator is missing between {before.text} and {token.text}, or a number has two points"
        if token.text == ")":
            return "this closing parenthesis has no opening one"
        if token.text == ",":
            return (
                "a comma has no meaning outside of a function's arguments; give several outputs as a list of formulas"
            )
        if token.text == "^":
            return "write ** for a power"
        if before.text == "lambda":
            return "a formula is what a function gives; write that alone, or compile the Python function itself"
        if token.text in ("if", "else", "and", "or", "not"):
            return _NO_BRANCHES
        if before.kind == "number" and token.text in ("j", "J", "i"):
            return "formulas are of real numbers: the imaginary unit has no meaning here"
        if before.kind == "number" and token.text.startswith("_") and token.text.strip("_").isdigit():
            return f"write {before.text}{token.text.replace('_', '')} without underscores"
        return f"a multiplication sign is missing: write {before.text}*{token.text}"

    def _unknown_names(self) -> UnknownNames:
        known = [*(self.variables if isinstance(self.variables, (set, tuple, list, dict)) else ()), *_CONSTANTS]
        if "π" in self.unknown:
            return UnknownNames("π is a number: write pi", self.formula, self.unknown["π"])
        for name in self.unknown.keys() & _NO_NUMBERS.keys():
            return UnknownNames(_NO_NUMBERS[name], self.formula, self.unknown[name])
        hints = [f"{name!r}" + _hint(name, known) for name in self.unknown]
        given = ", ".join(str(name) for name in known if name not in _CONSTANTS) or "none"
        problem = (
            f"the box has no interval for {', '.join(hints)} (its variables: {given}); add each to the box, "
            f"for example Box({next(iter(self.unknown))}=(-1, 1))"
        )
        return UnknownNames(problem, self.formula, min(self.unknown.values()))

    def guarded(self, token: Token, build: Callable[..., Expr], *arguments: object) -> Expr:
        """Build a node; what is wrong with its numbers is shown at the token."""
        try:
            return build(*arguments)
        except FormulaError:
            raise
        except ArgumentError as error:
            raise self.fail(str(error), token) from error
        except UnsupportedOperation as error:
            raise Jump(str(error), self.formula, token.position) from error
        except DomainError as error:
            raise DomainError(str(self.fail(str(error), token))) from error

    def expression(self, level: int) -> Expr:
        """An expression whose operators bind at least as tightly as `level`."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.fail(f"the formula is nested more than {DEEPEST} deep", self.peek())
        node = self.operand()
        terms: list[tuple[Expr, int]] = []  # what stands before a + or - at this level
        factors: list[tuple[Expr, int]] = []  # what stands before a * or / at this level
        sign, start = 1, self.tokens[self.next - 1]
        while True:
            token = self.peek()
            if token.text == "**" and level <= _POWER:
                self.take()
                exponent = self.expression(_SIGN)  # right associative, and 2**-x needs no parentheses
                node = self.guarded(token, self.graph.power, node, exponent)
            elif token.text in ("*", "/") and level <= _PRODUCT:
                self.take()
                factors = factors or [(node, 1)]
                factors.append((self.expression(_SIGN), 1 if token.text == "*" else -1))
                start = token
            elif factors:
                node, factors = self.guarded(start, self.graph.product, factors), []
            elif token.text in ("+", "-") and level <= _SUM:
                self.take()
                terms.append((node, sign))
                sign = 1 if token.text == "+" else -1
                node = self.expression(_PRODUCT)
                start = token
            else:
                break
        self.depth -= 1
        return self.guarded(start, self.graph.sum, [*terms, (node, sign)]) if terms else node

    def operand(self) -> Expr:
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "name":
            return self.call(token) if self.peek().text == "(" else self.name(token)
        if token.text in ("+", "-"):
            node = self.expression(_SIGN)
            return -node if token.text == "-" else node
        if token.text == "(":
            node = self.expression(_SUM)
            self.close(token)
            return node
        raise self.fail(self._missing(token), token)

    def _missing(self, token: Token) -> str:
        if token.kind == "strange":
            return _strange(token.text)
        if token.kind == "end":
            return "the formula ends where a number, a name or a parenthesis is expected"
        if token.text == "^":
            return "write ** for a power"
        if token.text == self.tokens[self.next - 2].text == "/":
            return "the whole quotient of x and 2 is floor(x/2), on a box where it is constant"
        return f"a number, a name or a parenthesis is expected here, not {token.text!r}"

    def close(self, opening: Token) -> None:
        token = self.peek()
        if token.text == ")":
            self.take()
        elif token.kind == "end":
            raise self.fail("this opening parenthesis is never closed", opening)
        else:
            raise self.fail(self._trailing(token), token)

    def number(self, token: Token) -> Expr:
        if len(token.text) > 400 or len(token.text.lower().partition("e")[2]) > 6:
            raise self.fail("this number is too long or too large; numbers reach from 5e-324 to 1.8e308", token)
        try:
            value = within_range(Fraction(token.text))
        except ArgumentError as error:
            raise self.fail(f"this number is beyond float64: {error}", token) from error
        return self.graph.number(value)

    def name(self, token: Token) -> Expr:
        name = token.text
        if name in self.variables:
            self.mentioned.add(name)
            return self.graph.variable(name)
        if name in _CONSTANTS:
            return self.graph.number(_CONSTANTS[name]())
        if ALIASES.get(name, name) in words():
            raised = "**2" if self.peek().text in ("²", "**", "^") else ""
            raise self.fail(f"{name} is a function: write {name}(...){raised}", token)
        self.unknown.setdefault(name, token.position)
        return self.graph.variable(name)

    def call(self, token: Token) -> Expr:
        name = ALIASES.get(token.text, token.text)
        if name not in words():
            raise self.fail(self._unknown_function(token.text), token)
        opening = self.take()
        arguments: list[Expr] = []
        if self.peek().text != ")":
            arguments.append(self.expression(_SUM))
            while self.peek().text == ",":
                self.take()
                arguments.append(self.expression(_SUM))
        self.close(opening)
        return self.guarded(token, self.graph.apply, name, arguments)

    def _unknown_function(self, name: str) -> str:
        if name in self.variables or name in _CONSTANTS:
            return f"{name} is not a function: for a product write {name}*(...)"
        if name in _ELSEWHERE:
            return f"there is no function {name!r} here: {_ELSEWHERE[name]}"
        rest = self.tokens[self.next :]
        if self.next == 1 and "=" in [token.text for token in rest]:
            return _strange("=").replace("y =", self.formula.split("=")[0].strip() + " =")
        hint = closest(name, (*words(), *ALIASES))
        return f"unknown function {name!r}" + (hint or f"; known are {', '.join(words())}")
