"""How a kernel shares a row of a norm among its threads, and how many roundings a sum of it takes."""

from __future__ import annotations

Blocks = tuple[int, int, int]  # of a kernel: entries of a row and heads, both powers of two, and warps

WIDEST = 16384  # channels that one program holds in registers
SHORT = 2048  # channels up to which one warp takes a row: 64 numbers a thread


def warps(channels: int) -> int:
    """Warps that share a row."""
    return 1 if channels <= SHORT else 4 if channels <= 2 * SHORT else 8


def blocks(channels: int, heads: int) -> Blocks:
    """What a kernel for such rows is compiled for.

    >>> blocks(768, 32)
    (1024, 32, 1)
    """
    return 1 << (channels - 1).bit_length(), 1 << (heads - 1).bit_length(), warps(channels)


def roundings(channels: int) -> int:
    """Additions that a term of a row's sum goes through at most: inside a thread, a warp, and between warps."""
    lanes = 32 * warps(channels)
    block = 1 << (channels - 1).bit_length()
    return max(block // lanes - 1, 0) + min(block, lanes).bit_length() - 1
