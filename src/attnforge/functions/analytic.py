"""The analytic functions of the registry: torch values, stable ball series, turns.

`point` must be sound on any ball inside the domain. A series gets c + t + ... with a ball c; where a textbook formula
cancels for large |y| a stable one stands here, so that the balls stay useful from -700 to 700.

Values are within 4 ulps of the truth in float64. Exceptions: left of 0, where gelu and its kin decay, the rounding of
the scaled argument costs up to 3 y^2 ulps of the (tiny) value for gelu, 0.3 |y|^3 for gelu_tanh, 4 |y| for the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from flint import arb, arb_series, fmpq
from torch import Tensor

from ..arguments import number
from ..errors import ArgumentError
from .univariate import (
    NON_NEGATIVE,
    POSITIVE,
    REALS,
    UNIT,
    BallMap,
    Domain,
    Series,
    Turns,
    Univariate,
    Value,
    ball_by_turns,
)

_ANY = ("square", "atan")
_BENT = ("atan", "square")  # one bend near 0 and straight or flat far out: sinh-spaced anchors
_DECADES = ("log", "square")  # a singularity at 0: log-spaced anchors
_KAPPA = fmpq(44715, 1000000)  # the constant of gelu_tanh
_QUICK = fmpq(1702, 1000)  # the constant of quick_gelu
_ZERO = (arb(0),)

T = TypeVar("T", arb, arb_series)


def analytic(
    name: str,
    value: Value,
    series: Series,
    point: BallMap,
    domain: Domain = REALS,
    potentials: tuple[str, ...] = _ANY,
    turns: Turns = (),
    image: tuple[float, float] = (-math.inf, math.inf),
) -> Univariate:
    """A function that is analytic inside its domain and monotone between its turns (monotone without any)."""
    ball = ball_by_turns(point, turns, domain)
    return Univariate(name, value, series, ball, domain, potentials=potentials, turns=turns, image=image)


def _primitive(constant: arb, x: arb_series, rate: Callable[[arb_series], arb_series]) -> arb_series:
    """The series with this constant term whose derivative is rate(x) x': keeps the constant's relative accuracy."""
    if x.prec <= 1:
        return arb_series([constant], prec=x.prec)
    out = (rate(x) * x.derivative()).integral()
    out[0] = constant
    return out


def expm1_series(x: arb_series) -> arb_series:
    """exp(x) - 1 with full relative accuracy near 0."""
    out = x.exp()
    out[0] = x[0].expm1()
    return out


def _sigmoid_pair(x: arb) -> tuple[arb, arb]:
    """sigmoid(x) and sigmoid(-x); over a ball both are monotone, so the ends give tight enclosures."""
    if x.is_exact() or not x.is_finite():
        decay = (-x).exp()
        rise = 1 / (1 + decay)
        return rise, decay * rise
    (rise, fall), (rise_hi, fall_hi) = _sigmoid_pair(x.lower()), _sigmoid_pair(x.upper())
    return rise.union(rise_hi), fall.union(fall_hi)


def _sigmoid(x: arb) -> arb:
    return _sigmoid_pair(x)[0]


def sigmoid_series(x: arb_series) -> arb_series:
    """1/(1 + exp(-x)), as s / (1 + p (exp(-u) - 1)) with s = sigmoid(c), p = sigmoid(-c) and u = x - c.

    On a wide ball c this is much tighter at high degrees than the textbook formula, because the ball enters
    through two tight numbers only; far out it keeps full relative accuracy on both sides.
    """
    shifted = -x
    shifted[0] = arb(0)
    decay = shifted.exp()
    decay[0] = arb(0)
    rise, fall = _sigmoid_pair(x[0])
    return rise * (1 + fall * decay).inv()


@functools.lru_cache(maxsize=256)
def shifted_log(shift: float) -> Univariate:
    """log(y + shift): what powers are made of that begin at 0 and have a variable exponent."""
    by = number("shift", shift)
    if not by > 0:
        raise ArgumentError(f"the shift of a logarithm must be positive, got {shift!r}")
    return analytic(
        f"shifted_log({by!r})",
        lambda y: torch.log(y + by),
        lambda x: (x + by).log(),
        lambda x: (x + by).log(),
        Domain(0.0, math.inf, poles=(-by,)),
        _DECADES,
    )


def _tanh(x: arb_series) -> arb_series:
    out = 2 * sigmoid_series(2 * x) - 1
    out[0] = x[0].tanh()
    return out


def softplus_point(x: arb) -> arb:
    """log(1 + exp(x)), without cancellation on either side."""
    return x + (-x).exp().log1p() if x.mid() > 0 else x.exp().log1p()


def softplus_series(x: arb_series) -> arb_series:
    """log(1 + exp(x)) as the primitive of the sigmoid."""
    return _primitive(softplus_point(x[0]), x, sigmoid_series)


@functools.lru_cache(maxsize=64)
def softplus(threshold: float) -> Univariate:
    """PyTorch's softplus: log(1 + exp(y)) up to the threshold, y itself beyond, where it jumps down by log(1 + e^-t).

    No network jumps. So from a little before the threshold on the balls hold both branches: a table's error then
    covers the jump, and two arguments on different sides of it are as far apart on either branch.
    """
    t = number("threshold", threshold)
    if t < 1:
        raise ArgumentError(f"softplus jumps at its threshold, which must therefore be >= 1, got {threshold!r}")
    # Four jumps before t, softplus is below t still: what is read on the wrong side of t errs by less than the
    # arguments differ. 2^-40 of t is far more than rounding moves it.
    start = t - max(4 * math.log1p(math.exp(-t)), t * 2.0**-40)

    def both(x: arb_series) -> arb_series:
        out = softplus_series(x)
        for j in range(x.prec):
            out[j] = out[j].union(x[j])
        return out

    def series(x: arb_series) -> arb_series:
        return softplus_series(x) if x[0] < start else both(x)

    def point(x: arb) -> arb:
        return softplus_point(x) if x < start else softplus_point(x).union(x)

    def value(y: Tensor) -> Tensor:
        return torch.where(y > t, y, torch.logaddexp(y, torch.zeros_like(y)))

    smooth = analytic(f"softplus({t!r})", value, series, point, potentials=_BENT)
    return replace(smooth, seam=(start, both))  # the centre of a cell that reaches t may lie where there is one branch


def _erfc_half(x: arb_series) -> arb_series:
    """The normal distribution function; erfc keeps its relative accuracy in the left tail."""
    return (x * -arb(0.5).sqrt()).erfc() * 0.5


def _gelu_tanh_argument(x: arb_series) -> arb_series:
    # (1 + tanh(u))/2 = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    return (x + x * x * x * _KAPPA) * (8 / arb.pi()).sqrt()


def _gelu_tanh_point(x: arb) -> arb:
    return x * _sigmoid((x + x * x * x * _KAPPA) * (8 / arb.pi()).sqrt())


def _gelu_tanh_value(y: Tensor) -> Tensor:
    return y * torch.sigmoid(math.sqrt(8 / math.pi) * (y + 0.044715 * y * y * y))


def _mish(x: arb_series) -> arb_series:
    # tanh(log(1 + e^x)) with the exponential that does not grow
    if x[0].mid() > 0:
        q = (-x).exp()
        return x * (1 + 2 * q) * (1 + 2 * q + 2 * q * q).inv()
    n = x.exp() * (x.exp() + 2)
    return x * n * (n + 2).inv()


def _constant(point: Series) -> BallMap:
    """A point evaluation by a series of one term."""
    return lambda x: point(arb_series([x], prec=1))[0]


def _periodic_turns(offset: fmpq) -> Callable[[arb, arb], tuple[arb, ...]]:
    """Turns at pi (k + offset). Neighbours are a maximum and a minimum, so the first two in the interval suffice."""

    def turns(lo: arb, hi: arb) -> tuple[arb, ...]:
        if max(abs(float(lo)), abs(float(hi))) > 1e12:  # too far out to tell the turns apart by their float64 index
            return (lo.union(hi),)
        first = math.floor(float(lo) / math.pi) - 1
        found = []
        for k in range(first, first + 6):
            turn = (k + offset) * arb.pi()
            if not (turn < lo or turn > hi):
                found.append(turn)
        return tuple(found[:2])

    return turns


def _turn(decimal: str) -> tuple[arb, ...]:
    """A turn known to all the digits given; the radius covers the digits left out."""
    return (arb(decimal, 1e-24),)


def _xlogx_point(x: arb) -> arb:
    return x * x.log() if x > 0 else arb(0) if x.is_zero() else arb.nan()


def _reciprocal_point(x: arb) -> arb:
    return 1 / x


def _exp2(x: T) -> T:
    return (x * arb.const_log2()).exp()


def _log2(x: T) -> T:
    return x.log() / arb.const_log2()


def _log10(x: T) -> T:
    return x.log() / arb.const_log10()


_POLE_AT_ZERO = Domain(poles=(0.0,))
_ABOVE_MINUS_ONE = Domain(-1.0, math.inf, lo_closed=False)
_OPEN_UNIT = Domain(-1.0, 1.0, lo_closed=False, hi_closed=False)

ANALYTIC: tuple[Univariate, ...] = (
    analytic("identity", lambda y: y * 1, lambda x: x, lambda x: x),
    analytic("square", lambda y: y * y, lambda x: x * x, lambda x: x * x, turns=_ZERO, image=(0.0, math.inf)),
    analytic("cube", lambda y: y * y * y, lambda x: x * x * x, lambda x: x * x * x),
    analytic("reciprocal", torch.reciprocal, lambda x: x.inv(), _reciprocal_point, _POLE_AT_ZERO, _DECADES),
    analytic("sqrt", torch.sqrt, lambda x: x.sqrt(), arb.sqrt, NON_NEGATIVE, _DECADES),
    analytic("rsqrt", torch.rsqrt, lambda x: x.rsqrt(), arb.rsqrt, POSITIVE, _DECADES),
    analytic("exp", torch.exp, lambda x: x.exp(), arb.exp, image=(0.0, math.inf)),
    analytic("exp2", torch.exp2, _exp2, _exp2, image=(0.0, math.inf)),
    analytic("expm1", torch.expm1, expm1_series, arb.expm1),
    analytic("log", torch.log, lambda x: x.log(), arb.log, POSITIVE, _DECADES),
    analytic("log2", torch.log2, _log2, _log2, POSITIVE, _DECADES),
    analytic("log10", torch.log10, _log10, _log10, POSITIVE, _DECADES),
    analytic(
        "xlogx",
        lambda y: torch.special.xlogy(y, y),
        lambda x: x * x.log(),
        _xlogx_point,
        NON_NEGATIVE,
        _DECADES,
        turns=_turn("0.3678794411714423215955238"),
        image=(-0.3678794411714424, math.inf),
    ),
    analytic(
        "log1p",
        torch.log1p,
        lambda x: _primitive(x[0].log1p(), x, lambda z: (1 + z).inv()),
        arb.log1p,
        _ABOVE_MINUS_ONE,
        _DECADES,
    ),
    analytic("sin", torch.sin, lambda x: x.sin(), arb.sin, turns=_periodic_turns(fmpq(1, 2)), image=(-1.0, 1.0)),
    analytic("cos", torch.cos, lambda x: x.cos(), arb.cos, turns=_periodic_turns(fmpq(0)), image=(-1.0, 1.0)),
    analytic("tan", torch.tan, lambda x: x.tan(), arb.tan, Domain(poles=(math.pi / 2,), period=math.pi)),
    analytic("asin", torch.asin, lambda x: x.asin(), arb.asin, UNIT),
    analytic("acos", torch.acos, lambda x: x.acos(), arb.acos, UNIT),
    analytic("atan", torch.atan, lambda x: x.atan(), arb.atan, potentials=_BENT),
    analytic("sinh", torch.sinh, lambda x: (x.exp() - (-x).exp()) * 0.5, arb.sinh),
    analytic("cosh", torch.cosh, lambda x: (x.exp() + (-x).exp()) * 0.5, arb.cosh, turns=_ZERO, image=(1.0, math.inf)),
    analytic("tanh", torch.tanh, _tanh, arb.tanh, potentials=_BENT, image=(-1.0, 1.0)),
    analytic(
        "asinh",
        torch.asinh,
        lambda x: _primitive(x[0].asinh(), x, lambda z: (1 + z * z).rsqrt()),
        arb.asinh,
        potentials=_BENT,
    ),
    analytic(
        "acosh",
        torch.acosh,
        lambda x: _primitive(x[0].acosh(), x, lambda z: ((z - 1) * (z + 1)).rsqrt()),
        arb.acosh,
        Domain(1.0, math.inf),
        _DECADES,
    ),
    analytic(
        "atanh", torch.atanh, lambda x: _primitive(x[0].atanh(), x, lambda z: (1 - z * z).inv()), arb.atanh, _OPEN_UNIT
    ),
    analytic("sigmoid", torch.sigmoid, sigmoid_series, _sigmoid, potentials=_BENT, image=(0.0, 1.0)),
    analytic(
        "softplus", lambda y: torch.logaddexp(y, torch.zeros_like(y)), softplus_series, softplus_point, potentials=_BENT
    ),
    analytic(
        "logsigmoid",
        lambda y: -torch.logaddexp(-y, torch.zeros_like(y)),
        lambda x: -softplus_series(-x),
        lambda x: -softplus_point(-x),
        potentials=_BENT,
    ),
    analytic("erf", torch.erf, lambda x: x.erf(), arb.erf, potentials=_BENT, image=(-1.0, 1.0)),
    analytic("erfc", torch.erfc, lambda x: x.erfc(), arb.erfc, potentials=_BENT, image=(0.0, 2.0)),
    analytic(
        "gelu",
        lambda y: 0.5 * y * torch.erfc(-math.sqrt(0.5) * y),
        lambda x: x * _erfc_half(x),
        lambda x: x * (x * -arb(0.5).sqrt()).erfc() * 0.5,
        potentials=_BENT,
        turns=_turn("-0.7517915246935644574579049"),
    ),
    analytic(
        "gelu_tanh",
        _gelu_tanh_value,
        lambda x: x * sigmoid_series(_gelu_tanh_argument(x)),
        _gelu_tanh_point,
        potentials=_BENT,
        turns=_turn("-0.7524614220710162584879544"),
    ),
    analytic(
        "quick_gelu",
        lambda y: y * torch.sigmoid(1.702 * y),
        lambda x: x * sigmoid_series(x * _QUICK),
        lambda x: x * _sigmoid(x * _QUICK),
        potentials=_BENT,
        turns=_turn("-0.7511542554412889512980956"),
    ),
    analytic(
        "silu",
        lambda y: y * torch.sigmoid(y),
        lambda x: x * sigmoid_series(x),
        lambda x: x * _sigmoid(x),
        potentials=_BENT,
        turns=_turn("-1.2784645427610737951093587"),
    ),
    analytic(
        "mish",
        lambda y: y * torch.tanh(torch.logaddexp(y, torch.zeros_like(y))),
        _mish,
        _constant(_mish),
        potentials=_BENT,
        turns=_turn("-1.1924312145154952121375883"),
    ),
)
