"""Files of plain transformers as earlier versions wrote them: the network they were made from, built again.

Those files hold what the weights are made from (centres, skips, scales) instead of the weights, so that reading them
takes the families' constructions: here alone, before there is anything to certify. What comes of it states the target;
the file's own tensors are what is analysed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...box import Box
from ...compiler.assemble import assemble
from ...compiler.compiled import CompiledNetwork
from ...compiler.layout import lower
from ...dtypes import DTYPES, shipped
from ...heads.anchor.bound import AnchorWeights
from ...heads.anchor.construction import AnchorTable
from ...heads.construction import Planned
from ...heads.families import site_type
from ...programs.program import Program
from .transformer import PlainTransformer, anchor_tables, origin_of


def today(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The description as it is written today: the network's tensors in place of what they were made from."""
    plain = PlainTransformer.rebuild(config, tensors)
    net = rebuilt(config["origin"]).to(plain.dtype)
    state = net.state_dict()
    known = {name: table for name, table in anchor_tables(plain).items() if table.shape == state[name].shape}
    net.load_state_dict({**state, **known})
    return {**config, "origin": origin_of(net)}


def rebuilt(origin: dict[str, Any]) -> CompiledNetwork:
    """The network that `origin` describes, tables of anchors left blank."""
    config = origin["config"]
    arrays = {name: np.array(values, dtype=np.float64) for name, values in config["arrays"].items()}
    program = Program.from_json(config["program"], arrays)
    tables: dict[int, AnchorTable] = {}
    planned = {}
    for op, family, given in config["sites"]:
        parts: Any = None
        if family == "anchor":
            number, zero = int(given["table"]), np.zeros(int(given["anchors"]))
            given = {**given, "edges": config["flats"][number]}
            slope, level = (float(x) for x in given["skip"])
            weights = AnchorWeights(zero, zero, zero, float(given["centre"]), (slope, level))
            ends, edges = tuple(given["interval"]), tuple(given["edges"])
            parts = tables.setdefault(number, AnchorTable("", ends, weights, edges, 0.0))
        elif family == "norm":
            parts = tuple(np.array(given[name], dtype=np.float64) for name in ("scales", "shifts", "amounts"))
        planned[int(op)] = Planned(site_type(str(family)).read(int(op), given), parts)
    layout = lower(program, {op: each.site for op, each in planned.items()})
    made = shipped(DTYPES[config["origin"]])
    boxes = tuple(Box.from_json(box) for box in config["boxes"])
    net = CompiledNetwork(
        layout, assemble(layout, planned, made), made, float(config["eps"]), boxes, int(config["grid"]),
        float(config["rtol"]), bool(config["strict"]),
    ).to(shipped(DTYPES[config["dtype"]]))  # fmt: skip
    parameters = dict(net.named_parameters())
    for name, numbers in origin["trained"].items():
        with torch.no_grad():
            parameters[name].copy_(torch.tensor(numbers, dtype=net.dtype))
    return net
