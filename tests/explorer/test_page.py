"""The explorer in a real browser: its arithmetic against PyTorch, its targets against ours, what a reader can do."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import attnforge as af
from attnforge import rasp, theorems
from attnforge.certificates.certified import CertifiedModule
from attnforge.cli import app
from attnforge.conversion.norm import ConvertedNorm, NativeNorm
from attnforge.conversion.site import ConvertedActivation, SiteModule
from attnforge.explorer import compact, explore, widget
from attnforge.explorer.model import function_json, model
from attnforge.explorer.page import MOST_NUMBERS, PackedTensors
from attnforge.functions.registry import get, names
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.programs.interpret import values
from attnforge.rasp.network.compiled import CompiledProgram

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the path")

read = cache(model)  # what the page is given, once for each network
POINTS = 24  # of every network: half of them ends of the box
NARROW = 360  # pixels: the smallest screen that pages are for


def until(page: Any, condition: str, argument: object = None, seconds: float = 10.0) -> None:
    """Wait for something to be true in the page, which lets nobody evaluate text from within."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition, argument):
        assert time.monotonic() < end, f"still not so: {condition}"
        time.sleep(0.02)


class Driven:
    """One browser page, what it complained about, and what it asked for."""

    def __init__(self, page: Any, folder: Path):
        self.page, self.folder = page, folder
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.wrong.append(message.text))
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self, net: CertifiedModule | SiteModule, width: int = 1280) -> Any:
        """The explorer of a network, ready."""
        path = self.folder / "page.html"
        explore(net, path, force=True)
        self.wrong.clear()
        self.asked.clear()
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.goto(path.as_uri())
        until(self.page, "document.getElementById('outputs').childElementCount > 0")
        return self.page

    def clean(self) -> None:
        """No complaint, and nothing from outside."""
        assert self.wrong == []
        assert all(url.startswith("file://") for url in self.asked), self.asked


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    with sync.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = started.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()
        yield Driven(page, tmp_path_factory.mktemp("explorer"))
        started.close()


