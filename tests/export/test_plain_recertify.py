"""Whatever was done to the tensors of a plain transformer: `af.certify` gives a bound that holds, or says why not.

Truth is computed in extended precision (64 bits of mantissa), so that bounds of float64 can be tested as well.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.export import PlainTransformer, to_plain
from attnforge.export.plain.spec import FLAG
from attnforge.heads.families import FAMILIES

Long = np.ndarray
SQUARE = af.Box(x=(-1.0, 1.0), y=(0.5, 2.0))
ROWS = af.Box.cube(-1, 1, shape=(3, 2))
MATRIX = np.array([[0.7, -0.3], [0.2, 0.9]])


def softmax(z: Long) -> Long:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normed(x: Long) -> Long:
    z = x @ MATRIX.T.astype(np.longdouble)
    c = z - z.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + np.longdouble(0.1))


def masked(z: Long) -> Long:
    return np.where(np.arange(z.shape[-2])[:, None] >= np.arange(z.shape[-1]), z, -np.inf)


def seen(n: int) -> Tensor:
    """A mask that is not causal: no token sees the one before it."""
    return ~torch.diag(torch.ones(n - 1, dtype=torch.bool), -1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(MATRIX))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x @ self.weight.T, (2,), eps=0.1)


#: name -> what is compiled, times a factor; its box; its truth; the families it must use.
CASES: dict[str, tuple[Callable[[float], object], af.Box, Callable[[Long], Long], set[str]]] = {
    "anchors": (lambda t: f"{t!r}*(sin(2*x) + 1/y)", SQUARE, lambda x: np.sin(2 * x[..., 0]) + 1 / x[..., 1],
                {"anchor"}),
    "gates": (
        lambda t: f"{t!r}*(abs(x - y/4) + clip(x, -0.25, 0.5) + sigmoid(3*x - y))", SQUARE,
        lambda x: np.abs(x[..., 0] - x[..., 1] / 4) + np.clip(x[..., 0], -0.25, 0.5)
        + 1 / (1 + np.exp(x[..., 1] - 3 * x[..., 0])), {"gate"},
    ),
    "products": (lambda t: f"{t!r}*(x*y)*(x - y)", SQUARE, lambda x: x[..., 0] * x[..., 1] * (x[..., 0] - x[..., 1]),
                 {"product"}),
    "squares": (lambda t: f"{t!r}*sqrt(x**2 + (y - 1)**2)", SQUARE,
                lambda x: np.sqrt(x[..., 0] ** 2 + (x[..., 1] - 1) ** 2), {"square"}),
    "mixed": (lambda t: f"{t!r}*(sin(x*y) + relu(x - y/2))", SQUARE,
              lambda x: np.sin(x[..., 0] * x[..., 1]) + np.maximum(x[..., 0] - x[..., 1] / 2, 0),
              {"anchor", "gate", "product"}),
    "softmax": (lambda t: lambda x: t * (3 * x).softmax(-1), ROWS, lambda x: softmax(3 * x), {"softmax"}),
    "attention": (
        lambda t: lambda x: t * ((x @ x.mT * 1.37).softmax(-1) @ x), ROWS,
        lambda x: softmax(x @ np.swapaxes(x, -1, -2) * np.longdouble(1.37)) @ x, {"attention"},
    ),
    "causal": (
        lambda t: lambda x: t * ((x @ x.mT).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
                                 .softmax(-1) @ x).relu(), ROWS,
        lambda x: np.maximum(softmax(masked(x @ np.swapaxes(x, -1, -2))) @ x, 0), {"attention", "gate"},
    ),
    "mask": (
        lambda t: lambda x: t * ((x @ x.mT).masked_fill(~seen(3), -torch.inf).softmax(-1) @ x), ROWS,
        lambda x: softmax(np.where(seen(3).numpy(), x @ np.swapaxes(x, -1, -2), -np.inf)) @ x, {"attention"},
    ),
    "mix": (
        lambda t: lambda x: t * ((x @ x.mT).softmax(-1) @ x + (x.mean(-2, keepdim=True) / 2 - x.flip(-2)).abs()), ROWS,
        lambda x: softmax(x @ np.swapaxes(x, -1, -2)) @ x + np.abs(x.mean(-2, keepdims=True) / 2 - x[..., ::-1, :]),
        {"mix", "gate", "attention"},
    ),
    "max": (lambda t: lambda x: t * (x.amax(-2, keepdim=True) + x), ROWS, lambda x: x.max(-2, keepdims=True) + x,
            {"max"}),
    "norm": (lambda t: Norm() if t == 1 else Scaled(Norm(), t), ROWS, normed, {"norm"}),
}  # fmt: skip
DTYPES = (torch.float32, torch.float64)
BUILT: dict[tuple[str, torch.dtype, float], tuple[CompiledNetwork, PlainTransformer]] = {}


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.inner(x)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def built(name: str, dtype: torch.dtype, factor: float = 1.0) -> tuple[CompiledNetwork, PlainTransformer]:
    if (name, dtype, factor) not in BUILT:
        target, box, _, _ = CASES[name]
        given = target(factor)
        given = given.to(dtype) if isinstance(given, nn.Module) else given
        eps = 1e-2 if dtype == torch.float32 or name == "squares" else 1e-5
        net = af.compile(given, box, eps=eps, dtype=dtype)
        BUILT[name, dtype, factor] = net, to_plain(net)
    net, plain = BUILT[name, dtype, factor]
    return net, copy.deepcopy(plain)


def measured(name: str, plain: PlainTransformer, seed: int = 0) -> float:
    """The largest error at sampled points, at corners and beside both."""
    _, box, truth, _ = CASES[name]
    rng = torch.Generator().manual_seed(seed)
    shape = box.lower.shape
    x = torch.rand((400, *shape), generator=rng, dtype=torch.float64) * (box.upper - box.lower) + box.lower
    x = torch.cat([x, box.corners(64, torch.float64), (x[:50] * 1e-6).clamp(box.lower, box.upper)]).to(plain.dtype)
    x = x.double().clamp(box.lower, box.upper).to(plain.dtype)
    exact = truth(x.double().numpy().astype(np.longdouble))
    return float(np.abs(plain.core(x).double().numpy() - exact).max())


def holds(name: str, plain: PlainTransformer) -> bool:
    """Whether the present weights are certified; a bound that does not hold fails the test."""
    try:
        bound = af.certify(plain).bound
    except af.CertificateError:
        return False
    error = measured(name, plain)
    assert bound is not None
    assert error <= bound, f"{name}: {error:.3e} is more than the certified {bound:.3e}"
    return True


def test_all_families_are_among_the_cases() -> None:
    assert set().union(*(families for *_, families in CASES.values())) == set(FAMILIES)
    for name, (*_, families) in CASES.items():
        assert families <= {site.family for site in built(name, torch.float32)[0].layout.sites}, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_an_untouched_export_and_copies_of_it(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, plain = built(name, dtype)
    stated = plain.certificate.bound
    assert measured(name, plain) <= stated
    assert af.certify(copy.deepcopy(plain)).bound == stated
    plain.save(tmp_path / "plain.safetensors")
    assert af.check(tmp_path / "plain.safetensors").bound == stated


@pytest.mark.parametrize("name", CASES)
def test_from_float32_to_float64(name: str, tmp_path: Path) -> None:
    """The numbers stay, rounding of sums goes; what was rounded when weights were stored must still be counted."""
    _, plain = built(name, torch.float32)
    if not holds(name, plain.double()):
        assert name == "mask", "which may hide tokens by as much as float32 needs: float64 would still see them"
        return
    plain.save(tmp_path / "plain.safetensors")
    assert af.check(tmp_path / "plain.safetensors").bound <= plain.certificate.bound


@pytest.mark.parametrize("name", CASES)
def test_from_float64_to_float32(name: str) -> None:
    _, plain = built(name, torch.float64)
    certified = holds(name, plain.float())
    assert certified or name in ("max", "mix"), "their sharpness in float64 is beyond float32"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_by_way_of_bfloat16(name: str, dtype: torch.dtype) -> None:
    _, plain = built(name, dtype)
    holds(name, plain.bfloat16().to(dtype))
    with pytest.raises(af.CertificateError, match="bfloat16"):
        af.certify(plain.bfloat16())


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_another_network(name: str) -> None:
    """Those of a function that is a little larger: near enough for a bound, far enough to break the old one."""
    _, plain = built(name, torch.float64)
    _, other = built(name, torch.float64, 1.001)
    if {k: v.shape for k, v in plain.state_dict().items()} != {k: v.shape for k, v in other.state_dict().items()}:
        pytest.skip("the other network has another shape")
    stated = plain.certificate.bound
    plain.load_state_dict(other.state_dict())
    if holds(name, plain):
        assert plain.certificate.bound > stated
    assert measured(name, plain) > stated


def test_a_source_that_was_trained_since_is_no_excuse() -> None:
    """The network a plain form was made from states what its heads are for; its present weights prove nothing."""
    net, plain = built("mixed", torch.float32)
    stated = plain.certificate.bound
    source = plain.source
    assert source is not None
    assert source is not net, "a deep copy has a source of its own"
    for p in source.parameters():
        if p.requires_grad:
            p.mul_(1 + 1e-3)
    assert holds("mixed", plain)
    assert plain.certificate.bound == stated, "tables of anchors are read off the registers"


# -- sabotage ---------------------------------------------------------------------------------------------------------


def entries(plain: PlainTransformer, rng: np.random.Generator) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Of every tensor, and of queries, keys and values apart, an entry that is 0 and one that is not."""
    for name, tensor in plain.state_dict().items():
        thirds = ("query", "key", "value") if "in_proj" in name else ("",)
        rows = tensor.shape[0] // len(thirds)
        for i, third in enumerate(thirds):
            part = tensor[i * rows : (i + 1) * rows]
            for what, places in (("zero", part == 0), ("number", part != 0)):
                found = torch.nonzero(places)
                if len(found):
                    place = found[int(rng.integers(len(found)))].tolist()
                    yield name, f"{third} {what}".strip(), (place[0] + i * rows, *place[1:])


