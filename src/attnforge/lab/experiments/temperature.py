"""Error against the inverse temperature kappa, over six decades and three dtypes (A2, A3, A5).

One head, evenly spaced anchors, values at the anchors: the ramp of the theorem. Hot, it is diffuse: the ends of the
table are missed by far. Warm, it interpolates, and its error in the interior falls as exp(-pi^2/kappa). Cold, it
selects, and its output is a staircase of half a spacing. Rounding moves the position by about u p^2/8 spacings whatever
kappa is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ...certificates.rounding import UNIT
from ...charts.chart import Figure, Series, Zone
from ...dtypes import DTYPES
from ...network import AttentionOnly
from ...theorems import ramp
from ...theorems.ramps import BALANCED
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import bound, close, threshold
from .shared import figure, line, panel, where, within

A, B = -1.0, 1.0  # the ramp's ends; errors are in spacings, so that any interval would do
TRIED = ("float64", "float32", "bfloat16")
SOLVED = (0.5, 3.0)  # the kappa for which A3 is compared: below, float64 rounding is larger; above, it does not speak
WITHIN = 0.05  # relative distance from A3's amplitude that agrees with it
ALLOWED = 4.0  # times u p^2/8 spacings: A5 says "about"
STAIRCASE = 0.9  # mean largest weight from which a head is said to select
DIFFUSE = 0.25  # share of the table that the weights are spread over from which a head is said to be diffuse


def cells(quick: bool) -> tuple[Cell, ...]:
    steps = 4 if quick else 10
    kappas = [round(10 ** (i / steps), 6) for i in range(-3 * steps, 3 * steps + 1)]
    kappas = sorted({*kappas, 0.5, BALANCED, 3.0})
    return grid(p=(33,) if quick else (33, 129), dtype=TRIED, kappa=kappas)


@torch.no_grad()
def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    p, kappa = settings["p"], settings["kappa"]
    step = (B - A) / (p - 1)
    m = ramp(torch.ones(1, dtype=torch.float64), 0.0, A, B, p, variant="warm", radius=B)
    net = cast(AttentionOnly, m.net)
    group = next(net.groups())
    group.M_K.mul_(kappa / BALANCED)  # the temperature, and nothing else
    dtype = getattr(torch, settings["dtype"])
    head = net.to(dtype)
    # every fortieth of a spacing: crests of the sine of A3 are among the points; and beside ties, where steps are
    even = torch.linspace(A, B, 40 * (p - 1) + 1, dtype=torch.float64)
    ties = A + step * (torch.arange(p - 1, dtype=torch.float64) + 0.5)
    y = torch.cat([even, ties - 0.004 * step, ties + 0.004 * step]).to(dtype)[:, None]
    away = (head(y).double() - y.double()).abs()[:, 0] / step
    weights = group.weights(head.layers[0](y))[:, 0].double()
    inside = y[:, 0].double().abs() <= (B - A) / 4
    spread = torch.special.entr(weights[inside]).sum(-1).exp()
    return {
        "interior": float(away[inside].max()),
        "whole": float(away.max()),
        "largest_weight": float(weights[inside].amax(-1).mean()),
        "keys_used": float(spread.mean()) / p,
        "interpolation": interpolation(kappa),
        "kink": kink(kappa, p),
        "staircase": 0.5 if kappa >= 1 else None,
        "rounding": UNIT[DTYPES[settings["dtype"]]] * p**2 / 8,
    }


def interpolation(kappa: float) -> float:
    """A3: the largest error in the interior of a long table, in spacings, where it speaks (kappa <= 3)."""
    return 2 * math.pi / kappa * math.exp(-(math.pi**2) / kappa) if kappa <= 3 else 0.5


def kink(kappa: float, p: int) -> float:
    """The error at the end of a table of p anchors, in spacings: the mean distance of the anchors as weighed there."""
    weights = [math.exp(-kappa * m * m) for m in range(p)]
    return sum(m * w for m, w in enumerate(weights)) / sum(weights)


def mode(record: Record) -> str:
    """How a head fails at this temperature, by the weights alone."""
    if record["keys_used"] > DIFFUSE:
        return "diffuse"
    return "staircase" if record["largest_weight"] > STAIRCASE else "interpolates"


def figures(records: Sequence[Record]) -> list[Figure]:
    made = []
    for p in sorted({r["p"] for r in records}):
        panels = []
        for dtype in TRIED:
            chosen = where(records, p=p, dtype=dtype)
            series: list[Series] = []
            series += line("interior", chosen, "kappa", "interior", group="interior")
            series += line("A3: interpolation", where_solved(chosen), "kappa", "interpolation", "bound", "interior")
            series += line("whole interval", chosen, "kappa", "whole", group="whole")
            series += line("end of the table", chosen, "kappa", "kink", "bound", "whole")
            series += line("A2: half a spacing", chosen, "kappa", "staircase", "bound")
            series += line("A5: rounding, about", chosen, "kappa", "rounding", "bound")
            x, y = "inverse temperature kappa (large is cold)", "largest error, in spacings"
            panels += panel(dtype, x, y, series, log_x=True, log_y=True, zones=zones(chosen))
        caption = (
            f"A ramp of {p} anchors at every temperature. Too hot, the weights are diffuse and the ends are missed; in "
            "between it interpolates; too cold, the output is a staircase of half a spacing. Where a measured curve "
            "leaves its prediction for the line marked A5, rounding has taken over."
        )
        made += figure(f"kappa-p{p}", caption, panels, "Error against kappa: a valley between two failures.")
    return made


def where_solved(records: Sequence[Record]) -> list[Record]:
    """Where A3 speaks, and predicts more than nothing."""
    return [r for r in records if r["kappa"] <= SOLVED[1] and r["interpolation"] > 1e-17]


def zones(records: Sequence[Record]) -> list[Zone]:
    """The stretches of kappa where the head is diffuse, and where it is a staircase."""
    hot = [r["kappa"] for r in records if mode(r) == "diffuse"]
    cold = [r["kappa"] for r in records if mode(r) == "staircase"]
    found = [Zone(None, max(hot), "too hot: diffuse")] if hot else []
    return found + ([Zone(min(cold), None, "too cold: staircase")] if cold else [])


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    exact = where(records, dtype="float64")
    solved = [r for r in exact if SOLVED[0] <= r["kappa"] <= SOLVED[1]]
    if solved:
        off = max(abs(r["interior"] / r["interpolation"] - 1) for r in solved)
        name = "interior error over A3's (2 pi/kappa) exp(-pi^2/kappa) spacings, kappa 0.5 to 3, float64: off 1 by"
        found.append(threshold(name, WITHIN, off))
    found += within("error of cold heads (kappa >= 1) against A2, half a spacing, float64", exact, "whole", "staircase")
    if exact:
        coldest = max(exact, key=lambda r: (r["kappa"], r["p"]))
        found.append(close("error at the coldest kappa in spacings: a staircase", 0.5, coldest["whole"], WITHIN))
        ends = [abs(r["whole"] / r["kink"] - 1) for r in exact if r["kink"] > 2 * r["interpolation"]]
        if ends:
            name = "error of hot heads over that at the end of the table, float64: off 1 by"
            found.append(threshold(name, WITHIN, max(ends)))
    real = {(r["p"], r["kappa"]): r["staircase"] or r["whole"] for r in exact}
    for dtype in ("float32", "bfloat16"):
        limits = [
            (r["whole"], real[r["p"], r["kappa"]] + ALLOWED * r["rounding"])
            for r in where(records, dtype=dtype)
            if (r["p"], r["kappa"]) in real
        ]
        if limits:
            note = "half a spacing where kappa >= 1 (A2), float64's error elsewhere, and A5's shift of the position"
            name = f"error in {dtype} against that of real arithmetic plus {ALLOWED:g} u p^2/8 spacings"
            found.append(bound(name, limits, note=note).laid_to("float32"))
    return found


EXPERIMENT = Experiment(
    name="temperature",
    title="Error against temperature",
    claim="Cold heads err by at most half a spacing (A2), warm ones by (2 pi/kappa) exp(-pi^2/kappa) spacings in the "
    "interior (A3), and rounding adds about u p^2/8 spacings at any temperature (A5): sending the temperature to "
    "zero is the worst choice.",
    label="A2, A3, A5",
    varies="The inverse temperature kappa from 0.001 to 1000; float64, float32 and bfloat16; the number of anchors.",
    measured_how="The theorem's ramp on [-1, 1] with its keys scaled to the temperature, at 40 points a spacing: "
    "largest error in the middle half (interior) and on the whole interval, the mean largest weight, and the share "
    "of the table that the weights are spread over (exponential of their entropy).",
    judged_how="A3 and the error at the end of the table within 5 % in float64; A2 without tolerance for kappa >= 1; "
    "in other dtypes at most half a spacing (kappa >= 1) or float64's error, plus four times A5's estimate. A head "
    "is called diffuse when its weights use more than a quarter of the table, a staircase when the mean largest "
    "weight is above 0.9.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)  # fmt: skip
