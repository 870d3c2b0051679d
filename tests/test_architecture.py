"""The shape of the project: imports point one way, modules stay short, nothing hidden, nothing heavy at import."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
MODULES = sorted((SRC / "attnforge").rglob("*.py"))

# Lowest first: a module may import its own layer and those before it. The longest matching name counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("arguments", "dtypes", "extras", "progress", "threads"),
    ("box",),
    ("functions",),
    ("expressions",),
    ("programs",),
    ("certificates",),
    ("network",),
    ("census",),
    ("charts",),
    ("heads",),
    ("frontends", "theorems", "incontext"),
    ("compiler",),
    ("blackbox",),
    ("report",),
    ("conversion", "export"),
    ("files",),
    ("lab",),
    ("demo",),
    ("cli",),
    ("", "__main__"),  # the front door, attnforge/__init__.py
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
HEAVY = (
    "matplotlib", "plotly", "jinja2", "sklearn", "transformers", "onnx", "onnxruntime", "pandas", "scipy", "dask",
    "transformer_lens",
)  # fmt: skip


def dotted(path: Path) -> str:
    """The module's name without the leading `attnforge.`; the front door is the empty string."""
    parts = path.relative_to(SRC / "attnforge").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rank(module: str) -> int | None:
    """The layer of a module, by the longest prefix that the table knows."""
    parts = module.split(".") if module else []
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return RANK[""] if not module else next((RANK[name] for name in prefixes if name in RANK), None)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`, which never run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def imports(source: str, module: str, is_package: bool, known: Set[str]) -> set[str]:
    """The attnforge modules that a source imports, at its top or inside functions."""
    found: set[str] = set()
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["attnforge", *(module.split(".") if module else [])]
            package = package if is_package else package[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from attnforge.heads import anchor` imports a module, `from attnforge.box import Box` a name of one.
            names = [f"{stem}.{a.name}" if f"{stem}.{a.name}" in known else stem for a in node.names]
        else:
            continue
        found |= {n.removeprefix("attnforge").removeprefix(".") for n in names if n.split(".")[0] == "attnforge"}
    return found - {module}


def upward(source: str, module: str, is_package: bool = False, known: Set[str] = frozenset()) -> list[str]:
    """The imports that point up, in words."""
    own = rank(module)
    assert own is not None, f"attnforge.{module} is in no layer: give it a place in LAYERS"
    targets = {name: rank(name) for name in sorted(imports(source, module, is_package, known))}
    return [f"attnforge.{module} imports attnforge.{name}" for name, r in targets.items() if r is None or r > own]


def habits(source: str) -> list[str]:
    """What the house style forbids in `src`, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "eval", "exec"}:
            found.append(f"line {node.lineno}: {node.func.id}()")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
            found += [f"line {node.lineno}: imports {name}" for name in names & {"pickle", "dill", "cloudpickle"}]
            found += [f"line {node.lineno}: star import" for alias in node.names if alias.name == "*"]
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"line {node.lineno}: bare except")
    found += [f"line {n}: {m[0]}" for n, line in enumerate(source.splitlines(), 1)
              if (m := re.search(r"\b(TODO|FIXME)\b", line))]  # fmt: skip
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: dotted(p) or "attnforge")
def test_imports_point_one_way(path: Path) -> None:
    known = {f"attnforge.{dotted(p)}" for p in MODULES if dotted(p)}
    assert upward(path.read_text("utf-8"), dotted(path), path.name == "__init__.py", known) == []


def test_an_import_that_points_up_is_found() -> None:
    known = {"attnforge.heads.anchor", "attnforge.box"}
    assert upward("from attnforge.heads import anchor", "functions.registry", known=known)
    assert upward("def f():\n    from ..heads.anchor import AnchorHead", "functions.registry", known=known)
    assert upward("import attnforge", "heads.anchor"), "the front door is above everything"
    assert upward("from .. import __version__", "report.html")
    assert not upward("from ..box import Box\nfrom attnforge import box", "functions.registry", known=known)
    assert not upward("if TYPE_CHECKING:\n    from attnforge.heads import anchor", "functions.registry", known=known)
    with pytest.raises(AssertionError, match="in no layer"):
        upward("", "attic")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: dotted(p) or "attnforge")
def test_house_style(path: Path) -> None:
    source = path.read_text("utf-8")
    assert habits(source) == []


@pytest.mark.parametrize(
    "source", ["print(1)", "eval('1')", "import pickle", "from pickle import load", "from os import *", "# TODO"]
)
def test_each_forbidden_habit_is_found(source: str) -> None:
    assert habits(source)
    assert habits("try:\n    pass\nexcept:\n    pass")
    assert not habits("console.print(1)")


def loaded(module: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter holds after importing a module."""
    code = f"import sys, {module}; sys.stdout.write(' '.join(m for m in {HEAVY} if m in sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavier_than_torch() -> None:
    # What torch takes along by itself is not ours to answer for.
    assert loaded("attnforge") - loaded("torch") == set()
    assert loaded("jinja2") == {"jinja2"}, "the probe sees what is loaded"


def texts() -> list[Path]:
    """Every text file that belongs to the project."""
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", ".ci")]
    files = [p for p in ROOT.iterdir() if p.is_file()] + [p for f in folders if f.is_dir() for p in f.rglob("*")]
    kinds = {".py", ".md", ".toml", ".txt", ".html", ".css", ".js", ".cff", ".json", ".typed", ""}
    return sorted(p for p in files if p.is_file() and p.suffix in kinds and "__pycache__" not in p.parts)


def test_no_absolute_paths() -> None:
    places = "|".join(("home", "Users", "root", "work", "tmp", "opt", "var"))
    pattern = re.compile(rf"(^|[^A-Za-z0-9_./])/({places})/[A-Za-z]")
    assert pattern.search("see /" + "home/someone")
    hits = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
        for path in texts()
        for n, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert hits == []


def test_ci_runs_what_contributors_run() -> None:
    script, makefile = (ROOT / ".ci" / "run").read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    commands = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make lint", "make test"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = set(re.findall(r"^([a-z]+):.*## ", makefile, flags=re.MULTILINE))
    assert {"help", "setup", "demo", "test", "lint", "bench", "browser", "clean"} <= targets


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = re.search(r"^EXTRAS \?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    assert extras, "the Makefile states which extras the tests use"
    wanted = list(project["dependencies"])
    for extra in extras[1].strip().split(","):
        wanted += project["optional-dependencies"][extra]
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {pin.split("==")[0].lower() for pin in pins if "==" in pin}
    assert {re.split(r"[<>=!~\[ ]", requirement)[0].lower() for requirement in wanted} - pinned == set()
    assert "torch==2.13.0" in pins, "without a local suffix, so that every index can satisfy it"
