"""The theorems in numbers: the published ramp setting beside trained networks, rates with intervals, one large input.

python benchmarks/theorems.py           measures, prints three tables, writes benchmarks/results/theorems.json
python benchmarks/theorems.py --quick   the same with fewer sizes and seeds

The trained column is copied, not measured here: means over 11 seeds of networks trained on the same task.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from attnforge import Box, theorems  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "theorems.json"
CHANNELS = 32  # of which 31 are zero
TRAINED = {"1 head, p = 60": 0.129, "1 head, p = 120": 0.0039, "16 heads, p = 60": 0.0148}
STUDENT = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}  # 97.5 % quantiles of t, by degrees of freedom
LARGE = {"tokens": 10_000, "anchors": 1024, "d": 10, "seconds": 10.0, "gigabytes": 2.0}


@dataclass(frozen=True)
class Published:
    """One row of the first table: mean squared error over all channels, mean over seeds."""

    name: str
    trained: float | None
    cold: float
    warm: float
    gate: float
    bound: float
    paper_bound: float


def published(seeds: int, dtype: torch.dtype) -> list[Published]:
    """d = 10, n = 50, x uniform in [-5, 5], a = -25, b = 25, w and t standard normal."""
    rows = []
    for name, anchors, heads in (("1 head, p = 60", 60, 1), ("1 head, p = 120", 120, 1), ("16 heads, p = 60", 60, 16)):
        errors: dict[str, list[float]] = {"cold": [], "warm": [], "gate": []}
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            w = torch.randn(10, generator=generator, dtype=torch.float64).to(dtype)
            t = torch.randn((), generator=generator, dtype=torch.float64).to(dtype)
            X = (10 * torch.rand(64, 50, 10, generator=generator, dtype=torch.float64) - 5).to(dtype)
            options: dict[str, Any] = {"radius": 5.0, "channels": CHANNELS}
            cold: theorems.Construction
            if heads == 1:
                cold = theorems.ramp(w, t, -25, 25, anchors, **options)
            else:
                cold = theorems.ramp_heads(w, t, -25, 25, heads, anchors, form="tokens", **options)
            built = {
                "cold": cold,
                "warm": theorems.ramp(w, t, -25, 25, anchors, variant="warm", **options) if heads == 1 else (
                    theorems.ramp_heads(w, t, -25, 25, heads, anchors, variant="warm", **options)),
                "gate": theorems.ramp(w, t, -25, 25, anchors, variant="gate", **options),
            }  # fmt: skip
            for kind, m in built.items():
                with torch.no_grad():
                    errors[kind].append(float(((m(X).double() - m.target(X)) ** 2).mean()))
        means = {kind: float(np.mean(found)) for kind, found in errors.items()}
        assert cold.bound is not None
        assert cold.paper_bound is not None
        rows.append(Published(name, TRAINED[name], **means, bound=cold.bound, paper_bound=cold.paper_bound))
    return rows


@dataclass(frozen=True)
class Rate:
    """One row of the second table: error ~ size^slope over several sizes, with a 95 % interval."""

    name: str
    sizes: list[int]
    errors: list[float]
    bounds: list[float]
    slope: float
    interval: float
    wanted: float | None
    within: float | None

    @property
    def holds(self) -> bool:
        return self.wanted is None or (abs(self.slope - self.wanted) <= float(self.within or 0.0))


def rate(name: str, sizes: Sequence[int], measure: Callable[[int], tuple[float, float]], wanted: float | None = -1.0,
         within: float | None = 0.03) -> Rate:  # fmt: skip
    found = [measure(size) for size in sizes]
    x, y = np.log(np.array(sizes, dtype=float)), np.log(np.array([max(e, 1e-300) for e, _ in found]))
    slope, offset = np.polyfit(x, y, 1)
    rest = y - slope * x - offset
    deviation = math.sqrt(float(rest @ rest) / (len(x) - 2) / float(((x - x.mean()) ** 2).sum()))
    return Rate(name, list(sizes), [e for e, _ in found], [b for _, b in found], float(slope),
                STUDENT[len(x) - 2] * deviation, wanted, within)  # fmt: skip


def scalar_error(m: Any, per_anchor: int = 400, most: int = 400_000) -> tuple[float, float]:
    """The largest error over y from below a to above b, densely; and the bound."""
    a, b = float(m.anchors[0]), float(m.anchors[-1])
    count = min(most, per_anchor * len(m.anchors))
    n = m.keys if m.many else 1
    y = torch.linspace(a - 0.1 * (b - a), b + 0.1 * (b - a), count // n * n, dtype=torch.float64).reshape(-1, n, 1)
    worst = 0.0
    with torch.no_grad():
        for part in y.split(max(1, 2**21 // (n * len(m.anchors)))):
            worst = max(worst, float((m(part.to(m.dtype)).double() - m.target(part.to(m.dtype))).abs().max()))
    return worst, m.bound


def mixing(X: torch.Tensor) -> torch.Tensor:
    """A map of two tokens, each output depending on both; Lipschitz constant sqrt(0.8^2 + 0.6^2) = 1."""
    return torch.sin(0.8 * X + 0.6 * X.flip(-2))


def box_error(m: Any) -> tuple[float, float]:
    """The largest error at random points, and at points next to the middles between grid points, where ties are."""
    X = m.box.sample(8_000, 0)
    if isinstance(m, theorems.Universal):
        step = torch.tensor([float(s) for s in m.grid.steps], dtype=torch.float64).reshape(m.box.shape)
        middle = m.box.lower + (((X - m.box.lower) / step).floor() + 0.5) * step
        X = torch.cat(
            [X, torch.minimum(torch.maximum(middle + 1e-2 * step * (X - middle).sign(), m.box.lower), m.box.upper)]
        )
    with torch.no_grad():
        return float((m(X) - m.target(X)).abs().max()), m.bound


def rates(quick: bool) -> list[Rate]:
    w = torch.ones(1, dtype=torch.float64)
    anchors = [32, 64, 96, 160, 256, 512] if quick else [32, 48, 80, 128, 256, 512, 1024, 2048]
    heads = [2, 3, 5, 8, 12, 16] if quick else [2, 3, 5, 8, 12, 20, 32, 48]
    grid = [10, 13, 17, 22, 28, 36] if quick else [10, 13, 17, 22, 28, 34, 40, 48]
    square = Box.cube(-1, 1, shape=(2, 1))
    return [
        rate("one head, cold, in p", anchors, lambda p: scalar_error(theorems.ramp(w, 0.0, -1, 1, p))),
        rate("one head, warm, in p", anchors, lambda p: scalar_error(theorems.ramp(w, 0.0, -1, 1, p, variant="warm"))),
        rate("gate (no anchors)", anchors,
             lambda p: scalar_error(theorems.ramp(w, 0.0, -1, 1, p, variant="gate")), None, None),
        rate("many heads of 20 keys, cold, in H", heads,
             lambda h: scalar_error(theorems.ramp_heads(w, 0.0, -1, 1, h, 20))),
        rate("many heads of 20 keys, warm, in H", heads,
             lambda h: scalar_error(theorems.ramp_heads(w, 0.0, -1, 1, h, 20, variant="warm"))),
        rate("two layers (E1), in 1/spacing", grid,
             lambda g: box_error(theorems.two_layer(mixing, square, 2 / g, lipschitz=1.0)), -1.0, 0.1),
        rate("attention, then softmax (E2), in 1/spacing", grid,
             lambda g: box_error(theorems.attention_then_softmax(mixing, square, 2 / g, lipschitz=1.0)), -1.0, 0.1),
        rate("one head (E3, E4), in 1/spacing", grid,
             lambda g: box_error(theorems.max_affine(mixing, square, cells=g * g, lipschitz=1.0)), -1.0, 0.1),
    ]  # fmt: skip


def large() -> dict[str, float]:
    """One token-wise head on 10,000 tokens: seconds for a call, and the process's largest memory."""
    torch.set_num_threads(2)
    w = torch.randn(int(LARGE["d"]), generator=torch.Generator().manual_seed(0))
    m = theorems.ramp(w, 0.1, -25, 25, int(LARGE["anchors"]), form="tokens", radius=5.0)
    X = 10 * torch.rand(1, int(LARGE["tokens"]), int(LARGE["d"])) - 5
    start = time.perf_counter()
    with torch.no_grad():
        out = m(X)
    seconds = time.perf_counter() - start
    assert m.bound is not None
    assert float((out.double() - m.target(X)).abs().max()) <= m.bound
    return {"seconds": seconds, "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in header:
        shown.add_column(name)
    for row in rows:
        shown.add_row(*row)
    Console(width=140).print(shown, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and seeds")
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    wanted = parser.parse_args()
    if wanted.large:
        sys.stdout.write(json.dumps(large()))
        return
    torch.set_num_threads(1)  # many small products: threads would only wait for each other
    results: dict[str, Any] = {"published": {}}
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        rows = published(3 if wanted.quick else 11, dtype)
        results["published"][name] = [asdict(row) for row in rows]
        table(
            f"Published ramp setting, {name}: mean squared error over {CHANNELS} channels",
            ("", "trained", "built cold", "built warm", "gate", "sup bound (cold)", "the paper's"),
            [(r.name, f"{r.trained:.4g}", f"{r.cold:.2e}", f"{r.warm:.2e}", f"{r.gate:.2e}", f"{r.bound:.4g}",
              f"{r.paper_bound:.4g}") for r in rows],
        )  # fmt: skip
        assert rows[0].cold < 0.002
        assert min(rows[0].warm, rows[0].gate) < 1e-6
    found = rates(wanted.quick)
    results["rates"] = [asdict(row) for row in found]
    table(
        "Rates: largest error against size",
        ("", "sizes", "error, smallest and largest size", "slope (95 %)", "wanted"),
        [(r.name, f"{r.sizes[0]} to {r.sizes[-1]} ({len(r.sizes)})", f"{r.errors[0]:.2e}, {r.errors[-1]:.2e}",
          f"{r.slope:+.3f} ± {r.interval:.3f}", "" if r.wanted is None else f"{r.wanted:g} ± {r.within:g}")
         for r in found],
    )  # fmt: skip
    assert all(row.holds for row in found)
    assert all(error <= bound for row in found for error, bound in zip(row.errors, row.bounds, strict=True))
    done = subprocess.run([sys.executable, __file__, "--large"], check=True, capture_output=True, text=True)
    cost = json.loads(done.stdout)
    results["large"] = {**LARGE, "measured": cost}
    table(
        "Token-wise form, 10,000 tokens, 1024 anchors, d = 10, two threads", ("", "measured", "allowed"),
        [("seconds", f"{cost['seconds']:.2f}", "10"), ("GB, whole process", f"{cost['gigabytes']:.2f}", "2")],
    )  # fmt: skip
    assert cost["seconds"] < LARGE["seconds"]
    assert cost["gigabytes"] < LARGE["gigabytes"]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
