"""Plain transformers and their variants before the kernel: proved from their own weights, and hostile changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import attnforge as af
from attnforge import rasp, theorems
from attnforge.certificates import storage
from attnforge.certificates.certificate import weights_hash
from attnforge.errors import CertificateError
from attnforge.export.plain.build import to_plain
from attnforge.export.plain.derivation import derive
from attnforge.export.plain.transformer import PlainTransformer
from attnforge.groundtruth import vary
from attnforge.kernel.balls import NotProved
from attnforge.kernel.file import Saved, parse
from attnforge.kernel.plain.theorem import unfolded
from attnforge.kernel.prove import prove

SEQUENCES = [list(random.Random(i).choices("abc", k=1 + i % 4)) for i in range(60)]
BOX = af.Box(x=(-1, 1), y=(0, 2))


class Attention(nn.Module):
    """Attention over tokens."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(2, 2, generator=generator)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ self.q @ (x @ self.k).transpose(-1, -2), -1) @ x @ self.v


def formula(dtype: torch.dtype) -> tuple[Any, Callable[[PlainTransformer], float]]:
    net = af.compile("exp(x)*(y - 0.3*x)", BOX, eps=1e-2, dtype=dtype)
    return net, lambda plain: _largest(plain, lambda p: p[:, 0].exp() * (p[:, 1] - 0.3 * p[:, 0]))


def attention() -> tuple[Any, Callable[[PlainTransformer], float]]:
    exact = Attention().double()
    return af.compile(Attention(), af.Box.cube(-1, 1, (2, 2)), eps=1e-2), lambda plain: _largest(plain, exact)


def program() -> tuple[Any, Callable[[PlainTransformer], float]]:
    net = af.compile(rasp.library.sort(), rasp.Sequences("abc", 4))

    @torch.no_grad()
    def wrong(plain: PlainTransformer) -> float:
        out = plain.core(net.ids(SEQUENCES, 4))
        read = [[net.outputs[int(i)] for i in row[: len(s)].argmax(-1)] for row, s in zip(out, SEQUENCES, strict=True)]
        return float(read != [sorted(s) for s in SEQUENCES] or not bool(out.isfinite().all()))

    return net, wrong


@torch.no_grad()
def _largest(plain: PlainTransformer, truth: Callable[[torch.Tensor], torch.Tensor]) -> float:
    points = torch.cat([plain.box.sample(2000, dtype=plain.dtype), plain.box.corners(16, plain.dtype)])
    error = (plain.core(points).double() - truth(points.double())).abs()
    return float(error.max()) if bool(error.isfinite().all()) else float("inf")


CASES = {"float32": lambda: formula(torch.float32), "float64": lambda: formula(torch.float64), "attention": attention,
         "program": program}  # fmt: skip
CHANGES: list[Callable[[float], float]] = [
    lambda x: 1.01 * x, lambda x: x + 1, lambda x: float("nan"), lambda x: 0.0, lambda x: 1e30, lambda x: 1e-30,
]  # fmt: skip


def _written(plain: PlainTransformer, saved: Saved) -> Saved:
    """Changed weights under the old header."""
    header = {key: value for key, value in saved.header.items() if key not in ("digest", "format")}
    return parse(storage.written(header, weights_hash(plain), plain.state_dict()))


@pytest.mark.parametrize("name", CASES)
def test_a_plain_transformer_is_proved_and_its_changes_are_covered_or_refused(name: str) -> None:
    net, error = CASES[name]()
    plain = to_plain(net)
    saved = parse(plain.written())
    chosen = derive(plain, saved, plain.bound or 0.0, 8)
    bound = prove(saved, chosen).bound
    assert error(plain) <= bound <= 1.5 * (plain.bound or 0.0)
    draw, state = random.Random(name), {key: t.clone() for key, t in plain.state_dict().items()}
    refused = 0
    for change in CHANGES * 2:
        key = draw.choice(sorted(state))
        tensor = state[key].clone()
        used = torch.nonzero(tensor.view(-1))[:, 0].tolist()
        at = draw.choice(used) if used and draw.random() < 0.7 else draw.randrange(tensor.numel())
        tensor.view(-1)[at] = change(float(tensor.view(-1)[at]))
        plain.load_state_dict({**state, key: tensor})
        try:
            found = prove(_written(plain, saved), chosen).bound
        except CertificateError:
            refused += 1
            continue
        assert error(plain) <= found
    assert refused >= 2  # NaN, twice


