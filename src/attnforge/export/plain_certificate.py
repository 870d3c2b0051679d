"""The certificate of a plain transformer: the bound of its source, recomputed for what the plain form computes.

*Exclusion.* A head's content logits are at most L in size, so that the best allowed one is at least -L, and an excluded
one at most L - Omega. Omega is at least 2 L plus 104 (float32) or 746 (float64) and a little: the exponential of what
is excluded underflows to an exact 0. Allowed logits gain exact zeros, and registers, whose rows no head changes, give
exact keys and values. So a head computes what it does in tier `memory`, up to the order of its sums, which no
certificate counts on.

*Compiled networks*: `plain_rules`. *Theorems*: the embedding computes y = w.x + t as the first layer does, and every
later query is a sum of the same terms, so that the construction's own certificate, which allows any order, holds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from ..certify.certificate import Certificate
from ..certify.certified import CertifiedModule
from ..certify.rounding import gamma, unit
from ..certify.split import EFFORT, network_bound
from ..compiled import CompiledNetwork
from ..errors import CertificateError, PrecisionError
from ..heads.token_bounds import DEAD, UNDERFLOW
from .plain import PlainTransformer
from .plain_layout import PlainLayout
from .plain_rules import PlainPropagation

STRETCHES = (0.0, 0.02)  # folded arguments may leave the intervals of their heads by a little more than before
COMPARED = 256  # points at which layers without a target are compared with their plain form
EXPLICIT = "torch.nn.MultiheadAttention with need_weights=True: an explicit softmax"


def certificate_of(net: nn.Module, layout: PlainLayout) -> Certificate:
    """The certificate of the plain form that a layout of this network describes."""
    refuse_leaks(layout)
    if isinstance(net, CompiledNetwork):
        found = _compiled(net, layout)
    else:
        assert isinstance(net, CertifiedModule)
        found = net.recertify()
    lemmas = tuple(dict.fromkeys((*found.lemmas, "B6")))
    extra = (name for name in (UNDERFLOW, EXPLICIT) if name not in found.assumptions)
    return replace(found, lemmas=lemmas, assumptions=(*found.assumptions, *extra))


@torch.no_grad()
def compared(plain: PlainTransformer, net: nn.Module, layout: PlainLayout) -> Certificate:
    """For layers without a target: how far their plain form was from them at points of the box, measured."""
    refuse_leaks(layout)
    points = torch.cat([plain.box.sample(COMPARED, dtype=plain.dtype), plain.box.corners(16, plain.dtype)])
    measured = float((plain.core(points).double() - net(points).double()).abs().max())
    name = str(plain.dtype).removeprefix("torch.")
    return Certificate("calibrated", None, name, "the layers it was made from", plain.box, measured=measured)


def _compiled(net: CompiledNetwork, layout: PlainLayout) -> Certificate:
    before = net._certificate.bound if net._certificate is not None else None
    goal = max(net.eps, 1.05 * (before or 0.0))
    for stretch in STRETCHES:
        analysis = PlainPropagation(net, layout, stretch)
        found = network_bound(analysis, goal, net.rtol, EFFORT, net.grid)
        if math.isfinite(found.bound):
            return net.certificate_of(analysis, found)
    raise PrecisionError(
        f"no bound can be proved for the plain form in {str(layout.dtype).removeprefix('torch.')}: its folded weights "
        "round more than the heads allow; compile with a smaller eps, or with dtype=torch.float64"
    )


def refuse_leaks(layout: PlainLayout) -> None:
    """Raise `PrecisionError` unless every excluded key of every head weighs an exact 0."""
    u = unit(layout.dtype)
    for head in (head for heads in layout.layers for head in heads):
        slip = float(gamma(head.width + 4, u)) * (head.logit + head.hiding * head.omega)
        if not head.omega - 2.02 * head.logit - 4 * slip > DEAD[layout.dtype]:
            raise PrecisionError(
                f"'{head.purpose}' has logits up to {head.logit:.3g}: {layout.dtype} cannot tell them from what is "
                "excluded; compile with dtype=torch.float64"
            )


def recertified(plain: PlainTransformer, net: CertifiedModule) -> Certificate:
    """The certificate of present weights; `CertificateError` unless they are what the network's export gives."""
    from .plain_build import assembled

    if plain.dtype != net.dtype:
        raise CertificateError(
            f"the plain transformer is {plain.dtype} and the network it was made from {net.dtype}: convert the "
            "network, certify it, and export it again"
        )
    fresh, layout = assembled(net, plain.tokens, plain.causal, max(plain.spec.stream, plain.registers + plain.tokens))
    mine, built = plain.state_dict(), fresh.state_dict()
    changed = [name for name, tensor in built.items() if not torch.equal(mine[name].cpu(), tensor)]
    if changed or plain.spec != fresh.spec:
        raise CertificateError(
            f"{', '.join(changed) or 'the description'} of the plain transformer was changed since it was exported: "
            "the certificate is for the exported weights; train the network itself, certify it and export it again"
        )
    return certificate_of(net, layout)
