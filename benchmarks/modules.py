"""How tight bounds of modules are: what is certified beside the largest error found, with what each site costs.

python benchmarks/modules.py            measures, prints a table, writes benchmarks/results/modules.json
python benchmarks/modules.py --quick    few evaluations; nothing is written
python benchmarks/modules.py NAME ...   only these modules; nothing is written

Modules of the kinds that people compile, each with PyTorch's own first weights, at 1e-3 of the target's range in
float32 and 1e-6 in float64. The truth is the module itself in float64. Errors are looked for at random points, at
corners, on the way up from the worst of them, and by moving those at random; then with sums in other orders, since a
certificate holds for any order (R0): every entry of every affine map takes, of many orders, the one that moves the
output furthest away. "torch's own" is what the module itself errs in that dtype there.
Where a tolerance is refused, the one that the message names is compiled instead, and the row says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import attnforge as af  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "modules.json"
GOALS = {"float32": (torch.float32, 1e-3), "float64": (torch.float64, 1e-6)}
BATCH = 20_000  # points at a time
STARTS, STEPS = 256, 30  # of the search for large errors
SHAKES = 400  # moves of every point at random
ORDERS = 64  # orders of summation that every entry of an affine map may choose from
AROUND, ROUNDS = 64, 12  # points whose sums are added up in other orders, and how often they are moved a little


class NormBlock(nn.Module):
    """x + W2 gelu(W1 norm(x)): the half of a transformer block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class AttentionBlock(nn.Module):
    """x + attention(x) of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Length(nn.Module):
    """The Euclidean length of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.norm(dim=-1, keepdim=True)


def perceptron(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 2))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **options)


CENTRE = torch.tensor([[0.7, -0.4, 0.2, -0.6], [-0.3, 0.8, -0.7, 0.1]])  # rows whose entries differ
#: name -> (module, box)
MODULES: dict[str, tuple[Callable[[], nn.Module], af.Box]] = {
    "MLP gelu": (lambda: perceptron(nn.GELU), af.Box.cube(-1, 1, 4)),
    "MLP tanh": (lambda: perceptron(nn.Tanh), af.Box.cube(-1, 1, 4)),
    "MLP relu": (lambda: perceptron(nn.ReLU), af.Box.cube(-1, 1, 4)),
    "LayerNorm block": (NormBlock, af.Box.cube(-1, 1, 4)),
    "attention block": (AttentionBlock, af.Box.cube(-1, 1, (3, 4))),
    "encoder layer": (encoder, af.Box.cube(-1, 1, (2, 4))),
    "encoder layer, norm first": (lambda: encoder(norm_first=True), af.Box.cube(-1, 1, (2, 4))),
    "encoder layer near a point": (encoder, af.Box.between(CENTRE - 0.05, CENTRE + 0.05)),
    "length of 40 numbers": (Length, af.Box.cube(-1, 1, 40)),
}


def errors(run: Callable[[Tensor], Tensor], truth: nn.Module, points: Tensor) -> Tensor:
    with torch.no_grad():
        parts = [(run(x).double() - truth(x.double())).abs().flatten(1).amax(1) for x in points.split(BATCH)]
    return torch.cat(parts)


