"""`plan`: how large a network would be, by every route, before one is built; or what a given size can reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ..arguments import is_whole
from ..box import Box, Interval, boxes_of
from ..certificates.certificate import aligned, upper_text
from ..dtypes import by_name, dtype_name
from ..errors import ArgumentError, AttnforgeError
from ..progress import shown
from .pipeline import Way, attempt, capture, enclose, searched, tolerance_of, ways
from .plan import sensitivities
from .search import Attempt, Problem, Task, Tolerance


@dataclass(frozen=True)
class Route:
    """One way of building a network: its size, the bound it comes to, and why it may not do."""

    name: str
    layers: int
    heads: float
    anchors: float
    parameters: float
    bound: float | None
    note: str


@dataclass(frozen=True)
class Sizes:
    """Every route for a target at a wanted accuracy, smallest first."""

    HEADER: ClassVar = ("route", "layers", "heads", "anchors", "parameters", "bound", "note")
    target: str
    eps: float
    dtype: str
    routes: tuple[Route, ...]

    @property
    def best(self) -> Route | None:
        """The smallest route whose bound is at most eps."""
        good = [r for r in self.routes if r.bound is not None and r.bound <= self.eps]
        return min(good, key=lambda r: r.parameters, default=None)

    @property
    def title(self) -> str:
        """What the routes are for."""
        return f"routes for {self.target} at eps = {self.eps:g}, {self.dtype}"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The routes as a table below `HEADER`."""
        found = []
        for r in self.routes:
            sizes = (_count(size) for size in (r.heads, r.anchors, r.parameters))
            found.append((r.name, str(r.layers), *sizes, upper_text(r.bound), r.note))
        return found

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned(self.HEADER, self.rows)])


@shown("planning")
@by_name
def plan(
    target: Any,
    box: Box | Mapping[str, Interval] | tuple[Box, ...],
    eps: float | None = None,
    *,
    anchors: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Sizes:
    """The size of every route to a network for `target` with error at most `eps`.

    With `anchors` instead of eps, the question is turned round: the smallest eps that so many anchors in all can reach.

    >>> sizes = plan("sin(x)*y", Box(x=(0, 1), y=(0, 1)), eps=1e-3)
    >>> sizes.best.name
    'compile'
    """
    boxes = boxes_of(box)
    if (eps is None) == (anchors is None):
        raise ArgumentError("give eps (how accurate) or anchors (how large), and not both")
    if eps is None:
        assert anchors is not None
        if not is_whole(anchors, 2):
            raise ArgumentError(f"anchors must be a whole number, at least 2, got {anchors!r}")
        asked, eps = _reachable(target, boxes, anchors, dtype)
    else:
        asked = eps
    wanted = tolerance_of(asked, 0.0, dtype)
    names = ("compile", "compile, products by logarithms", "compile, functions one by one", "compile, chords")
    routes: list[Route] = []
    problems: list[Problem] = []
    for name, way in zip(names, ways(target, boxes), strict=False):
        try:
            other = _problem([way], wanted)
            if any(other.program == known.program for known in problems):
                continue
            problems.append(other)
            # so many anchors are those of the first network; for eps, the search of `compile` itself
            found = _first(other) if anchors is not None else searched([way], wanted, (), _quiet).best
            assert found is not None
            routes.append(_compiled(name, found, asked))
        except AttnforgeError as error:
            if name == names[0]:
                raise
            routes.append(Route(name, 0, 0, 0, 0, None, str(error).splitlines()[0]))
    routes.append(_grid(problems[0], eps))
    ordered = sorted(routes, key=lambda r: (r.bound is None or r.bound > eps, r.parameters))
    return Sizes(problems[0].program.source, eps, dtype_name(wanted.dtype), tuple(ordered))


def _problem(ways_: list[Way], tolerance: Tolerance) -> Problem:
    (program,) = capture(ways_, _quiet)
    return enclose(program, tolerance, (), _quiet)


def _quiet(stage: str) -> None:
    """Stages of a plan are not announced."""


def _first(problem: Problem) -> Attempt:
    return attempt(problem, Task(problem.even_shares()), _quiet)


def _compiled(name: str, found: Attempt, eps: float) -> Route:
    """A network that the compiler builds, or the best it comes to."""
    size = found.net.size
    note = "certified" if found.bound.bound <= eps else "eps cannot be certified this way"
    bound = found.bound.bound if math.isfinite(found.bound.bound) else None
    return Route(name, size.layers, size.heads, size.anchors, size.parameters, bound, note)


def _grid(problem: Problem, eps: float) -> Route:
    """Theorem E3: one head with a key for each point of a grid on the box; its size is exponential in the dimension."""
    box = problem.program.box
    width = (box.upper - box.lower).numpy().reshape(-1)
    live = width[width > 0]
    slope = sensitivities(problem.program, problem.found)[0]
    spacing = eps / max(slope * math.sqrt(max(len(live), 1) * 0.3), 1e-300)
    points = float(np.prod(np.ceil(live / spacing) + 1)) if len(live) else 1.0
    outputs = math.prod(problem.program.output_shape)
    note = f"E3: exponential in the {len(live)} dimensions of the box"
    return Route("grid", 1, 1, points, points * (len(live) + 1 + outputs), eps, note)


def _reachable(target: Any, boxes: tuple[Box, ...], anchors: int, dtype: torch.dtype) -> tuple[float, float]:
    """What to ask of the compiler, to a factor of 1.5, so that it uses so many anchors; and the bound that gives."""
    base = _problem(ways(target, boxes)[:1], tolerance_of(1.0, 0.0, dtype))
    scale = float(base.found[base.program.output].size.max()) or 1.0

    def fits(eps: float) -> tuple[bool, float]:
        found = _first(replace(base, tolerance=tolerance_of(eps, 0.0, dtype)))
        return found.anchors <= anchors, found.bound.bound

    low, high, best = math.log(1e-15 * scale), math.log(scale), (math.inf, math.inf)
    while high - low > math.log(1.5):
        middle = 0.5 * (low + high)
        good, bound = fits(math.exp(middle))
        if good:
            high, best = middle, min(best, (bound, math.exp(middle)))
        else:
            low = middle
    if not math.isfinite(best[0]):
        raise ArgumentError(f"{anchors} anchors are too few for '{base.program.source}' at any accuracy below its size")
    return best[1], best[0]


def _count(x: float) -> str:
    return f"{x:,.0f}" if x < 1e9 else f"{x:.1e}"
