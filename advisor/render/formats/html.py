"""A document as one HTML file to mail or attach. It loads nothing and runs nothing."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from advisor.core import charts
from advisor.core import text as t
from advisor.render import document as d
from advisor.render.figures import table_head
from advisor.render.html import Markup, esc, inline, join, scrolling_box, tag
from advisor.render.renderer import DEFAULT, DocumentRenderer, RenderOptions

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""Content security policy: only styles of the page itself are allowed."""
MAX_TITLE: Final = 180
"""Maximum length of the headline's part in the title, characters: the problem with its gain, in
three lines of a page. The remaining text is a paragraph."""
_MAX_ITEMS: Final = 200
"""Maximum number of items of one list, or of cards of one section."""


MAX_OPEN_ROWS: Final = 16
"""Maximum number of rows of a table that is shown in full at once."""
MIN_CONTENTS: Final = 4
"""Minimum number of sections at which a page begins with a list of them."""


class Html(DocumentRenderer):
    """Renderer of a page below 1 MB."""

    suffixes = (".html", ".htm")

    def draw(self, document: d.Document, options: RenderOptions = DEFAULT) -> str:
        title, rest = t.split_verdict(document.headline or f"advisor {document.name}", MAX_TITLE)
        lead = [b for b in document.blocks[:1] if isinstance(b, d.FieldList)]
        head = tag(
            "head",
            Markup('<meta charset="utf-8">'),
            Markup(
                f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
            ),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup('<meta name="referrer" content="no-referrer">'),
            tag("title", title),
            Markup(f"<style>\n{style()}</style>"),
        )
        action = tag("b", "First fix: "), tag("a", document.action, href="#f1")
        first = tag("p", *action, cls="first") if document.action else ""
        badge = tag("span", document.badge, cls=f"badge {document.status}".strip())
        header = tag(
            "header",
            badge if document.badge else "",
            tag("h1", title),
            tag("p", rest, cls="verdict") if rest else "",
            first,
            *(block(part) for part in lead),
        )
        parts = document.blocks[len(lead) :]
        anchors = _list_anchors(parts)
        contents = [
            tag("li", tag("a", part.title, href=f"#{anchor}"))
            for part, anchor in zip(parts, anchors, strict=True)
            if isinstance(part, d.Section)
        ]
        if len(contents) >= MIN_CONTENTS:
            listed = tag("nav", tag("ul", *contents), cls="contents", aria_label="Contents")
            header = join(header, listed)
        drawn = (block(part, 2, anchor) for part, anchor in zip(parts, anchors, strict=True))
        main = tag("main", *drawn, id="main")
        notes = [tag("p", note, cls="soft") for note in document.notes]
        body = tag(
            "body",
            tag("a", "Skip to the content", cls="skip", href="#main"),
            header,
            main,
            tag("footer", *notes, tag("span", document.footer)),
        )
        page = Markup(f'<html lang="en">\n{head}\n{body}\n</html>')
        return f"<!DOCTYPE html>\n{page}\n"


@cache
def style() -> str:
    """Return the page's style sheet."""
    sheet = files("advisor.render").joinpath("page.css").read_text(encoding="utf-8")
    return f"{sheet}{charts.css_rules()}"


