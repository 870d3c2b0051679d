"""The experiments by name. Each is loaded when it is asked for, from the file that bears its name."""

from __future__ import annotations

import importlib

from ..errors import ArgumentError, closest
from .experiment import Experiment

#: In the order in which they are listed, run and reported.
NAMES = (
    "rate-anchors",
    "rate-heads",
    "range",
    "heatmap",
    "temperature",
    "boundary",
    "length",
    "sequence",
    "in-context",
    "universality",
    "training-from-construction",
)


def names() -> tuple[str, ...]:
    """The experiments there are.

    >>> names()[:2]
    ('rate-anchors', 'rate-heads')
    """
    return NAMES


def find(name: str) -> Experiment:
    """The experiment of that name.

    >>> find("rate-anchor")
    Traceback (most recent call last):
    attnforge.errors.ArgumentError: there is no experiment 'rate-anchor'; did you mean 'rate-anchors'?...
    """
    asked = name.strip().lower().replace("_", "-")
    if asked not in NAMES:
        raise ArgumentError(
            f"there is no experiment '{name}'{closest(asked, NAMES)}; known are {', '.join(NAMES)}, and all"
        )
    module = importlib.import_module(f"{__package__}.experiments.{asked.replace('-', '_')}")
    experiment = module.EXPERIMENT
    assert isinstance(experiment, Experiment)
    assert experiment.name == asked
    return experiment


def select(name: str) -> tuple[Experiment, ...]:
    """The experiment of that name, or every one for "all"."""
    return tuple(map(find, NAMES)) if name == "all" else (find(name),)
