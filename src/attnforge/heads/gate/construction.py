"""The gates as data: the slots, keys and values of a relu, a ramp, a maximum, a sigmoid (lemmas B1 to B4 of `gate`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from ...errors import ArgumentError, closest
from ..self_head import SelfSpec, number, positive
from .bound import Lines, Logistic

ALIASES = {"clip": "ramp", "clamp": "ramp", "hardtanh": "hard_tanh", "swish": "silu"}


@dataclass(frozen=True)
class GateSpec:
    """One gate as data: its heads (for `self_head.pack`), and the target that they are compared with.

    `sharpness` is beta, None where the head is exact; with `pair` the input channels are (x, y), else (y,).
    """

    name: str
    heads: SelfSpec
    target: Lines | Logistic
    text: str
    lemma: str
    sharpness: float | None
    pair: bool = False


def _relus(parts: Sequence[tuple[float, int, float]], bias: float, beta: float) -> SelfSpec:
    """bias + the sum over (knot, side, weight) of weight * relu(side * (y - knot)), lemma B1."""
    knot, side, weight = (np.array(column, dtype=np.float64).reshape(-1, 1, 1) for column in zip(*parts, strict=True))
    count = len(parts)
    zero = np.zeros((count, 1, 1))
    return SelfSpec(
        W_Q=side, b_Q=(-side * knot)[:, 0], b_K=np.full((count, 1), beta), W_V=side, b_V=(-side * knot)[:, 0],
        M_K=zero, M_V=zero, W_O=weight, S=np.zeros((1, 1)), s=np.array([bias]),
    )  # fmt: skip


def _piecewise(
    name: str, text: str, knots: Sequence[float], slopes: Sequence[Fraction], value: Fraction, beta: float
) -> GateSpec:
    """The continuous function with these kinks and slopes, and `value` at the pivot, the middle knot (lemma B3)."""
    pivot = (len(knots) - 1) // 2
    intercepts = {pivot: value - slopes[pivot] * Fraction(knots[pivot])}
    for i in range(pivot + 1, len(slopes)):
        intercepts[i] = intercepts[i - 1] + (slopes[i - 1] - slopes[i]) * Fraction(knots[i - 1])
    for i in range(pivot - 1, -1, -1):
        intercepts[i] = intercepts[i + 1] + (slopes[i + 1] - slopes[i]) * Fraction(knots[i])
    lines = tuple((slope, intercepts[i]) for i, slope in enumerate(slopes))
    parts = [(knots[pivot], 1, float(slopes[pivot + 1])), (knots[pivot], -1, float(-slopes[pivot]))]
    for i, knot in enumerate(knots):
        if i != pivot:
            parts.append((knot, 1 if i > pivot else -1, float(slopes[i + 1] - slopes[i])))
    live = [part for part in parts if part[2] != 0] or parts[:1]
    return GateSpec(name, _relus(live, float(value), beta), Lines(tuple(knots), lines), text, "B1", beta)


def _relu(beta: float) -> GateSpec:
    return _piecewise("relu", "relu(y)", (0.0,), (Fraction(0), Fraction(1)), Fraction(0), beta)


def _abs(beta: float) -> GateSpec:
    return _piecewise("abs", "abs(y)", (0.0,), (Fraction(-1), Fraction(1)), Fraction(0), beta)


def _leaky_relu(beta: float, slope: float = 0.01) -> GateSpec:
    rate = number("slope", slope)
    slopes = Fraction(rate), Fraction(1)
    return _piecewise("leaky_relu", f"leaky_relu(y, {rate!r})", (0.0,), slopes, Fraction(0), beta)


def _ramp(beta: float, a: float, b: float) -> GateSpec:
    low, high = number("a", a), number("b", b)
    if low >= high:
        raise ArgumentError(f"a ramp needs a < b, got a = {low:g} and b = {high:g}")
    heads = SelfSpec(
        W_Q=np.ones((1, 1, 2)), b_Q=np.array([[-low, -high]]), b_K=np.zeros((1, 2)), W_V=np.ones((1, 1, 1)),
        b_V=np.zeros((1, 1)), M_K=np.array([[[-beta, 0.0], [0.0, beta]]]), M_V=np.array([[[low], [high]]]),
        W_O=np.ones((1, 1, 1)), S=np.zeros((1, 1)), s=np.zeros(1),
    )  # fmt: skip
    one, zero = Fraction(1), Fraction(0)
    target = Lines((low, high), ((zero, Fraction(low)), (one, zero), (zero, Fraction(high))))
    return GateSpec("ramp", heads, target, f"clip(y, {low!r}, {high!r})", "B2", beta)


def _hard_tanh(beta: float) -> GateSpec:
    return replace(_ramp(beta, -1.0, 1.0), name="hard_tanh")


def _extremum(name: str, beta: float) -> GateSpec:
    sign = 1.0 if name == "max" else -1.0
    both = np.array([[[1.0], [-1.0]]])
    heads = SelfSpec(
        W_Q=both, b_Q=np.zeros((1, 1)), b_K=np.full((1, 1), beta), W_V=both, b_V=np.zeros((1, 1)),
        M_K=np.zeros((1, 1, 1)), M_V=np.zeros((1, 1, 1)), W_O=np.full((1, 1, 1), sign),
        S=np.array([[0.0], [1.0]] if name == "max" else [[1.0], [0.0]]), s=np.zeros(1),
    )  # fmt: skip
    below, above = (0, 1) if name == "max" else (1, 0)  # of the part that is a function of x - y
    target = Lines((0.0,), ((Fraction(below), Fraction(0)), (Fraction(above), Fraction(0))))
    return GateSpec(name, heads, target, f"{name}(x, y)", "B3", beta, pair=True)


def _logistic(name: str, rate: float, value: tuple[float, float], sink: float) -> GateSpec:
    heads = SelfSpec(
        W_Q=np.ones((1, 1, 1)), b_Q=np.zeros((1, 1)), b_K=np.full((1, 1), rate), W_V=np.full((1, 1, 1), value[0]),
        b_V=np.full((1, 1), value[1]), M_K=np.zeros((1, 1, 1)), M_V=np.full((1, 1, 1), sink),
        W_O=np.ones((1, 1, 1)), S=np.zeros((1, 1)), s=np.zeros(1),
    )  # fmt: skip
    target = Logistic(rate, (Fraction(value[0]), Fraction(value[1])), (Fraction(0), Fraction(sink)))
    return GateSpec(name, heads, target, f"{name}(y)", "B4", None)


def _piecewise_linear(beta: float, xs: Sequence[float], ys: Sequence[float]) -> GateSpec:
    x, y = ([number(name, v) for v in values] for name, values in (("xs", xs), ("ys", ys)))
    if len(x) != len(y) or len(x) < 2 or any(b <= a for a, b in itertools.pairwise(x)):
        raise ArgumentError(f"piecewise_linear needs increasing xs and as many ys, at least 2; got xs = {x}, ys = {y}")
    points = [(Fraction(a), Fraction(b)) for a, b in zip(x, y, strict=True)]
    slopes = [(q[1] - p[1]) / (q[0] - p[0]) for p, q in itertools.pairwise(points)]
    knots, heights = (x[1:-1], y[1:-1]) if len(x) > 2 else (x[:1], y[:1])
    slopes = slopes if len(x) > 2 else slopes * 2  # a straight line: a kink of no bend
    value = Fraction(heights[(len(knots) - 1) // 2])
    return _piecewise("piecewise_linear", f"piecewise_linear({x}, {y})", knots, slopes, value, beta)


BUILDERS: dict[str, Callable[..., GateSpec]] = {
    "relu": _relu,
    "ramp": _ramp,
    "abs": _abs,
    "leaky_relu": _leaky_relu,
    "hard_tanh": _hard_tanh,
    "max": lambda beta: _extremum("max", beta),
    "min": lambda beta: _extremum("min", beta),
    "silu": lambda beta: _logistic("silu", 1.0, (1.0, 0.0), 0.0),
    "sigmoid": lambda beta: _logistic("sigmoid", 1.0, (0.0, 1.0), 0.0),
    "tanh": lambda beta: _logistic("tanh", 2.0, (0.0, 1.0), -1.0),
    "piecewise_linear": _piecewise_linear,
}
PARAMETERS = {"ramp": ("a", "b"), "leaky_relu": ("slope",), "piecewise_linear": ("xs", "ys")}


def gate_spec(name: str, sharpness: float, **parameters: Any) -> GateSpec:
    """The gate of this name with beta = sharpness.

    >>> gate_spec("ramp", 1024.0, a=-1, b=1).heads.kind
    (2, 2, 1)
    """
    name = ALIASES.get(name, name)
    if name not in BUILDERS:
        hint = closest(str(name), BUILDERS)
        raise ArgumentError(f"there is no gate '{name}'{hint}; known: {', '.join(sorted(BUILDERS))}")
    unknown = sorted(set(parameters) - set(PARAMETERS.get(name, ())))
    if unknown:
        expected = ", ".join(PARAMETERS.get(name, ())) or "no parameters"
        raise ArgumentError(f"the gate '{name}' does not know {', '.join(unknown)}; it takes {expected}")
    missing = sorted(set(PARAMETERS.get(name, ())) - set(parameters) - {"slope"})
    if missing:
        raise ArgumentError(f"the gate '{name}' needs {' and '.join(missing)}")
    return BUILDERS[name](positive("sharpness", sharpness), **parameters)
