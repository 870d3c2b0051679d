"""How errors travel through a network: from the columns of one step to the next (section H of docs/theory.md).

For every column of the state the analysis keeps, on many cells of the box at once, a bound on |computed - exact| split
by the site that caused it. The rules are linear in what comes in, so the parts at the worst cell are a ledger that adds
up to the bound. What is executed is read from the network itself (`Reading`): an affine map by the difference of its
stored numbers from the exact ones, columns that are carried on as well, a head by the certified error of its stored
tables. Nothing is built here, and nothing is taken from what built the network but its structure.

The bound of a network over its box is the largest over cells (`network_bound`), which are split where that helps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from ..certificates.rounding import TINY, gamma, signed_sums, unit, up
from ..dtypes import Array, stored
from ..errors import CertificateError
from ..functions.queries import exponent_of, power_moves
from ..heads.families import rule_of
from ..heads.rule import Local, Mask, Moved, Ratios, Setting, scaled
from ..heads.site import Site
from ..heads.stored import StoredHeads, refuse_endless, require_shapes, skip_of
from ..network import AttentionLayer, AttentionOnly
from ..programs.affine import Column, Form, affine_map, dropped, folding_error, forms
from ..programs.enclose import MOST_SYMBOLS, Range, cells, ranges
from ..programs.ops import Apply, Constant
from ..programs.positions import reads as values_read
from ..programs.program import Program
from .adjoint import behind
from .course import Arising, Course, Errors
from .layout import Layout, Step

#: Relative errors of sums of positive terms (channel), and what is counted for these (cell, token, channel).
Sums = tuple[Array, Array] | None


@dataclass(frozen=True)
class Outcome:
    """Errors of the output on each cell: split by source at the worst output, what a relative tolerance allows there,
    the largest error of any output, and how many times larger the forward rules alone would have it."""

    parts: Array
    allowance: Array
    largest: Array
    gain: Array


@dataclass(frozen=True, eq=False)
class StoredMap:
    """An affine map as stored, how far it is from the exact one, entry by entry, and how its sums round."""

    weight: Array
    bias: Array
    off: Array
    off_bias: Array
    u: float
    tiny: float
    most: float

    @classmethod
    def of(
        cls, mine: tuple[Array, Array], exact: tuple[Array, Array], slack: tuple[Array, Array], dtype: torch.dtype
    ) -> StoredMap:
        """Stored weights and bias beside the exact ones, themselves known up to `slack`."""
        weight, bias = mine
        if weight.shape != exact[0].shape:
            raise CertificateError(f"an affine map has the shape {weight.shape}, its program asks for {exact[0].shape}")
        off, off_bias = (
            np.abs(mine - wanted) * (1 + 2.0**-50) + more
            for mine, wanted, more in zip((weight, bias), exact, slack, strict=True)
        )
        return cls(weight, bias, off, off_bias, unit(dtype), TINY[dtype], torch.finfo(dtype).max)

    def errors(self, low: Array, high: Array, coming: Array) -> Array:
        """Errors (cell, token, column, source) of the result, from ranges (..., column) and errors of what is read."""
        weight, terms, total = np.abs(self.weight), roundings(self.weight, self.bias), coming.sum(-1)
        out = weight.T @ coming
        size = np.maximum(np.abs(low), np.abs(high))
        reach = (size + total) @ weight + np.abs(self.bias)
        out[..., -1] += self.own(low, high, size, total)
        out[~((1 + gamma(terms, self.u)) * reach * (1 + len(weight) * 2.0**-50) < self.most)] = np.inf  # sums overflow
        return out * self._widened(terms, out.shape[-1])[:, None]

    def own(self, low: Array, high: Array, size: Array, total: Array) -> Array:
        """Errors that arise here, (cell, token, column): stored numbers are off, for numbers of `size`, and sums of
        numbers that are within `total` of [low, high] are rounded."""
        weight, terms = np.abs(self.weight), roundings(self.weight, self.bias)
        shrinks = ((weight > 0) & (weight < 1)).any(0) | (terms > 0)  # what gets smaller, or is rounded, may underflow
        found = size @ self.off + self.off_bias + self.rounded(low, high, total)
        found = found + np.where(shrinks, (terms + 1) * self.tiny, 0.0)
        found = found + 2.0**-1074 * (self.off > 0).sum(0)  # what numpy may lose of the products with `off`
        return found * self._widened(terms, 1)

    def _widened(self, terms: Array, sources: int) -> Array:
        """What sums of so many sources may lose, relatively; selections lose nothing."""
        weight = np.abs(self.weight)
        shrinks = ((weight > 0) & (weight < 1)).any(0) | (terms > 0)
        exact = (terms == 0) & ~shrinks & ~self.off.any(0) & (self.off_bias == 0)  # selections: nothing is rounded
        return np.where(exact, 1.0, 1 + (len(weight) + sources + 8) * 2.0**-52)

    def rounded(self, low: Array, high: Array, coming: Array) -> Array:
        """What rounding adds (lemmas R2 and R8), from ranges (..., column) and how far computed numbers are off."""
        terms = roundings(self.weight, self.bias)
        if not terms.any():
            return np.zeros((*low.shape[:-1], len(terms)))
        reach = (np.maximum(np.abs(low), np.abs(high)) + coming) @ np.abs(self.weight) + np.abs(self.bias)
        whole = np.where(terms > 0, gamma(terms, self.u), 0.0) * reach
        return np.fmin(whole, signed_sums(self.weight, self.bias, low - coming, high + coming, self.u))


class Reading(ABC):
    """A way of reading what is executed: how errors get from state to state, and what each site's heads are."""

    layout: Layout
    setting: Setting
    network: AttentionOnly
    constants: Tensor | None

    def layer(self, index: int) -> AttentionLayer:
        """One of the layers: affine maps are even, attention layers odd."""
        layer = self.network.layers[index]
        assert isinstance(layer, AttentionLayer)
        return layer

    @cached_property
    def forms(self) -> list[Form]:
        """The program's values as affine forms in its atoms."""
        return forms(self.layout.program)

    @cached_property
    def heads(self) -> dict[int, tuple[StoredHeads, ...]]:
        """The stored heads of every site, by the number of its operation."""
        found = {}
        for number, step in enumerate(self.layout.steps):
            layer = self.layer(2 * number + 1)
            self._nothing_else(layer, step)
            for site in step.sites:
                found[site.op] = tuple(StoredHeads.read(layer, place) for place in step.places(site))
        return found

    def _nothing_else(self, layer: AttentionLayer, step: Step) -> None:
        """Raise unless a layer has the groups and heads that its sites account for, and no more."""
        require_shapes(layer, len(step.columns), len(step.after))
        groups = layer.heads()
        if len(groups) != len(step.groups):
            raise CertificateError(f"a layer has {len(groups)} groups of heads, its sites have {len(step.groups)}")
        for heads, group in zip(groups, step.groups, strict=True):
            counted = sum(place.heads for _, place in group.members)
            if heads.heads != counted or heads.scope != group.seat.scope or heads.causal != group.seat.causal:
                raise CertificateError(f"'{heads.purpose}' does not have the heads that its sites account for")

    def start(self, found: list[Range], sources: int) -> Errors:
        """Errors of the first state: none of the input, and of constants what their stored numbers are off."""
        cells, tokens = found[0].low.shape[:2]
        program, at = self.layout.program, 0
        errors: Errors = {}
        given = None if self.constants is None else stored(self.constants)
        for value, channel in self.layout.first:
            errors[value, channel] = np.zeros((cells, tokens, sources))
            op = program.ops[value]
            if isinstance(op, Constant):
                if given is None or given.shape[0] != tokens or at >= given.shape[1]:
                    raise CertificateError("the constants next to the input are not those of the program")
                off = np.abs(given[:, at] - op.value[:, channel]) * (1 + 2.0**-50) + op.slack[:, channel]
                errors[value, channel][..., -1] = np.where(off > 0, up(off), 0.0)
                at += 1
        return errors

    @cached_property
    def bounds(self) -> dict[int, Local]:
        """The errors of all sites' heads, by the number of the operation."""
        return {site.op: self.local(site) for site in self.layout.sites}

    @abstractmethod
    def local(self, site: Site) -> Local:
        """The error of a site's heads."""

    @abstractmethod
    def reads(self, number: int, errors: Errors, found: list[Range]) -> Errors:
        """Errors of the columns that the heads of a step see; after the last step, of the output."""

    @abstractmethod
    def carry(self, number: int, seen: Errors, found: list[Range]) -> Errors:
        """Errors of the columns that a step carries on, from those that its heads see."""

    def sums(self, number: int, value: int, errors: Errors, found: list[Range]) -> Sums:
        """How the affine map before a step rounds the sums that a value is, where that is known apart; `errors` are
        those of what it reads."""
        return None

    def arises(self, number: int, errors: Errors, found: list[Range]) -> Arising | None:
        """The affine map before a step, and the errors that arise in it; `errors` are those of what it reads. Nothing
        where columns are carried on by other numbers than ones, or where that is not known."""
        return None

    def undropped(
        self, before: Sequence[Column], after: Sequence[Column], errors: Errors, found: list[Range]
    ) -> Errors:
        """Errors of columns, and of those that should read what is not before, since its weight cancels, that too."""
        for i, (value, channel), weight in dropped(self.forms, before, after):
            column = after[i]
            errors[column] = errors[column].copy()
            errors[column][..., -1] += up(found[value].size[..., channel] * weight)
        return errors

    def ratios(self, number: int, site: Site, errors: Errors) -> Ratios | None:
        """How the affine map before a step rounds what a site alone reads, where that is in proportion to what it is;
        `errors` are those of what the map reads."""
        return None

    def overflows(self, site: Site, inputs: list[Array], ranges: list[Range]) -> Mask:
        """Cells on which some number that a site's heads form may be beyond what the dtype holds."""
        return np.zeros(len(inputs[0]), dtype=bool)

    #: Whether coordinates of queries, keys and values are rounded apart (`moved`): what heads read is not computed.
    apart = False

    def moved(self, site: Site, inputs: list[Array], ranges: list[Range]) -> Moved:
        """What separate rounding of coordinates does to a site: nothing, where a head reads one state."""
        op = self.layout.program.ops[site.op]
        cells, tokens = inputs[0].shape[:2]
        return Moved(inputs, np.zeros((cells, tokens, op.width)), np.zeros(cells, dtype=bool))


