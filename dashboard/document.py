"""The HTML document that a page begins as, and in which order its scripts run.

The timeline's scripts are ES modules, which Dash knows nothing of: it would load them as classic
scripts. They are named here, all at once, so that none waits for another that imports it.

On the timeline the picture comes first: its own small scripts run as soon as they are there, and
Dash's (3.6 MB, most of a second of the browser's one thread) are asked for once it is painted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import dash
import flask

TIMELINE = "/timeline"
MODULES: Final = "/assets/timeline"
FILES: Final = tuple(
    sorted(file.name for file in (Path(__file__).parent / "assets" / "timeline").glob("*.js"))
)

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
{metas}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/early.js"></script>
{css}
{modules}
</head>
<body>
{app_entry}
<footer>{config}{last}</footer>
</body>
</html>"""


class Application(dash.Dash):
    """Dash, with this document around its pages."""

    def interpolate_index(
        self,
        metas: str = "",
        title: str = "",
        css: str = "",
        config: str = "",
        scripts: str = "",
        app_entry: str = "",
        favicon: str = "",
        renderer: str = "",
    ) -> str:
        """The document, of the parts that Dash made."""
        parts = {"metas": metas, "title": title, "css": css, "config": config}
        parts |= {"scripts": scripts, "app_entry": app_entry, "renderer": renderer}
        timeline = flask.request.path.rstrip("/").endswith(TIMELINE)
        return document(parts, picture_first=timeline)


def document(parts: dict[str, str], *, picture_first: bool) -> str:
    """The HTML. ``parts``: what Dash gives ``interpolate_index``. ``picture_first``: Dash's scripts
    lie in a template, from which ``timeline/last.js`` takes them when there is a picture."""
    fields = {key: parts[key] for key in ("metas", "title", "css", "app_entry", "config")}
    scripts = f"{parts['scripts']}{parts['renderer']}"
    if picture_first:
        scripts = f'<template id="dash-scripts">{scripts}</template>'
    return HEAD.format(modules=modules(), last=scripts, **fields)


def modules() -> str:
    """The timeline's scripts: run in the order of their imports, once the document is read."""
    ahead = [f'<link rel="modulepreload" href="{MODULES}/{name}">' for name in FILES]
    return "\n".join([*ahead, f'<script type="module" src="{MODULES}/main.js"></script>'])
