"""Where everything is in a token: state, data and penalty tokens of one sequence, all of the same width.

    x d | y K | one | data | pen | r K | v d | p d | a d | t d (soft threshold only) | id K | q 1, m 1 (Huber only)

State token k carries the weights: p (where the next gradient is taken), a (the last ones), t (its thresholds), and id =
e_k. Data tokens carry x, the label y, the value v = (step size)(sample weight) x and data = 1; they write what they
predict into r. Penalty tokens have pen = 1, x = sqrt(lambda_j)/4 e_j and v = 4 (step size) sqrt(lambda_j) e_j. `one` is
1 on every token. q is a data token's sample weight, m the mean square that the state reads off the residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError


@dataclass(frozen=True)
class Channels:
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

    def part(self, name: str) -> slice:
        """The channels of a part."""
        begin = 0
        for key, size in self._sizes().items():
            if key == name:
                return slice(begin, begin + size)
            begin += size
        raise ArgumentError(f"tokens have no part {name!r}; they have {', '.join(self._sizes())}")

    def at(self, name: str) -> list[int]:
        """The channels of a part, one by one."""
        part = self.part(name)
        return list(range(part.start, part.stop))

    def _sizes(self) -> dict[str, int]:
        d, k = self.d, self.classes
        return {"x": d, "y": k, "one": 1, "data": 1, "pen": 1, "r": k, "v": d, "p": d, "a": d,
                **({"t": d} if self.shrink else {}), "id": k,
                **({"q": 1, "m": 1} if self.robust else {})}  # fmt: skip

    @property
    def width(self) -> int:
        """The number of channels."""
        return sum(self._sizes().values())

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
