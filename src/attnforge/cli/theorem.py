"""`attnforge theorem`: the constructions of the theorems, with bounds and pictures; `theorem plan`: their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError, closest
from .common import (
    COUNT,
    NUMBER,
    PICTURES,
    AsJson,
    DType,
    Force,
    Shipped,
    box,
    number,
    refuse_overwriting,
    say,
    say_certificate,
    say_json,
    waiting,
)

if TYPE_CHECKING:
    import torch

    from .. import theorems

SCALAR = ("ramp", "ramp_heads", "relu", "leaky_relu", "hard_tanh", "clipped_relu")
GRID = ("two_layer", "attention_then_softmax", "max_affine")
NAMES = (*SCALAR, *GRID, "plan")
POINTS = 512  # at which the largest error is looked for: a measurement beside the bound, not a proof


class FormName(StrEnum):
    """The paper's form, or the token-wise one."""

    paper = "paper"
    tokens = "tokens"


class RampVariant(StrEnum):
    """Temperatures of the ramp."""

    cold = "cold"
    warm = "warm"
    gate = "gate"


def vector(text: str) -> list[float]:
    """Numbers between commas.

    >>> vector("1, -2,0.5")
    [1.0, -2.0, 0.5]
    """
    return [number(part.strip()) for part in text.split(",")]


