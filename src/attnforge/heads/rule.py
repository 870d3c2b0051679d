"""What the error analysis asks of a head family, and what families share (section H of docs/theory.md).

A `Rule` bounds the error of a site's stored heads on the arguments they may see, and says how errors pass through the
site's operation. It reads stored tensors (`StoredHeads`), the operation of the program and the site; it never builds
weights. Every rule of passing has two halves. *Passed*: how far the exact operation moves when its arguments do, linear
in the parts of what comes in; where a bound is not linear (tanh), the parts are scaled so that they add up to it.
*Added*: how far the heads are from the exact operation at the arguments they really see.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..certificates.rounding import TINY, unit, up
from ..dtypes import Array
from ..errors import CertificateError
from ..functions.queries import Largest, lipschitz, modulus, spread
from ..functions.univariate import Univariate
from ..programs.enclose import Range
from ..programs.ops import Apply, Op
from ..programs.program import Program
from .site import Site, Span
from .slopes import Enclosure, Steepness, Tangent, plus, times
from .slopes import U as U64
from .stored import SelfSpec, StoredHeads

SMOOTH_CELLS = 64  # on which the kernel looks at products and gates: what Taylor leaves is below float64's roundoff
#: Edges around a crossing of two logits, in units of their difference: fine where weights move, then doubling.
NEAR = np.concatenate([np.arange(0.0, 6.0, 0.5), np.arange(6.0, 40.0, 1.0), 40.0 * 2.0 ** np.arange(0.0, 64.0)])
Passed = tuple[Array, Array]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Setting:
    """What every rule may ask: the program, the dtype that computes, and how far beyond its interval (as a share of it)
    a head is bounded, because trained weights may push arguments out."""

    program: Program
    dtype: torch.dtype
    stretch: float = 0.0

    @property
    def u(self) -> float:
        """The unit roundoff."""
        return unit(self.dtype)

    @property
    def tiny(self) -> float:
        """What underflow can take from a result."""
        return TINY[self.dtype]

    def op(self, site: Site) -> Op:
        """The operation that a site carries out."""
        return self.program.ops[site.op]

    def stretched(self, interval: Span, fn: Univariate | None = None) -> Span:
        """An interval made longer on both sides, as far as a function's domain allows."""
        low, high = interval
        more = self.stretch * (high - low)
        wide_low, wide_high = low - more, high + more
        if fn is not None:
            for end in (fn.domain.lo, fn.domain.hi, *fn.domain.poles):
                if end < low:
                    wide_low = max(wide_low, 0.5 * (low + end))
                if end > high:
                    wide_high = min(wide_high, 0.5 * (high + end))
        return wide_low, wide_high


@dataclass(frozen=True)
class Local:
    """The certified error of one site's heads on the intervals they are bounded for; `total` is its largest value.
    `lemmas` are those that it rests on besides the site's own."""

    intervals: tuple[Span, ...]
    total: float
    rounding: float
    lemmas: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, eq=False)
class Copies:
    """Rounding of what the heads of a site read, where every coordinate of queries, keys and values is computed on its
    own (the plain form): "query", "key", "value" -> (cell, token, coordinate), for each head with the channels that it
    writes. `known` bounds all of it beforehand, "query" and "value" -> a number."""

    heads: tuple[tuple[dict[str, Array], tuple[int, ...]], ...]
    known: dict[str, float]


@dataclass(frozen=True, eq=False)
class Moved:
    """What `Copies` do to a site: errors of its inputs, which grow; errors of its result; cells where nothing holds."""

    inputs: list[Array]
    extra: Array
    broken: Mask


@dataclass(frozen=True, eq=False)
class Ratios:
    """How channels of a value are computed where each is off in proportion to what it is: relatively, by channel, and
    by `lost` more where it underflows. Channel `zero` is an exact 0."""

    relative: Array
    lost: float
    zero: int


@dataclass(frozen=True, eq=False)
class Arguments:
    """Arguments of an operation and their errors, as heads make them of what they read; what that adds to the error of
    the result, channel by channel and as the length of a row; cells where nothing holds."""

    ranges: list[Range]
    inputs: list[Array]
    extra: Array
    length: Array
    broken: Mask


