"""How figures look: one style, two themes, colours safe for the colour-blind, and files that are always the same.

Nothing here uses pyplot, so no backend is chosen and no global setting changes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: What a colour can mean, in the order of the cycle: the function that was asked for, anchors and their values, what
#: was built, a certified bound; then what only stands beside them, in grey.
ROLES = ("target", "anchor", "output", "bound", "soft")
GREYS = ("soft",)  # roles without a colour of the cycle


@dataclass(frozen=True)
class Theme:
    """The colours of a figure: text and ground, a cycle that all eyes can tell apart, a ramp from end to end."""

    name: str
    surface: str
    ink: str
    soft: str
    grid: str
    grey: str
    cycle: tuple[str, ...]
    ramp: tuple[str, ...]

    def colour(self, role: str) -> str:
        """The colour that means this."""
        return self.grey if role in GREYS else self.cycle[ROLES.index(role)]


# Okabe and Ito's palette; on dark ground its darker members are lifted until they read as well.
LIGHT = Theme(
    name="light",
    surface="#ffffff",
    ink="#1b1f26",
    soft="#59616e",
    grid="#e1e5ea",
    grey="#59616e",
    cycle=("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"),
    ramp=("#20408a", "#0072B2", "#009E73", "#c9a800", "#E69F00", "#D55E00"),
)
DARK = Theme(
    name="dark",
    surface="#1a1e25",
    ink="#e6e9ee",
    soft="#a0a9b6",
    grid="#2c323c",
    grey="#828a96",  # not its soft text's, which some eyes cannot tell from its pink
    cycle=("#56B4E9", "#E69F00", "#2fc79a", "#ff8a4d", "#e39cc4", "#F0E442", "#ffffff"),
    ramp=("#7d9bf0", "#56B4E9", "#2fc79a", "#F0E442", "#E69F00", "#ff8a4d"),
)
PNG_DPI = 160  # sharp on a screen of twice the usual density, at half of a page's width


@dataclass(frozen=True)
class ThemePair:
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
        "axes.formatter.limits": (-3, 5),  # powers of ten that ticks spell out; smaller and larger are factored out
        "axes.formatter.use_mathtext": True,
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


def render(figure: Figure, kind: str, **options: Any) -> bytes:
    """A finished matplotlib figure as the bytes of a file, without the time of day in them."""
    stamp: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=stamp, dpi=PNG_DPI if kind == "png" else "figure", **options)
    return _shorter(buffer.getvalue()) if kind == "svg" else buffer.getvalue()


def _shorter(image: bytes) -> bytes:
    """The same SVG with path coordinates to a hundredth of a point, which halves the file."""
    return re.sub(rb' d="[^"]*"', lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]), image)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    figure: Figure = require("matplotlib.figure", "report").Figure(figsize=(width, height))
    return figure
