"""Token heads: moving information between tokens (section D)."""