def theorem(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(NAMES)}.")],
    w: Annotated[list[float] | None, typer.Option(parser=vector, metavar="NUMBERS", help="w, such as 1,-2; 1.")] = None,
    t: Annotated[float | None, typer.Option(help="t of w.x + t.", **NUMBER)] = None,
    a: Annotated[float | None, typer.Option(help="Lower end of the ramp.", **NUMBER)] = None,
    b: Annotated[float | None, typer.Option(help="Upper end of the ramp.", **NUMBER)] = None,
    anchors: Annotated[int | None, typer.Option(help="Anchors p of one head.", **COUNT)] = None,
    heads: Annotated[int | None, typer.Option(help="Heads H of ramp_heads.", **COUNT)] = None,
    tokens: Annotated[int | None, typer.Option(help="Keys of each head of ramp_heads.", **COUNT)] = None,
    eps0: Annotated[float | None, typer.Option(help="Weight that may go astray; 1e-9.", **NUMBER)] = None,
    radius: Annotated[float | None, typer.Option(help="Largest |x|.", **NUMBER)] = None,
    slope: Annotated[float | None, typer.Option(help="Slope of leaky_relu below 0.", **NUMBER)] = None,
    cap: Annotated[float | None, typer.Option(help="Upper end of clipped_relu.", **NUMBER)] = None,
    kappa: Annotated[float | None, typer.Option(help="Inverse temperature, scale free.", **NUMBER)] = None,
    form: Annotated[FormName | None, typer.Option(help="Of the paper, or token-wise.")] = None,
    variant: Annotated[RampVariant | None, typer.Option(help="Temperature of a ramp.")] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal", help="Anchors as tokens that come first; token-wise.")
    ] = None,
    formula: Annotated[
        list[str] | None, typer.Option(metavar="FORMULA", help="f, one formula for each token's output.")
    ] = None,
    boxes: Annotated[
        list[str] | None, typer.Option("--box", metavar="NAME=LO:HI", help="A token of one channel and its interval.")
    ] = None,
    spacing: Annotated[float | None, typer.Option(help="Spacing of the grid.", **NUMBER)] = None,
    cells: Annotated[int | None, typer.Option(help="Cells of max_affine.", **COUNT)] = None,
    lipschitz: Annotated[
        float | None, typer.Option(help="Lipschitz constant of f, for a certificate.", **NUMBER)
    ] = None,
    eps: Annotated[float | None, typer.Option(help="plan: the wanted error.", **NUMBER)] = None,
    budget: Annotated[int | None, typer.Option(help="plan: how many parameters there may be.", **COUNT)] = None,
    of: Annotated[str | None, typer.Option("--theorem", metavar="NAME", help="plan: for which theorem; ramp.")] = None,
    d: Annotated[int | None, typer.Option("--d", help="plan: channels of x.", **COUNT)] = None,
    dim: Annotated[int | None, typer.Option(help="plan: dimension n*d of the box.", **COUNT)] = None,
    side: Annotated[float | None, typer.Option(help="plan: side of the box.", **NUMBER)] = None,
    dtype: Shipped = DType.float64,
    plot: Annotated[
        Path | None, typer.Option(metavar="[FILE]", help="Draw it: .png, .svg or .pdf; NAME.png without a file.")
    ] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Build the network of a theorem and print its bound, beside the paper's; or plan its size.

    \b
    attnforge theorem ramp --w 1,-2 --a -1 --b 1 --anchors 33 --plot ramp.png
    attnforge theorem two_layer --formula "x*y" --formula "x-y" --box x=0:1 --box y=0:1 --spacing 0.1 --lipschitz 2
    attnforge theorem plan --eps 1e-3 --a -25 --b 25
    """
    from .. import theorems

    name = name.replace("-", "_")
    if name not in NAMES:
        raise ArgumentError(f"there is no theorem '{name}'{closest(name, NAMES)}; known are {', '.join(NAMES)}")
    given: dict[str, Any] = {
        "w": w, "t": t, "a": a, "b": b, "anchors": anchors, "heads": heads, "tokens": tokens, "eps0": eps0,
        "radius": radius, "slope": slope, "cap": cap, "kappa": kappa, "form": form and form.value,
        "variant": variant and variant.value, "causal": causal, "spacing": spacing, "cells": cells,
        "lipschitz": lipschitz, "eps": eps, "budget": budget, "theorem": of, "d": d, "dim": dim, "side": side,
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    if name == "plan":
        _nothing_else(given, theorems.plan, name, formula, boxes, plot)
        found = theorems.plan(dtype=dtype.torch, **given)
        say_json(found.to_json()) if as_json else say(str(found))
        return
    refuse_overwriting({PICTURES: plot}, force)
    build: Callable[..., theorems.Construction] = getattr(theorems, name)
    with waiting(f"building {name}"):
        built = _scalar(name, build, given, dtype.torch, formula, boxes) if name in SCALAR else (
            _on_a_box(name, build, given, dtype.torch, formula or [], boxes or []))  # fmt: skip
    written = None
    if plot is not None:
        with waiting("drawing"):
            written = built.plot(plot, force=force)
    if as_json:
        say_json(description(name, built))
        return
    size = built.size
    say(f"{built.theorem}, {built.form} form\n")
    say_certificate(built.certificate)
    if built.paper_bound is not None:
        say(f"the paper states {built.paper_bound:.4g}, in real arithmetic")
    say(f"largest error measured {built.measure(POINTS).largest:.3e}")
    say(f"layers {size.layers}, heads {size.heads}, anchors {size.anchors}, parameters {size.parameters}, "
        f"largest |logit| {size.logit:.3g}")  # fmt: skip
    if written is not None:
        say(f"wrote {written}")


def description(name: str, built: theorems.Construction) -> dict[str, Any]:
    """What --json prints."""
    return {
        "name": name, "theorem": built.theorem, "form": built.form, "bound": built.bound,
        "paper_bound": built.paper_bound, "bound_terms": built.bound_terms, "size": built.size.to_json(),
        "measured": built.measure(POINTS).largest, "certificate": built.certificate.to_json(),
    }  # fmt: skip


def _nothing_else(given: dict[str, Any], build: Callable[..., Any], name: str, *others: Any) -> None:
    """Options that a construction does not take are mistakes, not noise."""
    from .. import theorems

    known = set(inspect.signature(build).parameters)
    if known & {"options"}:
        known |= set(inspect.signature(theorems.ramp).parameters) - {"a", "b"}
    strange = [f"--{key}" for key in given if key not in known]
    if strange or any(others):
        strange += ["--formula, --box or --plot"] if any(others) else []
        raise ArgumentError(f"'{name}' does not take {', '.join(strange)}")


def _scalar(
    name: str, build: Callable[..., theorems.Construction], given: dict[str, Any], dtype: torch.dtype, *others: Any
) -> theorems.Construction:
    import torch

    _nothing_else(given, build, name, *others)
    given["w"] = torch.tensor(given.get("w", [1.0]), dtype=dtype)
    given.setdefault("t", 0.0)
    needed = [
        key for key, p in inspect.signature(build).parameters.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and key not in given
    ]  # fmt: skip
    if needed:
        raise ArgumentError(f"'{name}' needs {', '.join(f'--{key}' for key in needed)}")
    return build(**given)


def _on_a_box(
    name: str,
    build: Callable[..., theorems.Construction],
    given: dict[str, Any],
    dtype: torch.dtype,
    formulas: list[str],
    boxes: list[str],
) -> theorems.Construction:
    import torch

    from ..box import Box
    from ..frontends.formula.program import capture_formula
    from ..programs.interpret import values

    _nothing_else(given, build, name)
    if not formulas or not boxes:
        raise ArgumentError(
            f"'{name}' needs --formula, one for each token's output, and --box name=lo:hi for each token"
        )
    named = box(boxes)
    program = capture_formula(list(formulas), named)
    sides = torch.tensor(named.intervals(), dtype=torch.float64)
    if name == "max_affine":
        return build(lambda x: values(program, x), Box.between(sides[:, 0], sides[:, 1]), dtype=dtype, **given)
    if len(formulas) != named.dim:
        raise ArgumentError(
            f"a map of {named.dim} tokens needs {named.dim} formulas, one per token, got {len(formulas)}"
        )
    if "spacing" not in given:
        raise ArgumentError(f"'{name}' needs --spacing")

    def sequences(X: torch.Tensor) -> torch.Tensor:
        return values(program, X[..., 0]).unsqueeze(-1)

    return build(sequences, Box.between(sides[:, :1], sides[:, 1:]), dtype=dtype, **given)
