"""Convert pretrained networks: the same model, with attention in place of every other nonlinearity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .record import Conversion

__all__ = ["convert"]


def convert(
    model: nn.Module,
    calibration: Any = None,
    *,
    level: str = "ffn",
    eps: float = 1e-4,
    anchors: int | None = None,
    cold: bool = False,
    margin: float = 2.0,
    variance_margin: float = 30.0,
    leave: Any = (),
    strict: bool = False,
    fast: bool = True,
) -> tuple[nn.Module, Conversion]:
    """A copy of `model` whose nonlinearities are attention heads, and the report of what was done.

    `level="ffn"` replaces activation functions, `"pure"` every nonlinearity, norms and gated units included, so that
    softmax attention is the only nonlinear operation left. `calibration` is an iterable of batches (dict = keyword
    arguments, tuple or tensor), or a single batch; ranges come from it, widened by `margin` (activations) and
    `variance_margin` (norms). `eps` is the sup error of each site relative to the site's output scale. `anchors` forces
    the size of the tables, `cold` builds the paper's cold heads. `leave` names paths (patterns such as "*.pooler.*")
    that stay as they are. `strict` raises on values outside a site's range instead of warning once.

    Weights that do not change are shared with the original, which is not touched.

    >>> import torch
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    >>> converted, report = convert(mlp, torch.randn(64, 2), eps=1e-5)
    >>> report.by_operation, report.worst <= 1e-5, converted[0].weight is mlp[0].weight
    ({'gelu': 1}, True, True)
    """
    from .engine import convert as run

    return run(
        model,
        calibration,
        level=level,
        eps=eps,
        anchors=anchors,
        cold=cold,
        margin=margin,
        variance_margin=variance_margin,
        leave=leave,
        strict=strict,
        fast=fast,
    )
