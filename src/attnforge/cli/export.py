"""`attnforge export`: a saved network as a stock transformer, or as a file or folder that other tools read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError, UnsupportedOperation, closest
from ..extras import require
from .common import AsJson, Force, Saved, existing, refuse_overwriting, say, say_json

if TYPE_CHECKING:
    from ..certificates.certified import CertifiedModule
    from ..export import Artefact

#: What each target is written to, and the package and extra that it needs.
TARGETS = {"plain": ".safetensors", "lens": ".safetensors", "onnx": ".onnx", "hf": "a folder"}
NEEDS = {"lens": (("transformer_lens", "lens"),), "hf": (("transformers", "convert"),),
         "onnx": (("onnx", "onnx"), ("onnxruntime", "onnx"))}  # fmt: skip
HELP = "plain (a stock transformer, .safetensors), lens (TransformerLens, .safetensors), onnx, or hf (a folder)."


def export(
    file: Saved,
    to: Annotated[str, typer.Option("--to", metavar="|".join(TARGETS), help=HELP)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="The file or folder to write.")],
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Load it in a fresh process and compare it with the network.")
    ] = True,
    manifest: Annotated[
        bool, typer.Option("--manifest/--no-manifest", help="Say in a manifest beside it what every head is for.")
    ] = True,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Write a saved network in a form that other tools run, and compare what was written with the network.

    `plain` is a stock attention-only transformer; `attnforge run` and af.load read its file. `lens` is the same as a
    TransformerLens model (attnforge.export.load_lens), `hf` as a Hugging Face folder with a model card; `onnx` runs in
    ONNX Runtime. Exit code 1 if what was written does something else than the network. A manifest of what every head is
    for is written to manifest.json in the folder, or beside the file; attnforge manifest --check reads it.

    \b
    attnforge export net.safetensors --to onnx -o net.onnx
    """
    from .. import files
    from ..certificates.certified import CertifiedModule
    from ..export.writing import steps
    from ..groundtruth.artefacts import beside, place_beside
    from ..saving import free_folder

    if to not in TARGETS:
        raise ArgumentError(f"--to '{to}' is unknown{closest(to, TARGETS)}; known are {', '.join(TARGETS)}")
    existing(file)
    if to == "hf":
        free_folder(output, force)
    else:
        refuse_overwriting({TARGETS[to]: output}, force)
    if manifest and to != "hf":
        refuse_overwriting({".json": place_beside(output)}, force)
    for module, extra in NEEDS.get(to, ()):  # found out now, not after the work
        require(module, extra)
    net = files.network(file)
    if not isinstance(net, CertifiedModule):
        raise ArgumentError(f"'{file}' is a {type(net).__name__}, which has no exported form; expected a network")
    start = time.perf_counter()
    with steps():
        written = _written(net, to, output, verify)
    seconds = time.perf_counter() - start
    said, reason = None, ""
    if manifest:
        try:
            said = beside(written, net, force=True)
        except UnsupportedOperation as error:  # heads alone and tables: what they do is what they are called
            reason = str(error)
    if as_json:
        say_json({**_description(net, written, seconds), "manifest": None if said is None else str(said)})
        return
    say(f"wrote {output} in {seconds:.1f} s: {_size(output):,} bytes")
    if written.verification is not None:
        say(str(written.verification))
    if manifest:
        say(f"wrote {said}: what every head is for" if said is not None else reason)


def _written(net: CertifiedModule, to: str, output: Path, verify: bool) -> Artefact:
    from ..export import Artefact, PlainTransformer, to_hf, to_lens, to_onnx, to_plain

    if to == "onnx":
        return to_onnx(net, output, verify=verify, force=True)
    if to == "hf":
        return to_hf(net, output, verify=verify, force=True)
    if to == "lens":
        lens = to_lens(net, verify=False)
        lens.save(output, force=True)
    else:
        plain = net if isinstance(net, PlainTransformer) else to_plain(net)
        plain.save(output, force=True)
    return Artefact(to, output).verified(net, verify)


def _size(path: Path) -> int:
    parts = [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]
    return sum(part.stat().st_size for part in parts)


def _description(net: CertifiedModule, written: Artefact, seconds: float) -> dict[str, Any]:
    """What --json prints."""
    from ..certificates.certificate import upper_text

    found = written.verification
    return {
        "kind": written.kind,
        "path": str(written.path),
        "bytes": _size(written.path),
        "seconds": seconds,
        "target": net.certificate.target,
        "bound": net.certificate.bound,
        "shown": upper_text(net.certificate.bound),
        "verification": None if found is None else {
            "largest": found.largest, "allowed": found.bound, "points": found.points, "at": list(found.at),
            "passed": found.passed,
        },
    }  # fmt: skip
