"""What all converted sites share: a range, a count of the values outside of it, one warning, precision that stays."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DomainError, DomainWarning

HALF = (torch.bfloat16, torch.float16)
EVERY = 32  # calls on an accelerator between two looks at the range


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype heads are evaluated in: half precision is widened, as norms and softmax are in most models."""
    return torch.float32 if dtype in HALF else dtype


def tracing() -> bool:
    """Whether a graph is being recorded: then checks and counters are left out of it."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast would round the logits of a head to half precision; inside a site it is off."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def _outside(values: Tensor, least: float, most: float) -> Tensor:
    return ((values < least) | (values > most) | values.isnan()).sum()


def outside(model: nn.Module) -> dict[str, int]:
    """How many values left the range of each site of a converted model so far, for sites where any did."""
    counts = {module.path: int(module.outside) for module in model.modules() if isinstance(module, SiteModule)}
    return {path: count for path, count in counts.items() if count}


class SiteModule(nn.Module):
    """Base of the modules that stand where a nonlinearity stood.

    `outside` counts the values that left [low, high] since the conversion or the last `outside.zero_()`.
    """

    outside: Tensor

    def __init__(self, path: str, low: float, high: float, strict: bool, what: str, everywhere: bool = False):
        super().__init__()
        self.path, self.low, self.high, self.strict, self.what = path, low, high, strict, what
        self.warned = everywhere  # heads that are right on the whole line have nothing to warn about, only to count
        self.calls = 0
        self.register_buffer("outside", torch.zeros((), dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def watch(self, values: Tensor, least: float | None = None, most: float | None = None, what: str = "") -> None:
        """Count what lies outside the range; warn once, or raise if `strict`. NaN goes on its way and is counted."""
        least, most = self.low if least is None else least, self.high if most is None else most
        if (math.isinf(least) and math.isinf(most)) or not values.numel():
            return
        if values.device.type != "cpu" and not self.strict and not self._due():
            self.outside += _outside(values, least, most)  # nobody waits for the accelerator
            return
        low, high = (float(v) for v in torch.aminmax(values.detach()))
        if low >= least and high <= most:
            return
        count = int(_outside(values, least, most))
        self.outside += count
        told = (
            f"'{self.path}': {what or self.what} reaches {low if not low >= least else high:.6g}, "
            f"outside [{least:.6g}, {most:.6g}], "
            f"where its certificate holds ({count} of {values.numel()} values)"
        )
        if self.strict:
            raise DomainError(f"{told}; calibrate on such data, or with a larger margin")
        if not self.warned:
            self.warned = True
            warnings.warn(f"{told}; warned once per site, the module counts in .outside", DomainWarning, stacklevel=3)

    def _due(self) -> bool:
        """Looking at numbers on an accelerator means waiting for them: done now and then, until there was a warning."""
        self.calls += 1
        return not self.warned and self.calls % EVERY == 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves tables to other devices, but never to half precision: their accuracy is the accuracy of the site."""
        probe = fn(torch.zeros((), dtype=torch.float32))
        if probe.dtype not in HALF:
            return super()._apply(fn, recurse)
        kept = {id(t) for t in self.tables()}

        def careful(t: Tensor) -> Tensor:
            return t.to(probe.device) if id(t) in kept else fn(t)

        return super()._apply(careful, recurse)

    def tables(self) -> list[Tensor]:
        """The tensors that stay in the working precision."""
        return list(self.parameters())
