"""What describes a plain transformer besides its weights: plain data, to and from JSON; which column of the residual
stream carries what; and which keys a head may see, by flags, register ids and positions.

A head's logits are content plus exclusion. Content is that of the source network. Exclusion takes one more key
coordinate, or a few: the query of a token carries -Omega where a key that it must not see carries 1, and 0 wherever an
allowed key carries 1, so that allowed logits gain exact zeros. A register's query carries +Omega: it sees excluded
registers only, whose values are 0, so that a register's row never changes. Register 0 is excluded by every head, so
that there is always one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...arguments import counted
from ...box import Box
from ...dtypes import Array
from ...errors import ArgumentError
from ...network import Scope


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
            f"{counted(self.registers, 'register')}, {counted(self.channels, 'channel')}, "
            f"{counted(self.layers, 'layer')}, {counted(self.heads, 'head')}, "
            f"{counted(self.parameters, 'parameter')}, largest |logit| {self.largest_logit:.3g}, "
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
    ids: bool = False

    def __post_init__(self) -> None:
        if len(self.channels) != self.stream:
            raise ArgumentError(f"{len(self.channels)} channels are named, the stream has {self.stream}")
        odd = [len(row) for row in self.heads if not row or self.stream % len(row)]
        if odd:
            raise ArgumentError(f"a stream of {self.stream} channels cannot be shared by {odd[0]} heads")

    def to_json(self) -> dict[str, Any]:
        """JSON that `from_json` turns back into an equal description."""
        left_out = ("heads", "box", "boxes", *(() if self.ids else ("ids",)))  # as files had it before there were ids
        plain = {key: value for key, value in self.__dict__.items() if key not in left_out}
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
            ids=bool(data.get("ids", False)),
        )


def scale_of(width: int) -> float:
    """sqrt(d), what W_Q is multiplied by because `MultiheadAttention` divides by it: a power of two.

    >>> scale_of(64)
    8.0
    """
    root = math.isqrt(width)
    if width != 4 ** (root.bit_length() - 1):
        raise ArgumentError(f"a head's dimension must be a power of 4, got {width}")
    return float(root)


def _head(data: Mapping[str, Any]) -> PlainHead:
    return PlainHead(**{**data, "writes": tuple(data["writes"]), "place": tuple(data["place"])})


FLAG = 0  # the column that is 1 on tokens and 0 on registers: what constants are made of


@dataclass(frozen=True)
class Columns:
    """The columns that every layer shares: flag, register ids, positions of tokens, input, constants."""

    registers: int
    tokens: int
    positions: tuple[int, ...]  # column of each token's one-hot position; empty where no head needs them
    inputs: range
    constants: range
    names: tuple[str, ...]
    hot: tuple[int, ...] = ()  # columns that are one-hot positions: exactly one of them is 1 on a token

    @property
    def ids(self) -> range:
        """The columns of the registers' one-hot ids."""
        return range(1, 1 + self.registers)

    @property
    def first(self) -> int:
        """The first column that heads may write."""
        return len(self.names)


def lay_columns(
    registers: int, tokens: int, inputs: tuple[str, ...], constants: Array | None, names: tuple[str, ...], ordered: bool
) -> Columns:
    """Columns for so many registers and tokens; `ordered` asks for one-hot positions, shared with constants."""
    found = ["token", *(f"register {r}" for r in range(registers))]
    start = len(found) + (0 if not ordered or _shared(constants, tokens) else tokens)
    place = range(start, start + len(inputs))
    after = range(place.stop, place.stop + len(names))
    shared = _shared(constants, tokens)
    positions: tuple[int, ...] = ()
    if ordered and shared:
        positions = tuple(after.start + c for c in shared)
    elif ordered:
        positions = tuple(range(len(found), len(found) + tokens))
        found += [f"position {i}" for i in range(tokens)]
    hot = positions or tuple(after.start + c for c in shared)
    return Columns(registers, tokens, positions, place, after, tuple([*found, *inputs, *names]), hot)


def _shared(constants: Array | None, tokens: int) -> tuple[int, ...]:
    """The constants that are one-hot positions already, in order; empty unless all are there."""
    if constants is None:
        return ()
    eye = np.eye(tokens)
    found = [next((c for c in range(constants.shape[1]) if np.array_equal(constants[:, c], row)), -1) for row in eye]
    return tuple(found) if min(found) >= 0 else ()


def needs_positions(scope: Scope, tokens: int, hidden_future: bool) -> bool:
    """Whether a head tells tokens apart: self heads among several tokens, and causal heads without a causal mask."""
    return tokens > 1 and (scope == "self" or (scope == "tokens" and hidden_future))


def exclusion(columns: Columns, scope: Scope, slots: int, hidden_future: bool) -> tuple[Array, Array]:
    """Query and key coordinates (column, coordinate) that hide keys, for Omega = 1.

    Registers 1 to `slots` are allowed, and tokens by scope. Each product with an allowed key is an exact 0, each
    excluded key gets -1 or less from a token's query.
    """
    n, ids = columns.tokens, columns.ids
    allowed = [ids[r] for r in range(1, slots + 1)]
    banned = [c for c in ids if c not in allowed]
    width = len(columns.names)
    if needs_positions(scope, n, hidden_future):
        return _ordered(columns, banned, scope == "self")
    query, key = np.zeros((width, 1)), np.zeros((width, 1))
    query[FLAG], query[list(ids)], key[banned] = -1.0, 1.0, 1.0
    if scope == "memory":
        key[FLAG] = 1.0
    return query, key


def _ordered(columns: Columns, banned: list[int], own: bool) -> tuple[Array, Array]:
    """Codes of positions: a token's query is -1 wherever the code of a token that it must not see has a 1."""
    n, places = columns.tokens, list(columns.positions)
    code = _code(n) if own else np.concatenate([np.eye(n), np.zeros((n, 1))], 1)
    hidden = 1.0 - code if own else np.concatenate([np.triu(np.ones((n, n)), 1), np.ones((n, 1))], 1)
    query, key = (np.zeros((len(columns.names), code.shape[1])) for _ in range(2))
    query[places], key[places] = -hidden, code
    ends = [0, 1] if own else [n]  # every token's query has -1 in one of these at least
    query[np.ix_(list(columns.ids), ends)] = 1.0
    key[np.ix_(banned, ends)] = 1.0
    return query, key


def _code(n: int) -> Array:
    """One row per token; two rows differ, and where one has a 1 that the other lacks, that tells them apart.

    One-hot, or, for more tokens, each bit of the position twice: as it is and inverted.
    """
    bits = max(1, (n - 1).bit_length())
    if n <= 2 * bits:
        return np.eye(n)
    binary = (np.arange(n)[:, None] >> np.arange(bits)) & 1
    return np.stack([1.0 - binary, binary], -1).reshape(n, 2 * bits)
