"""The numbers of an anchor head: values by weighted least squares after the keys have been rounded (A3 of
docs/theory.md), and the shape, which potential, how many anchors, how warm, by estimates that cost microseconds.

The estimate (`Bench.estimate`) is the error on a dense sample plus lemma A5 at its points; the winner is certified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from ...certificates.rounding import EXP_ULPS, unit
from ...dtypes import Array
from ...functions.registry import Univariate, taylor
from .bound import AnchorWeights
from .potential import Potential

LARGEST = 1e7  # of the function's size: the most that a value may be
PLACES = np.array(sorted(np.arange(17) / 16, key=lambda x: abs(x - 0.5)))  # where logits may vanish, the middle first
TERMS = 16  # roundings of a sum over the slots that carry weight, about
SHARES = 10.0 ** -np.arange(0.2, 8.0, 0.4)  # of the way from an end to the first point: ends may be singular
#: Singular values below these shares of the largest are cut off: from rounding of the dtype up to a blunt fit.
CUTS = {torch.float32: (1e-10, 1e-8, 1e-6, 1e-4), torch.float64: (1e-15, 1e-13, 1e-11, 1e-8)}


@dataclass(frozen=True)
class HeadShape:
    """The knobs of an anchor head: which potential, how many anchors, how many beyond each end, how cold."""

    potential: Potential
    count: int
    guards: int
    kappa: float


@dataclass(frozen=True)
class Sample:
    """Where a fit looks at the function: points, values, and 1 or 1/|value| as weights."""

    point: Array
    value: Array
    weight: Array
    line: tuple[float, float]

    @classmethod
    def draw(
        cls,
        fn: Univariate,
        lo: float,
        hi: float,
        potential: Potential,
        count: int,
        relative: bool,
        outer: tuple[float, float] | None = None,
    ) -> Sample:
        """`count` points, dense towards the ends like Chebyshev points in the potential's flat coordinate.

        Beyond [lo, hi], as far as `outer`, the function goes on as a constant.
        """
        ends = np.sort(potential.flat(np.array([lo, hi])))
        cosines = -np.cos(np.pi * (np.arange(count) + 0.5) / count)
        inner = np.sort(potential.unflat(ends.mean() + 0.5 * (ends[1] - ends[0]) * cosines))
        beyond = [  # what lies between a singular end and the first anchor
            end + (first - end) * share for end, first in ((lo, inner[0]), (hi, inner[-1])) for share in SHARES
        ]
        knots = [k for k in fn.knots if lo < k < hi]
        point = np.unique(np.clip(np.concatenate([[lo], inner, beyond, knots, [hi]]), lo, hi))
        if outer is not None:
            steps = np.concatenate([10.0 ** -np.arange(0.3, 12.0, 0.3), [1.0]])
            more = [end + (far - end) * steps for end, far in zip((lo, hi), outer, strict=True) if far != end]
            point = np.unique(np.concatenate([point, *more]))
        value = fn.value(torch.from_numpy(np.clip(point, lo, hi))).numpy()
        finite = np.isfinite(value)
        point, value = point[finite], value[finite]
        weight = 1.0 / np.maximum(np.abs(value), 1e-300) if relative else np.ones_like(value)
        return cls(point, value, weight, (0.0, 0.0) if relative else balanced_line(point, value))

    def centre(self, lo: float, hi: float, kappa: float, step: float) -> float:
        """Where logits kappa ((y - centre)/step)^2 of evenly spaced anchors should vanish: what they round weighs as
        much as the anchors' values differ near y (lemma A5); values, their sum and the skip round, too. In doubt, the
        middle.
        """
        line = self.line[0] * self.point
        rest = self.value - line - self.line[1]
        places = lo + (hi - lo) * PLACES[:, None]
        with np.errstate(all="ignore"):  # boxes of all sizes: where this is no number, no place is better than another
            steep = np.abs(np.diff(rest) / np.diff(self.point)) * step / math.sqrt(2 * kappa)
            away = kappa * ((self.point[1:] - places) / step) ** 2
            fixed = TERMS * np.abs(rest) + 3 * (np.abs(line) + abs(self.line[1]))
            lost = ((EXP_ULPS + 3 * away) * steep + fixed[1:]) * self.weight[1:]
        return float(places[np.argmin(np.nan_to_num(lost.max(-1), nan=np.inf, posinf=np.inf)), 0])


def balanced_line(point: Array, value: Array) -> tuple[float, float]:
    """A line through the middle of the graph: subtracting it makes what the anchors must hold small."""
    slope = (value[-1] - value[0]) / (point[-1] - point[0])
    rest = value - slope * point
    return float(slope), float(0.5 * (rest.max() + rest.min()))


def keys(shape: HeadShape, lo: float, hi: float, dtype: torch.dtype, sample: Sample | None = None) -> AnchorWeights:
    """The rounded keys of a shape, with values still zero; logits are small where they should be for a sample."""
    flat = shape.potential.flat_anchors(lo, hi, shape.count, shape.guards)
    centre = 0.5 * (lo + hi) if shape.potential.name == "square" else shape.potential.shift
    if sample is not None and shape.potential.name == "square":
        centre = sample.centre(lo, hi, shape.kappa, float(flat[1] - flat[0]))
    centre = float(_round(np.array(centre), dtype))
    slope, offset = shape.potential.keys(flat, shape.kappa, centre)
    return AnchorWeights(_round(slope, dtype), _round(offset, dtype), np.zeros(shape.count), centre)


class Bench:
    """Given keys on a sample: solves for values and says what a certificate would, sharing all that depends on keys
    alone."""

    def __init__(self, blank: AnchorWeights, sample: Sample, dtype: torch.dtype):
        self.blank, self.sample, self.dtype = blank, sample, dtype
        logits = np.multiply.outer(sample.point - blank.centre, blank.slope)
        reach = np.abs(logits)
        logits += blank.offset
        gap = logits.max(-1, keepdims=True) - logits
        self.weight = np.exp(-gap)
        self.weight /= self.weight.sum(-1, keepdims=True)
        u = unit(dtype)
        self.logit_error = self.weight * (u * (reach + np.abs(logits) + gap + EXP_ULPS))
        self.terms = 2 * np.sum(self.weight > u / self.weight.shape[-1], -1) + 4

    def solve(self, skip: bool) -> Iterator[tuple[float, AnchorWeights]]:
        """Least-squares values, once for each cut of the singular values, each with its estimate."""
        sample, dtype = self.sample, self.dtype
        line = (float(_round(np.array(sample.line[0]), dtype)), float(_round(np.array(sample.line[1]), dtype)))
        line = line if skip else (0.0, 0.0)
        matrix = self.weight * sample.weight[:, None]
        wanted = (sample.value - line[0] * sample.point - line[1]) * sample.weight
        left, size, right = np.linalg.svd(matrix, full_matrices=False)
        share = left.T @ wanted
        for cut in CUTS[dtype]:
            kept = size > cut * size[0]
            value = right[kept].T @ (share[kept] / size[kept])
            value += right[kept].T @ ((left.T @ (wanted - matrix @ value))[kept] / size[kept])  # one step of refinement
            if np.max(np.abs(value)) > LARGEST * np.max(np.abs(sample.value)):
                continue  # values so large live by cancellation: the next cut keeps them smaller
            found = replace(self.blank, value=_round(value, dtype), skip=line)
            yield self.estimate(found), found

    def estimate(self, head: AnchorWeights) -> float:
        """What a certificate will say, roughly: the error on the sample plus lemma A5 at its points. Not a bound."""
        sample, u = self.sample, unit(self.dtype)
        out = self.weight @ head.value
        error = np.abs(out + head.skip[0] * sample.point + head.skip[1] - sample.value)
        error += np.sum(self.logit_error * np.abs(head.value - out[:, None]), -1)
        error += u * self.terms * (self.weight @ np.abs(head.value))
        if head.skip != (0.0, 0.0):
            error += 3 * u * (np.abs(out) + np.abs(head.skip[0] * sample.point) + abs(head.skip[1]))
        worst = np.max(error * sample.weight)
        return float(worst) if np.isfinite(worst) else float("inf")


def cold_values(
    blank: AnchorWeights, anchors: Array, fn: Univariate, lo: float, hi: float, dtype: torch.dtype
) -> AnchorWeights:
    """The paper's choice: each anchor's value is the function there."""
    value = fn.value(torch.from_numpy(np.clip(anchors, lo, hi))).numpy()
    return replace(blank, value=_round(value, dtype))


def _round(x: Array, dtype: torch.dtype) -> Array:
    """x rounded to dtype, as float64."""
    return torch.from_numpy(np.asarray(x, dtype=np.float64)).to(dtype).double().numpy()


MOST_ANCHORS = 512  # what `eps` may ask for on its own
SPECTRUM = 2048  # Chebyshev points of a spectrum: more than MOST_ANCHORS times pi/2, beyond which no head resolves
NOISE = 1e-13  # of a function's size: spectra fall no lower in float64
RESOLVED = 0.1  # of a function's range: a head that leaves more than this has seen nothing of the function yet
FOLLOWED = 0.05  # of what a constant leaves: the shape of a head that leaves more says nothing of larger ones
NEAR = 0.01  # of the best error seen: so much a closer look at its shape may gain
GUARDED = 28  # anchors with which six guards at each end tell: with fewer, errors at the ends may stop falling too soon
MANY = 96  # above this many anchors a search follows what was best with fewer
#: Inverse temperatures that are tried first: below, tables are ill-conditioned; above, interpolation is coarse.
WARM = (0.08, 0.12, 0.17, 0.25, 0.36)
KINKED = (0.25, 0.42, 1.0, 2.72)  # a kink wants a colder head: 2.72 balances kink and interior error of a ramp
FLOORS = (1e-4, 1e-7, 1e-10)  # how near a singular end anchors go, as a share of the interval; refined later
MOST_GUARDS = 8  # of resonant tables: beyond, they are not smaller than others
ALIGNED = 0.02  # of a spacing: how far from an anchor, or from the middle of two, a pole may be
COLDEST = 0.5  # resonant tables may be so much warmer than others that are tried
LATE = 40  # Taylor coefficients: a next pole at twice the distance is then a millionth of the nearest
SEEN = 1e-4  # of the late coefficients: what other singularities may leave of the recurrence
#: Anchors beyond each end that are tried: the ends converge with their number, and values grow.
GUARDS = (1, 3, 5, 7, 9)


@dataclass(frozen=True)
class Candidate:
    """A head whose shape was tried, and what its certificate would say, roughly."""

    shape: HeadShape
    weights: AnchorWeights
    estimate: float


@dataclass(frozen=True)
class Question:
    """What a search is about: everything but the number of anchors."""

    fn: Univariate
    lo: float
    hi: float
    dtype: torch.dtype
    relative: bool
    potentials: tuple[Potential, ...]
    kappa: float | None = None
    outer: tuple[float, float] | None = None  # arguments may go this far, beyond the domain's closed ends
    even: bool = False  # logits vanish in the middle, as `fast` reads them

    def kappas(self) -> tuple[float, ...]:
        if self.kappa is not None:
            return (self.kappa,)
        return KINKED if any(self.lo < k < self.hi for k in self.fn.knots) else WARM


def candidates(fn: Univariate, lo: float, hi: float, eps: float | None = None) -> tuple[Potential, ...]:
    """The potentials worth trying for a function on an interval, the likeliest first.

    Near a singular end that the interval touches, anchors go as close as `eps` asks for: until the function is within
    eps of its value there.
    """
    found: list[Potential] = []
    inside = fn.domain
    poles = () if inside.period is not None else inside.poles
    ends = sorted(e for e in {inside.lo, inside.hi, *poles} if math.isfinite(e))
    if lo == inside.lo and hi == inside.hi:
        depths = _depths(fn, lo, hi - lo, 1, eps)
        found += [Potential("ends", 0.5 * (lo + hi), 0.5 * (hi - lo), floor=2 * f) for f in depths]
        ends = []
    for end in ends:
        sign = 1 if lo >= end else -1
        near, far = (lo - end, hi - end) if sign == 1 else (end - hi, end - lo)
        if near > 0 and far / near > 2:
            found.append(Potential("log", shift=end, sign=sign))
        elif near == 0:
            found += [Potential("log", shift=end, sign=sign, floor=far * f) for f in _depths(fn, end, far, sign, eps)]
    if "log" in fn.potentials and lo > 0 and not found and hi / lo > 2:
        found.append(Potential("log"))
    if not found or "atan" in fn.potentials:
        at, length = _sharpest(fn, lo, hi)
        found.append(Potential("atan", at, length))
        if length < 0.1 * (hi - lo):
            found.append(Potential("atan", at, 0.25 * (hi - lo)))
    return (*found, Potential("square"))


def _depths(fn: Univariate, end: float, width: float, sign: int, eps: float | None) -> tuple[float, ...]:
    """How near a singular end anchors should go, as shares of the width: a few choices."""
    if eps is None:
        return FLOORS
    shares = 10.0 ** -np.arange(2.0, 30.0, 0.25)  # the fifth root is 1e-6 at 1e-30
    points = np.clip(end + sign * width * np.concatenate([[0.0], shares]), fn.domain.lo, fn.domain.hi)
    value = fn.value(torch.from_numpy(points)).numpy()
    moved = np.abs(value[1:] - value[0])
    return tuple(float(shares[int(np.argmin(np.abs(moved - part * eps)))]) for part in (4.0, 0.7))


def _sharpest(fn: Univariate, lo: float, hi: float) -> tuple[float, float]:
    """Where the function bends most (0 when it bends there at least half as much as anywhere), and over what length."""
    y = np.linspace(lo, hi, 1025)
    value = fn.value(torch.from_numpy(y)).numpy()
    bend = np.abs(np.diff(value, 2))
    bend[~np.isfinite(bend)] = 0.0
    at = float(y[1:-1][int(np.argmax(bend))])
    if lo < 0 < hi and np.interp(0.0, y[1:-1], bend) > 0.5 * bend.max():
        at = 0.0
    spread = float(np.ptp(value[np.isfinite(value)]))
    length = (y[1] - y[0]) * math.sqrt(spread / bend.max()) if bend.max() > 0 else hi - lo
    return at, min(max(1.5 * length, 1e-3 * (hi - lo)), hi - lo)


@lru_cache(maxsize=1024)
def spectrum(fn: Univariate, lo: float, hi: float, potential: Potential, count: int) -> tuple[Array, float]:
    """What Chebyshev polynomials of degree < k leave of a function in the flat coordinate of a potential, for each k,
    about, from `count` points; and half the function's range. Where a value is not finite nothing is known, and nothing
    is said to be left."""
    ends = np.sort(potential.flat(np.array([lo, hi])))
    cosines = np.cos(np.pi * (np.arange(count) + 0.5) / count)
    points = np.clip(potential.unflat(ends.mean() + 0.5 * (ends[1] - ends[0]) * cosines), lo, hi)
    value = fn.value(torch.from_numpy(points)).numpy()
    if not np.isfinite(value).all():
        return np.zeros(count), 0.0
    size = np.abs(np.fft.rfft(np.concatenate([value, value[::-1]]))[:count]) / count
    return np.cumsum(size[::-1])[::-1], 0.5 * float(np.ptp(value))


def resolving(fn: Univariate, lo: float, hi: float, potentials: tuple[Potential, ...], eps: float | None = None) -> int:
    """How many anchors resolve a function to eps, or to a share `RESOLVED` of its range, about; the least over
    potentials, more than `MOST_ANCHORS` if none does.

    Evenly spaced anchors need 2 for every wave where Chebyshev polynomials need pi, and those of a warm head a quarter
    more. With fewer anchors than this the error of a fit says nothing: it is as large as the function.
    """
    counts = [SPECTRUM]
    for potential in potentials:
        for points in (SPECTRUM // 8, SPECTRUM):  # few points tell where the function is smooth
            left, half = spectrum(fn, lo, hi, potential, points)
            goal = max(2 * RESOLVED * half if eps is None else eps, NOISE * float(left[0]))
            degree = int(np.argmax(left <= goal)) if left[-1] <= goal else points
            if degree < points // 4:
                break
        if degree < SPECTRUM:
            counts.append(math.ceil(1.25 * 2 / math.pi * degree))
    return min(counts)


@lru_cache(maxsize=256)
def _sample(q: Question, potential: Potential, count: int) -> Sample:
    return Sample.draw(q.fn, q.lo, q.hi, potential, count, q.relative, q.outer)


def _try(q: Question, shape: HeadShape, skips: tuple[bool, ...]) -> Iterator[Candidate]:
    density = 5 if shape.count <= MANY else 3
    sample = _sample(q, shape.potential, density * (1 << (shape.count - 1).bit_length()))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        blank = keys(shape, q.lo, q.hi, q.dtype, None if q.even else sample)
    if not (np.isfinite(blank.slope).all() and np.isfinite(blank.offset).all()):
        return
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a shape that overflows is no candidate
        bench = Bench(blank, sample, q.dtype)
        found = [Candidate(shape, weights, estimate) for skip in skips for estimate, weights in bench.solve(skip)]
    yield from (one for one in found if math.isfinite(one.estimate))


def _better(best: Candidate | None, found: Iterator[Candidate]) -> Candidate | None:
    for one in found:
        if best is None or one.estimate < best.estimate:
            best = one
    return best


def coarse(q: Question, count: int, like: HeadShape | None = None) -> Candidate | None:
    """The best of a few shapes with `count` anchors; with many anchors only the shape that was best with fewer."""
    return next(iter(ranked(q, count, like)), None)


def ranked(q: Question, count: int, like: HeadShape | None = None) -> list[Candidate]:
    """The shapes of the coarse search, best first."""
    if count > MANY and like is not None:
        shapes = [replace(like, count=count)]
    else:
        guards = [g for g in GUARDS if count - 2 * g >= 2] or [0]
        shapes = [HeadShape(p, count, g, k) for p in q.potentials for g in guards for k in q.kappas()]
        shapes += _resonant(q, count)
    found = [best for shape in shapes if (best := _better(None, _try(q, shape, (not q.relative,)))) is not None]
    return sorted(found, key=lambda c: c.estimate)


def refine(q: Question, best: Candidate, rounds: int = 4) -> Candidate:
    """Small steps in temperature, guards, the potential's scale and the skip, as long as they help."""
    factor = 1.25
    for _ in range(rounds):
        shape, before = best.shape, best.estimate
        moves = []
        if q.kappa is None:
            moves += [replace(shape, kappa=shape.kappa * factor), replace(shape, kappa=shape.kappa / factor)]
        for step in (-1, 1):
            if shape.guards + step >= 0 and shape.count - 2 * (shape.guards + step) >= 2:
                moves.append(replace(shape, guards=shape.guards + step))
        if shape.potential.name == "atan" and len(q.potentials) > 1:
            for scale in (factor, 1 / factor):
                moves.append(replace(shape, potential=replace(shape.potential, scale=shape.potential.scale * scale)))
        if shape.potential.floor > 1e-300 and len(q.potentials) > 1:
            for depth in (10.0, 0.1):
                moves.append(replace(shape, potential=replace(shape.potential, floor=shape.potential.floor * depth)))
        for move in moves:
            best = _better(best, _try(q, move, (False,) if q.relative else (True, False))) or best
        if best.estimate > 0.98 * before:
            factor = math.sqrt(factor)
    return best


