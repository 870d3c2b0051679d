"""One step of gradient descent as a block of attention layers, frozen: the data and the step size are in the prompt.

A block is ordinary `AttentionLayer`s over one sequence of tokens (`layout`): K state tokens, data tokens, penalty
tokens.

    layer 1   tokens attend to the state:    r_i = read(w.x_i) - y_i                                  (F1, C2)
    layer 2   (Huber) a ramp on each r_i by a gate of three slots                                     (B2)
              (any other C^1 loss) its derivative by an anchor head                                   (A3)
    layer 3   the state attends to the data: g = sum_i r_i v_i, heavy sink, Richardson                (F2)
              and to the penalty tokens, and takes a step by linear maps: momentum                    (F3)
              (Huber) and reads the mean square of all r_i, which decides the scale                   (F2)
    layer 4   (lasso) soft threshold by two gates per coordinate                                      (B1)

For squared losses w.x_i - y_i is an inner product of the state with token i, so that layers 1 and 3 are one layer: the
state attends to the data with the residual as its logit, and what tokens read is used for predictions only.

With v_i = (step size) (sample weight) x_i the block takes a gradient step, whatever the step size: it is part of the
prompt, and so are penalties and thresholds. Weights depend on the loss, the number of columns, the momentum and the
dtype: not on data, not even on their number.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, closest
from ..heads.anchor import AnchorHead
from ..network import AttentionLayer, AttentionOnly
from .extrapolation import shipped
from .layout import Channels
from .tables import aggregation, anchored, mean_square, prediction, ramp, skip, soft_threshold

Loss = Literal["linear", "logistic", "softmax", "poisson", "huber", "anchors"]
Kind = Literal["plain", "heavy ball", "nesterov"]


@dataclass(frozen=True)
class Momentum:
    """How the new state follows from the old ones: `beta` times the last difference is added.

    Heavy ball: p' = p - g(p) + beta (p - a), a' = p. Nesterov: a' = prox(p - g(p)), p' = a' + beta (a' - a).
    """

    kind: Kind
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ArgumentError(f"momentum is 'plain', 'heavy ball' or 'nesterov', got {self.kind!r}")
        if not 0 <= self.beta < 1:
            raise ArgumentError(f"the momentum's beta must be in [0, 1), got {self.beta!r}")

    @classmethod
    def optimal(cls, kind: Kind, condition: float) -> Momentum:
        """The best constant for a quadratic whose curvatures lie in [1/condition, 1] (after scaling).

        >>> Momentum.optimal("nesterov", 9.0).beta
        0.5
        """
        if not condition >= 1:
            raise ArgumentError(f"a condition number is at least 1, got {condition!r}")
        ratio = (math.sqrt(condition) - 1) / (math.sqrt(condition) + 1)
        return cls(kind, {"plain": 0.0, "heavy ball": ratio * ratio, "nesterov": ratio}[kind])


class Block(nn.Module):
    """One step, as a map of sequences. Frozen: the weights know the loss, d, the momentum and the dtype.

    >>> block = Block("linear", 3, Momentum("plain"))
    >>> len(block.body.layers), block.channels.width
    (1, 18)
    >>> Z = block.example_input()
    >>> block(Z).shape == Z.shape
    True

    `loss="anchors"` needs `derivative`, a fitted head for the loss's derivative. `lean.Lean` evaluates the same tables
    without the pairs of tokens whose weights the masks make exact zeros.
    """

    def __init__(
        self,
        loss: Loss,
        d: int,
        momentum: Momentum,
        *,
        classes: int = 1,
        dtype: torch.dtype = torch.float64,
        shrink: bool = False,
        derivative: AnchorHead | None = None,
    ):
        super().__init__()
        if loss not in get_args(Loss):
            known = get_args(Loss)
            raise ArgumentError(f"unknown loss {loss!r}{closest(str(loss), known)}; known: {', '.join(known)}")
        if shrink and momentum.kind == "heavy ball":
            raise ArgumentError("a soft threshold goes with momentum 'plain' or 'nesterov'")
        if (loss == "anchors") != (derivative is not None):
            raise ArgumentError("loss='anchors' and derivative=... go together: the head is the loss's derivative")
        if classes > 1 and loss not in ("softmax", "logistic"):
            raise ArgumentError(f"several state tokens are for logistic losses; put {loss!r} targets into a batch")
        self.loss, self.momentum, self.channels = loss, momentum, Channels(d, classes, shrink, loss == "huber")
        self.body = AttentionOnly(_layers(self, shipped(dtype), derivative))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    def forward(self, Z: Tensor) -> Tensor:
        """The sequence after one step."""
        return self.body(Z)  # type: ignore[no-any-return]

    def weights_of(self, state: Tensor) -> Tensor:
        """The weights w that state tokens, or a sequence that begins with them, stand for: (..., K, d)."""
        part = self.channels.part("p" if self.momentum.kind == "heavy ball" else "a")
        return state[..., : self.channels.classes, part]

    def example_input(self) -> Tensor:
        """A sequence of the right form, for `purity`."""
        at, generator = self.channels, torch.Generator().manual_seed(0)
        sizes = ((at.classes, at.d), (5, at.d), (5, at.d), (5, at.classes), (2, at.d), (2, at.d), (1, at.d))
        w, x, v, y, px, pv, t = (0.1 * torch.rand(s, generator=generator).to(self.dtype) for s in sizes)
        penalties = at.data(px, pv, px.new_zeros(2, at.classes), "data" if self.loss == "linear" else "pen")
        data = at.data(x, v, y)
        if at.robust:
            data[..., at.part("q")] = 1 / len(data)
        return at.sequence(at.state(w, t if at.shrink else None), data, penalties)


def _layers(block: Block, dtype: torch.dtype, derivative: AnchorHead | None) -> list[AttentionLayer]:
    loss, at, beta = block.loss, block.channels, block.momentum.beta
    table = lambda changes: torch.from_numpy(skip(at, changes)).to(dtype)  # noqa: E731
    read = prediction(loss, at, dtype)
    label = {("r", "r"): 0.0} if loss == "huber" else {("y", "r"): -1.0}
    if at.shrink:
        to, step = {"p": -1.0}, {}
    elif block.momentum.kind == "heavy ball":
        to, step = {"p": -1.0}, {("p", "p"): 1 + beta, ("a", "p"): -beta, ("p", "a"): 1.0}
    else:
        to, step = {"p": -1 - beta, "a": -1.0}, {("p", "p"): 1 + beta, ("a", "p"): -beta, ("p", "a"): 1.0}
    layers = []
    if loss == "linear":
        gather = aggregation(at, dtype, to, keyed="data", native=True)
        layers.append(AttentionLayer([read, gather], S=table(label | step)))
    else:
        layers.append(AttentionLayer([read], S=table(label)))
        if loss == "huber":
            layers.append(ramp(at, dtype))
        if derivative is not None:
            layers.append(anchored(at, derivative, dtype))
        groups = [aggregation(at, dtype, to, keyed=k, native=k == "pen") for k in ("data", "pen")]
        if at.robust:  # the scale of the residuals, read beside the step
            groups.append(mean_square(at, dtype))
            step = step | {("m", "m"): 0.0}
        layers.append(AttentionLayer(groups, S=table(step)))
    if at.shrink:
        layers.append(soft_threshold(at, beta, dtype))
    return layers


@functools.lru_cache(maxsize=256)
def frozen(
    loss: Loss,
    kind: Kind,
    doublings: int,
    d: int,
    classes: int = 1,
    dtype: torch.dtype = torch.float64,
    shrink: bool = False,
) -> Block:
    """The block for condition numbers up to 2**doublings; the same object for everyone who asks."""
    block = Block(loss, d, Momentum.optimal(kind, 2.0**doublings), classes=classes, dtype=dtype, shrink=shrink)
    return block.eval().requires_grad_(False)
