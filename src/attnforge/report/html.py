"""`Page`: one self-contained HTML file, from escaped text, tables, figures and formulas.

Parts of a page are plain data; their markup is in `template/page.html`, one macro for each `kind`. The page asks for
nothing from outside: style, scripts and images are inside, and a content security policy that names the hash of each
script makes the browser hold us to it. Everything a caller passes in is data: the markup lives in `template/`, rendered
with autoescape on, so that a formula such as `<script>` is shown and never run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import count
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..charts.chart import Figure
from ..charts.drawing import svg
from ..charts.themes import ThemePair, render
from ..errors import ArgumentError
from ..extras import require, version
from ..saving import free_file, write_whole
from .mathml import clean

Span = tuple[Literal["plain", "bold", "code"], str]
_MARKS = re.compile(r"`([^`\n]+)`|\*\*([^*\n]+)\*\*")


@dataclass(frozen=True)
class Heading:
    """A section's title; `anchor` is where links to it lead."""

    title: str
    anchor: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Text:
    """Paragraphs, each a row of spans."""

    paragraphs: tuple[tuple[Span, ...], ...]
    kind: ClassVar[str] = "text"

    @classmethod
    def read(cls, text: str) -> Text:
        """Takes apart blank lines, `code` and **bold**.

        >>> Text.read("a **b** `c`").paragraphs
        ((('plain', 'a '), ('bold', 'b'), ('plain', ' '), ('code', 'c')),)
        """
        paragraphs = (p.strip() for p in re.split(r"\n\s*\n", text))
        return cls(tuple(tuple(_spans(p)) for p in paragraphs if p))


def _spans(paragraph: str) -> Iterable[Span]:
    end = 0
    for mark in _MARKS.finditer(paragraph):
        if mark.start() > end:
            yield "plain", paragraph[end : mark.start()]
        yield ("code", mark[1]) if mark[1] is not None else ("bold", mark[2])
        end = mark.end()
    if end < len(paragraph):
        yield "plain", paragraph[end:]


@dataclass(frozen=True)
class Cards:
    """Key figures: label, value and note."""

    cards: tuple[tuple[str, str, str], ...]
    kind: ClassVar[str] = "cards"

    @classmethod
    def of(cls, cards: Iterable[tuple[str, object, str]]) -> Cards:
        rows = [tuple(card) for card in cards]
        if any(len(row) != 3 for row in rows):
            raise ArgumentError("each card is (label, value, note); an empty note is left out")
        return cls(tuple((str(label), cell_text(value), str(note or "")) for label, value, note in rows))


