"""`attnforge manifest`: what every head of a saved network is for, written down or checked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError
from .common import AS_JSON, FORCE, refuse_overwriting, say, say_json, waiting, whole


def manifest(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A saved network, or an export: plain, lens, hf, onnx.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the manifest as .json.")
    ] = None,
    checked: Annotated[
        Path | None, typer.Option("--check", metavar="MANIFEST", help="Check a manifest against FILE instead.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", metavar="FILE", help="Write counterfactual pairs as .json, too.")
    ] = None,
    count: Annotated[int, typer.Option(parser=whole, metavar="COUNT", help="Pairs for each variable.")] = 4,
    seed: Annotated[int, typer.Option(parser=whole, metavar="SEED", help="Which inputs are tried.")] = 0,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of manifests.")] = False,
    as_json: Annotated[bool, AS_JSON] = False,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Say what every head of a network is for, which head reads which, and on which inputs that shows.

    With --check, find out whether a manifest is so: its hashes, its channels and edges, every input that it states, and
    that nothing else moves an output. Exit code 1 if not.

    \b
    attnforge manifest net.safetensors -o manifest.json
    attnforge manifest net.safetensors --check manifest.json
    """
    from .. import groundtruth
    from ..groundtruth.artefacts import check_file, opened
    from ..groundtruth.evidence import manifest as describe

    if schema:
        say_json(groundtruth.schema())
        return
    if file is None:
        raise ArgumentError("which network? give the file of one, such as attnforge manifest net.safetensors")
    if checked is not None:
        if output is not None or pairs is not None:
            raise ArgumentError("--check reads a manifest and writes nothing: leave out --output and --pairs")
        stated = groundtruth.Manifest.load(checked)
        with waiting(f"checking {checked.name}"):
            found = check_file(stated, file)
        if as_json:
            say_json({"holds": True, "checked": None if found is None else asdict(found)})
            return
        say(str(found) if found is not None else "the file is the one that the manifest was written for")
        say(f"{checked.name}: the manifest holds")
        return
    files = [path for path in (output, pairs) if path is not None]
    for path in files:
        refuse_overwriting({".json": path}, force)
    if len(set(files)) < len(files):
        raise ArgumentError(f"the manifest and the pairs would both be '{output}'; give two names")
    net = opened(file)
    with waiting("describing"):
        described = describe(net, seed=seed)
    if output is not None:
        described.save(output, force=force)
    if pairs is not None:
        with waiting("looking for pairs"):
            groundtruth.pairs(net, count, seed).save(pairs, force=force)
    if as_json:
        say_json(described.to_json())
        return
    say(str(described))
    for path in files:
        say(f"wrote {path}")
