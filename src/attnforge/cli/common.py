"""What every command shares: the boundary where errors become words, numbers and boxes from text, options, output.

Nothing here loads PyTorch: `attnforge --version`, `--help` and a mistake in an option are answered at once.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from ..errors import ArgumentError, AttnforgeError, CertificateError, PurityError, closest
from ..extras import require
from ..progress import stages
from ..saving import MISTAKES, free_file

if TYPE_CHECKING:
    import torch

    from ..box import Box
    from ..certificates.certificate import Certificate
    from ..certificates.certified import CertifiedModule

# Exit codes: a check, or the machine (a full disk), failed; the command was used wrongly; the user interrupted it (128
# + SIGINT, as shells count).
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
# typer brings click along under different names in different versions; its own exceptions lead to it in all of them.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
CommandError: type[Exception] = typer.BadParameter.__mro__[2]

# What several commands take.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that are there already.")]
Saved = Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge.")]
FORMULAS = typer.Argument(metavar="FORMULA...", help="Such as 'sin(x*y) + exp(-x**2)/y'; several give several outputs.")
BOX = typer.Option("--box", metavar="NAME=LO:HI", help="The interval of one variable; once for each.")
#: What messages written for Python say of arguments, and the options that they are here.
IN_PYTHON = {
    "dtype=torch.float64": "--dtype float64",
    "absolute error as well, eps=": "absolute error as well, --eps ",
    "force=True": "--force",
    "give calibration=batches": "give --texts FILE",
    "max_length = ": "--length ",
    "max_length": "--length",
}
PICTURES = (".png", ".svg", ".pdf")  # what figures are drawn as
WIDE = 400  # columns of output that goes to no terminal: enough for any table of ours


class Named(StrEnum):
    """Names of dtypes, as options take them."""

    @property
    def torch(self) -> torch.dtype:
        from ..dtypes import DTYPES

        return DTYPES[self.value]


class DType(Named):
    """The dtypes that networks and heads ship in."""

    float32 = "float32"
    float64 = "float64"


Shipped = Annotated[DType, typer.Option(help="The dtype that ships and that the bound is for.")]


class Forge(TyperGroup):
    """The commands, and the boundary around them: a user's mistake is answered in words and an exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known:
            ctx.fail(f"there is no command '{args[0]}'{closest(args[0], known)}; known are {', '.join(known)}")
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = super().main
        code = guarded(lambda: run(args, prog_name, complete_var, False, windows_expand_args, **extra))
        return stop(code) if standalone_mode else code


def group(name: str, help: str) -> typer.Typer:
    """Commands under one name, which by itself shows its help."""
    found = typer.Typer(
        name=name, cls=Forge, add_completion=False, help=help, invoke_without_command=True, rich_markup_mode=None
    )

    @found.callback()
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            say(context.get_help())

    return found


class Command(TyperCommand):
    """A command that computes: what it needs is loaded when it runs, and its linear algebra keeps to one thread.

    Fits solve many small systems, which gain nothing from BLAS threads and wait for each other on a busy machine.
    """

    def invoke(self, ctx: Any) -> Any:
        for library in ("numpy", "torch"):  # a limit holds for the libraries that are loaded when it is set
            importlib.import_module(library)
        from ..threads import one_thread

        with one_thread():
            return super().invoke(ctx)


class TakesFormulas(Command):
    """A command whose arguments may begin with a minus sign: -m*B is a formula, not an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, [f" {arg}" if self._is_formula(arg) else arg for arg in args])

    def _is_formula(self, arg: str) -> bool:
        known = {name for parameter in self.params for name in parameter.opts} | {"-h"}
        return re.match(r"-[^-]", arg) is not None and arg not in known and not arg.endswith((".safetensors", ".html"))


class FileOrMachine(Command):
    """A command that needs a file, unless it is asked about the machine itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for parameter in self.params:
            if parameter.name == "file":
                parameter.required = "--machine" not in args
        return super().parse_args(ctx, args)


