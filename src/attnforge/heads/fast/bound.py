"""How far `anchor_read` can be from the softmax head in exact arithmetic: the bound of lemma A8.

Everything is bounded on cells of y. With theta = rate (y - centre), w the exact softmax weights on a cell and H their
mean of V, three things happen to a computed value (docs/theory.md, A8, has the proof):

- *motion*: the rounded theta, and the error of the exponential, are the exact head somewhere else: |dH/dtheta| =
  |Cov_w(k, V)| times how far;
- *reading*: the polynomials are evaluated by Horner's rule from rounded coefficients. A coefficient of s^j takes part
  in 2j+1 roundings, and the error of the quotient N/Q is [error of N - H error of Q]/Q; the error of s itself is common
  to numerator and denominator and acts on the coefficients of N - H Q only;
- *leak*: what a window or a pair leaves out.

The sums here are of positive terms in float64 and are enlarged by `SLACK`, far more than their own rounding.

`activation_error` is how far the heads of a fast activation in exact arithmetic are from its function, and `differing`
says which stored tensors are not those that the evaluation has as numbers. Nothing here builds a weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...certificates.rounding import TINY, gamma, unit, up
from ...dtypes import Array, rounded, stored
from ...errors import CertificateError, PrecisionError
from ...functions.registry import parse
from ...functions.univariate import Univariate
from ...network import AttentionLayer
from ..anchor.bound import CELLS, AnchorWeights, anchor_bound
from ..choose import Fast
from .table import Table, dropped, form_of, lattice, masses, reach_for, working

SLACK = 1 + 1e-9  # on every bound computed here in float64 from positive terms
U = 2.0**-53  # roundoff of float64, in which the bounds are computed
STEP = 0.03  # width of a cell of the lattice form, in theta: a key of 30 then moves by e^0.9 on it
FAR = 40.0  # beyond the last anchor by so much of theta, a head has reached its last value to exp(-40)
CHUNK = 1 << 20  # numbers in one array of cells and keys: 8 MB
KINK = 0.27846454276107380  # W(1/e) = 0.278464542761073795..., rounded up: the error of a relu of slope 1 (lemma B1)
BEND = 0.45  # y sigmoid(a y) moves with a by y^2 sigmoid'(a y) = (t^2 sigmoid'(t)) / a^2 <= 0.44 / a^2
# in units of roundoff: GPU compilers divide in float32 to 2 units in the last place (PTX div.full), others round once
QUOTIENT = {torch.float32: 4.0, torch.float64: 1.0}
EXP = 3.0  # all of float32's numbers in [-87, 0], on an NVIDIA H200: 2.56
DIVISIONS = "fast reading allows exponentials within 3 u, and divisions within 4 u in float32"


@dataclass(frozen=True)
class ReadError:
    """The bound on each cell [low, high] of y, split into what a window leaves out and rounding."""

    low: Array
    high: Array
    leak: float
    rounding: Array

    @property
    def bound(self) -> float:
        """The largest error anywhere on the interval."""
        return (self.leak + float(self.rounding.max())) * (1 + 4 * U)

    @property
    def where(self) -> float:
        """The middle of the worst cell."""
        worst = int(np.argmax(self.rounding))
        return float(0.5 * (self.low[worst] + self.high[worst]))


@dataclass(frozen=True)
class _Cells:
    """Cells of y that contain neither `centre` nor 0 inside, and theta on them."""

    low: Array
    high: Array
    theta: Array  # at the middle
    radius: Array  # of theta, widened by how far theta moves
    motion: Array  # how far theta can move by rounding, the exponential included
    size: Array  # largest |theta|


def read_error(
    value: Array,
    rate: float,
    kappa: float,
    lo: float,
    hi: float,
    dtype: torch.dtype,
    centre: float = 0.0,
    gate: float = 0.0,
    logit_error: float = 0.0,
) -> ReadError:
    """A bound of |anchor_read(y, value, rate, kappa, centre, gate) - exact head| for every y of `dtype` in [lo, hi].

    `value` are the stored values as float64; the rounding model is that of `certificates.rounding`. `logit_error` is
    how far the logits rate k (y - centre) - kappa k^2 may be from those of the head that is meant, up to a common one.

    >>> read_error(np.linspace(-1, 1, 17), 1.0, 0.25, -9, 9, torch.float32).bound < 2e-5
    True
    """
    work = working(dtype)
    u = unit(work)
    form = form_of(len(value), kappa, dtype)
    cells = _cells(len(value), rate, kappa, lo, hi, centre, gate, form, work)
    parts = []
    step = max(1, CHUNK // (max(len(value), 1) if form == "lattice" else 8 * reach_for(kappa, dtype) + 32))
    for i in range(0, len(cells.low), step):
        some = _Cells(*(getattr(cells, name)[i : i + step] for name in _Cells.__dataclass_fields__))
        head, size = FORMS[form](some, value, kappa, dtype, logit_error) if len(value) else (0 * some.low,) * 2
        beside = size  # how far the result is from the nearest number that `dtype` has for certain: 0, or y itself
        if gate:
            head, size, beside = _gated(head, size, some, gate, u, TINY[work])
        if dtype != work:  # the result is rounded once more, to the nearest
            head = head + np.minimum(unit(dtype) * (size + head) + TINY[dtype], beside + head)
        parts.append(head)
    rounding = np.concatenate(parts) * SLACK
    if not np.isfinite(rounding).all():
        raise PrecisionError(
            f"{len(value)} anchors at kappa = {kappa:g} cannot be read with one exponential in {work}: their weights "
            "span more than its range; use fewer anchors or a smaller kappa",
            reachable=None,
        )
    if len(value) == 0:
        return ReadError(cells.low, cells.high, 0.0, rounding)
    off = float(np.max(cells.motion)) / (2 * kappa) + 4 * u  # of a position, in anchors
    spread = float(np.max(value) - np.min(value)) * (1 + 4 * U)
    leak = {"lattice": 0.0, "window": dropped(kappa, reach_for(kappa, dtype), off), "pair": _beside(kappa, off)}[form]
    return ReadError(cells.low, cells.high, leak * spread * SLACK, rounding)


def _beside(kappa: float, off: float) -> float:
    """What all but the two nearest anchors weigh: i further out, at most exp(-kappa (i^2 - 2 i off)), on both sides."""
    return sum(2.0 * float(np.exp(-kappa * (i * i - 2 * i * off))) for i in range(1, 9)) * (1 + 1e-9) + 1e-300


def _cells(
    anchors: int, rate: float, kappa: float, lo: float, hi: float, centre: float, gate: float, form: str,
    work: torch.dtype,
) -> _Cells:  # fmt: skip
    u = unit(work)
    last = kappa * max(anchors - 1, 0)  # theta at the last anchor
    width = STEP if form == "lattice" else kappa / 2
    live = np.arange(-(last + FAR), last + FAR + width, width)
    far = np.geomspace(last + FAR, max(last + FAR, rate * max(abs(lo - centre), abs(hi - centre))) * 1.01, 65)
    edges = np.concatenate([live, far, -far]) / rate + centre
    turn = np.concatenate([np.arange(0.0, 20.0, 0.05), np.geomspace(20.0, 800.0, 100)]) / gate if gate else np.zeros(1)
    edges = np.concatenate([[lo, hi, centre], turn, -turn, edges])
    edges = np.unique(edges[(edges >= lo) & (edges <= hi)])
    low, high = edges[:-1], edges[1:]
    theta = rate * (0.5 * (low + high) - centre)
    size = rate * np.maximum(np.abs(low - centre), np.abs(high - centre)) * (1 + 8 * U)
    off_rate, off_centre = (abs(_stored(x, work) - x) for x in (rate, centre))
    # theta: subtraction and product; window and pair also round the spacing, the product with 2 kappa and a difference
    roundings = (1 if centre == 0.0 else 2) + (0 if form == "lattice" else 5)
    motion = size * (gamma(roundings, u) + off_rate / rate * 1.01) + rate * off_centre * 1.01 + 1.01 * EXP * u
    motion = motion + (0.0 if form == "lattice" else 6 * kappa * u)  # between half keys |r| may exceed the position
    radius = 0.5 * rate * (high - low) * (1 + 8 * U) + motion + 16 * U * size
    return _Cells(low, high, theta, radius, motion, size)


def _stored(x: float, work: torch.dtype) -> float:
    return float(torch.tensor(x, dtype=torch.float64).to(work))


def _around(cells: _Cells, k: Array, value: Array, kappa: float) -> tuple[Array, Array, Array, Array]:
    """Upper bounds on a cell: weights (cell, key), |H|, |dH/dtheta| and how far H moves from its value in the middle.

    `k` and `value` are (cell or 1, key). Weights grow by at most exp(|k - m| t) when theta moves by t, m the mean of k
    in the middle (Jensen).
    """
    place = cells.theta[:, None] / (2 * kappa)
    nearest = np.take_along_axis(np.broadcast_to(k, (len(place), k.shape[-1])), _closest(k, place), -1)
    beside = k - nearest
    logit = -kappa * beside * (beside + 2 * (nearest - place))  # relative to the nearest key: nothing cancels
    weight = np.exp(logit)
    total = weight.sum(-1, keepdims=True)
    weight /= total
    mean = np.sum(weight * k, -1, keepdims=True)
    middle = np.sum(weight * value, -1)
    away = np.abs(k - mean)
    lifted = np.exp(np.minimum(logit - np.log(total) + away * cells.radius[:, None], 0.0)) * (1 + 1e-10)
    variance = np.sum(lifted * away * away, -1, keepdims=True)
    turn = np.sum(lifted * (away + cells.radius[:, None] * variance) * np.abs(value - middle[:, None]), -1) * SLACK
    return lifted, middle, turn, cells.radius * turn


def _closest(k: Array, place: Array) -> npt.NDArray[np.intp]:
    """The column of the key nearest to each place; keys grow by 1 from column to column."""
    return np.clip(np.rint(place - k[:, :1]), 0, k.shape[-1] - 1).astype(np.intp)


def _lattice(cells: _Cells, value: Array, kappa: float, dtype: torch.dtype, logit_error: float) -> tuple[Array, Array]:
    work = working(dtype)
    u, tiny = unit(work), TINY[work]
    anchors, rows = len(value), (len(value) + 1) // 2
    k = np.arange(anchors, dtype=np.float64) - (anchors - 1) / 2
    lifted, middle, turn, moved = _around(cells, k[None], value[None], kappa)
    size = np.abs(middle) + moved

    even, odd = lattice(anchors)
    mass = masses(anchors, kappa, dtype)
    right, left = value[anchors // 2 :], value[::-1][anchors // 2 :]
    half_sum, half_difference = 0.5 * (right + left), 0.5 * (right - left)
    q_j, p_j, r_j = mass @ even, (half_sum * mass) @ even, (half_difference * mass) @ odd
    own = (anchors + 8) * U  # of each coefficient, relative to the same sum without signs
    unsigned = 0.5 * (np.abs(right) + np.abs(left)) * mass
    q_own, p_own, r_own = own * (mass @ np.abs(even)), own * (unsigned @ np.abs(even)), own * (unsigned @ np.abs(odd))

    near, far = np.maximum(np.abs(cells.theta) - cells.radius, 0.0), np.abs(cells.theta) + cells.radius
    decay = np.exp(-near)
    s_high = decay / (1 + decay * decay) * (1 + 8 * U) + tiny
    power = s_high[:, None] ** np.arange(rows) * (1 + (rows + 4) * U)
    lowest = _least_total(near, far, k, mass, kappa, rows - 1, anchors) / SLACK

    tilt = np.tanh(np.abs(cells.theta) * (1.0 if anchors % 2 else 0.5)) * np.sign(cells.theta)
    centred = np.abs(p_j + tilt[:, None] * r_j - middle[:, None] * q_j) + cells.radius[:, None] * np.abs(r_j)
    centred = centred + moved[:, None] * np.abs(q_j)
    centred = centred + 16 * U * (np.abs(p_j) + np.abs(r_j) + np.abs(middle)[:, None] * np.abs(q_j))
    centred = centred + p_own + r_own + size[:, None] * q_own
    j = np.arange(rows, dtype=np.float64)
    divided = QUOTIENT[work]
    bend = np.expm1(np.maximum(j, 1) * 3.7 * u) * (j > 0)  # s: 1.5 u below, 2.1 u a quotient corrected once
    # coefficients rounded once more, Horner, and for P + t R the product and the sum, even where R = 0: a kernel does
    # not look whether it is; t is right to 4 u and the quotient's
    steps_n, steps_q = gamma(2 * j + 5.0, u), gamma(2 * j + 3.0, u)
    above = steps_n * np.abs(p_j) + 1.01 * p_own
    above = above + (steps_n + (4.2 + divided) * u) * np.abs(r_j) + 1.01 * r_own
    below = steps_q * np.abs(q_j) + 1.01 * q_own
    slope = power[:, :-1] * j[1:]  # s and its correction may underflow: off by a few `tiny`
    slopes = 8 * tiny * np.sum(slope * (np.abs(p_j) + np.abs(r_j) + size[:, None] * np.abs(q_j))[:, 1:], -1)
    error_n = np.sum(power * (centred * bend + above), -1) + 24 * tiny + slopes  # products with a gate's 1 + q too
    error_q = np.sum(power * below, -1) + 16 * tiny
    off_q = np.sum(power * np.abs(q_j) * bend, -1) + error_q
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        least = np.where(off_q < 0.5 * lowest, lowest - off_q, np.nan)
        quotient = (error_n + size * error_q) / least
        reading = quotient + divided * u * (size + quotient) + tiny
        # exp(-kappa k^2) was itself rounded: logits off by at most this
        off = (kappa * k * k + kappa * k[-1] ** 2 + 4) * 4 * U + logit_error
        spread = np.abs(value[None] - middle[:, None]) + moved[:, None]
        weights = np.exp(off.max()) * np.sum(lifted * np.expm1(off) * spread, -1)
    largest = float(max(np.abs(q_j).sum(), np.abs(p_j).sum() + np.abs(r_j).sum()))
    fits = largest < float(torch.finfo(work).max) / 4
    total = cells.motion * turn + reading + weights
    return np.where(np.isfinite(total) & fits, total, np.inf), size


def _least_total(near: Array, far: Array, k: Array, mass: Array, kappa: float, degree: int, anchors: int) -> Array:
    """A lower bound of Q on cells of |theta|: d log Q / d|theta| = E k - degree tanh, and E k grows with |theta|."""
    shift = float(np.log(mass[0])) + (0.0 if anchors % 2 else 0.25 * kappa)
    logit = np.multiply.outer(near, k) - kappa * k * k + shift
    top = logit.max(-1, keepdims=True)
    weight = np.exp(logit - top)
    total = weight.sum(-1)
    mean = (weight @ k) / total
    decay = np.exp(-near)
    log_s = -near - np.log1p(decay * decay)
    log_q = top[:, 0] + np.log(total) + degree * log_s
    if anchors % 2 == 0:  # everything was divided by 2 cosh(theta/2)
        log_q = log_q - (0.5 * near + np.log1p(decay))
        mean = mean - 0.5
    fall = np.minimum(mean - degree * np.tanh(far), 0.0)
    found: Array = np.exp(log_q + fall * (far - near)) * (1 - 1e-10)
    return found


def _window(cells: _Cells, value: Array, kappa: float, dtype: torch.dtype, logit_error: float) -> tuple[Array, Array]:
    work = working(dtype)
    u, tiny, reach, anchors = unit(work), TINY[work], reach_for(kappa, dtype), len(value)
    last = (anchors - 1) / 2
    nearest = np.clip(np.rint(cells.theta / (2 * kappa) + last), 0, anchors - 1).astype(int)
    # a window around the middle's nearest anchor that holds the window of every point of the cell
    span = min(anchors, 2 * (2 * reach + 2) + 1)
    first = np.clip(nearest - span // 2, 0, anchors - span)
    index = first[:, None] + np.arange(span)
    seen = value[index]
    lifted, middle, turn, moved = _around(cells, index - last, seen, kappa)
    size = np.abs(middle) + moved
    lost = 1 + 4 * dropped(kappa, reach, 1e-3)
    steps = gamma(2 * (reach + 1 + np.abs(index - nearest[:, None])) + 3.0, u)
    own = 1.0 + (4 + kappa * reach * reach) * 4 * U / u  # the tables were computed in float64
    reading = np.sum(lifted * steps * own * (np.abs(seen) + size[:, None]), -1) * lost
    reading = reading / (1 - float(gamma(4 * reach + 8, u))) + QUOTIENT[work] * u * (size + reading) * 1.01
    spread = np.sum(lifted * (np.abs(seen - middle[:, None]) + moved[:, None]), -1)
    reading = reading + np.exp(logit_error) * np.expm1(logit_error) * spread * lost
    least = np.exp(-kappa * (reach + 1) ** 2)  # of the denominator: c_J at the least
    return cells.motion * turn * lost + reading + (8 * reach + 16) * tiny * (1 + size) / least, size


def _pair(cells: _Cells, value: Array, kappa: float, dtype: torch.dtype, logit_error: float) -> tuple[Array, Array]:
    work = working(dtype)
    u, last = unit(work), (len(value) - 1) / 2
    place = cells.theta / (2 * kappa) + last
    reach = cells.radius / (2 * kappa) + 1e-9
    below = np.clip(np.floor(place - reach), 0, len(value) - 2).astype(int)
    above = np.clip(np.floor(place + reach), 0, len(value) - 2).astype(int)
    rise = np.maximum(np.abs(value[below + 1] - value[below]), np.abs(value[above + 1] - value[above]))
    size = np.maximum(np.maximum(np.abs(value[below]), np.abs(value[below + 1])),
                      np.maximum(np.abs(value[above]), np.abs(value[above + 1])))  # fmt: skip
    # a sigmoid turns by at most 1/4; its own value is right to its exponential's and a quotient's, the difference to
    # 1 u, product and sum 2 u more
    own = (EXP + 3.2 + QUOTIENT[work]) * u
    total = (cells.motion + 2 * logit_error) * 0.26 * rise + own * rise + 2.1 * u * size + 4 * TINY[work]
    return np.where(above - below <= 1, total, np.inf), size


FORMS = {"lattice": _lattice, "window": _window, "pair": _pair}


def _gated(head: Array, size: Array, cells: _Cells, gate: float, u: float, tiny: float) -> tuple[Array, Array, Array]:
    """The error of relu(y) + (head - |y| share), its size, and its distance from relu(y).

    share = q/(1+q) is right to (x + 4) u relatively, and its quotient's, x = gate |y|; one product and two sums
    follow. Over one denominator, (N (1+q) - |y| q Q) / (Q (1+q)), both terms meet two roundings more and one quotient.
    The last sum errs by at most its smaller term, and not at all where relu(y) = 0.
    """
    near, far = np.minimum(np.abs(cells.low), np.abs(cells.high)), np.maximum(np.abs(cells.low), np.abs(cells.high))
    work = torch.float32 if u > 1e-10 else torch.float64
    off, own = abs(_stored(gate, work) / gate - 1), EXP + 4.4 + QUOTIENT[work]
    bump = far / (1 + np.exp(np.minimum(gate * near, 700.0)))
    share = bump * (gate * far * (1.01 * u + 1.01 * off) + own * u) + (1 + far) * tiny
    head = head + 2.1 * u * (size + head)
    inner_error = head + share + u * (size + bump + head + share) + tiny
    inner = size + bump + inner_error
    right = cells.high > 0
    last = np.where(right, np.minimum(inner, u * (far + inner) * 1.01), 0.0)
    return inner_error + last, np.where(right, far, 0.0) + size + bump, size + bump


def activation_error(function: Univariate, form: Fast, table: Table, lo: float, hi: float) -> float:
    """A bound of |gate + table of the stored values - function| on [lo, hi], in exact arithmetic."""
    if not form.bump:
        return _mismatch(function.name, form, table)
    keys = table.keys()
    weights = AnchorWeights(keys[:, 0], keys[:, 1], np.array(table.value), table.centre)
    last = table.kappa * (table.anchors - 1) / table.rate
    ends = table.centre - last - 2, table.centre + last + 2  # a little beyond the last anchors the bump is flat
    places = np.concatenate([np.linspace(lo, hi, 65), np.linspace(*ends, CELLS)])
    edges = np.unique(np.concatenate([[lo, hi], places[(places > lo) & (places < hi)]]))
    return anchor_bound(weights, bump_of(function, table.gate), edges, torch.float64).bound


def bump_of(function: Univariate, gate: float) -> Univariate:
    """What the anchors stand for: the function less the gate."""
    return parse(f"expr: {function.name}(y) - y*sigmoid({gate!r}*y)")


def _mismatch(name: str, form: Fast, table: Table) -> float:
    """The error of a function that the heads are, but for stored numbers and the kink of a relu."""
    if form.table is not None:
        if (table.anchors, table.rate, table.centre, table.gate) != (2, form.rate, 0.0, 0.0):
            raise CertificateError(f"{name} is a table of two keys {form.rate:g} apart, and this is {table}")
        off = float(np.abs(np.array(table.value) - form.table).max())
        return float(up(off, 2)) if off else 0.0
    (slope,) = form.slopes
    if table.anchors or not table.gate > 0:
        raise CertificateError(f"{name} is a gate alone, and this is {table}")
    if math.isinf(slope):
        return float(up(KINK / table.gate, 4))  # lemma B1
    off = abs(table.gate - slope)
    return float(up(BEND * off / min(table.gate, slope) ** 2, 8)) if off else 0.0


def differing(layer: AttentionLayer, table: Table) -> list[str]:
    """The stored tensors that are not the numbers of the table as their dtype holds them; the values are free."""
    wanted: dict[str, Array] = {}
    one, zero = np.ones((1, 1, 1)), np.zeros((1, 1, 1))
    if table.gate:
        gate = {"W_Q": one, "b_K": np.array([[table.gate]]), "W_V": one, "M_K": zero, "M_V": zero, "W_O": one}
        wanted |= {f"groups.0.{name}": array for name, array in gate.items()}
    values = ""
    if table.anchors:
        place = f"groups.{1 if table.gate else 0}"
        query, shift = np.array([[[1.0, 0.0]]]), np.array([[-table.centre, 1.0]])
        anchors = {"W_Q": query, "b_Q": shift, "M_K": table.keys()[None], "W_O": one}
        wanted |= {f"{place}.{name}": array for name, array in anchors.items()}
        values = f"{place}.M_V"
    held = {name: tensor for name, tensor in layer.state_dict().items() if name != values}
    return sorted(name for name in {*wanted, *held} if not _same(held.get(name), wanted.get(name)))


def _same(tensor: Tensor | None, wanted: Array | None) -> bool:
    return tensor is not None and wanted is not None and np.array_equal(stored(tensor), rounded(wanted, tensor.dtype))
