"""The page of a conversion: what was replaced, where it holds, what is certified of it and what was measured.

*Certified* and *measured* stand in sections of their own: a proof about each site is no proof about the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..certificates.certificate import upper_text
from ..charts.chart import Figure, Level, Panel, Series, Spans
from ..report.html import Page
from ..report.structure import MEANING

if TYPE_CHECKING:
    from .record import Conversion, Replacement

DRAWN = 80  # sites in a figure, a page high; the tables hold all of them
LONGEST_LABEL = 44  # letters beside a figure: a third of its width
ROW, AXIS = 0.24, 0.95  # inches of a site and of the axis below all of them
FAMILIES = {"fast": "anchor heads, one exponential"}
SLOTS = {"gate": "slots", "product": "nodes", "norm": "heads"}
#: Where an axis of inputs is labelled: powers of ten, on both sides of 0.
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


def write(conversion: Conversion, path: str | Path, force: bool = False) -> Path:
    """Writes the page and returns its path."""
    return page(conversion).save(path, force=force)


def page(conversion: Conversion) -> Page:
    """All there is to say about a conversion, on one page."""
    left = "" if conversion.level == "ffn" or not conversion.left else "; what was left is listed below"
    found = Page(f"{conversion.model}, converted", f"Level {conversion.level}: {LEVELS[conversion.level]}{left}.")
    found.cards(_cards(conversion))
    found.text(
        "Two words on this page are never mixed. **Certified** speaks of one site: the largest distance between its "
        "heads and the function they replace, on the range they cover, proved by the analysis alone, rounding "
        "included. **Measured** speaks of the whole model: how far its outputs moved on data that the conversion did "
        "not look at. It is no bound."
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
    chart = bounds_figure(conversion)
    found.figure(chart, f"{chart.caption.removesuffix('.')}{_left_out(conversion.sites)}.")
    found.table(
        header,
        rows,
        "What stands at each site now; numbers: what the heads add to the model. Bounds are rounded up, also here.",
        "lllrrrrr",
    )
    words = {"fast": "anchor heads that are read with one exponential for each number", "kappa": MEANING["kappa"]}
    used = {site.family for site in conversion.sites} | {"kappa" for site in conversion.sites if site.kappa is not None}
    found.text("\n\n".join(f"`{word}`: {meaning}." for word, meaning in words.items() if word in used))
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
    chart = ranges_figure(conversion.sites)
    found.figure(chart, f"{chart.caption.removesuffix('.')}{_left_out(conversion.sites)}.")
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


def _left_out(sites: Sequence[Replacement]) -> str:
    return f"; the first {DRAWN} of {len(sites)} are drawn" if len(sites) > DRAWN else ""


def _label(path: str) -> str:
    """A path that fits beside a figure: its end tells more than its middle."""
    path = path or "the model itself"
    return path if len(path) <= LONGEST_LABEL else "…" + path[-(LONGEST_LABEL - 1) :]


def bounds_figure(conversion: Conversion) -> Figure:
    """The certified relative bound of every site on one logarithmic axis, and what was asked for."""
    sites = conversion.sites[:DRAWN]
    families = {name: [row for row, site in enumerate(sites) if site.family == name] for name in conversion.by_family}
    series = [
        Series(FAMILIES.get(name, f"{name} heads"), [sites[row].relative for row in rows], rows, style="points")
        for name, rows in families.items()
        if rows
    ]
    least = min(site.relative for site in sites)
    panel = Panel(
        "", "certified error of a site, of its output's scale", "", series, log_x=True,
        x_range=(min(least, conversion.eps) / 4, max(conversion.eps, conversion.worst) * 4),
        marks=[Level(conversion.eps, f"asked for {conversion.eps:g}", axis="x", named=True)],
        rows=[_label(site.path) for site in sites],
    )  # fmt: skip
    caption = "The certified error of each site, as a part of its output's scale. Dashed: what was asked for."
    alt = "Dots on a logarithmic axis, one line for each site."
    return Figure("bounds", caption, (panel,), alt, columns=(1,), heights=(AXIS + ROW * len(sites),))


def ranges_figure(sites: Sequence[Replacement]) -> Figure:
    """Bars for the range covered and, inside, the range seen; a panel for each thing that ranges are of."""
    drawn = sites[:DRAWN]
    groups = {name: [site for site in drawn if site.ranged == name] for name in dict.fromkeys(s.ranged for s in drawn)}
    return Figure(
        "ranges",
        "Range seen and range covered, by what the range is of.",
        [_ranges_panel(name, group) for name, group in groups.items()],
        "Horizontal bars, one for each site: a solid part inside a pale one.",
        columns=(1,),
        heights=[AXIS + ROW * len(group) for group in groups.values()],
    )


def _ranges_panel(name: str, group: Sequence[Replacement]) -> Panel:
    looked_at = [(i, s.low_seen, s.high_seen) for i, s in enumerate(group)]
    seen = [(i, low, high) for i, low, high in looked_at if low is not None and high is not None]
    ends = [(s.low, s.high) for s in group if math.isfinite(s.low) and math.isfinite(s.high)]
    ends += [(low, high) for _, low, high in seen]
    low, high = min((e[0] for e in ends), default=-1.0), max((e[1] for e in ends), default=1.0)
    decades = low > 0
    margin = 0.1 * (high - low)
    low, high = (low / 2, high * 2) if decades else (low - margin, high + margin)
    covered = Spans(
        "covered", range(len(group)), [max(s.low, low) for s in group], [min(s.high, high) for s in group], "pale",
        beyond=[i for i, site in enumerate(group) if site.everywhere],
    )  # fmt: skip
    inside = Spans("seen", [i for i, _, _ in seen], [low for _, low, _ in seen], [high for _, _, high in seen])
    marks = [covered, inside] if seen else [covered]
    return Panel(
        "", AXES.get(name, name), "", marks=marks, log_x=decades, x_range=(low, high),
        linear_x=None if decades else 1.0,  # narrow ranges stay visible beside wide ones
        ticks=[] if decades else [(x, f"{x:g}") for x in TICKS if low <= x <= high],
        rows=[_label(site.path) for site in group],
        beside=[f"{site.anchors} {SLOTS.get(site.family, 'anchors')}" for site in group],
    )  # fmt: skip
