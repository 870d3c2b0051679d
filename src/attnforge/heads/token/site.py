"""Sites of operations on whole tokens and between tokens: softmax over channels, attention, fixed mixing, maximum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ...arguments import number, positive
from ...errors import ArgumentError
from ...programs.ops import Attention, Mix
from ...programs.positions import average
from ...programs.program import Program
from ..site import Seat, Site, Span, count, span


@dataclass(frozen=True)
class SoftmaxSite(Site):
    """Softmax over channels, and the interval of its logits."""

    family: ClassVar[str] = "softmax"
    lemmas: ClassVar[tuple[str, ...]] = ("A5",)
    channelwise: ClassVar[bool] = False

    interval: Span

    @property
    def spans(self) -> tuple[Span, ...]:
        return (self.interval,)

    def seat(self, program: Program) -> Seat:
        return Seat("memory", 1, label="softmax: ")

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> Self:
        return cls(op, span("interval", config["interval"]))


@dataclass(frozen=True)
class MixSite(SoftmaxSite):
    """A fixed mixing of tokens, and the interval of what is mixed."""

    family: ClassVar[str] = "mix"
    lemmas: ClassVar[tuple[str, ...]] = ("D1", "D2", "D3", "A5")

    def seat(self, program: Program) -> Seat:
        """One head for a multiple of a mean; otherwise one for the entries of each sign."""
        op = program.ops[self.op]
        if not isinstance(op, Mix):
            raise ArgumentError(f"a site for mixing stands at operation {self.op}, which is {op.word}")
        plain = average(op.matrix)
        heads = 1 if plain is not None else max(1, int((op.matrix > 0).any()) + int((op.matrix < 0).any()))
        return Seat("tokens", heads, causal=plain is not None and plain[1], label="mix: ")


@dataclass(frozen=True)
class MaxSite(Site):
    """The maximum over tokens: the interval of the entries, and how sharply the largest is chosen."""

    family: ClassVar[str] = "max"
    lemmas: ClassVar[tuple[str, ...]] = ("D4", "A5")
    channelwise: ClassVar[bool] = False

    interval: Span
    sharpness: float

    @property
    def spans(self) -> tuple[Span, ...]:
        return (self.interval,)

    def seat(self, program: Program) -> Seat:
        return Seat("tokens", program.ops[self.op].width, label="max: ")

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> MaxSite:
        return cls(op, span("interval", config["interval"]), positive("sharpness", config["sharpness"]))


@dataclass(frozen=True)
class AttentionSite(Site):
    """One attention head: the width of its queries, Omega for what is hidden, a bound of |logit|, three intervals."""

    family: ClassVar[str] = "attention"
    lemmas: ClassVar[tuple[str, ...]] = ("A5", "D5")
    channelwise: ClassVar[bool] = False

    width: int
    omega: float
    logit: float
    intervals: tuple[Span, Span, Span]

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.intervals

    def largest_logit(self) -> float:
        return self.logit

    def seat(self, program: Program) -> Seat:
        op = program.ops[self.op]
        if not isinstance(op, Attention):
            raise ArgumentError(f"a site for attention stands at operation {self.op}, which is {op.word}")
        return Seat("tokens", 1, causal=op.causal, label="attention: ")

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> AttentionSite:
        query, key, value = (span("intervals", pair) for pair in config["intervals"])
        width, omega = count("width", config["width"]), positive("omega", config["omega"])
        return cls(op, width, omega, number("logit", config["logit"]), (query, key, value))


SITES: dict[str, type[Site]] = {
    "softmax": SoftmaxSite,
    "mix": MixSite,
    "max": MaxSite,
    "attention": AttentionSite,
}
