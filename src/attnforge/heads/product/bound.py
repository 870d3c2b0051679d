"""A rigorous bound of |product head - x y| over a box, for the weights as stored, rounding included.

The logits of a product head are functions of y alone and its values are affine in x, so its error is, output by output,

    E(x, y) = sum_a x_a A_a(y) + B(y),    A_a(y) = S_a + sum_h U_ha w_h(y) - [a is this output] y,

with w_h(y) the weight of head h's self slot: a few analytic functions of one scalar. Each is enclosed on cells of the
y-interval by its Taylor polynomial at the centre (python-flint balls) and the ball of its last coefficient over the
whole cell. What drifts (fine-tuning) only makes the numbers larger: memory values that are no longer 0 enter B; queries
that also read x count as errors of the logits. Rounding is lemma A5 (`certificates.rounding.softmax_rounding`) for each
head and cell, then the roundings of the output projection and of the skip.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from flint import arb, arb_series

from ...certificates.rounding import TINY, exp_ulps, gamma, softmax_rounding, unit, up
from ...dtypes import Array
from ...errors import CertificateError
from ...functions.directed import high_end, precision
from ..slopes import Enclosure, lines_of, plus, steepness, times
from ..stored import SelfSpec, power_of_two

BITS, ORDER = 128, 16  # of balls (float64's 53, twice for products), and of Taylor polynomials
REACH = 0.125  # half width of a Taylor cell, in units of the logit: of a sigmoid (1/8 pi)^17 is left, 1e-24
CELLS = 64  # of the query, for rounding: each is bounded at its larger end, 1/64 of the interval further out
SLOPE_CELLS = 256  # first cells of the derivatives: hot heads turn slowly
MOST_CELLS = 4096  # of the truncation: steeper queries than any product has are bounded on wider cells, loosely


def partials(spec: SelfSpec, query: tuple[float, float], x: Enclosure, y: Enclosure) -> tuple[Enclosure, Enclosure]:
    """Derivatives of stored heads by the value operand x and the query operand y, in `query`, on cells of both: they
    compute x G(y) + H(y), and the skip (lemma H2)."""
    if spec.W_Q[:, 0].any():
        raise CertificateError("these heads read their value as a query, which no product does")
    edges = np.linspace(*query, SLOPE_CELLS + 1)
    by_value = steepness(lines_of(spec, 1, 0, constant=False), 0.0, edges)
    rest = steepness(lines_of(spec, 1, None), float(spec.S[1, 0]), edges)
    first = np.full_like(x[0], float(spec.S[0, 0]))
    return plus((first, first), by_value.values(*y)), plus(times(x, by_value.slopes(*y)), rest.slopes(*y))


@dataclass(frozen=True)
class ProductError:
    """The bound, split into what the stored weights compute instead of x y, and rounding."""

    truncation: float
    rounding: float

    @property
    def total(self) -> float:
        """The bound itself, rounded up."""
        return float(up(self.truncation + self.rounding))


@dataclass(frozen=True)
class Sides:
    """The intervals of the value operand (each of its channels) and of the query operand."""

    value: tuple[float, float]
    query: tuple[float, float]

    @property
    def sizes(self) -> tuple[float, float]:
        """Largest absolute values."""
        return max(map(abs, self.value)), max(map(abs, self.query))


def product_error(spec: SelfSpec, sides: Sides, dtype: torch.dtype) -> ProductError:
    """A bound on |head - x y| for the stored weights `spec`, evaluated in `dtype`; channels are (x_1 .. x_v, y)."""
    numbers = tuple((array.shape, array.tobytes()) for array in (getattr(spec, f.name) for f in fields(spec)))
    return _error(_Question(numbers, sides, dtype, exp_ulps(), spec))


@dataclass(frozen=True)
class _Question:
    """All that a bound depends on: a compiler asks for that of one product again and again."""

    numbers: tuple[tuple[tuple[int, ...], bytes], ...]
    sides: Sides
    dtype: torch.dtype
    ulps: float
    spec: SelfSpec = field(compare=False)


@functools.lru_cache(maxsize=1024)
def _error(asked: _Question) -> ProductError:
    off = truncation(asked.spec, asked.sides)
    return ProductError(off, rounding(asked.spec, asked.sides, asked.dtype, off))


def truncation(spec: SelfSpec, sides: Sides) -> float:
    """sup |E| over the box and all outputs, for exact arithmetic with the stored weights."""
    lo, hi = sides.query
    slope = np.abs(spec.W_Q[:, -1] @ np.concatenate([spec.b_K[:, None], spec.M_K], 1).transpose(0, 2, 1)).max()
    count = min(max(1, math.ceil((hi - lo) * slope / (2 * REACH))), MOST_CELLS)
    edges = np.linspace(lo, hi, count + 1)
    edges[0], edges[-1] = lo, hi
    worst = 0.0
    with precision(BITS, ORDER + 2):
        forms = _forms(spec)
        for left, right in itertools.pairwise(edges):
            centre = arb(float(0.5 * (left + right)))
            radius = high_end(abs(arb(float(right)) - centre).union(abs(centre - arb(float(left)))))
            near = _basis(spec, arb_series([centre, 1]))
            wide = _basis(spec, arb_series([arb(float(centre.mid()), radius), 1]))
            for diagonal, rest, others in forms:
                total = max(_sup(_combine(end, diagonal, rest), near, wide, radius) for end in sides.value)
                total += sum(sides.sizes[0] * _sup(form, near, wide, radius) for form in others)
                worst = max(worst, total)
    return float(up(worst, 16)) if worst else 0.0


Key = tuple[str, int, int]  # one of the functions 1, y, w_h, y w_h, w_hk
Combination = dict[Key, arb]  # a combination of them
Basis = dict[Key, arb_series]


def _forms(spec: SelfSpec) -> list[tuple[Combination, Combination, list[Combination]]]:
    """For every output its own coefficient A, the part B without x, and the other x's A; equal outputs once."""
    heads, channels = spec.W_V.shape[:2]
    forms = []
    for out in _different(spec):

        def through(h: int, values: Array, out: int = out) -> arb:
            return sum((arb(v) * arb(o) for v, o in zip(values, spec.W_O[h, :, out], strict=True) if v and o), arb(0))

        linear: list[Combination] = []
        for a in range(channels - 1):
            form: Combination = {("one", 0, 0): arb(spec.S[a, out]), ("y", 0, 0): arb(-1 if a == out else 0)}
            linear.append(_nonzero(form | {("w", h, 0): through(h, spec.W_V[h, a]) for h in range(heads)}))
        rest: Combination = {("one", 0, 0): arb(spec.s[out]), ("y", 0, 0): arb(spec.S[-1, out])}
        for h in range(heads):
            rest["yw", h, 0], rest["w", h, 0] = through(h, spec.W_V[h, -1]), through(h, spec.b_V[h])
            rest |= {("m", h, k): through(h, values) for k, values in enumerate(spec.M_V[h])}
        forms.append((linear[out], _nonzero(rest), [f for a, f in enumerate(linear) if a != out and f]))
    return forms


