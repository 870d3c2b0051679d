"""Token programs as problems for verifiers: their graphs, their radii, and labels both ways."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge import rasp
from attnforge.errors import ArgumentError, CertificateError
from attnforge.rasp import library
from attnforge.rasp.network.compiled import CompiledProgram
from attnforge.verification import Atom, Pack, Property, check, pack
from attnforge.verification.graph import of_model
from attnforge.verification.programs import largest, margin, model, refuted, rows
from attnforge.verification.proof import enclosed, propagated, witnessed

ort = pytest.importorskip("onnxruntime")


def compiled(name: str, vocabulary: str, length: int, causal: bool = False, dtype: Any = torch.float32) -> Any:
    domain = rasp.Sequences(vocabulary, length, causal)
    return af.compile(library.get(name).program(domain), domain, dtype=dtype)


@pytest.fixture(scope="module")
def hist() -> CompiledProgram:
    return compiled("hist", "ab", 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return pack(tmp_path_factory.mktemp("programs"), count=6, seed=4, families=["program"])


def run(found: Any, points: np.ndarray) -> np.ndarray:
    data = found if isinstance(found, bytes) else found.SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    kind = np.float64 if "double" in session.get_inputs()[0].type else np.float32
    return np.concatenate([session.run(None, {"X": x[None].astype(kind)})[0] for x in points])


@pytest.mark.parametrize(("name", "causal"), [("reverse", False), ("firsts", True), ("induction", False)])
def test_the_graph_computes_the_program_and_hides_later_tokens(name: str, causal: bool) -> None:
    net = compiled(name, "ab", 4, causal)
    assert any(group.causal for group in net.network.groups()) == (name != "reverse")
    found = model(net, largest(net))
    sequences = [s for s in net.domain if len(s) == 4]
    logits = run(found, np.stack([rows(net, s) for s in sequences])).reshape(len(sequences), 4, -1)
    assert [[net.outputs[i] for i in row] for row in logits.argmax(-1)] == [net.program(s) for s in sequences]


def test_around_a_sequence_the_right_value_stays_ahead(hist: CompiledProgram) -> None:
    radius = largest(hist)
    found, sure = of_model(model(hist, radius)), [margin(hist, share * radius) for share in (0, 0.25, 0.5, 1)]
    assert 1e-4 < radius < 1e-3 and sure == sorted(sure, reverse=True) and sure[-1] > 0
    with pytest.raises(CertificateError):
        margin(hist, radius + 2.0**-20)
    data, rng, width = model(hist, radius).SerializeToString(), np.random.default_rng(0), len(hist.outputs or ())
    assert found.inputs == 8 and found.outputs == 4 * width
    for sequence in (s for s in hist.domain if len(s) == 4):
        right = np.array([(hist.outputs or ()).index(v) for v in hist.program(sequence)])
        points = rows(hist, sequence) + radius * rng.choice([-1.0, 1.0], size=(50, 8))
        real = [float(y.mid()) for y in enclosed(found, points[0], points[0], real=True)]  # nothing vanishes there
        for logits in (run(data, points).reshape(-1, 4, width), np.reshape(real, (1, 4, width))):
            ahead = np.take_along_axis(logits, right[None, :, None], -1) - logits
            ahead[:, range(4), right] = np.inf
            assert ahead.min() >= sure[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_dtypes_have_radii(dtype: torch.dtype) -> None:
    net = compiled("parity", "01", 4, dtype=dtype)
    assert 0 < margin(net, largest(net)) <= 1


def test_what_is_not_around_one_sequence_is_not_refuted(hist: CompiledProgram) -> None:
    at, width = rows(hist, "abba"), len(hist.outputs or ())
    good = Property(tuple(at - 1e-4), tuple(at + 1e-4), 4 * width, ((Atom(0, True, other=1),),))
    assert hist.program("abba")[0] == (hist.outputs or ())[1] and refuted(hist, good, 2e-4) > 0
    others = {
        "the right value itself": ((Atom(1, True, other=0),),),
        "another position": ((Atom(width, True, other=1),),),
        "a threshold": ((Atom(0, True, 0.5),),),
        "a clause without": ((Atom(0, True, other=1),), (Atom(1, True, other=0),)),
    }
    for name, clauses in others.items():
        assert refuted(hist, replace(good, clauses=clauses), 2e-4) == -np.inf, name
    wide = replace(good, low=tuple(np.minimum(at, 0.0)), high=tuple(np.maximum(at, 1.0)))
    assert refuted(hist, wide, 0.499) == -np.inf and refuted(hist, good, 9e-5) == -np.inf
    assert refuted(hist, replace(good, high=tuple(at + 1e-2)), 0.4) == -np.inf
    below = replace(good, clauses=((Atom(1, False, other=0), Atom(0, True, 0.0)),))  # the same, the other way round
    assert refuted(hist, below, 2e-4) == refuted(hist, good, 2e-4)


def test_changed_weights_shrink_the_radius_or_end_it(hist: CompiledProgram) -> None:
    other = copy.deepcopy(hist)
    with torch.no_grad():
        for group in other.network.groups():
            for table in (group.W_Q, group.W_K):
                if table is not None:
                    table.mul_(0.1)
    assert largest(other) == 0.0
    with pytest.raises(CertificateError):
        model(other, 0.0)


def test_labels_hold_in_onnx_runtime(made: Pack) -> None:
    assert made.count("sat") == made.count("unsat") == 3 and made.settings["families"] == ["program"]
    rng = np.random.default_rng(1)
    for one in made.instances:
        claim, data = made.property(one), one.places(made.root)["onnx"].read_bytes()
        low, high = np.array(claim.low), np.array(claim.high)
        points = np.where(rng.random((40, len(low))) < 0.5, low, high)
        if one.label == "sat":
            points = np.array([one.witness])
            assert all(low <= points[0]) and all(points[0] <= high)
        outputs = run(data, points)
        held = np.max([np.min([outputs[:, a.output] - outputs[:, a.other] for a in c], 0) for c in claim.clauses], 0)
        assert (held >= one.margin).all() if one.label == "sat" else (held <= -one.margin).all(), one.name
        assert one.multiple == one.margin > 0 and one.bound == 0
        assert one.label == "unsat" or not propagated(made.graph(one), claim)


def test_a_pack_of_programs_is_checked(made: Pack, tmp_path: Path) -> None:
    assert check(made.root).instances == made.instances
    again = pack(tmp_path / "again", count=6, seed=4, families=["program"])
    assert [i.line() for i in again.instances] == [i.line() for i in made.instances]
    for label, change in (("unsat", 1.001), ("sat", 1.001)):
        lines = (made.root / "labels.jsonl").read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if json.loads(line)["label"] == label)
        told = json.loads(lines[at])
        told["margin"] = told["multiple"] = told["margin"] * change
        lines[at] = json.dumps(told, sort_keys=True)
        (again.root / "labels.jsonl").write_text("\n".join(lines) + "\n")
        with pytest.raises(CertificateError, match="does not follow"):
            check(again.root)
    with pytest.raises(ArgumentError, match="families are some of formula, mlp, tokens, program"):
        pack(tmp_path / "other", families=["programs"])


def test_a_witness_is_another_sequence(made: Pack) -> None:
    one = next(i for i in made.instances if i.label == "sat")
    assert set(one.witness or ()) == {0.0, 1.0} and one.kind == "turned"
    assert witnessed(made.graph(one), made.property(one), one.witness or ()).margin == one.margin
