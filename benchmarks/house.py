"""The house in numbers: modules, lines, cycles, what a head family takes, and certificates after casts and changes.

python benchmarks/house.py           counts, tries the laws of tests/laws.py on heads alone, writes results/house.json
python benchmarks/house.py --quick   counts and prints; nothing is tried, and only the counts are written
python benchmarks/house.py --lines   what the lines are, and which stand as they did when the house stood (git blame)
python benchmarks/house.py --pytest  tries the same laws on networks, theorems, transformers, programs, grids, too: the
                                     tests that state them are run, which takes minutes
python benchmarks/house.py --before  compiles the same formulas with the sources of earlier commits and with those of
                                     now, on this machine, one after the other, which takes minutes, too

A *violation* is a certificate, computed after stored numbers were changed, that an error in 60 digits contradicts.
Earlier sources come from git: where a clone does not hold them, their columns are left out. "Then" is when the house
stood; fewer lines and modules were asked for what there was before it, and one table says how far that is.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "docs")]

import structure  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "house.json"
#: The sources before the house was rebuilt, and when it stood.
COMMITS = {"before": "01f951243a7a931b", "stood": "877db36b595c14ec"}
#: Rooms that came after the house stood.
LATER = ("kernel", "rasp", "groundtruth", "catalogue", "verification", "explorer", "native")
#: What the capabilities of then took when fewer lines and modules were asked for, and how few.
THEN = {"modules": 296, "lines": 44_606}
ASKED = {"modules": 230, "lines": 40_000}
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


def counted(root: Path = ROOT) -> dict[str, Any]:
    """What the code of a checkout says of itself."""
    structure.PACKAGE = root / "src" / "attnforge"
    graph = structure.module_graph()
    structure.PACKAGE = ROOT / "src" / "attnforge"
    used = Counter(target for targets in graph.values() for target in targets)
    once = [name for name in graph if name and used[name] == 1]
    sizes = structure.sizes(root / "src" / "attnforge")
    later = [sum(sizes.get(room, (0, 0))[i] for room in LATER) for i in (0, 1)]
    found = {
        "modules": sizes["(all)"][0], "lines": sizes["(all)"][1], "lines of code": sizes["(all)"][2],
        "modules without later rooms": sizes["(all)"][0] - later[0],
        "lines without later rooms": sizes["(all)"][1] - later[1],
        "package cycles": len(structure.cycles(structure.package_graph(graph))),
        "module cycles": len(structure.cycles({name: targets for name, targets in graph.items() if name})),
        "modules with one importer": len(once),
        "of these without later rooms": sum(structure.package_of(name) not in LATER for name in once),
        "class names that packages share": len(_shared(root / "src" / "attnforge")),
    }  # fmt: skip
    toy = sorted((root / "tests" / "toy_family").glob("*.py"))
    if toy:
        found["files of the toy family"] = len(toy)
        found["lines of the toy family"] = sum(len(path.read_text("utf-8").splitlines()) for path in toy)
    return found


def _shared(package: Path) -> list[str]:
    """Names of classes that several packages have; the kernel shares nothing with the rest, words included."""
    rooms: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        room = path.relative_to(package).with_suffix("").parts[0]
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and room != "kernel":
                rooms.setdefault(node.name, set()).add(room)
    return sorted(name for name, found in rooms.items() if len(found) > 1)


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path | None]:
    """The sources and tests of a commit in a folder of their own; None where this clone does not hold it."""
    done = subprocess.run(["git", "archive", commit, "src", "tests"], cwd=ROOT, capture_output=True)
    if done.returncode:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def rooms() -> list[dict[str, Any]]:
    """Package by package: what was there when the house stood, what became of it, and what came since.

    A place that was rewritten counts as it was before, as far as it is as long: what is longer has grown, and what is
    shorter was cut. So `lines then` less `cut` is what the capabilities of then take now, and the rest came later.
    """
    with checkout(COMMITS["stood"]) as folder:
        if folder is None:
            return []
        then = structure.sizes(folder / "src" / "attnforge")
    now, found = structure.sizes(ROOT / "src" / "attnforge"), Counter[tuple[str, str]]()
    for change in _changes():
        parts = change.module.relative_to("src/attnforge").parts
        for room in (parts[0] if len(parts) > 1 else "(files)", "(all)"):
            found[room, "new modules"] += change.new
            found[room, "in new modules"] += change.grown if change.new else 0
            found[room, "grown"] += 0 if change.new else change.grown
            found[room, "cut"] += change.cut
    return [
        {"package": room, "modules then": then.get(room, (0, 0))[0], "new modules": found[room, "new modules"],
         "modules": now[room][0], "lines then": then.get(room, (0, 0))[1], "cut": found[room, "cut"],
         "grown": found[room, "grown"], "in new modules": found[room, "in new modules"], "lines": now[room][1],
         "code": now[room][2], "words": now[room][3], "blank": now[room][4]}
        for room in sorted(now)
    ]  # fmt: skip


def asked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the capabilities of then take, beside what was asked of them, and what came later, by kind and room."""
    if not rows:
        return []
    by_room = {row["package"]: row for row in rows}
    total = by_room.pop("(all)")
    later = [row for room, row in by_room.items() if room in LATER]
    old = [row for room, row in by_room.items() if room not in LATER]
    kept = {"modules": total["modules"] - total["new modules"], "lines": total["lines then"] - total["cut"]}
    found = [
        {"what": "asked of the capabilities of then: below", **ASKED},
        {"what": "what they took when it was asked", **THEN},
        {"what": "when the house stood", "modules": total["modules then"], "lines": total["lines then"]},
        {"what": "what they take now", **kept},
        {"what": "more than was asked", **{name: max(0, kept[name] - ASKED[name]) for name in ASKED}},
        {"what": "later: modules of then that are longer", "modules": 0, "lines": sum(row["grown"] for row in old)},
        {"what": "later: modules in rooms of then", "modules": sum(row["new modules"] for row in old),
         "lines": sum(row["in new modules"] for row in old)},
    ]  # fmt: skip
    for row in sorted(later, key=lambda row: -int(row["lines"])):
        found.append({"what": f"later: {row['package']}", "modules": row["modules"], "lines": row["lines"]})
    return [*found, {"what": "all", "modules": total["modules"], "lines": total["lines"]}]


