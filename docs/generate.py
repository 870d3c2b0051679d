"""What docs/compiler.md shows between its markers, made from the code and from the last run of benchmarks/compile.py.

python docs/generate.py            exits with 1 if the page is not up to date
python docs/generate.py --write    brings it up to date
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compiler.md"
sys.path.insert(0, str(ROOT / "src"))


def operations() -> str:
    """The table of PyTorch operations, those that are lowered the same way in one row."""
    from attnforge.frontends.module.program import supported_operations

    alike: dict[str, list[str]] = {}
    for name, note in supported_operations():
        if not name.startswith("_"):  # torch's own spellings of what stands next to them
            alike.setdefault(note, []).append(f"`{name}`")
    rows = sorted(alike.items(), key=lambda row: (-len(row[1]), row[1]))
    lines = [f"| {' '.join(names)} | {note} |" for note, names in rows]
    return "\n".join(["| operations | how |", "| --- | --- |", *lines])


def numbers() -> str:
    """The summary of the last run of the benchmark."""
    spec = importlib.util.spec_from_file_location("benchmark_compile", ROOT / "benchmarks" / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text: str = script.markdown(json.loads(script.RESULTS.read_text("utf-8")))
    return text


def page() -> str:
    """The page with everything between its markers made again."""
    text = PAGE.read_text("utf-8")
    for name, body in (("operations", operations()), ("numbers", numbers())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{PAGE.name} needs exactly one {begin} and one {end}")
        text = re.sub(f"{begin}.*?{end}", lambda _, b=begin, e=end, t=body: f"{b}\n{t}\n{e}", text, flags=re.DOTALL)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="change docs/compiler.md")
    wanted, text = parser.parse_args(), page()
    if wanted.write:
        PAGE.write_text(text, encoding="utf-8", newline="\n")
    return 0 if wanted.write or text == PAGE.read_text("utf-8") else 1


if __name__ == "__main__":
    sys.exit(main())
