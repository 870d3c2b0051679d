"""Error against the number of anchors for a function analytic in a strip: geometric, by A9, and twice so in resonance.

Tables with the values of the lemma for 1/(1 + y^2), at a generic and at the resonant temperature, beside fitted ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...charts.chart import Figure
from ...expressions.composite import composite
from ...heads.anchor.bound import AnchorWeights
from ...heads.anchor.fit import WARM
from ...heads.anchor.head import AnchorHead
from ...heads.fast.table import dropped
from ...theorems.spectral import Density, lattice_values, resonant
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import bound, rate, slope, threshold
from .shared import figure, line, pairs, panel, where, within

HALF = 2.0  # the interval is [-2, 2]: twice as far as the poles are away
CLASS = Density(0.5, 1.0)  # of 1/(1 + y^2)
SPACINGS = tuple(2 / k for k in range(2, 9))  # whole numbers of them make up 2, so that an anchor lies at 0
SHARE = 0.35  # kappa is this share of pi spacing: values stay below 1.6, and nothing resonates
LOOKED_AT = 4001  # points of the interval: hundreds between any two anchors
TABLES = ("generic", "resonant")
REACH, COUNTS = 3.0, (17, 25, 33, 41, 49)  # of the search: odd numbers on [-3, 3] have an anchor at 0
GAIN = 5.0  # at least what resonance makes of a certified bound: with 17 anchors it was 13


def cells(quick: bool) -> tuple[Cell, ...]:
    spacings = SPACINGS[:5] if quick else SPACINGS
    found = grid(table=(*TABLES, "fitted"), spacing=spacings)
    return found + grid(table=("searched",), count=COUNTS[: 3 if quick else None])


def table_of(settings: Mapping[str, Any]) -> tuple[AnchorWeights, float]:
    """The lemma's table on [-2, 2] with as many guards as it takes, and its bound."""
    step, resonance = settings["spacing"], settings["table"] == "resonant"
    kappa = resonant(step, CLASS.decay) if resonance else SHARE * math.pi * step
    aim = CLASS.resonance(step) if resonance else CLASS.interpolation(step, kappa)
    guards = 1
    while 2 * CLASS.values(step, kappa) * dropped(kappa, guards) > 0.1 * aim:
        guards += 1
    inner = round(2 * HALF / step)
    places = step * (np.arange(-guards, inner + guards + 1) - inner // 2)
    value = lattice_values(lambda w: 0.5 * np.exp(-w), step, kappa, places)
    beta = kappa / step**2
    return AnchorWeights(2 * beta * places, -beta * places**2, value), CLASS.bound(step, kappa, guards, resonance)


def _lorentz(y: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + y * y)


def searched(count: int) -> dict[str, Any]:
    """Certified bounds of what the search finds with even anchors, and at the temperatures tried without a pole."""
    function, options = composite("1/(1+y**2)"), {"potential": "square", "dtype": torch.float64, "anchors": count}
    head = AnchorHead.fit(function, -REACH, REACH, **options)  # type: ignore[arg-type]
    others = (AnchorHead.fit(function, -REACH, REACH, kappa=kappa, **options) for kappa in WARM)  # type: ignore[arg-type]
    y = np.linspace(-REACH, REACH, LOOKED_AT)
    error = float(np.abs(head.weights_in_float64().evaluate(y) - 1 / (1 + y * y)).max())
    return {"anchors": count, "sup": error, "bound": head.bound, "without": min(h.bound or math.inf for h in others)}


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    if settings["table"] == "searched":
        return searched(settings["count"])
    y = np.linspace(-HALF, HALF, LOOKED_AT)
    if settings["table"] == "fitted":
        like, _ = table_of({**settings, "table": "generic"})
        head = AnchorHead.fit(_lorentz, -HALF, HALF, anchors=len(like.slope), potential="square", dtype=torch.float64)
        weights, limit = head.weights_in_float64(), None
    else:
        weights, limit = table_of(settings)
    error = float(np.abs(weights.evaluate(y) - 1 / (1 + y * y)).max())
    return {"anchors": len(weights.slope), "sup": error, "bound": limit, "largest": float(np.abs(weights.value).max())}


def figures(records: Sequence[Record]) -> list[Figure]:
    names = {"generic": "values of A9", "resonant": "in resonance", "fitted": "fitted"}
    series = [s for table, name in names.items() for s in line(name, where(records, table=table), "anchors", "sup")]
    for table in TABLES:
        series += line(f"bound, {names[table]}", where(records, table=table), "anchors", "bound", style="bound")
    caption = (
        "Largest error of heads for 1/(1 + y^2) on [-2, 2] in float64 against the number of anchors, with the bounds "
        "of A9: the values of the lemma at a generic temperature and at kappa = pi Delta/2d, and fitted values."
    )
    panels = panel("1/(1 + y^2) on [-2, 2], float64", "anchors", "largest error", series, log_y=True)
    made = figure("sup", caption, panels, "Errors fall geometrically, in resonance twice as fast.")
    rows = where(records, table="searched")
    series = line("the search", rows, "anchors", "bound", "bound")
    series += line("without the pole", rows, "anchors", "without")
    caption = "Certified bounds for 1/(1 + y^2) on [-3, 3] with even anchors: the search, and without the pole."
    panels = panel("1/(1 + y^2) on [-3, 3], float64", "anchors", "certified bound", series, log_y=True)
    return made + figure("search", caption, panels, "Looking for resonance pays where anchors are even.")


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    for table in TABLES:
        rows = where(records, table=table)
        found += within(f"largest error of A9's values, {table}, against its bound", rows, "sup", "bound")
        if len(rows) > 2:  # the exponent against pi d/Delta itself: anchors count the guards, too
            times = 2.0 if table == "resonant" else 1.0
            fit = slope([math.exp(math.pi * CLASS.decay / r["spacing"]) for r in rows], [r["sup"] for r in rows])
            found.append(rate(f"error against exp(pi d/Delta), {table}", -times, fit))
    generic = {r["spacing"]: r["bound"] for r in where(records, table="generic")}
    ratios = [r["sup"] / generic[r["spacing"]] for r in where(records, table="fitted") if r["spacing"] in generic]
    if rows := where(records, table="searched"):
        found.append(bound("largest error of the search against its certified bound", pairs(rows, "sup", "bound")))
        gain = min(r["without"] / r["bound"] for r in rows)
        found.append(threshold("certified bound without the pole over that of the search, smallest", GAIN, gain, True))
    if ratios:
        note = "the best values of a linear space do at least as well; least squares is not proved to"
        found.append(threshold("error of fitted values over A9's bound, the largest", 1.0, max(ratios), note=note))
    return found


EXPERIMENT = Experiment(
    name="spectral",
    title="Error against the number of anchors, analytic functions",
    claim="For a function with spectrum at most A exp(-d|w|) a warm head over even anchors errs by at most "
    "2 A exp(-pi d/Delta) (1/d + C/(pi Delta/kappa - d)), and by about 6 (A/d) exp(-2 pi d/Delta) in resonance.",
    label="A9",
    varies="The spacing, and with it the number of anchors; how the values came about: those of the lemma at a generic "
    "and at the resonant temperature, and fitted ones; and what the search for even anchors makes of a pole.",
    measured_how="Largest error at 4,001 points of [-2, 2], in float64.",
    judged_how="Every error against its bound without tolerance; the fitted exponent of exp(pi d/Delta) against -1, in "
    "resonance -2; fitted values against the bound of A9 with the same number of anchors; certified bounds of the "
    "search at most a fifth of those at the temperatures that are tried without a pole.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
