"""The same meaning for many sequences at once: values are numbered, tables are looked up by numpy.

`evaluate` in `language` states what a program means, one sequence at a time; `run_many` computes the same for many.
Sequences of one length are rows of an array of numbers, each the place of a value in a list of the values that occur. A
function is asked once for each combination of values that occurs, sums of numbers are exact whole numbers over a common
denominator, and what raises an error there raises it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, DomainError
from . import language
from .language import Aggregate, And, Constant, Indices, Map, Node, Not, Or, Select, SelectorWidth, SOp, Tokens, walk
from .values import Value, canonical, is_numeric

Codes = npt.NDArray[np.int64]
Hits = npt.NDArray[np.bool_]

#: What numpy does for the named comparisons.
COMPARISONS: dict[object, Callable[..., Hits]] = {
    language.eq: np.equal, language.ne: np.not_equal, language.lt: np.less, language.leq: np.less_equal,
    language.gt: np.greater, language.geq: np.greater_equal,
}  # fmt: skip
ENTRIES = 2**22  # entries of a selector's array at a time: 32 MB for the array of numbers that an aggregate reads
EXACT = 2**53  # whole numbers below this are exact in float64, where products of matrices are fast


@dataclass(frozen=True)
class Coded:
    """An s-op on a batch: at every position the place of its value in `known`."""

    codes: Codes
    known: list[Value]

    def values(self) -> list[list[Value]]:
        """The values themselves, a list a sequence."""
        return [[self.known[code] for code in row] for row in self.codes.tolist()]


def run_many(program: SOp, sequences: Iterable[Sequence[object]]) -> list[list[Value]]:
    """What a program means on each of many sequences, which may differ in length.

    >>> from attnforge.rasp import length, indices
    >>> run_many(length - indices, ["abc", "a"])
    [[3, 2, 1], [1]]
    """
    given = [tuple(canonical(token) for token in sequence) for sequence in sequences]
    if not isinstance(program, SOp):
        raise ArgumentError(f"a program is a sequence op, got {type(program).__name__}")
    if not all(given):
        raise DomainError("a sequence is empty; a program runs on one token or more")
    places: dict[int, list[int]] = {}
    for i, sequence in enumerate(given):
        places.setdefault(len(sequence), []).append(i)
    found: list[list[Value]] = [[]] * len(given)
    order = walk(program)
    for length, indices in places.items():
        step = max(1, ENTRIES // length**2)
        for start in range(0, len(indices), step):
            some = indices[start : start + step]
            for i, values in zip(some, _batch(order, [given[i] for i in some]).values(), strict=True):
                found[i] = values
    return found


def _batch(order: list[Node], sequences: list[tuple[Value, ...]]) -> Coded:
    """The last op of `order` on sequences of one length."""
    number: dict[Value, int] = {}
    codes = np.array([[number.setdefault(token, len(number)) for token in row] for row in sequences], dtype=np.int64)
    left = dict.fromkeys(order, 0)
    for node in order:
        for child in dict.fromkeys(node.children):
            left[child] += 1
    found: dict[Node, Any] = {}
    for node in order:
        found[node] = _node(node, Coded(codes, list(number)), [found[child] for child in node.children])
        for child in dict.fromkeys(node.children):
            left[child] -= 1
            if not left[child]:
                del found[child]  # selectors are large
    result: Coded = found[order[-1]]
    return result


def _node(node: Node, tokens: Coded, operands: list[Any]) -> Coded | Hits:
    shape = tokens.codes.shape
    if isinstance(node, Tokens):
        return tokens
    if isinstance(node, Indices):
        return Coded(np.broadcast_to(np.arange(shape[1]), shape), list(range(shape[1])))
    if isinstance(node, Constant):
        return Coded(np.zeros(shape, dtype=np.int64), [node.value])
    if isinstance(node, Map):
        return _looked_up(operands, node.at)
    if isinstance(node, Select):
        keys, queries = operands
        compare = COMPARISONS.get(node.predicate)
        if compare is not None and _small(keys) and _small(queries):
            k, q = (np.array(side.known, dtype=np.int64)[side.codes] for side in operands)
            return compare(k[:, None, :], q[:, :, None])
        pair = [Coded(keys.codes[:, None, :], keys.known), Coded(queries.codes[:, :, None], queries.known)]
        hits = _looked_up(pair, node.at)
        return np.array(hits.known, dtype=bool)[hits.codes]
    if isinstance(node, (And, Or)):
        return operands[0] & operands[1] if isinstance(node, And) else operands[0] | operands[1]
    if isinstance(node, Not):
        return ~operands[0]
    if isinstance(node, SelectorWidth):
        return Coded(operands[0].sum(axis=2, dtype=np.int64), list(range(shape[1] + 1)))
    assert isinstance(node, Aggregate)
    return _aggregated(node, *operands)


def _small(given: Coded) -> bool:
    """Whether all values are whole numbers that numpy compares exactly."""
    return all(type(value) is int and abs(value) < EXACT for value in given.known)


def _looked_up(operands: list[Coded], function: Callable[..., Value]) -> Coded:
    """A function of coded values, asked once for each combination that occurs."""
    combined: Codes = np.zeros((), dtype=np.int64)
    size = 1
    for operand in operands:
        combined = combined * len(operand.known) + operand.codes
        size *= len(operand.known)
        if size > 2**62:  # the combined number must fit into 64 bits
            raise ArgumentError("the values of a map's operands have too many combinations to be numbered")
    present, codes = _numbered(combined, size)
    known: dict[Value, int] = {}
    image = []
    for code in present.tolist():
        places = []
        for operand in reversed(operands):
            code, place = divmod(code, len(operand.known))
            places.append(operand.known[place])
        image.append(known.setdefault(function(*reversed(places)), len(known)))
    return Coded(np.array(image, dtype=np.int64)[codes], list(known))


def _numbered(combined: Codes, size: int) -> tuple[Codes, Codes]:
    """The numbers below `size` that occur, and for each entry its place among them."""
    if size > ENTRIES:
        present, codes = np.unique(combined, return_inverse=True)
        return present, codes.reshape(combined.shape)
    occurs = np.zeros(size, dtype=bool)
    occurs[combined] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[combined]


def _aggregated(node: Aggregate, hits: Hits, values: Coded) -> Coded:
    """The default, the common value, or the mean from an exact sum and a count."""
    count = hits.sum(axis=2, dtype=np.int64)
    codes = np.broadcast_to(values.codes[:, None, :], hits.shape)
    least = np.where(hits, codes, len(values.known)).min(axis=2)
    most = np.where(hits, codes, -1).max(axis=2)
    several = least < most
    known = {value: i for i, value in enumerate(values.known)}
    default = known.setdefault(node.default, len(known))
    result = np.where(count == 0, default, least)
    if several.any():
        for batch, query in np.argwhere(_touches(hits, values) & several)[:1]:  # numbers and something else
            node.of([values.known[code] for code in values.codes[batch][hits[batch, query]]])
        numbers = [Fraction(value) if is_numeric(value) else Fraction(0) for value in values.known]  # type: ignore[arg-type]
        unit = math.lcm(*(number.denominator for number in numbers))
        scaled = [int(number * unit) for number in numbers]
        fits = max(map(abs, scaled)) * hits.shape[2] < EXACT
        weights = np.array(scaled, dtype=np.float64 if fits else object)[values.codes]
        sums = np.matmul(hits.astype(weights.dtype), weights[:, :, None])[:, :, 0]
        where = np.argwhere(several)
        for (batch, query), total in zip(where.tolist(), sums[several].tolist(), strict=True):
            mean = canonical(Fraction(int(total), unit * int(count[batch, query])))
            result[batch, query] = known.setdefault(mean, len(known))
    return Coded(result, list(known))


def _touches(hits: Hits, values: Coded) -> Hits:
    """Where a selection holds something that is not a number."""
    others = np.array([not is_numeric(value) for value in values.known])[values.codes]
    return (hits & others[:, None, :]).any(axis=2)
