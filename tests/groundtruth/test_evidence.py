"""Manifests of networks: what they say is so, in every tier, and what is not so is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

import attnforge as af
from attnforge import rasp
from attnforge.export import Lens, load_lens, to_hf, to_lens, to_plain
from attnforge.groundtruth import Edge, HeadEntry, Manifest, Witness, check, schema, vary
from attnforge.groundtruth.artefacts import opened
from attnforge.groundtruth.circuit import circuit_of

BOX = af.Box(x=(-1, 1), y=(0.5, 2))


def formulas() -> Any:
    return af.compile(["sin(x*y)", "exp(x)"], BOX, 1e-2)


def mlp() -> Any:
    torch.manual_seed(0)
    return af.compile(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)),
                      af.Box.cube(-1, 1, shape=(2,)), 1e-2, dtype=torch.float64)  # fmt: skip


def sequence() -> Any:
    return af.compile(lambda x: torch.sin(x) - x.mean(-2, keepdim=True), af.Box.cube(-1, 1, shape=(3, 1)), 1e-2)


def sort() -> Any:
    return af.compile(rasp.library.sort(), rasp.Sequences([1, 2, 3], max_length=4))


def fraction() -> Any:
    share = rasp.aggregate(rasp.select(rasp.indices, rasp.indices, rasp.leq), rasp.tokens.equals("a"))
    return af.compile(share, rasp.Sequences("ab", max_length=4))


def reverse() -> Any:
    return af.compile(rasp.library.reverse(), rasp.Sequences("abc", max_length=3), dtype=torch.float64)


def formula() -> Any:
    return af.compile("sin(x)*y", af.Box(x=(-1, 1), y=(0, 1)), 1e-2, dtype=torch.float64)


BUILDS = {build.__name__: build for build in (formulas, mlp, sequence, sort, fraction, reverse, formula)}
NETS: dict[str, Any] = {}


def made(build: str, tier: str) -> Any:
    """Networks are built once; nobody changes them."""
    if (name := f"{build}-{tier}") not in NETS:
        net = BUILDS[build]() if tier == "memory" else made(build, "memory")
        NETS[name] = {"memory": lambda n: n, "plain": to_plain, "lens": lambda n: to_lens(n, verify=False)}[tier](net)
    return NETS[name]


WHOLE = [build for build in BUILDS if build not in ("reverse", "formula")]
CASES = [(build, tier) for build in WHOLE for tier in ("memory", "plain")] + [("formulas", "lens"), ("sort", "lens")]


@pytest.mark.parametrize(("build", "tier"), CASES)
def test_a_manifest_holds_for_its_network(build: str, tier: str) -> None:
    net = made(build, tier)
    found = af.manifest(net)
    data = json.loads(json.dumps(found.to_json()))
    jsonschema.Draft202012Validator(schema()).validate(data)
    done = check(Manifest.from_json(data), net)
    assert (done.heads, done.edges) == (len(found.heads), len(found.edges)) and done.tried == 0
    assert done.witnesses == sum(len(what.moves) for what in found.everything()) > 0
    assert found.tier == tier
    assert tier != "memory" or found == af.manifest(net), "the same network gives the same manifest"
    circuit = circuit_of(net)
    points = circuit.where.sample(6)
    inputs = circuit.where.split(points)
    with torch.no_grad():
        wanted = net(*inputs) if isinstance(net, Lens) else net.core(*inputs)
        got = circuit.output(circuit.states(points)[-1]).reshape(wanted.shape)
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5), "the circuit computes what the network does"


def test_roles_and_relevance() -> None:
    found = af.manifest(made("formulas", "memory"))
    first, second = (output.name for output in found.outputs)
    shown = {(head.role, head.op, head.relevant) for head in found.heads}
    functions = {("function", "sin(x*y)", (first,)), ("function", "exp(x)", (second,))}
    assert shown == {("product", "x*y", (first,)), *functions}
    sine = next(head for head in found.heads if head.op == "sin(x*y)")
    into = {edge.source for edge in found.edges if edge.target == sine.id and edge.moves}
    assert into >= {head.id for head in found.heads if head.op == "x*y"}
    program = af.manifest(made("sort", "lens"))
    assert {head.role for head in program.heads if head.moves} == {"count", "map", "aggregate"}
    assert all(head.role == "padding" for head in program.heads if not head.moves)
    assert program.inputs.vocabulary == (1, 2, 3) and program.outputs[0].values == (1, 2, 3)
    assert {"id", "hook", "role", "note"} <= set(program.components()[0])


def changed(found: Manifest, name: str, **new: Any) -> Manifest:
    """A manifest that says something else of a head or an edge."""
    heads = tuple(replace(h, **new) if h.id == name else h for h in found.heads)
    edges = tuple(replace(e, **new) if f"{e.source} -> {e.target}" == name else e for e in found.edges)
    assert (heads, edges) != (found.heads, found.edges)
    return replace(found, heads=heads, edges=edges)


@pytest.mark.parametrize(("build", "tier"), [("formulas", "memory"), ("sort", "plain")])
def test_what_is_not_so_is_found(build: str, tier: str) -> None:
    net = made(build, tier)
    found = af.manifest(net)
    head, edge = (next(what for what in row if what.moves) for row in (found.heads, found.edges))
    between = f"{edge.source} -> {edge.target}"
    witness = head.moves[0]
    wrong = [
        (changed(found, head.id, moves=()), "does not say that it moves"),
        (changed(found, between, moves=()), "does not say that it moves"),
        (replace(found, edges=tuple(e for e in found.edges if e is not edge)), "does not say that it moves"),
        (changed(found, head.id, moves=(replace(witness, effect=witness.effect + 1),)), "and there it moves it by"),
        (changed(found, head.id, moves=(replace(witness, source=witness.base),)), "not more than rounding"),
        (changed(found, head.id, reads=((), (), ())), "says reads .* and the weights show"),
        (changed(found, head.id, hook="blocks.7"), "says hook 'blocks.7'"),
        (changed(found, between, channels=()), r"says channels \(\)"),
        (changed(found, head.id, role="idle"), f"says role 'idle', and the weights show '{head.role}'"),
        (changed(found, head.id, op="nothing"), "says op 'nothing'"),
        (changed(found, head.id, moves=(), still=head.relevant), "leaves open whether it moves"),
        (changed(found, between, moves=(), still=edge.relevant), "leaves open whether it moves"),
        (replace(found, channels=(replace(found.channels[0], name="other"), *found.channels[1:])), "channels are not"),
        (replace(found, target="other"), "target are not those"),
        (replace(found, certificate=replace(found.certificate, rounding=1.0)), "says that rounding can do 1, and"),
        (replace(found, certificate=replace(found.certificate, proof="kernel")), "the kernel proved the bound"),
        (replace(found, heads=tuple(h for h in found.heads if h is not found.heads[-1]),
                 edges=tuple(e for e in found.edges if found.heads[-1].id not in (e.source, e.target))),
         "does not know the head"),
        (replace(found, samples=(tuple(9.0 for _ in found.samples[0]), *found.samples[1:])), "is no input"),
        (replace(found, samples=(tuple(0.5 for _ in found.samples[0]), *found.samples[1:])), "is no input"
         if build == "sort" else "and there it moves it by"),
        (replace(found, certificate=replace(found.certificate, kind="calibrated", bound=None)), "kind and dtype"),
        (replace(found, samples=(), heads=tuple(replace(h, moves=()) for h in found.heads),
                 edges=tuple(replace(e, moves=()) for e in found.edges)), "does not say that it moves"),
    ]  # fmt: skip
    if build == "formulas":
        other = next(h for h in found.heads if h.op == "exp(x)")
        wrong += [
            (changed(found, other.id, moves=(*other.moves, Witness(found.outputs[0].name, 0, 1, 0.5))),
             "cannot reach the output"),
            (replace(found, certificate=replace(found.certificate, bound=0.0)), "is certified for"),
        ]  # fmt: skip
    else:
        padding = next(h for h in found.heads if h.role == "padding")
        claim = changed(found, padding.id, moves=(Witness(found.outputs[0].name, 0, 1, 1.0),))
        extra = Edge(found.heads[0].id, padding.id, (), ())
        added = replace(found, edges=(*found.edges, extra))
        wrong += [(claim, "cannot reach the output"), (added, "an edge .* which the weights do not have")]
    for manifest, words in wrong:
        with pytest.raises(af.CertificateError, match=words):
            check(manifest, net)


def test_other_weights_are_named() -> None:
    net = sort()
    found = af.manifest(net)
    with torch.no_grad():
        net.network.layers[1].groups[0].W_O.mul_(1.0001)
    with pytest.raises(af.CertificateError, match=r"stale"):
        check(found, net)
    lens = to_lens(made("sort", "memory"), verify=False)
    found = af.manifest(lens)
    lens.weights["blocks.1.attn.W_K"][0, 0, 0] += 1e-30
    with pytest.raises(af.CertificateError, match=r"the tensor 'blocks\.1\.attn\.W_K' has the hash"):
        check(found, lens)
    with pytest.raises(af.CertificateError, match="other weights"):
        check(found, made("formulas", "plain"))


@pytest.mark.parametrize("build", ["formulas", "sort"])
def test_hooks_of_transformer_lens_show_the_same_effects(build: str) -> None:
    """The witness of every head, run again by someone who knows nothing of circuits: hooks on hook_z."""
    lens = made(build, "lens")
    found = af.manifest(lens)
    circuit = circuit_of(lens)
    inputs = circuit.where.split(torch.tensor(found.samples))
    with torch.no_grad():
        clean, cache = lens.run_with_cache(*inputs)
    names = [output.name for output in found.outputs]
    for head in found.heads:
        for witness in head.moves:
            given = cache[head.hook][witness.source, :, head.at] if witness.source is not None else 0.0

            def patch(z: Tensor, hook: Any, at: int = head.at, given: Any = given) -> Tensor:
                z = z.clone()
                z[:, :, at] = given
                return z

            one = [x[witness.base : witness.base + 1] for x in inputs]
            with torch.no_grad():
                out = lens.run_with_hooks(*one, fwd_hooks=[(head.hook, patch)])
            before = clean[witness.base : witness.base + 1]
            if found.outputs[0].kind == "value":
                real = one[0] != len(found.inputs.vocabulary)
                assert int(((out.argmax(-1) != before.argmax(-1)) & real).sum()) == witness.effect
            else:
                moved = (out - before).abs()[0, names.index(witness.output)]
                assert abs(float(moved) - witness.effect) <= 2 * found.certificate.rounding


def test_what_has_no_manifest() -> None:
    with pytest.raises(af.ArgumentError, match="expected a network built by attnforge"):
        af.manifest(torch.nn.Linear(2, 2))
    with pytest.raises(af.UnsupportedOperation, match="no manifest of this network"):
        af.manifest(af.AnchorHead.fit("sin", -1, 1, anchors=8))


def test_nothing_that_weights_allow_may_be_passed_over() -> None:
    """An edge that shows on one sequence in hundreds: that a check meets none of these proves nothing."""
    listed = rasp.library.get("detect_pattern")
    domain = listed.domain(6)
    net = af.compile(listed.program(domain), domain)
    found = af.manifest(net)
    for what in found.everything():
        name = what.id if isinstance(what, HeadEntry) else f"{what.source} -> {what.target}"
        with pytest.raises(af.CertificateError, match=f"^{name}: the manifest (does not say|lists)"):
            check(changed(found, name, moves=(), still=()), net)
    rotated = vary(made("reverse", "memory"), ["rotated", "idle"], 1)
    found = af.manifest(rotated)
    quiet = next(edge for edge in found.edges if not edge.moves)
    with pytest.raises(af.CertificateError, match="the weights have this edge, and the manifest does not know it"):
        check(replace(found, edges=tuple(edge for edge in found.edges if edge is not quiet)), rotated)


@pytest.mark.parametrize("build", ["reverse", "formula"])
def test_files_of_exports_know_what_their_heads_are_for(build: str, tmp_path: Path) -> None:
    """Of plain forms and of variants alike: what is read back has the manifest of what was written."""
    net = made(build, "memory")
    for number, kinds in enumerate(((), ("rotated", "idle"), ("permuted", "distractor"))):
        plain = vary(net, kinds, 1) if kinds else made(build, "plain")
        found = af.manifest(plain)
        assert "construction" not in {head.role for head in found.heads}
        folder = tmp_path / f"hf{number}"
        to_hf(plain, folder, verify=False)
        again = opened(folder)
        assert type(again) is type(plain) and af.manifest(again) == found
        lens, path = to_lens(plain, verify=False), tmp_path / f"{number}.safetensors"
        lens.save(path)
        assert check(af.manifest(lens), load_lens(path)).witnesses > 0


def test_heads_that_never_wake_up_are_left_open() -> None:
    """A unit that is 0 on the whole box reaches the output by its weights, and moves it on no input."""
    unit = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with torch.no_grad():
        unit[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
        unit[0].bias.copy_(torch.tensor([0.5, -7.0]))
        unit[2].weight.fill_(1.0)
    net = af.compile(unit, af.Box.cube(-1, 1, shape=(1,)), 1e-2)
    found = af.manifest(net)
    dead = [head for head in found.heads if head.still]
    assert [head.op for head in dead] == ["1.relu[1]"] and not dead[0].moves
    assert check(found, net).undecided == sum(len(what.still) for what in found.everything())
    with pytest.raises(af.CertificateError, match=r"neither under what it moves nor under what is still"):
        check(changed(found, dead[0].id, still=()), net)
    assert {type(what) for what in found.everything()} <= {HeadEntry, Edge}
