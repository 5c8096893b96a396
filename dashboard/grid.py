"""Tables of thousands of rows: AG Grid, sorted and filtered in the browser."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import dash
import dash_ag_grid
from dash import ClientsideFunction, Input, Output, State, dcc

from advisor.core import text as t
from advisor.core.labels import clean, distinct_labels
from advisor.dashboard.components import element, remark

GRID_THEME = """{
    backgroundColor: 'var(--card)', foregroundColor: 'var(--text)', borderColor: 'var(--line)',
    headerBackgroundColor: 'var(--card)', headerTextColor: 'var(--dim)',
    rowHoverColor: 'var(--sunk)', selectedRowBackgroundColor: 'var(--accent-soft)',
    accentColor: 'var(--accent)', fontFamily: 'inherit', fontSize: 13.5, headerFontWeight: 540,
    headerFontSize: 12.5, wrapperBorderRadius: 9, cellHorizontalPadding: 11, rowBorder: true,
    headerColumnResizeHandleColor: 'transparent', wrapperBorder: true, browserColorScheme: 'inherit'
}"""
"""AG Grid theme parameters. They use the page's CSS variables, so the grid follows the theme."""


LABEL_LENGTHS: Final = (14, 30, 44, 66)
"""Lengths of a name's labels, characters. assets/parts.css shows the longest one that fits."""


DURATION_WIDTH_PX: Final = 76
"""Width of a column that shows a duration, pixels."""

Formatter = Callable[[float | None], str]


class Column(NamedTuple):
    """Column of a grid.

    A column of numbers is sorted by ``field`` and shows ``field_text``. A column of names is
    searched and sorted by ``field``, the whole name, and shows one label of ``field_short``."""

    field: str
    title: str
    width: int | None = None
    flex: int | None = None
    number_format: Formatter | bool = False
    """Formatter of a column of numbers; ``True`` if the rows already have ``field_text``."""
    is_name: bool = False
    csv_title: str | None = None
    """Title of the column in the CSV, with the unit: ``Time, ns``. The default is ``title``."""


def duration_column(field: str, title: str, width: int) -> Column:
    """Build a column of durations, ns."""
    return Column(field, title, width, number_format=t.format_duration, csv_title=f"{title}, ns")


def share_column(field: str, title: str, width: int) -> Column:
    """Build a column of shares, 0 to 1."""
    return Column(field, title, width, number_format=t.format_share, csv_title=f"{title}, 0 to 1")


def grid_rows(
    columns: Sequence[Column], values: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Build the rows of a grid, with the text of each number and the labels of each name.

    A number that was not measured is shown as a dash."""
    rows: list[dict[str, Any]] = []
    for index, record in enumerate(values):
        row: dict[str, Any] = {"id": str(index)}
        for column in columns:
            value = record[column.field]
            row[column.field] = value
            if callable(column.number_format):
                text = column.number_format(value)
                row[f"{column.field}_text"] = t.EMPTY_CELL if text == t.NOT_MEASURED else text
            else:
                row[column.field] = t.format_cell(value, clean)
        rows.append(row)
    for column in columns:
        if column.is_name:
            add_labels(rows, column.field)
    return rows


def add_labels(rows: list[dict[str, Any]], field: str) -> None:
    """Add the labels of a column of names, ``field_short``; different names differ in them."""
    names = [row[field] for row in rows]
    for row, *labels in zip(
        rows, *(distinct_labels(names, size) for size in LABEL_LENGTHS), strict=True
    ):
        row[f"{field}_short"] = labels


def grid(
    id: str,  # noqa: A002
    columns: Sequence[Column],
    rows: list[dict[str, Any]],
    *,
    height: int,
    label: str,
) -> Any:
    """Build a grid with a search field and a CSV button. One row can be selected.

    Columns without any value are left out and listed below the grid."""
    ag_grid: Any = dash_ag_grid.AgGrid
    unmeasured = [column for column in columns if rows and not _is_measured(column, rows)]
    columns = [column for column in columns if column not in unmeasured]
    keeps_width = any(column.flex is not None for column in columns)  # else all share the width
    height_css = f"{min(height, 44 + 37 * max(len(rows), 1))}px"
    table = ag_grid(
        id=id,
        rowData=rows,
        columnDefs=[_column_definition(column, keeps_width=keeps_width) for column in columns],
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
            # Tab stops once in the header and once in the cells; arrow keys move between them
            "tabToNextCell": {"function": "false"},
            "tabToNextHeader": {"function": "false"},
            "theme": {"function": f"themeQuartz.withParams({GRID_THEME})"},
        },
        style={"height": height_css, "width": "100%"},
        className="grid",
        # instead of "flex" per column: with that, a grid below the fold that is shown again stays
        # without cells until the user scrolls to it
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
        element("Div", table, role="region", aria_label=label, style={"minHeight": height_css}),
        remark(
            f"Not measured: {', '.join(column.title for column in unmeasured)}."
            if unmeasured
            else ""
        ),
        cls="with-search",
    )


def _is_measured(column: Column, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a column has a value in any row."""
    texts = {row.get(f"{column.field}_text", row[column.field]) for row in rows}
    return not texts <= {t.EMPTY_CELL, t.NOT_MEASURED, None, ""}


def search_field(id: str, label: str, cls: str = "search") -> Any:  # noqa: A002
    """Build a search field for the rows of a table or grid."""
    search_input: Any = dcc.Input
    return element(
        "Label",
        element("Span", f"Search: {label}", cls="visually-hidden"),
        search_input(id=id, type="search", placeholder="Search", debounce=False, className=cls),
    )


def register_search(app: dash.Dash, id: str) -> None:  # noqa: A002
    """Register the browser callback by which the search field filters the grid."""
    app.clientside_callback(
        ClientsideFunction("advisor", "quickFilter"),
        Output(id, "dashGridOptions"),
        Input(f"{id}-search", "value"),
        State(id, "dashGridOptions"),
        prevent_initial_call=True,
    )


def _column_definition(column: Column, *, keeps_width: bool) -> dict[str, Any]:
    """Build AG Grid's definition of a column.

    ``keeps_width``: columns with a width keep it, and the others share the rest."""
    definition: dict[str, Any] = {"field": column.field, "headerName": column.title}
    if column.flex is not None:  # shares the remaining width
        definition |= {"width": 130 * column.flex, "minWidth": 125 * column.flex}
    else:
        width = column.width or 130
        definition |= {
            "width": width,
            "minWidth": width if keeps_width else min(width, DURATION_WIDTH_PX),
        }
        definition |= {"maxWidth": width, "resizable": False} if keeps_width else {}
    if column.number_format:
        definition |= {
            "type": "rightAligned",
            "valueFormatter": {"function": f"params.data.{column.field}_text"},
            "sortingOrder": ["desc", "asc"],
            # the CSV has the number instead of the text
            "useValueFormatterForExport": False,
            "context": {"csv": column.csv_title or column.title},
        }
    else:
        definition["tooltipField"] = column.field
    if column.is_name:
        definition |= {"cellClass": "mono-cell", "cellRenderer": "AdvisorName"}
    return definition
