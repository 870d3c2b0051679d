"""Running the kernel on what `save` writes, and what a certificate says after that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import CertificateError
from ..kernel.balls import NotProved
from ..kernel.file import Saved, parse
from ..kernel.prove import prove
from .certificate import Certificate
from .certified import CertifiedModule


def settled(
    net: CertifiedModule,
    certificate: Certificate,
    choose: Callable[[Saved, float], dict[str, Any]],
    wrong: Callable[[dict[str, Any]], str] = lambda chosen: "",
) -> Certificate:
    """A network's certificate after the kernel has been run, with its own derivation or the one that is chosen.

    The network keeps the derivation. Where the kernel proves the bound, that is what the bound comes from; where it
    refuses a derivation that was made here, the remark says why, and the bound is the analysis's alone. `wrong` says
    what in a derivation is not so of the network.
    """
    bound = certificate.bound
    assert bound is not None
    try:
        saved = parse(net.written())
        chosen = net.derivation if net.derivation is not None else choose(saved, bound)
        if wrong(chosen):
            raise CertificateError(wrong(chosen))
        found = prove(saved, chosen)
    except CertificateError as error:
        if net.derivation is not None and not isinstance(error, NotProved):
            raise  # the file's own choices do not fit it
        return replace(certificate, proof="analysis", kernel=None, remark=net.beyond or str(error))
    if found.hypothesis != certificate.hypothesis:
        said = f"the kernel's proof has another hypothesis than the analysis: {found.hypothesis!r}"
        return replace(certificate, proof="analysis", kernel=None, remark=said)
    net.derivation = chosen
    return replace(certificate, proof="kernel" if found.bound <= bound else "analysis", kernel=found.bound, remark="")
