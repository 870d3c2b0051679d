"""What every command shares: the boundary where errors become words, numbers and boxes from text, output."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits
from typer.core import TyperCommand, TyperGroup

from ..box import Box
from ..errors import ArgumentError, AttnforgeError, CertificateError, PurityError, closest

CHECK_FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
# typer brings click along under different names in different versions; its own exceptions lead to it in all of them.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
CommandError: type[Exception] = typer.BadParameter.__mro__[2]


class DType(StrEnum):
    """The dtypes a head can ship in."""

    float32 = "float32"
    float64 = "float64"

    @property
    def torch(self) -> torch.dtype:
        return {"float32": torch.float32, "float64": torch.float64}[self.value]


class Forge(TyperGroup):
    """The commands, and the boundary around them: a user's mistake is answered in words and an exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
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


class TakesFormulas(TyperCommand):
    """A command whose arguments may begin with a minus sign: -m*B is a formula, not an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, [f" {arg}" if self._is_formula(arg) else arg for arg in args])

    def _is_formula(self, arg: str) -> bool:
        known = {name for parameter in self.params for name in parameter.opts} | {"-h"}
        return re.match(r"-[^-]", arg) is not None and arg not in known and not arg.endswith((".safetensors", ".html"))


def guarded(command: Any) -> int:
    """Runs a command; its exit code, with every error that is not ours to debug said in words.

    Fits solve many small systems, which gain nothing from BLAS threads and wait for each other on a busy machine.
    """
    try:
        with threadpool_limits(1, user_api="blas"):
            code = command()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (CertificateError, PurityError) as error:
        return _complain(str(error), CHECK_FAILED)
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
        return _complain(f"{where}{error.strerror or error}", WRONG_USE)
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

    return _NAMED_BOX.sub(sides, message.replace("dtype=torch.float64", "--dtype float64"))


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


def console(stderr: bool = False) -> Console:
    """Where to write: as wide as the terminal, and wide enough for any table where there is none."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=400)


def say(text: str = "") -> None:
    """A line, or several, as they are: no markup, no wrapping."""
    console().out(text, highlight=False)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on the terminal while something may take long; nothing where the output goes to a file.

    What it yields changes the text.
    """
    output = console(stderr=True)
    if not output.is_terminal:
        yield lambda text: None
        return
    with output.status(text) as status:
        yield lambda text: status.update(text)


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
    return (-1.0 if match[1] == "-" else 1.0) * float(match[2] or 1) * torch.pi / float(match[3] or 1)


def whole(text: str) -> int:
    """A whole number from a command line.

    >>> whole("32")
    32
    """
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is not a whole number; expected something like 32") from None


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
    return Box(sides)


def refuse_overwriting(files: Mapping[str, Path | None], force: bool) -> list[Path]:
    """The files that will be written, by what their names must end with; refused before any work is done."""
    wanted = [path for path in files.values() if path is not None]
    for suffix, path in files.items():
        if path is None:
            continue
        if path.suffix.lower() != suffix:
            raise ArgumentError(f"expected a file name that ends with {suffix}, got '{path}'")
        if path.is_dir() or (path.exists() and not force):
            raise ArgumentError(f"'{path}' is there already; --force overwrites it" if path.is_file() else
                                f"'{path}' is a folder")  # fmt: skip
        if not path.parent.is_dir():
            raise ArgumentError(f"cannot write '{path}': the folder '{path.parent}' does not exist")
    return wanted
