"""Scalar expressions: parsed, kept in normal form, evaluated, and turned into programs of few operations."""
