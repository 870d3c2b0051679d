"""Handlers for operations that move data about, copy it or only ask for its shape: they cost nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..atoms import Refusal, Tape
from ..values import SYMBOLS, as_value, atoms, is_data, leaves, moved, rearranged, shape, substitute, wrap
from .scatter import put
from .table import Operation, handles, words

# Which arguments hold the contents that are moved, where that is not just `self`; all others steer.
_CONTENTS = {
    "cat": ("tensors",),
    "stack": ("tensors",),
    "block_diag": ("tensors",),
    "broadcast_tensors": ("tensors",),
    "where": ("self", "other"),
    "masked_fill": ("self", "value"),
    "constant_pad_nd": ("self", "value"),
    "index_put": ("self", "values"),
    "_unsafe_index_put": ("self", "values"),
    "index_copy": ("self", "source"),
    "index_fill": ("self", "value"),
    "select_scatter": ("self", "src"),
    "slice_scatter": ("self", "src"),
    "diagonal_scatter": ("self", "src"),
    "scatter": ("self", "src", "value"),
    "masked_scatter": ("self", "source"),
}
_MOVEMENT = words(
    """view reshape _unsafe_view view_copy _reshape_alias flatten unflatten ravel permute transpose t swapaxes
    movedim mT numpy_T expand broadcast_to slice select narrow index _unsafe_index gather index_select take
    take_along_dim split split_with_sizes tensor_split chunk unsafe_split unsafe_split_with_sizes unsafe_chunk unbind
    unfold flip roll rot90 squeeze unsqueeze atleast_1d atleast_2d repeat tile repeat_interleave tril triu diagonal
    diag diag_embed pixel_shuffle pixel_unshuffle"""
)
_VIEWS = ("view", "_unsafe_view", "view_copy", "_reshape_alias")
_NEAREST = tuple(f"{way}{rank}d" for way in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3))
_COUNTED = 2**24  # up to which float32 holds every whole number
_PADS = words(
    """reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    im2col"""
)


@handles(*_MOVEMENT, *_CONTENTS, note="movement of data by constant shapes, indices and masks: free")
def _move(tape: Tape, call: Operation) -> Any:
    names = _CONTENTS.get(call.name, ("self",))
    for key in call.arguments.keys() - set(names):
        call.constant(key)
    if call.get("accumulate"):
        return put(tape, call)
    if call.get("reduce"):
        raise Refusal("it multiplies or adds what is moved to one place; scatter_add has a form here")
    if call.name == "where" and (mask := call.constant("condition").bool()).unique().numel() == 1:
        return _chosen(tape, call["self"] if mask.all() else call["other"], call)
    contents = [leaf for key in names for leaf in leaves(call.get(key)) if leaf is not None]

    def move(change: Any) -> Any:
        def changed(leaf: Any) -> Any:
            return None if leaf is None else change(leaf)

        arguments = {
            key: substitute(value, changed) if key in names else value for key, value in call.arguments.items()
        }
        # How atoms lie in memory is not how the target's numbers do: a view may need a copy.
        return arguments["self"].reshape(call["size"]) if call.name in _VIEWS else call.target(**arguments)

    return moved(tape, contents, move)


def _chosen(tape: Tape, side: Any, call: Operation) -> Any:
    """One side of a `where` whose condition is the same everywhere."""
    sizes = [shape(as_value(call[key])) for key in ("condition", "self", "other")]
    return rearranged(tape, as_value(side), lambda i: i.expand(torch.broadcast_shapes(*sizes)))


@handles(*_PADS, note="movement of data: free")
def _pad(tape: Tape, call: Operation) -> Any:
    # These exist for floats only, which hold an atom's number exactly as long as it is below 2^53.
    arguments = {key: value for key, value in call.arguments.items() if key != "self"}
    return moved(tape, [call["self"]], lambda change: call.target(change(call["self"]).double(), **arguments).long())


@handles(*_NEAREST, note="movement of data by constant sizes and factors: free")
def _nearest(tape: Tape, call: Operation) -> Any:
    key = "input" if "input" in call.arguments else "self"
    arguments = {name: value for name, value in call.arguments.items() if name != key}
    size = shape(call[key])
    # Where entries come from depends on sizes alone, and is found in the dtype of the data, where it may round.
    places = torch.arange(math.prod(size)).reshape(size)
    if places.numel() > _COUNTED:
        raise Refusal(f"it enlarges more than {_COUNTED} numbers")
    single, double = (call.target(places.to(d), **arguments).long() for d in (torch.float32, torch.float64))
    if not torch.equal(single, double):
        raise Refusal("which entries it copies differs between float32 and float64, by the rounding of its factor")
    return moved(tape, [call[key]], lambda change: change(call[key]).flatten()[double])


@handles(
    *words("clone contiguous detach alias lift_fresh lift_fresh_copy lift positive _to_copy to type_as resolve_neg"),
    note="the value itself; casts to fewer digits than the module's own dtype has are refused",
)
def _same(tape: Tape, call: Operation) -> Any:
    wanted = call.get("dtype")
    if isinstance(wanted, torch.dtype) and not wanted.is_floating_point:
        raise Refusal("it turns data into integers or truth values")
    return call["self"]


def coarser(tape: Tape, wanted: Iterable[Any]) -> torch.dtype | None:
    """A dtype among these with fewer digits than the target's own: a cast to it changes numbers.

    >>> from attnforge.box import Box
    >>> tape = Tape(Box.cube(0, 1, shape=1), 1, 1, torch.float32)
    >>> coarser(tape, [torch.float64, torch.float32]), coarser(tape, [torch.bfloat16])
    (None, torch.bfloat16)
    """
    most = torch.finfo(tape.own).eps
    floats = (d for d in wanted if isinstance(d, torch.dtype) and d.is_floating_point)
    return next((d for d in floats if torch.finfo(d).eps > most), None)


@handles("embedding", note="rows of a table at constant places: free")
def _embedding(tape: Tape, call: Operation) -> Any:
    places = call.constant("indices").long()
    return rearranged(tape, call["weight"], lambda i: i[places])


@handles("copy", note="the source, in the shape of the destination")
def _copy(tape: Tape, call: Operation) -> Any:
    source, size = call["src"], shape(call["self"])
    if isinstance(source, Tensor):
        return source.expand(size)
    return moved(tape, [source], lambda change: change(source).expand(size))


@handles("dropout", "feature_dropout", "alpha_dropout", "native_dropout", note="the value itself, in evaluation mode")
def _dropout(tape: Tape, call: Operation) -> Any:
    if call.get("train") and call.get("p") != 0:
        raise Refusal("it draws random numbers")
    return [call["input"], None] if call.name == "native_dropout" else call["input"]


@handles("expand_as", "view_as", "reshape_as", note="movement of data by another tensor's shape")
def _like(tape: Tape, call: Operation) -> Any:
    source, size = call["self"], shape(call["other"])
    method = "expand" if call.name == "expand_as" else "reshape"
    if not isinstance(source, SYMBOLS):
        return getattr(source, method)(size)
    return moved(tape, [source], lambda change: getattr(change(source), method)(size))


#: What new tensors hold; an empty one may hold anything, so zeros are as good.
_FILL = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0, "empty_like": 0.0, "new_empty": 0.0}


@handles(*_FILL, "full_like", "new_full", "fill", note="a constant of the same shape")
def _filled(tape: Tape, call: Operation) -> Any:
    size = tuple(call["size"]) if "size" in call.arguments else tuple(shape(call["self"]))
    number = _FILL.get(call.name)
    if number is None:
        filling = call.get("fill_value", call.get("value"))
        if is_data(filling):
            return wrap(tape, atoms(tape, filling).expand(size))
        number = float(filling)
    dtype = call.get("dtype")
    kind = dtype if isinstance(dtype, torch.dtype) and not dtype.is_floating_point else torch.float64
    return torch.full(size, number, dtype=kind)
