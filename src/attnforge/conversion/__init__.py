"""Convert pretrained networks: the same model, with attention in place of every other nonlinearity."""

from .engine import convert

__all__ = ["convert"]
