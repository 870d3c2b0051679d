"""The page of a compiled network: what it computes, how it is built, what is certified and what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..box import Box
from ..certificates.certificate import upper_text
from ..charts.themes import Builder, Theme, new_figure, svg
from ..compiler.compiled import CompiledNetwork
from ..network import AttentionLayer
from .drawing import drawing
from .errors import Measured, Slice, measure, slices
from .html import Page
from .structure import Structure, structure
from .typeset import typeset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_TITLE = 70
LISTED = 12  # coordinates of a tensor's box that are worth a line each


def network_page(net: CompiledNetwork) -> Page:
    """All there is to say about a network, on one page; raises `CertificateError` where its certificate is stale."""
    certificate, size = net.certificate, net.size
    parts, found = structure(net), measure(net)
    bound = certificate.bound or 0.0
    page = Page(_title(certificate.target), f"An attention-only network with a certificate, {certificate.dtype}.")
    asked = f"asked for {net.eps:g}" + (f" + {net.rtol:g} of the target's size" if net.rtol else "")
    page.cards(
        [
            ("certified bound", upper_text(bound), f"on the whole box, {asked}"),
            ("largest error seen", f"{found.worst:.3g}", f"measured, on {found.count:,} points"),
            ("layers", size.layers, f"{size.heads} head{'' if size.heads == 1 else 's'}"),
            ("anchors", f"{size.anchors:,}", f"largest logit {size.largest_logit:.3g}"),
            ("parameters", f"{size.parameters:,}", certificate.dtype),
        ]
    )
    _target(page, net)
    page.section("The network")
    page.text(
        "Every box is a group of softmax heads; affine maps carry numbers from layer to layer along the lines. Nothing "
        "else is computed: `attnforge.purity` walks the exported graph and says so."
    )
    page.figure(
        drawing(parts, _inputs(net), _output(net)),
        "Left to right: the input, the layers, the output. Colours are families of heads; a box with a shadow stands "
        "for several heads.",
        "The network as columns of boxes, one for each operation, joined by lines.",
    )
    _layers(page, net, parts)
    _certificate(page, net, parts, bound)
    page.section("Errors")
    along = slices(net, found)
    if along:
        page.figure(
            svg(slices_figure(along, bound)),
            "The error along one coordinate at a time, the others at the centre of the box, and at the worst point seen"
            f"{_left_out(net, along)}. The dashed line is the certified bound.",
            "Curves of the error on logarithmic axes, all below the line of the bound.",
        )
    page.figure(
        svg(histogram_figure(found, bound)),
        f"The errors at {found.count:,} points: random ones, corners and edges of the box. Measured, not certified.",
        "A histogram of errors, all of it left of the line of the bound.",
    )
    return page


def _left_out(net: CompiledNetwork, along: list[Slice]) -> str:
    drawn, all_ = len({s.label for s in along}), net.program.box.dim
    return f"; {drawn} of {all_} coordinates are shown" if drawn < all_ else ""


def _title(target: str) -> str:
    return target if len(target) <= LONGEST_TITLE else target[: LONGEST_TITLE - 1] + "…"


def _target(page: Page, net: CompiledNetwork) -> None:
    """The formula and the box."""
    page.section("What it computes")
    source = net.program.source
    markup = typeset(source) if net.box.names else None
    if markup is not None:
        page.math(markup)
    elif net.box.names or len(source) > LONGEST_TITLE:
        page.code(source)
    rows = [row for number, box in enumerate(net.boxes) for row in _box_rows(box, number, len(net.boxes))]
    page.table(["input", "from", "to"], rows, "The box: outside of it nothing is claimed.", "lrr")


def _box_rows(box: Box, number: int, count: int) -> list[tuple[str, str, str]]:
    stem = "x" if count == 1 else f"input {number + 1}, x"
    names = box.names or [f"{stem}{list(map(int, np.unravel_index(i, box.shape)))}" for i in range(box.dim)]
    intervals = [(f"{low:.10g}", f"{high:.10g}") for low, high in box.intervals()]
    if box.names is None and (len(set(intervals)) == 1 or box.dim > LISTED):
        low, high = min(i[0] for i in box.intervals()), max(i[1] for i in box.intervals())
        shape = " × ".join(map(str, box.shape))
        return [(f"every entry of a tensor of shape {shape}", f"{low:.10g}", f"{high:.10g}")]
    return [(name, *interval) for name, interval in zip(names, intervals, strict=True)]


def _inputs(net: CompiledNetwork) -> tuple[str, ...]:
    """Labels for the boxes of the input."""
    box = net.program.box
    if box.names:
        return tuple(f"{n}\nfrom {lo:g} to {hi:g}" for n, (lo, hi) in zip(box.names, box.intervals(), strict=True))
    tokens, width = net.program.tokens, net.program.ops[0].width
    return (f"{width} channels\n{f'for each of {tokens} tokens' if tokens > 1 else 'of one vector'}",)


def _output(net: CompiledNetwork) -> str:
    shape = net.program.output_shape
    return "output\n" + (f"of shape {' × '.join(map(str, shape))}" if shape else "one number")


def _layers(page: Page, net: CompiledNetwork, parts: Structure) -> None:
    header = ["layer", "computes", "by", "heads", "anchors", "of arguments in", "temperature", "error"]
    rows = []
    for unit in parts.units:
        by = unit.family if unit.operation == unit.family else f"{unit.family}: {unit.operation}"
        rows.append(
            (unit.layer, unit.name, by, unit.heads, unit.anchors or None, unit.interval or None,
             unit.temperature or None, upper_text(unit.error))
        )  # fmt: skip
    if rows:
        page.table(header, rows, "What each group of heads computes; error: what it adds itself.", "rllrrllr")
    fold = page.details("Sizes of the layers, and the program")
    sizes = []
    for index, step in enumerate(net.layout.steps):
        layers = [net.network.layers[2 * index], net.network.layers[2 * index + 1]]
        groups = [g for layer in layers if isinstance(layer, AttentionLayer) for g in layer.heads()]
        count = sum(p.numel() for layer in layers for p in layer.parameters())
        heads, slots = sum(g.heads for g in groups), sum(g.slots for g in groups)
        sizes.append((index + 1, len(step.before), len(step.after), heads, slots, count))
    fold.table(["layer", "columns in", "columns out", "heads", "memory slots", "parameters"], sizes)
    fold.code(str(net.program), "The program: what the compiler made of the target.")


def _certificate(page: Page, net: CompiledNetwork, parts: Structure, bound: float) -> None:
    certificate = net.certificate
    page.section("The certificate")
    page.text(
        "For every point of the box, in the dtype that ships, for any order of summation, the network differs from its "
        f"target by at most **{upper_text(bound, 4)}**. The table says where that comes from, at the place of the box "
        "where it is largest: its lines add up to the bound."
    )
    by_site: dict[str, dict[str, float]] = {}
    for term in certificate.terms:
        sources = by_site.setdefault(term.site, {})
        sources[term.source] = sources.get(term.source, 0.0) + term.value
    rows: list[tuple[str, ...]] = []
    for site, sources in by_site.items():
        other = sum(v for k, v in sources.items() if k != "rounding")
        together = sum(sources.values())
        share = f"{together / bound:.1%}" if bound else "–"
        rows.append((site, *(upper_text(v, 4) for v in (other, sources.get("rounding", 0.0), together)), share))
    rows.append(("bound", "", "", upper_text(bound, 4), "100.0%" if bound else "–"))
    page.table(["site", "approximation", "rounding", "together", "share"], rows, None, "lrrrr")
    fold = page.details("What is assumed, and by which lemmas")
    fold.text("\n\n".join(certificate.assumptions))
    fold.text(f"By {', '.join(certificate.lemmas)} of the theory. Hash of the weights: `{certificate.weights}`")
    page.text("`attnforge check FILE` computes the certificate again from the saved file, trusting nothing in it.")


def slices_figure(along: list[Slice], bound: float) -> Builder:
    """A panel for each coordinate: the error on two lines through the box, below the bound."""
    labels = list(dict.fromkeys(s.label for s in along))

    def build(theme: Theme) -> Figure:
        columns = min(3, len(labels))
        rows = -(-len(labels) // columns)
        figure = new_figure(10, 0.5 + 2.7 * rows)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        floor = _floor(bound, max(float(s.error.max()) for s in along))
        for axes, label in zip(grid.flat, labels, strict=False):
            for s in (s for s in along if s.label == label):
                worst = s.through != "the centre"
                colour = theme.anchor if worst else theme.target
                axes.plot(s.x, np.maximum(s.error, floor), color=colour, lw=1.1, label=f"through {s.through}")
            axes.set_xlabel(label)
            _error_axis(axes, bound, floor, theme)
            own = next(s for s in along if s.label == label)
            axes.set_xlim(own.x[0], own.x[-1])
        for axes in grid.flat[len(labels) :]:
            axes.set_axis_off()
        for row in grid:
            row[0].set_ylabel("error")
        handles, names = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=3)
        return figure

    return build


def histogram_figure(found: Measured, bound: float) -> Builder:
    """How often errors of each size were seen, and where the bound is."""

    def build(theme: Theme) -> Figure:
        figure = new_figure(10, 3.0)
        axes = figure.subplots()
        floor = _floor(bound, found.worst)
        shown = np.maximum(found.errors, floor)
        top = max(bound, found.worst, floor * 10) * 2
        bins = np.geomspace(floor, top, 60)
        counts, _ = np.histogram(shown, bins)
        axes.stairs(counts, bins, fill=True, color=theme.output, alpha=0.75)
        axes.set_ylim(0, 1.25 * float(counts.max()))
        axes.set_xscale("log")
        axes.set_xlim(floor, top)
        axes.set_xlabel("error (the smallest ones are counted at the left end)")
        axes.set_ylabel("points")
        if bound > floor:
            axes.axvline(bound, color=theme.bound, lw=1.6, ls=(0, (5, 2.5)))
            axes.annotate(
                f"certified bound {upper_text(bound)} ", (bound, 0.91), xycoords=("data", "axes fraction"), ha="right",
                color=theme.bound, fontweight="bold",
            )  # fmt: skip
        return figure

    return build


def _floor(bound: float, worst: float) -> float:
    """Where a logarithmic axis of errors begins."""
    return max(bound, worst, 1e-16) * 1e-4


def _error_axis(axes: Axes, bound: float, floor: float, theme: Theme) -> None:
    axes.set_ylim(floor, max(bound, 10 * floor) * 4)  # before the scale, which warns about limits that coincide
    axes.set_yscale("log")
    axes.axhline(max(bound, floor), color=theme.bound, lw=1.6, ls=(0, (5, 2.5)), label=f"bound {upper_text(bound)}")