class StoredLayers(Reading):
    """A network in tier `memory`, as its layers are stored: affine maps and attention layers in turn."""

    def __init__(
        self, layout: Layout, network: AttentionOnly, constants: Tensor | None, dtype: torch.dtype, stretch: float = 0.0
    ):
        """Heads are bounded `stretch` beyond their intervals, as a share of these."""
        self.layout, self.network, self.constants = layout, network, constants
        self.setting = Setting(layout.program, dtype, stretch)
        if len(network.layers) != 2 * len(layout.steps) + 1:
            raise CertificateError(f"the network has {len(network.layers)} layers, not {2 * len(layout.steps) + 1}")
        refuse_endless(network)
        if constants is not None and not bool(torch.isfinite(constants).all()):
            raise CertificateError("no bound holds for constants that are not finite")
        self._maps: dict[int, StoredMap] = {}

    def local(self, site: Site) -> Local:
        return rule_of(site.family).local(site, self.setting, self.heads[site.op])

    def overflows(self, site: Site, inputs: list[Array], ranges: list[Range]) -> Mask:
        most, pairs = torch.finfo(self.setting.dtype).max, zip(ranges, inputs, strict=True)
        sizes = np.max([np.max(r.size + e.sum(-1), axis=(1, 2)) for r, e in pairs], axis=0)

        def fits(size: float) -> bool:
            return all(heads.largest(size) < most for heads in self.heads[site.op])

        if fits(float(sizes.max())):
            return super().overflows(site, inputs, ranges)
        return np.array([not fits(x) for x in sizes])

    def ratios(self, number: int, site: Site, errors: Errors) -> Ratios | None:
        """Known of differences of two numbers that arrive exactly, stored as such: they are rounded once."""
        program, step, map = self.layout.program, self.layout.steps[number], self._maps[2 * number]
        (value,) = values_read(program, site.op)
        others = [op for i, op in enumerate(program.ops) if i != site.op and value in op.inputs]
        columns = [step.columns.index((value, c)) for c in range(program.ops[value].width)]
        weight, live = map.weight[:, columns], map.weight[:, columns] != 0
        exact = not (map.off[:, columns].any() or map.off_bias[columns].any() or map.bias[columns].any())
        simple = (np.abs(np.frexp(weight[live])[0]) == 0.5).all() and (np.abs(weight[live]) >= 1).all()
        arriving = [column for column, row in zip(step.before, live, strict=True) if row.any()]
        empty = np.flatnonzero(~live.any(0))
        if others or value == program.output or not exact or not simple or (live.sum(0) > 2).any() or not len(empty):
            return None
        form = self.forms[value]
        if any(errors[column].any() for column in arriving) or any(form.error(a).any() for a in (None, *form.weight)):
            return None
        return Ratios(np.where(live.sum(0) == 2, self.setting.u, 0.0), 2 * self.setting.tiny, int(empty[0]))

    def _through(
        self, map: StoredMap, before: Sequence[Column], after: Sequence[Column], errors: Errors, found: list[Range]
    ) -> Errors:
        """Errors through the linear part of a layer."""
        low, high = bounds_of(found, before)
        coming = np.stack([errors[column] for column in before], 2)
        out = map.errors(low, high, coming)
        return {column: out[:, :, i] for i, column in enumerate(after)}

    def reads(self, number: int, errors: Errors, found: list[Range]) -> Errors:
        steps = self.layout.steps
        before = self.layout.last if number == len(steps) else steps[number].before
        after = self.layout.output if number == len(steps) else steps[number].columns
        if 2 * number not in self._maps:
            layer = self.layer(2 * number)
            if layer.heads():
                raise CertificateError("an affine map of the network has heads")
            require_shapes(layer, len(before), len(after))
            exact, slack = affine_map(self.forms, before, after), folding_error(self.forms, before, after)
            mine = skip_of(layer, len(before))
            self._maps[2 * number] = StoredMap.of(mine, exact, slack, self.setting.dtype)
        out = self._through(self._maps[2 * number], before, after, errors, found)
        return self.undropped(before, after, out, found)

    def sums(self, number: int, value: int, errors: Errors, found: list[Range]) -> Sums:
        step, map = self.layout.steps[number], self._maps[2 * number]
        columns = [step.columns.index((value, c)) for c in range(self.layout.program.ops[value].width)]
        weight, bias = np.abs(map.weight[:, columns]), np.abs(map.bias[columns])
        off, off_bias, terms = map.off[:, columns], map.off_bias[columns], roundings(weight, bias)
        least, least_bias = weight - off, bias - off_bias  # of the exact numbers
        if ((off > 0) & (least <= 0)).any() or ((off_bias > 0) & (least_bias <= 0)).any():
            return None
        drift = np.where(off > 0, off / np.where(off > 0, least, 1.0), 0.0).max(0)
        drift = np.maximum(drift, np.where(off_bias > 0, off_bias / np.where(off_bias > 0, least_bias, 1.0), 0.0))
        g = np.where(terms > 0, gamma(terms, self.setting.u), 0.0)
        coming = np.stack([errors[column].sum(-1) for column in step.before], -1)
        low, high = bounds_of(found, step.before)
        counted = map.rounded(low, high, coming)[..., columns]
        return g * (1 + drift) + drift, counted + np.maximum(np.abs(low), np.abs(high)) @ off + off_bias

    def arises(self, number: int, errors: Errors, found: list[Range]) -> Arising | None:
        steps, map = self.layout.steps, self._maps[2 * number]
        before = self.layout.last if number == len(steps) else steps[number].before
        after = self.layout.output if number == len(steps) else steps[number].columns
        if number < len(steps) and (self._maps[2 * number + 1].off.any() or self._maps[2 * number + 1].off_bias.any()):
            return None
        total = np.stack([errors[column].sum(-1) for column in before], -1) * (1 + 2.0**-40)
        low, high = bounds_of(found, before)
        born = map.own(low, high, np.maximum(np.abs(low), np.abs(high)) + total, total)
        if number < len(steps):  # what sites count themselves, in proportion to what they read
            for site in steps[number].sites:
                if rule_of(site.family).proportional(site, self.setting) and self.ratios(number, site, errors):
                    (value,) = values_read(self.layout.program, site.op)
                    born[..., [after.index((value, c)) for c in range(self.layout.program.ops[value].width)]] = 0.0
        none = {column: np.zeros((*born.shape[:2], 1)) for column in after}
        lost = self.undropped(before, after, none, found)
        return Arising(map.weight, map.off, born + np.stack([lost[column][..., 0] for column in after], -1))

    def carry(self, number: int, seen: Errors, found: list[Range]) -> Errors:
        step, index = self.layout.steps[number], 2 * number + 1
        if index not in self._maps:
            count = len(step.carried)
            exact = np.eye(len(step.columns), count), np.zeros(count)
            nothing = np.zeros_like(exact[0]), np.zeros_like(exact[1])
            weight, bias = skip_of(self.layer(index), len(step.columns))
            self._maps[index] = StoredMap.of((weight[:, :count], bias[:count]), exact, nothing, self.setting.dtype)
        carried = self._maps[index]
        if not (carried.off.any() or carried.off_bias.any()):
            return {column: seen[column] for column in step.carried}
        return self._through(carried, step.columns, step.carried, seen, found)


