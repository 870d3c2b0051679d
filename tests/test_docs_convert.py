"""The numbers and the figure of docs/convert.md are those of the last run of benchmarks/convert.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_convert", ROOT / "benchmarks" / "convert.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_numbers_are_those_of_the_last_run(script: ModuleType) -> None:
    found = json.loads(script.RESULTS.read_text("utf-8"))
    text = script.PAGE.read_text("utf-8")
    between = text.split("<!-- numbers:begin -->\n")[1].split("\n<!-- numbers:end -->")[0]
    assert between == script.markdown(found), "python benchmarks/convert.py --draw brings them up to date"


def test_the_last_run_reached_the_figures(script: ModuleType) -> None:
    found = json.loads(script.RESULTS.read_text("utf-8"))
    rows = {(row["level"], row["dtype"]): row for row in found["levels"]}
    assert rows.keys() == {(level, dtype) for level in ("ffn", "pure") for dtype in ("float32", "float64", "bfloat16")}
    for (level, dtype), row in rows.items():
        assert row["sentences"] >= 200 and row["anchors"] <= 64 and row["added"] <= 0.001 * row["parameters"]
        if dtype != "bfloat16":
            assert row["change"] <= {"ffn": 1e-5, "pure": 2e-5}[level] and row["ranking changed"] == 0
    cost = {row["level"]: row for row in found["cost"]}
    assert cost["ffn"]["time ratio"] <= 3 and cost["ffn"]["memory ratio"] <= 2
    assert found["census"]["attention"] > 0


@pytest.mark.parametrize("name", ["convert.svg", "convert-dark.svg"])
def test_the_figure_is_there(script: ModuleType, name: str) -> None:
    text = (script.IMAGES / name).read_text("utf-8")
    assert text.startswith("<?xml") and len(text) < 200_000
