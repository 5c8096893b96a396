"""Parts that pages are put together from: heads, cards, tables, code, choices, empty places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dash
import dash_mantine_components as dmc
from dash import ClientsideFunction, Input, Output, State, dcc, html

from advisor.core import labels
from advisor.core import text as t
from advisor.core.charts import Segment, StepBar
from advisor.core.finding import Location
from advisor.dashboard import theme
from advisor.render import document as d
from advisor.render.formats.html import MAX_TITLE

if TYPE_CHECKING:
    from advisor.dashboard.page_view import PageView


def page(*parts: Any) -> list[Any]:
    """Return the parts of a page below each other; ``None`` is left out."""
    return [element("Div", *[part for part in parts if part is not None], cls="stack")]


def head(title: str, lead: Any = None, *below: Any) -> Any:
    """Build a page's heading and the sentence under it."""
    return element(
        "Div",
        element("H1", title),
        element("P", lead, cls="lead") if lead else None,
        *below,
        cls="page-head",
    )


def verdict_head(verdict: str) -> list[Any]:
    """Build a verdict's heading: the problem, with the sentences after it that have room. The
    others are the paragraph under it."""
    first, rest = t.split_verdict(verdict, MAX_TITLE)
    return [element("H1", first), element("P", rest, cls="lead") if rest else None]


def card(title: str, *body: Any, aside: str = "", tools: Any = None, cls: str = "") -> Any:
    """Build a box with a heading."""
    return element(
        "Section",
        element(
            "Div",
            element("H2", title),
            element("Span", aside, cls="aside") if aside else None,
            element("Span", tools, cls="tools") if tools is not None else None,
            cls="card-head",
        ),
        *body,
        cls=f"card {cls}".strip(),
    )


def png_button(name: str) -> Any:
    """Build a button that saves the card it is in as a PNG (assets/picture.js)."""
    return element(
        "Button",
        icon("image"),
        cls="quiet save-picture",
        type="button",
        title="Save as PNG",
        data_name=name,
        aria_label="Save this figure as PNG",
    )


def remark(text: str) -> Any:
    """Build a remark below a figure or a table; ``None`` without one."""
    return element("P", text, cls="note-line") if text else None


def empty_state(title: str, why: str, how: str = "", *more: Any) -> Any:
    """Build the notice of what was not recorded: what is missing, why, and how to get it."""
    return element(
        "Section",
        element("H2", title),
        element("P", why),
        element("P", how, cls="how") if how else None,
        *more,
        cls="empty",
    )


def empty_page(title: str, *notice: Any) -> list[Any]:
    """Build a page of one notice. ``notice``: arguments of :func:`empty_state`."""
    return page(head(title), empty_state(*notice))


def tiles(figures: Sequence[tuple[str, str, str]]) -> Any:
    """Build figures of merit: (name, value, what to know about it)."""
    items = []
    for name, value, below in figures:
        none = value == t.NOT_MEASURED
        items.append(
            element(
                "Div",
                element("Dt", name),
                element(
                    "Dd",
                    value,
                    element("Span", below, cls="sub") if below else None,
                    cls="none" if none else "",
                ),
                cls="tile",
            )
        )
    return element("Dl", *items, cls="tiles")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: Iterable[int] = (),
    caption: Any = "",
    names: Iterable[int] = (0,),
    chosen: int | None = None,
    stacked: bool = False,
) -> Any:
    """Build a table; columns in ``numbers`` are right-aligned, those in ``names`` may break.

    ``stacked``: in a narrow window each row is a block, its cells below each other with their
    column's title, in place of a table to scroll sideways."""
    right, breaking = set(numbers), set(names)
    # laid out as blocks they would be no table any more to a screen reader
    roles = dict.fromkeys(("table", "rowgroup", "row", "cell", "columnheader"))
    if stacked:
        roles = {role: role for role in roles}

    def kind(column: int) -> str:
        return "num" if column in right else "name" if column in breaking else ""

    lines = [
        element(
            "Tr",
            *(
                element(
                    "Td",
                    cell,
                    cls=f"{kind(i)}{' none' * (cell == t.EMPTY_CELL)}".strip(),
                    role=roles["cell"],
                    data_head=header[i] if stacked else None,
                )
                for i, cell in enumerate(row)
            ),
            cls="chosen" if number == chosen else "",
            role=roles["row"],
        )
        for number, row in enumerate(rows)
    ]
    heads = [
        element(
            "Th",
            text or element("Span", "bar", cls="visually-hidden"),
            cls=kind(i),
            scope="col",
            role=roles["columnheader"],
        )
        for i, text in enumerate(header)
    ]
    made = element(
        "Table",
        element("Caption", caption) if caption else None,
        element("Thead", element("Tr", *heads, role=roles["row"]), role=roles["rowgroup"]),
        element("Tbody", *lines, role=roles["rowgroup"]),
        cls="data stacked" if stacked else "data",
        role=roles["table"],
    )
    named = caption if isinstance(caption, str) else ""
    return scrolling(made, named or header[0] or "Table")