@dataclass(frozen=True)
class HtmlTable:
    """A table, its cells already text; `links` are where first cells lead, `filtered` asks for a field to search."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: tuple[str, ...]
    caption: str | None = None
    links: tuple[str, ...] = ()
    filtered: bool = False
    kind: ClassVar[str] = "table"

    @classmethod
    def of(
        cls, header: Sequence[str], rows: Iterable[Sequence[object]], caption: str | None, align: str | None,
        links: Sequence[str] = (), filtered: bool = False,
    ) -> HtmlTable:  # fmt: skip
        """Checks that every row has a cell for each column; works out the alignment where none is given.

        >>> HtmlTable.of(["name", "size"], [["gelu", 32], ["sin", 8]], None, None).align
        ('left', 'right')
        """
        body = [tuple(row) for row in rows]
        for number, row in enumerate(body, 1):
            if len(row) != len(header):
                raise ArgumentError(f"row {number} of the table has {len(row)} cells, the header {len(header)}")
        names = {"l": "left", "r": "right", "c": "center"}
        if align is None:
            columns = zip(*body, strict=True) if body else [()] * len(header)
            align = "".join("r" if c and all(map(_is_number, c)) else "l" for c in columns)
        if len(align) != len(header) or not set(align) <= set(names):
            raise ArgumentError(f"align has one letter of l, r, c for each of {len(header)} columns, got {align!r}")
        text = tuple(tuple(cell_text(cell) for cell in row) for row in body)
        if links and len(links) != len(body):
            raise ArgumentError(f"a table of {len(body)} rows has a link for each row or none, got {len(links)}")
        return cls(tuple(map(str, header)), text, tuple(names[a] for a in align), caption, tuple(links), filtered)


def _is_number(cell: object) -> bool:
    if isinstance(cell, str):
        return re.fullmatch(r"\s*[-+−]?[\d.,]+([eE][-+]?\d+)?\s*[%×x]?\s*|[-–—]?", cell) is not None
    return cell is None or (isinstance(cell, Real) and not isinstance(cell, bool))


def cell_text(value: object) -> str:
    """How a value stands in a table or on a card: text as it is, None as a dash, a float with six digits.

    >>> [cell_text(v) for v in ("<b>", None, 1 / 3, 32, 1.5e-10)]
    ['<b>', '–', '0.333333', '32', '1.5e-10']
    """
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Image:
    """An image as a data URI, with a second one for dark pages where there is one."""

    light: str
    dark: str | None
    caption: str | None
    alt: str
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Code:
    """Text as it stands."""

    code: str
    caption: str | None
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Math:
    """A formula: MathML that `clean` has let through."""

    mathml: str
    caption: str | None
    kind: ClassVar[str] = "math"


@dataclass(frozen=True)
class Plot:
    """A plotly figure as JSON without the character "<", and an image for where it cannot be drawn."""

    figure: str
    caption: str | None
    alt: str
    still: Image | None
    kind: ClassVar[str] = "plot"


@dataclass(frozen=True)
class Details:
    """Parts that fold away under a summary."""

    summary: str
    open: bool
    parts: list[Part]
    kind: ClassVar[str] = "details"


@dataclass(frozen=True)
class Links:
    """Pages beside this one or in a folder beside it: (title, file, note) each."""

    links: tuple[tuple[str, str, str], ...]
    kind: ClassVar[str] = "links"

    @classmethod
    def of(cls, links: Iterable[tuple[str, str, str]]) -> Links:
        rows = tuple((str(title), str(file), str(note)) for title, file, note in links)
        for title, file, _ in rows:
            if not title or not re.fullmatch(r"([\w-]+/)?[\w-][\w.-]*\.html?", file):
                raise ArgumentError(f"a page links to files beside it, such as net.html; got {file!r} for {title!r}")
        return cls(rows)


def _above(title: str, file: str) -> tuple[str, str]:
    """A link to a page in this folder or in one that holds it."""
    way = re.match(r"(\.\./){0,2}", file)
    assert way is not None
    beside, *_ = Links.of([(title, file[way.end() :], "")]).links
    return title, way[0] + beside[1]


Part = Heading | Text | Cards | HtmlTable | Image | Code | Math | Plot | Details | Links


if TYPE_CHECKING:
    import matplotlib.figure

    Drawable = str | bytes | ThemePair | Figure | matplotlib.figure.Figure

#: The packages that the numbers on a page depend on.
VERSIONS_OF = ("attnforge", "torch", "numpy", "python-flint")


class PageBlock:
    """A column of parts. Each method appends one and returns the block, so that calls can be chained."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def _add(self, part: Part) -> Self:
        self.parts.append(part)
        return self

    def section(self, title: str) -> Self:
        """A heading; pages with several of them get a line of links to all."""
        anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        taken = {part.anchor for part in self.parts if isinstance(part, Heading)}
        free = (name for n in count(1) if (name := anchor if n == 1 else f"{anchor}-{n}") not in taken)
        return self._add(Heading(title, next(free)))

    def text(self, text: str) -> Self:
        """Paragraphs, separated by blank lines, with **bold** and `code`; nothing else has a meaning."""
        return self._add(Text.read(text))

    def cards(self, cards: Iterable[tuple[str, object, str]]) -> Self:
        """Key figures: (label, value, note) each; an empty note is left out."""
        return self._add(Cards.of(cards))

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[object]],
        caption: str | None = None,
        align: str | None = None,
        links: Sequence[str] = (),
        filtered: bool = False,
    ) -> Self:
        """A table. `align` has one letter per column, l, r or c; by default columns of numbers stand right. `links` are
        where the first cells of rows lead; `filtered` puts a field above, which hides rows without its words.

        A float is shown with six digits, rounded to nearest: pass bounds as text, from `upper_text`.
        """
        return self._add(HtmlTable.of(header, rows, caption, align, links, filtered))

    def figure(
        self,
        image: Drawable,
        caption: str | None = None,
        alt: str = "",
    ) -> Self:
        """A chart, which brings its caption; or SVG text, PNG bytes, a matplotlib figure, a light and dark pair."""
        return self._add(_image(image, caption, alt))

    def code(self, code: str, caption: str | None = None) -> Self:
        """Text as it stands, in a fixed-width font."""
        return self._add(Code(code, caption))

    def math(self, mathml: str, caption: str | None = None) -> Self:
        """A formula in presentation MathML, for example from `sympy.mathml(expr, printer="presentation")`."""
        return self._add(Math(clean(mathml), caption))

    def plotly(
        self,
        figure: Any,
        caption: str | None = None,
        alt: str = "",
        fallback: Drawable | None = None,
    ) -> Self:
        """An interactive plotly figure; `fallback` is the image shown in print and where scripts are off."""
        if not hasattr(figure, "to_json"):
            raise ArgumentError(f"expected a plotly figure, got {type(figure).__name__}")
        still = None if fallback is None else _image(fallback, None, alt or caption or "chart")
        # "<" never reaches the page from the data, so that no string in it can end the script element.
        text = json.dumps(json.loads(figure.to_json())).replace("<", "\\u003c")
        return self._add(Plot(text, caption, alt, still))

    def links(self, links: Iterable[tuple[str, str, str]]) -> Self:
        """Pages in the same folder: (title, file, note) each."""
        return self._add(Links.of(links))

    def details(self, summary: str, *, open: bool = False) -> PageBlock:
        """A part that folds away under its summary; returns the block inside, to be filled."""
        inside = PageBlock()
        self._add(Details(summary, open, inside.parts))
        return inside


