"""How long compiled networks take on a processor, as ratios to what they stand for, in the same dtype.

    python benchmarks/runtime.py                     everything
    python benchmarks/runtime.py --part formulas     every formula beside the numpy expression, a million points
    python benchmarks/runtime.py --part readme       the README's formula, eager and compiled
    python benchmarks/runtime.py --part compiled     the same under torch.compile, a sample of the formulas
    python benchmarks/runtime.py --part mlp          the MLP 10-64-64-1 with gelu beside the original, by batch
    python benchmarks/runtime.py --part compiling    seconds of `attnforge.compile`, the median over the formulas
    python benchmarks/runtime.py --part modules      the same for two modules, and the bounds it reaches
    python benchmarks/runtime.py --part "encoder ffn"    a trained sentence encoder, converted, beside the original
    python benchmarks/runtime.py --part "encoder pure"   the same, its norms too
    python benchmarks/runtime.py --part plain        plain exports beside their networks
    python benchmarks/runtime.py --part context      1,000 ridge regressions in the prompt beside scikit-learn's

One thread, where no other number is given; runs are interleaved, a ratio is the least processor time over the least.
`--few N` takes every N-th formula. Each part is printed and written to benchmarks/results/runtime.json when it is done;
benchmarks/targets.py puts what was asked beside it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from compile import spread, truth_of  # noqa: E402
from formulas import FORMULAS  # noqa: E402

import attnforge as af  # noqa: E402
from attnforge.compiler.compiled import CompiledNetwork  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "runtime.json"
POINTS = 1_000_000
ROUNDS = 5  # of interleaved runs
ENCODED = 4  # the same where a call takes a second
CACHED = 1 << 17  # numbers whose exponentials stay in the cache
PLAIN = 512  # points of a plain transformer
BATCHES = (1, 64, 1024, 16384)
Row = dict[str, Any]


def clock(works: dict[str, Callable[[], Any]], rounds: int = ROUNDS, least: float = 0.0) -> dict[str, float]:
    """Seconds of processor time for one call of each, the best of several interleaved rounds of at least so long."""
    return {name: time[0] for name, time in clocks(works, rounds, least).items()}


def clocks(works: dict[str, Callable[[], Any]], rounds: int, least: float = 0.0) -> dict[str, tuple[float, float]]:
    """The same, and by the wall."""
    best = dict.fromkeys(works, (float("inf"), float("inf")))
    for _ in range(rounds):
        for name, work in works.items():
            calls, began = 0, (time.process_time(), time.perf_counter())
            while not calls or time.process_time() - began[0] < least:
                work()
                calls += 1
            took = (time.process_time() - began[0]) / calls, (time.perf_counter() - began[1]) / calls
            best[name] = min(best[name][0], took[0]), min(best[name][1], took[1])
    return best


def networks(few: int) -> list[tuple[str, CompiledNetwork, Callable[[np.ndarray], np.ndarray]]]:
    """The formulas that compile to a thousandth of their range in float32."""
    found = []
    for name, (formula, sides) in list(FORMULAS.items())[::few]:
        box = af.Box(sides)
        truth = truth_of(formula, box.names or ())
        try:
            found.append((name, af.compile(formula, box, 1e-3 * spread(truth, box)), truth))
        except af.AttnforgeError:
            continue
    return found


def formulas(few: int) -> list[Row]:
    rows = []
    for name, net, truth in networks(few):
        x = net.box.sample(POINTS, dtype=torch.float32)
        columns = x.numpy()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.no_grad():
            took = clock({"network": lambda n=net, x=x: n(x), "numpy": lambda t=truth, c=columns: t(c)}, 3)
        rise = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        rows.append({"what": name, "slots": slots(net), "network ns": 1e9 * took["network"] / POINTS,
                     "numpy ns": 1e9 * took["numpy"] / POINTS, "ratio": took["network"] / took["numpy"],
                     "megabytes": rise})  # fmt: skip
    return rows


def readme(few: int) -> list[Row]:
    """The formula of the README, eager and compiled."""
    net = af.compile("sin(x*y) + exp(-x**2)/y", af.Box(x=(-1, 1), y=(0.5, 2)), eps=1e-3)
    x = net.box.sample(POINTS, dtype=torch.float32)
    columns, fast = x.numpy().T, torch.compile(net.core, fullgraph=True)
    with torch.no_grad():
        gap = float((fast(x) - net.core(x)).abs().max())
        took = clock({"eager": lambda: net(x), "compiled": lambda: fast(x),
                      "numpy": lambda: np.sin(columns[0] * columns[1]) + np.exp(-(columns[0] ** 2)) / columns[1]}, 3)
    return [{"what": form, "network ns": 1e9 * took[form] / POINTS, "numpy ns": 1e9 * took["numpy"] / POINTS,
             "ratio": took[form] / took["numpy"], "gap/bound": gap / float(net.bound)}
            for form in ("eager", "compiled")]  # fmt: skip


def slots(net: CompiledNetwork) -> int:
    """Softmax entries of a row."""
    return sum(g.heads * (g.slots + (g.scope == "self")) for g in net.network.groups())


def compiled(few: int) -> list[Row]:
    rows = []
    for name, net, truth in networks(8 * few):
        torch.compiler.reset()
        x = net.box.sample(POINTS, dtype=torch.float32)
        columns, fast = x.numpy(), torch.compile(net.core, fullgraph=True)
        with torch.no_grad():
            began = time.perf_counter()
            gap = float((fast(x) - net.core(x)).abs().max())
            seconds = time.perf_counter() - began
            took = clock({"network": lambda f=fast, x=x: f(x), "numpy": lambda t=truth, c=columns: t(c)})
        rows.append({"what": name, "slots": slots(net), "network ns": 1e9 * took["network"] / POINTS,
                     "numpy ns": 1e9 * took["numpy"] / POINTS, "ratio": took["network"] / took["numpy"],
                     "compile s": seconds, "gap/bound": gap / float(net.bound)})  # fmt: skip
    return rows


def perceptron(widths: tuple[int, ...], dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def mlp(few: int) -> list[Row]:
    rows = []
    for dtype, eps in ((torch.float32, 1e-3), (torch.float64, 1e-4)):
        module, box = perceptron((10, 64, 64, 1), dtype), af.Box.cube(-1, 1, shape=10)
        net = af.compile(module, box, eps=eps, dtype=dtype)
        converted = af.convert(module, box.sample(256, dtype=dtype))[0].requires_grad_(False)
        for batch in BATCHES:
            x, entries = box.sample(batch, dtype=dtype), slots(net) * batch
            some = torch.rand(min(entries, CACHED), dtype=dtype)
            with torch.no_grad():
                took = clock({"network": lambda n=net, x=x: n(x), "core": lambda n=net, x=x: n.core(x),
                              "original": lambda m=module, x=x: m(x), "exp": some.exp,
                              "converted": lambda m=converted, x=x: m(x)}, 7, 0.02)  # fmt: skip
            rows.append({"what": str(dtype)[6:], "points": batch, "us": 1e6 * took["network"],
                         "ratio": took["network"] / took["original"],
                         "without the range check": took["core"] / took["original"],
                         "one exponential each": took["converted"] / took["original"],
                         "exponentials alone": took["exp"] * entries / len(some) / took["original"]})  # fmt: skip
    return rows


def compiling(few: int) -> list[Row]:
    times = []
    for formula, sides in list(FORMULAS.values())[::few]:
        box = af.Box(sides)
        eps = 1e-3 * spread(truth_of(formula, box.names or ()), box)
        began = time.process_time()
        try:
            af.compile(formula, box, eps)
        except af.AttnforgeError:
            continue
        times.append(time.process_time() - began)
    return [{"what": f"{len(times)} formulas, median", "seconds": statistics.median(times), "most": max(times)}]


def modules(few: int) -> list[Row]:
    perceptrons = {"MLP 64-256-256-10 with gelu": perceptron((64, 256, 256, 10), torch.float32)}
    rows = [_compiled_in(what, module, af.Box.cube(-1, 1, shape=64)) for what, module in perceptrons.items()]
    torch.manual_seed(0)
    block = nn.Sequential(*(transformer_block(64, 4) for _ in range(4))).eval()
    rows.append(_compiled_in("4 transformer layers, 16 tokens of 64", block, af.Box.cube(-1, 1, shape=(16, 64)), 1e30))
    return rows


def transformer_block(channels: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(channels, heads, 2 * channels, activation="gelu", batch_first=True, dropout=0.0)


def _compiled_in(what: str, module: nn.Module, box: af.Box, eps: float = 1.0) -> Row:
    began = time.process_time()
    try:
        net = af.compile(module, box, eps=eps)
    except af.AttnforgeError as error:
        return {"what": what, "seconds": time.process_time() - began, "bound": None, "refused": str(error)[:120]}
    return {"what": what, "seconds": time.process_time() - began, "bound": net.bound}


def context(few: int) -> list[Row]:
    """1,000 ridge regressions of 50 x 8, ten predictions each: one frozen network for all of them, and a loop."""
    from sklearn.linear_model import Ridge

    from attnforge.incontext import in_context

    generator = np.random.default_rng(0)
    X, w = generator.normal(size=(1000, 50, 8)), generator.normal(size=(1000, 8, 1))
    y, query = (X @ w)[..., 0] + 0.1 * generator.normal(size=(1000, 50)), generator.normal(size=(1000, 10, 8))

    def loop() -> np.ndarray:
        model = Ridge(1.0, fit_intercept=False)
        return np.stack([model.fit(a, b).predict(c) for a, b, c in zip(X, y, query, strict=True)])

    wanted, rows = loop(), []
    for dtype, tol in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        given = [torch.from_numpy(a).to(dtype) for a in (X, y, query)]

        def batch(given: list[torch.Tensor] = given, tol: float = tol) -> torch.Tensor:
            return in_context(given[0], given[1], given[2], method="ridge", alpha=1.0, doublings=3, tol=tol)

        took = clock({"network": batch, "loop": loop}, 3)
        off = float(np.abs(batch().double().numpy() - wanted).max() / np.abs(wanted).max())
        rows.append({"what": str(dtype)[6:], "network s": took["network"], "scikit-learn s": took["loop"],
                     "ratio": took["network"] / took["loop"], "largest difference / largest": off})  # fmt: skip
    return rows


def encoder(level: str) -> list[Row]:
    """The encoder of benchmarks/convert.py, 32 sentences: both times of the clock, since two threads share the work."""
    from convert import Encoder, converted

    given, rows = Encoder(), []
    for dtype in (torch.float32, torch.bfloat16):
        original = given.model(dtype).eval()
        model = converted(given, original, level=level)[0].requires_grad_(False)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            works = {name: lambda m=m: m(**given.middle) for name, m in (("o", original), ("c", model))}
            with torch.no_grad():
                took = clocks(works, ENCODED)
            rows.append({"what": str(dtype)[6:], "threads": threads, "seconds": took["c"][1],
                         "ratio": took["c"][0] / took["o"][0],
                         "by the wall": took["c"][1] / took["o"][1]})  # fmt: skip
        torch.set_num_threads(1)
    return rows


def plain(few: int) -> list[Row]:
    """Plain exports (the cases of benchmarks/export.py, float32) beside the networks they were made from: as they run
    here, of many points the rows of tokens alone, and as stock modules run everywhere, all rows."""
    from export import cases, domain

    rows = []
    for name, (kind, build) in list(cases().items())[:: 2 * few]:
        net = build(torch.float32)
        stock, where = af.export.to_plain(net), domain(net)
        inputs = where.split(where.sample(PLAIN))
        watched = copy.deepcopy(stock)
        for block in watched.blocks:  # whoever looks inside sees every row
            block.register_forward_hook(lambda *_: None)
        forms = {"network": net, "plain": stock, "stock": watched}
        with torch.no_grad():
            took = clock({form: lambda m=m, x=inputs: m.core(*x) for form, m in forms.items()}, 3)
        numbers = [sum(p.numel() for p in m.parameters()) for m in (stock, net)]
        rows.append({"what": name, "kind": kind, "registers": stock.registers, "us": 1e6 * took["network"] / PLAIN,
                     "ratio": took["plain"] / took["network"], "stock": took["stock"] / took["network"],
                     "parameters": numbers[0] / numbers[1]})  # fmt: skip
    return rows


PARTS: dict[str, Callable[[int], list[Row]]] = {
    "formulas": formulas, "readme": readme, "compiled": compiled, "mlp": mlp, "compiling": compiling,
    "modules": modules, "context": context, "encoder ffn": lambda few: encoder("ffn"),
    "encoder pure": lambda few: encoder("pure"), "plain": plain,
}  # fmt: skip


def show(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    console.print(table)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        console.print(f"{title}: median ratio {statistics.median(ratios):.1f}, of {len(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append", default=None)
    parser.add_argument("--few", type=int, default=1, help="every so many formulas; nothing is written unless 1")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=140)
    kept: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for part in asked.part or list(PARTS):
        rows = PARTS[part](asked.few)
        show(console, part, rows)
        kept = {**kept, "torch": torch.__version__, part: rows}
        if asked.few == 1:
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
