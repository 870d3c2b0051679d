"""The tables of docs/compiler.md are those that the code and the last benchmark give."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from attnforge.frontends.module.program import supported_operations

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "compiler.md").read_text("utf-8")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_operations_is_current(generate: ModuleType) -> None:
    assert generate.operations() in TEXT, "python docs/generate.py --write brings it up to date"
    table = TEXT.split("operations:begin")[1].split("operations:end")[0]
    for name, _ in supported_operations():
        assert name.startswith("_") or f"`{name}`" in table


def test_the_numbers_are_those_of_the_last_run(generate: ModuleType) -> None:
    assert generate.numbers() in TEXT, "python docs/generate.py --write brings them up to date"
    assert generate.page() == TEXT
