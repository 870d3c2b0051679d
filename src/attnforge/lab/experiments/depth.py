"""Depth before the run: what a plan promises for least squares, beside what frozen networks then do (F7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...charts.chart import Figure
from ...incontext.planning import plan
from ...incontext.prompt import column_scale, doublings_for
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import growth, slope
from .shared import figure, line, panel, where, within

CONDITIONS = (4.0, 16.0, 64.0, 256.0, 1024.0)  # of the population; that of a sample is a little different
ROWS, COLUMNS = 200, 5  # a prompt that a run of a thousand layers takes seconds for
EPS = 1e-4  # what is asked for: above what steps add up to at the largest condition number


def cells(quick: bool) -> tuple[Cell, ...]:
    return grid((0, 1) if quick else (0, 1, 2, 3), condition=CONDITIONS[:4] if quick else CONDITIONS)


def prompt(condition: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with columns of root mean square 1 and about this condition number, and labels with noise."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(ROWS, 1))  # what columns share makes their Gram matrix as bad as is wanted
    share = (condition - 1) / (condition - 1 + COLUMNS)
    x = math.sqrt(share) * common + math.sqrt(1 - share) * rng.normal(size=(ROWS, COLUMNS))
    x = x / column_scale(x, 0.0)
    return x, x @ rng.normal(size=COLUMNS) + 0.1 * rng.normal(size=ROWS)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    x, y = prompt(settings["condition"], seed)
    gram = x.T @ x / ROWS
    values, best = np.linalg.eigvalsh(gram), np.linalg.solve(gram, x.T @ y / ROWS)
    spread = float(values[-1] / values[0]) * (1 + 1e-6)
    found = plan(
        ROWS, COLUMNS, spread, EPS, radius=float(np.linalg.norm(x, axis=1).max()) * (1 + 1e-12),
        distance=float(np.linalg.norm(best)) * (1 + 1e-9), residual=float(np.abs(x @ best - y).max()) * (1 + 1e-9),
    )  # fmt: skip
    reached = float(np.linalg.norm(found.weights(x, y) - best))
    root = math.sqrt(2.0 ** doublings_for(1.0, spread))
    return {"root": root, "depth": found.depth, "reached": reached, "promised": found.bound}


def figures(records: Sequence[Record]) -> list[Figure]:
    series = line("reached", where(records), "depth", "reached", style="points")
    series += line("promised before the run", where(records), "depth", "promised", style="bound")
    caption = "Distance from the least-squares optimum after the planned number of applications, and what was promised."
    panels = panel("least squares, float64", "applications of the block", "distance", series, log_y=True)
    return figure("promise", caption, panels, "Every run ends below what was promised for it.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found = within("distance after the run against its bound before the run", records, "reached", "promised", 1e6)
    if len({r["root"] for r in records}) > 2:
        fit = slope([r["root"] for r in records], [r["depth"] for r in records])
        found.append(growth("depth against the root of the condition number", 1.0, fit, tolerance=0.25))
    return found


EXPERIMENT = Experiment(
    name="depth",
    title="Depth before the run",
    claim="From the number of rows and columns, the condition number and three sizes of the data follows, before any "
    "run, how deep a network for least squares must be and how far from the optimum it ends: O(sqrt(cond) log 1/eps).",
    label="F7",
    varies="The condition number of the rows; the data.",
    measured_how="Euclidean distance of the weights from the least-squares optimum (solved in float64) after exactly "
    "the planned number of applications, 200 rows of 5 columns, eps 1e-4.",
    judged_how="Every distance against its promise without tolerance; the slope of the depth against the root of the "
    "condition number on logarithmic axes at most 1, up to 0.25 for the logarithm in it.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
