"""Charts as pictures, from the data of `chart` and nothing else: matplotlib figures for files and print, and plotly
figures with the same looks, to be explored in a page.

Series are told apart by a colour, a marker and a dash each, the same in every panel and in both kinds of drawing: never
by colour alone. Colours are indices into the theme's cycle, safe for the colour-blind; what the theory says and nothing
was measured for is grey.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, closest
from ..extras import require
from ..saving import free_file, write_whole
from .chart import Contour, Fan, Figure, Heat, Level, Note, Panel, Series, Spans
from .themes import DARK, GREYS, LIGHT, ROLES, Theme, ThemePair, new_figure, render, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # matplotlib's letters, and plotly's names for the same
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
#: Of bounds, in the order in which they appear: lengths of lines and gaps, in widths of the line.
DASHES = ((4.0, 2.4), (1.2, 1.8), (7.0, 2.2, 1.4, 2.2), (10.0, 3.0), (3.0, 1.5, 1.0, 1.5, 1.0, 1.5))
BY_ROLE = (0, 0, 1, 3, 2)  # the markers of the roles
CURVE = 48  # points: more of them are drawn as a curve, without markers
BROKEN = ((2.6, 1.3), (1.0, 1.0), (5.0, 1.5))  # of measurements that share a colour
MOST, MOST_LOG = 9, 24  # measured places that may all be labelled, on a linear and on a logarithmic axis
LETTER = 0.058  # inches: the width of a letter of a tick label, roughly


@dataclass(frozen=True)
class Look:
    """Of one series: `colour` counts through the theme's cycle, None is grey; `dash` is empty for a solid line."""

    colour: int | None
    marker: int
    dash: tuple[float, ...] = ()


def key(series: Series) -> str:
    """What series have in common that look alike: their name, or their role where they have none."""
    return series.name or f"a {series.role}"


def looks(figure: Figure) -> dict[str, Look]:
    """A look for every key; series of one group share a colour, and a role has its own.

    >>> from attnforge.charts.chart import Panel, Series
    >>> cold, line = Series("cold", [1], [1.0]), Series("bound", [1], [2.0], style="bound")
    >>> looks(Figure("f", "c", [Panel("t", "x", "y", [cold, line])]))["bound"].colour is None
    True
    """
    all_series = [s for panel in figure.panels for s in panel.series]
    series = [s for s in all_series if s.role is None]
    coloured = [s.group or s.name for s in series if s.style != "bound" or s.group]
    order = {name: i for i, name in enumerate(dict.fromkeys(coloured))}
    bounds = {name: i for i, name in enumerate(dict.fromkeys(s.name for s in series if s.style == "bound"))}
    found: dict[str, Look] = {}
    members: dict[str, list[str]] = {}
    for s in series:
        if s.name in found:
            continue
        number = order.get(s.group or s.name)
        if s.style == "bound":
            found[s.name] = Look(number, (number or 0) % len(MARKERS), DASHES[bounds[s.name] % len(DASHES)])
            continue
        # Measurements of one group have its colour; the second has another marker and a broken line.
        earlier = members.setdefault(s.group or s.name, [])
        marker = ((number or 0) + 3 * len(earlier)) % len(MARKERS)
        found[s.name] = Look(number, marker, BROKEN[len(earlier) - 1] if 0 < len(earlier) <= len(BROKEN) else ())
        earlier.append(s.name)
    for s in all_series:
        if s.role is not None:
            at = ROLES.index(s.role)
            dash = DASHES[0] if s.style == "bound" else ()
            found.setdefault(key(s), Look(None if s.role in GREYS else at, BY_ROLE[at], dash))
    return found


