"""Heads for sites: which family, how large, with which certified bound. Tables of equal ranges are made once."""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..certificates.certified import CertifiedModule
from ..errors import ArgumentError
from ..functions.registry import Univariate, enclose
from ..heads import AnchorHead, GateHead, ProductHead
from ..heads.fast.activation import EXACT as FAST_EXACT
from ..heads.fast.activation import GATES, FastActivation
from .norm import NativeNorm

MOST_ANCHORS = 64
FAST = (*FAST_EXACT, *GATES)  # one exponential per element (lemma A8), right on the whole line
EXACT = ("silu", "sigmoid", "tanh")  # two slots, no table (lemma B4)
KINKS: dict[str, tuple[str, dict[str, Any]]] = {  # functions made of straight lines: gates build their kinks (B1 to B3)
    "relu": ("relu", {}),
    "abs": ("abs", {}),
    "leaky_relu": ("leaky_relu", {}),
    "hardtanh": ("hard_tanh", {}),
    "relu6": ("ramp", {"a": 0.0, "b": 6.0}),
    "hardsigmoid": ("piecewise_linear", {"xs": [-4.0, -3.0, 3.0, 4.0], "ys": [0.0, 0.0, 1.0, 1.0]}),
}


@dataclass(frozen=True)
class Options:
    """What the user asked of all sites."""

    eps: float
    dtype: torch.dtype
    anchors: int | None = None
    cold: bool = False
    fast: bool = True

    def everywhere(self, function: Univariate) -> bool:
        """Whether heads for this function will be right on the whole line."""
        return self.fast and not self.cold and self.anchors is None and function.name in FAST


def widened(low: float, high: float, margin: float) -> tuple[float, float]:
    """The seen range times `margin`, about its middle and about 0, ends moved out to a coarse grid.

    >>> widened(-3.0, 2.8, 2.0)
    (-6.0, 6.0)
    """
    middle, half = 0.5 * (low + high), 0.5 * margin * max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-6)
    left, right = middle - half, middle + half
    left, right = (min(left, margin * low), max(right, margin * high)) if low < 0 < high else (left, right)
    return -_coarse(-left), _coarse(right)


def whole_line(low: float, high: float) -> tuple[float, float]:
    """A symmetric interval around [low, high], a power of four, for heads that are right everywhere anyway.

    >>> whole_line(-34.0, 50.0)
    (-64.0, 64.0)
    """
    size = 4.0 ** math.ceil(math.log(max(abs(low), abs(high), 16.0), 4.0) - 1e-9)
    return -size, size


def widened_ratio(low: float, high: float, margin: float) -> tuple[float, float]:
    """[low / margin, high * margin], ends moved out to powers of two."""
    return 2.0 ** math.floor(math.log2(low / margin)), 2.0 ** math.ceil(math.log2(high * margin))


def _coarse(x: float) -> float:
    """The next number above x with four bits: many layers then share a table."""
    if x == 0:
        return 0.0
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.ceil(mantissa * 16) / 16, exponent)


def scale_of(function: Univariate, low: float, high: float) -> float:
    """The largest |function| on a range: the size of a site's output."""
    ends = enclose(function, max(low, function.domain.lo), min(high, function.domain.hi))
    return max(abs(ends[0]), abs(ends[1])) or 1.0


def activation_head(function: Univariate, low: float, high: float, eps: float, options: Options) -> CertifiedModule:
    """A head for `function` on [low, high], as accurate as it is fast or to `eps`; a copy, with a table of its own."""
    return copy.deepcopy(_activation_head(function, low, high, eps, options))


@functools.lru_cache(maxsize=256)
def _activation_head(function: Univariate, low: float, high: float, eps: float, options: Options) -> CertifiedModule:
    if options.anchors is not None or options.cold:
        count, kind = options.anchors or 32, "cold" if options.cold else "auto"
        return AnchorHead.fit(function, low, high, anchors=count, temperature=kind, dtype=options.dtype)  # type: ignore[arg-type]
    name = function.name
    if options.everywhere(function):
        return FastActivation.fit(name, low, high, anchors=MOST_ANCHORS, dtype=options.dtype)
    if name in EXACT:
        return GateHead.fit(name, low, high, dtype=options.dtype)
    gate = straight(name)
    if gate is not None:
        return GateHead.fit(gate[0], low, high, eps, dtype=options.dtype, **gate[1])
    return AnchorHead.fit(function, low, high, eps=eps, dtype=options.dtype)


def straight(name: str) -> tuple[str, dict[str, Any]] | None:
    """The gate for a function made of straight lines, with its parameters; None for a curve.

    >>> straight("leaky_relu(0.2)"), straight("gelu")
    (('leaky_relu', {'slope': 0.2}), None)
    """
    word, _, rest = name.partition("(")
    if not rest:
        return KINKS.get(name)
    arguments = json.loads(f"[{rest.removesuffix(')')}]")
    if word == "leaky_relu":
        return "leaky_relu", {"slope": arguments[0]}
    return ("piecewise_linear", {"xs": arguments[0], "ys": arguments[1]}) if word == "piecewise_linear" else None


def norm_head(
    channels: int, low: float, high: float, eps_norm: float, kind: str, offset: float, options: Options
) -> NativeNorm:
    """A norm head for variances in [low, high], as accurate as rounding deserves."""
    return copy.deepcopy(_norm_head(channels, low, high, eps_norm, kind, offset, options))


@functools.lru_cache(maxsize=256)
def _norm_head(
    channels: int, low: float, high: float, eps_norm: float, kind: str, offset: float, options: Options
) -> NativeNorm:
    arguments = dict(kind=kind, offset=offset, dtype=options.dtype)
    heads = None if options.anchors is None else min(options.anchors, MOST_ANCHORS)
    head = NativeNorm.fit(channels, (low, high), eps_norm, heads=heads, **arguments)  # type: ignore[arg-type]
    assert isinstance(head, NativeNorm)
    return head


def product_head(first: tuple[float, float], second: tuple[float, float], options: Options) -> ProductHead:
    """A product head on the box of two factors."""
    return copy.deepcopy(_product_head(first, second, options.dtype))


@functools.lru_cache(maxsize=256)
def _product_head(first: tuple[float, float], second: tuple[float, float], dtype: torch.dtype) -> ProductHead:
    return ProductHead.fit(first, second, dtype=dtype)


def checked(eps: object, margin: object, variance_margin: object, anchors: object) -> None:
    """Raise `ArgumentError` for numbers that mean nothing."""
    for name, value, least in (("eps", eps, 0.0), ("margin", margin, 1.0), ("variance_margin", variance_margin, 1.0)):
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < least or (name == "eps" and value == 0):  # type: ignore[operator]
            bound = "greater than 0" if name == "eps" else f"at least {least:g}"
            raise ArgumentError(f"{name} must be a finite number, {bound}, got {value!r}")
    if anchors is not None and (isinstance(anchors, bool) or not isinstance(anchors, int) or anchors < 2):
        raise ArgumentError(f"anchors must be a whole number, at least 2, got {anchors!r}")
