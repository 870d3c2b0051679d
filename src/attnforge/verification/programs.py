"""Token programs as problems for verifiers (lemma V3 of docs/verification.md).

The graph takes the one-hot rows of a sequence that is as long as the domain allows, and gives a logit for each value of
the output at each position. Around the rows of a sequence, entry by entry within a radius, the right value stays ahead:
that is *unsat*, proved by the program's own proof with codes that are off by the radius. *sat* is a box in which one
token turns into another that changes an output: the other sequence is the witness.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ..certificates.rounding import TINY, UNIT, gamma, up
from ..dtypes import Array, stored
from ..errors import AttnforgeError, CertificateError, PrecisionError
from ..heads.token.bound import DEAD
from ..network import AttentionLayer, Heads
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.proof import Column, Loose, prove
from ..rasp.values import Value
from .graph import StoredGraph, written
from .instances import LabelledProperty
from .proof import witnessed
from .property import Atom, Property

if TYPE_CHECKING:
    import onnx

WIDEST = 0.5  # a radius from which on an entry may be as near to 0 as to 1: masks are made for any below
STEPS = 1 << 20  # radii are multiples of one in so many: exact in every dtype
LEAST = 16 / STEPS  # a radius below which the levels of difficulty would be the same
SHARES = (1.0, 0.75, 0.5, 0.25, 1 / 16)  # of the largest radius that is proved, from hard to easy
SIZES = (1.0, 0.5, 0.125, 2.0**-6)  # how far the box of a changed token reaches back to the token that it was
TRIES = 64  # sequences that are drawn for one problem
CORNERS = 256  # of a box that are looked at for the point that comes closest


class Computed:
    """A program's network as its graph computes it (V3): what rounding, weights that should vanish, and later keys that
    a finite mask hides do to every head, as the proof of the program wants to know it.

    No operation is taken to be exact, and no exponential to vanish: what is proved holds for real numbers, too.
    """

    def __init__(self, net: CompiledProgram):
        self.net, self.tokens = net, net.domain.max_length
        self.u, self.tiny, self.dead = UNIT[net.dtype], TINY[net.dtype], DEAD[net.dtype]
        first = [1.0] * (len(net.vocabulary) + 1)
        self.sizes = np.array([*first, *np.abs(stored(net.positions)).max(0, initial=0.0)])
        #: Roundings that a number meets on its way from the head that writes it to the one that reads it: a product and
        #: a sum for every layer, and a sum for every head beside it.
        self.carried = 4 + sum(2 + len(cast(AttentionLayer, part).heads()) for part in net.network.layers)
        self.masks: dict[tuple[int, int], float] = {}

    def head(self, layer: int, group: int, state: Sequence[Column]) -> Loose:
        """How loose the coordinates of a head are."""
        heads = cast(AttentionLayer, self.net.network.layers[layer]).heads()[group]
        t = _tables(heads, len(state))
        reach = self.sizes + np.array([column.error for column in state])
        sizes = {x: up(reach @ t[f"W_{x}"] + t[f"b_{x}"], 64) for x in "QKV"}
        rates = {x: gamma(self.carried + (t[f"W_{x}"] != 0).sum(0) + 1, self.u) for x in "QKV"}
        keys, lost = self.tokens + heads.slots, (self.carried + len(state) + len(sizes["Q"])) * self.tiny
        k, v = (np.maximum(sizes[x], t[f"M_{x}"].max(0, initial=0.0)) for x in "KV")
        if heads.causal:
            most = 2 * float(up(sizes["Q"] @ k, 64))
            self.masks[layer, group] = 2.0 ** math.ceil(math.log2(4 * (most + self.dead)))
        stray = keys * (2 * math.exp(-self.dead) + 4 * self.tiny)
        summed = float(gamma(4 * keys + 16, self.u))  # of a softmax, and of the mean of what it weighs
        read = up((rates["V"] + summed + 2 * stray) * v + stray + lost, 64)
        rest = read
        if self.net.layout.layers[layer].heads[group].kind == "count":  # the sink's value is 0, and tokens weigh little
            gain = float(t["W_O"][t["W_O"] > 0].min(initial=math.inf))
            rest = up(2 * stray * (v + 1) + 2 * summed * self.tokens / gain + lost / max(gain, 1.0), 64)
        return Loose(up(rates["Q"] * sizes["Q"] + lost), up(rates["K"] * sizes["K"] + lost), np.zeros_like(k),
                     np.zeros((heads.slots, len(k))), read, np.zeros_like(v), rest, lost, 0.0, len(k) + 6)  # fmt: skip

    def after(self, layer: int, state: Sequence[Column], sizes: Sequence[float]) -> None:
        """The columns after a layer."""
        self.sizes = np.array(sizes)

    def readout(self, state: Sequence[Column]) -> Array:
        """How far rounding takes the logits."""
        last = cast(AttentionLayer, self.net.network.layers[-1])
        reach = self.sizes + np.array([column.error for column in state])
        W, b = (np.abs(stored(cast(torch.Tensor, table))) for table in (last.S, last.s))
        rate = gamma(self.carried + (W != 0).sum(0) + 1, self.u)
        return up(rate * (reach @ W + b) + (self.carried + len(W)) * self.tiny, 64)


def _tables(heads: Heads, inputs: int) -> dict[str, Array]:
    """The sizes of a head's tables, with zeros for those that it does not have."""
    found = {name: np.abs(stored(tensor))[0] for name, tensor in heads.named_parameters()}
    k, v = found["W_Q"].shape[1], found["W_O"].shape[0]
    empty = {"b_Q": k, "b_K": k, "b_V": v}
    wide = {"W_K": (inputs, k), "W_V": (inputs, v), "M_K": (0, k), "M_V": (0, v)}
    return {**{n: np.zeros(size) for n, size in empty.items()}, **{n: np.zeros(s) for n, s in wide.items()}, **found}


