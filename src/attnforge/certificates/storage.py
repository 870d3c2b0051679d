"""One safetensors file per network: weights, description, certificate; nothing that could run code.

The file's metadata holds one entry, `attnforge`: JSON with

    format       1
    family       which class rebuilds the network ("anchor", "gate", ...)
    config       its description (function, interval, ...)
    certificate  as `Certificate.to_json` writes it
    digest       SHA-256 over the weights' hash and the other entries, so that a changed header is noticed
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from ..errors import ArgumentError, AttnforgeError, CertificateError
from .certificate import Certificate, weights_hash
from .certified import CertifiedModule

FORMAT = 1
MAX_HEADER = 16 << 20  # bytes of JSON that we are willing to read


def save(module: CertifiedModule, path: str | Path) -> None:
    """Write a network with its certificate; the same network gives the same bytes."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ArgumentError(f"cannot write {target}: the folder {target.parent} does not exist")
    header: dict[str, Any] = {
        "format": FORMAT,
        "family": module.family,
        "config": module.config(),
        "certificate": module.certificate.to_json(),
    }
    header["digest"] = _digest(header, weights_hash(module))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    target.write_bytes(to_bytes(tensors, metadata={"attnforge": _canonical(header)}))


def load(path: str | Path) -> CertifiedModule:
    """Read a network back; raises `CertificateError` when the file is unreadable, truncated or tampered with."""
    source = Path(path)
    if not source.is_file():
        raise CertificateError(f"there is no file {source}")
    header, tensors = _read(source)
    try:
        family = CertifiedModule.families[str(header["family"])]
        module = family.rebuild(header["config"], tensors)
        expected, given = set(module.state_dict()), set(tensors)
        if expected != given:
            raise CertificateError(f"{source.name}: missing or unknown tensors {sorted(expected ^ given)}")
        module.load_state_dict(tensors, strict=True)
        certificate = Certificate.from_json(header["certificate"])
    except CertificateError:
        raise
    except (AttnforgeError, KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise CertificateError(f"{source.name} does not describe a network of this version: {error}") from error
    found = weights_hash(module)
    if found != certificate.weights:
        raise CertificateError(
            f"{source.name}: the weights do not have the hash that the certificate states "
            f"({found[:12]} instead of {certificate.weights[:12]}): the file was changed after it was certified"
        )
    if header.get("digest") != _digest({k: v for k, v in header.items() if k != "digest"}, found):
        raise CertificateError(
            f"{source.name}: the header does not have the digest it states: it was changed after saving"
        )
    module.attach(certificate)
    return module.eval()


def check(path: str | Path) -> Certificate:
    """Recompute a file's certificate from its weights and description; raises `CertificateError` if it does not
    hold."""
    module = load(path)
    stated = module.certificate
    try:
        found = module.recertify()
    except CertificateError:
        raise
    except AttnforgeError as error:
        raise CertificateError(f"{Path(path).name}: no certificate can be computed for this file: {error}") from error
    if any(getattr(stated, field) != getattr(found, field) for field in ("kind", "target", "box", "dtype", "relative")):
        raise CertificateError(f"{Path(path).name}: the stated certificate speaks of another target, box, dtype, unit")
    if found.bound is not None and (stated.bound is None or found.bound > stated.bound):
        raise CertificateError(
            f"{Path(path).name}: the file states the bound {stated.bound}, but only {found.bound:.6e} can be proved"
        )
    return module.attach(found)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CertificateError(f"{path.name} is not a readable safetensors file: {error}") from error
    text = metadata.get("attnforge", "")
    if not text or len(text) > MAX_HEADER:
        raise CertificateError(f"{path.name} was not written by attnforge: it has no usable header")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{path.name}: the header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CertificateError(f"{path.name}: expected format {FORMAT}; upgrade attnforge, or write the file again")
    if str(header.get("family")) not in CertifiedModule.families:
        raise CertificateError(f"{path.name}: unknown kind of network {header.get('family')!r}")
    return header, tensors


def _canonical(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(header: dict[str, Any], weights: str) -> str:
    return hashlib.sha256((weights + _canonical(header)).encode()).hexdigest()
