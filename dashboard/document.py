"""The HTML document that a page begins as, and in which order its scripts run.

On the timeline the picture comes first: its own small scripts run as soon as they are there, and
Dash's (3.6 MB, most of a second of the browser's one thread) are asked for once it is painted.
"""

from __future__ import annotations

import re

import dash
import flask

TIMELINE = "/timeline"
SCRIPT = re.compile(r"<script[^>]*></script>")
OWN = "/assets/timeline"

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
{metas}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/early.js"></script>
{css}
{first}
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
    lie in a template, from which ``timeline_last.js`` takes them when there is a picture."""
    kept = {key: parts[key] for key in ("metas", "title", "css", "app_entry", "config")}
    scripts = parts["scripts"]
    if not picture_first:
        return HEAD.format(first="", last=f"{scripts}{parts['renderer']}", **kept)
    own = [tag for tag in SCRIPT.findall(scripts) if OWN in tag]
    rest = SCRIPT.sub(lambda found: "" if found[0] in own else found[0], scripts)
    return HEAD.format(
        first="\n".join(tag.replace("<script", "<script defer") for tag in own),
        last=f'<template id="dash-scripts">{rest}{parts["renderer"]}</template>',
        **kept,
    )
