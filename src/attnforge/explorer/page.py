"""The explorer: one HTML file in which a network runs, from its stored weights, with its target beside it.

The page asks for nothing from outside. Its scripts are the files in `template/`, its data one JSON text; a content
security policy names the hash of the script. Everything that comes from a network is data and is shown as text.
In notebooks networks have a compact form that needs no JavaScript, and the explorer as a widget.
"""

from __future__ import annotations

import base64
import html
import json
import re
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..arguments import shortened
from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..conversion.site import SiteModule
from ..dtypes import dtype_name
from ..errors import ArgumentError, CertificateError
from ..extras import require
from ..heads.stored import TABLES
from ..network import Heads
from ..progress import shown
from ..rasp.network.data import value_json
from ..report.html import asset as base
from ..report.html import policy, versions
from ..saving import free_file, write_whole
from .model import PageLayer, PageUnit, model

SCRIPTS = ("arithmetic.js", "target.js", "tokens.js", "charts.js", "state.js", "inputs.js", "outputs.js", "heads.js",
           "curves.js", "page.js")  # in this order: the last one begins  # fmt: skip
MOST_NUMBERS = 1 << 21  # weights that a page carries: 8 MB in float32, 11 MB as text
DENSE = 1 << 10  # numbers up to which a tensor is kept whole: places would save little
SPARSE = 4  # zeros are left out where so many times fewer numbers are kept: a place takes as much room as a number
WIDEST = 1 << 24  # numbers of one such tensor, zeros included, which the page spreads out: 64 MB in float32
MOST_INPUTS = 64  # sliders; the rest of a large input stays at the centre of its box
LONGEST = 90  # letters of a title
SITE = "This is the head of a site, without what its model does before and after: the weight and bias of a norm, too."


class PackedTensors:
    """Tensors one after the other, as they are stored; of more than `MOST_NUMBERS` numbers only the shapes are kept.

    Of a large tensor that is nearly all zeros only the other numbers are kept, with their places.
    """

    def __init__(self, dtype: str):
        self.kind = np.dtype(dtype).newbyteorder("<")
        self.parts: list[bytes] = []
        self.places: list[bytes] = []
        self.count = self.weights = self.placed = 0
        self.known: dict[int, tuple[Tensor, dict[str, Any]]] = {}  # a tensor that stands in two layers is kept once

    def add(self, tensor: Tensor | None) -> dict[str, Any] | None:
        """Where a tensor begins, its shape, and where the places of its numbers begin, if it is mostly zeros."""
        if tensor is None:
            return None
        if id(tensor) in self.known:
            self.weights += tensor.numel()
            return self.known[id(tensor)][1]
        array, at = tensor.detach().cpu().numpy(), self.count
        if array.dtype.itemsize != self.kind.itemsize:
            raise ArgumentError(f"a page runs networks of one dtype; this one has {tensor.dtype} among its tensors")
        found: dict[str, Any] = {"at": at, "shape": list(tensor.shape)}
        self.weights += array.size
        if DENSE < array.size <= WIDEST and SPARSE * (kept := np.flatnonzero(array)).size < array.size:
            array, places = array.reshape(-1)[kept], kept.astype("<u4")
            found |= {"kept": len(kept), "places": self.placed}
            self.placed += len(kept)
            self.places.append(places.tobytes())
        self.count += array.size
        if self.runs:
            self.parts.append(np.ascontiguousarray(array, dtype=self.kind).tobytes())
        else:
            self.parts.clear()
            self.places.clear()
        self.known[id(tensor)] = (tensor, found)
        return found

    @property
    def runs(self) -> bool:
        """Whether a page can carry what was added so far."""
        return self.count <= MOST_NUMBERS

    def text(self) -> str:
        """All of them, in base64; nothing where they are too many."""
        return base64.b64encode(b"".join(self.parts)).decode()

    def places_text(self) -> str:
        """The places of what is kept of tensors that are mostly zeros, in base64."""
        return base64.b64encode(b"".join(self.places)).decode()


