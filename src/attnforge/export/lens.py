"""Networks as TransformerLens models: attention only, no norm, inputs at the residual stream or as token ids.

`to_lens(net)` gives a `Lens`. `lens.model` is a `TransformerBridge` around TransformerLens' own model (version 4), or a
`HookedTransformer` (version 3), whose blocks are those of the plain transformer. `lens.residual(x)` makes the stream
that enters block 0, since inputs are numbers; a token program has embedding and unembedding, and takes `lens.ids(ids)`.
TransformerLens wants one head size and one number of heads for all blocks, so blocks are padded with zeros.

Weights have the names of version 3 here and in files, whichever is installed: a file of one is read by the other.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..certificates.certificate import Certificate, weights_hash
from ..certificates.certified import WRONG, CertifiedModule, rebuilt
from ..certificates.schema import limited
from ..certificates.schema import require as require_form
from ..errors import ArgumentError, CertificateError, MissingExtra
from ..extras import require
from ..rasp.network.compiled import token_rows
from ..saving import free_file, write_whole
from .fresh import MOST
from .plain.build import to_plain
from .plain.spec import PlainHead, PlainSpec
from .plain.transformer import PlainTransformer, plain_family
from .verification import LENS_HEADER, Verification, is_lens_file
from .verification import verify as compare
from .writing import quiet, steps

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

FORMAT = 2  # of the file, whose unembedding is the read-out; in 1 it was none for networks of numbers
NEEDED = "transformer-lens>=3.9"
ENTRIES = 1 << 24  # of attention patterns at once, which TransformerLens keeps: 128 MB in float64


class Lens:
    """A plain transformer as a TransformerLens model, with the way in (`residual`) and the way out (`readout`).

    `lens(x)` is what the network returns. `run_with_cache` and `run_with_hooks` take the network's inputs too; hook
    names and shapes are those of TransformerLens, and the first `lens.registers` positions are registers.
    """

    kind = "lens"

    def __init__(self, plain: PlainTransformer, model: Any, verification: Verification | None = None):
        self.plain, self.model, self.verification = plain, model, verification

    @property
    def cfg(self) -> Any:
        """The configuration of the TransformerLens model."""
        return self.model.cfg

    @property
    def registers(self) -> int:
        """How many register tokens stand before the data."""
        return self.plain.registers

    @property
    def channels(self) -> tuple[str, ...]:
        """What each column of the residual stream carries."""
        return self.plain.channels

    @property
    def heads(self) -> tuple[tuple[PlainHead, ...], ...]:
        """The ground truth: what each head of each block is for; heads beyond these are padding."""
        return self.plain.heads

    def residual(self, *inputs: Tensor) -> Tensor:
        """The residual stream that enters block 0, (batch, registers + tokens, channels)."""
        return self.plain.residual(*inputs)

    def readout(self, stream: Tensor) -> Tensor:
        """What the network returns, from the residual stream after the last block."""
        rows = self.plain.readout(stream[..., self.registers :, :])
        return self.plain._lay_out(rows)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors of the model by the names that version 3 gives them, such as `blocks.0.attn.W_Q`."""
        return _weights(self.model)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._rows(self.model(self.residual(*inputs), start_at_layer=0))

    def run_with_cache(
        self, *inputs: Tensor, stop_at_layer: int | None = None, **options: Any
    ) -> tuple[Tensor, ActivationCache]:
        """The output and the cache of activations: `cache["pattern", 0]` is (batch, head, query, key).

        With `stop_at_layer` the stream that enters that block, registers included; after the last one at n_layers.
        """
        with self._stopping(stop_at_layer) as (early, kept):
            found, cache = self.model.run_with_cache(self.residual(*inputs), start_at_layer=0, **early, **options)
        return kept[-1] if kept else found if early else self._rows(found), cache

    def run_with_hooks(
        self, *inputs: Tensor, fwd_hooks: list[Any], stop_at_layer: int | None = None, **options: Any
    ) -> Tensor:
        """The output with hooks in place, such as `("blocks.0.attn.hook_z", ablate)`; `stop_at_layer` as for
        `run_with_cache`."""
        stream = self.residual(*inputs)
        with self._stopping(stop_at_layer) as (early, kept):
            found = self.model.run_with_hooks(stream, fwd_hooks=fwd_hooks, start_at_layer=0, **early, **options)
        return kept[-1] if kept else found if early else self._rows(found)

    @contextmanager
    def _stopping(self, layer: int | None) -> Iterator[tuple[dict[str, int], list[Tensor]]]:
        """What TransformerLens is told of where to stop, and a place for the stream that enters the unembedding: at
        n_layers it gives logits."""
        count, kept = self.cfg.n_layers, list[Tensor]()
        if layer is None or layer < count:
            yield {} if layer is None else {"stop_at_layer": layer}, kept
            return
        if layer > count:
            raise ArgumentError(f"stop_at_layer is {count} at most, the number of blocks, got {layer}")
        handle = self.model.unembed.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
        try:
            yield {}, kept
        finally:
            handle.remove()

    def _rows(self, logits: Tensor) -> Tensor:
        """What the network returns, from what the model does: its unembedding is the read-out."""
        return self.plain._lay_out(logits[..., self.registers :, :])

    def ids(self, ids: Tensor) -> Tensor:
        """Token ids of a program's sequences, padded to the longest, as `model` takes them: registers before them.

        `model(lens.ids(ids))` are logits, registers' rows included.
        """
        known = len(self.plain.spec.inputs)
        front = torch.arange(known, known + self.registers).expand(*ids.shape[:-1], -1)
        pad = ids.new_full((*ids.shape[:-1], self.plain.tokens - ids.shape[-1]), known - 1)
        return torch.cat([front, ids, pad], -1)

    @property
    def most(self) -> int:
        """How many points are evaluated at once when the lens is compared with its network."""
        return max(1, min(MOST, ENTRIES // (self.cfg.n_heads * self.cfg.n_ctx**2)))

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write model, embedding, read-out and ground truth to one safetensors file; `load_lens` reads it back.

        A file that is there already is refused unless `force=True`.
        """
        target = free_file(path, force=force)
        header = {
            "format": FORMAT,
            "family": self.plain.family,
            "plain": self.plain.config(),
            "certificate": self.plain.certificate.to_json(),
        }
        tensors = {f"plain.{name}": t.detach().cpu().contiguous() for name, t in self.plain.state_dict().items()}
        # Clones: TransformerLens ties some tensors together, which a safetensors file cannot say.
        tensors |= {f"lens.{name}": t.cpu().contiguous().clone() for name, t in self.weights.items()}
        write_whole(target, to_bytes(tensors, metadata={LENS_HEADER: json.dumps(header, sort_keys=True)}))


def to_lens(net: CertifiedModule, *, tokens: int | None = None, verify: bool = True) -> Lens:
    """A network as a TransformerLens model; needs transformer-lens 3.9 or later.

    A network in tier `memory` is put into plain form first. Unless `verify=False`, the model is written to a file,
    loaded by a fresh process and compared with the network.
    """
    with steps() as step:
        step("loading TransformerLens")
        _library()
        step("plain form")
        plain = net if isinstance(net, PlainTransformer) else to_plain(net, tokens)
        lens = Lens(plain, _filled(plain))
        if verify:
            lens.verification = compare(lens, net)
    return lens


def load_lens(path: str | Path) -> Lens:
    """Read back what `lens.save(path)` wrote; raises `CertificateError` for anything else."""
    _library()
    source = Path(path)
    if not is_lens_file(source):
        raise CertificateError(f"{source.name} does not hold a TransformerLens model written by attnforge")
    try:
        with safe_open(str(source), framework="pt") as file:
            header = json.loads(file.metadata()[LENS_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["format"] not in (1, FORMAT):
            raise CertificateError(f"{source.name}: expected format {FORMAT}; upgrade attnforge, or write it again")
        limited(header, f"the header of {source.name}")
        kind = plain_family(header.get("family"), source.name)
        require_form(header["plain"], kind.schema, f"the description in {source.name}")
        _refuse_other_sizes(source, PlainSpec.from_json(header["plain"]), tensors)
        plain = cast(PlainTransformer, rebuilt(kind, header["plain"], _part(tensors, "plain.")))
        certificate = Certificate.from_json(header["certificate"])
        if weights_hash(plain) != certificate.weights:
            raise CertificateError(f"{source.name}: its weights are not those that were certified: it was changed")
        plain.attach(certificate)
        model = _filled(plain)
        known, given = _weights(model), _part(tensors, "lens.")
        if header["format"] == 1:
            given |= {name: known[name] for name in ("unembed.W_U", "unembed.b_U")}
        wrong = {n for n in known.keys() | given.keys() if n not in known or n not in given}
        wrong |= {n for n in known.keys() & given.keys() if known[n].shape != given[n].shape}
        if wrong:
            raise CertificateError(f"{source.name}: missing or unknown tensors {sorted(wrong)[:4]}")
        _put(model, given)
    except CertificateError:
        raise
    except (SafetensorError, OSError, *WRONG) as error:
        raise CertificateError(f"{source.name} is not a readable TransformerLens file: {error}") from error
    return Lens(plain, model)


def _refuse_other_sizes(source: Path, spec: PlainSpec, tensors: dict[str, Tensor]) -> None:
    """Refuse a header that asks for more memory than the tensors of its file take."""
    blocks = sum(name.endswith(".in_proj_weight") for name in tensors)
    found = (*tensors["plain.positions"].shape, blocks)
    if found != (spec.registers + spec.tokens, spec.stream, len(spec.heads)):
        raise CertificateError(f"{source.name}: the description does not fit the tensors, {found} in the file")


def _library() -> tuple[Any, bool]:
    """The class of models and whether it is that of version 4, or words on what to install."""
    with quiet():
        package = require("transformer_lens", "lens")
        bridge = getattr(package, "TransformerBridge", None)
    if hasattr(bridge, "boot_native"):
        return bridge, True
    if "HookedTransformer" in vars(package):
        return package.HookedTransformer, False
    error = MissingExtra(NEEDED, "lens")
    version = getattr(package, "__version__", None) or importlib.metadata.version("transformer-lens")
    error.msg = (
        f"transformer-lens {version} is installed, and it has neither TransformerBridge.boot_native nor "
        f"HookedTransformer; install {NEEDED}, for example by pip install 'attnforge[lens]'"
    )
    raise error


def _filled(plain: PlainTransformer) -> Any:
    """A TransformerLens model whose blocks compute what the blocks of a plain transformer do."""
    blocks = [cast(nn.MultiheadAttention, block.attention) for block in plain.blocks]
    if not blocks:
        raise ArgumentError("this network has no attention at all (it is affine): there is nothing to look at")
    count, width = max(b.num_heads for b in blocks), max(b.head_dim for b in blocks)
    spec = plain.spec
    known = len(spec.inputs) + plain.registers if spec.ids else 1
    config = {
        "n_layers": len(blocks), "d_model": plain.spec.stream, "n_ctx": plain.registers + plain.tokens, "d_head": width,
        "n_heads": count, "d_vocab": known, "d_vocab_out": spec.outputs, "attn_only": True, "normalization_type": None,
        "act_fn": None, "attention_dir": "causal" if plain.causal else "bidirectional", "dtype": plain.dtype,
        "device": "cpu", "positional_embedding_type": "standard", "init_weights": False,
    }  # fmt: skip
    kind, native = _library()
    with quiet():
        model = kind.boot_native(config, dtype=plain.dtype) if native else kind(config, move_to_device=False)
    state = {name: torch.zeros_like(tensor) for name, tensor in _weights(model).items()}
    state["pos_embed.W_pos"] = plain.positions.detach().clone()
    if spec.ids:  # registers are tokens with ids of their own, after those of the vocabulary and of padding
        rows = token_rows(torch.arange(len(spec.inputs)), len(spec.inputs) - 1, plain.dtype)
        registers = state["pos_embed.W_pos"][: plain.registers].clone()
        state["embed.W_E"] = torch.cat([rows @ plain.embed.weight.detach().T, registers])
        state["pos_embed.W_pos"][: plain.registers] = 0.0
    state["unembed.W_U"], state["unembed.b_U"] = plain.readout.weight.detach().T, plain.readout.bias.detach()
    for index, block in enumerate(blocks):
        state.update({f"blocks.{index}.attn.{key}": value for key, value in _padded(block, count, width).items()})
    _put(model, state)
    return model.eval()


def _padded(block: nn.MultiheadAttention, count: int, width: int) -> dict[str, Tensor]:
    """W_Q, W_K, W_V (head, channel, d_head) and W_O (head, d_head, channel), with zeros up to the common sizes.

    TransformerLens divides by the square root of the common d_head; both are powers of two, so the factor is exact.
    """
    n, d, stream = block.num_heads, block.head_dim, block.embed_dim
    found = {}
    for name, part in zip("QKV", block.in_proj_weight.detach().chunk(3), strict=True):
        table = part.new_zeros(count, stream, width)
        table[:n, :, :d] = part.reshape(n, d, stream).transpose(-2, -1)
        found[f"W_{name}"] = table
    found["W_Q"] = found["W_Q"] * (width / d) ** 0.5
    out = block.out_proj.weight.detach()
    found["W_O"] = out.new_zeros(count, width, stream)
    found["W_O"][:n, :d] = out.T.reshape(n, d, stream)
    return found


#: The names of a weight in version 4, and in version 3.
NAMES = {"embed.weight": "embed.W_E", "pos_embed.weight": "pos_embed.W_pos", "unembed.weight": "unembed.W_U",
         "unembed.bias": "unembed.b_U"}  # fmt: skip


def _weights(model: Any) -> dict[str, Tensor]:
    """The tensors of a model by the names and in the shapes of version 3: W_Q is (head, channel, d_head)."""
    if not hasattr(model, "original_model"):
        return {name: tensor.detach() for name, tensor in model.named_parameters()}
    heads, found = model.cfg.n_heads, {}
    for name, tensor in model.state_dict().items():
        *place, part, kind = name.split(".")
        if name in NAMES:
            found[NAMES[name]] = tensor.T if name == "unembed.weight" else tensor
        elif part == "o":
            found[".".join([*place, f"{'W' if kind == 'weight' else 'b'}_O"])] = (
                tensor.T.unflatten(0, (heads, -1)) if kind == "weight" else tensor
            )
        elif part in ("q", "k", "v"):
            split = tensor.unflatten(0, (heads, -1))
            found[".".join([*place, f"{'W' if kind == 'weight' else 'b'}_{part.upper()}"])] = (
                split.transpose(-2, -1) if kind == "weight" else split
            )
    return {name: tensor.detach() for name, tensor in found.items()}


def _put(model: Any, weights: dict[str, Tensor]) -> None:
    """Write tensors as `_weights` gives them into a model."""
    if not hasattr(model, "original_model"):
        model.load_state_dict(weights, strict=False)  # masks are buffers, and follow from the configuration
        return
    back = {name: key for key, name in NAMES.items()}
    state = {}
    for name, tensor in weights.items():
        *place, last = name.split(".")
        if name in back:
            state[back[name]] = tensor.T if name == "unembed.W_U" else tensor
            continue
        letter, kind = last[-1].lower(), "weight" if last[0] == "W" else "bias"
        if kind == "weight":
            tensor = tensor.flatten(0, 1).T if letter == "o" else tensor.transpose(-2, -1).flatten(0, 1)
        elif letter != "o":
            tensor = tensor.flatten()
        state[".".join([*place, letter, kind])] = tensor
    model.load_state_dict(state, strict=False)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
