"""Error against the number of anchors p: a head with p anchors errs by O(1/p) (v1 theorem 3.1, v2 theorem 3.4; A2, A3).

Built heads (cold, warm, gate) on a line of scalars over four decades of p, float64 and float32; and, in the published
setting, beside the published one-layer network trained on the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...charts.chart import Figure
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..training import SEEDS
from .shared import (
    NETWORKS,
    PRECISIONS,
    beside_published,
    falls,
    figure,
    measured_ramp,
    published_figure,
    ramp_panels,
    where,
    within,
)

A, B = -25.0, 25.0  # as published
#: Means of the published scripts, mean squared error over 32 channels, 11 seeds.
PUBLISHED = {60: 0.129, 70: 0.082, 80: 0.033, 90: 0.021, 100: 0.0058, 110: 0.0042, 120: 0.0039}
LOOKED_AT = 16_000  # scalars: several between any two anchors, but for the largest tables


def cells(quick: bool) -> tuple[Cell, ...]:
    sizes = (16, 64, 256, 1024, 4096) if quick else (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    published = (60, 90, 120) if quick else tuple(PUBLISHED)
    seeds = SEEDS[:2] if quick else SEEDS
    most = {"cold": 4096, "warm": 1024, "gate": 4096}  # warm: beyond that the certificate takes long
    lines = tuple(
        cell for network in NETWORKS
        for cell in grid(task=("line",), network=(network,), dtype=PRECISIONS,
                         p=[p for p in sizes if p <= most[network]])
    )  # fmt: skip
    tasks = grid(seeds, task=("published",), network=NETWORKS, dtype=("float32",), p=published)
    return lines + tasks + grid(seeds, task=("published",), network=("trained",), dtype=("float32",), p=published)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return measured_ramp(settings, seed, A, B, settings["p"], LOOKED_AT)


def figures(records: Sequence[Record]) -> list[Figure]:
    theory = {"paper_bound": "the paper's bound", "floor": "rounding, cold"}
    panels = ramp_panels(where(records, task="line"), "p", "anchors p", **theory)
    caption = (
        "Largest error of built ramps on [-25, 25] against the number of anchors. The gate has no anchors and errs by "
        "exactly 0 at these scalars: its bound is drawn. `rounding` is the part of the cold head's bound that the "
        "dtype is to blame for."
    )
    alt = "Cold and warm errors fall as 1/p in float64; in float32 rounding stops them."
    made = figure("sup", caption, panels, alt)
    task = where(records, task="published")
    return made + published_figure(task, "p", "anchors p", {n: n for n in ("trained", *NETWORKS)}, PUBLISHED)


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    lines, task = where(records, task="line"), where(records, task="published")
    for network in ("cold", "warm"):
        chosen = where(lines, network=network, dtype="float64")
        found += falls(f"largest error against p, built {network}, float64", -1.0, chosen, "p", "sup")
    built_ones = where(records, network=NETWORKS)
    found += within("largest error of every built ramp against its certified bound", built_ones, "sup", "bound")
    for dtype, why in (("float64", ""), ("float32", "A5: the bound is one for real arithmetic; rounding passes it")):
        quantity, cold = f"largest error of cold heads against the paper's bound, {dtype}", where(lines, network="cold")
        cause = "float32" if why else "theory"
        found += within(quantity, where(cold, dtype=dtype), "sup", "paper_bound", note=why, cause=cause)
    trained = where(task, network="trained")
    quantity = "mean squared error against p, trained (an error of 1/p squared)"
    note = "p counts the 50 tokens, too: the learned extra tokens, p - 50, grow sevenfold while p doubles"
    found += falls(quantity, -2.0, trained, "p", "mse", note=note, cause="training")
    found += beside_published(trained, "p", "p", PUBLISHED)
    quantity = "root mean square error of trained networks against the theorem's bound"
    note = "the theorem says that such weights exist, not that 50 epochs of Adam find them"
    return found + within(quantity, trained, "rms", "paper_bound", note=note, cause="training")


EXPERIMENT = Experiment(
    name="rate-anchors",
    title="Error against the number of anchors",
    claim="One softmax head with p anchors represents clip(w.x + t, a, b) with an error of at most "
    "max(|a|, |b|) eps0 + (b - a)/p: the error falls as 1/p.",
    label="A2, A3 (v1 theorem 3.1, v2 theorem 3.4)",
    varies="The number of anchors p; how the network came about (built cold, warm, as a gate; trained); float64 and "
    "float32.",
    measured_how="Built heads: largest error at 16,000 scalars evenly over [-27.5, 27.5] and beside the middles "
    "between anchors, where the error is largest. Published setting: mean squared error over 32 channels on 200 "
    "unseen samples, for seeds 1234 to 1244.",
    judged_how="Slopes of least squares on logarithmic axes with 95 % intervals against -1 (errors) and -2 (squared "
    "errors); every built error against its certified bound without tolerance; trained means against the published "
    "ones within two standard deviations of a run.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
