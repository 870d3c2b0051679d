"""Variants of networks that are harder to read: other bases, other orders, heads that do nothing; certified anew."""
