"""Weights for operations on whole tokens and between tokens: softmax, attention, norm, fixed mixing, maximum.

Each family has heads in its own coordinates, the columns of the values it reads one after the other; `embedded` places
them among the columns of a layer. All selections are exact: a column times 1 plus zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..heads.token_weights import average_heads, mix_heads, peak_heads
from ..ir.ops import Array, Attention, Mix, Op
from ..ir.positions import average, reads
from ..network import Heads
from .assemble import BUILDERS, Frame
from .layout import Site

TABLES = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")
READING = ("W_Q", "W_K", "W_V")


def softmax_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """Softmax over channels: a query of all channels against the identity as keys and values."""
    eye = torch.eye(op.width, dtype=dtype).unsqueeze(0)
    return Heads("memory", W_Q=eye, M_K=eye, M_V=eye, W_O=eye)


def attention_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """One head over tokens; reads queries, keys, values, and positions if there is a mask.

    The mask's row p is one more channel: queries carry their one-hot position, keys the entries of their column.
    """
    assert isinstance(op, Attention)
    width, mask = int(site.config["width"]), shipped_mask(op, site)
    n = 0 if mask is None else len(mask)
    query = np.zeros((2 * width + op.width + n, width + n))
    key, value = np.zeros_like(query), np.zeros((len(query), op.width))
    query[:width, :width] = op.scale * np.eye(width)
    key[width : 2 * width, :width] = np.eye(width)
    value[2 * width : 2 * width + op.width] = np.eye(op.width)
    if mask is not None:
        query[-n:, width:], key[-n:, width:] = np.eye(n), mask.T
    tables = [torch.from_numpy(x).to(dtype).unsqueeze(0) for x in (query, key, value, np.eye(op.width))]
    return Heads("tokens", W_Q=tables[0], W_K=tables[1], W_V=tables[2], W_O=tables[3], causal=op.causal)


def shipped_mask(op: Attention, site: Site) -> Array | None:
    """What is added to the logits: -Omega for what is hidden, 0 where the causal rule hides anyway."""
    if op.mask is None:
        return None
    mask = np.maximum(op.mask, -float(site.config["omega"]))
    return np.tril(mask) if op.causal else mask


def norm_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """G1: head j has a self slot of logit b_j - s_j c.c/d and value c, and a sink of logit and value 0."""
    width = op.width
    scale, shift, amount = (torch.tensor(site.config[k], dtype=dtype) for k in ("scales", "shifts", "amounts"))
    eye = torch.eye(width, dtype=dtype)
    wide = torch.eye(width, width + 1, dtype=dtype)
    one = torch.zeros(1, width + 1, dtype=dtype)
    one[0, -1] = 1.0
    return Heads(
        "self",
        W_Q=-scale[:, None, None] * wide,
        b_Q=shift[:, None] * one,
        W_K=wide.unsqueeze(0),
        b_K=one,
        W_V=eye.unsqueeze(0),
        M_K=torch.zeros(1, 1, width + 1, dtype=dtype),
        M_V=torch.zeros(1, 1, width, dtype=dtype),
        W_O=amount[:, None, None] * eye,
    )


def mixing_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """D2 for multiples of means, D3 for everything else (which holds D1, the rows with one entry, exactly)."""
    assert isinstance(op, Mix)
    plain = average(op.matrix)
    if plain is not None:
        gain, causal = plain
        return average_heads(op.width, causal, dtype, gain)
    return mix_heads(torch.from_numpy(op.matrix.copy()), op.width, dtype)


def max_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """D4, one head per channel."""
    return peak_heads(op.width, float(site.config["sharpness"]), dtype)


#: The heads of each family, in the coordinates of the values they read.
HEADS: dict[str, Callable[[Op, Site, torch.dtype], Heads]] = {
    "softmax": softmax_heads,
    "attention": attention_heads,
    "norm": norm_heads,
    "mix": mixing_heads,
    "max": max_heads,
}


def embedded(frame: Frame, site: Site) -> list[Heads]:
    """The heads of a site among the columns of its layer."""
    program = frame.layout.program
    own = HEADS[site.family](program.ops[site.op], site, frame.dtype)
    columns = [frame.read[j, c] for j in reads(program, site.op) for c in range(program.ops[j].width)]
    targets = [frame.write[site.op, c] for c in range(program.ops[site.op].width)]
    tables: dict[str, Tensor | None] = {name: getattr(own, name) for name in TABLES}
    for name in READING:
        table = tables[name]
        if table is not None:
            place = table.new_zeros(table.shape[0], len(frame.read), table.shape[2])
            used = torch.tensor(columns[: table.shape[1]])
            tables[name] = place.index_add(1, used, table.detach())  # a value may be read twice, as query and as key
    output = own.W_O.new_zeros(*own.W_O.shape[:2], len(frame.write))
    output[..., targets] = own.W_O.detach()
    tables["W_O"] = output
    purpose = f"{site.family}: {frame.purpose([site])}"
    return [Heads(own.scope, causal=own.causal, purpose=purpose, **tables)]  # type: ignore[arg-type]


BUILDERS.update(dict.fromkeys(HEADS, embedded))
