"""The table of ATen operations that can be captured: one handler for each operator name, entered by a decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..atoms import Refusal, Tape
from ..values import is_data, leaves


@dataclass(frozen=True)
class Operation:
    """One operator with its arguments by name, defaults included."""

    name: str
    target: Any
    arguments: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.arguments[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.arguments.get(key, default)

    def constant(self, key: str) -> Any:
        """An argument that must not depend on data."""
        value = self.arguments.get(key)
        if any(map(is_data, leaves(value))):
            raise Refusal(f"its argument {key} depends on data")
        return value


Writer = Callable[[Tape, Operation], Any]


@dataclass(frozen=True)
class Handler:
    """How an operator is written as operations of a program; `note` is for the table in the documentation."""

    write: Writer
    note: str


TABLE: dict[str, Handler] = {}


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def handles(*names: str, note: str) -> Callable[[Writer], Writer]:
    """Enter a handler for the operators of these names."""

    def enter(write: Writer) -> Writer:
        for name in names:
            assert name not in TABLE, f"{name} has two handlers"
            TABLE[name] = Handler(write, note)
        return write

    return enter


#: Why what is not continuous is refused.
STEP = "no network of attention heads is close to a step"
#: Why an operator is refused, where more can be said than that it is not in the table.
_REASONS = {
    "it gives places, which jump where two entries are equal": "argsort argmax argmin",
    "it chooses by comparing data, which is not continuous": """mode unique unique2 _unique2 unique_consecutive nonzero
        masked_select searchsorted bucketize histc""",
    f"it jumps: {STEP}": "heaviside nextafter frexp",
    "it compares data": "isclose logical_and logical_or logical_not logical_xor equal any all isin",
    "it works with complex numbers": """_fft_r2c _fft_c2c _fft_c2r fft_fft fft_rfft fft_ifft fft_irfft view_as_complex
        view_as_real complex polar angle real imag conj stft istft""",
    "it draws random numbers": """bernoulli dropout native_dropout rand randn rand_like randn_like randint normal
        multinomial randperm uniform exponential""",
    "it reads a table at places, or with weights, that depend on data": "embedding_bag one_hot",
    "it reads a number out of the data": "item _local_scalar_dense",
    "it solves or factors a matrix of data": """linalg_inv_ex linalg_inv inverse linalg_det linalg_slogdet _linalg_det
        _linalg_slogdet linalg_solve_ex _linalg_solve_ex linalg_eigh _linalg_eigh linalg_eig linalg_svd _linalg_svd
        linalg_qr linalg_cholesky linalg_cholesky_ex cholesky linalg_lu linalg_matrix_exp""",
    "it rounds data to integers of few bits": """quantize_per_tensor quantize_per_channel
        fake_quantize_per_tensor_affine fake_quantize_per_channel_affine""",
}
UNKNOWN = "it is not in the table of supported operations"


REFUSED = {name: why for why, names in _REASONS.items() for name in names.split()}


def reason(name: str) -> str:
    """Why the operator `name` cannot be captured."""
    if name.startswith("quantized"):
        return REFUSED["quantize_per_tensor"]
    return REFUSED.get(name, UNKNOWN)
