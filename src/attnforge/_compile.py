"""The compiler on one page: capture, enclose, plan, lower, assemble, certify."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from .box import Box
from .certify.certificate import upper_text
from .certify.rules import Propagation
from .certify.split import FIRST, NetworkBound, outward_cells
from .compiled import CompiledNetwork
from .errors import DomainError, PrecisionError
from .ir.enclose import Range, ranges
from .ir.positions import prepared
from .ir.program import Program
from .lower.forms import is_head
from .lower.layout import lay_out
from .lower.plan import Plan, Style, make_plan
from .purity import structural

ROUNDS = 4
GRIDS = (FIRST, 16 * FIRST, 256 * FIRST)  # cells for the ranges heads are built for; the certificate starts from them
STYLES = (Style(), Style(centred=False, relative=True))
SPEND = 0.7  # the share of eps that is given out to heads; the rest is for affine maps and second order


def build(program: Program, eps: float, dtype: torch.dtype, boxes: tuple[Box, ...] = ()) -> CompiledNetwork:
    """A network for a program whose certified bound is at most eps, or `PrecisionError` with what can be reached."""
    program = prepared(program)
    found, grid = enclose(program, dtype)
    heads = [i for i in range(len(program.ops)) if is_head(program, i)]
    best: Attempt | None = None
    for style in STYLES:
        shares = {i: SPEND / max(1, len(heads)) for i in heads}
        last = None
        for _ in range(ROUNDS):
            plan = make_plan(program, found, eps, dtype, shares, style)
            net = lower(plan, eps, dtype, boxes, grid)  # lower, assemble
            now = Attempt(net, *net.analyse())
            best = now if best is None or now.bound.bound < best.bound.bound else best
            if best.bound.bound <= eps or (last is not None and now.bound.bound > 0.8 * last < math.inf):
                break  # reached, or what is left is rounding
            last = now.bound.bound
            if math.isfinite(last):
                shares = _tighter(net, now.bound, shares, eps)
            else:
                style = replace(style, margin=min(16 * style.margin, 0.25))
        if best is not None and best.bound.bound <= eps:
            break
    assert best is not None
    net, propagation, bound = best.net, best.propagation, best.bound
    if bound.bound > eps:
        wider = "" if dtype == torch.float64 else ", use dtype=torch.float64"
        raise PrecisionError(
            f"eps = {eps:g} cannot be certified for '{program.source[:60]}' in {str(dtype).removeprefix('torch.')}: "
            f"{upper_text(bound.bound)} can be; ask for that{wider}, or choose a smaller box",
            reachable=bound.bound,
        )
    net.attach(net.certificate_of(propagation, bound))  # certify
    structural(net.network)
    return net.eval()


@dataclass(frozen=True)
class Attempt:
    """A network and what can be proved about it."""

    net: CompiledNetwork
    propagation: Propagation
    bound: NetworkBound


def enclose(program: Program, dtype: torch.dtype) -> tuple[list[Range], int]:
    """The ranges of all values on a grid fine enough that every one is finite, and the size of the grid."""
    for grid in GRIDS:
        with np.errstate(invalid="ignore", over="ignore"):
            found = ranges(program, *outward_cells(program, grid, dtype))
        endless = [i for i, r in enumerate(found) if not (np.isfinite(r.low).all() and np.isfinite(r.high).all())]
        if not endless:
            return found, grid
    name = program.sites[endless[0]] or program.ops[endless[0]].word
    raise DomainError(
        f"'{name}' cannot be shown to be bounded on {program.box!r}: its argument may come too close to a singularity; "
        "choose a smaller box"
    )


def lower(plan: Plan, eps: float, dtype: torch.dtype, boxes: tuple[Box, ...], grid: int) -> CompiledNetwork:
    """The network of a plan."""
    layout = lay_out(plan.program, plan.sites)
    tables, flats = [t.weights for t in plan.tables], [t.flat for t in plan.tables]
    return CompiledNetwork(layout, tables, flats, dtype, eps, boxes, grid)


def _tighter(net: CompiledNetwork, bound: NetworkBound, shares: dict[int, float], eps: float) -> dict[int, float]:
    """Smaller shares for the sites that cost most: each is cut to what is left for it."""
    allowed = SPEND * eps / max(1, len(shares))
    cut = dict(shares)
    for site, part in zip(net.layout.sites, bound.parts, strict=False):
        if part > allowed:
            cut[site.op] = shares[site.op] * max(1e-3, 0.7 * allowed / float(part))
    return cut
