"""Is a formula defined and bounded on its box? Refusals name a point (mathematics H1, item 8).

First the formula as it was written: no root or logarithm of a negative number, and no pole, even where it cancels
later, as in x/x, 0*log(x) or 1/x - 1/x. Then the normal form: no pole, unless the function of one scalar around it is
bounded all the same, as sin(x)/x is.

Points where a formula is undefined or unbounded are found by search and confirmed in ball arithmetic. Where the search
finds none nothing is refused: the enclosure of the ranges has the last word, and an argument of a root may touch 0.
Only what has cancelled is in no range any more: it must be shown to be defined.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial as partial_

import torch
from flint import arb
from torch import Tensor

from ...box import Box
from ...errors import ArgumentError, DomainError
from ...expressions.composite import composed
from ...expressions.constants import ball
from ...expressions.evaluate import Formula, balls, tensors
from ...expressions.expression import Call, Expr, Monomial, Partial, Sum, Variable, reachable, rebuilt, touches
from ...functions.directed import high_end, low_end, precision
from ...functions.registry import power
from ...functions.univariate import Domain, Univariate
from .normal import Cuts, by_scalar

_CORNERS = 256  # where a search starts: all corners of a box of eight variables
_SAMPLES = 512  # and as many points between them again, twice
_ROUNDS = 60  # of a pattern search, half of which may halve its step: 2^-30 of the box
_TINY = 1e-30  # an argument this close to a pole counts as meeting it
_MOST_CELLS = 2000  # looked at before a function counts as not shown to be defined or bounded
_ASIDE = 1e-3  # of the box: how far from an open end the box starts that a refusal proposes
_LARGEST = sys.float_info.max
Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class WitnessSearch:
    """Where to look for witnesses: the box, by the names of its variables."""

    box: Box

    @property
    def names(self) -> tuple[str, ...]:
        return self.box.names or ()

    def refuse(self, partial: Partial, stated: Domain | None = None) -> None:
        """Raise `DomainError` when the box has a point at which the argument leaves the domain or meets a pole.

        The message speaks of the domain that is `stated`, where that is another one.
        """
        words = stated or partial.domain
        domain, argument = partial.domain, partial.argument
        below, above = domain.reaches(*argument.range)
        formula = Formula.of(argument)
        for leaves, sign, end, closed, said in (
            (below, 1, domain.lo, domain.lo_closed, f"{'>=' if words.lo_closed else '>'} {domain.lo:g}"),
            (above, -1, domain.hi, domain.hi_closed, f"{'<=' if words.hi_closed else '<'} {domain.hi:g}"),
        ):
            if not leaves:
                continue
            point = self._lowest(formula, argument, partial_(_inside_by, sign, end))
            value = self.exact(formula, point)
            outside = value < end if sign > 0 else value > end
            if outside or (not closed and self._meets(formula, point, end)):
                raise DomainError(self._undefined(partial, point, value, said))
        pole = domain.pole_in(*argument.range) if math.isfinite(sum(argument.range)) else None
        for place in (pole,) if domain.period is not None else domain.poles:
            if place is not None and argument.range[0] <= place <= argument.range[1]:
                self._refuse_pole(partial, formula, place)

    def shows(self, partial: Partial) -> bool:
        """Whether balls show that the argument stays in the domain, on cells of the box that are split where needed."""
        formula, domain = Formula.of(partial.argument), partial.domain
        axes = [i for i, name in enumerate(self.names) if name in {v.name for v in partial.argument.variables}]
        cells, count = [(self.box.lower.tolist(), self.box.upper.tolist())], 0
        with precision():
            while cells:
                low, high = cells.pop()
                count += 1
                inputs = {name: arb(a).union(arb(b)) for name, a, b in zip(self.names, low, high, strict=True)}
                value = balls(formula, inputs)[partial.argument]
                if value.is_finite() and not touches(domain, (low_end(value), high_end(value))):
                    continue
                i = max(axes, key=lambda i: high[i] - low[i])
                middle = 0.5 * low[i] + 0.5 * high[i]
                if count > _MOST_CELLS or not low[i] < middle < high[i]:
                    return False
                cells += [(low, [*high[:i], middle, *high[i + 1 :]]), ([*low[:i], middle, *low[i + 1 :]], high)]
        return True

    def refuse_overflow(self, root: Expr) -> None:
        """Raise `DomainError` when a subexpression certainly exceeds float64 at one of the points looked at."""
        formula, points = Formula.of(root), self.points()
        found = tensors(formula, {name: points[:, i] for i, name in enumerate(self.names)})
        for node in formula.order:
            for point in points[found[node].isinf()][:4]:
                value = self.exact(Formula.of(node), point)
                if abs(value) > _LARGEST:
                    raise DomainError(
                        f"{node.short()} overflows float64 (1.8e308) at {self.words(point)}; choose a smaller box"
                    )

    def _undefined(self, partial: Partial, point: Tensor, value: arb, relation: str) -> str:
        argument = partial.argument.short()
        return (
            f"{partial.text} is undefined at {self.words(point)}: there {argument} is {_number(value)}, "
            f"but it must be {relation}; choose a box on which it is{self._such_as(partial)}"
        )

    def _such_as(self, partial: Partial) -> str:
        """A box that leaves an open end alone, where a variable itself starts there."""
        x, domain = partial.argument, partial.domain
        if not isinstance(x, Variable) or domain.lo_closed or x.range[0] != domain.lo or not x.range[1] > domain.lo:
            return ""
        start = domain.lo + _ASIDE * (x.range[1] - domain.lo)
        return f", such as {x.name} from {start:g} to {x.range[1]:g}"

    def _refuse_pole(self, partial: Partial, formula: Formula, place: float) -> None:
        argument = partial.argument
        point = self._crossing(formula, argument, place)
        if point is not None:
            name = "0" if place == 0 else f"{place:.10g}"
            raise DomainError(
                f"{partial.text} is unbounded: {argument.short()} is {name} at {self.words(point)}; "
                f"choose a box on which {argument.short()} stays away from {name}"
            )

    def _crossing(self, formula: Formula, argument: Expr, place: float) -> Tensor | None:
        points = self.points()
        values = self._values(formula, argument, points) - place
        low, high = points[values.argmin()], points[values.argmax()]
        if values.min() < 0 < values.max() and self.exact(formula, low) < place and self.exact(formula, high) > place:
            for _ in range(80):
                middle = 0.5 * (low + high)
                under = bool(self._values(formula, argument, middle[None])[0] < place)
                low, high = (middle, high) if under else (low, middle)
            return high
        point = self._lowest(formula, argument, lambda v: (v - place).abs())
        return point if self._meets(formula, point, place) else None

    def _meets(self, formula: Formula, point: Tensor, place: float) -> bool:
        """Whether the argument equals the place, as far as float64 can tell: up to the rounding of its terms."""
        value, argument = self.exact(formula, point), formula.roots[0]
        size = abs(arb(place))
        if isinstance(argument, Sum):
            parts = Formula.of(*(term for term, _ in argument.terms))
            found = self._balls(parts, point)
            size += sum((abs(found[term] * ball(c)) for term, c in argument.terms), abs(ball(argument.constant)))
        return bool(abs(value - place) < _TINY + size * arb(2) ** -51)

    def exact(self, formula: Formula, point: Tensor) -> arb:
        """A tight ball of the formula's only root at a point; NaN where it is undefined."""
        return self._balls(formula, point)[formula.roots[0]]

    def _balls(self, formula: Formula, point: Tensor) -> dict[Expr, arb]:
        with precision(256):
            return balls(formula, {name: arb(x) for name, x in zip(self.names, point.tolist(), strict=True)})

    def points(self) -> Tensor:
        """Corners, the centre, the centres of the faces, and uniform points."""
        low, high = self.box.lower, self.box.upper
        middle = 0.5 * (low + high)
        faces = middle.repeat(2 * len(middle), 1)
        for i in range(len(middle)):
            faces[2 * i, i], faces[2 * i + 1, i] = low[i], high[i]
        # 0 is where quotients fail: a copy of the centre with every coordinate that can be 0 set to it
        origin = torch.where((low <= 0) & (high >= 0), torch.zeros_like(middle), middle)
        parts = (self.box.corners(_CORNERS), middle[None], origin[None], faces, self.box.sample(_SAMPLES, seed=1))
        return torch.cat(parts)

    def _values(self, formula: Formula, argument: Expr, points: Tensor) -> Tensor:
        return tensors(formula, {name: points[:, i] for i, name in enumerate(self.names)})[argument]

    def _lowest(self, formula: Formula, argument: Expr, score: Score) -> Tensor:
        """The point of the lowest score: the best sample, improved by a pattern search unless it is below 0 already."""
        points = self.points()
        scores = score(self._values(formula, argument, points)).nan_to_num(nan=math.inf)
        best, value = points[scores.argmin()], float(scores.min())
        low, high = self.box.lower, self.box.upper
        step = 0.25 * (high - low)
        directions = torch.cat([torch.eye(len(low)), -torch.eye(len(low))]).double()
        for _ in range(_ROUNDS):
            if value < 0 or not float(step.max()) > 0:
                break
            tries = torch.minimum(torch.maximum(best + directions * step, low), high)
            scores = score(self._values(formula, argument, tries)).nan_to_num(nan=math.inf)
            if float(scores.min()) < value:
                best, value = tries[scores.argmin()], float(scores.min())
            else:
                step = step * 0.5
        return best

    def words(self, point: Tensor) -> str:
        return ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.names, point.tolist(), strict=True))


