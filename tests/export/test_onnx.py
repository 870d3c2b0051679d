"""ONNX files: what is in them, that ONNX Runtime computes what PyTorch does, and how mistakes are answered."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import attnforge as af
from attnforge import theorems
from attnforge.certificates.certified import CertifiedModule
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.export import run_onnx, session, to_onnx, to_plain, verification
from attnforge.export.graph import OnnxGraph
from attnforge.export.verification import domain
from attnforge.heads import AnchorHead
from attnforge.heads.fast.activation import FastActivation

FORMULA = "sin(x*y) + exp(-x**2)/y"
BOX = af.Box(x=(-1, 1), y=(0.5, 2))


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile(FORMULA, BOX, 1e-3)


def gap(net: CertifiedModule, path: Path, count: int = 3000) -> tuple[float, float]:
    """The largest difference between ONNX Runtime and PyTorch, and the largest output."""
    where = domain(net)
    inputs = where.split(torch.cat([where.sample(count, seed=3), where.corners(16)]))
    with torch.no_grad():
        ours = net.core(*inputs)
    theirs = run_onnx(path, *inputs)
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
    return float((theirs - ours).abs().max()), max(1.0, float(ours.abs().max()))


def own_rounding(net: CertifiedModule) -> float:
    """How far the network is from the same weights computed in float64."""
    where = domain(net)
    points = torch.cat([where.sample(20_000, seed=3), where.corners(16)])
    wide = copy.deepcopy(net).double()
    with torch.no_grad():
        exact = wide.core(*(x.double() for x in where.split(points)))
        return float((net.core(*where.split(points)) - exact).abs().max())


class Rows(nn.Module):
    """The same small network for every row: any number of rows will do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Attending(nn.Module):
    """Rows that look at each other."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.q, self.k = causal, nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), x, is_causal=self.causal)


def built(name: str, dtype: torch.dtype) -> CertifiedModule:
    torch.manual_seed(0)
    rows = af.Box.cube(-1, 1, shape=(4, 3))
    pairs = af.Box.cube(-1, 1, shape=(4, 2))
    w = torch.tensor([1.0, -0.5], dtype=dtype)
    middle = torch.tensor([[-1.0, 0.0, 1.0]])
    eps = 1e-3 if dtype == torch.float32 else 1e-9
    return {
        "formula": lambda: af.compile("exp(-x**2)*y", BOX, eps, dtype=dtype),
        "row of formulas": lambda: af.compile(["x*y", "sin(x)"], BOX, eps, dtype=dtype),
        "kinks": lambda: af.compile("max(x, y) - abs(x)", BOX, eps, dtype=dtype),
        "two inputs": lambda: af.compile(
            lambda a, b: (a * b).sum(-1), (af.Box.cube(-1, 1, shape=3), af.Box.cube(0, 2, shape=3)), eps, dtype=dtype
        ),
        "rows": lambda: af.compile(Rows().to(dtype), rows, eps, dtype=dtype),
        "attention": lambda: af.compile(Attending(False).to(dtype), pairs, eps, dtype=dtype),
        "causal attention": lambda: af.compile(Attending(True).to(dtype), pairs, eps, dtype=dtype),
        "mean of rows": lambda: af.compile(lambda x: x - x.mean(-2, keepdim=True), rows, eps, dtype=dtype),
        "norm": lambda: af.compile(
            nn.LayerNorm(3).to(dtype), af.Box.between(middle - 0.1, middle + 0.1), 1e-2, dtype=dtype
        ),
        "ramp": lambda: theorems.ramp(w, 0.1, -1, 1, form="tokens"),
        "max-affine": lambda: theorems.max_affine(
            lambda x: x.norm(dim=-1, keepdim=True), af.Box.cube(-1, 1, shape=2), cells=36, lipschitz=1.0, dtype=dtype
        ),
    }[name]()  # fmt: skip


WRITTEN = (
    "formula", "row of formulas", "kinks", "two inputs", "rows", "attention", "causal attention", "mean of rows",
    "norm", "ramp", "max-affine",
)  # fmt: skip
TRACED = ("ramp, causal", "product head")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", WRITTEN)
def test_onnx_runtime_computes_what_pytorch_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    net = built(name, dtype)
    file = to_onnx(net, tmp_path / "net.onnx", verify=False)
    found, scale = gap(net, file.path)
    if dtype == torch.float64:
        assert found <= 1e-12 * scale
    else:  # 1e-6, or what the network's own rounding makes unavoidable: both runtimes round, in their own order
        assert found <= max(1e-6 * scale, 2 * own_rounding(net))


@pytest.mark.parametrize("name", TRACED)
def test_what_is_traced_computes_the_same(name: str, tmp_path: Path) -> None:
    w = torch.tensor([1.0, -0.5], dtype=torch.float64)
    net = {
        "ramp, causal": lambda: theorems.ramp(w, 0.1, -1, 1, form="tokens", causal=True),
        "product head": lambda: af.ProductHead.symmetric(1, 2, dtype=torch.float64),
    }[name]()
    file = to_onnx(net, tmp_path / "net.onnx", verify=False)
    assert gap(net, file.path)[0] <= 1e-12
    sizes = [d.dim_param for d in onnx.load(file.path).graph.input[0].type.tensor_type.shape.dim]
    assert sizes[0] == "batch"


def test_differences_in_float32_are_those_of_rounding(net: CompiledNetwork, tmp_path: Path) -> None:
    file = to_onnx(net, tmp_path / "net.onnx", verify=False)
    found, _ = gap(net, file.path, 20_000)
    assert found <= 2 * own_rounding(net) <= 2 * net.certificate.by_source()["rounding"]


def test_a_file_has_attention_in_it_and_free_sizes(tmp_path: Path) -> None:
    net = built("rows", torch.float32)
    model = onnx.load(to_onnx(net, tmp_path / "net.onnx", verify=False).path)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 23)]
    counted = Counter(node.op_type for node in model.graph.node)
    assert counted["Attention"] == sum(group.scope == "memory" for group in net.network.groups()) > 0
    sizes = [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["batch", "tokens", 3]
    about = json.loads({entry.key: entry.value for entry in model.metadata_props}["attnforge"])
    assert about["bound"] == net.certificate.bound and about["kind"] == "certified"
    assert af.Box.from_json(about["box"]) == net.box


def test_a_bound_is_that_of_the_graph(tmp_path: Path) -> None:
    """Read with one exponential silu is within 4.9e-7 of what it is for; the softmax in a file errs by 8.6e-7."""
    head, y = FastActivation.fit("silu", -8, 8), torch.linspace(-8, 8, 50_001)
    file = to_onnx(head, tmp_path / "silu.onnx", verify=False)
    error = float((run_onnx(file, y).double() - torch.nn.functional.silu(y.double())).abs().max())
    assert head.bound is not None and error > head.bound
    about = json.loads({entry.key: entry.value for entry in onnx.load(file.path).metadata_props}["attnforge"])
    assert about["bound"] is None and about["kind"] == "not certified"

    anchors = AnchorHead.fit("sin", -3, 3, anchors=2000, dtype=torch.float32)
    bound = anchors.bound
    anchors.fast = True
    file = to_onnx(anchors, tmp_path / "sin.onnx", verify=False)
    about = json.loads({entry.key: entry.value for entry in onnx.load(file.path).metadata_props}["attnforge"])
    assert anchors.bound is not None and about["bound"] == bound > anchors.bound


def test_batch_and_tokens_are_free(net: CompiledNetwork, tmp_path: Path) -> None:
    opened = session(to_onnx(net, tmp_path / "net.onnx", verify=False))
    for count in (1, 7, 1000):
        x = BOX.sample(count, dtype=torch.float32)
        assert torch.allclose(run_onnx(opened, x), net(x), atol=1e-5)
    rows = built("rows", torch.float32)
    opened = session(to_onnx(rows, tmp_path / "rows.onnx", verify=False))
    for tokens in (1, 4, 9):
        x = torch.rand(2, tokens, 3)
        assert torch.allclose(run_onnx(opened, x), rows.network(x), atol=1e-5)
    fixed = onnx.load(to_onnx(built("mean of rows", torch.float32), tmp_path / "mean.onnx", verify=False).path)
    assert fixed.graph.input[0].type.tensor_type.shape.dim[1].dim_value == 4


def test_the_helper_leaves_the_graph_alone(net: CompiledNetwork, tmp_path: Path) -> None:
    opened = session(to_onnx(net, tmp_path / "net.onnx", verify=False), threads=1)
    wanted = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert opened.get_session_options().graph_optimization_level == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_plain_transformers_are_attention_nodes(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = to_plain(built("formula", dtype))
    file = to_onnx(plain, tmp_path / "plain.onnx", verify=False)
    found, scale = gap(plain, file.path, 500)
    assert found <= (1e-6 if dtype == torch.float32 else 1e-12) * scale
    counted = Counter(node.op_type for node in onnx.load(file.path).graph.node)
    assert counted["Attention"] == len(plain.blocks) and counted["Softmax"] == 0


@pytest.mark.parametrize("causal", [False, True])
def test_plain_theorems_take_fewer_tokens(causal: bool, tmp_path: Path) -> None:
    m = theorems.ramp([1.0, -0.5], 0.1, -1, 1, anchors=12, form="tokens")
    plain = to_plain(m, tokens=5, causal=causal)
    opened = session(to_onnx(plain, tmp_path / "plain.onnx", verify=False))
    for tokens in (1, 5):
        X = torch.rand(3, tokens, 2, dtype=torch.float64)
        assert torch.allclose(run_onnx(opened, X), m(X), rtol=0, atol=1e-12)


def test_exports_are_verified(net: CompiledNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "SECONDS", 60.0)  # a busy machine looks at fewer points in three
    file = to_onnx(net, tmp_path / "net.onnx")
    assert file.verification is not None and file.verification.passed
    assert file.verification.points > 4000 and file.verification.largest <= file.verification.bound
    assert "agrees with the network" in str(file.verification)


@pytest.mark.parametrize("name", ["weight", "shape"])
def test_a_broken_file_is_found(name: str, net: CompiledNetwork, tmp_path: Path) -> None:
    file = to_onnx(net, tmp_path / "net.onnx", verify=False)
    model = onnx.load(file.path)
    if name == "weight":
        constant = next(c for c in model.graph.initializer if c.data_type == onnx.TensorProto.FLOAT)
        constant.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(constant) * 1.001, constant.name))
    else:
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))
        model.graph.node[-1].op_type = "Unsqueeze"
        model.graph.node[-1].input.append("axis")
    onnx.save(model, file.path)
    with pytest.raises(af.CertificateError, match="DIFFERS" if name == "weight" else "returns shape"):
        af.export.verify(file, net)


def test_a_file_that_is_no_network(net: CompiledNetwork, tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes(b"not a model")
    with pytest.raises(af.ArgumentError, match=r"cannot read .*net\.onnx"):
        session(file)
    with pytest.raises(af.CertificateError, match="cannot be run by a fresh process"):
        af.export.verify(file, net)
    with pytest.raises(af.ArgumentError, match="there is no file"):
        session(tmp_path / "nothing.onnx")


def test_paths_are_refused_before_anything_is_written(net: CompiledNetwork, tmp_path: Path) -> None:
    taken = tmp_path / "taken.onnx"
    taken.write_text("mine")
    with pytest.raises(af.ArgumentError, match="there already; force=True"):
        to_onnx(net, taken)
    assert taken.read_text() == "mine"
    with pytest.raises(af.ArgumentError, match=r"ends with \.onnx"):
        to_onnx(net, tmp_path / "net.safetensors")
    with pytest.raises(af.ArgumentError, match="does not exist"):
        to_onnx(net, tmp_path / "nowhere" / "net.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(af.ArgumentError, match="is a folder"):
        to_onnx(net, tmp_path / "folder.onnx")
    assert to_onnx(net, taken, verify=False, force=True).path.stat().st_size > 1000


def test_mistakes(net: CompiledNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = to_onnx(net, tmp_path / "net.onnx", verify=False)
    with pytest.raises(af.ArgumentError, match=r"expected 1 input tensor\(s\) \(x\), got 2"):
        run_onnx(file, torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(af.ArgumentError, match="float32 or float64"):
        OnnxGraph(torch.bfloat16)
    with pytest.raises(af.ArgumentError, match="expected a network built by attnforge, got Linear"):
        to_onnx(nn.Linear(1, 1), tmp_path / "linear.onnx")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(af.MissingExtra, match=r"attnforge\[onnx\]"):
        session(file)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(af.MissingExtra, match=r"attnforge\[onnx\]"):
        to_onnx(net, tmp_path / "other.onnx")
