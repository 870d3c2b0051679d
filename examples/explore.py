"""Two networks in pages of their own: a formula whose heads can be warmed, and a program that sorts.

    python examples/explore.py [FOLDER]

Open the pages in a browser: the networks run in them. Switch heads off, move the temperature, hunt for a worse point.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import attnforge as af  # noqa: E402
from attnforge import rasp  # noqa: E402


def main(folder: Path) -> list[Path]:
    formula = af.compile("sin(x*y) + exp(-x**2)/(1 + y)", af.Box(x=(-2, 2), y=(0, 2)), eps=1e-4)
    program = af.compile(rasp.library.sort().named("sort"), rasp.Sequences("abcd", max_length=8))
    pages = [formula.explore(folder / "formula.html", force=True), program.explore(folder / "sort.html", force=True)]
    for page in pages:
        print(f"{page}: {page.stat().st_size:,} bytes")
    return pages


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("out/explore"))
