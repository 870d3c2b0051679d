"""What an experiment is: the cells of its grid, how one is measured, how all are drawn and judged; and all by name.

One file for each experiment, with an `EXPERIMENT`, loaded when it is asked for by its name. Measuring writes records;
figures and verdicts only read them, so that they can be drawn again without measuring again, and nothing on the page
comes from anywhere but a record.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..arguments import is_whole
from ..charts.chart import Figure, Heat, Panel, Series, Zone
from ..errors import ArgumentError, closest

__all__ = [
    "AGREES", "BETTER", "FAILS", "JSON", "Cell", "Experiment", "Figure", "Finding", "Heat", "Panel", "Record",
    "Series", "Zone", "grid",
]  # fmt: skip

JSON = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
AGREES, BETTER, FAILS = VERDICTS = ("agrees", "better than predicted", "does not hold")
RELATIONS = ("equals", "at most", "at least")
CAUSES = ("float32", "training", "theory")  # of a verdict that does not hold; float32 stands for every coarse dtype
_SLUG = 72  # letters of a file's name, before its hash


def plain(value: Any) -> JSON:
    """The value as JSON holds it: tuples are lists, numpy and torch scalars numbers, and what is not finite is None.

    >>> plain({"error": (1.5, float("inf")), "ok": True})
    {'error': [1.5, None], 'ok': True}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return plain(value.tolist())
    raise ArgumentError(f"a record holds numbers, texts, lists and mappings, got {type(value).__name__}")


@dataclass(frozen=True)
class Cell:
    """One measurement of a grid: its settings and its seed.

    >>> Cell({"variant": "cold", "p": 60}, seed=1234).key
    'p60-cold-s1234-950daa1b'
    """

    settings: Mapping[str, JSON]
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.seed):
            raise ArgumentError(f"a cell's seed is a whole number >= 0, got {self.seed!r}")
        object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "settings", plain(dict(self.settings)))

    @property
    def key(self) -> str:
        """A name for the cell's file: readable, and different for different settings and seeds."""
        exact = json.dumps([self.settings, self.seed], sort_keys=True)
        parts = [str(v) if isinstance(v, str) else f"{k}{_short(v)}" for k, v in sorted(self.settings.items())]
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join([*parts, f"s{self.seed}"])).strip("-.")
        return f"{slug[:_SLUG].rstrip('-.')}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"

    def __hash__(self) -> int:
        return hash(self.key)


def _short(value: JSON) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def grid(seeds: Sequence[int] = (0,), **axes: Sequence[Any]) -> tuple[Cell, ...]:
    """Every combination of the axes' values, for every seed; the last axis moves fastest, seeds fastest of all.

    >>> [cell.key[:7] for cell in grid(p=(8, 16), H=(1,))]
    ['H1-p8-s', 'H1-p16-']
    """
    combinations = itertools.product(*axes.values(), seeds)
    return tuple(Cell(dict(zip(axes, row[:-1], strict=True)), row[-1]) for row in combinations)


