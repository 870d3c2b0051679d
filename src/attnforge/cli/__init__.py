"""The command line: parse, call, show. One file for each command, one place where errors become words."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..report.html import versions
from . import check, compile, convert, demo, explain, export, functions, head, lab, plan, run, theorem
from .common import Forge, TakesFormulas, say, stop

app = typer.Typer(
    cls=Forge,
    name="attnforge",
    help="Functions become attention-only networks, with a certificate of the largest error.",
    epilog="Exit codes: 0 fine, 1 a check failed, 2 wrong use.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # an interval such as [lo, hi] is no markup
)
app.command("compile", cls=TakesFormulas, short_help="Compile a formula into a certified network.")(compile.compile)
app.command("convert", short_help="Convert a pretrained Hugging Face model to attention.")(convert.convert)
app.command("check", short_help="Recompute the certificate of a saved network or head.")(check.check)
app.command("run", short_help="Evaluate a saved network at the points of a file.")(run.run)
app.command("export", short_help="Write a saved network for the tools of others: PyTorch, ONNX, ...")(export.export)
app.command("explain", short_help="Show layer by layer what the heads of a saved network compute.")(explain.explain)
app.command("plan", cls=TakesFormulas, short_help="Show how large a network for a formula would be.")(plan.plan)
app.command("head", short_help="Fit one head to a function and print its certificate.")(head.head)
app.command("functions", short_help="List the functions that formulas and heads can use.")(functions.functions)
app.command("theorem", cls=theorem.WithPlot, short_help="Build a theorem's network, or plan its size.")(theorem.theorem)
app.add_typer(lab.app, name="lab", short_help="Measure the claims of the theory and report what holds.")
app.command("demo", short_help="Compile and fit a handful of things and write pages that show them.")(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"attnforge {dict(versions())['attnforge']}")
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
