"""Packages that are only needed for some things, imported when used, and the versions of those that are there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from .errors import MissingExtra


@contextmanager
def transformers_without_bars() -> Iterator[Any]:
    """The package transformers without its progress bars, which would run into ours; its settings come back."""
    transformers = require("transformers", "convert")
    logging = require("transformers.utils.logging", "convert")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        if shown:
            logging.enable_progress_bar()


def require(module: str, extra: str) -> Any:
    """The module, or `MissingExtra` naming what to install.

    >>> require("json", "report").loads("1")
    1
    >>> require("no_such_package.part", "report")
    Traceback (most recent call last):
    attnforge.errors.MissingExtra: this needs the package 'no_such_package', ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(module.split(".")[0], extra) from error


def version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed.

    >>> version("no-such-package") is None
    True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
