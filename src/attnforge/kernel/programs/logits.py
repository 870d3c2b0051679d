"""Queries, keys and values of all combinations of values, their inner products, and how far computed ones are off.

Vectors are whole multiples of one power of two, so that inner products are exact whole numbers (lemma K21). An error
is one bound for a coordinate, over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from flint import arb, fmpq, fmpz, fmpz_mat

from ..balls import ZERO, NotProved, largest, size
from ..rounding import Machine, affine_rounding

FINEST = 96  # binary digits after the point where there are errors, or other fractions: far below any roundoff
PAIRS = 1 << 25  # logits that are looked at for one network: a minute
DIGITS = {"float32": 24, "float64": 53}  # binary digits of a significand
LEAST = {"float32": -126, "float64": -1022}  # exponents of the smallest normal numbers


@dataclass(frozen=True)
class Rows:
    """Vectors, one for each combination: whole numbers of units 2^-scale, and errors of computed coordinates."""

    at: list[list[int]]
    scale: int
    error: list[arb]
    ids: list[dict[int, int]]
    sure: bool  # whether the numbers are what is meant, to the last digit

    @property
    def width(self) -> int:
        """The number of coordinates."""
        return len(self.error)

    def number(self, row: int, coordinate: int) -> fmpq:
        """One coordinate."""
        return fmpq(self.at[row][coordinate], 1) / (fmpz(1) << self.scale)

    def units(self) -> list[int]:
        """The errors, rounded up to units."""
        return [units(e, self.scale) for e in self.error]

    def most(self) -> list[arb]:
        """How large each computed coordinate is at most."""
        found = [max((abs(row[c]) for row in self.at), default=0) for c in range(self.width)]
        return [arb(fmpq(most, 1) / (fmpz(1) << self.scale)) + e for most, e in zip(found, self.error, strict=True)]


def units(error: arb, scale: int) -> int:
    """An upper bound in units of 2^-scale."""
    if not error.is_finite():
        raise NotProved("an error of a column is not known")
    found = (error.upper() * arb(fmpz(1) << scale)).upper().ceil().upper().unique_fmpz()
    assert found is not None
    return int(found)


def rows_of(numbers: Sequence[Sequence[fmpq]], error: Sequence[arb], ids: list[dict[int, int]]) -> Rows:
    """Vectors of rational numbers in units of a power of two; what is lost by that is part of the error."""
    scale, sure = 0 if all(e == 0 for e in error) else FINEST, True
    for row in numbers:
        for x in row:
            q = int(x.q)
            if q & (q - 1):
                scale, sure = max(scale, FINEST), False
            else:
                scale = max(scale, q.bit_length() - 1)
    one = fmpz(1) << scale
    at = [[int((x * one).floor()) for x in row] for row in numbers]
    lost = ZERO if sure else 1 / arb(one)
    return Rows(at, scale, [e + lost for e in error], ids, sure)


def exact_sums(dtype: str, terms: Sequence[int], reach: int, scale: int) -> bool:
    """Whether sums of whole multiples of 2^-scale, of size up to `reach` units, are not rounded in any order (K21)."""
    common = gcd(*terms) if terms else 0
    if not common:
        return True
    grid = (common & -common).bit_length() - 1
    return reach <= 1 << (DIGITS[dtype] + grid) and grid - scale >= LEAST[dtype]


class Logits:
    """All inner products of queries and keys, exactly, in units of 2^-scale; and their rounding."""

    def __init__(self, machine: Machine, dtype: str, queries: Rows, keys: Rows):
        if len(queries.at) * len(keys.at) > PAIRS:
            raise NotProved(f"a head has more than {PAIRS} pairs of queries and keys")
        self.machine, self.queries, self.keys = machine, queries, keys
        self.scale = queries.scale + keys.scale
        self.at: list[list[int]] = _product(queries.at, keys.at)
        sizes = [[abs(x) for x in row] for row in queries.at], [[abs(x) for x in row] for row in keys.at]
        self.by_query, self.by_key = queries.units(), keys.units()
        self.moved_query = [sum(e * k for e, k in zip(self.by_query, row, strict=True)) for row in sizes[1]]
        self.moved_key = [
            sum((q + e) * f for q, e, f in zip(row, self.by_query, self.by_key, strict=True)) for row in sizes[0]
        ]
        asked = [gcd(*(row[c] for row in queries.at)) for c in range(queries.width)]
        sure = queries.sure and keys.sure and not any(self.by_key)
        widest = [max((row[c] for row in sizes[0]), default=0) for c in range(queries.width)]
        reach = [sum(w * k for w, k in zip(widest, key, strict=True)) for key in sizes[1]]  # or more
        self.exact: list[bool] = []
        self.counts: list[int] = []
        for key, moved, most in zip(keys.at, self.moved_query, reach, strict=True):
            terms = [g * abs(x) for g, x in zip(asked, key, strict=True) if g and x]  # products are multiples of these
            self.exact.append(sure and not moved and exact_sums(dtype, terms, most, self.scale))
            self.counts.append(
                sum((g or e) != 0 and (x or f) != 0
                    for g, e, x, f in zip(asked, self.by_query, key, self.by_key, strict=True))
            )  # fmt: skip
        self.loose = [j for j, one in enumerate(self.exact) if not one]
        self.apart: dict[int, list[int]] = {}
        top = max(reach, default=0) + max(self.moved_query, default=0) + max(self.moved_key, default=0)
        if not self.real(top) < machine.huge:
            raise NotProved("logits may overflow")

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Inner products of the sizes of coordinates."""
        a, b = ([[abs(x) for x in row] for row in rows.at] for rows in (self.queries, self.keys))
        found: list[list[int]] = _product(a, b)
        return found

    def rounding(self, row: int, chosen: Sequence[int] | None = None) -> arb:
        """What rounding does to the logits of a query and some keys, or all."""
        loose = self.loose if chosen is None else [j for j in chosen if not self.exact[j]]
        if not loose:
            return ZERO
        sizes, moved, count = self.sizes[row], self.moved_query, max(self.counts[j] for j in loose)
        most = self.real(max(sizes[j] + moved[j] for j in loose) + self.moved_key[row])
        return self.machine.gamma(count) * most + (count + 1) * self.machine.tiny

    def off(self, row: int, a: int, b: int) -> arb:
        """How far the computed difference of two logits can be from the exact one."""
        pair = zip(self.by_query, self.keys.at[a], self.keys.at[b], strict=True)
        moved = sum(e * abs(x - y) for e, x, y in pair) + 2 * self.moved_key[row]
        return size(self.real(moved) + self.rounding(row, [a]) + self.rounding(row, [b]))

    def real(self, x: int) -> arb:
        """A number of units as a number."""
        return arb(fmpq(x, 1) / (fmpz(1) << self.scale))

    def lead(self, row: int, top: int, others: Sequence[int]) -> arb:
        """A lower bound of the computed logit of one key less that of others: errors of queries move both."""
        if not others:
            return arb.pos_inf()
        logits = self.at[row]
        if any(self.by_query):
            if top not in self.apart:
                a = self.keys.at[top]
                self.apart[top] = [
                    sum(e * abs(x - y) for e, x, y in zip(self.by_query, a, b, strict=True)) for b in self.keys.at
                ]
            apart = self.apart[top]
            most = max(logits[j] + apart[j] for j in others)
        else:
            most = max(logits[j] for j in others)
        return self._less(row, logits[top], most)

    def above(self, row: int, chosen: Sequence[int], others: Sequence[int]) -> arb:
        """The same for the least of several keys."""
        if not others:
            return arb.pos_inf()
        logits, moved = self.at[row], self.moved_query
        return self._less(
            row, min(logits[j] - moved[j] for j in chosen), max(logits[j] + moved[j] for j in others)
        )

    def _less(self, row: int, high: int, low: int) -> arb:
        return (self.real(high - low - 2 * self.moved_key[row]) - 2 * self.rounding(row)).lower()

    def spread(self, row: int, chosen: Sequence[int]) -> arb:
        """How far computed logits of several keys can be apart."""
        logits, moved = self.at[row], self.moved_query
        apart = max(logits[j] + moved[j] for j in chosen) - min(logits[j] - moved[j] for j in chosen)
        return size(self.real(apart + 2 * self.moved_key[row]) + 2 * self.rounding(row, chosen))


