"""One network for every length: functions of a token and of the empirical measure of all tokens (lemma E7).

f(mu, x) is computed for every token x of a sequence, mu being the measure that puts 1/n on each token. Where f is a
function h of finitely many moments and of x, three parts do it, whatever n is: anchor heads for the moments' functions,
one head with equal logits that averages them, and a compiled network for h. `EveryLength` is that network with its
certificate, a function of n through the rounding of a mean alone. `quantised` and `general_keys` are the constants of
the general case.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..arguments import positive, whole
from ..box import Box
from ..certificates.certificate import weights_hash
from ..certificates.rounding import gamma, unit, up
from ..dtypes import dtype_name, shipped
from ..errors import ArgumentError, CertificateError
from ..functions.registry import enclose
from ..heads.anchor.head import AnchorHead
from ..network import AttentionLayer, Heads
from .pipeline import compile

WIDER = 1e-6  # of its range by which h is built for more: what errors of moments need, which are far smaller
LONG = 10_000  # tokens whose mean may round what it can in float32: h is built for that, and more are refused


def quantised(spacing: float, dim: int, kappa: float = 4.0) -> float:
    """E7(a): how far, at most, a measure is in W_1 from its weights on a grid of this spacing, for every length.

    >>> round(quantised(0.1, 1), 4)
    0.0501
    """
    spread = 0.25 + 2 * math.exp(-2 * positive("kappa", kappa))
    if kappa < 0.5 * math.log(3):
        raise ArgumentError(f"kappa must be at least {0.5 * math.log(3):.3f} (lemma E3), got {kappa:g}")
    return float(up(positive("spacing", spacing) * math.sqrt(whole("dim", dim, 1) * spread), 8))


def general_keys(lipschitz: float, eps: float, dim: int = 1, kappa: float = 4.0) -> tuple[int, float]:
    """E7(b): grid points and the logarithm (base 10) of the keys of the third layer, for f on [0, 1]^dim.

    >>> general_keys(1.0, 0.2)[0], general_keys(1.0, 0.2)[1] > 8
    (7, True)
    """
    half, slope = positive("eps", eps) / 2, positive("lipschitz", lipschitz)
    per_side = max(2, math.ceil(slope * quantised(1.0, dim, kappa) / half) + 1)
    points = per_side**dim
    slope = slope * math.sqrt(1 + dim * points / 4)
    spacing = half / (slope * quantised(1.0, points + dim, kappa))
    return points, (points + dim) * math.log10(math.ceil(1 / spacing) + 1)


class EveryLength(nn.Module):
    """h(moments of the sequence, token) for sequences of scalars in [lo, hi] of every length.

    `moments` are names of functions, or heads for them on [lo, hi] (for kinks, those of `theorems.splice`); h is
    a formula in m0, m1, ... (their means) and x (the token).

    >>> net = EveryLength(["identity", "square"], "sin(x - m0)*m1", -1, 1, eps=1e-3)
    >>> net(torch.rand(2, 7, dtype=torch.float64)).shape, net.bound(7) < 4e-3, net.bound(10**5) < 4e-3
    (torch.Size([2, 7]), True, True)
    """

    def __init__(
        self, moments: Sequence[str | AnchorHead], h: str, lo: float, hi: float, eps: float = 1e-4,
        dtype: torch.dtype = torch.float64,
    ):  # fmt: skip
        super().__init__()
        if not moments:
            raise ArgumentError("give at least one moment, such as 'identity'")
        self.lo, self.hi, self.dtype = float(lo), float(hi), shipped(dtype)
        self.moments = [self._head(given, positive("eps", eps) / 8) for given in moments]
        ranges = {}
        for j, head in enumerate(self.moments):
            low, high = enclose(head.function, self.lo, self.hi)
            more = self._room(head)
            ranges[f"m{j}"] = (low - more, high + more)
        self.read = compile(h, Box(**ranges, x=(self.lo, self.hi)), eps=eps, dtype=dtype)
        self.steep = self.read.lipschitz()
        self.first, self.second = self._layers()
        self._weights = weights_hash(self)

    def _head(self, given: str | AnchorHead, eps: float) -> AnchorHead:
        """The head of a moment's function."""
        if not isinstance(given, AnchorHead):
            return AnchorHead.fit(given, self.lo, self.hi, eps=eps, dtype=self.dtype)
        if (given.lo, given.hi, given.dtype) != (self.lo, self.hi, self.dtype) or given.relative:
            wanted = f"{dtype_name(self.dtype)} head on [{self.lo:g}, {self.hi:g}]"
            raise ArgumentError(f"expected a {wanted}, not relative, got {given!r}")
        kept = copy.deepcopy(given)  # its tables are those of now, and so is its bound
        if kept.fast:  # a certificate of another reading than that of the layers made here
            kept.fast = False
        return kept

    @staticmethod
    def _bound(head: AnchorHead) -> float:
        if head.bound is None:
            raise CertificateError(f"nothing is proved about {head.function.name}")
        return head.bound

    def _room(self, head: AnchorHead) -> float:
        """By how much a moment may be off: h is built for that."""
        low, high = enclose(head.function, self.lo, self.hi)
        rounded = float(gamma(LONG + 4, unit(self.dtype))) * (max(abs(low), abs(high)) + self._bound(head))
        return max(WIDER * (high - low), rounded) + 4 * self._bound(head)

    def _layers(self) -> tuple[AttentionLayer, AttentionLayer]:
        """Tokens (x) -> (phi_0(x), ..., x), and the means of all but the last beside it."""
        count, kind = len(self.moments), self.dtype
        skip, bias, groups = torch.zeros(1, count + 1, dtype=kind), torch.zeros(count + 1, dtype=kind), []
        skip[0, count] = 1.0
        for j, head in enumerate(self.moments):
            group, weights = head.group, head.weights_in_float64()
            out = torch.zeros(1, 1, count + 1, dtype=kind)
            out[0, 0, j] = 1.0
            skip[0, j], bias[j] = weights.skip
            tables = {name: getattr(group, name).detach().clone() for name in ("W_Q", "b_Q", "M_K", "M_V")}
            groups.append(Heads("memory", W_O=out, purpose=group.purpose, **tables))
        kept = torch.zeros(count + 1, count + 1, dtype=kind)
        kept[count, count] = 1.0
        every = torch.eye(count + 1, count, dtype=kind).unsqueeze(0)
        mean = Heads(
            "tokens", W_Q=torch.zeros(1, count + 1, 1, dtype=kind), b_K=torch.zeros(1, 1, dtype=kind), W_V=every,
            W_O=torch.eye(count, count + 1, dtype=kind).unsqueeze(0), purpose="mean",
        )  # fmt: skip
        return AttentionLayer(groups, S=skip, s=bias), AttentionLayer([mean], S=kept)

    def forward(self, X: Tensor) -> Tensor:
        """The values for all tokens of sequences (batch, n), which must be numbers of the dtype."""
        tokens, given = X.to(self.dtype), X.double()
        if X.dim() != 2 or not X.numel() or not torch.equal(given.clamp(self.lo, self.hi), tokens.double()):
            raise ArgumentError(
                f"expected sequences (batch, n), n >= 1, of {dtype_name(self.dtype)} numbers in "
                f"[{self.lo:g}, {self.hi:g}]"
            )
        state = self.first(tokens.unsqueeze(-1))
        batch, n, width = state.shape
        return self.read.core(self._averaged(state).reshape(batch * n, width)).reshape(batch, n).detach()

    def _averaged(self, state: Tensor) -> Tensor:
        """The second layer: all its logits are equal, so one row of attention serves every token, in O(n)."""
        weights = torch.softmax(torch.zeros(state.shape[0], 1, state.shape[1], dtype=self.dtype), -1)
        out = state.clone()
        out[..., :-1] = weights @ state[..., :-1]
        return out

    def bound(self, n: int) -> float:
        """E7(c): how far the network can be from h(moments, x), for sequences of n tokens, in the dtype.

        It speaks of the weights as they were built: `CertificateError` once they or their dtype have changed.
        """
        if weights_hash(self) != self._weights:
            raise CertificateError("the certificate is stale: weights have changed since; build the network anew")
        if self.read.bound is None:
            raise CertificateError("nothing is proved about the network for h")
        u, total = unit(self.dtype), 3 * self.read.bound
        for head, slope in zip(self.moments, self.steep.matrix[0], strict=False):
            low, high = enclose(head.function, self.lo, self.hi)
            size = max(abs(low), abs(high)) + self._bound(head)
            off = self._bound(head) + float(gamma(whole("n", n, 1) + 2, u)) * size
            if not off <= self._room(head) * (1 - 2.0**-40):  # ends of the box are rounded themselves
                raise CertificateError(f"the mean of {n} tokens rounds too much in {dtype_name(self.dtype)}")
            total += float(slope) * off
        return float(up(total, 16))
