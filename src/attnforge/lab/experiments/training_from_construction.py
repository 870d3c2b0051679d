"""Does gradient descent find, keep or leave the construction? Training from built, perturbed and random weights.

The theorem's own network for the published task (per-token w and t, 60 anchors, 32 channels), all of its weights free,
trained as published: from the construction, cold and warm; from the construction with noise added to every weight; and
from random weights. Beside it, the published network from its own random start (A2, A3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...charts.chart import Figure, Series
from ...theorems import Ramp, ramp
from ...theorems.ramps import BALANCED
from ..experiment import AGREES, FAILS, Cell, Experiment, Finding, Record, grid
from ..training import SEEDS, OneLayer, RampData, RandomStream, fit, held_out, ramp_data
from ..verdicts import mean, threshold
from .shared import CHANNELS, panel, where

A, B, ANCHORS = -25.0, 25.0, 60  # as published
KAPPAS = {"cold": None, "warm": BALANCED}
#: How far the start is from the construction, relative to every weight.
NOISES = {"constructed": 0.0, "perturbed 0.1 %": 1e-3, "perturbed 1 %": 1e-2, "perturbed 10 %": 1e-1}
NEAREST, TIMES = 0.99, 2.0  # keeps: this share of tokens selects its nearest anchor, and the error grows by no more
SLACK = 0.1  # spacings: between two anchors that are about equally near either one counts as the nearest
WORDS = {"keeps": "keeps", "leaves": "leaves", "finds": "finds", "misses": "does not find"}


def cells(quick: bool) -> tuple[Cell, ...]:
    epochs, seeds = (20, SEEDS[:1]) if quick else (50, SEEDS[:5])
    noises = tuple(name for name in NOISES if not quick or name != "perturbed 0.1 %")
    found = grid(seeds, epochs=(epochs,), temperature=tuple(KAPPAS), start=noises)
    return found + grid(seeds, epochs=(epochs,), temperature=("none",), start=("random", "published"))


class Free(nn.Module):
    """A construction as a network to train: all of its weights, and none of its checks."""

    def __init__(self, built: Ramp):
        super().__init__()
        self.built = built.requires_grad_(True)

    def forward(self, X: Tensor) -> Tensor:
        return self.built.core(X)

    def weights(self, X: Tensor) -> Tensor:
        return self.built.attention(X)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    start, stream = settings["start"], RandomStream(seed)
    data = ramp_data(stream, A, B)
    model = started(start, settings["temperature"], data, stream)
    first = [p.detach().clone() for p in model.parameters()]
    path: list[dict[str, float]] = []

    def watch(epoch: int) -> None:
        if epoch % 5 == 0 or epoch in (1, 2, 3):
            path.append({"epoch": epoch, **held_out(model, data).__dict__, "nearest": nearest(model, data)})

    fit(model, data, stream, settings["epochs"], watch=watch)
    moved = [float((p.detach().cpu() - q).norm() / q.norm().clamp_min(1e-12)) for p, q in
             zip(model.parameters(), first, strict=True)]  # fmt: skip
    last = path[-1]
    return {
        "path": cast(Any, path), "mse_start": path[0]["mse"], "mse": last["mse"], "sup": last["sup"],
        "rms": last["rms"], "nearest_start": path[0]["nearest"], "nearest": last["nearest"], "moved": max(moved),
        "theorem": (B - A) / ANCHORS, "outcome": outcome(start, path[0], last),
    }  # fmt: skip


def started(start: str, temperature: str, data: RampData, stream: RandomStream) -> OneLayer | Free:
    """The network to train, with the weights that training starts from."""
    if start == "published":
        return OneLayer(stream, data.X.shape[-1], data.X.shape[-2], ANCHORS, 1)
    kappa = KAPPAS.get(temperature)
    m = ramp(data.w, data.t, A, B, ANCHORS, kappa=kappa, channels=CHANNELS, radius=float(data.X.abs().max()))
    with torch.no_grad():
        for p in m.parameters():
            noise = stream.normal(*p.shape)
            if start == "random":
                p.copy_(noise)
            else:
                p.add_(NOISES[start] * p.square().mean().sqrt() * noise)
    return Free(m)


@torch.no_grad()
def nearest(model: OneLayer | Free, data: RampData) -> float:
    """The share of tokens whose largest weight is on the anchor nearest to what is wanted, or nearly so.

    For the published network any key could play that part: it counts as selecting where one key has half of the weight.
    """
    X = data.test_X.to(next(model.parameters()).device)
    weights = model.weights(X).cpu().double()
    if isinstance(model, OneLayer):
        return float((weights.amax(-1) > 0.5).double().mean())
    place = (data.test_wanted[..., 0].double() - A) / (B - A) * (ANCHORS - 1)
    return float(((weights.argmax(-1) - place).abs() <= 0.5 + SLACK).double().mean())


def outcome(start: str, first: Mapping[str, float], last: Mapping[str, float]) -> str:
    """What training did: keeps or leaves a construction; finds or misses one from elsewhere."""
    selects = last["nearest"] >= NEAREST
    if start == "constructed":
        return WORDS["keeps"] if selects and last["mse"] <= TIMES * first["mse"] else WORDS["leaves"]
    return WORDS["finds"] if selects and last["sup"] <= (B - A) / ANCHORS else WORDS["misses"]


def figures(records: Sequence[Record]) -> list[Figure]:
    panels = []
    for key, label, log in (("mse", "mean squared error, 32 channels", True), ("nearest", "share that selects", False)):
        for temperature in (*KAPPAS, "none"):
            series = [
                Series(start, [s["epoch"] for s in path], [s[key] or None if log else s[key] for s in path])
                for start in dict.fromkeys(r["start"] for r in where(records, temperature=temperature))
                if (path := first_path(where(records, temperature=temperature, start=start)))
            ]
            title = {"none": "random starts"}.get(temperature, f"{temperature} construction")
            panels += panel(title, "epochs", label, series, log_y=log)
    caption = (
        "Training from the construction, from the construction with noise on every weight, and from random weights; "
        "first seed. Selecting: the largest weight is on the anchor nearest to what is wanted (for the published "
        "network: some key has half of the weight)."
    )
    alt = "Mean squared error and share of selecting tokens against epochs."
    rows = [panels[: len(panels) // 2], panels[len(panels) // 2 :]] if panels else []
    names = ("error", "selection")
    return [Figure(name, caption, row, alt) for name, row in zip(names, rows, strict=False)]


def first_path(records: Sequence[Record]) -> list[dict[str, Any]]:
    return list(min(records, key=lambda r: r.seed)["path"]) if records else []


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    for temperature in (*KAPPAS, "none"):
        chosen = where(records, temperature=temperature)
        for start in dict.fromkeys(r["start"] for r in chosen):
            runs = where(chosen, start=start)
            good = WORDS["keeps"] if start == "constructed" else WORDS["finds"]
            share = mean([float(r["outcome"] == good) for r in runs]).value
            name = start if temperature == "none" else f"{start}, {temperature}"
            found.append(verdict(name, good, share, runs))
    built = where(records, start="constructed")
    if built:
        best = min(r["mse"] for r in built)
        trained = where(records, start="published")
        if trained:
            name = "mean squared error: best from the construction over the published network's"
            found.append(threshold(name, 1.0, best / min(r["mse"] for r in trained)).laid_to("training"))
    return found


def verdict(name: str, good: str, share: float, runs: Sequence[Record]) -> Finding:
    """Whether gradient descent keeps (from the construction) or finds (from elsewhere) the construction."""
    start, end = (mean([r[key] for r in runs]).value for key in ("mse_start", "mse"))
    rule = (
        "share of runs in which training keeps the construction (at least 99 % of tokens attend most to their nearest "
        "anchor, up to a tenth of a spacing, and the error at most doubles) or, started elsewhere, finds it (the same "
        "share, and the theorem's bound for the largest error): at least one half: agrees; else: does not hold"
    )
    note = f"mean squared error {start:.3g} at the start, {end:.3g} at the end"
    word = AGREES if share >= 0.5 else FAILS
    quantity = f"from {name}: gradient descent {good} the construction"
    return Finding(quantity, 1.0, share, None, word, rule, note=note, cause="training")


EXPERIMENT = Experiment(
    name="training-from-construction",
    title="Does training find, keep or leave the construction?",
    claim="The theorem says that good weights exist. Gradient descent would have to find them, or at least to keep "
    "them.",
    label="A2, A3 (v1 theorem 3.1, v2 theorem 3.4)",
    varies="Where training starts: the construction, cold (kappa = 20.7) and warm (2.72); with noise of 0.1, 1 and "
    "10 % on every weight; random weights; the published network.",
    measured_how="The published task and training (Adam 1e-3, batches of 32, 50 epochs; 20 in a quick run) on the "
    "theorem's own network with all of its weights free. Along the way: errors on unseen samples, and the share of "
    "tokens that attend most to the anchor nearest to what is wanted.",
    judged_how="Keeps: at least 99 % of tokens select their nearest anchor and the error at most doubles. Finds: the "
    "same share and a largest error within the theorem's bound (b - a)/p. Agrees where at least half of the runs do.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
)
