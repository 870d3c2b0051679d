"""The page of a compiled network: what it computes, how it is built, what is certified and what was measured.

Its parts are drawn as boxes, the input on the left, a column for each layer, the output on the right. Its error is
looked for at random points, corners, edges and along slices of the box.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..box import Box
from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..charts.chart import Figure, Level, Panel, Series, error_range
from ..charts.themes import DARK, LIGHT, Theme, ThemePair
from ..compiler.compiled import CompiledNetwork
from ..dtypes import Array
from ..heads.families import FAMILIES
from ..network import AttentionLayer
from ..programs.interpret import values
from ..progress import shown
from .html import Page
from .mathml import typeset
from .structure import LONGEST_TITLE, MEANING, Structure, Unit, structure, title

LISTED = 12  # coordinates of a tensor's box that are worth a line each
POINTS = 20_000  # where errors are looked for: a second of work for a small network
AT_ONCE = 4096  # points that are evaluated together, so that large networks keep to little memory
SLICE = 1201  # points of a slice: one for each pixel of its panel, and more
NAMED, ENTRIES = 9, 2  # coordinates with a slice: variables of a formula, entries of a tensor
FULL = (3, 4, 6, 8, 9)  # numbers of panels that fill rows of two or three
BINS = 60  # of the histogram of errors: a dozen for each power of ten

# The drawing, in pixels: a box and the distance to the next, the room above all and around them.
WIDE, TALL, BESIDE, BELOW = 184.0, 50.0, 58.0, 16.0
TOP, EDGE = 44.0, 10.0
MOST = 14  # boxes in a column, as many as a screen holds; the rest is counted
LETTER = 7.7  # width of a letter of the larger type, roughly
FONT = "font-family=\"system-ui, 'Segoe UI', 'Noto Sans', 'Liberation Sans', 'DejaVu Sans', sans-serif\""
CENTRE, DIAGONAL = "the centre", "from the lowest corner (0) to the highest (1)"


@shown("drawing")
def network_page(net: CompiledNetwork) -> Page:
    """All there is to say about a network, on one page; raises `CertificateError` where its certificate is stale."""
    certificate, size = net.certificate, net.size
    parts, found = structure(net), measure(net)
    bound = certificate.bound or 0.0
    page = Page(title(net), f"An attention-only network with a certificate, {certificate.dtype}.")
    asked = f"asked for {net.eps:g}" + (f" + {net.rtol:g} of the target's size" if net.rtol else "")
    page.cards(
        [
            (f"{certificate.word} bound", upper_text(bound), f"on the whole box, {asked}"),
            ("largest error seen", f"{found.worst:.3g}", f"measured, on {found.count:,} points"),
            ("layers", size.layers, f"{size.heads} head{'' if size.heads == 1 else 's'}"),
            ("anchors", f"{size.anchors:,}", f"largest logit {size.largest_logit:.3g}"),
            ("parameters", f"{size.parameters:,}", certificate.dtype),
        ]
    )
    _target(page, net)
    along = slices(net, found)
    if along:
        page.section("Function and network")
        chart = slices_figure(along, bound)
        page.figure(chart, chart.caption.removesuffix(".") + f"{_left_out(net, along)}.")
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
    page.figure(histogram_figure(found, bound))
    return page


def _left_out(net: CompiledNetwork, along: list[Slice]) -> str:
    drawn, all_ = len({s.label for s in along} - {DIAGONAL}), net.program.box.dim
    return f"; {drawn} of {all_} coordinates are shown" if drawn < all_ else ""


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
        page.table(header, rows, "What each group of heads computes; error: what it adds itself, at most.", "rllrrllr")
        said = " ".join(unit.temperature for unit in parts.units)
        page.text("\n\n".join(f"`{word}`: {meaning}." for word, meaning in MEANING.items() if word in said))
    fold = page.details("Sizes of the layers, and the program")
    sizes = []
    for index, step in enumerate(net.layout.steps):
        layers = [net.network.layers[2 * index], net.network.layers[2 * index + 1]]
        groups = [g for layer in layers if isinstance(layer, AttentionLayer) for g in layer.heads()]
        count = sum(p.numel() for layer in layers for p in layer.parameters())
        heads, slots = sum(g.heads for g in groups), sum(g.slots for g in groups)
        sizes.append((index + 1, len(step.before), len(step.after), heads, slots, count))
    fold.table(["layer", "columns in", "columns out", "heads", "memory slots", "parameters"], sizes)
    fold.code(str(net.program), "The program: what the compiler made of the target. %5 is the result of its line 5.")


def _certificate(page: Page, net: CompiledNetwork, parts: Structure, bound: float) -> None:
    certificate = net.certificate
    page.section("The certificate")
    page.text(
        "For every point of the box, in the dtype that ships, for any order of summation, the network differs from its "
        f"target by at most **{upper_text(bound, 4)}**. The table says where that comes from, at the place of the box "
        "where it is largest: its lines add up to the bound. A site such as `%5` is a line of the program above and "
        "the heads that carry it out."
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


def slices_figure(along: list[Slice], bound: float) -> Figure:
    """For each line through the box the function beside the network, and below it the error under the bound."""
    labels = list(dict.fromkeys(s.label for s in along))
    floor, top = error_range(max(float(s.error.max()) for s in along), bound)
    columns = len(labels) if len(labels) <= 3 else 2 if len(labels) % 3 else 3
    panels: list[Panel] = []
    for start in range(0, len(labels), columns):
        lines = [[s for s in along if s.label == label] for label in labels[start : start + columns]]
        panels += [_both(own[0]) for own in lines]
        panels += [_errors(own, floor, top, bound, own is lines[0]) for own in lines]
    return Figure(
        "slices",
        "Along lines through the box: function and network on top of each other, through the centre; below, their "
        "difference, also through the worst point seen. The dashed line is the certified bound.",
        panels,
        "Curves of function and network, and of the error on logarithmic axes, all below the line of the bound.",
        columns=(1,) * columns,
        heights=(2.3, 2.6) * -(-len(labels) // columns),
    )


def _both(line: Slice) -> Panel:
    series = [Series("function", line.x, line.target, style="broad", role="target"),
              Series("network", line.x, line.output, role="output")]  # fmt: skip
    return Panel("", "", "output", series, x_range=(float(line.x[0]), float(line.x[-1])))


def _errors(own: list[Slice], floor: float, top: float, bound: float, first: bool) -> Panel:
    series = [Series(f"error through {s.through}", s.x, np.maximum(s.error, floor),
                     role="target" if s.through == CENTRE else "anchor") for s in own]  # fmt: skip
    level = Level(max(bound, floor), f"bound {upper_text(bound)}", named=True)
    return Panel(
        "", own[0].label, "error" if first else "", series, log_y=True, marks=[level],
        x_range=(float(own[0].x[0]), float(own[0].x[-1])), y_range=(floor, top / 3),
    )  # fmt: skip


def histogram_figure(found: SampledErrors, bound: float) -> Figure:
    """How often errors of each size were seen, and where the bound is."""
    floor, top = error_range(found.worst, bound)
    edges = np.geomspace(floor, top / 6, BINS)
    counts, _ = np.histogram(np.maximum(found.errors, floor), edges)
    series = Series("", edges, [*counts, 0], style="steps", role="output")
    levels = [Level(bound, f"certified bound {upper_text(bound)}", axis="x")] if bound > floor else []
    panel = Panel(
        "", "error (the smallest ones are counted at the left end)", "points", [series], log_x=True, marks=levels,
        x_range=(float(edges[0]), float(edges[-1])), y_range=(0, 1.25 * float(counts.max())),
    )  # fmt: skip
    return Figure(
        "histogram",
        f"The errors at {found.count:,} points: random ones, corners and edges of the box. Measured, not certified.",
        (panel,),
        "A histogram of errors, all of it left of the line of the bound.",
        columns=(1,),
        heights=(3.0,),
    )


@dataclass(frozen=True, eq=False)
class SampledErrors:
    """Errors at points of the box, the largest over all outputs at each, and where the worst of them was."""

    errors: Array
    point: Array
    target: tuple[float, float]

    @property
    def count(self) -> int:
        """How many points were looked at."""
        return len(self.errors)

    @property
    def worst(self) -> float:
        """The largest error seen: a measurement, not a bound."""
        return float(self.errors.max())


@dataclass(frozen=True, eq=False)
class Slice:
    """Target, network and error along a line through a point of the box: of the output that errs most."""

    label: str
    through: str
    x: Array
    target: Array
    output: Array
    error: Array


@torch.no_grad()
def evaluate(net: CompiledNetwork, points: Tensor, runs: CertifiedModule | None = None) -> tuple[Array, Array]:
    """Target and network at points of the program's box, each flattened to (point, output); another form of the network
    may run in its place."""
    program = net.program
    outputs, truths = [], []
    for some in points.to(net.dtype).split(AT_ONCE):
        inputs, start, flat = [], 0, some.reshape(len(some), -1)
        for box in net.boxes:
            inputs.append(flat[:, start : start + box.dim].reshape(-1, *box.shape))
            start += box.dim
        outputs.append((runs or net).core(*inputs).double().reshape(len(some), -1))
        truths.append(values(program, some.double()).reshape(len(some), -1))
    return torch.cat(truths).numpy(), torch.cat(outputs).numpy()


def measure(
    net: CompiledNetwork, count: int = POINTS, seed: int = 0, runs: CertifiedModule | None = None
) -> SampledErrors:
    """The errors at random points, at corners and on edges of the box."""
    box = net.program.box
    random = box.sample(count, seed, net.dtype)
    corners = box.corners(min(count // 10, 1024), net.dtype)
    edges = box.sample(count // 10, seed + 1, net.dtype)
    wide, rows = box.outward(net.dtype), torch.arange(len(edges))
    generator = torch.Generator().manual_seed(seed)
    flat = edges.reshape(len(edges), -1)
    at = torch.randint(box.dim, (len(edges),), generator=generator)
    side = torch.randint(2, (len(edges),), generator=generator).bool()
    ends = torch.where(side, wide.upper.reshape(-1)[at], wide.lower.reshape(-1)[at])
    flat[rows, at] = ends.to(net.dtype)
    points = torch.cat([random, corners, edges])
    target, output = evaluate(net, points, runs)
    worst = np.abs(output - target).max(-1)
    point = points[int(worst.argmax())].double().numpy().reshape(-1)
    return SampledErrors(worst, point, (float(target.min()), float(target.max())))


def slices(net: CompiledNetwork, measured: SampledErrors, runs: CertifiedModule | None = None) -> list[Slice]:
    """Function, network and error along coordinates of the box, through its centre and the worst point seen; and from
    its lowest corner to its highest.

    Variables of a formula are worth a look each, the entries of a tensor are much alike: a few of them will do.
    """
    box = net.program.box
    most = NAMED if box.names else ENTRIES
    low, high = (side.numpy().reshape(-1) for side in (box.lower, box.upper))
    centre = 0.5 * (low + high)
    places = (np.unravel_index(i, box.shape) for i in range(box.dim))
    names = box.names or tuple(f"x[{', '.join(str(int(p)) for p in place)}]" for place in places)
    wide = box.outward(net.dtype)
    live = [i for i in range(box.dim) if high[i] > low[i]]
    places_of = {"the worst point": measured.point, CENTRE: centre}
    t = np.linspace(0.0, 1.0, SLICE)
    lines: list[tuple[str, str, Array, Array]] = []
    for i in live[:most]:
        for through in (CENTRE, "the worst point"):
            rows = np.tile(places_of[through], (SLICE, 1))
            rows[:, i] = np.linspace(low[i], high[i], SLICE)
            lines.append((names[i], through, rows[:, i], rows))
    if len(live) > 1 and len(live[:most]) + 1 in FULL:
        lines.append((DIAGONAL, CENTRE, t, low + t[:, None] * (high - low)))
    found = []
    for label, through, x, rows in lines:
        points = torch.from_numpy(rows).reshape(-1, *box.shape)
        target, output = evaluate(net, torch.minimum(torch.maximum(points, wide.lower), wide.upper), runs)
        error = np.abs(output - target)
        worst = int(error.max(0).argmax())
        found.append(Slice(label, through, x, target[:, worst], output[:, worst], error.max(-1)))
    return found


@dataclass(frozen=True)
class DrawnBox:
    """A box of the drawing: where it stands, what it says, and whether several heads stand behind it."""

    x: float
    y: float
    title: str
    note: str
    colour: str | None
    many: bool = False
    hint: str = ""


def drawing(parts: Structure, inputs: tuple[str, ...], output: str) -> ThemePair:
    """The drawing for light and for dark pages. `inputs` are labels of the input's channels, or one label for all."""
    return ThemePair(_draw(parts, inputs, output, LIGHT), _draw(parts, inputs, output, DARK))


