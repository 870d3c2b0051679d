"""Progress: whoever waits longer than two seconds sees what is going on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def stages(
    report: Callable[[str], None] | None = None, verb: str = "compiling"
) -> Iterator[Callable[[str], None]]:
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

    status, lock, over = Status("", console=Console(stderr=True)), threading.Lock(), False

    def show() -> None:
        with lock:
            if not over:
                status.start()

    # A timer, so that a first stage that takes long is shown while it lasts.
    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda name: status.update(f"{verb}: {name}")
    finally:
        timer.cancel()
        with lock:
            over = True
            status.stop()
