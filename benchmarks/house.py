"""The house in numbers: modules, lines, cycles, what a head family takes, and certificates after casts and changes.

python benchmarks/house.py           counts, tries the laws of tests/laws.py on heads alone, writes results/house.json
python benchmarks/house.py --quick   counts and prints; nothing is tried or written
python benchmarks/house.py --pytest  tries the same laws on networks, theorems, transformers, programs, grids, too: the
                                     tests that state them are run, which takes minutes

A *violation* is a certificate, computed after stored numbers were changed, that an error in 60 digits contradicts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "docs")]

import structure  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "house.json"
#: Rooms that came after the house was last measured as a whole (2026-11-14).
LATER = ("kernel", "rasp", "groundtruth", "catalogue", "verification", "explorer")
#: The tests that state the law of casts and changed numbers for what is not a head alone, by what it is.
LAWS = {
    "compiled networks": "tests/compiler/test_stored.py",
    "few bits": "tests/compiler/test_robustness.py -k bits",
    "fast heads": "tests/heads/test_fast.py -k 'cast or changed or believed'",
    "chains": "tests/heads/test_choose.py -k 'chain'",
    "theorems": "tests/theorems/test_recertify.py",
    "plain transformers": "tests/export/test_plain_recertify.py",
    "token programs": "tests/rasp/test_network.py tests/rasp/test_hostile.py -k 'changed or noticed or stored'",
    "several programs": "tests/rasp/test_several.py -k changed",
    "variants": "tests/groundtruth/test_variants.py tests/groundtruth/test_rotation.py -k 'changed or cast or speaks'",
    "grids": "tests/blackbox/test_grid.py -k 'changed or dtype'",
    "the kernel": "tests/kernel -k 'changed or changes or mutants'",
}


def counted() -> dict[str, Any]:
    """What the code says of itself."""
    graph = structure.module_graph()
    used = Counter(target for targets in graph.values() for target in targets)
    sizes = structure.sizes(structure.PACKAGE)
    later = [sum(sizes[room][i] for room in LATER) for i in (0, 1)]
    toy = sorted((ROOT / "tests" / "toy_family").glob("*.py"))
    return {
        "modules": sizes["(all)"][0], "lines": sizes["(all)"][1], "lines of code": sizes["(all)"][2],
        "modules without later rooms": sizes["(all)"][0] - later[0],
        "lines without later rooms": sizes["(all)"][1] - later[1],
        "package cycles": len(structure.cycles(structure.package_graph(graph))),
        "module cycles": len(structure.cycles({name: targets for name, targets in graph.items() if name})),
        "modules with one importer": sum(used[name] == 1 for name in graph if name),
        "files of the toy family": len(toy),
        "lines of the toy family": sum(len(path.read_text("utf-8").splitlines()) for path in toy),
    }  # fmt: skip


def _tests() -> ModuleType:
    """tests/heads/test_laws.py, which has an instance of every form of head."""
    spec = importlib.util.spec_from_file_location("test_laws", ROOT / "tests" / "heads" / "test_laws.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_laws"] = module
    spec.loader.exec_module(module)
    return module


def tried() -> Iterator[dict[str, Any]]:
    """Heads alone: what became of each after every cast and change."""
    import laws

    for instance in _tests().STORED:
        found: Counter[str] = Counter()
        for what, head in laws.treated(instance):
            kept = laws.covered(instance, head)
            wrong = kept is False or (kept and "nan" in what)
            found["violations" if wrong else "refused" if kept is None else "covered"] += 1
        yield {"head": instance.name, **{key: found[key] for key in ("covered", "refused", "violations")}}


def stated() -> Iterator[dict[str, Any]]:
    """The laws over everything else, as tests."""
    import shlex

    for what, asked in LAWS.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(asked)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        last = done.stdout.strip().splitlines()[-1]
        counts = Counter({word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", last)})
        yield {"what": what, "passed": counts["passed"], "failed": counts["failed"] + counts["error"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="count only")
    parser.add_argument("--pytest", action="store_true", help="run the tests of the other laws, too")
    asked, console, found = parser.parse_args(), Console(width=110), counted()
    table = Table("the code", "now", title="The house")
    for name, number in found.items():
        table.add_row(name, f"{number:,}")
    console.print(table)
    if asked.quick:
        return
    started, heads = time.perf_counter(), []
    table = Table("head alone", "covered", "refused", "violations", title="After casts and one changed number")
    for row in tried():
        heads.append(row)
        table.add_row(*(str(value) for value in row.values()))
    total = {key: sum(row[key] for row in heads) for key in ("covered", "refused", "violations")}
    table.add_row("all", *(str(value) for value in total.values()))
    console.print(table)
    others = []
    if asked.pytest:
        table = Table("the same law over", "tests passed", "failed")
        for row in stated():
            others.append(row)
            table.add_row(*(str(value) for value in row.values()))
        console.print(table)
    elif RESULTS.exists():
        others = json.loads(RESULTS.read_text("utf-8"))["others"]
    seconds = round(time.perf_counter() - started)
    data = {"counted": found, "heads": heads, "all heads": total, "others": others, "seconds": seconds,
            "machine": platform.processor() or platform.machine()}  # fmt: skip
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
