"""True jumps: sigmoids against a staircase in L^1, L^2 and L^4, and the largest error, which stays (B8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...charts.chart import Figure
from ...theorems.jumps import jump_error, jump_floor, staircase
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import threshold
from .shared import falls, figure, line, panel, where, within

PLACES, JUMPS = (-0.55, 0.1, 0.7), (1.0, -0.6, 0.3)  # a staircase that goes up and down
SHARP = (1e2, 1e3, 1e4, 1e5, 1e6)  # four decades
POWERS = (1, 2, 4)  # of the mean: from where jumps cost least to where they nearly cost what the largest error does
NEAR = 60.0  # over the sharpness: beyond, a sigmoid is 0 or 1 up to e^-60
POINTS = 20_001  # of an integral over each side of a jump: Simpson's rule is exact to 1e-12 there


def cells(quick: bool) -> tuple[Cell, ...]:
    return grid(p=POWERS, sharpness=SHARP[:4] if quick else SHARP)


@torch.no_grad()
def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    beta, p = settings["sharpness"], settings["p"]
    stairs = staircase(PLACES, JUMPS, beta)
    total, sup = 0.0, 0.0
    before = np.cumsum([0.0, *JUMPS])
    for k, place in enumerate(PLACES):
        for side in (-1.0, 1.0):
            beside = k + int(side)
            room = 0.5 * abs(PLACES[beside] - place) if 0 <= beside < len(PLACES) else np.inf
            t = np.linspace(0.0, min(NEAR / beta, room), POINTS)
            y = torch.from_numpy(place + side * t)[:, None]
            off = np.abs(stairs(y).numpy()[:, 0] - before[k + (side > 0)])
            weight = np.ones(POINTS)
            weight[1:-1:2], weight[2:-1:2] = 4.0, 2.0
            total += float(weight @ off**p) * t[1] / 3
            sup = max(sup, float(off.max()))
    floor = jump_floor(beta, 1.0, p, jump=max(map(abs, JUMPS)))
    return {"error": float(total ** (1 / p)), "bound": jump_error(beta, p, JUMPS), "floor": floor, "sup": sup}


def figures(records: Sequence[Record]) -> list[Figure]:
    series = []
    for p in POWERS:
        rows = where(records, p=p)
        series += line(f"L^{p}", rows, "sharpness", "error", group=str(p))
        series += line(f"L^{p}, bound", rows, "sharpness", "bound", style="bound", group=str(p))
    series += line("largest error", where(records, p=1), "sharpness", "sup", style="points")
    caption = "Errors of three sigmoid heads against a staircase with three jumps, in the mean and at the worst point."
    panels = panel("a staircase", "sharpness of the heads", "error", series, log_x=True, log_y=True)
    return figure("jumps", caption, panels, "In the mean the error falls; the largest error is half a jump.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    for p in POWERS:
        rows = where(records, p=p)
        found += within(f"L^{p} error against its bound", rows, "error", "bound")
        found += falls(f"L^{p} error against the sharpness", -1 / p, rows, "sharpness", "error", 0.02)
    if records:
        floor = min(r["error"] / r["floor"] for r in records)
        found.append(threshold("L^p error over what no head of this sharpness is below", 1.0, floor, at_least=True))
        least = min(r["sup"] for r in records)
        found.append(threshold("largest error, at every sharpness", 0.499 * max(map(abs, JUMPS)), least, at_least=True))
    return found


EXPERIMENT = Experiment(
    name="jumps",
    title="True jumps",
    claim="At a jump every head is off by half of it, so that no certificate of the largest error exists; in L^p "
    "sigmoids converge with their sharpness to the power -1/p, and no head of the same slopes does better than by a "
    "constant.",
    label="B8",
    varies="The sharpness of the heads, 100 to 1,000,000; the exponent p = 1, 2, 4.",
    measured_how="L^p distance of the network from the staircase by Simpson's rule on both sides of every jump, and "
    "the largest error seen there, float64.",
    judged_how="Every L^p error against its bound without tolerance; the exponent -1/p up to 0.02; errors at least "
    "the lower bound for one head and the largest jump; the largest error at least 0.499 of the largest jump.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
