"""The site of a product by tanh pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from attnforge.heads.site import Seat, Site, Span, span
from attnforge.programs.program import Program


@dataclass(frozen=True)
class PairSite(Site):
    """The intervals of both operands; the second is the query."""

    family: ClassVar[str] = "tanh product"
    lemmas: ClassVar[tuple[str, ...]] = ("C2", "A5")

    intervals: tuple[Span, Span]
    swapped: ClassVar[bool] = False

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.intervals

    def seat(self, program: Program) -> Seat:
        return Seat("self", 4, ("self", (1, 1, 1)))  # one key coordinate, one memory slot: as relus have

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> PairSite:
        first, second = config["intervals"]
        return cls(op, (span("intervals", first), span("intervals", second)))


SITES = {"tanh product": PairSite}
