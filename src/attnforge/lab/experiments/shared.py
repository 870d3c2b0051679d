"""What several experiments share: reading records, and ramps on a line and on the published task.

Ramps are built by name and dtype. The published task is drawn and judged alike in all experiments that have it: trained
networks beside built ones, and their means beside those of the published scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...charts.chart import Figure, Panel, Series
from ...dtypes import DTYPES
from ...theorems import Construction, ramp, ramp_heads
from ..experiment import Finding, Record
from ..training import SEEDS, Errors, RampData, RandomStream, held_out, ramp_data, trained_ramp
from ..verdicts import Slope, bound, equal, growth, mean, rate, slope

CHANNELS = 32  # of the published networks; all but the first should be 0
NETWORKS = ("cold", "warm", "gate")
PRECISIONS = ("float64", "float32")  # what networks ship in, the finer one first
AT_ONCE = 1 << 20  # weights of one evaluation: 8 MB, so that long lines are measured in little memory
BEYOND = 0.1  # of the range on both sides of it: there a ramp is flat
BESIDE = (1e-6, 1e-2, 0.06, 0.08, 0.09, 0.1, 0.12, 0.3)  # where to look next to the middle of two anchors, in spacings


def where(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """The records whose settings have these values; a tuple of values means any of them.

    >>> made = [Record("x", {"p": p}, 0, {"error": 1 / p}) for p in (1, 2, 4)]
    >>> [r["error"] for r in where(made, p=(2, 4))]
    [0.5, 0.25]
    """

    def fits(record: Record) -> bool:
        return all(
            name in record.settings
            and (record.settings[name] in value if isinstance(value, tuple) else record.settings[name] == value)
            for name, value in wanted.items()
        )

    return [record for record in records if fits(record)]


def column(records: Sequence[Record], x: str, y: str) -> dict[Any, list[float]]:
    """The values of y for each x, in order of x; records in which y is None are left out."""
    found: dict[Any, list[float]] = {}
    for record in records:
        if record[y] is not None:
            found.setdefault(record[x], []).append(float(record[y]))
    return dict(sorted(found.items()))


def line(
    name: str, records: Sequence[Record], x: str, y: str, style: str = "line", group: str | None = None
) -> list[Series]:
    """Means over seeds against x, the smallest and largest as an interval; empty when there is nothing to draw.

    Every axis of errors is logarithmic: an error of exactly 0 has no place on it and is left out.
    """
    found = {at: kept for at, values in column(records, x, y).items() if (kept := [v for v in values if v > 0])}
    if not found:
        return []
    centre = [mean(values).value for values in found.values()]
    if style == "bound" or all(len(values) == 1 for values in found.values()):
        return [Series(name, list(found), centre, style=style, group=group)]
    low, high = [min(v) for v in found.values()], [max(v) for v in found.values()]
    return [Series(name, list(found), centre, low, high, style, group)]


def panel(title: str, x: str, y: str, series: Sequence[Series], **how: Any) -> list[Panel]:
    """The panel, where there is something to draw on it."""
    return [Panel(title, x, y, series, **how)] if series else []


def figure(name: str, caption: str, panels: Sequence[Panel], alt: str = "") -> list[Figure]:
    """The figure, where there is a panel to show: an interrupted run has not measured everything."""
    return [Figure(name, caption, panels, alt)] if panels else []


def within(
    quantity: str, records: Sequence[Record], measured: str, limit: str, better: float = 10.0, note: str = "",
    cause: str = "theory",
) -> list[Finding]:  # fmt: skip
    """`verdicts.bound` of the records that have both values, where there are any."""
    found = pairs(records, measured, limit)
    return [bound(quantity, found, better, note).laid_to(cause)] if found else []


def falls(
    quantity: str, predicted: float, records: Sequence[Record], x: str, y: str, tolerance: float = 0.1, note: str = "",
    cause: str = "theory",
) -> list[Finding]:  # fmt: skip
    """`verdicts.rate` of the slope of y against x, where there are enough records for one."""
    fit = fitted(records, x, y)
    return [rate(quantity, predicted, fit, tolerance, note).laid_to(cause)] if fit else []


def grows(
    quantity: str, predicted: float, records: Sequence[Record], x: str, y: str, cause: str = "theory"
) -> list[Finding]:
    """`verdicts.growth` of the same."""
    fit = fitted(records, x, y)
    return [growth(quantity, predicted, fit).laid_to(cause)] if fit else []


def fitted(records: Sequence[Record], x: str, y: str, least: int = 3) -> Slope | None:
    """The slope of y against x on logarithmic axes, over all seeds; None with fewer than `least` places."""
    points = [(a, b) for a, values in column(records, x, y).items() for b in values if b > 0]
    if len({a for a, _ in points}) < least:
        return None
    return slope([a for a, _ in points], [b for _, b in points])


def pairs(records: Sequence[Record], measured: str, limit: str) -> list[tuple[float, float]]:
    """(measured, bound) of every record that has both."""
    return [(float(r[measured]), float(r[limit])) for r in records if r[measured] is not None and r[limit] is not None]


def built(network: str, a: float, b: float, p: int, dtype: str, heads: int = 1, **options: Any) -> Construction:
    """clip(y, a, b) of one scalar y by p anchors, cold or warm, by `heads` heads of `tokens` keys, or by a gate."""
    one, options = torch.ones(1, dtype=DTYPES[dtype]), {"radius": 2 * max(abs(a), abs(b)), **options}
    if "tokens" in options:
        return ramp_heads(one, 0.0, a, b, heads, variant=network, **options)
    return ramp(one, 0.0, a, b, p, variant=network, **options)


def rounding_of(m: Construction) -> float:
    """The part of the certified bound that is rounding: where the dtype puts the floor."""
    return sum(term.value for term in m.certificate.terms if term.source == "rounding")


def places(a: float, b: float, p: int, count: int) -> Tensor:
    """Scalars to look at: evenly from below a to above b, and beside the middles between anchors, where ties are."""
    step, width = (b - a) / (p - 1), b - a
    middles = a + step * (torch.linspace(0, p - 2, min(p - 1, count // 16), dtype=torch.float64).round() + 0.5)
    near = [middles + sign * beside * step for beside in BESIDE for sign in (-1, 1)]
    even = torch.linspace(a - BEYOND * width, b + BEYOND * width, count, dtype=torch.float64)
    return torch.cat([even, *near])


@torch.no_grad()
def line_errors(m: Construction, y: Tensor, tokens: int = 1) -> Errors:
    """Errors of a network at scalars, in the network's dtype; the target is exact for the rounded scalars."""
    X = y[: len(y) // tokens * tokens].to(m.dtype).reshape(-1, tokens, 1)
    out = torch.empty(len(X), tokens, 1, dtype=m.dtype)  # one block of memory, filled some rows at a time
    rows = max(1, AT_ONCE // (tokens * m.size.anchors))
    for i in range(0, len(X), rows):
        out[i : i + rows] = m(X[i : i + rows])
    return Errors.of(out, m.target(X))


@torch.no_grad()
def task_errors(m: Construction, data: RampData, tokens: int = 50) -> Errors:
    """Errors on the published task, given the scalars w_i.x_i + t_i that the paper's affine map A hands to the head."""
    X = data.scalars.reshape(-1, tokens, 1).to(m.dtype)
    return Errors.of(m(X), m.target(X))


def values_of(found: Errors, m: Construction | None = None, paper_bound: float | None = None) -> dict[str, Any]:
    """What a cell gives: errors, and the bounds of a built network, or the theorem's for a trained one."""
    if m is None:
        return {**found.__dict__, "bound": None, "paper_bound": paper_bound, "floor": None}
    return {**found.__dict__, "bound": m.bound, "paper_bound": m.paper_bound, "floor": rounding_of(m)}


def measured_ramp(settings: Mapping[str, Any], seed: int, a: float, b: float, p: int, looked_at: int) -> dict[str, Any]:
    """A ramp of p anchors: trained as published, or built and measured on a line or on the published task."""
    network, dtype = settings["network"], settings["dtype"]
    if network == "trained":
        return values_of(held_out(*trained_ramp(seed, a, b, p)), paper_bound=(b - a) / p)
    if settings["task"] == "line":
        m = built(network, a, b, p, dtype)
        return values_of(line_errors(m, places(a, b, p, looked_at)), m)
    data = ramp_data(RandomStream(seed), a, b)
    m = built(network, a, b, p, dtype, channels=CHANNELS, radius=float(data.scalars.abs().max()))
    return values_of(task_errors(m, data), m)


def ramp_panels(records: Sequence[Record], x: str, label: str, **theory: str) -> list[Panel]:
    """Largest errors of built ramps on a line with their bounds, one panel for each dtype.

    `theory` are more values of the cold ones, and what they are called.
    """
    panels = []
    for dtype in PRECISIONS:
        series: list[Series] = []
        for network in ("cold", "warm"):
            chosen = where(records, network=network, dtype=dtype)
            series += line(network, chosen, x, "sup", group=network)
            series += line(f"{network}, certified bound", chosen, x, "bound", "bound", network)
        series += gate_line(where(records, dtype=dtype), x)
        for value, name in theory.items():
            series += line(name, where(records, network="cold", dtype=dtype), x, value, "bound")
        panels += panel(dtype, label, "largest error", series, log_x=True, log_y=True)
    return panels


def gate_line(records: Sequence[Record], x: str) -> list[Series]:
    """The bound of gates: their measured error is exactly 0 at most scalars and has no place on a logarithmic axis."""
    return line("gate (its bound)", where(records, network="gate"), x, "bound")


def published_figure(
    records: Sequence[Record], x: str, label: str, networks: Mapping[str, str], published: Mapping[Any, float],
    log_x: bool = False,
) -> list[Figure]:  # fmt: skip
    """Mean squared error in the published setting against one setting; `networks` maps settings to names."""
    series: list[Series] = []
    for network, name in networks.items():
        series += line(name, where(records, network=network), x, "mse")
    if not series:
        return []
    series.append(Series("trained, as published", list(published), list(published.values()), style="points"))
    panels = panel("published setting", label, "mean squared error, 32 channels", series, log_x=log_x, log_y=True)
    caption = (
        "The published setting (d = 10, n = 50, 1,000 samples, 50 epochs of Adam): trained networks beside built ones, "
        "on the same unseen samples. Bars reach from the best seed to the worst. A gate errs by exactly 0 on these "
        "samples, which has no place on a logarithmic axis."
    )
    alt = f"Mean squared error of trained and built networks against {label}, with the published means."
    return figure("published", caption, panels, alt)


def beside_published(records: Sequence[Record], x: str, name: str, published: Mapping[Any, float]) -> list[Finding]:
    """Trained means beside the published ones, where all of the published seeds were run."""
    return [
        equal(
            f"trained, {name} = {at}: mean squared error beside the published mean", published[at], mean(values)
        ).laid_to("training")
        for at, values in column(records, x, "mse").items()
        if len(values) == len(SEEDS)
    ]
