"""Certificates: what is known about the distance between a network and its target, and why."""

from .certificate import Certificate, Term

__all__ = ["Certificate", "Term"]
