"""From ranges to a certified network: plan, lower, assemble and certify, again with other shares until the tolerance
holds.

The compiler on one page: capture, enclose, plan, lower, assemble, certify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..box import Box
from ..census import structural
from ..certificates.certificate import upper_text
from ..errors import ArgumentError, DomainError, PrecisionError
from ..programs.enclose import Range, ranges
from ..programs.positions import prepared
from ..programs.program import Program
from ..progress import stages
from ..threads import one_thread
from .compiled import CompiledNetwork
from .layout import is_head, lay_out
from .plan import Plan, Style, make_plan
from .propagation import Propagation
from .split import FIRST, NetworkBound, outward_cells

ROUNDS = 3
STYLES = (Style(), Style(centred=False, relative=True))
SPEND = 0.7  # the share of the tolerance that is given out to heads; the rest is for affine maps and second order
Stage = Callable[[str], None]


@dataclass(frozen=True)
class Tolerance:
    """What is asked for: |network - target| <= eps + rtol |target|, in a dtype."""

    eps: float
    rtol: float
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The dtype's short name."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Attempt:
    """A network and what can be proved about it."""

    net: CompiledNetwork
    propagation: Propagation
    bound: NetworkBound

    @property
    def anchors(self) -> int:
        """The size that shrinking is about."""
        return self.net.size.anchors


@dataclass(frozen=True)
class Task:
    """A program with its ranges, on so many cells, and the tolerance its network must keep."""

    program: Program
    found: list[Range]
    grid: int
    tolerance: Tolerance
    boxes: tuple[Box, ...] = ()

    @property
    def worth(self) -> float:
        """What there is to give out to heads: the tolerance where the target is smallest."""
        output = self.found[self.program.output]
        return self.tolerance.eps + self.tolerance.rtol * float(output.least.min())

    def attempt(self, shares: dict[int, float], style: Style, stage: Stage) -> Attempt:
        """Plan, lower and assemble with given shares, then see what can be proved."""
        stage("plan")
        scale = self.worth or self.tolerance.rtol * float(self.found[self.program.output].size.max())
        plan = make_plan(self.program, self.found, scale, self.tolerance.dtype, shares, style)
        stage("lower and assemble")
        net = lower(plan, self)
        stage("certify")
        return Attempt(net, *net.analyse())


def lower(plan: Plan, task: Task) -> CompiledNetwork:
    """The network of a plan."""
    layout = lay_out(plan.program, plan.sites)
    tables, flats = [t.weights for t in plan.tables], [t.flat for t in plan.tables]
    asked = task.tolerance
    return CompiledNetwork(layout, tables, flats, asked.dtype, asked.eps, task.boxes, task.grid, asked.rtol)


def build(tasks: Sequence[Callable[[], Task]], stage: Stage) -> CompiledNetwork:
    """A network that keeps the tolerance, from the first of several ways of writing the target that allows one."""
    best: Attempt | None = None
    seen: list[Program] = []
    for make in tasks:
        task = make()
        if task.program in seen:
            continue  # written differently, but the same after all
        seen.append(task.program)
        eps = task.tolerance.eps
        for style in STYLES:
            found, shares = _search(task, style, stage)
            best = found if best is None or found.bound.excess < best.bound.excess else best
            if best.bound.excess <= eps:
                best = _shrunk(task, best, shares, style, stage)
                best.net.attach(best.net.certificate_of(best.propagation, best.bound))
                return best.net.eval()
    assert best is not None
    raise _unreachable(best, task.tolerance)


def _search(task: Task, style: Style, stage: Stage) -> tuple[Attempt, dict[int, float]]:
    """The best network of one style: shares are cut where they cost most, margins widened where errors leave them."""
    heads = [i for i in range(len(task.program.ops)) if is_head(task.program, i)]
    shares = {i: SPEND / max(1, len(heads)) for i in heads}
    best: tuple[Attempt, dict[int, float]] | None = None
    last = math.inf
    for _ in range(ROUNDS):
        now = task.attempt(shares, style, stage)
        if best is None or now.bound.excess < best[0].bound.excess:
            best = (now, shares)
        if now.bound.excess <= task.tolerance.eps or now.bound.bound > 0.8 * last:
            break  # reached, or what is left is rounding
        last = now.bound.bound
        if math.isfinite(last):
            shares = _tighter(now, shares, task.tolerance.eps)
        else:
            style = replace(style, margin=min(16 * style.margin, 0.25))
    assert best is not None
    return best


def _tighter(attempt: Attempt, shares: dict[int, float], eps: float) -> dict[int, float]:
    """Smaller shares for the sites that cost most: each is cut to what is left for it."""
    allowed = SPEND * max(eps, 0.1 * (attempt.bound.bound - attempt.bound.excess)) / max(1, len(shares))
    cut = dict(shares)
    for site, part in zip(attempt.net.layout.sites, attempt.bound.parts, strict=False):
        if part > allowed:
            cut[site.op] = shares[site.op] * max(1e-3, 0.7 * allowed / float(part))
    return cut


def _shrunk(task: Task, best: Attempt, shares: dict[int, float], style: Style, stage: Stage) -> Attempt:
    """A smaller network that still keeps the tolerance, when there is slack."""
    eps = task.tolerance.eps
    for _ in range(2):
        slack = eps / best.bound.excess if best.bound.excess > 0 else math.inf
        if slack < 2.5 or not best.anchors:
            break
        shares = {i: share * min(0.6 * slack, 100.0) for i, share in shares.items()}
        now = task.attempt(shares, style, stage)
        if now.bound.excess > eps or now.anchors >= best.anchors:
            break
        best = now
    return best


def _unreachable(best: Attempt, asked: Tolerance) -> PrecisionError:
    source = best.net.program.source
    name = source if len(source) <= 60 else source[:57] + "..."
    wider = "" if asked.dtype == torch.float64 else ", use dtype=torch.float64"
    if not math.isfinite(best.bound.bound):
        return PrecisionError(f"no bound can be certified for '{name}' in {asked.name}: choose a smaller box{wider}")
    return PrecisionError(
        f"eps = {asked.eps:g} cannot be certified for '{name}' in {asked.name}: {upper_text(best.bound.bound)} can be; "
        f"ask for that{wider}, or choose a smaller box",
        reachable=best.bound.bound,
    )


GRIDS = (FIRST, 16 * FIRST, 256 * FIRST)  # cells for the ranges heads are built for; the certificate starts from them
DTYPES = (torch.float32, torch.float64)
Capture = Callable[[], Program]


def compile(
    target: Any,
    box: Box | tuple[Box, ...],
    eps: float | None = None,
    *,
    rtol: float = 0.0,
    dtype: torch.dtype = torch.float32,
    strict: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CompiledNetwork:
    """An attention-only network for a target, with |network - target| <= eps + rtol |target| certified on the box.

    `target` is a formula, a list of formulas (several outputs, last dimension), a sympy expression, a Python
    function of
    numbers (with a named box), or a module or function of tensors (captured with torch.export); `box` bounds its
    input, a tuple of
    boxes the inputs of a function of several tensors. `dtype` is what ships and what the certificate is for. If the
    tolerance cannot be proved, `PrecisionError` says what can be.

    >>> net = compile("sin(x*y) + exp(-x**2)/y", Box(x=(-1, 1), y=(0.5, 2)), eps=1e-3)
    >>> net.certificate.kind, net.bound <= 1e-3, net(torch.tensor([[0.5, 1.0]])).shape
    ('certified', True, torch.Size([1]))
    """
    tolerance = tolerance_of(eps, rtol, dtype)
    boxes = box if isinstance(box, tuple) else (box,)
    with stages(progress) as stage, one_thread():
        stage("capture")
        captures = capture(target, boxes)
        tasks = [partial(enclose, each, tolerance, boxes if len(boxes) > 1 else (), stage) for each in captures]
        net = build(tasks, stage)  # plan, lower, assemble, certify
    structural(net.network)
    net.strict = strict
    return net


def compile_program(program: Program, eps: float, dtype: torch.dtype = torch.float32) -> CompiledNetwork:
    """The network of a program: `compile` without its first stage."""
    with stages() as stage, one_thread():
        return build([partial(enclose, lambda: program, tolerance_of(eps, 0.0, dtype), (), stage)], stage)


def capture(target: Any, boxes: tuple[Box, ...]) -> list[Capture]:
    """The ways in which a target can be written as a program, each made when it is wanted."""
    if not boxes or not all(isinstance(b, Box) for b in boxes):
        raise ArgumentError(f"box must be a Box, or a tuple of boxes for a function of several tensors, got {boxes!r}")
    tensors = isinstance(target, nn.Module) or (callable(target) and boxes[0].names is None)
    if isinstance(target, (str, list)) or not tensors:
        from ..frontends.formula.program import lower_formula

        if len(boxes) != 1:
            raise ArgumentError("a formula has one box, with an interval for each variable")
        return [partial(lower_formula, target, boxes[0], style) for style in ("product", "log")]
    from ..frontends.module.program import lower_module

    return [partial(lower_module, target, boxes if len(boxes) > 1 else boxes[0])]


def enclose(make: Capture, tolerance: Tolerance, boxes: tuple[Box, ...], stage: Callable[[str], None]) -> Task:
    """The ranges of all values, on a grid fine enough that every one is finite."""
    program = prepared(make())
    stage("enclose")
    for grid in GRIDS:
        with np.errstate(invalid="ignore", over="ignore"):
            found = ranges(program, *outward_cells(program, grid, tolerance.dtype))
        endless = [i for i, r in enumerate(found) if not _finite(r)]
        if not endless:
            return Task(program, found, grid, tolerance, boxes)
    name = program.sites[endless[0]] or program.ops[endless[0]].word
    raise DomainError(
        f"'{name}' cannot be shown to be bounded on {program.box!r}: its argument may come too close to a singularity; "
        "choose a smaller box"
    )


def _finite(r: Range) -> bool:
    return bool(np.isfinite(r.low).all() and np.isfinite(r.high).all())


def tolerance_of(eps: float | None, rtol: float, dtype: torch.dtype) -> Tolerance:
    """The tolerance that was asked for, or an error that names the argument."""
    for name, value, positive in (("eps", eps, not rtol), ("rtol", rtol, False)):
        if value is None and name == "eps" and rtol:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is None or not number or value < 0 or (positive and value == 0):
            raise ArgumentError(f"{name} must be a {'positive' if positive else 'non-negative'} number, got {value!r}")
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
    return Tolerance(float(eps or 0.0), float(rtol), dtype)
