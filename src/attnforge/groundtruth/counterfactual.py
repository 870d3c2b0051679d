"""`pairs`: for every intermediate variable, two inputs on which it differs, and what the output would be on one of them
if the variable alone were what it is on the other: what activation patching is compared with.

Effects come from the meaning of the target and not from the network: by the interpreter for token programs, exactly;
by enclosures for formulas and modules, so that a number is an interval that contains it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arguments import whole
from ..compiler.compiled import CompiledNetwork
from ..dtypes import Array
from ..errors import ArgumentError, DomainError, UnsupportedOperation
from ..export.lens import Lens
from ..export.plain.source import column_name
from ..export.plain.transformer import PlainTransformer, network_of
from ..export.verification import domain
from ..programs.enclose import MANY, Range, ranges
from ..programs.ops import Apply, Input, Linear, MaxTokens, Mix, Product
from ..rasp.language import Constant, Indices, Node, SOp, Tokens, evaluate
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.data import value_json
from ..rasp.values import Value
from ..saving import free_file, write_whole
from .circuit import Circuit, Mask, circuit_of, operation

Place = tuple[int, int]  # a table of sequences, and a row of it
FORMAT = "attnforge-pairs"
VERSION = 1  # of the JSON form
TRIES = 24  # candidates for each pair that is wanted: one in a few changes a variable, and one in more only that
MOST = 10_000  # pairs for a variable: beyond, they say nothing new


@dataclass(frozen=True)
class Pair:
    """Two inputs on which a variable differs.

    `base` and `source` are inputs as manifests have them. `only` says that no other variable differs but those it is
    computed from and those computed from it. `before` and `after` are the variable on base and source, `output` is the
    output on base, `patched` what it is there with the variable as on source, `effect` how far these are apart: values
    and the number of positions that change, or intervals [low, high], one for each number. A source of a program may be
    longer than its base: then its values at the positions of the base count. `known` says that all of `patched` are
    values that the program has on some input, since a network decodes no others, and that the network was seen to
    decode them with all heads of the variable patched: of values that stand side by side on no input, such as more
    tokens of a kind so far than in all, it promises nothing.
    """

    variable: str
    base: tuple[float, ...]
    source: tuple[float, ...]
    only: bool
    known: bool
    before: Any
    after: Any
    output: Any
    patched: Any
    effect: Any


@dataclass(frozen=True)
class Pairs:
    """All pairs of a network's target; `missing` are the variables for which none was found."""

    target: str
    kind: str
    pairs: tuple[Pair, ...]
    missing: tuple[str, ...]

    def of(self, variable: str) -> tuple[Pair, ...]:
        """The pairs of a variable."""
        return tuple(pair for pair in self.pairs if pair.variable == variable)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the JSON form; a file that is there already is refused unless `force=True`."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        return write_whole(free_file(path, ".json", force=force), text + "\n")


def pairs(net: object, count: int = 4, seed: int = 0) -> Pairs:
    """Up to `count` pairs of inputs for each intermediate variable of a network's target, those where only it differs
    and the output moves first.

    >>> import attnforge as af
    >>> net = af.compile("sin(x)*exp(y)", af.Box(x=(-1, 1), y=(0, 2)), eps=1e-2)
    >>> found = pairs(net, count=2)
    >>> [(pair.variable, pair.only) for pair in found.pairs]
    [('exp(y)', True), ('exp(y)', True), ('sin(x)', True), ('sin(x)', True)]
    """
    whole("count", count, 1, MOST)
    whole("seed", seed)
    plain = net.plain if isinstance(net, Lens) else net
    target = network_of(plain) if isinstance(plain, PlainTransformer) else plain
    if isinstance(target, CompiledProgram):
        kind, found, names = "tokens", _program_pairs(target, circuit_of(net), count, seed), _program_names(target)
    elif isinstance(target, CompiledNetwork):
        kind, found, names = "numbers", _formula_pairs(target, count, seed), [v.name for v in _intermediates(target)]
    elif isinstance(target, torch.nn.Module):
        raise UnsupportedOperation(
            f"{type(target).__name__} has no intermediate variables that are known: pairs are for networks of "
            "attnforge.compile and their exports"
        )
    else:
        raise ArgumentError(f"expected a network built by attnforge, or an export of one, got {type(net).__name__}")
    listed = tuple(found)
    seen = {pair.variable for pair in listed}
    return Pairs(target.certificate.target, kind, listed, tuple(name for name in names if name not in seen))


