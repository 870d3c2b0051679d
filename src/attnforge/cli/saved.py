"""What a saved file holds: `check` recomputes its certificate, `explain` takes it apart, `lipschitz` says how steep it
is, `quantise` writes it again with few bits, `explore` makes a page in which it runs, and `manifest` says what every
head is for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError, CertificateError, closest
from .common import (
    COUNT,
    AsJson,
    DType,
    Force,
    Saved,
    existing,
    refuse_overwriting,
    say,
    say_certificate,
    say_json,
    table,
    waiting,
    whole,
)

if TYPE_CHECKING:
    from ..certificates.certified import CertifiedModule
    from ..certificates.machine import Assumption
    from ..compiler.compiled import CompiledNetwork
    from ..report.structure import Structure, Unit

HEADER = ("computes", "by", "heads", "anchors", "on", "temperature", "its error", "in the bound", "share")
RIGHT = ("heads", "anchors", "its error", "in the bound", "share")


def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge, or a converted folder."),
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Measure whether this machine keeps what certificates assume of it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute a saved certificate, trusting nothing in the file; exit code 1 if it does not hold.

    Of a converted model, those of all its sites. With --machine instead of a file: the exponential, the operations and
    the products of this machine's devices against the assumptions that every certificate states.
    """
    if file is None:
        _check_machine(as_json)
        return
    if machine:
        raise ArgumentError(f"--machine measures this machine and reads no file; leave out '{file}', or --machine")
    from .. import files
    from ..certificates.certificate import Certificate
    from ..conversion.storage import is_converted

    converted = file.is_dir()
    if converted and not is_converted(file):
        raise ArgumentError(f"the folder '{file}' holds no converted model; attnforge convert writes them")
    with waiting(f"checking {file.name}"):
        found = files.check(file if converted else existing(file))
    if as_json:
        say_json({"holds": True, "conversion" if converted else "certificate": found.to_json()})
        return
    held = f"the certificates of {len(found.sites)} sites hold" if converted else "the certificate holds"
    say_certificate(found) if isinstance(found, Certificate) else say(str(found))
    say(f"\n{file.name}: {held}")


def _check_machine(as_json: bool) -> None:
    """Every assumption on every device, as a table; `CertificateError` where one does not hold."""
    from ..certificates.certificate import upper_text
    from ..certificates.machine import devices, survey

    found: list[Assumption] = []
    for device in devices():
        for dtype in DType:
            with waiting(f"measuring {dtype.value} on {device}"):
                found += survey(device, dtype.torch)
    failed = [each for each in found if not each.holds]
    if as_json:
        say_json({"holds": not failed, "findings": [each.to_json() for each in found]})
    else:
        rows = [
            (each.device, each.dtype, each.name, upper_text(each.measured), f"{each.allowed:g} {each.unit}",
             "yes" if each.holds else "NO", each.covered)
            for each in found
        ]  # fmt: skip
        table(("device", "dtype", "what", "measured", "at most", "holds", "looked at"), rows, right=("measured",))
    if failed:
        named = ", ".join(f"{each.name} in {each.dtype} on {each.device}" for each in failed)
        raise CertificateError(f"this machine does not keep what certificates assume of it: {named}")