def family_colour(family: str, theme: Theme) -> str:
    """The colour that boxes of a family have."""
    return theme.cycle[list(FAMILIES).index(family) % 6] if family in FAMILIES else theme.soft


def _draw(parts: Structure, inputs: tuple[str, ...], output: str, theme: Theme) -> str:
    columns: list[list[Unit | str]] = [list(inputs[:MOST])]
    hidden: dict[int, int] = {}
    for number in range(1, parts.layers + 1):
        units = parts.layer(number)
        shown: list[Unit | str] = list(units[:MOST])
        if len(units) > MOST:
            shown[-1] = f"and {len(units) - MOST + 1} more"
            hidden |= {unit.number: number for unit in units[MOST - 1 :]}
        columns.append(shown)
    columns.append([output])
    height = TOP + max(len(c) for c in columns) * (TALL + BELOW) + EDGE
    nodes: dict[object, DrawnBox] = {}
    for i, column in enumerate(columns):
        x = EDGE + i * (WIDE + BESIDE)
        start = TOP + 0.5 * (height - TOP - EDGE - len(column) * (TALL + BELOW))
        for j, entry in enumerate(column):
            y = start + j * (TALL + BELOW)
            nodes[_key(i, j, entry)] = _node(x, y, entry, i in (0, len(columns) - 1), theme)
    width = EDGE * 2 + len(columns) * WIDE + (len(columns) - 1) * BESIDE
    edges = _edges(parts, len(inputs), hidden, len(columns), nodes)
    body = [_heading(i, len(columns), theme) for i in range(len(columns))]
    body += [_edge(nodes[a], nodes[b], theme) for a, b in dict.fromkeys(edges) if a in nodes and b in nodes]
    body += [_box(node, theme) for node in nodes.values()]
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>{"".join(body)}</svg>'