def _nonzero(form: Combination) -> Combination:
    return {key: value for key, value in form.items() if value != 0}


def _combine(end: float, diagonal: Combination, rest: Combination) -> Combination:
    """x A + B at one end of x's interval; the error is affine in x, so the ends are enough."""
    return {key: arb(end) * diagonal.get(key, arb(0)) + rest.get(key, arb(0)) for key in {*diagonal, *rest}}


def _basis(spec: SelfSpec, y: arb_series) -> Basis:
    """The functions that the error is a combination of, as series around a centre or over a whole cell."""
    basis = {("one", 0, 0): arb_series([1]), ("y", 0, 0): y}
    memory = bool(np.any(spec.M_V))
    for h in range(spec.W_Q.shape[0]):
        query = [y * arb(w) + arb(b) for w, b in zip(spec.W_Q[h, -1], spec.b_Q[h], strict=True)]
        keys = [spec.b_K[h], *spec.M_K[h]]
        exps = [sum((q * arb(c) for q, c in zip(query, key, strict=True) if c), arb_series([0])).exp() for key in keys]
        norm = sum(exps[1:], exps[0]).inv()
        basis["w", h, 0] = exps[0] * norm
        basis["yw", h, 0] = basis["w", h, 0] * y
        if memory:
            basis |= {("m", h, k): e * norm for k, e in enumerate(exps[1:])}
    return basis


def _sup(form: Combination, near: Basis, wide: Basis, radius: float) -> float:
    """An upper bound of |form| on a cell."""
    if not form:
        return 0.0
    centre = sum((near[key] * c for key, c in form.items()), arb_series([0]))
    last = sum((wide[key][ORDER + 1] * c for key, c in form.items()), arb(0))
    total, power = arb(0), arb(1)
    for j in range(ORDER + 1):
        total += abs(centre[j]) * power
        power *= arb(radius)
    return high_end(total + abs(last) * power)


