"""How steep networks are, and what few bits cost: certified constants beside sampled ones (H2, H3).

Formulas compiled in float32: the certified Lipschitz constant beside the steepest slope found; and the same networks
with 6 to 12 bits, their certified bounds beside the errors found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...box import Box
from ...charts.chart import Figure, Panel
from ...compiler.compiled import CompiledNetwork
from ...compiler.pipeline import compile
from ...compiler.quantise import quantise
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import bound, threshold
from .shared import line, pairs, where

#: Formula, box: smooth ones, a product, a quotient, kinks.
FORMULAS: dict[str, dict[str, tuple[float, float]]] = {
    "x*sin(y)": {"x": (-1, 1), "y": (-2, 2)},
    "exp(x*y)/(1+z**2)": {"x": (-1, 1), "y": (-1, 1), "z": (-2, 2)},
    "0.3*gelu(1.7*x-0.4*y)+0.77*y": {"x": (-1, 1), "y": (-2, 2)},
    "tanh(2.9*x)+relu(0.7*x-y)": {"x": (-1, 1), "y": (-1, 1)},
}
EPS = 1e-4  # of every network before bits are taken from it
BITS = (6, 8, 10, 12)  # with fewer, arguments leave the intervals of their tables, and certificates are refused
SAMPLED = 1 << 14  # points of the box: a minute's worth would not find much steeper ones
CLIMBS = 60  # steps uphill from the steepest of them


def cells(quick: bool) -> tuple[Cell, ...]:
    formulas = tuple(FORMULAS)[: 2 if quick else None]
    return grid(task=("steep",), formula=formulas) + grid(task=("bits",), formula=formulas, bits=BITS)


def network(formula: str) -> CompiledNetwork:
    """The network of a cell."""
    return compile(formula, Box(**FORMULAS[formula]), eps=EPS)


def slopes(net: CompiledNetwork, x: torch.Tensor) -> torch.Tensor:
    """sum_j |d out / d x_j| at points, computed."""
    x = x.detach().requires_grad_(True)
    (found,) = torch.autograd.grad(net.core(x).sum(), x)
    return found.abs().sum(-1)


def climbed(net: CompiledNetwork, generator: torch.Generator) -> float:
    """The steepest slope found: by sampling the box, and by small steps from the steepest samples on."""
    low, high = (t.to(net.dtype) for t in (net.box.lower, net.box.upper))
    x = low + (high - low) * torch.rand(SAMPLED, len(low), generator=generator, dtype=net.dtype)
    found = slopes(net, x)
    best, x = float(found.max()), x[found.topk(64).indices]
    for step in range(CLIMBS):
        tried = x + (high - low) * 0.05 * 0.9**step * torch.randn(x.shape, generator=generator, dtype=net.dtype)
        tried = torch.minimum(torch.maximum(tried, low), high)
        better = slopes(net, tried) > slopes(net, x)
        x = torch.where(better[:, None], tried, x)
        best = max(best, float(slopes(net, x).max()))
    return best


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    net, generator = network(settings["formula"]), torch.Generator().manual_seed(seed)
    if settings["task"] == "steep":
        return {"sampled": climbed(net, generator), "constant": net.lipschitz().constant}
    few = quantise(net, settings["bits"])
    x = net.box.sample(SAMPLED, dtype=net.dtype)
    with torch.no_grad():
        moved = float((few.network(x).double() - net(x).double()).abs().max())
    return {"moved": moved, "bound": few.bound + few.bound_before, "bytes": few.bytes_after, "before": few.bytes_before}


def figures(records: Sequence[Record]) -> list[Figure]:
    rows, series = where(records, task="bits"), []
    for formula in dict.fromkeys(r["formula"] for r in rows):
        own = where(rows, formula=formula)
        series += line(formula, own, "bits", "moved", group=formula)
        series += line(f"bound, {formula}", own, "bits", "bound", style="bound", group=formula)
    if not series:
        return []
    caption = (
        "How far networks move when their anchor values and affine maps are rounded to few bits, against the number of "
        "bits, with the certified bounds."
    )
    panel = Panel("few bits", "bits of a number", "largest change", tuple(series), log_y=True)
    return [Figure("bits", caption, (panel,), "The change halves with every bit, below its certified bound.")]


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    steep = where(records, task="steep")
    if limits := pairs(steep, "sampled", "constant"):
        found.append(bound("steepest slope found against the certified Lipschitz constant", limits))
        loose = max(limit / seen for seen, limit in limits)
        found.append(threshold("certified constant over the steepest slope found, the largest", 1.5, loose))
    if limits := pairs(where(records, task="bits"), "moved", "bound"):
        found.append(bound("change by few bits against its bound", limits))
    return found


EXPERIMENT = Experiment(
    name="robustness",
    title="Steepness and few bits",
    claim="A compiled network has a certified Lipschitz constant, close to the steepest slope there is; rounding its "
    "anchor values and affine maps to b bits moves it by at most what the certificate of the stored integers says.",
    label="H2, H3",
    varies="The formula; the number of bits.",
    measured_how="Steepest slope of 16,384 samples and of 60 steps uphill from the 64 steepest; largest change of the "
    "output at 16,384 samples.",
    judged_how="Every slope and every change against its bound without tolerance; the constant at most 1.5 times the "
    "steepest slope found.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
