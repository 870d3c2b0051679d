"""How wide the stream and how many blocks: heads of one source layer are dealt to one block, or to several.

`torch.nn.MultiheadAttention` has head dimension = stream / heads, so a block of head dimension d holds stream / d
heads. A head's dimension is a power of 4, which makes the scale 1/sqrt(d) a power of two. Heads of a layer that do not
fit into one block go to the next: they read columns of earlier layers only. The stream is the one that makes a pass
cheapest: projections cost the square of the stream for every row, scores and means the stream for every pair of rows,
and the softmax something for every head, padding included, and pair of rows. Few heads get wide ones, many share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from .plain_layout import HeadTables, PlainLayout

LIMIT = 2048  # registers and tokens together, and channels
WIDE = 64  # the stream may grow to a multiple of this, so that few heads can be wide
SOFTMAX = 20  # operations that an entry of a softmax is worth


@dataclass(frozen=True, eq=False)
class Packed:
    """One block: its head dimension, its heads, and the source layer they come from."""

    width: int
    heads: tuple[HeadTables, ...]
    layer: int


def power_of_four(width: int) -> int:
    """The smallest power of 4 that holds so many coordinates.

    >>> [power_of_four(n) for n in (1, 4, 5, 17)]
    [1, 4, 16, 64]
    """
    found = 1
    while found < width:
        found *= 4
    return found


def pack(layout: PlainLayout, limit: int = LIMIT) -> tuple[int, list[Packed]]:
    """The width of the stream, and the blocks; `ArgumentError` when that is too large."""
    needs = [[power_of_four(head.width) for head in heads] for heads in layout.layers]
    unit = max((w for layer in needs for w in layer), default=1)
    least = -(-max(layout.width, 1) // unit) * unit
    rows = layout.columns.registers + layout.columns.tokens
    if rows > limit or least > limit:
        raise ArgumentError(
            f"too large for a plain transformer: it would take {layout.columns.registers} registers, "
            f"{layout.columns.tokens} token(s) and {least} channels; the limit is {limit} rows and {limit} channels. "
            "Ask for a larger eps (fewer anchors and heads), or export a part of the function"
        )
    wide = -(-least // WIDE) * WIDE
    most = min(max([least, wide, *(sum(layer) for layer in needs)]), limit)
    best = min(range(least, most + 1, unit), key=lambda width: (_cost(needs, width, rows), width))
    blocks = []
    for number, (heads, wanted) in enumerate(zip(layout.layers, needs, strict=True)):
        for width, chosen in _dealt(wanted, best):
            blocks.append(Packed(width, tuple(heads[i] for i in chosen), number))
    return best, blocks


def _cost(needs: Sequence[Sequence[int]], stream: int, rows: int) -> int:
    """Operations of a pass over `rows` rows, about."""
    widths = [width for layer in needs for width, _ in _dealt(layer, stream)]
    return sum(4 * stream**2 * rows + (2 * stream + SOFTMAX * (stream // width)) * rows**2 for width in widths)


def _dealt(needs: Sequence[int], stream: int) -> list[tuple[int, list[int]]]:
    """Head dimension and heads of each block: wide heads first, narrow ones where room is left."""
    order = sorted(range(len(needs)), key=lambda i: -needs[i])
    blocks: list[tuple[int, list[int]]] = []
    for i in order:
        if not blocks or len(blocks[-1][1]) >= stream // blocks[-1][0]:
            blocks.append((needs[i], []))
        blocks[-1][1].append(i)
    return [(_widened(width, len(chosen), stream), sorted(chosen)) for width, chosen in blocks]


def _widened(width: int, heads: int, stream: int) -> int:
    """The largest head dimension that leaves room for all heads: fewer of them are padding."""
    while stream % (4 * width) == 0 and stream // (4 * width) >= heads:
        width *= 4
    return width
