"""The page of a conversion: what was replaced, where it holds, what is certified of it and what was measured.

*Certified* and *measured* stand in sections of their own: a proof about each site is no proof about the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..certificates.certificate import upper_text
from ..charts.themes import Builder, Theme, new_figure, svg
from ..report.html import Page
from .record import Conversion, Site

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = 80  # sites in a figure; the tables hold all of them
LONGEST_LABEL = 44
FAMILIES = {"fast": "anchor heads, one exponential"}
SLOTS = {"gate": "slots", "product": "nodes", "norm": "heads"}
COLOURS = {"anchor": 0, "gate": 2, "fast": 5, "product": 1, "norm": 4}  # of the theme's cycle
TICKS = (*(-(10.0**k) for k in range(6, -1, -1)), 0.0, *(10.0**k for k in range(7)))
AXES = {
    "input": "values that enter the site",
    "variance": "variance of a row",
    "mean square": "mean square of a row",
}
LEVELS = {
    "ffn": "activation functions are attention over anchors, everything else is as it was",
    "pure": "softmax attention is the only nonlinear operation left",
}


def write(conversion: Conversion, path: str | Path) -> Path:
    """Writes the page and returns its path."""
    return page(conversion).save(path)


def page(conversion: Conversion) -> Page:
    """All there is to say about a conversion, on one page."""
    left = "" if conversion.level == "ffn" or not conversion.left else "; what was left is listed below"
    found = Page(f"{conversion.model}, converted", f"Level {conversion.level}: {LEVELS[conversion.level]}{left}.")
    found.cards(_cards(conversion))
    found.text(
        "Two words on this page are never mixed. **Certified** speaks of one site: the largest distance between its "
        "heads and the function they replace, on the range they cover, proved, rounding included. **Measured** speaks "
        "of the whole model: how far its outputs moved on data that the conversion did not look at. It is no bound."
    )
    _certified(found, conversion)
    _ranges(found, conversion)
    _measured(found, conversion)
    _purity(found, conversion)
    _left(found, conversion)
    return found


def _cards(conversion: Conversion) -> list[tuple[str, object, str]]:
    families = ", ".join(f"{n} {name}" for name, n in conversion.by_family.items())
    before, added = conversion.parameters_before, conversion.added
    moved = "–" if conversion.change is None else f"{conversion.change:.2g}"
    where = "no data was given" if conversion.change is None else _batches(conversion.held_out, "held out")
    return [
        ("certified per site", upper_text(conversion.worst), f"of the output's scale, asked for {conversion.eps:g}"),
        ("measured end to end", moved, f"largest change of an output, {where}"),
        ("sites", len(conversion.sites), families),
        ("anchors", conversion.most_anchors, "in the largest table"),
        ("parameters", f"+{added:,}", f"{100 * added / max(1, before):+.3f} % of {before:,}, {conversion.dtype}"),
    ]


def _batches(count: int, word: str) -> str:
    return f"{count} batch{'' if count == 1 else 'es'} {word}"


def _certified(found: Page, conversion: Conversion) -> None:
    found.section("Certified, site by site")
    if not conversion.sites:
        found.text("No site was converted.")
        return
    header = ["site", "operation", "heads", "anchors", "kappa", "numbers", "error at most", "of scale"]
    rows = [
        (site.path, site.operation, site.family, site.anchors or None,
         None if site.kappa is None else f"{site.kappa:.3g}", site.parameters, upper_text(site.bound),
         upper_text(site.relative))
        for site in conversion.sites
    ]  # fmt: skip
    found.figure(
        svg(bounds_figure(conversion)),
        "The certified error of each site, as a part of its output's scale. The dashed line is what was asked for"
        f"{_left_out(conversion.sites)}.",
        "Dots on a logarithmic axis, one line for each site.",
    )
    found.table(
        header,
        rows,
        "What stands at each site now; numbers: what the heads add to the model. Bounds are rounded up, also here.",
        "lllrrrrr",
    )
    shared = [site for site in conversion.sites if site.aliases]
    if shared:
        alike = [(site.path, ", ".join(site.aliases), site.calls) for site in shared]
        found.details("Shared modules").table(["site", "also at", "calls in a pass"], alike)


def _ranges(found: Page, conversion: Conversion) -> None:
    if not conversion.sites:
        return
    found.section("Ranges")
    found.text(
        "Calibration saw the solid part of each bar; the heads cover the pale part too, and the certificate holds on "
        "all of it. Real data go further than a handful of calibration texts, so ranges are widened generously. Sites "
        "with an arrow go on as their function does, on the whole line. Beyond the range of the others nothing is "
        "claimed: values there are counted, and the first of them are warned about."
    )
    found.figure(
        svg(ranges_figure(conversion.sites)),
        f"Range seen and range covered, by what the range is of{_left_out(conversion.sites)}.",
        "Horizontal bars, one for each site: a solid part inside a pale one.",
    )
    rows = [
        (site.path, site.ranged, *_ends(site.low_seen, site.high_seen), *_ends(site.low, site.high), f"{site.margin:g}",
         "right everywhere" if site.everywhere else "counted and told")
        for site in conversion.sites
    ]
    header = ["site", "range of", "seen from", "to", "covered from", "to", "margin", "beyond"]
    found.details("The numbers").table(header, rows, align="llrrrrrl")


def _ends(low: float | None, high: float | None) -> tuple[str, str]:
    if low is None or high is None:
        return "–", "–"
    return f"{low:.4g}", f"{high:.4g}"


def _measured(found: Page, conversion: Conversion) -> None:
    found.section("Measured, end to end")
    if conversion.change is None:
        found.text("Nothing was measured: the conversion was given no data.")
    else:
        size = "" if conversion.output is None else f"; the largest output there is {conversion.output:.3g}"
        found.text(
            f"On {_batches(conversion.held_out, 'held out')} no output moved by more than **{conversion.change:.3g}**"
            f"{size}. {_batches(conversion.batches, 'set the ranges').capitalize()}. "
            "Errors of the sites meet and grow on their way through the layers: what they come to was observed, "
            "not proved."
        )
    found.table(
        ["parameters before", "after", "added", "conversion"],
        [(f"{conversion.parameters_before:,}", f"{conversion.parameters_after:,}", f"{conversion.added:,}",
          f"{conversion.seconds:.1f} s")],
        align="rrrr",
    )  # fmt: skip
    for note in conversion.notes:
        found.text(f"{note[:1].upper()}{note[1:]}.")


def _purity(found: Page, conversion: Conversion) -> None:
    if not conversion.census:
        return
    found.section("What is left of the graph")
    found.text(
        "The converted model was exported and every operation of its graph looked at. Softmax attention is the only "
        "one that is not affine in the data; look-ups and masks depend on integer inputs alone."
    )
    rows = [(name, count) for name, count in conversion.census.items() if count]
    found.table(["category", "operations"], [*rows, ("all", sum(conversion.census.values()))], align="lr")


def _left(found: Page, conversion: Conversion) -> None:
    if not conversion.left:
        return
    found.section("Left as it was")
    rows = [(left.path, left.operation, left.reason) for left in conversion.left]
    found.table(["module", "operation", "why"], rows)


def _left_out(sites: Sequence[Site]) -> str:
    return f"; the first {DRAWN} of {len(sites)} are drawn" if len(sites) > DRAWN else ""


def _label(path: str) -> str:
    """A path that fits beside a figure: its end tells more than its middle."""
    path = path or "the model itself"
    return path if len(path) <= LONGEST_LABEL else "…" + path[-(LONGEST_LABEL - 1) :]


def bounds_figure(conversion: Conversion) -> Builder:
    """The certified relative bound of every site on one logarithmic axis, and what was asked for."""
    sites = conversion.sites[:DRAWN]

    def build(theme: Theme) -> Figure:
        figure = new_figure(10, 1.0 + 0.24 * len(sites))
        axes = figure.subplots()
        least = min(site.relative for site in sites)
        axes.set_xscale("log")
        axes.set_xlim(min(least, conversion.eps) / 4, max(conversion.eps, conversion.worst) * 4)
        for name in conversion.by_family:
            chosen = [(site.relative, i) for i, site in enumerate(sites) if site.family == name]
            if chosen:
                x, y = zip(*chosen, strict=True)
                words = FAMILIES.get(name, f"{name} heads")
                axes.plot(x, y, "o", ms=5.5, color=theme.cycle[COLOURS[name]], label=words)
        words = f"asked for {conversion.eps:g}"
        axes.axvline(conversion.eps, label=words, color=theme.bound, lw=1.6, ls=(0, (5, 2.5)))
        axes.set_xlabel("certified error of a site, of its output's scale")
        _rows(axes, sites)
        figure.legend(loc="outside upper left", ncols=5)
        return figure

    return build


def ranges_figure(sites: Sequence[Site]) -> Builder:
    """Bars for the range covered and, inside, the range seen; a panel for each thing that ranges are of."""
    drawn = sites[:DRAWN]
    names = dict.fromkeys(site.ranged for site in drawn)
    groups = [(name, [site for site in drawn if site.ranged == name]) for name in names]

    def build(theme: Theme) -> Figure:
        heights = [0.9 + 0.24 * len(group) for _, group in groups]
        figure = new_figure(10, 0.3 + sum(heights))
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, group) in zip(panels, groups, strict=True):
            _bars(axes, name, group, theme)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
        return figure

    return build


def _bars(axes: Axes, name: str, group: Sequence[Site], theme: Theme) -> None:
    ends = [(s.low, s.high) for s in group if math.isfinite(s.low) and math.isfinite(s.high)]
    ends += [(s.low_seen, s.high_seen) for s in group if s.low_seen is not None and s.high_seen is not None]
    low, high = min((e[0] for e in ends), default=-1.0), max((e[1] for e in ends), default=1.0)
    if low > 0:
        axes.set_xscale("log")
        low, high = low / 2, high * 2
    else:
        axes.set_xscale("asinh", linear_width=1.0)  # narrow ranges stay visible beside wide ones
        low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)
        ticks = [x for x in TICKS if low <= x <= high]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    for i, site in enumerate(group):
        a, b = max(site.low, low), min(site.high, high)
        axes.barh(i, b - a, left=a, height=0.62, color=theme.target, alpha=0.28, lw=0, label="" if i else "covered")
        if site.low_seen is not None and site.high_seen is not None:
            width = site.high_seen - site.low_seen
            axes.barh(i, width, left=site.low_seen, height=0.62, color=theme.target, lw=0, label="" if i else "seen")
        if site.everywhere:
            axes.plot([a, b], [i, i], ls="", marker=5, ms=5, color=theme.target, clip_on=False, markevery=[1])
            axes.plot([a, b], [i, i], ls="", marker=4, ms=5, color=theme.target, clip_on=False, markevery=[0])
        size = f"{site.anchors} {SLOTS.get(site.family, 'anchors')}"
        axes.annotate(
            size, (1, i), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points", va="center",
            color=theme.soft, fontsize=8.5, annotation_clip=False,
        )  # fmt: skip
    axes.set_xlabel(AXES.get(name, name))
    _rows(axes, group)


def _rows(axes: Axes, sites: Sequence[Site]) -> None:
    axes.set_yticks(range(len(sites)), [_label(site.path) for site in sites], fontsize=8.5)
    axes.set_ylim(len(sites) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