def test_a_norm_in_a_file_is_proved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3, eps=0.1))
    nn.init.eye_(model[0].weight), nn.init.constant_(model[0].bias, 0.5)  # type: ignore[arg-type]
    plain = to_plain(af.compile(model, af.Box.cube(0.5, 1, (2,)), eps=0.1))
    plain.save(tmp_path / "norm.safetensors")
    found = af.check(tmp_path / "norm.safetensors")
    assert found.kernel is not None and found.bound is not None
    assert _largest(plain, model.double()) <= found.kernel <= 2 * found.bound


def test_what_exclusion_rests_on_is_looked_at() -> None:
    net, _ = formula(torch.float32)
    plain = to_plain(net)
    saved = parse(plain.written())
    chosen = derive(plain, saved, 1.0, 1)
    state = {key: t.clone() for key, t in plain.state_dict().items()}
    block, row = next((b, row) for b, row in enumerate(plain.heads) if row[0].purpose)
    head, width = row[0], plain.spec.stream
    name = f"blocks.{block}.attention.in_proj_weight"

    def changed(key: str, *place: int, by: float) -> Saved:
        tensor = state[key].clone()
        tensor[place] = tensor[place] * by if tensor[place] else by
        plain.load_state_dict({**state, key: tensor})
        return _written(plain, saved)

    assert prove(saved, chosen).bound < 1
    with pytest.raises(NotProved, match="hidden"):  # what hides keys is weaker
        prove(changed(name, head.width - 1, 0, by=2.0**-10), chosen)
    with pytest.raises(CertificateError, match="power of two"):
        prove(changed(name, head.width - 1, 0, by=3.0), chosen)
    with pytest.raises(CertificateError, match="register"):  # a register asks for content
        prove(changed(name, 0, 2, by=1.0), chosen)
    with pytest.raises(CertificateError, match="register"):  # the hidden register has a value
        prove(changed(name, 2 * width, 1, by=1.0), chosen)
    with pytest.raises(CertificateError, match="register is more"):
        prove(changed("positions", 0, width - 1, by=1.0), chosen)
    with pytest.raises(CertificateError, match="not its own"):
        prove(changed(f"blocks.{block}.attention.out_proj.weight", 0, 0, by=1.0), chosen)


def test_sizes_of_a_derivation_are_choices() -> None:
    net, _ = formula(torch.float32)
    plain = to_plain(net)
    saved = parse(plain.written())
    chosen = derive(plain, saved, 1.0, 1)
    with pytest.raises(NotProved):  # columns that are larger than said
        prove(saved, {**chosen, "sizes": [0.5 * x for x in chosen["sizes"]]})
    wide = prove(saved, {**chosen, "sizes": [4 * x for x in chosen["sizes"]]}).bound
    assert prove(saved, chosen).bound < wide
    with pytest.raises(CertificateError):
        prove(saved, {**chosen, "sizes": chosen["sizes"][1:]})
    with pytest.raises(CertificateError):
        prove(saved, {**chosen, "sizes": [-x for x in chosen["sizes"]]})


@pytest.mark.parametrize("case", [program, lambda: formula(torch.float32)], ids=["program", "formula"])
def test_variants_are_proved_unless_their_columns_are_mixed(case: Callable[[], Any]) -> None:
    net, error = case()
    varied = vary(net, ["permuted", "split", "distractor", "idle"], seed=2)
    saved = parse(varied.written())
    chosen = derive(varied, saved, 1.0, 1)
    assert not varied.beyond and error(varied) <= prove(saved, chosen).bound
    state = {key: t.clone() for key, t in varied.state_dict().items()}
    block, seat = next((b, h) for b, row in enumerate(varied.heads) for h, one in enumerate(row) if one.place[0] < 0
                       and bool(varied.seat_tables(state, b, h)[1].any()))  # fmt: skip
    wide = varied.spec.stream // len(varied.heads[block])
    key = f"blocks.{block}.attention.out_proj.weight"
    tensor = state[key].clone()
    tensor[:, seat * wide : (seat + 1) * wide] += 1.0  # a head that should do nothing writes everywhere
    varied.load_state_dict({**state, key: tensor})
    with pytest.raises(CertificateError):
        prove(_written(varied, saved), chosen)


