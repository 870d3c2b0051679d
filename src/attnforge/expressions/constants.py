"""Constants of formulas: exact rationals, folded without rounding.

A decimal literal is the rational it spells, 1/3 is a third, and pi, e or sin(1) are rationals within 2^-4000 of the
true number, relatively: exp(-120) or 1 - tanh(90) keep their digits, whatever they are multiplied by. So equal terms
cancel exactly, and when a program is made every constant is rounded once, to float64. What cancels down to less than
float64 holds cannot be told from 0 and is refused.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Integral, Real

from flint import arb, fmpq

from ..errors import ArgumentError, DomainError
from ..functions.directed import precision
from ..functions.univariate import Univariate

#: Of a constant that is not rational: what is left of a difference of constants is at least 2^-1074 of numbers below
#: 2^1024, so that one which cancels keeps 2000 bits still, and the next one, scaled up again, float64's.
_BITS = 4096
_EXACT_BITS = 4 * _BITS  # longer numerators and denominators are rounded to _BITS: three products of such constants
_NEAR = Fraction(1, 2 ** (_BITS - 96))  # relative distance at which constants cannot be told apart: 96 bits lost
_LARGEST = Fraction(2) ** 1024  # the first power of two beyond float64
_SMALLEST = Fraction(1, 2**1074)  # the smallest positive float64
#: Functions that come closer to a rational than can be told without reaching it: 1 - tanh(2000) is not 0.
_SATURATING = (
    *("tanh", "sigmoid", "erf", "erfc", "softplus", "logsigmoid", "gelu", "gelu_tanh", "quick_gelu", "silu", "mish"),
    *("elu", "selu", "celu"),
)
_PERIODIC = ("sin", "cos", "tan")  # 0 at multiples of pi or pi/2, which are known to _BITS bits only
#: Exponents beyond this are refused, as in the registry.
LARGEST_EXPONENT = 1000


def rational(value: object) -> Fraction:
    """The exact value of a Python or numpy number."""
    if isinstance(value, Fraction):
        return value
    if not isinstance(value, (Integral, Real)) or isinstance(value, bool):
        raise ArgumentError(f"expected a real number, got {value!r} ({type(value).__name__})")
    if isinstance(value, Integral):
        return within_range(Fraction(int(value)))
    if not math.isfinite(value):
        raise ArgumentError(f"expected a finite number, got {value!r}")
    return Fraction(float(value))


def within_range(value: Fraction) -> Fraction:
    """The constant itself, shortened when it is very long; refused when float64 cannot hold it."""
    if abs(value) >= _LARGEST:
        raise ArgumentError("a constant overflows float64 (beyond 1.8e308)")
    if value and abs(value) < _SMALLEST:
        cancels = abs(value) < _NEAR * _LARGEST  # less than what rounding leaves of the largest constants
        why = "; constants that cancel cannot be told from 0: write the formula without them" if cancels else ""
        raise ArgumentError(f"a constant underflows float64 (below 4.9e-324 but not 0){why}")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _EXACT_BITS:
        with precision(_BITS):
            return _middle(ball(value))
    return value


def ball(value: Fraction) -> arb:
    """The constant as a ball at the working precision."""
    return arb(fmpq(value.numerator, value.denominator))


def constant_power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent; refused where it is not real, not finite or beyond float64, before any long computation."""
    if base == 0:
        if exponent <= 0:
            raise DomainError(f"0 ** {constant_text(exponent)} is not defined; change the formula")
        return Fraction(0)
    whole = exponent.denominator == 1
    if base < 0 and not whole:
        raise DomainError(
            f"({constant_text(base)}) ** {constant_text(exponent)} is not a real number; change the formula"
        )
    size = _log2(abs(base)) * float(min(max(exponent, Fraction(-(10**9))), Fraction(10**9)))
    if size > 1100:
        raise ArgumentError(f"the power of constants {constant_text(base)} ** {constant_text(exponent)} is too large")
    if size < -1200:
        raise ArgumentError(f"the power of constants {constant_text(base)} ** {constant_text(exponent)} is too small")
    length = max(base.numerator.bit_length(), base.denominator.bit_length())
    if whole and length * abs(exponent) <= 4 * _EXACT_BITS:
        result = base ** int(exponent)
        # sqrt(2)**2 is 2; but what is near a rational already, as tanh(2000), stays only near it
        return within_range(_snapped(result) if _is_long(base) and _snapped(base) == base else result)
    sign = -1 if base < 0 and exponent.numerator % 2 else 1
    with precision(_BITS + 64):
        return within_range(sign * _snapped(_middle(ball(abs(base)) ** ball(exponent))))


def constant_call(function: Univariate, value: Fraction) -> Fraction:
    """function(value), refused outside of the domain."""
    point = float(value)
    problem = function.domain.offence(function.name, point, point)
    if problem:
        raise DomainError(problem)
    with precision(_BITS + 64):
        result = function.ball(ball(value))
        if function.name in _PERIODIC and _is_long(value) and abs(result) < ball(_NEAR * (1 + abs(value))):
            return Fraction(0)
        if not result.is_finite() or result.rad() > arb(2) ** (32 - _BITS) * abs(result.mid()):
            raise ArgumentError(f"{function.name}({constant_text(value)}) cannot be computed as a constant")
        middle = _middle(result)
    if result.is_exact():
        return within_range(middle)
    simple = _snapped(middle)
    if simple != middle and function.name.partition("(")[0] in _SATURATING:
        # near a rational, on no side of it: a different distance for every argument, so that nothing cancels
        simple += simple * _NEAR / (1 + abs(value))
    return within_range(simple)


def _is_long(value: Fraction) -> bool:
    """Whether a constant stands for a number that is not rational."""
    return max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS // 2


def constant_pi() -> Fraction:
    with precision(_BITS):
        return _middle(arb.pi())


def constant_e() -> Fraction:
    with precision(_BITS):
        return _middle(arb.const_e())


def _middle(x: arb) -> Fraction:
    mantissa, exponent = x.mid().man_exp()
    m, e = int(mantissa), int(exponent)
    return Fraction(m * 2**e) if e >= 0 else Fraction(m, 2**-e)


def _snapped(value: Fraction) -> Fraction:
    """A constant, or the simple rational that it can hardly miss, relatively: cos(pi) is -1, sqrt(4) is 2."""
    simple = value.limit_denominator(1000)
    return simple if abs(simple - value) <= _NEAR * abs(value) else value


def _log2(x: Fraction) -> float:
    return math.log2(x.numerator) - math.log2(x.denominator)


def settled(value: Fraction) -> Fraction:
    """The constant that `constant_text` spells: itself when it is simple, else its float64 decimal."""
    if max(abs(value.numerator), value.denominator) < 10**6:
        return value
    return Fraction(repr(float(value)))


def constant_text(value: Fraction) -> str:
    """The shortest exact spelling of a settled constant: 2, 0.01, 1/3, 6.283185307179586."""
    if value.denominator == 1 and abs(value) < 10**15:
        return str(value.numerator)
    decimal = repr(float(value)) if abs(value) < _LARGEST else str(value.numerator)
    simple = settled(value)
    if simple == value and Fraction(decimal) != value:
        return f"{value.numerator}/{value.denominator}"
    return decimal.removesuffix(".0")
