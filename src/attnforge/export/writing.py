"""What every export shares: what is shown while it works, silence around other packages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ..certificates.certified import CertifiedModule
from ..errors import ArgumentError
from ..progress import stages


def network_of(net: object) -> CertifiedModule:
    """The argument, if it is a network of attnforge."""
    if not isinstance(net, CertifiedModule):
        raise ArgumentError(f"expected a network built by attnforge, got {type(net).__name__}")
    return net


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


def steps() -> AbstractContextManager[Callable[[str], None]]:
    """A function to call with the name of each step, shown on a terminal when it takes long.

    An export inside another shares its line.

    >>> with steps() as step, steps() as inner:
    ...     inner is step
    True
    """
    return stages(None, "exporting")
