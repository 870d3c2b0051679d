"""Ground truth: what every head of a network is for, checked; pairs of inputs that differ in one variable."""

from __future__ import annotations

from .counterfactual import Pair, Pairs, pairs
from .evidence import Checked, check
from .manifest import ROLES, Channel, Claim, Edge, HeadEntry, Inputs, Manifest, Output, Witness, schema

__all__ = [
    "ROLES", "Channel", "Checked", "Claim", "Edge", "HeadEntry", "Inputs", "Manifest", "Output", "Pair", "Pairs",
    "Witness", "check", "pairs", "schema",
]  # fmt: skip
