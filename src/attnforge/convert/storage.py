"""Converted models on disk: a folder of JSON and safetensors, nothing that could run code.

    config.json          the Hugging Face configuration, where the model has one
    model.safetensors    every tensor of the model, the tables of the heads included
    conversion.json      what was converted (`Conversion.to_json`), and hashes that tie the three files together

`save_pretrained` of a converted Hugging Face model writes the first two, with the description of the sites inside
config.json; `load` reads that as well. A file is untrusted: sizes are checked before anything is allocated, the class
must be one of transformers, and `check` computes the certificate of every site again.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..certify.certificate import weights_hash
from ..errors import ArgumentError, AttnforgeError, CertificateError
from .folder import model_class, quiet, read_config
from .rebuild import install, recertified
from .record import Conversion
from .site import SiteModule

FORMAT = 1
WEIGHTS, DESCRIPTION, CONFIG = "model.safetensors", "conversion.json", "config.json"
KEY = "attnforge"  # of the description inside config.json
MAX_DESCRIPTION = 64 << 20  # bytes of JSON that we are willing to read


def prepare(folder: str | Path, force: bool = False) -> Path:
    """The folder to write to: new, empty, or (with `force`) one that holds a converted model already."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"'{folder}' is a file: expected the name of a folder that can be made")
    if not path.is_dir() or not any(path.iterdir()):
        return path
    if not (path / DESCRIPTION).is_file():
        raise ArgumentError(f"the folder '{folder}' is there and holds other files; name one that does not exist yet")
    if not force:
        raise ArgumentError(f"the folder '{folder}' holds a converted model already; --force (force=True) replaces it")
    return path


