"""What a page is made of. Parts are plain data; their markup is in `template/page.html`, one macro for each `kind`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal

from ..errors import ArgumentError

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
