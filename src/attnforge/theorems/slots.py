"""Constant slots of a layer: as memory, or, for a transformer that has none, as tokens that come first.

Under a causal mask channels of the sequence are x, a mark of data, and, for registers only, the keys and values of the
slots, head after head. Data tokens get the logit -Omega, whose exponential is an exact 0, also for themselves: every
data token sees all registers, and no data token is a key of another. An allowed logit gains Omega times an exact 0, so
that rounding, and with it every certificate, is that of the memory slots.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..errors import CertificateError
from ..network import AttentionLayer, AttentionOnly, Heads


class SlotTables(NamedTuple):
    """A group of heads over constant slots, as stored: one leading entry per head, or 1 where heads share a table."""

    W_Q: Tensor
    b_Q: Tensor
    M_K: Tensor
    M_V: Tensor
    W_O: Tensor


class Registers(nn.Module):
    """The heads of a group of scope "memory", with its slots as the first tokens of the sequence.

    >>> one, table = torch.tensor([[[1.0]]]), torch.tensor([[[1.0], [0.0]]])
    >>> group = Heads("memory", W_Q=one, b_Q=torch.zeros(1, 1), M_K=table, M_V=table, W_O=one)
    >>> y = torch.tensor([[0.3], [-2.0]])
    >>> torch.allclose(Registers(group)(y), group(y))
    True
    """

    # far below every logit that a finite bound allows (those are below 1/u), and far from overflow
    OMEGA: ClassVar[dict[torch.dtype, float]] = {torch.float32: 2.0**40, torch.float64: 2.0**60}

    def __init__(self, group: Heads):
        super().__init__()
        tables = SlotTables(*(getattr(group, name).detach() for name in SlotTables._fields))
        dtype, (heads, d, inner) = tables.W_Q.dtype, tables.W_Q.shape
        (keys, slots, _), (values, _, width) = tables.M_K.shape, tables.M_V.shape
        self.d, self.slots, self.widths = d, slots, (keys, inner, values, width)
        rest = keys * inner + values * width
        first = [tables.M_K.transpose(0, 1).flatten(1), tables.M_V.transpose(0, 1).flatten(1)]
        self.first = nn.Parameter(torch.cat([torch.zeros(slots, d + 1, dtype=dtype), *first], 1))
        self.mark = nn.Parameter(torch.eye(1, 1 + rest, dtype=dtype)[0])
        query = torch.zeros(heads, d + 1 + rest, inner + 1, dtype=dtype)
        query[:, :d, :inner] = tables.W_Q
        key = torch.zeros(keys, d + 1 + rest, inner + 1, dtype=dtype)
        key[:, d, inner] = -self.OMEGA[dtype]
        read = torch.zeros(values, d + 1 + rest, width, dtype=dtype)
        for h in range(keys):
            key[h, d + 1 + h * inner : d + 1 + (h + 1) * inner, :inner] = torch.eye(inner, dtype=dtype)
        for h in range(values):
            start = d + 1 + keys * inner + h * width
            read[h, start : start + width] = torch.eye(width, dtype=dtype)
        bias = torch.cat([tables.b_Q, torch.ones(tables.b_Q.shape[0], 1, dtype=dtype)], -1)
        self.heads = Heads(
            "tokens", W_Q=query, b_Q=bias, W_K=key, W_V=read, W_O=tables.W_O, causal=True, purpose=group.purpose
        )

    def state(self, X: Tensor) -> Tensor:
        """Registers, then the data with its mark."""
        data = torch.cat([X, self.mark.expand(*X.shape[:-1], -1)], -1)
        return torch.cat([self.first.expand(*X.shape[:-2], *self.first.shape), data], -2)

    def forward(self, X: Tensor) -> Tensor:
        return self.heads(self.state(X))[..., self.slots :, :]

    def weights(self, X: Tensor) -> Tensor:
        """The attention of data tokens to registers, (..., token, head, slot)."""
        return self.heads.weights(self.state(X))[..., self.slots :, :, : self.slots]

    def tables(self) -> SlotTables:
        """The slots as stored; `CertificateError` where other weights do more than tell registers from data."""
        keys, inner, values, width = self.widths
        d, split = self.d, self.d + 1 + keys * inner
        first, query, bias, key, read = (
            x.detach().clone() for x in (self.first, self.heads.W_Q, self.heads.b_Q, self.heads.W_K, self.heads.W_V)
        )
        M_K = first[:, d + 1 : split].unflatten(1, (keys, inner)).transpose(0, 1)
        M_V = first[:, split:].unflatten(1, (values, width)).transpose(0, 1)
        W_Q, W_O = query[:, :d, :inner].clone(), self.heads.W_O.detach()
        ones = [bias[:, inner], self.mark.detach()[:1]]  # what has to be 1, and, after it is taken out, 0
        for table, start, size, heads in ((key[..., :inner], d + 1, inner, keys), (read, split, width, values)):
            for h in range(heads):
                block = table[h, start + h * size : start + (h + 1) * size]
                ones.append(block.diagonal().clone())
                block.fill_diagonal_(0.0)
        query[:, :d, :inner], key[:, d, inner] = 0.0, 0.0
        zeros = (first[:, : d + 1], self.mark.detach()[1:], query, key, read)
        told = all(bool((x == 1).all()) for x in ones) and not any(bool(x.any()) for x in zeros)
        if not told or self.depth() < min(self.OMEGA.values()):
            raise CertificateError("weights that tell registers from data were changed: there is no certificate then")
        return SlotTables(W_Q, bias[:, :inner], M_K, M_V, W_O)

    def depth(self) -> float:
        """Omega, as stored: data tokens as keys have the logit -Omega."""
        return -float(self.heads.W_K.detach()[:, self.d, self.widths[1]].max())


def over_slots(group: Heads, causal: bool) -> AttentionLayer | Registers:
    """The layer of this group: slots in memory, or as registers."""
    return Registers(group) if causal else AttentionLayer([group])


def tables_of(layer: nn.Module) -> SlotTables:
    """What such a layer stores."""
    if isinstance(layer, Registers):
        return layer.tables()
    assert isinstance(layer, AttentionLayer)
    group = layer.heads()[0]
    return SlotTables(*(getattr(group, name).detach() for name in SlotTables._fields))


def read_as_is(layer: nn.Module) -> SlotTables:
    """The same, if the output projection of every head writes its values to the first channels and does no more."""
    tables = tables_of(layer)
    heads, width, channels = tables.W_O.shape
    if not torch.equal(tables.W_O, torch.eye(width, channels, dtype=tables.W_O.dtype).expand(heads, -1, -1)):
        raise CertificateError("W_O must write values to channels as they are; it was changed")
    return tables


def depth_of(layer: nn.Module) -> float:
    """How far below 0 the logits of keys are that must weigh nothing; infinite where there are none."""
    return layer.depth() if isinstance(layer, Registers) else math.inf


def weights_of(layer: nn.Module, X: Tensor) -> Tensor:
    """Its softmax weights, (..., token, head, slot)."""
    if isinstance(layer, Registers):
        return layer.weights(X)
    assert isinstance(layer, AttentionLayer)
    return layer.heads()[0].weights(X)


def stacked(first: AttentionLayer, second: AttentionLayer | Registers) -> AttentionOnly | nn.Sequential:
    """One layer after the other."""
    return nn.Sequential(first, second) if isinstance(second, Registers) else AttentionOnly([first, second])


def parts(net: AttentionOnly | nn.Sequential) -> tuple[AttentionLayer, AttentionLayer | Registers]:
    """The two layers of `stacked`."""
    first, second = net.layers if isinstance(net, AttentionOnly) else net
    return cast(AttentionLayer, first), cast("AttentionLayer | Registers", second)
