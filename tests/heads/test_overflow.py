"""What a dtype cannot hold has no bound: heads and theorems whose weights were scaled are refused, or stay finite."""

from collections.abc import Callable

import pytest
import torch

import attnforge as af
from attnforge import theorems
from attnforge.certificates.certified import CertifiedModule

HEADS: dict[str, Callable[[], CertifiedModule]] = {
    "anchor": lambda: af.AnchorHead.fit("tanh", -2, 2, anchors=8),
    "gate": lambda: af.GateHead.fit("abs", -2, 2),
    "product": lambda: af.ProductHead.fit((-1, 1), (-1, 1)),
    "mean": lambda: af.TokenHead.mean(3, 2, -1, 1),
    "max": lambda: af.TokenHead.max(3, 2, -1, 1),
    "cold ramp": lambda: theorems.relu([1.0, -0.5], 0.1, 2.0).to(torch.float32),
    "warm ramp": lambda: theorems.ramp([1.0, -0.5], 0.1, -1, 1, radius=2.0, variant="warm").to(torch.float32),
    "partition": lambda: theorems.max_affine(
        lambda x: (x**2).sum(-1, keepdim=True), af.Box.cube(-1, 1, shape=2), 16, lipschitz=4.0
    ).to(torch.float32),
}


@pytest.mark.parametrize("name", HEADS)
def test_scaled_weights_are_refused_or_outputs_are_numbers(name: str) -> None:
    head = HEADS[name]()
    kept = {key: value.clone() for key, value in head.state_dict().items()}
    box = head.box
    assert box is not None
    points = box.sample(8, seed=0, dtype=torch.float32)
    points[0], points[1] = box.lower.float(), box.upper.float()
    points = points.unsqueeze(-1) if name == "anchor" else points
    given = tuple(points.unbind(-1)) if name in ("anchor", "gate", "product") else (points,)
    refused = 0
    for key in [key for key in kept if name != "product" or "M_K" in key]:  # others take their time
        for factor in (1e38, 1e19, 1e-38):
            with torch.no_grad():
                head.load_state_dict(kept)
                head.state_dict()[key].mul_(factor)
                try:
                    af.certify(head)
                except (af.CertificateError, af.PrecisionError):
                    refused += 1
                else:
                    assert torch.isfinite(head(*given)).all(), (key, factor)
    assert refused > 0 or name == "mean"


def test_a_norm_does_not_promise_what_its_weight_makes_endless() -> None:
    norm = af.NormHead.fit(4, (0.1, 10.0))
    norm.weight = torch.nn.Parameter(torch.full((4,), 1e38))
    with pytest.raises(af.CertificateError, match="cannot hold"):
        af.certify(norm)
