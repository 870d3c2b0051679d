"""The referee: hunts for a point where a network differs from its target by more than its certificate allows.

python benchmarks/soundness.py --minutes 10           goes on where the last run stopped; writes results/soundness.json
python benchmarks/soundness.py --kinds formula --seeds 40:60 --show    looks at these seeds again; nothing is written
python benchmarks/soundness.py --markdown             prints the table of all runs so far

A seed makes a case: a formula, a module, a function of tokens, a head or an estimator's problem; a box of any scale
(ordinary, tiny, a single point, one-sided, huge, subnormal); a dtype; and what is done to the network before it is
certified once more (nothing, a cast, a round trip through bfloat16, training, changed entries). The hunt draws points
all over the box, near its ends and near zero, and moves from the worst ones by smaller and smaller steps down to units
in the last place. Points are screened against the target in extended precision (float64 for float32 networks), and the
worst of every case are settled in ball arithmetic: an error counts only when the ball lies above the bound. The targets
are written out here once more, from textbook definitions: nothing of them comes from the package.

An accelerator takes part in three steps: --pack FOLDER builds and saves networks, --hunt FOLDER looks for bad points
on another machine (it needs PyTorch and safetensors only), and --settle FOLDER judges them here.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

try:
    from flint import arb, arb_mat, ctx, fmpq
except ImportError:  # a machine that only hunts has no ball arithmetic
    arb = arb_mat = ctx = fmpq = None

import attnforge as af  # noqa: E402
from attnforge.network import AttentionLayer, AttentionOnly, Heads  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "soundness.json"
EXTENDED = np.finfo(np.longdouble).eps < 1e-18  # elsewhere long doubles are doubles, and the screen is coarser
BATCH = 1 << 14  # points evaluated at once on a processor
DEVICE_BATCH = 1 << 19  # and on an accelerator
KEPT = 2048  # the worst points of a case, which are settled in ball arithmetic, at most
SECOND_LOOK = 16  # one of so many float64 points, the worst, is looked at in long doubles
STARTS = 48  # points from which the local search moves on
BITS, MOST_BITS = 192, 3072  # of the balls: the first try, and where a point is called undecided
TIGHT = 24  # cases that are listed, those closest to their bounds
PACKED = 1_000_000  # seeds from here on are for other machines
EVALUATIONS = 10_000_000  # points looked at for one network


# --------------------------------------------------------------------------- arithmetic: one definition, three kinds


class Numbers:
    """Tensors of float64, on any device: the fast screen."""

    def number(self, value: Fraction | float, like: Any) -> Any:
        return float(value)

    def column(self, points: Tensor, i: int) -> Any:
        return points[:, i].double()

    def primitive(self, name: str, x: Any) -> Any:
        return getattr(torch, name, None)(x) if hasattr(torch, name) else getattr(torch.special, name)(x)

    def larger(self, x: Any, y: Any) -> Any:
        return torch.maximum(*self.both(x, y))

    def smaller(self, x: Any, y: Any) -> Any:
        return torch.minimum(*self.both(x, y))

    @staticmethod
    def both(x: Any, y: Any) -> tuple[Tensor, Tensor]:
        like = x if isinstance(x, Tensor) else y
        return tuple(v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (x, y))  # type: ignore[return-value]

    def stacked(self, values: Sequence[Any], count: int) -> Tensor:
        device = next((v.device for v in values if isinstance(v, Tensor)), "cpu")
        return torch.stack([torch.as_tensor(v, device=device).double().expand(count) for v in values], -1)


class Extended(Numbers):
    """Arrays of long doubles: the screen of float64 networks. erf and erfc are those of float64."""

    def number(self, value: Fraction | float, like: Any) -> Any:
        return np.longdouble(value) if isinstance(value, float) else np.longdouble(value.numerator) / value.denominator

    def column(self, points: Tensor, i: int) -> Any:
        return points[:, i].double().numpy().astype(np.longdouble)

    def primitive(self, name: str, x: Any) -> Any:
        if name in ("erf", "erfc"):
            wide = torch.from_numpy(np.asarray(x, dtype=np.float64).copy())
            return getattr(torch.special, name)(wide).numpy().astype(np.longdouble)
        return getattr(np, f"arc{name[1:]}" if name[0] == "a" and name != "abs" else name)(x)

    def larger(self, x: Any, y: Any) -> Any:
        return np.maximum(x, y)

    def smaller(self, x: Any, y: Any) -> Any:
        return np.minimum(x, y)


class Balls(Numbers):
    """python-flint's balls, one point at a time: what judges."""

    def number(self, value: Fraction | float, like: Any) -> Any:
        return arb(value) if isinstance(value, float) else arb(fmpq(value.numerator, value.denominator))

    def primitive(self, name: str, x: Any) -> Any:
        return abs(x) if name == "abs" else getattr(x, name)()

    def larger(self, x: Any, y: Any) -> Any:
        return x.max(y)

    def smaller(self, x: Any, y: Any) -> Any:
        return x.min(y)


TORCH, LONG, BALLS = Numbers(), Extended(), Balls()
PRIMITIVES = (
    "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan",
    "asinh", "acosh", "atanh", "erf", "erfc", "abs",
)  # fmt: skip


def call(a: Numbers, name: str, x: Any) -> Any:
    """A function of one number, from its definition."""
    if name in PRIMITIVES:
        return a.primitive(name, x)
    if name in ("relu", "hardtanh", "relu6", "hardsigmoid", "hardswish", "squared_relu", "leaky_relu"):
        inner = {"hardtanh": (x, -1, 1), "relu6": (x, 0, 6)}.get(name, (x + 3, 0, 6))
        if name in ("relu", "squared_relu", "leaky_relu"):
            top = a.larger(x, a.number(0.0, x))
            below = a.number(0.01, x) * a.smaller(x, a.number(0.0, x)) if name == "leaky_relu" else 0
            return top * top if name == "squared_relu" else top + below
        clipped = a.smaller(a.larger(inner[0], a.number(float(inner[1]), x)), a.number(float(inner[2]), x))
        return clipped if name in ("hardtanh", "relu6") else clipped / 6 if name == "hardsigmoid" else x * clipped / 6
    if name == "sigmoid":
        return 1 / (1 + a.primitive("exp", -x))
    if name == "silu":
        return x * call(a, "sigmoid", x)
    if name == "softplus":
        return a.larger(x, a.number(0.0, x)) + a.primitive("log1p", a.primitive("exp", -a.primitive("abs", x)))
    if name == "logsigmoid":
        return -call(a, "softplus", -x)
    if name == "mish":
        return x * a.primitive("tanh", call(a, "softplus", x))
    if name == "elu":
        return a.larger(x, a.number(0.0, x)) + a.primitive("expm1", a.smaller(x, a.number(0.0, x)))
    if name == "gelu":
        return x * a.primitive("erfc", -x / a.primitive("sqrt", 0 * x + 2)) / 2
    if name == "softsign":
        return x / (1 + a.primitive("abs", x))
    if name == "reciprocal":
        return 1 / x
    if name == "rsqrt":
        return 1 / a.primitive("sqrt", x)
    return {"square": lambda: x * x, "cube": lambda: x * x * x, "identity": lambda: x}[name]()


# --------------------------------------------------------------------------------------------------------- the cases


Truth = Callable[[Numbers, list[Any]], list[Any]]


@dataclass(frozen=True)
class Case:
    """What a seed stands for: how to build the network, and what it should compute at the columns of a point."""

    text: str
    dtype: torch.dtype
    build: Callable[[], Any]
    truth: Truth
    relative: bool = False


def choose(rng: np.random.Generator, **weights: float) -> str:
    total = sum(weights.values())
    return str(rng.choice(list(weights), p=[w / total for w in weights.values()]))


def power(rng: np.random.Generator, low: float, high: float) -> float:
    """A power of ten that decimals write in a few digits."""
    return float(f"{10.0 ** rng.uniform(low, high):.3g}")


def interval(rng: np.random.Generator, dtype: torch.dtype) -> tuple[float, float, str]:
    """A box's side of some scale, and the text of a factor that brings it to an ordinary size ('' for none)."""
    width, centre = power(rng, -2, 0.8), round(float(rng.uniform(-2, 2)), 3)
    lo, hi = centre - width / 2, centre + width / 2
    kind = choose(rng, ordinary=8, onesided=2, tiny=1, point=0.5, scaled=2, extreme=1.5, subnormal=0.5)
    step = 2.0**-23 if dtype == torch.float32 else 2.0**-52
    if kind == "onesided":
        lo, hi = (0.0, width) if rng.random() < 0.5 else (-width, 0.0)
    if kind == "tiny":
        lo, hi = centre, centre + max(abs(centre), 0.1) * step * int(rng.integers(1, 40))
    if kind == "point":
        lo = hi = centre
    if kind == "subnormal":
        unit = 1e-41 if dtype == torch.float32 else 1e-312
        return lo * unit, hi * unit, ""
    if kind in ("scaled", "extreme"):
        digits = int(rng.integers(1, 4) if kind == "scaled" else rng.integers(4, 25)) * int(rng.choice([-1, 1]))
        return lo * 10.0**digits, hi * 10.0**digits, f"1e{-digits}"
    return lo, hi, ""


