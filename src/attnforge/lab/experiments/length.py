"""Realistic lengths: one token-wise head on up to 100,000 tokens of up to 1,000 channels (A2, B2).

The bound says nothing of n, and of d only through the rounding of w.x + t; time should grow as n and as d, memory with
neither: tokens do not see each other, so they are handled some at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...charts.chart import Figure, Series
from ...theorems import ramp
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import growth, slope, threshold
from .shared import NETWORKS, built, falls, figure, fitted, line, line_errors, panel, places, values_of, where, within

LENGTHS = (50, 1_000, 10_000, 100_000)  # tokens, from the published length to where quadratic cost would show
WIDTHS = (10, 100, 1_000)  # channels of a token, from the published width on
A, B, ANCHORS = -25.0, 25.0, 64  # the published range, and about the published number of anchors
AT_ONCE = 2_000  # tokens alive at a time
WORK, MOST = 800_000, 400  # tokens that a cell's clock should run over: short inputs are repeated, so often at most
LONG = 1_000  # from this length on time is fitted: below, a call costs more than its tokens
SIZES, HEADS = (16, 32, 64, 128), (1, 2, 4)  # anchors, and heads of n keys, that rates are fitted over
MEMORY = 512.0  # MB that the longest input may take above the shortest


def cells(quick: bool) -> tuple[Cell, ...]:
    found = grid(network=("cold", "gate") if quick else NETWORKS, d=WIDTHS, n=LENGTHS)
    found += grid(rate=("p",), network=("cold",), n=LENGTHS[1:3], p=SIZES)
    return found + grid(rate=("H",), network=("cold",), n=LENGTHS[1:2] if quick else LENGTHS[1:3], H=HEADS)


def refitted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rates of the theorems on sequences of n tokens: p anchors (3.4), or H heads of n keys (3.9), float64."""
    n = settings["n"]
    if settings["rate"] == "p":
        m = built("cold", A, B, settings["p"], "float64", form="tokens")
        return values_of(line_errors(m, places(A, B, settings["p"], n), n), m)
    m = built("cold", A, B, (n - 2) * settings["H"] + 2, "float64", settings["H"], tokens=n)
    between = A + (B - A) * torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values_of(line_errors(m, between, n), m)


