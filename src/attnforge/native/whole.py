"""Networks of softmax heads with constant keys through the kernel for processors: all layers in one call.

A script is written once for a network: where its tables begin, what each layer reads and writes. What is computed is
what `network.Heads` and `network.AttentionLayer` compute: affine maps with sums in some order (lemma R8), logits, the
largest subtracted, exponentials, their sum's reciprocal, weights, a sum of weighted values (lemma R5 and the exponential
of R9). Every call compares the network's tables with those that the script was written for, byte by byte.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..dtypes import SHIPPED
from . import library, plain, threads

SLOTS, COORDINATES = 256, 8  # the most that kernels.c holds of a head's logits, and of a query
SPAN = {torch.float32: 64, torch.float64: 32}  # numbers of a slab, at most: four of the widest vectors
DENSE, SPARSE, HEADS, LATTICE, SUM = range(1, 6)  # the steps of kernels.c, 0 ends them
STEP = 16  # numbers of a step
FULL = 0.5  # share of a table that is not 0 from which on all of it is multiplied
MOST = 1 << 31  # numbers that a script can point at
TABLES = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")


class Group(Protocol):
    """A group of heads with constant keys: `network.Heads`."""

    scope: str
    _parameters: dict[str, Tensor | None]

    @property
    def heads(self) -> int:
        """How many there are."""


class Layer(Protocol):
    """Groups and a linear skip: `network.AttentionLayer`."""

    S: Tensor | None
    s: Tensor | None

    def heads(self) -> Sequence[Group]:
        """The groups."""


@dataclass
class Writer:
    """A script being written: its steps, the numbers and places they point at, and how many slabs they use."""

    dtype: torch.dtype
    code: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    count: int = 0
    slabs: int = 0

    def step(self, *numbers: int) -> None:
        """One more step."""
        self.code += [*numbers, *[0] * (STEP - len(numbers))]

    def number(self, table: Tensor) -> int:
        """Where the numbers of a table begin."""
        self.numbers.append(table.detach().reshape(-1).to(self.dtype))
        self.count += table.numel()
        return self.count - table.numel()

    def place(self, places: list[int]) -> int:
        """Where places begin."""
        self.index += places
        return len(self.index) - len(places)

    def room(self, first: int, wanted: int) -> int:
        """The slab after so many from the first on."""
        self.slabs = max(self.slabs, first + wanted)
        return first + wanted

    def affine(self, source: int, target: int, table: Tensor, bias: Tensor | None, add: bool) -> None:
        """target (=, or + with `add`) table x source + bias; the table is (result, channel)."""
        rows, columns = table.shape
        filled = table != 0
        shift = -1 if bias is None else self.number(bias)
        if int(filled.sum()) > FULL * table.numel():
            self.step(DENSE, source, target, rows, columns, self.number(table), shift, add)
            return
        from_, at = [0, *filled.sum(-1).cumsum(0).tolist()], filled.nonzero()[:, 1].tolist()
        entries = self.number(table[filled])
        self.step(SPARSE, source, target, rows, columns, entries, shift, add, self.place([*from_, *at]))

    def group(self, group: Group, source: int, target: int, free: int, add: bool) -> None:
        """A group of heads: what they read, times their output table."""
        tables = {name: t.detach() for name, t in group._parameters.items() if t is not None}
        W_Q, keys, values, W_O = (tables[name] for name in ("W_Q", "M_K", "M_V", "W_O"))
        heads, width = group.heads, values.shape[-1]
        read, free = free, self.room(free, heads * width)
        own = -1
        if group.scope == "self":
            both = max(keys.shape[0], tables["b_K"].shape[0])
            keys = torch.cat([tables["b_K"].unsqueeze(-2).expand(both, -1, -1), keys.expand(both, -1, -1)], dim=-2)
            W_V, b_V = tables.get("W_V"), tables.get("b_V")
            if W_V is None or (b_V is not None and b_V.shape[0] > W_V.shape[0]):
                W_V = torch.zeros(heads, W_Q.shape[1], width) if W_V is None else W_V.expand(heads, -1, -1)
            bias = None if b_V is None else b_V.expand(W_V.shape[0], -1).flatten()
            own, free = free, self.room(free, W_V.shape[0] * width)
            self.affine(source, own, W_V.permute(0, 2, 1).flatten(0, 1), bias, False)
            own_shared = W_V.shape[0] == 1
        slots, coordinates = keys.shape[1:]
        table = W_Q.permute(0, 2, 1).flatten(0, 1)  # (head and coordinate, channel)
        filled = table != 0
        shift = torch.zeros(heads, coordinates, dtype=self.dtype)
        shift = shift if "b_Q" not in tables else tables["b_Q"] + shift
        if int(filled.sum(-1).amax()) <= 1:
            first = filled.to(torch.uint8).argmax(-1)
            scale, place = table.gather(-1, first.unsqueeze(-1)), torch.where(filled.any(-1), first, -1).tolist()
            queries = source
        else:
            scale, place = torch.ones(len(table)), list(range(len(table)))
            queries, free = free, self.room(free, len(table))
            self.affine(source, queries, table, shift.flatten() if "b_Q" in tables else None, False)
            shift = torch.zeros_like(shift)
        self.step(
            HEADS, queries, read, heads, slots, coordinates, width, self.number(keys), keys.shape[0] == 1,
            self.number(values.transpose(-2, -1)), values.shape[0] == 1, own, own >= 0 and own_shared,
            self.number(scale), self.number(shift), self.place(place),
        )  # fmt: skip
        if W_O.shape[0] == 1 < heads:
            total, free = free, self.room(free, width)
            self.step(SUM, read, total, heads, width)
            read = total
        self.affine(read, target, W_O.flatten(0, 1).t(), None, add)

    def layer(self, layer: Layer, source: int, target: int, free: int) -> None:
        """A layer: its groups one after the other, then the skip, then its bias."""
        add = False
        for group in layer.heads():
            self.group(group, source, target, free, add)
            add = True
        width = len(layer.s) if layer.S is None and layer.s is not None else None
        if layer.S is not None:
            self.affine(source, target, layer.S.detach().t(), None if layer.s is None else layer.s.detach(), add)
        elif width is not None:
            self.affine(source, target, torch.zeros(width, 0, dtype=self.dtype), layer.s, add)


@dataclass(frozen=True, eq=False)
class Script:
    """How the kernel computes a network, and the tables it was written for."""

    held: list[tuple[dict[str, Tensor | None], str, Tensor | None, int, torch.Size | None]]
    inside: list[tuple[dict[str, Any], list[Any]]]  # the modules within
    dtype: torch.dtype
    possible: bool
    inputs: int = 0
    outputs: int = 0
    result: int = 0
    slabs: int = 0
    work: int = 0  # of a row
    code: Tensor | None = None
    index: Tensor | None = None
    numbers: Tensor | None = None
    addresses: Any = None
    sizes: Tensor | None = None
    copies: Tensor | None = None

    def stands(self) -> bool:
        """Whether the network has the modules and tables that it had, at their addresses; their bytes are compared
        where they are used."""
        for modules, before in self.inside:
            if [*modules.values()] != before:
                return False
        for tables, name, table, address, shape in self.held:
            now = tables.get(name)
            if now is not table:
                return False
            if now is not None and (now.data_ptr() != address or now.shape != shape or not now.is_contiguous()):
                return False
        return True

    def trains(self) -> bool:
        """Whether gradients of a table are wanted."""
        return any(table is not None and table.requires_grad for _, _, table, _, _ in self.held)

    def run(self, Z: Tensor) -> Tensor | None:
        """The network at rows of Z; None where a table's bytes have changed, or where there are no kernels any more."""
        found = library()
        if found is None:
            return None
        assert self.code is not None and self.index is not None and self.numbers is not None
        assert self.sizes is not None and self.copies is not None
        x = Z.detach()
        x = x if x.is_contiguous() else x.contiguous()
        rows = x.numel() // self.inputs
        many = threads(rows * self.work)
        room = torch.empty(many * self.slabs * SPAN[self.dtype], dtype=self.dtype)
        out, changed = torch.empty(*Z.shape[:-1], self.outputs, dtype=self.dtype), ctypes.c_int64(0)
        call = found.network_f if self.dtype == torch.float32 else found.network_d
        call(
            x.data_ptr(), out.data_ptr(), rows, self.inputs, self.outputs, self.code.data_ptr(), self.index.data_ptr(),
            self.numbers.data_ptr(), self.addresses, self.sizes.data_ptr(), self.copies.data_ptr(), len(self.sizes),
            room.data_ptr(), self.slabs, self.result, ctypes.byref(changed), many,
        )  # fmt: skip
        return None if changed.value else out


