"""What is to be converted at a level, what stays, and what nobody knows how to convert."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import ArgumentError, UnsupportedOperation, closest
from .find import Found
from .record import LEVELS, Left

LEFT = "named in leave"


@dataclass(frozen=True)
class Leave:
    """The user's patterns for paths that stay as they are."""

    patterns: tuple[str, ...]

    @classmethod
    def read(cls, leave: object, model: nn.Module) -> Leave:
        """Patterns as given, each of which must match something in the model."""
        given = (leave,) if isinstance(leave, str) else leave
        if not isinstance(given, Iterable):
            raise ArgumentError(f"leave must be a path or a sequence of paths, got {type(leave).__name__}")
        patterns = tuple(given)
        wrong = [p for p in patterns if not isinstance(p, str)]
        if wrong:
            raise ArgumentError(f"leave must hold paths as text, got {wrong[0]!r}")
        paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        paths += [f"{path}.{name}" if path else name for path, m in model.named_modules() for name in vars(m)]
        found = cls(patterns)
        for pattern in patterns:
            if not any(cls((pattern,)).holds(path) for path in paths if path or pattern == ""):
                hint = closest(pattern, paths)
                raise ArgumentError(f"leave names '{pattern}', and no such path is in the model{hint}")
        return found

    def holds(self, path: str) -> bool:
        """Whether a path is one of the patterns, matches one, or lies below one."""
        return any(
            path == p or fnmatch.fnmatchcase(path, p) or (p != "" and path.startswith(f"{p}."))
            or fnmatch.fnmatchcase(path, f"{p}.*")
            for p in self.patterns
        )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """Sites to convert, and what stays with its reason."""

    sites: tuple[Found, ...]
    left: tuple[Left, ...]


def choose(found: Sequence[Found], level: str, leave: Leave) -> Choice:
    """Sort what was found; every unknown module that may not stay is listed in one `UnsupportedOperation`."""
    sites, left, unknown = [], [], []
    for one in found:
        if any(leave.holds(path) for path in one.paths):
            left.append(Left(one.path, one.operation, LEFT))
        elif one.kind == "activation" or (one.kind is not None and level == "pure"):
            sites.append(one)
        elif one.kind is not None:
            left.append(Left(one.path, one.operation, "level 'ffn' replaces activations; level='pure' replaces this"))
        else:
            unknown.append(f"{one.path}: {type(one.target).__name__}: {one.why}")
    if unknown:
        raise unsupported(unknown)
    return Choice(tuple(sites), tuple(left))


def unsupported(lines: Sequence[str]) -> UnsupportedOperation:
    """One error for all operations that have no attention form here."""
    number = f"{len(lines)} operation{'s' if len(lines) > 1 else ''}"
    head = f"{number} of this model cannot be converted (nothing was changed):"
    hint = "name their paths in leave=[...] to keep them as they are, or use an activation that is registered"
    return UnsupportedOperation("\n".join([head, *(f"  {line}" for line in lines), hint]))


def level_of(level: object) -> str:
    if level not in LEVELS:
        hint = closest(str(level), LEVELS)
        raise ArgumentError(f"level must be 'ffn' (activations) or 'pure' (everything), got {level!r}{hint}")
    return str(level)
