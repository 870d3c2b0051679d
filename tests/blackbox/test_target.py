"""How black boxes are called, what they may return, and evaluation that can be interrupted and gone on with."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attnforge import ArgumentError, Box
from attnforge.blackbox import approximate, target
from attnforge.blackbox.target import Target

SQUARE = Box.cube(-1, 1, shape=2)
NAMED = Box(x=(-1, 1), y=(0, 2))


def test_tensors_arrays_columns_and_modules_are_all_understood() -> None:
    points = NAMED.sample(5).numpy()
    wanted = np.sin(points[:, 0]) * points[:, 1]
    boxes: list[tuple[Callable[..., Any], Box]] = [
        (lambda x: torch.sin(x[:, 0]) * x[:, 1], SQUARE),
        (lambda x: np.sin(x[:, 0]) * x[:, 1], SQUARE),
        (lambda x, y: np.sin(x) * y, NAMED),
        (lambda x, y: torch.sin(x) * y, NAMED),
        (lambda rows: torch.sin(rows[:, 0]) * rows[:, 1], NAMED),
        (lambda x, y, scale=1.0: scale * torch.sin(x) * y, NAMED),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for f, box in boxes:
            assert np.abs(Target(f, box)(points)[:, 0] - wanted).max() < 1e-15
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    found = Target(net, SQUARE)
    assert found.dtype == torch.float32 and found.output_shape == (3,) and found.unit == 2.0**-24
    wrapped = Target(lambda x: net(x), SQUARE)
    assert wrapped.dtype == torch.float32 and np.array_equal(wrapped(points), found(points))


def test_one_name_and_shapes() -> None:
    assert Target(lambda x: x**2, Box(x=(0, 1))).output_shape == ()
    assert Target(lambda rows: rows**2, Box(x=(0, 1))).output_shape == (1,)
    assert Target(lambda x: x, Box.cube(0, 1, shape=(3, 2))).output_shape == (3, 2)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: x.sum(), "one row for each"),
        (lambda x: x[:2].sum(-1), "one row for each"),
        (lambda x: 1.0, "tensor or an array"),
        (lambda x: [1.0] * len(x), "tensor or an array"),
        (lambda x: x[:, 0] > 0, "real numbers"),
        (lambda x: x[:, :0], "at least one number"),
        (lambda x: x[:, 7], "must accept"),
        (lambda x, y, z: x, "must accept"),
        (lambda x: x[:, 0] * float("nan"), "finite"),
        (lambda x: torch.log(x[:, 0]), "finite"),
        (lambda x: x if len(x) < 10 else x[:, :1], "as it did before"),
        ("sin", "callable"),
    ],
)
def test_what_is_no_black_box_is_refused(f: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        approximate(f, SQUARE, eps=0.1)


def test_nan_names_the_point() -> None:
    with pytest.raises(ArgumentError, match=r"nan.*at \["):
        approximate(lambda x: torch.where(x[:, 0] > 0.999, torch.nan, x[:, 0]), SQUARE, route="grid", anchors=9)


class Interrupted:
    """A function that is interrupted after some calls."""

    def __init__(self, calls: int):
        self.calls, self.points = calls, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        self.points += len(x)
        return torch.sin(3 * x).sum(-1)


def test_an_interrupted_grid_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "values.npz"
    arguments: dict[str, Any] = {"route": "grid", "anchors": 60, "lipschitz": 4.3, "resume": path, "batch": 200}
    with pytest.raises(KeyboardInterrupt):
        approximate(Interrupted(50), SQUARE, **arguments)
    with np.load(path, allow_pickle=False) as file:
        kept = sum(len(file[name]) for name in file.files)
    again = Interrupted(10**9)
    net = approximate(again, SQUARE, **arguments)
    fresh = Interrupted(10**9)
    whole = approximate(fresh, SQUARE, **{**arguments, "resume": None})
    assert again.points <= fresh.points - kept + 100
    assert torch.equal(net(net.example_input()[0]), whole(net.example_input()[0])) and net.bound == whole.bound
    third = Interrupted(10**9)
    approximate(third, SQUARE, **arguments)
    assert third.points < fresh.points / 2


def test_a_file_of_another_function_or_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values.npz"
    approximate(lambda x: x.sum(-1), SQUARE, route="grid", anchors=9, resume=path)
    with pytest.raises(ArgumentError, match="another function"):
        approximate(lambda x: x.prod(-1), SQUARE, route="grid", anchors=9, resume=path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ArgumentError, match="file of values"):
        approximate(lambda x: x.sum(-1), SQUARE, route="grid", anchors=9, resume=path)
    with pytest.raises(ArgumentError, match="folder"):
        approximate(lambda x: x.sum(-1), SQUARE, route="grid", anchors=9, resume=tmp_path / "none" / "values.npz")
    np.savez(path, values=np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ArgumentError, match="file of values"):
        approximate(lambda x: x.sum(-1), SQUARE, route="grid", anchors=9, resume=path)


class Terminal(io.StringIO):
    """A terminal that remembers what is written to it."""

    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    f = lambda x: x.sum(-1)  # noqa: E731
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    approximate(f, SQUARE, route="grid", anchors=30, batch=100)
    assert screen.getvalue() == "", "nobody waited"
    monkeypatch.setattr(target, "PATIENCE", -1.0)
    approximate(f, SQUARE, route="grid", anchors=30, batch=100, progress=False)
    assert screen.getvalue() == ""
    approximate(f, SQUARE, route="grid", anchors=30, batch=100)
    assert "f on 900 grid points" in screen.getvalue()


def test_progress_is_told_to_a_caller() -> None:
    seen: list[tuple[str, int, int]] = []
    approximate(
        lambda x: x.sum(-1), SQUARE, route="grid", anchors=30, batch=400, progress=lambda *said: seen.append(said)
    )
    assert [done for label, done, count in seen if count == 900] == [400, 800, 900]
