"""How far the explorer's page is from PyTorch and from its target, over the families of networks in tests/explorer.

python benchmarks/explorer.py

Prints, in units of the output: the largest difference of page and PyTorch, what the certificate grants rounding, the
largest difference of page and target, and the bound. A measurement on a few points each, not a bound.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


def main() -> None:
    spec = importlib.util.spec_from_file_location("explorer_tests", ROOT / "tests" / "explorer" / "test_page.py")
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    with tempfile.TemporaryDirectory() as folder, tests.sync.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=tests.CHROMIUM, args=["--no-sandbox"])
        driven = tests.Driven(started.new_page(), Path(folder))
        print(f"{'network':32s} {'dtype':8s} {'page-torch':>10s} {'rounding':>10s} {'page-target':>11s} {'bound':>10s}")
        for name, make in {**tests.NUMBERS, **tests.THEOREMS}.items():
            net = make()
            page, points = driven.open(net), tests.points_of(net)
            there = tests.by_page(page, points)
            rows = page.evaluate("points => points.map(attnforge.target)", points.double().tolist())
            off = "no target"
            if rows[0] is not None:
                meant = tests.torch.tensor(rows, dtype=tests.torch.float64)
                off = f"{float((there - meant).abs().max()):.3g}"
            apart = float((there - tests.by_torch(net, points)).abs().max())
            dtype = net.certificate.dtype
            print(f"{name:32s} {dtype:8s} {apart:10.3g} {tests.rounding_of(net):10.3g} {off:>11s} {net.bound:10.3g}")
        started.close()


if __name__ == "__main__":
    main()