class Mixing(nn.Module):
    """Attention between tokens and a largest entry: heads of scope `tokens`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(1.5 * x @ x.mT, -1) @ x + x.amax(-2, keepdim=True)


def _module() -> CertifiedModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    return af.compile(layers, af.Box.cube(-1, 1, shape=2), eps=1e-2)


def _norm() -> CertifiedModule:
    start = torch.tensor([0.0, 1.0, 2.0])
    return af.compile(nn.LayerNorm(3), af.Box.between(start, start + 0.5), eps=1e-3)


@cache
def _formula() -> CertifiedModule:
    return af.compile("sin(x*y) + exp(-x**2)/(1 + y)", af.Box(x=(-2, 2), y=(0, 2)), eps=1e-4)


def _sort(length: int = 6) -> CompiledProgram:
    return af.compile(rasp.library.sort(), rasp.Sequences("abcd", max_length=length))


NUMBERS: dict[str, Callable[[], CertifiedModule]] = {
    "formula": _formula,
    "formula in float64": lambda: af.compile(
        "max(x, y) + sin(x)/x", af.Box(x=(-2, 2), y=(0, 2)), eps=1e-9, dtype=torch.float64
    ),
    "several outputs": lambda: af.compile(["x*y", "tanh(x) - y"], af.Box(x=(-1, 1), y=(0, 2)), eps=1e-4),
    "module": _module,
    "norm": _norm,
    "tokens": lambda: af.compile(Mixing(), af.Box.cube(-1, 1, shape=(4, 3)), eps=1e-2),
    "plain": lambda: af.export.to_plain(af.compile("sin(x*y)", af.Box(x=(-1, 1), y=(0, 2)), eps=1e-3)),
    "anchor head": lambda: af.AnchorHead.fit("gelu", -4, 4, eps=1e-4),
    "anchor head in float64": lambda: af.AnchorHead.fit("sin", -3, 3, eps=1e-10, dtype=torch.float64),
    "gate head": lambda: af.GateHead.piecewise_linear([-1, 0, 1], [0, 2, 1]),
    "gate of a pair": lambda: af.GateHead.fit("min", -1, 1),
    "logistic gate": lambda: af.GateHead.fit("silu", -3, 3),
    "product head": lambda: af.ProductHead.fit((-1, 2), (0, 5)),
    "product of a vector and a number": lambda: af.ProductHead.fit((-1, 2), (0, 5), width=3),
    "layer norm head": lambda: af.NormHead.layer_norm(6, variance=(0.5, 2.0)),
    "rms norm head with weight and bias": lambda: af.NormHead.rms_norm(
        5, variance=(0.01, 4.0), weight=torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]), bias=torch.tensor([0.0, 1, -1, 2, 0])
    ),
    "token head": lambda: af.TokenHead.min(tokens=3, channels=2, lo=-1, hi=1, eps=1e-3),
    "mean of tokens": lambda: af.TokenHead.prefix_mean(tokens=3, channels=2, lo=-1, hi=1),
    "chain of gates and a product": lambda: ChainHead.fit("hardswish", -8, 8),
    "chain of gates and tables": lambda: ChainHead.fit("elu", -8, 8, eps=1e-4),
}
THEOREMS: dict[str, Callable[[], theorems.Construction]] = {
    "cold ramp": lambda: theorems.ramp([1.0, -2.0], 0.5, a=-1, b=1, anchors=33, form="tokens"),
    "warm ramp": lambda: theorems.ramp([1.0, -2.0], 0.5, a=-1, b=1, anchors=33, form="tokens", variant="warm"),
    "many heads": lambda: theorems.ramp_heads([1.0], 0.5, a=-1, b=1, heads=4, tokens=6, form="tokens"),
    "two layers": lambda: theorems.two_layer(
        lambda x: x.flip(-2), af.Box.cube(0, 1, shape=(2, 1)), spacing=0.25, lipschitz=1.5, form="tokens"
    ),
    "paper's ramp": lambda: theorems.ramp([1.0, -2.0], 0.5, a=-1, b=1, anchors=33),
    "paper's ramp, a w for each token": lambda: theorems.ramp([[1.0, -2], [0.5, 1]], [0.5, 0], a=-1, b=1, anchors=9),
    "paper's many heads": lambda: theorems.ramp_heads([1.0], 0.5, a=-1, b=1, heads=4, tokens=6),
    "paper's two layers": lambda: theorems.two_layer(
        lambda x: x.flip(-2), af.Box.cube(0, 1, shape=(2, 1)), spacing=0.25, lipschitz=1.5
    ),
    "paper's attention, then softmax": lambda: theorems.attention_then_softmax(
        lambda x: x.flip(-2), af.Box.cube(0, 1, shape=(2, 1)), spacing=0.25, lipschitz=1.5
    ),
    "paper's cells": lambda: theorems.max_affine(
        lambda x: x.flip(-2), af.Box.cube(0, 1, shape=(2, 1)), cells=49, lipschitz=1.5
    ),
    "cells in another sequence": lambda: theorems.max_affine(
        lambda x: x.norm(dim=-1, keepdim=True), af.Box.cube(-1, 1, shape=2), cells=49, lipschitz=1.0, attention="cross"
    ),
    "a sequence's cells in another one": lambda: theorems.max_affine(
        lambda x: x.flip(-2), af.Box.cube(0, 1, shape=(2, 1)), cells=49, lipschitz=1.5, attention="cross", form="tokens"
    ),
    "largest of affine maps": lambda: theorems.max_affine(
        lambda x: x.norm(dim=-1, keepdim=True), af.Box.cube(-1, 1, shape=2), cells=49, lipschitz=1.0
    ),
}


@cache
def built(name: str) -> CertifiedModule:
    return NUMBERS[name]()


def points_of(net: CertifiedModule) -> torch.Tensor:
    """Points of the box as the page takes them, random ones and ends, in the network's dtype."""
    ends = torch.tensor([pair for _, *pair in read(net).inputs], dtype=torch.float64)
    share = torch.rand(POINTS, len(ends), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if (rows := read(net).rows) is not None:  # rows whose variance lies within, from one end to the other, off centre
        (low, high), level = rows["variance"], torch.linspace(0.01, 0.99, POINTS, dtype=torch.float64)[:, None]
        even = torch.nn.functional.layer_norm(share**3, share.shape[-1:], eps=0.0)
        return (even * (low * (high / low) ** level).sqrt() + (0.25 if rows["offset"] else 0.0)).to(net.dtype)
    share[POINTS // 2 :] = share[POINTS // 2 :].round()
    found = (ends[:, 0] + share * (ends[:, 1] - ends[:, 0])).to(net.dtype)
    return torch.minimum(torch.maximum(found.double(), ends[:, 0]), ends[:, 1]).to(net.dtype)


def sequences(net: theorems.Construction, points: torch.Tensor) -> torch.Tensor:
    """Points as a theorem takes them, (point, token, channel); the page may have all tokens in one row."""
    return points.reshape(len(points), -1, net.box.shape[-1])


@torch.no_grad()
def by_torch(net: CertifiedModule, points: torch.Tensor) -> torch.Tensor:
    """What the network itself says at the points, (point, output)."""
    if isinstance(net, theorems.Construction):
        inputs: tuple[torch.Tensor, ...] = (sequences(net, points),)
    elif isinstance(net, af.NormHead):
        inputs = (points,)
    elif isinstance(net, af.ProductHead) and net.width is not None:
        inputs = (points[:, :-1], points[:, -1])
    elif net.box.names and not net.stacked:
        inputs = tuple(points.unbind(-1))
    else:
        inputs = (points.reshape(len(points), *net.box.shape),)
    return net.core(*inputs).double().reshape(len(points), -1)


def by_page(page: Any, points: torch.Tensor) -> torch.Tensor:
    """What the page says there."""
    rows = page.evaluate("points => points.map(attnforge.run)", points.double().tolist())
    return torch.tensor(rows, dtype=torch.float64)


def scales(net: CertifiedModule, points: torch.Tensor) -> torch.Tensor | float:
    """What an error is relative to: for a norm |weight| times the row's largest entry plus |bias|."""
    rows = read(net).rows
    if rows is None:
        return 1.0
    x = points.double()
    centred = x - (x.mean(-1, keepdim=True) if rows["offset"] else 0.0)
    largest = centred.abs().amax(-1) / (centred.square().mean(-1) + rows["eps"]).sqrt()
    return largest[:, None] * torch.tensor(rows["weight"]).double() + torch.tensor(rows["bias"]).double()


def rounding_of(net: CertifiedModule) -> float:
    """What the certificate allows rounding to do: two evaluations of the same weights differ by twice that at most."""
    return sum(term.value for term in net.certificate.terms if term.source == "rounding")


@pytest.mark.parametrize("name", NUMBERS)
def test_the_page_computes_what_the_network_computes(browser: Driven, name: str) -> None:
    net = built(name)
    page, points = browser.open(net), points_of(net)
    there, here = by_page(page, points), by_torch(net, points)
    assert 0 < rounding_of(net) < np.inf
    assert bool(((there - here).abs() <= 2 * rounding_of(net) * scales(net, points)).all())
    rows = page.evaluate("points => points.map(attnforge.target)", points.double().tolist())
    off = (there - torch.tensor(rows, dtype=torch.float64)).abs()
    assert bool((off <= net.bound * scales(net, points)).all()), "certificates allow any order of summation"
    browser.clean()


@pytest.mark.parametrize("name", THEOREMS)
def test_theorems_run_in_the_page(browser: Driven, name: str) -> None:
    net = THEOREMS[name]()
    page, points = browser.open(net), points_of(net)
    there, found = by_page(page, points), read(net)
    meant = net.target(sequences(net, points)).double().reshape(POINTS, -1)
    assert float((there - meant).abs().max()) <= net.bound
    assert float((there - by_torch(net, points)).abs().max()) <= 1e-12  # float64, sums of at most a hundred terms
    if found.target is None:
        assert "Python function" in page.inner_text("#outputs")
    else:
        rows = page.evaluate("points => points.map(attnforge.target)", points.double().tolist())
        assert float((torch.tensor(rows, dtype=torch.float64) - meant).abs().max()) <= 1e-12
    browser.clean()


def test_activations_that_are_read_fast_say_so(browser: Driven) -> None:
    net = FastActivation.fit("gelu", -6, 6)
    page, points = browser.open(net), points_of(net)
    assert float((by_page(page, points) - by_torch(net, points)).abs().max()) <= 2 * net.bound
    assert "written out" in page.inner_text("#verdict")
    browser.clean()


def test_half_precision_enters_and_leaves_rounded(browser: Driven) -> None:
    net = FastActivation.fit("gelu", -6, 6, dtype=torch.bfloat16)
    page = browser.open(net)
    points = torch.linspace(-6, 6, 97).to(torch.bfloat16)[:, None]
    there = by_page(page, points)
    assert bool((there == there.to(torch.bfloat16).double()).all()), "outputs are numbers of bfloat16"
    exact = torch.nn.functional.gelu(points.double())
    assert float((there - exact).abs().max()) <= net.bound
    page.fill("#field0", "1.001")  # no number of bfloat16: the nearest one is 1
    page.keyboard.press("Tab")
    assert page.evaluate("attnforge.now.point[0]") == 1 and "bfloat16" in page.inner_text("#about")
    browser.clean()


def test_rows_that_a_norm_is_not_for_are_named(browser: Driven) -> None:
    page = browser.open(built("layer norm head"))
    until(page, "document.getElementById('verdict').innerText.includes('within the certified')")
    for i in range(6):
        page.fill(f"#field{i}", str(0.001 * i))
    page.keyboard.press("Tab")
    until(page, "document.getElementById('verdict').innerText.includes('outside [0.5, 2]: nothing is certified')")
    page.click("#hunt")
    page.wait_for_selector("#hunt-text", timeout=20_000)
    worst, point = page.evaluate("[attnforge.now.worst.error, attnforge.now.worst.point]")
    variance = float(torch.tensor(point, dtype=torch.float64).var(correction=0))
    assert 0 < worst <= built("layer norm head").bound and 0.5 <= variance <= 2
    browser.clean()


def test_sites_of_converted_models_have_pages(browser: Driven) -> None:
    norm = ConvertedNorm(NativeNorm.fit(64, (0.1, 10.0)), (64,), None, None, "encoder.norm")
    for site in (norm, ConvertedActivation(FastActivation.fit("gelu", -4, 4), "gelu", -4, 4, "encoder.act")):
        page = browser.open(site)
        assert site.path in page.inner_text("h1") and "head of a site" in page.inner_text("#verdict")
        assert "within the certified" in page.inner_text("#verdict")
    assert len(explore(norm)) < 400_000, "tables that are mostly zeros are kept by their places"
    browser.clean()


PROGRAMS: dict[str, Callable[[], tuple[rasp.SOp, Any]]] = {
    "sort": lambda: (rasp.library.sort(), rasp.Sequences("abcd", max_length=6)),
    "dyck": lambda: (rasp.library.dyck1(), rasp.Sequences("()", max_length=6)),
    "fractions": lambda: (rasp.library.frac_prevs(), rasp.Sequences("abc", max_length=6)),
    "causal": lambda: (rasp.library.before(), rasp.Sequences("ab", max_length=6, causal=True)),
    "numbers": lambda: (
        rasp.where(rasp.indices % 3 > 1, (rasp.tokens - 5) // 2, abs(rasp.tokens - 2) ** 2 - rasp.indices / 2),
        rasp.Sequences([1, 4, 7], max_length=5),
    ),
    "tuples and a table": lambda: (
        rasp.apply(lambda token, i: (token, i % 2) if i else None, rasp.tokens, rasp.indices),
        rasp.Sequences(["<script>alert(1)</script>", "it's", '"&amp;'], max_length=3),
    ),
}


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "network") for name in PROGRAMS), ("sort", "plain"), ("fractions", "plain")]
)
def test_token_programs_run_in_the_page(browser: Driven, name: str, form: str) -> None:
    program, domain = PROGRAMS[name]()
    net = af.compile(program, domain)
    page = browser.open(net if form == "network" else af.export.to_plain(net))
    sequences = [*domain.sample(12, seed=2), (domain.vocabulary[0],) * domain.max_length]
    places = [[net.vocabulary.index(token) for token in sequence] for sequence in sequences]
    meant = page.evaluate("all => all.map(attnforge.target)", places)
    said = page.evaluate("all => all.map(attnforge.decode)", places)
    for sequence, goal, found in zip(sequences, meant, said, strict=True):
        wanted = program(sequence)
        assert goal == [str(v) if isinstance(v, Fraction) else repr(v) for v in wanted]
        if net.outputs is None:
            assert max(abs(a - float(b)) for a, b in zip(found, wanted, strict=True)) <= net.bound
        else:
            assert found == goal
    browser.clean()