def block(part: d.Block, level: int = 2, anchor: str = "") -> Markup:
    """Draw a part of the page, with headings of ``level`` and below. ``anchor``: of a section."""
    match part:
        case d.Section():
            title = " · ".join(filter(None, (part.title, part.aside)))
            inner = [block(each, level + 1) for each in part.blocks[:_MAX_ITEMS]]
            if part.folded:
                summary = tag("summary", tag(f"h{level}", title))
                inner = [tag("details", summary, *inner)]
            else:
                inner = [tag(f"h{level}", title), *inner]
            return tag("section", *inner, id=anchor)
        case d.Card():
            return card(part, level)
        case d.Paragraph():
            return tag("p", inline(part.text), cls=part.style)
        case d.FieldList():
            return _draw_fields(part)
        case d.Items():
            items = [tag("li", inline(item)) for item in part.items[:_MAX_ITEMS]]
            more = len(part.items) - _MAX_ITEMS
            title_ = tag(f"h{min(level, 6)}", part.title) if part.title else ""
            rest = tag("p", f"{t.format_count(more)} more are in the JSON.", cls="soft")
            return join(title_, tag("ul", *items), rest if more > 0 else "")
        case d.EvidenceList():
            cells = [
                [tag("td", value), tag("td", limit, cls="soft")] for _, value, limit in part.rows
            ]
            rows = [
                tag("tr", tag("th", row[0], scope="row"), *both)
                for row, both in zip(part.rows, cells, strict=True)
            ]
            shown = tag(
                "table",
                table_head(["evidence", "value", "limit"]),
                tag("tbody", *rows),
                cls="evidence",
            )
            return scrolling_box("Evidence", shown)
        case d.Grid():
            return _draw_table(part, level)
        case d.Code():
            code = Markup(esc(part.text.strip("\n"), lines=True))
            return tag("pre", tag("code", code), tabindex=0)
        case d.Tiles():
            tiles = [
                tag("div", tag("dt", name),
                    tag("dd", value, cls="none" * (value == t.NOT_MEASURED)),
                    tag("dd", note, cls="note") if note else "", cls="tile")
                for name, value, note in part.rows
            ]  # fmt: skip
            return tag("dl", *tiles, cls="tiles")
        case d.Figure():
            return part.html()
    return Markup()


def _list_anchors(parts: Sequence[d.Block]) -> list[str]:
    """Return the anchor of each section: the letters and digits of its title, with a number if an
    earlier section has the same."""
    result: list[str] = []
    for part in parts:
        title = part.title if isinstance(part, d.Section) else ""
        anchor = "".join(each if each.isalnum() else "-" for each in title.lower())
        own = f"{anchor}-{len(result)}" if anchor in (*result, "main") else anchor
        result.append(own if anchor else "")
    return result


def card(part: d.Card, level: int) -> Markup:
    """Draw a fix, with its details on demand."""
    number = tag("span", part.number, cls="rank") if part.number else ""
    severity = part.tag if part.tag in ("critical", "warning", "info") else "info"
    label = tag("span", part.tag, cls=f"tag {severity}") if part.tag else ""
    details: object = ""
    if part.details:
        summary = tag("summary", "Evidence, caveats and how to verify")
        details = tag("details", summary, *(block(each, level + 1) for each in part.details))
    return tag(
        "article",
        tag(f"h{level}", number, part.title, label),
        tag("p", part.gain, cls="gain") if part.gain else "",
        *(block(each, level + 1) for each in part.blocks),
        details,
        id=f"f{part.number}" if part.number else None,
    )


def _draw_fields(fields: d.FieldList) -> Markup:
    rows = []
    for row in fields.rows:
        parts = [_draw_link(part) for part in row.parts if part]
        if not parts:
            continue
        text = Markup(" · ".join(parts))
        rows.append(join(tag("dt", row.label), tag("dd", text, cls=row.style)))
    return tag("dl", *rows, cls="scope") if rows else Markup()


def _draw_link(text: d.Inline) -> Markup:
    """Draw a line of text. Only a lone web address becomes a link, as rules may be third-party
    code."""
    if isinstance(text, str) and text.startswith(("https://", "http://")):
        return tag("a", text, href=text, rel="noreferrer noopener")
    return inline(text)


def _draw_table(table: d.Grid, level: int) -> Markup:
    """Draw a table. Of a long one, draw the most important rows, and all on demand."""
    title = tag(f"h{min(level, 6)}", table.title) if table.title else ""
    count = len(table.rows)
    if table.short is None or count <= max(MAX_OPEN_ROWS, len(table.short)):
        return join(title, _draw_rows(table, table.rows))
    summary = tag("summary", f"All {t.count_noun(count, 'row')}")
    details = tag("details", summary, _draw_rows(table, table.rows))
    return join(title, _draw_rows(table, table.short), details)


def _draw_rows(table: d.Grid, table_rows: Sequence[Sequence[d.Inline]]) -> Markup:
    sides = table.sides
    rows = []
    for row in table_rows:
        first = tag("th", inline(row[0]), scope="row")
        rest = [
            tag("td", inline(cell), cls="line" * (side == "l"))
            for cell, side in zip(row[1:], sides[1:], strict=True)
        ]
        rows.append(tag("tr", first, *rest))
    drawn = tag("table", table_head(table.head), tag("tbody", *rows))
    return scrolling_box(table.title or "Table", drawn)
