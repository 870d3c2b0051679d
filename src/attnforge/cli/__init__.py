"""The command line: parse, call, show. One place where errors become words, and a table of the commands.

The module of a command is loaded when the command is asked for, and PyTorch when the command runs, so that `--version`,
`--help` and a mistake in an option are answered at once.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from .common import Command, FileOrMachine, Forge, TakesFormulas, WithPlot, say, stop


@dataclass(frozen=True)
class CommandEntry:
    """A command in the table: the module that holds it, what the help says of it, how its arguments are read."""

    module: str
    summary: str
    kind: type[TyperCommand] = Command

    def load(self, name: str) -> Any:
        """The command itself: the function of its name, or the commands below it."""
        found = getattr(importlib.import_module(f".{self.module}", __name__), name.replace("-", "_"))
        if isinstance(found, typer.Typer):
            return get_command(found)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)  # an interval such as [lo, hi] is no markup
        alone.command(name, cls=self.kind)(found)
        return get_command(alone)


#: The commands, in the order in which the help lists them.
COMMANDS = {
    "compile": CommandEntry("compile", "Compile a formula into a certified network.", TakesFormulas),
    "convert": CommandEntry("convert", "Convert a pretrained Hugging Face model to attention."),
    "rasp": CommandEntry("rasp", "Compile a token program into a network that is exact by proof."),
    "check": CommandEntry("saved", "Recompute the certificate of a saved network or head.", FileOrMachine),
    "run": CommandEntry("run", "Evaluate a saved network at the points of a file, or at sequences."),
    "export": CommandEntry("export", "Write a saved network for the tools of others: PyTorch, ONNX, ..."),
    "manifest": CommandEntry("saved", "Say what every head of a saved network is for, or check what was said."),
    "explain": CommandEntry("saved", "Show layer by layer what the heads of a saved network compute."),
    "explore": CommandEntry("saved", "Write a page in which a saved network runs."),
    "lipschitz": CommandEntry("saved", "Show how far the outputs of a saved network can move when its inputs do."),
    "quantise": CommandEntry("saved", "Write a saved network with few bits, certified again."),
    "plan": CommandEntry("compile", "Show how large a network for a formula would be.", TakesFormulas),
    "head": CommandEntry("head", "Fit one head to a function and print its certificate."),
    "functions": CommandEntry("head", "List the functions that formulas and heads can use."),
    "theorem": CommandEntry("theorem", "Build a theorem's network, or plan its size.", WithPlot),
    "demo": CommandEntry("demo", "Compile and fit a handful of things and write pages that show them."),
    "verify-pack": CommandEntry("catalogue", "Write problems with proved labels for verifiers of networks."),
    "lab": CommandEntry("lab", "Measure the claims of the theory and report what holds."),
    "catalogue": CommandEntry("catalogue", "Write a catalogue of networks whose every head is known."),
}


class Commands(Forge):
    """The commands of the table, each loaded when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return COMMANDS[cmd_name].load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


app = typer.Typer(
    cls=Commands,
    name="attnforge",
    help="Functions become attention-only networks, with a certificate of the largest error.",
    epilog="Exit codes: 0 fine, 1 a check failed or a file could not be written, 2 wrong use.",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("attnforge")
        except metadata.PackageNotFoundError:
            version = "from source"
        say(f"attnforge {version}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())


def main() -> None:
    """What the command `attnforge` runs."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal without some character should cost that character, not the result
            reconfigure(errors="replace")
    stop(app(prog_name="attnforge", standalone_mode=False))
