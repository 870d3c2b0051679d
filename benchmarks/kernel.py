"""The kernel in numbers: how many networks it accepts, how its bounds compare with those of the analysis, how long it
takes; and whether anything that is changed in a file escapes it.

python benchmarks/kernel.py             proves the benchmark's formulas, the demonstration's networks, every family of
                                        heads, networks made from samples and token programs, in float32 and float64;
                                        writes results/kernel.json
python benchmarks/kernel.py --resume    the same, and goes on where it was stopped
python benchmarks/kernel.py --quick     a few formulas
python benchmarks/kernel.py --only head one kind of network; the results keep the others
python benchmarks/kernel.py --names distance ramp "fast gelu"
                                        networks of such names, in both dtypes; the results keep the others
python benchmarks/kernel.py --mutants   changes stored numbers, headers, derivations: each must be covered or refused;
                                        goes on where it was stopped
python benchmarks/kernel.py --fill      puts the table of mutants of the last run into docs/kernel.md
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from formulas import FORMULAS  # noqa: E402
from mutants import (  # noqa: E402
    EDITS,
    changed_at,
    chosen_for,
    edited,
    envelope_error,  # noqa: F401
    file_mutants,
    leaves_of,
    module_of,
    network_error,
    verdict,
)  # fmt: skip
from readme import filled  # noqa: E402
from resume import Parts  # noqa: E402

import attnforge as af  # noqa: E402
from attnforge import rasp, theorems  # noqa: E402
from attnforge.certificates.certified import WRONG, CertifiedModule  # noqa: E402
from attnforge.compiler.compiled import CompiledNetwork  # noqa: E402
from attnforge.compiler.derivation import derive  # noqa: E402
from attnforge.compiler.pipeline import compile_program  # noqa: E402
from attnforge.demo import TARGETS  # noqa: E402
from attnforge.errors import AttnforgeError, CertificateError  # noqa: E402
from attnforge.export.plain.build import to_plain  # noqa: E402
from attnforge.export.plain.transformer import PlainTransformer  # noqa: E402
from attnforge.groundtruth import vary  # noqa: E402
from attnforge.heads.anchor.head import AnchorHead  # noqa: E402
from attnforge.heads.chain.head import ChainHead  # noqa: E402
from attnforge.heads.choose import FAST  # noqa: E402
from attnforge.heads.fast.activation import FastActivation  # noqa: E402
from attnforge.heads.gate.head import GateHead  # noqa: E402
from attnforge.heads.norm.head import NormHead  # noqa: E402
from attnforge.heads.product.head import ProductHead  # noqa: E402
from attnforge.heads.token.head import TokenHead  # noqa: E402
from attnforge.kernel.file import Saved, Tensor, parse  # noqa: E402
from attnforge.kernel.prove import prove  # noqa: E402
from attnforge.kernel.scalar import Cell, error_on  # noqa: E402
from attnforge.programs.positions import prepared  # noqa: E402
from attnforge.programs.program import Builder, Program  # noqa: E402
from attnforge.rasp.network.compiled import CompiledProgram  # noqa: E402
from attnforge.rasp.network.derivation import derive as words_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "kernel.json"
PAGE = ROOT / "docs" / "kernel.md"
GOALS = {"float32": (torch.float32, 1e-3), "float64": (torch.float64, 1e-6)}
LOOSER = 1000.0  # times the goal, for formulas that the dtype does not allow so well
QUICK = ("gauss", "friction", "coulomb", "distance", "corner", "clipped", "sinc", "barometric")
ANCHORS = (
    ("sin", -3, 3), ("exp", -2, 2), ("gelu", -4, 4), ("sqrt", 0, 4), ("log", 0.5, 8), ("reciprocal", 0.5, 4),
    ("tanh", -3, 3), ("softplus", -5, 5), ("square", -2, 2), ("erf", -2, 2),
)  # fmt: skip
RELATIVE = ("exp", -2, 2), ("sqrt", 0.5, 4), ("log", 1.5, 8), ("reciprocal", 0.5, 4)
GATES: dict[str, Callable[..., GateHead]] = {
    "relu": functools.partial(GateHead.relu, -1, 1), "abs": functools.partial(GateHead.abs, -2, 3),
    "leaky relu": functools.partial(GateHead.leaky_relu, -1, 1), "hard tanh": GateHead.hard_tanh,
    "sigmoid": functools.partial(GateHead.sigmoid, -4, 4), "tanh gate": functools.partial(GateHead.tanh, -4, 4),
    "silu": functools.partial(GateHead.silu, -4, 4), "ramp": functools.partial(GateHead.ramp, -1, 2, lo=-3, hi=4),
    "piecewise": functools.partial(GateHead.piecewise_linear, [-1, 0, 0.5, 2], [1, 0, 2, -1]),
    "larger number": functools.partial(GateHead.max, -2, 3), "smaller number": functools.partial(GateHead.min, 5, 6),
}  # fmt: skip
SQUARE = functools.partial(AnchorHead.fit, potential="square", fast=True)
TABLES = {  # anchors that are read with one exponential, as one quotient, through a window and by pairs
    "sine": functools.partial(SQUARE, "sin", -3, 3, anchors=16),
    "gelu": functools.partial(SQUARE, "gelu", -4, 4, anchors=24),
    "even sine": functools.partial(SQUARE, "sin", -3, 3, anchors=40),
    "exp": functools.partial(SQUARE, "exp", -2, 2, anchors=31),
    "relative exp": functools.partial(SQUARE, "exp", -2, 2, anchors=15, relative=True),
    "window": functools.partial(SQUARE, "sin", -3, 3, anchors=60, kappa=0.5),
    "cold window": functools.partial(SQUARE, "sin", -3, 3, anchors=40, kappa=8.0),
    "pair": functools.partial(SQUARE, "sin", -3, 3, anchors=40, kappa=40.0, temperature="cold"),
}  # fmt: skip
WEIGHTS = [1.0, -2.0]
RAMPS: dict[str, Callable[[torch.Tensor], theorems.Ramp]] = {
    "paper": lambda w: theorems.ramp(w, 0.3, -1, 1, 16, radius=2), "tokens": lambda w: theorems.ramp(
        w, 0.3, -1, 1, 16, radius=2, form="tokens"),
    "causal": lambda w: theorems.ramp(w, 0.3, -1, 1, 16, radius=2, form="tokens", causal=True, channels=2),
    "warm": lambda w: theorems.ramp(w, 0.3, -1, 1, 16, radius=2, variant="warm"),
    "gate": lambda w: theorems.ramp(w, 0.3, -1, 1, 16, radius=2, variant="gate"),
    "leaky": lambda w: theorems.leaky_relu(w, 0.3, 2.0, 16),
    "heads": lambda w: theorems.ramp_heads(w, 0.3, -1, 1, 4, 10, radius=2),
    "warm heads": lambda w: theorems.ramp_heads(w, 0.3, -1, 1, 4, 10, radius=2, variant="warm", causal=True),
    "channels": lambda w: theorems.ramp(w, 0.3, -1, 1, 9, radius=1, G=[0] * 4 + [1, 1, 2, 2, 0]),
    "channels of tokens": lambda w: theorems.ramp(
        w, 0.3, -1, 1, 9, radius=1, form="tokens", causal=True, G=[k % 2 for k in range(9)]),
    "leaky channels": lambda w: theorems.leaky_relu(w, 0.3, 1.0, 11, G=[0] * 5 + [1] * 6),
    "weights of their own": lambda w: theorems.ramp(torch.stack([w, w + 1]), [0.3, 0.1], -1, 1, 16, radius=2),
}  # fmt: skip
EFFORT = 200  # parts of the box that the derivation of a mutant looks at: norms need a hundred


# -- acceptance --------------------------------------------------------------------------------------------------------

Made = Iterator[tuple[str, Callable[[], CertifiedModule | None]]]  # a name, and what makes the network, if it does


def _formula(formula: str, box: af.Box, eps: float, dtype: torch.dtype) -> CertifiedModule | None:
    """A formula as tight as asked for, or as the dtype allows."""
    for looser in (1.0, LOOSER):
        try:
            return af.compile(formula, box, eps * looser, dtype=dtype)
        except AttnforgeError:
            continue
    return None


def formulas() -> Made:
    """The benchmark's formulas, in both dtypes."""
    for goal, (dtype, eps) in GOALS.items():
        for name, (formula, box) in FORMULAS.items():
            yield f"{name}, {goal}", functools.partial(_formula, formula, af.Box(**box), eps, dtype)


