"""`build`: writes a catalogue, a folder for each model, on the cores of this machine or on a cluster; and its index.

OUT/models/ID has the model, its manifest, certificate, counterfactual pairs, samples and a page; of held-out models it
has weights without words, samples and a page, and the rest lies in OUT/answers/ID. A model's folder is filled beside
its place and counts as finished once its `entry.json` is there, which comes last: what was interrupted is made again,
what is finished is kept. Equal seeds give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..arguments import whole
from ..certificates.certificate import Certificate
from ..certificates.certified import CertifiedModule
from ..dtypes import dtype_name
from ..errors import ArgumentError, AttnforgeError
from ..export.plain.spec import PlainHead
from ..export.plain.transformer import PlainTransformer
from ..groundtruth.counterfactual import pairs
from ..groundtruth.evidence import manifest
from ..groundtruth.manifest import Manifest
from ..groundtruth.variants.variant import Variant
from ..lab.engine import parallel
from ..lab.machine import reproducible
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.data import value_json
from ..saving import MISTAKES, whole_folder, write_whole
from .page import index_page, model_page
from .recipes import Recipe, described, model, recipes

MARKER, ENTRY, INDEX = "catalogue.json", "entry.json", "index.jsonl"
VERSION = 2  # of the folder and of what is in it; another one is refused
COUNT = 210  # models of a catalogue: 70 networks, each plain and in two harder variants
MOST = 3000  # models of one catalogue: ids have four digits, and a page that lists more is no help
SAMPLES = 16  # inputs with outputs for each model
PAIRS = 4  # counterfactual pairs for each intermediate variable


@dataclass(frozen=True)
class Built:
    """What a run did: models made now, models that were there, and what went wrong, by id."""

    folder: Path
    made: int
    kept: int
    failures: tuple[tuple[str, str], ...]


def build(
    out: str | Path,
    *,
    count: int = COUNT,
    seed: int = 0,
    jobs: int | None = None,
    backend: str = "processes",
    scheduler: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Built:
    """Write the first `count` models of the catalogue of a seed; what a folder has already is kept.

    `jobs` models are made at once, by default one for each core; `backend` and `scheduler` are those of
    `attnforge.lab.run`. `progress` is told how many are finished, of how many, and which one was the last.
    """
    count, seed = whole("count", count, 1, MOST), whole("seed", seed, 0)
    if jobs is not None:
        whole("jobs", jobs, 1)
    folder = _opened(Path(out), seed)
    wanted = recipes(count, seed)
    todo = [recipe for recipe in wanted if not _finished(folder, recipe)]
    failures: list[tuple[str, str]] = []
    tell = progress or (lambda done, total, last: None)
    tell(0, len(todo), "")
    with ExitStack() as stack:
        if todo:
            calls = [(make, (str(folder), recipe)) for recipe in todo]
            results = stack.enter_context(parallel(calls, jobs, backend, scheduler, 1))
            for done, (name, problem) in enumerate(results, 1):
                if problem:
                    failures.append((name, problem))
                tell(done, len(todo), name)
    write_index(folder, wanted)
    return Built(folder, len(todo) - len(failures), len(wanted) - len(todo), tuple(sorted(failures)))


def _opened(folder: Path, seed: int) -> Path:
    """A folder to write: new, empty, or a catalogue of the same seed. Anything else is left alone."""
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"cannot write a catalogue to '{folder}': it is a file; name a folder")
    try:
        if folder.is_dir() and any(folder.iterdir()):
            found = _marked(folder)
            if found != {"version": VERSION, "seed": seed}:
                raise ArgumentError(
                    f"'{folder}' holds a catalogue of version {found.get('version')} and seed {found.get('seed')}, not "
                    f"of version {VERSION} and seed {seed}: name another folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        # First: what a full disk stops here goes on later.
        write_whole(folder / MARKER, json.dumps({"version": VERSION, "seed": seed}) + "\n")
        for part in ("models", "answers"):
            (folder / part).mkdir(parents=True, exist_ok=True)
            for left in (folder / part).glob(".m[0-9]*.part"):  # of a run that was killed
                shutil.rmtree(left)
    except MISTAKES as error:
        raise ArgumentError(
            f"cannot write a catalogue to '{folder}': {error.strerror or error}; name a folder that can be written"
        ) from error
    return folder


def _marked(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ArgumentError(
            f"'{folder}' holds files that are no catalogue, and is left as it is: name a new or empty folder"
        )
    return found


def _finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a model is there, and its answers where they lie apart: whole, and as their hashes say."""
    parts = ("models", "answers") if recipe.held_out else ("models",)
    return all(_entry(folder / part / recipe.id) is not None for part in parts)


