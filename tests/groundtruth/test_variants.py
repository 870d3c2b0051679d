"""Variants compute what their networks do, on every sequence; what is changed in their weights is found out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge import rasp
from attnforge.dtypes import Array
from attnforge.export.plain.build import to_plain
from attnforge.groundtruth.variants.build import vary
from attnforge.groundtruth.variants.clean import cleaned
from attnforge.groundtruth.variants.simulation import REGISTER, TOKEN, Simulated
from attnforge.groundtruth.variants.variant import KINDS, Variant
from attnforge.rasp.network.proof import Column, prove

EXACT = ("permuted", "split", "distractor", "idle")
ROTATED = ("permuted", "split", "distractor", "idle", "rotated")


def compiled(name: str, length: int, dtype: torch.dtype = torch.float64) -> af.rasp.CompiledProgram:
    listed = rasp.library.get(name)
    domain = listed.domain(length)
    return af.compile(listed.program(domain), domain, dtype=dtype)


def everything(net: af.rasp.CompiledProgram) -> tuple[torch.Tensor, list[tuple[object, ...]]]:
    """Every sequence of the domain."""
    found: list[tuple[object, ...]] = [()]
    every = []
    for _ in range(net.domain.max_length):
        found = [(*s, t) for s in found for t in net.vocabulary]
        every += found
    return net.ids(every, net.domain.max_length), every


def decoded(
    net: af.rasp.CompiledProgram, logits: torch.Tensor, given: Sequence[Sequence[object]]
) -> list[list[object]]:
    return net.decode(logits, [len(s) for s in given])


@pytest.mark.parametrize(
    ("name", "length", "dtype", "kinds"),
    [
        ("reverse", 4, torch.float64, ROTATED),
        ("reverse", 4, torch.float32, EXACT),
        ("hist", 4, torch.float64, ROTATED),
        ("shift_by", 4, torch.float32, ROTATED),
        ("induction", 4, torch.float64, ROTATED),
        ("majority", 5, torch.float64, ROTATED),
        ("sort", 4, torch.float64, ROTATED),
        ("sort", 4, torch.float32, EXACT),
        ("reverse", 4, torch.float64, (*EXACT, "superposed")),
        ("induction", 4, torch.float64, (*EXACT, "superposed")),
        ("hist", 4, torch.float64, (*EXACT, "superposed")),
    ],
)
def test_a_variant_is_right_on_every_sequence(name, length, dtype, kinds):
    net = compiled(name, length, dtype)
    ids, every = everything(net)
    meant = net(every)
    for seed in (0, 1):
        variant = vary(net, kinds, seed)
        assert variant.certificate.kind == "exact" and variant.certificate.dtype == net.certificate.dtype
        assert decoded(net, variant(ids), every) == meant
        roles = {h.purpose.split(":")[0] for row in variant.heads for h in row}
        assert {"distractor", "idle"} <= roles


def test_equal_seeds_give_equal_weights_and_others_do_not():
    net = compiled("reverse", 4)
    one, same, other = (vary(net, ROTATED, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_superposed_codes_share_dimensions():
    """More columns than dimensions, and vectors that are not orthogonal: nothing less is meant."""
    listed = rasp.library.get("sort")
    domain = listed.domain(3, "abcdefgh")
    net = af.compile(listed.program(domain), domain, dtype=torch.float64)
    variant = vary(net, "superposed", 0)
    basis = variant.basis.numpy()
    gram = basis @ basis.T - np.eye(len(basis))
    assert np.linalg.matrix_rank(basis) < len(basis) and 0.05 < np.abs(gram).max() < 0.5
    ids, every = everything(net)
    assert decoded(net, variant(ids), every) == net(every)
    with pytest.raises(af.PrecisionError, match="three values"):
        vary(compiled("majority", 3), "superposed", 0)


@pytest.mark.parametrize("name", ["hist", "frac_prevs"])
def test_cleaned_codes_of_counts_and_means_share_dimensions(name):
    """Half as many dimensions as values before the cleaning map; after it means and counts read what is exact."""
    listed = rasp.library.get(name)
    domain = listed.domain(3, "xabcdefg")
    net = af.compile(listed.program(domain), domain, dtype=torch.float64)
    variant = vary(net, ["superposed", "cleaned"], 0)
    basis = variant.basis.numpy()
    assert np.linalg.matrix_rank(basis) <= len(basis) - 4
    assert len(variant.blocks) == len(to_plain(net).blocks) + 1
    ids, every = everything(net)
    found = decoded(net, variant(ids), every)
    if name == "hist":
        assert variant.certificate.kind == "exact" and found == net(every)
    else:
        meant = [rasp.evaluate(net.facts.program, s)[net.facts.program] for s in every]
        worst = max(abs(float(a) - b) for m, f in zip(meant, found, strict=True) for a, b in zip(m, f, strict=True))
        assert worst <= variant.bound < 1e-6
    with pytest.raises(af.ArgumentError, match="name 'superposed' beside it"):
        vary(net, "cleaned", 0)


def test_a_mean_is_not_superposed_at_the_cost_of_its_bound():
    """Vectors that interfere would move a mean by tenths: such codes stay one-hot, or are the corners of a simplex."""
    listed = rasp.library.get("frac_prevs")
    domain = listed.domain(4, "xabcdefg")
    net = af.compile(listed.program(domain), domain, dtype=torch.float64)
    assert vary(net, "superposed", 0).bound <= 2 * vary(net, "rotated", 0).bound < 1e-6


def test_a_cleaned_program_is_proved_and_its_cleaning_head_is_needed():
    net = compiled("sort", 3, torch.float32)
    one = cleaned(net)
    every = everything(net)[1]
    assert one.certificate.kind == "exact" and one.size.layers > net.size.layers and one(every) == net(every)
    assert one.trace(every[-1]).agrees
    with torch.no_grad():
        next(iter(one.network.groups())).M_K.mul_(0.25)
    with pytest.raises(af.CertificateError, match="again"):
        one.recertify()


def test_a_mean_is_within_its_new_bound():
    net = compiled("frac_prevs", 5)
    ids, every = everything(net)
    variant = vary(net, ROTATED, 0)
    assert variant.certificate.kind == "analysed" and variant.bound < 1e-6
    meant = [rasp.evaluate(net.facts.program, s)[net.facts.program] for s in every]
    found = decoded(net, variant(ids), every)
    assert (
        max(abs(float(a) - b) for m, f in zip(meant, found, strict=True) for a, b in zip(m, f, strict=True))
        <= variant.bound
    )


class Watched(Simulated):
    """Keeps what it says of the stream after every layer."""

    def __init__(self, *given: object):
        super().__init__(*given)  # type: ignore[arg-type]
        self.radius: list[Array] = [self.error[TOKEN]]
        self.columns: list[Array] = [self.virtual.error.copy()]
        self.registers: list[Array] = [self.error[REGISTER]]
        self.off = np.zeros(len(self.basis.rows))

    def after(self, layer: int, state: Sequence[Column], sizes: Sequence[float]) -> None:
        super().after(layer, state, sizes)
        for c, place in self.stream.fresh[layer].items():
            self.off[place] = state[c].error
        if self.blocks[layer][0]:
            self.radius.append(self.error[TOKEN])
            self.registers.append(self.error[REGISTER])
            self.columns.append(self.off.copy())


@pytest.mark.parametrize(("name", "dtype"), [("shift_by", torch.float32), ("sort", torch.float64)])
def test_the_stream_is_where_the_lemma_says(name, dtype):
    """H6: |X' - X B| is at most what is said of E, and of the columns' own errors, after every block."""
    net = compiled(name, 4, dtype)
    variant = vary(net, ("rotated",), 5)
    sim = variant.simulation(net)
    watched = Watched(sim.stream, net, variant.spec, sim.tensors, sim.basis.rows)
    prove(net.facts, net.layout, net.network, net.positions, watched)
    plain = to_plain(compiled(name, 4, torch.float64))
    ids, every = everything(net)
    full = ids[[len(s) == 4 for s in every]]
    with torch.no_grad():
        x, y = plain.residual(full), variant.residual(full)
        basis, count = variant.basis.double(), variant.registers
        for number in range(len(variant.blocks) + 1):
            ideal = x[:, count:, : sim.stream.width] @ basis[: sim.stream.width]
            distance = (y.double()[:, count:] - ideal).norm(dim=-1).max()
            allowed = np.linalg.norm(watched.radius[number]) + watched.columns[number].sum() * sim.basis.spread.max()
            assert 0 < float(distance) <= allowed
            at_rest = (y.double()[:, :count] - x[:, :count, : sim.stream.width] @ basis[: sim.stream.width]).norm(
                dim=-1
            )
            assert float(at_rest.max()) <= np.linalg.norm(watched.registers[number])
            if number < len(variant.blocks):
                x = plain.blocks[number](x, plain.mask(x))
                y = variant.blocks[number](y, variant.mask(y))


def test_changed_weights_are_proved_anew_or_refused():
    """Whatever is done to the weights: a certificate that is still given is true on every sequence."""
    net = compiled("shift_by", 3)
    ids, every = everything(net)
    meant = net(every)
    rng, outcomes = np.random.default_rng(0), []
    for size in (1e-13, 1e-6, 1e-2, 1.0, 1e30, float("nan")):
        for kinds in (ROTATED, EXACT, ("superposed", "cleaned")):
            variant = vary(net, kinds, 2)
            name = rng.choice(sorted(dict(variant.named_parameters())))
            with torch.no_grad():
                table = dict(variant.named_parameters())[name]
                table.view(-1)[int(rng.integers(table.numel()))] += size
            try:
                certificate = variant.recertify()
            except af.AttnforgeError:
                outcomes.append(False)
                continue
            outcomes.append(True)
            assert certificate.kind == "exact"
            assert decoded(net, variant.core(ids), every) == meant
    assert True in outcomes and False in outcomes


@pytest.mark.parametrize("kinds", [ROTATED, EXACT])
def test_a_distractor_that_speaks_up_is_found(kinds):
    """A head that should do nothing, made to write what others read."""
    net = compiled("shift_by", 3)
    variant = vary(net, kinds, 0)
    row = variant.heads[0]
    at = next(i for i, head in enumerate(row) if head.purpose.startswith("distractor"))
    right = next(i for i, head in enumerate(row) if head.place[0] >= 0)
    d = variant.spec.stream // len(row)
    with torch.no_grad():
        out = variant.blocks[0].attention.out_proj.weight
        out[:, at * d : at * d + 2] = 8 * out[:, right * d : right * d + 2]
    with pytest.raises(af.CertificateError if kinds == EXACT else af.AttnforgeError):
        variant.recertify()


def test_words_that_do_not_fit_the_weights_are_refused():
    """Two heads that have changed their descriptions, and a basis that is not that of the weights."""
    net = compiled("sort", 3)
    for kinds in (("rotated", "distractor"), ("permuted", "distractor")):
        variant = vary(net, kinds, 0)
        rows = [list(row) for row in variant.spec.heads]
        at = next(i for i, head in enumerate(rows[0]) if head.purpose.startswith("distractor"))
        right = next(i for i, head in enumerate(rows[0]) if head.place[0] >= 0)
        rows[0][at], rows[0][right] = rows[0][right], rows[0][at]
        variant.spec = replace(variant.spec, heads=tuple(map(tuple, rows)))
        with pytest.raises(af.AttnforgeError):
            variant.recertify()
    for kinds in ("permuted", "rotated"):  # heads of two layers that have changed places, and a mask that was not there
        for change in ("blocks", "mask"):
            variant = vary(net, kinds, 0)
            rows = [list(row) for row in variant.spec.heads]
            if change == "blocks":
                (a, i), (b, j) = [
                    (r, next(h for h, head in enumerate(row) if head.purpose)) for r, row in enumerate(rows[:2])
                ]
                rows[a][i], rows[b][j] = rows[b][j], rows[a][i]
            variant.spec = replace(variant.spec, heads=tuple(map(tuple, rows)), causal=change == "mask")
            with pytest.raises(af.AttnforgeError):
                variant.recertify()
    variant = vary(net, "rotated", 0)
    variant.basis[[1, 2]] = variant.basis[[2, 1]]
    with pytest.raises(af.AttnforgeError):
        variant.recertify()


def test_a_dtype_that_is_too_coarse_is_refused_with_the_head():
    net = compiled("sort", 6, torch.float32)
    with pytest.raises(af.PrecisionError, match=r"float32.*'.*'.*float64"):
        vary(net, "rotated", 0)
    variant = vary(compiled("sort", 4), "rotated", 0).to(torch.float32)
    with pytest.raises(af.AttnforgeError):
        variant.recertify()


def test_a_variant_goes_to_a_file_and_back(tmp_path):
    for number, kinds in enumerate((ROTATED, EXACT)):
        variant = vary(compiled("reverse", 3), kinds, 1)
        path = tmp_path / f"{number}.safetensors"
        variant.save(path)
        again = af.load(path)
        assert isinstance(again, Variant) and again.kinds == variant.kinds and again.heads == variant.heads
        assert af.check(path).kind == "exact"
        ids, _ = everything(compiled("reverse", 3))
        assert torch.equal(again(ids), variant(ids))


def test_a_formula_keeps_its_certificate():
    net = af.compile("sin(x*y) + x", af.Box(x=(-1, 1), y=(0, 2)), eps=1e-3)
    plain = to_plain(net)
    variant = vary(net, EXACT, 0)
    assert variant.bound == plain.bound and variant.certificate.kind == "certified"
    x = net.box.sample(200, dtype=torch.float32)
    target = torch.sin(x[:, 0].double() * x[:, 1].double()) + x[:, 0].double()
    assert float((variant(x).detach().double().squeeze() - target).abs().max()) <= variant.bound
    with pytest.raises(af.ArgumentError, match="token programs"):
        vary(net, "superposed", 0)


def test_wrong_words_are_answered():
    net = compiled("reverse", 3)
    with pytest.raises(af.ArgumentError, match="rotated"):
        vary(net, "rotate")
    with pytest.raises(af.ArgumentError, match="one kind"):
        vary(net, [])
    with pytest.raises(af.ArgumentError, match="words"):
        vary(net, 3)  # type: ignore[arg-type]
    with pytest.raises(af.ArgumentError, match="Linear"):
        vary(torch.nn.Linear(2, 2), "permuted")  # type: ignore[arg-type]
    with pytest.raises(af.ArgumentError, match="seed"):
        vary(net, "permuted", -1)
    assert set(EXACT) | {"rotated", "superposed", "cleaned"} == set(KINDS)


@pytest.mark.parametrize("kinds", [EXACT, ("rotated",)])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_refused_wherever_it_stands(kinds, number):
    """Heads that nobody reads are not in the form that is proved, but a NaN in them reaches every token."""
    variant = vary(compiled("reverse", 3), kinds, 0)
    for tensor in variant.state_dict().values():
        entries = tensor.view(-1)
        for at in {int((entries == 0).to(torch.uint8).argmax()), int((entries != 0).to(torch.uint8).argmax())}:
            kept = entries[at].clone()
            entries[at] = number
            with pytest.raises(af.CertificateError, match="not finite"):
                af.certify(variant)
            entries[at] = kept
    assert af.certify(variant).kind == "exact"