_SCRIPTS: weakref.WeakKeyDictionary[nn.Module, Script] = weakref.WeakKeyDictionary()


def computed(network: nn.Module, layers: Callable[[], Sequence[Layer]], Z: Tensor) -> Tensor | None:
    """What a network of these layers computes of every row of Z; None where PyTorch has to."""
    if Z.device.type != "cpu" or Z.dtype not in SHIPPED or not plain(Z) or not Z.numel():
        return None
    training = torch.is_grad_enabled()
    if training and Z.requires_grad:
        return None
    script = _SCRIPTS.get(network)
    for _ in range(2):
        if script is None or script.dtype != Z.dtype or script.inputs != Z.shape[-1] or not script.stands():
            if training and any(p.requires_grad for p in network.parameters()):
                return None
            script = _written(network, layers(), Z)
            if script is None:
                return None
            _SCRIPTS[network] = script
        if not script.possible or (training and script.trains()):
            return None
        if (out := script.run(Z)) is not None:
            return out
        script = None
    return None  # somebody writes to the tables meanwhile


def _written(network: nn.Module, layers: Sequence[Layer], Z: Tensor) -> Script | None:
    """The script of a network; None where its tables are no plain numbers of the dtype of Z."""
    inside = [(m._modules, [*m._modules.values()]) for m in network.modules() if m._modules]
    owners = [m._parameters for m in network.modules() if m._parameters]
    tables = [(owner, name, table) for owner in owners for name, table in owner.items()]
    known = [t for _, _, t in tables if t is not None]
    if not all(t.dtype == Z.dtype and t.device == Z.device and plain(t) and t.is_contiguous() for t in known):
        return None
    if library() is None:
        return None
    held = [(o, n, t, 0 if t is None else t.data_ptr(), None if t is None else t.shape) for o, n, t in tables]
    copies = [t.detach().reshape(-1).view(torch.uint8).clone() for t in known]
    if not all(_fits(group) for layer in layers for group in layer.heads()):
        return Script(held, inside, Z.dtype, False, Z.shape[-1])
    writer, widths = Writer(Z.dtype), [Z.shape[-1], *map(_width, layers)]
    most = max(widths)
    places = writer.room(0, most), 0
    free, at = writer.room(most, most), places[1]
    for layer in layers:
        target = places[0] if at == places[1] else places[1]
        writer.layer(layer, at, target, free)
        at = target
    writer.step(0)
    numbers = torch.cat([torch.zeros(0, dtype=Z.dtype), *writer.numbers])
    if len(numbers) >= MOST or len(writer.index) >= MOST or any(abs(c) >= MOST for c in writer.code):
        return Script(held, inside, Z.dtype, False, Z.shape[-1])
    sizes = torch.tensor([len(c) for c in copies], dtype=torch.int64)
    addresses = (ctypes.c_void_p * max(1, len(known)))(*(t.data_ptr() for t in known))
    return Script(
        held, inside, Z.dtype, True, Z.shape[-1], widths[-1], at, writer.slabs, _work(layers, widths),
        torch.tensor(writer.code, dtype=torch.int32), torch.tensor(writer.index or [0], dtype=torch.int32), numbers,
        addresses, sizes, torch.cat([torch.zeros(0, dtype=torch.uint8), *copies]),
    )  # fmt: skip


def _groups(layers: Sequence[Layer]) -> Iterator[Group]:
    for layer in layers:
        yield from layer.heads()


def _fits(group: Group) -> bool:
    """Whether the kernel holds a head of the group, its own slot included."""
    tables = group._parameters
    keys = tables["M_K"]
    return keys is not None and keys.shape[1] < SLOTS and keys.shape[2] <= COORDINATES


def _width(layer: Layer) -> int:
    table = layer.heads()[0]._parameters["W_O"] if layer.S is None else layer.S
    assert table is not None
    return int(table.shape[-1])


def _work(layers: Sequence[Layer], widths: Sequence[int]) -> int:
    """About how many exponentials' time a row takes, for sharing it among threads."""
    slots = sum(g.heads * (1 + t.shape[1]) for g in _groups(layers) if (t := g._parameters["M_K"]) is not None)
    return max(1, slots + sum(widths))