def places(panel: Panel, room: float) -> list[float]:
    """Where an x axis of `room` inches is labelled: at the measured places, as many as stand apart.

    Empty where there are too many, or where they cover so much that powers of ten are the better labels.
    """
    if panel.rows or panel.x_range is not None:
        return []
    at = sorted({x for series in panel.series if series.style != "bound" for x in series.x})
    if not 2 <= len(at) <= (MOST_LOG if panel.log_x else MOST) or (panel.log_x and math.log10(at[-1] / at[0]) > 3):
        return []
    scaled = [math.log(x) for x in at] if panel.log_x else at
    unit = room / (scaled[-1] - scaled[0])
    chosen: list[int] = []
    for i, x in enumerate(at):
        apart = LETTER * (len(tick(x)) + (len(tick(at[chosen[-1]])) if chosen else 0)) / 2 + 0.14
        if not chosen or (scaled[i] - scaled[chosen[-1]]) * unit > apart:
            chosen.append(i)
    return [at[i] for i in chosen]


def tick(x: float) -> str:
    """A number under an axis: whole numbers as they are, others with three digits.

    >>> tick(4096.0), tick(1 / 13), tick(0.5)
    ('4096', '0.0769', '0.5')
    """
    return f"{x:.0f}" if x == int(x) and abs(x) < 1e6 else f"{x:.3g}"


