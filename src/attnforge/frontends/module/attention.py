"""Attention over tokens, found by what is computed and not by how it is written.

A product of numbers of different tokens is not computed: it is remembered as `Scores`, which may be scaled, shifted by
constants, masked and moved about. A softmax that runs over the tokens of such scores gives `Weights`; and the sum of
weights times numbers of the tokens they weigh is an `Attention`. Heads that were folded into the batch, sliced out of
one projection or transposed to the front need no special care, since every entry knows where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...dtypes import Array
from ...programs.ops import meant_within
from .atoms import Ints, Parts, Refusal, Tape, affine, contract, multiply, unique_rows

#: Scores this low are taken for masks; that no query and key bring a token back is shown once the program is known.
HIDDEN = -1e8
#: So far below the others, exponentials are less than any float: e^-1500 times the largest float is below 10^-340.
GONE = 1500.0


class QueryKey(NamedTuple):
    """Queries and keys of one head, as slots."""

    query: tuple[int, ...]
    key: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """One softmax over tokens: softmax(scale query key^T + mask)."""

    pair: QueryKey
    scale: float
    mask: Array
    hidden: float
    """The highest finite bias that was taken to hide a token."""

    def value(self, tape: Tape, slots: Ints) -> Ints:
        """The slots of the attention's output, given the slots of its values."""
        query, key = (tape.columns(np.array(part)) for part in self.pair)
        causal = np.where(np.triu(np.ones_like(self.mask), 1) > 0, -np.inf, 0.0)
        is_causal = bool((self.mask == causal).all())
        mask = None if is_causal or not self.mask.any() else self.mask
        value = tape.columns(slots)
        out = tape.build.attention(query, key, value, self.scale, is_causal, mask, label=tape.label)
        if self.hidden > -np.inf:
            tape.hidden[out] = max(self.hidden, tape.hidden.get(out, -np.inf))
        return tape.register(out)


class Codes(NamedTuple):
    """Entries of scores or weights taken apart: which pair or head, the query's token, the key's token, the point."""

    which: Ints
    query: Ints
    key: Ints
    point: Ints


@dataclass(frozen=True)
class Scores:
    """scale * (product of queries and keys) + bias, entry by entry; `codes` says which product."""

    pairs: tuple[QueryKey, ...]
    codes: Tensor
    scale: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Weights:
    """Entries of softmaxes over tokens; code 0 is a weight of exactly zero."""

    heads: tuple[Head, ...]
    codes: Tensor


@dataclass(frozen=True)
class Weighted:
    """Weights times atoms, waiting for their sum."""

    weights: Weights
    ids: Tensor


def encode(tape: Tape, codes: Codes) -> Tensor:
    n = tape.tokens + 1
    number = ((codes.which * n + codes.query) * n + codes.key) * (tape.batch + 1) + codes.point
    return torch.from_numpy(np.ascontiguousarray(number, dtype=np.int64))


def decode(tape: Tape, codes: Tensor) -> Codes:
    rest, point = np.divmod(codes.numpy(), tape.batch + 1)
    rest, key = np.divmod(rest, tape.tokens + 1)
    which, query = np.divmod(rest, tape.tokens + 1)
    return Codes(which, query, key, point)


def are_scores(tape: Tape, left: Tensor, right: Tensor) -> bool:
    """Whether left (G, M, K) times right (G, K, N) multiplies rows of some tokens by rows of other tokens."""
    if tape.tokens == 1:
        return False
    tokens = tape.unpack(left).token, tape.unpack(right.mT.contiguous()).token
    if any(tape.one_token(side) is None for side in tokens):
        return False
    return tape.one_token(np.swapaxes(np.concatenate(tokens, 1), 1, 2)) is None


