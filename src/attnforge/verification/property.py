"""Properties as verifiers read them: a box of inputs and conditions on outputs, in the text of VNN-LIB.

A property is *sat* if some input of the box makes the conditions true, *unsat* if none does. Conditions are clauses, of
which one must hold; a clause is a list of comparisons, all of which must hold. Numbers are written as exact decimals,
so that what is read is what was meant, in whatever arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ..errors import CertificateError

MOST_TEXT = 1 << 22  # characters of a property that are read: a thousand inputs with long decimals take a quarter
DEEPEST = 8  # parentheses inside each other; a property has four
Clause = tuple["Atom", ...]


@dataclass(frozen=True)
class Atom:
    """Y_output >= right or Y_output <= right; the right side is a number, or an output where `other` is given.

    >>> Atom(0, above=False, threshold=0.5).text(), Atom(1, above=True, other=0).text()
    ('(<= Y_0 0.5)', '(>= Y_1 Y_0)')
    """

    output: int
    above: bool
    threshold: float = 0.0
    other: int | None = None

    def text(self, left: str = "Y_{}") -> str:
        """As VNN-LIB writes it; `left` is how an output is named."""
        right = decimal(self.threshold) if self.other is None else left.format(self.other)
        return f"({'>=' if self.above else '<='} {left.format(self.output)} {right})"

    def form(self) -> tuple[dict[int, int], float]:
        """The same as sum of weight * Y >= number."""
        sign = 1 if self.above else -1
        weights = {self.output: sign} if self.other is None else {self.output: sign, self.other: -sign}
        return weights, sign * self.threshold

    @property
    def outputs(self) -> int:
        """How many outputs it reads: by as many bounds can a network and its target differ in it."""
        return 1 if self.other is None else 2


@dataclass(frozen=True)
class Property:
    """Inputs low <= X <= high, and clauses about outputs.

    >>> one = Property((0.0,), (0.5,), 1, ((Atom(0, above=True, threshold=0.25),),))
    >>> print(one.text())
    (declare-const X_0 Real)
    (declare-const Y_0 Real)
    (assert (>= X_0 0.0))
    (assert (<= X_0 0.5))
    (assert (>= Y_0 0.25))
    >>> parse(one.text()) == one
    True
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    outputs: int
    clauses: tuple[Clause, ...]

    def __post_init__(self) -> None:
        if not self.low or len(self.low) != len(self.high) or not self.clauses or not all(self.clauses):
            raise CertificateError("a property needs inputs with two ends each, and conditions")
        if not all(math.isfinite(a) and math.isfinite(b) and a <= b for a, b in zip(self.low, self.high, strict=True)):
            raise CertificateError("the inputs of a property must lie between finite ends, the lower one first")
        atoms = [atom for clause in self.clauses for atom in clause]
        named = [i for atom in atoms for i in (atom.output, atom.other) if i is not None]
        if not all(0 <= i < self.outputs for i in named) or not all(math.isfinite(a.threshold) for a in atoms):
            raise CertificateError(f"a property of {self.outputs} outputs compares others, or something endless")

    def text(self) -> str:
        """In VNN-LIB 1.0, the form of VNN-COMP."""
        lines = [f"(declare-const X_{i} Real)" for i in range(len(self.low))]
        lines += [f"(declare-const Y_{i} Real)" for i in range(self.outputs)]
        return "\n".join([*lines, *self._asserted("X_{}", "Y_{}", alone=False)])

    def text2(self, dtype: str) -> str:
        """In VNN-LIB 2.0, for a network of a dtype with one row in and one row out."""
        head = ["(vnnlib-version <2.0>)", "(declare-network N"]
        head += [f"    (declare-input X {dtype} [1,{len(self.low)}])",
                 f"    (declare-output Y {dtype} [1,{self.outputs}])", ")"]  # fmt: skip
        return "\n".join([*head, *self._asserted("X[0,{}]", "Y[0,{}]", alone=True)])

    def _asserted(self, x: str, y: str, alone: bool) -> Iterator[str]:
        """The assertions; with `alone`, a clause of one comparison stands without an `and`, which 2.0 forbids."""
        for i, (a, b) in enumerate(zip(self.low, self.high, strict=True)):
            yield f"(assert (>= {x.format(i)} {decimal(a)}))"
            yield f"(assert (<= {x.format(i)} {decimal(b)}))"
        if len(self.clauses) == 1:
            yield from (f"(assert {atom.text(y)})" for atom in self.clauses[0])
        else:
            written = [[atom.text(y) for atom in clause] for clause in self.clauses]
            parts = [c[0] if alone and len(c) == 1 else f"(and {' '.join(c)})" for c in written]
            yield "(assert (or\n" + "\n".join(f"    {part}" for part in parts) + "\n))"


