"""Norm heads: layer norm and rms norm in one attention layer (section G1)."""
