"""Norm heads: layer norm and rms norm in one attention layer (section G1 of docs/theory.md).

An inner product of a token with itself is what attention computes anyway. With c the (centred) row and v = c.c/d,

    head j:   self slot: logit b_j - s_j v, value c;     sink: logit 0, value 0

reads sigmoid(b_j - s_j v) c. Mixed with constants a_j the heads add up to c S(v), S(v) ~ 1/sqrt(v + eps); `fit`
chooses the constants. Three things keep rounding small. v enters every head as the same number, so that its error moves
the result like 1/sqrt does: by half of it. Sums over channels are trees of depth log2(d). Rows are centred twice: the
second mean is that of a centred row, so its error does not grow with the row's offset. `bound.ledger` is the proof.
Rows are evaluated a few at a time, so that memory does not grow with what a row's evaluation needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...arguments import is_number, is_whole
from ...box import Box
from ...certificates.certificate import Certificate, total
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import UNIT, assumptions
from ...certificates.schema import PAIR, Whole
from ...dtypes import by_name, dtype_name, shipped, transformed
from ...errors import ArgumentError, CertificateError, PrecisionError
from ...progress import shown
from ..slopes import plus, times
from ..stored import refuse_beyond, refuse_endless
from .bound import WIDEN, Roundings, fit_error, largest, ledger, slopes_of
from .construction import NormSpec, fit
from .site import MAX_HEADS


def tree_size(channels: int) -> int:
    """The smallest 2^a or 3 * 2^a that holds the channels: what a tree of additions likes."""
    power = 1 << (channels - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= channels else power


def tree_depth(width: int) -> int:
    """How many additions in a row a term of `tree_sum` goes through at most."""
    halvings = (width & -width).bit_length() - 1
    return halvings + (width >> halvings) - 1


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, which is kept: halves added to halves, at the end three numbers or one."""
    while x.shape[-1] % 2 == 0:
        first, second = x.chunk(2, dim=-1)
        x = first + second
    if x.shape[-1] == 1:
        return x
    first, second, third = x.chunk(3, dim=-1)
    return first + second + third


Rowwise = Callable[..., Tensor]


def by_rows(function: Rowwise, x: Tensor, tables: tuple[Tensor | None, ...], step: int) -> Tensor:
    """function(x, *tables) for x of shape (..., channels), at most `step` rows at a time, with the shape of x.

    Gradients evaluate the rows again instead of keeping everything alive, unless they are differentiated themselves.
    Up to `step` rows there is one piece and nothing of this applies.

    >>> x = torch.randn(10, 3)
    >>> torch.equal(by_rows(lambda x, t: x * t, x, (torch.ones(3),), step=4), x)
    True
    """
    if x.numel() <= step * x.shape[-1] or transformed(x, *(t for t in tables if t is not None)):
        return function(x, *tables)
    out: Tensor = _NormPieces.apply(function, step, x.reshape(-1, x.shape[-1]), *tables)
    return out.reshape(x.shape)


class _NormPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Rowwise, step: int, x: Tensor, *tables: Tensor | None) -> Tensor:
        ctx.function, ctx.step = function, step
        ctx.save_for_backward(x, *tables)
        out = torch.empty_like(x)
        for part, piece in zip(x.split(step), out.split(step), strict=True):
            piece.copy_(function(part, *tables))
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, *tables = ctx.saved_tensors
        wanted, twice = ctx.needs_input_grad[2:], torch.is_grad_enabled()

        def fresh(t: Tensor | None, need: bool) -> Tensor | None:
            return t if t is None or twice else t.detach().requires_grad_(need)

        given = [fresh(t, need) for t, need in zip(tables, wanted[1:], strict=True)]
        rows: list[Tensor] = []
        sums: dict[int, Tensor] = {}
        for part, piece in zip(x.split(ctx.step), slope.split(ctx.step), strict=True):
            every = [fresh(part, wanted[0]), *given]
            places = [k for k, need in enumerate(wanted) if need]
            with torch.enable_grad():
                out = ctx.function(*every)
            found = torch.autograd.grad(out, [cast(Tensor, every[k]) for k in places], piece, create_graph=twice)
            for k, more in zip(places, found, strict=True):
                if k == 0:
                    rows.append(more)
                else:
                    sums[k] = sums[k] + more if k in sums else more
        return None, None, torch.cat(rows) if rows else None, *(sums.get(k) for k in range(1, len(wanted)))


