"""A softmax over constant slots that selects the nearest of some points (lemmas K40 and K41), and layers that only move
numbers: gathering, positions, registers. These are asked to be what they should, entry by entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import ZERO, NotProved, largest, size
from ..file import Tensor
from ..programs.prove import DEAD
from ..rounding import EXPONENTIAL, Machine
from .hypothesis import Hypothesis

Sides = Sequence[tuple[float, float]]
Table = list[list[float]]  # a row for each slot
Entries = Mapping[Any, float]  # of a table, by their place


@dataclass(frozen=True)
class Slots:
    """One head: keys (slope for each coordinate, offset) that are read by (x - middle, 1), and values."""

    middle: list[float]
    keys: Table
    values: Table


def expect(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], entries: Entries) -> None:
    """Take a tensor out of those that are left, and refuse it unless it is 0 but for these entries."""
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise CertificateError(f"{name} has the shape {tensor.shape}, where {shape} belongs")
    flat = [0.0] * len(tensor.numbers)
    for index, x in entries.items():
        at = 0
        for i, n in zip(index, shape, strict=True):
            at = at * n + i
        flat[at] = x
    if flat != list(tensor.numbers):
        raise CertificateError(f"{name} does more than to move numbers, or less: nothing is proved for it")


def eye(shape: tuple[int, int], row: int = 0, column: int = 0, count: int | None = None) -> Entries:
    """Ones of an identity that begins at a row and a column."""
    rest = min(shape[0] - row, shape[1] - column) if count is None else count
    return {(row + i, column + i): 1.0 for i in range(rest)}


def first(entries: Entries) -> dict[tuple[int, ...], float]:
    """The same in a table of one head."""
    return {(0, *index): x for index, x in entries.items()}


def gathered(tensors: dict[str, Tensor], prefix: str, dtype: str, tokens: int, width: int) -> None:
    """A layer that gives every token the channels of all, and its position: exact, or refused (lemma K41)."""
    n, both, after = tokens, width + tokens, tokens * width + tokens
    start = f"{prefix}gather.groups.0."
    omega = -tensors[start + "b_K"].numbers[0]
    if not omega >= DEAD[dtype]:
        raise CertificateError("tokens that a head must not read weigh something")
    expect(tensors, start + "W_Q", (n, both, n), {})
    expect(tensors, start + "b_Q", (n, n), eye((n, n)))
    expect(tensors, start + "b_K", (n, n), {(h, c): -omega for h in range(n) for c in range(n)})
    expect(tensors, start + "W_K", (n, both, n), {(h, width + c, c): omega for h in range(n) for c in range(n)})
    expect(tensors, start + "W_V", (n, both, width), {(h, c, c): 1.0 for h in range(n) for c in range(width)})
    out = {(h, c, h * width + c): 1.0 for h in range(n) for c in range(width)}
    expect(tensors, start + "W_O", (n, width, after), out)
    expect(tensors, prefix + "gather.S", (both, after), eye((both, after), width, n * width))
    expect(tensors, prefix + "positions", (n, n), eye((n, n)))


def own_rows(rows: Table, tokens: int, before: int) -> tuple[list[Table], float | None]:
    """Keys for every cell and token, of which a token's own position selects its own: these, token by token, without
    the part that reads positions; and how far below all others are, None where there are no others (lemma K41)."""
    if not tokens:
        return [rows], None
    if len(rows) % tokens or any(len(row) != before + tokens for row in rows):
        raise CertificateError("there is not one key for each cell and token")
    dead = -min(x for row in rows for x in row[before:])
    for k, row in enumerate(rows):
        if row[before:] != [0.0 if c == k % tokens else -dead for c in range(tokens)]:
            raise CertificateError("keys do not tell positions apart")
    return [[row[:before] for row in rows[t::tokens]] for t in range(tokens)], dead if tokens > 1 else None


def unseen(machine: Machine, dtype: str, depth: float | None, logit: arb, terms: int) -> None:
    """Refuse unless slots whose logits are `depth` lower, beside logits of such a size, weigh an exact 0 (K41)."""
    if depth is None:
        return
    gamma = machine.gamma(terms + 4)
    if not logit + arb(depth) < machine.huge:
        raise NotProved("logits may overflow")
    if not arb(depth) * (1 - gamma) - 2 * logit * (1 + gamma) > arb(DEAD[dtype]) * (1 + 4 * machine.u) + 1:
        raise NotProved("slots that must weigh nothing may weigh something")


def loosened(machine: Machine, error: arb) -> arb:
    """d of lemma K40: logits that err by `error`, exponentials that err by their own."""
    return error * (1 + 2 * machine.u) - (1 - EXPONENTIAL * machine.u).log()


def averaged(machine: Machine, slots: int, heavy: int, light: arb, most: arb) -> arb:
    """What rounding adds to a mean of values of at most `most`: all but `heavy` slots weigh `light` together (K4)."""
    if not 8 * slots * machine.u < 1:
        raise NotProved(f"{slots} slots are too many for sums in this dtype")
    return (machine.gamma(2 * heavy + 1) + 6 * light) * most + 2 * slots * (1 + most) * machine.tiny


def logit_errors(machine: Machine, slots: Slots, wanted: Sequence[Sequence[arb]], sides: Sides) -> tuple[arb, arb]:
    """How far computed logits are from those of the wanted keys, and how large they are, at most (lemma K40)."""
    reach = [size(arb(a) - arb(m)).max(size(arb(b) - arb(m))) for (a, b), m in zip(sides, slots.middle, strict=True)]
    reach.append(arb(1))
    off, most = ZERO, ZERO
    for key, should in zip(slots.keys, wanted, strict=True):
        own = ZERO
        for x, y, r in zip(key, should, reach, strict=True):
            own += size(arb(x) - y) * r
        off = off.max(own)
        most = most.max(sum((arb(abs(x)) * r for x, r in zip(key, reach, strict=True)), ZERO))
    width = len(reach)
    return (off + machine.gamma(width + 1) * most + (width + 1) * machine.tiny).upper(), most.upper()


def values_error(values: Table, added: Sequence[float], wanted: Table, outputs: range) -> tuple[arb, arb]:
    """How far values, and what is added to them, are from samples; and how large values are."""
    if len(values) != len(wanted) or any(len(row) != len(outputs) for row in values):
        raise CertificateError("there is not one value for each sample")
    off, most = ZERO, ZERO
    for row, sample in zip(values, wanted, strict=True):
        for x, more, o in zip(row, added, outputs, strict=True):
            off = off.max(size(arb(x) + arb(more) - arb(sample[o])))
            most = most.max(arb(abs(x)))
    return off, most


def settled(
    machine: Machine, given: Hypothesis, square: arb, off: arb, most: arb, rounding: arb, added: Sequence[float]
) -> arb:
    """The bound, from the mean square distance of what is selected (lemma K40)."""
    last = largest([arb(abs(x)) for x in added])
    total = given.error(square.sqrt()) + off + rounding
    return total + (machine.u * (most + rounding + last) if any(added) else ZERO)
