"""The rounding model, and how a softmax head's output moves under it (lemma A5 of docs/theory.md).

The model, which every certificate states:

- additions, subtractions, multiplications and divisions are IEEE, rounded to nearest (fused multiply-add or not);
- sums and inner products are added up in any order;
- the exponential is within `EXP_ULPS` units of roundoff, relatively; normalising by the sum costs two more operations;
- no TF32, no autocast, no reduced-precision matrix products: `refuse_reduced_precision` raises on them;
- no result that matters is subnormal: what underflows is counted as an absolute error of `tiny`.
"""

from __future__ import annotations

import numpy as np
import torch

from ..errors import PrecisionError

Array = np.ndarray
EXP_ULPS = 2.0  # exp(x) computed = exp(x) (1 + d), |d| <= EXP_ULPS * u
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14}
ASSUMPTIONS = (
    "IEEE operations rounded to nearest, fused or not",
    "sums in any order",
    f"exponential within {EXP_ULPS:g} u",
    "no TF32, autocast or reduced-precision matrix products",
)


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff u of a dtype: 2^-24 in float32, 2^-53 in float64."""
    return UNIT[dtype]


def gamma(terms: float | Array, u: float) -> Array:
    """The factor k u / (1 - k u), rounded up: the relative error of k roundings in a row (inf when k u >= 1/2)."""
    k = np.asarray(terms, dtype=np.float64) * u
    return np.where(k < 0.5, up(k / (1.0 - np.minimum(k, 0.5))), np.inf)


def up(x: Array | float, steps: int = 4) -> Array:
    """x moved up by `steps` float64 units in the last place: an upper bound after that many rounded operations.

    >>> float(up(1.0)) > 1.0
    True
    """
    x = np.asarray(x, dtype=np.float64)
    return x + np.abs(x) * (steps * 2.0**-52) + 5e-324 * steps


def refuse_reduced_precision(x: torch.Tensor) -> None:
    """Raise `PrecisionError` when a global switch would make matrix products coarser than the dtype says."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        raise PrecisionError(
            f"autocast is on for {kind}: products would be rounded to {torch.get_autocast_dtype(kind)} "
            "and the certificate would not hold; leave the autocast block, or put torch.autocast(..., enabled=False) "
            "around this call"
        )
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        raise PrecisionError(
            f"torch.set_float32_matmul_precision is '{torch.get_float32_matmul_precision()}': float32 products "
            "may be rounded to TF32 or bfloat16 and the certificate would not hold; set it to 'highest'"
        )


def softmax_rounding(weight: Array, logit_error: Array, value: Array, spread: Array, u: float, tiny: float) -> Array:
    """How far the computed output of a softmax head can be from its exact one (lemma A5), one number per row.

    All arguments are upper bounds over whatever a row stands for, shape (row, slot): the exact `weight` of a slot, the
    error of its logit before the exponential, the size |V| of its value and its distance |V - h| from the head's
    output.

    Perturbing logits by at most d moves the output by at most exp(E d) E[expm1(d) |V - h|]; adding up, normalising and
    reading the values costs `terms` relative roundings of E|V|. A slot whose share is below u / slots is not worth a
    rounding of its own: adding it errs by at most its own size, and all of those together by at most u.
    """
    d = up(logit_error + EXP_ULPS * u)
    shift = up(np.sum(weight * d, -1), weight.shape[-1] + 2)
    moved = up(np.exp(shift) * np.sum(np.maximum(weight, 5e-324) * np.expm1(d) * spread, -1), 4 * weight.shape[-1] + 16)
    size = up(np.sum(weight * value, -1), weight.shape[-1] + 2)
    slots = weight.shape[-1]
    heavy_sum = np.sum(weight > u / slots, -1)
    heavy_dot = np.sum(weight * value > u * size[..., None] / slots, -1)
    terms = (
        heavy_sum + heavy_dot + 4.0
    )  # sums: heavy - 1 each, light slots 1 each; reciprocal, scaling, product: 3; spare: 1
    return up(moved + gamma(terms, u) * up(size + moved, 4) + 2 * slots * tiny * (1 + np.max(value, -1)), 8)
