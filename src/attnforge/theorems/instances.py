"""Truncated linear functions by one head: the ramp of the theorem, and relu, leaky relu, hard tanh, clipped relu."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from .ramp import PaperRamp, Ramp, ScalarTarget
from .result import Construction, ends, form_of, leak, number, tensor, whole
from .token_ramp import TokenRamp
from .variants import GateRamp, WarmRamp

ChannelMap = int | Sequence[int] | Callable[[int], int] | None
VARIANTS = ("cold", "warm", "gate")
MARGIN = 0.05  # where G changes, this share of a spacing on each side of the middle is excluded
PAPER_IS_NOT_CAUSAL = (
    "the paper's form has no causal variant: token i would see only the anchors in columns up to i; "
    "use form='tokens', where the anchors come first"
)
FARTHEST = 16.0  # |x| is at most this unless a radius is given, or more where the ramp's ends are farther away


def ramp(
    w: Any,
    t: Any,
    a: float,
    b: float,
    anchors: int = 32,
    eps0: float = 1e-9,
    *,
    form: str = "paper",
    G: ChannelMap = None,
    channels: int | None = None,
    radius: float | None = None,
    variant: str = "cold",
    kappa: float | None = None,
    margin: float = MARGIN,
    causal: bool = False,
) -> Construction:
    """clip(w.x + t, a, b) for every token, by one head with `anchors` keys (v1 theorem 3.1, v2 theorem 3.4).

    >>> import torch
    >>> m = ramp([1.0, -2.0], 0.5, a=-1, b=1, anchors=33)
    >>> X = torch.tensor([[[0.1, 0.4], [2.0, 0.0]]], dtype=torch.float64)
    >>> (m(X) - m.target(X)).abs().max().item() <= m.bound <= m.paper_bound
    True

    `w` is one vector (d,) or one per token (n, d), `t` a number or one per token (n,); dtype follows w. `G` maps an
    anchor's number to an output channel. `radius` bounds |x| (for the rounding of w.x). `variant` "warm" is the same
    head at the temperature where kink and interior err alike, "gate" replaces the anchors by two constants and the
    token itself (B2); both are token-wise. `causal` makes the anchors tokens that come first (token-wise forms).
    """
    weight, shift = _query(w, t)
    low, high = ends(a, b)
    count, small = whole("anchors", anchors, 3, " (p > 2)"), leak(eps0)
    if variant not in VARIANTS:
        raise ArgumentError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    shape, reach = ScalarTarget(low, high), _radius(radius, weight, shift, low, high)
    if variant != "cold":
        _token_wise(weight, shift, f"variant='{variant}'")
        if G is not None:
            raise ArgumentError(f"variant='{variant}' writes one channel: leave G out")
        if causal and variant == "gate":
            raise ArgumentError(
                "a gate has no anchors that could come first, and is causal as it is: a token sees itself and two "
                "constants; leave causal out (as a stock causal transformer: attnforge.export.to_plain)"
            )
        width = 1 if channels is None else whole("channels", channels, 1)
        if variant == "gate":
            return GateRamp(weight, shift, shape, count, reach, width, kappa)
        return WarmRamp(weight, shift, shape, count, reach, width, kappa, causal)
    return _cold(weight, shift, shape, count, small, form, G, channels, reach, kappa, margin, causal)


def relu(w: Any, t: Any, radius: float, anchors: int = 32, eps0: float = 1e-9, **options: Any) -> Construction:
    """max(w.x + t, 0) for |x| <= radius: the ramp with a = 0 and b the largest that w.x + t can be.

    >>> relu([1.0, -2.0], 0.0, radius=1.0, anchors=31).bound < 0.051
    True
    """
    weight, shift, most = _most(w, t, radius)
    return ramp(weight, shift, 0.0, most, anchors, eps0, radius=radius, **options)


def leaky_relu(
    w: Any, t: Any, radius: float, anchors: int = 32, eps0: float = 1e-9, slope: float = 0.01, **options: Any
) -> Construction:
    """max(y, 0) + slope min(y, 0), y = w.x + t, for |x| <= radius: anchors on both sides, bent values.

    >>> leaky_relu([1.0, -2.0], 0.0, radius=1.0, anchors=31).bound < 0.11
    True
    """
    weight, shift, most = _most(w, t, radius)
    shape = ScalarTarget(-most, most, number("slope", slope))
    known = {"form": "paper", "G": None, "channels": None, "kappa": None, "margin": MARGIN, "causal": False}
    strange = sorted(set(options) - set(known))
    if strange:
        raise ArgumentError(f"leaky_relu does not take {', '.join(strange)}; it takes {', '.join(known)}")
    count, small = whole("anchors", anchors, 3, " (p > 2)"), leak(eps0)
    return _cold(weight, shift, shape, count, small, radius=number("radius", radius), **{**known, **options})


def hard_tanh(w: Any, t: Any, anchors: int = 32, eps0: float = 1e-9, **options: Any) -> Construction:
    """clip(w.x + t, -1, 1)."""
    return ramp(w, t, -1.0, 1.0, anchors, eps0, **options)


def clipped_relu(w: Any, t: Any, cap: float, anchors: int = 32, eps0: float = 1e-9, **options: Any) -> Construction:
    """min(max(w.x + t, 0), cap)."""
    return ramp(w, t, 0.0, number("cap", cap, positive=True), anchors, eps0, **options)


def _cold(
    w: Tensor, t: Tensor, shape: ScalarTarget, count: int, eps0: float, form: str, G: ChannelMap, channels: int | None,
    radius: float, kappa: float | None, margin: float, causal: bool,
) -> Ramp:  # fmt: skip
    channel = _channel_map(G, count)
    width = max(channel) + 1 if channels is None else whole("channels", channels, 1)
    if max(channel) >= width:
        raise ArgumentError(f"G sends an anchor to channel {max(channel)}, but there are {width} channels (from 0)")
    cold = number("kappa", kappa, positive=True) if kappa is not None else math.log(1 / eps0)
    share = number("margin", margin, positive=True)
    if share >= 0.5:
        raise ArgumentError(f"margin must be below 0.5, half of a spacing, got {share:g}")
    if len(set(channel)) > 1 and kappa is None:
        cold /= 2 * share  # so that the other channel's anchor weighs at most eps0 outside of the excluded set
    if cold < 1:
        raise ArgumentError(f"kappa must be at least 1 for a cold head, got {cold:g}; variant='warm' takes less")
    arguments = (w, t, shape, count, cold, eps0, radius, channel, width, share)
    built: Ramp
    if form_of(form) == "paper":
        if causal:
            raise ArgumentError(PAPER_IS_NOT_CAUSAL)
        tokens = max([x.shape[0] for x in (w, t) if x.dim() == (2 if x is w else 1)], default=1)
        if count < tokens:
            raise ArgumentError(
                f"anchors must be at least the number of tokens ({tokens}) in the paper's form, got {count}"
            )
        built = PaperRamp(*arguments)
    else:
        _token_wise(w, t, "form='tokens'")
        built = TokenRamp(*arguments, causal=causal)
    half = float(shape.b - shape.a) / 2
    other = "use float64, fewer anchors or a smaller radius" if form == "tokens" else (
        "use float64, fewer anchors, a smaller radius or form='tokens', whose logits are smaller")  # fmt: skip
    built.judged(half * shape.lipschitz, other)
    return built


def _query(w: Any, t: Any) -> tuple[Tensor, Tensor]:
    weight = tensor("w", w)
    shift = tensor("t", t, weight.dtype)
    if weight.dim() not in (1, 2) or weight.numel() == 0:
        raise ArgumentError(f"w must have shape (d,) or, one per token, (n, d), got {tuple(weight.shape)}")
    if shift.dim() > 1 or shift.numel() == 0:
        raise ArgumentError(f"t must be a number or, one per token, have shape (n,), got {tuple(shift.shape)}")
    if weight.dim() == 2 and shift.dim() == 1 and weight.shape[0] != shift.shape[0]:
        raise ArgumentError(f"w is for {weight.shape[0]} tokens and t for {shift.shape[0]}; they must agree")
    return weight, shift


def _token_wise(w: Tensor, t: Tensor, what: str) -> None:
    if w.dim() == 2 or t.dim() == 1:
        raise ArgumentError(
            f"{what} shares its weights between tokens, so w must be one vector (d,) and t one number; "
            f"got w of shape {tuple(w.shape)} and t of shape {tuple(t.shape)}. Different w_i for each token exist "
            "only in form='paper', where A is not token-wise"
        )


def _radius(radius: float | None, w: Tensor, t: Tensor, a: float, b: float) -> float:
    if radius is not None:
        return number("radius", radius, positive=True)
    norm = float(w.detach().double().abs().sum(-1).min())
    needed = 8 * (max(abs(a), abs(b)) + float(t.detach().double().abs().max())) / norm if norm > 0 else 0.0
    return max(FARTHEST, needed)


def _most(w: Any, t: Any, radius: float) -> tuple[Tensor, Tensor, float]:
    """w, t, and the largest |w.x + t| for |x| <= radius, with room for its rounding."""
    weight, shift = _query(w, t)
    reach = weight.double().abs().sum(-1) * number("radius", radius, positive=True) + shift.double().abs()
    most = float(reach.max()) * (1 + 2.0**-18)
    if most == 0:
        raise ArgumentError("w and t are zero: there is nothing to approximate")
    return weight, shift, most


def _channel_map(G: ChannelMap, count: int) -> tuple[int, ...]:
    if G is None or isinstance(G, int):
        found = [G or 0] * count
    elif callable(G):
        found = [G(k) for k in range(count)]
    else:
        found = [int(g) for g in G]
    if len(found) != count:
        raise ArgumentError(f"G must name a channel for each of the {count} anchors, got {len(found)}")
    if not all(isinstance(g, int) and g >= 0 for g in found):
        raise ArgumentError("G must map anchors to channels 0, 1, ...; got a negative number or something else")
    return tuple(found)
