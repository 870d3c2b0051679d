"""Networks as Hugging Face folders: config.json, model.safetensors and a model card, README.md, which says what the
network computes, where, how well, how large it is and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...arguments import shortened
from ...certificates.certificate import Certificate, upper_text
from ...certificates.certified import WRONG, CertifiedModule
from ...certificates.storage import MAX_HEADER
from ...charts.chart import Figure, Level, Panel, Series, error_panel
from ...charts.drawing import save
from ...compiler.compiled import CompiledNetwork
from ...dtypes import dtype_name
from ...errors import CertificateError, MissingExtra
from ...extras import require, transformers_without_bars
from ...programs.interpret import values
from ...rasp.network.compiled import CompiledProgram
from ...saving import free_folder, whole_folder, write_whole
from ...theorems.result import Construction
from ..plain.build import to_plain
from ..plain.transformer import PlainTransformer
from ..verification import Artefact, Verification, domain
from ..writing import quiet, steps

if TYPE_CHECKING:
    from .model import AttnforgeModel

FIGURE = "error.png"
POINTS = 801  # along the diagonal, both of its ends among them
SHOWN = 12  # variables, sites and heads listed before the rest is counted: a screen of a card
TITLE = 60  # characters of a target in a card's title
MAX_WEIGHTS = 4 << 30  # bytes that we are willing to read: 64 blocks of the widest stream there is, in float32


def card(
    net: CertifiedModule,
    figures: Mapping[str, object],
    verification: Verification | None,
    loading: str,
    picture: str | None = None,
) -> str:
    """A model card as Markdown with the header that the Hub reads; `figures` are rows of the table of sizes."""
    found = net.certificate
    lines = [
        "---", "library_name: transformers", "tags:", "- attnforge", "- attention-only", "- certified", "---", "",
        f"# {shortened(found.target, TITLE)}", "",
        "An attention-only transformer: softmax attention and affine maps, no activation, no norm. Its weights were "
        "compiled, not trained.", "",
        "## Target", "", "```text", found.target, "```", "", *_box(found), "",
        "## Accuracy", "", *_accuracy(found, verification), "",
    ]  # fmt: skip
    if picture is not None:
        lines += [f"![Output and error along a diagonal of the box]({picture})", ""]
    lines += ["## Figures", "", "| figure | value |", "|---|---|"]
    lines += [f"| {_cell(name)} | {value} |" for name, value in figures.items()]
    lines.append("")
    lines += ["## Use", "", "```python", loading.strip(), "```", ""]
    if found.terms:
        lines += ["## Where the bound comes from", "", "| site | source | at most |", "|---|---|---|"]
        terms = sorted(found.terms, key=lambda term: -term.value)
        lines += [f"| {_cell(t.site)} | {t.source} | {upper_text(t.value)} |" for t in terms[:SHOWN]]
        if len(terms) > SHOWN:
            rest = upper_text(sum(t.value for t in terms[SHOWN:]) * (1 + 1e-9))
            lines.append(f"| {len(terms) - SHOWN} more | | {rest} |")
        lines.append("")
    if found.assumptions:
        lines += ["The bound assumes:", "", *(f"- {line}" for line in found.assumptions), ""]
    return "\n".join(lines)


def draw(net: CertifiedModule, path: Path) -> str | None:
    """The figure of a card beside it, if matplotlib is there and the target can be evaluated: its file name."""
    picture = _picture(net)
    if picture is None:
        return None
    try:
        require("matplotlib", "report")
    except MissingExtra:  # a card without a picture is still a card
        return None
    save(picture, path, force=True)
    return path.name


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _box(found: Certificate) -> list[str]:
    box = found.box
    if found.domain:
        return [f"on `{found.domain}`: token ids, padded to the longest sequence."]
    if box.names is None:
        return [f"on `{box!r}`: tensors of shape {box.shape}, batch dimensions first."]
    sides = list(zip(box.names, box.intervals(), strict=True))
    rows = ["| variable | from | to |", "|---|---|---|"]
    rows += [f"| {name} | {lo:.9g} | {hi:.9g} |" for name, (lo, hi) in sides[:SHOWN]]
    return rows + ([f"| {len(sides) - SHOWN} more | | |"] if len(sides) > SHOWN else [])


def _accuracy(found: Certificate, verification: Verification | None) -> list[str]:
    unit = " of the target's size" if found.relative else ""
    if found.bound is None:
        lines = [f"Calibrated, not certified: the largest error measured is {found.measured:.3e}{unit}."]
    elif found.kind == "exact":
        lines = [
            "Exact: the largest logit is that of the program's value, for every position of every sequence there is, "
            f"rounding of {found.dtype} included. This is proved from the weights, not measured."
        ]
    else:
        lines = [
            f"{found.word.capitalize()}: |network - target| is at most **{upper_text(found.bound)}**{unit} everywhere "
            f"on the box, rounding of {found.dtype} included. Outside the box the certificate says nothing."
        ]
    if verification is not None:
        lines += [
            "",
            f"Measured: these files, loaded by a fresh process, differ from the network they were exported from by at "
            f"most {verification.largest:.2e} at {verification.points:,} random, corner and adversarial points.",
        ]
    return lines


@torch.no_grad()
def _picture(net: CertifiedModule) -> Figure | None:
    """Output and target, and the error below its bound, from the lowest to the highest corner of the box."""
    if isinstance(net, PlainTransformer) and net.source is not None:
        net = net.source
    if isinstance(net, CompiledProgram):
        return None
    where = domain(net)
    t = torch.linspace(0, 1, POINTS, dtype=torch.float64).unsqueeze(-1)
    points = (where.lower + t * (where.upper - where.lower)).to(net.dtype)
    inputs = where.split(points)
    if isinstance(net, CompiledNetwork):
        target = values(net.program, points.double().reshape(-1, *net.program.box.shape))
    elif isinstance(net, Construction):
        target = net.target(inputs[0])
    else:
        return None
    output = net.core(*inputs).double()
    truth, found = (x.reshape(POINTS, -1).numpy() for x in (target, output))
    error = np.abs(found - truth).max(-1)
    bound = None if net.certificate.relative else net.certificate.bound
    at = t.squeeze(-1).numpy()

    series = [
        Series("target", at, truth[:, 0], style="broad", role="target"),
        Series("network", at, found[:, 0], role="output"),
    ]
    where_to = "from the lowest to the highest corner of the box"
    title = "output" if truth.shape[1] == 1 else f"output 1 of {truth.shape[1]}"
    levels = [] if bound is None else [Level(bound, f"{net.certificate.word} bound {upper_text(bound)}")]
    panels = (
        Panel(title, where_to, "output", series, legend="inside"),
        error_panel("error", where_to, "|network - target|", at, error, levels),
    )
    return Figure("card", "Output beside target, and the error below its bound.", panels)


def to_hf(
    net: CertifiedModule, folder: str | Path, *, tokens: int | None = None, verify: bool = True, force: bool = False
) -> Artefact:
    """Write a network, in plain form, as a folder that `from_pretrained` loads.

    The folder holds config.json, model.safetensors (no pickle, no code) and a model card, README.md, with target, box,
    bound and sizes. It is then loaded by a fresh process and compared with the network, unless `verify=False`. A folder
    that is there already, and not empty, is refused unless `force=True`. Publishing it is up to you.
    """
    target = free_folder(folder, force)
    with steps() as step:
        step("loading transformers")
        require("transformers", "convert")
        with quiet(), transformers_without_bars():
            from .model import AttnforgeConfig, AttnforgeModel

            step("plain form")
            plain = net if isinstance(net, PlainTransformer) else to_plain(net, tokens)
            described = {
                "network": {"family": plain.family, **plain.config()},
                "certificate": plain.certificate.to_json(),
            }
            with whole_folder(target) as staged:
                AttnforgeModel(AttnforgeConfig(**described, dtype=plain.dtype), plain).save_pretrained(staged)
                found = Artefact("hf", staged).verified(net, verify).verification
                step("the model card")
                _write_card(net, plain, staged, target.name, found)
    return Artefact("hf", target, found)


def load_hf(folder: str | Path) -> AttnforgeModel:
    """The model of a folder that `to_hf` wrote, from local files only; `CertificateError` if it is none, or changed."""
    require("transformers", "convert")
    source = Path(folder)
    _refuse_strange(source)
    with quiet(), transformers_without_bars():
        from .model import AttnforgeModel

        try:
            model = AttnforgeModel.from_pretrained(
                source, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype="auto"
            ).eval()
        except (OSError, *WRONG) as error:
            raise CertificateError(f"'{source}' does not hold a network written by attnforge: {error}") from error
    model.certificate  # noqa: B018  (raises if the weights are not those that were certified)
    return model


def _refuse_strange(source: Path) -> None:
    """Refuse before anything is loaded: wrong folder, wrong kind of model, files larger than any of ours."""
    limits = {"config.json": MAX_HEADER, "model.safetensors": MAX_WEIGHTS}
    for name, limit in limits.items():
        file = source / name
        if not file.is_file():
            raise CertificateError(f"'{source}' holds no {name}: it was not written by attnforge.export.to_hf")
        if file.stat().st_size > limit:
            raise CertificateError(f"'{file}' has {file.stat().st_size:,} bytes; at most {limit:,} are read")
    try:
        config = json.loads((source / "config.json").read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"'{source / 'config.json'}' is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") != "attnforge":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise CertificateError(f"'{source}' holds a model of the type {kind!r}, not 'attnforge'")


def _write_card(
    net: CertifiedModule, plain: PlainTransformer, folder: Path, name: str, found: Verification | None
) -> None:
    """The card and its picture, in `folder`, of an export that will be called `name`."""
    size = plain.size
    figures = {
        "layers": size.layers,
        "heads": size.heads,
        "register tokens": size.registers,
        "data tokens": plain.tokens,
        "width of the residual stream": size.channels,
        "attention": "causal" if plain.causal else "bidirectional",
        "parameters": f"{size.parameters:,}",
        "dtype": dtype_name(plain.dtype),
        "largest |logit|": f"{size.largest_logit:.3g}",
        "largest |activation|": f"{size.largest_activation:.3g}",
    }
    picture = draw(net, folder / FIGURE)
    text = card(plain, figures, found, _loading(plain, name), picture)
    write_whole(folder / "README.md", text)


def _loading(plain: PlainTransformer, folder: str) -> str:
    """How the card says that the folder is used."""
    boxes = plain.spec.boxes
    if plain.spec.ids:
        known = len(plain.spec.inputs) - 1
        tokens = ", ".join(f"{i}: {name!r}" for i, name in enumerate(plain.spec.inputs[:-1][:SHOWN]))
        return "\n".join([
            "import torch", "from attnforge.export import load_hf", "", f'model = load_hf("{folder}")',
            f"# {tokens}{', ...' if known > SHOWN else ''}; {known} is padding",
            f"ids = torch.full((1, {plain.tokens}), {known})", "ids[0, 0] = 0", "logits = model(input_ids=ids).output",
        ])  # fmt: skip
    lines = ["import torch", "from attnforge.export import load_hf", "", f'model = load_hf("{folder}")']
    names = ["x"] if len(boxes) == 1 else [f"x{i}" for i in range(len(boxes))]
    for name, box in zip(names, boxes, strict=True):
        shape = box.shape if plain.spec.fixed else (plain.tokens, *box.shape)
        middle = [float(f"{(lo + hi) / 2:.4g}") for lo, hi in box.intervals()]
        if box.dim <= SHOWN and shape == (box.dim,):
            lines.append(f"{name} = torch.tensor([{middle}], dtype=model.dtype)")
        else:
            lines.append(f"{name} = torch.zeros(1, {', '.join(map(str, shape))}, dtype=model.dtype)")
    return "\n".join([*lines, f"y = model({', '.join(names)}).output", "print(y, model.certificate)"])
