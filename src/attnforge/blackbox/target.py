"""`Target`: a black box, evaluated in batches, checked, and remembered in a file when asked to.

A black box is any callable on batches. It gets a tensor or an array of shape (batch, *box.shape), or one column for
each name of a named box, and gives back one number or one array of numbers for each point.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import require_features, whole
from ..box import Box
from ..certificates.rounding import UNIT
from ..dtypes import Array
from ..errors import ArgumentError
from ..progress import PATIENCE
from ..saving import write_whole

Function = Callable[..., Any]
Progress = Callable[[str, int, int], None]  # gets a label, how many points are done, and of how many
VALUE_ULPS = 4.0  # roundoffs that a value may be from the function it stands for: what certificates say they assume
SAVE_EVERY = 10.0  # seconds between two writes of the file of values: what an interruption may cost
FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, DeprecationWarning)


class Target:
    """A black box on a box: finds out how it wants to be called, evaluates it, refuses what is no number.

    >>> target = Target(lambda x, y: np.sin(x) * y, Box(x=(0, 1), y=(0, 1)))
    >>> target(np.array([[0.0, 1.0], [0.5, 1.0]])).shape, target.output_shape
    ((2, 1), ())
    """

    def __init__(self, f: Function, box: Box, name: str | None = None, resume: str | Path | None = None,
                 batch: int = 4096, progress: bool | Progress = True):  # fmt: skip
        if not callable(f) and callable(getattr(f, "predict", None)):
            f, name = f.predict, name or type(f).__name__  # scikit-learn's regressors, and what is like them
        if not callable(f):
            raise ArgumentError(f"f must be a callable on batches of points, got {type(f).__name__}")
        if not isinstance(box, Box):
            raise ArgumentError(f"box must be an attnforge.Box, got {type(box).__name__}")
        whole("batch", batch, 1)
        require_features(getattr(f, "__self__", f), box.names)
        self.f, self.box, self.batch, self.progress = f, box, batch, progress
        self.name = name or getattr(f, "__name__", "") or type(f).__name__
        self.columns = _takes_columns(f, box)
        self.store = ValueFile(resume) if resume is not None else None
        self.evaluations = 0
        self.output_shape: tuple[int, ...] | None = None
        self.dtype = torch.float64
        self._call: Callable[[Array], Array] = self._probe()

    @property
    def outputs(self) -> int:
        """How many numbers belong to one point."""
        return math.prod(self.output_shape or ())

    @property
    def unit(self) -> float:
        """The roundoff of the dtype that the black box answers in."""
        return UNIT.get(self.dtype, 2.0**-53)

    def __call__(self, points: Array, label: str = "evaluating") -> Array:
        """The values at points of shape (count, dim), float64, shape (count, outputs)."""
        return self.table(len(points), lambda low, high: points[low:high], label, digest(points))

    def table(self, count: int, points: Callable[[int, int], Array], label: str, key: str) -> Array:
        """The values at `count` points, made batch by batch; `key` names them in the file of values.

        An interruption keeps what was evaluated, if there is a file, and goes on to the caller.
        """
        out = np.empty((count, self.outputs))
        done = 0
        name = f"{key}-{self.outputs}"
        if self.store is not None:
            known = self.store.read(name)
            done = min(len(known), count) if known.shape[1:] == (self.outputs,) else 0
            out[:done] = known[:done].reshape(done, self.outputs)
            self._compare(points(0, min(done, 8)), out[: min(done, 8)])
        saved = time.monotonic()
        with _bar(label, count, self.progress) as advance:
            try:
                while done < count:
                    high = min(done + self.batch, count)
                    out[done:high] = self.fresh(points(done, high))
                    self.evaluations += high - done
                    done = high
                    advance(done)
                    if self.store is not None and time.monotonic() - saved > SAVE_EVERY:
                        self.store.write(name, out[:done])
                        saved = time.monotonic()
            finally:
                if self.store is not None and done:
                    self.store.write(name, out[:done])
        return out

    def _compare(self, points: Array, known: Array) -> None:
        """Raise when the file holds values of another function: a few are evaluated again."""
        if len(points) and not np.allclose(self.fresh(points), known, rtol=8 * self.unit, atol=8 * self.unit):
            assert self.store is not None
            raise ArgumentError(
                f"resume='{self.store.path}' holds values of another function than {self.name}: "
                "delete it or name another file"
            )

    def fresh(self, points: Array) -> Array:
        """One batch, evaluated now, whatever a file remembers."""
        out = self._call(points)
        if self.output_shape is None:
            self.output_shape = tuple(out.shape[1:])
        if out.shape != (len(points), *self.output_shape):
            raise ArgumentError(
                f"{self.name} must give shape ({len(points)}, {', '.join(map(str, self.output_shape))}) for a batch of "
                f"{len(points)} points, as it did before, but gave {tuple(out.shape)}"
            )
        flat = out.reshape(len(points), -1)
        bad = np.flatnonzero(~np.isfinite(flat).all(-1))
        if len(bad):
            where = np.array2string(points[bad[0]], precision=6, threshold=8)
            raise ArgumentError(f"{self.name} must be finite on the box, but it gives {flat[bad[0]]} at {where}")
        return flat

    def _probe(self) -> Callable[[Array], Array]:
        """The first way of calling f that works: tensors in float64, arrays, tensors in float32."""
        points = self.box.sample(3, seed=11).reshape(3, -1).numpy()
        problem: Exception | None = None
        ways = [("torch", torch.float64), ("numpy", torch.float64), ("torch", torch.float32)]
        if isinstance(self.f, nn.Module):
            own = next((p.dtype for p in self.f.parameters()), torch.float64)
            ways = [("torch", own)]
        for way, dtype in ways:
            call = lambda rows, way=way, dtype=dtype: self._evaluate(rows, way, dtype)  # noqa: E731
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    warnings.filterwarnings("error", message=".*__array_wrap__.*")  # numpy inside: give it arrays
                    out = call(points)
            except ArgumentError:
                raise
            except FAILURES as error:
                problem = problem or error
                continue
            self.output_shape = tuple(out.shape[1:])
            if self.outputs < 1:
                raise ArgumentError(f"{self.name} must give at least one number for each point, got shape {out.shape}")
            self._call = call
            self.fresh(points)
            return call
        wanted = f"one column for each of {', '.join(self.box.names)}" if self.columns and self.box.names else (
            f"a tensor or an array of shape (batch, {', '.join(map(str, self.box.shape))})")  # fmt: skip
        raise ArgumentError(
            f"{self.name} must accept {wanted}, but it raised {type(problem).__name__}: {problem}"
        ) from problem

    @torch.no_grad()
    def _evaluate(self, rows: Array, way: str, dtype: torch.dtype) -> Array:
        device = torch.device("cpu")
        if isinstance(self.f, nn.Module):
            device = next((p.device for p in self.f.parameters()), device)
        shaped = rows if self.columns else rows.reshape(len(rows), *self.box.shape)
        given: Any = np.array(shaped) if way == "numpy" else torch.tensor(shaped, dtype=dtype, device=device)
        out = self.f(*(given[:, i] for i in range(self.box.dim))) if self.columns else self.f(given)
        if isinstance(out, (list, tuple)) or not isinstance(out, (Tensor, np.ndarray)):
            raise ArgumentError(
                f"{self.name} must return a tensor or an array with one row for each point, got {type(out).__name__}"
            )
        tensor = out.detach().cpu() if isinstance(out, Tensor) else torch.from_numpy(np.ascontiguousarray(out))
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise ArgumentError(f"{self.name} must return real numbers, but gave dtype {tensor.dtype}")
        if tensor.dim() < 1 or len(tensor) != len(rows):
            raise ArgumentError(
                f"{self.name} must return one row for each of the {len(rows)} points of a batch, "
                f"but gave shape {tuple(tensor.shape)}"
            )
        coarse = {dtype, tensor.dtype} & {torch.float32, torch.float16, torch.bfloat16}
        self.dtype = max(coarse, key=lambda t: UNIT[t], default=torch.float64)
        return tensor.double().numpy()


class ValueFile:
    """A file of values (npz, arrays of numbers only), one array for each set of points."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ArgumentError(f"resume={str(path)!r} cannot be written: the folder {self.path.parent} does not exist")
        self.arrays: dict[str, Array] = {}
        if self.path.is_file():
            try:
                with np.load(self.path, allow_pickle=False) as file:
                    self.arrays = {name: np.asarray(file[name], dtype=np.float64) for name in file.files}
            except (OSError, ValueError, EOFError) as error:
                raise ArgumentError(
                    f"resume={str(path)!r} is not a file of values that can be gone on with: {error}; "
                    "delete it or name another one"
                ) from error

    def read(self, name: str) -> Array:
        return self.arrays.get(name, np.empty((0, 0)))

    def write(self, name: str, values: Array) -> None:
        if len(self.read(name)) >= len(values):
            return
        self.arrays[name] = values.copy()
        held = io.BytesIO()
        np.savez(held, **self.arrays)  # type: ignore[arg-type]
        write_whole(self.path, held.getvalue())


@contextmanager
def _bar(label: str, count: int, progress: bool | Progress) -> Iterator[Callable[[int], None]]:
    """A progress bar, shown on a terminal once a caller has waited for two seconds; or a caller's own."""
    if callable(progress):
        yield lambda done: progress(label, done, count)
        return
    if not progress or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=count)
    began, shown = time.monotonic(), False

    def advance(done: int) -> None:
        nonlocal shown
        if not shown and done < count and time.monotonic() - began > PATIENCE:
            bar.start()
            shown = True
        bar.update(task, completed=done)

    try:
        yield advance
    finally:
        bar.stop()


def _takes_columns(f: Function, box: Box) -> bool:
    """Whether f has one positional parameter for each name of the box (for a single name: of that name)."""
    if box.names is None or isinstance(f, nn.Module):
        return False
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(needed) == box.dim and (box.dim > 1 or needed[0] == box.names[0])


def digest(points: Array) -> str:
    """A name for an array: the beginning of the hash of its numbers."""
    return hashlib.sha256(np.ascontiguousarray(points).tobytes()).hexdigest()[:24]
