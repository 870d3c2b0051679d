"""Programs with ranges that are finite, functions with kinks taken apart; and whether a text spells such a program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..errors import AttnforgeError, DomainError
from ..heads.choose import expanded
from ..heads.site import MARGIN
from ..programs.enclose import Range, ranges
from ..programs.positions import prepared
from ..programs.program import Program
from .propagation import FIRST, outward_cells

GRIDS = (FIRST, 16 * FIRST, 256 * FIRST)  # cells for the ranges heads are built for; the certificate starts from them


def taken_apart(program: Program, dtype: torch.dtype) -> tuple[Program, list[Range], int]:
    """The program with kinks as gates, products and smooth pieces, its ranges, and the cells that made them finite."""
    found, grid = _ranges(program, dtype)
    apart = expanded(program, found, MARGIN)
    if apart is program:
        return program, found, grid
    apart = prepared(apart)  # positions that no value reads were left out
    return apart, *_ranges(apart, dtype)


def _ranges(program: Program, dtype: torch.dtype) -> tuple[list[Range], int]:
    for grid in GRIDS:
        with np.errstate(invalid="ignore", over="ignore"):
            found = ranges(program, *outward_cells(program, grid, dtype))
        endless = [i for i, r in enumerate(found) if not (np.isfinite(r.low).all() and np.isfinite(r.high).all())]
        if not endless:
            return found, grid
    name = program.labels[endless[0]] or program.ops[endless[0]].word
    raise DomainError(
        f"'{name}' cannot be shown to be bounded on {program.box!r}: its argument may come too close to a singularity; "
        "choose a smaller box"
    )


def spells(program: Program, dtype: torch.dtype) -> bool:
    """Whether the source of a program is a formula, or a list of them, that is written as this very program."""
    if program.box.names is None or len(program.source) > _LONGEST_TEXT:
        return False
    from ..frontends.formula.normal import WRITINGS
    from ..frontends.formula.program import capture_formula

    given = _formulas(program.source) if len(program.output_shape) else program.source
    wanted = _nameless(program)
    for style in WRITINGS:
        try:
            written = prepared(capture_formula(given, program.box, style))
            if _nameless(written) == wanted or _nameless(taken_apart(written, dtype)[0]) == wanted:
                return True
        except AttnforgeError:
            continue
    return False


_LONGEST_TEXT = 20_000  # characters of a text that is read again: the formulas of a page


def _formulas(text: str) -> list[str]:
    """The formulas of a list as it is printed: apart at commas outside of parentheses."""
    parts, depth = [""], 0
    for letter in text.removeprefix("[").removesuffix("]"):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _nameless(program: Program) -> Program:
    return replace(program, source="", labels=("",) * len(program.ops))
