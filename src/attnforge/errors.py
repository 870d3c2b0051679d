"""The errors attnforge raises on purpose.

Every message says what was expected, what was given, where, and what to do. One base class, `AttnforgeError`, catches
them all; each error is also the builtin that a Python programmer would try first.
"""

from __future__ import annotations

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

    >>> closest("gleu", ["gelu", "sin"]), closest("foo", ["floor", "cos"])
    ("; did you mean 'gelu'?", '')
    """
    known = list(known)
    same = next((name for name in known if name.lower() == word.lower() and name != word), None)
    if same is not None:  # but for capitals
        return f"; did you mean '{same}'?"
    allowed = max(1, len(word) // 3)  # slips: one in three letters is still the same word
    near = {name: _slips(word, name) for name in known if abs(len(name) - len(word)) <= allowed}
    near = {name: slips for name, slips in near.items() if slips <= allowed and (slips < len(word) or not slips)}
    best = min(near, key=lambda name: (near[name], not word.startswith(name[:-1])), default=None)
    if best is None:  # a longer or shorter form of one of them: sinus, expon
        longest = (k for k in known if min(len(k), len(word)) >= 3 and (word.startswith(k) or k.startswith(word)))
        best = max(longest, key=len, default=None)
    return f"; did you mean '{best}'?" if best else ""


def _slips(a: str, b: str) -> int:
    """How many letters must be changed, added, dropped or swapped with their neighbours to make b of a."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            cost = min(row[-1] + 1, before[j] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]


LINE = 72  # characters of a formula that are shown around a mistake: they fit a line, indented


def _caret(formula: str, position: int) -> str:
    """The part of the formula around `position`, with a caret below it."""
    start = max(0, min(position - LINE // 2, len(formula) - LINE))
    window = formula[start : start + LINE].replace("\n", " ").replace("\t", " ")
    left, right = "..." if start else "", "..." if start + LINE < len(formula) else ""
    return f"  {left}{window}{right}\n  {' ' * (len(left) + position - start)}^"
