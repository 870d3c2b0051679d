"""Packs on disk: write one, read it, check every label of it.

    pack.json        what was asked for: count, seed, dtype, proof
    onnx/            the networks, one graph each
    networks/        the same with program and certificate, as attnforge saves them
    vnnlib/          the properties in VNN-LIB 1.0, as VNN-COMP has them
    vnnlib2/         the same in VNN-LIB 2.0
    instances.csv    graph, property, seconds: the list that VNN-COMP's scripts read
    labels.jsonl     for each instance its label, margin and proof
    README.md        what this is
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import files
from ..arguments import is_number, whole
from ..certificates import certified
from ..certificates.certificate import Proof
from ..compiler.compiled import CompiledNetwork
from ..compiler.pipeline import compile
from ..dtypes import dtype_name, shipped
from ..errors import ArgumentError, AttnforgeError, CertificateError, PrecisionError
from ..extras import require
from ..progress import stages
from ..rasp.network.compiled import CompiledProgram
from ..saving import MISTAKES, file_hash, write_whole
from ..threads import one_thread
from . import programs
from .graph import StoredGraph, model, of_model
from .graph import read as read_graph
from .instances import LabelledProperty, problem, worthy
from .proof import refuted, witnessed
from .property import Property, parse
from .sampler import EVERY, FAMILIES, PackTarget, sampled

FORMAT = 1  # of packs; another number is refused
PER = 6  # instances of a network: each label at three levels of difficulty
MOST = 1 << 20  # instances of a pack: a check of so many takes days
MOST_BYTES = 1 << 24  # of a text in a pack: more than the labels of ten thousand instances
SECONDS = 120  # that instances.csv gives a verifier, as much as VNN-COMP does for networks of this size
DRAWS = 32  # targets that are drawn for one network: some are constant, some cannot be compiled in float32
NAME = re.compile(r"((?:formula|mlp|tokens|program)_\d{4,7})_\d{1,2}")
FOLDERS = {"onnx": ".onnx", "networks": ".safetensors", "vnnlib": ".vnnlib", "vnnlib2": ".vnnlib"}
SETTINGS, LABELS, LIST, ABOUT = "pack.json", "labels.jsonl", "instances.csv", "README.md"


@dataclass(frozen=True)
class Instance:
    """One line of labels.jsonl: a network, a property, the label and its proof.

    `margin` is by how much the label holds, in every semantics; `multiple` the same in bounds of the certificate, or as
    it is where that is exact and has none. An unsat label says how many `cells` showed it and the `gap` to the best
    point known; a sat label has a `witness` and the enclosure of the outputs there.
    """

    name: str
    family: str
    target: str
    dtype: str
    inputs: int
    outputs: int
    kind: str
    size: float
    label: str
    bound: float
    margin: float
    multiple: float
    gap: float | None
    cells: int | None
    witness: list[float] | None
    enclosed: list[list[float]] | None
    sha256: dict[str, str]

    @property
    def network(self) -> str:
        """The name of its network."""
        return self.name.rpartition("_")[0]

    def places(self, root: Path) -> dict[str, Path]:
        """Its files, by the folders of a pack: they follow from its name."""
        return {
            folder: root / folder / f"{self.name if folder.startswith('vnnlib') else self.network}{ending}"
            for folder, ending in FOLDERS.items()
        }

    def line(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)


@dataclass(frozen=True)
class Pack:
    """A pack that has been read: where it is, what was asked for, its instances."""

    root: Path
    settings: dict[str, Any]
    instances: tuple[Instance, ...]

    def __len__(self) -> int:
        return len(self.instances)

    def property(self, instance: Instance) -> Property:
        """The property of an instance, from its file."""
        return parse(_text(instance.places(self.root)["vnnlib"]))

    def graph(self, instance: Instance) -> StoredGraph:
        """The graph of an instance, from its file."""
        return read_graph(instance.places(self.root)["onnx"])

    def count(self, label: str) -> int:
        """How many instances have a label."""
        return sum(instance.label == label for instance in self.instances)


# -- writing --------------------------------------------------------------------------------------------------------


def pack(
    out: str | Path,
    count: int = 60,
    seed: int = 0,
    *,
    dtype: torch.dtype | str = "float32",
    proof: Proof = "analysis",
    families: Sequence[str] = FAMILIES,
    progress: Callable[[str], None] | None = None,
) -> Pack:
    """Write a pack of `count` instances with proved labels to a folder, and read it back.

    Networks are of each of the `families` in turn: "formula", "mlp", "tokens" and "program". The same arguments give
    the same bytes. What an earlier run has finished is kept, so an interrupted one goes on; a folder that holds
    something else is refused. With `proof="kernel"` the bound of every network is proved twice.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = pack(folder, count=2)
    ...     made.count("sat"), made.count("unsat"), check(folder).instances == made.instances
    (1, 1, True)
    """
    count, seed = whole("count", count, 1, MOST), whole("seed", seed, 0, 2**63 - 1)
    if proof not in ("analysis", "kernel"):
        raise ArgumentError(f"proof must be 'analysis' or 'kernel', got {proof!r}")
    require("onnx", "onnx")
    kind = shipped(dtype)
    settings: dict[str, Any] = {"format": FORMAT, "count": count, "seed": seed, "dtype": dtype_name(kind)}
    settings |= {"proof": proof} | ({} if tuple(families) == FAMILIES else {"families": _families(families)})
    root = _opened(Path(out), settings)
    kept = {instance.name: instance for instance in _labelled(root)}
    done: list[Instance] = []
    with stages(progress, "packing") as stage, one_thread():
        for index, first in enumerate(range(0, count, PER)):
            numbers = range(first, min(first + PER, count))
            names = [_name(index, n - first, settings) for n in numbers]
            stage(f"network {index + 1}, instances {first + 1} to {numbers.stop} of {count}")
            old = [kept[name] for name in names if name in kept]
            if len(old) != len(names) or not all(_whole(root, instance) for instance in old):
                old = list(_made(root, index, numbers, seed, kind, proof, settings))
                later = [i for name, i in kept.items() if int(name.split("_")[1]) > index]
                _write_labels(root, [*done, *old, *later])
            done += old
    _write_labels(root, done)
    write_whole(root / LIST, "".join(f"onnx/{i.network}.onnx,vnnlib/{i.name}.vnnlib,{SECONDS}\n" for i in done))
    write_whole(root / ABOUT, _about(settings, done))
    return read(root)


def _opened(root: Path, settings: dict[str, Any]) -> Path:
    """The folder, ready to be written: new, empty, or of a run with the same settings."""
    try:
        if root.exists() and (not root.is_dir() or any(root.iterdir())) and not (root / SETTINGS).is_file():
            raise ArgumentError(f"'{root}' holds something that is no pack; choose a folder that is new or empty")
        if (root / SETTINGS).is_file():
            found = _settings(root)
            if found != settings:
                told = ", ".join(f"{key} {found[key]}" for key in settings if found.get(key) != settings[key])
                raise ArgumentError(f"'{root}' holds a pack with {told}: give the same again to go on with it, "
                                    "or choose another folder")  # fmt: skip
        root.mkdir(parents=True, exist_ok=True)
        # First: what a full disk stops here goes on later.
        write_whole(root / SETTINGS, json.dumps(settings, sort_keys=True) + "\n")
        for folder in FOLDERS:
            (root / folder).mkdir(exist_ok=True)
    except MISTAKES as error:
        raise ArgumentError(
            f"cannot write a pack to '{root}': {error.strerror or error}; choose a folder that can be written"
        ) from error
    return root


def _families(given: Sequence[str]) -> list[str]:
    found = [given] if isinstance(given, str) else list(given)
    wrong = next((family for family in found if family not in EVERY), None)
    if wrong is not None or not found or len(set(found)) < len(found):
        raise ArgumentError(f"families are some of {', '.join(EVERY)}, each once, got {wrong or found!r}")
    return found


def _family(index: int, settings: dict[str, Any]) -> str:
    families: Sequence[str] = settings.get("families", FAMILIES)
    return families[index % len(families)]


def _name(index: int, number: int, settings: dict[str, Any]) -> str:
    return f"{_family(index, settings)}_{index:04d}_{number}"


def _made(
    root: Path, index: int, numbers: range, seed: int, dtype: torch.dtype, proof: Proof, settings: dict[str, Any]
) -> Iterator[Instance]:
    """A network and its problems, written."""
    rng = np.random.default_rng([seed, index])
    target, net = _compiled(_family(index, settings), rng, dtype, proof)
    widest = programs.largest(net) if isinstance(net, CompiledProgram) else 0.0
    found = programs.model(net, widest) if isinstance(net, CompiledProgram) else model(net)
    graph = of_model(found)
    data, name = found.SerializeToString(deterministic=True), _name(index, 0, settings).rpartition("_")[0]
    write_whole(root / "onnx" / f"{name}.onnx", data)
    saved = root / "networks" / f"{name}.safetensors"
    net.save(saved, force=True)
    for n in numbers:
        made = (
            programs.problem(net, graph, rng, n, widest) if isinstance(net, CompiledProgram) else
            problem(net, graph, rng, n)
        )  # fmt: skip
        yield _written(root, _name(index, n - numbers.start, settings), target, net, graph, made)


def _compiled(
    family: str, rng: np.random.Generator, dtype: torch.dtype, proof: Proof
) -> tuple[PackTarget, CompiledNetwork | CompiledProgram]:
    """A target of a family and its network: the first draw that compiles and is worth asking about."""
    for _ in range(DRAWS):
        target = sampled(family, rng)
        try:
            box: Any = target.box
            net: Any = compile(target.target, box, eps=target.eps, dtype=dtype, proof=proof)
        except AttnforgeError:  # beyond the dtype, or a function that heads cannot make: the next draw
            continue
        if (programs.worthy if isinstance(net, CompiledProgram) else worthy)(net, rng):
            return target, net
    raise PrecisionError(f"no target of the family '{family}' could be compiled; choose another seed")


def _written(
    root: Path,
    name: str,
    target: PackTarget,
    net: CompiledNetwork | CompiledProgram,
    graph: StoredGraph,
    made: LabelledProperty,
) -> Instance:
    """The files of a problem, and its line."""
    bound, dtype = net.certificate.bound, dtype_name(net.dtype)
    assert bound is not None
    head = f"; {name}: {target.text[:200]}\n; is there an input of this box for which the outputs are as asserted?\n"
    write_whole(root / "vnnlib" / f"{name}.vnnlib", head + made.claim.text() + "\n")
    write_whole(root / "vnnlib2" / f"{name}.vnnlib", made.claim.text2(dtype) + "\n")
    instance = Instance(
        name, target.family, target.text, dtype, graph.inputs, graph.outputs, made.kind, made.size, made.label, bound,
        made.margin, _multiple(made.margin, bound), made.gap, made.cells,
        None if made.witness is None else list(made.witness),
        None if made.outputs is None else [list(pair) for pair in made.outputs], {},
    )  # fmt: skip
    instance.sha256.update({folder: file_hash(path) for folder, path in instance.places(root).items()})
    return instance


def _multiple(margin: float, bound: float) -> float:
    """A margin in bounds; as it is, where the certificate is exact."""
    return margin / bound if bound else margin


def _write_labels(root: Path, instances: list[Instance]) -> None:
    write_whole(root / LABELS, "".join(instance.line() + "\n" for instance in instances))


def _whole(root: Path, instance: Instance) -> bool:
    """Whether the files of an instance are as they were written."""
    places = instance.places(root)
    return all(path.is_file() and file_hash(path) == instance.sha256.get(folder) for folder, path in places.items())


# -- reading --------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> Pack:
    """A pack, its files compared with their hashes; `CertificateError` where something is missing or has changed."""
    root = Path(folder)
    if not (root / SETTINGS).is_file():
        raise ArgumentError(f"there is no pack in '{root}': expected a folder that `attnforge verify-pack` wrote")
    settings, instances = _settings(root), tuple(_labelled(root))
    if len(instances) != settings.get("count"):
        raise CertificateError(
            f"'{root}' holds {len(instances)} of {settings.get('count')} instances: run the command that began it again"
        )
    for i, instance in enumerate(instances):
        if instance.name != (name := _name(i // PER, i % PER, settings)):
            raise CertificateError(f"instance {i} of '{root}' is named {instance.name!r}; expected {name!r}")
        if not _whole(root, instance):
            raise CertificateError(f"a file of {instance.name} is missing, or is not the one that was labelled")
    listed = [line.split(",")[:2] for line in _text(root / LIST).splitlines()]
    if listed != [[f"onnx/{i.network}.onnx", f"vnnlib/{i.name}.vnnlib"] for i in instances]:
        raise CertificateError(f"{LIST} does not list the instances of {LABELS}")
    return Pack(root, settings, instances)


def _settings(root: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(root / SETTINGS))
    except ValueError as error:
        raise CertificateError(f"{root / SETTINGS} is not one of a pack: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CertificateError(f"{root / SETTINGS} is not one of a pack of format {FORMAT}")
    if "families" in found:
        try:
            _families(found["families"])
        except (ArgumentError, TypeError) as error:
            raise CertificateError(f"{root / SETTINGS} is not one of a pack: {error}") from error
    return found


def _labelled(root: Path) -> Iterator[Instance]:
    """The instances of a file of labels, each of the right form."""
    if not (root / LABELS).is_file():
        return
    for number, line in enumerate(_text(root / LABELS).splitlines(), 1):
        try:
            yield _instance(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CertificateError(
                f"line {number} of {root / LABELS} is no label: {error}; without the line, the command that wrote the "
                "pack makes it again"
            ) from error


def _instance(given: Any) -> Instance:
    if not isinstance(given, dict) or set(given) != {field.name for field in fields(Instance)}:
        raise ValueError("its entries are not those of an instance")
    found = Instance(**given)
    numbers = [found.size, found.bound, found.margin, found.multiple, *(found.witness or [])]
    if NAME.fullmatch(found.name) is None or found.label not in ("sat", "unsat"):
        raise ValueError(f"{found.name!r} with the label {found.label!r}")
    least = 0.0 if found.name.startswith("program_") else math.ulp(0.0)
    for pair in found.enclosed or []:
        first, last = pair
        numbers += [first, last]
    if not all(map(is_number, numbers)) or not found.bound >= least or not isinstance(found.sha256, dict):
        raise ValueError("its numbers are not finite, or its bound is not above 0")
    return found


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CertificateError(f"{path} has more than {MOST_BYTES:,} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


# -- checking -------------------------------------------------------------------------------------------------------


def check(folder: str | Path, progress: Callable[[str], None] | None = None) -> Pack:
    """Prove every label of a pack again, from its files; `CertificateError` names the first that does not hold.

    Each network is certified anew and its graph compared with the one that these weights give; each unsat property is
    refuted again, each witness is looked at again, in the numbers of the graph's own file.
    """
    found = read(folder)
    require("onnx", "onnx")
    with stages(progress, "checking") as stage, one_thread():
        for i, instance in enumerate(found.instances):
            if i % PER == 0:
                stage(f"{instance.network}, {i} of {len(found)} instances")
                net, graph, widest = _network(instance.places(found.root), instance)
            if (instance.bound, instance.dtype) != (net.certificate.bound, dtype_name(net.dtype)):
                raise CertificateError(f"{instance.name}: the label and the certificate state different bounds")
            _check_label(instance, found.property(instance), net, graph, widest)
            second = found.property(instance).text2(instance.dtype) + "\n"
            if _text(instance.places(found.root)["vnnlib2"]) != second:
                raise CertificateError(f"{instance.name}: its properties in VNN-LIB 1.0 and 2.0 are not the same")
    return found


def _network(
    places: dict[str, Path], instance: Instance
) -> tuple[CompiledNetwork | CompiledProgram, StoredGraph, float]:
    """A network, certified anew, its graph, which is the one that its weights give, and the radius that this is for."""
    net = files.load(places["networks"])
    wanted = CompiledProgram if instance.name.startswith("program_") else CompiledNetwork
    if not isinstance(net, wanted):
        raise CertificateError(f"{instance.network}: expected a compiled network, got {type(net).__name__}")
    (files.check if net.certificate.proof == "kernel" else certified.check)(places["networks"])
    graph = read_graph(places["onnx"])
    widest = programs.largest(net) if isinstance(net, CompiledProgram) else 0.0
    meant = programs.model(net, widest) if isinstance(net, CompiledProgram) else model(net)
    if not graph.same(of_model(meant)):
        raise CertificateError(f"{instance.network}: the graph is not that of the certified network")
    return net, graph, widest


def _check_label(
    instance: Instance, claim: Property, net: CompiledNetwork | CompiledProgram, graph: StoredGraph, widest: float
) -> None:
    """That the label follows, with the margin that is stated."""
    low, high = [-math.inf] * graph.inputs, [math.inf] * graph.inputs
    if isinstance(net, CompiledNetwork):
        low, high = (end.numpy().reshape(-1).tolist() for end in (net.box.lower, net.box.upper))
    if (instance.inputs, instance.outputs) != (graph.inputs, graph.outputs):
        raise CertificateError(f"{instance.name}: the graph has {graph.inputs} inputs and {graph.outputs} outputs")
    if len(claim.low) != len(low) or claim.outputs != graph.outputs:
        raise CertificateError(f"{instance.name}: the property is not one of this network's inputs and outputs")
    if not all(a <= b for ends in ((low, claim.low), (claim.high, high)) for a, b in zip(*ends, strict=True)):
        raise CertificateError(f"{instance.name}: the box of the property reaches beyond that of the certificate")
    if not instance.margin > 0 or instance.multiple != _multiple(instance.margin, instance.bound):
        raise CertificateError(f"{instance.name}: a label needs a margin above 0, in bounds as it is")
    if instance.label == "unsat" and isinstance(net, CompiledProgram):
        proved = programs.refuted(net, claim, widest)
    elif instance.label == "unsat":
        assert isinstance(net, CompiledNetwork)
        proved = refuted(net.program, instance.bound, claim, instance.margin).margin
    else:
        point = instance.witness
        if point is None or len(point) != len(low):
            raise CertificateError(f"{instance.name}: a sat label needs a witness of {len(low)} numbers")
        if not all(a <= x <= b for a, x, b in zip(claim.low, point, claim.high, strict=True)):
            raise CertificateError(f"{instance.name}: the witness lies outside of the box")
        if torch.tensor(point, dtype=torch.float64).to(net.dtype).double().tolist() != point:
            raise CertificateError(f"{instance.name}: the witness is not made of numbers of {instance.dtype}")
        shown = witnessed(graph, claim, point)
        proved = shown.margin
        stated = instance.enclosed
        if stated is None or len(stated) != len(shown.outputs) or any(
            not (a <= low and high <= b) for (a, b), (low, high) in zip(stated, shown.outputs, strict=True)
        ):
            raise CertificateError(f"{instance.name}: the outputs at the witness are not enclosed by what is stated")
    if not proved >= instance.margin:
        raise CertificateError(
            f"{instance.name}: {instance.label} with the margin {instance.margin:.6g} does not follow; "
            f"what is proved is {proved:.6g}"
        )


def _about(settings: dict[str, Any], instances: list[Instance]) -> str:
    """The page of a pack."""
    rows = [
        f"| {family} | {len({i.network for i in mine})} | {sum(i.label == 'sat' for i in mine)} | "
        f"{sum(i.label == 'unsat' for i in mine)} | "
        f"{min(i.multiple for i in mine):.3g} to {max(i.multiple for i in mine):.3g} |"
        for family in EVERY if (mine := [i for i in instances if i.family == family])
    ]  # fmt: skip
    command = f"attnforge verify-pack --out DIR --count {settings['count']} --seed {settings['seed']}"
    command += f" --dtype {settings['dtype']}" + (" --proof kernel" if settings["proof"] == "kernel" else "")
    command += f" --families {','.join(settings['families'])}" if "families" in settings else ""
    return _PAGE.format(command=command, rows="\n".join(rows), seconds=SECONDS, **settings)


_PAGE = """# Attention networks with properties whose labels are proved