def explain(
    file: Saved,
    as_json: AsJson = False,
) -> None:
    """Take a saved network apart: layer by layer, which heads compute what, with which anchors, at what error.

    "its error" is what the heads of a row add themselves, at most; "in the bound" is what becomes of that at the
    output, at the place where the bound is largest. These numbers add up to the bound.
    """
    from .. import files
    from ..certificates.certificate import upper_text
    from ..compiler.compiled import CompiledNetwork
    from ..rasp.network.compiled import TokenNetwork
    from ..report.structure import structure

    existing(file)
    with waiting(f"reading {file.name}"):
        net = files.network(file)
        parts = structure(net) if isinstance(net, CompiledNetwork) else None
    if parts is None or not isinstance(net, CompiledNetwork):
        _explain_head(net, as_json, net.explain() if isinstance(net, TokenNetwork) else None)
        return
    certificate = net.certificate
    if as_json:
        units = [unit.to_json() for unit in parts.units]
        shown = {"target": certificate.target, "bound": certificate.bound, "layers": parts.layers, "units": units}
        say_json({**shown, "affine": parts.affine})
        return
    say(f"{certificate.target}\non {certificate.box!r}, {certificate.dtype}\n{net.size}")
    for number in range(1, parts.layers + 1):
        say(f"\nlayer {number}")
        table(HEADER, [row(unit, certificate.bound or 0.0) for unit in parts.layer(number)], right=RIGHT)
    say(f"\nread off by an affine map from {sources(parts)}")
    say(f"affine maps add at most {upper_text(parts.affine)}; all in all at most {upper_text(certificate.bound)}")


def _network(file: Path, what: str) -> CompiledNetwork:
    """The compiled network in a file, or an error that says what is wanted."""
    from .. import files
    from ..compiler.compiled import CompiledNetwork

    net = files.network(existing(file))
    if not isinstance(net, CompiledNetwork):
        raise ArgumentError(f"'{file.name}' holds one of the family '{net.family}'; {what} takes a compiled network")
    return net


def lipschitz(file: Saved, as_json: AsJson = False) -> None:
    """A certified Lipschitz constant of a saved network on its box, and how much each input can do."""
    with waiting(f"reading {file.name}"):
        found = _network(file, "lipschitz").lipschitz()
    if as_json:
        say_json({"constant": found.constant, "inputs": list(found.inputs), "matrix": found.matrix.tolist()})
        return
    say(str(found))


