"""Networks as Hugging Face folders: config.json, model.safetensors and a model card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..certify.certified import CertifiedModule
from ..certify.storage import MAX_HEADER
from ..errors import CertificateError
from ..report._optional import require
from .artefact import Artefact, free_folder
from .card import FIGURE, SHOWN, card, draw
from .plain import PlainTransformer
from .plain_build import to_plain
from .quiet import quiet
from .steps import steps

if TYPE_CHECKING:
    from .hf_model import AttnforgeModel
    from .verify import Verification

MAX_WEIGHTS = 4 << 30  # bytes that we are willing to read


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
        with quiet(), _no_bars():
            from .hf_model import AttnforgeConfig, AttnforgeModel

            step("plain form")
            plain = net if isinstance(net, PlainTransformer) else to_plain(net, tokens)
            described = {"network": plain.config(), "certificate": plain.certificate.to_json()}
            AttnforgeModel(AttnforgeConfig(**described, dtype=plain.dtype), plain).save_pretrained(target)
        done = Artefact("hf", target).verified(net, verify)
        step("the model card")
        _write_card(net, plain, target, done.verification)
    return done


def load_hf(folder: str | Path) -> AttnforgeModel:
    """The model of a folder that `to_hf` wrote, from local files only; `CertificateError` if it is none, or changed."""
    require("transformers", "convert")
    source = Path(folder)
    _refuse_strange(source)
    with quiet(), _no_bars():
        from .hf_model import AttnforgeModel

        try:
            model = AttnforgeModel.from_pretrained(
                source, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype="auto"
            ).eval()
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CertificateError(f"'{source}' does not hold a network written by attnforge: {error}") from error
    model.certificate  # noqa: B018  (raises if the weights are not those that were certified)
    return model


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without progress bars for what takes milliseconds."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


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


def _write_card(net: CertifiedModule, plain: PlainTransformer, target: Path, found: Verification | None) -> None:
    size = plain.size
    figures = {
        "layers": size.layers,
        "heads": size.heads,
        "register tokens": size.registers,
        "data tokens": plain.tokens,
        "width of the residual stream": size.channels,
        "attention": "causal" if plain.causal else "bidirectional",
        "parameters": f"{size.parameters:,}",
        "dtype": str(plain.dtype).removeprefix("torch."),
        "largest |logit|": f"{size.largest_logit:.3g}",
        "largest |activation|": f"{size.largest_activation:.3g}",
    }
    picture = draw(net, target / FIGURE)
    text = card(plain, figures, found, _loading(plain, target.name), picture)
    (target / "README.md").write_text(text, "utf-8")


def _loading(plain: PlainTransformer, folder: str) -> str:
    """How the card says that the folder is used."""
    boxes = plain.spec.boxes
    lines = ["import torch", "from attnforge.export.hf_model import AttnforgeModel", ""]
    lines.append(f'model = AttnforgeModel.from_pretrained("{folder}")')
    names = ["x"] if len(boxes) == 1 else [f"x{i}" for i in range(len(boxes))]
    for name, box in zip(names, boxes, strict=True):
        shape = box.shape if plain.spec.fixed else (plain.tokens, *box.shape)
        middle = [float(f"{(lo + hi) / 2:.4g}") for lo, hi in box.intervals()]
        if box.dim <= SHOWN and shape == (box.dim,):
            lines.append(f"{name} = torch.tensor([{middle}], dtype=model.dtype)")
        else:
            lines.append(f"{name} = torch.zeros(1, {', '.join(map(str, shape))}, dtype=model.dtype)")
    return "\n".join([*lines, f"y = model({', '.join(names)}).output", "print(y, model.certificate)"])