@shown("drawing")
def scene(given: CertifiedModule | SiteModule) -> dict[str, Any]:
    """All that a page is given of a network, as JSON; raises `CertificateError` where its certificate is stale."""
    net = getattr(given, "head", given) if isinstance(given, SiteModule) else given
    if not isinstance(net, CertifiedModule):
        raise ArgumentError(f"expected a network of attnforge, got {type(net).__name__}")
    certificate, found = net.certificate, model(net)
    packed, place = PackedTensors(dtype_name(found.dtype)), ""
    if certificate.hypothesis:
        found = replace(found, remark=f"{found.remark} The bound is proved {certificate.hypothesis}.".strip())
    if isinstance(given, SiteModule):
        place, found = f"{given.path}: ", replace(found, remark=f"{found.remark} {SITE}".strip())
    bound = None if certificate.bound is None else upper_text(certificate.bound)
    data = {
        "title": shortened(place + (found.title or certificate.target), LONGEST, "…"),
        "family": net.family,
        "dtype": dtype_name(found.dtype),
        "handed": found.handed,
        "rows": found.rows,
        "kind": certificate.kind,
        "word": certificate.word.capitalize(),
        "bound": certificate.bound,
        "boundText": bound,
        "relative": certificate.relative,
        "tokens": found.tokens,
        "width": found.width,
        "registers": found.registers,
        "columns": list(found.columns),
        "firstRow": found.first_row,
        "inputs": [{"name": name, "lo": lo, "hi": hi} for name, lo, hi in found.inputs],
        "outputs": list(found.outputs),
        "vocabulary": None if found.vocabulary is None else [value_json(token) for token in found.vocabulary],
        "sequence": [value_json(token) for token in found.sequence],
        "constants": packed.add(found.constants),
        "embed": packed.add(found.embed),
        "positions": packed.add(found.positions),
        "layers": [_layer(layer, packed) for layer in found.layers],
        "units": [_unit(unit) for unit in found.units],
        "lines": [{"text": line.text, "units": list(line.units)} for line in found.lines],
        "target": found.target,
        "without": found.without,
        "remark": found.remark,
        "apart": found.apart,
        "certificate": str(certificate).split("\n\n", 1)[0],
        "mostInputs": MOST_INPUTS,
        "start": list(found.start),
    }
    return {**data, "numbers": packed.count, "weightCount": packed.weights, "mostNumbers": MOST_NUMBERS,
            "weights": packed.text(), "places": packed.places_text()}  # fmt: skip


def _layer(layer: PageLayer, packed: PackedTensors) -> dict[str, Any]:
    groups = []
    for group in layer.groups:
        values = group.W_O.shape[1]
        groups.append({
            "scope": group.scope, "causal": group.causal, "purpose": group.purpose, "heads": group.heads,
            "slots": group.slots, "keys": group.W_Q.shape[2], "values": values,
            "tables": {name: packed.add(getattr(group, name)) for name in TABLES if getattr(group, name) is not None},
        })  # fmt: skip
    return {"names": list(layer.names), "residual": layer.residual, "S": packed.add(layer.S), "s": packed.add(layer.s),
            "groups": groups}  # fmt: skip


def _unit(unit: PageUnit) -> dict[str, Any]:
    return {"layer": unit.layer, "label": unit.label, "family": unit.family, "heads": [list(h) for h in unit.heads],
            "facts": [list(f) for f in unit.facts], "hooks": list(unit.hooks)}  # fmt: skip


def page(net: CertifiedModule | SiteModule) -> str:
    """The page as text."""
    data = scene(net)
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = '(() => {\n"use strict";\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();"
    made = " · ".join(f"{name} {number}" for name, number in versions() if name in ("attnforge", "torch"))
    style = base("page.css") + asset("page.css")
    parts = {"policy": html.escape(policy([script])), "title": html.escape(data["title"]), "style": style, "data": text,
             "script": script, "made": html.escape(made)}  # fmt: skip
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("page.html"))


def explore(net: CertifiedModule | SiteModule, path: str | Path | None = None, *, force: bool = False) -> Path | str:
    """The explorer of a network, or of a converted site: written to `path` (.html), or the page as text.

    >>> import attnforge as af
    >>> page = explore(af.compile("sin(x)", af.Box(x=(0, 1)), eps=1e-3))
    >>> page.startswith("<!DOCTYPE html>"), "https://" in page
    (True, False)
    """
    if path is None:
        return page(net)
    target = free_file(path, (".html", ".htm"), force, make=True)
    text = page(net)
    target.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(target, text)


@cache
def asset(name: str) -> str:
    """A file of the template."""
    return (resources.files(__package__) / "template" / name).read_text("utf-8")


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
