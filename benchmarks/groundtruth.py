"""Three ways to find circuits, on networks whose circuits are known: where they are wrong.

python benchmarks/groundtruth.py            30 models, prints a table, writes benchmarks/results/groundtruth.json
python benchmarks/groundtruth.py --resume   goes on where a run was stopped: models that it has measured are kept
python benchmarks/groundtruth.py --quick    6 models, writes nothing
python benchmarks/groundtruth.py --markdown prints the last run as docs/groundtruth.md shows it; --fill puts it there,
and a shorter one into the README

Ten programs of the library, from some that take two blocks to `bigram_copy`, which takes six, each in three forms that
have the same idle and distractor heads: "plain" columns, a "rotated" stream, "superposed" codes in a rotated stream.
All of them are exact by proof, and their manifests say which heads and edges move the output. The methods use
TransformerLens hooks alone; an edge goes from what a head adds to the stream (or from the input) to the query, key and
value of a later head (or to the output). On pairs of sequences (clean, other) they do this to an edge:

- activation patching: replace what passes it by what passes it on the other sequence, alone;
- attribution patching: the same to first order, by one gradient at the clean sequence;
- greedy ablation: from the output backwards, replace for good wherever that changes the output by less than 1 %.

Scores are the mean change of the logits that tell the clean from the other answer. The rule by which an edge counts as
found was fixed before any model was measured, and is one for all methods, programs and forms: its score is more than
1 % of the mean change between the two sequences. No number here was chosen after a look at what it gives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import attnforge as af  # noqa: E402
from attnforge import rasp  # noqa: E402
from attnforge.export.lens import Lens, to_lens  # noqa: E402
from attnforge.groundtruth.evidence import manifest  # noqa: E402
from attnforge.groundtruth.manifest import Manifest  # noqa: E402
from attnforge.groundtruth.scoring import score  # noqa: E402
from attnforge.groundtruth.variants.build import vary  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "groundtruth.json"
PAGE = ROOT / "docs" / "groundtruth.md"
README = ROOT / "README.md"
PROGRAMS = (
    "reverse", "hist", "shift_by", "sort", "detect_pattern", "index_select", "sort_unique", "induction", "unique_copy",
    "bigram_copy",
)  # fmt: skip
FORMS = {
    "plain": ("permuted", "distractor", "idle"),
    "rotated": ("permuted", "distractor", "idle", "rotated"),
    "superposed": ("permuted", "distractor", "idle", "superposed"),
}
LENGTH = 5  # tokens of a sequence: programs of the library have all their heads from 4 on
PAIRS = 32  # pairs of sequences: what a user of these methods would take
FOUND = 0.01  # of the change between clean and other sequences, from where on an edge counts as found
SETTINGS = {"programs": list(PROGRAMS), "forms": list(FORMS), "length": LENGTH, "pairs": PAIRS, "found": FOUND}
Edge = tuple[str, str]


class Patching:
    """A lens, clean and other inputs, and the output where what passes some edges is replaced."""

    def __init__(self, lens: Lens, truth: Manifest, clean: Tensor, other: Tensor):
        self.lens, self.weights = lens, lens.weights
        self.spots = {head.id: (head.layer, head.index) for head in truth.heads}
        self.clean, self.other = clean, other
        self.real = clean != len(lens.plain.spec.inputs) - 1
        with torch.no_grad():
            self.gives_other, after = self.run(other, {})
            self.gives, before = self.run(clean, {})
        self.before, self.answers = before, (before.argmax(-1), after.argmax(-1))
        self.total = float(self.metric(before).sub(self.metric(after)).abs().mean())

    def edges(self) -> list[Edge]:
        """Every edge there could be, those to late nodes first."""
        layer = {"input": -1, **{name: at for name, (at, _) in self.spots.items()}, "output": self.lens.cfg.n_layers}
        found = [(a, b) for a in layer for b in layer if layer[a] < layer[b]]
        return sorted(found, key=lambda edge: (-layer[edge[1]], edge[1], -layer[edge[0]], edge[0]))

    def metric(self, logits: Tensor) -> Tensor:
        """For each sequence: by how much clean answers are ahead of the other ones, summed over positions."""
        ahead = [logits.gather(-1, answer.unsqueeze(-1)).squeeze(-1) for answer in self.answers]
        return torch.where(self.real, ahead[0] - ahead[1], 0.0).sum(-1)

    def output(self, name: str, z: Tensor) -> Tensor:
        """What a head adds to the stream."""
        layer, index = self.spots[name]
        return z[:, :, index] @ self.weights[f"blocks.{layer}.attn.W_O"][index]

    def run(self, x: Tensor, replaced: dict[str, list[str]]) -> tuple[dict[str, Tensor], Tensor]:
        """What every node gives, and the logits, where nodes read other inputs' values of the nodes that are listed."""
        gives = {"input": self.lens.residual(x)}
        hooks: list[tuple[str, Callable[..., Any]]] = []

        @cache
        def change(node: str) -> Tensor | None:
            found = None
            for source in replaced.get(node, ()):
                found = moved(source).clone() if found is None else found.add_(moved(source))
            return found

        @cache
        def moved(source: str) -> Tensor:
            return self.gives_other[source] - gives[source]

        def reads(layer: int, part: str) -> Callable[..., Tensor]:
            def hook(value: Tensor, hook: object) -> Tensor:
                value = value.clone()
                for name, (at, index) in self.spots.items():
                    if at == layer and (delta := change(name)) is not None:
                        value[:, :, index] += delta @ self.weights[f"blocks.{layer}.attn.W_{part.upper()}"][index]
                return value

            return hook

        def writes(layer: int) -> Callable[..., None]:
            def hook(z: Tensor, hook: object) -> None:
                gives.update({name: self.output(name, z) for name, (at, _) in self.spots.items() if at == layer})

            return hook

        for layer in range(self.lens.cfg.n_layers):
            hooks += [(f"blocks.{layer}.attn.hook_{part}", reads(layer, part)) for part in "qkv"]
            hooks.append((f"blocks.{layer}.attn.hook_z", writes(layer)))
        logits = self.lens.run_with_hooks(x, fwd_hooks=hooks)
        if (delta := change("output")) is not None:
            logits = logits + (delta @ self.weights["unembed.W_U"])[:, self.lens.registers :]
        return gives, logits

    def effect(self, replaced: dict[str, list[str]]) -> float:
        """The mean change of the metric."""
        return float((self.metric(self.run(self.clean, replaced)[1]) - self.metric(self.before)).abs().mean())


