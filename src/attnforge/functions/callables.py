"""A user's own function: evaluated as it is, certified through a declared bound on its second derivative.

Two things are taken on trust and cannot be checked: that |f''| <= second_derivative, and that f's float64 values are
within `VALUE_ULPS` units in the last place of the largest |value| of the cell. Everything else is computed outward.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from flint import arb
from torch import Tensor

from ..dtypes import Array
from ..errors import ArgumentError
from .directed import U, down, up
from .univariate import Taylor, Univariate, centre_and_radius

#: Assumed accuracy of a user's callable in float64, in ulps of the larger of the two values at the ends of a cell.
VALUE_ULPS = 4.0


def from_callable(
    f: Callable[[Tensor], Tensor] | Callable[[np.ndarray], np.ndarray],
    second_derivative: float | None = None,
    name: str | None = None,
) -> Univariate:
    """A univariate function from a callable that maps tensors (or numpy arrays) to their like, entry by entry.

    With `second_derivative`, a bound on |f''| over the interval of use, bounds can be certified; without it the
    function can only be measured (`certifiable` is False). A callable that needs numpy arrays is not differentiable.

    >>> bump = from_callable(lambda y: 1 / (1 + y * y), second_derivative=2.0, name="bump")
    >>> bump(torch.tensor([0.0, 1.0])), bump.certifiable
    (tensor([1.0000, 0.5000]), True)
    """
    if not callable(f):
        raise ArgumentError(f"expected a function of one tensor, got {type(f).__name__}")
    if not isinstance(second_derivative, (int, float, type(None))) or isinstance(second_derivative, bool):
        raise ArgumentError(f"second_derivative must be a number or None, got {second_derivative!r}")
    text: str = name or getattr(f, "__name__", "") or type(f).__name__

    def value(y: Tensor) -> Tensor:
        return _call(f, y, text)

    def ball(x: arb) -> arb:
        if second_derivative is None:
            return arb.nan()
        # The ends are widened to float64 numbers; the table of the one cell between them encloses the range.
        lo, hi = (math.nextafter(float(x.lower()), -math.inf), math.nextafter(float(x.upper()), math.inf))
        if not (math.isfinite(lo) and math.isfinite(hi)):
            return arb.nan()
        table = interpolant_table(fn, np.array([lo]), np.array([hi]), 1)
        return arb(float(table.low[0])).union(arb(float(table.high[0])))

    bound = None if second_derivative is None else float(second_derivative)
    fn = Univariate(text, value, None, ball, potentials=("square", "atan"), second_derivative=bound, source=f)
    return fn


def evaluate(fn: Univariate, y: Array) -> Array:
    """Float64 values of a user's callable, refusing values that are not finite."""
    out = fn.value(torch.tensor(y)).detach().cpu().double().numpy()
    if not np.isfinite(out).all():
        where = int(np.flatnonzero(~np.isfinite(out))[0])
        raise ArgumentError(f"{fn.name} must be finite on the interval, but {fn.name}({y[where]!r}) is {out[where]!r}")
    return out


def interpolant_table(fn: Univariate, lo: Array, hi: Array, order: int) -> Taylor:
    """The table of a user's callable: on each cell its chord, and in error[:, 0] how far it can be from the chord.

    Between lo and hi a function with |f''| <= M stays within M (hi - lo)^2 / 8 <= M radius^2 / 2 of its chord.
    """
    if fn.second_derivative is None:
        raise ArgumentError(
            f"no bound can be certified for {fn.name}: it is a callable without a bound on its second derivative; "
            f"declare one with from_callable(f, second_derivative=...)"
        )
    centre, radius = centre_and_radius(lo, hi)
    at_lo, at_hi = evaluate(fn, lo), evaluate(fn, hi)
    width = np.where(hi > lo, hi - lo, 1.0)
    middle, slope = 0.5 * at_lo + 0.5 * at_hi, (at_hi - at_lo) / width
    # The polynomial that is stored against the chord of the computed values: both are affine, so they differ most at
    # an end. The differences below are themselves rounded, by a few units of the terms in `size`.
    size = np.abs(middle) + np.abs(slope) * radius + np.abs(at_lo) + np.abs(at_hi)
    off_lo = np.abs(middle - slope * (centre - lo) - at_lo)
    off_hi = np.abs(middle + slope * (hi - centre) - at_hi)
    stored = up(np.maximum(off_lo, off_hi) + 8 * U * size)
    trusted = VALUE_ULPS * np.spacing(np.maximum(np.abs(at_lo), np.abs(at_hi)))
    curve = up(up(up(radius * radius) * fn.second_derivative) * 0.5)
    distance = up(up(up(stored + trusted) + curve))
    coefficient, error = np.zeros((len(lo), order + 1)), np.zeros((len(lo), order + 1))
    coefficient[:, 0], error[:, 0] = middle, distance
    if order:
        coefficient[:, 1] = slope
    else:
        error[:, 0] = up(error[:, 0] + up(np.abs(slope) * radius))
    low = down(np.minimum(at_lo, at_hi) - up(curve + trusted))
    high = up(np.maximum(at_lo, at_hi) + up(curve + trusted))
    return Taylor(centre, radius, coefficient, error, np.zeros(len(lo)), low, high)


def _call(f: Callable[..., object], y: Tensor, name: str) -> Tensor:
    try:
        out = f(y)
    except (TypeError, ValueError, RuntimeError, AttributeError) as first:
        try:
            out = f(y.detach().cpu().numpy())
        except (TypeError, ValueError, RuntimeError, AttributeError):
            raise ArgumentError(
                f"{name} must map a tensor (or a numpy array) to one of the same shape, entry by entry, but it raised "
                f"{type(first).__name__}: {first}; use torch or numpy functions inside it, such as torch.sin"
            ) from first
    if isinstance(out, np.ndarray):
        out = torch.from_numpy(np.ascontiguousarray(out))
    if not isinstance(out, Tensor) or out.shape != y.shape:
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ArgumentError(
            f"{name} must map shape {tuple(y.shape)} to the same shape, entry by entry, but gave {got}; "
            f"a constant is written as c + 0 * y"
        )
    if out.is_complex() or out.dtype == torch.bool:
        raise ArgumentError(f"{name} must return real numbers, but gave dtype {out.dtype}")
    return out.to(dtype=y.dtype, device=y.device)
