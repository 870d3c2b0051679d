"""`ProductSite` and `SquareSite`: operations that product heads carry out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ...arguments import flag, number, positive
from ...errors import ArgumentError
from ...programs.program import Program
from ..site import Seat, Site, Span, count, span

MOST_NODES = 24  # Gauss-Lobatto nodes: from 20 on the remainder of lemma C1 is below every dtype's roundoff


@dataclass(frozen=True)
class ProductSite(Site):
    """Gauss-Lobatto nodes, gain and centres of lemma C1, which operand is the query, and both intervals.

    `intervals` are those of the value operand and of the query operand, in this order.
    """

    family: ClassVar[str] = "product"
    lemmas: ClassVar[tuple[str, ...]] = ("C1", "A5")

    nodes: int
    gain: float
    centre: tuple[float, float]
    swapped: bool
    intervals: tuple[Span, Span]

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.intervals[::-1] if self.swapped else self.intervals

    @property
    def order(self) -> tuple[bool, float]:
        return self.swapped, self.centre[0]

    @property
    def reach(self) -> float:
        return max(map(abs, self.intervals[0]))

    def operands(self, program: Program) -> tuple[int, ...]:
        inputs = program.ops[self.op].inputs
        return inputs[::-1] if self.swapped else inputs

    def seat(self, program: Program) -> Seat:
        return Seat("self", 2, ("self", (2, self.nodes - 1, 1)))

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> Self:
        nodes = count("nodes", config["nodes"], MOST_NODES)
        if nodes < 2:
            raise ArgumentError(f"a product has at least 2 nodes, got {nodes}")
        a, b = config["centre"]
        first, second = config["intervals"]
        return cls(
            op, nodes, positive("gain", config["gain"]), (number("centre", a), number("centre", b)),
            flag("swapped", config["swapped"]), (span("intervals", first), span("intervals", second)),
        )  # fmt: skip


@dataclass(frozen=True)
class SquareSite(ProductSite):
    """A square: both operands are the same value."""

    family: ClassVar[str] = "square"

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.intervals[:1]

    def operands(self, program: Program) -> tuple[int, ...]:
        return program.ops[self.op].inputs * 2


SITES: dict[str, type[Site]] = {"product": ProductSite, "square": SquareSite}
