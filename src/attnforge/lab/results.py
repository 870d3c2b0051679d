"""What the records of a folder show: figures and verdicts of each experiment, ready to be written or put on a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError, AttnforgeError
from . import drawing, registry
from .chart import Figure
from .experiment import VERDICTS, Experiment, Finding
from .store import Gathered, Store, write_whole

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