def _inside_by(sign: int, end: float, v: Tensor) -> Tensor:
    """How far values are on the inner side of an end of a domain: above it for sign 1, below it for sign -1."""
    return sign * (v - end)


def _number(value: arb) -> str:
    return f"{float(value):.6g}" if value.is_finite() else "undefined"


def refuse_undefined(cuts: Cuts, roots: Sequence[Expr], box: Box) -> None:
    """Raise `DomainError`, with a witness, where the expressions are undefined or unbounded on the box."""
    search = WitnessSearch(box)
    seen: set[tuple[Expr, Domain]] = set()
    written, inverted = tuple(cuts.graph.partial), tuple(cuts.graph.inverted)
    for partial in written:
        closed = replace(partial.domain, lo_closed=True, hi_closed=True, poles=())
        if (partial.argument, closed) not in seen and any(closed.reaches(*partial.argument.range)):
            seen.add((partial.argument, closed))
            search.refuse(replace(partial, domain=closed), stated=partial.domain)
    for partial in _cancelled(roots, written, inverted):
        search.refuse(partial)
        if not search.shows(partial):
            raise DomainError(
                f"{partial.text} cancels, but cannot be shown to be defined everywhere on the box: "
                f"{partial.argument.short()} may leave its domain; choose a smaller box, or leave it out"
            )
    _visit(cuts, search, roots, {(partial.argument, partial.domain): partial.text for partial in written})
    for root in roots:
        if not all(map(math.isfinite, root.range)):
            search.refuse_overflow(root)


