"""`attnforge check`: a saved network's certificate, or those of a converted model, computed again from the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .. import files
from ..conversion.storage import is_converted
from ..errors import ArgumentError
from .common import say, waiting


def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge, or a converted folder.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Recompute a saved certificate, trusting nothing in the file; exit code 1 if it does not hold.

    Of a converted model, those of all its sites.
    """
    if file.is_dir() and is_converted(file):
        with waiting(f"checking {file.name}"):
            conversion = files.check(file)
        if as_json:
            say(json.dumps({"holds": True, "conversion": conversion.to_json()}, allow_nan=False))
            return
        say(f"{conversion}\n\n{file.name}: the certificates of {len(conversion.sites)} sites hold")
        return
    if not file.is_file():
        raise ArgumentError(f"there is no file '{file}'")
    with waiting(f"checking {file.name}"):
        certificate = files.check(file)
    if as_json:
        say(json.dumps({"holds": True, "certificate": certificate.to_json()}, allow_nan=False))
        return
    say(f"{certificate}\n\n{file.name}: the certificate holds")
