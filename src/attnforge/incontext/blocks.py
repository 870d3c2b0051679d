"""One step of gradient descent as a block of attention layers, frozen: the data and the step size are in the prompt.

A block is ordinary `AttentionLayer`s over one sequence of tokens: K state tokens, data tokens, penalty tokens.

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
dtype: not on data, not even on their number. The tokens of a sequence all have the same width (`Channels`):

    x d | y K | one | data | pen | r K | v d | p d | a d | t d (soft threshold only) | id K | q 1, m 1 (Huber only)

State token k carries the weights: p (where the next gradient is taken), a (the last ones), t (its thresholds), and id =
e_k. Data tokens carry x, the label y, the value v and data = 1; they write what they predict into r. Penalty tokens
have pen = 1, x = sqrt(lambda_j)/4 e_j and v = 4 (step size) sqrt(lambda_j) e_j. `one` is 1 on every token. q is a data
token's sample weight, m the mean square that the state reads off the residuals. Masks are written into positions: keys
that a head must not see carry -OMEGA on top of their logit, which makes their weight an exact 0 (B6).

`Block` as a map of sequences costs n^2 logits a head, and all but n of them belong to masked pairs, whose weights are
exact zeros. `Lean` reads the block's own tables and evaluates the rest, data tokens against state tokens and never data
against data: the cost of a step is linear in n, and so is its memory. Products are taken through the few state tokens
first, (Z W_Q) K^T = Z (W_Q K^T), and over the channels that a table reads.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.anchor.head import AnchorHead
from ..network import AttentionLayer, AttentionOnly, Heads
from .extrapolation import EVEN_SINK, LOG_SINK, built, evens, levels, pairs
from .losses import EDGE, Loss, named

Kind = Literal["plain", "heavy ball", "nesterov"]
BLOCKS = 256  # frozen blocks that are kept: more than the classes of condition numbers times the losses in use at once
# Added to masked keys: beyond the range of exp, below the range where the rounding of logits would show.
OMEGA = {torch.float64: 2.0**11, torch.float32: 2.0**8}
SHARPNESS = {torch.float64: 2.0**52, torch.float32: 2.0**24}  # of gates for numbers of size 1: 0.28/beta below rounding


class NamedChannels(ABC):
    """Tokens whose channels are parts with names, one after the other."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """The parts in their order, and how many channels each has."""

    def part(self, name: str) -> slice:
        """The channels of a part."""
        begin = 0
        for key, size in self.sizes().items():
            if key == name:
                return slice(begin, begin + size)
            begin += size
        raise ArgumentError(f"tokens have no part {name!r}; they have {', '.join(self.sizes())}")

    def at(self, name: str) -> list[int]:
        """The channels of a part, one by one."""
        part = self.part(name)
        return list(range(part.start, part.stop))

    @property
    def width(self) -> int:
        """The number of channels."""
        return sum(self.sizes().values())

    def skip(self, changes: dict[tuple[str, str], float], dtype: torch.dtype) -> Tensor:
        """The identity but for some blocks: {(from, to): factor}; parts that are written to forget what they held."""
        S = np.eye(self.width)
        for _, to in changes:
            S[:, self.part(to)] = 0.0
        for (source, to), factor in changes.items():
            S[self.at(source), self.at(to)] = factor
        return torch.from_numpy(S).to(dtype)


@dataclass(frozen=True)
class Channels(NamedChannels):
    """The parts of a token for d columns and K state tokens.

    >>> Channels(3).width, Channels(3).part("v")
    (18, slice(8, 11, None))
    """

    d: int
    classes: int = 1
    shrink: bool = False
    robust: bool = False

    def __post_init__(self) -> None:
        if self.d < 1 or self.classes < 1:
            raise ArgumentError(f"tokens need at least one column and one output, got {self.d} and {self.classes}")

    def sizes(self) -> dict[str, int]:
        d, k = self.d, self.classes
        return {"x": d, "y": k, "one": 1, "data": 1, "pen": 1, "r": k, "v": d, "p": d, "a": d,
                **({"t": d} if self.shrink else {}), "id": k,
                **({"q": 1, "m": 1} if self.robust else {})}  # fmt: skip

    def state(self, w: Tensor, threshold: Tensor | None = None) -> Tensor:
        """State tokens at rest at w (..., K, d)."""
        Z = w.new_zeros(*w.shape[:-1], self.width)
        Z[..., self.part("p")] = w
        Z[..., self.part("a")] = w
        if threshold is not None:
            Z[..., self.part("t")] = threshold
        Z[..., self.part("id")] = torch.eye(self.classes, dtype=w.dtype, device=w.device)
        Z[..., self.part("one")] = 1.0
        return Z

    def data(self, x: Tensor, v: Tensor, y: Tensor, kind: str = "data") -> Tensor:
        """Data tokens (or penalty tokens: kind "pen") from x and v (..., n, d) and y (..., n, K)."""
        Z = x.new_zeros(*x.shape[:-1], self.width)
        Z[..., self.part("x")], Z[..., self.part("v")], Z[..., self.part("y")] = x, v, y
        Z[..., self.part(kind)] = Z[..., self.part("one")] = 1.0
        return Z

    def sequence(self, state: Tensor, *tokens: Tensor | None) -> Tensor:
        """One sequence: the state first, then everything else."""
        return torch.cat((state, *(each for each in tokens if each is not None)), dim=-2)


def heads(scope: str, purpose: str, dtype: torch.dtype, **tables: np.ndarray) -> Heads:
    """A group of heads from arrays."""
    made = {name: torch.from_numpy(np.ascontiguousarray(table)).to(dtype) for name, table in tables.items()}
    return Heads(scope, purpose=purpose, **made)  # type: ignore[arg-type]


def prediction(loss: Loss, at: Channels, dtype: torch.dtype) -> Heads:
    """Tokens read the state into r: w.x by hot pairs (C2), its sigmoid (F1), softmax, exponential; Huber: w.x - y."""
    d, k, c, omega = at.d, at.classes, at.width, OMEGA[dtype]
    if loss.joint:
        return _softmax(at, dtype)
    scales: tuple[float, ...] = (1.0,)
    up, down, sink = [1.0], [0.0], 0.0
    if loss.heavy:
        up, sink = [math.exp(LOG_SINK[dtype])], LOG_SINK[dtype]
    elif loss.hot:
        table = pairs(dtype)
        scales, up, down = table.scales, [2 * w for w in table.weights], [-2 * w for w in table.weights]
    count = len(scales) * k
    W_Q, W_K, b_K = np.zeros((count, c, d + 2)), np.zeros((count, c, d + 2)), np.zeros((count, d + 2))
    M_K, b_V, M_V, W_O = (np.zeros(s) for s in ((count, 1, d + 2), (count, 1), (count, 1, 1), (count, 1, c)))
    for head in range(count):
        state, level = divmod(head, len(scales))
        own = at.at("id")[state]
        W_Q[head, at.at("x"), range(d)] = 1.0
        W_K[head, at.at("p"), range(d)] = scales[level]
        if loss.clipped:  # the residual itself is the logit: what is clipped need not be read accurately
            W_Q[head, at.at("y")[state], d] = 1.0
            W_K[head, own, d] = -scales[level]
        W_Q[head, at.at("one"), d + 1] = 1.0
        W_K[head, own, d + 1], b_K[head, d + 1] = omega, -omega  # every token but this state token is masked
        M_K[head, 0, d + 1] = sink
        b_V[head, 0], M_V[head, 0, 0] = up[level], down[level]
        W_O[head, 0, at.at("r")[state]] = 1.0
    return heads("tokens", "prediction", dtype, W_Q=W_Q, W_K=W_K, b_K=b_K, b_V=b_V, M_K=M_K, M_V=M_V, W_O=W_O)


def _softmax(at: Channels, dtype: torch.dtype) -> Heads:
    """One head over all state tokens, values e_k: the softmax of all w_k.x."""
    d, k, c, omega = at.d, at.classes, at.width, OMEGA[dtype]
    W_Q, W_K, b_K = np.zeros((1, c, d + 1)), np.zeros((1, c, d + 1)), np.zeros((1, d + 1))
    W_V, W_O = np.zeros((1, c, k)), np.zeros((1, k, c))
    W_Q[0, at.at("x"), range(d)] = W_K[0, at.at("p"), range(d)] = 1.0
    W_Q[0, at.at("one"), d] = 1.0
    W_K[0, at.at("id"), d], b_K[0, d] = omega, -omega
    W_V[0, at.at("id"), range(k)] = W_O[0, range(k), at.at("r")] = 1.0
    return heads("tokens", "prediction", dtype, W_Q=W_Q, W_K=W_K, b_K=b_K, W_V=W_V, W_O=W_O)


def aggregation(at: Channels, dtype: torch.dtype, to: dict[str, float], *, keyed: str, native: bool) -> Heads:
    """The state sums over data or penalty tokens (`keyed`) by hot heads against a heavy sink (F2).

    `native`: the logit is p.x - y itself, an inner product of the state with the token; otherwise it is the token's r.
    """
    d, k, c, omega = at.d, at.classes, at.width, OMEGA[dtype]
    table, mass = levels(dtype), math.exp(LOG_SINK[dtype])
    scales = [sign * s for sign in (1, -1) for s in table.scales]
    values = [sign * w * mass / 2 for sign in (1, -1) for w in table.weights]
    inner, count = d + k, len(scales)
    W_Q, W_K, b_K = np.zeros((count, c, inner + 2)), np.zeros((1, c, inner + 2)), np.zeros((1, inner + 2))
    W_V, M_K, M_V = np.zeros((1, c, d)), np.zeros((1, 1, inner + 2)), np.zeros((1, 1, d))
    W_O = np.zeros((count, d, c))
    if native:
        W_K[0, at.at("x"), range(d)] = 1.0
        W_K[0, at.at("y"), range(d, inner)] = -1.0
    else:
        W_K[0, at.at("r"), range(d, inner)] = 1.0
    W_K[0, at.at(keyed), inner], b_K[0, inner] = omega, -omega  # all other tokens are masked as keys
    b_K[0, inner + 1] = -omega  # tokens that are not states see the sink only
    M_K[0, 0, inner] = LOG_SINK[dtype]
    W_V[0, at.at("v"), range(d)] = 1.0
    for head, scale in enumerate(scales):
        if native:
            W_Q[head, at.at("p"), range(d)] = scale
        W_Q[head, at.at("id"), range(d, inner)] = scale
        W_Q[head, at.at("one"), inner] = 1.0
        W_Q[head, [*at.at("data"), *at.at("pen")], inner + 1] = 1.0
        for part, factor in to.items():
            W_O[head, range(d), at.at(part)] = factor * values[head]
    purpose = "aggregation" if keyed == "data" else "penalty"
    return heads("tokens", purpose, dtype, W_Q=W_Q, W_K=W_K, b_K=b_K, W_V=W_V, M_K=M_K, M_V=M_V, W_O=W_O)


def mean_square(at: Channels, dtype: torch.dtype) -> Heads:
    """The state reads m = sum_i q_i r_i^2: the even part of the heads of F2.

    sum_j c_j (cosh(s_j r) - 1) = r^2, and the 1 is a head of scale 0, which has the same bias in M as the others.
    """
    c, omega, table, mass = at.width, OMEGA[dtype], evens(dtype), math.exp(EVEN_SINK[dtype])
    scales = [*table.scales, *(-s for s in table.scales), 0.0]
    values = [*(w / 2 for w in table.weights), *(w / 2 for w in table.weights), -math.fsum(table.weights)]
    count = len(scales)
    W_Q, W_K, b_K = np.zeros((count, c, 3)), np.zeros((1, c, 3)), np.array([[0.0, -omega, -omega]])
    W_V, M_K, M_V, W_O = (np.zeros(s) for s in ((1, c, 1), (1, 1, 3), (1, 1, 1), (count, 1, c)))
    W_K[0, at.at("r"), 0], W_K[0, at.at("data"), 1] = 1.0, omega
    M_K[0, 0, 1] = EVEN_SINK[dtype]
    W_V[0, at.at("q"), 0] = 1.0
    for head, scale in enumerate(scales):
        W_Q[head, at.at("id"), 0], W_Q[head, at.at("one"), 1] = scale, 1.0
        W_Q[head, [*at.at("data"), *at.at("pen")], 2] = 1.0
        W_O[head, 0, at.at("m")] = values[head] * mass
    return heads("tokens", "mean square", dtype, W_Q=W_Q, W_K=W_K, b_K=b_K, W_V=W_V, M_K=M_K, M_V=M_V, W_O=W_O)


def ramp(at: Channels, dtype: torch.dtype) -> AttentionLayer:
    """r <- clip(r, -EDGE, EDGE): slots of logits (beta(-t-r), 0, beta(r-t)) and values (-t, r, t) (B2)."""
    c, beta = at.width, SHARPNESS[dtype] / EDGE
    W_Q, b_Q, W_V, W_O = np.zeros((1, c, 2)), np.array([[0.0, 1.0]]), np.zeros((1, c, 1)), np.zeros((1, 1, c))
    W_Q[0, at.at("r"), 0] = W_V[0, at.at("r"), 0] = W_O[0, 0, at.at("r")] = 1.0
    M_K = np.array([[[-beta, -beta * EDGE], [beta, -beta * EDGE]]])
    M_V = np.array([[[-EDGE], [EDGE]]])
    group = heads("self", "ramp", dtype, W_Q=W_Q, b_Q=b_Q, b_K=np.zeros((1, 2)), W_V=W_V, M_K=M_K, M_V=M_V, W_O=W_O)
    return AttentionLayer([group], S=at.skip({("r", "r"): 0.0}, dtype))


def anchored(at: Channels, derivative: AnchorHead, dtype: torch.dtype) -> AttentionLayer:
    """r <- f(r) by the anchors of a fitted head (A3), its chord through the skip: general C^1 losses."""
    c, table = at.width, derivative.group
    W_Q, W_O = np.zeros((1, c, 2)), np.zeros((1, 1, c))
    W_Q[0, at.at("r"), 0] = W_O[0, 0, at.at("r")] = 1.0
    group = Heads("memory", W_Q=torch.from_numpy(W_Q).to(dtype), b_Q=table.b_Q, M_K=table.M_K, M_V=table.M_V,
                  W_O=torch.from_numpy(W_O).to(dtype), purpose="derivative")  # fmt: skip
    chord = derivative.layer.S
    S = at.skip({("r", "r"): 0.0 if chord is None else float(chord)}, dtype)
    s = torch.zeros(c, dtype=dtype)
    if derivative.layer.s is not None:
        s[at.part("r")] = derivative.layer.s.detach()
    return AttentionLayer([group], S=S, s=s)


def soft_threshold(at: Channels, beta: float, dtype: torch.dtype) -> AttentionLayer:
    """u = p becomes sign(u) max(|u| - t, 0), two gates a coordinate (B1); a takes it, p is extrapolated from it."""
    d, c = at.d, at.width
    W_Q, W_O = np.zeros((2 * d, c, 1)), np.zeros((2 * d, 1, c))
    for j, (p, a, t) in enumerate(zip(at.at("p"), at.at("a"), at.at("t"), strict=True)):
        for sign, head in ((1.0, 2 * j), (-1.0, 2 * j + 1)):
            W_Q[head, p, 0], W_Q[head, t, 0] = sign, -1.0
            W_O[head, 0, p], W_O[head, 0, a] = sign * (1 + beta), sign
    group = heads("self", "soft threshold", dtype, W_Q=W_Q, b_K=np.full((1, 1), SHARPNESS[dtype]), W_V=W_Q,
                  M_K=np.zeros((1, 1, 1)), M_V=np.zeros((1, 1, 1)), W_O=W_O)  # fmt: skip
    return AttentionLayer([group], S=at.skip({("a", "p"): -beta, ("a", "a"): 0.0}, dtype))


class LinearRead(nn.Module):
    """w.x for every key w (..., K, d) and query x (..., n, d): heads {key: s_j w.x, sink: 0}, values {c_j, -c_j}.

    Meant for |w.x| <= 1, saturating far beyond.

    >>> w, x = torch.tensor([[0.5, -0.25]]).double(), torch.tensor([[1.0, 1.0], [0.5, 1.0]]).double()
    >>> LinearRead(torch.float64)(w, x).sub(x @ w.mT).abs().max().item() < 1e-13
    True
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        table = pairs(dtype)
        self.scales = nn.Parameter(torch.tensor(table.scales, dtype=dtype).unsqueeze(-1))
        # tanh(s z/2) = z s/2 - ...: the weights of sinh, twice.
        self.values = nn.Parameter(2 * torch.tensor(table.weights, dtype=dtype).unsqueeze(-1))
        self.register_buffer("sink", torch.zeros((), dtype=dtype))

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        keys = w.unsqueeze(-2) * self.scales  # (..., K, head, d)
        logits = x @ keys.flatten(-3, -2).transpose(-2, -1)  # (..., n, K head)
        weights = torch.stack((logits, self.get_buffer("sink").expand(logits.shape))).softmax(0)
        read = (weights[0] - weights[1]).unflatten(-1, keys.shape[-3:-1])  # (..., n, K, head)
        return (read @ self.values).squeeze(-1)


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

    `loss` is a loss or its name; "anchors" needs `derivative`, a fitted head for its derivative. `Lean` evaluates the
    same tables without the pairs of tokens whose weights the masks make exact zeros.
    """

    def __init__(
        self,
        loss: Loss | str,
        d: int,
        momentum: Momentum,
        *,
        classes: int = 1,
        dtype: torch.dtype = torch.float64,
        shrink: bool = False,
        derivative: AnchorHead | None = None,
    ):
        super().__init__()
        loss = named(loss)
        if shrink and momentum.kind == "heavy ball":
            raise ArgumentError("a soft threshold goes with momentum 'plain' or 'nesterov'")
        if loss.fitted != (derivative is not None):
            raise ArgumentError("loss='anchors' and derivative=... go together: the head is the loss's derivative")
        if classes > 1 and not loss.classes:
            raise ArgumentError(f"several state tokens are for logistic losses; put {loss.name!r} targets into a batch")
        self.loss, self.momentum, self.channels = loss, momentum, Channels(d, classes, shrink, loss.clipped)
        self._weights = self.channels.part("p" if momentum.kind == "heavy ball" else "a")
        self.body = AttentionOnly(_layers(self, built(dtype), derivative))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    def forward(self, Z: Tensor) -> Tensor:
        """The sequence after one step."""
        return self.body(Z)  # type: ignore[no-any-return]

    def weights_of(self, state: Tensor) -> Tensor:
        """The weights w that state tokens, or a sequence that begins with them, stand for: (..., K, d)."""
        return state[..., : self.channels.classes, self._weights]

    def example_input(self) -> Tensor:
        """A sequence of the right form, for `purity`."""
        at, generator = self.channels, torch.Generator().manual_seed(0)
        sizes = ((at.classes, at.d), (5, at.d), (5, at.d), (5, at.classes), (2, at.d), (2, at.d), (1, at.d))
        w, x, v, y, px, pv, t = (0.1 * torch.rand(s, generator=generator).to(self.dtype) for s in sizes)
        penalties = at.data(px, pv, px.new_zeros(2, at.classes), "data" if self.loss.quadratic else "pen")
        data = at.data(x, v, y)
        if at.robust:
            data[..., at.part("q")] = 1 / len(data)
        return at.sequence(at.state(w, t if at.shrink else None), data, penalties)


def _layers(block: Block, dtype: torch.dtype, derivative: AnchorHead | None) -> list[AttentionLayer]:
    loss, at, beta = block.loss, block.channels, block.momentum.beta
    read = prediction(loss, at, dtype)
    label = {("r", "r"): 0.0} if loss.clipped else {("y", "r"): -1.0}
    to, step = {"p": -1.0}, {("p", "p"): 1 + beta, ("a", "p"): -beta, ("p", "a"): 1.0}
    if at.shrink:
        step = {}  # the last layer takes it
    elif block.momentum.kind != "heavy ball":
        to = {"p": -1 - beta, "a": -1.0}
    layers = []
    if loss.quadratic:
        gather = aggregation(at, dtype, to, keyed="data", native=True)
        layers.append(AttentionLayer([read, gather], S=at.skip(label | step, dtype)))
    else:
        layers.append(AttentionLayer([read], S=at.skip(label, dtype)))
        if loss.clipped:
            layers.append(ramp(at, dtype))
        if derivative is not None:
            layers.append(anchored(at, derivative, dtype))
        groups = [aggregation(at, dtype, to, keyed=k, native=k == "pen") for k in ("data", "pen")]
        if at.robust:  # the scale of the residuals, read beside the step
            groups.append(mean_square(at, dtype))
            step = step | {("m", "m"): 0.0}
        layers.append(AttentionLayer(groups, S=at.skip(step, dtype)))
    if at.shrink:
        layers.append(soft_threshold(at, beta, dtype))
    return layers


def frozen(
    loss: Loss | str,
    kind: Kind,
    doublings: int,
    d: int,
    classes: int = 1,
    dtype: torch.dtype = torch.float64,
    shrink: bool = False,
) -> Block:
    """The block for condition numbers up to 2**doublings; the same object for everyone who asks."""
    return _frozen(named(loss), kind, doublings, d, classes, dtype, shrink)


@functools.lru_cache(maxsize=BLOCKS)
def _frozen(loss: Loss, kind: Kind, doublings: int, d: int, classes: int, dtype: torch.dtype, shrink: bool) -> Block:
    block = Block(loss, d, Momentum.optimal(kind, 2.0**doublings), classes=classes, dtype=dtype, shrink=shrink)
    return block.eval().requires_grad_(False)


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


def _alike(tables: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (head, ...) as sums of few: factors (head, few) and selections (few, ...) of zeros and ones.

    Heads of one group differ by a factor, their scale or their weight, in the same places.
    """
    flat = tables.flatten(1)
    used = flat.any(0).nonzero().flatten()
    found, places = torch.unique(flat[:, used].mT, dim=0, return_inverse=True)
    selections = flat.new_zeros(len(found), flat.shape[1])
    selections[places, used] = 1.0
    return found.mT.contiguous(), selections.unflatten(-1, tables.shape[1:])


