"""Proofs of operations over tokens and channels: their bounds hold, and whatever is changed in them is noticed."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch
from flint import arb, ctx

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.compiler.derivation import derive
from attnforge.compiler.pipeline import compile_program
from attnforge.errors import CertificateError
from attnforge.kernel.balls import up, working
from attnforge.kernel.file import Saved, Tensor, parse
from attnforge.kernel.prove import Prover, prove
from attnforge.kernel.rounding import MACHINES, Machine
from attnforge.kernel.tokens import lambert
from attnforge.kernel.values import Blind, values
from attnforge.programs.positions import prepared
from attnforge.programs.program import Builder, Program

HIDDEN = [[0.0, float("-inf"), 0.5], [0.0, 0.0, float("-inf")], [-1.0, 0.0, 0.25]]


def programs() -> dict[str, Program]:
    """A program for each operation, on three tokens of two channels."""
    made: dict[str, Any] = {
        "attention": lambda b: b.attention(0, 0, 0, 0.7),
        "masked": lambda b: b.attention(0, 0, 0, 0.7, mask=HIDDEN),
        "causal": lambda b: b.attention(0, 0, 0, 0.7, causal=True),
        "softmax": lambda b: b.softmax(0),
        "maximum": lambda b: b.max_tokens(0),
        "mean": lambda b: b.mix(0, [[0.5] * 3] * 3),
        "mix": lambda b: b.mix(0, [[0.5, -1.0, 0.0], [0.0, 0.0, 2.0], [0.3, 0.3, 0.3]]),
        "norm": lambda b: b.normalise(b.linear([(0, [[1.0, 0.5], [0.0, 1.0]])], [2.0, -3.0]), 1e-3, centred=False),
    }
    out = {}
    for name, make in made.items():
        build = Builder(af.Box.cube(-1, 1, shape=(3, 2)), tokens=3)
        out[name] = prepared(build.program(make(build), name, (3, 2)))
    return out


PROGRAMS = programs()


def compiled(name: str, dtype: torch.dtype = torch.float32) -> tuple[CompiledNetwork, Saved, dict[str, Any]]:
    net = compile_program(PROGRAMS[name], 1e-3, dtype)
    saved = parse(net.written())
    assert net.bound is not None
    return net, saved, derive(net, saved, net.bound, effort=150 if name == "norm" else 1)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_holds_and_is_near_that_of_the_analysis(name: str, dtype: torch.dtype, benchmark: ModuleType) -> None:
    net, saved, chosen = compiled(name, dtype)
    found = prove(saved, chosen).bound
    slack = 1e-15 if dtype == torch.float64 else 0.0  # the truth itself is computed in float64
    assert benchmark.network_error(net, net.program, 4000) <= found + slack and found <= 1.5 * net.bound


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_changed_entry_is_covered_or_refused(name: str, benchmark: ModuleType) -> None:
    net, saved, chosen = compiled(name)
    results = []
    for table, tensor in saved.tensors.items():
        for i in range(0, len(tensor.numbers), max(1, len(tensor.numbers) // 6)):
            mutant = type(net).rebuild(net.config(), net.state_dict())
            entry = mutant.state_dict()[table].view(-1)
            entry[i] = entry[i] * 1.01 + 0.125
            numbers = tuple(entry.double().tolist())
            changed = {**saved.tensors, table: Tensor(tensor.dtype, tensor.shape, numbers)}
            wrong = Saved(saved.header, changed, "")
            results.append(
                benchmark.verdict(
                    lambda wrong=wrong: prove(wrong, chosen).bound,  # type: ignore[misc]
                    lambda mutant=mutant: benchmark.network_error(mutant, net.program, 2000),  # type: ignore[misc]
                )
            )
    assert "BROKEN" not in results and "refused" in results


def test_scopes_are_those_of_the_heads() -> None:
    _, saved, chosen = compiled("attention")
    for scope in (["tokens", True], ["self", False], ["memory", False]):
        wrong = {**chosen, "scopes": [[], [scope], []]}
        with pytest.raises(CertificateError):
            prove(saved, wrong)


def test_the_constant_of_a_maximum() -> None:
    with working():
        for n in (2, 3, 10, 100, 10**6):
            found = lambert(n)
            assert found * found.exp() >= arb(n - 1) / arb.const_e() and found < 1 + arb(n).log()


def _exact(name: str, x: list[list[arb]]) -> list[list[arb]]:
    """What a program of this file is for, in ball arithmetic."""
    n = len(x)

    def mean(row: list[arb], values: list[list[arb]]) -> list[arb]:
        powers = [logit.exp() for logit in row]
        return [sum((p * v[c] for p, v in zip(powers, values, strict=True)), arb(0)) / sum(powers, arb(0))
                for c in range(2)]  # fmt: skip

    if name in ("attention", "masked", "causal"):
        mask = HIDDEN if name == "masked" else [[0.0] * n] * n
        out = []
        for i in range(n):
            seen = [j for j in range(n) if mask[i][j] > -1e300 and (name != "causal" or j <= i)]
            logits = [arb("0.7") * (x[i][0] * x[j][0] + x[i][1] * x[j][1]) + arb(mask[i][j]) for j in seen]
            out.append(mean(logits, [x[j] for j in seen]))
        return out
    if name == "softmax":
        return [mean(row, [[arb(1), arb(0)], [arb(0), arb(1)]]) for row in x]
    if name == "maximum":
        return [[max((row[c] for row in x), key=float) for c in range(2)]] * n
    if name in ("mean", "mix"):
        matrix = [["0.5"] * 3] * 3 if name == "mean" else [["0.5", "-1", "0"], ["0", "0", "2"], ["0.3"] * 3]
        return [[sum((arb(m) * r[c] for m, r in zip(row, x, strict=True)), arb(0)) for c in range(2)] for row in matrix]
    moved = [[a + 2, a / 2 + b - 3] for a, b in x]
    roots = [((a * a + b * b) / 2 + arb("0.001")).sqrt() for a, b in moved]
    return [[a / root, b / root] for (a, b), root in zip(moved, roots, strict=True)]


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_errors_of_every_size_pass_through_as_the_lemmas_say(
    name: str, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K11 and K13 to K17: what is read errs by 1e-300 up to 1, the exact result, in 1200 bits, moves by no more.

    On a machine that does not round, too: there is nothing else then that could cover a tiny error.
    """
    net, saved, chosen = compiled(name, torch.float64)
    if not rounded:
        monkeypatch.setitem(MACHINES, "float64", Machine(arb(0), arb(0), MACHINES["float64"].huge))
    draw, least = random.Random(name), 1.0
    with working():
        prover = Prover.of(saved, chosen)
        for _ in range(4):
            middle = [draw.uniform(-0.9, 0.9) for _ in range(6)]
            low, high = (tuple(x + sign * 2.0**-8 for x in middle) for sign in (-1, 1))
            found = values(prover.program, low, high, prover.by_op)
            x = [[arb(draw.uniform(low[2 * t + c], high[2 * t + c])) for c in range(2)] for t in range(3)]
            for size in (1e-300, 1e-100, 1e-30, 1e-10, 1e-4, 0.1, 1.0):
                errors = [[arb(size) if c < 2 else e for c, e in enumerate(row)] for row in prover._start()]
                try:
                    for number in range(len(prover.layers)):
                        errors = prover._through(number, errors, found)
                except Blind:
                    assert name == "norm" and size == 1.0  # the square of a norm is beyond its cells
                    continue
                least = min(least, up(errors[0][0]))
                assert size > 0.01 or up(errors[0][0]) < 20 * size + 2 * (net.bound or 0.0)
                with ctx.workprec(1200):
                    for _ in range(3):
                        near = [[v + arb(size) * draw.choice([-1, 1, draw.uniform(-1, 1)]) for v in row] for row in x]
                        for row, moved, bounds in zip(_exact(name, x), _exact(name, near), errors, strict=False):
                            assert all(abs(a - b) <= e for a, b, e in zip(row, moved, bounds, strict=True))
    assert rounded or name not in ("softmax", "mean", "causal") or least < 1e-16


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_lie_in_their_ranges(name: str) -> None:
    """K10 on boxes 1e-300 to 1 wide, at random points and corners of them."""
    _, saved, chosen = compiled(name, torch.float64)
    draw = random.Random(name)
    with working():
        prover = Prover.of(saved, chosen)
        for width in (1e-300, 1e-100, 1e-30, 1e-10, 1e-4, 0.1, 1.0):
            for _ in range(3):
                low = tuple(draw.choice([0.0, draw.uniform(-1, 1 - width)]) for _ in range(6))
                high = tuple(min(x + width, 1.0) for x in low)
                found = values(prover.program, low, high, prover.by_op)[prover.program.output]
                for _ in range(6):
                    at = [draw.choice([a, b, draw.uniform(a, b)]) for a, b in zip(low, high, strict=True)]
                    with ctx.workprec(1200):
                        exact = _exact(name, [[arb(at[2 * t + c]) for c in range(2)] for t in range(3)])
                    for row, entries in zip(exact, found, strict=True):
                        for value, entry in zip(row, entries, strict=True):
                            assert not value < entry.low and not value > entry.high
                            assert width > 0.01 or entry.high - entry.low < 100 * width + 1e-12 or name == "norm"
