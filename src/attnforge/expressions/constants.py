"""Constants of formulas: exact rationals, and what is not rational with how far it may be off.

A decimal literal is the rational it spells, 1/3 is a third. pi, e, sqrt(2) or sin(1) are `Inexact`: a rational within
2^-4000 of the true number, relatively, with a bound of the distance, which arithmetic carries along. So 1 - tanh(90)
keeps its digits whatever it is multiplied by, and 1 - tanh(2000) is 0 up to what is stated. When a program is made
every constant is rounded once, to float64, and what that loses is charged to the certificate (`rounded`).

An `Inexact` also knows what it is, a rational times powers of atoms: 2*pi/3, 2**(1/2), sin(1). Equal ones cancel
exactly, sqrt(2)**2 is 2, cos(pi) is -1, and the name of a function that holds one can be read back.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import count
from numbers import Integral, Real
from typing import Any

from flint import arb, fmpq, fmpz

from ..errors import ArgumentError, DomainError
from ..functions.directed import precision
from ..functions.univariate import Univariate

#: Of a constant that is not rational: what is left of a difference of constants is at least 2^-1074 of numbers below
#: 2^1024, so that one which cancels keeps 2000 bits still, and the next one, scaled up again, float64's.
_BITS = 4096
_SMALL = 64  # exponents up to which a power of rationals is worked out
_EXACT_BITS = 4 * _BITS  # longer numerators and denominators are rounded to _BITS: three products of such constants
_LARGEST = Fraction(2) ** 1024  # the first power of two beyond float64
_SMALLEST = Fraction(1, 2**1074)  # the smallest positive float64
_LONGEST = 400  # characters of a constant's text: as much as the parser takes for a number
_NONE = -(10**9)  # the binary exponent of 0, below every other
#: Exponents beyond this are refused, as in the registry.
LARGEST_EXPONENT = 1000
#: What is known to fewer bits below 1 is `unknown` in part: cancellation leaves other constants more than 2^-2000.
_VAGUE = -1100
_unnamed = count()
_RATIONAL = re.compile(r"\(?(\d+(?:\.\d+|/\d+)?)\)?")  # a rational atom: 2, (4.25), (2/3)
_POSITIVE = ("pi", "e")  # and rational atoms: their powers may be taken apart
#: Where an inverse function of a rational is a rational multiple of pi: nowhere else (Niven's theorem).
_ANGLES = {
    ("atan", 0): Fraction(0), ("atan", 1): Fraction(1, 4), ("atan", -1): Fraction(-1, 4), ("asin", 0): Fraction(0),
    ("asin", Fraction(1, 2)): Fraction(1, 6), ("asin", Fraction(-1, 2)): Fraction(-1, 6), ("asin", 1): Fraction(1, 2),
    ("asin", -1): Fraction(-1, 2), ("acos", 1): Fraction(0), ("acos", Fraction(1, 2)): Fraction(1, 3),
    ("acos", 0): Fraction(1, 2), ("acos", Fraction(-1, 2)): Fraction(2, 3), ("acos", -1): Fraction(1),
}  # fmt: skip
Atoms = tuple[tuple[str, Fraction], ...]


def _rational(scale: Fraction, atoms: Atoms) -> Fraction | None:
    """scale * product of atom ** exponent where all atoms are written as rationals and all exponents are small and
    whole; None otherwise."""
    out = Fraction(scale)
    for atom, p in atoms:
        if p.denominator != 1 or abs(p) > _SMALL or not set(atom) <= set("()-./0123456789"):
            return None
        try:
            out *= Fraction(atom.strip("()")) ** int(p)
        except (ValueError, ZeroDivisionError):
            return None
    return out


class Inexact(Fraction):
    """A rational within 2**`slack` of scale * product of atom ** exponent, which is the number that is meant.

    >>> pi = constant_pi()
    >>> pi / 2 + pi / 2 == pi, pi - pi, pi * 0.5 > 1, constant_text(2 * pi / 3)
    (True, Fraction(0, 1), True, '2/3*pi')
    """

    __slots__ = ("atoms", "scale", "slack")
    scale: Fraction
    atoms: Atoms
    slack: int

    def __new__(cls, middle: Fraction, slack: int, scale: Fraction, atoms: Atoms) -> Inexact:
        if max(middle.numerator.bit_length(), middle.denominator.bit_length()) > _EXACT_BITS:
            slack = max(slack, _above(middle) - _BITS) + 1
            with precision(_BITS + 2):
                middle = _middle(ball(Fraction(middle)))
        if max(scale.numerator.bit_length(), scale.denominator.bit_length()) > _EXACT_BITS:
            scale, atoms = Fraction(1), ((f"?{next(_unnamed)}", Fraction(1)),)
        self: Any = super().__new__(cls, middle)
        self.scale, self.atoms, self.slack = scale, atoms, slack
        return self  # type: ignore[no-any-return]

    @property
    def text(self) -> str | None:
        """A formula for the number, None when there is none that could be read."""
        if any(atom.startswith("?") for atom, _ in self.atoms):
            return None
        scale = [] if self.scale == 1 else [constant_text(self.scale)]
        text = "*".join([*scale, *(_factor(atom, p) for atom, p in self.atoms)])
        return text if len(text) <= _LONGEST and "?" not in text else None

    def _sum(self, other: Fraction, sign: int) -> Fraction:
        middle = _plain(self) + sign * _plain(other)
        if isinstance(other, Inexact):
            if self.atoms == other.atoms:
                scale = self.scale + sign * other.scale
                return Inexact(middle, max(self.slack, other.slack) + 1, scale, self.atoms) if scale else Fraction(0)
            return _fresh(middle, max(self.slack, other.slack) + 1, _joined(self, "+-"[sign < 0], other))
        return _fresh(middle, self.slack, _joined(self, "+-"[sign < 0], other)) if other else self

    def _times(self, other: Fraction, sign: int = 1) -> Fraction:
        """self * other ** sign."""
        if isinstance(other, Inexact):
            if sign < 0 and not _below(other) > other.slack + 1:
                raise ArgumentError("a formula divides by a constant that cannot be told from 0: write it without")
            high, low = _above(other), _below(other)
            loss = max(_above(self) + other.slack, self.slack + high, self.slack + other.slack) + 2
            if sign < 0:  # (a + d)/(b + e) - a/b = (d - e a/b)/(b + e), and |b + e| >= |b|/2
                loss = max(self.slack, _above(self) - low + other.slack) + 2 - low
            powers = dict(self.atoms)
            for atom, p in other.atoms:
                powers[atom] = powers.get(atom, Fraction(0)) + sign * p
            middle = _plain(self) * _plain(other) ** sign
            return _made(middle, loss, self.scale * other.scale**sign, powers)
        if not other:
            if sign < 0:
                raise ZeroDivisionError
            return Fraction(0)
        shift = _above(other) if sign > 0 else -_below(other)
        return Inexact(_plain(self) * other**sign, self.slack + shift, self.scale * other**sign, self.atoms)

    def __add__(self, other: Any) -> Any:
        return self._sum(Fraction(other) if not isinstance(other, Fraction) else other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return self._times(Fraction(other) if not isinstance(other, Fraction) else other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times(Fraction(other) if not isinstance(other, Fraction) else other, -1)

    def __rtruediv__(self, other: Any) -> Any:
        return Inexact(Fraction(other), _NONE, Fraction(other), ())._times(self, -1) if other else Fraction(0)

    def __neg__(self) -> Any:
        return Inexact(-_plain(self), self.slack, -self.scale, self.atoms)

    def __abs__(self) -> Any:
        return -self if self.numerator < 0 else self

    def __pow__(self, other: Any) -> Any:
        return constant_power(self, rational(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inexact) and (self.scale, self.atoms) == (other.scale, other.atoms)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.scale, self.atoms))

    def __bool__(self) -> bool:
        return True

    def _certain(self, other: Any) -> int:
        """The sign of self - other where it is certain, else 0."""
        rest = self - other
        known = rest.slack < _below(rest) if isinstance(rest, Inexact) else True
        return (rest.numerator > 0) - (rest.numerator < 0) if known else 0

    def __lt__(self, other: Any) -> bool:
        return self._certain(other) < 0

    def __gt__(self, other: Any) -> bool:
        return self._certain(other) > 0

    __le__, __ge__ = __lt__, __gt__


def _factor(atom: str, p: Fraction) -> str:
    if p == Fraction(1, 2):
        return f"sqrt{atom}" if atom.startswith("(") else f"sqrt({atom})"
    text = constant_text(p)
    return atom if p == 1 else f"{atom}**{text}" if text.isdigit() else f"{atom}**({text})"


def _plain(value: Fraction) -> Fraction:
    return Fraction(value.numerator, value.denominator) if isinstance(value, Inexact) else value


def _above(value: Fraction) -> int:
    """An exponent k with |value| < 2^k."""
    return value.numerator.bit_length() - value.denominator.bit_length() + 1 if value.numerator else _NONE


def _below(value: Fraction) -> int:
    """An exponent k with |value| > 2^k."""
    return value.numerator.bit_length() - value.denominator.bit_length() - 1 if value.numerator else _NONE


def _joined(one: Fraction, sign: str, other: Fraction) -> str | None:
    left, right = (x.text if isinstance(x, Inexact) else constant_text(x) for x in (one, other))
    return None if left is None or right is None else f"({left} {sign} ({right}))"


def _fresh(middle: Fraction, slack: int, text: str | None) -> Inexact:
    """A constant that is an atom of its own; one that cannot be spelled is equal to none but itself."""
    return Inexact(middle, slack, Fraction(1), ((_atom(text), Fraction(1)),))


def _made(middle: Fraction, slack: int, scale: Fraction, powers: dict[str, Fraction]) -> Fraction:
    """scale * product of atom ** power; whole powers of rational atoms belong to the scale."""
    for atom, p in list(powers.items()):
        known = _RATIONAL.fullmatch(atom)
        whole = math.floor(p)
        if known and whole and len(known[1]) * abs(whole) <= _EXACT_BITS // 4:
            scale *= Fraction(known[1]) ** whole
            powers[atom] = p = p - whole
        if not p:
            del powers[atom]
    return Inexact(middle, slack, scale, tuple(sorted(powers.items()))) if powers else scale


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
    exactly = getattr(value, "as_integer_ratio", None)  # of a long double, too, which has more digits than float64
    if exactly is None and value != float(value):
        raise ArgumentError(f"what {value!r} ({type(value).__name__}) stands for exactly is not known: give a float")
    return within_range(Fraction(float(value)) if exactly is None else Fraction(*map(int, exactly())))


def within_range(value: Fraction) -> Fraction:
    """The constant itself, shortened when it is very long; refused when float64 cannot hold it."""
    if abs(_plain(value)) >= _LARGEST:
        raise ArgumentError("a constant overflows float64 (beyond 1.8e308)")
    if isinstance(value, Inexact):
        if value.numerator and abs(_plain(value)) < _SMALLEST and value.slack < _below(value):
            raise ArgumentError("a constant underflows float64 (below 4.9e-324 but not 0)")
        return value
    if value and abs(value) < _SMALLEST:
        raise ArgumentError("a constant underflows float64 (below 4.9e-324 but not 0)")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _EXACT_BITS:
        return _fresh(value, _NONE, None)
    return value


def rounded(value: Fraction) -> tuple[float, float]:
    """The float64 next to a constant, and an upper bound of its distance from the number that is meant.

    >>> rounded(Fraction(1, 2)), rounded(Fraction(1, 10))[1] > 0, rounded(constant_pi())[0] == math.pi
    ((0.5, 0.0), True, True)
    """
    near = float(value)
    off = abs(_plain(value) - Fraction(near))
    if isinstance(value, Inexact):
        off += Fraction(2) ** max(value.slack, -2 * _BITS)
    if off >= _LARGEST:
        raise ArgumentError(f"a constant near {near:.6g} cannot be told from 0 or from any other: constants cancel")
    far = float(off)
    return near, far if Fraction(far) >= off else math.nextafter(far, math.inf)


def ball(value: Fraction) -> arb:
    """The constant as a ball at the working precision."""
    middle = arb(fmpq(value.numerator, value.denominator))
    return middle + arb(0, arb(2) ** max(value.slack, -2 * _BITS)) if isinstance(value, Inexact) else middle


def _known(result: arb, scale: Fraction, powers: dict[str, Fraction]) -> Fraction:
    """scale * product of atom ** power, which lies in the ball."""
    result = _within_reach(result)
    if result.is_exact():
        return _middle(result)
    mantissa, exponent = result.rad().man_exp()
    return within_range(_made(_middle(result), int(exponent) + int(mantissa).bit_length(), scale, powers))


def _within_reach(result: arb) -> arb:
    """The ball, if it is one of float64; told by exponents alone: as a fraction, exp(1e9) would have 10^9 digits."""
    mantissa, exponent = result.mid().man_exp()
    top = int(exponent) + int(mantissa).bit_length() if mantissa else _NONE
    if top > 1025:
        raise ArgumentError("a constant overflows float64 (beyond 1.8e308)")
    if mantissa and top < -2 * _BITS:
        if 0 not in result:
            raise ArgumentError("a constant underflows float64 (below 4.9e-324 but not 0)")
        return arb(0, abs(result).upper())
    return result


def _spelled(value: Fraction) -> str | None:
    """A constant as an atom: a name, a call, a whole number, or something in parentheses."""
    text = value.text if isinstance(value, Inexact) else constant_text(value)
    if text is None or "?" in text:
        return None
    alone = isinstance(value, Inexact) and value.atoms == ((text, Fraction(1)),)
    return text if alone or text.isalnum() else f"({text})"


def constant_power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent; refused where it is not real, not finite or beyond float64, before any long computation."""
    if exponent in (1, -1):
        if exponent < 0 and not base:
            raise DomainError("0 ** -1 is not defined; change the formula")
        return within_range(base if exponent == 1 else 1 / base)
    if base == 0:
        if exponent <= 0:
            raise DomainError(f"0 ** {constant_text(exponent)} is not defined; change the formula")
        return Fraction(0)
    whole = exponent.denominator == 1 and not isinstance(exponent, Inexact)
    if isinstance(base, Inexact) and not (base > 0 or base < 0) and not (whole and exponent > 0):
        raise ArgumentError(f"a power of {constant_text(base)}, a constant that cannot be told from 0")
    if base < 0 and not whole:
        raise DomainError(
            f"({constant_text(base)}) ** {constant_text(exponent)} is not a real number; change the formula"
        )
    size = _log2(abs(_plain(base))) * float(_plain(min(max(exponent, Fraction(-(10**9))), Fraction(10**9))))
    if size > 1100:
        raise ArgumentError(f"the power of constants {constant_text(base)} ** {constant_text(exponent)} is too large")
    if size < -1200:
        raise ArgumentError(f"the power of constants {constant_text(base)} ** {constant_text(exponent)} is too small")
    exact = _exact_power(base, exponent)
    if isinstance(exact, Inexact):  # sqrt(1.25)**2: roots that have gone leave a rational
        exact = _rational(exact.scale, exact.atoms) or exact
    if exact is not None:
        return within_range(exact)
    with precision(_BITS + 64):
        result = ball(base) ** (int(exponent) if whole else ball(exponent))
        if not result.is_finite():
            raise ArgumentError(f"{constant_text(base)} ** {constant_text(exponent)} cannot be computed as a constant")
        text, above = _spelled(base), _spelled(exponent)
        if isinstance(exponent, Inexact) or text is None or above is None:
            return _known(result, Fraction(1), {_atom(text and above and f"({text}**{above})"): Fraction(1)})
        if isinstance(base, Inexact) and (whole or (base.scale > 0 and all(map(_positive, dict(base.atoms))))):
            scale = constant_power(base.scale, exponent)
            powers = {atom: p * exponent for atom, p in base.atoms}
            if isinstance(scale, Inexact):
                for atom, p in scale.atoms:
                    powers[atom] = powers.get(atom, Fraction(0)) + p
                scale = scale.scale
            return _known(result, scale, powers)
        sign = -1 if base < 0 and exponent.numerator % 2 else 1
        return _known(result, Fraction(sign), {text.replace("-", "", base < 0): exponent})


