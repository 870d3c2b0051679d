"""A plain transformer as it is stored: columns of the stream, heads by their places, and what they see (lemma K31).

Registers come first, then tokens. A register has one column that is 1, its id; a token has constants, its input, and
what heads write. The first coordinates of a head's queries and keys are its content; all others read constants alone,
and hide: they add exact zeros to the logits of what a token may see, and enough to all others that these weigh nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flint import arb, fmpq

from ...errors import CertificateError
from ..balls import ZERO, NotProved, largest, size
from ..file import MOST, Tensor
from ..program import exact, whole
from ..programs.prove import DEAD
from ..rounding import MACHINES, Machine, power_of_two

FLAG = 0  # the column that is 1 on tokens: what constants are made of
WIDEST = 1 << 12  # rows, and columns of a stream: exports end at 2^11
QUERY, KEY, VALUE = range(3)  # the thirds of a projection, in the order in which it is stored
Group = dict[str, Tensor]  # the tables of a group of heads by name
Place = tuple[int, int, int]  # layer, group and head of the network that the file describes


@dataclass(frozen=True)
class Source:
    """The network that a file says its transformer was made from: tables of every layer's groups, and the rest."""

    groups: list[list[Group]]
    rest: dict[str, Tensor]

    def places(self) -> Iterator[Place]:
        """All heads."""
        for i, layer in enumerate(self.groups):
            for g, group in enumerate(layer):
                yield from ((i, g, h) for h in range(group["W_Q"].shape[0]))


def source_of(data: Any, dtype: str) -> Source:
    """The tensors that a file writes down without their zeros, sorted into layers."""
    groups: dict[tuple[int, int], Group] = {}
    rest: dict[str, Tensor] = {}
    taken = layers = 0
    for name, given in data.items():
        shape = tuple(whole(n, 0) for n in given["shape"])
        taken += math.prod(shape)
        if taken > MOST:
            raise NotProved(f"the network that the file describes has more than {MOST} numbers")
        flat = [0.0] * math.prod(shape)
        for at, x in zip(given["at"], given["numbers"], strict=True):
            flat[whole(at, 0, len(flat) - 1)] = float(x)
        if not all(map(math.isfinite, flat)):
            raise CertificateError(f"no bound holds for weights that are not finite: {name}")
        tensor = Tensor(dtype, shape, tuple(flat))
        match = re.fullmatch(r"network\.layers\.(\d{1,4})\.(?:groups\.(\d{1,4})\.(\w+)|[Ss])", name)
        layers = max(layers, int(match[1]) + 1) if match else layers
        if match and match[2]:
            groups.setdefault((int(match[1]), int(match[2])), {})[match[3]] = tensor
        else:
            rest[name] = tensor
    sorted_out: list[list[Group]] = [[] for _ in range(layers)]
    for i, g in sorted(groups):
        group = groups[i, g]
        if g != len(sorted_out[i]) or any(t.shape[0] not in (1, group["W_Q"].shape[0]) for t in group.values()):
            raise ValueError(f"group {g} of layer {i} is not described")
        sorted_out[i].append(group)
    return Source(sorted_out, rest)


@dataclass(frozen=True)
class Head:
    """A head by the block that it stands in: its first coordinate, how many there are, and registers that it sees."""

    place: Place
    block: int
    first: int
    width: int
    slots: int

    @property
    def scale(self) -> float:
        """What queries are divided by: a power of two."""
        return float(math.isqrt(self.width))


