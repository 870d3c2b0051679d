"""The explorer: a page in which a network runs from its stored weights, beside what it should compute.

`model` reads any network as layers of heads, `target` writes down what it should compute, `page` makes the file,
`notebook` shows it where there are cells. The page itself is in `template/`.
"""

from .page import compact, explore, widget

__all__ = ["compact", "explore", "widget"]
