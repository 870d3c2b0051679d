"""Black boxes in numbers: rates of the grid and spectral routes, and the published ReLU target both ways.

python benchmarks/blackbox.py            measures, prints three tables, writes benchmarks/results/blackbox.json
python benchmarks/blackbox.py --quick    the same with one seed of the published target

Errors are measured on points that no fit has seen. The published target is a random two-layer ReLU network on sequences
of 20 tokens with 5 channels, 10 hidden units, standard normal weights, inputs uniform in [0, 1]: read as one vector of
100 numbers with one output, and token by token with 5 outputs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from attnforge import Box  # noqa: E402
from attnforge.blackbox import approximate  # noqa: E402
from attnforge.blackbox.ridge import RidgeApproximation  # noqa: E402
from attnforge.compiler.pipeline import compile_program  # noqa: E402
from attnforge.programs.program import Builder  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blackbox.json"
SQUARE, PUBLISHED = Box.cube(-1, 1, shape=2), Box.cube(0, 1, shape=(20, 5))
GRIDS = (5, 7, 9, 13, 17, 25, 33, 49)
ANCHORS = (6, 8, 12, 16, 24, 32)
ANALYTIC: dict[str, Callable[[Tensor], Tensor]] = {
    "sin(3x) exp(y)": lambda p: torch.sin(3 * p[:, 0]) * torch.exp(p[:, 1]),
    "1/(2 + (x+y)/2)": lambda p: 1 / (2 + p.sum(-1) / 2),
    "exp(-4(x^2+y^2))": lambda p: torch.exp(-4 * p.square().sum(-1)),
}


def cones(seed: int) -> Callable[[Tensor], Tensor]:
    """A function with Lipschitz constant 3 exactly, and kinks all over."""
    g = torch.Generator().manual_seed(seed)
    tips = torch.rand(7, 2, generator=g, dtype=torch.float64) * 2 - 1
    height = torch.randn(7, generator=g, dtype=torch.float64)
    return lambda p: (3 * (p.double()[:, None] - tips).norm(dim=-1) + height).amin(-1)


def slope(sizes: list[float], errors: list[float]) -> tuple[float, float]:
    """The exponent of errors against sizes, and the half width of its 95 % interval (normal errors)."""
    x, y = np.log(sizes), np.log(errors)
    found, cov = np.polyfit(x, y, 1, cov=True)
    return float(found[0]), float(2.5 * np.sqrt(cov[0, 0]))


def grids() -> list[dict[str, Any]]:
    """Error (mean over functions of the largest) and bound of certified grids against their spacing."""
    rows = []
    x = SQUARE.sample(10_000, seed=7)
    for count in GRIDS:
        errors = []
        for f in map(cones, range(8)):
            net = approximate(f, SQUARE, route="grid", anchors=count, lipschitz=3.0000001, dtype=torch.float64)
            with torch.no_grad():
                errors.append(float((net(x) - f(x)).abs().max()))
            assert errors[-1] <= (net.bound or 0.0)
        mean = float(np.exp(np.mean(np.log(errors))))
        rows.append({"points": count**2, "spacing": 2 / (count - 1), "error": mean, "bound": net.bound})
    return rows


def spectral() -> list[dict[str, Any]]:
    """Measured errors of warm heads against anchors per axis."""
    rows = []
    for name, f in ANALYTIC.items():
        nets = [approximate(f, SQUARE, route="spectral", anchors=n, dtype=torch.float64) for n in ANCHORS]
        rows.append({"function": name, "errors": {n: net.measured for n, net in zip(ANCHORS, nets, strict=True)}})
    return rows


def published(seed: int, tokenwise: bool) -> dict[str, Any]:
    """The published target from its weights and from 50,000 samples alone."""
    g = torch.Generator().manual_seed(seed)
    inputs, outputs = (5, 5) if tokenwise else (100, 1)
    sizes = ((inputs, 10), (10,), (10, outputs))
    first, bias, second = (torch.randn(*size, generator=g, dtype=torch.float64) for size in sizes)

    def f(x: Tensor) -> Tensor:
        rows = x if tokenwise else x.reshape(len(x), -1)
        out = torch.relu(rows @ first + bias) @ second
        return out if tokenwise else out[:, 0]

    build = Builder(PUBLISHED, 20 if tokenwise else 1)
    hidden = build.apply(build.linear([(build.input, first.numpy())], bias.numpy()), "relu")
    out = build.linear([(hidden, second.numpy())], np.zeros(outputs))
    built = compile_program(build.program(out, "a random ReLU network"), 1e-5, torch.float64)
    began = time.perf_counter()
    net = approximate(f, PUBLISHED, route="ridge", width=32, samples=50_000, seed=seed)
    seconds = time.perf_counter() - began
    assert isinstance(net, RidgeApproximation)
    x = PUBLISHED.sample(10_000, seed=999, dtype=torch.float32)
    with torch.no_grad():
        wanted = f(x.double())
        relative = float((net(x).double() - wanted).norm() / wanted.norm())
    return {
        "seed": seed,
        "form": "token by token" if tokenwise else "one vector",
        "from weights, certified": built.bound,
        "from samples, relative test error": relative,
        "network against expansion, certified": net.expansion.bound,
        "parameters": net.size.parameters,
        "seconds": round(seconds, 1),
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(str(name))
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    grid, warm = grids(), spectral()
    rate = slope([row["spacing"] for row in grid], [row["error"] for row in grid])
    show(f"grid: error against spacing, slope {rate[0]:.3f} +- {rate[1]:.3f} (3-Lipschitz, float64)", grid)
    flat = [{"function": r["function"], **{f"p = {n}": e for n, e in r["errors"].items()}} for r in warm]
    show("spectral: largest error against anchors per axis (float64)", flat)
    runs = [published(seed, form) for form in (False, True) for seed in range(1 if quick else 3)]
    show("published target: 20 x 5 inputs, 10 hidden ReLUs", runs)
    RESULTS.parent.mkdir(exist_ok=True)
    data = {"machine": platform.machine(), "grid": grid, "slope": rate, "spectral": warm, "published": runs}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
