"""MathML from others, let through only where it is MathML.

A formula is untrusted, and so is what a printer made of it. The text is taken apart and written again from a list of
known elements and attributes, so that nothing but a formula can come out.
"""

from __future__ import annotations

import html
from html.parser import HTMLParser

from ..errors import ArgumentError

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