class WithPlot(Command):
    """A command whose --plot may stand alone: the file is then named after the first argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        found: list[str] = []
        for arg, following in zip(args, [*args[1:], "--"], strict=False):  # without arguments there is no first one
            found.append(arg)
            if arg == "--plot" and following.startswith("--"):
                found.append(f"{args[0] if args[0].isidentifier() else self.name}.png")
        return super().parse_args(ctx, found)


def guarded(command: Any) -> int:
    """Runs a command; its exit code, with every error that is not ours to debug said in words."""
    try:
        code = command()
        if sys.stdout is not None:  # it is None where it was closed before we began
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (CertificateError, PurityError) as error:
        return _complain(str(error), FAILED)
    except AttnforgeError as error:
        return _complain(as_options(str(error)), WRONG_USE)
    except UsageError as error:
        return _complain(_usage(error), WRONG_USE)
    except CommandError as error:
        return _complain(str(error), WRONG_USE)
    except BrokenPipeError:
        # The reader has gone, as in `attnforge functions | head -1`. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", WRONG_USE if isinstance(error, MISTAKES) else FAILED)
    except ImportError as error:  # an installation that is broken: what is optional has an error of its own
        return _complain(f"{error}; `pip install attnforge` brings what it needs", FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


_NAMED_BOX = re.compile(r"Box\(((?:\w+=\([^()]*\)(?:, )?)+)\)")


def as_options(message: str) -> str:
    """A message written for Python, with options where it tells what to pass.

    >>> as_options("add it, for example Box(z=(-1, 1)), or use dtype=torch.float64")
    'add it, for example --box z=-1:1, or use --dtype float64'
    """

    def sides(found: re.Match[str]) -> str:
        named = re.findall(r"(\w+)=\(([^,]*), ([^)]*)\)", found[1])
        return " ".join(f"--box {name}={lo}:{hi}" for name, lo, hi in named)

    for python, option in IN_PYTHON.items():
        message = message.replace(python, option)
    return _NAMED_BOX.sub(sides, message)


def stop(code: int) -> NoReturn:
    """Leave with an exit code."""
    raise SystemExit(code)


def _usage(error: Any) -> str:
    """typer's complaint in our form, with the command whose help says more."""
    text = str(error.format_message()).replace("Value error, ", "").rstrip(".")
    text = text[:1].lower() + text[1:]
    path = error.ctx.command_path if error.ctx is not None else "attnforge"
    return f"{text}\n{path} --help says more"


def _complain(text: str, code: int) -> int:
    output = console(stderr=True)
    output.print("[bold red]error:[/]", end=" ")
    output.out(text, highlight=False)
    return code


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # which `guarded` answers; rich would leave as if something had failed


def console(stderr: bool = False) -> Console:
    """Where to write: as wide as the terminal, and wide enough for any table where there is none."""
    found = _Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else _Console(stderr=stderr, highlight=False, width=WIDE)


def say(text: str = "") -> None:
    """A line, or several, as they are: no markup, no wrapping."""
    console().out(text, highlight=False)


def say_filled(text: str) -> None:
    """A long line, in lines as wide as the terminal."""
    output = console()
    say(textwrap.fill(text, output.width, subsequent_indent="  ") if output.is_terminal else text)


def say_json(found: Mapping[str, Any]) -> None:
    """One JSON object, on one line."""
    say(json.dumps(found, allow_nan=False))


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """A line on the terminal while something takes long; nothing where the output goes to a file.

    What it yields adds to the text.
    """
    with stages(None, text) as stage:
        yield stage


def say_certificate(found: Certificate) -> None:
    """A certificate as it is, or with its table folded where the terminal is narrower."""
    text, output = str(found), console()
    if not output.is_terminal or max(map(len, text.splitlines())) <= output.width or not found.terms:
        say(text)
        return
    from ..certificates.certificate import upper_text

    say(text.partition("\n\n")[0] + "\n")
    rows: list[tuple[str, ...]] = [(t.site, t.source, upper_text(t.value, 4), t.note) for t in found.terms]
    rows.append(("total", "", upper_text(found.bound, 4), ""))
    table(("site", "source", "at most", "note"), rows, right=("at most",))
    for line in text.rpartition("\ntotal")[2].splitlines()[1:]:  # lemmas, proofs, assumptions, the program
        say_filled(line)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Shows a table; the columns named in `right` stand right. Nothing is cut off: long cells fold."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in header:
        shown.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    lines = console()
    with lines.capture() as held:
        lines.print(shown, markup=False)
    text = "\n".join(line.rstrip() for line in held.get().splitlines())
    lines.out(text, highlight=False)


