"""The heads of a site as they are stored, read off the tensors of a layer: all that a bound may look at.

Reading is strict. What a table holds outside of the columns that its site may read or write must be an exact 0, and
everything must be finite; otherwise there is no certificate. So whatever was done to the weights since they were built
(training, a cast, a changed entry, the state of another network), a bound speaks of what is there now.

A self head sees its own token and memory slots. Gates (section B) and products (section C) are one or two of them plus
a linear skip; `SelfSpec` holds their numbers, with Z the state:

    out = Z S + s + sum_h softmax(q K^T) V O,   q = Z W_Q + b_Q,   K = [b_K ; M_K],   V = [Z W_V + b_V ; M_V]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ..dtypes import Array, rounded, stored
from ..errors import ArgumentError, CertificateError
from ..network import AttentionLayer, Heads, Scope


@dataclass(frozen=True, eq=False)
class SelfSpec:
    """Heads over `c` input channels with `k` key coordinates, `m` memory slots, `v` value channels and `o` outputs.

    Shapes: W_Q (head, c, k), b_Q (head, k), b_K (head, k), W_V (head, c, v), b_V (head, v), M_K (head, m, k),
    M_V (head, m, v), W_O (head, v, o), S (c, o), s (o,).
    """

    W_Q: Array
    b_Q: Array
    b_K: Array
    W_V: Array
    b_V: Array
    M_K: Array
    M_V: Array
    W_O: Array
    S: Array
    s: Array

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, np.asarray(getattr(self, field.name), dtype=np.float64))
        h, c, k = self.W_Q.shape
        m, v, o = self.M_K.shape[1], self.W_V.shape[2], self.W_O.shape[2]
        expected = dict(b_Q=(h, k), b_K=(h, k), W_V=(h, c, v), b_V=(h, v), M_K=(h, m, k), M_V=(h, m, v))
        expected |= dict(W_O=(h, v, o), S=(c, o), s=(o,))
        wrong = {n: getattr(self, n).shape for n, shape in expected.items() if getattr(self, n).shape != shape}
        if wrong:
            raise ArgumentError(f"these arrays of a SelfSpec do not fit W_Q of shape {self.W_Q.shape}: {wrong}")

    @property
    def kind(self) -> tuple[int, int, int]:
        """(key coordinates, memory slots, value channels): specs of one kind fit into one group of heads."""
        return self.W_Q.shape[2], self.M_K.shape[1], self.W_V.shape[2]

    @property
    def crossings(self) -> tuple[Array, Array]:
        """Of every two slots of a head of one number: how fast their logits draw apart, and where they cross."""
        keys = np.concatenate([self.b_K[:, None], self.M_K], 1)
        slope = np.einsum("hk,hsk->hs", self.W_Q[:, 0], keys)
        offset = np.einsum("hk,hsk->hs", self.b_Q, keys)
        i, j = np.triu_indices(keys.shape[1], 1)
        steep, level = (slope[:, i] - slope[:, j]).ravel(), (offset[:, i] - offset[:, j]).ravel()
        live = np.abs(steep) > 1e-300
        return np.abs(steep[live]), -level[live] / steep[live]

    def rounded(self, dtype: torch.dtype) -> SelfSpec:
        """The numbers as a dtype stores them."""
        return SelfSpec(**{f.name: rounded(getattr(self, f.name), dtype) for f in fields(self)})

    @classmethod
    def read(cls, layer: AttentionLayer) -> SelfSpec:
        """The numbers that a layer holds now; raises `CertificateError` if they are not finite."""
        heads = layer.groups[0]
        assert isinstance(heads, Heads)
        shapes = {name: tuple(tensor.shape) for name, tensor in heads.named_parameters()}
        (h, c, k), v, o = shapes["W_Q"], shapes["W_V"][2], shapes["W_O"][2]
        zero = dict(b_Q=(h, k), b_V=(h, v), S=(c, o), s=(o,))
        out: dict[str, Array] = {}
        for field in fields(cls):
            tensor = getattr(layer if field.name in ("S", "s") else heads, field.name)
            out[field.name] = np.zeros(zero[field.name]) if tensor is None else stored(tensor)
        broken = [name for name, array in out.items() if not np.isfinite(array).all()]
        if broken:
            raise CertificateError(f"no bound holds for weights that are not finite: {', '.join(broken)}")
        return cls(**out)


def power_of_two(x: Array) -> npt.NDArray[np.bool_]:
    """Where multiplying by x is exact: x is 0 or plus or minus a power of two."""
    mantissa, _ = np.frexp(np.abs(x))
    return (mantissa == 0.5) | (x == 0)


TABLES = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")
READING = ("W_Q", "W_K", "W_V")
ROOM = 1.01  # what rounding adds to sums of fewer than 10^5 terms in float32, and more in float64


@dataclass(frozen=True)
class Place:
    """Where the heads of a site (or of one of its channels) are: the group, its heads, and the columns of the layer's
    state that they read and write, in the order of the site's own coordinates. A column may be read twice."""

    group: int
    first: int
    heads: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Tables(dict[str, Array]):
    """Tables by name; asking for one that the heads do not have is the end of a certificate, not of the program."""

    def __missing__(self, name: str) -> Array:
        raise CertificateError(f"the heads have no table {name}, which their lemma speaks of")


