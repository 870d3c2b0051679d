"""The shape of the project: imports point one way, modules stay short, nothing hidden, nothing heavy at import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
MODULES = sorted((SRC / "attnforge").rglob("*.py"))

# Lowest first: a module may import its own layer and those before it. The longest matching name counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("kernel",),
    ("arguments", "dtypes", "extras", "native", "progress", "saving", "threads"),
    ("box",),
    ("functions",),
    ("expressions",),
    ("programs",),
    ("certificates",),
    ("network",),
    ("census",),
    ("charts",),
    ("heads",),
    ("frontends", "theorems", "incontext", "rasp"),
    ("compiler",),
    ("blackbox",),
    ("report",),
    ("conversion", "export"),
    ("groundtruth", "explorer"),
    ("files",),
    ("verification",),
    ("lab",),
    ("catalogue",),
    ("demo",),
    ("cli",),
    ("", "__main__"),  # the front door, attnforge/__init__.py
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
HEAVY = (
    "matplotlib", "plotly", "jinja2", "sklearn", "transformers", "onnx", "onnxruntime", "pandas", "scipy", "dask",
    "transformer_lens",
)  # fmt: skip


def _structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_structure", ROOT / "docs" / "structure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


structure = _structure()


def dotted(path: Path) -> str:
    """The module's name without the leading `attnforge.`; the front door is the empty string."""
    parts = path.relative_to(SRC / "attnforge").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


KNOWN = {dotted(path) for path in MODULES} - {""}


def rank(module: str) -> int | None:
    """The layer of a module, by the longest prefix that the table knows."""
    parts = module.split(".") if module else []
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return RANK[""] if not module else next((RANK[name] for name in prefixes if name in RANK), None)


def upward(source: str, module: str, is_package: bool = False, known: Set[str] = frozenset()) -> list[str]:
    """The imports that point up, in words."""
    own = rank(module)
    assert own is not None, f"attnforge.{module} is in no layer: give it a place in LAYERS"
    names = {name for name, _ in structure.imported(source, module, is_package, {k: None for k in known})}
    targets = {name: rank(name) for name in sorted(names)}
    return [f"attnforge.{module} imports attnforge.{name}" for name, r in targets.items() if r is None or r > own]


def habits(source: str) -> list[str]:
    """What the house style forbids in `src`, with line numbers."""
    found = []
    for node in ast.walk(structure.parsed(source)):
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


def test_imports_point_one_way() -> None:
    found = [upward(path.read_text("utf-8"), dotted(path), path.name == "__init__.py", KNOWN) for path in MODULES]
    assert [words for each in found for words in each] == []


def test_an_import_that_points_up_is_found() -> None:
    known = {"heads.anchor", "box"}
    assert upward("from attnforge.heads import anchor", "functions.registry", known=known)
    assert upward("def f():\n    from ..heads.anchor import AnchorHead", "functions.registry", known=known)
    assert upward("import attnforge", "heads.anchor"), "the front door is above everything"
    assert upward("from .. import __version__", "report.html")
    assert not upward("from ..box import Box\nfrom attnforge import box", "functions.registry", known=known)
    assert not upward("if TYPE_CHECKING:\n    from attnforge.heads import anchor", "functions.registry", known=known)
    with pytest.raises(AssertionError, match="in no layer"):
        upward("", "attic")


def test_every_package_stands_once_in_the_layers() -> None:
    names = [name for layer in LAYERS for name in layer]
    assert len(names) == len(set(names))
    assert set(names) - {""} == {structure.package_of(name) for name in structure.modules() if name}


def test_there_are_no_cycles() -> None:
    graph = structure.module_graph()
    assert structure.cycles(structure.package_graph(graph)) == []
    assert structure.cycles({name: targets for name, targets in graph.items() if name}) == []


def test_a_cycle_is_found() -> None:
    graph = structure.module_graph()
    graph["functions.registry"] = graph["functions.registry"] | {"heads.choose"}
    assert structure.cycles(structure.package_graph(graph))[0] == ["expressions", "functions", "heads", "programs"]
    assert any("heads.choose" in group for group in structure.cycles(graph))


def hidden(package: str, names: Set[str]) -> list[str]:
    """The public names of a package that are functions or classes although a module of the package bears them."""
    found = importlib.import_module(package)
    public = {name: getattr(found, name) for name in getattr(found, "__all__", ())}
    things = {name: thing for name, thing in public.items() if name in names}
    return [f"{package}.{name}" for name, thing in things.items() if not isinstance(thing, ModuleType)]


PACKAGES = [dotted(p) for p in MODULES if p.name == "__init__.py"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p or "attnforge")
def test_no_function_hides_a_module(package: str) -> None:
    """`import attnforge.certificates.rounding as r` finds the module, whatever the package exports."""
    below = {m.removeprefix(package).removeprefix(".") for m in structure.modules() if m.startswith(package)}
    children = {name for name in below if name and "." not in name}
    assert hidden(f"attnforge.{package}".removesuffix("."), children) == []
    for child in children - {"__main__"}:
        module = importlib.import_module(f"attnforge.{package}.{child}" if package else f"attnforge.{child}")
        assert getattr(importlib.import_module(f"attnforge.{package}".removesuffix(".")), child) is module


