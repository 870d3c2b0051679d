"""Errors seen from the output: what each number that a network rounds or approximates does to it (lemma H8).

Rules that pass errors forwards lose their signs at every affine map: |W2| |W1| e where (W2 W1) e would do. Here the
errors that arise at each place are multiplied by how far the output moves when that place does: an enclosure of the
derivatives of everything that comes after it, from the last layer to the first, over all arguments that can occur.
Arguments are known from the forward rules, so this one can only make a bound smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..certificates.rounding import up
from ..dtypes import Array
from ..functions.directed import U
from ..functions.queries import lookup
from ..functions.univariate import Univariate
from ..programs.enclose import RULES as ENCLOSURES
from ..programs.enclose import Range, attention_weights, centred, normalised_size
from ..programs.ops import Apply, Attention, MaxTokens, Mix, Normalise, Op, Product, Softmax, meant_within
from ..programs.positions import reads as values_read
from .course import Arising, Course
from .layout import Layout

if TYPE_CHECKING:
    from .propagation import Reading


@dataclass(frozen=True, eq=False)
class Influence:
    """How outputs move with columns: derivatives in middle +- radius, each (cell, output, token, column)."""

    middle: Array
    radius: Array

    @property
    def size(self) -> Array:
        """The largest derivative."""
        return np.abs(self.middle) + self.radius

    def through(self, weight: Array, off: Array) -> Influence:
        """The influence of what an affine map reads; its weights (read, made) may be off by `off`."""
        reach = np.abs(self.middle) @ np.abs(weight).T
        radius = self.radius @ np.abs(weight).T + 2 * (len(weight.T) + 4) * U * reach
        if off.any():
            radius = radius + self.size @ off.T
        return Influence(self.middle @ weight.T, _wide(radius, len(weight.T)))

    def times(self, low: Array, high: Array) -> Influence:
        """Entry by entry times derivatives in [low, high], (cell, token, column)."""
        middle, half = 0.5 * low + 0.5 * high, up(0.5 * high - 0.5 * low, 4)
        m, r = middle[:, None], half[:, None]
        product = self.middle * m
        radius = self.radius * (np.abs(m) + r) + np.abs(self.middle) * r + 2 * U * np.abs(product)
        return Influence(product, _wide(radius, 4))

    def plus(self, other: Influence) -> Influence:
        """The influence on outputs by two ways."""
        middle = self.middle + other.middle
        return Influence(middle, _wide(self.radius + other.radius + U * np.abs(middle), 2))


def _wide(radius: Array, terms: int) -> Array:
    """An upper bound of a radius that was computed as a sum of so many terms; 2^-1000 is what products may lose, also
    where they underflow to 0. What is not known stays so."""
    return radius * (1 + (terms + 8) * 2 * U) + 2.0**-1000


def _charged(after: Array, added: Array, length: Array) -> Array:
    """What errors that arise in rows do to outputs: channel by channel, or by the lengths of both rows."""
    reach = np.sqrt(np.sum(after**2, -1)) * (1 + (after.shape[-1] + 8) * 2 * U) * length[:, None]
    return np.minimum(np.einsum("cotw,ctw->cot", after, added), reach + 2.0**-1000).sum(-1)


def _apply(op: Op, arguments: list[Range], after: Influence) -> list[Influence]:
    assert isinstance(op, Apply)
    return [after.times(*derivatives(op.function, arguments[0].low, arguments[0].high))]


FEW = 128  # cells of a table of derivatives: they widen by the step over a cell or two, some percent; 5 ms a function


def derivatives(fn: Univariate, low: Array, high: Array) -> tuple[Array, Array]:
    """Enclosures of the derivative of a function, continued by constants beyond its domain, over intervals."""
    inside_low, inside_high = (np.clip(end, fn.domain.lo, fn.domain.hi) for end in (low, high))
    if not (np.isfinite(inside_low).all() and np.isfinite(inside_high).all()):
        return np.full(low.shape, -np.inf), np.full(low.shape, np.inf)
    least, most = float(inside_low.min()), float(inside_high.max())
    table = lookup(fn, least, max(most, float(np.nextafter(least, np.inf))), FEW)
    flat, steep = table.slopes(inside_low, inside_high)
    cut = (inside_low != low) | (inside_high != high)
    flat, steep = np.where(cut, np.minimum(flat, 0.0), flat), np.where(cut, np.maximum(steep, 0.0), steep)
    known = np.isfinite(flat) & np.isfinite(steep)
    return np.where(known, flat, -np.inf), np.where(known, steep, np.inf)


def _product(op: Op, arguments: list[Range], after: Influence) -> list[Influence]:
    left, right = arguments
    return [after.times(right.low, right.high), after.times(left.low, left.high)]


def _mix(op: Op, arguments: list[Range], after: Influence) -> list[Influence]:
    assert isinstance(op, Mix)
    off = meant_within(op.matrix) + 2 * (len(op.matrix) + 4) * U * np.abs(op.matrix)
    middle, size, spread = (
        np.einsum("ij,coik->cojk", m, x)
        for m, x in ((op.matrix, after.middle), (np.abs(op.matrix), after.radius), (off, after.size))
    )
    return [Influence(middle, _wide(size + spread, len(op.matrix)))]


def _max_tokens(op: Op, arguments: list[Range], after: Influence) -> list[Influence]:
    """The largest of tokens moves by a mean of what they move by: a token that is never the largest has no share."""
    (x,) = arguments
    total = Influence(after.middle.sum(2, keepdims=True), after.radius.sum(2, keepdims=True))
    rounded = 2 * after.middle.shape[2] * U * np.abs(after.middle).sum(2, keepdims=True)
    total = Influence(total.middle, _wide(total.radius + rounded, after.middle.shape[2]))
    share = np.where(x.high >= x.low.max(1, keepdims=True), 1.0, 0.0)
    return [total.times(np.zeros_like(share), share)]


def _softmax(op: Op, arguments: list[Range], after: Influence) -> list[Influence]:
    """p_j' takes p_j (a_j - sum p_i a_i) from what comes after, a; the p_i add up to 1."""
    weights = ENCLOSURES[type(op)](op, arguments, arguments[0].low, arguments[0].high)
    low, high = weights.low[:, None], weights.high[:, None]
    middle, half = 0.5 * low + 0.5 * high, up(0.5 * high - 0.5 * low, 4)
    centre = after.middle.mean(-1, keepdims=True)
    apart = after.middle - centre
    mean = centre + (middle * apart).sum(-1, keepdims=True)
    spread = np.minimum((high * after.radius).sum(-1, keepdims=True), after.radius.max(-1, keepdims=True))
    spread = spread + (half * np.abs(apart)).sum(-1, keepdims=True)
    spread = spread + 4 * (op.width + 4) * U * np.abs(after.middle).max(-1, keepdims=True)
    gap = Influence(after.middle - mean, _wide(after.radius + spread + 2 * U * np.abs(after.middle), op.width))
    return [gap.times(weights.low, weights.high)]


