"""One exponential per element (lemma A8) beside a softmax over all anchors, and beside the activation it stands for.

Four tables: a feed-forward layer 384 -> 1536 -> 384 with GELU as it is, read fast, and by softmax written out (time and
memory); a table of p anchors read fast and by softmax (time, error, float32); growth with elements; every ready-made
activation with its anchors, certified bound and error found. All ratios come from interleaved runs, best of several.
Writes benchmarks/results/fast.json. With `--gpu` it measures on a GPU instead: that layer, the one of a large model
(4096 -> 16384 -> 4096, bfloat16, 8192 tokens) and how exact kernels are, and adds them to the same file.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from attnforge.functions.registry import get
from attnforge.heads.choose import FAST, fast_form
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.fast.read import anchor_read
from attnforge.network import Heads

LO, HI = -34.0, 50.0
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


def clock(works: dict[str, Callable[[], Any]], rounds: int = 7, calls: int = 1) -> dict[str, float]:
    """Seconds for one call of each, the best of several interleaved rounds of `calls`."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            for _ in range(calls):
                work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], (time.perf_counter() - began) / calls)
    return best


class Core(nn.Module):
    """A head without the check of its input's range: what a converted model calls."""

    def __init__(self, head: FastActivation):
        super().__init__()
        self.head = head

    def forward(self, y: Tensor) -> Tensor:
        return self.head.core(y)


def rise(variant: str, tokens: int = 128) -> float:
    """Megabytes that one pass of the feed-forward layer takes at its peak, in a fresh process (Linux only)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_rise, (variant, tokens))


def _rise(variant: str, tokens: int) -> float:
    torch.set_num_threads(THREADS)
    head = FastActivation.fit("gelu", LO, HI)
    middle = {"GELU": nn.GELU(), "fast": Core(head), "softmax written out": head.plain()}[variant]
    layer = nn.Sequential(nn.Linear(384, 1536), middle, nn.Linear(1536, 384))
    with torch.no_grad():
        layer(torch.randn(2, 4, 384))
        x = torch.randn(32, tokens, 384)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        layer(x)
        return (_status("VmHWM") - before) / 1024


def _status(what: str) -> int:
    """A number of kilobytes from the kernel's view of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def layers(tokens: int, device: str, dtype: torch.dtype, width: int = 384, hidden: int = 1536) -> list[dict[str, Any]]:
    """The feed-forward layer: time of each variant over that of the original."""
    torch.manual_seed(0)
    torch.compiler.reset()  # every layer is compiled for itself, far from the limit of recompilations
    plain = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).to(device, dtype)
    head = FastActivation.fit("gelu", LO, HI, dtype=dtype).to(device)
    layer = nn.Sequential(plain[0], Core(head), plain[2])
    variants: dict[str, nn.Module] = {"GELU": plain, "fast": layer}
    if device == "cpu":
        variants["fast, range checked"] = nn.Sequential(plain[0], head, plain[2])
        variants["softmax written out"] = nn.Sequential(plain[0], head.plain(), plain[2])
    else:
        frozen = copy.deepcopy(head).requires_grad_(False)
        variants["GELU, compiled"] = torch.compile(plain)
        variants["fast, compiled"] = torch.compile(layer)
        variants["fast, frozen, compiled"] = torch.compile(nn.Sequential(plain[0], Core(frozen), plain[2]))
    x = 2 * torch.randn(32, tokens // 32, width, device=device, dtype=dtype)
    with torch.no_grad():
        for module in variants.values():
            module(x)
        works = {name: (lambda m=module: m(x)) for name, module in variants.items()}
        times = clock(works, 5, 1 if device == "cpu" else 50)
        wanted = plain(x)
        changed = {name: float((module(x) - wanted).abs().max()) for name, module in variants.items()}
    return [
        {
            "device": device, "dtype": str(dtype)[6:], "layer": f"{width} x {hidden}", "tokens": tokens,
            "variant": name, "seconds": times[name], "ratio": times[name] / times["GELU"],
            "largest change": changed[name],
        }
        for name in variants
    ]  # fmt: skip


def kernels() -> list[dict[str, Any]]:
    """Compiled and eager on a GPU: the largest error found at 2^24 points, beside the certified bound."""
    rows = []
    for name in ("gelu", "softplus", "tanh"):
        for dtype in (torch.float32, torch.bfloat16):
            torch.compiler.reset()
            head = FastActivation.fit(name, LO, HI, dtype=dtype).to("cuda")
            y = torch.linspace(LO, HI, 1 << 24, dtype=torch.float64, device="cuda").to(dtype).clamp(LO, HI)
            wanted = head.function.value(y.double())
            with torch.no_grad():
                for how, module in (("eager", Core(head)), ("compiled", torch.compile(Core(head)))):
                    found = float((module(y).double() - wanted).abs().max())
                    row = {"kernel": how, "name": name, "dtype": str(dtype)[6:], "bound": head.bound, "found": found}
                    rows.append(row)
    return rows


def written_out(value: Tensor, rate: float, kappa: float) -> Heads:
    """The same head in the runtime: a softmax over all anchors, in pieces that stay in the cache."""
    k = torch.arange(len(value)) - (len(value) - 1) / 2
    query, shift, out = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0.0, 1.0]]), torch.ones(1, 1, 1)
    keys = torch.stack([rate * k, -kappa * k * k], -1)[None]
    return Heads("memory", W_Q=query, b_Q=shift, M_K=keys, M_V=value[None, :, None], W_O=out)


