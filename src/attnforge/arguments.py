"""Guards of arguments: the value, checked, or an `ArgumentError` that names the argument and says what it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from .errors import ArgumentError


def is_number(value: object) -> bool:
    """Whether a value is a finite real number; True and False are not.

    >>> is_number(2), is_number(True), is_number(float("nan"))
    (True, False, False)
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond float64
        return False


def counted(count: int, word: str) -> str:
    """A number of things, in words.

    >>> counted(1, "layer"), counted(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{count} {word}{'' if count == 1 else 's'}"


def shortened(text: str, most: int, mark: str = "...") -> str:
    """A text of at most so many characters: of a longer one the beginning, and a mark.

    >>> shortened("sin(x*y)", 8), shortened("sin(x*y) + 1", 8)
    ('sin(x*y)', 'sin(x...')
    """
    return text if len(text) <= most else text[: most - len(mark)] + mark


def is_whole(value: object, least: int = 0, most: int | None = None) -> bool:
    """Whether a value is a whole number of at least `least` and at most `most`; True and False are not."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and value >= least and (most is None or value <= most)  # type: ignore[operator]


def number(name: str, value: object) -> float:
    """A finite number, or an error that names the argument."""
    if not is_number(value):
        raise ArgumentError(f"{name} must be a finite number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def positive(name: str, value: object) -> float:
    """A finite number greater than 0, or an error that names the argument."""
    given = number(name, value)
    if given <= 0:
        raise ArgumentError(f"{name} must be greater than 0, got {value!r}")
    return given


def whole(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """A whole number from `least` to `most`, or an error that names the argument."""
    if not is_whole(value, least, most):
        top = "" if most is None else f" to {most}"
        span = f"from {least}{top}" if most is not None else f"of at least {least}"
        raise ArgumentError(f"{name} must be a whole number {span}, got {value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def flag(name: str, value: object) -> bool:
    """True or False, or an error that names the argument."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")
    return value


def interval(lo: object, hi: object) -> tuple[float, float]:
    """Two finite numbers lo < hi, or an error that names them."""
    low, high = number("lo", lo), number("hi", hi)
    if low >= high:
        raise ArgumentError(f"the interval needs lo < hi, got lo = {low:g} and hi = {high:g}")
    return low, high


def require_features(target: object, names: Sequence[str] | None) -> None:
    """Raise where a box has names of the features that a model was fitted with, but others, or in another order."""
    features = [str(name) for name in getattr(target, "feature_names_in_", ())]
    if names is None or not set(names) & set(features) or list(names) == features:
        return
    raise ArgumentError(
        f"this {type(target).__name__} was fitted with the features {', '.join(features)}, and the box has "
        f"{', '.join(names)}: give the box the same intervals in the same order"
    )
