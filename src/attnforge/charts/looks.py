"""How series are told apart: a colour, a marker and a dash each, the same in every panel and in both kinds of drawing.

Never by colour alone: markers and dashes differ too. Colours are indices into the theme's cycle, safe for the
colour-blind; what the theory says and nothing was measured for is grey.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .chart import Figure, Panel, Series
from .themes import GREYS, ROLES

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