def test_several_programs_of_one_network_are_compared_one_at_a_time(browser: Driven) -> None:
    programs = {"hist": rasp.library.hist(), "reverse": rasp.library.reverse(), "share": rasp.library.frac_prevs()}
    domain = rasp.Sequences("abc", max_length=5)
    net = af.compile(programs, domain)
    page = browser.open(net)
    sequences = domain.sample(8, seed=3)
    places = [[net.vocabulary.index(token) for token in sequence] for sequence in sequences]
    for name, program in programs.items():
        page.select_option("#target", name)
        said = page.evaluate("all => all.map(attnforge.decode)", places)
        meant = page.evaluate("all => all.map(attnforge.target)", places)
        for sequence, found, goal in zip(sequences, said, meant, strict=True):
            wanted = program(sequence)
            assert goal == [str(v) if isinstance(v, Fraction) else repr(v) for v in wanted]
            if name == "share":
                assert max(abs(a - float(b)) for a, b in zip(found, wanted, strict=True)) <= net.bound
            else:
                assert found == goal
    until(page, "document.getElementById('verdict').innerText.includes('within the certified')")
    page.click("#hunt")  # what is found of one program is no news of another
    page.select_option("#target", "reverse")
    until(page, "document.getElementById('verdict').innerText.includes('says what the program says')")
    assert page.locator("#verdict svg").count() == 0, "an answer is right or wrong: there is no distance to draw"
    assert page.inner_text("#hunt") == "Hunt for a worse point"
    for u, label in enumerate(page.locator(".unit .label").all_inner_texts()):
        if label.startswith("aggregate(select(indices, length"):
            page.click(f"#power{u}")
    until(page, "document.getElementById('verdict').innerText.includes('positions differ')")
    page.select_option("#target", "hist")  # whose heads are other ones
    until(page, "document.getElementById('verdict').innerText.includes('says what the program says')")
    browser.clean()


