"""A map of sequences: the published target, a random ReLU network of all tokens, built and trained (A2, A6, E5).

Y = W_2 relu(W_1 vec(X) + b_1) + b_2 for n tokens of 5 channels, 10 hidden units, X uniform in [0, 1]. Built, every
hidden unit is one ramp: by p anchors, by H heads, or by a gate when the network itself is compiled. Trained, it is the
published two-layer network on 50,000 samples, 3 epochs (one in a quick run).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...box import Box
from ...charts.chart import Figure, Panel, Series
from ...compiler.pipeline import compile
from ...theorems import Construction, ramp_heads, relu
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..training import SHARE, Errors, RandomStream, TaskData, TwoLayer, fit, held_out
from ..verdicts import threshold
from .shared import column, falls, figure, line, where, within

CHANNELS, HIDDEN, SAMPLES = 5, 10, 50_000  # as published
DATA_SEED = 42  # of the published data; other seeds are those of training
P_SEEDS, H_SEEDS = tuple(range(1234, 1237)), tuple(range(1237, 1244))  # as published, against p and against H
ANCHORS = (16, 32, 64, 128, 256)  # of built networks: four doublings to fit a slope to
HEADS = (1, 2, 4, 8, 16)  # of built networks, the same
KEYS = 20  # of every head where heads are counted: as many as tokens
TRAINED_P, TRAINED_H = (10, 12, 14, 16, 18, 20), (1, 2, 4, 8, 16, 32)  # as published


class ReluMap(nn.Module):
    """The published target of one length."""

    W_1: Tensor
    b_1: Tensor
    W_2: Tensor
    b_2: Tensor

    def __init__(self, tokens: int, stream: RandomStream):
        super().__init__()
        wide = tokens * CHANNELS
        for name, shape in (("W_1", (HIDDEN, wide)), ("b_1", (HIDDEN,)), ("W_2", (wide, HIDDEN)), ("b_2", (wide,))):
            self.register_buffer(name, stream.normal(*shape))

    def forward(self, X: Tensor) -> Tensor:
        return self.read(torch.relu(X.flatten(-2) @ self.W_1.T + self.b_1))

    def read(self, hidden: Tensor) -> Tensor:
        """The output from the hidden units."""
        return (hidden @ self.W_2.T + self.b_2).unflatten(-1, (-1, CHANNELS))


def cells(quick: bool) -> tuple[Cell, ...]:
    lengths = (10,) if quick else (10, 20)
    found = grid(against=("p",), network=("cold", "warm"), n=lengths, p=ANCHORS, H=(1,))
    found += grid(against=("H",), network=("cold", "warm"), n=(20,), p=(KEYS,), H=HEADS[: 3 if quick else None])
    found += grid(against=("size",), network=("compiled",), n=lengths, p=(0,), H=(1,))
    trained: dict[str, Any] = {"network": ("trained",), "epochs": (1 if quick else 3,)}
    p_seeds, h_seeds = (P_SEEDS[:1], H_SEEDS[:1]) if quick else (P_SEEDS, H_SEEDS)
    found += grid(p_seeds, against=("p",), n=(10,), p=(10, 20) if quick else TRAINED_P, H=(8,), **trained)
    return found + grid(h_seeds, against=("H",), n=(20,), p=(20,), H=(1, 8) if quick else TRAINED_H, **trained)


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    stream = RandomStream(DATA_SEED)
    n, network = settings["n"], settings["network"]
    target = ReluMap(n, stream)
    X = stream.uniform(SAMPLES, n, CHANNELS)
    if network == "trained":
        own, wanted = RandomStream(seed), target(X)
        data = TaskData(X, wanted, *own.split(SAMPLES, SHARE))
        hidden = 16 if settings["against"] == "p" else 32
        model = TwoLayer(own, CHANNELS, n, settings["p"], settings["H"], hidden)
        fit(model, data, own, settings["epochs"])
        size = sum(p.numel() for p in model.parameters())
        return {**_values(held_out(model, data), wanted), "bound": None, "parameters": size}
    exact, some = target.double(), X[-2_000:].double()
    wanted = exact(some)
    with torch.no_grad():
        if network == "compiled":
            net = compile(exact, Box.cube(0, 1, shape=(n, CHANNELS)), eps=1e-6, dtype=torch.float64)
            out, limit, size = net(some), net.certificate.bound, net.size.parameters
        else:
            units = [_unit(exact, j, network, settings) for j in range(HIDDEN)]
            hidden_units = torch.cat([_run(m, some.flatten(-2)) for m in units], -1)
            out = exact.read(hidden_units)
            # |W_2 (h' - h)| for hidden units that are off by at most their certified bounds
            limits = torch.tensor([m.bound for m in units], dtype=torch.float64)
            limit = float((exact.W_2.abs() @ limits).max())
            size = sum(m.size.parameters for m in units) + exact.W_2.numel() + exact.b_2.numel()
    return {**_values(Errors.of(out, wanted), wanted), "bound": limit, "parameters": size}


def _unit(target: ReluMap, j: int, network: str, settings: Mapping[str, Any]) -> Construction:
    """Hidden unit j as one ramp of the flattened sequence."""
    w, t = target.W_1[j], float(target.b_1[j])
    if settings["against"] == "p":
        return relu(w, t, radius=1.0, anchors=settings["p"], variant=network)
    most = float(w.clamp_min(0).sum()) + max(t, 0.0) + 1e-6
    return ramp_heads(w, t, 0.0, most, settings["H"], KEYS, form="tokens", variant=network, radius=1.0)


def _run(m: Construction, flat: Tensor) -> Tensor:
    return m(flat[:, None])[:, 0]


def _values(found: Errors, wanted: Tensor) -> dict[str, float]:
    """Errors, and the root mean square error relative to the spread of the target."""
    spread = float(wanted.double().std())
    return {**found.__dict__, "relative": found.rms / spread, "spread": spread}


def figures(records: Sequence[Record]) -> list[Figure]:
    panels = []
    for against, label, n in (("p", "anchors p", 10), ("H", "heads H", 20)):
        chosen = where(records, against=against, n=n)
        series: list[Series] = []
        for network in ("cold", "warm", "trained"):
            series += line(network, where(chosen, network=network), against, "relative")
        if series:
            x = sorted({r[against] for r in chosen})
            for record in where(records, network="compiled", n=n):
                series.append(Series("compiled (its bound)", x, [record["bound"] / record["spread"]] * len(x)))
            y = "relative error (root mean square)"
            panels.append(Panel(f"n = {n}", label, y, series, log_x=True, log_y=True))
    caption = (
        "The published random ReLU network of all tokens (d = 5, 10 hidden units), against anchors and heads. "
        "Trained: two attention layers, Adam on 40,000 samples. Built: one head (or H heads of 20 keys) for "
        "every hidden unit. Compiled: gates, no anchors. Relative to the standard deviation of the target."
    )
    alt = "Trained networks stay near the spread of the target; built ones fall as 1/p and 1/H."
    return figure("relative", caption, panels, alt)


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    quantity = "largest error of built networks against the bound from their certificates"
    found += within(quantity, records, "sup", "bound")
    for against, name in (("p", "anchors p"), ("H", "heads H")):
        for network in ("cold", "warm"):
            rows = where(records, against=against, network=network)
            found += falls(f"largest error against {name}, built {network}", -1.0, rows, against, "sup", 0.15)
        quantity = f"mean squared error against {name}, trained (an error of 1/{against} squared)"
        rows = where(records, against=against, network="trained")
        found += falls(quantity, -2.0, rows, against, "mse", cause="training")
    trained, compiled = where(records, network="trained"), where(records, network="compiled")
    if trained and compiled:
        best = min(min(values) for values in column(trained, "n", "relative").values())
        note = "relative to the spread of the target: 1 is what a constant reaches"
        found.append(threshold("best trained network: relative error", 0.1, best, note=note).laid_to("training"))
        worst = max(r["relative"] for r in compiled)
        found.append(threshold("compiled network: relative error", 1e-6, worst, note=note))
    return found


EXPERIMENT = Experiment(
    name="sequence",
    title="A map between sequences",
    claim="Attention alone represents sequence-to-sequence maps: a ReLU network of all tokens by one ramp for every "
    "hidden unit, with an error that falls as 1/p and as 1/H; compiled, with gates, to rounding.",
    label="A2, A6, E5 (v1 theorem 3.3, v2 theorem 3.14)",
    varies="Anchors p and heads H; n = 10 and 20 tokens; built cold and warm, compiled, and trained as published (two "
    "attention layers, 50,000 samples, 3 epochs, hidden 16 against p and 32 against H).",
    measured_how="Errors on 10,000 unseen samples (trained) or 2,000 samples (built, float64); relative errors are "
    "root mean squares over the target's standard deviation.",
    judged_how="Built errors against the bound that follows from the certificates of the ramps; slopes on "
    "logarithmic axes against -1 (errors) and -2 (squared errors); relative errors: trained at most 0.1, compiled at "
    "most 1e-6.",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
    revision=2,
)
