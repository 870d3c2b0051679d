"""What each part of a compiled network computes, layer by layer, with its error and its share of the bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..certificates.certificate import total
from ..compiler.assemble import site_spec, tables_of
from ..compiler.compiled import CompiledNetwork
from ..compiler.layout import Site, Stage, forms
from ..compiler.plan import EXACT_GATES
from ..compiler.propagation import Propagation
from ..dtypes import Array
from ..network import AttentionLayer
from ..programs.ops import Apply, Op
from ..programs.positions import reads


@dataclass(frozen=True)
class Unit:
    """One operation and the heads that carry it out.

    `name` is the part of the target that it stands for, `operation` what its heads do. `error` is what they add
    themselves, at most, and `share` what becomes of that in the network's bound. `reads` are the numbers of the
    operations it depends on, `inputs` the channels of the input.
    """

    number: int
    layer: int
    family: str
    name: str
    operation: str
    heads: int
    anchors: int
    interval: str
    temperature: str
    error: float
    share: float
    reads: tuple[int, ...]
    inputs: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it, for other programs."""
        return {**vars(self), "reads": list(self.reads), "inputs": list(self.inputs)}


@dataclass(frozen=True)
class Structure:
    """A network's operations in the order of its layers, what its affine maps add, and what its output reads: numbers
    of operations, channels of the input."""

    units: tuple[Unit, ...]
    layers: int
    affine: float
    output: tuple[int, ...]
    direct: tuple[int, ...]

    def layer(self, number: int) -> tuple[Unit, ...]:
        """The operations of one layer; the first is number 1."""
        return tuple(unit for unit in self.units if unit.layer == number)


def structure(net: CompiledNetwork) -> Structure:
    """Takes a network apart; raises `CertificateError` where its certificate is stale."""
    terms = net.certificate.terms
    analysis = Propagation(net.layout, net.network, net.flats, net.dtype)
    of, numbers = forms(net.program), {site.op for site in net.layout.sites}

    def sources(*values: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        weights = [(atom, of[value].weight[atom]) for value in values for atom in of[value].atoms]
        channels = {int(c) for atom, weight in weights if atom == 0 for c in np.flatnonzero(weight.any(1))}
        return tuple(sorted({atom for atom, _ in weights} & numbers)), tuple(sorted(channels))

    units = []
    for index, stage in enumerate(net.layout.stages):
        layer = analysis.layer(2 * index + 1)
        for site in stage.sites:
            op, local = net.program.ops[site.op], analysis.local[site.op]
            heads, temperature = _heads(op, stage, layer, site)
            before, inputs = sources(*reads(net.program, site.op))
            units.append(
                Unit(
                    number=site.op,
                    layer=index + 1,
                    family=site.family,
                    name=net.program.sites[site.op] or f"%{site.op}",
                    operation=_operation(op),
                    heads=heads,
                    anchors=int(site.config.get("anchors", 0)),
                    interval=" × ".join(f"[{low:.3g}, {high:.3g}]" for low, high in local.intervals),
                    temperature=temperature,
                    error=local.total,
                    share=total(t.value for t in terms if t.site.split()[0] == f"%{site.op}"),
                    reads=before,
                    inputs=inputs,
                )
            )
    affine = total(t.value for t in terms if not t.site.startswith("%"))
    return Structure(tuple(units), len(net.layout.stages), affine, *sources(net.program.output))


def _operation(op: Op) -> str:
    """What an operation does, in a word or as a function of y."""
    return op.function.name.removeprefix("expr: ") if isinstance(op, Apply) else op.word


def _heads(op: Op, stage: Stage, layer: AttentionLayer, site: Site) -> tuple[int, str]:
    """How many heads a site has, and how warm or sharp they are."""
    config = site.config
    if site.family == "anchor":
        group = layer.heads()[list(tables_of(stage)).index(int(config["table"]))]
        keys = group.M_K.detach().double().cpu().numpy()[0]
        warmth = kappa(keys[:, 0], keys[:, 1])
        return op.width, "" if warmth is None else f"kappa {warmth:.3g}"
    if site.family in ("gate", "product", "square"):
        count = op.width * site_spec(site).W_Q.shape[0]
        if site.family != "gate":
            return count, f"{config['nodes']} nodes"
        exact = config["name"] in EXACT_GATES
        return count, "exact" if exact else f"sharpness {float(config['sharpness']):.3g}"
    own = [g for g in layer.heads() if g.purpose.startswith(f"{site.family}: ")]
    alike = [s for s in stage.sites if s.family == site.family]
    sharp = f"sharpness {float(config['sharpness']):.3g}" if "sharpness" in config else ""
    return own[alike.index(site)].heads, sharp


def kappa(slope: Array, offset: Array) -> float | None:
    """The scale-free inverse temperature of a table of logits slope * y + offset, from the table alone.

    Neighbouring logits cross half way between their anchors, so the distance of two crossings is the local spacing h,
    and the slopes of neighbours differ by beta phi'' h: half their product is kappa (lemma A1).

    >>> places = np.arange(5.0)
    >>> round(kappa(2 * 0.3 * places, -0.3 * places**2), 6)
    0.3
    """
    order = np.argsort(slope)
    step = np.diff(slope[order])
    if len(step) < 2 or not (step > 0).all():
        return None
    crossing = -np.diff(offset[order]) / step
    found = 0.25 * (step[:-1] + step[1:]) * np.diff(crossing)
    return float(np.median(found))