#: Functions of formulas with the arguments they take: beyond them they overflow, are steep, or have no value.
WITHIN: dict[str, tuple[float, float]] = {
    "exp": (-30, 6), "log": (1e-3, 1e6), "sqrt": (1e-4, 1e6), "sin": (-20, 20), "cos": (-20, 20), "tanh": (-30, 30),
    "sigmoid": (-40, 40), "atan": (-50, 50), "asin": (-0.98, 0.98), "acos": (-0.98, 0.98), "sinh": (-6, 6),
    "cosh": (-6, 6), "asinh": (-50, 50), "acosh": (1.05, 50), "atanh": (-0.98, 0.98), "erf": (-6, 6), "erfc": (-4, 6),
    "gelu": (-12, 12), "silu": (-20, 20), "softplus": (-20, 18), "relu": (-1e3, 1e3), "abs": (-1e3, 1e3),
    "elu": (-20, 20), "mish": (-12, 12), "softsign": (-20, 20), "reciprocal": (0.05, 1e3), "rsqrt": (0.05, 1e3),
    "hardtanh": (-9, 9), "relu6": (-9, 12), "log1p": (-0.9, 1e4), "expm1": (-20, 5), "tan": (-1.3, 1.3),
    "square": (-100, 100), "cube": (-20, 20), "leaky_relu": (-100, 100), "hardswish": (-9, 9), "logsigmoid": (-18, 20),
}  # fmt: skip
Tree = tuple[Any, ...]


def spelled(tree: Tree) -> str:
    head, *rest = tree
    if head in ("var", "num"):
        return str(rest[0])
    if head in ("+", "-", "*", "/"):
        return f"({spelled(rest[0])} {head} {spelled(rest[1])})"
    if head == "**":
        return f"{spelled(rest[0])}**{rest[1]}" if rest[0][0] == "var" else f"({spelled(rest[0])})**{rest[1]}"
    return f"{head}({', '.join(spelled(part) for part in rest)})"


def mentioned(tree: Tree) -> set[str]:
    return {tree[1]} if tree[0] == "var" else set().union(*(mentioned(t) for t in tree[1:] if isinstance(t, tuple)))


def value(a: Numbers, tree: Tree, of: dict[str, Any]) -> Any:
    head, *rest = tree
    if head == "var":
        return of[rest[0]]
    if head == "num":
        return a.number(Fraction(rest[0]), next(iter(of.values())))
    if head == "**":
        base = value(a, rest[0], of)
        found = base
        for _ in range(rest[1] - 1):
            found = found * base
        return found
    parts = [value(a, part, of) for part in rest]
    if head in ("max", "min"):
        return (a.larger if head == "max" else a.smaller)(*parts)
    if len(parts) == 2:
        x, y = parts
        return x + y if head == "+" else x - y if head == "-" else x * y if head == "*" else x / y
    return call(a, head, parts[0])


def formula(seed: int) -> Case:
    """A random formula that has values on all of a random box, as far as samples show."""
    rng = np.random.default_rng([1, seed])
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    names = ["x", "y", "z", "t"][: int(rng.choice([1, 2, 3, 4], p=[0.4, 0.35, 0.15, 0.1]))]
    sides, pool = {}, []
    for name in names:
        lo, hi, factor = interval(rng, dtype)
        sides[name] = (lo, hi)
        pool.append(("*", ("num", factor), ("var", name)) if factor else ("var", name))
    box = af.Box(sides)
    points = torch.cat([box.sample(200), box.corners(16)])
    of = {name: points[:, i] for i, name in enumerate(names)}

    def span(tree: Tree) -> tuple[float, float]:
        seen = torch.as_tensor(value(TORCH, tree, of)).double()
        return (float(seen.min()), float(seen.max())) if bool(torch.isfinite(seen).all()) else (-math.inf, math.inf)

    def number() -> Tree:
        text = f"{rng.uniform(-3, 3):.2f}" if rng.random() < 0.7 else f"{rng.normal():.17g}"
        return ("num", text if float(text) != 0 else "0.5")

    for _ in range(int(rng.integers(1, 9))):
        one, two = (pool[int(rng.integers(len(pool)))] for _ in range(2))
        low, high = span(one)
        fits = [name for name, (a, b) in WITHIN.items() if low > a and high < b]
        what = choose(rng, call=5 if fits else 0, add=2, scale=2, multiply=2, power=0.7, divide=0.7, larger=0.7)
        if what == "call":
            made: Tree = (str(rng.choice(fits)), one)
        elif what == "add":
            made = (str(rng.choice(["+", "-"])), one, two if rng.random() < 0.7 else number())
        elif what == "scale":
            made = ("*", number(), one)
        elif what == "multiply":
            made = ("*", one, two)
        elif what == "power":
            made = ("**", one, int(rng.integers(2, 5)))
        elif what == "divide":
            below = span(two)
            made = ("/", one, two) if below[0] > 0.05 or below[1] < -0.05 else ("/", one, ("num", "3"))
        else:
            made = (str(rng.choice(["max", "min"])), one, two if rng.random() < 0.5 else number())
        if all(math.isfinite(end) and abs(end) < 1e4 for end in span(made)):
            pool.append(made)
    tree = pool[-1]
    if rng.random() < 0.25:
        tree = ("*", ("num", f"1e{int(rng.integers(-25, 26))}"), tree)
    low, high = span(tree)
    names = [name for name in names if name in mentioned(tree)]
    box = af.Box({name: sides[name] for name in names})
    size = (high - low) or max(abs(low), 1e-30)
    eps = size * (power(rng, -4.5, -0.5) if dtype == torch.float32 else power(rng, -11, -1))
    text = spelled(tree)

    def truth(a: Numbers, columns: list[Any]) -> list[Any]:
        return [value(a, tree, dict(zip(names, columns, strict=True)))]

    return Case(f"{text} on {box!r}, eps {eps:.3g}", dtype, lambda: af.compile(text, box, eps, dtype=dtype), truth)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "elu": nn.ELU,
    "softplus": nn.Softplus, "mish": nn.Mish, "softsign": nn.Softsign, "hardtanh": nn.Hardtanh, "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU, "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid, "logsigmoid": nn.LogSigmoid,
}  # fmt: skip


class Layers(nn.Module):
    """Layers one after the other; `skips` are those around which the input goes as well."""

    def __init__(self, layers: Sequence[nn.Module], skips: set[int]):
        super().__init__()
        self.layers, self.skips = nn.ModuleList(layers), skips

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x) if i in self.skips else layer(x)
        return x


def dot(a: Numbers, weights: Sequence[float], row: Sequence[Any], start: float = 0.0) -> Any:
    total = a.number(float(start), row[0])
    for w, x in zip(weights, row, strict=True):
        total = total + a.number(float(w), x) * x
    return total


def normed(a: Numbers, row: list[Any], eps: float, centred: bool) -> list[Any]:
    mean = sum(row[1:], row[0]) / len(row)
    centre = [x - mean for x in row] if centred else row
    square = [x * x for x in centre]
    size = a.primitive("sqrt", sum(square[1:], square[0]) / len(row) + a.number(eps, row[0]))
    return [x / size for x in centre]


def soft(a: Numbers, row: list[Any]) -> list[Any]:
    top = row[0]
    for x in row[1:]:
        top = a.larger(top, x)
    weights = [a.primitive("exp", x - top) for x in row]
    total = sum(weights[1:], weights[0])
    return [w / total for w in weights]


def softplus(a: Numbers, x: Any, threshold: float = 20.0) -> Any:
    """PyTorch's: the identity above its threshold."""
    if isinstance(a, Balls):
        return x if x > threshold else call(a, "softplus", x)
    where = np.where if isinstance(a, Extended) else torch.where
    return where(x > threshold, x, call(a, "softplus", x))


def module(seed: int) -> Case:
    """Linear layers, activations, norms and skips; weights of several sizes, boxes of several scales."""
    rng = np.random.default_rng([2, seed])
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    width = first = int(rng.integers(1, 5))
    steps: list[tuple[Any, ...]] = []
    layers: list[nn.Module] = []
    skips: set[int] = set()
    words = []
    for _ in range(int(rng.integers(1, 4))):
        wide = int(rng.integers(1, 6))
        size = 1.0 if rng.random() < 0.7 else power(rng, -2, 1)
        drawn_ = size * rng.normal(size=(wide, width)) / math.sqrt(width), size * rng.normal(size=wide)
        W, b = (np.round(v, 6) if rng.random() < 0.3 else v for v in drawn_)
        layer = nn.Linear(width, wide, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(W))
            layer.bias.copy_(torch.from_numpy(b))
        layer = layer.to(dtype)
        layers.append(layer)
        steps.append(("linear", layer.weight.detach().double().tolist(), layer.bias.detach().double().tolist()))
        words.append(f"linear {width}-{wide} of size {size:g}")
        width = wide
        what = choose(rng, act=6, norm=0.7 if wide > 1 else 0, softmax=0.7 if wide > 1 else 0, nothing=0.5)
        if what == "act":
            name = str(rng.choice(list(ACTIVATIONS)))
            skip = rng.random() < 0.25
            skips |= {len(layers)} if skip else set()
            layers.append(ACTIVATIONS[name]())
            steps.append(("act", name, skip))
            words.append(name + " with a skip" * skip)
        if what == "norm":
            eps, centred = float(rng.choice([1e-5, 1e-2, 0.5])), bool(rng.random() < 0.5)
            layers.append(nn.LayerNorm(wide, eps, elementwise_affine=False) if centred else
                          nn.RMSNorm(wide, eps, elementwise_affine=False))  # fmt: skip
            steps.append(("norm", eps, centred))
            words.append(f"{'layer' if centred else 'rms'} norm, eps {eps:g}")
        if what == "softmax":
            layers.append(nn.Softmax(-1))
            steps.append(("softmax",))
            words.append("softmax")
    lo = np.array([interval(rng, dtype)[:2] for _ in range(first)])
    scale = np.abs(lo).max(1)
    lo[scale > 30] /= scale[scale > 30][:, None]
    box = af.Box.between(lo[:, 0], lo[:, 1])
    net = Layers(layers, skips).eval()

    def truth(a: Numbers, row: list[Any]) -> list[Any]:
        for step in steps:
            if step[0] == "linear":
                row = [dot(a, w, row, b) for w, b in zip(step[1], step[2], strict=True)]
            elif step[0] == "act":
                new = [softplus(a, x) if step[1] == "softplus" else call(a, step[1], x) for x in row]
                row = [x + y for x, y in zip(row, new, strict=True)] if step[2] else new
            else:
                row = normed(a, row, step[1], step[2]) if step[0] == "norm" else soft(a, row)
        return row

    eps = power(rng, -3, -0.5) if dtype == torch.float32 else power(rng, -8, -1)
    text = f"{', '.join(words)} on {box!r}, eps {eps:.3g}"
    return Case(text, dtype, lambda: af.compile(net, box, eps, dtype=dtype), truth)


