"""Gate heads: kinks and sigmoids by one self slot and one or two memory slots (section B).

**B1** *relu.* Logits (beta y, 0), values (y, 0): y sigmoid(beta y). With t = beta |y| the error is -t/(1 + e^t)/beta on
both sides of 0; t/(1 + e^t) is largest where e^t (t - 1) = 1, that is t = 1 + W(1/e), where it is W(1/e) = 0.2784645...
So |y sigmoid(beta y) - relu(y)| <= W(1/e)/beta, and this is sharp.

**B2** *ramp.* Logits (beta (a - y), 0, beta (y - b)), values (a, y, b), a <= b: for every real y and every beta > 0
|head - clip(y, a, b)| <= W(1/e)/beta. Scale to beta = 1 and let A = e^(a-y), B = e^(y-b).

- a <= y <= b: head - y = [B (b-y) - A (y-a)] / (1+A+B). Dropping the second term, and A below, only enlarges it:
  head - y <= s/(1+e^s) <= W(1/e) with s = b-y. The lower bound is the mirror image.
- y > b, t = y-b, d = b-a: head - b = [t - A d] / (1+A+B), at most t/(1+e^t) <= W(1/e), and at least
  -A d/(1+A) >= -d/(1+e^d) >= -W(1/e), because A <= e^-d. y < a is the mirror image.

The query is (y-a, y-b), so that the logits are exact near the kinks (Sterbenz), and both saturated ends are exact: two
constants and one self slot instead of p anchors.

**B3** Piecewise linear functions are sums of B1 around a pivot knot: to its right relu(y - x), to its left relu(x - y),
so that few terms are alive at once and saturated ones add an exact 0; abs is relu(y) + relu(-y).
max(x, y) = y + relu(x - y) and min(x, y) = x - relu(x - y), with the linear part through the skip.

**B4** silu, sigmoid and tanh are a head of two slots exactly: logits (r y, 0), r = 1, 1, 2, and
values (y, 0), (1, 0), (1, -1).

The shipped bound is `bound.gate_error`: a sup over cells for the stored weights, rounding included; what has
changed since the gate was built only makes it larger. `sharpness_for` is the inverse: the smallest power of two
(multiplying by it is exact) that certifies a wanted eps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...arguments import interval, number, positive
from ...box import Box
from ...certificates.certificate import Certificate, Term, total
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import assumptions
from ...certificates.schema import Either
from ...dtypes import by_name, dtype_name, shipped
from ...errors import ArgumentError, PrecisionError
from ..construction import self_layer
from ..slopes import Steepness
from ..stored import SelfSpec, refuse_overflow
from .bound import GateError, gate_domain, gate_error, steepness_of
from .construction import LARGEST_BITS, MOST_BITS, GateSpec, gate_spec, sharpness_for
from .target import ALIASES, Lines


class GateHead(CertifiedModule):
    """A kink or a sigmoid as an attention head, with its certified error.

    >>> head = GateHead.relu(-1, 1)
    >>> head(torch.tensor([-0.5, 0.25]))
    tensor([0.0000, 0.2500], grad_fn=<SqueezeBackward1>)
    >>> head.bound < 5e-9
    True

    Works elementwise on tensors of any shape; max and min take two tensors of one shape. Outside the interval a ramp
    still clamps to its edge and a relu is still a relu, but the certificate does not speak of it: the first such call
    warns, `strict = True` raises.
    """

    family = "gate"
    called = "a gate of one attention head"
    schema: ClassVar[Any] = {"name": str, "sharpness": Either(None, float), "lo": float, "hi": float, "parameters": {}}

    def __init__(self, spec: GateSpec, lo: float, hi: float, dtype: torch.dtype, given: dict[str, Any]):
        super().__init__()
        self.lo, self.hi = interval(lo, hi)
        self.spec, self.given = spec, dict(given)
        self.box = Box(x=(self.lo, self.hi), y=(self.lo, self.hi)) if spec.target.pair else Box(y=(self.lo, self.hi))
        self.layer = self_layer(spec.heads, shipped(dtype), purpose=spec.target.text)

    @property
    def name(self) -> str:
        """Which gate this is."""
        return self.spec.target.name

    @property
    def sharpness(self) -> float | None:
        """beta, as built; None for silu, sigmoid and tanh, which are exact."""
        return self.spec.sharpness

    @classmethod
    @by_name
    def fit(
        cls,
        name: str,
        lo: float,
        hi: float,
        eps: float | None = None,
        sharpness: float | None = None,
        dtype: torch.dtype = torch.float32,
        **parameters: Any,
    ) -> GateHead:
        """The gate of this name on [lo, hi]: of a given sharpness, sharp enough for eps, or as the dtype deserves."""
        low, high = interval(lo, hi)
        if max(abs(low), abs(high)) > 2.0 ** LARGEST_BITS[shipped(dtype)]:
            limit = f"2^{LARGEST_BITS[dtype]}, the most for {dtype}"
            raise ArgumentError(f"the interval [{low:g}, {high:g}] goes beyond {limit}; scale the input")
        parameters = {key: _plain(key, value) for key, value in parameters.items()}
        if eps is not None:
            positive("eps", eps)
        probe = gate_spec(name, 1.0, **parameters)
        if probe.sharpness is None and sharpness is not None:
            raise ArgumentError(f"the gate '{probe.target.name}' is exact: it takes no sharpness, got {sharpness!r}")
        if probe.sharpness is None:
            spec = probe
        else:
            if sharpness is None:
                sharpness = sharpness_for(ALIASES.get(name, name), eps, low, high, dtype, **parameters)
            spec = gate_spec(name, positive("sharpness", sharpness), **parameters)
            steep = sharpness * max(abs(low), abs(high))
            if steep > 2.0 ** MOST_BITS[dtype] or sharpness > 2.0 ** LARGEST_BITS[dtype]:
                limit = f"at most 2^{MOST_BITS[dtype]} is safe in {dtype}"
                raise ArgumentError(f"sharpness = {sharpness:g} makes logits of {steep:.1e}; {limit}")
        head = cls(spec, low, high, dtype, parameters)
        bound = head.attach(head.recertify()).bound
        if eps is not None and bound is not None and bound > eps:
            raise PrecisionError(
                f"a {spec.target.name} gate on [{low:g}, {high:g}] in {dtype} reaches {bound:.3e}, not eps = {eps:g}; "
                "ask for that much, or use dtype=torch.float64 or another sharpness",
                reachable=bound,
            )
        return head

    @classmethod
    def relu(cls, lo: float, hi: float, eps: float | None = None, **options: Any) -> GateHead:
        """max(y, 0)."""
        return cls.fit("relu", lo, hi, eps, **options)

    @classmethod
    def ramp(
        cls, a: float, b: float, lo: float | None = None, hi: float | None = None,
        eps: float | None = None, **options: Any,
    ) -> GateHead:  # fmt: skip
        """clip(y, a, b); the interval is [a, b] widened by its own length on both sides unless given."""
        low, high = number("a", a), number("b", b)
        if low >= high:
            raise ArgumentError(f"a ramp needs a < b, got a = {low:g} and b = {high:g}")
        ends = 2 * low - high if lo is None else lo, 2 * high - low if hi is None else hi
        return cls.fit("ramp", *ends, eps, a=low, b=high, **options)

    @classmethod
    def abs(cls, lo: float, hi: float, eps: float | None = None, **options: Any) -> GateHead:
        """|y|, by two heads: relu(y) + relu(-y)."""
        return cls.fit("abs", lo, hi, eps, **options)

    @classmethod
    def leaky_relu(
        cls, lo: float, hi: float, slope: float = 0.01, eps: float | None = None, **options: Any
    ) -> GateHead:
        """max(y, 0) + slope min(y, 0)."""
        return cls.fit("leaky_relu", lo, hi, eps, slope=slope, **options)

    @classmethod
    def hard_tanh(cls, lo: float = -3.0, hi: float = 3.0, eps: float | None = None, **options: Any) -> GateHead:
        """clip(y, -1, 1)."""
        return cls.fit("hard_tanh", lo, hi, eps, **options)

    @classmethod
    def max(cls, lo: float, hi: float, eps: float | None = None, **options: Any) -> GateHead:
        """The larger of x and y, both in [lo, hi]: head(x, y)."""
        return cls.fit("max", lo, hi, eps, **options)

    @classmethod
    def min(cls, lo: float, hi: float, eps: float | None = None, **options: Any) -> GateHead:
        """The smaller of x and y, both in [lo, hi]: head(x, y)."""
        return cls.fit("min", lo, hi, eps, **options)

    @classmethod
    def silu(cls, lo: float, hi: float, eps: float | None = None, **options: Any) -> GateHead:
        """y sigmoid(y), exact but for rounding."""
        return cls.fit("silu", lo, hi, eps, **options)

    @classmethod
    def sigmoid(cls, lo: float, hi: float, eps: float | None = None, **options: Any) -> GateHead:
        """1 / (1 + exp(-y)), exact but for rounding."""
        return cls.fit("sigmoid", lo, hi, eps, **options)

    @classmethod
    def tanh(cls, lo: float, hi: float, eps: float | None = None, **options: Any) -> GateHead:
        """tanh(y), exact but for rounding."""
        return cls.fit("tanh", lo, hi, eps, **options)

    @classmethod
    def piecewise_linear(
        cls, xs: Sequence[float], ys: Sequence[float], lo: float | None = None, hi: float | None = None,
        eps: float | None = None, **options: Any,
    ) -> GateHead:  # fmt: skip
        """The continuous function through the points (xs, ys), linear between them; the outer lines go on."""
        points = _plain("xs", list(xs))
        if not points:
            raise ArgumentError("piecewise_linear needs at least two points, got none")
        ends = points[0] if lo is None else lo, points[-1] if hi is None else hi
        return cls.fit("piecewise_linear", *ends, eps, xs=points, ys=list(ys), **options)

    def core(self, *inputs: Tensor) -> Tensor:
        return self.layer(torch.stack(inputs, dim=-1)).squeeze(-1)

    def guard(self, *inputs: Tensor) -> None:
        shapes = {tuple(x.shape) for x in inputs if isinstance(x, Tensor)}
        if len(shapes) > 1:
            given = " and ".join(map(str, sorted(shapes)))
            raise ArgumentError(f"'{self.name}' takes tensors of one shape, got {given}")
        super().guard(*inputs)

    def error(self) -> GateError:
        """The certified error of the present weights, split by where it comes from."""
        domain = gate_domain(self.spec.target, self.lo, self.hi, self.dtype)
        return gate_error(SelfSpec.read(self.layer), self.spec.target.shape, domain, self.dtype)

    def recertify(self) -> Certificate:
        refuse_overflow(self.layer, max(abs(end) for pair in self.box.intervals() for end in pair), self.dtype)
        error = self.error()
        where = f"near {'x - y' if self.spec.target.pair else 'y'} = {error.at:.4g}"
        terms = (
            Term(self.name, "interpolation", error.mismatch, "stored weights against the target"),
            Term(self.name, "leak", error.leak, where),
            Term(self.name, "rounding", error.rounding, where),
        )
        return Certificate(
            kind="certified",
            bound=total(t.value for t in terms),
            dtype=dtype_name(self.dtype),
            target=self.spec.target.text,
            box=self.box,
            terms=terms,
            lemmas=(self.spec.target.lemma, "A5"),
            assumptions=(*assumptions(), "exp(0) = 1"),
        )

    def lipschitz(self) -> float:
        """How steep the stored gate is on its interval, at most (lemma H2): certified, for real arithmetic.

        >>> GateHead.relu(-2, 3, sharpness=64.0).lipschitz() < 1.11  # y sigmoid(64 y) overshoots a little
        True
        """
        return self.steepness().constant

    def steepness(self) -> Steepness:
        """Enclosures of the stored gate's derivative and values, cell by cell."""
        if self.spec.target.pair:
            raise ArgumentError(f"{self.name} is a function of two numbers: ask the network that uses it")
        shape = self.spec.target.shape
        knots = shape.knots if isinstance(shape, Lines) else ()
        near = [k + side * (self.hi - self.lo) * 2.0 ** -np.arange(2.0, 54.0) for k in knots for side in (-1, 1)]
        edges = np.concatenate([np.linspace(self.lo, self.hi, 513), *near, list(knots)])
        return steepness_of(SelfSpec.read(self.layer), np.unique(np.clip(edges, self.lo, self.hi)))

    def config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "lo": self.lo,
            "hi": self.hi,
            "sharpness": self.sharpness,
            "parameters": self.given,
        }

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> GateHead:
        spec = gate_spec(config["name"], config["sharpness"] or 1.0, **config["parameters"])
        return cls(spec, config["lo"], config["hi"], next(iter(tensors.values())).dtype, config["parameters"])


def _plain(name: str, value: Any) -> Any:
    """A parameter as JSON holds it: a float, or a list of floats."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [number(name, each) for each in value]
    return number(name, value)
