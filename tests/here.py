"""`verify` without its fresh process, where another test shows that one: to load what artefacts need takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from attnforge.export import fresh, verification


def verified_here(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """What `verify` compares of these kinds is loaded from its file by this process."""
    elsewhere = verification._process

    @contextmanager
    def process(kind: str, path: Path) -> Iterator[Any]:
        if kind not in kinds:
            with elsewhere(kind, path) as other:
                yield other
            return
        run, most = fresh.opened(kind, str(path))
        yield verification._Other(lambda *x: torch.from_numpy(run(*(t.numpy() for t in x))), most)

    monkeypatch.setattr(verification, "_process", process)
