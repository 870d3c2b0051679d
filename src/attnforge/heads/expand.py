"""Programs in which every function is one that a single head computes: what `choose` takes apart is written out.

y times a gate becomes an application of the gate and a product; a function with curved pieces becomes its lines plus
each piece applied to the clipped argument. Both are equalities, so that the program computes exactly the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..programs.enclose import Range
from ..programs.ops import Apply
from ..programs.program import Builder, Program
from .choose import Choice, GateProduct, Pieces, choose


def expanded(program: Program, found: Sequence[Range], margin: float = 0.0) -> Program:
    """The same program, each function written out that needs more than one head on its range.

    `found` are the ranges of the program's values; `margin`, a share of a range, is how far beyond it heads will be
    built, so that a kink just outside counts as well. The program itself where nothing has to be written out.
    """
    choices: dict[int, Choice] = {}
    for i, op in enumerate(program.ops):
        if isinstance(op, Apply):
            r = found[op.input]
            low, high = float(np.min(r.low)), float(np.max(r.high))
            room = margin * (high - low)
            choice = choose(op.function, low - room, high + room)
            if isinstance(choice, (GateProduct, Pieces)):
                choices[i] = choice
    if not choices:
        return program
    build = Builder(program.box, program.tokens)
    new: dict[int, int] = {0: build.input}
    for i, (op, site) in enumerate(zip(program.ops, program.labels, strict=True)):
        if i in choices and isinstance(op, Apply):
            new[i] = _written_out(build, new[op.input], choices[i], site or op.function.name)
        elif i:
            new[i] = build.add(op.renamed(new), site)
    return build.program(new[program.output], program.source, program.output_shape, program.output_rows)


def _written_out(build: Builder, y: int, choice: Choice, site: str) -> int:
    if isinstance(choice, GateProduct):
        return build.product(y, build.apply(y, choice.gate.function, f"gate of {site}"), site)
    assert isinstance(choice, Pieces)
    parts = [] if choice.lines is None else [build.apply(y, choice.lines.function, f"lines of {site}")]
    for part in choice.parts:
        clipped = build.apply(y, part.clip.function, f"clip of {site}")
        parts.append(build.apply(clipped, part.function, f"piece of {site}"))
    return parts[0] if len(parts) == 1 else build.combination([(part, 1.0) for part in parts], label=site)
