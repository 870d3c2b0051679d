"""Problems for verifiers of neural networks: attention networks and properties whose labels are proved both ways.

>>> from attnforge import verification
>>> verification.pack.__name__, verification.check.__name__
('pack', 'check')
"""

from __future__ import annotations

from .folder import Instance, Pack, check, pack, read
from .property import Atom, Property, parse

__all__ = ["Atom", "Instance", "Pack", "Property", "check", "pack", "parse", "read"]
