"""Which head computes which function: the one place that decides.

`choose` looks at what a function is made of, not at its name. In ball arithmetic it proves that pieces between kinks
are straight (their second derivative is exactly 0 on the whole line) or parabolas (the third is), and reads off exact
points. What it returns is frozen data and equals the function exactly:

    Gate         the function is a gate: straight lines with kinks (lemmas B1 to B3), or sigmoid, tanh, silu (B4)
    GateProduct  y times a gate, by a gate head and a product head: hardswish, squared_relu, y abs(y)
    Pieces       straight lines, plus every curved piece read where the argument is clipped to it: elu, selu, softsign
    Anchors      a table of anchors and a linear skip: everything without kinks, and what is not proved to be the above

`fast_form` says which functions one exponential per element serves on the whole line (lemma A8). Nothing here builds
weights; `heads.build.head_for` does. The compiler plans from the same answers: `Gate.arguments` are those of the gate's
construction, and `Gate.function` is the gate as a function that a program can apply.

`expanded` writes out in a program what `choose` takes apart, so that every function is one that a single head computes:
y times a gate becomes an application of the gate and a product; a function with curved pieces becomes its lines plus
each piece applied to the clipped argument. Both are equalities, so that the program computes exactly the same.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from flint import arb, arb_series

from ..box import round_outward
from ..functions.directed import precision
from ..functions.parts import BITS, piece_of, tail_at
from ..functions.registry import Univariate, parse, piecewise_linear
from ..functions.univariate import REALS, Series
from ..programs.enclose import Range
from ..programs.ops import Apply
from ..programs.program import Builder, Program, rewritten

#: Gates that are their function exactly: two slots, no sharpness (lemma B4).
LOGISTIC = ("sigmoid", "tanh", "silu")
WHOLE = 2.0**1000  # proofs hold for |y| up to this: intervals of heads end at 2^900
#: Distances from the last kink at which a point with an exact value is looked for: a slope with a small denominator has
#: one among the whole numbers, a short slope among the powers of two.
STEPS = (*range(1, 65), 0.5, 0.25, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Polyline:
    """The continuous function through the points (xs, ys), straight between them and beyond them; all of it exact.

    >>> Polyline((-1.0, 0.0, 3.0), (0.0, 0.0, 1.0)).slopes
    (Fraction(0, 1), Fraction(1, 3))
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @property
    def slopes(self) -> tuple[Fraction, ...]:
        """The slope between each two points."""
        points = [(Fraction(x), Fraction(y)) for x, y in zip(self.xs, self.ys, strict=True)]
        return tuple((q[1] - p[1]) / (q[0] - p[0]) for p, q in itertools.pairwise(points))

    @property
    def knots(self) -> tuple[float, ...]:
        """The points between the first and the last."""
        return self.xs[1:-1]

    @property
    def lines(self) -> tuple[tuple[Fraction, Fraction], ...]:
        """Slope and intercept between each two points."""
        return tuple((a, Fraction(y) - a * Fraction(x)) for a, x, y in zip(self.slopes, self.xs, self.ys, strict=False))

    def draws(self, other: Polyline) -> bool:
        """Whether both are the same function."""
        mine, theirs = self.plain(), other.plain()
        return (mine.knots, mine.lines) == (theirs.knots, theirs.lines)

    def plain(self) -> Polyline:
        """The same function without points that are no kinks."""
        slopes = self.slopes
        bent = [i for i in range(1, len(self.xs) - 1) if slopes[i - 1] != slopes[i]]
        kept = [0, *bent, len(self.xs) - 1]
        return Polyline(tuple(self.xs[i] for i in kept), tuple(self.ys[i] for i in kept))


