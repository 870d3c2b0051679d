"""How steep networks are, and what few bits cost: certified constants beside sampled ones (H2, H3).

Formulas compiled in float32: the certified Lipschitz constant beside the steepest slope found; and the same networks
with 6 to 12 bits, their certified bounds beside the errors found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...box import Box
from ...charts.chart import Figure
from ...compiler.compiled import CompiledNetwork
from ...compiler.pipeline import compile
from ...compiler.quantise import quantise
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import bound, threshold
from .shared import figure, line, pairs, panel, where, within

#: Formula, box: smooth ones, a product, a quotient, kinks.
FORMULAS: dict[str, dict[str, tuple[float, float]]] = {
    "x*sin(y)": {"x": (-1, 1), "y": (-2, 2)},
    "exp(x*y)/(1+z**2)": {"x": (-1, 1), "y": (-1, 1), "z": (-2, 2)},
    "0.3*gelu(1.7*x-0.4*y)+0.77*y": {"x": (-1, 1), "y": (-2, 2)},
    "tanh(2.9*x)+relu(0.7*x-y)": {"x": (-1, 1), "y": (-1, 1)},
}
#: Modules that mix channels or tokens, on the cube [-1, 1]: what they are made of, and the shape of their input.
MIXED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "softmax": (lambda: nn.Sequential(seeded(3, 3), nn.Softmax(-1)), (3,)),
    "norm": (lambda: nn.Sequential(seeded(2, 3), nn.LayerNorm(3, eps=0.1)), (2,)),
    "attention": (lambda: Attends(), (3, 1)),
}
EPS = 1e-4  # of every network before bits are taken from it
BITS = (6, 8, 10, 12)  # with fewer, arguments leave the intervals of their tables, and certificates are refused
SAMPLED = 1 << 14  # points of the box: a minute's worth would not find much steeper ones
CLIMBS = 60  # steps uphill from the steepest of them


def cells(quick: bool) -> tuple[Cell, ...]:
    formulas = tuple(FORMULAS)[: 2 if quick else None]
    found = grid(task=("steep",), formula=formulas) + grid(task=("mixed",), formula=tuple(MIXED))
    return found + grid(task=("bits",), formula=formulas, bits=BITS)


def seeded(inputs: int, outputs: int) -> nn.Linear:
    """A linear map with fixed weights of size 1."""
    layer, generator = nn.Linear(inputs, outputs), torch.Generator().manual_seed(inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    return layer


class Attends(nn.Module):
    """One attention head over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (seeded(1, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def network(formula: str) -> CompiledNetwork:
    """The network of a cell."""
    if formula in MIXED:
        make, shape = MIXED[formula]
        return compile(make(), Box.cube(-1, 1, shape=shape), eps=1e-2)
    return compile(formula, Box(**FORMULAS[formula]), eps=EPS)


def slopes(net: CompiledNetwork, x: torch.Tensor) -> torch.Tensor:
    """The largest sum_j |d out_i / d x_j| at points, computed."""
    x = x.detach().requires_grad_(True)
    outputs = net.core(x).reshape(len(x), -1).unbind(-1)
    rows = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0].reshape(len(x), -1) for out in outputs]
    return torch.stack([row.abs().sum(-1) for row in rows]).amax(0)


def climbed(net: CompiledNetwork, generator: torch.Generator) -> float:
    """The steepest slope found: by sampling the box, and by small steps from the steepest samples on."""
    low, high = (t.to(net.dtype) for t in (net.box.lower, net.box.upper))
    x = low + (high - low) * torch.rand(SAMPLED, *low.shape, generator=generator, dtype=net.dtype)
    found = slopes(net, x)
    best, x = float(found.max()), x[found.topk(64).indices]
    for step in range(CLIMBS):
        tried = x + (high - low) * 0.05 * 0.9**step * torch.randn(x.shape, generator=generator, dtype=net.dtype)
        tried = torch.minimum(torch.maximum(tried, low), high)
        better = slopes(net, tried) > slopes(net, x)
        x = torch.where(better.reshape(-1, *[1] * low.dim()), tried, x)
        best = max(best, float(slopes(net, x).max()))
    return best


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    net, generator = network(settings["formula"]), torch.Generator().manual_seed(seed)
    if settings["task"] in ("steep", "mixed"):
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
    caption = (
        "How far networks move when their anchor values and affine maps are rounded to few bits, against the number of "
        "bits, with the certified bounds."
    )
    panels = panel("few bits", "bits of a number", "largest change", series, log_y=True)
    return figure("bits", caption, panels, "The change halves with every bit, below its certified bound.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    asked = {
        "steep": ("steepest slope found against the certified Lipschitz constant",
                  "certified constant over the steepest slope found, the largest"),
        "mixed": ("steepest slope found against the certified constant, channels and tokens mixed",
                  "the same, constant over the steepest slope, the largest"),
    }  # fmt: skip
    for task, (below, near) in asked.items():
        if limits := pairs(where(records, task=task), "sampled", "constant"):
            found.append(bound(below, limits))
            found.append(threshold(near, 1.5, max(limit / seen for seen, limit in limits)))
    found += within("change by few bits against its bound", where(records, task="bits"), "moved", "bound")
    return found


EXPERIMENT = Experiment(
    name="robustness",
    title="Steepness and few bits",
    claim="A compiled network has a certified Lipschitz constant, close to the steepest slope there is; rounding its "
    "anchor values and affine maps to b bits moves it by at most what the certificate of the stored integers says.",
    label="H2, H3",
    varies="The formula, or a softmax, a norm and an attention head; the number of bits.",
    measured_how="Steepest slope of 16,384 samples and of 60 steps uphill from the 64 steepest; largest change of the "
    "output at 16,384 samples.",
    judged_how="Every slope and every change against its bound without tolerance; the constant at most 1.5 times the "
    "steepest slope found.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
