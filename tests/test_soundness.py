"""A small, fixed budget of the referee (benchmarks/soundness.py): these seeds, hunted, settled in ball arithmetic."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "soundness.py"
EVALUATIONS = 4000
#: Seeds of each kind, chosen for what they are and for being quick; among them every variant and both dtypes.
SEEDS = {
    "formula": (0, 2, 5, 6, 7, 9, 13, 14, 17, 18, 22, 29, 33, 39, 43, 48, 55),
    "module": (2, 3, 6, 8, 10, 11),
    "tokens": (2, 3, 7, 9, 10, 11, 12, 13),
    "head": (1, 2, 3, 6, 8, 9, 12, 13),
    "order": (0, 1, 2, 3, 4, 5),
    "estimator": (1, 2, 3, 4, 5, 7, 8, 11, 13),
}


@pytest.fixture(scope="module")
def referee() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soundness", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soundness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", SEEDS)
def test_no_point_breaks_a_certificate(referee: ModuleType, kind: str) -> None:
    rows = [referee.examined(kind, seed, EVALUATIONS) for seed in SEEDS[kind]]
    assert [row for row in rows if row["status"] == "broken"] == []
    certified = [row for row in rows if row["status"] == "holds"]
    assert len(certified) >= 0.7 * len(rows), "most of these have a certificate to attack"
    assert sum(row["undecided"] for row in certified) == 0
    assert max(row["ratio"] for row in certified) > 0.5, "the hunt comes near to the bounds"


def test_a_bound_that_is_a_little_too_small_is_caught(referee: ModuleType) -> None:
    """The same network, with a bound below an error that the hunt has found, and one whose weights have changed."""
    found = referee.prepared("formula", 40)
    bad = referee.hunt(found.net, found.case, found.bound, EVALUATIONS, 0)
    ratio = referee.settle(found.net, found.case, found.bound, bad).largest
    assert 0.5 < ratio <= 1
    verdict = referee.settle(found.net, found.case, found.bound * ratio * 0.999, bad)
    assert verdict.broken and verdict.broken[0]["ratio"] > 1
    with torch.no_grad():
        next(p for p in found.net.parameters() if p.requires_grad).mul_(1.01)
    moved = referee.hunt(found.net, found.case, found.bound, EVALUATIONS, 0)
    assert referee.settle(found.net, found.case, found.bound, moved).broken, "the old bound, kept by mistake"


def test_the_three_arithmetics_agree(referee: ModuleType) -> None:
    """Every function in float64, long doubles and balls, at points inside of its domain."""
    for name, (low, high) in referee.WITHIN.items():
        x = torch.linspace(max(low, -9) + 1e-3, min(high, 9) - 1e-3, 7, dtype=torch.float64)
        fast = referee.call(referee.TORCH, name, x).tolist()
        wide = referee.call(referee.LONG, name, referee.LONG.column(x[:, None], 0)).astype(float).tolist()
        exact = [float(referee.call(referee.BALLS, name, referee.arb(v))) for v in x.tolist()]
        assert fast == pytest.approx(exact, rel=1e-12, abs=1e-14) and wide == pytest.approx(exact, rel=1e-12, abs=1e-14)
