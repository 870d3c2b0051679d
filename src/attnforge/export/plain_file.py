"""Plain transformers from files: weights, description and certificate in one safetensors file, as `save` writes it."""

from __future__ import annotations

from pathlib import Path

from ..certify.storage import load
from ..errors import CertificateError
from .plain import PlainTransformer


def load_plain(path: str | Path) -> PlainTransformer:
    """Read back what `plain.save(path)` wrote; `attnforge.load` reads it as well, among all other kinds of network."""
    found = load(path)
    if not isinstance(found, PlainTransformer):
        raise CertificateError(
            f"{Path(path).name} holds a network of the kind '{found.family}', not a plain transformer"
        )
    return found
