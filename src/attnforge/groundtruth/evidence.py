"""`manifest`: what every head is for, with the inputs that show it; `check`: whether a manifest is so.

What a head or an edge cannot reach is decided by zeros of stored tensors (`circuit`). For what it can reach, inputs are
looked for on which patching moves the output by more than rounding can: first among a few samples, then among more, and
among neighbours. Where none is found, the manifest says so (`still`) instead of calling it relevant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..arguments import counted, shortened, whole
from ..errors import CertificateError
from ..progress import stages
from ..threads import one_thread
from .circuit import Circuit, Spot, circuit_of
from .manifest import INPUT, OUTPUT, PARTS, Edge, HeadEntry, Manifest, Witness, claim_of, hashes, require_weights

SAMPLES = 16  # inputs that most heads are shown with: few enough to be read, and to be stored
STEPS = (1, 3, 7)  # a sample is patched with those so many places further: three partners each
#: Further samples, round by round, for what those do not show, each with a neighbour and with a stranger.
ROUNDS = (96, 96, 512, 512)
NEAR = 0.3  # of the box that a neighbour is away at most
BLIND = 16  # pairs of nodes that zeros rule out, and that a check tries all the same
#: What a manifest must say of a head as the network has it; its note is for people, and its wording may change.
HEAD_FACTS = ("layer", "index", "hook", "at", "role", "op", "scope", "reads", "writes")
SAME = 1e-6  # relative: what a bound of relative errors makes of a few outputs, computed on another machine
AT_ONCE = 256  # pairs that are run together: more take a gigabyte, and longer
NOTHING = -1  # the source of an ablation: zeros

Pairs = tuple[Tensor, ...]  # places of bases and sources among the points


@dataclass(eq=False)
class Probe:
    """A circuit at some points, the state before every layer kept: patches start from there."""

    circuit: Circuit
    points: Tensor
    states: list[Tensor] = field(default_factory=list)
    _last: tuple[Spot | None, Tensor] | None = None

    def __post_init__(self) -> None:
        self.states = self.circuit.states(self.points)

    def given(self, spot: Spot | None) -> Tensor:
        """What a head adds at every point; the input for None."""
        if self._last is None or self._last[0] is not spot:
            found = self.states[0] if spot is None else self.circuit.alone(spot)(self.states[spot.layer])
            self._last = (spot, found)
        return self._last[1]

    def _change(self, spot: Spot | None, pairs: Pairs) -> Tensor:
        base, source = pairs
        given = self.given(spot)
        patch = given[source.clamp_min(0)] - given[base]
        zero = torch.zeros_like(given[:1]) if spot is None else -given[base]  # the input is patched, never cut
        return torch.where((source == NOTHING).reshape(-1, 1, 1), zero, patch)

    def head(self, spot: Spot, pairs: Pairs) -> Tensor:
        """How far outputs move when a head's result is replaced, (pair, output)."""
        states = [state[pairs[0]] for state in self.states]
        after = self.circuit.replaced(spot, states, self._change(spot, pairs))
        return self.circuit.effect(self.points[pairs[0]], states[-1], after)

    def edge(self, source: Spot | None, target: Spot | None, pairs: Pairs) -> Tensor:
        """How far outputs move when what one node reads of another is replaced."""
        states = [state[pairs[0]] for state in self.states]
        after = self.circuit.patched(source, target, states, self._change(source, pairs))
        return self.circuit.effect(self.points[pairs[0]], states[-1], after)


