"""The form of a file's header: checked before anything is built from it.

A form is written like the JSON it describes:

    str, bool, float         a text, true or false, a finite number
    Whole(least, most)       a whole number
    Word("a", "b")           one of these texts
    None                     null
    [form]                   a list of any length;  (form, form): a list of exactly so many
    {"key": form}            an object; keys that end with ? may be missing, keys that are not named are left alone
    Either(form, form)       one or the other
    Any                      anything, within the limits below

Whatever its form, a header has no more than `MOST_DEPTH` levels, finite numbers of at most 64 bits, and texts of at
most `LONGEST` characters: what is built from it has no need to be on its guard against those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..arguments import is_number, is_whole
from ..errors import CertificateError

MOST_DEPTH = 24  # of objects and lists: a plain export of a compiled network, the deepest in the tests, has 9
LONGEST = 1 << 16  # characters of a text: a composite's name has at most 2,000, a list of formulas some more
MOST_WHOLE = 2**63  # whole numbers beyond it are no sizes, and cannot be made into floats
SIZE_LIMIT = 1 << 16  # of anything that is counted (channels, slots, registers): what is built then stays in megabytes
MOST_TOKENS = 1 << 12  # a matrix of tokens by tokens takes 128 MB then


@dataclass(frozen=True)
class Whole:
    """A whole number in a range."""

    least: int = 0
    most: int = SIZE_LIMIT


class Either(tuple[Any, ...]):
    """One of several forms."""

    def __new__(cls, *forms: Any) -> Either:
        return super().__new__(cls, forms)


class Word(tuple[str, ...]):
    """One of several texts."""

    def __new__(cls, *words: str) -> Word:
        return super().__new__(cls, words)


PAIR = (float, float)
BOX = {"names": Either(None, [str]), "shape": [Whole(1)], "lower": [float], "upper": [float]}
CERTIFICATE = {
    "kind": str, "bound": Either(None, float), "dtype": str, "target": str, "box": BOX, "relative": bool,
    "terms": [(str, str, float, str)], "measured": Either(None, float), "weights": str, "lemmas": [str],
    "assumptions": [str], "proof?": str, "kernel?": Either(None, float), "remark?": str,
    "margins?": [(str, Either(None, float), float, float, str)], "domain?": str,
}  # fmt: skip
HEADER = {
    "format": Whole(), "family": str, "config": {}, "certificate": CERTIFICATE, "digest": str, "derivation?": {},
}  # fmt: skip


def require(value: object, form: Any, name: str) -> None:
    """Raise `CertificateError` unless a value has a form; `name` is what it is called in the error.

    >>> require({"lo": 1, "hi": 2.5}, {"lo": float, "hi": float, "note?": str}, "an interval")
    >>> require({"lo": "1"}, {"lo": float}, "an interval")
    Traceback (most recent call last):
    attnforge.errors.CertificateError: an interval.lo must be a finite number, got '1'
    """
    found = _problem(value, form, name)
    if found is not None:
        raise CertificateError(found)


def limited(value: object, name: str) -> None:
    """Raise `CertificateError` where JSON is beyond the limits of any header."""
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > MOST_DEPTH:
            raise CertificateError(f"{name} is nested more than {MOST_DEPTH} deep")
        if isinstance(item, str):
            if len(item) > LONGEST:
                raise CertificateError(f"{name} holds a text of {len(item):,} characters, more than {LONGEST:,}")
        elif isinstance(item, dict):
            todo += [(each, depth + 1) for pair in item.items() for each in pair]
        elif isinstance(item, list):
            todo += [(each, depth + 1) for each in item]
        elif isinstance(item, int) and abs(item) > MOST_WHOLE:
            raise CertificateError(f"{name} holds a whole number beyond 2^63")
        elif isinstance(item, float) and not math.isfinite(item):
            raise CertificateError(f"{name} holds {item}, which is no number that JSON has")


def _problem(value: object, form: Any, name: str) -> str | None:
    if form is Any:
        return None
    if isinstance(form, Either):
        found = [_problem(value, each, name) for each in form]
        return None if None in found else found[-1]
    wanted = _wanted(value, form)
    if wanted is not None:
        return f"{name} must be {wanted}, got {_shown(value)}"
    if isinstance(form, dict):
        assert isinstance(value, dict)
        for key, inner in form.items():
            plain = key.removesuffix("?")
            if plain not in value and plain == key:
                return f"{name} has no '{key}'"
            found_here = _problem(value[plain], inner, f"{name}.{plain}") if plain in value else None
            if found_here is not None:
                return found_here
    if isinstance(form, (list, tuple)) and not isinstance(form, Word):
        assert isinstance(value, list)
        forms = form if isinstance(form, tuple) else form * len(value)
        for i, (each, inner) in enumerate(zip(value, forms, strict=True)):
            found_here = _problem(each, inner, f"{name}[{i}]")
            if found_here is not None:
                return found_here
    return None


def _wanted(value: object, form: Any) -> str | None:
    """What a value must be, if it is not, by its type alone."""
    if isinstance(form, Whole):
        return None if is_whole(value, form.least, form.most) else f"a whole number from {form.least} to {form.most}"
    if isinstance(form, Word):
        return None if isinstance(value, str) and value in form else f"one of {', '.join(form)}"
    if isinstance(form, tuple):
        return None if isinstance(value, list) and len(value) == len(form) else f"a list of {len(form)}"
    if isinstance(form, (list, dict)):
        return None if isinstance(value, type(form)) else "a list" if isinstance(form, list) else "an object"
    if form is float:
        return None if is_number(value) else "a finite number"
    if form is None:
        return None if value is None else "null"
    return None if isinstance(value, form) else {str: "a text", bool: "true or false"}[form]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
