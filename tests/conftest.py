"""What every test runs with."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

# On a small, busy machine a slow example says nothing about the code; a failure should come with what repeats it.
settings.register_profile("attnforge", deadline=None, print_blob=True)
settings.load_profile("attnforge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share what a module or a session has made run in one process, so that it is made once."""
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        made = (
            []
            if fixtures is None
            else [d for name in fixtures.names_closure for d in fixtures.name2fixturedefs.get(name, ())]
        )
        if any(definition.scope in ("module", "package") for definition in made):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: looking through it for garbage again and again took a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