@pytest.mark.parametrize("relative", [2.0**-8, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_one_changed_entry_of_every_tensor(name: str, relative: float) -> None:
    _, plain = built(name, torch.float32)
    clean = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    stated = plain.certificate.bound
    rng = np.random.default_rng(len(name))
    kinds, felt, refused, grown = set(), 0, 0, 0
    for key, what, place in entries(plain, rng):
        plain.load_state_dict(clean)
        tensor = plain.state_dict()[key]
        tensor[place] = tensor[place] * (1 + relative) if tensor[place] else relative
        kinds.add((key.split(".")[-2] if "." in key else key, what))
        certified = holds(name, plain)
        refused += not certified
        grown += certified and plain.certificate.bound > stated
        if measured(name, plain) > stated:
            felt += 1
            assert not certified or plain.certificate.bound > stated
    assert len(kinds) >= 12
    assert felt >= 3, "changes that nobody feels test nothing"
    assert refused > 0


@pytest.mark.parametrize("name", ["mixed", "causal", "attention"])
def test_what_exclusion_rests_on_is_required_exactly(name: str) -> None:
    _, plain = built(name, torch.float32)
    clean = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    block, h, head = next((b, h, head) for b, row in enumerate(plain.heads) for h, head in enumerate(row) if head.slots
                          or head.scope == "tokens")  # fmt: skip
    width, stream, r = plain.spec.stream // len(plain.heads[block]), plain.spec.stream, plain.registers
    query, key, value = (slice(third * stream + h * width, third * stream + (h + 1) * width) for third in range(3))
    hide = h * width + head.width - head.hiding
    into, out = (f"blocks.{block}.attention.{n}" for n in ("in_proj_weight", "out_proj.weight"))

    def refused(tensor: str, place: tuple[object, ...], number: float | None, match: str) -> None:
        plain.load_state_dict(clean)
        entry = plain.state_dict()[tensor]
        entry[place] = entry[place] * 2.0**-6 if number is None else number
        with pytest.raises(af.CertificateError, match=match):
            af.certify(plain)

    refused(into, (slice(hide, hide + head.hiding),), None, "hides keys|description|excluded")  # a smaller Omega
    refused(into, (hide, 0), 3.0, "hides keys")
    refused(into, (stream + hide, 1), 0.5, "hides keys")
    refused(into, (query.start, 1), 1e-3, "registers")  # a register that asks for something
    refused(into, (value.start, 1), 1e-3, "registers")  # register 0 with a value
    refused(into, (key.start, 1), 1e-3, "registers")
    refused(into, (query.start, stream - 1), 1e-3, "exact zeros")  # a column of later layers, or of nobody
    refused(out, (FLAG, h * width), 1e-3, "exact zeros")  # a head that writes the flag
    refused("positions", (0, 1), 0.5, "positions was changed")
    refused("positions", (r, FLAG), 1 + 2.0**-20, "positions was changed")
    refused("positions", (r, stream - 1), 1e-3, "positions was changed")
    refused("embed.weight", (0, 0), 1e-3, "embed.weight was changed")
    refused("readout.weight", (0, FLAG), 1e-3, "read-out")
    refused("readout.bias", (0,), float("nan"), "not finite")


def test_a_smaller_omega_in_all_of_a_head_is_a_leak() -> None:
    """Omega shrunk in tensors and description alike: consistent, and too small."""
    _, plain = built("mixed", torch.float32)
    head = plain.heads[0][0]
    width = plain.spec.stream // len(plain.heads[0])
    hide = head.width - head.hiding
    assert hide + head.hiding <= width
    small = 2.0**6
    plain.blocks[0].attention.in_proj_weight[hide : hide + head.hiding] *= small / head.omega
    row = (dataclasses.replace(head, omega=small), *plain.heads[0][1:])
    plain.spec = dataclasses.replace(plain.spec, heads=(row, *plain.heads[1:]))
    with pytest.raises(af.CertificateError, match="cannot tell them from what is excluded"):
        af.certify(plain)


def test_a_changed_description_is_refused() -> None:
    _, plain = built("mixed", torch.float32)
    spec, first = plain.spec, plain.heads[0][0]
    wider = af.Box(x=(-2.0, 1.0), y=(0.5, 2.0))
    changes = (
        {"box": wider, "boxes": (wider,)},
        {"first_row": not spec.first_row},
        {"output_shape": (1,)},
        {"heads": ((dataclasses.replace(first, place=(3, 0, 0)), *plain.heads[0][1:]), *plain.heads[1:])},
        {"heads": ((dataclasses.replace(first, slots=first.slots + 1), *plain.heads[0][1:]), *plain.heads[1:])},
        {"heads": (plain.heads[1], plain.heads[0], *plain.heads[2:])},
    )
    for change in changes:
        plain.spec = dataclasses.replace(spec, **change)  # type: ignore[arg-type]
        with pytest.raises(af.CertificateError):
            af.certify(plain)
    plain.spec = spec
    assert af.certify(plain).bound is not None


def test_a_causal_mask_over_heads_that_look_ahead_is_refused() -> None:
    _, plain = built("attention", torch.float32)
    plain.spec = dataclasses.replace(plain.spec, causal=True)
    with pytest.raises(af.CertificateError, match="hides later tokens"):
        af.certify(plain)


def test_theorems_are_certified_for_their_own_weights_only() -> None:
    net = af.theorems.ramp([1.0, -2.0], 0.5, -1, 1, anchors=9, form="tokens")
    plain = to_plain(net)
    assert af.certify(plain).bound == plain.certificate.bound
    clean = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    for key, _, place in entries(plain, np.random.default_rng(0)):
        plain.load_state_dict(clean)
        plain.state_dict()[key][place] += 2.0**-30
        with pytest.raises(af.CertificateError):
            af.certify(plain)
    plain.load_state_dict(clean)
    assert af.certify(plain).bound == net.certificate.bound
    with pytest.raises(af.CertificateError, match="export it again"):
        af.certify(plain.float())
    changed = to_plain(net)
    next(p for p in net.parameters() if p.dim() > 1).mul_(1 + 1e-6)
    with pytest.raises(af.CertificateError):
        af.certify(changed)


# -- what the certificate may import ----------------------------------------------------------------------------------

SRC = Path(af.__file__).parents[1]


def imported(module: str) -> Iterator[str]:
    """The attnforge modules that a module imports when it is itself imported."""
    path = SRC.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    package = module.split(".") if path.is_dir() else module.split(".")[:-1]
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for name in (f"{stem}.{alias.name}" for alias in node.names):
                place = SRC.joinpath(*name.split("."))
                yield name if place.is_dir() or place.with_suffix(".py").is_file() else stem


def test_no_module_that_certifies_imports_one_that_builds() -> None:
    found, queue = set(), ["attnforge.export.plain.certificate", "attnforge.export.plain.transformer"]
    while queue:
        module = queue.pop()
        if module in found or not module.startswith("attnforge"):
            continue
        found.add(module)
        queue += imported(module)
    assert "attnforge.heads.stored" in found, "the walk sees something"
    builders = {m for m in found if m.endswith((".construction", ".packing", ".assemble", "compiler.plan", ".build"))}
    assert builders == set()
    assert not any(m.startswith("attnforge.theorems") for m in found)


@pytest.mark.parametrize(
    "switch", [("num_heads", 4), ("batch_first", False), ("add_zero_attn", True), ("dropout", 0.5), ("head_dim", 2)]
)
def test_switches_of_stock_attention_are_part_of_it(switch: tuple[str, object]) -> None:
    plain = to_plain(af.compile("x*y", af.Box(x=(-1, 1), y=(0, 1)), eps=1e-2))
    setattr(plain.blocks[0].attention, *switch)  # type: ignore[arg-type]
    with pytest.raises(af.CertificateError, match="switches"):
        af.certify(plain)
