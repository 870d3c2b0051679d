"""Product heads: x times y to machine precision by two self heads (section C).

**C1** sinh(z)/z = 1/2 int_{-1}^{1} e^{z tau} dtau is a positive mixture of exponentials. Take the n-point Gauss-Lobatto
rule (tau_i, w_i), whose first and last nodes are -1 and 1 with weight w_1 = 2/(n(n-1)). Head + has a self slot of logit
z and value x, and memory slots of value 0 with logits tau_i z + log(w_i/w_1) for all other nodes; head - is the same
with -z. Both have the denominator D(z)/w_1, D(z) = sum_i w_i e^{tau_i z}, so

    head+ - head- = w_1 x (e^z - e^-z) / D(z),     z = g y.

The rule's remainder is int e^{z tau} dtau - D(z) = -K_n z^(2n-2) e^{z xi}, |xi| < 1, with
K_n = n (n-1)^3 2^(2n-1) (n-2)!^4 / ((2n-1) (2n-2)!^3), so D(z) is at least 2 sinh(z)/z and the product g w_1 x y is
reached up to the factor 1/(1 + rho(z)),

    0 <= rho(z) <= K_n |z|^(2n-1) / (1 - e^(-2|z|)):

relative in both factors. g is a power of two with 1 < s = g Y <= 2, |y| <= Y, so z is exact, and so is
1/(g w_1) = n(n-1)/(2g). What remains is the rounding of two softmax heads that together add up to at most
|x| Y coth(s): some 26 u of |x| Y at s = 2. The shipped bound, `bound.product_error`, is a sup over cells of z
for the stored weights. `nodes_for` is the inverse.

Operands that do not straddle 0 are centred where that certifies more: x y = (x-a)(y-b) + b x + a y - a b, the linear
part through the skip; and the operand with the better s becomes the query.

**C2** (`method="tanh"`) x y = sum_j c_j x tanh(s_j y/2Y) with hot heads of one memory slot, whose weight is near 1/2:
x tanh(t/2) = x sigmoid(t) - x sigmoid(-t). Fewer slots, less accuracy: rounding is amplified by sum |c_j|.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...arguments import number, positive
from ...box import Box, round_outward
from ...certificates.certificate import Certificate, Term, total
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import assumptions
from ...certificates.schema import PAIR, Either, Whole
from ...dtypes import by_name, dtype_name, shipped
from ...errors import ArgumentError, CertificateError, PrecisionError
from ...kernel.alone.heads import MOST
from ...progress import shown
from ..construction import self_layer
from ..slopes import Enclosure
from ..stored import SelfSpec, refuse_overflow
from .bound import SLOPE_CELLS, ProductError, Sides, fused_error, partials, product_error
from .construction import NODES, ProductSpec, arrange, gain_for, nodes_for, remainder
from .site import MOST_NODES


class ProductHead(CertifiedModule):
    """x times y by two attention heads, with its certified error.

    >>> head = ProductHead.fit(x=(-1, 1), y=(-1, 1))
    >>> head(torch.tensor([0.5, -1.0]), torch.tensor([0.5, 0.25])).allclose(torch.tensor([0.25, -0.25]), atol=1e-6)
    True
    >>> head.bound < 2e-6
    True

    x and y are tensors of one shape. With `width=v`, x is a batch of vectors, shape (..., v), and y one scalar for each
    of them, shape (...) or (..., 1). Outside the box the product saturates; the first such call warns, `strict = True`
    raises.
    """

    family = "product"
    called = "heads that multiply"
    schema: ClassVar[Any] = {
        "x": PAIR, "y": PAIR, "method": str, "nodes": Either(None, Whole()), "gain": Either(None, float),
        "centre": Either(None, PAIR), "swapped": bool, "width": Either(None, Whole(1)),
    }  # fmt: skip

    def __init__(self, spec: ProductSpec, box: Box, swapped: bool, width: int | None, dtype: torch.dtype, method: str):
        super().__init__()
        self.spec, self.box, self.swapped, self.width, self.method = spec, box, swapped, width, method
        self.layer = self_layer(spec.heads, shipped(dtype), purpose="x y")

    @property
    def nodes(self) -> int:
        """The number of Gauss-Lobatto nodes; 0 for the tanh method."""
        return self.spec.nodes

    @property
    def scale(self) -> float:
        """s of lemma C1: the largest |z|."""
        b = self.spec.centre[1]
        return self.spec.gain * max(abs(v - b) for v in self._sides().query)

    @classmethod
    @shown("fitting")
    @by_name
    def fit(
        cls,
        x: tuple[float, float],
        y: tuple[float, float],
        eps: float | None = None,
        nodes: int | None = None,
        dtype: torch.dtype = torch.float32,
        width: int | None = None,
        method: str = "gauss",
    ) -> ProductHead:
        """The product on a box: with as few nodes as eps needs, with `nodes`, or as accurate as the dtype allows."""
        box = Box(x=_side("x", x), y=_side("y", y))
        shipped(dtype)
        if eps is not None:
            positive("eps", eps)
        if width is not None and (type(width) is not int or width < 1):
            raise ArgumentError(f"width must be a whole number of at least 1, or None for scalars, got {width!r}")
        if nodes is not None and (type(nodes) is not int or not 2 <= nodes <= MOST_NODES):
            raise ArgumentError(f"nodes must be a whole number from 2 to {MOST_NODES}, got {nodes!r}")
        if method not in ("gauss", "tanh"):
            raise ArgumentError(f"method must be 'gauss' or 'tanh', got {method!r}")
        sides = _outward(box, dtype)
        if method == "tanh":
            head = cls(ProductSpec.tanh(sides.sizes[1], dtype, width or 1), box, False, width, dtype, method)
        else:
            arranged = arrange(sides, dtype, swap=width is None)
            gain = gain_for(arranged.reach[1])
            if eps is not None and nodes is None:
                nodes, gain = nodes_for(eps, arranged, dtype)
            spec = ProductSpec.build(nodes or NODES[dtype], gain, arranged.centre, width or 1)
            head = cls(spec, box, arranged.swapped, width, dtype, method)
        bound = head.attach(head.recertify()).bound
        if eps is not None and bound is not None and bound > eps:
            raise PrecisionError(f"this product reaches {bound:.3e} in {dtype}, not eps = {eps:g}", reachable=bound)
        return head

    @classmethod
    def symmetric(cls, X: float, Y: float, eps: float | None = None, **options: Any) -> ProductHead:
        """The product of |x| <= X and |y| <= Y."""
        size_x, size_y = positive("X", X), positive("Y", Y)
        return cls.fit((-size_x, size_x), (-size_y, size_y), eps, **options)

    @property
    def beyond(self) -> str:
        if (self.width or 1) <= MOST:
            return ""
        group, own = self.layer.heads()[0], []
        for table in (group.W_V, group.W_O, group.M_V, group.b_V, self.layer.S, self.layer.s):
            if table is not None:
                rows = table.detach().reshape(-1, *table.shape[-2:]) if table.dim() > 1 else table.detach()[None, None]
                own += [rows[:, self.width :].flatten(0, 1), rows[:, : self.width].diagonal(dim1=1, dim2=2)] if (
                    rows.shape[1] >= (self.width or 1)) else [rows.flatten(0, 1)]
        many = torch.cat(own).unique(dim=1).shape[1] > MOST
        return f"it takes its time beyond vectors of {MOST} entries with numbers of their own" if many else ""

    def core(self, *inputs: Tensor) -> Tensor:
        x, y = inputs
        if self.width is None:
            return self.layer(torch.stack((y, x) if self.swapped else (x, y), dim=-1)).squeeze(-1)
        return self.layer(torch.cat((x, y if y.dim() == x.dim() else y.unsqueeze(-1)), dim=-1))

    def guard(self, *inputs: Tensor) -> None:
        if len(inputs) == 2 and all(isinstance(tensor, Tensor) for tensor in inputs):
            x, y = (tuple(tensor.shape) for tensor in inputs)
            if self.width is None and x != y:
                raise ArgumentError(f"a product takes tensors of one shape, got {x} and {y}; width= is for vectors")
            if self.width is not None and (x[-1:] != (self.width,) or y not in (x[:-1], (*x[:-1], 1))):
                wanted = f"x of shape (..., {self.width}) and y of shape (...) or (..., 1)"
                raise ArgumentError(f"expected {wanted}, got {x} and {y}")
        super().guard(*inputs)

    def example_input(self) -> tuple[Tensor, ...]:
        x, y = super().example_input()
        return (x, y) if self.width is None else (x.unsqueeze(-1).repeat(1, self.width), y)

    def _sides(self) -> Sides:
        sides = _outward(self.box, self.dtype)
        return Sides(sides.query, sides.value) if self.swapped else sides

    def error(self) -> ProductError:
        """The certified error of the present weights, split by where it comes from."""
        stored = SelfSpec.read(self.layer)
        refuse_overflow(self.layer, max(self._sides().sizes), self.dtype)
        return product_error(stored, self._sides(), self.dtype)

    def lipschitz(self) -> tuple[float, float]:
        """How far the stored heads move when x moves, and when y does, at most: certified, for real arithmetic (H2).

        >>> [round(size, 1) for size in ProductHead.fit(x=(-1, 2), y=(-0.5, 0.5)).lipschitz()]
        [0.5, 2.0]
        """
        found = [float(np.maximum(-low, high).max()) for low, high in self.partials(*self._cells())]
        return (found[1], found[0]) if self.swapped else (found[0], found[1])

    def partials(self, x: Enclosure, y: Enclosure) -> tuple[Enclosure, Enclosure]:
        """Derivatives by the value operand and by the query operand, on cells of both."""
        if self.width not in (None, 1):
            raise ArgumentError("a product of vectors has a constant for each entry: ask the network that uses it")
        return partials(SelfSpec.read(self.layer), self._sides().query, x, y)

    def _cells(self) -> tuple[Enclosure, Enclosure]:
        """All values beside cells of the queries."""
        sides = self._sides()
        edges = np.linspace(*sides.query, SLOPE_CELLS + 1)
        edges[0], edges[-1] = sides.query
        low, high = (np.full(SLOPE_CELLS, end) for end in sides.value)
        return (low, high), (edges[:-1], edges[1:])

    def fused_bound(self) -> float:
        """A bound of the product as `fused` evaluates it: both heads together, with the numbers of lemma C1."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return fused_error(
            self.nodes, self.spec.gain, self.spec.centre, self._sides(), remainder(self.nodes, self.scale), wide
        )

    def differing(self) -> list[str]:
        """The stored tensors that are not the numbers of the construction as their dtype holds them."""
        wanted = self_layer(self.spec.heads, self.dtype, purpose="x y").state_dict()
        return sorted(
            name
            for name, tensor in self.layer.state_dict().items()
            if name not in wanted or not torch.equal(tensor.cpu(), wanted[name])
        )

    def recertify(self) -> Certificate:
        with np.errstate(over="ignore", invalid="ignore"):
            error = self.error()
        if not math.isfinite(error.truncation + error.rounding):
            raise CertificateError("no finite bound can be given for these product heads: their weights were changed")
        rule = f"{self.nodes} nodes" if self.method == "gauss" else "two tanh pairs"
        terms = (
            Term("product", "interpolation", error.truncation, f"{rule}, |z| <= {self.scale:.4g}"),
            Term("product", "rounding", error.rounding, "the heads and the skip"),
        )
        return Certificate(
            kind="certified",
            bound=total(t.value for t in terms),
            dtype=dtype_name(self.dtype),
            target="x*y",
            box=self.box,
            terms=terms,
            lemmas=("C1" if self.method == "gauss" else "C2", "A5"),
            assumptions=assumptions(),
        )

    def config(self) -> dict[str, Any]:
        return {
            "x": list(self.box["x"]),
            "y": list(self.box["y"]),
            "nodes": self.nodes,
            "gain": self.spec.gain,
            "centre": list(self.spec.centre),
            "swapped": self.swapped,
            "width": self.width,
            "method": self.method,
        }

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> ProductHead:
        box = Box(x=_side("x", config["x"]), y=_side("y", config["y"]))
        if config["swapped"] and config["width"] is not None:
            raise CertificateError("the operands of a product of vectors stand in their order: its file swaps them")
        dtype, width = next(iter(tensors.values())).dtype, config["width"]
        if config["method"] == "tanh":
            spec = ProductSpec.tanh(_outward(box, dtype).sizes[1], dtype, width or 1)
        else:
            a, b = config["centre"]
            spec = ProductSpec.build(config["nodes"], config["gain"], (float(a), float(b)), width or 1)
        return cls(spec, box, bool(config["swapped"]), width, dtype, config["method"])


def _side(name: str, pair: object) -> tuple[float, float]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ArgumentError(f"{name} must be a pair of numbers (lo, hi), got {pair!r}")
    low, high = number(name, pair[0]), number(name, pair[1])
    if low >= high:
        raise ArgumentError(f"{name} needs lo < hi, got ({low:g}, {high:g})")
    if not 1e-30 < max(abs(low), abs(high)) < 1e30:
        raise ArgumentError(f"{name} must have a size between 1e-30 and 1e30, got ({low:g}, {high:g})")
    return low, high


def _outward(box: Box, dtype: torch.dtype) -> Sides:
    low, high = round_outward(box.lower.numpy(), box.upper.numpy(), dtype)
    return Sides((float(low[0]), float(high[0])), (float(low[1]), float(high[1])))
