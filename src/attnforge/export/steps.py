"""Silence around other people's packages: their notices are not about the network at hand.

What an export is doing, shown on a terminal when it takes long; an export inside another shares its line.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..progress import stages


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and log lines; everything restored afterwards."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)


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
