"""The rounding model, and how a softmax head's output moves under it (lemma A5 of docs/theory.md).

The model, which every certificate states:

- additions, subtractions, multiplications and divisions are IEEE, rounded to nearest (fused multiply-add or not);
- sums and inner products are added up in any order;
- the exponential is within `exp_ulps()` units of roundoff, relatively; normalising by the sum costs two operations;
- no TF32, no autocast, no reduced-precision matrix products: `refuse_reduced_precision` raises on them;
- no result that matters is subnormal: what underflows is counted as an absolute error of `tiny`. Numbers that are
  read are read as they are: `refuse_flushed_numbers` raises where subnormal ones are taken for zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch

from ..dtypes import Array
from ..errors import CertificateError, PrecisionError

#: exp(x) computed = exp(x) (1 + d), |d| <= EXP_ULPS * u: an H200 was measured at 2.56 u; on processors the
#: tests ask for `LEAST_ULPS`.
EXP_ULPS = 3.0
#: What files of version 0.1 allow, which was enough for processors; no file may state less.
LEAST_ULPS = 2.0
#: The unit roundoff 2^-p of a dtype with p bits.
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: The smallest normal number of a dtype.
TINY = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14}
#: The smallest number above 0: not above it for a processor that reads subnormal numbers as zeros.
LEAST = 5e-324
_ALLOWED = ContextVar("exponential", default=EXP_ULPS)
_STATED = re.compile(r"exponential within ([0-9]{1,3}(?:\.[0-9]{1,6})?) u")


def exp_ulps() -> float:
    """The allowance of the exponential, in units of roundoff, that bounds are computed for at present."""
    return _ALLOWED.get()


@contextmanager
def exponential_within(ulps: float) -> Iterator[None]:
    """Compute bounds for another allowance of the exponential: the one that a file states."""
    token = _ALLOWED.set(ulps)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def assumptions(heads: bool = True) -> tuple[str, ...]:
    """The rounding model in words, as certificates state it; without `heads` there is no exponential.

    >>> stated_ulps(assumptions()) == exp_ulps()
    True
    """
    return (
        "IEEE operations rounded to nearest, fused or not",
        "sums in any order",
        *((f"exponential within {exp_ulps():g} u",) if heads else ()),
        "no TF32, autocast or reduced-precision matrix products",
    )


def stated_ulps(stated: Iterable[str]) -> float:
    """The allowance of the exponential that assumptions state; the present one where they are silent."""
    found = [float(match[1]) for text in stated if (match := _STATED.fullmatch(text))]
    if found and min(found) < LEAST_ULPS:
        raise CertificateError(
            f"an exponential within {min(found):g} u is assumed, which machines do not keep; expected at least "
            f"{LEAST_ULPS:g} u"
        )
    return min(found, default=exp_ulps())


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff u of a dtype: 2^-24 in float32, 2^-53 in float64."""
    return UNIT[dtype]


def gamma(terms: float | Array, u: float) -> Array:
    """The factor k u / (1 - k u), rounded up: the relative error of k roundings in a row (inf when k u >= 1/2)."""
    k = np.asarray(terms, dtype=np.float64) * u
    return np.where(k < 0.5, up(k / (1.0 - np.minimum(k, 0.5))), np.inf)


def up(x: Array | float, steps: float = 4) -> Array:
    """x moved up by `steps` float64 units in the last place: an upper bound after that many rounded operations.

    >>> float(up(1.0)) > 1.0
    True
    """
    x = np.asarray(x, dtype=np.float64)
    return x + np.abs(x) * (steps * 2.0**-52) + 5e-324 * steps


def exp_up(x: float) -> float:
    """At least e^t for every t that x is within three roundings of: they and the exponential's own are paid for.

    A relative error u of x is u |x| of its exponential, which at |x| = 600 is hundreds of units in the last place.

    >>> 1 < exp_up(-30.0) / math.exp(-30.0) < 1 + 1e-13
    True
    """
    return float(up(math.exp(x), 4 + 2 * abs(x)))


def floor2(x: Array) -> Array:
    """The largest power of two that is not above x >= 0, for numbers that are not subnormal: a number that rounds to
    nearest errs by at most u of that.

    >>> floor2(np.array([1.0, 1.9, 2.0, 0.3, np.inf])).tolist()
    [1.0, 1.0, 2.0, 0.25, inf]
    """
    bits = np.maximum(x, 2.0**-1022).view(np.int64) & np.int64(0x7FF0000000000000)  # the exponent alone
    return bits.view(np.float64)


