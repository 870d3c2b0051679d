"""A saved network, byte by byte: the header and the stored numbers, exactly.

The container is safetensors: eight bytes with the length of a JSON table, the table (name -> dtype, shape, place), the
numbers. Its metadata holds our own header as text under `attnforge`. Floats of every dtype are float64 numbers exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CertificateError
from .balls import NotProved

LARGEST = 1 << 26  # bytes of JSON that are read at most: ten times the largest network of the benchmarks
MOST = 1 << 24  # numbers that are read at most: each costs a Python object
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a number
CODES = {"F64": "d", "F32": "f", "F16": "e"}
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Tensor:
    """Stored numbers, row by row."""

    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[float, ...]

    def rows(self) -> Any:
        """The numbers as nested lists, one level for each dimension."""
        out: list[Any] = list(self.numbers)
        for length in reversed(self.shape[1:]):
            out = [out[i : i + length] for i in range(0, len(out), length)]
        return out


@dataclass(frozen=True)
class Saved:
    """A file's header and tensors, and the hash of the weights as the header's digest has it."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str


def read(path: str | Path) -> Saved:
    """Read a file; `CertificateError` on anything that is not one, or whose digest is not that of its content."""
    source = Path(path)
    try:
        data = source.read_bytes()
    except OSError as error:
        raise CertificateError(f"cannot read {source.name}: {error.strerror}") from error
    return parse(data, source.name)


def parse(data: bytes, name: str = "the file") -> Saved:
    """Read the bytes of a file."""
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error, OverflowError) as error:
        raise CertificateError(f"{name} is not a network that attnforge saved: {error}") from error


def _parse(data: bytes) -> Saved:
    (length,) = struct.unpack("<Q", data[:8])
    if length > LARGEST:
        raise ValueError(f"its table of contents has {length} bytes")
    table = json.loads(data[8 : 8 + length])
    header = json.loads(table.pop("__metadata__")["attnforge"])
    body = memoryview(data)[8 + length :]
    tensors, digest, taken = {}, hashlib.sha256(), 0
    for name in sorted(table):
        entry = table[name]
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if any(type(n) is not int or n < 0 for n in (*shape, start, stop)) or stop > len(body):
            raise ValueError(f"the place of {name} is not in the file")
        count = math.prod(shape)
        taken += count
        if taken > MOST:
            raise NotProved(f"the network has more than {MOST} numbers, too many for the kernel")
        if stop - start != count * WIDTHS[kind]:
            raise ValueError(f"{name} has {stop - start} bytes, which does not fit {count} numbers of {kind}")
        raw = bytes(body[start:stop])
        digest.update(f"{name}:torch.{NAMES[kind]}:{shape};".encode() + raw)
        tensors[name] = Tensor(NAMES[kind], shape, _numbers(kind, raw, count))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    weights = digest.hexdigest()
    rest = {key: value for key, value in header.items() if key != "digest"}
    text = weights + json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if header.get("digest") != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("its digest is not that of its content")
    return Saved(header, tensors, weights)


def _numbers(kind: str, raw: bytes, count: int) -> tuple[float, ...]:
    if kind == "BF16":  # the upper half of a float32
        halves = struct.unpack(f"<{count}H", raw)
        return struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(half << 16 for half in halves)))
    return struct.unpack(f"<{count}{CODES[kind]}", raw)


def outward(x: float, dtype: str, above: bool) -> float:
    """The nearest number of a dtype at or above (below) x: what an input of the box may be rounded to."""
    if dtype == "float64" or not math.isfinite(x):
        return x
    step = {"float32": ("<f", "<I", 1), "float16": ("<e", "<H", 1), "bfloat16": ("<f", "<I", 1 << 16)}[dtype]
    code, whole, unit = step
    try:
        packed = struct.pack(code, x)
    except OverflowError:
        raise CertificateError(f"the box reaches {x:g}, which is beyond {dtype}") from None
    (bits,) = struct.unpack(whole, packed)
    bits -= bits % unit  # towards 0, where the lower half is cut off
    (found,) = struct.unpack(code, struct.pack(whole, bits))
    if (found >= x if above else found <= x):
        return float(found)
    if found == 0.0:  # the neighbour of 0 has the sign that is wanted
        bits = (0 if above else 1 << (8 * struct.calcsize(whole) - 1)) + unit
    else:
        bits += unit if (found > 0) == above else -unit
    return float(struct.unpack(code, struct.pack(whole, bits))[0])
