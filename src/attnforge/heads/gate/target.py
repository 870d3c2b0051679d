"""What gates compute, as exact data: piecewise linear functions by their lines, and logistic ones by their two values.

`gate_target` is for a gate asked for by name, `target_of` for a function of the registry: what a certificate compares a
gate with. Nothing here is a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ...arguments import number
from ...errors import ArgumentError, closest
from ...functions.univariate import Univariate
from ..choose import Gate, choose, gate_of, straight

Line = tuple[Fraction, Fraction]  # slope and intercept, exact
ALIASES = {"clip": "ramp", "clamp": "ramp", "hardtanh": "hard_tanh", "swish": "silu"}


@dataclass(frozen=True)
class Lines:
    """A continuous piecewise linear target: lines[i] holds between knots[i-1] and knots[i]."""

    knots: tuple[float, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Logistic:
    """The target sigmoid(rate y) high(y) + sigmoid(-rate y) low(y)."""

    rate: float
    high: Line
    low: Line


@dataclass(frozen=True)
class Relu:
    """One term weight * relu(side * (y - knot)) of a piecewise linear function (lemma B3)."""

    knot: float
    side: int
    weight: float


@dataclass(frozen=True)
class GateTarget:
    """One gate: what it computes, as `shape` and in words, and how many heads of which kind that takes.

    `relus` and `level` are its terms where it is a sum of relus (lemma B3). `kind` is (key coordinates, memory slots,
    value channels). With `pair` the inputs are x and y, else y.
    """

    name: str
    shape: Lines | Logistic
    text: str
    lemma: str
    heads: int = 1
    kind: tuple[int, int, int] = (1, 1, 1)
    relus: tuple[Relu, ...] = ()
    level: float = 0.0
    pair: bool = False

    @property
    def exact(self) -> bool:
        """Whether the head is the target in real arithmetic, so that there is no sharpness to choose."""
        return isinstance(self.shape, Logistic)


ZERO, ONE = Fraction(0), Fraction(1)


def _piecewise(name: str, text: str, knots: Sequence[float], slopes: Sequence[Fraction], value: Fraction) -> GateTarget:
    """The continuous function with these kinks and slopes, and `value` at the pivot, the middle knot (lemma B3)."""
    pivot = (len(knots) - 1) // 2
    lines = lines_through(knots, slopes, value)
    parts = [Relu(knots[pivot], 1, float(slopes[pivot + 1])), Relu(knots[pivot], -1, float(-slopes[pivot]))]
    for i, knot in enumerate(knots):
        if i != pivot:
            parts.append(Relu(knot, 1 if i > pivot else -1, float(slopes[i + 1] - slopes[i])))
    live = tuple(part for part in parts if part.weight != 0) or tuple(parts[:1])
    return GateTarget(name, lines, text, "B1", heads=len(live), relus=live, level=float(value))


def lines_through(knots: Sequence[float], slopes: Sequence[Fraction], value: Fraction) -> Lines:
    """The lines of a continuous function with these kinks and slopes, and `value` at the middle knot."""
    pivot = (len(knots) - 1) // 2
    intercepts = {pivot: value - slopes[pivot] * Fraction(knots[pivot])}
    for i in range(pivot + 1, len(slopes)):
        intercepts[i] = intercepts[i - 1] + (slopes[i - 1] - slopes[i]) * Fraction(knots[i - 1])
    for i in range(pivot - 1, -1, -1):
        intercepts[i] = intercepts[i + 1] + (slopes[i + 1] - slopes[i]) * Fraction(knots[i])
    return Lines(tuple(knots), tuple((slope, intercepts[i]) for i, slope in enumerate(slopes)))


def _leaky_relu(slope: float = 0.01) -> GateTarget:
    rate = number("slope", slope)
    return _piecewise("leaky_relu", f"leaky_relu(y, {rate!r})", (0.0,), (Fraction(rate), ONE), ZERO)


def _ramp(a: float, b: float) -> GateTarget:
    low, high = number("a", a), number("b", b)
    if low >= high:
        raise ArgumentError(f"a ramp needs a < b, got a = {low:g} and b = {high:g}")
    lines = Lines((low, high), ((ZERO, Fraction(low)), (ONE, ZERO), (ZERO, Fraction(high))))
    return GateTarget("ramp", lines, f"clip(y, {low!r}, {high!r})", "B2", kind=(2, 2, 1))


def _extremum(name: str) -> GateTarget:
    below, above = (ZERO, ONE) if name == "max" else (ONE, ZERO)  # of the part that is a function of x - y
    return GateTarget(name, Lines((0.0,), ((below, ZERO), (above, ZERO))), f"{name}(x, y)", "B3", pair=True)


def _logistic(name: str, rate: float, high: Line, low: float) -> GateTarget:
    return GateTarget(name, Logistic(rate, high, (ZERO, Fraction(low))), f"{name}(y)", "B4")


def _piecewise_linear(xs: Sequence[float], ys: Sequence[float]) -> GateTarget:
    x, y = ([number(name, v) for v in values] for name, values in (("xs", xs), ("ys", ys)))
    if len(x) != len(y) or len(x) < 2 or any(b <= a for a, b in itertools.pairwise(x)):
        raise ArgumentError(f"piecewise_linear needs increasing xs and as many ys, at least 2; got xs = {x}, ys = {y}")
    points = [(Fraction(a), Fraction(b)) for a, b in zip(x, y, strict=True)]
    slopes = [(q[1] - p[1]) / (q[0] - p[0]) for p, q in itertools.pairwise(points)]
    knots, heights = (x[1:-1], y[1:-1]) if len(x) > 2 else (x[:1], y[:1])
    slopes = slopes if len(x) > 2 else slopes * 2  # a straight line: a kink of no bend
    value = Fraction(heights[(len(knots) - 1) // 2])
    return _piecewise("piecewise_linear", f"piecewise_linear({x}, {y})", knots, slopes, value)


GATES: dict[str, Callable[..., GateTarget]] = {
    "relu": lambda: _piecewise("relu", "relu(y)", (0.0,), (ZERO, ONE), ZERO),
    "ramp": _ramp,
    "abs": lambda: _piecewise("abs", "abs(y)", (0.0,), (-ONE, ONE), ZERO),
    "leaky_relu": _leaky_relu,
    "hard_tanh": lambda: replace(_ramp(-1.0, 1.0), name="hard_tanh"),
    "max": lambda: _extremum("max"),
    "min": lambda: _extremum("min"),
    "silu": lambda: _logistic("silu", 1.0, (ONE, ZERO), 0.0),
    "sigmoid": lambda: _logistic("sigmoid", 1.0, (ZERO, ONE), 0.0),
    "tanh": lambda: _logistic("tanh", 2.0, (ZERO, ONE), -1.0),
    "piecewise_linear": _piecewise_linear,
}
PARAMETERS = {"ramp": ("a", "b"), "leaky_relu": ("slope",), "piecewise_linear": ("xs", "ys")}


def gate_target(name: str, **parameters: Any) -> GateTarget:
    """The gate of this name.

    >>> gate_target("ramp", a=-1, b=1).kind, gate_target("abs").heads
    ((2, 2, 1), 2)
    """
    name = ALIASES.get(name, name)
    if name not in GATES:
        hint = closest(str(name), GATES)
        raise ArgumentError(f"there is no gate '{name}'{hint}; known: {', '.join(sorted(GATES))}")
    unknown = sorted(set(parameters) - set(PARAMETERS.get(name, ())))
    if unknown:
        expected = ", ".join(PARAMETERS.get(name, ())) or "no parameters"
        raise ArgumentError(f"the gate '{name}' does not know {', '.join(unknown)}; it takes {expected}")
    missing = sorted(set(PARAMETERS.get(name, ())) - set(parameters) - {"slope"})
    if missing:
        raise ArgumentError(f"the gate '{name}' needs {' and '.join(missing)}")
    return GATES[name](**parameters)


def gate_for(fn: Univariate) -> tuple[str, dict[str, Any]] | None:
    """The gate that is a function of the registry, exactly, by name and parameters; None where there is none.

    >>> from attnforge.functions.registry import get
    >>> gate_for(get("relu6")), gate_for(get("gelu"))
    (('ramp', {'a': 0.0, 'b': 6.0}), None)
    """
    choice = choose(fn)
    return (choice.name, choice.arguments) if isinstance(choice, Gate) else None


def target_of(fn: Univariate) -> GateTarget | None:
    """What a gate for this function is compared with: the function's own lines or values, whatever a file says."""
    line = straight(fn)  # a straight line without kinks is one as well, though no gate is chosen for it
    choice = choose(fn) if line is None else gate_of(line)
    return gate_target(choice.name, **choice.arguments) if isinstance(choice, Gate) else None
