"""The formulas of the pages as MathML, which browsers show by themselves: no script, no font, nothing from elsewhere.

An extension of Python-Markdown: what `pymdownx.arithmatex` marks as TeX becomes MathML. It knows the commands that
these pages use; any other is an error that names it, so that no formula is ever shown wrong without a word.
"""

from __future__ import annotations

import html
import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

_LETTERS = """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma
    tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell partial nabla infty
    square hbar emptyset"""
LETTERS = dict(zip(_LETTERS.split(), "αβγδϵεζηθϑικλμνξπρστυϕφχψωΓΔΘΛΞΠΣΦΨΩℓ∂∇∞□ħ∅", strict=True))
_SIGNS = """le ge ne leq geq neq ll gg in notin to mapsto leftarrow rightarrow Rightarrow approx sim equiv propto pm mp
    cdot times circ odot oplus otimes wedge vee neg cup cap subset subseteq dots ldots cdots mid colon forall exists
    land lor top perp ast"""
SIGNS = dict(zip(_SIGNS.split(), "≤≥≠≤≥≠≪≫∈∉→↦←→⇒≈∼≡∝±∓⋅×∘⊙⊕⊗∧∨¬∪∩⊂⊆……⋯∣:∀∃∧∨⊤⊥∗", strict=True))
FENCES = {"langle": "⟨", "rangle": "⟩", "lceil": "⌈", "rceil": "⌉", "lfloor": "⌊", "rfloor": "⌋", "lvert": "|",
          "rvert": "|", "lVert": "‖", "rVert": "‖", "|": "‖", "{": "{", "}": "}"}  # fmt: skip
LARGE = {"sum": "∑", "prod": "∏", "bigcup": "⋃", "bigcap": "⋂"}
LIMITS = {"max", "min", "sup", "inf", "lim", "argmax", "argmin"}  # functions with what varies underneath
_NAMED = "log ln exp sin cos tan sinh cosh tanh coth arctan arcsin arccos deg det dim"
NAMED = frozenset(_NAMED.split())
SPACES = {",": 0.17, ":": 0.22, ";": 0.28, "!": -0.17, " ": 0.33, "quad": 1.0, "qquad": 2.0}
ACCENTS = {"hat": "^", "bar": "¯", "tilde": "~", "dot": "˙", "vec": "→", "overline": "¯", "widehat": "^"}
DOUBLE = dict(zip("RNZQCE", "ℝℕℤℚℂ𝔼", strict=True))
BIG = {"big": 1.2, "Big": 1.5, "bigg": 1.8, "Bigg": 2.1, "bigl": 1.2, "bigr": 1.2, "Bigl": 1.5, "Bigr": 1.5}
TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
ENDS = ("", "}", r"\right", "&", r"\\", r"\end")


def mathml(tex: str, block: bool = False) -> str:
    """A formula in TeX as MathML; ValueError where it uses what is not known here.

    >>> mathml(r"x_1 \\le 2")
    '<math><mrow><msub><mi>x</mi><mn>1</mn></msub><mo>≤</mo><mn>2</mn></mrow></math>'
    """
    reader = _Reader(tex)
    body = reader.row()
    if reader.peek() != "":
        raise ValueError(f"the formula {tex!r} goes on where it should end: {reader.peek()!r}")
    tag = f'<mspace width="2em"></mspace><mtext>({html.escape(reader.tag)})</mtext>' if reader.tag else ""
    display = ' display="block"' if block else ""
    return f"<math{display}>{_group([*body, tag] if tag else body)}</math>"


def _group(parts: list[str]) -> str:
    return f"<mrow>{''.join(parts)}</mrow>"


def _sign(text: str, stretchy: bool = False, extra: str = "") -> str:
    fence = "" if stretchy or text not in "()[]|‖{}⟨⟩⌈⌉⌊⌋" else ' stretchy="false"'
    fence += ' lspace="0" rspace="0"' if text and text in "/|‖" else ""
    return f"<mo{fence}{extra}>{html.escape(text)}</mo>"