@dataclass(frozen=True, eq=False)
class Squared:
    """A square that heads computed: errors of what it read, the error of the result that comes of these and of the
    heads themselves, and that the latter is at most `slope` times what is squared, plus `lost`."""

    coming: Array
    born: Array
    slope: float
    lost: float


class Propagation:
    """The error analysis of one network: local bounds once, then the rules on as many cells as wanted."""

    def __init__(self, reading: Reading):
        self.reading, self.layout, self.setting = reading, reading.layout, reading.setting
        self.local = reading.bounds

    def run(self, found: list[Range], rtol: float = 0.0, backwards: bool = True) -> Outcome:
        """The error of the output on each cell; infinite on a cell where nothing can be said. `backwards` looks at it
        from the output as well (lemma H8)."""
        program = self.layout.program
        with np.errstate(invalid="ignore", over="ignore"):
            course = Course([], [], {})
            rows = self.errors(found, course)
            forward = rows.sum(-1).max((1, 2))
            seen = behind(self.layout, self.reading, found, course) if backwards else None
            if seen is not None:  # where forward rules say nothing, as of sums that overflow, nothing holds
                less = (seen.sum(-1) < rows.sum(-1)) & np.isfinite(rows.sum(-1))
                rows = np.where(less[..., None], seen, rows)
            output = found[program.output]
            least = output.least if program.output_rows == "all" else output.least[:, :1]
            cells, sources = len(rows), rows.shape[-1]
            totals, allowed = rows.sum(-1).reshape(cells, -1), rtol * least.reshape(cells, -1)
            at = np.argmax(totals - allowed, -1), np.arange(cells)
            parts, allowance = rows.reshape(cells, -1, sources)[at[1], at[0]], allowed[at[1], at[0]]
            largest = totals.max(-1)
        blind = np.isnan(parts).any(-1) | np.isnan(largest)
        for r in found:
            blind |= ~np.all(np.isfinite(r.low) & np.isfinite(r.high), axis=(1, 2))
        parts[blind], largest[blind] = np.inf, np.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            return Outcome(parts, allowance, largest, np.nan_to_num(forward / largest, nan=1.0))

    def errors(self, found: list[Range], course: Course | None = None) -> Array:
        """The errors of the outputs, (cell, token, channel, source); `course` keeps what is found on the way."""
        layout, reading = self.layout, self.reading
        state = reading.start(found, len(layout.sites) + 1)
        course = Course([], [], {}) if course is None else course
        course.states.append(state)
        squares: dict[int, Squared] = {}
        for number, step in enumerate(layout.steps):
            before, reads = state, reading.reads(number, state, found)
            course.reads.append(reads)
            state = reading.carry(number, reads, found)
            for site in step.sites:
                values = values_read(layout.program, site.op)
                ranges = [found[value] for value in values]
                inputs = [np.stack([reads[v, c] for c in range(layout.program.ops[v].width)], 2) for v in values]
                sums = partial(reading.sums, number, values[0], before, found)
                ratios = None if reading.apart else partial(reading.ratios, number, site, before)
                out, added, length = self._site(site, ranges, inputs, squares, sums, ratios)
                course.added[site.op], course.lengths[site.op] = added, length
                state |= {(site.op, c): out[:, :, c] for c in range(out.shape[2])}
            course.states.append(state)
        last = reading.reads(len(layout.steps), state, found)
        output = np.stack([last[column] for column in layout.output], 2)
        return output if layout.program.output_rows == "all" else output[:, :1]

    def _site(
        self, site: Site, ranges: list[Range], inputs: list[Array], squares: dict[int, Squared],
        sums: Callable[[], Sums], ratios: Callable[[], Ratios | None] | None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """The error of a site's result: what comes in, passed on, and what its own heads add, which is said apart.
        Remembers squares."""
        rule, local, mine = rule_of(site.family), self.local[site.op], self.layout.order[site.op]
        broken, heads = self.reading.overflows(site, inputs, ranges), self.reading.heads[site.op]
        made = rule.rows(site, self.setting, local, heads, ranges, inputs, ratios)
        ranges, moved = made.ranges, self.reading.moved(site, made.inputs, made.ranges)
        out, added = rule.passes(site, self.setting, local, ranges, moved.inputs)
        length = up(rule.length(site, self.setting, local, ranges, moved.inputs, added) + made.length)
        added = added + made.extra
        norm = self._norm(site, moved.inputs[0], ranges[0], sums, squares)
        if norm is not None:
            out = np.where((norm.sum(-1) < out.sum(-1))[..., None], norm, out)
        out = out * (1 + 2.0**-48)
        out[..., mine] += added
        if (known := rule.squared(local)) is not None:
            squares[site.op] = Squared(moved.inputs[0], out.sum(-1), *known)
        out[..., -1] += up(moved.extra, 8) * (moved.extra > 0)  # rounding of folded weights, as that of affine maps
        outside = moved.broken | broken | made.broken
        for (low, high), r, e in zip(local.intervals, ranges, moved.inputs, strict=False):
            inner_low, inner_high = rule.defined(site, self.setting, r)
            total = e.sum(-1)
            outside |= np.any(~((inner_low - total >= low) & (inner_high + total <= high)), axis=(1, 2))
        out[outside] = np.inf
        return out, added, length

    def _norm(
        self, site: Site, e: Array, r: Range, rounded: Callable[[], Sums], squares: Mapping[int, Squared]
    ) -> Array | None:
        """The error that a root of a sum of squares passes on (lemma H4): that of the length is no more than its
        coordinates err, however small the sum is, and s^p = length^(2 p); None for any other site. `rounded` is what
        `Reading.sums` says of the argument."""
        op = self.layout.program.ops[site.op]
        p = exponent_of(op.function) if isinstance(op, Apply) and op.function.source is None else None
        if not isinstance(op, Apply) or p is None or not 0 < p < 1:
            return None
        form = self.reading.forms[op.input]
        apart = all(atom in squares and (weight >= 0).all() for atom, weight in form.weight.items())
        if form.terms or not form.weight or not apart or (form.bias < 0).any():
            return None
        rest = e.sum(-1) * (1 + 2.0**-40)  # what the squares do not account for
        length, slope, lost, parts = np.zeros(rest.shape), np.zeros(op.width), np.zeros(op.width), np.zeros_like(e)
        for atom, weight in form.weight.items():
            one, root, whole = squares[atom], np.sqrt(weight), np.sqrt(weight.sum(0))
            coming = one.coming.sum(-1)
            most = np.where(coming > 0, coming, 0.0).max(-1, keepdims=True)
            share = np.sqrt((coming / np.where(most > 0, most, 1.0)) ** 2 @ weight) + 2.0**-500 * whole
            length, slope = np.hypot(length, most * share), np.hypot(slope, one.slope * whole)
            lost = lost + one.lost * weight.sum(0)
            parts += np.einsum("ctas,aw->ctws", one.coming, root)
            parts[..., self.layout.order[atom]] += one.slope * whole
            rest = rest - one.born @ weight
        up = 1 + 2.0**-36  # what is rounded here: sums of thousands of terms, roots
        rest = np.maximum(rest, 0.0) + lost * up
        left = slope + np.sqrt(rest)
        if (sums := rounded()) is not None:  # of a sum of positive terms, computed with the relative error g
            g, counted = np.minimum(sums[0] * up, 0.5), sums[1] * (2 - up)
            reach = np.sqrt(np.maximum(r.high, 0.0)) + length
            other = g * reach + slope * (1 + g) + np.sqrt(np.maximum(rest - counted, 0.0) * (1 + g))
            left = np.where(g < 0.5, np.minimum(left, other / (1 - g)), left)
        parts[..., -1] += left
        low, high = (np.sqrt(np.maximum(end, 0.0)) for end in (r.low * (2 - up), r.high * up))
        return scaled(parts, power_moves(2 * p, low, high, (length + left) * up) * up)


def bounds_of(found: list[Range], columns: Sequence[Column]) -> tuple[Array, Array]:
    """The smallest and the largest of columns side by side, (..., column)."""
    low, high = ([getattr(found[v], end)[..., c] for v, c in columns] for end in ("low", "high"))
    return np.stack(low, -1), np.stack(high, -1)


def roundings(matrix: Array, bias: Array) -> Array:
    """How many roundings a column of Z S + s can suffer: none when it is one entry times a power of two."""
    used = matrix != 0
    count = used.sum(0)
    mantissa, _ = np.frexp(np.abs(matrix))
    exact = np.all(~used | (mantissa == 0.5), 0)
    products = np.where(exact, 0, 1)
    return np.maximum(count - 1, 0) + products * (count > 0) + ((bias != 0) & (count > 0))


FIRST = 64  # cells of the first pass: all of them at once cost little more than one
CLOSE, FURTHER = 2.0, 4  # a bound within twice the goal is worth four times the effort: parts of it are wide cells
EFFORT = 2000  # cells that are looked at before giving up: some tenths of a second for a formula
BATCH = 24  # worst cells that are split in one round, for the same reason
TRIES = 3  # coordinates that are tried for a split: those that the error depends on most
LONGEST = 2**24  # numbers in the ranges of all cells together: some two seconds, whatever the network
WORTH = 1.05  # times: cells are looked at from the output where that gains so much on some cell of the first pass


@dataclass(frozen=True)
class NetworkBound:
    """The largest error over all cells, the largest excess over a relative tolerance, and the parts of the worst
    cell."""

    bound: float
    excess: float
    parts: Array
    low: Array
    high: Array
    evaluated: int


@dataclass(frozen=True)
class Cells:
    """Cells of the box and what is known on each: error parts, what is allowed, how much each coordinate matters, and
    what looking from the output gained."""

    low: Array
    high: Array
    parts: Array
    allowance: Array
    largest: Array
    influence: Array
    gain: Array

    @property
    def excess(self) -> Array:
        """The error beyond what a relative tolerance allows."""
        return self.parts.sum(-1) - self.allowance

    def pick(self, index: np.ndarray) -> Cells:
        """Some of the cells."""
        return Cells(*(getattr(self, field.name)[index] for field in fields(self)))

    def join(self, other: Cells) -> Cells:
        """These cells and others."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Cells(*(np.concatenate(pair) for pair in pairs))


def network_bound(
    propagation: Propagation, goal: float, rtol: float = 0.0, effort: int = EFFORT, first: int = FIRST
) -> NetworkBound:
    """Upper bounds of the error; cells are split until it is at most goal + rtol |target|, or `effort` are looked
    at, or fewer where each of them takes long, or more where little is missing."""
    program = propagation.layout.program
    symbols = program.tokens * program.ops[0].width
    symbols = symbols if symbols <= MOST_SYMBOLS else 1
    numbers = program.tokens * symbols * sum(op.width for op in program.ops)
    effort, further = (min(most, max(first, LONGEST // numbers)) for most in (effort, FURTHER * effort))
    known = _evaluate(propagation, *outward_cells(propagation.layout.program, first, propagation.setting.dtype), rtol)
    evaluated, backwards = len(known.low), bool((known.gain > WORTH).any())
    hopeless = not np.isfinite(known.excess).all() and _infinite_at_a_point(propagation, known, rtol)
    while not hopeless:
        excess = known.excess
        worst = float(excess.max())
        if worst <= goal or evaluated >= (effort if worst > CLOSE * goal else further):
            break
        chosen = np.argsort(excess)[::-1][:BATCH]
        chosen = chosen[excess[chosen] >= (max(goal, 0.5 * worst) if np.isfinite(worst) else worst)]
        children, count = _split(propagation, known.pick(chosen), rtol, backwards)
        evaluated += count
        keep = np.ones(len(excess), dtype=bool)
        keep[chosen] = False
        known = known.pick(keep).join(children)
        if np.isfinite(worst) and float(known.excess.max()) > 0.999 * worst and len(chosen) < BATCH:
            break
    at = int(np.argmax(known.excess))
    up = 1 + known.parts.shape[-1] * 2.0**-52
    bound, excess_up = float(known.largest.max()) * up, float(known.parts[at].sum()) * up - float(known.allowance[at])
    bound, excess_up = (float(np.nextafter(x, np.inf)) if x else 0.0 for x in (bound, excess_up))
    return NetworkBound(bound, excess_up, known.parts[at], known.low[at], known.high[at], evaluated)


def _infinite_at_a_point(propagation: Propagation, known: Cells, rtol: float) -> bool:
    """Whether there is no bound even at the middle of some cell: then no split of its cells gives one."""
    cells_ = known.pick(~np.isfinite(known.excess))
    middle = 0.5 * cells_.low + 0.5 * cells_.high
    return not np.isfinite(_evaluate(propagation, middle, middle, rtol).excess).all()


def outward_cells(program: Program, count: int, dtype: torch.dtype) -> tuple[Array, Array]:
    """Cells that cover the box widened to numbers of `dtype`."""
    low, high = cells(program, count)
    box, wide = program.box, program.box.outward(dtype)
    shape = low.shape[1:]
    for cell, exact, outer in ((low, box.lower, wide.lower), (high, box.upper, wide.upper)):
        edge = cell == exact.numpy().reshape(shape)
        cell[edge] = np.broadcast_to(outer.numpy().reshape(shape), cell.shape)[edge]
    return low, high


def _evaluate(propagation: Propagation, low: Array, high: Array, rtol: float, backwards: bool = True) -> Cells:
    """What is known on each of the cells."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(propagation.layout.program, low, high)
    outcome = propagation.run(found, rtol, backwards)
    parts = np.where(np.isfinite(outcome.parts), outcome.parts, np.inf)
    return Cells(low, high, parts, outcome.allowance, outcome.largest, influence(found), outcome.gain)


def influence(found: list[Range]) -> Array:
    """For each cell and input coordinate its relative influence, summed over all values: what a split would calm."""
    cells_, symbols = len(found[0].low), found[0].low[0].size
    total = np.zeros((cells_, symbols))
    for r in found:
        if r.slope is None:
            return np.reshape(found[0].high - found[0].low, (cells_, symbols))
        if not np.isfinite(r.slope).all():
            continue
        size = np.maximum(r.size.max(axis=(1, 2)), 1e-300)
        total += np.minimum(np.abs(r.slope).max(axis=(1, 2)) / size[:, None], 1.0)
    return total


def _split(propagation: Propagation, known: Cells, rtol: float, backwards: bool) -> tuple[Cells, int]:
    """Each cell halved along one of the few coordinates that matter most, and how many cells were looked at for
    that."""
    low, high = known.low, known.high
    count, shape = len(low), low.shape[1:]
    flat_low, flat_high = low.reshape(count, -1), high.reshape(count, -1)
    matter = np.where(flat_high > flat_low, known.influence, -1.0)
    order = np.argsort(matter, -1)[:, ::-1][:, : min(TRIES, flat_low.shape[1])]
    lows, highs, rows = [], [], np.arange(count)
    for t in range(order.shape[1]):
        at = order[:, t]
        middle = 0.5 * (flat_low[rows, at] + flat_high[rows, at])
        left_high, right_low = flat_high.copy(), flat_low.copy()
        left_high[rows, at], right_low[rows, at] = middle, middle
        lows += [flat_low, right_low]
        highs += [left_high, flat_high]
    all_low = np.stack(lows, 1).reshape(-1, *shape)  # (cell, try and side) flattened
    all_high = np.stack(highs, 1).reshape(-1, *shape)
    found = _evaluate(propagation, all_low, all_high, rtol, backwards)
    excess = found.excess.reshape(count, order.shape[1], 2)
    best = np.argmin(excess.sum(-1), -1)  # not the larger child alone: a split may pay only together with the next
    index = ((rows * order.shape[1] + best)[:, None] * 2 + np.arange(2)).ravel()
    return found.pick(index), len(all_low)
