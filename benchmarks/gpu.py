"""On a CUDA device: are heads and networks within their certificates there, and how fast are they beside the CPU?

The certificate's rounding model does not name a device. This runs the same weights on the GPU and compares with the
target in float64; prints a table, writes benchmarks/results/gpu.json. Without a GPU it says so and does nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import attnforge as af
from attnforge.programs.interpret import values

HEADS = [
    ("gelu", -8.0, 8.0, False),
    ("sin", -6.3, 6.3, False),
    ("exp", -4.0, 2.0, False),
    ("reciprocal", 0.3, 200.0, True),
]
FORMULA = ("sin(x*y) + exp(-x**2)/y", {"x": (-1.0, 1.0), "y": (0.5, 2.0)})


def clock(work: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds for one call, the best of five."""
    best = float("inf")
    for _ in range(5):
        if x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    console = Console(width=120)
    if not torch.cuda.is_available():
        console.print("no CUDA device here: nothing measured")
        return
    rows = []
    table = Table("what", "dtype", "certified", "measured on CUDA", "within", "CPU time / CUDA time")
    for dtype in (torch.float32, torch.float64):
        cases = []
        for name, lo, hi, relative in HEADS:
            head = af.AnchorHead.fit(name, lo, hi, anchors=32, dtype=dtype, relative=relative)
            y = head.box.sample(1_000_000, dtype=dtype).squeeze(-1)
            cases.append((name, head, y, head.function.value(y.double()), relative))
        net = af.compile(FORMULA[0], af.Box(FORMULA[1]), eps=1e-3, dtype=dtype)
        x = net.box.sample(1_000_000, dtype=dtype)
        cases.append((FORMULA[0], net, x, values(net.program, x.double()), False))
        for name, module, inputs, wanted, relative in cases:
            bound = module.bound
            with torch.no_grad():
                slow = clock(module, inputs)
                module.cuda()
                on_device = inputs.cuda()
                error = (module(on_device).double().cpu() - wanted).abs()
                measured = float((error / wanted.abs() if relative else error).max())
                fast = clock(module, on_device)
            rows.append(
                {"what": name, "dtype": str(dtype), "certified": bound, "measured": measured, "speedup": slow / fast}
            )
            within = "yes" if measured <= bound else "NO"
            table.add_row(name, str(dtype)[6:], f"{bound:.2e}", f"{measured:.2e}", within, f"{slow / fast:.0f}")
    console.print(table)
    out = Path(__file__).parent / "results" / "gpu.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    violations = [row for row in rows if row["measured"] > row["certified"]]
    if violations:
        raise SystemExit(f"{len(violations)} results are outside their certificates")


if __name__ == "__main__":
    main()