def sorted_row(a: Numbers, row: list[Any]) -> list[Any]:
    """A row in order, the largest carried to the end first."""
    row = list(row)
    for end in range(len(row) - 1, 0, -1):
        for i in range(end):
            row[i], row[i + 1] = a.smaller(row[i], row[i + 1]), a.larger(row[i], row[i + 1])
    return row


def running(a: Numbers, row: list[Any], join: Callable[[Any, Any], Any]) -> list[Any]:
    found = [row[0]]
    for x in row[1:]:
        found.append(join(found[-1], x))
    return found


def weighed(a: Numbers, row: list[Any], shares: dict[int, Fraction]) -> Any:
    parts = [a.number(share, row[0]) * row[i] for i, share in shares.items()]
    return sum(parts[1:], parts[0])


def between(count: int, after: int, corners: bool) -> list[dict[int, Fraction]]:
    """The shares of the two neighbours in linear interpolation."""
    found = []
    for k in range(after):
        step = Fraction(count - 1, after - 1) if after > 1 else Fraction(0)
        at = step * k if corners else max(Fraction(0), Fraction(count, after) * (2 * k + 1) / 2 - Fraction(1, 2))
        low = min(math.floor(at), count - 1)
        shares = {low: 1 - (at - low)}
        high = min(low + 1, count - 1)
        found.append({**shares, high: shares.get(high, Fraction(0)) + at - low})
    return found


#: What a row may go through: its operation in torch, and its definition.
Row = tuple[str, Callable[[Tensor], Tensor], Callable[[Numbers, list[Any]], list[Any]]]