def _best(found: list[tuple[Pair, bool]], count: int) -> list[Pair]:
    """Pairs where only the variable differs and the output moves first, in the order in which they were found, once."""
    different: dict[tuple[tuple[float, ...], ...], tuple[Pair, bool]] = {}
    for each in found:  # samples of a small domain repeat
        different.setdefault((each[0].base, each[0].source), each)
    order = sorted(different.values(), key=lambda each: (not each[0].known, not each[0].only, not each[1]))
    return [pair for pair, _ in order][:count]


# -- token programs ------------------------------------------------------------------------------------------------


def _intermediate(net: CompiledProgram) -> list[SOp]:
    """The ops between input and output, in order."""
    free, used = (Tokens, Indices, Constant), _below(net.facts.program)  # of several programs' ops those of this one
    return [node for node in net.facts.order if node in used and isinstance(node, SOp) and not isinstance(node, free)]


def _called(node: SOp) -> str:
    return node.name or node.label.strip("'")


def _program_names(net: CompiledProgram) -> list[str]:
    return [_called(node) for node in _intermediate(net)]


def _program_pairs(net: CompiledProgram, circuit: Circuit, count: int, seed: int) -> Iterator[Pair]:
    nodes = _intermediate(net)
    if not nodes:
        return
    output, known = net.facts.program, net.vocabulary
    below = {node: _below(node) for node in (*nodes, output)}
    where = domain(net)
    bases = where.sample(TRIES * count, seed).long()
    generator = torch.Generator().manual_seed(seed)
    near = where.around(bases.to(where.dtype), 0.0, 1, generator).long()
    other = where.sample(len(bases), seed + 1).long()
    other = torch.where(other == len(known), other.roll(1, 0) % len(known), other)  # any token, where base has one
    strangers = torch.where(bases == len(known), bases, other % len(known))
    longer = torch.where(bases == len(known), where.sample(len(bases), seed + 2).long(), bases)
    longer[(longer == len(known)).cumsum(-1) > 0] = len(known)  # nothing after the first padding
    rows = [table.tolist() for table in (bases, near, strangers, longer)]
    words = [[tuple(known[i] for i in row if i < len(known)) for row in table] for table in rows]
    values = [[evaluate(output, sequence) for sequence in table] for table in words]
    possible = None if net.outputs is None else set(net.outputs)
    tried = [((0, i), (k, i)) for k in range(1, len(rows)) for i in range(len(bases))]
    for node in nodes:
        aside = [n for n in nodes if n != node and n not in below[node] and node not in below[n]]
        found: list[tuple[Pair, bool]] = []
        for places in (tried, _alike(values, words, aside)):
            if any(pair.only for pair, _ in found):
                break
            for (j, b), (k, i) in places:
                sequence, base = words[j][b], values[j][b]
                source = {n: values[k][i][n][: len(sequence)] for n in nodes}
                if base[node] == source[node]:
                    continue
                try:
                    patched = evaluate(output, sequence, {node: source[node]})[output]  # type: ignore[dict-item]
                except DomainError:  # the program means nothing where its parts do not fit together
                    continue
                pair = Pair(
                    _called(node), tuple(map(float, rows[j][b])), tuple(map(float, rows[k][i])),
                    all(base[n] == source[n] for n in aside), possible is None or set(patched) <= possible,
                    _values(base[node]), _values(source[node]), _values(base[output]), _values(patched),
                    _apart(net, base[output], patched),
                )  # fmt: skip
                found.append((pair, base[output] != patched))
        yield from _best(_seen(net, circuit, _called(node), found), count)


def _alike(
    values: Sequence[Sequence[Any]], words: Sequence[Sequence[Any]], aside: Sequence[Node]
) -> Iterator[tuple[Place, Place]]:
    """Sequences of one length on which some variables are all equal: pairs of the first of them with another."""
    first: dict[Any, Place] = {}
    for k, row in enumerate(words):
        for i, sequence in enumerate(row):
            other = first.setdefault((len(sequence), *(values[k][i][n] for n in aside)), (k, i))
            if other != (k, i):
                yield other, (k, i)


