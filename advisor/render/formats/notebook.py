"""Renderer for a notebook's cell: a few lines of a document, styled inline, escaped.

Colours come from the notebook's theme where possible. Nothing is loaded or run."""

import re
from functools import cache
from typing import Final

from advisor.core import charts
from advisor.core import text as t
from advisor.render import document as d
from advisor.render.formats.html import block
from advisor.render.html import Markup, inline, tag
from advisor.render.renderer import DEFAULT, DocumentRenderer, RenderOptions

MAX_CARDS: Final = 5
_MAX_ROWS: Final = 10
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"
STYLES: Final = {
    "td": _CELL,
    "th": _CELL,
    "table": "border-collapse:collapse;font-size:.92em;margin:.4em 0",
    "pre": "background:rgba(128,128,128,.12);padding:.6em .8em;border-radius:4px;overflow-x:auto;"
    "font-size:.9em;white-space:pre",
    "details": "margin:.3em 0",
    "dl": "display:grid;grid-template-columns:max-content 1fr;gap:.1em 1em;margin:.3em 0",
    "dd": "margin:0",
    ".cell": "font-family:system-ui,sans-serif;line-height:1.45;max-width:60em",
    ".bar": "display:block;width:100%;height:18px;border-radius:3px",
    ".keys": "list-style:none;display:flex;flex-wrap:wrap;gap:.1em 1.2em;padding:0;font-size:.88em",
    ".key": "display:inline-block;width:.7em;height:.7em;margin-right:.4em",
    ".soft": "opacity:.75",
}
"""Look of each tag or class, because a cell has no style sheet."""


class Notebook(DocumentRenderer):
    """Renderer of a fragment of HTML."""

    def draw(self, document: d.Document, options: RenderOptions = DEFAULT) -> str:
        """Draw the verdict, figures, and the fixes with the largest gains, with their code."""
        parts = [tag("p", tag("b", document.headline))]
        left_out = []
        for part in document.blocks:
            if isinstance(part, d.Items):
                parts.append(block(part))
            elif isinstance(part, d.Section) and part.short:
                parts += [_draw_small(each) for each in part.blocks]
            elif isinstance(part, d.Section) and part.folded and part.summary:
                left_out.append(part.summary)
        fixes = [card for card in d.cards(document.blocks) if card.fix]
        if fixes:
            parts.append(_draw_index(fixes[:MAX_CARDS]))
            parts += [_fold_card(card, opened=card is fixes[0]) for card in fixes[:MAX_CARDS]]
        if len(fixes) > MAX_CARDS:
            parts.append(tag("p", f"{t.count_noun(len(fixes) - MAX_CARDS, 'more finding')}."))
        if left_out:
            parts.append(tag("p", f"Not shown: {', '.join(left_out)}.", cls="soft"))
        return inline_styles(tag("div", *parts, cls="cell")) + "\n"


def _draw_small(part: d.Block) -> Markup:
    match part:
        case d.Card():
            return Markup()
        case d.Figure():
            return part.html(small=True)
        case d.Grid():
            head = [part.title, *part.head[1:]] if part.title and not part.head[0] else part.head
            return block(d.Grid(head, part.rows[:_MAX_ROWS], align=part.align))
        case d.Items():
            return block(d.Items(part.items[:_MAX_ROWS], title=part.title), 5)
    return block(part, 5)


def _draw_index(fixes: list[d.Card]) -> Markup:
    rows = [
        tag("tr", *(tag("td", text) for text in (c.number, c.title, c.gain, c.place)))
        for c in fixes
    ]
    names = ("", "what to change", "gain", "where")
    head = tag("thead", tag("tr", *(tag("th", name) for name in names)))
    return tag("table", head, tag("tbody", *rows))


def _fold_card(card: d.Card, *, opened: bool) -> Markup:
    summary = tag("summary", f"{card.number}. {card.title}".lstrip(". "))
    inner = [block(part, 5) for part in card.blocks]
    for part in card.details:
        if isinstance(part, d.FieldList):  # how to verify
            inner += [tag("p", tag("b", row.label), " ", *map(inline, row.parts))
                      for row in part.rows if row.label == "verify"]  # fmt: skip
    return tag("details", summary, *inner, open="open" if opened else None)


@cache
def _list_colors() -> dict[str, str]:
    return dict(re.findall(r"\.([\w-]+) \{ ([^}]*) \}", charts.css_rules()))


def inline_styles(markup: str) -> str:
    """Turn classes into styles. No text or attribute of the markup contains a bare ``<`` or
    ``>``."""

    def restyled(match: re.Match[str]) -> str:
        name, attributes = match[1], match[2]
        classes = re.search(r' class="([^"]*)"', attributes)
        looks = [STYLES.get(name, "")]
        for cls in classes[1].split() if classes else ():
            looks += [STYLES.get(f".{cls}", ""), _list_colors().get(cls, "")]
        attributes = attributes.replace(classes[0], "") if classes else attributes
        style = ";".join(look.strip("; ") for look in looks if look)
        return f'<{name}{attributes} style="{style}">' if style else f"<{name}{attributes}>"

    return re.sub(r"<([a-z]\w*)([^>]*)>", restyled, markup)
