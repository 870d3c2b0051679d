"""Which head computes sin(x)? Find it by ablation in TransformerLens, then look at the ground truth.

    python examples/find_the_sine.py

A formula with several operations is compiled into a transformer. Pretend not to know how: replace the output of one
head after the other by its mean over many inputs, and see how the network's output changes. The head without which the
output loses a multiple of sin(x) computes sin(x). (Nearly: the straight part of the sine needs no head and goes through
the residual stream.) Compiled networks come with the answer: the purpose of every head.

Needs attnforge[lens].
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import attnforge as af  # noqa: E402
from attnforge.export import Lens, to_lens  # noqa: E402

FORMULA = "2*sin(x) + y*exp(-z) + cos(3*y)"
BOX = af.Box(x=(-3, 3), y=(-1, 1), z=(0, 2))


@dataclass(frozen=True)
class Ablation:
    """What the output loses without a head: how much, and how much of that is a multiple of sin(x)."""

    layer: int
    head: int
    effect: float
    correlation: float
    purpose: str


def without(lens: Lens, inputs: Tensor, layer: int, head: int) -> Tensor:
    """The output when a head's result is its mean over the batch, whatever the input."""

    def by_the_mean(z: Tensor, hook: Any) -> Tensor:  # (batch, position, head, d_head)
        z = z.clone()
        z[:, :, head] = z[:, :, head].mean(0, keepdim=True)
        return z

    return lens.run_with_hooks(inputs, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", by_the_mean)])


@torch.no_grad()
def ablations(lens: Lens, inputs: Tensor) -> list[Ablation]:
    """Every head of every layer, padding included, the best match for sin(x) first."""
    clean, sine = lens(inputs), torch.sin(inputs[:, 0])
    found = []
    for layer in range(lens.cfg.n_layers):
        for head in range(lens.cfg.n_heads):
            lost = clean - without(lens, inputs, layer, head)
            effect = float(lost.std())
            match = float(torch.corrcoef(torch.stack([lost, sine]))[0, 1]) if effect > 1e-6 else 0.0
            known = lens.heads[layer]
            found.append(Ablation(layer, head, effect, match, known[head].purpose if head < len(known) else ""))
    return sorted(found, key=lambda one: -abs(one.correlation))


def main() -> Ablation:
    net = af.compile(FORMULA, BOX, eps=1e-3)
    lens = to_lens(net, verify=False)
    print(f"{FORMULA}: {lens.plain.size}\n")
    rows = ablations(lens, BOX.sample(2000, seed=1, dtype=net.dtype))
    print("layer  head  effect    correlation with sin(x)  ground truth")
    for row in rows:
        print(f"{row.layer:5}  {row.head:4}  {row.effect:.2e}  {row.correlation:23.4f}  {row.purpose or '(padding)'}")
    best = rows[0]
    print(f"\nby ablation: layer {best.layer}, head {best.head}; its purpose: {best.purpose}")
    assert "sin(x)" in best.purpose, "the experiment found another head than the compiler put there"
    return best


if __name__ == "__main__":
    main()
