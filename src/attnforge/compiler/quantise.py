"""Few bits: the anchor values and affine maps of a network as small integers times a power of two (lemma H3).

A head averages its values, so rounding them to a grid of step h costs h/2; an affine map costs half a step for every
entry times what it reads. Powers of two make the stored numbers exactly integer times step in every dtype, so that the
certificate of the network with few bits is the usual one, recomputed from what is stored. Keys stay wide: a logit's
rounding is not averaged. On an even lattice their slopes are whole numbers times one step, and only offsets are wide.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..arguments import is_whole
from ..certificates.certificate import upper_text
from ..dtypes import Array, stored
from ..errors import ArgumentError, CertificateError
from ..network import AttentionLayer
from .compiled import CompiledNetwork

FEWEST, MOST = 2, 16  # bits of an integer with its sign
EXPONENT_BYTES = 1  # of a step: a power of two between 2^-126 and 2^127


@dataclass(frozen=True, eq=False)
class FewBits:
    """A table as integers times a power of two for each column, or for the whole table: integer 2^exponent."""

    integers: Array
    exponent: Array

    @property
    def numbers(self) -> Array:
        """What is stored."""
        return np.ldexp(self.integers, self.exponent)


@dataclass(frozen=True, eq=False)
class Quantised:
    """A network with few bits: the network, certified as it is stored, and what that cost and saved.

    `tables` are the integers by the name of their tensor; `wide` numbers stay in the dtype. Bytes count what a file
    would need: the integers, one byte for every step, and the wide numbers.
    """

    network: CompiledNetwork
    bits: int | str
    tables: Mapping[str, FewBits]
    narrow: int
    wide: int
    bytes_before: int
    bytes_after: int
    bound_before: float

    @property
    def bound(self) -> float:
        """The certified bound of the network with few bits."""
        found = self.network.bound
        assert found is not None
        return found

    def __str__(self) -> str:
        kind = self.bits if isinstance(self.bits, str) else f"{self.bits} bits"
        return (
            f"{self.narrow} numbers in {kind}, {self.wide} wide: "
            f"{self.bytes_before} -> {self.bytes_after} bytes; certified bound {upper_text(self.bound_before)} -> "
            f"{upper_text(self.bound)}"
        )


def quantise(net: CompiledNetwork, bits: int | Literal["bfloat16"] = 8, maps: bool = True) -> Quantised:
    """A copy of a compiled network whose anchor values, and with `maps` affine maps, have few bits, certified again.

    `bits` counts the sign: 8 is int8, 4 is int4; "bfloat16" rounds to that format instead.

    >>> import attnforge as af
    >>> small = quantise(af.compile("x*sin(y)", af.Box(x=(-1, 1), y=(-2, 2)), eps=1e-4), bits=8)
    >>> small.bytes_after < small.bytes_before, small.bound < 0.01
    (True, True)
    """
    if not isinstance(net, CompiledNetwork):
        raise ArgumentError(f"quantise takes a network that attnforge.compile made, got {type(net).__name__}")
    if bits != "bfloat16" and not is_whole(bits, FEWEST, MOST):
        raise ArgumentError(f'bits must be a whole number from {FEWEST} to {MOST}, or "bfloat16", got {bits!r}')
    before = net.bound if net.bound is not None else net.recertify().bound
    small = copy.deepcopy(net)
    tables: dict[str, FewBits] = {}
    narrow, steps, whole_keys = 0, 0, 0
    with torch.no_grad():
        for index, layer in enumerate(small.network.layers):
            assert isinstance(layer, AttentionLayer)
            if index % 2 == 0 and maps and layer.S is not None:
                narrow, steps = _replace(layer.S, f"layers.{index}.S", bits, 0, tables, narrow, steps)
            for g, group in enumerate(layer.heads()):
                if group.scope == "memory" and group.M_V is not None and group.M_K is not None:
                    name = f"layers.{index}.groups.{g}.M_V"
                    narrow, steps = _replace(group.M_V, name, bits, 1, tables, narrow, steps)
                    whole_keys += _lattice(group.M_K)
    count = sum(p.numel() for p in small.parameters())
    wide, item = count - narrow - whole_keys, next(small.parameters()).element_size()
    each = 16 if bits == "bfloat16" else int(bits)
    after = math.ceil(each * narrow / 8) + EXPONENT_BYTES * steps + whole_keys + wide * item
    try:
        small.attach(small.recertify())
    except CertificateError as error:
        kind = bits if bits == "bfloat16" else f"{bits} bits"
        alone = ", or maps=False to leave the affine maps alone" if maps else ""
        raise CertificateError(
            f"no finite bound can be proved with {kind}: what is rounded takes arguments out of the intervals that "
            f"heads are made for; use more bits{alone}"
        ) from error
    assert before is not None
    return Quantised(small, bits, tables, narrow, wide, count * item, after, before)


def _replace(
    tensor: Tensor, name: str, bits: int | str, axis: int, tables: dict[str, FewBits], narrow: int, steps: int
) -> tuple[int, int]:
    """Round a tensor in place, with one step for all entries along `axis`, and count."""
    if bits == "bfloat16":
        tensor.copy_(tensor.to(torch.bfloat16).to(tensor.dtype))
        return narrow + tensor.numel(), steps
    few = few_bits(stored(tensor), int(bits), axis)
    tensor.copy_(torch.from_numpy(few.numbers).to(tensor.dtype))
    tables[name] = few
    return narrow + tensor.numel(), steps + few.exponent.size


def few_bits(numbers: Array, bits: int, axis: int) -> FewBits:
    """The nearest integers times the smallest power of two that holds them, for each slice along `axis`.

    >>> few_bits(np.array([[1.0, -3.0], [0.5, 0.3]]), 4, 0).numbers.tolist()
    [[1.0, -3.0], [0.5, 0.5]]
    """
    most = 2 ** (bits - 1) - 1
    size = np.abs(numbers).max(axis, keepdims=True)
    with np.errstate(divide="ignore"):
        exponent = np.where(size > 0, np.ceil(np.log2(np.where(size > 0, size, 1.0) / most)), 0).astype(int)
    exponent = exponent + (np.rint(np.ldexp(size, -exponent)) > most)  # a logarithm may round down
    return FewBits(np.rint(np.ldexp(numbers, -exponent)), exponent)


def _lattice(keys: Tensor) -> int:
    """How many slopes are small whole numbers times one step, as stored: they fit into a byte each."""
    slope = stored(keys)[..., 0]
    found = 0
    for row in slope:
        gap = np.diff(np.sort(row))
        if len(row) > 256 or not gap.size or gap.min() <= 0:
            continue
        step = (row.max() - row.min()) / (len(row) - 1)
        twice = np.rint(2 * row / step)
        again = torch.from_numpy(twice * (step / 2)).to(keys.dtype).double().numpy()
        found += len(row) if np.array_equal(again, row) else 0
    return found
