"""`AnchorSite`: an operation that heads over a table of anchors carry out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...arguments import number
from ...errors import ArgumentError
from ...programs.program import Program
from ..site import Seat, Site, Span, count, span

ANCHORS = "anchors: "  # how the purpose of a group with a table of anchors begins
#: Edges of first cells that a file may name at most: work is bounded for every file.
MOST_EDGES = 1 << 16


@dataclass(frozen=True)
class AnchorSite(Site):
    """The table, by its number, that the site shares with others, its anchors, and the interval it is meant for.

    `edges` are the boundaries of first cells for the bound, dense where anchors are: a choice, not a claim. `even` are
    the numbers of a table that may be read with one exponential (`heads.fast.even`), empty where there is none.
    """

    family: ClassVar[str] = "anchor"
    lemmas: ClassVar[tuple[str, ...]] = ("A4", "A5")

    table: int
    interval: Span
    anchors: int
    edges: tuple[float, ...] = field(repr=False, compare=False)
    even: tuple[float, ...] = field(default=(), repr=False)

    @property
    def spans(self) -> tuple[Span, ...]:
        return (self.interval,)

    @property
    def lattice(self) -> tuple[float, ...]:
        return self.even

    def seat(self, program: Program) -> Seat:
        return Seat("memory", 1, ("table", self.table), label=ANCHORS, trainable=("M_K", "M_V"))

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> AnchorSite:
        edges = np.asarray(config["edges"], dtype=np.float64)
        if edges.ndim != 1 or len(edges) > MOST_EDGES or not np.isfinite(edges).all():
            raise ArgumentError(f"the edges of a table must be at most {MOST_EDGES} finite numbers")
        return cls(
            op, count("table", config["table"]), span("interval", config["interval"]),
            count("anchors", config["anchors"]), tuple(edges.tolist()),
            tuple(number("even", x) for x in config.get("even", ())),
        )  # fmt: skip

    def config(self) -> dict[str, Any]:
        return {name: value for name, value in super().config().items() if name != "even" or value}


SITES: dict[str, type[Site]] = {"anchor": AnchorSite}
