"""Numbers of different tokens: fixed mixing of tokens, so that what is combined stands at one token.

In a program of one token nothing here is ever needed. Rows of atoms are combined token by token where they can be;
where a row holds atoms of several tokens, `Mix` operations bring them together.
"""

from __future__ import annotations

import numpy as np

from ...ir.ops import Array
from .atoms import Ints, Parts, Tape


def unique_rows(rows: Ints) -> tuple[Ints, Ints]:
    """The distinct rows, and for each row the number of its like."""
    if rows.shape[1] == 1:
        values, inverse = np.unique(rows[:, 0], return_inverse=True)
        return values[:, None], inverse.reshape(-1)
    values, inverse = np.unique(rows, axis=0, return_inverse=True)
    return values, inverse.reshape(-1)


def mix(tape: Tape, slots: Ints, matrix: Array) -> Ints:
    """The slots after mixing the tokens of these (distinct) slots with a matrix."""
    return tape.register(tape.build.mix(tape.columns(slots), matrix, tape.site))


def broadcast(tape: Tape, parts: Parts) -> Parts:
    """The same atoms, moved to all tokens: one `Mix` for each token that is read."""
    slot, token = parts.slot.copy(), parts.token.copy()
    for t in np.unique(parts.token[parts.token > 0]).tolist():
        here = parts.token == t
        slots, inverse = np.unique(parts.slot[here], return_inverse=True)
        matrix = np.zeros((tape.tokens, tape.tokens))
        matrix[:, t - 1] = 1.0
        slot[here] = mix(tape, slots, matrix)[inverse.reshape(-1)]
        token[here] = 0
    return Parts(slot, token, parts.point)


def align(tape: Tape, parts: Parts) -> Parts:
    """Rows (R, K) brought to one token each: that of the first atom of the row that stands at one."""
    if tape.one_token(parts.token) is not None:
        return parts
    first = (parts.token > 0).argmax(1)
    target = np.take_along_axis(parts.token, first[:, None], 1)[:, 0]
    slot, token = parts.slot.copy(), parts.token.copy()
    for k in range(slot.shape[1]):
        moving = token[:, k] > 0
        if (token[moving, k] == target[moving]).all():
            continue
        column = _moved(tape, Parts(slot[moving, k], token[moving, k], parts.point[moving, k]), target[moving])
        slot[moving, k], token[moving, k] = column.slot, column.token
    return Parts(slot, token, parts.point)


def _moved(tape: Tape, parts: Parts, target: Ints) -> Parts:
    """Atoms moved to the tokens `target`: by one permutation for each kind of move, where a slot has only one."""
    triples, _ = unique_rows(np.stack([parts.slot, target, parts.token], 1))
    slots, position = np.unique(triples[:, 0], return_inverse=True)
    if len(unique_rows(triples[:, :2])[0]) < len(triples):
        return broadcast(tape, parts)
    moves = np.zeros((len(slots), tape.tokens), dtype=np.int64)
    moves[position.reshape(-1), triples[:, 1] - 1] = triples[:, 2]
    # Tokens that nobody reads get an atom that somebody does: functions must be defined there too.
    moves = np.where(moves == 0, moves.max(1)[:, None], moves)
    kinds, kind = unique_rows(moves)
    renamed = np.zeros(len(slots), dtype=np.int64)
    for i, move in enumerate(kinds):
        renamed[kind == i] = mix(tape, slots[kind == i], np.eye(tape.tokens)[move - 1])
    return Parts(renamed[np.searchsorted(slots, parts.slot)], target, parts.point)


def read_tokens(tape: Tape, parts: Parts) -> Parts:
    """The same atoms (flat), with tokens that are not read replaced by such as are.

    A function with a limited domain must not be evaluated at tokens that the target never hands to it.
    """
    if tape.tokens == 1:
        return parts
    slots, inverse = np.unique(parts.slot, return_inverse=True)
    inverse = inverse.reshape(-1)
    read = np.zeros((len(slots), tape.tokens + 1), dtype=np.int64)
    read[inverse, parts.token] = 1
    missing = (read[:, 0] == 0) & (read[:, 1:] == 0).any(1) & ~tape.is_number(slots)
    if not missing.any():
        return parts
    renamed = slots.copy()
    kinds, kind = unique_rows(read[:, 1:])
    for i, tokens in enumerate(kinds):
        chosen = missing & (kind == i)
        if chosen.any():
            source = np.where(tokens == 1, np.arange(tape.tokens), tokens.argmax())
            renamed[chosen] = mix(tape, slots[chosen], np.eye(tape.tokens)[source])
    return Parts(renamed[inverse], parts.token, parts.point)


def reduce_tokens(tape: Tape, parts: Parts, weight: Array) -> Parts | None:
    """sum_k atoms[:, k] weight[k, j] for rows that hold one slot at the same tokens each; None for other rows.

    Result j stands at token j, a single result at all of them.
    """
    count, columns = len(parts.slot), weight.shape[1]
    present = parts.slot[0] > 0  # atom 0 is the number zero
    if columns > tape.tokens or not present.any() or (parts.slot[:, ~present] != 0).any():
        return None
    slot, token = parts.slot[:, present], parts.token[:, present]
    if (slot != slot[:, :1]).any() or (token != token[:1]).any() or (token == 0).any():
        return None
    matrix = np.zeros((columns, tape.tokens))
    np.add.at(matrix.T, token[0] - 1, weight[present])
    full = np.concatenate([matrix, np.tile(matrix[:1], (tape.tokens - columns, 1))])
    slots, inverse = np.unique(slot[:, 0], return_inverse=True)
    mixed = mix(tape, slots, full)[inverse.reshape(-1)]
    place = np.arange(1, columns + 1) if columns > 1 else np.zeros(1, dtype=np.int64)
    shape = (count, columns)
    point = np.broadcast_to(tape.one_point(parts.point)[:, None], shape)
    return Parts(np.broadcast_to(mixed[:, None], shape), np.broadcast_to(place, shape), point)
