"""Function beside network on the page of every kind of network, and errors there that respect the bound."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge import theorems
from attnforge.certificates.certificate import upper_text
from attnforge.certificates.certified import CertifiedModule
from attnforge.charts.chart import Series
from attnforge.heads.fast.activation import FastActivation
from attnforge.report.views import line_figure, picture, report

BOX = af.Box(x=(-1, 1), y=(0, 2))
WEIGHT = torch.tensor([1.0, -2.0, 0.0, 0.5])

NETWORKS: dict[str, Callable[[], CertifiedModule]] = {
    "product": lambda: af.ProductHead.fit((-1, 2), (0, 5)),
    "vector product": lambda: af.ProductHead.fit((-1, 2), (0, 5), width=3),
    "gate of a pair": lambda: af.GateHead.fit("min", -1, 1),
    "layer norm": lambda: af.NormHead.layer_norm(4, variance=(0.5, 2.0), weight=WEIGHT, bias=WEIGHT.flip(0)),
    "rms norm": lambda: af.NormHead.rms_norm(4, variance=(0.5, 2.0)),
    "largest token": lambda: af.TokenHead.max(tokens=3, channels=2, lo=-1, hi=1, eps=1e-3),
    "mean of tokens": lambda: af.TokenHead.mean(tokens=3, channels=2),
    "fast": lambda: FastActivation.fit("gelu", -6, 6),
    "bfloat16": lambda: FastActivation.fit("silu", -6, 6, dtype=torch.bfloat16),
    "plain": lambda: af.export.to_plain(af.compile("x + y", BOX, eps=1e-3)),
    "paper's theorem": lambda: theorems.ramp([1.0, -2.0], 0.5, a=-1, b=1, anchors=33),
    "theorem in tokens": lambda: theorems.ramp([1.0, -2.0], 0.5, a=-1, b=1, anchors=33, form="tokens"),
    "black box": lambda: af.approximate(lambda x: x.sum(-1), af.Box.cube(-1, 1, shape=2), eps=0.3, lipschitz=2.0),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_function_and_network_are_drawn_and_differ_by_no_more_than_the_bound(name: str) -> None:
    net = NETWORKS[name]()
    figure = line_figure(net)
    assert figure is not None
    series = [one for panel in figure.panels for one in panel.series]
    target = next(one for one in series if one.name in ("function", "target"))
    output = next(one for one in series if one.name == "network")
    assert len(target.y) == len(output.y) > 100 and float(np.ptp(np.asarray(target.y))) > 0.1
    error = max(float(max(one.y)) for one in series if _is_error(one))
    assert net.bound is not None and error <= net.bound, "a drawing that leaves the bound would be the news of the day"


def _is_error(series: Series) -> bool:
    return series.name.startswith("error") or series.style == "area"


def test_reports_show_the_figure() -> None:
    net = NETWORKS["paper's theorem"]()
    html = report(net).html()
    assert "Function and network" in html and html.count("<img") >= 2, "light and dark"
    assert f"<dd>{upper_text(net.bound)}</dd>" in html and all(f">{t.site}<" in html for t in net.certificate.terms)
    frames = html.count('class="scroll"')
    assert frames == len(re.findall(r'class="scroll" role="group" aria-label="[^"]+"', html)) >= 2, "read aloud by name"


def test_lines_of_programs_wrap_where_the_screen_is_narrow() -> None:
    """Every block of text that would scroll without a frame that says so wraps there, long words included."""
    html = report(af.compile("exp(x)", af.Box(x=(-1, 1)), eps=1e-2)).html()
    assert "<pre" in html
    narrow = re.findall(r"@media \(max-width: 40rem\) \{\s*((?:[^{}]*\{[^{}]*\})*)\s*\}", html)
    rules = [rule for block in narrow for rule in re.findall(r"(?:^|[}\s])pre \{([^{}]*)\}", block)]
    assert any("white-space: pre-wrap" in rule and "overflow-wrap: anywhere" in rule for rule in rules)


def test_bounds_of_programs_are_rounded_up() -> None:
    net = af.compile(af.rasp.library.frac_prevs(), af.rasp.Sequences("abc", max_length=6))
    shown = re.findall(r"at most (?:<strong>)?([\d.e-]+)", report(net).html())
    assert len(shown) == 2 and all(float(text) >= net.bound for text in shown)


def rows(page: str, name: str) -> int:
    """How many rows of tables begin with it."""
    return len(re.findall(rf"<tr><t[dh][^>]*>{re.escape(name)}<", page))


def test_pages_of_programs_show_each_once_and_its_output() -> None:
    library, domain = af.rasp.library, af.rasp.Sequences("abc", max_length=4)
    one = af.compile(library.sort().named("sort"), domain).report().html()
    assert "sort: a token program" in one and rows(one, "sort") == 1 == rows(one, "output sort")
    both = af.compile({"hist": library.hist(), "turned": library.reverse()}, domain).report().html()
    assert "hist, turned: 2 token programs in one network" in both
    assert [rows(both, name) for name in ("output hist", "output turned", "length")] == [1, 1, 1]


def test_titles_say_what_a_network_is() -> None:
    page = af.TokenHead.max(tokens=3, channels=1, lo=-1, hi=1, eps=1e-2).report().html()
    assert "max over 3 tokens of 1 channels: heads between tokens" in page and "the family" not in page
    missing = [kind for kind in CertifiedModule.families.values() if kind.called == CertifiedModule.called]
    own = {"network", "program", "programs"}  # which have pages of their own
    assert {kind.family for kind in missing if kind.__module__.startswith("attnforge.")} <= own


def test_what_cannot_be_drawn_says_nothing() -> None:
    assert picture(af.compile(af.rasp.library.reverse(), af.rasp.Sequences("ab", max_length=3))) is None
