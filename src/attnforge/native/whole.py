"""Networks of softmax heads with constant keys through the kernel for processors: all layers in one call.

A script is written once for a network: where its tables begin, what each layer reads and writes. What is computed is
what `network.Heads` and `network.AttentionLayer` compute: affine maps with sums in some order (lemma R8), logits, the
largest subtracted, exponentials, their sum's reciprocal, weights, a sum of weighted values (lemma R5 and the
exponential of R9); or, of keys that may be read so, quotients of polynomials (lemma A8). Every call compares the
network's tables with those that the script was written for, byte by byte.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..dtypes import SHIPPED
from . import library, plain, threads

SLOTS, COORDINATES, POWERS = 1024, 8, 65  # the most that kernels.c holds of logits, queries, and polynomials
SPAN = {torch.float32: 64, torch.float64: 32}  # numbers of a slab, at most: four of the widest vectors
DENSE, SPARSE, HEADS, LATTICE, SUM = range(1, 6)  # the steps of kernels.c, 0 ends them
STEP = 16  # numbers of a step
FULL = 0.5  # share of a table that is not 0 from which on all of it is multiplied
MOST = 1 << 31  # numbers that a script can point at
_SHAPE, _TRAINS = operator.attrgetter("shape"), operator.attrgetter("requires_grad")
TABLES = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")


class EvenKeys(Protocol):
    """Keys that may be read with one exponential: `heads.fast.even.EvenTable`."""

    def read(self, keys: Tensor, values: Tensor, centre: float) -> tuple[Tensor, int, bool, bool] | None:
        """[rate, centre, Q, P, R], powers, whether there is R, whether keys are whole; None for others."""


class ConstantGroup(Protocol):
    """A group of heads with constant keys: `network.Heads`."""

    _parameters: dict[str, nn.Parameter | None]

    @property
    def scope(self) -> str:
        """Which tokens they see."""

    @property
    def even(self) -> EvenKeys | None:
        """How their keys may be read, besides by the softmax."""

    @property
    def heads(self) -> int:
        """How many there are."""


class ConstantLayer(Protocol):
    """Groups and a linear skip: `network.AttentionLayer`."""

    @property
    def S(self) -> Tensor | None:
        """The linear skip."""

    @property
    def s(self) -> Tensor | None:
        """Its bias."""

    def heads(self) -> Sequence[ConstantGroup]:
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

    def group(self, group: ConstantGroup, source: int, target: int, free: int, add: bool) -> None:
        """A group of heads: what they read, times their output table."""
        tables = {name: t.detach() for name, t in group._parameters.items() if t is not None}
        W_Q, keys, values, W_O = (tables[name] for name in ("W_Q", "M_K", "M_V", "W_O"))
        heads, width = group.heads, values.shape[-1]
        read, free = free, self.room(free, heads * width)
        if self.evenly(group, tables, source, read):
            self.affine(read, target, W_O.expand(heads, -1, -1).flatten(0, 1).t(), None, add)
            return
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

    def evenly(self, group: ConstantGroup, tables: dict[str, Tensor], source: int, read: int) -> bool:
        """Read a group's keys with one exponential, where they may be: heads of one table and query (x - centre, 1)."""
        W_Q, b_Q, keys, values = (tables.get(name) for name in ("W_Q", "b_Q", "M_K", "M_V"))
        if group.even is None or group.scope != "memory":
            return False
        if W_Q is None or b_Q is None or keys is None or values is None:
            return False
        if keys.shape[0] != 1 or keys.shape[2] != 2 or values.shape[0] != 1 or values.shape[2] != 1:
            return False
        picks = W_Q[:, :, 0]
        one_each = bool(((picks != 0).sum(-1) == 1).all()) and bool((picks.sum(-1) == 1).all())
        same = bool((b_Q == b_Q[:1]).all()) and float(b_Q[0, 1]) == 1.0
        if not one_each or not same or bool((W_Q[:, :, 1] != 0).any()):
            return False
        found = group.even.read(keys[0], values[0, :, 0], -float(b_Q[0, 0]))
        if found is None:
            return False
        numbers, powers, odd, whole = found
        if powers > POWERS:
            return False
        place = self.place((picks != 0).to(torch.uint8).argmax(-1).tolist())
        self.step(LATTICE, source, read, group.heads, powers, self.number(numbers), odd, whole, place)
        return True

    def layer(self, layer: ConstantLayer, source: int, target: int, free: int) -> None:
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
class HeldTables:
    """The modules and tables of a network as they were: what has to be there still.

    All of it is looked at before every call, so lists are compared whole: a loop of Python costs more than the network.
    """

    within: list[dict[str, Any]]  # what every module holds: those within it, then its tables
    sizes: list[int]
    members: list[Any]  # of all of these, one after the other
    known: list[nn.Parameter]
    addresses: list[int]
    shapes: list[torch.Size]
    watching: list[Any]  # the hooks of the modules within, none of which may be set
    own: list[dict[str, Any]]  # the attributes of these modules: one may have a `forward` of its own

    @classmethod
    def of(cls, network: nn.Module) -> HeldTables:
        """Those of now."""
        every = list(network.modules())
        within: list[dict[str, Any]] = [held for m in every for held in (m._modules, m._parameters)]
        known = [t for m in every for t in m._parameters.values() if t is not None]
        return cls(
            within, [*map(len, within)], [*chain.from_iterable(map(dict.values, within))], known,
            [t.data_ptr() for t in known], [t.shape for t in known],
            [hooks for m in every[1:] for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks,
                                                    m._backward_pre_hooks)],
            [vars(m) for m in every[1:]],
        )  # fmt: skip

    def stands(self) -> bool:
        """Whether all is there, at its address, and nobody watches; the bytes are compared where they are used."""
        if [*map(len, self.within)] != self.sizes:
            return False
        if not all(map(operator.is_, chain.from_iterable(map(dict.values, self.within)), self.members)):
            return False
        if [*map(Tensor.data_ptr, self.known)] != self.addresses or [*map(_SHAPE, self.known)] != self.shapes:
            return False
        return all(map(Tensor.is_contiguous, self.known)) and not any(self.watching) and not self.overridden()

    def overridden(self) -> bool:
        """Whether a module within has a `forward` of its own."""
        return any(map(operator.contains, self.own, repeat("forward")))

    def trains(self) -> bool:
        """Whether gradients of a table are wanted."""
        return any(map(_TRAINS, self.known))


