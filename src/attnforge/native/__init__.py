"""Kernels for processors: `kernels.c`, compiled once a machine with its C compiler, and called through ctypes.

PyTorch runs a head as a dozen passes over memory; these functions make one of them. They are used where a compiler is
found (`CC`, or cc, gcc or clang); without one, everything is computed by PyTorch as before. The first call compiles,
for a second or two, and keeps the result in a private folder (`$XDG_CACHE_HOME/attnforge`, or `~/.cache/attnforge`)
under a name that says which source, compiler, options and processor it is of. `ATTNFORGE_NATIVE=0` switches them off.

What was compiled is tried before it is used: its exponential against float64's. Where anything fails, `trouble` says
what, and PyTorch computes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dtypes import transformed

SOURCE, INCLUDED = (Path(__file__).with_name(name) for name in ("kernels.c", "whole.h"))
#: Nothing that rearranges: sums are in the order of the source. Errno and traps are not asked for.
OPTIONS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
MACHINES = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "AMD64": (), "aarch64": (), "arm64": ()}
PATIENCE = 120.0  # seconds that a compiler may take; it needs about one
INPUTS = (torch.float32, torch.bfloat16)  # what kernels read and write; they compute in float32
GRAIN = 1 << 15  # elements for each thread at least: PyTorch's own measure
TRIED = 4096  # arguments of the exponential on which a new library is tried
ALLOWED = 3.0  # units of roundoff that certificates allow an exponential
LOWEST = -87.3366  # below, kernels return 0: e to this is less than the smallest normal number
HIGHEST = 88.0  # above, 2^n of lemma R9 is no number
_WRONG = {"why": ""}

Address = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "attnforge_exp": (Address, Address, ctypes.c_long),
    "attnforge_activation": (
        Address, Address, ctypes.c_long, ctypes.c_int, Address, *[ctypes.c_int] * 5, *[ctypes.c_float] * 2, Address,
        ctypes.c_int,
    ),
    "attnforge_norm": (
        Address, Address, ctypes.c_long, ctypes.c_long, ctypes.c_int, *[Address] * 2, *[ctypes.c_int] * 2,
        *[Address] * 3, ctypes.c_long, *[ctypes.c_float] * 3, Address, Address, ctypes.c_int,
    ),
    "attnforge_exp_d": (Address, Address, ctypes.c_long),
    **dict.fromkeys(
        ("attnforge_network_f", "attnforge_network_d"),
        (Address, Address, ctypes.c_long, *[ctypes.c_int] * 2, *[Address] * 6, ctypes.c_int, Address,
         *[ctypes.c_int] * 2, Address, ctypes.c_int),
    ),
    **dict.fromkeys(
        ("attnforge_beyond_f", "attnforge_beyond_d"), (Address, ctypes.c_long, *[Address] * 2, ctypes.c_long, Address)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Library:
    """The functions of `kernels.c`, ready to be called."""

    path: Path
    exp: Any
    activation: Any
    norm: Any
    exp_d: Any
    network_f: Any
    network_d: Any
    beyond_f: Any
    beyond_d: Any


def ready(x: Tensor) -> bool:
    """Whether kernels take this tensor: on a processor, of their dtypes, with numbers where it says they are.

    >>> ready(torch.zeros(3, dtype=torch.float64))
    False
    """
    if x.device.type != "cpu" or x.dtype not in INPUTS or not plain(x) or not x.numel():
        return False
    return library() is not None


def plain(x: Tensor) -> bool:
    """Whether the numbers of a tensor are those in its memory, and nobody follows what is done with it: no subclass, no
    transformation, no trace, no mode that watches operators, no sign that is still to be changed."""
    if type(x) not in (Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack() or transformed(x):
        return False
    if torch._C._is_tracing():
        return False
    return x.layout == torch.strided and not x.is_neg()


def threads(elements: int) -> int:
    """How many threads share so many elements: no more than PyTorch may use."""
    return max(1, min(torch.get_num_threads(), elements // GRAIN))


def trouble() -> str:
    """Why there are no kernels; empty where there are."""
    library()
    return _WRONG["why"]


@functools.lru_cache(maxsize=1)
def library() -> Library | None:
    """The kernels, compiled now where they were not before; None where this machine has none."""
    try:
        found = _opened(_built())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _WRONG["why"] = f"{type(error).__name__}: {error}"
        return None
    return found


def _built() -> Path:
    """Where the compiled kernels are."""
    if os.environ.get("ATTNFORGE_NATIVE", "1") == "0":
        raise ValueError("switched off by ATTNFORGE_NATIVE=0")
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in MACHINES:
        raise ValueError(f"kernels are for Linux on {', '.join(MACHINES)}, this is {sys.platform} on {machine}")
    compiler = _compiler()
    options = (*OPTIONS, *MACHINES[machine])
    source = SOURCE.read_bytes() + INCLUDED.read_bytes()
    said = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE).stdout
    key = hashlib.sha256(b"\0".join([source, said, " ".join([*compiler, *options]).encode(), _processor()]))
    name = f"kernels-{key.hexdigest()[:32]}.so"
    place = _folder() / name
    if not place.is_file():
        _compile(compiler, options, place)
    return place


def _compiler() -> list[str]:
    """The command that compiles C."""
    if asked := os.environ.get("CC"):
        return shlex.split(asked)
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return [found]
    raise ValueError("no C compiler was found: install one, or name it in CC")


def _processor() -> bytes:
    """What tells processors apart whose code differs: folders of users are shared among machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def _folder() -> Path:
    """A folder that nobody else writes to: what lies there is run."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home) / "attnforge"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        mine = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if mine and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        return _temporary()
    return _temporary()


@functools.lru_cache(maxsize=1)
def _temporary() -> Path:
    """A private folder of this process, where there is no other: then kernels are compiled once a process."""
    return Path(tempfile.mkdtemp(prefix="attnforge-"))


def _compile(compiler: Sequence[str], options: Sequence[str], place: Path) -> None:
    """Compile with OpenMP and link without: its functions are those that PyTorch has loaded, so that both have the
    same threads. Several processes may do this at once; each moves a whole file into place."""
    with tempfile.TemporaryDirectory(dir=place.parent) as room:
        compiled, linked = Path(room) / "kernels.o", Path(room) / place.name
        compiling = [*options, "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)]
        for step in (compiling, ["-shared", str(compiled), "-o", str(linked)]):
            ran = subprocess.run([*compiler, *step], capture_output=True, text=True, timeout=PATIENCE, check=False)
            if ran.returncode:
                raise ValueError(f"{compiler[0]} could not compile the kernels: {ran.stderr.strip()[:400]}")
        linked.replace(place)


def _opened(path: Path) -> Library:
    opened = ctypes.CDLL(str(path), mode=os.RTLD_NOW)  # what is missing is missed now
    functions = {}
    for name, kinds in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = kinds, None
        functions[name.removeprefix("attnforge_")] = function
    found = Library(path, **functions)
    for least, most, dtype in ((LOWEST, HIGHEST, torch.float32), (-708.0, 0.0, torch.float64)):
        off = exponential_error(found, torch.linspace(least + 1e-3, most, TRIED, dtype=dtype))
        if not off <= ALLOWED:
            raise ValueError(f"{path}: its exponential errs by {off:.3g} u in {dtype}, {ALLOWED:g} u are allowed")
    return found


def exponential_error(found: Library, x: Tensor) -> float:
    """The largest relative error of the kernels' exponential at some numbers, in units of roundoff. What judges float64
    is PyTorch's, itself right to about one unit."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % 16))
    room, exact = torch.empty_like(padded), x.double().exp()
    call, unit = (found.exp, 2.0**-24) if x.dtype == torch.float32 else (found.exp_d, 2.0**-53)
    call(padded.data_ptr(), room.data_ptr(), len(padded))
    return float(((room[: len(x)].double() - exact) / exact).abs().max()) / unit
