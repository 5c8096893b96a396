"""Components of pages: headings, cards, tables, code, figures, links and notices."""

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
    """Build the content of a page: its parts below each other. ``None`` is left out."""
    return [element("Div", *[part for part in parts if part is not None], cls="stack")]


def page_heading(title: str, lead: Any = None, *controls: Any) -> Any:
    """Build a page's heading, the lead sentence below it, and further controls."""
    return element(
        "Div",
        element("H1", title),
        element("P", lead, cls="lead") if lead else None,
        *controls,
        cls="page-head",
    )


def verdict_heading(verdict: str) -> list[Any]:
    """Build the heading of a verdict: its first sentences, as many as fit.

    The paragraph below the heading has the others."""
    problem, rest = t.split_verdict(verdict, MAX_TITLE)
    return [element("H1", problem), element("P", rest, cls="lead") if rest else None]


def card(title: str, *body: Any, aside: str = "", tools: Any = None, cls: str = "") -> Any:
    """Build a card: a box with a heading.

    ``aside``: remark beside the heading. ``tools``: buttons or links at its right."""
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
    """Build a button that saves its card as a PNG (assets/picture.js)."""
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
    """Build a remark below a figure or a table, or ``None`` for an empty text."""
    return element("P", text, cls="note-line") if text else None


def empty_state(title: str, reason: str, remedy: str = "", *more: Any) -> Any:
    """Build the notice of missing data: what is missing, the reason, and the remedy."""
    return element(
        "Section",
        element("H2", title),
        element("P", reason),
        element("P", remedy, cls="how") if remedy else None,
        *more,
        cls="empty",
    )


def empty_page(title: str, *notice: Any) -> list[Any]:
    """Build a page with a notice only. ``notice``: arguments of :func:`empty_state`."""
    return page(page_heading(title), empty_state(*notice))


def tiles(figures: Sequence[tuple[str, str, str]]) -> Any:
    """Build tiles of key figures: (name, value, note) each."""
    items = []
    for name, value, note in figures:
        is_missing = value == t.NOT_MEASURED
        items.append(
            element(
                "Div",
                element("Dt", name),
                element(
                    "Dd",
                    value,
                    element("Span", note, cls="sub") if note else None,
                    cls="none" if is_missing else "",
                ),
                cls="tile",
            )
        )
    return element("Dl", *items, cls="tiles")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    number_columns: Iterable[int] = (),
    caption: Any = "",
    name_columns: Iterable[int] = (0,),
    chosen_row: int | None = None,
    stacked: bool = False,
) -> Any:
    """Build a table. Number columns are right-aligned; the text of name columns may wrap.

    ``stacked``: in a narrow window each row is a block, its cells below each other with their
    column's title, instead of a table that scrolls sideways."""
    right_aligned, breakable = set(number_columns), set(name_columns)
    # without roles, screen readers do not see a table in rows that are laid out as blocks
    roles = dict.fromkeys(("table", "rowgroup", "row", "cell", "columnheader"))
    if stacked:
        roles = {role: role for role in roles}

    def column_class(column: int) -> str:
        return "num" if column in right_aligned else "name" if column in breakable else ""

    body_rows = [
        element(
            "Tr",
            *(
                element(
                    "Td",
                    cell,
                    cls=f"{column_class(i)}{' none' * (cell == t.EMPTY_CELL)}".strip(),
                    role=roles["cell"],
                    data_head=header[i] if stacked else None,
                )
                for i, cell in enumerate(row)
            ),
            cls="chosen" if index == chosen_row else "",
            role=roles["row"],
        )
        for index, row in enumerate(rows)
    ]
    heads = [
        element(
            "Th",
            text or element("Span", "bar", cls="visually-hidden"),
            cls=column_class(i),
            scope="col",
            role=roles["columnheader"],
        )
        for i, text in enumerate(header)
    ]
    table_element = element(
        "Table",
        element("Caption", caption) if caption else None,
        element("Thead", element("Tr", *heads, role=roles["row"]), role=roles["rowgroup"]),
        element("Tbody", *body_rows, role=roles["rowgroup"]),
        cls="data stacked" if stacked else "data",
        role=roles["table"],
    )
    label = caption if isinstance(caption, str) else ""
    return scroll_box(table_element, label or header[0] or "Table")


