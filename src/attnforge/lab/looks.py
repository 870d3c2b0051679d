"""How series are told apart: a colour, a marker and a dash each, the same in every panel and in both kinds of drawing.

Never by colour alone: markers and dashes differ too. Colours are indices into the theme's cycle, safe for the
colour-blind; what the theory says and nothing was measured for is grey.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .chart import Figure, Panel

MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # matplotlib's letters, and plotly's names for the same
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
DASHES = ((4.0, 2.4), (1.2, 1.8), (7.0, 2.2, 1.4, 2.2), (10.0, 3.0), (3.0, 1.5, 1.0, 1.5, 1.0, 1.5))
CURVE = 48  # points: more of them are drawn as a curve, without markers
LETTER = 0.058  # inches: the width of a letter of a tick label, roughly


@dataclass(frozen=True)
class Look:
    """Of one series: `colour` counts through the theme's cycle, None is grey; `dash` is empty for a solid line."""

    colour: int | None
    marker: int
    dash: tuple[float, ...] = ()


def looks(figure: Figure) -> dict[str, Look]:
    """A look for every name; series of one group share a colour and a marker.

    >>> from attnforge.lab.chart import Panel, Series
    >>> cold, line = Series("cold", [1], [1.0]), Series("bound", [1], [2.0], style="bound")
    >>> looks(Figure("f", "c", [Panel("t", "x", "y", [cold, line])]))["bound"].colour is None
    True
    """
    series = [s for panel in figure.panels for s in panel.series]
    coloured = [s.group or s.name for s in series if s.style != "bound" or s.group]
    order = {name: i for i, name in enumerate(dict.fromkeys(coloured))}
    bounds = {name: i for i, name in enumerate(dict.fromkeys(s.name for s in series if s.style == "bound"))}
    found = {}
    for s in series:
        number = order.get(s.group or s.name)
        dash = DASHES[bounds[s.name] % len(DASHES)] if s.style == "bound" else ()
        found[s.name] = Look(number, (number or 0) % len(MARKERS), dash)
    return found


def places(panel: Panel, room: float) -> list[float]:
    """Where a logarithmic x axis of `room` inches is labelled: at the measured places, as many as stand apart.

    Empty where the places cover so much that powers of ten are the better labels.
    """
    at = sorted({x for series in panel.series for x in series.x})
    if len(at) < 2 or at[0] <= 0 or math.log10(at[-1] / at[0]) > 3 or len(at) > 24:
        return []
    scale = room / math.log(at[-1] / at[0])
    chosen: list[float] = []
    for x in at:
        if (
            not chosen
            or math.log(x / chosen[-1]) * scale > LETTER * (len(f"{x:g}") + len(f"{chosen[-1]:g}")) / 2 + 0.14
        ):
            chosen.append(x)
    return chosen


def shape(panels: int) -> tuple[int, int]:
    """Rows and columns for a number of panels.

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
    everything = [v for _, v in rows]
    return max(min(everything), min(measured) / 100), min(max(everything), max(measured) * 100)
