"""Pages: nothing is loaded from outside, nothing a caller passes in is run, and a browser shows them as meant."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from attnforge.charts.chart import Figure, Panel, Series
from attnforge.charts.drawing import interactive, matplotlib_figure, svg
from attnforge.charts.themes import render
from attnforge.errors import ArgumentError
from attnforge.report.heads import Comparison, comparison_figure
from attnforge.report.html import VERSIONS_OF, Page
from attnforge.report.mathml import clean

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "no chromium, chromium-browser or google-chrome on the path: `make browser` installs one where it can"
browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=3000",
)  # fmt: skip
NASTY = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">'\"&lt;{{ 7*7 }}"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CHART = comparison_figure([Comparison("gelu", (-8, 8), 1.6e-10, 8.7e-6, 0.12)])


class Reader(HTMLParser):
    """What a page says and what it would load."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}
        self.loads += [value or "" for name, value in attrs if name in names]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def full_page(text: str = "words") -> Page:
    """A page with a part of every kind, `text` wherever text may stand."""
    page = Page(text, text)
    page.cards([(text, text, text), ("bound", 1.6e-10, "")])
    page.section("One").text(text).section(text).section("One").section("Two")
    page.table([text, "size"], [[text, 1], ["long " * 40, 2]], caption=text)
    page.figure(svg(CHART), caption=text, alt=text).figure(PNG, alt=text).code(text, text)
    x, y = sympy.symbols("x y")
    page.math(sympy.mathml(sympy.exp(-(x**2)) / sympy.sqrt(y) < 1, printer="presentation"), text)
    page.details(text, open=True).text(text).details(text).table([text], [[text]])
    return page


@pytest.mark.parametrize("text", ["words", NASTY])
def test_nothing_is_loaded_from_outside(text: str) -> None:
    html = full_page(text).html()
    read = Reader(html)
    assert len(read.loads) >= 4 + 3
    assert [load for load in read.loads if not load.startswith(("data:image/", "#"))] == []
    style_sheet = re.search(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    assert style_sheet and "url(" not in style_sheet[1] and "@import" not in style_sheet[1]
    assert read.tags.count("script") == 1, "our own, and no plotly.js where nothing uses it"
    assert not {"link", "iframe", "object", "embed", "base"} & set(read.tags)


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1).filter(str.strip))
def test_any_text_is_shown_as_it_is(text: str) -> None:
    plain = Page("t").code(text).table([text], [[text]]).html()
    read = Reader(plain)
    assert read.tags == Reader(Page("t").code("x").table(["x"], [["x"]]).html()).tags
    assert read.words.count(text) >= 2 or text in "".join(read.words)


def test_text_knows_bold_and_code_and_nothing_else() -> None:
    html = Page("t").text("a **b** `<c>`\n\n<i>d</i> `**e**` ** f").html()
    assert "<p>a <strong>b</strong> <code>&lt;c&gt;</code></p>" in html
    assert "<p>&lt;i&gt;d&lt;/i&gt; <code>**e**</code> ** f</p>" in html


def test_numbers_stand_right_and_bounds_are_not_touched() -> None:
    html = Page("t").table(["name", "n", "bound"], [["gelu", 32, "1.61e-10"], ["sin", None, 0.1 + 0.2]]).html()
    assert '<td class="left">gelu</td><td class="right">32</td><td class="right">1.61e-10</td>' in html
    assert '<td class="right">–</td><td class="right">0.3</td>' in html


def test_sections_have_anchors_of_their_own_and_links() -> None:
    html = full_page().html()
    anchors = re.findall(r'<h2 id="([^"]*)">', html)
    assert anchors == ["one", "words", "one-2", "two"]
    assert re.findall(r'<a href="#([^"]*)">', html) == anchors
    assert "<nav" not in Page("t").section("One").html()


def test_pages_link_to_pages_beside_them_and_nowhere_else() -> None:
    page = Page("t", up=("Up <here>", "index.html"))
    html = page.links([("One", "one.html", "a note"), ("Two", "folder/two.html", "")]).html()
    assert re.findall(r'href="([^"]*)"', html) == ["index.html", "one.html", "folder/two.html"]
    assert "← Up &lt;here&gt;" in html and html.count("<span>a note</span>") == 1
    beyond = ("https://a.org/a.html", "../a.html", "a/b/c.html", "/a.html", "//a.html")
    for wrong in ("javascript:alert(1)", *beyond, "", ".html"):
        with pytest.raises(ArgumentError, match="beside it"):
            Page("t").links([("title", wrong, "")])
    assert Page("t", up=("All", "../../index.html")).up == ("All", "../../index.html")
    for wrong in ("../../../index.html", "..", "../https://a.org", "/../a.html"):
        with pytest.raises(ArgumentError, match="beside it"):
            Page("t", up=("title", wrong))


