"""What was asked of speed beside what the last runs measured, for docs/measured.md; and every case that was measured on
a GPU, for docs/convert.md.

python benchmarks/targets.py            prints both, as markdown
python benchmarks/targets.py --write    puts them between the markers of these pages

Ratios are to the original in the same mode. A target speaks of many cases; it is met when all of them were measured and
all meet it. Those that do not are named; what was not measured is counted, never guessed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from readme import ROOT, filled

RESULTS = Path(__file__).resolve().parent / "results"
HALVES = ("bfloat16", "float16", "float32")
MODELS = [
    f"{name} {size} {level}"
    for name, size, level in product(("BERT-base", "GPT-2", "Llama"), ("16 x 512", "1 x 2048"), ("ffn", "pure"))
]
DECODED = [f"{name} decode {level}" for name, level in product(("GPT-2", "Llama"), ("ffn", "pure"))]
TRAINED = [f"{name} train {level}" for name, level in product(("BERT-base", "GPT-2", "Llama"), ("ffn", "pure"))]
NORMS = [f"kernel {kind} norm {channels}" for kind, channels in product(("layer", "rms"), (768, 1024, 4096))]
SHOWN = 4  # misses that are named; the rest is counted
Data = dict[str, Any]
Line = tuple[str, ...]


def names(stems: Sequence[str], dtypes: Sequence[str], mode: str = "") -> list[str]:
    return [" ".join(filter(None, (stem, dtype, mode))) for stem, dtype in product(stems, dtypes)]


def line(what: str, most: float, found: dict[str, float | None]) -> Line:
    """One target: the cases by name, None for those that nobody measured."""
    known = {name: value for name, value in found.items() if value is not None}
    missed = {name: value for name, value in sorted(known.items(), key=lambda pair: -pair[1]) if value > most}
    ends = [f"{end(known.values()):.2f}" for end in (min, max)] if known else ["-"]
    said = "not measured" if not known else "met" if not missed else f"{len(known) - len(missed)} of {len(known)} met"
    if known and len(known) < len(found):
        said += f"; {len(found) - len(known)} of {len(found)} not measured"
    named = [f"{name} {value:.2f}" for name, value in missed.items()]
    more = [f"{len(named) - SHOWN} more"] if len(named) > SHOWN else []
    return what, f"{most:.2f}", " to ".join(dict.fromkeys(ends)), said, ", ".join(named[:SHOWN] + more)


def on_a_gpu(speed: Data) -> list[Line]:
    cases = speed["cases"]

    def of(every: Sequence[str], key: str = "ratio") -> dict[str, float | None]:
        return {name.removeprefix("kernel "): cases.get(name, {}).get(key) for name in every}

    layer, eager, compiled = ["layer 4096 x 16384"], names(MODELS, HALVES, "eager"), names(MODELS, HALVES, "compiled")
    decoded = {mode: names(DECODED, ("bfloat16", "float32"), mode) for mode in ("eager", "compiled")}
    whole = [*eager, *compiled, *decoded["eager"], *decoded["compiled"]]
    kernels = names(["kernel gelu", "kernel silu", "kernel gelu_tanh", *NORMS], HALVES)
    inside = {name: None if (row := cases.get(name)) is None else row["found"] / row["bound"] for name in kernels}
    return [
        line("layer 4096 x 16384, bfloat16, eager", 1.05, of(names(layer, ["bfloat16"], "eager"))),
        line("the same, compiled", 1.03, of(names(layer, ["bfloat16"], "compiled"))),
        line("the same, float32", 1.05, of([f"{layer[0]} float32 {mode}" for mode in ("eager", "compiled")])),
        line("BERT-base, GPT-2, Llama, eager", 1.10, of(eager)),
        line("the same, compiled", 1.05, of(compiled)),
        line("one token with a cache, eager", 1.25, of(decoded["eager"])),
        line("the same, compiled", 1.10, of(decoded["compiled"])),
        line("memory of all these models", 1.05, of(whole, "memory")),
        line("compile time of them", 1.5, of([*compiled, *decoded["compiled"]], "compile time")),
        line("training, forward and backward", 1.3, of(names(TRAINED, ("bfloat16", "float32")))),
        line("GELU alone, bfloat16 (shown possible)", 1.26, of(["kernel gelu bfloat16"])),
        line("GELU alone, float32 (shown possible)", 1.0, of(["kernel gelu float32"])),
        line("norms alone", 1.0, of(names(NORMS, HALVES))),
        line("error found, of the bound", 1.0, inside),
    ]  # fmt: skip


def on_a_processor(runtime: Data) -> list[Line]:
    def of(part: str, key: str = "ratio", holding: str = "", naming: Sequence[str] = ("what",)) -> dict[str, Any]:
        rows = [row for row in runtime.get(part, []) if holding in str(row["what"])]
        return {" ".join(str(row[k]) for k in naming): row.get(key) for row in rows} or {part: None}

    def median(part: str) -> dict[str, float | None]:
        ratios = [row["ratio"] for row in runtime.get(part, [])]
        return {f"median of {len(ratios)}": statistics.median(ratios) if ratios else None}

    seconds = {row["what"]: row["seconds"] for row in runtime.get("compiling", [])}
    formula = next((s for what, s in seconds.items() if "median" in what), None)
    return [
        line("sentence encoder, level ffn", 1.10, of("encoder ffn", naming=("what", "threads"))),
        line("the same, level pure", 1.15, of("encoder pure", naming=("what", "threads"))),
        line("the README's formula, eager (was 71)", 30.0, of("readme", holding="eager")),
        line("the same, compiled", 15.0, of("readme", holding="compiled")),
        line("formulas, eager, median, a million points", 30.0, median("formulas")),
        line("the same, compiled", 15.0, median("compiled")),
        line("MLP 10-64-64-1 with gelu", 2.0, of("mlp", naming=("what", "points"))),
        line("1,000 ridge regressions, of a loop over scikit-learn", 1.0, of("context")),
        line("plain exports: time, of that of all rows", 0.5, {
            row["what"]: row["ratio"] / row["stock"] for row in runtime.get("plain", [])} or {"plain": None}),
        line("seconds to compile a formula, median (half of 0.2)", 0.1, {"median": formula}),
    ]  # fmt: skip


def cases() -> str:
    """Every case of the last run on a GPU."""
    columns = ("ratio", "memory", "compile time")
    rows: list[Line] = [("case", "time", "memory", "compile time"), ("---",) * 4]
    for name, row in json.loads((RESULTS / "speed.json").read_text("utf-8"))["cases"].items():
        rows.append((name, *(f"{row[key]:.2f}" if key in row else "" for key in columns)))
    return markdown(rows)


def markdown(rows: Sequence[Line]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def targets() -> str:
    speed, runtime = (json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in ("speed", "runtime"))
    where = f"{speed['device']}, PyTorch {speed['torch']}", f"processor, PyTorch {runtime['torch']}"
    head = ("at most", "measured", "target", "misses")
    blocks = []
    for place, lines in zip(where, (on_a_gpu(speed), on_a_processor(runtime)), strict=True):
        rows = [(place, *head), ("---",) * (1 + len(head)), *lines]
        blocks.append(markdown(rows))
    return "\n\n".join(blocks)


PAGES = {"measured.md": targets, "convert.md": cases}


def main() -> None:
    for name, make in PAGES.items():
        text = make()
        sys.stdout.write(text + "\n\n")
        if "--write" in sys.argv[1:]:
            page = ROOT / "docs" / name
            page.write_text(filled(page.read_text("utf-8"), "speed", text), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
