"""`CompiledPrograms`: one attention-only network that computes several token programs, heads in common."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

from torch import Tensor

from ...certificates.certificate import Certificate, Kind
from ...errors import ArgumentError, CertificateError, closest
from ...network import AttentionLayer, AttentionOnly
from ..language import SOp
from .compiled import CompiledProgram, TokenNetwork, Trace, decoded, stored_network
from .data import OUTPUTS, program_json, read_domain, read_program
from .facts import Facts, domain_of
from .layout import ProgramLayout
from .normal import normal


class CompiledPrograms(TokenNetwork):
    """What `attnforge.compile` returns for a dict of token programs: one network, an output for each name.

    Called with a sequence it returns the values of every program by name. `net["name"]` is the network of one of them,
    with all heads and the read-out of that program: it goes out (exports, manifests) from there. The certificate is
    that of all of them together.
    """

    family = "programs"

    def __init__(
        self, facts: Facts, programs: Mapping[str, SOp], layout: ProgramLayout, network: AttentionOnly, pos: Tensor
    ):
        super().__init__(facts.domain, layout, network, pos)
        self.facts, self.programs = facts, dict(programs)

    @property
    def _ends(self) -> list[int]:
        """Where the columns of each output end."""
        facts = self.facts
        return list(accumulate(1 if facts.numeric(o) else len(facts.values(o)) for o in facts.outputs))

    def _parts(self) -> list[slice]:
        return [slice(start, end) for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _alone(self, number: int) -> CompiledProgram:
        """The network of one output, from the weights as they are now."""
        *body, last = cast("list[AttentionLayer]", list(self.network.layers))
        S, s = last.S, last.s
        if S is None or s is None or S.shape[-1] != self._ends[-1] or last.heads():
            raise CertificateError(f"the last layer must be an affine map to {self._ends[-1]} columns")
        part = self._parts()[number]
        read = AttentionLayer([], S=S.detach()[:, part], s=s.detach()[part])
        facts = copy.copy(self.facts)  # all that is known of the ops is known of every output
        facts.program = facts.outputs[number]
        found = CompiledProgram(
            facts, list(self.programs.values())[number], self.layout, AttentionOnly([*body, read]), self.positions
        )
        found.beside = tuple(self.programs.values())
        return found

    def __getitem__(self, name: str) -> CompiledProgram:
        names = list(self.programs)
        if name not in names:
            raise ArgumentError(f"there is no output {name!r}{closest(str(name), names)}; there are {', '.join(names)}")
        found = copy.deepcopy(self._alone(names.index(name)))
        found.attach(found.recertify())
        return found.eval()

    def decode(self, logits: Tensor, lengths: Sequence[int]) -> list[dict[str, list[Any]]]:
        """For each sequence the values of every program, by name."""
        facts = self.facts
        found = [
            decoded(None if facts.numeric(output) else facts.values(output), logits[..., part], lengths)
            for output, part in zip(facts.outputs, self._parts(), strict=True)
        ]
        return [dict(zip(self.programs, row, strict=True)) for row in zip(*found, strict=True)]

    def trace(self, sequence: Iterable[object]) -> dict[str, Trace]:
        """For each program every variable of the network on a sequence, beside the interpreter's."""
        given = list(sequence)
        return {name: self._alone(number).trace(given) for number, name in enumerate(self.programs)}

    def marked(self, values: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Values by name behind the marker of the domain."""
        return {name: super(CompiledPrograms, self).marked(row) for name, row in values.items()}

    def recertify(self) -> Certificate:
        """The proofs of all programs together: every margin once, and the largest bound."""
        found = [self._alone(number).recertify() for number in range(len(self.programs))]
        heads = [m for m in found[0].margins if m.site != "read-out"]  # the same in each: all have all heads
        outs = [
            replace(m, site=f"read-out: {name}")
            for name, one in zip(self.programs, found, strict=True) for m in one.margins if m.site == "read-out"
        ]  # fmt: skip
        terms = [
            replace(term, site=name)
            for name, one in zip(self.programs, found, strict=True) for term in one.terms
        ]  # fmt: skip
        worst = max(found, key=lambda one: cast(float, one.bound))
        kind: Kind = "exact" if all(one.kind == "exact" for one in found) else "certified"
        largest = () if kind == "exact" else (max(terms, key=lambda term: term.value),)
        target = f"[{', '.join(self.programs)}]"
        domain = domain_of(self.programs.values(), self.facts)
        return replace(worst, kind=kind, target=target, margins=(*heads, *outs), terms=largest, domain=domain)

    def explain(self) -> str:
        """The programs, the size, and the margins of the certificate."""
        lines = [f"{name} = {program!r}" for name, program in self.programs.items()]
        return "\n".join([*lines, f"on {self.domain!r}", str(self.size), "", str(self.certificate)])

    def config(self) -> dict[str, Any]:
        programs = {name: program_json(program) for name, program in self.programs.items()}
        return {"programs": programs, "order": list(self.programs), **self.stored_config()}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> CompiledPrograms:
        """The network that a file describes."""
        domain, names = read_domain(config["domain"]), named(config["order"])
        if set(names) != set(config["programs"]):
            raise CertificateError("the file lists other outputs than it has programs")
        programs = {name: read_program(config["programs"][name]) for name in names}
        outputs = [normal(program, domain) for program in programs.values()]
        return cls(Facts(outputs[0], domain, outputs), programs, *stored_network(config, tensors))

    def extra_repr(self) -> str:
        return f"{', '.join(self.programs)} on {self.domain!r}: {self.size}"


def named(names: Sequence[object]) -> list[str]:
    """Names of outputs, or an `ArgumentError`."""
    found = list(names)
    if not 1 <= len(found) <= OUTPUTS or len(set(map(str, found))) < len(found):
        raise ArgumentError(f"a network has 1 to {OUTPUTS} outputs, each with a name of its own, got {len(found)}")
    wrong = next((name for name in found if not (isinstance(name, str) and name and name.isprintable())), None)
    if wrong is not None:
        raise ArgumentError(f"the name of an output is a line of text, got {wrong!r}")
    return cast("list[str]", found)
