"""A machine's arithmetic against what certificates assume of it: `attnforge check --machine` with more arguments.

python benchmarks/machine.py             measures every device here, prints a table, adds to results/machine.json
python benchmarks/machine.py --quick     the same with few arguments; nothing is written
python benchmarks/machine.py --kernels   the exponential of the kernels for processors, on all float32 numbers (R9)
python benchmarks/machine.py --markdown  prints the table of all machines so far

float32: about ten million arguments of the exponential over all exponents, the worst judged in balls; float64: a
hundred thousand, each judged. Where python-flint is missing, long doubles judge instead (x86 only), and it is said.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
try:
    import flint  # noqa: F401

    BALLS = True
except ImportError:  # the sweep itself needs none of it
    BALLS = False
    sys.modules["flint"] = types.ModuleType("flint")
    sys.modules["flint"].__dict__.update(arb=None, ctx=None)

from attnforge import native  # noqa: E402
from attnforge.certificates.machine import ball_exp, devices, survey  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "machine.json"
EFFORT = 160_000
PART = 1 << 22  # float32 numbers at a time
KERNELS = Path(__file__).parent / "results" / "kernels.json"


def long_exp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """exp(x) as pairs of float64 numbers, by long doubles: right to 0.001 u of float64 where these have 64 bits."""
    if np.finfo(np.longdouble).eps > 1e-18:
        raise SystemExit("neither python-flint nor extended long doubles here: nothing could judge the exponential")
    wide = np.exp(x.astype(np.longdouble))
    high = wide.astype(np.float64)
    return high, (wide - high).astype(np.float64)


def names() -> dict[str, str]:
    """What this machine is."""
    found = {"system": platform.system(), "torch": torch.__version__, "judged by": "balls" if BALLS else "long doubles"}
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = (models or [platform.processor() or platform.machine()])[0]
    found["cpu"] = f"{processor}, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_device_name()
    return found


def measured(effort: int) -> list[dict[str, Any]]:
    return [
        found.to_json()
        for device in devices()
        for dtype in (torch.float32, torch.float64)
        for found in survey(device, dtype, effort, ball_exp if BALLS else long_exp)
    ]


def kernels() -> dict[str, Any]:
    """The kernels' exponential on every float32 number that it is meant for; float64's judges, right to 1e-8 u."""
    found = native.library()
    if found is None:
        raise SystemExit(f"there are no kernels here: {native.trouble()}")
    worst, count = 0.0, 0
    for sign, end in ((-(2**31), native.LOWEST), (0, native.HIGHEST)):
        last = int(torch.tensor(end, dtype=torch.float32).view(torch.int32))
        for start in range(sign, last, PART):
            bits = torch.arange(start, min(start + PART, last), dtype=torch.int32)
            worst, count = max(worst, native.exponential_error(found, bits.view(torch.float32))), count + len(bits)
    return {"compiler": found.path.name, "numbers": count, "largest error in u": worst, "allowed": native.ALLOWED}


def shown(machine: dict[str, Any]) -> Table:
    table = Table("device", "dtype", "what", "measured", "at most", "holds", "looked at", title=str(machine["names"]))
    for row in machine["findings"]:
        cells = [f"{row['measured']:.4g}", f"{row['allowed']:g} {row['unit']}", "yes" if row["holds"] else "NO"]
        table.add_row(row["device"], row["dtype"], row["name"], *cells, row["covered"])
    return table


def markdown(machines: list[dict[str, Any]]) -> str:
    head = ["machine", "dtype", "exp", "exponential of softmax", "weights of softmax", "inner products", "all hold"]
    lines = [head, ["---"] * len(head)]
    for machine in machines:
        for device in sorted({row["device"] for row in machine["findings"]}):
            for dtype in ("float32", "float64"):
                rows = {r["name"]: r for r in machine["findings"] if (r["device"], r["dtype"]) == (device, dtype)}
                some = [rows[name] for name in head[2:6]]
                cells = [f"{row['measured']:.3g} of {row['allowed']:g} {row['unit']}" for row in some]
                kept = "yes" if all(r["holds"] for r in rows.values()) else "no"
                lines.append([machine["names"][device], dtype, *cells, kept])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few arguments; nothing is written")
    parser.add_argument("--markdown", action="store_true", help="print the table of all machines so far")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file that is added to")
    parser.add_argument("--kernels", action="store_true", help="the kernels' exponential alone, on all numbers")
    wanted = parser.parse_args()
    if wanted.kernels:
        found = {"names": names(), **kernels()}
        KERNELS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8", newline="\n")
        sys.stdout.write(f"{found}\n")
        if not found["largest error in u"] <= found["allowed"]:
            raise SystemExit("not kept here")
        return
    machines = json.loads(wanted.out.read_text("utf-8")) if wanted.out.exists() else []
    if wanted.markdown:
        sys.stdout.write(markdown(machines) + "\n")
        return
    machine = {"names": names(), "findings": measured(2000 if wanted.quick else EFFORT)}
    Console(width=None if sys.stdout.isatty() else 220).print(shown(machine))
    if not wanted.quick:
        machines = [m for m in machines if m["names"] != machine["names"]] + [machine]
        wanted.out.parent.mkdir(exist_ok=True)
        wanted.out.write_text(json.dumps(machines, indent=1) + "\n", encoding="utf-8", newline="\n")
    failed = [f"{r['name']} in {r['dtype']} on {r['device']}" for r in machine["findings"] if not r["holds"]]
    if failed:
        raise SystemExit(f"not kept here: {', '.join(failed)}")


if __name__ == "__main__":
    main()
