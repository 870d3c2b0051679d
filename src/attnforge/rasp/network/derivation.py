"""Writing the derivation of a compiled program: what the kernel's proof needs besides the file (docs/kernel.md).

These are words, never claims: the normal form of the program, what every column stands for, what every head computes,
and which value each logit stands for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...certificates.certificate import Certificate
from ...certificates.proof import settled
from ..language import Map, Node, Select, indices, tokens, walk
from ..values import sorted_values
from .compiled import CompiledProgram
from .data import op_json, value_json
from .facts import Facts
from .layout import Feature
from .normal import Packed, pack
from .several import CompiledPrograms


def proved(net: CompiledProgram | CompiledPrograms, certificate: Certificate) -> Certificate:
    """A program's certificate after the kernel has been run on what `save` writes of it; of several, on each."""
    if isinstance(net, CompiledPrograms):
        return _each(net, certificate)
    words = derive(net)

    def wrong(chosen: dict[str, Any]) -> str:
        same = chosen["outputs"] == words["outputs"]
        return "" if same else "the derivation of the file names other outputs than its network puts out"

    return settled(net, certificate, lambda saved, bound: words, wrong)


def _each(net: CompiledPrograms, certificate: Certificate) -> Certificate:
    """The certificate of several programs after the kernel has been run on the network of each."""
    alone = {name: net[name] for name in net.programs}
    found = {name: proved(one, one.certificate) for name, one in alone.items()}
    remark = next((f"{name}: {one.remark}" for name, one in found.items() if one.kernel is None), "")
    if remark or certificate.bound is None:
        return replace(certificate, proof="analysis", kernel=None, remark=remark)
    bound = max(one.kernel for one in found.values() if one.kernel is not None)
    return replace(certificate, proof="kernel" if bound <= certificate.bound else "analysis", kernel=bound, remark="")


def derive(net: CompiledProgram) -> dict[str, Any]:
    """The derivation of a program's network."""
    facts = net.facts
    ops, at = _ops(facts)

    def word(feature: Feature) -> list[Any]:
        if feature.op < 0:
            return [feature.kind, at[tokens] if feature.kind == "is" else -1, _value(facts, feature)]
        return [feature.kind, at[facts.order[feature.op]], _value(facts, feature)]

    return {
        "ops": ops,
        "output": at[facts.program],
        "outputs": None if net.outputs is None else [value_json(value) for value in net.outputs],
        "positions": [word(feature) for feature in net.layout.positions],
        "layers": [
            {
                "heads": [at[facts.order[seat.op]] for seat in layer.heads],
                "after": [word(feature) for feature in layer.after],
            }
            for layer in net.layout.layers
        ],
    }


def _value(facts: Facts, feature: Feature) -> Any:
    """The value that a column stands for, where it stands for one."""
    if feature.kind != "is":
        return None
    values = facts.values(facts.sop(feature.op)) if feature.op >= 0 else sorted_values(set(facts.domain.vocabulary))
    return value_json(values[feature.value])


def _ops(facts: Facts) -> tuple[list[Any], dict[Node, int]]:
    """The normal form as data, with selectors that were packed into one select written out again."""
    found: list[Any] = []
    at: dict[Node, int] = {}

    def add(node: Node) -> None:
        if node in at:
            return
        if isinstance(node, Select) and isinstance(node.predicate, Packed):
            for part in walk(node.predicate.selector):
                add(part)
            at[node] = at[node.predicate.selector]
            return
        if isinstance(node, Map) and node.function is pack:
            entry = ["Map", node.name, [at[child] for child in node.operands], {"operator": "pack"}]
        else:
            entry = op_json(node, [at[child] for child in node.children])
        at[node] = len(found)
        found.append(entry)

    for node in (tokens, indices, *facts.order):
        add(node)
    return found, at