def shape(panels: int) -> tuple[int, int]:
    """Rows and columns for a number of panels that has no layout of its own.

    >>> [shape(n) for n in (1, 2, 3, 4, 5, 6, 9)]
    [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 3), (3, 3)]
    """
    columns = panels if panels <= 3 else 2 if panels == 4 else 3
    return -(-panels // columns), columns


def visible(panel: Panel) -> tuple[float, float] | None:
    """The positive y that a logarithmic axis shows: all that was measured, and bounds within a factor of a hundred."""
    rows = [(s.style == "bound", v) for s in panel.series for v in (*s.y, *(s.low or ()), *(s.high or ()))
            if v is not None and v > 0]  # fmt: skip
    measured = [v for theory, v in rows if not theory] or [v for _, v in rows]
    if not measured:
        return None
    low, high = min(measured) / 100, max(measured) * 100
    near = [v for theory, v in rows if not theory or low <= v <= high]
    return min(near), max(near)


WIDTH, ALONE, ROW = 10.0, 7.2, 3.55  # inches: of a page, of a panel that stands alone, and of a row of panels
LINE = 0.26  # inches of a line of the legend or of a title above the panels
COLOURS = "viridis"  # even in lightness, and read alike with every kind of colour vision
DASHED = ((0, (5, 2.5)), (0, (1.2, 1.8)))  # of a level, and of others beside it
FILLED = 40  # curves of a fan: more of them would cover one another, and stay lines
SEEN = 1e-3  # of the highest point of a fan: where a curve is lower it would only make the file larger
BAR = 0.62  # of a row's height: bars stand apart by half as much
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten: numbers that are easy to read
KINDS = ("png", "svg", "pdf")  # of files
Handles = dict[str, Any]


def draw(figure: Figure, theme: Theme) -> Any:
    """The matplotlib figure: panels side by side, one legend above them all; inside `style` of the same theme."""
    count, appearance = len(figure.panels), looks(figure)
    rows, columns = shape(count) if not figure.columns else (-(-count // len(figure.columns)), len(figure.columns))
    width = WIDTH if columns > 1 or figure.columns else ALONE
    heights, ratios = figure.heights or (ROW,) * rows, figure.columns or (1.0,) * columns
    lines = _legend_rows(_names_above(figure), width)
    whole = new_figure(width, sum(heights) + LINE * (len(lines) + bool(figure.title)))
    if figure.title:
        whole.suptitle(figure.title, x=0.01, ha="left", fontsize=12, color=theme.ink)
    handles: Handles = {}
    grid = whole.subplots(rows, columns, squeeze=False, width_ratios=ratios, height_ratios=heights)
    for place, axes in enumerate(grid.flat):
        if place >= count:
            axes.set_axis_off()
            continue
        panel, above = figure.panels[place], 0
        room = width * ratios[place % columns] / sum(ratios) - 1.0
        if panel.heat is not None:
            _heat(axes, panel, panel.heat, theme)
        else:
            own = _marks(axes, panel, appearance, theme)
            _scales(axes, panel, theme, room)
            above = _zones(axes, panel, theme, room)
            if panel.legend == "above":
                handles |= own
            elif own:
                _legend_inside(axes, own, panel.legend, room)
        axes.set_title(textwrap.fill(panel.title, int(room / 0.095)), pad=10 + 12.5 * above)
        axes.set_xlabel(textwrap.fill(panel.x, int(room / 0.07)))
        axes.set_ylabel(textwrap.fill(panel.y, 44))
    if handles:
        whole.legend(
            handles.values(), handles.keys(), loc="outside upper left", ncols=max(map(len, lines)),
            handletextpad=0.6, columnspacing=1.6, handlelength=2.6,
        )  # fmt: skip
    return whole


def matplotlib_figure(figure: Figure, theme: Theme = LIGHT) -> Any:
    """The figure itself, to be shown or changed by the caller."""
    with style(theme):
        return draw(figure, theme)


def _placed(figure: Figure, like: Any) -> Any:
    """The figure for dark pages, each thing where the light one has it: finding places takes most time."""
    made = draw(figure, DARK)
    made.set_layout_engine("none")
    for mine, other in zip(made.axes, like.axes, strict=True):
        mine.set_position(other.get_position(original=True))
    if figure.title:
        made._suptitle.set_position(like._suptitle.get_position())
    return made


@lru_cache(maxsize=32)
def svg(figure: Figure) -> ThemePair:
    """The figure as SVG, once for light and once for dark pages, on no ground of its own; drawn once."""
    with style(LIGHT):
        made = draw(figure, LIGHT)
        light = render(made, "svg")
    with style(DARK):
        return ThemePair(light.decode(), render(_placed(figure, made), "svg").decode())


def save(figure: Figure, path: str | Path, theme: Theme = LIGHT, *, force: bool = False) -> Path:
    """Writes the figure as .png, .svg or .pdf, by the path's extension, on the theme's ground.

    A file that is there already is refused unless `force=True`.
    """
    path = free_file(path, force=force, make=True)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        known = ", ".join(f".{k}" for k in KINDS)
        raise ArgumentError(f"a figure is saved as one of {known}; got {path.name!r}{closest(kind, KINDS)}")
    with style(theme):
        data = render(draw(figure, theme), kind, facecolor=theme.surface)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, data)


@dataclass(frozen=True)
class Drawn:
    """A figure as files: SVG for light and dark pages, and a PNG of the light one."""

    pair: ThemePair
    png: bytes


@lru_cache(maxsize=128)
def drawn(figure: Figure) -> Drawn:
    """The figure, drawn once however often it is asked for."""
    with style(LIGHT):
        made = draw(figure, LIGHT)
        light = render(made, "svg", facecolor=LIGHT.surface)
        made.set_layout_engine("none")  # everything has its place now
        png = render(made, "png", facecolor=LIGHT.surface)
    with style(DARK):
        dark = render(_placed(figure, made), "svg", facecolor=DARK.surface)
    return Drawn(ThemePair(light.decode(), dark.decode()), png)


def write(figure: Figure, folder: str | Path) -> tuple[Path, Path]:
    """The figure as NAME.png and NAME.svg in a folder, over those that are there: for folders of our own."""
    image, drawing = (Path(folder) / f"{figure.name}{kind}" for kind in (".png", ".svg"))
    return write_whole(image, drawn(figure).png), write_whole(drawing, drawn(figure).pair.light)


def colour(look: Look, theme: Theme) -> str:
    """The look's colour in a theme."""
    return theme.grey if look.colour is None else theme.cycle[look.colour % len(theme.cycle)]


def _marks(axes: Axes, panel: Panel, appearance: dict[str, Look], theme: Theme) -> Handles:
    """Everything that lies in a panel, from the ground up; what the legend names."""
    handles: Handles = {}
    for contour in panel.of(Contour):
        axes.contour(contour.x, contour.y, contour.z, levels=12, colors=theme.grey, linewidths=0.7, alpha=0.6)
    handles |= _spans(axes, panel, theme)
    for fan in panel.of(Fan):
        handles |= _fan(axes, fan, theme)
    for series in panel.series:
        made = _series(axes, panel, series, appearance[key(series)], theme)
        handles |= {series.name: made} if series.name else {}
    handles |= _levels(axes, panel, theme)
    for note in panel.of(Note):
        axes.text(note.x, note.y, note.text, color=theme.soft, fontsize=9.5, ha="center", va="center")
    return handles


def _series(axes: Axes, panel: Panel, series: Series, look: Look, theme: Theme) -> Any:
    shade = colour(look, theme)
    x: Any = series.x  # a tuple, which matplotlib's types do not know from Row
    y = [math.nan if v is None else v for v in series.y]
    size = 8.0 if panel.rows else 5.2  # points; in a row of its own a marker has more room
    marker: dict[str, Any] = {"marker": MARKERS[look.marker], "ms": size, "mec": theme.surface, "mew": 0.7}
    floor = panel.y_range[0] if panel.y_range is not None else 0.0
    match series.style:
        case "bound":
            return axes.plot(x, y, color=shade, lw=1.5, dashes=look.dash, zorder=2.5)[0]
        case "broad":
            return axes.plot(x, y, color=shade, lw=5.0, alpha=0.35, solid_capstyle="butt", zorder=2.4)[0]
        case "area":
            y = [max(v, floor) for v in y]
            axes.fill_between(x, floor, y, color=shade, alpha=0.18, lw=0)
            return axes.plot(x, y, color=shade, lw=0.9)[0]
        case "steps":
            return axes.fill_between(x, floor, y, color=shade, alpha=0.75, lw=0, step="post")
        case "stems":
            axes.axhline(0, color=theme.soft, lw=0.8)
            axes.vlines(x, 0, y, color=shade, lw=1.2, alpha=0.6)
        case "hollow":
            marker |= {"mfc": theme.surface, "mec": shade, "mew": 1.0}
    if series.low is not None and series.high is not None:
        low = [math.nan if v is None else v for v in series.low]
        high = [math.nan if v is None else v for v in series.high]
        if len(x) > CURVE:
            axes.fill_between(x, low, high, color=shade, alpha=0.18, lw=0, zorder=2)
        else:
            axes.vlines(x, low, high, color=shade, lw=1.3, zorder=2)
    joined = series.style == "line"
    line: dict[str, Any] = {"lw": 1.6} if joined else {"ls": "none"}
    line |= {"dashes": look.dash} if joined and look.dash else {}
    # Many points are a curve; a marker on each would hide it. A marker at the end of an axis is drawn whole.
    line |= marker if len(x) <= CURVE or not joined else {}
    return axes.plot(x, y, color=shade, zorder=3, clip_on=panel.x_range is None, **line)[0]


def _fan(axes: Axes, fan: Fan, theme: Theme) -> Handles:
    colours = require("matplotlib.colors", "report").LinearSegmentedColormap.from_list("ramp", theme.ramp)
    highest = max((max(row) for row in fan.y), default=0.0)
    handles: Handles = {}
    for number, row in enumerate(fan.y):
        seen = [i for i, v in enumerate(row) if v > SEEN * highest]
        if not seen and not fan.names:
            continue
        kept = slice(max(seen[0] - 1, 0), seen[-1] + 2) if not fan.names else slice(None)
        shade = colours(number / max(len(fan.y) - 1, 1))
        if len(fan.y) <= FILLED:
            axes.fill_between(fan.x[kept], 0, row[kept], color=shade, alpha=0.14, lw=0)
        width = 1.6 if fan.names else 1.1 if len(fan.y) <= FILLED else 0.7
        line = axes.plot(fan.x[kept], row[kept], color=shade, lw=width)[0]
        handles |= {fan.names[number]: line} if fan.names else {}
    return handles


def _spans(axes: Axes, panel: Panel, theme: Theme) -> Handles:
    """Row by row, in each from the first spans to the last, which lie on top."""
    handles: Handles = {}
    bars = [(row, spans, i) for spans in panel.of(Spans) for i, row in enumerate(spans.rows)]
    for row, spans, i in sorted(bars, key=lambda bar: bar[0]):
        low, high, shade = spans.low[i], spans.high[i], theme.colour(spans.role)
        if spans.style == "rule":
            axes.hlines(row, low, high, color=theme.grid, lw=3)
            continue
        alpha = 0.28 if spans.style == "pale" else 1.0
        bar = axes.barh(row, high - low, left=low, height=BAR, color=shade, alpha=alpha, lw=0)
        handles.setdefault(spans.name, bar)
        if row in spans.beyond:
            for end, caret in ((high, 5), (low, 4)):  # matplotlib's numbers for carets to the right and to the left
                axes.plot(end, row, ls="", marker=caret, ms=5, color=shade, clip_on=False)
    return handles


def _levels(axes: Axes, panel: Panel, theme: Theme) -> Handles:
    handles: Handles = {}
    levels = panel.of(Level)
    for number, level in enumerate(levels):
        shade, across = theme.colour(level.role), axes.axhline if level.axis == "y" else axes.axvline
        line = across(level.at, color=shade, lw=1.6, ls=DASHED[0 if level.role == "bound" else 1], zorder=2.6)
        if level.named:
            handles[level.text] = line
            continue
        words: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "color": theme.ink, "fontsize": 9.5,
                                 "fontweight": "bold", "zorder": 4}  # fmt: skip
        words |= {"bbox": {"facecolor": theme.surface, "edgecolor": "none", "alpha": 0.8, "pad": 1.0}} if number else {}
        if level.axis == "x":
            axes.annotate(level.text, (level.at, 1), xycoords=("data", "axes fraction"), xytext=(-6, -4), va="top",
                          **words)  # fmt: skip
            continue
        # The highest has its name above the line, others below it, so that two that are close keep apart.
        above = level.at == max(other.at for other in levels if other.axis == "y")
        axes.annotate(level.text, (1, level.at), xycoords=("axes fraction", "data"), xytext=(-2, 4 if above else -4),
                      va="bottom" if above else "top", **words)  # fmt: skip
    return handles


def _heat(axes: Axes, panel: Panel, heat: Heat, theme: Theme) -> None:
    shades: Any = COLOURS
    z: Any = heat.z
    if heat.sparse:
        ramp = [theme.surface, theme.cycle[5], theme.cycle[0], theme.ink]
        shades = require("matplotlib.colors", "report").LinearSegmentedColormap.from_list("sparse", ramp)
    x, y = heat.x or (-0.5, len(heat.z[0]) - 0.5), heat.y or (len(heat.z) - 0.5, -0.5)
    image = axes.imshow(
        z, aspect="auto", cmap=shades, vmin=heat.low, vmax=heat.high, interpolation="nearest", rasterized=True,
        extent=(*x, *y), origin="upper" if heat.y is None else "lower",
    )  # fmt: skip
    axes.grid(False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.03, fraction=0.06)
    bar.set_label(heat.label)
    bar.outline.set_visible(False)  # type: ignore[operator]
    integer = require("matplotlib.ticker", "report").MaxNLocator
    axes.xaxis.set_major_locator(integer(6, integer=heat.x is None, steps=STEPS))
    axes.yaxis.set_major_locator(integer(6, integer=True, steps=STEPS))
    if panel.ticks:
        axes.set_xticks([at for at, _ in panel.ticks], [text for _, text in panel.ticks])


def _scales(axes: Axes, panel: Panel, theme: Theme, room: float) -> None:
    ticker = require("matplotlib.ticker", "report")
    chosen = places(panel, room)
    if panel.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(numticks=max(3, int(room / 0.55))))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    elif panel.linear_x is not None:
        axes.set_xscale("symlog", linthresh=panel.linear_x)
    else:
        counted = all(x == int(x) for series in panel.series for x in series.x) and bool(panel.series)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(max(3, int(room / 0.6)), integer=counted, steps=STEPS))
    if chosen:
        axes.set_xticks(chosen, [tick(x) for x in chosen])
    if panel.ticks:
        axes.set_xticks([at for at, _ in panel.ticks], [_fold(text, room, panel) for _, text in panel.ticks])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    if panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    if panel.rows:
        _rows(axes, panel, theme)
    elif panel.log_y:
        _log_y(axes, panel)
    else:
        if panel.linear_y is not None:
            axes.set_yscale("symlog", linthresh=panel.linear_y)
        else:
            axes.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=STEPS))
        if panel.y_range is not None:
            axes.set_ylim(*panel.y_range)
    if not panel.y and not panel.rows:
        axes.tick_params(labelleft=False)