@torch.no_grad()
def _seen(
    net: CompiledProgram, circuit: Circuit, variable: str, found: list[tuple[Pair, bool]]
) -> list[tuple[Pair, bool]]:
    """The same pairs, `known` only where the network decodes what is said, with the heads of a variable patched."""
    spots = [spot for spot in circuit.spots if spot.op == variable]
    if not spots or not found or net.outputs is None:
        return found
    ends = ([pair.base for pair, _ in found], [pair.source for pair, _ in found])
    base, source = (torch.tensor(points, dtype=torch.float64).to(circuit.where.dtype) for points in ends)
    decoded = circuit.output(circuit.following(spots, base, source)).argmax(-1).tolist()
    values = [value_json(value) for value in net.outputs]
    return [
        (replace(pair, known=pair.known and [values[i] for i in row[: len(pair.patched)]] == pair.patched), moves)
        for (pair, moves), row in zip(found, decoded, strict=True)
    ]


def _below(node: Node) -> set[Node]:
    """Everything that an op is computed from."""
    seen: set[Node] = set()
    stack = list(node.children)
    while stack:
        child = stack.pop()
        if child not in seen:
            seen.add(child)
            stack += child.children
    return seen


def _values(given: Any) -> list[Any]:
    return [value_json(value) for value in given]


def _apart(net: CompiledProgram, before: Any, after: Any) -> Any:
    """How many positions change, or by how much each number does."""
    if net.outputs is not None:
        return sum(a != b for a, b in zip(before, after, strict=True))
    return [_difference(a, b) for a, b in zip(before, after, strict=True)]


def _difference(before: Value, after: Value) -> Any:
    try:
        return value_json(after - before)  # type: ignore[operator]
    except TypeError:  # a default that is no number
        return None


# -- formulas and modules ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Intermediate:
    """An operation that heads compute, or one of its channels."""

    name: str
    op: int
    channels: tuple[int, ...]


def _intermediates(net: CompiledNetwork) -> list[Intermediate]:
    found = []
    for site in sorted(net.layout.sites, key=lambda site: site.op):
        width = net.program.ops[site.op].width
        if site.op == net.program.output:
            continue
        if site.channelwise and width > 1:
            found += [Intermediate(column_name(net.layout, site.op, c), site.op, (c,)) for c in range(width)]
        else:
            found.append(Intermediate(operation(net, site.op), site.op, tuple(range(width))))
    return found


def _reached(net: CompiledNetwork, start: int, channels: Sequence[int]) -> list[Mask]:
    """For each operation the channels that depend on some channels of operation `start`."""
    found: list[Mask] = []
    for i, op in enumerate(net.program.ops):
        here = np.zeros(op.width, dtype=bool)
        if i == start:
            here[list(channels)] = True
        elif isinstance(op, Linear):
            for j, weight in zip(op.inputs, op.weights, strict=True):
                here |= np.asarray((weight[found[j]] != 0).any(0))
        elif isinstance(op, Apply | Product | Mix | MaxTokens):
            for j in op.inputs:
                here |= found[j]
        else:
            here[:] = any(bool(found[j].any()) for j in op.inputs)
        found.append(here)
    return found


