"""What the kernel's tests share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def benchmark() -> ModuleType:
    """benchmarks/kernel.py as a module."""
    spec = importlib.util.spec_from_file_location("benchmarks_kernel", ROOT / "benchmarks" / "kernel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