class FewAskMany:
    """Heads whose queries are state tokens and whose keys are data tokens and memory; all heads share their keys.

    What heads have in common is evaluated once: queries are the same numbers times a scale, and what they read goes to
    the same channels times a weight (`_alike`), so that heads are added up before values are.
    """

    def __init__(self, group: Heads, constant: bool):
        self.group, self.seen, self.constant = group, _support(group.W_V), constant
        self.values = group.W_V[:, self.seen] @ group.W_O  # (head, channel, out)
        # the coordinates in which keys differ from 0, and the channels they are made of
        self.inner = _support(torch.cat((group.W_K, group.b_K.unsqueeze(-2), group.M_K), -2).mT)
        self.reads = _support(group.W_K)
        self.W_K, self.b_K = group.W_K[0, self.reads, self.inner], group.b_K[0, self.inner]
        self.M_K = group.M_K[0, :, self.inner]
        self.scales, asked = _alike(group.W_Q[..., self.inner])  # (head, few), (few, channel, coordinate)
        self.few, self.asked = len(asked), asked.transpose(0, 1).flatten(1)
        self.gains, told = _alike(self.values)  # (head, few), (few, channel, out)
        self.gains, self.told = self.gains.mT.contiguous(), told.flatten(0, 1)
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def read(self, many: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, a column each, and values. Keys come first, as in the block itself: there a mask that does not apply is
        an exact 0."""
        if self._kept is not None and self._kept[0] is many:
            return self._kept[1], self._kept[2]
        keys = many[..., self.reads] @ self.W_K + self.b_K
        columns, values = torch.cat((keys, self.M_K.expand(*keys.shape[:-2], -1, -1)), -2).mT, many[..., self.seen]
        if self.constant:  # what it reads of the tokens never changes
            self._kept = many, columns, values
        return columns, values

    def weights(self, few: Tensor, many: Tensor) -> Tensor:
        """(..., K, head, slot): data tokens first."""
        return self._weights(few @ self.asked, self.read(many)[0])

    def _weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        states = queries.shape[:-1]
        q = queries.view(*states[:-1], states[-1] * self.few, -1)
        logits = (q @ keys).view(*states, self.few, -1)
        return torch.matmul(self.scales, logits).softmax(-1)

    def __call__(self, few: Tensor, many: Tensor) -> Tensor:
        """The sum over heads; memory values are zeros."""
        (keys, values), queries = self.read(many), few @ self.asked
        if few.shape[:-1] == (1,):  # one sequence, one state: matrices as they are
            weights = (self.scales @ (queries.view(self.few, -1) @ keys)).softmax(-1)
            return ((self.gains @ weights)[:, :-1] @ values).view(1, -1) @ self.told
        weights = self._weights(queries, keys)
        sums = torch.matmul(self.gains, weights)  # (..., K, few, slot)
        read = sums.flatten(-3, -2)[..., :-1] @ values
        return read.view(*few.shape[:-1], -1) @ self.told


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
        self.gather = FewAskMany(groups["aggregation"][0], constant=block.loss.quadratic)
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
        if not self.block.loss.quadratic:
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