def scores(tape: Tape, left: Tensor, right: Tensor) -> Scores:
    """left (G, M, K) times right (G, K, N), remembered."""
    rows, columns = tape.unpack(left), tape.unpack(right.mT.contiguous())
    row_token, column_token = tape.one_token(rows.token), tape.one_token(columns.token)
    assert row_token is not None, "asked for with `are_scores`"
    assert column_token is not None, "asked for with `are_scores`"
    patterns, kind = unique_rows(np.concatenate([p.slot.reshape(-1, left.shape[-1]) for p in (rows, columns)]))
    split = row_token.size
    row_kind, column_kind = kind[:split].reshape(row_token.shape), kind[split:].reshape(column_token.shape)
    both = np.broadcast_arrays(row_kind[:, :, None], column_kind[:, None, :])
    combos, which = unique_rows(np.stack([b.reshape(-1) for b in both], 1))
    pairs = tuple(QueryKey(tuple(patterns[i].tolist()), tuple(patterns[j].tolist())) for i, j in combos)
    points = np.stack(
        np.broadcast_arrays(tape.one_point(rows.point)[:, :, None], tape.one_point(columns.point)[:, None, :]), -1
    )
    shape = both[0].shape
    codes = Codes(
        which.reshape(shape),
        np.broadcast_to(row_token[:, :, None], shape),
        np.broadcast_to(column_token[:, None, :], shape),
        tape.one_point(points),
    )
    ones = torch.ones(shape, dtype=torch.float64)
    return Scores(pairs, encode(tape, codes), ones, torch.zeros_like(ones))


def token_scores(tape: Tape, parts: Parts) -> Scores:
    """One number for each token, in rows, as scores: their keys are the numbers, their queries the constant one."""
    if (parts.slot != parts.slot[:, :1]).any() or (parts.token == 0).any():
        raise Refusal("it runs over numbers of different tokens and channels at once")
    slots, which = np.unique(parts.slot, return_inverse=True)
    one = int(tape.constants(np.ones(1))[0])
    pairs = tuple(QueryKey((one,), (slot,)) for slot in slots.tolist())
    shape = parts.slot.shape
    codes = encode(tape, Codes(which.reshape(shape), np.zeros(shape, dtype=np.int64), parts.token, parts.point))
    ones = torch.ones(shape, dtype=torch.float64)
    return Scores(pairs, codes, ones, torch.zeros_like(ones))


def softmax(tape: Tape, s: Scores) -> Weights:
    """Softmax over the last axis of scores (R, S)."""
    codes, scale, bias = decode(tape, s.codes), s.scale.numpy(), s.bias.numpy()
    live = bias > HIDDEN
    if not live.any(1).all():
        raise Refusal("its mask hides every token from some token")
    if (live & (scale == 0)).any():
        raise Refusal("some of its scores are replaced by numbers")
    first = live.argmax(1)

    def uniform(part: np.ndarray) -> bool:
        return bool(((part == np.take_along_axis(part, first[:, None], 1)) | ~live).all())

    def one(part: np.ndarray) -> np.ndarray:
        return np.take_along_axis(part, first[:, None], 1)[:, 0]

    for numbers in (scale[live], bias[live]):
        if (tape.off(numbers) > meant_within(numbers)).any():
            raise Refusal("its scale or its mask was rounded several times")
    hidden = float(np.max(bias, initial=-np.inf, where=~live))
    swapped = not uniform(codes.query)
    query, key = (codes.key, codes.query) if swapped else (codes.query, codes.key)
    if not (uniform(query) and uniform(codes.which) and uniform(scale) and uniform(codes.point)):
        raise Refusal("its rows are not the scores of one token against others")
    masks = np.full((len(bias), tape.tokens + 1), -np.inf)
    row, column = np.nonzero(live)
    masks[row, key[row, column]] = bias[row, column]
    if (key[live] == 0).any() or (np.isfinite(masks).sum(1) != live.sum(1)).any():
        raise Refusal("its rows see one token several times")
    table = np.concatenate([np.stack([one(codes.which), one(query), one(scale).view(np.int64)], 1),
                            (masks[:, 1:] + 0.0).view(np.int64)], 1)  # fmt: skip
    kinds, kind = unique_rows(table)
    heads, number = _heads(tape, s.pairs, kinds, swapped, hidden)
    which = np.where(live, number[kind][:, None], 0)
    out = Codes(which, *(np.where(live, part, 0) for part in (query, key, codes.point)))
    return Weights(heads, encode(tape, out))


def _heads(
    tape: Tape, pairs: tuple[QueryKey, ...], kinds: Ints, swapped: bool, hidden: float
) -> tuple[tuple[Head, ...], Ints]:
    """Rows of softmaxes (pair, query's token, scale, mask) gathered into heads; for each row the number of its head."""
    found: dict[tuple[int, int, bool, int], dict[int, Array]] = {}
    order: dict[tuple[int, int, bool, int], int] = {}
    number = np.zeros(len(kinds), dtype=np.int64)
    for i, (pair, query, scale, *mask) in enumerate(kinds.tolist()):
        key = (pair, scale, query == 0, 0)
        while query in found.setdefault(key, {}):  # rows of one token that differ in their masks: several heads
            key = (*key[:3], key[3] + 1)
        found[key][query] = np.array(mask, dtype=np.int64).view(np.float64)
        number[i] = order.setdefault(key, len(order))
    heads = []
    for (pair, scale, _, _), rows in found.items():
        mask = np.zeros((tape.tokens, tape.tokens))
        for query, row in rows.items():
            mask[slice(None) if query == 0 else query - 1] = row
        chosen = pairs[pair]
        ordered = QueryKey(chosen.key, chosen.query) if swapped else chosen
        heads.append(Head(ordered, float(np.array(scale).view(np.float64)), mask, hidden))
    return tuple(heads), number


