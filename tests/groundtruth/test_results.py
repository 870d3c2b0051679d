"""The table of circuits that were found is that of the last run of benchmarks/groundtruth.py."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_and_the_readme_show_the_last_run() -> None:
    spec = importlib.util.spec_from_file_location("benchmark_groundtruth", ROOT / "benchmarks" / "groundtruth.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = json.loads(script.RESULTS.read_text("utf-8"))
    for page, table in ((script.PAGE, script.markdown), (script.README, script.short)):
        text = page.read_text("utf-8")
        shown = re.findall(r"<!-- circuits:begin -->\n(.*?)\n<!-- circuits:end -->", text, re.DOTALL)
        assert shown == [table(found["summary"])], "python benchmarks/groundtruth.py --fill"
    assert found["settings"] == script.SETTINGS and script.summary(found["models"]) == found["summary"]
    assert len({(row["program"], row["form"]) for row in found["models"]}) == 30 >= len(script.PROGRAMS)
