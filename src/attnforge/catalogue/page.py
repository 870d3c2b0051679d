"""The pages of a catalogue: one for each model, and one that lists them all, to be searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..certificates.certificate import upper_text
from ..groundtruth.manifest import Manifest
from ..report.html import Page

UP = "../../index.html"  # from the page of a model to the one that lists them all
EDGES = 200  # shown on a page: the manifest has them all


def model_page(about: Mapping[str, Any], truth: Manifest | None, certificate: str) -> Page:
    """What a model is, or, without its truth, only how large it is."""
    title = about["id"] if truth is None else f"{about['id']}: {about['target']}"
    page = Page(title, f"A transformer of attention alone; form: {_forms(about)}.", up=("all models", UP))
    page.cards(
        [
            ("blocks", about["layers"], f"{about['heads']} heads, padding included"),
            ("stream", about["channels"], f"channels, {about['dtype']}"),
            ("rows", about["registers"] + about["tokens"], f"{about['registers']} of them registers"),
            *([] if truth is None else [("move an output", about["relevant_heads"], "heads"),
                                         ("carry it", about["relevant_edges"], "edges")]),
        ]
    )  # fmt: skip
    if truth is None:
        page.text(
            "This model is **held out**: its weights are in `weights.safetensors`, and what is known of it lies apart."
        )
        return page
    page.section("Heads")
    page.text("`L0.H1` is head 1 of block 0. What a head moves are the outputs that change when it is patched.")
    rows = [(h.id, h.role, h.note, ", ".join(h.relevant) or "nothing") for h in truth.heads if h.role != "padding"]
    page.table(("head", "role", "what it computes", "moves"), rows)
    page.section("Edges that move an output")
    edges = [e for e in truth.edges if e.moves]
    page.table(("from", "to", "into"), [(e.source, e.target, ", ".join(e.into)) for e in edges[:EDGES]],
               f"{len(edges)} edges" + (f", of which {EDGES} are shown" if len(edges) > EDGES else ""))  # fmt: skip
    page.section("Certificate")
    page.code(certificate)
    return page


def index_page(entries: Sequence[Mapping[str, Any]]) -> Page:
    """All models of a catalogue in one table, with a field that filters it."""
    page = Page(
        "Networks whose every head is known", "Words in the field below narrow the table: a source, a split, a kind."
    )
    held = sum(entry["split"] == "held-out" for entry in entries)
    page.cards([("models", len(entries), ""), ("open", len(entries) - held, "with manifests"),
                ("held out", held, "their answers lie apart")])  # fmt: skip
    rows = []
    for entry in entries:
        bound = entry.get("bound")
        rows.append((entry["id"], entry["split"], entry["source"], entry.get("target", "held out"), _forms(entry),
                     entry.get("certificate", ""), upper_text(bound) if bound else "", entry["layers"], entry["heads"],
                     entry["channels"], entry["dtype"]))  # fmt: skip
    header = (
        "id",
        "split",
        "source",
        "computes",
        "form",
        "certificate",
        "bound",
        "blocks",
        "heads",
        "channels",
        "dtype",
    )
    links = [f"models/{entry['id']}/index.html" for entry in entries]
    page.table(header, rows, links=links, filtered=True)
    return page


def _forms(about: Mapping[str, Any]) -> str:
    if "kinds" not in about:
        return "held out"
    return ", ".join(about["kinds"]) or "plain"