Kind = Literal["layer", "rms"]
GROUP = 4  # heads that are read and mixed together
BLOCK = 8  # channels of one inner product
CHUNK = 1 << 17  # row entries evaluated at once: the heads' values then stay in the cache


class NormHead(CertifiedModule):
    """Layer norm or rms norm over the last dimension, by softmax attention.

    >>> norm = NormHead.layer_norm(384, variance=(0.4, 130.0))
    >>> x = torch.randn(2, 384, generator=torch.Generator().manual_seed(0))
    >>> exact = torch.nn.functional.layer_norm(x.double(), (384,))
    >>> bool(((norm(x) - exact).abs().amax(-1) <= norm.bound * exact.abs().amax(-1)).all())
    True

    **What is certified**: for every row whose variance (rms norm: mean square) lies in `variance` and, for layer norm,
    whose mean is at most `offset` standard deviations away from 0, and for every coordinate i,

        |out_i - norm_i|  <=  bound * (|weight_i| max_k |n_k| + |bias_i|),        norm_i = weight_i n_i + bias_i,

    n being the normalised row. Without weight and bias that is `bound` times the row's largest output.
    """

    family = "norm"
    called = "heads that normalise"
    schema: ClassVar[Any] = {"channels": Whole(1), "eps_norm": float, "kind": str, "offset": float, "variance": PAIR}
    scale: nn.Parameter
    shift: nn.Parameter
    mix: nn.Parameter
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        scale: Tensor,
        shift: Tensor,
        mix: Tensor,
        *,
        channels: int,
        variance: tuple[float, float],
        eps_norm: float = 1e-5,
        kind: Kind = "layer",
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        offset: float = 100.0,
    ):
        super().__init__()
        lo, hi = _check(channels, variance, eps_norm, kind, weight, bias, offset, scale.dtype)
        if not (scale.dim() == 1 and 0 < len(scale) <= MAX_HEADS and scale.shape == shift.shape == mix.shape):
            shapes = [tuple(t.shape) for t in (scale, shift, mix)]
            raise ArgumentError(
                f"scale, shift and mix hold one number for each of 1 to {MAX_HEADS} heads, got {shapes}"
            )
        self.channels, self.variance, self.eps_norm, self.offset = channels, (lo, hi), float(eps_norm), float(offset)
        self.kind: Kind = kind
        for name, tensor in dict(scale=scale, shift=shift, mix=mix, weight=weight, bias=bias).items():
            given = None if tensor is None else nn.Parameter(tensor.detach().to(scale.dtype).clone())
            self.register_parameter(name, given)
        self.box = Box(variance=self.variance)
        self.width = tree_size(channels)
        self.block = math.gcd(self.width, BLOCK)

    @classmethod
    @shown("fitting")
    @by_name
    def fit(
        cls,
        channels: int,
        variance: tuple[float, float],
        eps_norm: float = 1e-5,
        heads: int | None = None,
        eps: float | None = None,
        kind: Kind = "layer",
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        offset: float = 100.0,
        dtype: torch.dtype = torch.float32,
    ) -> NormHead:
        """A norm head with `heads` heads, with as few as certify `eps`, or, given neither, as few as rounding deserves.

        `eps_norm` is the norm's own epsilon, `eps` the wanted accuracy: see the class for what it is relative to.
        """
        lo, hi = _check(channels, variance, eps_norm, kind, weight, bias, offset, dtype)
        if heads is not None and eps is not None:
            raise ArgumentError("give heads or eps, not both: eps chooses the number of heads")
        if heads is not None and not is_whole(heads, 1, MAX_HEADS):
            raise ArgumentError(f"heads must be a whole number from 1 to {MAX_HEADS}, got {heads!r}")
        if eps is not None and not (eps > 0 and math.isfinite(eps)):
            raise ArgumentError(f"eps must be a finite number > 0, got {eps!r}")

        def build(count: int) -> NormHead:
            table = fit(lo * (1 - WIDEN), hi * (1 + WIDEN), float(eps_norm), count, channels, dtype)
            head = cls(
                *(torch.from_numpy(x).to(dtype) for x in table),
                channels=channels,
                variance=(lo, hi),
                eps_norm=eps_norm,
                kind=kind,
                weight=weight,
                bias=bias,
                offset=offset,
            )
            head.attach(head.recertify())
            return head

        return build(heads) if heads is not None else _fewest(build, eps)

    @classmethod
    def layer_norm(cls, channels: int, variance: tuple[float, float], **options: Any) -> NormHead:
        """Layer norm: `fit` with kind="layer"."""
        return cls.fit(channels, variance, kind="layer", **options)

    @classmethod
    def rms_norm(cls, channels: int, variance: tuple[float, float], **options: Any) -> NormHead:
        """Rms norm: `fit` with kind="rms"; `variance` is then the interval of the mean square."""
        return cls.fit(channels, variance, kind="rms", **options)

    def core(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        tables = (self.scale, self.shift, self.mix, self.weight, self.bias)
        if torch.compiler.is_compiling():  # a traced graph has no loops over chunks: its runtime decides
            return self._attend(x, *tables)
        return by_rows(self._attend, x, tables, max(1, CHUNK // self.channels))

    def _attend(
        self, x: Tensor, scale: Tensor, shift: Tensor, mix: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        c = self._centre(x)
        logit = shift - scale * self._square(c)
        weights = torch.softmax(torch.stack([logit, torch.zeros_like(logit)], dim=-1), dim=-1)[..., :1]
        value = c.unsqueeze(-2)
        groups = zip(weights.split(GROUP, dim=-2), mix.unsqueeze(0).split(GROUP, dim=-1), strict=True)
        reads = [(amounts @ (group @ value)).squeeze(-2) for group, amounts in groups]
        while len(reads) > 1:
            reads = [reads[i] + reads[i + 1] if i + 1 < len(reads) else reads[i] for i in range(0, len(reads), 2)]
        out = reads[0] if weight is None else reads[0] * weight
        return out if bias is None else out + bias

    def _centre(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return x
        once = x - self._mean(x)
        return once - self._mean(once)

    def _mean(self, x: Tensor) -> Tensor:
        return tree_sum(self._padded(x)) / self.channels

    def _square(self, c: Tensor) -> Tensor:
        """c.c, the inner product of query and key: in blocks of channels, added up as a tree."""
        blocks = self._padded(c).unflatten(-1, (self.width // self.block, self.block))
        return tree_sum((blocks.unsqueeze(-2) @ blocks.unsqueeze(-1)).flatten(-3))

    def _padded(self, x: Tensor) -> Tensor:
        if self.width == self.channels:
            return x
        return torch.cat([x, x.new_zeros(*x.shape[:-1], self.width - self.channels)], dim=-1)

    def guard(self, *inputs: Tensor) -> None:
        """Refuse what cannot be evaluated; warn once about (or, if `strict`, refuse) rows outside the intervals."""
        if len(inputs) != 1:
            raise ArgumentError(f"expected 1 input tensor, got {len(inputs)}")
        x = inputs[0]
        self.check_tensor(x, "input")
        if x.dim() < 1 or x.shape[-1] != self.channels:
            raise ArgumentError(f"expected an input of shape (..., {self.channels}), got {tuple(x.shape)}")
        if not x.numel():
            return
        low, high = (float(v) for v in torch.aminmax(x.detach()))
        self.check_range("input", low, high, -math.inf, math.inf)
        lo, hi = self.variance[0] * (1 - WIDEN / 4), self.variance[1] * (1 + WIDEN / 4)
        far = self.offset * (1 + WIDEN / 4) + WIDEN
        with torch.no_grad():
            for part in x.detach().reshape(-1, self.channels).split(max(1, CHUNK // self.channels)):
                v = self._square(self._centre(part)) / self.channels
                low, high = (min(float(t), torch.finfo(x.dtype).max) for t in torch.aminmax(v))
                what = "variance of a row" if self.kind == "layer" else "mean square of a row"
                self.check_range(what, low, high, lo, hi)
                if self.kind == "layer" and lo <= low and high <= hi:
                    high = float((self._mean(part).abs() / v.sqrt()).max())
                    self.check_range("mean of a row, in standard deviations", high, high, 0.0, far)

    def example_input(self) -> tuple[Tensor, ...]:
        """Two rows whose variance is the geometric middle of the interval."""
        rows = torch.randn(2, self.channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows = rows - rows.mean(-1, keepdim=True) if self.kind == "layer" else rows
        rows = rows / rows.square().mean(-1, keepdim=True).sqrt()
        middle = math.sqrt(self.variance[0]) * math.sqrt(self.variance[1])
        return ((rows * math.sqrt(middle)).to(self.dtype),)

    @property
    def heads(self) -> int:
        """The number of heads."""
        return int(self.scale.shape[0])

    @property
    def spec(self) -> NormSpec:
        """The univariate part as it is stored, with its certified relative error."""
        s, b, a = self.table()
        lo, hi = self.variance
        error, _ = fit_error(s, b, a, self.eps_norm, lo, hi, UNIT[self.dtype], 1.0)
        return NormSpec(tuple(s.tolist()), tuple(b.tolist()), tuple(a.tolist()), self.eps_norm, lo, hi, error)

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scales for v (not c.c), shifts and amounts in float64."""
        scale, shift, mix = (p.detach().double().cpu().numpy() for p in (self.scale, self.shift, self.mix))
        for name, table in (("scale", scale), ("shift", shift), ("mix", mix)):
            if not np.isfinite(table).all():
                raise CertificateError(f"'{name}' of this norm head holds NaN or infinity: nothing can be certified")
        return scale * self.channels, shift, mix

    def roundings(self) -> Roundings:
        """Trees of additions; for the value two products, three additions in a group, a tree of groups."""
        groups = math.ceil(math.log2(math.ceil(self.heads / GROUP)))
        dot = self.block + tree_depth(self.width // self.block)
        return Roundings(tree_depth(self.width) + 1, dot, 2 + (GROUP - 1) + groups)

    def recertify(self) -> Certificate:
        refuse_endless(self)
        refuse_beyond("norm", largest(self), self.dtype)
        terms = ledger(self)
        bound = total(t.value for t in terms)
        if not math.isfinite(bound):
            raise PrecisionError(f"{self.dtype} is too coarse for a norm of {self.channels} channels on {self.box!r}")
        name = "layer norm" if self.kind == "layer" else "rms norm"
        scope = f", |mean| <= {self.offset:g} std" if self.kind == "layer" else ""
        return Certificate(
            kind="certified",
            bound=bound,
            dtype=dtype_name(self.dtype),
            target=f"{name} of {self.channels} channels, eps {self.eps_norm!r}{scope}; per row",
            box=self.box,
            terms=terms,
            relative=True,
            lemmas=("G1", "A5"),
            assumptions=assumptions(),
        )

    def lipschitz(self) -> float:
        """How far rows move when rows do, in the Euclidean norm and for rows within `variance`, at most (lemma H2):
        certified, for real arithmetic. The derivative of c S(v) is S + (2/d) S'(v) c c^T, with the eigenvalues S and
        S + 2 v S'; centring makes nothing longer.

        >>> head = NormHead.layer_norm(32, variance=(0.25, 4.0))
        >>> round(head.lipschitz(), 2)  # 1/sqrt(0.25)
        2.0
        """
        curve = slopes_of(*self.table(), self.variance, self.eps_norm)
        twice = times((2 * curve.edges[:-1], 2 * curve.edges[1:]), curve.slope)
        along = plus(twice, curve.value)
        most = max(float(np.maximum(-low, high).max()) for low, high in (along, curve.value))
        gain = 1.0 if self.weight is None else float(self.weight.detach().double().abs().max())
        return most * gain * (1 + 2.0**-50)

    def config(self) -> dict[str, Any]:
        names = ("channels", "variance", "eps_norm", "kind", "offset")
        return {name: getattr(self, name) for name in names} | {"variance": list(self.variance)}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> NormHead:
        table = (tensors[name] for name in ("scale", "shift", "mix"))
        variance = tuple(config["variance"])
        return cls(*table, weight=tensors.get("weight"), bias=tensors.get("bias"), **{**config, "variance": variance})

    def extra_repr(self) -> str:
        return f"{self.kind} norm of {self.channels} channels, {self.heads} heads, variance in {self.variance}"


def _fewest(build: Callable[[int], NormHead], eps: float | None) -> NormHead:
    """The inverse: the fewest heads that certify `eps`; without eps those whose fit is a tenth of rounding or less."""
    tried: dict[int, NormHead] = {}

    def enough(count: int) -> bool:
        head = tried[count] = build(count)
        split = head.certificate.by_source()
        if eps is None:
            return split["interpolation"] <= 0.1 * split["rounding"]
        return head.bound is not None and head.bound <= eps

    low, high = 0, 4
    while not enough(high):
        if high >= MAX_HEADS:
            best = min(tried.values(), key=lambda head: head.bound or math.inf)
            if eps is None:
                return best
            raise PrecisionError(
                f"a norm head of {best.channels} channels with variances in {best.variance} reaches {best.bound:.3g} "
                f"of the row's largest value in {best.certificate.dtype}, not eps = {eps:g}; "
                "use float64 or a narrower interval",
                reachable=best.bound,
            )
        low, high = high, min(2 * high, MAX_HEADS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return tried[high]


def _check(
    channels: int,
    variance: tuple[float, float],
    eps_norm: float,
    kind: str,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """The interval of the variance; raises `ArgumentError` on a bad argument."""
    if kind not in ("layer", "rms"):
        raise ArgumentError(f"kind must be 'layer' or 'rms', got {kind!r}")
    least = 2 if kind == "layer" else 1
    if not is_whole(channels, least):
        raise ArgumentError(f"channels must be a whole number, at least {least} for {kind} norm, got {channels!r}")
    shipped(dtype)
    lo, hi = Box({"variance": variance})["variance"]
    if not 0 < lo < hi:
        raise ArgumentError(f"variance must be an interval 0 < lo < hi, got ({lo:g}, {hi:g})")
    for name, number in (("eps_norm", eps_norm), ("offset", offset)):
        if not is_number(number) or number < 0:
            raise ArgumentError(f"{name} must be a finite number >= 0, got {number!r}")
    limits = torch.finfo(dtype)
    if hi * channels > limits.max / 4096 or lo < limits.tiny * 2**30:
        raise ArgumentError(
            f"squares of rows with variances in ({lo:g}, {hi:g}) leave the range of {dtype}: rescale them"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != (channels,):
            came = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentError(f"{name} must be a tensor of shape ({channels},), got {came}")
        if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
            raise ArgumentError(
                f"{name} must hold finite floating numbers, got {tensor.dtype} with NaN, infinity or integers"
            )
    return lo, hi
