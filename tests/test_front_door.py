"""The front door: `import attnforge` costs next to nothing, and every public name is what it says."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnforge as af

SRC = Path(__file__).resolve().parents[1] / "src"
FUNCTIONS = ("approximate", "certify", "check", "compile", "convert", "load", "manifest", "plan", "purity", "quantise")
CLASSES = ("AnchorHead", "Box", "Certificate", "GateHead", "NormHead", "ProductHead", "TokenHead")
PACKAGES = ("export", "groundtruth", "incontext", "lab", "rasp", "theorems", "verification")


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    return done.stdout


def test_importing_loads_nothing() -> None:
    assert fresh("import attnforge, sys; print([m for m in ('torch', 'numpy', 'sympy') if m in sys.modules])") == "[]\n"


def test_every_name_is_there() -> None:
    assert dir(af) == sorted(af.__all__) and len(set(af.__all__)) == len(af.__all__)
    assert all(inspect.isfunction(getattr(af, name)) for name in FUNCTIONS)
    assert all(inspect.isclass(getattr(af, name)) for name in CLASSES)
    assert all(inspect.ismodule(getattr(af, name)) for name in PACKAGES)
    errors = {name for name in af.__all__ if name.endswith(("Error", "Warning", "Extra", "Operation"))}
    assert set(af.__all__) == {*FUNCTIONS, *CLASSES, *PACKAGES, *errors, "__version__"}
    assert all(issubclass(getattr(af, name), Warning if name == "DomainWarning" else af.AttnforgeError)
               for name in errors)  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'complie'"):
        af.complie  # noqa: B018


def test_names_stay_what_they_are_after_their_packages_are_imported() -> None:
    packages = [f"attnforge.{found.name}" for found in pkgutil.iter_modules(af.__path__) if found.name != "__main__"]
    assert "attnforge.certificates" in packages and "attnforge.conversion" in packages
    for name in packages:
        importlib.import_module(name)
    assert all(inspect.isfunction(getattr(af, name)) for name in FUNCTIONS)
    code = "import attnforge.certificates, attnforge.census, attnforge as af; print(callable(af.certify), af.purity)"
    assert fresh(code).startswith("True <function purity")


def test_a_fresh_process_can_read_every_family() -> None:
    shown = "from attnforge.certificates.certified import CertifiedModule as M; print(*sorted(M.families))"
    everything = (
        "import importlib, pkgutil, attnforge\n"
        "for found in pkgutil.walk_packages(attnforge.__path__, 'attnforge.'):\n"
        "    if not found.name.endswith(('__main__', 'hf.model')):\n"
        "        importlib.import_module(found.name)\n"
    )
    families = fresh(everything + shown).split()
    assert {"anchor", "gate", "product", "norm", "blackbox-grid", "blackbox-ridge"} < set(families)
    homes = "from attnforge import files; known = set(getattr(files.networks, 'HOMES', ()))\n"  # loaded when asked for
    known = "from attnforge.certificates.certified import CertifiedModule as M; print(*sorted(known | set(M.families)))"
    assert fresh(homes + known).split() == families