def attend(tape: Tape, w: Weights, ids: Tensor) -> Tensor | None:
    """Weights (G, M, S) times atoms (G, S, N), as attention; None where the sum is not over what the weights weigh."""
    codes, parts = decode(tape, w.codes), tape.unpack(ids)
    live = w.codes.numpy() > 0
    head, query, point = (np.where(live, part, 0).max(2) for part in (codes.which, codes.query, codes.point))
    for part, most in ((codes.which, head), (codes.query, query)):
        if (live & (part != most[:, :, None])).any():
            return None
    if not live.any(2).all():
        return None
    used = np.asarray(live.any(1))[:, :, None]  # of the S axis of the atoms
    token, slot = np.where(used, parts.token, 0), np.where(used, parts.slot, 0)
    place, content = token.max(2), slot.max(1)
    if (used & (parts.token != place[:, :, None])).any() or (used & (parts.slot != content[:, None, :])).any():
        return None
    if (live & (place[:, None, :] != codes.key) & (place[:, None, :] != 0)).any():
        return None
    visible = np.stack([np.isfinite(h.mask).sum(1) for h in w.heads])
    if (live.sum(2) != visible[head, np.maximum(query, 1) - 1]).any():
        return None
    tape.one_point(np.stack(np.broadcast_arrays(point[:, :, None], parts.point.max(1)[:, None, :]), -1))
    out = np.zeros((*head.shape, content.shape[1]), dtype=np.int64)
    for h in np.unique(head).tolist():
        g, m = np.nonzero(head == h)
        slots, inverse = np.unique(content[g], return_inverse=True)
        out[g, m] = w.heads[h].value(tape, slots)[inverse.reshape(len(g), -1)]
    spread = np.broadcast_to(query[:, :, None], out.shape), np.broadcast_to(point[:, :, None], out.shape)
    return tape.pack(out, *spread)


def entries(tape: Tape, w: Weights) -> Tensor:
    """The weights themselves as atoms: attention whose values are the positions of the tokens."""
    codes, live = decode(tape, w.codes), w.codes.numpy() > 0
    slots = np.zeros_like(codes.which)
    for h in np.unique(codes.which[live]).tolist():
        positions = tape.register(tape.build.constant(np.eye(tape.tokens), tape.label))
        here = live & (codes.which == h)
        slots[here] = w.heads[h].value(tape, positions)[codes.key[here] - 1]
    return tape.pack(slots, codes.query, codes.point)


def total(tape: Tape, w: Weighted, dim: int) -> Tensor:
    """The sum over one axis."""
    codes, ids = w.weights.codes.movedim(dim, -1), w.ids.movedim(dim, -1)
    shape, size = codes.shape[:-1], codes.shape[-1]
    flat = Weights(w.weights.heads, codes.reshape(-1, 1, size))
    out = attend(tape, flat, ids.reshape(-1, size, 1))
    if out is None:
        return contract(tape, product(tape, w).movedim(dim, -1), np.ones((size, 1))).squeeze(-1)
    return out.reshape(shape)


def product(tape: Tape, w: Weighted) -> Tensor:
    """The products themselves as atoms."""
    return multiply(tape, entries(tape, w.weights), w.ids)


def numbers(tape: Tape, s: Scores) -> Tensor:
    """Scores as atoms: the products are computed after all."""
    codes = decode(tape, s.codes)
    sides = []
    for side, token in ((0, codes.query), (1, codes.key)):
        slots = np.array([pair[side] for pair in s.pairs], dtype=np.int64)[codes.which]
        sides.append(tape.pack(slots, token[..., None], codes.point[..., None]))
    size = sides[0].shape[-1]
    plain = contract(tape, multiply(tape, *sides), np.ones((size, 1))).squeeze(-1)
    return affine(tape, plain, s.scale, s.bias)
