"""Scores of found circuits: counted by hand, and laws of rankings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge.groundtruth.manifest import Claim, Edge, HeadEntry, Inputs, Manifest, Output, Witness
from attnforge.groundtruth.scoring import score

MOVES = (Witness("y", 0, None, 1.0),)


def head(layer: int, index: int, moves: bool, still: bool = False) -> HeadEntry:
    return HeadEntry(
        f"L{layer}.H{index}", layer, index, f"blocks.{layer}", index, "map", "", "", "memory",
        moves=MOVES if moves else (), still=("y",) if still else (),
    )  # fmt: skip


@pytest.fixture
def truth() -> Manifest:
    heads = (head(0, 0, True), head(0, 1, False), head(1, 0, True), head(1, 1, False, True))
    pairs = [("input", "L0.H0"), ("L0.H0", "L1.H0"), ("L1.H0", "output")]
    edges = tuple(Edge(a, b, (), ("value",), MOVES) for a, b in pairs)
    unsure = Edge("input", "L1.H1", (), ("value",), (), ("y",))
    claim = Claim("exact", 0.0, "float32", "analysis", 0.0)
    return Manifest(
        "f",
        "plain",
        Inputs("numbers", ("x",), ((1,),)),
        (Output("y"),),
        (),
        heads,
        (*edges, unsure),
        ((0.0,),),
        claim,
        "",
    )


def test_counts_are_those_of_a_hand(truth):
    found = score({"heads": ["L0.H0", "L0.H1", "L1.H1"], "edges": [("input", "L0.H0"), ["input", "output"]]}, truth)
    assert (found.heads.right, found.heads.wrong, found.heads.missed) == (1, 1, 1)  # L1.H1 is left open
    assert found.heads.precision == found.heads.recall == found.heads.f1 == 0.5 and found.heads.auc is None
    assert (found.edges.right, found.edges.wrong, found.edges.missed) == (1, 1, 2)
    everything = score({"heads": ["L0.H0", "L1.H0"], "edges": [(e.source, e.target) for e in truth.edges]}, truth)
    assert everything.heads.f1 == everything.edges.f1 == 1.0
    for one in (1, np.float32(1), np.int64(1), torch.tensor(1.0), math.inf):
        assert score({"heads": {"L0.H0": one, "L1.H0": one, "L0.H1": -1.0}}, truth).heads.auc == 1.0
    nothing = score({}, truth)
    assert nothing.edges.precision == 1.0 and nothing.edges.recall == 0.0
    assert nothing.to_json()["edges"]["missed"] == 3


def test_the_area_is_the_share_of_pairs_in_the_right_order(truth):
    """AUC = P(right above wrong), ties a half: counted over all pairs."""
    nodes = ["input", "L0.H0", "L0.H1", "L1.H0", "L1.H1", "output"]
    layer = {"input": -1, "output": 9, **{h.id: h.layer for h in truth.heads}}
    every = [(a, b) for a in nodes for b in nodes if layer[a] < layer[b] and (a, b) != ("input", "L1.H1")]
    right = {(e.source, e.target) for e in truth.edges if e.moves}
    rng = np.random.default_rng(0)
    for _ in range(20):
        ranks = {pair: float(rng.integers(4)) for pair in every}
        found = score({"edges": ranks}, truth, threshold=2.0).edges
        beaten = [(ranks[a] > ranks[b]) + 0.5 * (ranks[a] == ranks[b]) for a in right for b in every if b not in right]
        assert found.auc == pytest.approx(np.mean(beaten), abs=1e-12)
        assert found.roc[0] == (0.0, 0.0) and found.roc[-1] == pytest.approx((1.0, 1.0))
        assert found.right + found.wrong == sum(rank >= 2.0 for rank in ranks.values())
    assert score({"edges": dict.fromkeys(right, 1.0)}, truth).edges.auc == 1.0
    assert score({"edges": {pair: float(pair not in right) for pair in every}}, truth).edges.auc == 0.0


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"heads": ["L0.H7"]}, "L0.H0"),
        ({"edges": [("inptu", "L0.H0")]}, "input"),
        ({"edges": [("L1.H0", "L0.H0")]}, "later layer"),
        ({"edges": [("output", "L0.H0")]}, "later layer"),
        ({"edges": ["L0.H0"]}, "pair"),
        ({"heads": {"L0.H0": float("nan")}}, "ranked by numbers"),
        ({"heads": {"L0.H0": 10**400}}, "ranked by numbers"),
        ({"heads": {"L0.H0": torch.ones(1)}}, "ranked by numbers"),
        ({"heads": "L0.H0"}, "a list"),
        ({"head": []}, "heads"),
        ({"edges": [(["input"], "L0.H0")]}, "a text"),
        ({"heads": [3]}, "a text"),
    ],
)
def test_what_does_not_fit_is_answered(truth, found, says):
    with pytest.raises(af.ArgumentError, match=says):
        score(found, truth)


def test_a_manifest_and_a_threshold_are_asked_for(truth):
    with pytest.raises(af.ArgumentError, match="score takes a manifest"):
        score({"heads": []}, "manifest.json")
    with pytest.raises(af.ArgumentError, match="threshold"):
        score({"heads": []}, truth, threshold=float("nan"))
