"""What the error analysis keeps of its way through a network: `propagation` writes it, `adjoint` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..dtypes import Array
from ..programs.affine import Column

Errors = dict[Column, Array]  # column -> (cell, token, source); the last source is the affine maps


@dataclass(frozen=True, eq=False)
class Arising:
    """An affine map by its stored weights, within `off` of the exact ones, and errors that arise there, (cell, token,
    column)."""

    weight: Array
    off: Array
    born: Array


@dataclass(frozen=True, eq=False)
class Course:
    """What the forward rules found on the way: the errors of every state, from the first one to that which the output
    is read from, those of what heads see, and what the heads of each site add (by the number of its operation), also
    as the length of a row."""

    states: list[Errors]
    reads: list[Errors]
    added: dict[int, Array]
    lengths: dict[int, Array] = field(default_factory=dict)
