"""Guards hold under torch.compile: what is refused without it is refused with it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import Tensor, nn

import attnforge as af
from attnforge.certificates.machine import survey

X = torch.tensor([[0.5, 0.25], [-1.0, 1.0]])


@pytest.fixture(scope="module")
def compiled() -> Callable[[Tensor], Tensor]:
    net = af.compile("x*y", af.Box(x=(-1, 1), y=(0, 1)), 1e-3, strict=True)
    return torch.compile(net, backend="eager")


def test_a_compiled_network_computes(compiled: Callable[[Tensor], Tensor]) -> None:
    assert torch.allclose(compiled(X), X[:, 0] * X[:, 1], atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.5], ids=["nan", "infinity", "outside"])
def test_points_are_looked_at(compiled: Callable[[Tensor], Tensor], bad: float) -> None:
    compiled(X)  # the graph is there already: the guard is asked again at every call
    with pytest.raises(af.DomainError):
        compiled(torch.full_like(X, bad))


def test_reduced_precision_is_refused(compiled: Callable[[Tensor], Tensor]) -> None:
    compiled(X)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(af.PrecisionError, match="autocast"):
        compiled(X)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(af.PrecisionError, match="medium"):
            compiled(X)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("way", [
    torch.func.vmap,
    lambda f: lambda x: torch.func.vmap(torch.func.vmap(f, in_dims=1))(x[:, :, None]),
    lambda f: torch.func.jacrev(lambda x: f(x.reshape(-1, 2))),
    lambda f: torch.func.vmap(torch.func.hessian(f)),
    lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
], ids=["vmap", "twice", "jacobian", "hessian", "jvp"])  # fmt: skip
def test_points_are_looked_at_within_transforms(way: Callable[..., Callable[[Tensor], Tensor]]) -> None:
    net = af.compile("x*y", af.Box(x=(-1, 1), y=(0, 1)), 1e-3, strict=True)
    way(net)(X)
    for bad in (float("nan"), float("inf"), 1.5):
        with pytest.raises(af.DomainError):
            way(net)(torch.full_like(X, bad))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(af.PrecisionError, match="autocast"):
        way(net)(X)


def test_one_whole_graph_says_that_it_is_not_guarded() -> None:
    net = af.compile("x + y", af.Box(x=(-1, 1), y=(0, 1)), 1e-3, strict=True)
    torch.compiler.reset()  # graphs that are there already, with their guards, would be used again
    with pytest.warns(af.DomainWarning, match="not guarded"):
        out = torch.compile(net, backend="eager", fullgraph=True)(X)
    assert torch.equal(out, net(X))


def test_exported_graphs_have_no_guard() -> None:
    net = af.compile("x*y", af.Box(x=(-1, 1), y=(0, 1)), 1e-3, strict=True)
    program = torch.export.export(net, (X,)).module()
    assert torch.equal(program(2 * X), net.core(2 * X)), "an export is the attention-only computation, nothing else"


def test_what_is_shown_was_checked(tmp_path: object) -> None:
    """The program in full; the text of a formula only where it was read again; lemmas and assumptions that apply."""
    box = af.Box(x=(-1, 1), y=(0, 1))
    net = af.compile("sin(x)*y + 0.1", box, 1e-3)
    shown = str(net.certificate)
    assert net.certificate.verified and "not verified" not in shown
    assert "apply: input" in shown and "function sin" in shown and "0.1" in shown and repr(box) in shown
    assert net.certificate.lemmas == ("A4", "A5", "C1", "R2", "R8", "H1") and "exponential within 3 u" in shown

    plain = af.compile("x - y", box, 1e-3).certificate
    assert plain.lemmas == ("R2", "R8", "H1") and "exponential" not in str(plain)
    assert af.compile("x", af.Box(x=(-1, 1)), 1e-3).bound == 0.0, "nothing is rounded: a bound of zero is zero"

    module = af.compile(torch.nn.Linear(2, 1), af.Box.cube(-1, 1, shape=2), 1e-3).certificate
    assert not module.verified and "text not verified" in str(module)


def test_backends_that_are_set_apart_are_refused() -> None:
    net, backend = af.compile("x*y", af.Box(x=(-1, 1), y=(0, 1)), 1e-3), getattr(torch.backends.mkldnn, "matmul", None)
    before = getattr(backend, "fp32_precision", None)
    if before is None:
        pytest.skip("this PyTorch has one switch for all backends")
    try:
        backend.fp32_precision = "bf16"
        with pytest.raises(af.PrecisionError, match="fp32_precision"):
            net(X)
        assert not survey("cpu", torch.float32, effort=500)[0].holds
    finally:
        backend.fp32_precision = before
    net(X)


def test_subnormal_numbers_are_read_as_they_are() -> None:
    """1e30 * 1e-40 is 1e-10, and 0 for a processor that takes 1e-40 for 0."""
    net, x = af.compile("1e30*x", af.Box(x=(1e-42, 1e-39)), eps=1e-3), torch.tensor([[1e-40]])
    assert abs(float(net(x).detach().double()) - 1e30 * float(x.double())) <= net.certificate.bound < 1e-12
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(af.PrecisionError, match="subnormal"):
            net(x)
        with pytest.raises(af.CertificateError, match="subnormal"):
            af.certify(net)
        with pytest.raises(af.PrecisionError, match="subnormal"):
            af.compile("x", af.Box(x=(0, 1)), eps=1e-3)
        assert not survey("cpu", torch.float32, effort=500)[0].holds
    finally:
        torch.set_flush_denormal(False)
    assert survey("cpu", torch.float64, effort=500)[0].holds


def hooked(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, given, out: out + 1)


def prehooked(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def pruned(layer: nn.Module) -> None:
    prune.identity(layer, "S")  # type: ignore[no-untyped-call]
    with torch.no_grad():
        layer.S_orig[1, 0] += 3  # type: ignore[index, operator]


def normed(layer: nn.Module) -> None:
    torch.nn.utils.weight_norm(layer, "S")
    with torch.no_grad():
        layer.S_g *= 3


def parametrized(layer: nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer, "S", nn.Dropout(0.5))


def replaced(layer: nn.Module) -> None:
    layer.forward = lambda Z: Z + 1  # type: ignore[method-assign]


def test_tensors_that_no_hash_sees_have_no_certificate() -> None:
    net = af.compile("sin(x)*y", af.Box(x=(-1, 1), y=(0, 1)), 1e-3)
    layer = net.network.layers[0]
    S = layer.S.detach().clone()
    del layer.S
    layer.S = S
    with pytest.raises(af.CertificateError, match="no parameter"):
        af.certify(net)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("change", [hooked, prehooked, pruned, normed, parametrized, replaced])
def test_weights_that_others_make_have_no_certificate(change: Callable[[nn.Module], None]) -> None:
    """Pruned by a hook and trained on, a layer computes with other weights than those that lie there until it runs."""
    net = af.compile("sin(x)*y", af.Box(x=(-1, 1), y=(0, 1)), 1e-3)
    change(net.network.layers[0])
    with pytest.raises(af.CertificateError, match="take them off"):
        af.certify(net)
