"""Tier `plain`: a stock attention-only transformer, x <- x + MultiheadAttention(x), repeated; and its files.

The sequence is registers first, then tokens. A learned position embedding tells them apart: registers carry one-hot
ids, tokens a flag, one-hot positions where heads need them, and constants. The embedding puts the input into columns
of the residual stream; every head writes columns of its own, nothing is overwritten; an affine map reads the output
off the tokens. There is no mask but an optional causal one: what a head may see comes from W_Q and W_K (`spec`).

A file holds weights, description and certificate, and what states the target: the network that the plain form was made
from, as its program, its sites and its tensors without their zeros (`origin`). Tables of anchors stand in the
registers already. So a file can be checked by itself: its weights are analysed against that network's program.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...certificates.certificate import Certificate, weights_hash
from ...certificates.certified import CertifiedModule, family_of, load, rebuilt
from ...certificates.schema import BOX, MOST_TOKENS, Either, Whole, require
from ...compiler.compiled import CompiledNetwork
from ...dtypes import DTYPES, dtype_name, shipped, transformed
from ...errors import ArgumentError, CertificateError
from ...heads.anchor.site import ANCHORS
from ...network import CHUNK, Heads, hooked
from ...rasp.network.compiled import CompiledProgram, token_rows, whole_ids
from .certificate import recertified
from .source import Source
from .spec import PlainHead, PlainSize, PlainSpec

#: Numbers that one tensor of a file may hold: 512 MiB of float32.
MOST_NUMBERS = 1 << 27
THEOREMS = "theorem-cells", "theorem-universal", "theorem-ramp"  # families of which a file holds what they are for
SOURCES = "attnforge.export.plain.theorem"  # which reads the layers of a theorem, loaded where there is one
#: Points from which weights are hashed for a shorter way: as long as a few points take by the long one.
MANY = 64


def load_plain(path: str | Path) -> PlainTransformer:
    """Read back what `plain.save(path)` wrote; `attnforge.load` reads it as well, among all other kinds of network."""
    found = load(path)
    if not isinstance(found, PlainTransformer):
        raise CertificateError(
            f"{Path(path).name} holds a network of the kind '{found.family}', not a plain transformer"
        )
    return found


def origin_of(net: CertifiedModule, tables: bool = False) -> dict[str, Any] | None:
    """JSON from which `network_of` rebuilds a network, a program or a theorem; None where no file can
    hold a theorem's modulus of continuity, or the function that it was measured against.

    Tables of anchors stand in the registers already, unless they are asked for; every other tensor is written down,
    without its zeros.
    """
    if isinstance(net, CompiledProgram) or (net.family in THEOREMS and net.storable):
        tensors = {name: _sparse(tensor) for name, tensor in net.state_dict().items()}
        return {"family": net.family, "config": net.config(), "tensors": tensors}
    if not isinstance(net, CompiledNetwork):
        return None
    known = set() if tables else {id(table) for group in _anchors(net) for table in (group.M_K, group.M_V)}
    named = [(name, p) for name, p in net.named_parameters() if id(p) not in known]
    return {"config": net.config(), "tensors": {name: _sparse(p) for name, p in [*named, *net.named_buffers()]}}


def _anchors(net: CompiledNetwork) -> Iterator[Heads]:
    return (group for group in net.network.groups() if group.purpose.startswith(ANCHORS))


def _sparse(tensor: Tensor) -> dict[str, Any]:
    flat = tensor.detach().cpu().reshape(-1)
    places = torch.nonzero(flat)[:, 0]
    return {"shape": list(tensor.shape), "at": places.tolist(), "numbers": flat[places].double().tolist()}


def _dense(data: dict[str, Any], dtype: torch.dtype) -> Tensor:
    shape = [int(n) for n in data["shape"]]
    if math.prod(shape) > MOST_NUMBERS:
        raise CertificateError(f"the file describes a tensor of shape {shape}, which is beyond all reason")
    flat = torch.zeros(math.prod(shape), dtype=dtype)
    flat[torch.tensor(data["at"], dtype=torch.long)] = torch.tensor(data["numbers"], dtype=torch.float64).to(dtype)
    return flat.reshape(shape)


@torch.no_grad()
def network_of(plain: PlainTransformer) -> CertifiedModule:
    """The network that a plain transformer was made from, in its dtype: the one it knows, or what its file says."""
    if plain.source is not None:
        net, dtype = plain.source, plain.dtype
        if net.dtype != dtype and not isinstance(net, (CompiledNetwork, CompiledProgram)):
            raise CertificateError(
                f"the plain transformer is {dtype} and the network it was made from {net.dtype}: convert the "
                "network, certify it, and export it again"
            )
        return net if net.dtype == dtype else copy.deepcopy(net).to(dtype)
    plain = plain.plain_form()
    origin = plain._origin
    if origin is None:
        raise CertificateError(
            "this plain transformer does not know the network it was made from (layers without a target, or a file of "
            "a theorem whose target no file can hold): there is nothing to certify it against; build that network "
            "again and export it with to_plain"
        )
    try:
        given = {name: _dense(data, plain.dtype) for name, data in origin["tensors"].items()}
        if origin.get("family") in THEOREMS:
            config = {**origin["config"], "dtype": dtype_name(plain.dtype)}
            require(config, family_of(origin["family"], "the origin").schema, "the description of a theorem")
            theorem = rebuilt(family_of(origin["family"], "the origin"), config, given)
            theorem.load_state_dict(given, strict=True)
            if any(box != theorem.box for box in (plain.spec.box, *plain.spec.boxes)):
                raise CertificateError("the plain transformer has another box than the theorem that it was made from")
            return theorem
        if origin.get("family") == CompiledProgram.family:
            return CompiledProgram.rebuild({**origin["config"], "dtype": dtype_name(plain.dtype)}, given)
        tensors = {**anchor_tables(plain), **given}
        net = CompiledNetwork.rebuild({**origin["config"], "dtype": dtype_name(plain.dtype)}, tensors)
        net.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CertificateError(f"the file does not describe the network it was made from: {error}") from error
    return net


def anchor_tables(plain: PlainTransformer) -> dict[str, Tensor]:
    """Keys and values of anchors, read off the registers of the first head of each group, by their names in the
    network; other heads over registers have values of more than one coordinate, and are written down."""
    found = {}
    for block, row in zip(plain.blocks, plain.heads, strict=True):
        attention = cast(PlainBlock, block).attention
        for h, head in enumerate(row):
            layer, group, first = head.place
            if head.purpose and head.scope == "memory" and first == 0:
                start, width = f"network.layers.{layer}.groups.{group}.", head.width - head.hiding
                found[start + "M_K"] = _registers(attention, 1, h, head.slots, width).unsqueeze(0)
                found[start + "M_V"] = _registers(attention, 2, h, head.slots, 1).unsqueeze(0)
    return found


def _registers(attention: nn.MultiheadAttention, third: int, head: int, slots: int, width: int) -> torch.Tensor:
    """Keys (third 1) or values (third 2) of registers 1 to `slots`: the columns of their ids follow the flag's."""
    start = third * attention.embed_dim + head * attention.head_dim
    return attention.in_proj_weight[start : start + width, 2 : 2 + slots].T