def test_margins_vanish_as_they_do_in_float32(browser: Driven) -> None:
    page = browser.open(_sort())
    watched = "attnforge.forward([0, 1, 3, 2], { watch: '2.0.0' }).watched"
    weights = page.evaluate(f"{watched}.weights.map((row) => [...row])")
    assert sorted({w for row in weights for w in row}) == [0, 1], "in doubles exp(-256) would be left over"


def test_every_function_means_the_same_in_the_page(browser: Driven) -> None:
    page = browser.open(af.GateHead.relu(-1, 1))
    texts = [*names(), "power(2.5)", "power(-3)", "power(1/3)", "leaky_relu(0.2)", "elu(1.5)", "softplus(20.0)",
             "shifted_log(1e-9)",
             "piecewise_linear([-1, 0, 2], [0, 1, -1])", "expr: (y - sin(y))/y**3", "expr: (exp(y) - 1)/y",
             "expr: log(1 + y**2)*sqrt(2 + y)", "expr: 1/(1 - cos(y + 7))"]  # fmt: skip
    wrong = []
    for text in texts:
        function = get(text)
        lo, hi = max(function.domain.lo, -6.0), min(function.domain.hi, 6.0)
        inset = 1e-3 * (hi - lo)
        y = torch.linspace(lo + inset, hi - inset, 41, dtype=torch.float64)
        y = torch.cat([y, torch.tensor([1e-9, -1e-9, 0.0], dtype=torch.float64)])
        y = y[(y > lo) & (y < hi) & torch.isfinite(function(y))]
        call = "([data, ys]) => ys.map((y) => attnforge.evaluate(data, y))"
        found = torch.tensor(page.evaluate(call, [function_json(function), y.tolist()]), dtype=torch.float64)
        off = ((found - function(y)).abs() / (1 + function(y).abs())).max()
        if not float(off) <= 4e-15:  # a few units of roundoff: browsers and PyTorch have different libraries
            wrong.append((text, float(off)))
    assert wrong == []
    with pytest.raises(af.UnsupportedOperation):
        function_json(get(lambda y: y + 1))


