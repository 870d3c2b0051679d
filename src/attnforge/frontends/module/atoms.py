"""Atoms: the numbers of a point, and the tape that computes them with the operations of a `Program`.

A tensor of the target is a tensor of *atoms*, one int64 each. An atom is a column of a program value (its *slot*), at
one token, of one point of the example batch. Moving data about moves atoms and costs no operation; where the data came
from, in which order and shape, and whether two points of the batch were mixed, is always known exactly.

    atom = (slot * (tokens + 1) + token) * (batch + 1) + point       tokens and points count from 1, 0 means all of them

Slots that belong to no value hold fixed numbers. Atom 0 is the number zero, so that operations which fill with zeros
need no special care.

Arithmetic on tensors of atoms are functions, sums, products and contractions. Rows of atoms are combined token by token
where they can be; where a row holds atoms of several tokens, `Mix` operations bring them together first. In a program
of one token that is never needed.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...box import Box
from ...dtypes import Array
from ...expressions.constants import rounded
from ...functions.directed import U, down, up
from ...functions.registry import enclose, get
from ...functions.univariate import REALS, Univariate
from ...programs.affine import coarse
from ...programs.ops import meant_within
from ...programs.program import Builder

Ints = npt.NDArray[np.int64]

#: The largest weight matrix (in entries) that a target may need; beyond it memory, not mathematics, is the problem.
LARGEST = 2**27


class Refusal(Exception):
    """The operation at hand cannot be captured; the message says why."""


class BatchRefusal(Refusal):
    """The operation at hand mixes points of the batch."""


class Parts(NamedTuple):
    """Atoms taken apart, as arrays of one shape."""

    slot: Ints
    token: Ints
    point: Ints


class Tape:
    """The program under construction, and what its columns are called in the tensors of the target."""

    def __init__(self, box: Box, tokens: int, batch: int, own: torch.dtype = torch.float64):
        self.build = Builder(box, tokens)
        self.tokens, self.batch = tokens, batch
        self.own = own  # the dtype that the target is made for
        self.label = ""
        self._owner = np.array([-1])
        self._column = np.array([0])
        self._number = np.array([0.0])
        self._constants = {0.0: 0}
        self._start: dict[int, int] = {}
        #: Slots that an operation read with weight zero, once some function was applied that is not defined everywhere:
        #: they leave the program, but where they have no value the result has none (0 times infinity, or minus it).
        self.cancelled: list[Ints] = []
        self._doubts: dict[float, float] = {}
        self._sorted: tuple[Array, Array] | None = None
        self._partial = False
        #: Operators that made constants of the target, and of which nothing says how they round.
        self.unproved: set[str] = set()
        #: For values that are attention with finite masks, how high those are that were taken to hide a token.
        self.hidden: dict[int, float] = {}
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

    def doubt(self, numbers: Array, off: Array) -> Array:
        """Numbers that were rounded, to be used instead: each stands for one within `off` of it.

        They are known by their size, wherever they go and whatever their sign becomes. Another number that happens to
        be equal is charged as well, which is sound; 0 and powers of two, which every program is full of, are moved by a
        unit in the last place.
        """
        popular = (np.abs(np.frexp(numbers)[0]) == 0.5) | (numbers == 0)
        moved = np.where(popular & (off > 0), np.nextafter(numbers, np.inf), numbers)
        with np.errstate(invalid="ignore"):  # of infinities, which are masks and never off
            far = np.where(off > 0, up(off + np.abs(moved - numbers)), 0.0)
        for number, most in zip(np.abs(moved[far > 0]).tolist(), far[far > 0].tolist(), strict=True):
            self._doubts[number] = max(most, self._doubts.get(number, 0.0))
            self._sorted = None
        return moved

    def off(self, numbers: Array) -> Array:
        """How far what is meant may be from each of these numbers."""
        if not self._doubts:
            return np.zeros(numbers.shape)
        if self._sorted is None:
            found = np.array(sorted(self._doubts))
            self._sorted = found, np.array([self._doubts[key] for key in found.tolist()])
        keys, far = self._sorted
        sizes = np.abs(numbers)
        at = np.minimum(np.searchsorted(keys, sizes), len(keys) - 1)
        return np.where(keys[at] == sizes, far[at], 0.0)

    def reciprocal(self, number: float) -> float:
        """1 / number, rounded."""
        near, off = rounded(1 / Fraction(number))
        return float(self.doubt(np.array([near]), np.array([off]))[0])

    def lift(self, numbers: Tensor) -> Tensor:
        """Atoms for the entries of a constant tensor."""
        return self.pack(self.constants(numbers.detach().double().numpy()), 0, 0).reshape(numbers.shape)

    def drop(self, slots: Ints) -> None:
        """Remember data that an operation reads with weight zero."""
        if self._partial and len(slots):
            self.cancelled.append(np.unique(slots[~self.is_number(slots)]))

    def is_number(self, slot: Ints) -> npt.NDArray[np.bool_]:
        return self._owner[slot] < 0

    def numbers(self, slot: Ints) -> Array:
        """What the slots of fixed numbers hold; NaN for others."""
        return self._number[slot]

    def settled(self, ids: Tensor) -> Tensor | None:
        """The constant tensor that the atoms make up, if none of them depends on data."""
        slot = self.unpack(ids).slot
        return torch.from_numpy(np.asarray(self.numbers(slot))) if self.is_number(slot).all() else None

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
        far = self.off(total)
        if fixed.any():
            p, k = np.nonzero(fixed)
            numbers, factors = self._number[slots[p, k]][:, None], weights[p, k]
            parts, size, count = numbers * factors, np.abs(total), (total != 0).astype(float)
            simple = (np.abs(numbers) == 1) | (np.abs(factors) == 1)  # such products are exact
            np.add.at(count, p, (parts != 0) * np.where(simple, 1.0, 2.0))
            np.add.at(size, p, np.abs(parts))
            np.add.at(far, p, self._spread(numbers, factors))
            np.add.at(total, p, parts)
            far = far * (1 + terms * 2.0**-50) + np.where(count > 1, up((count + 1) * U * size), 0.0)
        if not np.isfinite(total).all():
            raise Refusal("it adds up infinite constants")
        sources, offs = [], []
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
            off = np.zeros_like(matrix)
            if self._doubts or len(unique_rows(np.stack([self._column[slots[p, k]], p], 1))[0]) < len(p):
                hits, size = np.zeros_like(matrix), np.zeros_like(matrix)
                given = weights[p, k]
                for into, part in ((off, self.off(given)), (hits, given != 0), (size, np.abs(given))):
                    np.add.at(into, (self._column[slots[p, k]], p), part)
                # one addition gives 0 only where that is exact; of few simple numbers no addition rounds
                size = np.where(hits == 2, np.abs(matrix), 0.0 if coarse(given) else size)
                off = off * (1 + terms * 2.0**-50) + np.where((hits > 1) & (size > 0), up(hits * U * size), 0.0)
            offs.append(off.reshape((width, patterns * columns)))
            if self._partial:
                read = slots[p, k]
                self.drop(read[(matrix[self._column[read], p] == 0).any(-1)])
            sources.append((value, matrix.reshape((width, patterns * columns))))
        live = np.zeros(total.size, dtype=bool)
        for (_, full), off in zip(sources, offs, strict=True):
            live |= full.any(0) | off.any(0)
        out = np.zeros(total.size, dtype=np.int64)
        rest, far = total.reshape(-1), far.reshape(-1)
        out[~live] = self.constants(self.doubt(rest[~live], far[~live]))  # what cancels is a number
        if live.any():
            kept = [(value, full[:, live]) for value, full in sources]
            slack = (*(off[:, live] for off in offs), far[live])
            out[live] = self.register(self.build.linear(kept, rest[live], self.label, slack))
        return out.reshape(patterns, columns)

    def _spread(self, numbers: Array, factors: Array) -> Array:
        """How far the products of what is meant by numbers and factors can be from their own."""
        one, other = self.off(numbers), self.off(factors)
        return np.abs(numbers) * other + one * (np.abs(factors) + other)

    def product_off(self, numbers: Array, factors: Array, shift: Array) -> Array:
        """How far numbers * factors + shift, rounded twice, can be from what is meant."""
        with np.errstate(invalid="ignore", over="ignore"):
            product = numbers * factors
            exact = ((product == 0) | (np.abs(factors) == 1)) & ((shift == 0) | (product == 0))
            steps = np.where(shift == 0, 1.0, 3.0) * U
            rounding = np.where(exact, 0.0, steps * (np.abs(product) + np.abs(shift)) + 2.0**-1073)
            off = self._spread(numbers, factors) + self.off(shift) + rounding
        return np.where((off > 0) & np.isfinite(off), up(off * (1 + 8 * U)), 0.0)

    def columns(self, slots: Ints) -> int:
        """The value whose columns are exactly these slots."""
        owner = self._owner[slots]
        value = int(owner[0])
        if value >= 0 and np.array_equal(slots, self.register(value)):
            return value
        if (owner < 0).all():
            return self.build.constant(self._number[slots], self.label, self.off(self._number[slots]))
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
        slack = (*(np.zeros_like(matrix) for _, matrix in terms), self.off(bias))
        return self.build.linear(terms, bias, self.label, slack)

    def apply_slots(self, slots: Ints, function: str | Univariate) -> Ints:
        """The slots of a function of each of these slots."""
        fn, fixed = get(function), self.is_number(slots)
        self._partial = self._partial or fn.domain != REALS
        out = np.zeros_like(slots)
        if fixed.any():
            numbers = self._number[slots[fixed]]
            found = fn(torch.from_numpy(numbers)).numpy()
            if fn.certifiable and np.isfinite(numbers).all():
                off = self.off(numbers)
                ends = (np.where(off > 0, end, numbers) for end in (down(numbers - off), up(numbers + off)))
                low, high = enclose(fn, *ends)
                far = np.maximum(high - found, found - low)
                found = self.doubt(found, np.where(far > 0, up(far), 0.0))
            out[fixed] = self.constants(found)
        if not fixed.all():
            value = self.build.apply(self.columns(slots[~fixed]), fn, self.label)
            out[~fixed] = self.register(value)
        return out

    def product_slots(self, left: Ints, right: Ints) -> Ints:
        """The slots of the products of pairs of data slots; squares where the two are the same."""
        out, same = np.zeros_like(left), left == right
        if same.any():
            out[same] = self.apply_slots(left[same], "square")
        if not same.all():
            factors = self.columns(left[~same]), self.columns(right[~same])
            out[~same] = self.register(self.build.product(*factors, self.label))
        return out


def unique_rows(rows: Ints) -> tuple[Ints, Ints]:
    """The distinct rows, and for each row the number of its like."""
    if rows.shape[1] == 1:
        values, inverse = np.unique(rows[:, 0], return_inverse=True)
        return values[:, None], inverse.reshape(-1)
    values, inverse = np.unique(rows, axis=0, return_inverse=True)
    return values, inverse.reshape(-1)


def mix(tape: Tape, slots: Ints, matrix: Array, off: Array | float = 0.0) -> Ints:
    """The slots after mixing the tokens of these (distinct) slots with a matrix, whose entries may be off."""
    if (off > meant_within(matrix)).any():
        raise Refusal("its weights over tokens were rounded several times")
    return tape.register(tape.build.mix(tape.columns(slots), matrix, tape.label))


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
    off, hits = np.zeros_like(matrix), np.zeros_like(matrix)
    for into, part in ((matrix, weight), (off, tape.off(weight)), (hits, np.ones_like(weight))):
        np.add.at(into.T, token[0] - 1, part[present])
    off = np.where(hits > 1, up(off + hits * U * np.abs(weight).sum()), off)
    full, far = (np.concatenate([x, np.tile(x[:1], (tape.tokens - columns, 1))]) for x in (matrix, off))
    slots, inverse = np.unique(slot[:, 0], return_inverse=True)
    mixed = mix(tape, slots, full, far)[inverse.reshape(-1)]
    place = np.arange(1, columns + 1) if columns > 1 else np.zeros(1, dtype=np.int64)
    shape = (count, columns)
    point = np.broadcast_to(tape.one_point(parts.point)[:, None], shape)
    return Parts(np.broadcast_to(mixed[:, None], shape), np.broadcast_to(place, shape), point)


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
    return packed(tape, Parts(slots, *(np.broadcast_to(part[:, None], slots.shape) for part in (token, point))), shape)


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
        tape.drop(slot[vanishing & np.isfinite(shift)])
        known = np.where(np.isnan(numbers[fixed]), 0.0, numbers[fixed])
        result = np.where(factor[fixed] == 0, shift[fixed], known * factor[fixed] + shift[fixed])
        off = tape.product_off(known, factor[fixed], shift[fixed])
        out[fixed] = tape.lift(torch.from_numpy(np.where(np.isfinite(result), tape.doubt(result, off), result)))
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
        constant = tape.register(tape.build.constant(offsets.T, tape.label, tape.off(offsets.T)))
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
        factors = diagonal.copy().view(np.float64)
        renamed[kind == i] = mix(tape, slots[kind == i], np.diag(factors), np.diag(tape.off(factors)))
    parts = parts._replace(slot=renamed[position])
    return tape.pack(*parts), np.ones_like(factor), parts
