"""Purity: is a network made of affine maps, data movement and softmax attention, and of nothing else?

The network is exported to a graph of PyTorch operators and every operator is judged by what its arguments depend on.

- Constants (weights, buffers, literals) may be computed with freely.
- Data, that is whatever depends on a floating-point input, may go through affine maps with constant coefficients, be
  moved about (with indices and masks that do not depend on data), and go through softmax and fused attention.
- Two data tensors may be multiplied in a matrix product or an einsum only, and only as Q K^T, where the result
  ends in a softmax after nothing but scaling, additions, masks and movement, or as weights times V, where one factor is
  the output of a softmax after nothing but movement and the sum runs over the slots of one row.
- Integer and boolean inputs are names, not quantities: look-ups, masks and positions may be built from them.

Integer inputs that only constants act on are trusted to be token ids, masks or positions; once a trained weight acts
on them, or a table is looked up with them, the result is data.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor, nn

from ..errors import PurityError
from .findings import Census, Offence, allow_custom, refusal, structural

__all__ = ["Census", "Offence", "PurityError", "allow_custom", "examine", "offences", "purity", "structural"]

Example: TypeAlias = Tensor | tuple[object, ...] | dict[str, object] | None


def purity(net: nn.Module, example: Example = None) -> Census:
    """The census of the operations of an attention-only network; `PurityError` if it is not one.

    `example` is an input to export the network with: a tensor, a tuple of positional or a dict of keyword arguments.
    Without it the network's own method `example_input()` is asked. The network is exported in evaluation mode and
    left as it was. The error lists every offending operation with its reason and source line.

    >>> import torch
    >>> class Memory(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.keys, self.values = nn.Linear(4, 16), nn.Linear(16, 4, bias=False)
    ...     def forward(self, x):
    ...         return self.values(self.keys(x).softmax(-1))
    >>> purity(Memory(), torch.zeros(2, 4)).attention
    1
    >>> purity(nn.ReLU(), torch.zeros(2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    attnforge.errors.PurityError: ReLU is not attention-only: 1 operation beyond affine maps and softmax attention
      relu: an activation function; only softmax may be nonlinear
          torch/nn/modules/activation.py:...
    """
    census, found = examine(net, example)
    if found:
        raise refusal(type(net).__name__, found)
    return census


def offences(net: nn.Module, example: Example = None) -> tuple[Offence, ...]:
    """What `purity` would raise for, in the order of the computation; empty for an attention-only network."""
    return examine(net, example)[1]


def examine(net: nn.Module, example: object = None) -> tuple[Census, tuple[Offence, ...]]:
    """The census of the allowed operations, and the offences; raises only where a network cannot be exported."""
    from .graph import capture  # torch.export is loaded only when a network is examined
    from .walk import Walk

    walk = Walk(capture(net, example))
    return walk.census, tuple(walk.offences)
