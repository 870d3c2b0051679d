"""`CompiledProgram`: an attention-only network with the token program it computes, and the proof that it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ...box import Box
from ...certificates.certificate import Certificate, Term, aligned, upper_text, weights_hash
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import assumptions
from ...dtypes import DTYPES, dtype_name, shipped
from ...errors import ArgumentError, CertificateError, DomainError
from ...heads.stored import TABLES
from ...heads.token.bound import UNDERFLOW
from ...network import AttentionLayer, AttentionOnly, Heads
from ..domain import Sequences
from ..language import SOp, evaluate
from ..values import Value, canonical, shown, sorted_values
from .data import OUTPUTS, domain_json, program_json, read_domain, read_program
from .facts import Facts, domain_of
from .layout import Feature, ProgramLayout
from .normal import normal
from .proof import Proof, prove

LISTED = 12  # values of a sequence in a row of a trace: what a line of a terminal holds beside the op's name
LEMMAS = ("P1", "P2", "P3", "P4", "P5", "P6")


@dataclass(frozen=True)
class ProgramSize:
    """How large the network of a program is; parameters count positions and the read-out."""

    layers: int
    heads: int
    width: int
    slots: int
    parameters: int

    def __str__(self) -> str:
        return (
            f"{self.layers} attention layers (no MLP), {self.heads} heads, {self.width} columns, {self.slots} memory "
            f"slots, {self.parameters} parameters"
        )


@dataclass(frozen=True)
class Other:
    """What a network says of an op where none of the columns that are kept of it is on: none of these values."""

    kept: frozenset[Value]

    def __repr__(self) -> str:
        return "other"


@dataclass(frozen=True)
class Traced:
    """One op on one sequence: what the network holds after `layer`, decoded, and what the interpreter says; numbers
    that are not decoded may differ by what is proved of them, `within`."""

    op: str
    layer: int
    network: list[Any]
    interpreter: list[Any]
    within: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether both are the same; of values that no later head reads the network may say that it is an `Other`."""
        pairs = zip(self.network, self.interpreter, strict=True)
        if self.within is not None:
            return all(abs(Fraction(a) - b) <= self.within for a, b in pairs)
        return all(a == b or (isinstance(a, Other) and b not in a.kept) for a, b in pairs)


@dataclass(frozen=True)
class Trace:
    """Every variable of a network on one sequence beside the interpreter's."""

    rows: tuple[Traced, ...]

    @property
    def agrees(self) -> bool:
        """Whether network and interpreter agree throughout."""
        return all(row.agrees for row in self.rows)

    def __str__(self) -> str:
        shown_rows = [
            (row.op, str(row.layer), _list(row.network), "" if row.agrees else _list(row.interpreter))
            for row in self.rows
        ]
        return "\n".join(aligned(("op", "layer", "network", "interpreter, where it differs"), shown_rows))