def _positive(atom: str) -> bool:
    return atom in _POSITIVE or _RATIONAL.fullmatch(atom) is not None


def _atom(text: str | None) -> str:
    return f"?{next(_unnamed)}" if text is None or len(text) > _LONGEST else text


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """The power of a rational, where it is a rational that is not too long."""
    if isinstance(base, Inexact) or isinstance(exponent, Inexact):
        return None
    top, bottom = base.numerator, base.denominator
    if exponent.denominator > 1:
        if exponent.denominator > LARGEST_EXPONENT:
            return None
        top, bottom = (int(fmpz(n).root(exponent.denominator)) for n in (top, bottom))
        if Fraction(top, bottom) ** exponent.denominator != base:
            return None
    long = max(top.bit_length(), bottom.bit_length()) * abs(exponent.numerator) > 4 * _EXACT_BITS
    return None if long else Fraction(top, bottom) ** exponent.numerator


def constant_call(function: Univariate, value: Fraction) -> Fraction:
    """function(value), refused outside of the domain."""
    point = float(value)
    problem = function.domain.offence(function.name, point, point)
    if problem:
        raise DomainError(problem)
    exact = _exact_call(function.name, value)
    if exact is not None:
        return within_range(exact)
    with precision(_BITS + 64):
        result = function.ball(ball(value))
        if not result.is_finite():
            raise ArgumentError(f"{function.name}({constant_text(value)}) cannot be computed as a constant")
        if function.name == "exp" and not isinstance(value, Inexact):
            return _known(result, Fraction(1), {"e": value})
        inner = value.text if isinstance(value, Inexact) else constant_text(value)
        name, _, arguments = function.name.partition("(")
        readable = inner is not None and "?" not in inner and name.isidentifier()
        text = f"{name}({inner}{f', {arguments[:-1]}' if arguments else ''})" if readable else None
        return _known(result, Fraction(1), {_atom(text): Fraction(1)})


