"""The documentation site: every page has its place, every name its entry, every formula its markup; links hold."""

from __future__ import annotations

import html
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FRONT = ("heads", "rasp", "theorems", "incontext", "export", "lab")  # packages with a page of the reference each


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without calling what its tags name."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)


@pytest.fixture(scope="module")
def tex() -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("tex")
    finally:
        sys.path.remove(str(DOCS))


def listed(nav: Any) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from listed(entry)


def test_every_page_stands_once_in_the_navigation() -> None:
    pages = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
    named = list(listed(CONFIG["nav"]))
    assert [p for p in pages if p not in named] == [], "give these pages a line in `nav` of mkdocs.yml"
    assert [p for p in named if p not in pages] == [], "these lines of `nav` in mkdocs.yml name no page"
    assert len(named) == len(set(named))


def test_every_column_of_a_table_has_a_name() -> None:
    unnamed = []
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        lines = page.read_text("utf-8").split("\n")
        for head, rule in itertools.pairwise(lines):
            if re.fullmatch(r"\|[\s:|-]*-[\s:|-]*\|", rule) and not all(map(str.strip, head.strip("|").split("|"))):
                unnamed.append(f"{page.name}: {head}")
    assert unnamed == []


def test_the_navigation_is_by_jobs() -> None:
    titles = [next(iter(entry)) for entry in CONFIG["nav"]]
    assert len([title for title in titles if title.startswith("I ")]) >= 6
    for entry in CONFIG["nav"]:
        title, pages = next(iter(entry.items()))
        if title.startswith("I "):
            first = (DOCS / pages[0]).read_text("utf-8")
            assert first.startswith(f"# {title}\n"), f"the job '{title}' begins with a page of its own"
            assert f"[{title}]({Path(pages[0]).name})" in (DOCS / "jobs/index.md").read_text("utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    entries = {name for page in (DOCS / "reference").glob("*.md")
               for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)}  # fmt: skip
    things = [_found(name) for name in sorted(entries)]
    modules = {thing.__name__ for thing in things if isinstance(thing, ModuleType)}
    missing, count = [], 0
    for package in ("attnforge", *(f"attnforge.{name}" for name in FRONT)):
        for name in importlib.import_module(package).__all__:
            thing = getattr(importlib.import_module(package), name)
            if isinstance(thing, type | FunctionType):
                count += 1
                if thing not in things and thing.__module__ not in modules:
                    missing.append(f"{package}.{name}")
    assert count > 100 and missing == [], "write `::: name` on a page of docs/reference"


def _found(name: str) -> Any:
    """What an entry names: a module, or something in one. AttributeError where there is no such thing."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            thing = getattr(thing, part)
        return thing
    raise AttributeError(name)


def test_the_gallery_shows_what_its_script_draws() -> None:
    shown = set(re.findall(r"images/gallery/([\w.-]+)", (DOCS / "gallery.md").read_text("utf-8")))
    assert shown == {p.name for p in (DOCS / "images" / "gallery").iterdir()} and len(shown) >= 12
    script = (DOCS / "gallery.py").read_text("utf-8")
    assert all(f'"{Path(name).stem.removesuffix("-dark")}"' in script for name in shown)
    assert all((DOCS / "images" / "gallery" / name).stat().st_size < 300_000 for name in shown)


@pytest.fixture(scope="module")
def live() -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("live")
    finally:
        sys.path.remove(str(DOCS))


FRAME = re.compile(r'<iframe class="live" src="([^"]*)" title="([^"]+)"')


def test_every_live_explorer_stands_in_a_page(live: ModuleType) -> None:
    shown = []
    for page in DOCS.rglob("*.md"):
        for source, _ in FRAME.findall(text := page.read_text("utf-8")):
            assert (page.parent / source).resolve().parent == live.FOLDER
            shown.append(Path(source).stem)
        assert text.count("<iframe") == len(FRAME.findall(text)), "a frame needs a title that can be read aloud"
    assert set(shown) == set(live.LIVE)
    assert "docs/live.py" in (ROOT / "Makefile").read_text("utf-8")


def test_a_network_runs_inside_a_page_of_the_site(tmp_path: Path, live: ModuleType) -> None:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")
    frame = '<iframe class="live" src="live/gelu.html" title="gelu" loading="lazy" height="760"></iframe>'
    done, _ = build(tmp_path, index=f"# One\n\n{frame}\n", live={"gelu": live.LIVE["gelu"]().explore()})
    assert done.returncode == 0, done.stdout + done.stderr
    with sync.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, asked = browser.new_page(color_scheme="dark"), []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "out" / "site" / "index.html").as_uri())
        inner = page.frame_locator("iframe.live")
        inner.locator("#verdict-text").wait_for()
        assert "within the certified" in inner.locator("#verdict-text").inner_text()
        framed = next(frame for frame in page.frames if frame.url.endswith("gelu.html"))
        assert framed.evaluate("document.documentElement.dataset.theme") == "dark", "frames follow the page"
        page.click('label[title="Light"]')
        page.wait_for_function("document.body.dataset.mdColorScheme === 'default'")
        framed.wait_for_selector(":root[data-theme='light']", state="attached")
        assert all(url.startswith(("file:", "about:")) for url in asked), asked
        browser.close()


def formulas(text: str) -> list[str]:
    """The formulas of a page, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [block or line for block, line in re.findall(r"\$\$(.*?)\$\$|\$([^$]+?)\$", text, re.DOTALL)]


