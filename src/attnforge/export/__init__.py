"""Out of attnforge: networks as stock attention-only transformers, and as files that other tools read."""

from __future__ import annotations

from .plain import PlainTransformer
from .plain_build import to_plain
from .plain_spec import PlainHead, PlainSize, PlainSpec

__all__ = ["PlainHead", "PlainSize", "PlainSpec", "PlainTransformer", "to_plain"]
