"""The networks of `universal`: hats, then a selection, in the paper's form (one column) or token-wise (gathered)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CertificateError
from ..network import AttentionLayer, Heads
from .cold import nearest
from .grid import Grid

ROWS = 1 << 22  # entries of a softmax over channels alive at once


class SoftmaxReadOut(nn.Module):
    """softmax over channels of Z W_1, then a linear map: no keys, no tokens, the softmax of the theorem."""

    def __init__(self, logits: Tensor, read: Tensor):
        super().__init__()
        self.logits, self.read = nn.Parameter(logits), nn.Parameter(read)

    def weights(self, Z: Tensor) -> Tensor:
        return torch.softmax(Z @ self.logits, -1)

    def forward(self, Z: Tensor) -> Tensor:
        step = max(1, ROWS // self.logits.shape[-1])
        if torch.compiler.is_compiling() or Z[..., 0].numel() <= step:
            return self.weights(Z) @ self.read
        flat = Z.reshape(-1, Z.shape[-1])
        return torch.cat([self.weights(part) @ self.read for part in flat.split(step)]).reshape(*Z.shape[:-1], -1)


class UniversalNet(nn.Module):
    """(gather,) hats, selection."""

    def __init__(
        self, grid: Grid, values: Tensor, table: tuple[np.ndarray, np.ndarray, np.ndarray], beta: float, form: str,
        second: str, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.grid, self.form, self.second = grid, form, second
        self.tokens, self.width = grid.box.shape
        D, n, hats = len(grid.counts), self.tokens, sum(grid.counts)
        extra = n if form == "tokens" else 0  # channels that carry positions along
        W_Q, b_Q, W_O, constant = _hat_weights(grid, extra, dtype)
        keys, value = torch.from_numpy(np.stack(table[:2], -1)).to(dtype), torch.from_numpy(table[2]).to(dtype)
        group = Heads("memory", W_Q=W_Q, b_Q=b_Q, M_K=keys[None], M_V=value[None, :, None], W_O=W_O, purpose="ramps")
        skip = torch.cat(
            [torch.zeros(D, hats + extra, dtype=dtype), torch.eye(extra, hats + extra, dtype=dtype).roll(hats, 1)]
        )
        self.first = AttentionLayer([group], S=skip if extra else None, s=constant)
        self.omega = 2.0 ** math.ceil(math.log2(2 * beta * D + 1024))
        select = _selection_keys(grid, dtype)  # (grid point, hat)
        out = values.to(dtype)
        if extra:  # one key for every grid point and token
            dead = self.omega * (torch.eye(n, dtype=dtype) - 1)
            select = torch.cat([select.repeat_interleave(n, 0), dead.repeat(grid.size, 1)], 1)
            out = out.reshape(grid.size * n, -1)
            self.positions = nn.Parameter(torch.eye(n, dtype=dtype))
            self.gather = AttentionLayer(
                [gather_heads(n, self.width, self.omega, dtype)], S=carry(n, self.width, D, dtype)
            )
        else:
            out = out.reshape(grid.size, -1)
        scale = torch.cat([torch.full((hats,), beta, dtype=dtype), torch.ones(extra, dtype=dtype)])
        if second == "attention":
            eye = torch.eye(out.shape[-1], dtype=dtype)[None]
            self.select: AttentionLayer | SoftmaxReadOut = AttentionLayer(
                [
                    Heads(
                        "memory",
                        W_Q=torch.diag(scale)[None],
                        M_K=select[None],
                        M_V=out[None],
                        W_O=eye,
                        purpose="selection",
                    )
                ]
            )
        else:
            self.select = SoftmaxReadOut((select * scale).T.contiguous(), out)

    def state(self, X: Tensor) -> Tensor:
        """What layer 1 reads: all coordinates in one column, or in every token with its position."""
        if self.form == "paper":
            return X.flatten(-2).unsqueeze(-2)
        return self.gather(torch.cat([X, self.positions.expand(*X.shape[:-2], -1, -1)], -1))

    def hats(self, X: Tensor) -> Tensor:
        found: Tensor = self.first(self.state(X))
        return found[..., 0, : sum(self.grid.counts)]

    def selection(self, X: Tensor) -> Tensor:
        Z = self.first(self.state(X))
        if isinstance(self.select, SoftmaxReadOut):
            weights = self.select.weights(Z)
        else:
            weights = self.select.heads()[0].weights(Z)[..., 0, :]
        if self.form == "paper":
            return weights[..., 0, :]
        n = self.tokens  # each token's own keys; the others weigh an exact 0
        split = weights.unflatten(-1, (-1, n))
        return torch.diagonal(split, dim1=-3, dim2=-1).transpose(-2, -1)

    def forward(self, X: Tensor) -> Tensor:
        out: Tensor = self.select(self.first(self.state(X)))
        return out if self.form == "tokens" else out.squeeze(-2).unflatten(-1, (self.tokens, -1))

    @property
    def keys(self) -> Tensor:
        """(key, channel), beta not included for attention, included for a softmax."""
        if isinstance(self.select, SoftmaxReadOut):
            return self.select.logits.detach().T
        return self.select.heads()[0].M_K.detach()[0]

    def values(self) -> Tensor:
        """The stored f(v), float64, (grid point, tokens times channels)."""
        read = self.select.read if isinstance(self.select, SoftmaxReadOut) else self.select.heads()[0].M_V[0]
        return read.detach().double().reshape(self.grid.size, -1)

    def ramp_table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slopes, offsets and values of the ramps, as stored."""
        group = self.first.heads()[0]
        keys, value = group.M_K.detach().double().numpy()[0], group.M_V.detach().double().numpy()[0]
        return keys[:, 0], keys[:, 1], value[:, 0]

    def queries(self) -> list[tuple[float, float]]:
        """Weight and bias of every ramp's query, as stored."""
        group = self.first.heads()[0]
        return list(zip(group.W_Q.detach()[:, :, 0].sum(-1).tolist(), group.b_Q.detach()[:, 0].tolist(), strict=True))

    def unchanged(self, beta: float) -> None:
        """Raise `CertificateError` unless all weights but tables, queries and values are the ones that were built."""
        dtype, extra = self.keys.dtype, self.tokens if self.form == "tokens" else 0
        W_Q, b_Q, W_O, constant = _hat_weights(self.grid, extra, dtype)
        group = self.first.heads()[0]
        assert self.first.s is not None
        select = _selection_keys(self.grid, dtype)
        hats = sum(self.grid.counts)
        stored = self.keys[:, :hats]
        expected = select.repeat_interleave(self.tokens, 0) if extra else select
        pairs = [
            ((group.W_Q.detach() != 0) & (W_Q == 0), torch.zeros_like(W_Q, dtype=torch.bool)),
            (group.b_Q.detach()[:, 1], b_Q[:, 1]),
            (group.W_O.detach(), W_O),
            (self.first.s.detach(), constant),
        ]
        if isinstance(self.select, SoftmaxReadOut):
            pairs.append((stored, beta * expected))
        else:
            scale = self.select.heads()[0].W_Q.detach()[0]
            ones = torch.cat([torch.full((hats,), beta, dtype=dtype), torch.ones(extra, dtype=dtype)])
            eye = torch.eye(self.select.heads()[0].W_O.shape[-1], dtype=dtype)
            pairs += [(stored, expected), (scale, torch.diag(ones)), (self.select.heads()[0].W_O.detach()[0], eye)]
        if extra:
            dead = (self.omega * (torch.eye(extra, dtype=dtype) - 1)).repeat(self.grid.size, 1)
            fresh = AttentionLayer(
                [gather_heads(extra, self.width, self.omega, dtype)],
                S=carry(extra, self.width, len(self.grid.counts), dtype),
            )
            pairs += [(self.keys[:, hats:], dead), (self.positions.detach(), torch.eye(extra, dtype=dtype))]
            pairs += list(zip((p.detach() for p in self.gather.parameters()), fresh.parameters(), strict=True))
        if not all(torch.equal(mine, built) for mine, built in pairs):
            raise CertificateError(
                "weights that select hats or grid points were changed: there is no certificate for these"
            )

    def matrices(self) -> dict[str, Tensor]:
        group = self.first.heads()[0]
        D, dtype = len(self.grid.counts), self.keys.dtype
        found = {"A": torch.eye(D, dtype=dtype), "W_Q1": group.W_Q.detach(), "b_Q1": group.b_Q.detach()}
        found |= {"W_K1": group.M_K.detach()[0], "W_V1": group.M_V.detach()[0], "W_O1": group.W_O.detach()}
        assert self.first.s is not None
        found["s_1"] = self.first.s.detach()
        if isinstance(self.select, SoftmaxReadOut):
            return found | {"W_1": self.select.logits.detach(), "W_O": self.select.read.detach()}
        head = self.select.heads()[0]
        found |= {"W_Q": head.W_Q.detach()[0], "W_K": head.M_K.detach()[0], "W_V": head.M_V.detach()[0]}
        return found | {"W_O": head.W_O.detach()[0]}


