"""How files are written: whole or not at all, and over what is there only when asked to; and their hash."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import ArgumentError


def free_file(path: str | Path, suffixes: str | Sequence[str] = (), force: bool = False, make: bool = False) -> Path:
    """A path that may be written: right ending, nothing there unless `force`, in a folder that exists or, with `make`,
    can be made.

    >>> free_file("net.txt", ".onnx")
    Traceback (most recent call last):
    attnforge.errors.ArgumentError: expected a file name that ends with .onnx, got 'net.txt'
    """
    target, known = Path(path), (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    if known and target.suffix.lower() not in known:
        raise ArgumentError(f"expected a file name that ends with {', '.join(known)}, got '{target}'")
    if target.is_dir():
        raise ArgumentError(f"'{target}' is a folder: expected the name of a file")
    _refuse(target, force, make)
    return target


def free_folder(path: str | Path, force: bool = False, make: bool = False) -> Path:
    """A folder that may be written: empty or not there yet, unless `force`; with `make`, those above it are made."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"'{target}' is a file; expected a folder")
    if not (target.is_dir() and not any(target.iterdir())):
        _refuse(target, force, make)
    return target


def _refuse(target: Path, force: bool, make: bool = False) -> None:
    if (target.is_file() or target.is_dir()) and not force:
        raise ArgumentError(f"'{target}' is there already; force=True overwrites it")
    if not make and not target.parent.is_dir():
        raise ArgumentError(f"cannot write '{target}': the folder '{target.parent}' does not exist")


def write_whole(path: str | Path, data: bytes | str) -> Path:
    """Write a file so that a reader, a full disk or an interruption finds the old one or the new one, nothing between.

    Text is written in UTF-8 with line ends as they are. An `OSError` names the file that was to be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # a device or a pipe is written to, not replaced
        with _naming(target):
            target.write_bytes(data.encode() if isinstance(data, str) else data)
        return target
    place = target.resolve()  # where a link points to: the link stays
    partial = place.with_name(f".{place.name[:64]}.{secrets.token_hex(4)}.part")
    with _naming(target):
        try:
            with partial.open("xb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())  # before the name points here: after a crash the file is whole, too
            if place.exists():
                shutil.copymode(place, partial)
            partial.replace(place)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return target


@contextmanager
def whole_folder(path: str | Path, last: str = "") -> Iterator[Path]:
    """A folder to write files into, which move to `path` once all of them are there, the one named `last` at the end.

    Until then nothing at `path` changes, and nothing is left behind if it fails; its other files stay.
    """
    target = Path(path)
    with _naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:64]}.", suffix=".part"))
        try:
            yield staged
            made = [file.relative_to(staged) for file in sorted(staged.rglob("*")) if file.is_file()]
            if last:
                (target / last).unlink(missing_ok=True)  # half a folder is not taken for a whole one
            for name in sorted(made, key=lambda name: name == Path(last)):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / name, target / name)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Errors of the system inside are about `target`, whatever file they name."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, f"cannot write it: {error.strerror}", str(target)) from error


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
