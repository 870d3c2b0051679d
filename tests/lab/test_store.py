"""The results folder: whole files, nobody else's folder, and records that are not what they should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnforge.errors import ArgumentError
from attnforge.lab import run
from attnforge.lab.engine import measure_cell
from attnforge.lab.experiment import Cell, Record
from attnforge.lab.store import MARKER, Store
from attnforge.saving import write_whole
from lab.toy import TOY


def record(cell: Cell) -> Record:
    found = measure_cell(TOY.measure, "toy", 1, cell.settings, cell.seed, 1, True)[2]
    assert isinstance(found, Record)
    return found


def test_a_record_lies_where_the_page_says(tmp_path: Path) -> None:
    store, cell = Store.create(tmp_path / "new" / "results"), TOY.grid(True)[0]
    path = store.write(TOY, record(cell))
    assert path == tmp_path / "new" / "results" / "toy" / f"{cell.key}.json" and (path.parents[1] / MARKER).is_file()
    data = json.loads(path.read_text("utf-8"))
    assert {"seed", "settings", "versions", "time_s", "memory_mb", "values", "machine", "device"} <= set(data)
    assert data["time_s"] > 0 and data["memory_mb"] > 10 and data["versions"]["torch"]
    back = store.read(TOY, cell)
    assert back is not None and back.values == record(cell).values
    assert store.todo(TOY, TOY.grid(True)) == TOY.grid(True)[1:] and store.problems == []


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ArgumentError, match="files that the lab did not write, and is left as it is"):
        run(TOY, tmp_path, quick=True, jobs=1)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ArgumentError, match="it is a file; name a folder"):
        run(TOY, tmp_path / "thesis.tex", quick=True, jobs=1)
    with pytest.raises(ArgumentError, match=r"was not written by .* name the folder of a run"):
        Store.open(tmp_path)
    with pytest.raises(ArgumentError, match="does not exist"):
        Store.open(tmp_path / "nowhere")


@pytest.mark.parametrize("folder", ["/proc/results", "/dev/null/results"])
def test_an_unwritable_folder_is_said(folder: str) -> None:
    with pytest.raises(ArgumentError, match=f"cannot write results to '{folder}'"):
        run(TOY, folder, quick=True, jobs=1)


def test_an_empty_folder_is_taken_and_then_known(tmp_path: Path) -> None:
    assert Store.create(tmp_path).folder == Store.create(tmp_path).folder == Store.open(tmp_path).folder


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[: len(text) // 2], "not a record"),
        (lambda text: "", "not a record"),
        (lambda text: "\x00\xff" * 9, "not a record"),
        (lambda text: text.replace('"seed": 0', '"seed": 7'), "the record of another cell"),
        (lambda text: text.replace('"revision": 1', '"revision": 0'), "revision 0 of the experiment, which is at 1"),
        (lambda text: text.replace('"settings"', '"sittings"'), "wrong here: settings, sittings"),
    ],
)
def test_a_corrupted_record_is_named_and_measured_again(tmp_path: Path, spoil: object, words: str) -> None:
    first = run(TOY, tmp_path, quick=True, jobs=1)
    path = Store.open(tmp_path).path(TOY, TOY.grid(True)[3])
    whole = json.loads(path.read_text("utf-8"))
    path.write_text(spoil(path.read_text("utf-8")), "latin-1")  # type: ignore[operator]
    again = run(TOY, tmp_path, quick=True, jobs=1)
    assert (first.measured, again.measured, again.kept) == (8, 1, 7)
    assert len(again.problems) == 1 and str(path) in again.problems[0] and words in again.problems[0]
    assert json.loads(path.read_text("utf-8"))["values"] == whole["values"]


def test_a_new_revision_measures_again(tmp_path: Path) -> None:
    run(TOY, tmp_path, quick=True, jobs=1)
    again = run(replace(TOY, revision=2), tmp_path, quick=True, jobs=1)
    assert again.measured == 8 and "is at 2" in again.problems[0]


def test_the_grid_that_is_further_along_is_gathered(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    assert store.gather(TOY) is None
    run(TOY, tmp_path, quick=True, jobs=1)
    quick = store.gather(TOY)
    assert quick is not None and quick.quick and quick.complete and len(quick.records) == 8
    full = run(TOY, tmp_path, jobs=1)
    assert (full.measured, full.kept) == (16, 8), "cells of both grids are measured once"
    gathered = store.gather(TOY)
    assert gathered is not None and not gathered.quick and len(gathered.records) == 24
    assert [r.cell for r in gathered.records] == list(TOY.grid(False)), "in the order of the grid"
    store.path(TOY, TOY.grid(False)[-1]).write_text("spoiled")
    partly = store.gather(TOY)
    assert partly is not None and partly.quick and partly.complete


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]