def test_a_function_that_hides_a_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import attnforge.theorems as package

    monkeypatch.setattr(package, "ramps", lambda: None)
    monkeypatch.setattr(package, "__all__", [*package.__all__, "ramps"])
    assert hidden("attnforge.theorems", {"ramps", "bounds"}) == ["attnforge.theorems.ramps"]


#: Modules whose last name says that they build weights, plan them or fit them; and the constructions of theorems.
BUILDS = {"construction", "fit", "assemble", "plan", "search", "pipeline", "head", "build", "activation",
          "ramps", "universal", "partition", "in_context", "spectral", "ridge", "legacy", "clean"}  # fmt: skip
#: Modules that compute certificates.
CHECKS = re.compile(
    r"certificates\..*|kernel\..*|heads\.\w+\.(bound|rule|site|target)"
    r"|heads\.(rule|site|stored|families|choose)|(functions|expressions|programs|census)\..*|network|box"
    r"|blackbox\.grid|theorems\.(bounds|result)"
    r"|compiler\.(propagation|split|compiled|layout|derivation|enclosure|lipschitz|quantise)|heads\.slopes"
    r"|incontext\.(certificate|problem|losses)|export\.plain\.(certificate|source|stream|spec|transformer|derivation)"
    r"|groundtruth\.variants\.(variant|rotation|simulation)|verification\.(property|graph|proof|programs)"
    r"|rasp\.network\.(facts|normal|layout|data|proof|compiled|derivation|several)"
)


def leaning(graph: dict[str, set[str]]) -> list[str]:
    """What computes certificates and reaches, directly or through others, something that builds weights."""
    checkers = [name for name in graph if CHECKS.fullmatch(name)]
    pairs = [(name, other) for name in checkers for other in structure.reachable(graph, name)]
    return sorted(f"{name} reaches {other}" for name, other in pairs if other.split(".")[-1] in BUILDS)


def test_the_checker_does_not_lean_on_the_builder() -> None:
    graph = structure.module_graph()
    assert len([name for name in graph if CHECKS.fullmatch(name)]) > 110
    assert leaning(graph) == []


def test_a_checker_that_builds_is_found() -> None:
    graph = structure.module_graph()
    graph["heads.gate.bound"] = graph["heads.gate.bound"] | {"heads.gate.construction"}
    found = leaning(graph)
    assert "heads.gate.rule reaches heads.gate.construction" in found


ALLOWED = {"flint", "errors", *sys.stdlib_module_names}  # what the kernel may import, besides itself


def test_the_kernel_stands_alone() -> None:
    """It shares the errors with the rest, and nothing else: no builder, no analysis, no array of anyone's."""
    home = SRC / "attnforge" / "kernel"
    # each is for files of its own: token programs, plain transformers, heads, functions known by samples, estimators
    others = [(home / "programs", 1000, 1800), (home / "plain", 300, 1200), (home / "alone", 200, 1500)]
    others += [(home / "sampled", 200, 900), (home / "incontext", 200, 600)]
    for part, least, most in ((home, 1000, 2760), *others):
        lines, inner = 0, part != home
        for path in sorted(part.glob("*.py")):
            source = path.read_text("utf-8")
            lines += sum(bool(line.strip()) for line in source.splitlines())
            for node in ast.walk(structure.parsed(source)):
                if isinstance(node, ast.ImportFrom):
                    name = (node.module or "").split(".")[0]
                    own = node.level == 1 or (inner and node.level == 2)
                    assert own or (name in ALLOWED and node.level in (0, 2 + inner)), f"{path.name}: {node.module}"
                elif isinstance(node, ast.Import):
                    assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED, path.name
        assert least < lines < most, "a referee reads each part in a day"


def test_no_private_name_crosses_packages() -> None:
    known = structure.modules()
    found = []
    for module, path in known.items():
        for target, name in structure.imported(path.read_text("utf-8"), module, path.name == "__init__.py", known):
            private = [part for part in (*target.split("."), name) if part.startswith("_") and part != "__version__"]
            if private and structure.package_of(target) != structure.package_of(module):
                found.append(f"{module} imports {target}.{name}")
    assert found == []


def test_no_family_is_named_outside_the_table() -> None:
    """Sites are typed: nobody asks a site for its family's name to decide what to do."""
    pattern = re.compile(r"\.family (==|!=|in|not in) [\"'(\[{]")
    assert pattern.search('if site.family == "anchor":')
    allowed = {"export.plain.legacy"}  # files of earlier versions name their families
    places = [
        f"{dotted(path)}: {line.strip()}"
        for path in MODULES
        if dotted(path) not in allowed
        for line in path.read_text("utf-8").splitlines()
        if pattern.search(line)
    ]
    assert places == []


