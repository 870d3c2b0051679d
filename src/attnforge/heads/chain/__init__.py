"""Chains: a gate, then a product or tables, for functions with kinks that are no gate themselves."""
