"""Converted norms: the heads of section G1, evaluated with the row's own products kept small.

All heads of a norm read the same value c, the centred row, with weights that depend on v = c.c/d alone. So their mix is
c times one number S(v) = sum_j a_j sigmoid(b_j - s_j v), and evaluating it costs d + H operations a row instead of d H.
`NativeNorm` computes that; while a graph is traced it spells out the attention it equals. Sums are taken in two stages,
so that a term goes through about 2 sqrt(d) roundings whatever order the processor adds in, and the certificate of the
weights counts those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..certificates.rounding import UNIT, gamma, up
from ..dtypes import dtype_name, transformed, transforming
from ..heads.gpu import INPUTS, compiles, ready, rows
from ..heads.gpu.launch import relaunching
from ..heads.norm.bound import Roundings
from ..heads.norm.fused import is_constant, normed_rows, stages, watched_norm
from ..heads.norm.head import NormHead
from ..native import norm as processor
from ..network import exporting, known
from .site import ROUGHLY, SiteModule, full_precision, tell_unwatched, tracing, working

# while tracing: a constant of the program; kernels have no rules for torch.func
_kernels_for = known(lambda device: compiles(device) and not transforming())
CHUNK = 1 << 17  # row entries evaluated at once, without gradients: intermediate rows stay in the cache


class NativeNorm(NormHead):
    """A norm head whose mix over heads is evaluated first.

    >>> norm = NativeNorm.fit(384, (0.4, 130.0))
    >>> x = torch.randn(2, 384, generator=torch.Generator().manual_seed(0))
    >>> exact = torch.nn.functional.layer_norm(x.double(), (384,))
    >>> bool(((norm(x) - exact).abs().amax(-1) <= norm.bound * exact.abs().amax(-1)).all())
    True
    """

    family = ""  # a way of evaluating norm heads, not another family

    def core(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        return self.evaluate(x, None, None)[0]

    def evaluate(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The normed rows, and of every row its variance and (layer norm) its mean."""
        return normed_rows(x, (self.scale, self.shift, self.mix), weight, bias, self.kind == "layer", False)

    def explicit(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The same as the attention it is: for every head a self slot, logit shift - scale c.c and value c, and a sink
        of logit 0 and value 0; then the mix."""
        c = x
        if self.kind == "layer":
            c = x - self._sum(x) / self.channels
            c = c - self._sum(c) / self.channels
        blocks = c.unflatten(-1, stages(self.channels))  # c.c in two stages, query against key
        square = (blocks.unsqueeze(-2) @ blocks.unsqueeze(-1)).flatten(-3).sum(-1, keepdim=True)
        logit = self.shift - self.scale * square
        weights = torch.softmax(torch.stack([logit, torch.zeros_like(logit)], dim=-1), dim=-1)
        out = (self.mix.unsqueeze(0) @ (weights[..., :1] @ c.unsqueeze(-2))).squeeze(-2)
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def _sum(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, stages(self.channels)).sum(-1).sum(-1, keepdim=True)

    def on_kernels(self) -> bool:
        """Whether a GPU's kernel takes these rows, with no more roundings than the certificate counts."""
        return self._counted(rows.roundings(self.channels)) and self.channels <= rows.WIDEST

    def on_a_processor(self) -> bool:
        """The same of the kernel for processors."""
        return self._counted(processor.roundings(self.channels))

    def _counted(self, additions: int) -> bool:
        """Whether sums of so many additions, and a division after them or a product before, are within `roundings`."""
        return self.scale.dtype == torch.float32 and additions + 1 <= self.roundings().mean

    def roundings(self) -> Roundings:
        """Two stages of sums, in any order each; heads mixed in any order, and one product with the value."""
        outer, inner = stages(self.channels)
        return Roundings(outer + inner - 1, outer + inner - 1, self.heads + 2)


@dataclass(frozen=True)
class KeptNorm:
    """A norm ready for a kernel, and the weight and bias it is of: kernels read them where they are."""

    of: nn.Parameter | None
    beside: nn.Parameter | None
    outside: Tensor
    again: Callable[[Tensor], Tensor | None]

    def wants(self) -> bool:
        """Whether either wants gradients."""
        of, beside = self.of, self.beside
        return (of is not None and of.requires_grad) or (beside is not None and beside.requires_grad)


class ConvertedNorm(SiteModule):
    """Layer norm or rms norm of a converted model, under the names of the module it stands for.

    `weight` and `bias` are the model's own parameters. `unit` adds 1 to the weight, as Gemma's norms do.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        head: NativeNorm,
        shape: tuple[int, ...],
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        path: str,
        strict: bool = False,
        unit: bool = False,
    ):
        super().__init__(path, *head.variance, strict, "variance" if head.kind == "layer" else "mean square")
        self.normalized_shape, self.eps, self.unit = tuple(shape), head.eps_norm, unit
        self.variance_epsilon = self.eps  # what some models call it
        self.head = head.requires_grad_(False)  # a fit over decades: the step of an optimiser would wreck it
        self._kept: KeptNorm | None = None
        self._on_kernels, self._on_a_processor = head.on_kernels(), head.on_a_processor()
        self._blocks = rows.blocks(head.channels, head.heads)
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def tables(self) -> list[Tensor]:
        return list(self.head.parameters())

    def forward(self, input: Tensor, *unused: Any) -> Tensor:
        if (out := self._again(input)) is not None:
            return out
        if self._on_kernels and (self.counts(input, processors=False) or self._compiled(input)):
            return self._by_kernel(input)
        if self._on_a_processor and not self._training(input) and self.counts(input):
            return self._by_kernel(input)
        table = self.head.scale.dtype
        x = input.to(table) if input.dtype != table else input
        weight, bias = (None if p is None else p.to(table) for p in (self.weight, self.bias))
        if self.unit and weight is not None:
            weight = weight + 1.0
        if len(self.normalized_shape) > 1:
            x = x.flatten(-len(self.normalized_shape))
            weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        with full_precision(x):
            if exporting():
                out = self.head.explicit(x, weight, bias)
            elif tracing():
                out = self._checked(x, weight, bias)
            else:
                out = self._native(x, weight, bias)
        out = out.unflatten(-1, self.normalized_shape) if len(self.normalized_shape) > 1 else out
        return out.to(input.dtype) if out.dtype != input.dtype else out

    def _again(self, x: Tensor) -> Tensor | None:
        """What the kernel that was used last makes of x: little is asked, since small models wait for launches."""
        kept, given = self._kept, self._parameters
        if kept is None or self.strict or tracing() or transformed(x) or kept.outside is not self._buffers["outside"]:
            return None
        if kept.of is not given["weight"] or kept.beside is not given["bias"] or len(self.normalized_shape) > 1:
            return None
        if torch.is_grad_enabled() and kept.wants():
            return None
        out = kept.again(x)
        if out is not None and not self.warned:
            self._look_again(x)
        return out

    def _compiled(self, x: Tensor) -> bool:
        """Whether a compiled program calls the kernel: on a GPU, where no gradients are wanted."""
        if not torch.compiler.is_compiling() or exporting() or not x.is_cuda or self._training(x) or self.strict:
            return False
        return x.dtype in INPUTS and x.numel() > 0 and _kernels_for(x.device)

    def _training(self, x: Tensor) -> bool:
        """Whether gradients are wanted."""
        given = (x, self.weight, self.bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)

    def _by_kernel(self, input: Tensor) -> Tensor:
        wide = len(self.normalized_shape)
        x = input.flatten(-wide) if wide > 1 else input
        if torch.compiler.is_compiling():
            tell_unwatched()
            return self._called(x).unflatten(-1, self.normalized_shape) if wide > 1 else self._called(x)
        out = self._kernel_anew(x)
        if not self.warned:
            self._look_again(x)
        return out.unflatten(-1, self.normalized_shape) if wide > 1 else out

    def _look_again(self, x: Tensor) -> None:
        """Now and then: whether the kernel has counted, and what."""
        if self._due() and int(self.outside) > self.told:
            before, self.calls = self.outside.clone(), 0
            with torch.no_grad():
                self._checked(x.float(), None, None)
            self.outside.copy_(before)  # the kernel has counted these
            self.told = int(before)

    def _called(self, x: Tensor) -> Tensor:
        from ..heads.gpu.norm import compiled_rows

        head = self.head
        weight, bias = (None if p is None else p.flatten() if p.dim() > 1 else p for p in (self.weight, self.bias))
        table, layer = (head.scale, head.shift, head.mix), head.kind == "layer"
        return compiled_rows(x, table, weight, bias, layer, self.unit, self._blocks)

    def _kernel_anew(self, x: Tensor) -> Tensor:
        head, layer = self.head, self.head.kind == "layer"
        weight, bias = (None if p is None else p.flatten() if p.dim() > 1 else p for p in (self.weight, self.bias))
        table, limits = (head.scale, head.shift, head.mix), (self.low, self.high, head.offset)
        if self._training(x):
            return watched_norm(x, table, weight, bias, self.outside, layer, self.unit, limits)
        if not ready(x):
            norming = processor.Norming(table, weight, bias, layer, self.unit, head.channels, self.outside, limits)
            self._kept = KeptNorm(self.weight, self.bias, self.outside, norming.again())
            return norming(x)
        from ..heads.gpu import norm

        fixed = norm.norming(table, weight, bias, layer, self.unit, head.channels, self.outside, limits)
        self._kept = KeptNorm(self.weight, self.bias, self.outside, relaunching(fixed, -head.channels))
        return norm.forward(x, fixed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._kept = None
        return super()._apply(fn, recurse)

    def _native(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        step = max(1, CHUNK // self.head.channels)
        if torch.is_grad_enabled() or x.numel() <= step * x.shape[-1]:
            return self._checked(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        for part, piece in zip(rows.split(step), out.split(step), strict=True):
            piece.copy_(self._checked(part, weight, bias))
        return out.reshape(x.shape)

    def _checked(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        out, square, mean = self.head.evaluate(x, weight, bias)
        with torch.no_grad():
            variance = square.detach() / self.head.channels
            place = torch.zeros_like(variance) if mean is None else mean.detach().abs()
            constant = is_constant(variance, place)
            self.look(torch.where(constant, self.low, variance))
            if mean is not None:
                ratio = torch.where(constant, 0.0, place / variance.sqrt())
                self.look(ratio, 0.0, self.head.offset, "mean of a row, in standard deviations,")
        return out

    def site_bound(self, dtype: torch.dtype) -> tuple[float, float]:
        """The certified sup error and the scale of the outputs, in the dtype the site hands on.

        A normalised row has entries of at most sqrt(d); the head's bound is relative to |weight| of that plus |bias|.
        """
        head, u = self.head, UNIT[working(dtype)]
        assert head.bound is not None
        # weight and bias: two roundings; 1 + weight: one
        relative = up(head.bound + gamma(3, u) * (1 + head.bound), ROUGHLY)
        if dtype != working(dtype):
            relative = up(relative + UNIT[dtype] * (1 + relative), ROUGHLY)
        weight = torch.ones(1) if self.weight is None else self.weight.detach().double().cpu() + float(self.unit)
        bias = torch.zeros(1) if self.bias is None else self.bias.detach().double().cpu()
        scale = float((weight.abs() * math.sqrt(head.channels) + bias.abs()).max()) or 1.0
        return float(up(relative * scale, ROUGHLY)), scale

    def config(self) -> dict[str, Any]:
        """What rebuilds this module besides its tensors."""
        return {
            "head": self.head.config(),
            "heads": self.head.heads,
            "shape": list(self.normalized_shape),
            "unit": self.unit,
            "weight": self.weight is not None,
            "bias": self.bias is not None,
            "dtype": dtype_name(self.head.dtype),
        }

    def extra_repr(self) -> str:
        held = f"{self.what} in [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.normalized_shape}, eps={self.eps}, {self.head.heads} heads, certified for {held}"
