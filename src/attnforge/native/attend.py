"""Softmax heads with constant keys through the kernel for processors: one pass over the rows, nothing kept of a slot.

What is computed is the softmax as `network.Heads` has it: logits, the largest subtracted, exponentials, their sum's
reciprocal, weights, a sum of weighted values (lemma R5 and the exponential of R9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..dtypes import SHIPPED
from . import library, plain, threads

SLOTS, COORDINATES = 1024, 8  # the most that kernels.c holds of a head's logits, and of a query
WORTH = 1 << 16  # exponentials: PyTorch's take 30 microseconds longer for so many, as long as making tables ready
Columns = Callable[[Tensor], Tensor]


def takes(Z: Tensor, tables: Iterable[Tensor], most: int) -> bool:
    """Whether kernels compute heads of these tables on this state: plain numbers of one dtype on a processor, no
    gradients wanted, and enough exponentials, at `most` so many for a row, that making them ready pays."""
    if Z.shape[:-1].numel() * most < WORTH or Z.device.type != "cpu" or Z.dtype not in SHIPPED:
        return False
    if not plain(Z) or library() is None:
        return False
    training = torch.is_grad_enabled()
    if training and Z.requires_grad:
        return False
    return all(t.dtype == Z.dtype and plain(t) and not (training and t.requires_grad) for t in tables)


def fits(slots: int, coordinates: int) -> bool:
    """Whether the kernel holds a head of so many slots, its own among them."""
    return slots <= SLOTS and coordinates <= COORDINATES


def attending(W_Q: Tensor, b_Q: Tensor | None, keys: Tensor, values: Tensor) -> tuple[Columns, Callable[..., Tensor]]:
    """What the kernel reads its queries from, given the state (channel, row), and what it computes of that and, for a
    head with a slot of its own, of its values (head, value, row): the reads (head, value, row).

    Queries that pick channels are not written out: the kernel reads these rows.
    """
    heads, _, coordinates = W_Q.shape
    table = W_Q.detach().permute(0, 2, 1).flatten(0, 1)  # (head and coordinate, channel)
    filled, dtype = table != 0, W_Q.dtype
    bias = torch.zeros(heads, coordinates, dtype=dtype)
    if int(filled.sum(-1).amax()) <= 1:
        first = filled.to(torch.uint8).argmax(-1)
        scale = table.gather(-1, first.unsqueeze(-1)).squeeze(-1).contiguous()
        place = torch.where(filled.any(-1), first, -1).to(torch.int32)
        bias = (bias if b_Q is None else b_Q.detach() + bias).contiguous()
        query: Columns = lambda X: X.contiguous()  # noqa: E731
    else:
        scale, place = torch.ones(len(table), dtype=dtype), torch.arange(len(table), dtype=torch.int32)
        shift = None if b_Q is None else (b_Q.detach() + bias).flatten().unsqueeze(-1)
        query = lambda X: table @ X if shift is None else table @ X + shift  # noqa: E731
    keys, values = keys.detach().contiguous(), values.detach().contiguous()
    slots, width = keys.shape[1], values.shape[1]

    def read(X: Tensor, own: Tensor | None) -> Tensor:
        found, rows = library(), X.shape[-1]
        assert found is not None, "`takes` was not asked"
        out = X.new_empty(heads, width, rows)
        mine = None if own is None else own.contiguous()
        call = found.attend_f if dtype == torch.float32 else found.attend_d
        call(
            X.data_ptr(), rows, place.data_ptr(), scale.data_ptr(), bias.data_ptr(), keys.data_ptr(), len(keys) == 1,
            values.data_ptr(), len(values) == 1, None if mine is None else mine.data_ptr(), out.data_ptr(), heads,
            slots, coordinates, width, threads(heads * slots * rows),
        )  # fmt: skip
        return out

    return query, read