def _exact_call(name: str, value: Fraction) -> Fraction | None:
    """The value of a function where it is rational, or a rational multiple of pi."""
    if name in ("abs", "relu") and (value >= 0 or value <= 0):
        return abs(value) if name == "abs" or value > 0 else Fraction(0)
    if isinstance(value, Inexact):
        if name == "log" and value.scale == 1 and len(value.atoms) == 1 and value.atoms[0][0] == "e":
            return value.atoms[0][1]
        if value.atoms != (("pi", Fraction(1)),) or name not in ("sin", "cos", "tan"):
            return None
        turn = value.scale + Fraction(1, 2) if name == "cos" else value.scale
        if name == "tan":
            return {Fraction(0): Fraction(0), Fraction(1, 4): Fraction(1), Fraction(3, 4): Fraction(-1)}.get(turn % 1)
        sines = {Fraction(0): Fraction(0), Fraction(1, 6): Fraction(1, 2), Fraction(1, 2): Fraction(1)}
        found = sines.get(min(turn % 1, 1 - turn % 1) if turn % 1 else turn % 1)
        return found if found is None or turn % 2 < 1 else -found
    if name in ("log2", "log10") and value > 0:
        base, near = int(name[3:]), round(_log2(value) / math.log2(int(name[3:])))
        return Fraction(near) if Fraction(base) ** near == value else None
    angle = _ANGLES.get((name, value))
    return None if angle is None else angle * constant_pi()


