"""HTML elements, short to write: ``el("Div", "text", cls="card", aria_label="…")``.

What is shown is passed as children, never as markup: React escapes it, whatever it is called.
"""

from __future__ import annotations

from typing import Any

from dash import dcc, html


def el(kind: str, /, *children: Any, cls: str = "", **props: Any) -> Any:
    """A ``dash.html`` element. Children that are None are left out; ``aria_label`` and ``data_x``
    become ``aria-label`` and ``data-x``."""
    make: Any = getattr(html, kind)
    named = {
        key.replace("_", "-") if key.startswith(("aria_", "data_")) else key: value
        for key, value in props.items()
        if value is not None
    }
    if cls:
        named["className"] = cls
    inside = [child for child in children if child is not None]
    return make(inside[0] if len(inside) == 1 else inside or None, **named)


def link(*children: Any, href: str, cls: str = "", **props: Any) -> Any:
    """A link within the dashboard: goes there without loading everything again."""
    inside = [child for child in children if child is not None]
    make: Any = dcc.Link
    if cls:
        props["className"] = cls
    return make(inside[0] if len(inside) == 1 else inside, href=href, **props)


def out(*children: Any, href: str, cls: str = "") -> Any:
    """A link to elsewhere, which learns nothing of where it was followed."""
    return el("A", *children, href=href, cls=cls, target="_blank", rel="noopener noreferrer")


def icon(name: str) -> Any:
    """An icon of assets/icons.css; decoration only, so hidden from screen readers."""
    return el("Span", cls=f"icon icon-{name}", aria_hidden="true")