def tables() -> list[dict[str, Any]]:
    """p anchors on [-25, 25] holding the identity: time and error of both ways in float32."""
    rows = []
    torch.manual_seed(0)
    y = 50 * torch.rand(100_000) - 25
    for p in (16, 32, 64, 128, 256, 1024, 4096, 16384):
        for kappa in (0.25, 2.0, 20.0):
            rate, value = 2 * kappa * (p - 1) / 50.0, torch.linspace(-25, 25, p)
            few = y[: max(400, min(len(y), 5_000_000 // p))]
            exact = anchor_read(few.double(), value.double(), rate, kappa)
            group = written_out(value, rate, kappa)
            works = {
                "fast": lambda r=rate, v=value, k=kappa, z=few: anchor_read(z, v, r, k),
                "softmax": lambda g=group, z=few: g(z[:, None])[:, 0],
            }
            with torch.no_grad():
                times = clock(works, 3)
            errors = {name: float((work().detach().double() - exact).abs().max()) for name, work in works.items()}
            rows.append(
                {
                    "anchors": p, "kappa": kappa, "fast ns": 1e9 * times["fast"] / len(few),
                    "softmax ns": 1e9 * times["softmax"] / len(few), "fast error": errors["fast"],
                    "softmax error": errors["softmax"],
                }
            )  # fmt: skip
    return rows


def growth() -> list[dict[str, Any]]:
    """Time and memory of the fast GELU with the number of elements."""
    head, rows = FastActivation.fit("gelu", LO, HI), []
    for count in (10_000, 100_000, 1_000_000, 10_000_000):
        y = 3 * torch.randn(count)
        with torch.no_grad():
            took = clock({"fast": lambda y=y: head.core(y), "gelu": lambda y=y: nn.functional.gelu(y)}, 3)
        rows.append({"elements": count, "fast ns": 1e9 * took["fast"] / count, "gelu ns": 1e9 * took["gelu"] / count})
    return rows


def activations() -> list[dict[str, Any]]:
    """Every ready-made activation: size, certified bound, error found."""
    rows = []
    exact = [name for name in FAST if not fast_form(get(name)).bump]
    for name in (*(name for name in FAST if name not in exact), *exact):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            head = FastActivation.fit(name, LO, HI, dtype=dtype)
            y = torch.linspace(LO, HI, 1_000_001, dtype=torch.float64).to(dtype)
            with torch.no_grad():
                found = float((head.core(y).double() - head.function.value(y.double())).abs().max())
            row = {"name": name, "dtype": str(dtype)[6:], "anchors": head.size, "bound": head.bound}
            # what is exact but for rounding has no reference in float64: the library's own function rounds as much
            rows.append({**row, "found": None if dtype == torch.float64 and name in exact else found})
    return rows


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """A list of rows as an aligned table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        cells = (
            "–" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()
        )
        table.add_row(*cells)
    console.print(table)


def on_gpu(console: Console) -> dict[str, Any]:
    """What a GPU adds to the report."""
    if not torch.cuda.is_available():
        raise SystemExit("--gpu measures on a GPU, and there is none")
    found = [row for dtype in (torch.float32, torch.bfloat16) for row in layers(4096, "cuda", dtype)]
    found += layers(8192, "cuda", torch.bfloat16, 4096, 16384)
    show(console, "a feed-forward layer with GELU", found)
    exact = kernels()
    show(console, "kernels at 2^24 points", exact)
    where = {"gpu": torch.cuda.get_device_name(), "torch on gpu": torch.__version__}
    return {**where, "gpu layers": found, "kernels": exact}


def on_processor(console: Console) -> dict[str, Any]:
    """Everything else."""
    report: dict[str, Any] = {"threads": THREADS, "interval": [LO, HI]}
    report["layers"] = [row for tokens in (2048, 4096) for row in layers(tokens, "cpu", torch.float32)]
    show(console, "384 -> 1536 -> 384 with GELU", report["layers"])
    variants = ("GELU", "fast", "softmax written out")
    report["memory"] = [{"variant": name, "megabytes": rise(name)} for name in variants]
    show(console, "rise of the peak memory, 4096 tokens", report["memory"])
    report["tables"] = tables()
    show(console, "p anchors on [-25, 25], float32, time per element", report["tables"])
    report["growth"] = growth()
    show(console, "growth with elements", report["growth"])
    report["activations"] = activations()
    show(console, f"activations on [{LO:g}, {HI:g}]", report["activations"])
    return report


def main() -> None:
    torch.set_num_threads(THREADS)
    console = Console(width=120)
    out = Path(__file__).parent / "results" / "fast.json"
    before = json.loads(out.read_text()) if out.exists() else {}
    report = {**before, **(on_gpu(console) if "--gpu" in sys.argv[1:] else on_processor(console))}
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=1))
    rows = [*report.get("activations", []), *report.get("kernels", [])]
    outside = [r for r in rows if r["found"] is not None and r["found"] > r["bound"]]
    if outside:
        raise SystemExit(f"{len(outside)} results are outside their certificates")


if __name__ == "__main__":
    main()
