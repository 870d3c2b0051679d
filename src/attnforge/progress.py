"""Progress: whoever waits longer than two seconds sees what is going on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def stages(report: Callable[[str], None] | None = None) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each stage: passed on to `report`, or shown on a terminal after a while.

    >>> seen = []
    >>> with stages(seen.append) as stage:
    ...     stage("plan")
    >>> seen
    ['plan']
    """
    if report is not None:
        yield report
        return
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.status import Status

    status = Status("", console=Console(stderr=True))
    began, shown = time.monotonic(), False

    def stage(name: str) -> None:
        nonlocal shown
        if time.monotonic() - began > PATIENCE and not shown:
            status.start()
            shown = True
        status.update(name)

    try:
        yield stage
    finally:
        status.stop()
