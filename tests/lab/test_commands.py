"""`attnforge lab`: what it prints and writes, how it answers mistakes, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnforge.cli import app
from attnforge.errors import ArgumentError, closest
from attnforge.lab import experiment as registry
from attnforge.lab.experiment import Experiment
from lab.toy import BROKEN, TOY

ROOT = Path(__file__).resolve().parents[2]


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, ["lab", *args], prog_name="attnforge")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry holds the toys: the commands run them as they run the real ones."""
    known = {"toy": TOY, "broken": BROKEN}

    def select(name: str) -> tuple[Experiment, ...]:
        if name not in known and name != "all":
            raise ArgumentError(f"there is no experiment '{name}'{closest(name, known)}; known are toy, and all")
        return (TOY,) if name == "all" else (known[name],)

    monkeypatch.setattr(registry, "select", select)


@pytest.mark.usefixtures("toys")
def test_run_writes_records_figures_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "results"
    first = call("run", "toy", "--quick", "--jobs", "1", "--out", str(out))
    assert first.exit_code == 0 and "measured 8 cells, kept 0" in first.stdout
    assert "slope of the error in p" in first.stdout and "does not hold" in first.stdout
    assert {p.suffix for p in (out / "toy").iterdir()} == {".json", ".png", ".svg"}
    assert (out / "report.html").is_file() and (out / "findings.json").is_file()
    again = call("run", "all", "--quick", "--jobs", "1", "--out", str(out))
    assert "measured 0 cells, kept 8" in again.stdout
    page = tmp_path / "report.html"
    assert call("report", str(out), "-o", str(page)).exit_code == 0
    assert call("report", str(out), "-o", str(page)).exit_code == 0, "its own page may be written again"
    assert page.read_text("utf-8") == (out / "report.html").read_text("utf-8")


@pytest.mark.usefixtures("toys")
def test_reports_do_not_overwrite_what_is_not_theirs(tmp_path: Path) -> None:
    out, mine = tmp_path / "results", tmp_path / "mine.html"
    call("run", "toy", "--quick", "--jobs", "1", "--out", str(out))
    mine.write_text("<h1>mine</h1>")
    refused = call("report", str(out), "-o", str(mine))
    assert refused.exit_code == 2 and "--force overwrites it" in refused.stderr and mine.read_text() == "<h1>mine</h1>"
    assert call("report", str(out), "-o", str(mine), "--force").exit_code == 0
    for path, words in ((tmp_path / "page.pdf", "ends with .html"), (tmp_path / "folder.html", "is a folder")):
        if path.suffix == ".html":
            path.mkdir()
        wrong = call("report", str(out), "-o", str(path))
        assert wrong.exit_code == 2 and words in wrong.stderr
    record = next((out / "toy").glob("*.json"))
    record.write_text("{}")
    left = call("report", str(out))
    assert left.exit_code == 0 and f"{record}: not a record" in left.stderr and "left out" in left.stderr


@pytest.mark.usefixtures("toys")
def test_a_failed_cell_is_said_and_the_exit_code_is_one(tmp_path: Path) -> None:
    done = call("run", "broken", "--quick", "--jobs", "1", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "failed: toy cold-p8-s0-85adc2da: ZeroDivisionError: no such anchor" in done.stderr
    assert "measured 6 cells" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("run", "rate-ancors"), ["no experiment 'rate-ancors'", "did you mean 'rate-anchors'?"]),
        (("run",), ["missing argument 'NAME...'", "attnforge lab run --help"]),
        (("run", "range", "--jobs", "two"), ["'two' is not a whole number"]),
        (("run", "range", "--jobs", "0"), ["jobs is a whole number >= 1"]),
        (("run", "range", "--backend", "slurm"), ["--backend", "'processes', 'dask'"]),
        (("run", "range", "--scheduler", "tcp://a:1", "--out", "new"), ["goes with the backend dask"]),
        (("run", "range", "--out", "here"), ["'here' holds files that the lab did not write"]),
        (("run", "range", "--out", "/proc/lab"), ["cannot write results to '/proc/lab'"]),
        (("report", "here"), ["'here' was not written by `attnforge lab run`"]),
        (("report", "nowhere"), ["'nowhere' does not exist"]),
        (("rum", "range"), ["no command 'rum'", "did you mean 'run'?", "list, run, report"]),
    ],
)
def test_wrong_use_is_answered_in_words(
    args: tuple[str, ...], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/thesis.tex").write_text("years of work")
    shown = call(*args)
    assert shown.exit_code == 2 and all(word in shown.stderr for word in words), shown.stderr
    assert "Traceback" not in shown.output and sorted(p.name for p in Path("here").iterdir()) == ["thesis.tex"]


def test_the_list_names_every_experiment() -> None:
    shown = call("list")
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0 and lines[0].split() == ["name", "label", "quick", "full", "title"]
    assert [line.split()[0] for line in lines[1:]] == list(registry.names())
    assert "report" in call().stdout and "--scheduler" in call("run", "--help").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_what_is_kept(tmp_path: Path, number: int) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attnforge", "lab", "run", "range", "--jobs", "2", "--out", "results"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, start_new_session=True, **pipes)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("results/range/*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C reaches every process of a terminal
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert errors.strip() == "stopped; finished cells are kept in results, and the same command continues from them"


@pytest.mark.parametrize("quiet", [True, False])
def test_what_a_stopped_pool_left_is_cleared_away_in_silence(quiet: bool, tmp_path: Path) -> None:
    code = (
        "import joblib.externals.loky.backend.resource_tracker as tracker\n"
        "from attnforge.lab import engine\n"
        f"{'engine._track_in_silence(tracker)' if quiet else ''}\n"
        "tracker.ensure_running()\n"
        "tracker.register('/loky-that-is-gone', 'semlock')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and ("resource_tracker" in done.stderr) != quiet, done.stderr
