"""The report of a conversion as data: valid by construction, to JSON and back, printed as a table that lines up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import attnforge as af
from attnforge.conversion.record import Conversion, Left, Replacement

SITE = Replacement("body.1", "gelu", "ffn", "fast", -16.0, 16.0, 2.0, 31, 96, 1e-6, 4.0, -3.1, 4.0, 0.25, True, calls=1)
NORM = Replacement(
    "body.2", "layer_norm", "pure", "norm", 0.01, 9.0, 30.0, 18, 54, 1e-5, 5.0, kind="norm", ranged="variance"
)
REPORT = Conversion(
    "Net", "pure", 1e-4, "float32", (SITE, NORM), (Left("head.0", "relu", "named in leave"),), 1000, 1150,
    change=2.5e-6, output=3.0, batches=2, held_out=1, notes=("a note",),
)  # fmt: skip


def test_json_and_back(tmp_path: Path) -> None:
    assert Conversion.from_json(json.loads(json.dumps(REPORT.to_json(), allow_nan=False))) == REPORT
    REPORT.save(tmp_path / "report.json")
    assert Conversion.from_json(json.loads((tmp_path / "report.json").read_text("utf-8"))) == REPORT
    with pytest.raises(af.ArgumentError, match=r"ends with \.html, \.htm, \.json"):
        REPORT.save(tmp_path / "report.txt")
    with pytest.raises(af.ArgumentError, match="not the description"):
        Conversion.from_json({"model": "Net"})
    open_ended = replace(SITE, low=-math.inf, high=math.inf)
    assert Replacement.from_json(json.loads(json.dumps(open_ended.to_json(), allow_nan=False))) == open_ended


def test_totals() -> None:
    assert REPORT.by_family == {"fast": 1, "norm": 1}
    assert REPORT.added == 150
    assert REPORT.most_anchors == 31
    assert REPORT.worst == NORM.relative >= NORM.bound / NORM.scale
    assert SITE.relative >= 1e-6 / 4


def test_text_keeps_certified_and_measured_apart() -> None:
    text = str(REPORT)
    assert "certified per site: sup error at most" in text
    assert "measured end to end: outputs moved by 2.50e-06 at most" in text
    assert "left as it was: 1" in text
    assert "note: a note" in text
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("path"))
    row = next(line for line in lines if line.startswith("body.1"))
    assert header.index("bound") == row.index("1e-06")
    assert "nothing" in replace(REPORT, change=None).measured_text


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (dict(level="all"), "level"),
        (dict(family="magic"), "family"),
        (dict(low=3.0, high=3.0), "low < high"),
        (dict(bound=-1.0), "bound"),
        (dict(bound=math.inf), "bound"),
        (dict(scale=0.0), "scale"),
        (dict(anchors=-1), "counts"),
    ],
)
def test_sites_are_valid_by_construction(changed: dict[str, object], told: str) -> None:
    with pytest.raises(af.ArgumentError, match=told):
        replace(SITE, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "told"),
    [(dict(level="all"), "level"), (dict(eps=0.0), "eps"), (dict(sites=(SITE, SITE)), "one site"),
     (dict(change=math.nan), "measured change")],
)  # fmt: skip
def test_reports_are_valid_by_construction(changed: dict[str, object], told: str) -> None:
    with pytest.raises(af.ArgumentError, match=told):
        replace(REPORT, **changed)  # type: ignore[arg-type]
