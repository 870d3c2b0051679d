"""Sums as trees of additions: a term goes through log2(n) roundings instead of n."""

from __future__ import annotations

from torch import Tensor


def tree_size(channels: int) -> int:
    """The smallest 2^a or 3 * 2^a that holds the channels: what a tree of additions likes."""
    power = 1 << (channels - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= channels else power


def tree_depth(width: int) -> int:
    """How many additions in a row a term of `tree_sum` goes through at most."""
    halvings = (width & -width).bit_length() - 1
    return halvings + (width >> halvings) - 1


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, which is kept: halves added to halves, at the end three numbers or one."""
    while x.shape[-1] % 2 == 0:
        first, second = x.chunk(2, dim=-1)
        x = first + second
    if x.shape[-1] == 1:
        return x
    first, second, third = x.chunk(3, dim=-1)
    return first + second + third