def test_every_formula_is_typeset(tex: ModuleType) -> None:
    count = 0
    for page in DOCS.rglob("*.md"):
        for formula in formulas(page.read_text("utf-8")):
            markup = tex.mathml(formula)
            assert "\\" not in re.sub(r"<[^>]*>", "", markup), f"{page.name}: {formula}"
            tags = re.findall(r"<(/?)(\w+)", markup)
            assert sum(1 if not slash else -1 for slash, _ in tags) == 0
            count += 1
    assert count > 1000


def test_formulas_are_read_as_tex_means_them(tex: ModuleType) -> None:
    def words(formula: str) -> str:
        return html.unescape(re.sub(r"<[^>]*>", "", tex.mathml(formula)))

    assert words(r"\frac12") == "12" and "<mfrac><mn>1</mn><mn>2</mn></mfrac>" in tex.mathml(r"\frac12")
    assert "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>" in tex.mathml("x_i^2") == tex.mathml("x^2_i")
    assert words(r"|f'| \le \text{at most } 3") == "|f′|≤at most 3"
    assert "<msup>" not in tex.mathml("f''") and "<msub>" in tex.mathml("f'_k"), "primes are raised by themselves"
    assert "<munder>" in tex.mathml(r"\max_k x_k") and "<msub>" in tex.mathml(r"\log_2 x")
    for wrong in (r"\nosuchthing x", "x_", r"\frac{1}{2", "a } b", r"\left( x"):
        with pytest.raises(ValueError, match=r"formula|nosuchthing|missing"):
            tex.mathml(wrong)


def build(
    folder: Path, live: dict[str, str] | None = None, **pages: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """A site of a few pages with the real configuration, and its pages by name."""
    config = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:")[0]
    names = "".join(f"  - {name}.md\n" for name in pages)
    (folder / "mkdocs.yml").write_text(f"{config}\nnav:\n{names}", "utf-8")
    (folder / "docs").mkdir()
    for name in ("site.css", "iframe-worker.js", "live.js"):
        (folder / "docs" / name).write_text((DOCS / name).read_text("utf-8"), "utf-8")
    for name, text in pages.items():
        (folder / "docs" / f"{name}.md").write_text(text, "utf-8")
    for name, text in (live or {}).items():
        (folder / "docs" / "live").mkdir(exist_ok=True)
        (folder / "docs" / "live" / f"{name}.html").write_text(text, "utf-8")
    env = {**os.environ, "PYTHONPATH": str(DOCS), "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, env=env, check=False,
                          capture_output=True, text=True)  # fmt: skip
    return done, {p.stem: p.read_text("utf-8") for p in (folder / "out" / "site").glob("*.html")}


def test_a_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = "# One\n\nThe sum $x_1$ is\n$$\\sum_k w_k .$$\n\n## A2. Cold heads, select\n\n>>> 1 + 1\n2\n"
    done, pages = build(tmp_path, index=text, other="# Other\n\n[there](index.md#a2-cold-heads-select)\n")
    assert done.returncode == 0, done.stdout + done.stderr
    page = pages["index"]
    assert "<msub><mi>x</mi><mn>1</mn></msub>" in page and '<math display="block">' in page
    assert "$" not in page.split("<article")[1].split("</article")[0]
    assert 'id="a2-cold-heads-select"' in page and "pycon" in page, "anchors as GitHub makes them; examples are code"
    loads = re.findall(r'(?:src|srcset|action)="([^"]*)"|<link[^>]*href="([^"]*)"', "".join(pages.values()))
    assert [a or b for a, b in loads if re.match(r"(https?:)?//", a or b)] == []


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    done, _ = build(tmp_path, index="# One\n\n[nowhere](missing.md) and [no such heading](#nothing)\n")
    said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    assert done.returncode != 0 and "page does not exist" in said and "missing.md" in said and "#nothing" in said
