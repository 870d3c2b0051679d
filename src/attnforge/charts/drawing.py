"""Charts as pictures: matplotlib figures for files and print, from the data of `chart` and nothing else."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import require
from .chart import Figure, Heat, Panel, Series
from .looks import CURVE, LETTER, MARKERS, Look, looks, places, shape, tick, visible
from .themes import DARK, LIGHT, Builder, Pair, Theme, new_figure, render, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Not the theme's own grey on dark ground, which some eyes cannot tell from its pink.
GREY = {"light": LIGHT.soft, "dark": "#828a96"}
WIDTH, ALONE, ROW = 10.0, 7.2, 3.55  # inches
COLOURS = "viridis"  # even in lightness, and read alike with every kind of colour vision


def builder(figure: Figure) -> Builder:
    """The figure for `report.style`: panels side by side, one legend above them all."""

    def build(theme: Theme) -> Any:
        rows, columns = shape(len(figure.panels))
        appearance = looks(figure)
        handles: dict[str, Any] = {}
        width = WIDTH if columns > 1 else ALONE
        lines = _legend_rows(list(appearance), width)
        whole = new_figure(width, ROW * rows + 0.26 * len(lines))
        room = width / columns - 1.0
        grid = whole.subplots(rows, columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(figure.panels):
                axes.set_axis_off()
                continue
            panel, above = figure.panels[place], 0
            if panel.heat is not None:
                _heat(axes, panel, panel.heat)
            else:
                handles |= {s.name: _series(axes, s, appearance[s.name], theme) for s in panel.series}
                _scales(axes, panel, room)
                above = _zones(axes, panel, theme, room)
            axes.set_title(textwrap.fill(panel.title, int(room / 0.095)), pad=10 + 12.5 * above)
            axes.set_xlabel(textwrap.fill(panel.x, int(room / 0.07)))
            axes.set_ylabel(textwrap.fill(panel.y, 44))
        if handles:
            whole.legend(
                handles.values(), handles.keys(), loc="outside upper left", ncols=max(map(len, lines)),
                handletextpad=0.6, columnspacing=1.6, handlelength=2.6,
            )  # fmt: skip
        return whole

    return build


@dataclass(frozen=True)
class Drawn:
    """A figure as files: SVG for light and dark pages, and a PNG of the light one."""

    pair: Pair
    png: bytes


@lru_cache(maxsize=128)
def drawn(figure: Figure) -> Drawn:
    """The figure, drawn once however often it is asked for."""
    files: dict[str, bytes] = {}
    for theme in (LIGHT, DARK):
        with style(theme):
            made = builder(figure)(theme)
            files[theme.name] = render(made, "svg", facecolor=theme.surface)
            if theme is LIGHT:
                made.set_layout_engine("none")  # everything has its place now; finding it takes most of the time
                files["png"] = render(made, "png", facecolor=theme.surface)
    return Drawn(Pair(files["light"].decode(), files["dark"].decode()), files["png"])


def write(figure: Figure, folder: str | Path) -> tuple[Path, Path]:
    """The figure as NAME.png and NAME.svg in a folder."""
    image, drawing = (Path(folder) / f"{figure.name}{kind}" for kind in (".png", ".svg"))
    image.write_bytes(drawn(figure).png)
    drawing.write_text(drawn(figure).pair.light, "utf-8")
    return image, drawing


def colour(look: Look, theme: Theme) -> str:
    """The look's colour in a theme."""
    return GREY[theme.name] if look.colour is None else theme.cycle[look.colour % len(theme.cycle)]


def _series(axes: Axes, series: Series, look: Look, theme: Theme) -> Any:
    shade = colour(look, theme)
    y = [math.nan if v is None else v for v in series.y]
    marker: dict[str, Any] = {"marker": MARKERS[look.marker], "ms": 5.2, "mec": theme.surface, "mew": 0.7}
    if series.style == "bound":
        line = axes.plot(series.x, y, color=shade, lw=1.5, dashes=look.dash, zorder=2.5, label=series.name)[0]
        return line
    if series.low is not None and series.high is not None:
        low = [math.nan if v is None else v for v in series.low]
        high = [math.nan if v is None else v for v in series.high]
        if len(series.x) > CURVE:
            axes.fill_between(series.x, low, high, color=shade, alpha=0.18, lw=0, zorder=2)
        else:
            axes.vlines(series.x, low, high, color=shade, lw=1.3, zorder=2)
    style: dict[str, Any] = {"lw": 1.6} if series.style == "line" else {"ls": "none"}
    style |= {"dashes": look.dash} if series.style == "line" and look.dash else {}
    # Many points are a curve; a marker on each would hide it.
    marker = marker if len(series.x) <= CURVE or series.style == "points" else {}
    return axes.plot(series.x, y, color=shade, zorder=3, label=series.name, **style, **marker)[0]


def _heat(axes: Axes, panel: Panel, heat: Heat) -> None:
    image = axes.imshow(
        heat.z, aspect="auto", cmap=COLOURS, vmin=heat.low, vmax=heat.high, interpolation="nearest", rasterized=True
    )
    axes.grid(False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.03, fraction=0.06)
    bar.set_label(heat.label)
    bar.outline.set_visible(False)  # type: ignore[operator]
    integer = require("matplotlib.ticker", "report").MaxNLocator
    axes.xaxis.set_major_locator(integer(6, integer=True))
    axes.yaxis.set_major_locator(integer(6, integer=True))
    if panel.ticks:
        axes.set_xticks([at for at, _ in panel.ticks], [text for _, text in panel.ticks])


def _scales(axes: Axes, panel: Panel, room: float) -> None:
    ticker = require("matplotlib.ticker", "report")
    chosen = places(panel, room)
    if panel.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(numticks=max(3, int(room / 0.55))))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(max(3, int(room / 0.6))))
    if chosen:
        axes.set_xticks(chosen, [tick(x) for x in chosen])
    if panel.ticks:
        axes.set_xticks([at for at, _ in panel.ticks], [_fold(text, room, panel) for _, text in panel.ticks])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    if panel.log_y:
        _log_y(axes, panel)
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6))


def _log_y(axes: Axes, panel: Panel) -> None:
    """A logarithmic axis for what was measured; a curve of the theory may leave it, by some way above or below."""
    ticker = require("matplotlib.ticker", "report")
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_minor_locator(ticker.NullLocator())  # hundreds of ticks, each measured again and again
    shown = visible(panel)
    if shown is None:
        return
    low, high = shown
    axes.set_ylim(low / 1.7, high * 1.7)
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


def _legend_rows(names: list[str], width: float) -> list[list[str]]:
    """The names in rows that fit the width; a legend of matplotlib has columns of one width."""
    if not names:
        return []
    widest = max(map(len, names)) * 0.078 + 0.62
    columns = max(1, min(len(names), int((width - 0.3) / widest)))
    return [names[i : i + columns] for i in range(0, len(names), columns)]
