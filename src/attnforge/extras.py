"""Packages that are only needed for pages and figures, imported when used."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import MissingExtra


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
