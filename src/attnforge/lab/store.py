"""The folder that a run writes: OUT/EXPERIMENT/*.json, one record for each cell, and a marker that says whose it is.

Files appear whole or not at all: a record is written beside its place and moved there. What cannot be read is named and
counts as missing, so that it is measured again. `results` reads what the records show: figures and verdicts of each
experiment, ready to be written or put on a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..charts import drawing
from ..charts.chart import Figure
from ..errors import ArgumentError, AttnforgeError
from ..saving import MISTAKES, write_whole
from . import experiment as registry
from .experiment import VERDICTS, Cell, Experiment, Finding, Record

MARKER = ".attnforge-lab"
_MARKED = "This folder is written by `attnforge lab`. Records of finished cells are in it; a run continues from them.\n"


@dataclass(frozen=True)
class Gathered:
    """The records of an experiment in a folder, of its full grid or of its quick one, and cells without one."""

    experiment: Experiment
    quick: bool
    records: tuple[Record, ...]
    missing: tuple[Cell, ...]

    @property
    def complete(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Store:
    """A results folder. `problems` collects what was wrong with files that were looked at."""

    folder: Path
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, folder: str | Path) -> Store:
        """The folder, to be read; ArgumentError where no lab has written it."""
        folder = Path(folder)
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise ArgumentError(f"expected a folder that `attnforge lab run` has written; '{folder}' {what}")
        if not (folder / MARKER).is_file():
            raise ArgumentError(
                f"'{folder}' was not written by `attnforge lab run` (it has no {MARKER}): name the folder of a run"
            )
        return cls(folder)

    @classmethod
    def create(cls, folder: str | Path) -> Store:
        """The folder, to be written: new, empty, or the lab's own. Anything else is left alone."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ArgumentError(f"cannot write results to '{folder}': it is a file; name a folder")
        try:
            if folder.is_dir() and not (folder / MARKER).is_file() and any(folder.iterdir()):
                raise ArgumentError(
                    f"'{folder}' holds files that the lab did not write, and is left as it is: "
                    "name a new or empty folder, such as --out results/lab"
                )
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / MARKER, _MARKED)
        except MISTAKES as error:
            raise ArgumentError(
                f"cannot write results to '{folder}': {error.strerror or error}; name a folder that can be written"
            ) from error
        return cls(folder)

    def path(self, experiment: Experiment, cell: Cell) -> Path:
        """Where the record of a cell lies."""
        return self.folder / experiment.name / f"{cell.key}.json"

    def read(self, experiment: Experiment, cell: Cell) -> Record | None:
        """The record of a cell, or None where there is none that counts; why not goes to `problems`."""
        path = self.path(experiment, cell)
        try:
            record = Record.from_json(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # JSON and UTF-8 errors and ArgumentError are ValueErrors
            reason = error.strerror or "unreadable" if isinstance(error, OSError) else str(error)
            self.problems.append(f"{path}: not a record ({reason})")
            return None
        if record.experiment != experiment.name or record.cell.key != cell.key:
            self.problems.append(f"{path}: the record of another cell, {record.experiment} {record.cell.key}")
            return None
        if record.revision != experiment.revision:
            was, now = record.revision, experiment.revision
            self.problems.append(f"{path}: measured by revision {was} of the experiment, which is at {now}")
            return None
        return record

    def write(self, experiment: Experiment, record: Record) -> Path:
        """Puts a record in its place."""
        path = self.path(experiment, record.cell)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(record.to_json(), indent=1, allow_nan=False) + "\n")
        return path

    def todo(self, experiment: Experiment, cells: Iterable[Cell]) -> tuple[Cell, ...]:
        """The cells without a record."""
        return tuple(cell for cell in cells if self.read(experiment, cell) is None)

    def gather(self, experiment: Experiment) -> Gathered | None:
        """The records of the grid that is further along, the full one if both are; None where there are no records."""
        found, seen = [], len(self.problems)
        for quick in (False, True):
            read = [(cell, self.read(experiment, cell)) for cell in experiment.grid(quick)]
            records = tuple(record for _, record in read if record is not None)
            found.append(Gathered(experiment, quick, records, tuple(cell for cell, record in read if record is None)))
        self.problems[seen:] = dict.fromkeys(self.problems[seen:])  # a cell of both grids was looked at twice
        best = max(found, key=lambda g: len(g.records) / (len(g.records) + len(g.missing)))
        return best if best.records else None


# What drawing or judging half a grid may stumble over; of a whole grid, these are mistakes and are raised.
_TOO_FEW = (AttnforgeError, ArithmeticError, LookupError, ValueError, StopIteration)


@dataclass(frozen=True)
class Result:
    """An experiment with its records, what they draw and what they say; `note` where too few cells are finished."""

    gathered: Gathered
    figures: tuple[Figure, ...]
    findings: tuple[Finding, ...]
    note: str = ""

    @property
    def experiment(self) -> Experiment:
        return self.gathered.experiment

    @property
    def state(self) -> str:
        """Which grid, and whether all of it is there."""
        done, missing = len(self.gathered.records), len(self.gathered.missing)
        kind = "quick grid" if self.gathered.quick else "full grid"
        return f"{kind}, {done} cells" if not missing else f"{kind}, {done} of {done + missing} cells"


def result(gathered: Gathered) -> Result:
    """Draws and judges the records of an experiment."""
    experiment, records = gathered.experiment, gathered.records
    try:
        return Result(gathered, tuple(experiment.figures(records)), tuple(experiment.judge(records)))
    except _TOO_FEW as error:
        if gathered.complete:
            raise
        return Result(gathered, (), (), f"too few cells are finished to draw and judge them ({error})")


def results(
    folder: str | Path, experiments: Iterable[Experiment] | None = None
) -> tuple[tuple[Result, ...], tuple[str, ...]]:
    """The results in a folder, of every experiment that has records there, and what was wrong with files in it."""
    store = Store.open(folder)
    gathered = (store.gather(experiment) for experiment in (experiments or registry.select("all")))
    found = tuple(result(one) for one in gathered if one is not None)
    if not found:
        raise ArgumentError(f"'{folder}' has no records yet: `attnforge lab run all --out {folder}` makes some")
    return found, tuple(store.problems)


def write(found: Iterable[Result], folder: str | Path) -> tuple[Path, ...]:
    """Figures as NAME.png and NAME.svg beside their records, and all verdicts in findings.json; the files written."""
    folder, rows, files = Path(folder), [], list[Path]()
    for one in found:
        name = one.experiment.name
        for figure in one.figures:
            files += drawing.write(figure, folder / name)
        for finding in one.findings:
            rows.append({"experiment": name, "label": one.experiment.label, "grid": one.state, **finding.to_json()})
    path = folder / "findings.json"
    write_whole(path, json.dumps(rows, indent=1, allow_nan=False) + "\n")
    return (*files, path)


def tally(found: Iterable[Result]) -> dict[str, int]:
    """How many findings have each verdict."""
    verdicts = [finding.verdict for one in found for finding in one.findings]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}
