"""One safetensors file per network: weights, description, certificate; nothing that could run code.

The file's metadata holds one entry, `attnforge`: JSON with

    format       1, or 2 with a derivation; and everything of the form that `schema` states
    family       which class rebuilds the network ("anchor", "gate", ...)
    config       its description (function, interval, ...)
    certificate  as `Certificate.to_json` writes it
    derivation   the choices of the kernel's proof (docs/kernel.md), where one was made
    digest       SHA-256 over the weights' hash and the other entries, so that a changed header is noticed
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from ..errors import CertificateError
from ..saving import free_file, write_whole
from .schema import HEADER, limited, require

FORMAT = 1  # of a header without a derivation; a reader refuses every number but these two
DERIVED = 2  # and of one with it
MAX_HEADER = 16 << 20  # bytes of JSON that we are willing to read: the largest networks of the benchmarks need a tenth


def write(
    path: str | Path, header: dict[str, Any], weights: str, tensors: Mapping[str, torch.Tensor], force: bool = False
) -> None:
    """Write tensors under a header, to which format and digest are added; the same network gives the same bytes."""
    target = free_file(path, force=force)
    write_whole(target, written(header, weights, tensors))


def written(header: dict[str, Any], weights: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The bytes of a file."""
    full = {"format": DERIVED if "derivation" in header else FORMAT, **header}
    full["digest"] = digest(full, weights)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return to_bytes(kept, metadata={"attnforge": _canonical(full)})


def stated_family(path: str | Path) -> str:
    """The family that a file names; empty where it names none that can be read, which `read` says in words."""
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get("attnforge", "")
        family = json.loads(text)["family"] if 0 < len(text) <= MAX_HEADER else ""
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return family if isinstance(family, str) else ""


def read(path: str | Path, form: Any = HEADER) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The header and the tensors of a file; raises `CertificateError` when it is unreadable or not of this format."""
    source = Path(path)
    if not source.is_file():
        missing = f"'{source}' is a folder, not a file" if source.is_dir() else f"there is no file {source}"
        raise CertificateError(missing)
    try:
        with safe_open(str(source), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CertificateError(f"{source.name} is not a readable safetensors file: {error}") from error
    text = metadata.get("attnforge", "")
    if not text or len(text) > MAX_HEADER:
        raise CertificateError(f"{source.name} was not written by attnforge: it has no usable header")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{source.name}: the header is not JSON: {error}") from error
    wanted = DERIVED if isinstance(header, dict) and "derivation" in header else FORMAT
    if not isinstance(header, dict) or header.get("format") != wanted:
        raise CertificateError(f"{source.name}: expected format {wanted}; upgrade attnforge, or write the file again")
    limited(header, f"the header of {source.name}")
    require(header, form, f"the header of {source.name}")
    return header, tensors


def digest(header: dict[str, Any], weights: str) -> str:
    """The hash of a header, its own digest aside, and of the weights' hash."""
    rest = {key: value for key, value in header.items() if key != "digest"}
    return hashlib.sha256((weights + _canonical(rest)).encode()).hexdigest()


def _canonical(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