def quantise(
    file: Saved,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to write the network with few bits.")],
    bits: Annotated[str, typer.Option("--bits", help="Bits of a number with its sign, 2 to 16, or bfloat16.")] = "8",
    maps: Annotated[bool, typer.Option("--maps/--no-maps", help="Round affine maps, not only anchor values.")] = True,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Round anchor values and affine maps to few bits, certify what is stored, and write it."""
    from ..compiler.quantise import quantise as few

    asked: int | str = int(bits) if bits.isdecimal() else bits
    refuse_overwriting({".safetensors": out}, force)
    with waiting(f"rounding {file.name}"):
        found = few(_network(file, "quantise"), asked, maps)  # type: ignore[arg-type]
        found.network.save(out, force=force)
    if as_json:
        numbers = {"narrow": found.narrow, "wide": found.wide, "before": found.bytes_before, "after": found.bytes_after}
        say_json({"bits": found.bits, **numbers, "bound_before": found.bound_before, "bound": found.bound})
        return
    say(f"{found}\n{out.name} written")


def row(unit: Unit, bound: float) -> tuple[str, ...]:
    """One line of the table."""
    from ..certificates.certificate import upper_text

    by = unit.family if unit.operation in (unit.family, unit.name) else f"{unit.family}, {unit.operation}"
    share = f"{unit.share / bound:.0%}" if bound else "-"
    counts = (str(unit.heads), str(unit.anchors or "-"))
    errors = (upper_text(unit.error), upper_text(unit.share), share)
    return (f"%{unit.number} {unit.name}", by, *counts, unit.interval, unit.temperature or "-", *errors)


def sources(parts: Structure) -> str:
    """What the output is made of, in words."""
    names = [f"%{number}" for number in parts.output] + ["the input"] * bool(parts.direct)
    return ", ".join(names) or "constants"


def _explain_head(net: CertifiedModule, as_json: bool, words: str | None = None) -> None:
    """A single head has no layers: its description and certificate say all. A token program describes itself."""
    if as_json:
        say_json({"family": net.family, "certificate": net.certificate.to_json()})
        return
    say(words or f"one head of the family '{net.family}'\n\n{net.certificate}")


def explore(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge, or a converted folder.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE", help="The .html file to write.")],
    site: Annotated[
        str | None, typer.Option("--site", metavar="PATH", help="Of a converted folder: the site to show.")
    ] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Write one HTML file in which a saved network runs, with its target, its heads and its bound beside it.

    The page needs no server and asks for nothing from outside. Sliders move the input; heads can be switched off and
    warmed; a button hunts for a worse point.

    \b
    attnforge explore net.safetensors -o page.html
    """
    from .. import files
    from ..explorer import explore as write

    refuse_overwriting({".html": output}, force)
    with waiting(f"drawing {file.name}"):
        if file.is_dir():
            net = _site(files.load(file), file, site)
        elif site is not None:
            raise ArgumentError(f"--site is for folders of converted models, and '{file}' is a file; leave it out")
        else:
            net = files.network(existing(file))
        path = Path(write(net, output, force=True))
    if as_json:
        say_json({"page": str(path), "bytes": path.stat().st_size})
        return
    say(f"wrote {path}: {path.stat().st_size:,} bytes; open it in a browser")


def _site(model: Any, folder: Path, path: str | None) -> Any:
    """A site of a converted model, by its path."""
    from ..conversion.site import SiteModule

    sites = {module.path: module for module in model.modules() if isinstance(module, SiteModule)}
    if path is None or path not in sites:
        asked = "give --site" if path is None else f"--site '{path}' is unknown{closest(path, sites)}"
        raise ArgumentError(f"'{folder}' holds a converted model: {asked}; it has {', '.join(sites) or 'no sites'}")
    return sites[path]


def manifest(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A saved network, or an export: plain, lens, hf, onnx.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the manifest as .json.")
    ] = None,
    checked: Annotated[
        Path | None, typer.Option("--check", metavar="MANIFEST", help="Check a manifest against FILE instead.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", metavar="FILE", help="Write counterfactual pairs as .json, too.")
    ] = None,
    count: Annotated[int, typer.Option(help="Pairs for each variable.", **COUNT)] = 4,
    seed: Annotated[int, typer.Option(parser=whole, metavar="SEED", help="Which inputs are tried.")] = 0,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of manifests.")] = False,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Say what every head of a network is for, which head reads which, and on which inputs that shows.

    With --check, find out whether a manifest is so: its hashes, its channels and edges, every input that it states, and
    that nothing else moves an output. Exit code 1 if not.

    \b
    attnforge manifest net.safetensors -o manifest.json
    attnforge manifest net.safetensors --check manifest.json
    """
    from .. import groundtruth
    from ..groundtruth.artefacts import check_file, opened
    from ..groundtruth.evidence import manifest as describe

    if schema:
        say_json(groundtruth.schema())
        return
    if file is None:
        raise ArgumentError("which network? give the file of one, such as attnforge manifest net.safetensors")
    if checked is not None:
        if output is not None or pairs is not None:
            raise ArgumentError("--check reads a manifest and writes nothing: leave out --output and --pairs")
        stated = groundtruth.Manifest.load(checked)
        with waiting(f"checking {checked.name}"):
            found = check_file(stated, file)
        if as_json:
            say_json({"holds": True, "checked": None if found is None else asdict(found)})
            return
        say(str(found) if found is not None else "the file is the one that the manifest was written for")
        say(f"{checked.name}: the manifest holds")
        return
    files = [path for path in (output, pairs) if path is not None]
    for path in files:
        refuse_overwriting({".json": path}, force)
    if len(set(files)) < len(files):
        raise ArgumentError(f"the manifest and the pairs would both be '{output}'; give two names")
    net = opened(file if file.is_dir() else existing(file))
    with waiting("describing"):
        described = describe(net, seed=seed)
    if output is not None:
        described.save(output, force=force)
    if pairs is not None:
        with waiting("looking for pairs"):
            groundtruth.pairs(net, count, seed).save(pairs, force=force)
    if as_json:
        say_json(described.to_json())
        return
    say(str(described))
    for path in files:
        say(f"wrote {path}")