def over_common(cuts: Cuts, roots: Sequence[Expr]) -> list[Expr]:
    """The roots with terms of one scalar whose poles cancel over one denominator: 1/tanh(x) - 1/x is
    (x - tanh(x))/(x*tanh(x)), which is bounded. Sums that stay unbounded are left as they are."""
    graph = cuts.graph

    def rewrite(node: Expr) -> Expr:
        if not isinstance(node, Sum):
            return node
        groups: dict[Expr, list[tuple[Monomial, Fraction]]] = {}
        for term, c in node.terms:
            scalar = cuts.cut(term)
            if scalar is not None and isinstance(term, Monomial) and _poles(term):
                groups.setdefault(scalar, []).append((term, c))
        for scalar, terms in groups.items():
            below: dict[Expr, Fraction] = {}
            for term, _ in terms:
                for base, p in _poles(term):
                    below[base] = max(below.get(base, Fraction(0)), -p)
            above = graph.sum([(graph.product([(term, 1), *below.items()]), c) for term, c in terms])
            together = graph.product([(above, 1), *((base, -p) for base, p in below.items())])
            if len(terms) > 1 and cuts.cut(together) is scalar and _bounded(cuts, together, scalar):
                taken = {term for term, _ in terms}
                rest = [(term, c) for term, c in node.terms if term not in taken]
                return rewrite(graph.sum([*rest, (together, 1)], node.constant))
        return node

    if not any(isinstance(node, Monomial) and _poles(node) for node in reachable(roots)):
        return list(roots)
    return rebuilt(graph, roots, rewrite=rewrite)


