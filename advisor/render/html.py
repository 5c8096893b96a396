"""HTML from templates: whatever is put into one is escaped, cleaned, and not endless.

Templates are the ``.html`` files beside the code that fills them, named by their path inside the
package: ``render/report.html``.
"""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from advisor.core import palette
from advisor.core import text as t
from advisor.core.views import Segment

LONGEST: Final = 2000
"""Characters of any one text on a page; what is longer is cut in its middle."""


def esc(text: object, *, lines: bool = False) -> str:
    """Text that HTML and SVG show as it is, in elements and in quoted attributes."""
    return escape(t.shorten(t.clean(text, lines=lines), LONGEST), quote=True)


def fill(template: str, **values: Any) -> str:
    """A template with its values; what its macros leave before the first line is left out."""
    return _environment().get_template(template).render(values).lstrip()


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["lines"] = lambda text: Markup(esc(text, lines=True))
    made.filters["parts"] = lambda parts: " · ".join(part for part in parts if part)
    made.globals["look"] = look
    made.globals["t"] = t
    return made


def _source(name: str) -> str:
    return files("advisor").joinpath(*name.split("/")).read_text(encoding="utf-8")


def _shown(value: object) -> object:
    """What a template shows of a value; what is markup already came out of a template."""
    return value if isinstance(value, Markup) else Markup(esc(value))


def look(segment: Segment) -> str:
    """The class of a part's colour (``palette.css``): never what a trace says."""
    return colour(segment.key, segment.kind)


def colour(key: str, kind: str = "work") -> str:
    """The class of a colour, for what has one."""
    prefix, known = {
        "work": ("", palette.CLASSES),
        "idle": ("idle-", palette.CAUSES),
        "host": ("host-", palette.HOST | palette.PHASES),
    }[kind]
    if key in known:
        return f"{prefix}{key}"
    return "idle" if key == "idle" else "rest"
