"""Ground truth: what every head of a network is for, checked; pairs of inputs that differ in one variable."""

from __future__ import annotations

from .artefacts import beside
from .counterfactual import Pair, Pairs, pairs
from .evidence import Checked, check
from .manifest import ROLES, Channel, Claim, Edge, HeadEntry, Inputs, Manifest, Output, Witness, schema
from .scoring import Counts, Score, score
from .variants.build import vary
from .variants.variant import Variant

__all__ = [
    "ROLES", "Channel", "Checked", "Claim", "Counts", "Edge", "HeadEntry", "Inputs", "Manifest", "Output", "Pair",
    "Pairs", "Score", "Variant", "Witness", "beside", "check", "pairs", "schema", "score", "vary",
]  # fmt: skip
