"""`attnforge demo`: three compiled networks and a handful of heads, their tables, their figures and their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..saving import free_folder
from .common import Force, console, say, table


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where everything goes.")] = Path("out/demo"),
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")] = None,
    force: Force = False,
) -> None:
    """Compile a formula, an MLP and a sequence function, fit a handful of heads, and write pages that show them.

    Every network is saved, and its certificate computed again from the file.
    """
    from .. import demo as story

    choice = story.Shown.of(only or [])
    free_folder(out, force, make=True)
    output = console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output, transient=True, disable=not output.is_terminal) as progress:
        task = progress.add_task("starting", total=choice.steps)

        def step(text: str) -> None:
            progress.update(task, description=text, advance=1)

        results = story.run(choice, step)
        progress.stop()
        if results.networks:
            table(story.NETWORK_HEADER, [made.cells for made in results.networks], right=story.NETWORK_HEADER[2:])
            say(f"\n{story.NETWORK_NOTE}\n")
        table(story.HEADER, [head.cells for head in results.heads], right=story.HEADER[2:])
        say(f"\n{story.NOTE}\n")
        table(story.OTHER_HEADER, [other.cells for other in results.others], right=story.OTHER_HEADER[2:])
        progress.start()
        written = story.write(results, out, step)
    say(f"\npage     {written.page}  (open it in a browser)")
    for path in written.pages:
        say(f"         {path}")
    say(f"figures  {written.figures[0].parent}  ({len(written.figures)} files)")
    first, *others = written.saved
    say(f"network  {first}  (attnforge check {first})")
    for path in others:
        say(f"         {path}")
    say(f"numbers  {written.numbers}")