def test_captions_know_code_and_nothing_else() -> None:
    html = Page("t").code("x", "`sum` of x**2 + y**2, `<b>`").html()
    assert "<figcaption><code>sum</code> of x**2 + y**2, <code>&lt;b&gt;</code></figcaption>" in html


def test_the_footer_names_the_versions() -> None:
    words = " ".join(Reader(Page("t").html()).words)
    assert all(name in words for name in (*VERSIONS_OF, "Python"))


def test_plotly_is_inlined_once_and_only_when_used() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    page = Page("t")
    chart = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="</script><script>document.title='run'</script>"))
    page.plotly(chart, "one", fallback=PNG)
    page.details("more").plotly(chart, "two")
    html = page.html()
    assert html.count("plotly.js v") == 1
    assert "<script>document.title" not in html
    assert len(html) > 1e6 > len(Page("t").html()) * 10


def test_a_matplotlib_figure_is_drawn() -> None:
    figure = matplotlib_figure(CHART)
    assert render(figure, "svg").startswith(b"<?xml")
    assert "data:image/svg+xml;base64," in Page("t").figure(figure, "a figure").html()
    whole = Page("t").figure(CHART).html()
    assert CHART.caption in whole and whole.count("data:image/svg+xml;base64,") == 2, "a chart brings its caption"


def test_save(tmp_path: Path) -> None:
    page = full_page()
    path = page.save(tmp_path / "new" / "page.html")
    assert path.read_text("utf-8") == page.html()
    assert path.read_text("utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(ArgumentError, match=r"ends with \.html"):
        page.save(tmp_path / "page.pdf")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Page(" "), "title"),
        (lambda: Page("t").table(["a", "b"], [["1"]]), "row 1 of the table has 1 cells, the header 2"),
        (lambda: Page("t").table(["a"], [["1"]], align="rx"), "one letter of l, r, c"),
        (lambda: Page("t").figure(PNG), "caption or an alt text"),
        (lambda: Page("t").figure(b"GIF89a", "c"), "SVG or a PNG"),
        (lambda: Page("t").figure(3, "c"), "matplotlib figure, got int"),  # type: ignore[arg-type]
        (lambda: Page("t").plotly("x"), "expected a plotly figure, got str"),
        (lambda: Page("t").cards([("a", "b")]), "label, value, note"),  # type: ignore[list-item]
        (lambda: Page("t").math(""), "empty"),
        (lambda: Page("t").math("<mrow><mi>x</mrow>"), "closes no element"),
        (lambda: Page("t").math("<mrow><mi>x</mi>"), "ends inside <mrow>"),
        (lambda: Page("t").math("<mrow><script>1</script></mrow>"), "<script> is not an element"),
        (lambda: Page("t").math("<svg><circle/></svg>"), "<svg> is not an element"),
    ],
)
def test_wrong_parts_are_refused(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        wrong()


def test_mathml_keeps_the_formula_and_drops_the_rest() -> None:
    assert clean("<math display='block' onload='run()'><mi href='javascript:run()'>x</mi><!-- c --></math>") == (
        '<math display="block"><mi>x</mi></math>'
    )
    assert "<mo>&lt;</mo>" in clean("<mrow><mo>&lt;</mo></mrow>")


def chromium(path: Path, *flags: str, width: int = 1200) -> str:
    assert CHROMIUM is not None
    profile = path.parent / "profile"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},1600", *flags, path.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def probed(html: str, path: Path, width: int = 1200) -> dict[str, Any]:
    """Opens the page under its own policy, with one more script allowed, and brings back what that one saw."""
    start = (
        "window.seen = []; addEventListener('error', (e) => seen.push(String(e.message)));"
        "addEventListener('securitypolicyviolation', (e) => seen.push(e.violatedDirective + ' ' + e.blockedURI));"
    )
    end = """
      addEventListener('load', () => setTimeout(() => {
        const root = document.documentElement, ground = () => getComputedStyle(document.body).backgroundColor;
        const shown = (name) => [...document.querySelectorAll(name)].filter((e) => e.offsetWidth > 0).length;
        const before = ground(), light = shown('.on-light'), title = document.title;
        document.getElementById('theme').click();
        document.title = 'PROBE' + btoa(JSON.stringify({
          errors: seen, wide: root.scrollWidth, room: root.clientWidth, before, after: ground(), light,
          dark: shown('.on-dark'), ran: title === 'run', plots: document.querySelectorAll('.plot .main-svg').length,
          loads: performance.getEntriesByType('resource').filter((r) => !/^(data|blob):/.test(r.name)).length,
          math: document.querySelector('math')?.getBoundingClientRect().width ?? 0 }));
      }, 300));
    """
    for script, place in ((start, "<title>"), (end, "</body>")):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        html = html.replace(place, f"<script>{script}</script>{place}", 1)
        html = html.replace("script-src ", f"script-src &#39;sha256-{digest}&#39; ", 1)
    path.write_text(html, "utf-8", newline="\n")
    found = re.search(r"<title>PROBE([^<]*)</title>", chromium(path, "--dump-dom", width=width))
    assert found, "the page's scripts did not run to their end"
    result: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return result