FINE = 2**19  # numbers that are looked at one by one, some 50 ms; sums of more are charged with u of themselves


def signed_sums(weight: Array, bias: Array, low: Array, high: Array, u: float) -> Array:
    """What rounding adds to x @ weight + bias, computed in any order from computed x in [low, high] (lemma R8).

    Every addition errs by u of a partial sum, cut to a power of two; one of k terms is at most that of all positive
    terms or of all negative ones, and at most sqrt(k) times the root of the sum of their squares. Of two terms there
    is one partial sum, the result.
    """
    positive, negative = np.maximum(weight, 0.0), np.maximum(-weight, 0.0)
    above, below = np.maximum(high, 0.0), np.maximum(-low, 0.0)
    sums, squares = [], []
    for a, b, c in ((above, below, np.maximum(bias, 0.0)), (below, above, np.maximum(-bias, 0.0))):
        sums.append(a @ positive + b @ negative + c)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large to be squared is not used
            squares.append(a**2 @ positive**2 + b**2 @ negative**2 + c**2)
    most, numbers = np.maximum(*sums), np.abs(np.append(weight.ravel(), bias))
    usual = np.all((numbers == 0) | ((numbers > 2.0**-400) & (numbers < 2.0**200)))  # what else is squared may be lost
    # and so of what is read, but not beyond 2^-250; a root of squares is at most the sum
    root = np.fmin(np.sqrt(np.maximum(*squares)) + 2.0**-250, most) if usual else most
    count = (weight != 0).sum(0) + (bias != 0)
    most = np.where(count == 2, np.minimum(most, _largest_sum(weight, bias, low, high)), most)
    mantissa, _ = np.frexp(np.abs(weight))
    size = np.maximum(above, below)
    rounded = np.where(mantissa == 0.5, 0.0, np.abs(weight))  # products with powers of two are exact
    whole = size @ np.abs(weight) + np.abs(bias)
    # of what is computed: partial sums err themselves, and what is compared with a power of two was rounded here
    drift, wider = gamma(count, u) * whole, 1 + (len(weight) + 32) * 2.0**-50
    if most.size * max(len(weight), 1) <= FINE:
        found = (floor2(size[..., None] * rounded * wider) * (rounded > 0)).sum(-2)
        for k in range(2, int(count.max(initial=1)) + 1):
            partial = (np.fmin(most, root * np.sqrt(float(k))) + drift) * wider
            found = found + np.where(k <= count, floor2(partial), 0.0)
        return up(u * found, 2 * len(weight) + 32)
    # partial sums of 2, ..., cut terms by their squares, the others by all terms: right for every cut
    share = np.nan_to_num(most / np.where(root > 0, root, 1.0), nan=1.0)
    cut = np.clip(np.clip(share, 1, 2.0**20) ** 2, 1, np.maximum(count, 1)).astype(int)
    roots = np.concatenate([[0.0, 0.0], np.cumsum(np.sqrt(np.arange(2.0, count.max(initial=1) + 1)))])
    partial = root * roots[cut] + np.maximum(count - cut, 0) * most
    return up(u * (size @ rounded + partial + np.maximum(count - 1, 0) * drift), 2 * len(weight) + 32)


