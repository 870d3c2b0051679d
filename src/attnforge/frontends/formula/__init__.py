"""Formulas to programs: parsed, checked to be defined on the box, and written with few operations."""
