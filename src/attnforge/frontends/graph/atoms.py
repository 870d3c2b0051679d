"""Atoms: the numbers of a point, and the tape that computes them with the operations of a `Program`.

A tensor of the target is a tensor of *atoms*, one int64 each. An atom is a column of a program value (its *slot*), at
one token, of one point of the example batch. Moving data about moves atoms and costs no operation; where the data came
from, in which order and shape, and whether two points of the batch were mixed, is always known exactly.

    atom = (slot * (tokens + 1) + token) * (batch + 1) + point       tokens and points count from 1, 0 means all of them

Slots that belong to no value hold fixed numbers. Atom 0 is the number zero, so that operations which fill with zeros
need no special care.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...box import Box
from ...ir.functions import get
from ...ir.ops import Array
from ...ir.program import Builder
from ...ir.univariate import Univariate

Ints = npt.NDArray[np.int64]

#: The largest weight matrix (in entries) that a target may need; beyond it memory, not mathematics, is the problem.
LARGEST = 2**27


class Refusal(Exception):
    """The operation at hand cannot be lowered; the message says why."""


class BatchRefusal(Refusal):
    """The operation at hand mixes points of the batch."""


class Parts(NamedTuple):
    """Atoms taken apart, as arrays of one shape."""

    slot: Ints
    token: Ints
    point: Ints


class Tape:
    """The program under construction, and what its columns are called in the tensors of the target."""

    def __init__(self, box: Box, tokens: int, batch: int):
        self.build = Builder(box, tokens)
        self.tokens, self.batch = tokens, batch
        self.site = ""
        self._owner = np.array([-1])
        self._column = np.array([0])
        self._number = np.array([0.0])
        self._constants = {0.0: 0}
        self._start: dict[int, int] = {}
        self.input_slots = self.register(self.build.input)

    # -- atoms and slots ----------------------------------------------------------------------------------------------

    def pack(self, slot: npt.ArrayLike, token: npt.ArrayLike, point: npt.ArrayLike) -> Tensor:
        ids = (np.asarray(slot) * (self.tokens + 1) + np.asarray(token)) * (self.batch + 1) + np.asarray(point)
        return torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))

    def unpack(self, ids: Tensor) -> Parts:
        rest, point = np.divmod(ids.numpy(), self.batch + 1)
        slot, token = np.divmod(rest, self.tokens + 1)
        return Parts(slot, token, point)

    def register(self, value: int) -> Ints:
        """The slots of a value's columns."""
        width = self.build.width(value)
        if value in self._start:
            return np.arange(self._start[value], self._start[value] + width)
        start = self._start[value] = len(self._owner)
        self._owner = np.concatenate([self._owner, np.full(width, value)])
        self._column = np.concatenate([self._column, np.arange(width)])
        self._number = np.concatenate([self._number, np.full(width, np.nan)])
        return np.arange(start, start + width)

    def constants(self, numbers: Array) -> Ints:
        """The slots of fixed numbers."""
        if np.isnan(numbers).any():
            raise Refusal("a constant in it is not a number (NaN)")
        unique, inverse = np.unique(numbers + 0.0, return_inverse=True)  # + 0.0 turns -0.0 into 0.0
        for number in unique.tolist():
            if number not in self._constants:
                self._constants[number] = len(self._owner)
                self._owner = np.append(self._owner, -1)
                self._column = np.append(self._column, 0)
                self._number = np.append(self._number, number)
        slots = np.array([self._constants[number] for number in unique.tolist()], dtype=np.int64)
        return slots[inverse].reshape(numbers.shape)

    def lift(self, numbers: Tensor) -> Tensor:
        """Atoms for the entries of a constant tensor."""
        return self.pack(self.constants(numbers.detach().double().numpy()), 0, 0)

    def is_number(self, slot: Ints) -> npt.NDArray[np.bool_]:
        return self._owner[slot] < 0

    def numbers(self, slot: Ints) -> Array:
        """What the slots of fixed numbers hold; NaN for others."""
        return self._number[slot]

    def settled(self, ids: Tensor) -> Tensor | None:
        """The constant tensor that the atoms make up, if none of them depends on data."""
        slot = self.unpack(ids).slot
        return torch.from_numpy(self.numbers(slot)) if self.is_number(slot).all() else None

    # -- rows of atoms ------------------------------------------------------------------------------------------------

    def one_point(self, point: Ints) -> Ints:
        """The point that each row (last axis) belongs to."""
        most = point.max(-1)
        if ((point != 0) & (point != most[..., None])).any():
            raise BatchRefusal("it mixes points of the batch (the first dimension); points must be treated one by one")
        return most

    def one_token(self, token: Ints) -> Ints | None:
        """The token that each row (last axis) belongs to; None where a row holds several."""
        most = token.max(-1)
        return None if ((token != 0) & (token != most[..., None])).any() else most

    # -- operations ---------------------------------------------------------------------------------------------------

    def linear(self, slots: Ints, weight: Array, bias: Array | None = None) -> Ints:
        """New slots (patterns, J) for sum_k slots[:, k] weight[k, :] + bias; weight is (K, J) or (patterns, K, J)."""
        patterns, terms = slots.shape
        weights = np.broadcast_to(weight, (patterns, terms, weight.shape[-1]))
        columns = weights.shape[-1]
        total = np.zeros((patterns, columns)) if bias is None else np.broadcast_to(bias, (patterns, columns)).copy()
        owner = self._owner[slots]
        fixed = owner < 0
        if fixed.any():
            p, k = np.nonzero(fixed)
            np.add.at(total, p, self._number[slots[p, k]][:, None] * weights[p, k])
        if not np.isfinite(total).all():
            raise Refusal("it adds up infinite constants")
        sources = []
        for value in np.unique(owner[~fixed]).tolist():
            width = self.build.width(value)
            if width * patterns * columns > LARGEST:
                raise Refusal(
                    f"it needs a {width} x {patterns * columns} matrix, which is too large; use fewer entries, or let "
                    "the target be a sequence function on a box of shape (tokens, channels)"
                )
            matrix = np.zeros((width, patterns, columns))
            p, k = np.nonzero(owner == value)
            np.add.at(matrix, (self._column[slots[p, k]], p), weights[p, k])
            sources.append((value, matrix.reshape((width, patterns * columns))))
        live = np.zeros(total.size, dtype=bool)
        for _, full in sources:
            live |= full.any(0)
        out = np.zeros(total.size, dtype=np.int64)
        out[~live] = self.constants(total.reshape(-1)[~live])  # what cancels is a number
        if live.any():
            kept = [(value, full[:, live]) for value, full in sources]
            out[live] = self.register(self.build.linear(list(kept), total.reshape(-1)[live], self.site))
        return out.reshape(patterns, columns)

    def columns(self, slots: Ints) -> int:
        """The value whose columns are exactly these slots."""
        owner = self._owner[slots]
        value = int(owner[0])
        if value >= 0 and np.array_equal(slots, self.register(value)):
            return value
        if (owner < 0).all():
            return self.build.constant(self._number[slots], self.site)
        return self._gathered(slots)

    def _gathered(self, slots: Ints) -> int:
        """A value with these slots as its columns, fixed numbers among them."""
        owner, places = self._owner[slots], np.arange(len(slots))
        terms = []
        for value in np.unique(owner[owner >= 0]).tolist():
            here = owner == value
            matrix = np.zeros((self.build.width(value), len(slots)))
            matrix[self._column[slots[here]], places[here]] = 1.0
            terms.append((value, matrix))
        bias = np.where(owner < 0, self._number[slots], 0.0)
        if not np.isfinite(bias).all():
            raise Refusal("it uses infinite constants together with data")
        return self.build.linear(list(terms), bias, self.site)

    def apply_slots(self, slots: Ints, function: str | Univariate) -> Ints:
        """The slots of a function of each of these slots."""
        fn, fixed = get(function), self.is_number(slots)
        out = np.zeros_like(slots)
        if fixed.any():
            out[fixed] = self.constants(fn(torch.from_numpy(self._number[slots[fixed]])).numpy())
        if not fixed.all():
            value = self.build.apply(self.columns(slots[~fixed]), fn, self.site)
            out[~fixed] = self.register(value)
        return out

    def product_slots(self, left: Ints, right: Ints) -> Ints:
        """The slots of the products of pairs of data slots; squares where the two are the same."""
        out, same = np.zeros_like(left), left == right
        if same.any():
            out[same] = self.apply_slots(left[same], "square")
        if not same.all():
            factors = self.columns(left[~same]), self.columns(right[~same])
            out[~same] = self.register(self.build.product(*factors, self.site))
        return out
