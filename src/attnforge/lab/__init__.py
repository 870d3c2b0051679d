"""The lab: every claim of the theory measured, constructed beside trained, with a verdict by stated rules.

`run` measures, one record for each cell; `results` reads the records of a folder and draws and judges them.
"""

from __future__ import annotations

from .engine import Progress, Summary, run
from .experiment import Cell, Experiment, Figure, Finding, Heat, Panel, Record, Series, Zone, find, grid, names
from .store import Result, results

__all__ = [
    "Cell", "Experiment", "Figure", "Finding", "Heat", "Panel", "Progress", "Record", "Result", "Series", "Summary",
    "Zone", "find", "grid", "names", "results", "run",
]  # fmt: skip
