"""`CompiledNetwork`: an attention-only network with the program it was made from and its certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from ..arguments import counted, number, whole
from ..box import Box
from ..certificates.certificate import Certificate, Term, total
from ..certificates.certified import CertifiedModule
from ..certificates.rounding import assumptions
from ..certificates.schema import BOX, MOST_TOKENS, Whole
from ..dtypes import DTYPES, Array, dtype_name, shipped
from ..errors import ArgumentError, CertificateError
from ..heads.families import site_type
from ..heads.fast.even import EvenTable
from ..heads.stored import TABLES
from ..native.limits import repeated, within
from ..network import AttentionLayer, AttentionOnly, Heads
from ..programs.enclose import MOST_SYMBOLS
from ..programs.ops import Constant
from ..programs.program import Program
from .enclosure import spells
from .layout import Layout, lower
from .lipschitz import EFFORT as STEEP
from .lipschitz import Lipschitz, lipschitz
from .propagation import EFFORT, FIRST, NetworkBound, Propagation, Reading, StoredLayers, network_bound

#: First cells that a file may ask for: what the compiler itself uses at most.
MOST_CELLS = 256 * FIRST
#: Entries of all ranges that a file may ask for: 4 GB of float64.
MOST_ENTRIES = 1 << 29
#: How far beyond their intervals, as a share of them, heads are bounded when training has pushed arguments out: not at
#: all, by what rounding moves, by what a fine-tuning run moves. Wider intervals make every bound a little worse.
STRETCHES = (0.0, 0.02, 0.3)


@dataclass(frozen=True)
class Size:
    """How large a network is."""

    layers: int
    heads: int
    anchors: int
    parameters: int
    largest_logit: float

    def __str__(self) -> str:
        shown = [counted(getattr(self, f"{word}s"), word) for word in ("layer", "head", "anchor", "parameter")]
        return f"{', '.join(shown)}, largest |logit| {self.largest_logit:.3g}"


class CompiledNetwork(CertifiedModule):
    """What `attnforge.compile` returns: softmax attention and affine maps that compute a program, with a
    certificate."""

    family = "network"
    schema: ClassVar[Any] = {
        "program": {
            "format": Whole(), "box": BOX, "tokens": Whole(1, MOST_TOKENS), "ops": [{"op": str, "width": Whole(1)}],
            "output": Whole(), "output_shape": [Whole(1)], "output_rows": str, "source": str, "sites": [str],
        },
        "arrays": {}, "sites": [(Whole(), str, {})], "boxes": [BOX], "dtype": str, "eps": float, "rtol": float,
        "grid": Whole(1, MOST_CELLS), "strict": bool, "flats?": [[float]], "outputs?": [str],
    }  # fmt: skip
    stacked = True
    #: Names of the outputs, where the target had any: those of the last dimension.
    outputs: tuple[str, ...] = ()
    constants: Tensor | None

    def __init__(
        self,
        layout: Layout,
        network: AttentionOnly,
        dtype: torch.dtype,
        eps: float,
        boxes: tuple[Box, ...] = (),
        grid: int = FIRST,
        rtol: float = 0.0,
        strict: bool = False,
    ):
        """`network` are the layers of `layout`; the certificate aims at eps + rtol |target|, first on `grid` cells."""
        super().__init__()
        self.layout, self.network = layout, network
        self.eps, self.rtol, self.grid, self.strict = eps, rtol, grid, strict
        self.box = layout.program.box
        self.boxes = boxes or (self.box,)
        if [pair for box in self.boxes for pair in box.intervals()] != self.box.intervals():
            raise ArgumentError(f"the boxes of the inputs, {self.boxes!r}, are not those of the program, {self.box!r}")
        self.register_buffer("constants", _constants(layout.program, dtype))
        for step, layer in zip(layout.steps, list(network.layers)[1::2], strict=False):
            for group, heads in zip(step.groups, cast(AttentionLayer, layer).heads(), strict=True):
                named = {site.lattice for site, _ in group.members}
                heads.even = EvenTable.named(named.pop()) if len(named) == 1 else None

    @property
    def program(self) -> Program:
        """What the network computes."""
        return self.layout.program

    @property
    def size(self) -> Size:
        """Layers, heads, anchors, parameters and the largest |logit| over the memory keys."""
        groups = list(self.network.groups())
        anchors = sum(g.slots for g in groups if g.scope == "memory")
        count = sum(p.numel() for p in self.parameters())
        return Size(len(self.layout.steps), sum(g.heads for g in groups), anchors, count, self._largest_logit())

    def _largest_logit(self) -> float:
        """A bound of |logit| over constant keys for arguments in the heads' intervals; token heads add their own."""
        most = 0.0
        for step, layer in zip(self.layout.steps, list(self.network.layers)[1::2], strict=False):
            reach = max((abs(end) for site in step.sites for pair in site.spans for end in pair), default=1.0)
            for group in cast(AttentionLayer, layer).heads():
                bias = 0.0 if group.b_Q is None else float(group.b_Q.detach().abs().max())
                query = float(group.W_Q.detach().abs().max()) * reach + bias
                keys = [t for t in (group.M_K, group.b_K) if t is not None]
                most = max(most, query * max((float(t.detach().abs().sum(-1).max()) for t in keys), default=0.0))
            most = max([most, *(site.largest_logit() for site in step.sites)])
        return most

    def core(self, *inputs: Tensor) -> Tensor:
        """The attention-only computation: lay the input out as tokens, run the layers, read the output off."""
        program = self.program
        batch = inputs[0].shape[: inputs[0].dim() - len(self.boxes[0].shape)]
        flat = [x.reshape(*batch, box.dim) for x, box in zip(inputs, self.boxes, strict=True)]
        x = flat[0] if len(flat) == 1 else torch.cat(flat, -1)
        state = x.reshape(*batch, program.tokens, program.ops[0].width)
        if self.constants is not None:
            state = torch.cat([state, self.constants.expand(*batch, *self.constants.shape)], -1)
        out = self.network(state)
        rows = out if program.output_rows == "all" else out[..., :1, :]
        return rows.reshape((*batch, *program.output_shape))

    def guard(self, *inputs: Tensor) -> None:
        if len(inputs) != len(self.boxes):
            raise ArgumentError(f"expected {len(self.boxes)} input tensor(s), got {len(inputs)}")
        for i, (x, box) in enumerate(zip(inputs, self.boxes, strict=True)):
            name = "input" if len(inputs) == 1 else f"input {i}"
            self.check_tensor(x, name)
            shape = box.shape
            if x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape:
                names = f": columns {', '.join(box.names)}" if box.names else ""
                raise ArgumentError(
                    f"expected {name} of shape ({', '.join(['...', *map(str, shape)])}){names}, got {tuple(x.shape)}"
                )
            self._check_box(x, box, name)

    def _check_box(self, x: Tensor, box: Box, name: str) -> None:
        """Raise on NaN and infinity; warn once, or raise if strict, about the first coordinate that leaves the box."""
        if not x.numel() or within(x, *_limits(box, x.dtype)):
            return
        lo, hi = _bounds(box, x.dtype)
        flat = x.detach().reshape(-1, box.dim)
        low, high = (end.cpu() for end in torch.aminmax(flat, dim=0))
        if bool(((low >= lo) & (high <= hi)).all()):  # NaN compares false
            return
        outside = ~((low >= lo) & (high <= hi))
        endless = ~(torch.isfinite(low) & torch.isfinite(high))
        i = int(torch.nonzero(endless if bool(endless.any()) else outside)[0])
        label = box.names[i] if box.names else f"{name}[{i}]"
        self.check_range(label, float(low[i]), float(high[i]), float(lo[i]), float(hi[i]))

    def example_input(self) -> tuple[Tensor, ...]:
        return tuple(box.sample(2, dtype=self.dtype) for box in self.boxes)

    def recertify(self) -> Certificate:
        """The bound of the stored weights against the program, computed anew."""
        return self.certificate_of(*self.analyse())

    def reading(self, stretch: float = 0.0) -> Reading:
        """The stored layers, for the error analysis."""
        return StoredLayers(self.layout, self.network, self.constants, self.dtype, stretch)

    def analyse(
        self, effort: int = EFFORT, stretches: Sequence[float] = STRETCHES
    ) -> tuple[Propagation, NetworkBound]:
        """The error analysis of the present weights, and the bound it gives.

        Weights that were trained or rounded may push arguments out of the intervals that their heads were built for;
        where that leaves no bound, intervals larger by each of `stretches` are tried.
        """
        for stretch in stretches:
            propagation = Propagation(self.reading(stretch))
            found = network_bound(propagation, self.eps, self.rtol, effort, self.grid)
            if math.isfinite(found.bound):
                break
        return propagation, found

    def lipschitz(self, effort: int = STEEP) -> Lipschitz:
        """How far outputs can move when inputs do: certified constants of the stored weights on the box (lemma H2).

        >>> import attnforge as af
        >>> net = af.compile("sin(x) + y/2", af.Box(x=(-1, 1), y=(0, 1)), eps=1e-3)
        >>> round(net.lipschitz().constant, 1)
        1.5
        """
        return lipschitz(self.analyse()[0], effort)

    def certificate_of(self, propagation: Propagation, found: NetworkBound) -> Certificate:
        """An analysis as a certificate."""
        if not math.isfinite(found.bound):
            raise CertificateError("no finite bound can be proved for these weights")
        names = [self.program.labels[site.op] or f"%{site.op}" for site in self.layout.sites]
        terms = []
        for site, name, part in zip(self.layout.sites, names, found.parts[:-1], strict=True):
            local = propagation.local[site.op]
            # a head may have no bound on all of its interval, which goes beyond the box, and one where it is used
            known = math.isfinite(local.total)
            rounding = float(part) * (local.rounding / local.total if local.total and known else 0.0)
            rest = float(part) - rounding
            terms.append(Term(f"%{site.op} {name}", "interpolation", max(rest, 0.0), site.family))
            head = f"head error {local.total:.2e}" if known else "counted with its interpolation"
            terms.append(Term(f"%{site.op} {name}", "rounding", rounding, head))
        terms.append(Term("affine maps", "rounding", float(found.parts[-1]), "rounded weights and sums"))
        rest = found.bound - total(t.value for t in terms)
        if self.rtol and rest > 0:
            terms.append(Term("elsewhere", "propagation", rest, "where the relative tolerance allows more"))
        sites = self.layout.sites
        rested = [each for site in sites for each in (site, propagation.local[site.op])]
        return Certificate(
            "certified",
            float(np.nextafter(found.bound, np.inf)) if found.bound else 0.0,
            dtype_name(self.dtype),
            self.program.source,
            self.box,
            tuple(terms),
            lemmas=tuple(dict.fromkeys([*(lemma for each in rested for lemma in each.lemmas), "R2", "R8", "H1"])),
            assumptions=assumptions(heads=bool(sites)),
            program=self.program.written(),
            verified=spells(self.program, self.dtype),
        )

    def config(self) -> dict[str, Any]:
        header, arrays = self.program.to_json()
        return {
            "program": header,
            "arrays": {name: _listed(array) for name, array in arrays.items()},
            "sites": [[site.op, site.family, site.config()] for site in self.layout.sites],
            "boxes": [box.to_json() for box in self.boxes],
            "dtype": dtype_name(self.dtype),
            "eps": self.eps,
            "rtol": self.rtol,
            "grid": self.grid,
            "strict": self.strict,
            **({"outputs": list(self.outputs)} if self.outputs else {}),
        }

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> CompiledNetwork:
        """The network that a file describes: structure from its description, every number from its tensors."""
        arrays = {name: np.array(values, dtype=np.float64) for name, values in config["arrays"].items()}
        program = Program.from_json(config["program"], arrays)
        sites = {}
        for op, family, given in config["sites"]:
            if "table" in given and "edges" not in given:  # as files had it before: cells of all tables in one list
                given = {**given, "edges": config["flats"][given["table"]]}
            sites[int(op)] = site_type(str(family)).read(int(op), given)
        _require_affordable(program, config["grid"])
        layout = lower(program, sites)
        boxes = tuple(Box.from_json(box) for box in config["boxes"])
        dtype, grid = DTYPES[config["dtype"]], whole("grid", config["grid"], 1, MOST_CELLS)
        eps, rtol = number("eps", config["eps"]), number("rtol", config["rtol"])
        network = stored_network(layout, tensors)
        net = cls(layout, network, shipped(dtype), eps, boxes, grid, rtol, bool(config["strict"]))
        net.outputs = tuple(map(str, config.get("outputs", ())))
        return net


