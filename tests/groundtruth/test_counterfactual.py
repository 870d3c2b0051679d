"""Counterfactual pairs: variables differ, effects are those of the target, and networks that are patched obey them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import attnforge as af
from attnforge import rasp
from attnforge.export import to_plain
from attnforge.groundtruth import Pairs, pairs
from attnforge.groundtruth.circuit import circuit_of

BOX = af.Box(x=(-1, 1), y=(0.5, 2))


@pytest.fixture(scope="module")
def sort() -> Any:
    return af.compile(rasp.library.sort(), rasp.Sequences([1, 2, 3], max_length=5))


def inside(interval: list[float], value: float) -> bool:
    """Float64 evaluates to a few roundings; the enclosure has its own."""
    slip = 1e-14 * max(1.0, abs(value))
    return interval[0] - slip <= value <= interval[1] + slip and interval[1] - interval[0] < 1e-12


def test_formulas_are_enclosed() -> None:
    net = af.compile("sin(x)*exp(y) + x", BOX, 1e-2)
    found = pairs(net, 5, seed=3)
    assert {pair.variable for pair in found.pairs} == {"sin(x)", "exp(y)", "exp(y)*sin(x)"} and found.missing == ()
    assert len(found.pairs) == 15 and all(pair.only for pair in found.pairs)
    for pair in found.of("sin(x)"):
        (x, y), (other, same) = pair.base, pair.source
        assert y == same and inside(pair.before[0], math.sin(x)) and inside(pair.after[0], math.sin(other))
        assert inside(pair.output[0], math.sin(x) * math.exp(y) + x)
        assert inside(pair.patched[0], math.sin(other) * math.exp(y) + x), "x itself stays: only the sine is replaced"
        assert inside(pair.effect[0], (math.sin(other) - math.sin(x)) * math.exp(y))


def test_what_cannot_differ_alone_is_not_said_to() -> None:
    found = pairs(af.compile("sin(x)*y + exp(x)", BOX, 1e-2), 4)
    assert not any(pair.only for pair in (*found.of("sin(x)"), *found.of("exp(x)"))), "both are functions of x alone"
    assert any(pair.only for pair in found.of("y*sin(x)")), "y changes it, and nothing else"


def test_units_of_a_module_are_variables() -> None:
    torch.manual_seed(1)
    first, last = torch.nn.Linear(2, 3).double(), torch.nn.Linear(3, 1).double()
    module = torch.nn.Sequential(first, torch.nn.ReLU(), last)
    net = af.compile(module, af.Box.cube(-1, 1, shape=(2,)), 1e-2, dtype=torch.float64)
    found = pairs(to_plain(net), 3)
    assert found.pairs and {len(found.of(name)) for name in found.missing} <= {0}
    for pair in found.pairs:
        unit = int(pair.variable[-2])
        with torch.no_grad():
            base, source = torch.relu(first(torch.tensor([pair.base, pair.source], dtype=torch.float64)))
            base[unit] = source[unit]
            assert inside(pair.patched[0], float(last(base)))


def test_programs_are_interpreted_and_networks_obey(sort: Any) -> None:
    """All heads that compute a variable, patched together: the network decodes what the interpreter says."""
    found, circuit = pairs(sort, 8), circuit_of(sort)
    seen = set()
    with torch.no_grad():
        for pair in (pair for pair in found.pairs if pair.known):
            spots = [spot for spot in circuit.spots if spot.op == pair.variable]
            if not spots:
                continue  # a sum of counts is no head's work
            Z, *_ = circuit.states(torch.tensor([pair.base]))
            others = circuit.states(torch.tensor([pair.source]))
            for number, layer in enumerate(circuit.layers):
                patches = [circuit.alone(s)(others[number]) - circuit.alone(s)(Z) for s in spots if s.layer == number]
                Z = sum(patches, layer(Z))
            got = [sort.outputs[i] for i in circuit.output(Z)[0].argmax(-1).tolist()][: len(pair.output)]
            assert got == pair.patched
            seen.add(pair.variable)
    assert len(seen) >= 2
    assert any(pair.effect > 0 and pair.only for pair in found.pairs)
    for pair in found.pairs:
        tokens = [sort.vocabulary[int(i)] for i in pair.base if i < 3]
        assert pair.output == sort(tokens) == sorted(tokens) and pair.before != pair.after
        assert pair.effect == sum(a != b for a, b in zip(pair.output, pair.patched, strict=True))


def test_what_no_input_makes_is_not_known() -> None:
    """The last ones of a kind, by how many there are so far and in all: more of the former stand beside no input."""
    same = rasp.select(rasp.tokens, rasp.tokens, rasp.eq)
    early = rasp.selector_width(same & rasp.select(rasp.indices, rasp.indices, rasp.leq))
    net = af.compile((rasp.selector_width(same) - early).equals(0), rasp.Sequences("ab", max_length=3))
    found = pairs(net, 40).pairs
    assert len({(pair.variable, pair.base, pair.source) for pair in found}) == len(found), "no pair is there twice"
    strange = [pair for pair in found if "leq" in pair.variable and "-" not in pair.variable and not pair.known]
    assert strange and any(pair.known for pair in found)
    for pair in strange:
        letters = pair.base[: len(pair.output)]
        assert any(so_far > letters.count(x) for x, so_far in zip(letters, pair.after, strict=True))


def test_what_can_differ_alone_is_found_among_all_sequences() -> None:
    """How many there are so far, and in all: few sequences agree in the latter alone, such as ccaa and adda."""
    listed = rasp.library.get("hist2")
    domain = listed.domain(4)
    found = pairs(af.compile(listed.program(domain), domain), 2)
    so_far = found.of("selector_width(same_token & select(indices, indices, leq))")
    assert so_far and all(pair.only for pair in so_far)


def test_an_output_of_several_has_its_own_variables() -> None:
    given = {"sorted": rasp.library.sort(), "one more": rasp.library.hist() + 1}
    net = af.compile(given, rasp.Sequences("ab", max_length=3))["one more"]
    assert {pair.variable for pair in pairs(net, 1).pairs} == {"selector_width(same_token)"}


def test_seeds_files_and_mistakes(sort: Any, tmp_path: Path) -> None:
    found = pairs(sort, 2, seed=5)
    assert isinstance(found, Pairs) and found == pairs(sort, 2, seed=5) != pairs(sort, 2, seed=6)
    data = json.loads(found.save(tmp_path / "pairs.json").read_text())
    assert data["version"] == 1 and len(data["pairs"]) == len(found.pairs)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(af.ArgumentError, match="count must be a whole number"):
            pairs(sort, wrong)  # type: ignore[arg-type]
    with pytest.raises(af.ArgumentError, match="expected a network built by attnforge"):
        pairs("net")
    with pytest.raises(af.UnsupportedOperation, match="no intermediate variables"):
        pairs(af.AnchorHead.fit("sin", -1, 1, anchors=8))
