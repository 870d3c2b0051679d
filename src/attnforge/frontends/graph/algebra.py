"""Arithmetic on tensors of atoms: functions, sums, products and contractions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...ir.domain import REALS
from ...ir.functions import get
from ...ir.ops import Array
from ...ir.univariate import Univariate
from .atoms import Parts, Refusal, Tape
from .mixing import align, broadcast, mix, read_tokens, reduce_tokens, unique_rows


def flat(tape: Tape, ids: Tensor) -> Parts:
    return tape.unpack(ids.reshape(-1))


def packed(tape: Tape, parts: Parts, shape: tuple[int, ...] | torch.Size) -> Tensor:
    return tape.pack(*parts).reshape(shape)


def apply(tape: Tape, ids: Tensor, function: str | Univariate) -> Tensor:
    """A function of each atom."""
    fn, parts = get(function), flat(tape, ids)
    if fn.domain != REALS:
        parts = read_tokens(tape, parts)
    slots, inverse = np.unique(parts.slot, return_inverse=True)
    return packed(tape, parts._replace(slot=tape.apply_slots(slots, fn)[inverse.reshape(-1)]), ids.shape)


def contract(tape: Tape, ids: Tensor, weight: Array, bias: Array | None = None) -> Tensor:
    """ids (..., K) times a constant weight (K, J), plus a constant bias (J,): (..., J)."""
    shape = (*ids.shape[:-1], weight.shape[1])
    parts = Parts(*(part.reshape(-1, ids.shape[-1]) for part in tape.unpack(ids)))
    point = tape.one_point(parts.point)
    if tape.one_token(parts.token) is None:
        reduced = reduce_tokens(tape, parts, weight)
        if reduced is not None:
            out = packed(tape, reduced, shape)
            return out if bias is None else affine(tape, out, 1.0, torch.from_numpy(bias))
        one_place = (parts.token == parts.token[:1]).all()
        parts = broadcast(tape, parts) if one_place else align(tape, parts)
    token = tape.one_token(parts.token)
    assert token is not None, "rows are aligned"
    patterns, inverse = unique_rows(parts.slot)
    slots = tape.linear(patterns, weight, bias)[inverse]
    return packed(
        tape, Parts(slots, *(np.broadcast_to(part[:, None], slots.shape) for part in (token, point))), shape
    )


def combine(tape: Tape, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """left + alpha right, entry by entry."""
    pair = torch.stack(torch.broadcast_tensors(left, right), -1)
    return contract(tape, pair, np.array([[1.0], [alpha]])).squeeze(-1)


def multiply(tape: Tape, left: Tensor, right: Tensor) -> Tensor:
    """The product of two tensors of atoms, entry by entry."""
    pair = torch.stack(torch.broadcast_tensors(left, right), -1)
    shape = pair.shape[:-1]
    parts = tape.unpack(pair.reshape(-1, 2))
    fixed = tape.is_number(parts.slot)
    if fixed.any():
        return _multiply_partly(tape, pair.reshape(-1, 2), fixed).reshape(shape)
    point = tape.one_point(parts.point)
    parts = align(tape, parts)
    token = parts.token.max(-1)
    patterns, inverse = unique_rows(np.sort(parts.slot, 1))
    slots = tape.product_slots(patterns[:, 0], patterns[:, 1])[inverse]
    return packed(tape, Parts(slots, token, point), shape)


def _multiply_partly(tape: Tape, pair: Tensor, fixed: np.ndarray) -> Tensor:
    """Products where some factors are numbers after all."""
    out = torch.zeros(len(pair), dtype=torch.int64)
    for column, rows in ((0, fixed[:, 0]), (1, fixed[:, 1] & ~fixed[:, 0])):
        chosen = torch.from_numpy(rows)
        if chosen.any():
            numbers = torch.from_numpy(tape.numbers(tape.unpack(pair[chosen, column]).slot))
            out[chosen] = affine(tape, pair[chosen, 1 - column], numbers, 0.0)
    rest = torch.from_numpy(~fixed.any(1))
    if rest.any():
        out[rest] = multiply(tape, pair[rest, 0], pair[rest, 1])
    return out


def affine(tape: Tape, ids: Tensor, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    """scale * atoms + bias with constants of any shape, entry by entry."""
    a, b = (torch.as_tensor(c, dtype=torch.float64) for c in (scale, bias))
    if (a == 1).all() and (b == 0).all():
        return ids.expand(torch.broadcast_shapes(ids.shape, a.shape, b.shape))
    ids, a, b = torch.broadcast_tensors(ids, a, b)
    out = torch.zeros(ids.numel(), dtype=torch.int64)
    moved, factor, shift = ids.reshape(-1), a.reshape(-1).numpy(), b.reshape(-1).numpy()
    slot = tape.unpack(moved).slot
    numbers = tape.numbers(slot)
    vanishing = factor == 0
    if tape.tokens > 1:  # a factor that is zero at some tokens only is left to `_scale_tokens`, which keeps one column
        vanishing &= ~np.isin(slot, slot[factor != 0])
    fixed = ~np.isnan(numbers) | vanishing | np.isinf(shift)
    if fixed.any():
        known = np.where(np.isnan(numbers[fixed]), 0.0, numbers[fixed])
        result = np.where(factor[fixed] == 0, shift[fixed], known * factor[fixed] + shift[fixed])
        out[fixed] = tape.lift(torch.from_numpy(result))
    if not fixed.all():
        out[~fixed] = _affine_data(tape, moved[~fixed], factor[~fixed], shift[~fixed])
    return out.reshape(ids.shape)


def _affine_data(tape: Tape, ids: Tensor, factor: Array, shift: Array) -> Tensor:
    """The same for a flat tensor of data, few new columns being better than many.

    A column can serve all tokens when its factor is the same for each of them, and its shift either is, too, or
    depends on nothing but the token (positions added to a sequence).
    """
    if not (np.isfinite(factor).all() and np.isfinite(shift).all()):
        raise Refusal("it multiplies data by an infinite constant")
    parts = tape.unpack(ids)
    if tape.tokens > 1 and not (parts.token == 0).any():
        ids, factor, parts = _scale_tokens(tape, ids, factor, parts)
    keys, key = unique_rows(np.stack([parts.slot, factor.view(np.int64)], 1))
    keys_full, key_full = unique_rows(np.stack([parts.slot, factor.view(np.int64), (shift + 0.0).view(np.int64)], 1))
    places = unique_rows(np.stack([key, parts.token], 1))[0]
    settled = unique_rows(np.stack([key, parts.token, (shift + 0.0).view(np.int64)], 1))[0]
    by_token = len(keys) < len(keys_full) and len(places) == len(settled) and not (parts.token == 0).any()
    if by_token:
        offsets = np.full((len(keys), tape.tokens), np.nan)
        offsets[key, parts.token - 1] = shift
        offsets = np.where(np.isnan(offsets), np.nanmax(offsets, axis=1)[:, None], offsets)
        constant = tape.register(tape.build.constant(offsets.T, tape.site))
        pattern = np.stack([keys[:, 0], constant], 1)
        weight = np.stack([keys[:, 1].copy().view(np.float64), np.ones(len(keys))], 1)[:, :, None]
        slots = tape.linear(pattern, weight)[:, 0][key]
    else:
        weight = keys_full[:, 1].copy().view(np.float64)[:, None, None]
        slots = tape.linear(keys_full[:, :1], weight, keys_full[:, 2].copy().view(np.float64)[:, None])[:, 0][key_full]
    return tape.pack(slots, parts.token, parts.point)


def _scale_tokens(tape: Tape, ids: Tensor, factor: Array, parts: Parts) -> tuple[Tensor, Array, Parts]:
    """Factors that differ from token to token, as in a mask over tokens, become one `Mix` with a diagonal."""
    slots, position = np.unique(parts.slot, return_inverse=True)
    position = position.reshape(-1)
    table = np.full((len(slots), tape.tokens), np.nan)
    table[position, parts.token - 1] = factor
    if (table[position, parts.token - 1] != factor).any():
        return ids, factor, parts  # one atom, several factors: no function of the token
    table = np.where(np.isnan(table), np.nanmax(table, axis=1)[:, None], table)
    if (table == table[:, :1]).all():
        return ids, factor, parts
    diagonals, kind = unique_rows(table.view(np.int64))
    renamed = np.zeros_like(slots)
    for i, diagonal in enumerate(diagonals):
        renamed[kind == i] = mix(tape, slots[kind == i], np.diag(diagonal.copy().view(np.float64)))
    parts = parts._replace(slot=renamed[position])
    return tape.pack(*parts), np.ones_like(factor), parts
