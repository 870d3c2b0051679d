"""The README runs: its examples, its commands, its pictures and its tables are real."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from attnforge.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
LIMIT = 300_000


def between(name: str, text: str = TEXT) -> str:
    """What stands between the markers of that name."""
    found = re.findall(f"<!-- {name}:begin -->(.*?)<!-- {name}:end -->", text, flags=re.DOTALL)
    assert len(found) == 1
    return str(found[0]).strip()


def outcome(text: str) -> doctest.TestResults:
    """The examples of all `pycon` blocks, run in one namespace."""
    blocks = re.findall(r"^```pycon\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README", "README.md", 0)
    return doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = outcome(TEXT)
    assert result.attempted >= 6 and result.failed == 0


def test_an_example_that_fails_is_seen() -> None:
    assert outcome("```pycon\n>>> 1 + 1\n3\n```\n").failed == 1


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", TEXT))
    assert {"demo", "test", "setup", "bench"} <= named <= targets | {"sure"}
    commands = set(COMMANDS)
    used = set(re.findall(r"(?:^|[`(])attnforge (?!turns)([a-z][a-z-]*)", TEXT, flags=re.MULTILINE))
    assert {"head", "check", "functions"} <= used <= commands
    for script in re.findall(r"benchmarks/\w+\.py", TEXT):
        assert (ROOT / script).is_file()


def test_it_opens_with_the_two_commands() -> None:
    opening = TEXT.split("##")[0].splitlines()[:16]
    assert any("make demo" in line for line in opening) and any("make test" in line for line in opening)


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r'(?:src|srcset)="([^"]*)"', TEXT)
    assert len(pictures) == 2
    for name in pictures:
        file = ROOT / name
        assert 1000 < file.stat().st_size < LIMIT
        with Image.open(file) as image:
            colours = image.convert("RGB").getcolors(1 << 24)
        assert image.size == (1280, 1050) and colours is not None and len(colours) > 20


def test_tables_were_generated() -> None:
    measured = (ROOT / "docs/measured.md").read_text("utf-8")
    demo = between("demo", measured)
    rows = {line.split()[0] for line in demo.splitlines() if line and not line.startswith("`")}
    assert {"gelu", "sin", "exp", "log", "reciprocal", "rsqrt", "sqrt", "tanh", "relu(y)"} <= rows
    assert between("heads", measured).count("\n|") >= 8


def test_the_table_is_that_of_the_last_benchmarks() -> None:
    measured = (ROOT / "docs/measured.md").read_text("utf-8")
    for options, place, rows in (((), TEXT, 5), (("--all",), measured, 11)):
        command = [sys.executable, ROOT / "benchmarks/summary.py", *options]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        assert between("summary", place) == shown.stdout.strip(), "benchmarks/readme.py --write puts it there"
        assert shown.stdout.count("\n") - 2 >= rows


def test_the_tables_of_speed_are_those_of_the_last_benchmarks() -> None:
    shown = subprocess.run([sys.executable, ROOT / "benchmarks/targets.py"], capture_output=True, text=True, check=True)
    pages = {name: (ROOT / "docs" / name).read_text("utf-8") for name in ("measured.md", "convert.md")}
    tables = {name: between("speed", page) for name, page in pages.items()}
    assert shown.stdout.strip() == "\n\n".join(tables.values()), "benchmarks/targets.py --write puts them there"
    assert tables["measured.md"].count("\n|") >= 20 and "not measured" in tables["measured.md"]


def test_it_fits_a_screen_and_a_half() -> None:
    assert len(TEXT.splitlines()) <= 92 and between("summary").count("\n|") == 6


def test_the_package_shows_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["readme"] == "README.md"
