"""How attnforge's figures look, and how they become files: one style, two themes, colours safe for the colour-blind.

A *builder* is a function from a `Theme` to a matplotlib figure. `svg` draws it twice, for light and for dark pages;
`save` writes it to a file. Nothing here uses pyplot, so no backend is chosen and no global setting changes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, closest
from ..extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """The colours of a figure, by the role they play."""

    name: str
    surface: str
    ink: str
    soft: str
    grid: str
    cycle: tuple[str, ...]
    ramp: tuple[str, ...]

    @property
    def target(self) -> str:
        """The function that was asked for."""
        return self.cycle[0]

    @property
    def anchor(self) -> str:
        """Anchors and their values."""
        return self.cycle[1]

    @property
    def output(self) -> str:
        """What was built, and its error."""
        return self.cycle[2]

    @property
    def bound(self) -> str:
        """A certified bound."""
        return self.cycle[3]


# Okabe and Ito's palette; on dark ground its darker members are lifted until they read as well.
LIGHT = Theme(
    name="light",
    surface="#ffffff",
    ink="#1b1f26",
    soft="#59616e",
    grid="#e1e5ea",
    cycle=("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"),
    ramp=("#20408a", "#0072B2", "#009E73", "#c9a800", "#E69F00", "#D55E00"),
)
DARK = Theme(
    name="dark",
    surface="#1a1e25",
    ink="#e6e9ee",
    soft="#a0a9b6",
    grid="#2c323c",
    cycle=("#56B4E9", "#E69F00", "#2fc79a", "#ff8a4d", "#e39cc4", "#F0E442", "#ffffff"),
    ramp=("#7d9bf0", "#56B4E9", "#2fc79a", "#F0E442", "#E69F00", "#ff8a4d"),
)
Builder = Callable[[Theme], "Figure"]
KINDS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Pair:
    """The same picture for light and for dark pages, as SVG."""

    light: str
    dark: str


@contextmanager
def style(theme: Theme = LIGHT) -> Iterator[Theme]:
    """matplotlib's settings for our figures, undone on leaving.

    >>> import matplotlib
    >>> before = matplotlib.rcParams["axes.grid"]
    >>> with style() as theme:
    ...     inside = matplotlib.rcParams["axes.grid"]
    >>> inside, matplotlib.rcParams["axes.grid"] == before, theme.name
    (True, True, 'light')
    """
    matplotlib = require("matplotlib", "report")
    settings = {
        "axes.axisbelow": True,
        "axes.edgecolor": theme.grid,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": theme.soft,
        "axes.labelsize": 10,
        "axes.linewidth": 1.0,
        "axes.prop_cycle": require("cycler", "report").cycler(color=theme.cycle),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "figure.constrained_layout.h_pad": 0.09,
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.09,
        "figure.dpi": 100,
        "figure.facecolor": "none",
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "legend.fontsize": 9.5,
        "legend.frameon": False,
        "legend.labelcolor": theme.ink,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "savefig.facecolor": "none",
        # Fixed, so that the same figure gives the same file.
        "svg.hashsalt": "attnforge",
        "text.color": theme.ink,
        "xtick.color": theme.grid,
        "xtick.labelcolor": theme.soft,
        "xtick.labelsize": 9.5,
        "ytick.color": theme.grid,
        "ytick.labelcolor": theme.soft,
        "ytick.labelsize": 9.5,
    }
    with matplotlib.rc_context(settings):
        yield theme


def svg(builder: Builder) -> Pair:
    """The figure as SVG, once for light and once for dark pages."""
    light, dark = (_draw(builder, theme, "svg").decode() for theme in (LIGHT, DARK))
    return Pair(light, dark)


def save(builder: Builder, path: str | Path, theme: Theme = LIGHT) -> Path:
    """Writes the figure as .png, .svg or .pdf, by the path's extension, on the theme's ground."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        known = ", ".join(f".{k}" for k in KINDS)
        raise ArgumentError(f"a figure is saved as one of {known}; got {path.name!r}{closest(kind, KINDS)}")
    data = _draw(builder, theme, kind, facecolor=theme.surface)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def render(figure: Figure, kind: str, **options: Any) -> bytes:
    """A finished matplotlib figure as the bytes of a file, without the time of day in them."""
    stamp: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=stamp, dpi=160 if kind == "png" else "figure", **options)
    return _shorter(buffer.getvalue()) if kind == "svg" else buffer.getvalue()


def _shorter(image: bytes) -> bytes:
    """The same SVG with path coordinates to a hundredth of a point, which halves the file."""
    return re.sub(rb' d="[^"]*"', lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]), image)


def _draw(builder: Builder, theme: Theme, kind: str, **options: Any) -> bytes:
    with style(theme):
        return render(builder(theme), kind, **options)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    figure: Figure = require("matplotlib.figure", "report").Figure(figsize=(width, height))
    return figure
