"""`Site`: one operation of a program and the heads that carry it out, as frozen data, and where those heads sit.

A site says what is needed to find its heads among the stored tensors of a layer (`Seat`) and on which intervals they
are meant to be used. It holds no weights and computes no bounds: weights come from the family's `construction`, bounds
from its `rule`, and neither knows the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..arguments import is_whole, number
from ..errors import ArgumentError
from ..network import Scope
from ..programs.positions import reads
from ..programs.program import Program

Span = tuple[float, float]


@dataclass(frozen=True)
class Seat:
    """How the heads of a site sit in a layer.

    `heads` is their number, for each channel where the site is `channelwise` and for all of it otherwise. Sites of one
    layer whose seats `share` something stand in one group of heads, the others have a group each. `label` is how the
    purpose of the group begins, `trainable` the tables of the group that training may change: all others are structure.
    """

    scope: Scope
    heads: int
    share: tuple[object, ...] | None = None
    causal: bool = False
    label: str = ""
    trainable: tuple[str, ...] = ()


#: How far beyond the range of an argument heads are built, as a share of it: what the errors before them may move.
MARGIN = 2.0**-9


@dataclass(frozen=True)
class Site(ABC):
    """One operation, by its number in the program, and its heads. The fields of a subclass are what files hold."""

    family: ClassVar[str] = ""
    #: Lemmas of docs/theory.md that the bound of the heads rests on.
    lemmas: ClassVar[tuple[str, ...]] = ()
    #: Whether every channel of the operation has heads of its own, which see single columns.
    channelwise: ClassVar[bool] = True

    op: int

    @abstractmethod
    def seat(self, program: Program) -> Seat:
        """How the heads sit in their layer."""

    @property
    @abstractmethod
    def spans(self) -> tuple[Span, ...]:
        """The intervals of the operands that the heads are meant for, in the order of the operation's inputs."""

    @property
    def lattice(self) -> tuple[float, ...]:
        """The numbers of the even table that the heads may be read by (`heads.fast.even`), if there is one."""
        return ()

    @property
    def order(self) -> tuple[bool, float]:
        """Whether the heads take their operands the other way round, and what the first is centred at."""
        return False, 0.0

    @property
    def reach(self) -> float:
        """How large what scales the read scalar may be: so much finer have the kernel's cells of it to be."""
        return 0.0

    def largest_logit(self) -> float:
        """A bound of |logit| that does not come from constant keys, where the site knows one."""
        return 0.0

    def operands(self, program: Program) -> tuple[int, ...]:
        """The values that the heads read, in the order of their coordinates."""
        return reads(program, self.op)

    def config(self) -> dict[str, Any]:
        """Everything but the operation's number, as plain JSON that `read` takes."""
        return {f.name: _listed(getattr(self, f.name)) for f in fields(self) if f.name != "op"}

    @classmethod
    @abstractmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> Site:
        """The site that `config` describes; `ArgumentError` on anything else."""


def span(name: str, pair: object) -> Span:
    """Two finite numbers in order, out of a file."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise ArgumentError(f"{name} of a site must be a pair of numbers, got {pair!r}")
    low, high = number(name, pair[0]), number(name, pair[1])
    if low > high:
        raise ArgumentError(f"{name} of a site must be an interval, got [{low:g}, {high:g}]")
    return low, high


def count(name: str, value: object, most: int = 1 << 20) -> int:
    """A whole number out of a file; `most` keeps hostile files from asking for endless work."""
    if not is_whole(value, 0, most):
        raise ArgumentError(f"{name} of a site must be a whole number from 0 to {most}, got {value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _listed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_listed(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value
