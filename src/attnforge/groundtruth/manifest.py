"""`Manifest`: what every head of a network is for, which head reads which, and the inputs that show it; frozen data.

A manifest is tied to weights by hashes. It names nodes: "input" (what enters the first layer), heads by their ids, and
"output". A head or an edge *moves* an output where a witness says so: an input on which replacing what the head gives
(or what one head reads of another) by what it is on a second input, or by nothing, changes the output. An output that
neither `moves` nor `still` lists is one that the head or the edge cannot reach at all; so is any pair of nodes that is
no edge. `groundtruth.check` finds out whether all of this is so.

The JSON form has a version and a published schema, `schema()`, which is made from the form that reading checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..certificates.certificate import Certificate, hashed
from ..certificates.schema import Either, Whole, Word, limited, require
from ..errors import ArgumentError, CertificateError
from ..saving import free_file, write_whole

FORMAT = "attnforge-manifest"
VERSION = 1  # of the JSON form; another one is refused
LARGEST = 1 << 28  # bytes of a manifest: a network of a thousand heads has some megabytes
INPUT, OUTPUT = "input", "output"

#: What a head may be for.
ROLES = {
    "function": "a function of one variable, by anchors or gates",
    "product": "a product of two variables, or a square",
    "norm": "the norm of a vector, or the vector divided by it",
    "softmax": "a softmax that the target itself contains",
    "attend": "an attention head that the target itself contains",
    "mix": "a fixed mean or sum over tokens",
    "maximum": "the largest entry over tokens",
    "map": "a table of what stands at the same position",
    "aggregate": "what stands at the positions that a selector picks, or its mean",
    "count": "how many positions a selector picks",
    "construction": "a head of a theorem's construction",
    "padding": "nothing: its weights are zeros",
    "idle": "nothing that depends on the input",
    "distractor": "something that no output needs",
}
TIERS = ("memory", "plain", "lens")
#: What a column of the residual stream carries.
CHANNELS = ("input", "constant", "register", "written", "mixed", "unused")
PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Witness:
    """That `output` moves by `effect` on the sample `base`, when what is given there is replaced by what it is on the
    sample `source`, or by zeros where `source` is None."""

    output: str
    base: int
    source: int | None
    effect: float


@dataclass(frozen=True)
class Channel:
    """One column of the residual stream: `kind` is one of `CHANNELS`, "mixed" where columns share it."""

    name: str
    kind: str


class Moving:
    """A head or an edge, and the witnesses of what it moves."""

    moves: tuple[Witness, ...]

    @property
    def relevant(self) -> tuple[str, ...]:
        """The outputs that it moves."""
        return tuple(dict.fromkeys(witness.output for witness in self.moves))


@dataclass(frozen=True)
class HeadEntry(Moving):
    """One head: where it is, what it is for, and which outputs it moves.

    `hook` names the module or hook, and `at` is the head's place in it. `op` is the operation of the formula or program
    ("" for heads that compute none), `reads` the channels of query, key and value, `writes` those it adds to.
    """

    id: str
    layer: int
    index: int
    hook: str
    at: int
    role: str
    note: str
    op: str
    scope: str
    reads: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
    writes: tuple[int, ...] = ()
    moves: tuple[Witness, ...] = ()
    still: tuple[str, ...] = ()  # outputs that zeros in the weights do not rule out, and that nothing tried has moved


@dataclass(frozen=True)
class Edge(Moving):
    """`target` reads what `source` writes, through `channels`, into its query, key or value (`into`)."""

    source: str
    target: str
    channels: tuple[int, ...]
    into: tuple[str, ...]
    moves: tuple[Witness, ...] = ()
    still: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """What goes in: `kind` "numbers" between `lower` and `upper`, or "tokens", ids into `vocabulary`, padded with the
    id after it. A sample is all numbers of a point one after the other; `shapes` are those of the network's inputs."""

    kind: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    lower: tuple[float, ...] = ()
    upper: tuple[float, ...] = ()
    vocabulary: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Output:
    """What comes out: a "number", whose effects are distances, or a "value" out of `values`, decoded, whose effects are
    numbers of positions that change."""

    name: str
    kind: str = "number"
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Claim:
    """What the certificate of the network states; `rounding` is what two evaluations of one function may differ by."""

    kind: str
    bound: float | None
    dtype: str
    proof: str
    rounding: float


