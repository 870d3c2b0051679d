"""Univariate functions: values, domains, rigorous Taylor tables and ranges, slopes, and the registry of names."""

from . import parts as parts  # its names are read wherever names of functions are
