"""Heads for sites: which family, how large, with which certified bound. Tables of equal ranges are made once."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass

import torch

from ..arguments import is_number, is_whole
from ..certificates.certified import CertifiedModule
from ..certificates.rounding import UNIT
from ..errors import ArgumentError
from ..functions.registry import Univariate, enclose
from ..heads import ProductHead
from ..heads.build import head_for
from ..heads.choose import fast_form
from .norm import NativeNorm

MOST_HEADS = 64  # of a norm: what its fit is worked out for
ANCHORS = 32  # of a cold head, unless the user says how many: where the paper's heads reach a few percent
NARROWEST = 1e-3  # a range that is narrower than this share of its size is widened to it: a constant input has a range
SMALLEST = 1e-6  # and one around 0 to this
BITS = 16  # ends of ranges are multiples of 1/16 of a power of two: four bits
SHARE = 32.0  # of the model's roundoff that a head may add to outputs of size 1
LINE = 16.0  # the least half width of a whole line: activations are straight beyond


@dataclass(frozen=True)
class Options:
    """What the user asked of all sites."""

    eps: float
    dtype: torch.dtype
    anchors: int | None = None
    cold: bool = False
    fast: bool = True
    around: torch.dtype = torch.float32  # of the model: half precision cannot tell a short table from a long one

    @property
    def fine(self) -> float | None:
        """The error below which a head's is lost in the rounding of the model around it; None where there is none."""
        return UNIT[self.around] / SHARE if self.around != self.dtype else None

    def everywhere(self, function: Univariate) -> bool:
        """Whether heads for this function will be right on the whole line."""
        return self.fast and not self.cold and self.anchors is None and fast_form(function) is not None


def widened(low: float, high: float, margin: float) -> tuple[float, float]:
    """The seen range times `margin`, about its middle and about 0, ends moved out to a coarse grid.

    >>> widened(-3.0, 2.8, 2.0)
    (-6.0, 6.0)
    """
    middle, half = 0.5 * (low + high), 0.5 * margin * max(high - low, NARROWEST * max(abs(low), abs(high)), SMALLEST)
    left, right = middle - half, middle + half
    left, right = (min(left, margin * low), max(right, margin * high)) if low < 0 < high else (left, right)
    return -_coarse(-left), _coarse(right)


def whole_line(low: float, high: float) -> tuple[float, float]:
    """A symmetric interval around [low, high], a power of four, for heads that are right everywhere anyway.

    >>> whole_line(-34.0, 50.0)
    (-64.0, 64.0)
    """
    size = 4.0 ** math.ceil(math.log(max(abs(low), abs(high), LINE), 4.0) - 1e-9)
    return -size, size


def widened_ratio(low: float, high: float, margin: float) -> tuple[float, float]:
    """[low / margin, high * margin], ends moved out to powers of two."""
    return 2.0 ** math.floor(math.log2(low / margin)), 2.0 ** math.ceil(math.log2(high * margin))


def _coarse(x: float) -> float:
    """The next number above x with four bits: many layers then share a table."""
    if x == 0:
        return 0.0
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.ceil(mantissa * BITS) / BITS, exponent)


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
        kind = "cold" if options.cold else "auto"
        return head_for(function, low, high, dtype=options.dtype, anchors=options.anchors or ANCHORS, temperature=kind)
    if options.everywhere(function):  # as good as it gets, or as the model around can tell: the report says how good
        wanted = None if options.fine is None else min(eps, options.fine)
        return head_for(function, low, high, wanted, options.dtype, fast=True)
    return head_for(function, low, high, eps, options.dtype)


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
    heads = None if options.anchors is None else min(options.anchors, MOST_HEADS)
    head = NativeNorm.fit(channels, (low, high), eps_norm, heads=heads, **arguments)  # type: ignore[arg-type]
    assert isinstance(head, NativeNorm)
    return head


def product_head(first: tuple[float, float], second: tuple[float, float], options: Options) -> ProductHead:
    """A product head on the box of two factors."""
    return copy.deepcopy(_product_head(first, second, options))


@functools.lru_cache(maxsize=256)
def _product_head(first: tuple[float, float], second: tuple[float, float], options: Options) -> ProductHead:
    largest = max(map(abs, first)) * max(map(abs, second))
    return ProductHead.fit(first, second, None if options.fine is None else options.fine * largest, dtype=options.dtype)


def checked(eps: object, margin: object, variance_margin: object, anchors: object) -> None:
    """Raise `ArgumentError` for numbers that mean nothing."""
    for name, value, least in (("eps", eps, 0.0), ("margin", margin, 1.0), ("variance_margin", variance_margin, 1.0)):
        if not is_number(value) or value < least or (name == "eps" and value == 0):  # type: ignore[operator]
            bound = "greater than 0" if name == "eps" else f"at least {least:g}"
            raise ArgumentError(f"{name} must be a finite number, {bound}, got {value!r}")
    if anchors is not None and not is_whole(anchors, 2):
        raise ArgumentError(f"anchors must be a whole number, at least 2, got {anchors!r}")
