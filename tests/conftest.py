"""What every test runs with."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

# On a small, busy machine a slow example says nothing about the code; a failure should come with what repeats it.
settings.register_profile("attnforge", deadline=None, print_blob=True)
settings.load_profile("attnforge")


# The files that take longest, half a minute and more each: begun first, so that no process is left with one of them
# while others have nothing to do. A file's tests run in one process (see the Makefile): what it makes is made once.
LONGEST = (
    "conversion/test_minilm.py", "heads/test_laws.py", "test_docs.py", "compiler/test_stored.py", "heads/test_fast.py",
    "export/test_plain_recertify.py", "cli/test_cli.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others in their order."""
    rank = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: looking through it for garbage again and again took a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
