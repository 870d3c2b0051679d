"""The lab on this machine: the quick run of all experiments, and the published grid of 187 trainings beside its means.

python benchmarks/lab.py             measures both, prints two tables, writes benchmarks/results/lab.json
python benchmarks/lab.py --quick     two seeds of the grid instead of eleven; writes nothing
python benchmarks/lab.py --only grid one of the two: run or grid
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from attnforge.lab import engine  # noqa: E402
from attnforge.lab.experiment import Cell, Experiment, names  # noqa: E402
from attnforge.lab.experiments import range as ranges  # noqa: E402
from attnforge.lab.experiments import rate_anchors, rate_heads  # noqa: E402
from attnforge.lab.training import SEEDS  # noqa: E402
from attnforge.lab.verdicts import mean  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "lab.json"
CORES = 2
GRIDS = ((rate_anchors, "p", "anchors p"), (rate_heads, "H", "heads H"), (ranges, "range", "|b - a|"))


def quick_run(folder: Path) -> dict[str, Any]:
    """`attnforge lab run all --quick` on two cores: time, and the largest memory of all of its processes together."""
    command = [sys.executable, "-m", "attnforge", "lab", "run", "all", "--quick", "--jobs", str(CORES), "--out"]
    begin, most = time.perf_counter(), 0
    process = psutil.Popen([*command, str(folder)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        most = max(most, sum(memory(each) for each in [process, *process.children(recursive=True)]))
        time.sleep(0.2)
    records = [json.loads(p.read_text("utf-8")) for name in names() for p in (folder / name).glob("*.json")]
    return {
        "minutes": (time.perf_counter() - begin) / 60,
        "gigabytes": most / 2**30,
        "exit": process.returncode,
        "cells": len(records),
        "seconds by experiment": {n: sum(r["time_s"] for r in records if r["experiment"] == n) for n in names()},
    }


def memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def only_trained(experiment: Experiment, seeds: tuple[int, ...]) -> Experiment:
    """The published trainings of an experiment and nothing else."""

    def cells(quick: bool) -> tuple[Cell, ...]:
        return tuple(c for c in experiment.cells(False) if c.settings["network"] == "trained" and c.seed in seeds)

    return replace(experiment, cells=cells)


def published_grid(folder: Path, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The published trainings, two at a time; means beside the published ones."""
    begin, rows, count = time.perf_counter(), [], 0
    chosen = [only_trained(module.EXPERIMENT, seeds) for module, _, _ in GRIDS]
    engine.run(chosen, folder, jobs=CORES)
    minutes = (time.perf_counter() - begin) / 60
    for module, setting, label in GRIDS:
        found: dict[Any, list[float]] = {}
        for path in (folder / module.EXPERIMENT.name).glob("*.json"):
            record = json.loads(path.read_text("utf-8"))
            found.setdefault(record["settings"][setting], []).append(record["values"]["mse"])
        for at, values in sorted(found.items()):
            here, count = mean(values), count + len(values)
            rows.append({"against": label, "at": at, "published": module.PUBLISHED[at], "mean": here.value,
                         "spread": here.spread, "seeds": here.n})  # fmt: skip
    return {"minutes": minutes, "trainings": count, "rows": rows}


def table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in header:
        shown.add_column(name)
    for row in rows:
        shown.add_row(*row)
    Console(width=140).print(shown, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds of the published grid")
    parser.add_argument("--only", choices=("run", "grid"), help="one of the two measurements")
    wanted = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if wanted.only and RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if wanted.only != "grid":
            found = results["quick run"] = quick_run(Path(folder) / "quick")
            times = found["seconds by experiment"]
            table("attnforge lab run all --quick, two cores", ("", "measured", "allowed"), [
                ("minutes", f"{found['minutes']:.2f}", "5"), ("GB, all processes", f"{found['gigabytes']:.2f}", "2"),
                ("cells", str(found["cells"]), ""), *((n, f"{s:.1f} s", "") for n, s in times.items()),
            ])  # fmt: skip
        if wanted.only != "run":
            seeds = SEEDS[:2] if wanted.quick else SEEDS
            found = results["published grid"] = published_grid(Path(folder) / "grid", seeds)
            table(f"Published grid: {found['trainings']} trainings in {found['minutes']:.1f} minutes (allowed 20), "
                  "mean squared error over 32 channels", ("against", "", "published", "here", "spread of a run"), [
                (r["against"], f"{r['at']:g}", f"{r['published']:g}", f"{r['mean']:.4g}", f"{r['spread']:.2g}")
                for r in found["rows"]
            ])  # fmt: skip
    if wanted.quick:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    run, grid = results.get("quick run"), results.get("published grid")
    assert run is None or (run["exit"] == 0 and run["minutes"] < 5 and run["gigabytes"] < 2), run
    assert grid is None or (grid["trainings"] == 187 and grid["minutes"] < 20), "the published grid took too long"
    assert grid is None or all(abs(r["mean"] - r["published"]) <= r["spread"] for r in grid["rows"])


if __name__ == "__main__":
    main()
