"""The documentation runs: every Python block of every page, page by page in one namespace, with its assertions."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md")) + [p for p in (ROOT / "README.md",) if p.is_file()]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line its code starts on."""
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in FENCE.finditer(text)]


def run(text: str, name: str) -> None:
    """Execute a page's blocks one after the other; a failure points at the line of the page."""
    namespace: dict[str, Any] = {"__name__": "docs"}
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
    text = page.read_text("utf-8")
    assert text.count("```") % 2 == 0, "a block is not closed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(text, str(page))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
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
        if fragment:
            assert fragment in set(anchors(file.read_text("utf-8"))), f"{page.name} links to {target}"


def test_cited_lemmas_exist() -> None:
    theory = (ROOT / "docs" / "theory.md").read_text("utf-8")
    known = set(re.findall(r"^### ([A-HR]\d)\b", theory, re.MULTILINE))
    cited: dict[str, str] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for label in re.findall(r"\blemmas? ([A-HR]\d)\b", path.read_text("utf-8")):
            cited.setdefault(label, path.name)
    assert cited, "the code cites lemmas"
    assert {label: name for label, name in cited.items() if label not in known} == {}


def test_a_false_statement_on_a_page_is_found() -> None:
    with pytest.raises(AssertionError):
        run("text\n```python\nx = 1\n```\nmore\n```python\nassert x == 2\n```\n", "page")
    assert blocks("a\n```python\nx\n```\n```text\ny\n```\n") == [(3, "x\n")]
    assert not _asserts("x = 1\n") and _asserts("assert x\n")


def _asserts(code: str) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))