def modules() -> Made:
    """The demonstration's networks, and one for each operation over tokens."""
    for target in TARGETS:
        yield target.title, lambda: af.compile(target.make(), target.box, target.eps)  # noqa: B023
    for goal, (dtype, _) in GOALS.items():
        for name in (*TOKENS, "mlp"):
            yield f"{name}, {goal}", functools.partial(subject, name, dtype)


def heads() -> Made:
    """Heads on their own; they take no time to make."""
    for name, head in _heads():
        yield name, functools.partial(_itself, head)


def _itself(head: CertifiedModule) -> CertifiedModule:
    return head


def _heads() -> Iterator[tuple[str, CertifiedModule]]:
    """Heads on their own, of every family, in both dtypes: anchors, gates, products, fast activations, tokens."""
    for goal, (dtype, _) in GOALS.items():
        for name, low, high in ANCHORS:
            yield f"{name} on [{low}, {high}], {goal}", AnchorHead.fit(name, low, high, anchors=24, dtype=dtype)
            cold = AnchorHead.fit(name, low, high, anchors=24, temperature="cold", dtype=dtype)
            yield f"{name} on [{low}, {high}], cold, {goal}", cold
        for name, low, high in RELATIVE:
            head = AnchorHead.fit(name, low, high, anchors=24, relative=True, dtype=dtype)
            yield f"relative {name} on [{low}, {high}], {goal}", head
        for name, gate in GATES.items():
            yield f"{name}, {goal}", gate(dtype=dtype)
        for x, y in ((-1, 1), (-1, 1)), ((0, 1), (-5, 1)), ((-100, 100), (0.5, 2)), ((-1e-3, 1e-3), (7, 9)):
            yield f"{x} times {y}, {goal}", ProductHead.fit(x, y, dtype=dtype)
            yield f"vectors in {x} times {y}, {goal}", ProductHead.fit(x, y, width=3, dtype=dtype)
        for name in FAST:
            yield f"fast {name}, {goal}", FastActivation.fit(name, -6, 6, dtype=dtype)
        for name, table in TABLES.items():
            yield f"fast anchors, {name}, {goal}", table(dtype=dtype)
        yield f"200 anchors, {goal}", AnchorHead.fit("sin", -3, 3, anchors=200, dtype=dtype)
        yield f"200 anchors, cold, {goal}", AnchorHead.fit("sin", -3, 3, anchors=200, temperature="cold", dtype=dtype)
        yield f"200 fast anchors, {goal}", SQUARE("sin", -3, 3, anchors=200, dtype=dtype)
        yield f"vectors of 384 entries, {goal}", ProductHead.fit((0, 1), (-1, 1), width=384, dtype=dtype)
        for name, make in RAMPS.items():
            yield f"theorem's ramp, {name}, {goal}", make(torch.tensor(WEIGHTS, dtype=dtype))
        for n in (2, 3, 7, 16):
            yield f"mean of {n}, {goal}", TokenHead.mean(n, 2, dtype=dtype)
            yield f"prefix mean of {n}, {goal}", TokenHead.prefix_mean(n, 2, dtype=dtype)
            yield f"maximum of {n}, {goal}", TokenHead.max(n, 2, -1, 1, eps=1e-2, dtype=dtype)
            yield f"minimum of {n}, {goal}", TokenHead.min(n, 2, -1, 1, eps=1e-2, dtype=dtype)
            mixture = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)
            yield f"mixture of {n}, {goal}", TokenHead.mix(mixture, 2, dtype=dtype)
            yield f"gather of {n}, {goal}", TokenHead.gather(n, n - 1, 2, dtype=dtype)
    for name in FAST:
        yield f"fast {name}, bfloat16", FastActivation.fit(name, -6, 6, dtype=torch.bfloat16)


