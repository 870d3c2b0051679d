"""One network for every length: functions of moments and of a token, on sequences of 1 to 100,000 tokens (E7)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...charts.chart import Figure
from ...compiler.lengths import EveryLength
from ...dtypes import Array
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import threshold
from .shared import figure, line, panel, where, within

LENGTHS = (1, 10, 100, 1_000, 10_000, 100_000)  # five decades
#: Smooth functions of finitely many moments and a token: the moments' functions, h, and both with numpy.
FUNCTIONS: dict[str, tuple[tuple[str, ...], str, Callable[[Array], Array]]] = {
    "sine of a centred token": (("identity", "square"), "sin(x - m0)*m1",
                                lambda x: np.sin(x - x.mean()) * (x**2).mean()),
    "standardised token": (("identity", "square"), "(x - m0)/sqrt(m1 - m0**2 + 2)",
                           lambda x: (x - x.mean()) / np.sqrt((x**2).mean() - x.mean() ** 2 + 2)),
    "softmax of a token": (("exp",), "exp(x)/m0", lambda x: np.exp(x) / np.exp(x).mean()),
    "characteristic function": (("sin", "cos"), "m0**2 + m1**2 + 0.1*x",
                                lambda x: np.sin(x).mean() ** 2 + np.cos(x).mean() ** 2 + 0.1 * x),
}  # fmt: skip
EPS = 1e-6  # of the parts: visible above the rounding of a mean of 100,000


@functools.cache
def network(function: str) -> EveryLength:
    """The network of a function, for all lengths."""
    moments, h, _ = FUNCTIONS[function]
    return EveryLength(moments, h, -1, 1, eps=EPS)


def cells(quick: bool) -> tuple[Cell, ...]:
    return grid((0,) if quick else (0, 1, 2, 3, 4), function=tuple(FUNCTIONS), n=LENGTHS)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    rng, n = np.random.default_rng(seed), settings["n"]
    x, net = rng.beta(0.5, 0.5 + seed, n) * 2 - 1, network(settings["function"])
    off = net(torch.from_numpy(x).unsqueeze(0)).numpy()[0] - FUNCTIONS[settings["function"]][2](x)
    return {"sup": float(np.abs(off).max()), "bound": net.bound(n)}


def figures(records: Sequence[Record]) -> list[Figure]:
    series = []
    for function in FUNCTIONS:
        rows = where(records, function=function)
        series += line(function, rows, "n", "sup", group=function)
        series += line(f"{function}, certified bound", rows, "n", "bound", style="bound", group=function)
    caption = "Largest error of one network for each of four functions of moments against the length, float64."
    panels = panel("one network for every length", "tokens n", "largest error", series, log_x=True, log_y=True)
    return figure("sup", caption, panels, "The error does not grow with the length.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found = within("largest error against its certified bound, every length", records, "sup", "bound", better=1e3)
    for function in FUNCTIONS:
        rows = where(records, function=function)
        if len({r["n"] for r in rows}) > 2:
            short = max(r["sup"] for r in rows if r["n"] <= 100)
            long = max(r["sup"] for r in rows if r["n"] > 100)
            found.append(threshold(f"largest error on long sequences over short ones, {function}", 2.0, long / short))
    return found


EXPERIMENT = Experiment(
    name="every-length",
    title="One network for every length",
    claim="A function of moments of the sequence and of a token is computed by one network for sequences of every "
    "length, with a bound that depends on the length by the rounding of a mean alone.",
    label="E7",
    varies="The function of moments; the length of the sequence, 1 to 100,000 tokens; the sequence.",
    measured_how="Largest error over all tokens, float64.",
    judged_how="Every error against its certified bound without tolerance; errors on long sequences at most twice "
    "those on short ones.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
