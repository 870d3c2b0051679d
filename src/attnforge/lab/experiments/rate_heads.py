"""Error against the number of heads H: H heads of n keys err by O(1/(nH)) (v1 theorem 3.2, v2 theorem 3.9; A6).

Built heads at a fixed number of anchors (48 of them shared out, so that nothing should change) and with 48 anchors for
every head (so that the error should fall as 1/H). Trained networks at the published width hidden/H, at the width of the
theorem's heads whatever H is, and with extra tokens growing with H.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...charts.chart import Figure, Series
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..training import SEEDS, RandomStream, held_out, ramp_data, trained_ramp
from .shared import (
    CHANNELS,
    PRECISIONS,
    beside_published,
    built,
    falls,
    figure,
    gate_line,
    line,
    line_errors,
    panel,
    places,
    published_figure,
    task_errors,
    values_of,
    where,
    within,
)  # fmt: skip

A, B, TOKENS = -25.0, 25.0, 50  # as published
SHARED = 48  # anchors between all heads, besides two ends each: every H below divides it
HEADS = (1, 2, 4, 8, 16)  # as published
#: Means of the published scripts, mean squared error over 32 channels, 11 seeds, p = 60.
PUBLISHED = {1: 0.129, 2: 0.053, 4: 0.031, 8: 0.020, 16: 0.015}
WIDTH = 2  # of a head's keys in the theorem: a position and its square
TRAINED = {
    "trained": "trained, width 32/H",
    "trained, width 2": "trained, width 2",
    "trained, p = 50 + 10 H": "trained, p = 50 + 10 H",
}
BUILT = {"cold": "cold, 50 keys a head", "warm": "warm, 50 keys a head", "gate": "gate"}
LOOKED_AT = 16_000  # scalars: several between any two of the anchors


def cells(quick: bool) -> tuple[Cell, ...]:
    seeds = SEEDS[:2] if quick else SEEDS
    lines = grid(task=("fixed p", "growing p"), network=("cold",), dtype=PRECISIONS, H=HEADS)
    lines += grid(task=("growing p",), network=("warm", "gate"), dtype=PRECISIONS, H=HEADS)
    published = {"task": ("published",), "dtype": ("float32",)}
    found = lines + grid(seeds, **published, network=tuple(BUILT), H=HEADS)
    found += grid(seeds, **published, network=("trained",), H=(1, 2, 4) if quick else HEADS)
    narrow, growing = (HEADS[:2], HEADS[:2]) if quick else (HEADS, HEADS[:-1])
    found += grid(seeds[:1] if quick else seeds, **published, network=("trained, width 2",), H=narrow)
    return found + grid(seeds[: 1 if quick else 5], **published, network=("trained, p = 50 + 10 H",), H=growing)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    network, H, task = settings["network"], settings["H"], settings["task"]
    if network in TRAINED:
        p = 50 + 10 * H if network == "trained, p = 50 + 10 H" else 60
        width = WIDTH if network == "trained, width 2" else None
        model, data = trained_ramp(seed, A, B, p, H, width)
        return values_of(held_out(model, data), paper_bound=(B - A) / ((TOKENS - 2) * H))
    keys = SHARED // H + 2 if task == "fixed p" else TOKENS
    p = (keys - 2) * H + 2
    options: dict[str, Any] = {} if network == "gate" else {"tokens": keys}
    if task == "published":
        data = ramp_data(RandomStream(seed), A, B)
        options |= {"channels": CHANNELS, "radius": float(data.scalars.abs().max())}
    m = built(network, A, B, p, settings["dtype"], H, **options)
    if task == "published":
        return values_of(task_errors(m, data, TOKENS), m)
    return values_of(line_errors(m, places(A, B, p, LOOKED_AT), keys), m)


def figures(records: Sequence[Record]) -> list[Figure]:
    panels = []
    for dtype in PRECISIONS:
        chosen = where(records, dtype=dtype)
        growing, fixed = where(chosen, task="growing p", network="cold"), where(chosen, task="fixed p")
        series: list[Series] = []
        series += line("cold, 48 anchors in all", fixed, "H", "sup", group="fixed")
        series += line("its certified bound", fixed, "H", "bound", "bound", "fixed")
        series += line("cold, 48 anchors a head", growing, "H", "sup", group="growing")
        series += line("its certified bound (A6)", growing, "H", "bound", "bound", "growing")
        series += line("the paper's bound", growing, "H", "paper_bound", "bound")
        warm = where(chosen, task="growing p", network="warm")
        series += line("warm, 50 keys a head", warm, "H", "sup", group="warm")
        series += line("its certified bound (A6(d))", warm, "H", "bound", "bound", "warm")
        series += gate_line(where(chosen, task="growing p"), "H")
        panels += panel(dtype, "heads H", "largest error", series, log_x=True, log_y=True)
    caption = (
        "Largest error of built ramps on [-25, 25] against the number of heads: the same 48 anchors shared out, and 48 "
        "anchors for every head."
    )
    made = figure("sup", caption, panels, "Shared anchors change nothing; own anchors give 1/H.")
    task = where(records, task="published")
    return made + published_figure(task, "H", "heads H", {**TRAINED, **BUILT}, PUBLISHED, log_x=True)


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    growing, task = where(records, task="growing p"), where(records, task="published")
    cold, warm = (where(growing, network=network, dtype="float64") for network in ("cold", "warm"))
    shared = where(records, task="fixed p", network="cold", dtype="float64")
    found += falls("largest error against H, built, 48 anchors a head, float64", -1.0, cold, "H", "sup")
    found += falls("largest error against H, built warm, 50 keys a head, float64", -1.0, warm, "H", "sup")
    found += falls("largest error against H, built, 48 anchors shared out, float64", 0.0, shared, "H", "sup")
    ramps = where(records, network=tuple(BUILT))
    found += within("largest error of every built ramp against its certified bound", ramps, "sup", "bound")
    for dtype, why in (("float64", ""), ("float32", "A5: the bound is one for real arithmetic; rounding passes it")):
        quantity, rows = f"largest error of built heads against the paper's bound, {dtype}", where(growing, dtype=dtype)
        cause = "float32" if why else "theory"
        found += within(quantity, where(rows, network="cold"), "sup", "paper_bound", note=why, cause=cause)
    notes = {
        "trained": "the width of a head shrinks as H grows: more heads, each with less",
        "trained, width 2": "the width of the theorem's heads",
        "trained, p = 50 + 10 H": "ten more extra tokens for every head",
    }
    for network, note in notes.items():
        name = f"mean squared error against H, {TRAINED[network]} (an error of 1/H squared)"
        found += falls(name, -2.0, where(task, network=network), "H", "mse", note=note, cause="training")
    return found + beside_published(where(task, network="trained"), "H", "H", PUBLISHED)


EXPERIMENT = Experiment(
    name="rate-heads",
    title="Error against the number of heads",
    claim="H heads of n keys represent clip(w.x + t, a, b) with an error of at most max(|a|, |b|) eps0 + "
    "(b - a)/((n - 2) H): the error falls as 1/(nH).",
    label="A6 (v1 theorem 3.2, v2 theorem 3.9)",
    varies="The number of heads H = 1 to 16: built, with the same anchors shared out and with own anchors for every "
    "head; trained, with the published width 32/H, with width 2 at every H, and with extra tokens growing with H.",
    measured_how="Built heads: largest error at 16,000 scalars and beside the middles between anchors. Published "
    "setting: mean squared error over 32 channels on 200 unseen samples, for seeds 1234 to 1244.",
    judged_how="Slopes of least squares on logarithmic axes with 95 % intervals: -1 with own anchors, 0 with shared "
    "ones, -2 for squared errors; every built error against its certified bound without tolerance; trained means "
    "against the published ones within two standard deviations of a run.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