@dataclass(frozen=True)
class Manifest:
    """The ground truth about one network, and its JSON form."""

    target: str
    tier: str
    inputs: Inputs
    outputs: tuple[Output, ...]
    channels: tuple[Channel, ...]
    heads: tuple[HeadEntry, ...]
    edges: tuple[Edge, ...]
    samples: tuple[tuple[float, ...], ...]
    certificate: Claim
    weights: str
    tensors: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    artefact: tuple[str, str] | None = None  # kind and hash of the file that this lies beside

    def __post_init__(self) -> None:
        known = {head.id for head in self.heads}
        if len(known) < len(self.heads) or known & {INPUT, OUTPUT}:
            raise CertificateError("the ids of a manifest's heads are not different from each other")
        outputs = {output.name for output in self.outputs}
        if not outputs or len(outputs) < len(self.outputs):
            raise CertificateError("a manifest names its outputs, each once")
        size = sum(_size(shape) for shape in self.inputs.shapes)
        if any(len(sample) != size for sample in self.samples):
            raise CertificateError(f"every sample of this manifest has {size} numbers")
        if len({(edge.source, edge.target) for edge in self.edges}) < len(self.edges):
            raise CertificateError("a manifest states every edge once, with all that is known of it")
        for what in self.everything():
            name = what.id if isinstance(what, HeadEntry) else f"{what.source} -> {what.target}"
            lists = what.relevant + what.still
            if len(set(what.moves)) < len(what.moves) or len(set(lists)) < len(lists):
                raise CertificateError(
                    f"{name} states an effect twice, or both that it moves an output and that it is still"
                )
            named = {*what.still, *(witness.output for witness in what.moves)}
            if not named <= outputs:
                raise CertificateError(f"{name}: there is no output {sorted(named - outputs)[0]!r}")
            columns = what.channels if isinstance(what, Edge) else [*sum(what.reads, ()), *what.writes]
            samples = [i for witness in what.moves for i in (witness.base, witness.source or 0)]
            if max(columns, default=0) >= max(1, len(self.channels)) or max(samples, default=-1) >= len(self.samples):
                raise CertificateError(f"{name} speaks of channels or samples that the manifest does not have")
            if isinstance(what, Edge) and not (what.source in {INPUT, *known} and what.target in {OUTPUT, *known}):
                raise CertificateError(f"{name} joins nodes that the manifest does not have")

    def everything(self) -> list[HeadEntry | Edge]:
        """The heads, then the edges."""
        return [*self.heads, *self.edges]

    def head(self, id: str) -> HeadEntry:
        """The head of an id; `ArgumentError` if there is none."""
        for head in self.heads:
            if head.id == id:
                return head
        raise ArgumentError(f"there is no head '{id}'; ids are such as '{self.heads[0].id if self.heads else 'L0.H0'}'")

    def components(self) -> list[dict[str, Any]]:
        """The heads that move an output, in the short form of benchmarks for agents: id, hook, role.tag, note."""
        chosen = [head for head in self.heads if head.moves]
        return [{key: _head_json(head)[key] for key in ("id", "hook", "at", "role", "note")} for head in chosen]

    def beside(self, kind: str, digest: str) -> Manifest:
        """The same, beside a file of a kind with a SHA-256."""
        return replace(self, artefact=(kind, digest))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON of the published schema."""
        plain = asdict(self)
        edges = [{"from": e.source, "to": e.target, **{k: _plain(getattr(e, k)) for k in _EDGE}} for e in self.edges]
        return {
            "format": FORMAT,
            "version": VERSION,
            **{key: _plain(plain[key]) for key in ("target", "tier", "inputs", "outputs", "channels")},
            "heads": [_head_json(head) for head in self.heads],
            "edges": edges,
            "samples": _plain(self.samples),
            "certificate": plain["certificate"],
            "weights": {"algorithm": "sha256", "all": self.weights, "tensors": dict(self.tensors)},
            "artefact": None if self.artefact is None else {"kind": self.artefact[0], "sha256": self.artefact[1]},
        }

    @classmethod
    def from_json(cls, data: object, name: str = "the manifest") -> Manifest:
        """The manifest that `to_json` wrote; `CertificateError` on anything else."""
        limited(data, name)
        if isinstance(data, Mapping) and data.get("version") != VERSION and data.get("format") == FORMAT:
            raise CertificateError(
                f"{name} has version {data.get('version')!r}, and this attnforge reads {VERSION}; write it again"
            )
        require(data, FORM, name)
        assert isinstance(data, dict)
        inputs, weights, beside = data["inputs"], data["weights"], data["artefact"]
        wrong = [key for key, value in weights["tensors"].items() if not isinstance(value, str)]
        if wrong:
            raise CertificateError(f"{name}.weights.tensors: the hash of '{wrong[0]}' must be a text")
        heads = [
            HeadEntry(
                **{key: head[key] for key in ("id", "layer", "index", "hook", "at", "note", "op", "scope")},
                role=head["role"]["tag"], reads=_three([tuple(head["reads"][part]) for part in PARTS]),
                writes=tuple(head["writes"]), moves=_witnesses(head["moves"]), still=tuple(head["still"]),
            )
            for head in data["heads"]
        ]  # fmt: skip
        edges = [
            Edge(e["from"], e["to"], tuple(e["channels"]), tuple(e["into"]), _witnesses(e["moves"]), tuple(e["still"]))
            for e in data["edges"]
        ]
        return cls(
            data["target"], data["tier"],
            Inputs(inputs["kind"], tuple(inputs["names"]), tuple(tuple(shape) for shape in inputs["shapes"]),
                   tuple(map(float, inputs["lower"])), tuple(map(float, inputs["upper"])),
                   tuple(map(_frozen, inputs["vocabulary"]))),
            tuple(Output(o["name"], o["kind"], tuple(map(_frozen, o["values"]))) for o in data["outputs"]),
            tuple(Channel(c["name"], c["kind"]) for c in data["channels"]), tuple(heads), tuple(edges),
            tuple(tuple(map(float, sample)) for sample in data["samples"]),
            Claim(**{key: data["certificate"][key] for key in ("kind", "bound", "dtype", "proof", "rounding")}),
            weights["all"], tuple(sorted(weights["tensors"].items())),
            None if beside is None else (beside["kind"], beside["sha256"]),
        )  # fmt: skip

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the JSON form; a file that is there already is refused unless `force=True`."""
        target = free_file(path, ".json", force=force)
        return write_whole(target, json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read what `save` wrote; `CertificateError` when it is not that, or too large."""
        source = Path(path)
        if not source.is_file():
            raise ArgumentError(f"there is no file '{source}'")
        if source.stat().st_size > LARGEST:
            raise CertificateError(f"{source.name} has more than {LARGEST:,} bytes, and is no manifest")
        try:
            data = json.loads(source.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise CertificateError(f"{source.name} is not readable JSON: {error}") from error
        return cls.from_json(data, source.name)

    def __str__(self) -> str:
        used = [head for head in self.heads if head.moves]
        unsure = sum(bool(what.still) for what in self.everything())
        lines = [
            f"{self.target}: {len(used)} of {len(self.heads)} heads and {sum(bool(e.moves) for e in self.edges)} edges "
            f"move an output ({self.tier}, {self.certificate.kind}, {self.certificate.dtype})",
            *(f"  {head.id:8s} {head.role:10s} {head.note}" for head in used),
        ]
        if unsure:
            lines.append(f"{unsure} more can reach an output, and have not moved it on any input that was tried")
        return "\n".join(lines)


def claim_of(certificate: Certificate, rounding: float) -> Claim:
    """What a manifest says of a certificate."""
    return Claim(certificate.kind, certificate.bound, certificate.dtype, certificate.proof, rounding)


def hashes(tensors: Mapping[str, torch.Tensor]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The hash of all tensors, as certificates have it, and that of each, in the order of their names."""
    return hashed(tensors), tuple((name, hashed({name: tensor})) for name, tensor in sorted(tensors.items()))


def require_weights(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `CertificateError`, which names the tensor, unless a manifest was made for these weights."""
    everything, each = hashes(tensors)
    stated, found = dict(manifest.tensors), dict(each)
    if manifest.weights == everything and stated == found:
        return
    for name in sorted(stated.keys() | found.keys()):
        if name not in found:
            raise CertificateError(f"the manifest is of other weights: there is no tensor '{name}', which it speaks of")
        if name not in stated:
            raise CertificateError(f"the manifest is of other weights: it does not know the tensor '{name}'")
        if stated[name] != found[name]:
            raise CertificateError(
                f"the manifest is of other weights: the tensor '{name}' has the hash {found[name][:12]}, and the "
                f"manifest states {stated[name][:12]}; write a manifest for these weights with af.manifest(net)"
            )
    raise CertificateError("the manifest's hash of all weights is not that of its tensors: it was changed")


def _plain(value: Any) -> Any:
    """Tuples as lists, objects as dicts."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Witness):
        return asdict(value)
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _frozen(value: Any) -> Any:
    """JSON of a value as it came, but hashable where it is a list."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _head_json(head: HeadEntry) -> dict[str, Any]:
    return {
        **{key: getattr(head, key) for key in ("id", "layer", "index", "hook", "at")},
        "role": {"tag": head.role},
        **{key: getattr(head, key) for key in ("note", "op", "scope")},
        "reads": {part: list(columns) for part, columns in zip(PARTS, head.reads, strict=True)},
        "writes": list(head.writes), "moves": _plain(head.moves), "still": list(head.still),
    }  # fmt: skip


def _witnesses(data: list[dict[str, Any]]) -> tuple[Witness, ...]:
    return tuple(Witness(w["output"], w["base"], w["source"], float(w["effect"])) for w in data)


def _three(parts: list[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    query, key, value = parts
    return query, key, value


def _size(shape: tuple[int, ...]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found


_EDGE = ("channels", "into", "moves", "still")
_WITNESS = {"output": str, "base": Whole(), "source": Either(None, Whole()), "effect": float}
_HEAD = {
    "id": str, "layer": Whole(), "index": Whole(), "hook": str, "at": Whole(), "role": {"tag": Word(*ROLES)},
    "note": str, "op": str, "scope": Word("memory", "self", "tokens"), "reads": {part: [Whole()] for part in PARTS},
    "writes": [Whole()], "moves": [_WITNESS], "still": [str],
}  # fmt: skip
#: The JSON form of version 1, as reading checks it.
FORM: dict[str, Any] = {
    "format": Word(FORMAT), "version": Whole(VERSION, VERSION), "target": str, "tier": Word(*TIERS),
    "inputs": {
        "kind": Word("numbers", "tokens"), "names": [str], "shapes": [[Whole(1)]], "lower": [float], "upper": [float],
        "vocabulary": [Any],
    },
    "outputs": [{"name": str, "kind": Word("number", "value"), "values": [Any]}],
    "channels": [{"name": str, "kind": Word(*CHANNELS)}],
    "heads": [_HEAD],
    "edges": [{"from": str, "to": str, "channels": [Whole()], "into": [Word(*PARTS, OUTPUT)], "moves": [_WITNESS],
               "still": [str]}],
    "samples": [[float]],
    "certificate": {"kind": Word("certified", "analysed", "calibrated", "exact"), "bound": Either(None, float),
                    "dtype": str, "proof": Word("analysis", "kernel"), "rounding": float},
    "weights": {"algorithm": Word("sha256"), "all": str, "tensors": {}},
    "artefact": Either(None, {"kind": str, "sha256": str}),
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The published JSON schema (draft 2020-12) of a manifest.

    >>> schema()["properties"]["version"]
    {'type': 'integer', 'minimum': 1, 'maximum': 1}
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attnforge manifest",
        "description": "What every head of an attention-only network is for, version 1.",
        **_schema(FORM),
    }


def _schema(form: Any) -> dict[str, Any]:
    """A form of `certificates.schema` as JSON schema."""
    if form is Any:
        return {}
    if isinstance(form, Either):
        return {"anyOf": [_schema(each) for each in form]}
    if isinstance(form, Word):
        return {"enum": list(form)}
    if isinstance(form, Whole):
        return {"type": "integer", "minimum": form.least, "maximum": form.most}
    if isinstance(form, list):
        return {"type": "array", "items": _schema(form[0])}
    if isinstance(form, dict):
        if not form:
            return {"type": "object"}
        needed = [key for key in form if not key.endswith("?")]
        return {"type": "object", "required": needed, "properties": {k: _schema(each) for k, each in form.items()}}
    return {"type": {str: "string", float: "number", bool: "boolean", None: "null"}[form]}