def test_heads_are_switched_off_and_warmed_as_in_the_weights(browser: Driven) -> None:
    net = _formula()
    page, points, found = browser.open(net), points_of(net), read(net)
    for unit in found.units:
        changed = [f"{unit.layer}.{g}.{h}" for g, h in unit.heads]
        for what in ("off", "heat"):
            script = "{ off: new Set(names) }" if what == "off" else "{ heat: new Map(names.map((n) => [n, 0.5])) }"
            call = f"([points, names]) => points.map((p) => [...attnforge.forward(p, {script}).output])"
            there = torch.tensor(page.evaluate(call, [points.double().tolist(), changed]), dtype=torch.float64)
            kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            for g, h in unit.heads:
                group = found.layers[unit.layer].groups[g]
                for table in ((group.W_O,) if what == "off" else (group.W_Q, group.b_Q)):
                    table.data[h if len(table) > 1 else 0] *= 0.0 if what == "off" else 0.5
            here = net.core(points).detach().double().reshape(there.shape)
            net.load_state_dict(kept)
            assert float((there - here).abs().max()) <= 1e-6 * float(1 + here.abs().max())  # float32, a few dozen terms
            assert float((there - by_torch(net, points)).abs().max()) > net.bound, "the change must be seen"


# ---- what a reader does


def error_shown(page: Any) -> str:
    return str(page.inner_text("#verdict"))


def test_sliders_fields_and_keys_move_the_point(browser: Driven) -> None:
    page = browser.open(_formula())
    assert "within the certified" in error_shown(page)
    before = page.inner_text("#outputs")
    page.focus("#slide0")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    until(page, "before => document.getElementById('outputs').innerText !== before", before)
    page.fill("#field1", "1.25")
    page.keyboard.press("Tab")
    assert page.evaluate("attnforge.now.point[1]") == 1.25
    page.fill("#field1", "99")  # outside the box: the nearest end of it
    page.keyboard.press("Tab")
    assert page.evaluate("attnforge.now.point[1]") == 2
    assert page.input_value("#slide1") == "2" and page.input_value("#field1") == "2"
    assert "for y from 0 to 2: the nearest end is taken" in page.inner_text("#number-note")
    page.fill("#field0", "")  # no number: the one that was there stays, and the page says so
    page.keyboard.press("Tab")
    assert "That is no number" in page.inner_text("#number-note") and page.input_value("#field0") != ""
    page.click("#anywhere")
    assert page.inner_text("#number-note") == ""
    until(page, "document.getElementById('said').textContent.includes('Network: output')")
    browser.clean()


