"""The demonstration: three compiled networks, a handful of heads, their certified bounds, and pages that show them.

`run` computes, `write` saves, checks, draws and writes; the command line only shows what they give.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import files
from .box import Box
from .certificates.certificate import upper_text
from .certificates.certified import CertifiedModule
from .charts.chart import Figure, Note, Panel, Series
from .charts.drawing import save, svg
from .charts.themes import ThemePair
from .compiler.compiled import CompiledNetwork
from .compiler.pipeline import compile
from .dtypes import DTYPES
from .errors import ArgumentError, CertificateError, closest
from .explorer import explore
from .heads.anchor.head import AnchorHead
from .heads.gate.head import GateHead
from .heads.norm.head import NormHead
from .heads.product.head import ProductHead
from .report.heads import LABELS, Comparison, Shapes, comparison_figure, figure_of, sweep_figure, swept
from .report.html import Page
from .report.network import SampledErrors, measure, network_page
from .saving import write_whole

Step = Callable[[str], None]


class EncoderBlock(nn.Module):
    """Attention between tokens, then a small MLP for each of them, both with a skip: a block of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        x = x + self.out(mixed)
        return x + self.mlp(x)


@dataclass(frozen=True)
class Exhibit:
    """What is compiled: a name for its files, a title for people, how it is made, its box and its tolerance."""

    name: str
    title: str
    make: Callable[[], Any]
    box: Box
    where: str
    eps: float


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A module whose random weights are the same every time."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return build


