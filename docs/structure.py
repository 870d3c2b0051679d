"""The project's packages and their imports, read from the code: what tests check and what the picture shows.

python docs/structure.py          writes docs/images/architecture.svg
python docs/structure.py --list   prints every package with what it imports directly and nothing between them says
python docs/structure.py --sizes  prints the modules and lines of every package: code, docstrings and comments, blank
                                  (of another checkout with --root FOLDER)
"""

from __future__ import annotations

import argparse
import ast
import functools
import html
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "attnforge"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
Graph = dict[str, set[str]]

#: What a box says below its name, for those on the data's way.
WORDS = {
    "functions": "of one scalar: ranges, Taylor tables",
    "expressions": "of scalars, in normal form",
    "programs": "what is computed, and where it lives",
    "certificates": "bounds, rounding, files",
    "network": "attention layers, the runtime",
    "census": "is it attention and nothing else?",
    "heads": "families: site, weights, rule",
    "frontends": "formulas and modules to programs",
    "compiler": "plan, lower, assemble, certify",
    "charts": "figures as data, and drawn",
}


def modules() -> dict[str, Path]:
    """Every module by its name below `attnforge.`; the front door is the empty string."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source; made once."""
    return ast.parse(source)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`, which never run."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
                yield node
                waiting.append(node)


@functools.cache
def _statements(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The imports of a source that run."""
    return tuple(node for node in _running(parsed(source)) if isinstance(node, ast.Import | ast.ImportFrom))


def imported(source: str, module: str, is_package: bool, known: Mapping[str, object]) -> set[tuple[str, str]]:
    """(module, name) of everything that a source imports from attnforge, at its top or inside functions."""
    found: set[tuple[str, str]] = set()
    for node in _statements(source):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "attnforge"]
        else:
            package = ["attnforge", *(module.split(".") if module else [])]
            package = package if is_package else package[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            if stem.split(".")[0] != "attnforge":
                continue
            below = stem.removeprefix("attnforge").removeprefix(".")
            names = []
            for alias in node.names:  # `from attnforge.heads import anchor` imports a module, other names are of one
                inner = f"{below}.{alias.name}".removeprefix(".")
                names.append((f"attnforge.{inner}", "") if inner in known else (stem, alias.name))
        found |= {(name.removeprefix("attnforge").removeprefix("."), what) for name, what in names}
    return {pair for pair in found if pair[0] != module}


def module_graph() -> Graph:
    """Module -> modules that it imports."""
    known = modules()
    return {
        name: {m for m, _ in imported(path.read_text("utf-8"), name, path.name == "__init__.py", known) if m in known}
        for name, path in known.items()
    }


def package_of(module: str) -> str:
    """The first part of a module's name: a package, or a module beside the packages."""
    return module.split(".")[0]


def package_graph(graph: Graph | None = None) -> Graph:
    """Package -> packages that its modules import; the front door, which loads names lazily, is left out."""
    found: Graph = {}
    for module, targets in (graph or module_graph()).items():
        if module:
            others = {package_of(t) for t in targets if t} - {package_of(module)}
            found.setdefault(package_of(module), set()).update(others)
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reach = {node: reachable(graph, node) for node in graph}
    groups = {frozenset(n for n in graph if n in reach[node] and node in reach[n]) for node in graph}
    return sorted(sorted(group) for group in groups if group)


def reachable(graph: Graph, start: str) -> set[str]:
    """Everything that a node imports, directly or through others."""
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def reduced(graph: Graph) -> Graph:
    """The same without edges that a longer way says already."""
    reach = {node: reachable(graph, node) for node in graph}
    return {
        node: {t for t in targets if not any(t in reach[other] for other in targets if other != t)}
        for node, targets in graph.items()
    }


def levels(graph: Graph) -> dict[str, int]:
    """How many packages stand below each one, at most."""
    found: dict[str, int] = {}

    def level(node: str) -> int:
        if node not in found:
            found[node] = 1 + max((level(t) for t in graph[node]), default=-1)
        return found[node]

    for node in graph:
        level(node)
    return found


#: Modules that everything may use: one box at the bottom, without lines.
SMALL = ("errors", "arguments", "dtypes", "extras", "progress", "threads")
WIDTH, ROW, BOX, PAD = 1000, 74, 40, 12  # pixels: of the picture, of a row, a box's height, between boxes


def svg(graph: Graph) -> str:
    """The packages in rows, those that everything may use at the bottom; lines go down to what is imported."""
    graph = {name: targets - set(SMALL) for name, targets in graph.items() if name not in SMALL}
    direct, level = reduced(graph), levels(graph)
    rows = [[n for n in sorted(graph) if level[n] == k] for k in range(max(level.values()), -1, -1)]
    at: dict[str, float] = {}
    for row in rows:  # each below those that import it
        above = {n: [at[m] for m in at if n in direct[m]] for n in row}
        row.sort(key=lambda n: (sum(above[n]) / len(above[n]) if above[n] else 0.5, n))
        widths = [_width(n) for n in row]
        left = (WIDTH - sum(widths) - PAD * 2 * (len(row) - 1)) / 2
        for name, width in zip(row, widths, strict=True):
            at[name] = (left + width / 2) / WIDTH
            left += width + PAD * 2
    place = {name: (at[name] * WIDTH, 24 + ROW * i) for i, row in enumerate(rows) for name in row}
    lines, boxes = [], []
    for name, targets in sorted(direct.items()):
        x, y = place[name]
        for target in sorted(targets):
            u, v = place[target]
            bend = (y + BOX + v) / 2
            lines.append(f'<path d="M{x:.0f} {y + BOX:.0f}C{x:.0f} {bend:.0f} {u:.0f} {bend:.0f} {u:.0f} {v:.0f}"/>')
        width, words = _width(name), WORDS.get(name, "")
        boxes.append(f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width}" height="{BOX}" rx="7"/>')
        boxes.append(f'<text x="{x:.0f}" y="{y + (18 if words else 25)}">{html.escape(name)}</text>')
        if words:
            boxes.append(f'<text class="w" x="{x:.0f}" y="{y + 32}">{html.escape(words)}</text>')
    y = 24 + ROW * len(rows)
    boxes.append(f'<rect x="{0.18 * WIDTH:.0f}" y="{y}" width="{0.64 * WIDTH:.0f}" height="{BOX}" rx="7"/>')
    boxes.append(f'<text x="{WIDTH // 2}" y="{y + 18}">{", ".join(SMALL)}</text>')
    boxes.append(f'<text class="w" x="{WIDTH // 2}" y="{y + 32}">small modules that everything may use</text>')
    height = y + ROW
    style = (
        "text{font:600 14px system-ui,sans-serif;text-anchor:middle;fill:#1b1f24}.w{font:11px system-ui,sans-serif;"
        "fill:#57606a}rect{fill:#f6f8fa;stroke:#57606a}path{fill:none;stroke:#0072b2;stroke-opacity:.55;stroke-width:1.4}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.w{fill:#9da7b1}rect{fill:#161b22;stroke:#9da7b1}"
        "path{stroke:#56b4e9}}"
    )
    title = "Packages of attnforge; a line goes from a package down to one that it imports."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{style}</style>\n" + "\n".join([*lines, *boxes]) + "\n</svg>\n"
    )


def kinds(source: str) -> list[str]:
    """What every line is: code, import, docstring, comment or blank; docstrings keep their blank lines."""
    lines, found = source.splitlines(), dict[int, str]()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            found |= dict.fromkeys(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1), "docstring")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), "import")
    for n, line in enumerate(lines, 1):
        bare = line.strip()
        found.setdefault(n, "comment" if bare.startswith("#") else "code" if bare else "blank")
    return [found[n] for n in range(1, len(lines) + 1)]


def sizes(package: Path) -> dict[str, tuple[int, int, int, int, int]]:
    """Package -> modules, lines, and of these: code, docstrings and comments, blank ones outside of them."""
    found: dict[str, list[int]] = {}
    for path in sorted(package.rglob("*.py")):
        parts, said = path.relative_to(package).parts, kinds(path.read_text("utf-8"))
        words, blank = said.count("docstring") + said.count("comment"), said.count("blank")
        counts = (1, len(said), len(said) - words - blank, words, blank)
        for name in (parts[0] if len(parts) > 1 else "(files)", "(all)"):
            found[name] = [a + b for a, b in zip(found.get(name, [0] * 5), counts, strict=True)]
    return {name: (a, b, c, d, e) for name, (a, b, c, d, e) in found.items()}


def _width(name: str) -> int:
    return max(86, 9 * len(name) + 24, 6 * len(WORDS.get(name, "")) + 20)


def main() -> None:
    """Write the picture, or print the packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print instead of drawing")
    parser.add_argument("--sizes", action="store_true", help="print how large the packages are instead")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose packages --sizes counts")
    asked = parser.parse_args()
    if asked.sizes:
        sys.stdout.write(f"{'':14s} modules  lines   code  words  blank\n")
        for name, (count, *lines) in sorted(sizes(asked.root / "src" / "attnforge").items()):
            sys.stdout.write(f"{name:14s} {count:7d} {' '.join(f'{n:6d}' for n in lines)}\n")
        return
    graph = package_graph()
    if asked.list:
        for name, targets in sorted(reduced(graph).items()):
            sys.stdout.write(f"{name:14s} {' '.join(sorted(targets))}\n")
        return
    PICTURE.write_text(svg({name: targets for name, targets in graph.items() if name != "__main__"}), encoding="utf-8")


if __name__ == "__main__":
    main()
