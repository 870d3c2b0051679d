"""The explorers that run inside pages of the documentation: written to docs/live, which git ignores, before a build.

python docs/live.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "live"
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

import attnforge as af  # noqa: E402
from attnforge import rasp  # noqa: E402
from attnforge.certificates.certified import CertifiedModule  # noqa: E402


def _formula() -> CertifiedModule:
    return af.compile("sin(x*y) + exp(-x**2)/y", af.Box(x=(-1, 1), y=(0.5, 2)), eps=1e-3)


def _module() -> CertifiedModule:
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    return af.compile(mlp, af.Box.cube(-1, 1, shape=3), eps=1e-3)


def _counted() -> CertifiedModule:
    counted = af.compile(rasp.library.hist().named("histogram"), rasp.Sequences("abc", max_length=8))
    return af.export.to_plain(counted)


#: What runs where: a page names these in `<iframe class="live" src="live/NAME.html">`.
LIVE: dict[str, Callable[[], CertifiedModule]] = {
    "formula": _formula,
    "module": _module,
    "sort": lambda: af.compile(rasp.library.sort().named("sort"), rasp.Sequences("abcd", max_length=8)),
    "plain": _counted,
    "gelu": lambda: af.AnchorHead.fit("gelu", -8, 8, anchors=16),
    "ramp": lambda: af.theorems.ramp([1.0, -2.0], 0.0, -1.0, 1.0, anchors=32),
    "norm": lambda: af.NormHead.layer_norm(8, variance=(0.5, 2.0)),
}


def main(folder: Path = FOLDER) -> list[Path]:
    """Every explorer as a file of its own."""
    return [Path(make().explore(folder / f"{name}.html", force=True)) for name, make in LIVE.items()]


if __name__ == "__main__":
    main()