def rounding(spec: SelfSpec, sides: Sides, dtype: torch.dtype, off: float) -> float:
    """How far the computed output can be from the exact one of the stored weights, itself at most `off` from x y."""
    u, tiny = unit(dtype), TINY[dtype]
    size_x, size_y = sides.sizes
    edges = np.linspace(*sides.query, CELLS + 1)
    ends = np.stack([edges[:-1], edges[1:]])
    centre = ends.mean(0)
    radius = up(np.abs(ends - centre).max(0))

    # queries: (cell, head, coordinate); what reads x is an error, whatever its size
    query = np.abs(ends[..., None, None] * spec.W_Q[:, -1] + spec.b_Q).max(0)
    parts = np.abs(spec.W_Q) * np.array([*[size_x] * (spec.W_Q.shape[1] - 1), size_y])[:, None]
    sums = gamma(np.maximum(np.count_nonzero(spec.W_Q, axis=1) - 1, 0), u) * parts.sum(1)
    error = parts[:, :-1].sum(1) + u * (parts * ~power_of_two(spec.W_Q)).sum(1) + sums
    moved = (spec.W_Q != 0).any(1) & (spec.b_Q != 0)
    error = up((error + moved * u * (query + error)) * (1 + 8 * u), 8)
    still = ~(spec.W_Q != 0).any(1) & power_of_two(spec.b_Q)  # a query coordinate that is a constant power of two
    keys = np.concatenate([spec.b_K[:, None], spec.M_K], 1)
    terms = np.einsum("nhk,hsk->nhsk", query + error, np.abs(keys))
    inexact = ~(power_of_two(keys) | still[:, None, :])
    slope, offset = np.einsum("hk,hsk->hs", spec.W_Q[:, -1], keys), np.einsum("hk,hsk->hs", spec.b_Q, keys)
    logits = centre[:, None, None] * slope + offset
    reach = radius[:, None, None] * np.abs(slope)
    several = np.count_nonzero(keys, axis=-1) - 1
    logit_error = np.einsum("nhk,hsk->nhs", error, np.abs(keys)) + u * (terms * inexact).sum(-1)
    sums = np.where(several <= 1, u * (np.abs(logits) + reach + logit_error), gamma(several, u) * terms.sum(-1))
    logit_error = logit_error + np.where(several > 0, sums, 0.0)
    below = logits.max(-1, keepdims=True) - logits + 2 * reach.max(-1, keepdims=True)
    logit_error = up(logit_error + u * (below + 2 * logit_error.max(-1, keepdims=True)) + tiny, 32)

    # weights: largest on the cell, since d log w_k / dy = a_k - E a
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    spanned = np.maximum(slope.max(-1, keepdims=True) - slope, slope - slope.min(-1, keepdims=True))
    weight = up(weight * np.exp(radius[:, None, None] * spanned), 32 + 8 * int(np.abs(logits).max()))
    error, size = _read(spec, sides, weight, logit_error, u, tiny)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows or is unknown is no bound
        found = [_projected(spec, sides, out, error, size, u, tiny, off) for out in _different(spec)]
    return max(math.inf if math.isnan(x) else x for x in found)


def _read(
    spec: SelfSpec, sides: Sides, weight: Array, logit_error: Array, u: float, tiny: float
) -> tuple[Array, Array]:
    """Error and size of what every head reads, (cell, head, value channel)."""
    low, high = np.array([*[sides.value] * (spec.W_V.shape[1] - 1), sides.query]).T
    ends = np.stack([spec.W_V * low[:, None], spec.W_V * high[:, None]])
    top = np.maximum(np.abs(ends.min(0).sum(1) + spec.b_V), np.abs(ends.max(0).sum(1) + spec.b_V))
    parts = np.abs(ends).max(0)  # (head, channel, value)
    used = np.count_nonzero(spec.W_V, axis=1)
    fuzz = u * (parts * ~power_of_two(spec.W_V)).sum(1) + gamma(np.maximum(used - 1, 0), u) * parts.sum(1)
    fuzz = up((fuzz + ((used > 0) & (spec.b_V != 0)) * u * (top + fuzz)) * (1 + 8 * u), 8)
    top = up(top + fuzz, 8)
    memory = np.abs(spec.M_V)
    error, size = np.empty((*weight.shape[:2], top.shape[1])), np.empty((*weight.shape[:2], top.shape[1]))
    for j in range(top.shape[1]):
        first = top[:, j]
        slots = np.broadcast_to(np.concatenate([first[:, None], memory[:, :, j]], 1), weight.shape)
        mean = (weight[..., 1:] * memory[:, :, j]).sum(-1)
        # |V_0 - h| and |V_k - h|, from h = sum w V with weights that add up to 1
        far = weight[..., 1:].sum(-1) * first + mean
        near = weight[..., :1] * (first[:, None] + memory[:, :, j]) + mean[..., None] + memory[:, :, j]
        spread = up(np.concatenate([far[..., None], near], -1), weight.shape[-1] + 8)
        error[..., j] = softmax_rounding(weight, logit_error, slots, spread, u, tiny) + up(weight[..., 0] * fuzz[:, j])
        size[..., j] = up((weight * slots).sum(-1), weight.shape[-1] + 8) + error[..., j]
    return error, size


