"""`score`: how much of a network's ground truth a found circuit has, and how well it ranks edges.

What counts as right are heads and edges that move an output, by the witnesses of a manifest. Heads and edges whose
effect the manifest leaves open (`still`) are neither right nor wrong. Every other head, and every other pair of a node
and one in a later layer, is wrong if it is named: for most of them zeros in the weights prove that nothing can come of
it, and for the rest the certificate does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments import number
from ..errors import ArgumentError, closest
from .manifest import INPUT, OUTPUT, Edge, HeadEntry, Manifest

Pair = tuple[str, str]


@dataclass(frozen=True)
class Counts:
    """What was found and is right, was found and is wrong, and was missed; `auc` is that of the ranking, or None."""

    right: int
    wrong: int
    missed: int
    auc: float | None = None
    roc: tuple[tuple[float, float], ...] = ()  # false and true positive rates, from (0, 0) to (1, 1)

    @property
    def precision(self) -> float:
        """The share of what was found that is right; 1 where nothing was found."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        """The share of what is right that was found; 1 where there is nothing to find."""
        return self.right / (self.right + self.missed) if self.right + self.missed else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0

    def __str__(self) -> str:
        ranked = "" if self.auc is None else f", AUC {self.auc:.3f}"
        return f"precision {self.precision:.3f}, recall {self.recall:.3f}{ranked}"


@dataclass(frozen=True)
class Score:
    """How good a found circuit is."""

    heads: Counts
    edges: Counts

    def to_json(self) -> dict[str, Any]:
        """Precision, recall, F1, counts and the area under the curve, of heads and edges."""
        names = ("right", "wrong", "missed", "precision", "recall", "f1", "auc")
        return {what: {n: getattr(getattr(self, what), n) for n in names} for what in ("heads", "edges")}

    def __str__(self) -> str:
        return f"heads: {self.heads}\nedges: {self.edges}"


def score(found: Mapping[str, Any], manifest: Manifest, *, threshold: float | None = None) -> Score:
    """Precision and recall of heads and edges that someone found, and the ROC of those that are ranked.

    `found` has "heads" and "edges", or one of them: ids, and pairs of ids ("input" and "output" are nodes, too), each
    in a list, or as a mapping to numbers that rank them. With numbers, `threshold` says from where on they count as
    found; left out, those above 0 do. What is not named ranks last.

    >>> from attnforge.groundtruth.manifest import Claim, Inputs, Output, Witness
    >>> moves = (Witness("y", 0, None, 1.0),)
    >>> heads = [HeadEntry(f"L0.H{i}", 0, i, "h", i, "map", "", "", "memory", moves=moves[i:]) for i in (0, 1)]
    >>> edges = (Edge("input", "L0.H0", (), ("query",), moves), Edge("L0.H0", "output", (), ("output",), moves))
    >>> truth = Manifest("f", "plain", Inputs("numbers", ("x",), ((1,),)), (Output("y"),), (), tuple(heads), edges,
    ...                  ((0.0,),), Claim("exact", 0.0, "float32", "analysis", 0.0), "")
    >>> print(score({"heads": ["L0.H0", "L0.H1"], "edges": {("L0.H0", "output"): 2.0}}, truth))
    heads: precision 0.500, recall 1.000
    edges: precision 1.000, recall 0.500, AUC 0.750
    """
    if not isinstance(manifest, Manifest):
        raise ArgumentError(f"score takes a manifest, got {type(manifest).__name__}; Manifest.load(path) reads one")
    if not isinstance(found, Mapping) or not set(found) <= {"heads", "edges"}:
        raise ArgumentError('a found circuit is {"heads": [...], "edges": [...]}, or one of the two')
    if threshold is not None:
        number("threshold", threshold)
    nodes = {INPUT: -1, **{head.id: head.layer for head in manifest.heads}}
    heads = _ranked(found.get("heads", ()), "heads")
    edges = _ranked(found.get("edges", ()), "edges")
    for name in heads[0]:
        _known(name, [head.id for head in manifest.heads])
    for pair in edges[0]:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ArgumentError(f"an edge is a pair of nodes, such as ('input', 'L0.H0'), got {pair!r}")
        for node in pair:
            _known(node, [*nodes, OUTPUT])
        if pair[0] == OUTPUT or pair[1] == INPUT or nodes[pair[0]] >= nodes.get(pair[1], math.inf):
            raise ArgumentError(f"nothing goes from '{pair[0]}' to '{pair[1]}': an edge goes to a later layer")
    every = [
        (a, b) for a, at in nodes.items() for b, to in (*nodes.items(), (OUTPUT, math.inf)) if at < to and b != INPUT
    ]
    stated = {(edge.source, edge.target): edge for edge in manifest.edges}
    return Score(
        _counts(heads, {head.id: head for head in manifest.heads}, threshold),
        _counts(edges, {pair: stated.get(pair) for pair in every}, threshold),
    )


def _ranked(given: Any, what: str) -> tuple[dict[Any, float], bool]:
    """What was found, with a number for each, and whether the numbers were given."""
    if isinstance(given, Mapping):
        return {_name(key): _rank(value, key, what) for key, value in given.items()}, True
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(f"{what} are a list, or a mapping to numbers, got {type(given).__name__}")
    return {_name(item): 1.0 for item in given}, False


def _rank(value: Any, key: Any, what: str) -> float:
    """A number, also one of NumPy or PyTorch; infinite ones rank, too."""
    found = value.item() if getattr(value, "shape", None) == () else value
    try:
        if isinstance(found, int | float) and not math.isnan(found):
            return float(found)
    except OverflowError:  # a whole number beyond float64
        pass
    raise ArgumentError(f"{what} are ranked by numbers, and {key!r} has {str(value)[:40]!r}")


def _name(item: Any) -> Any:
    """A node, or an edge as a pair; JSON has lists for these."""
    found = tuple(item) if isinstance(item, list) else item
    if not all(isinstance(part, str) for part in (found if isinstance(found, tuple) else (found,))):
        raise ArgumentError(f"a node is a text, such as 'L0.H0', and an edge a pair of these, got {item!r}")
    return found


def _known(name: Any, names: list[str]) -> None:
    if name not in names:
        some = ", ".join(names[:4])
        raise ArgumentError(
            f"the manifest has no node {name!r}{closest(str(name), names)}; its nodes are {some}"
            f"{', ...' if len(names) > 4 else ''}"
        )


def _counts(
    found: tuple[dict[Any, float], bool], every: Mapping[Any, HeadEntry | Edge | None], threshold: float | None
) -> Counts:
    numbers, ranked = found
    decided = {
        key: bool(what and what.moves) for key, what in every.items() if not (what and what.still and not what.moves)
    }
    least = 0.0 if threshold is None else threshold
    named = {
        key
        for key, number in numbers.items()
        if key in decided and (number > least or number == threshold or not ranked)
    }
    right = sum(decided[key] for key in named)
    good = sum(decided.values())
    counts = (right, len(named) - right, good - right)
    if not ranked or not 0 < good < len(decided):
        return Counts(*counts)
    order = sorted(decided, key=lambda key: -numbers.get(key, -math.inf))
    points, area, at = [(0.0, 0.0)], 0.0, 0
    while at < len(order):
        same = [key for key in order[at:] if numbers.get(key, -math.inf) == numbers.get(order[at], -math.inf)]
        up = sum(decided[key] for key in same)
        x, y = points[-1]
        after = (x + (len(same) - up) / (len(decided) - good), y + up / good)
        area += (after[0] - x) * (y + after[1]) / 2
        points.append(after)
        at += len(same)
    return Counts(*counts, area, tuple(points))