def test_lines_light_up_heads_and_heads_tell_what_they_are(browser: Driven) -> None:
    page = browser.open(_formula())
    page.hover("#program button.line:has-text('apply sin')")
    lit = page.eval_on_selector_all(".unit.lit .label", "nodes => nodes.map((n) => n.textContent)")
    assert lit == ["sin(x*y)"]
    facts = page.inner_text("#facts")
    for told in ("sin(x*y)", "anchor", "A4", "x*y", "blocks.1.attn.hook_z"):
        assert told in facts
    page.hover("#program .term >> nth=0")
    assert "sin(x*y)" in page.inner_text("#facts h3")
    assert page.locator("[role=button] [role=button], button button, button [tabindex]").count() == 0
    page.focus("#program .term [role=button] >> nth=0")
    page.keyboard.press("Space")  # a part of the formula is a button, and keys work as on any other
    until(page, "attnforge.scene.units[attnforge.now.unit].label === 'sin(x*y)'")
    page.focus("#unit2")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('unit2').getAttribute('aria-pressed') === 'true'")
    page.click("#copy")
    until(page, "document.getElementById('copy').textContent === 'copied'")
    assert "attn.hook_z" in page.evaluate("navigator.clipboard.readText()")
    browser.clean()


def test_ablation_and_temperature_break_the_bound_and_mend(browser: Driven) -> None:
    page = browser.open(_formula())
    page.focus("#unit1")
    page.keyboard.press("a")
    until(page, "document.querySelector('.unit.off') !== null")
    until(page, "document.getElementById('verdict').innerText.includes('above the certified')")
    page.click("#mend")
    until(page, "document.getElementById('verdict').innerText.includes('within the certified')")
    page.click("#power4")
    until(page, "document.getElementById('verdict').innerText.includes('above the certified')")
    assert page.get_attribute("#power4", "aria-pressed") == "true"
    page.click("#ablate")  # on again
    until(page, "document.getElementById('verdict').innerText.includes('within the certified')")
    page.focus("#heat")
    for _ in range(8):
        page.keyboard.press("ArrowLeft")
    until(page, "document.getElementById('verdict').innerText.includes('above the certified')")
    until(page, "document.getElementById('heat-text').textContent.includes('4 times warmer')")
    page.wait_for_selector("#sweep svg")
    mark = page.get_attribute("#heat-mark", "d")
    page.keyboard.press("ArrowLeft")
    until(page, "was => document.getElementById('heat-mark').getAttribute('d') !== was", mark)
    browser.clean()


def test_the_hunt_finds_worse_points_below_the_bound_and_stops(browser: Driven) -> None:
    net = _formula()
    page = browser.open(net)
    first = page.evaluate("attnforge.now.worst.error")
    page.click("#hunt")
    page.wait_for_selector("#hunt-text", timeout=20_000)
    worst, point = page.evaluate("[attnforge.now.worst.error, attnforge.now.worst.point]")
    assert first < worst <= net.bound
    assert net.measure(2000).worst / 4 < worst
    here = torch.tensor([point], dtype=torch.float64).to(net.dtype)
    off = float((by_torch(net, here) - values(net.program, here.double()).reshape(1, -1)).abs().max())
    assert off == pytest.approx(worst, abs=2 * rounding_of(net))
    page.click("#visit")
    assert page.evaluate("attnforge.now.point") == point
    page.evaluate("[1, 2].forEach(() => document.getElementById('hunt').click())")  # begins, and stops at once
    assert page.inner_text("#hunt-text") == "stopped"
    button = page.query_selector("#hunt")
    page.evaluate("document.getElementById('hunt').click()")
    until(page, "document.getElementById('hunt').textContent === 'Hunt for a worse point'", seconds=20)
    assert button.evaluate("node => node.isConnected"), "a button made anew would not hear of a click that is under way"
    browser.clean()


def test_curves_and_maps(browser: Driven) -> None:
    page = browser.open(_formula())
    page.wait_for_selector("#curves-note")
    assert page.locator("#curves svg").count() == 2
    assert "certified bound" in page.inner_text("#curves-note")
    page.select_option("#axis-y", "y")
    page.wait_for_selector("#curves canvas")
    until(page, "document.getElementById('curves-note').textContent.includes('41 by 41')")
    assert "x from -2 to 2 to the right, y from 0 to 2 upwards" in page.inner_text("#curves-note")
    page.click("#curves canvas", position={"x": 3, "y": 3})
    x, y = page.evaluate("attnforge.now.point")
    assert x < -1.9 and y > 1.9
    until(page, "parseFloat(document.querySelector('.mark').style.left) < 3")
    assert float(page.eval_on_selector(".mark", "mark => parseFloat(mark.style.bottom)")) > 95
    browser.clean()


