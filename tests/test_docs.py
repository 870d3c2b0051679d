"""The documentation runs: every Python block of every page, page by page in one namespace, with its assertions."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnforge.cli import app
from here import verified_here

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md")) + [p for p in (ROOT / "README.md",) if p.is_file()]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
THEORY = sorted((ROOT / "docs" / "theory").glob("*.md"))
LABEL = re.compile(r"^### (([A-HR]\d+)\..*)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line its code starts on."""
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in FENCE.finditer(text)]


def run(text: str, name: str) -> None:
    """Execute a page's blocks one after the other; a failure points at the line of the page. A page of a folder goes on
    where the page that the folder is named after ends."""
    namespace: dict[str, Any] = {"__name__": "docs"}
    index = Path(f"{Path(name).parent}.md")
    if index.is_file():
        exec("\n".join(code for _, code in blocks(index.read_text("utf-8"))), namespace)
    for line, code in blocks(text):
        tree = ast.parse(code, filename=name)
        ast.increment_lineno(tree, line - 1)
        exec(compile(tree, name, "exec"), namespace)


def anchors(text: str) -> Iterator[str]:
    """The names that headings can be linked by, as common renderers make them."""
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verified_here(monkeypatch, "hf")  # in a fresh process: tests/export/test_hf.py
    text = page.read_text("utf-8")
    assert text.count("```") % 2 == 0, "a block is not closed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(text, str(page))


def commands(text: str) -> list[list[str]]:
    """The commands of a page's `sh` blocks, as a shell takes them apart."""
    return [shlex.split(line, comments=True) for block in SHELL.findall(text) for line in block.splitlines() if line]


@pytest.mark.parametrize("page", [p for p in PAGES if SHELL.search(p.read_text("utf-8"))], ids=lambda p: p.name)
def test_the_commands_of_a_page_run_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = commands(page.read_text("utf-8"))
    assert found and all(words[0] == "attnforge" for words in found), "other commands stand in blocks of text"
    for words in found:
        result = CliRunner().invoke(app, words[1:], prog_name="attnforge")
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name)
def test_every_block_asserts_something(page: Path) -> None:
    silent = [line for line, code in blocks(page.read_text("utf-8")) if not _asserts(code)]
    assert silent == [], f"blocks of {page.name} without an assertion start at these lines"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in LINK.findall(re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$\n]*\$|`[^`\n]*`", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if fragment and fragment not in ("only-light", "only-dark"):  # of pictures: on which ground they are shown
            assert fragment in set(anchors(file.read_text("utf-8"))), f"{page.name} links to {target}"


def sections() -> dict[str, str]:
    """What stands under each label of the theory, from its heading to the next."""
    found: dict[str, str] = {}
    for page in THEORY:
        _, *parts = LABEL.split(page.read_text("utf-8"))
        for _, label, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            assert label not in found, f"{label} stands on two pages"
            found[label] = text
    return found


CITED = re.compile(r"(?<![\w.^\\])([A-HR]\d{1,2})(?:\(([a-f])\)|([a-f]))?(?![\w^])")  # A9, A9(b), F4b
TYPES = {"F16", "F32", "F64"}  # names of dtypes in files


def missing(text: str, known: dict[str, str]) -> list[str]:
    """The labels in a text that stand on no page, and those whose part, such as (b), is not there."""
    found = []
    for match in CITED.finditer(text):
        label, part = match[1], match[2] or match[3]
        there = known.get(label, "")
        if label not in TYPES and not (there and (not part or f"({part})" in there or label + part in there)):
            found.append(match[0])
    return found


def test_cited_lemmas_exist() -> None:
    """Every label in the code, its docstrings, what certificates say, and in the pages; their parts as well."""
    known, found = sections(), dict[str, list[str]]()
    assert missing("A9, A9(e), F4b and A99, B8(f), F4f; 0x1F3, H200 and F32", known) == ["A99", "B8(f)", "F4f"]
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for path in [*(ROOT / "src").rglob("*.py"), *pages]:
        text = path.read_text("utf-8")
        if path.suffix == ".md":  # without its formulas and programs, whose letters are variables
            text = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$]*\$", "", text, flags=re.DOTALL)
        if wrong := missing(text, known):
            found[str(path.relative_to(ROOT))] = wrong
    assert found == {}


def test_the_index_names_every_label_once_and_where_it_is() -> None:
    index = (ROOT / "docs" / "theory.md").read_text("utf-8")
    headings = [heading for page in THEORY for heading, _ in LABEL.findall(page.read_text("utf-8"))]
    assert sorted(heading for heading, _ in LABEL.findall(index)) == sorted(headings)
    for page in THEORY:
        for heading, label in LABEL.findall(page.read_text("utf-8")):
            below = index.split(f"### {heading}\n")[1].split("\n#")[0]
            assert f"[{label}](theory/{page.name}#{next(anchors('# ' + heading))})" in below, heading


@pytest.mark.parametrize("label", sorted(sections()))
def test_every_lemma_says_where_the_code_uses_it(label: str) -> None:
    paragraphs = [p for p in sections()[label].split("\n\n") if p.startswith("*In the code")]
    names = [name for p in paragraphs for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", p)]
    assert names, f"{label} cites no code"
    for name in names:
        resolve(name)


def resolve(name: str) -> Any:
    """What a dotted name below attnforge stands for: modules as far as they go, then attributes."""
    found: Any = importlib.import_module("attnforge")
    for part in name.split("."):
        if not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")  # an error that says which name
        else:
            found = getattr(found, part)
    return found


def test_a_false_statement_on_a_page_is_found() -> None:
    with pytest.raises(AssertionError):
        run("text\n```python\nx = 1\n```\nmore\n```python\nassert x == 2\n```\n", "page")
    assert commands("```sh\nattnforge a 'b c'  # d\n```\n```text\nx\n```\n") == [["attnforge", "a", "b c"]]
    assert blocks("a\n```python\nx\n```\n```text\ny\n```\n") == [(3, "x\n")]
    assert not _asserts("x = 1\n") and _asserts("assert x\n")


def _asserts(code: str) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))
