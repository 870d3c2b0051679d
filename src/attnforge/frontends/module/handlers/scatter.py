"""Handlers for operations that add entries up at places that are constant: affine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import atoms as algebra
from ..atoms import Refusal, Tape
from ..values import Value, add, as_value, atoms, wrap
from .table import Operation, handles


def summed(tape: Tape, ids: Tensor, places: Tensor, count: int) -> Tensor:
    """The sums of the atoms that go to each of the places 0 to count - 1; those at place -1 go nowhere."""
    goal, source = places.reshape(-1).numpy(), np.arange(places.numel())
    source, goal = source[goal >= 0], goal[goal >= 0]
    order = np.argsort(goal, kind="stable")
    source, goal = source[order], goal[order]
    terms = np.bincount(goal, minlength=count)
    table = np.full((count, max(1, int(terms.max(initial=0)))), -1)
    table[goal, np.arange(len(goal)) - (np.cumsum(terms) - terms)[goal]] = source
    padded = torch.cat([ids.reshape(-1), ids.new_zeros(1)])  # atom 0 is the number zero, and the last entry
    rows = padded[torch.from_numpy(table)]
    return algebra.contract(tape, rows, np.ones((table.shape[1], 1))).squeeze(-1)


def _numbered(size: Any) -> Tensor:
    return torch.arange(int(np.prod(tuple(size), dtype=np.int64))).reshape(tuple(size))


def added(tape: Tape, x: Value, values: Value, places: Tensor) -> Value:
    """x, and values added to it at places, which count its entries."""
    size = atoms(tape, x).shape
    found = summed(tape, atoms(tape, values).expand(places.shape), places, size.numel())
    return add(tape, x, wrap(tape, found.reshape(size)))


@handles("scatter_add", "scatter_reduce", note="sums at constant places")
def _scatter_add(tape: Tape, call: Operation) -> Value:
    if call.get("reduce", "sum") != "sum" or not call.get("include_self", True):
        raise Refusal(f"only its sums have a form here, not reduce={call['reduce']!r} or include_self=False")
    x, index, dim = as_value(call["self"]), call.constant("index"), int(call["dim"])
    ids = atoms(tape, x)
    places = _numbered(ids.shape)
    if ids.dim():
        narrowed = tuple(slice(None) if d == dim % ids.dim() else slice(s) for d, s in enumerate(index.shape))
        places = places[narrowed].gather(dim, index)
        source = atoms(tape, as_value(call["src"]))[tuple(slice(s) for s in index.shape)]
    else:
        source = atoms(tape, as_value(call["src"]))
    return added(tape, x, wrap(tape, source), places)


def put(tape: Tape, call: Operation) -> Value:
    """index_put with accumulate: values are added where the indices say."""
    x = as_value(call["self"])
    indices = tuple(slice(None) if i is None else i for i in call.constant("indices"))
    places = _numbered(atoms(tape, x).shape)[indices]
    return added(tape, x, as_value(call["values"]), places)


@handles("col2im", note="sums of what overlaps")
def _fold(tape: Tape, call: Operation) -> Value:
    ids, size = atoms(tape, call["self"]), list(call["output_size"])
    steer = [list(call[key]) for key in ("kernel_size", "dilation", "padding", "stride")]
    batch, channels = ids.shape[:-2], ids.shape[-2] // int(np.prod(steer[0]))
    whole = (*batch, channels, *size)
    # Counted from 1: what im2col adds at the borders is 0, and goes nowhere.
    numbered = (_numbered(whole) + 1).double()
    places = torch.ops.aten.im2col(numbered, *steer).long() - 1
    return wrap(tape, summed(tape, ids, places, int(np.prod(whole))).reshape(whole))