@dataclass(frozen=True, eq=False)
class Steps:
    """What the kernel is given: steps, what they point at, and the network's tables with their bytes as they were."""

    dtype: torch.dtype
    inputs: int
    outputs: int
    result: int
    slabs: int
    work: int  # of a row
    code: Tensor
    index: Tensor
    numbers: Tensor
    addresses: Any
    sizes: Tensor
    copies: Tensor

    @functools.cached_property
    def given(self) -> tuple[Any, ...]:
        """What the kernel is given at every call: where these tensors lie, which nobody else holds."""
        return (
            self.code.data_ptr(), self.index.data_ptr(), self.numbers.data_ptr(), self.addresses,
            self.sizes.data_ptr(), self.copies.data_ptr(), len(self.sizes),
        )  # fmt: skip

    def run(self, Z: Tensor) -> Tensor | None:
        """The network at rows of Z; None where a table's bytes have changed, or where there are no kernels any more."""
        found = library()
        if found is None:
            return None
        x = Z.detach()
        x = x if x.is_contiguous() else x.contiguous()
        rows = x.numel() // self.inputs
        many = threads(rows * self.work)
        room = torch.empty(many * self.slabs * SPAN[self.dtype], dtype=self.dtype)
        out, changed = torch.empty(*Z.shape[:-1], self.outputs, dtype=self.dtype), ctypes.c_int64(0)
        call = found.network_f if self.dtype == torch.float32 else found.network_d
        call(
            x.data_ptr(), out.data_ptr(), rows, self.inputs, self.outputs, *self.given, room.data_ptr(), self.slabs,
            self.result, ctypes.byref(changed), many,
        )  # fmt: skip
        return None if changed.value else out


@dataclass(frozen=True, eq=False)
class Script:
    """How the kernel computes a network, if it does, and what that was found out of."""

    held: HeldTables
    dtype: torch.dtype
    inputs: int
    steps: Steps | None = None


