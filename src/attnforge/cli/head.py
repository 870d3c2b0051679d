"""`attnforge head`: one function of one scalar becomes one head; its certificate is shown, drawn, saved. And
`attnforge functions`: which functions there are, and where each is defined."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    COUNT,
    NUMBER,
    PICTURES,
    AsJson,
    DType,
    Force,
    Shipped,
    refuse_overwriting,
    say,
    say_certificate,
    say_filled,
    say_json,
    table,
    waiting,
)

if TYPE_CHECKING:
    from ..functions.registry import Domain
    from ..heads.anchor.head import AnchorHead
    from ..heads.chain.head import ChainHead
    from ..heads.gate.head import GateHead

EXAMPLES = ("power(2.5)", "leaky_relu(0.2)", "elu(1.5)", "piecewise_linear([-1, 0, 1], [0, 1, 0])")

#: What formulas can use besides the functions of one number.
FORMULAS = {
    "atan2": "atan2(y, x), the angle of (x, y), where it does not jump",
    "cbrt": "cbrt(x), the real cube root",
    "ceil": "ceil(x), where it is constant on the box",
    "clip": "clip(x, lo, hi)",
    "cot": "cot(x) = 1/tan(x)",
    "coth": "coth(x) = 1/tanh(x)",
    "csc": "csc(x) = 1/sin(x)",
    "csch": "csch(x) = 1/sinh(x)",
    "degrees": "degrees(x) = 180*x/pi",
    "floor": "floor(x), where it is constant on the box",
    "heaviside": "heaviside(x), where it is constant on the box",
    "hypot": "hypot(x, y, ...) = sqrt(x**2 + y**2 + ...)",
    "log": "log(x), or log(x, base)",
    "logaddexp": "logaddexp(x, y) = log(exp(x) + exp(y))",
    "max": "max(x, y, ...)",
    "min": "min(x, y, ...)",
    "mod": "mod(x, y), where the whole quotient is constant on the box",
    "pow": "pow(x, y) = x**y",
    "radians": "radians(x) = pi*x/180",
    "round": "round(x), where it is constant on the box",
    "sec": "sec(x) = 1/cos(x)",
    "sech": "sech(x) = 1/cosh(x)",
    "sign": "sign(x), where it is constant on the box",
    "step": "step(x), 1 for x >= 0, where it is constant on the box",
    "trunc": "trunc(x), where it is constant on the box",
}


def functions(
    as_json: AsJson = False,
) -> None:
    """List the registered functions with their domains."""
    from ..expressions.special import ALIASES
    from ..functions import registry

    found = [registry.get(name) for name in registry.names()]
    if as_json:
        columns = ((f.name, domain_text(f.domain), f.knots, f.potentials) for f in found)
        listed: dict[str, Any] = {name: {"domain": d, "kinks": k, "potentials": p} for name, d, k, p in columns}
        for name, meaning in FORMULAS.items():
            nothing: dict[str, Any] = {"domain": None, "kinks": [], "potentials": []}  # of one number it is not
            listed[name] = {**listed.get(name, nothing), "in formulas": meaning}
        say_json(listed)
        return
    rows = [
        (f.name, domain_text(f.domain), ", ".join(f"{k:g}" for k in f.knots) or "-", ", ".join(f.potentials))
        for f in found
    ]
    table(("function", "defined for", "kinks at", "potentials"), rows)
    say()
    say_filled(f"and, with arguments: {', '.join(EXAMPLES)}")
    say("\nin formulas also:")
    table(("function", "which is"), list(FORMULAS.items()))
    say()
    say_filled(f"other spellings: {', '.join(f'{other} = {name}' for other, name in sorted(ALIASES.items()))}")


def domain_text(domain: Domain) -> str:
    """Where a function is defined, in words.

    >>> from attnforge.functions import registry
    >>> domain_text(registry.get("log").domain), domain_text(registry.get("asin").domain)
    ('y > 0', '-1 <= y <= 1')
    """
    text = "y"
    if math.isfinite(domain.lo):
        text = f"y {'>=' if domain.lo_closed else '>'} {domain.lo:g}"
        if math.isfinite(domain.hi):
            text = f"{domain.lo:g} {'<=' if domain.lo_closed else '<'} y"
    if math.isfinite(domain.hi):
        text += f" {'<=' if domain.hi_closed else '<'} {domain.hi:g}"
    poles = " and ".join(f"{p:g}" for p in domain.poles)
    if domain.period is not None:
        poles += f" + k * {domain.period:g}"
    if not poles:
        return "all y" if text == "y" else text
    return f"y != {poles}" if text == "y" else f"{text}, y != {poles}"


class PotentialName(StrEnum):
    """The potentials an anchor head can be asked to use."""

    auto = "auto"
    square = "square"
    log = "log"
    atan = "atan"
    ends = "ends"


def head(
    function: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="A name such as gelu or 'power(-1.5)': attnforge functions")
    ],
    lo: Annotated[float, typer.Option(help="Where the interval begins.", **NUMBER)],
    hi: Annotated[float, typer.Option(help="Where it ends.", **NUMBER)],
    anchors: Annotated[int | None, typer.Option(help="How many anchors; 32 when --eps is not given.", **COUNT)] = None,
    eps: Annotated[float | None, typer.Option(help="Use as few anchors as certify this error.", **NUMBER)] = None,
    dtype: Shipped = DType.float32,
    relative: Annotated[bool, typer.Option("--relative", help="Bound |head - f| / |f| instead.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Select the nearest anchor, as in the paper.")] = False,
    potential: Annotated[PotentialName, typer.Option(help="How anchors are spaced.")] = PotentialName.auto,
    kappa: Annotated[float | None, typer.Option(help="Inverse temperature, scale free.", **NUMBER)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the head: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the head as .safetensors.")
    ] = None,
    force: Force = False,
) -> None:
    """Fit one softmax head to FUNCTION on [lo, hi] and print its certificate.

    Functions with kinks (relu, abs, ...) become gate heads, sharp up to rounding, or gates followed by a product or by
    tables (hardswish, elu, ...), unless --anchors, --relative, --cold, --potential or --kappa ask for an anchor head.

    \b
    attnforge head gelu --lo -8 --hi 8 --eps 1e-6 --dtype float64 --plot gelu.png
    """
    from ..functions.registry import get
    from ..heads.anchor.head import AnchorHead
    from ..heads.build import head_for
    from ..heads.chain.head import ChainHead
    from ..heads.gate.head import GateHead

    refuse_overwriting({".safetensors": output, PICTURES: plot}, force)
    name = get(function).name
    asked: dict[str, Any] = {
        "anchors": anchors,
        "relative": relative or None,
        "temperature": "cold" if cold else None,
        "potential": None if potential is PotentialName.auto else potential.value,
        "kappa": kappa,
    }
    anchored = {option: value for option, value in asked.items() if value is not None}
    with waiting(f"fitting {name}"):
        built = head_for(name, lo, hi, eps, dtype.torch, **anchored)
    assert isinstance(built, (AnchorHead, GateHead, ChainHead))
    written: list[Path] = []
    if output is not None:
        built.save(output, force=force)
        written.append(output)
    if plot is not None:
        from ..charts.drawing import save
        from ..report.heads import figure_of

        with waiting("drawing"):
            written.append(save(figure_of(built), plot, force=force))
    if as_json:
        say_json(description(built))
        return
    say(f"{summary(built, name)}\n")
    say_certificate(built.certificate)
    if built.measured is not None:
        say(f"largest error measured {built.measured:.3e}")
    for path in written:
        say(f"wrote {path}")


def summary(built: AnchorHead | GateHead | ChainHead, name: str) -> str:
    """One line on what was built for the function of this name."""
    from ..heads.chain.head import ChainHead
    from ..heads.gate.head import GateHead

    where = f"on [{built.lo:g}, {built.hi:g}]"
    dtype = built.certificate.dtype
    if isinstance(built, GateHead):
        sharp = "exact" if built.sharpness is None else f"sharpness {built.sharpness:.4g}"
        kind = "a gate head" if built.name == name else f"a gate head ({built.name})"
        return f"{name} {where} by {kind}: {sharp}, {dtype}"
    if isinstance(built, ChainHead):
        return f"{name} {where} by a chain of heads: {', '.join(built.heads)}, {dtype}"
    shape = f"{built.size} anchors, potential {built.potential}, kappa {built.kappa:.3g}"
    return f"{name} {where} by an anchor head: {shape}, {dtype}"


def description(built: AnchorHead | GateHead | ChainHead) -> dict[str, Any]:
    """What --json prints."""
    from ..heads.chain.head import ChainHead
    from ..heads.gate.head import GateHead

    certificate = built.certificate
    shared = {
        "function": certificate.target,
        "family": built.family,
        "interval": [built.lo, built.hi],
        "dtype": certificate.dtype,
        "relative": certificate.relative,
        "bound": certificate.bound,
        "measured": certificate.measured,
        "certificate": certificate.to_json(),
    }
    none = {"anchors": 0, "kappa": None, "potential": None}
    if isinstance(built, GateHead):
        return {**shared, **none, "sharpness": built.sharpness}
    if isinstance(built, ChainHead):
        return {**shared, **none, "anchors": built.anchors, "heads": list(built.heads)}
    return {
        **shared,
        "anchors": built.size,
        "kappa": built.kappa,
        "potential": str(built.potential),
        "places": built.anchors.tolist(),
        "values": built.values.tolist(),
    }
