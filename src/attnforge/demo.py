"""The demonstration: three compiled networks, a handful of heads, their certified bounds, and pages that show them.

`run` computes, `write` draws and writes; the command line only shows what they give.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import demo_networks as networks
from .certificates.certificate import upper_text
from .certificates.certified import CertifiedModule
from .charts.themes import Builder, Pair, svg
from .errors import ArgumentError, closest
from .heads.anchor.head import AnchorHead
from .heads.gate.head import GateHead
from .heads.norm.head import NormHead
from .heads.product.head import ProductHead
from .report.demo_page import Shown, demo_page
from .report.figures import Comparison, comparison_figure, save
from .report.pictures import figure_of
from .report.sweeps import Curve, Panel, Shapes, sweep_figure

Step = Callable[[str], None]
BOTH = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A function to build, how large, and whether its head is drawn: some look much like others."""

    function: str
    lo: float
    hi: float
    anchors: int = 32
    relative: bool = False
    drawn: bool = True


CASES = (
    Case("gelu", -8, 8),
    Case("sin", -6.3, 6.3),
    Case("exp", -4, 2, drawn=False),
    Case("log", 1e-3, 1e3, anchors=64),
    Case("reciprocal", 0.3, 200, relative=True),
    Case("rsqrt", 1e-3, 1e3, anchors=64, relative=True, drawn=False),
    Case("sqrt", 1e-4, 10, relative=True, drawn=False),
    Case("tanh", -4, 4, anchors=2),
)
OTHERS: tuple[tuple[str, str, Callable[[torch.dtype], CertifiedModule]], ...] = (
    ("relu(y)", "y in [-1, 1]", lambda dtype: GateHead.relu(-1, 1, dtype=dtype)),
    ("clip(y, -1, 1)", "y in [-3, 3]", lambda dtype: GateHead.ramp(-1, 1, dtype=dtype)),
    ("max(x, y)", "x, y in [-1, 1]", lambda dtype: GateHead.max(-1, 1, dtype=dtype)),
    ("x * y", "x, y in [-1, 1]", lambda dtype: ProductHead.fit((-1, 1), (-1, 1), dtype=dtype)),
    (
        "layer norm, 384 channels",
        "variance in [0.4, 130]",
        lambda dtype: NormHead.layer_norm(384, variance=(0.4, 130), dtype=dtype),
    ),
)
COUNTS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
KAPPAS = (0.05, 0.08, 0.12, 0.17, 0.25, 0.36, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 8.0, 14.0, 20.0)
HEADER = ("function", "interval", "anchors", "float64", "float32", "cold selection")
OTHER_HEADER = ("no anchors needed", "where", "float64", "float32")
NOTE = (
    "float64, float32: certified bounds of the largest error, rounding included; (relative): of the\n"
    "function's size. cold selection: the largest error measured when as many anchors are selected\n"
    "instead of interpolated between."
)
LABELS = {"float64": "certified, float64", "float32": "certified, float32", "cold": "cold selection, same anchors"}


@dataclass(frozen=True)
class Fitted:
    """One case, built in both dtypes, and the error of cold selection with as many anchors."""

    case: Case
    float64: AnchorHead
    float32: AnchorHead
    cold: float

    @property
    def cells(self) -> tuple[str, ...]:
        """This case as a row of the table."""
        case = self.case
        name = f"{case.function} (relative)" if case.relative else case.function
        bounds = (upper_text(head.bound) for head in (self.float64, self.float32))
        return (name, f"[{case.lo:g}, {case.hi:g}]", str(self.float64.size), *bounds, f"{self.cold:.2g}")


@dataclass(frozen=True)
class Other:
    """A head that needs no anchors, in both dtypes."""

    name: str
    where: str
    float64: CertifiedModule
    float32: CertifiedModule

    @property
    def cells(self) -> tuple[str, ...]:
        """This head as a row of the table."""
        return (self.name, self.where, upper_text(self.float64.bound), upper_text(self.float32.bound))


@dataclass(frozen=True)
class Results:
    """Everything the demonstration computes."""

    networks: tuple[networks.Compiled, ...]
    heads: tuple[Fitted, ...]
    others: tuple[Other, ...]
    panels: tuple[Panel, ...]
    shapes: Shapes
    seconds: float