_SCRIPTS: weakref.WeakKeyDictionary[nn.Module, Script] = weakref.WeakKeyDictionary()


def computed(network: nn.Module, layers: Callable[[], Sequence[ConstantLayer]], Z: Tensor) -> Tensor | None:
    """What a network of these layers, all of them heads with constant keys, computes of every row of Z; None where
    PyTorch has to."""
    if (out := again(network, Z)) is not None:
        return out
    if not _takes(Z) or (torch.is_grad_enabled() and any(p.requires_grad for p in network.parameters())):
        return None
    script = _SCRIPTS.get(network)
    if script is not None and script.steps is None and _serves(script, Z):
        return None
    script = _written(network, layers(), Z)
    if script is None:
        return None
    _SCRIPTS[network] = script
    return None if script.steps is None else script.steps.run(Z)


def again(network: nn.Module, Z: Tensor) -> Tensor | None:
    """The same by the script that was written before; None where there is none for the network as it is."""
    script = _SCRIPTS.get(network)
    if script is None or script.steps is None or not _takes(Z) or not _serves(script, Z):
        return None
    if torch.is_grad_enabled() and script.held.trains():
        return None
    return script.steps.run(Z)


def _takes(Z: Tensor) -> bool:
    if Z.device.type != "cpu" or Z.dtype not in SHIPPED or not Z.numel() or not plain(Z):
        return False
    return not (Z.requires_grad and torch.is_grad_enabled())


def _serves(script: Script, Z: Tensor) -> bool:
    return script.dtype == Z.dtype and script.inputs == Z.shape[-1] and script.held.stands()


def _written(network: nn.Module, layers: Sequence[ConstantLayer], Z: Tensor) -> Script | None:
    """The script of a network; None where its tables are no plain numbers of the dtype of Z."""
    held = HeldTables.of(network)
    known = held.known
    if not all(t.dtype == Z.dtype and t.device == Z.device and plain(t) and t.is_contiguous() for t in known):
        return None
    if library() is None:
        return None
    copies = [t.detach().reshape(-1).view(torch.uint8).clone() for t in known]
    if not all(_fits(group) for layer in layers for group in layer.heads()):
        return Script(held, Z.dtype, Z.shape[-1])
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
        return Script(held, Z.dtype, Z.shape[-1])
    sizes = torch.tensor([len(c) for c in copies], dtype=torch.int64)
    addresses = (ctypes.c_void_p * max(1, len(known)))(*(t.data_ptr() for t in known))
    steps = Steps(
        Z.dtype, Z.shape[-1], widths[-1], at, writer.slabs, _work(layers, widths),
        torch.tensor(writer.code, dtype=torch.int32), torch.tensor(writer.index or [0], dtype=torch.int32), numbers,
        addresses, sizes, torch.cat([torch.zeros(0, dtype=torch.uint8), *copies]),
    )  # fmt: skip
    return Script(held, Z.dtype, Z.shape[-1], steps)


def _groups(layers: Sequence[ConstantLayer]) -> Iterator[ConstantGroup]:
    for layer in layers:
        yield from layer.heads()


def _fits(group: ConstantGroup) -> bool:
    """Whether the kernel holds a head of the group, its own slot included, and its tables are where they should be."""
    keys, own = group._parameters.get("M_K"), vars(group)
    if keys is None or group._parameters.get("W_K") is not None:  # keys of the token itself are no constants
        return False
    if not all(name in group._parameters and name not in own for name in TABLES):
        return False
    return keys.shape[1] + (group.scope == "self") <= SLOTS and keys.shape[2] <= COORDINATES


def _width(layer: ConstantLayer) -> int:
    table = layer.heads()[0]._parameters["W_O"] if layer.S is None else layer.S
    assert table is not None
    return int(table.shape[-1])


def _work(layers: Sequence[ConstantLayer], widths: Sequence[int]) -> int:
    """About how many exponentials' time a row takes, for sharing it among threads."""
    slots = sum(g.heads * (1 + t.shape[1]) for g in _groups(layers) if (t := g._parameters["M_K"]) is not None)
    return max(1, slots + sum(widths))
