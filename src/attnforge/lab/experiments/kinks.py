"""A kink in one head of memory slots: exponential in the number of slots when pieces are spliced (A10), 1/p otherwise.

Spliced heads for relu with more and more guards, each as sharp as its lines are right, beside cold and warm heads over
even anchors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...charts.chart import Figure
from ...heads.anchor.head import AnchorHead
from ...heads.gate.bound import KINK
from ...theorems.kinks import error_floor, splice, warmest
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import rate, slope
from .shared import falls, figure, line, panel, where, within

LO, HI = -1.0, 1.0  # the kink in the middle, lines of length 1 on either side
GUARDS = (1, 2, 3, 4, 5, 6)  # with more, rounding of float64 takes part: a head as sharp has logits of 1e9
EVEN = (9, 17, 33, 65, 129)  # an anchor at the kink
#: Points that are looked at: even ones, and down to 1e-12 from the kink.
NEAR = np.concatenate([np.linspace(LO, HI, 4001), *(s * np.geomspace(1e-12, 1, 4000) for s in (-1, 1))])


def cells(quick: bool) -> tuple[Cell, ...]:
    even = EVEN[:4] if quick else EVEN
    return grid(network=("spliced",), guards=GUARDS) + grid(network=("cold", "warm"), anchors=even)


def head_of(settings: Mapping[str, Any]) -> AnchorHead:
    """The head of a cell, in float64."""
    if settings["network"] != "spliced":
        kappa = 20.0 if settings["network"] == "cold" else 2.72  # the latter balances kink and interior (A3)
        return AnchorHead.fit("relu", LO, HI, anchors=settings["anchors"], temperature=settings["network"], kappa=kappa,
                              potential="square", dtype=torch.float64)  # fmt: skip
    kappa, off = warmest(settings["guards"])
    lines = (HI - LO) * off
    sharp = KINK / (2 * lines) + kappa * (2 * settings["guards"] + 1) / (HI - LO)  # a kink as wrong as the lines
    return splice("relu", LO, HI, sharpness=sharp, guards=settings["guards"], dtype=torch.float64)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    head = head_of(settings)
    weights = head.weights_in_float64()
    y = torch.from_numpy(NEAR)
    error = float((head(y).detach() - y.clamp(min=0)).abs().max())
    span, values = float(np.ptp(weights.slope)), float(np.abs(weights.value).max())
    floor = error_floor(1.0, span, values, 1.0, 1.0) if weights.skip == (0.0, 0.0) else None
    return {"slots": head.size, "sup": error, "bound": head.bound, "span": span, "values": values, "floor": floor}


def figures(records: Sequence[Record]) -> list[Figure]:
    series = [s for n in ("cold", "warm", "spliced") for s in line(n, where(records, network=n), "slots", "sup")]
    series += line("bound, spliced", where(records, network="spliced"), "slots", "bound", style="bound")
    caption = (
        "Largest error of heads of memory slots for relu on [-1, 1] in float64 against the number of slots: even "
        "anchors, cold and warm, and two pieces spliced."
    )
    panels = panel("relu on [-1, 1], float64", "slots", "largest error", series, log_y=True)
    return figure("sup", caption, panels, "Even anchors err by 1/p; spliced pieces fall geometrically.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found = within("largest error of every head against its certified bound", records, "sup", "bound")
    found += within("the least error that A10(c) allows against the measured one", records, "floor", "sup", better=1e9)
    rows = where(records, network="spliced")
    if len(rows) > 2:
        fit = slope([float(np.exp(r["slots"])) for r in rows], [r["sup"] for r in rows])
        found.append(rate("spliced: error against exp(slots)", -np.pi / 2, fit))
    for network in ("cold", "warm"):
        even = where(records, network=network)
        found += falls(f"even anchors, {network}: error against slots", -1.0, even, "slots", "sup")
    return found


EXPERIMENT = Experiment(
    name="kinks",
    title="A kink in one head of memory slots",
    claim="Spliced pieces make relu with an error of about exp(-pi p/2) with p memory slots and logits of size "
    "1/error; no head with slopes of span S and bounded values does better than c/(S log^2 S).",
    label="A10",
    varies="The number of slots, and how the head came about: even anchors, cold and warm, or two pieces spliced.",
    measured_how="Largest error at 12,001 points of [-1, 1], most of them around the kink, in float64.",
    judged_how="Every error against its certified bound and against the lower bound of A10(c) without tolerance; "
    "slopes of least squares against -pi/2 for each slot (spliced) and against -1 on logarithmic axes (even anchors).",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