def flat_rows(layer: nn.Module) -> Tensor:
    """Points of [-1, 1]^(2 x 4) at which the rows before both norms of an encoder layer are nearly constant: there its
    slope is largest. Both tokens are one row a, with (1 + O V) a = c + 0.5 and c / sqrt(mean c^2 + eps) = n, the fixed
    point of n = -FF(n) less its mean."""
    assert isinstance(layer, nn.TransformerEncoderLayer)
    with torch.no_grad():
        n = torch.zeros(4, dtype=torch.float64)
        for _ in range(200):
            n = -layer.linear2(torch.relu(layer.linear1(n)))
            n = n - n.mean()
        c = n * torch.sqrt(layer.norm1.eps / (1 - n.square().mean()))
        mixed = layer.self_attn.out_proj.weight @ layer.self_attn.in_proj_weight[8:]
        row = torch.linalg.solve(torch.eye(4, dtype=torch.float64) + mixed, c + 0.5)
    shaken = torch.randn(BATCH, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (row + 1e-6 * shaken).clamp(-1, 1)


def attack(net: Any, truth: nn.Module, module: nn.Module, count: int) -> tuple[float, float, float]:
    """The largest error found at random points, at corners, and uphill from the worst of these; that with sums in any
    order; and at the same points that of the module itself in the network's dtype."""
    wide = net.box.outward(net.dtype)
    low, high = wide.lower.to(net.dtype), wide.upper.to(net.dtype)
    points = torch.cat([net.box.corners(4096, net.dtype), net.box.sample(count, 1, net.dtype)])
    if isinstance(module, nn.TransformerEncoderLayer) and not module.norm_first and float(high.min()) == 1.0:
        points = torch.cat([points, flat_rows(truth).to(net.dtype)])
    found, own = errors(net.core, truth, points), float(errors(module, truth, points).max())
    x, most = points[found.argsort(descending=True)[:STARTS]], float(found.max())
    for i in range(STEPS):
        x = x.detach().requires_grad_()
        gap = (net.core(x).double() - truth(x.double())).abs().flatten(1).amax(1).sum()
        (slope,) = torch.autograd.grad(gap, x)
        with torch.no_grad():
            moved = x + 0.1 * 0.75**i * (high - low) * torch.nan_to_num(slope).sign()
            x = torch.minimum(torch.maximum(moved, low), high)
        most = max(most, float(errors(net.core, truth, x.detach()).max()))
        own = max(own, float(errors(module, truth, x.detach()).max()))
    starts = torch.cat([points[found.argsort(descending=True)[: STARTS // 2]], x.detach()[: STARTS // 2]])
    x, worst = shaken(net, truth, starts, low, high)
    most = max(most, float(worst.max()))
    return most, max(most, disordered(net, truth, x[worst.argsort(descending=True)[:AROUND]], low, high)), own


def laid_out(net: Any, x: Tensor) -> Tensor:
    """The first state of a network, as `CompiledNetwork.core` makes it."""
    state = x.reshape(len(x), net.program.tokens, net.program.ops[0].width)
    if net.constants is None:
        return state
    return torch.cat([state, net.constants.expand(len(x), *net.constants.shape)], -1)


def read_off(net: Any, Z: Tensor) -> Tensor:
    """The outputs in a last state, (point, output)."""
    return (Z if net.program.output_rows == "all" else Z[:, :1]).flatten(1)


def disordered(net: Any, truth: nn.Module, x: Tensor, low: Tensor, high: Tensor) -> float:
    """The largest error found near some points by adding up every sum of the affine maps in the worst of many orders:
    that which moves its entry most in the direction in which the output errs, as its derivatives say."""
    dice, most = torch.Generator().manual_seed(3), 0.0
    for number in range(ROUNDS):
        if number:
            step = 10.0 ** -(7.0 * torch.rand(len(x), *[1] * (x.dim() - 1), generator=dice, dtype=x.dtype))
            shake = step * torch.randn(x.shape, generator=dice, dtype=x.dtype) * (high - low)
            x = torch.minimum(torch.maximum(x + shake, low), high)
        with torch.no_grad():
            exact = truth(x.double()).flatten(1)
        states: list[Tensor] = []
        Z = laid_out(net, x).requires_grad_()
        for i, layer in enumerate(net.network.layers):
            Z = layer(Z)
            if i % 2 == 0:
                states.append(Z)
        gap = read_off(net, Z).double() - exact
        at = gap.detach().abs().argmax(1, keepdim=True)
        towards = torch.autograd.grad(gap.gather(1, at).abs().sum(), states)
        with torch.no_grad():
            Z = laid_out(net, x)
            for i, layer in enumerate(net.network.layers):
                Z = reordered(layer.S, layer.s, Z, towards[i // 2], dice) if i % 2 == 0 else layer(Z)
            most = max(most, float((read_off(net, Z).double() - exact).abs().max()))
    return most


def reordered(S: Tensor, s: Tensor | None, Z: Tensor, towards: Tensor, dice: torch.Generator) -> Tensor:
    """Z S + s, each entry added up in the order, of many, that moves it furthest in its direction: random ones, those
    with one sign first, and one that takes next what is rounded furthest."""
    terms = Z.unsqueeze(-1) * S  # rounded products
    if s is not None:
        terms = torch.cat([terms, s.expand(*terms.shape[:-2], 1, len(s))], -2)
    live = (terms != 0).to(terms.dtype)
    best = greedy(terms, towards.sign())
    for number in range(ORDERS):
        key = torch.rand(terms.shape, generator=dice)
        if number % 3:  # one sign first: partial sums become as large as they can
            key = key + 2.0 * ((terms > 0) if number % 3 == 1 else (terms < 0))
        ordered = terms.gather(-2, key.add(-4.0 * live).argsort(-2))
        total = torch.zeros_like(ordered[..., 0, :])
        for j in range(ordered.shape[-2]):
            total = total + ordered[..., j, :]
        best = torch.where((total - best) * towards > 0, total, best)
    return best


def greedy(terms: Tensor, sign: Tensor) -> Tensor:
    """The sum of terms over the last but one axis, in the order that takes next what is rounded furthest towards a
    sign."""
    left, total = terms != 0, torch.zeros_like(terms[..., 0, :])
    for _ in range(terms.shape[-2]):
        old = total.unsqueeze(-2)
        new = old + terms
        moved = new - old
        lost = (old - (new - moved)) + (terms - moved)  # of the addition, exactly
        gain = torch.where(left, -lost * sign.unsqueeze(-2), -torch.inf)
        at = gain.argmax(-2, keepdim=True)
        taken = left.gather(-2, at)
        total = torch.where(taken, new.gather(-2, at), old).squeeze(-2)
        left = left.scatter(-2, at, False)
    return total


def shaken(net: Any, truth: nn.Module, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Points moved at random, far and by a few last places, keeping what is worse, and their errors: what rounding does
    has no slope."""
    dice = torch.Generator().manual_seed(2)
    worst = errors(net.core, truth, x)
    for _ in range(SHAKES):
        size = 10.0 ** -(7.0 * torch.rand(len(x), *[1] * (x.dim() - 1), generator=dice))
        step = size * torch.randn(x.shape, generator=dice) * (torch.rand(x.shape, generator=dice) < 0.5)
        new = torch.minimum(torch.maximum(x + step.to(x.dtype) * (high - low), low), high)
        now = errors(net.core, truth, new)
        better = now > worst
        x = torch.where(better.reshape(-1, *[1] * (x.dim() - 1)), new, x)
        worst = torch.where(better, now, worst)
    return x, worst


def measured(name: str, goal: str, count: int) -> dict[str, Any]:
    """One module in one dtype."""
    make, box = MODULES[name]
    torch.manual_seed(0)
    module = make().eval()
    truth = make().eval().double()
    truth.load_state_dict(module.state_dict())
    with torch.no_grad():
        seen = truth(torch.cat([box.sample(20_000), box.corners(4096)])).flatten(1)
    dtype, share = GOALS[goal]
    width = float((seen.amax(0) - seen.amin(0)).max())
    row: dict[str, Any] = {"name": name, "dtype": goal, "asked": share * width, "range": width}
    try:
        net = af.compile(module, box, share * width, dtype=dtype)
    except af.PrecisionError as error:
        row["refused"] = True
        if error.reachable is None:
            return row
        net = af.compile(module, box, error.reachable, dtype=dtype)
    terms = sorted(net.certificate.terms, key=lambda term: -term.value)[:3]
    row["most"] = [[term.site, term.source, term.value] for term in terms]
    found, disorder, own = attack(net, truth, module.to(dtype), count)
    return {**row, "bound": net.bound, "found": disorder, "found as computed here": found, "torch": own}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    table = Table("module", "dtype", "asked", "bound", "found", "bound / found", "torch's own", "most of it")
    for name in given.names or MODULES:
        for goal in GOALS:
            row = measured(name, goal, 10_000 if given.quick else 50_000)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if "bound" in row:
                site, source, value = row["most"][0]
                table.add_row(
                    name, goal, f"{row['asked']:.2e}" + (" refused" if "refused" in row else ""), f"{row['bound']:.2e}",
                    f"{row['found']:.2e}", f"{row['bound'] / row['found']:.2f}", f"{row['torch']:.2e}",
                    f"{site}, {source} {value:.1e}",
                )  # fmt: skip
    Console(width=180).print(table)
    tight = {
        goal: statistics.median(r["bound"] / r["found"] for r in rows if r["dtype"] == goal and "bound" in r)
        for goal in GOALS
    }
    print(f"median bound / found: {tight}")
    if not given.quick and not given.names:
        about = {"python": platform.python_version(), "torch": torch.__version__}
        RESULTS.write_text(json.dumps({"about": about, "median bound / found": tight, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
