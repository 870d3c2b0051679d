"""From ranges to heads in their places, one record each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..certify.certificate import upper_text
from ..certify.certified import CertifiedModule
from ..errors import AttnforgeError, PrecisionError
from ..heads import AnchorHead
from ..heads.fast_activation import FastActivation
from ..network import Heads
from .build import Options, activation_head, norm_head, product_head, scale_of, whole_line, widened, widened_ratio
from .find import Found
from .gated import GatedUnit
from .norm import NormSite
from .place import put
from .pointwise import ActivationSite, ProductSite, describe, handed_on, right_everywhere
from .record import Site
from .site import working
from .watch import Seen


def replace(
    model: nn.Module,
    sites: Sequence[Found],
    seen: Mapping[str, Seen],
    options: Options,
    dtype: torch.dtype,
    margin: float,
    variance_margin: float,
    strict: bool,
) -> list[Site]:
    """Build every site's heads, hang them into the model, and say what was built; all failures are told at once."""
    device = next(model.parameters()).device
    records, failed = [], []
    for site in sites:
        try:
            if site.norm is not None:
                made, record = _norm(site, seen[site.path], options, dtype, variance_margin, strict)
            elif site.function is not None:
                made, record = _activation(site, seen[site.path], options, dtype, margin, strict)
            else:
                made, record = _product(site, seen[site.path], options, dtype, margin, strict)
        except AttnforgeError as error:
            failed.append(f"{site.path}: {error}")
            continue
        asked = options.anchors is None and not options.cold and dtype == working(dtype)
        if asked and record.bound > options.eps * record.scale:
            where = f"[{record.low:g}, {record.high:g}]"
            reached = f"reaches {upper_text(record.relative)} of its output's scale on {where}"
            failed.append(f"{site.path}: {record.operation} {reached}, not eps = {options.eps:g} ({dtype})")
            continue
        made = made.to(seen[site.path].device or device)
        if site.layout is not None:
            unit = model.get_submodule(site.path)
            assert isinstance(unit, GatedUnit)
            unit.product = made.train(unit.training)
        else:
            for path in site.paths:
                put(model, path, made)
        records.append(record)
    if failed:
        raise PrecisionError("\n".join(["some sites cannot be built as asked:", *(f"  {line}" for line in failed)]))
    return records


def _activation(
    site: Found, seen: Seen, options: Options, dtype: torch.dtype, margin: float, strict: bool
) -> tuple[nn.Module, Site]:
    function = site.function
    assert function is not None
    known = seen.calls > 0
    low, high = widened(seen.low, seen.high, margin) if known else (seen.low, seen.high)
    low, high = max(low, function.domain.lo), min(high, function.domain.hi)
    scale = scale_of(function, seen.low, seen.high)
    wide = whole_line(low, high) if options.everywhere(function) else (low, high)
    head = activation_head(function, *wide, options.eps * scale, options)
    assert head.bound is not None
    if dtype == working(dtype):  # in half precision the bound is that of rounding the result: it grows with the range
        low, high = wide
    made = ActivationSite(head, function.name, low, high, site.path, strict)
    return made, Site(
        path=site.path,
        operation=function.name,
        level="ffn",
        family=head.family,
        low=low,
        high=high,
        margin=margin if known else 1.0,
        anchors=_anchors(head),
        parameters=sum(p.numel() for p in head.parameters()),
        bound=handed_on(head.bound, scale_of(function, low, high), dtype),
        scale=scale,
        low_seen=seen.low if known else None,
        high_seen=seen.high if known else None,
        kappa=_kappa(head),
        everywhere=right_everywhere(head),
        calls=seen.calls,
        aliases=site.paths[1:],
        config={"function": function.name, **describe(head)},
    )


def _anchors(head: CertifiedModule) -> int:
    """The slots of the largest head: anchors, or the two of a gate."""
    heads = [group for group in head.modules() if isinstance(group, Heads)]
    return max(group.slots + (group.scope == "self") for group in heads)


def _kappa(head: CertifiedModule) -> float | None:
    if isinstance(head, AnchorHead):
        return head.kappa
    return head.table.kappa if isinstance(head, FastActivation) and head.table.anchors > 2 else None


def _norm(
    site: Found, seen: Seen, options: Options, dtype: torch.dtype, margin: float, strict: bool
) -> tuple[nn.Module, Site]:
    norm, module = site.norm, site.target
    assert norm is not None
    low, high = widened_ratio(seen.low, seen.high, margin)
    offset = 2.0 ** math.ceil(math.log2(max(100.0, margin * seen.offset)))
    head = norm_head(math.prod(norm.shape), low, high, norm.eps, norm.kind, offset, options)
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    made = NormSite(head, norm.shape, weight, bias, site.path, strict, norm.unit)
    bound, scale = made.site_bound(dtype)
    return made, Site(
        path=site.path,
        operation=site.operation,
        level="pure",
        family="norm",
        low=low,
        high=high,
        margin=margin,
        anchors=head.heads,
        parameters=sum(p.numel() for p in head.parameters()),
        bound=bound,
        scale=scale,
        low_seen=seen.low,
        high_seen=seen.high,
        kind="norm",
        ranged=made.what,
        calls=seen.calls,
        aliases=site.paths[1:],
        config=made.config(),
    )


def _product(
    site: Found, seen: Seen, options: Options, dtype: torch.dtype, margin: float, strict: bool
) -> tuple[nn.Module, Site]:
    first, second = widened(*seen.other, margin), widened(seen.low, seen.high, margin)
    head = product_head(first, second, options)
    assert head.bound is not None
    assert site.layout is not None
    made = ProductSite(head, f"{site.path}.product", strict)
    largest = [max(abs(low), abs(high)) for low, high in (seen.other, (seen.low, seen.high), first, second)]
    return made, Site(
        path=site.path,
        operation="product",
        level="pure",
        family="product",
        low=second[0],
        high=second[1],
        margin=margin,
        anchors=head.nodes,
        parameters=sum(p.numel() for p in head.parameters()),
        bound=handed_on(head.bound, largest[2] * largest[3], dtype),
        scale=(largest[0] * largest[1]) or 1.0,
        low_seen=seen.low,
        high_seen=seen.high,
        kind="gated",
        ranged="second factor",
        calls=seen.calls,
        aliases=site.paths[1:],
        config={"layout": GatedUnit.config_of(site.layout), **describe(head)},
    )
