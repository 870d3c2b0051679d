"""Examples in docstrings as blocks of code: an extension of Python-Markdown, which reads `>>>` as three quotations."""

from __future__ import annotations

from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


def fenced(lines: list[str]) -> list[str]:
    """The lines, every example between fences; it ends at an empty line, as doctest has it.

    >>> fenced(["text", "", ">>> 1 + 1", "2", "", "more"])
    ['text', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'more']
    """
    found: list[str] = []
    code = example = False
    for line in lines:
        if line.lstrip().startswith("```"):
            code = not code
        if not code and not example and line.startswith(">>> "):
            found.append("```pycon")
            example = True
        elif example and not line.strip():
            found.append("```")
            example = False
        found.append(line)
    return [*found, "```"] if example else found


class _Examples(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return fenced(lines)


class Doctests(Extension):
    """Before fences are read."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Examples(md), "doctests", 28)


def makeExtension(**options: Any) -> Doctests:
    """The name under which Python-Markdown looks for an extension."""
    return Doctests(**options)
