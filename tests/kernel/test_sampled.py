"""Functions known by samples before the kernel: each lemma at its limits, real networks, changed files."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flint import arb, ctx

import attnforge as af
from attnforge import theorems
from attnforge.certificates.certified import CertifiedModule
from attnforge.errors import CertificateError
from attnforge.kernel.balls import working
from attnforge.kernel.file import Saved, parse
from attnforge.kernel.prove import prove
from attnforge.kernel.rounding import MACHINES, Machine
from attnforge.kernel.sampled.cells import beyond, covered
from attnforge.kernel.sampled.grid import nearby, weighty
from attnforge.kernel.sampled.hats import between
from attnforge.kernel.sampled.hypothesis import Hypothesis
from attnforge.kernel.sampled.selection import averaged, gathered, loosened, own_rows, settled, unseen

SIZES = [1e-300, 1e-100, 1e-30, 1e-10, 1e-4, 1e-1, 1.0]  # of errors: from what hardly is one to all there is
FLOAT32, FLOAT64 = MACHINES["float32"], MACHINES["float64"]
STILL = Machine(arb(0), arb(0), FLOAT64.huge)
SEQUENCES, TOKENS = af.Box.cube(-1, 1, shape=(2, 1)), af.Box.cube(-1, 1, shape=2)


def swapped(X: torch.Tensor) -> torch.Tensor:
    return X.flip(-2).sin()


def norm(x: torch.Tensor) -> torch.Tensor:
    return x.norm(dim=-1, keepdim=True)


def corner(x: torch.Tensor) -> torch.Tensor:
    return abs(x).sum(-1)


Made = Callable[[torch.dtype], CertifiedModule]
BUILT: dict[str, Made] = {
    "hats": lambda dtype: theorems.two_layer(swapped, SEQUENCES, 0.5, lipschitz=1.0, anchors=17, dtype=dtype),
    "hats, tokens": lambda dtype: theorems.two_layer(
        swapped, SEQUENCES, 0.5, lipschitz=1.0, anchors=17, form="tokens", dtype=dtype
    ),
    "softmax": lambda dtype: theorems.attention_then_softmax(
        swapped, SEQUENCES, 0.5, lipschitz=1.0, anchors=9, dtype=dtype
    ),
    "softmax, tokens": lambda dtype: theorems.attention_then_softmax(
        swapped, SEQUENCES, 0.5, lipschitz=1.0, anchors=17, form="tokens", dtype=dtype
    ),
    "cells": lambda dtype: theorems.max_affine(norm, TOKENS, 49, lipschitz=1.0, dtype=dtype),
    "cells, causal": lambda dtype: theorems.max_affine(norm, TOKENS, 30, lipschitz=1.0, causal=True, dtype=dtype),
    "cells, cross": lambda dtype: theorems.max_affine(
        norm, TOKENS, 2 * torch.rand(9, 2, generator=torch.Generator().manual_seed(1)) - 1, lipschitz=1.0,
        attention="cross", dtype=dtype,
    ),
    "cells, gathered": lambda dtype: theorems.max_affine(
        swapped, SEQUENCES, 36, lipschitz=1.0, form="tokens", dtype=dtype
    ),
    "cells, paper": lambda dtype: theorems.max_affine(swapped, SEQUENCES, 36, lipschitz=1.0, dtype=dtype),
    "grid": lambda dtype: af.approximate(corner, TOKENS, 0.4, lipschitz=2**0.5, dtype=dtype),
    "grid, line": lambda dtype: af.approximate(corner, af.Box.cube(100, 101, shape=1), 0.1, lipschitz=1, dtype=dtype),
    "grid, warm": lambda dtype: af.approximate(
        corner, TOKENS, route="grid", anchors=7, lipschitz=2**0.5, kappa=0.6, dtype=dtype
    ),
}  # fmt: skip


# -- lemmas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_function_is_no_further_from_its_samples_than_its_lemma_says(size: float) -> None:
    """K40: the steepest function, samples off in value and in place, values that are off, a mean that rounds."""
    source = random.Random(1)
    ctx.prec, before = 2200, ctx.prec
    try:
        for part in ("within", "near", "values", "rounding", "distance"):
            for slope in (1e-3, 1.0, 1e3):
                errors = {key: arb(size if key == part else 0) for key in ("within", "near", "values", "distance")}
                n, x = 5, source.uniform(-1, 1)
                places = [arb(x) + errors["distance"]] * n  # all as far from x: the mean square is the square
                steep = [arb(slope) * (abs(v - x) + errors["near"]) for v in places]  # f(y) = slope |y - x|
                values = [s + errors["within"] + errors["values"] for s in steep]
                given = Hypothesis((-1.0,), (1.0,), slope, [], errors["near"], errors["within"], "")
                machine = Machine(arb(size) / 64, arb(0), FLOAT64.huge) if part == "rounding" else STILL
                most = max(values, key=float)
                rounding = averaged(machine, n, n, arb(0), most)
                bound = settled(machine, given, errors["distance"] ** 2, errors["values"], most, rounding, [])
                found = sum(values, arb(0)) / n  # of which f(x) = 0 is a truth
                if part == "rounding":  # 2n + 1 roundings one way, of a mean of ones
                    bound = averaged(machine, n, n, arb(0), arb(1))
                    found = (1 + machine.u) ** (2 * n + 1) - 1
                slack = 1 + arb(2) ** -200
                assert found <= bound * slack and not found <= 0.9 * bound * (1 - size / 2 if part == "rounding" else 1)
    finally:
        ctx.prec = before


@pytest.mark.parametrize("size", [s for s in SIZES if s < 0.5])
def test_computed_exponentials_are_within_what_their_lemma_says(size: float) -> None:
    """K40: logits that err by up to size, differences that round, an exponential that errs by 3 u."""
    source = random.Random(2)
    ctx.prec, before = 2200, ctx.prec
    try:
        for u in (arb(size) / 8, FLOAT32.u, arb(0)):
            machine = Machine(u, arb(0), FLOAT64.huge)
            for _ in range(20):
                exact = [arb(-(10.0 ** source.uniform(-3, 2))) for _ in range(4)]
                error = arb(size)
                seen = [x + error * source.choice((-1, 1, source.uniform(-1, 1))) for x in exact]
                top, best = max(seen, key=float), max(exact, key=float)
                logs = [(x - top) * (1 + source.choice((-1, 1)) * u) for x in seen]
                logs = [x + (1 + source.choice((-1, 1)) * 3 * u).log() for x in logs]
                d = loosened(machine, error)
                off = [a - (b - best) for a, b in zip(logs, exact, strict=True)]
                allowed = [u * (best - b) + d for b in exact]
                assert max(o - a for o, a in zip(off, allowed, strict=True)) <= min(
                    o + a for o, a in zip(off, allowed, strict=True)
                ) + arb(2) ** -1900  # one common number brings all of them within
    finally:
        ctx.prec = before


@pytest.mark.parametrize("size", SIZES)
def test_layers_that_move_numbers_do_nothing_else(size: float) -> None:
    """K41: a gathering layer with any number changed, by however little, and keys of other tokens that are near."""
    made = parse(BUILT["cells, gathered"](torch.float64).written()).tensors
    moving = {name: t for name, t in made.items() if name.startswith("gather") or name == "positions"}
    with working():
        gathered(dict(moving), "", "float64", 2, 1)
        for name, tensor in moving.items():
            for i in range(len(tensor.numbers)):
                numbers = list(tensor.numbers)
                numbers[i] += size
                if numbers[i] != tensor.numbers[i]:
                    wrong = replace(tensor, numbers=tuple(numbers))
                    with pytest.raises(CertificateError):
                        gathered({**moving, name: wrong}, "", "float64", 2, 1)
        rows = [[0.5, 1.0, 0.0, -2048.0], [0.5, 1.0, -2048.0, 0.0]]
        assert own_rows(rows, 2, 2) == ([[[0.5, 1.0]], [[0.5, 1.0]]], 2048.0)
        for bad in ([rows[0], [0.5, 1.0, -2048.0, -size]], [rows[0][:3], rows[1]], rows[:1], rows[::-1]):
            with pytest.raises(CertificateError):
                own_rows(bad, 2, 2)
        assert own_rows([[0.0] * 4] * 2, 2, 2)[1] == 0.0  # keys of other tokens that are not dead at all
        with pytest.raises(CertificateError):
            unseen(FLOAT64, "float64", 0.0, arb(0), 3)
        for dtype, machine, dead in (("float32", FLOAT32, 104.5), ("float64", FLOAT64, 746.0)):
            least = (2 * size + dead) * (1 + 1e-4) + 1
            unseen(machine, dtype, least, arb(size), 4)
            with pytest.raises(CertificateError):
                unseen(machine, dtype, 2 * size + dead, arb(size), 4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kappa", [0.6, 2.0, 6.0])
def test_a_grid_selects_no_further_than_its_lemma_says(size: float, kappa: float) -> None:
    """K42: exponentials off by e^(uG + d) in the worst way, on grids of one and two axes, wherever x is."""
    source = random.Random(3)
    with working():
        for machine in (FLOAT32, Machine(arb(1e-2), arb(0), FLOAT64.huge)):
            u, d = machine.u, arb(size)
            for axes in (1, 2):
                bound, worst = nearby(machine, arb(kappa), d, axes), arb(0)
                many = weighty(machine, arb(kappa), d, axes, 9**axes)
                for k in range(12):
                    t = [0.5 if k == 0 else source.uniform(-0.5, 0.5) for _ in range(axes)]
                    points = list(itertools.product(range(-4, 5), repeat=axes))  # nearest at 0, unless an end is there
                    if k % 3 == 0:
                        points = [p for p in points if min(p) >= 0]
                        t = [abs(x) for x in t]
                    far = [sum(((arb(j) - x) ** 2 for j, x in zip(p, t, strict=True)), arb(0)) for p in points]
                    gap = [kappa * (f - min(far, key=float)) for f in far]
                    limit = source.choice((0.3, 0.5, 1.0)) * axes
                    pairs = zip(far, gap, strict=True)
                    powers = [(-g + (u * g + d) * (1 if f > limit else -1)).exp() for f, g in pairs]
                    total = sum(powers, arb(0))
                    found = sum((p * f for p, f in zip(powers, far, strict=True)), arb(0)) / total
                    assert found <= axes * bound  # steps of 1
                    worst = worst.max(found)
                    assert sum(not p / total <= u / (8 * 9**axes) for p in powers) <= many
                if size < 1e-3 and u < 1e-3:
                    assert not worst <= (0.9 if kappa >= 2 else 0.6) * axes * bound


@pytest.mark.parametrize("size", SIZES)
def test_cells_are_left_by_no_more_than_their_lemma_says(size: float) -> None:
    """K43: exponentials off by e^(uG + d) in the worst way; and trees of the box whose leaves name near centres."""
    source = random.Random(4)
    with working():
        for machine in (FLOAT32, Machine(arb(1e-2), arb(0), FLOAT64.huge)):
            u, d, largest = machine.u, arb(size), 0.0
            for n in (1, 2, 5, 40):
                for level in (0.0, 0.3, 1.0, 2.0, 3.0):
                    gaps = [arb(0), *(arb(level + source.choice((0, 0, size))) for _ in range(n - 1))]
                    powers = [(-g + (u * g + d) * (1 if g > 0 else -1)).exp() for g in gaps]
                    found = sum((p * g for p, g in zip(powers, gaps, strict=True)), arb(0)) / sum(powers, arb(0))
                    bound = beyond(machine, d, n)
                    assert found <= bound
                    largest = max(largest, float(found) / max(float(bound), 1e-300))
            assert size > 0.5 or largest > 0.5
        middles = [[arb(0.25), arb(0.5)], [arb(0.75), arb(0.5)]]
        tree = [0, 0.5, 0, 1]
        reach = covered(tree, [(-size, 1.0), (0.0, 1.0)], middles)  # type: ignore[arg-type]
        exact = (arb(0.25) + arb(size)) ** 2 + 0.25
        assert abs(reach - exact) < arb(2.0**-100) and not reach < exact
        wrong = [0, 1.5, 0, 1], [0, 0.5, 0, 2], [2, 0.5, 0, 1], [0, 0.5, 0], [0, math.nan, 0, 1], [0, 0.5, 0, True]
        for bad in (*wrong, None):
            with pytest.raises((CertificateError, ValueError, TypeError)):
                covered(bad, [(0.0, 1.0), (0.0, 1.0)], middles)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", SIZES)
def test_hats_select_no_further_than_their_lemma_says(size: float) -> None:
    """K44: hats that are off by e and exponentials by d in the worst way, between two points of a grid."""
    with working():
        for beta in (16.0, 128.0):
            off, d = arb(min(size, 0.2)), arb(size)
            bound, worst = between(arb(beta), off, d), arb(0)
            for i in range(200):
                t = arb(i) / 400
                near, further = 1 - t - off, t + off
                ratio = (beta * (further - near) + 2 * d).exp()
                found = (t**2 + ratio * (1 - t) ** 2) / (1 + ratio)
                assert found <= bound
                worst = worst.max(found)
            assert not worst <= 0.98 * bound


# -- networks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_networks_from_samples_are_proved(dtype: torch.dtype, tmp_path: Path, benchmark: ModuleType) -> None:
    """Every form of every family: what `check` says, beside the worst functions that have the samples."""
    ratios = []
    for name, make in BUILT.items():
        net = make(dtype)
        net.save(tmp_path / f"{name}.safetensors")
        found = af.check(tmp_path / f"{name}.safetensors")
        assert found.kernel is not None and found.bound is not None and found.word == "certified", (name, found.remark)
        assert found.hypothesis and found.hypothesis == net.certificate.hypothesis and found.hypothesis in str(found)
        error = benchmark.envelope_error(net)
        assert 0.25 * found.kernel <= error <= found.kernel, name
        ratios.append(found.kernel / found.bound)
    assert sorted(ratios)[len(ratios) // 2] <= 1.1 and max(ratios) <= 1.5


def test_without_a_constant_nothing_is_proved_and_without_a_file_nothing_by_the_kernel() -> None:
    measured = theorems.max_affine(norm, TOKENS, cells=25)
    modulus = theorems.max_affine(norm, TOKENS, cells=25, modulus=lambda t: t)
    table = af.approximate(corner, TOKENS, route="grid", anchors=5)
    assert measured.certificate.kind == table.certificate.kind == "calibrated"
    assert modulus.certificate.kind == "analysed" and "Python function" in modulus.beyond
    assert "modulus(|x - y|)" in modulus.certificate.hypothesis
    with pytest.raises(CertificateError, match="no Lipschitz constant"):
        prove(parse(table.written()), {})


@pytest.mark.parametrize("name", ["softmax, tokens", "cells, causal", "grid"])
def test_a_changed_file_is_covered_or_refused(name: str, benchmark: ModuleType) -> None:
    source = random.Random(name)
    results = [result for _, result in benchmark.file_mutants(BUILT[name](torch.float32), 8, source)]
    assert "BROKEN" not in results and {"covered", "refused"} <= set(results)


def _changed(saved: Saved, path: list[Any], value: Any) -> Saved:
    header = copy.deepcopy(saved.header)
    inner = header["config"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return replace(saved, header=header)


def test_a_proof_is_of_what_the_header_says() -> None:
    """A steeper function, a wider box, a coarser grid: each is another statement, and costs what it must."""
    net = BUILT["grid"](torch.float64)
    saved = parse(net.written())
    right = prove(saved, {})
    twice = prove(_changed(saved, ["lipschitz"], 2 * 2**0.5), {})
    assert 1.99 * right.bound <= twice.bound and twice.hypothesis != right.hypothesis
    for path, value in (
        (["about", "box", "lower"], [-2.0, -1.0]), (["grid"], [[-1.0] * 2, [1.0] * 2, [3, 4], 2.0]),
        (["lipschitz"], -1.0), (["lipschitz"], None), (["about", "unit"], 0.0), (["grid", 3], -1.0),
        (["dtype"], "float32"),
    ):  # fmt: skip
        with pytest.raises(CertificateError):
            prove(_changed(saved, path, value), {})
    for chosen in (None, {"tree": 0}, []):
        with pytest.raises(CertificateError):
            prove(saved, chosen)
    moved = prove(_changed(saved, ["grid", 0], [-1.1, -1.0]), {})  # the points are elsewhere: keys are far off
    assert moved.bound > 2 * right.bound


def test_a_stated_hypothesis_is_checked(tmp_path: Path) -> None:
    from attnforge.certificates import storage
    from attnforge.certificates.certificate import weights_hash

    net, file = BUILT["cells"](torch.float64), tmp_path / "m.safetensors"
    header = json.loads(json.dumps(net._header()))
    header["certificate"]["hypothesis"] = "for every f at all"
    file.write_bytes(storage.written(header, weights_hash(net), net.state_dict()))
    with pytest.raises(CertificateError, match="other functions"):
        af.check(file)


@pytest.mark.parametrize("name", ["softmax, tokens", "cells, causal", "grid"])
def test_a_header_that_is_nested_too_deep_is_refused(name: str) -> None:
    saved = parse(BUILT[name](torch.float32).written())
    nested: Any = 0.0
    for _ in range(900):
        nested = [nested]
    path = ["about", "box", "lower"] if name == "grid" else ["box", "lower"]
    with pytest.raises(CertificateError):
        prove(_changed(saved, path, nested), {})
