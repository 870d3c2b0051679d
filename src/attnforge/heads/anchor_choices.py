"""What may be asked of an anchor head: arguments checked, functions found, potentials chosen."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..certify.interpolation import AnchorWeights
from ..errors import ArgumentError
from ..ir.functions import Univariate, from_callable, get
from . import search
from .potential import NAMES, Potential
from .solve import Shape

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
TWO_KEYS = {
    "sigmoid": (0.5, 1.0, 0.0),
    "tanh": (1.0, 1.0, -1.0),
}  # slope of the first key (the second has minus it), values


def two_keys(function: Univariate, dtype: torch.dtype) -> tuple[AnchorWeights, Shape, np.ndarray] | None:
    """sigmoid and tanh are softmax over two keys: no interpolation at all."""
    if function.name not in TWO_KEYS:
        return None
    slope, first, second = TWO_KEYS[function.name]
    weights = AnchorWeights(np.array([slope, -slope]), np.zeros(2), np.array([first, second]))
    return weights, Shape(Potential("exact"), 2, 0, 1.0), np.array([1.0, -1.0])


def is_two_keys(function: Univariate, weights: AnchorWeights) -> bool:
    """Whether stored weights are still exactly those of `two_keys`: then the head equals the function (lemma B4)."""
    if function.name not in TWO_KEYS or len(weights.slope) != 2:
        return False
    slope, first, second = TWO_KEYS[function.name]
    stored = (*weights.slope, *weights.offset, *weights.value, weights.centre, *weights.skip)
    return stored == (slope, -slope, 0.0, 0.0, first, second, 0.0, 0.0, 0.0)


def function_of(fn: str | Univariate | Callable[[Tensor], Tensor], second_derivative: float | None) -> Univariate:
    if isinstance(fn, (str, Univariate)):
        return get(fn)
    if not callable(fn):
        raise ArgumentError(f"fn must be a function's name or a callable on tensors, got {type(fn).__name__}")
    return from_callable(fn, second_derivative=second_derivative)


def potentials_of(potential: str | Potential, function: Univariate, lo: float, hi: float) -> tuple[Potential, ...]:
    if isinstance(potential, Potential):
        return (potential,)
    everything = search.candidates(function, lo, hi)
    if potential == "auto":
        return everything
    if potential not in NAMES:
        raise ArgumentError(f"potential must be 'auto', a Potential or one of {', '.join(NAMES)}, got {potential!r}")
    chosen = tuple(p for p in everything if p.name == potential)
    if chosen or potential == "square":
        return chosen or (Potential("square"),)
    if potential == "log" and lo <= 0 < hi:
        raise ArgumentError(f"the log potential needs an interval on one side of 0, got [{lo:g}, {hi:g}]")
    return {
        "log": (Potential("log", sign=1 if lo > 0 else -1),),
        "atan": (Potential("atan", 0.0, 0.25 * (hi - lo)), Potential("atan", 0.0, 0.06 * (hi - lo))),
        "ends": (Potential("ends", 0.5 * (lo + hi), 0.5 * (hi - lo), floor=1e-5),),
    }[potential]


def checked(
    lo: float,
    hi: float,
    anchors: int | None,
    eps: float | None,
    dtype: torch.dtype,
    kappa: float | None,
    temperature: str,
    relative: bool,
) -> tuple[float, float]:
    """The interval as floats, or an error that names the argument, what it was and what it may be."""
    try:
        low, high = float(lo), float(hi)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"lo and hi must be numbers, got {lo!r} and {hi!r}") from error
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ArgumentError(f"lo and hi must be finite, got lo = {low} and hi = {high}")
    if low >= high:
        raise ArgumentError(f"lo must be smaller than hi, got lo = {low:g} and hi = {high:g}")
    if anchors is not None and eps is not None:
        raise ArgumentError("give anchors (how large) or eps (how accurate), not both")
    if anchors is not None and (isinstance(anchors, bool) or not isinstance(anchors, int) or anchors < 2):
        raise ArgumentError(f"anchors must be a whole number, at least 2, got {anchors!r}")
    if anchors is not None and anchors > 1 << 16:
        raise ArgumentError(f"anchors must be at most {1 << 16}, got {anchors}")
    for name, number in (("eps", eps), ("kappa", kappa)):
        if number is not None and not (isinstance(number, (int, float)) and math.isfinite(number) and number > 0):
            raise ArgumentError(f"{name} must be a positive number, got {number!r}")
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if temperature not in ("auto", "warm", "cold"):
        raise ArgumentError(f"temperature must be 'auto', 'warm' or 'cold', got {temperature!r}")
    if temperature == "cold" and kappa is not None and kappa < 1:
        raise ArgumentError(f"a cold head has kappa >= 1, got {kappa:g}; temperature='warm' allows less")
    if not isinstance(relative, bool):
        raise ArgumentError(f"relative must be True or False, got {relative!r}")
    return low, high
