"""The modules that stand where activations, products and gated units stood (`norm` has those of norms).

They share a range, a count of the values outside of it, one warning, and tables whose precision stays, whatever the
dtype of the model around them.

Gated units, down(act(gate(x)) * up(x)), are SwiGLU, GEGLU and their kin. Their product stands in their own `forward`,
where no submodule can be exchanged. So the whole unit is replaced by one that computes the same with the same children
under the same names, and with a product that is a module.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without loading the compiler

from .. import native
from ..certificates.certified import CertifiedModule
from ..certificates.rounding import UNIT, up
from ..dtypes import transformed
from ..errors import CertificateError, DomainError, DomainWarning
from ..heads import ProductHead
from ..heads.fast.activation import FastActivation
from ..heads.gpu import ready
from ..heads.product.fused import kept_product, together, watched_product
from ..network import exporting, known

HALF = (torch.bfloat16, torch.float16)  # dtypes in which no head is evaluated
EVERY = 32  # calls on an accelerator between two looks at the range: waiting for it then costs little
ROUGHLY = 8  # roundings in float64 that a bound of a few operations is moved up by


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype heads are evaluated in: half precision is widened, as norms and softmax are in most models."""
    return torch.float32 if dtype in HALF else dtype


def tracing() -> bool:
    """Whether a graph is being recorded: then checks and counters are left out of it."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


@known
def tell_unwatched() -> bool:
    """Warn, while a graph is compiled, that nobody will look at the ranges of a converted model; always True."""
    warnings.warn(
        "compiled, a converted model does not watch its ranges: values outside of them pass uncounted, and there the "
        "certificate says nothing; convert with strict=True to keep the guard, or run the model uncompiled first",
        DomainWarning,
        stacklevel=2,
    )
    return True


@_disable_dynamo
def _watch_outside(site: SiteModule, *given: Any) -> None:
    """The guard of a strict site under torch.compile: outside of its graph, so that it sees every call."""
    site.watch(*given)


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
    _kept: Any = None  # a kernel ready for this device

    def __init__(self, path: str, low: float, high: float, strict: bool, what: str, everywhere: bool = False):
        super().__init__()
        self.path, self.low, self.high, self.strict, self.what = path, low, high, strict, what
        self.warned = everywhere  # heads that are right on the whole line have nothing to warn about, only to count
        self.calls = 0
        self.told = 0  # what `outside` was when it was last looked at
        self.register_buffer("outside", torch.zeros((), dtype=torch.int64), persistent=False)

    def counts(self, x: Tensor, processors: bool = True) -> bool:
        """Whether a kernel evaluates this call and counts what lies outside the range on its way: of a GPU, or of a
        processor where there is one."""
        if self.strict or tracing() or self.outside.device != x.device:
            return False
        return ready(x) or (processors and native.ready(x))

    def counted(self, *values: tuple[Tensor, float, float, str]) -> None:
        """After such a call: look at the count now and then, and warn if it grew. Each of `values` is one to watch."""
        if not self.warned and self._due() and int(self.outside) > self.told:
            before = self.outside.clone()
            for tensor, least, most, what in values:
                self.calls = 0  # look at once
                self.watch(tensor, least, most, what)
            self.outside.copy_(before)  # the kernel has counted these
            self.told = int(before)

    @torch.no_grad()
    def watch(self, values: Tensor, least: float | None = None, most: float | None = None, what: str = "") -> None:
        """Count what lies outside the range; warn once, or raise if `strict`. NaN goes on its way and is counted."""
        least, most = self.low if least is None else least, self.high if most is None else most
        if (math.isinf(least) and math.isinf(most)) or not values.numel() or transformed(values):
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

    def look(self, values: Tensor, *range_: Any) -> None:
        """`watch`; of what is compiled, only where the site is `strict`: elsewhere a warning says that nobody does."""
        if not tracing():
            self.watch(values, *range_)
        elif torch.compiler.is_compiling() and not exporting():
            if self.strict:
                _watch_outside(self, values, *range_)
            else:
                tell_unwatched()

    def _due(self) -> bool:
        """Looking at numbers on an accelerator means waiting for them: done now and then, until there was a warning."""
        self.calls += 1
        return not self.warned and (self.calls % EVERY == 1 or self.outside.device.type == "cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves tables to other devices, but never to half precision: their accuracy is the accuracy of the site."""
        probe = fn(torch.zeros((), dtype=torch.float32))
        if probe.dtype not in HALF:
            return super()._apply(fn, recurse)
        kept = {id(t) for t in self.tables()}

        def careful(t: Tensor) -> Tensor:
            return t.to(probe.device) if id(t) in kept else fn(t)

        return super()._apply(careful, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # a kernel that was made ready is of this process and this device

    def tables(self) -> list[Tensor]:
        """The tensors that stay in the working precision."""
        return list(self.parameters())


class ConvertedActivation(SiteModule):
    """An activation function as attention: one head (a few slots, shared by all channels) in the activation's place."""

    def __init__(self, head: CertifiedModule, function: str, low: float, high: float, path: str, strict: bool = False):
        super().__init__(path, low, high, strict, "the input", everywhere=right_everywhere(head))
        self.function, self.head = function, head

    def forward(self, input: Tensor) -> Tensor:
        if not tracing() and not self.strict:  # on a GPU small models wait for launches: little is asked first
            kept = getattr(self._modules["head"], "_kept", None)
            out = None if kept is None else kept(input, self._buffers["outside"], self.low, self.high)
            if out is not None:
                if not self.warned:
                    self.counted((input, self.low, self.high, self.what))
                return cast(Tensor, out)
        head = self.head
        if type(head) is FastActivation and self.counts(input):
            out = head.watched(input, self.outside, self.low, self.high)
            if not self.warned:
                self.counted((input, self.low, self.high, self.what))
            return out
        self.look(input)
        if tracing() and isinstance(head, FastActivation) and input.is_cuda and not exporting():
            return head.core(input)  # widened inside: a compiled program keeps no wide copy
        y = input.to(head.dtype) if input.dtype != head.dtype else input
        with full_precision(y):
            out = head.core(y)
        return out.to(input.dtype) if out.dtype != input.dtype else out

    def extra_repr(self) -> str:
        return f"{self.function}, certified on [{self.low:.4g}, {self.high:.4g}]"


class ConvertedProduct(SiteModule):
    """x times y by product heads (lemma C1), elementwise.

    `fused` allows kernels to evaluate both heads together, with the numbers of the lemma; the bound then covers that.
    """

    def __init__(self, head: ProductHead, path: str, strict: bool = False, fused: bool = True):
        super().__init__(path, *head.box["y"], strict, "the second factor")
        self.head = head.requires_grad_(False)  # the numbers of a lemma: the step of an optimiser would wreck it
        self.fused = fused and head.method == "gauss" and head.width is None
        self._kept: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.fused and x.dtype == y.dtype and self.counts(x, processors=False):
            out = self._together(x, y)
            self.counted((x, *self.head.box["x"], "the first factor"), (y, self.low, self.high, self.what))
            return out
        self.look(x, *self.head.box["x"], "the first factor")
        self.look(y)
        given, table = x.dtype, self.head.dtype
        if given != table:
            x, y = x.to(table), y.to(table)
        with full_precision(x):
            out = together(self.head, x, y) if tracing() and self.fused and not exporting() else self.head.core(x, y)
        return out.to(given) if given != table else out

    def _together(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = (y, x) if self.head.swapped else (x, y)
        wanted = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
        if not wanted and self._kept is not None:
            return self._kept(one, other)
        head, box = self.head, self.head.box
        first, second = (box["y"], box["x"]) if head.swapped else (box["x"], box["y"])
        numbers = (head.nodes, head.spec.gain, head.spec.centre, first, second)
        self._kept = kept_product(x, self.outside, *numbers) if self._kept is None else self._kept
        return watched_product(one, other, self.outside, *numbers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._kept = None
        return super()._apply(fn, recurse)

    def site_bound(self, dtype: torch.dtype) -> float:
        """The certified sup error of the product in the dtype the site hands on, whichever way it is evaluated."""
        head, sizes = self.head, [max(map(abs, self.head.box[name])) for name in ("x", "y")]
        bound = head.bound
        assert bound is not None
        if self.fused:
            if changed := head.differing():
                raise CertificateError(f"the numbers of a product are fixed, and {', '.join(changed)} changed")
            bound = max(bound, head.fused_bound())
        return handed_on(bound, sizes[0] * sizes[1], dtype)


def right_everywhere(head: CertifiedModule) -> bool:
    """Whether a head goes on as its function does beyond its interval: a gate, and a bump that has decayed."""
    return isinstance(head, FastActivation)


def handed_on(bound: float, size: float, dtype: torch.dtype) -> float:
    """A bound in the working precision, plus the rounding to the model's dtype of outputs up to `size`."""
    if dtype == working(dtype):
        return bound
    return float(up(bound + UNIT[dtype] * (size + bound), ROUGHLY))


def with_jump(bound: float, jump: float) -> float:
    """A bound to a smooth function as one to the function that a site had, which jumps by at most so much."""
    return math.nextafter(bound + jump, math.inf) if jump else bound


def describe(head: CertifiedModule) -> dict[str, Any]:
    """What rebuilds a head besides its tensors: its family and its configuration."""
    return {"family": head.family, "config": head.config()}


@dataclass(frozen=True)
class Roles:
    """The children of a gated unit by role; without `up` the projection `gate` yields both halves.

    `first` says whether the activated half comes first.
    """

    gate: str
    up: str | None
    down: str
    act: str
    dropout: str | None = None
    first: bool = True

    def fits(self, module: nn.Module) -> bool:
        children = dict(module.named_children())
        wanted = {name for name in (self.gate, self.up, self.down, self.dropout) if name is not None}
        # An activation may be a plain function, which is no child.
        return wanted <= children.keys() and callable(getattr(module, self.act, None))


KNOWN_UNITS = (
    Roles("gate_proj", "up_proj", "down_proj", "act_fn"),  # Llama, Mistral, Qwen, Gemma
    Roles("gate_up_proj", None, "down_proj", "activation_fn"),  # Phi-3
    Roles("wi_0", "wi_1", "wo", "act", "dropout"),  # T5 1.1
    Roles("w1", "w3", "w2", "act_fn"),  # experts of Mixtral
    Roles("Wi", None, "Wo", "act", "drop"),  # ModernBERT
)


class GatedUnit(nn.Module):
    """A gated unit whose product is the module `product`; all other children are those of the original."""

    def __init__(self, roles: Roles, children: Mapping[str, nn.Module], act: Any, product: nn.Module):
        super().__init__()
        self.roles = roles
        for name, child in children.items():
            self.add_module(name, child)
        setattr(self, roles.act, act)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        roles = self.roles
        inner = self.get_submodule(roles.gate)(x)
        if roles.up is not None:
            gate, up = inner, self.get_submodule(roles.up)(x)
        else:
            halves = inner.chunk(2, dim=-1)
            gate, up = halves if roles.first else halves[::-1]
        hidden = self.product(getattr(self, roles.act)(gate), up)
        if roles.dropout is not None:
            hidden = self.get_submodule(roles.dropout)(hidden)
        return cast(Tensor, self.get_submodule(roles.down)(hidden))

    @staticmethod
    def config_of(roles: Roles) -> dict[str, Any]:
        """The roles as JSON holds them."""
        return asdict(roles)


class Multiply(nn.Module):
    """The plain product, for looking at what a unit multiplies before heads take over."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def rebuilt(module: nn.Module, roles: Roles, product: nn.Module) -> GatedUnit:
    """The unit with `product` in it, over the children of `module`."""
    children = dict(module.named_children())
    unit = GatedUnit(roles, children, getattr(module, roles.act), product)
    return unit.train(module.training)


@torch.no_grad()
def gated_roles(module: nn.Module) -> Roles | None:
    """Which child does what in a gated unit; None for another module. By their names, then by values on random rows."""
    for roles in KNOWN_UNITS:
        if not roles.fits(module):
            continue
        weight = module.get_submodule(roles.gate).get_parameter("weight")
        x = torch.randn(5, weight.shape[-1], generator=torch.Generator().manual_seed(0))
        x = x.to(weight.device, weight.dtype)
        training = module.training
        module.eval()
        try:
            for flipped in (roles, Roles(**{**asdict(roles), "first": False})):
                wanted, found = module(x), rebuilt(module, flipped, Multiply())(x)
                if torch.allclose(wanted, found, rtol=1e-5, atol=1e-6 * float(wanted.abs().max())):
                    return flipped
        except (RuntimeError, TypeError, ValueError, IndexError):  # takes other arguments: not such a unit
            continue
        finally:
            module.train(training)
    return None
