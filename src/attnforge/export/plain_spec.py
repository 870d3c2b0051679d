"""What describes a plain transformer besides its weights: plain data, to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..box import Box
from ..errors import ArgumentError


@dataclass(frozen=True)
class PlainHead:
    """What one head is for: `purpose` in words ("" where the head is padding), which keys it sees, and how sharply.

    `scope` is "memory" (registers only), "self" (its own token and registers) or "tokens"; it sees registers 1 to
    `slots`. `omega` is what excluded keys lose, `logit` a bound of |content|.
    """

    purpose: str = ""
    scope: str = "memory"
    slots: int = 0
    omega: float = 0.0
    logit: float = 0.0
    hiding: int = 0  # the last coordinates of query and key that are used for exclusion
    width: int = 0  # the coordinates of query and key that are used
    writes: tuple[int, ...] = ()  # columns of the residual stream
    place: tuple[int, int, int] = (-1, -1, -1)  # layer, group and head in the source


@dataclass(frozen=True)
class PlainSize:
    """How large a plain transformer is."""

    registers: int
    channels: int
    layers: int
    heads: int
    parameters: int
    largest_logit: float
    largest_activation: float

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.channels} channels, {self.layers} layers, {self.heads} heads, "
            f"{self.parameters} parameters, largest |logit| {self.largest_logit:.3g}, "
            f"largest |activation| {self.largest_activation:.3g}"
        )


@dataclass(frozen=True)
class PlainSpec:
    """Sizes, names and shapes. Every block has `stream` channels and len(heads[block]) heads, padding included."""

    registers: int
    tokens: int
    stream: int
    outputs: int
    inputs: tuple[str, ...]
    channels: tuple[str, ...]
    heads: tuple[tuple[PlainHead, ...], ...]
    causal: bool
    fixed: bool
    box: Box
    boxes: tuple[Box, ...]
    output_shape: tuple[int, ...] | None
    first_row: bool
    largest_activation: float

    def __post_init__(self) -> None:
        if len(self.channels) != self.stream:
            raise ArgumentError(f"{len(self.channels)} channels are named, the stream has {self.stream}")
        odd = [len(row) for row in self.heads if not row or self.stream % len(row)]
        if odd:
            raise ArgumentError(f"a stream of {self.stream} channels cannot be shared by {odd[0]} heads")

    def to_json(self) -> dict[str, Any]:
        """JSON that `from_json` turns back into an equal description."""
        plain = {key: value for key, value in self.__dict__.items() if key not in ("heads", "box", "boxes")}
        return {
            **plain,
            "heads": [[asdict(head) for head in row] for row in self.heads],
            "box": self.box.to_json(),
            "boxes": [box.to_json() for box in self.boxes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlainSpec:
        """The description that `to_json` wrote; other keys are left alone."""
        shape = data["output_shape"]
        return cls(
            registers=int(data["registers"]),
            tokens=int(data["tokens"]),
            stream=int(data["stream"]),
            outputs=int(data["outputs"]),
            inputs=tuple(map(str, data["inputs"])),
            channels=tuple(map(str, data["channels"])),
            heads=tuple(tuple(_head(head) for head in row) for row in data["heads"]),
            causal=bool(data["causal"]),
            fixed=bool(data["fixed"]),
            box=Box.from_json(data["box"]),
            boxes=tuple(Box.from_json(box) for box in data["boxes"]),
            output_shape=None if shape is None else tuple(int(s) for s in shape),
            first_row=bool(data["first_row"]),
            largest_activation=float(data["largest_activation"]),
        )


def _head(data: Mapping[str, Any]) -> PlainHead:
    return PlainHead(**{**data, "writes": tuple(data["writes"]), "place": tuple(data["place"])})
