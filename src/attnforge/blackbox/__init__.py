"""Black boxes: functions known by their values only, as attention-only networks (section E of docs/theory.md)."""

from .choose import approximate
from .result import Approximation

__all__ = ["Approximation", "approximate"]
