"""The page of a network: what it says is what the network is, and a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import attnforge as af
from attnforge.certificates.certificate import upper_text
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.heads.anchor.potential import Potential
from attnforge.heads.anchor.rule import kappa
from attnforge.heads.families import FAMILIES
from attnforge.report.mathml import clean, typeset
from attnforge.report.network import DIAGONAL, drawing, histogram_figure, measure, network_page, slices, slices_figure
from attnforge.report.structure import structure
from charts.images import check

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HALF = "<mfrac><mi>a</mi><mn>2</mn></mfrac>"
OPEN, CLOSE = '<mo stretchy="false">(</mo>', '<mo stretchy="false">)</mo>'  # around what is no taller than a line
SPACE = '<mspace width="0.17em"></mspace>'
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `make browser` installs one where it can")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=3000",
)  # fmt: skip


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("sin(x1*theta) + exp(-x1**2)/theta", af.Box(x1=(-1, 1), theta=(0.5, 2)), eps=1e-3)


@pytest.fixture(scope="module")
def html(net: CompiledNetwork) -> str:
    return network_page(net).html()


def test_the_page_says_what_the_network_is(net: CompiledNetwork, html: str) -> None:
    size = net.size
    words = re.sub(r"<[^>]*>", " ", html)
    for word in (upper_text(net.bound), upper_text(net.bound, 4), f"{size.heads} heads", f"{size.parameters:,}"):
        assert word in words
    assert net.certificate.weights in words and all(a in words for a in net.certificate.assumptions if "<" not in a)
    assert "<msub><mi>x</mi><mn>1</mn></msub>" in html and "<mi>θ</mi>" in html
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', html), "nothing is loaded from outside"


def test_the_ledger_on_the_page_adds_up(net: CompiledNetwork, html: str) -> None:
    table = html.split('id="the-certificate"')[1].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    body, bound = [row for row in rows[:-1] if row], rows[-1]
    assert bound[0] == "bound" and len(body) == len(net.layout.sites) + 1
    total = sum(float(row[3]) for row in body)
    assert float(bound[3]) <= total * 1.001 and total <= float(bound[3]) * 1.01
    for row in body:
        assert float(row[3]) <= (float(row[1]) + float(row[2])) * 1.001 + 1e-30


def test_a_stale_certificate_is_not_shown() -> None:
    changed = af.compile("sin(x)", af.Box(x=(0, 1)), eps=1e-3)
    with torch.no_grad():
        next(p for p in changed.parameters() if p.requires_grad).add_(1e-3)
    with pytest.raises(af.CertificateError, match="stale"):
        network_page(changed)


def test_measured_errors_and_slices(net: CompiledNetwork) -> None:
    found = measure(net, 2000)
    assert 0 < found.worst <= net.bound and found.count >= 2200 and len(found.point) == 2
    along = slices(net, found)
    assert [s.label for s in along] == ["x1", "x1", "theta", "theta", DIAGONAL]
    for s in along:
        assert (np.abs(s.output - s.target) == s.error).all()
    x, theta = 2 * along[-1].x - 1, 0.5 + 1.5 * along[-1].x
    assert np.abs(along[-1].target - np.sin(x * theta) - np.exp(-(x**2)) / theta).max() < 1e-6
    assert all(0 < s.error.max() <= net.bound for s in along)
    assert max(s.error.max() for s in along) >= 0.9 * found.worst, "slices go through the worst point"


def test_figures_of_errors_are_good_images(net: CompiledNetwork) -> None:
    found = measure(net, 2000)
    for figure in (slices_figure(slices(net, found), net.bound), histogram_figure(found, net.bound)):
        check(figure)


def test_structure_accounts_for_heads_errors_and_inputs(net: CompiledNetwork) -> None:
    parts = structure(net)
    assert sum(unit.heads for unit in parts.units) == net.size.heads
    assert sum(unit.anchors for unit in parts.units) == net.size.anchors
    by_name = {unit.name: unit for unit in parts.units}
    product = by_name["x1*theta"] if "x1*theta" in by_name else by_name["theta*x1"]
    assert product.family == "product" and product.inputs == (0, 1) and product.reads == ()
    wave = next(unit for unit in parts.units if unit.operation == "sin")
    assert wave.reads == (product.number,) and wave.layer == product.layer + 1
    assert parts.direct == () and wave.number in parts.output


@given(
    st.floats(0.05, 2.0), st.integers(4, 40), st.sampled_from(["square", "log", "atan"]), st.floats(0.1, 3.0)
)  # fmt: skip
def test_kappa_is_read_off_the_keys(wanted: float, count: int, name: Any, low: float) -> None:
    potential = Potential(name)
    flat = potential.flat_anchors(low, low + 4.0, count)
    found = kappa(*potential.keys(flat, wanted, low + 2.0))
    # anchors that are not evenly spaced make neighbours differ: the finer they are, the less
    assert found is not None and found == pytest.approx(wanted, rel=1e-9 if name == "square" else 4 / count**2 + 0.02)


def test_kappa_needs_three_anchors() -> None:
    assert kappa(np.array([0.0, 1.0]), np.zeros(2)) is None


@pytest.mark.parametrize(
    ("formula", "markup"),
    [
        ("x**2", "<msup><mi>x</mi><mrow><mn>2</mn></mrow></msup>"),
        ("-(a*b)", f"<mrow><mo>−</mo><mrow>{OPEN}<mrow><mi>a</mi>{SPACE}<mi>b</mi></mrow>{CLOSE}</mrow></mrow>"),
        ("(a/2)**b", f"<msup><mrow><mo>(</mo>{HALF}<mo>)</mo></mrow><mrow><mi>b</mi></mrow></msup>"),
        ("sqrt(x)", "<msqrt><mi>x</mi></msqrt>"),
        ("abs(x)", "<mrow><mo>|</mo><mi>x</mi><mo>|</mo></mrow>"),
        ("2e-3", "<mrow><mn>2</mn><mo>⋅</mo><msup><mn>10</mn><mn>−3</mn></msup></mrow>"),
        ("x_max", "<msub><mi>x</mi><mi>max</mi></msub>"),
        ("x*", None),
        ("x y", None),
        ("MyModule()", None),
        ("(" * 500 + "x" + ")" * 500, None),
        ("<script>", None),
    ],
)  # fmt: skip
def test_formulas_are_typeset(formula: str, markup: str | None) -> None:
    assert typeset(formula) == markup


@given(st.text(alphabet="xyθ0123456789.+-*/(),[]e<& ", max_size=30))
def test_whatever_is_typeset_is_mathml(formula: str) -> None:
    found = typeset(formula)
    assert found is None or clean(found).startswith("<math")


def test_precedence_is_kept() -> None:
    assert typeset("(a+b)*c") != typeset("a+b*c") and typeset("(a/b)**2") != typeset("a/b**2")
    assert typeset("a-(b-c)") != typeset("a-b-c") and typeset("(-a)**2") != typeset("-a**2")
    assert typeset("[x, y+1]").count("<mtr>") == 2


def test_the_drawing_shows_every_operation(net: CompiledNetwork) -> None:
    pair = drawing(structure(net), ("x1\nfrom -1 to 1", "theta\nfrom 0.5 to 2"), "output\none <number>")
    assert pair.light.count("<g>") == len(net.layout.sites) + 3 and pair.light != pair.dark
    assert "layer 2" in pair.light and "layer 3" not in pair.light and "one &lt;number&gt;" in pair.light
    edges = pair.light.count('stroke-opacity="0.5"')
    assert edges == sum(len(u.reads) + len(u.inputs) for u in structure(net).units) + len(structure(net).output)
    assert {unit.family for unit in structure(net).units} <= set(FAMILIES)


def test_large_layers_are_cut() -> None:
    big = af.compile([f"sin({i}*x)" for i in range(1, 21)], af.Box(x=(-1, 1)), eps=1e-2)
    assert "and 7 more" in drawing(structure(big), ("x",), "output").light


@pytest.mark.parametrize("kind", ["module", "sequence", "nothing", "several"])
def test_every_kind_of_network_has_a_page(kind: str) -> None:
    torch.manual_seed(0)
    targets: dict[str, tuple[Any, Any]] = {
        "module": (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU()), af.Box.cube(-1, 1, shape=3)),
        "sequence": (lambda x: torch.softmax(x @ x.mT, -1) @ x, af.Box.cube(-1, 1, shape=(4, 2))),
        "nothing": ("x - x", af.Box(x=(-1, 1))),
        "several": (lambda a, b: a * b, (af.Box.cube(-1, 1, shape=2), af.Box.cube(0, 2, shape=2))),
    }
    target, box = targets[kind]
    html = network_page(af.compile(target, box, eps=1e-2)).html()
    assert "certified bound" in html and html.count("<img") == 6


def shoot(path: Path, *flags: str, width: int = 1200) -> str:
    assert CHROMIUM is not None
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [CHROMIUM, *FLAGS, profile, f"--window-size={width},3200", *flags, path.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@browser
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_it(html: str, tmp_path: Path, width: int) -> None:
    probe = """
      const seen = []; addEventListener('securitypolicyviolation', (e) => seen.push(e.violatedDirective));
      addEventListener('error', (e) => seen.push(String(e.message)));
      addEventListener('load', () => setTimeout(() => {
        const root = document.documentElement, images = [...document.images].filter((e) => e.offsetWidth > 0);
        document.title = 'PROBE' + btoa(JSON.stringify({
          seen, wide: root.scrollWidth, room: root.clientWidth, shown: images.length,
          drawn: images.every((i) => i.naturalWidth > 100),
          math: document.querySelector('math').getBoundingClientRect().width,
          loads: performance.getEntriesByType('resource').filter((r) => !/^(data|blob):/.test(r.name)).length }));
      }, 300));
    """
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    page = html.replace("<title>", f"<script>{probe}</script><title>", 1)
    path = tmp_path / "page.html"
    path.write_text(page.replace("script-src ", f"script-src &#39;sha256-{digest}&#39; ", 1), "utf-8", newline="\n")
    found = re.search(r"<title>PROBE([^<]*)</title>", shoot(path, "--dump-dom", width=width))
    assert found, "the page's scripts did not run to their end"
    seen = json.loads(base64.b64decode(found[1]))
    assert seen["seen"] == [] and seen["loads"] == 0
    assert seen["shown"] == 3 and seen["drawn"], "drawing, slices and histogram"
    assert seen["wide"] <= seen["room"], "the page can be scrolled sideways"
    assert seen["math"] > 60


@browser
def test_light_and_dark(html: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(html, "utf-8", newline="\n")
    for scheme, ground in ((1, "light"), (0, "dark")):
        shot = tmp_path / f"{ground}.png"
        shoot(path, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}")
        with Image.open(shot) as image:
            grey = image.convert("L")
            colours = image.convert("RGB").getcolors(1 << 24)
        corner = grey.getpixel((5, 5))
        assert (corner > 230) if ground == "light" else (corner < 40)
        assert colours is not None and len(colours) > 300
        low, high = grey.getextrema()
        assert high - low > 180
