"""The other side of `verify`: a fresh process that loads one artefact and evaluates it at the points it is sent.

`python -P fresh.py KIND PATH` reads requests from its standard input: a line with the size of each array, then the
arrays in NumPy's format. It answers each in the same way, or with a minus sign and words. An ONNX file is run without
PyTorch and without attnforge, as its users would run it; this module therefore imports neither at its top, and finds
what loads the other kinds by name.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import onnxruntime

    from ..dtypes import Array

Run = Callable[..., "Array"]
MOST = 4096  # points evaluated at once: what `verify` asks for in one piece
MOST_ONNX = 512  # and by ONNX Runtime, for which heads are spelled out in many intermediate results
#: What loads each kind of artefact (a module of attnforge.export and a function), and its method that takes tensors.
LOADERS = {
    "plain": ("plain.transformer", "load_plain", "core"),
    "lens": ("lens", "load_lens", "__call__"),
    "hf": ("hf.folder", "load_hf", "run"),
}
KINDS = (*LOADERS, "onnx")


def send(stream: BinaryIO, arrays: Sequence[Array], words: str = "") -> None:
    """Write arrays, or words where there are none."""
    parts = []
    for array in arrays:
        held = io.BytesIO()
        np.save(held, np.ascontiguousarray(array), allow_pickle=False)
        parts.append(held.getvalue())
    text = words.replace("\n", " ").encode()
    stream.write(" ".join(str(len(part)) for part in parts).encode() or b"-" + text)
    stream.write(b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[list[Array], str] | None:
    """What `send` wrote; None at the end of the stream."""
    line = stream.readline().decode().strip()
    if not line:
        return None
    if line.startswith("-"):
        return [], line[1:]
    parts = [stream.read(int(size)) for size in line.split()]
    return [np.load(io.BytesIO(part), allow_pickle=False) for part in parts], ""


def open_session(path: str, threads: int | None = None) -> onnxruntime.InferenceSession:
    """A file in ONNX Runtime on the processor, its graph left as it is: rewriting it could cost float64 accuracy."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = options.inter_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def opened(kind: str, path: str) -> tuple[Run, int]:
    """The artefact as a function of arrays, and how many points it takes at once."""
    if kind == "onnx":
        session = open_session(path, threads=1)
        names = [entry.name for entry in session.get_inputs()]
        return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))[0], MOST_ONNX
    module, load, method = LOADERS[kind]
    found = getattr(importlib.import_module(f"attnforge.export.{module}"), load)(path)
    return _numbers(getattr(found, method)), getattr(found, "most", MOST)


def _numbers(run: Callable[..., Any]) -> Run:
    """A function of tensors as one of arrays."""
    import torch

    def on_arrays(*inputs: Array) -> Array:
        with torch.no_grad():
            return np.asarray(run(*map(torch.from_numpy, inputs)).numpy())

    return on_arrays


def main(kind: str, path: str) -> None:
    """Load, then answer until the requests end."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    try:
        run, most = opened(kind, path)
        send(answers, [np.array(most)])
        while (request := receive(sys.stdin.buffer)) is not None:
            send(answers, [run(*request[0])])
    except Exception as error:  # whatever it is, the other side says it in words
        send(answers, [], f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
