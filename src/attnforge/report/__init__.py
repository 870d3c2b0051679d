"""Pages and figures. They only read finished results: nothing here fits, compiles or certifies."""

from __future__ import annotations

from .figures import Comparison, HeadPicture, comparison_figure, head_figure, save, svg, upper_text
from .html import Page

__all__ = ["Comparison", "HeadPicture", "Page", "comparison_figure", "head_figure", "save", "svg", "upper_text"]