class TokenNetwork(CertifiedModule):
    """A network on sequences of a domain: how these become tensors, and what it gives becomes values again."""

    positions: Tensor

    def __init__(self, domain: Sequences, layout: ProgramLayout, network: AttentionOnly, positions: Tensor):
        super().__init__()
        self.domain, self.layout, self.network = domain, layout, network
        self.register_buffer("positions", positions)
        self.vocabulary = sorted_values(set(domain.vocabulary))
        self._column = {token: i for i, token in enumerate(self.vocabulary)}
        self.box = Box.cube(0, 1, shape=(domain.max_length, len(self.vocabulary) + 1))

    def __repr__(self) -> str:
        found = self._certificate
        held = "no certificate"
        if found is not None and found.bound is not None and found.weights == weights_hash(self):
            held = "exact" if found.kind == "exact" else f"bound {upper_text(found.bound)}"
        return f"{type(self).__name__}({self.extra_repr()}, {dtype_name(self.dtype)}, {held})"

    @property
    def size(self) -> ProgramSize:
        """Layers, heads, columns, slots and parameters."""
        groups = list(self.network.groups())
        width = max(
            len(self.layout.positions) + len(self.vocabulary) + 1, *(len(la.after) for la in self.layout.layers), 0
        )
        count = sum(p.numel() for p in self.parameters()) + self.positions.numel()
        return ProgramSize(len(self.layout.layers), len(groups), width, sum(g.slots for g in groups), count)

    def decode(self, logits: Tensor, lengths: Sequence[int]) -> list[Any]:
        """The values that logits stand for, without padding."""
        raise NotImplementedError

    def stored_config(self) -> dict[str, Any]:
        """What `stored_network` reads besides tensors, and the domain."""
        return {
            "domain": domain_json(self.domain), "layout": self.layout.to_json(),
            "purposes": [group.purpose for group in self.network.groups()], "dtype": dtype_name(self.dtype),
        }  # fmt: skip

    def marked(self, values: Any) -> Any:
        """Values of one sequence behind the marker of the domain, where it has one."""
        return values if self.domain.bos is None else [self.domain.bos, *values]

    # ---- sequences

    def forward(self, *inputs: Any) -> Any:
        """Values for sequences, logits for tensors."""
        if len(inputs) == 1 and not isinstance(inputs[0], Tensor):
            return self.run(inputs[0])
        return super().forward(*inputs)

    @torch.no_grad()
    def run(self, given: Any) -> Any:
        """The program's values on a sequence, or on each of a list of sequences.

        What is itself a sequence of tokens of the vocabulary is taken for one.
        """
        if not isinstance(given, Iterable):
            raise ArgumentError(f"give a sequence of tokens, or a list of sequences, got {type(given).__name__}")
        items = given if isinstance(given, str) else list(given)
        if isinstance(items, str) or all(self._is_token(item) for item in items):
            return self._many([items])[0]
        wrong = next(
            (item for item in items if isinstance(item, str) is False and not isinstance(item, Iterable)), None
        )
        if wrong is not None or len(
            {isinstance(i, str) and not self._is_token(i) and len(i) == 1 for i in items} & {True}
        ):
            self.domain.check(items)  # raises, and names the token
        return self._many(items)

    def _is_token(self, item: object) -> bool:
        try:
            value = canonical(item)
        except ArgumentError:
            return False
        return value in self._column or (self.domain.bos is not None and value == self.domain.bos)

    def _many(self, sequences: Sequence[Any]) -> list[Any]:
        tokens = [self.domain.check(sequence) for sequence in sequences]
        found: list[Any] = [[]] * len(tokens)
        for some in _batches([len(sequence) for sequence in tokens]):
            logits = self.core(self.encode([tokens[i] for i in some]))
            for i, values in zip(some, self.decode(logits, [len(tokens[i]) for i in some]), strict=True):
                found[i] = self.marked(values)
        return found

    def encode(self, sequences: Sequence[Sequence[Value]]) -> Tensor:
        """Sequences (without `bos`) as a tensor: one-hot tokens, the flag of tokens, zeros for padding."""
        longest = max(len(sequence) for sequence in sequences)
        x = torch.zeros(
            len(sequences), longest, len(self.vocabulary) + 1, dtype=self.dtype, device=self.positions.device
        )
        lengths = [len(sequence) for sequence in sequences]
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place = torch.cat([torch.arange(length) for length in lengths])
        column = torch.tensor([self._column[token] for sequence in sequences for token in sequence])
        x[row, place, column] = 1.0
        x[row, place, -1] = 1.0
        return x

    def ids(self, sequences: Sequence[Sequence[Value]], length: int | None = None) -> Tensor:
        """Sequences (without `bos`) as token ids, the place of each token in `vocabulary`; padding is the id after."""
        longest = max(map(len, sequences)) if length is None else length
        found = torch.full((len(sequences), longest), len(self.vocabulary), device=self.positions.device)
        for b, sequence in enumerate(sequences):
            found[b, : len(sequence)] = torch.tensor([self._column[token] for token in sequence])
        return found

    def tensors(self, x: Tensor) -> Tensor:
        """The network underneath: one-hot tokens (see `encode`) or token ids (see `ids`) in, logits out."""
        return super().forward(x)

    def core(self, *inputs: Tensor) -> Tensor:
        """Token ids as one-hot rows, positions beside the tokens, then the layers."""
        (x,) = inputs
        x = x if x.is_floating_point() else token_rows(x, len(self.vocabulary), self.dtype)
        places = self.positions[: x.shape[-2]]
        return cast(Tensor, self.network(torch.cat([x, places.expand(*x.shape[:-1], places.shape[-1])], -1)))

    def guard(self, *inputs: Tensor) -> None:
        if len(inputs) != 1:
            raise ArgumentError(f"expected one tensor of one-hot tokens, got {len(inputs)}")
        (x,) = inputs
        if isinstance(x, Tensor) and not x.is_floating_point():
            known = len(self.vocabulary)
            x = whole_ids(x, known)
            ends = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
            if ends[0] < 0 or ends[1] > known:
                raise DomainError(
                    f"token ids are 0 to {known - 1}, and {known} for padding, got {ends[0]} to {ends[1]}"
                )
            x = token_rows(x, known, self.dtype)
        self.check_tensor(x, "tokens")
        width, longest = len(self.vocabulary) + 1, self.domain.max_length
        if x.dim() < 2 or x.shape[-1] != width or not 1 <= x.shape[-2] <= longest:
            raise ArgumentError(
                f"expected one-hot tokens of shape (..., 1 to {longest}, {width}), got {tuple(x.shape)}"
            )
        flags, hot = x[..., -1], x[..., :-1]
        good = ((hot == 0) | (hot == 1)).all() & (hot.sum(-1) == flags).all() & (flags[..., :1] == 1).all()
        if not bool(good & (flags[..., 1:] <= flags[..., :-1]).all()):
            raise DomainError(
                "tokens are one-hot rows with a last entry 1, padding is zeros, after one token at least; "
                "net.encode(sequences) makes such tensors"
            )

    def example_input(self) -> tuple[Tensor, ...]:
        rows = self.domain.sample(2)
        full = [tuple((row * self.domain.max_length)[: self.domain.max_length]) for row in rows]
        return (self.encode(full),)


