"""Error against the range |b - a|: the theorem's bound (b - a)/p is proportional to it (v1 theorem 3.1, v2 3.4; A2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...charts.chart import Figure
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..training import SEEDS
from .shared import (
    NETWORKS,
    PRECISIONS,
    beside_published,
    figure,
    grows,
    measured_ramp,
    published_figure,
    ramp_panels,
    where,
    within,
)

ANCHORS = 60  # as published
RANGES = (10, 20, 30, 40, 50)  # as published
WIDE = (0.5, 1.5, 5, 15, 50, 150, 500)  # three decades, to fit a slope to
#: Means of the published scripts, mean squared error over 32 channels, 11 seeds, p = 60, one head.
PUBLISHED = {10: 0.0066, 20: 0.037, 30: 0.071, 40: 0.106, 50: 0.129}
LOOKED_AT = 16_000  # scalars: hundreds between any two of the anchors


def cells(quick: bool) -> tuple[Cell, ...]:
    seeds = SEEDS[:2] if quick else SEEDS
    found = grid(task=("line",), network=NETWORKS, dtype=PRECISIONS, range=WIDE)
    found += grid(seeds, task=("published",), network=NETWORKS, dtype=("float32",), range=RANGES)
    some = (10, 20, 50) if quick else RANGES
    return found + grid(seeds, task=("published",), network=("trained",), dtype=("float32",), range=some)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    half = settings["range"] / 2
    return measured_ramp(settings, seed, -half, half, ANCHORS, LOOKED_AT)


def figures(records: Sequence[Record]) -> list[Figure]:
    panels = ramp_panels(where(records, task="line"), "range", "range |b - a|", paper_bound="the paper's bound")
    caption = "Largest error of built ramps with 60 anchors against the range, over three decades."
    alt = "Errors of cold and warm heads grow in proportion to the range."
    made = figure("sup", caption, panels, alt)
    task = where(records, task="published")
    names = {n: n for n in ("trained", *NETWORKS)}
    return made + published_figure(task, "range", "range |b - a|", names, PUBLISHED)


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    lines, task = where(records, task="line", dtype="float64"), where(records, task="published")
    for network in ("cold", "warm"):
        chosen = where(lines, network=network)
        found += grows(f"largest error against |b - a|, built {network}, float64", 1.0, chosen, "range", "sup")
    ramps, cold = where(records, network=NETWORKS), where(lines, network="cold")
    found += within("largest error of every built ramp against its certified bound", ramps, "sup", "bound")
    found += within("largest error of cold heads against the paper's bound, float64", cold, "sup", "paper_bound")
    trained = where(task, network="trained")
    quantity = "mean squared error against |b - a|, trained (an error of |b - a| squared)"
    found += grows(quantity, 2.0, trained, "range", "mse", cause="training")
    return found + beside_published(trained, "range", "|b - a|", PUBLISHED)


EXPERIMENT = Experiment(
    name="range",
    title="Error against the range |b - a|",
    claim="At a fixed number of anchors the error of a ramp is at most proportional to its range: (b - a)/p.",
    label="A2 (v1 theorem 3.1, v2 theorem 3.4)",
    varies="The range |b - a|: 0.5 to 500 for built heads of 60 anchors, 10 to 50 in the published setting.",
    measured_how="Built heads: largest error at 16,000 scalars and beside the middles between anchors. Published "
    "setting: mean squared error over 32 channels on 200 unseen samples, for seeds 1234 to 1244.",
    judged_how="Slopes of least squares on logarithmic axes with 95 % intervals: at most 1 for errors, 2 for squared "
    "ones; every built error against its certified bound without tolerance; trained means against the published ones "
    "within two standard deviations of a run.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
