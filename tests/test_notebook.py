"""The notebook runs through as a script, and what it shows is so."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_notebook_runs_and_shows_what_it_says() -> None:
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "examples" / "notebook.py")
    assert spec is not None and spec.loader is not None
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        outputs, found = notebook.app.run()
    assert len(outputs) == 9 and found["net"].bound <= 1e-3 and found["net"].certificate.kind == "certified"
    assert "product: x*y" in [head["computes"] for head in found["heads"]]
    assert found["answer"] == "dcba" and found["reverse"].certificate.kind == "exact"
    assert found["report"].worst < 1e-4 and found["after"] > found["before"]
    text = " ".join(str(getattr(output, "text", "")) for output in outputs)
    assert "exact" in text and "dcba" in text