def order_statistic(rng: np.random.Generator, width: int) -> Row:
    """An operation on rows that compares, sums or interpolates their entries."""
    k, down = int(rng.integers(1, width + 1)), bool(rng.random() < 0.5)
    share = float(rng.choice([0.0, 0.25, 0.5, 1.0, rng.random()]))
    place = Fraction(share) * (width - 1)
    low = math.floor(place)
    near = {low: 1 - (place - low), **({low + 1: place - low} if place > low else {})}
    after, corners = int(rng.integers(1, 7)), bool(rng.random() < 0.5)
    goals = [int(g) for g in rng.integers(0, 3, width)]
    limit = float(rng.choice([0.0, 0.3, 1.0]))
    lines = between(width, after, corners)
    found: list[Row] = [
        ("sort", lambda x: x.sort(-1, descending=down).values, lambda a, r: sorted_row(a, r)[:: -1 if down else 1]),
        ("topk", lambda x: x.topk(k, -1, largest=down).values,
         lambda a, r: sorted_row(a, r)[:: -1 if down else 1][:k]),
        ("kthvalue", lambda x: x.kthvalue(k, -1, keepdim=True).values, lambda a, r: [sorted_row(a, r)[k - 1]]),
        ("median", lambda x: x.median(-1, keepdim=True).values, lambda a, r: [sorted_row(a, r)[(width - 1) // 2]]),
        ("quantile", lambda x: x.quantile(share, -1, keepdim=True), lambda a, r: [weighed(a, sorted_row(a, r), near)]),
        ("cummax", lambda x: x.cummax(-1).values, lambda a, r: running(a, r, a.larger)),
        ("cummin", lambda x: x.cummin(-1).values, lambda a, r: running(a, r, a.smaller)),
        ("logcumsumexp", lambda x: x.logcumsumexp(-1),
         lambda a, r: running(a, r, lambda x, y: y + call(a, "softplus", x - y))),
        ("interpolation", lambda x: nn.functional.interpolate(
            x[:, None], size=after, mode="linear", align_corners=corners)[:, 0],
         lambda a, r: [weighed(a, r, shares) for shares in lines]),
        ("index_add", lambda x: torch.ones(len(x), 3, dtype=x.dtype).index_add(1, torch.tensor(goals), x),
         lambda a, r: [sum((x for x, g in zip(r, goals, strict=True) if g == j), a.number(1.0, r[0]))
                       for j in range(3)]),
        ("softshrink", lambda x: nn.functional.softshrink(x, limit),
         lambda a, r: [a.larger(x - limit, 0 * x) - a.larger(-x - limit, 0 * x) for x in r]),
        ("distances", lambda x: torch.nn.functional.pad(
            (x[:, :, None] - x[:, None, :]).abs().flatten(1), (0, 1)),
         lambda a, r: [*(a.primitive("abs", x - y) for x in r for y in r), 0 * r[0]]),
        ("padded means", lambda x: nn.functional.avg_pool1d(x[:, None], 2, 1, 1, count_include_pad=down)[:, 0],
         lambda a, r: [weighed(a, r, {i: Fraction(1, 2 if down or 0 < j < width else 1)
                                      for i in (j - 1, j) if 0 <= i < width}) for j in range(width + 1)]),
    ]  # fmt: skip
    return found[int(rng.integers(len(found)))]


class Rows(nn.Module):
    """Operations on rows, after an affine map."""

    def __init__(self, layer: nn.Linear, operations: Sequence[Callable[[Tensor], Tensor]]):
        super().__init__()
        self.layer, self.operations = layer, tuple(operations)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for operation in self.operations:
            x = operation(x)
        return x


def order(seed: int) -> Case:
    """Order statistics, running extremes, interpolation, sums at places and padded means, one or two of them."""
    rng = np.random.default_rng([5, seed])
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    first, width = int(rng.integers(1, 4)), int(rng.integers(2, 7))
    layer = nn.Linear(first, width, dtype=torch.float64)
    simple = rng.random() < 0.5  # of few numbers, so that entries are equal on whole faces of the box
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(rng.integers(-1, 2, (width, first)) if simple
                                            else rng.normal(size=(width, first))))  # fmt: skip
        layer.bias.copy_(torch.from_numpy(rng.integers(-1, 2, width) * 0.5 if simple else rng.normal(size=width)))
    layer = layer.to(dtype)
    matrix, start = (p.detach().double().tolist() for p in (layer.weight, layer.bias))
    operations: list[Row] = []
    wide = width
    for _ in range(int(rng.integers(1, 3))):
        operations.append(order_statistic(rng, wide))
        wide = operations[-1][1](torch.zeros(2, wide)).shape[1]
        if wide < 2 or wide > 8:
            break
    ends = np.array([interval(rng, dtype)[:2] for _ in range(first)])
    scale = np.abs(ends).max(1)
    ends[scale > 30] /= scale[scale > 30][:, None]
    box, net = af.Box.between(ends[:, 0], ends[:, 1]), Rows(layer, [run for _, run, _ in operations]).eval()

    def truth(a: Numbers, row: list[Any]) -> list[Any]:
        row = [dot(a, w, row, b) for w, b in zip(matrix, start, strict=True)]
        for _, _, meant in operations:
            row = meant(a, row)
        return row

    eps = power(rng, -4, -0.5) if dtype == torch.float32 else power(rng, -8, -1)
    text = f"linear {first}-{width}, {', '.join(name for name, _, _ in operations)} on {box!r}, eps {eps:.3g}"
    return Case(text, dtype, lambda: af.compile(net, box, eps, dtype=dtype), truth)


class Tokens(nn.Module):
    """Steps on (token, channel): a function of whole sequences."""

    def __init__(self, steps: Sequence[tuple[Any, ...]]):
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        for name, *given in self.steps:
            if name == "attention":
                scale, mask = given
                logits = x @ x.mT * scale
                if mask is not None:
                    logits = logits + torch.tensor(mask, dtype=torch.float64).to(x)
                x = torch.softmax(logits, -1) @ x
            elif name == "mix":
                x = torch.tensor(given[0], dtype=torch.float64).to(x) @ x
            elif name == "channels":
                x = x @ torch.tensor(given[0], dtype=torch.float64).to(x)
            elif name == "softmax":
                x = torch.softmax(given[0] * x, -1)
            elif name == "maximum":
                x = x.amax(-2, keepdim=True) + 0 * x
            elif name == "norm":
                x = nn.functional.rms_norm(x, (x.shape[-1],), eps=given[0])
            elif name == "product":
                x = x * (x + given[0])
            else:
                x = getattr(torch, name)(x)
        return x


def tokens(seed: int) -> Case:
    """Attention with scales and masks, mixing of tokens and channels, maxima over tokens, norms, functions."""
    rng = np.random.default_rng([3, seed])
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    count, width = int(rng.integers(2, 4)), int(rng.integers(1, 4))
    steps: list[tuple[Any, ...]] = []
    for _ in range(int(rng.integers(1, 3))):
        name = choose(rng, attention=3, mix=1.5, channels=1.5, softmax=1 if width > 1 else 0, maximum=1, norm=0.7,
                      tanh=1, relu=1, product=1)  # fmt: skip
        if name == "attention":
            mask = None
            if rng.random() < 0.4:
                mask = np.where(rng.random((count, count)) < 0.3, -np.inf, rng.normal(size=(count, count)).round(2))
                np.fill_diagonal(mask, 0.0)
            steps.append((name, power(rng, -1, 0.7), None if mask is None else mask.tolist()))
        elif name in ("mix", "channels"):
            side = count if name == "mix" else width
            steps.append((name, rng.normal(size=(side, side)).round(int(rng.integers(1, 17))).tolist()))
        elif name == "softmax":
            steps.append((name, power(rng, -1, 1)))
        elif name == "norm":
            steps.append((name, float(rng.choice([1e-2, 0.0625, 0.5]))))
        elif name == "product":
            steps.append((name, round(float(rng.normal()), 2)))
        else:
            steps.append((name,))
    lo, hi, _ = interval(rng, dtype)
    if max(abs(lo), abs(hi)) > 30:
        lo, hi = lo / max(abs(lo), abs(hi)), hi / max(abs(lo), abs(hi))
    box = af.Box.cube(lo, hi, shape=(count, width))
    net = Tokens(steps).eval()

    def truth(a: Numbers, flat: list[Any]) -> list[Any]:
        x = [flat[i * width : (i + 1) * width] for i in range(count)]
        for name, *given in steps:
            if name == "attention":
                out = []
                for i in range(count):
                    seen = [j for j in range(count) if given[1] is None or given[1][i][j] != -math.inf]
                    logits = []
                    for j in seen:
                        product = sum((p * q for p, q in zip(x[i][1:], x[j][1:], strict=True)), x[i][0] * x[j][0])
                        extra = 0 if given[1] is None else a.number(given[1][i][j], product)
                        logits.append(product * a.number(given[0], product) + extra)
                    weights = soft(a, logits)
                    out.append([sum((w * x[j][c] for w, j in zip(weights[1:], seen[1:], strict=True)),
                                    weights[0] * x[seen[0]][c]) for c in range(width)])  # fmt: skip
                x = out
            elif name == "mix":
                x = [[dot(a, row, [t[c] for t in x]) for c in range(width)] for row in given[0]]
            elif name == "channels":
                x = [[dot(a, [row[c] for row in given[0]], t) for c in range(width)] for t in x]
            elif name == "softmax":
                x = [soft(a, [a.number(given[0], v) * v for v in t]) for t in x]
            elif name == "maximum":
                top = x[0]
                for t in x[1:]:
                    top = [a.larger(p, q) for p, q in zip(top, t, strict=True)]
                x = [top for _ in x]
            elif name == "norm":
                x = [normed(a, t, given[0], False) for t in x]
            elif name == "product":
                x = [[v * (v + a.number(given[0], v)) for v in t] for t in x]
            else:
                x = [[call(a, name, v) for v in t] for t in x]
        return [v for t in x for v in t]

    eps = power(rng, -3, -0.5) if dtype == torch.float32 else power(rng, -7, -1)
    text = f"{steps} on {box!r}, eps {eps:.3g}"
    return Case(text, dtype, lambda: af.compile(net, box, eps, dtype=dtype), truth)


def head(seed: int) -> Case:
    """A head on its own: anchors of every function, gates, products; intervals of every scale."""
    rng = np.random.default_rng([4, seed])
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    what = choose(rng, anchor=5, gate=2, product=1.5)
    if what == "product":
        sides = []
        for _ in range(2):
            lo, hi, _ = interval(rng, dtype)
            sides.append((lo, hi))

        def multiplied(a: Numbers, columns: list[Any]) -> list[Any]:
            return [columns[0] * columns[1]]

        return Case(f"product on {sides}", dtype, lambda: af.ProductHead.fit(*sides, dtype=dtype), multiplied)
    name = str(rng.choice([n for n in WITHIN if n not in ("square", "cube")]))
    if what == "gate":
        name = str(rng.choice(["relu", "abs", "hardtanh", "leaky_relu"]))
    low, high = WITHIN[name]
    lo, hi = np.sort(np.clip(rng.normal(size=2) * power(rng, -2, 1) + rng.normal(), low, high)).tolist()
    if rng.random() < 0.1:
        hi = lo + abs(lo) * 2.0**-20 + 1e-6
    relative = bool(what == "anchor" and rng.random() < 0.2)

    def build() -> Any:
        if what == "gate":
            return af.GateHead.fit(name, lo, hi, dtype=dtype)
        return af.AnchorHead.fit(name, lo, hi, anchors=int(rng.integers(2, 40)), dtype=dtype, relative=relative)

    text = f"{what} head of {name} on [{lo:.17g}, {hi:.17g}]" + ", relative" * relative
    return Case(text, dtype, build, lambda a, columns: [call(a, name, columns[0])], relative)


KINDS: dict[str, Callable[[int], Case]] = {
    "formula": formula, "module": module, "tokens": tokens, "head": head, "order": order,
}  # fmt: skip


# ------------------------------------------------------------------------------------- what is done to a network


def casted(net: Any, rng: np.random.Generator) -> str:
    net.to(torch.float64 if net.dtype == torch.float32 else torch.float32)
    return "cast"


def rounded(net: Any, rng: np.random.Generator) -> str:
    dtype = net.dtype
    net.to(torch.bfloat16 if rng.random() < 0.5 else torch.float16).to(dtype)
    return "round trip"


def trained(net: Any, rng: np.random.Generator) -> str:
    size = power(rng, -9, -1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad and rng.random() < 0.8:
                noise = torch.from_numpy(rng.normal(size=tuple(parameter.shape)))
                scale = parameter.abs().mean() if rng.random() < 0.5 else 1.0
                parameter += (size * noise).to(parameter) * scale
    return f"trained by {size:g}"


def mutated(net: Any, rng: np.random.Generator) -> str:
    state = net.state_dict()
    words = []
    for _ in range(int(rng.integers(1, 4))):
        name = str(rng.choice(sorted(state)))
        flat = state[name].reshape(-1)
        i = int(rng.integers(flat.numel()))
        old = float(flat[i])
        ways = {"1%": old * 1.01, "+1": old + 1, "zero": 0.0, "ulp": math.nextafter(old, math.inf), "nan": math.nan,
                "huge": 1e30, "minus": -old, "swap": float(flat[int(rng.integers(flat.numel()))]),
                "bit": old * (1 + 2.0 ** -int(rng.integers(2, 24))), "tiny": old + power(rng, -40, -3)}  # fmt: skip
        way = str(rng.choice(list(ways)))
        with torch.no_grad():
            flat[i] = ways[way]
        words.append(f"{name}[{i}] {way}")
    return "; ".join(words)


VARIANTS: dict[str, tuple[float, Callable[[Any, np.random.Generator], str] | None]] = {
    "as built": (0.45, None),
    "cast": (0.15, casted),
    "round trip": (0.08, rounded),
    "trained": (0.12, trained),
    "mutated": (0.20, mutated),
}


# ---------------------------------------------------------------------------------------------------------- the hunt


@dataclass
class Bad:
    """The worst points of a case: their columns (exact float64 numbers) and error over bound, worst first."""

    points: Tensor
    score: Tensor
    evaluations: int = 0


def ends(net: Any) -> tuple[Tensor, Tensor]:
    wide = net.box.outward(net.dtype)
    low, high = wide.lower.reshape(-1), wide.upper.reshape(-1)
    function = getattr(net, "function", None)
    if function is not None and hasattr(function, "domain"):
        low, high = low.clamp(min=function.domain.lo), high.clamp(max=function.domain.hi)
    return low, high


def computed(net: Any, points: Tensor) -> Tensor:
    """The network's outputs at rows of columns, (point, output), in its dtype."""
    boxes = getattr(net, "boxes", None)
    if boxes is not None:
        out = net.core(points.reshape(-1, *boxes[0].shape))
    else:
        out = net.core(*points.unbind(-1)) if net.box.dim > 1 else net.core(points[:, 0])
    return out.reshape(len(points), -1)


def screen(net: Any, case: Case, bound: float, points: Tensor) -> Tensor:
    """The error at every point in units of the bound; infinite where the network has no number.

    In float64; where that is the network's own dtype, the worst are looked at again in long doubles, if there are any.
    """
    mine = computed(net, points)
    score = ratios(TORCH, mine, case, bound, points)
    if EXTENDED and net.dtype == torch.float64 and points.device.type == "cpu":
        again = torch.topk(score, max(1, len(score) // SECOND_LOOK)).indices
        finer = ratios(LONG, mine[again], case, bound, points[again])
        score = torch.zeros_like(score).index_put_((again,), finer)
    return score


def ratios(a: Numbers, mine: Tensor, case: Case, bound: float, points: Tensor) -> Tensor:
    """Errors of outputs at points, in one of the arithmetics, over the bound."""
    columns = [a.column(points, i) for i in range(points.shape[1])]
    worst = torch.zeros(len(points), dtype=torch.float64, device=points.device)
    with np.errstate(all="ignore"):
        for k, target in enumerate(case.truth(a, columns)):
            if isinstance(a, Extended):
                gap = np.abs(mine[:, k].numpy().astype(np.longdouble) - target)
                gap = gap / np.abs(target) if case.relative else gap
                ratio = torch.from_numpy(np.asarray(gap / (np.longdouble(bound) + np.longdouble(5e-324)), dtype=float))
            else:
                gap = (mine[:, k].double() - target).abs()
                ratio = (gap / torch.as_tensor(target).abs() if case.relative else gap) / (bound + 5e-324)
            ratio = torch.where(torch.isfinite(mine[:, k]), torch.nan_to_num(ratio, nan=0.0, posinf=1e300), torch.inf)
            worst = torch.maximum(worst, ratio)
    return worst


def drawn(low: Tensor, high: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Points of which every coordinate is anywhere, near an end, near zero, or at an end."""
    device = generator.device
    low, high = low.to(device), high.to(device)

    def uniform() -> Tensor:
        return torch.rand((count, len(low)), generator=generator, device=device, dtype=torch.float64)

    pick, u, exponent = uniform(), uniform(), torch.exp2(-60 * uniform())
    plain = low + u * (high - low)
    near_low, near_high = low + exponent * (high - low), high - exponent * (high - low)
    small = torch.where(u < 0.5, low, high) * exponent
    end = torch.where(u < 0.5, low, high)
    calm = uniform()[:, :1] < 0.5  # half of the points are plain in every coordinate
    out = torch.where(pick < 0.2, near_low, torch.where(pick < 0.4, near_high, torch.where(pick < 0.6, small, end)))
    return torch.where(calm | (pick > 0.85), plain, out)


def moved(starts: Tensor, low: Tensor, high: Tensor, count: int, scale: float, generator: torch.Generator) -> Tensor:
    """Points near the given ones: by a share of the box, or by a few units in the last place (scale 0)."""
    device = starts.device
    x = starts[torch.randint(len(starts), (count,), generator=generator, device=device)].double()

    def uniform() -> Tensor:
        return torch.rand(x.shape, generator=generator, device=device, dtype=torch.float64) * 2 - 1

    if scale:
        step = scale * uniform() * (high - low).to(device)
    else:
        bits = 23 if starts.dtype == torch.float32 else 52
        step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=1e-300))) - bits) * torch.round(uniform() * 24)
    return torch.where(uniform() < 0.2, x + step, x)


@torch.no_grad()
def hunt(net: Any, case: Case, bound: float, evaluations: int, seed: int, device: str = "cpu") -> Bad:
    """The worst points that draws and local moves find."""
    generator = torch.Generator(device=device).manual_seed(seed)
    low, high = ends(net)
    dtype, batch = net.dtype, BATCH if device == "cpu" else DEVICE_BATCH
    narrow_low, narrow_high = low.to(dtype).to(device), high.to(dtype).to(device)
    nothing = torch.empty(0, len(low), dtype=dtype, device=device)
    found = Bad(nothing, nothing[:, 0].double())
    scales, kept = (1e-1, 1e-2, 1e-3, 1e-5, 1e-8, 0.0, 0.0), min(KEPT, max(64, evaluations // 50))
    turn = 0
    while found.evaluations < evaluations:
        count = min(batch, evaluations - found.evaluations)
        local = found.evaluations >= 0.4 * evaluations or turn % 4 == 3
        if local and len(found.points):
            wide = moved(found.points[:STARTS], low, high, count, scales[turn % len(scales)], generator)
        else:
            wide = drawn(low, high, count, generator)
        points = torch.minimum(torch.maximum(wide.to(dtype), narrow_low), narrow_high)
        score = screen(net, case, bound, points)
        found.evaluations += count
        turn += 1
        top = torch.topk(score, min(kept, len(score))).indices
        points, score = torch.cat([found.points, points[top]]), torch.cat([found.score, score[top]])
        order = torch.argsort(score, descending=True)
        found.points, found.score = points[order], score[order]
        keep = torch.ones(len(order), dtype=torch.bool, device=device)
        keep[1:] = (found.points[1:] != found.points[:-1]).any(-1)
        found.points, found.score = found.points[keep][:kept], found.score[keep][:kept]
    return found


@dataclass
class Verdict:
    """What ball arithmetic says about points: the largest error over bound, and those that break it."""

    settled: int = 0
    largest: float = 0.0
    broken: list[dict[str, Any]] = field(default_factory=list)
    undecided: int = 0


def judged(case: Case, bound: float, point: list[float], outputs: list[float]) -> tuple[str, float]:
    """'holds', 'broken' or 'undecided', and the error over the bound."""
    bits = BITS
    while True:
        with ctx.workprec(bits):
            wanted = case.truth(BALLS, [arb(v) for v in point])
            ratios = []
            for mine, target in zip(outputs, wanted, strict=True):
                if not math.isfinite(mine):
                    return "broken", math.inf
                gap, limit = abs(arb(mine) - target), arb(bound) * (abs(target) if case.relative else 1)
                ratios.append((gap, limit))
            if all(gap <= limit for gap, limit in ratios):
                return "holds", max(float((gap / limit).mid()) if bound else 0.0 for gap, limit in ratios)
            if any(gap > limit for gap, limit in ratios):
                return "broken", max(float((gap / limit).mid()) if bound else math.inf for gap, limit in ratios)
        if bits > MOST_BITS:  # a bound of 0, say, and a target that is the output in thousands of digits
            equal = all(gap <= limit or gap.contains(0) for gap, limit in ratios)
            return ("holds", 0.0) if equal else ("undecided", math.nan)
        bits *= 4


@torch.no_grad()
def settle(net: Any, case: Case, bound: float, bad: Bad, outputs: Tensor | None = None) -> Verdict:
    """Every kept point in ball arithmetic, against what the network computes there (or against given outputs)."""
    verdict = Verdict()
    mine = (computed(net, bad.points) if outputs is None else outputs).double().tolist()
    for point, out in zip(bad.points.double().tolist(), mine, strict=True):
        word, ratio = judged(case, bound, point, out)
        verdict.settled += 1
        verdict.largest = max(verdict.largest, ratio) if ratio == ratio else verdict.largest
        verdict.undecided += word == "undecided"
        if word == "broken":
            verdict.broken.append({"point": point, "output": out, "ratio": ratio})
    verdict.broken.sort(key=lambda b: -b["ratio"])
    return verdict


# ------------------------------------------------------------------------------------------------------- one seed


@dataclass
class Prepared:
    """A network that says it is certified."""

    kind: str
    seed: int
    case: Case
    variant: str
    net: Any
    bound: float


def prepared(kind: str, seed: int) -> Prepared | str:
    """The certified network of a seed, after what is done to it; or why there is none."""
    rng = np.random.default_rng([9, seed, len(kind)])
    case = KINDS[kind](seed)
    variant = str(rng.choice(list(VARIANTS), p=[share for share, _ in VARIANTS.values()]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            net = case.build()
        except af.AttnforgeError as error:
            return f"not built: {type(error).__name__}"
        change = VARIANTS[variant][1]
        if change is not None:
            net = copy.deepcopy(net)
            variant = change(net, rng)
            try:
                af.certify(net)
            except af.AttnforgeError as error:
                return f"not certified again: {type(error).__name__}"
    bound = net.bound
    return "calibrated" if bound is None else Prepared(kind, seed, case, variant, net, bound)


def examined(kind: str, seed: int, evaluations: int) -> dict[str, Any]:
    """One seed from beginning to end, as a row."""
    start = time.perf_counter()
    row: dict[str, Any] = {"kind": kind, "seed": seed}
    if kind.endswith("estimator"):
        row |= estimated(seed, kind != "estimator", kind == "hostile estimator")
    else:
        found = prepared(kind, seed)
        if isinstance(found, str):
            return {**row, "status": found, "seconds": time.perf_counter() - start}
        bad = hunt(found.net, found.case, found.bound, evaluations, seed)
        verdict = settle(found.net, found.case, found.bound, bad)
        row |= {
            "status": "broken" if verdict.broken else "holds", "text": found.case.text, "variant": found.variant,
            "dtype": str(found.net.dtype)[6:], "bound": found.bound, "evaluations": bad.evaluations,
            "settled": verdict.settled, "undecided": verdict.undecided, "ratio": verdict.largest,
            "broken": verdict.broken[:3], "points broken": len(verdict.broken),
        }  # fmt: skip
    return {**row, "seconds": time.perf_counter() - start}


# ------------------------------------------------------------------------------------------------------- estimators


def solved(matrix: list[list[Any]], right: list[Any]) -> list[Any]:
    found = arb_mat(matrix).solve(arb_mat([[v] for v in right]))
    return [found[i, 0] for i in range(len(right))]


def newton(start: list[float], derivatives: Callable[[list[Any]], tuple[list[Any], list[list[Any]]]]) -> list[Any]:
    """A zero of a gradient to 60 digits, from a good start; balls stay points, only the last step says how far."""
    w = [arb(v) for v in start]
    for _ in range(80):
        gradient, hessian = derivatives(w)
        step = solved(hessian, gradient)
        w = [(v - s).mid() for v, s in zip(w, step, strict=True)]
        if max(float(abs(s).upper()) for s in step) <= 1e-45 * (1e-3 + max(float(abs(v)) for v in w)):
            return w
    raise ArithmeticError("Newton's method has not converged")


def design(X: np.ndarray, intercept: bool) -> list[list[Any]]:
    return [[*(arb(float(v)) for v in row), *([arb(1)] if intercept else ())] for row in X]


def least_squares(X: np.ndarray, y: np.ndarray, alpha: float) -> list[Any]:
    """The weights, without intercept, of a least squares problem on centred data."""
    n, d = X.shape
    rows, labels = design(X, False), [arb(float(v)) for v in y]
    means, middle = [sum((r[j] for r in rows), arb(0)) / n for j in range(d)], sum(labels, arb(0)) / n
    rows = [[v - m for v, m in zip(row, means, strict=True)] for row in rows]
    matrix = [[sum((r[i] * r[j] for r in rows), arb(0)) + (arb(alpha) if i == j else 0) for j in range(d)]
              for i in range(d)]  # fmt: skip
    right = [sum((r[i] * (v - middle) for r, v in zip(rows, labels, strict=True)), arb(0)) for i in range(d)]
    return solved(matrix, right)


def likelihood(X: np.ndarray, y: np.ndarray, penalty: Any, start: list[float], logistic: bool) -> list[Any]:
    """The weights and the intercept of a logistic or Poisson regression with |w|^2 penalty / 2 beside the mean loss."""
    rows, n, d = design(X, True), len(X), X.shape[1]

    def derivatives(w: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        gradient = [penalty * v for v in w[:d]] + [arb(0)]
        hessian = [[penalty if i == j and i < d else arb(0) for j in range(d + 1)] for i in range(d + 1)]
        for row, label in zip(rows, y, strict=True):
            z = sum((v * x for v, x in zip(w, row, strict=True)), arb(0))
            mean = 1 / (1 + (-z).exp()) if logistic else z.exp()
            weight = mean * (1 - mean) if logistic else mean
            for i in range(d + 1):
                gradient[i] += (mean - arb(float(label))) * row[i] / n
                for j in range(d + 1):
                    hessian[i][j] += weight * row[i] * row[j] / n
        return gradient, hessian

    return newton(start, derivatives)


def sparse(X: np.ndarray, y: np.ndarray, model: Any, alpha: float, share: float) -> list[Any]:
    """The weights of a lasso or an elastic net: those that the model keeps, if they pass the optimality conditions."""
    n, d = X.shape
    rows, labels = design(X, False), [arb(float(v)) for v in y]
    means, middle = [sum((r[j] for r in rows), arb(0)) / n for j in range(d)], sum(labels, arb(0)) / n
    rows = [[v - m for v, m in zip(row, means, strict=True)] for row in rows]
    labels = [v - middle for v in labels]
    own, l1, l2 = np.ravel(model.coef_), arb(alpha) * arb(share), arb(alpha) * (1 - arb(share))
    live = [j for j in range(d) if own[j] != 0]
    found = [arb(0)] * d
    if live:
        matrix = [[sum((r[i] * r[j] for r in rows), arb(0)) / n + (l2 if i == j else 0) for j in live] for i in live]
        right = [sum((r[i] * v for r, v in zip(rows, labels, strict=True)), arb(0)) / n - l1 * float(np.sign(own[i]))
                 for i in live]  # fmt: skip
        for j, value in zip(live, solved(matrix, right), strict=True):
            found[j] = value
    rest = [v - sum((w * x for w, x in zip(found, r, strict=True)), arb(0)) for r, v in zip(rows, labels, strict=True)]
    for j in range(d):
        slope = sum((r[j] * e for r, e in zip(rows, rest, strict=True)), arb(0)) / n
        if not (found[j] * float(np.sign(own[j])) > 0 if j in live else abs(slope) < l1):
            raise ArithmeticError("other columns are in use at the optimum")
    return found


def huber(X: np.ndarray, y: np.ndarray, model: Any) -> list[Any]:
    """The weights of Huber's regression with its scale: sum(s + s H((y - z)/s)) + 1e-4 |w|^2, by Newton's method.

    Columns and labels are divided by their sizes, for the conditioning of the search.
    """
    n, d = X.shape
    size = [2.0 ** round(math.log2(float(np.abs(X[:, j]).max()) or 1.0)) for j in range(d)]
    unit = 2.0 ** round(math.log2(float(np.abs(y).max()) or 1.0))
    rows, labels, eps = design(X / size, True), [arb(float(v)) for v in y / unit], arb(1.35)
    ridge = [arb(1e-4) * arb(unit) / arb(s) ** 2 for s in size]
    start = [*(np.ravel(model.coef_) * size / unit), float(model.intercept_) / unit, float(model.scale_) / unit]

    def derivatives(w: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        *weights, sigma = w
        gradient = [2 * r * v for r, v in zip(ridge, weights, strict=False)] + [arb(0), arb(n)]
        hessian = [[2 * ridge[i] if i == j and i < d else arb(0) for j in range(d + 2)] for i in range(d + 2)]
        for row, label in zip(rows, labels, strict=True):
            u = (sum((v * x for v, x in zip(weights, row, strict=True)), arb(0)) - label) / sigma
            inside = abs(u) < eps
            clipped = u if inside else eps if u > 0 else -eps
            for i in range(d + 1):
                gradient[i] += 2 * clipped * row[i]
            gradient[d + 1] -= clipped * clipped
            if inside:
                full = [*row, -u]
                for i in range(d + 2):
                    for j in range(d + 2):
                        hessian[i][j] += 2 * full[i] * full[j] / sigma
        return gradient, hessian

    found = newton([float(v) for v in start], derivatives)
    return [v * arb(unit) / arb(s) for v, s in zip(found[:d], size, strict=True)]


def hostile(X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Columns that are constant, equal, nearly so or of any scale, rows that repeat, more columns than rows."""
    n, d = X.shape
    for _ in range(int(rng.integers(1, 4))):
        i, j, k = int(rng.integers(d)), int(rng.integers(d)), int(rng.integers(n))
        what = choose(rng, constant=1, equal=1, nearly=1, scale=2, rows=1, zero=1, outlier=1)
        if what in ("constant", "zero"):
            X[:, i] = 0.0 if what == "zero" else rng.normal()
        elif what in ("equal", "nearly"):
            X[:, i] = X[:, j] * (1 + (what == "nearly") * 1e-9 * rng.normal(size=n))
        elif what == "scale":
            X[:, i] *= 10.0 ** rng.uniform(-30, 30)
        elif what == "rows":
            X[k:] = X[k]
        else:
            X[k, i] *= 1e6
    return X


def estimated(seed: int, wide: bool = False, hostility: bool = False) -> dict[str, Any]:
    """One problem: the estimator's distance from the optimum, or a kernel mean's from its definition, against both
    bounds. The wide ones have columns and labels of any scale, and are sparse and robust regressions too; the hostile
    ones are small, and degenerate in every way."""
    from attnforge import incontext as ic

    wide = wide or hostility
    rng = np.random.default_rng([7 if hostility else 6 if wide else 5, seed])
    n, d, most = int(rng.integers(2, 24)), int(rng.integers(1, 4)), 9 if wide else 3
    if hostility:
        n, d, most = int(rng.integers(1, 8)), int(rng.integers(1, 7)), 1
    X = rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-most, most, d)
    middle, spread = rng.normal(size=d), np.maximum(X.std(0), 1e-300)
    exponent = np.log10(spread) + rng.uniform(-3, 4) if wide else rng.uniform(-3, 3, d)
    X = X + middle * 10.0**exponent
    if rng.random() < 0.15:
        X[:, 0] = np.round(X[:, 0])
    X = hostile(X, rng) if hostility else X
    z = (X - X.mean(0)) / np.maximum(X.std(0), 1e-12) @ rng.normal(size=d) + 0.5 * rng.normal(size=n)
    unit = 10.0 ** (rng.uniform(-5, 5) * (4 if wide else 1))
    dtype = str(rng.choice(["float32", "float64"]))
    options: dict[str, Any] = {"dtype": dtype} | ({"max_iter": int(rng.integers(2, 200))} if rng.random() < 0.3 else {})
    more = {"lasso": 2.0, "elastic": 2.0, "huber": 3.0} if wide else {}
    what = choose(rng, linear=1, ridge=2, logistic=2, poisson=2, mean=3, kernel=2, **more)
    alpha, gamma = power(rng, -4, 2), power(rng, -3, 3)
    text = f"{what} on {n} x {d}, alpha {alpha:g}, gamma {gamma:g}, {options}"
    row: dict[str, Any] = {"text": text, "dtype": dtype, "variant": "fitted"}
    y = unit * z if what not in ("logistic", "poisson") else (z > np.median(z)).astype(float)
    if what == "poisson":
        y = rng.poisson(np.exp(np.clip(0.7 * z + 1, -5, 8))).astype(float)
    if what in ("lasso", "elastic"):
        alpha *= float(np.abs((X - X.mean(0)).T @ (y - y.mean())).max()) / n * 10.0 ** rng.uniform(-3, -2)
    if what == "huber":
        y[rng.integers(n)] += 30 * unit
    if what == "kernel" or what == "mean":
        X = (X - X.mean(0)) / np.maximum(X.std(0), 1e-12) * 10.0 ** rng.uniform(-1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = {
                "linear": lambda: ic.LinearRegression(**options), "ridge": lambda: ic.Ridge(alpha, **options),
                "logistic": lambda: ic.LogisticRegression(alpha, **options),
                "poisson": lambda: ic.PoissonRegressor(alpha=alpha, **options),
                "mean": lambda: ic.KernelRegressor(method="mean", gamma=gamma, dtype=dtype),
                "kernel": lambda: ic.KernelRegressor(gamma=gamma, alpha=alpha, **options),
                "lasso": lambda: ic.Lasso(alpha, **options), "elastic": lambda: ic.ElasticNet(alpha, **options),
                "huber": lambda: ic.HuberRegressor(alpha=1e-4, **options),
            }[what]().fit(X, y)  # fmt: skip
        except (af.AttnforgeError, ValueError) as error:  # scikit-learn refuses, say, labels of one class
            return {**row, "status": f"not built: {type(error).__name__}"}
        certificate = model.certificate_
        if certificate.kind != "certified":
            return {**row, "status": "calibrated"}
        with ctx.workprec(BITS * 2):
            try:
                found, count = measured(what, model, X, y, alpha, gamma, rng)
            except ArithmeticError as error:  # a singular matrix is one
                return {**row, "status": f"no reference: {error}"}
            limits = (certificate.bound, certificate.posterior)
            broken = [{"distance": float(found), "limit": limit} for limit in limits if not found <= arb(limit)]
            ratio = max(float(found / arb(limit)) for limit in limits)
    return row | {
        "status": "broken" if broken else "holds", "bound": certificate.bound, "evaluations": count, "settled": count,
        "undecided": 0, "ratio": ratio, "broken": broken, "points broken": len(broken),
    }  # fmt: skip


def measured(
    what: str, model: Any, X: np.ndarray, y: np.ndarray, alpha: float, gamma: float, rng: np.random.Generator
) -> tuple[Any, int]:
    """The distance that the certificate speaks of, as a ball, and at how many points it was looked at."""
    n, d = X.shape
    if what in ("mean", "kernel"):
        exact_rows = design(X, False)
        unit = arb(model.scaling_.y_scale)

        def kernel(row: list[Any], at: Any = 0) -> list[Any]:
            away = [sum(((p - q) ** 2 for p, q in zip(row, other, strict=True)), arb(0)) for other in exact_rows]
            least = min(away, key=float) if at is None else arb(0)
            return [(arb(gamma) * (least - a)).exp() for a in away]

        if what == "kernel":
            matrix = [[k + (arb(alpha) if i == j else 0) for j, k in enumerate(kernel(row))]
                      for i, row in enumerate(exact_rows)]  # fmt: skip
            exact = solved(matrix, [arb(float(v)) for v in y])
            own = np.ravel(model.dual_coef_)
            total = sum(((arb(float(o)) - e) ** 2 for o, e in zip(own, exact, strict=True)), arb(0))
            return total.sqrt() / unit, 1
        reach, middle = float(model.scaling_.x_scale[0]) * (1 - 1e-4), X.mean(0)
        away = rng.normal(size=(400, d))
        away *= reach * rng.random((400, 1)) ** 0.5 / np.linalg.norm(away, axis=1, keepdims=True)
        new = np.concatenate([middle + away, X[np.linalg.norm(X - middle, axis=1) < reach]])
        worst = arb(0)
        for row, mine in zip(design(new, False), np.ravel(model.predict(new)), strict=True):
            weights = kernel(row, None)
            top = sum((w * arb(float(v)) for w, v in zip(weights, y, strict=True)), arb(0))
            gap = abs(arb(float(mine)) - top / sum(weights, arb(0))) / unit
            worst = gap if gap > worst else worst
        return worst, len(new)
    if what in ("lasso", "elastic"):
        exact, unit = sparse(X, y, model, alpha, 1.0 if what == "lasso" else 0.5), arb(model.scaling_.y_scale)
    elif what == "huber":
        exact, unit = huber(X, y, model), arb(model.scaling_.y_scale)
    elif what in ("linear", "ridge"):
        exact = least_squares(X, y, alpha if what == "ridge" else 0.0)
        unit = arb(model.scaling_.y_scale)
    else:
        start = [*np.ravel(model.coef_).tolist(), float(np.ravel(model.intercept_)[0])]
        penalty = arb(alpha) if what == "poisson" else 1 / (arb(alpha) * n)
        exact, unit = likelihood(X, y, penalty, start, what == "logistic")[:d], arb(1)
        unit = arb(1) if what == "poisson" else arb(float(model.scaling_.y_scale))
    own = np.ravel(model.coef_)
    scale = np.ravel(model.scaling_.x_scale)
    total = sum((((arb(float(o)) - e) * arb(float(s)) / unit) ** 2 for o, e, s in zip(own, exact, scale, strict=True)),
                arb(0))  # fmt: skip
    return total.sqrt(), 1


# ------------------------------------------------------------------------------------------------------ many seeds


ALL = (*KINDS, "estimator", "wide estimator", "hostile estimator")


def worker(task: tuple[str, int, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    kind, seed, evaluations = task
    try:
        return examined(kind, seed, evaluations)
    except Exception as error:  # a crash of what is refereed is a finding, not the end of the run
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
        return {"kind": kind, "seed": seed, "status": "crashed", "error": detail, "seconds": 0.0}


def tasks(kinds: Sequence[str], begin: dict[str, int], evaluations: int) -> Iterator[tuple[str, int, int]]:
    """Seeds of all kinds in turn, without end."""
    turn = 0
    while True:
        for kind in kinds:
            yield kind, begin[kind] + turn, evaluations
        turn += 1


def empty() -> dict[str, Any]:
    return {"parts": [], "kinds": {}, "broken": [], "crashed": [], "tight": []}


def entered(data: dict[str, Any], row: dict[str, Any]) -> None:
    """Adds one row to the record."""
    kind = data["kinds"].setdefault(row["kind"], {
        "seeds": 0, "certified": 0, "evaluations": 0, "settled": 0, "undecided": 0, "broken": 0, "crashed": 0,
        "largest ratio": 0.0, "next seed": 0, "outcomes": {}, "variants": {},
    })  # fmt: skip
    kind["seeds"] += 1
    kind["next seed"] = max(kind["next seed"], row["seed"] + 1 if row["seed"] < PACKED else 0)
    kind["outcomes"] = dict(sorted((Counter(kind["outcomes"]) + Counter([row["status"]])).items()))
    kept = {key: row[key] for key in ("kind", "seed", "text", "dtype", "variant", "bound", "ratio") if key in row}
    if row["status"] == "crashed":
        kind["crashed"] += 1
        data["crashed"].append({key: row[key] for key in ("kind", "seed", "error")})
    if row["status"] not in ("holds", "broken"):
        return
    kind["certified"] += 1
    for key in ("evaluations", "settled", "undecided"):
        kind[key] += row[key]
    variant = row["variant"].split(" by ")[0] if not row["variant"].count("[") else "mutated"
    kind["variants"] = dict(sorted((Counter(kind["variants"]) + Counter([variant])).items()))
    if row["status"] == "broken":
        kind["broken"] += 1
        data["broken"].append({**kept, "points": row["points broken"], "worst": row["broken"][0]})
        return
    kind["largest ratio"] = max(kind["largest ratio"], row["ratio"])
    data["tight"] = sorted([*data["tight"], kept], key=lambda r: -r["ratio"])[:TIGHT]


def commit() -> str:
    """Which sources were refereed."""
    try:
        return subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def plain(value: Any) -> Any:
    """JSON has no infinity: what is not finite becomes text."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def written(data: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    text = json.dumps(plain(data), indent=1, allow_nan=False)
    RESULTS.write_text(text + "\n", encoding="utf-8", newline="\n")


def refereed(kinds: Sequence[str], minutes: float, jobs: int, evaluations: int) -> dict[str, Any]:
    """One part: as many seeds as the time allows, added to the record, which is written every minute."""
    data = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else empty()
    begin = {kind: data["kinds"].get(kind, {}).get("next seed", 0) for kind in kinds}
    part: dict[str, Any] = {
        "commit": commit(), "started": time.strftime("%Y-%m-%d %H:%M"), "minutes": 0.0, "jobs": jobs,
        "processor": platform.processor() or platform.machine(), "torch": torch.__version__, "evaluations": 0,
        "seeds": {kind: [first, first] for kind, first in begin.items()},
    }  # fmt: skip
    data["parts"].append(part)
    start = saved = time.monotonic()
    endless, waiting = tasks(kinds, begin, evaluations), []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        while (now := time.monotonic()) < start + 60 * minutes or waiting:
            while len(waiting) < jobs + 1 and now < start + 60 * minutes:
                waiting.append(pool.apply_async(worker, (next(endless),)))
            done = [w for w in waiting if w.ready()]
            waiting = [w for w in waiting if w not in done]
            for row in (w.get() for w in done):
                entered(data, row)
                part["evaluations"] += row.get("evaluations", 0)
                ends_ = part["seeds"][row["kind"]]
                ends_[1] = max(ends_[1], row["seed"] + 1)
                if row["status"] in ("broken", "crashed"):
                    sys.stderr.write(f"{line(row)}\n")
            part["minutes"] = round((now - start) / 60, 1)
            if done and now > saved + 60:
                saved = now
                written(data)
            time.sleep(0.02)
    written(data)
    return data


# --------------------------------------------------------------------------------------------- with an accelerator


class Core(nn.Module):
    """What a compiled network computes, without the rest of it: layers, and where its inputs and outputs stand."""

    def __init__(self, entry: dict[str, Any], tensors: dict[str, Tensor]):
        super().__init__()
        layers = []
        for i, groups in enumerate(entry["layers"]):
            given = [{key.split(".")[-1]: t for key, t in tensors.items() if key.startswith(f"layers.{i}.groups.{j}.")}
                     for j in range(len(groups))]  # fmt: skip
            made = [Heads(scope, causal=causal, **g) for (scope, causal), g in zip(groups, given, strict=True)]
            layers.append(AttentionLayer(made, S=tensors.get(f"layers.{i}.S"), s=tensors.get(f"layers.{i}.s")))
        self.network = AttentionOnly(layers)
        self.register_buffer("constants", tensors.get("constants"))
        self.entry, self.box = entry, af.Box.from_json(entry["box"])
        self.boxes = (self.box,)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def core(self, x: Tensor) -> Tensor:
        count = len(x)
        state = x.reshape(count, self.entry["tokens"], -1)
        if self.constants is not None:
            state = torch.cat([state, self.constants.expand(count, *self.constants.shape)], -1)
        out = self.network(state)
        return out if self.entry["rows"] == "all" else out[..., :1, :]


def packed(folder: Path, kinds: Sequence[str], count: int, first: int) -> None:
    """Saves the certified networks of some seeds of each kind, for another machine to hunt on."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    listed = json.loads((folder / "manifest.json").read_text("utf-8")) if (folder / "manifest.json").exists() else []
    known = {(entry["kind"], entry["seed"]) for entry in listed}
    for seed in range(first, first + count):
        for kind in kinds:
            found = "known" if (kind, seed) in known else prepared(kind, seed)
            if isinstance(found, str):
                continue
            net, program = found.net, found.net.program
            tensors = {key: t.contiguous() for key, t in net.network.state_dict().items()}
            if net.constants is not None:
                tensors["constants"] = net.constants
            save_file(tensors, str(folder / f"{kind}-{seed}.safetensors"))
            layers = [[(group.scope, group.causal) for group in layer.groups] for layer in net.network.layers]
            listed.append({
                "kind": kind, "seed": seed, "text": found.case.text, "variant": found.variant, "bound": found.bound,
                "dtype": str(net.dtype)[6:], "box": net.box.to_json(), "layers": layers, "tokens": program.tokens,
                "rows": program.output_rows,
            })  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(listed, indent=0), encoding="utf-8")


def unpacked(folder: Path, entry: dict[str, Any]) -> Core:
    from safetensors.torch import load_file

    return Core(entry, load_file(str(folder / f"{entry['kind']}-{entry['seed']}.safetensors")))


def hunted(folder: Path, out: Path, device: str, evaluations: int, minutes: float) -> None:
    """Looks for bad points of the networks of a folder, and writes those and what the device computed there."""
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    done: list[dict[str, Any]] = []
    stop = time.monotonic() + 60 * minutes
    for entry in json.loads((folder / "manifest.json").read_text("utf-8")):
        if time.monotonic() > stop:
            break
        case, name = KINDS[entry["kind"]](entry["seed"]), f"{entry['kind']}-{entry['seed']}"
        if case.text != entry["text"]:  # another version draws other numbers
            done.append({**entry, "evaluations": 0, "score": 0.0})
            continue
        net = unpacked(folder, entry).to(device)
        bad = hunt(net, case, entry["bound"], evaluations, entry["seed"] + 1, device)
        with torch.no_grad():
            kept[f"{name}/outputs"] = computed(net, bad.points).cpu().contiguous()
        kept[f"{name}/points"] = bad.points.cpu().contiguous()
        done.append({**entry, "evaluations": bad.evaluations, "score": float(bad.score[0])})
    out.mkdir(parents=True, exist_ok=True)
    save_file(kept, str(out / "points.safetensors"))
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    record = {"device": where, "torch": torch.__version__, "entries": done}
    (out / "hunted.json").write_text(json.dumps(record, indent=0), encoding="utf-8")
    total = sum(entry["evaluations"] for entry in done)
    over = [f"{e['kind']} {e['seed']}" for e in done if e["score"] > 1]
    sys.stdout.write(f"{len(done)} networks, {total:,} evaluations on {where}; to be settled first: {over}\n")


def judged_folder(folder: Path, out: Path) -> dict[str, Any]:
    """Settles what another machine found: the networks as this machine computes them, and as that one did."""
    from safetensors.torch import load_file

    data = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else empty()
    record, points = json.loads((out / "hunted.json").read_text("utf-8")), load_file(str(out / "points.safetensors"))
    there, total = {"settled": 0, "broken": 0, "largest ratio": 0.0, "which": []}, 0
    for entry in record["entries"]:
        if not entry["evaluations"]:
            continue
        name, start = f"{entry['kind']}-{entry['seed']}", time.perf_counter()
        case, net = KINDS[entry["kind"]](entry["seed"]), unpacked(folder, entry)
        bad = Bad(points[f"{name}/points"], torch.zeros(0), entry["evaluations"])
        here = settle(net, case, entry["bound"], bad)
        away = settle(net, case, entry["bound"], bad, points[f"{name}/outputs"])
        entered(data, {
            **{key: entry[key] for key in ("kind", "seed", "text", "variant", "bound", "dtype", "evaluations")},
            "status": "broken" if here.broken else "holds", "settled": here.settled, "undecided": here.undecided,
            "ratio": here.largest, "broken": here.broken[:3], "points broken": len(here.broken),
            "seconds": time.perf_counter() - start,
        })  # fmt: skip
        total += entry["evaluations"]
        there["settled"] += away.settled
        there["broken"] += bool(away.broken)
        there["which"] += [[entry["kind"], entry["seed"], away.largest]] if away.broken else []
        there["largest ratio"] = max(there["largest ratio"], away.largest)
    data["parts"].append({
        "commit": commit(), "device": record["device"], "torch": record["torch"], "evaluations": total,
        "networks": len(record["entries"]), "outputs of the device": there,
    })  # fmt: skip
    written(data)
    return data


def line(row: dict[str, Any]) -> str:
    detail = row.get("error") or row.get("text", "")
    ratio = f"{row['ratio']:.4g} of {row['bound']:.3g}" if "ratio" in row else ""
    name = f"{row['kind']} {row['seed']}"
    return f"{name:16} {row['status']:10} {row['seconds']:6.2f}s {ratio:24} {row.get('variant', '')} | {detail}"


def markdown(data: dict[str, Any]) -> str:
    head_ = ["kind", "seeds", "certified", "evaluations", "settled in balls", "largest error / bound", "broken"]
    lines = [head_, ["---"] * len(head_)]
    for name, kind in data["kinds"].items():
        lines.append([name, *(f"{kind[k]:,}" for k in ("seeds", "certified", "evaluations", "settled")),
                      f"{kind['largest ratio']:.4f}", str(kind["broken"])])  # fmt: skip
    total = sum(kind["evaluations"] for kind in data["kinds"].values())
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    undecided = sum(kind["undecided"] for kind in data["kinds"].values())
    return f"{table}\n\n{total:,} evaluations; {len(data['crashed'])} crashes, {undecided} points undecided"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes")
    parser.add_argument("--kinds", default=",".join(ALL), help=f"of {', '.join(ALL)}")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS, help="points looked at for one network")
    parser.add_argument("--seeds", help="FROM:TO: these seeds, here and now; nothing is written")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="build and save networks for --hunt; --seeds")
    parser.add_argument("--hunt", type=Path, metavar="FOLDER", help="look for bad points of the networks of a folder")
    parser.add_argument("--settle", type=Path, metavar="FOLDER", help="judge what --hunt wrote to --out")
    parser.add_argument("--out", type=Path, default=Path("out/soundness"), help="where --hunt writes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where --hunt runs")
    parser.add_argument("--markdown", action="store_true", help="print the table of all runs so far")
    wanted = parser.parse_args()
    kinds = wanted.kinds.split(",")
    if wanted.markdown:
        sys.stdout.write(markdown(json.loads(RESULTS.read_text("utf-8"))) + "\n")
        return
    first, last = map(int, wanted.seeds.split(":")) if wanted.seeds else (PACKED, PACKED + 100)
    if wanted.pack:
        return packed(wanted.pack, [kind for kind in kinds if kind in KINDS and kind != "head"], last - first, first)
    if wanted.hunt:
        return hunted(wanted.hunt, wanted.out, wanted.device, wanted.evaluations, wanted.minutes)
    if wanted.settle:
        data = judged_folder(wanted.settle, wanted.out)
    elif wanted.seeds:
        data = empty()
        for kind in kinds:
            for seed in range(first, last):
                row = worker((kind, seed, wanted.evaluations))
                entered(data, row)
                sys.stdout.write(line(row) + "\n")
    else:
        data = refereed(kinds, wanted.minutes, wanted.jobs, wanted.evaluations)
    sys.stdout.write(markdown(data) + "\n")
    if data["broken"]:
        named = ", ".join(f"{row['kind']} {row['seed']}" for row in data["broken"])
        raise SystemExit(f"{len(data['broken'])} certificates are broken: {named}")


if __name__ == "__main__":
    main()
