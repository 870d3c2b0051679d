"""A progress bar with the time that is left, on a terminal; nothing where the output goes to a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Progress


@contextmanager
def bar() -> Iterator[Callable[[Progress], None]]:
    """A function to call with the progress of a run."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description:<27}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    )
    output, day = Console(stderr=True), 86400.0
    # Cells may take minutes: what is left is estimated from the whole run, not from the last seconds.
    with progress.Progress(*columns, console=output, transient=True, speed_estimate_period=day) as shown:
        task = shown.add_task("starting", total=None)

        def update(now: Progress) -> None:
            shown.update(task, total=now.total, completed=now.done, description=now.experiment or "starting")

        yield update
