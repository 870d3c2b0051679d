"""The pictures of docs/explorer.md and of the README: pages of examples/explore.py in the system's Chromium.

python docs/pictures.py
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLOURS = 128  # of a picture: enough for flat colours and smooth letters, a third of the bytes


def pages(folder: Path) -> list[Path]:
    """What the example writes."""
    spec = importlib.util.spec_from_file_location("explore_example", ROOT / "examples" / "explore.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[Path] = module.main(folder)
    return found


def shot(page: Page, path: Path, height: int) -> None:
    """The picture of the upper part of a page, with few colours."""
    width = page.viewport_size["width"] if page.viewport_size else 0
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    image = Image.open(BytesIO(page.screenshot(full_page=True, clip=clip))).convert("RGB")  # type: ignore[arg-type]
    image.quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        formula, program = pages(Path(folder))
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, name in (("light", "explorer.png"), ("dark", "explorer-dark.png")):
            page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(formula.as_uri())
            page.click("#unit4")
            page.click("#hunt")
            page.wait_for_selector("#hunt-text")
            page.wait_for_selector("#sweep svg")
            page.wait_for_timeout(500)
            if scheme == "light":
                shot(page, IMAGES / name, 2070)
            shot(page, IMAGES / name.replace("explorer", "readme"), 1050)
        phone = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
        phone.goto(program.as_uri())
        phone.click("#unit3")
        phone.wait_for_selector("#sweep svg")
        shot(phone, IMAGES / "explorer-phone.png", 1180)
        browser.close()


if __name__ == "__main__":
    main()
