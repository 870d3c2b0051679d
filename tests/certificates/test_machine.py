"""The machine's self-test: what holds here, and that each measurement can find an assumption that does not hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attnforge.certificates.machine import Assumption, ball_exp, devices, survey
from attnforge.certificates.rounding import EXP_ULPS, UNIT
from attnforge.cli import app

DTYPES = (torch.float32, torch.float64)
Array = np.ndarray[Any, Any]


@pytest.fixture
def coarse_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def named(found: tuple[Assumption, ...]) -> dict[str, Assumption]:
    return {each.name: each for each in found}


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_machine_keeps_every_assumption(dtype: torch.dtype) -> None:
    found = named(survey("cpu", dtype, effort=4000))
    assert [each for each in found.values() if not each.holds] == []
    assert 0.5 <= found["exp"].measured <= EXP_ULPS and found["exponential of softmax"].measured >= 0.5
    assert 0.5 <= found["IEEE operations"].measured <= 1, "some result lies half way between two numbers"
    assert all(each.covered for each in found.values()) and "cpu" in devices()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exponential_that_is_off_is_found(dtype: torch.dtype) -> None:
    """Judged by a reference that lies 3 u beside exp, which is the same as an exponential that does."""

    def beside(x: Array) -> tuple[Array, Array]:
        high, low = ball_exp(x)
        return high, low + 3 * UNIT[dtype] * high

    found = named(survey("cpu", dtype, effort=2000, reference=beside))
    for name in ("exp", "exponential of softmax"):
        assert not found[name].holds and 2 < found[name].measured - EXP_ULPS / 2 < 4
    assert found["IEEE operations"].holds and found["inner products"].holds


def test_flushed_subnormal_numbers_are_allowed_and_said() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found = named(survey("cpu", torch.float32, effort=500))["underflow of the exponential"]
    finally:
        torch.set_flush_denormal(False)
    assert found.holds and "flushed" in found.covered


@pytest.mark.usefixtures("coarse_products")
def test_a_switch_for_reduced_precision_is_found() -> None:
    assert not survey("cpu", torch.float32, effort=500)[0].holds
    assert survey("cpu", torch.float64, effort=500)[0].holds, "it says nothing about float64"
    result = CliRunner().invoke(app, ["check", "--machine", "--json"], prog_name="attnforge")
    assert result.exit_code == 1 and "switches for reduced precision in float32 on cpu" in result.stderr
    shown = json.loads(result.stdout)
    assert not shown["holds"] and [f["name"] for f in shown["findings"] if not f["holds"]]


def test_the_command_shows_every_assumption() -> None:
    result = CliRunner().invoke(app, ["check", "--machine"], prog_name="attnforge")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 14 * len(devices()) and all(" yes " in line for line in lines[1:])
    both = CliRunner().invoke(app, ["check", "x.safetensors", "--machine"], prog_name="attnforge")
    assert both.exit_code == 2 and "reads no file" in both.stderr