def test_sequences_are_edited(browser: Driven) -> None:
    page = browser.open(_sort())
    page.fill("#typed", "dbca")
    page.keyboard.press("Tab")
    until(page, "attnforge.now.point.length === 4")
    assert page.locator("#outputs td.net").all_inner_texts() == list("abcd")
    page.select_option("#token0", "a")
    until(page, "document.querySelectorAll('#outputs td.net')[1].textContent === 'a'")
    page.fill("#typed", "axb")
    page.keyboard.press("Tab")
    assert "not in the vocabulary" in page.inner_text("#typed-note")
    assert page.get_attribute("#typed", "aria-invalid") == "true"
    page.click("#longer")
    until(page, "attnforge.now.point.length === 5")
    assert page.inner_text("#typed-note") == "", "what was refused is gone, and so is the reason"
    page.focus("#longer")
    page.keyboard.press("Enter")  # to six, which is the most: the button can no longer be pressed
    until(page, "document.activeElement.id === 'shorter'")
    page.click("#shorter")
    until(page, "attnforge.now.point.length === 5")
    page.click("#unit3")
    page.wait_for_selector("#matrix")
    page.hover("#matrix tbody tr >> nth=1 >> td >> nth=2")
    assert "the weight" in page.inner_text("#pattern-note")
    page.click("#power3")
    until(page, "document.getElementById('verdict').innerText.includes('positions differ')")
    page.select_option("#layer", index=1)
    until(page, "document.getElementById('columns').innerText.includes('selector_width')")
    assert not page.is_visible("#drawn")
    browser.clean()


def test_tokens_with_spaces_are_typed(browser: Driven) -> None:
    page = browser.open(af.compile(rasp.library.reverse(), rasp.Sequences(["the", "fox", "fox jumps"], max_length=3)))
    for typed, places in (("the fox jumps", [2, 1]), ("fox the  fox", [0, 2, 0]), ("fox jumps jumps", None)):
        page.fill("#typed", typed)
        page.keyboard.press("Tab")
        if places is None:
            assert page.inner_text("#typed-note") == "“jumps” is not in the vocabulary."
        else:
            assert page.evaluate("attnforge.now.point") == places
    browser.clean()


#: Letters that can hardly be read, by the rule of WCAG 2.1: (contrast, text) of every one below 4.5.
PALE = """() => {
  const numbers = (c) => c.match(/[\\d.e-]+/g).map(Number), scale = (c) => (c.startsWith("color") ? 255 : 1);
  const read = (c) => { const [r, g, b, a = 1] = numbers(c); return [r, g, b].map((v) => v * scale(c)).concat(a); };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4)).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || !node.checkVisibility() || node.closest("script, style, .unseen, :disabled")) continue;
    let behind = null;
    for (let e = node; e && !behind; e = e.parentElement) {
      const colour = read(getComputedStyle(e).backgroundColor);
      if (colour[3] === 1) behind = colour;
    }
    const style = getComputedStyle(node), ink = read(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind)].sort((x, y) => y - x);
    if (a / b < 4.5) found.push([(a / b).toFixed(2), text]);
  }
  return found;
}"""


@pytest.mark.parametrize("name", ["formula", "tokens", "plain"])
def test_pages_fit_a_phone(browser: Driven, name: str) -> None:
    page = browser.open(built(name), width=NARROW)
    page.wait_for_selector("#curves-note")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    unnamed = page.eval_on_selector_all(
        "main button, main input, main select",
        "all => all.filter((n) => !(n.textContent.trim() || n.ariaLabel || n.labels?.length)).length",
    )
    assert unnamed == 0, "every control has a name that can be read aloud"
    assert page.eval_on_selector_all("th", "all => all.filter((n) => !n.textContent.trim()).length") == 0
    assert page.evaluate(PALE) == [], "letters have a contrast of 4.5 to what is behind them, on every shade of a table"
    browser.page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") in ("light", "dark")
    assert page.evaluate(PALE) == []
    browser.clean()