def _projected(
    spec: SelfSpec, sides: Sides, out: int, error: Array, size: Array, u: float, tiny: float, off: float
) -> float:
    """The error of one output: heads through W_O, then the layer's own additions: (heads + Z S) + s."""
    weight = np.abs(spec.W_O[:, :, out])
    heads = (error * weight).sum((-2, -1))
    terms = size * weight
    heads = heads + u * (terms * ~power_of_two(spec.W_O[:, :, out])).sum((-2, -1))
    count = int(np.count_nonzero(weight))
    x, y = (np.array(side) for side in (sides.value, sides.query))
    corners = np.multiply.outer(x, y)
    line = np.add.outer(spec.S[out, out] * x, spec.S[-1, out] * y)
    others = np.abs(np.delete(spec.S[:-1, out], out)).sum() * sides.sizes[0]
    plain = np.abs(corners - line - spec.s[out]).max() + others + off  # the sum of the heads; bilinear, so corners do
    joined = terms.sum((-2, -1))
    adding = np.where(count <= 2, u * (count > 1) * np.minimum(joined, plain + heads), gamma(count, u) * joined)
    largest = float(up((heads + adding).max(), 64 + 8 * count))

    column = spec.S[:, out]
    reach = np.abs(column) * np.array([*[sides.sizes[0]] * (len(column) - 1), sides.sizes[1]])
    used = int(np.count_nonzero(column))
    skip = u * (reach * ~power_of_two(column)).sum() + float(gamma(max(used - 1, 0), u)) * reach.sum()
    largest_out = np.abs(corners).max() + off + largest
    if used:
        skip += u * (np.abs(corners - spec.s[out]).max() + off + largest + skip)
    if spec.s[out] != 0:
        skip += u * (largest_out + skip)
    lost = tiny * 8 * (1 + weight.sum()) * (1 + size.shape[-1])
    return float(up(largest + skip * (1 + 8 * u) + lost, 64))


def _different(spec: SelfSpec) -> list[int]:
    """One output of each kind: those whose numbers are the same up to their place are bounded once."""
    kinds: dict[bytes, int] = {}
    for out in range(spec.W_O.shape[2]):
        order = [out, *(i for i in range(spec.W_O.shape[2]) if i != out)]
        rows = [*order, spec.S.shape[0] - 1]
        values = spec.W_V[:, rows][:, :, order], spec.b_V[:, order], spec.M_V[:, :, order]
        parts = spec.W_O[:, order, out], spec.S[rows, out], spec.s[out], *values
        kinds.setdefault(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), out)
    return list(kinds.values())


EXP, QUOTIENT, CORRECTED = 3.0, 4.0, 2.2  # u that a kernel's exponential, quotient, and quotient corrected once may err


def fused_error(
    nodes: int, gain: float, centre: tuple[float, float], sides: Sides, truncated: float, dtype: torch.dtype
) -> float:
    """A bound of |x y - what `fused` computes| in `dtype`: both heads of lemma C1 evaluated together, also by a kernel.

    `truncated` is the lemma's relative remainder on the box. The proof is under C1 in docs/theory/product.md, with
    these names.
    """
    a, b = centre
    u, enough = unit(dtype), 1.001
    size_x = max(abs(v - a) for v in sides.value)
    size_y = max(abs(v - b) for v in sides.query)
    s = gain * size_y
    ends = ((s if b else 0.0) + EXP) * u
    denominator = ends + (2 * s + CORRECTED + 3 + nodes // 2) * u
    difference = (ends + CORRECTED * u) * (s / -math.expm1(-2 * s) + 0.5)
    product = size_x / gain * (difference + s * (denominator + (QUOTIENT + (3 if a else 2)) * u))
    skip = abs(b) * max(map(abs, sides.value)) + abs(a) * max(map(abs, sides.query)) + abs(a * b)
    last = 5 * u * skip + u * (size_x * size_y if skip else 0.0)
    lost = 64 * TINY[dtype] * (1 + size_x / gain)  # underflow: a few operations
    return float(up((product + last) * enough + truncated * size_x * size_y + lost, 32))