def _key(column: int, row: int, entry: Unit | str) -> object:
    return entry.number if isinstance(entry, Unit) else (column, row)


def _node(x: float, y: float, entry: Unit | str, end: bool, theme: Theme) -> DrawnBox:
    if isinstance(entry, str):
        title, _, note = entry.partition("\n")
        return DrawnBox(x, y, title, note, theme.soft if end else None)
    heads = f"{entry.heads} head{'s' if entry.heads > 1 else ''}"
    note = f"{entry.family}, {f'{entry.anchors} anchors' if entry.anchors else heads}"
    if entry.anchors and entry.heads > 1:
        note = f"{heads}, {entry.anchors} anchors"
    title = entry.name.partition(": ")[0]  # a module's operations are named with their source line
    return DrawnBox(x, y, title, note, family_colour(entry.family, theme), entry.heads > 1, entry.name)


def _edges(
    parts: Structure, channels: int, hidden: dict[int, int], columns: int, nodes: dict[object, DrawnBox]
) -> list[tuple[object, object]]:
    """Pairs of boxes, from and to."""

    def place(number: int) -> object:
        return (hidden[number], MOST - 1) if number in hidden else number

    def channel(c: int) -> object:
        return (0, min(c, channels - 1, MOST - 1))

    found: list[tuple[object, object]] = []
    for unit in parts.units:
        found += [(place(n), place(unit.number)) for n in unit.reads]
        found += [(channel(c), place(unit.number)) for c in unit.inputs]
    end: object = (columns - 1, 0)
    found += [(place(n), end) for n in parts.output] + [(channel(c), end) for c in parts.direct]
    return found