@dataclass(frozen=True)
class Record:
    """What one cell gave: `values` from the experiment, the rest from the engine.

    `revision` is the experiment's; `quick` says that a quick run wrote it, which does not make the cell another one.
    """

    experiment: str
    settings: Mapping[str, JSON]
    seed: int
    values: Mapping[str, Any]
    revision: int = 1
    quick: bool = False
    time_s: float = 0.0
    memory_mb: float = 0.0
    device: str = "cpu"
    threads: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    finished: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", plain(dict(self.settings)))
        object.__setattr__(self, "values", plain(dict(self.values)))
        if both := set(self.settings) & set(self.values):
            raise ArgumentError(f"values and settings of a record have names of their own; both have {', '.join(both)}")

    @property
    def cell(self) -> Cell:
        """The cell that was measured."""
        return Cell(self.settings, self.seed)

    def __getitem__(self, name: str) -> Any:
        """A value or a setting by its name: the two never share one."""
        return self.values[name] if name in self.values else self.settings[name]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Reads what `to_json` gave; ArgumentError says what is wrong with anything else."""
        if not isinstance(data, dict):
            raise ArgumentError(f"a record is a JSON object, got {type(data).__name__}")
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            odd = sorted(set(data) ^ names)
            raise ArgumentError(f"a record has the fields {', '.join(sorted(names))}; wrong here: {', '.join(odd)}")
        kinds = {"experiment": str, "settings": dict, "seed": int, "values": dict, "revision": int, "quick": bool,
                 "time_s": float, "memory_mb": float, "device": str, "threads": int, "versions": dict, "machine": dict,
                 "finished": str}  # fmt: skip
        for name, kind in kinds.items():
            if not isinstance(data[name], kind) and not (kind is float and isinstance(data[name], int)):
                raise ArgumentError(f"the field '{name}' of a record is a {kind.__name__}, got {data[name]!r:.40}")
        return cls(**data)


@dataclass(frozen=True)
class Finding:
    """A quantity, what the theory says of it, what was measured, and the verdict with the rule that gave it.

    `relation` is how prediction and measurement should compare: "equals", "at most" or "at least". `cause` is what it
    would be laid to if it did not hold, one of CAUSES. Make findings with the functions of `verdicts`, which apply the
    rule they state.
    """

    quantity: str
    predicted: float | None
    measured: float | None
    interval: tuple[float, float] | None
    verdict: str
    rule: str
    relation: str = "equals"
    note: str = ""
    cause: str = "theory"

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ArgumentError(f"a cause is one of {', '.join(CAUSES)}, got {self.cause!r}")
        if self.verdict not in VERDICTS:
            raise ArgumentError(f"a verdict is one of {', '.join(VERDICTS)}, got {self.verdict!r}")
        if self.relation not in RELATIONS:
            raise ArgumentError(f"a relation is one of {', '.join(RELATIONS)}, got {self.relation!r}")
        if not self.quantity or not self.rule:
            raise ArgumentError("a finding names its quantity and states its rule")

    def laid_to(self, cause: str) -> Finding:
        """The same finding, with what it is laid to where it does not hold."""
        return replace(self, cause=cause)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {key: plain(value) for key, value in data.items()}


@dataclass(frozen=True)
class Experiment:
    """One experiment. Texts say what is claimed (with its `label` in docs/theory.md), what varies, how it is judged.

    `cells(quick)` is the grid; `measure(settings, seed)` returns values that `plain` can hold, and runs in a process of
    its own, so it lives at the top of a module. `figures` and `judge` read records, in the order of the cells and
    possibly with some missing, and never measure. Raise `revision` when `measure` changes: older records do not count.
    """

    name: str
    title: str
    claim: str
    label: str
    varies: str
    measured_how: str
    judged_how: str
    cells: Callable[[bool], tuple[Cell, ...]]
    measure: Callable[[Mapping[str, Any], int], Mapping[str, Any]]
    figures: Callable[[Sequence[Record]], Sequence[Figure]]
    judge: Callable[[Sequence[Record]], Sequence[Finding]]
    revision: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ArgumentError(f"an experiment's name is lower-case words joined by hyphens, got {self.name!r}")
        missing = [f.name for f in fields(self) if f.type == "str" and not getattr(self, f.name)]
        if missing:
            raise ArgumentError(f"the experiment '{self.name}' does not say: {', '.join(missing)}")

    def grid(self, quick: bool) -> tuple[Cell, ...]:
        """Its cells, each once."""
        cells = tuple(self.cells(quick))
        keys = [cell.key for cell in cells]
        if not cells or len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ArgumentError(
                f"the grid of '{self.name}' is empty or has a cell twice: {', '.join(twice) or 'empty'}"
            )
        return cells


#: In the order in which they are listed, run and reported.
NAMES = (
    "rate-anchors",
    "rate-heads",
    "range",
    "heatmap",
    "temperature",
    "boundary",
    "length",
    "sequence",
    "in-context",
    "universality",
    "spectral",
    "kinks",
    "robustness",
    "depth",
    "classes",
    "every-length",
    "pipeline",
    "jumps",
    "mechanism",
    "training-from-construction",
)


def names() -> tuple[str, ...]:
    """The experiments there are.

    >>> names()[:2]
    ('rate-anchors', 'rate-heads')
    """
    return NAMES


def find(name: str) -> Experiment:
    """The experiment of that name.

    >>> find("rate-anchor")
    Traceback (most recent call last):
    attnforge.errors.ArgumentError: there is no experiment 'rate-anchor'; did you mean 'rate-anchors'?...
    """
    asked = name.strip().lower().replace("_", "-")
    if asked not in NAMES:
        raise ArgumentError(
            f"there is no experiment '{name}'{closest(asked, NAMES)}; known are {', '.join(NAMES)}, and all"
        )
    module = importlib.import_module(f"{__package__}.experiments.{asked.replace('-', '_')}")
    experiment = module.EXPERIMENT
    assert isinstance(experiment, Experiment)
    assert experiment.name == asked
    return experiment


def select(name: str) -> tuple[Experiment, ...]:
    """The experiment of that name, or every one for "all"."""
    return tuple(map(find, NAMES)) if name == "all" else (find(name),)
