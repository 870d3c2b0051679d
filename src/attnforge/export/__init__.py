"""Out of attnforge: networks as stock attention-only transformers, and as files that other tools read."""

from __future__ import annotations

from .hf.folder import load_hf, to_hf
from .lens import Lens, load_lens, to_lens
from .onnx import run_onnx, session, to_onnx
from .plain.build import to_plain
from .plain.spec import PlainHead, PlainSize, PlainSpec
from .plain.transformer import PlainTransformer, load_plain
from .verification import Artefact, Verification, verify

__all__ = [
    "Artefact",
    "Lens",
    "PlainHead",
    "PlainSize",
    "PlainSpec",
    "PlainTransformer",
    "Verification",
    "load_hf",
    "load_lens",
    "load_plain",
    "run_onnx",
    "session",
    "to_hf",
    "to_lens",
    "to_onnx",
    "to_plain",
    "verify",
]
