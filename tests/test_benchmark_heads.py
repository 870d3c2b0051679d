"""The committed numbers of benchmarks/heads.py: they reach their targets, and the README shows them as they are."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_heads", ROOT / "benchmarks" / "heads.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(script: ModuleType) -> dict[str, Any]:
    return json.loads(script.RESULTS.read_text("utf-8"))


def test_bounds_reach_their_targets(script: ModuleType, data: dict[str, Any]) -> None:
    missed = [line for line in script.goals(data) if "certified" in line or "behind" in line]
    assert missed == []
    assert len(data["heads"]) == len(script.cases()) and len(data["peers"]) == len(script.peers())


def test_nothing_was_found_beyond_a_bound(data: dict[str, Any]) -> None:
    for row in data["heads"]:
        for key in ("float32", "float64"):
            assert row[key]["found"] <= row[key]["certified"]


def test_a_missed_target_is_named(script: ModuleType, data: dict[str, Any]) -> None:
    worse = copy.deepcopy(data)
    worse["heads"][0]["float64"]["certified"] = 1.0
    worse["peers"][0]["ahead"] = []
    found = "\n".join(script.goals(worse))
    assert "gelu (32 anchors) in float64: certified 1.00e+00" in found and "multiply on [-10, 10]²: behind" in found


def test_the_measured_page_shows_these_numbers(script: ModuleType, data: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "measured.md").read_text("utf-8")
    shown = re.search(r"<!-- heads:begin -->\n(.*?)\n<!-- heads:end -->", text, flags=re.DOTALL)
    assert shown is not None
    assert shown[1] == script.markdown(data).strip() and shown[1].count("\n| ") >= len(data["heads"])
