"""`attnforge rasp`: a token program of the library, or one from a file, becomes a network with a proof."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from .common import (
    COUNT,
    AsJson,
    DType,
    Force,
    existing,
    keep,
    refuse_overwriting,
    require_pages,
    say,
    say_json,
    table,
    waiting,
)

if TYPE_CHECKING:
    from ..rasp import Sequences, SOp

LARGEST = 1_000_000  # bytes of a program's file: five times the longest text that is read


def rasp(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PROGRAM] [NAME=VALUE]...", help="A program of the library.")
    ] = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Characters, such as abcd, or values with commas, such as 1,2,3."),
    ] = None,
    length: Annotated[int, typer.Option(help="The longest sequence.", **COUNT)] = 10,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the program from a text file.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="No position looks at later ones.")] = False,
    bos: Annotated[str | None, typer.Option(metavar="TOKEN", help="A marker before every sequence.")] = None,
    dtype: Annotated[DType, typer.Option(help="The dtype that ships and that the proof is for.")] = DType.float32,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the network as .safetensors.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page about it, as .html.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the program as text and build nothing.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the programs of the library.")] = False,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Compile a token program into an attention-only network that is proved right on every sequence.

    A program comes from the library or, with --file, from a text that is read and never executed.

    \b
    attnforge rasp reverse --vocabulary abcd --length 40 -o reverse.safetensors
    attnforge rasp count token=b --vocabulary abc --length 20
    attnforge rasp --file program.rasp --vocabulary abcd --length 40 -o net.safetensors
    attnforge run reverse.safetensors abcd
    """
    if listed:
        _list(as_json)
        return
    given = [tokens_of(vocabulary)] if vocabulary is not None else []
    marker = {} if bos is None else {"bos": value_of(bos)}
    program, domain = _chosen(words or [], file, given, length, causal, marker)
    if show:
        say(program.to_text())
        return
    from ..compiler.pipeline import compile as build

    written = refuse_overwriting({".safetensors": output, ".html": report}, force)
    if report is not None:
        require_pages()
    start = time.perf_counter()
    with waiting("compiling"):
        net = build(program, domain, dtype=dtype.torch)
    seconds = time.perf_counter() - start
    keep(net, output, report, force)
    certificate = net.certificate
    if as_json:
        size = {name: value for name, value in vars(net.size).items() if isinstance(value, int | float | str)}
        found = {
            "target": certificate.target, "kind": certificate.kind, "dtype": certificate.dtype, "size": size,
            "vocabulary": [str(token) for token in domain.vocabulary], "max_length": domain.max_length,
            "seconds": seconds, "certificate": certificate.to_json(), "written": [str(path) for path in written],
        }  # fmt: skip
        say_json(found)
        return
    say(f"{net.size}, compiled in {seconds:.1f} s\n\n{certificate}")
    for path in written:
        say(f"wrote {path}")


def value_of(text: str) -> Any:
    """A value from a command line: a whole number where it reads as one, else the text; quotes keep a number text.

    >>> value_of("3"), value_of("'3'"), value_of("ab")
    (3, '3', 'ab')
    """
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def tokens_of(text: str) -> list[Any]:
    """A vocabulary from a command line.

    >>> tokens_of("abc"), tokens_of("1,2,up")
    (['a', 'b', 'c'], [1, 2, 'up'])
    """
    return [value_of(part) for part in text.split(",")] if "," in text else list(text)


def _chosen(
    words: list[str], file: Path | None, given: list[list[Any]], length: int, causal: bool, marker: dict[str, Any]
) -> tuple[SOp, Sequences]:
    """The program and its domain."""
    from ..rasp import Sequences, library, parse

    if file is not None:
        if words:
            raise ArgumentError(f"give a program of the library or --file, not both: '{words[0]}' and '{file}'")
        if not given:
            raise ArgumentError("a program from a file needs --vocabulary, such as --vocabulary abcd")
        if existing(file).stat().st_size > LARGEST:
            raise ArgumentError(f"'{file}' has more than {LARGEST:,} bytes; a program is a short text")
        try:
            text = file.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ArgumentError(f"'{file}' is not text in UTF-8: {error}") from error
        return parse(text), Sequences(given[0], length, causal, **marker)
    if not words or "=" in words[0]:
        raise ArgumentError("which program? give its name, --file, or --list to see the library")
    wrong = next((word for word in words[1:] if not re.match(r"\w+=", word)), None)
    if wrong is not None:
        raise ArgumentError(f"expected name=value after the program, got '{wrong}'")
    entry = library.get(words[0])
    domain = Sequences(given[0] if given else entry.vocabulary, length, causal, **marker)
    settings = {name: value_of(value) for name, _, value in (word.partition("=") for word in words[1:])}
    return entry.program(domain, **settings), domain


def _list(as_json: bool) -> None:
    from ..rasp.library import PROGRAMS

    if as_json:
        say_json({name: {"summary": e.summary, "parameters": list(e.parameters)} for name, e in PROGRAMS.items()})
        return
    rows = [[name, ", ".join(e.parameters), e.summary] for name, e in PROGRAMS.items()]
    table(["program", "settings", "what it does"], rows)
