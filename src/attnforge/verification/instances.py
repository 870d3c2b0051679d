"""Making problems for a network: a box, conditions, a threshold that is as close as the wanted margin, a proof."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..compiler.compiled import CompiledNetwork
from ..dtypes import Array, dtype_name
from ..errors import PrecisionError
from ..kernel.file import outward
from .graph import StoredGraph, model, of_model
from .proof import refuted, witnessed
from .property import Atom, Clause, Property

SIZES = (1.0, 0.5, 0.125, 2.0**-6)  # of a box, as parts of the network's sides: from whole to tiny
LEVELS = 5  # of difficulty: margins from half of what the outputs spread over down to a quarter of the bound
GRID = 4096  # places on a side where a box may begin: few bits, exact in float32
POINTS, ROUNDS, AROUND = 2048, 6, 256  # points of the search for the best input: some milliseconds
WORTHY = 2.0**-6  # of what an output spreads over: a bound above that leaves no room between easy and hard
LOOSE, SPARE = 16.0, 3  # a gap of more than so many margins is not as hard as it looks: up to three are put aside
TRIES = 8  # of other boxes and conditions before the next size is taken
Clauses = tuple[Clause, ...]


@dataclass(frozen=True)
class LabelledProperty:
    """A property of a network with its label: the margin, and what proves it (cells, or a witness and its outputs).

    `gap` is how far the best point that was found is from making an unsat property true: the margin is at most that.
    """

    claim: Property
    kind: str
    size: float
    label: str
    margin: float
    gap: float | None = None
    cells: int | None = None
    witness: tuple[float, ...] | None = None
    outputs: tuple[tuple[float, float], ...] | None = None


def problem(net: CompiledNetwork, graph: StoredGraph, rng: np.random.Generator, number: int) -> LabelledProperty:
    """The `number`-th problem of a pack: labels take turns, and so do levels of difficulty."""
    wanted, level = ("sat", "unsat")[number % 2], number // 2 % LEVELS
    first = int(rng.integers(len(SIZES)))
    for size in (*SIZES[first:], *SIZES[::-1]):
        loose: list[LabelledProperty] = []
        for _ in range(TRIES):
            found = _tried(_Search.of(net, graph, rng, size), wanted, level)
            if found is not None and (found.gap is None or found.gap <= LOOSE * max(found.margin, net.bound or 0.0)):
                return found
            loose += [] if found is None else [found]
            if len(loose) == SPARE:
                break
        if loose:
            return loose[0]
    raise PrecisionError(f"no {wanted} property of this network could be proved; choose another seed")


@dataclass(frozen=True)
class _Search:
    """A network on a box: points of it, and the outputs there, computed in float64."""

    net: CompiledNetwork
    wide: CompiledNetwork
    graph: StoredGraph
    rng: np.random.Generator
    size: float
    low: Array
    high: Array
    points: Array
    values: Array

    @classmethod
    def of(cls, net: CompiledNetwork, graph: StoredGraph, rng: np.random.Generator, size: float) -> _Search:
        low, high = (end.numpy().reshape(-1) for end in (net.box.lower, net.box.upper))
        side = (high - low) * size
        low = low + (high - low) * rng.integers(0, int(GRID * (1 - size)) + 1, len(low)) / GRID
        high = low + side
        points = np.concatenate([low + (high - low) * rng.random((POINTS, len(low))), [low, high]])
        ends = rng.random((POINTS // 8, len(low))) < 0.5  # corners, where monotone functions are largest
        points = _rounded(np.concatenate([points, np.where(ends, low, high)]), low, high, net.dtype)
        wide = copy.deepcopy(net).double()  # so far from its dtype's rounding, every machine finds the same best point
        return cls(net, wide, graph, rng, size, low, high, points, _outputs(wide, points))

    def best(self, clauses: Clauses) -> tuple[Array, float]:
        """The point that comes closest to making a property true, or makes it most true, and by how much."""
        points, values = self.points, _reached(clauses, self.values)
        for power in range(ROUNDS):
            at = points[np.argsort(values)[-4:]]
            steps = self.rng.normal(size=(AROUND, len(self.low))) * (self.high - self.low) * 8.0 ** -(power + 1)
            near = _rounded(np.repeat(at, AROUND // len(at), 0) + steps, self.low, self.high, self.net.dtype)
            points = np.concatenate([at, near])
            values = _reached(clauses, _outputs(self.wide, points))
        return points[int(np.argmax(values))], float(values.max())

    def property(self, clauses: Clauses) -> Property:
        return Property(tuple(self.low.tolist()), tuple(self.high.tolist()), self.graph.outputs, clauses)


def _tried(search: _Search, wanted: str, level: int) -> LabelledProperty | None:
    """A problem with the wanted label on a box, if one can be proved."""
    kind, clauses = _conditions(search)
    best, reached = search.best(clauses)
    bound, dtype = search.net.certificate.bound or 0.0, dtype_name(search.net.dtype)
    if kind == "order":  # there is no threshold to choose
        return _judged(search, kind, clauses, wanted, best, 0.0)
    spread = float(np.ptp(_reached(clauses, search.values)))
    hardest = 0.25 * bound
    margin = hardest * (max(0.5 * spread, 4 * hardest) / hardest) ** (level / (LEVELS - 1))
    if wanted == "sat":
        sure = witnessed(search.graph, search.property(clauses), tuple(best.tolist())).margin
        return _judged(search, kind, _moved(clauses, sure - margin, dtype, False), wanted, best, 0.0)
    far = reached + 2.25 * bound + margin
    found = _judged(search, kind, _moved(clauses, far, dtype, True), wanted, best, margin)
    if found is not None and found.margin < margin:  # the enclosure is not that tight: so far out it is
        further = _moved(clauses, far + margin - found.margin, dtype, True)
        found = _judged(search, kind, further, wanted, best, margin)
    return found if found is not None and found.margin > 0 else None


def _judged(
    search: _Search, kind: str, clauses: Clauses, wanted: str, best: Array, goal: float
) -> LabelledProperty | None:
    """The problem with its proof; None where a wanted witness is none. What is not unsat has a margin below 0."""
    claim, net = search.property(clauses), search.net
    if wanted == "sat":
        point = tuple(best.tolist())
        shown = witnessed(search.graph, claim, point)
        made = LabelledProperty(claim, kind, search.size, "sat", shown.margin, witness=point, outputs=shown.outputs)
        return made if shown.margin > 0 else None
    nearest = _reached(clauses, _outputs(search.wide, best[None]))[0]
    if nearest >= 0:
        return None
    found = refuted(net.program, net.certificate.bound or 0.0, claim, goal)
    made = LabelledProperty(claim, kind, search.size, "unsat", found.margin, gap=-float(nearest), cells=found.cells)
    return made if found.margin > 0 or goal > 0 else None


def _conditions(search: _Search) -> tuple[str, Clauses]:
    """Comparisons whose thresholds are where the outputs may be: `_moved` puts them where they are wanted."""
    rng, count = search.rng, search.graph.outputs
    kinds = ["above", "below", "outside", *(["both", "order", "order"] if count > 1 else [])]
    kind, one = str(rng.choice(kinds)), int(rng.integers(count))
    middle = [math.floor(64 * float(x) + 0.5) / 64 for x in 0.5 * (search.values.min(0) + search.values.max(0))]
    if kind == "order":
        largest = int(np.argmax(search.values[0]))
        return kind, tuple((Atom(j, True, other=largest),) for j in range(count) if j != largest)
    if kind == "both":
        two = sorted(int(i) for i in rng.permutation(count)[:2])
        return kind, (tuple(Atom(i, bool(rng.random() < 0.5), middle[i]) for i in two),)
    if kind == "outside":
        return kind, ((Atom(one, True, middle[one]),), (Atom(one, False, middle[one]),))
    return kind, ((Atom(one, kind == "above", 0.0),),)


def _moved(clauses: Clauses, by: float, dtype: str, away: bool) -> Clauses:
    """Thresholds further out by a number, then the next number of the dtype: `away` from the outputs, or towards."""

    def one(atom: Atom) -> Atom:
        place = atom.threshold + (by if atom.above else -by)
        return replace(atom, threshold=outward(place, dtype, above=atom.above == away))

    return tuple(tuple(one(atom) for atom in clause) for clause in clauses)


def _reached(clauses: Clauses, values: Array) -> Array:
    """For each row of outputs by how much a property is true there; below 0 it is not."""

    def held(atom: Atom) -> Array:
        weights, threshold = atom.form()
        return sum((sign * values[:, i] for i, sign in weights.items()), np.zeros(len(values))) - threshold

    found: Array = np.max([np.min([held(atom) for atom in clause], axis=0) for clause in clauses], axis=0)
    return found


def _outputs(net: CompiledNetwork, points: Array) -> Array:
    with torch.no_grad():
        x = torch.from_numpy(points).to(net.dtype).reshape(len(points), *net.boxes[0].shape)
        return net.core(x).reshape(len(points), -1).double().numpy()


def _rounded(points: Array, low: Array, high: Array, dtype: torch.dtype) -> Array:
    """Points as numbers of the dtype, inside of a box whose ends are such numbers."""
    return np.clip(torch.from_numpy(points).to(dtype).double().numpy(), low, high)


def worthy(net: CompiledNetwork, rng: np.random.Generator) -> bool:
    """Whether there are heads, and every output moves by much more than the bound: a constant is no problem."""
    if not any(True for _ in net.network.groups()):
        return False
    found = _Search.of(net, of_model(model(net)), rng, 1.0).values
    return 0 < (net.certificate.bound or 0.0) < WORTHY * float(np.ptp(found, 0).min())
