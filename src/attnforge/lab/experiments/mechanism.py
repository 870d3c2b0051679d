"""What a known mechanism buys: does it say beforehand where a network will fail? (H1)

Two networks for one formula, with about as many parameters. One is compiled: its error analysis bounds the error on
every cell of the box, before anything is evaluated. The other, a multilayer perceptron, is trained; nobody knows what
its parts are for, and what is left to predict its failures is how much two trainings disagree, or how steep it is.
For each predictor: how well does it tell the worst tenth of the cells from the rest (area under the ROC curve)?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...box import Box
from ...charts.chart import Figure
from ...compiler.pipeline import compile
from ...programs.enclose import ranges
from ...programs.interpret import values as interpret
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import mean, threshold
from .shared import figure, line, panel, where

#: Formula, box: errors that vary over the box by themselves.
FORMULAS: dict[str, dict[str, tuple[float, float]]] = {
    "exp(2*x)*sin(3*y)": {"x": (-1, 1), "y": (-1, 1)},
    "x*y/(1+4*x**2)": {"x": (-1, 1), "y": (0, 2)},
    "relu(x-y)+0.2*sin(4*x)": {"x": (-1, 1), "y": (-1, 1)},
}
EPS = 3e-3  # a network with a visible error: it comes from interpolation, not from rounding
SIDE, INSIDE = 24, 36  # cells a side, and points in each cell
WORST = 0.1  # of the cells: what is to be told from the rest
STEPS, BATCH, RATE = 1500, 128, 5e-3  # of training: until the loss no longer falls much


def cells(quick: bool) -> tuple[Cell, ...]:
    formulas = tuple(FORMULAS)[: 2 if quick else None]
    seeds = (0,) if quick else (0, 1, 2)
    compiled = grid(seeds, formula=formulas, network=("compiled",))
    return compiled + grid(seeds, formula=formulas, network=("trained",), steps=(STEPS,))


def area(score: np.ndarray, error: np.ndarray) -> float:
    """The area under the ROC curve of a score for the worst tenth: 1 is always right, a half is guessing.

    >>> area(np.arange(20.0), np.arange(20.0)), area(-np.arange(20.0), np.arange(20.0))
    (1.0, 0.0)
    """
    bad = error >= np.sort(error)[-max(1, round(WORST * len(error)))]
    above = score[bad][:, None] - score[~bad][None]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


def trained(target: Any, low: Tensor, high: Tensor, parameters: int, steps: int, seed: int) -> nn.Module:
    """A perceptron of two hidden layers with about so many parameters, trained on points of the box."""
    generator = torch.Generator().manual_seed(seed)
    width = max(4, round((math.sqrt(25 + 4 * parameters) - 5) / 2))  # w^2 + 5 w + 1 of them
    net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            reach = 1 / math.sqrt(parameter.shape[-1])
            parameter.uniform_(-reach, reach, generator=generator)
    optimiser = torch.optim.Adam(net.parameters(), RATE)
    for step in range(steps):
        x = low + (high - low) * torch.rand(BATCH, 2, generator=generator)
        loss = (net(x)[:, 0] - target(x)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / steps)
    return net


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    box = Box(**FORMULAS[settings["formula"]])
    net = compile(settings["formula"], box, eps=EPS)
    low, high = box.lower.numpy(), box.upper.numpy()
    edges = [np.linspace(a, b, SIDE + 1) for a, b in zip(low, high, strict=True)]
    lows, highs = (np.stack(np.meshgrid(*(e[part] for e in edges), indexing="ij"), -1).reshape(-1, 2)
                   for part in (slice(-1), slice(1, None)))  # fmt: skip
    rng = np.random.default_rng(seed)
    inner = lows[:, None] + (highs - lows)[:, None] * rng.uniform(size=(len(lows), INSIDE, 2))
    points = torch.from_numpy(inner.reshape(-1, 2)).to(net.dtype)
    exact = interpret(net.program, points.double())
    size = net.size.parameters

    def worst(values: Tensor) -> np.ndarray:
        return np.asarray(values.detach().double().reshape(len(lows), -1).amax(-1).numpy())

    if settings["network"] == "compiled":
        propagation, _ = net.analyse()
        told = propagation.run(ranges(net.program, lows[:, None], highs[:, None])).largest
        with torch.no_grad():
            error = worst((net.core(points).double() - exact).abs())
        return {"area": area(told, error), "sup": float(error.max()), "above": int((error > told).sum()), "size": size}

    def target(x: Tensor) -> Tensor:
        return interpret(net.program, x.double()).to(x.dtype)

    ends = torch.from_numpy(low).float(), torch.from_numpy(high).float()
    first, second = (trained(target, *ends, size, settings["steps"], 2 * seed + k) for k in (0, 1))
    points = points.float().requires_grad_(True)
    out = first(points)[:, 0]
    (slope,) = torch.autograd.grad(out.sum(), points)
    error = worst((out.double() - exact).abs())
    apart = worst((out - second(points)[:, 0]).abs())
    return {"area": area(apart, error), "steep": area(worst(slope.norm(dim=-1)), error), "sup": float(error.max()),
            "size": sum(p.numel() for p in first.parameters())}  # fmt: skip


def figures(records: Sequence[Record]) -> list[Figure]:
    series = []
    for network, name in (("compiled", "compiled, by its ledger"), ("trained", "trained, by two trainings")):
        rows = [Record(r.experiment, {"at": list(FORMULAS).index(r["formula"]) + 1}, r.seed, dict(r.values))
                for r in where(records, network=network)]  # fmt: skip
        series += line(name, rows, "at", "area", style="points", group=network)
    caption = (
        "How well the worst tenth of the cells of a box is known beforehand, for three formulas: area under the ROC "
        "curve of the certified error of each cell (compiled), and of the disagreement of two trainings (trained)."
    )
    panels = panel("where will it fail?", "formula", "area under the ROC curve", series)
    return figure("area", caption, panels, "A half is guessing, 1 is always right.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    ours, theirs = where(records, network="compiled"), where(records, network="trained")
    if ours:
        found.append(threshold("area under the ROC curve, compiled, smallest", 0.8, min(r["area"] for r in ours), True))
        found.append(threshold("cells with an error above their bound", 0.0, float(sum(r["above"] for r in ours))))
    if ours and theirs:
        best = mean([max(r["area"], r["steep"]) for r in theirs]).value
        gain = mean([r["area"] for r in ours]).value - best
        less = threshold("mean area, compiled less the better of both for trained", 0.0, gain, at_least=True)
        found.append(less.laid_to("training"))
    return found


EXPERIMENT = Experiment(
    name="mechanism",
    title="What a known mechanism buys",
    claim="The error analysis of a compiled network says, before anything is evaluated, where it will be worst, and "
    "better than two trainings of a network of the same size say it of each other.",
    label="H1",
    varies="The formula; compiled and trained; the points, the start of training.",
    measured_how="Largest error in each of 576 cells of the box (36 points each). Predictors: the certified error of "
    "the cell; for trained perceptrons with as many parameters the disagreement of two trainings, and the slope. Area "
    "under the ROC curve for the worst tenth.",
    judged_how="The compiled network's area at least 0.8; no cell above its bound; the compiled mean at least that of "
    "the better predictor of each trained network.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