def _first_probe(circuit: Circuit, seed: int) -> tuple[Probe, Pairs]:
    corners = circuit.where.corners(SAMPLES // 4)
    points = torch.cat([circuit.where.sample(SAMPLES - len(corners), seed), corners])
    at = torch.arange(len(points))
    base = torch.cat([at] * (len(STEPS) + 1))
    source = torch.cat([*((at + step) % len(points) for step in STEPS), torch.full_like(at, NOTHING)])
    return Probe(circuit, points), (base, source)


def _more_probe(circuit: Circuit, seed: int, count: int = ROUNDS[0]) -> tuple[Probe, Pairs]:
    """Samples, a neighbour of each, and the pairs of both; and of strangers."""
    generator = torch.Generator().manual_seed(seed)
    points = circuit.where.sample(count, seed)
    near = circuit.where.around(points, NEAR, 1, generator)
    at = torch.arange(count)
    source = torch.cat([at + count, (at + 1) % count, torch.full_like(at, NOTHING)])
    return Probe(circuit, torch.cat([points, near])), (torch.cat([at, at, at]), source)


@dataclass(frozen=True)
class Element:
    """A head or an edge of a circuit: what is looked at, and which outputs zeros do not rule out."""

    spot: Spot | None = None  # a head
    source: Spot | None = None  # or an edge: None is the input,
    target: Spot | None = None  # and here the output
    outputs: tuple[int, ...] = ()

    def moved(self, probe: Probe, pairs: Pairs) -> Tensor:
        """How far outputs move, (pair, output)."""
        parts = zip(*(side.split(AT_ONCE) for side in pairs), strict=True)
        if self.spot is not None:
            return torch.cat([probe.head(self.spot, part) for part in parts])
        return torch.cat([probe.edge(self.source, self.target, part) for part in parts])

    def __str__(self) -> str:
        if self.spot is not None:
            return self.spot.id
        return f"{self.source.id if self.source else INPUT} -> {self.target.id if self.target else OUTPUT}"


def _nodes(circuit: Circuit) -> Iterator[Element]:
    """The heads, then the edges that stored zeros do not rule out, source by source."""
    for i, spot in enumerate(circuit.spots):
        yield Element(spot, outputs=tuple(np.flatnonzero(circuit.reach[i]).tolist()))
    count, known = len(circuit.spots), (None, *circuit.spots)
    for a, source in enumerate(known):
        for b in np.flatnonzero(circuit.joined[a, :count]):
            outputs = tuple(np.flatnonzero(circuit.reach[b]).tolist())
            yield Element(source=source, target=circuit.spots[b], outputs=outputs)
        direct = tuple(np.flatnonzero(circuit.joined[a, count:]).tolist())
        if direct:
            yield Element(source=source, outputs=direct)


@dataclass(frozen=True)
class _Shown:
    """That a node moves an output: the two points and how far."""

    output: int
    base: tuple[float, ...]
    source: tuple[float, ...] | None
    effect: float


def _shown(node: Element, probe: Probe, pairs: Pairs, wanted: Sequence[int], least: float) -> dict[int, _Shown]:
    """For each wanted output the pair that moves it most, where that is more than `least`."""
    if not wanted:
        return {}
    effects = node.moved(probe, pairs)
    found = {}
    for output in wanted:
        best = int(effects[:, output].argmax())
        effect = float(effects[best, output])
        if effect > least and effect < float("inf"):
            base, source = (int(side[best]) for side in pairs)
            points = [tuple(probe.points[i].double().tolist()) for i in (base, max(source, 0))]
            found[output] = _Shown(output, points[0], None if source == NOTHING else points[1], effect)
    return found


@torch.no_grad()
def manifest(net: object, *, seed: int = 0) -> Manifest:
    """What every head of a network is for, which reads which, and inputs that show it; see `attnforge.groundtruth`.

    `net` is a network of `attnforge.compile` (a formula, a module, a token program), a theorem in token-wise form, a
    plain transformer or a lens.

    >>> import attnforge as af
    >>> net = af.compile("sin(x) + x*y", af.Box(x=(-1, 1), y=(0, 2)), eps=1e-2)
    >>> found = af.manifest(net)
    >>> sorted({(head.role, head.op) for head in found.heads})
    [('function', 'sin(x)'), ('product', 'x*y')]
    >>> Manifest.from_json(found.to_json()) == found
    True
    """
    whole("seed", seed)
    circuit = circuit_of(net)
    with stages(None, "describing") as step, one_thread():
        step("looking for inputs that show every head")
        nodes = list(_nodes(circuit))
        found = [dict[int, _Shown]() for _ in nodes]
        for number, size in enumerate((0, *ROUNDS)):
            missing = [[o for o in node.outputs if o not in seen] for node, seen in zip(nodes, found, strict=True)]
            if not any(missing):
                break
            probe, pairs = _more_probe(circuit, seed + number, size) if number else _first_probe(circuit, seed)
            for node, seen, wanted in zip(nodes, found, missing, strict=True):
                seen.update(_shown(node, probe, pairs, wanted, circuit.rounding))
    return _written(circuit, nodes, found)


def _written(circuit: Circuit, nodes: Sequence[Element], found: Sequence[dict[int, _Shown]]) -> Manifest:
    samples: dict[tuple[float, ...], int] = {}

    def witnesses(seen: dict[int, _Shown]) -> tuple[Witness, ...]:
        return tuple(
            Witness(circuit.outputs[o].name, samples.setdefault(w.base, len(samples)),
                    None if w.source is None else samples.setdefault(w.source, len(samples)), w.effect)
            for o, w in sorted(seen.items())
        )  # fmt: skip

    heads, edges = [], []
    for node, seen in zip(nodes, found, strict=True):
        still = tuple(circuit.outputs[o].name for o in node.outputs if o not in seen)
        if node.spot is not None:
            heads.append(replace(entry(circuit, node.spot), moves=witnesses(seen), still=still))
        else:
            edges.append(replace(edge(circuit, node), moves=witnesses(seen), still=still))
    everything, each = hashes(circuit.tensors)
    return Manifest(
        circuit.target, circuit.tier, circuit.inputs, circuit.outputs, circuit.channels, tuple(heads), tuple(edges),
        tuple(samples), claim_of(circuit.certificate, circuit.rounding), everything, each,
    )  # fmt: skip


def entry(circuit: Circuit, spot: Spot) -> HeadEntry:
    """What a manifest says of a head, from its weights alone."""
    i = circuit.spots.index(spot)
    query, key, value = (tuple(np.flatnonzero(part).tolist()) for part in circuit.reads[i])
    writes = tuple(np.flatnonzero(circuit.writes[i]).tolist())
    return HeadEntry(spot.id, spot.layer, spot.index, spot.hook, spot.at, spot.role, spot.note, spot.op, spot.scope,
                     (query, key, value), writes)  # fmt: skip


def edge(circuit: Circuit, node: Element) -> Edge:
    """What a manifest says of an edge, from weights alone."""
    gives = circuit.entering if node.source is None else circuit.writes[circuit.spots.index(node.source)]
    if node.target is None:
        parts, names = gives & circuit.leaving, (OUTPUT,) * len(circuit.leaving)
    else:
        parts, names = gives & circuit.reads[circuit.spots.index(node.target)], PARTS
    into = dict.fromkeys(name for name, part in zip(names, parts, strict=True) if part.any())
    source, target = str(node).split(" -> ")
    return Edge(source, target, tuple(np.flatnonzero(parts.any(0)).tolist()), tuple(into))


# -- checking ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """What a check found to be so: how many claims that something moves nothing are `proved` by zeros and how many were
    `tried`, how many witnesses were run again, and how many questions the manifest leaves `undecided` (`still`)."""

    heads: int
    edges: int
    proved: int
    tried: int
    witnesses: int
    undecided: int

    def __str__(self) -> str:
        return (
            f"{counted(self.heads, 'head')}, {counted(self.edges, 'edge')}: {counted(self.witnesses, 'effect')} shown "
            f"again; of claims that something moves nothing {self.proved} are proved by zeros, {self.tried} were tried"
            + (f"; {self.undecided} questions are left open" if self.undecided else "")
        )


@torch.no_grad()
def check(manifest: Manifest, net: object, *, seed: int = 1) -> Checked:
    """Find out whether a manifest is so for a network; `CertificateError` says what is not.

    Its hashes must be those of the weights; names, channels and edges those that stored tensors show; every witness
    must move its output by what it states. What is listed neither under `moves` nor under `still` must move nothing:
    zeros of stored tensors must prove it, or, in a stream that mixes its columns, the certificate; samples of the
    check's own are tried besides. What is `still` is less than a claim, and the check says how often that is so: the
    search has found no input that moves the output. Where samples of the check do, the manifest is refused, too.
    """
    circuit = circuit_of(net)
    require_weights(manifest, circuit.tensors)
    _require_same(manifest, circuit)
    with stages(None, "checking") as step, one_thread():
        step("running witnesses again")
        stated = {_name(what): what for what in manifest.everything()}
        nodes = {str(node): node for node in _nodes(circuit)}
        points = _points(manifest, circuit)
        witnesses = 0
        for name, what in stated.items():
            for first in range(0, len(what.moves), AT_ONCE):  # as many as a stranger's manifest has, in bounded memory
                _replay(name, nodes[name], what.moves[first : first + AT_ONCE], points, circuit)
            witnesses += len(what.moves)
        step("trying what should move nothing")
        probes = [_first_probe(circuit, seed), _more_probe(circuit, seed)]
        silent = {name: _silent(circuit, node, stated.get(name)) for name, node in nodes.items()}
        for name, outputs in silent.items():
            reached = set(outputs) & set(nodes[name].outputs)  # what zeros rule out is tried at few points only
            _unmoved(name, nodes[name], outputs, probes if reached else probes[:1], circuit)
        for name, node in nodes.items():
            _told(name, node, silent[name], name in stated, circuit)
        for name, what in stated.items():
            left = [o for o, output in enumerate(circuit.outputs) if output.name in what.still]
            _unmoved(name, nodes[name], left, probes[1:], circuit, "leaves open whether it moves")
        apart = _ruled_out(circuit)
        order = torch.randperm(len(apart), generator=torch.Generator().manual_seed(seed)).tolist()
        probe, (base, source) = probes[0]
        tries = [(probe, (base[:SAMPLES], source[:SAMPLES]))] if circuit.mixed else probes[:1]
        for i in order if circuit.mixed else order[:BLIND]:
            _unmoved(str(apart[i]), apart[i], range(len(circuit.outputs)), tries, circuit)
    tried = sum(len(set(outputs) & set(nodes[name].outputs)) for name, outputs in silent.items())
    rest = sum(len(circuit.outputs) - len(node.outputs) for node in nodes.values())
    undecided = sum(len(what.still) for what in manifest.everything())
    sure = len(apart) * len(circuit.outputs) + rest
    if circuit.mixed:
        sure, tried = 0, tried + sure
    return Checked(len(manifest.heads), len(manifest.edges), sure, tried, witnesses, undecided)


def _name(what: HeadEntry | Edge) -> str:
    return what.id if isinstance(what, HeadEntry) else f"{what.source} -> {what.target}"


def _silent(circuit: Circuit, node: Element, what: HeadEntry | Edge | None) -> list[int]:
    """The outputs that a manifest says, by not listing them, that a node does not move."""
    open_or_moved = set() if what is None else {*what.relevant, *what.still}
    return [o for o, output in enumerate(circuit.outputs) if output.name not in open_or_moved]


def _told(name: str, node: Element, silent: Sequence[int], stated: bool, circuit: Circuit) -> None:
    """Raise where a manifest passes over what weights do not rule out: that nothing moved it here proves nothing."""
    reached = [circuit.outputs[o].name for o in silent if o in node.outputs]
    if reached:
        raise CertificateError(
            f"{name}: the manifest lists {reached[0]!r} neither under what it moves nor under what is still, and the "
            "weights between are not zeros: nothing proves that it cannot move it"
        )
    if not stated:
        raise CertificateError(f"{name}: the weights have this edge, and the manifest does not know it")


def _ruled_out(circuit: Circuit) -> list[Element]:
    """The pairs of nodes in order that stored zeros keep apart."""
    count, known = len(circuit.spots), (None, *circuit.spots)
    found = []
    for a, source in enumerate(known):
        for b, target in enumerate(circuit.spots):
            if (source is None or source.layer < target.layer) and not circuit.joined[a, b]:
                found.append(Element(source=source, target=target))
        if not circuit.joined[a, count:].any():
            found.append(Element(source=source))
    return found


def _points(manifest: Manifest, circuit: Circuit) -> Tensor:
    low, high = (end.to(circuit.where.dtype).reshape(-1) for end in (circuit.where.lower, circuit.where.upper))
    points = torch.tensor(manifest.samples, dtype=torch.float64).to(low.dtype).reshape(-1, len(low))
    outside = ~((points >= low) & (points <= high)).all(-1)
    if circuit.inputs.kind == "tokens":
        padding = points == len(circuit.inputs.vocabulary)
        outside |= (points != points.round()).any(-1) | (padding[:, :-1] & ~padding[:, 1:]).any(-1) | padding[:, 0]
    if bool(outside.any()):
        raise CertificateError(f"sample {int(outside.nonzero()[0])} of the manifest is no input of the network")
    return points


def _require_same(manifest: Manifest, circuit: Circuit) -> None:
    """Raise unless a manifest says of structure what the weights show."""
    claims = {
        "tier": (manifest.tier, circuit.tier),
        "target": (manifest.target, circuit.target),
        "inputs": (manifest.inputs, circuit.inputs),
        "outputs": (manifest.outputs, circuit.outputs),
        "channels": (manifest.channels, circuit.channels),
        "kind and dtype": ((manifest.certificate.kind, manifest.certificate.dtype),
                           (circuit.certificate.kind, circuit.certificate.dtype)),
    }  # fmt: skip
    for name, (stating, shown) in claims.items():
        if stating != shown:
            raise CertificateError(f"the manifest's {name} are not those of the network: it says {_short(stating)}, "
                                   f"and the network has {_short(shown)}")  # fmt: skip
    promised, proved = manifest.certificate.bound, circuit.certificate.bound
    if promised is not None and (proved is None or promised < proved):
        raise CertificateError(f"the manifest states the bound {promised}, and the network is certified for {proved}")
    if manifest.certificate.proof == "kernel" != circuit.certificate.proof:
        raise CertificateError("the manifest says that the kernel proved the bound, and for this network it has not")
    said, can = manifest.certificate.rounding, circuit.rounding
    if not math.isclose(said, can, rel_tol=SAME):
        raise CertificateError(f"the manifest says that rounding can do {said:.9g}, and it can do {can:.9g}")
    stated = {_name(what): what for what in manifest.everything()}
    nodes = {str(node): node for node in _nodes(circuit)}
    for spot in circuit.spots:
        if spot.id not in stated:
            raise CertificateError(f"the manifest does not know the head {spot.id}, at {spot.hook}")
    for name, what in stated.items():
        if name not in nodes:
            kind = "a head" if isinstance(what, HeadEntry) else "an edge"
            raise CertificateError(f"the manifest speaks of {kind} {name}, which the weights do not have")
        shown = entry(circuit, nodes[name].spot) if nodes[name].spot else edge(circuit, nodes[name])  # type: ignore[arg-type]
        for key in HEAD_FACTS if isinstance(what, HeadEntry) else ("channels", "into"):
            if getattr(what, key) != getattr(shown, key):
                raise CertificateError(
                    f"{name}: the manifest says {key} {_short(getattr(what, key))}, and the weights show "
                    f"{_short(getattr(shown, key))}"
                )
        possible = {circuit.outputs[o].name for o in nodes[name].outputs}
        beyond = {*what.relevant, *what.still} - possible
        if beyond:
            raise CertificateError(f"{name} cannot reach the output {min(beyond)!r}: the weights between are zeros")


def _short(value: object) -> str:
    return shortened(repr(value), 90)


def _replay(name: str, node: Element, moves: Sequence[Witness], points: Tensor, circuit: Circuit) -> None:
    """Raise unless every witness moves its output by what it states, and by more than rounding can."""
    used = sorted({i for witness in moves for i in (witness.base, witness.source) if i is not None})
    at = {sample: place for place, sample in enumerate(used)}
    base = torch.tensor([at[witness.base] for witness in moves])
    source = torch.tensor([NOTHING if witness.source is None else at[witness.source] for witness in moves])
    effects = node.moved(Probe(circuit, points[used]), (base, source))
    outputs = {output.name: o for o, output in enumerate(circuit.outputs)}
    for row, witness in enumerate(moves):
        found = float(effects[row, outputs[witness.output]])
        if not found > circuit.rounding:
            raise CertificateError(
                f"{name}: the manifest says that it moves {witness.output!r} on sample {witness.base}, and there it "
                f"moves it by {found:.3g}, which is not more than rounding ({circuit.rounding:.3g})"
            )
        if not abs(found - witness.effect) <= 2 * circuit.rounding:
            raise CertificateError(
                f"{name}: the manifest says that it moves {witness.output!r} by {witness.effect:.9g} on sample "
                f"{witness.base}, and there it moves it by {found:.9g}"
            )


def _unmoved(
    name: str, node: Element, outputs: Sequence[int], probes: Sequence[tuple[Probe, Pairs]], circuit: Circuit,
    says: str = "does not say that it moves",
) -> None:  # fmt: skip
    """Raise where something that should move nothing does."""
    if not len(outputs):
        return
    for probe, pairs in probes:
        effects = node.moved(probe, pairs)
        for o in outputs:
            worst = float(effects[:, o].max())
            if not worst <= circuit.rounding:
                raise CertificateError(
                    f"{name}: the manifest {says} {circuit.outputs[o].name!r}, and it moves it by "
                    f"{worst:.3g} (rounding can do {circuit.rounding:.3g})"
                )
