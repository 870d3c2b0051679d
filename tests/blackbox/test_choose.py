"""The choice of a route, its reason, and arguments that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnforge import ArgumentError, Box, DomainError, DomainWarning, PrecisionError
from attnforge.blackbox import approximate

SQUARE = Box.cube(-1, 1, shape=2)


def test_the_smallest_route_is_taken_and_says_why() -> None:
    smooth = approximate(lambda x: torch.sin(x[:, 0] * x[:, 1]), SQUARE, eps=1e-4)
    assert smooth.route == "spectral" and smooth.certificate.kind == "calibrated"
    assert "the smallest that reaches 0.0001" in smooth.reason and "additive: reaches" in smooth.reason
    assert "nothing can be certified" in smooth.reason
    sums = approximate(lambda x: torch.sin(3 * x).sum(-1), SQUARE, eps=1e-4)
    assert sums.route == "additive" and sums.size.parameters < approximate(
        lambda x: torch.sin(3 * x).sum(-1), SQUARE, route="spectral", eps=1e-4
    ).size.parameters  # fmt: skip
    proved = approximate(lambda x: torch.sin(3 * x).sum(-1), SQUARE, eps=0.3, lipschitz=4.25)
    assert proved.route == "grid" and proved.certificate.kind == "certified" and "proof" in proved.reason


def test_without_room_for_the_grid_the_word_is_calibrated() -> None:
    net = approximate(lambda x: torch.sin(x).sum(-1), SQUARE, eps=0.01, lipschitz=1.5, memory=20_000)
    assert net.certificate.kind == "calibrated" and net.bound is None and net.route in ("additive", "spectral")
    assert "this grid has" in net.reason and "memory=20 KB" in net.reason


def test_what_no_route_reaches_is_said_with_what_each_does() -> None:
    jump = lambda x: (x[:, 0] > 0.2).double()  # noqa: E731
    with pytest.raises(PrecisionError, match=r"additive: reaches .*spectral: reaches") as caught:
        approximate(jump, SQUARE, eps=0.01, samples=500, memory=40_000)
    assert caught.value.reachable is not None and caught.value.reachable > 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs eps"),
        ({"eps": 0.0}, "eps must be a positive number"),
        ({"eps": float("nan")}, "eps must be a positive number"),
        ({"eps": True}, "eps must be a positive number"),
        ({"eps": 0.1, "route": "gird"}, "did you mean 'grid'"),
        ({"eps": 0.1, "lipschitz": -1.0}, "lipschitz must be"),
        ({"eps": 0.1, "lipschitz": float("inf")}, "lipschitz must be"),
        ({"eps": 0.1, "anchors": 8}, "not both"),
        ({"route": "grid", "anchors": 1}, "anchors must be"),
        ({"route": "grid"}, "needs eps"),
        ({"route": "spectral"}, "needs eps"),
        ({"route": "spectral", "anchors": 3}, "at least 4"),
        ({"route": "additive", "anchors": 3}, "at least 4"),
        ({"route": "spectral", "anchors": 2000}, "evaluations|budget"),
        ({"route": "grid", "anchors": 5, "lipschitz": 9.0, "kappa": 0.3}, "kappa must be at least"),
        ({"route": "ridge", "width": 0}, "width must be"),
        ({"eps": 0.1, "dtype": torch.float16}, "dtype must be"),
        ({"eps": 0.1, "samples": 3}, "samples must be"),
        ({"eps": 0.1, "memory": 0}, "memory must be"),
        ({"eps": 0.1, "batch": 0}, "batch must be"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        approximate(lambda x: x.sum(-1), SQUARE, **arguments)


def test_a_box_is_a_box() -> None:
    with pytest.raises(ArgumentError, match="box must be a Box"):
        approximate(lambda x: x, (-1, 1), eps=0.1)  # type: ignore[arg-type]


def test_inputs_are_guarded() -> None:
    net = approximate(lambda x, y: x * y, Box(x=(0, 1), y=(0, 1)), route="spectral", anchors=6)
    assert net(torch.tensor([[0.5, 0.5]])).shape == (1,) and net(torch.full((2, 3, 2), 0.5)).shape == (2, 3)
    with pytest.warns(DomainWarning, match="'y' reaches 2"):
        net(torch.tensor([[0.5, 2.0]]))
    with pytest.raises(DomainError):
        net(torch.tensor([[0.5, float("nan")]]))
    with pytest.raises(ArgumentError, match="shape"):
        net(torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="one input tensor"):
        net(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ArgumentError, match="float32"):
        net(torch.zeros(1, 2, dtype=torch.float64))
    strict = approximate(lambda x, y: x * y, Box(x=(0, 1), y=(0, 1)), route="spectral", anchors=6, strict=True)
    with pytest.raises(DomainError):
        strict(torch.tensor([[0.5, 2.0]]))


def test_what_is_out_of_reach_is_refused_after_a_short_fit() -> None:
    """Ten variables that all meet: no route is near, and that is said without fitting wide expansions."""
    with pytest.raises(PrecisionError, match=r"ridge: a short fit stays at \d") as refused:
        approximate(lambda x: torch.sin(3 * x * x.roll(1, -1)).sum(-1), Box.cube(-1, 1, shape=10), eps=1e-3)
    assert refused.value.reachable is not None and refused.value.reachable > 1