@dataclass(frozen=True)
class Gate:
    """A gate head with these parameters is the function; `line` is what it draws, None for `LOGISTIC` gates."""

    name: str
    parameters: tuple[tuple[str, float | tuple[float, ...]], ...] = ()
    line: Polyline | None = None
    family: ClassVar[str] = "gate"

    @property
    def arguments(self) -> dict[str, Any]:
        """The parameters as the gate's construction takes them, and as JSON holds them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.parameters}

    @property
    def exact(self) -> bool:
        """Whether the gate is the function at any temperature, so that it has no sharpness."""
        return self.line is None

    @property
    def function(self) -> Univariate:
        """The gate as a function of its own: `choose(gate.function)` is the gate again."""
        return parse(self.name) if self.line is None else piecewise_linear(self.line.xs, self.line.ys)


@dataclass(frozen=True)
class GateProduct:
    """y times a gate of y: exact but for rounding, with one gate and one product."""

    gate: Gate
    family: ClassVar[str] = "chain"


@dataclass(frozen=True)
class Part:
    """One curved piece of a function: the function itself, read at the argument clipped to [lo, hi] by a gate.

    `function` is that piece alone, continued smoothly beyond its ends: what a table is made for when the clipped
    argument may be off by more than rounding.
    """

    clip: Gate
    lo: float
    hi: float
    function: Univariate


@dataclass(frozen=True)
class Pieces:
    """lines(y) + sum over the parts of function(clip(y)): a curve without kinks for each table; lines None is 0.

    A continuous function with knots k is the sum over its pieces of function(y clipped to the piece), less the sum of
    function(k): left of its own piece a term is the function at one knot, right of it at the next, and all but one of
    these cancel. The straight pieces and the constant are one polyline.
    """

    lines: Gate | None
    parts: tuple[Part, ...]
    family: ClassVar[str] = "chain"


@dataclass(frozen=True)
class Anchors:
    """A table of anchors beside a linear skip, which is all of a straight line."""

    family: ClassVar[str] = "anchor"


Choice = Gate | GateProduct | Pieces | Anchors


@dataclass(frozen=True)
class Fast:
    """A function as a self head y sigmoid(slope y), and a table for what is left, with one exponential per element.

    `slopes` are those to try, none without a gate. `table` is the two values of a function that is a table of two keys
    by itself, and `rate` that of its keys; `bump` says that a table about `centre` has to be solved for.
    """

    slopes: tuple[float, ...] = ()
    table: tuple[float, float] | None = None
    rate: float = 1.0
    bump: bool = False
    centre: float = 0.0


QUICK = 1.702  # the slope in the definition of quick_gelu
_GELU = Fast(slopes=(1.75, 1.875, 2.0, 2.125), bump=True)  # about 1.702 to 2.2 the bump is small; few bits, exact keys
#: A slope of infinity is a relu: as steep as the dtype deserves.
_FAST = {
    "sigmoid": Fast(table=(0.0, 1.0)),
    "tanh": Fast(table=(-1.0, 1.0), rate=2.0),
    "silu": Fast(slopes=(1.0,)),
    "quick_gelu": Fast(slopes=(QUICK,)),
    "relu": Fast(slopes=(math.inf,)),
    "gelu": _GELU,
    "gelu_tanh": _GELU,
    "softplus": Fast(slopes=(1.0,), bump=True),
    "mish": Fast(slopes=(1.0,), bump=True, centre=4.5),  # where the bump of mish has its middle
}
FAST = tuple(_FAST)


def fast_form(function: Univariate) -> Fast | None:
    """How one exponential per element computes a function on the whole line; None where it cannot.

    >>> fast_form(parse("silu")), fast_form(parse("exp"))
    (Fast(slopes=(1.0,), table=None, rate=1.0, bump=False, centre=0.0), None)
    """
    return _FAST.get(function.name) if function.source is None else None


def choose(function: Univariate, lo: float = -math.inf, hi: float = math.inf) -> Choice:
    """What computes a function on [lo, hi], and on all of the float32 numbers around: heads are certified there.

    >>> choose(parse("relu6")).name, choose(parse("hardswish")).gate == choose(parse("hardsigmoid"))
    ('ramp', True)
    >>> choose(parse("elu"), -8, 8).lines.name, choose(parse("elu"), 1, 8).family, choose(parse("gelu")).family
    ('relu', 'anchor', 'anchor')
    """
    if function.name in LOGISTIC and function.source is None:  # a user's callable may have any name
        return Gate(function.name)
    line = straight(function)
    if line is not None:
        return gate_of(line) if line.plain().knots else Anchors()
    low, high = round_outward(np.array(lo), np.array(hi), torch.float32)
    inside = tuple(k for k in function.knots if low < k < high)
    if all(_smooth(function, k) for k in inside):
        return Anchors()
    quotient = _quotient(function) if inside else None
    if quotient is not None and quotient.plain().knots:
        return GateProduct(gate_of(quotient))
    return _pieces(function, inside, float(low), float(high)) or Anchors()


def gate_of(line: Polyline) -> Gate:
    """The smallest gate that draws a polyline.

    >>> gate_of(Polyline((-2.0, -1.0, 1.0, 2.0), (-1.0, -1.0, 1.0, 1.0))).name
    'hard_tanh'
    """
    line = line.plain()
    knots, slopes, heights = line.knots, line.slopes, line.ys[1:-1]
    if knots == heights == (0.0,) and slopes[1] == 1:
        named = {Fraction(0): "relu", Fraction(-1): "abs"}.get(slopes[0])
        if named is not None:
            return Gate(named, (), line)
        if (slope := _float(slopes[0])) is not None:
            return Gate("leaky_relu", (("slope", slope),), line)
    if len(knots) == 2 and knots == heights and slopes == (Fraction(0), Fraction(1), Fraction(0)):
        low, high = knots
        return Gate("hard_tanh", (), line) if (low, high) == (-1, 1) else Gate("ramp", (("a", low), ("b", high)), line)
    return Gate("piecewise_linear", (("xs", line.xs), ("ys", line.ys)), line)


def line_of(name: str, parameters: Mapping[str, Any]) -> Polyline | None:
    """The polyline that a gate with these parameters draws: the inverse of `gate_of`; None for other gates.

    >>> line_of("ramp", {"a": 0.0, "b": 6.0}).ys
    (0.0, 0.0, 6.0, 6.0)
    """
    match name:
        case "relu" | "abs" | "leaky_relu":
            slope = {"relu": 0.0, "abs": -1.0}.get(name, parameters.get("slope", 0.01))
            return Polyline((-1.0, 0.0, 1.0), (-slope, 0.0, 1.0))
        case "ramp" | "hard_tanh":
            return _clip(parameters.get("a", -1.0), parameters.get("b", 1.0))
        case "piecewise_linear":
            return Polyline(tuple(parameters["xs"]), tuple(parameters["ys"]))
    return None


@functools.lru_cache(maxsize=512)
def straight(function: Univariate) -> Polyline | None:
    """The polyline that a function is, proved; None for anything else.

    >>> straight(parse("hardsigmoid"))
    Polyline(xs=(-4.0, -3.0, 3.0, 4.0), ys=(0.0, 0.0, 1.0, 1.0))
    """
    if not _polynomial(function, 1):
        return None
    given = _given(function)
    if given is not None:
        return given
    branches, knots = function.branches, function.knots
    heights = [_exact(branches[i], k) for i, k in enumerate(knots)]
    ends = _beyond(branches[0], knots[0] if knots else 0.0, -1), _beyond(branches[-1], knots[-1] if knots else 0.0, 1)
    return _polyline(ends[0], zip(knots, heights, strict=True), ends[1])


@functools.lru_cache(maxsize=512)
def _quotient(function: Univariate) -> Polyline | None:
    """The polyline function(y) / y, where that is one: all pieces are multiples of y, of degree 2 at most."""
    branches, knots = function.branches, function.knots
    if not _polynomial(function, 2) or any(_exact(piece, 0.0) != 0 for piece in branches):
        return None
    heights: list[float | None] = []
    for i, k in enumerate(knots):
        if k == 0:  # the quotient there is the slope, from both sides
            left, right = (_exact(piece, 0.0, 1) for piece in branches[i : i + 2])
            heights.append(left if left == right else None)
        else:
            heights.append(_over(_exact(branches[i], k), k))
    ends = _beyond(branches[0], knots[0], -1, divided=True), _beyond(branches[-1], knots[-1], 1, divided=True)
    return _polyline(ends[0], zip(knots, heights, strict=True), ends[1])


@functools.lru_cache(maxsize=512)
def _pieces(function: Univariate, inside: tuple[float, ...], lo: float, hi: float) -> Pieces | Gate | None:
    """Straight pieces as one gate, curved ones clipped; None without kinks inside, or with a vertical one."""
    if not inside or function.domain != REALS or not function.branches:
        return None
    first = sum(k <= lo for k in function.knots)
    branches = function.branches[first : first + len(inside) + 1]
    flat = [_degree(piece, 1) for piece in branches]
    heights = [_exact(branches[i], k) for i, k in enumerate(inside)]
    steep = any(not _slope(piece, k).is_finite() for i, k in enumerate(inside) for piece in branches[i : i + 2])
    if steep or any(height is None for height in heights):
        return None
    at = [Fraction(height) for height in heights if height is not None]
    curved = [i for i, is_flat in enumerate(flat) if not is_flat]

    def curves(j: int) -> Fraction:
        """What the curved parts add up to at knot j: each is at the end of its piece that is nearer to the knot."""
        return sum((at[i - 1] if j < i else at[i] for i in curved), Fraction(0))

    rest = [_float(height - curves(j)) for j, height in enumerate(at)]
    outer: list[tuple[float, float] | None] = []
    for side, i, j in ((-1, 0, 0), (1, -1, len(inside) - 1)):
        level = rest[j]
        if flat[i]:
            outer.append(_beyond(branches[i], inside[j], side, less=curves(j)))
        else:
            outer.append(None if level is None else (_away(inside[j], side), level))
    line = _polyline(outer[0], zip(inside, rest, strict=True), outer[1])
    if line is None:
        return None
    borders = (None, *inside, None)
    parts = []
    for i in curved:
        left, right = borders[i : i + 2]
        ends = lo if left is None else left, hi if right is None else right
        parts.append(Part(clip_of(left, right), *ends, piece_of(function, first + i)))
    return Pieces(gate_of(line) if any(line.ys) else None, tuple(parts)) if parts else gate_of(line)


def _smooth(function: Univariate, knot: float) -> bool:
    """Whether a knot is none that a table would notice: value and derivatives up to `SMOOTH` may agree there."""
    if not function.branches:
        return True
    i = function.knots.index(knot)
    left, right = (tail_at(piece, knot) for piece in function.branches[i : i + 2])
    return all(a.overlaps(b) for a, b in zip(left, right, strict=True))


def clip_of(low: float | None, high: float | None) -> Gate:
    """The gate that is max(y, low), min(y, high) or both.

    >>> clip_of(0.0, None).name
    'relu'
    """
    return gate_of(_clip(low, high))


def _clip(low: float | None, high: float | None) -> Polyline:
    """max(y, low), min(y, high) or both."""
    if low is None:
        assert high is not None
        below = (_away(high, -1),) * 2
    else:
        below = _away(low, -1), low
    if high is None:
        assert low is not None
        above = (_away(low, 1),) * 2
    else:
        above = _away(high, 1), high
    points = [below, *((k, k) for k in (low, high) if k is not None), above]
    xs, ys = zip(*points, strict=True)
    return Polyline(xs, ys)


def _away(x: float, side: int) -> float:
    """A number beside x."""
    return x + side * max(1.0, abs(x))


def _given(function: Univariate) -> Polyline | None:
    """The points of a `piecewise_linear`, whose name holds them."""
    word, _, rest = function.name.partition("(")
    if word != "piecewise_linear" or function.source is not None:
        return None
    xs, ys = json.loads(f"[{rest.removesuffix(')')}]")
    return Polyline(tuple(map(float, xs)), tuple(map(float, ys)))


def _polynomial(function: Univariate, degree: int) -> bool:
    """Whether every piece of a function is a polynomial of at most this degree on the whole line."""
    if function.domain != REALS or not function.branches:
        return False
    return all(_degree(piece, degree) for piece in function.branches)


def _degree(piece: Series, degree: int) -> bool:
    """Whether the Taylor coefficient after the last is exactly 0 everywhere: a ball of radius 0 around 0 proves it."""
    with precision(BITS, degree + 2):
        return bool(piece(arb_series([arb(0, WHOLE), 1], prec=degree + 2))[degree + 1].is_zero())


def _slope(piece: Series, at: float) -> arb:
    with precision(BITS, 2):
        return piece(arb_series([arb(at), 1], prec=2))[1]


def _exact(piece: Series, at: float, order: int = 0) -> float | None:
    """The value (or slope) at a point, where it is known exactly and a float64."""
    with precision(BITS, order + 1):
        found = piece(arb_series([arb(at), 1], prec=order + 1))[order]
        if not (found.is_finite() and found.is_exact()):
            return None
        near = float(found)
        return near if math.isfinite(near) and arb(near) == found else None


def _over(value: float | None, by: float) -> float | None:
    return None if value is None else _float(Fraction(value) / Fraction(by))


def _float(value: Fraction) -> float | None:
    """The float64 equal to a rational, if there is one."""
    near = value.numerator / value.denominator
    return near if Fraction(near) == value else None


def _beyond(
    piece: Series, knot: float, side: int, divided: bool = False, less: Fraction = Fraction(0)
) -> tuple[float, float] | None:
    """A point of a straight piece beyond a knot (`divided` by y, or `less` a constant), where one is exact."""
    for step in STEPS:
        x = knot + side * step
        value = _exact(piece, x) if x not in (0.0, knot) or not divided else None
        value = _over(value, x) if divided else None if value is None else _float(Fraction(value) - less)
        if value is not None and x != knot:
            return x, value
    return None


def _polyline(
    left: tuple[float, float] | None, knots: Iterable[tuple[float, float | None]], right: tuple[float, float] | None
) -> Polyline | None:
    """The polyline through these points, where all of them are known."""
    points = [point or (0.0, None) for point in (left, *knots, right)]
    ys = tuple(y for _, y in points if y is not None)
    return Polyline(tuple(x for x, _ in points), ys) if len(ys) == len(points) else None


def expanded(program: Program, found: Sequence[Range], margin: float = 0.0) -> Program:
    """The same program, each function written out that needs more than one head on its range.

    `found` are the ranges of the program's values; `margin`, a share of a range, is how far beyond it heads will be
    built, so that a kink just outside counts as well: there the piece inside is continued smoothly. The program itself
    where nothing has to be written out.
    """
    ways = {}
    for i, op in enumerate(program.ops):
        if isinstance(op, Apply):
            r = found[op.input]
            low, high = float(np.min(r.low)), float(np.max(r.high))
            room = margin * (high - low)
            choice = choose(op.function, low - room, high + room)
            if isinstance(choice, Pieces) and not any(low < k < high for k in op.function.knots):
                ways[i] = functools.partial(_applied, piece_of(op.function, sum(k <= low for k in op.function.knots)))
            elif isinstance(choice, (GateProduct, Pieces)):
                ways[i] = functools.partial(_written_out, choice)
    return rewritten(program, ways)


def _applied(piece: Univariate, build: Builder, y: int, site: str) -> int:
    return build.apply(y, piece, site)


def _written_out(choice: GateProduct | Pieces, build: Builder, y: int, site: str) -> int:
    if isinstance(choice, GateProduct):
        return build.product(y, build.apply(y, choice.gate.function, f"gate of {site}"), site)
    parts = [] if choice.lines is None else [build.apply(y, choice.lines.function, f"lines of {site}")]
    for part in choice.parts:
        clipped = build.apply(y, part.clip.function, f"clip of {site}")
        parts.append(build.apply(clipped, part.function, f"piece of {site}"))
    return parts[0] if len(parts) == 1 else build.combination([(part, 1.0) for part in parts], label=site)
