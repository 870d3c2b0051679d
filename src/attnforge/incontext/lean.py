"""The same tables without what the masks hide: data tokens against state tokens, never data against data.

`Block` as a map of sequences costs n^2 logits a head, and all but n of them belong to masked pairs, whose weights are
exact zeros. `Lean` reads the block's own tables and evaluates the rest: the cost of a step is linear in n, and so is
its memory. Products are taken through the few state tokens first, (Z W_Q) K^T = Z (W_Q K^T), and over the channels
that a table reads.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..network import AttentionLayer, Heads
from .blocks import Block


def _support(table: Tensor) -> slice:
    """The channels that a table (head, channel, coordinate) reads, from the first to the last."""
    used = table.abs().sum((0, 2)).nonzero().flatten()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)


def _project(rows: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """rows W + b for each head: (..., m, channel) -> (..., m, head, coordinate)."""
    heads, channels, width = W.shape
    out = (rows @ W.transpose(0, 1).reshape(channels, heads * width)).unflatten(-1, (heads, width))
    return out if b is None else out + b


class ManyAskFew:
    """Heads whose queries are data tokens and whose keys are state tokens and memory."""

    def __init__(self, group: Heads, to: slice):
        self.group, self.asks = group, _support(group.W_Q)
        self.W_Q, self.W_O = group.W_Q[:, self.asks], group.W_O[..., to]
        self.memory = None if group.M_K is None else self.W_Q @ group.M_K.mT  # (head, channel, slot)
        self.values = None if group.M_V is None else group.M_V @ self.W_O  # (head, slot, out)

    def weights(self, many: Tensor, few: Tensor) -> Tensor:
        """(..., n, head, slot): state tokens first."""
        keys = _project(few, self.group.W_K, self.group.b_K)  # (..., K, head, coordinate)
        asked = self.W_Q @ keys.movedim(-3, -1)  # (..., head, channel, K)
        if self.memory is not None:
            asked = torch.cat((asked, self.memory.expand(*asked.shape[:-1], -1)), -1)
        table = asked.movedim(-3, -2)  # (..., channel, head, slot)
        logits = many[..., self.asks] @ table.flatten(-2)
        return logits.unflatten(-1, table.shape[-2:]).softmax(-1)

    def __call__(self, many: Tensor, few: Tensor) -> Tensor:
        weights = self.weights(many, few)
        if self.group.W_V is None:
            values = self.group.b_V.unsqueeze(-2) @ self.W_O  # the same for every state token
            values = values.expand(-1, few.shape[-2], -1)
        else:
            values = _project(few, self.group.W_V, self.group.b_V).transpose(-3, -2) @ self.W_O
        if self.values is not None:
            values = torch.cat((values, self.values.expand(*values.shape[:-2], -1, -1)), -2)
        return weights.flatten(-2) @ values.flatten(-3, -2)


class FewAskMany:
    """Heads whose queries are state tokens and whose keys are data tokens and memory; all heads share their keys."""

    def __init__(self, group: Heads, constant: bool):
        self.group, self.seen, self.constant = group, _support(group.W_V), constant
        self.values = group.W_V[:, self.seen] @ group.W_O  # (head, channel, out)
        # the coordinates in which keys differ from 0, and the channels they are made of
        self.inner = _support(torch.cat((group.W_K, group.b_K.unsqueeze(-2), group.M_K), -2).mT)
        self.reads = _support(group.W_K)
        self.W_K, self.b_K = group.W_K[0, self.reads, self.inner], group.b_K[0, self.inner]
        self.W_Q, self.M_K = group.W_Q[..., self.inner], group.M_K[0, :, self.inner]
        self._kept: tuple[Tensor, Tensor] | None = None

    def keys(self, many: Tensor) -> Tensor:
        """Keys come first, as in the block itself: there a mask that does not apply is an exact 0."""
        if self._kept is not None and self._kept[0] is many:
            return self._kept[1]
        keys = many[..., self.reads] @ self.W_K + self.b_K
        keys = torch.cat((keys, self.M_K.expand(*keys.shape[:-2], -1, -1)), -2)
        if self.constant:  # what it reads of the tokens never changes
            self._kept = many, keys
        return keys

    def weights(self, few: Tensor, many: Tensor) -> Tensor:
        """(..., K, head, slot): data tokens first."""
        q = _project(few, self.W_Q, None)
        logits = q.flatten(-3, -2) @ self.keys(many).mT
        return logits.softmax(-1).unflatten(-2, q.shape[-3:-1])

    def __call__(self, few: Tensor, many: Tensor) -> Tensor:
        """The sum over heads; memory values are zeros."""
        weights = self.weights(few, many)[..., :-1]
        read = (weights.flatten(-3, -2) @ many[..., self.seen]).unflatten(-2, weights.shape[-3:-1])
        return read.flatten(-2) @ self.values.flatten(0, 1)


class Lean:
    """`lean(state, data, penalties)`: the state after one step. Data tokens keep their r, which is written in place.

    The scale of a robust block, which no step depends on, is left out until `mean_square` asks for it.
    """

    def __init__(self, block: Block):
        self.block, at = block, block.channels
        self.at, self.r = at, at.part("r")
        layers = [cast(AttentionLayer, layer) for layer in block.body.layers]
        groups = {group.purpose: (group, layer) for layer in layers for group in layer.heads()}
        read, first = groups["prediction"]
        self.read = ManyAskFew(read, self.r)
        self.label = first.S[:, self.r] if first.S is not None else None
        between = [layer for layer in layers if layer.heads()[0].purpose in ("ramp", "derivative")]
        self.between = [Scalar(layer, self.r.start) for layer in between]
        self.gather = FewAskMany(groups["aggregation"][0], constant=block.loss == "linear")
        self.penalty = FewAskMany(groups["penalty"][0], constant=True) if "penalty" in groups else None
        self.square = FewAskMany(groups["mean square"][0], constant=False) if "mean square" in groups else None
        assert groups["aggregation"][1].S is not None
        self.step = cast(Tensor, groups["aggregation"][1].S)
        self.last = layers[-1] if block.channels.shrink else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.block.dtype

    def weights_of(self, state: Tensor) -> Tensor:
        """As the block's."""
        return self.block.weights_of(state)

    def predict(self, state: Tensor, data: Tensor) -> Tensor:
        """Layer 1: what each token writes into r, (..., n, K)."""
        assert self.label is not None
        return self.read(data, state) + data @ self.label

    def residuals(self, state: Tensor, data: Tensor) -> Tensor:
        """What each token's r is when the state aggregates, (..., n, K)."""
        r = self.predict(state, data)
        for layer in self.between:
            r = layer(r)
        return r

    def mean_square(self, state: Tensor, data: Tensor) -> Tensor:
        """What the scale heads of a robust block write into the state."""
        assert self.square is not None
        data[..., self.r] = self.residuals(state, data)
        return self.square(state, data)[..., self.at.part("m")]

    def __call__(self, state: Tensor, data: Tensor, penalties: Tensor | None = None) -> Tensor:
        if self.block.loss != "linear":
            data[..., self.r] = self.residuals(state, data)
        out = state @ self.step + self.gather(state, data)
        if penalties is not None:
            assert self.penalty is not None
            out = out + self.penalty(state, penalties)
        return out if self.last is None else cast(Tensor, self.last(out))


class Scalar:
    """A layer that acts on one channel alone, all of its keys constant: r to the sum over its slots, plus its skip."""

    def __init__(self, layer: AttentionLayer, channel: int):
        group = layer.heads()[0]
        keys = group.M_K[0] if group.b_K is None else torch.cat((group.b_K, group.M_K[0]))
        self.slope, self.offset = keys @ group.W_Q[0, channel], keys @ group.b_Q[0]
        out = group.W_O[0, :, channel]
        self.own = None if group.W_V is None else group.W_V[0, channel] @ out
        self.memory = group.M_V[0] @ out
        assert layer.S is not None
        self.skip, self.shift = layer.S[channel, channel], None if layer.s is None else layer.s[channel]

    def __call__(self, r: Tensor) -> Tensor:
        weights = (r.unsqueeze(-1) * self.slope + self.offset).softmax(-1)
        read = weights[..., -len(self.memory) :] @ self.memory + r * self.skip
        if self.own is not None:
            read = read + weights[..., 0] * (r * self.own)
        return read if self.shift is None else read + self.shift
