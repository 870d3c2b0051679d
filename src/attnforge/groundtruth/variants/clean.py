"""Cleaning maps: heads that write a code again, so that the code before them may be superposed.

Means and counts need equal logits for all keys that they select, and vectors that interfere with each other do not give
them. A map repairs what comes in (P1 of docs/rasp_theory.md): one slot for each value, whose code it writes anew. The
same program is computed by one layer more, and proved like any other network.
"""

from __future__ import annotations

from typing import cast

import torch

from ...network import AttentionLayer, AttentionOnly, Heads
from ...rasp.language import Tokens
from ...rasp.network.compiled import CompiledProgram
from ...rasp.network.layout import Feature, HeadRole, LayerRoles, ProgramLayout, first_columns
from ...rasp.network.plan import GAMMA


def cleaned(net: CompiledProgram) -> CompiledProgram:
    """The network of a program with codes of three values or more written again, each where it is first there.

    >>> import attnforge as af
    >>> from attnforge import rasp
    >>> net = af.compile(rasp.library.hist(), rasp.Sequences("abcd", max_length=4))
    >>> one = cleaned(net)
    >>> one.size.layers - net.size.layers, one.certificate.kind, one("abba") == net("abba")
    (1, 'exact', True)
    """
    state = (*first_columns(net.facts), *net.layout.positions)
    layers: list[LayerRoles] = []
    modules: list[AttentionLayer] = []
    seen: set[int] = set()
    for number, module in enumerate(net.network.layers):
        ops = [op for op in dict.fromkeys(f.op for f in state if f.kind == "is" and f.op >= 0) if op not in seen]
        seen.update(ops)
        codes = {op: [i for i, f in enumerate(state) if f.kind == "is" and f.op == op] for op in ops}
        large = {op: columns for op, columns in codes.items() if _repairable(net, op, columns)}
        if large:
            layers.append(LayerRoles(tuple(HeadRole("map", op) for op in large), state))
            modules.append(_rewriting(net, state, large))
        modules.append(cast(AttentionLayer, module))
        if number < len(net.layout.layers):
            layers.append(net.layout.layers[number])
            state = layers[-1].after
    found = CompiledProgram(
        net.facts, net.program, ProgramLayout(net.layout.positions, tuple(layers)), AttentionOnly(modules),
        net.positions.detach().clone(),
    )  # fmt: skip
    found.attach(found.recertify())
    return found.eval()


def _repairable(net: CompiledProgram, op: int, columns: list[int]) -> bool:
    """Whether a code of an op has three values or more, all of them in columns that a sequence fills."""
    node = net.facts.sop(op)
    return len(columns) > 2 and len(columns) == len(net.facts.values(node)) and (
        isinstance(node, Tokens) or bool(node.children)
    )


def _rewriting(net: CompiledProgram, state: tuple[Feature, ...], codes: dict[int, list[int]]) -> AttentionLayer:
    """A layer that carries everything but some codes, which its heads write."""
    kind, width = net.dtype, len(state)
    kept = torch.eye(width, dtype=kind)
    heads = []
    for op, columns in codes.items():
        kept[columns, columns] = 0.0
        pick = torch.zeros(1, width, len(columns), dtype=kind)
        pick[0, columns, range(len(columns))] = 1.0
        one = torch.eye(len(columns), dtype=kind)[None]
        label = f"map: {net.facts.sop(op).label.strip(chr(39))} again"
        heads.append(
            Heads("memory", W_Q=pick, M_K=GAMMA[kind] * one, M_V=one, W_O=pick.transpose(1, 2).contiguous(),
                  purpose=label)
        )  # fmt: skip
    return AttentionLayer(heads, S=kept)