def draw_grid(grid: d.Grid, rows: Sequence[Sequence[Any]] | None = None) -> Any:
    """Draw a document's table, ``rows`` in place of its own. Spaces before a name are its depth."""
    head = [name if name[:2].isupper() else name.capitalize() for name in grid.head]
    drawn = [[_cell(cell) for cell in row] for row in (grid.rows if rows is None else rows)]
    numbers = [column for column, side in enumerate(grid.sides) if side == "r"]
    return table(head, drawn, numbers=numbers, stacked=True)


def _cell(cell: Any) -> Any:
    if not isinstance(cell, str | d.Span):
        return cell
    text = cell if isinstance(cell, str) else cell.text
    depth = len(text) - len(text.lstrip(" "))
    if not depth:
        return labels.clean(text)
    return element(
        "Span", labels.clean(text.strip()), style={"paddingLeft": f"{0.6 * depth:.1f}em"}
    )


def draw_section(section: d.Section) -> Any:
    """Draw a document's section as a card; of cards, these under its heading."""
    parts = map(draw_block, section.blocks)
    if any(isinstance(block, d.Card) for block in section.blocks):
        return element("Div", element("H2", section.title), *parts, cls="stack")
    return card(section.title, *parts, aside=section.aside)


MARKS = {"✓": "mark good", "?": "mark"}
"""Classes of the marks before the items of a list."""


def draw_block(block: d.Block) -> Any:
    """Draw a block of a document. Not a figure: pages have pictures of their own."""
    match block:
        case d.Section():
            return draw_section(block)
        case d.Card():
            return card(labels.clean(block.title), *map(draw_block, block.blocks))
        case d.Grid():
            return draw_grid(block)
        case d.Items() if block.mark in MARKS:
            mark = element("Span", block.mark, cls=MARKS[block.mark], aria_hidden="true")
            lines = [element("Li", mark, _inline(item)) for item in block.items]
            return element("Ul", *lines, cls="plain")
        case d.Items():
            return element("Ul", *(element("Li", _inline(item)) for item in block.items))
        case d.FieldList():
            parts = [(row.label, [d.plain_text(part) for part in row.parts]) for row in block.rows]
            texts = [(label, labels.clean(" · ".join(filter(None, own)))) for label, own in parts]
            return fact_list([(label, text) for label, text in texts if text])
        case d.Paragraph():
            return element("P", _inline(block.text), cls="note-line")
        case d.Code():
            return code(block.text, block.language)
    return None


def _inline(text: d.Inline) -> Any:
    if not isinstance(text, tuple):
        return _cell(text)
    parts = [
        element("Span", labels.clean(part.text), cls="dim" if part.style == "soft" else "")
        for part in (each if isinstance(each, d.Span) else d.Span(each) for each in text)
    ]
    return element("Span", *parts)


def scrolling(made: Any, label: str) -> Any:
    """Wrap a table that may be wider than its place. What scrolls must be reachable with the
    keyboard, and then have a name; no landmark, as a page has many."""
    return element("Div", made, cls="scroll", tabIndex="0", role="group", aria_label=label)


def fact_list(rows: Iterable[tuple[str, Any]]) -> Any:
    """Build a list of names and values."""
    items: list[Any] = []
    for name, value in rows:
        items += [element("Dt", name), element("Dd", value)]
    return element("Dl", *items, cls="facts")


def foldable(summary: str, *body: Any) -> Any:
    """Build a body that is shown after a click on its summary."""
    return element("Details", element("Summary", summary), *body, cls="fold")


def choices(label: str, options: Iterable[tuple[str, str, bool]]) -> Any:
    """Build links of which one is chosen: (text, address, chosen)."""
    links = [
        link(text, href=href, cls="chosen" if chosen else "") for text, href, chosen in options
    ]
    return element("Div", element("Span", label, cls="label"), *links, cls="choices")


def abbreviation(label: str, full: str) -> Any:
    """Shorten a name: the whole of it is the tooltip, and what is copied (assets/shell.js)."""
    if label == full:
        return label
    return element("Span", label, title=full, data_full=full)


def swatch(colour: str) -> Any:
    """Draw a square of a colour, beside the name of what it stands for."""
    return element("Span", cls="swatch", style={"background": colour}, aria_hidden="true")