def margin(net: CompiledProgram, radius: float) -> float:
    """By how much the right logit is ahead of all others, whatever entries within `radius` of a sequence's rows are.

    `CertificateError` where it cannot be shown to be ahead, or there is no other.
    """
    found = prove(net.facts, net.layout, net.network, net.positions, Computed(net), radius)
    ahead = [m.margin for m in found.margins if m.site == "read-out"]
    if not ahead:
        raise CertificateError("the output of this program is a number, or always the same")
    return ahead[0]


def model(net: CompiledProgram, radius: float) -> onnx.ModelProto:
    """The graph of a program on sequences of full length: one-hot rows within a radius in, logits out."""
    by = Computed(net)
    prove(net.facts, net.layout, net.network, net.positions, by, radius)
    flags = torch.ones(by.tokens, 1, dtype=net.dtype)
    constants, outputs = torch.cat([flags, net.positions], -1), by.tokens * len(_values(net))
    return written(net.network, by.tokens, len(net.vocabulary), constants, True, outputs, by.masks)


def _values(net: CompiledProgram) -> tuple[Value, ...]:
    if net.outputs is None:
        raise CertificateError("the output of this program is a number, which has a bound and no logits")
    return net.outputs


def largest(net: CompiledProgram) -> float:
    """The largest radius, of so many steps, for which there is a proof; 0 where there is none for any other."""
    low, high = 0, int(WIDEST * STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            margin(net, middle / STEPS)
            low = middle
        except CertificateError:
            high = middle
    return low / STEPS


def rows(net: CompiledProgram, sequence: Sequence[Value]) -> Array:
    """The one-hot rows of a sequence, without flags, one after the other."""
    return stored(net.encode([sequence])[0, :, :-1]).reshape(-1)


def refuted(net: CompiledProgram, claim: Property, widest: float) -> float:
    """By how much every input of a property's box misses it; minus infinity where this proof shows nothing.

    The box must lie around the rows of one sequence, within the radius `widest` that the graph's masks are for, and
    every clause must ask that, at some position, another value than the program's come out on top.
    """
    shape, values = (net.domain.max_length, len(net.vocabulary)), _values(net)
    low, high = np.array(claim.low).reshape(shape), np.array(claim.high).reshape(shape)
    sequence = [net.vocabulary[i] for i in (low + high).argmax(1)]
    meant = rows(net, sequence).reshape(shape)
    radius = float(max(np.abs(low - meant).max(), np.abs(high - meant).max()))  # exact, where it is below a half
    if not radius <= widest < WIDEST:
        return -math.inf
    try:
        right = [values.index(value) for value in net.program(sequence)]
    except AttnforgeError:  # the program has no value there
        return -math.inf

    def beaten(atom: Atom) -> bool:
        weights, threshold = atom.form()
        ahead, behind = ([i for i, sign in weights.items() if sign == one] for one in (1, -1))
        if threshold != 0 or len(ahead) != 1 or len(behind) != 1 or ahead == behind:
            return False
        place, value = divmod(behind[0], len(values))
        return ahead[0] // len(values) == place and right[place] == value

    if not all(any(beaten(atom) for atom in clause) for clause in claim.clauses):
        return -math.inf
    try:
        return margin(net, radius)
    except CertificateError:
        return -math.inf


@dataclass(frozen=True)
class _Changed:
    """Two sequences that differ in one token, and an output in which they differ: its position and both values."""

    before: tuple[Value, ...]
    after: tuple[Value, ...]
    place: int
    token: int
    old: int
    new: int


def problem(
    net: CompiledProgram, graph: StoredGraph, rng: np.random.Generator, number: int, widest: float
) -> LabelledProperty:
    """The `number`-th problem of a program: labels take turns, and so do levels of difficulty.

    `widest` is the radius that its graph is made for.
    """
    wanted, level = ("sat", "unsat")[number % 2], number // 2 % len(SHARES)
    radius = math.floor(SHARES[level] * widest * STEPS) / STEPS
    for _ in range(TRIES):
        pair = _changed(net, rng)
        found = None
        if pair is not None and wanted == "sat":
            found = _turned(net, graph, pair, radius, level)
        elif pair is not None:
            found = _kept(net, graph, rng, pair, radius, widest)
        if found is not None and found.margin > 0:
            return found
    raise PrecisionError(f"no {wanted} property of this program could be proved; choose another seed")


def worthy(net: CompiledProgram, rng: np.random.Generator) -> bool:
    """Whether there is a radius that is proved, and outputs that change with a token."""
    if net.outputs is None or not any(True for _ in net.network.groups()):
        return False
    return largest(net) >= LEAST and any(_changed(net, rng) is not None for _ in range(TRIES))


def _changed(net: CompiledProgram, rng: np.random.Generator) -> _Changed | None:
    """A random sequence and a change of one token that changes an output, if there is one."""
    known, longest = net.vocabulary, net.domain.max_length
    before = tuple(known[i] for i in rng.integers(len(known), size=longest))
    at, by = int(rng.integers(longest)), int(rng.integers(len(known)))
    after = (*before[:at], known[by], *before[at + 1 :])
    try:
        pair = net.program(before), net.program(after)
    except AttnforgeError:  # not defined there
        return None
    places = [i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b]
    if not places:
        return None
    place = int(rng.choice(places))
    old, new = (_values(net).index(values[place]) for values in pair)
    return _Changed(before, after, place, at, old, new)


def _kept(
    net: CompiledProgram, graph: StoredGraph, rng: np.random.Generator, pair: _Changed, radius: float, widest: float
) -> LabelledProperty:
    """Within a radius of a sequence no other value comes out on top: unsat."""
    at, width = rows(net, pair.before), len(_values(net))
    first = pair.place * width
    clauses = tuple((Atom(first + j, True, other=first + pair.old),) for j in range(width) if j != pair.old)
    claim = Property(tuple((at - radius).tolist()), tuple((at + radius).tolist()), graph.outputs, clauses)
    corners = at + radius * rng.choice([-1.0, 1.0], size=(CORNERS, len(at)))
    found = _logits(net, corners)[:, first : first + width]
    others = np.delete(found, pair.old, 1).max(1) - found[:, pair.old]
    return LabelledProperty(
        claim, "kept", 2 * radius, "unsat", refuted(net, claim, widest), gap=-float(others.max()), cells=1
    )


def _turned(net: CompiledProgram, graph: StoredGraph, pair: _Changed, radius: float, level: int) -> LabelledProperty:
    """Where one token may turn into another, another value comes out on top: sat, and the witness is the other
    sequence."""
    before, after = rows(net, pair.before), rows(net, pair.after)
    size = SIZES[min(level, len(SIZES) - 1)]
    back = after + size * (before - after)
    moved = before != after
    low = np.where(moved, np.minimum(back, after), after - radius)
    high = np.where(moved, np.maximum(back, after), after + radius)
    first = pair.place * len(_values(net))
    clauses = ((Atom(first + pair.new, True, other=first + pair.old),),)
    claim = Property(tuple(low.tolist()), tuple(high.tolist()), graph.outputs, clauses)
    point = tuple(after.tolist())
    shown = witnessed(graph, claim, point)
    return LabelledProperty(claim, "turned", size, "sat", shown.margin, witness=point, outputs=shown.outputs)


def _logits(net: CompiledProgram, points: Array) -> Array:
    """The outputs at some points, computed in float64."""
    wide = copy.deepcopy(net).double()
    shape = (len(points), net.domain.max_length, len(net.vocabulary))
    x = torch.from_numpy(points.reshape(shape))
    with torch.no_grad():
        flagged = torch.cat([x, torch.ones(*shape[:2], 1, dtype=torch.float64)], -1)
        return np.asarray(wide.core(flagged).reshape(len(points), -1).numpy())