@dataclass(frozen=True)
class Written:
    """Where things are."""

    page: Path
    pages: tuple[Path, ...]
    figures: tuple[Path, ...]
    saved: tuple[Path, ...]
    numbers: Path


@dataclass(frozen=True)
class Choice:
    """Which networks are compiled and which heads are fitted."""

    targets: tuple[networks.Target, ...] = networks.TARGETS
    cases: tuple[Case, ...] = CASES

    @classmethod
    def of(cls, names: Sequence[str]) -> Choice:
        """What has these names; all of it when there are none. There is always a head: the page begins with one."""
        if not names:
            return cls()
        targets = {target.name: target for target in networks.TARGETS}
        cases = {case.function: case for case in CASES}
        for name in names:
            if name not in targets and name not in cases:
                known = (*targets, *cases)
                raise ArgumentError(f"the demo has no '{name}'{closest(name, known)}; it has {', '.join(known)}")
        asked = dict.fromkeys(names)
        heads = tuple(cases[name] for name in asked if name in cases)
        return cls(tuple(targets[name] for name in asked if name in targets), heads or CASES[:1])

    @property
    def steps(self) -> int:
        """How often `step` is called: networks, heads, others, sweeps, figures of heads and three more, the page."""
        drawn = sum(case.drawn for case in self.cases)
        return 3 * len(self.targets) + len(self.cases) + len(OTHERS) + 2 + drawn + 3 + 1


def run(choice: Choice, step: Step = lambda text: None) -> Results:
    """Compile every network and fit every head; `step` is told what comes next."""
    start = time.perf_counter()
    cases, compiled = choice.cases, networks.build(choice.targets, step)
    heads = []
    for case in cases:
        step(f"fitting {case.function}")
        heads.append(fitted(case))
    others = []
    for name, where, build in OTHERS:
        step(f"building {name}")
        others.append(Other(name, where, build(torch.float64), build(torch.float32)))
    step("sweeping temperatures")
    temperature = _temperature("sin", -6.3, 6.3, 32)
    step("sweeping anchors")
    panels = (temperature, _anchors("gelu", -8, 8))
    shapes = _shapes("sin", -6.3, 6.3, 12)
    return Results(compiled, tuple(heads), tuple(others), panels, shapes, time.perf_counter() - start)


def fitted(case: Case) -> Fitted:
    """The heads of one case."""
    double, single = (
        AnchorHead.fit(
            case.function, case.lo, case.hi, anchors=case.anchors, dtype=dtype, relative=case.relative
        )
        for dtype in BOTH.values()
    )  # fmt: skip
    return Fitted(case, double, single, cold_error(case, double.size))


def cold_error(case: Case, anchors: int, kappa: float | None = None) -> float:
    """The largest error measured, for the better of two cold heads: even spacing, or as suits the interval."""
    found = []
    for potential in ("square", "log" if case.lo > 0 else "atan"):
        head = AnchorHead.fit(
            case.function, case.lo, case.hi, anchors=anchors, dtype=torch.float64, relative=case.relative,
            temperature="cold", potential=potential, kappa=kappa,
        )  # fmt: skip
        assert head.measured is not None
        found.append(head.measured)
    return min(found)


def _temperature(function: str, lo: float, hi: float, anchors: int) -> Panel:
    """Bounds against kappa; cold heads, whose values are the function at its anchors, from kappa = 1 on."""
    curves = []
    for role, dtype in BOTH.items():
        fits = ((k, AnchorHead.fit(function, lo, hi, anchors=anchors, kappa=k, dtype=dtype).bound) for k in KAPPAS)
        curves.append(Curve(LABELS[role], role, tuple((k, bound) for k, bound in fits if bound is not None)))
    case = Case(function, lo, hi)
    cold = tuple((k, cold_error(case, anchors, k)) for k in KAPPAS if k >= 1)
    notes = ((0.13, 2e-9, "warm heads\ninterpolate"), (7.0, 3e-4, "cold heads\nselect"))
    title = f"{function}, {anchors} anchors"
    knob = "inverse temperature κ"
    return Panel(title, knob, (*curves, Curve(LABELS["cold"], "cold", cold)), True, (0.05, 0.2, 1, 5, 20), notes)


