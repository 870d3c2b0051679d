"""Charts as data: what a figure shows, without a word about how. `drawing` makes pictures of them.

A `Figure` has one or more `Panel`s side by side; a panel shows `Series` over one axis, or one `Heat` map, and what lies
among them: levels, notes, fans, spans, contours. Labels carry their units. Colours and markers are chosen by the
drawing; series of one name look the same in every panel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from ..errors import ArgumentError
from .themes import ROLES

STYLES = ("line", "points", "bound", "broad", "area", "steps", "stems", "hollow")
SPANS = ("bar", "pale", "rule")
LEGENDS = ("above", "inside", "top")
LEAST = 2.0**-52  # where an axis of errors begins to matter when all of them are 0: one rounding of float64
TINY = 2.0**-1000  # an error below this is 0: the powers of ten beneath it would leave the floating numbers
HEADROOM = 12.0  # times the largest error or bound: room for the bound's name above its line
Number = float | None
Range = tuple[float, float]


class Row(Protocol):
    """Numbers in a row, or rows of them: a list, a tuple, a range or an array."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def _floats(row: Row) -> tuple[Number, ...]:
    return tuple(None if v is None or not math.isfinite(v) else float(v) for v in row)


def _one_of(what: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ArgumentError(f"{what} is one of {', '.join(known)}, got {value!r}")


@dataclass(frozen=True)
class Series:
    """Points with a name. `low` and `high` are the ends of an interval around y, where there is one.

    Styles: "line" is measured (markers joined by a line), "points" are markers alone, "bound" is a dashed line for what
    the theory predicts or bounds. "broad" is a pale line to lie under another, "area" a line filled down to the axis,
    "steps" a histogram (x are edges, each y reaches to the next), "stems" stand on zero, "hollow" are empty markers.
    None is a gap. `group` gives series that belong together one colour, such as a measurement and its bound; by default
    each name has its own. A `role` fixes the colour instead; with one, the name may be empty, for no legend.

    >>> Series("cold", [8, 16], [0.2, 0.1]).y
    (0.2, 0.1)
    """

    name: str
    x: Row
    y: Row
    low: Row | None = None
    high: Row | None = None
    style: str = "line"
    group: str | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        _one_of("the style of a series", self.style, STYLES)
        if self.role is not None:
            _one_of("the role of a series", self.role, ROLES)
        elif not self.name:
            raise ArgumentError("a series without a name needs a role")
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
            object.__setattr__(self, part, _floats(row))


@dataclass(frozen=True)
class Heat:
    """A matrix as colours: `z[row][column]`, row 0 on top. `label` names what is coloured, `low` and `high` fix it.

    `x` and `y` are the ends of the axes where columns and rows are not just counted; row 0 is then at the lower end. A
    `sparse` map fades to the ground of the page where it is 0.
    """

    z: Row
    label: str
    low: float | None = None
    high: float | None = None
    x: Range | None = None
    y: Range | None = None
    sparse: bool = False

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
class Level:
    """A dashed line across the panel at a place of the `axis` "x" or "y"; its text beside it, or in the legend."""

    at: float
    text: str
    role: str = "bound"
    axis: str = "y"
    named: bool = False

    def __post_init__(self) -> None:
        _one_of("the role of a level", self.role, ROLES)
        _one_of("the axis of a level", self.axis, ("x", "y"))
        object.__setattr__(self, "at", float(self.at))


@dataclass(frozen=True)
class Note:
    """A few words at a place among the curves."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Fan:
    """Curves that belong together, `y[curve][place]`, coloured from one end of a ramp to the other; named or not."""

    x: Row
    y: Row
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", tuple(float(v) for v in self.x))
        object.__setattr__(self, "y", tuple(tuple(float(v) for v in row) for row in self.y))
        object.__setattr__(self, "names", tuple(self.names))
        if any(len(row) != len(self.x) for row in self.y):
            raise ArgumentError(f"each curve of a fan has a value for each of its {len(self.x)} places")
        if self.names and len(self.names) != len(self.y):
            raise ArgumentError(f"a fan of {len(self.y)} curves has as many names or none, got {len(self.names)}")


@dataclass(frozen=True)
class Spans:
    """Stretches from `low` to `high` in the numbered `rows` of a panel, as bars, pale bars or thin rules.

    Those in `beyond` go on at both ends, which arrows show.
    """

    name: str
    rows: Row
    low: Row
    high: Row
    style: str = "bar"
    role: str = "target"
    beyond: Row = ()

    def __post_init__(self) -> None:
        _one_of("the style of spans", self.style, SPANS)
        _one_of("the role of spans", self.role, ROLES)
        for part, kind in (("rows", int), ("low", float), ("high", float), ("beyond", int)):
            object.__setattr__(self, part, tuple(kind(v) for v in getattr(self, part)))
        if not len(self.rows) == len(self.low) == len(self.high):
            raise ArgumentError(f"the spans '{self.name}' need a low and a high end for each row")


@dataclass(frozen=True)
class Contour:
    """Lines of equal height under a path: `z[row][column]` over x and y."""

    x: Row
    y: Row
    z: Row

    def __post_init__(self) -> None:
        for part in ("x", "y"):
            object.__setattr__(self, part, tuple(float(v) for v in getattr(self, part)))
        object.__setattr__(self, "z", tuple(tuple(float(v) for v in row) for row in self.z))
        if len(self.z) != len(self.y) or any(len(row) != len(self.x) for row in self.z):
            raise ArgumentError(f"a contour over {len(self.x)} x and {len(self.y)} y has a height for each pair")


Mark = Level | Note | Fan | Spans | Contour
M = TypeVar("M", Level, Note, Fan, Spans, Contour)


@dataclass(frozen=True)
class Panel:
    """One set of axes. `ticks` replaces the numbers on the x axis by words: (place, text) each.

    `x_range` and `y_range` fix how far the axes reach. An axis with a `linear` stretch around 0 is logarithmic beyond
    it. `rows` are words in place of a y axis, row 0 on top, and `beside` a few more at their right ends. Without a
    label `y` the axis is that of the panel to the left, and its numbers are not said again. The legend is "above" the
    figure, "inside" the axes where there is room, or at their "top", where room is made.
    """

    title: str
    x: str
    y: str
    series: Sequence[Series] = ()
    heat: Heat | None = None
    log_x: bool = False
    log_y: bool = False
    zones: Sequence[Zone] = ()
    ticks: Sequence[tuple[float, str]] = ()
    marks: Sequence[Mark] = ()
    x_range: Range | None = None
    y_range: Range | None = None
    linear_x: Number = None
    linear_y: Number = None
    rows: Sequence[str] = ()
    beside: Sequence[str] = ()
    legend: str = "above"

    def __post_init__(self) -> None:
        for part in ("series", "zones", "ticks", "marks", "rows", "beside"):
            object.__setattr__(self, part, tuple(getattr(self, part)))
        shown = self.series or any(not isinstance(mark, Level | Note) for mark in self.marks)
        if bool(shown) == (self.heat is not None):
            raise ArgumentError(f"the panel '{self.title}' shows either series or a heat map: give one of them")
        _one_of(f"the legend of '{self.title}'", self.legend, LEGENDS)
        names = [s.name for s in self.series if s.name]
        if len(set(names)) != len(names):
            raise ArgumentError(f"the panel '{self.title}' has two series of one name: {names}")
        for series in self.series:
            if self.log_x and min(series.x, default=1.0) <= 0:
                raise ArgumentError(f"the x axis of '{self.title}' is logarithmic; '{series.name}' has a place <= 0")

    def of(self, kind: type[M]) -> tuple[M, ...]:
        """The marks of one kind."""
        return tuple(mark for mark in self.marks if isinstance(mark, kind))


@dataclass(frozen=True)
class Figure:
    """Panels under one caption. `name` becomes the file's name; `alt` says in words what there is to see.

    `columns` are relative widths, for figures as wide as a page, and `heights` those of the rows in inches; without
    them the panels are laid out by their number. A `title` stands above all of them.

    >>> Figure("error", "Error against p.", (Panel("sup", "anchors p", "error", [Series("cold", [8], [0.1])]),)).name
    'error'
    """

    name: str
    caption: str
    panels: Sequence[Panel]
    alt: str = ""
    columns: Sequence[float] = ()
    heights: Sequence[float] = ()
    title: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ArgumentError(f"a figure's name is lower-case words joined by hyphens, got {self.name!r}")
        if not self.panels:
            raise ArgumentError(f"the figure '{self.name}' has no panel")
        for part in ("panels", "columns", "heights"):
            object.__setattr__(self, part, tuple(getattr(self, part)))


def error_range(worst: float, *bounds: float) -> Range:
    """How far an axis of errors reaches: from well below the largest, so that peaks show, to above all bounds.

    >>> error_range(1e-3, 2e-3)
    (1e-06, 0.024)
    """
    top = max(worst, *bounds, 0.0)
    top = top if top > TINY else LEAST
    # An error that is a rounding beside its bound would leave no room on the axis for the bound.
    floor = 1e-3 * worst if worst > 1e-14 * top else 1e-4 * top
    return floor, HEADROOM * top


def error_panel(
    title: str, x: str, y: str, at: Row, error: Row, levels: Sequence[Level], **options: Any
) -> Panel:
    """An error below its bounds, on a logarithmic axis that leaves room for their names."""
    floor, top = error_range(float(max(error)), *(level.at for level in levels))
    marks = [replace(level, at=max(level.at, floor)) for level in levels]
    series = Series("", at, error, style="area", role="output")
    return Panel(title, x, y, [series], log_y=True, marks=marks, y_range=(floor, top), **options)
