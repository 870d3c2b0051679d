"""What a page is made of. Parts are plain data; their markup is in `template/page.html`, one macro for each `kind`.

MathML from others, let through only where it is MathML.

A formula is untrusted, and so is what a printer made of it. The text is taken apart and written again from a list of
known elements and attributes, so that nothing but a formula can come out.

`Page`: one self-contained HTML file, from escaped text, tables, figures and formulas.

The page asks for nothing from outside: style, scripts and images are inside, and a content security policy that names
the hash of each script makes the browser hold us to it. Everything a caller passes in is data: the markup lives in
`template/`, rendered with autoescape on, so that a formula such as `<script>` is shown and never run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from importlib import metadata, resources
from itertools import count
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..charts.themes import Pair, render
from ..errors import ArgumentError
from ..extras import require

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
class Table:
    """A table, its cells already text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: tuple[str, ...]
    caption: str | None = None
    kind: ClassVar[str] = "table"

    @classmethod
    def of(
        cls, header: Sequence[str], rows: Iterable[Sequence[object]], caption: str | None, align: str | None
    ) -> Table:
        """Checks that every row has a cell for each column; works out the alignment where none is given.

        >>> Table.of(["name", "size"], [["gelu", 32], ["sin", 8]], None, None).align
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
        return cls(tuple(map(str, header)), text, tuple(names[a] for a in align), caption)


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
class Figure:
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
    """A formula: MathML that `mathml.clean` has let through."""

    mathml: str
    caption: str | None
    kind: ClassVar[str] = "math"


@dataclass(frozen=True)
class Plot:
    """A plotly figure as JSON without the character "<", and an image for where it cannot be drawn."""

    figure: str
    caption: str | None
    alt: str
    still: Figure | None
    kind: ClassVar[str] = "plot"


@dataclass(frozen=True)
class Details:
    """Parts that fold away under a summary."""

    summary: str
    open: bool
    parts: list[Part]
    kind: ClassVar[str] = "details"


Part = Heading | Text | Cards | Table | Figure | Code | Math | Plot | Details


ELEMENTS = frozenset({
    "math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "msqrt", "mroot", "mfrac", "msub", "msup", "msubsup",
    "munder", "mover", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded", "mphantom", "merror",
})  # fmt: skip
ATTRIBUTES = frozenset({
    "display", "displaystyle", "scriptlevel", "mathvariant", "width", "height", "depth", "lspace", "rspace", "voffset",
    "fence", "form", "largeop", "minsize", "maxsize", "movablelimits", "separator", "stretchy", "symmetric",
    "accent", "accentunder", "linethickness", "columnalign", "columnspacing", "rowspacing",
})  # fmt: skip
# Letters from Unicode's mathematical block are missing from many fonts; a plain upright letter never is.
LETTERS = str.maketrans({"ⅇ": "e", "ⅆ": "d", "ⅈ": "i"})


class _Writer(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            raise ArgumentError(f"<{tag}> is not an element of MathML that a page shows")
        kept = "".join(f' {k}="{html.escape(v or "")}"' for k, v in attrs if k in ATTRIBUTES)
        self.out.append(f"<{tag}{kept}>")
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise ArgumentError(f"</{tag}> closes no element that is open in the MathML")
        self.out.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.out.append(html.escape(data.translate(LETTERS)))


def clean(mathml: str) -> str:
    """The same formula, inside one <math> element and made of known elements only; else `ArgumentError`.

    >>> clean("<mrow><mi>x</mi><mo>&lt;</mo><mn onclick='run()'>1</mn></mrow>")
    '<math display="block"><mrow><mi>x</mi><mo>&lt;</mo><mn>1</mn></mrow></math>'
    >>> clean("<mtext><script>run()</script></mtext>")
    Traceback (most recent call last):
    attnforge.errors.ArgumentError: <script> is not an element of MathML that a page shows
    """
    writer = _Writer()
    writer.feed(mathml)
    writer.close()
    if writer.open:
        raise ArgumentError(f"the MathML ends inside <{writer.open[-1]}>")
    text = "".join(writer.out).strip()
    if not text:
        raise ArgumentError("the MathML is empty")
    return text if text.startswith("<math") else f'<math display="block">{text}</math>'


if TYPE_CHECKING:
    import matplotlib.figure

VERSIONS_OF = ("attnforge", "torch", "numpy", "python-flint")


class Block:
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
    ) -> Self:
        """A table. `align` has one letter per column, l, r or c; by default columns of numbers stand right.

        A float is shown with six digits, rounded to nearest: pass bounds as text, from `upper_text`.
        """
        return self._add(Table.of(header, rows, caption, align))

    def figure(
        self,
        image: str | bytes | Pair | matplotlib.figure.Figure,
        caption: str | None = None,
        alt: str = "",
    ) -> Self:
        """An image: SVG text, PNG bytes, a matplotlib figure, or the light and dark pair that `svg` draws."""
        return self._add(_figure(image, caption, alt))

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
        fallback: str | bytes | Pair | matplotlib.figure.Figure | None = None,
    ) -> Self:
        """An interactive plotly figure; `fallback` is the image shown in print and where scripts are off."""
        if not hasattr(figure, "to_json"):
            raise ArgumentError(f"expected a plotly figure, got {type(figure).__name__}")
        still = None if fallback is None else _figure(fallback, None, alt or caption or "chart")
        # "<" never reaches the page from the data, so that no string in it can end the script element.
        text = json.dumps(json.loads(figure.to_json())).replace("<", "\\u003c")
        return self._add(Plot(text, caption, alt, still))

    def details(self, summary: str, *, open: bool = False) -> Block:
        """A part that folds away under its summary; returns the block inside, to be filled."""
        inside = Block()
        self._add(Details(summary, open, inside.parts))
        return inside


class Page(Block):
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

    def __init__(self, title: str, subtitle: str | None = None):
        super().__init__()
        if not isinstance(title, str) or not title.strip():
            raise ArgumentError(f"a page's title is a text that is not empty, got {title!r}")
        self.title, self.subtitle = title, subtitle

    def html(self) -> str:
        """The whole page as one text."""
        headings = [part for part in self.parts if isinstance(part, Heading)]
        scripts = [_asset("page.js")]
        if any(isinstance(part, Plot) for part in _walk(self.parts)):
            scripts.insert(0, require("plotly.offline", "report").get_plotlyjs())
        text = (
            _environment()
            .get_template("page.html")
            .render(
                title=self.title,
                subtitle=self.subtitle,
                parts=self.parts,
                links=headings if len(headings) >= self.LINKS_FROM else [],
                style=_asset("page.css"),
                scripts=scripts,
                policy=_policy(scripts),
                versions=versions(),
            )
        )
        return str(text).lstrip()

    def save(self, path: str | Path) -> Path:
        """Writes the page, makes the folder if it is missing, and returns the path."""
        path = Path(path)
        if path.suffix.lower() not in {".html", ".htm"}:
            raise ArgumentError(f"a page is saved as .html, got {path.name!r}")
        text = self.html()
        path.parent.mkdir(parents=True, exist_ok=True)
        # The policy hashes the scripts byte for byte, so the platform must not translate line ends.
        path.write_text(text, encoding="utf-8", newline="\n")
        return path


def versions() -> list[tuple[str, str]]:
    """What made the page: the packages that the numbers depend on, and Python."""
    found = []
    for name in VERSIONS_OF:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "from source" if name == "attnforge" else "not installed"))
    return [*found, ("Python", platform.python_version())]


def _figure(image: Any, caption: str | None, alt: str) -> Figure:
    """Any of the accepted images as data URIs: inside an <img>, scripts in an SVG stay inert and ids cannot clash."""
    if not (alt or caption):
        raise ArgumentError("a figure needs a caption or an alt text: say what it shows")
    if isinstance(image, Pair):
        light, dark = _uri(image.light), _uri(image.dark)
    elif isinstance(image, str | bytes):
        light, dark = _uri(image), None
    elif hasattr(image, "savefig"):
        light, dark = _uri(render(image, "svg")), None
    else:
        raise ArgumentError(f"expected SVG text, PNG bytes or a matplotlib figure, got {type(image).__name__}")
    return Figure(light, dark, caption, alt or caption or "")


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


def _policy(scripts: Iterable[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}"


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / "template" / name).read_text("utf-8")


@cache
def _environment() -> Any:
    jinja2 = require("jinja2", "report")
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
