"""The compiler on one page: capture, enclose, plan, lower, assemble, certify."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from .box import Box
from .build import Task, Tolerance, build
from .certify.split import FIRST, outward_cells
from .compiled import CompiledNetwork
from .errors import ArgumentError, DomainError
from .heads.threads import one_thread
from .ir.enclose import Range, ranges
from .ir.positions import prepared
from .ir.program import Program
from .progress import stages
from .purity import structural

GRIDS = (FIRST, 16 * FIRST, 256 * FIRST)  # cells for the ranges heads are built for; the certificate starts from them
DTYPES = (torch.float32, torch.float64)
Capture = Callable[[], Program]


def compile(
    target: Any,
    box: Box | tuple[Box, ...],
    eps: float | None = None,
    *,
    rtol: float = 0.0,
    dtype: torch.dtype = torch.float32,
    strict: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CompiledNetwork:
    """An attention-only network for a target, with |network - target| <= eps + rtol |target| certified on the box.

    `target` is a formula, a list of formulas (several outputs, last dimension), a sympy expression, a Python
    function of
    numbers (with a named box), or a module or function of tensors (captured with torch.export); `box` bounds its
    input, a tuple of
    boxes the inputs of a function of several tensors. `dtype` is what ships and what the certificate is for. If the
    tolerance cannot be proved, `PrecisionError` says what can be.

    >>> net = compile("sin(x*y) + exp(-x**2)/y", Box(x=(-1, 1), y=(0.5, 2)), eps=1e-3)
    >>> net.certificate.kind, net.bound <= 1e-3, net(torch.tensor([[0.5, 1.0]])).shape
    ('certified', True, torch.Size([1]))
    """
    tolerance = tolerance_of(eps, rtol, dtype)
    boxes = box if isinstance(box, tuple) else (box,)
    with stages(progress) as stage, one_thread():
        stage("capture")
        captures = capture(target, boxes)
        tasks = [partial(enclose, each, tolerance, boxes if len(boxes) > 1 else (), stage) for each in captures]
        net = build(tasks, stage)  # plan, lower, assemble, certify
    structural(net.network)
    net.strict = strict
    return net


def compile_program(program: Program, eps: float, dtype: torch.dtype = torch.float32) -> CompiledNetwork:
    """The network of a program: `compile` without its first stage."""
    with stages() as stage, one_thread():
        return build([partial(enclose, lambda: program, tolerance_of(eps, 0.0, dtype), (), stage)], stage)


def capture(target: Any, boxes: tuple[Box, ...]) -> list[Capture]:
    """The ways in which a target can be written as a program, each made when it is wanted."""
    if not boxes or not all(isinstance(b, Box) for b in boxes):
        raise ArgumentError(f"box must be a Box, or a tuple of boxes for a function of several tensors, got {boxes!r}")
    tensors = isinstance(target, nn.Module) or (callable(target) and boxes[0].names is None)
    if isinstance(target, (str, list)) or not tensors:
        from .frontends.formula import lower_formula

        if len(boxes) != 1:
            raise ArgumentError("a formula has one box, with an interval for each variable")
        return [partial(lower_formula, target, boxes[0], style) for style in ("product", "log")]
    from .frontends.module import lower_module

    return [partial(lower_module, target, boxes if len(boxes) > 1 else boxes[0])]


def enclose(make: Capture, tolerance: Tolerance, boxes: tuple[Box, ...], stage: Callable[[str], None]) -> Task:
    """The ranges of all values, on a grid fine enough that every one is finite."""
    program = prepared(make())
    stage("enclose")
    for grid in GRIDS:
        with np.errstate(invalid="ignore", over="ignore"):
            found = ranges(program, *outward_cells(program, grid, tolerance.dtype))
        endless = [i for i, r in enumerate(found) if not _finite(r)]
        if not endless:
            return Task(program, found, grid, tolerance, boxes)
    name = program.sites[endless[0]] or program.ops[endless[0]].word
    raise DomainError(
        f"'{name}' cannot be shown to be bounded on {program.box!r}: its argument may come too close to a singularity; "
        "choose a smaller box"
    )


def _finite(r: Range) -> bool:
    return bool(np.isfinite(r.low).all() and np.isfinite(r.high).all())


def tolerance_of(eps: float | None, rtol: float, dtype: torch.dtype) -> Tolerance:
    """The tolerance that was asked for, or an error that names the argument."""
    for name, value, positive in (("eps", eps, not rtol), ("rtol", rtol, False)):
        if value is None and name == "eps" and rtol:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is None or not number or value < 0 or (positive and value == 0):
            raise ArgumentError(f"{name} must be a {'positive' if positive else 'non-negative'} number, got {value!r}")
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
    return Tolerance(float(eps or 0.0), float(rtol), dtype)
