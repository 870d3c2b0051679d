"""Charts as data: what an experiment draws, without a word about how. `drawing` makes pictures of them.

A `Figure` has one or more `Panel`s side by side; a panel shows `Series` over one axis, or one `Heat` map. Labels carry
their units. Colours and markers are chosen by the drawing; series of one name look the same in every panel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError

STYLES = ("line", "points", "bound")
Number = float | None


@dataclass(frozen=True)
class Series:
    """Points with a name. `low` and `high` are the ends of an interval around y, where there is one.

    Styles: "line" is measured (markers joined by a line), "points" are markers alone, "bound" is a dashed line for what
    the theory predicts or bounds. None is a gap. `group` gives series that belong together one colour, such as a
    measurement and its bound; by default each name has its own.

    >>> Series("cold", [8, 16], [0.2, 0.1]).y
    (0.2, 0.1)
    """

    name: str
    x: Sequence[float]
    y: Sequence[Number]
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None
    style: str = "line"
    group: str | None = None

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ArgumentError(f"the style of a series is one of {', '.join(STYLES)}, got {self.style!r}")
        if (self.low is None) != (self.high is None):
            raise ArgumentError(f"the series '{self.name}' has one end of its interval: give low and high, or neither")
        object.__setattr__(self, "x", tuple(float(v) for v in self.x))
        for part in ("y", "low", "high"):
            row = getattr(self, part)
            if row is None:
                continue
            if len(row) != len(self.x):
                raise ArgumentError(
                    f"the series '{self.name}' has {len(self.x)} places and {len(row)} values of {part}"
                )
            object.__setattr__(self, part, tuple(_finite(v) for v in row))


@dataclass(frozen=True)
class Heat:
    """A matrix as colours: `z[row][column]`, row 0 on top. `label` names what is coloured, `low` and `high` fix it."""

    z: Sequence[Sequence[float]]
    label: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        rows = tuple(tuple(float(v) for v in row) for row in self.z)
        if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
            raise ArgumentError("a heat map needs rows of one length, at least one number in each")
        object.__setattr__(self, "z", rows)


@dataclass(frozen=True)
class Zone:
    """A stretch of the x axis with a few words above it, such as "too hot"; None reaches to the edge."""

    low: Number
    high: Number
    text: str


@dataclass(frozen=True)
class Panel:
    """One set of axes. `ticks` replaces the numbers on the x axis by words: (place, text) each."""

    title: str
    x: str
    y: str
    series: Sequence[Series] = ()
    heat: Heat | None = None
    log_x: bool = False
    log_y: bool = False
    zones: Sequence[Zone] = ()
    ticks: Sequence[tuple[float, str]] = ()

    def __post_init__(self) -> None:
        for part in ("series", "zones", "ticks"):
            object.__setattr__(self, part, tuple(getattr(self, part)))
        if bool(self.series) == (self.heat is not None):
            raise ArgumentError(f"the panel '{self.title}' shows either series or a heat map: give one of them")
        names = [s.name for s in self.series]
        if len(set(names)) != len(names):
            raise ArgumentError(f"the panel '{self.title}' has two series of one name: {names}")
        for series in self.series:
            if self.log_x and min(series.x, default=1.0) <= 0:
                raise ArgumentError(f"the x axis of '{self.title}' is logarithmic; '{series.name}' has a place <= 0")


@dataclass(frozen=True)
class Figure:
    """Panels under one caption. `name` becomes the file's name; `alt` says in words what there is to see.

    >>> Figure("error", "Error against p.", (Panel("sup", "anchors p", "error", [Series("cold", [8], [0.1])]),)).name
    'error'
    """

    name: str
    caption: str
    panels: Sequence[Panel]
    alt: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ArgumentError(f"a figure's name is lower-case words joined by hyphens, got {self.name!r}")
        if not self.panels:
            raise ArgumentError(f"the figure '{self.name}' has no panel")
        object.__setattr__(self, "panels", tuple(self.panels))


def _finite(value: Number) -> Number:
    return None if value is None or not math.isfinite(value) else float(value)
