"""Token programs in plain form: columns of a program's state are columns of the stream, so that the transformer is a
network of layers with the numbers that it holds itself (lemma K33)."""

from __future__ import annotations

from typing import Any

from ...errors import CertificateError
from ..balls import ONE, ZERO, NotProved
from ..file import Saved, Tensor
from .stream import FLAG, KEY, QUERY, VALUE, Head, Stream, source_of

LETTERS = "QKV"


def speaks(saved: Saved) -> bool:
    """Whether a file holds the plain form of a token program."""
    config = saved.header.get("config")
    origin = config.get("origin") if isinstance(config, dict) else None
    return saved.header.get("family") == "plain" and isinstance(origin, dict) and origin.get("family") == "program"


def unfolded(saved: Saved) -> Saved:
    """The network of layers that a plain transformer of a token program is, bit by bit, as its file would be."""
    config = saved.header["config"]
    try:
        origin = config["origin"]
        given = source_of(origin["tensors"], str(config["dtype"]))
        constants = given.rest["positions"].shape[1]
        stream = Stream(config, dict(saved.tensors), given, constants)
        tensors = _Layers(stream, origin["config"]["layout"]["layers"]).tensors
        if config["output_shape"] is not None or config["first_row"] is not False or config["ids"] is not True:
            raise ValueError("it does not put out a row for each token")
        about = {**origin["config"], "dtype": stream.dtype}
        return Saved({"family": "program", "config": about}, tensors, saved.weights)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no plain transformer of a program: {error!r}") from error


class _Layers:
    """The tensors of the layers, one after the other."""

    def __init__(self, stream: Stream, layout: Any):
        self.stream, self.source = stream, stream.source
        numbers = tuple(given.get(c, 0.0) for given in stream.given for c in stream.constants)
        self.tensors = {"positions": self._tensor((stream.tokens, len(stream.constants)), numbers)}
        self.at = [*stream.inputs, *stream.constants]  # the column of the stream that each column of the state is
        self.sizes = [ZERO] * stream.width
        for c in stream.inputs:
            self.sizes[c] = ONE  # tokens are one-hot rows with a flag
        if len(layout) != len(self.source.groups) - 1 or self.source.groups[-1]:
            raise ValueError("it has another number of layers than its program")
        for number, stated in enumerate(layout):
            reads = {}
            for g, (kind, _, causal) in enumerate(stated["heads"]):
                if self.source.groups[number][g]["W_Q"].shape[0] != 1:
                    raise ValueError("a group has more than one head")
                head = stream.heads[number, g, 0]
                reads[head.place] = self._head(head, kind == "map", bool(causal))
            if len(stated["heads"]) != len(self.source.groups[number]):
                raise ValueError(f"layer {number} has other heads than its program")
            for c, most in stream.convex(number, reads, self.sizes).items():
                if not most < stream.machine.huge:
                    raise NotProved("numbers of a layer may overflow")
                self.sizes[c] = most
            self._carry(number)
        rows = list(zip(*stream.readout, strict=True))  # column of the stream, output
        self._nothing([list(row) for row in stream.readout], "the read-out reads a column that is not in the state")
        if any(rows[FLAG]) or any(any(rows[c]) for c in stream.ids):
            raise CertificateError("the read-out reads registers, or the flag")
        last = f"network.layers.{len(layout)}."
        kept = tuple(x for c in self.at for x in rows[c])
        self.tensors[last + "S"] = self._tensor((len(self.at), stream.outputs), kept)
        self.tensors[last + "s"] = self._tensor((stream.outputs,), tuple(stream.bias))

    def _tensor(self, shape: tuple[int, ...], numbers: tuple[float, ...]) -> Tensor:
        return Tensor(self.stream.dtype, shape, numbers)

    def _nothing(self, coordinates: list[list[float]], what: str) -> None:
        """Refuse coordinates that read more than columns of the state, constants and registers."""
        known = {FLAG, *self.at, *self.stream.ids}
        if any(w for row in coordinates for c, w in enumerate(row) if c not in known):
            raise CertificateError(what)

    def _head(self, head: Head, memory: bool, causal: bool) -> int:
        """The tables of a head; how many values it has."""
        stream, (number, g, _) = self.stream, head.place
        group = self.source.groups[number][g]
        content, reads = group["W_Q"].shape[2], group["W_O"].shape[1]
        if max(content, reads) > head.width:
            raise ValueError("a head is too narrow for what it computes")
        sees = (lambda t, s: not memory and s <= t) if causal else (lambda t, s: not memory)
        stream.hidden(head, content, reads, sees, self.sizes)
        prefix, columns = f"network.layers.{number}.groups.{g}.", len(self.at)
        for third, width in ((QUERY, content), (KEY, content), (VALUE, reads)):
            rows = [stream.coordinate(head, third, j) for j in range(width)]
            self._nothing(rows, "a head reads a column that is not in the state")
            if not (memory and third != QUERY):
                weight = tuple(row[c] for c in self.at for row in rows)
                self.tensors[f"{prefix}W_{LETTERS[third]}"] = self._tensor((1, columns, width), weight)
                self.tensors[f"{prefix}b_{LETTERS[third]}"] = self._tensor((1, width), tuple(r[FLAG] for r in rows))
            if third != QUERY and head.slots:
                slots = tuple(row[stream.ids[r]] for r in range(1, head.slots + 1) for row in rows)
                self.tensors[f"{prefix}M_{LETTERS[third]}"] = self._tensor((1, head.slots, width), slots)
        out = [0.0] * (reads * group["W_O"].shape[2])
        for c, place in stream.fresh[number].items():
            for j in range(reads):
                out[j * group["W_O"].shape[2] + c] = stream.out[head.block][place][head.first + j]
        self.tensors[prefix + "W_O"] = self._tensor((1, reads, group["W_O"].shape[2]), tuple(out))
        return reads

    def _carry(self, number: int) -> None:
        """Columns after a layer are columns before it, or what its heads have written."""
        skip, bias = (self.source.rest.get(f"network.layers.{number}.{name}") for name in "Ss")
        if bias is not None and any(bias.numbers):
            raise NotProved("a layer adds a constant to its columns")
        fresh, after = self.stream.fresh[number], []
        rows = skip.rows() if skip else []
        width = skip.shape[1] if skip else len(fresh)
        for c in range(width):
            carried = [(i, row[c]) for i, row in enumerate(rows) if row[c] != 0]
            if len(carried) + (c in fresh) != 1 or any(w != 1 for _, w in carried):
                raise NotProved("a column is not carried on as it is")
            after.append(fresh[c] if c in fresh else self.at[carried[0][0]])
        if skip:
            self.tensors[f"network.layers.{number}.S"] = skip
        self.at = after
