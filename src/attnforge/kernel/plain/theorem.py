"""Theorems in plain form: the file of the theorem's own network, made of the numbers that the transformer holds itself
(lemma K46)."""

from __future__ import annotations

from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import NotProved, size
from ..file import Saved, Tensor, outward
from ..program import ends, number, whole
from ..rounding import power_of_two
from . import words
from .stream import FLAG, KEY, QUERY, VALUE, Group, Head, Source, Stream

FAMILIES = "theorem-cells", "theorem-universal", "theorem-ramp"
Numbers = list[list[float]]


def unfolded(saved: Saved) -> Saved:
    """The network that a plain transformer is, where it is one bit by bit: of a token program, or of a theorem."""
    if words.speaks(saved):
        return words.unfolded(saved)
    config = saved.header.get("config")
    origin = config.get("origin") if isinstance(config, dict) else None
    if saved.header.get("family") != "plain" or not isinstance(origin, dict) or origin.get("family") not in FAMILIES:
        return saved
    try:
        return _Theorem(saved, config, origin).saved()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no plain transformer of a theorem: {error!r}") from error


class _Theorem:
    """A stream whose layers are gathering, ramps and a selection, or the last alone."""

    def __init__(self, saved: Saved, config: Any, origin: Any):
        self.weights, self.family, self.about = saved.weights, origin["family"], origin["config"]
        self.config, shape = config, self.about["box"]["shape"] if self.family != FAMILIES[2] else [1]
        if self.family != FAMILIES[2] and self.about["form"] != "tokens":
            raise ValueError("the paper's form has no plain one")
        boxes = [ends(box) for box in (config["box"], *config["boxes"])]
        if any(box != self._box() for box in boxes):
            raise CertificateError("the plain transformer has another box than its theorem")
        self.tokens = whole(shape[0], 1) if len(shape) == 2 else 0
        self.width = len(config["inputs"])
        self.tensors: dict[str, Tensor] = {}
        layers = [self._gathering()] if self.tokens else []
        if self.family == FAMILIES[1]:
            layers.append(self._ramps())
        outputs = whole(config["outputs"], 1)
        heads = sum(bool(h["purpose"]) for row in config["heads"] for h in row) - sum(
            group["W_Q"].shape[0] for layer in layers for group in layer
        )
        if heads != 1 and self.family != FAMILIES[2]:
            raise ValueError("it has other heads than its theorem")
        last = [float(i % outputs == i // outputs % outputs) for i in range(heads * outputs**2)]
        out = Tensor(config["dtype"], (heads, outputs, outputs), tuple(last))
        reads = {"W_Q": self._empty((heads, 1, 1)), "W_O": out}
        self.source = Source([*layers, [reads]], {})
        fixed = {**config, "fixed": True}  # with fewer tokens nothing changes: no head reads another token then
        whole_rows = config["output_shape"] is None and config["first_row"] is False and not config.get("ids")
        if config["fixed"] is not bool(self.tokens) or not whole_rows:
            raise ValueError("it does not put out a row for each token")
        lead = self.family == FAMILIES[2] and self.about["body"] == "AfterAffine"
        self.stream = Stream(fixed, dict(saved.tensors), self.source, self.tokens, lead)
        if self.tokens and self.stream.tokens != self.tokens:
            raise ValueError("it has another number of tokens than its theorem")
        self.at = [*self.stream.inputs, *self.stream.constants]
        self.sizes = self._sizes()

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self.config["dtype"], shape, ())

    def _pattern(self, heads: int, reads: int, after: int, ones: list[tuple[int, int, int]]) -> list[Group]:
        """A layer by which columns its heads write."""
        numbers = [0.0] * (heads * reads * after)
        for h, j, c in ones:
            numbers[(h * reads + j) * after + c] = 1.0
        out = Tensor(self.config["dtype"], (heads, reads, after), tuple(numbers))
        return [{"W_Q": self._empty((heads, 1, 1)), "W_O": out}]

    def _gathering(self) -> list[Group]:
        n, width = self.tokens, self.width
        ones = [(h, c, h * width + c) for h in range(n) for c in range(width)]
        return self._pattern(n, width, n * width + n, ones)

    def _ramps(self) -> list[Group]:
        """Ramp k of a coordinate is in its hats k and k + 1."""
        counts = [whole(n, 2) for n in self.about["counts"]]
        ones, hat, ramp = [], 0, 0
        for n in counts:
            ones += [(ramp + k, 0, hat + k + side) for k in range(n - 1) for side in (0, 1)]
            hat, ramp = hat + n, ramp + n - 1
        return self._pattern(ramp, 1, hat + self.tokens, ones)

    def _box(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The box that the theorem's own description has."""
        if self.family != FAMILIES[2]:
            return ends(self.about["box"])
        radius = number(self.about["radius"])
        return (-radius,) * len(self.config["inputs"]), (radius,) * len(self.config["inputs"])

    def _sizes(self) -> list[arb]:
        """How large columns are."""
        (low, high), dtype = self._box(), self.stream.dtype
        far = [size(arb(outward(a, dtype, False))).max(size(arb(outward(b, dtype, True)))) for a, b in zip(low, high)]  # noqa: B905
        sizes = [arb(0)] * self.stream.width
        if self.stream.lead:
            weights, shift = self.stream.lead
            machine, n = self.stream.machine, len(weights)
            most = sum((arb(abs(x)) * far[0] for x in weights), arb(abs(shift)))
            sizes[self.stream.inputs[0]] = most * (1 + machine.gamma(n + 2)) + machine.tiny * (n + 2)
            return sizes
        for c in self.stream.inputs:
            for x in far:
                sizes[c] = sizes[c].max(x)
        return sizes

    def saved(self) -> Saved:
        """The file of the theorem's network."""
        header = {"family": self.family, "config": {**self.about, "dtype": self.stream.dtype}}
        number_of = 0
        if self.tokens:
            prefix = "net." if self.family == FAMILIES[1] else ""
            heads = self._layer(0, self.tokens, self.width, lambda t, s: True)
            self._tables(prefix + "gather.groups.0.", heads, self.tokens, self.width, tokens=True, slots=False)
            fresh, n = list(self.stream.fresh[0].values()), self.tokens
            both, after = self.width + n, n * self.width + n
            rows = [[float(i >= self.width and c == i - both + after) for c in range(after)] for i in range(both)]
            self._put(prefix + "gather.S", (both, after), rows)
            given = [[row.get(c, 0.0) for c in self.stream.constants] for row in self.stream.given]
            self._put(prefix + "positions", (n, n), given)
            self.at, number_of = [*fresh, *self.stream.constants], 1
        if self.family == FAMILIES[1]:
            heads = self._layer(1, 2, 1, None)
            self._tables("net.first.groups.0.", heads, 2, 1)
            hats, after = list(self.stream.fresh[1].values()), len(self.stream.fresh[1]) + self.tokens
            starts = [sum(self.about["counts"][:i]) for i in range(len(self.about["counts"]))]
            self._put("net.first.s", (after,), [[float(c in starts) for c in range(after)]])
            D = len(self.at)
            carried = [[float(i >= D - self.tokens and c - after == i - D) for c in range(after)] for i in range(D)]
            self._put("net.first.S", (D, after), carried)
            self.at, number_of = [*hats, *self.stream.constants], 2
            self._selection(starts)
        elif self.family == FAMILIES[2]:
            header["config"]["causal"] = False
            self._ramp()
        else:
            width, reads = len(self.at) + 1, self.stream.outputs
            self._tables("layer.groups.0.", self._layer(number_of, width, reads, None), width, reads)
            header["config"]["causal"] = False  # registers that are slots again
            self._read([0.0] * reads)
        return Saved(header, self.tensors, self.weights)

    # -- layers as they are ---------------------------------------------------------------------------------------

    def _put(self, name: str, shape: tuple[int, ...], rows: Any) -> None:
        self.tensors[name] = Tensor(self.stream.dtype, shape, tuple(x for row in rows for x in row))

    def _layer(self, number_of: int, content: int, reads: int, sees: Any) -> list[Head]:
        """The heads of a layer, which see registers, and tokens as said; and how large what they write is."""
        stream = self.stream
        heads = [head for place, head in sorted(stream.heads.items()) if place[0] == number_of]
        for head in heads:
            if max(content, reads) > head.width:
                raise ValueError("a head is too narrow for what it computes")
            stream.hidden(head, content, reads, sees or (lambda t, s: False), self.sizes)
        for c, most in stream.convex(number_of, {head.place: reads for head in heads}, self.sizes).items():
            if not most < stream.machine.huge:
                raise NotProved("numbers of a layer may overflow")
            self.sizes[c] = most
        return heads

    def _coordinates(self, head: Head, third: int, count: int) -> Numbers:
        """Weights of every coordinate; refused where it reads what is not in the state."""
        rows = [self.stream.coordinate(head, third, j) for j in range(count)]
        known = {FLAG, *self.at, *self.stream.ids}
        if any(w for row in rows for c, w in enumerate(row) if c not in known):
            raise CertificateError("a head reads a column that is not in the state")
        return rows

    def _tables(
        self, prefix: str, heads: list[Head], content: int, reads: int, tokens: bool = False, slots: bool = True
    ) -> None:
        """The tables of a layer's heads, which read tokens, registers, or both; these they may share."""
        stream, count = self.stream, len(heads)
        fresh = list(stream.fresh[heads[0].place[0]].values())
        after = self.source.groups[heads[0].place[0]][0]["W_O"].shape[2]
        parts = ((QUERY, "Q", content), (KEY, "K", content), (VALUE, "V", reads))
        for third, letter, width in parts:
            every = [self._coordinates(head, third, width) for head in heads]
            if tokens or third == QUERY:
                weight = [[row[c] for row in rows] for rows in every for c in self.at]
                if third != KEY or any(map(any, weight)):
                    self._put(f"{prefix}W_{letter}", (count, len(self.at), width), weight)
                if third != VALUE or any(row[FLAG] for rows in every for row in rows):
                    self._put(f"{prefix}b_{letter}", (count, width), [[row[FLAG] for row in rows] for rows in every])
            if third == QUERY or not slots:
                continue
            found = [[[row[stream.ids[r]] for row in rows] for r in range(1, head.slots + 1)]
                     for head, rows in zip(heads, every, strict=True)]  # fmt: skip
            if any(len(table) != len(found[0]) for table in found):
                raise CertificateError("heads of a layer have other numbers of registers than each other")
            shared = found[:1] if all(table == found[0] for table in found) else found
            rows = [row for table in shared for row in table]
            self._put(f"{prefix}M_{letter}", (len(shared), len(found[0]), width), rows)
        out = [[0.0] * after for _ in range(count * reads)]
        for h, head in enumerate(heads):
            for c, place in zip(stream.fresh[head.place[0]], fresh, strict=True):
                for j in range(reads):
                    out[h * reads + j][c] = stream.out[head.block][place][head.first + j]
        self._put(prefix + "W_O", (count, reads, after), out)

    def _read(self, bias: list[float]) -> None:
        """Refuse a read-out that does more than to read the last layer's columns, those that are written."""
        fresh = list(self.stream.fresh[-1].values())
        for o, row in enumerate(self.stream.readout):
            written = o < len(fresh) and any(x for block in self.stream.out for x in block[fresh[o]])
            wanted = [float(len(fresh) > o and c == fresh[o]) for c in range(self.stream.width)]
            if (any(row) or written) and row != wanted:
                raise CertificateError("the read-out does more than to read a column")
        if list(self.stream.bias) != bias:
            raise CertificateError("the read-out has a bias")

    def _selection(self, starts: list[int]) -> None:
        """The last layer of hats: the constants of first hats stand in its queries."""
        width, reads = len(self.at), self.stream.outputs
        hats = width - self.tokens
        self._tables("select.", self._layer(2, width, reads, None), width, reads)
        bias, query = self.tensors.pop("select.b_Q").numbers, self.tensors.pop("select.W_Q")
        keys, values, out = (self.tensors.pop("select." + name) for name in ("M_K", "M_V", "W_O"))
        sharp = query.numbers[0]
        if not power_of_two(sharp) or list(bias) != [sharp * float(c in starts) for c in range(width)]:
            raise CertificateError("hats are not read with their constants")
        if self.about["second"] == "softmax":
            if sharp != 1 or query.numbers != tuple(float(i // width == i % width) for i in range(width * width)):
                raise CertificateError("channels of a softmax are not read as they are")
            columns = list(zip(*keys.rows()[0], strict=True))
            self._put("net.select.logits", (width, keys.shape[1]), columns)
            self.tensors["net.select.read"] = Tensor(values.dtype, values.shape[1:], values.numbers)
            if out.numbers != tuple(float(i // reads == i % reads) for i in range(reads * reads)):
                raise CertificateError("values of a softmax are not read as they are")
        else:
            for name, tensor in (("W_Q", query), ("M_K", keys), ("M_V", values), ("W_O", out)):
                self.tensors["net.select.groups.0." + name] = tensor
        if hats != sum(self.about["counts"]):
            raise ValueError("it has other hats than its grid")
        self._read([0.0] * reads)

    def _ramp(self) -> None:
        """Heads of one scalar, whose affine map stands in their queries; it is a layer of its own, or theirs."""
        if isinstance(self.about["w"][0], list):
            raise NotProved("the kernel has no rule for the plain form of ramps with weights for each token")
        gate = self.about["temperature"] == "gate"
        one = next(h for row in self.config["heads"] for h in row if h["purpose"])
        inner = whole(one["width"], 1) - whole(one["hiding"], 0)  # a choice: what is said to be hidden must be
        reads = self.source.groups[0][0]["W_O"].shape[1]
        heads = self._layer(0, inner, reads, (lambda t, s: t == s) if gate else None)
        self._tables("ramp.", heads, inner, reads, tokens=gate)
        query, bias = (self.tensors.pop("ramp." + name).rows() for name in ("W_Q", "b_Q"))
        prefix, count = "layer.groups.0.", len(heads)
        if self.about["body"] == "Slots":
            if any(rows != query[0] for rows in query) or any(row != bias[0] for row in bias):
                raise NotProved("heads of a ramp read other sums than each other")
            self._put(prefix + "W_Q", (1, len(self.at), inner), query[0])
            self._put(prefix + "b_Q", (1, inner), [bias[0]])
        elif self.stream.lead:
            prefix = "net.layers.1.groups.0."
            weights, shift = self.stream.lead
            self._put("net.layers.0.S", (len(weights), 1), [[x] for x in weights])
            self._put("net.layers.0.s", (1,), [[shift]])
            self._put(prefix + "W_Q", (count, 1, inner), [row for rows in query for row in rows])
            self._put(prefix + "b_Q", (count, inner), bias)
        for name in [name for name in self.tensors if name.startswith("ramp.")]:
            self.tensors[prefix + name.removeprefix("ramp.")] = self.tensors.pop(name)
        self._read([0.0] * self.stream.outputs)