def bar_cell(share: float, colour: str, rest: float = 0.0) -> Any:
    """Draw a cell with a bar as long as a share of it, nothing of nothing; ``rest``: what follows
    it in grey."""
    bars = [
        element(
            "Span",
            cls="spark",
            style={"width": f"{max(0.0, min(part, 1.0)) * 100:.2f}%", "background": own},
            aria_hidden="true",
        )
        for part, own in ((share, colour), (rest, theme.PLAIN))
        if part
    ]
    return element("Div", *bars, cls="bar-cell")


def banner(lines: Sequence[str], cls: str = "banner") -> Any:
    """Build the caveats of a page, a line each; ``None`` when there is nothing."""
    if not lines:
        return None
    items = [element("Li", labels.clean(line)) for line in lines]
    return element("Div", icon("warn"), element("Ul", *items), cls=cls, role="note")


_TOKENS = {
    "Keyword": "kw", "Literal.String": "st", "Comment": "cm", "Literal.Number": "nu",
    "Name.Function": "fn", "Name.Decorator": "fn", "Operator.Word": "kw",
}  # fmt: skip


def code(text: str, language: str = "python", name: str = "") -> Any:
    """Build code with a button that copies it; Python is coloured. ``name``: what it is of."""
    from pygments.lexers.python import PythonLexer
    from pygments.lexers.special import TextLexer

    parts: list[Any] = []
    lexer = PythonLexer if language == "python" else TextLexer
    for kind, word in lexer(stripnl=True).get_tokens(labels.clean(text, lines=True)):
        token = str(kind).removeprefix("Token.")
        look = next((look for start, look in _TOKENS.items() if token.startswith(start)), "")
        if look:
            parts.append(element("Span", word, cls=look))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += word
        else:
            parts.append(word)
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip("\n")
    return element(
        "Div",
        element(
            "Pre",
            element("Code", *parts),
            tabIndex="0",
            role="group",
            aria_label=f"Code: {name}" if name else "Code",
        ),
        element(
            "Button",
            icon("copy-text"),
            element("Span", "Copy", cls="label", aria_live="polite"),
            cls="copy",
            type="button",
        ),
        cls="code",
    )


def figure(
    made: Any,
    name: str,
    *,
    height: int,
    description: str,
    narrow_height: int = 0,
    has_table: bool = False,
    id: Any = None,  # noqa: A002
) -> Any:
    """Build a plotly figure with what it shows in words, its PNG under a button, and its numbers as
    a table on demand (assets/figure_table.js). ``narrow_height``: its height on a telephone, where
    a legend takes many lines. ``has_table``: a table beside it has the numbers."""
    graph: Any = dcc.Graph
    room = f"max({height}px, {narrow_height + 195}px - 50vw)"
    extra = {} if id is None else {"id": id}
    drawn = element(
        "Figure",
        graph(
            figure=made,
            style={"height": room},
            responsive=True,
            config={
                "displaylogo": False,
                "modeBarButtons": [["toImage"]],
                "displayModeBar": "hover",
                "toImageButtonOptions": {"filename": f"advisor-{name}", "scale": 2},
                "doubleClick": "reset+autosize",
            },
            **extra,
        ),
        element("Figcaption", description, cls="visually-hidden"),
        cls="figure",
        style={"minHeight": room},  # before plotly is there, too
        role="group",  # of the picture and its buttons
        aria_label=description,
    )
    if has_table:
        return drawn
    summary = element(
        "Summary", "Data table", element("Span", f": {description}", cls="visually-hidden")
    )
    numbers = element("Details", summary, scrolling(None, description), cls="fold figure-data")
    return element("Div", drawn, numbers, cls="with-data")


def element(kind: str, /, *children: Any, cls: str = "", **props: Any) -> Any:
    """Build a ``dash.html`` element. Children that are None are left out; ``aria_label`` and
    ``data_x`` become ``aria-label`` and ``data-x``."""
    make: Any = getattr(html, kind)
    named = {
        key.replace("_", "-") if key.startswith(("aria_", "data_")) else key: value
        for key, value in props.items()
        if value is not None
    }
    if cls:
        named["className"] = cls
    content = [child for child in children if child is not None]
    return make(content[0] if len(content) == 1 else content or None, **named)


def link(*children: Any, href: str, cls: str = "", **props: Any) -> Any:
    """Build a link within the dashboard: goes there without loading everything again."""
    content = [child for child in children if child is not None]
    make: Any = dcc.Link
    if cls:
        props["className"] = cls
    return make(content[0] if len(content) == 1 else content, href=href, **props)


def external_link(*children: Any, href: str) -> Any:
    """Build a link to elsewhere, which learns nothing of where it was followed."""
    return element("A", *children, href=href, target="_blank", rel="noopener noreferrer")