def _product(a: list[list[int]], b: list[list[int]]) -> Any:
    """The inner products of rows with rows."""
    if not a or not b or not a[0]:
        return [[0] * len(b) for _ in a]
    return [[int(x) for x in row] for row in (fmpz_mat(a) * fmpz_mat(b).transpose()).tolist()]


@dataclass(frozen=True)
class Output:
    """What values become through the output projection: exact numbers by row and column, errors by column."""

    at: list[list[fmpq]]
    error: list[arb]
    most: list[arb]


def through(machine: Machine, values: Rows, W: Sequence[Sequence[float]], columns: Sequence[int],
            read: Sequence[arb], exact: Any) -> Output:  # fmt: skip
    """Values times W, where each value was read up to `read` (in place of its own error)."""
    by = [[exact(row[c]) for c in columns] for row in W]
    at = []
    for i in range(len(values.at)):
        own = [values.number(i, r) for r in range(len(by))]
        at.append([sum((x * w[n] for x, w in zip(own, by, strict=True) if w[n]), fmpq(0)) for n in range(len(columns))])
    peak = [m - e + r for m, e, r in zip(values.most(), values.error, read, strict=True)]
    error, most = [], []
    for n, c in enumerate(columns):
        weights = [row[c] for row in W]
        reach = sum((size(arb(by[r][n])) * peak[r] for r in range(len(by))), ZERO)
        moved = sum((size(arb(by[r][n])) * read[r] for r in range(len(by))), ZERO)
        error.append((moved + affine_rounding(machine, weights, 0.0, reach)).upper())
        most.append(reach)
    if not largest(most) < machine.huge:
        raise NotProved("what a head writes may overflow")
    return Output(at, error, most)