def _formula_pairs(net: CompiledNetwork, count: int, seed: int) -> Iterator[Pair]:
    program, variables = net.program, _intermediates(net)
    start = next(i for i, op in enumerate(program.ops) if isinstance(op, Input))
    width = program.ops[start].width
    after = [_reached(net, v.op, v.channels) for v in variables]
    cone = [_reached(net, start, [c]) for c in range(width)]

    def depends(v: Intermediate, on: list[Mask]) -> bool:
        return bool(on[v.op][list(v.channels)].any())

    where = domain(net)
    bases = _laid(where.sample(TRIES * count, seed), program.tokens, width)
    others = _laid(where.sample(TRIES * count, seed + 1), program.tokens, width)
    here = _enclosed(net, bases)
    for k, v in enumerate(variables):
        columns = [c for c in range(width) if depends(v, cone[c])]
        if not columns:
            continue
        choices = [[c] for c in columns] + [columns]
        sources, changed = bases.copy(), []
        for i in range(len(bases)):
            changed.append(choices[i % len(choices)])
            sources[i][:, changed[-1]] = others[i][:, changed[-1]]
        there = _enclosed(net, sources)
        low, high = here[v.op].low.copy(), here[v.op].high.copy()
        low[..., list(v.channels)] = there[v.op].low[..., list(v.channels)]
        high[..., list(v.channels)] = there[v.op].high[..., list(v.channels)]
        patched = _enclosed(net, bases, v.op, Range(low, high))
        aside = [u for n, u in enumerate(variables) if n != k and not depends(u, after[k]) and not depends(v, after[n])]
        found: list[tuple[Pair, bool]] = []
        for i in range(len(bases)):
            if not _differ(here[v.op], there[v.op], i, v).any():
                continue
            only = all(_same(here[u.op], there[u.op], i, u) or not any(depends(u, cone[c]) for c in changed[i])
                       for u in aside)  # fmt: skip
            output, now = _out(net, here, i), _out(net, patched, i)
            effect = _gap(output, now)
            if not all(np.isfinite(end).all() for end in effect):
                continue
            moves = bool(((effect[0] > 0) | (effect[1] < 0)).any())
            before, after_it = (_ends(_part(r[v.op], i, v)) for r in (here, there))
            point, other = _flat(bases[i]), _flat(sources[i])
            pair = Pair(v.name, point, other, only, True, before, after_it, _ends(output), _ends(now), _ends(effect))
            found.append((pair, moves))
        yield from _best(found, count)


Interval = tuple[Array, Array]


def _enclosed(net: CompiledNetwork, points: Array, op: int = -1, fixed: Range | None = None) -> list[Range]:
    """Enclosures of all values at points, one operation fixed if asked for; few points at a time are enclosed best."""
    program = net.program
    step = max(1, MANY // (program.tokens * max(op.width for op in program.ops)))
    parts = []
    for start in range(0, len(points), step):
        some = slice(start, start + step)
        given = None if fixed is None else {op: Range(fixed.low[some], fixed.high[some])}
        parts.append(ranges(program, points[some], points[some], given))
    ends = [[np.concatenate([getattr(part[i], end) for part in parts]) for end in ("low", "high")]
            for i in range(len(program.ops))]  # fmt: skip
    return [Range(low, high) for low, high in ends]


def _laid(points: torch.Tensor, tokens: int, width: int) -> Array:
    return points.double().numpy().reshape(len(points), tokens, width)


def _part(r: Range, i: int, v: Intermediate) -> Interval:
    return r.low[i][:, list(v.channels)], r.high[i][:, list(v.channels)]


def _differ(a: Range, b: Range, i: int, v: Intermediate) -> Mask:
    """Where two enclosures of a variable have no number in common."""
    (low, high), (first, last) = _part(a, i, v), _part(b, i, v)
    return np.asarray((high < first) | (last < low))


def _same(a: Range, b: Range, i: int, v: Intermediate) -> bool:
    """Whether a variable is one and the same number on both, whatever it depends on."""
    (low, high), (first, last) = _part(a, i, v), _part(b, i, v)
    return bool((low == high).all() and (low == first).all() and (low == last).all())


def _out(net: CompiledNetwork, found: list[Range], i: int) -> Interval:
    r, rows = found[net.program.output], slice(None) if net.program.output_rows == "all" else slice(1)
    return r.low[i][rows], r.high[i][rows]


def _gap(before: Interval, after: Interval) -> Interval:
    """What contains after - before."""
    return np.nextafter(after[0] - before[1], -np.inf), np.nextafter(after[1] - before[0], np.inf)


def _flat(point: Array) -> tuple[float, ...]:
    return tuple(map(float, point.reshape(-1)))


def _ends(interval: Interval) -> list[list[float]]:
    return [[float(a), float(b)] for a, b in zip(interval[0].reshape(-1), interval[1].reshape(-1), strict=True)]
