"""How a kernel shares a row of a norm among its threads, and how many roundings a sum of it takes."""

from __future__ import annotations

WIDEST = 16384  # channels that one program holds in registers
SHORT = 2048  # channels up to which one warp takes a row: 64 numbers a thread


def warps(channels: int) -> int:
    """Warps that share a row."""
    return 1 if channels <= SHORT else 4 if channels <= 2 * SHORT else 8


def roundings(channels: int) -> int:
    """Additions that a term of a row's sum goes through at most: inside a thread, a warp, and between warps."""
    lanes = 32 * warps(channels)
    block = 1 << (channels - 1).bit_length()
    return max(block // lanes - 1, 0) + min(block, lanes).bit_length() - 1
