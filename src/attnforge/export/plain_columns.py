"""Which column of the residual stream carries what, and which keys a head may see: flags, register ids, positions.

A head's logits are content plus exclusion. Content is that of the source network. Exclusion takes one more key
coordinate, or a few: the query of a token carries -Omega where a key that it must not see carries 1, and 0 wherever an
allowed key carries 1, so that allowed logits gain exact zeros. A register's query carries +Omega: it sees excluded
registers only, whose values are 0, so that a register's row never changes. Register 0 is excluded by every head, so
that there is always one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ir.ops import Array
from ..network import Scope

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
