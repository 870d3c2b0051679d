"""The one table of head families. A family is a folder; this is the only place that knows their names.

A family's folder has three modules: `site` with its `SITES`, `rule` with its `RULES` and `construction` with its
`BUILDERS`, each by the family's name. They are loaded when they are asked for, so that whoever checks a network loads
sites and rules, and never anything that builds weights.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..errors import ArgumentError, closest

if TYPE_CHECKING:
    from .construction import HeadBuilder
    from .rule import Rule
    from .site import Site

#: Family -> folder. The order is that in which the planner asks them; `register` puts a family of others in front.
FAMILIES: dict[str, str] = {
    "square": "attnforge.heads.product",
    "product": "attnforge.heads.product",
    "gate": "attnforge.heads.gate",
    "anchor": "attnforge.heads.anchor",
    "norm": "attnforge.heads.norm",
    "softmax": "attnforge.heads.token",
    "attention": "attnforge.heads.token",
    "mix": "attnforge.heads.token",
    "max": "attnforge.heads.token",
}


def register(family: str, folder: str) -> None:
    """Add a family from outside: the dotted name of a package with modules `site`, `rule` and `construction`."""
    if FAMILIES.get(family, folder) != folder:
        raise ArgumentError(f"there is a family '{family}' already, in {FAMILIES[family]}; choose another name")
    others = {name: place for name, place in FAMILIES.items() if name != family}
    FAMILIES.clear()
    FAMILIES.update({family: folder, **others})


def site_type(family: str) -> type[Site]:
    """The type of a family's sites."""
    found: type[Site] = _module(family, "site").SITES[family]
    return found


def rule_of(family: str) -> Rule:
    """The error analysis of a family."""
    found: Rule = _module(family, "rule").RULES[family]
    return found


def builder_of(family: str) -> HeadBuilder:
    """Planning and weights of a family."""
    found: HeadBuilder = _module(family, "construction").BUILDERS[family]
    return found


def _module(family: str, part: str):  # type: ignore[no-untyped-def]
    if family not in FAMILIES:
        hint = closest(family, FAMILIES)
        raise ArgumentError(f"there is no head family '{family}'{hint}; known: {', '.join(FAMILIES)}")
    return importlib.import_module(f"{FAMILIES[family]}.{part}")
