"""The checker reads what is stored: whatever is done to a network, a bound computed afterwards holds, or there is none.

Networks of every family are cast, trained, sabotaged, copied and given the weights of others; then they are certified
again and set against values of 60 digits, which come from mpmath and share nothing with the package.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import attnforge as af
from attnforge.certificates import storage
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.heads.families import FAMILIES

mp = mpmath.mp.clone()
mp.dps = 60
Rows = list[list[Any]]  # numbers of 60 digits, (token, channel)
MIXING = ((0.2, 0.8, 0.0), (0.3, 0.3, 0.4), (-1.0, 0.5, 0.25))
MASK = ((0.0, -0.5, -np.inf), (0.25, 0.0, 0.1), (-np.inf, -np.inf, 0.0))
SQUARE, PAIR = af.Box(x=(-1, 1), y=(-1.5, 1)), af.Box.cube(-1, 1, shape=(3, 2))


@dataclass(frozen=True)
class Case:
    """A target, the same in 60 digits, another target of the same structure, and what its sites are."""

    target: Any
    exact: Callable[[Rows], Rows]
    other: Any
    box: af.Box
    families: tuple[str, ...]
    eps: float = 1e-3


def scalar(function: Callable[..., Any]) -> Callable[[Rows], Rows]:
    return lambda rows: [[function(*rows[0])]]


def soft(row: list[Any]) -> list[Any]:
    e = [mp.exp(z - max(row)) for z in row]
    return [x / mp.fsum(e) for x in e]


def attend(scale: float, mask: Any = None) -> Callable[[Rows], Rows]:
    def exact(x: Rows) -> Rows:
        out = []
        for i, query in enumerate(x):
            logits = [mp.fdot(query, key) * mp.mpf(scale) for key in x]
            seen = [j for j in range(len(x)) if mask is None or np.isfinite(mask[i][j])]
            weights = soft([logits[j] + (0 if mask is None else mp.mpf(mask[i][j])) for j in seen])
            out.append([mp.fdot(weights, [x[j][c] for j in seen]) for c in range(len(query))])
        return out

    return exact


def mixed(x: Rows, matrix: Any = MIXING) -> Rows:
    return [[mp.fdot([mp.mpf(m) for m in row], [t[c] for t in x]) for c in range(len(x[0]))] for row in matrix]


def each(function: Callable[[Any], Any]) -> Callable[[Rows], Rows]:
    return lambda rows: [[function(v) for v in row] for row in rows]


def normed(x: Rows) -> Rows:
    return [[v / mp.sqrt(mp.fsum(w * w for w in row) / len(row) + mp.mpf(0.0625)) for v in row] for row in x]


M, K = torch.tensor(MIXING, dtype=torch.float64), torch.tensor(MASK, dtype=torch.float64)


def matrix(x: Tensor, scale: float = 1.0) -> Tensor:
    return (scale * M).to(x) @ x


def relu(v: Any) -> Any:
    return max(v, mp.mpf(0))


CASES = {
    "anchors": Case(
        "sin(3*x) + exp(-x**2)*0.5 + 0.3*y",
        scalar(lambda x, y: mp.sin(3 * x) + mp.exp(-x * x) / 2 + mp.mpf("0.3") * y),
        "sin(3*x) + exp(-x**2)*0.25 + 0.2*y", SQUARE, ("anchor",),
    ),
    "gates": Case(
        "abs(x) + 2*relu(x - 0.25*y) + clip(y, -0.5, 0.5)",
        scalar(lambda x, y: abs(x) + 2 * relu(x - y / 4) + min(max(y, mp.mpf(-0.5)), mp.mpf(0.5))),
        "abs(x) + 3*relu(x - 0.5*y) + clip(y, -0.25, 0.5)", SQUARE, ("gate",),
    ),
    "products": Case(
        "x*y*(x + 2)", scalar(lambda x, y: x * y * (x + 2)), "x*y*(x + 3)", SQUARE, ("product",),
    ),
    "root": Case(
        "sqrt(x**2 + y**2)", scalar(lambda x, y: mp.sqrt(x * x + y * y)), "sqrt(x**2 + 2*y**2)", SQUARE,
        ("square", "anchor"), 1e-2,
    ),
    "softmax": Case(
        lambda x: torch.softmax(2.3 * x, -1), lambda x: [soft([mp.mpf(2.3) * v for v in row]) for row in x],
        lambda x: torch.softmax(2.1 * x, -1), af.Box.cube(-1, 1, shape=(2, 3)), ("softmax",),
    ),
    "attention": Case(
        lambda x: torch.softmax(x @ x.mT * 3.37, -1) @ x, attend(3.37),
        lambda x: torch.softmax(x @ x.mT * 2.9, -1) @ x, PAIR, ("attention",),
    ),
    "mask": Case(
        lambda x: torch.softmax(x @ x.mT * 0.7 + K.to(x), -1) @ x, attend(0.7, MASK),
        lambda x: torch.softmax(x @ x.mT * 0.8 + 0.5 * K.to(x), -1) @ x, PAIR, ("attention",),
    ),
    "mixing": Case(
        lambda x: torch.tanh(matrix(x)), lambda x: each(mp.tanh)(mixed(x)),
        lambda x: torch.tanh(matrix(x, 0.75)), PAIR, ("gate",),
    ),
    "mixing of kinks": Case(
        lambda x: torch.relu(matrix(torch.relu(x))), lambda x: each(relu)(mixed(each(relu)(x))),
        lambda x: torch.relu(matrix(torch.relu(x), 0.5)), PAIR, ("mix", "gate"),
    ),
    "maximum": Case(
        lambda x: x.amax(-2, keepdim=True) + 0 * x,
        lambda x: [[max(t[c] for t in x) for c in range(len(x[0]))] for _ in x],
        lambda x: 0.5 * x.amax(-2, keepdim=True) + 0 * x, PAIR, ("max",),
    ),
    "norm": Case(
        lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 0.0625), normed, None, PAIR, ("norm",), 1e-2,
    ),
}  # fmt: skip
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_BUILT: dict[tuple[str, str, bool], CompiledNetwork] = {}


def built(name: str, dtype: str, other: bool = False) -> CompiledNetwork:
    """A fresh copy of a compiled case."""
    case = CASES[name]
    if (name, dtype, other) not in _BUILT:
        if name == "norm":
            net = af.compile(rms, case.box, case.eps, dtype=DTYPES[dtype])
        else:
            net = af.compile(case.other if other else case.target, case.box, case.eps, dtype=DTYPES[dtype])
        _BUILT[name, dtype, other] = net
    return copy.deepcopy(_BUILT[name, dtype, other])


class Rms(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (2,), eps=0.0625)


rms = Rms()


@functools.cache
def truth(name: str, dtype: torch.dtype, count: int) -> tuple[Tensor, list[list[Any]]]:
    """Random points, corners and places near kinks, and what the target is there in 60 digits."""
    case = CASES[name]
    points = torch.cat([case.box.sample(count, 7, dtype), case.box.corners(16, dtype)])
    points = torch.cat([points, points[:8] * 2.0**-20, torch.zeros_like(points[:1])])
    exact = []
    for point in points.double().tolist():
        rows = point if isinstance(point[0], list) else [point]
        exact.append([v for row in case.exact([[mp.mpf(v) for v in row] for row in rows]) for v in row])
    return points, exact


def error(name: str, net: CompiledNetwork, count: int = 40) -> float:
    """The largest distance from 60-digit values, rounded down."""
    points, exact = truth(name, net.dtype, count)
    found = net.core(points).detach().double().reshape(len(points), -1).tolist()
    pairs = [
        (mine, value) for row, values in zip(found, exact, strict=True) for mine, value in zip(row, values, strict=True)
    ]
    if any(mine != mine for mine, _ in pairs):
        return float("inf")
    return float(max(abs(mp.mpf(mine) - value) for mine, value in pairs) * (1 - mp.mpf(2) ** -50))


def holds(name: str, net: CompiledNetwork) -> bool:
    """Certify again; True when there is a bound, which must hold, False when there is none."""
    return covered_error(name, net) is not None


def covered_error(name: str, net: CompiledNetwork) -> float | None:
    """Certify again; the largest error that was found, which must be within the bound, or None without one."""
    try:
        bound = af.certify(net).bound
    except af.CertificateError:
        return None
    found = error(name, net)
    assert bound is not None
    assert found <= bound
    return found


def test_every_family_is_in_a_case() -> None:
    assert {family for case in CASES.values() for family in case.families} == set(FAMILIES)
    for name, case in CASES.items():
        families = {site.family for site in built(name, "float64").layout.sites}
        assert families >= set(case.families), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_as_built_copied_and_read_back(name: str, dtype: str, tmp_path: Path) -> None:
    net = built(name, dtype)
    bound = net.bound
    assert holds(name, net) and net.bound == bound
    net.save(tmp_path / "net.safetensors")
    again = af.load(tmp_path / "net.safetensors")
    assert again.bound == bound == af.check(tmp_path / "net.safetensors").bound
    assert holds(name, again) and again.bound == bound


@pytest.mark.parametrize("name", CASES)
def test_single_becomes_double(name: str) -> None:
    net = built(name, "float32")
    with pytest.raises(af.CertificateError, match="stale"):
        _ = net.double().certificate
    assert holds(name, net), "float32 weights in float64 have a bound"
    assert net.bound is not None and net.bound > 1e-12, "which knows that they were rounded"


@pytest.mark.parametrize("name", CASES)
def test_double_becomes_single(name: str) -> None:
    net = built(name, "float64").float()
    assert holds(name, net), "float64 weights rounded to float32 have a bound"


@pytest.mark.parametrize("name", CASES)
def test_weights_that_went_through_bfloat16(name: str) -> None:
    holds(name, built(name, "float32").bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.other is not None])
def test_the_state_of_another_network(name: str, dtype: str) -> None:
    net, other = built(name, dtype), built(name, dtype, other=True)
    mine, theirs = net.state_dict(), other.state_dict()
    shared = {key: tensor for key, tensor in theirs.items() if key in mine and mine[key].shape == tensor.shape}
    assert any(not torch.equal(mine[key], tensor) for key, tensor in shared.items())
    net.load_state_dict({**mine, **shared})
    before = _BUILT[name, dtype, False].bound
    if holds(name, net):
        assert before is not None and net.bound is not None and net.bound > before


def entries(net: CompiledNetwork, rng: np.random.Generator) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """For every stored tensor some of its entries: one that is not 0, one that is, one anywhere."""
    for name, tensor in net.state_dict().items():
        for mask in (tensor != 0, tensor == 0):
            found = torch.nonzero(mask)
            if len(found):
                yield name, tensor, tuple(int(i) for i in found[rng.integers(len(found))])


@pytest.mark.parametrize("change", ["1.01", "+1", "nan", "zero"])
@pytest.mark.parametrize("name", CASES)
def test_one_changed_number(name: str, change: str) -> None:
    """The bound covers what became of the network, or there is none; it never stays where it was."""
    net, rng = built(name, "float32"), np.random.default_rng(len(name))
    before, covered, refused = net.bound, 0, 0
    assert before is not None
    for key, tensor, at in list(entries(net, rng)):
        kept = tensor[at].clone()
        new = {"1.01": kept * 1.01, "+1": kept + 1, "nan": kept * float("nan"), "zero": kept * 0}[change]
        if torch.equal(new, kept):
            continue
        with torch.no_grad():
            tensor[at] = new
        found = covered_error(name, net)
        if found is not None:
            covered += 1
            assert not found > before or net.bound > before, f"{key}{at}: the bound stayed"
        else:
            refused += 1
        with torch.no_grad():
            tensor[at] = kept
    assert covered + refused > 0 and (change != "nan" or covered == 0)
    assert af.certify(net).bound == before


@pytest.mark.parametrize("name", ["anchors", "gates", "products", "attention", "mixing"])
def test_trained_and_certified_again(name: str) -> None:
    """A few steps on what may be trained: affine maps and tables. Carried columns are among them."""
    net = built(name, "float32")
    generator = torch.Generator().manual_seed(3)
    for size in (1e-6, 1e-3, 0.1):
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter += size * torch.randn(parameter.shape, generator=generator)
        holds(name, net)


@pytest.mark.parametrize("size", [1.001, 3.0])
def test_a_carried_column_is_seen(size: float) -> None:
    """exp(x) needs its own layer, y waits: an affine map that scales y while it waits changes the result."""
    net = af.compile("exp(x)*y", af.Box(x=(-1, 1), y=(-1, 1)), eps=1e-3)
    bound = net.bound
    with torch.no_grad():
        net.network.layers[0].S[1, 0] = size
    points = net.box.sample(500, dtype=torch.float32)
    truth = points[:, 0].double().exp() * points[:, 1].double()
    found = float((net.core(points).detach().double() - truth).abs().max())
    assert bound is not None and found > bound
    if size > 2:
        with pytest.raises(af.CertificateError, match="no finite bound"):
            af.certify(net)
    else:
        assert af.certify(net).bound >= found


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file with another header, whose digest is right."""
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["attnforge"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header)
    header["digest"] = storage.digest(header, header["certificate"]["weights"])
    other = path.with_name("changed.safetensors")
    save_file(tensors, str(other), metadata={"attnforge": json.dumps(header, sort_keys=True, separators=(",", ":"))})
    return other


