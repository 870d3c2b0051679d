"""`NormSite`: a norm of rows that heads carry out in one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import ArgumentError
from ...programs.program import Program
from ..site import Seat, Site, Span, count, span

MAX_HEADS = 64  # where the fit of 1/sqrt has long been at the roundoff of float64


@dataclass(frozen=True)
class NormSite(Site):
    """The mean squares of rows that the heads are meant for, and how many heads there are."""

    family: ClassVar[str] = "norm"
    lemmas: ClassVar[tuple[str, ...]] = ("G1", "G3", "A5")
    channelwise: ClassVar[bool] = False

    variance: Span
    heads: int

    @property
    def spans(self) -> tuple[Span, ...]:
        return ()

    def seat(self, program: Program) -> Seat:
        return Seat("self", self.heads, label="norm: ")

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> NormSite:
        low, high = span("variance", config["variance"])
        heads = count("heads", config["heads"] if "heads" in config else len(config["scales"]), MAX_HEADS)
        if low < 0 or heads < 1:
            raise ArgumentError(f"a norm has mean squares of at least 0 and at least one head, got {low:g} and {heads}")
        return cls(op, (low, high), heads)


SITES: dict[str, type[Site]] = {"norm": NormSite}
