"""Networks of numbers in a rotated stream keep their bounds, and what is changed in their weights is found out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.dtypes import stored
from attnforge.export.plain.spec import scale_of
from attnforge.export.plain.stream import first_rows
from attnforge.groundtruth.variants.build import vary
from attnforge.groundtruth.variants.rotation import REGISTER, TOKEN
from attnforge.groundtruth.variants.variant import Variant

ROTATED = ("permuted", "split", "distractor", "idle", "rotated")
SQUARE = af.Box(x=(-1, 1), y=(-1, 1))


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def mixing(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(-2, -1), -1) @ torch.relu(x)


Target = Callable[[Tensor], Tensor]
#: What is compiled, on which box, and the same as a function of points.
CASES: dict[str, tuple[object, af.Box, Target]] = {
    "product": ("sin(x*y) + x", SQUARE, lambda p: torch.sin(p[:, 0] * p[:, 1]) + p[:, 0]),
    "kinks": ("max(x, y) - abs(x)", SQUARE, lambda p: torch.maximum(p[:, 0], p[:, 1]) - p[:, 0].abs()),
    "module": (module(), af.Box.cube(-1, 1, shape=(3,)), module()),
    "sequence": (mixing, af.Box.cube(-1, 1, shape=(4, 2)), mixing),
    "largest": (lambda x: x.amax(-2), af.Box.cube(-1, 1, shape=(4, 2)), lambda x: x.amax(-2)),
}


def compiled(name: str, dtype: torch.dtype = torch.float64) -> af.CompiledNetwork:
    target, box, _ = CASES[name]
    return af.compile(target, box, eps=1e-2, dtype=dtype)  # type: ignore[return-value]


def distance(variant: Variant, name: str, count: int = 400) -> float:
    """The largest error at samples, corners and kinks, for weights as they are now."""
    box = variant.spec.boxes[0]
    points = torch.cat([box.sample(count, dtype=variant.dtype), box.sample(count, dtype=variant.dtype).round()])
    with torch.no_grad():
        off = variant.core(points).double().reshape(len(points), -1) - CASES[name][2](points.double()).reshape(
            len(points), -1
        )
    return float(off.abs().nan_to_num(nan=torch.inf).max())


@pytest.mark.parametrize("name", list(CASES))
def test_a_rotated_network_keeps_its_bound(name):
    net = compiled(name)
    variant = vary(net, ROTATED, 3)
    assert variant.certificate.kind == "analysed" and {"H6", "H7"} <= set(variant.certificate.lemmas)
    assert distance(variant, name) <= variant.bound <= 1e-2
    roles = {h.purpose.split(":")[0] for row in variant.heads for h in row}
    mixed = (variant.basis.abs() > 1e-3).sum(1)
    assert {"distractor", "idle"} <= roles and int(mixed.min()) > 4  # no direction of the stream is a column
    again = vary(net, ROTATED, 3).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in variant.state_dict().items())


@pytest.mark.parametrize("name", list(CASES))
def test_every_head_and_every_row_is_where_the_lemma_says(name):
    """In float32, where rounding is seen: heads are run one by one, beside their references in float64."""
    net = compiled(name)
    variant = copy.deepcopy(vary(net, ROTATED, 1)).to(torch.float32)
    turned = variant.turned(copy.deepcopy(net).to(torch.float32))
    stream, basis, spec = turned.stream, turned.basis.rows, variant.spec
    points = net.box.sample(24, dtype=torch.float32)
    front, tokens = spec.registers, spec.tokens
    computed = variant.residual(points).detach()
    embed, positions = first_rows(stream)
    given = points.double().numpy().reshape(len(points), tokens, -1)
    x = np.zeros((len(points), front + tokens, len(basis)))
    x[..., : stream.width] = positions
    x[:, front:, : stream.width] += given @ embed.T
    block, ids = -1, list(stream.columns.ids)
    for number, heads in enumerate(stream.layers):
        if not heads:
            continue
        block, before = block + 1, x.copy()
        attention, row = variant.blocks[block].attention, spec.heads[block]
        d = spec.stream // len(row)
        q, k, v = (computed @ attention.in_proj_weight.T).chunk(3, -1)
        split = (part.reshape(len(points), front + tokens, len(row), d).transpose(1, 2) for part in (q, k, v))
        q, k, v = split
        z = torch.softmax((q / scale_of(d)) @ k.transpose(-2, -1), -1) @ v
        computed = computed + z.transpose(1, 2).reshape(computed.shape) @ attention.out_proj.weight.T
        meant, tables = np.zeros_like(x), {head.place: head for head in heads}
        fresh = list(stream.fresh[number].values())
        for h, about in enumerate(row):
            gives = stored(z[:, h])
            writes = list(about.writes)
            if about.place not in tables:
                if writes:
                    back = stored(attention.out_proj.weight).T.reshape(len(row), d, -1)[h]
                    x[..., writes] += gives @ (back @ np.linalg.pinv(basis[writes]))
                continue
            head = tables[about.place]
            width, own = len(head.query), [fresh.index(c) for c in writes]
            rows = before[:, front:, :width]
            keys, values = (
                np.concatenate([np.broadcast_to(t[ids], (len(x), len(ids), t.shape[1])), rows @ t], 1)
                for t in (head.key, head.value)
            )
            seen = np.zeros((tokens, front + tokens), dtype=bool)
            seen[:, 1 : head.slots + 1] = True
            group = stream.source.layers[number].heads()[head.place[1]]
            seen[:, front:] = {
                "memory": np.zeros((tokens, tokens)), "self": np.eye(tokens),
                "tokens": np.tril(np.ones((tokens, tokens))) if group.causal else np.ones((tokens, tokens)),
            }[head.scope]  # fmt: skip
            logits = np.where(seen, (rows @ head.query) @ keys.transpose(0, 2, 1), -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            exact = weights / weights.sum(-1, keepdims=True) @ values
            x[:, front:, writes] += gives[:, front:, : head.output.shape[0]] @ head.output[:, own]
            meant[:, front:, writes] += exact @ head.output[:, own]
        off = np.abs(x - meant)[:, front:, fresh].max((0, 1))
        assert (off <= turned.off[number] + 1e-12).all()
        assert off.max() > 1e-5 * turned.off[number].max()  # and the lemma does not say just anything
    rest = stored(computed) - x @ basis
    tokens_off = max(turned.basis.norms(row[front:]).max() for row in rest)
    registers_off = max(turned.basis.norms(row[:front]).max() for row in rest)
    assert tokens_off <= turned.error[TOKEN].sum() and registers_off <= turned.error[REGISTER].sum()
    assert tokens_off > 1e-5 * turned.error[TOKEN].sum()


@pytest.mark.parametrize("name", list(CASES))
def test_changed_weights_are_proved_anew_or_refused(name):
    """Whatever is done to stored numbers: the bound holds for what is there, or there is none."""
    net, rng = compiled(name), np.random.default_rng(5)
    whole, kept = vary(net, ROTATED, 2), 0
    changes: list[Callable[[Tensor], object]] = [
        lambda t: t[int(rng.integers(len(t)))].add_(10.0 ** rng.uniform(-12, 2)),
        lambda t: t.mul_(1 + 10.0 ** rng.uniform(-14, -3)),
        lambda t: t.add_(torch.randn(len(t), dtype=t.dtype) * 10.0 ** rng.uniform(-14, -5)),
        lambda t: t[int(rng.integers(len(t)))].fill_(float(rng.choice([1e30, -1e30, 1e300]))),
    ]  # fmt: skip
    for change in changes * 3:
        variant = copy.deepcopy(whole)
        names = list(variant.state_dict())
        with torch.no_grad():
            change(variant.state_dict()[names[int(rng.integers(len(names)))]].reshape(-1))
        try:
            found = variant.recertify().bound
        except (af.CertificateError, af.PrecisionError):
            continue
        assert distance(variant, name, 100) <= found
        kept += 1
    assert kept > 2
    for number in (float("nan"), float("inf")):
        for tensor in ("positions", "blocks.0.attention.in_proj_weight", "readout.bias"):
            variant = copy.deepcopy(whole)
            with torch.no_grad():
                variant.state_dict()[tensor].reshape(-1)[-1] = number
            with pytest.raises(af.CertificateError, match="not finite"):
                variant.recertify()


def test_a_cast_is_proved_anew():
    variant = copy.deepcopy(vary(compiled("kinks"), ROTATED, 0))
    before = variant.bound
    variant.to(torch.float32)
    assert before < variant.recertify().bound < 1e-2 and distance(variant, "kinks") <= variant.recertify().bound
    with pytest.raises(af.CertificateError, match="float32 or float64"):
        copy.deepcopy(variant).to(torch.bfloat16).recertify()
    with pytest.raises(af.PrecisionError, match=r"dtype=torch\.float64"):
        vary(compiled("product", torch.float32), "rotated")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_far_from_one(scale):
    formula, box = f"{scale!r}*sin(x) + {scale!r}*max(x, 0.5)", af.Box(x=(-1, 1))
    net = af.compile(formula, box, eps=1e-3 * scale, dtype=torch.float64)
    variant = vary(net, ROTATED, 1)
    points = box.sample(300)
    meant = scale * (torch.sin(points) + torch.clamp_min(points, 0.5))
    off = float((variant(points).detach().reshape(-1) - meant.reshape(-1)).abs().max())
    assert off <= variant.bound < 2e-3 * scale


def test_what_is_read_back_is_proved_again(tmp_path: Path):
    variant = vary(compiled("product"), ROTATED, 4)
    variant.save(tmp_path / "rotated.safetensors")
    assert af.check(tmp_path / "rotated.safetensors").bound == variant.bound
    read = af.load(tmp_path / "rotated.safetensors")
    assert isinstance(read, Variant) and read.recertify().bound == variant.bound
    truth = af.manifest(variant)
    assert truth == af.manifest(read)
    done = af.groundtruth.check(truth, read)
    assert done.witnesses > 0 and done.proved == 0 and done.tried > 50  # no zeros prove anything here
    assert {h.role for h in truth.heads if h.moves} == {"product", "function"}
    relevant = {(e.source, e.target) for e in truth.edges if e.moves}
    plain = af.manifest(vary(compiled("product"), ROTATED[:-1], 4))
    assert len(relevant) == len([e for e in plain.edges if e.moves])


def test_words_that_do_not_fit_are_refused():
    variant = vary(compiled("kinks"), ROTATED, 0)
    heads = variant.spec.heads
    first = next(h for h in heads[0] if h.place[0] >= 0)
    for about in (replace(first, omega=first.omega / 2), replace(first, omega=float("nan")),
                  replace(first, writes=()), replace(first, place=(-1, -1, -1))):  # fmt: skip
        row = tuple(about if head is first else head for head in heads[0])
        liar = copy.deepcopy(variant)
        liar.spec = replace(variant.spec, heads=(row, *heads[1:]))
        with pytest.raises((af.CertificateError, af.PrecisionError)):
            liar.recertify()
    with pytest.raises(af.ArgumentError, match="codes"):
        vary(compiled("kinks"), "superposed")
