"""attnforge: functions become attention-only networks, with a certificate of how far the two can differ.

>>> import attnforge as af
>>> head = af.AnchorHead.fit("sin", -3, 3, eps=1e-4)
>>> head.certificate.kind, head.bound <= 1e-4
('certified', True)

Names are loaded when they are first used: `import attnforge` costs little more than importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .box import Box
from .census import purity  # likewise
from .certificates.certified import certify  # at once: the function, not the package of that name, is the attribute
from .conversion import convert  # likewise
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
    from . import export, incontext, lab, theorems
    from .blackbox import approximate
    from .certificates.certificate import Certificate
    from .compiler.pipeline import compile
    from .compiler.routes import plan
    from .files import check, load
    from .heads import AnchorHead, GateHead, NormHead, ProductHead, TokenHead

__version__ = "0.1.0"

_LAZY = {
    "approximate": ".blackbox",
    "compile": ".compiler.pipeline",
    "plan": ".compiler.routes",
    "AnchorHead": ".heads",
    "GateHead": ".heads",
    "NormHead": ".heads",
    "ProductHead": ".heads",
    "TokenHead": ".heads",
    "Certificate": ".certificates.certificate",
    "check": ".files",
    "export": ".export",
    "load": ".files",
    "incontext": ".incontext",
    "lab": ".lab",
    "theorems": ".theorems",
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
    "incontext",
    "lab",
    "load",
    "plan",
    "purity",
    "theorems",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnforge' has no attribute '{name}'")
    found = importlib.import_module(_LAZY[name], __name__)
    value = found if _LAZY[name] == f".{name}" else getattr(found, name)  # a package stands for itself
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
