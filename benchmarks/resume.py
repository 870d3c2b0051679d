"""Long runs in parts: rows that a run has measured are kept beside its results until the run is whole."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The commit of the code that is measured, "+" where files differ from it."""
    git = ("git", "-C", str(ROOT))
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False).stdout
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=False).stdout
    return head.strip() + ("+" if changed else "")


class Parts:
    """What is measured so far: a row for each name, and the commits that the parts were measured on."""

    def __init__(self, results: Path, resume: bool) -> None:
        self.path = results.with_suffix(".part.json")
        self.rows: dict[str, Any] = {}
        self.commits: list[str] = []
        if resume and self.path.exists():
            kept = json.loads(self.path.read_text("utf-8"))
            self.rows, self.commits = kept["rows"], kept["commits"]
        self.commits = list(dict.fromkeys([*self.commits, commit()]))

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def add(self, name: str, row: Any) -> None:
        """Keep one row; it is written at once, since a run may be stopped."""
        self.rows[name] = row
        self.path.parent.mkdir(exist_ok=True)
        text = json.dumps({"commits": self.commits, "rows": self.rows}, indent=1) + "\n"
        self.path.write_text(text, encoding="utf-8", newline="\n")

    def done(self) -> None:
        """The run is whole: its results are written elsewhere."""
        self.path.unlink(missing_ok=True)
