"""The page of a conversion: certified and measured apart, every site on it, ranges drawn, safe and self-contained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from attnforge.certificates.certificate import upper_text
from attnforge.charts.drawing import matplotlib_figure
from attnforge.charts.themes import DARK, LIGHT, Theme
from attnforge.conversion.page import DRAWN, TICKS, _label, bounds_figure, page, ranges_figure
from attnforge.conversion.record import Conversion, Left, Replacement
from attnforge.errors import ArgumentError
from charts.images import check

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `make browser` installs one where it can")
NASTY = "<script>document.title='run'</script>\"'&"


def gelu(path: str = "layer.0.act", low: float = -6.0, high: float = 9.0) -> Replacement:
    ends = (2 * low, 2 * high)
    return Replacement(path, "gelu", "ffn", "anchor", *ends, 2.0, 48, 147, 3.3e-6, 9.0, low, high, kappa=0.21)


def norm(path: str = "layer.0.norm") -> Replacement:
    return Replacement(
        path, "layer_norm", "pure", "norm", 0.02, 900.0, 30.0, 0, 48, 2.2e-6, 1.0, 0.6, 30.0, kind="norm",
        ranged="variance",
    )  # fmt: skip


def gate(path: str = "pooler.act") -> Replacement:
    return Replacement(path, "tanh", "pure", "fast", -64.0, 64.0, 2.0, 2, 4, 6.1e-7, 1.0, -3.0, 4.0, everywhere=True)


def conversion(*sites: Replacement, **changes: object) -> Conversion:
    made = Conversion(
        "BertModel", "pure", 1e-4, "float32", sites or (gelu(), norm(), gate()),
        (Left("lm_head.sampler", "argmax", "it is not differentiable"),), 10_000, 10_199,
        change=1.6e-6, output=3.25, batches=1, held_out=2, seconds=4.2, notes=("dropout is kept",),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html.split("<main>")[1]))


def section(html: str, anchor: str) -> str:
    return words("<main>" + html.split(f'id="{anchor}"')[1].split("<h2")[0])


def test_the_page_says_what_the_record_says() -> None:
    made = conversion()
    shown = words(page(made).html())
    for site in made.sites:
        assert site.path in shown and upper_text(site.bound) in shown and upper_text(site.relative) in shown
    for word in ("48", "0.21", "1.6e-06", "+199", "10,199", "3.25", "4.2 s", "Dropout is kept.", "right everywhere"):
        assert word in shown
    assert "lm_head.sampler" in shown and "it is not differentiable" in shown
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page(made).html()), "nothing is loaded from outside"


def test_certified_and_measured_are_never_mixed() -> None:
    html = page(conversion()).html()
    certified, measured = section(html, "certified-site-by-site"), section(html, "measured-end-to-end")
    assert "measured" not in certified.lower() and "1.6e-06" not in certified
    assert "certified" not in measured.lower() and "not proved" in measured
    assert upper_text(conversion().worst) not in measured


def test_bounds_are_rounded_up() -> None:
    site = replace(gelu(), bound=1.0000001e-6)
    shown = words(page(conversion(site)).html())
    assert "1.01e-06" in shown, "a bound that is shown is a bound as well"


def test_without_data_nothing_is_said_to_be_measured() -> None:
    made = conversion(replace(gelu(), low_seen=None, high_seen=None), change=None, output=None, held_out=0, batches=0)
    measured = section(page(made).html(), "measured-end-to-end")
    assert "Nothing was measured" in measured and "e-" not in measured


def test_a_conversion_without_sites_has_a_page() -> None:
    assert "No site was converted" in words(page(replace(conversion(), sites=())).html())


def test_the_census_is_shown_where_there_is_one() -> None:
    assert "graph" not in words(page(conversion()).html())
    html = page(conversion(census={"attention": 7, "affine": 30, "mask": 0})).html()
    found = section(html, "what-is-left-of-the-graph")
    assert "attention 7" in found and "all 37" in found and "mask 0" not in found


def test_ffn_and_pure_say_what_is_left() -> None:
    assert "only nonlinear operation left" in page(conversion()).html()
    assert "everything else is as it was" in page(conversion(gelu(), level="ffn")).html()
    assert "Left as it was" not in page(conversion(left=())).html()


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda t: t.name)
def test_the_ranges_are_drawn_where_they_are(theme: Theme) -> None:
    sites = (gelu(), gelu("layer.1.act", -17.0, 25.0), norm(), gate())
    panels = matplotlib_figure(ranges_figure(sites), theme).axes
    inputs, variances = panels
    bars = [(b.get_x(), b.get_x() + b.get_width()) for b in inputs.patches]
    assert bars[:4] == [(-12.0, 18.0), (-6.0, 9.0), (-34.0, 50.0), (-17.0, 25.0)]
    assert bars[4] == (-64.0, 64.0) and len(inputs.lines) == 2, "arrows where a site is right everywhere"
    assert variances.get_xscale() == "log" and variances.patches[0].get_x() == 0.02
    assert set(inputs.get_xticks()) <= set(TICKS)
    dots = matplotlib_figure(bounds_figure(conversion(*sites)), theme).axes[0]
    found = sorted(x for line in dots.lines[:-1] for x in line.get_xdata())
    assert found == sorted(site.relative for site in sites)
    assert list(dots.lines[-1].get_xdata()) == [1e-4, 1e-4]




def test_the_figures_are_good_images() -> None:
    sites = (gelu(), gelu("layer.1.act", -17.0, 25.0), norm(), gate())
    check(bounds_figure(conversion(*sites)))
    check(ranges_figure(sites))


def test_large_models_are_drawn_in_part_and_listed_in_full() -> None:
    made = conversion(*(gelu(f"layer.{i}.act") for i in range(DRAWN + 3)))
    html = page(made).html()
    assert f"the first {DRAWN} of {DRAWN + 3} are drawn" in html
    assert f"layer.{DRAWN + 2}.act" in words(html)
    assert len(matplotlib_figure(bounds_figure(made)).axes[0].get_yticks()) == DRAWN


@given(st.text(min_size=0, max_size=120))
def test_labels_fit(path: str) -> None:
    assert 0 < len(_label(path)) <= 44
    assert _label(path).endswith(path[-40:]) or not path


@settings(max_examples=5)
@given(st.floats(-1e6, -1e-3), st.floats(1e-3, 1e6))
def test_any_range_can_be_drawn(low: float, high: float) -> None:
    axes = matplotlib_figure(ranges_figure((gelu("a", low, high), gelu("b")))).axes[0]
    assert axes.get_xlim()[0] < 2 * low and axes.get_xlim()[1] > 2 * high


def test_names_are_shown_and_never_run() -> None:
    made = conversion(replace(gelu(), path=NASTY, operation=NASTY), model=NASTY, notes=(NASTY,))
    html = page(made).html()
    assert "<script>document.title" not in html and "&lt;script&gt;document.title" in html


def test_save_by_suffix(tmp_path: Path) -> None:
    made = conversion()
    made.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    made.save(tmp_path / "report.json")
    assert Conversion.from_json(json.loads((tmp_path / "report.json").read_text("utf-8"))) == made
    with pytest.raises(ArgumentError, match=r"ends with \.html, \.htm, \.json"):
        made.save(tmp_path / "report.pdf")


@browser
def test_a_browser_shows_light_and_dark(tmp_path: Path) -> None:
    conversion().save(tmp_path / "report.html")
    assert CHROMIUM is not None
    grounds = []
    for scheme in (1, 0):
        shot = tmp_path / f"{scheme}.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                 "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
                 "--virtual-time-budget=3000", "--window-size=1200,1600", f"--screenshot={shot}",
                 f"--blink-settings=preferredColorScheme={scheme}"]  # fmt: skip
        subprocess.run([CHROMIUM, *flags, (tmp_path / "report.html").as_uri()], check=True, capture_output=True,
                       timeout=120)  # fmt: skip
        with Image.open(shot) as image:
            grey = image.convert("L")
        low, high = grey.getextrema()
        assert high - low > 180, "text stands out from its ground"
        grounds.append(grey.getpixel((5, 5)))
    assert grounds[0] > 230 and grounds[1] < 40
