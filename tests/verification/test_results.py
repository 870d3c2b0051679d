"""The numbers of docs/verification.md are those of the last run of benchmarks/verification.py, and refute no label."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_the_last_run() -> None:
    spec = importlib.util.spec_from_file_location("benchmark_verification", ROOT / "benchmarks" / "verification.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = json.loads(script.RESULTS.read_text("utf-8"))
    marks = r"<!-- verifiers:begin -->\n(.*?)\n<!-- verifiers:end -->"
    shown = re.search(marks, script.PAGE.read_text("utf-8"), re.DOTALL)
    assert shown is not None and shown[1] == script.markdown(found), "python benchmarks/verification.py --fill"
    assert not found["missing"]
    for run in (found, found["programs"]):
        assert run["read by vnnlib"] == run["instances"] == len(run["rows"])
        assert not any(against["against the label"] for against in run["against"])
        for row in run["rows"]:
            wrong = {tool for tool, word in row["says"].items() if word in ("sat", "unsat") and word != row["label"]}
            assert wrong <= {a["tool"] for a in run["against"] if a["name"] == row["name"]}, "every one was looked into"