@dataclass(frozen=True, eq=False)
class StoredHeads:
    """Some heads of a layer, one table after the other in float64: exactly the stored numbers.

    Leading dimensions are heads, also where the group shares a table. `S` and `s` are the columns of the layer's linear
    skip that the heads write. The rows of W_Q, W_K and W_V are all columns of the layer; `only` picks a site's own.
    """

    scope: Scope
    causal: bool
    purpose: str
    tables: dict[str, Array]
    S: Array
    s: Array
    reads: tuple[int, ...]

    @classmethod
    def read(cls, layer: AttentionLayer, place: Place) -> StoredHeads:
        """The heads at a place, which must write nothing but their own columns."""
        try:
            group = layer.heads()[place.group]
        except IndexError as error:
            count = len(layer.groups)
            raise CertificateError(f"the layer has {count} groups of heads, no group {place.group}") from error
        own = slice(place.first, place.first + place.heads)
        if own.stop > group.heads:
            raise CertificateError(f"'{group.purpose}' has {group.heads} heads, not {own.stop}")
        tables = Tables()
        for name in TABLES:
            tensor = getattr(group, name)
            if tensor is not None:
                array = stored(tensor)
                tables[name] = np.repeat(array, place.heads, 0) if len(array) == 1 else array[own]
        writes = list(place.writes)
        other = np.delete(tables["W_O"], writes, -1)
        if other.any():
            raise changed("W_O", group.purpose)
        tables["W_O"] = tables["W_O"][..., writes]
        S, s = skip_of(layer, tables["W_Q"].shape[1])
        return cls(group.scope, group.causal, group.purpose, tables, S[:, writes], s[writes], place.reads)

    def largest(self, size: float) -> float:
        """A bound of all numbers that the heads form of a state with entries up to `size`: queries, keys, logits,
        values and their sums, in any order and with room for rounding. What a dtype cannot hold has no bound."""

        def projected(name: str) -> Array:
            found = size * np.abs(self.tables[f"W_{name}"]).sum(1) if f"W_{name}" in self.tables else np.zeros(1)
            found = found + (np.abs(self.tables[f"b_{name}"]) if f"b_{name}" in self.tables else 0.0)
            memory = f"M_{name}"
            return np.maximum(found, np.abs(self.tables[memory]).max(1) if memory in self.tables else 0.0)

        with np.errstate(over="ignore", invalid="ignore"):
            query, key, value = (projected(name) for name in "QKV")
            logits = (query * key).sum(-1)
            written = (value[..., None] * np.abs(self.tables["W_O"])).sum((0, 1))
            written = written + size * np.abs(self.S).sum(0) + np.abs(self.s)
            most = max(float(np.max(x, initial=0.0)) for x in (query, key, value, logits, written))
        return most * ROOM if most == most else np.inf

    def changed(self, name: str) -> CertificateError:
        """What to raise when a table is not one that the heads' lemma speaks of."""
        return changed(name, self.purpose)

    def only(self, name: str, coordinates: Sequence[int] | None = None) -> Array:
        """The rows of W_Q, W_K, W_V or S at some of the site's coordinates (all by default); others must be 0."""
        table = self.S[None] if name == "S" else self.tables[name]
        columns = [self.reads[i] for i in (range(len(self.reads)) if coordinates is None else coordinates)]
        if np.delete(table, columns, 1).any():
            raise self.changed(name)
        return table[0][columns] if name == "S" else table[:, columns]

    def table(self, name: str, *shape: int) -> Array:
        """A table, or zeros of a shape where the group has none."""
        return self.tables[name] if name in self.tables else np.zeros(shape)

    def require(self, name: str, found: Array, wanted: Array) -> None:
        """Raise unless numbers are exactly what the family's lemma is about."""
        if found.shape != wanted.shape or not np.array_equal(found, wanted):
            raise self.changed(name)

    def expect(self, name: str, own: Array) -> None:
        """Raise unless a table that reads columns is exactly this one over the site's coordinates, and 0 elsewhere.

        Columns that are read twice hold the sum, as they do where heads are placed in a layer.
        """
        found = self.tables[name]
        wanted = np.zeros((len(own), found.shape[1], own.shape[2]))
        np.add.at(np.moveaxis(wanted, 1, 0), list(self.reads[: own.shape[1]]), np.moveaxis(own, 1, 0))
        self.require(name, found, np.repeat(wanted, len(found), 0) if len(wanted) == 1 else wanted)

    def absent(self, *names: str) -> None:
        """Raise unless the group has none of these tables, or only zeros in them."""
        for name in names:
            if name in self.tables and self.tables[name].any():
                raise self.changed(name)

    def self_spec(self) -> SelfSpec:
        """The numbers of self heads with constant keys in the site's own coordinates.

        A column that is read twice, as x and as y, stands for y in queries and for x in values and in the skip.
        """
        if self.scope != "self" or "W_K" in self.tables or "b_K" not in self.tables or "M_K" not in self.tables:
            raise CertificateError(f"'{self.purpose}' must be heads over their own token and memory, with fixed keys")
        h, _, k = self.tables["W_Q"].shape
        v = self.tables["W_O"].shape[1]
        query, value, skip = self.only("W_Q"), self.only("W_V"), self.only("S")
        if len(set(self.reads)) < len(self.reads):
            query, value, skip = query.copy(), value.copy(), skip.copy()
            query[:, :-1], value[:, 1:], skip[1:] = 0.0, 0.0, 0.0
        return SelfSpec(
            W_Q=query, b_Q=self.table("b_Q", h, k), b_K=self.tables["b_K"], W_V=value, b_V=self.table("b_V", h, v),
            M_K=self.tables["M_K"], M_V=self.tables["M_V"], W_O=self.tables["W_O"], S=skip, s=self.s,
        )  # fmt: skip

    def no_skip(self) -> None:
        """Raise unless the linear skip leaves the written columns alone."""
        self.require("S", self.S, np.zeros_like(self.S))
        self.require("s", self.s, np.zeros_like(self.s))

    def heads(self, query: Sequence[int], key: Sequence[int], value: Sequence[int], dtype: torch.dtype) -> Heads:
        """The same heads over the site's own coordinates alone, each table reading only those it may."""
        tables = {name: torch.from_numpy(array.copy()).to(dtype) for name, array in self.tables.items()}
        for name, allowed in zip(READING, (query, key, value), strict=True):
            if name in self.tables:
                rows = np.zeros((len(self.tables[name]), len(self.reads), self.tables[name].shape[2]))
                rows[:, list(allowed)] = self.only(name, allowed)
                tables[name] = torch.from_numpy(rows).to(dtype)
        return Heads(self.scope, causal=self.causal, purpose=self.purpose, **tables)

    @cached_property
    def identity(self) -> bytes:
        """All numbers that a bound of the heads depends on: heads that share it share their bound."""
        kept = [self.only(name) if name in READING else array for name, array in sorted(self.tables.items())]
        return b"|".join(np.ascontiguousarray(x).tobytes() for x in (*kept, self.only("S"), self.s))


