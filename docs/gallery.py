"""Every picture of docs/gallery.md: figures as SVG for light and dark pages, and pages as a browser shows them.

python docs/gallery.py            draws the figures
python docs/gallery.py --pages    also writes the pages and photographs them; needs Chromium and Pillow
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images" / "gallery"
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "tests"))

import attnforge as af  # noqa: E402
from attnforge.charts.drawing import svg  # noqa: E402
from attnforge.charts.themes import ThemePair  # noqa: E402
from attnforge.report.heads import figure_of  # noqa: E402
from attnforge.report.network import drawing, measure, slices, slices_figure  # noqa: E402
from attnforge.report.structure import structure  # noqa: E402

FORMULA, BOX = "sin(x*y) + exp(-x**2)/y", {"x": (-1, 1), "y": (0.5, 2)}
WIDE, NARROW = 1280, 400  # pixels: a desk, a telephone
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=6000")


def figures() -> dict[str, ThemePair]:
    """The drawings by name."""
    net = af.compile(FORMULA, af.Box(BOX), eps=1e-3)
    return {
        "network": drawing(structure(net), ("x\nfrom -1 to 1", "y\nfrom 0.5 to 2"), "output\none number"),
        "curves": svg(slices_figure(slices(net, measure(net)), net.bound)),
        "warm-head": svg(figure_of(af.AnchorHead.fit("gelu", -8, 8, anchors=16))),
        "gate": svg(figure_of(af.GateHead.relu(-1, 1))),
    }


def pages(folder: Path) -> dict[str, tuple[Path, int, int, bool]]:
    """What is photographed by name: the page, its width, how much of its height, and whether it is dark."""
    from attnforge.lab.experiment import select
    from attnforge.lab.page import page_of
    from attnforge.lab.store import Store, results
    from attnforge.rasp import Sequences, library
    from lab.kept import records

    formula = af.compile(FORMULA, af.Box(BOX), eps=1e-3).report(folder / "formula.html")
    reverse = af.compile(library.reverse().named("reverse"), Sequences("abcd", max_length=20))
    program = reverse.report(folder / "program.html")
    chosen, store = select("rate-anchors"), Store.create(folder / "results")
    for experiment in chosen:
        for record in records(experiment):
            store.write(experiment, record)
    lab = page_of(*results(folder / "results", chosen)).save(folder / "lab.html")
    return {
        "page-formula": (formula, WIDE, 1500, False),
        "page-phone": (formula, NARROW, 1500, True),
        "page-program": (program, WIDE, 1500, True),
        "page-lab": (lab, WIDE, 1800, False),
    }


def photograph(page: Path, width: int, height: int, dark: bool, to: Path) -> None:
    """A page in a frame of that width: a browser's own window has a smallest size."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("pages are photographed by Chromium: install it, or leave --pages away")
    frame = page.with_name("frame.html")
    plain, size = "margin:0;border:0;display:block", f"width:{width}px;height:{height}px"
    frame.write_text(f'<body style="{plain}"><iframe src="{page.name}" style="{plain};{size}">')
    shot = page.with_name("shot.png")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [browser, *FLAGS, scheme, f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={shot}"]
    command += [f"--window-size={max(width, 800)},{height}", frame.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with Image.open(shot) as image:
        image.crop((0, 0, width, height)).quantize(256).save(to, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="photograph pages, too")
    wanted = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, pair in figures().items():
        (FOLDER / f"{name}.svg").write_text(pair.light, encoding="utf-8", newline="\n")
        (FOLDER / f"{name}-dark.svg").write_text(pair.dark, encoding="utf-8", newline="\n")
    if wanted.pages:
        with tempfile.TemporaryDirectory() as place:
            for name, (page, width, height, dark) in pages(Path(place)).items():
                photograph(page, width, height, dark, FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
