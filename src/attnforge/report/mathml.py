"""Formulas on a page, as MathML: typeset from the text of a formula, or let through where it is MathML already.

`typeset` writes a formula the way one writes it by hand: fractions, exponents, roots, Greek letters. The text is taken
apart by the compiler's own tokenizer, so that what is shown is what was read; nothing is evaluated. `clean` takes
markup from others: a formula is untrusted, and so is what a printer made of it, so the markup is taken apart and
written again from a list of known elements and attributes, and nothing but a formula can come out.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from html.parser import HTMLParser

from ..errors import ArgumentError, FormulaError
from ..expressions.grammar import Token, tokens

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


class _MathWriter(HTMLParser):
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
    writer = _MathWriter()
    writer.feed(mathml)
    writer.close()
    if writer.open:
        raise ArgumentError(f"the MathML ends inside <{writer.open[-1]}>")
    text = "".join(writer.out).strip()
    if not text:
        raise ArgumentError("the MathML is empty")
    return text if text.startswith("<math") else f'<math display="block">{text}</math>'


SUM, PRODUCT, SIGN, POWER, ATOM = range(5)  # how tightly operators bind
DEEPEST = 60  # nested parentheses that are shown: far more than anyone reads, far fewer than would exhaust the stack
_SPELLED = """alpha beta gamma delta epsilon eps zeta eta theta iota kappa lamda lambda mu nu xi pi rho sigma tau phi
chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega hbar"""
GREEK = dict(zip(_SPELLED.split(), "αβγδεεζηθικλλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩħ", strict=True))


@dataclass(frozen=True)
class Piece:
    """A part of a formula: its markup and how tightly its outermost operator binds."""

    markup: str
    level: int = ATOM

    def within(self, level: int) -> str:
        """The markup, in parentheses where the surroundings bind more tightly."""
        return self.markup if self.level >= level else parentheses(self.markup)


def typeset(formula: str) -> str | None:
    """The formula in presentation MathML, or None where it is not a formula that the compiler reads.

    >>> typeset("x/2")
    '<mfrac><mi>x</mi><mn>2</mn></mfrac>'
    >>> typeset("Sequential") == "<mi>Sequential</mi>", typeset("x +")
    (True, None)
    """
    try:
        found = tokens(formula)
        several = found[0].text == "[" and found[-2].text == "]"
        reader = _FormulaReader([*found[1:-2], found[-1]] if several else found)
        parts = reader.whole()
    except FormulaError:
        return None
    if len(parts) > 1 or several:
        rows = "".join(f"<mtr><mtd>{part}</mtd></mtr>" for part in parts)
        return f'<mtable columnalign="left" rowspacing="0.6em">{rows}</mtable>'
    return parts[0]


def parentheses(markup: str) -> str:
    """The markup between parentheses, which grow with fractions and roots alone: fonts have few sizes of them."""
    fixed = "" if any(tall in markup for tall in ("<mfrac", "<msqrt", "<mtable")) else ' stretchy="false"'
    return f"<mrow><mo{fixed}>(</mo>{markup}<mo{fixed}>)</mo></mrow>"


def name(text: str) -> str:
    """A variable: Greek letters by their names, digits and what follows an underscore as an index.

    >>> name("theta2"), name("x_max")
    ('<msub><mi>θ</mi><mn>2</mn></msub>', '<msub><mi>x</mi><mi>max</mi></msub>')
    """
    match = re.fullmatch(r"(.*[^\W\d_])_?(\d+)", text) or re.fullmatch(r"([^\W_]+)_(\w+)", text)
    if match:
        index = f"<mn>{match[2]}</mn>" if match[2].isdigit() else f"<mi>{html.escape(match[2])}</mi>"
        return f"<msub>{name(match[1])}{index}</msub>"
    return f"<mi>{html.escape(GREEK.get(text, text))}</mi>"


class _FormulaReader:
    """Reads tokens with the precedences of `expressions.grammar`, from left to right."""

    def __init__(self, found: list[Token]):
        self.found, self.next, self.depth = found, 0, 0

    def whole(self) -> list[str]:
        parts = [self.read(SUM).markup]
        while self.peek() == ",":
            self.take()
            parts.append(self.read(SUM).markup)
        if self.found[self.next].kind != "end":
            raise FormulaError("this does not end where it should")
        return parts

    def peek(self) -> str:
        return self.found[self.next].text

    def take(self) -> Token:
        self.next += 1
        return self.found[self.next - 1]

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise FormulaError(f"expected {text}")

    def read(self, level: int) -> Piece:
        self.depth += 1
        if self.depth > DEEPEST:
            raise FormulaError("too deep to be shown")
        piece = self.operand()
        while True:
            sign = self.peek()
            if sign == "**" and level <= POWER:
                self.take()
                piece = Piece(f"<msup>{piece.within(ATOM)}<mrow>{self.read(SIGN).markup}</mrow></msup>", POWER)
            elif sign == "*" and level <= PRODUCT:
                self.take()
                piece = self.product(piece, self.read(SIGN))
            elif sign == "/" and level <= PRODUCT:
                self.take()
                piece = Piece(f"<mfrac>{_row(piece.markup)}{_row(self.read(SIGN).markup)}</mfrac>", SIGN)
            elif sign in ("+", "-") and level <= SUM:
                self.take()
                other = self.read(PRODUCT).within(PRODUCT)
                operator = "<mo>+</mo>" if sign == "+" else "<mo>−</mo>"
                piece = Piece(f"<mrow>{piece.markup}{operator}{other}</mrow>", SUM)
            else:
                break
        self.depth -= 1
        return piece

    def product(self, left: Piece, right: Piece) -> Piece:
        """Two factors side by side; a dot only where they would run together."""
        dot = "<mo>⋅</mo>" if right.markup.startswith(("<mn>", "<msup><mn>")) else '<mspace width="0.17em"></mspace>'
        return Piece(f"<mrow>{left.within(PRODUCT)}{dot}{right.within(SIGN)}</mrow>", PRODUCT)

    def operand(self) -> Piece:
        token = self.take()
        if token.kind == "number":
            return Piece(number(token.text))
        if token.kind == "name":
            return self.call(token.text) if self.peek() == "(" else Piece(name(token.text))
        if token.text in ("+", "-"):
            inner = self.read(SIGN).within(SIGN)
            return Piece(f"<mrow><mo>−</mo>{inner}</mrow>" if token.text == "-" else inner, SIGN)
        if token.text == "(":
            inner_piece = self.read(SUM)
            self.expect(")")
            return inner_piece
        raise FormulaError("expected a number, a name or a parenthesis")

    def call(self, function: str) -> Piece:
        self.expect("(")
        arguments = [self.read(SUM)]
        while self.peek() == ",":
            self.take()
            arguments.append(self.read(SUM))
        self.expect(")")
        inside = "<mo>,</mo>".join(a.markup for a in arguments)
        if len(arguments) == 1:
            match function:
                case "sqrt":
                    return Piece(f"<msqrt>{inside}</msqrt>")
                case "abs":
                    return Piece(f"<mrow><mo>|</mo>{inside}<mo>|</mo></mrow>")
                case "exp":
                    return Piece(f"<msup><mi>e</mi><mrow>{inside}</mrow></msup>", POWER)
        return Piece(f'<mrow><mi mathvariant="normal">{html.escape(function)}</mi>{parentheses(inside)}</mrow>')


def _row(markup: str) -> str:
    return markup if markup.startswith("<mrow>") or markup.count("<") == 2 else f"<mrow>{markup}</mrow>"


def number(text: str) -> str:
    """A number, with powers of ten written out."""
    mantissa, _, exponent = text.lower().partition("e")
    if not exponent:
        return f"<mn>{text}</mn>"
    power = f"<msup><mn>10</mn><mn>{str(int(exponent)).replace('-', '−')}</mn></msup>"
    return power if mantissa == "1" else f"<mrow><mn>{mantissa}</mn><mo>⋅</mo>{power}</mrow>"