class Rule(ABC):
    """The error analysis of one family."""

    @abstractmethod
    def local(self, site: Any, setting: Setting, heads: Sequence[StoredHeads]) -> Local:
        """The error of the stored heads (of each channel, or of the site) against the operation itself."""

    @abstractmethod
    def passes(self, site: Any, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]) -> Passed:
        """Errors (cell, token, channel, source) passed on from the inputs, and (cell, token, channel) added."""

    def proportional(self, site: Any, setting: Setting) -> bool:
        """Whether `rows` asks for ratios: then it counts the rounding of what heads read."""
        return False

    def rows(
        self, site: Any, setting: Setting, local: Any, heads: Sequence[StoredHeads], ranges: list[Range],
        inputs: list[Array], ratios: Callable[[], Ratios | None] | None,
    ) -> Arguments:  # fmt: skip
        """What heads make of what they read before the operation proper. `ratios` is None where the rounding of
        coordinates is counted elsewhere (`copied`)."""
        cells, tokens = inputs[0].shape[:2]
        nothing = np.zeros((cells, tokens, setting.op(site).width))
        return Arguments(ranges, inputs, nothing, nothing[..., 0], np.zeros(cells, dtype=bool))

    def length(
        self, site: Any, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array], added: Array
    ) -> Array:
        """The Euclidean length (cell, token) of what heads add to a result, `added` channel by channel."""
        return up(np.sqrt(np.sum(added**2, -1)), added.shape[-1] + 4)

    def defined(self, site: Any, setting: Setting, r: Range) -> tuple[Array, Array]:
        """The range of an argument, as far as the operation is defined there."""
        return r.low, r.high

    def slopes(
        self, site: Any, setting: Setting, heads: Sequence[StoredHeads], inputs: list[Enclosure]
    ) -> list[Enclosure]:
        """The partial derivatives of the stored heads by each input, (cell, token, channel), for arguments in `inputs`:
        channel by channel (lemma H2). Families that mix channels or tokens say `through` instead."""
        raise CertificateError(f"no Lipschitz constant is known of the heads of %{site.op}, {setting.op(site).word}")

    def through(
        self, site: Any, setting: Setting, local: Any, heads: Sequence[StoredHeads], arguments: list[Enclosure],
        tangents: list[Tangent],
    ) -> Tangent:  # fmt: skip
        """The derivatives of a site's results, (cell, token, channel), by the inputs of the network, from those of what
        its heads read: the chain rule over the stored tables, for arguments that are enclosed (lemma H2). On cells
        where arguments leave what the heads are known for, endless."""
        spans = list(local.intervals)[: len(arguments)]
        inside = [_inside(argument, span) for argument, span in zip(arguments, spans, strict=True)]
        clipped = [_clipped(argument, span) for argument, span in zip(arguments, spans, strict=True)]
        parts, total = [], np.zeros(())
        for ends, tangent, good in zip(self.slopes(site, setting, heads, clipped), tangents, inside, strict=True):
            low, high = (np.where(good, end, side) for end, side in zip(ends, (-np.inf, np.inf), strict=True))
            parts.append(times((low[..., None], high[..., None]), tangent.ends))
            with np.errstate(invalid="ignore"):
                total = total + np.maximum(-low, high) * tangent.total * (1 + 8 * U64)
        return Tangent.of(plus(*parts), total)

    def squared(self, local: Any) -> tuple[float, float] | None:
        """(k, m) for heads that compute the square of q up to k |q| + m at most; None for others (lemma H4)."""
        return None

    def describe(self, site: Any, heads: Sequence[StoredHeads]) -> str:
        """How warm or how sharp the heads are, for people."""
        return ""

    def anchors(self, heads: Sequence[StoredHeads]) -> int:
        """The anchors of the site's table, if it has one."""
        return 0

    def edges(self, site: Any, setting: Setting, heads: StoredHeads) -> tuple[float, ...] | None:
        """The cells on which the kernel looks at heads that read one scalar (docs/kernel.md); None for others."""
        return None

    def written(self, reads: list[tuple[Array, Array]], skip: list[float], bias: float, once: bool) -> Array | None:
        """A bound of what heads write, less the linear skip, where the family knows one that is better than what the
        result's range less that of the skip says. `reads` are the ranges of the coordinates, `skip` their weights;
        `once` says that all coordinates are the same column."""
        return None

    def loosened(self, site: Any, setting: Setting, heads: Sequence[StoredHeads], known: dict[str, float]) -> Local:
        """`local` for heads whose coordinates err separately, queries by known["query"] and values by known["value"] at
        most. Most families take such errors as errors of their arguments (`copied`) and need nothing here."""
        return self.local(site, setting, heads)

    def copied(self, site: Any, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
               ranges: list[Range], moved: Moved) -> None:  # fmt: skip
        """What separate rounding of coordinates does; where a family has no rule for it, nothing is known."""
        if any(part.any() for rho, _ in copies.heads for part in rho.values()):
            moved.broken[:] = True


def _inside(argument: Enclosure, span: Span) -> Mask:
    """Cells on which an argument stays where its heads are known, to go with (cell, token, channel)."""
    return np.asarray(((argument[0] >= span[0]) & (argument[1] <= span[1])).all((1, 2)))[:, None, None]


def _clipped(argument: Enclosure, span: Span) -> Enclosure:
    with np.errstate(invalid="ignore"):
        low, high = (np.clip(np.nan_to_num(a, nan=span[0]), *span) for a in argument)
    return low, np.maximum(low, high)


