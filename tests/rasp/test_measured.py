"""The committed numbers of benchmarks/programs.py reach their targets, and docs/rasp.md shows them as they are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from attnforge.rasp import library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_programs", ROOT / "benchmarks" / "programs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(script: Any) -> Any:
    return json.loads(script.RESULTS.read_text("utf-8"))


def test_the_page_shows_the_last_run(script: Any, found: Any) -> None:
    between = script.PAGE.read_text("utf-8").split("<!-- programs:begin -->\n")[1].split("\n<!-- programs:end -->")[0]
    assert between == script.markdown(found), "python benchmarks/programs.py --write brings it up to date"


def test_every_program_is_right_at_every_length(script: Any, found: Any) -> None:
    rows = {(row["program"], row["length"]): row for row in found["rows"]}
    assert rows.keys() >= {(name, length) for name in library.PROGRAMS for length in script.LENGTHS}
    assert rows.keys() >= {(name, 1000) for name in script.LONG}
    for (name, length), row in rows.items():
        assert "refused" not in row and row["wrong"] == 0 and row["dtype"] == "float32", (name, length)
        assert row["kind"] == "exact" or (row["kind"] == "certified" and row["measured"] <= row["bound"]), (
            name,
            length,
        )
        assert row["inputs"] == "all" or row["of"] >= script.RANDOM[length], (name, length)
        assert length > 10 or row["seconds"] < 1, name


def test_no_larger_than_tracr(script: Any, found: Any) -> None:
    assert [row["program"] for row in found["beside tracr"]] == list(script.TRACR)
    for row in found["beside tracr"]:
        layers, *_, parameters = row["tracr"]
        assert row["parameters"] <= parameters and row["layers"] <= 2 * layers and row["wrong"] == 0, row["program"]
    assert all(row["wrong"] == 0 for row in found["errors"])


def test_changed_weights_are_noticed(found: Any) -> None:
    assert all(row["wrong"] == 0 and row["refused"] > 0 for row in found["sabotage"])


def test_programs_that_nobody_wrote_are_right() -> None:
    """benchmarks/random_programs.py: no wrong output, and no wrong output of changed weights that are proved again."""
    found = json.loads((ROOT / "benchmarks" / "results" / "random_programs.json").read_text("utf-8"))
    assert found["failures"] == [] and found["programs"]["count"] >= 2000
    assert found["programs"]["exact"] + found["programs"]["certified"] >= 1500
    assert all(row["wrong"] == 0 and row["changes"] == row["refused"] + row["still right"] for row in found["entries"])
    assert sum(row["changes"] for row in found["entries"]) > 10**4


def test_variants_are_proved_in_float64_wherever_there_is_a_head(found: Any) -> None:
    rows = {row["program"]: row for row in found["variants"]}
    assert rows.keys() == library.PROGRAMS.keys()
    for name, row in rows.items():
        assert "refused" not in row["float64 rotated"] or "affine" in row["float64 rotated"]["refused"], name
        cleaned = row["float64 superposed cleaned"]
        assert "refused" not in cleaned or "three values" in cleaned["refused"], name
        assert "refused" in cleaned or cleaned["rank"] < cleaned["columns"], name


def test_the_kernel_proves_every_program(script: Any, found: Any) -> None:
    rows = {(row["program"], row["length"]): row for row in found["kernel"]}
    assert rows.keys() == {(name, length) for name in library.PROGRAMS for length in script.KERNEL}
    assert all(row["proved"] is not None and not row["remark"] for row in rows.values())
