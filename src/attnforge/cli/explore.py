"""`attnforge explore`: a page in which a saved network runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ArgumentError, closest
from .common import AS_JSON, FORCE, existing, refuse_overwriting, say, say_json, waiting


def explore(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge, or a converted folder.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE", help="The .html file to write.")],
    site: Annotated[
        str | None, typer.Option("--site", metavar="PATH", help="Of a converted folder: the site to show.")
    ] = None,
    as_json: Annotated[bool, AS_JSON] = False,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Write one HTML file in which a saved network runs, with its target, its heads and its bound beside it.

    The page needs no server and asks for nothing from outside. Sliders move the input; heads can be switched off and
    warmed; a button hunts for a worse point.

    \b
    attnforge explore net.safetensors -o page.html
    """
    from .. import files
    from ..explorer import explore as write

    refuse_overwriting({".html": output}, force)
    with waiting(f"drawing {file.name}"):
        if file.is_dir():
            net = _site(files.load(file), file, site)
        elif site is not None:
            raise ArgumentError(f"--site is for folders of converted models, and '{file}' is a file; leave it out")
        else:
            net = files.load(existing(file))
        path = Path(write(net, output, force=True))
    if as_json:
        say_json({"page": str(path), "bytes": path.stat().st_size})
        return
    say(f"wrote {path}: {path.stat().st_size:,} bytes; open it in a browser")


def _site(model: Any, folder: Path, path: str | None) -> Any:
    """A site of a converted model, by its path."""
    from ..conversion.site import SiteModule

    sites = {module.path: module for module in model.modules() if isinstance(module, SiteModule)}
    if path is None or path not in sites:
        asked = "give --site" if path is None else f"--site '{path}' is unknown{closest(path, sites)}"
        raise ArgumentError(f"'{folder}' holds a converted model: {asked}; it has {', '.join(sites) or 'no sites'}")
    return sites[path]
