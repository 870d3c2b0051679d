"""Networks in notebooks: a compact form that needs no JavaScript, and the explorer as a widget."""

from __future__ import annotations

import html
from functools import cache
from typing import Any

from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..errors import CertificateError
from ..extras import require
from ..network import Heads
from .page import asset, page

LISTED = 12  # groups of heads in the compact form; the rest is counted
HEIGHT = 900  # pixels of the widget: inputs, outputs and the grid of heads without scrolling
CELL = "style='text-align:left;padding:2px 12px 2px 0;border:0;background:none'"


def compact(net: CertifiedModule) -> str:
    """What a notebook shows of a network: target, certificate and heads, without JavaScript.

    >>> import attnforge as af
    >>> shown = compact(af.AnchorHead.fit("sin", 0, 1, anchors=8))
    >>> "certified" in shown, "<script" in shown
    (True, False)
    """
    try:
        certificate = net.certificate
    except CertificateError as error:
        return f"<pre>{html.escape(repr(net))}\n{html.escape(str(error))}</pre>"
    groups = [module for module in net.modules() if isinstance(module, Heads)]
    bound = "measured only" if certificate.bound is None else f"off by at most {upper_text(certificate.bound)}"
    proved = "exact by proof" if certificate.kind == "exact" else f"{certificate.word}: {bound}"
    rows = [
        ("network", f"{len(groups)} groups of heads, {sum(p.numel() for p in net.parameters()):,} weights"),
        ("dtype", certificate.dtype), ("certificate", proved), ("on", certificate.domain or repr(net.box)),
        *((f"{group.heads} × {group.scope}", group.purpose or "heads") for group in groups[:LISTED]),
    ]  # fmt: skip
    if len(groups) > LISTED:
        rows.append(("", f"and {len(groups) - LISTED} more"))
    cells = "".join(f"<tr><th {CELL}>{html.escape(a)}</th><td {CELL}>{html.escape(b)}</td></tr>" for a, b in rows)
    note = "<code>net.explore('page.html')</code> writes a page in which it runs."
    return f"<div><b>{html.escape(certificate.target)}</b><table>{cells}</table><small>{note}</small></div>"


def widget(net: CertifiedModule, height: int = HEIGHT) -> Any:
    """The explorer as a widget; its `point` and `output` follow the page, and setting `point` moves the page.

    Needs attnforge[notebook].
    """
    return _kind()(page=page(net), height=height)


@cache
def _kind() -> Any:
    traitlets = require("traitlets", "notebook")
    base: Any = require("anywidget", "notebook").AnyWidget

    class Explorer(base):
        _esm = asset("widget.js")
        page = traitlets.Unicode().tag(sync=True)
        height = traitlets.Int(HEIGHT).tag(sync=True)
        point = traitlets.List().tag(sync=True)
        output = traitlets.List().tag(sync=True)

    return Explorer