class Page(PageBlock):
    """One self-contained HTML page, light and dark, that also prints.

    >>> page = Page("A head for gelu", "32 anchors on [-8, 8]")
    >>> _ = page.text("Its bound is **certified**.").table(["dtype", "bound"], [["float64", "1.6e-10"]])
    >>> "<strong>certified</strong>" in page.html()
    True
    >>> "<script>alert" in Page("<script>alert(1)</script>").html()
    False
    """

    # A page this short needs no links to its own sections.
    LINKS_FROM: ClassVar[int] = 4

    def __init__(self, title: str, subtitle: str | None = None, up: tuple[str, str] | None = None):
        """`up` is the title and the file of the page that this one belongs to, in its folder or one or two above it."""
        super().__init__()
        if not isinstance(title, str) or not title.strip():
            raise ArgumentError(f"a page's title is a text that is not empty, got {title!r}")
        self.title, self.subtitle, self.up = title, subtitle, None if up is None else _above(*up)

    def html(self) -> str:
        """The whole page as one text."""
        headings = [part for part in self.parts if isinstance(part, Heading)]
        scripts = [asset("page.js")]
        if any(isinstance(part, Plot) for part in _walk(self.parts)):
            scripts.insert(0, require("plotly.offline", "report").get_plotlyjs())
        text = (
            _environment()
            .get_template("page.html")
            .render(
                title=self.title,
                subtitle=self.subtitle,
                up=self.up,
                parts=self.parts,
                links=headings if len(headings) >= self.LINKS_FROM else [],
                style=asset("page.css"),
                scripts=scripts,
                policy=policy(scripts),
                versions=versions(),
            )
        )
        return str(text).lstrip()

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the page, makes the folder if it is missing, and returns the path.

        A file that is there already is refused unless `force=True`.
        """
        path = free_file(path, (".html", ".htm"), force, make=True)
        text = self.html()
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, text)


def versions() -> list[tuple[str, str]]:
    """What made the page: the packages that the numbers depend on, and Python."""
    missing = {"attnforge": "from source"}
    found = [(name, version(name) or missing.get(name, "not installed")) for name in VERSIONS_OF]
    return [*found, ("Python", platform.python_version())]


def _image(image: Any, caption: str | None, alt: str) -> Image:
    """Any of the accepted images as data URIs: inside an <img>, scripts in an SVG stay inert and ids cannot clash."""
    if isinstance(image, Figure):
        image, caption, alt = svg(image), caption or image.caption, alt or image.alt
    if not (alt or caption):
        raise ArgumentError("a figure needs a caption or an alt text: say what it shows")
    if isinstance(image, ThemePair):
        light, dark = _uri(image.light), _uri(image.dark)
    elif isinstance(image, str | bytes):
        light, dark = _uri(image), None
    elif hasattr(image, "savefig"):
        light, dark = _uri(render(image, "svg")), None
    else:
        raise ArgumentError(f"expected SVG text, PNG bytes or a matplotlib figure, got {type(image).__name__}")
    return Image(light, dark, caption, alt or caption or "")


def _uri(image: str | bytes) -> str:
    data = image.encode() if isinstance(image, str) else image
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        kind = "image/png"
    elif re.match(rb"\s*(<\?xml|<!DOCTYPE svg|<!--|<svg)", data):
        kind = "image/svg+xml"
    else:
        raise ArgumentError(f"expected an SVG or a PNG image, got data that starts with {data[:12]!r}")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _walk(parts: Iterable[Part]) -> Iterable[Part]:
    for part in parts:
        yield part
        if isinstance(part, Details):
            yield from _walk(part.parts)


def policy(scripts: Iterable[str]) -> str:
    """The content security policy of a page that runs these scripts and asks for nothing from outside."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}"


@cache
def asset(name: str) -> str:
    """A file of the template."""
    return (resources.files(__package__) / "template" / name).read_text("utf-8")


@cache
def _environment() -> Any:
    jinja2 = require("jinja2", "report")
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Captions know code alone: two stars in a row are more often a power than bold print.
    made.globals["pieces"] = lambda text: [(i % 2, piece) for i, piece in enumerate(re.split(r"`([^`\n]+)`", text))]
    return made
