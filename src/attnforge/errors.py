"""The errors attnforge raises on purpose.

Every message says what was expected, what was given, where, and what to do. One base class,
`AttnforgeError`, catches them all; each error is also the builtin a Python programmer would try first.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AttnforgeError(Exception):
    """Base class of every error attnforge raises on purpose."""


class ArgumentError(AttnforgeError, ValueError):
    """An argument has a wrong type, shape or value."""


class DomainError(AttnforgeError, ValueError):
    """The target is undefined or unbounded on the box, or an input lies outside of it."""


class PrecisionError(AttnforgeError, ValueError):
    """The wanted accuracy cannot be reached; `reachable` is what can be, where that is known."""

    def __init__(self, message: str, reachable: float | None = None):
        super().__init__(message)
        self.reachable = reachable


class UnsupportedOperation(AttnforgeError, NotImplementedError):
    """The target uses operations that have no attention-only form here; all of them are listed."""


class FormulaError(AttnforgeError, ValueError):
    """A formula cannot be read; the message shows the place with a caret."""

    def __init__(self, problem: str, formula: str = "", position: int | None = None):
        self.problem, self.formula, self.position = problem, formula, position
        super().__init__(problem if position is None else f"{problem}\n{_caret(formula, position)}")


class CertificateError(AttnforgeError, RuntimeError):
    """A certificate is stale, or a file does not check."""


class PurityError(AttnforgeError, RuntimeError):
    """A network computes something other than softmax attention and affine maps."""


class MissingExtra(AttnforgeError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str):
        self.package, self.extra = package, extra
        super().__init__(
            f"this needs the package '{package}', which is not installed: "
            f"pip install 'attnforge[{extra}]'"
        )


class ConvergenceError(AttnforgeError, RuntimeError):
    """An iteration did not reach its tolerance."""


class DomainWarning(UserWarning):
    """An input lies outside the interval or box that the certificate speaks of."""


def closest(word: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'gelu'?`, or an empty string when nothing is near.

    >>> closest("gleu", ["gelu", "sin"])
    "; did you mean 'gelu'?"
    """
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""


def _caret(formula: str, position: int, width: int = 72) -> str:
    """The part of the formula around `position`, with a caret below it."""
    start = max(0, min(position - width // 2, len(formula) - width))
    window = formula[start : start + width].replace("\n", " ").replace("\t", " ")
    left, right = "..." if start else "", "..." if start + width < len(formula) else ""
    return f"  {left}{window}{right}\n  {' ' * (len(left) + position - start)}^"