@torch.no_grad()
def activation_patching(patching: Patching) -> dict[Edge, float]:
    """The effect of every edge by itself."""
    return {(a, b): patching.effect({b: [a]}) for a, b in patching.edges()}


def attribution_patching(patching: Patching) -> dict[Edge, float]:
    """The effect of every edge to first order: one pass forwards and one backwards at the clean sequences."""
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, part: str) -> Callable[..., Tensor]:
        def hook(value: Tensor, hook: object) -> Tensor:
            seen[layer, part] = value.clone().requires_grad_()
            return seen[layer, part]

        return hook

    layers = range(patching.lens.cfg.n_layers)
    hooks = [(f"blocks.{layer}.attn.hook_{part}", keep(layer, part)) for layer in layers for part in "qkv"]
    stream = patching.lens.residual(patching.clean).detach().requires_grad_()
    logits = patching.lens._rows(patching.lens.model.run_with_hooks(stream, fwd_hooks=hooks, start_at_layer=0))
    for value in seen.values():
        value.retain_grad()
    patching.metric(logits).sum().backward()
    answer = torch.zeros_like(logits)
    for sign, best in zip((1.0, -1.0), patching.answers, strict=True):
        answer.scatter_add_(-1, best.unsqueeze(-1), sign * patching.real.to(answer.dtype).unsqueeze(-1))
    found = {}
    for a, b in patching.edges():
        delta = (patching.gives_other[a] - patching.gives[a]).detach()
        if b == "output":
            change = ((delta @ patching.weights["unembed.W_U"])[:, patching.lens.registers :] * answer).sum((1, 2))
        else:
            layer, index = patching.spots[b]
            change = torch.zeros(len(delta), dtype=delta.dtype)
            for part in "qkv":
                slope = seen[layer, part].grad
                moved = delta @ patching.weights[f"blocks.{layer}.attn.W_{part.upper()}"][index]
                change = change + (0.0 if slope is None else (moved * slope[:, :, index]).sum((1, 2)))
        found[a, b] = float(change.abs().mean())
    return found


@torch.no_grad()
def greedy_ablation(patching: Patching) -> dict[Edge, float]:
    """Edges that could not be replaced for good, ranked by what replacing them did."""
    gone: dict[str, list[str]] = {}
    found, now = {}, 0.0
    for a, b in patching.edges():
        tried = {**gone, b: [*gone.get(b, []), a]}
        effect = patching.effect(tried)
        found[a, b] = max(0.0, effect - now)
        if found[a, b] <= FOUND * patching.total:
            gone, now, found[a, b] = tried, effect, 0.0
    return found


METHODS = {
    "activation patching": activation_patching,
    "attribution patching": attribution_patching,
    "greedy ablation": greedy_ablation,
}


