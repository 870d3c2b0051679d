"""`Artefact`: a file or folder that an export wrote, and what its verification found."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..certificates.certified import CertifiedModule
from ..errors import ArgumentError

if TYPE_CHECKING:
    from .verify import Verification


@dataclass(frozen=True)
class Artefact:
    """What an export wrote: its kind ("onnx", "hf", "plain", "lens"), where, and how it compared with the network.

    It can be used wherever a path is expected.
    """

    kind: str
    path: Path
    verification: Verification | None = None

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def verified(self, net: CertifiedModule, wanted: bool = True) -> Artefact:
        """The same with its verification, which raises if the artefact does something else than the network."""
        if not wanted:
            return self
        from .verify import verify

        return dataclasses.replace(self, verification=verify(self, net))


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
