"""What universality costs: error against grid spacing and against parameters, by every route (E1 to E5).

One map of n tokens, sin(0.8 x_i + 0.6 x_(i+1)), Lipschitz constant 1. The theorem's two-layer network, its one-layer
network with a softmax, one head over cells (max-affine) and over a grid pay exponentially in n; warm heads with solved
values pay less; compiling the formula pays for its operations only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...blackbox import approximate
from ...box import Box
from ...charts.chart import Figure, Series
from ...compiler.pipeline import compile
from ...theorems import Universal, attention_then_softmax, max_affine, two_layer
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import threshold
from .shared import falls, figure, line, panel, where, within

GRIDS = {
    "two layers": "E1: two layers",
    "softmax": "E2: one layer, then softmax",
    "cells": "E4: one head over cells",
    "grid": "E3: one head over a grid",
}
OTHERS = {
    "spectral": "warm head, solved values",
    "ridge": "ridge expansion, gates",
    "compiled": "compiled formula",
}
STEPS = {2: (6, 10, 16, 26, 40), 3: (4, 6, 9, 13), 4: (3, 4, 5, 7)}  # grid values a side
#: Sizes of the other routes: anchors an axis, ridges, wanted errors; each from cheap to all that minutes allow.
ANCHORS, WIDTHS, TOLERANCES = (4, 6, 8, 12), (8, 16, 32), (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)
LOOKED_AT = 3_000  # points of the box; grids are also looked at beside each of them, where they are worst


def target(X: Tensor) -> Tensor:
    """A map of sequences: every token's output depends on the next token, too."""
    return torch.sin(0.8 * X + 0.6 * X.roll(-1, -2))


def cells(quick: bool) -> tuple[Cell, ...]:
    found: tuple[Cell, ...] = ()
    for tokens in (2, 3) if quick else (2, 3, 4):
        found += grid(tokens=(tokens,), route=tuple(GRIDS), size=STEPS[tokens])
        found += grid(tokens=(tokens,), route=("spectral",), size=ANCHORS if tokens < 4 else ANCHORS[:3])
        found += grid(tokens=(tokens,), route=("ridge",), size=WIDTHS[:: 2 if quick else 1])
        found += grid(tokens=(tokens,), route=("compiled",), size=TOLERANCES[:: 2 if quick else 1])
    return found


@torch.no_grad()
def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    box = Box.cube(-1, 1, shape=(settings["tokens"], 1))
    m = built(settings["route"], box, settings["size"], seed)
    X = places(m, box)
    error = float((m(X.to(m.dtype)).double() - target(X)).abs().max())
    size = settings["size"]
    return {
        "sup": error, "bound": m.certificate.bound, "parameters": m.size.parameters, "layers": m.size.layers,
        "keys": m.size.anchors, "spacing": 2 / size if settings["route"] in GRIDS else None,
    }  # fmt: skip


def built(route: str, box: Box, size: Any, seed: int) -> Any:
    """The network of a route: grid values a side, anchors an axis, ridges, or a wanted error."""
    if route == "compiled":
        return compile(target, box, eps=size, dtype=torch.float64)
    if route == "two layers":
        return two_layer(target, box, 2 / size, lipschitz=1.0)
    if route == "softmax":
        return attention_then_softmax(target, box, 2 / size, lipschitz=1.0)
    if route == "cells":
        return max_affine(target, box, cells=size**box.dim, lipschitz=1.0)
    options: dict[str, Any] = {"dtype": torch.float64, "progress": False, "seed": seed}
    if route == "ridge":
        return approximate(target, box, route="ridge", width=size, samples=4_000, **options)
    if route == "grid":
        return approximate(target, box, route="grid", anchors=size, lipschitz=1.0, **options)
    return approximate(target, box, route="spectral", anchors=size, **options)


