"""Errors at the edges: the ends of [a, b], seams between heads, kinks and steep transitions there (A2, A3, A6, B).

Do errors spike at the ends of the table or between heads? Targets on an interval of length 2: the ramp, whose kinks are
the ends; |y|, with its kink in the middle, near an end and at the end; tanh(50 y), a steep step at the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...box import Box
from ...charts.chart import Figure, Series
from ...compiler.pipeline import compile
from ...heads import AnchorHead
from ...theorems import Construction, ramp, ramp_heads
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import threshold
from .shared import falls, figure, line, panel, where, within

DTYPE = torch.float64  # so that edges are seen and not rounding
#: Where the ramp lies in the inputs' range [-2, 2]: inside, nearly at its end, at its end.
PLACES = {"middle": (-1.0, 1.0), "near the end": (-1.9, 0.1), "at the end": (-2.0, 0.0)}
TARGETS: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "kink": ("abs", "abs(x)", torch.abs),
    "step": ("expr:tanh(50*y)", "tanh(50*x)", lambda y: torch.tanh(50 * y)),
}
HEADS = 4  # enough for seams inside and beside the ends
NEAR = 3.0  # spacings: what lies this close to an end, a seam or a transition is edge, the rest interior
LOOKED_AT = 12_001  # points: dozens between any two of the anchors
NO_SPIKE = 1.1  # edge over interior error: a tenth is the sampling, more would be a spike


def cells(quick: bool) -> tuple[Cell, ...]:
    sizes = (34, 66, 130) if quick else (34, 66, 130, 258)
    found = grid(target=("ramp",), place=("ends",), network=("cold", "warm", "exact"), p=sizes)
    found += grid(target=("ramp",), place=("seams",), network=("cold", "warm"), p=sizes)
    return found + grid(target=tuple(TARGETS), place=tuple(PLACES), network=("cold", "warm", "exact"), p=sizes)


@torch.no_grad()
def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    p, network, place = settings["p"], settings["network"], settings["place"]
    step = 2 / (p - 1)
    if settings["target"] == "ramp":
        m, edges, y = _ramp(network, place, p)
        X = y.reshape(-1, 1, 1) if m.form == "tokens" or place == "ends" else _in_rows(y, m)
        error = (m(X).double() - m.target(X)).abs().flatten()
        y = X.flatten()
        return {**_split(y, error, edges, step), "bound": m.bound}
    lo, hi = PLACES[place]
    name, formula, target = TARGETS[settings["target"]]
    y = torch.linspace(lo, hi, LOOKED_AT, dtype=DTYPE)
    if network == "exact":
        net = compile(formula, Box(x=(lo, hi)), eps=1e-9, dtype=DTYPE)
        out, limit = net(y[:, None]), net.certificate.bound
    else:
        head = AnchorHead.fit(name, lo, hi, anchors=p, dtype=DTYPE, temperature=network, potential="square")
        out, limit = head(y), head.bound
    return {**_split(y, (out.flatten() - target(y)).abs(), [lo, hi, 0.0], step), "bound": limit}


def _ramp(network: str, place: str, p: int) -> tuple[Construction, list[float], Tensor]:
    """The ramp on [-1, 1], where its edges are, and the scalars to look at."""
    one, y = torch.ones(1, dtype=DTYPE), torch.linspace(-1.2, 1.2, LOOKED_AT, dtype=DTYPE)
    if place == "ends":
        variant = "gate" if network == "exact" else network
        return ramp(one, 0.0, -1, 1, p, variant=variant, radius=2.0), [-1.0, 1.0], y
    keys = (p - 2) // HEADS + 2
    m = ramp_heads(one, 0.0, -1, 1, HEADS, keys, variant=network, radius=2.0)
    step = 2 / (p - 1)
    seams = [-1 + step * ((keys - 2) * h + 0.5) for h in range(1, HEADS)]
    if network == "warm":  # parts of one length, with guards beyond their ends
        seams = [-1 + 2 * h / HEADS for h in range(1, HEADS)]
    return m, seams, y[(y > -1 + NEAR * step) & (y < 1 - NEAR * step)]  # the ends have cells of their own


def _in_rows(y: Tensor, m: Construction) -> Tensor:
    """Scalars as sequences of the length that the paper's form takes."""
    keys = cast(Any, m).keys
    return y[: len(y) // keys * keys].reshape(-1, keys, 1)


def _split(y: Tensor, error: Tensor, edges: Sequence[float], step: float) -> dict[str, float]:
    """The largest error within a few spacings of an edge, and elsewhere."""
    away = (y[:, None] - torch.tensor(edges, dtype=DTYPE)).abs().amin(-1)
    near = away <= NEAR * step
    return {
        "edge": float(error[near].max()),
        "interior": float(error[~near].max()),
        "sup": float(error.max()),
    }


def figures(records: Sequence[Record]) -> list[Figure]:
    captions = {
        "ramp": "The ramp at the ends of [a, b], and between four heads.",
        "kink": "|y|: a kink in the middle of the interval, near its end, and at its end.",
        "step": "tanh(50 y): a steep transition at the same places.",
    }
    made = []
    for target, caption in captions.items():
        panels = []
        for place in ("ends", "seams", *PLACES):
            series: list[Series] = []
            for network in ("cold", "warm"):
                chosen = where(records, target=target, place=place, network=network)
                series += line(f"{network}, edge", chosen, "p", "edge", group=network)
                series += line(f"{network}, interior", chosen, "p", "interior", "points", network)
                series += line(f"{network}, certified bound", chosen, "p", "bound", "bound", network)
            exact = where(records, target=target, place=place, network="exact")
            series += line("gate or exact head (its bound)", exact, "p", "bound")
            panels += panel(place, "anchors p", "largest error", series, log_x=True, log_y=True)
        text = f"{caption} Edge: within three spacings of an end, a seam or the transition; interior: elsewhere."
        made += figure(target, text, panels, f"Edge and interior error against p for the {target}.")
    return made


def judge(records: Sequence[Record]) -> list[Finding]:
    found = within("largest error anywhere against its certified bound", records, "sup", "bound")
    for place in ("ends", "seams"):
        for network in ("cold", "warm"):
            chosen = where(records, target="ramp", place=place, network=network)
            if chosen:
                worst = max(r["edge"] / r["interior"] for r in chosen)
                name = f"ramp, {network}: error at the {place} over error in the interior, largest"
                found.append(threshold(name, NO_SPIKE, worst))
    for network in ("cold", "warm"):
        for place in ("middle", "near the end"):
            chosen = where(records, target="kink", place=place, network=network)
            found += falls(f"kink, {place}, {network}: error at the kink against p", -1.0, chosen, "p", "edge", 0.2)
    for place in PLACES:
        chosen = where(records, target="step", place=place, network="warm")
        found += falls(f"steep step, {place}, warm: error at the step against p", -1.0, chosen, "p", "edge", 0.2)
    exact = where(records, network="exact")
    if exact:
        worst = max(r["sup"] for r in exact)
        found.append(threshold("gates and exact heads: largest error, kinks and steps included", 1e-12, worst))
    return found


EXPERIMENT = Experiment(
    name="boundary",
    title="Errors at the edges",
    claim="A ramp errs no more at the ends of [a, b] and at the seams between heads than inside (A2, A6). At kinks "
    "warm heads fall back to 1/p (A3); gates make kinks without error (B).",
    label="A2, A3, A6, B1, B2",
    varies="The target (ramp, kink, steep step), where its transition lies (middle, near the end, at the end, seams "
    "of four heads), the network (cold, warm, gate or exact), the number of anchors.",
    measured_how="Largest error at 12,001 points, float64, apart for points within three spacings of an end, a seam "
    "or the transition (edge) and all others (interior).",
    judged_how="Every error against its certified bound without tolerance. Ramps: edge over interior error at most "
    "1.1. Kinks and steps: slopes on logarithmic axes against -1. Gates and exact heads: at most 1e-12.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