def _rows(axes: Axes, panel: Panel, theme: Theme) -> None:
    """Words in place of a y axis, the first on top; a few more at the right end of each."""
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    for row, words in enumerate(panel.beside):
        axes.annotate(
            words, (1, row), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", color=theme.soft, fontsize=8.5, annotation_clip=False,
        )  # fmt: skip


def _log_y(axes: Axes, panel: Panel) -> None:
    """A logarithmic axis for what was measured; a curve of the theory may leave it, by some way above or below."""
    ticker = require("matplotlib.ticker", "report")
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_minor_locator(ticker.NullLocator())  # hundreds of ticks, each measured again and again
    shown = visible(panel)
    if panel.y_range is not None:
        low, high = panel.y_range
        axes.set_ylim(low, high)
    elif shown is not None:
        low, high = shown
        axes.set_ylim(low / 1.7, high * 1.7)
    else:
        return
    if math.log10(high / low) < 1.6:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    else:
        axes.yaxis.set_major_locator(ticker.LogLocator(numticks=7))


def _fold(text: str, room: float, panel: Panel) -> str:
    """A word under the axis, broken where its neighbours begin."""
    return textwrap.fill(text, max(4, int(room / max(len(panel.ticks), 1) / LETTER) - 2), break_long_words=False)


def _zones(axes: Axes, panel: Panel, theme: Theme, room: float) -> int:
    """Stretches with their names above the axes, every other one shaded; how many lines the names take."""
    low, high = axes.get_xlim()

    def across(x: float) -> float:
        return math.log(x / low) / math.log(high / low) if panel.log_x else (x - low) / (high - low)

    lines = 0
    for number, zone in enumerate(panel.zones):
        start, end = (edge if at is None else at for at, edge in ((zone.low, low), (zone.high, high)))
        if number % 2 == 0:
            axes.axvspan(start, end, color=theme.grid, alpha=0.55, lw=0, zorder=0)
        left, right = max(0.0, across(start)), min(1.0, across(end))
        words = textwrap.fill(zone.text, max(6, int((right - left) * room / (LETTER * 1.15))), break_long_words=False)
        lines = max(lines, words.count("\n") + 1)
        axes.text(
            (left + right) / 2, 1.015, words, transform=axes.transAxes, ha="center", va="bottom", fontsize=9,
            color=theme.soft, linespacing=1.1,
        )  # fmt: skip
    if panel.zones:
        axes.set_xlim(low, high)
    return lines


