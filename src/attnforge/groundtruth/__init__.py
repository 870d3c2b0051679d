"""Ground truth: what every head of a network is for, checked; pairs of inputs that differ in one variable."""

from __future__ import annotations

from .manifest import ROLES, Claim, Edge, HeadEntry, Inputs, Manifest, Output, Witness, schema

__all__ = ["ROLES", "Claim", "Edge", "HeadEntry", "Inputs", "Manifest", "Output", "Witness", "schema"]
