"""Product heads: x times y to machine precision (section C)."""
