"""What a value of a token program is: None, an exact number, a string, or a tuple of values.

Every value is brought to one form before anything sees it, so that two equal values are never told apart: whole numbers
are `int` (True is 1 and 2.0 is 2, as Python's `==` has it), every other number is the `Fraction` it stands for.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from numbers import Integral, Real
from typing import TypeAlias

import numpy as np

from ..arguments import shortened
from ..errors import ArgumentError

#: None, a number, a string, or a tuple of values.
Value: TypeAlias = "int | Fraction | str | tuple[Value, ...] | None"

LARGEST = 4096  # bits of a number, characters of a string, parts of a tuple: one operation at most doubles them
HUGE = 1 << 500  # numbers and their squares from here on leave the range of float64
DEEPEST = 16  # tuples within tuples: programs pair values a few times, and each level is a frame of this module


def canonical(value: object) -> Value:
    """The one form of a value, or an `ArgumentError` that says what is wrong with it.

    >>> canonical(True), canonical(2.0), canonical(0.5), canonical(("a", None))
    (1, 2, Fraction(1, 2), ('a', None))
    """
    return _canonical(value, [LARGEST], 0)


def is_numeric(value: object) -> bool:
    """Whether a value (in its one form) is a number."""
    return isinstance(value, (int, Fraction))


def mean(values: list[Value]) -> Value:
    """The exact mean of numbers (in their one form), in its one form.

    >>> mean([1, 2])
    Fraction(3, 2)
    """
    return canonical(Fraction(sum(values), len(values)))  # type: ignore[arg-type]


def shown(value: object, most: int = 60) -> str:
    """The value as Python writes it, cut where it is long."""
    return shortened(repr(value), most)


def sorted_values(values: set[Value]) -> tuple[Value, ...]:
    """Values in one order: numbers, then texts, tuples, and None."""
    if all(is_numeric(v) and abs(v) < HUGE for v in values):  # type: ignore[arg-type, operator]  # by their floats, which is much faster, unless these are too close
        found = sorted(values, key=float)  # type: ignore[arg-type]
        if all(float(a) < float(b) for a, b in pairwise(found)):  # type: ignore[arg-type]
            return tuple(found)
    kind = {str: 1, tuple: 2, type(None): 3}
    return tuple(sorted(values, key=lambda v: (k := kind.get(type(v), 0), v if k < 2 else repr(v))))


def _canonical(value: object, left: list[int], depth: int) -> Value:
    """`left` holds how many parts a tuple may still have."""
    left[0] -= 1
    if isinstance(value, str):
        if len(value) > LARGEST:
            raise ArgumentError(f"a string has at most {LARGEST} characters here, got {len(value)}")
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ArgumentError(f"a string is text, which files can hold; {shown(value)} has half a character")
        return str.__str__(value)
    if isinstance(value, (Integral, np.bool_)):
        return _bounded(int(value))
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise ArgumentError(f"values are finite numbers, got {value!r}")
        exact = value if isinstance(value, Fraction) else Fraction(float(value))
        _bounded(exact.denominator)
        return _bounded(exact.numerator) if exact.denominator == 1 else Fraction(exact)
    if isinstance(value, tuple):
        if depth == DEEPEST or len(value) > left[0]:
            raise ArgumentError(f"a tuple has at most {LARGEST} parts, at most {DEEPEST} within another")
        return tuple(_canonical(part, left, depth + 1) for part in value)
    if value is None:
        return None
    hint = "; write a tuple" if isinstance(value, (list, set, frozenset)) else ""
    kind = type(value).__name__
    raise ArgumentError(f"a value is None, a number, a string or a tuple of these, got {kind} {shown(value)}{hint}")


def _bounded(number: int) -> int:
    if number.bit_length() > LARGEST:
        raise ArgumentError(f"a number has at most {LARGEST} bits here, got {number.bit_length()}")
    return number