@torch.no_grad()
def _shapes(function: str, lo: float, hi: float, anchors: int) -> Shapes:
    """What a cold and a warm head with few anchors compute."""
    cold, warm = (
        AnchorHead.fit(
            function, lo, hi, anchors=anchors, dtype=torch.float64, potential="square", temperature=temperature
        )
        for temperature in ("cold", "warm")
    )  # fmt: skip
    y = torch.linspace(lo, hi, 601, dtype=torch.float64)
    rows = (x.numpy() for x in (y, cold.function.value(y), cold(y), warm(y), cold.anchors))
    return Shapes(f"{function}, {anchors} anchors", *rows)


def _anchors(function: str, lo: float, hi: float) -> Panel:
    """Bounds against the number of anchors."""
    curves = []
    for role, dtype in BOTH.items():
        fits = ((n, AnchorHead.fit(function, lo, hi, anchors=n, dtype=dtype).bound) for n in COUNTS)
        curves.append(Curve(LABELS[role], role, tuple((n, bound) for n, bound in fits if bound is not None)))
    case = Case(function, lo, hi)
    cold = Curve(LABELS["cold"], "cold", tuple((n, cold_error(case, n)) for n in COUNTS))
    return Panel(f"{function}, best temperature", "anchors", (*curves, cold), ticks=(8, 16, 24, 32, 48, 64))


def comparison(heads: tuple[Fitted, ...]) -> Builder:
    """The figure that puts all cases next to each other."""
    return comparison_figure(
        [
            Comparison(h.case.function, (h.case.lo, h.case.hi), h.float64.bound or 0, h.float32.bound or 0, h.cold)
            for h in heads
        ]
    )


def write(results: Results, folder: Path, step: Step = lambda text: None) -> Written:
    """Save and check the networks, draw every figure, write the pages, one head and the numbers."""
    saved, pages = networks.write(results.networks, folder, step)
    builders = {"bounds": comparison(results.heads), "temperature": sweep_figure(results.panels, results.shapes)}
    drawn = [head for head in results.heads if head.case.drawn]
    builders |= {head.case.function: figure_of(head.float32) for head in drawn}
    relu = results.others[0].float32
    assert isinstance(relu, GateHead)
    builders["relu"] = figure_of(relu)
    files, pictures = [], {}
    for name, builder in builders.items():
        step(f"drawing {name}")
        pictures[name] = svg(builder)
        files += _images(folder / "figures" / name, pictures[name])
    files += [save(builders[name], folder / "figures" / f"{name}.png") for name in ("bounds", "temperature")]
    step("writing the page")
    shown = Shown(
        networks.HEADER, tuple(made.cells for made in results.networks), networks.NOTE,
        HEADER, tuple(h.cells for h in results.heads), NOTE, OTHER_HEADER, tuple(o.cells for o in results.others),
        pictures, tuple((h.case.function, h.cells, str(h.float32.certificate)) for h in drawn), results.seconds,
    )  # fmt: skip
    page = demo_page(shown).save(folder / "index.html")
    head = folder / f"{results.heads[0].case.function}.safetensors"
    results.heads[0].float32.save(head)
    numbers = folder / "numbers.json"
    numbers.write_text(json.dumps(_numbers(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return Written(page, tuple(pages), tuple(files), (*saved, head), numbers)


def _images(stem: Path, pair: Pair) -> list[Path]:
    """The two drawings of a figure as files."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}-dark.svg")]
    for file, text in zip(files, (pair.light, pair.dark), strict=True):
        file.write_text(text, encoding="utf-8", newline="\n")
    return files


def _numbers(results: Results) -> dict[str, Any]:
    """What the tables and figures show, for other programs."""
    heads = [
        {
            "function": h.case.function, "interval": [h.case.lo, h.case.hi], "anchors": h.float64.size,
            "relative": h.case.relative, "float64": h.float64.bound, "float32": h.float32.bound,
            "measured float64": h.float64.measured, "measured float32": h.float32.measured, "cold": h.cold,
        }
        for h in results.heads
    ]  # fmt: skip
    others = [
        {"name": o.name, "where": o.where, "float64": o.float64.bound, "float32": o.float32.bound}
        for o in results.others
    ]
    curves = [{c.role: c.points for c in panel.curves} for panel in results.panels]
    sweeps = [{"title": p.title, "knob": p.knob, "curves": c} for p, c in zip(results.panels, curves, strict=True)]
    made = [network.numbers for network in results.networks]
    return {"networks": made, "heads": heads, "others": others, "sweeps": sweeps}
