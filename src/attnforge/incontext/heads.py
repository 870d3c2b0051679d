"""The groups of heads that a block is made of, as tables over the channels of its tokens.

State, data and penalty tokens of one sequence all have the same width (`Channels`):

    x d | y K | one | data | pen | r K | v d | p d | a d | t d (soft threshold only) | id K | q 1, m 1 (Huber only)

State token k carries the weights: p (where the next gradient is taken), a (the last ones), t (its thresholds), and id =
e_k. Data tokens carry x, the label y, the value v = (step size)(sample weight) x and data = 1; they write what they
predict into r. Penalty tokens have pen = 1, x = sqrt(lambda_j)/4 e_j and v = 4 (step size) sqrt(lambda_j) e_j. `one` is
1 on every token. q is a data token's sample weight, m the mean square that the state reads off the residuals.

Masks are written into positions: keys that a head must not see carry -OMEGA on top of their logit, which makes their
weight an exact 0 (B6). `LinearRead` is an inner product by hot heads on its own, for prompts with more than one matrix
of keys (C2).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.anchor.head import AnchorHead
from ..network import AttentionLayer, Heads
from .extrapolation import EVEN_SINK, LOG_SINK, evens, levels, pairs
from .losses import EDGE, Loss

# Added to masked keys: beyond the range of exp, below the range where the rounding of logits would show.
OMEGA = {torch.float64: 2.0**11, torch.float32: 2.0**8}
SHARPNESS = {torch.float64: 2.0**52, torch.float32: 2.0**24}  # of gates for numbers of size 1: 0.28/beta below rounding


class Tokens(ABC):
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
class Channels(Tokens):
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