class PlainBlock(nn.Module):
    """x <- x + MultiheadAttention(x). The weights are asked for, which makes PyTorch take its explicit softmax: its
    fused kernels, of unknown rounding, would not be covered by the certificate."""

    def __init__(self, stream: int, heads: int, dtype: torch.dtype):
        super().__init__()
        self.attention = nn.MultiheadAttention(stream, heads, bias=False, batch_first=True, dtype=dtype)

    def require_stock(self, heads: int) -> None:
        """Raise unless PyTorch's attention has the switches that it was made with: they are not among its weights."""
        own = self.attention
        made = (own.num_heads, own.head_dim * heads, own.batch_first, own.add_zero_attn, own.dropout)
        if made != (heads, own.embed_dim, True, False, 0.0):
            raise CertificateError(
                "a block's attention has other switches than it was made with (num_heads, head_dim, batch_first, "
                "add_zero_attn, dropout): what it computes is not what its weights say"
            )

    def attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the heads add, and their weights (batch, head, query, key)."""
        found = self.attention(x, x, x, need_weights=True, average_attn_weights=False, attn_mask=mask)
        return cast(tuple[Tensor, Tensor], found)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attend(x, mask)[0]

    def as_heads(self, causal: bool, purpose: str = "") -> Heads:
        """What is added to x, as heads over tokens: 1/sqrt(head dimension), a power of two, goes into W_Q exactly."""
        count, d = self.attention.num_heads, self.attention.head_dim
        into = self.attention.in_proj_weight.detach().chunk(3)
        q, k, v = (part.unflatten(0, (count, d)).transpose(1, 2) for part in into)
        out = self.attention.out_proj.weight.detach().T.unflatten(0, (count, d))
        return Heads("tokens", W_Q=q / math.sqrt(d), W_K=k, W_V=v, W_O=out, causal=causal, purpose=purpose)

    def attend_from(self, x: Tensor, registers: Tensor, used: list[int], mask: Tensor | None) -> Tensor:
        """What the heads `used` add to the tokens x (batch, token, channel), with registers before them in every row
        of the batch: their keys and values are made once, and nothing is made of what they would see."""
        attention = self.attention
        heads, d, before = len(used), attention.head_dim, len(registers)
        into = attention.in_proj_weight.unflatten(0, (3, -1, d))[:, used]
        query, key, value = functional.linear(x, into.flatten(0, 2)).unflatten(-1, (3, heads, d)).unbind(-3)
        fixed = functional.linear(registers, into[1:].flatten(0, 2)).unflatten(-1, (2, heads, d))
        key_before, value_before = fixed.unbind(1)
        query = query * d**-0.5  # a power of two
        seen = torch.cat([torch.einsum("bnhd,rhd->bhnr", query, key_before),
                          torch.einsum("bnhd,bmhd->bhnm", query, key)], -1)  # fmt: skip
        weights = torch.softmax(seen if mask is None else seen.masked_fill(mask, -torch.inf), -1)
        read = torch.einsum("bhnr,rhd->bnhd", weights[..., :before], value_before)
        read = read + torch.einsum("bhnm,bmhd->bnhd", weights[..., before:], value)
        out = attention.out_proj.weight.unflatten(1, (-1, d))[:, used]
        return functional.linear(read.flatten(-2), out.flatten(1))


class PlainTransformer(CertifiedModule):
    """A network as a stock transformer; `to_plain` builds it. It takes and returns what the network does.

    `embed` and `positions` make the residual stream, `blocks` are `torch.nn.MultiheadAttention` with a skip, `readout`
    is affine. `channels` says what each column of the stream carries, `heads[layer][h]` what each head does.
    """

    family = "plain"
    called = "a plain transformer"
    schema: ClassVar[Any] = {
        "registers": Whole(), "tokens": Whole(1, MOST_TOKENS), "stream": Whole(1), "outputs": Whole(1),
        "inputs": [str], "channels": [str], "heads": [[{}]], "causal": bool, "fixed": bool, "box": BOX, "boxes": [BOX],
        "output_shape": Either(None, [Whole(1)]), "first_row": bool, "largest_activation": float, "dtype": str,
        "strict": bool, "origin": Any,
    }  # fmt: skip
    stacked = True

    def __init__(self, spec: PlainSpec, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.spec, self.box, self.strict = spec, spec.box, False
        self.embed = nn.Linear(len(spec.inputs), spec.stream, bias=False, dtype=dtype)
        self.positions = nn.Parameter(torch.zeros(spec.registers + spec.tokens, spec.stream, dtype=dtype))
        self.blocks = nn.ModuleList(PlainBlock(spec.stream, len(row), dtype) for row in spec.heads)
        self.readout = nn.Linear(spec.stream, spec.outputs, dtype=dtype)
        self._source: tuple[CertifiedModule, ...] = ()  # a tuple: the network it was made from is no part of it
        self._layers: Callable[[CertifiedModule, int], Source] | None = None  # reads the layers of that network
        self._origin: dict[str, Any] | None = None  # what a file says of that network

    def made_from(self, net: CertifiedModule, layers: Callable[[CertifiedModule, int], Source]) -> None:
        """Remember the network that this is the plain form of, and what reads its layers for so many tokens."""
        self._source, self._layers = (net,), layers

    @property
    def source(self) -> CertifiedModule | None:
        """The network that this was made from, if it is at hand."""
        return self._source[0] if self._source else None

    def stands_for(self) -> CertifiedModule | None:
        try:
            return network_of(self)
        except CertificateError:
            return None

    @property
    def registers(self) -> int:
        """How many register tokens stand before the data."""
        return self.spec.registers

    @property
    def tokens(self) -> int:
        """How many data tokens there are positions for."""
        return self.spec.tokens

    @property
    def causal(self) -> bool:
        """Whether the blocks run under a causal mask."""
        return self.spec.causal

    @property
    def channels(self) -> tuple[str, ...]:
        """What each column of the residual stream carries."""
        return self.spec.channels

    @property
    def heads(self) -> tuple[tuple[PlainHead, ...], ...]:
        """What each head of each block does: the ground truth for whoever looks at the weights."""
        return self.spec.heads

    @property
    def size(self) -> PlainSize:
        """Registers, channels, layers, heads, parameters, largest |logit| (exclusion apart) and |activation|."""
        count = sum(p.numel() for p in self.parameters())
        used = sum(bool(head.purpose) for row in self.heads for head in row)
        logit = max((head.logit for row in self.heads for head in row), default=0.0)
        return PlainSize(
            self.registers, len(self.channels), len(self.blocks), used, count, logit, self.spec.largest_activation
        )

    def plain_form(self) -> PlainTransformer:
        """This, or, where something holds its columns in another order, one whose registers stand where they do."""
        return self

    def residual(self, *inputs: Tensor) -> Tensor:
        """The residual stream that enters the first block, (batch..., registers + tokens, channels)."""
        return self._stream(self._lay_in(*inputs))

    def attention(self, *inputs: Tensor) -> list[Tensor]:
        """The attention weights of every block, (batch..., head, query, key); registers come first."""
        stream = self.residual(*inputs)
        batch, x, found = stream.shape[:-2], stream.reshape(-1, *stream.shape[-2:]), []
        mask = self.mask(x)
        for block in self.blocks:
            out, weights = cast(PlainBlock, block).attend(x, mask)
            found.append(weights.reshape(*batch, *weights.shape[1:]))
            x = x + out
        return found

    def mask(self, x: Tensor) -> Tensor | None:
        """The causal mask, True where a key comes later than the query, or None."""
        if not self.causal:
            return None
        return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)

    def core(self, *inputs: Tensor) -> Tensor:
        """The network without checks of its input: stream, blocks, read-out. Of many points certified weights compute
        the rows of tokens alone: what proved them proved that no head changes a register's row (lemma B6)."""
        tokens = self._lay_in(*inputs)
        flat = tokens.reshape(-1, *tokens.shape[-2:])
        settled = flat.shape[0] >= MANY and self._settled(flat)
        run, rows = (self._run_tokens if settled else self._run), self.registers + flat.shape[-2]
        most = max((len(row) for row in self.heads), default=1)
        step = max(1, CHUNK // ((flat.shape[-2] if settled else rows) * rows * most))
        if torch.compiler.is_compiling() or flat.shape[0] <= step:
            out = run(flat)
        else:
            out = torch.cat([run(part) for part in flat.split(step)])
        return self._lay_out(out.reshape((*tokens.shape[:-1], self.spec.outputs)))

    def _run(self, tokens: Tensor) -> Tensor:
        x = self._stream(tokens)
        mask = self.mask(x)
        for block in self.blocks:
            x = block(x, mask)
        return cast(Tensor, self.readout(x[..., self.registers :, :]))

    def _settled(self, x: Tensor) -> bool:
        """Whether these are the weights that were certified, as they were built, at points of the box, and nobody
        looks inside or asks for their gradients. The weights are hashed, since nothing else sees every change: many
        points pay for it."""
        if type(self) is not PlainTransformer or torch.compiler.is_compiling() or torch._C._is_tracing():
            return False
        if transformed(x, *self.parameters()):
            return False
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            return False
        stock = {PlainBlock, nn.MultiheadAttention, NonDynamicallyQuantizableLinear, nn.ModuleList, nn.Linear}
        if any(hooked(module) or type(module) not in stock for module in self.modules() if module is not self):
            return False
        if not bool(self.box.outward(self.dtype).contains(x.detach().reshape(-1, *self.box.shape)).all()):
            return False
        made = self._certificate
        return made is not None and made.kind in ("certified", "analysed") and made.weights == weights_hash(self)

    def _run_tokens(self, tokens: Tensor) -> Tensor:
        before, n = self.registers, tokens.shape[-2]
        x = self.embed(tokens) + self.positions[before : before + n]
        mask = torch.ones(n, before + n, dtype=torch.bool, device=x.device).triu(before + 1) if self.causal else None
        for block, row in zip(self.blocks, self.heads, strict=True):
            used = [h for h, head in enumerate(row) if head != PlainHead()]  # the others are padding, of zeros
            x = x + cast(PlainBlock, block).attend_from(x, self.positions[:before], used, mask)
        return cast(Tensor, self.readout(x))

    def _stream(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[-2]
        first = self.positions[: self.registers].expand(*tokens.shape[:-2], -1, -1)
        return torch.cat([first, self.embed(tokens) + self.positions[self.registers : self.registers + n]], -2)

    def _lay_in(self, *inputs: Tensor) -> Tensor:
        """The inputs as tokens, (batch..., tokens, input columns)."""
        spec = self.spec
        if spec.ids and not inputs[0].is_floating_point():
            return token_rows(inputs[0], len(spec.inputs) - 1, self.dtype)
        if not spec.fixed:
            return inputs[0]
        batch = inputs[0].shape[: inputs[0].dim() - len(spec.boxes[0].shape)]
        flat = [x.reshape((*batch, box.dim)) for x, box in zip(inputs, spec.boxes, strict=True)]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat, -1)
        return joined.reshape((*batch, spec.tokens, len(spec.inputs)))

    def _lay_out(self, rows: Tensor) -> Tensor:
        """What the read-out gives for every token, in the shape that the network returns."""
        if self.spec.output_shape is None:
            return rows
        kept = rows[..., :1, :] if self.spec.first_row else rows
        return kept.reshape((*rows.shape[:-2], *self.spec.output_shape))

    def guard(self, *inputs: Tensor) -> None:
        """Refuse what cannot be evaluated; warn once about, or if `strict` refuse, what lies outside the box."""
        boxes = self.spec.boxes
        if len(inputs) != len(boxes):
            raise ArgumentError(f"expected {len(boxes)} input tensor(s), got {len(inputs)}")
        for number, (x, box) in enumerate(zip(inputs, boxes, strict=True)):
            name = "input" if len(inputs) == 1 else f"input {number}"
            if self.spec.ids and isinstance(x, Tensor) and not x.is_floating_point():
                known = len(self.spec.inputs) - 1
                x = whole_ids(x, known)
                if x.dim() < 1 or x.shape[-1] != self.tokens or not 0 <= int(x.min()) <= int(x.max()) <= known:
                    raise ArgumentError(
                        f"expected token ids of shape (..., {self.tokens}) from 0 to {known}, which is padding, got "
                        f"{tuple(x.shape)} from {int(x.min())} to {int(x.max())}"
                    )
                x = self._lay_in(x)
            self.check_tensor(x, name)
            shape = box.shape if self.spec.fixed else (self.tokens, *box.shape)
            lead = x.dim() - len(shape)
            found = tuple(x.shape[lead:]) if lead >= 0 else ()
            fits = found == shape or (not self.spec.fixed and found[1:] == shape[1:] and 0 < found[0] <= self.tokens)
            if lead < 0 or not fits:
                wanted = ", ".join(["...", *map(str, shape)]) + ("" if self.spec.fixed else ", or fewer tokens")
                raise ArgumentError(f"expected {name} of shape ({wanted}), got {tuple(x.shape)}")
            if x.numel():
                wide = box.outward(self.dtype)
                ends = torch.aminmax(x.detach().reshape(-1, box.dim), dim=0)
                names = box.names or [f"{name}[{i}]" for i in range(box.dim)]
                for i, (label, (lo, hi)) in enumerate(zip(names, wide.intervals(), strict=True)):
                    self.check_range(label, float(ends.min[i]), float(ends.max[i]), lo, hi)

    def example_input(self) -> tuple[Tensor, ...]:
        """Two points of the box, for tracing."""
        if self.spec.fixed:
            return tuple(box.sample(2, dtype=self.dtype) for box in self.spec.boxes)
        (box,) = self.spec.boxes
        return (box.sample(2 * self.tokens, dtype=self.dtype).reshape(2, self.tokens, -1),)

    @property
    def beyond(self) -> str:
        known = self._origin is not None or isinstance(self.source, (CompiledNetwork, CompiledProgram))
        if known or (self.source is not None and self.source.family in THEOREMS and self.source.storable):
            return "" if self.source is None else self.source.beyond
        return "the target of the network that was exported is a function that no file can hold"

    def recertify(self) -> Certificate:
        """The bound of the present weights against what their network was made for, computed anew."""
        for block, row in zip(self.blocks, self.heads, strict=True):
            cast(PlainBlock, block).require_stock(len(row))
        net, layers = network_of(self), self._layers
        if layers is None and net.family in THEOREMS:
            layers = importlib.import_module(SOURCES).theorem_source
        read = None if layers is None else lambda: layers(net, self.tokens)
        return recertified(self.spec, self.state_dict(), net, read)

    def config(self) -> dict[str, Any]:
        """What, besides the weights, describes this module; JSON only."""
        origin = self._origin if self.source is None else origin_of(self.source)
        about = {"dtype": dtype_name(self.dtype), "strict": self.strict, "origin": origin}
        return {**self.spec.to_json(), **about}

    @classmethod
    def earlier(cls, config: dict[str, Any]) -> bool:
        """Whether the description holds what the network's weights are made from, instead of its tensors."""
        return config["origin"] is not None and "tensors" not in config["origin"]

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> PlainTransformer:
        """The module that `config` and `state_dict` describe."""
        dtype, spec = shipped(DTYPES[config["dtype"]]), PlainSpec.from_json(config)
        with torch.device("meta"):  # shapes first: a description must not make us allocate what no file holds
            shapes = {name: t.shape for name, t in PlainTransformer(spec, dtype).state_dict().items()}
        if shapes != {name: t.shape for name, t in tensors.items()}:
            raise CertificateError("the tensors do not have the shapes that the description asks for")
        built = cls.unfilled(config)
        built.load_state_dict(tensors)
        return built.eval()

    @classmethod
    def unfilled(cls, config: dict[str, Any]) -> PlainTransformer:
        """The module that `config` describes, its weights still to be filled in."""
        return cls(PlainSpec.from_json(config), shipped(DTYPES[config["dtype"]]))._told(config)

    def _told(self, config: dict[str, Any]) -> Self:
        """This, knowing what a description says beside its form."""
        self.strict, self._origin = bool(config["strict"]), config["origin"]
        return self

    def extra_repr(self) -> str:
        return f"{self.registers} registers, {self.tokens} token(s){', causal' if self.causal else ''}"


def plain_family(stated: object, name: str) -> type[PlainTransformer]:
    """The class of the plain form that the file `name` holds: a variant states its family, others need not."""
    kind = PlainTransformer if stated is None else family_of(stated, name)
    if not issubclass(kind, PlainTransformer):
        raise CertificateError(f"{name} holds a network of the kind '{kind.family}', not a plain transformer")
    return kind
