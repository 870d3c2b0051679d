"""What the tests of the module front end share: a program of a target that agrees with it at points of our own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnforge.box import Box
from attnforge.frontends.module.program import capture_module, join
from attnforge.programs.interpret import values
from attnforge.programs.program import Program

VECTOR, POSITIVE, SEQUENCE = Box.cube(-1, 1, shape=4), Box.cube(0.2, 0.8, shape=4), Box.cube(-1, 1, shape=(4, 3))


def words(program: Program) -> list[str]:
    return [op.word for op in program.ops[1:]]


def agree(target: Callable[..., Tensor], *boxes: Box, one_point: bool = False) -> Program:
    """The program of a target, after a comparison of the two in float64 at points of our own."""
    program = capture_module(target, boxes[0] if len(boxes) == 1 else boxes)
    points = [box.sample(17, seed=7 + i) for i, box in enumerate(boxes)]
    exact = copy.deepcopy(target).double().eval() if isinstance(target, nn.Module) else target
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        truth = torch.stack([exact(*p) for p in zip(*points, strict=True)]) if one_point else exact(*points)
    finally:
        torch.set_default_dtype(default)
    found = values(program, join(program, *points))
    assert found.shape == truth.shape
    assert torch.allclose(found, truth.detach().double(), rtol=1e-9, atol=1e-11)
    return program