def to_sine(header: dict[str, Any]) -> None:
    """The program applies another function than the heads compute, and the certificate says so too."""
    for op in header["config"]["program"]["ops"]:
        if op.get("function") in ("relu", "square"):
            op["function"] = "sin"


def wider(header: dict[str, Any]) -> None:
    header["config"]["boxes"][0]["upper"] = [9.0 for _ in header["config"]["boxes"][0]["upper"]]


def everywhere(header: dict[str, Any]) -> None:
    header["config"]["grid"] = 10**9


@pytest.mark.parametrize("change", [to_sine, wider, everywhere])
@pytest.mark.parametrize("formula", ["relu(x)*2 + y", "sqrt(x**2 + y**2)"])
def test_a_file_that_says_something_else_is_refused(
    formula: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    net = af.compile(formula, SQUARE, eps=1e-2)
    net.save(tmp_path / "net.safetensors")
    same = rewritten(tmp_path / "net.safetensors", lambda header: None)
    assert af.check(same).bound == net.bound, "the digest alone is no obstacle"
    with pytest.raises(af.CertificateError):
        af.check(rewritten(tmp_path / "net.safetensors", change))


@pytest.mark.parametrize(("low", "high"), [(1e-41, 1e-40), (0.0, 9e-6), (1e-38, 3e-38)])
@pytest.mark.parametrize("factor", [0.75, 0.5, 1.5])
def test_underflow_in_affine_maps_is_counted(factor: float, low: float, high: float) -> None:
    net = af.compile(f"{factor}*x", af.Box(x=(low, high)), eps=1e-3)
    x = torch.cat([net.box.sample(300, dtype=torch.float32), torch.tensor([[low], [high], [2.0**-149]])])
    x = x[(x[:, 0].double() >= low) & (x[:, 0].double() <= high)]
    found = (net(x).detach().double() - factor * x[:, 0].double()).abs().max()
    assert float(found) <= net.bound


def unsaid(tensor: Tensor) -> bool:
    """Zeros, or a map that carries all: what a file without the tensor means."""
    square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
    return not tensor.any() or (square and torch.equal(tensor, torch.eye(len(tensor)).to(tensor)))


@pytest.mark.parametrize("change", ["drop", "shorter", "wider"])
@pytest.mark.parametrize("name", ["gates", "products", "attention", "mixing of kinks", "norm"])
def test_tensors_of_other_shapes_are_refused_or_covered(name: str, change: str, tmp_path: Path) -> None:
    """Nothing is broadcast behind the analysis, and whatever is wrong with a file, the error is ours."""
    net, path, refused, same = built(name, "float32"), tmp_path / "net.safetensors", 0, 0
    net.save(path)
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["attnforge"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key, tensor in tensors.items():
        other = {"shorter": tensor[..., :1].contiguous(), "wider": torch.nn.functional.pad(tensor, (0, 1))}.get(change)
        if other is not None and other.shape == tensor.shape:
            continue  # nothing is changed
        kept = {k: t for k, t in tensors.items() if k != key} | ({} if other is None else {key: other})
        digest = hashlib.sha256()
        for k, t in sorted(kept.items()):
            digest.update(f"{k}:{t.dtype}:{tuple(t.shape)};".encode())
            digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
        header["certificate"]["weights"] = digest.hexdigest()
        header["digest"] = storage.digest(header, digest.hexdigest())
        text = json.dumps(header, sort_keys=True, separators=(",", ":"))
        save_file(kept, str(path), metadata={"attnforge": text})
        same += other is None and unsaid(tensor)
        if other is None and unsaid(tensor) and same > 2:
            continue  # the same network again, if it is read at all
        try:
            found = af.check(path)
        except af.CertificateError:
            refused += 1
            continue
        assert found.bound is not None and error(name, af.load(path), 10) <= found.bound, key
    assert refused > 0


@pytest.mark.parametrize(
    ("formula", "box", "scale"),
    [("1e30*x", af.Box(x=(0, 1e10)), 1e-3), ("1e30*x*y", af.Box(x=(0, 1e5), y=(0, 1e5)), 1e-4)],
)
def test_what_the_dtype_cannot_hold_has_no_bound(formula: str, box: af.Box, scale: float) -> None:
    """Sums that overflow: refused when built, after a cast, and after an entry has become large."""
    with pytest.raises(af.PrecisionError, match="float32"):
        af.compile(formula, box, 1e36)
    wide = af.compile(formula, box, 1e36, dtype=torch.float64)
    assert bool(torch.isfinite(wide(box.corners(4))).all()) and wide.bound is not None
    with pytest.raises(af.CertificateError):
        af.certify(wide.float())
    inside = af.Box({name: (low, high * scale) for name, (low, high) in zip(box, box.intervals(), strict=True)})
    net = af.compile(formula, inside, 1e35)
    assert bool(torch.isfinite(net(inside.corners(4, torch.float32))).all())
    with torch.no_grad():
        net.network.layers[-1].s[0] = 3.4e38
    try:
        assert af.certify(net).bound >= 3e38 and bool(torch.isfinite(net(inside.corners(4, torch.float32))).all())
    except af.CertificateError:
        assert not bool(torch.isfinite(1.02 * net(inside.corners(4, torch.float32))).all())
