"""Runs the cells of experiments, on the cores of this machine or on a cluster, and writes a record for each.

joblib is the interface: its processes by default, dask.distributed by choice. Cells that have a record are not run
again, so a run that was interrupted continues where it stopped. Each cell is seeded and keeps to a fixed number of
threads; how many run at once, and where, does not change a number.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, AttnforgeError
from . import machine, registry
from .backends import parallel
from .bar import bar
from .experiment import Cell, Experiment, Record
from .store import Store

Measure = Callable[[Mapping[str, Any], int], Mapping[str, Any]]


@dataclass(frozen=True)
class Failure:
    """A cell whose measurement raised an error; it has no record and is tried again by the next run."""

    experiment: str
    cell: Cell
    error: str
    trace: str

    def __str__(self) -> str:
        return f"{self.experiment} {self.cell.key}: {self.error}"


@dataclass(frozen=True)
class Progress:
    """How far a run is: told after every cell. `cell` is None once, before the first."""

    done: int
    total: int
    kept: int
    experiment: str = ""
    cell: Cell | None = None


@dataclass(frozen=True)
class Summary:
    """What a run did: cells measured now, cells that had a record, failures, and files that are no records."""

    folder: Path
    experiments: tuple[Experiment, ...]
    measured: int
    kept: int
    failures: tuple[Failure, ...]
    problems: tuple[str, ...]


def run(
    experiments: str | Experiment | Iterable[str | Experiment],
    out: str | Path,
    *,
    quick: bool = False,
    jobs: int | None = None,
    backend: str = "processes",
    scheduler: str | None = None,
    threads: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Measures every cell that has no record yet; experiments by name ("all" is every one) or as objects.

    `jobs` cells at once, by default one for each core, each on `threads` threads. `backend` is "processes" or "dask";
    a dask scheduler's address may be given, else a cluster is started on this machine. `progress` is told of every
    cell; without it there is a bar on a terminal.
    """
    chosen = _chosen(experiments)
    _check(jobs, "jobs")
    _check(threads, "threads")
    store = Store.create(out)
    grids = [(experiment, experiment.grid(quick)) for experiment in chosen]
    todo = [(experiment, cell) for experiment, cells in grids for cell in store.todo(experiment, cells)]
    kept = sum(len(cells) for _, cells in grids) - len(todo)
    failures: list[Failure] = []
    by_name = {experiment.name: experiment for experiment in chosen}
    calls = [(measure_cell, (e.measure, e.name, e.revision, c.settings, c.seed, threads, quick)) for e, c in todo]
    with ExitStack() as stack:
        tell = progress or stack.enter_context(bar())
        tell(Progress(0, len(todo), kept))
        if calls:
            results = stack.enter_context(parallel(calls, jobs, backend, scheduler, threads))
            for done, (name, cell, result) in enumerate(results, 1):
                if isinstance(result, Record):
                    store.write(by_name[name], result)
                else:
                    failures.append(Failure(name, cell, *result))
                tell(Progress(done, len(todo), kept, name, cell))
    measured = len(todo) - len(failures)
    return Summary(store.folder, chosen, measured, kept, tuple(failures), tuple(store.problems))


def measure_cell(
    measure: Measure, name: str, revision: int, settings: Mapping[str, Any], seed: int, threads: int, quick: bool
) -> tuple[str, Cell, Record | tuple[str, str]]:
    """One cell, in the process that it was sent to: its record, or the error and its trace in words."""
    cell = Cell(settings, seed)
    try:
        with machine.reproducible(seed, threads), machine.watch() as used:
            values = dict(measure(cell.settings, seed))
        record = Record(
            name, cell.settings, seed, values, revision, quick, used.time_s, used.memory_mb, machine.device_name(),
            threads, machine.versions(), machine.machine(), datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
    except Exception as error:  # whatever an experiment raises is reported with its cell; the other cells go on
        kind = "" if isinstance(error, AttnforgeError) else f"{type(error).__name__}: "
        return name, cell, (f"{kind}{error}", traceback.format_exc())
    return name, cell, record


def _chosen(experiments: str | Experiment | Iterable[str | Experiment]) -> tuple[Experiment, ...]:
    asked = [experiments] if isinstance(experiments, str | Experiment) else list(experiments)
    found = [e for one in asked for e in (registry.select(one) if isinstance(one, str) else (one,))]
    chosen = tuple({experiment.name: experiment for experiment in found}.values())
    if not chosen:
        raise ArgumentError("there is nothing to run: name an experiment, or all")
    return chosen


def _check(value: int | None, name: str) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ArgumentError(f"{name} is a whole number >= 1, got {value!r}")
