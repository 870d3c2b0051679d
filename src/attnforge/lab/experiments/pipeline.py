"""Algorithms one after the other in one network: what was promised before the run, and what runs do (F8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...charts.chart import Figure
from ...incontext.certificate import factors
from ...incontext.pipeline import Pipeline, PipelinePlan, curvatures, plan_pipeline
from ..experiment import Cell, Experiment, Finding, Record, grid
from .shared import figure, line, panel, where, within

FITS = ("ridge", "ridge, threshold", "logistic", "logistic, threshold")
PENALTIES = (0.5, 0.125, 0.03125, 0.0078125)  # each a quarter of the one before: condition numbers grow fourfold
ROWS, COLUMNS = 60, 3  # a prompt whose hundreds of layers take seconds
EPS, THRESHOLD, DEVIATION = 1e-5, 0.05, 0.1  # asked for; what weights shrink by; less than any column deviates


def cells(quick: bool) -> tuple[Cell, ...]:
    chosen = PENALTIES[:3] if quick else PENALTIES
    return grid((0,) if quick else (0, 1, 2), fit=FITS[::2] + FITS[1::2] if not quick else FITS[1:3], penalty=chosen)


def exact(X: np.ndarray, y: np.ndarray, fit: str, penalty: float) -> np.ndarray:
    """The weights of the same algorithms, by Newton's method in float64."""
    Z, w = (X - X.mean(0)) / X.std(0), np.zeros(X.shape[1])
    for _ in range(50):
        z = Z @ w
        mean, bend = (z, np.ones_like(z)) if fit.startswith("ridge") else (1 / (1 + np.exp(-z)), None)
        bend = mean * (1 - mean) if bend is None else bend
        off = mean - (y - y.mean() if fit.startswith("ridge") else y)
        hessian = (Z * bend[:, None]).T @ Z / len(Z) + penalty * np.eye(len(w))
        w = w - np.linalg.solve(hessian, Z.T @ off / len(Z) + penalty * w)
    return np.sign(w) * np.maximum(np.abs(w) - THRESHOLD, 0) if "threshold" in fit else w


def deepest(plan: PipelinePlan) -> float:
    """What the lemmas say of the depth: c sqrt(cond) ln(start / left), c = 1/2 for heavy ball (F4b), 2 for F4c."""
    low, high = curvatures(COLUMNS, plan.penalty, 0.0, plan.fit)
    start = plan.label / (2 * math.sqrt(plan.penalty)) if plan.fit == "ridge" else math.sqrt(4 * math.log(2) / low)
    grown = factors("heavy ball", plan.rho, plan.depth)[0] if plan.fit == "ridge" else 1.0
    digits = math.log(1.001 * grown * start / dict(plan.ledger)["start"])
    return (0.5 if plan.fit == "ridge" else 2.0) * math.sqrt(high / low) * 1.001 * digits


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    fit, penalty, rng = settings["fit"], settings["penalty"], np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(ROWS, COLUMNS))
    X[:, 1] = 0.8 * X[:, 0] + 0.2 * X[:, 1]  # columns that have much in common
    raw = X @ rng.normal(size=COLUMNS) + 0.3 * rng.normal(size=ROWS)
    y = raw / np.abs(raw).max() if fit.startswith("ridge") else (raw > 0).astype(float)
    plan = plan_pipeline(
        ROWS, COLUMNS, EPS, penalty=penalty, fit="ridge" if fit.startswith("ridge") else "logistic",
        threshold=THRESHOLD if "threshold" in fit else 0.0, deviation=DEVIATION,
    )  # fmt: skip
    found = Pipeline(plan).weights(torch.from_numpy(X), torch.from_numpy(y)).numpy()
    reached = float(np.linalg.norm(found - exact(X, y, fit, penalty)))
    return {"depth": plan.depth, "most": deepest(plan), "layers": plan.layers, "reached": reached,
            "promised": plan.bound}  # fmt: skip


def figures(records: Sequence[Record]) -> list[Figure]:
    series = []
    for fit in FITS:
        rows = where(records, fit=fit)
        series += line(fit, rows, "layers", "reached", style="points", group=fit)
        series += line(f"{fit}, promised", rows, "layers", "promised", style="bound", group=fit)
    caption = "Distance of the weights from the exact algorithms after the planned layers, and what was promised."
    panels = panel("standardise, then fit, then shrink", "layers of the network", "distance", series, log_y=True)
    return figure("promise", caption, panels, "Every run ends below what was promised before it.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found = within("distance after the run against its bound before the run", records, "reached", "promised", 1e6)
    found += within("depth against c sqrt(cond) log(start / left), its bound", records, "depth", "most")
    return found


EXPERIMENT = Experiment(
    name="pipeline",
    title="Algorithms one after the other",
    claim="Standardising, ridge or logistic regression and a soft threshold in one network end within a distance of "
    "the exact algorithms that is known before any run, for every prompt within three sizes.",
    label="F8",
    varies="The regression, with and without a threshold; the penalty, and with it the condition number; the data.",
    measured_how="Euclidean distance of the weights (standardised columns) from Newton's method in float64 after "
    "exactly the planned layers; 60 rows of 3 columns, eps 1e-5.",
    judged_how="Every distance against its promise, and every depth against c sqrt(cond) log(start / left) with the "
    "constants of F4b and F4c, without tolerance.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
