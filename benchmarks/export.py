"""Exports in numbers: how far plain, lens, ONNX and Hugging Face forms are from the network, and what stock form costs.

python benchmarks/export.py                    measures, prints two tables, writes benchmarks/results/export.json
python benchmarks/export.py --quick            fewer points, fewer cases, nothing written
python benchmarks/export.py --points 20000     so many points instead of 100,000 (each form has 60 s, see --seconds)
python benchmarks/export.py --only gauss       one case, by its name; what was written before is kept
python benchmarks/export.py --resume           goes on where a run was broken off
python benchmarks/export.py --markdown         prints the last run as docs/export.md shows it; --fill puts it there

Twenty formulas, three networks, a transformer block and every theorem with a token-wise form, in float32 and in
float64. Differences are the largest over all points and outputs; "rounding" is how far the network in float32 is from
the same weights computed in float64, which no exported form can be expected to beat.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

from formulas import FORMULAS  # noqa: E402
from readme import filled  # noqa: E402

import attnforge as af  # noqa: E402
from attnforge import export, theorems  # noqa: E402
from attnforge.certificates.certificate import upper_text  # noqa: E402
from attnforge.certificates.certified import CertifiedModule  # noqa: E402
from attnforge.export.verification import domain  # noqa: E402
from attnforge.programs.interpret import values  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "export.json"
POINTS, QUICK = 100_000, 2_000
SECONDS = 60.0  # for each form of each case: large stock transformers get through fewer points
FLOAT32, FLOAT64 = torch.float32, torch.float64
CLOSE = {"float32": 1e-5, "float64": 1e-10}
FORMS = ("plain", "lens", "onnx", "onnx of plain", "hf")
NAMES = (
    "gauss", "gauss width", "friction", "coulomb", "spring", "wave number", "lens", "point source", "pendulum", "shear",
    "bound state", "entropy", "terms kept", "ideal gas", "michaelis", "norm", "clipped", "corner", "sinc", "damped",
)  # fmt: skip
Build = Callable[[torch.dtype], CertifiedModule]


def formula(name: str) -> Build:
    text, box = FORMULAS[name]
    return lambda dtype: af.compile(text, af.Box(box), eps(name, dtype), dtype=dtype)


def eps(name: str, dtype: torch.dtype) -> float:
    """Kinks, and roots that touch 0, converge slowly."""
    slow = name in ("norm", "clipped", "corner", "sinc")
    return 1e-3 if dtype == FLOAT32 else 1e-6 if slow else 1e-10


def mlp(*layers: nn.Module, inputs: int, tolerance: tuple[float, float] = (1e-3, 1e-9)) -> Build:
    def build(dtype: torch.dtype) -> CertifiedModule:
        net = nn.Sequential(*layers).to(dtype)
        box = af.Box.cube(-1, 1, shape=(inputs,))
        return af.compile(net, box, tolerance[dtype == FLOAT64], dtype=dtype)

    return build


class Block(nn.Module):
    """A transformer block as it is taught: norm, attention, norm, feed-forward."""

    def __init__(self, d: int = 8, hidden: int = 16):
        super().__init__()
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def block(dtype: torch.dtype) -> CertifiedModule:
    lower = torch.linspace(-1, 1, 8, dtype=FLOAT64).expand(3, 8)  # rows that a norm does not divide by nothing
    box = af.Box.between(lower - 0.02, lower + 0.02)
    return af.compile(Block().to(dtype).eval(), box, 5e-2 if dtype == FLOAT32 else 1e-6, dtype=dtype)


def theorem_cases() -> dict[str, Build]:
    w = [1.0, -0.5]
    swap = lambda X: X.flip(-2).sin()  # noqa: E731
    small = af.Box.cube(-1, 1, shape=(2, 1))

    def typed(dtype: torch.dtype) -> Tensor:
        return torch.tensor(w, dtype=dtype)

    return {
        "ramp": lambda t: theorems.ramp(typed(t), 0.1, -1, 1, anchors=32, form="tokens"),
        "ramp, causal": lambda t: theorems.ramp(typed(t), 0.1, -1, 1, anchors=32, form="tokens", causal=True),
        "ramp, warm": lambda t: theorems.ramp(typed(t), 0.1, -1, 1, anchors=32, variant="warm"),
        "ramp, gate": lambda t: theorems.ramp(typed(t), 0.1, -1, 1, variant="gate"),
        "relu": lambda t: theorems.relu(typed(t), 0.0, radius=1.0, form="tokens"),
        "leaky relu": lambda t: theorems.leaky_relu(typed(t), 0.0, radius=1.0, form="tokens"),
        "hard tanh": lambda t: theorems.hard_tanh(typed(t), 0.2, form="tokens"),
        "clipped relu": lambda t: theorems.clipped_relu(typed(t), 0.2, cap=0.7, form="tokens"),
        "ramp by 4 heads": lambda t: theorems.ramp_heads(typed(t), 0.1, -1, 1, heads=4, tokens=10, form="tokens"),
        "max-affine": lambda t: theorems.max_affine(
            lambda x: x.norm(dim=-1, keepdim=True), af.Box.cube(-1, 1, shape=2), cells=100, lipschitz=1.0, dtype=t
        ),
        "max-affine, sequence": lambda t: theorems.max_affine(
            swap, small, cells=49, lipschitz=1.0, form="tokens", dtype=t
        ),
        "two layers": lambda t: theorems.two_layer(swap, small, spacing=0.5, lipschitz=1.0, form="tokens", dtype=t),
        "attention, softmax": lambda t: theorems.attention_then_softmax(
            swap, small, spacing=0.5, lipschitz=1.0, form="tokens", dtype=t
        ),
    }


def cases() -> dict[str, tuple[str, Build]]:
    torch.manual_seed(0)
    found: dict[str, tuple[str, Build]] = {name: ("formula", formula(name)) for name in NAMES}
    linear = nn.Linear
    found["MLP 4-8-2, gelu"] = ("MLP", mlp(linear(4, 8), nn.GELU(), linear(8, 2), inputs=4))
    found["MLP 3-16-1, tanh"] = ("MLP", mlp(linear(3, 16), nn.Tanh(), linear(16, 1), inputs=3))
    relus = mlp(linear(2, 6), nn.ReLU(), linear(6, 6), nn.ReLU(), linear(6, 1), inputs=2, tolerance=(1e-3, 1e-6))
    found["MLP 2-6-6-1, relu"] = ("MLP", relus)
    found["transformer block"] = ("block", block)
    found.update({name: ("theorem", build) for name, build in theorem_cases().items()})
    return found


@torch.no_grad()
def measured(
    name: str, kind: str, build: Build, dtype: torch.dtype, points: int, seconds_each: float = SECONDS
) -> dict[str, Any]:
    """One case: the differences of every form, the error of plain beside its bound, sizes and times."""
    net = build(dtype)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = timed(seconds, "plain", lambda: export.to_plain(net))
        lens = timed(seconds, "lens", lambda: export.to_lens(plain, verify=False))
        own = timed(seconds, "onnx", lambda: export.to_onnx(net, folder / "net.onnx", verify=False))
        stock = timed(seconds, "onnx of plain", lambda: export.to_onnx(plain, folder / "plain.onnx", verify=False))
        hf = timed(seconds, "hf", lambda: export.to_hf(plain, folder / "hf", verify=False))
        sessions = {"onnx": export.session(own, threads=1), "onnx of plain": export.session(stock, threads=1)}
        runs: dict[str, Callable[..., Tensor]] = {
            "plain": plain.core,
            "lens": lens,
            "hf": export.load_hf(hf).run,
            **{form: (lambda *x, s=s: export.run_onnx(s, *x)) for form, s in sessions.items()},
        }
        worst, seen, cost, looked = compared(net, plain, runs, points, seconds_each)
    bound, error = plain.certificate.bound, seen["plain error"]
    assert bound is None or error <= bound, f"{name}: plain errs by {error}, its certificate says {bound}"
    return {
        "name": name, "kind": kind, "dtype": str(dtype).removeprefix("torch."), "points": looked, **seen,
        "difference": worst, "relative": {form: gap / max(1.0, seen["scale"]) for form, gap in worst.items()},
        "plain bound": bound, "bound": net.certificate.bound, "seconds": seconds,
        "memory tier": {"parameters": sum(p.numel() for p in net.parameters()), "microseconds": cost["net"]},
        "plain tier": {"microseconds": cost["plain"], **vars(plain.size)},
    }  # fmt: skip


def timed(seconds: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    found = action()
    seconds[name] = time.perf_counter() - start
    return found


def compared(
    net: CertifiedModule, plain: Any, runs: dict[str, Callable[..., Tensor]], points: int, seconds_each: float
) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, int]]:
    """The largest differences, what else was seen (error of plain, rounding, largest output), time per point, and the
    number of points of each form: all of them, or as many as its seconds allow."""
    where = domain(net)
    rows = sum(math.prod(shape[:-1]) for shape in where.shapes) if len(where.shapes) == 1 else 1
    count = max(1, points // max(1, rows))  # a point of a token-wise theorem is a token
    batch = max(1, min(2048, (1 << 23) // (plain.size.heads * (plain.registers + plain.tokens) ** 2)))
    wide = copy.deepcopy(net).double()  # the same weights, computed in float64: what rounding alone changes
    worst, error, scale, own = dict.fromkeys(runs, 0.0), 0.0, 0.0, 0.0
    cost = {"net": math.inf, "plain": math.inf}
    spent, looked = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0)
    for part in torch.cat([where.corners(64), where.sample(count)]).split(batch):
        inputs = where.split(part)
        start = time.perf_counter()
        ours = net.core(*inputs)
        cost["net"] = min(cost["net"], (time.perf_counter() - start) / len(part) * 1e6)
        scale = max(scale, float(ours.abs().max()))
        if net.dtype == FLOAT32:
            exact = wide.core(*(x.double() for x in inputs))
            own = max(own, float((ours - exact).abs().max()))
        for name, run in runs.items():
            if spent[name] > seconds_each:
                continue
            start = time.perf_counter()
            theirs = run(*inputs)
            spent[name] += time.perf_counter() - start
            looked[name] += rows * len(part)
            if name == "plain":
                cost["plain"] = min(cost["plain"], (time.perf_counter() - start) / len(part) * 1e6)
                error = max(error, float((theirs.double() - target(net, part, inputs)).abs().max()))
            assert theirs.shape == ours.shape
            worst[name] = max(worst[name], float((theirs - ours).abs().max()))
    return worst, {"plain error": error, "own rounding": own, "scale": scale}, cost, looked


def target(net: Any, points: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """What the network approximates, in float64."""
    if isinstance(net, theorems.Construction):
        return net.target(inputs[0])
    return values(net.program, points.double().reshape(-1, *net.program.box.shape))


def large() -> dict[str, Any]:
    """Export of a network with 150 heads, with and without its verification in a fresh process."""
    torch.manual_seed(0)
    net = mlp(nn.Linear(6, 140), nn.GELU(), nn.Linear(140, 10), nn.Tanh(), nn.Linear(10, 3), inputs=6)(FLOAT32)
    found: dict[str, Any] = {"heads": net.size.heads, "parameters": net.size.parameters}
    bare: dict[str, float] = {}
    checked: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        plain = timed(bare, "plain", lambda: export.to_plain(net))
        for seconds, verify in ((bare, False), (checked, True)):
            file = Path(place) / f"{verify}.onnx"
            timed(seconds, "lens", lambda: export.to_lens(plain, verify=verify))  # noqa: B023
            timed(seconds, "onnx", lambda: export.to_onnx(net, file, verify=verify))  # noqa: B023
            timed(seconds, "hf", lambda: export.to_hf(plain, file.with_suffix(""), verify=verify))  # noqa: B023
    found |= {"plain": str(plain.size), "seconds": max(bare.values())}  # the slowest form
    return {**found, "seconds by form": bare, "seconds by form, verified": checked}


def show(data: dict[str, Any]) -> None:
    table = Table(title="Largest difference from the network", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in (
        "",
        "dtype",
        "rounding",
        *FORMS,
        "error of plain",
        "its bound",
        "parameters",
        "plain",
        "µs a point",
        "plain",
    ):
        table.add_column(head, justify="left" if head in ("", "dtype") else "right")
    for row in data["cases"]:
        gaps = [f"{gap:.1e}" for gap in (row["own rounding"], *(row["difference"][form] for form in FORMS))]
        tiers = [(row[tier]["parameters"], row[tier]["microseconds"]) for tier in ("memory tier", "plain tier")]
        table.add_row(
            row["name"], row["dtype"], *gaps, f"{row['plain error']:.2e}", upper_text(row["plain bound"]),
            *(f"{size:,}" for size, _ in tiers), *(f"{cost:.3g}" for _, cost in tiers),
        )  # fmt: skip
    console = Console(width=180)
    console.print(table)
    for dtype, limit in CLOSE.items():
        rows = [row for row in data["cases"] if row["dtype"] == dtype]
        if rows:
            most = {form: max(row["relative"][form] for row in rows) for form in FORMS}
            said = ", ".join(f"{form} {gap:.1e}" for form, gap in most.items())
            console.print(f"{dtype}, {len(rows)} cases, part of the largest output (wanted {limit:g}): {said}")
    if "large" in data:
        console.print(f"150 heads: {json.dumps(data['large'], indent=1)}")


def markdown(data: dict[str, Any]) -> str:
    """The last run as docs/export.md shows it: the worst of every group, medians of what stock form costs."""
    head = ("networks", "dtype", "rounding", *FORMS, "parameters, plain / memory", "time, plain / memory")
    lines = [head, ("---",) * len(head)]
    for kind in dict.fromkeys(row["kind"] for row in data["cases"]):
        for dtype in CLOSE:
            rows = [row for row in data["cases"] if (row["kind"], row["dtype"]) == (kind, dtype)]
            if not rows:
                continue
            own = max(row["own rounding"] / max(1.0, row["scale"]) for row in rows)
            gaps = [max(row["relative"][form] for row in rows) for form in FORMS]
            price = [
                statistics.median(row["plain tier"][what] / row["memory tier"][what] for row in rows)
                for what in ("parameters", "microseconds")
            ]
            name = rows[0]["name"] if len(rows) == 1 else f"{len(rows)} {kind}s"
            first = f"{own:.1e}" if dtype == "float32" else ""
            lines.append((name, dtype, first, *(f"{gap:.1e}" for gap in gaps), *(f"{times:.0f}" for times in price)))
    counts = [row["points"][form] for row in data["cases"] for form in FORMS]
    full = sum(count >= max(counts) // 2 for count in counts)
    under = sum(row["plain error"] <= row["plain bound"] for row in data["cases"])
    by_form = ", ".join(f"{form} {seconds:.1f} s" for form, seconds in data["large"]["seconds by form"].items())
    verified = ", ".join(f"{form} {s:.1f} s" for form, s in data["large"]["seconds by form, verified"].items())
    counted = f"at {max(counts):,} points" if full == len(counts) else (
        f"at {max(counts):,} points ({full} of {len(counts)} pairs of case and form) or, where a point takes long, at "
        f"{min(counts):,} at least"
    )  # fmt: skip
    above = (
        f"Largest differences from the network, as a part of the largest output, {counted}. *rounding* is how far the "
        "network itself, in float32, is from the same weights computed in float64. The last columns are the price of "
        "being stock, medians."
    )
    below = (
        f"The plain form stays under its certificate's bound in {under} of {len(data['cases'])} cases. A network of "
        f"{data['large']['heads']} heads is exported in: {by_form}; with verification in a fresh process: {verified}."
    )
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([textwrap.fill(above, 120), "", *table, "", textwrap.fill(below, 120)])


def write(data: dict[str, Any], known: dict[str, Any]) -> None:
    order = {name: i for i, name in enumerate(known)}
    data["cases"].sort(key=lambda row: (row["dtype"], order[row["name"]]))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points, few cases, nothing written")
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most, for each form of each case")
    parser.add_argument("--only", action="append", help="a case, by its name")
    parser.add_argument("--resume", action="store_true", help="go on where a run was broken off")
    parser.add_argument("--dtype", choices=tuple(CLOSE), action="append")
    parser.add_argument(
        "--markdown", action="store_true", help="print the last run for docs/export.md, measure nothing"
    )
    parser.add_argument("--fill", action="store_true", help="put it between the markers of docs/export.md")
    wanted = parser.parse_args()
    if wanted.markdown or wanted.fill:
        text = markdown(json.loads(RESULTS.read_text("utf-8")))
        sys.stdout.write(text + "\n")
        if wanted.fill:
            page = ROOT / "docs" / "export.md"
            page.write_text(filled(page.read_text("utf-8"), "export", text), encoding="utf-8", newline="\n")
        return
    torch.set_num_threads(1)
    known = cases()
    names = wanted.only or (["gauss", "MLP 3-16-1, tanh", "ramp"] if wanted.quick else [*known])
    dtypes = [getattr(torch, name) for name in wanted.dtype or CLOSE]
    todo = [(name, dtype) for name in names for dtype in dtypes]
    kept: list[dict[str, Any]] = []
    if (wanted.only or wanted.resume) and RESULTS.is_file():
        kept = json.loads(RESULTS.read_text("utf-8"))["cases"]
        if wanted.resume:
            todo = [one for one in todo if one not in {(r["name"], getattr(torch, r["dtype"])) for r in kept}]
        kept = [row for row in kept if (row["name"], getattr(torch, row["dtype"])) not in todo]
    data: dict[str, Any] = {
        "machine": {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.machine()},
        "cases": kept,
    }
    for name, dtype in todo:
        start = time.perf_counter()
        row = measured(name, *known[name], dtype, QUICK if wanted.quick else wanted.points, wanted.seconds)
        data["cases"].append(row)
        if not wanted.quick:
            write(data, known)  # a long run that is broken off leaves what it has
        sys.stderr.write(f"{name}, {row['dtype']}: {time.perf_counter() - start:.0f} s\n")
    if not wanted.quick:
        data["large"] = large()
        write(data, known)
    show(data)


if __name__ == "__main__":
    main()
