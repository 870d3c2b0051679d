"""The compiler in numbers: how many formulas compile, how fast, how large, how tight; whether a bound was ever broken.

python benchmarks/compile.py             measures, prints two tables, writes benchmarks/results/compile.json
python benchmarks/compile.py --resume    goes on where a run was stopped
python benchmarks/compile.py --quick     few formulas, few evaluations; nothing is written
python benchmarks/compile.py --markdown  prints the summary of the last run for the documentation

The formulas are those of benchmarks/formulas.py. Every certificate is attacked with a million evaluations: random
points, corners, edges, and gradient ascent on the error from the worst of them. The truth is sympy's reading of the
formula, evaluated with numpy in float64: nothing of it comes from the compiler.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from formulas import FORMULAS  # noqa: E402
from resume import Parts  # noqa: E402

import attnforge as af  # noqa: E402
from attnforge.compiler.compiled import CompiledNetwork  # noqa: E402
from attnforge.programs.interpret import values  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "compile.json"
GOALS = {"float32": (torch.float32, 1e-3), "float64": (torch.float64, 1e-6)}
BATCH = 20_000
Truth = Callable[[np.ndarray], np.ndarray]


def truth_of(formula: str, names: tuple[str, ...]) -> Truth:
    """The formula as sympy reads it, for rows of float64 numbers. The list of formulas is ours: reading it is safe."""
    symbols = {name: sympy.Symbol(name, real=True) for name in names}
    known = {"max": sympy.Max, "min": sympy.Min, "clip": lambda x, a, b: sympy.Min(sympy.Max(x, a), b)}
    constants = {"pi": sympy.pi} | ({} if "e" in names else {"e": sympy.E})
    spelled = sympy.sympify(formula, locals={**known, **constants, **symbols})
    function = sympy.lambdify([symbols[name] for name in names], spelled, "numpy")

    def truth(points: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.broadcast_to(function(*points.T), len(points)).astype(np.float64)
        return np.where(np.isnan(found), removable(spelled, symbols, points), found) if np.isnan(found).any() else found

    return truth


def removable(spelled: Any, symbols: dict[str, Any], points: np.ndarray) -> np.ndarray:
    """Where floating point has no answer, such as sin(0)/0 or the root of -1e-17: the value at the nearest point."""
    function = sympy.lambdify(list(symbols.values()), spelled, "numpy")
    with np.errstate(invalid="ignore", divide="ignore"):
        for step in (1e-9, -1e-9):
            near = function(*(points * (1 - step) + (points == 0) * step).T)
            if np.isfinite(near).any():
                return np.nan_to_num(np.broadcast_to(near, len(points)))
    return np.zeros(len(points))


def errors(net: CompiledNetwork, points: Tensor, truth: Truth) -> Tensor:
    """|network - truth| at points of the network's dtype."""
    found = []
    with torch.no_grad():
        for some in points.split(BATCH):
            exact = torch.from_numpy(truth(some.double().numpy()))
            found.append((net.core(some).double() - exact).abs())
    return torch.cat(found)


def edges(box: af.Box, count: int, dtype: torch.dtype) -> Tensor:
    """Random points of which one coordinate, or several, lie on the boundary."""
    generator = torch.Generator().manual_seed(7)
    points, wide = box.sample(count, 8, dtype), box.outward(dtype)
    choice = torch.rand((count, box.dim), generator=generator)
    points = torch.where(choice < 0.25, wide.lower.to(dtype), points)
    return torch.where(choice > 0.75, wide.upper.to(dtype), points)


def climb(net: CompiledNetwork, starts: Tensor, truth: Truth, steps: int) -> tuple[Tensor, int]:
    """The largest errors on the way up from the given points, and how many evaluations that took."""
    wide = net.box.outward(net.dtype)
    low, high = wide.lower.to(net.dtype), wide.upper.to(net.dtype)
    x, most, count = starts, errors(net, starts, truth), len(starts)
    for i in range(steps):
        x = x.detach().requires_grad_()
        gap = (net.core(x).double() - values(net.program, x.double())).abs().sum()
        (slope,) = torch.autograd.grad(gap, x)
        with torch.no_grad():
            moved = x + 0.1 * 0.75**i * (high - low) * torch.nan_to_num(slope).sign()
            x = torch.minimum(torch.maximum(moved, low), high)
        most = torch.maximum(most, errors(net, x.detach(), truth))
        count += len(x)
    return most, count


