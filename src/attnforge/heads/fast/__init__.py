"""Fast reading: one exponential per element (lemma A8)."""
