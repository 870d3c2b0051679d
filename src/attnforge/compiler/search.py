"""How the compiler tries again: which shares of the tolerance each operation gets, and when enough is enough."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..box import Box
from ..certificates.rounding import unit
from ..dtypes import dtype_name
from ..errors import AttnforgeError, PrecisionError
from ..heads.construction import Tactics
from ..programs.affine import is_head
from ..programs.enclose import Range, centred, ranges
from ..programs.ops import Normalise, Product
from ..programs.program import Program
from .compiled import CompiledNetwork
from .propagation import NetworkBound, Propagation

ROUNDS = 3  # tries with ever smaller shares; what three do not reach is rounding
GATE = 4  # slots of a head that is no table, or more: two to four
NEARLY = 8.0  # times the tolerance: from here a try that halves the bound is not counted, as three more will do
TACTICS = (Tactics(), Tactics(centred=False, relative=True))
SPEND = 0.7  # the share of the tolerance that is given out to heads; the rest is for affine maps and second order
LAST_MARGIN = 0.25  # of a range: beyond this, heads for wider arguments cost more than what they let in
STEEP = 30.0  # times: what a norm does to errors that is worth telling; ten times what rows of size 0.3 cost
FINEST = 4.0  # roundings of one number: with fewer no network computes anything
SHRINKS = 2  # tries with larger shares once the tolerance holds: the first finds most of what can be saved


@dataclass(frozen=True)
class Tolerance:
    """What is asked for: |network - target| <= eps + rtol |target|, in a dtype."""

    eps: float
    rtol: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Problem:
    """A program with the ranges of its values, on so many cells, and the tolerance its network must keep."""

    program: Program
    found: list[Range] = field(repr=False)
    grid: int
    tolerance: Tolerance
    boxes: tuple[Box, ...] = ()

    @property
    def worth(self) -> float:
        """What there is to give out to heads: the tolerance where the target is smallest."""
        output = self.found[self.program.output]
        least = self.tolerance.eps + self.tolerance.rtol * float(output.least.min())
        return least or self.tolerance.rtol * float(output.size.max())

    def even_shares(self) -> dict[int, float]:
        """The same share of the tolerance for every operation that is heads; a product, which is as exact as its dtype
        with any share, takes nothing from the others."""
        heads = [i for i in range(len(self.program.ops)) if is_head(self.program, i)]
        spending = [i for i in heads if not isinstance(self.program.ops[i], Product)]
        return {i: SPEND / max(1, len(spending)) for i in heads}


@dataclass(frozen=True)
class Task:
    """One try: the share of the tolerance that each operation gets, and tactics. A network of `fewer` anchors or more
    is of no use: it need not be analysed."""

    shares: Mapping[int, float]
    tactics: Tactics = TACTICS[0]
    fewer: int | None = None


@dataclass(frozen=True)
class Attempt:
    """A network and what can be proved about it; no analysis where weights are no finite numbers."""

    net: CompiledNetwork
    propagation: Propagation | None
    bound: NetworkBound

    @property
    def anchors(self) -> int:
        """The size that shrinking is about."""
        return self.net.size.anchors


class Search:
    """Asks for networks until one keeps the tolerance; what is learned from one decides the next."""

    def __init__(self, tolerance: Tolerance):
        self.tolerance = tolerance
        self.best: Attempt | None = None
        self.home: Problem | None = None  # what the best is a network of
        self.failures: list[AttnforgeError] = []  # of writings that have no network at all
        self._last: Attempt | None = None
        self._seen: list[Program] = []

    @property
    def done(self) -> bool:
        """Whether a network keeps the tolerance."""
        return self.best is not None and self.best.bound.excess <= self.tolerance.eps

    @property
    def size(self) -> int:
        """About how many slots the heads of the best network have."""
        assert self.best is not None, "there is a size once there is a network"
        return self.best.anchors + GATE * self.best.net.size.heads

    def knows(self, program: Program) -> bool:
        """Whether a program was tried already: written differently, but the same after all."""
        known = program in self._seen
        self._seen.append(program)
        return known

    def tasks(self, problem: Problem) -> Iterator[Task]:
        """What to try for one program, each after the one before was `learn`ed."""
        for tactics in TACTICS:
            found, task = yield from self._tighten(problem, Task(problem.even_shares(), tactics))
            if self.best is None or found.bound.excess < self.best.bound.excess:
                self.best, self.home = found, problem
            if self.done:
                yield from self._shrink(task)
                return

    def learn(self, attempt: Attempt) -> None:
        """What came of the last task."""
        self._last = attempt

    def result(self) -> CompiledNetwork:
        """The network that keeps the tolerance, certified."""
        best = self.best
        assert best is not None, "there is a result once the search is done"
        assert best.propagation is not None, "what keeps a tolerance was analysed"
        best.net.attach(best.net.certificate_of(best.propagation, best.bound))
        return best.net.eval()

    def _tighten(self, problem: Problem, task: Task) -> Generator[Task, None, tuple[Attempt, Task]]:
        """Cut shares where they cost most, widen margins where errors leave them; the best attempt and its task."""
        eps, last, rounds = self.tolerance.eps, math.inf, ROUNDS
        best: tuple[Attempt, Task] | None = None
        while rounds:
            yield task
            now = self._learned()
            if best is None or now.bound.excess < best[0].bound.excess:
                best = now, task
            if now.bound.excess <= eps or now.bound.bound > 0.8 * last:
                break  # reached, or what is left is rounding
            nearly = now.bound.excess <= NEARLY * eps and now.bound.bound <= 0.5 * last
            last = now.bound.bound
            if math.isfinite(last):
                rounds -= 0 if nearly else 1
                task = replace(task, shares=self._cut(now, task.shares))
            elif task.tactics.margin < LAST_MARGIN:
                margin = min(16 * task.tactics.margin, LAST_MARGIN)
                task = replace(task, tactics=replace(task.tactics, margin=margin))
            else:
                break
        assert best is not None
        return best

    def _cut(self, attempt: Attempt, shares: Mapping[int, float]) -> dict[int, float]:
        """Smaller shares for the sites that cost most: each is cut to what is left for it."""
        eps, bound = self.tolerance.eps, attempt.bound
        allowed = SPEND * max(eps, 0.1 * (bound.bound - bound.excess)) / max(1, len(shares))
        cut = dict(shares)
        for site, part in zip(attempt.net.layout.sites, bound.parts, strict=False):
            if part > allowed:
                cut[site.op] = shares[site.op] * max(1e-3, 0.7 * allowed / float(part))
        return cut

    def _shrink(self, task: Task) -> Iterator[Task]:
        """Smaller networks that still keep the tolerance, as long as there is slack."""
        eps = self.tolerance.eps
        for _ in range(SHRINKS):
            assert self.best is not None
            slack = eps / self.best.bound.excess if self.best.bound.excess > 0 else math.inf
            if slack < 2.5 or not self.best.anchors:
                return
            shares = {i: share * min(0.6 * slack, 100.0) for i, share in task.shares.items()}
            task = replace(task, shares=shares, fewer=self.best.anchors)
            yield task
            now = self._learned()
            if now.bound.excess > eps or now.anchors >= self.best.anchors:
                return
            self.best = now

    def _learned(self) -> Attempt:
        assert self._last is not None, "every task is followed by what came of it"
        return self._last

    def refusal(self, reachable: float | None, wider: bool) -> PrecisionError:
        """That the tolerance cannot be kept, a tolerance that was tried and can be, and whether float64 keeps it."""
        best = self.best
        assert best is not None
        source = best.net.program.source
        name = source if len(source) <= 60 else source[:57] + "..."
        dtype = dtype_name(self.tolerance.dtype)
        other = ", use dtype=torch.float64" if wider else ""
        norms = _norms(best)
        if reachable is None:
            reasons = [error for error in self.failures if isinstance(error, PrecisionError)]
            if reasons and not np.isfinite(best.bound.bound):
                return reasons[0]  # why one writing has no network says more than that another has no bound
            what = "no bound" if not np.isfinite(best.bound.bound) else "no bound below the range of its values"
            advice = f"choose a smaller box{other}{norms}"
            return PrecisionError(f"{what} can be certified for '{name}' in {dtype}: {advice}")
        if not self.tolerance.eps:
            u = unit(self.tolerance.dtype)
            coarse = f", which rounds every number by up to {u:.1g} of it"
            why = coarse if self.tolerance.rtol < FINEST * u else ", whose values come too close to 0"
            return PrecisionError(
                f"rtol = {self.tolerance.rtol:g} alone cannot be certified for '{name}' in {dtype}{why}: "
                f"allow an absolute error as well, eps={reachable:g}{other}, or choose a smaller box",
                reachable=reachable,
            )
        return PrecisionError(
            f"eps = {self.tolerance.eps:g} cannot be certified for '{name}' in {dtype}: "
            f"{reachable:g} can be; ask for that{other}, or choose a smaller box{norms}",
            reachable=reachable,
        )


def _norms(best: Attempt) -> str:
    """Which norms multiply errors a lot on the worst part of the box, in words; nothing, where none does."""
    program, told = best.net.program, []
    found = ranges(program, best.bound.low[None], best.bound.high[None])
    for i, op in enumerate(program.ops):
        if isinstance(op, Normalise):
            row = centred(op, found[op.input])
            factor = 1 / np.sqrt(np.mean(row.least**2, -1).min() + op.centring[1])
            told += [f"{program.labels[i] or f'%{i}'} by {factor:.3g}"] if factor >= STEEP else []
    return f" (rows may be nearly 0 there, where norms multiply errors: {', '.join(told)})" if told else ""
