"""Univariate functions: values, domains, rigorous Taylor tables and ranges, slopes, and the registry of names."""