#: What a line can be, in the order of the table.
KINDS = ("code", "import", "docstring", "comment", "blank")


def lines() -> list[dict[str, Any]]:
    """What the lines are: all when the house stood, and those of now by whether a letter of them has changed since.

    A line that was rewritten is new to git, whatever it serves: what is unchanged in the rooms of then is less than
    what the capabilities of then take, and `asked`, which goes by places, counts those that replaced others.
    """
    with checkout(COMMITS["stood"]) as folder:
        if folder is None:
            return []
        sources = [path.read_text("utf-8") for path in (folder / "src").rglob("*.py")]
        found = {"when the house stood": Counter(kind for source in sources for kind in structure.kinds(source))}
    package = ROOT / "src" / "attnforge"
    for path in sorted(package.rglob("*.py")):
        command = ["git", "blame", "-s", "-w", "-M", f"{COMMITS['stood']}..HEAD", "--", str(path)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        source = "".join(line.partition(") ")[2] + "\n" for line in said)
        for line, kind in zip(said, structure.kinds(source), strict=True):
            what = "the same since" if line.startswith("^") else "written or changed since"
            what = "in later rooms" if path.relative_to(package).parts[0] in LATER else what
            found.setdefault(what, Counter())[kind] += 1
    order = ("when the house stood", "the same since", "written or changed since", "in later rooms")
    return [{"lines": what, **{k: found[what][k] for k in KINDS}, "all": found[what].total()} for what in order]


class Change(NamedTuple):
    """A module that changed since the house stood: how many lines longer and shorter its places became."""

    module: Path
    grown: int
    cut: int
    new: bool


def _changes() -> list[Change]:
    """Every module that changed since the house stood, place by place; those that are gone among them.

    Lines of a module that is gone which stand in another one now have moved: they are neither cut nor new.
    """
    command = ["git", "diff", "-M", "-U0", "--no-prefix", COMMITS["stood"], "--", "src/attnforge"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[Path, Change] = {}
    added, gone = dict[Path, Counter[str]](), dict[Path, list[str]]()
    for part in re.split(r"^diff --git ", done.stdout, flags=re.MULTILINE)[1:]:
        head, *places = re.split(r"^@@ ", part, flags=re.MULTILINE)
        before, after = (re.search(rf"^{mark} (.*)$", head, re.MULTILINE) for mark in ("---", r"\+\+\+"))
        if before is None or after is None:  # moved as it is
            continue
        name = Path(before[1] if after[1] == "/dev/null" else after[1])
        sizes = [re.match(r"-\d+(?:,(\d+))? \+\d+(?:,(\d+))?", place) for place in places]
        longer = [int(size[2] or 1) - int(size[1] or 1) for size in sizes if size is not None]
        if name.suffix == ".py":
            grown, cut = sum(max(0, n) for n in longer), sum(max(0, -n) for n in longer)
            found[name] = Change(name, grown, cut, before[1] == "/dev/null")
            lines = [line for place in places for line in place.splitlines()[1:]]
            if after[1] == "/dev/null":
                gone[name] = [line[1:].strip() for line in lines if len(line.strip()) > 2]  # more than a bracket
            else:
                added[name] = Counter(line[1:].strip() for line in lines if line.startswith("+"))
    for name, lines in gone.items():
        near = sorted(added, key=lambda other: (other.parts[2] != name.parts[2], other))
        for line in lines:
            to = next((other for other in near if added[other][line] and found[other].grown), None)
            if to is not None:
                added[to][line] -= 1
                found[to] = found[to]._replace(grown=found[to].grown - 1)
                found[name] = found[name]._replace(cut=found[name].cut - 1)
    return list(found.values())


def since() -> list[dict[str, Any]]:
    """The modules that came since the house stood outside of the later rooms, and what they are for, in their words."""
    found = []
    for change in _changes():
        path = change.module
        if change.new and path.parts[2] not in LATER:
            source = (ROOT / path).read_text("utf-8")
            words = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
            found.append({"module": ".".join(path.with_suffix("").parts[2:]), "lines": change.grown, "what": words})
    return sorted(found, key=lambda row: row["module"])


#: What is run with the sources of each version, in a process of its own: formulas on the command line, rows to stdout.
_COMPILES = """
import json, sys, time
import torch
import attnforge as af
af.compile("sin(x)*y + exp(x)/y", af.Box(x=(0, 1), y=(1, 2)), eps=1e-3)  # the first call of a process is slower
for goal, formula, sides, eps in json.load(sys.stdin):
    started = time.process_time()
    try:
        net = af.compile(formula, af.Box({k: tuple(v) for k, v in sides.items()}), eps, dtype=getattr(torch, goal))
        row = {"heads": net.size.heads, "layers": net.size.layers, "bound": net.bound}
    except af.AttnforgeError:
        row = {}
    print(json.dumps({"goal": goal, **row, "seconds": time.process_time() - started}))
"""


def versions() -> list[dict[str, Any]]:
    """The formulas of benchmarks/compile.py, at its tolerances, compiled by earlier sources and by those of now."""
    sys.path.insert(0, str(Path(__file__).parent))
    from formulas import FORMULAS

    recorded = json.loads((RESULTS.parent / "compile.json").read_text("utf-8"))
    asked = [(goal, *FORMULAS[row["name"]], row["eps"]) for goal in ("float32", "float64") for row in recorded[goal]]
    found = []
    for version, commit in (*COMMITS.items(), ("now", "")):
        with checkout(commit) if commit else contextlib.nullcontext(ROOT) as folder:
            if folder is None:
                continue
            env = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-c", _COMPILES], input=json.dumps(asked), env=env, capture_output=True, text=True,
                check=True,
            )  # fmt: skip
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        for goal in ("float32", "float64"):
            own = [row for row in rows if row["goal"] == goal]
            made = [row for row in own if "heads" in row]
            middle = {key: statistics.median(row[key] for row in made) for key in ("heads", "layers")}
            found.append({
                "version": version, "dtype": goal, "formulas": len(own), "compiled": len(made), **middle,
                "most heads": max(row["heads"] for row in made),
                "median CPU seconds": round(statistics.median(row["seconds"] for row in own), 3),
                "largest": round(max(row["seconds"] for row in own), 2),
            })  # fmt: skip
    return found


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


def _shown(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
        console.print(table)


def counts() -> dict[str, Any]:
    """Everything that is counted: the code of each version, its rooms, and what came since."""
    versions: dict[str, Any] = {}
    for version, commit in COMMITS.items():
        with checkout(commit) as folder:
            if folder is not None:
                versions[version] = counted(folder)
    own = rooms()
    return {"counted": counted(), **{f"counted {name}": found for name, found in versions.items()},
            "asked": asked(own), "rooms": own, "since": since(), "shared": _shared(structure.PACKAGE)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="count only")
    parser.add_argument("--lines", action="store_true", help="say what the lines are, too; no law is tried")
    parser.add_argument("--pytest", action="store_true", help="run the tests of the other laws, too")
    parser.add_argument("--before", action="store_true", help="compile with earlier sources, too; no law is tried")
    options, console, found = parser.parse_args(), Console(width=140), counts()
    names = [name for name in ("before", "stood") if f"counted {name}" in found]
    table = Table("the code", *names, "now", title="The house")
    for what, number in found["counted"].items():
        table.add_row(what, *(f"{found[f'counted {name}'].get(what, 0):,}" for name in names), f"{number:,}")
    console.print(table)
    _shown(console, "What was asked of the capabilities of then, and what came later", found["asked"])
    _shown(console, "Lines by package: when the house stood, since then, and now", found["rooms"])
    _shown(console, "Modules that came since, outside of the later rooms", found["since"])
    data: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    data |= found
    if options.lines:
        data["lines"] = lines()
    _shown(console, "What the lines are", data.get("lines", []))
    if options.before:
        data["versions"] = versions()
    _shown(console, "The same formulas, compiled by each version", data.get("versions", []))
    if options.quick or options.before or options.lines:
        RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
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
    if options.pytest:
        table = Table("the same law over", "tests passed", "failed")
        for row in stated():
            others.append(row)
            table.add_row(*(str(value) for value in row.values()))
        console.print(table)
    else:
        others = data.get("others", [])
    seconds = round(time.perf_counter() - started)
    data |= {"heads": heads, "all heads": total, "others": others, "seconds": seconds,
             "machine": platform.processor() or platform.machine()}  # fmt: skip
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