def _names_above(figure: Figure) -> list[str]:
    """What the legend above the panels names."""
    panels = [panel for panel in figure.panels if panel.legend == "above"]
    names = [series.name for panel in panels for series in panel.series]
    names += [spans.name for panel in panels for spans in panel.of(Spans)]
    names += [level.text for panel in panels for level in panel.of(Level) if level.named]
    names += [name for panel in panels for fan in panel.of(Fan) for name in fan.names]
    return [name for name in dict.fromkeys(names) if name]


def _legend_rows(names: list[str], width: float) -> list[list[str]]:
    """The names in rows that fit the width; a legend of matplotlib has columns of one width."""
    if not names:
        return []
    widest = max(map(len, names)) * 0.078 + 0.62
    columns = max(1, min(len(names), int((width - 0.3) / widest)))
    return [names[i : i + columns] for i in range(0, len(names), columns)]


def _legend_inside(axes: Axes, handles: Handles, where: str, room: float) -> None:
    """A legend within the axes; at their top it gets room of its own, above all curves."""
    options: dict[str, Any] = {"loc": "best", "ncols": 1}
    if where == "top":
        widest = max(map(len, handles)) * LETTER + 0.5
        columns = max(1, min(3, len(handles), int(room / widest)))
        options = {"loc": "upper center", "ncols": columns}
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + (0.08 + 0.1 * -(-len(handles) // columns)) * (high - low))
    axes.legend(handles.values(), handles.keys(), fontsize=8.5, **options)


HEIGHT = 400  # pixels of a row of panels
BUTTONS = 28  # pixels above the legend, for plotly's own buttons
BAR_ROOM = 0.07  # of the width of a figure: for a colour bar, its numbers and its label, beside its own panel
EXPLORED = ("line", "points", "bound")  # styles of series; the others, and marks, are for pictures only


def interactive(figure: Figure) -> Any:
    """The figure for `Page.plotly`. Colours are indices into the page's cycle and follow its theme."""
    for panel in figure.panels:
        if panel.marks or any(series.style not in EXPLORED for series in panel.series):
            raise ArgumentError(f"the panel '{panel.title}' can only be drawn as a picture: it shows more than lines")
    go, subplots = require("plotly.graph_objects", "report"), require("plotly.subplots", "report")
    rows, columns = shape(len(figure.panels))
    columns = min(columns, 2)  # a page is narrower than paper is wide
    rows = -(-len(figure.panels) // columns)
    apart = 0.3 / rows if rows > 1 else 0
    drawn = subplots.make_subplots(rows, columns, horizontal_spacing=0.14, vertical_spacing=apart)
    appearance, shown = looks(figure), set[str]()
    for number, panel in enumerate(figure.panels):
        row, column = number // columns + 1, number % columns + 1
        if panel.heat is not None:
            drawn.add_trace(_plotly_heat(go, drawn, panel.heat, row, column), row, column)
            drawn.update_yaxes(autorange="reversed", row=row, col=column)
        for series in panel.series:
            trace = _plotly_series(go, series, appearance[series.name], series.name not in shown)
            drawn.add_trace(trace, row, column)
            shown.add(series.name)
        _axes(drawn, panel, row, column)
        axis = "" if number == 0 else str(number + 1)  # a title stays with its axes, wherever the page puts them
        drawn.add_annotation(text=panel.title, x=0.5, y=1.02, xref=f"x{axis} domain", yref=f"y{axis} domain",
                             xanchor="center", yanchor="bottom", showarrow=False, font={"size": 14})  # fmt: skip
    lines = -(-len(shown) // 4)
    above = BUTTONS + 34 + 24 * lines
    height = HEIGHT * rows + above
    legend = {"orientation": "h", "yref": "container", "yanchor": "top", "y": 1 - BUTTONS / height, "x": 0,
              "xanchor": "left"}  # fmt: skip
    drawn.update_layout(template="none", height=height, legend=legend, hovermode="closest",
                        margin={"l": 64, "r": 20, "t": above, "b": 56}, meta={"row": HEIGHT})  # fmt: skip
    return drawn


def _plotly_series(go: Any, series: Series, look: Look, first: bool) -> Any:
    lines = series.style != "points"
    marked = series.style == "points" or (series.style == "line" and len(series.x) <= CURVE)
    error = None
    if series.low is not None and series.high is not None:
        rows = list(zip(series.y, series.low, series.high, strict=True))
        up = [None if y is None or high is None else max(0.0, high - y) for y, _, high in rows]
        down = [None if y is None or low is None else max(0.0, y - low) for y, low, _ in rows]
        error = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}
    dash = ",".join(f"{1.6 * part:g}px" for part in look.dash) or "solid"
    return go.Scatter(
        x=series.x, y=series.y, name=series.name, legendgroup=series.name, showlegend=first, connectgaps=False,
        mode="+".join([*(["lines"] if lines else []), *(["markers"] if marked else [])]) or "lines",
        line={"dash": dash, "width": 2}, marker={"symbol": SYMBOLS[look.marker], "size": 8}, error_y=error,
        meta={"cycle": -1 if look.colour is None else look.colour},
    )  # fmt: skip


def _plotly_heat(go: Any, drawn: Any, heat: Heat, row: int, column: int) -> Any:
    across, y = next(drawn.select_xaxes(row=row, col=column)), next(drawn.select_yaxes(row=row, col=column)).domain
    low, high = across.domain
    across.domain = (low, high - BAR_ROOM)
    bar = {"x": high - BAR_ROOM + 0.005, "y": (y[0] + y[1]) / 2, "len": y[1] - y[0], "thickness": 12,
           "title": {"text": heat.label, "side": "right"}}  # fmt: skip
    return go.Heatmap(z=heat.z, zmin=heat.low, zmax=heat.high, colorscale="Viridis", colorbar=bar)


def _axes(drawn: Any, panel: Panel, row: int, column: int) -> None:
    x: dict[str, Any] = {"title": {"text": panel.x}, "automargin": True, "zeroline": False}
    y: dict[str, Any] = {"title": {"text": panel.y}, "automargin": True, "zeroline": False}
    if panel.log_x:
        x |= {"type": "log", "exponentformat": "power"}
    if chosen := places(panel, 3.5) if panel.series else []:
        x |= {"tickvals": chosen, "ticktext": [tick(v) for v in chosen]}
    if panel.ticks:
        x |= {"tickvals": [at for at, _ in panel.ticks], "ticktext": [text for _, text in panel.ticks]}
    if panel.log_y:
        y |= {"type": "log", "exponentformat": "power"}
        if shown := visible(panel):
            low, high = math.log10(shown[0] / 1.7), math.log10(shown[1] * 1.7)
            # D2 labels 1, 2 and 5 of every power of ten; over many powers, every second or third is enough.
            y |= {"range": [low, high], "dtick": "D2" if high - low < 2 else math.ceil((high - low) / 8)}
    drawn.update_xaxes(x, row=row, col=column)
    drawn.update_yaxes(y, row=row, col=column)
    for number, zone in enumerate(panel.zones):
        _zone(drawn, panel, zone.low, zone.high, zone.text, number, row, column)


def _zone(
    drawn: Any, panel: Panel, low: float | None, high: float | None, text: str, number: int, row: int, column: int
) -> None:
    places_of_all = [x for series in panel.series for x in series.x]
    start = min(places_of_all) if low is None else low
    end = max(places_of_all) if high is None else high
    drawn.add_vrect(
        start, end, row=row, col=column, fillcolor="#8a94a3", opacity=0.16 if number % 2 == 0 else 0.0, line_width=0,
        annotation={"text": text, "font": {"size": 11}, "showarrow": False}, annotation_position="inside top",
        layer="below",
    )  # fmt: skip
