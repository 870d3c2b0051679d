"""Converted models on disk: a folder of JSON and safetensors, nothing that could run code.

    config.json          the Hugging Face configuration, where the model has one
    model.safetensors    every tensor of the model, the tables of the heads included
    conversion.json      what was converted (`Conversion.to_json`), and hashes that tie the three files together

`save_pretrained` of a converted Hugging Face model writes the first two, with the description of the sites inside
config.json; `load` reads that as well. A file is untrusted: sizes are checked before anything is allocated, the class
must be one of transformers, what stood at a site must be the operation that the description names, its heads must be of
a known family, and `check` computes the certificate of every site again, from the tables as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..arguments import is_number
from ..certificates.certificate import weights_hash
from ..certificates.certified import WRONG, CertifiedModule
from ..certificates.rounding import exponential_within
from ..certificates.schema import require
from ..dtypes import DTYPES, dtype_name
from ..errors import ArgumentError, CertificateError
from ..extras import transformers_without_bars
from ..functions.registry import parse
from ..heads.build import computes
from ..saving import file_hash, free_folder, whole_folder
from .build import scale_of
from .find import jump_of, norm_of, recognise
from .folder import model_class, read_config
from .norm import ConvertedNorm, NativeNorm
from .record import Conversion, Replacement
from .replace import put, unfuse
from .site import (
    ConvertedActivation,
    ConvertedProduct,
    GatedUnit,
    Roles,
    SiteModule,
    gated_roles,
    handed_on,
    rebuilt,
    with_jump,
    working,
)

FAMILIES = ("anchor", "gate", "chain", "product", "fast")  # of the heads that a site may hold


def install(model: nn.Module, conversion: Conversion, stored: Mapping[str, Tensor], strict: bool = False) -> None:
    """Puts heads of the right form at every site; their tensors are filled in by the caller."""
    for site in conversion.sites:
        _same_operation(model, site)
    for site in sorted(conversion.sites, key=lambda site: site.kind == "gated"):  # units take their children over
        made = _module(model, site, stored, strict)
        for path in (site.path, *site.aliases):
            put(model, path, made)
    unfuse(model)


def _module(model: nn.Module, site: Replacement, stored: Mapping[str, Tensor], strict: bool) -> nn.Module:
    config, old = site.config, _at(model, site.path)
    if site.kind == "norm":
        require(config["head"], NativeNorm.schema, "the description of a norm")
        native = NativeNorm.rebuild(dict(config["head"]), _below(stored, f"{site.path}.head"))
        assert isinstance(native, NativeNorm)
        weight, bias = (old._parameters.get(name) for name in ("weight", "bias"))
        shape = tuple(int(n) for n in config["shape"])
        return ConvertedNorm(native, shape, weight, bias, site.path, strict, bool(config["unit"]))
    if site.kind == "gated":
        product = f"{site.path}.product"
        head = _head(config, _below(stored, f"{product}.head"))
        fused = config.get("fused") is True  # models saved before there were kernels have bounds without them
        made = ConvertedProduct(head, product, strict, fused)  # type: ignore[arg-type]
        return rebuilt(old, Roles(**config["layout"]), made)
    head = _head(config, _below(stored, f"{site.path}.head"))
    return ConvertedActivation(head, str(config["function"]), site.low, site.high, site.path, strict)


def _head(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> CertifiedModule:
    family = str(config["family"])
    if family not in FAMILIES or family not in CertifiedModule.families:
        raise CertificateError(f"unknown family of heads {family!r}; expected one of {', '.join(FAMILIES)}")
    kind = CertifiedModule.families[family]
    require(config["config"], kind.schema, "the description of a head")
    return kind.rebuild(dict(config["config"]), tensors)


def _below(stored: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    found = {name.removeprefix(f"{path}."): t for name, t in stored.items() if name.startswith(f"{path}.")}
    if not found:
        raise CertificateError(f"the file holds no tensors for '{path}'")
    return found


def _at(model: nn.Module, path: str) -> Any:
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name)


def _same_operation(model: nn.Module, site: Replacement) -> None:
    """What stands at a site before the conversion must be what the description says it was."""
    try:
        old = _at(model, site.path)
    except AttributeError:
        raise CertificateError(f"there is no '{site.path}' in {type(model).__name__}") from None
    if site.kind == "norm":
        norm, config = norm_of(old), site.config
        head = config["head"]
        said = (head["kind"], tuple(config["shape"]), float(head["eps_norm"]), bool(config["unit"]))
        fits = norm is not None and (norm.kind, norm.shape, norm.eps, norm.unit) == said
    elif site.kind == "gated":
        roles = gated_roles(old)
        fits = roles is not None and dataclasses.asdict(roles) == dict(site.config["layout"])
    else:
        learned = isinstance(old, nn.PReLU) and old.num_parameters == 1  # its slope is part of what was converted
        function = parse(site.operation) if learned and site.operation.startswith("leaky_relu(") else recognise(old)
        fits = function is not None and function.name == site.operation == site.config["function"]
        jump = 0.0 if function is None or learned else jump_of(old, function, site.low, site.high)
        told = site.config.get("jump", 0.0)
        fits = fits and is_number(told) and jump <= told * (1 if site.operation == "softplus" else 2)  # it was doubled
    if not fits:
        raise CertificateError(f"'{site.path}' of {type(model).__name__} is not the {site.operation} described")


def recertified(model: nn.Module, conversion: Conversion) -> Conversion:
    """The report with the bound of every site computed again, in the dtype that the model has now.

    `CertificateError` where a stated bound is too small.
    """
    dtype, sites, wrong = _dtype_around(model, conversion), [], []
    for site in conversion.sites:
        try:
            with exponential_within(conversion.exponential):
                bound = _bound(model.get_submodule(site.path), site, dtype)
        except WRONG as error:
            wrong.append(f"  {site.path}: {error}")
            continue
        if bound > site.bound:
            wrong.append(f"  {site.path}: the bound {site.bound:.6e} is stated, only {bound:.6e} can be proved")
        sites.append(dataclasses.replace(site, bound=bound))
    if wrong:
        raise CertificateError("\n".join(["certificates of the sites do not hold:", *wrong]))
    return dataclasses.replace(conversion, dtype=dtype_name(dtype), sites=tuple(sites))


def _dtype_around(model: nn.Module, conversion: Conversion) -> torch.dtype:
    """The dtype of the model around its sites: they hand on numbers of that dtype, whatever the description says."""
    tables = {id(t) for module in model.modules() if isinstance(module, SiteModule) for t in module.tables()}
    found = {p.dtype for p in model.parameters() if p.is_floating_point() and id(p) not in tables}
    if len(found) > 1 or not found <= set(DTYPES.values()):
        raise CertificateError(f"no bound speaks of a model in {', '.join(sorted(map(str, found)))}")
    return found.pop() if found else DTYPES[conversion.dtype]


def _bound(module: nn.Module, site: Replacement, dtype: torch.dtype) -> float:
    """The certified sup error of a site on its range, from the tensors it holds now."""
    if isinstance(module, ConvertedNorm):
        _same_dtype(module.head, dtype)
        _covers(site, module.head.variance)
        module.head.attach(module.head.recertify())
        return module.site_bound(dtype)[0]
    product = module.product if isinstance(module, GatedUnit) else None
    head = product.head if isinstance(product, ConvertedProduct) else getattr(module, "head", None)
    if not isinstance(head, CertifiedModule):
        raise CertificateError(f"there is no head, but {type(module).__name__}")
    _same_dtype(head, dtype)
    found = head.attach(head.recertify()).bound
    if found is None:
        raise CertificateError("its head has no certificate")
    if isinstance(product, ConvertedProduct):
        _covers(site, head.box["y"])
        return product.site_bound(dtype)
    _covers(site, head.box.intervals()[0])
    function = parse(site.operation)
    if not computes(head, function):
        raise CertificateError(f"its head computes {head.certificate.target}")
    jump = site.config.get("jump", 0.0)
    if not is_number(jump) or jump < 0:
        raise CertificateError(f"its function cannot jump by {jump!r}")
    return handed_on(with_jump(found, float(jump)), scale_of(function, site.low, site.high), dtype)


def _same_dtype(head: CertifiedModule, dtype: torch.dtype) -> None:
    """Numbers must reach the head unrounded, and its result must be rounded only where that is counted."""
    if dtype == working(dtype) and head.dtype != dtype:
        raise CertificateError(f"its tables are {head.dtype}, the model around it is {dtype}")


def _covers(site: Replacement, interval: tuple[float, float]) -> None:
    if not (interval[0] <= site.low and site.high <= interval[1]):
        raise CertificateError(
            f"the range [{site.low:g}, {site.high:g}] is stated, its heads are for [{interval[0]:g}, {interval[1]:g}]"
        )


FORMAT = 1  # of conversion.json; another one is refused
WEIGHTS, DESCRIPTION, CONFIG = "model.safetensors", "conversion.json", "config.json"
KEY = "attnforge"  # of the description inside config.json
MAX_DESCRIPTION = 64 << 20  # bytes of JSON that we are willing to read: more than a hundred thousand sites take


def prepare(folder: str | Path, force: bool = False) -> Path:
    """The folder to write to: new, empty, or (with `force`) one that holds a converted model already."""
    path = free_folder(folder, force=True, make=True)
    if not path.is_dir() or not any(path.iterdir()):
        return path
    if not (path / DESCRIPTION).is_file():
        raise ArgumentError(f"the folder '{folder}' is there and holds other files; name one that does not exist yet")
    if not force:
        raise ArgumentError(f"the folder '{folder}' holds a converted model already; force=True replaces it")
    return path


def save(
    model: nn.Module, conversion: Conversion, folder: str | Path, *, tokenizer: Any = None, force: bool = False
) -> Path:
    """Write a converted model; `attnforge.load` reads it back. A tokenizer given along goes into the same folder."""
    path = prepare(folder, force)
    tensors, aliases = _distinct(model)
    with whole_folder(path, last=DESCRIPTION) as staged:
        _write(model, conversion, staged, tensors, aliases, tokenizer)
    return path


def _write(
    model: nn.Module, conversion: Conversion, path: Path, tensors: Any, aliases: dict[str, str], tokenizer: Any
) -> None:
    """The files of a converted model, in a folder that is there."""
    config = None
    if _is_pretrained(model):
        plain: Any = copy.deepcopy(model.config)
        plain.architectures = [type(model).__name__]
        plain.save_pretrained(path)
        config = file_hash(path / CONFIG)
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
    except WRONG as error:
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
        if file_hash(path / CONFIG) != header["config"]:
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
            "attnforge.conversion.storage.load(folder, model)"
        )
    config = read_config(path)
    config.pop(KEY, None)
    kind = model_class(config, path)
    settings = kind.config_class.from_dict(config)
    deepest = max((v for k, v in config.items() if "layer" in k and isinstance(v, int)), default=0)
    if deepest > len(stored):
        raise CertificateError(f"'{path}': {CONFIG} asks for {deepest} layers, {WEIGHTS} holds {len(stored)} tensors")
    with transformers_without_bars():
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


def _digest(header: Mapping[str, Any]) -> str:
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