def places(m: Any, box: Box) -> Tensor:
    """Points of the box, and where grids have it hardest: beside the middles between their points."""
    X = box.sample(LOOKED_AT, 1)
    if not isinstance(m, Universal):
        return X
    step = torch.tensor([float(s) for s in m.grid.steps], dtype=torch.float64).reshape(box.shape)
    middle = box.lower + (((X - box.lower) / step).floor() + 0.5) * step
    beside = middle + 1e-2 * step * (X - middle).sign()
    return torch.cat([X, torch.minimum(torch.maximum(beside, box.lower), box.upper)])


def figures(records: Sequence[Record]) -> list[Figure]:
    made = []
    for x, label, name in (("spacing", "grid spacing", "spacing"), ("parameters", "parameters", "parameters")):
        panels = []
        for tokens in sorted({r["tokens"] for r in records}):
            series: list[Series] = []
            for route, title in (GRIDS if x == "spacing" else {**GRIDS, **OTHERS}).items():
                chosen = where(records, tokens=tokens, route=route)
                series += line(title, chosen, x, "sup", group=route)
                if x == "spacing" and route == "two layers":
                    series += line("its certified bound", chosen, x, "bound", "bound", route)
            panels += panel(f"{tokens} tokens", label, "largest error", series, log_x=True, log_y=True)
        captions = {
            "spacing": "Largest error of the theorem's networks against the spacing of their grid.",
            "parameters": "What universality costs: largest error against the number of parameters, by every route. "
            "Grids pay exponentially in the number of tokens, the compiled formula for its operations only.",
        }
        made += figure(name, captions[name], panels, f"Largest error against {label} for every route.")
    return made


def judge(records: Sequence[Record]) -> list[Finding]:
    found = within("largest error of every certified network against its bound", records, "sup", "bound")
    for route, title in GRIDS.items():
        for tokens in sorted({r["tokens"] for r in records}):
            chosen = where(records, route=route, tokens=tokens)
            quantity = f"{title}, {tokens} tokens: error against grid values a side"
            found += falls(quantity, -1.0, chosen, "size", "sup", 0.2)
    for tokens in sorted({r["tokens"] for r in records}):
        for route in ("cells", "grid"):
            name = f"{GRIDS[route]}, {tokens} tokens: error against parameters, -1/dimension"
            found += falls(name, -1 / tokens, where(records, route=route, tokens=tokens), "parameters", "sup")
        best = smallest(where(records, tokens=tokens, route="compiled"))
        dear = smallest(where(records, tokens=tokens, route=("two layers", "softmax")))
        if best and dear:
            name = f"{tokens} tokens: parameters of the best compiled network over the best two-layer one"
            note = f"errors {best['sup']:.1e} and {dear['sup']:.1e}"
            found.append(threshold(name, 1.0, best["parameters"] / dear["parameters"], note=note))
    return found


def smallest(records: Sequence[Record]) -> Record | None:
    """The record with the smallest error."""
    return min(records, key=lambda r: float(r["sup"]), default=None)


EXPERIMENT = Experiment(
    name="universality",
    title="What universality costs",
    claim="Two attention layers, or one and a softmax, approximate every continuous map of sequences: with a grid of "
    "spacing h the error is at most proportional to h, at a price that is exponential in the dimension (E1 to E3); "
    "compiling the formula is polynomial (E5).",
    label="E1, E2, E3, E4, E5 (v1 theorem 3.3, v2 theorem 3.14)",
    varies="The route (two layers; one layer and a softmax; one head over cells or over a grid; warm head with solved "
    "values; ridge expansion; compiled formula), its size, and the number of tokens (the dimension).",
    measured_how="Largest error at 3,000 points of the box, for grids also beside the middles between grid points; "
    "parameters as stored.",
    judged_how="Certified bounds without tolerance; slopes on logarithmic axes: -1 in grid values a side, "
    "-1/dimension in parameters for one-head grids; the best compiled network must be smaller than the best "
    "two-layer one.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