def changed(name: str, purpose: str) -> CertificateError:
    """The error for a table that no lemma speaks of."""
    return CertificateError(
        f"{name} of '{purpose}' is part of the network's structure and was changed; only affine maps and anchor tables "
        "may be trained"
    )


def require_shapes(layer: AttentionLayer, columns: int, outputs: int) -> None:
    """Raise unless a layer reads `columns` columns and writes `outputs`, in every table: nothing is broadcast."""
    wanted = {"S": (columns, outputs), "s": (outputs,)}
    for path, tensor in layer.named_parameters():
        name, shape = path.split(".")[-1], tuple(tensor.shape)
        good = shape == wanted.get(name, shape)
        good &= name not in READING or shape[1] == columns
        good &= name != "W_O" or shape[2] == outputs
        if not good:
            raise CertificateError(f"{path} has the shape {shape} in a layer of {columns} to {outputs} columns")


def skip_of(layer: AttentionLayer, columns: int) -> tuple[Array, Array]:
    """The stored linear skip of a layer and its bias, zeros where there is none."""
    width = layer.S.shape[-1] if layer.S is not None else layer.heads()[0].W_O.shape[-1]
    S = np.zeros((columns, width)) if layer.S is None else stored(layer.S)
    return S, np.zeros(width) if layer.s is None else stored(layer.s)


def refuse_endless(module: torch.nn.Module) -> None:
    """Raise `CertificateError` on weights that are not finite, wherever they are: 0 times infinity is not 0."""
    broken = [name for name, tensor in module.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise CertificateError(f"no bound holds for weights that are not finite: {', '.join(map(repr, broken))}")


def refuse_overflow(layer: AttentionLayer, size: float, dtype: torch.dtype) -> None:
    """Raise `CertificateError` where the heads of a layer may form numbers that `dtype` cannot hold."""
    for number, group in enumerate(layer.heads()):
        columns, outputs = group.W_Q.shape[1], group.W_O.shape[2]
        place = Place(number, 0, group.heads, tuple(range(columns)), tuple(range(outputs)))
        refuse_beyond(group.purpose, StoredHeads.read(layer, place).largest(size), dtype)


def refuse_beyond(purpose: str, largest: float, dtype: torch.dtype) -> None:
    """Raise `CertificateError` where numbers as large as this are not numbers of `dtype`."""
    if not largest < torch.finfo(dtype).max:
        raise CertificateError(
            f"'{purpose}' may form numbers of size {largest:.3g}, which {dtype} cannot hold: no bound; "
            "take a smaller box, or dtype=torch.float64"
        )