class CompiledProgram(TokenNetwork):
    """What `attnforge.compile` returns for a token program: softmax attention and affine maps, and a certificate.

    Called with a sequence (or a list of them) it returns the program's values; called with a tensor of one-hot tokens,
    (..., positions, tokens of the vocabulary and a flag that is 1 on tokens and 0 on padding), it returns a logit for
    each value of the output, or the output itself where that is a number with an error bound.
    """

    family = "program"
    #: All programs whose heads this network has, where it was taken from one of several outputs.
    beside: tuple[SOp, ...] = ()

    def __init__(self, facts: Facts, program: SOp, layout: ProgramLayout, network: AttentionOnly, positions: Tensor):
        super().__init__(facts.domain, layout, network, positions)
        self.facts, self.program = facts, program

    @property
    def outputs(self) -> tuple[Value, ...] | None:
        """The values that the output may have, in the order of the logits; None for a number with an error bound."""
        return None if self.facts.numeric_output else self.facts.values(self.facts.program)

    def decode(self, logits: Tensor, lengths: Sequence[int]) -> list[list[Any]]:
        """The values with the largest logits, or the numbers themselves, without padding."""
        return decoded(self.outputs, logits, lengths)

    @torch.no_grad()
    def trace(self, sequence: Iterable[object]) -> Trace:
        """Every variable of the network on a sequence, layer by layer, beside the interpreter's."""
        tokens = self.domain.check(sequence)
        meant = {op: found for output in self.facts.outputs for op, found in evaluate(output, tokens).items()}
        x = self.encode([tokens])
        state = torch.cat([x, self.positions[: len(tokens)].expand(1, -1, -1)], -1)
        rows: list[Traced] = []
        seen: set[Feature] = set()
        for number, (plan, layer) in enumerate(zip(self.layout.layers, self.network.layers, strict=False), 1):
            state = layer(state)
            groups: dict[tuple[int, str], list[int]] = {}
            for c, feature in enumerate(plan.after):
                if feature.op >= 0 and feature not in seen:
                    groups.setdefault((feature.op, feature.kind), []).append(c)
                    seen.add(feature)
            for (op, kind), columns in groups.items():
                node = self.facts.order[op]
                if kind == "square" or (isinstance(node, type(self.facts.order[0])) and not node.children):
                    continue
                assert isinstance(node, SOp)
                found = self._decoded(node, kind, state[0][:, columns], [plan.after[c] for c in columns])
                raw = kind != "is" and not self._told_apart(node)
                within = self._proved().errors[number - 1][columns[0]] if raw else None
                rows.append(Traced(_plain(node.label), number, found, list(meant[node]), within))
        last = self.decode(self.network.layers[-1](state), [len(tokens)])[0]
        within = self._proved().bound if self.facts.numeric_output else None
        name, depth = _plain(self.program.label), len(self.layout.layers)
        return Trace((*rows, Traced(name, depth, last, list(meant[self.facts.program]), within)))

    def _proved(self) -> Proof:
        """What is proved of these weights; nothing, and numbers must be equal, where the certificate is for others."""
        held = self._certificate
        if held is None or held.weights == weights_hash(self):
            return self.prove()
        return Proof((), 0.0, tuple((0.0,) * len(layer.after) for layer in self.layout.layers))

    def _decoded(self, node: SOp, kind: str, columns: Tensor, features: Sequence[Feature]) -> list[Any]:
        """What columns say, as values: the largest of one-hot ones, the nearest value of a number."""
        if kind == "is":
            values = self.facts.values(node)
            kept = [values[feature.value] for feature in features]
            rest = [value for value in values if value not in kept]
            off = rest[0] if len(rest) == 1 else Other(frozenset(kept))
            on = (columns.amax(-1) > 0.5).tolist()  # half-way between off and on
            best = columns.argmax(-1).tolist()
            return [kept[i] if hit or not rest else off for i, hit in zip(best, on, strict=True)]
        given = columns[:, 0].double().numpy()
        if not self._told_apart(node):
            return list(given.tolist())
        numbers = self.facts.numbers(node)
        return [self.facts.values(node)[int(np.abs(numbers - x).argmin())] for x in given]

    def _told_apart(self, node: SOp) -> bool:
        """Whether the values of an op whose values are numbers are listed, and each has a float64 of its own."""
        return self.facts.listed(node) and len(np.unique(self.facts.numbers(node))) == len(self.facts.values(node))

    # ---- certificates and files

    def prove(self) -> Proof:
        """The margins of all heads, from the weights as they are now; `CertificateError` where there is no proof."""
        return prove(self.facts, self.layout, self.network, self.positions)

    def recertify(self) -> Certificate:
        """The proof that these weights compute the program, made anew."""
        return self.certificate_of(self.prove())

    def certificate_of(self, proof: Proof) -> Certificate:
        """A proof as a certificate."""
        numeric = self.facts.numeric_output
        bound = float(np.nextafter(proof.bound, np.inf)) if numeric else 0.0
        terms = (Term("output", "rounding", proof.bound, "errors of numbers and rounding"),) if numeric else ()
        return Certificate(
            "certified" if numeric else "exact", bound, dtype_name(self.dtype), _plain(self.program.label), self.box,
            terms, lemmas=LEMMAS, assumptions=(*assumptions(), UNDERFLOW), margins=proof.margins,
            domain=domain_of([self.program], self.facts),
        )  # fmt: skip

    def explain(self) -> str:
        """The program, the heads of each layer, the columns between them, and the margins of the certificate."""
        lines = [
            f"{_plain(self.program.label)} on {self.domain!r}",
            f"normal form: {self.facts.program!r}",
            str(self.size),
        ]
        for number, (plan, layer) in enumerate(zip(self.layout.layers, self.network.layers, strict=False), 1):
            lines.append(f"layer {number}: {len(plan.after)} columns after it")
            for group in cast(AttentionLayer, layer).heads():
                slots = f", {group.slots} slots" if group.slots else ""
                lines.append(f"  {group.purpose}{slots}{', causal' if group.causal else ''}")
        return "\n".join([*lines, "", str(self.certificate)])

    def config(self) -> dict[str, Any]:
        beside = {"beside": [program_json(output) for output in self.beside]} if self.beside else {}
        return {"program": program_json(self.program), **self.stored_config(), **beside}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> CompiledProgram:
        """The network that a file describes: the program as data, every number from the tensors."""
        program, domain = read_program(config["program"]), read_domain(config["domain"])
        beside = [read_program(output) for output in config.get("beside", ())[: OUTPUTS + 1]]
        if len(beside) > OUTPUTS or (beside and program not in beside):
            raise CertificateError(f"the file has more than {OUTPUTS} outputs, or its own is not among them")
        facts = Facts(normal(program, domain), domain, [normal(output, domain) for output in beside])
        found = cls(facts, program, *stored_network(config, tensors))
        found.beside = tuple(beside)
        return found

    def extra_repr(self) -> str:
        return f"{_plain(self.program.label)} on {self.domain!r}: {self.size}"


