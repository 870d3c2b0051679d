"""A catalogue: whole folders, true manifests, equal bytes, and nothing lost when a run is stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge.catalogue import sampler
from attnforge.catalogue.build import COUNT, build, read_index, truth_of
from attnforge.catalogue.recipes import recipes
from attnforge.errors import ArgumentError
from attnforge.groundtruth import check
from attnforge.rasp.domain import Sequences

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first nine models: a program, a formula, and a program that is held out."""
    folder = tmp_path_factory.mktemp("catalogue") / "here"
    done = build(folder, count=9, jobs=1)
    assert (done.made, done.kept, done.failures) == (9, 0, ())
    return folder


def test_every_model_is_what_its_manifest_says(catalogue):
    entries = read_index(catalogue)
    assert [entry["id"] for entry in entries] == [f"m{i:04d}" for i in range(9)]
    for entry in entries[:3] + entries[4:5]:
        folder = catalogue / "models" / entry["id"]
        net = af.load(folder / "network.safetensors")
        assert net.certificate.kind == entry["certificate"]
        truth = truth_of(catalogue, entry["id"])
        assert sum(bool(head.moves) for head in truth.heads) == entry["relevant_heads"] > 0
        if entry["id"] in ("m0001", "m0004"):
            assert check(truth, net).witnesses > 0
        for name, about in entry["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == about["sha256"]
    kinds = [entry["kinds"] for entry in entries[:6]]
    assert kinds[0] == kinds[3] == [] and "rotated" in kinds[1] and "superposed" in kinds[2]
    assert "rotated" in kinds[4] and "distractor" in kinds[5]


def test_held_out_models_tell_nothing(catalogue):
    for entry in read_index(catalogue)[6:]:
        assert entry["split"] == "held-out" and not {"target", "kinds", "certificate", "relevant_heads"} & set(entry)
        shown, answer = catalogue / "models" / entry["id"], catalogue / "answers" / entry["id"]
        assert not (shown / "manifest.json").exists() and (answer / "manifest.json").exists()
        target = json.loads((answer / "entry.json").read_text())["target"]
        assert target.startswith("hist")
        assert all(
            b"hist" not in file.read_bytes() and b"selector" not in file.read_bytes() for file in shown.iterdir()
        )
        blind, whole = af.load(shown / "weights.safetensors"), af.load(answer / "network.safetensors")
        ids = torch.randint(4, (20, 4), generator=torch.Generator().manual_seed(0))
        assert torch.equal(blind(ids), whole(ids))


def test_a_run_goes_on_and_gives_equal_bytes(catalogue, tmp_path):
    folder = tmp_path / "again"
    build(folder, count=3, jobs=1)
    before = bytes_of(catalogue)
    same = bytes_of(folder)
    assert all(before[name] == data for name, data in same.items() if name.startswith("models/") and "html" not in name)
    (folder / "models" / "m0001" / "entry.json").unlink()  # stopped before the last file
    (folder / "models" / "m0002" / "manifest.json").write_text("{")  # half a file
    weights = folder / "models" / "m0000" / "network.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))  # a whole one, of zeros
    (folder / "models" / ".m0002.xyz.part").mkdir()
    done = build(folder, count=3, jobs=1)
    assert (done.made, done.kept) == (3, 0) and bytes_of(folder) == same


def test_what_is_no_place_for_a_catalogue_is_left_alone(catalogue, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="no catalogue"):
        build(tmp_path / "mine", count=1, jobs=1)
    assert bytes_of(tmp_path / "mine") == {"notes.txt": b"mine"}
    with pytest.raises(ArgumentError, match="is a file"):
        build(tmp_path / "mine" / "notes.txt", count=1, jobs=1)
    with pytest.raises(ArgumentError, match="seed 0, not of version 2 and seed 5"):
        build(catalogue, count=1, seed=5, jobs=1)
    with pytest.raises(ArgumentError, match="cannot write a catalogue"):
        build(Path("/proc/nothing"), count=1, jobs=1)
    with pytest.raises(ArgumentError, match="count"):
        build(tmp_path / "new", count=0)
    with pytest.raises(ArgumentError, match="no model 'm9999'"):
        truth_of(catalogue, "m9999")
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "catalogue.json").write_text('{"version": 2, "seed": 0}')
    with pytest.raises(ArgumentError, match="no index yet"):
        read_index(tmp_path / "stopped")


def test_the_index_page_lists_and_filters(catalogue):
    page = (catalogue / "index.html").read_text("utf-8")
    assert page.count("<tr>") == 10 and 'href="models/m0008/index.html"' in page and 'type="search"' in page
    assert 'src="http' not in page and "light-dark(" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the path")
def test_the_index_page_filters_in_a_browser(catalogue):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((catalogue / "index.html").as_uri())
        field, rows = page.locator("input[type=search]"), page.locator("tbody tr:visible")
        for words, count in (("rotated", 2), ("held-out", 3), ("OPEN superposed", 1), ("nothing such", 0), ("", 9)):
            field.fill(words)
            assert rows.count() == count, words
        field.fill("superposed")
        rows.locator("a").first.click()
        assert page.url.endswith("models/m0002/index.html") and not wrong
        browser.close()


def test_a_catalogue_has_two_hundred_models_and_a_longer_one_begins_alike():
    found = recipes(COUNT, 0)
    assert len(found) >= 200 and recipes(30, 0) == found[:30]
    assert len({(recipe.source, recipe.place, recipe.form) for recipe in found}) == len(found)
    assert {recipe.source for recipe in found} == {"library", "formula", "sequence", "random program", "random formula"}
    assert 0.15 < sum(recipe.held_out for recipe in found) / len(found) < 0.25


def test_random_programs_are_programs():
    """Whatever is drawn can be run by the interpreter, on every sequence that is drawn for it."""
    for seed in range(60):
        program, letters, longest = sampler.program(np.random.default_rng(seed))
        for sequence in Sequences(letters, longest).sample(4):
            assert len(program(list(sequence))) == len(sequence)
        assert sampler.formula(np.random.default_rng(seed)) == sampler.formula(np.random.default_rng(seed))
