"""Certificates: what is known about the distance between a network and its target, and the files that hold it."""
