"""Manifests of files: what an export wrote gets one beside it, tied to the file by its hash."""

from __future__ import annotations

from pathlib import Path

from ..certificates.certified import CertifiedModule, load
from ..errors import ArgumentError, CertificateError
from ..export.hf.folder import load_hf
from ..export.lens import Lens, load_lens
from ..export.verification import Artefact, is_lens_file
from ..saving import file_hash
from .evidence import Checked, check, manifest
from .manifest import Manifest

WEIGHTS = "model.safetensors"  # what a Hugging Face folder holds its weights in


def opened(path: str | Path) -> CertifiedModule | Lens:
    """The network in a file that has one: a saved network, a plain transformer, a lens, a Hugging Face folder."""
    source = Path(path)
    if source.is_dir():
        model = load_hf(source)
        model.plain.attach(model.certificate)
        return model.plain
    if not source.is_file():
        raise ArgumentError(f"there is no file '{source}'")
    if source.suffix.lower() == ".onnx":
        raise ArgumentError(f"'{source.name}' holds a graph and no network of attnforge: give the network it is from")
    return load_lens(source) if is_lens_file(source) else load(source)


def digest(path: str | Path) -> str:
    """The SHA-256 of a file, or of the weights of a Hugging Face folder."""
    source = Path(path)
    return file_hash(source / WEIGHTS if source.is_dir() else source)


def place_beside(path: str | Path) -> Path:
    """Where the manifest of an export lies: in its folder, or beside its file under its name.

    >>> place_beside("net.onnx").name
    'net.onnx.manifest.json'
    """
    source = Path(path)
    return source / "manifest.json" if source.is_dir() else source.with_name(f"{source.name}.manifest.json")


def beside(artefact: Artefact, net: CertifiedModule, *, force: bool = False) -> Path:
    """Write the manifest of what an export wrote beside it, and say where.

    An ONNX file gets that of the network itself, whose modules its nodes are made from; the others speak of the weights
    in the file.
    """
    found = manifest(net if artefact.kind == "onnx" else opened(artefact.path))
    return found.beside(artefact.kind, digest(artefact.path)).save(place_beside(artefact.path), force=force)


def check_file(stated: Manifest, path: str | Path) -> Checked | None:
    """`check` for a file or folder; of an ONNX file no more than its hash can be checked: None."""
    source = Path(path)
    graph = source.suffix.lower() == ".onnx"
    if graph and stated.artefact is None:
        raise ArgumentError(f"this manifest is of no export: check it with the network that '{source.name}' is from")
    if stated.artefact is not None and (graph or stated.artefact[0] != "onnx"):
        kind, wanted = stated.artefact
        if not source.exists():
            raise ArgumentError(f"there is no file '{source}'")
        found = digest(source)
        if found != wanted:
            raise CertificateError(
                f"the manifest lies beside another {kind} file: '{source.name}' has the hash {found[:12]}, and it "
                f"states {wanted[:12]}; export again"
            )
    return None if graph else check(stated, opened(source))
