"""Records of a real quick run of every experiment, kept to check its figures and its page without running it.

`python tests/lab/kept.py results/` keeps those of another run, after an experiment's grid or values have changed. What
that run did not measure stays as it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from attnforge.lab.experiment import NAMES, Experiment, Record, select
from attnforge.lab.store import Store

FILE = Path(__file__).with_name("records.json")


def records(experiment: Experiment) -> tuple[Record, ...]:
    """The kept records of an experiment, in the order of its quick grid."""
    rows = json.loads(FILE.read_text("utf-8")).get(experiment.name, [])
    found = {}
    for settings, seed, values, time, memory in rows:
        record = Record(experiment.name, settings, seed, values, experiment.revision, True, time, memory)
        found[record.cell.key] = record
    return tuple(found[cell.key] for cell in experiment.grid(True) if cell.key in found)


def short(value: Any) -> Any:
    """The value with six digits: enough for a picture."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value] if isinstance(value, list) else value


def keep(folder: Path) -> None:
    """Writes the records of a folder's quick grids to the file."""
    store, kept = Store.open(folder), json.loads(FILE.read_text("utf-8"))
    for experiment in select("all"):
        found = [store.read(experiment, cell) for cell in experiment.grid(True)]
        rows = [
            [dict(r.settings), r.seed, *short([dict(r.values), r.time_s, r.memory_mb])] for r in found if r is not None
        ]
        kept[experiment.name] = rows or kept.get(experiment.name, [])
    lines = (f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, kept[name])) + "]" for name in NAMES)
    FILE.write_text("{" + ",\n".join(lines) + "}\n", "utf-8")


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