def _resonant(q: Question, count: int) -> list[HeadShape]:
    """Evenly spaced tables at kappa = pi spacing / (2 d), d the height of the nearest pole: where an anchor lies under
    it aliases reproduce what the table misses (lemma A9(c)). Other potentials bend their anchors to the pole."""
    if q.kappa is not None or any(p.name != "square" for p in q.potentials):
        return []
    pole = nearest_pole(q.fn, q.lo, q.hi)
    if pole is None:
        return []
    shapes = []
    for guards in range(1, min(MOST_GUARDS, (count - 4) // 2) + 1):
        spacing = (q.hi - q.lo) / (count - 1 - 2 * guards)
        off = (pole[0] - q.lo) / spacing  # even parts of a residue want an anchor there, odd ones the middle of two
        if abs(2 * off - round(2 * off)) < ALIGNED:
            shapes.append(HeadShape(q.potentials[0], count, guards, 0.5 * math.pi * spacing / pole[1]))
    return [shape for shape in shapes if COLDEST * WARM[0] <= shape.kappa <= KINKED[-1]]


@lru_cache(maxsize=1024)
def nearest_pole(fn: Univariate, lo: float, hi: float) -> tuple[float, float] | None:
    """(x, d) of a pair of poles x +- i d that a function's Taylor series at its sharpest point sees, about; None where
    it sees no such pair above the interval. A search may look there, and nothing else depends on it.

    A pair at distance r under the angle t makes c_(k+2) = 2 cos(t)/r c_(k+1) - c_k / r^2 of late coefficients.
    """
    at = _sharpest(fn, lo, hi)[0]
    if fn.knots or not fn.branches:
        return None
    series = taylor(fn, np.array([at]), np.array([at]), LATE)
    c = series.coefficient[0]
    if not (np.isfinite(c).all() and c[-4:].any() and np.isfinite(series.error[0]).all()):
        return None
    scale = float(np.max(np.abs(c[1:]) ** (1 / np.arange(1, len(c)))))  # coefficients of about one size
    late = (c / scale ** np.arange(len(c)))[-10:]
    (one, two), *_ = np.linalg.lstsq(np.stack([late[1:-1], late[:-2]], 1), late[2:], rcond=None)
    rest = late[2:] - one * late[1:-1] - two * late[:-2]
    if not (two < 0 and np.abs(rest).max() < SEEN * np.abs(late).max()):
        return None
    r, cosine = (-two) ** -0.5, 0.5 * one * (-two) ** -0.5
    if not abs(cosine) < 0.99:
        return None
    x, d = at + r * cosine / scale, r * math.sqrt(1 - cosine * cosine) / scale
    return (float(x), float(d)) if lo <= x <= hi and d < hi - lo else None


def for_count(q: Question, count: int) -> Candidate | None:
    """The best head with `count` anchors that the search finds."""
    starts = ranked(q, min(count, MANY))[:3]
    if not starts:
        return None
    best = min((refine(q, start) for start in starts), key=lambda c: c.estimate)
    return best if count <= MANY else coarse(q, count, like=best.shape)


def flat(q: Question) -> Candidate:
    """The constant half way between the function's least and largest value: what every search can fall back on."""
    sample = _sample(q, Potential("square"), SPECTRUM)
    shape = HeadShape(Potential("square"), 2, 0, 1.0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what overflows has an endless estimate
        middle = _round(np.array(0.5 * sample.value.max() + 0.5 * sample.value.min()), q.dtype)
        blank = keys(shape, q.lo, q.hi, q.dtype)
        weights = replace(blank, value=np.full(2, float(middle)))
        return Candidate(shape, weights, Bench(blank, sample, q.dtype).estimate(weights))


def for_eps(q: Question, eps: float) -> tuple[Candidate | None, Candidate | None]:
    """The smallest head that seems to reach eps, and the best one seen (for the message when none does).

    Errors of a warm head fall geometrically with the number of anchors, once these resolve the function and until
    rounding takes over: the search follows the line through the last two points of log(error) against count, then
    bisects.
    """
    seen: dict[int, Candidate] = {2: flat(q)}

    def at(count: int) -> float:
        if count not in seen:
            fewer = [seen[c] for c in sorted(seen) if 2 < c < count and seen[c].estimate <= FOLLOWED * seen[2].estimate]
            best = coarse(q, count, like=fewer[-1].shape if fewer else None)
            if best is not None and count <= MANY and best.estimate > eps > 0.05 * best.estimate:
                best = refine(q, best, rounds=2)
            if best is None:
                return math.inf
            seen[count] = best
        return seen[count].estimate

    if seen[2].estimate <= eps:
        return seen[2], seen[2]
    low, count = 2, max(8, resolving(q.fn, q.lo, q.hi, q.potentials))
    if count > MOST_ANCHORS:
        return None, seen[2]
    goal = resolving(q.fn, q.lo, q.hi, q.potentials, None if q.relative else eps)
    error = at(count)
    while error > eps and count < MOST_ANCHORS:
        low, before, error_before = count, count, error
        count = min(MOST_ANCHORS, before * 2)
        ordered = sorted(c for c in seen if c > 2)[-2:]
        if len(ordered) > 1:
            fall = math.log(seen[ordered[0]].estimate / seen[ordered[1]].estimate) / (ordered[1] - ordered[0])
            if fall > 0:
                count = min(count, max(before + 1, before + math.ceil(math.log(error_before / (0.8 * eps)) / fall)))
        error = at(count)
        if count >= 2 * before > 32 and error > 0.7 * error_before and not count < goal <= MOST_ANCHORS:
            break  # rounding, or a kink: more anchors do not help
    best_seen = min(seen.values(), key=lambda c: c.estimate)
    if error > eps and eps > NEAR * best_seen.estimate:  # before anything is refused
        best_seen = refine(q, best_seen)
        count, error = best_seen.shape.count, best_seen.estimate
        seen[count] = best_seen
    if error > eps:
        return None, best_seen
    while count - low > max(1, count // 16):
        middle = (low + count) // 2
        if at(middle) <= eps:
            count = middle
        else:
            low = middle
    best = seen[count]
    for share in (0.92, 0.85, 0.78):  # a closer look may find a smaller one still
        fewer = int(share * best.shape.count)
        start = coarse(q, fewer) if best.shape.count <= MANY and fewer > 2 else None
        closer = None if start is None or start.estimate > 20 * eps else refine(q, start)
        if closer is None or closer.estimate > eps:
            break
        best = closer
    return best, best_seen


@lru_cache(maxsize=4096)
def quick(
    fn: Univariate, lo: float, hi: float, dtype: torch.dtype, eps: float, relative: bool = False, even: bool = False
) -> Candidate | None:
    """A head for eps found with few trials: what a compiler asks for, many times. If none reaches eps, the best; with
    `even` of those whose anchors are evenly spaced.

    The larger dtype may take what the smaller one found: it evaluates it at least as well.
    """
    outer = (lo, hi)
    lo, hi = max(lo, fn.domain.lo), min(hi, fn.domain.hi)
    potentials = (Potential("square"),) if even else candidates(fn, lo, hi, None if relative else eps)
    q = Question(fn, lo, hi, dtype, relative, potentials, outer=None if outer == (lo, hi) else outer, even=even)
    best = _quick(q, eps)
    if even:
        return best
    if (best is None or best.estimate > eps) and not relative:
        best = _better(best, iter([flat(q)]))
    if (best is None or best.estimate > eps) and dtype == torch.float64:
        smaller = quick(fn, *outer, torch.float32, eps, relative)
        if smaller is not None:
            sample = _sample(q, smaller.shape.potential, SPECTRUM)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                again = Bench(smaller.weights, sample, dtype).estimate(smaller.weights)
            best = _better(best, iter([replace(smaller, estimate=again)]))
    return best


def _quick(q: Question, eps: float) -> Candidate | None:
    choice, relative = q.potentials, q.relative
    kappas: tuple[float, ...] = (0.42, 1.0) if any(q.lo < k < q.hi for k in q.fn.knots) else (0.14, 0.27)
    singular = tuple(p for p in choice if p.floor > 1e-300)
    if singular:  # the interval touches a branch point: anchors must crowd there, however few there are at first
        choice, kappas = singular, (0.06, 0.12, 0.25)

    def at(count: int, potentials: tuple[Potential, ...], like: HeadShape | None = None) -> Candidate | None:
        if count > MANY and like is not None:
            shapes = [replace(like, count=count, kappa=step * like.kappa) for step in (0.5, 1.0, 2.0)]
        else:
            deep = potentials[0].floor > 1e-300 or count < 14  # few anchors, or a singular end: few guards
            guards = [g for g in ((1, 3) if deep else (3, 6)) if count - 2 * g >= 2] or [0]
            shapes = [HeadShape(p, count, g, kappa) for p in potentials for g in guards for kappa in kappas]
        best: Candidate | None = None
        for shape in shapes:
            best = _better(best, _try(q, shape, (not relative,)))
        return best

    start = max(12, resolving(q.fn, q.lo, q.hi, choice))
    if start > MOST_ANCHORS:
        return None
    if start > 12:  # many waves: the spectrum knows the potential, and with so many anchors a colder head rounds less
        most = 1.1 * resolving(q.fn, q.lo, q.hi, choice, None if relative else eps)
        choice = tuple(p for p in choice if resolving(q.fn, q.lo, q.hi, (p,), None if relative else eps) <= most)
        kappas = (*kappas, 0.5)
    first = at(start, choice)
    if first is None:
        return None
    one = tuple(p for p in choice if p.name == first.shape.potential.name)  # near a singular end: all depths
    if first.estimate <= eps:
        if start > 12:
            return _trimmed(first, start // 2, eps, partial(at, potentials=one))
        for count in (6, 8, 10):
            found = at(count, one)
            if found is not None and found.estimate <= eps:
                return found
        return first
    goal = max(GUARDED, resolving(q.fn, q.lo, q.hi, one, None if relative else eps))
    before, best, count = first, first, start + 4
    while True:
        found = at(count, one, before.shape)
        if found is None:
            return best
        best = found if found.estimate < best.estimate else best
        if found.estimate <= eps:
            return _trimmed(found, before.shape.count, eps, partial(at, potentials=one, like=found.shape))
        fall = math.log(before.estimate / found.estimate) / (count - before.shape.count)
        slow = fall < 0.01 * math.log(2)
        if count >= MOST_ANCHORS or (slow and not count < goal <= MOST_ANCHORS):
            return best
        step = 0 if slow else math.ceil(math.log(found.estimate / (0.8 * eps)) / fall)
        before, count = found, min(max(goal, count + 2) if slow else count + max(2, min(step, count)), MOST_ANCHORS)


def _trimmed(found: Candidate, low: int, eps: float, at: Callable[[int], Candidate | None]) -> Candidate:
    """A smaller head than `found` that still reaches eps, between it and the size `low`, which does not."""
    best = found
    while best.shape.count - low > max(1, best.shape.count // 12):
        count = (low + best.shape.count) // 2
        middle = at(count)
        if middle is not None and middle.estimate <= eps:
            best = middle
        else:
            low = count
    return best