def swapped(X: torch.Tensor) -> torch.Tensor:
    """A sequence map whose outputs depend on the other token: 1-Lipschitz for two tokens."""
    return X.flip(-2).sin()


def norm(x: torch.Tensor) -> torch.Tensor:
    """The length of a token."""
    return x.norm(dim=-1, keepdim=True)


def corner(x: torch.Tensor) -> torch.Tensor:
    """The sum of sizes: a corner in every coordinate."""
    return abs(x).sum(-1)


def samples() -> Made:
    """Networks made from samples and a constant: hats and cells of the theorems, black boxes on grids."""
    for goal, (dtype, _) in GOALS.items():
        for name, make in _samples():
            yield f"{name}, {goal}", functools.partial(make, dtype=dtype)


def _samples() -> Iterator[tuple[str, Callable[..., CertifiedModule]]]:
    two, one = af.Box.cube(-1, 1, shape=(2, 1)), af.Box.cube(0, 3, shape=(1, 1))
    for form in ("paper", "tokens"):
        for spacing, anchors in ((0.5, 17), (0.1, 65)):
            for make in (theorems.two_layer, theorems.attention_then_softmax):
                said = f"{make.__name__} of {anchors} anchors, {form}, spacing {spacing}"
                yield said, functools.partial(
                    make, swapped, two, spacing, lipschitz=1.0, anchors=anchors, form=form
                )
        yield f"two_layer of 9 anchors, one token, {form}", functools.partial(
            theorems.two_layer, torch.sin, one, 0.05, lipschitz=1.0, anchors=9, form=form
        )
        for attention in ("self", "cross"):
            for cells in (36, 900):
                yield f"{cells} cells of sequences, {attention}, {form}", functools.partial(
                    theorems.max_affine, swapped, two, cells, lipschitz=1.0, attention=attention, form=form
                )
    scattered = 2 * torch.rand(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1
    far = af.Box.cube(100, 101, shape=2)
    for said, box, cells in (("", af.Box.cube(-1, 1, shape=2), 400), (" far from 0", far, 100)):
        for causal in (False, True):
            yield f"{cells} cells of tokens{said}{', causal' if causal else ''}", functools.partial(
                theorems.max_affine, norm, box, cells, lipschitz=1.0, causal=causal
            )
    yield "60 scattered cells", functools.partial(
        theorems.max_affine, norm, af.Box.cube(-1, 1, shape=2), scattered, lipschitz=1.0
    )
    for dim, eps in ((1, 1e-2), (1, 3e-3), (2, 0.2), (2, 0.03), (3, 0.4)):
        yield f"grid of a box of {dim} to {eps}", functools.partial(
            af.approximate, corner, af.Box.cube(-1, 1, shape=dim), eps, lipschitz=dim**0.5, route="grid"
        )
    for kappa in (0.6, 1.0, 6.0):
        yield f"grid with kappa {kappa}", functools.partial(
            af.approximate, corner, far, lipschitz=2**0.5, route="grid", anchors=9, kappa=kappa
        )


def token_programs() -> Made:
    """Token programs of every kind of head."""
    for name, (program, domain) in programs().items():
        yield name, functools.partial(af.compile, program, domain)


def measured(net: Any) -> dict[str, Any]:
    """What the kernel makes of one network; what it remembers from writing the derivation is forgotten first."""
    saved = parse(net.written())
    row: dict[str, Any] = {"bound": net.bound}
    start = time.process_time()
    try:
        if isinstance(net, CompiledProgram):
            chosen = words_of(net)
        else:
            chosen = (derive if isinstance(net, CompiledNetwork) else chosen_for)(net, saved, net.bound)
        row["derive seconds"] = time.process_time() - start
        for known in (Cell.of, error_on):
            known.cache_clear()  # type: ignore[attr-defined]
        start = time.process_time()
        proof = prove(saved, chosen)
        row |= {"kernel": proof.bound, "leaves": proof.leaves}
        row["ratio"] = proof.bound / net.bound if net.bound else float(proof.bound > 0)
    except CertificateError as error:
        row["refused"] = str(error)
    row["seconds"] = time.process_time() - start
    return row


KINDS: dict[str, Callable[[], Made]] = {
    "formula": formulas, "module": modules, "head": heads, "program": token_programs, "sample": samples,
}  # fmt: skip


def acceptance(networks: Made, kind: str, console: Console) -> Iterator[dict[str, Any]]:
    """Prove networks of a kind; a row for each that there is."""
    for name, make in networks:
        net = make()
        if net is None:
            continue
        row = {"kind": kind, "name": name, **measured(net)}
        shown = f"refused: {row['refused']}" if "refused" in row else (
            f"analysis {row['bound']:.3e}, kernel {row['kernel']:.3e}, ratio {row['ratio']:.3f}, "
            f"{row['leaves']} leaves, {row['derive seconds']:.2f} s to derive, {row['seconds']:.2f} s to prove"
        )  # fmt: skip
        console.print(f"{kind} {name}: {shown}", soft_wrap=True, highlight=False)
        yield row


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How many are accepted, how the bounds compare, how long it takes: by kind, and in all."""
    found = {}
    for kind in (*dict.fromkeys(row["kind"] for row in rows), "all"):
        own = [row for row in rows if kind in (row["kind"], "all")]
        good = [row for row in own if "kernel" in row]
        ratios, seconds = ([row[key] for row in good] or [math.nan] for key in ("ratio", "seconds"))
        found[kind] = {
            "networks": len(own), "accepted": len(good), "ratio median": statistics.median(ratios),
            "ratio worst": max(ratios), "beyond 1.5": sum(r > 1.5 for r in ratios),
            "seconds median": statistics.median(seconds), "seconds worst": max(seconds),
        }  # fmt: skip
    return found


# -- mutation ----------------------------------------------------------------------------------------------------------

TOKENS: dict[str, Callable[[Builder], int]] = {
    "attention": lambda b: b.attention(0, 0, 0, 0.7, mask=[[0, -math.inf, 0.5], [0, 0, -math.inf], [-1, 0, 0.25]]),
    "softmax": lambda b: b.softmax(0),
    "maximum": lambda b: b.max_tokens(0),
    "mix": lambda b: b.mix(0, [[0.5, -1.0, 0.0], [0.0, 0.0, 2.0], [0.3, 0.3, 0.3]]),
    "norm": lambda b: b.normalise(b.linear([(0, [[1.0, 0.5], [0.0, 1.0]])], [2.0, -3.0]), 1e-3, centred=False),
}


NETWORKS = (
    ("anchor", "exp(x) + 1/y"), ("product", "x*y + 0.7*x"), ("gate", "max(x, y) + abs(x)"),
    ("square", "sqrt(x**2 + y**2)"), ("nested", "sin(x*y) + exp(-x**2)/y"), ("ramp", "clip(2*x, -1, 1)*y"),
    ("logistic", "tanh(x)*y"),
)  # fmt: skip


def subject(name: str, dtype: torch.dtype = torch.float32) -> CompiledNetwork:
    """A small network of a family that the kernel covers."""
    torch.manual_seed(0)
    if name in TOKENS:
        build = Builder(af.Box.cube(-1, 1, shape=(3, 2)), tokens=3)
        return compile_program(prepared(build.program(TOKENS[name](build), name, (3, 2))), 1e-2, dtype=dtype)
    if name == "mlp":
        mlp = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))
        return af.compile(mlp, af.Box.cube(-1, 1, shape=(2,)), eps=1e-2, dtype=dtype)
    return af.compile(dict(NETWORKS)[name], af.Box(x=(-1, 1), y=(0.5, 2)), eps=1e-2)


def exported(name: str) -> PlainTransformer:
    """A small network in its plain form."""
    if name == "program":
        return to_plain(af.compile(rasp.library.sort(), rasp.Sequences("abc", 4)))
    return to_plain(subject(name))


def varied(name: str) -> PlainTransformer:
    """The same with its columns in another order and with heads that do nothing."""
    return vary(exported(name), ["permuted", "split", "distractor", "idle"], seed=2)


FILES: dict[str, Callable[[], CertifiedModule]] = {
    "head: anchor": functools.partial(AnchorHead.fit, "sin", -2, 2, anchors=16),
    "head: relative": functools.partial(AnchorHead.fit, "exp", -2, 2, anchors=24, relative=True),
    "head: relative, negative": functools.partial(AnchorHead.fit, "log", 0.1, 0.5, anchors=9, relative=True),
    **{f"head: {name}": GATES[name] for name in ("relu", "hard tanh", "silu", "ramp", "piecewise")},
    **{f"head: {name}": GATES[name] for name in ("larger number", "smaller number")},
    "head: product": functools.partial(ProductHead.fit, (0, 1), (-5, 1)),
    "head: product of a vector": functools.partial(ProductHead.fit, (0, 1), (-5, 1), width=2),
    "head: product of a long vector": functools.partial(ProductHead.fit, (0, 1), (-5, 1), width=12),
    "head: many anchors": functools.partial(AnchorHead.fit, "sin", -2, 2, anchors=64, kappa=2.0),
    "head: maximum": functools.partial(TokenHead.max, 3, 2, -1, 1, eps=1e-2),
    "head: minimum": functools.partial(TokenHead.min, 3, 2, -1, 2, eps=1e-2),
    "head: prefix mean": functools.partial(TokenHead.prefix_mean, 3, 2),
    "head: mixture": functools.partial(TokenHead.mix, torch.tensor([[0.5, 0.25], [1.0, -0.5]]), 2),
    "norm: layer": functools.partial(NormHead.fit, 6, (0.4, 5.0), heads=6),
    "norm: rms": functools.partial(NormHead.fit, 5, (0.5, 2.0), heads=5, kind="rms"),
    "chain: hardswish": functools.partial(ChainHead.fit, "hardswish", -4, 4, eps=1e-2),
    "chain: elu": functools.partial(ChainHead.fit, "elu", -4, 4, eps=1e-2),
    "fast: tanh": functools.partial(FastActivation.fit, "tanh", -3, 3),
    "fast: gelu": functools.partial(FastActivation.fit, "gelu", -2, 3, anchors=12),
    "fast: mish": functools.partial(FastActivation.fit, "mish", -2, 2, anchors=15),
    "fast: half precision": functools.partial(FastActivation.fit, "gelu", -3, 3, dtype=torch.bfloat16),
    "fast: anchors": functools.partial(SQUARE, "sin", -2, 3, anchors=9),
    "fast: relative": functools.partial(SQUARE, "exp", -1, 1, anchors=7, relative=True),
    "fast: window": functools.partial(SQUARE, "sin", -2, 2, anchors=36, kappa=0.5),
    "fast: pair": functools.partial(SQUARE, "sin", -2, 2, anchors=10, kappa=18.0, temperature="cold"),
    **{f"ramp: {name}": functools.partial(make, torch.tensor(WEIGHTS)) for name, make in RAMPS.items()},
    "samples: hats": functools.partial(
        theorems.two_layer, swapped, af.Box.cube(-1, 1, shape=(2, 1)), 0.5, lipschitz=1.0, anchors=9
    ),
    "samples: softmax": functools.partial(
        theorems.attention_then_softmax, swapped, af.Box.cube(-1, 1, shape=(2, 1)), 0.5, lipschitz=1.0, anchors=17,
        form="tokens", dtype=torch.float32,
    ),
    "samples: cells": functools.partial(
        theorems.max_affine, swapped, af.Box.cube(-1, 1, shape=(2, 1)), 36, lipschitz=1.0, form="tokens"
    ),
    "samples: causal": functools.partial(
        theorems.max_affine, norm, af.Box.cube(-1, 1, shape=2), 30, lipschitz=1.0, causal=True, dtype=torch.float32
    ),
    "samples: cross": functools.partial(
        theorems.max_affine, norm, af.Box.cube(-1, 1, shape=2),
        [[0.5, 0.5], [-0.5, 0.25], [0.25, -0.75], [-0.25, -0.5]], lipschitz=1.0, attention="cross",
    ),
    "samples: grid": functools.partial(
        af.approximate, corner, af.Box.cube(-1, 1, shape=2), 0.4, lipschitz=2**0.5, route="grid"
    ),
    "samples: line": functools.partial(
        af.approximate, corner, af.Box.cube(-1, 2, shape=1), 0.05, lipschitz=1.0, route="grid", dtype=torch.float64
    ),
    **{f"plain: {name}": functools.partial(exported, name) for name in ("anchor", "gate", "attention", "maximum")},
    "plain: program": functools.partial(exported, "program"),
    "plain: cells": lambda: to_plain(theorems.max_affine(norm, af.Box.cube(-1, 1, shape=2), 12, lipschitz=1.0)),
    "plain: hats": lambda: to_plain(
        theorems.two_layer(swapped, af.Box.cube(-1, 1, shape=(2, 1)), 1.0, lipschitz=1.0, anchors=9, form="tokens")
    ),
    "plain: ramp": lambda: to_plain(theorems.ramp(torch.tensor([1.0, -2.0]), 0.3, -1, 1, 9, variant="warm", radius=2)),
    **{f"variant: {name}": functools.partial(varied, name) for name in ("anchor", "attention", "program")},
}  # fmt: skip


def of_subject(name: str, count: int, source: random.Random) -> Iterator[tuple[str, str]]:
    """All mutants of one subject."""
    if name in FILES:
        yield from file_mutants(FILES[name](), count, source)
        return
    if name.startswith("program "):
        program, domain = programs()[name.removeprefix("program ")]
        yield from program_mutants(af.compile(program, domain), count, source)
        return
    net = subject(name)
    chosen = derive(net, parse(net.written()), net.bound, effort=EFFORT)
    for make in (stored_mutants, derivation_mutants, header_mutants):
        yield from make(net, chosen, count, source)


def stored_mutants(net: CompiledNetwork, chosen: Any, count: int, source: random.Random) -> Iterator[tuple[str, str]]:
    """Entries of stored tensors changed alone: the table's name, the verdict with the old and a fresh derivation."""
    saved = parse(net.written())
    places = [(name, i) for name, tensor in saved.tensors.items() for i in range(len(tensor.numbers))]
    for name, i in source.sample(places, min(count, len(places))):
        edit = source.choice(sorted(EDITS))
        mutant = copy.deepcopy(net)
        tensor = mutant.state_dict()[name].view(-1)
        tensor[i] = EDITS[edit](float(tensor[i]), float(tensor[(i + 1) % len(tensor)]))
        numbers = tuple(tensor.double().tolist())
        old = saved.tensors[name]
        changed = Saved(saved.header, {**saved.tensors, name: Tensor(old.dtype, old.shape, numbers)}, saved.weights)
        kind = name.split(".")[-1]
        yield kind, verdict(lambda: prove(changed, chosen).bound, lambda: network_error(mutant, net.program))  # noqa: B023

        def fresh() -> float:
            return prove(changed, derive(mutant, changed, net.bound, effort=EFFORT)).bound  # noqa: B023

        yield f"{kind}, fresh", verdict(fresh, lambda: network_error(mutant, net.program))  # noqa: B023


def derivation_mutants(
    net: CompiledNetwork, chosen: Any, count: int, source: random.Random
) -> Iterator[tuple[str, str]]:
    """Choices of the derivation changed alone."""
    saved = parse(net.written())
    every = list(leaves_of(chosen))
    error = network_error(net, net.program)
    for _ in range(count):
        kind = source.choice(sorted({path[0] for path in every}))
        path = source.choice([path for path in every if path[0] == kind])
        wrong = changed_at(chosen, path, source)
        yield f"derivation, {kind}", verdict(lambda: prove(saved, wrong).bound, lambda: error)  # noqa: B023


def header_mutants(net: CompiledNetwork, chosen: Any, count: int, source: random.Random) -> Iterator[tuple[str, str]]:
    """Fields of the description changed alone; the truth is what the changed file says."""
    saved = parse(net.written())
    config = {key: saved.header["config"][key] for key in ("program", "arrays", "dtype")}
    every = list(leaves_of(config))
    for _ in range(count):
        kind = source.choice(["program", "arrays", "dtype"])
        path = source.choice([path for path in every if path[0] == kind])
        wrong = changed_at(config, path, source)
        header = {**saved.header, "config": {**saved.header["config"], **wrong}}

        def error() -> float:
            try:  # as files are read: -inf of masks is text
                arrays = {k: np.array(v, dtype=np.float64) for k, v in wrong["arrays"].items()}  # noqa: B023
            except (TypeError, ValueError, AttributeError) as problem:
                raise CertificateError("these are no arrays") from problem
            return network_error(net, Program.from_json(wrong["program"], arrays))  # noqa: B023

        changed = replace(saved, header=header)
        yield f"header, {kind}", verdict(lambda: prove(changed, chosen).bound, error)  # noqa: B023


# -- token programs and heads on their own -----------------------------------------------------------------------------


def programs() -> dict[str, tuple[Any, rasp.Sequences]]:
    """Token programs of every kind of head, on domains that are looked at sequence by sequence."""
    library, domain = rasp.library, rasp.Sequences("ab", 5)
    names = ("reverse", "sort", "hist2", "frac_prevs", "unique_copy", "induction", "shift_by", "majority")
    found = {name: (library.get(name).build(), domain) for name in names if name != "majority"}
    found["majority"] = (library.majority("a"), domain)
    found["dyck1"] = (library.dyck1(), rasp.Sequences("()", 5))
    found["parity_scan"] = (library.parity_scan(5), rasp.Sequences("01", 5))
    return found


def program_error(net: Any) -> float:
    """How wrong a network is on all sequences of its domain: 1 for another value, the difference for numbers."""
    worst, given = 0.0, list(net.domain)
    for sequence, got in zip(given, net.run(given), strict=True):
        try:
            meant = net.program(sequence)
        except af.DomainError:
            continue
        pairs = zip(got, meant, strict=True)
        off = [abs(float(a) - float(b)) if net.outputs is None else float(a != b) for a, b in pairs]  # type: ignore[arg-type]
        worst = max([worst, *(x if x == x else math.inf for x in off)])
    return worst


def program_mutants(net: CompiledProgram, count: int, source: random.Random) -> Iterator[tuple[str, str]]:
    """Stored numbers, words and descriptions of a token program, each changed alone."""
    saved, words = parse(net.written()), words_of(net)
    places = [(name, i) for name, tensor in saved.tensors.items() for i in range(len(tensor.numbers))]
    for name, i in source.sample(places, min(count, len(places))):
        mutant = edited(saved, name, i, source.choice(sorted(EDITS)))
        yield name.split(".")[-1], verdict(lambda: prove(mutant, words).bound, lambda: program_error(module_of(mutant)))  # noqa: B023
    for name, old in saved.tensors.items():
        scaled = torch.tensor(old.numbers, dtype=net.dtype) * 0.01
        new = Tensor(old.dtype, old.shape, tuple(scaled.double().tolist()))
        mutant = Saved(saved.header, {**saved.tensors, name: new}, saved.weights)
        yield "scaled", verdict(lambda: prove(mutant, words).bound, lambda: program_error(module_of(mutant)))  # noqa: B023
    right, every = program_error(net), list(leaves_of(words))
    for _ in range(count):
        path = source.choice(every)
        wrong = changed_at(words, path, source)
        if wrong["outputs"] == words["outputs"]:  # else `check` refuses it before the kernel is asked
            yield f"derivation, {path[0]}", verdict(lambda: prove(saved, wrong).bound, lambda: right)  # noqa: B023
    config = {key: saved.header["config"][key] for key in ("program", "domain", "layout")}
    every = list(leaves_of(config))
    for _ in range(count):
        path = source.choice(every)
        changed = {**saved.header["config"], **changed_at(config, path, source)}
        mutant = replace(saved, header={**saved.header, "config": changed})

        def error() -> float:
            try:
                net = module_of(mutant)  # noqa: B023
                same = words_of(net)["outputs"] == words["outputs"]  # as `check` asks
            except (AttnforgeError, *WRONG) as problem:
                raise CertificateError("the file does not load") from problem
            return program_error(net) if same else 0.0

        yield f"header, {path[0]}", verdict(lambda: prove(mutant, words).bound, error)  # noqa: B023


def mutation(
    count: int, console: Console, seed: int = 0, names: tuple[str, ...] | None = None, kept: Path | None = None
) -> dict[str, Counter[str]]:
    """Change files in every way; a table of what became of the mutants. What `kept` holds already is not done again."""
    whole = json.loads(kept.read_text("utf-8")) if kept is not None else {}
    done: dict[str, dict[str, dict[str, int]]] = whole.setdefault("mutants", {})
    networks = dict.fromkeys(name for name, _ in NETWORKS)
    every = [*networks, *TOKENS, "mlp", *(f"program {name}" for name in programs()), *FILES]
    for name in every:
        if (names is not None and name not in names) or name in done:
            continue
        source, own = random.Random(f"{seed} {name}"), dict[str, Counter[str]]()
        for kind, result in of_subject(name, count, source):
            own.setdefault(kind, Counter())[result] += 1
        done[name] = {kind: dict(counts) for kind, counts in own.items()}
        if kept is not None:
            console.print(name, sum(own.values(), Counter[str]()))
            kept.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    found = {f"{name}: {kind}": Counter(c) for name, own in done.items() for kind, c in own.items()}  # type: ignore[arg-type]
    table = Table("mutants", "covered", "refused", "BROKEN")
    for kind, counts in found.items():
        table.add_row(kind, *(str(counts[word]) for word in ("covered", "refused", "BROKEN")))
    total = sum(found.values(), Counter[str]())
    table.add_row("all", *(str(total[word]) for word in ("covered", "refused", "BROKEN")))
    console.print(table)
    return found


#: What stands before the name of a subject -> the row that the page has for such subjects.
ROWS = {
    "program ": "token programs", "head: ": "heads on their own", "norm: ": "norms on their own", "chain: ": "chains",
    "fast: ": "fast activations", "ramp: ": "ramps",
    "samples: ": "networks made from samples", "plain: ": "plain transformers", "variant: ": "variants",
}  # fmt: skip
CHANGED = ("a stored number", "the same, derived again", "the derivation", "the description")


def changed_where(kind: str) -> str:
    """Which part of a file the mutants of a kind change."""
    if kind.endswith(", fresh"):
        return CHANGED[1]
    return {"derivation": CHANGED[2], "header": CHANGED[3]}.get(kind.partition(",")[0], CHANGED[0])


def markdown(mutants: dict[str, dict[str, dict[str, int]]]) -> str:
    """The table of mutants as docs/kernel.md shows it."""
    rows: dict[str, dict[str, Counter[str]]] = {}
    subjects = Counter[str]()
    for name, own in mutants.items():
        row = next((row for start, row in ROWS.items() if name.startswith(start)), "networks")
        subjects[row] += 1
        for kind, counts in own.items():
            rows.setdefault(row, {}).setdefault(changed_where(kind), Counter()).update(counts)
    total = {where: sum((row.get(where, Counter()) for row in rows.values()), Counter[str]()) for where in CHANGED}
    every = sum(total.values(), Counter[str]())
    lines = [
        f"Of {every.total():,} mutants of {subjects.total()} files {every['covered']:,} are covered, "
        f"{every['refused']:,} refused, and {every['BROKEN']} neither. Covered + refused, by what is changed:", "",
        f"| files | {' | '.join(CHANGED)} |", "| --- " * (len(CHANGED) + 1) + "|",
    ]  # fmt: skip
    for row, own in (*rows.items(), ("all", total)):
        cells = [own.get(where, Counter()) for where in CHANGED]
        shown = (f"{c['covered']:,} + {c['refused']:,}" if c else "" for c in cells)
        lines.append(f"| {subjects[row] or subjects.total()} {row} | {' | '.join(shown)} |")
    return "\n".join(lines).replace(f"| {subjects.total()} all |", f"| all {subjects.total()} |")


def main() -> int:
    """Run what was asked for; 1 where a mutant escaped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=list(KINDS), nargs="+")
    parser.add_argument("--names", nargs="+", default=[])
    parser.add_argument("--mutants", type=int, nargs="?", const=100, default=0)
    parser.add_argument("--subjects", nargs="+", help="with --mutants: these alone")
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given, console = parser.parse_args(), Console()
    if given.mutants:
        names = tuple(given.subjects) if given.subjects else None
        found = mutation(given.mutants, console, given.seed, names, RESULTS)
        return int(any(counts["BROKEN"] for counts in found.values()))
    if given.fill:
        shown = markdown(json.loads(RESULTS.read_text("utf-8"))["mutants"])
        PAGE.write_text(filled(PAGE.read_text("utf-8"), "mutants", shown), encoding="utf-8", newline="\n")
        return 0
    if given.quick:
        few = ((name, make) for name, make in formulas() if name.rpartition(", ")[0] in QUICK)
        console.print(summary(list(acceptance(few, "formula", console))))
        return 0
    kept, parts = json.loads(RESULTS.read_text("utf-8")), Parts(RESULTS, given.resume)
    wanted = {f"{name}, {goal}" for name in given.names for goal in (*GOALS, "bfloat16")} or None
    for kind in given.only or KINDS:
        chosen = ((name, make) for name, make in KINDS[kind]()
                  if f"{kind}: {name}" not in parts and (wanted is None or name in wanted))  # fmt: skip
        for row in acceptance(chosen, kind, console):  # written one by one: a run may be stopped
            parts.add(f"{kind}: {row['name']}", row)
            kept["rows"] = [old for old in kept["rows"] if (old["kind"], old["name"]) != (kind, row["name"])] + [row]
            kept["summary"] = summary(kept["rows"])
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        if wanted is None:  # what the last run had, and this one has not, is no network any more
            kept["rows"] = [row for row in kept["rows"] if row["kind"] != kind or f"{kind}: {row['name']}" in parts]
    kept |= {"summary": summary(kept["rows"]), "commits": parts.commits}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    parts.done()
    console.print(kept["summary"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