def attack(net: CompiledNetwork, truth: Truth, evaluations: int) -> tuple[float, int, int]:
    """The largest error found, how many points were looked at, and how many of them break the bound."""
    box, dtype, bound = net.box, net.dtype, net.bound
    steps, starts = 20, max(64, evaluations // 100)
    rest = evaluations - starts * (steps + 1)
    parts = [box.corners(4096, dtype), edges(box, rest // 3, dtype), box.sample(rest - rest // 3, 1, dtype)]
    points = torch.cat(parts)
    found = errors(net, points, truth)
    worst = points[found.argsort(descending=True)[:starts]]
    climbed, count = climb(net, worst, truth, steps)
    broken = int((found > bound).sum()) + int((climbed > bound).sum())
    return max(float(found.max()), float(climbed.max())), len(points) + count, broken


def spread(truth: Truth, box: af.Box) -> float:
    """The range of the target, from samples."""
    seen = truth(torch.cat([box.sample(20_000), box.corners(4096)]).numpy())
    return float(np.nanmax(seen) - np.nanmin(seen))


def measured(name: str, goal: str, evaluations: int) -> dict[str, Any]:
    """One formula in one dtype."""
    formula, sides = FORMULAS[name]
    box = af.Box(sides)
    truth = truth_of(formula, box.names or ())
    dtype, share = GOALS[goal]
    eps = share * spread(truth, box)
    row: dict[str, Any] = {"name": name, "formula": formula, "variables": box.dim, "eps": eps}
    start = time.process_time()  # of one thread: a busy machine makes no difference
    try:
        net = af.compile(formula, box, eps, dtype=dtype)
    except af.AttnforgeError as error:
        return {**row, "seconds": time.process_time() - start, "refused": str(error).splitlines()[0]}
    seconds = time.process_time() - start
    largest, count, broken = attack(net, truth, evaluations)
    size = net.size
    return {
        **row, "seconds": seconds, "bound": net.bound, "found": largest, "evaluations": count, "broken": broken,
        "layers": size.layers, "heads": size.heads, "anchors": size.anchors, "parameters": size.parameters,
    }  # fmt: skip


def mlp(repeats: int) -> dict[str, Any]:
    """The MLP 10-64-64-1 with gelu in float64: how long it takes to compile, and how much slower it runs."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).double()
    box = af.Box.cube(-1, 1, shape=10)
    start = time.process_time()
    net = af.compile(module, box, eps=1e-4, dtype=torch.float64)
    seconds = time.process_time() - start
    found: dict[str, Any] = {"seconds": seconds, "bound": net.bound, "heads": net.size.heads, "ratios": {}}
    with torch.no_grad():
        for batch in (1, 64, 1024, 16384):
            points = box.sample(batch)
            ratios = []
            for _ in range(repeats):  # one after the other, so that a busy machine slows both
                ratios.append(timed(net, points) / timed(module, points))
            found["ratios"][str(batch)] = statistics.median(ratios)
        points = torch.cat([box.sample(200_000), box.corners(1024)])
        gaps = [(net(p) - module(p)).abs().max() for p in points.split(BATCH)]
    found["found"] = float(torch.stack(gaps).max())
    return found


def timed(module: nn.Module, points: Tensor) -> float:
    module(points)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.05:
        module(points)
        calls += 1
    return (time.perf_counter() - start) / calls


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the many rows of one dtype come to."""
    done = [row for row in rows if "bound" in row]
    tight = [row["bound"] / row["found"] for row in done if row["found"] > 0]
    return {
        "formulas": len(rows),
        "compiled": len(done),
        "median seconds": statistics.median(row["seconds"] for row in rows),
        "largest seconds": max(row["seconds"] for row in rows),
        "median heads": statistics.median(row["heads"] for row in done),
        "most heads": max(row["heads"] for row in done),
        "median layers": statistics.median(row["layers"] for row in done),
        "most layers": max(row["layers"] for row in done),
        "median bound / found": statistics.median(tight),
        "evaluations": sum(row["evaluations"] for row in done),
        "broken bounds": sum(row["broken"] for row in done),
    }


def table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The summary, a column for each dtype."""
    names = list(data["summary"]["float32"])
    head = ["asked for", "float32, 0.001 of the range", "float64, 0.000001 of the range"]
    cells = [[_cell(data["summary"][goal][name]) for goal in GOALS] for name in names]
    return head, [[name, *row] for name, row in zip(names, cells, strict=True)]


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def mlp_line(found: dict[str, Any]) -> str:
    ratios = ", ".join(f"{ratio:.1f} times for {batch} points" for batch, ratio in found["ratios"].items())
    return (
        f"The MLP 10-64-64-1 with gelu on [-1, 1]^10 compiles at 1e-4 in float64 in {found['seconds']:.1f} s "
        f"(certified {found['bound']:.2g}, found {found['found']:.2g}). It runs slower than the original by {ratios}."
    )


def markdown(data: dict[str, Any]) -> str:
    head, body = table(data)
    lines = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])
    refused = [f"`{r['formula']}` in {goal}: {r['refused']}" for goal in GOALS for r in data[goal] if "refused" in r]
    return "\n\n".join([lines, mlp_line(data["mlp"]), *(f"Refused: {line}" for line in refused)])


def show(data: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    for goal in GOALS:
        shown = Table("formula", "variables", "s", "layers", "heads", "anchors", "bound/eps", "bound/found", title=goal)
        for row in data[goal]:
            start = [row["formula"], str(row["variables"]), f"{row['seconds']:.2f}"]
            if "refused" in row:
                shown.add_row(*start, "", "", "", "refused", "")
                continue
            tight = f"{row['bound'] / row['found']:.1f}" if row["found"] else "exact"
            counts = (str(row[key]) for key in ("layers", "heads", "anchors"))
            shown.add_row(*start, *counts, f"{row['bound'] / row['eps']:.2f}", tight)
        console.print(shown)
    console.print(markdown(data), markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few formulas and evaluations; nothing is written")
    parser.add_argument("--markdown", action="store_true", help="print the summary of the last run")
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    wanted = parser.parse_args()
    if wanted.markdown:
        sys.stdout.write(markdown(json.loads(RESULTS.read_text("utf-8"))) + "\n")
        return
    torch.set_num_threads(1)
    names = list(FORMULAS)[::8] if wanted.quick else list(FORMULAS)
    evaluations = 20_000 if wanted.quick else 1_000_000
    af.compile("sin(x)*y + exp(x)/y", af.Box(x=(0, 1), y=(1, 2)), eps=1e-3)  # the first call of a process is slower
    parts = Parts(RESULTS, wanted.resume) if not wanted.quick else None
    kept: dict[str, Any] = {} if parts is None else parts.rows

    def once(key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if key not in kept:
            row = measure()
            if parts is None:
                kept[key] = row
            else:
                parts.add(key, row)
            sys.stderr.write(f"{key}, {len(kept)} of {len(names) * len(GOALS) + 1}\n")
        found: dict[str, Any] = kept[key]
        return found

    data: dict[str, Any] = {
        "machine": {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.machine()},
        "commits": [] if parts is None else parts.commits,
        "mlp": once("mlp", lambda: mlp(3 if wanted.quick else 9)),
    }
    for goal in GOALS:
        data[goal] = [once(f"{goal}: {name}", lambda: measured(name, goal, evaluations)) for name in names]  # noqa: B023
    data["summary"] = {goal: summary(data[goal]) for goal in GOALS}
    show(data)
    if parts is not None:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8", newline="\n")
        parts.done()


if __name__ == "__main__":
    main()
