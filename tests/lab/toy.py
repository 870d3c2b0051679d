"""A small experiment with a known answer: the sup distance of a cold anchor head to the identity, by hand, in numpy.

It lives in a module of its own because the processes that measure a cell import it by name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnforge.lab import verdicts
from attnforge.lab.experiment import Cell, Experiment, Figure, Finding, Heat, Panel, Record, Series, grid
from attnforge.lab.verdicts import slope

SIZES = (4, 8, 16, 32)


def cells(quick: bool) -> tuple[Cell, ...]:
    return grid(seeds=(0,) if quick else (0, 1), kind=("cold", "noisy"), p=SIZES if quick else (*SIZES, 64, 128))


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    p = settings["p"]
    anchors = np.linspace(-1.0, 1.0, p)
    y = np.linspace(-1.0, 1.0, 64 * p)
    spread = torch.randn(len(y)).abs().numpy() * 0.1 if settings["kind"] == "noisy" else 0.0
    distance = np.abs(y[:, None] - anchors).min(1) + spread / p
    return {"error": float(distance.max()), "bound": 1 / (p - 1), "noise": float(np.random.rand())}


def slow(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    time.sleep(0.25)
    return {**measure(settings, seed), "process": os.getpid()}


def counted(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Leaves a mark for every measurement, so that a test can count them."""
    with open(Path(os.environ["TOY_MARKS"]), "a", encoding="utf-8") as file:
        file.write(f"{settings['kind']} {settings['p']} {seed}\n")
    time.sleep(float(os.environ.get("TOY_SLEEP", "0")))
    return measure(settings, seed)


def broken(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    if settings["p"] == 8:
        raise ZeroDivisionError("no such anchor")
    return measure(settings, seed)


HELD: list[bytes] = []


def hoard(number: int) -> tuple[int, int]:
    """Every call after a process's first takes more memory than joblib lets a worker keep, and more than a second."""
    if HELD:
        HELD.append(b"x" * 350_000_000)
        time.sleep(1.1)
    HELD.append(b"")
    return number, os.getpid()


def deadly(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    if settings["p"] == 8:
        os._exit(9)
    return measure(settings, seed)


def figures(records: Sequence[Record]) -> tuple[Figure, ...]:
    series = []
    for kind in ("cold", "noisy"):
        rows = [r for r in records if r["kind"] == kind]
        at = sorted({r["p"] for r in rows})
        errors = [[r["error"] for r in rows if r["p"] == p] for p in at]
        middle = [float(np.mean(e)) for e in errors]
        series.append(Series(f"{kind} head", at, middle, [min(e) for e in errors], [max(e) for e in errors]))
    at = sorted({r["p"] for r in records})
    series.append(Series("bound of the theorem", at, [1 / (p - 1) for p in at], style="bound"))
    heat = Heat(np.exp(-np.abs(np.subtract.outer(np.arange(12), np.arange(16)))).tolist(), "weight", 0, 1)
    return (
        Figure("error", "The error of a cold head against its anchors.", [
            Panel("Error against anchors", "anchors p", "largest error", series, log_x=True, log_y=True),
            Panel("Weights", "anchor", "token", heat=heat),
        ], "Two falling lines under a dashed one, and a band of weights."),
    )  # fmt: skip


def judge(records: Sequence[Record]) -> tuple[Finding, ...]:
    cold = [r for r in records if r["kind"] == "cold"]
    fit = slope([r["p"] for r in cold], [r["error"] for r in cold])
    return (
        verdicts.rate("slope of the error in p", -1, fit),
        verdicts.bound("error of the cold head", [(r["error"], r["bound"] * (1 + 1e-12)) for r in cold]),
        verdicts.threshold("error at the largest p", 1e-9, cold[-1]["error"]),
    )


TOY = Experiment(
    name="toy",
    title="A toy",
    claim="A cold head with p anchors is off by at most half their distance.",
    label="A2",
    varies="anchors p from 4 to 128, with and without noise",
    measured_how="the largest distance on a fine grid",
    judged_how="the slope on logarithmic axes, and the bound at every p",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
SLOW, COUNTED, BROKEN, DEADLY = (replace(TOY, measure=m) for m in (slow, counted, broken, deadly))