def _entry(folder: Path) -> dict[str, Any] | None:
    """What is said of a model; None unless all its files are there, as they were written."""
    try:
        entry = json.loads((folder / ENTRY).read_text("utf-8"))
        there = {name: _sums((folder / name).read_bytes()) for name in entry["files"]}
        return entry if there == entry["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sums(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# ---- one model


def make(folder: str, recipe: Recipe) -> tuple[str, str]:
    """Make one model, in the process that it was sent to; its id, and what went wrong, or nothing."""
    try:
        with reproducible(recipe.seed, 1):
            _made(Path(folder), recipe)
    except (AttnforgeError, OSError) as error:
        return recipe.id, str(error)
    return recipe.id, ""


def _made(folder: Path, recipe: Recipe) -> None:
    built, net, text = model(recipe)
    truth = manifest(built, seed=recipe.seed)
    kinds = list(built.kinds) if isinstance(built, Variant) else []
    certificate = built.certificate
    public = {**described(recipe), "dtype": dtype_name(built.dtype), "layers": len(built.blocks),
              "heads": sum(map(len, built.heads)), "registers": built.registers, "tokens": built.tokens,
              "channels": built.spec.stream}  # fmt: skip
    about = {**public, "target": text, "kinds": kinds, "certificate": certificate.kind, "bound": certificate.bound,
             "relevant_heads": sum(bool(h.moves) for h in truth.heads),
             "relevant_edges": sum(bool(e.moves) for e in truth.edges)}  # fmt: skip
    samples = _json(_samples(net))
    files = {
        "network.safetensors": built.written(),
        "manifest.json": _json(truth.to_json()),
        "certificate.json": _json(certificate.to_json()),
        "pairs.json": _json(pairs(built, PAIRS, recipe.seed).to_json()),
        "samples.json": samples,
        "index.html": model_page(about, truth, str(certificate)).html().encode(),
    }
    if not recipe.held_out:
        _written(folder / "models" / recipe.id, about, files)
        return
    _written(folder / "answers" / recipe.id, about, files)
    shown = {"weights.safetensors": blind(built).written(), "samples.json": samples,
             "index.html": model_page(public, None, "").html().encode()}  # fmt: skip
    _written(folder / "models" / recipe.id, public, shown)


def _written(folder: Path, about: dict[str, Any], files: dict[str, bytes]) -> None:
    sums = {name: _sums(data) for name, data in files.items()}
    with whole_folder(folder, ENTRY) as staged:
        for name, data in files.items():
            (staged / name).write_bytes(data)
        (staged / ENTRY).write_bytes(_json({**about, "files": sums}))


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


@torch.no_grad()
def _samples(net: CertifiedModule) -> dict[str, Any]:
    """Inputs, and what the network gives for them."""
    if isinstance(net, CompiledProgram):
        given = [list(row) for row in net.domain.sample(SAMPLES)]
        found = net.run([tuple(row) for row in given])
        cells = [[value_json(v) if not isinstance(v, float) else v for v in row] for row in found]
        return {"inputs": [[value_json(v) for v in row] for row in given], "outputs": cells}
    points = net.box.sample(SAMPLES, dtype=net.dtype)
    inputs = tuple(points.unbind(-1)) if net.box.names and not net.stacked else (points,)
    return {"inputs": points.double().tolist(), "outputs": net(*inputs).double().tolist()}


@torch.no_grad()
def blind(built: PlainTransformer) -> PlainTransformer:
    """The same weights, with every word about them taken away; what is stated is that they give what they gave."""
    spec = built.spec
    empty = replace(
        spec, heads=tuple(tuple(PlainHead() for _ in row) for row in spec.heads),
        channels=tuple(f"direction {i}" for i in range(spec.stream)),
    )  # fmt: skip
    found = PlainTransformer(empty, built.dtype)
    found.load_state_dict(built.state_dict())
    given = built.example_input()
    measured = float((found.eval().core(*given) - built.core(*given)).abs().max())
    found.attach(Certificate("calibrated", None, dtype_name(built.dtype), "held out", built.box, measured=measured))
    return found


# ---- the index


def write_index(folder: Path, wanted: Sequence[Recipe]) -> None:
    """The lists of what is there, and the page to browse them; answers have a list of their own."""
    for part, page in (("models", True), ("answers", False)):
        rows = [entry for recipe in wanted if (entry := _entry(folder / part / recipe.id)) is not None]
        lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        write_whole(folder / INDEX if page else folder / part / INDEX, lines)
        if page:
            write_whole(folder / "index.html", index_page(rows).html())


def read_index(folder: str | Path) -> list[dict[str, Any]]:
    """What the index of a catalogue lists; `ArgumentError` where there is none."""
    _marked(Path(folder))
    if not (Path(folder) / INDEX).is_file():
        raise ArgumentError(f"the catalogue at '{folder}' has no index yet: its run was stopped; run the command again")
    return [json.loads(line) for line in (Path(folder) / INDEX).read_text("utf-8").splitlines()]


def truth_of(folder: str | Path, id: str) -> Manifest:
    """The manifest of a model of a catalogue, wherever it lies."""
    for part in ("models", "answers"):
        path = Path(folder) / part / id / "manifest.json"
        if path.is_file():
            return Manifest.load(path)
    raise ArgumentError(f"the catalogue at '{folder}' has no model '{id}' with a manifest")
