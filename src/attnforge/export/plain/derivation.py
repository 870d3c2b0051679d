"""Writing the derivation of a plain transformer: the choices that the kernel's proof needs (docs/kernel.md).

Those of a compiled network are the network's own, and how large each column of the stream may be, which the kernel
proves on every part of the box; those of a token program are the program's own words.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...certificates.certificate import Certificate
from ...certificates.proof import settled
from ...compiler import derivation as networks
from ...compiler.compiled import CompiledNetwork
from ...kernel.balls import NotProved
from ...kernel.file import Saved
from ...rasp.network import derivation as words
from ...rasp.network.compiled import CompiledProgram
from .certificate import reaches
from .source import compiled_source
from .stream import read
from .transformer import PlainTransformer, network_of

#: Who writes the derivation of a theorem, which is that of its plain form; loaded where there is one.
THEOREMS = dict.fromkeys(("theorem-cells", "theorem-universal"), "attnforge.theorems.derivation")
THEOREMS |= {"theorem-ramp": "attnforge.compiler.alone"}
ROOM = 1.02  # sizes of columns are bounded by the kernel as by the analysis, up to so much


def proved(plain: PlainTransformer, certificate: Certificate) -> Certificate:
    """A plain transformer's certificate after the kernel has been run on what `save` writes of it."""
    net = network_of(plain)

    def wrong(chosen: dict[str, Any]) -> str:
        same = not isinstance(net, CompiledProgram) or chosen["outputs"] == words.derive(net)["outputs"]
        return "" if same else "the derivation of the file names other outputs than its network puts out"

    return settled(plain, certificate, lambda saved, bound: derive(plain, saved, bound), wrong)


def derive(plain: PlainTransformer, saved: Saved, goal: float, effort: int | None = None) -> dict[str, Any]:
    """The derivation of a plain transformer."""
    net = network_of(plain)
    if isinstance(net, CompiledProgram):
        return words.derive(net)
    if net.family in THEOREMS:
        own: dict[str, Any] = importlib.import_module(THEOREMS[net.family]).derive(net, saved, goal)
        return own
    if not isinstance(net, CompiledNetwork):
        raise NotProved("the network that the plain form was made from has no program that the kernel could read")
    form = plain.plain_form()
    stream = read(form.spec, form.state_dict(), compiled_source(net), reaches(net))
    sizes = [ROOM * float(x) for x in stream.sizes[-1].max(0)[stream.columns.first :]]

    def whole(own: dict[str, Any]) -> dict[str, Any]:
        return {"sizes": sizes, "network": own}

    return whole(networks.derive(net, saved, goal, effort, whole))