def _heading(i: int, columns: int, theme: Theme) -> str:
    text = "input" if i == 0 else "output" if i == columns - 1 else f"layer {i}"
    x = EDGE + i * (WIDE + BESIDE) + WIDE / 2
    return f'<text x="{x:.0f}" y="24" text-anchor="middle" font-size="13" fill="{theme.soft}">{text}</text>'


def _edge(a: DrawnBox, b: DrawnBox, theme: Theme) -> str:
    x0, y0, x1, y1 = a.x + WIDE, a.y + TALL / 2, b.x, b.y + TALL / 2
    bend = max(0.5 * (x1 - x0), 30)
    # A line that passes a layer would run behind its boxes unseen: it goes over them.
    over = TALL if x1 - x0 > WIDE and abs(y1 - y0) < TALL else 0.0
    bend = 0.3 * (x1 - x0) if over else bend
    path = f"M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0 - over:.1f} {x1 - bend:.1f} {y1 - over:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="{theme.soft}" stroke-opacity="0.5" stroke-width="1.4"/>'


def _box(node: DrawnBox, theme: Theme) -> str:
    x, y = node.x, node.y
    frame = f'rx="9" fill="{theme.surface}" stroke="{node.colour or theme.grid}" stroke-width="1.4"'
    parts = []
    if node.many:
        parts.append(f'<rect x="{x + 4:.1f}" y="{y - 4:.1f}" width="{WIDE}" height="{TALL}" {frame} opacity="0.55"/>')
    parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{WIDE}" height="{TALL}" {frame}/>')
    if node.hint:
        bar = f"M{x + 9:.1f} {y:.1f}h-1a8 8 0 0 0 -8 8v{TALL - 16}a8 8 0 0 0 8 8h1z"
        parts.append(f'<path d="{bar}" fill="{node.colour}"/>')
    middle = y + (22 if node.note else 30)
    title = _cut(node.title, (WIDE - 26) / LETTER)
    parts.append(
        f'<text x="{x + 18:.1f}" y="{middle:.1f}" font-size="13" font-weight="600" fill="{theme.ink}">{title}</text>'
    )
    if node.note:
        note = _cut(node.note, (WIDE - 26) / (0.87 * LETTER))
        parts.append(f'<text x="{x + 18:.1f}" y="{y + 39:.1f}" font-size="11.5" fill="{theme.soft}">{note}</text>')
    if node.hint:
        parts.append(f"<title>{html.escape(node.hint)}</title>")
    return f"<g>{''.join(parts)}</g>"


def _cut(text: str, room: float) -> str:
    """The text, cut in the middle where there is no room for all of it."""
    most = int(room)
    if len(text) > most:
        half = (most - 1) // 2
        text = f"{text[: most - 1 - half]}…{text[-half:]}"
    return html.escape(text)
