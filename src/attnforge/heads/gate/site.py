"""`GateSite`: an operation that gate heads carry out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...arguments import positive
from ...errors import ArgumentError
from ...programs.program import Program
from ..site import Seat, Site, Span, span
from .target import GateTarget, gate_target

#: Knots that a gate in a file may have at most; each is a head.
MOST_KNOTS = 4096


@dataclass(frozen=True)
class GateSite(Site):
    """A gate by name and parameters, its sharpness, and the interval it is meant for."""

    family: ClassVar[str] = "gate"
    lemmas: ClassVar[tuple[str, ...]] = ("B5", "A5")

    name: str
    parameters: Mapping[str, Any] = field(hash=False)
    sharpness: float
    interval: Span

    @property
    def target(self) -> GateTarget:
        """What the gate was built to compute; a certificate asks the operation instead."""
        return gate_target(self.name, **self.parameters)

    @property
    def spans(self) -> tuple[Span, ...]:
        return (self.interval,)

    def seat(self, program: Program) -> Seat:
        return Seat("self", self.target.heads, ("self", self.target.kind))

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> GateSite:
        parameters = dict(config["parameters"])
        if any(isinstance(value, list) and len(value) > MOST_KNOTS for value in parameters.values()):
            raise ArgumentError(f"a gate in a file has at most {MOST_KNOTS} knots")
        site = cls(
            op, str(config["name"]), parameters, positive("sharpness", config["sharpness"]),
            span("interval", config["interval"]),
        )  # fmt: skip
        assert site.target.heads >= 1
        return site


SITES: dict[str, type[Site]] = {"gate": GateSite}