def draw_grid(grid: d.Grid, rows: Sequence[Sequence[Any]] | None = None) -> Any:
    """Draw a document's table. Leading spaces of a cell become an indent.

    ``rows``: cells to draw instead of the table's own."""
    header = [name if name[:2].isupper() else name.capitalize() for name in grid.head]
    cells = [[_draw_cell(cell) for cell in row] for row in (grid.rows if rows is None else rows)]
    number_columns = [column for column, side in enumerate(grid.sides) if side == "r"]
    return table(header, cells, number_columns=number_columns, stacked=True)


def _draw_cell(cell: Any) -> Any:
    """Draw a cell of a document's table. Leading spaces become an indent."""
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
    """Draw a document's section as a card, or as a heading if it consists of cards."""
    parts = map(draw_block, section.blocks)
    if any(isinstance(block, d.Card) for block in section.blocks):
        return element("Div", element("H2", section.title), *parts, cls="stack")
    return card(section.title, *parts, aside=section.aside)


MARK_CLASSES = {"✓": "mark good", "?": "mark"}
"""CSS classes of the marks before list items."""


def draw_block(block: d.Block) -> Any:
    """Draw a block of a document. Return ``None`` for a figure: pages draw their own."""
    match block:
        case d.Section():
            return draw_section(block)
        case d.Card():
            return card(labels.clean(block.title), *map(draw_block, block.blocks))
        case d.Grid():
            return draw_grid(block)
        case d.Items() if block.mark in MARK_CLASSES:
            mark = element("Span", block.mark, cls=MARK_CLASSES[block.mark], aria_hidden="true")
            lines = [element("Li", mark, _draw_inline(item)) for item in block.items]
            return element("Ul", *lines, cls="plain")
        case d.Items():
            return element("Ul", *(element("Li", _draw_inline(item)) for item in block.items))
        case d.FieldList():
            parts = [(row.label, [d.plain_text(part) for part in row.parts]) for row in block.rows]
            texts = [
                (label, labels.clean(" · ".join(filter(None, text_parts))))
                for label, text_parts in parts
            ]
            return fact_list([(label, text) for label, text in texts if text])
        case d.Paragraph():
            return element("P", _draw_inline(block.text), cls="note-line")
        case d.Code():
            return code(block.text, block.language)
    return None


def _draw_inline(text: d.Inline) -> Any:
    """Draw inline text, with soft parts dimmed."""
    if not isinstance(text, tuple):
        return _draw_cell(text)
    parts = [
        element("Span", labels.clean(part.text), cls="dim" if part.style == "soft" else "")
        for part in (each if isinstance(each, d.Span) else d.Span(each) for each in text)
    ]
    return element("Span", *parts)


def scroll_box(content: Any, label: str) -> Any:
    """Wrap content that may be too wide, so that it scrolls.

    The box can have the keyboard focus, so it needs a name. Its role is no landmark, because a page
    has many such boxes."""
    return element("Div", content, cls="scroll", tabIndex="0", role="group", aria_label=label)


def fact_list(rows: Iterable[tuple[str, Any]]) -> Any:
    """Build a definition list of names and values."""
    items: list[Any] = []
    for name, value in rows:
        items += [element("Dt", name), element("Dd", value)]
    return element("Dl", *items, cls="facts")


def expander(summary: str, *body: Any) -> Any:
    """Build an element whose body is shown after a click on its summary."""
    return element("Details", element("Summary", summary), *body, cls="fold")


def choice_links(label: str, options: Iterable[tuple[str, str, bool]]) -> Any:
    """Build a row of links, one of them marked as chosen: (text, address, is chosen) each."""
    links = [
        link(text, href=href, cls="chosen" if chosen else "") for text, href, chosen in options
    ]
    return element("Div", element("Span", label, cls="label"), *links, cls="choices")


def abbreviation(label: str, full_name: str) -> Any:
    """Build a short label. Its tooltip, and what is copied, is the full name (assets/shell.js)."""
    if label == full_name:
        return label
    return element("Span", label, title=full_name, data_full=full_name)


def swatch(color: str) -> Any:
    """Build a square of a color, for a legend."""
    return element("Span", cls="swatch", style={"background": color}, aria_hidden="true")


def bar_cell(share: float, color: str, rest_share: float = 0.0) -> Any:
    """Build a table cell with a bar. ``share``: its length, 0 to 1 of the cell.

    ``rest_share``: length of a gray bar after it."""
    bars = [
        element(
            "Span",
            cls="spark",
            style={"width": f"{max(0.0, min(part, 1.0)) * 100:.2f}%", "background": part_color},
            aria_hidden="true",
        )
        for part, part_color in ((share, color), (rest_share, theme.OTHER_COLOR))
        if part
    ]
    return element("Div", *bars, cls="bar-cell")