{count} instances, {dtype}. Every network is softmax attention and affine maps; every graph is made of MatMul, Add,
Softmax, Transpose and Reshape (ONNX opset 13, one row in, one row out).

| family | networks | sat | unsat | margins, in bounds |
| --- | --- | --- | --- | --- |
{rows}

- `instances.csv`: graph, property and {seconds} seconds, as VNN-COMP's scripts read them.
- `vnnlib/` in VNN-LIB 1.0, `vnnlib2/` the same in 2.0. A property is *sat* if some input of its box makes the
  assertions about the outputs true.
- `labels.jsonl`: the label of each instance with its margin. *unsat* is proved from an enclosure of the function that
  the network was made from, and the certificate of how far the two can differ, or, for a token program, from its proof
  with inputs that are off by a radius; *sat* by a witness, evaluated in ball
  arithmetic with the numbers of the graph.
- `networks/`: the same networks with function and certificate, for `attnforge check`.

Labels hold for real numbers and for {dtype} rounded to nearest, sums in any order, exponentials within 3 units of
roundoff, a softmax that subtracts the largest logit, no TF32. All numbers in properties are exact.

A verifier that contradicts a label has a fault, or we have one: `attnforge verify-pack --check DIR` proves every label
again. Made by `{command}`; the same command gives the same bytes.
"""
