"""A cheap check at the end of a compilation: are the modules the ones whose code is known to be attention-only?"""

from __future__ import annotations

import inspect
from pathlib import Path

from torch import nn

from attnforge.purity.census import Offence, refusal

# By name, not by class: the runtime is above this module, and a subclass may do anything in its forward.
KNOWN = frozenset(
    {f"attnforge.network.{name}" for name in ("Heads", "AttentionLayer", "AttentionOnly")}
    | {f"torch.nn.modules.linear.{name}" for name in ("Linear", "Identity")}
    | {f"torch.nn.modules.container.{name}" for name in ("ModuleList", "Sequential")}
    | {"torch.nn.modules.sparse.Embedding", "torch.nn.modules.dropout.Dropout"}
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def structural(net: nn.Module) -> None:
    """Raise `PurityError` unless every submodule is of a class known to be attention-only, unchanged.

    This reads class names and runs nothing; `purity` looks at what is computed.

    >>> structural(nn.Sequential(nn.Linear(2, 2), nn.Identity()))
    """
    found = [
        Offence(type(module).__name__, why, _defined(type(module)), path)
        for path, module in net.named_modules()
        if (why := _objection(module))
    ]
    if found:
        raise refusal(type(net).__name__, found, "attnforge.purity(net) lists the operations these modules compute")


def _objection(module: nn.Module) -> str:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    if name not in KNOWN:
        return f"{name} is not in the table of attention-only modules"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has forward hooks, which may compute anything"
    return ""


def _defined(kind: type) -> str:
    try:
        lines, start = inspect.getsourcelines(kind)
        return f"{Path(inspect.getfile(kind)).name}:{start}  {lines[0].strip()}"
    except (OSError, TypeError):  # classes made at a prompt have no source
        return ""