def test_mixed_columns_are_beyond_the_kernel() -> None:
    net = af.compile(rasp.library.reverse(), rasp.Sequences("ab", max_length=3), dtype=torch.float64)
    varied = vary(net, ["rotated"], seed=1)
    assert varied.certificate.word == "exact by the analysis alone"
    with pytest.raises(NotProved, match="mixed"):
        prove(parse(varied.written()), {})


def swapped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-2).sin()


PAIRS, W = af.Box.cube(-1, 1, shape=(2, 1)), torch.tensor([1.0, -2.0])
THEOREMS: dict[str, Callable[[], Any]] = {
    "cells": lambda: theorems.max_affine(lambda x: x[..., :1].abs(), af.Box.cube(-1, 1, shape=2), 9, lipschitz=1.0),
    "cells, gathered": lambda: theorems.max_affine(swapped, PAIRS, 9, lipschitz=1.0, form="tokens"),
    "hats": lambda: theorems.two_layer(swapped, PAIRS, 1.0, lipschitz=1.0, anchors=9, form="tokens"),
    "softmax": lambda: theorems.attention_then_softmax(swapped, PAIRS, 1.0, lipschitz=1.0, anchors=9, form="tokens"),
    "ramp": lambda: theorems.ramp(W, 0.3, -1, 1, 9, form="tokens", radius=2.0),
    "warm ramp": lambda: theorems.ramp(W, 0.3, -1, 1, 9, variant="warm", radius=2.0),
    "gate ramp": lambda: theorems.ramp(W, 0.3, -1, 1, 9, variant="gate", radius=2.0),
}


@pytest.mark.parametrize("name", THEOREMS)
def test_a_theorem_in_plain_form_is_its_own_network(name: str) -> None:
    """K46: what is unfolded from the transformer's numbers is what the theorem's file holds, number by number; nothing
    can be added to the read-out, nor to the embedding, however little."""
    net = THEOREMS[name]()
    plain, own = to_plain(net), parse(net.written())
    saved = parse(plain.written())
    found = unfolded(saved)
    assert found.header["family"] == net.family and not plain.beyond
    for key, tensor in found.tensors.items():
        wanted = own.tensors[key].rows()
        shared = tensor.rows() if len(tensor.rows()) == len(wanted) else tensor.rows()[:1]
        assert shared == wanted, key
    assert set(own.tensors) - set(found.tensors) <= {"w", "t"}  # of a ramp: its description
    chosen = derive(plain, saved, net.bound)
    bound = prove(saved, chosen).bound
    assert bound == prove(replace(own, header=found.header), chosen).bound <= 1.1 * net.bound
    for size in (1e-300, 1e-30, 1e-7, 1.0):
        for key in ("readout.weight", "readout.bias", "embed.weight"):
            tensor = saved.tensors[key]
            at = next(i for i, x in enumerate(tensor.numbers) if x == 0)
            numbers = tuple(x + size * (i == at) for i, x in enumerate(tensor.numbers))
            if key == "embed.weight" and "ramp" in name and name != "ramp":
                continue  # there it holds the map itself
            with pytest.raises(CertificateError):
                prove(replace(saved, tensors={**saved.tensors, key: replace(tensor, numbers=numbers)}), chosen)
    header = copy.deepcopy(saved.header)
    header["config"]["boxes"][0]["upper"][0] *= 2
    with pytest.raises(CertificateError, match="another box"):
        prove(replace(saved, header=header), chosen)


@pytest.mark.parametrize("name", ["cells", "ramp"])
def test_a_changed_theorem_in_plain_form_is_covered_or_refused(name: str, benchmark: ModuleType) -> None:
    results = [result for _, result in benchmark.file_mutants(to_plain(THEOREMS[name]()), 4, random.Random(name))]
    assert "BROKEN" not in results and "refused" in results
