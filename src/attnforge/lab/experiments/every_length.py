"""One network for every length: a function of moments and of a token, on sequences of 1 to 100,000 tokens (E7)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...charts.chart import Figure, Panel
from ...compiler.lengths import EveryLength
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import bound, threshold
from .shared import line, pairs, where

LENGTHS = (1, 10, 100, 1_000, 10_000, 100_000)  # five decades
EPS = 1e-6  # of the parts: visible above the rounding of a mean of 100,000


@functools.cache
def network() -> EveryLength:
    """The network of all cells."""
    return EveryLength(["identity", "square"], "sin(x - m0)*m1", -1, 1, eps=EPS)


def cells(quick: bool) -> tuple[Cell, ...]:
    return grid((0, 1) if quick else (0, 1, 2, 3, 4), n=LENGTHS[:5] if quick else LENGTHS)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    rng, n = np.random.default_rng(seed), settings["n"]
    X = torch.from_numpy(rng.beta(0.5, 0.5 + seed, n) * 2 - 1).unsqueeze(0)
    wanted = torch.sin(X - X.mean(1, keepdim=True)) * (X**2).mean(1, keepdim=True)
    return {"sup": float((network()(X) - wanted).abs().max()), "bound": network().bound(n)}


def figures(records: Sequence[Record]) -> list[Figure]:
    series = line("largest error", where(records), "n", "sup")
    series += line("certified bound", where(records), "n", "bound", style="bound")
    if not series:
        return []
    caption = "Largest error of one network for sin(x - mean) mean(x^2) against the length of the sequence, float64."
    panel = Panel("one network", "tokens n", "largest error", tuple(series), log_x=True, log_y=True)
    return [Figure("sup", caption, (panel,), "The error does not grow with the length.")]


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    if limits := pairs(records, "sup", "bound"):
        found.append(bound("largest error against its certified bound, every length", limits, better=1e3))
    if len({r["n"] for r in records}) > 2:
        short = max(r["sup"] for r in records if r["n"] <= 100)
        long = max(r["sup"] for r in records if r["n"] > 100)
        found.append(threshold("largest error on long sequences over that on short ones", 2.0, long / short))
    return found


EXPERIMENT = Experiment(
    name="every-length",
    title="One network for every length",
    claim="A function of moments of the sequence and of a token is computed by one network for sequences of every "
    "length, with a bound that depends on the length by the rounding of a mean alone.",
    label="E7",
    varies="The length of the sequence, 1 to 100,000 tokens; the sequence.",
    measured_how="Largest error over all tokens, float64.",
    judged_how="Every error against its certified bound without tolerance; errors on long sequences at most twice "
    "those on short ones.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