def icon(name: str) -> Any:
    """Build an icon of assets/icons.css; decoration only, so hidden from screen readers."""
    return element("Span", cls=f"icon icon-{name}", aria_hidden="true")


def editor_href(template: str, place: Location) -> str | None:
    """Return the address that opens a place in the editor, or ``None`` if its file is not here."""
    if not template or not place.file or place.line is None or "\0" in place.file:
        return None
    file = Path(place.file).absolute()
    if file.suffix != ".py" or not file.is_file():
        return None
    return template.replace("{file}", quote(str(file))).replace("{line}", str(place.line))


def draw_bar(shown: StepBar, links: Mapping[str, str] | None = None) -> Any:
    """Draw the bar and its legend. ``links``: where a part leads, by its key."""
    working = [bar_legend(f"Working, share {t.format_of(shown.per)}", shown.work, links)]
    return element(
        "Div",
        draw_strip(shown.segments, f"Where the {shown.per}'s time goes", links=links),
        element(
            "Div",
            *(working if shown.idle_total is not None else two_columns(shown.work, links)),
            bar_legend(shown.idle_title.capitalize(), shown.idle, links) if shown.idle else None,
            cls="legend",
        ),
    )


def two_columns(parts: Sequence[Segment], links: Mapping[str, str] | None = None) -> list[Any]:
    """Draw the legend of parts of one kind, in two columns."""
    middle = (len(parts) + 1) // 2
    return [bar_legend("", half, links) for half in (parts[:middle], parts[middle:]) if half]


MIN_LINKED = 0.025
"""Share of the bar from which a part is wide enough to be clicked: the name of each leads there."""


def draw_strip(
    parts: Sequence[Segment],
    label: str,
    *,
    thin: bool = False,
    links: Mapping[str, str] | None = None,
) -> Any:
    """Draw only the bar. It is read out as one picture with its figures, or link by link. Its part
    and the line of the legend light up together (assets/shell.js)."""
    description = ", ".join(f"{part.label} {part.share_text}" for part in parts)
    made = []
    for part in parts:
        words = f"{part.name}: {part.time}, {part.share_text}"
        style = {"flex": f"{max(part.share, 0.0):.6f} 1 0", "backgroundColor": part.look.colour}
        cls = f"part-{part.key}{' idle' * (part.kind == 'idle')}"
        href = (links or {}).get(part.key)
        if href is None or part.share < MIN_LINKED:
            made.append(element("Span", cls=cls, style=style, title=words))
        else:
            named = element("Span", words, cls="visually-hidden")
            ident = {"keeps": f"part-{part.key}"}
            made.append(link(named, href=href, cls=cls, style=style, title=words, id=ident))
    return element(
        "Div",
        *made,
        cls="bar thin" if thin else "bar",
        role="group" if links else "img",
        aria_label=label if links else f"{label}: {description}",
    )


def bar_legend(title: str, parts: Sequence[Segment], links: Mapping[str, str] | None = None) -> Any:
    """Draw the parts with their figures; a name leads where its part of the bar does."""

    def named(part: Segment) -> Any:
        href = (links or {}).get(part.key)
        return link(part.label, href=href) if href else part.label

    rows = [
        element(
            "Tr",
            element("Th", swatch(part.look.colour), named(part), scope="row"),
            element("Td", part.time, cls="num"),
            element("Td", part.share_text, cls="num share"),
            cls=f"part-{part.key}",
        )
        for part in parts
    ]
    return element("Table", element("Caption", title) if title else None, element("Tbody", *rows))


MAX_LINKS = 8
SELECT = "rank-select"


def rank_choice(view: PageView, path: str) -> Any:
    """Build the ranks to choose from; ``None`` when there is one."""
    numbers = list(view.loaded.analyses)
    if len(numbers) < 2:
        return None
    current = view.rank if view.rank is not None else numbers[0]
    if len(numbers) <= MAX_LINKS:
        return choices("Rank", [(str(n), view.href(path, rank=n), n == current) for n in numbers])
    make: Any = dmc.Select
    chosen = make(
        id=SELECT,
        data=[{"value": str(n), "label": f"rank {n}"} for n in numbers],
        value=str(current),
        searchable=True,
        allowDeselect=False,
        nothingFoundMessage="No such rank",
        w=180,
        size="sm",
        **{"aria-label": "Rank"},
    )
    return element("Div", chosen, cls="choices")


def register_rank_choice(app: dash.Dash) -> None:
    """Put a rank that is chosen from the list into the address, in the browser."""
    app.clientside_callback(
        ClientsideFunction("advisor", "chooseRank"),
        Output("_pages_location", "search"),
        Input(SELECT, "value"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
