"""`Variant`: a plain transformer that was made harder to read, its basis, and the certificate of what is stored.

The stream of a variant holds the columns of a plain form in another basis. Where every column is a direction of its
own, up to its sign, nothing is rounded that was not rounded before: the plain form is read back bit by bit, and its own
analysis holds. In any other basis the simulation of lemma H6 says how far coordinates are off, and the proof of the
program takes that from the margins of its heads; networks of numbers have no margins, and what their heads are off by
(lemma H7) travels to the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...certificates.certificate import Certificate
from ...certificates.schema import Whole
from ...compiler.compiled import CompiledNetwork
from ...dtypes import DTYPES, Array, dtype_name, shipped, stored
from ...errors import AttnforgeError, CertificateError, PrecisionError, UnsupportedOperation
from ...export.plain.certificate import EXPLICIT, reaches
from ...export.plain.source import compiled_source, program_source, width_of
from ...export.plain.spec import FLAG, PlainHead, PlainSpec, scale_of
from ...export.plain.stream import SHARED, Stream, dtype_of, first_rows, folded, spare
from ...export.plain.transformer import PlainTransformer, network_of, origin_of
from ...heads.stored import refuse_endless
from ...rasp.network.compiled import CompiledProgram
from ...rasp.network.facts import Mask
from ...rasp.network.proof import HeadError, prove
from .rotation import Turned, turned_certificate
from .simulation import Simulated, numbers, wanted_tables

LIMIT = 1 << 14  # virtual columns of a file: a stream has at most some thousand
KINDS = ("permuted", "split", "distractor", "idle", "rotated", "superposed", "cleaned")
READ = 1e-6  # of the largest entry of a table: what is smaller in virtual columns is rounding of the basis
FINITE = 2.0**-20  # of the largest number of a dtype: what idle and distractor heads may reach


@dataclass(frozen=True, eq=False)
class VariantStructure:
    """Virtual columns (name and kind), which of them heads read (head, query key value, column) and write, which the
    input enters, and which outputs read."""

    channels: tuple[tuple[str, str], ...]
    reads: Mask
    writes: Mask
    entering: Mask
    leaving: Mask


class Variant(PlainTransformer):
    """A network that computes what another does, in another basis and among heads that do nothing.

    `basis` is (virtual column, direction): the columns of the plain form, described by `base`, then those that only
    distractors write, then those that stay 0. `heads[layer][h]` says what each head stands for; its `writes` are
    virtual columns. `attnforge.groundtruth.vary` makes them.
    """

    family = "variant"
    called = "a variant, harder to read"
    schema: ClassVar[Any] = {
        **PlainTransformer.schema, "base": {}, "kinds": [str], "seed": Whole(),
        "basis": {"rows": Whole(1, LIMIT), "at": [[Whole()]], "numbers": [[float]]},
    }  # fmt: skip

    def __init__(
        self, spec: PlainSpec, base: PlainSpec, basis: Tensor, kinds: Sequence[str], seed: int, dtype: torch.dtype
    ):
        super().__init__(spec, dtype)
        self.base, self.kinds, self.seed = base, tuple(kinds), seed
        self.basis = basis.double()  # no buffer: it is part of the description, and weights are those of a transformer

    @property
    def beyond(self) -> str:
        mixed = aligned_rows(self.basis.detach().cpu().double().numpy()) is None
        return "its columns are mixed; what was varied can be proved" if mixed else super().beyond

    def recertify(self) -> Certificate:
        """What can be proved for the weights as they are now."""
        refuse_endless(self)  # those of idle heads too, which the plain form does not have
        if not self.mixed:
            found = self.unvaried().recertify()
            return replace(found, lemmas=(*found.lemmas, "H6"))
        net = self.stated()
        found = self._turned(net) if isinstance(net, CompiledNetwork) else self._simulated(net)
        return replace(found, lemmas=(*found.lemmas, "H6", *(("H7",) if isinstance(net, CompiledNetwork) else ())))

    @property
    def mixed(self) -> bool:
        """Whether a direction of the stream holds more than one column."""
        return aligned_rows(self.basis.detach().cpu().double().numpy()) is None

    def stated(self) -> CompiledProgram | CompiledNetwork:
        """The network that this is a variant of; `UnsupportedOperation` where it is a theorem."""
        net = network_of(self)
        if not isinstance(net, CompiledProgram | CompiledNetwork):
            raise UnsupportedOperation(
                "in a basis that mixes columns a theorem has no certificate: take the kinds 'permuted', 'split', "
                "'distractor' and 'idle', which round nothing anew"
            )
        return net

    def _turned(self, net: CompiledNetwork) -> Certificate:
        try:
            return turned_certificate(net, self.turned(net))
        except (CertificateError, PrecisionError):
            raise
        except AttnforgeError as error:
            raise CertificateError(f"no bound can be proved for these weights: {error}") from error

    def turned(self, net: CompiledNetwork) -> Turned:
        """How far this is from the plain form of a compiled network, head by head."""
        dtype_of(self.state_dict())
        refuse_endless(net)
        known = reaches(net)
        stream = self.stream_of(net, known)
        return Turned(stream, known, self.spec, numbers(self.state_dict()), self._rows(stream))

    def _simulated(self, net: CompiledProgram) -> Certificate:
        try:
            proof = prove(net.facts, net.layout, net.network, net.positions, self.simulation(net))
        except HeadError as error:
            wider = "" if self.dtype == torch.float64 else "; compile with dtype=torch.float64"
            raise PrecisionError(
                f"this variant cannot be proved in {dtype_name(self.dtype)}: {error}{wider}"
            ) from error
        found = net.certificate_of(proof)
        return replace(found, lemmas=(*found.lemmas, "B6"), assumptions=(*found.assumptions, EXPLICIT))

    def simulation(self, net: CompiledProgram) -> Simulated:
        """This, as something that simulates a program's network."""
        stream = self.stream_of(net)
        return Simulated(stream, net, self.spec, numbers(self.state_dict()), self._rows(stream))

    def _rows(self, stream: Stream) -> Array:
        """The basis, which must fit the stream."""
        basis = numbers({"basis": self.basis})["basis"]
        if basis.shape[1] != self.spec.stream or len(basis) < stream.width:
            raise CertificateError(
                f"a basis of shape {basis.shape} does not fit a stream of {self.spec.stream} channels"
            )
        return basis

    def stream_of(self, net: CompiledProgram | CompiledNetwork, known: Sequence[Array | None] = ()) -> Stream:
        """The stream of the plain form that this one is a variant of; `known` are the sizes of what heads write."""
        source, spec = program_source(net) if isinstance(net, CompiledProgram) else compiled_source(net), self.spec
        if {t.dtype for t in self.state_dict().values()} != {net.dtype}:
            raise CertificateError("the tensors of a variant have one dtype, that of its network")
        same = all(getattr(spec, name) == getattr(source, name) for name in SHARED)
        if not same or spec.outputs != width_of(source.layers[-1]):
            raise CertificateError("the description of the variant is not that of its network")
        looking = [g for layer in source.layers for g in layer.heads() if g.scope == "tokens" and not g.causal]
        if spec.causal and looking and source.tokens > 1:
            raise CertificateError(f"a causal mask hides later tokens from '{looking[0].purpose}', which must see them")
        stream = Stream(source, spec.causal, self.dtype, spare(spec.registers + spec.tokens, spec.stream, self.dtype))
        if stream.columns.registers != spec.registers:
            raise CertificateError("the variant has not the registers that its network asks for")
        folded(stream, known)
        return stream

    # ---- where every column is a direction of its own

    @torch.no_grad()
    def unvaried(self) -> PlainTransformer:
        """The plain form, read back bit by bit; `CertificateError` where heads that should do nothing may do something,
        or columns are mixed."""
        basis = self.basis.detach().cpu().double().numpy()
        directions = aligned_rows(basis)
        if directions is None:
            raise CertificateError("this variant mixes columns: its plain form cannot be read back")
        width = self._width()
        place, sign = directions
        if replace(self.base, stream=self.spec.stream, channels=self.spec.channels, heads=self.spec.heads) != self.spec:
            raise CertificateError("the description of the variant is not that of its plain form")
        layers = [{head.place[0] for head in row if head.place[0] >= 0} for row in self.spec.heads]
        order = [layer for found in layers for layer in found]
        if max(map(len, layers), default=0) > 1 or order != sorted(order):
            raise CertificateError("heads of the variant stand in other blocks than the layers they are of")
        tensors = {name: t.detach().cpu() for name, t in self.state_dict().items()}
        outside = torch.ones(self.spec.stream, dtype=torch.bool)
        outside[torch.from_numpy(place[:width])] = False
        base = PlainTransformer(self.base, self.dtype)
        built = {name: torch.zeros_like(t) for name, t in base.state_dict().items()}

        def back(table: Tensor) -> Tensor:
            """(..., direction) as (..., column), where nothing else is read."""
            if bool(table[..., outside].any()):
                raise CertificateError("a variant's weights read or write directions that nothing may depend on")
            found = table.new_zeros(*table.shape[:-1], self.base.stream)
            found[..., :width] = table[..., torch.from_numpy(place[:width])] * torch.from_numpy(sign[:width]).to(table)
            return found

        built["embed.weight"] = back(tensors["embed.weight"].T).T
        built["positions"] = back(tensors["positions"])
        built["readout.weight"], built["readout.bias"] = back(tensors["readout.weight"]), tensors["readout.bias"]
        seats = {h.place: (b, i) for b, row in enumerate(self.base.heads) for i, h in enumerate(row) if h.place[0] >= 0}
        free = [self._read_seat(tensors, b, i, seats, built, back) for b, row in enumerate(self.spec.heads)
                for i in range(len(row))]  # fmt: skip
        self._refuse_effects([one for one in free if one is not None], tensors, ~outside)
        base.load_state_dict(built)
        if self.source is not None and self._layers is not None:
            base.made_from(self.source, self._layers)
        base._origin = self._origin
        return base.eval()

    def _width(self) -> int:
        """The columns of the plain form that are used."""
        names = self.base.channels
        return max((i for i, name in enumerate(names) if name != "unused"), default=-1) + 1

    def seat_tables(self, tensors: dict[str, Tensor], block: int, seat: int) -> tuple[Tensor, Tensor]:
        """Query, key and value (third, coordinate, direction), queries without their scale, and output (coordinate,
        direction) of a head."""
        d = self.spec.stream // len(self.spec.heads[block])
        into = tensors[f"blocks.{block}.attention.in_proj_weight"].reshape(3, -1, d, self.spec.stream)[:, seat].clone()
        into[0] /= scale_of(d)
        return into, tensors[f"blocks.{block}.attention.out_proj.weight"].T.reshape(-1, d, self.spec.stream)[seat]

    def _read_seat(
        self, tensors: dict[str, Tensor], block: int, seat: int, seats: dict[Any, tuple[int, int]],
        built: dict[str, Tensor], back: Any,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Put a head where the plain form has it; None, or the tables of one that stands for nothing."""
        about = self.spec.heads[block][seat]
        into, out = self.seat_tables(tensors, block, seat)
        if about.place[0] < 0:
            return into, out
        if about.place not in seats:
            raise CertificateError(f"head {seat} of block {block} stands for one that the plain form does not have")
        b, i = seats[about.place]
        wide = self.base.stream // len(self.base.heads[b])
        into, out = back(into), back(out)
        if into.shape[1] > wide and bool(into[:, wide:].any() or out[wide:].any()):
            raise CertificateError(f"head {seat} of block {block} has more coordinates than the one it stands for")
        d = min(into.shape[1], wide)
        target = built[f"blocks.{b}.attention.in_proj_weight"].reshape(3, -1, wide, self.base.stream)[:, i]
        mine = into[:, :d] * torch.tensor([scale_of(wide), 1.0, 1.0], dtype=into.dtype)[:, None, None]
        if bool(target.any()) and not torch.equal(target[:, :d], mine):
            raise CertificateError(
                f"head {seat} of block {block} is not the other part of the head that it is split from"
            )
        target[:, :d] = mine
        output = built[f"blocks.{b}.attention.out_proj.weight"].T.reshape(-1, wide, self.base.stream)[i]
        columns = out[:d].abs().sum(0) > 0
        if bool((output.abs().sum(0) > 0)[columns].any()):
            raise CertificateError(f"head {seat} of block {block} writes what another part of its head writes")
        output[:d] += out[:d]
        return None

    def _refuse_effects(self, free: list[tuple[Tensor, Tensor]], tensors: dict[str, Tensor], used: Tensor) -> None:
        """Raise unless heads that stand for nothing read what is finite, and change nothing that anyone reads."""
        touched = used.clone()
        for _, out in free:
            touched |= out.abs().sum(0) > 0
        reach = self._reach(tensors)
        for into, out in free:
            idle = not bool(into[2][:, touched].any())  # its values are those of directions that stay 0
            if not idle and bool(out[:, used].any()):
                raise CertificateError("a head that should do nothing changes what other heads read")
            if bool(into[:, :, touched & ~used].any()):
                raise CertificateError("a head that stands for nothing reads what another one wrote")
        if not reach < FINITE * torch.finfo(self.dtype).max:
            raise CertificateError("numbers of a variant may overflow: zeros times them would be no zeros")

    def _reach(self, tensors: dict[str, Tensor]) -> float:
        """How large anything of a pass can be: every mean of values is at most as large as these."""
        given = {name: tensor.double().abs() for name, tensor in tensors.items()}
        largest = max(float(end.abs().max()) for box in self.spec.boxes for end in (box.lower, box.upper))
        size = given["embed.weight"].sum(1) * 2 * largest + given["positions"].amax(0)
        met = [size]
        for block, row in enumerate(self.spec.heads):
            thirds = given[f"blocks.{block}.attention.in_proj_weight"] @ size
            q, k, v = thirds.reshape(3, len(row), -1)
            size = size + 2 * given[f"blocks.{block}.attention.out_proj.weight"] @ v.reshape(-1)
            met += [(q * k).sum(-1), thirds, size]
        return float(torch.cat(met).max())  # NaN where there is one: torch's maximum keeps it, Python's may not

    # ---- what reads what

    def structure(self, heads: Sequence[int]) -> VariantStructure:
        """Which virtual columns heads read and write, so many in each block, padding included.

        Of heads that stand for others this is what these do: the certificate says that nothing else comes of them. An
        idle head finds nothing to write.
        """
        width, count = self._width(), len(self.basis)
        tables, embed, positions, readout = self._stated(width)
        reads = np.zeros((sum(heads), 3, count), dtype=bool)
        writes = np.zeros((sum(heads), count), dtype=bool)
        basis = self.basis.cpu().numpy()
        state = {name: t.detach().cpu() for name, t in self.state_dict().items()}
        for block, row in enumerate(self.spec.heads):
            for h, about in enumerate(row):
                at = sum(heads[:block]) + h
                writes[at, list(about.writes)] = True
                if about.place in tables:
                    reads[at, :, :width] = [(table != 0).any(1)[:width] for table in tables[about.place]]
                elif about.purpose:
                    into = self.seat_tables(state, block, h)[0].double().numpy()
                    found = np.abs(np.einsum("cn,tdn->tcd", basis, into)).max(-1)
                    reads[at] = found > READ * found.max(initial=0.0)
        entering, leaving = np.zeros(count, dtype=bool), np.zeros((len(readout), count), dtype=bool)
        entering[:width], leaving[:, :width] = (embed != 0).any(1)[:width], (readout != 0)[:, :width]
        front = self.registers
        kinds = [
            "input" if entering[c] else
            "register" if c < width and positions[:front, c].any() else
            "constant" if c < width and positions[front:, c].any() else
            "written" if writes[:, c].any() else "unused" for c in range(count)
        ]  # fmt: skip
        names = [*self.base.channels[:width], *(f"further column {c}" for c in range(width, count))]
        return VariantStructure(tuple(zip(names, kinds, strict=True)), reads, writes, entering, leaving)

    def _stated(self, width: int) -> tuple[dict[tuple[int, int, int], Sequence[Array]], Array, Array, Array]:
        """Query, key and value (column, coordinate) of every head of the plain form by its place; embedding (column,
        input), positions (row, column) and read-out (output, column)."""
        tables: dict[tuple[int, int, int], Sequence[Array]] = {}
        if self.mixed:
            stream = self.stream_of(self.stated())
            for head in (head for heads in stream.layers for head in heads):
                tables[head.place] = wanted_tables(stream, head, 1.0, head.width, width)
            embed, positions = first_rows(stream)
            readout = stream.readout.T.copy()
            readout[:, FLAG] = 0.0
            return tables, embed, positions, readout
        base = self.unvaried()
        state = {name: stored(t) for name, t in base.state_dict().items()}
        for block, row in enumerate(self.base.heads):
            into = state[f"blocks.{block}.attention.in_proj_weight"].reshape(3, len(row), -1, self.base.stream)
            tables.update(
                {about.place: [*into[:, h].transpose(0, 2, 1)] for h, about in enumerate(row) if about.purpose}
            )
        return tables, state["embed.weight"], state["positions"], state["readout.weight"]

    # ---- files

    def plain_form(self) -> PlainTransformer:
        """The plain form, where it can be read back: tables of anchors stand in its registers."""
        return self if self.mixed else self.unvaried()

    def config(self) -> dict[str, Any]:
        places = [torch.nonzero(row)[:, 0] for row in self.basis]
        found = [row[at].tolist() for row, at in zip(self.basis, places, strict=True)]
        basis = {"rows": len(found), "at": [at.tolist() for at in places], "numbers": found}
        about = {"base": self.base.to_json(), "kinds": list(self.kinds), "seed": self.seed, "basis": basis}
        if self.mixed and self.source is not None:  # no register holds a table as it is
            about["origin"] = origin_of(self.source, tables=True)
        return {**super().config(), **about}

    @classmethod
    def unfilled(cls, config: dict[str, Any]) -> Variant:
        dtype = shipped(DTYPES[config["dtype"]])
        spec, base = PlainSpec.from_json(config), PlainSpec.from_json(config["base"])
        rows = len(config["basis"]["at"])
        if rows != config["basis"]["rows"] or not 0 < rows <= LIMIT:
            raise CertificateError(f"the basis of a variant has from 1 to {LIMIT} rows, and states each")
        basis = np.zeros((rows, spec.stream))  # of NumPy: models of Hugging Face are begun on a device without numbers
        for row, at, found in zip(basis, config["basis"]["at"], config["basis"]["numbers"], strict=True):
            row[np.array(at, dtype=np.int64)] = found
        if base.stream > 2 * spec.stream + len(basis) or base.registers + base.tokens > spec.registers + spec.tokens:
            raise CertificateError("the description of the plain form does not fit the variant")
        kinds = [str(kind) for kind in config["kinds"]]
        return cls(spec, base, torch.from_numpy(basis), kinds, config["seed"], dtype)._told(config)

    def extra_repr(self) -> str:
        return f"{', '.join(self.kinds)}, seed {self.seed}; {super().extra_repr()}"


def aligned_rows(basis: Array) -> tuple[Array, Array] | None:
    """For each row the one place where it is 1 or -1, and which, if it is 0 elsewhere and no two share a place."""
    if not bool(np.isin(basis, (-1.0, 0.0, 1.0)).all()) or not (np.abs(basis).sum(1) == 1).all():
        return None
    place = np.abs(basis).argmax(1)
    return None if len(set(place.tolist())) < len(place) else (place, basis[np.arange(len(basis)), place])


def free_head(purpose: str, scope: str, writes: tuple[int, ...] = ()) -> PlainHead:
    """The description of a head that stands for none of the network's."""
    return PlainHead(purpose, scope, writes=writes)
