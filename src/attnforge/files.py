"""Reading networks back: `load` and `check`, for every family there is, and for the folders of converted models."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .certificates import certified as networks
from .certificates import storage
from .errors import ArgumentError, CertificateError

__all__ = ["check", "load", "network"]

networks.HOMES.update(
    {
        "anchor": "attnforge.heads.anchor.head",
        "gate": "attnforge.heads.gate.head",
        "product": "attnforge.heads.product.head",
        "norm": "attnforge.heads.norm.head",
        "token": "attnforge.heads.token.head",
        "fast": "attnforge.heads.fast.activation",
        "chain": "attnforge.heads.chain.head",
        "network": "attnforge.compiler.compiled",
        "program": "attnforge.rasp.network.compiled",
        "programs": "attnforge.rasp.network.several",
        "plain": "attnforge.export.plain.transformer",
        "variant": "attnforge.groundtruth.variants.variant",
        "blackbox-grid": "attnforge.blackbox.grid",
        "blackbox-table": "attnforge.blackbox.result",
        "blackbox-ridge": "attnforge.blackbox.ridge",
        "theorem-ramp": "attnforge.theorems.ramps",
        "theorem-universal": "attnforge.theorems.universal",
        "theorem-cells": "attnforge.theorems.partition",
    }
)
networks.EARLIER["plain"] = "attnforge.export.plain.legacy"
#: Who writes the derivation of a family that the kernel covers, and runs the kernel; `beyond` of the others says why
#: it does not.
PROVED = {
    "network": "attnforge.compiler.derivation",
    **dict.fromkeys(("program", "programs"), "attnforge.rasp.network.derivation"),
    **dict.fromkeys(("plain", "variant"), "attnforge.export.plain.derivation"),
    **dict.fromkeys(
        ("anchor", "gate", "product", "token", "norm", "fast", "chain", "theorem-ramp"), "attnforge.compiler.alone"
    ),
    **dict.fromkeys(("theorem-universal", "theorem-cells"), "attnforge.theorems.derivation"),
    "blackbox-grid": "attnforge.blackbox.derivation",
}  # fmt: skip#: Who reads files that hold no network of ours but something that ran one.
READERS = {"estimator": "attnforge.incontext.saved"}


def load(path: str | Path) -> Any:
    """A network, head or fitted estimator from its file, a converted model from its folder; raises `CertificateError`
    when they are unreadable, truncated or tampered with."""
    if Path(path).is_dir():
        return _conversions().load(path)
    reader = READERS.get(storage.stated_family(path))
    return import_module(reader).load(path) if reader else networks.load(path)


def network(path: str | Path) -> Any:
    """A network or head from its file, and nothing else: what can be taken apart, drawn, run on points, exported."""
    if storage.stated_family(path) in READERS:
        raise ArgumentError(
            f"'{Path(path).name}' holds a fitted estimator, no network: attnforge check proves it again, "
            "attnforge.load reads it back, and its predict takes new rows"
        )
    return load(path)


def check(path: str | Path) -> Any:
    """Recompute what a file states: its `Certificate`, of a fitted estimator its `ConvergenceCertificate`, or the
    `Conversion` of a folder with every site certified again; raises `CertificateError` if it does not hold.

    A file is checked twice: by the analysis that wrote its bound, and by the kernel, which proves one from the stored
    numbers alone (docs/kernel.md). `proof` and `kernel` of the certificate say what came of it, `remark` why nothing.
    """
    if Path(path).is_dir():
        return _conversions().check(path)
    reader = READERS.get(storage.stated_family(path))
    if reader:
        return import_module(reader).check(path)
    found, net = networks.check(path), networks.load(path)
    stated = net.certificate
    if net.family not in PROVED or found.bound is None or stated.bound is None:
        why = net.beyond or "there is nothing to prove"
        return replace(found, remark=f"the kernel does not cover files of the family '{net.family}': {why}")
    again = import_module(PROVED[net.family]).proved(net, found)
    if stated.proof != "kernel":
        return again
    if again.kernel is None or again.kernel > stated.bound:
        shown = again.remark or f"it proves {again.kernel:.6e}"
        raise CertificateError(f"{Path(path).name}: the file states {stated.bound} by the kernel, but {shown}")
    return replace(again, bound=max(again.kernel, found.bound), proof="kernel")


def _conversions() -> ModuleType:
    """Converted models, loaded for their folders alone."""
    from .conversion import storage

    return storage