def unknown(most: float) -> Fraction:
    """A number of which nothing is known but that its size is at most `most`.

    >>> rounded(unknown(0.2)), unknown(0.2) == unknown(0.2)
    ((0.0, 0.25), False)
    """
    return _fresh(Fraction(0), math.frexp(most)[1], None)


def vague(value: Fraction) -> tuple[Fraction, float] | None:
    """What is known of a constant that is `unknown` in part, and how far it may be off; None for all others.

    >>> vague(Fraction(3) + unknown(0.2)), vague(constant_pi())
    ((Fraction(3, 1), 0.25), None)
    """
    if not isinstance(value, Inexact) or value.slack < _VAGUE:
        return None
    return _plain(value), math.ldexp(1.0, value.slack) if value.slack < 1024 else math.inf


def constant_pi() -> Fraction:
    with precision(_BITS):
        return _known(arb.pi(), Fraction(1), {"pi": Fraction(1)})


def constant_e() -> Fraction:
    with precision(_BITS):
        return _known(arb.const_e(), Fraction(1), {"e": Fraction(1)})


def _middle(x: arb) -> Fraction:
    mantissa, exponent = x.mid().man_exp()
    m, e = int(mantissa), int(exponent)
    return Fraction(m * 2**e) if e >= 0 else Fraction(m, 2**-e)


def _log2(x: Fraction) -> float:
    return math.log2(x.numerator) - math.log2(x.denominator) if x else -math.inf


def constant_text(value: Fraction) -> str:
    """The shortest exact spelling of a constant: 2, 0.01, 1/3, 2*pi; with a question mark where there is none.

    >>> constant_text(Fraction(1, 3)), constant_text(Fraction(1, 8)), constant_text(3 / constant_pi())
    ('1/3', '0.125', '3*pi**(-1)')
    """
    if isinstance(value, Inexact):
        return value.text or f"{float(value):.6g}?"
    if value.denominator == 1 and abs(value) < 10**15:
        return str(value.numerator)
    decimal = repr(float(value)) if abs(value) < _LARGEST else "inf"
    if abs(value) < _LARGEST and Fraction(decimal) == value:
        return decimal.removesuffix(".0")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * _LONGEST:
        return f"{decimal}?"
    return f"{value.numerator}/{value.denominator}"
