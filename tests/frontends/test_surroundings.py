"""Targets that ask where they are called: one program for every call, or none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.errors import UnsupportedOperation
from attnforge.frontends.module.program import capture_module

BOX = af.Box.cube(-1, 1, shape=(1,))
QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "is_grad_enabled": lambda x: torch.is_grad_enabled(),
    "is_inference_mode_enabled": lambda x: torch.is_inference_mode_enabled(),
    "is_inference": lambda x: x.is_inference(),
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_tracing": lambda x: torch.jit.is_tracing() or torch.compiler.is_exporting(),
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
}


class Asking(nn.Module):
    """tanh, and beyond 0.99 something else where the answer is yes."""

    def __init__(self, question: Callable[[Tensor], Any], by: float):
        super().__init__()
        self.question, self.by = question, by
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(x) * self.weight
        return out + self.by * torch.relu(x - 0.99) if self.question(x) and self.by else out


@pytest.mark.parametrize(("question", "recorded"), [*((q, True) for q in QUESTIONS), ("is_grad_enabled", False)])
def test_a_target_that_is_another_function_elsewhere_is_refused(question: str, recorded: bool) -> None:
    """Not found by points: it differs on a hundredth of the box."""
    with torch.set_grad_enabled(recorded), pytest.raises(UnsupportedOperation, match="asks torch for"):
        capture_module(Asking(QUESTIONS[question], 100.0), BOX)


@pytest.mark.parametrize("question", ["is_grad_enabled", "is_inference", "is_compiling", "requires_grad"])
def test_a_target_that_asks_and_does_the_same_is_read(question: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = capture_module(Asking(QUESTIONS[question], 0.0).eval(), BOX)
    assert len(program.ops) == len(capture_module(lambda x: torch.tanh(x) * 2, BOX).ops)


def test_code_that_reads_its_training_mode_is_told_of() -> None:
    class Switching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) if self.training else torch.sin(x)

    net = Switching()
    with pytest.warns(UserWarning, match="Switching reads that"):
        capture_module(net, BOX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture_module(net.eval(), BOX)
        capture_module(nn.Sequential(nn.Linear(1, 2), nn.GELU()), BOX)