@torch.no_grad()
def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    if "rate" in settings:
        return refitted(settings)
    n, d, network = settings["n"], settings["d"], settings["network"]
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(d, generator=generator) * math.sqrt(10 / d)  # so that w.x spreads over [a, b] at every d
    drawn = 10 * torch.rand(min(n, AT_ONCE), d, generator=generator) - 5
    m = ramp(w, 0.1, A, B, ANCHORS, form="paper" if network != "cold" else "tokens", variant=network, radius=5.0)
    sup = total = 0.0
    for start in range(0, n, AT_ONCE):
        X = drawn[: n - start].roll(start // AT_ONCE, -1)[None]  # other tokens, without drawing them all
        error = (m(X).double() - m.target(X)).abs()
        sup, total = max(sup, float(error.max())), total + float(error.square().sum())
    passes = min(MOST, WORK // n)
    for _ in range(passes):
        for start in range(0, n, AT_ONCE):
            m.core(drawn[: n - start].roll(start // AT_ONCE, -1)[None])
    rounding = sum(term.value for term in m.certificate.terms if term.source == "rounding")
    return {
        "sup": sup, "rms": math.sqrt(total / n), "bound": m.bound, "rounding": rounding, "passes": passes,
        "parameters": m.size.parameters,
    }  # fmt: skip


def seconds(record: Record) -> float:
    """Of one pass over the input: the cell's time by the number of passes."""
    return record.time_s / record["passes"]


def timed(name: str, records: Sequence[Record], x: str) -> list[Series]:
    found = sorted((float(r[x]), seconds(r)) for r in records)
    return [Series(name, [a for a, _ in found], [b for _, b in found])] if found else []


def rates(records: Sequence[Record]) -> list[Figure]:
    """Errors against anchors and heads, for sequences of 1,000 and of 10,000 tokens."""
    panels = []
    for x, label in (("p", "anchors p"), ("H", "heads H")):
        series: list[Series] = []
        for n in LENGTHS[1:3]:
            rows = where(records, rate=x, n=n)
            series += line(f"n = {n}", rows, x, "sup", group=str(n))
            series += line(f"n = {n}, certified bound", rows, x, "bound", "bound", str(n))
        panels += panel(label, label, "largest error", series, log_x=True, log_y=True)
    caption = "Largest error on sequences of 1,000 and 10,000 tokens against anchors, and against heads of n keys."
    return figure("rates", caption, panels, "1/p and 1/(nH) hold for long sequences.")


def figures(records: Sequence[Record]) -> list[Figure]:
    made = rates(records)
    records = [r for r in records if "rate" not in r.settings]
    errors: list[Series] = []
    times: list[Series] = []
    memory: list[Series] = []
    for d in sorted({r["d"] for r in records}):
        chosen = where(records, network="cold", d=d)
        errors += line(f"d = {d}", chosen, "n", "sup", group=str(d))
        errors += line(f"d = {d}, certified bound", chosen, "n", "bound", "bound", str(d))
        times += timed(f"d = {d}", chosen, "n")
        if chosen:
            memory.append(Series(f"d = {d}", [r["n"] for r in chosen], [r.memory_mb for r in chosen]))
    drawn = (("error", "largest error", errors), ("time", "seconds a pass", times), ("memory", "peak MB", memory))
    panels = [one for name, label, rows in drawn
              for one in panel(name, "tokens n", label, rows, log_x=True, log_y=True)]  # fmt: skip
    caption = "A cold head of 64 anchors on up to 100,000 tokens. Memory is that of the whole process."
    made += figure("cold", caption, panels, "Error does not depend on n; time grows with n.")
    by_network: list[Series] = []
    widest = max((r["d"] for r in records), default=0)
    for network in NETWORKS:
        by_network += timed(network, where(records, network=network, d=widest), "n")
    panels = panel(f"d = {widest}", "tokens n", "seconds a pass", by_network, log_x=True, log_y=True)
    return made + figure("networks", "Time of one pass, by network.", panels)


def judge(records: Sequence[Record]) -> list[Finding]:
    found = within("largest error against its certified bound, all lengths and widths", records, "sup", "bound")
    for x in ("p", "H"):
        for n in LENGTHS[1:3]:
            rows = where(records, rate=x, n=n)
            found += falls(f"largest error against {x}, sequences of {n} tokens", -1.0, rows, x, "sup")
    records = [r for r in records if "rate" not in r.settings]
    for network in NETWORKS:
        chosen = where(records, network=network)
        for x, name, others in (("n", "tokens n", "d"), ("d", "channels d", "n")):
            most = max((r[others] for r in chosen), default=None)
            if network == "cold" and (fit := fitted(where(chosen, **{others: most}), x, "sup")):
                found.append(growth(f"largest error against {name}, {network}, {others} = {most}", 0.0, fit))
            rows = [r for r in where(chosen, **{others: most}) if x == "d" or r["n"] >= LONG]
            if len(rows) >= 3:
                fit = slope([r[x] for r in rows], [seconds(r) for r in rows])
                found.append(growth(f"time of a pass against {name}, {network}, {others} = {most}", 1.0, fit, 0.15))
    cold = where(records, network="cold")
    if len(cold) > 1:
        small = min(r.memory_mb for r in cold)
        large = max(r.memory_mb for r in cold)
        found.append(threshold("peak memory of the largest cell above the smallest, MB", MEMORY, large - small))
    return found


EXPERIMENT = Experiment(
    name="length",
    title="Long sequences and wide tokens",
    claim="The bound of a token-wise head does not depend on the number of tokens; time grows in proportion to n and "
    "at most to d, memory with neither.",
    label="A2, A5, B2",
    varies="The number of tokens n = 50 to 100,000 and of channels d = 10 to 1,000; cold and warm heads of 64 "
    "anchors, gate. Rates at n = 1,000 and 10,000: p = 16 to 128 anchors, and 1 to 4 heads of n keys, float64.",
    measured_how="Largest error over all tokens, float32, tokens drawn 2,000 at a time and turned over their "
    "channels. Time: that of the whole cell over up to 800,000 tokens, short inputs repeated, by the number of "
    "passes. Memory: peak of the process.",
    judged_how="Errors against certified bounds without tolerance; exponents by least squares on logarithmic axes "
    "with 95 % intervals: error at most 0, time at most 1 (± 0.15, n from 1,000 on); memory at most 512 MB above the "
    "smallest cell; the rates 1/p and 1/H up to 0.1.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