def _normalise(op: Op, arguments: list[Range], after: Influence) -> list[Influence]:
    """n = c / r, r = sqrt(v + eps), has the symmetric derivative (I - n n^T / d) / r, which takes a to

    a_j (1 - n_j^2 / d) / r - n_j (m.a) / (d r), m the other entries of n. The last is at most t |a| / 2r in size,
    t = v / (v + eps) = |n|^2 / d, and at most |n_j| |a| / (sqrt(d) r); all of it at most (|a_j| + t |a| / 2) / r, and
    |a| / r, since no eigenvalue is above 1 / r.
    """
    assert isinstance(op, Normalise)
    (c,), (matrix, eps) = arguments, op.centring
    slip = 1 + (op.width + 32) * 4 * U
    least = np.mean(c.least**2, -1, keepdims=True) / slip + eps
    most = np.mean(c.size**2, -1, keepdims=True) * slip + eps
    reach = np.minimum(normalised_size(c, eps) / np.sqrt(op.width) * slip, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slow, fast = 1 / np.sqrt(most) / slip, 1 / np.sqrt(least) * slip
    own = np.maximum(1 - reach**2 * slip, 0.0) * slow / slip
    direct = after.times(own, np.broadcast_to(fast, own.shape))
    size = after.size
    length = np.sqrt(np.sum(size**2, -1, keepdims=True)) * slip
    low, high, steep = least[:, None], most[:, None], fast[:, None]

    def steepest(a: Array) -> Array:
        """The largest (a + (1 - eps / s) length / 2) / sqrt(s) for s in [low, high]: it grows, then falls."""
        with np.errstate(divide="ignore", invalid="ignore"):
            at = np.clip(3 * eps * length / (2 * a + length), low, high)
            found = (a + 0.5 * length * (1 - eps / at * (1 - 4 * U))) / np.sqrt(at)
        return np.where(length == 0, 0.0, found * (1 + 2.0**-20))

    turning = np.minimum(steepest(np.zeros_like(size)), reach[:, None] * length * steep * slip)
    cap = np.minimum(steepest(size), length * steep * slip)
    low_end = np.maximum(direct.middle - direct.radius - turning, -cap)
    high_end = np.minimum(direct.middle + direct.radius + turning, cap)
    found = _between(low_end, high_end)
    return [found.through(matrix, np.zeros_like(matrix)) if op.centred else found]


def _between(low: Array, high: Array) -> Influence:
    middle = 0.5 * low + 0.5 * high
    radius = np.maximum(high - middle, middle - low)
    return Influence(middle, _wide(np.maximum(radius, 0.0) + 2 * U * np.maximum(np.abs(low), np.abs(high)), 4))


def _attention(op: Op, arguments: list[Range], after: Influence) -> list[Influence]:
    """o_i' = sum_j w_ij v_j' + sum_j g_ij l_ij', g_ij = w_ij (v_j - o_i): |v_j - o_i| is at most 1 - w_ij of the spread
    of the values that i sees, the g_ij add up to 0 and, in size, to at most half of it."""
    assert isinstance(op, Attention)
    query, key, value = arguments
    tokens, width = value.low.shape[1], key.low.shape[-1]
    visible = op.logit_mask(tokens) > -np.inf
    low, high = attention_weights(op, query, key)
    low, high = np.where(visible, low, 0.0), np.where(visible, high, 0.0)
    middle, half = 0.5 * low + 0.5 * high, up(0.5 * high - 0.5 * low, 4)
    unit = 4 * (tokens + width + op.width + 16) * U
    mid = np.einsum("cij,coik->cojk", middle, after.middle)
    radius = np.einsum("cij,coik->cojk", half, np.abs(after.middle)) + np.einsum("cij,coik->cojk", high, after.radius)
    radius = radius + unit * np.einsum("cij,coik->cojk", high, np.abs(after.middle))
    shown = visible[None, :, :, None]
    top = np.where(shown, value.high[:, None], -np.inf).max(2)
    bottom = np.where(shown, value.low[:, None], np.inf).min(2)
    spread = np.einsum("coik,cik->coi", after.size, up(top - bottom))
    share = np.where((low <= 0.5) & (high >= 0.5), 0.25, np.maximum(low * (1 - low), high * (1 - high)))
    centre = 0.5 * key.low.min(1, keepdims=True) + 0.5 * key.high.max(1, keepdims=True)
    apart = up(np.maximum(key.high - centre, centre - key.low), 2)
    far = np.where(shown, apart[:, None], 0.0).max(2)
    scale = abs(op.scale) * (1 + 2.0**-40)
    by_query = np.minimum(np.einsum("cij,cjk->cik", share, apart) * (1 + unit), 0.5 * far)
    queries = scale * spread[..., None] * by_query[:, None] * (1 + unit)
    keys = scale * np.einsum("cij,coi,cik->cojk", share, spread, query.size) * (1 + unit)
    none = np.zeros_like
    return [
        Influence(none(queries), _wide(queries, width)), Influence(none(keys), _wide(keys, tokens)),
        Influence(mid, _wide(radius, 2 * tokens)),
    ]  # fmt: skip


#: How each operation of heads takes an influence on its result to those on what it reads, for arguments in ranges.
BACK: dict[type[Op], Callable[[Op, list[Range], Influence], list[Influence]]] = {
    Apply: _apply,
    Product: _product,
    Mix: _mix,
    Softmax: _softmax,
    Normalise: _normalise,
    MaxTokens: _max_tokens,
    Attention: _attention,
}


WORK = 2**31  # products of numbers on all cells: about two seconds; a network that takes more does without
ROOM = 2**22  # numbers at a time, so that several arrays of them stay below 200 MB


def behind(layout: Layout, reading: Reading, found: list[Range], course: Course) -> Array | None:
    """The errors of the outputs, (cell, token, channel, source), from what arises at each place and how far the outputs
    move with it; None where the affine maps of a reading are not known as maps, or would take too long."""
    cells, tokens = found[0].low.shape[:2]
    outputs = len(layout.output) * (tokens if layout.program.output_rows == "all" else 1)
    widths = [len(layout.first), *(len(step.columns) for step in layout.steps), len(layout.output)]
    if cells * outputs * tokens * sum(a * b for a, b in pairwise(widths)) > WORK:
        return None
    arising = [reading.arises(number, state, found) for number, state in enumerate(course.states)]
    if any(each is None for each in arising):
        return None
    count = max(1, ROOM // (outputs * tokens * max(widths)))
    blind = np.zeros(cells, dtype=bool)  # where forward rules say nothing of some number on the way
    for errors in (*course.states, *course.reads):
        for error in errors.values():
            blind |= ~np.isfinite(error).all((1, 2))
    parts = []
    centres = {}  # the rows of norms that centre what they read, by affine forms
    for i, op in enumerate(layout.program.ops):
        if isinstance(op, Normalise) and op.centred:
            centres[i] = centred(op, found[op.input])
    for start in range(0, cells, count):
        part = slice(start, start + count)
        few = Course(
            [{c: e[part] for c, e in state.items()} for state in course.states],
            [{c: e[part] for c, e in reads.items()} for reads in course.reads],
            {op: e[part] for op, e in course.added.items()},
            {op: e[part] for op, e in course.lengths.items()},
        )
        mine = [Arising(each.weight, each.off, each.born[part]) for each in arising if each is not None]
        here = [Range(r.low[part], r.high[part]) for r in found]
        parts.append(
            _behind(layout, mine, here, few, {i: Range(r.low[part], r.high[part]) for i, r in centres.items()})
        )
    return np.where(blind[:, None, None, None], np.inf, np.concatenate(parts))


def _behind(
    layout: Layout, arising: list[Arising], found: list[Range], course: Course, centres: dict[int, Range]
) -> Array:
    """`behind` for as many cells as fit into memory.

    A number computed up to some place and exact from there on is, like what is computed, within the forward errors of
    the exact one: between any two of these every derivative lies in what the ranges, so much wider, allow.
    """
    program, sources, order = layout.program, len(layout.sites) + 1, layout.order
    cells, tokens = found[0].low.shape[:2]
    width, rows = len(layout.output), tokens if program.output_rows == "all" else 1
    eye = np.zeros((cells, rows * width, tokens, width))
    eye[:, np.arange(rows * width), np.repeat(np.arange(rows), width), np.tile(np.arange(width), rows)] = 1.0
    after, parts = Influence(eye, np.zeros_like(eye)), np.zeros((cells, rows * width, sources))
    for number in range(len(layout.steps), -1, -1):
        parts[..., -1] += np.einsum("cotw,ctw->co", after.size, arising[number].born)
        after = after.through(arising[number].weight, arising[number].off)
        columns = layout.last if number == len(layout.steps) else layout.steps[number].before
        if not number:
            break
        step, reads = layout.steps[number - 1], course.reads[number - 1]
        at = {column: i for i, column in enumerate(columns)}
        middle = np.zeros((*after.middle.shape[:3], len(step.columns)))
        radius = np.zeros_like(middle)
        place = {column: i for i, column in enumerate(step.columns)}
        for column in step.carried:
            middle[..., place[column]] += after.middle[..., at[column]]
            radius[..., place[column]] += after.radius[..., at[column]]
        total = Influence(middle, radius)
        for site in step.sites:
            op = program.ops[site.op]
            mine = [at[site.op, c] for c in range(op.width)]
            one = Influence(after.middle[..., mine], after.radius[..., mine])
            parts[..., order[site.op]] += _charged(one.size, course.added[site.op], course.lengths[site.op])
            values = values_read(program, site.op)
            ranges, spots = [], []
            for v in values:
                spots.append([place[v, c] for c in range(program.ops[v].width)])
                off = np.stack([reads[v, c].sum(-1) for c in range(program.ops[v].width)], -1) * (1 + 2.0**-40)
                r = centres.get(site.op, found[v])
                if isinstance(op, Normalise) and op.centred:
                    off = off @ np.abs(op.centring[0]) * (1 + 2.0**-40)
                ranges.append(Range(r.low - off, r.high + off))
            if any(reads[v, c].any() for v in values[len(op.inputs) :] for c in range(program.ops[v].width)):
                parts[:] = np.inf  # positions that are not exact
            for spot, part in zip(spots, BACK[type(op)](op, ranges[: len(op.inputs)], one), strict=False):
                there = Influence(total.middle[..., spot], total.radius[..., spot]).plus(part)
                total.middle[..., spot], total.radius[..., spot] = there.middle, there.radius
        after = total
    parts[..., -1] += sum(
        np.einsum("cot,ct->co", after.size[..., i], course.states[0][column].sum(-1))
        for i, column in enumerate(layout.first)
    )
    with np.errstate(invalid="ignore"):
        parts = parts * (1 + (len(layout.sites) + 4096) * 2 * U) + 2.0**-1000  # what products with errors may lose
    return np.where(np.isnan(parts), np.inf, parts).reshape(cells, rows, width, sources)
