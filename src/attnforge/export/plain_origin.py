"""The network that a plain transformer was made from, out of the plain transformer's own file.

A compiled network is its program, its sites and the tables of its anchors. The first two go into the description of the
plain form as JSON; the tables are there already, as keys and values of registers. So a file of a plain transformer can
be checked like any other: rebuild the network, export it again, compare bit by bit, and analyse.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ..certify.certified import CertifiedModule
from ..compiled import CompiledNetwork
from ..errors import CertificateError
from ..lower.assemble import ANCHORS
from ..network import AttentionLayer
from .plain import PlainBlock, PlainTransformer


def origin_of(net: CertifiedModule) -> dict[str, Any] | None:
    """JSON from which `network_of` rebuilds a compiled network; None for a theorem, whose target no file can hold.

    Affine maps come with the program, unless they were trained: then as numbers.
    """
    if not isinstance(net, CompiledNetwork):
        return None
    config = net.config()
    fresh = dict(CompiledNetwork.rebuild(config, {}).named_parameters())
    mine = {name: p.detach().cpu() for name, p in net.named_parameters() if ".M_" not in name}
    trained = {name: p.tolist() for name, p in mine.items() if not torch.equal(p, fresh[name].detach())}
    return {"config": config, "trained": trained}


@torch.no_grad()
def network_of(plain: PlainTransformer) -> CertifiedModule:
    """The network that a plain transformer was made from: the one it knows, or the one its file describes."""
    if plain._source:
        return plain._source[0]
    if plain._origin is None:
        raise CertificateError(
            "this plain transformer does not know the network it was made from (layers without a target, or a file of "
            "a theorem, whose target no file can hold): there is nothing to certify it against; build that network "
            "again and export it with to_plain"
        )
    try:
        net = CompiledNetwork.rebuild(plain._origin["config"], {})
        parameters = dict(net.named_parameters())
        for name, numbers in plain._origin["trained"].items():
            parameters[name].copy_(torch.tensor(numbers, dtype=net.dtype))
        _fill_tables(plain, net)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CertificateError(f"the file does not describe the network it was made from: {error}") from error
    return net


def _fill_tables(plain: PlainTransformer, net: CompiledNetwork) -> None:
    """Read the anchors' keys and values off the registers."""
    for block, row in zip(plain.blocks, plain.heads, strict=True):
        attention = cast(PlainBlock, block).attention
        for h, head in enumerate(row):
            layer, group, number = head.place
            if not head.purpose or number != 0:
                continue
            found = cast(AttentionLayer, net.network.layers[layer]).heads()[group]
            if found.purpose.startswith(ANCHORS):
                for third, table in ((1, found.M_K), (2, found.M_V)):
                    table.copy_(_registers(attention, third, h, head.slots, table.shape[-1]))


def _registers(attention: nn.MultiheadAttention, third: int, head: int, slots: int, width: int) -> torch.Tensor:
    """Keys (third 1) or values (third 2) of registers 1 to `slots`: the columns of their ids follow the flag's."""
    start = third * attention.embed_dim + head * attention.head_dim
    return attention.in_proj_weight[start : start + width, 2 : 2 + slots].T