_PI = re.compile(r"([-+]?)(\d+\.?\d*|\.\d+)?\*?pi(?:/(\d+\.?\d*))?")


def number(text: str) -> float:
    """A number from a command line: as Python writes it, or a multiple of pi.

    >>> number("-8"), number("1e-3"), number("pi/2"), number("-2*pi")
    (-8.0, 0.001, 1.5707963267948966, -6.283185307179586)
    """
    try:
        return float(text)
    except ValueError:
        pass
    match = _PI.fullmatch(text.strip().lower())
    if match is None or float(match[3] or 1) == 0:
        raise typer.BadParameter(f"'{text}' is not a number; expected something like -8, 0.3, 1e-3 or 2*pi")
    return (-1.0 if match[1] == "-" else 1.0) * float(match[2] or 1) * math.pi / float(match[3] or 1)


def whole(text: str) -> int:
    """A whole number from a command line.

    >>> whole("32")
    32
    """
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is not a whole number; expected something like 32") from None


#: What options of numbers say of them.
NUMBER: dict[str, Any] = {"parser": number, "metavar": "NUMBER"}
COUNT: dict[str, Any] = {"parser": whole, "metavar": "COUNT"}


def interval(text: str) -> tuple[float, float]:
    """lo:hi as two numbers.

    >>> interval("-1:0.5")
    (-1.0, 0.5)
    """
    lo, colon, hi = text.partition(":")
    if not colon:
        raise typer.BadParameter(f"'{text}' is not an interval; expected lo:hi, such as -1:0.5")
    return number(lo), number(hi)


def box(texts: Sequence[str]) -> Box:
    """A named box from name=lo:hi, once for each variable.

    >>> box(["x=-1:1", "y=0.5:2"])
    Box(x=(-1, 1), y=(0.5, 2))
    """
    if not texts:
        raise ArgumentError("there is no box: give every variable an interval, --box name=lo:hi, such as --box x=-1:1")
    sides: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, equals, ends = (part.strip() for part in text.partition("="))
        hint = f"'--box {text}'"
        if not (equals and name):
            raise typer.BadParameter("expected name=lo:hi, such as --box x=-1:1", param_hint=hint)
        if name in sides:
            raise ArgumentError(f"the variable '{name}' is bounded twice: {name}=... may be given once")
        try:
            sides[name] = interval(ends)
        except typer.BadParameter as error:
            raise typer.BadParameter(error.message, param_hint=hint) from error
    from ..box import Box

    return Box(sides)


def formulas_of(texts: list[str]) -> str | list[str]:
    """One formula is a number at each point, several a row."""
    return texts[0].strip() if len(texts) == 1 else [text.strip() for text in texts]


def existing(file: Path) -> Path:
    """The file, or an error with the name beside it that may have been meant."""
    if file.is_dir():
        raise ArgumentError(f"'{file}' is a folder: expected a file")
    if not file.is_file():
        if file.exists():
            raise ArgumentError(f"'{file}' is a pipe or a device: expected a file, which can be read more than once")
        beside = (p.name for p in file.parent.iterdir() if p.is_file()) if file.parent.is_dir() else ()
        raise ArgumentError(f"there is no file '{file}'{closest(file.name, beside)}")
    return file


def require_pages() -> None:
    """`MissingExtra` where pages cannot be written: found out before the work, not after it."""
    require("jinja2", "report")
    require("matplotlib", "report")


def keep(net: CertifiedModule, output: Path | None, report: Path | None, force: bool) -> None:
    """Save a network and write its page, where they are asked for."""
    if output is not None:
        net.save(output, force=force)
    if report is not None:
        with waiting("writing the page"):
            net.report(report, force=force)


def refuse_overwriting(files: Mapping[str | tuple[str, ...], Path | None], force: bool) -> list[Path]:
    """The files that will be written, by what their names must end with; refused before any work is done."""
    wanted = [(kind, path) for kind, path in files.items() if path is not None]
    return [free_file(path, kind, force, make=kind == PICTURES) for kind, path in wanted]
