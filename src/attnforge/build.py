"""From ranges to a certified network: plan, lower, assemble and certify, again with other shares until the tolerance
holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .box import Box
from .certify.certificate import upper_text
from .certify.rules import Propagation
from .certify.split import NetworkBound
from .compiled import CompiledNetwork
from .errors import PrecisionError
from .ir.enclose import Range
from .ir.program import Program
from .lower.forms import is_head
from .lower.layout import lay_out
from .lower.plan import Plan, Style, make_plan

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
