"""`attnforge demo`: a handful of certified heads, their table, their figures and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .. import demo as story
from .common import console, say, table


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where page and figures go.")] = Path("out/demo"),
    only: Annotated[list[str] | None, typer.Option(metavar="FUNCTION", help="Only this one; may be repeated.")] = None,
) -> None:
    """Fit heads for a handful of functions, show their certified bounds, and write figures and a page."""
    cases = story.chosen(only or [])
    output = console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output, transient=True, disable=not output.is_terminal) as progress:
        task = progress.add_task("starting", total=story.steps(cases))

        def step(text: str) -> None:
            progress.update(task, description=text, advance=1)

        results = story.run(cases, step)
        progress.stop()
        table(story.HEADER, [head.cells for head in results.heads], right=story.HEADER[2:])
        say(f"\n{story.NOTE}\n")
        table(story.OTHER_HEADER, [other.cells for other in results.others], right=story.OTHER_HEADER[2:])
        progress.start()
        written = story.write(results, out, step)
    say(f"\npage     {written.page}  (open it in a browser)")
    say(f"figures  {written.figures[0].parent}  ({len(written.figures)} files)")
    say(f"network  {written.network}  (attnforge check {written.network})")
    say(f"numbers  {written.numbers}")