GRAVITY = "G*m1*m2/((x2-x1)**2 + (y2-y1)**2 + (z2-z1)**2)"
TARGETS = (
    Exhibit(
        "formula",
        GRAVITY,
        lambda: GRAVITY,
        Box(dict.fromkeys(["G", "m1", "m2", "x1", "y1", "z1"], (1, 2)) | dict.fromkeys(["x2", "y2", "z2"], (3, 4))),
        "9 intervals",
        1e-3,
    ),
    Exhibit(
        "mlp",
        "an MLP 8-32-32-1 with gelu",
        _seeded(lambda: nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
        )),
        Box.cube(-1, 1, shape=8),
        "[-1, 1]^8",
        1e-3,
    ),
    Exhibit(
        "sequence",
        "a transformer block, 6 tokens of 4 channels",
        _seeded(lambda: EncoderBlock(4)),
        Box.cube(-1, 1, shape=(6, 4)),
        "[-1, 1]^(6x4)",
        1e-3,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A target's network, how long it took, and what was measured on it."""

    target: Exhibit
    net: CompiledNetwork
    seconds: float
    found: SampledErrors

    @property
    def cells(self) -> tuple[str, ...]:
        """This network as a row of the table."""
        size = self.net.size
        return (
            self.target.title, self.target.where, f"{self.target.eps:g}", upper_text(self.net.bound),
            f"{self.found.worst:.2g}", str(size.layers), str(size.heads), str(size.anchors), f"{self.seconds:.1f}",
        )  # fmt: skip

    @property
    def note(self) -> str:
        """This network in a line."""
        size = self.net.size
        return f"off by at most {upper_text(self.net.bound)}, proved; {size.layers} layers, {size.heads} heads"

    @property
    def numbers(self) -> dict[str, Any]:
        """This network for other programs."""
        return {
            "name": self.target.name, "target": self.target.title, "eps": self.target.eps, "bound": self.net.bound,
            "measured": self.found.worst, "size": vars(self.net.size), "seconds": self.seconds,
        }  # fmt: skip


def compiled_networks(targets: Sequence[Exhibit], step: Step) -> tuple[Compiled, ...]:
    """Compile every target; `step` is told what comes next."""
    done = []
    for target in targets:
        step(f"compiling {target.title}")
        start = time.perf_counter()
        net = compile(target.make(), target.box, target.eps, progress=lambda stage: None)
        seconds = time.perf_counter() - start
        done.append(Compiled(target, net, seconds, measure(net)))
    return tuple(done)


def write_networks(networks: Sequence[Compiled], folder: Path, step: Step) -> tuple[list[Path], list[Path]]:
    """Save every network, compute its certificate again from the file, and write its page: files and pages."""
    saved, pages = [], []
    for made in networks:
        step(f"checking {made.target.name}.safetensors")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{made.target.name}.safetensors"
        made.net.save(path, force=True)
        again = files.check(path)
        if again != made.net.certificate:
            raise CertificateError(f"{path.name}: the file does not give the certificate that the compiler gave")
        saved.append(path)
        step(f"writing {made.target.name}.html")
        page = network_page(made.net)
        page.up = ("The demonstration", "index.html")
        pages.append(page.save(folder / f"{made.target.name}.html", force=True))
        pages.append(Path(explore(made.net, folder / "explore" / f"{made.target.name}.html", force=True)))
    return saved, pages



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
#: Anchors and temperatures of the sweeps: from too few to all that rounding allows, from too hot to cold.
COUNTS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
#: Inverse temperatures of the sweep: from hot, where tables are ill-conditioned, to cold, where heads select.
KAPPAS = (0.05, 0.08, 0.12, 0.17, 0.25, 0.36, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 8.0, 14.0, 20.0)
NETWORK_HEADER = ("network for", "box", "asked", "certified", "measured", "layers", "heads", "anchors", "seconds")
NETWORK_NOTE = (
    "asked: the largest error allowed. certified: proved for every point of the box, in float32, rounding\n"
    "included. measured: the largest error seen on thousands of points. Attention and affine maps only."
)
HEADER = ("function", "interval", "anchors", "float64", "float32", "cold selection")
OTHER_HEADER = ("no anchors needed", "where", "float64", "float32")
NOTE = (
    "float64, float32: certified bounds of the largest error, rounding included; (relative): of the\n"
    "function's size. cold selection: the largest error measured when as many anchors are selected\n"
    "instead of interpolated between."
)


@dataclass(frozen=True)
class FittedCase:
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
class WithoutAnchors:
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

    networks: tuple[Compiled, ...]
    heads: tuple[FittedCase, ...]
    others: tuple[WithoutAnchors, ...]
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
class Shown:
    """Which networks are compiled and which heads are fitted."""

    targets: tuple[Exhibit, ...] = TARGETS
    cases: tuple[Case, ...] = CASES

    @classmethod
    def of(cls, names: Sequence[str]) -> Shown:
        """What has these names; all of it when there are none. There is always a head: the page begins with one."""
        if not names:
            return cls()
        targets = {target.name: target for target in TARGETS}
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


def run(choice: Shown, step: Step = lambda text: None) -> Results:
    """Compile every network and fit every head; `step` is told what comes next."""
    start = time.perf_counter()
    cases, compiled = choice.cases, compiled_networks(choice.targets, step)
    heads = []
    for case in cases:
        step(f"fitting {case.function}")
        heads.append(fitted(case))
    others = []
    for name, where, build in OTHERS:
        step(f"building {name}")
        others.append(WithoutAnchors(name, where, build(torch.float64), build(torch.float32)))
    step("sweeping temperatures")
    temperature = _temperature("sin", -6.3, 6.3, 32)
    step("sweeping anchors")
    panels = (temperature, _anchors("gelu", -8, 8))
    shapes = _shapes("sin", -6.3, 6.3, 12)
    return Results(compiled, tuple(heads), tuple(others), panels, shapes, time.perf_counter() - start)


def fitted(case: Case) -> FittedCase:
    """The heads of one case."""
    double, single = (
        AnchorHead.fit(
            case.function, case.lo, case.hi, anchors=case.anchors, dtype=dtype, relative=case.relative
        )
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    return FittedCase(case, double, single, cold_error(case, double.size))


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


def _swept(
    case: Case, knob: str, at: Sequence[float], cold: Sequence[tuple[float, float]], **fixed: Any
) -> list[Series]:
    """Certified bounds against one argument of the fit, in both dtypes, and the errors of cold selection."""
    found = []
    for name in ("float64", "float32"):
        options: dict[str, Any] = {"dtype": DTYPES[name], **fixed}
        fits = ((v, AnchorHead.fit(case.function, case.lo, case.hi, **{**options, knob: v}).bound) for v in at)
        found.append(swept(LABELS[name], name, [(v, bound) for v, bound in fits if bound is not None]))
    return [*found, swept(LABELS["cold"], "cold", cold)]


def _temperature(function: str, lo: float, hi: float, anchors: int) -> Panel:
    """Bounds against kappa; cold heads, whose values are the function at its anchors, from kappa = 1 on."""
    case = Case(function, lo, hi)
    cold = [(k, cold_error(case, anchors, k)) for k in KAPPAS if k >= 1]
    return Panel(
        f"{function}, {anchors} anchors", "inverse temperature κ", "largest error",
        _swept(case, "kappa", KAPPAS, cold, anchors=anchors), log_x=True, log_y=True,
        ticks=[(k, f"{k:g}") for k in (0.05, 0.2, 1, 5, 20)],
        marks=[Note(0.13, 2e-9, "warm heads\ninterpolate"), Note(7.0, 3e-4, "cold heads\nselect")],
    )  # fmt: skip


def _anchors(function: str, lo: float, hi: float) -> Panel:
    """Bounds against the number of anchors."""
    case = Case(function, lo, hi)
    series = _swept(case, "anchors", COUNTS, [(n, cold_error(case, n)) for n in COUNTS])
    ticks = [(n, str(n)) for n in (8, 16, 24, 32, 48, 64)]
    return Panel(f"{function}, best temperature", "anchors", "largest error", series, log_y=True, ticks=ticks)


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


def comparison(heads: tuple[FittedCase, ...]) -> Figure:
    """The figure that puts all cases next to each other."""
    return comparison_figure(
        [
            Comparison(h.case.function, (h.case.lo, h.case.hi), h.float64.bound or 0, h.float32.bound or 0, h.cold)
            for h in heads
        ]
    )


def write(results: Results, folder: Path, step: Step = lambda text: None) -> Written:
    """Save and check the networks, draw every figure, write the pages, one head and the numbers."""
    saved, pages = write_networks(results.networks, folder, step)
    charts = {"bounds": comparison(results.heads), "temperature": sweep_figure(results.panels, results.shapes)}
    drawn = [head for head in results.heads if head.case.drawn]
    charts |= {head.case.function: figure_of(head.float32) for head in drawn}
    relu = results.others[0].float32
    assert isinstance(relu, GateHead)
    charts["relu"] = figure_of(relu)
    files, pictures = [], {}
    for name, chart in charts.items():
        step(f"drawing {name}")
        pictures[name] = svg(chart)
        files += _images(folder / "figures" / name, pictures[name])
    files += [save(charts[name], folder / "figures" / f"{name}.png", force=True) for name in ("bounds", "temperature")]
    step("writing the page")
    page = demo_page(results, pictures).save(folder / "index.html", force=True)
    head = folder / f"{results.heads[0].case.function}.safetensors"
    results.heads[0].float32.save(head, force=True)
    numbers = folder / "numbers.json"
    write_whole(numbers, json.dumps(_numbers(results), indent=1, allow_nan=False) + "\n")
    return Written(page, tuple(pages), tuple(files), (*saved, head), numbers)


def _images(stem: Path, pair: ThemePair) -> list[Path]:
    """The two drawings of a figure as files."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}-dark.svg")]
    for file, text in zip(files, (pair.light, pair.dark), strict=True):
        write_whole(file, text)
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
    kinds = {label: kind for kind, label in LABELS.items()}
    sweeps = [
        {"title": p.title, "knob": p.x, "curves": {kinds[s.name]: list(zip(s.x, s.y, strict=True)) for s in p.series}}
        for p in results.panels
    ]
    made = [network.numbers for network in results.networks]
    return {"networks": made, "heads": heads, "others": others, "sweeps": sweeps}


FORMULA = """
<math display="block"><mrow>
<mi mathvariant="normal">head</mi><mo stretchy="false">(</mo><mi>y</mi><mo stretchy="false">)</mo><mo>=</mo><mfrac>
<mrow><munder><mo largeop="true">∑</mo><mi>k</mi></munder><msub><mi>V</mi><mi>k</mi></msub>
<msup><mi>e</mi><mrow><msub><mi>a</mi><mi>k</mi></msub><mi>y</mi><mo>+</mo><msub><mi>b</mi><mi>k</mi></msub></mrow></msup></mrow>
<mrow><munder><mo largeop="true">∑</mo><mi>k</mi></munder>
<msup><mi>e</mi><mrow><msub><mi>a</mi><mi>k</mi></msub><mi>y</mi><mo>+</mo><msub><mi>b</mi><mi>k</mi></msub></mrow></msup></mrow>
</mfrac></mrow></math>
"""


def demo_page(results: Results, pictures: Mapping[str, ThemePair]) -> Page:
    """The page, from the idea to the certificate; pictures of "bounds", "temperature", "relu" and every head drawn."""
    name, interval, anchors, double, single, cold = results.heads[0].cells
    file = f"{name.split()[0]}.safetensors"
    page = Page("Functions from softmax attention", "One head, a table of constants, and a proof of the largest error.")
    page.cards(
        [
            (f"{name}, float64", double, f"certified on {interval}, {anchors} anchors"),
            (f"{name}, float32", single, "certified, rounding included"),
            ("cold selection", cold, "measured, as many anchors"),
            ("computed in", f"{results.seconds:.1f} s", "everything on this page"),
        ]
    )
    if results.networks:
        page.section("Networks")
        page.text(
            "A formula, an MLP and a block of a transformer, compiled. Each has a page of its own, an explorer in "
            "which it runs, and a file beside them that `attnforge check` proves again."
        )
        page.links((made.target.title, f"{made.target.name}.html", made.note) for made in results.networks)
        explorers = [(f"Explore: {m.target.title}", f"explore/{m.target.name}.html") for m in results.networks]
        page.links((title, place, "runs in the page, from the stored weights") for title, place in explorers)
        _table(page, NETWORK_HEADER, results.networks, NETWORK_NOTE)
    page.section("The idea")
    page.text(
        "A softmax head with query `(y, 1)` and constant keys `(a, b)` computes a smooth function of `y`: the values "
        "`V` of its anchors, mixed with weights that move as `y` moves."
    )
    page.math(FORMULA, "One attention head over constant memory slots, as a function of the scalar it is asked about.")
    page.text(
        "Cold heads put all weight on the nearest anchor: a staircase. **Warm** heads mix many anchors, and if the "
        "values are solved for instead of read off the function, the mixture interpolates: the error falls "
        "geometrically with the number of anchors until the rounding of the arithmetic is all that is left."
    )
    page.figure(
        pictures["temperature"],
        "Left: the outputs of two heads with the same anchors, a cold one and a warm one, over the function (grey). "
        "Middle: the largest error against temperature. Right: against the number of anchors, at the best temperature. "
        "Bounds are certified; the errors of cold selection are only measured, so the comparison favours it.",
        "A staircase and a curve; two charts of the largest error, against temperature and against anchors.",
    )
    page.section("Bounds")
    page.figure(
        pictures["bounds"],
        "The functions below on one axis: the certified bound in float64 and float32, and cold selection.",
        "Dots on a logarithmic axis, one line for each function.",
    )
    _table(page, HEADER, results.heads, NOTE)
    drawn = [head for head in results.heads if head.case.drawn]
    if drawn:
        page.section("Head by head")
        page.text("What ships in float32, for some of them: anchors, values, the error under its bound, the weights.")
    for i, head in enumerate(drawn):
        row, function = head.cells, head.case.function
        block = page.details(f"{row[0]} on {row[1]}: {row[2]} anchors, at most {row[4]}", open=i == 0)
        block.figure(pictures[function], alt=f"Function, values, error and weights of the head for {function}.")
        block.code(str(head.float32.certificate), "The certificate, as print(head.certificate) shows it.")
    page.section("Kinks, products, norms")
    page.text(
        "A kink does not converge spectrally, and a product has two inputs. One slot for the token itself and a few "
        "constant slots build these directly, with an error near rounding. (Layer norm: of the row's largest output.)"
    )
    _table(page, OTHER_HEADER, results.others)
    page.figure(
        pictures["relu"],
        "relu from two slots: on its interval, and magnified around the kink, where the weights change over.",
        "The relu function, the weights of its two slots, and its error near 0.",
    )
    page.section("What is certified")
    page.text(
        "**Certified** means proved: for every number of the dtype in the interval, for the weights as stored, for any "
        "order of summation, with or without fused multiply-add, and for an exponential within 3 units of roundoff. "
        "Bounds are rounded up, also on this page.\n\n"
        "**Measured** is the largest error seen on a dense sample. It is not a bound. Outside the interval nothing is "
        "claimed, and a head says so; TF32, autocast and reduced-precision matrix products are refused.\n\n"
        f"`attnforge check {file}` recomputes the first head's certificate from the file that stands next to this page."
    )
    return page


def _table(
    page: Page, header: Sequence[str], rows: Sequence[Compiled | FittedCase | WithoutAnchors], note: str = ""
) -> None:
    """Rows of the page: two columns of words, the others numbers."""
    page.table(header, [row.cells for row in rows], note.replace("\n", " ") or None, "ll" + "r" * (len(header) - 2))
