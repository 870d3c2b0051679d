"""The derivation of a black box on a grid, which leaves no choices, and its proof by the kernel (docs/kernel.md)."""

from __future__ import annotations

from ..certificates.certificate import Certificate
from ..certificates.certified import CertifiedModule
from ..certificates.proof import settled


def proved(net: CertifiedModule, certificate: Certificate) -> Certificate:
    """A grid's certificate after the kernel has been run on what `save` writes of it."""
    return settled(net, certificate, lambda saved, bound: {})