def _require_affordable(program: Program, grid: int) -> None:
    """Raise unless the ranges of a program that comes out of a file fit into memory."""
    symbols = 1 + (program.box.dim if program.box.dim <= MOST_SYMBOLS else 0)
    entries = grid * symbols * program.tokens * sum(op.width for op in program.ops)
    if entries > MOST_ENTRIES:
        raise CertificateError(f"its ranges on {grid} cells have {entries:,} entries, more than {MOST_ENTRIES:,}")


def stored_network(layout: Layout, tensors: Mapping[str, Tensor]) -> AttentionOnly:
    """The layers of a layout with the tensors of a file (named as in `CompiledNetwork.state_dict`) for weights."""

    def tables(prefix: str, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: tensors[prefix + name] for name in names if prefix + name in tensors}

    layers = []
    for index in range(2 * len(layout.steps) + 1):
        prefix = f"network.layers.{index}."
        groups = []
        for i, group in enumerate(layout.steps[index // 2].groups if index % 2 else ()):
            given: dict[str, Any] = tables(f"{prefix}groups.{i}.", TABLES)
            groups.append(Heads(group.seat.scope, causal=group.seat.causal, purpose=group.purpose, **given))
        layer = AttentionLayer(groups, **tables(prefix, ("S", "s")))
        layers.append(layout.steps[index // 2].frozen(layer) if index % 2 else layer)
    return AttentionOnly(layers)


@lru_cache(maxsize=256)
def _bounds(box: Box, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bounds of a box, widened to numbers of a dtype, one entry per coordinate."""
    wide = box.outward(dtype)
    return wide.lower.reshape(-1).to(dtype), wide.upper.reshape(-1).to(dtype)


@lru_cache(maxsize=256)
def _limits(box: Box, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same as kernels take them."""
    low, high = map(repeated, _bounds(box, dtype))
    return low, high


def _constants(program: Program, dtype: torch.dtype) -> Tensor | None:
    """The constant values of a program side by side: columns that stand next to the input."""
    found = [op.value for op in program.ops if isinstance(op, Constant)]
    return torch.from_numpy(np.concatenate(found, -1)).to(dtype) if found else None


def _listed(array: Array) -> list[Any]:
    """An array as nested lists; minus infinity, which JSON lacks and masks need, as text that numpy reads back."""
    hidden = np.isneginf(array)
    return np.where(hidden, "-inf", array.astype(object)).tolist() if hidden.any() else array.tolist()
