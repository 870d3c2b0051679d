"""What the purity check found: a census of the allowed operations, and the offences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from attnforge.errors import ArgumentError, PurityError
from attnforge.purity.tables import CATEGORIES


@dataclass(frozen=True)
class Census:
    """How often a network uses each operation, by category.

    >>> census = Census.of([("affine", "linear"), ("attention", "softmax"), ("affine", "linear")])
    >>> census.total, census.attention, census.affine
    (3, 1, 2)
    >>> print(census)
    category   operation  count
    attention  softmax        1
    affine     linear         2
    total                     3
    """

    counts: tuple[tuple[str, str, int], ...]
    """Rows (category, operation, count), in the order of the categories, the most frequent operation first."""

    def __post_init__(self) -> None:
        for category, operation, count in self.counts:
            if category not in CATEGORIES:
                known = ", ".join(CATEGORIES)
                raise ArgumentError(f"category must be one of {known}: got {category!r} for {operation}")
            if count < 1:
                raise ArgumentError(f"a count must be at least 1: got {count} for {operation}")

    @classmethod
    def of(cls, entries: Iterable[tuple[str, str]]) -> Census:
        """The census of (category, operation) pairs, one pair for each operation of the graph."""
        rows = [(category, operation, count) for (category, operation), count in Counter(entries).items()]
        return cls(tuple(sorted(rows, key=lambda row: (CATEGORIES.index(row[0]), -row[2], row[1]))))

    @property
    def by_category(self) -> dict[str, int]:
        """The number of operations in every category, zeros included."""
        return {name: sum(row[2] for row in self.counts if row[0] == name) for name in CATEGORIES}

    @property
    def by_operation(self) -> dict[str, int]:
        """The number of uses of every operation, whatever its category."""
        totals: Counter[str] = Counter()
        for _, operation, count in self.counts:
            totals[operation] += count
        return dict(totals)

    @property
    def total(self) -> int:
        """All operations together."""
        return sum(row[2] for row in self.counts)

    @property
    def attention(self) -> int:
        """Softmaxes, fused attentions, and the products Q K^T and weights times V."""
        return self.by_category["attention"]

    @property
    def affine(self) -> int:
        """Linear maps, sums, and products with constants."""
        return self.by_category["affine"]

    @property
    def movement(self) -> int:
        """Views, slices, concatenations, gathers with fixed indices, changes of dtype or device."""
        return self.by_category["movement"]

    @property
    def lookup(self) -> int:
        """Rows of a table, chosen by an integer input."""
        return self.by_category["lookup"]

    @property
    def mask(self) -> int:
        """Operations on integer and boolean inputs alone."""
        return self.by_category["mask"]

    @property
    def positions(self) -> int:
        """Functions of positions that come from an integer input, such as rotary angles."""
        return self.by_category["positions"]

    @property
    def identity(self) -> int:
        """Copies, and dropout in evaluation mode."""
        return self.by_category["identity"]

    @property
    def constant(self) -> int:
        """Operations on weights and constants alone."""
        return self.by_category["constant"]

    def __str__(self) -> str:
        rows = [("category", "operation", "count"), *((a, b, str(n)) for a, b, n in self.counts)]
        rows.append(("total", "", str(self.total)))
        first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {n:>{third}}" for a, b, n in rows)


@dataclass(frozen=True)
class Offence:
    """One operation that an attention-only network must not contain."""

    operation: str
    why: str
    source: str
    """`file:line  code` of the call, or an empty string where it is not known."""
    module: str = ""
    """The dotted path of the submodule the operation belongs to, empty for the network itself."""

    def __str__(self) -> str:
        place = f"\n      {self.source}" if self.source else ""
        return f"{self.operation}{f' in {self.module}' if self.module else ''}: {self.why}{place}"


def refusal(network: str, offences: Iterable[Offence], note: str = "") -> PurityError:
    """One error that lists every offence once, with how often it occurs."""
    counted = Counter(offences)
    lines = [f"  {f'{count} x ' if count > 1 else ''}{offence}" for offence, count in counted.items()]
    total = sum(counted.values())
    number = f"{total} operation{'s' if total > 1 else ''}"
    head = f"{network} is not attention-only: {number} beyond affine maps and softmax attention"
    hint = note or "attnforge.compile and attnforge.convert turn such operations into attention heads"
    return PurityError("\n".join([head, *lines, hint]))
