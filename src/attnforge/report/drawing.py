"""A network as a drawing: its input on the left, a column for each layer, its output on the right; SVG, by hand."""

from __future__ import annotations

import html
from dataclasses import dataclass

from ..charts.themes import DARK, LIGHT, Pair, Theme
from .structure import Structure, Unit

WIDE, TALL, BESIDE, BELOW = 184.0, 50.0, 58.0, 16.0
TOP, EDGE = 44.0, 10.0
MOST = 14  # boxes in a column; the rest is counted
LETTER = 7.7  # width of a letter of the larger type, roughly
#: Families in the order of the theme's colours; what does not depend on other tokens first.
FAMILIES = ("anchor", "product", "gate", "square", "norm", "attention", "softmax", "mix", "max")
FONT = "font-family=\"system-ui, 'Segoe UI', 'Noto Sans', 'Liberation Sans', 'DejaVu Sans', sans-serif\""


@dataclass(frozen=True)
class Node:
    """A box of the drawing: where it stands, what it says, and whether several heads stand behind it."""

    x: float
    y: float
    title: str
    note: str
    colour: str | None
    many: bool = False
    hint: str = ""


def drawing(parts: Structure, inputs: tuple[str, ...], output: str) -> Pair:
    """The drawing for light and for dark pages. `inputs` are labels of the input's channels, or one label for all."""
    return Pair(_draw(parts, inputs, output, LIGHT), _draw(parts, inputs, output, DARK))


def family_colour(family: str, theme: Theme) -> str:
    """The colour that boxes of a family have."""
    return theme.cycle[FAMILIES.index(family) % 6] if family in FAMILIES else theme.soft


def _draw(parts: Structure, inputs: tuple[str, ...], output: str, theme: Theme) -> str:
    columns: list[list[Unit | str]] = [list(inputs[:MOST])]
    hidden: dict[int, int] = {}
    for number in range(1, parts.layers + 1):
        units = parts.layer(number)
        shown: list[Unit | str] = list(units[:MOST])
        if len(units) > MOST:
            shown[-1] = f"and {len(units) - MOST + 1} more"
            hidden |= {unit.number: number for unit in units[MOST - 1 :]}
        columns.append(shown)
    columns.append([output])
    height = TOP + max(len(c) for c in columns) * (TALL + BELOW) + EDGE
    nodes: dict[object, Node] = {}
    for i, column in enumerate(columns):
        x = EDGE + i * (WIDE + BESIDE)
        start = TOP + 0.5 * (height - TOP - EDGE - len(column) * (TALL + BELOW))
        for j, entry in enumerate(column):
            y = start + j * (TALL + BELOW)
            nodes[_key(i, j, entry)] = _node(x, y, entry, i in (0, len(columns) - 1), theme)
    width = EDGE * 2 + len(columns) * WIDE + (len(columns) - 1) * BESIDE
    edges = _edges(parts, len(inputs), hidden, len(columns), nodes)
    body = [_heading(i, len(columns), theme) for i in range(len(columns))]
    body += [_edge(nodes[a], nodes[b], theme) for a, b in dict.fromkeys(edges) if a in nodes and b in nodes]
    body += [_box(node, theme) for node in nodes.values()]
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>{"".join(body)}</svg>'


def _key(column: int, row: int, entry: Unit | str) -> object:
    return entry.number if isinstance(entry, Unit) else (column, row)


def _node(x: float, y: float, entry: Unit | str, end: bool, theme: Theme) -> Node:
    if isinstance(entry, str):
        title, _, note = entry.partition("\n")
        return Node(x, y, title, note, theme.soft if end else None)
    heads = f"{entry.heads} head{'s' if entry.heads > 1 else ''}"
    note = f"{entry.family}, {f'{entry.anchors} anchors' if entry.anchors else heads}"
    if entry.anchors and entry.heads > 1:
        note = f"{heads}, {entry.anchors} anchors"
    title = entry.name.partition(": ")[0]  # a module's operations are named with their source line
    return Node(x, y, title, note, family_colour(entry.family, theme), entry.heads > 1, entry.name)


def _edges(
    parts: Structure, channels: int, hidden: dict[int, int], columns: int, nodes: dict[object, Node]
) -> list[tuple[object, object]]:
    """Pairs of boxes, from and to."""

    def place(number: int) -> object:
        return (hidden[number], MOST - 1) if number in hidden else number

    def channel(c: int) -> object:
        return (0, min(c, channels - 1, MOST - 1))

    found: list[tuple[object, object]] = []
    for unit in parts.units:
        found += [(place(n), place(unit.number)) for n in unit.reads]
        found += [(channel(c), place(unit.number)) for c in unit.inputs]
    end: object = (columns - 1, 0)
    found += [(place(n), end) for n in parts.output] + [(channel(c), end) for c in parts.direct]
    return found


def _heading(i: int, columns: int, theme: Theme) -> str:
    text = "input" if i == 0 else "output" if i == columns - 1 else f"layer {i}"
    x = EDGE + i * (WIDE + BESIDE) + WIDE / 2
    return f'<text x="{x:.0f}" y="24" text-anchor="middle" font-size="13" fill="{theme.soft}">{text}</text>'


def _edge(a: Node, b: Node, theme: Theme) -> str:
    x0, y0, x1, y1 = a.x + WIDE, a.y + TALL / 2, b.x, b.y + TALL / 2
    bend = max(0.5 * (x1 - x0), 30)
    # A line that passes a layer would run behind its boxes unseen: it goes over them.
    over = TALL if x1 - x0 > WIDE and abs(y1 - y0) < TALL else 0.0
    bend = 0.3 * (x1 - x0) if over else bend
    path = f"M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0 - over:.1f} {x1 - bend:.1f} {y1 - over:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="{theme.soft}" stroke-opacity="0.5" stroke-width="1.4"/>'


def _box(node: Node, theme: Theme) -> str:
    x, y = node.x, node.y
    frame = f'rx="9" fill="{theme.surface}" stroke="{node.colour or theme.grid}" stroke-width="1.4"'
    parts = []
    if node.many:
        parts.append(f'<rect x="{x + 4:.1f}" y="{y - 4:.1f}" width="{WIDE}" height="{TALL}" {frame} opacity="0.55"/>')
    parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{WIDE}" height="{TALL}" {frame}/>')
    if node.hint:
        bar = f"M{x + 9:.1f} {y:.1f}h-1a8 8 0 0 0 -8 8v{TALL - 16}a8 8 0 0 0 8 8h1z"
        parts.append(f'<path d="{bar}" fill="{node.colour}"/>')
    middle = y + (22 if node.note else 30)
    title = _cut(node.title, (WIDE - 26) / LETTER)
    parts.append(
        f'<text x="{x + 18:.1f}" y="{middle:.1f}" font-size="13" font-weight="600" fill="{theme.ink}">{title}</text>'
    )
    if node.note:
        note = _cut(node.note, (WIDE - 26) / (0.87 * LETTER))
        parts.append(f'<text x="{x + 18:.1f}" y="{y + 39:.1f}" font-size="11.5" fill="{theme.soft}">{note}</text>')
    if node.hint:
        parts.append(f"<title>{html.escape(node.hint)}</title>")
    return f"<g>{''.join(parts)}</g>"


def _cut(text: str, room: float) -> str:
    """The text, cut in the middle where there is no room for all of it."""
    most = int(room)
    if len(text) > most:
        half = (most - 1) // 2
        text = f"{text[: most - 1 - half]}…{text[-half:]}"
    return html.escape(text)
