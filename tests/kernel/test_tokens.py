"""Proofs of operations over tokens and channels: their bounds hold, and whatever is changed in them is noticed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from flint import arb

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.compiler.derivation import derive
from attnforge.compiler.pipeline import compile_program
from attnforge.errors import CertificateError
from attnforge.kernel.balls import working
from attnforge.kernel.file import Saved, Tensor, parse
from attnforge.kernel.prove import prove
from attnforge.kernel.tokens import _lambert
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
def test_the_bound_holds_and_is_near_that_of_the_analysis(
    name: str, dtype: torch.dtype, benchmark: ModuleType
) -> None:
    net, saved, chosen = compiled(name, dtype)
    found = prove(saved, chosen).bound
    slack = 1e-15 if dtype == torch.float64 else 0.0  # the truth itself is computed in float64
    assert benchmark.errors(net, net.program, 4000) <= found + slack and found <= 1.5 * net.bound


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
                    lambda mutant=mutant: benchmark.errors(mutant, net.program, 2000),  # type: ignore[misc]
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
            found = _lambert(n)
            assert found * found.exp() >= arb(n - 1) / arb.const_e() and found < 1 + arb(n).log()
