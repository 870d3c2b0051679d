"""What the compiler tries once a network keeps the tolerance: only smaller ones are worth an analysis."""

from __future__ import annotations

from typing import Any

import pytest

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork


@pytest.mark.parametrize("formula", ["exp(-x**2)", "sin(x)*y", "exp(x) + x/y"])
@pytest.mark.parametrize("eps", [1e-2, 1e-3])
def test_what_is_no_smaller_is_not_analysed(formula: str, eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    analyse = CompiledNetwork.analyse

    def counted(net: CompiledNetwork, *given: Any, **named: Any) -> Any:
        found = analyse(net, *given, **named)
        seen.append((net.size.anchors, found[1].excess))
        return found

    monkeypatch.setattr(CompiledNetwork, "analyse", counted)
    net = af.compile(formula, {"x": (-1, 1), "y": (1, 2)} if "y" in formula else {"x": (-1, 1)}, eps=eps)
    assert net.bound is not None and net.bound <= eps
    keeping = [i for i, (_, excess) in enumerate(seen) if excess <= eps]
    assert keeping and (net.size.anchors, net.bound) <= (min(seen[i][0] for i in keeping), eps)
    sizes = [anchors for anchors, _ in seen[keeping[0] :]]
    assert sizes == sorted(set(sizes), reverse=True), "each that was analysed later is smaller"