def _largest_sum(weight: Array, bias: Array, low: Array, high: Array) -> Array:
    """The largest |x @ weight + bias| for x in [low, high], rounded up."""
    plus, minus = np.maximum(weight, 0.0), np.minimum(weight, 0.0)
    least, most = low @ plus + high @ minus + bias, high @ plus + low @ minus + bias
    size = np.maximum(np.abs(low), np.abs(high)) @ np.abs(weight) + np.abs(bias)
    return up(np.maximum(np.abs(least), np.abs(most)) + (2 * len(weight) + 4) * 2.0**-53 * size)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b = sum + error, exactly."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b = product + error, exactly (Dekker); no overflow for the sizes that logits have."""
    product = a * b
    a_high, b_high = _upper(a), _upper(b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _upper(x: Array) -> Array:
    scaled = x * (2.0**27 + 1)  # leaves the upper 26 of 53 bits
    return scaled - (scaled - x)


def refuse_reduced_precision(x: torch.Tensor) -> None:
    """Raise `PrecisionError` when a global switch would make matrix products coarser than the dtype says."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        raise PrecisionError(
            f"autocast is on for {kind}: products would be rounded to {torch.get_autocast_dtype(kind)} "
            "and the certificate would not hold; leave the autocast block, or put torch.autocast(..., enabled=False) "
            "around this call"
        )
    if x.dtype == torch.float32 and (precision := matmul_precision()) != "highest":
        raise PrecisionError(
            f"torch.set_float32_matmul_precision is '{precision}': float32 products "
            "may be rounded to TF32 or bfloat16 and the certificate would not hold; set it to 'highest'"
        )
    if kind == "cpu":
        refuse_flushed_numbers()


def matmul_precision() -> str:
    """How float32 products are computed, "highest" where all backends keep float32; PyTorch has no word for backends
    that were set apart (`torch.backends.mkldnn.matmul.fp32_precision`), and raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "set for some backends by fp32_precision"


def refuse_flushed_numbers() -> None:
    """Raise `PrecisionError` where this thread takes subnormal numbers for zeros: an input of 1e-40 may be multiplied
    by 1e30, and what computes bounds adds such numbers up."""
    if not LEAST > 0.0:
        raise PrecisionError(
            "this thread reads subnormal numbers as zeros (torch.set_flush_denormal(True), or a library compiled with "
            "-ffast-math), and certificates would not hold; call torch.set_flush_denormal(False)"
        )


def largest_mean(weight: Array, size: Array) -> Array:
    """The largest sum of w * size over slots, for any w that add up to at most 1 and are at most `weight`; rounded up.

    >>> largest_mean(np.array([[0.25, 1.0, 1.0]]), np.array([[8.0, 2.0, 4.0]])).round(6).tolist()
    [5.0]
    """
    weight = np.fmin(weight, 1.0)  # a weight that is not known is at most 1
    slots = weight.shape[-1]
    found = np.sum(weight * size, -1)
    crowded = np.sum(weight, -1) > 1.0
    if crowded.any():
        order = np.argsort(-size[crowded], -1)
        most, left = (np.take_along_axis(x[crowded], order, -1) for x in (weight, size))
        share = np.clip(1.0 - (np.cumsum(most, -1) - most), 0.0, most)
        found[crowded] = np.sum(share * left, -1) + slots * 2.0**-50 * left[:, 0]
    return up(found, slots + 2)


def softmax_rounding(
    weight: Array,
    logit_error: Array,
    value: Array,
    spread: Array,
    u: float,
    tiny: float,
    log_weight: Array | None = None,
) -> Array:
    """How far the computed output of a softmax head can be from its exact one (lemma A5), one number per row.

    All arguments are upper bounds over whatever a row stands for, shape (row, slot): the exact `weight` of a slot, the
    error of its logit before the exponential, the size |V| of its value and its distance |V - h| from the head's
    output.

    Perturbing logits by at most d moves the output by at most exp(E d) E[expm1(d) |V - h|]; and since the computed
    weights are at most w exp(d + E d) and add up to 1, by no more than the largest mean of |V - h| that they allow:
    useful where a dtype cannot tell neighbouring anchors apart. Adding up, normalising and reading costs `terms`
    relative roundings of the computed E|V|. A slot whose share is below u / slots is not worth a rounding of its own:
    adding it errs by at most its own size, and all of those together by at most u. `log_weight`, an upper bound of the
    logarithm of `weight`, tells how small weights are that underflow: without it, one whose logit errs much is 1.
    """
    d = up(logit_error + exp_ulps() * u)
    slots = weight.shape[-1]
    positive = np.maximum(weight, 5e-324)  # what underflows to 0 is no 0
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows, and 0 times that, counts as 1
        shift = np.fmin(up(np.sum(positive * d, -1), slots + 2), np.max(d, -1))
        computed = np.fmin(1.0, up(positive * np.exp(up(d + shift[..., None])), 16))
        lifted = positive * np.expm1(d)
        if log_weight is not None and np.max(d) > 1.0:  # else no product overflows, and both say the same
            computed = np.fmin(computed, up(np.exp(up(log_weight + d + shift[..., None], 8)), 16))
            lifted = np.fmin(lifted, up(np.exp(up(log_weight + d, 8)), 16))
        small = np.exp(shift) * np.sum(lifted * spread, -1)
        moved = up(np.fmin(small, largest_mean(computed, spread)), 4 * slots + 16)
    size = np.fmin(up(np.sum(computed * value, -1), slots + 2), np.max(value, -1))
    heavy_sum = np.sum(computed > u / slots, -1)
    heavy_dot = np.sum(computed * value > u * size[..., None] / slots, -1)
    # sums: heavy - 1 and light slots 1 each; reciprocal, scaling, product: 3; spare: 1
    terms = heavy_sum + heavy_dot + 4.0
    return up(moved + gamma(terms, u) * size + 2 * slots * tiny * (1 + np.max(value, -1)), 8)