def decimal(x: float) -> str:
    """A float in decimal digits, exactly and without an exponent.

    >>> decimal(0.1)
    '0.1000000000000000055511151231257827021181583404541015625'
    >>> decimal(-3.0)
    '-3.0'
    """
    text = format(Decimal(x if x else 0.0), "f")
    return text if "." in text else f"{text}.0"


def parse(text: str) -> Property:
    """A property from VNN-LIB 1.0, as far as `Property` goes; `CertificateError` on anything else."""
    try:
        return _read(text)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise CertificateError(f"this is not a property that attnforge reads: {error}") from error


def _read(text: str) -> Property:
    low: dict[int, float] = {}
    high: dict[int, float] = {}
    clauses: tuple[Clause, ...] | None = None
    alone: list[Atom] = []
    declared: dict[str, int] = {"X": 0, "Y": 0}
    for form in _forms(text):
        if form[0] == "declare-const":
            _, name, kind = form
            letter, number = _variable(name)
            if kind != "Real" or number != declared[letter]:
                raise ValueError(f"the variable {name} is declared out of order, or not as Real")
            declared[letter] += 1
            continue
        word, body = form
        if word != "assert" or not isinstance(body, list):
            raise ValueError(f"expected (assert ...), got {word}")
        if body[0] == "or":
            if clauses is not None:
                raise ValueError("there are two alternatives, (or ...)")
            clauses = tuple(tuple(_atom(a) for a in c[1:]) for c in body[1:] if c[0] == "and" or _fail(c[0]))
        elif _variable(body[1])[0] == "X":
            ends, number = (low if body[0] == ">=" else high), _variable(body[1])[1]
            if body[0] not in (">=", "<=") or number in ends or len(body) != 3:
                raise ValueError(f"an end of {body[1]} is given twice, or by another word than >= and <=")
            ends[number] = _number(body[2])
        else:
            alone.append(_atom(body))
    if (clauses is None) == (not alone):
        raise ValueError("there must be comparisons of outputs, alone or in one (or ...)")
    if sorted(low) != sorted(high) or sorted(low) != list(range(declared["X"])):
        raise ValueError("every input needs two ends")
    count = range(declared["X"])
    return Property(tuple(low[i] for i in count), tuple(high[i] for i in count), declared["Y"],
                    (tuple(alone),) if clauses is None else clauses)  # fmt: skip


def _fail(word: Any) -> bool:
    raise ValueError(f"expected (and ...) inside of (or ...), got {word}")


def _atom(form: Any) -> Atom:
    word, left, right = form
    letter, output = _variable(left)
    if word not in (">=", "<=") or letter != "Y":
        raise ValueError(f"expected >= or <= of an output, got {word} of {left}")
    if right.startswith("Y_"):
        return Atom(output, word == ">=", other=_variable(right)[1])
    return Atom(output, word == ">=", _number(right))


def _variable(name: Any) -> tuple[str, int]:
    found = re.fullmatch(r"([XY])_(0|[1-9]\d{0,5})", name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{name!r} is not a variable such as X_0 or Y_0")
    return found[1], int(found[2])


def _number(text: Any) -> float:
    if not isinstance(text, str) or re.fullmatch(r"-?\d{1,400}\.\d{1,1100}", text) is None:
        raise ValueError(f"{str(text)[:40]!r} is not a decimal number")
    found = float(text)
    if not math.isfinite(found) or Fraction(found) != Fraction(text):
        raise ValueError(f"{text[:40]} is not a number of float64 exactly")
    return found


def _forms(text: str) -> list[list[Any]]:
    """The parenthesised forms of a text, as nested lists of words."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"it has {len(text):,} characters, more than {MOST_TEXT:,}")
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text)):
        if word == "(":
            stack.append([])
            if len(stack) > DEEPEST:
                raise ValueError("its parentheses are too deep")
        elif word == ")":
            if len(stack) == 1 or not stack[-1]:
                raise ValueError("a parenthesis is closed that was not open, or around nothing")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(word)
    if len(stack) != 1 or not all(isinstance(form, list) for form in stack[0]):
        raise ValueError("a parenthesis is missing")
    return stack[0]
