"""How files are written: whole or not at all, and over what is there only when asked to; and their hash."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import ArgumentError

# What the system says of names that were mistyped, or that are not the user's to write; all else is the machine's.
MISTAKES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
SHOWN = 32  # characters of its name that a half-written file has: of four bytes each, half of what a name may take


def free_file(path: str | Path, suffixes: str | Sequence[str] = (), force: bool = False, make: bool = False) -> Path:
    """A path that may be written: right ending, nothing there unless `force`, in a folder that exists or, with `make`,
    can be made.

    >>> free_file("net.txt", ".onnx")
    Traceback (most recent call last):
    attnforge.errors.ArgumentError: expected a file name that ends with .onnx, got 'net.txt'
    """
    target, known = _named(path), (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    if known and target.suffix.lower() not in known:
        raise ArgumentError(f"expected a file name that ends with {', '.join(known)}, got '{target}'")
    if target.is_dir():
        raise ArgumentError(f"'{target}' is a folder: expected the name of a file")
    _refuse(target, force, make)
    return target


def free_folder(path: str | Path, force: bool = False, make: bool = False) -> Path:
    """A folder that may be written: empty or not there yet, unless `force`; with `make`, those above it are made."""
    target = _named(path)
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"'{target}' is a file; expected a folder")
    if target.is_symlink() and not target.exists():
        raise ArgumentError(f"'{target}' is a link to nothing; expected a folder")
    if not (target.is_dir() and not any(target.iterdir())):
        _refuse(target, force, make)
    return target


def _named(path: str | Path) -> Path:
    """A path as the system can take it: text without its end inside, and no link that leads back to itself."""
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise ArgumentError(f"expected the name of a file or folder, as text or a Path, got {path!r}")
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ArgumentError(f"'{path}' is a link that leads back to itself") from error
    return Path(path)


def _refuse(target: Path, force: bool, make: bool = False) -> None:
    if (target.is_file() or target.is_dir()) and not force:
        raise ArgumentError(f"'{target}' is there already; force=True overwrites it")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ArgumentError(f"cannot write '{target}': '{above}' is a file, not a folder")
    if not os.access(above, os.W_OK) and (target.is_file() or target.is_dir() or not target.exists()):
        raise ArgumentError(f"cannot write '{target}': the folder '{above}' may not be written")
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
    partial = place.with_name(f".{place.name[:SHOWN]}.{secrets.token_hex(4)}.part")
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
        held = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:SHOWN]}.", suffix=".part"))
        try:
            staged = held / target.name  # what is said of it while it is here names the folder that was asked for
            staged.mkdir()
            yield staged
            made = [file.relative_to(staged) for file in sorted(staged.rglob("*")) if file.is_file()]
            for name in made:  # found out before the first of them moves
                if (target / name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, f"its '{name}' is a folder, where a file belongs")
            if last:
                (target / last).unlink(missing_ok=True)  # half a folder is not taken for a whole one
            for name in sorted(made, key=lambda name: name == Path(last)):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / name, target / name)
        finally:
            shutil.rmtree(held, ignore_errors=True)


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
