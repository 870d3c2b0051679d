"""The layers of a theorem's network, as a plain transformer has them: nothing is copied or changed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedOperation
from ...network import AttentionLayer, Heads
from ...theorems.partition import Cross, MaxAffine
from ...theorems.ramps import Ramp
from ...theorems.result import Construction
from ...theorems.slots import Registers
from ...theorems.universal import SoftmaxReadOut, Universal
from .source import Source, layers_of, sequence_source


def theorem_source(net: Construction, tokens: int | None) -> Source:
    """The layers of a construction; `UnsupportedOperation` for what has no token-wise form."""
    if net.form != "tokens":
        other = "a box of tokens, Box.cube(lo, hi, shape=d)" if isinstance(net, MaxAffine) else "form='tokens'"
        raise UnsupportedOperation(
            f"{net.theorem}: the paper's form mixes tokens by linear maps, which no transformer has; build it with "
            f"{other}, where all maps are token-wise, and export that"
        )
    lead: AttentionLayer | None = None
    constants: Tensor | None = None
    causal = False
    if isinstance(net, Ramp):
        lead, second = net.layers()
        causal, layers = net.causal, [_in_memory(second)]
    elif isinstance(net, MaxAffine):
        if isinstance(net.layer, Cross):
            raise UnsupportedOperation(
                "cross-attention reads its keys from a second sequence, which a plain transformer does not have; "
                "build it with attention='self'"
            )
        causal, layers = net.causal, [_in_memory(net.layer)]
        if net.tokens:  # sequences: gathered into every token first
            constants, layers = net.positions.detach(), [net.gather, *layers]
    elif isinstance(net, Universal):
        inner, constants = net.net, net.net.positions.detach()
        layers = [inner.gather, inner.first, selection(inner.select)]
    else:
        raise UnsupportedOperation(f"{type(net).__name__} has no token-wise form that could be exported")
    shape = net.box.shape
    fixed = len(shape) == 2
    wanted = shape[0] if fixed else int(net.points(1).shape[-2])
    if fixed and tokens not in (None, wanted):
        raise ArgumentError(f"this construction is for sequences of {wanted} tokens, not {tokens}: leave tokens out")
    count = wanted if tokens is None else tokens
    wide = net.box.outward(net.dtype)
    low, high = (np.broadcast_to(x.numpy(), (count, shape[-1])).copy() for x in (wide.lower, wide.upper))
    return sequence_source(
        layers_of(layers), net.box, low, high,
        output_shape=None,
        lead=lead,
        lead_names=("w.x + t",) if lead is not None else (),
        constants=constants,
        constant_names=tuple(f"position {i}" for i in range(0 if constants is None else len(constants))),
        fixed=fixed,
        causal=causal,
    )


def _in_memory(layer: AttentionLayer | Registers) -> AttentionLayer:
    """Anchors that are tokens already, as memory slots again: `to_plain` makes registers of them."""
    if isinstance(layer, AttentionLayer):
        return layer
    return AttentionLayer([Heads("memory", purpose=layer.heads.purpose, **layer.tables()._asdict())])


def selection(select: AttentionLayer | SoftmaxReadOut) -> AttentionLayer:
    """The last layer of a universal network; a softmax over channels is a head whose keys are the columns."""
    if isinstance(select, AttentionLayer):
        return select
    logits, read = select.logits.detach(), select.read.detach()
    eye = torch.eye(len(logits), dtype=logits.dtype).unsqueeze(0)
    out = torch.eye(read.shape[-1], dtype=read.dtype).unsqueeze(0)
    group = Heads("memory", W_Q=eye, M_K=logits.T.unsqueeze(0), M_V=read.unsqueeze(0), W_O=out, purpose="selection")
    return AttentionLayer([group])