def save(
    model: nn.Module, conversion: Conversion, folder: str | Path, *, tokenizer: Any = None, force: bool = False
) -> Path:
    """Write a converted model; `attnforge.load` reads it back. A tokenizer given along goes into the same folder."""
    path = prepare(folder, force)
    tensors, aliases = _distinct(model)
    path.mkdir(parents=True, exist_ok=True)
    (path / DESCRIPTION).unlink(missing_ok=True)  # last in, first out: half a folder is not taken for a whole one
    config = None
    if _is_pretrained(model):
        plain: Any = copy.deepcopy(model.config)
        plain.architectures = [type(model).__name__]
        plain.save_pretrained(path)
        config = _file_hash(path / CONFIG)
        if model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(path)  # type: ignore[union-attr,operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    (path / WEIGHTS).write_bytes(to_bytes(tensors, metadata={"format": "pt"}))
    header: dict[str, Any] = {
        "format": FORMAT,
        "class": type(model).__name__,
        "weights": weights_hash(model),
        "config": config,
        "aliases": aliases,
        "strict": any(m.strict for m in model.modules() if isinstance(m, SiteModule)),
        "conversion": conversion.to_json(),
    }
    header["digest"] = _digest(header)
    (path / DESCRIPTION).write_text(json.dumps(header, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def load(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The converted model in a folder, in evaluation mode; `CertificateError` where files are missing or changed.

    A model that is not of Hugging Face is rebuilt into a copy of `model`: the original's architecture, any weights.
    """
    return _load(Path(folder), model)[0]


def check(folder: str | Path, model: nn.Module | None = None) -> Conversion:
    """The report of a converted model, the certificate of every site computed again from the stored tables.

    `CertificateError` where a site's bound does not hold, or the files do not belong together.
    """
    found, conversion = _load(Path(folder), model)
    return recertified(found, conversion)


def remember(model: nn.Module, conversion: Conversion) -> None:
    """Puts the description into the configuration of a Hugging Face model, so that `save_pretrained` writes it."""
    if _is_pretrained(model):
        setattr(model.config, KEY, conversion.to_json())


def is_converted(folder: str | Path) -> bool:
    """Whether a folder holds a converted model."""
    path = Path(folder)
    return (path / DESCRIPTION).is_file() or ((path / CONFIG).is_file() and KEY in read_config(path))


def _load(path: Path, model: nn.Module | None) -> tuple[nn.Module, Conversion]:
    if not path.is_dir():
        raise CertificateError(f"there is no folder '{path}'")
    header = _header(path)
    tensors = _tensors(path / WEIGHTS)
    try:
        conversion = Conversion.from_json(header["conversion"])
        aliases = {str(k): str(v) for k, v in dict(header.get("aliases", {})).items()}
        stored = tensors | {name: tensors[other] for name, other in aliases.items()}
        found, stored = _skeleton(path, header, conversion, stored, model)
        install(found, conversion, stored, bool(header.get("strict", False)))
        _fill(found, stored)
    except CertificateError:
        raise
    except (AttnforgeError, KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise CertificateError(f"'{path}' does not describe a converted model of this version: {error}") from error
    wanted = header.get("weights")
    if wanted is not None and weights_hash(found) != wanted:
        raise CertificateError(f"'{path / WEIGHTS}' was changed: its hash is not the one in {DESCRIPTION}")
    remember(found, conversion)
    return found.eval(), conversion


def _header(path: Path) -> dict[str, Any]:
    """conversion.json, or what `save_pretrained` put into config.json; checked against its digest."""
    file = path / DESCRIPTION
    if not file.is_file():
        config = read_config(path) if (path / CONFIG).is_file() else {}
        if not isinstance(config.get(KEY), dict):
            raise CertificateError(f"'{path}' holds no converted model: there is no file {DESCRIPTION}")
        return {"class": (config.get("architectures") or [None])[0], "config": None, "conversion": config[KEY]}
    if file.stat().st_size > MAX_DESCRIPTION:
        raise CertificateError(f"'{file}' has {file.stat().st_size:,} bytes, more than a description can need")
    try:
        header = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"'{file}' is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CertificateError(f"'{file}': expected format {FORMAT}; upgrade attnforge, or convert the model again")
    if header.get("digest") != _digest({k: v for k, v in header.items() if k != "digest"}):
        raise CertificateError(f"'{file}' does not have the digest it states: it was changed after saving")
    if header.get("config") is not None:
        if not (path / CONFIG).is_file():
            raise CertificateError(f"'{path}' has no {CONFIG}, which {DESCRIPTION} speaks of")
        if _file_hash(path / CONFIG) != header["config"]:
            raise CertificateError(f"'{path / CONFIG}' was changed: its hash is not the one in {DESCRIPTION}")
    return header


def _tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CertificateError(f"there is no file '{file}'")
    try:
        with safe_open(str(file), framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CertificateError(f"'{file}' is not a readable safetensors file: {error}") from error


def _skeleton(
    path: Path, header: dict[str, Any], conversion: Conversion, stored: dict[str, Tensor], model: nn.Module | None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model before its conversion, a copy of the one given or the class of transformers with any weights; and the
    stored tensors by the names they have in it."""
    if model is not None:
        if type(model).__name__ != conversion.model:
            raise CertificateError(f"'{path}' holds a {conversion.model}, the model given is a {type(model).__name__}")
        return copy.deepcopy(model), stored
    if not (path / CONFIG).is_file():
        raise CertificateError(
            f"'{path}' has no {CONFIG}: a model that is not of Hugging Face is read back into its own architecture, "
            "attnforge.convert.storage.load(folder, model)"
        )
    config = read_config(path)
    config.pop(KEY, None)
    kind = model_class(config, path)
    settings = kind.config_class.from_dict(config)
    deepest = max((v for k, v in config.items() if "layer" in k and isinstance(v, int)), default=0)
    if deepest > len(stored):
        raise CertificateError(f"'{path}': {CONFIG} asks for {deepest} layers, {WEIGHTS} holds {len(stored)} tensors")
    with quiet():
        with torch.device("meta"):  # shapes first: a configuration must not make us allocate what no file holds
            blank = kind(copy.deepcopy(settings))
        stored = stored if "format" in header else _renamed(blank, stored)
        _same_shapes(path, blank, conversion, stored)
        return kind(settings), stored


def _renamed(blank: nn.Module, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `save_pretrained` by today's names: transformers 5 writes some models with those of older ones."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # older versions write the names as they are
        return stored
    known = get_model_conversion_mapping(blank) or []  # type: ignore[arg-type]
    renamings = [each for each in known if isinstance(each, WeightRenaming)]
    return {rename_source_key(name, renamings, [])[0]: tensor for name, tensor in stored.items()}


def _same_shapes(path: Path, blank: nn.Module, conversion: Conversion, stored: Mapping[str, Tensor]) -> None:
    """Every tensor of the architecture is in the file with its shape, but for those of the sites."""
    places = tuple(f"{p}." for site in conversion.sites for p in (site.path, *site.aliases))
    wanted = {name: tuple(t.shape) for name, t in blank.state_dict().items() if not name.startswith(places)}
    given = {name: tuple(t.shape) for name, t in stored.items() if not name.startswith(places)}
    wrong = sorted(name for name in wanted.keys() & given.keys() if wanted[name] != given[name])
    missing = sorted(wanted.keys() - given.keys() - _tied(blank, given))
    strange = sorted(given.keys() - wanted.keys())
    if wrong or missing or strange:
        said = ("of another shape", wrong), ("missing", missing), ("unknown", strange)
        words = "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in said if names)
        raise CertificateError(f"'{path}': {WEIGHTS} does not fit {CONFIG}: {words}")


def _tied(blank: nn.Module, given: Mapping[str, Any]) -> set[str]:
    """Names that `save_pretrained` leaves out because another name holds the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in blank.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return {name for names in groups.values() if any(n in given for n in names) for name in names}


def _fill(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Puts every stored tensor in its place, in its stored dtype."""
    own = model.state_dict(keep_vars=True)
    absent = _tied(model, stored) - stored.keys()
    if (own.keys() - absent) != stored.keys():
        differing = sorted((own.keys() - absent) ^ stored.keys())
        raise CertificateError(f"missing or unknown tensors {', '.join(differing[:5])}")
    for name, tensor in stored.items():
        if own[name].shape != tensor.shape:
            raise CertificateError(f"{name} has the shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}")
        own[name].data = tensor.to(own[name].device, copy=True)


def _distinct(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a model once each, and for the other names of the same tensor which one it is."""
    seen: dict[int, str] = {}
    tensors, aliases = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = seen.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
        else:
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, aliases


def _is_pretrained(model: nn.Module) -> bool:
    """Whether a model can `save_pretrained`, found out without loading transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def _file_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest(header: Mapping[str, Any]) -> str:
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