class Stream:
    """The stored tensors, and where in them everything stands."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], source: Source, constants: int, lead: bool = False
    ):
        self.registers, self.tokens = (whole(config[key], 1, WIDEST) for key in ("registers", "tokens"))
        self.width, self.outputs = (whole(config[key], 1, WIDEST) for key in ("stream", "outputs"))
        self.dtype, self.causal, self.source = str(config["dtype"]), config["causal"], source
        if self.dtype not in MACHINES or any(t.dtype != self.dtype for t in tensors.values()):
            raise NotProved(f"the kernel speaks of networks stored and run in float32 or float64, not {self.dtype!r}")
        if type(self.causal) is not bool or config["fixed"] is not True:
            raise NotProved("the kernel has no rule for plain transformers of any number of tokens")
        self.machine: Machine = MACHINES[self.dtype]
        blocks, inputs = config["heads"], len(config["inputs"])
        shapes = {"embed.weight": (self.width, inputs), "positions": (self.registers + self.tokens, self.width),
                  "readout.weight": (self.outputs, self.width), "readout.bias": (self.outputs,)}  # fmt: skip
        for b in range(len(blocks)):
            shapes[f"blocks.{b}.attention.in_proj_weight"] = (3 * self.width, self.width)
            shapes[f"blocks.{b}.attention.out_proj.weight"] = (self.width, self.width)
        if {name: t.shape for name, t in tensors.items()} != shapes:
            raise CertificateError("the tensors of the plain transformer do not have the shapes that it asks for")
        for name, t in tensors.items():
            if not all(size(arb(x)) < self.machine.huge for x in t.numbers):
                raise CertificateError(f"no bound holds for weights that are not finite: {name}")
        found = {name: t.rows() for name, t in tensors.items()}
        self.into = [found[f"blocks.{b}.attention.in_proj_weight"] for b in range(len(blocks))]
        self.out = [found[f"blocks.{b}.attention.out_proj.weight"] for b in range(len(blocks))]
        self.readout, self.bias = found["readout.weight"], found["readout.bias"]
        self.ids = range(1, 1 + self.registers)
        self.lead: tuple[list[float], float] | None = None  # an affine map of all inputs in place of these
        self._rows(found["embed.weight"], found["positions"], inputs, constants, lead)
        self._fresh()
        self.heads = dict(self._heads(blocks))
        if set(self.heads) != set(source.places()):
            raise CertificateError("the plain transformer has other heads than the network that its file describes")

    def _rows(self, embed: Any, positions: Any, inputs: int, constants: int, lead: bool) -> None:
        """Inputs stand in columns of their own, registers are their ids, and everything else is constant."""
        self.inputs = [c for c, row in enumerate(embed) if any(row)] if lead else []
        if lead:
            (c,) = self.inputs
            self.lead = embed[c], positions[self.registers][c]
            kept = positions[: self.registers]
            positions = [*kept, *([x - self.lead[1] if i == c else x for i, x in enumerate(row)]
                                  for row in positions[self.registers :])]  # fmt: skip
        for i in range(0 if lead else inputs):
            at = [c for c, row in enumerate(embed) if row[i] != 0]
            if len(at) != 1 or embed[at[0]] != [float(j == i) for j in range(inputs)]:
                raise CertificateError("the embedding does not put each input into a column of its own")
            self.inputs += at
        first = max(self.inputs) + 1
        self.constants = list(range(first, first + constants))
        self.first = first + constants
        rows, self.fixed = positions[self.registers :], set(range(self.first)) - {*self.inputs, *self.ids}
        for r, row in enumerate(positions[: self.registers]):
            if row != [float(c == self.ids[r]) for c in range(self.width)]:
                raise CertificateError("a register is more than its id")
        moving = [*self.ids, *self.inputs, *range(self.first, self.width)]
        if FLAG not in self.fixed or any(row[FLAG] != 1 or any(row[c] for c in moving) for row in rows):
            raise CertificateError("a token carries more than its flag, its input and constants")
        #: For every token its constants, by column, zeros left out.
        self.given = [{c: row[c] for c in sorted(self.fixed) if row[c] != 0} for row in rows]

    def _fresh(self) -> None:
        """For each layer: column of the state after it -> column of the stream that its heads write."""
        self.fresh: list[dict[int, int]] = []
        last = self.first
        for layer in self.source.groups:
            written = sorted({i % group["W_O"].shape[-1] for group in layer
                              for i, x in enumerate(group["W_O"].numbers) if x != 0})  # fmt: skip
            self.fresh.append({c: last + i for i, c in enumerate(written)})
            last += len(written)
        if last > self.width:
            raise CertificateError("the stream has fewer columns than the network that its file describes writes")

    def _heads(self, blocks: Any) -> Iterator[tuple[Place, Head]]:
        """Heads by place; those of a block belong to one layer, and layers follow each other."""
        last, seen = -1, set()
        for b, row in enumerate(blocks):
            count = len(row)
            if not count or self.width % count or 4 ** (((self.width // count).bit_length() - 1) // 2) != (
                self.width // count
            ):
                raise CertificateError("the width of a head is not a power of 4")
            d, layers = self.width // count, set()
            for h, about in enumerate(row):
                inside = range(h * d, (h + 1) * d)
                if not about["purpose"]:
                    own = (self.into[b][third * self.width + j] for third in range(3) for j in inside)
                    if any(map(any, own)) or any(line[j] for line in self.out[b] for j in inside):
                        raise CertificateError("a head that is only there to fill a block has numbers")
                    continue
                i, g, n = (whole(x, 0) for x in about["place"])
                head = Head((i, g, n), b, h * d, d, whole(about["slots"], 0, self.registers - 1))
                if head.place in seen or i < last:
                    raise CertificateError("a head stands twice, or before what it reads")
                seen.add(head.place)
                layers.add(i)
                self._own(head)
                yield head.place, head
            if len(layers) > 1:
                raise CertificateError("the heads of a block belong to more than one layer")
            last = max([last, *layers])

    def _own(self, head: Head) -> None:
        """A head reads columns of earlier layers, and writes those of its own."""
        mine = set(self.fresh[head.place[0]].values())
        start = self.first + sum(map(len, self.fresh[: head.place[0]]))
        for third in range(3):
            if any(any(self.row(head, third, j)[start:]) for j in range(head.width)):
                raise CertificateError("a head reads what is not there yet")
        for c, line in enumerate(self.out[head.block]):
            if c not in mine and any(line[head.first : head.first + head.width]):
                raise CertificateError("a head writes a column that is not its own")

    def row(self, head: Head, third: int, j: int) -> list[float]:
        """The stored weights of a coordinate, column by column; queries still times the scale."""
        found: list[float] = self.into[head.block][third * self.width + head.first + j]
        return found

    def coordinate(self, head: Head, third: int, j: int) -> list[float]:
        """The same as the head uses it."""
        by = head.scale if third == QUERY else 1.0
        return [x / by for x in self.row(head, third, j)]

    # -- what a coordinate is on tokens ---------------------------------------------------------------------------

    def reach(self, weights: list[float], sizes: list[arb]) -> arb:
        """The largest sum of |weight * column| of a token."""
        used = [(c, w) for c, w in enumerate(weights) if w != 0 and c not in self.ids]
        moving = sum((size(arb(w)) * sizes[c] for c, w in used if c not in self.fixed), ZERO)
        still = [[size(arb(w)) * size(arb(given[c])) for c, w in used if c in given] for given in self.given]
        return moving + largest([sum(terms, ZERO) for terms in still])

    def rounding(self, weights: list[float], sizes: list[arb]) -> arb:
        """What rounding adds to a coordinate of a token, in any order (lemma K2): constants that a token does not have
        are exact zeros."""
        used = [(c, w) for c, w in enumerate(weights) if w != 0 and c not in self.ids]
        moving = [w for c, w in used if c not in self.fixed]
        still = [[(given[c], w) for c, w in used if c in given] for given in self.given]
        most = max((len(terms) for terms in still), default=0)
        product = not all(map(power_of_two, moving)) or any(
            not (power_of_two(x) or power_of_two(w)) for terms in still for x, w in terms
        )
        count = max(len(moving) + most - 1, 0) + product
        shrinks = count > 0 or any(abs(w) < 1 for w in moving)
        lost = (count + 3) * self.machine.tiny if shrinks else ZERO
        return self.machine.gamma(count) * self.reach(weights, sizes) + lost

    def convex(self, number: int, reads: dict[Place, int], sizes: list[arb]) -> dict[int, arb]:
        """How large the columns are that a layer's heads write, since a result lies among the values; `reads` is how
        many values a head has (lemma K31)."""
        rows = self.registers + self.tokens
        slack = 1 + self.machine.gamma(2 * rows + self.width + 8)
        found = dict.fromkeys(self.fresh[number].values(), ZERO)
        for head in (h for h in self.heads.values() if h.place[0] == number):
            for j in range(reads[head.place]):
                weights = self.row(head, VALUE, j)
                memory = largest([size(arb(weights[self.ids[r]])) for r in range(self.registers)])
                most = largest([memory, self.reach(weights, sizes) + self.rounding(weights, sizes)])
                for c in found:
                    found[c] += size(arb(self.out[head.block][c][head.first + j])) * (most + self.machine.tiny)
        return {c: (x * slack + (rows + self.width) * self.machine.tiny).upper() for c, x in found.items()}

    # -- exclusion ------------------------------------------------------------------------------------------------

    def hidden(
        self, head: Head, content: int, reads: int, sees: Callable[[int, int], bool], sizes: list[arb]
    ) -> None:
        """Refuse a head unless a token sees itself and others as `sees` says, and registers 1 to `slots`, and nothing
        else; and unless registers, as queries, read zeros (lemma K31)."""
        machine, rows = self.machine, range(self.registers + self.tokens)
        if any(self.out[head.block][c][head.first + j] for c in range(self.width) for j in range(reads, head.width)):
            raise CertificateError("a head writes more values than it has")
        if any(self.row(head, QUERY, j)[c] for j in range(content) for c in self.ids):
            raise CertificateError("a register asks for content")
        asks, keys = (self._hiding(head, third, content) for third in (QUERY, KEY))
        q, k = ([self._most(head, third, j, sizes) for j in range(content)] for third in (QUERY, KEY))
        logit = sum((a * b for a, b in zip(q, k, strict=True)), ZERO)
        for c in self.ids:
            own = [size(arb(self.row(head, KEY, j)[c])) for j in range(content)]
            logit = logit.max(sum((a * b for a, b in zip(q, own, strict=True)), ZERO))
        gamma = machine.gamma(head.width + 4)
        far = arb(DEAD[self.dtype]) * (1 + 4 * machine.u) + 1
        known: dict[Any, tuple[bool, arb, arb]] = {}
        values = [self.row(head, VALUE, j) for j in range(reads)]
        nothing = {r for r in range(self.registers) if not any(row[self.ids[r]] for row in values)}
        nothing |= {self.registers + t for t in range(self.tokens)} if self._silent(head, reads) else set()
        for i in rows:
            parts = {}
            for j in rows[: i + 1] if self.causal else rows:
                pair = asks[i], keys[j]
                if pair not in known:
                    terms = [exact(a) * exact(b) for a, b in zip(*pair, strict=True)]
                    known[pair] = any(terms), arb(sum(terms, fmpq(0))), arb(sum(map(abs, terms), fmpq(0)))
                parts[j] = known[pair]
            most = largest([total for _, _, total in parts.values()])
            if not most + logit < machine.huge:
                raise NotProved("logits may overflow")
            if i < self.registers:
                top = max((x for _, x, _ in parts.values()), key=float)
                if not {j for j, (_, x, _) in parts.items() if not top - x > far + 2 * gamma * most} <= nothing:
                    raise CertificateError("a register reads what is not 0")
                continue
            t = i - self.registers
            wanted = {j for j in rows if 1 <= j <= head.slots or (j >= self.registers and sees(t, j - self.registers))}
            if not wanted or not wanted <= parts.keys() or any(parts[j][0] for j in wanted):
                raise CertificateError("a head does not see what it should, as it should")
            for _, x, total in (parts[j] for j in parts.keys() - wanted):
                if not -x - gamma * total - 2 * (1 + gamma) * logit > far:
                    raise NotProved("what is hidden from a head may weigh something")

    def _hiding(self, head: Head, third: int, content: int) -> list[tuple[float, ...]]:
        """The coordinates beyond content, row by row: exact numbers, since at most one constant is read by each."""
        used = []
        for j in range(content, head.width):
            used.append({c: w for c, w in enumerate(self.coordinate(head, third, j)) if w != 0})
            if any(c not in self.fixed and c not in self.ids for c in used[-1]):
                raise CertificateError("what hides keys from a head is no constant")
        found = []
        for given in (*({c: 1.0} for c in self.ids), *self.given):
            pairs = [[(given[c], w) for c, w in weights.items() if c in given] for weights in used]
            if any(len(terms) > 1 or not all(map(power_of_two, terms[0])) for terms in pairs if terms):
                raise CertificateError("what hides keys from a head is not an exact power of two")
            found.append(tuple(terms[0][0] * terms[0][1] if terms else 0.0 for terms in pairs))
        return found

    def _most(self, head: Head, third: int, j: int, sizes: list[arb]) -> arb:
        weights = self.coordinate(head, third, j)
        found = self.reach(weights, sizes) + self.rounding(weights, sizes) + self.machine.tiny
        if not found * arb(head.scale) < self.machine.huge:
            raise NotProved("queries or keys may overflow")
        return found.upper()

    def _silent(self, head: Head, reads: int) -> bool:
        """Whether the values of tokens are exact zeros."""
        return not any(w for j in range(reads) for c, w in enumerate(self.row(head, VALUE, j)) if c not in self.ids)
