"""What an export is doing, shown on a terminal when it takes long; an export inside another shares its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..progress import stages

_outer: ContextVar[Callable[[str], None] | None] = ContextVar("outer", default=None)


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each step.

    >>> with steps() as step, steps() as inner:
    ...     inner is step
    True
    """
    shown = _outer.get()
    if shown is not None:
        yield shown
        return
    with stages(None, "exporting") as stage:
        token = _outer.set(stage)
        try:
            yield stage
        finally:
            _outer.reset(token)
