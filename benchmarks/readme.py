"""What the README and docs/measured.md show, made again: the picture, the demonstration's output, and the tables.

python benchmarks/readme.py            runs the demonstration, prints its tables, writes results/demo.json
python benchmarks/readme.py --write    also fills in README.md, docs/measured.md (between markers) and docs/images/

The README's table comes from the last run of every other benchmark (benchmarks/summary.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from summary import table

ROOT = Path(__file__).resolve().parents[1]


def output(*command: str, cwd: Path = ROOT) -> str:
    """What a Python program prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def filled(text: str, name: str, body: str) -> str:
    """The text with `body` between the markers of that name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"the page needs exactly one {begin} and one {end}")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{body}\n{end}", text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="change README.md and docs/images/")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = output("-m", "attnforge", "demo", cwd=place)
        sys.stdout.write(text + "\n")
        (ROOT / "results").mkdir(exist_ok=True)
        shutil.copy(place / "out/demo/numbers.json", ROOT / "results/demo.json")
        if not wanted.write:
            return
        (ROOT / "docs/images").mkdir(parents=True, exist_ok=True)
        for name in ("temperature.svg", "temperature-dark.svg"):
            shutil.copy(place / "out/demo/figures" / name, ROOT / "docs/images" / name)
    page = filled((ROOT / "docs/measured.md").read_text("utf-8"), "demo", f"```text\n$ make demo\n{text}\n```")
    page = filled(page, "summary", table(whole=True))
    page = filled(page, "heads", output("benchmarks/heads.py", "--markdown"))
    (ROOT / "docs/measured.md").write_text(page, encoding="utf-8", newline="\n")
    readme = ROOT / "README.md"
    short = filled(readme.read_text("utf-8"), "summary", table())
    readme.write_text(short, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
