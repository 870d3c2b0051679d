"""What each part of a compiled network computes, layer by layer, with its error and its share of the bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arguments import shortened
from ..certificates.certificate import total
from ..compiler.compiled import CompiledNetwork
from ..heads.families import rule_of
from ..programs.affine import forms
from ..programs.ops import Apply, Op
from ..programs.positions import reads

LONGEST_TITLE = 70  # letters: what stands on one line of a page
#: Words that stand in the tables of a page, and what they mean.
MEANING = {
    "kappa": "the inverse temperature of a head with anchors: well below 1 it interpolates, above it selects one",
    "nodes": "points of the quadrature rule behind a product; its error falls geometrically with their number",
    "sharpness": "the factor of the logits: the larger, the narrower the stretch around a kink where weights change",
    "exact": "no approximation: all that is left is rounding",
}


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
    """A network's operations in the order of its layers, what its affine maps add, and what its output reads.

    `output` has the numbers of operations, `direct` the channels of the input.
    """

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
    reading = net.reading()
    of, numbers = forms(net.program), {site.op for site in net.layout.sites}

    def sources(*values: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        weights = [(atom, of[value].weight[atom]) for value in values for atom in of[value].atoms]
        channels = {int(c) for atom, weight in weights if atom == 0 for c in np.flatnonzero(weight.any(1))}
        return tuple(sorted({atom for atom, _ in weights} & numbers)), tuple(sorted(channels))

    units = []
    for index, step in enumerate(net.layout.steps):
        for site in step.sites:
            op, local, heads = net.program.ops[site.op], reading.bounds[site.op], reading.heads[site.op]
            rule = rule_of(site.family)
            before, inputs = sources(*reads(net.program, site.op))
            units.append(
                Unit(
                    number=site.op,
                    layer=index + 1,
                    family=site.family,
                    name=net.program.labels[site.op] or f"%{site.op}",
                    operation=_operation(op),
                    heads=sum(len(each.tables["W_Q"]) for each in heads),
                    anchors=rule.anchors(heads),
                    interval=" × ".join(f"[{low:.3g}, {high:.3g}]" for low, high in local.intervals),
                    temperature=rule.describe(site, heads),
                    error=local.total,
                    share=total(t.value for t in terms if t.site.split()[0] == f"%{site.op}"),
                    reads=before,
                    inputs=inputs,
                )
            )
    affine = total(t.value for t in terms if not t.site.startswith("%"))
    return Structure(tuple(units), len(net.layout.steps), affine, *sources(net.program.output))


def _operation(op: Op) -> str:
    """What an operation does, in a word or as a function of y."""
    return op.function.name.removeprefix("expr: ") if isinstance(op, Apply) else op.word


def title(net: CompiledNetwork) -> str:
    """A formula as it is; a module by its name, what goes in and out, and the functions within."""
    program, text = net.program, net.certificate.target
    if net.box.names is None:
        sizes = (" × ".join(map(str, shape)) or "1" for shape in (program.box.shape, program.output_shape))
        used = dict.fromkeys(_operation(program.ops[site.op]) for site in net.layout.sites)
        within = f", with {', '.join(used)}" if used else ""
        text = f"{program.source}: {' to '.join(sizes)}{within}"
    return shortened(text, LONGEST_TITLE, "…")