def test_no_type_of_site_is_asked_for_outside_of_heads() -> None:
    """What depends on a family is asked of its rule, builder or site: no other room knows the types."""
    known = structure.modules()
    found = [
        f"{module} imports {name} of {target}"
        for module, path in known.items() if structure.package_of(module) != "heads"
        for target, name in structure.imported(path.read_text("utf-8"), module, path.name == "__init__.py", known)
        if re.fullmatch(r"heads\.\w+\.site", target) and not name.isupper()
    ]  # fmt: skip
    assert found == []


def definitions(source: str) -> dict[str, ast.stmt]:
    """The constants of a module: capital names at its top."""
    found: dict[str, ast.stmt] = {}
    for node in structure.parsed(source).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        found |= {t.id: node for t in targets if isinstance(t, ast.Name) and t.id.lstrip("_").isupper()}
    return found


def unexplained(source: str) -> list[str]:
    """Constants that hold numbers of our own choosing without a comment beside or above them."""
    lines, found = source.splitlines(), []
    for name, node in definitions(source).items():
        parts = list(ast.walk(node.value)) if getattr(node, "value", None) else []  # type: ignore[attr-defined]
        if any(isinstance(part, (ast.Call, ast.Lambda, ast.comprehension, ast.Subscript)) for part in parts):
            continue
        if not any(isinstance(part, ast.Constant) and type(part.value) in (int, float) for part in parts):
            continue
        own = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
        below = lines[node.end_lineno].strip() if node.end_lineno and node.end_lineno < len(lines) else ""
        if "#" not in own and not above.startswith("#") and not below.startswith('"""'):
            found.append(name)
    return found


def test_every_number_has_its_reason() -> None:
    found = {dotted(path): unexplained(path.read_text("utf-8")) for path in MODULES}
    assert {module: names for module, names in found.items() if names} == {}


def test_a_number_without_a_reason_is_found() -> None:
    assert unexplained("CELLS = 512\nNAMES = ('a',)\n") == ["CELLS"]
    assert unexplained("CELLS = 512  # a power of two\n#: why\nMOST = 3\n") == []


@pytest.mark.parametrize("name", ["DTYPES", "SHIPPED", "Array"])
def test_one_of_each(name: str) -> None:
    pattern = re.compile(rf"^{name}\b.* = ", re.MULTILINE)
    assert [dotted(path) for path in MODULES if pattern.search(path.read_text("utf-8"))] == ["dtypes"]


@pytest.mark.parametrize("word", ["Stage", "Style", "Product", "Site", "lower", "Certificate", "Compiled", "Ramp"])
def test_one_meaning_for_each_word(word: str) -> None:
    pattern = re.compile(rf"^(class|def) {word}\b|^{word}\b.* = ", re.MULTILINE)
    assert len([dotted(path) for path in MODULES if pattern.search(path.read_text("utf-8"))]) <= 1


#: Words of languages that people write: a plan and a size of a theorem, constants and tables of programs.
PUBLIC_WORDS = {"Constant", "Plan", "Size", "Table"}


def shared_words(names: Mapping[str, Set[str]]) -> set[str]:
    """Names of classes that several packages have; the kernel shares nothing with the rest, words included."""
    rooms: dict[str, set[str]] = {}
    for module, found in names.items():
        for name in found:
            rooms.setdefault(name, set()).add(structure.package_of(module))
    return {name for name, found in rooms.items() if len(found - {"kernel"}) > 1}


def test_a_class_has_its_name_for_itself() -> None:
    classes = {
        dotted(path): {n.name for n in structure.parsed(path.read_text("utf-8")).body if isinstance(n, ast.ClassDef)}
        for path in MODULES
    }
    assert shared_words(classes) == PUBLIC_WORDS
    sabotaged = {**classes, "report.html": classes["report.html"] | {"Unit", "Node"}}
    assert shared_words(sabotaged) == PUBLIC_WORDS | {"Node"}, "a Unit stands in the same package"


def test_a_form_is_affine_everywhere() -> None:
    """The kernel has a class of its own, since it shares nothing; no other thing bears the name."""
    pattern = re.compile(r"^class Form\b|^Form\b.* = ", re.MULTILINE)
    found = {dotted(path) for path in MODULES if pattern.search(path.read_text("utf-8"))}
    assert found == {"programs.affine", "kernel.program"}


def test_guards_against_bool_stand_in_one_place() -> None:
    places = [dotted(path) for path in MODULES if re.search(r"isinstance\(\w+, bool\) or", path.read_text("utf-8"))]
    assert places == []


def test_the_picture_is_drawn_from_the_code() -> None:
    graph = {name: targets for name, targets in structure.package_graph().items() if name != "__main__"}
    assert structure.PICTURE.read_text("utf-8") == structure.svg(graph), "python docs/structure.py draws it again"
    assert "![" in (ROOT / "docs" / "architecture.md").read_text("utf-8")


def test_house_style() -> None:
    found = {dotted(path): habits(path.read_text("utf-8")) for path in MODULES}
    assert {module: lines for module, lines in found.items() if lines} == {}


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
    return sorted(p for p in files if p.is_file() and p.suffix in kinds and not {"__pycache__", ".git"} & {*p.parts})


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