def banner(lines: Sequence[str], cls: str = "banner") -> Any:
    """Build a banner with the caveats of a page, a line each, or ``None`` without any."""
    if not lines:
        return None
    items = [element("Li", labels.clean(line)) for line in lines]
    return element("Div", icon("warn"), element("Ul", *items), cls=cls, role="note")


_TOKEN_CLASSES = {
    "Keyword": "kw", "Literal.String": "st", "Comment": "cm", "Literal.Number": "nu",
    "Name.Function": "fn", "Name.Decorator": "fn", "Operator.Word": "kw",
}  # fmt: skip


def code(text: str, language: str = "python", name: str = "") -> Any:
    """Build a code block with a copy button. ``name``: what it is, for screen readers."""
    from pygments.lexers.python import PythonLexer
    from pygments.lexers.special import TextLexer

    parts: list[Any] = []
    lexer = PythonLexer if language == "python" else TextLexer
    for token_type, text_part in lexer(stripnl=True).get_tokens(labels.clean(text, lines=True)):
        token = str(token_type).removeprefix("Token.")
        token_class = next(
            (
                token_class
                for start, token_class in _TOKEN_CLASSES.items()
                if token.startswith(start)
            ),
            "",
        )
        if token_class:
            parts.append(element("Span", text_part, cls=token_class))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += text_part
        else:
            parts.append(text_part)
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
    plotly_figure: Any,
    name: str,
    *,
    height: int,
    description: str,
    narrow_height: int = 0,
    has_table: bool = False,
    id: Any = None,  # noqa: A002
) -> Any:
    """Build a plotly figure with a PNG button and, on demand, its numbers as a table.

    ``description``: text for screen readers. ``height``: pixels. ``narrow_height``: height on a
    phone, where a legend takes many lines. ``has_table``: another table on the page has the
    numbers; otherwise assets/figure_table.js builds one."""
    graph: Any = dcc.Graph
    height_css = f"max({height}px, {narrow_height + 195}px - 50vw)"
    extra = {} if id is None else {"id": id}
    figure_element = element(
        "Figure",
        graph(
            figure=plotly_figure,
            style={"height": height_css},
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
        style={"minHeight": height_css},  # also before plotly is loaded
        role="group",  # the figure and its buttons
        aria_label=description,
    )
    if has_table:
        return figure_element
    summary = element(
        "Summary", "Data table", element("Span", f": {description}", cls="visually-hidden")
    )
    data_table = element("Details", summary, scroll_box(None, description), cls="fold figure-data")
    return element("Div", figure_element, data_table, cls="with-data")


def element(kind: str, /, *children: Any, cls: str = "", **props: Any) -> Any:
    """Build a ``dash.html`` element. Children and properties that are ``None`` are left out.

    Properties such as ``aria_label`` and ``data_x`` become ``aria-label`` and ``data-x``."""
    component: Any = getattr(html, kind)
    attributes = {
        key.replace("_", "-") if key.startswith(("aria_", "data_")) else key: value
        for key, value in props.items()
        if value is not None
    }
    if cls:
        attributes["className"] = cls
    content = [child for child in children if child is not None]
    return component(content[0] if len(content) == 1 else content or None, **attributes)


def link(*children: Any, href: str, cls: str = "", **props: Any) -> Any:
    """Build a link within the dashboard. Dash follows it without reloading the document."""
    content = [child for child in children if child is not None]
    component: Any = dcc.Link
    if cls:
        props["className"] = cls
    return component(content[0] if len(content) == 1 else content, href=href, **props)


def external_link(*children: Any, href: str) -> Any:
    """Build a link to another site. The browser sends it no referrer."""
    return element("A", *children, href=href, target="_blank", rel="noopener noreferrer")


def icon(name: str) -> Any:
    """Build an icon of assets/icons.css. It is decoration, so it is hidden from screen readers."""
    return element("Span", cls=f"icon icon-{name}", aria_hidden="true")


def editor_href(template: str, place: Location) -> str | None:
    """Return the address that opens a place in the editor, or ``None`` without a local file."""
    if not template or not place.file or place.line is None or "\0" in place.file:
        return None
    file = Path(place.file).absolute()
    if file.suffix != ".py" or not file.is_file():
        return None
    return template.replace("{file}", quote(str(file))).replace("{line}", str(place.line))


def draw_bar(step_bar: StepBar, links: Mapping[str, str] | None = None) -> Any:
    """Draw the step's bar and its legend. ``links``: address of each part, by its key."""
    working_legend = [
        bar_legend(f"Working, share {t.format_of(step_bar.per)}", step_bar.work, links)
    ]
    return element(
        "Div",
        draw_strip(step_bar.segments, f"Where the {step_bar.per}'s time goes", links=links),
        element(
            "Div",
            *(
                working_legend
                if step_bar.idle_total is not None
                else two_column_legend(step_bar.work, links)
            ),
            bar_legend(step_bar.idle_title.capitalize(), step_bar.idle, links)
            if step_bar.idle
            else None,
            cls="legend",
        ),
    )


def two_column_legend(
    parts: Sequence[Segment], links: Mapping[str, str] | None = None
) -> list[Any]:
    """Draw the legend of parts of one kind in two columns."""
    half_count = (len(parts) + 1) // 2
    return [
        bar_legend("", half, links) for half in (parts[:half_count], parts[half_count:]) if half
    ]


MIN_LINKED_SHARE = 0.025
"""Smallest share of the bar that is a link. The legend has links for narrower parts."""


def draw_strip(
    parts: Sequence[Segment],
    label: str,
    *,
    thin: bool = False,
    links: Mapping[str, str] | None = None,
) -> Any:
    """Draw the bar without a legend. Screen readers get one image with all shares, or the links.

    A part and its line of the legend are highlighted together (assets/shell.js)."""
    description = ", ".join(f"{part.label} {part.share_text}" for part in parts)
    part_elements = []
    for part in parts:
        tooltip = f"{part.name}: {part.time}, {part.share_text}"
        style = {"flex": f"{max(part.share, 0.0):.6f} 1 0", "backgroundColor": part.look.colour}
        cls = f"part-{part.key}{' idle' * (part.kind == 'idle')}"
        href = (links or {}).get(part.key)
        if href is None or part.share < MIN_LINKED_SHARE:
            part_elements.append(element("Span", cls=cls, style=style, title=tooltip))
        else:
            hidden_label = element("Span", tooltip, cls="visually-hidden")
            link_id = {"fix_link": f"part-{part.key}"}
            part_elements.append(
                link(hidden_label, href=href, cls=cls, style=style, title=tooltip, id=link_id)
            )
    return element(
        "Div",
        *part_elements,
        cls="bar thin" if thin else "bar",
        role="group" if links else "img",
        aria_label=label if links else f"{label}: {description}",
    )


def bar_legend(title: str, parts: Sequence[Segment], links: Mapping[str, str] | None = None) -> Any:
    """Draw a table of the parts with time and share. Names link to the same address as the bar."""

    def part_label(part: Segment) -> Any:
        href = (links or {}).get(part.key)
        return link(part.label, href=href) if href else part.label

    rows = [
        element(
            "Tr",
            element("Th", swatch(part.look.colour), part_label(part), scope="row"),
            element("Td", part.time, cls="num"),
            element("Td", part.share_text, cls="num share"),
            cls=f"part-{part.key}",
        )
        for part in parts
    ]
    return element("Table", element("Caption", title) if title else None, element("Tbody", *rows))


MAX_RANK_LINKS = 8
RANK_SELECT_ID = "rank-select"


def rank_selector(view: PageView, path: str) -> Any:
    """Build links or a list to select a rank, or ``None`` if there is only one."""
    numbers = list(view.loaded.analyses)
    if len(numbers) < 2:
        return None
    current = view.rank if view.rank is not None else numbers[0]
    if len(numbers) <= MAX_RANK_LINKS:
        return choice_links(
            "Rank", [(str(n), view.href(path, rank=n), n == current) for n in numbers]
        )
    select: Any = dmc.Select
    rank_select = select(
        id=RANK_SELECT_ID,
        data=[{"value": str(n), "label": f"rank {n}"} for n in numbers],
        value=str(current),
        searchable=True,
        allowDeselect=False,
        nothingFoundMessage="No such rank",
        w=180,
        size="sm",
        **{"aria-label": "Rank"},
    )
    return element("Div", rank_select, cls="choices")


def register_rank_selector(app: dash.Dash) -> None:
    """Register the browser callback that puts the selected rank into the address."""
    app.clientside_callback(
        ClientsideFunction("advisor", "chooseRank"),
        Output("_pages_location", "search"),
        Input(RANK_SELECT_ID, "value"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
