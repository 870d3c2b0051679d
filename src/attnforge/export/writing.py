"""What every export shares: paths that may be written, what is shown while it works, silence around other packages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ..certificates.certified import CertifiedModule
from ..errors import ArgumentError
from ..progress import stages


def network_of(net: object) -> CertifiedModule:
    """The argument, if it is a network of attnforge."""
    if not isinstance(net, CertifiedModule):
        raise ArgumentError(f"expected a network built by attnforge, got {type(net).__name__}")
    return net


def free_file(path: str | Path, suffix: str, force: bool = False) -> Path:
    """A path that may be written: right ending, in a folder that exists, nothing there unless `force`.

    >>> free_file("net.txt", ".onnx")
    Traceback (most recent call last):
    attnforge.errors.ArgumentError: expected a file name that ends with .onnx, got 'net.txt'
    """
    target = Path(path)
    if target.suffix.lower() != suffix:
        raise ArgumentError(f"expected a file name that ends with {suffix}, got '{target}'")
    if target.is_dir():
        raise ArgumentError(f"'{target}' is a folder")
    _refuse(target, force)
    return target


def free_folder(path: str | Path, force: bool = False) -> Path:
    """A folder that may be written: empty or not there yet, unless `force`."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"'{target}' is a file; expected a folder")
    if target.is_dir() and not any(target.iterdir()):
        return target
    _refuse(target, force)
    return target


def _refuse(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise ArgumentError(f"'{target}' is there already; force=True (on the command line --force) overwrites it")
    if not target.parent.is_dir():
        raise ArgumentError(f"cannot write '{target}': the folder '{target.parent}' does not exist")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and log lines of other packages, which are not about the network at hand."""
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
    """A function to call with the name of each step, shown on a terminal when it takes long.

    An export inside another shares its line.

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