@browser
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_the_page(tmp_path: Path, width: int) -> None:
    seen = probed(full_page("unbreakable" * 12 + NASTY).html(), tmp_path / "page.html", width)
    assert seen["errors"] == [] and seen["loads"] == 0 and not seen["ran"]
    assert seen["wide"] <= seen["room"], "the page can be scrolled sideways"
    assert seen["before"] != seen["after"] and seen["light"] == seen["dark"] == 1, "the button changes the theme"
    assert seen["math"] > 10


@browser
def test_the_policy_stops_what_escaping_might_miss(tmp_path: Path) -> None:
    seen = probed(Page("t").text("PLACE").html().replace("PLACE", NASTY), tmp_path / "page.html")
    assert not seen["ran"]
    assert any(error.startswith("script-src") for error in seen["errors"])


@browser
def test_plotly_draws_under_the_policy(tmp_path: Path) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    page = Page("t").plotly(go.Figure(go.Scatter(x=[1, 2], y=[3, 4])), "a line")
    seen = probed(page.html(), tmp_path / "page.html")
    assert seen["plots"] >= 1 and seen["errors"] == [] and seen["loads"] == 0


#: Texts of plots that lie on one another, or beyond the plot.
SPOILED = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const all = [...plot.querySelectorAll(".legendtext, .annotation-text, .xtitle, .ytitle")]
    .filter((e) => e.textContent);
  const boxes = all.map((e) => e.getBoundingClientRect()), whole = plot.getBoundingClientRect();
  const on = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  return boxes.flatMap((a, i) => [
    ...(a.left < whole.left - 1 || a.right > whole.right + 1 ? [`cut: ${all[i].textContent}`] : []),
    ...boxes.slice(0, i).flatMap((b, j) => (on(a, b) ? [`${all[i].textContent} on ${all[j].textContent}`] : []))]);
})"""


@browser
def test_names_in_charts_lie_beside_one_another(tmp_path: Path) -> None:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    long = [f"largest error, sort {i}, certified" for i in range(8)]
    series = [Series(name, (1.0, 2.0), (i + 1.0, i + 2.0)) for i, name in enumerate(long)]
    title = "one network for every length"
    panels = [Panel(f"{title} {i}", "the inverse temperature kappa (large is cold)", "error", series) for i in (1, 2)]
    path = Page("t").plotly(interactive(Figure("many", "Many.", panels))).save(tmp_path / "page.html")
    with sync.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1200, 700, 360):
            page = started.new_page(viewport={"width": width, "height": 900})
            page.goto(path.as_uri())
            page.wait_for_selector(".plot .legend")
            page.wait_for_timeout(300)
            assert page.locator(".plot .annotation-text").count() == 2
            assert page.evaluate(SPOILED) == [], f"at {width} pixels"
        started.close()


@browser
def test_light_and_dark_follow_the_system(tmp_path: Path) -> None:
    path = full_page().save(tmp_path / "page.html")
    grounds = []
    for scheme in (1, 0):
        shot = tmp_path / f"{scheme}.png"
        chromium(path, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}")
        with Image.open(shot) as image:
            grey = image.convert("L")
        grounds.append(grey.getpixel((5, 5)))
        low, high = grey.getextrema()
        assert high - low > 180, "text stands out from its ground"
    assert grounds[0] > 230 and grounds[1] < 40
