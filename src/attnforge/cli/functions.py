"""`attnforge functions`: what `attnforge head` can build, and where each function is defined."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from .common import AS_JSON, say, say_json, table

if TYPE_CHECKING:
    from ..functions.registry import Domain

EXAMPLES = ("power(2.5)", "leaky_relu(0.2)", "elu(1.5)", "piecewise_linear([-1, 0, 1], [0, 1, 0])")


def functions(
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """List the registered functions with their domains."""
    from ..functions import registry

    found = [registry.get(name) for name in registry.names()]
    if as_json:
        columns = ((f.name, domain_text(f.domain), f.knots, f.potentials) for f in found)
        say_json({name: {"domain": d, "kinks": k, "potentials": p} for name, d, k, p in columns})
        return
    rows = [
        (f.name, domain_text(f.domain), ", ".join(f"{k:g}" for k in f.knots) or "-", ", ".join(f.potentials))
        for f in found
    ]
    table(("function", "defined for", "kinks at", "potentials"), rows)
    say(f"\nand, with arguments: {', '.join(EXAMPLES)}")


def domain_text(domain: Domain) -> str:
    """Where a function is defined, in words.

    >>> from attnforge.functions import registry
    >>> domain_text(registry.get("log").domain), domain_text(registry.get("asin").domain)
    ('y > 0', '-1 <= y <= 1')
    """
    text = "y"
    if math.isfinite(domain.lo):
        text = f"y {'>=' if domain.lo_closed else '>'} {domain.lo:g}"
        if math.isfinite(domain.hi):
            text = f"{domain.lo:g} {'<=' if domain.lo_closed else '<'} y"
    if math.isfinite(domain.hi):
        text += f" {'<=' if domain.hi_closed else '<'} {domain.hi:g}"
    poles = " and ".join(f"{p:g}" for p in domain.poles)
    if domain.period is not None:
        poles += f" + k * {domain.period:g}"
    if not poles:
        return "all y" if text == "y" else text
    return f"y != {poles}" if text == "y" else f"{text}, y != {poles}"