class _Reader:
    """Reads TeX from left to right; a row ends where its surroundings say so."""

    def __init__(self, tex: str):
        self.tex, self.tokens, self.at, self.tag = tex, [t for t in TOKEN.findall(tex) if not t.isspace()], 0, ""
        # Inside \text{} spaces count: the text is taken from the formula itself, word by word.
        self.words = re.findall(r"\\(?:text|operatorname|texttt|mathrm|tag|textbf|textit)\*?\s*\{([^{}]*)\}", tex)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise ValueError(f"the formula {self.tex!r} ends too early")
        self.at += 1
        return token

    def row(self) -> list[str]:
        parts: list[str] = []
        while self.peek() not in ENDS:
            if self.peek() in ("^", "_", "'"):
                self.scripts(parts, parts.pop() if parts else "<mrow></mrow>")
            else:
                parts.append(self.atom())
        return parts

    def scripts(self, parts: list[str], base: str) -> None:
        below, above, primes = "", "", 0
        while self.peek() in ("^", "_", "'"):
            sign = self.take()
            if sign == "'":
                primes += 1
            elif sign == "^":
                above = self.argument()
            else:
                below = self.argument()
        if primes:  # the sign is a raised one already
            base = _group([base, f'<mo lspace="0" rspace="0">{"′" * primes}</mo>'])
            if not below and not above:
                parts.append(base)
                return
        limits = "movablelimits" in base
        low, high, both = ("munder", "mover", "munderover") if limits else ("msub", "msup", "msubsup")
        tag = both if below and above else low if below else high
        parts.append(f"<{tag}>{base}{below}{above}</{tag}>")

    def argument(self) -> str:
        """A group in braces, or a single atom; of a number its first digit, as TeX has it."""
        token = self.peek()
        if token == "{":
            self.take()
            inside = self.row()
            self.close("}")
            return inside[0] if len(inside) == 1 else _group(inside)
        if token[:1].isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.atom()

    def close(self, wanted: str) -> None:
        if self.take() != wanted:
            raise ValueError(f"{wanted!r} is missing in the formula {self.tex!r}")

    def text(self) -> str:
        if self.peek() == "*":
            self.take()
        self.close("{")
        while self.take() != "}":
            pass
        return html.escape(self.words.pop(0)).replace(r"\_", "_").replace("~", " ")

    def atom(self) -> str:
        token = self.take()
        if token == "{":
            self.at -= 1
            return self.argument()
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        return _sign({"-": "−", "*": "∗", "~": " "}.get(token, token))

    def command(self, name: str) -> str:
        if name in LETTERS:
            upright = ' mathvariant="normal"' if name[0].isupper() or name in ("infty", "square", "nabla") else ""
            return f"<mi{upright}>{LETTERS[name]}</mi>"
        if name in FENCES:
            return _sign(FENCES[name])
        if name in SIGNS:
            return _sign(SIGNS[name])
        if name in LARGE:
            return f'<mo movablelimits="true" largeop="true">{LARGE[name]}</mo>'
        if name in LIMITS:
            return f'<mo movablelimits="true" lspace="0.17em" rspace="0.17em">{name}</mo>'
        if name in NAMED:
            return f'<mo lspace="0.1em" rspace="0.1em">{name}</mo>'
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}em"></mspace>'
        if name in ACCENTS:
            return f'<mover accent="true">{self.argument()}<mo stretchy="false">{ACCENTS[name]}</mo></mover>'
        if name in BIG:
            return _sign(self.fence(), extra=f' style="font-size:{BIG[name]}em"')
        return self.construct(name)

    def fence(self) -> str:
        token = self.take()
        known = FENCES.get(token[1:], token[1:]) if token.startswith("\\") else token
        return "" if known == "." else known

    def construct(self, name: str) -> str:
        match name:
            case "int":
                return '<mo largeop="true">∫</mo>'
            case "frac" | "tfrac" | "dfrac" | "binom":
                over, under = self.argument(), self.argument()
                style = {"tfrac": ' displaystyle="false"', "dfrac": ' displaystyle="true"'}.get(name, "")
                if name == "binom":
                    choice = f'<mfrac linethickness="0">{over}{under}</mfrac>'
                    return _group([_sign("(", True), choice, _sign(")", True)])
                return f"<mfrac{style}>{over}{under}</mfrac>"
            case "underline":
                return f'<munder accentunder="true">{self.argument()}<mo>_</mo></munder>'
            case "sqrt":
                if self.peek() != "[":
                    return f"<msqrt>{self.argument()}</msqrt>"
                self.take()
                index = self.atom()
                self.close("]")
                return f"<mroot>{self.argument()}{index}</mroot>"
            case "text" | "textbf" | "textit":
                return f"<mtext>{self.text()}</mtext>"
            case "texttt":
                return f"<mtext><code>{self.text()}</code></mtext>"
            case "operatorname":
                return f'<mo lspace="0.1em" rspace="0.1em">{self.text()}</mo>'
            case "mathrm":
                return f'<mi mathvariant="normal">{self.text()}</mi>'
            case "tag":
                self.tag = self.text()
                return ""
            case "mathbb" | "mathbf" | "mathsf" | "mathcal":
                inside = self.argument()
                if name == "mathbb":
                    return re.sub(r">(\w)<", lambda m: f' mathvariant="normal">{DOUBLE[m[1]]}<', inside)
                style = "font-weight:bold" if name == "mathbf" else "font-style:normal"
                return f'<mrow style="{style}">{inside}</mrow>'
            case "textstyle" | "displaystyle":
                return f'<mstyle displaystyle="{str(name == "displaystyle").lower()}">{_group(self.row())}</mstyle>'
            case "left":
                opening, inside = self.fence(), self.row()
                self.close(r"\right")
                return _group([_sign(opening, True), *inside, _sign(self.fence(), True)])
            case "begin":
                return self.aligned(self.environment())
        raise ValueError(f"the command \\{name} of {self.tex!r} is not known to docs/tex.py: teach it there")

    def environment(self) -> str:
        self.close("{")
        letters = []
        while (token := self.take()) != "}":
            letters.append(token)
        return "".join(letters)

    def aligned(self, name: str) -> str:
        rows: list[list[str]] = [[]]
        while True:
            rows[-1].append(_group(self.row()))
            token = self.take()
            if token == r"\\":
                rows.append([])
            elif token == r"\end":
                break
            elif token != "&":
                raise ValueError(f"{token!r} stands where a cell of {name} ends in {self.tex!r}")
        if self.environment() != name:
            raise ValueError(f"an environment of {self.tex!r} is closed by another")
        sides = ("right", "left")  # of every other cell, so that they meet where & stands
        body = ""
        for row in rows:
            cells = (f'<mtd style="text-align:{sides[i % 2]}">{cell}</mtd>' for i, cell in enumerate(row))
            body += f"<mtr>{''.join(cells)}</mtr>"
        return f'<mtable displaystyle="true">{body}</mtable>'


# A block of its own; one within a paragraph, which is read as a formula between two dollars; and one in a line.
MARKED = re.compile(
    r'<div class="arithmatex">\s*\\\[(?P<block>.*?)\\\]\s*</div>'
    r'|\$<span class="arithmatex">\\\((?P<inner>.*?)\\\)</span>\$'
    r'|<span class="arithmatex">\\\((?P<line>.*?)\\\)</span>',
    re.DOTALL,
)


class _Formulas(Postprocessor):
    def run(self, text: str) -> str:
        def shown(found: re.Match[str]) -> str:
            block = found["line"] is None
            markup = mathml(html.unescape(next(filter(None, found.groups()))), block)
            return f'<span class="formula" tabindex="0">{markup}</span>' if block else markup

        return MARKED.sub(shown, text)


class Tex(Extension):
    """After everything else: what was set aside while the page was read is back by then."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(_Formulas(md), "tex", -10)


def makeExtension(**options: Any) -> Tex:
    """The name under which Python-Markdown looks for an extension."""
    return Tex(**options)
