"""The machine a cell runs on: its device, its threads, what it is, and what a block of work took."""

from __future__ import annotations

import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from ..extras import version

PACKAGES = ("attnforge", "torch", "numpy", "python-flint", "joblib", "dask")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def device() -> torch.device:
    """Where training belongs: the GPU when there is one, else the CPU. ATTNFORGE_DEVICE=cpu overrules it."""
    wanted = os.environ.get("ATTNFORGE_DEVICE", "")
    return torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))


def device_name() -> str:
    """The device in words, for the record."""
    place = device()
    return torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)


@contextmanager
def reproducible(seed: int, threads: int) -> Iterator[None]:
    """A block with every generator seeded and a fixed number of threads; what was before comes back after it.

    The order of summation depends on the number of threads, so the same number gives the same result to the last bit.
    """
    before, numpy_state, python_state = torch.get_num_threads(), np.random.get_state(), random.getstate()
    devices = [device()] if device().type == "cuda" else []
    with torch.random.fork_rng(devices=devices), threadpool_limits(threads, user_api="blas"):
        try:
            torch.set_num_threads(threads)
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            torch.set_num_threads(before)
            np.random.set_state(numpy_state)
            random.setstate(python_state)


@dataclass
class Used:
    """What a block took: wall seconds, the process's peak memory during it, and how far that was above the start."""

    time_s: float = 0.0
    memory_mb: float = 0.0
    extra_mb: float = 0.0


@contextmanager
def watch() -> Iterator[Used]:
    """Measures a block; the numbers are there when it ends. On the GPU, extra_mb is the device's memory.

    >>> with watch() as used:
    ...     _ = sum(range(1000))
    >>> used.time_s > 0 and used.memory_mb > 0
    True
    """
    used, on_gpu = Used(), device().type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start_gpu = torch.cuda.memory_allocated() if on_gpu else 0
    start_mb, start = _reset_peak(), time.perf_counter()
    yield used
    if on_gpu:
        torch.cuda.synchronize()
    used.time_s = time.perf_counter() - start
    used.memory_mb = _peak()
    used.extra_mb = (torch.cuda.max_memory_allocated() - start_gpu) / 2**20 if on_gpu else used.memory_mb - start_mb


def _reset_peak() -> float:
    """Forgets the highest memory so far where the system can (Linux); the memory in use now."""
    try:
        _RESET.write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak()


def _peak() -> float:
    try:
        return _status("VmHWM")
    except OSError:
        import resource  # not on every system

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _status(name: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 2**10


@cache
def versions() -> dict[str, str]:
    """The packages that numbers depend on, and Python."""
    found = {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {name: number for name, number in found.items() if number is not None}


@cache
def machine() -> dict[str, Any]:
    """The machine in a few words: no names of hosts or users."""
    return {"system": platform.system(), "processor": _processor(), "cores": os.cpu_count() or 1}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
