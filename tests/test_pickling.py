"""Networks, heads, exports and converted models are ordinary Python objects: copied, pickled, sent to other processes,
with their certificates."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import joblib
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import attnforge as af
from attnforge.certificates.certified import CertifiedModule
from attnforge.conversion.site import SiteModule
from attnforge.functions.registry import from_callable, get
from attnforge.heads.build import head_for

BOX = af.Box(x=(-1, 1), y=(0.5, 2))


def bump(y: Tensor) -> Tensor:
    return 1 / (1 + y * y)


def saddle(X: Tensor) -> Tensor:
    return (X[..., 0] * X[..., 1]).unsqueeze(-1)


def converted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.LayerNorm(3), nn.Linear(3, 1)).eval()
    return af.convert(model, calibration=torch.rand(8, 2), eps=1e-2, level="pure")[0]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh()).eval()


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "formula": lambda: af.compile("exp(-x**2)/y + abs(x)", BOX, eps=1e-1),
    "module": lambda: af.compile(module(), af.Box.cube(-1, 1, shape=(2,)), eps=1e-1),
    "anchor": lambda: af.AnchorHead.fit("sin", -3, 3, eps=1e-3),
    "power": lambda: af.AnchorHead.fit("power(2.5)", 1, 2, eps=1e-3),
    "callable": lambda: af.AnchorHead.fit(from_callable(bump, 2.0), -1, 1, anchors=9),
    "fast": lambda: af.AnchorHead.fit("sin", -3, 3, eps=1e-2, fast=True),
    "gate": lambda: af.GateHead.fit("relu", -3, 3),
    "chain": lambda: head_for("elu", -3, 3, 1e-2),
    "product": lambda: af.ProductHead.fit((-1, 1), (-1, 1), eps=1e-2),
    "norm": lambda: af.NormHead.fit(4, (0.5, 2.0), eps=1e-2),
    "theorem": lambda: af.theorems.ramp([1.0], 0.0, -1.0, 1.0, anchors=5),
    "two layers": lambda: af.theorems.max_affine(saddle, af.Box.cube(0, 1, shape=(2,)), cells=4, lipschitz=2.0),
    "plain": lambda: af.export.to_plain(af.compile("sin(x*y)", BOX, eps=1e-1)),
    "converted": converted,
}
#: Networks that have been made already, by name.
MADE: dict[str, nn.Module] = {}


def made(name: str) -> nn.Module:
    if name not in MADE:
        MADE[name] = MAKERS[name]()
    return MADE[name]


def evidence(net: nn.Module) -> tuple[Tensor, tuple[Any, ...]]:
    """What a network says of an input, and all certificates inside of it."""
    inputs = net.example_input() if isinstance(net, CertifiedModule) else (torch.full((2, 2), 0.25),)
    parts = [m for m in net.modules() if isinstance(m, CertifiedModule | SiteModule)]
    with torch.no_grad():
        return net(*inputs), tuple(part.certificate for part in parts if isinstance(part, CertifiedModule))


def through_torch(net: nn.Module) -> nn.Module:
    held = io.BytesIO()
    torch.save(net, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def through_joblib(net: nn.Module) -> nn.Module:
    held = io.BytesIO()
    joblib.dump(net, held)
    held.seek(0)
    return joblib.load(held)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch": through_torch,
    "joblib": through_joblib,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_way_keeps_outputs_and_certificates(name: str) -> None:
    net = made(name)
    output, certificates = evidence(net)
    assert certificates or name == "converted"
    for way, sent in WAYS.items():
        again = sent(net)
        there, theirs = evidence(again)
        assert torch.equal(there, output) and theirs == certificates, way
        assert type(again) is type(net) and repr(again) == repr(net), way
    if isinstance(again, CertifiedModule):
        assert again.recertify().bound == net.bound


def test_a_changed_copy_has_no_certificate() -> None:
    net = pickle.loads(pickle.dumps(made("anchor")))
    with torch.no_grad():
        next(net.parameters()).mul_(1.5)
    with pytest.raises(af.CertificateError, match="stale"):
        net.certificate  # noqa: B018


class Evaluations(Dataset[tuple[str, Tensor, tuple[Any, ...]]]):
    """Networks, evaluated where an item is asked for."""

    def __init__(self, nets: dict[str, nn.Module]):
        self.nets = nets

    def __len__(self) -> int:
        return len(self.nets)

    def __getitem__(self, i: int) -> tuple[str, Tensor, tuple[Any, ...]]:
        name = list(self.nets)[i]
        return (name, *evidence(self.nets[name]))


def as_it_is(item: Any) -> Any:
    return item


def test_workers_that_are_spawned_see_the_same() -> None:
    nets = {name: made(name) for name in MAKERS}
    loader = DataLoader(Evaluations(nets), None, num_workers=1, multiprocessing_context="spawn", collate_fn=as_it_is)
    seen = {name: (output, certificates) for name, output, certificates in loader}
    assert set(seen) == set(nets)
    for name, net in nets.items():
        output, certificates = evidence(net)
        assert torch.equal(seen[name][0], output) and seen[name][1] == certificates, name


def test_a_function_is_kept_by_its_name_alone() -> None:
    for name in ("gelu", "power(-1.5)", "piecewise_linear([-1, 0, 1], [0, 1, 0])", "expr: 1/(1 + y**2)"):
        fn = get(name)
        assert pickle.loads(pickle.dumps(fn)) is fn and copy.deepcopy(fn) is fn
        assert len(pickle.dumps(fn)) < 150
    own = from_callable(bump, 2.0)
    assert pickle.loads(pickle.dumps(own)) == own