def _poles(node: Monomial) -> list[tuple[Expr, Fraction]]:
    """The factors of a product that divide by what may be 0."""
    return [(b, p) for b, p in node.factors if p < 0 and p.denominator == 1 and b.range[0] <= 0 <= b.range[1]]


def _cancelled(
    roots: Sequence[Expr], written: Sequence[Partial], inverted: Sequence[tuple[Expr, Fraction]]
) -> list[Partial]:
    """What the formula was written with and is not in its normal form any more, where it has poles or open ends."""
    left = {(partial.argument, partial.domain) for node in reachable(roots) for partial in _partials(node)}
    powers = [Partial(base.graph.product([(base, p)]).short(), base, power(p).domain) for base, p in inverted]
    found = {(p.argument, p.domain): p for p in (*written, *powers) if _has_edge(p.domain)}
    return [partial for key, partial in found.items() if key not in left]


def _has_edge(domain: Domain) -> bool:
    """Whether a function of this domain is unbounded somewhere: at a pole or at an open end."""
    return bool(domain.poles) or not (domain.lo_closed and domain.hi_closed)


def _partials(node: Expr) -> list[Partial]:
    """The arguments of a node that must lie in a domain."""
    if isinstance(node, Call):
        return [Partial(node.short(), node.argument, node.function.domain)]
    if isinstance(node, Monomial):
        single = [node.graph.product([factor]).short() for factor in node.factors]
        return [Partial(t, b, power(p).domain) for t, (b, p) in zip(single, node.factors, strict=True)]
    return []


def _touches(partial: Partial) -> bool:
    """Whether the argument's range meets a pole or an open end; closed ends have been looked at already."""
    domain, (low, high) = partial.domain, partial.argument.range
    ends = (low <= domain.lo and not domain.lo_closed) or (high >= domain.hi and not domain.hi_closed)
    return ends or any(low <= pole <= high for pole in domain.poles) or domain.offence("", low, high) is not None


def _visit(cuts: Cuts, search: WitnessSearch, roots: Sequence[Expr], texts: Mapping[tuple[Expr, Domain], str]) -> None:
    """Walk down; below a function of one scalar that is shown to be bounded only the scalar matters.

    `texts` are what people wrote where the normal form has something else, such as x**y.
    """
    todo, done = list(roots), set()
    while todo:
        node = todo.pop()
        if node in done:
            continue
        done.add(node)
        if not any(_touches(partial) for part in reachable([node]) for partial in _partials(part)):
            continue
        scalar = cuts.cut(node)
        if scalar is not None and scalar is not node and _bounded(cuts, node, scalar):
            todo.append(scalar)
            continue
        parts = by_scalar(cuts.graph, cuts, node) if isinstance(node, Monomial) else []
        if len(parts) > 1:
            todo.extend(parts)
            continue
        for partial in _partials(node):
            if _touches(partial):
                said = texts.get((partial.argument, partial.domain), partial.text)
                search.refuse(replace(partial, text=said))
        todo.extend(node.children)


def _bounded(cuts: Cuts, node: Expr, scalar: Expr) -> bool:
    inner, a, b = cuts.function(node, scalar)
    if isinstance(inner, Sum):
        return False
    try:
        function = composed(inner)
    except ArgumentError:
        return False
    return is_bounded(function, *cuts.graph.sum([(scalar, a)], b).range)


def is_bounded(function: Univariate, lo: float, hi: float) -> bool:
    """Whether ball arithmetic shows the function to be finite on [lo, hi], splitting where it does not at once."""
    if function.domain.offence("", lo, hi) is not None:
        return False
    cells, count = [(lo, hi)], 0
    with precision():
        while cells:
            a, b = cells.pop()
            count += 1
            middle = 0.5 * a + 0.5 * b
            if function.ball(arb(a).union(arb(b))).is_finite():
                continue
            if count > _MOST_CELLS or not a < middle < b:
                return False
            cells += [(a, middle), (middle, b)]
    return True
