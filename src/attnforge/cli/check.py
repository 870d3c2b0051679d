"""`attnforge check`: a saved network's certificate, computed again from the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .. import files
from ..errors import ArgumentError
from .common import say, waiting


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Recompute a saved certificate, trusting nothing in the file; exit code 1 if it does not hold."""
    if not file.is_file():
        raise ArgumentError(f"there is no file '{file}'")
    with waiting(f"checking {file.name}"):
        certificate = files.check(file)
    if as_json:
        say(json.dumps({"holds": True, "certificate": certificate.to_json()}, allow_nan=False))
        return
    say(f"{certificate}\n\n{file.name}: the certificate holds")
