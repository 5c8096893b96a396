"""Markup built from tags. Their content is escaped, cleaned, and cut at ``_MAX_TEXT``."""

from html import escape
from typing import Final

from advisor.core import charts, labels
from advisor.core.charts import Segment
from advisor.render.document import Inline, Span, spans

_MAX_TEXT: Final = 2000
"""Maximum length of a text on a page, characters. A longer one is cut in its middle."""


class Markup(str):
    """Markup made by :func:`tag`."""

    __slots__ = ()


def esc(text: object, *, lines: bool = False) -> str:
    """Escape text for HTML and SVG, in elements and in quoted attributes."""
    return escape(labels.shorten(labels.clean(text, lines=lines), _MAX_TEXT), quote=True)


def tag(name: str, *children: object, cls: str = "", **attributes: object) -> Markup:
    """Return an element. Children other than :class:`Markup` are escaped. ``None`` and empty
    children and attributes are left out. Underscores in attribute names become hyphens."""
    all_attributes = {"class": cls, **attributes}
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_clean_text(value)}"'
        for key, value in all_attributes.items()
        if value not in (None, "")
    )
    return Markup(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Join markup, with texts escaped."""
    return Markup("".join(_clean_text(child) for child in children if child))


def _clean_text(value: object) -> str:
    return value if isinstance(value, Markup) else esc(value)


def inline(text: Inline) -> Markup:
    """Draw a line of text with its styles."""
    return join(*(part if isinstance(part, str) else _draw_span(part) for part in spans(text)))


def _draw_span(span: Span) -> Markup:
    title = span.title if span.title != span.text else ""
    if span.style == "code":
        return tag("code", span.text, title=title)
    if span.style == "strong":
        return tag("b", span.text, title=title)
    return tag("span", span.text, cls=span.style, title=title)


def scrolling_box(label: str, *children: object) -> Markup:
    """Draw a box that scrolls sideways, also with the keyboard."""
    return tag("div", *children, cls="scroll", tabindex=0, role="group", aria_label=label)


def color_class_of_segment(segment: Segment) -> str:
    """Return the class of a part's colour (``charts.css_rules``), never a text from the trace."""
    return color_class(segment.key, segment.kind)


def color_class(key: str, kind: str = "work") -> str:
    """Return the class of a colour, if there is one for the key."""
    prefix, known = {
        "work": ("", charts.CLASSES),
        "idle": ("idle-", charts.CAUSES),
        "host": ("host-", charts.HOST | charts.PHASES),
    }[kind]
    if key in known:
        return f"c-{prefix}{key}"
    return "c-idle" if key == "idle" else "c-rest"
