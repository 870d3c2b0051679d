"""Run by `test_gpu` in a process of its own, with Triton's interpreter on: kernels against exact arithmetic, on a CPU.

Prints one JSON object: for every check the largest error found and what it may be.
"""

from __future__ import annotations

import copy
import json
import pickle

import torch
from torch import Tensor
from torch.nn import functional

from attnforge.conversion.norm import ConvertedNorm, NativeNorm
from attnforge.conversion.site import ConvertedActivation, ConvertedProduct
from attnforge.heads import ProductHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.fast.read import anchor_read, softmax_read, watched_read
from attnforge.heads.gpu import interprets, ready
from attnforge.heads.norm.fused import watched_norm
from attnforge.heads.product.fused import watched_product

FOUND: dict[str, list[float]] = {}
#: Of the result. The interpreter cuts to bfloat16 where GPUs round to nearest (2^-8): a whole unit in the last place.
HALVES = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}


def check(name: str, found: Tensor, wanted: Tensor, allowed: Tensor | float) -> None:
    """Keep the largest excess over what is allowed, and the largest error."""
    error = (found.detach().double() - wanted.detach()).abs()
    FOUND[name] = [float(error.max()), float((error - allowed).max())]


def activations() -> None:
    for name in ("gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "softplus", "mish", "relu"):
        head = FastActivation.fit(name, -16, 16)
        for dtype, half in HALVES.items():
            y = torch.cat([torch.linspace(-16, 16, 3001), torch.tensor([-0.0, 1e-30, 17.0, -40.0])]).to(dtype)
            assert ready(y) and head.bound is not None
            outside = torch.zeros((), dtype=torch.int64)
            out = head.watched(y, outside, -8.0, 8.0)
            wanted = head.function.value(y[:-2].double())
            check(f"{name} {dtype}", out[:-2], wanted, head.bound + half * (wanted.abs() + head.bound) + 1e-7 * half)
            assert int(outside) == int(((y < -8) | (y > 8)).sum())
        if head.table.anchors:
            gradients(head)


def gradients(head: FastActivation) -> None:
    t, generator = head.table, torch.Generator().manual_seed(0)
    y, grad = (torch.randn(700, generator=generator) for _ in range(2))
    y, value = y.requires_grad_(), head.values.clone().requires_grad_()
    anchor_read(y, value, t.rate, t.kappa, t.centre, t.gate).backward(grad)
    exact_y, exact_value = (x.detach().double().requires_grad_() for x in (y, value))
    softmax_read(exact_y, exact_value, t.rate, t.kappa, t.centre, t.gate).backward(grad.double())
    for what, found, wanted in (("y", y.grad, exact_y.grad), ("values", value.grad, exact_value.grad)):
        assert found is not None and wanted is not None
        check(f"{head.function.name}, gradient of {what}", found, wanted, 2e-5 * wanted.abs().max())


def products() -> None:
    generator = torch.Generator().manual_seed(0)
    for x_side, y_side in (((-1.0, 1.0), (-2.0, 2.0)), ((-0.3, 30.0), (-5.0, 50.0)), ((1.0, 2.0), (3.0, 4.0))):
        head = ProductHead.fit(x_side, y_side)
        x, y = (lo + (hi - lo) * torch.rand(2001, generator=generator) for lo, hi in (x_side, y_side))
        one, other = (y, x) if head.swapped else (x, y)
        first, second = (y_side, x_side) if head.swapped else (x_side, y_side)
        one, other = one.requires_grad_(), other.requires_grad_()
        outside = torch.zeros((), dtype=torch.int64)
        out = watched_product(one, other, outside, head.nodes, head.spec.gain, head.spec.centre, first, second)
        name = f"product on {x_side} x {y_side}"
        check(name, out, one.double() * other.double(), head.fused_bound())
        assert int(outside) == 0
        grad = torch.randn(2001, generator=generator)
        found = torch.autograd.grad(out, (one, other), grad)
        for what, one_found, wanted in zip("xy", found, (grad.double() * other, grad.double() * one), strict=True):
            check(f"{name}, gradient of {what}", one_found, wanted.detach(), 1e-5 * float(wanted.abs().max()))


def norms() -> None:
    generator = torch.Generator().manual_seed(0)
    for channels in (8, 24, 768):
        for kind in ("layer", "rms"):
            norm = NativeNorm.fit(channels, (0.4, 130.0), kind=kind)
            assert norm.bound is not None and norm.on_kernels()
            x = (2 * torch.randn(6, channels, generator=generator)).requires_grad_()
            weight, bias = (torch.randn(channels, generator=generator).requires_grad_() for _ in range(2))
            outside, limits = torch.zeros((), dtype=torch.int64), (0.4, 130.0, 100.0)
            table = norm.scale.detach(), norm.shift.detach(), norm.mix.detach()
            out = watched_norm(x, table, weight, bias, outside, kind == "layer", False, limits)
            exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
            shape = (channels,)
            norm_of = functional.layer_norm if kind == "layer" else functional.rms_norm
            plain = norm_of(exact[0], shape, eps=1e-5)
            wanted = plain * exact[1] + exact[2]
            size = plain.detach().abs().amax(-1, keepdim=True) * exact[1].abs() + exact[2].abs()
            check(f"{kind} norm of {channels}", out, wanted, (norm.bound + 4 * 2.0**-24) * size.detach())
            assert int(outside) == 0
            grad = torch.randn(6, channels, generator=generator)
            found = torch.autograd.grad(out, (x, weight, bias), grad)
            true = torch.autograd.grad(wanted, exact, grad.double())
            for what, one, other in zip(("x", "weight", "bias"), found, true, strict=True):
                check(f"{kind} norm of {channels}, gradient of {what}", one, other, 1e-5 * float(other.abs().max()))
            far = torch.cat([x.detach()[:2], 100 * x.detach()[2:3], torch.full((1, channels), 3.0)])
            watched_norm(far, table, None, None, outside, kind == "layer", False, limits)
            assert int(outside) == 1, (
                kind,
                channels,
                int(outside),
            )  # the large row; a constant one has nothing to norm


def copies() -> None:
    """Modules that a kernel was made ready for are pickled and copied without it, and count on."""
    y = torch.linspace(-4, 4, 96).reshape(4, 24)
    fast = FastActivation.fit("gelu", -8, 8).requires_grad_(False)
    product = ConvertedProduct(ProductHead.fit((-8, 8), (-8, 8)), "product")
    norm = ConvertedNorm(NativeNorm.fit(24, (0.01, 100.0), kind="layer"), (24,), None, None, "norm")
    calls = {
        "activation": (ConvertedActivation(fast, "gelu", -8.0, 8.0, "activation"), (y,)),
        "product": (product, (y, y.flip(0))), "norm": (norm, (y,)),
    }  # fmt: skip
    for name, (module, given) in calls.items():
        with torch.no_grad():
            wanted = module(*given)
            kept = getattr(module, "_kept", None) or getattr(getattr(module, "head", None), "_kept", None)
            assert kept is not None, name
            for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
                check(f"{name}, copied", other(*given), wanted.double(), 0.0)


def numbers_that_are_none() -> None:
    outside = torch.zeros((), dtype=torch.int64)
    y = torch.tensor([float("nan"), 0.5, float("inf")])
    out = watched_read(y, torch.ones(3), outside, 1.0, 0.25, 0.0, 0.0, True, -8.0, 8.0)
    assert int(outside) == 2 and bool(out[0].isnan()) and float(out[1]) == 1.0


if __name__ == "__main__":
    assert interprets()
    activations()
    products()
    norms()
    copies()
    numbers_that_are_none()
    print(json.dumps(FOUND))
