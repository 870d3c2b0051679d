"""Token heads: moving information between tokens (section D of docs/theory.md).

- D1 *gather*: every token reads token j. Positions are one-hot channels next to the data, and keys carry
  (onehot - 1) Omega: the wanted key has an exact 0, the others -Omega, so far down that the exponential underflows to
  an exact 0. (Rewarding the wanted key with +Omega instead would cost u Omega.)
- D2 *mean*: equal logits. *Prefix mean*: the same under a causal mask. Neither needs positions.
- D3 *any fixed n x n matrix* M = c (P+ - P-), P row-substochastic: logits log P through positions, what is missing to 1
  goes to a sink of value 0. Two heads (one, if M has one sign).
- D4 *max* and *min* over tokens, per channel: logits beta x_j, values x_j. The distance to the maximum is at most
  W0((n-1)/e) / beta: with gaps g_j to the maximum it is sum g_j e^(-beta g_j) / (1 + sum e^(-beta g_j)), largest when
  all gaps are equal, and (n-1) g e^(-beta g) / (1 + (n-1) e^(-beta g)) is largest where it equals g - 1/beta.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ...arguments import is_whole
from ...box import Box
from ...certificates.certificate import Certificate, total
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import assumptions, up
from ...certificates.schema import MOST_TOKENS, Either, Whole
from ...dtypes import by_name
from ...errors import ArgumentError, CertificateError, PrecisionError
from ...network import AttentionLayer, Heads
from ..stored import refuse_overflow
from .bound import UNDERFLOW, fixed_terms, lambert_upper, mixing, peak_terms, sharpnesses
from .construction import OMEGA, average_heads, average_matrix, gather_heads, mix_heads, peak_heads, sharpest

Mode = Literal["gather", "mean", "prefix_mean", "mix", "max", "min"]


class TokenHead(CertifiedModule):
    """Attention between the n tokens of an input (..., n, channels); the output has the same shape.

    >>> x = torch.tensor([[1.0, -0.5], [0.25, 0.75], [-1.0, 0.0]])
    >>> torch.equal(TokenHead.gather(3, source=1, channels=2)(x), x[1].expand(3, 2))
    True
    >>> head = TokenHead.max(tokens=3, channels=2, lo=-1, hi=1, eps=1e-3)
    >>> bool((head(x) - x.amax(0)).abs().max() <= head.bound <= 1e-3)
    True
    """

    family = "token"
    called = "heads between tokens"
    schema: ClassVar[Any] = {
        "mode": str, "tokens": Whole(1, MOST_TOKENS), "channels": Whole(1), "lo": float, "hi": float,
        "matrix": Either(None, [[float]]),
    }  # fmt: skip
    positions: Tensor

    def __init__(
        self,
        attention: Heads,
        *,
        mode: Mode,
        tokens: int,
        channels: int,
        lo: float = -1.0,
        hi: float = 1.0,
        matrix: Tensor | None = None,
    ):
        super().__init__()
        _check_sizes(tokens, channels)
        self.attention, self.tokens, self.channels = attention, tokens, channels
        self.mode: Mode = mode
        self.target = _matrix(matrix) if matrix is not None else None
        self.box = Box.cube(lo, hi, shape=(tokens, channels))
        reads_positions = attention.W_Q.shape[1] > channels
        size = tokens if reads_positions else 0
        self.register_buffer("positions", torch.eye(size, dtype=attention.W_Q.dtype), persistent=False)

    @classmethod
    @by_name
    def gather(
        cls,
        tokens: int,
        source: int,
        channels: int,
        lo: float = -1.0,
        hi: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> TokenHead:
        """Every token receives token `source`, bit by bit (D1)."""
        _check_sizes(tokens, channels, dtype)
        if not is_whole(source, 0, tokens - 1):
            raise ArgumentError(f"source must be the number of a token, 0 to {tokens - 1}, got {source!r}")
        attention = gather_heads(tokens, source, channels, dtype)
        matrix = torch.zeros(tokens, tokens, dtype=torch.float64)
        matrix[:, source] = 1
        return cls._finish(attention, "gather", tokens, channels, lo, hi, matrix)

    @classmethod
    @by_name
    def mean(
        cls, tokens: int, channels: int, lo: float = -1.0, hi: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> TokenHead:
        """Every token receives the mean of all tokens (D2)."""
        return cls._average("mean", tokens, channels, lo, hi, dtype)

    @classmethod
    @by_name
    def prefix_mean(
        cls, tokens: int, channels: int, lo: float = -1.0, hi: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> TokenHead:
        """Token i receives the mean of tokens 0 to i (D2 under a causal mask)."""
        return cls._average("prefix_mean", tokens, channels, lo, hi, dtype)

    @classmethod
    @by_name
    def mix(
        cls,
        matrix: Tensor,
        channels: int,
        lo: float = -1.0,
        hi: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> TokenHead:
        """Token i receives sum_j matrix[i, j] x_j for a fixed square matrix (D3)."""
        target = _matrix(matrix)
        n = target.shape[0]
        _check_sizes(n, channels, dtype)
        attention = mix_heads(target, channels, dtype)
        return cls._finish(attention, "mix", n, channels, lo, hi, target)

    @classmethod
    @by_name
    def max(
        cls,
        tokens: int,
        channels: int,
        lo: float = -1.0,
        hi: float = 1.0,
        eps: float | None = None,
        sharpness: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> TokenHead:
        """Every token receives the maximum over tokens, channel by channel (D4).

        `sharpness` is the factor beta of the logits; `eps` chooses the smallest one that certifies it; with neither it
        is the one with the smallest certified bound.
        """
        return cls._peak("max", tokens, channels, lo, hi, eps, sharpness, dtype)

    @classmethod
    @by_name
    def min(
        cls,
        tokens: int,
        channels: int,
        lo: float = -1.0,
        hi: float = 1.0,
        eps: float | None = None,
        sharpness: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> TokenHead:
        """Every token receives the minimum over tokens, channel by channel: `max` with logits -beta x_j."""
        return cls._peak("min", tokens, channels, lo, hi, eps, sharpness, dtype)

    @classmethod
    def _average(cls, mode: Mode, n: int, channels: int, lo: float, hi: float, dtype: torch.dtype) -> TokenHead:
        _check_sizes(n, channels, dtype)
        attention = average_heads(channels, mode == "prefix_mean", dtype)
        return cls._finish(attention, mode, n, channels, lo, hi, average_matrix(mode == "prefix_mean", n))

    @classmethod
    def _peak(
        cls,
        mode: Mode,
        n: int,
        channels: int,
        lo: float,
        hi: float,
        eps: float | None,
        sharpness: float | None,
        dtype: torch.dtype,
    ) -> TokenHead:
        _check_sizes(n, channels, dtype)
        box = Box.cube(lo, hi, shape=(1,))
        if eps is not None and sharpness is not None:
            raise ArgumentError("give eps or sharpness, not both: eps chooses the sharpness")
        for name, number in (("eps", eps), ("sharpness", sharpness)):
            if number is not None and not 0 < number < math.inf:
                raise ArgumentError(f"{name} must be a finite number > 0, got {number!r}")
        (low, high), *_ = box.outward(dtype).intervals()
        beta = sharpest(n, low, high, eps, dtype) if sharpness is None else float(sharpness)
        attention = peak_heads(channels, beta if mode == "max" else -beta, dtype)
        return cls._finish(attention, mode, n, channels, lo, hi, None)

    @classmethod
    def _finish(
        cls, attention: Heads, mode: Mode, n: int, channels: int, lo: float, hi: float, matrix: Tensor | None
    ) -> TokenHead:
        head = cls(attention, mode=mode, tokens=n, channels=channels, lo=lo, hi=hi, matrix=matrix)
        head.attach(head.recertify())
        return head

    def _require_own_scope(self) -> None:
        """Raise unless the head sees what its mode says, and its positions are those that it was made with: neither is
        among its weights."""
        seen = (self.attention.scope, self.attention.causal)
        if seen != ("tokens", self.mode == "prefix_mean"):
            raise CertificateError(f"a {self.mode} head does not see what this one sees: {seen[0]}, causal={seen[1]}")
        if not torch.equal(self.positions, torch.eye(len(self.positions)).to(self.positions)):
            raise CertificateError("the positions of this token head have changed: they are exact ones and zeros")

    def core(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        if self.positions.shape[0]:
            x = torch.cat([x, self.positions.expand(*x.shape[:-1], -1)], dim=-1)
        return self.attention(x)

    @property
    def sharpness(self) -> float | None:
        """The factor beta of a max or min head's logits; None for the others."""
        if self.mode not in ("max", "min") or self.attention.W_K is None:
            return None
        return float(self.attention.W_K.detach().abs().amax())

    def recertify(self) -> Certificate:
        for name, tensor in self.attention.state_dict().items():
            if not bool(tensor.isfinite().all()):
                raise CertificateError(f"'{name}' of this token head holds NaN or infinity: nothing can be certified")
        self._require_own_scope()
        if self.dtype not in OMEGA:
            raise PrecisionError(f"token heads are certified in float32 and float64, not in {self.dtype}")
        outward = self.box.outward(self.dtype)
        lo, hi = outward.intervals()[0]
        refuse_overflow(AttentionLayer([self.attention]), max(abs(lo), abs(hi), 1.0), self.dtype)  # positions are 1
        if self.target is None:
            sign = 1.0 if self.mode == "max" else -1.0
            terms = peak_terms(self.attention, self.tokens, self.channels, lo, hi, sign)
            lemmas: tuple[str, ...] = ("D4", "A5")
        else:
            terms = fixed_terms(self.attention, self.target.numpy(), self.channels, lo, hi)
            lemmas = ("D1" if self.mode == "gather" else "D3" if self.mode == "mix" else "D2", "A5")
        bound = total(t.value for t in terms)
        if not math.isfinite(bound):
            raise PrecisionError(
                f"no finite bound for this {self.mode} head in {self.dtype}: make it less sharp or smaller"
            )
        return Certificate(
            kind="certified",
            bound=bound,
            dtype=str(self.dtype).removeprefix("torch."),
            target=self._described(),
            box=self.box,
            terms=terms,
            lemmas=lemmas,
            assumptions=(*assumptions(), UNDERFLOW),
        )

    def lipschitz(self) -> float:
        """How far an output can move when every entry moves by at most 1 (lemma H2): certified, for real arithmetic.

        >>> TokenHead.mix(torch.tensor([[0.5, -1.0], [0.0, 2.0]]), 1).lipschitz() < 2.0001
        True
        >>> TokenHead.max(tokens=2, channels=1, lo=-1, hi=1, eps=1e-3).lipschitz() < 1.557  # 1 + 2 W0(1/e)
        True
        """
        if self.target is None:
            sharpnesses(self.attention, self.channels, 1.0 if self.mode == "max" else -1.0)  # or it is no such head
            return float(up(1 + 2 * lambert_upper(self.tokens)))
        return mixing(self.attention, self.tokens, self.channels)

    def _described(self) -> str:
        over = f"over {self.tokens} tokens of {self.channels} channels"
        if self.target is None or self.mode in ("mean", "prefix_mean"):
            return f"{self.mode} {over}"
        digest = hashlib.sha256(self.target.numpy().tobytes()).hexdigest()[:12]
        return f"{self.mode} {over}, matrix {digest}"

    def config(self) -> dict[str, Any]:
        lo, hi = self.box.intervals()[0]
        matrix = self.target.tolist() if self.target is not None and self.mode in ("gather", "mix") else None
        sizes = {"tokens": self.tokens, "channels": self.channels}
        return {"mode": self.mode, **sizes, "lo": lo, "hi": hi, "matrix": matrix}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> TokenHead:
        mode, n = config["mode"], config["tokens"]
        weights = {name.removeprefix("attention."): tensor for name, tensor in tensors.items()}
        attention = Heads("tokens", causal=mode == "prefix_mean", purpose=mode, **weights)  # type: ignore[arg-type]
        given = config["matrix"]
        matrix = None if given is None else torch.tensor(given, dtype=torch.float64)
        matrix = average_matrix(mode == "prefix_mean", n) if mode in ("mean", "prefix_mean") else matrix
        sizes = {key: config[key] for key in ("tokens", "channels", "lo", "hi")}
        return cls(attention, mode=mode, matrix=matrix, **sizes)

    def extra_repr(self) -> str:
        return self._described()


def _matrix(matrix: object) -> Tensor:
    if not isinstance(matrix, Tensor | np.ndarray):
        raise ArgumentError(f"matrix must be a torch tensor or a numpy array, got {type(matrix).__name__}")
    given = torch.as_tensor(matrix).detach()
    if given.dim() != 2 or given.shape[0] != given.shape[1] or not given.numel():
        raise ArgumentError(f"matrix must be square, tokens by tokens, got shape {tuple(given.shape)}")
    if given.is_complex() or not bool(given.double().isfinite().all()):
        raise ArgumentError("matrix must hold finite real numbers")
    return given.to(torch.float64).cpu().clone()


def _check_sizes(tokens: object, channels: object, dtype: torch.dtype = torch.float32) -> None:
    for name, number in (("tokens", tokens), ("channels", channels)):
        if not is_whole(number, 1):
            raise ArgumentError(f"{name} must be a whole number of at least 1, got {number!r}")
    if dtype not in OMEGA:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
