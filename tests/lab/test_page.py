"""The page of the lab: all that was found, drawn from records alone, on one page that a browser shows as meant."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnforge.errors import ArgumentError
from attnforge.lab import run
from attnforge.lab.experiment import AGREES, FAILS, Finding, select
from attnforge.lab.page import lab_page, number, page_of, reason, row
from attnforge.lab.store import Store, results, tally, write
from lab.kept import records
from lab.toy import TOY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the path")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=4000",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("results")
    run(TOY, place, jobs=1)
    return place


def test_the_page_says_what_a_reader_asks(folder: Path) -> None:
    html = lab_page(folder, [TOY]).html()
    text = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)
    for words in (TOY.claim, TOY.label, TOY.varies, TOY.measured_how, TOY.judged_how, "full grid, 24 cells"):
        assert words in text
    for words in ("agrees", "does not hold", "-1.07  [-1.1, -1.05]", "≤ 1e-09", "of the fitted slope meets -1 ± 0.1"):
        assert words in text
    assert re.search(r"torch \d", text) and "threads of a cell" in text and "cores" in text
    assert html.count("plotly.js v") == 1 and html.count('class="plot"') == 1 and html.count('class="still"') == 1
    links = re.findall(r'<a href="#([^"]*)">', html)
    assert links == ["what-does-not-hold-and-why", "verdicts", "a-toy", "where-the-numbers-come-from"]
    assert "`" not in text and not re.search(r"<th[^>]*></th>", html), "no raw marks, no empty header"
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r'(?:src|href)="(?!data:image/|#)', markup), "nothing is loaded from outside"


@pytest.mark.parametrize(
    ("cause", "blamed"), [("float32", "The arithmetic"), ("training", "Training"), ("theory", "The theory itself")]
)
def test_what_does_not_hold_has_a_reason(cause: str, blamed: str) -> None:
    said = reason(Finding("error", 1.0, 2.0, None, FAILS, "rule", "at most").laid_to(cause))
    assert said.startswith(f"error: predicted ≤ 1, measured 2. {blamed}: ") and said.endswith(".")
    with pytest.raises(ArgumentError, match="a cause is one of float32, training, theory"):
        Finding("error", 1.0, 2.0, None, FAILS, "rule").laid_to("luck")


def test_findings_of_trained_networks_and_coarse_arithmetic_say_so() -> None:
    """Of every kept record: the words of a quantity and its cause go together."""
    found = [finding for one in select("all") for finding in one.judge(records(one))]
    for finding in found:
        words = finding.quantity
        trained = re.search(r"\btrained\b|gradient descent|from the construction", words)
        wanted = "training" if trained else "float32" if re.search("float32|bfloat16", words) else "theory"
        assert finding.cause == wanted, words
    assert {finding.cause for finding in found} == {"float32", "training", "theory"}


def test_figures_and_verdicts_are_files_beside_the_records(folder: Path) -> None:
    found, problems = results(folder, [TOY])
    files = write(found, folder)
    assert problems == () and [p.relative_to(folder).as_posix() for p in files] == [
        "toy/error.png", "toy/error.svg", "findings.json",
    ]  # fmt: skip
    rows = json.loads((folder / "findings.json").read_text("utf-8"))
    assert [r["verdict"] for r in rows] == ["agrees", "agrees", "does not hold"] and rows[0]["experiment"] == "toy"
    assert tally(found) == {"agrees": 2, "better than predicted": 0, "does not hold": 1}
    records = [json.loads(p.read_text("utf-8")) for p in (folder / "toy").glob("*.json")]
    assert len(records) == 24 and all(r["experiment"] == "toy" for r in records), "every JSON there is a record"


def test_verdicts_follow_the_records_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    store = Store.open(tmp_path / "copy")
    for cell in TOY.grid(False):
        record = store.read(TOY, cell)
        assert record is not None
        store.write(TOY, replace(record, values={**record.values, "error": 0.5}))
    found, _ = results(tmp_path / "copy", [TOY])
    assert [f.verdict for f in found[0].findings] == ["does not hold"] * 3
    assert found[0].figures[0].panels[0].series[0].y == (0.5,) * 6


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run(TOY, tmp_path, quick=True, jobs=1)
    store = Store.open(tmp_path)
    for cell in TOY.grid(True)[1:]:
        store.path(TOY, cell).unlink()
    store.path(TOY, TOY.grid(True)[1]).write_text("{")
    found, problems = results(tmp_path, [TOY])
    assert found[0].state == "quick grid, 1 of 8 cells" and "two x or more" in found[0].note
    html = page_of(found, problems).html()
    assert "Unfinished" in html and str(store.path(TOY, TOY.grid(True)[1])) in html
    store.path(TOY, TOY.grid(True)[0]).unlink()
    with pytest.raises(ArgumentError, match="has no records yet"):
        results(tmp_path, [TOY])


def test_a_mistake_in_a_whole_experiment_is_raised(folder: Path) -> None:
    with pytest.raises(KeyError):
        results(folder, [replace(TOY, judge=lambda records: [records[0]["no such value"]])])


def test_numbers_are_shown_so_that_a_miss_is_seen() -> None:
    assert [number(v) for v in (-1.0, 0.12345, 1e-9, 1234567.0)] == ["-1", "0.123", "1e-09", "1.23e+06"]
    close = Finding("q", 0.48512, 0.48519, None, AGREES, "rule", "at most")
    assert row(close)[1:3] == ("≤ 0.4851", "0.4852")
    assert row(Finding("q", None, 2.0, (float("-inf"), float("inf")), AGREES, "rule"))[1:3] == ("–", "2")


def chromium(path: Path, *flags: str, width: int = 1200) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={path.parent / 'profile'}", f"--window-size={width},1600", *flags,
               path.as_uri()]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def probed(html: str, path: Path, width: int = 1200) -> dict[str, Any]:
    """What a script sees that runs after the page's own: errors, sizes, and colours before and after a click."""
    script = """
      const seen = []; addEventListener('error', (e) => seen.push(String(e.message)));
      addEventListener('load', () => setTimeout(() => {
        const root = document.documentElement;
        const strokes = () => [...document.querySelectorAll('.plot .scatterlayer .js-line')].map((e) => e.style.stroke);
        const before = strokes();
        document.getElementById('theme').click();
        setTimeout(() => { document.title = 'PROBE' + btoa(JSON.stringify({
          errors: seen, wide: root.scrollWidth, room: root.clientWidth, before, after: strokes(),
          plots: document.querySelectorAll('.plot .main-svg').length,
          charts: [...document.querySelectorAll('.plot')].filter((e) => e.offsetHeight > 0).length,
          still: [...document.querySelectorAll('.still')].filter((e) => e.offsetHeight > 0).length })); }, 400);
      }, 600));
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = html.replace("</body>", f"<script>{script}</script></body>", 1)
    html = html.replace("script-src ", f"script-src &#39;sha256-{digest}&#39; ", 1)
    path.write_text(html, "utf-8", newline="\n")
    found = re.search(r"<title>PROBE([^<]*)</title>", chromium(path, "--dump-dom", width=width))
    assert found, "the page's scripts did not run to their end"
    result: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return result


@browser
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_the_charts_in_the_colours_of_the_theme(folder: Path, tmp_path: Path, width: int) -> None:
    seen = probed(lab_page(folder, [TOY]).html(), tmp_path / "page.html", width)
    assert (
        seen["errors"] == []
        and seen["wide"] <= seen["room"]
        and seen["plots"] >= 1
        and seen["still"] == 0
        and seen["charts"] == 1
    )
    assert len(seen["before"]) == 3 and len(set(seen["before"])) == 3, "two measurements and a grey bound"
    assert all(a != b for a, b in zip(seen["before"][:2], ["rgb(0, 0, 0)"] * 2, strict=True))
    assert set(seen["before"]) != set(seen["after"])


@browser
def test_on_paper_the_charts_are_pictures(folder: Path, tmp_path: Path) -> None:
    html = lab_page(folder, [TOY]).html()
    assert html.count("@media print") == 1
    seen = probed(html.replace("@media print", "@media screen"), tmp_path / "page.html")
    assert seen["still"] == 1 and seen["charts"] == 0 and seen["errors"] == []