def worst(e: Array, axis: int, among: Mask | None = None) -> Array:
    """The parts of the largest total along an axis: they add up to the maximum, which a maximum of parts does not.

    `among` picks the candidates; at least one must be left.
    """
    total = e.sum(-1)
    if among is not None:
        total = np.where(among, total, -1.0)
    at = np.argmax(total, axis)
    return np.take_along_axis(e, np.expand_dims(at, (axis, -1)), axis).squeeze(axis)


def or_endless(bound: float) -> float:
    """A bound for a maximum to compare: infinity where it is NaN, which a maximum would drop."""
    return math.inf if math.isnan(bound) else bound


def scaled(parts: Array, bound: Array) -> Array:
    """Parts (..., source) made to add up to a bound (...) of what all of them do together."""
    total = parts.sum(-1)
    factor = np.where(total > 0, bound / np.where(total > 0, total, 1.0), 0.0)
    return np.where(parts > 0, factor[..., None] * parts, 0.0) * (1 + (parts.shape[-1] + 8) * 2.0**-52)


def weights_move(d: Array) -> Array:
    """Total variation of a softmax whose logits move by at most d (A5)."""
    return np.minimum(up(np.tanh(0.5 * d), 8), 1.0)


@dataclass(frozen=True, eq=False)
class ApplyLocal(Local):
    """The error of heads for a univariate function: `profile` by cells of the interval, where it is known so finely,
    and the slopes of the function itself, by cells."""

    profile: tuple[Largest, ...] = ()
    slopes: Largest = field(kw_only=True)

    def over(self, low: Array, high: Array) -> Array:
        """The error for arguments in [low, high]."""
        if not self.profile:
            return np.full(low.shape, self.total)
        return np.maximum.reduce([part.over(low, high) for part in self.profile])


class ApplyRule(Rule):
    """Errors through a univariate function: times its slope, or, where that is unbounded, what its range allows."""

    def steepness(self, site: Any, setting: Setting, heads: StoredHeads) -> Steepness:
        """The derivative of one stored head of a scalar, on cells."""
        raise NotImplementedError

    def slopes(
        self, site: Any, setting: Setting, heads: Sequence[StoredHeads], inputs: list[Enclosure]
    ) -> list[Enclosure]:
        ((low, high),), known = inputs, dict[bytes, Steepness]()
        for each in heads:
            if each.identity not in known:
                known[each.identity] = self.steepness(site, setting, each)
        found = [known[each.identity].slopes(low[..., c], high[..., c]) for c, each in enumerate(heads)]
        return [(np.stack([f[0] for f in found], -1), np.stack([f[1] for f in found], -1))]

    def defined(self, site: Any, setting: Setting, r: Range) -> tuple[Array, Array]:
        """A range cut to the domain of the function that reads it: outside, the target is not defined."""
        domain = self.function(site, setting).domain
        low = np.clip(r.low, domain.lo, domain.hi)
        return low, np.maximum(low, np.minimum(r.high, domain.hi))

    def function(self, site: Site, setting: Setting) -> Univariate:
        """What the site's operation applies."""
        op = setting.op(site)
        assert isinstance(op, Apply)
        return op.function

    def passes(self, site: Any, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]) -> Passed:
        (r,), (e,), fn = ranges, inputs, self.function(site, setting)
        total = e.sum(-1)
        widest = float(np.max(total)) * (1 + 2.0**-40)
        low, high = self.defined(site, setting, r)
        low, high = low - widest, high + widest
        slope = local.slopes.over(low, high)
        loose = modulus(fn, total)
        steep = ~np.isfinite(slope) & ~np.isfinite(loose) & np.isfinite(low) & np.isfinite(high)
        if steep.any():
            loose[steep] = spread(fn, low[steep], high[steep])
        most = np.minimum(np.where(total > 0, slope * np.where(total > 0, total, 1.0), 0.0), loose)
        share = e / np.where(total > 0, total, 1.0)[..., None]
        # four products and quotients, each of which may underflow
        return np.where(e > 0, share * most[..., None] + 4 * 2.0**-1074, 0.0), local.over(low, high)


def slopes_of(fn: Univariate, edges: Array) -> Largest:
    """The slopes of a function on cells, for range queries."""
    return Largest(edges[:-1], lipschitz(fn, edges[:-1], edges[1:]))


def first_cells(fn: Univariate, low: float, high: float, inner: Array) -> Array:
    """Edges of first cells on [low, high]: given ones, kinks on boundaries, crowded around kinks."""
    knots = np.array([k for k in fn.knots if low < k < high])
    # 27 cells on each side of a kink, each a quarter of the one before: down to 4^-27, below float64's resolution
    crowd = [k + (end - k) * 4.0 ** -np.arange(1.0, 28.0) for k in knots for end in (low, high)]
    places = np.concatenate([inner, knots, *crowd])
    return np.unique(np.concatenate([[low], places[(places > low) & (places < high)], [high]]))


def crossings(spec: SelfSpec) -> list[Array]:
    """Edges around the places where two logits of a gate cross."""
    return [place + sign * NEAR / rate for rate, place in zip(*spec.crossings, strict=True) for sign in (-1.0, 1.0)]
