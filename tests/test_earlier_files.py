"""Files written by version 0.1.0, before sites were typed: they still load, check, and state no less than they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import attnforge as af

FOLDER = Path(__file__).parent / "files"
STATED = json.loads((FOLDER / "bounds.json").read_text("utf-8"))


@pytest.mark.parametrize("name", STATED)
def test_a_file_of_before_loads_and_checks(name: str) -> None:
    path = FOLDER / f"{name}.safetensors"
    net = af.load(path)
    assert net.bound == STATED[name]
    found = af.check(path)
    assert found.kind == "certified" and found.bound is not None and found.bound <= STATED[name]
    assert found.bound >= 0.5 * STATED[name], "the analysis got sharper for some families, not blind"


@pytest.mark.parametrize("name", STATED)
def test_what_was_loaded_is_saved_and_checks_again(name: str, tmp_path: Path) -> None:
    net = af.load(FOLDER / f"{name}.safetensors")
    af.certify(net)
    net.save(tmp_path / "again.safetensors")
    assert af.check(tmp_path / "again.safetensors").bound == net.bound
