"""Sizes for classes (E6): ridges drawn from a mixture in more and more dimensions, and nested formulas, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...box import Box
from ...charts.chart import Figure
from ...compiler.pipeline import compile
from ...theorems.classes import Ridges, bits_floor
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import bound, growth, slope
from .shared import figure, line, panel, where, within

DIMENSIONS = (2, 4, 8, 16)  # a factor of 8: enough for an exponent
RIDGES = 4000  # of the mixture that is drawn from
WANTED = 0.5  # the sup error that ridges are asked for, of functions up to 1
POINTS = 4000  # of the cube at which a draw is compared, in blocks of 500
DEPTHS = (1, 2, 3, 4)  # of nested sines
TOLERANCES = (1e-3, 1e-5, 1e-7, 1e-9)  # what float64 certifies with room


def cells(quick: bool) -> tuple[Cell, ...]:
    seeds = (0,) if quick else (0, 1, 2)
    nested = grid(task=("nested",), depth=DEPTHS[:3] if quick else DEPTHS, eps=TOLERANCES)
    return grid(seeds, task=("ridges",), dim=DIMENSIONS[:3] if quick else DIMENSIONS) + nested


def formula(depth: int) -> tuple[str, Box]:
    """y_k = sin(x_k + y_{k+1}/2): as many nonlinear operations as variables, one inside the other."""
    text = ""
    for k in reversed(range(depth)):
        text = f"sin(x{k}{f' + {text}/2' if text else ''})"
    return text, Box(**{f"x{k}": (-1.5, 1.5) for k in range(depth)})


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    if settings["task"] == "nested":
        net = compile(*formula(settings["depth"]), eps=settings["eps"], dtype=torch.float64)
        return {"heads": net.size.heads, "anchors": net.size.anchors, "bound": net.bound}
    rng, dim = np.random.default_rng(seed), settings["dim"]
    W, phase = rng.normal(size=(RIDGES, dim)) / np.sqrt(dim), rng.uniform(0, 2 * np.pi, RIDGES)
    amount = rng.choice([-1.0, 1.0], RIDGES) / RIDGES
    count = Ridges(dim, 1.0, float(np.abs(W).sum(1).mean())).count(WANTED)
    drawn = np.bincount(rng.integers(0, RIDGES, count), minlength=RIDGES) / count * np.sign(amount)
    worst = 0.0
    for x in rng.uniform(-1, 1, size=(POINTS // 500, 500, dim)):
        worst = max(worst, float(np.abs(np.cos(x @ W.T + phase) @ (drawn - amount)).max()))
    return {"heads": count, "sup": worst, "wanted": WANTED, "bits": bits_floor(1.0, 2.0, dim, WANTED / 4)}


def figures(records: Sequence[Record]) -> list[Figure]:
    ridges = where(records, task="ridges")
    series = line("heads for ridges", ridges, "dim", "heads")
    series += line("bits for all Lipschitz functions, at least", ridges, "dim", "bits", style="bound")
    caption = (
        "Heads that reach a sup error of 1/2 on mixtures of ridges, against the number of variables, and the bits that "
        "all functions with Lipschitz constant 1 take for 1/8."
    )
    panels = panel("sizes for classes", "variables", "size", series, log_y=True)
    return figure("sizes", caption, panels, "Ridges grow slowly with the dimension, the lower bound exponentially.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    ridges, nested = where(records, task="ridges"), where(records, task="nested")
    found += within("sup error of drawn ridges against its bound", ridges, "sup", "wanted", better=1e3)
    if len({r["dim"] for r in ridges}) > 2:
        fit = slope([r["dim"] for r in ridges], [r["heads"] for r in ridges])
        found.append(growth("heads for ridges against the number of variables", 1.0, fit, tolerance=0.25))
    if nested:
        limits = [(float(r["heads"]), 2.0 * r["depth"]) for r in nested]
        found.append(bound("heads of nested formulas against twice their operations", limits))
    deepest = where(nested, depth=max((r["depth"] for r in nested), default=0))
    if len(deepest) > 2:
        fit = slope([-np.log(r["eps"]) for r in deepest], [r["anchors"] for r in deepest])
        found.append(growth("anchors of the deepest formula against log 1/eps", 1.0, fit, tolerance=0.25))
    return found


EXPERIMENT = Experiment(
    name="classes",
    title="Sizes for classes of functions",
    claim="An expression of N operations takes at most 2 N heads with O(log 1/eps) anchors each; a mixture of ridges "
    "in D variables O(D log D) ridges for a fixed sup error; all Lipschitz functions take exponentially many bits.",
    label="E6",
    varies="The number of variables; the depth of nested formulas; the tolerance.",
    measured_how="Largest error of a draw of ridges at 4,000 points of the cube; heads and anchors of compiled "
    "formulas in float64.",
    judged_how="Every error against its bound without tolerance; heads against 2 N; slopes of least squares on "
    "logarithmic axes at most 1, up to 0.25 for logarithms.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
