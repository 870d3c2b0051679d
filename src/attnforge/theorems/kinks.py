"""Kinks in one head of memory slots (lemma A10): a warm table for every piece of a piecewise linear function, and sharp
logits that say which piece.

Logits add, so one softmax over pairs (piece, anchor) is the product of a softmax over pieces and one over anchors. The
anchors of a piece make its line to exponential accuracy, in the number of guards, and the slopes of the pieces make a
kink of width 1/sharpness. `error_floor` is the other side: how large the span of the slopes has to be. In several
variables `affine_maximum` makes a maximum of affine functions, one head for each variable.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from ..arguments import interval, positive, whole
from ..certificates.certificate import upper_text
from ..certificates.rounding import TINY, UNIT, exp_ulps, exp_up, gamma, up
from ..dtypes import Array, dtype_name, shipped
from ..errors import ArgumentError, PrecisionError
from ..functions.registry import get
from ..functions.univariate import Univariate
from ..heads.anchor.bound import AnchorWeights
from ..heads.anchor.fit import HeadShape
from ..heads.anchor.head import AnchorHead
from ..heads.anchor.potential import Potential
from ..heads.choose import straight
from ..heads.fast.table import dropped
from ..heads.gate.bound import KINK
from ..heads.token.bound import lambert_upper
from ..network import AttentionLayer, Heads

MOST_GUARDS = 64  # lines are then right to 1e-80: far beyond float64
LINES = 0.02  # the share of eps that lines may take: guards are cheap
SHARES = (0.9, 0.7, 0.45)  # of eps for the kinks, tried in turn: rounding takes the rest
FAINTEST = 690.0  # of errors that are spoken of, e^-690 of the values: float64 ends at e^-745
FLOOR = (math.pi / 4) ** 2 / (1 + math.e) * math.pi / 2 * (1 - 1e-12)  # the constant of A10(c), rounded down: 0.2605


def identity_error(guards: int, kappa: float) -> float:
    """A10(a): what a table with so many guards beyond either end is off from the identity, in spacings, at most."""
    rho = exp_up(-(math.pi**2) / kappa)
    lost = dropped(kappa, guards)
    if not (kappa <= 3 and lost < 0.5):
        return math.inf
    reach = range(guards + 1, guards + 200)
    tail = 2 * math.fsum((i + 1) * exp_up(-kappa * i * (i - 1)) for i in reach) + 1e-300
    return float(up(2 * math.pi / kappa * rho * (1 + 1.1 * rho) + tail / (1 - lost), 64))


def warmest(guards: int) -> tuple[float, float]:
    """The inverse temperature at which such a table is best, about, and its error: aliases and lost anchors meet."""
    tried = [k * math.pi / (guards + 0.5) for k in np.linspace(0.7, 1.5, 81)]
    kappa = min(tried, key=lambda k: identity_error(guards, k))
    return kappa, identity_error(guards, kappa)


def error_floor(bend: float, span: float, values: float, radius: float, size: float) -> float:
    """A10(c): no head of memory slots errs by less at a kink whose slope changes by `bend`.

    `span` is the largest slope of a logit minus the smallest, `values` bounds |V|; around the kink the function
    consists of two lines for at least `radius`, and the lines are at most `size` there.

    >>> error_floor(2.0, span=1e6, values=10.0, radius=1.0, size=1.0) > 5e-10
    True
    """
    reach = min(positive("radius", radius), math.pi / (2 * positive("span", span)))
    most = math.sqrt(2) * values + size
    scale = FLOOR * 2 / math.pi * positive("bend", bend) * reach
    low, high = FAINTEST, 2.0  # logarithms of most/eps: up to most/e^2, eps ln(most/eps)^2 grows with eps
    if not math.exp(-low) * most * low**2 <= scale:
        return 0.0  # what could be said is beyond float64
    for _ in range(100):  # every eps below the one at which it is `scale` contradicts the lemma
        middle = 0.5 * (low + high)
        low, high = (middle, high) if math.exp(-middle) * most * middle**2 <= scale else (low, middle)
    return most * math.exp(-low) * (1 - 1e-12)


@dataclass(frozen=True)
class PiecewiseLinear:
    """A piecewise linear function on an interval: kinks inside, and the line of each piece as (slope, value at 0)."""

    lo: float
    hi: float
    kinks: tuple[float, ...]
    lines: tuple[tuple[float, float], ...]

    @property
    def bend(self) -> float:
        """The largest change of slope."""
        return max(abs(b[0] - a[0]) for a, b in itertools.pairwise(self.lines))

    @property
    def steepest(self) -> float:
        return max(abs(slope) for slope, _ in self.lines)

    def bound(self, sharpness: float, guards: int, kappa: float) -> float:
        """A10(b) in real arithmetic."""
        width = self.hi - self.lo
        rate = sharpness * (1 - 8 * 2.0**-53) - kappa * (2 * guards + 1) / width  # rounded down where they cancel
        if not rate > 0:
            return math.inf
        if len(self.kinks) == 1:
            kink = KINK * self.bend / (2 * rate)
        else:
            gap = min(b - a for a, b in itertools.pairwise(self.kinks))
            kink = self.bend / (math.e * rate * -math.expm1(-2 * rate * gap))
        return float(up(self.steepest * width * identity_error(guards, kappa) + kink, 64))


def pieces_of(function: Univariate, lo: float, hi: float) -> PiecewiseLinear:
    """The lines of a piecewise linear function, or an error that says it is none."""
    line = straight(function)
    inside = [k for k in function.knots if lo < k < hi]
    if line is None or not inside:
        raise ArgumentError(
            f"{function.name} on [{lo:g}, {hi:g}] is not piecewise linear with a kink inside: use AnchorHead.fit"
        )
    xs, ys = np.array(line.xs), np.array(line.ys)
    slopes = np.diff(ys) / np.diff(xs)
    ends = [lo, *inside, hi]
    lines = []
    for left, right in itertools.pairwise(ends):
        i = int(np.clip(np.searchsorted(xs, 0.5 * (left + right)) - 1, 0, len(slopes) - 1))
        lines.append((float(slopes[i]), float(ys[i] - slopes[i] * xs[i])))
    return PiecewiseLinear(lo, hi, tuple(inside), tuple(lines))


def _table(pieces: PiecewiseLinear, sharpness: float, guards: int, kappa: float, dtype: torch.dtype) -> AnchorWeights:
    """The stored numbers: slopes are whole multiples of what the largest one resolves, so that none is rounded."""
    width, m = pieces.hi - pieces.lo, len(pieces.kinks)
    centre = float(torch.tensor(0.5 * (pieces.lo + pieces.hi)).to(dtype))
    grain = 2.0 ** math.ceil(math.log2(2 * sharpness * m + 2 * kappa * guards / width)) * 2 * UNIT[dtype]
    rate = max(1, round(2 * kappa / width / grain)) * grain  # slope of one step of the lattice
    kappa = rate * width / 2
    k = np.arange(-guards, guards + 2) - 0.5
    places, base = centre + k * width, -kappa * k * k
    slope, offset, value = [], [], []
    for i, (steep, level) in enumerate(pieces.lines):
        turn = 2 * sharpness * i - sharpness * m
        start = -2 * sharpness * sum(x - centre for x in pieces.kinks[:i])
        if steep == 0 and i in (0, m):  # one slot: the tangent of the table's logarithmic sum at the kink
            q = pieces.kinks[0 if i == 0 else -1] - centre
            logits = rate * k * q + base
            weight = np.exp(logits - logits.max())
            total, mean = logits.max() + math.log(weight.sum()), rate * float(weight @ k) / weight.sum()
            mean = round(mean / grain) * grain
            slope.append(np.array([turn + mean]))
            offset.append(np.array([start + total - mean * q]))
            value.append(np.array([level]))
        else:
            slope.append(rate * k + turn)
            offset.append(base + start)
            value.append(steep * places + level)
    parts = (torch.from_numpy(np.concatenate(part)).to(dtype).double().numpy() for part in (slope, offset, value))
    a, b, V = parts
    return AnchorWeights(a, b, V, centre)


def splice(
    fn: str | Univariate,
    lo: float,
    hi: float,
    *,
    eps: float | None = None,
    sharpness: float | None = None,
    guards: int | None = None,
    dtype: torch.dtype = torch.float64,
    strict: bool = False,
) -> AnchorHead:
    """A piecewise linear function with kinks as one head of memory slots, certified (lemma A10).

    Give `eps`, or the `sharpness` of the kinks and the number of `guards` of the tables.

    >>> head = splice("abs", -1, 1, eps=1e-6)
    >>> head.size, head.bound <= 1e-6
    (32, True)
    """
    lo, hi = interval(lo, hi)
    dtype = shipped(dtype)
    function = fn if isinstance(fn, Univariate) else get(fn)
    pieces = pieces_of(function, lo, hi)
    if eps is None:
        if sharpness is None:
            raise ArgumentError("give eps, or sharpness and, if you like, guards")
        count = whole("guards", 8 if guards is None else guards, 1, MOST_GUARDS)
        return _built(function, pieces, positive("sharpness", sharpness), count, dtype, strict)
    eps = positive("eps", eps)
    if sharpness is not None or guards is not None:
        raise ArgumentError("give eps, or sharpness and guards, not both")
    width, count = hi - lo, 1
    while pieces.steepest * width * warmest(count)[1] > LINES * eps and count < MOST_GUARDS:
        count += 1
    heads = []
    for share in SHARES:
        rate = KINK * pieces.bend / (2 * share * eps) + warmest(count)[0] * (2 * count + 1) / width
        heads.append(_built(function, pieces, rate, count, dtype, strict))
        if (bound := heads[-1].bound) is not None and bound <= eps:
            return heads[-1]
    best = min(head.bound or math.inf for head in heads)
    wider = "" if dtype == torch.float64 else ", use dtype=torch.float64"
    raise PrecisionError(
        f"eps = {eps:g} cannot be reached for {function.name} on [{lo:g}, {hi:g}] in {dtype_name(dtype)}: sharp kinks "
        f"have large logits, whose rounding costs about the square root of a roundoff; the smallest bound found is "
        f"{upper_text(best)}: ask for that{wider}, or take a GateHead",
        reachable=best,
    )


def _built(
    function: Univariate, pieces: PiecewiseLinear, sharpness: float, guards: int, dtype: torch.dtype, strict: bool
) -> AnchorHead:
    kappa, _ = warmest(guards)
    weights = _table(pieces, sharpness, guards, kappa, dtype)
    potential = Potential("atan", shift=pieces.kinks[0], scale=1 / sharpness)
    anchors: Array = weights.value
    shape = HeadShape(potential, len(weights.slope), 0, kappa)
    head = AnchorHead(function, pieces.lo, pieces.hi, weights, shape, anchors, dtype, strict=strict)
    head.attach(head.recertify())
    return head


@dataclass(frozen=True, eq=False)
class AffineMaximum:
    """max_j (slopes_j . x + constants_j) on a box as one attention layer: (..., D) to (..., 1).

    `exact` bounds the error in real arithmetic (A10(d)), `bound` that of the layer as it was built and is computed.
    """

    layer: AttentionLayer
    slots: int
    exact: float
    bound: float


def affine_maximum(
    slopes: Array, constants: Array, low: Array, high: Array, *, eps: float, dtype: torch.dtype = torch.float64
) -> AffineMaximum:
    """A maximum of N affine functions of D variables by D heads of N (2 guards + 2) memory slots (lemma A10(d)).

    >>> plane = affine_maximum(np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]), np.zeros(3), -np.ones(2), np.ones(2),
    ...                        eps=1e-5)
    >>> plane.slots, plane.bound <= 1e-5, round(plane.layer(torch.tensor([0.5, -0.25], dtype=torch.float64)).item(), 5)
    (84, True, 0.5)
    """
    kind, eps = shipped(dtype), positive("eps", eps)
    given = [np.asarray(array, dtype=np.float64) for array in (slopes, constants, low, high)]
    steep, level, low, high = given
    count, dim = steep.shape if steep.ndim == 2 else (0, 0)
    if not (count and dim) or [a.shape for a in given[1:]] != [(count,), (dim,), (dim,)]:
        shapes = ", ".join(str(tuple(a.shape)) for a in given)
        raise ArgumentError(f"expected shapes (N, D), (N,), (D,), (D,) with N, D >= 1, got {shapes}")
    if not (all(np.isfinite(a).all() for a in given) and (low < high).all()):
        raise ArgumentError("slopes, constants and the box must be finite, every side from low to a larger high")
    steepest, guards = float((np.abs(steep) @ (high - low)).max()), 1
    while steepest * warmest(guards)[1] > LINES * eps and guards < MOST_GUARDS:
        guards += 1
    heads = []
    for share in SHARES:
        sharpness = max(lambert_upper(count), KINK) / (share * eps)
        heads.append(_maximum(steep, level, low, high, sharpness, guards, kind))
        if heads[-1].bound <= eps:
            return heads[-1]
    best = min(head.bound for head in heads)
    raise PrecisionError(
        f"eps = {eps:g} cannot be reached for this maximum in {dtype_name(kind)}: sharp kinks have large logits, whose "
        f"rounding costs about the square root of a roundoff; the smallest bound found is {upper_text(best)}",
        reachable=best,
    )


def _maximum(
    steep: Array, level: Array, low: Array, high: Array, sharpness: float, guards: int, kind: torch.dtype
) -> AffineMaximum:
    """Head i has a slot for each pair (function, anchor on side i): its logit is the sum of both, its value what side i
    adds to the function there."""
    (count, dim), width, middle = steep.shape, high - low, 0.5 * (low + high)
    kappa, off = warmest(guards)
    k = np.arange(-guards, guards + 2) - 0.5
    keys, values = np.empty((dim, count, len(k), dim + 1)), np.empty((dim, count, len(k), 1))
    keys[..., :dim], keys[..., dim] = sharpness * steep[:, None], (sharpness * level)[:, None] - kappa * k * k
    for i in range(dim):
        keys[i, ..., i] += 2 * kappa * k / width[i]
        keys[i, ..., dim] -= 2 * kappa * k * middle[i] / width[i]
        values[i, ..., 0] = steep[:, i, None] * (middle[i] + k * width[i]) + (level[:, None] if i == 0 else 0.0)
    table, value = keys.reshape(dim, -1, dim + 1), values.reshape(dim, -1, 1)
    tables = {
        "W_Q": np.tile(np.eye(dim, dim + 1), (dim, 1, 1)), "b_Q": np.tile(np.eye(dim + 1)[dim], (dim, 1)),
        "M_K": table, "M_V": value, "W_O": np.ones((dim, 1, 1)),
    }  # fmt: skip
    made = {name: torch.from_numpy(array).to(kind) for name, array in tables.items()}
    layer = AttentionLayer([Heads("memory", purpose="affine maximum", **made)])  # type: ignore[arg-type]
    lines = float((np.abs(steep) @ width).max()) * off
    exact = float(up(lambert_upper(count) / sharpness + lines, dim + 16))
    bound = exact + _rounding(table, value[..., 0], np.maximum(np.abs(low), np.abs(high)), kind)
    return AffineMaximum(layer, table.shape[0] * table.shape[1], exact, float(up(bound, 16)))


def _rounding(keys: Array, values: Array, size: Array, dtype: torch.dtype) -> float:
    """What storing and computing heads that are added up may cost, for |x| <= size (A5, R2, R5, R6)."""
    u, (dim, slots) = UNIT[dtype], values.shape
    logit = float((np.abs(keys) @ np.append(size, 1.0)).max()) * (1 + (dim + 8) * 2.0**-52)
    lost = TINY[dtype]  # of every number that is stored or formed, should it underflow
    moved = (float(gamma(dim + 8, u)) + 2 * u) * logit + (exp_ulps() + 0.1) * u + lost * (float(size.sum()) + dim + 4)
    most, spread = np.abs(values).max(1), np.ptp(values, 1)
    share = min(1.0, 0.5 * math.expm1(min(2 * moved, 1.0)) if moved < 0.5 else 1.0)
    rounded = float((share * spread + float(gamma(2 * slots + dim + 12, u)) * most).sum())
    return (rounded + dim * (4 * slots + 8) * lost) * 1.001