def decoded(values: Sequence[Value] | None, logits: Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    """The values with the largest logits, or, where there are none to choose from, the numbers themselves."""
    if values is None:
        rows = logits[..., 0].double().tolist()
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]
    best = logits.argmax(-1).tolist()
    return [[values[i] for i in row[:n]] for row, n in zip(best, lengths, strict=True)]


def stored_network(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[ProgramLayout, AttentionOnly, Tensor]:
    """Layout, layers and positions that a file describes."""
    layout, dtype = ProgramLayout.from_json(config["layout"]), shipped(DTYPES[config["dtype"]])
    if len(config["purposes"]) != sum(len(layer.heads) for layer in layout.layers):
        raise CertificateError("the file names another number of heads than it has")
    purposes = iter(config["purposes"])
    modules = []
    for i in range(len(layout.layers) + 1):
        prefix = f"network.layers.{i}."
        groups = []
        for g, seat in enumerate(layout.layers[i].heads if i < len(layout.layers) else ()):
            start = f"{prefix}groups.{g}."
            given: dict[str, Any] = {name: tensors[start + name] for name in TABLES if start + name in tensors}
            scope = "memory" if seat.kind == "map" else "tokens"
            groups.append(Heads(scope, causal=seat.causal, purpose=str(next(purposes)), **given))  # type: ignore[arg-type]
        skip = {name: tensors[prefix + name] for name in ("S", "s") if prefix + name in tensors}
        modules.append(AttentionLayer(groups, **skip))
    wrong = [name for name, tensor in tensors.items() if tensor.dtype != dtype]
    if wrong:
        raise CertificateError(f"{wrong[0]} is not {dtype_name(dtype)}, as the file says")
    return layout, AttentionOnly(modules), tensors["positions"]


def whole_ids(ids: Tensor, known: int) -> Tensor:
    """Token ids in the one width that tables are read with; what is no number of a token is refused.

    >>> whole_ids(torch.tensor([1, 2], dtype=torch.int8), 2)
    tensor([1, 2])
    """
    if ids.dtype == torch.bool or ids.is_complex():
        raise ArgumentError(f"token ids are integers, 0 to {known - 1}, and {known} for padding, got {ids.dtype}")
    return ids.long()


def token_rows(ids: Tensor, known: int, dtype: torch.dtype) -> Tensor:
    """Token ids as rows: one-hot with a flag, zeros for padding, whose id is `known`.

    >>> token_rows(torch.tensor([1, 2]), 2, torch.float32).tolist()
    [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    table = torch.eye(known + 1, dtype=dtype, device=ids.device)
    table[:, -1] = 1.0
    table[-1] = 0.0
    return torch.nn.functional.embedding(whole_ids(ids, known), table)


#: Entries of the largest batch that is run at once, one-hot tokens counted by position: about 64 MB of logits.
_BATCH = 1 << 14


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences of nearly the same length together, a bounded number of positions at a time."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found: list[list[int]] = []
    for i in order:
        if found and len(found[-1]) < max(1, _BATCH // lengths[found[-1][0]]):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _plain(label: str) -> str:
    return label[1:-1] if label.startswith("'") and label.endswith("'") else label


def _list(values: Sequence[Any]) -> str:
    texts = [f"{v:.6g}" if isinstance(v, float) else shown(v) for v in values[:LISTED]]
    return " ".join(texts) + (" ..." if len(values) > LISTED else "")
