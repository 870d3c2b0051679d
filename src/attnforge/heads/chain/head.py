"""`ChainHead`: functions with kinks that are no gate themselves, as gates followed by a product or by tables.

What a function is made of is decided by `heads.choose`; the gates and tables here are certified heads of their own
families, read by one another. The lemmas are those of `bound`: y times a gate, and curved pieces with their arguments
clipped, so that no table has a kink to follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...arguments import interval, positive
from ...box import Box, round_outward
from ...certificates.certificate import Certificate, Term, total, upper_text
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import assumptions
from ...certificates.schema import PAIR, require
from ...dtypes import SHIPPED, by_name, dtype_name, shipped
from ...errors import ArgumentError, CertificateError, PrecisionError
from ...functions.registry import Univariate, get, parse
from ...network import AttentionLayer
from ...progress import shown
from ..anchor.head import AnchorHead
from ..choose import Gate, GateProduct, Pieces, choose
from ..gate.head import GateHead
from ..product.head import ProductHead
from ..slopes import Enclosure, plus, times
from . import bound

SHARE = 0.98  # of eps less the gates' part is for product and tables: adding the parts rounds, too
POINTS = 4097  # of the grid on which the error of a float32 chain is measured


class ChainHead(CertifiedModule):
    """A function with kinks as two layers of attention, with its certified error.

    >>> head = ChainHead.fit("hardswish", -8, 8)
    >>> head(torch.tensor([-4.0, -1.5, 8.0])).allclose(torch.tensor([0.0, -0.375, 8.0]), atol=1e-5)
    True
    >>> head.bound < 2e-5, ChainHead.fit("elu", -8, 8, eps=1e-4).anchors < 16
    (True, True)
    """

    family = "chain"
    called = "gates and the heads that read them"
    schema: ClassVar[Any] = {"function": str, "interval": PAIR, "heads": {}}

    def __init__(self, function: Univariate, lo: float, hi: float, heads: Mapping[str, CertifiedModule]):
        super().__init__()
        self.function, (self.lo, self.hi) = function, interval(lo, hi)
        choice = choose(function, self.lo, self.hi)
        if not isinstance(choice, (GateProduct, Pieces)):
            raise ArgumentError(f"{function.name} on [{lo:g}, {hi:g}] is no chain: a head of one layer computes it")
        self.choice = choice
        self.box = Box(y=(self.lo, self.hi))
        self.heads = nn.ModuleDict(heads)

    @classmethod
    @shown("fitting")
    @by_name
    def fit(
        cls, fn: str | Univariate, lo: float, hi: float, eps: float | None = None, dtype: torch.dtype = torch.float32
    ) -> ChainHead:
        """The chain for a function on [lo, hi]: as small as certifies eps, or as accurate as the dtype deserves."""
        function, (low, high) = get(fn), interval(lo, hi)
        shipped(dtype)
        if eps is not None:
            positive("eps", eps)
        empty = cls(function, low, high, {})
        sizes = (None,) if eps is None else (eps, None)  # what certifies eps, else as accurate as heads are by default
        best = math.inf
        for wanted in sizes:
            try:
                head = cls(function, low, high, empty._made(wanted, dtype))
            except PrecisionError:
                if wanted is None:
                    raise
                continue
            found = head.attach(head.recertify()).bound
            assert found is not None
            if eps is None or found <= eps:
                return head
            best = min(best, found)
        wider = "" if dtype == torch.float64 else ", use dtype=torch.float64"
        raise PrecisionError(
            f"eps = {eps:g} cannot be reached for {function.name} on [{low:g}, {high:g}] in {dtype_name(dtype)}; the "
            f"smallest bound found is {upper_text(best)}: ask for that{wider}, or shrink the interval",
            reachable=best,
        )

    def _made(self, eps: float | None, dtype: torch.dtype) -> dict[str, CertifiedModule]:
        """The heads, gates first: what they leave of eps is for the product, or for the tables in equal shares."""
        made: dict[str, CertifiedModule] = {}
        boxes: dict[str, bound.Interval] = {}
        spent = 0.0
        for key, gate in self._gates().items():
            head = GateHead.fit(gate.name, self.lo, self.hi, dtype=dtype, **gate.arguments)
            assert head.bound is not None
            made[key] = head
            boxes[key], factor = self._reads(key, gate, head.bound, dtype)
            spent += factor * head.bound
        rest = None if eps is None else SHARE * (eps - spent)
        if rest is not None and rest <= 0:
            raise PrecisionError(f"the gates of {self.name} alone are off by {spent:.3e}", reachable=None)
        if "gate" in boxes:
            made["product"] = ProductHead.fit((self.lo, self.hi), boxes["gate"], rest, dtype=dtype)
        share = None if rest is None else rest / max(len(self._parts()), 1)
        for i in range(len(self._parts())):
            made[f"table{i}"] = AnchorHead.fit(self.function, *boxes[f"clip{i}"], eps=share, dtype=dtype)
        return made

    def _parts(self) -> tuple[Gate, ...]:
        return () if isinstance(self.choice, GateProduct) else tuple(part.clip for part in self.choice.parts)

    def _gates(self) -> dict[str, Gate]:
        """The gates that the first layer consists of, by the names of their heads."""
        if isinstance(self.choice, GateProduct):
            return {"gate": self.choice.gate}
        lines = {} if self.choice.lines is None else {"lines": self.choice.lines}
        return {**lines, **{f"clip{i}": clip for i, clip in enumerate(self._parts())}}

    def _reads(self, key: str, gate: Gate, off: float, dtype: torch.dtype) -> tuple[bound.Interval, float]:
        """What is read of a gate that is off by `off`: the interval, and by how much its error counts."""
        box = bound.reach(gate.function, self.lo, self.hi, off, dtype)
        if key == "lines":
            return box, 1.0
        if key == "gate":
            return box, self._size(dtype)
        return box, bound.moved(self.function, box, 1.0, dtype)

    def _size(self, dtype: torch.dtype) -> float:
        low, high = round_outward(np.array([self.lo]), np.array([self.hi]), dtype)
        return max(abs(float(low[0])), abs(float(high[0])))

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    @property
    def layer(self) -> AttentionLayer:
        """The first layer's first gate."""
        first = self._head(next(iter(self._gates())))
        assert isinstance(first, GateHead)
        return first.layer

    @property
    def anchors(self) -> int:
        """The number of anchors in all tables."""
        return sum(head.size for head in self.heads.values() if isinstance(head, AnchorHead))

    def _head(self, key: str) -> CertifiedModule:
        head = self.heads[key]
        assert isinstance(head, CertifiedModule)
        return head

    def core(self, *inputs: Tensor) -> Tensor:
        (y,) = inputs
        if isinstance(self.choice, GateProduct):
            return self._head("product").core(y, self._head("gate").core(y))
        parts = [self._head(f"table{i}").core(self._head(f"clip{i}").core(y)) for i in range(len(self._parts()))]
        if self.choice.lines is not None:
            parts.insert(0, self._head("lines").core(y))
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return out

    def recertify(self) -> Certificate:
        """The bounds of the heads as they are stored now, and what each of them does to the output."""
        dtype = self.dtype
        if dtype not in SHIPPED or any(parameter.dtype != dtype for parameter in self.parameters()):
            raise CertificateError(f"certificates are for float32 or float64 weights throughout, these are {dtype}")
        found = {key: self._head(key).recertify() for key in self.heads}
        self._check_kinds()
        terms: list[Term] = []
        sizes: list[float] = []
        for key, gate in self._gates().items():
            off = _proved(found[key])
            box, factor = self._reads(key, gate, off, dtype)
            terms.append(Term(f"{key}, {gate.name}", "propagation", bound.carried(factor, off), f"times {factor:.4g}"))
            if key == "lines":
                sizes.append(bound.size_of(gate.function, (self.lo, self.hi), off, dtype))
                continue
            reader = "product" if key == "gate" else key.replace("clip", "table")
            second = self._head(reader)
            bound.covered(reader, second.box.intervals()[-1], box, dtype)
            if key == "gate":
                bound.covered(reader, second.box["x"], self.box["y"], dtype)
            else:
                sizes.append(bound.size_of(self.function, box, _proved(found[reader]), dtype))
            terms += found[reader].terms
        terms.append(Term(self.name, "rounding", bound.sum_error(sizes, dtype), f"adding {len(sizes)} parts"))
        terms = [term for term in terms if term.value]
        return Certificate(
            kind="certified",
            bound=total(term.value for term in terms),
            dtype=dtype_name(dtype),
            target=self.function.name,
            box=self.box,
            terms=tuple(terms),
            measured=self._measure() if dtype == torch.float32 else None,  # float64 has no finer reference
            lemmas=tuple(dict.fromkeys(lemma for one in found.values() for lemma in one.lemmas)),
            assumptions=tuple(dict.fromkeys((*assumptions(), *(a for one in found.values() for a in one.assumptions)))),
        )

    def lipschitz(self) -> float:
        """How steep the stored chain is on its interval, at most (lemma H2): the chain rule on cells of the gates.

        >>> 1.49 < ChainHead.fit("hardswish", -8, 8).lipschitz() < 1.6
        True
        """
        self.recertify()  # or heads read more than they are made for
        gates = {key: head.steepness() for key in self._gates() if isinstance(head := self._head(key), GateHead)}
        edges = np.unique(np.concatenate([gate.edges for gate in gates.values()]))
        cells = edges[:-1], edges[1:]
        read = {key: (gate.values(*cells), gate.slopes(*cells)) for key, gate in gates.items()}
        product = self.heads["product"] if isinstance(self.choice, GateProduct) else None
        if isinstance(product, ProductHead):
            value, slope = read["gate"]
            if product.swapped:
                by_gate, own = product.partials(_inside(value, product.box["y"]), cells)
            else:
                own, by_gate = product.partials(cells, _inside(value, product.box["y"]))
            low, high = plus(own, times(by_gate, slope))
            return float(np.maximum(-low, high).max())
        parts = [read["lines"][1]] if "lines" in read else []
        for key, (value, slope) in read.items():
            table = self.heads[key.replace("clip", "table")]
            if isinstance(table, AnchorHead):
                parts.append(times(table.steepness().slopes(*_inside(value, table.box.intervals()[0])), slope))
        low, high = plus(*parts)
        return float(np.maximum(-low, high).max())

    def _check_kinds(self) -> None:
        """Raise unless every head is for what the function's choice says: gates, their parameters, tables of it."""
        wrong = []
        for key, gate in self._gates().items():
            config = self._head(key).config()
            if (config["name"], config["parameters"]) != (gate.name, gate.arguments):
                wrong.append(f"{key} is the gate {config['name']}, not {gate.name}")
        for key in self.heads:
            head = self._head(key)
            if key.startswith("table") and not (
                isinstance(head, AnchorHead) and head.function == self.function and not (head.relative or head.fast)
            ):
                wrong.append(f"{key} is no table of {self.name}")
            if key == "product" and not (isinstance(head, ProductHead) and head.width is None):
                wrong.append("the product is none of numbers")
        if wrong:
            raise CertificateError(f"a chain for {self.name} cannot be certified: {'; '.join(wrong)}")

    @torch.no_grad()
    def _measure(self) -> float:
        low, high = (float(x[0]) for x in round_outward(np.array([self.lo]), np.array([self.hi]), self.dtype))
        y = torch.from_numpy(np.linspace(low, high, POINTS)).to(self.dtype).clamp(low, high)
        out = self.core(y.to(next(self.parameters()).device)).double().cpu()
        return float((out - self.function.value(y.double())).abs().max())

    def config(self) -> dict[str, Any]:
        heads = {key: {"family": self._head(key).family, "config": self._head(key).config()} for key in self.heads}
        return {"function": self.name, "interval": [self.lo, self.hi], "heads": heads}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> ChainHead:
        lo, hi = (float(x) for x in config["interval"])
        heads = {}
        for key, kind in config["heads"].items():
            own = {n.removeprefix(f"heads.{key}."): t for n, t in tensors.items() if n.startswith(f"heads.{key}.")}
            require(kind, {"family": str, "config": {}}, f"head '{key}' of a chain")
            family = CertifiedModule.families[kind["family"]]
            require(kind["config"], family.schema, f"head '{key}' of a chain")
            heads[key] = family.rebuild(kind["config"], own)
        head = cls(parse(str(config["function"])), lo, hi, heads)
        wanted = {*head._gates(), *(("product",) if isinstance(head.choice, GateProduct) else ())}
        wanted |= {f"table{i}" for i in range(len(head._parts()))}
        if set(heads) != wanted:
            raise CertificateError(f"a chain for {head.name} has the heads {sorted(wanted)}, not {sorted(heads)}")
        return head

    def extra_repr(self) -> str:
        return f"{self.name} on [{self.lo:g}, {self.hi:g}]"


def _inside(ends: Enclosure, box: tuple[float, float]) -> Enclosure:
    """What is known of a number that lies in an interval; enclosures of it may be wider."""
    return np.clip(ends[0], *box), np.clip(ends[1], *box)


def _proved(certificate: Certificate) -> float:
    if certificate.bound is None or not math.isfinite(certificate.bound):
        raise CertificateError(f"there is no bound for {certificate.target}")
    return certificate.bound
