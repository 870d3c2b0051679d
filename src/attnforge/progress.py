"""Progress: whoever waits longer than two seconds sees what is going on."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

PATIENCE = 2.0  # seconds before a line is shown: what is done sooner needs none
P = ParamSpec("P")
R = TypeVar("R")
_outer: ContextVar[Callable[[str], None] | None] = ContextVar("outer", default=None)


@contextmanager
def stages(
    report: Callable[[str], None] | None = None, verb: str = "compiling"
) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each stage: passed on to `report`, or shown on a terminal after a while.

    Work inside other work shares its line.

    >>> seen = []
    >>> with stages(seen.append) as stage, stages() as inner:
    ...     stage("plan")
    ...     inner("lower")
    >>> seen
    ['plan', 'lower']
    """
    shared = _outer.get()
    if report is None and shared is not None:
        yield shared
        return
    with _line(verb) if report is None else _told(report) as stage:
        token = _outer.set(stage)
        try:
            yield stage
        finally:
            _outer.reset(token)


def shown(verb: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function during which a terminal says what is done, once it has taken a while."""

    def wrapped(work: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(work)
        def called(*arguments: P.args, **options: P.kwargs) -> R:
            with stages(None, verb):
                return work(*arguments, **options)

        return called

    return wrapped


@contextmanager
def _told(report: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    yield report


@contextmanager
def _line(verb: str) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that appears when `PATIENCE` is over; nothing where there is no terminal."""
    if not sys.stderr or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.status import Status

    status, lock, over = Status(verb, console=Console(stderr=True)), threading.Lock(), False

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