def sequences(net: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of sequences as token ids, half of them of equal length."""
    chosen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LENGTH + 1, (2, PAIRS), generator=chosen)
    lengths[1, ::2] = lengths[0, ::2]
    ids = torch.randint(len(net.vocabulary), (2, PAIRS, LENGTH), generator=chosen)
    padded = torch.where(torch.arange(LENGTH) >= lengths[..., None], len(net.vocabulary), ids)
    return padded[0], padded[1]


def measure(name: str, form: str, seed: int) -> list[dict[str, Any]]:
    """All methods on one model."""
    listed = rasp.library.get(name)
    domain = listed.domain(LENGTH)
    net = af.compile(listed.program(domain), domain, dtype=torch.float64)
    variant = vary(net, FORMS[form], seed)
    truth = manifest(variant)
    patching = Patching(to_lens(variant, verify=False), truth, *sequences(net, seed))
    rows = []
    for method, find in METHODS.items():
        start = time.perf_counter()
        ranks = find(patching)
        seconds = time.perf_counter() - start
        least = FOUND * patching.total
        edges = {edge: rank for edge, rank in ranks.items() if rank > least}
        heads = {node for edge in edges for node in edge} - {"input", "output"}
        ranked = score({"heads": sorted(heads), "edges": ranks}, truth, threshold=max(least, 1e-300))
        stated = {(e.source, e.target): e for e in truth.edges}
        missed = [e for pair, e in stated.items() if e.moves and pair not in edges]
        into = [part for edge in missed for part in edge.into]
        rows.append({"program": name, "form": form, "method": method, "seconds": seconds, **ranked.to_json(),
                     "missed into": {part: into.count(part) for part in sorted(set(into))}})  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the programs, for each method and form."""
    found = []
    for method in METHODS:
        for form in FORMS:
            some = [row for row in rows if row["method"] == method and row["form"] == form]
            if not some:
                continue
            areas = [row["edges"]["auc"] for row in some if row["edges"]["auc"] is not None]
            means = {f"{what} {n}": sum(row[what][n] for row in some) / len(some) for what in ("heads", "edges")
                     for n in ("precision", "recall")}  # fmt: skip
            perfect = sum(row["edges"]["wrong"] == row["edges"]["missed"] == 0 for row in some)
            found.append({"method": method, "form": form, "models": len(some), **means,
                          "edges auc": sum(areas) / max(1, len(areas)), "all edges right": perfect,
                          "seconds": sum(row["seconds"] for row in some)})  # fmt: skip
    return found


def measured() -> list[dict[str, Any]]:
    """What a run that was stopped has written, if it was one of this script as it is."""
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    return list(found["models"]) if found.get("settings") == SETTINGS else []


def markdown(means: list[dict[str, Any]]) -> str:
    """The table of the page: means over the programs."""
    lines = ["| method | form | edges: precision | recall | AUC | heads: recall | networks with all edges right |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in means:
        first = row["method"] if row["form"] == next(iter(FORMS)) else ""
        numbers = [f"{row[key]:.2f}" for key in ("edges precision", "edges recall", "edges auc", "heads recall")]
        cells = [first, row["form"], *numbers, f"{row['all edges right']} of {row['models']}"]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def short(means: list[dict[str, Any]]) -> str:
    """The table of the README: what each method finds of each form."""
    rows = {(row["method"], row["form"]): row for row in means}
    methods = list(dict.fromkeys(row["method"] for row in means))
    count = sum(row["models"] for row in means if row["method"] == methods[0])
    lines = [f"| edges of {count} known circuits, found by | {' | '.join(FORMS)} |", f"|{'---|' * (1 + len(FORMS))}"]
    for method in methods:
        found = [rows[method, form] for form in FORMS]
        cells = [f"{row['edges recall']:.0%}; all in {row['all edges right']} of {row['models']}" for row in found]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two programs, nothing is written")
    parser.add_argument("--resume", action="store_true", help="keep what a run that was stopped has measured")
    parser.add_argument("--markdown", action="store_true", help="print the last run as the page shows it")
    parser.add_argument("--fill", action="store_true", help="put the last run into the page and the README")
    asked = parser.parse_args()
    if asked.markdown or asked.fill:
        means = json.loads(RESULTS.read_text("utf-8"))["summary"]
        if asked.fill:
            from readme import filled

            for page, shown in ((PAGE, markdown(means)), (README, short(means))):
                page.write_text(filled(page.read_text("utf-8"), "circuits", shown), "utf-8")
        else:
            print(markdown(means))
        return
    torch.set_num_threads(1)
    rows = measured() if asked.resume and not asked.quick else []
    done = {(row["program"], row["form"]) for row in rows}
    for number, name in enumerate(PROGRAMS[:2] if asked.quick else PROGRAMS):
        for form in (form for form in FORMS if (name, form) not in done):
            rows += measure(name, form, number)
            if not asked.quick:
                about = {"settings": SETTINGS, "summary": summary(rows), "models": rows}
                RESULTS.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    means = summary(rows)
    table = Table("method", "form", *(key for key in means[0] if key not in ("method", "form")))
    for mean in means:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in mean.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