def test_token_pages_fit_a_phone(browser: Driven) -> None:
    page = browser.open(_sort(12), width=NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    browser.clean()


def test_networks_that_are_too_large_say_so(browser: Driven) -> None:
    net = af.TokenHead.max(tokens=2400, channels=1, lo=-1, hi=1, eps=1e-2)
    path = browser.folder / "large.html"
    explore(net, path, force=True)
    browser.page.goto(path.as_uri())
    assert browser.page.evaluate("attnforge.cost") > 5e7
    assert "does not run here" in browser.page.inner_text("#trouble")
    assert browser.page.locator(".unit").count() == len(read(net).units)
    assert not browser.page.is_visible("#try")
    page = browser.open(af.TokenHead.max(tokens=1200, channels=1, lo=-1, hi=1, eps=1e-2))
    assert 1e7 < page.evaluate("attnforge.cost") < 5e7
    until(page, "['sweep', 'curves'].every((id) => document.getElementById(id).innerText.includes('Not drawn'))")
    assert "within the certified" in page.inner_text("#verdict")
    packed = PackedTensors("float32")
    assert packed.add(torch.ones(MOST_NUMBERS)) == {"at": 0, "shape": [MOST_NUMBERS]} and packed.runs
    assert packed.add(torch.zeros(5000)) == {"at": MOST_NUMBERS, "shape": [5000], "kept": 0, "places": 0}
    assert packed.runs and packed.weights == MOST_NUMBERS + 5000, "zeros take no room"
    packed.add(torch.zeros(1))
    assert not packed.runs and packed.text() == "", "beyond the limit a page gets no weights"
    text = explore(_formula())
    script = text.index('"numbers":')
    large = text[:script] + '"numbers":9000000,"was":' + text[script + len('"numbers":') :]
    path.write_text(large, "utf-8")
    browser.wrong.clear()
    browser.page.goto(path.as_uri())
    assert "9,000,000 weights, more than" in browser.page.inner_text("#trouble")
    browser.page.hover("#unit4")
    assert "A4" in browser.page.inner_text("#facts")
    browser.clean()


# ---- files, the command line, notebooks


def test_the_command_line_writes_a_page(tmp_path: Path) -> None:
    saved, page = tmp_path / "net.safetensors", tmp_path / "page.html"
    af.GateHead.relu(-1, 1).save(saved)

    def call(*words: str) -> Any:
        result = CliRunner().invoke(app, ["explore", *words], prog_name="attnforge")
        assert "Traceback" not in result.output
        return result

    assert call(str(saved), "-o", str(page)).exit_code == 0
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert call(str(saved), "-o", str(page)).exit_code == 2, "a page that is there stays"
    told = json.loads(call(str(saved), "-o", str(page), "--force", "--json").stdout)
    assert told == {"page": str(page), "bytes": page.stat().st_size}
    wrong = call(str(saved), "-o", str(tmp_path / "page.txt"))
    assert wrong.exit_code == 2 and ".html" in wrong.output
    assert call(str(saved), "-o", str(tmp_path / "b.html"), "--site", "a").exit_code == 2


def test_nothing_of_a_network_becomes_markup(tmp_path: Path) -> None:
    program = rasp.tokens.named("</script><u>")
    net = af.compile(program, rasp.Sequences(["</script><script>alert(1)</script>", "<!--"], max_length=2))
    text = net.explore()
    assert text.count("<script") == 2 and text.count("</script>") == 2
    assert "<u>" not in text and "<u>" not in compact(net)


def test_stale_networks_are_refused_and_shown_as_such() -> None:
    net = af.AnchorHead.fit("sin", 0, 1, anchors=8)
    assert "certified: off by at most" in net._repr_html_()
    net.group.M_V.data[0] += 1
    with pytest.raises(af.CertificateError, match="stale"):
        net.explore()
    assert "stale" in net._repr_html_()
    with pytest.raises(af.UnsupportedOperation, match="4096 channels, written out as 4 heads"):
        af.NormHead.layer_norm(4096, variance=(0.5, 2.0), heads=4).explore()


def test_the_widget_follows_the_page(browser: Driven) -> None:
    pytest.importorskip("anywidget")
    net = af.AnchorHead.fit("sin", 0, 1, anchors=8)
    shown = widget(net, height=500)
    assert shown.page.startswith("<!DOCTYPE html>") and shown.height == 500
    frame = browser.folder / "frame.html"
    stand_in = """<!DOCTYPE html><title>notebook</title><div id="cell"></div><script type="module">
      const kept = { page: PAGE, height: 500, point: [], output: [] }, heard = {};
      const model = { get: (name) => kept[name], set: (name, value) => { kept[name] = value; }, save_changes() {},
        on: (name, f) => { heard[name] = f; }, off() {} };
      window.kept = kept; window.heard = heard;
      MODULE
      render({ model, el: document.getElementById("cell") });
    </script>"""
    module = shown._esm if isinstance(shown._esm, str) else str(shown._esm)
    text = stand_in.replace("MODULE", module.replace("export default { render };", ""))
    frame.write_text(text.replace("PAGE", json.dumps(shown.page).replace("</", "<\\/")), "utf-8")
    browser.page.goto(frame.as_uri())
    until(browser.page, "window.kept !== undefined && kept.output.length === 1")
    browser.page.evaluate("kept.point = [0.75], heard['change:point']()")
    until(browser.page, "Math.abs(kept.output[0] - Math.sin(0.75)) < 1e-3")