def _hat_weights(grid: Grid, extra: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries (x - v)/delta - 1/2 of all ramps, and the differences that make hats of them."""
    D, ramps, hats = len(grid.counts), sum(grid.counts) - len(grid.counts), sum(grid.counts)
    W_Q, b_Q = torch.zeros(ramps, D + extra, 2, dtype=dtype), torch.ones(ramps, 2, dtype=dtype)
    W_O, constant = torch.zeros(ramps, 1, hats + extra, dtype=dtype), torch.zeros(hats + extra, dtype=dtype)
    ramp = hat = 0
    for i, step in enumerate(grid.steps):
        rate = float(nearest([1 / step], dtype)[0])
        shifts = nearest([-at / step - type(step)(1, 2) for at in grid.axis(i)[:-1]], dtype)
        constant[hat] = 1.0
        for shift in shifts:
            W_Q[ramp, i, 0], b_Q[ramp, 0] = rate, float(shift)
            W_O[ramp, 0, hat], W_O[ramp, 0, hat + 1] = -1.0, 1.0
            ramp, hat = ramp + 1, hat + 1
        hat += 1
    return W_Q, b_Q, W_O, constant


def _selection_keys(grid: Grid, dtype: torch.dtype) -> Tensor:
    """(grid point, hat): 1 for the hats of the point's coordinates."""
    starts = torch.tensor([0, *np.cumsum(grid.counts)[:-1].tolist()])
    keys = torch.zeros(grid.size, sum(grid.counts), dtype=dtype)
    return keys.scatter_(1, grid.index() + starts, 1.0)


def gather_heads(n: int, width: int, omega: float, dtype: torch.dtype) -> Heads:
    """n heads; head j gives every token the channels of token j (D1): other keys get -omega, an exact weight 0."""
    channels, D = width + n, n * width
    W_Q, b_Q = torch.zeros(n, channels, n, dtype=dtype), torch.eye(n, dtype=dtype)
    W_K, b_K = torch.zeros(n, channels, n, dtype=dtype), torch.full((n, n), -omega, dtype=dtype)
    W_K[:, width:] = omega * torch.eye(n, dtype=dtype)
    W_V, W_O = torch.zeros(n, channels, width, dtype=dtype), torch.zeros(n, width, D + n, dtype=dtype)
    W_V[:, :width] = torch.eye(width, dtype=dtype)
    for j in range(n):
        W_O[j, :, j * width : (j + 1) * width] = torch.eye(width, dtype=dtype)
    return Heads("tokens", W_Q=W_Q, b_Q=b_Q, W_K=W_K, b_K=b_K, W_V=W_V, W_O=W_O, purpose="gather")


def carry(n: int, width: int, D: int, dtype: torch.dtype) -> Tensor:
    """The linear skip of the gather layer: positions stay."""
    skip = torch.zeros(width + n, D + n, dtype=dtype)
    skip[width:, D:] = torch.eye(n, dtype=dtype)
    return skip
