"""Tables of thousands of rows: AG Grid, sorted and filtered in the browser."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import dash
import dash_ag_grid
from dash import ClientsideFunction, Input, Output, State, dcc

from advisor.core import text as t
from advisor.core.labels import clean, distinct_labels
from advisor.dashboard.components import element, remark

PARAMS = """{
    backgroundColor: 'var(--card)', foregroundColor: 'var(--text)', borderColor: 'var(--line)',
    headerBackgroundColor: 'var(--card)', headerTextColor: 'var(--dim)',
    rowHoverColor: 'var(--sunk)', selectedRowBackgroundColor: 'var(--accent-soft)',
    accentColor: 'var(--accent)', fontFamily: 'inherit', fontSize: 13.5, headerFontWeight: 540,
    headerFontSize: 12.5, wrapperBorderRadius: 9, cellHorizontalPadding: 11, rowBorder: true,
    headerColumnResizeHandleColor: 'transparent', wrapperBorder: true, browserColorScheme: 'inherit'
}"""
"""Looks of the grid, by the page's own colours: they follow the theme."""


LENGTHS: Final = (14, 30, 44, 66)
"""Lengths of a name's labels, characters; assets/parts.css shows the longest that fits."""


NARROW: Final = 76
"""Width that a duration needs, pixels."""

Formatter = Callable[[float | None], str]


class Column(NamedTuple):
    """A column. One of numbers is sorted by ``field`` and shows ``field_text``; one of names is
    searched and sorted by ``field``, the whole name, and shows one of ``field_short``."""

    field: str
    title: str
    width: int | None = None
    flex: int | None = None
    number: Formatter | bool = False
    """Format of numbers in the column; ``True``: the rows have the texts."""
    names: bool = False
    csv: str | None = None
    """Head of the column in the CSV, where numbers have no unit of their own: ``Time, ns``;
    default: ``title``."""


def duration_column(field: str, title: str, width: int) -> Column:
    """Return a column of durations, ns."""
    return Column(field, title, width, number=t.format_duration, csv=f"{title}, ns")


def share_column(field: str, title: str, width: int) -> Column:
    return Column(field, title, width, number=t.format_share, csv=f"{title}, 0 to 1")


def grid_rows(
    columns: Sequence[Column], values: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Build rows of a grid: each number with its text, a dash where it was not measured, and names
    with their labels."""
    rows: list[dict[str, Any]] = []
    for number, record in enumerate(values):
        row: dict[str, Any] = {"id": str(number)}
        for column in columns:
            value = record[column.field]
            row[column.field] = value
            if callable(column.number):
                text = column.number(value)
                row[f"{column.field}_text"] = t.EMPTY_CELL if text == t.NOT_MEASURED else text
            else:
                row[column.field] = t.format_cell(value, clean)
        rows.append(row)
    for column in columns:
        if column.names:
            add_labels(rows, column.field)
    return rows


def add_labels(rows: list[dict[str, Any]], field: str) -> None:
    """Add labels of a column's names, ``field_short``: no two names of the table under one."""
    names = [row[field] for row in rows]
    for row, *labels in zip(rows, *(distinct_labels(names, size) for size in LENGTHS), strict=True):
        row[f"{field}_short"] = labels


def grid(
    id: str,  # noqa: A002
    columns: Sequence[Column],
    rows: list[dict[str, Any]],
    *,
    height: int,
    label: str,
) -> Any:
    """Build a grid of which one row can be selected (click, or space on the focused row). Columns
    that no row has a value for are named below it."""
    make: Any = dash_ag_grid.AgGrid
    empty = [column for column in columns if rows and not _is_measured(column, rows)]
    columns = [column for column in columns if column not in empty]
    fixed = any(column.flex is not None for column in columns)  # else all share the room
    room = f"{min(height, 44 + 37 * max(len(rows), 1))}px"
    made = make(
        id=id,
        rowData=rows,
        columnDefs=[_definition(column, fixed=fixed) for column in columns],
        defaultColDef={
            "sortable": True,
            "resizable": True,
            "minWidth": 58,
            "wrapHeaderText": True,
            "autoHeaderHeight": True,
        },
        getRowId="params.data.id",
        dashGridOptions={
            "rowSelection": {
                "mode": "singleRow",
                "checkboxes": False,
                "enableClickSelection": True,
            },
            "ensureDomOrder": True,
            "enableCellTextSelection": True,
            "suppressDragLeaveHidesColumns": True,
            "rowHeight": 36,
            "headerHeight": 40,
            "tooltipShowDelay": 400,
            # one stop of the Tab key for the heads and one for the cells; arrows move inside
            "tabToNextCell": {"function": "false"},
            "tabToNextHeader": {"function": "false"},
            "theme": {"function": f"themeQuartz.withParams({PARAMS})"},
        },
        style={"height": room, "width": "100%"},
        className="grid",
        # not by the columns' own "flex": a grid below the fold that is opened again waits with it,
        # without its cells, until somebody scrolls there
        columnSize="responsiveSizeToFit",
    )
    return element(
        "Div",
        element(
            "Div",
            search_field(f"{id}-search", label),
            element(
                "Button",
                "CSV",
                cls="button save-csv",
                type="button",
                title="Save what the table shows as CSV",
                data_grid=id,
                aria_label=f"Save as CSV: {label}",
            ),
            cls="actions",
        ),
        element("Div", made, role="region", aria_label=label, style={"minHeight": room}),
        remark(f"Not measured: {', '.join(column.title for column in empty)}." if empty else ""),
        cls="searched",
    )


def _is_measured(column: Column, rows: Sequence[Mapping[str, Any]]) -> bool:
    texts = {row.get(f"{column.field}_text", row[column.field]) for row in rows}
    return not texts <= {t.EMPTY_CELL, t.NOT_MEASURED, None, ""}


def search_field(id: str, label: str, cls: str = "search") -> Any:  # noqa: A002
    """Build the field for the text that rows are searched for."""
    search: Any = dcc.Input
    return element(
        "Label",
        element("Span", f"Search: {label}", cls="visually-hidden"),
        search(id=id, type="search", placeholder="Search", debounce=False, className=cls),
    )


def register_search(app: dash.Dash, id: str) -> None:  # noqa: A002
    """Let the field above a grid filter it, in the browser."""
    app.clientside_callback(
        ClientsideFunction("advisor", "quickFilter"),
        Output(id, "dashGridOptions"),
        Input(f"{id}-search", "value"),
        State(id, "dashGridOptions"),
        prevent_initial_call=True,
    )


def _definition(column: Column, *, fixed: bool) -> dict[str, Any]:
    """Define a column. ``fixed``: one with a width keeps it, because others take what is left."""
    made: dict[str, Any] = {"field": column.field, "headerName": column.title}
    if column.flex is not None:  # shares what the others leave
        made |= {"width": 130 * column.flex, "minWidth": 125 * column.flex}
    else:
        width = column.width or 130
        made |= {"width": width, "minWidth": width if fixed else min(width, NARROW)}
        made |= {"maxWidth": width, "resizable": False} if fixed else {}
    if column.number:
        made |= {
            "type": "rightAligned",
            "valueFormatter": {"function": f"params.data.{column.field}_text"},
            "sortingOrder": ["desc", "asc"],
            # the CSV has the number, not the text
            "useValueFormatterForExport": False,
            "context": {"csv": column.csv or column.title},
        }
    else:
        made["tooltipField"] = column.field
    if column.names:
        made |= {"cellClass": "mono-cell", "cellRenderer": "AdvisorName"}
    return made
