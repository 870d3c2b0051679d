"""The experiments by name. Each is loaded when it is asked for, from the file that bears its name."""

from __future__ import annotations

import importlib
import importlib.util

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

    >>> set(names()) <= set(NAMES)
    True
    """
    package = f"{__package__}.experiments"
    return tuple(n for n in NAMES if importlib.util.find_spec(f"{package}.{n.replace('-', '_')}") is not None)


def find(name: str) -> Experiment:
    """The experiment of that name.

    >>> find("rate-anchor")
    Traceback (most recent call last):
    attnforge.errors.ArgumentError: there is no experiment 'rate-anchor'; did you mean 'rate-anchors'?...
    """
    known = names()
    asked = name.strip().lower().replace("_", "-")
    if asked not in known:
        raise ArgumentError(
            f"there is no experiment '{name}'{closest(asked, NAMES)}; known are {', '.join(known)}, and all"
        )
    module = importlib.import_module(f"{__package__}.experiments.{asked.replace('-', '_')}")
    experiment = module.EXPERIMENT
    assert isinstance(experiment, Experiment)
    assert experiment.name == asked
    return experiment


def select(name: str) -> tuple[Experiment, ...]:
    """The experiment of that name, or every one for "all"."""
    return tuple(map(find, names())) if name == "all" else (find(name),)
