"""attnforge: functions become attention-only networks, with a certificate of how far the two can differ.

>>> import attnforge as af
>>> head = af.AnchorHead.fit("sin", -3, 3, eps=1e-4)
>>> head.certificate.kind, head.bound <= 1e-4
('certified', True)

`import attnforge` loads the error classes and nothing else, in a few milliseconds. Every other name is loaded when it
is first used, and with it what it needs: PyTorch, about a second, for nearly all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    ArgumentError,
    AttnforgeError,
    CertificateError,
    ConvergenceError,
    DomainError,
    DomainWarning,
    FormulaError,
    MissingExtra,
    PrecisionError,
    PurityError,
    UnsupportedOperation,
)

if TYPE_CHECKING:
    from . import export, groundtruth, incontext, lab, rasp, theorems, verification
    from .blackbox import approximate
    from .box import Box
    from .census import purity
    from .certificates.certificate import Certificate
    from .certificates.certified import certify
    from .compiler.pipeline import compile
    from .compiler.quantise import quantise
    from .compiler.routes import plan
    from .conversion import convert
    from .files import check, load
    from .groundtruth.evidence import manifest
    from .heads import AnchorHead, GateHead, NormHead, ProductHead, TokenHead

__version__ = "0.1.0"

#: Where each name lives; a package of the same name stands for itself.
_LAZY = {
    "AnchorHead": ".heads",
    "Box": ".box",
    "Certificate": ".certificates.certificate",
    "GateHead": ".heads",
    "NormHead": ".heads",
    "ProductHead": ".heads",
    "TokenHead": ".heads",
    "approximate": ".blackbox",
    "certify": ".certificates.certified",
    "check": ".files",
    "compile": ".compiler.pipeline",
    "convert": ".conversion",
    "export": ".export",
    "groundtruth": ".groundtruth",
    "incontext": ".incontext",
    "lab": ".lab",
    "load": ".files",
    "manifest": ".groundtruth.evidence",
    "plan": ".compiler.routes",
    "purity": ".census",
    "quantise": ".compiler.quantise",
    "rasp": ".rasp",
    "theorems": ".theorems",
    "verification": ".verification",
}

__all__ = [
    "AnchorHead",
    "ArgumentError",
    "AttnforgeError",
    "Box",
    "Certificate",
    "CertificateError",
    "ConvergenceError",
    "DomainError",
    "DomainWarning",
    "FormulaError",
    "GateHead",
    "MissingExtra",
    "NormHead",
    "PrecisionError",
    "ProductHead",
    "PurityError",
    "TokenHead",
    "UnsupportedOperation",
    "__version__",
    "approximate",
    "certify",
    "check",
    "compile",
    "convert",
    "export",
    "groundtruth",
    "incontext",
    "lab",
    "load",
    "manifest",
    "plan",
    "purity",
    "quantise",
    "rasp",
    "theorems",
    "verification",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnforge' has no attribute '{name}'")
    found = importlib.import_module(_LAZY[name], __name__)
    value = found if _LAZY[name] == f".{name}" else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
