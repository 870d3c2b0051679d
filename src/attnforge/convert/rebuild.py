"""Sites from their descriptions: heads put back into a model that was not converted, and certified again.

A description is not believed: what stood at a site must be the operation it names, the heads must be of a known family,
and `recertified` computes every bound from the tables as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..certify.certified import CertifiedModule
from ..errors import AttnforgeError, CertificateError
from ..ir.functions import parse
from .activations import recognise
from .build import scale_of
from .find import norm_of
from .gated import GatedUnit, Layout, gated_layout, rebuilt
from .norm import NativeNorm, NormSite
from .place import put, unfuse
from .pointwise import ActivationSite, ProductSite, handed_on
from .record import Conversion, Site

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAMILIES = ("anchor", "gate", "product", "fast")  # of the heads that a site may hold


def install(model: nn.Module, conversion: Conversion, stored: Mapping[str, Tensor], strict: bool = False) -> None:
    """Puts heads of the right form at every site; their tensors are filled in by the caller."""
    for site in conversion.sites:
        _same_operation(model, site)
    for site in sorted(conversion.sites, key=lambda site: site.kind == "gated"):  # units take their children over
        made = _module(model, site, stored, strict)
        for path in (site.path, *site.aliases):
            put(model, path, made)
    unfuse(model)


def _module(model: nn.Module, site: Site, stored: Mapping[str, Tensor], strict: bool) -> nn.Module:
    config, old = site.config, _at(model, site.path)
    if site.kind == "norm":
        native = NativeNorm.rebuild(dict(config["head"]), _below(stored, f"{site.path}.head"))
        assert isinstance(native, NativeNorm)
        weight, bias = (old._parameters.get(name) for name in ("weight", "bias"))
        shape = tuple(int(n) for n in config["shape"])
        return NormSite(native, shape, weight, bias, site.path, strict, bool(config["unit"]))
    if site.kind == "gated":
        product = f"{site.path}.product"
        head = _head(config, _below(stored, f"{product}.head"))
        return rebuilt(old, Layout(**config["layout"]), ProductSite(head, product, strict))  # type: ignore[arg-type]
    head = _head(config, _below(stored, f"{site.path}.head"))
    return ActivationSite(head, str(config["function"]), site.low, site.high, site.path, strict)


def _head(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> CertifiedModule:
    family = str(config["family"])
    if family not in FAMILIES or family not in CertifiedModule.families:
        raise CertificateError(f"unknown family of heads {family!r}; expected one of {', '.join(FAMILIES)}")
    return CertifiedModule.families[family].rebuild(dict(config["config"]), tensors)


def _below(stored: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    found = {name.removeprefix(f"{path}."): t for name, t in stored.items() if name.startswith(f"{path}.")}
    if not found:
        raise CertificateError(f"the file holds no tensors for '{path}'")
    return found


def _at(model: nn.Module, path: str) -> Any:
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name)


def _same_operation(model: nn.Module, site: Site) -> None:
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
        layout = gated_layout(old)
        fits = layout is not None and dataclasses.asdict(layout) == dict(site.config["layout"])
    else:
        function = recognise(old)
        fits = function is not None and function.name == site.operation == site.config["function"]
    if not fits:
        raise CertificateError(f"'{site.path}' of {type(model).__name__} is not the {site.operation} described")


def recertified(model: nn.Module, conversion: Conversion) -> Conversion:
    """The report with the bound of every site computed again; `CertificateError` where a stated one is too small."""
    dtype, sites, wrong = DTYPES[conversion.dtype], [], []
    for site in conversion.sites:
        try:
            bound = _bound(model.get_submodule(site.path), site, dtype)
        except AttnforgeError as error:
            wrong.append(f"  {site.path}: {error}")
            continue
        if bound > site.bound:
            wrong.append(f"  {site.path}: the bound {site.bound:.6e} is stated, only {bound:.6e} can be proved")
        sites.append(dataclasses.replace(site, bound=bound))
    if wrong:
        raise CertificateError("\n".join(["certificates of the sites do not hold:", *wrong]))
    return dataclasses.replace(conversion, sites=tuple(sites))


def _bound(module: nn.Module, site: Site, dtype: torch.dtype) -> float:
    """The certified sup error of a site on its range, from the tensors it holds now."""
    if isinstance(module, NormSite):
        _covers(site, module.head.variance)
        module.head.attach(module.head.recertify())
        return module.site_bound(dtype)[0]
    product = module.product if isinstance(module, GatedUnit) else None
    head = product.head if isinstance(product, ProductSite) else getattr(module, "head", None)
    if not isinstance(head, CertifiedModule):
        raise CertificateError(f"there is no head, but {type(module).__name__}")
    found = head.attach(head.recertify()).bound
    if found is None:
        raise CertificateError("its head has no certificate")
    if isinstance(product, ProductSite):
        _covers(site, head.box["y"])
        sizes = [max(map(abs, head.box[name])) for name in ("x", "y")]
        return handed_on(found, sizes[0] * sizes[1], dtype)
    _covers(site, head.box.intervals()[0])
    function = parse(site.operation)
    if head.certificate.target.partition("(")[0] != function.name.partition("(")[0]:
        raise CertificateError(f"its head computes {head.certificate.target}")
    return handed_on(found, scale_of(function, site.low, site.high), dtype)


def _covers(site: Site, interval: tuple[float, float]) -> None:
    if not (interval[0] <= site.low and site.high <= interval[1]):
        raise CertificateError(
            f"the range [{site.low:g}, {site.high:g}] is stated, its heads are for [{interval[0]:g}, {interval[1]:g}]"
        )
