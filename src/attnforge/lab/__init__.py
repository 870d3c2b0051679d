"""The lab: every claim of the theory measured, constructed beside trained, with a verdict by stated rules."""

from __future__ import annotations

from .experiment import Cell, Experiment, Figure, Finding, Heat, Panel, Record, Series, Zone, grid
from .registry import find, names

__all__ = [
    "Cell", "Experiment", "Figure", "Finding", "Heat", "Panel", "Record", "Series", "Zone", "find", "grid", "names",
]  # fmt: skip
